"""Memory for one pack that several processes see: one writes the states, the others copy them.

It has no name in any folder, so it is gone with the last process that looks at it.

Letters: K planes, T rows, H hidden size, b bytes of a token in a plane.
"""

import math
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import torch

from dflash_cache.buffers import Buffers
from dflash_cache.encodings import ENCODINGS, Part
from dflash_cache.layout import ALIGNMENT, round_up
from dflash_cache.schema import Identity

NAME = "dflash-pack"  # in /proc/PID/maps


def memory_bytes(identity: Identity, *, planes: int, rows: int) -> int:
    """What a pack takes."""
    return sum(
        round_up(math.prod(shape) * part.dtype.itemsize, ALIGNMENT)
        for part, shape in _shapes(identity, planes, rows)
    )


def _shapes(identity: Identity, planes: int, rows: int) -> Iterator[tuple[Part, tuple[int, ...]]]:
    for part in ENCODINGS[identity.encoding].parts:
        yield part, (planes, rows, *[identity.hidden_size] * part.per_channel)


class PackMemory:
    """The writer's side; `buffers` are laid out as the reader of a cache fills them."""

    def __init__(self, identity: Identity, *, planes: int, rows: int) -> None:
        self.file = _nameless_file()
        self._close = weakref.finalize(self, os.close, self.file)
        size = memory_bytes(identity, planes=planes, rows=rows)
        os.ftruncate(self.file, size)
        memory = mmap.mmap(self.file, size)
        with suppress(AttributeError, OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.buffers: Buffers = {}
        begin = 0
        for part, shape in _shapes(identity, planes, rows):
            bytes_ = np.frombuffer(memory, np.uint8)[begin:][
                : math.prod(shape) * part.dtype.itemsize
            ]
            self.buffers[part.name] = torch.from_numpy(bytes_).view(part.dtype).view(shape)
            begin += round_up(len(bytes_), ALIGNMENT)

    def close(self) -> None:
        """Give the memory back, as far as this process is concerned."""
        self.buffers = {}
        self._close()


def look_at(file: int, identity: Identity, *, planes: int, rows: int) -> dict[str, np.ndarray]:
    """The same memory in another process: part -> bytes [K, T, b], read only; closes the file."""
    size = memory_bytes(identity, planes=planes, rows=rows)
    try:
        memory = mmap.mmap(file, size, prot=mmap.PROT_READ)
    finally:
        os.close(file)
    found, begin = {}, 0
    for part, shape in _shapes(identity, planes, rows):
        length = math.prod(shape) * part.dtype.itemsize
        found[part.name] = np.frombuffer(memory, np.uint8)[begin:][:length].reshape(
            planes, rows, -1
        )
        begin += round_up(length, ALIGNMENT)
    return found


def _nameless_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create(NAME)
    file, path = tempfile.mkstemp(prefix=NAME)
    os.unlink(path)
    return file
