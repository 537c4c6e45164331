"""What counts in a cache folder: its identity, its commit records, its seal.

A commit record is the only source of truth: a folder under `units/` that no record names does not
exist.
"""

import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflash_cache import disk
from dflash_cache.checksums import digest
from dflash_cache.encodings import ENCODINGS
from dflash_cache.errors import CacheError, CacheMismatchError
from dflash_cache.files import Files, is_url, open_files, repair_hint
from dflash_cache.lock import LOCK, writable
from dflash_cache.schema import (
    CHANNELS_FILE,
    FORMAT_VERSION,
    PROBE_FILE,
    Identity,
    Manifest,
    UnitRecord,
    canonical_json,
    first_difference,
)

# What a cache that has lost its zarr.json may still hold; its records say whose it is.
OWN = (LOCK, "units", "commits", "plan.parquet", "frozen.safetensors", PROBE_FILE, CHANNELS_FILE)
READ_AHEAD = 16  # records asked for at once
LOOKED_AT = 4  # records for each that is wanted


def refuse_other_folder(root: Path) -> None:
    """Refuse a folder that holds anything but a cache; nothing in it is touched."""
    if root.exists() and not root.is_dir():
        raise CacheError(f"{root}: a file stands where the cache folder should be; give another")
    if not root.is_dir() or (root / "zarr.json").is_file():
        return
    if any(not p.name.endswith(".partial") and p.name not in OWN for p in root.iterdir()):
        raise CacheError(
            f"{root}: not empty and not a cache; nothing was touched. Give --out a new folder"
        )


def is_sealed(root: Path, identity: Identity) -> bool:
    """True when this very cache is complete; a folder that is anything else is refused."""
    refuse_other_folder(root)
    if not (root / "zarr.json").is_file():
        return False
    refuse_other_identity(root, read_identity(root), identity)
    return (root / "manifest.json").is_file()


def begin(root: Path, identity: Identity, options: dict[str, Any]) -> None:
    """Make the folders of a cache, or what is missing of them.

    The identity comes first: a folder with anything else in it and no identity is not ours.
    """
    with writable(root):
        root.mkdir(parents=True, exist_ok=True)
        if not (root / "zarr.json").is_file():
            disk.write_file(root / "zarr.json", root_group(identity, options))
        else:
            _remember_skips(root, options)
        for folder in ("units", "commits"):
            (root / folder).mkdir(exist_ok=True)
    disk.refuse_no_links(root / "commits")  # rather than after the first unit
    disk.fsync_path(root)
    disk.fsync_path(root.absolute().parent)


def _remember_skips(root: Path, options: dict[str, Any]) -> None:
    """A build that goes on with fewer proofs stays known for it, whoever finishes it."""
    identity, begun_with = read_root(root)
    wanted = options.get("no_proof", [])
    if wanted != begun_with.get("no_proof", []):
        changed = {**begun_with, "no_proof": wanted}
        disk.write_file(root / "zarr.json", root_group(identity, changed))


def root_group(identity: Identity, options: dict[str, Any]) -> bytes:
    """The root's zarr.json.  `options` are those of the build; they are no part of the identity."""
    about: dict[str, Any] = {
        "identity": identity.to_dict(),
        "fingerprint": identity.fingerprint,
        "options": options,
    }
    about["xxh3"] = digest(canonical_json(about))
    group = {"zarr_format": 3, "node_type": "group", "attributes": {"dflash_cache": about}}
    return json.dumps(group, indent=1).encode()


def read_identity(root: str | Path) -> Identity:
    """Identity of a cache folder or URL, complete or not."""
    return read_root(root)[0]


def read_root(root: str | Path) -> tuple[Identity, dict[str, Any]]:
    """Identity of a cache, and the options that it was begun with."""
    path = f"{root}/zarr.json"
    try:
        payload = open_files(root, direct=False).read("zarr.json")
    except (FileNotFoundError, NotADirectoryError):
        raise CacheError(
            f"{root}: not a cache folder (no zarr.json); run `dflash cache build`"
        ) from None
    try:
        about = json.loads(payload)["attributes"]["dflash_cache"]
        identity, check = about["identity"], about.pop("xxh3", None)
        version = identity["format_version"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CacheError(f"{path}: zarr, but not a cache of ours; give another folder") from None
    # Version 1 had no checksum here; whatever has one must be whole before it is believed.
    if check is not None and check != digest(canonical_json(about)):
        raise CacheError(
            f"{path}: fingerprint does not fit its content; the file is damaged. "
            f"{repair_hint(str(root))}"
        )
    if version != FORMAT_VERSION:
        raise CacheMismatchError(
            f"{path}: cache format {version}, this version reads "
            f"{FORMAT_VERSION}; rebuild the cache or install the version that wrote it"
        )
    found = Identity.from_dict(identity, where=path)
    options = about.get("options", {})
    if root_group(found, options) != payload:
        raise CacheError(
            f"{path}: fingerprint does not fit its content; the file is damaged. "
            f"{repair_hint(str(root))}"
        )
    return found, options


def refuse_other_identity(root: Path, found: Identity, wanted: Identity) -> None:
    difference = first_difference(found.to_dict(), wanted.to_dict())
    if difference:
        field, has, wants = difference
        raise CacheMismatchError(
            f"{root}: this cache was begun with {field} = {_short(has)}, this run has "
            f"{_short(wants)}; give another --out, or the options it was begun with (another "
            "version of this toolkit may read the same rows otherwise; a sealed cache stays good)"
        )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def record_path(root: Path, unit: str) -> Path:
    return root / record_name(unit)


def record_name(unit: str) -> str:
    return f"commits/{unit}.json"


def unit_name(number: int) -> str:
    return f"u{number:06d}"


def read_record(path: Path) -> UnitRecord:
    return UnitRecord.from_bytes(path.read_bytes(), where=str(path))


def committed_units(root: Path, *, fingerprint: str) -> dict[str, UnitRecord]:
    """All units that count, by name."""
    return {
        unit: _own(read_record(path), unit, fingerprint, where=str(path))
        for unit in recorded_units(root)
        for path in [record_path(root, unit)]
    }


def recorded_units(root: Path) -> list[str]:
    """Names of the units that have a record, readable or not.

    Not by `glob`: that takes a folder it cannot read for an empty one, and attempts that no
    record names are swept away.
    """
    try:
        names = os.listdir(root / "commits")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CacheError(
            f"{root / 'commits'}: cannot be read ({error.strerror}); look after the disk or its "
            "rights"
        ) from None
    return sorted(
        name.removesuffix(".json")
        for name in names
        if name.endswith(".json") and not name.startswith(".")
    )


def in_commit_order(root: Path, units: Iterable[str]) -> list[str]:
    """Committed units by the time of their records, by name where that is the same.

    A record that a repair has written anew, or a copy without its time, is as young as that.
    """

    def age(unit: str) -> tuple[int, str]:
        path = record_path(root, unit)
        try:
            return path.stat().st_mtime_ns, unit
        except FileNotFoundError:
            raise CacheError(
                f"{path}: taken away while the cache was being read. {repair_hint(str(root))}"
            ) from None

    return sorted(units, key=age)


def sealed_units(files: Files, manifest: Manifest) -> dict[str, UnitRecord]:
    """The units of a sealed cache, by name; each of them has to be there."""

    units = [unit_name(number) for number in range(manifest.units)]
    with ThreadPoolExecutor(READ_AHEAD) as pool:  # a record is small, but may be far away
        records = pool.map(lambda unit: unit_record(files, unit, manifest.fingerprint), units)
        return dict(zip(units, records, strict=True))


def unit_record(files: Files, unit: str, fingerprint: str | None) -> UnitRecord:
    """The record of a unit that has to be there; of this cache, if its fingerprint is known."""
    name = record_name(unit)
    where = f"{files.where}/{name}"
    try:
        found = UnitRecord.from_bytes(files.read(name), where=where)
    except FileNotFoundError:
        raise CacheError(
            f"{where}: the commit record is missing. {repair_hint(files.where)}"
        ) from None
    return _own(found, unit, fingerprint or found.fingerprint, where=where)


def _own(record: UnitRecord, unit: str, fingerprint: str, *, where: str) -> UnitRecord:
    if record.fingerprint != fingerprint or record.unit != unit:
        raise CacheError(f"{where}: belongs to another cache or unit; the folder was mixed up")
    return record


def totals(records: Iterable[UnitRecord]) -> dict[str, int]:
    """What committed units hold together."""
    units = list(records)
    return {
        "samples": sum(len(unit.sample_ids) for unit in units),
        "tokens": sum(sum(unit.lengths) for unit in units),
        "supervised_tokens": sum(sum(unit.supervised) for unit in units),
        "bytes": sum(unit.bytes for unit in units),
        "units": len(units),
    }


def encoding_error(records: Iterable[UnitRecord]) -> dict[str, dict[str, float]]:
    """Error of a lossy encoding by plane: what the units measured, weighted by their tokens."""
    sums: dict[str, dict[str, float]] = {}
    weight = 0
    for record in records:
        tokens = sum(record.lengths)
        weight += tokens
        for plane, found in record.encoding_error.items():
            own = sums.setdefault(plane, dict.fromkeys(found, 0.0))
            for name, value in found.items():
                own[name] += tokens * value
    return {
        plane: {name: value / weight for name, value in own.items()} for plane, own in sums.items()
    }


def first_norms(
    root: Path, fingerprint: str, *, count: int, samples: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Norms in the records of the first units of at least so many samples, by unit.

    Of smaller ones where there are no others among the first records.  One that cannot be read is
    for others to tell: a repair is about to write it anew.
    """
    found: dict[bool, dict[str, dict[str, dict[str, float]]]] = {True: {}, False: {}}
    for unit in recorded_units(root)[: LOOKED_AT * count]:
        with suppress(CacheError, OSError):
            record = _own(read_record(record_path(root, unit)), unit, fingerprint, where=unit)
            found[len(record.sample_ids) >= samples][unit] = record.norms
        if len(found[True]) == count:
            break
    kept = found[True] or found[False]
    return dict(list(kept.items())[:count])


def padding_share(records: Iterable[UnitRecord]) -> float | None:
    """Share of the target's token slots that were padding; None where no unit counted them."""
    counted = [(record.slots, sum(record.lengths)) for record in records if record.slots]
    slots = sum(slots for slots, _ in counted)
    return 1 - sum(tokens for _, tokens in counted) / slots if slots else None


def beside(root: Path, identity: Identity) -> list[str]:
    """Files beside the units, all of which the manifest knows.

    A cache of an older version, or one that was built without it, has no probe.
    """
    names = ["zarr.json", "plan.parquet", "frozen.safetensors"]
    names += [CHANNELS_FILE] if ENCODINGS[identity.encoding].static_scales else []
    return names + ([PROBE_FILE] if (root / PROBE_FILE).is_file() else [])


def read_manifest(root: str | Path) -> Manifest:
    """The seal of a complete cache; says how far a half-built one is."""
    identity = read_identity(root)
    where = f"{root}/manifest.json"
    try:
        payload = open_files(root, direct=False).read("manifest.json")
    except FileNotFoundError:
        raise CacheError(f"{root}: the cache is not complete{_how_far(root, identity)}") from None
    manifest = Manifest.from_bytes(payload, where=where)
    if (manifest.fingerprint, manifest.identity) != (identity.fingerprint, identity.to_dict()):
        raise CacheError(f"{where}: seals another cache than {root}/zarr.json describes")
    return manifest


def _how_far(root: str | Path, identity: Identity) -> str:
    if is_url(root):
        return "; finish it where it is built, and copy it whole"
    done = committed_units(Path(root), fingerprint=identity.fingerprint)
    have = totals(done.values())["samples"]
    return (
        f" ({have} of {identity.samples} samples); "
        "run the same `dflash cache build` again to finish it"
    )


def seal(root: Path, manifest: Manifest) -> None:
    """Write the manifest; from now on the cache is immutable."""
    disk.write_file(root / "manifest.json", manifest.to_bytes())
