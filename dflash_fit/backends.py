"""Which of the ways to attend a run takes.  All of them see the same; each has its place.

`block`: our Triton kernels, for one known structure; the fastest on Hopper.
`flex`:  torch's flex attention with our tile tables; only inside torch.compile.
`dense`: a mask of every pair; the oracle, and the CPU's.
"""

import torch

from dflash_cache.errors import ConfigError
from dflash_fit.attention import DenseSight, SightMaker
from dflash_fit.drafter import DrafterConfig


def chosen(attention: str, device: torch.device) -> str:
    """`auto` takes the kernels on a GPU and the dense mask elsewhere."""
    if attention == "auto":
        return "block" if device.type == "cuda" else "dense"
    return attention


def refuse_attention(
    attention: str,
    device: torch.device,
    drafter: DrafterConfig,
    *,
    dtype: torch.dtype,
    compiled: bool,
) -> None:
    """Say by the option what would only show in the first step."""
    way = chosen(attention, device)
    if way == "flex" and not compiled:
        raise ConfigError(
            "--attention flex: only inside a compiled step, which wants a GPU and no --step eager; "
            "drop the option"
        )
    if way == "block" and device.type != "cuda":
        raise ConfigError(f"--attention block: our kernels want a GPU, not {device}; drop it")
    if way == "block":
        from dflash_fit.block_attention import refuse_sizes

        refuse_sizes(
            drafter.head_dim,
            group=drafter.num_attention_heads // drafter.num_key_value_heads,
            block_size=drafter.block_size,
            itemsize=dtype.itemsize,
        )


def sight_maker(attention: str, device: torch.device) -> SightMaker:
    """The way of that name."""
    way = chosen(attention, device)
    # Imported where they are asked for: a CPU install has no Triton.
    match way:
        case "block":
            from dflash_fit.block_attention import BlockSight

            return BlockSight.of
        case "flex":
            from dflash_fit.tiles import FlexSight

            return FlexSight.of
    return DenseSight.of
