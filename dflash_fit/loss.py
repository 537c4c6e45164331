"""What a block should have said, how much each slot counts, and the loss against the frozen head.

Slot k of the block at anchor a predicts the token AT position a + k.  Slot 0 is the anchor
itself: it is not trained, and its rows never reach the head.

Letters: T token slots, A anchors, B block size, Q = A * (B - 1) predicted slots, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_fit.batch import Batch


def decay(block_size: int, gamma: float, *, device: torch.device) -> Tensor:
    """Weights exp(-(k - 1) / gamma) of slots 1 .. B - 1, fp32 (arXiv 2602.06036)."""
    slot = torch.arange(block_size - 1, device=device, dtype=torch.float32)
    return torch.exp(-slot / gamma)


def block_targets(batch: Batch, *, block_size: int) -> tuple[Tensor, Tensor]:
    """Labels int64 [A, B - 1] and whether they count, bool [A, B - 1], for slots 1 .. B - 1.

    A slot counts when its block is valid and its position is supervised and of the anchor's
    document: labels never come from a neighbour.
    """
    steps = torch.arange(1, block_size, device=batch.input_ids.device)
    wanted = batch.anchor_positions[:, None] + steps
    inside = wanted < len(batch.input_ids)
    position = wanted.clamp(max=len(batch.input_ids) - 1)
    same = batch.document_ids[position] == batch.document_ids[batch.anchor_positions][:, None]
    counts = batch.anchor_valid[:, None] & inside & same & batch.loss_mask[position]
    return batch.input_ids[position], counts


@dataclass(frozen=True, kw_only=True)
class HeadResult:
    """Per predicted slot [Q]: loss in nats (fp32, unweighted) and whether argmax was right."""

    total: Tensor  # weighted sum of the losses, fp32 scalar; this one has a gradient
    losses: Tensor
    correct: Tensor


class _FrozenHead(torch.autograd.Function):
    """Cross-entropy against a frozen head, chunk by chunk, gradient formed with the logits.

    The head gets no gradient, so each chunk's logits serve twice and are gone: nothing of size
    [Q, V] outlives a chunk, and nothing is computed again.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        rows: Tensor,
        head: Tensor,
        labels: Tensor,
        weights: Tensor,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad = torch.empty_like(rows)
        losses = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
        correct = torch.empty(len(rows), dtype=torch.bool, device=rows.device)
        for begin in range(0, len(rows), chunk):
            part = slice(begin, begin + chunk)
            logits = F.linear(rows[part], head).float()
            label = labels[part, None]
            correct[part] = logits.argmax(dim=-1) == label[:, 0]
            log_z = logits.logsumexp(dim=-1)
            losses[part] = log_z - logits.gather(1, label)[:, 0]
            # d loss / d logits = softmax - one-hot, in place of the logits.
            slope = logits.sub_(log_z[:, None]).exp_()
            slope.scatter_add_(1, label, torch.full_like(label, -1, dtype=slope.dtype))
            slope.mul_(weights[part, None])
            grad[part] = slope.to(head.dtype) @ head
        ctx.save_for_backward(grad)
        total = (losses * weights).sum()
        ctx.mark_non_differentiable(losses, correct)
        return total, losses, correct

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, slope: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad * slope.to(grad.dtype), None, None, None, None


def frozen_head_loss(
    rows: Tensor, head: Tensor, labels: Tensor, weights: Tensor, *, chunk: int
) -> HeadResult:
    """Sum over slots of weight * cross-entropy(head @ row, label); weight 0 is not counted.

    rows [Q, H] and head [V, H] of one dtype, labels int64 [Q], weights fp32 [Q].  The caller's
    weights carry the normaliser, so that micro-batches, packs and ranks simply add up.
    """
    total, losses, correct = _FrozenHead.apply(  # type: ignore[no-untyped-call]
        rows, head, labels, weights, chunk
    )
    return HeadResult(total=total, losses=losses, correct=correct)
