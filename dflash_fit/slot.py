"""Memory of a pack, and the slot on the device that packs are copied into beside the step.

A pack that is trained on several times has one batch per pass; they share everything but the
anchors.
"""

from collections import deque
from dataclasses import replace
from typing import Any, Protocol

import torch

from dflash_fit.batch import Batch, BatchShape

Passes = tuple[Batch, ...]  # a pack in memory: a batch per pass over it
Mark = Any  # a point in the work of a stream


def empty_passes(
    shape: BatchShape, *, passes: int, device: torch.device, pinned: bool = False
) -> Passes:
    """Memory of one pack, with anchors for every pass over it."""
    first = Batch.empty(shape, device=device, pinned=pinned)
    bare = replace(shape, token_budget=0)
    others = (Batch.empty(bare, device=device, pinned=pinned) for _ in range(passes - 1))
    return (first, *(_with_anchors_of(first, other) for other in others))


def _with_anchors_of(batch: Batch, other: Batch) -> Batch:
    return replace(batch, anchor_positions=other.anchor_positions, anchor_valid=other.anchor_valid)


def copy_passes_(mine: Passes, theirs: Passes) -> None:
    """Take over a pack with the anchors of all passes, without waiting for the copies."""
    mine[0].copy_(theirs[0])
    for batch, other in zip(mine[1:], theirs[1:], strict=True):
        batch.anchor_positions.copy_(other.anchor_positions, non_blocking=True)
        batch.anchor_valid.copy_(other.anchor_valid, non_blocking=True)


class Slot(Protocol):
    """Memory on the device and the way into it.  Nothing here but `settle` waits on the host."""

    held: Passes

    @property
    def idle(self) -> float:
        """Seconds in which the caller's stream stood still for the next batch, as far as known."""

    def freed(self) -> Mark:
        """In the caller's thread: all that reads the slot has been queued."""

    def send(self, batches: Passes, freed: Mark) -> Mark:
        """In the mover's thread: queue a copy into the first of `held`, behind `freed`."""

    def settle(self, sent: Mark) -> None:
        """In the mover's thread: wait until the copy is over."""

    def ask(self) -> None:
        """In the caller's thread: it wants the next batch."""

    def receive(self, sent: Mark) -> None:
        """In the caller's thread: what it queues from now on runs after the copy."""


def cuda_event(**options: bool) -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(**options)  # type: ignore[no-untyped-call]
    return event


class CudaSlot:
    """The copies run on a stream of their own, beside whatever the caller has queued on his."""

    def __init__(self, shape: BatchShape, *, passes: int, device: torch.device) -> None:
        self.device = device
        self.held = empty_passes(shape, passes=passes, device=device)
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.stream.wait_stream(torch.cuda.current_stream(device))  # which writes the empty slot
        self.asked = cuda_event(enable_timing=True)
        self.seconds = 0.0
        self.unread: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def freed(self) -> Mark:
        return self._mark(cuda_event())

    def send(self, batches: Passes, freed: Mark) -> Mark:
        self.stream.wait_event(freed)
        with torch.cuda.stream(self.stream):
            copy_passes_(self.held[: len(batches)], batches)
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
