"""The plan of units and batches: nobody lost, nobody twice, everybody where they fit."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dflash_cache.buckets import bucket_edges_of, cut, plan_batches, plan_units

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
