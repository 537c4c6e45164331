"""How far a rank is and when it last got on, and which of several ranks holds the others up."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

SLACK = 0.5  # of the timeout: ranks that wait for each other fall silent at about the same time


class State(IntEnum):
    AT_WORK = 0
    WAITING = 1  # for the other ranks
    RESTING = 2  # for something that may take its time
    LEAVING = 3  # its work is done


class Pulse:
    """What the main thread of a rank says of itself; it costs nothing."""

    def __init__(self) -> None:
        self.step, self.ticks = 0, 0
        self._waits = self._rests = 0

    def tick(self, step: int) -> None:
        """It gets on, and is in this step."""
        self.step = step
        self.ticks += 1

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Around what may take longer than the timeout: a capture, a wait for the builder."""
        self._rests += 1
        try:
            yield
        finally:
            self.ticks += 1
            self._rests -= 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for other ranks: if it is long, the fault is theirs."""
        self._waits += 1
        try:
            yield
        finally:
            self.ticks += 1
            self._waits -= 1

    @property
    def state(self) -> State:
        if self._rests:
            return State.RESTING
        return State.WAITING if self._waits else State.AT_WORK


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What the others know of a rank; its own clock measured the age, for clocks differ."""

    step: int
    age: float  # seconds since its last tick
    state: State


def stuck_rank(beats: Sequence[Beat], *, timeout: float) -> int | None:
    """The rank that is furthest behind, where one has not got on for so many seconds.

    Who waits for others is blamed after those at work, and nobody for waiting for a rank that
    rests.
    """
    if not any(beat.age > timeout for beat in beats if _is_held_up(beat, beats)):
        return None
    late = [
        rank
        for rank, beat in enumerate(beats)
        if beat.age > SLACK * timeout and _is_held_up(beat, beats)
    ]
    return min(
        late,
        key=lambda rank: (
            beats[rank].state is State.WAITING,
            beats[rank].step,
            -beats[rank].age,
        ),
    )


def _is_held_up(beat: Beat, beats: Sequence[Beat]) -> bool:
    if beat.state in (State.RESTING, State.LEAVING):
        return False
    resting = [other.step for other in beats if other.state is State.RESTING]
    return not any(beat.state is State.WAITING or step <= beat.step for step in resting)
