"""AdamW on fp32 masters.

Masters, moments and weights are one flat buffer each; a gradient is whatever buffer it was summed
up in, so that nothing has to be zeroed or added first.  An update is one pass over memory per
parameter, without a look from the host.

Ranks may share the state: each holds a shard of masters and moments, updates it, and gets the
weights of the others (stage 1 of ZeRO, arXiv 1910.02054).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn

from dflash_fit.shards import grid, pieces, shard, shard_size
from dflash_fit.world import World, gather_into


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    beta1: float
    beta2: float
    weight_decay: float
    clip: float
    eps: float = 1e-8


@dataclass(frozen=True, kw_only=True)
class Factors:
    """What all parameters of an update share; fp32 scalars on the device, made there."""

    fine: Tensor  # bool: whether anything changes at all
    gradient: Tensor  # by which the gradient is multiplied: normaliser and clipping
    new1: Tensor  # share of the new gradient in the first moment
    new2: Tensor  # and of its square in the second
    root: Tensor  # bias correction of the second moment
    size: Tensor  # learning rate, with the bias correction of the first moment


def adamw_(
    master: Tensor,
    moment1: Tensor,
    moment2: Tensor,
    weight: Tensor,
    gradient: Tensor,
    factors: Factors,
    decay: Tensor,
    eps: float,
) -> None:
    """One parameter's update, in place; all are flat and of one length."""
    # where, not a product: 0 * NaN is NaN.
    slope = torch.where(factors.fine, gradient.float() * factors.gradient, 0.0)
    moment1.lerp_(slope, factors.new1)
    moment2.lerp_(slope.square(), factors.new2)
    below = (moment2 * factors.root).sqrt_().add_(eps)
    master.mul_(decay).sub_(moment1 / below * factors.size)
    weight.copy_(master)


class FlatAdamW:
    """Owns the memory of a module's parameters and updates it.

    Matrices come first and decay; vectors (norms) come behind them and do not.  `sharing` is the
    world whose ranks hold a shard of the state each; without it all of it is here.
    """

    def __init__(
        self,
        module: nn.Module,
        config: AdamWConfig,
        *,
        dtype: torch.dtype,
        sharing: World | None = None,
    ) -> None:
        self.config, self.sharing = config, sharing
        named = sorted(module.named_parameters(), key=lambda item: (item[1].dim() == 1,))
        self.parameters = [parameter for _, parameter in named]
        sizes = [parameter.numel() for parameter in self.parameters]
        self.length = sum(sizes)
        self.owned = slice(0, self.length)
        if sharing:
            self.owned = shard(self.length, rank=sharing.rank, world=sharing.size)
        self.pieces = pieces(sizes, self.owned)
        whole = torch.cat([p.detach().float().flatten() for p in self.parameters])
        self.master = whole[self.owned].clone() if sharing else whole
        self.moment1, self.moment2 = torch.zeros_like(self.master), torch.zeros_like(self.master)
        device = self.master.device
        # Padded where shards are gathered: all but the last are of one size.
        room = shard_size(self.length, world=sharing.size) * sharing.size if sharing else 0
        self.gathered = torch.zeros(max(room, self.length), dtype=dtype, device=device)
        self.weights = self.gathered[: self.length]
        self.weights.copy_(whole)
        for parameter, weight in zip(
            self.parameters, torch.split(self.weights, sizes), strict=True
        ):
            parameter.data = weight.detach().view(parameter.shape)
        self.grid = grid(sizes, self.owned)
        self.cells = sum(map(len, grid(sizes, slice(0, self.length))))
        self.cells_before = sum(map(len, grid(sizes, slice(0, self.owned.start))))
        self.lr = torch.zeros((), device=device)
        self.updates = torch.zeros((), device=device)  # updates done: skipped ones not counted
        self.skipped = torch.zeros((), device=device)
        self.skipped_in_a_row = torch.zeros((), device=device)
        # Off while a step warms up: everything runs and nothing changes.
        self.armed = torch.ones((), dtype=torch.bool, device=device)

    def begin(self) -> None:
        """Forget the gradients of the last pack; the next backward pass brings its own."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def update(
        self,
        gradients: Sequence[Tensor],
        total: Tensor,
        weight: Tensor,
        adamw_: Callable[..., None] = adamw_,
    ) -> tuple[Tensor, Tensor]:
        """Clip, update masters and moments, round to the weights; returns loss and gradient norm.

        `gradients` are flat, one for each of `pieces`; they and `total` are weighted sums, and
        `weight` is what to divide them by.  A loss or gradient that is not finite leaves
        everything as it was and counts as skipped.  All of it is decided on the device.
        """
        share = 1 / weight.clamp(min=1e-20)
        loss = total * share
        norm = self._norm(gradients) * share
        factors = self._factors(loss, norm, share)
        # Two tensors, not one and a switch: matrices and vectors go through one compiled function.
        decayed = 1 - self.lr * self.config.weight_decay * factors.fine
        stays = torch.ones_like(decayed)
        for piece, gradient in zip(self.pieces, gradients, strict=True):
            here = slice(piece.at.start - self.owned.start, piece.at.stop - self.owned.start)
            own = (self.master[here], self.moment1[here], self.moment2[here])
            decay = decayed if self.parameters[piece.parameter].dim() > 1 else stays
            adamw_(*own, self.weights[piece.at], gradient, factors, decay, self.config.eps)
        self._gather()
        return loss, norm

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Of the whole gradient, from the norms of its cells, whoever has them."""
        runs = [
            run
            for gradient, lengths in zip(gradients, self.grid, strict=True)
            for run in torch.split(gradient, lengths)
        ]
        norms = torch.stack(torch._foreach_norm(runs, 2, torch.float32)) if runs else None
        if self.sharing is None:
            assert norms is not None
            whole: Tensor = torch.linalg.vector_norm(norms)
            return whole
        every = torch.zeros(self.cells, device=self.master.device)
        if norms is not None:
            every[self.cells_before : self.cells_before + len(norms)] = norms
        distributed.all_reduce(every)  # each cell plus zeros: exact
        found: Tensor = torch.linalg.vector_norm(every)
        return found

    def _gather(self) -> None:
        """Take over the weights that the other ranks have updated."""
        if self.sharing is not None:
            size = len(self.gathered) // self.sharing.size
            own = self.gathered[self.sharing.rank * size :][:size]
            gather_into(self.gathered, own)

    def _factors(self, loss: Tensor, norm: Tensor, share: Tensor) -> Factors:
        c = self.config
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        fine = finite & self.armed
        go = fine.float()
        self.updates.add_(go)
        bad = (~finite & self.armed).float()
        self.skipped.add_(bad)
        # A good update ends the row; one that is not armed is none at all.
        self.skipped_in_a_row.add_(bad).mul_(1 - go)
        updates = self.updates.clamp(min=1)
        return Factors(
            fine=fine,
            gradient=share * (c.clip / (norm + 1e-6)).clamp(max=1.0),
            new1=(1 - c.beta1) * go,
            new2=(1 - c.beta2) * go,
            root=1 / (1 - c.beta2**updates),
            size=self.lr * go / (1 - c.beta1**updates),
        )

    # --- what a checkpoint holds ----------------------------------------------------------------

    def flats(self) -> dict[str, Tensor]:
        """Masters and moments, of the elements `owned`; live tensors, not copies."""
        return {name: getattr(self, name) for name in ("master", "moment1", "moment2")}

    def scalars(self) -> dict[str, Tensor]:
        """What all ranks hold; live tensors, not copies."""
        return {name: getattr(self, name) for name in ("updates", "skipped", "skipped_in_a_row")}

    @torch.no_grad()
    def restore(self) -> None:
        """Flats and scalars were overwritten: the weights follow from the masters."""
        self.weights[self.owned].copy_(self.master)
        self._gather()
