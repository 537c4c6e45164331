"""Who limits whom: the reader of the cache, or the training step.  Pure numbers: no torch, no I/O.

GB are 10^9 bytes, as the cache stores them.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any, Protocol

WAITING = 0.05  # share of the time; a step that waits less is not held up by its reader
BUSY = 0.5  # share of the time; a reader that reads less than this is not what a step waits for


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What a feed has counted since it began; the difference of two is what lies between."""

    waited: float = 0.0  # seconds in which the training loop stood still for the next batch
    idle: float = 0.0  # seconds in which the device did; on a CPU that is the same
    delivered: int = 0  # bytes of the batches handed over
    read: int = 0  # bytes of the packs read; some are still on their way
    read_seconds: float = 0.0  # in which a pack was being read

    def __sub__(self, other: "Counts") -> "Counts":
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Counts(
            **dict(zip(vars(self), (mine - theirs for mine, theirs in pairs), strict=True))
        )


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the steps of an interval need, what the reader can give, and which of them limits."""

    seconds: float
    gb_per_s_needed: float  # by steps that never wait
    gb_per_s_delivered: float | None  # by the reader while it reads; None: it read nothing
    waiting: float  # share of the time in which the device stood still for the next batch
    reader_busy: float  # share of the time

    @property
    def limit(self) -> str:
        """`step`, `reader`, or `handover` where a step waits though the reader does too."""
        if self.waiting <= WAITING:
            return "step"
        return "reader" if self.reader_busy >= BUSY else "handover"

    def to_dict(self) -> dict[str, Any]:
        """For a line of metrics, which has its own seconds."""
        return {**{k: v for k, v in asdict(self).items() if k != "seconds"}, "limit": self.limit}

    @property
    def words(self) -> str:
        needed, delivered = _rate(self.gb_per_s_needed), _rate(self.gb_per_s_delivered or 0.0)
        return {
            "step": self._words_of_step(needed, delivered),
            "reader": f"disk delivers {delivered} GB/s, the step could take {needed}: the reader "
            f"limits (waiting {self.waiting:.0%}); try --passes-per-pack, more --anchors, or an "
            "8-bit encoding",
            "handover": f"waiting {self.waiting:.0%} though the reader is busy only "
            f"{self.reader_busy:.0%}: the host or the copy to the device limits",
        }[self.limit]

    def _words_of_step(self, needed: str, delivered: str) -> str:
        if self.gb_per_s_delivered is None:
            return f"the step takes {needed} GB/s, already read: the step limits"
        if self.gb_per_s_delivered < self.gb_per_s_needed:
            return (
                f"the step takes {needed} GB/s of packs read ahead, the reader gives {delivered}: "
                "the step limits until they are used up"
            )
        return f"reader {needed} of {delivered} GB/s: the step limits"


def read_gauge(counts: Counts, *, seconds: float) -> Reading:
    """The reading of an interval of so many seconds, in which so much was counted."""
    return Reading(
        seconds=seconds,
        gb_per_s_needed=counts.delivered / 1e9 / max(seconds - counts.idle, 1e-9),
        gb_per_s_delivered=(
            counts.read / 1e9 / counts.read_seconds if counts.read_seconds > 0 else None
        ),
        waiting=min(1.0, counts.idle / max(seconds, 1e-9)),
        reader_busy=min(1.0, counts.read_seconds / max(seconds, 1e-9)),
    )


def together(readings: Sequence[Reading]) -> Reading:
    """One reading of ranks that read side by side: rates add up, and the slowest one counts."""
    delivered = [r.gb_per_s_delivered for r in readings if r.gb_per_s_delivered is not None]
    return Reading(
        seconds=max(r.seconds for r in readings),
        gb_per_s_needed=sum(r.gb_per_s_needed for r in readings),
        gb_per_s_delivered=sum(delivered) if delivered else None,
        waiting=max(r.waiting for r in readings),
        reader_busy=max(r.reader_busy for r in readings),
    )


def _rate(gb_per_s: float) -> str:
    return f"{gb_per_s:.2f}" if gb_per_s >= 0.1 else f"{gb_per_s:.2g}"


class Counting(Protocol):
    def counts(self) -> Counts:
        """Everything counted so far."""


class Gauge:
    """Reads a feed once per log interval."""

    def __init__(self, feed: Counting, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.feed, self.clock = feed, clock
        self.restart()

    def restart(self) -> None:
        """Begin the interval here: what went before was no training."""
        self.began, self.before = self.clock(), self.feed.counts()

    def read(self) -> Reading:
        """The interval since the last reading; the next one begins."""
        began, before = self.began, self.before
        self.restart()
        return read_gauge(self.before - before, seconds=max(self.began - began, 1e-9))


def anchors_that_hide_reading(
    read_seconds: float,
    fixed_seconds: float,
    seconds_per_anchor: float,
    *,
    multiple: int,
    most: int,
    margin: float = 1.05,
    passes: int = 1,
) -> int:
    """The fewest anchors with which a step takes `margin` times as long as reading its share.

    A step takes `fixed_seconds`, and `seconds_per_anchor` more for each; a pack takes
    `read_seconds` and serves `passes` steps.  A multiple of `multiple`, which is the least, and
    at most `most`, where even that many do not hide the reading.
    """
    assert 0 < multiple <= most, (multiple, most)
    assert seconds_per_anchor > 0, seconds_per_anchor
    missing = margin * read_seconds / passes - fixed_seconds
    # A step that is exactly long enough is: the last digits of the division do not count.
    groups = math.ceil(missing / seconds_per_anchor / multiple - 1e-9)
    return multiple * min(max(groups, 1), most // multiple)
