"""Who may see whom: the one predicate, and the dense way to attend by it.

Keys are the T context slots followed by the A * B block slots; queries are the block slots.
The context of an anchor ends strictly before it: when serving, the anchor is the token that the
target has just sampled and not yet read, so its state does not exist (SpecForge#473).

The dense way is the oracle, and what runs on a CPU.  `tiles` (flex attention) and `block_kernel`
(our own kernels) see exactly the same and need no mask of every pair.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional as F

KeysValues = tuple[Tensor, Tensor]  # each [kv heads, slots, d]


@dataclass(frozen=True, kw_only=True)
class Visibility:
    """How a drafter layer looks: its window on the context, and whether its block is causal."""

    window: int | None
    causal: bool


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Where A blocks of B slots stand over T slots of context."""

    anchors: Tensor  # int64 [A]: the valid ones ascending, the others behind them at position 0
    starts: Tensor  # int64 [A], the first slot of the anchor's document
    valid: Tensor  # bool [A]
    context: int  # T
    block_size: int  # B

    @property
    def slots(self) -> int:
        return len(self.anchors) * self.block_size


class Sight(Protocol):
    """What layers of one look see of some blocks, ready to attend with."""

    def attend(self, query: Tensor, context: KeysValues, own: KeysValues) -> Tensor:
        """Attention of query [heads, A * B, d] over context [.., T, d] and own [.., A * B, d].

        Heads share keys and values in groups; a row that sees nothing (an invalid block) gives
        zeros, and no NaN on the way back.
        """
        ...


SightMaker = Callable[[Blocks, Visibility], Sight]


def visible(query: Tensor, key: Tensor, blocks: Blocks, look: Visibility) -> Tensor:
    """Whether block slot `query` sees `key`; both are indices that broadcast.

    In a window of W, slot k at anchor a sees context from a + k - (W - 1) on, as the servers do;
    the window has no lower bound inside the block.
    """
    block, slot = query // blocks.block_size, query % blocks.block_size
    anchor = blocks.anchors[block]
    # The anchor is below T, so this implies that the key is one of the context.
    in_context = (key < anchor) & (key >= blocks.starts[block])
    if look.window is not None:
        in_context = in_context & (key >= anchor + slot - (look.window - 1))
    other = key - blocks.context
    in_block = (other >= 0) & (other // blocks.block_size == block)
    if look.causal:
        in_block = in_block & (other % blocks.block_size <= slot)
    return blocks.valid[block] & (in_context | in_block)


def dense_mask(blocks: Blocks, look: Visibility) -> Tensor:
    """The predicate for all pairs: bool [A * B, T + A * B]."""
    device = blocks.anchors.device
    query = torch.arange(blocks.slots, device=device)[:, None]
    key = torch.arange(blocks.context + blocks.slots, device=device)[None, :]
    return visible(query, key, blocks, look)


@dataclass(frozen=True, kw_only=True)
class DenseSight:
    """A mask of every pair: [A * B, T + A * B]."""

    mask: Tensor

    @classmethod
    def of(cls, blocks: Blocks, look: Visibility) -> Self:
        return cls(mask=dense_mask(blocks, look))

    def attend(self, query: Tensor, context: KeysValues, own: KeysValues) -> Tensor:
        repeat = query.shape[0] // own[0].shape[0]
        key, value = (
            torch.cat(pair, dim=1).repeat_interleave(repeat, dim=0)
            for pair in zip(context, own, strict=True)
        )
        sees = self.mask.any(dim=-1, keepdim=True)
        out = F.scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=(self.mask | ~sees)[None, None]
        )[0]
        return out * sees
