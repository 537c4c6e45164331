"""Shards of a flat vector: every element once, cut where cells end, whatever the ranks."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dflash_fit.shards import CELLS, LEAST_CELL, cell_size, grid, pieces, shard

SIZES = st.lists(st.integers(1, 3000), min_size=1, max_size=12)


@given(st.integers(1, 10**10), st.integers(1, 64))
def test_shards_lie_end_to_end_and_end_where_cells_do(length, world):
    parts = [shard(length, rank=rank, world=world) for rank in range(world)]
    assert (parts[0].start, parts[-1].stop) == (0, length)
    assert all(one.stop == other.start for one, other in pairwise(parts))
    assert all(part.stop % cell_size(length) == 0 or part.stop == length for part in parts)
    assert max(part.stop - part.start for part in parts) == parts[0].stop - parts[0].start


@given(st.integers(1, 10**10))
def test_there_are_enough_cells_to_share_evenly_and_not_more_than_wanted(length):
    count = -(-length // cell_size(length))
    assert count <= CELLS
    assert count > CELLS / 2 or cell_size(length) == LEAST_CELL


@given(SIZES, st.data())
def test_pieces_are_the_elements_of_the_part_by_parameter(sizes, data):
    begin = data.draw(st.integers(0, sum(sizes)))
    part = slice(begin, data.draw(st.integers(begin, sum(sizes))))
    owner = [(number, i) for number, size in enumerate(sizes) for i in range(size)]
    found = [
        (piece.parameter, i)
        for piece in pieces(sizes, part)
        for i in range(piece.inside.start, piece.inside.stop)
    ]
    assert found == owner[part]
    assert [i for piece in pieces(sizes, part) for i in range(piece.at.start, piece.at.stop)] == (
        list(range(part.start, part.stop))
    )


@given(SIZES, st.integers(1, 5))
def test_the_cells_of_all_shards_are_those_of_the_whole(sizes, world):
    length = sum(sizes)
    whole = grid(sizes, slice(0, length))
    parts = [grid(sizes, shard(length, rank=rank, world=world)) for rank in range(world)]
    every = [run for part in parts for runs in part for run in runs]
    assert every == [run for runs in whole for run in runs]
    assert [sum(runs) for runs in whole] == sizes
    assert max(map(max, whole)) <= cell_size(length)
