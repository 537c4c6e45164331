"""Units written behind the target's back: a thread takes batches as they land and commits units.

The main thread hands over units and batches in order and never waits for the disk, unless all
buffers are full.  A failure on either side ends both: the writer's is raised in the main thread,
and what the main thread could not finish is abandoned, no record names it.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from queue import SimpleQueue

from dflash_cache.attempt import EncodedSample
from dflash_cache.buckets import UnitPlan
from dflash_cache.checks import UnitChecks
from dflash_cache.landing import Buffers, Landed
from dflash_cache.progress import Progress
from dflash_cache.samples import Sample
from dflash_cache.schema import UnitRecord

# What one unit's writing takes: its samples' states are read as they come.
WriteUnit = Callable[[UnitPlan, Sequence[Sample], Iterator[EncodedSample]], UnitRecord]


@dataclass(frozen=True, kw_only=True)
class _Unit:
    plan: UnitPlan
    samples: Sequence[Sample]


class _Sign(Enum):
    WHOLE = auto()  # the unit has all its batches
    STOP = auto()  # no more units
    ABANDON = auto()  # the main thread has failed


class _Abandoned(Exception):
    """The unit that is being written will never be whole."""


class UnitWriter:
    """The writing thread, as the main thread sees it; the block ends when it has.

    Units that are whole are committed also where the block ends with an error.
    """

    def __init__(
        self, write: WriteUnit, *, checks: UnitChecks, progress: Progress, buffers: Buffers
    ) -> None:
        self.write, self.checks, self.progress, self.buffers = write, checks, progress, buffers
        self.handed: SimpleQueue[_Unit | Landed | _Sign] = SimpleQueue()
        self.hurry = False
        self.ended = threading.Event()
        # A daemon: who interrupts twice does not want to wait for the disk either.
        self.thread = threading.Thread(target=self._run, name="unit-writer", daemon=True)

    def __enter__(self) -> "UnitWriter":
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.handed.put(_Sign.STOP if kind is None else _Sign.ABANDON)
        # Not by `join`, which takes a thread for ended when it is interrupted (Python 3.11).
        try:
            self.ended.wait()
        except BaseException:
            self.hurry = True
            self.ended.wait()
            raise
        self.thread.join()
        if kind is None:
            self.buffers.raise_failure()

    def begin(self, plan: UnitPlan, samples: Sequence[Sample]) -> None:
        """The batches that follow are this unit's."""
        self.buffers.raise_failure()
        self.handed.put(_Unit(plan=plan, samples=samples))

    def add(self, batch: Landed) -> None:
        """The next samples of the unit, in their order."""
        self.handed.put(batch)

    def end(self) -> None:
        """The unit is whole."""
        self.handed.put(_Sign.WHOLE)

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while isinstance(unit := self.handed.get(), _Unit):
                record = self.write(unit.plan, unit.samples, self._states(unit))
                self.progress.wrote(record.bytes)
                self.progress.committed(unit.plan)
        except _Abandoned:
            pass
        except BaseException as error:  # whatever it is, the main thread has to end with it
            self.buffers.fail(error)
        finally:
            self.ended.set()

    def _states(self, unit: _Unit) -> Iterator[EncodedSample]:
        """The samples of a unit as they land, each batch checked before any of it is written."""
        while (batch := self.handed.get()) is not _Sign.WHOLE:
            if not isinstance(batch, Landed) or self.hurry:
                raise _Abandoned
            self.checks.batch(batch.wait(), batch.samples)
            self.progress.update(batch.tokens)
            yield from batch.encoded()
        self.checks.unit(unit.plan.name, unit.samples)
