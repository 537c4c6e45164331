"""One drafter, written as each project writes it; and random drafters for the tiny target."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from reference import make_weights, small
from safetensors.torch import load_file, save_file

from dflash_fit.drafter import DrafterConfig
from dflash_fit.folder import write_drafter
from dflash_fit.speculators import to_speculators

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]

# The tiny target: 32 channels, 8 layers, 310 rows of embedding of which the tokenizer uses 306.
FOR_TINY = small(vocab_size=310, num_target_layers=8, mask_token_id=307, intermediate_size=64)
SLIDING_FOR_TINY = FOR_TINY | {
    "layer_types": ("sliding_attention", "full_attention"),
    "sliding_window": 6,
}


def random_folder(folder: Path, settings: Mapping[str, Any], *, seed: int = 7) -> Path:
    """A drafter folder of ours with random weights in bfloat16, and no record of any training."""
    weights = make_weights(settings, torch.Generator().manual_seed(seed))
    folder.mkdir(parents=True)
    write_drafter(folder, DrafterConfig(**settings), weights, {}, dtype=torch.bfloat16)
    return folder


def read(folder: Path) -> tuple[Config, Tensors]:
    config = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "model.safetensors")


def write(folder: Path, config: Config, tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def without(config: Config, *names: str) -> Config:
    return {name: value for name, value in config.items() if name not in names}


def z_lab(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Newer: the block size nested, rope by its new name."""
    return without(config, "block_size", "rope_theta", "rope_scaling", "torch_dtype"), tensors


def spec_forge(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Older: the block size at the top, rope by its old name."""
    nested = without(config["dflash_config"], "block_size")
    return without(config, "rope_parameters", "dtype") | {"dflash_config": nested}, tensors


def angel_slim(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """A class name of its own; the wrapper of its trainer in front of every name."""
    named = {f"draft_model.{name}": tensor for name, tensor in tensors.items()}
    return config | {"architectures": ["QwenDFlashDraftModel"]}, named


def nemo(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """A class name of its own; what the target's config has beside."""
    more = {"architectures": ["Qwen3DFlashDraftModel"], "use_cache": True, "eos_token_id": 2}
    return without(config, "rope_theta", "rope_scaling") | more, tensors


def model_optimizer(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """The module's name in front; causality always said, and nested."""
    nested = without(config["dflash_config"], "block_size") | {"causal": False}
    named = {f"dflash_module.{name}": tensor for name, tensor in tensors.items()}
    return without(config, "is_causal", "rope_parameters") | {"dflash_config": nested}, named


NAMINGS: dict[str, Callable[[Config, Tensors], tuple[Config, Tensors]]] = {
    "z-lab": z_lab,
    "SpecForge": spec_forge,
    "AngelSlim": angel_slim,
    "NeMo Automodel": nemo,
    "Model-Optimizer": model_optimizer,
}


def renamed(source: Path, out: Path, naming: str) -> Path:
    """The drafter of a folder of ours as another project would have written it."""
    return write(out, *NAMINGS[naming](*read(source)))


def as_speculators(
    source: Path, out: Path, drafter: DrafterConfig, copies: Mapping[str, torch.Tensor]
) -> Path:
    """As speculators writes it: it does not know the target's layers, and may keep its matrices."""
    value = without(
        to_speculators(drafter, dtype=torch.bfloat16, target="target"), "num_target_layers"
    )
    rows = drafter.vocab_size
    maps = {"d2t": torch.zeros(rows, dtype=torch.int64), "t2d": torch.ones(rows, dtype=torch.bool)}
    tensors = {**read(source)[1], **copies, **(maps if copies else {})}
    return write(out, value | {"architectures": ["DFlashSpeculator"]}, tensors)


def sharded(folder: Path, out: Path) -> Path:
    """The same folder with its weights in two files and an index."""
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    (out / "model.safetensors").unlink()
    names = sorted(tensors)
    index = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, out / file)
        index |= dict.fromkeys(part, file)
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return out
