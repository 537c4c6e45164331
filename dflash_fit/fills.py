"""Packs on their way from the disk into host memory: who reads what, and when it is needed.

An update has one pack or more, a turn for each; the updates of a round have the same packs.  Where
an update takes several turns, its packs stay in host memory until the last pass over them: they
are read once, and visited in every pass.
"""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Event, Lock

from dflash_fit.course import CourseEnded, Position, ahead
from dflash_fit.loader import PackSource
from dflash_fit.slot import Passes

FILLERS = 2  # packs filled at once, so that the disk has work while one is begun or finished


@dataclass(frozen=True, kw_only=True)
class Errand:
    """A pack to be read: which, counted from the position at which a feed begins."""

    packs: int  # before the first of its round
    turn: int  # of an update, in which it is trained on
    passes: range  # over it


@dataclass(frozen=True, kw_only=True)
class Load:
    """A pack in host memory."""

    host: Passes  # the first of them are filled, as many as there are passes
    turn: int
    behind: tuple[Position, ...]  # the next update, for every pass
    size: int  # bytes on disk that each pass stands for


@dataclass(frozen=True, kw_only=True)
class Visit:
    """The passes over a pack, from `first` to before `end`, for which it is copied once."""

    load: Load
    first: int
    end: int

    @property
    def batches(self) -> Passes:
        return self.load.host[self.first : self.end]

    @property
    def behind(self) -> tuple[Position, ...]:
        return self.load.behind[self.first : self.end]

    @property
    def last(self) -> bool:
        """Whether the host memory is free behind it."""
        return self.end == len(self.load.behind)


class Fills:
    """Host batches being filled by background threads; they come out in the order of training.

    `refill` and `visits` belong to one thread.
    """

    def __init__(self, source: PackSource, position: Position, *, steps: int) -> None:
        assert position.turn < source.passes, (position, source.passes)
        self.source, self.turns = source, source.lanes.turns
        self.begin = replace(position, turn=0)
        self.errands = self._errands(position.turn, steps)
        self.pool = ThreadPoolExecutor(FILLERS, thread_name_prefix="fill")
        self.filling: deque[Future[Load]] = deque()
        self.ended: CourseEnded | None = None
        self.stopped = Event()
        self.lock = Lock()
        self.active, self.since = 0, 0.0
        self.bytes, self.seconds = 0, 0.0  # both as of the last pack that was filled

    def _errands(self, first: int, steps: int) -> Iterator[Errand]:
        """What has to be read for so many updates, in order; the first has pass `first`."""
        packs = 0
        while steps:
            passes = range(first, min(self.source.passes, first + steps))
            for turn in range(self.turns):
                yield Errand(packs=packs, turn=turn, passes=passes)
            packs, first, steps = packs + self.source.lanes.packs, 0, steps - len(passes)

    def refill(self, host: Passes) -> None:
        """Have the next pack read into host memory that nobody reads any more."""
        errand = next(self.errands, None)
        if errand is not None:
            self.filling.append(self.pool.submit(self._fill, host, errand))

    def visits(self) -> Iterator[Visit]:
        """Packs once they are filled, in the order of training, round by round.

        Memory of a pack is to be filled again behind its last visit.  Ends with the steps or with
        the course; raises what the filling of a pack raised.
        """
        while (load := self._next()) is not None:
            passes = len(load.behind)
            if self.turns == 1:
                yield Visit(load=load, first=0, end=passes)
            else:
                yield from self._visits_by_turns(load, passes)

    def _visits_by_turns(self, first: Load, passes: int) -> Iterator[Visit]:
        """The packs of a round one after the other, again in every pass."""
        loads = [first]
        for number in range(passes):
            for turn in range(self.turns):
                if turn == len(loads):
                    load = self._next()
                    assert load is not None, "a round has all its packs, or none"
                    loads.append(load)
                yield Visit(load=loads[turn], first=number, end=number + 1)

    def _next(self) -> Load | None:
        """The next pack, None behind the last."""
        try:
            return self.filling.popleft().result() if self.filling else None
        except CourseEnded as ended:
            if not self.stopped.is_set():
                self.ended = ended
            return None

    def counts(self) -> tuple[int, float]:
        """Bytes and seconds of one moment."""
        with self.lock:
            return self.bytes, self.seconds

    def close(self) -> None:
        """End the threads; what is being read is read to its end, at most a pack for each."""
        self.stopped.set()
        self.pool.shutdown(cancel_futures=True)

    def _fill(self, host: Passes, errand: Errand) -> Load:
        if self.stopped.is_set():
            raise CancelledError
        source, lane = self.source, self.source.lanes.mine(errand.turn)
        begin = ahead(source.course, self.begin, errand.packs)
        # For the packs of all ranks and turns: no update is begun that could not be finished.
        begin = source.whole(begin, stopped=self.stopped)
        updates = [replace(begin, turn=number) for number in errand.passes]
        size = source.stored_bytes(begin, lane)
        with self._counted(size):
            source.fill(host[0], updates[0], lane)
            for batch, update in zip(host[1:], updates[1:], strict=False):
                source.draw(batch, update, lane)
        return Load(
            host=host,
            turn=errand.turn,
            behind=tuple(source.after(update) for update in updates),
            size=size // source.passes,
        )

    @contextmanager
    def _counted(self, size: int) -> Iterator[None]:
        """Add a pack, and the time in which it or another was being read, once."""
        with self.lock:
            if not self.active:
                self.since = time.perf_counter()
            self.active += 1
        try:
            yield
        finally:
            with self.lock:
                now = time.perf_counter()
                self.seconds, self.since = self.seconds + now - self.since, now
                self.bytes += size
                self.active -= 1
