"""Read an export back as a stranger would: nothing of the writer is used here.

Servers skip tensors that they do not know, leave missing ones random, and take defaults for keys
that are absent, all without a word.  So everything that they read is checked: names, shapes, dtype
and bits of the tensors, and each value of config.json in every place where a server looks.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_fit.drafter import DrafterConfig
from dflash_fit.errors import DrafterError

STORED = torch.bfloat16
SLIDING = "sliding_attention"
CARD, CODE = "README.md", "dflash.py"
FILES = {"config.json", "model.safetensors", "training.json", CARD}


def check_export(
    folder: Path, drafter: DrafterConfig, tensors: Mapping[str, Tensor], *, format: str, code: bool
) -> None:
    """Raise unless the folder is complete, and says and holds exactly this drafter."""
    found = {path.name for path in folder.iterdir()}
    expect(folder, "files", found, FILES | ({CODE} if code else set()))
    value = json.loads((folder / "config.json").read_text())
    check_tensors(folder, drafter, tensors)
    CHECKS[format](folder, value, drafter)
    if code:
        expect(folder, "auto_map", value["auto_map"], {"AutoModel": "dflash.DFlashDraftModel"})
        compile((folder / CODE).read_text(), CODE, "exec")
    else:
        expect(folder, "auto_map", value.get("auto_map"), None)


def expect(folder: Path, what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise DrafterError(f"{folder}: {what} reads back as {found}, want {wanted}")


def check_tensors(folder: Path, drafter: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Names, shapes, dtype, bits; finite throughout."""
    stored = load_file(folder / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    wanted = tensor_shapes(drafter)
    for name in sorted(set(shapes) | set(wanted)):
        expect(folder, f"shape of {name}", shapes.get(name), wanted.get(name))
    for name, tensor in stored.items():
        expect(folder, f"dtype of {name}", tensor.dtype, STORED)
        if not bool(tensor.isfinite().all()):
            raise DrafterError(f"{folder}: {name} holds values that are not finite")
        if not torch.equal(tensor, tensors[name]):
            raise DrafterError(f"{folder}: tensor {name} reads back as other bits")


def tensor_shapes(drafter: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """The 11 * L + 3 tensors, written out: not taken from a model, which could be wrong alike."""
    hidden, wide, size = drafter.hidden_size, drafter.intermediate_size, drafter.head_dim
    query, shared = drafter.num_attention_heads * size, drafter.num_key_value_heads * size
    layer = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (shared, hidden),
        "self_attn.v_proj": (shared, hidden),
        "self_attn.o_proj": (hidden, query),
        "self_attn.q_norm": (size,),
        "self_attn.k_norm": (size,),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    features = len(drafter.target_layer_ids) * hidden
    return {
        **{
            f"layers.{i}.{name}.weight": shape
            for i in range(drafter.num_hidden_layers)
            for name, shape in layer.items()
        },
        "fc.weight": (hidden, features),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }


SHAPE_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings"),
)


def check_reference(folder: Path, value: Mapping[str, Any], drafter: DrafterConfig) -> None:
    """config.json as z-lab's code, SGLang and vLLM look into it."""
    nested = value["dflash_config"]
    check_top(folder, value, drafter)
    check_layers(folder, value, drafter)
    expect(folder, "rope_scaling", value["rope_scaling"], None)
    for place, name in ((value, "block_size"), (nested, "dflash_config.block_size")):
        expect(folder, name, place["block_size"], drafter.block_size)
    expect(folder, "torch_dtype", value["torch_dtype"], "bfloat16")
    expect(folder, "target_layer_ids", nested["target_layer_ids"], list(drafter.target_layer_ids))
    check_mask(folder, nested["mask_token_id"], drafter)
    # Readers take either key, and the kind of the layer where it is absent.
    for said in (value.get("is_causal"), nested.get("causal")):
        causal = [kind == SLIDING if said is None else said for kind in value["layer_types"]]
        expect(folder, "causality of the layers", causal, looks(drafter, "causal"))


def check_speculators(folder: Path, value: Mapping[str, Any], drafter: DrafterConfig) -> None:
    """config.json as vLLM translates it."""
    nested, plan = value["transformer_layer_config"], value["speculators_config"]
    for name, said in (
        ("speculators_model_type", value["speculators_model_type"]),
        ("algorithm", plan["algorithm"]),
    ):
        expect(folder, name, said, "dflash")
    check_top(folder, value, drafter)
    check_layers(folder, nested, drafter)
    expect(folder, "block_size", value["block_size"], drafter.block_size)
    drafted = plan["proposal_methods"][0]["speculative_tokens"]
    expect(folder, "speculative_tokens", drafted, drafter.block_size - 1)
    expect(folder, "draft_vocab_size", value["draft_vocab_size"], drafter.vocab_size)
    ids = [i - 1 for i in value["aux_hidden_state_layer_ids"]]
    expect(folder, "target layers", ids, list(drafter.target_layer_ids))
    check_mask(folder, value["mask_token_id"], drafter)
    expect(folder, "sample_from_anchor", value["sample_from_anchor"], False)
    expect(folder, "target_hidden_size", value["target_hidden_size"], None)
    # vLLM takes the one switch for all layers.
    causal = [not value["sliding_window_non_causal"]] * drafter.num_hidden_layers
    expect(folder, "causality of the layers", causal, looks(drafter, "causal"))


def check_top(folder: Path, value: Mapping[str, Any], drafter: DrafterConfig) -> None:
    """What both formats say at the top."""
    expect(folder, "architectures", value["architectures"], ["DFlashDraftModel"])
    expect(folder, "dtype", value["dtype"], "bfloat16")
    expect(folder, "tie_word_embeddings", value["tie_word_embeddings"], False)
    expect(folder, "num_target_layers", value["num_target_layers"], drafter.num_target_layers)


def check_layers(folder: Path, value: Mapping[str, Any], drafter: DrafterConfig) -> None:
    """What both formats say of the layers, in the words of Qwen3."""
    expect(folder, "model_type", value["model_type"], "qwen3")
    expect(folder, "hidden_act", value["hidden_act"], "silu")
    expect(folder, "attention_bias", value["attention_bias"], False)
    for name in SHAPE_KEYS:
        expect(folder, name, value[name], getattr(drafter, name))
    expect(folder, "rope_theta", value["rope_theta"], drafter.rope_theta)
    rope = {"rope_theta": drafter.rope_theta, "rope_type": "default"}
    expect(folder, "rope_parameters", value["rope_parameters"], rope)
    kinds, window = value["layer_types"], value["sliding_window"]
    expect(folder, "use_sliding_window", value["use_sliding_window"], SLIDING in kinds)
    windows = [window if kind == SLIDING else None for kind in kinds]
    expect(folder, "windows of the layers", windows, looks(drafter, "window"))
    if SLIDING not in kinds:
        expect(folder, "sliding_window", window, None)


def check_mask(folder: Path, found: int, drafter: DrafterConfig) -> None:
    expect(folder, "mask_token_id", found, drafter.mask_token_id)
    if not 0 <= found < drafter.vocab_size:
        raise DrafterError(f"{folder}: mask token {found} is no row of the target's embedding")


def looks(drafter: DrafterConfig, what: str) -> list[Any]:
    return [getattr(drafter.look(i), what) for i in range(drafter.num_hidden_layers)]


CHECKS: dict[str, Callable[[Path, Mapping[str, Any], DrafterConfig], None]] = {
    "dflash": check_reference,
    "speculators": check_speculators,
}
