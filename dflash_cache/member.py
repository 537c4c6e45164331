"""One worker at the board: the units that it takes, and what it says of its progress."""

import threading
import time
from collections.abc import Iterator, Sequence

from dflash_cache.board import LEAD, Board, OtherWorkerFailed
from dflash_cache.buckets import UnitPlan

PAUSE = 0.1  # seconds between two looks at what has not changed
TELL_EVERY = 0.25  # seconds between two reports of progress


class Member:
    """Also the `Progress` of its extraction; several threads may use it."""

    def __init__(self, board: Board, worker: int, *, lengths: Sequence[int] = ()) -> None:
        """`lengths` of the samples, by position in the plan."""
        self.board, self.worker, self.lengths = board, worker, lengths
        self.lock = threading.Lock()
        self.held: list[UnitPlan] = []
        self.tokens = self.bytes = 0  # not on the board yet
        self.told = time.monotonic()

    # --- units ----------------------------------------------------------------------------------

    def fresh(self, units: Sequence[UnitPlan]) -> Iterator[UnitPlan]:
        """Units that nobody had before; ends when all are dealt out.  Never waits."""
        while True:
            self.stop_if_over()
            number = self.board.next_fresh()
            if number >= len(units):
                return
            if self.board.take(units[number].name, self.worker):
                self._hold(units[number])
                yield units[number]

    def left(self, units: Sequence[UnitPlan]) -> Iterator[UnitPlan]:
        """Units whose worker died; waits until all are done.

        What was yielded must be committed before the next one is asked for.
        """
        missing = list(units)
        while True:
            self.stop_if_over()
            missing = [unit for unit in missing if not self.board.is_done(unit.name)]
            if not missing:
                self.board.finish()
                return
            free = (unit for unit in missing if self.board.take_over(unit.name, self.worker))
            mine = next(free, None)
            if mine is None:
                time.sleep(PAUSE)
            else:
                self._hold(mine)
                yield mine

    def stop_if_over(self) -> None:
        """End quietly where the build has ended, or the others go on without this worker."""
        self.board.stop_if_failed()
        if self.board.end_of(self.worker) is not None:
            raise OtherWorkerFailed

    def _hold(self, unit: UnitPlan) -> None:
        with self.lock:
            self.held.append(unit)
            self._tell_held()

    def _tell_held(self) -> None:
        told = [f"unit {unit.name} (bucket {unit.bucket:04d})" for unit in self.held]
        self.board.set_held(self.worker, told)

    # --- the first worker -----------------------------------------------------------------------

    def leads(self) -> bool:
        """Whether this worker goes first: nobody did yet, or who did died before it was ready."""
        if self.board.evidence() is not None:
            return False
        # And again: who has died says nothing more, and what it left must not be made anew.
        return self.board.take_over(LEAD, self.worker) and self.board.evidence() is None

    def wait_until_ready(self) -> bool:
        """Wait for the first worker; False when it has died, and this one is the first now."""
        while self.board.evidence() is None:
            self.stop_if_over()
            if self.leads():
                return False
            time.sleep(PAUSE)
        return True

    # --- progress -------------------------------------------------------------------------------

    def update(self, tokens: int) -> None:
        with self.lock:
            self.tokens += tokens
            self._tell()

    def wrote(self, count: int) -> None:
        with self.lock:
            self.bytes += count
            self._tell()

    def committed(self, unit: UnitPlan) -> None:
        """Say so on the board: nobody has to do the unit again."""
        tokens = sum(self.lengths[member] for member in unit.members)
        with self.lock:
            self.board.done(unit.name)
            self.board.add(self.worker, kept=tokens)
            self.held = [other for other in self.held if other.name != unit.name]
            self._tell_held()
            self._tell(now=True)

    def _tell(self, *, now: bool = False) -> None:
        """The store is a network away: tell it a few times a second, not for every sample."""
        if now or time.monotonic() - self.told > TELL_EVERY:
            self.board.add(self.worker, tokens=self.tokens, written=self.bytes)
            self.tokens = self.bytes = 0
            self.told = time.monotonic()
