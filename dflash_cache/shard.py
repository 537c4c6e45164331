"""Write one plane as a zarr shard file, front to back, past the page cache.

The memory it takes is its staging buffer, whatever the size of the file.
"""

import errno
import os
import struct
from pathlib import Path

import numpy as np
from numcodecs import zstd

from dflash_cache.checksums import Hasher, crc32c
from dflash_cache.files import O_DIRECT, aligned_buffer
from dflash_cache.layout import (
    ALIGNMENT,
    CHECKSUM_BYTES,
    CHUNK_TOKENS,
    encode_index,
    round_up,
)

STAGING_BYTES = 8 << 20
ZSTD_LEVEL = 1  # higher levels find nothing more in exponents


class ShardWriter:
    """An open shard file.  `write` takes one sample after the other; `close` makes it durable."""

    def __init__(self, path: Path, *, row_bytes: int, compressed: bool) -> None:
        self.path, self.compressed = path, compressed
        self.chunk_bytes = CHUNK_TOKENS * row_bytes
        room = round_up(self.chunk_bytes + CHECKSUM_BYTES, ALIGNMENT)
        # A chunk that zstd cannot shrink grows by less than a page per 128 KiB.
        self.room = room + (room // 64 + ALIGNMENT if compressed else 0)
        self.staging = aligned_buffer(round_up(max(STAGING_BYTES, 2 * self.room), ALIGNMENT))
        self.filled = self.written = 0
        self.entries: list[tuple[int, int]] = []  # offset and size of every chunk
        self.checksums: list[int] = []  # of every chunk, as stored
        self.hasher = Hasher()  # of what has been written
        self.file = _create(path)

    @property
    def size(self) -> int:
        """Bytes of the file so far."""
        return self.written + self.filled

    def write(self, rows: np.ndarray) -> None:
        """Append a sample, uint8 [t, row bytes]; its last chunk is filled up with zeros."""
        flat = np.ascontiguousarray(rows).reshape(-1)
        for begin in range(0, len(flat), self.chunk_bytes):
            if len(self.staging) - self.filled < self.room:
                self._flush()
            piece = flat[begin : begin + self.chunk_bytes]
            if self.compressed:
                self._append_compressed(piece)
            else:
                self._append_raw(piece)

    def _append_raw(self, piece: np.ndarray) -> None:
        room = self.staging[self.filled : self.filled + self.room]
        room[: len(piece)] = piece
        room[len(piece) :] = 0
        check = crc32c(room[: self.chunk_bytes])
        behind = room[self.chunk_bytes :]
        behind[:CHECKSUM_BYTES] = np.frombuffer(struct.pack("<I", check), np.uint8)
        self._enter(self.chunk_bytes, check, self.room)

    def _append_compressed(self, piece: np.ndarray) -> None:
        if len(piece) < self.chunk_bytes:
            piece = np.concatenate([piece, np.zeros(self.chunk_bytes - len(piece), np.uint8)])
        payload = zstd.compress(piece, ZSTD_LEVEL)
        check = crc32c(payload)
        stored = payload + struct.pack("<I", check)
        self.staging[self.filled : self.filled + len(stored)] = np.frombuffer(stored, np.uint8)
        self._enter(len(payload), check, len(stored))

    def _enter(self, payload: int, check: int, taken: int) -> None:
        self.entries.append((self.size, payload + CHECKSUM_BYTES))
        self.checksums.append(check)
        self.filled += taken

    def _flush(self) -> None:
        """Write all whole pages of the staging buffer; the rest moves to its front."""
        whole = self.filled // ALIGNMENT * ALIGNMENT
        self.hasher.update(self.staging[:whole].data)
        _write_all(self.file, self.staging[:whole], self.written)
        self.staging[: self.filled - whole] = self.staging[whole : self.filled].copy()
        self.written += whole
        self.filled -= whole

    def close(self) -> None:
        """Write the index, cut the file to its size and flush it to the disk."""
        index = np.frombuffer(encode_index(self.entries), np.uint8)
        for begin in range(0, len(index), ALIGNMENT):
            if len(self.staging) - self.filled < ALIGNMENT:
                self._flush()
            piece = index[begin : begin + ALIGNMENT]
            self.staging[self.filled : self.filled + len(piece)] = piece
            self.filled += len(piece)
        self._flush()
        # Direct writes are of whole pages; what is too much of the last one is cut off again.
        self.hasher.update(self.staging[: self.filled].data)
        self.staging[self.filled : ALIGNMENT] = 0
        if self.filled:
            _write_all(self.file, self.staging[:ALIGNMENT], self.written)
        os.ftruncate(self.file, self.size)
        os.fsync(self.file)
        self.abandon()

    @property
    def entry(self) -> list[int]:
        """Size and XXH3-64 of the closed file, as a record keeps them."""
        return [self.size, self.hasher.intdigest()]

    def abandon(self) -> None:
        """Let go of the file as it is; closing twice does no harm."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        path.unlink(missing_ok=True)  # some file systems make the file and then refuse the mode
        return os.open(path, flags, 0o644)


def _write_all(file: int, payload: np.ndarray, offset: int) -> None:
    while len(payload):
        done = os.pwrite(file, payload, offset)  # type: ignore[arg-type]
        if done % ALIGNMENT and done < len(payload):
            done = done // ALIGNMENT * ALIGNMENT  # direct writes go on from a whole page
            if done == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        payload, offset = payload[done:], offset + done
