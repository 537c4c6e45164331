"""The block kernels in Triton's interpreter, against the dense way; run by `test_block_kernel`.

In a process of their own: the interpreter is chosen before Triton is imported, and for all of it.
Not named `test_`, so that nobody collects it without the interpreter.
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import library

from dflash_fit import block_attention
from dflash_fit.attention import Blocks, DenseSight, Visibility
from dflash_fit.block_attention import BlockSight, Tile, Tiles

FULL = Visibility(window=None, causal=False)
NAMES = ("out", "query", "context key", "context value", "own key", "own value")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Documents by length, each starting at a multiple of 8; anchors as (document, position)."""

    lengths: list[int]
    anchors: list[tuple[int, int]]
    look: Visibility = FULL
    invalid: int = 0
    gap: int = 0  # unused slots between documents, in eights
    padding: int = 0
    block_size: int = 2
    group: int = 1
    kv_heads: int = 1
    d: int = 16

    @property
    def blocks(self) -> Blocks:
        begins = [0]
        for length in self.lengths:
            begins.append((begins[-1] + length + 7) // 8 * 8 + 8 * self.gap)
        taken = sorted({(begins[i] + position, begins[i]) for i, position in self.anchors})
        taken += [(0, 0)] * self.invalid
        return Blocks(
            anchors=torch.tensor([anchor for anchor, _ in taken]),
            starts=torch.tensor([start for _, start in taken]),
            valid=torch.arange(len(taken)) < len(taken) - self.invalid,
            context=begins[-1] + self.padding,
            block_size=self.block_size,
        )


@st.composite
def cases(draw):
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    anchor = st.integers(0, len(lengths) - 1).flatmap(
        lambda i: st.tuples(st.just(i), st.integers(0, lengths[i] - 1))
    )
    return Case(
        lengths=lengths,
        anchors=draw(st.lists(anchor, min_size=0, max_size=9)),
        look=Visibility(window=draw(st.none() | st.integers(1, 70)), causal=draw(st.booleans())),
        invalid=draw(st.integers(1, 3)),
        gap=draw(st.integers(0, 2)),
        padding=draw(st.integers(0, 9)),
        block_size=draw(st.sampled_from([2, 5, 8, 16])),
        group=draw(st.integers(1, 4)),
        kv_heads=draw(st.integers(1, 2)),
        d=draw(st.sampled_from([16, 32, 64])),
    )


@st.composite
def tilings(draw):
    tiles = [
        Tile(
            rows=draw(st.sampled_from([16, 32, 64])),
            keys=draw(st.sampled_from([16, 32])),
            warps=4,
            stages=1,
        )
        for _ in range(3)
    ]
    forward, query, context = tiles
    return Tiles(forward=forward, query=query, context=context)


def tensors(case, *, seed=0):
    """Query, keys and values as a drafter has them, [heads, S, d] over memory of [S, heads, d]."""
    generator = torch.Generator().manual_seed(seed)
    blocks, heads = case.blocks, case.group * case.kv_heads
    shapes = [(blocks.slots, heads)]
    shapes += [(blocks.context, case.kv_heads)] * 2 + [(blocks.slots, case.kv_heads)] * 2
    return [
        torch.randn(*shape, case.d, generator=generator).transpose(0, 1).requires_grad_()
        for shape in shapes
    ]


def results(sights, case):
    """Out and the five gradients."""
    query, *keys_values = inputs = tensors(case)
    grad = torch.randn(query.shape, generator=torch.Generator().manual_seed(1))
    sight = sights.of(case.blocks, case.look)
    out = sight.attend(query, tuple(keys_values[:2]), tuple(keys_values[2:]))
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def check(case):
    """All is as the dense way says, and written: uninitialised memory is full of NaN here."""
    wanted = results(DenseSight, case)
    torch.use_deterministic_algorithms(True)
    try:
        found = results(BlockSight, case)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, ours, theirs in zip(NAMES, found, wanted, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@settings(max_examples=20)
@given(cases(), tilings())
def test_out_and_gradients_are_those_of_the_dense_way(case, tiles):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_attention, "EXACT_TILES", tiles)
        check(case)


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("causal", [False, True])
def test_long_intervals_have_a_middle_without_a_mask(window, causal, monkeypatch):
    tile = Tile(rows=32, keys=16, warps=4, stages=1)
    tiles = Tiles(forward=tile, query=tile, context=tile)
    monkeypatch.setattr(block_attention, "EXACT_TILES", tiles)
    anchors = [(0, p) for p in (0, 1, 2, 60, 100, 101, 102, 103)] + [(1, p) for p in range(40, 60)]
    check(
        Case(
            lengths=[110, 70],
            anchors=anchors,
            look=Visibility(window=window, causal=causal),
            invalid=1,
            block_size=4,
            group=2,
        )
    )


@pytest.mark.parametrize(("block_size", "group"), [(32, 8), (20, 5)])
def test_a_block_may_have_more_rows_than_a_tile_was_asked_for(block_size, group):
    anchors = [(0, 5), (0, 37), (1, 0), (1, 9)]
    look = Visibility(window=30, causal=True)
    check(
        Case(
            lengths=[40, 10],
            anchors=anchors,
            look=look,
            invalid=1,
            block_size=block_size,
            group=group,
            kv_heads=2,
        )
    )


def test_no_block_at_all_gives_zeros_and_sends_none_back():
    case = Case(lengths=[40], anchors=[], invalid=3, group=2)
    check(case)
    assert not any(tensor.any() for tensor in results(BlockSight, case))


def test_an_anchor_at_the_first_slot_sees_its_own_block_only():
    check(Case(lengths=[9, 9], anchors=[(0, 0), (1, 0)], block_size=5, group=3))


def test_values_that_are_not_seen_do_not_matter_however_large():
    case = Case(lengths=[20, 20], anchors=[(0, 9), (1, 3)], gap=1, invalid=1)
    query, key, value, own_key, own_value = (t.detach().clone() for t in tensors(case))
    sight = BlockSight.of(case.blocks, case.look)
    before = sight.attend(query, (key, value), (own_key, own_value))
    key[:, 20:32], value[:, 20:32] = 1e4, -1e30
    own_key[:, -2:], own_value[:, -2:] = 1e4, -1e30
    assert torch.equal(sight.attend(query, (key, value), (own_key, own_value)), before)


def test_memory_of_another_order_gives_the_same():
    case = Case(lengths=[30], anchors=[(0, 3), (0, 20)], group=2, kv_heads=2)
    query, *keys_values = tensors(case)
    sight = BlockSight.of(case.blocks, case.look)
    expected = sight.attend(query, tuple(keys_values[:2]), tuple(keys_values[2:]))
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, *keys_values)]
    found = sight.attend(turned[0], tuple(turned[1:3]), tuple(turned[3:]))
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()


def test_memory_that_begins_anywhere_gives_the_same():
    case = Case(lengths=[30], anchors=[(0, 3), (0, 20)], group=2, kv_heads=2)
    query, *keys_values = tensors(case)
    sight = BlockSight.of(case.blocks, case.look)
    expected = sight.attend(query, tuple(keys_values[:2]), tuple(keys_values[2:]))
    moved = []
    for tensor in (query, *keys_values):
        memory = torch.empty(tensor.numel() + 1)[1:]  # not at a multiple of 16 bytes
        rows = tensor.transpose(0, 1)
        moved.append(memory.view(rows.shape).copy_(rows.detach()).transpose(0, 1))
    found = sight.attend(moved[0], tuple(moved[1:3]), tuple(moved[3:]))
    torch.testing.assert_close(found, expected)


def arguments(case):
    sight = BlockSight.of(case.blocks, case.look)
    return (*tensors(case), sight.lower, sight.upper, sight.until, sight.window, sight.causal)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_operator_keeps_what_it_promises_to_torch():
    case = Case(lengths=[12], anchors=[(0, 3)], look=Visibility(window=5, causal=True), group=2)
    library.opcheck(torch.ops.dflash.block_attention, arguments(case))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Guards may run slower")  # Python 3.13.0
def test_a_layer_compiles_into_one_graph():
    case = Case(lengths=[30], anchors=[(0, 3), (0, 20)], group=2)
    sight = BlockSight.of(case.blocks, case.look)

    def layer(query, *keys_values):
        out = sight.attend(2 * query, keys_values[:2], keys_values[2:])
        return out.transpose(0, 1).reshape(query.shape[1], -1).square().sum()

    inputs = tensors(case)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found, expected = (torch.autograd.grad(f(*inputs), inputs) for f in (compiled, layer))
    torch.testing.assert_close(found, expected)
