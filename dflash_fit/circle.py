"""Ranks that look after each other, each by a thread of its own beside the one that trains.

About once a second all tell all how far they are.  Gloo fails at once when a connection closes, so
a rank that was killed is noticed while the others hang in a collective on the device, from which
nothing can call them back: then their processes end.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import distributed
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

from dflash_cache.errors import DFlashError
from dflash_cache.meeting import STORE_IS_GONE
from dflash_fit.errors import FitError
from dflash_fit.pulse import Beat, Pulse, State, stuck_rank
from dflash_fit.verdict import Verdict

EVERY = 1.0  # seconds between two exchanges
POLL, LOOK = 0.02, 0.25  # seconds between looks at an exchange, and at the store
# Seconds that ranks have to say that they too noticed a loss; who does not is the one that is lost.
NOTICE = 3.0
# A longer pause than this was not ours: the process was stopped, and maybe all the others too.
PAUSE = 5.0
KEPT = "checkpoints are kept; run the same command again"
STORE_GONE = f"rank 0 or its launcher is gone; {KEPT}"

Depart = Callable[[DFlashError, bool], NoReturn]  # ends the process; True: nobody else tells why


def tell(error: DFlashError) -> None:
    sys.stderr.write(f"Error: {error}\n")
    sys.stderr.flush()


def tell_and_leave(error: DFlashError, first: bool) -> NoReturn:
    """End this process, whatever its main thread is in."""
    if first:
        tell(error)
    os._exit(1)


class Clock:
    """Seconds in which this process was not stopped, and how old the last tick is."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._now = time.monotonic()
        self._ticks, self._ticked = -1, 0.0

    def go_on(self) -> None:
        now = time.monotonic()
        self.seconds += min(now - self._now, PAUSE)
        self._now = now

    def age(self, ticks: int) -> float:
        """Seconds since this number was another one."""
        if self._ticks != ticks:
            self._ticks, self._ticked = ticks, self.seconds
        return self.seconds - self._ticked


class _Released(Exception):
    """The rank ends by itself."""


class _Over(Exception):
    """The job ends, for this reason."""

    def __init__(self, why: str | DFlashError, *, lost: Sequence[int] = ()) -> None:
        super().__init__(why)
        self.error = FitError(why) if isinstance(why, str) else why
        self.lost = lost


class Circle:
    """The ranks of a world, from the beginning of their work to its end."""

    def __init__(
        self,
        pulse: Pulse,
        *,
        rank: int,
        hosts: Sequence[str],
        group: ProcessGroup,
        store: Store,
        verdict: Verdict,
        timeout: float,
        depart: Depart = tell_and_leave,
    ) -> None:
        """`hosts` are the machines of the ranks; nobody else uses `group`, `store`, `verdict`."""
        self.pulse, self.rank, self.hosts, self.group = pulse, rank, hosts, group
        self.store, self.verdict, self.timeout, self.depart = store, verdict, timeout, depart
        self.every = min(EVERY, timeout / 4)
        self.clock, self._looked = Clock(), 0.0
        self._leaving = self._released = False
        self._bell = threading.Event()
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="dflash-pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def leave(self) -> None:
        """The work of this rank is done: stay until that of all is."""
        self._leaving = True
        self._bell.set()
        self._thread.join()

    def release(self) -> None:
        """This rank ends by itself: its process is not ended from behind any more."""
        with self._ending:
            self._released = True
            self._bell.set()

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._look_after_each_other()
        except _Released:
            pass
        except _Over as over:
            self._end(over.error, lost=over.lost)
        except STORE_IS_GONE:
            # With the store goes whoever could be told, so everyone tells it.
            self._end(FitError(f"{self._me()}: {STORE_GONE}"))
        except Exception as error:
            self._end(FitError(f"{self._me()}: cannot reach the other ranks ({error!r}); {KEPT}"))

    def _look_after_each_other(self) -> None:
        while True:
            beats = self._exchange()
            if all(beat.state is State.LEAVING for beat in beats):
                return self._go_together()
            blamed = stuck_rank(beats, timeout=self.timeout)
            if blamed is not None:
                raise _Over(self._told_stuck(blamed, beats))
            self._bell.wait(self.every)
            self._bell.clear()
            self._look()

    def _exchange(self) -> list[Beat]:
        """What all ranks say of themselves."""
        mine = torch.tensor(self._own_beat(), dtype=torch.int64)
        told = [torch.empty_like(mine) for _ in self.hosts]
        began = self.clock.seconds
        try:
            work = distributed.all_gather(told, mine, group=self.group, async_op=True)
            assert work is not None
            while not work.is_completed():
                time.sleep(POLL)
                self._look()
                if self.clock.seconds - began > self.timeout:
                    self._find_the_silent()
            work.wait()
        except STORE_IS_GONE:
            raise
        except RuntimeError as error:
            self._find_the_lost(error)
        return [
            Beat(step=step, age=age / 1000, state=State(state))
            for step, age, state in (beat.tolist() for beat in told)
        ]

    def _own_beat(self) -> list[int]:
        state = State.LEAVING if self._leaving else self.pulse.state
        return [self.pulse.step, int(1000 * self.clock.age(self.pulse.ticks)), state]

    def _go_together(self) -> None:
        """Nobody closes a connection over which another still hears that all may go."""
        keys = [f"gone/{rank}" for rank in range(len(self.hosts))]
        self.store.set(keys[self.rank], "yes")
        while not self.store.check(keys):
            time.sleep(POLL)
            self._look()

    def _look(self) -> None:
        """Now and then, whether somebody has said why the job ends, or has lost another."""
        self.clock.go_on()
        if self._released:
            raise _Released
        if self.clock.seconds - self._looked < LOOK:
            return
        self._looked = self.clock.seconds
        self.store.add(f"looks/{self.rank}", 1)
        if (reason := self.verdict.read()) is not None:
            raise _Over(reason.error)
        if self.store.check(["loss"]):
            self._find_the_lost(None)

    def _find_the_lost(self, error: RuntimeError | None) -> NoReturn:
        """A connection has closed; who does not say so too is the one that is gone."""
        self.store.set("loss", "yes")
        self.store.set(f"noticed/{self.rank}", "yes")
        reason = self.verdict.await_reason(seconds=NOTICE)
        if reason is not None:
            raise _Over(reason.error)
        ranks = range(len(self.hosts))
        lost = [rank for rank in ranks if not self.store.check([f"noticed/{rank}"])]
        if not lost:
            raise _Over(f"the connection between the ranks broke ({error}); {KEPT}")
        is_gone = "is gone" if len(lost) == 1 else "are gone"
        raise _Over(f"{self._named(lost)} {is_gone}; {KEPT}", lost=lost)

    def _find_the_silent(self) -> NoReturn:
        """No connection has closed, and somebody says nothing: its process or machine stands."""
        before = self._looks()
        until = time.monotonic() + NOTICE
        while time.monotonic() < until:
            self._look()
            time.sleep(POLL)
        pairs = zip(before, self._looks(), strict=True)
        silent = [r for r, (was, now) in enumerate(pairs) if was == now and r != self.rank]
        who = self._named(silent) if silent else "the connection between the ranks"
        raise _Over(
            f"{who} gave no sign of life for {self.timeout:g} s (--rank-timeout); {KEPT}",
            lost=silent,
        )

    def _looks(self) -> list[int]:
        """How often each rank's thread has looked at the store."""
        return [int(self.store.add(f"looks/{rank}", 0)) for rank in range(len(self.hosts))]

    def _end(self, error: DFlashError, *, lost: Sequence[int] = ()) -> None:
        """End this process with an error, the first that any rank has given."""
        with self._ending:
            if self._released:
                return
            try:
                first = self.verdict.give(error, lost=lost)
                reason = self.verdict.read()
            except STORE_IS_GONE:
                first, reason = True, None
            self.depart(error if reason is None else reason.error, first)

    # --- words ----------------------------------------------------------------------------------

    def _told_stuck(self, blamed: int, beats: Sequence[Beat]) -> str:
        others = sorted({beat.step for rank, beat in enumerate(beats) if rank != blamed})
        steps = str(others[0]) if len(others) == 1 else f"{others[0]} to {others[-1]}"
        return (
            f"{self._named([blamed])} has not got on for {beats[blamed].age:.0f} s in step "
            f"{beats[blamed].step}; the others are in step {steps}. The timeout is "
            f"{self.timeout:g} s (--rank-timeout); {KEPT}"
        )

    def _named(self, ranks: Sequence[int]) -> str:
        return " and ".join(f"rank {rank} on {self.hosts[rank]}" for rank in ranks)

    def _me(self) -> str:
        return self._named([self.rank])
