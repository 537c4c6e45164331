"""Notice a worker that holds work and gets nowhere: a stuck kernel, a disk that no longer answers.

Its supervisor is alive and beats; that nothing moves shows only in what it counts and holds.

It is told, and never ended.  Nobody can tell it from a worker that is slow and well, as a large
target on a CPU is; what waits for a dead disk cannot be killed; and the units of others who wait
for the same disk would be no better off.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dflash_cache.progress import Count, hours

# Seconds without any progress after which a worker is told of.  Kernels of linear attention tune
# for a minute or two whenever they meet a new number of rows.
PATIENCE = 300.0
# ... or so many times as long as it has once taken to get on: batches of a slow target are slow.
TIMES = 3.0
# ... but never more, which is also for whom nothing is known of: before its first batch a worker
# compiles, and whoever goes first loads and proves the target.
MOST = 3600.0
AGAIN = 1800.0  # seconds until it is told once more


@dataclass(kw_only=True)
class Pulse:
    """What was last seen of a worker."""

    count: Count
    held: tuple[str, ...]
    since: float  # when that began
    told: float | None = None  # when it was told last that nothing follows
    longest: float = 0.0  # seconds that it has taken to get on

    @property
    def patience(self) -> float:
        return min(MOST, max(PATIENCE, TIMES * self.longest)) if self.count.tokens else MOST


class Stalls:
    """Looks at workers now and then; `now` is a clock that only goes up."""

    def __init__(self) -> None:
        self.pulses: dict[int, Pulse] = {}

    def look(self, worker: int, count: Count, held: Sequence[str], now: float) -> str | None:
        """What is to be said of a worker that lives; mostly nothing."""
        found = Pulse(count=count, held=tuple(held), since=now)
        before = self.pulses.setdefault(worker, found)
        waited = now - before.since
        if (found.count, found.held) != (before.count, before.held):
            # What ends without anything counted was no batch and no unit.
            learnt = waited if found.count != before.count else 0.0
            self.pulses[worker] = replace(found, longest=max(before.longest, learnt))
            return None if before.told is None else f"worker {worker} goes on again"
        due = before.told is None or now - before.told >= AGAIN
        if held and due and waited >= before.patience:
            before.told = now
            more = f" and {len(held) - 1} more" if len(held) > 1 else ""
            return (
                f"worker {worker} has done nothing for {hours(waited)}; it holds {held[0]}{more}. "
                "If it stays so, stop the build (Ctrl-C) and run the same command again: "
                "committed units are kept"
            )
        return None

    def begin_anew(self, now: float) -> None:
        """What was before says nothing: who looks was stopped, or other work begins."""
        for pulse in self.pulses.values():
            pulse.since = now
