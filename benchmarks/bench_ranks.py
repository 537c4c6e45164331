"""Many GPUs: what the gradients' way between them costs, and what each stage gains by more of them.

reduce   The captured step with the all-reduce in its graph beside the same step without it.  On one
         GPU the process group is of one.
train    The loop of `dflash fit` on a cache on the disk: the first GPU alone, then all of them.
extract  The units of all buckets by one worker, then by all, through the workers of a build.  A
         worker's rate counts while it has units; `_to_the_end` also while it waits for the last.
follow   Builders on some GPUs and trainers on others: each alone, then both at once, the trainers
         following the builders' cache.  Rates at once are of the time in which both were at work;
         `_over_one` is over one builder, or one trainer, alone.
tensor   A target that two GPUs share beside the same one on one: its states, and its speed.
kill     One rank killed with SIGKILL while all train: how soon all are gone, and what is told.

Shapes of the 27B model and random weights; runs neither measure nor save.  A part that fails or
takes longer than `--limit` is named in `failed`, and what it had found until then stays.

Calls meant to take less than ten minutes each:
2 GPUs   one for each of --parts reduce,kill,tensor  train  extract  follow
4 GPUs   --parts follow,train --build-devices 0-2 --fit-devices 3 --encodings fp8 --steps 8
         --limit-all 560
8 GPUs   --parts follow,train --build-devices 0-4 --fit-devices 5-7 --encodings fp8 --steps 8
         --limit-all 560; its largest cache takes 98 GB, and 195 with --encodings bf16
"""

import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from math import ceil, inf
from pathlib import Path
from typing import Any

from common import add_out, end_on_sigterm, publish, result, spread
from ranks_data import BROKEN, FULL, STOPPED, TINY, WORDS, Task, say
from ranks_rates import gb_per_s, rate, speed, tokens_between, train_lines

from dflash_cache.devices import device_names, gpus_here
from dflash_cache.errors import ConfigError, DFlashError

ENDINGS = {"bf16": "", "fp8": "_fp8"}  # encoding -> ending of its figures
ALL = ("reduce", "train", "kill", "extract", "follow", "tensor")
SEVERAL = ("follow", "tensor", "kill")  # parts that take two devices
# Fresh tokens that a trainer of a 27B model takes in the time in which a builder makes one.
TRAINER_OVER_BUILDER = 2.6

# Options that are not given: as long as it takes to see a rate, or as short as a rehearsal may be.
LARGE_RUN = {"repeats": 8, "steps": 14, "tokens": 250_000, "followed_tokens": 800_000}
SMALL_RUN = {"repeats": 3, "steps": 6, "tokens": 3000, "followed_tokens": 6000}

Figures = dict[str, float]


class Overdue(Exception):
    """A part took longer than it may."""


def main() -> int:
    began = time.monotonic()
    args = parse_args()
    end_on_sigterm()
    figures: Figures = {}
    done: list[str] = []
    failed: dict[str, str] = {}
    told: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="bench_ranks.", dir=args.folder) as folder:

        def tell() -> None:
            shape = {**shape_of(args), "parts": done, "failed": failed, **told}
            publish(result("ranks", shape, figures, folder=Path(folder)), args.out)

        for part in args.parts:
            say(f"--- {part}")
            task = task_of(part, args, Path(folder))
            try:
                with at_most(args.limit, within=began + args.limit_all):
                    PARTS[part].measure(task, args)
            except (DFlashError, Overdue, RuntimeError) as error:
                failed[part] = f"{type(error).__name__}: {error}"
                say(f"{part} failed: {failed[part]}")
            finally:
                # What a part had noted before it was ended counts as well.
                figures |= PARTS[part].figures(task, args)
                if (message := task.found("message")) is not None:
                    told["kill_message"] = message["text"]
                done.append(part)
                tell()
            if STOPPED in failed.get(part, ""):
                break  # who stops a part means the benchmark
    return 1 if failed else 0


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="all" if gpus_here() else "cpu", help="as 0,1 or 0-3")
    parser.add_argument("--parts", help="comma-separated; default: all that the devices allow")
    parser.add_argument("--build-devices", help="of the part follow; default: all but the last")
    parser.add_argument("--fit-devices", help="of the part follow; default: the last one")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to rehearse on a CPU")
    parser.add_argument("--encodings", default="bf16,fp8", help="comma-separated")
    parser.add_argument("--repeats", type=int, help="of a step or forward")
    parser.add_argument("--steps", type=int, help="of a run")
    parser.add_argument("--leave-out", type=int, default=2, help="lines of a run's log")
    parser.add_argument("--passes", type=int, help="over a pack, in the part follow")
    parser.add_argument(
        "--tokens", type=int, help="of a cache; of one that several build alone, for each of them"
    )
    parser.add_argument(
        "--followed-tokens", type=int, help="of a cache that is followed, for each builder"
    )
    parser.add_argument(
        "--page-cache",
        action="store_true",
        help="read as `dflash fit` does where a cache fits the memory, not past the page cache",
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="as --rank-timeout")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds that a part may take")
    parser.add_argument(
        "--limit-all", type=float, default=inf, help="seconds that all parts may take together"
    )
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="disk to measure")
    add_out(parser)
    args = parser.parse_args()
    shared = bool(args.build_devices and args.fit_devices)  # one device may be both
    try:
        settle_devices(args)
    except ConfigError as error:
        parser.error(str(error))
    wanted = args.parts.split(",") if args.parts else ALL
    if strange := set(wanted) - set(ALL):
        parser.error(f"--parts {args.parts}: no {min(strange)}; want some of {','.join(ALL)}")
    lonely = [part for part in wanted if part in SEVERAL and len(args.devices) < 2]
    if shared:
        lonely = [part for part in lonely if part != "follow"]
    if args.parts and lonely:
        hint = "; give --build-devices and --fit-devices" if "follow" in lonely else ""
        parser.error(f"--parts {args.parts}: {', '.join(lonely)} takes two devices or more{hint}")
    args.parts = [part for part in wanted if part not in lonely]
    lines = args.steps // (TINY if args.tiny else FULL).log_every
    if lines <= args.leave_out:
        parser.error(f"--steps {args.steps}: {lines} lines in the log, --leave-out takes them all")
    return args


def settle_devices(args: Namespace) -> None:
    """Names of devices for words of options."""
    gpus = gpus_here()
    args.devices = device_names(args.devices, gpus=gpus)
    for name, default in (
        ("build_devices", args.devices[:-1]),
        ("fit_devices", args.devices[-1:]),
    ):
        words = getattr(args, name)
        setattr(args, name, device_names(words, gpus=gpus) if words else default)
    if args.passes is None:
        ratio = len(args.fit_devices) / max(1, len(args.build_devices))
        args.passes = 1 if args.tiny else max(1, ceil(TRAINER_OVER_BUILDER * ratio))
    defaults = SMALL_RUN if args.tiny else LARGE_RUN
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.followed_tokens *= max(1, len(args.build_devices))


def task_of(part: str, args: Namespace, folder: Path) -> Task:
    return Task(
        part=part,
        folder=folder,
        scale=TINY if args.tiny else FULL,
        encodings=tuple(args.encodings.split(",")),
        repeats=args.repeats,
        steps=args.steps,
        leave_out=args.leave_out,
        passes=args.passes,
        tokens=args.tokens,
        followed_tokens=args.followed_tokens,
        direct=not args.page_cache,
        timeout=args.timeout,
    )


def shape_of(args: Namespace) -> dict[str, Any]:
    kept = ("devices", "build_devices", "fit_devices", "tiny", "repeats", "steps", "leave_out")
    kept += ("passes", "tokens", "followed_tokens", "page_cache")
    scale = TINY if args.tiny else FULL
    shapes = {name: getattr(scale, name) for name in ("reduce", "train", "follow")}
    return {
        "drafter": scale.drafter.name,
        **{name: getattr(args, name) for name in kept},
        **{f"{name}_T_A": shape for name, shape in shapes.items()},
        "tensor_layers": scale.tensor_layers,
        "flash_linear_attention": installed("flash-linear-attention"),
        "transformers": installed("transformers"),
    }


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "no"


@contextmanager
def at_most(seconds: float, *, within: float) -> Iterator[None]:
    """Raises `Overdue` in the block when it takes longer, or when the clock passes `within`."""
    left, option = min((seconds, "--limit"), (within - time.monotonic(), "--limit-all"))

    def late(*_: object) -> None:
        raise Overdue(f"ended after {max(0.0, round(left, 1)):g} s ({option})")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3))  # 0 would be never
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def train_on(devices: Sequence[str], work: Callable[..., dict[str, Any]], task: Task) -> None:
    """Have `work(world, task)` done by a rank on each device, as `dflash fit` does."""
    from dflash_fit.launch import fit_everywhere

    fit_everywhere(work, task, devices, timeout=task.timeout)


def cache_of(task: Task, encoding: str) -> Path:
    from ranks_build import random_cache

    return random_cache(task, encoding)


def word(count: int) -> str:
    return WORDS.get(count, str(count))


# --- reduce ---------------------------------------------------------------------------------------


def measure_reduce(task: Task, args: Namespace) -> None:
    from ranks_fit import reduce_work

    train_on(args.devices, reduce_work, task)


def reduce_figures(task: Task, args: Namespace) -> Figures:
    """Of the larger shape without its name, of others with it."""
    figures: Figures = {}
    for number, (tokens, anchors) in enumerate(task.scale.reduce):
        name, end = f"T{tokens}_A{anchors}", f"_T{tokens}_A{anchors}" if number else ""
        ms = {
            way: found["ms"]
            for way in ("alone", "bf16", "fp32", "sharded")
            if (found := task.found(f"{way}.{name}")) is not None
        }
        for way, values in ms.items():
            figures |= spread(f"step_ms_{way}{end}", values)
        for way, ending in (("bf16", ""), ("fp32", "_fp32"), ("sharded", "_sharded")):
            if ms.keys() >= {way, "alone"}:
                mine, lone = statistics.median(ms[way]), statistics.median(ms["alone"])
                figures[f"reduce_over_alone{ending}{end}"] = mine / lone
                figures[f"reduce_adds_ms{ending}{end}"] = mine - lone
        for way, ending in (("bf16", ""), ("sharded", "_sharded")):
            if (found := task.found(f"memory.{way}.{name}")) is not None:
                figures[f"reserved_gb_per_gpu{ending}{end}"] = found["reserved_gb"]
                figures[f"state_gb_per_gpu{ending}{end}"] = found["state_gb"]
    for wire, ending in (("bf16", ""), ("fp32", "_fp32")):
        if (found := task.found(f"all_reduce.{wire}")) is not None:
            median = statistics.median(found["ms"])
            figures[f"allreduce_ms{ending}"] = median
            figures[f"allreduce_gb_s{ending}"] = found["gb"] / median * 1e3
    return figures


# --- train ----------------------------------------------------------------------------------------


def measure_train(task: Task, args: Namespace) -> None:
    from ranks_fit import train_work

    for encoding in task.encodings:
        cache_of(task, encoding)
    train_on(args.devices, train_work, task)


def train_figures(task: Task, args: Namespace) -> Figures:
    """`_unwaited` are tokens a second of the time in which no GPU waited for the disk."""
    count, figures = len(args.devices), {}
    for encoding, end in each_encoding(task):
        found = {n: task.found(f"{encoding}.{n}") for n in sorted({1, count})}
        for n, run in found.items():
            if run is not None:
                figures[f"train_tokens_per_s_{n}{end}"] = run["tokens_per_s"]
                figures[f"train_anchors_per_s_{n}{end}"] = run["anchors_per_s"]
                figures[f"train_waiting_{n}{end}"] = run["waiting"]
                figures[f"train_gb_s_needed_{n}{end}"] = run["gb_per_s_needed"]
                figures[f"train_recompiles_{n}{end}"] = run["recompiles"]
                figures[f"train_steps_{n}{end}"] = run["steps"]
        one, all_ = found[1], found[count]
        if count > 1 and one and all_:
            key = f"{word(count)}_gpu_speedup_train"
            figures[f"{key}{end}"] = all_["tokens_per_s"] / one["tokens_per_s"]
            figures[f"{key}_unwaited{end}"] = unwaited(all_) / unwaited(one)
    return figures


def unwaited(run: dict[str, Any]) -> float:
    return float(run["tokens_per_s"] / max(1e-9, 1 - run["waiting"]))


def each_encoding(task: Task) -> list[tuple[str, str]]:
    return [(encoding, ENDINGS.get(encoding, f"_{encoding}")) for encoding in task.encodings]


# --- extract --------------------------------------------------------------------------------------


def measure_extract(task: Task, args: Namespace) -> None:
    from ranks_build import extract_work, perform

    perform(extract_work, task, [(device,) for device in args.devices])


def extract_figures(task: Task, args: Namespace) -> Figures:
    count, figures = len(args.devices), {}
    for encoding, end in each_encoding(task):
        found = {n: task.found(f"{encoding}.{n}") for n in sorted({1, count})}
        for n, run in found.items():
            if run is not None:
                figures[f"extract_tokens_per_s_{n}{end}"] = run["tokens_per_s"]
                figures[f"extract_gb_s_written_{n}{end}"] = run["gb_per_s"]
        one, all_ = found[1], found[count]
        if count > 1 and one and all_:
            key = f"{word(count)}_gpu_speedup_extract"
            figures[f"{key}{end}"] = all_["tokens_per_s"] / one["tokens_per_s"]
            figures[f"{key}_to_the_end{end}"] = all_["to_the_end"] / one["to_the_end"]
    return figures


# --- follow ---------------------------------------------------------------------------------------


def measure_follow(task: Task, args: Namespace) -> None:
    from ranks_build import build_beside
    from ranks_fit import follow_work

    for cache in task.folder.glob("cache.*"):
        shutil.rmtree(cache)  # of earlier parts; those of this one are large
    refuse_small_disk(task, len(args.build_devices))
    groups = [(device,) for device in args.build_devices]
    context = multiprocessing.get_context("spawn")
    builder = context.Process(target=build_beside, args=(os.getpid(), task, groups))
    builder.start()
    try:
        train_on(args.fit_devices, follow_work, task)
        builder.join(60)
    except BaseException as error:
        task.note(BROKEN, why=f"the trainer ended: {error}")
        raise
    finally:
        if builder.is_alive():
            builder.terminate()
        builder.join()
    if builder.exitcode:
        raise RuntimeError(f"the builder ended with exit code {builder.exitcode}")


def refuse_small_disk(task: Task, builders: int) -> None:
    """The caches of this part are larger than any other here; there is one at a time."""
    model = task.scale.drafter
    tokens = max(task.followed_tokens, builders * task.tokens)
    size = 2 if "bf16" in task.encodings else 1
    needed = tokens * model.target_layers * model.hidden * size
    free = shutil.disk_usage(task.folder).free
    if needed > 0.95 * free:
        raise RuntimeError(
            f"{task.folder}: a followed cache of {tokens:,} tokens takes {needed / 1e9:.0f} GB, "
            f"{free / 1e9:.0f} are free; give --followed-tokens less, --encodings fp8, or another "
            "--folder"
        )


def follow_figures(task: Task, args: Namespace) -> Figures:
    figures: Figures = {}
    for encoding, end in each_encoding(task):
        built, runs = {}, {}
        for name in ("one", "alone", "beside"):
            if (phase := task.found(f"{encoding}.built.{name}")) is not None:
                built[name] = phase
            if (run := task.found(f"{encoding}.trained.{name}")) is not None:
                runs[name] = run["lines"]
        found = apart(built, runs, task)
        if runs.keys() & built.keys() >= {"alone", "beside"}:
            found |= at_once(built, runs, task)
        figures |= {f"{key}{end}": value for key, value in found.items()}
    return figures


def apart(built: dict[str, Any], runs: dict[str, Any], task: Task) -> Figures:
    """Builders and trainers without each other: all of them, and one where there are several."""
    figures: Figures = {}
    for name in ("one", "alone"):
        if name in built:
            figures[f"follow_build_{name}_tokens_per_s"] = rate(built[name])
            figures[f"follow_gb_s_written_{name}"] = gb_per_s(built[name])
        if name in runs:
            found = speed(runs[name][task.leave_out :])
            figures[f"follow_fit_{name}_tokens_per_s"] = found["tokens_per_s"]
            figures[f"follow_waiting_{name}"] = found["waiting"]
    for kind in ("build", "fit"):
        one, all_ = (figures.get(f"follow_{kind}_{name}_tokens_per_s") for name in ("one", "alone"))
        if one and all_:
            figures[f"follow_{kind}_alone_over_one"] = all_ / one
    return figures


def at_once(built: dict[str, Any], runs: dict[str, Any], task: Task) -> Figures:
    """Of the lines of the trainer's log that fall into the time in which the builders worked."""
    build, every = built["beside"], runs["beside"]
    stopped = min(own["ended"] for own in build["workers"])
    lines = every[task.leave_out :]
    lines = [line for line in lines if line["time"] <= stopped]
    taken = sum(line["tokens"] for line in every) / task.passes
    figures = {"follow_share_taken": taken / build["tokens"], "follow_lines_at_once": len(lines)}
    if not lines:
        say("builders and trainers were never at work at once; give --followed-tokens more")
        return figures
    found = speed(lines)
    finish, span = lines[-1]["time"], found["seconds"]
    begin = finish - span
    tokens = tokens_between(build, begin, finish)
    per_token = build["bytes"] / build["tokens"]
    fit_rate = found["tokens_per_s"]
    build_rate = tokens / span
    # Where there is one of a kind, all of that kind are one.
    build_one, build_alone = (rate(built.get(name, built["alone"])) for name in ("one", "alone"))
    fit_one, fit_alone = (
        speed(runs.get(name, runs["alone"])[task.leave_out :]) for name in ("one", "alone")
    )
    return figures | {
        "follow_build_tokens_per_s": build_rate,
        "follow_build_tokens_per_s_per_gpu": build_rate / len(build["workers"]),
        "follow_fit_tokens_per_s": fit_rate,
        "follow_fit_anchors_per_s": found["anchors_per_s"],
        "follow_build_ratio": build_rate / build_alone,
        "follow_build_over_one": build_rate / build_one,
        "follow_fit_ratio": fit_rate / fit_alone["tokens_per_s"],
        "follow_fit_over_one": fit_rate / fit_one["tokens_per_s"],
        "follow_fit_anchors_over_one": found["anchors_per_s"] / fit_one["anchors_per_s"],
        "follow_waiting": found["waiting"],
        "follow_gb_s_written": build_rate * per_token / 1e9,
        "follow_gb_s_read": fit_rate / task.passes * per_token / 1e9,
        "follow_seconds_at_once": span,
    }


# --- tensor ---------------------------------------------------------------------------------------


def measure_tensor(task: Task, args: Namespace) -> None:
    from ranks_build import perform, tensor_work

    perform(tensor_work, task, [tuple(args.devices[:2])])


def tensor_figures(task: Task, args: Namespace) -> Figures:
    figures: Figures = {}
    for name in ("shared", "alone"):
        if (found := task.found(name)) is not None:
            figures[f"tensor_tokens_per_s_{name}"] = found["tokens_per_s"]
    for name in ("apart", "noise"):
        if (found := task.found(name)) is not None:
            figures |= {f"tensor_{name}_{key}": value for key, value in found.items()}
    if figures.keys() >= {"tensor_tokens_per_s_shared", "tensor_tokens_per_s_alone"}:
        figures["tensor_speedup"] = (
            figures["tensor_tokens_per_s_shared"] / figures["tensor_tokens_per_s_alone"]
        )
    return figures


# --- kill -----------------------------------------------------------------------------------------


def measure_kill(task: Task, args: Namespace) -> None:
    from ranks_fit import kill_work

    cache_of(task, task.encodings[0])
    over = threading.Event()
    killer = threading.Thread(target=kill_last_rank, args=(task, over), daemon=True)
    killer.start()
    try:
        train_on(args.devices, kill_work, task)
    except DFlashError as error:
        message = str(error)
    else:
        raise RuntimeError("a rank was killed, and the others ended well")
    finally:
        over.set()
        killer.join()
    killed = task.found("killed")
    if killed is None:
        raise RuntimeError(f"the ranks ended before one was killed: {message}")
    while any(map(alive, task.wait_for("pids")["pids"])):
        time.sleep(0.02)
    seconds = time.time() - killed["at"]
    task.note("gone", seconds=seconds, names=f"rank {killed['rank']} " in message)
    task.note("message", text=message)
    say(f"all were gone {seconds:.1f} s after rank {killed['rank']} was killed: {message}")


def kill_last_rank(task: Task, over: threading.Event) -> None:
    """As soon as its run has logged a few steps."""
    out = task.folder / "run.killed"
    while len(train_lines(out)) < 3:
        if over.wait(0.02):
            return
    pids = task.wait_for("pids")["pids"]
    task.note("killed", rank=len(pids) - 1, at=time.time())
    os.kill(pids[-1], signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def kill_figures(task: Task, args: Namespace) -> Figures:
    found = task.found("gone")
    return {"kill_seconds": found["seconds"], "kill_named": found["names"]} if found else {}


# --- all ------------------------------------------------------------------------------------------


class Part:
    """How a part is measured, and its figures from what was noted."""

    def __init__(
        self,
        measure: Callable[[Task, Namespace], None],
        figures: Callable[[Task, Namespace], Figures],
    ) -> None:
        self.measure, self.figures = measure, figures


PARTS = {
    "reduce": Part(measure_reduce, reduce_figures),
    "train": Part(measure_train, train_figures),
    "extract": Part(measure_extract, extract_figures),
    "follow": Part(measure_follow, follow_figures),
    "tensor": Part(measure_tensor, tensor_figures),
    "kill": Part(measure_kill, kill_figures),
}

if __name__ == "__main__":
    sys.exit(main())
