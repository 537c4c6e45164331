"""Tile tables against the dense mask, pair by pair, and flex attention against the dense way.

Eager flex attention warns that it is slow and has no backward on the CPU: gradients are compared
on a GPU, where it is compiled.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dflash_fit.attention import Blocks, DenseSight, Visibility, dense_mask, visible
from dflash_fit.tiles import FlexSight, Tables, block_mask, tile_tables

LOOKS = {
    "full": Visibility(window=None, causal=False),
    "full causal": Visibility(window=None, causal=True),
    "sliding": Visibility(window=150, causal=False),
    "sliding causal": Visibility(window=150, causal=True),
}
looks = pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
# What eager flex attention and the compiler have to say of speed is no fault of ours.
slow_is_fine = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
compiler_may_warn = pytest.mark.filterwarnings("default")


def place(lengths, anchors, *, block_size, invalid=0, padding=0):
    """Blocks at anchors in documents that lie one behind the other, then the invalid ones."""
    ends = torch.tensor(lengths).cumsum(0)
    slots = torch.tensor([*sorted(anchors), *[0] * invalid])
    document = (slots[:, None] >= ends).sum(dim=1)
    return Blocks(
        anchors=slots,
        starts=(ends - torch.tensor(lengths))[document],
        valid=torch.arange(len(slots)) < len(anchors),
        context=sum(lengths) + padding,
        block_size=block_size,
    )


def scatter(*, context, anchors, documents, invalid=0, block_size=16, seed=0, padding=0):
    """Blocks at random anchors in documents of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    total = context - padding
    cuts = torch.randperm(total - 1, generator=generator)[: documents - 1].sort().values + 1
    edges = [0, *cuts.tolist(), total]
    return place(
        [end - start for start, end in pairwise(edges)],
        torch.randperm(total, generator=generator)[: anchors - invalid].tolist(),
        block_size=block_size,
        invalid=invalid,
        padding=padding,
    )


def to_device(blocks, device):
    moved = {name: getattr(blocks, name).to(device) for name in ("anchors", "starts", "valid")}
    return replace(blocks, **moved)


@dataclass(frozen=True, kw_only=True)
class Case:
    blocks: Blocks
    look: Visibility
    tile: int


@st.composite
def cases(draw):
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    everywhere = st.integers(0, sum(lengths) - 1)
    anchors = draw(st.lists(everywhere, max_size=8, unique=True))
    if anchors and draw(st.booleans()):
        anchors += {(anchors[0] + 1) % sum(lengths)} - set(anchors)  # nearer than a block
    tile = draw(st.sampled_from([4, 8, 16]))
    aligned = -sum(lengths) % tile
    return Case(
        blocks=place(
            lengths,
            anchors,
            block_size=draw(st.sampled_from([2, 3, 5, 8, 10, 16])),
            invalid=draw(st.integers(0 if anchors else 1, 3)),
            padding=draw(st.just(aligned) | st.integers(0, 9)),
        ),
        look=Visibility(window=draw(st.none() | st.integers(1, 30)), causal=draw(st.booleans())),
        tile=tile,
    )


def reduce(mask, tile):
    """Tables of a mask of all pairs; what a tile has over the edge is not visible."""
    queries, keys = mask.shape
    mask = F.pad(mask, (0, -keys % tile, 0, -queries % tile))
    cut = mask.view(mask.shape[0] // tile, tile, mask.shape[1] // tile, tile)
    return Tables(covered=cut.any(dim=3).any(dim=1), full=cut.all(dim=3).all(dim=1))


def row_of_tiles(row, blocks, look, tile):
    """The tables of one query tile, from the predicate of all its pairs."""
    query = torch.arange(row * tile, min((row + 1) * tile, blocks.slots), dtype=torch.int32)
    key = torch.arange(blocks.context + blocks.slots, dtype=torch.int32)
    return reduce(visible(query[:, None], key[None], blocks, look), tile)


def assert_same(found, wanted):
    assert torch.equal(found.covered, wanted.covered)
    assert torch.equal(found.full, wanted.full)


# --- the tables ---------------------------------------------------------------------------------


@settings(max_examples=2000)
@given(cases())
def test_tables_are_those_of_the_dense_mask(case):
    found = tile_tables(case.blocks, case.look, tile=case.tile)
    assert_same(found, reduce(dense_mask(case.blocks, case.look), case.tile))


def lists_of(table):
    return [row.nonzero().flatten().tolist() for row in table]


def listed(count, indices):
    """The lists that a block mask holds, with their types and shapes checked on the way."""
    assert count.dtype == indices.dtype == torch.int32
    assert indices.is_contiguous()
    assert indices.shape[:3] == count.shape == (1, 1, len(count[0, 0]))
    return [row[:n].tolist() for n, row in zip(count[0, 0].tolist(), indices[0, 0], strict=True)]


@settings(max_examples=300)
@given(cases())
def test_lists_hold_the_tiles_in_order_both_ways(case):
    mask = block_mask(case.blocks, case.look, tile=case.tile)
    wanted = reduce(dense_mask(case.blocks, case.look), case.tile)
    partial, full = wanted.covered & ~wanted.full, wanted.full
    assert listed(mask.kv_num_blocks, mask.kv_indices) == lists_of(partial)
    assert listed(mask.full_kv_num_blocks, mask.full_kv_indices) == lists_of(full)
    assert listed(mask.q_num_blocks, mask.q_indices) == lists_of(partial.T)
    assert listed(mask.full_q_num_blocks, mask.full_q_indices) == lists_of(full.T)
    assert mask.shape == (1, 1, case.blocks.slots, case.blocks.context + case.blocks.slots)


@settings(max_examples=300)
@given(cases())
def test_behind_the_last_slot_nothing_is_visible(case):
    mask_mod = block_mask(case.blocks, case.look, tile=case.tile).mask_mod
    wanted = dense_mask(case.blocks, case.look)
    queries, keys = wanted.shape
    rows, columns = torch.arange(queries + 20)[:, None], torch.arange(keys + 20)[None]
    zero = torch.zeros((), dtype=torch.long)
    found = mask_mod(zero, zero, rows, columns)
    assert torch.equal(found, F.pad(wanted, (0, 20, 0, 20)))


@pytest.mark.parametrize("look", [*LOOKS.values(), Visibility(window=700, causal=True)])
def test_all_tiles_of_a_batch_of_8192_tokens(look):
    blocks = scatter(context=8192, anchors=512, documents=9, invalid=13, padding=70)
    found = tile_tables(blocks, look)
    for row in range(len(found.covered)):
        wanted = row_of_tiles(row, blocks, look, 128)
        assert torch.equal(found.covered[row], wanted.covered[0]), row
        assert torch.equal(found.full[row], wanted.full[0]), row


@pytest.mark.parametrize("look", [LOOKS["full"], Visibility(window=2048, causal=True)])
def test_tiles_of_the_27b_shape(look):
    blocks = scatter(context=49_152, anchors=2048, documents=30, invalid=100, padding=100)
    found = tile_tables(blocks, look)
    assert found.covered.shape == (256, 640)
    for row in [*range(0, 240, 7), 242, 243, 244, 255]:  # the valid blocks end within tile 243
        wanted = row_of_tiles(row, blocks, look, 128)
        assert torch.equal(found.covered[row], wanted.covered[0]), row
        assert torch.equal(found.full[row], wanted.full[0]), row


def test_a_tile_can_hold_context_and_blocks():
    blocks = place([6], [5], block_size=2)
    found = tile_tables(blocks, LOOKS["full"], tile=4)  # keys 0 to 3, then 4 | own 6 and 7
    assert found.covered.tolist() == [[True, True]]
    assert found.full.tolist() == [[False, False]]


def test_a_tile_is_full_only_if_the_last_slot_still_sees_its_first_key():
    def full(window):
        look = Visibility(window=window, causal=False)
        return tile_tables(place([20], [12, 13], block_size=4), look, tile=8).full[0, 0]

    assert not full(16)  # slot 3 of the anchor at 13 sees 13 + 3 - 15 = 1 and on
    assert full(17)


class Largest(TorchDispatchMode):
    """The most elements that a tensor made meanwhile has."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            self.elements = max(self.elements, tensor.numel())
        return made


@looks
def test_tables_need_no_values_and_nothing_per_pair(look):
    nowhere = to_device(scatter(context=49_152, anchors=2048, documents=30), "meta")
    with Largest() as largest:  # values of a meta tensor cannot be asked for
        block_mask(nowhere, look)
    assert largest.elements == 2048 * 640


# --- the textbook way ---------------------------------------------------------------------------


def test_documents_by_length_and_by_start_agree():
    lengths = torch.tensor([3, 1, 7, 128, 2])
    starts = lengths.cumsum(0) - lengths
    by_length = torch.arange(len(lengths)).repeat_interleave(lengths)
    by_start = (torch.arange(int(lengths.sum()))[:, None] >= starts).sum(dim=1) - 1
    assert torch.equal(by_length, by_start)


@looks
def test_tables_are_those_of_create_block_mask(look):
    lengths = torch.tensor([200, 12, 180, 111])
    anchors = [3, 127, 128, 129, 190, 205, *range(230, 380, 11), 390, 400, 401, 499]
    blocks = place(lengths.tolist(), anchors, block_size=16, invalid=2, padding=9)
    size, context = blocks.block_size, blocks.context
    # Padding is a document of its own; block slots get one too, so that no index is beyond.
    tail = torch.tensor([9 + blocks.slots])
    document = torch.arange(5).repeat_interleave(torch.cat([lengths, tail]))

    def textbook(batch, head, query, key):
        anchor = blocks.anchors[query // size]
        same = (document[key] == document[anchor]) & (key < anchor)
        if look.window is not None:
            same = same & (anchor + query % size - key < look.window)
        own = (key >= context) & ((key - context) // size == query // size)
        if look.causal:
            own = own & (key - context <= query)
        return blocks.valid[query // size] & (same | own)

    wanted = create_block_mask(
        textbook, 1, 1, blocks.slots, context + blocks.slots, device="cpu", BLOCK_SIZE=128
    )
    found = block_mask(blocks, look)
    assert torch.equal(found.to_dense(), wanted.to_dense())
    for name in ("kv", "full_kv", "q", "full_q"):
        for part in (f"{name}_num_blocks", f"{name}_indices"):
            assert torch.equal(getattr(found, part), getattr(wanted, part)), part


# --- flex attention -----------------------------------------------------------------------------


def tensors(blocks, *, size, dtype=torch.float32, device="cpu", seed=0):
    """Query of 8 heads, keys and values of 2 for context and blocks."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(8, blocks.slots), *[(2, blocks.context)] * 2, *[(2, blocks.slots)] * 2]
    return [
        torch.randn(*shape, size, generator=generator).to(device, dtype, copy=True)
        for shape in shapes
    ]


def attend(sight, query, key, value, own_key, own_value):
    return sight.attend(query, (key, value), (own_key, own_value))


@slow_is_fine
@looks
def test_flex_attention_equals_the_dense_way(look):
    blocks = scatter(context=210, anchors=17, documents=3, invalid=9, padding=5)
    inputs = tensors(blocks, size=16)
    found = attend(FlexSight.of(blocks, look), *inputs)
    torch.testing.assert_close(found, attend(DenseSight.of(blocks, look), *inputs))
    assert found[:, : 8 * 16].all()
    assert not found[:, 8 * 16 :].any()


@looks
def test_new_anchors_compile_nothing_anew(look):
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    for seed in range(3):
        blocks = scatter(context=100, anchors=6, documents=2, invalid=seed, seed=seed)
        inputs = tensors(blocks, size=16)
        found = compiled(FlexSight.of(blocks, look), *inputs)
        torch.testing.assert_close(found, attend(DenseSight.of(blocks, look), *inputs))
    assert counter.frame_count == 1


def distance(found, wanted):
    """Relative, of the whole tensor."""
    return float((found - wanted).norm() / wanted.norm())


# A product of bf16 rounds its inputs, weights and outputs to 8 bits; fp32 is IEEE by default.
@pytest.mark.gpu
@compiler_may_warn
@looks
@pytest.mark.parametrize(
    ("dtype", "limit", "padding"),  # 5 * 128 queries, 1,640 or 13 * 128 keys
    [(torch.float32, 1e-5, 0), (torch.bfloat16, 1e-2, 0), (torch.bfloat16, 1e-2, 24)],
)
def test_compiled_flex_attention_equals_the_dense_way_both_ways(look, dtype, limit, padding):
    torch.compiler.reset()
    blocks = to_device(
        scatter(context=1000 + padding, anchors=40, documents=4, invalid=10, padding=padding),
        "cuda",
    )
    inputs = [x.requires_grad_() for x in tensors(blocks, size=64, dtype=dtype, device="cuda")]
    out = torch.compile(attend, fullgraph=True)(FlexSight.of(blocks, look), *inputs)
    back = torch.randn(out.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    grads = torch.autograd.grad(out, inputs, back.to(dtype))

    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted = attend(DenseSight.of(blocks, look), *exact)
    wanted_grads = torch.autograd.grad(wanted, exact, back.to(dtype).double())

    assert not out[:, 30 * 16 :].any()
    assert not grads[0][:, 30 * 16 :].any()
    assert distance(out, wanted) < limit
    assert [distance(*pair) < limit for pair in zip(grads, wanted_grads, strict=True)] == [True] * 5


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@looks
def test_a_replay_makes_the_tables_of_the_new_anchors(look):
    draws = [
        scatter(context=2100, anchors=90, documents=5 + seed, invalid=3 * seed, seed=seed)
        for seed in range(4)
    ]
    blocks = to_device(draws[0], "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        block_mask(blocks, look)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask, tables = block_mask(blocks, look), tile_tables(blocks, look)
    for draw in draws[::-1]:
        for name in ("anchors", "starts", "valid"):
            getattr(blocks, name).copy_(getattr(draw, name))
        graph.replay()
        wanted, wanted_tables = block_mask(draw, look), tile_tables(draw, look)
        assert torch.equal(tables.covered.cpu(), wanted_tables.covered)
        assert torch.equal(tables.full.cpu(), wanted_tables.full)
        for name in ("kv", "full_kv", "q", "full_q"):
            for part in (f"{name}_num_blocks", f"{name}_indices"):
                assert torch.equal(getattr(mask, part).cpu(), getattr(wanted, part)), part
