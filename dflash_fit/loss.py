"""What a block should have said, how much each slot counts, and the loss against the frozen head.

Slot k of the block at anchor a predicts the token AT position a + k.  Slot 0 is the anchor
itself: it is not trained, and its rows never reach the head.

Letters: A anchors, a those of a call, B block size, S = B - 1 predicted slots of a block, Q slots
of a chunk of blocks, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_fit.batch import Batch

DIVERGENCES = ("ce", "kl")
SLOT_WEIGHTS = ("decay", "dpace")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What a slot should match, and how much each slot counts."""

    divergence: str  # "ce": the label; "kl": the target's distribution, KL(target || drafter)
    slot_weights: str  # "decay": exp(-(k - 1) / gamma); "dpace": see `dpace`
    gamma: float
    alpha: float = 0.5  # of D-PACE

    def __post_init__(self) -> None:
        assert self.divergence in DIVERGENCES, self.divergence
        assert self.slot_weights in SLOT_WEIGHTS, self.slot_weights


# --- labels and weights -------------------------------------------------------------------------


def block_targets(batch: Batch, *, block_size: int) -> tuple[Tensor, Tensor]:
    """Labels int64 [A, S] and whether they count, bool [A, S].

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


def decay(block_size: int, gamma: float, *, device: torch.device) -> Tensor:
    """Weights exp(-(k - 1) / gamma) of slots 1 .. B - 1, fp32 (arXiv 2602.06036)."""
    slot = torch.arange(block_size - 1, device=device, dtype=torch.float32)
    return torch.exp(-slot / gamma)


def dpace(cross_entropy_aS: Tensor, counts_aS: Tensor, *, alpha: float) -> Tensor:
    """Weights of D-PACE (arXiv 2605.18810): what a slot adds to the length that is accepted.

    A slot is passed with probability q = exp(-CE), smoothed to (1 - alpha) q + alpha; one that
    does not count is passed for sure.  C_j is the product of the first j, w_j the sum of the C_m
    of the slots m >= j that count.
    """
    passed = (1 - alpha) * torch.exp(-cross_entropy_aS) + alpha
    reached = torch.where(counts_aS, passed, 1.0).cumprod(dim=1) * counts_aS
    return reached.flip(1).cumsum(dim=1).flip(1) * counts_aS


def slot_weights(objective: Objective, counts_aS: Tensor, cross_entropy_Q: Tensor) -> Tensor:
    """How much each slot counts, fp32 [Q] with Q = a * S; exactly 0 where it does not."""
    if objective.slot_weights == "dpace":
        cross_entropy_aS = cross_entropy_Q.view(counts_aS.shape)
        return dpace(cross_entropy_aS, counts_aS, alpha=objective.alpha).flatten()
    return decayed(objective, counts_aS).flatten()


def decayed(objective: Objective, counts_aS: Tensor) -> Tensor:
    return counts_aS * decay(counts_aS.shape[1] + 1, objective.gamma, device=counts_aS.device)


def normaliser(objective: Objective, counts_aS: Tensor) -> Tensor:
    """What the total is divided by, fp32 scalar: known before any loss, for both weights."""
    if objective.slot_weights == "dpace":
        return counts_aS.any(dim=1).sum(dtype=torch.float32)
    return decayed(objective, counts_aS).sum()


# --- the head -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HeadResult:
    """Sums of some blocks, and what was found per slot; add up over micro-batches and ranks."""

    total: Tensor  # fp32 scalar: sum over slots of weight * loss, not normalised
    weight: Tensor  # fp32 scalar: what the total is divided by, in the end over the global batch:
    # the sum of the weights ("decay"), the number of blocks with a slot that counts ("dpace")
    losses: Tensor  # fp32 [a, S], unweighted divergence in nats, 0 where the slot does not count
    correct: Tensor  # bool [a, S], argmax == label, whether or not the slot counts
    gradient: Tensor  # [a, S, H] in the dtype of the rows: d total / d rows


class Chunk(NamedTuple):
    """What the logits of a chunk were read for; all but the slope are [Q]."""

    losses: Tensor  # of slots that do not count as well
    correct: Tensor
    weights: Tensor
    slope: Tensor  # [Q, V] d sum of weight * loss / d logits; may lie where the logits lay


Weigh = Callable[[Tensor], Tensor]  # cross-entropies [Q] of whole blocks -> weights [Q]
Way = Callable[[Tensor, Tensor | None, Tensor, Weigh], Chunk]


def head_loss(
    rows: Tensor,
    head: Tensor,
    labels: Tensor,
    counts: Tensor,
    objective: Objective,
    *,
    chunk: int,
    teacher: Tensor | None = None,
) -> HeadResult:
    """Loss of some blocks and its gradient, `chunk` blocks through the frozen head at once.

    rows [a, S, H] and head [V, H] of one dtype, labels int64 and counts bool [a, S].  `teacher`
    [a, S, H], for "kl" and only there, is the target's final hidden state whose logits are its
    distribution at each slot.  Slots that do not count add exactly 0, whatever their rows hold.
    There is no autograd here: pass the gradient on to torch.autograd.backward.
    """
    way = through_kernels if rows.is_cuda else through_torch
    return head_loss_by(way, rows, head, labels, counts, objective, chunk=chunk, teacher=teacher)


@torch.no_grad()
def head_loss_by(
    way: Way,
    rows: Tensor,
    head: Tensor,
    labels: Tensor,
    counts: Tensor,
    objective: Objective,
    *,
    chunk: int,
    teacher: Tensor | None = None,
) -> HeadResult:
    """`head_loss`, with the way that the logits of a chunk are read.

    The head gets no gradient, so each chunk's logits serve twice and are gone: nothing of size
    [a * S, V] ever exists, and nothing is computed again.
    """
    if (teacher is None) != (objective.divergence == "ce"):
        raise ValueError(
            f"divergence {objective.divergence!r} {'without' if teacher is None else 'with'} a "
            'teacher; "kl" needs its rows, "ce" has no use for them'
        )
    assert rows.shape[:2] == labels.shape == counts.shape, (rows.shape, labels.shape, counts.shape)
    losses, weights = (
        torch.empty(labels.shape, dtype=torch.float32, device=rows.device) for _ in range(2)
    )
    correct = torch.empty(labels.shape, dtype=torch.bool, device=rows.device)
    gradient = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    most = min(chunk, len(rows)) * labels.shape[1]
    said = partial(logits_of, rows, head, logits_buffer(most, head))
    wanted = None
    if teacher is not None:
        wanted = partial(logits_of, teacher, head, logits_buffer(most, head))
    for begin in range(0, len(rows), chunk):
        part = slice(begin, begin + chunk)
        found = way(
            said(part),
            None if wanted is None else wanted(part),
            labels[part].flatten(),
            partial(slot_weights, objective, counts[part]),
        )
        losses[part] = found.losses.view(counts[part].shape)
        weights[part] = found.weights.view(counts[part].shape)
        correct[part] = found.correct.view(counts[part].shape)
        torch.mm(found.slope, head, out=gradient[part].view(-1, rows.shape[2]))
    losses = torch.where(counts, losses, 0.0)
    return HeadResult(
        total=(losses * weights).sum(),
        weight=normaliser(objective, counts),
        losses=losses,
        correct=correct,
        gradient=gradient,
    )


def logits_buffer(slots: int, head: Tensor) -> Tensor:
    """Room for logits [slots, V], used by one chunk after the other.

    Rows begin at multiples of 32 bytes or more, so that V need not be even for loads of 16 bytes.
    What lies between V and the stride is scratch: whoever writes a row may write there.
    """
    vocab = len(head)
    return head.new_empty(slots, -(-vocab // 16) * 16)[:, :vocab]


def logits_of(rows: Tensor, head: Tensor, buffer: Tensor, part: slice) -> Tensor:
    """Logits [Q, V] of some blocks of rows [a, S, H], in the buffer."""
    rows_QH = rows[part].flatten(0, 1)
    return torch.mm(rows_QH, head.T, out=buffer[: len(rows_QH)])


def through_torch(
    logits_QV: Tensor, teacher_QV: Tensor | None, labels_Q: Tensor, weigh: Weigh
) -> Chunk:
    """Plain PyTorch in fp32, in place where it can be: for the CPU, and the kernels' oracle."""
    label = labels_Q[:, None]
    correct = logits_QV.argmax(dim=-1) == labels_Q
    slope = to_log_softmax(logits_QV)
    losses = cross_entropy = -slope.gather(1, label)[:, 0]
    if teacher_QV is None:
        slope.exp_().scatter_add_(1, label, torch.full_like(label, -1, dtype=slope.dtype))
    else:
        wanted = to_log_softmax(teacher_QV)
        gap = wanted - slope
        slope.exp_().sub_(wanted.exp_())
        losses = gap.mul_(wanted).sum(dim=-1)
    weights = weigh(cross_entropy)
    # Where nothing counts a row may be NaN, and so is its product with 0.
    slope.mul_(weights[:, None]).masked_fill_(weights[:, None] == 0, 0)
    return Chunk(losses, correct, weights, slope.to(logits_QV.dtype))


def to_log_softmax(logits_QV: Tensor) -> Tensor:
    """In fp32, where the logits lay if they are fp32 already."""
    logits = logits_QV.float()
    logits.sub_(logits.amax(dim=-1, keepdim=True))
    return logits.sub_(logits.logsumexp(dim=-1, keepdim=True))


def through_kernels(
    logits_QV: Tensor, teacher_QV: Tensor | None, labels_Q: Tensor, weigh: Weigh
) -> Chunk:
    """Triton kernels: the logits are read twice and written once, all arithmetic in fp32."""
    from dflash_fit import head_kernel

    found = head_kernel.measure(logits_QV, teacher_QV, labels_Q)
    weights = weigh(found.cross_entropy)
    slope = head_kernel.write_slope(logits_QV, teacher_QV, labels_Q, weights, found)
    return Chunk(found.divergence, found.correct, weights, slope)
