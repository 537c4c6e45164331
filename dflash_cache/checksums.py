"""Checksums: XXH3-64 of files, CRC-32C of zarr chunks, and that of a whole from its parts.

Files are not summed by CRC: a chunk is followed by its own CRC, as zarr wants it, and the CRC of
bytes that end in their own CRC is a constant, whatever they say.

A sample's extent is checked by one call that lets other Python threads run, against the checksums
of its chunks folded into one: a call per chunk would hand the interpreter lock back and forth a
thousand times per gigabyte.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import crc32c as _crc32c
import xxhash

POLYNOMIAL = 0x82F63B78  # Castagnoli, bits reversed


Hasher = xxhash.xxh3_64


def digest(payload: Any) -> int:
    """XXH3-64 of a buffer: what records and manifests keep of a file."""
    return int(xxhash.xxh3_64_intdigest(payload))


def crc32c(payload: Any, value: int = 0) -> int:
    """CRC-32C of a buffer; `value` is the checksum of what came before it."""
    return int(_crc32c.crc32c(payload, value))


def fold(checksums: Iterable[int], size: int) -> int:
    """CRC-32C of parts put one behind the other, each `size` bytes long, from their CRC-32Cs."""
    low, second, third, high = _tables(size)
    whole = 0
    for part in checksums:
        moved = low[whole & 255] ^ second[whole >> 8 & 255] ^ third[whole >> 16 & 255]
        whole = moved ^ high[whole >> 24] ^ part
    return whole


Tables = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@lru_cache(maxsize=64)
def _tables(size: int) -> Tables:
    """What `size` bytes behind a checksum do to it, as one table per byte of the checksum.

    A CRC is linear over GF(2): appending bytes multiplies by x ** (8 * size).  The operator is a
    32 x 32 bit matrix (column i is the image of bit i), raised by repeated squaring.
    Source: M. Adler's crc32_combine in zlib.
    """
    one_bit = [POLYNOMIAL] + [1 << i for i in range(31)]
    power, total = one_bit, [1 << i for i in range(32)]
    bits = 8 * size
    while bits:
        if bits & 1:
            total = [_times(power, column) for column in total]
        power = [_times(power, column) for column in power]
        bits >>= 1

    def table(byte: int) -> tuple[int, ...]:
        return tuple(_times(total, value << 8 * byte) for value in range(256))

    return table(0), table(1), table(2), table(3)


def _times(matrix: list[int], vector: int) -> int:
    result = 0
    for column in matrix:
        if not vector:
            break
        if vector & 1:
            result ^= column
        vector >>= 1
    return result
