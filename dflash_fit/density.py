"""`--anchors auto`: the anchor density at which the GPU is just not waiting for the reader.

Reading a pack takes the same time whatever is trained on it; a step takes a fixed time and one
per anchor.  Both are measured on this machine, with this cache, before the run begins.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from tqdm import tqdm

from dflash_fit.anchors import candidates
from dflash_fit.batch import Batch
from dflash_fit.config import MICROBATCH, FitConfig
from dflash_fit.course import Position
from dflash_fit.loader import PackSource
from dflash_fit.roofline import anchors_that_hide_reading
from dflash_fit.step import Trainer

PACKS = 3  # read for the measurement; the first also opens files
STEPS = 3


def auto_anchors(
    config: FitConfig,
    source_of: Callable[[FitConfig], PackSource],
    trainer_of: Callable[[FitConfig], Trainer],
    *,
    device: torch.device,
) -> FitConfig:
    """The options with a number for the anchors; told on stderr, with what it follows from."""
    few = config.anchor_microbatch or MICROBATCH[device.type]
    unit = config.anchor_microbatch or few // 4
    one, two = (
        replace(config, anchors=n * few, anchor_microbatch=few, packs_per_step=1) for n in (1, 2)
    )
    source = source_of(two)
    cpu = torch.device("cpu")
    host = Batch.empty(source.shape, device=cpu, pinned=device.type == "cuda")
    reading, most = time_reading(source, host)
    seconds = [time_steps(trainer_of(c), host, device=device) for c in (one, two)]
    per_anchor = max(seconds[1] - seconds[0], 1e-9) / few
    fixed = max(seconds[0] - per_anchor * few, 0.0)
    anchors = anchors_that_hide_reading(
        reading,
        fixed,
        per_anchor,
        multiple=unit,
        most=max(unit, most // unit * unit),
        passes=config.passes_per_pack,
    )
    step, needed = fixed + per_anchor * anchors, reading / config.passes_per_pack
    tqdm.write(
        f"--anchors auto: {anchors}; a step takes {fixed:.3f} s and {per_anchor * 1e6:.1f} us per "
        f"anchor, together {step:.3f} s; reading for a step takes {needed:.3f} s"
        + (f", and a pack has no more than {most} candidates to hide it" if step < needed else ""),
        file=sys.stderr,
    )
    return replace(config, anchors=anchors)


def time_reading(source: PackSource, host: Batch) -> tuple[float, int]:
    """Seconds to read a pack, and how many anchors a pack has on average, at most."""
    seconds, counts = [], []
    position = Position(epoch=0, index=0, turn=0)
    for _ in range(PACKS):
        began = time.perf_counter()
        source.fill(host, position)
        seconds.append(time.perf_counter() - began)
        counts.append(len(candidates(host.loss_mask.numpy(), host.document_ids.numpy())))
        position = replace(source.after(position), turn=0)
    return statistics.median(seconds), int(statistics.mean(counts))


def time_steps(trainer: Trainer, host: Batch, *, device: torch.device) -> float:
    """Seconds of a step that changes nothing."""
    count = trainer.config.shape.anchors
    batch = replace(
        host,
        anchor_positions=host.anchor_positions[:count],
        anchor_valid=host.anchor_valid[:count],
    )
    if device.type != "cpu":
        moved = Batch.empty(trainer.config.shape, device=device)
        moved.copy_(batch)
        batch = moved
    seconds = []
    trainer.optimizer.armed.zero_()
    for _ in range(1 + STEPS):
        wait_for(device)
        began = time.perf_counter()
        trainer.train(batch, 0)
        wait_for(device)
        seconds.append(time.perf_counter() - began)
    trainer.optimizer.begin()
    trainer.optimizer.armed.fill_(True)
    if device.type != "cpu":
        torch.cuda.empty_cache()
    return statistics.median(seconds[1:])


def wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize(device)
