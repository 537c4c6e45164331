"""Write units aside and commit each by one exclusive record.

Attempts never share a file, a unit is never changed, arrays are never appended to.  Payload goes
through zarr-python for now.

Letters: K target layers, t tokens of a sample, H hidden size.
"""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import zarr
from safetensors.torch import save_file
from torch import Tensor
from zarr.codecs import Crc32cCodec
from zarr.storage import LocalStore

from dflash_cache import disk
from dflash_cache.buckets import UnitPlan
from dflash_cache.ledger import read_record
from dflash_cache.samples import Sample
from dflash_cache.schema import (
    CHUNK_TOKENS,
    EMBEDDING,
    FORMAT_VERSION,
    HEAD,
    Identity,
    UnitRecord,
    padded,
)

States = list[Tensor]  # K tensors [t, H], bfloat16, on the CPU


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
    missing = set(range(len(samples)))
    for position, layers in states:
        missing.discard(position)
        rows = slice(starts[position], starts[position] + lengths[position])
        for k, layer in enumerate(layers):
            hidden[k, rows] = layer.view(torch.uint16).numpy()
    assert not missing, (plan.name, sorted(missing))
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
