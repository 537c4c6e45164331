"""Begin a run with a published drafter: its weights, and its shape where no option says another.

Options that the weights' shapes depend on must agree with the folder.  Block size, window and mask
token change no shape: an option wins over the folder, and what is not said is the folder's.

A run that goes on takes its shape from its own newest checkpoint and never looks at the folder.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from dflash_cache.config import flag
from dflash_cache.errors import ConfigError
from dflash_cache.reader import Reader
from dflash_cache.vocabulary import refuse_bad_mask_token
from dflash_fit.checkpoint import checkpoints, find_drafter
from dflash_fit.config import BLOCK_SIZE, NUM_LAYERS, FitConfig
from dflash_fit.drafter import FULL, SLIDING, DrafterConfig
from dflash_fit.errors import DrafterError, FitError
from dflash_fit.folder import CONFIG_FILE, read_drafter_config, read_training
from dflash_fit.published import read_published, refuse_other_copies, weights_sha256

# Options that the weights' shapes depend on, and what they are called in a drafter's config.
SHAPES = {
    "num_layers": "num_hidden_layers",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "target_layers": "target_layer_ids",
}


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What a run begins with, or goes on with."""

    config: DrafterConfig
    tensors: Mapping[str, Tensor] | None  # None: the run has a checkpoint, which has them
    record: dict[str, Any]


def find_beginning(config: FitConfig, reader: Reader) -> Beginning | None:
    """The drafter of `--init-from`, checked against the cache and the options; None without one."""
    if config.init_from is None:
        return None
    own = checkpoints(config.out)
    if own:
        record = read_training(own[-1]).get("init_from", {})
        return Beginning(config=read_drafter_config(own[-1]), tensors=None, record=record)
    folder = find_drafter(config.init_from)
    found = read_published(folder, num_target_layers=reader.identity.target_spec.num_layers)
    refuse_other_target(found.config, reader, where=folder)
    refuse_other_shape(config, found.config)
    if found.copies:
        refuse_other_copies(found, *reader.frozen())
    return Beginning(
        config=with_options(config, found.config, reader),
        tensors=found.tensors,
        record=identity_of(folder, layout=found.layout),
    )


def settled(config: FitConfig, beginning: Beginning | None) -> FitConfig:
    """The options with the shape that they leave open."""
    if beginning is None:
        layers, block = NUM_LAYERS, BLOCK_SIZE
    else:
        layers, block = beginning.config.num_hidden_layers, beginning.config.block_size
    return replace(
        config,
        num_layers=config.num_layers or layers,
        block_size=config.block_size or block,
    )


def refuse_other_target(config: DrafterConfig, reader: Reader, *, where: Path) -> None:
    """Shapes and target layers must be those of the cache."""
    identity = reader.identity
    pairs = {
        "hidden_size": (config.hidden_size, identity.hidden_size),
        "vocab_size": (config.vocab_size, identity.target_spec.vocab_size),
        "num_target_layers": (config.num_target_layers, identity.target_spec.num_layers),
    }
    for name, (found, wanted) in pairs.items():
        if found != wanted:
            raise FitError(
                f"{where}: its {name} is {found}, that of the target in {reader.root} is {wanted}; "
                "give a drafter of this target"
            )
    absent = [i for i in config.target_layer_ids if i not in identity.target_layer_ids]
    if absent:
        raise FitError(
            f"{where}: reads target layers {list(config.target_layer_ids)}, {reader.root} holds "
            f"{identity.target_layer_ids}; rebuild the cache with --target-layers "
            f"{','.join(map(str, config.target_layer_ids))}"
        )


def refuse_other_shape(config: FitConfig, found: DrafterConfig) -> None:
    """An option that names another shape than the weights have."""
    for name, field in SHAPES.items():
        wanted, has = getattr(config, name), getattr(found, field)
        if wanted is not None and wanted != has:
            raise FitError(
                f"{flag(name)} {wanted}: the weights of {config.init_from} have {has}; drop the "
                "option, or --init-from"
            )


def with_options(config: FitConfig, found: DrafterConfig, reader: Reader) -> DrafterConfig:
    """The folder's drafter, and what options change of it."""
    changes: dict[str, Any] = {}
    if config.block_size is not None:
        changes["block_size"] = config.block_size
    if config.sliding_window is not None:
        changes["layer_types"] = sliding_layers(found.num_hidden_layers)
        changes["sliding_window"] = config.sliding_window
        changes["is_causal"] = None
    if config.mask_token_id is not None:
        changes["mask_token_id"] = config.mask_token_id
    changed = replace(found, **changes)
    refuse_unsafe_mask(changed, config, reader)
    return changed


def sliding_layers(count: int) -> tuple[str, ...]:
    """What `--sliding-window` means: all layers but the last."""
    return (SLIDING,) * (count - 1) + (FULL,)


def refuse_unsafe_mask(drafter: DrafterConfig, config: FitConfig, reader: Reader) -> None:
    """The folder's mask token must be as safe with this tokenizer as one that is chosen for it."""
    tokenizer = reader.identity.tokenizer_spec
    try:
        refuse_bad_mask_token(tokenizer, drafter.mask_token_id, embedding_rows=drafter.vocab_size)
    except ConfigError as error:
        if config.mask_token_id is not None:
            raise
        raise DrafterError(
            f"{config.init_from}: its mask token does not fit the cache's tokenizer ({error}); "
            "name another with --mask-token-id"
        ) from None


def identity_of(folder: Path, *, layout: str) -> dict[str, Any]:
    """What a run says about the drafter that it began with."""
    return {
        "folder": str(folder),
        "format": layout,
        "config_sha256": sha256((folder / CONFIG_FILE).read_bytes()).hexdigest(),
        "weights_sha256": weights_sha256(folder),
        "trained": {k: v for k, v in read_training(folder).items() if k != "exported"},
    }
