"""What rank 0 decides about a growing cache, heard by all ranks in the same order.

A list in the store of the ranks, one key for each entry.  Nothing here waits: the store is shared
by threads, and a call that waits keeps the others out.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Units that come next; and whether these are all, or the course ends here for a reason."""

    units: tuple[str, ...] = ()
    complete: bool = False
    ended: bool = False
    reason: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, payload: bytes) -> "Entry":
        found: dict[str, Any] = json.loads(payload)
        return cls(**{**found, "units": tuple(found["units"])})


class News:
    """The list, as one rank sees it; without a store there is nobody to tell."""

    def __init__(self, store: Store | None) -> None:
        self.store, self.count = store, 0

    def tell(self, entry: Entry) -> None:
        """By rank 0 alone."""
        if self.store is not None:
            self.store.set(f"follow/{self.count}", entry.to_json())
            self.count += 1

    def hear(self) -> Entry | None:
        """The next entry, if it is there already."""
        key = f"follow/{self.count}"
        if self.store is None or not self.store.check([key]):
            return None
        self.count += 1
        return Entry.from_json(self.store.get(key))

    def ask_to_stop(self) -> None:
        """By any rank: rank 0 is to end the course."""
        if self.store is not None:
            self.store.set("follow/stop", "yes")

    def asked_to_stop(self) -> bool:
        return self.store is not None and bool(self.store.check(["follow/stop"]))
