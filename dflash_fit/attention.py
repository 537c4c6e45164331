"""Who may see whom: the one predicate, and the dense mask and attention made from it.

Keys are the T context slots followed by the A * B block slots; queries are the block slots.
The context of an anchor ends strictly before it: when serving, the anchor is the token that the
target has just sampled and not yet read, so its state does not exist (SpecForge#473).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class Visibility:
    """How a drafter layer looks: its window on the context, and whether its block is causal."""

    window: int | None
    causal: bool


def visible(
    query: Tensor,
    key: Tensor,
    *,
    anchors: Tensor,
    starts: Tensor,
    valid: Tensor,
    context: int,
    block_size: int,
    look: Visibility,
) -> Tensor:
    """Whether block slot `query` sees `key`; both are indices that broadcast.

    `anchors`, `starts` (first slot of the anchor's document) and `valid` are per block; `context`
    is T.  In a window of W, slot k at anchor a sees context from a + k - (W - 1) on, as the
    servers do; the window has no lower bound inside the block.
    """
    block, slot = query // block_size, query % block_size
    anchor = anchors[block]
    in_context = (key < anchor) & (key >= starts[block])  # anchor < T, so this implies context
    if look.window is not None:
        in_context = in_context & (key >= anchor + slot - (look.window - 1))
    other = key - context
    in_block = (other >= 0) & (other // block_size == block)
    if look.causal:
        in_block = in_block & (other % block_size <= slot)
    return valid[block] & (in_context | in_block)


def dense_mask(
    anchors: Tensor,
    starts: Tensor,
    valid: Tensor,
    *,
    context: int,
    block_size: int,
    look: Visibility,
) -> Tensor:
    """The predicate for all pairs: bool [A * B, T + A * B]."""
    queries = len(anchors) * block_size
    query = torch.arange(queries, device=anchors.device)[:, None]
    key = torch.arange(context + queries, device=anchors.device)[None, :]
    return visible(
        query,
        key,
        anchors=anchors,
        starts=starts,
        valid=valid,
        context=context,
        block_size=block_size,
        look=look,
    )


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention of query [heads, Q, d] over key, value [kv heads, S, d] under mask [Q, S].

    A row that sees nothing (an invalid block) gives zeros, and no NaN on the way back.
    """
    repeat = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(repeat, dim=0), value.repeat_interleave(repeat, dim=0)
    sees = mask.any(dim=-1, keepdim=True)
    out = F.scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=(mask | ~sees)[None, None]
    )[0]
    return out * sees
