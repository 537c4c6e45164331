"""The block kernels: exact in Triton's interpreter, and in bfloat16 on a GPU.

The interpreter's cases are in `interpreted_kernels`, and run in a process of their own.
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_fit.attention import Blocks, DenseSight, Visibility
from dflash_fit.errors import FitError

LOOKS = [
    Visibility(window=None, causal=False),
    Visibility(window=None, causal=True),
    Visibility(window=500, causal=False),
]


def interpreter_works(triton):
    """Triton before 3.7 takes int() of arrays of one element, which NumPy 2.4 refuses."""
    old = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    return not (old and tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4))


def test_the_kernels_are_exact_in_the_interpreter():
    triton = pytest.importorskip("triton", reason="the block kernels need Triton")
    if not interpreter_works(triton):
        pytest.skip(f"Triton {triton.__version__} does not interpret with NumPy {np.__version__}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "interpreted_kernels.py"],
        cwd=Path(__file__).parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]


def test_without_triton_an_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("block_kernel", "block_attention"):
        monkeypatch.delitem(sys.modules, f"dflash_fit.{name}", raising=False)
    with pytest.raises(FitError, match="need Triton"):
        importlib.import_module("dflash_fit.block_attention")


def test_tensors_on_a_cpu_are_refused():
    pytest.importorskip("triton", reason="the block kernels need Triton")
    from dflash_fit.block_attention import BlockSight

    blocks = small_blocks(device="cpu", context=16, count=1, documents=1)
    query, keys = torch.zeros(2, 16, 16), torch.zeros(2, 16, 16)
    with pytest.raises(FitError, match="run on a GPU"):
        BlockSight.of(blocks, LOOKS[0]).attend(query, (keys, keys), (keys, keys))


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"head_size": 8}, "has 8; choose --attention dense"),
        ({"head_size": 96}, "has 96; choose --attention flex"),
        ({"head_size": 512}, "has 512; choose --attention flex"),
        ({"group": 32}, "16 slots x 32 heads of 128 channels .* choose --attention flex"),
        ({"block_size": 100}, "up to 32 slots, .* of 100; choose --attention flex"),
        ({"itemsize": 4, "group": 16}, "take 128 KiB, and 32 fit"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_what_to_do(sizes, told):
    pytest.importorskip("triton", reason="the block kernels need Triton")
    from dflash_fit.block_attention import refuse_sizes

    good = {"head_size": 128, "group": 4, "block_size": 16, "itemsize": 2}
    refuse_sizes(**good)
    with pytest.raises(FitError, match=told):
        refuse_sizes(**good | sizes)


@pytest.mark.parametrize("tile", [(64, 64, 3), (32, 32, 1), (64, 16, 2)])
@pytest.mark.parametrize("group", [1, 4, 5, 16])
def test_a_tile_of_more_rows_than_it_has_takes_nothing_else_in_excess(tile, group):
    pytest.importorskip("triton", reason="the block kernels need Triton")
    from dflash_fit.block_attention import Plan, Tile

    rows, keys, stages = tile
    sizes = {"A": 4, "B": 16, "D": 64, "T": 100, "kv_heads": 1, "window": 0}
    plan = Plan(**sizes, G=group, causal=False, exact=False)
    asked = Tile(rows=rows, keys=keys, warps=4, stages=stages)
    found = plan.fitted(asked)
    assert (found.rows, found.warps) == (asked.rows, asked.warps)
    assert found.keys <= keys
    assert found.stages <= stages


class NoGpu:
    """Stands for the driver of a Hopper GPU as long as nothing is launched."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return "compile only"

    def get_current_stream(self, device):
        return 0


class Compiled:
    """A kernel that is compiled where it would be launched; says what it needs."""

    def __init__(self, kernel, shared):
        self.kernel, self.shared = kernel, shared

    def __getitem__(self, grid):
        def compile_(*arguments, **options):
            found = self.kernel.warmup(*arguments, grid=grid, **options)
            self.shared.append(found.metadata.shared)

        return compile_


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Triton's syntax trees, in Python 3.13
@pytest.mark.parametrize(
    ("heads", "size", "d", "count", "context"),
    [
        (8, 16, 128, 40, 512),  # what most drafters have
        (16, 16, 128, 40, 512),  # the largest that are not refused, each in its way
        (8, 32, 128, 40, 512),
        (8, 16, 256, 40, 512),
        (6, 7, 16, 1, 1),  # the least
    ],
)
def test_what_is_not_refused_fits_a_hopper_gpu(heads, size, d, count, context, monkeypatch):
    triton = pytest.importorskip("triton", reason="the block kernels need Triton")
    from dflash_fit import block_attention, block_kernel

    shared = []
    for name in ("forward", "query_gradient", "context_gradient"):
        kernel = getattr(block_kernel, name)
        monkeypatch.setattr(block_kernel, name, Compiled(kernel, shared))
    monkeypatch.setattr(block_attention, "refuse_device", lambda device: None)
    monkeypatch.setattr(triton.runtime.driver, "_active", NoGpu())

    def rows(slots, heads):
        return torch.zeros(slots, heads, d, dtype=torch.bfloat16).transpose(0, 1)

    blocks = small_blocks(device="cpu", context=context + 8, count=count, documents=1, size=size)
    sight = block_attention.BlockSight.of(blocks, Visibility(window=100, causal=True))
    sides = [(rows(slots, 2), rows(slots, 2)) for slots in (blocks.context, blocks.slots)]
    query = rows(blocks.slots, heads).requires_grad_()
    sight.attend(query, *sides).backward(torch.ones_like(query))
    assert len(shared) == 3
    assert max(shared) <= 227 * 1024


def small_blocks(*, device, context, count, documents, size=16, invalid=0):
    """Blocks at random anchors of equal documents; the last eight slots of each are unused."""
    generator = torch.Generator().manual_seed(0)
    length = context // documents
    slots = torch.arange(context)[torch.arange(context) % length < length - 8]
    anchors = slots[torch.randperm(len(slots), generator=generator)[:count]].sort().values
    anchors[count - invalid :] = 0
    return Blocks(
        anchors=anchors.to(device),
        starts=(anchors // length * length).to(device),
        valid=(torch.arange(count) < count - invalid).to(device),
        context=context,
        block_size=size,
    )


# --- on a GPU -----------------------------------------------------------------------------------


def gpu_tensors(blocks, *, heads=32, kv_heads=8, d=128):
    torch.manual_seed(0)
    sizes = [(blocks.slots, heads)]
    sizes += [(blocks.context, kv_heads)] * 2 + [(blocks.slots, kv_heads)] * 2
    inputs = [
        torch.randn(*size, d, device="cuda", dtype=torch.bfloat16).transpose(0, 1) for size in sizes
    ]
    return [t.requires_grad_() for t in inputs], torch.randn_like(inputs[0])


def results(sight, inputs, grad):
    query, *keys_values = inputs
    out = sight.attend(query, tuple(keys_values[:2]), tuple(keys_values[2:]))
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def check(found, expected):
    """Relative to the size of the tensor: bfloat16 has 8 bits, and rounds p, ds and the result."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.isfinite().all()
        error = (ours.float() - theirs).norm() / theirs.norm()
        assert error < 1e-2, float(error)


@pytest.fixture
def poison():
    """Uninitialised memory is full of NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize(
    ("size", "d", "heads"),
    [(16, 128, 32), (16, 64, 32), (10, 128, 24), (32, 128, 32), (16, 256, 32), (8, 16, 8)],
)
def test_bfloat16_follows_the_dense_way_in_float32(look, size, d, heads):
    from dflash_fit.block_attention import BlockSight

    blocks = small_blocks(device="cuda", context=4096, count=128, documents=3, size=size, invalid=5)
    inputs, grad = gpu_tensors(blocks, heads=heads, d=d)
    found = results(BlockSight.of(blocks, look), inputs, grad)
    exact = [t.detach().float().requires_grad_() for t in inputs]
    check(found, results(DenseSight.of(blocks, look), exact, grad.float()))


@pytest.mark.gpu
def test_a_captured_graph_replays_with_other_blocks():
    from dflash_fit.block_attention import BlockSight

    first = small_blocks(device="cuda", context=4096, count=128, documents=1, invalid=7)
    other = small_blocks(device="cuda", context=4096, count=128, documents=4)
    inputs, grad = gpu_tensors(first)

    def step():
        return results(BlockSight.of(first, LOOKS[0]), inputs, grad)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for name in ("anchors", "starts", "valid"):
        getattr(first, name).copy_(getattr(other, name))
    graph.replay()
    expected = step()  # the same kernels, launched one by one
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
