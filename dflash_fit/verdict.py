"""Why a job of several ranks ends badly: the first reason that any of them leaves in the store."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from dflash_cache import errors as cache_errors
from dflash_cache.errors import DFlashError
from dflash_fit import errors as fit_errors

LOOK = 0.05  # seconds between two looks at the store


@dataclass(frozen=True, kw_only=True)
class Reason:
    """An error as it was, and the ranks that it says are gone."""

    error: DFlashError
    lost: tuple[int, ...]


class Verdict:
    """The reason of a job with `size` ranks, as one of them sees it."""

    def __init__(self, store: Store, *, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size

    def give(self, error: DFlashError, *, lost: Sequence[int] = ()) -> bool:
        """End the job for all; False where somebody has given another reason before."""
        told = json.dumps([self.rank, type(error).__name__, str(error), list(lost)])
        return bool(self.store.compare_set("reason", "", told).decode() == told)

    def read(self) -> Reason | None:
        if not self.store.check(["reason"]):
            return None
        _, name, told, lost = json.loads(self.store.get("reason"))
        kinds = {**vars(cache_errors), **vars(fit_errors)}
        kind: type[DFlashError] = kinds.get(name, DFlashError)
        return Reason(error=kind(told), lost=tuple(lost))

    def await_reason(self, *, seconds: float) -> Reason | None:
        """What another rank has to say, if it does within this time."""
        until = time.monotonic() + seconds
        while (reason := self.read()) is None and time.monotonic() < until:
            time.sleep(LOOK)
        return reason

    def heard(self) -> None:
        """This rank knows how the job ended, and needs the store no more."""
        self.store.set(f"heard/{self.rank}", "yes")

    def await_all_heard(self, *, seconds: float, but: Sequence[int] = ()) -> None:
        """For who keeps the store: stay until the others know, but no longer than this."""
        others = set(range(self.size)) - {self.rank, *but}
        keys = [f"heard/{rank}" for rank in sorted(others)]
        until = time.monotonic() + seconds
        while keys and not self.store.check(keys) and time.monotonic() < until:
            time.sleep(LOOK)
