"""What one process of a build does for all: show the progress, notice who is gone or stands still.

It is the process that the user looks at, which plans and seals; when it is gone, all are.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from torch import distributed

from dflash_cache.board import LEAD, Board
from dflash_cache.progress import Counts, Display, repeated
from dflash_cache.stalls import Stalls

EVERY = 0.5  # seconds between two looks
# A supervisor beats every few seconds; one that was silent for so long is gone with its machine.
SILENCE = 60.0
# Who has not looked for so long was stopped itself, and maybe the others with it: Ctrl-Z, or Slurm.
GAP = SILENCE / 2
# A machine may take so long to start; who never came holds nothing, so nobody waits for less.
LATE = 600.0


@dataclass(eq=False)
class Watch:
    """Looks at the board now and then; knows its own clock alone."""

    board: Board
    display: Display
    clock: Callable[[], float] = time.monotonic
    heard: dict[int, tuple[int, float]] = field(default_factory=dict)  # beats, and since when
    looked: float | None = None
    told: set[int] = field(default_factory=set)
    stalls: Stalls = field(default_factory=Stalls)
    started: bool = False

    def look(self) -> None:
        self.bury_the_silent()
        with suppress(OSError):  # of a terminal that is gone: no reason to look no more
            self.tell()

    def tell(self) -> None:
        self.tell_deaths()
        if not self.started and self.board.evidence() is not None:
            self.started = True
            self.display.start()
            self.stalls.begin_anew(self.clock())
        counts = self.board.counts()
        self.tell_stalls(counts)
        self.display.show(counts)

    def bury_the_silent(self) -> None:
        now = self.clock()
        if self.looked is not None and now - self.looked > GAP:
            self.heard.clear()
            self.stalls.begin_anew(now)
        self.looked = now
        for worker in range(self.board.world):
            beats = self.board.beats(worker)
            before, since = self.heard.get(worker, (-1, now))
            if beats != before:
                self.heard[worker] = (beats, now)
            elif now - since > (SILENCE if beats else LATE) and not self.board.has_left(worker):
                self.board.bury(worker, f"no sign of life for {now - since:.0f} s")

    def tell_deaths(self) -> None:
        """One line for each worker that died, and where its work goes."""
        for worker in set(range(self.board.world)) - self.told:
            if (how := self.board.end_of(worker)) is None:
                continue
            self.told.add(worker)
            line = f"worker {worker} died ({how})"
            held = len(self.board.held(worker))
            if held and self.board.failure() is None:
                line += f"; its {held} unit{'s go' if held > 1 else ' goes'} to the others"
            self.display.tell(line)

    def tell_stalls(self, counts: Counts) -> None:
        """Who lives, holds something, and gets nowhere; and who does so no more."""
        if self.board.is_finished() or self.board.failure() is not None:
            return
        first = [] if self.started else self.board.holders(LEAD)[-1:]
        for worker, count in counts.items():
            if self.board.end_of(worker) is None:
                held = ["the start of the build"] if worker in first else self.board.held(worker)
                if line := self.stalls.look(worker, count, held, self.clock()):
                    self.display.tell(line)


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Look at the board in a thread of its own, and once more at the end."""
    # Where the store is gone, so are the others; the main thread will say so.
    gone = (distributed.DistNetworkError, distributed.DistStoreError)
    try:
        with repeated(watch.look, every=EVERY, name="dflash-watch", until=gone):
            yield
    finally:
        watch.look()
