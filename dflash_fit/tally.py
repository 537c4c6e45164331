"""How many bytes of states were read from the disk, for whom, and what that spared.

All are bytes as stored.  Pure integers: no I/O, no threads.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any


@dataclass(kw_only=True)
class Reading:
    """One pack that was read for several trials, and who has taken it."""

    size: int
    takers: set[str] = field(default_factory=set)


class Tally:
    """What trials read themselves, and what they had from readings that they share."""

    def __init__(self) -> None:
        self.shared = 0
        self.open: dict[Hashable, Reading] = {}  # by the memory that holds it
        self.share: defaultdict[str, Fraction] = defaultdict(Fraction)
        self.served: Counter[str] = Counter()
        self.own: Counter[str] = Counter()

    def read(self, place: Hashable, size: int) -> None:
        """A pack has been read into a place, and what was there is gone."""
        self.forget(place)
        self.shared += size
        self.open[place] = Reading(size=size)

    def serve(self, place: Hashable, trial: str, part: Fraction) -> None:
        """A trial takes so much of the pack in a place."""
        reading = self.open[place]
        reading.takers.add(trial)
        self.served[trial] += round(reading.size * part)

    def read_alone(self, trial: str, size: int) -> None:
        self.own[trial] += size

    def forget(self, place: Hashable) -> None:
        """Nobody can take the pack in a place any more: it is paid for in equal parts."""
        if place in self.open:
            self._pay(self.open.pop(place), self.share)

    @staticmethod
    def _pay(reading: Reading, share: defaultdict[str, Fraction]) -> None:
        for trial in reading.takers:
            share[trial] += Fraction(reading.size, len(reading.takers))

    def counts(self, *, waited: Mapping[str, float]) -> dict[str, Any]:
        """`bytes_read` from the disk in all, and `bytes_served` from memory: what trials would have
        read had they been alone, beside what they did read alone.

        By trial: its equal share of what was `read` for several; `served`, of the same packs what
        it would have read; what it read on its `own`.  `waited` is passed on.
        """
        share = self.share.copy()
        for reading in self.open.values():
            self._pay(reading, share)
        trials = sorted({*share, *self.served, *self.own, *waited})
        return {
            "bytes_read": self.shared + self.own.total(),
            "bytes_served": self.served.total(),
            "by_trial": {
                trial: {
                    "read": round(share[trial]),
                    "served": self.served[trial],
                    "own": self.own[trial],
                    "waited": waited.get(trial, 0.0),
                }
                for trial in trials
            },
        }
