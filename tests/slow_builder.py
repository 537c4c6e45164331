"""Plays a builder that commits when it is told to: a sealed cache is laid out again bit by bit."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_cache import ledger, lock


class SlowBuilder:
    """Everything of `source` but its records and its seal; attempts of all units lie there."""

    def __init__(self, source: Path, root: Path) -> None:
        self.source, self.root, self.clock = source, root, 10**18

        def link(old: str, new: str) -> None:
            # Small files beside the units are changed by some tests.
            (os.link if "units" in Path(old).parts else shutil.copyfile)(old, new)

        hidden = shutil.ignore_patterns("manifest.json", "u*.json")
        shutil.copytree(source, root, ignore=hidden, copy_function=link)

    @property
    def units(self) -> list[str]:
        return ledger.recorded_units(self.source)

    def commit(self, unit: str, *, at: int | None = None) -> None:
        """Put a record into place, a second younger than the one before unless told otherwise."""
        self.clock += 10**9
        path, aside = ledger.record_path(self.root, unit), self.root / f".{unit}.partial"
        shutil.copyfile(ledger.record_path(self.source, unit), aside)
        os.utime(aside, ns=(0, self.clock if at is None else at))
        os.link(aside, path)
        aside.unlink()

    def seal(self) -> None:
        shutil.copyfile(self.source / "manifest.json", self.root / ".manifest.partial")
        os.rename(self.root / ".manifest.partial", self.root / "manifest.json")

    def finish(self) -> None:
        for unit in self.units:
            if not ledger.record_path(self.root, unit).exists():
                self.commit(unit)
        self.seal()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Hold the lock, as a build does."""
        with lock.held(self.root, doing="dflash cache build"):
            yield
