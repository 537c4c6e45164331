"""Remove what a killed build left behind: attempts that no record names, files written aside."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

from dflash_cache import ledger, lock
from dflash_cache.errors import CacheError
from dflash_cache.schema import Manifest


def collect(root: Path, *, dry_run: bool = False) -> dict[str, Any]:
    """`dflash cache gc`: what was removed, or would be.  Nothing while somebody writes here."""
    ledger.read_identity(root)
    with lock.held(root, doing="dflash cache gc"):
        found = leftovers(root)
        size = sum(map(size_of, found))
        if not dry_run:
            remove(found)
    return {
        "removed": [str(path.relative_to(root)) for path in found],
        "bytes": size,
        "dry_run": dry_run,
    }


def remove_leftovers(root: Path) -> None:
    """The same for a builder, who holds the lock."""
    remove(leftovers(root))


def leftovers(root: Path) -> list[Path]:
    """Everything that no record names.

    A record that is damaged or lost may name any attempt of its unit: those are left alone.
    """
    live, doubtful = set[Path](), sealed_units(root)
    for unit in ledger.recorded_units(root):
        try:
            live.add(root / ledger.read_record(ledger.record_path(root, unit)).folder)
            doubtful.discard(unit)
        except CacheError:
            doubtful.add(unit)
    attempts = [
        path
        for path in (root / "units").glob("*/*")
        if path not in live and path.name.split(".")[0] not in doubtful
    ]
    aside = [path for folder in (root, root / "commits") for path in folder.glob(".*.partial")]
    return sorted(attempts + aside)


def sealed_units(root: Path) -> set[str]:
    """Units that a sealed cache must have; none where there is no seal yet."""
    path = root / "manifest.json"
    if not path.is_file():
        return set()
    manifest = Manifest.from_bytes(path.read_bytes(), where=str(path))
    return {ledger.unit_name(number) for number in range(manifest.units)}


def remove(paths: list[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def size_of(path: Path) -> int:
    """Bytes below a path; what goes away meanwhile counts nothing."""
    size = 0
    for item in path.rglob("*") if path.is_dir() else [path]:
        with contextlib.suppress(FileNotFoundError):
            size += item.stat().st_size if item.is_file() else 0
    return size
