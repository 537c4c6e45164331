"""The kernels of the loss: as plain PyTorch in Triton's interpreter, and in bfloat16 on a GPU.

Functions named `interpreted_` run in a process of their own: the interpreter is chosen before
Triton is imported, and for all of it.
"""

import importlib
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from test_loss import KL_DPACE, OBJECTIVES, make_slots, plain, run

from dflash_fit.errors import FitError
from dflash_fit.loss import head_loss_by, logits_buffer, through_kernels, through_torch


def test_the_kernels_are_as_plain_pytorch_in_the_interpreter():
    pytest.importorskip("triton", reason="the kernels of the loss need Triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", Path(__file__).name]
    done = subprocess.run(
        [*command, "-o", "python_functions=interpreted_*"],
        cwd=Path(__file__).parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]


def test_without_triton_an_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "dflash_fit.head_kernel", raising=False)
    with pytest.raises(FitError, match="needs Triton"):
        importlib.import_module("dflash_fit.head_kernel")


def through(way):
    """`head_loss` by that way, with the signature of `head_loss`."""
    return lambda *arguments, **more: head_loss_by(way, *arguments, **more)


# --- in the interpreter -------------------------------------------------------------------------

VOCABULARIES = [1003, 1024, 3]  # whole tiles and a rest, whole ones, less than one


@pytest.fixture
def kernel(monkeypatch):
    """The module, with tiles of 512 logits; uninitialised memory is full of NaN."""
    from dflash_fit import head_kernel

    monkeypatch.setattr(head_kernel, "MEASURE", head_kernel.Tile(steps=2, warps=1))
    monkeypatch.setattr(head_kernel, "SLOPE", head_kernel.Tile(steps=2, warps=1))
    torch.use_deterministic_algorithms(True)
    yield head_kernel
    torch.use_deterministic_algorithms(False)


def filled(logits):
    """The same logits in a buffer, as the kernels want them."""
    return logits_buffer(len(logits), logits.T).copy_(logits)


def compare(logits, teacher, labels, weights):
    """Both ways on logits made by hand."""
    found, wanted = (
        way(
            filled(logits),
            None if teacher is None else filled(teacher),
            labels,
            lambda _: weights,
        )
        for way in (through_kernels, through_torch)
    )
    torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.slope, wanted.slope, rtol=2e-3, atol=1e-6)
    assert torch.equal(found.correct, wanted.correct)
    return found


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def interpreted_float32_is_exact(objective, vocab):
    given = make_slots(vocab=vocab, blocks=5)
    found = run(given, objective, chunk=2, loss=through(through_kernels))
    losses, total, gradient = plain(given, objective)
    torch.testing.assert_close(found.losses, losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.total, total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.gradient, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("vocab", [1003, 3])
def interpreted_bfloat16_is_rounded_as_plain_pytorch_is(objective, vocab):
    given = make_slots(vocab=vocab, blocks=5, dtype=torch.bfloat16)
    found, wanted = (
        run(given, objective, chunk=5, loss=through(way))
        for way in (through_kernels, through_torch)
    )
    torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.total, wanted.total, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.correct, wanted.correct)
    # Slopes on the edge between two values of bfloat16 may fall to either side.
    torch.testing.assert_close(found.gradient, wanted.gradient, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("tile", [(1, 1), (2, 1), (4, 2), (8, 4)])
def interpreted_tiles_do_not_matter(kernel, monkeypatch, tile):
    monkeypatch.setattr(kernel, "MEASURE", kernel.Tile(*tile))
    monkeypatch.setattr(kernel, "SLOPE", kernel.Tile(*tile))
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (4 * torch.randn(3, 2051, generator=generator) for _ in range(2))
    compare(logits, teacher, torch.tensor([0, 1024, 2050]), torch.tensor([0.5, 1.0, 2.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def interpreted_the_argmax_is_the_lowest_of_equals(kernel, dtype):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(3, (24, 1003), generator=generator).to(dtype)
    logits[:8, :600] = -1
    logits[8, 1:] = logits[8, 0] = -7
    labels = torch.stack([(row == row.max()).nonzero()[0, 0] for row in logits])
    labels[1::3] += torch.randint(1, 100, labels[1::3].shape, generator=generator)
    labels[2::3] -= (labels[2::3] > 0).long()
    wanted = torch.stack([(row == row.max()).nonzero()[0, 0] for row in logits]) == labels
    assert 8 <= wanted.sum() < 24
    assert torch.equal(kernel.measure(filled(logits), None, labels).correct, wanted)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("with_teacher", [False, True])
@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def interpreted_large_logits_do_not_overflow(shift, with_teacher):
    generator = torch.Generator().manual_seed(0)
    # Multiples of 2 ** -4, so that logits near 1e4 are what they are near 0.
    logits, teacher = (torch.randint(-80, 80, (4, 1003), generator=generator) / 16 for _ in "ab")
    labels, weights = torch.tensor([0, 5, 600, 1002]), torch.ones(4)
    found = compare(logits + shift, teacher + shift if with_teacher else None, labels, weights)
    near_0 = through_torch(logits, teacher if with_teacher else None, labels, lambda _: weights)
    torch.testing.assert_close(found.losses, near_0.losses)
    torch.testing.assert_close(found.slope, near_0.slope)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("with_teacher", [False, True])
def interpreted_one_logit_may_tower_over_all(with_teacher):
    logits, teacher = torch.zeros(3, 1003), torch.zeros(3, 1003)
    logits[0, 0] = logits[1, 1002] = teacher[2, 700] = 1e4
    logits[2] = -1e4
    labels = torch.tensor([0, 5, 700])
    compare(logits, teacher if with_teacher else None, labels, torch.ones(3))


@pytest.mark.filterwarnings("ignore:All-NaN", "ignore:invalid value")
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("with_teacher", [False, True])
def interpreted_rows_of_weight_zero_have_no_slope(with_teacher):
    logits, teacher = torch.zeros(4, 1003), torch.zeros(4, 1003)
    logits[0], logits[1, 7], teacher[2] = float("nan"), float("inf"), float("nan")
    weights = torch.tensor([0.0, 0.0, 0.0, 1.0])
    found = through_kernels(
        filled(logits),
        filled(teacher) if with_teacher else None,
        torch.tensor([0, 7, 3, 4]),
        lambda _: weights,
    )
    assert not found.slope[:3].any()
    assert found.slope.isfinite().all()


@pytest.mark.filterwarnings("ignore:All-NaN", "ignore:invalid value")
@pytest.mark.usefixtures("kernel")
def interpreted_a_row_with_nan_has_no_loss():
    logits = torch.zeros(2, 1003)
    logits[0, 700] = float("nan")
    found = through_kernels(filled(logits), None, torch.tensor([0, 0]), lambda _: torch.ones(2))
    assert found.losses.isnan().tolist() == [True, False]
    assert found.slope[0].isnan().any()


# --- on a GPU -----------------------------------------------------------------------------------


@contextmanager
def no_questions():
    """Whatever makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def gpu_slots(vocab, dtype=torch.bfloat16):
    """Four blocks of 15 slots; logits stay below 16."""
    given = make_slots(blocks=4, slots=15, hidden=256, vocab=vocab, dtype=dtype, device="cuda")
    given.head.mul_(1.5 / 16)
    return given


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.gpu
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("vocab", [50_257, 248_320])
def test_in_bfloat16_the_loss_follows_float32(vocab, objective):
    given = gpu_slots(vocab)
    run(given, objective)  # compiles
    with no_questions():
        found = run(given, objective)
    losses, total, gradient = plain(given, objective)
    # Logits of up to 16 are rounded to 8 bits: 2 ** -5 each, of which a loss has two or four.
    atol = 2**-4 if objective.divergence == "ce" else 2**-3
    torch.testing.assert_close(found.losses, losses, atol=atol, rtol=0)
    torch.testing.assert_close(found.total, total, rtol=0.01, atol=0)
    error = (found.gradient.float() - gradient).norm() / gradient.norm()
    assert error < 0.02, float(error)


@pytest.mark.gpu
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("vocab", [50_257, 248_320])
def test_of_the_same_logits_the_kernels_make_what_plain_pytorch_makes(vocab, objective):
    given = gpu_slots(vocab)
    found, wanted = (
        run(given, objective, loss=through(w)) for w in (through_kernels, through_torch)
    )
    torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found.total, wanted.total, rtol=1e-5, atol=1e-4)
    assert torch.equal(found.correct, wanted.correct)
    error = (found.gradient.float() - wanted.gradient.float()).norm() / wanted.gradient.norm()
    assert error < 2**-8, float(error)


@pytest.mark.gpu
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_in_float32_the_loss_equals_plain_pytorch(objective):
    given = gpu_slots(50_257, dtype=torch.float32)
    found = run(given, objective)
    losses, total, gradient = plain(given, objective)
    torch.testing.assert_close(found.losses, losses, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found.total, total, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found.gradient, gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_captured_graph_replays_with_other_rows(objective):
    given = gpu_slots(248_320)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(given, objective)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(given, objective)
    given.rows.copy_(given.rows.flip(2))
    given.labels.copy_(given.labels.flip(0))
    given.counts.copy_(given.counts.flip(0))
    graph.replay()
    wanted = run(given, objective)
    for name in vars(wanted):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), msg=name)


@pytest.mark.gpu
def test_rows_that_do_not_count_may_be_nan():
    given = gpu_slots(50_257)
    wanted = run(given, KL_DPACE)
    given.rows[~given.counts] = float("nan")
    given.teacher[~given.counts] = float("nan")
    found = run(given, KL_DPACE)
    for name in ("total", "weight", "losses", "gradient"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
