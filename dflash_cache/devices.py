"""Names of devices and precisions, as the options spell them."""

import re
import time
from contextlib import suppress
from functools import cache

import torch

from dflash_cache.errors import ConfigError

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def pick_device(name: str) -> torch.device:
    """The one device of `--device`; `auto` is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = None
    with suppress(RuntimeError):
        device = torch.device(name)
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: want auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: this torch sees no GPU; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"--device {name}: this torch sees {torch.cuda.device_count()} GPUs, numbered from 0"
        )
    return device


# --- many devices -------------------------------------------------------------------------------

Group = tuple[str, ...]  # devices of one worker


def gpus_here() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def worker_groups(devices: str, *, tensor_parallel: int, gpus: int) -> list[Group]:
    """The devices of every worker of this machine; `auto` is one worker."""
    if devices == "auto":
        names = [f"cuda:{i}" for i in range(tensor_parallel)] if gpus else ["cpu"] * tensor_parallel
        _refuse_unseen(names, devices, gpus)
    else:
        names = device_names(devices, gpus=gpus)
    return grouped(names, tensor_parallel=tensor_parallel, devices=devices)


def group_of_rank(
    devices: str, *, tensor_parallel: int, gpus: int, local_rank: int, own_gpus: int = 0
) -> Group:
    """The devices of one process of several that were started on this machine.

    Each takes the next; the CPU is shared by all.  Slurm shows a task only its `own_gpus`, numbered
    from 0, unless it is told otherwise (`--gpu-bind=none`): then this one sees more.
    """
    if devices == "auto":
        devices = "all" if gpus else "cpu"
    names = device_names(devices, gpus=gpus)
    if names == ["cpu"]:
        return ("cpu",) * tensor_parallel
    groups = grouped(names, tensor_parallel=tensor_parallel, devices=devices)
    place = 0 if own_gpus and own_gpus == gpus else local_rank
    if place >= len(groups):
        raise ConfigError(
            f"--devices {devices}: {len(names)} devices are enough for {len(groups)} processes "
            f"with --tensor-parallel {tensor_parallel}, but there is one of local rank "
            f"{local_rank}; start {len(groups)} processes on this machine"
        )
    return groups[place]


def device_names(devices: str, *, gpus: int) -> list[str]:
    """Devices in the order given, of a machine with so many GPUs.

    `all`, `cpu`, `cuda`, `cuda:1`, `1`, `0-3`, and any of these with commas between them.
    """
    if devices == "all":
        if not gpus:
            raise ConfigError("--devices all: this torch sees no GPU; use --devices cpu")
        return [f"cuda:{number}" for number in range(gpus)]
    names = [name for word in devices.split(",") for name in _named(word.strip(), devices)]
    _refuse_unseen(names, devices, gpus)
    return names


def _named(word: str, devices: str) -> list[str]:
    if word == "cpu":
        return ["cpu"]
    if word == "cuda":
        return ["cuda:0"]
    found = re.fullmatch(r"(?:cuda:)?([0-9]{1,4})(?:-([0-9]{1,4}))?", word)
    numbers = range(0)
    if found:
        numbers = range(int(found[1]), int(found[2] or found[1]) + 1)
    if not numbers:
        raise ConfigError(
            f"--devices {devices}: want auto, all, cpu or numbers of GPUs as 0,1,2 or 0-7; "
            f"found {word!r}"
        )
    return [f"cuda:{number}" for number in numbers]


def _refuse_unseen(names: list[str], devices: str, gpus: int) -> None:
    wanted = [int(name.partition(":")[2]) for name in names if name != "cpu"]
    if wanted and not gpus:
        raise ConfigError(f"--devices {devices}: this torch sees no GPU; use --devices cpu")
    if wanted and max(wanted) >= gpus:
        raise ConfigError(
            f"--devices {devices}: GPU {max(wanted)} is not there; this torch sees {gpus}, "
            "numbered from 0"
        )


def grouped(names: list[str], *, tensor_parallel: int, devices: str) -> list[Group]:
    """Each `tensor_parallel` devices that follow each other form one worker."""
    if len(names) % tensor_parallel:
        raise ConfigError(
            f"--tensor-parallel {tensor_parallel}: {len(names)} devices (--devices {devices}) do "
            f"not make workers of {tensor_parallel}"
        )
    groups = [
        tuple(names[first : first + tensor_parallel])
        for first in range(0, len(names), tensor_parallel)
    ]
    for group in groups:
        on_gpus = [name for name in group if name != "cpu"]
        if on_gpus and (len(on_gpus) < len(group) or len(set(on_gpus)) < len(group)):
            raise ConfigError(
                f"--tensor-parallel {tensor_parallel}: one worker would have {', '.join(group)} "
                f"(--devices {devices}); want different GPUs"
            )
    return groups


# --- CPUs without bfloat16 ------------------------------------------------------------------------

SIDE = 256  # rows and columns of the products that are timed
SLOW = 2.0  # times as long as in float32, from which on it is told


def slow_bfloat16(*, instead: str) -> str | None:
    """What to say where bfloat16 costs time on this CPU; None where it does not.

    A CPU without instructions for it (on x86, AVX-512 BF16 or AMX) takes up to a hundred times as
    long for a product as in float32.  `instead` is the option that helps.
    """
    times = product_seconds(torch.bfloat16) / product_seconds(torch.float32)
    if times < SLOW:
        return None
    return (
        f"this CPU takes {times:.0f} times as long for a product in bfloat16 as in float32; "
        f"{instead} is quicker here"
    )


@cache
def product_seconds(dtype: torch.dtype) -> float:
    """Seconds of a square product on the CPU, the quickest of a few."""
    left, right = torch.ones(2, SIDE, SIDE, dtype=dtype)
    found = []
    for _ in range(4):
        began = time.perf_counter()
        left @ right
        found.append(time.perf_counter() - began)
    return min(found)
