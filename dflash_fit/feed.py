"""Packs on their way to the device: read by threads, copied by a side stream, handed over in order.

    disk --fillers--> host batches --mover, side stream--> slot on the device --> the caller

On a CPU the host batches themselves are handed over.  A pack that is trained on several times has
one batch per turn; they share everything but the anchors.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, Protocol, Self, TypeVar

import torch

from dflash_fit.batch import Batch, BatchShape
from dflash_fit.loader import PackSource, Position
from dflash_fit.roofline import Counts

AHEAD = 2  # packs read ahead of the one in use
FILLERS = 2  # packs filled at once, so that the disk has work while one is begun or finished
# A caller that computes in Python lets another thread in after so long.  Threads that read come
# to the interpreter after every 2 to 32 MB: with Python's own 5 ms such a caller slowed a feed to
# a half from the disk, to a tenth from the page cache.
SWITCH_SECONDS = 5e-4
CPU = torch.device("cpu")

Turns = tuple[Batch, ...]  # memory of one pack: a batch per pass over it
Mark = Any  # a point in the work of a stream
Found = TypeVar("Found")


def empty_turns(
    shape: BatchShape, *, passes: int, device: torch.device, pinned: bool = False
) -> Turns:
    """Memory of one pack, with anchors for every turn."""
    first = Batch.empty(shape, device=device, pinned=pinned)
    bare = replace(shape, token_budget=0)
    others = (Batch.empty(bare, device=device, pinned=pinned) for _ in range(passes - 1))
    return (first, *(_with_anchors_of(first, other) for other in others))


def _with_anchors_of(batch: Batch, other: Batch) -> Batch:
    return replace(batch, anchor_positions=other.anchor_positions, anchor_valid=other.anchor_valid)


def copy_turns_(mine: Turns, theirs: Turns) -> None:
    """Take over a pack with the anchors of all turns, without waiting for the copies."""
    mine[0].copy_(theirs[0])
    for turn, other in zip(mine[1:], theirs[1:], strict=True):
        turn.anchor_positions.copy_(other.anchor_positions, non_blocking=True)
        turn.anchor_valid.copy_(other.anchor_valid, non_blocking=True)


@dataclass(frozen=True, kw_only=True)
class Load:
    """A pack in host memory, and the positions that are trained on from it."""

    host: Turns
    positions: tuple[Position, ...]


class Lane(Protocol):
    """A slot on the device and the way into it.  Nothing here but `settle` waits on the host."""

    slot: Turns

    @property
    def idle(self) -> float:
        """Seconds in which the caller's stream stood still for the next batch, as far as known."""

    def freed(self) -> Mark:
        """In the caller's thread: all that reads the slot has been queued."""

    def send(self, host: Turns, freed: Mark) -> Mark:
        """In the mover's thread: queue a copy into the slot, behind `freed`."""

    def settle(self, sent: Mark) -> None:
        """In the mover's thread: wait until the copy is over."""

    def ask(self) -> None:
        """In the caller's thread: it wants the next batch."""

    def receive(self, sent: Mark) -> None:
        """In the caller's thread: what it queues from now on runs after the copy."""


def cuda_event(**options: bool) -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(**options)  # type: ignore[no-untyped-call]
    return event


class CudaLane:
    """The copies run on a stream of their own, beside whatever the caller has queued on his."""

    def __init__(self, shape: BatchShape, *, passes: int, device: torch.device) -> None:
        self.device = device
        self.slot = empty_turns(shape, passes=passes, device=device)
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.stream.wait_stream(torch.cuda.current_stream(device))  # which writes the empty slot
        self.asked = cuda_event(enable_timing=True)
        self.seconds = 0.0
        self.unread: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def freed(self) -> Mark:
        return self._mark(cuda_event())

    def send(self, host: Turns, freed: Mark) -> Mark:
        self.stream.wait_event(freed)
        with torch.cuda.stream(self.stream):
            copy_turns_(self.slot, host)
        # Blocking: the mover sleeps until the copy is over, instead of keeping a core busy.
        sent = cuda_event(blocking=True)
        sent.record(self.stream)
        return sent

    def settle(self, sent: Mark) -> None:
        sent.synchronize()

    def ask(self) -> None:
        self.asked = self._mark(cuda_event(enable_timing=True))

    def receive(self, sent: Mark) -> None:
        torch.cuda.current_stream(self.device).wait_event(sent)
        # Between the two marks lies nothing but the wait, on the host or on the device.
        self.unread.append((self.asked, self._mark(cuda_event(enable_timing=True))))
        self._read()

    @property
    def idle(self) -> float:
        self._read()
        return self.seconds

    def _read(self) -> None:
        """Add up the waits that the device has behind it."""
        while self.unread and self.unread[0][1].query():  # type: ignore[no-untyped-call]
            asked, received = self.unread.popleft()
            self.seconds += asked.elapsed_time(received) / 1e3

    def _mark(self, event: torch.cuda.Event) -> torch.cuda.Event:
        event.record(torch.cuda.current_stream(self.device))
        return event


class Fills:
    """Host batches being filled by background threads; they come out in the order of the packs.

    `refill` and `next` belong to one thread.
    """

    def __init__(self, source: PackSource, position: Position, *, steps: int) -> None:
        assert position.turn < source.passes, (position, source.passes)
        self.source, self.position, self.left = source, position, steps
        self.pool = ThreadPoolExecutor(FILLERS, thread_name_prefix="fill")
        self.filling: deque[Future[Load]] = deque()
        self.stopped = Event()
        self.lock = Lock()
        self.active, self.since = 0, 0.0
        self.bytes, self.seconds = 0, 0.0  # both as of the last pack that was filled

    def refill(self, host: Turns) -> None:
        """Have the next pack read into host memory that nobody reads any more."""
        positions: list[Position] = []
        while self.left and (not positions or self.position.turn):
            positions.append(self.position)
            self.position, self.left = self.source.after(self.position), self.left - 1
        if positions:
            load = Load(host=host, positions=tuple(positions))
            self.filling.append(self.pool.submit(self._fill, load))

    def next(self) -> Load | None:
        """The next pack once it is filled, None behind the last; raises what its filling raised."""
        return self.filling.popleft().result() if self.filling else None

    def counts(self) -> tuple[int, float]:
        """Bytes and seconds of one moment."""
        with self.lock:
            return self.bytes, self.seconds

    def close(self) -> None:
        """End the threads; what is being read is read to its end, at most a pack for each."""
        self.stopped.set()
        self.pool.shutdown(cancel_futures=True)

    def _fill(self, load: Load) -> Load:
        if self.stopped.is_set():
            raise CancelledError
        first, *others = load.positions
        with self._counted(self.source.stored_bytes(first)):
            self.source.fill(load.host[first.turn], first)
            for position in others:
                self.source.draw(load.host[position.turn], position)
        return load

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


_intervals: list[float] = []  # what the first of the feeds that run has found


@contextmanager
def quick_switches() -> Iterator[None]:
    """Threads of this process wait for the interpreter for at most `SWITCH_SECONDS`.

    The last of several that overlap puts back what the first has found.
    """
    _intervals.append(_intervals[0] if _intervals else sys.getswitchinterval())
    sys.setswitchinterval(min(_intervals[0], SWITCH_SECONDS))
    try:
        yield
    finally:
        before = _intervals.pop()
        if not _intervals:
            sys.setswitchinterval(before)


@dataclass(frozen=True, kw_only=True)
class _Failed:
    """What ended the mover."""

    error: BaseException


class Feed:
    """Iterates (batch, position behind it), once; counts how long it was waited for.

    A batch belongs to the caller until the next one is asked for, or until `release`: what the
    caller has queued on its stream by then is safe.  Nothing in the caller's thread waits for the
    device, and the caller is never more than two packs ahead of it.  The threads end with the
    steps, with the loop however it is left, and with `close`.
    """

    def __init__(
        self, source: PackSource, position: Position, *, steps: int, device: torch.device
    ) -> None:
        self.source = source
        on_gpu = device.type == "cuda"
        self.hosts = [
            empty_turns(source.shape, passes=source.passes, device=CPU, pinned=on_gpu)
            for _ in range(AHEAD + 1)
        ]
        self.lane: Lane | None = (
            CudaLane(source.shape, passes=source.passes, device=device) if on_gpu else None
        )
        self.fills = Fills(source, position, steps=steps)
        self.mover: Thread | None = None
        self.freed: SimpleQueue[Mark] = SimpleQueue()
        self.sent: SimpleQueue[tuple[Load, Mark] | _Failed | None] = SimpleQueue()
        self.begun = self.releasable = False
        self.waited = 0.0  # seconds in which the caller stood still
        self.delivered = 0  # bytes on disk of the batches handed over

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads; packs that are being read are read to their end, at most two."""
        self.fills.stopped.set()
        self.freed.put(None)
        if self.mover is not None:
            self.mover.join()
        self.fills.close()

    def counts(self) -> Counts:
        """Everything counted so far."""
        read, read_seconds = self.fills.counts()
        return Counts(
            waited=self.waited,
            idle=self.waited if self.lane is None else self.lane.idle,
            delivered=self.delivered,
            read=read,
            read_seconds=read_seconds,
        )

    def release(self) -> None:
        """Give the batch back before the next is asked for; nothing may be queued on it any more.

        Call it between the copy into the captured input and the replay: the next pack is then
        copied to the device beside the replay, otherwise only behind it.
        """
        if self.lane is not None and self.releasable:
            self.releasable = False
            self.freed.put(self.lane.freed())

    def __iter__(self) -> Iterator[tuple[Batch, Position]]:
        assert not self.begun, "a feed is iterated once"
        self.begun = True
        with quick_switches(), self:
            for host in self.hosts:
                self.fills.refill(host)
            yield from self._direct() if self.lane is None else self._moved(self.lane)

    def _direct(self) -> Iterator[tuple[Batch, Position]]:
        """Hand over the host batches themselves."""
        while (load := self._waiting(self.fills.next)) is not None:
            yield from self._turns(load, load.host)
            self.fills.refill(load.host)

    def _moved(self, lane: Lane) -> Iterator[tuple[Batch, Position]]:
        """Hand over the slot, pack after pack."""
        self.releasable = True  # nobody has it yet
        # Daemon: a feed that somebody forgot must not keep the process alive.
        self.mover = Thread(target=self._move, args=(lane,), name="mover", daemon=True)
        self.mover.start()
        while (arrival := self._next_arrival(lane)) is not None:
            load, sent = arrival
            lane.receive(sent)
            yield from self._turns(load, lane.slot)

    def _next_arrival(self, lane: Lane) -> tuple[Load, Mark] | None:
        self.release()
        lane.ask()
        arrival = self._waiting(self.sent.get)
        if isinstance(arrival, _Failed):
            raise arrival.error
        return arrival

    def _turns(self, load: Load, turns: Turns) -> Iterator[tuple[Batch, Position]]:
        size = self.source.stored_bytes(load.positions[0]) // self.source.passes
        for position in load.positions:
            self.releasable = position is load.positions[-1]
            self.delivered += size
            yield turns[position.turn], self.source.after(position)

    def _waiting(self, get: Callable[[], Found]) -> Found:
        began = time.perf_counter()
        try:
            return get()
        finally:
            self.waited += time.perf_counter() - began

    def _move(self, lane: Lane) -> None:
        """The mover's whole life: copy pack after pack into the slot, whenever it is free."""
        try:
            while (load := self.fills.next()) is not None:
                freed = self.freed.get()
                if self.fills.stopped.is_set():
                    break
                sent = lane.send(load.host, freed)
                self.sent.put((load, sent))
                lane.settle(sent)
                self.fills.refill(load.host)
            self.sent.put(None)
        except BaseException as error:  # whatever it is, it belongs into the caller's thread
            self.sent.put(_Failed(error=error))
