"""What a trial of a sweep is going to be, found out before its process starts."""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_cache.reader import CGROUP_LIMIT, Reader
from dflash_cache.schema import FINAL_HIDDEN
from dflash_fit import checkpoint
from dflash_fit.config import FitConfig
from dflash_fit.estimate import Estimate, estimate, speed_of
from dflash_fit.places import Place
from dflash_fit.preflight import reading_speed, work_of
from dflash_fit.prepare import Outline, outline
from dflash_fit.world import World

SHARE = 0.9  # of what is free now, of a device or of the host, that trials may take
# What torch does not allocate: the CUDA context, modules of kernels, workspaces of libraries.
CONTEXT_BYTES = 1_000_000_000
CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


@dataclass(frozen=True, kw_only=True)
class Prospect:
    """A trial in numbers."""

    steps: int
    group: str  # trials of one group see the same packs
    planes: tuple[int | str, ...]  # that it reads
    rows: int  # of a pack
    leap: int  # steps between its checkpoints
    estimate: Estimate  # without times where no rates are known

    @property
    def device_bytes(self) -> int:
        on_gpu = self.estimate.work.device_type == "cuda"
        return self.estimate.memory_bytes + (CONTEXT_BYTES if on_gpu else 0)


class Rates:
    """How quick a device and the disk are, measured when it is first asked."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flops: dict[str, float] = {}  # by precision
        self.bytes: float | None = None

    def computing(self, precision: str) -> float:
        if precision not in self.flops:
            self.flops[precision] = speed_of(self.device, precision=precision)
        return self.flops[precision]

    def reading(self, plan: Outline) -> float | None:
        if self.bytes is None:
            self.bytes = reading_speed(plan)
        return self.bytes


def prospect(
    config: FitConfig, reader: Reader, device: torch.device, *, rates: Rates | None = None
) -> Prospect:
    """Raises what such a run would be refused for, in its folder too."""
    plan = outline(checkpoint.as_begun(config), reader, World.alone(device))
    config = plan.config
    begun = config.out / "config.json"
    if begun.is_file():
        checkpoint.refuse_other_run(begun, checkpoint.resolve(config, identity=reader.identity))
    final = (FINAL_HIDDEN,) if config.loss == "kl" else ()
    return Prospect(
        steps=plan.steps,
        group=group_of(config),
        planes=(*plan.drafter.target_layer_ids, *final),
        rows=config.token_budget,
        leap=config.checkpoint_every,
        estimate=estimate(
            work_of(plan),
            flops_per_s=rates.computing(config.precision) if rates else None,
            read_bytes_per_s=rates.reading(plan) if rates else None,
        ),
    )


def group_of(config: FitConfig) -> str:
    """The same for trials that see the same packs in the same order."""
    return json.dumps(list(deciding(config).values()))


def deciding(config: FitConfig) -> dict[str, Any]:
    """The options that decide which packs a trial sees, and in which order."""
    return {
        "token_budget": config.token_budget,
        "seed": config.seed_of_packs,
        "held_out": config.held_out,
        "unit_order": None if config.unit_order is None else str(config.unit_order),
    }


def parted_by(configs: Iterable[FitConfig]) -> list[str]:
    """Options by which trials see unlike packs; none where all see the same."""
    every = [deciding(config) for config in configs]
    names = every[0] if every else {}
    return [name for name in names if len({values[name] for values in every}) > 1]


def place_of(device: str, *, most: int | None) -> Place:
    """A device as it is before anything of ours runs on it; a core for each trial on the CPU."""
    if device == "cpu":
        return Place(device=device, room=host_room(), most=most or os.cpu_count())
    free, _ = torch.cuda.mem_get_info(torch.device(device))
    return Place(device=device, room=int(SHARE * free), most=most)


def host_room() -> int:
    """Bytes of host memory that trials may take."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        told = next(line for line in lines if line.startswith("MemAvailable:"))
        free = 1024 * int(told.split()[1])
    with suppress(OSError, ValueError):  # no control group, or one without a limit ("max")
        free = min(free, int(CGROUP_LIMIT.read_text()) - int(CGROUP_USED.read_text()))
    return int(SHARE * free)
