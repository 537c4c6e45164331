"""Packs on their way to the device: read by threads, copied by a side stream, handed over in order.

    disk --fillers--> host batches --mover, side stream--> slot on the device --> the caller

On a CPU the host batches themselves are handed over.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Self, TypeVar

import torch

from dflash_fit.batch import Batch
from dflash_fit.course import CourseEnded, Position
from dflash_fit.fills import Fills, Visit
from dflash_fit.loader import PackSource
from dflash_fit.roofline import Counts
from dflash_fit.slot import CudaSlot, Mark, Passes, Slot, empty_passes

AHEAD = 2  # packs read ahead of the one in use, at least
# A caller that computes in Python lets another thread in after so long.  Threads that read come
# to the interpreter after every 2 to 32 MB: with Python's own 5 ms such a caller slowed a feed to
# a half from the disk, to a tenth from the page cache.
SWITCH_SECONDS = 5e-4
CPU = torch.device("cpu")

Found = TypeVar("Found")


def packs_in_memory(*, turns: int, passes: int) -> int:
    """How many packs a feed keeps in host memory.

    Where the packs of an update are needed again, their memory is free only after the last pass.
    Meanwhile a reader that is just quick enough reads the others' share of the next round.
    """
    if turns == 1 or passes == 1:
        return 1 + AHEAD
    return turns + max(AHEAD, -(-turns * (passes - 1) // passes))


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
    """Iterates (batch, turn of the update, position of the next update), once.

    Counts how long it was waited for.  Every rank has as many turns; one that has no pack left for
    its last turn gets a batch that is all padding.  Where the course ends early, so does the feed,
    behind the last update whose packs are all there: then `ended` says why.

    A batch belongs to the caller until the next one is asked for, or until `release`: what the
    caller has queued on its stream by then is safe.  Nothing in the caller's thread waits for the
    device, and the caller is never more than two packs ahead of it.  The threads end with the
    steps, with the loop however it is left, and with `close`.
    """

    def __init__(
        self, source: PackSource, position: Position, *, steps: int, device: torch.device
    ) -> None:
        on_gpu, turns, passes = device.type == "cuda", source.lanes.turns, source.passes
        self.hosts = [
            empty_passes(source.shape, passes=passes, device=CPU, pinned=on_gpu)
            for _ in range(packs_in_memory(turns=turns, passes=passes))
        ]
        self.slot: Slot | None = (
            CudaSlot(source.shape, passes=passes if turns == 1 else 1, device=device)
            if on_gpu
            else None
        )
        self.fills = Fills(source, position, steps=steps)
        self.mover: Thread | None = None
        self.freed: SimpleQueue[Mark] = SimpleQueue()
        self.sent: SimpleQueue[tuple[Visit, Mark] | _Failed | None] = SimpleQueue()
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

    @property
    def ended(self) -> CourseEnded | None:
        """Once the loop is over: why it was before its steps were done, None if it was not."""
        return self.fills.ended

    def counts(self) -> Counts:
        """Everything counted so far."""
        read, read_seconds = self.fills.counts()
        return Counts(
            waited=self.waited,
            idle=self.waited if self.slot is None else self.slot.idle,
            delivered=self.delivered,
            read=read,
            read_seconds=read_seconds,
        )

    def release(self) -> None:
        """Give the batch back before the next is asked for; nothing may be queued on it any more.

        Call it between the copy into the captured input and the replay: the next pack is then
        copied to the device beside the replay, otherwise only behind it.
        """
        if self.slot is not None and self.releasable:
            self.releasable = False
            self.freed.put(self.slot.freed())

    def __iter__(self) -> Iterator[tuple[Batch, int, Position]]:
        assert not self.begun, "a feed is iterated once"
        self.begun = True
        with quick_switches(), self:
            for host in self.hosts:
                self.fills.refill(host)
            yield from self._direct() if self.slot is None else self._moved(self.slot)

    def _direct(self) -> Iterator[tuple[Batch, int, Position]]:
        """Hand over the host batches themselves."""
        visits = self.fills.visits()
        while (visit := self._waiting(lambda: next(visits, None))) is not None:
            yield from self._items(visit, visit.batches)
            if visit.last:
                self.fills.refill(visit.load.host)

    def _moved(self, slot: Slot) -> Iterator[tuple[Batch, int, Position]]:
        """Hand over the slot, pack after pack."""
        self.releasable = True  # nobody has it yet
        # Daemon: a feed that somebody forgot must not keep the process alive.
        self.mover = Thread(target=self._move, args=(slot,), name="mover", daemon=True)
        self.mover.start()
        while (arrival := self._next_arrival(slot)) is not None:
            visit, sent = arrival
            slot.receive(sent)
            yield from self._items(visit, slot.held)

    def _next_arrival(self, slot: Slot) -> tuple[Visit, Mark] | None:
        self.release()
        slot.ask()
        arrival = self._waiting(self.sent.get)
        if isinstance(arrival, _Failed):
            raise arrival.error
        return arrival

    def _items(self, visit: Visit, batches: Passes) -> Iterator[tuple[Batch, int, Position]]:
        """A batch for every pass of a visit; `batches` may be more than it has passes."""
        left = len(visit.behind)
        for batch, behind in zip(batches, visit.behind, strict=False):
            left -= 1
            self.releasable = left == 0
            self.delivered += visit.load.size
            yield batch, visit.load.turn, behind

    def _waiting(self, get: Callable[[], Found]) -> Found:
        began = time.perf_counter()
        try:
            return get()
        finally:
            self.waited += time.perf_counter() - began

    def _move(self, slot: Slot) -> None:
        """The mover's whole life: copy pack after pack into the slot, whenever it is free."""
        try:
            for visit in self.fills.visits():
                freed = self.freed.get()
                if self.fills.stopped.is_set():
                    break
                sent = slot.send(visit.batches, freed)
                self.sent.put((visit, sent))
                slot.settle(sent)
                if visit.last:
                    self.fills.refill(visit.load.host)
            self.sent.put(None)
        except BaseException as error:  # whatever it is, it belongs into the caller's thread
            self.sent.put(_Failed(error=error))
