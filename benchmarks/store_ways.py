"""The ways in which `bench_store` writes and reads the same samples: ours, and those of others.

Letters: K target layers, T token rows in memory, t tokens of a sample, H hidden size.
"""

import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import zarr
from safetensors.torch import load_file, save_file
from store_data import BUCKET_EDGES, Data, Memory, page_aligned
from torch import Tensor
from zarr.codecs import Crc32cCodec
from zarr.core.buffer.cpu import NDBuffer
from zarr.storage import LocalStore

from dflash_cache import disk, encodings, ledger, store
from dflash_cache.attempt import encoded_sample
from dflash_cache.buckets import UnitPlan, plan_units
from dflash_cache.codec import plain_codec
from dflash_cache.config import BuildConfig
from dflash_cache.encodings import EXPONENTS, HIDDEN, SCALES
from dflash_cache.layout import ALIGNMENT, CHUNK_TOKENS, padded, round_up
from dflash_cache.reader import CacheReader
from dflash_cache.samples import Sample
from dflash_cache.schema import FORMAT_VERSION, LAYER_CONVENTION, Identity, Manifest

BLOCK = 8 << 20  # of raw files
LONG_BLOCK = 32 << 20  # as long as our own longest read; the quicker of both is the limit
# Relative L2 error of a sample and layer.  e4m3 has 3 bits of mantissa: 2.6% on such data, twice
# that is damage.
TOLERANCE = {"bf16": 0.0, "lossless": 0.0, "fp8": 0.052}


def write_ours(
    root: Path,
    data: Data,
    plans: Sequence[UnitPlan],
    encoding: str,
    *,
    states: Callable[[int], Tensor],
) -> None:
    """Commit units of simulated samples and seal them, as a build does."""
    identity = make_identity(data, plans, encoding)
    members = [member for plan in plans for member in plan.members]
    ledger.begin(root, identity, options={})
    codec = plain_codec(identity)
    records = [
        store.write_unit(
            root,
            plan,
            [make_sample(member, data.lengths[member]) for member in plan.members],
            (
                encoded_sample(list(states(member)), identity.planes, codec)
                for member in plan.members
            ),
            identity=identity,
        )
        for plan in plans
    ]
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        fingerprint=identity.fingerprint,
        identity=identity.to_dict(),
        **ledger.totals(records),
        buckets={},
        rows=len(members),
        skipped={},
        proofs={},
        agreement={},
        encoding_error={},
        files={},
        options={},
        software={},
        created="",
    )
    ledger.seal(root, manifest)


def open_ours(
    root: Path, data: Data, into: dict[str, Tensor], *, direct: bool, threads: int
) -> Callable[[], object]:
    """A function that reads all samples into `into`; opening the cache is not part of it."""
    reader = CacheReader(root, direct=direct, threads=threads)
    documents = list(range(len(data.lengths)))
    return lambda: reader.read_documents(documents, data.starts, layer_ids(data), into)


def layer_ids(data: Data) -> list[int]:
    return list(range(data.layers))


def make_sample(sample_id: int, length: int) -> Sample:
    ids, mask = np.zeros(length, np.int32), np.ones(length, bool)
    return Sample(sample_id=sample_id, input_ids=ids, loss_mask=mask, group=str(sample_id))


def make_identity(data: Data, plans: Sequence[UnitPlan], encoding: str) -> Identity:
    members = [member for plan in plans for member in plan.members]
    return Identity(
        format_version=FORMAT_VERSION,
        target={},
        tokenizer={},
        data_sha256="simulated",
        samples=len(members),
        tokens=sum(data.lengths[member] for member in members),
        target_layer_ids=layer_ids(data),
        layer_convention=LAYER_CONVENTION,
        final_hidden=None,
        hidden_size=data.hidden,
        encoding=encoding,
        chunk_tokens=CHUNK_TOKENS,
        alignment=ALIGNMENT,
        bucket_edges=list(BUCKET_EDGES),
        unit_tokens=BuildConfig.unit_tokens,
    )


def hidden_files(root: Path) -> list[Path]:
    """The chunk files of the states of a cache, and of what their encoding keeps beside them."""
    return sorted(
        path
        for part in (HIDDEN, SCALES, EXPONENTS)
        for path in root.glob(f"units/*/*/{part}/*/c/**/*")
        if path.is_file()
    )


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to read all samples, cold and warm, and the files it reads."""

    name: str
    encoding: str | None  # of what it leaves in memory; None: not samples
    cold: Callable[[], object]
    warm: Callable[[], object]
    files: list[Path]

    @property
    def disk_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)


def prepare(
    root: Path, data: Data, memory: Memory, args: Namespace, threads: ThreadPoolExecutor
) -> list[Way]:
    """Write the samples once per layout and return the ways to read them."""
    plans = plan_units(data.lengths, edges=BUCKET_EDGES, unit_tokens=BuildConfig.unit_tokens)
    ours = []
    for encoding in args.encodings:
        cache, into = root / encoding, memory.buffers[encoding]
        write_ours(cache, data, plans, encoding, states=data.states)
        ours.append(
            Way(
                name=f"packed_{encoding}",
                encoding=encoding,
                cold=open_ours(cache, data, into, direct=True, threads=args.threads),
                warm=open_ours(cache, data, into, direct=False, threads=args.threads),
                files=hidden_files(cache),
            )
        )
    samples = range(len(data.lengths))
    write_pt(root / "pt", map(data.states, samples))
    write_safetensors(root / "safetensors", map(data.states, samples))
    return [
        raw_way("raw", root / "bf16", memory, threads, block=BLOCK),
        raw_way("raw_long", root / "bf16", memory, threads, block=LONG_BLOCK),
        *ours,
        zarr_way(root / "bf16", data, memory, threads),
        files_way("pt_files", root / "pt", torch.load, data, memory, threads),
        files_way("safetensors_files", root / "safetensors", load_hidden, data, memory, threads),
    ]


def raw_way(
    name: str, root: Path, memory: Memory, threads: ThreadPoolExecutor, *, block: int
) -> Way:
    """The limit: the files of the packed bf16 cache, whole, one after the other."""
    files = hidden_files(root)
    return Way(
        name=name,
        encoding=None,
        cold=lambda: read_raw(files, memory.bytes, threads, flags=os.O_DIRECT, block=block),
        warm=lambda: read_raw(files, memory.bytes, threads, flags=0, block=block),
        files=files,
    )


def read_raw(
    files: Sequence[Path],
    into: np.ndarray,
    threads: ThreadPoolExecutor,
    *,
    flags: int,
    block: int = BLOCK,
) -> None:
    """Read files block by block; the threads take the blocks in the order of the files."""
    descriptors = [os.open(path, os.O_RDONLY | flags) for path in files]
    try:
        blocks, at = [], 0
        for descriptor in descriptors:
            size = os.fstat(descriptor).st_size
            for offset in range(0, size, block):
                wanted = min(block, size - offset)
                room = round_up(wanted, ALIGNMENT)  # O_DIRECT takes whole pages, also at the end
                blocks.append((descriptor, offset, wanted, into[at : at + room]))
                at += room

        def read(one: tuple[int, int, int, np.ndarray]) -> None:
            descriptor, offset, wanted, memory = one
            got = os.preadv(descriptor, [memory], offset)
            assert got == wanted, (got, wanted)

        for _ in threads.map(read, blocks):
            pass
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def zarr_way(root: Path, data: Data, memory: Memory, threads: ThreadPoolExecutor) -> Way:
    """zarr-python on the files of the packed bf16 cache, arrays opened beforehand.

    `out=` is its quickest way into memory that exists: no copy of ours after it.
    """
    identity = ledger.read_identity(root)
    reads = []
    for record in ledger.committed_units(root, fingerprint=identity.fingerprint).values():
        unit = LocalStore(root / record.folder, read_only=True)
        arrays = [
            zarr.open_array(unit, path=f"hidden/{layer}", mode="r") for layer in layer_ids(data)
        ]
        for sample, start in zip(record.sample_ids, record.starts, strict=True):
            reads.append((arrays, sample, slice(start, start + data.lengths[sample])))
    states = memory.states.view(torch.uint16).numpy()

    def read(one: tuple[list[zarr.Array], int, slice]) -> None:
        arrays, sample, rows = one
        into = slice(data.starts[sample], data.starts[sample] + data.lengths[sample])
        for k, array in enumerate(arrays):
            out = NDBuffer.from_numpy_array(states[k, into])
            array.get_basic_selection((rows, slice(None)), out=out)

    def read_all() -> None:
        list(threads.map(read, reads))

    return Way(
        name="zarr_python",
        encoding="bf16",
        cold=read_all,
        warm=read_all,
        files=hidden_files(root),
    )


def files_way(
    name: str,
    folder: Path,
    load: Callable[[Path], Tensor],
    data: Data,
    memory: Memory,
    threads: ThreadPoolExecutor,
) -> Way:
    """One file per sample: load it, copy it to its place.

    Opened anew on every read: a mapping held open keeps its pages through a cache drop.
    """
    files = sorted(folder.iterdir())
    states = memory.states.view(torch.uint16).numpy()

    def read(sample: int) -> None:
        into = slice(data.starts[sample], data.starts[sample] + data.lengths[sample])
        # numpy copies with one thread and without the GIL, so that `threads` is all there is.
        states[:, into] = load(files[sample]).view(torch.uint16).numpy()

    def read_all() -> None:
        list(threads.map(read, range(len(files))))

    return Way(name=name, encoding="bf16", cold=read_all, warm=read_all, files=files)


def load_hidden(path: Path) -> Tensor:
    return load_file(path)["hidden"]


def check(way: Way, data: Data, memory: Memory) -> None:
    """What arrives is what was stored; also the untimed first run of every way.

    Every third sample is looked at: that every bit comes back is shown by the tests.
    """
    checked = range(0, len(data.lengths), 3)
    for temperature, read in (("cold", way.cold), ("warm", way.warm)):
        memory.clear()
        read()
        if way.encoding is None:
            continue
        worst = max(error_of(way.encoding, sample, data, memory) for sample in checked)
        if not worst <= TOLERANCE[way.encoding]:
            raise SystemExit(f"Error: {way.name}, {temperature}: relative error {worst:.3g}")


def error_of(encoding: str, sample: int, data: Data, memory: Memory) -> float:
    """The greatest relative L2 error among the layers of a sample; 0 means every bit is right."""
    wanted_KtH = data.states(sample)
    rows = slice(data.starts[sample], data.starts[sample] + data.lengths[sample])
    errors = []
    for k, wanted in enumerate(wanted_KtH):
        parts = {name: buffer[k, rows] for name, buffer in memory.buffers[encoding].items()}
        found = encodings.decode(encoding, parts)
        if found.dtype == torch.bfloat16 and torch.equal(
            found.view(torch.int16), wanted.view(torch.int16)
        ):
            errors.append(0.0)
        else:
            difference = found.float() - wanted.float()
            errors.append(float(difference.norm() / wanted.float().norm()))
    return max(errors)


def layers_on_chunks(samples: Sequence[Tensor]) -> np.ndarray:
    """uint16 [K, T, H] in page-aligned memory: every sample on a chunk boundary, as on disk."""
    layers, _, hidden = samples[0].shape
    rows = sum(padded(states.shape[1]) for states in samples)
    mapping = page_aligned(round_up(layers * rows * hidden * 2, ALIGNMENT))
    layers_KTH = np.frombuffer(mapping, np.uint16, layers * rows * hidden)
    layers_KTH = layers_KTH.reshape(layers, rows, hidden)
    at = 0
    for states in samples:
        layers_KTH[:, at : at + states.shape[1]] = states.view(torch.uint16).numpy()
        at += padded(states.shape[1])
    return layers_KTH


def write_zarr(folder: Path, layers_KTH: np.ndarray) -> None:
    """One array and one shard per layer, a checksum on every chunk, written whole."""
    group = zarr.create_group(LocalStore(folder), zarr_format=3)
    for k, states_TH in enumerate(layers_KTH):
        array = group.create_array(
            f"hidden/{k}",
            shape=states_TH.shape,
            dtype=states_TH.dtype,
            chunks=(CHUNK_TOKENS, states_TH.shape[1]),
            shards=states_TH.shape,
            compressors=[Crc32cCodec()],
            fill_value=0,
        )
        array[...] = states_TH
    disk.fsync_tree(folder)


def write_pt(folder: Path, samples: Iterator[Tensor]) -> None:
    folder.mkdir()
    for number, states in enumerate(samples):
        torch.save(states, folder / f"{number:06d}.pt")
    disk.fsync_tree(folder)


def write_safetensors(folder: Path, samples: Iterator[Tensor]) -> None:
    folder.mkdir()
    for number, states in enumerate(samples):
        save_file({"hidden": states}, folder / f"{number:06d}.safetensors")
    disk.fsync_tree(folder)


def write_raw(folder: Path, layers_KTH: np.ndarray) -> None:
    """The limit: one file of the same bytes, O_DIRECT in 8 MiB blocks."""
    folder.mkdir()
    payload = layers_KTH.reshape(-1).view(np.uint8)
    payload = payload[: len(payload) // ALIGNMENT * ALIGNMENT]
    descriptor = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
    try:
        for offset in range(0, len(payload), BLOCK):
            os.pwrite(descriptor, payload[offset : offset + BLOCK], offset)
    finally:
        os.close(descriptor)
    disk.fsync_tree(folder)
