"""Write units aside, commit them by one exclusive record, read them back.

A commit record is the only source of truth: a folder under `units/` that no record names does
not exist.  Attempts never share a file, a unit is never changed, arrays are never appended to.
Payload goes through zarr-python for now.

Letters: K target layers, t tokens of a sample, H hidden size.
"""

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import zarr
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from zarr.codecs import Crc32cCodec
from zarr.storage import LocalStore

from dflash_cache import disk
from dflash_cache.buckets import UnitPlan
from dflash_cache.errors import CacheError, CacheMismatchError
from dflash_cache.samples import Sample
from dflash_cache.schema import (
    CHUNK_TOKENS,
    EMBEDDING,
    FORMAT_VERSION,
    HEAD,
    Identity,
    Manifest,
    UnitRecord,
    first_difference,
    padded,
)

States = list[Tensor]  # K tensors [t, H], bfloat16, on the CPU


# --- identity -----------------------------------------------------------------------------------


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


# --- writing ------------------------------------------------------------------------------------


def write_plan(root: Path, plans: Sequence[UnitPlan], samples: Sequence[Sample]) -> None:
    """Freeze the plan beside the units; it is written once, before extraction."""
    path = root / "plan.parquet"
    if path.is_file():
        return
    rows = [(plan, samples[member]) for plan in plans for member in plan.members]
    table = pa.table(
        {
            "unit": [plan.name for plan, _ in rows],
            "bucket": pa.array([plan.bucket for plan, _ in rows], pa.int32()),
            "sample_id": pa.array([sample.sample_id for _, sample in rows], pa.int64()),
            "length": pa.array([sample.length for _, sample in rows], pa.int32()),
            "supervised": pa.array([sample.supervised for _, sample in rows], pa.int32()),
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    disk.write_file(path, sink.getvalue().to_pybytes())


def write_unit(
    root: Path,
    plan: UnitPlan,
    samples: Sequence[Sample],
    states: Iterable[tuple[int, States]],
    *,
    identity: Identity,
) -> UnitRecord:
    """Store one unit and commit it; returns the record that is in force afterwards.

    `samples` are the unit's, in order; `states` yields (position in `samples`, K tensors [t, H])
    in any order.  Everything goes into a folder of this attempt's own; the last act is the
    exclusive creation of the record.
    """
    lengths = [sample.length for sample in samples]
    starts = np.concatenate([[0], np.cumsum([padded(n) for n in lengths])])
    folder = Path("units") / f"bucket-{plan.bucket:04d}" / f"{plan.name}.{uuid4().hex[:8]}"
    total = int(starts[-1])
    hidden = np.zeros((len(identity.target_layer_ids), total, identity.hidden_size), np.uint16)
    for position, layers in states:
        rows = slice(starts[position], starts[position] + lengths[position])
        for k, layer in enumerate(layers):
            hidden[k, rows] = layer.view(torch.uint16).numpy()
    try:
        _write_arrays(root / folder, identity.target_layer_ids, hidden, samples, starts)
        disk.fsync_tree(root / folder)
        disk.fsync_path((root / folder).parent)  # the attempt's name, and that of its bucket
        disk.fsync_path(root / "units")
    except BaseException:
        shutil.rmtree(root / folder, ignore_errors=True)
        raise
    record = UnitRecord(
        format_version=FORMAT_VERSION,
        fingerprint=identity.fingerprint,
        unit=plan.name,
        bucket=plan.bucket,
        folder=str(folder),
        sample_ids=[sample.sample_id for sample in samples],
        lengths=lengths,
        supervised=[sample.supervised for sample in samples],
        groups=[sample.group for sample in samples],
        starts=[int(start) for start in starts[:-1]],
        tokens_stored=total,
        files=_sizes(root / folder),
    )
    path = root / "commits" / f"{plan.name}.json"
    if not disk.create_file(path, record.to_bytes()):
        shutil.rmtree(root / folder)  # somebody else was first; theirs counts
        return read_record(path)
    return record


def _write_arrays(
    folder: Path,
    layer_ids: Sequence[int],
    hidden: np.ndarray,
    samples: Sequence[Sample],
    starts: np.ndarray,
) -> None:
    group = zarr.create_group(LocalStore(folder), zarr_format=3)
    for layer_id, states in zip(layer_ids, hidden, strict=True):
        _write_array(group, f"hidden/{layer_id}", states, {"logical_dtype": "bfloat16"})
    ids = np.zeros(len(hidden[0]), np.int32)
    mask = np.zeros(len(hidden[0]), np.uint8)
    for start, sample in zip(starts, samples, strict=False):
        ids[start : start + sample.length] = sample.input_ids
        mask[start : start + sample.length] = sample.loss_mask
    _write_array(group, "input_ids", ids, {})
    _write_array(group, "loss_mask", mask, {})


def _write_array(group: zarr.Group, name: str, values: np.ndarray, attributes: Any) -> None:
    """One array in one shard file, a checksum on every chunk.

    Empty chunks are written too: a chunk that is absent must mean damage, never zeros.
    """
    array = group.create_array(
        name,
        shape=values.shape,
        dtype=values.dtype,
        chunks=(CHUNK_TOKENS, *values.shape[1:]),
        shards=values.shape,
        compressors=[Crc32cCodec()],
        fill_value=0,
        attributes=attributes,
        dimension_names=["token", "hidden"][: values.ndim],
        config={"write_empty_chunks": True},
    )
    array[...] = values


def _sizes(folder: Path) -> dict[str, int]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def write_frozen(root: Path, embedding: Tensor, head: Tensor, *, tied: bool) -> None:
    """Token embedding and LM head, bfloat16; a tied pair is stored once."""
    path = root / "frozen.safetensors"
    if path.is_file():
        return
    tensors = {EMBEDDING: embedding.to("cpu", torch.bfloat16).contiguous()}
    if not tied:
        tensors[HEAD] = head.to("cpu", torch.bfloat16).contiguous()
    partial = disk.aside(path)
    try:
        save_file(tensors, partial, metadata={"format": "pt"})
        disk.fsync_path(partial)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    disk.fsync_path(root)


def seal(root: Path, manifest: Manifest) -> None:
    """Write the manifest; from now on the cache is immutable."""
    disk.write_file(root / "manifest.json", json.dumps(manifest.to_dict(), indent=1).encode())


# --- reading ------------------------------------------------------------------------------------


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


def read_manifest(root: Path) -> Manifest:
    """The seal of a complete cache; says how far a half-built one is."""
    identity = read_identity(root)
    path = root / "manifest.json"
    if not path.is_file():
        done = committed_units(root, fingerprint=identity.fingerprint)
        have = sum(len(record.sample_ids) for record in done.values())
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


@dataclass(frozen=True, kw_only=True)
class Located:
    """Where one sample lies."""

    sample_id: int
    length: int
    supervised: int
    group: str
    unit: str
    start: int


class CacheReader:
    """A sealed cache, opened for reading.  Samples are numbered 0.. in order of their ids.

    Everything is checked on the way: file sizes against the commit record when a unit is first
    touched, checksums by zarr on every chunk.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self.manifest = read_manifest(self.root)
        self.identity = Identity.from_dict(self.manifest.identity, where=str(self.root))
        self.records = committed_units(self.root, fingerprint=self.identity.fingerprint)
        self.located = sorted(
            (located for record in self.records.values() for located in _locate(record)),
            key=lambda located: located.sample_id,
        )
        ids = [located.sample_id for located in self.located]
        if len(set(ids)) != len(ids) or len(ids) != self.manifest.samples:
            raise CacheError(
                f"{self.root}: the records name {len(set(ids))} samples, the manifest "
                f"{self.manifest.samples}; commit records are missing or doubled"
            )
        self._unit = lru_cache(maxsize=64)(self._open_unit)

    @property
    def lengths(self) -> list[int]:
        return [located.length for located in self.located]

    def _open_unit(self, unit: str) -> "UnitReader":
        record = self.records[unit]
        folder = self.root / record.folder
        for name, size in record.files.items():
            path = folder / name
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                raise CacheError(
                    f"{path}: {'missing' if found is None else f'{found} bytes'}, the commit "
                    f"record says {size}; {_mend(self.root, unit)}"
                )
        return UnitReader(unit, folder)

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int32 [t] and loss mask bool [t] of a sample."""
        located = self.located[index]
        unit = self._unit(located.unit)
        rows = slice(located.start, located.start + located.length)
        return unit.read("input_ids", rows), unit.read("loss_mask", rows).astype(bool)

    def read_hidden(self, index: int, layer_id: int, into: Tensor) -> None:
        """Copy the states of a sample and target layer into `into`, bfloat16 [t, H]."""
        located = self.located[index]
        rows = slice(located.start, located.start + located.length)
        states = self._unit(located.unit).read(f"hidden/{layer_id}", rows)
        if states.dtype != np.uint16 or states.shape != tuple(into.shape):
            raise CacheError(
                f"{self.root}, target layer {layer_id}: found {states.dtype} {states.shape}, want "
                f"uint16 {tuple(into.shape)}; {_mend(self.root, located.unit)}"
            )
        into.view(torch.uint16).numpy()[...] = states

    def hidden(self, index: int, layer_ids: Sequence[int]) -> Tensor:
        """States of a sample, bfloat16 [K, t, H]."""
        shape = (len(layer_ids), self.located[index].length, self.identity.hidden_size)
        states = torch.empty(shape, dtype=torch.bfloat16)
        for k, layer_id in enumerate(layer_ids):
            self.read_hidden(index, layer_id, states[k])
        return states

    def frozen(self) -> tuple[Tensor, Tensor]:
        """Token embedding and LM head, bfloat16 [V, H]; one tensor twice where they are tied."""
        path = self.root / "frozen.safetensors"
        try:
            with safe_open(path, "pt") as file:
                embedding = file.get_tensor(EMBEDDING)
                head = embedding if self.identity.target_spec.tied_head else file.get_tensor(HEAD)
        except (OSError, SafetensorError) as error:
            raise CacheError(
                f"{path}: missing or damaged ({error}). Delete it and "
                f"{self.root / 'manifest.json'} and run `dflash cache build` again"
            ) from None
        return embedding, head


class UnitReader:
    """One committed unit, its zarr arrays opened once."""

    def __init__(self, unit: str, folder: Path) -> None:
        self.unit, self.folder = unit, folder
        self.arrays: dict[str, Any] = {}

    def read(self, name: str, rows: slice) -> np.ndarray:
        """Rows of an array; a checksum or metadata that do not fit are an error of the cache."""
        try:
            if name not in self.arrays:
                store = LocalStore(self.folder, read_only=True)
                self.arrays[name] = zarr.open_array(store, path=name, mode="r")
            values: np.ndarray = self.arrays[name][rows]
        except (ValueError, LookupError, TypeError) as error:
            raise CacheError(
                f"{self.folder / name}, tokens {rows.start} to {rows.stop}: {error}; "
                f"{_mend(self.folder.parents[2], self.unit)}"
            ) from None
        return values


def _mend(root: Path, unit: str) -> str:
    return (
        f"unit {unit} is damaged. Delete {root / 'commits' / f'{unit}.json'} and "
        f"{root / 'manifest.json'} and run `dflash cache build` again: it extracts that unit anew"
    )


def _locate(record: UnitRecord) -> list[Located]:
    columns = zip(
        record.sample_ids,
        record.lengths,
        record.supervised,
        record.groups,
        record.starts,
        strict=True,
    )
    return [
        Located(
            sample_id=sample_id,
            length=length,
            supervised=supervised,
            group=group,
            unit=record.unit,
            start=start,
        )
        for sample_id, length, supervised, group, start in columns
    ]
