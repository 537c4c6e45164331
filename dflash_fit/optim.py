"""AdamW on fp32 masters, all parameters in one flat buffer, and the learning rate's schedule.

One buffer each for weights, gradients, masters and moments: an update is a few passes over flat
memory, without a loop over parameters, without a look from the host.  P trained parameters.
"""

import math
from collections.abc import Iterator
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


def learning_rate(step: int, *, steps: int, peak: float, warmup: float) -> float:
    """Linear warm-up over a share of the steps, then a cosine to zero; `step` counts from 0."""
    warm = max(1, round(steps * warmup)) if warmup > 0 else 0
    if step < warm:
        return peak * (step + 1) / warm
    through = (step - warm) / max(1, steps - warm)
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, through)))


class FlatAdamW:
    """Owns the memory of a module's parameters and updates it.

    Matrices come first and decay; vectors (norms) come behind them and do not.  The gradient of
    every parameter is a view of one buffer, which backward passes add to.
    """

    def __init__(self, module: nn.Module, config: AdamWConfig, *, dtype: torch.dtype) -> None:
        self.config = config
        named = sorted(module.named_parameters(), key=lambda item: (item[1].dim() == 1,))
        self.parameters = [parameter for _, parameter in named]
        self.decayed = sum(p.numel() for p in self.parameters if p.dim() > 1)
        self.master = torch.cat([p.detach().float().flatten() for p in self.parameters])
        self.moment1, self.moment2 = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.gradient = torch.zeros_like(self.master, dtype=dtype)
        self.weights = self.master.to(dtype, copy=True)
        for parameter, weight, gradient in zip(
            self.parameters, self._views(self.weights), self._views(self.gradient), strict=True
        ):
            parameter.data = weight
            parameter.grad = gradient
        device = self.master.device
        self.lr = torch.zeros((), device=device)
        self.updates = torch.zeros((), device=device)  # updates done: skipped ones not counted
        self.skipped = torch.zeros((), device=device)

    def _views(self, flat: Tensor) -> Iterator[Tensor]:
        begin = 0
        for parameter in self.parameters:
            yield flat[begin : begin + parameter.numel()].view(parameter.shape)
            begin += parameter.numel()

    def zero_gradient(self) -> None:
        self.gradient.zero_()

    def update(self, loss: Tensor) -> Tensor:
        """Clip, update masters and moments, round to the weights; returns the gradient's norm.

        A loss or gradient that is not finite leaves everything as it was and counts as skipped.
        All of it is decided on the device.
        """
        c = self.config
        gradient = self.gradient.float()
        norm: Tensor = gradient.norm()
        fine = torch.isfinite(norm) & torch.isfinite(loss)
        go = fine.float()
        # where, not a product: 0 * NaN is NaN.
        gradient = torch.where(fine, gradient, 0.0)
        gradient *= torch.where(fine, (c.clip / (norm + 1e-6)).clamp(max=1.0), 0.0)
        self.updates.add_(go)
        self.skipped.add_(1 - go)
        updates = self.updates.clamp(min=1)
        scale1, scale2 = 1 - c.beta1**updates, 1 - c.beta2**updates
        self.moment1.lerp_(gradient, (1 - c.beta1) * go)
        self.moment2.lerp_(gradient.square_(), (1 - c.beta2) * go)
        if c.weight_decay:
            self.master[: self.decayed].mul_(1 - self.lr * c.weight_decay * go)
        below = (self.moment2 / scale2).sqrt_().add_(c.eps)
        self.master.sub_((self.moment1 / below).mul_(self.lr * go / scale1))
        self.weights.copy_(self.master)
        return norm

    def state(self) -> dict[str, Tensor]:
        """Everything that resuming needs, by name; live tensors, not copies."""
        names = ("master", "moment1", "moment2", "updates", "skipped")
        return {name: getattr(self, name) for name in names}

    def load_state(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state().items():
            assert tensor.shape == state[name].shape, (name, tensor.shape, state[name].shape)
            tensor.copy_(state[name])
        self.weights.copy_(self.master)
