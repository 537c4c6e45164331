"""The packs of a run whose cache is still being built.

The first epoch takes the committed units in the order of their commits, in windows of packs; the
epochs behind it are planned over all documents as ever.  The order is written down in the run
folder before anything of it is trained on: who takes it up again trains on the same packs.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Condition, Event, Thread
from typing import Self

from torch.distributed import Store  # type: ignore[attr-defined]
from tqdm import tqdm

from dflash_cache.errors import CacheError
from dflash_cache.growing import NOBODY_GOES_ON
from dflash_cache.reader import Reader
from dflash_fit.course import CourseEnded, Planned, Position
from dflash_fit.errors import FitError
from dflash_fit.lookout import Lookout, write_order
from dflash_fit.news import Entry, News
from dflash_fit.packing import Pack
from dflash_fit.windows import WINDOW_PACKS, Windows

LOOK_EVERY = 0.5  # seconds
NOTICE = 0.1  # seconds in which one who waits notices that it is to stop
SAY_EVERY = 30.0
SHARED_PATIENCE = 60.0  # seconds until all machines have to see what rank 0 sees


class Followed:
    """A `Course` over a cache that may still be growing, the same for all ranks.

    Rank 0 (`first`) looks at the folder and decides; the others hear it through the `store`.
    `documents` are those that train; `order` names units that come first, as `read_order` gives
    them.  A thread of its own looks from `start` to `close`.
    """

    def __init__(
        self,
        reader: Reader,
        documents: Sequence[int],
        *,
        token_budget: int,
        seed: int,
        order: Sequence[str] = (),
        store: Store | None = None,
        first: bool = True,
        window: int = WINDOW_PACKS,
        every: float = LOOK_EVERY,
        patience: float = NOBODY_GOES_ON,
    ) -> None:
        self.reader, self.first, self.every = reader, first, every
        self.planned = Planned(documents, reader.lengths, token_budget=token_budget, seed=seed)
        self.windows = Windows(reader.lengths, token_budget=token_budget, seed=seed, packs=window)
        self.training: dict[str, list[int]] = {}  # documents by unit
        for document in documents:
            self.training.setdefault(reader.located[document].unit, []).append(document)
        self.lookout, self.news = Lookout(reader, order, patience=patience), News(store)
        self.record: Path | None = None
        self.thread: Thread | None = None
        self.closed, self.stopping = Event(), False
        self.changed = Condition()  # its lock guards what follows, and the windows
        self.taken: list[str] = []  # units of the course, in its order
        self.complete = False
        self.ended: CourseEnded | None = None
        self.failure: BaseException | None = None
        self.waiting, self.since, self.seconds = 0, 0.0, 0.0
        self.told: float | None = None  # when people were told last of a wait
        self.in_told_wait = False

    # --- the course -----------------------------------------------------------------------------

    def length(self, epoch: int) -> int | None:
        """Packs of an epoch; None for the first one until all its units are there."""
        if epoch:
            return self.planned.length(epoch)
        return len(self.windows.packs) if self.complete else None

    def pack(self, epoch: int, index: int, *, stopped: Event | None = None) -> Pack:
        """A pack, waited for until its units are committed; raises as `Course.pack` does."""
        assert self.thread is not None, "start it first"
        with self.changed, self._counted():
            while not self._is_there(epoch, index):
                if self.failure is not None:
                    raise self.failure
                if self.ended is not None:
                    raise CourseEnded(self.ended.reason)
                if self.closed.is_set() or (stopped is not None and stopped.is_set()):
                    raise CourseEnded
                self.changed.wait(NOTICE)
        return self.planned.pack(epoch, index) if epoch else self.windows.packs[index]

    def _is_there(self, epoch: int, index: int) -> bool:
        """Whether it is known which pack that is, or that there is none."""
        return self.complete or (epoch == 0 and index < len(self.windows.packs))

    def measurable(self, position: Position, held_out: Sequence[int]) -> list[int]:
        """Those of the held-out documents that may be measured before a position.

        Their units are those from which the packs before it were planned.  Whatever else is
        committed by now does not count, so that a run can be repeated.
        """
        if position.epoch > 1 or (position.epoch and position.index):
            return list(held_out)
        packs = len(self.windows.packs) if position.epoch else position.index
        if not packs:
            return []
        try:
            self.pack(0, packs - 1)  # another rank may have been told earlier
        except IndexError:
            return list(held_out)
        units = set(self.taken[: self.windows.units_of(packs)])
        return [d for d in held_out if self.reader.located[d].unit in units]

    @property
    def waited_seconds(self) -> float:
        """Seconds in which somebody waited for a pack; for several at once they count once."""
        with self.changed:
            return self.seconds + (time.perf_counter() - self.since if self.waiting else 0.0)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if not self.waiting:
            self.since = time.perf_counter()
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1
            if not self.waiting:
                self.seconds += time.perf_counter() - self.since

    # --- its life -------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to look; what is committed already is there soon after."""
        assert self.thread is None, "started twice"
        self.thread = Thread(target=self._run, name="follow", daemon=True)
        self.thread.start()

    def keep_order(self, path: Path) -> None:
        """From now on the order is on disk before its packs are handed out; for rank 0."""
        with self.changed:
            self.record = path
            write_order(path, self.lookout.order)

    def stop(self) -> None:
        """End the course behind what is planned by now, unless it is complete; returns at once.

        On any rank, and in a signal handler, too.
        """
        self.stopping = True

    def close(self) -> None:
        """End the thread, and the waiting of others."""
        self.closed.set()
        if self.thread is not None:
            self.thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self.lookout.begin()
            while not (self.complete or self.ended or self.closed.is_set()):
                entry = self._decide() if self.first else self._hear()
                if entry is not None:
                    self._take(entry)
                self._tell_wait()
                if entry is None:
                    self.closed.wait(self.every)
        except BaseException as error:  # whatever it is, it belongs to who asks for packs
            with self.changed:
                self.failure = error
                self.changed.notify_all()

    def _decide(self) -> Entry | None:
        if self.stopping or self.news.asked_to_stop():
            return Entry(ended=True)
        return self.lookout.look()

    def _hear(self) -> Entry | None:
        if self.stopping:
            self.news.ask_to_stop()
        entry = self.news.hear()
        if entry is not None:
            self._see(entry)
        return entry

    def _see(self, entry: Entry) -> None:
        """Have what rank 0 has seen here too: a network share shows it a little later."""
        end = time.monotonic() + SHARED_PATIENCE
        while not self.closed.is_set():
            self.reader.refresh()
            missing = [unit for unit in entry.units if unit not in self.reader.records]
            if not missing and (self.reader.sealed or not entry.complete):
                return
            if time.monotonic() > end:
                what = f"unit {missing[0]} is committed" if missing else "the cache is sealed"
                raise FitError(
                    f"{self.reader.root}: rank 0 sees that {what}, and this machine does not after "
                    f"{SHARED_PATIENCE:g} seconds; the cache must lie in a folder that all share"
                )
            self.closed.wait(self.every)

    def _take(self, entry: Entry) -> None:
        """Write down, tell, plan: in this order, and nobody gets a pack in between."""
        with self.changed:
            if self.record is not None:
                write_order(self.record, self.lookout.order)
            if self.first:
                self.news.tell(entry)
            self.taken += entry.units
            for unit in entry.units:
                self.windows.add(self.training.get(unit, []))
            if entry.complete:
                self.windows.finish()
                self.complete = True
            if entry.ended:
                self.ended = CourseEnded(None if entry.reason is None else CacheError(entry.reason))
            self.changed.notify_all()

    def _tell_wait(self) -> None:
        """Say now and then that packs are waited for, and once that they come again."""
        now, waits = time.monotonic(), self.waiting and not (self.complete or self.ended)
        if self.first and waits and (self.told is None or now - self.told >= SAY_EVERY):
            _say(f"waiting for the builder, all packs are taken: {self.lookout.counted()}")
            self.told, self.in_told_wait = now, True
        elif self.in_told_wait and not waits:
            if self.ended is None:
                _say(f"going on: {self.lookout.counted()}")
            self.in_told_wait = False


def _say(line: str) -> None:
    tqdm.write(line, file=sys.stderr)
