"""Packs: every document once, whole, at its slot; and the same plan for the same seed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_fit.packing import ALIGNMENT, fill, fit_best, plan_epoch

few = settings(max_examples=60, deadline=None)


@st.composite
def epochs(draw):
    """Lengths, some of them chosen, and everything else that a plan depends on."""
    budget = draw(st.integers(8, 120))
    lengths = draw(st.lists(st.integers(1, budget), min_size=1, max_size=60))
    documents = draw(st.permutations(range(len(lengths))))
    chosen = documents[: draw(st.integers(1, len(lengths)))]
    plan = plan_epoch(
        chosen,
        lengths,
        token_budget=budget,
        seed=draw(st.integers(0, 9)),
        epoch=draw(st.integers(0, 9)),
        window=draw(st.integers(1, 70)),
    )
    return plan, chosen, lengths, budget


@few
@given(epochs())
def test_every_document_is_in_exactly_one_pack(case):
    plan, chosen, _, _ = case
    assert sorted(d for pack in plan for d in pack.documents) == sorted(chosen)


@few
@given(epochs())
def test_documents_of_a_pack_lie_in_the_budget_without_overlap(case):
    plan, _, lengths, budget = case
    for pack in plan:
        taken = np.zeros(budget, int)
        for document, start in zip(pack.documents, pack.starts, strict=True):
            assert start + lengths[document] <= budget
            taken[start : start + lengths[document]] += 1
        assert taken.max() == 1


@few
@given(epochs())
def test_documents_start_at_multiples_of_eight_slots(case):
    plan, *_ = case
    assert ALIGNMENT == 8
    assert all(start % 8 == 0 for pack in plan for start in pack.starts)


@few
@given(epochs())
def test_fill_is_the_share_of_slots_that_hold_a_token(case):
    plan, chosen, lengths, budget = case
    tokens = sum(lengths[document] for document in chosen)
    assert fill(plan, lengths, token_budget=budget) == pytest.approx(tokens / len(plan) / budget)


def plan(*, seed=3, epoch=2):
    lengths = np.random.default_rng(0).integers(1, 60, size=200).tolist()
    return plan_epoch(range(200), lengths, token_budget=128, seed=seed, epoch=epoch)


def test_the_same_seed_and_epoch_give_the_same_plan():
    assert plan() == plan()


@pytest.mark.parametrize("other", [{"epoch": 3}, {"seed": 4}])
def test_another_epoch_or_seed_gives_another_plan(other):
    assert {frozenset(p.documents) for p in plan(**other)} != {
        frozenset(p.documents) for p in plan()
    }


def test_documents_meet_others_in_another_epoch():
    first, second = [
        {(a, b) for p in plan(epoch=epoch) for a in p.documents for b in p.documents if a < b}
        for epoch in (1, 2)
    ]
    assert len(first & second) < 0.3 * len(first)


def test_packs_do_not_come_sorted_by_length():
    lengths = np.random.default_rng(1).integers(1, 60, size=400).tolist()
    packs = plan_epoch(range(400), lengths, token_budget=128, seed=0, epoch=0)
    longest = [max(lengths[d] for d in pack.documents) for pack in packs]
    assert abs(np.corrcoef(longest, range(len(packs)))[0, 1]) < 0.3


@pytest.mark.parametrize("seed", range(2))
def test_packs_of_realistic_documents_are_at_least_99_percent_full(seed):
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(7.1, 0.8, size=20_000), 200, 8000).astype(int).tolist()
    packs = plan_epoch(range(20_000), lengths, token_budget=49_152, seed=seed, epoch=0)
    assert fill(packs, lengths, token_budget=49_152) >= 0.99


@pytest.mark.parametrize("budget", [64, 61])
def test_documents_as_long_as_the_budget_are_alone(budget):
    assert fit_best([0, 1, 2], [budget, budget, 1], token_budget=budget) == [[0], [1], [2]]


def test_a_document_one_short_of_the_budget_is_alone_even_if_one_slot_is_left():
    # The slot that is left is no multiple of 8, so no document can start there.
    assert fit_best([0, 1], [63, 1], token_budget=64) == [[0], [1]]


def test_a_document_that_fits_only_without_its_gap_comes_last():
    # 16 + 4 slots are taken; with the gap behind the 4 they would be 24.
    (pack,) = plan_epoch([0, 1], [4, 16], token_budget=20, seed=0, epoch=0)
    assert (pack.documents, pack.starts) == ((1, 0), (0, 16))


def test_a_document_goes_into_the_fullest_pack_that_takes_it():
    # 56 leaves 8 and 40 leaves 24: the 8 belongs beside the 56.
    assert fit_best([0, 1, 2], [40, 56, 8], token_budget=64) == [[1, 2], [0]]


def test_a_document_longer_than_the_budget_is_not_planned():
    with pytest.raises(AssertionError):
        fit_best([0], [65], token_budget=64)
