"""`dflash export`: a drafter as a folder that servers and transformers load.

Written aside, read back by a reader that shares no code with the writer, and only then given its
name.  A run's checkpoint is exported, or a published drafter is written anew: so the speculators
format is left as well as entered.
"""

from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from dflash_cache import disk
from dflash_cache.errors import ConfigError
from dflash_cache.vocabulary import refuse_bad_mask_token
from dflash_fit.card import model_card
from dflash_fit.checkpoint import find_drafter
from dflash_fit.config import ExportConfig
from dflash_fit.drafter import DrafterConfig
from dflash_fit.errors import DrafterError
from dflash_fit.export_check import check_export
from dflash_fit.folder import (
    CONFIG_FILE,
    TRAINING_FILE,
    WEIGHTS_FILE,
    to_config,
    write_json,
    write_weights,
)
from dflash_fit.provenance import Provenance, provenance_of
from dflash_fit.published import read_published
from dflash_fit.speculators import to_speculators

CODE_FILE, CARD_FILE = "dflash.py", "README.md"
AUTO_MAP = {"AutoModel": "dflash.DFlashDraftModel"}
EXPORTED = torch.bfloat16


def export(config: ExportConfig) -> dict[str, Any]:
    """Write a serving folder in bfloat16, and check what was written.

    The folder appears only when the check has passed.
    """
    out = new_place(config.out)
    source = find_drafter(config.run, checkpoint=config.checkpoint)
    found = read_published(source)
    known = provenance_of(source)
    refuse_unsafe_mask(found.config, known)
    tensors = {name: tensor.to(EXPORTED) for name, tensor in found.tensors.items()}
    with disk.new_folder(out) as folder:
        write_json(folder / CONFIG_FILE, config_file(found.config, config, known))
        write_weights(folder / WEIGHTS_FILE, tensors, dtype=EXPORTED)
        write_json(folder / TRAINING_FILE, known.training)
        if has_code(config):
            (folder / CODE_FILE).write_text(code())
        card = model_card(found.config, known, serves=serves(config), name=out.name)
        (folder / CARD_FILE).write_text(card)
        check_export(folder, found.config, tensors, format=config.format, code=has_code(config))
    return {
        "out": str(out),
        "source": str(source),
        "format": config.format,
        "for": config.for_,
        "tensors": len(tensors),
        "left_out": sorted(found.copies),  # the target's own, which nothing here can compare
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "bytes": (out / WEIGHTS_FILE).stat().st_size,
        "block_size": found.config.block_size,
        "mask_token_id": found.config.mask_token_id,
        "target_layer_ids": list(found.config.target_layer_ids),
    }


def new_place(out: Path) -> Path:
    """Where to write, links followed; refuses what is there already."""
    out = out.resolve()
    taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if taken or out == Path.cwd():
        raise DrafterError(f"{out}: is there already; give --out a new folder")
    if any(parent.is_file() for parent in out.parents):
        raise DrafterError(f"{out}: a file is in its way; give --out a new folder")
    return out


def has_code(config: ExportConfig) -> bool:
    """Whether transformers is to load it, which has no drafters of its own."""
    return config.format == "dflash" and config.for_ in ("all", "transformers")


def serves(config: ExportConfig) -> tuple[str, ...]:
    """Who loads the folder."""
    if config.format == "speculators":
        return ("vllm",)
    return ("sglang", "vllm", "transformers") if config.for_ == "all" else (config.for_,)


def config_file(drafter: DrafterConfig, config: ExportConfig, known: Provenance) -> dict[str, Any]:
    """config.json of the chosen format."""
    if config.format == "speculators":
        return to_speculators(drafter, dtype=EXPORTED, target=known.target)
    value = to_config(drafter, dtype=EXPORTED)
    return {**value, "auto_map": AUTO_MAP} if has_code(config) else value


def code() -> str:
    """The model for transformers, which stands alone and is written beside the weights."""
    return (files("dflash_fit.serving") / CODE_FILE).read_text()


def refuse_unsafe_mask(drafter: DrafterConfig, known: Provenance) -> None:
    """Text must never hold the mask token: checked where the target's tokenizer is known."""
    if known.tokenizer is None:
        return
    rows = drafter.vocab_size
    try:
        refuse_bad_mask_token(known.tokenizer, drafter.mask_token_id, embedding_rows=rows)
    except ConfigError as error:
        raise DrafterError(
            f"{known.source}: its mask token cannot be served ({error}); train again with another "
            "one"
        ) from None
