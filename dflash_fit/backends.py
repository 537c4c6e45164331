"""Which of the ways to attend a run takes.  All of them see the same; each has its place.

`block`: our Triton kernels, for one known structure; the fastest on Hopper.
`flex`:  torch's flex attention with our tile tables; only inside torch.compile.
`dense`: a mask of every pair; the oracle, and the CPU's.
"""

import torch

from dflash_fit.attention import DenseSight, SightMaker

ATTENTIONS = ("auto", "block", "flex", "dense")


def sight_maker(attention: str, device: torch.device) -> SightMaker:
    """The way of that name; `auto` takes the kernels on a GPU and the dense mask elsewhere."""
    if attention == "auto":
        attention = "block" if device.type == "cuda" else "dense"
    # Imported where they are asked for: a CPU install has no Triton.
    match attention:
        case "block":
            from dflash_fit.block_kernel import BlockSight

            return BlockSight.of
        case "flex":
            from dflash_fit.tiles import FlexSight

            return FlexSight.of
    return DenseSight.of
