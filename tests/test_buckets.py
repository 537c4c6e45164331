"""The plan of units and batches: nobody lost, nobody twice, everybody where they fit."""

from collections import Counter
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_cache.buckets import (
    BATCH_SLOTS,
    bucket_edges_of,
    count_slots,
    cut,
    plan_batches,
    plan_units,
)
from dflash_cache.config import BuildConfig

LENGTHS = st.lists(st.integers(1, 600), max_size=60)
EDGES = st.lists(st.integers(1, 500), min_size=1, max_size=5, unique=True).map(sorted)
LIMIT = st.integers(1, 1500)


@given(lengths=LENGTHS, edges=EDGES, unit_tokens=LIMIT)
def test_every_sample_is_in_exactly_one_unit(lengths, edges, unit_tokens):
    units = plan_units(lengths, edges=edges, unit_tokens=unit_tokens)
    members = Counter(member for unit in units for member in unit.members)
    assert members == Counter(range(len(lengths)))


@given(lengths=LENGTHS, edges=EDGES, unit_tokens=LIMIT)
def test_a_length_lies_below_its_buckets_edge_and_not_below_the_one_before(
    lengths, edges, unit_tokens
):
    lower = dict(pairwise([*bucket_edges_of(lengths, edges)]))
    below = {upper: edge for edge, upper in lower.items()}
    for unit in plan_units(lengths, edges=edges, unit_tokens=unit_tokens):
        for member in unit.members:
            assert below.get(unit.bucket, 0) <= lengths[member] < unit.bucket


@given(lengths=LENGTHS, edges=EDGES, unit_tokens=LIMIT)
def test_a_unit_holds_at_most_its_tokens_unless_it_is_one_sample(lengths, edges, unit_tokens):
    for unit in plan_units(lengths, edges=edges, unit_tokens=unit_tokens):
        tokens = sum(lengths[member] for member in unit.members)
        assert tokens <= unit_tokens or len(unit.members) == 1
        assert unit.members


@given(lengths=LENGTHS, edges=EDGES, unit_tokens=LIMIT)
def test_two_neighbouring_units_of_a_bucket_would_not_have_fitted_together(
    lengths, edges, unit_tokens
):
    units = plan_units(lengths, edges=edges, unit_tokens=unit_tokens)
    for one, two in pairwise(units):
        if one.bucket == two.bucket:
            tokens = sum(lengths[member] for member in one.members)
            assert tokens + lengths[two.members[0]] > unit_tokens


@given(lengths=LENGTHS, edges=EDGES, unit_tokens=LIMIT)
def test_units_have_names_of_their_own_in_the_order_of_buckets_and_lengths(
    lengths, edges, unit_tokens
):
    units = plan_units(lengths, edges=edges, unit_tokens=unit_tokens)
    assert [unit.name for unit in units] == [f"u{number:06d}" for number in range(len(units))]
    order = [(unit.bucket, -lengths[member]) for unit in units for member in unit.members]
    assert order == sorted(order)


@given(lengths=LENGTHS, edges=EDGES)
def test_only_a_length_beyond_all_edges_adds_one(lengths, edges):
    closed = bucket_edges_of(lengths, edges)
    longest = max(lengths, default=0)
    assert closed == (edges if longest < edges[-1] else [*edges, longest + 1])


def test_an_edge_is_the_first_length_of_the_next_bucket():
    units = plan_units([9, 10, 11, 19, 20, 35], edges=[10, 20], unit_tokens=1000)
    assert [(unit.bucket, unit.members) for unit in units] == [
        (10, (0,)),
        (20, (3, 2, 1)),
        (36, (5, 4)),
    ]


def test_no_samples_make_no_units():
    assert plan_units([], edges=[10], unit_tokens=5) == []


@given(sizes=LENGTHS, limit=LIMIT)
def test_cutting_keeps_the_order_and_fills_greedily(sizes, limit):
    runs = cut(range(len(sizes)), sizes, limit=limit)
    assert [item for run in runs for item in run] == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in run) <= limit or len(run) == 1 for run in runs)
    for run, after in pairwise(runs):
        assert sum(sizes[i] for i in run) + sizes[after[0]] > limit


def test_what_fits_exactly_fits():
    assert cut([7, 8, 9], [5, 5, 5], limit=10) == [[7, 8], [9]]
    assert plan_batches([5, 5, 5], batch_tokens=10) == [[0, 1], [2]]


@given(lengths=LENGTHS, batch_tokens=LIMIT)
def test_batches_cover_every_row_once(lengths, batch_tokens):
    batches = plan_batches(lengths, batch_tokens=batch_tokens)
    rows = Counter(row for batch in batches for row in batch)
    assert rows == Counter(range(len(lengths)))


@given(lengths=LENGTHS, batch_tokens=LIMIT)
def test_a_padded_batch_fits_its_slots_unless_it_is_one_row(lengths, batch_tokens):
    for batch in plan_batches(lengths, batch_tokens=batch_tokens):
        slots = len(batch) * max(lengths[row] for row in batch)
        assert slots <= batch_tokens or len(batch) == 1


@given(lengths=LENGTHS, batch_tokens=LIMIT)
def test_the_longest_batch_comes_first(lengths, batch_tokens):
    batches = plan_batches(lengths, batch_tokens=batch_tokens)
    order = [lengths[row] for batch in batches for row in batch]
    assert order == sorted(lengths, reverse=True)


def every_cut(rows: list[int]) -> list[list[list[int]]]:
    """All ways to cut a sequence into runs."""
    places = [
        places for count in range(len(rows)) for places in combinations(range(1, len(rows)), count)
    ]
    return [[rows[a:b] for a, b in pairwise([0, *cuts, len(rows)])] for cuts in places]


@given(lengths=st.lists(st.integers(1, 900), min_size=1, max_size=8), batch_tokens=LIMIT)
def test_no_other_cut_of_the_sorted_rows_costs_less(lengths, batch_tokens):
    def cost(batches: list[list[int]]) -> int:
        return count_slots(lengths, batches) + BATCH_SLOTS * len(batches)

    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    others = [
        batches
        for batches in every_cut(order)
        if all(len(b) == 1 or count_slots(lengths, [b]) <= batch_tokens for b in batches)
    ]
    found = plan_batches(lengths, batch_tokens=batch_tokens)
    assert cost(found) == min(map(cost, others))


def conversations(count: int, *, seed: int) -> list[int]:
    """Lengths of chats: log-normal, few of them long."""
    rng = np.random.default_rng(seed)
    return np.exp(rng.normal(np.log(900), 0.85, count)).clip(200, 8000).astype(int).tolist()


@pytest.mark.parametrize("count", [60, 500, 5000])
@pytest.mark.parametrize("batch_tokens", [BuildConfig.batch_tokens, BuildConfig.batch_tokens // 2])
def test_padding_is_less_than_5_percent_of_the_slots_at_the_default_edges(count, batch_tokens):
    lengths = conversations(count, seed=count)
    units = plan_units(lengths, edges=BuildConfig.bucket_edges, unit_tokens=BuildConfig.unit_tokens)
    slots = batches = 0
    for unit in units:
        own = [lengths[member] for member in unit.members]
        planned = plan_batches(own, batch_tokens=batch_tokens)
        slots += count_slots(own, planned)
        batches += len(planned)
    assert 1 - sum(lengths) / slots < 0.05
    # And not by many little batches: a large data set fills them.
    if count == 5000:
        assert slots / batches > 0.7 * batch_tokens


def test_rows_of_one_length_are_cut_into_the_fewest_batches():
    assert [len(batch) for batch in plan_batches([100] * 25, batch_tokens=1000)] == [10, 10, 5]
