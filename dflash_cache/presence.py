"""Whether somebody builds a cache, seen by one who only reads it.

A writer holds the lock of the folder, and that it does so is seen on its own machine and wherever
a share shows locks of other machines.  Where it does not, a lock that was signed on another
machine says nothing: its writer is then believed to be there as long as files change.
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dflash_cache import ledger, lock

SILENCE = 900.0  # seconds without a change after which a writer that cannot be seen has ended
TRACES_EVERY = 15.0  # seconds from one look at what may change to the next


class Presence:
    """Who writes in a cache folder; only as good as the last `look`."""

    def __init__(self, root: Path, *, silence: float = SILENCE) -> None:
        self.root, self.silence = root, silence
        self.seen = self.looked = self.changed = time.monotonic()
        self.traces: list[tuple[str, int, int]] | None = None

    def look(self) -> str | None:
        """Who writes, in words; None where nobody is seen to."""
        found = lock.writer(self.root)
        if found is None or not (found.held or self._stirs()):
            return None
        self.seen = time.monotonic()
        return found.words if found.held else f"{found.words}, whose lock is not seen from here,"

    @property
    def absence(self) -> float:
        """Seconds since somebody was seen, or since the first look."""
        return time.monotonic() - self.seen

    def _stirs(self) -> bool:
        """Whether something has changed lately; by our clock alone."""
        now = time.monotonic()
        if self.traces is None or now - self.looked >= min(TRACES_EVERY, self.silence):
            found, self.looked = sorted(traces(self.root)), now
            if found != self.traces:
                self.traces, self.changed = found, now
        return now - self.changed < self.silence


def traces(root: Path) -> Iterator[tuple[str, int, int]]:
    """What a writer changes: its lock, commits, and the files of units that are not committed."""
    done = set(ledger.recorded_units(root))
    files: list[Path] = []
    # Not by `glob`: before Python 3.13 a folder that goes meanwhile is an error to it.
    for folder, folders, names in os.walk(root / "units"):
        depth = len(Path(folder).relative_to(root).parts)
        if depth == 2:  # a bucket, with its attempts
            folders[:] = [name for name in folders if name.split(".")[0] not in done]
        elif depth > 2:
            files += [Path(folder, name) for name in folders + names]
    for path in [root, root / lock.LOCK, root / "commits", *files]:
        with suppress(OSError):  # gone meanwhile, which changes the list
            found = path.stat()
            yield str(path), found.st_size, found.st_mtime_ns
