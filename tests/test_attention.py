"""Who sees whom, against a slow loop in document coordinates; attention against a naive softmax."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import sees

from dflash_fit.attention import Blocks, DenseSight, Visibility, dense_mask

few = settings(max_examples=80, deadline=None)
FULL = Visibility(window=None, causal=False)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Documents by length, one behind the other; anchors as (document, position, valid)."""

    lengths: list[int]
    anchors: list[tuple[int, int, bool]]
    block_size: int
    look: Visibility
    padding: int = 0

    @property
    def starts(self) -> list[int]:
        return [sum(self.lengths[:d]) for d in range(len(self.lengths))]

    @property
    def context(self) -> int:
        return sum(self.lengths) + self.padding

    def mask(self) -> torch.Tensor:
        starts = [self.starts[d] for d, _, _ in self.anchors]
        slots = [start + p for start, (_, p, _) in zip(starts, self.anchors, strict=True)]
        blocks = Blocks(
            anchors=torch.tensor(slots),
            starts=torch.tensor(starts),
            valid=torch.tensor([valid for *_, valid in self.anchors]),
            context=self.context,
            block_size=self.block_size,
        )
        return dense_mask(blocks, self.look)

    def slow_mask(self) -> torch.Tensor:
        size = self.block_size
        queries = len(self.anchors) * size
        mask = torch.zeros(queries, self.context + queries, dtype=torch.bool)
        for block, (document, anchor, valid) in enumerate(self.anchors):
            for slot in range(size if valid else 0):
                positions, own = sees(
                    anchor=anchor,
                    slot=slot,
                    block_size=size,
                    window=self.look.window,
                    causal=self.look.causal,
                )
                for p in positions:
                    mask[block * size + slot, self.starts[document] + p] = True
                for m in own:
                    mask[block * size + slot, self.context + block * size + m] = True
        return mask

    def context_of(self, block: int, slot: int) -> list[int]:
        """Context slots that a query slot sees."""
        row = self.mask()[block * self.block_size + slot, : self.context]
        return row.nonzero().flatten().tolist()

    def blocks_of(self, block: int, slot: int) -> list[int]:
        """Block slots, over all blocks, that a query slot sees."""
        row = self.mask()[block * self.block_size + slot, self.context :]
        return row.nonzero().flatten().tolist()


@st.composite
def cases(draw):
    lengths = draw(st.lists(st.integers(2, 20), min_size=1, max_size=4))
    anchor = st.integers(0, len(lengths) - 1).flatmap(
        lambda d: st.tuples(st.just(d), st.integers(0, lengths[d] - 1), st.booleans())
    )
    return Case(
        lengths=lengths,
        anchors=draw(st.lists(anchor, min_size=1, max_size=6)),
        block_size=draw(st.integers(2, 7)),
        look=Visibility(
            window=draw(st.none() | st.integers(1, 12)),
            causal=draw(st.booleans()),
        ),
        padding=draw(st.integers(0, 9)),
    )


@few
@given(cases())
def test_the_mask_equals_a_slow_loop(case):
    assert torch.equal(case.mask(), case.slow_mask())


@pytest.mark.parametrize(
    "look", [FULL, Visibility(window=50, causal=True), Visibility(window=3, causal=False)]
)
def test_sizes_need_not_be_multiples_of_128(look):
    anchors = [(d, p, p != 60) for d in range(2) for p in (1, 17, 60, 99)]
    case = Case(lengths=[100, 101], anchors=anchors, block_size=7, look=look)
    assert torch.equal(case.mask(), case.slow_mask())


def test_the_context_ends_strictly_before_the_anchor():
    case = Case(lengths=[9], anchors=[(0, 5, True)], block_size=4, look=FULL)
    assert [case.context_of(0, slot) for slot in range(4)] == [[0, 1, 2, 3, 4]] * 4


def test_anchors_nearer_than_a_block_see_nothing_of_each_other():
    case = Case(lengths=[9], anchors=[(0, 4, True), (0, 5, True)], block_size=4, look=FULL)
    assert case.context_of(0, 3) == [0, 1, 2, 3]
    assert case.context_of(1, 0) == [0, 1, 2, 3, 4]
    assert case.blocks_of(0, 3) == [0, 1, 2, 3]
    assert case.blocks_of(1, 0) == [4, 5, 6, 7]


def test_an_invalid_block_sees_nothing_and_is_not_seen():
    anchors = [(0, 4, True), (0, 4, False)]
    mask = Case(lengths=[9], anchors=anchors, block_size=3, look=FULL).mask()
    assert not mask[3:].any()
    assert not mask[:, 9 + 3 :].any()


def test_a_window_moves_with_the_slot():
    look = Visibility(window=4, causal=True)
    case = Case(lengths=[20], anchors=[(0, 10, True)], block_size=5, look=look)
    seen = [case.context_of(0, slot) for slot in range(5)]
    assert seen == [[7, 8, 9], [8, 9], [9], [], []]


def test_a_window_has_no_lower_bound_in_the_block():
    look = Visibility(window=1, causal=True)
    case = Case(lengths=[20], anchors=[(0, 10, True)], block_size=4, look=look)
    assert case.blocks_of(0, 3) == [0, 1, 2, 3]


def test_a_causal_block_sees_itself_up_to_its_slot():
    look = Visibility(window=None, causal=True)
    case = Case(lengths=[9], anchors=[(0, 5, True)], block_size=3, look=look)
    assert [case.blocks_of(0, slot) for slot in range(3)] == [[0], [0, 1], [0, 1, 2]]


@pytest.mark.parametrize("look", [FULL, Visibility(window=30, causal=True)])
def test_a_document_sees_nothing_of_its_neighbours(look):
    case = Case(lengths=[6, 8, 7], anchors=[(1, 3, True)], block_size=2, look=look)
    assert case.context_of(0, 0) == [6, 7, 8]


# --- attention ----------------------------------------------------------------------------------


def tensors(*, heads=4, kv_heads=2, queries=6, keys=11, size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (heads, queries, size), (kv_heads, keys, size), (kv_heads, keys, size)
    query, key, value = (
        torch.randn(shape, generator=generator).requires_grad_() for shape in shapes
    )
    mask = torch.rand(queries, keys, generator=generator) < 0.5
    mask[:, 0] = True
    return query, key, value, mask


def attend(query, key, value, mask):
    """The keys and values that a query sees may lie in the context or beside it."""
    context, own = (
        tuple(t[:, part] for t in (key, value)) for part in (slice(0, 7), slice(7, None))
    )
    return DenseSight(mask=mask).attend(query, context, own)


def naive(query, key, value, mask):
    """Head by head and row by row; a row that sees nothing is zero."""
    shared = len(query) // len(key)
    out = torch.zeros_like(query)
    for head, row in [(h, r) for h in range(len(query)) for r in range(len(mask))]:
        seen = mask[row].nonzero().flatten()
        if len(seen):
            scores = key[head // shared, seen] @ query[head, row] / math.sqrt(query.shape[-1])
            out[head, row] = torch.softmax(scores, dim=0) @ value[head // shared, seen]
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_equals_a_naive_softmax(kv_heads):
    query, key, value, mask = tensors(kv_heads=kv_heads)
    torch.testing.assert_close(attend(query, key, value, mask), naive(query, key, value, mask))


def test_gradients_of_attention_equal_those_of_a_naive_softmax():
    query, key, value, mask = tensors()
    mask[2] = False
    ours, theirs = [
        torch.autograd.grad(f(query, key, value, mask).square().sum(), (query, key, value))
        for f in (attend, naive)
    ]
    torch.testing.assert_close(ours, theirs)


def test_a_row_that_sees_nothing_gives_zeros():
    query, key, value, mask = tensors()
    mask[2] = False
    out = attend(query, key, value, mask)
    assert not out[:, 2].any()
    assert out[:, 1].any()


def test_rows_that_see_nothing_send_nothing_back():
    query, key, value, mask = tensors()
    mask[:] = False
    grads = torch.autograd.grad(attend(query, key, value, mask).sum(), (query, key, value))
    assert [bool(grad.any()) for grad in grads] == [False] * 3  # NaN would count as any


def test_values_that_are_not_seen_do_not_matter_however_large():
    query, key, value, mask = (t.detach() for t in tensors())
    mask[:, 5] = False
    before = attend(query, key, value, mask)
    key[:, 5], value[:, 5] = 1e4, -1e30
    assert torch.equal(attend(query, key, value, mask), before)
