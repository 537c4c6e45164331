"""Anchors: which positions may start a block, and that the draw among them is fair."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_cache.reader import CacheReader
from dflash_fit.anchors import candidates, draw, fixed
from dflash_fit.batch import Batch, BatchShape
from dflash_fit.course import Position
from dflash_fit.loader import PackSource

few = settings(max_examples=80, deadline=None)


@few
@given(st.lists(st.tuples(st.booleans(), st.integers(-1, 2)), min_size=1, max_size=40))
def test_candidates_are_supervised_with_their_successor_in_one_document(slots):
    mask, documents = np.array([m for m, _ in slots]), np.array([d for _, d in slots])
    slow = [
        i
        for i in range(len(slots) - 1)
        if mask[i] and mask[i + 1] and documents[i] == documents[i + 1] != -1
    ]
    assert candidates(mask, documents).tolist() == slow


def test_a_prompt_has_no_candidates_and_an_answer_has_all_but_its_last_token():
    mask = np.array([0, 0, 0, 1, 1, 1, 0, 0, 1, 1], bool)
    assert candidates(mask, np.zeros(10, np.int32)).tolist() == [3, 4, 8]


def test_neighbours_that_are_both_supervised_share_no_candidate():
    assert candidates(np.ones(4, bool), np.array([0, 0, 1, 1])).tolist() == [0, 2]


@few
@given(
    st.sets(st.integers(0, 200), max_size=40),
    st.integers(1, 30),
    st.integers(0, 2**32),
)
def test_anchors_are_distinct_candidates_in_order_and_the_rest_is_invalid(chosen, count, seed):
    positions = np.array(sorted(chosen), dtype=np.int64)
    anchors, valid = draw(positions, count=count, rng=np.random.default_rng(seed))
    taken = min(count, len(positions))
    assert anchors.shape == valid.shape == (count,)
    assert valid.tolist() == [True] * taken + [False] * (count - taken)
    assert anchors[:taken].tolist() == sorted(set(anchors[:taken].tolist()) & chosen)
    assert not anchors[taken:].any()


def test_fewer_candidates_than_slots_are_all_taken():
    anchors, valid = draw(np.array([4, 7]), count=4, rng=np.random.default_rng(0))
    assert anchors[valid].tolist() == [4, 7]


def test_no_candidate_at_all_gives_only_invalid_slots():
    anchors, valid = draw(np.array([], np.int64), count=3, rng=np.random.default_rng(0))
    assert not valid.any()
    assert anchors.tolist() == [0, 0, 0]


def test_every_set_of_candidates_is_equally_likely():
    rng, draws = np.random.default_rng(0), 6000
    positions = np.array([3, 4, 9, 20, 21, 50])
    seen = Counter(tuple(draw(positions, count=3, rng=rng)[0].tolist()) for _ in range(draws))
    expected = draws / 20  # 6 choose 3
    chi_square = sum((n - expected) ** 2 for n in seen.values()) / expected
    assert len(seen) == 20
    assert chi_square < 50.8  # 19 degrees of freedom: exceeded once in ten thousand


def test_given_positions_that_do_not_fit_are_refused():
    with pytest.raises(AssertionError):
        fixed(np.arange(4), count=3)


@pytest.fixture(scope="module")
def drawn(tiny_cache):
    """Positions and validity of the anchors of a pack of the tiny cache."""
    reader = CacheReader(tiny_cache)
    shape = BatchShape(
        target_layers=1,
        token_budget=512,
        hidden_size=reader.identity.hidden_size,
        anchors=24,
        block_size=4,
    )
    layer_ids = reader.identity.target_layer_ids[:1]

    def fill(*, seed=5, epoch=1, index=2):
        source = PackSource(reader, range(40), layer_ids=layer_ids, shape=shape, seed=seed)
        batch = Batch.empty(shape, device=torch.device("cpu"))
        return source.fill(batch, Position(epoch=epoch, index=index))

    return fill


def test_the_same_seed_epoch_and_pack_repeat_their_batch(drawn):
    first, again = drawn(), drawn()
    assert all(torch.equal(a, b) for a, b in zip(first.tensors(), again.tensors(), strict=True))


@pytest.mark.parametrize("other", [{"seed": 6}, {"epoch": 2}, {"index": 3}])
def test_another_seed_epoch_or_pack_has_other_anchors(drawn, other):
    assert not torch.equal(drawn().anchor_positions, drawn(**other).anchor_positions)


def test_the_draw_depends_on_seed_epoch_and_pack_and_nothing_else(drawn):
    batch = drawn(seed=5, epoch=1, index=2)
    positions = candidates(batch.loss_mask.numpy(), batch.document_ids.numpy())
    anchors, _ = draw(positions, count=24, rng=np.random.default_rng([5, 1, 2]))
    assert batch.anchor_positions.tolist() == anchors.tolist()


def test_anchors_of_a_pack_and_their_successors_are_supervised(drawn):
    batch = drawn()
    anchors = batch.anchor_positions[batch.anchor_valid]
    assert len(anchors) == 24
    assert batch.loss_mask[anchors].all()
    assert batch.loss_mask[anchors + 1].all()
    assert torch.equal(batch.document_ids[anchors], batch.document_ids[anchors + 1])
