"""The drafter's side of decoding: what it knows of each text, and the blocks it drafts.

The reference appends a block's keys and values to its cache and crops them off again after the
pass.  Here the block never enters the cache, which leaves the same: the context of a text is one
token shorter than the text, everything but the pending anchor.

K target layers, R texts, B block size, H hidden size, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_fit.attention import Blocks, DenseSight
from dflash_fit.drafter import ContextKV, DFlashDraftModel, block_ids, block_positions
from dflash_fit.step import Frozen, layer_sights


class DraftContext:
    """The context of one text: every layer's keys and values, grown as the target reads."""

    def __init__(self, drafter: DFlashDraftModel, frozen: Frozen) -> None:
        self.drafter, self.frozen = drafter, frozen
        self.layers: ContextKV = []
        self.length = 0

    @torch.inference_mode()
    def extend(self, hidden: Tensor) -> None:
        """Append the states [K, n, H] of tokens that are committed and read."""
        end = self.length + hidden.shape[1]
        new = self.drafter.context(hidden, torch.arange(self.length, end, device=hidden.device))
        self.layers = join_contexts([self.layers, new]) if self.layers else new
        self.length = end


def join_contexts(contexts: Sequence[ContextKV]) -> ContextKV:
    """Contexts one behind the other, layer by layer."""
    return [
        (
            torch.cat([key for key, _ in pairs], dim=1),
            torch.cat([value for _, value in pairs], dim=1),
        )
        for pairs in zip(*contexts, strict=True)
    ]


@torch.inference_mode()
def block_logits(contexts: Sequence[DraftContext], anchor_tokens: Tensor) -> Tensor:
    """Logits [R, B - 1, V] of slots 1 .. B - 1 of the block behind each context, in one pass.

    The texts stand one behind the other like the documents of a training pack, so this is the
    training forward, and a text is not padded to the length of another.  (The dense mask covers
    all texts for every block: its cost grows with the square of R.)
    """
    drafter, frozen = contexts[0].drafter, contexts[0].frozen
    config, device = drafter.config, anchor_tokens.device
    lengths = torch.tensor([context.length for context in contexts], device=device)
    ends = lengths.cumsum(dim=0)
    blocks = Blocks(
        anchors=ends,  # the slot behind the text's last: whatever stands there is not seen
        starts=ends - lengths,
        valid=torch.ones_like(ends, dtype=torch.bool),
        context=sum(context.length for context in contexts),
        block_size=config.block_size,
    )
    ids = block_ids(anchor_tokens, block_size=config.block_size, mask_token_id=config.mask_token_id)
    rows = drafter(
        frozen.embedding[ids.flatten()],
        join_contexts([context.layers for context in contexts]),
        block_positions(lengths, block_size=config.block_size).flatten(),
        layer_sights(drafter, blocks, DenseSight.of),
    )
    return F.linear(rows, frozen.head)


def draft_blocks(contexts: Sequence[DraftContext], anchor_tokens: Tensor) -> Tensor:
    """Draft tokens [R, B - 1] behind the anchors [R]: of every slot the likeliest."""
    return block_logits(contexts, anchor_tokens).argmax(dim=-1)
