"""One training step: batch in, weights updated, counters added to.  Eager; the oracle of the
captured step, which will run the same `train_step` body.

Nothing here asks the host: no shape from data, no read of a device value.

Letters: A anchors, B block size, H hidden size, V vocabulary, Q = A * (B - 1).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_fit.attention import Visibility, dense_mask
from dflash_fit.batch import Batch, BatchShape
from dflash_fit.drafter import ContextKV, DFlashDraftModel, block_ids, block_positions
from dflash_fit.loss import block_targets, decay, frozen_head_loss
from dflash_fit.metrics import StepMetrics
from dflash_fit.optim import FlatAdamW


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """The target's token embedding and LM head [V, H], in the drafter's precision."""

    embedding: Tensor
    head: Tensor


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    shape: BatchShape
    gamma: float
    anchor_microbatch: int
    loss_chunk: int


def run_blocks(
    drafter: DFlashDraftModel, frozen: Frozen, batch: Batch, context: ContextKV, part: slice
) -> Tensor:
    """Rows [a, B, H] that the head reads, for the blocks of `part` (a of the A anchors)."""
    config = drafter.config
    anchors, valid = batch.anchor_positions[part], batch.anchor_valid[part]
    ids = block_ids(
        batch.input_ids[anchors],
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
    )
    positions = block_positions(batch.position_ids[anchors], block_size=config.block_size)
    masks = layer_masks(
        drafter, anchors, batch.document_starts[anchors], valid, context=len(batch.input_ids)
    )
    rows: Tensor = drafter(frozen.embedding[ids.flatten()], context, positions.flatten(), masks)
    return rows.view(*ids.shape, -1)


def layer_masks(
    drafter: DFlashDraftModel, anchors: Tensor, starts: Tensor, valid: Tensor, *, context: int
) -> list[Tensor]:
    """One mask per layer; layers that look alike share it."""
    looks = [drafter.config.look(i) for i in range(drafter.config.num_hidden_layers)]
    made: dict[Visibility, Tensor] = {
        look: dense_mask(
            anchors,
            starts,
            valid,
            context=context,
            block_size=drafter.config.block_size,
            look=look,
        )
        for look in set(looks)
    }
    return [made[look] for look in looks]


def slot_weights(batch: Batch, config: StepConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Labels, whether they count, and weights before normalising, each [A, B - 1]."""
    labels, counts = block_targets(batch, block_size=config.shape.block_size)
    fade = decay(config.shape.block_size, config.gamma, device=labels.device)
    return labels, counts, counts * fade


def accumulate(
    drafter: DFlashDraftModel,
    frozen: Frozen,
    batch: Batch,
    config: StepConfig,
    *,
    normaliser: Tensor,
    metrics: StepMetrics,
) -> Tensor:
    """Add the gradient of a batch to the parameters; returns its loss, divided by `normaliser`.

    The context is projected once.  Anchors go through in micro-batches that add their gradients
    to the parameters and to detached context leaves; one backward through the context ends it.
    So memory does not grow with the number of anchors.
    """
    labels, counts, weights = slot_weights(batch, config)
    weights = weights / normaliser.clamp(min=1e-20)
    context = drafter.context(batch.states, batch.position_ids)
    leaves = [(k.detach().requires_grad_(), v.detach().requires_grad_()) for k, v in context]
    total = torch.zeros((), device=labels.device)
    for begin in range(0, config.shape.anchors, config.anchor_microbatch):
        part = slice(begin, begin + config.anchor_microbatch)
        rows = run_blocks(drafter, frozen, batch, leaves, part)[:, 1:]
        result = frozen_head_loss(
            rows.flatten(0, 1),
            frozen.head,
            labels[part].flatten(),
            weights[part].flatten(),
            chunk=config.loss_chunk,
        )
        result.total.backward()  # type: ignore[no-untyped-call]
        total += result.total.detach()
        metrics.add_slots(result, counts[part])
    ends = [tensor for pair in context for tensor in pair]
    torch.autograd.backward(ends, [leaf.grad for pair in leaves for leaf in pair])
    return total


def train_step(
    drafter: DFlashDraftModel,
    frozen: Frozen,
    optimizer: FlatAdamW,
    batch: Batch,
    config: StepConfig,
    metrics: StepMetrics,
) -> None:
    """Forward, loss, backward, guard, clip, update: what is captured later, run eagerly here."""
    optimizer.zero_gradient()
    normaliser = slot_weights(batch, config)[2].sum()
    loss = accumulate(drafter, frozen, batch, config, normaliser=normaliser, metrics=metrics)
    norm = optimizer.update(loss)
    metrics.add_step(loss, norm, batch)


class EagerStep:
    """Runs `train_step` op by op: for the CPU, for debugging, as the oracle of a captured step."""

    def __init__(
        self,
        drafter: DFlashDraftModel,
        frozen: Frozen,
        optimizer: FlatAdamW,
        config: StepConfig,
    ) -> None:
        self.drafter, self.frozen, self.optimizer = drafter, frozen, optimizer
        self.config = config
        self.metrics = StepMetrics.zeros(config.shape.block_size, device=optimizer.lr.device)

    def __call__(self, batch: Batch, *, lr: float) -> None:
        self.optimizer.lr.fill_(lr)
        train_step(self.drafter, self.frozen, self.optimizer, batch, self.config, self.metrics)
