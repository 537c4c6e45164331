"""AdamW on fp32 masters.

Masters, moments and weights are one flat buffer each; a gradient is whatever buffer the backward
pass made for a parameter, so that nothing has to be zeroed or added first.  An update is one pass
over memory per parameter, without a look from the host.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


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

    Matrices come first and decay; vectors (norms) come behind them and do not.
    """

    def __init__(self, module: nn.Module, config: AdamWConfig, *, dtype: torch.dtype) -> None:
        self.config = config
        named = sorted(module.named_parameters(), key=lambda item: (item[1].dim() == 1,))
        self.parameters = [parameter for _, parameter in named]
        self.master = torch.cat([p.detach().float().flatten() for p in self.parameters])
        self.moment1, self.moment2 = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.weights = self.master.to(dtype, copy=True)
        for parameter, weight in zip(self.parameters, self._views(self.weights), strict=True):
            parameter.data = weight.view(parameter.shape)
        device = self.master.device
        self.lr = torch.zeros((), device=device)
        self.updates = torch.zeros((), device=device)  # updates done: skipped ones not counted
        self.skipped = torch.zeros((), device=device)
        # Off while a step warms up: everything runs and nothing changes.
        self.armed = torch.ones((), dtype=torch.bool, device=device)

    def _views(self, flat: Tensor) -> Iterator[Tensor]:
        sizes = [parameter.numel() for parameter in self.parameters]
        return (view.detach() for view in torch.split(flat, sizes))

    def begin(self) -> None:
        """Forget the gradients of the last update; the next backward pass brings its own."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def update(
        self, total: Tensor, weight: Tensor, adamw_: Callable[..., None] = adamw_
    ) -> tuple[Tensor, Tensor]:
        """Clip, update masters and moments, round to the weights; returns loss and gradient norm.

        `total` is the weighted sum of the losses whose gradients the parameters hold, `weight`
        what to divide it by.  A loss or gradient that is not finite leaves everything as it was
        and counts as skipped.  All of it is decided on the device.
        """
        gradients = [gradient_of(parameter) for parameter in self.parameters]
        share = 1 / weight.clamp(min=1e-20)
        loss = total * share
        norms = torch._foreach_norm(gradients, 2, torch.float32)
        norm = torch.linalg.vector_norm(torch.stack(norms)) * share
        factors = self._factors(loss, norm, share)
        # Two tensors, not one and a switch: matrices and vectors go through one compiled function.
        decayed = 1 - self.lr * self.config.weight_decay * factors.fine
        stays = torch.ones_like(decayed)
        buffers = (self._views(b) for b in (self.master, self.moment1, self.moment2, self.weights))
        for parameter, gradient, *own in zip(self.parameters, gradients, *buffers, strict=True):
            decay = decayed if parameter.dim() > 1 else stays
            adamw_(*own, gradient, factors, decay, self.config.eps)
        return loss, norm

    def _factors(self, loss: Tensor, norm: Tensor, share: Tensor) -> Factors:
        c = self.config
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        fine = finite & self.armed
        go = fine.float()
        self.updates.add_(go)
        self.skipped.add_(~finite & self.armed)
        updates = self.updates.clamp(min=1)
        return Factors(
            fine=fine,
            gradient=share * (c.clip / (norm + 1e-6)).clamp(max=1.0),
            new1=(1 - c.beta1) * go,
            new2=(1 - c.beta2) * go,
            root=1 / (1 - c.beta2**updates),
            size=self.lr * go / (1 - c.beta1**updates),
        )

    def state(self) -> dict[str, Tensor]:
        """Everything that resuming needs, by name; live tensors, not copies."""
        names = ("master", "moment1", "moment2", "updates", "skipped")
        return {name: getattr(self, name) for name in names}

    def load_state(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state().items():
            assert tensor.shape == state[name].shape, (name, tensor.shape, state[name].shape)
            tensor.copy_(state[name])
        self.weights.copy_(self.master)


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """The gradient, flat; every parameter of a drafter has one."""
    assert parameter.grad is not None, parameter.shape
    # detach: the compiler would make one function for views of matrices and one of vectors.
    return parameter.grad.view(-1).detach()
