"""Which part of a flat vector belongs to which rank.  Pure integers: no torch.

N elements of the whole vector, W ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

# The norm of a vector is put together from those of its cells, and shards end where cells do: so
# the sum is the same, bit for bit, however many ranks share it.  That many are fast and even.
CELLS = 512
LEAST_CELL = 64


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A run of elements of one parameter."""

    parameter: int
    inside: slice  # of the parameter, flat
    at: slice  # of the whole vector


def cell_size(length: int) -> int:
    """Elements of a cell: a power of two."""
    return max(LEAST_CELL, 1 << (-(-length // CELLS) - 1).bit_length())


def shard_size(length: int, *, world: int) -> int:
    """Elements of every rank's shard but the last ones', which may be shorter or empty."""
    cell = cell_size(length)
    return -(-length // (cell * world)) * cell


def shard(length: int, *, rank: int, world: int) -> slice:
    """The shard of a rank."""
    size = shard_size(length, world=world)
    return slice(min(rank * size, length), min((rank + 1) * size, length))


def pieces(sizes: Sequence[int], part: slice) -> list[Piece]:
    """The runs of parameters that a part of the vector holds, in order."""
    found = []
    for number, (end, size) in enumerate(zip(accumulate(sizes), sizes, strict=True)):
        first, last = max(end - size, part.start), min(end, part.stop)
        if first < last:
            begin = end - size
            inside = slice(first - begin, last - begin)
            found.append(Piece(parameter=number, inside=inside, at=slice(first, last)))
    return found


def grid(sizes: Sequence[int], part: slice) -> list[list[int]]:
    """Lengths of the runs into which the grid of cells cuts each piece of a part."""
    cell = cell_size(sum(sizes))
    return [list(_cut(piece.at, cell)) for piece in pieces(sizes, part)]


def _cut(at: slice, cell: int) -> Iterator[int]:
    begin = at.start
    while begin < at.stop:
        end = min(begin // cell * cell + cell, at.stop)
        yield end - begin
        begin = end
