"""Why two decodings of one prompt differ: a tie, or a mistake?

A block and a lone token go through the target in kernels of unlike shape, so logits differ in
their last bits.  Where two tokens are as good as equal, this decides which of them is written.
The gap between their logits tells such a tie (a few roundings of the precision) from a mistake.

K target layers, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_cache.target import Target
from dflash_fit.acceptance import Chain
from dflash_fit.drafter import DFlashDraftModel
from dflash_fit.drafts import DraftContext, block_logits
from dflash_fit.step import Frozen


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Where two answers, or two measures of one answer, part, and how near the choice was."""

    position: int  # of the token in the answer, from 0
    logits: float  # distance of the two logits that were compared


@torch.inference_mode()
def answer_gap(
    target: Target, prompt: Tensor, one: Sequence[int], other: Sequence[int]
) -> Gap | None:
    """First token at which two answers to a prompt [n] differ; None where they do not.

    Answers of unlike length whose common part is equal were ended by other rules: they have
    nothing to compare, and are refused.
    """
    assert list(one) == list(other) or list(one[: len(other)]) != list(other[: len(one)])
    for position, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            text = torch.tensor(list(one[:position]), dtype=prompt.dtype, device=prompt.device)
            ids = torch.cat([prompt, text])[None]
            # Of the last token alone: logits of a long text are gigabytes.
            output = target.model(input_ids=ids, use_cache=False, logits_to_keep=1)
            logits = output.logits[0, -1].float()
            return Gap(position=position, logits=float((logits[left] - logits[right]).abs()))
    return None


@torch.inference_mode()
def chain_gap(
    target: Target,
    drafter: DFlashDraftModel,
    frozen: Frozen,
    prompt: Tensor,
    answer: Sequence[int],
    *,
    decoded: Chain,
    offline: Chain,
) -> Gap | None:
    """First token that only one of two measures of an answer accepted; None where they agree.

    The logits are the drafter's, from states of one forward over the text: of the answer's token,
    and of the best other one.
    """
    start = 0
    for real, measured in zip(decoded.accepted, offline.accepted, strict=False):
        if real != measured:
            slot = min(real, measured)
            text = torch.tensor(list(answer[:start]), dtype=prompt.dtype, device=prompt.device)
            ids = torch.cat([prompt, text])
            states = target.hidden_states(ids[None], drafter.config.target_layer_ids)
            context = DraftContext(drafter, frozen)
            context.extend(torch.stack([state[0].to(torch.bfloat16) for state in states]))
            anchor = torch.tensor([answer[start]], device=prompt.device)
            logits = block_logits([context], anchor)[0, slot].float()
            wanted = answer[start + slot + 1]
            others = logits.clone()
            others[wanted] = -torch.inf
            gap = float((logits[wanted] - others.max()).abs())
            return Gap(position=start + slot + 1, logits=gap)
        start += real + 1
    return None
