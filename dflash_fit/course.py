"""The packs of a run, epoch behind epoch: the places in them, and which are whose.

All packs of all epochs, one behind the other, are cut into rounds.  The packs of a round share an
update; a round is trained on as often as there are passes over it.

Usually all packs of an epoch are planned at once.  While a cache is still being built its first
epoch grows: its length is not known yet, and whoever asks for a pack may have to wait for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Event, Lock
from typing import Protocol

from dflash_cache.errors import DFlashError
from dflash_fit.packing import Pack, plan_epoch

PLANS_KEPT = 2  # of epochs: packs are read ahead across the end of one


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """Which packs of an update are this rank's: lane l belongs to rank l % world.

    What an update trains on depends on `packs` alone, whatever the number of ranks.
    """

    packs: int
    rank: int
    world: int

    @property
    def turns(self) -> int:
        """Turns of every rank in an update; in its last one a rank may be idle."""
        return -(-self.packs // self.world)

    def mine(self, turn: int) -> int | None:
        """The lane that this rank trains on in a turn; None: it is idle."""
        lane = turn * self.world + self.rank
        return lane if lane < self.packs else None


ALONE = Lanes(packs=1, rank=0, world=1)


@dataclass(frozen=True, kw_only=True)
class Position:
    """What is trained on next: the first pack of a round, and the pass over the round.

    While the length n of epoch e is unknown, (e, n + i) stands for (e + 1, i).
    """

    epoch: int
    index: int
    turn: int = 0


class CourseEnded(Exception):
    """A course ends before the pack that was asked for; `reason` is what people are told, if any.

    It is no error by itself: what was trained on up to there is sound.
    """

    def __init__(self, reason: str | DFlashError | None = None) -> None:
        super().__init__(reason)
        self.reason = reason


class Course(Protocol):
    """Where packs come from; called by several threads at once.

    The same for all ranks, and whatever the timing: which packs there are, in which order, and
    where it ends early, if it does.
    """

    def length(self, epoch: int) -> int | None:
        """Packs of an epoch, 1 or more; None where that is not known yet.  Never waits for it."""

    def pack(self, epoch: int, index: int, *, stopped: Event | None = None) -> Pack:
        """A pack, waited for where it is not there yet; those before it are there, too.

        Raises `IndexError` where the epoch turns out to be no longer than `index`, from then on
        `length` knows it; `CourseEnded` where the course ends before the pack, and soon after
        `stopped` is set while it waits.
        """


class Planned:
    """All packs of every epoch, planned from lengths alone."""

    def __init__(
        self, documents: Sequence[int], lengths: Sequence[int], *, token_budget: int, seed: int
    ) -> None:
        self.documents, self.lengths = documents, lengths
        self.token_budget, self.seed = token_budget, seed
        self._plans: dict[int, list[Pack]] = {}
        self._lengths: dict[int, int] = {}  # of epochs; outlives the plans
        self._lock = Lock()  # threads that want the same plan at once make it once

    def plan(self, epoch: int) -> list[Pack]:
        """All packs of an epoch."""
        # Past the lock: who has a plan need not wait until the next one is made.
        packs = self._plans.get(epoch)
        return self._make(epoch) if packs is None else packs

    def _make(self, epoch: int) -> list[Pack]:
        with self._lock:
            if epoch not in self._plans:
                packs = plan_epoch(
                    self.documents,
                    self.lengths,
                    token_budget=self.token_budget,
                    seed=self.seed,
                    epoch=epoch,
                )
                self._lengths[epoch] = len(packs)
                for old in list(self._plans)[: 1 - PLANS_KEPT]:
                    del self._plans[old]
                self._plans[epoch] = packs
            return self._plans[epoch]

    def length(self, epoch: int) -> int:
        known = self._lengths.get(epoch)
        return len(self.plan(epoch)) if known is None else known

    def pack(self, epoch: int, index: int, *, stopped: Event | None = None) -> Pack:
        return self.plan(epoch)[index]


def ahead(course: Course, position: Position, packs: int) -> Position:
    """The position so many packs further, in the same pass; in a later epoch where that is known.

    In an epoch of unknown length the index just grows.  Waits for nothing.
    """
    epoch, index = position.epoch, position.index + packs
    # The first pack of an epoch is there whatever its length: none is planned only to see that.
    while index and (length := course.length(epoch)) is not None and index >= length:
        epoch, index = epoch + 1, index - length
    return replace(position, epoch=epoch, index=index)


def located(course: Course, position: Position, *, stopped: Event | None = None) -> Position:
    """The same place with an epoch and an index that are sure: the pack is there.

    Waits for it; raises `CourseEnded` as `Course.pack` does.
    """
    while True:
        position = ahead(course, position, 0)
        try:
            course.pack(position.epoch, position.index, stopped=stopped)
            return position
        except IndexError:  # the epoch has just turned out to be shorter
            assert course.length(position.epoch), position
