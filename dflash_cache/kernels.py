"""Which kernels a target runs: of attention by choice, of linear attention by what is installed."""

import importlib
import os
import sys
from typing import Any

import torch
from tqdm import tqdm

from dflash_cache.errors import ConfigError
from dflash_cache.survey import first_line

# A hybrid target of 27B parameters on one H200: 9,050 tokens/s with the kernels, 6,300 without.
PRICE_WITHOUT_FLA = 1.4


def choose_attention(model: Any, wanted: str, *, device: torch.device, dtype: str) -> None:
    """Set the wanted implementation, or the best one that this family and machine have."""
    family = type(model)
    known = {
        "flash_attention_2": family._supports_flash_attn,
        "sdpa": family._supports_sdpa,
        "eager": True,
    }
    if wanted == "auto":
        fits = device.type == "cuda" and dtype == "bfloat16" and has_flash_attention()
        known["flash_attention_2"] &= fits
        wanted = next(name for name, there in known.items() if there)
    elif wanted not in known:
        raise ConfigError(f"--target-attention {wanted}: want auto, {', '.join(known)}")
    elif not known[wanted]:
        raise ConfigError(
            f"--target-attention {wanted}: {family.__name__} has only "
            f"{', '.join(name for name, there in known.items() if there)}"
        )
    elif wanted == "flash_attention_2":
        refuse_flash_attention_elsewhere(device, dtype)
    model.set_attn_implementation(wanted)
    if model.config._attn_implementation != wanted:
        raise ConfigError(
            f"--target-attention {wanted}: transformers keeps {family.__name__} on "
            f"{model.config._attn_implementation}; ask for that"
        )


def has_flash_attention() -> bool:
    from transformers.utils import is_flash_attn_2_available

    return bool(is_flash_attn_2_available())


def refuse_flash_attention_elsewhere(device: torch.device, dtype: str) -> None:
    """Its kernels are for GPUs and halved precision alone."""
    missing = [
        what
        for what, there in (
            ("a GPU", device.type == "cuda"),
            ("--target-dtype bfloat16", dtype == "bfloat16"),
            ("the package flash-attn", has_flash_attention()),
        )
        if not there
    ]
    if missing:
        raise ConfigError(
            f"--target-attention flash_attention_2: wants {' and '.join(missing)}; use sdpa"
        )


def warn_of_slow_layers(model: Any, name: str, *, device: torch.device) -> None:
    """Say once what a hybrid target loses on a GPU without the kernels of its linear attention."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
    first = os.environ.get("RANK", "0") == "0"  # of many workers one says it
    if "linear_attention" not in kinds or device.type != "cuda" or not first:
        return
    if why := why_no_fla():
        tqdm.write(
            f"{name}: its layers of linear attention run about {PRICE_WITHOUT_FLA} times slower "
            f"without flash-linear-attention ({why}); pip install 'dflash-toolkit[fla]'",
            file=sys.stderr,
        )


def why_no_fla() -> str | None:
    """Why transformers will not use flash-linear-attention; None where it will."""
    try:
        importlib.import_module("fla.ops.gated_delta_rule")
    except ModuleNotFoundError as error:
        return "not installed" if error.name == "fla" else first_line(error)
    except Exception as error:  # transformers passes over all of them in silence
        return first_line(error)
    return None
