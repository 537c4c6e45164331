"""The learning rate of every update.  Pure numbers: no torch."""

import math
from dataclasses import dataclass

SCHEDULES = ("cosine", "linear", "wsd")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Linear warm-up to the peak, then down by a curve; updates count from 0."""

    kind: str  # "cosine" and "linear" fall from the peak on; "wsd" stays there, then falls linearly
    steps: int  # updates of the whole run
    peak: float
    warmup: float  # share of the steps
    cooldown: float = 0.2  # share of the steps in which "wsd" falls
    floor: float = 0.0  # where it ends, in parts of the peak

    def rate(self, step: int) -> float:
        """Learning rate of an update."""
        warm = max(1, round(self.steps * self.warmup)) if self.warmup > 0 else 0
        if step < warm:
            return self.peak * (step + 1) / warm
        begin = self._fall_begins(warm)
        through = min(1.0, max(0, step - begin) / max(1, self.steps - begin))
        return self.peak * (self.floor + (1 - self.floor) * self._left(through))

    def _fall_begins(self, warm: int) -> int:
        if self.kind == "wsd":
            return max(warm, self.steps - round(self.steps * self.cooldown))
        return warm

    def _left(self, through: float) -> float:
        """Share of the way down that is left: 1 at the peak, 0 at the end."""
        if self.kind == "cosine":
            return 0.5 * (1 + math.cos(math.pi * through))
        return 1 - through
