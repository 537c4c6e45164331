"""Write units aside and commit each by one exclusive record.

Attempts never share a file, a unit is never changed, arrays are never appended to.
"""

import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_cache import disk
from dflash_cache.attempt import Attempt, EncodedSample
from dflash_cache.buckets import UnitPlan
from dflash_cache.ledger import read_record, record_path
from dflash_cache.samples import Sample
from dflash_cache.schema import EMBEDDING, FORMAT_VERSION, HEAD, Identity, UnitRecord

# --- beside the units ---------------------------------------------------------------------------


def write_plan(root: Path, plans: Sequence[UnitPlan], samples: Sequence[Sample]) -> None:
    """Freeze the plan beside the units, before extraction; `planned` reads it."""
    rows = [(plan, samples[member]) for plan in plans for member in plan.members]
    table = pa.table(
        {
            "unit": [plan.name for plan, _ in rows],
            "bucket": pa.array([plan.bucket for plan, _ in rows], pa.int32()),
            "sample_id": pa.array([sample.sample_id for _, sample in rows], pa.int64()),
            "length": pa.array([sample.length for _, sample in rows], pa.int32()),
            "supervised": pa.array([sample.supervised for _, sample in rows], pa.int32()),
            "group": [sample.group for _, sample in rows],
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    path, payload = root / "plan.parquet", sink.getvalue().to_pybytes()
    if not path.is_file() or path.read_bytes() != payload:
        disk.write_file(path, payload)


def write_frozen(root: Path, embedding: Tensor, head: Tensor, *, tied: bool) -> None:
    """Token embedding and LM head, bfloat16; a tied pair is stored once."""
    path = root / "frozen.safetensors"
    tensors = {EMBEDDING: embedding.to("cpu", torch.bfloat16).contiguous()}
    if not tied:
        tensors[HEAD] = head.to("cpu", torch.bfloat16).contiguous()
    if _holds(path, tensors):
        return
    partial = disk.aside(path)
    try:
        save_file(tensors, partial, metadata={"format": "pt"})
        disk.fsync_path(partial)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    disk.fsync_path(root)


def _holds(path: Path, tensors: dict[str, Tensor]) -> bool:
    """Whether an earlier attempt left exactly these tensors, bit for bit."""
    if not path.is_file():
        return False
    try:
        found = load_file(path)
    except (OSError, SafetensorError):
        return False
    return found.keys() == tensors.keys() and all(
        torch.equal(found[name].view(torch.int16), tensor.view(torch.int16))
        for name, tensor in tensors.items()
    )


# --- units --------------------------------------------------------------------------------------


def commit(root: Path, record: UnitRecord) -> UnitRecord:
    """Let a record count unless its unit has one; returns the one that is in force afterwards."""
    path = record_path(root, record.unit)
    if disk.create_file(path, record.to_bytes()):
        return record
    in_force = read_record(path)
    # Somebody else was first, and theirs counts; or a network share reports our own link twice.
    if in_force.folder != record.folder:
        shutil.rmtree(root / record.folder)
    return in_force


def replace(root: Path, record: UnitRecord) -> UnitRecord:
    """Let a record count in place of the one that its unit has, in one step."""
    disk.write_file(record_path(root, record.unit), record.to_bytes())
    return record


def write_unit(
    root: Path,
    plan: UnitPlan,
    samples: Sequence[Sample],
    states: Iterable[EncodedSample],
    *,
    identity: Identity,
    channels_checksum: int | None = None,
    publish: Callable[[Path, UnitRecord], UnitRecord] = commit,
) -> UnitRecord:
    """Store one unit and publish its record; returns the one that is in force afterwards.

    `samples` are the unit's; `states` yields theirs in the same order and is read as it comes.
    Everything is durable in a folder of this attempt's own before a record names it.
    """
    folder = Path("units") / f"bucket-{plan.bucket:04d}" / f"{plan.name}.{uuid4().hex[:8]}"
    attempt = Attempt(root / folder, identity, [sample.length for sample in samples])
    try:
        attempt.write_states(states)
        attempt.write_tokens(samples)
        attempt.write_metadata()
        for path in attempt.folders():
            disk.fsync_path(path)
        disk.fsync_path((root / folder).parent)  # the attempt's name, and that of its bucket
        disk.fsync_path(root / "units")
    except BaseException:
        attempt.abandon()
        shutil.rmtree(root / folder, ignore_errors=True)
        raise
    record = UnitRecord(
        format_version=FORMAT_VERSION,
        fingerprint=identity.fingerprint,
        unit=plan.name,
        bucket=plan.bucket,
        folder=str(folder),
        sample_ids=[sample.sample_id for sample in samples],
        lengths=attempt.lengths,
        supervised=[sample.supervised for sample in samples],
        groups=[sample.group for sample in samples],
        channels_checksum=channels_checksum,
        encoding_error=attempt.encoding_error(),
        norms=attempt.unit_norms(),
        slots=attempt.slots,
        files=dict(sorted(attempt.files.items())),
    )
    return publish(root, record)
