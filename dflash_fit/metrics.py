"""Counters that live on the device between two log lines, and what is read from them.

B block size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
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

    def take(self) -> dict[str, Any]:
        """The sums since the last reading, as numbers; starts again.  This one asks the host."""
        sums = {name: tensor.tolist() for name, tensor in vars(self).items()}
        self.reset()
        return sums

    def read(self) -> dict[str, Any]:
        """What the interval was like for this process alone."""
        return means([self.take()])


def means(taken: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What an interval was like, from the sums of all ranks.

    Losses and norms are those of whole updates, the same on every rank; the rest adds up.
    """
    steps = max(taken[0]["steps"], 1.0)
    correct, count = (
        np.sum([sums[name] for sums in taken], axis=0) for name in ("correct", "count")
    )
    return {
        "loss": taken[0]["loss"] / steps,
        "grad_norm": taken[0]["norm"] / steps,
        "tokens": int(sum(sums["tokens"] for sums in taken)),
        "anchors": int(sum(sums["anchors"] for sums in taken)),
        "accuracy": float(correct.sum() / max(count.sum(), 1)),
        "slot_accuracy": (correct / np.maximum(count, 1)).tolist(),
    }
