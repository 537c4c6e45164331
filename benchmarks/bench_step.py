"""The captured training step on one GPU: time, rate, memory, and what capture and compile bring.

Rates count useful matrix products only (`step_data.Model.useful_flop`); the bf16 ceiling is
measured in the same run.  Medians; a figure's spread is beside it as `.min` and `.max`.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import add_out, end_on_sigterm, publish, result, spread
from step_data import DEVICE, QWEN_4B, QWEN_27B, SMALL, Setup, random_batch
from torch._dynamo.utils import compile_times

from dflash_fit.backends import sight_maker
from dflash_fit.batch import Batch, BatchShape
from dflash_fit.graph import GraphStep, compilations, compiled
from dflash_fit.step import EagerStep, Pieces, Trainer

# Every shape is another specialisation of the same few functions.
torch._dynamo.config.recompile_limit = 64
BEGAN = time.perf_counter()
PARTS = ("ceiling", "first", "27b", "loops", "4b", "small", "disk")
LR = 1e-5


def main() -> None:
    args = parse_args()
    end_on_sigterm()
    shape = {"parts": args.parts, "attention": args.attention, "microbatch": args.microbatch,
             "loss_chunk": args.chunk, "repeats": args.repeats}  # fmt: skip
    figures: dict[str, float] = {}
    done: list[str] = []
    for part in args.parts.split(","):
        say(f"--- {part}")
        figures |= MEASURE[part](args)
        done.append(part)
        # After every part: what was measured stays, should a later one fail.
        publish(result("step", {**shape, "parts": ",".join(done)}, figures), args.out)
        torch.cuda.empty_cache()


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    parser.add_argument("--attention", default="auto", choices=("auto", "block", "flex"))
    parser.add_argument("--microbatch", type=int, default=2048, help="anchors at once")
    parser.add_argument("--chunk", type=int, default=256, help="blocks through the head at once")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="disk to read from")
    parser.add_argument("--loop-tokens", type=int, default=150_000, help="tokens on that disk")
    parser.add_argument("--profile", action="store_true", help="kernels of a 27b step, on stderr")
    add_out(parser)
    return parser.parse_args()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f} s] {text}", file=sys.stderr, flush=True)


# --- timing ----------------------------------------------------------------------------------


def seconds_of(action: Callable[[], object], repeats: int) -> list[float]:
    """Device seconds of every call, without a wait in between."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        action()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]


def measure_ceiling(args: Namespace) -> dict[str, float]:
    """A bf16 product of 8192 cubed, as a burst and held for as long as a step."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    out = torch.empty_like(a)
    seconds_of(lambda: torch.mm(a, b, out=out), 3)
    time.sleep(1)
    burst = statistics.median(seconds_of(lambda: torch.mm(a, b, out=out), 10))
    held = statistics.median(seconds_of(lambda: torch.mm(a, b, out=out), 600)[300:])
    flop = 2 * 8192**3 / 1e12
    say(f"ceiling {flop / burst:.0f} TFLOP/s in a burst, {flop / held:.0f} held for a second")
    return {"ceiling_tflops": flop / burst, "ceiling_held_tflops": flop / held}


# --- steps -----------------------------------------------------------------------------------


def captured(setup: Setup, shape: BatchShape, args: Namespace, batch: Batch) -> GraphStep:
    step = GraphStep(setup.trainer(shape, fast_pieces(args), **sizes(args)))
    done = step.capture(batch)
    say(f"captured in {done.seconds:.1f} s, {done.compiled} functions compiled so far")
    return step


def sizes(args: Namespace) -> dict[str, int]:
    return {"microbatch": args.microbatch, "chunk": args.chunk}


_MADE: dict[str, Pieces] = {}


def fast_pieces(args: Namespace) -> Pieces:
    """Compiled once for all shapes of this run; every shape adds its own specialisation."""
    if "fast" not in _MADE:
        _MADE["fast"] = compiled(plain_pieces(args))
    return _MADE["fast"]


def plain_pieces(args: Namespace) -> Pieces:
    return Pieces(sight=sight_maker(args.attention, DEVICE))


def replays(step: Any, batch: Batch, repeats: int) -> list[float]:
    step(batch, lr=LR)
    return seconds_of(lambda: step(batch, lr=LR), repeats)


def case(
    setup: Setup, args: Namespace, *, tokens: int, anchors: int, documents: int
) -> tuple[GraphStep, Batch, list[float]]:
    shape = setup.model.shape(tokens=tokens, anchors=anchors)
    batch = random_batch(shape, documents=documents, vocabulary=setup.model.vocabulary)
    torch.cuda.reset_peak_memory_stats()
    step = captured(setup, shape, args, batch)
    seconds = replays(step, batch, args.repeats)
    flop = setup.model.useful_flop(tokens=tokens, anchors=anchors) / 1e12
    median = statistics.median(seconds)
    say(
        f"{setup.model.name} T {tokens} A {anchors}: {median * 1e3:.1f} ms, "
        f"{flop / median:.0f} TFLOP/s, {anchors / median:.0f} anchors/s, "
        f"{torch.cuda.max_memory_reserved() / 1e9:.1f} GB, recompiles {step.counts()}"
    )
    return step, batch, seconds


def measure_first(args: Namespace) -> dict[str, float]:
    """A new process to the end of its first replay: with nothing compiled, and once more."""
    figures = {}
    with tempfile.TemporaryDirectory(prefix="bench_step.") as cache:
        for key in ("first_replay_s", "first_replay_warm_s"):
            words = ["--parts", "start", "--attention", args.attention]
            words += ["--microbatch", str(args.microbatch), "--chunk", str(args.chunk)]
            words += ["--profile"] * args.profile
            done = subprocess.run(
                [sys.executable, __file__, *words],
                env={
                    **os.environ,
                    "TORCHINDUCTOR_CACHE_DIR": cache,
                    "TRITON_CACHE_DIR": cache,
                    "BENCH_STARTED": str(time.time()),
                },
                stdout=subprocess.PIPE,
                check=True,
            )
            figures[key] = json.loads(done.stdout)["figures"]["seconds"]
            say(f"{key}: {figures[key]:.1f}")
    return figures


def measure_start(args: Namespace) -> dict[str, float]:
    """From the start of this process, imports and all, to the end of the first replay."""
    setup = Setup(QWEN_27B)
    shape = QWEN_27B.shape(tokens=49_152, anchors=2048)
    batch = random_batch(shape, documents=30, vocabulary=QWEN_27B.vocabulary)
    step = captured(setup, shape, args, batch)
    step(batch, lr=LR)
    torch.cuda.synchronize()
    seconds = time.time() - float(os.environ["BENCH_STARTED"])
    if args.profile:
        say(compile_times(repr="str", aggregate=True))
    return {"seconds": seconds}


def measure_27b(args: Namespace) -> dict[str, float]:
    setup = Setup(QWEN_27B)
    figures: dict[str, float] = {}
    step, batch, seconds = case(setup, args, tokens=4096, anchors=512, documents=1)
    figures |= spread("step_ms_T4096_A512", [s * 1e3 for s in seconds])
    for anchors in (2048, 8192):
        del step, batch
        torch.cuda.empty_cache()
        flop = QWEN_27B.useful_flop(tokens=49_152, anchors=anchors) / 1e12
        step, batch, seconds = case(setup, args, tokens=49_152, anchors=anchors, documents=30)
        figures |= spread(f"tflops_A{anchors}", [flop / s for s in seconds])
        figures[f"step_ms_A{anchors}"] = statistics.median(seconds) * 1e3
        if anchors == 2048:
            figures["host_ms_per_step"] = host_ms(step, batch, args)
            if args.profile:
                profile(step, batch)
    figures["anchors_per_s_A8192"] = 8192 / statistics.median(seconds)
    figures["memory_gb_A8192"] = torch.cuda.max_memory_reserved() / 1e9
    return figures


def host_ms(step: GraphStep, batch: Batch, args: Namespace) -> float:
    """What a step costs the host, which does not wait for it."""
    times = []
    for _ in range(args.repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step(batch, lr=LR)
        times.append((time.perf_counter() - began) * 1e3)
    torch.cuda.synchronize()
    return statistics.median(times)


def profile(step: GraphStep, batch: Batch) -> None:
    """Where the time of a replay goes, by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    with profiled(activities=[ProfilerActivity.CUDA]) as found:
        step(batch, lr=LR)
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda row: -row.device_time_total)
    for row in rows[:45]:
        say(f"{row.device_time_total / 1e3:8.2f} ms {row.count:5d} x {row.key[:110]}")


def measure_loops(args: Namespace) -> dict[str, float]:
    """The same body captured, compiled but launched op by op, and plain; in turns."""
    setup = Setup(QWEN_27B)
    shape = QWEN_27B.shape(tokens=49_152, anchors=2048)
    batch = random_batch(shape, documents=30, vocabulary=QWEN_27B.vocabulary)
    found = compare(setup, shape, batch, args, rounds=1)
    return {
        "captured_over_plain_eager": found["plain"] / found["captured"],
        "captured_over_compiled_27b": found["compiled"] / found["captured"],
        "plain_eager_step_ms": found["plain"] * 1e3,
    }


def measure_small(args: Namespace) -> dict[str, float]:
    setup = Setup(SMALL)
    shape = SMALL.shape(tokens=4096, anchors=256)
    batch = random_batch(shape, documents=4, vocabulary=SMALL.vocabulary)
    found = compare(setup, shape, batch, args, rounds=2)
    return {
        "captured_over_compiled_small": found["compiled"] / found["captured"],
        "captured_over_plain_small": found["plain"] / found["captured"],
        "small_step_ms": found["captured"] * 1e3,
    }


def compare(
    setup: Setup, shape: BatchShape, batch: Batch, args: Namespace, *, rounds: int
) -> dict[str, float]:
    """Median seconds of each way."""
    seconds: dict[str, list[float]] = {name: [] for name in ("captured", "compiled", "plain")}
    for _ in range(rounds):
        for name in seconds:
            step = way(name, setup, shape, batch, args)
            began = compilations()
            seconds[name] += replays(step, batch, args.repeats)
            say(f"{name}: {statistics.median(seconds[name]) * 1e3:.2f} ms, "
                f"{compilations() - began} compiled while timed")  # fmt: skip
            del step
            setup.optimizer.begin()
            torch.cuda.empty_cache()
    return {name: statistics.median(values) for name, values in seconds.items()}


def way(name: str, setup: Setup, shape: BatchShape, batch: Batch, args: Namespace) -> Any:
    if name == "captured":
        return captured(setup, shape, args, batch)
    pieces = fast_pieces(args) if name == "compiled" else plain_pieces(args)
    trainer: Trainer = setup.trainer(shape, pieces, **sizes(args))
    step = EagerStep(trainer)
    for _ in range(2):
        step(batch, lr=LR)
    return step


def measure_4b(args: Namespace) -> dict[str, float]:
    setup = Setup(QWEN_4B)
    _, _, seconds = case(setup, args, tokens=8192, anchors=1024, documents=2)
    return spread("step_ms_4b_T8192_A1024", [s * 1e3 for s in seconds])


def measure_disk(args: Namespace) -> dict[str, float]:
    from step_loop import measure_loop

    return measure_loop(args, fast_pieces(args), say, **sizes(args))


MEASURE: dict[str, Callable[[Namespace], dict[str, float]]] = {
    "ceiling": measure_ceiling,
    "first": measure_first,
    "start": measure_start,
    "27b": measure_27b,
    "loops": measure_loops,
    "4b": measure_4b,
    "small": measure_small,
    "disk": measure_disk,
}

if __name__ == "__main__":
    main()
