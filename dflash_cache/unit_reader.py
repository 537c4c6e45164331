"""Read one committed unit: bytes go straight to where they are wanted, and are checked there.

What is read is compared with the commit record, never with what lies beside it: a file of another
unit is whole in itself.

Letters: t tokens of a sample, H hidden size.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numcodecs import zstd
from torch import Tensor

from dflash_cache.buffers import Buffers, buffers
from dflash_cache.checksums import crc32c, digest, fold
from dflash_cache.codec import stored_codec
from dflash_cache.encodings import ENCODINGS, SCALES
from dflash_cache.errors import CacheError
from dflash_cache.files import (
    Files,
    aligned_buffer,
    aligned_range,
    is_url,
    open_files,
    repair_hint,
)
from dflash_cache.layout import (
    CHECKSUM_BYTES,
    CHUNK_TOKENS,
    RawPlane,
    chunks_of,
    decode_index,
    first_rows,
    index_bytes,
)
from dflash_cache.schema import Identity, UnitRecord, part_of

# Read and summed at once.  What comes from the page cache is summed while it is still in the
# CPU's; a disk wants long reads, and what it brings by itself is in no cache anyway.
CACHED_BYTES = 2 << 20
DIRECT_BYTES = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Located:
    """Where one sample lies."""

    sample_id: int
    length: int
    supervised: int
    group: str
    unit: str
    start: int


def checked(files: Files, name: str, entry: Sequence[int], *, behind: str = "") -> bytes:
    """A whole file that must have the size and checksum of its entry; `behind` ends an error."""
    try:
        payload = files.read(name)
    except FileNotFoundError:
        raise damaged_file(files, name, f"missing{behind}") from None
    size, check = entry
    if len(payload) != size:
        raise damaged_file(files, name, f"{len(payload)} bytes, want {size}{behind}")
    if digest(payload) != check:
        raise damaged_file(files, name, f"its checksum does not fit its content{behind}")
    return payload


def damaged_file(files: Files, name: str, problem: str) -> CacheError:
    """The error that says what is damaged and what to do."""
    return CacheError(
        f"{files.where}/{name}: {problem}; the cache is damaged. {repair_hint(files.where)}"
    )


class UnitReader:
    """One committed unit.  What is small is kept once it has been read and checked."""

    def __init__(self, files: Files, record: UnitRecord, identity: Identity) -> None:
        self.files, self.record, self.identity = files, record, identity
        self.parts = ENCODINGS[identity.encoding].parts
        self.small: dict[str, Any] = {}

    def check_sizes(self) -> None:
        """Refuse a unit with a file that is missing or has another size; local files only."""
        if is_url(self.files.where):
            return  # a question per file is dear there; short reads are found anyway
        for name, (size, _) in self.record.files.items():
            found = self.files.size(f"{self.record.folder}/{name}")
            if found != size:
                told = "missing" if found is None else f"{found} bytes"
                raise self.damaged(name, f"{told}, the commit record says {size}")

    def damaged(self, name: str, problem: str) -> CacheError:
        return damaged_file(
            self.files, f"{self.record.folder}/{name}", f"{problem}; unit {self.record.unit}"
        )

    def open(self) -> None:
        """Read what every reading needs."""
        self.array("input_ids", "<i4")
        self.array("loss_mask", "u1")

    def array(self, name: str, dtype: str) -> np.ndarray:
        """A small array of the unit, whole."""
        values: np.ndarray = self._once(name, lambda: self._array(name, dtype))
        return values

    def _array(self, name: str, dtype: str) -> np.ndarray:
        file = f"{name}/c/0"
        if file not in self.record.files:
            raise self.damaged(file, "the commit record does not know it")
        payload = checked(
            self.files,
            f"{self.record.folder}/{file}",
            self.record.files[file],
            behind=f"; unit {self.record.unit}",
        )
        values = np.frombuffer(payload[:-CHECKSUM_BYTES], dtype)
        values.flags.writeable = False
        return values

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self.small:
            self.small[name] = make()  # two threads may both read it; they read the same
        return self.small[name]

    def read_raw(self, name: str, row: int, into: np.ndarray) -> int:
        """Rows of an uncompressed plane from `row` on into bytes [t, row bytes]."""
        plane = RawPlane(row_bytes=into.shape[1])
        first, count = row // CHUNK_TOKENS, chunks_of(len(into))
        check = self._read_chunks(name, plane, first, into.reshape(-1))
        wanted = self._checksums(name)[first : first + count]
        self._compare(name, check, fold(wanted, plane.chunk_bytes))
        return count * plane.stride

    def _checksums(self, name: str) -> list[int]:
        numbers: list[int] = self._once(
            f"list of {name}", lambda: self.array(f"checksums/{name}", "<u4").tolist()
        )
        return numbers

    def _compare(self, name: str, found: int, wanted: int) -> None:
        if found != wanted:
            raise self.damaged(f"{name}/c/0/0", "a checksum does not fit the states read")

    def _read_chunks(self, name: str, plane: RawPlane, first: int, into: np.ndarray) -> int:
        """Payload of chunks from `first` on; returns the checksum of whole chunks.

        Whole chunks go straight to where they are wanted, if the addresses allow it; what is
        between them, and what the last one holds beyond `into`, goes to scratch memory.
        """
        size, stride = plane.chunk_bytes, plane.stride
        whole, tail = divmod(len(into), size)
        chunks, check = whole + (tail > 0), 0
        fits, cached = self._fits(plane, into), self.files.alignment == 1
        cached = cached and not is_url(self.files.where)
        step = max(1, (CACHED_BYTES if cached or not fits else DIRECT_BYTES) // stride)
        for begin in range(0, chunks, step):
            end, end_whole = min(begin + step, chunks), min(begin + step, whole)
            own = into[begin * size : end_whole * size]
            if fits:
                last, gap = _scratch(stride, "last"), _scratch(plane.gap, "gap")
                buffers = [part for i in range(begin, end_whole)
                           for part in (into[i * size : (i + 1) * size], gap)]  # fmt: skip
                buffers += [last] * (end - end_whole)
                self._fill(name, (first + begin) * stride, buffers)
            else:
                bounce = _scratch((end - begin) * stride, "bounce").reshape(-1, stride)
                self._fill(name, (first + begin) * stride, [bounce.reshape(-1)])
                own.reshape(-1, size)[...] = bounce[: end_whole - begin, :size]
                last = bounce[-1]
            check = crc32c(own, check)
        if tail:
            into[whole * size :] = last[:tail]
            check = crc32c(last[:size], check)
        return check

    def _fits(self, plane: RawPlane, into: np.ndarray) -> bool:
        alignment = self.files.alignment
        return not (into.ctypes.data % alignment or plane.chunk_bytes % alignment)

    def _fill(self, name: str, offset: int, buffers: Sequence[np.ndarray]) -> None:
        wanted = sum(map(len, buffers))
        if wanted and self._ask(name, offset, buffers) < wanted:
            raise self.damaged(f"{name}/c/0/0", "the file ends too early")

    def _ask(self, name: str, offset: int, buffers: Sequence[np.ndarray]) -> int:
        try:
            return self.files.fill(f"{self.record.folder}/{name}/c/0/0", offset, buffers)
        except FileNotFoundError:
            raise self.damaged(f"{name}/c/0/0", "missing") from None

    def read_compressed(self, name: str, row: int, into: np.ndarray) -> int:
        """The same for a compressed plane."""
        if not len(into):
            return 0
        size = CHUNK_TOKENS * into.shape[1]
        first, count = row // CHUNK_TOKENS, chunks_of(len(into))
        entries = self._index(name)[first : first + count]
        payloads = self._read_range(name, entries)
        flat = into.reshape(-1)
        for number, (payload, wanted) in enumerate(
            zip(payloads, self._checksums(name)[first : first + count], strict=True)
        ):
            self._compare(name, crc32c(payload), wanted)
            own = flat[number * size : (number + 1) * size]
            if len(own) == size:
                zstd.decompress(payload, own)
            else:
                own[...] = np.frombuffer(zstd.decompress(payload), np.uint8)[: len(own)]
        return sum(size for _, size in entries)

    def _read_range(self, name: str, entries: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Payloads of neighbouring chunks, read at once; valid until this thread reads again."""
        begin = entries[0][0]
        end = max(offset + size for offset, size in entries)
        limit = self.record.files[f"{name}/c/0/0"][0]
        if not 0 <= begin < end <= limit:
            raise self.damaged(f"{name}/c/0/0", "its index is damaged")
        offset, size = aligned_range(begin, end - begin, self.files.alignment)
        buffer = _scratch(size, "range")
        if self._ask(name, offset, [buffer]) < end - offset:
            raise self.damaged(f"{name}/c/0/0", "the file ends too early")
        return [buffer[at - offset : at - offset + n - CHECKSUM_BYTES] for at, n in entries]

    def _index(self, name: str) -> list[tuple[int, int]]:
        """Offset and size of every chunk, from the end of the shard."""
        entries: list[tuple[int, int]] = self._once(
            f"index of {name}", lambda: self._read_index(name)
        )
        return entries

    def _read_index(self, name: str) -> list[tuple[int, int]]:
        size = index_bytes(len(self._checksums(name)))
        end = self.record.files[f"{name}/c/0/0"][0]
        offset, length = aligned_range(end - size, size, self.files.alignment)
        buffer = aligned_buffer(length)
        got = self._ask(name, offset, [buffer])
        entries = decode_index(buffer[end - size - offset : end - offset].tobytes())
        if got < end - offset or entries is None:
            raise self.damaged(f"{name}/c/0/0", "its index is damaged")
        return entries


def read_plane(unit: UnitReader, located: Located, plane: str, into: Buffers) -> int:
    """All parts of one plane of one sample; returns the bytes that it took on disk."""
    size = 0
    for part in unit.parts:
        name = part_of(plane, part.name)
        if part.name == SCALES:
            rows = slice(located.start, located.start + located.length)
            into[SCALES].numpy()[...] = unit.array(name, "<f4")[rows]
            size += 4 * located.length
        else:
            read = unit.read_compressed if part.compressed else unit.read_raw
            size += read(name, located.start, into[part.name].view(torch.uint8).numpy())
    return size


def stored_states(root: Path, record: UnitRecord, identity: Identity, position: int) -> Tensor:
    """States [K, t, H] of one sample of a committed unit, bfloat16; the seal need not be there."""
    unit = UnitReader(open_files(root, direct=False), record, identity)
    unit.check_sizes()
    located = locate(record)[position]
    codec = stored_codec(root, identity, record)
    into = buffers(identity, len(identity.planes), located.length)
    return torch.stack(
        [
            codec.decode(plane, _filled(unit, located, plane, row_of(into, k)))
            for k, plane in enumerate(identity.planes)
        ]
    )


def row_of(into: Buffers, k: int) -> Buffers:
    """Buffers of one plane."""
    return {name: values[k] for name, values in into.items()}


def _filled(unit: "UnitReader", located: Located, plane: str, into: Buffers) -> Buffers:
    read_plane(unit, located, plane, into)
    return into


_threads = threading.local()


def _scratch(size: int, use: str) -> np.ndarray:
    """Memory of this thread's own, `size` bytes that hold nothing of worth."""
    held: dict[str, np.ndarray] = _threads.__dict__
    if use not in held or len(held[use]) < size:
        held[use] = aligned_buffer(size)
    return held[use][:size]


def locate(record: UnitRecord) -> list[Located]:
    """Where the samples of a unit lie, in their order."""
    columns = (record.sample_ids, record.lengths, record.supervised, record.groups)
    return located_in(record.unit, list(zip(*columns, strict=True)))


def located_in(unit: str, samples: Sequence[tuple[int, int, int, str]]) -> list[Located]:
    """Samples of a unit by id, length, supervised tokens and group, in their order."""
    starts = first_rows([length for _, length, *_ in samples])[:-1]
    return [
        Located(
            sample_id=sample_id,
            length=length,
            supervised=supervised,
            group=group,
            unit=unit,
            start=start,
        )
        for (sample_id, length, supervised, group), start in zip(samples, starts, strict=True)
    ]
