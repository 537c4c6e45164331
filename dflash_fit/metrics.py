"""Counters that live on the device between two log lines, and what is read from them.

B block size.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from dflash_fit.batch import Batch
from dflash_fit.loss import HeadResult


@dataclass(kw_only=True, eq=False)
class StepMetrics:
    """Sums since the last reading; adding never asks the host."""

    loss: Tensor  # sum over updates of the update's loss
    norm: Tensor  # sum over updates of the gradient's norm
    steps: Tensor  # updates that were not skipped
    tokens: Tensor
    anchors: Tensor
    correct: Tensor  # [B - 1] slots whose argmax was right
    count: Tensor  # [B - 1] slots that counted

    @classmethod
    def zeros(cls, block_size: int, *, device: torch.device) -> Self:
        def zero(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.float64, device=device)

        slots = block_size - 1
        return cls(
            loss=zero(),
            norm=zero(),
            steps=zero(),
            tokens=zero(),
            anchors=zero(),
            correct=zero(slots),
            count=zero(slots),
        )

    def add_slots(self, result: HeadResult, counts: Tensor) -> None:
        """Per-slot accuracy of some blocks; `counts` bool [a, B - 1]."""
        right = result.correct & counts
        self.correct += right.sum(dim=0)
        self.count += counts.sum(dim=0)

    def add_pack(self, batch: Batch) -> None:
        self.tokens += (batch.document_ids >= 0).sum()
        self.anchors += batch.anchor_valid.sum()

    def add_update(self, loss: Tensor, norm: Tensor) -> None:
        # An update that the guard skips has no loss to speak of; the optimizer counts it.
        fine = torch.isfinite(loss) & torch.isfinite(norm)
        self.loss += torch.where(fine, loss, 0.0)
        self.norm += torch.where(fine, norm, 0.0)
        self.steps += fine

    def reset(self) -> None:
        for tensor in vars(self).values():
            tensor.zero_()

    def read(self) -> dict[str, Any]:
        """Means since the last reading, and start again from zero.  This one does ask the host."""
        steps = max(float(self.steps), 1.0)
        values = {
            "loss": float(self.loss) / steps,
            "grad_norm": float(self.norm) / steps,
            "tokens": int(self.tokens),
            "anchors": int(self.anchors),
            "accuracy": float(self.correct.sum() / self.count.sum().clamp(min=1)),
            "slot_accuracy": (self.correct / self.count.clamp(min=1)).tolist(),
        }
        self.reset()
        return values
