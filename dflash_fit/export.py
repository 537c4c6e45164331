"""The drafter on disk, as z-lab, SGLang and vLLM read it: config.json and model.safetensors.

11 * L + 3 unprefixed tensors, no embedding, no head.  Readers disagree on where some values
stand, so config.json says them in every place: the block size at the top and nested, rope in the
old and the new spelling, the dtype under both names.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash_cache import disk
from dflash_cache.errors import ConfigError
from dflash_fit.drafter import FULL, SLIDING, DFlashDraftModel, DrafterConfig
from dflash_fit.errors import DrafterError

ARCHITECTURE = "DFlashDraftModel"
# Keys of relatives and successors that change the mathematics but no tensor name.  Read as a
# plain drafter, such a checkpoint would run and accept nothing.
OTHER_MATHEMATICS = (
    *("use_swa", "projector_type", "shift_label", "sample_from_anchor", "attention_sink_bias"),
    *("attention_value_scale", "output_multiplier", "final_logit_softcapping"),
    *("input_embedding_scale", "conv_kernel_size", "selector_rank"),
)
DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def to_config(config: DrafterConfig, *, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a drafter."""
    sliding = SLIDING in config.layer_types
    causal = [config.look(i).causal for i in range(config.num_hidden_layers)]
    # One key cannot say "sliding layers causal, full ones not"; servers take that mixture as
    # the meaning of the absent key, and any other is said.
    by_kind = [kind == SLIDING for kind in config.layer_types]
    name = DTYPE_NAMES[dtype]
    dflash: dict[str, Any] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    value: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "num_target_layers": config.num_target_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "initializer_range": config.initializer_range,
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": config.num_hidden_layers,
        "layer_types": list(config.layer_types),
        "use_sliding_window": sliding,
        "sliding_window": config.sliding_window if sliding else None,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "block_size": config.block_size,
        "dflash_config": dflash,
        "dtype": name,
        "torch_dtype": name,
    }
    if len(set(causal)) == 1:
        value["is_causal"] = dflash["causal"] = causal[0]
    elif causal != by_kind:
        raise ConfigError(f"no key says this mixture of causal layers: {causal}")
    return value


def from_config(value: Mapping[str, Any], *, where: str) -> DrafterConfig:
    """Read a config.json of any of the spellings in the field."""
    dflash = value.get("dflash_config", {})
    architectures = value.get("architectures", [])
    if ARCHITECTURE not in architectures:
        raise DrafterError(f"{where}: architectures {architectures}, want {ARCHITECTURE}")
    refuse_other_mathematics(value, dflash, where=where)

    def need(key: str, *places: Mapping[str, Any]) -> Any:
        for place in places:
            if place.get(key) is not None:
                return place[key]
        raise DrafterError(f"{where}: {key} is missing; is this a DFlash drafter?")

    rope = value.get("rope_parameters") or {}
    layers = int(need("num_hidden_layers", value))
    return DrafterConfig(
        hidden_size=need("hidden_size", value),
        intermediate_size=need("intermediate_size", value),
        num_hidden_layers=layers,
        num_attention_heads=need("num_attention_heads", value),
        num_key_value_heads=need("num_key_value_heads", value),
        head_dim=need("head_dim", value),
        vocab_size=need("vocab_size", value),
        num_target_layers=need("num_target_layers", value),
        target_layer_ids=tuple(need("target_layer_ids", dflash)),
        block_size=need("block_size", dflash, value),
        mask_token_id=need("mask_token_id", dflash),
        rope_theta=float(need("rope_theta", rope, value)),
        rms_norm_eps=need("rms_norm_eps", value),
        max_position_embeddings=need("max_position_embeddings", value),
        layer_types=tuple(value.get("layer_types") or [FULL] * layers),
        sliding_window=value.get("sliding_window"),
        is_causal=_first(value.get("is_causal"), dflash.get("causal")),
        initializer_range=value.get("initializer_range", 0.02),
    )


def refuse_other_mathematics(*places: Mapping[str, Any], where: str) -> None:
    """Refuse, by name, what this drafter does not compute."""
    for place in places:
        for key in OTHER_MATHEMATICS:
            setting = place.get(key)
            # A factor of 1 does nothing; True equals 1 and does something.
            if setting is True or setting not in (None, False, 1):
                raise DrafterError(
                    f"{where}: {key} = {setting}; a drafter with it is of a kind that this "
                    "version does not compute"
                )


def _first(*values: bool | None) -> bool | None:
    """Precedence of causality, as vLLM's: top level, nested; None is by kind of layer."""
    return next((value for value in values if value is not None), None)


def write_drafter(
    folder: Path,
    drafter_config: DrafterConfig,
    tensors: Mapping[str, Tensor],
    training: Mapping[str, Any],
    *,
    dtype: torch.dtype,
) -> None:
    """Write config.json, model.safetensors and training.json into an existing folder."""
    config = to_config(drafter_config, dtype=dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "training.json").write_text(json.dumps(dict(training), indent=2) + "\n")
    weights = {n: t.detach().to("cpu", dtype).contiguous().clone() for n, t in tensors.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a drafter of this configuration has."""
    with torch.device("meta"):
        model = DFlashDraftModel(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def read_drafter(folder: Path, *, dtype: torch.dtype, device: torch.device) -> DFlashDraftModel:
    """Load a drafter folder; any missing, unexpected or wrong-shaped tensor is an error."""
    config = read_drafter_config(folder)
    path = folder / "model.safetensors"
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DrafterError(f"{path}: cannot be read ({str(error)[:200]})") from None
    refuse_wrong_tensors(path, {n: tuple(t.shape) for n, t in tensors.items()}, config)
    drafter = DFlashDraftModel(config)
    drafter.load_state_dict(tensors, strict=True)
    return drafter.to(device, dtype).eval().requires_grad_(False)


def read_drafter_config(folder: Path) -> DrafterConfig:
    path = folder / "config.json"
    if not path.is_file():
        raise DrafterError(f"{folder}: no config.json; give a run, a checkpoint or an export")
    try:
        value = json.loads(path.read_text())
    except ValueError:
        raise DrafterError(f"{path}: broken JSON") from None
    return from_config(value, where=str(path))


def read_training(folder: Path) -> dict[str, Any]:
    """How this drafter was trained; empty for a drafter that is not from here."""
    path = folder / "training.json"
    value: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return value


def refuse_wrong_tensors(
    path: Path, found: Mapping[str, tuple[int, ...]], config: DrafterConfig
) -> None:
    """Servers skip tensors that they do not know and leave missing ones random; we do not."""
    wanted = expected_shapes(config)
    missing, unknown = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    wrong = {n: (found[n], wanted[n]) for n in set(found) & set(wanted) if found[n] != wanted[n]}
    if missing or unknown or wrong:
        raise DrafterError(
            f"{path}: tensors do not fit config.json (missing {missing[:4]}, unexpected "
            f"{unknown[:4]}, wrong shape (found, wanted) {dict(list(wrong.items())[:4])})"
        )


def export_drafter(source: Path, out: Path) -> dict[str, Any]:
    """Copy a checkpoint as a serving folder in bfloat16, and read it back to check it.

    The folder appears only when the check has passed.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DrafterError(f"{out}: is there already; give --out a new folder")
    drafter = read_drafter(source, dtype=torch.bfloat16, device=torch.device("cpu"))
    tensors = drafter.state_dict()
    with disk.new_folder(out) as folder:
        write_drafter(folder, drafter.config, tensors, read_training(source), dtype=torch.bfloat16)
        check_export(folder, drafter)
    return {
        "out": str(out),
        "source": str(source),
        "tensors": len(tensors),
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "bytes": (out / "model.safetensors").stat().st_size,
        "block_size": drafter.config.block_size,
        "mask_token_id": drafter.config.mask_token_id,
        "target_layer_ids": list(drafter.config.target_layer_ids),
    }


def check_export(folder: Path, drafter: DFlashDraftModel) -> None:
    """Names, shapes, bits and configuration of a written folder equal the model in memory."""
    again = read_drafter(folder, dtype=torch.bfloat16, device=torch.device("cpu"))
    if again.config != drafter.config:
        raise DrafterError(f"{folder}: config.json reads back as another drafter")
    for name, tensor in drafter.state_dict().items():
        if not torch.equal(again.state_dict()[name], tensor):
            raise DrafterError(f"{folder}: tensor {name} reads back as other bits")
