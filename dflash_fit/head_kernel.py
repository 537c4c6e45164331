"""Triton kernels that read the logits of a chunk: statistics of each row, then slopes in place.

Both are bound by memory: `measure` reads each logit once, `write_slope` reads it once and writes
it once.  Arithmetic is fp32 whatever the logits are.  Nothing asks the host, and nothing is tuned
at run time, so both can be captured in a CUDA graph once they have run.

With a teacher the loss is KL(teacher || drafter), without it the cross-entropy of the label.
NaN among the logits of a row makes its loss NaN and its argmax wrong.

Letters: Q slots, V vocabulary.
"""

# mypy: allow-untyped-decorators

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_fit.errors import FitError

try:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError as error:
    raise FitError(
        "the loss on a GPU needs Triton, which is not installed; install it (it comes with torch "
        "for CUDA) or train on the CPU"
    ) from error

FLOOR = tl.constexpr(-1e30)  # below any logit, and finite: its differences are not NaN


@dataclass(frozen=True)
class Tile:
    """What a program holds at once: `steps` times the 8 logits that each of its threads loads."""

    steps: int
    warps: int

    @property
    def lanes(self) -> int:
        return self.warps * 32 * 8  # 8 x bf16 is a load of 16 bytes

    @property
    def width(self) -> int:
        return self.steps * self.lanes


# What benchmarks/bench_head.py sweeps.
MEASURE = Tile(steps=8, warps=4)
STAGES = 2  # tiles of `measure` under way: one is worked on while the next is fetched
SLOPE = Tile(steps=2, warps=4)


class Statistics(NamedTuple):
    """Of each row of logits, [Q].  Its softmax is exp(logit - peak) / mass."""

    cross_entropy: Tensor  # of the label
    divergence: Tensor  # KL(teacher || drafter); without a teacher the cross-entropy itself
    correct: Tensor  # bool: the label is the argmax, the lowest among equals
    peak: Tensor
    mass: Tensor
    teacher_peak: Tensor | None
    teacher_mass: Tensor | None


def measure(logits_QV: Tensor, teacher_QV: Tensor | None, labels_Q: Tensor) -> Statistics:
    """One pass over the logits, and over the teacher's."""

    def column(dtype: torch.dtype = torch.float32) -> Tensor:
        return logits_QV.new_empty(len(logits_QV), dtype=dtype)

    cross_entropy = column()
    found = Statistics(
        cross_entropy=cross_entropy,
        divergence=cross_entropy if teacher_QV is None else column(),
        correct=column(torch.bool),
        peak=column(),
        mass=column(),
        teacher_peak=None if teacher_QV is None else column(),
        teacher_mass=None if teacher_QV is None else column(),
    )
    _measure[(len(logits_QV),)](
        logits_QV,
        teacher_QV,
        labels_Q,
        *found,
        VOCAB=logits_QV.shape[1],
        STRIDE=row_stride(logits_QV, teacher_QV),
        STEPS=MEASURE.steps,
        LANES=MEASURE.lanes,
        STAGES=STAGES,
        num_warps=MEASURE.warps,
    )
    return found


def write_slope(
    logits_QV: Tensor,
    teacher_QV: Tensor | None,
    labels_Q: Tensor,
    weights_Q: Tensor,
    found: Statistics,
) -> Tensor:
    """weight * (softmax - wanted), where the logits were; wanted is one-hot or the teacher's.

    Rows of weight 0 become 0 unread.  What lies between V and the stride is written to as well.
    """
    vocab = logits_QV.shape[1]
    _write_slope[(len(logits_QV) * triton.cdiv(vocab, SLOPE.width),)](
        logits_QV,
        teacher_QV,
        labels_Q,
        weights_Q,
        found.peak,
        found.mass,
        found.teacher_peak,
        found.teacher_mass,
        VOCAB=vocab,
        STRIDE=row_stride(logits_QV, teacher_QV),
        WIDTH=SLOPE.width,
        num_warps=SLOPE.warps,
    )
    return logits_QV


def row_stride(logits_QV: Tensor, teacher_QV: Tensor | None) -> int:
    """Of both, which come from `logits_buffer`."""
    stride = logits_QV.stride(0)
    for tensor in (logits_QV, teacher_QV):
        assert tensor is None or tensor.stride() == (stride, 1), (tensor.stride(), stride)
    return stride


# --- kernels: a program of `measure` takes a row, one of `write_slope` a piece of a row -----------


@triton.jit
def _measure(
    logits: tl.tensor,
    teacher: tl.tensor,
    labels: tl.tensor,
    cross_entropies: tl.tensor,
    divergences: tl.tensor,
    corrects: tl.tensor,
    peaks: tl.tensor,
    masses: tl.tensor,
    teacher_peaks: tl.tensor,
    teacher_masses: tl.tensor,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)  # int32 ends at 8,647 rows of 248,320
    logits += row * STRIDE
    if teacher is not None:
        teacher += row * STRIDE
    # What a lane takes lies in the registers of one thread: nothing is exchanged between threads
    # before the end of the row.
    tile = tl.arange(0, STEPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    WIDTH: tl.constexpr = STEPS * LANES
    WHOLE: tl.constexpr = VOCAB // WIDTH
    TILES: tl.constexpr = (VOCAB + WIDTH - 1) // WIDTH
    peak = tl.full([LANES], FLOOR, tl.float32)
    mass = tl.zeros([LANES], tl.float32)
    first = tl.zeros([LANES], tl.int32)  # number of the tile that brought the lane's peak
    teacher_peak = tl.full([LANES], FLOOR, tl.float32)
    teacher_mass = tl.zeros([LANES], tl.float32)
    gap = tl.zeros([LANES], tl.float32)  # of teacher_mass, each part times (teacher - drafter)
    for LAST in tl.static_range(2):  # whole tiles, then what is left: only that is masked
        for number in tl.range(WHOLE if LAST else 0, TILES if LAST else WHOLE, num_stages=STAGES):
            x = _load(logits, number * WIDTH + tile, VOCAB, LAST)
            best = tl.max(x, axis=0)
            first = tl.where(best > peak, number, first)
            if teacher is not None:
                y = _load(teacher, number * WIDTH + tile, VOCAB, LAST)
                teacher_best = tl.maximum(teacher_peak, tl.max(y, axis=0))
                fade = tl.exp(teacher_peak - teacher_best)
                part = tl.exp(y - teacher_best[None, :])
                teacher_mass = teacher_mass * fade + tl.sum(part, axis=0)
                gap = gap * fade + tl.sum(part * (y - x), axis=0)
                teacher_peak = teacher_best
            best = tl.maximum(peak, best)
            mass = mass * tl.exp(peak - best) + tl.sum(tl.exp(x - best[None, :]), axis=0)
            peak = best

    top = tl.max(peak, axis=0)
    mass_of_row = tl.sum(mass * tl.exp(peak - top), axis=0)
    tl.store(peaks + row, top)
    tl.store(masses + row, mass_of_row)
    label = tl.load(labels + row)
    at_label = tl.load(logits + label).to(tl.float32)
    tl.store(cross_entropies + row, tl.log(mass_of_row) + (top - at_label))
    # Tiles bring equal peaks in order: the first one that did is read again for the place in it.
    at = tl.min(tl.where(peak == top, first, TILES), axis=0) * WIDTH + tile
    likeliest = tl.min(tl.where(_load(logits, at, VOCAB, True) == top, at, VOCAB))
    tl.store(corrects + row, likeliest == label)
    if teacher is not None:
        teacher_top = tl.max(teacher_peak, axis=0)
        fade = tl.exp(teacher_peak - teacher_top)
        teacher_mass_of_row = tl.sum(teacher_mass * fade, axis=0)
        tl.store(teacher_peaks + row, teacher_top)
        tl.store(teacher_masses + row, teacher_mass_of_row)
        # sum of p (log p - log q), with log p = teacher - teacher_top - log(mass), and log q alike
        mean_gap = tl.sum(gap * fade, axis=0) / teacher_mass_of_row
        of_masses = tl.log(mass_of_row) - tl.log(teacher_mass_of_row)
        tl.store(divergences + row, mean_gap - (teacher_top - top) + of_masses)


@triton.jit
def _write_slope(
    logits: tl.tensor,
    teacher: tl.tensor,
    labels: tl.tensor,
    weights: tl.tensor,
    peaks: tl.tensor,
    masses: tl.tensor,
    teacher_peaks: tl.tensor,
    teacher_masses: tl.tensor,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    PIECES: tl.constexpr = (VOCAB + WIDTH - 1) // WIDTH
    row = (tl.program_id(0) // PIECES).to(tl.int64)
    column = tl.program_id(0) % PIECES * WIDTH + tl.arange(0, WIDTH)
    # Not `column < VOCAB`: the stride is a multiple of 16, which keeps loads and stores wide.
    inside = column < STRIDE
    logits += row * STRIDE
    weight = tl.load(weights + row)
    if weight == 0:
        tl.store(logits + column, tl.zeros([WIDTH], logits.dtype.element_ty), mask=inside)
    else:
        x = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
        slope = tl.exp(x - tl.load(peaks + row)) * (weight / tl.load(masses + row))
        if teacher is None:
            slope -= tl.where(column == tl.load(labels + row), weight, 0.0)
        else:
            y = tl.load(teacher + row * STRIDE + column, mask=inside, other=float("-inf")).to(
                tl.float32
            )
            wanted = tl.exp(y - tl.load(teacher_peaks + row))
            slope -= wanted * (weight / tl.load(teacher_masses + row))
        tl.store(logits + column, slope.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _load(row: tl.tensor, at: tl.tensor, VOCAB: tl.constexpr, MASKED: tl.constexpr) -> tl.tensor:
    """Logits in fp32; what lies beyond the vocabulary is the floor."""
    if MASKED:
        loaded = tl.load(row + at, mask=at < VOCAB, other=0.0).to(tl.float32)
        found = tl.where(at < VOCAB, loaded, FLOOR)
    else:
        found = tl.load(row + at).to(tl.float32)
    return found
