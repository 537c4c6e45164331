"""Tiny random targets of every supported family, as folders that look like published ones."""

import json
from pathlib import Path

import torch
from conftest import make_tokenizer
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from dflash_cache.survey import survey_target
from dflash_cache.target import Target
from dflash_cache.weights import load_weights

LAYERS = 6
TEXT = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
HEADS = {"head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Linear attention in all layers but every third: more of both kinds in few layers.
HYBRID = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    },
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
PLAIN = {
    "llama": HEADS,
    "qwen2": {},
    "qwen3": HEADS,
    "qwen3_moe": HEADS | EXPERTS,
}
WITH_VISION = {
    "qwen3_5": HYBRID,
    "qwen3_5_moe": HYBRID | EXPERTS | {"shared_expert_intermediate_size": 16},
}
FAMILIES = [*PLAIN, *WITH_VISION]


def save_family(folder: Path, family: str, **changes) -> Path:
    """A random target of a family in several files; of those that see, as published: saved from
    the class that sees, and with a head for further tokens beside it."""
    torch.manual_seed(0)
    text = TEXT | PLAIN.get(family, {}) | WITH_VISION.get(family, {}) | changes
    if family in PLAIN:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **text))
    else:
        config = AutoConfig.for_model(family, text_config=text, vision_config=VISION)
        model = AutoModelForImageTextToText.from_config(config)
    for weight in model.parameters():
        if weight.ndim == 1:  # norms of ones and biases of zeros would hide that they are missing
            weight.data += 0.05 * torch.randn_like(weight)
    model.save_pretrained(folder, max_shard_size="60KB")
    if family in WITH_VISION:
        add_tensors(folder, {"mtp.layers.0.mlp.up_proj.weight": torch.ones(4, 4)})
    make_tokenizer().save_pretrained(folder)
    return folder


def add_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """One more file of weights, named in the index."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    save_file(tensors, folder / "more.safetensors", metadata={"format": "pt"})
    index["weight_map"] |= dict.fromkeys(tensors, "more.safetensors")
    path.write_text(json.dumps(index))


def load(folder: Path, **more) -> Target:
    return load_weights(survey_target(str(folder), dtype="float32"), device="cpu", **more)


def some_ids(rows: int, width: int, *, seed: int = 1) -> torch.Tensor:
    return torch.randint(4, 300, (rows, width), generator=torch.Generator().manual_seed(seed))
