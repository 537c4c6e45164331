"""How far an extraction is, and how fast: counted by those who work, shown by one process.

Counting and showing are apart, since the process that the user looks at need not be one that
works.
"""

import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from tqdm import tqdm

from dflash_cache.buckets import UnitPlan
from dflash_cache.disk import existing_folder

REDRAW, RETELL = 0.5, 30.0  # seconds between two drawings at a terminal, two lines elsewhere
WINDOW = 30.0  # seconds that speeds are taken over: a mean of all hides what slows down now
MOST_TOLD = 8  # workers whose speeds stand one by one; of more there is the range


class Progress(Protocol):
    """What an extraction says of itself; several threads may do so at once."""

    def update(self, tokens: int) -> None:
        """So many tokens more have gone through the target."""

    def wrote(self, count: int) -> None:
        """So many bytes more are on the disk."""

    def committed(self, unit: UnitPlan) -> None:
        """The unit has a record in force."""


@dataclass(frozen=True, kw_only=True)
class Count:
    """What a worker has done so far, in this run."""

    tokens: int = 0
    bytes: int = 0


Counts = Mapping[int, Count]  # by worker
NOTHING = Count()


def sum_of(counts: Counts) -> Count:
    return Count(
        tokens=sum(count.tokens for count in counts.values()),
        bytes=sum(count.bytes for count in counts.values()),
    )


# --- speed --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Per second, over the last `WINDOW` seconds."""

    tokens: float
    bytes: float
    workers: dict[int, float]  # tokens by worker; without those that have stopped


class Meter:
    """Speeds from counts that are noted now and then; `seconds` is a clock that only goes up."""

    def __init__(self, began: float) -> None:
        self.noted: deque[tuple[float, dict[int, Count]]] = deque([(began, {})])

    def note(self, seconds: float, counts: Counts) -> Speed:
        """The speed of late; while nothing is counted it stays what it was."""
        if counts == self.noted[-1][1]:
            return self.speed()
        self.noted.append((seconds, dict(counts)))
        while len(self.noted) > 2 and self.noted[1][0] <= seconds - WINDOW:
            self.noted.popleft()
        return self.speed()

    def speed(self) -> Speed:
        (began, before), (ended, after) = self.noted[0], self.noted[-1]
        span = max(ended - began, 1e-9)
        # Work that died with a worker is taken back from its count; that is no speed.
        tokens = {
            worker: max(0, count.tokens - before.get(worker, NOTHING).tokens) / span
            for worker, count in after.items()
        }
        grown = sum_of(after).bytes - sum_of(before).bytes
        return Speed(
            tokens=sum(tokens.values()),
            bytes=max(0, grown) / span,
            workers={worker: speed for worker, speed in tokens.items() if speed},
        )


# --- words --------------------------------------------------------------------------------------


def short(number: float) -> str:
    """Three digits and a letter: 1.21M."""
    for letter, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            scaled = number / size
            return f"{scaled:.{2 if scaled < 10 else 1 if scaled < 100 else 0}f}{letter}"
    return f"{number:.0f}"


def hours(seconds: float) -> str:
    """Hours, minutes and seconds: 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def speeds_text(speed: Speed) -> str:
    """Tokens a second in all, and of each worker where there are several."""
    told = f"{speed.tokens:,.0f} tok/s"
    each = sorted(speed.workers.items())
    if len(each) > MOST_TOLD:
        slowest, fastest = min(speed.workers.values()), max(speed.workers.values())
        return f"{told} ({len(each)} workers, {slowest:,.0f} to {fastest:,.0f} each)"
    if len(each) > 1 or any(worker for worker, _ in each):
        told += f" ({' '.join(f'w{worker} {own:,.0f}' for worker, own in each)})"
    return told


def status_text(speed: Speed, *, left: int, free: int, idle: float = 0.0) -> str:
    """What stands behind the bar: speeds, disk, and the time that `left` tokens take.

    `idle` are the seconds since the last token, told where they are many.
    """
    parts = [speeds_text(speed)]
    if speed.bytes:
        parts.append(f"{speed.bytes / 1e9:.3g} GB/s")
    parts.append(f"{free / 1e9:,.0f} GB free")
    parts.append(f"{hours(left / speed.tokens)} left" if speed.tokens else "no speed yet")
    if speed.tokens and idle > WINDOW:
        parts.append(f"no token for {hours(idle)}")
    return ", ".join(parts)


def summary_text(count: Count, seconds: float) -> str:
    """What was done in all, once it is over."""
    span = max(seconds, 1e-9)
    return (
        f"extracted {count.tokens:,} tokens in {seconds:,.1f} s: {count.tokens / span:,.0f} tok/s; "
        f"{count.bytes / 1e9:,.3f} GB written, {count.bytes / 1e9 / span:.3g} GB/s"
    )


def skips_text(skipped: Mapping[str, int]) -> str:
    """Rows that the build leaves out, by reason; the most frequent first."""
    told = sorted(skipped.items(), key=lambda item: (-item[1], item[0]))
    return f"{sum(skipped.values()):,} rows skipped: " + "; ".join(
        f"{count:,} {reason}" for reason, count in told
    )


# --- showing ------------------------------------------------------------------------------------


class FreeSpace:
    """Bytes free on a disk, as last known: one that no longer answers must not silence who asks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bytes = self._ask()
        self.thread: threading.Thread | None = None

    def known(self) -> int:
        """What the last answer was; the disk is asked again meanwhile."""
        if self.thread is None or not self.thread.is_alive():
            self.thread = threading.Thread(target=self._renew, name="free-space", daemon=True)
            self.thread.start()
        return self.bytes

    def _renew(self) -> None:
        with suppress(OSError):
            self.bytes = self._ask()

    def _ask(self) -> int:
        return shutil.disk_usage(existing_folder(self.folder)).free


class Display:
    """A line with a bar at a terminal, and a plain line now and then elsewhere."""

    def __init__(
        self,
        folder: Path,
        *,
        total: int,
        done: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`done` of the `total` tokens were there before; they are no speed of this run."""
        self.total, self.done, self.clock = total, done, clock
        self.free = FreeSpace(folder)
        self.stream = stream or sys.stderr
        self.lock = threading.Lock()
        self.last = clock()
        self._begin()
        self.started = False
        self.counts: Counts = {}
        self.bar: tqdm[Any] | None = None
        if self.stream.isatty():
            self.bar = tqdm(
                total=total,
                initial=done,
                file=self.stream,
                bar_format="extract {percentage:3.0f}%|{bar:20}| {desc}",
                dynamic_ncols=True,
                leave=False,
            )

    def start(self) -> None:
        """From now on it is the target's own speed: it is loaded and proved."""
        self._begin()
        self.started = True

    def _begin(self) -> None:
        self.began = self.moved = self.clock()
        self.meter = Meter(self.began)

    def show(self, counts: Counts) -> None:
        """Draw what is new, if the last drawing is long enough ago."""
        with self.lock:
            if sum_of(counts).tokens != sum_of(self.counts).tokens:
                self.moved = self.clock()
            self.counts = counts
            self._draw_if_due()

    def refresh(self) -> None:
        """Draw although nothing is new, so that it shows when nothing moves."""
        with self.lock:
            if self.started:
                self._draw_if_due()

    def _draw_if_due(self) -> None:
        now = self.clock()
        if now - self.last >= (REDRAW if self.bar is not None else RETELL):
            self.last = now
            with suppress(OSError):  # a terminal may be gone, and the work goes on
                self._draw(self.meter.note(now, self.counts), idle=now - self.moved)

    def _draw(self, speed: Speed, *, idle: float) -> None:
        reached = min(self.total, self.done + sum_of(self.counts).tokens)
        told = f"{short(reached)} of {short(self.total)} tokens, " + status_text(
            speed, left=self.total - reached, free=self.free.known(), idle=idle
        )
        if self.bar is not None:
            self.bar.n = reached
            self.bar.set_description_str(told)
        else:
            self.tell(f"extract {reached / max(self.total, 1):.0%}: {told}")

    def tell(self, line: str) -> None:
        """A line of its own, above the bar."""
        tqdm.write(line, file=self.stream)

    def close(self) -> None:
        """Take the bar away and say what was done."""
        count = sum_of(self.counts)
        with suppress(OSError):
            if self.bar is not None:
                self.bar.close()
            if count.tokens:
                self.tell(summary_text(count, self.clock() - self.began))


@contextmanager
def repeated(
    call: Callable[[], None], *, every: float, name: str, until: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Call something every so many seconds, in a thread of its own, as long as the block runs.

    The failures of `until` end it before, without a word.
    """
    over = threading.Event()

    def run() -> None:
        with suppress(*until):
            while not over.wait(every):
                call()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def shown(
    folder: Path, *, total: int, done: int, skipped: Mapping[str, int] | None = None
) -> Iterator[Display]:
    """A display that ends with its summary; `skipped` rows are told at the start."""
    display = Display(folder, total=total, done=done)
    if skipped:
        display.tell(skips_text(skipped))
    try:
        with repeated(display.refresh, every=REDRAW, name="dflash-display"):
            yield display
    finally:
        display.close()


class Alone:
    """The progress of a process that works by itself, and shows it."""

    def __init__(self, display: Display) -> None:
        display.start()
        self.display, self.lock, self.count = display, threading.Lock(), Count()

    def update(self, tokens: int) -> None:
        self._add(tokens=tokens)

    def wrote(self, count: int) -> None:
        self._add(written=count)

    def committed(self, unit: UnitPlan) -> None:
        """Its tokens and bytes are counted already."""

    def _add(self, *, tokens: int = 0, written: int = 0) -> None:
        with self.lock:
            self.count = Count(tokens=self.count.tokens + tokens, bytes=self.count.bytes + written)
            self.display.show({0: self.count})
