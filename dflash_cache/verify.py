"""Read every byte of a cache and say what is not as it was written."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dflash_cache import ledger, sweep
from dflash_cache.checksums import Hasher
from dflash_cache.errors import CacheError, CacheMismatchError
from dflash_cache.files import Files, aligned_buffer, is_url, open_files
from dflash_cache.layout import ALIGNMENT, round_up
from dflash_cache.schema import CHANNELS_FILE, Identity, Manifest, UnitRecord

BLOCK_BYTES = 8 << 20
VERIFY_THREADS = 4


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is not as it was written; `unit` is None for what lies beside the units."""

    unit: str | None
    problem: str


@dataclass(kw_only=True)
class Findings:
    """What a check found so far."""

    identity: Identity | None = None
    manifest: Manifest | None = None
    options: dict[str, Any] | None = None
    records: dict[str, UnitRecord] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    bytes_checked: int = 0
    seconds: float = 0.0

    @property
    def damaged_units(self) -> set[str]:
        return {problem.unit for problem in self.problems if problem.unit is not None}

    def attempt(self, act: Callable[[], Any], *, unit: str | None = None) -> Any:
        """The result of `act`, or None and its error among the problems.

        A cache of another format is not damaged; that is an error of its own.
        """
        try:
            return act()
        except CacheMismatchError:
            raise
        except CacheError as error:
            self.problems.append(Problem(unit=unit, problem=str(error)))
            return None


def verify_cache(root: str | Path) -> dict[str, Any]:
    """`dflash cache verify`: every byte of every file, and whether the parts fit together."""
    found = inspect_cache(root)
    left = [] if is_url(root) or found.manifest is None else sweep.leftovers(Path(root))
    return {
        "ok": not found.problems,
        "units_checked": len(found.records),
        "bytes_checked": found.bytes_checked,
        "gb_per_s": found.bytes_checked / 1e9 / max(found.seconds, 1e-9),
        "errors": [vars(problem) for problem in found.problems],
        "leftovers": len(left),
        "leftover_bytes": sum(map(sweep.size_of, left)),
    }


def inspect_cache(root: str | Path, *, only: set[str] | None = None) -> Findings:
    """Everything that is wrong with a cache, and what of it is whole.

    `only` leaves out the bytes of all other units, for one who knows them to be whole.
    """
    if not is_url(root) and not Path(root).is_dir():
        raise CacheError(f"{root}: no such folder")
    files, found = open_files(root, direct=True), Findings()
    began = time.perf_counter()
    read_descriptions(root, files, found)
    read_records(root, files, found)
    check_bytes(files, found, only=only)
    check_totals(found)
    found.seconds = time.perf_counter() - began
    return found


def read_descriptions(root: str | Path, files: Files, found: Findings) -> None:
    """Identity and seal, each on its own: what one has lost, the other may still say."""
    described = found.attempt(lambda: ledger.read_root(root))
    if described:
        found.identity, found.options = described
    found.manifest = found.attempt(lambda: _manifest(files))
    manifest = found.manifest
    if manifest is None:
        return
    if found.identity is None:
        where = f"{files.where}/manifest.json"
        found.identity = found.attempt(lambda: Identity.from_dict(manifest.identity, where=where))
        found.options = manifest.options
    elif found.identity.to_dict() != manifest.identity:
        found.problems.append(
            Problem(unit=None, problem="zarr.json and manifest.json describe different caches")
        )


def _manifest(files: Files) -> Manifest:
    where = f"{files.where}/manifest.json"
    try:
        return Manifest.from_bytes(files.read("manifest.json"), where=where)
    except FileNotFoundError:
        raise CacheError(f"{where}: missing; the cache is not complete") from None


def read_records(root: str | Path, files: Files, found: Findings) -> None:
    """The record of every unit; without a seal, of those that are there."""
    named = set() if is_url(root) else set(ledger.recorded_units(Path(root)))
    wanted = named
    if found.manifest is not None:
        wanted = {ledger.unit_name(number) for number in range(found.manifest.units)}
    for unit in sorted(named - wanted):
        found.problems.append(Problem(unit=None, problem=f"commits/{unit}.json: no such unit"))
    fingerprint = found.identity.fingerprint if found.identity else None

    def read(unit: str) -> UnitRecord | None:
        act = partial(ledger.unit_record, files, unit, fingerprint)
        record: UnitRecord | None = found.attempt(act, unit=unit)
        return record

    with ThreadPoolExecutor(ledger.READ_AHEAD) as pool:  # each is small, but may be far away
        for unit, record in zip(sorted(wanted), pool.map(read, sorted(wanted)), strict=True):
            if record is not None:
                found.records[unit] = record
    found.problems.sort(key=lambda problem: problem.unit or "")


def check_bytes(files: Files, found: Findings, *, only: set[str] | None) -> None:
    """Size and checksum of every file that the seal or a record names."""
    tasks: list[tuple[str | None, dict[str, list[int]]]] = [
        (unit, {f"{record.folder}/{name}": entry for name, entry in record.files.items()})
        for unit, record in found.records.items()
        if only is None or unit in only
    ]
    if found.manifest:
        tasks.insert(0, (None, found.manifest.files))
    total = sum(size for _, named in tasks for size, _ in named.values())
    with (
        ThreadPoolExecutor(VERIFY_THREADS) as pool,
        tqdm(total=total, desc="verify", unit="B", unit_scale=True, disable=None) as progress,
    ):

        def check(task: tuple[str | None, dict[str, list[int]]]) -> list[Problem]:
            unit, named = task
            problems = []
            for name, entry in named.items():
                problem = file_problem(files, name, entry)
                progress.update(entry[0])
                if problem:
                    problems.append(Problem(unit=unit, problem=f"{name}: {problem}"))
            return problems

        for problems in pool.map(check, tasks):
            found.problems += problems
    found.bytes_checked = total


def file_problem(files: Files, name: str, entry: Sequence[int]) -> str | None:
    """What is wrong with a file, in words."""
    try:
        return _problem(files, name, entry)
    except FileNotFoundError:
        return "missing"
    except CacheError as error:  # the disk itself
        return str(error)


def _problem(files: Files, name: str, entry: Sequence[int]) -> str | None:
    size, wanted = entry
    there = files.size(name)
    if there is None:
        return "missing"
    if there != size:
        return f"{there} bytes, want {size}"
    buffer = aligned_buffer(min(BLOCK_BYTES, round_up(max(size, 1), ALIGNMENT)))
    hasher = Hasher()
    for offset in range(0, size, len(buffer)):
        count = min(len(buffer), size - offset)
        length = round_up(count, files.alignment)
        if files.fill(name, offset, [buffer[:length]]) < count:
            return "ends too early"
        hasher.update(buffer[:count].data)
    return None if hasher.intdigest() == wanted else "its checksum does not fit its content"


def check_totals(found: Findings) -> None:
    """Each sample once, and as many as the seal says."""
    ids = Counter(i for record in found.records.values() for i in record.sample_ids)
    twice = [sample for sample, count in ids.items() if count > 1]
    if twice:
        found.problems.append(
            Problem(unit=None, problem=f"samples {twice[:5]} are in more than one unit")
        )
    if found.manifest and CHANNELS_FILE in found.manifest.files:
        sealed = found.manifest.files[CHANNELS_FILE][1]
        found.problems += [
            Problem(unit=unit, problem="spelt with other scales than the seal knows")
            for unit, record in found.records.items()
            if record.channels_checksum != sealed
        ]
    if found.manifest is None or found.damaged_units:
        return
    held = ledger.totals(found.records.values())
    for name in ("samples", "tokens", "supervised_tokens", "units"):
        if held[name] != getattr(found.manifest, name):
            told = f"the records hold {held[name]} {name}, the seal says "
            found.problems.append(
                Problem(unit=None, problem=f"{told}{getattr(found.manifest, name)}")
            )
