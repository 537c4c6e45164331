"""Offline acceptance of one text that no cache holds: its states come from the target itself."""

import torch

from dflash_cache.target import Target
from dflash_fit.acceptance import Chain, leading_true, walk
from dflash_fit.batch import Batch, BatchShape
from dflash_fit.drafter import DFlashDraftModel
from dflash_fit.offline import slots_right
from dflash_fit.step import Frozen, Pieces

ANCHOR_GROUP = 64


@torch.inference_mode()
def offline_chain(
    target: Target,
    drafter: DFlashDraftModel,
    frozen: Frozen,
    prompt: list[int],
    answer: list[int],
) -> Chain:
    """Acceptance of an answer as the cache would give it: one target forward, all anchors."""
    tokens = prompt + answer
    if len(answer) < 2:
        return Chain(accepted=(), committed=())
    ids = torch.tensor(tokens, device=target.device)
    batch = Batch.empty(batch_shape(drafter, tokens=len(tokens)), device=target.device)
    states = target.hidden_states(ids[None], drafter.config.target_layer_ids)
    batch.hidden.copy_(torch.stack([state[0].to(torch.bfloat16) for state in states]))
    batch.input_ids.copy_(ids)
    batch.position_ids.copy_(torch.arange(len(tokens)))
    batch.document_ids.zero_()
    batch.loss_mask[len(prompt) :] = True
    anchors = torch.arange(len(prompt), len(tokens) - 1).numpy()
    right, _ = slots_right(drafter, frozen, batch, anchors, group=ANCHOR_GROUP, pieces=Pieces())
    accepted = leading_true(right)
    return walk(lambda a: int(accepted[a - len(prompt)]), [(len(prompt), len(tokens) - 1)])


def batch_shape(drafter: DFlashDraftModel, *, tokens: int, encoding: str = "bf16") -> BatchShape:
    """The shape of a batch of so many token slots that is measured in groups of anchors."""
    return BatchShape(
        target_layers=len(drafter.config.target_layer_ids),
        token_budget=tokens,
        hidden_size=drafter.config.hidden_size,
        anchors=ANCHOR_GROUP,
        block_size=drafter.config.block_size,
        encoding=encoding,
    )
