"""Which tiles of [A * B queries, T + A * B keys] are empty, partial or full, for flex attention.

A query sees two intervals of keys: some of the context and some of its own block.  So the tables
follow from comparing integers, about A * K of them, where `create_block_mask` evaluates every
pair.  All of it stays on the device and may be captured in a CUDA graph.

T context slots, A blocks of B slots, Q query tiles, K key tiles, P pieces: what the blocks of one
query tile have inside it.
"""

from dataclasses import dataclass
from math import gcd
from typing import Self

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash_fit.attention import Blocks, KeysValues, Visibility, visible

TILE = 128  # the default of flex attention, which its kernels' own sizes divide

Span = tuple[Tensor, Tensor]  # the first key and the one behind the last; empty if not ascending


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What need not be computed, and what needs no mask."""

    covered: Tensor  # bool [Q, K]: some pair of the tile is visible
    full: Tensor  # bool [Q, K]: every pair is, and none lies over the edge of queries or keys


def tile_tables(blocks: Blocks, look: Visibility, *, tile: int = TILE) -> Tables:
    """What `visible` says of whole tiles, exactly."""
    block, low, high = (x[:, :, None] for x in pieces(blocks, tile=tile))
    there = low <= high
    # The last query tile may hold slots behind the last block: as those of an invalid one.
    valid = (block < len(blocks.anchors)) & blocks.valid[within(block, blocks)]
    # Later slots see less of the context (a window moves) and more of their block (if causal).
    some = spans(block, blocks, look, back=low, ahead=high)
    every = spans(block, blocks, look, back=high, ahead=low)
    first = tile * torch.arange(tiles_in(keys_of(blocks), tile), device=block.device)
    touched = touches(some[0], first, tile) | touches(some[1], first, tile)
    # Key T - 1 is in no span (an anchor is below T), so the two never hold a tile together.
    held = holds(every[0], first, tile) | holds(every[1], first, tile)
    return Tables(
        covered=(there & valid & touched).any(dim=1),
        full=(~there | (valid & held)).all(dim=1),
    )


def pieces(blocks: Blocks, *, tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """Block, first slot and last slot of the pieces of each query tile: int64 [Q, P] each.

    Where a tile has fewer than P, those in excess have their first slot behind their last.
    """
    size, device = blocks.block_size, blocks.anchors.device
    most = tiles_in(tile + size - gcd(tile, size), size)
    first = tile * torch.arange(tiles_in(blocks.slots, tile), device=device)[:, None]
    block = first // size + torch.arange(most, device=device)
    before = first - block * size
    return block, before.clamp(min=0), (before + tile).clamp(max=size) - 1


def spans(
    block: Tensor, blocks: Blocks, look: Visibility, *, back: Tensor, ahead: Tensor
) -> tuple[Span, Span]:
    """The context that slot `back` of a block sees, and what slot `ahead` sees of the block."""
    known = within(block, blocks)
    anchor, begin = blocks.anchors[known], blocks.starts[known]
    if look.window is not None:
        begin = torch.maximum(begin, anchor + back - (look.window - 1))
    own = blocks.context + block * blocks.block_size
    return (begin, anchor), (own, own + (ahead + 1 if look.causal else blocks.block_size))


def touches(span: Span, first: Tensor, tile: int) -> Tensor:
    """Whether any key of the tile that begins at `first` is in the span."""
    begin, end = span
    return (begin < end) & (begin < first + tile) & (first < end)


def holds(span: Span, first: Tensor, tile: int) -> Tensor:
    """Whether all keys of the tile are; a tile over the edge is in no span."""
    begin, end = span
    return (begin <= first) & (first + tile <= end)


def within(block: Tensor, blocks: Blocks) -> Tensor:
    return block.clamp(max=len(blocks.anchors) - 1)


def keys_of(blocks: Blocks) -> int:
    return blocks.context + blocks.slots


def tiles_in(length: int, tile: int) -> int:
    return -(-length // tile)


# --- flex attention -----------------------------------------------------------------------------


def block_mask(blocks: Blocks, look: Visibility, *, tile: int = TILE) -> BlockMask:
    """The tables in both directions, with `visible` for the pairs of partial tiles."""
    tables = tile_tables(blocks, look, tile=tile)
    partial, full = tables.covered & ~tables.full, tables.full
    kv_num_blocks, kv_indices = ordered(partial)
    full_kv_num_blocks, full_kv_indices = ordered(full)
    q_num_blocks, q_indices = ordered(partial.T)
    full_q_num_blocks, full_q_indices = ordered(full.T)

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # Flex attention rounds lengths up to tiles: a query may lie behind the last slot, and its
        # block must not be looked up.  A key behind the last is of no block: nobody sees it.
        inside = query < blocks.slots
        return inside & visible(query.clamp(max=blocks.slots - 1), key, blocks, look)

    return BlockMask(
        seq_lengths=(blocks.slots, keys_of(blocks)),
        kv_num_blocks=kv_num_blocks,
        kv_indices=kv_indices,
        full_kv_num_blocks=full_kv_num_blocks,
        full_kv_indices=full_kv_indices,
        q_num_blocks=q_num_blocks,
        q_indices=q_indices,
        full_q_num_blocks=full_q_num_blocks,
        full_q_indices=full_q_indices,
        BLOCK_SIZE=(tile, tile),
        mask_mod=mask_mod,
    )


def ordered(table: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles each row of a table has, and which come first: int32 [1, 1, rows(, columns)].

    Behind the count come the other tiles, as flex attention itself has it.
    """
    chosen = table.int().contiguous()
    indices = chosen.argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(dim=-1, dtype=torch.int32)[None, None], indices.int()[None, None]


@dataclass(frozen=True, kw_only=True)
class FlexSight:
    """Tables of tiles and the predicate.  To be compiled: eager flex attention makes all pairs."""

    mask: BlockMask

    @classmethod
    def of(cls, blocks: Blocks, look: Visibility) -> Self:
        return cls(mask=block_mask(blocks, look))

    def attend(self, query: Tensor, context: KeysValues, own: KeysValues) -> Tensor:
        key, value = (torch.cat(pair, dim=1) for pair in zip(context, own, strict=True))
        return flex_attention(
            query[None], key[None], value[None], block_mask=self.mask, enable_gqa=True
        )[0]
