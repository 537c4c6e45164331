"""Where bytes lie in a unit.  Pure integers: no torch, no zarr, no I/O.

A *plane* is one array of a unit that grows with the channels, stored as one zarr shard file of
chunks of `CHUNK_TOKENS` tokens, its index behind them.  Every sample starts on a chunk boundary.
Each chunk of a raw plane begins at a multiple of `ALIGNMENT` bytes, so that a sample is one
direct read into the place where it is wanted; the sharding codec of zarr v3 allows such gaps.
Chunks of a compressed plane lie one behind the other.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_cache.checksums import crc32c

CHUNK_TOKENS = 64
ALIGNMENT = 4096  # direct reads want offsets, lengths and addresses at multiples of it
CHECKSUM_BYTES = 4  # behind every chunk, and behind the index


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def padded(tokens: int) -> int:
    """Tokens that a sample occupies on disk."""
    return round_up(tokens, CHUNK_TOKENS)


def chunks_of(tokens: int) -> int:
    """Chunks that a sample occupies on disk."""
    return -(-tokens // CHUNK_TOKENS)


def first_rows(lengths: Sequence[int]) -> list[int]:
    """Token row of the unit at which each sample begins; one more entry says where all end."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + padded(length))
    return starts


@dataclass(frozen=True, kw_only=True)
class RawPlane:
    """Geometry of an uncompressed shard: chunk k begins at `k * stride`."""

    row_bytes: int

    @property
    def chunk_bytes(self) -> int:
        return CHUNK_TOKENS * self.row_bytes

    @property
    def stride(self) -> int:
        return round_up(self.chunk_bytes + CHECKSUM_BYTES, ALIGNMENT)

    @property
    def gap(self) -> int:
        """Bytes from the end of a chunk's payload to the next chunk; its checksum comes first."""
        return self.stride - self.chunk_bytes

    def file_bytes(self, chunks: int) -> int:
        return chunks * self.stride + index_bytes(chunks)


def index_bytes(chunks: int) -> int:
    """Size of a shard's index: offset and size of every chunk, and a checksum."""
    return 16 * chunks + CHECKSUM_BYTES


def encode_index(entries: Sequence[tuple[int, int]]) -> bytes:
    """A shard's index, as the `sharding_indexed` codec of zarr v3 wants it."""
    table = b"".join(struct.pack("<QQ", offset, size) for offset, size in entries)
    return table + struct.pack("<I", crc32c(table))


def decode_index(payload: bytes) -> list[tuple[int, int]] | None:
    """Offset and size (checksum included) of every chunk; None where the index is damaged."""
    table, check = payload[:-CHECKSUM_BYTES], payload[-CHECKSUM_BYTES:]
    if len(table) % 16 or struct.pack("<I", crc32c(table)) != check:
        return None
    return list(struct.iter_unpack("<QQ", table))
