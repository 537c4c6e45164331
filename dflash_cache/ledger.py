"""What counts in a cache folder: its identity, its commit records, its seal.

A commit record is the only source of truth: a folder under `units/` that no record names does not
exist.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dflash_cache import disk
from dflash_cache.errors import CacheError, CacheMismatchError
from dflash_cache.schema import (
    FORMAT_VERSION,
    Identity,
    Manifest,
    UnitRecord,
    first_difference,
)


def is_sealed(root: Path, identity: Identity) -> bool:
    """True when this very cache is complete; a folder that is anything else is refused."""
    if root.exists() and not root.is_dir():
        raise CacheError(f"{root}: a file stands where the cache folder should be; give another")
    if (root / "zarr.json").is_file():
        refuse_other_identity(root, read_identity(root), identity)
        return (root / "manifest.json").is_file()
    if root.is_dir() and any(p for p in root.iterdir() if not p.name.endswith(".partial")):
        raise CacheError(
            f"{root}: not empty and not a cache; nothing was touched. Give --out a new folder"
        )
    return False


def begin(root: Path, identity: Identity) -> None:
    """Make the folders of a cache, or what is missing of them.

    The identity comes first: a folder with anything else in it and no identity is not ours.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not (root / "zarr.json").is_file():
            disk.write_file(root / "zarr.json", _root_group(identity))
        for folder in ("units", "commits"):
            (root / folder).mkdir(exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise CacheError(
            f"{root}: cannot be written ({error.strerror}); give --out a folder that can"
        ) from None
    disk.fsync_path(root)


def _root_group(identity: Identity) -> bytes:
    attributes = {"identity": identity.to_dict(), "fingerprint": identity.fingerprint}
    group = {"zarr_format": 3, "node_type": "group", "attributes": {"dflash_cache": attributes}}
    return json.dumps(group, indent=1).encode()


def read_identity(root: Path) -> Identity:
    """Identity of a cache folder, complete or not."""
    path = root / "zarr.json"
    if not root.is_dir() or not path.is_file():
        raise CacheError(f"{root}: not a cache folder (no zarr.json); run `dflash cache build`")
    try:
        attributes = json.loads(path.read_bytes())["attributes"]["dflash_cache"]
        identity = attributes["identity"]
        fingerprint = attributes["fingerprint"]
    except (ValueError, KeyError, TypeError):
        raise CacheError(f"{path}: zarr, but not a cache of ours; give another folder") from None
    if isinstance(identity, dict) and identity.get("format_version") != FORMAT_VERSION:
        raise CacheError(
            f"{path}: cache format {identity.get('format_version')}, this version reads "
            f"{FORMAT_VERSION}; rebuild the cache or install the version that wrote it"
        )
    found = Identity.from_dict(identity, where=str(path))
    if found.fingerprint != fingerprint:
        raise CacheError(f"{path}: fingerprint does not fit its content; the file is damaged")
    return found


def refuse_other_identity(root: Path, found: Identity, wanted: Identity) -> None:
    difference = first_difference(found.to_dict(), wanted.to_dict())
    if difference:
        field, has, wants = difference
        raise CacheMismatchError(
            f"{root}: this cache was begun with {field} = {_short(has)}, this run has "
            f"{_short(wants)}; give another --out, or the options it was begun with"
        )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_record(path: Path) -> UnitRecord:
    return UnitRecord.from_bytes(path.read_bytes(), where=str(path))


def committed_units(root: Path, *, fingerprint: str) -> dict[str, UnitRecord]:
    """All units that count, by name."""
    records = {}
    for path in sorted((root / "commits").glob("u*.json")):
        record = read_record(path)
        if record.fingerprint != fingerprint or record.unit != path.stem:
            raise CacheError(f"{path}: belongs to another cache or unit; the folder was mixed up")
        records[record.unit] = record
    return records


def totals(records: Iterable[UnitRecord]) -> dict[str, int]:
    """What committed units hold together."""
    units = list(records)
    return {
        "samples": sum(len(unit.sample_ids) for unit in units),
        "tokens": sum(sum(unit.lengths) for unit in units),
        "supervised_tokens": sum(sum(unit.supervised) for unit in units),
        "bytes": sum(sum(unit.files.values()) for unit in units),
        "units": len(units),
    }


def read_manifest(root: Path) -> Manifest:
    """The seal of a complete cache; says how far a half-built one is."""
    identity = read_identity(root)
    path = root / "manifest.json"
    if not path.is_file():
        done = committed_units(root, fingerprint=identity.fingerprint)
        have = totals(done.values())["samples"]
        raise CacheError(
            f"{root}: the cache is not complete ({have} of {identity.samples} samples); "
            "run the same `dflash cache build` again to finish it"
        )
    try:
        manifest = Manifest.from_dict(json.loads(path.read_bytes()), where=str(path))
    except (ValueError, TypeError):
        raise CacheError(f"{path}: not a manifest; the cache is damaged") from None
    if (manifest.fingerprint, manifest.identity) != (identity.fingerprint, identity.to_dict()):
        raise CacheError(f"{path}: seals another cache than {root / 'zarr.json'} describes")
    return manifest


def seal(root: Path, manifest: Manifest) -> None:
    """Write the manifest; from now on the cache is immutable."""
    disk.write_file(root / "manifest.json", json.dumps(manifest.to_dict(), indent=1).encode())
