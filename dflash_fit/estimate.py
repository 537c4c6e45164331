"""What a run will take, told before it begins: memory, time, tokens, bytes read.

GB are 10^9 bytes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from dflash_fit.density import wait_for
from dflash_fit.memory import host_of, memory_of, pinned_of
from dflash_fit.work import Work, parameters_of, useful_flop_of

# Useful FLOP/s of a step over those of a large product that is held.  On an H200 whole steps reach
# 0.91 and 0.92 (Qwen3.6-27B's drafter, 49,152 slots, 2,048 and 8,192 blocks), 0.85 (4,096 slots,
# 512 blocks), 0.76 (a 4B target's; attention is not counted and weighs more), and a step of 4 ms
# (576 channels) 0.31: benchmarks/results/step-h200.json.
EFFICIENCY = 0.85
PLAIN = 1.22  # times as long as a captured step, one on a GPU that is neither compiled: ibidem
SECONDS = 0.5  # in which a product is timed
WORTH_NAMING = 0.02  # of the memory: what an option has to save


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """For one run; rates that nobody knows leave what follows from them None."""

    work: Work
    memory: dict[str, int]  # bytes on each device, by part
    compute_seconds: float | None  # of an update
    read_seconds: float | None  # of its share of the packs

    @property
    def parameters(self) -> int:
        return parameters_of(self.work.drafter)

    @property
    def memory_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def pinned_bytes(self) -> int:
        """Host memory of each rank that is pinned."""
        return pinned_of(self.work)

    @property
    def host_bytes(self) -> int:
        """Host memory of rank 0, which takes the most: batches, and copies for checkpoints."""
        return host_of(self.work)

    @property
    def tokens_per_step(self) -> float:
        return self.work.packs_per_step * self.work.tokens_per_pack

    @property
    def anchors_per_step(self) -> float:
        return self.work.packs_per_step * self.work.anchors_per_pack

    @property
    def flop_per_step(self) -> float:
        """Of all ranks together, without those of idle turns."""
        return self.work.packs_per_step * useful_flop_of(self.work)

    @property
    def read_bytes_per_epoch(self) -> float:
        return self.work.packs_per_epoch * self.work.read_bytes_per_pack

    @property
    def read_bytes(self) -> float:
        """In all: a pack is read once for all its passes."""
        return self.work.packs / self.work.passes_per_pack * self.work.read_bytes_per_pack

    @property
    def step_seconds(self) -> float | None:
        known = [s for s in (self.compute_seconds, self.read_seconds) if s is not None]
        return None if self.compute_seconds is None else max(known)

    @property
    def hours(self) -> float | None:
        return None if self.step_seconds is None else self.work.steps * self.step_seconds / 3600

    @property
    def limit(self) -> str | None:
        """`step` or `reader`, where both are known."""
        if self.compute_seconds is None or self.read_seconds is None:
            return None
        return "step" if self.compute_seconds >= self.read_seconds else "reader"

    def to_dict(self) -> dict[str, Any]:
        work = self.work
        return {
            "parameters": self.parameters,
            "ranks": work.ranks,
            "packs_per_step": work.packs_per_step,
            "steps": work.steps,
            "tokens": round(work.steps * self.tokens_per_step),
            "tokens_per_step": round(self.tokens_per_step),
            "anchors": round(work.steps * self.anchors_per_step),
            "anchors_per_step": round(self.anchors_per_step),
            "memory_bytes": self.memory_bytes,
            "memory": self.memory,
            "host_bytes": self.host_bytes,
            "pinned_bytes": self.pinned_bytes,
            "flop_per_step": self.flop_per_step,
            "read_bytes_per_epoch": round(self.read_bytes_per_epoch),
            "read_bytes": round(self.read_bytes),
            "compute_seconds_per_step": self.compute_seconds,
            "read_seconds_per_step": self.read_seconds,
            "hours": self.hours,
            "limit": self.limit,
        }


def estimate(work: Work, *, flops_per_s: float | None, read_bytes_per_s: float | None) -> Estimate:
    """`flops_per_s` is what a step keeps up on one device (`speed_of`); bytes are read by all ranks
    together at `read_bytes_per_s`.
    """
    compute = read = None
    if flops_per_s is not None:
        compute = work.turns * useful_flop_of(work) / flops_per_s
        if work.device_type == "cuda" and not work.captured:
            compute *= PLAIN
    if read_bytes_per_s is not None:
        packs = work.packs_per_step / work.passes_per_pack
        read = packs * work.read_bytes_per_pack / read_bytes_per_s
    return Estimate(work=work, memory=memory_of(work), compute_seconds=compute, read_seconds=read)


# --- for people -----------------------------------------------------------------------------------


def tell(found: Estimate) -> str:
    """A table: what the run takes, and each part of its memory that shows."""
    values, work = found.to_dict(), found.work
    on_gpu = work.device_type == "cuda"
    parts = sorted(found.memory.items(), key=lambda item: -item[1])
    host = f"{_gb(found.host_bytes)}, {_gb(found.pinned_bytes)} of it pinned"
    lines = [
        ("parameters", _count(found.parameters)),
        (f"memory per {'GPU' if on_gpu else 'process'}", _gb(found.memory_bytes)),
        *((f"  {name}", _gb(size)) for name, size in parts if size >= found.memory_bytes / 200),
        *([("host memory", host)] if on_gpu else []),
        ("steps", _steps(work)),
        ("tokens", _of_steps(values["tokens"], values["tokens_per_step"])),
        ("anchors", _of_steps(values["anchors"], values["anchors_per_step"])),
        ("read", f"{_gb(found.read_bytes)}, {_gb(found.read_bytes_per_epoch)} an epoch"),
        ("time", _time(found)),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def too_large(found: Estimate, free_bytes: int) -> str | None:
    """What is missing on a device and which options give it, or None where the run fits."""
    missing = found.memory_bytes - free_bytes
    if missing <= 0:
        return None
    helps = [f"{option} saves {_gb(saved)}" for option, saved in savings(found.work).items()]
    return (
        f"this run takes about {_gb(found.memory_bytes)} on each device and {_gb(free_bytes)} are "
        f"free, {_gb(missing)} too few; {', '.join(helps) or 'take a device with more memory'}"
    )


def savings(work: Work) -> dict[str, int]:
    """Bytes that each option would save alone, the greatest first."""
    before = sum(memory_of(work).values())
    found = {o: before - sum(memory_of(w).values()) for o, w in smaller(work).items()}
    worth = {option: saved for option, saved in found.items() if saved >= WORTH_NAMING * before}
    return dict(sorted(worth.items(), key=lambda item: -item[1]))


def smaller(work: Work) -> dict[str, Work]:
    """The same run with one option changed, by that option; two of them change the result too."""
    options: dict[str, Work] = {}
    half = min(work.anchor_microbatch, work.shape.anchors) // 2
    if half and work.shape.anchors % half == 0:
        options[f"--anchor-microbatch {half}"] = replace(work, anchor_microbatch=half)
    if work.ranks > 1 and not work.sharded:
        options["--shard-optimizer"] = replace(work, sharded=True)
    if work.ranks > 1 and work.reduce == "fp32" and work.precision == "bf16":
        options["--reduce bf16"] = replace(work, reduce="bf16")
    if work.turns > 1:
        options[f"--packs-per-step {work.ranks}"] = replace(work, packs_per_step=work.ranks)
    if work.attention == "dense" and work.device_type == "cuda":
        options["--attention block"] = replace(work, attention="block")
    chunk = min(work.loss_chunk, work.anchor_microbatch) // 2
    if chunk:
        options[f"--loss-chunk {chunk}"] = replace(work, loss_chunk=chunk)
    budget = work.shape.token_budget // 2
    options[f"--token-budget {budget}"] = replace(
        work, shape=replace(work.shape, token_budget=budget)
    )
    return options


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


def _count(number: float) -> str:
    return f"{number / 1e9:.3f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"


def _of_steps(whole: int, step: int) -> str:
    return f"{whole:,}, {step:,} a step"


def _steps(work: Work) -> str:
    packs = work.packs_per_step
    return (
        f"{work.steps:,} of {packs:,} packed batch{'es' * (packs > 1)} each"
        + (f", {work.passes_per_pack} from one read" if work.passes_per_pack > 1 else "")
        + (f", on {work.ranks} ranks" if work.ranks > 1 else "")
    )


def _time(found: Estimate) -> str:
    if found.hours is None or found.step_seconds is None:
        return "not known: the device was not timed"
    why = {"step": "; the step limits", "reader": "; the reader limits", None: ""}[found.limit]
    whole = _span(found.hours * 3600)
    return f"about {whole}, {found.step_seconds:.3g} s a step{why}; measuring comes on top"


def _span(seconds: float) -> str:
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"


# --- measured -------------------------------------------------------------------------------------


def speed_of(device: torch.device, *, precision: str = "bf16") -> float:
    """FLOP/s that a step keeps up on this device: those of a large product, times `EFFICIENCY`.

    Held for half a second, because a GPU is quicker in its first moments (800 against 672 TFLOP/s
    on an H200) than in the hours that follow.
    """
    # A CPU without instructions for bfloat16 takes a third of a second for one product of 512.
    size, together = (8192, 8) if device.type == "cuda" else (512, 1)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b, out = (torch.randn(size, size, device=device).to(dtype) for _ in range(3))

    def products() -> None:
        for _ in range(together):
            torch.mm(a, b, out=out)
        wait_for(device)

    _seconds_of(products, SECONDS / 2)
    return EFFICIENCY * together * 2 * size**3 / _seconds_of(products, SECONDS / 2)


def _seconds_of(action: Callable[[], None], least: float) -> float:
    """Mean seconds of a call, called again and again for a while."""
    calls, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < least or not calls:
        action()
        calls += 1
    return spent / calls
