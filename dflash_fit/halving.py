"""Successive halving: which trials go on after each rung.  Pure: no torch, no files.

All trials train to the first rung; the better half goes on to the next, and so on to the last,
which is the end of their training.  What is to be done next follows from what has been measured,
so a sweep that was stopped needs no memory of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dflash_cache.errors import ConfigError

ETA = 2  # of so many trials one goes on

Measured = Mapping[int, float]  # step -> held-out acceptance length


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where trials may go, and where they were stopped."""

    goals: dict[str, int]  # trials that are to train now, and to which step
    waiting: tuple[str, ...]  # those at a rung that others have yet to reach
    halved: dict[str, int]  # those that were stopped, and at which step


def rungs_of(steps: int, count: int) -> list[int]:
    """Steps at which trials are compared, each twice the one before; the last is the end."""
    rungs = [-(-steps // ETA ** (count - 1 - rung)) for rung in range(count)]
    if len(set(rungs)) < count or rungs[0] < 1:
        raise ConfigError(
            f"--halving {count}: {steps} steps are too few for so many rungs; lower it"
        )
    return rungs


def steps_in_all(rungs: Sequence[int], trials: int) -> int:
    """Steps of all trials together, where none fails."""
    total, before = 0, 0
    for rung in rungs:
        total, before, trials = total + trials * (rung - before), rung, -(-trials // ETA)
    return total


def standing(
    rungs: Sequence[int],
    trials: Sequence[str],
    measured: Mapping[str, Measured],
    *,
    failed: Sequence[str] = (),
) -> Standing:
    """What the trials, in the order of their file, are to do next.

    One that failed still counts at the rungs where it was measured, and not behind them.
    """
    alive, halved = list(trials), dict[str, int]()
    for rung in rungs[:-1]:
        missing = [name for name in alive if rung not in measured[name]]
        goals = {name: rung for name in missing if name not in failed}
        if goals:
            there = tuple(n for n in alive if n not in missing and n not in failed)
            return Standing(goals=goals, waiting=there, halved=halved)
        alive = [name for name in alive if name not in missing]
        # The sort is stable: of equal ones the earlier trial goes on.
        ranked = sorted(alive, key=lambda name: -measured[name][rung])
        stopped = set(ranked[-(-len(alive) // ETA) :])
        halved |= {name: rung for name in alive if name in stopped}
        alive = [name for name in alive if name not in stopped]
    goals = {name: rungs[-1] for name in alive if name not in failed}
    return Standing(goals=goals, waiting=(), halved=halved)
