"""What every benchmark says of itself: one JSON object, printed and, with --out, written."""

import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[1]


def result(
    benchmark: str,
    shape: dict[str, Any],
    figures: dict[str, float],
    *,
    folder: Path | None = None,
) -> dict[str, Any]:
    """The object; with `folder` the file system below it is named, where the disk matters."""
    return {
        "benchmark": benchmark,
        "device": device_in_words() + (f"; {file_system(folder)}" if folder else ""),
        "torch": torch.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "shape": shape,
        "figures": {key: float(f"{value:.5g}") for key, value in figures.items()},
    }


def end_on_sigterm() -> None:
    """SIGTERM leaves as an exception does: folders are removed, processes of our own are ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def add_out(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")


def publish(found: dict[str, Any], out: Path | None) -> None:
    """Print the object on stdout and write it to `out`."""
    text = json.dumps(found, indent=1)
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n", encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Wall clock, and user + system time of all threads of this process."""

    seconds: float
    cpu_seconds: float


def timed(action: Callable[[], object]) -> Timing:
    cpu, wall = time.process_time(), time.perf_counter()
    action()
    return Timing(
        seconds=time.perf_counter() - wall,
        cpu_seconds=time.process_time() - cpu,
    )


def spread(key: str, values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest of a figure that was measured several times."""
    return {key: statistics.median(values), f"{key}.min": min(values), f"{key}.max": max(values)}


def device_in_words() -> str:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU"
    return f"{gpu}; {cpu_model()}, {os.cpu_count()} cores, {memory:.0f} GiB"


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def file_system(folder: Path) -> str:
    """Type and device of the file system that holds `folder`, for example ext4 on /dev/vda."""
    where, kind, device = "", "unknown file system", "unknown device"
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        mounted_device, mounted_at, mounted_kind = line.split()[:3]
        # The last of equal mount points lies on top.
        if folder.resolve().is_relative_to(mounted_at) and len(mounted_at) >= len(where):
            where, kind, device = mounted_at, mounted_kind, mounted_device
    return f"{kind} on {device}"


def commit() -> str:
    """The commit that was measured, with "+changes" where the tree differs from it."""
    head = _git("rev-parse", "HEAD")
    if head is None:
        return "unknown"
    return head + ("+changes" if _git("--no-optional-locks", "status", "--porcelain") else "")


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
