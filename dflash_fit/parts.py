"""The optimizer's state on disk: flat vectors in as many parts as ranks wrote them.

A part is a safetensors file with the same run of elements of every vector; its metadata say which.
Any number of parts is read into any shard: how many ranks there were does not matter.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from dflash_cache.checksums import Hasher
from dflash_fit.shards import shard

BLOCK = 1 << 24  # bytes written at once
FLUSH = 1 << 28  # bytes between flushes: the last one must not take minutes
ELEMENTS = 1 << 26  # read at once: memory stays flat
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
SINCE = ("skipped_in_a_row",)  # scalars that older checkpoints do not have


class FlatState(Protocol):
    """What is saved of an optimizer; all tensors are live."""

    length: int  # elements of the whole vector of parameters
    owned: slice  # those that this process holds

    def flats(self) -> dict[str, Tensor]:
        """Vectors of the elements `owned`, fp32."""

    def scalars(self) -> dict[str, Tensor]:
        """What is the same on all ranks, fp32."""

    def restore(self) -> None:
        """Vectors and scalars were overwritten; all ranks call it."""


def part_name(rank: int, world: int) -> str:
    return (
        "optimizer.safetensors"
        if world == 1
        else f"optimizer-{rank + 1:05d}-of-{world:05d}.safetensors"
    )


def part_of(
    optimizer: FlatState, *, rank: int, world: int
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Live tensors and metadata of what a rank writes; the first one has the scalars, too."""
    # Where the state is sharded these are the rank's own.
    at, own = shard(optimizer.length, rank=rank, world=world), optimizer.owned
    assert own.start <= at.start <= at.stop <= own.stop, (at, own)
    here = slice(at.start - own.start, at.stop - own.start)
    tensors = {name: flat[here] for name, flat in optimizer.flats().items()}
    said = {"begin": at.start, "end": at.stop, "length": optimizer.length}
    metadata = {"format": "pt", **{name: str(number) for name, number in said.items()}}
    return {**tensors, **(optimizer.scalars() if rank == 0 else {})}, metadata


def read_parts(paths: Sequence[Path], optimizer: FlatState) -> None:
    """Overwrite vectors and scalars by what the parts hold; the weights follow from them.

    All ranks call it.  Raises `ValueError` where the parts are not the whole of this vector, and
    what safetensors raises.
    """
    found = sorted((range_of(path) for path in paths), key=lambda at: (at.start, at.stop))
    ends = [0, *(at.stop for at in found)]
    if ends[-1] != optimizer.length or any(
        at.start != end for at, end in zip(found, ends, strict=False)
    ):
        raise ValueError(
            f"its parts hold the elements {[(at.start, at.stop) for at in found]}, want all "
            f"{optimizer.length:,} of this drafter"
        )
    for path in paths:
        _read_flats(path, optimizer)
    with safe_open(paths[0], "pt") as file:
        known = set(file.keys())
        for name, scalar in optimizer.scalars().items():
            if name in SINCE and name not in known:
                scalar.zero_()
            else:
                scalar.copy_(file.get_tensor(name))
    optimizer.restore()


def range_of(path: Path) -> slice:
    """The elements that a part holds; all, where it is from before there were parts."""
    with safe_open(path, "pt") as file:
        said = file.metadata() or {}
        size = math.prod(file.get_slice("master").get_shape())
        at = slice(int(said.get("begin", 0)), int(said.get("end", size)))
    if at.stop - at.start != size:
        raise ValueError(f"{path.name} holds {size:,} elements, its range {at.start} to {at.stop}")
    return at


def _read_flats(path: Path, optimizer: FlatState) -> None:
    """Copy what a part holds of the elements owned."""
    at, own = range_of(path), optimizer.owned
    first, last = max(at.start, own.start), min(at.stop, own.stop)
    with safe_open(path, "pt") as file:
        for name, flat in optimizer.flats().items():
            stored = file.get_slice(name)
            for begin in range(first, last, ELEMENTS):
                end = min(begin + ELEMENTS, last)
                piece = stored[begin - at.start : end - at.start]
                flat[begin - own.start : end - own.start].copy_(piece)


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str],
    between: Callable[[], None],
) -> list[int]:
    """Write host tensors as a new safetensors file and flush it; returns its size and XXH3-64.

    `between` is called before every block and may raise, to give up.  The library's own writer
    cannot be stopped, leaves the checksum to a second reading, and before 0.6 copies everything.
    """
    size, flushed, hasher = 0, 0, Hasher()
    with open(path, "xb") as file:
        for block in _blocks(tensors, metadata):
            between()
            file.write(block)
            hasher.update(block)
            size += len(block)
            if size - flushed >= FLUSH:
                file.flush()
                os.fsync(file.fileno())
                flushed = size
        file.flush()
        os.fsync(file.fileno())
    return [size, hasher.intdigest()]


def _blocks(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    """The bytes of a safetensors file: length of the header, header, tensors one behind the other.

    Source: the format's specification, https://github.com/huggingface/safetensors#format.
    """
    # The widest first: so everything is aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        octets: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
        payload = memoryview(octets)
        for begin in range(0, len(payload), BLOCK):
            yield payload[begin : begin + BLOCK]
