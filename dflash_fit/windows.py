"""Plan the first epoch while the cache grows.  Pure integers: no torch, no zarr, no I/O.

Units are added in order.  As soon as the documents that wait fill a window of packs, it is planned
like an epoch of its own; what would fill its packs badly waits for the next window.  The packs
depend on the order of the units, lengths, seed and token budget alone.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import ceil

import numpy as np

from dflash_fit.packing import Pack, fit_best, place, slots

WINDOW_PACKS = 16  # larger fills and mixes better, and the first pack comes later
POOR = 0.01  # share of a pack that may stay empty
KEPT = 0.25  # share of the packs that is placed however poor: nothing waits for ever


class Windows:
    """The packs of the epoch as far as they are planned."""

    def __init__(
        self, lengths: Sequence[int], *, token_budget: int, seed: int, packs: int = WINDOW_PACKS
    ) -> None:
        self.lengths, self.token_budget, self.seed = lengths, token_budget, seed
        self.size = packs * token_budget
        self.packs: list[Pack] = []
        self.waiting: list[int] = []  # documents
        self.units = 0  # that have been added
        self.ends: list[tuple[int, int]] = []  # per window: packs and units up to its end

    def add(self, documents: Sequence[int]) -> None:
        """One more unit, with those of its documents that train."""
        self.units += 1
        self.waiting += documents
        if sum(slots(self.lengths[document]) for document in self.waiting) >= self.size:
            self._plan(last=False)

    def finish(self) -> None:
        """No unit comes any more: all documents are placed."""
        if self.waiting:
            self._plan(last=True)

    def units_of(self, packs: int) -> int:
        """How many units were there when the first packs, 1 or more, had all been planned."""
        return self.ends[bisect_right(self.ends, packs - 1, key=lambda end: end[0])][1]

    def _plan(self, *, last: bool) -> None:
        rng = np.random.default_rng([self.seed, 0, len(self.ends)])
        order = [self.waiting[i] for i in rng.permutation(len(self.waiting))]
        packs = fit_best(order, self.lengths, token_budget=self.token_budget)
        packs.sort(key=self._room)
        kept = len(packs) if last else self._good(packs)
        self.waiting = [document for pack in packs[kept:] for document in pack]
        self.packs += [place(packs[i], self.lengths, rng) for i in rng.permutation(kept)]
        self.ends.append((len(self.packs), self.units))

    def _good(self, packs: Sequence[Sequence[int]]) -> int:
        """How many of the packs, the fullest first, are placed now."""
        full = sum(self._room(pack) <= POOR * self.token_budget for pack in packs)
        return max(full, ceil(KEPT * len(packs)))

    def _room(self, pack: Sequence[int]) -> int:
        """Slots that hold no token."""
        return self.token_budget - sum(self.lengths[document] for document in pack)
