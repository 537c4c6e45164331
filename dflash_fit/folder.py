"""A drafter on disk in the reference's format: config.json, model.safetensors, training.json.

11 * L + 3 unprefixed tensors, no embedding, no head.  Readers disagree on where some values
stand, so config.json says them in every place: the block size at the top and nested, rope in the
old and the new spelling, the dtype under both names.

Checkpoints are such folders, and so are exports; `published` reads those of other projects.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash_cache.errors import ConfigError
from dflash_fit.drafter import FULL, SLIDING, DFlashDraftModel, DrafterConfig
from dflash_fit.errors import DrafterError

CONFIG_FILE, WEIGHTS_FILE, TRAINING_FILE = "config.json", "model.safetensors", "training.json"
ARCHITECTURE = "DFlashDraftModel"
DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}

# Keys of config.json that a drafter's configuration has under the same name.
SHAPE = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "num_target_layers", "rms_norm_eps"),
    "max_position_embeddings",
)

SHIFTED = (
    "its labels are shifted by one (slot k drafts the token at a + k + 1, as DeepSpec and DSpark "
    "train), so read as a plain drafter it would accept almost nothing"
)
UNKNOWN = "a drafter with it is of a kind that this version does not compute"
# Keys of relatives and successors that change the mathematics but no tensor name, and why each is
# refused.  Read as a plain drafter, such a checkpoint would run and accept nothing.
OTHER_MATHEMATICS = {
    **dict.fromkeys(("shift_label", "sample_from_anchor"), SHIFTED),
    **dict.fromkeys(("markov_rank", "markov_head_type"), f"that is DSpark: {SHIFTED}"),
    **dict.fromkeys(
        ("enable_confidence_head", "use_confidence_head"), f"that is DSpark: {SHIFTED}"
    ),
    **dict.fromkeys(("conv_kernel_size", "conv_group_size"), f"that is DFlash2; {UNKNOWN}"),
    **dict.fromkeys(("selector_rank", "selector_top_k"), f"that is DFlash2; {UNKNOWN}"),
    **dict.fromkeys(("use_swa", "attention_sink_bias", "attention_value_scale"), UNKNOWN),
    **dict.fromkeys(("output_multiplier", "final_logit_softcapping"), UNKNOWN),
    **dict.fromkeys(("input_embedding_scale", "projector_type"), UNKNOWN),
    **dict.fromkeys(("attention_bias", "quantization_config"), UNKNOWN),
}
# Settings of those keys that do nothing: the name of the plain drafter, a factor of 1.
HARMLESS: dict[str, str | int] = {
    "projector_type": "dflash",
    **dict.fromkeys(("output_multiplier", "input_embedding_scale", "attention_value_scale"), 1),
}

# What kind of value a key holds wherever it stands; null is as good as absent.
SIZE, COUNT = "a whole number above 0", "a whole number of 0 or more"
NUMBER, OBJECT, FLAG = "a number", "an object", "true or false"
NAMES, LAYERS, OBJECTS = "a list of names", "a list of layers", "a list of objects"
KINDS = {
    **dict.fromkeys(SHAPE, SIZE),
    **dict.fromkeys(("block_size", "mask_token_id", "sliding_window", "swa_window_size"), COUNT),
    **dict.fromkeys(("max_window_layers", "draft_vocab_size", "target_hidden_size"), COUNT),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "initializer_range"), NUMBER),
    **dict.fromkeys(("dflash_config", "rope_parameters", "rope_scaling"), OBJECT),
    **dict.fromkeys(("transformer_layer_config", "speculators_config"), OBJECT),
    **dict.fromkeys(("architectures", "layer_types"), NAMES),
    **dict.fromkeys(("target_layer_ids", "aux_hidden_state_layer_ids"), LAYERS),
    "proposal_methods": OBJECTS,
    **dict.fromkeys(("is_causal", "causal", "use_sliding_window", "use_swa"), FLAG),
    "sliding_window_non_causal": FLAG,
}
TYPES: dict[str, type | tuple[type, ...]] = {
    SIZE: int,
    COUNT: int,
    NUMBER: (int, float),
    OBJECT: dict,
    NAMES: str,
    LAYERS: int,
    OBJECTS: dict,
    FLAG: bool,
}
LEAST = {SIZE: 1, COUNT: 0}


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
    """Read a config.json of any of the reference's spellings."""
    dflash = value.get("dflash_config") or {}
    architectures = value.get("architectures", [])
    if ARCHITECTURE not in architectures:
        raise DrafterError(f"{where}: architectures {architectures}, want {ARCHITECTURE}")
    refuse_other_mathematics(value, dflash, where=where)

    def need(key: str, *places: Mapping[str, Any]) -> Any:
        for place in places:
            if place.get(key) is not None:
                return place[key]
        raise DrafterError(f"{where}: {key} is missing; is this a DFlash drafter?")

    layers = int(need("num_hidden_layers", value))
    said = {
        **{name: need(name, value) for name in SHAPE},
        "target_layer_ids": tuple(need("target_layer_ids", dflash)),
        "block_size": agreed("block_size", dflash, value, where=where),
        "mask_token_id": need("mask_token_id", dflash),
        "rope_theta": rope_theta_of(value, where=where),
        "layer_types": layer_types_of(value, layers=layers),
        "sliding_window": value.get("sliding_window"),
        "is_causal": _first(value.get("is_causal"), dflash.get("is_causal"), dflash.get("causal")),
        "initializer_range": value.get("initializer_range", 0.02),
    }
    try:
        config = DrafterConfig(**said)
    except ConfigError as error:
        raise DrafterError(f"{where}: {error}") from None
    refuse_bad_numbers(config, where=where)
    return config


def refuse_bad_numbers(config: DrafterConfig, *, where: str) -> None:
    """A block without drafts, and target layers that the target does not have."""
    if config.block_size < 2:
        raise DrafterError(f"{where}: block_size = {config.block_size}, want 2 or more")
    ids, layers = config.target_layer_ids, config.num_target_layers
    if not ids or not all(0 <= i < layers for i in ids):
        raise DrafterError(
            f"{where}: target_layer_ids = {list(ids)} of num_target_layers = {layers}: want some "
            f"from 0 to {layers - 1} (num_target_layers counts the target's layers, not those read)"
        )


def layer_types_of(value: Mapping[str, Any], *, layers: int) -> tuple[str, ...]:
    """The kind of each layer; where it is not said, by Qwen3's older pair of keys."""
    if value.get("layer_types"):
        return tuple(value["layer_types"])
    slides = value.get("use_sliding_window") and value.get("sliding_window")
    first = value.get("max_window_layers", layers) if slides else layers
    return tuple(SLIDING if i >= first else FULL for i in range(layers))


def agreed(key: str, *places: Mapping[str, Any], where: str) -> Any:
    """What stands in one place or in several; readers differ in where they look."""
    found = [place[key] for place in places if place.get(key) is not None]
    if not found:
        raise DrafterError(f"{where}: {key} is missing; is this a DFlash drafter?")
    if any(other != found[0] for other in found):
        raise DrafterError(
            f"{where}: says {key} = {found[0]} in one place and {found[1]} in another, and servers "
            "differ in which they believe; correct it"
        )
    return found[0]


def rope_theta_of(value: Mapping[str, Any], *, where: str) -> float:
    """The base of plain rotary embedding; any other rotary embedding is refused by name."""
    parameters = value.get("rope_parameters") or {}
    scaling = value.get("rope_scaling") or {}
    for place in (parameters, scaling):
        kind = place.get("rope_type", place.get("type", "default"))
        if kind not in (None, "default"):
            raise DrafterError(f"{where}: rotary embedding of type {kind!r}; {UNKNOWN}")
        if any(isinstance(setting, dict) for setting in place.values()):
            raise DrafterError(
                f"{where}: another rotary embedding for each kind of layer; {UNKNOWN}"
            )
    for place in (value, parameters, scaling):
        if place.get("partial_rotary_factor") not in (None, 1):
            share = place["partial_rotary_factor"]
            raise DrafterError(f"{where}: partial_rotary_factor = {share}; {UNKNOWN}")
    return float(agreed("rope_theta", parameters, value, scaling, where=where))


def refuse_other_mathematics(*places: Mapping[str, Any], where: str) -> None:
    """Refuse, by name and with the reason, what this drafter does not compute."""
    for place in places:
        for key, reason in OTHER_MATHEMATICS.items():
            setting = place.get(key)
            if setting is not None and not is_harmless(key, setting):
                raise DrafterError(f"{where}: {key} = {setting}; {reason}")
        if place.get("hidden_act", "silu") != "silu":
            raise DrafterError(f"{where}: hidden_act = {place['hidden_act']}; {UNKNOWN}")


def is_harmless(key: str, setting: Any) -> bool:
    """Whether a setting of a key of `OTHER_MATHEMATICS` leaves the mathematics as they are."""
    if key == "markov_rank":
        return False  # DeepSpec's DFlash says 0, and its labels are shifted all the same
    # A factor of 1 does nothing; True equals 1 and does something.
    if isinstance(setting, bool):
        return not setting  # True equals 1 and does something
    return bool(setting == 0 or (key in HARMLESS and setting == HARMLESS[key]))


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
    write_json(folder / CONFIG_FILE, to_config(drafter_config, dtype=dtype))
    write_json(folder / TRAINING_FILE, training)
    write_weights(folder / WEIGHTS_FILE, tensors, dtype=dtype)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(value), indent=2) + "\n")


def write_weights(path: Path, tensors: Mapping[str, Tensor], *, dtype: torch.dtype) -> None:
    weights = {n: t.detach().to("cpu", dtype).contiguous().clone() for n, t in tensors.items()}
    save_file(weights, path, metadata={"format": "pt"})


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a drafter of this configuration has."""
    with torch.device("meta"):
        model = DFlashDraftModel(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def read_drafter(folder: Path, *, dtype: torch.dtype, device: torch.device) -> DFlashDraftModel:
    """Load a drafter folder; any missing, unexpected or wrong-shaped tensor is an error."""
    config = read_drafter_config(folder)
    path = folder / WEIGHTS_FILE
    tensors = read_tensors(path)
    refuse_wrong_tensors(path, {n: tuple(t.shape) for n, t in tensors.items()}, config)
    drafter = DFlashDraftModel(config)
    drafter.load_state_dict(tensors, strict=True)
    return drafter.to(device, dtype).eval().requires_grad_(False)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, as it is stored."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DrafterError(f"{path}: cannot be read ({str(error)[:200]})") from None


def read_drafter_config(folder: Path) -> DrafterConfig:
    return from_config(read_json(folder), where=str(folder / CONFIG_FILE))


def read_json(folder: Path) -> dict[str, Any]:
    """config.json of a drafter folder, whatever it says."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise DrafterError(f"{folder}: no config.json; give a run, a checkpoint or an export")
    try:
        value = json.loads(path.read_text())
    except ValueError:
        raise DrafterError(f"{path}: broken JSON") from None
    if not isinstance(value, dict):
        raise DrafterError(f"{path}: holds no JSON object; is this a DFlash drafter?")
    refuse_wrong_kinds(value, where=str(path))
    return value


def refuse_wrong_kinds(value: Mapping[str, Any], *, where: str) -> None:
    """Values of another kind than their key holds, at any depth."""
    for key, setting in value.items():
        kind = KINDS.get(key)
        if kind is not None and setting is not None and not is_of_kind(setting, kind):
            raise DrafterError(f"{where}: {key} = {setting!r}, want {kind}")
        for inner in setting if isinstance(setting, list) else [setting]:
            if isinstance(inner, dict):
                refuse_wrong_kinds(inner, where=where)


def is_of_kind(setting: Any, kind: str) -> bool:
    if (kind in (NAMES, LAYERS, OBJECTS)) != isinstance(setting, list):
        return False
    wanted = TYPES[kind]
    # To Python a bool is an int as well.
    right = all(
        isinstance(one, wanted) and (wanted is bool or not isinstance(one, bool))
        for one in (setting if isinstance(setting, list) else [setting])
    )
    return right and (kind not in LEAST or setting >= LEAST[kind])


def read_training(folder: Path) -> dict[str, Any]:
    """How this drafter was trained; empty for a drafter that is not from here."""
    path = folder / TRAINING_FILE
    try:
        value: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError:
        raise DrafterError(f"{path}: broken JSON; remove it, or export again") from None
    if not isinstance(value, dict):
        raise DrafterError(f"{path}: holds no JSON object; remove it, or export again")
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
