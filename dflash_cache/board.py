"""What the workers of a build share: who does which unit, what is done, and how it ends.

It lives in a `torch.distributed` store, which every process reaches and which outlives any
worker.  All that must not be lost when a worker dies changes in one atomic step of the store.

A unit's holders are the numbers of the workers that took it, one behind the other ("3", then
"3,0"); the last one has it.  A counter alone would not do: a worker that died between counting
and writing down what it got would take the unit with it.
"""

import json
from collections.abc import Sequence
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from dflash_cache import errors
from dflash_cache.errors import DFlashError
from dflash_cache.progress import Count

MOST_HOLDERS = 3  # workers that may die over one unit before it is blamed
LEAD = "lead"  # held like a unit by the worker that goes first


class OtherWorkerFailed(Exception):
    """Another process has said why the build ends; there is nothing to add."""


class Board:
    """The shared state of `world` workers, numbered from 0; any thread may use it."""

    def __init__(self, store: Store, *, world: int) -> None:
        self.store, self.world = store, world

    # --- units ----------------------------------------------------------------------------------

    def next_fresh(self) -> int:
        """A number from 0 that nobody else gets."""
        return int(self.store.add("fresh", 1)) - 1

    def take(self, thing: str, worker: int) -> bool:
        """Hold what nobody has held before."""
        return self._swap(f"holders/{thing}", "", str(worker))

    def take_over(self, thing: str, worker: int) -> bool:
        """Hold what nobody holds, or only one that has died."""
        holders = self.holders(thing)
        if not holders:
            return self.take(thing, worker)
        if self.end_of(holders[-1]) is None:
            return False
        self._refuse_deadly(thing, holders)
        before = ",".join(map(str, holders))
        return self._swap(f"holders/{thing}", before, f"{before},{worker}")

    def holders(self, thing: str) -> list[int]:
        """Everyone who ever held it; the last one does now."""
        found = self._read(f"holders/{thing}")
        return [int(number) for number in found.split(",")] if found else []

    def _refuse_deadly(self, thing: str, holders: list[int]) -> None:
        """What killed so many workers kills the next one too."""
        if len(holders) < MOST_HOLDERS:
            return
        ends = "; ".join(f"worker {holder}: {self.end_of(holder)}" for holder in holders)
        what = "the start of the build" if thing == LEAD else f"unit {thing}"
        self.fail(
            DFlashError(
                f"{what} was held by {len(holders)} workers that died ({ends}); all committed "
                "units are kept. What kills them is written above, or in the system's log"
            )
        )
        raise OtherWorkerFailed

    def done(self, unit: str) -> bool:
        """A unit is committed; True for the first one to say so."""
        return int(self.store.add(f"done/{unit}", 1)) == 1

    def is_done(self, unit: str) -> bool:
        return self._has(f"done/{unit}")

    # --- workers --------------------------------------------------------------------------------

    def end_of(self, worker: int) -> str | None:
        """How a worker died; None while it lives."""
        return self._read(f"end/{worker}")

    def bury(self, worker: int, how: str) -> bool:
        """Give free what a dead worker held; True for the first one to say so."""
        first = self._swap(f"end/{worker}", "", how)
        # Also by who is not the first: that one may have died before it came to this.
        ends = [self.end_of(number) for number in range(self.world)]
        if None not in ends:
            told = "; ".join(f"worker {number}: {end}" for number, end in enumerate(ends))
            self.fail(
                DFlashError(
                    f"{'the only worker' if self.world == 1 else 'every worker'} died ({told}); "
                    "all committed units are kept. Run the same command again"
                )
            )
        return first

    def last_words(self, worker: int) -> str | None:
        """What a worker said of its end, if it could."""
        return self._read(f"words/{worker}")

    def say_last_words(self, worker: int, words: str) -> None:
        self._swap(f"words/{worker}", "", words)  # of several processes, the first one knows why

    def beat(self, worker: int) -> None:
        """Its supervisor is alive."""
        self.store.add(f"beat/{worker}", 1)

    def beats(self, worker: int) -> int:
        return int(self.store.add(f"beat/{worker}", 0))

    def leave(self, worker: int) -> None:
        """Its supervisor has heard how the build ended, and goes."""
        self.store.set(f"left/{worker}", "yes")

    def has_left(self, worker: int) -> bool:
        return self._has(f"left/{worker}")

    # --- progress -------------------------------------------------------------------------------

    def add(self, worker: int, *, tokens: int = 0, written: int = 0, kept: int = 0) -> None:
        """Tokens computed, bytes written, and tokens of units committed."""
        for name, number in (("tokens", tokens), ("bytes", written), ("kept", kept)):
            if number:
                self.store.add(f"{name}/{worker}", number)

    def count(self, worker: int) -> Count:
        """What a worker did; of a dead one only what it committed, for the rest is done again."""
        tokens = "tokens" if self.end_of(worker) is None else "kept"
        return Count(
            tokens=int(self.store.add(f"{tokens}/{worker}", 0)),
            bytes=int(self.store.add(f"bytes/{worker}", 0)),
        )

    def counts(self) -> dict[int, Count]:
        return {worker: self.count(worker) for worker in range(self.world)}

    def set_held(self, worker: int, units: Sequence[str]) -> None:
        """For people to read; what counts are the holders of each unit."""
        self.store.set(f"held/{worker}", json.dumps(list(units)))

    def held(self, worker: int) -> list[str]:
        found: list[str] = json.loads(self._read(f"held/{worker}") or "[]")
        return found

    # --- the build ------------------------------------------------------------------------------

    def set_ready(self, evidence: Any) -> None:
        """The first worker has proved the target and left everything beside the units."""
        self.store.set("ready", json.dumps(evidence))

    def evidence(self) -> Any | None:
        """What the first worker proved; None until it has."""
        found = self._read("ready")
        return None if found is None else json.loads(found)

    def finish(self) -> None:
        """All units are done."""
        self.store.set("finished", "yes")

    def is_finished(self) -> bool:
        return self._has("finished")

    def fail(self, error: DFlashError) -> None:
        """End the build for all; the first error counts."""
        self._swap("failed", "", json.dumps([type(error).__name__, str(error)]))

    def failure(self) -> DFlashError | None:
        """Why the build ends, as the error that it was."""
        found = self._read("failed")
        if found is None:
            return None
        name, told = json.loads(found)
        kind: type[DFlashError] = getattr(errors, name, DFlashError)
        return kind(told)

    def stop_if_failed(self) -> None:
        if self._has("failed"):
            raise OtherWorkerFailed

    def end_well(self, sealed: str) -> None:
        """Rank 0 has sealed the cache."""
        self.set_text("sealed", sealed)

    def end_badly(self, error: DFlashError) -> None:
        """Rank 0 gives up; also when all units are done, as where the seal does not fit."""
        self.fail(error)
        self.set_text("broken", "yes")

    def end(self) -> str | None:
        """What rank 0 sealed; None before, and the error that it met where it gave up."""
        if self.text("broken") is not None:
            raise self.failure() or DFlashError("rank 0 has failed")
        return self.text("sealed")

    def set_text(self, name: str, text: str) -> None:
        """Something that rank 0 says once: where the job lies, how the build ended."""
        self.store.set(f"text/{name}", text)

    def text(self, name: str) -> str | None:
        return self._read(f"text/{name}")

    # --- the store ------------------------------------------------------------------------------

    def _has(self, key: str) -> bool:
        return bool(self.store.check([key]))

    def _read(self, key: str) -> str | None:
        """A value that is there; asking for one that is not would wait for it."""
        return self.store.get(key).decode() if self._has(key) else None

    def _swap(self, key: str, before: str, after: str) -> bool:
        """Set `key` if it is still `before` (empty: if it is not there), in one step.

        `after` must differ from what any other process may set here, or both would be told that
        they were the first.
        """
        assert before != after, after
        if (self._read(key) or "") != before:
            return False
        return bool(self.store.compare_set(key, before, after).decode() == after)
