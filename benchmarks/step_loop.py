"""The captured step fed from a cache on the local disk, beside its replay alone."""

import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch
from bench_feed import START, make_cache, open_source, raw_rate
from step_data import DEVICE, QWEN_27B, Setup, random_batch

from dflash_fit.batch import Batch
from dflash_fit.feed import Feed
from dflash_fit.graph import GraphStep
from dflash_fit.roofline import Gauge, Reading
from dflash_fit.step import Pieces

LR = 1e-5
LOG_EVERY = 3
DENSE, SPARSE = 6144, 512  # anchors: paper density, and one that a disk does not keep up with
STEPS = {DENSE: 10, SPARSE: 16}


def measure_loop(
    args: Namespace, pieces: Pieces, say: Callable[[str], None], *, microbatch: int, chunk: int
) -> dict[str, float]:
    """Paper density, where the GPU limits; and a density so low that the disk does."""
    with tempfile.TemporaryDirectory(prefix="bench_loop.", dir=args.folder) as folder:
        options = Namespace(
            tokens=args.loop_tokens, layers=5, hidden=5120, encoding="fp8",
            token_budget=49_152, anchors=DENSE,
        )  # fmt: skip
        root = make_cache(Path(folder) / "cache", options)
        setup = Setup(QWEN_27B)
        figures: dict[str, float] = {}
        for anchors, steps in STEPS.items():
            options.anchors = anchors
            shape = QWEN_27B.shape(tokens=49_152, anchors=anchors, encoding="fp8")
            trainer = setup.trainer(shape, pieces, microbatch=microbatch, chunk=chunk)
            step = GraphStep(trainer)
            batch = random_batch(shape, documents=30, vocabulary=QWEN_27B.vocabulary)
            step.capture(batch)
            alone = replay_seconds(step, batch, repeats=4)
            source = open_source(root, options, direct=True)
            loop, reading = loop_seconds(step, source, steps=steps)
            say(f"A {anchors}: {loop:.3f} s a step from disk, {alone:.3f} replay alone; "
                f"{reading.words}")  # fmt: skip
            if anchors == DENSE:
                figures |= {
                    "loop_over_replay": alone / loop,
                    "loop_step_ms_A6144": loop * 1e3,
                    "loop_waiting": reading.waiting,
                }
            else:
                raw = max(raw_rate(root, threads=4) for _ in range(2))
                # Not bytes over the seconds of the loop: it begins with packs already read.
                delivered = reading.gb_per_s_delivered or 0.0
                figures |= {
                    "reader_over_raw": delivered / raw,
                    "reader_gb_s": delivered,
                    "raw_gb_s": raw,
                    "slow_disk_waiting": reading.waiting,
                    "slow_disk_told": float(reading.limit == "reader"),
                }
            del step, trainer, batch
            setup.optimizer.begin()
            torch.cuda.empty_cache()
    return figures


def replay_seconds(step: GraphStep, batch: Batch, *, repeats: int) -> float:
    """Median seconds of a step on a pack that is already on the device."""
    seconds = []
    for _ in range(1 + repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step(batch, lr=LR)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def loop_seconds(step: GraphStep, source: object, *, steps: int) -> tuple[float, Reading]:
    """Seconds a step of the loop of `dflash fit`, log lines and all, and what the gauge says.

    The first two steps start the pipeline and are not counted.
    """
    with Feed(source, START, steps=steps, device=DEVICE) as feed:  # type: ignore[arg-type]
        gauge, began = Gauge(feed), 0.0
        for number, (batch, *_) in enumerate(feed):
            if number == 2:
                torch.cuda.synchronize()
                gauge.restart()
                began = time.perf_counter()
            step(batch, lr=LR, taken=feed.release)
            if number % LOG_EVERY == LOG_EVERY - 1:
                step.trainer.metrics.read()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / (steps - 2), gauge.read()
