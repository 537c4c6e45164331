"""One training step: packs in, weights updated, counters added to.  One body for all who run it.

`EagerStep` runs it op by op; `graph.GraphStep` captures the same body.  Nothing here asks the
host: no shape from data, no read of a device value.

Letters: A anchors, a of them in a micro-batch, B block size, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dflash_fit.attention import Blocks, DenseSight, Sight, SightMaker, Visibility
from dflash_fit.batch import Batch, BatchShape
from dflash_fit.drafter import (
    PLAIN,
    ContextKV,
    DFlashDraftModel,
    Functions,
    block_ids,
    block_positions,
)
from dflash_fit.gradients import Gradients
from dflash_fit.loss import Objective, block_targets, head_loss
from dflash_fit.metrics import StepMetrics
from dflash_fit.optim import FlatAdamW, adamw_


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """The target's token embedding and LM head [V, H], in the drafter's precision."""

    embedding: Tensor
    head: Tensor


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    shape: BatchShape
    objective: Objective
    anchor_microbatch: int  # blocks that go through the drafter at once
    loss_chunk: int  # blocks that go through the LM head at once
    packs: int = 1  # that an update adds up on this rank

    @property
    def parts(self) -> list[slice]:
        """The micro-batches of the anchors."""
        size = self.anchor_microbatch
        return [slice(begin, begin + size) for begin in range(0, self.shape.anchors, size)]


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """What a step is made of.  Compiled or plain, it computes the same."""

    sight: SightMaker = DenseSight.of
    functions: Functions = PLAIN
    adamw_: Callable[..., None] = adamw_


def project(drafter: DFlashDraftModel, batch: Batch, pieces: Pieces) -> ContextKV:
    """Every layer's keys and values of the context."""
    layers = len(drafter.config.target_layer_ids)
    return drafter.context(batch.states(slice(layers)), batch.position_ids, pieces.functions)


def run_blocks(
    drafter: DFlashDraftModel,
    frozen: Frozen,
    batch: Batch,
    context: ContextKV,
    part: slice,
    pieces: Pieces,
) -> Tensor:
    """Rows [a, B - 1, H] that the head reads, for the blocks of `part`."""
    config = drafter.config
    anchors = batch.anchor_positions[part]
    ids = block_ids(
        batch.input_ids[anchors],
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
    )
    positions = block_positions(batch.position_ids[anchors], block_size=config.block_size)
    blocks = batch.blocks(part, block_size=config.block_size)
    rows: Tensor = drafter(
        frozen.embedding[ids.flatten()],
        context,
        positions.flatten(),
        layer_sights(drafter, blocks, pieces.sight),
        pieces.functions,
    )
    return rows


def layer_sights(drafter: DFlashDraftModel, blocks: Blocks, sight: SightMaker) -> Sequence[Sight]:
    """One per layer; layers that look alike share it."""
    looks = [drafter.config.look(i) for i in range(drafter.config.num_hidden_layers)]
    made: dict[Visibility, Sight] = {look: sight(blocks, look) for look in set(looks)}
    return [made[look] for look in looks]


def teacher_rows(batch: Batch, part: slice, config: StepConfig) -> Tensor:
    """Final hidden states [a, B - 1, H] from which the target reads the token of each slot.

    The token at position a + k comes from the state before it.
    """
    anchors = batch.anchor_positions[part]
    before = block_positions(anchors, block_size=config.shape.block_size)[:, :-1]
    final = batch.states(slice(-1, None))[0]
    return final[before.clamp(max=len(batch.input_ids) - 1)]


Finished = Callable[[Sequence[nn.Parameter]], None]  # told whose gradients are complete


def accumulate(
    drafter: DFlashDraftModel,
    frozen: Frozen,
    batch: Batch,
    config: StepConfig,
    metrics: StepMetrics,
    pieces: Pieces,
    finished: Finished = lambda parameters: None,
) -> tuple[Tensor, Tensor]:
    """Add the gradient of a pack to the parameters; returns the loss's sum and its weight.

    Neither is divided by anything yet: the weight of all packs (and ranks) of an update is only
    known at its end.

    The context is projected once.  Anchors go through in micro-batches that add their gradients
    to the parameters and to detached context leaves; one backward through the context ends it.
    So memory does not grow with the number of anchors.
    """
    labels, counts = block_targets(batch, block_size=config.shape.block_size)
    context = project(drafter, batch, pieces)
    leaves = [(k.detach().requires_grad_(), v.detach().requires_grad_()) for k, v in context]
    total = torch.zeros((), device=labels.device)
    weight = torch.zeros((), device=labels.device)
    for part in config.parts:
        rows = run_blocks(drafter, frozen, batch, leaves, part, pieces)
        wants_teacher = config.objective.divergence == "kl"
        result = head_loss(
            rows.detach(),
            frozen.head,
            labels[part],
            counts[part],
            config.objective,
            chunk=config.loss_chunk,
            teacher=teacher_rows(batch, part, config).to(rows.dtype) if wants_teacher else None,
        )
        torch.autograd.backward(rows, result.gradient)
        total += result.total
        weight += result.weight
        metrics.add_slots(result, counts[part])
    late = drafter.context_parameters()
    finished([p for p in drafter.parameters() if all(p is not other for other in late)])
    ends = [tensor for pair in context for tensor in pair]
    torch.autograd.backward(ends, [leaf.grad for pair in leaves for leaf in pair])
    finished(late)
    metrics.add_pack(batch)
    return total, weight


class Trainer:
    """A drafter, what it is trained against, and how: the body of a step, pack by pack."""

    def __init__(
        self,
        drafter: DFlashDraftModel,
        frozen: Frozen,
        optimizer: FlatAdamW,
        config: StepConfig,
        pieces: Pieces,
        gradients: Gradients | None = None,
    ) -> None:
        """`gradients` adds up packs and ranks; by itself, the packs of one process."""
        self.drafter, self.frozen, self.optimizer = drafter, frozen, optimizer
        self.config, self.pieces = config, pieces
        self.gradients = gradients or Gradients(optimizer.parameters, turns=config.packs)
        assert self.gradients.turns == config.packs, (self.gradients.turns, config.packs)
        device = optimizer.lr.device
        self.metrics = StepMetrics.zeros(config.shape.block_size, device=device)

    def train(self, batch: Batch, turn: int) -> None:
        """One of the packs of an update; the last one updates the weights."""
        self.optimizer.begin()
        total, weight = accumulate(
            self.drafter,
            self.frozen,
            batch,
            self.config,
            self.metrics,
            self.pieces,
            lambda parameters: self.gradients.take(parameters, turn),
        )
        self.gradients.take_loss(total, weight, turn)
        if turn == self.config.packs - 1:
            summed = self.gradients.arrive()
            loss, norm = self.optimizer.update(*summed, self.pieces.adamw_)
            self.metrics.add_update(loss, norm)


class EagerStep:
    """Runs a trainer op by op: for the CPU, for debugging, as the oracle of a captured step."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def __call__(
        self, batch: Batch, *, lr: float, turn: int = 0, taken: Callable[[], None] | None = None
    ) -> None:
        """Train on a pack, the `turn`-th of its update; `taken` is called when it is done with."""
        self.trainer.optimizer.lr.fill_(lr)
        self.trainer.train(batch, turn)
        if taken is not None:
            taken()
