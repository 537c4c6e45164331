"""Spell the states of a cache in another way, without the target."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dflash_cache import ledger, lock, store, sweep
from dflash_cache.attempt import EncodedSample, encoded_sample
from dflash_cache.buckets import UnitPlan
from dflash_cache.codec import Codec, calibration_samples, new_codec, stored_codec
from dflash_cache.config import ENCODING_NAMES, refuse_url
from dflash_cache.devices import pick_device
from dflash_cache.disk import full_disk_is_told
from dflash_cache.encodings import ENCODINGS
from dflash_cache.errors import CacheError, ConfigError
from dflash_cache.files import file_entry
from dflash_cache.plan import refuse_too_small_a_disk, unit_bytes
from dflash_cache.reader import CacheReader
from dflash_cache.samples import Sample
from dflash_cache.schema import PROBE_FILE, Identity, Manifest, UnitRecord

COPIED = ("plan.parquet", "frozen.safetensors", PROBE_FILE)  # the same in every encoding


def convert_cache(
    source: str | Path, *, encoding: str, out: Path, device: str = "auto"
) -> Manifest:
    """A new cache with the same samples and states, spelt in another encoding.

    It is the cache that a build with that encoding gives, and has its fingerprint.  The same call
    again continues where it stopped.  States that have lost bits are refused: nothing can
    give these back.
    """
    on = pick_device(device)
    refuse_url(out)
    reader = CacheReader(source)
    identity = _wanted(reader, encoding)
    if ledger.is_sealed(out, identity):
        return ledger.read_manifest(out)
    with (
        lock.held(out, doing="dflash cache convert"),
        full_disk_is_told(
            out,
            "All committed units are kept.",
            needed=lambda: _still_needed(out, reader, identity),
        ),
    ):
        if ledger.is_sealed(out, identity):  # somebody else may have been here before the lock
            return ledger.read_manifest(out)
        committed = ledger.committed_units(out, fingerprint=identity.fingerprint)
        sweep.remove_leftovers(out)
        refuse_too_small_a_disk(out, _still_needed(out, reader, identity))
        options = {**reader.manifest.options, "encoding": encoding}
        ledger.begin(out, identity, options)
        for name in _copied(reader):
            reader.copy_file(name, out / name)
        records = _convert_units(reader, identity, out, committed, on)
        manifest = _manifest(reader, identity, out, records, options)
        ledger.seal(out, manifest)
    return manifest


def _wanted(reader: CacheReader, encoding: str) -> Identity:
    found = reader.identity.encoding
    if encoding not in ENCODING_NAMES:
        raise ConfigError(f"--encoding {encoding}: want {', '.join(ENCODING_NAMES)}")
    if encoding == found:
        raise CacheError(f"{reader.root}: is {found} already")
    if ENCODINGS[found].lossy:
        raise CacheError(
            f"{reader.root}: its states are {found} and have lost bits, which no other encoding "
            "gives back; convert a bf16 or lossless cache, or build anew"
        )
    return replace(reader.identity, encoding=encoding)


def _copied(reader: CacheReader) -> list[str]:
    """What of it the source has: not every cache has a probe."""
    return [name for name in COPIED if name in reader.manifest.files]


def _still_needed(out: Path, reader: CacheReader, identity: Identity) -> int:
    """Bytes that are not written yet."""
    done = set(ledger.recorded_units(out))
    missing = [record for unit, record in reader.records.items() if unit not in done]
    copied = [
        reader.manifest.files[name][0] for name in _copied(reader) if not (out / name).is_file()
    ]
    return sum(unit_bytes(identity, record.lengths) for record in missing) + sum(copied)


def _convert_units(
    reader: CacheReader,
    identity: Identity,
    out: Path,
    committed: dict[str, UnitRecord],
    device: torch.device,
) -> list[UnitRecord]:
    records = dict(committed)
    codec = _codec(reader, identity, out, committed).to(device)
    numbers = {located.sample_id: i for i, located in enumerate(reader.located)}
    done = ledger.totals(committed.values())["tokens"]
    with tqdm(
        total=reader.manifest.tokens,
        initial=done,
        desc="convert",
        unit="tok",
        unit_scale=True,
        disable=None,
    ) as progress:
        for unit, record in reader.records.items():
            if unit not in records:
                samples = [_sample(reader, numbers[i]) for i in record.sample_ids]
                plan = UnitPlan(name=unit, bucket=record.bucket, members=())
                states = _states(reader, identity, samples, numbers, device, codec, progress)
                records[unit] = store.write_unit(
                    out,
                    plan,
                    samples,
                    states,
                    identity=identity,
                    channels_checksum=codec.checksum,
                    publish=partial(_commit_as_measured, record),
                )
    return [records[unit] for unit in reader.records]


def _commit_as_measured(source: UnitRecord, root: Path, record: UnitRecord) -> UnitRecord:
    """With what the target's own run measured, which no spelling changes."""
    return store.commit(root, replace(record, norms=source.norms, slots=source.slots))


def _sample(reader: CacheReader, number: int) -> Sample:
    ids, mask = reader.tokens(number)
    located = reader.located[number]
    return Sample(sample_id=located.sample_id, input_ids=ids, loss_mask=mask, group=located.group)


def _states(
    reader: CacheReader,
    identity: Identity,
    samples: Sequence[Sample],
    numbers: dict[int, int],
    device: torch.device,
    codec: Codec,
    progress: Any,
) -> Iterator[EncodedSample]:
    """Each sample read, widened and spelt anew."""
    for sample in samples:
        states = reader.hidden(numbers[sample.sample_id], identity.planes).to(device)
        yield encoded_sample(list(states), identity.planes, codec)
        progress.update(sample.length)


def _codec(
    reader: CacheReader, identity: Identity, out: Path, committed: dict[str, UnitRecord]
) -> Codec:
    for record in committed.values():
        return stored_codec(out, identity, record)
    chosen = calibration_samples(reader.lengths)
    return new_codec(out, identity, (list(reader.hidden(i, identity.planes)) for i in chosen))


def _manifest(
    reader: CacheReader,
    identity: Identity,
    out: Path,
    records: Sequence[UnitRecord],
    options: dict[str, Any],
) -> Manifest:
    """The source's evidence, with the new sizes and what the encoding lost."""
    beside = {name: file_entry(out / name) for name in ledger.beside(out, identity)}
    held = ledger.totals(records)
    return replace(
        reader.manifest,
        fingerprint=identity.fingerprint,
        identity=identity.to_dict(),
        bytes=held["bytes"] + sum(size for size, _ in beside.values()),
        encoding_error=ledger.encoding_error(records),
        files=beside,
        options=options,
    )
