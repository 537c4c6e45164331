"""What ranks do in `bench_ranks`: single steps with and without the others, and runs of the loop.

A run is that of `dflash fit`, but for what it does before and beside its steps: first weights,
embedding and head are drawn on the device (a CPU takes a minute for them), nothing is measured
and nothing saved.
"""

import gc
import itertools
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import step_data
import torch
from ranks_data import BESIDE, LR, STOPPED, Task, fit_config, following, say
from ranks_rates import speed, train_lines
from step_data import Setup, make_frozen, random_batch
from torch import Tensor, distributed

from dflash_cache import reader
from dflash_fit import checkpoint, loop, prepare
from dflash_fit.backends import sight_maker
from dflash_fit.batch import Batch, BatchShape
from dflash_fit.config import FitConfig
from dflash_fit.drafter import DFlashDraftModel
from dflash_fit.errors import FitError
from dflash_fit.gradients import Gradients, gradients_of
from dflash_fit.graph import GraphStep, compiled
from dflash_fit.optim import FlatAdamW
from dflash_fit.step import EagerStep, Pieces, Trainer
from dflash_fit.world import World, own_client

WIRES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def use_device(world: World) -> None:
    """Drafters and batches of `step_data` are made on the device of this process."""
    step_data.DEVICE = world.device
    if world.device.type == "cuda":
        # Every shape is another specialisation of the same few functions.
        torch._dynamo.config.recompile_limit = 64


def synchronize(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- single steps ---------------------------------------------------------------------------------


def reduce_work(world: World, task: Task) -> dict[str, Any]:
    """The same step alone and with all ranks, in turns; and with a shared optimizer state."""
    use_device(world)
    pieces = Pieces(sight=sight_maker("auto", world.device))
    if world.device.type == "cuda":
        pieces = compiled(pieces)
    setup = Setup(task.scale.drafter)
    for tokens, anchors in task.scale.reduce:
        with world.pulse.resting(), one_pool():
            compare_steps(world, task, setup, pieces, tokens=tokens, anchors=anchors)
        setup.optimizer.begin()
        free_memory()
    with world.pulse.resting():
        all_reduce_alone(world, task, setup.optimizer)
        setup.optimizer = FlatAdamW(
            setup.drafter, setup.optimizer.config, dtype=torch.bfloat16, sharing=world
        )
        free_memory()
        tokens, anchors = task.scale.reduce[0]
        compare_steps(world, task, setup, pieces, tokens=tokens, anchors=anchors)
    return {}


@contextmanager
def one_pool() -> Iterator[None]:
    """All graphs share their memory: they are replayed one after the other."""
    if not torch.cuda.is_available():
        yield
        return
    pool = torch.cuda.graph_pool_handle()
    with mock.patch.object(torch.cuda, "graph_pool_handle", return_value=pool):
        yield


def compare_steps(
    world: World, task: Task, setup: Setup, pieces: Pieces, *, tokens: int, anchors: int
) -> None:
    """Times every way to step on one batch, turn by turn; the slowest rank counts."""
    shape = setup.model.shape(tokens=tokens, anchors=anchors)
    batch = random_batch(
        shape,
        documents=max(1, tokens // 1600),
        vocabulary=setup.model.vocabulary,
        seed=world.rank,
    )
    name, shared = f"T{tokens}_A{anchors}", setup.optimizer.sharing is not None
    memory = Memory(world)
    ways: dict[str, GraphStep | EagerStep] = {}
    for way in ("sharded",) if shared else ("bf16", "alone", "fp32"):
        gradients = None if way == "alone" else gradients_of(
            setup.optimizer.parameters,
            world,
            packs=world.size,
            wire=WIRES.get(way, torch.bfloat16),
            sharded=shared,
        )  # fmt: skip
        ways[way] = made_step(setup, task, shape, pieces, gradients, batch)
        if world.first and len(ways) == 1:
            memory.note(task, f"memory.{way}.{name}", setup.optimizer)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _, (way, step) in itertools.product(range(task.repeats), ways.items()):
        seconds[way].append(max(world.gather(timed_step(world, step, batch))))
    if world.first:
        for way, values in seconds.items():
            task.note(f"{way}.{name}", ms=[value * 1e3 for value in values])
        say(f"{name}: " + ", ".join(
            f"{way} {statistics.median(values) * 1e3:.2f} ms" for way, values in seconds.items()
        ))  # fmt: skip


def made_step(
    setup: Setup,
    task: Task,
    shape: BatchShape,
    pieces: Pieces,
    gradients: Gradients | None,
    batch: Batch,
) -> GraphStep | EagerStep:
    plain = setup.trainer(shape, pieces, microbatch=task.scale.microbatch)
    trainer = Trainer(
        plain.drafter, plain.frozen, plain.optimizer, plain.config, plain.pieces, gradients
    )
    if batch.input_ids.device.type == "cpu":
        step: GraphStep | EagerStep = EagerStep(trainer)
    else:
        step = GraphStep(trainer)
        capture = step.capture(batch)
        say(f"captured in {capture.seconds:.1f} s, {capture.memory / 1e9:.1f} GB")
    step(batch, lr=LR)
    return step


def timed_step(world: World, step: GraphStep | EagerStep, batch: Batch) -> float:
    world.barrier()
    synchronize(world)
    began = time.perf_counter()
    step(batch, lr=LR)
    synchronize(world)
    return time.perf_counter() - began


class Memory:
    """The most that a GPU has reserved since this was made; nothing of it on a CPU."""

    def __init__(self, world: World) -> None:
        self.device = world.device
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def note(self, task: Task, name: str, optimizer: FlatAdamW) -> None:
        reserved = 0
        if self.device.type == "cuda":
            reserved = torch.cuda.max_memory_reserved(self.device)
        state = sum(flat.nbytes for flat in optimizer.flats().values())
        task.note(name, reserved_gb=reserved / 1e9, state_gb=state / 1e9)


def all_reduce_alone(world: World, task: Task, optimizer: FlatAdamW) -> None:
    """The gradients of all parameters, travelling with nothing beside them."""
    sizes = [parameter.numel() for parameter in optimizer.parameters]
    for name, wire in WIRES.items():
        flat = torch.zeros(optimizer.length, dtype=wire, device=world.device)
        parts, values = torch.split(flat, sizes), []
        for _ in range(2 + task.repeats):
            seconds = timed_all_reduce(world, parts)
            values.append(max(world.gather(seconds)) * 1e3)
        if world.first:
            median = statistics.median(values[2:])
            task.note(f"all_reduce.{name}", ms=values[2:], gb=flat.nbytes / 1e9)
            say(f"all-reduce of {flat.nbytes / 1e9:.2f} GB in {name}: {median:.2f} ms")


def timed_all_reduce(world: World, parts: tuple[Tensor, ...]) -> float:
    world.barrier()
    synchronize(world)
    began = time.perf_counter()
    works = [distributed.all_reduce(part, async_op=True) for part in parts]
    for work in works:
        assert work is not None
        work.wait()
    synchronize(world)
    return time.perf_counter() - began


# --- runs -----------------------------------------------------------------------------------------


@contextmanager
def quick_runs(task: Task) -> Iterator[None]:
    """Runs that begin soon, and stop for nothing."""
    model, append = task.scale.drafter, checkpoint.append_metrics

    def new_drafter(config: Any, *, seed: int, device: torch.device) -> DFlashDraftModel:
        with device:
            drafter = DFlashDraftModel(config)
        drafter.initialize(torch.Generator(device).manual_seed(seed))
        return drafter

    def with_time(run: Path, line: dict[str, Any]) -> None:
        append(run, {**line, "time": time.time()})

    with ExitStack() as stack:
        for module, name, instead in (
            (prepare, "new_drafter", new_drafter),
            (prepare, "load_frozen", lambda *_, **__: make_frozen(model)),
            (loop, "measure", lambda life, state: state),
            (loop, "save", lambda life, state: None),
            (checkpoint, "append_metrics", with_time),
        ):
            stack.enter_context(mock.patch.object(module, name, instead))
        if task.direct:
            stack.enter_context(mock.patch.object(reader, "outgrows_memory", return_value=True))
        yield


def run(
    world: World, task: Task, config: FitConfig, *, stop: Callable[[int], bool] = loop.never
) -> list[dict[str, Any]]:
    """Train, and return the lines of its log; leaves nothing in memory or on the disk."""
    with quick_runs(task):
        loop.train_in(world, config, stop=stop)
    free_memory()
    world.barrier()
    lines = train_lines(config.out)
    world.barrier()
    if world.first:
        shutil.rmtree(config.out)
    return lines


def alone(world: World) -> World:
    """This process without the others, as on one device."""
    return World.alone(world.device)


def together(world: World, name: str) -> World:
    """A world for one of several runs of this process; without a group where that is of one."""
    if world.size == 1:
        return alone(world)
    assert world.store is not None
    return replace(world, store=own_client(world.store, name))


def by_the_first(world: World, work: Callable[[World], None]) -> None:
    """Have the first of several ranks do something alone; the others wait."""
    if world.size == 1:
        return
    if world.first:
        with world.pulse.resting():
            work(alone(world))
    world.barrier()


def told_speed(name: str, found: dict[str, Any]) -> None:
    say(f"{name}: {found['tokens_per_s']:,.0f} tokens/s, waiting {found['waiting']:.1%}, "
        f"{found['lines']} lines in {found['seconds']:.1f} s")  # fmt: skip


def train_work(world: World, task: Task) -> dict[str, Any]:
    """By the first rank alone, the others idle; and by all of them."""
    use_device(world)
    for encoding in task.encodings:
        cache = task.folder / f"cache.{encoding}"
        config = fit_config(task, cache, task.folder / f"run.{encoding}", task.scale.train)
        by_the_first(world, partial(train_noted, task=task, config=config, name=f"{encoding}.1"))
        train_noted(together(world, encoding), task, config, f"{encoding}.{world.size}")
    return {}


def train_noted(world: World, task: Task, config: FitConfig, name: str) -> None:
    lines = run(world, task, config)
    if world.first:
        if not lines or lines[-1]["step"] < task.steps:
            raise FitError(f"{name}: {STOPPED} a signal, which a run takes as a wish to be saved")
        found = speed(lines[task.leave_out :])
        task.note(name, **found)
        told_speed(f"train {name}", found)


# --- beside a builder -----------------------------------------------------------------------------


class BuilderDone:
    """Asks a run to end when the builder has."""

    def __init__(self, task: Task, name: str) -> None:
        self.task, self.name = task, name

    def __call__(self, step: int) -> bool:
        return not self.task.scale.tiny and self.task.found(self.name) is not None


def follow_work(world: World, task: Task) -> dict[str, Any]:
    """On a sealed cache with the builders idle, by one of several ranks and by all of them; and on
    one that they are building.
    """
    use_device(world)
    for encoding in task.encodings:
        cache = task.folder / f"alone.{encoding}"
        config = fit_config(task, cache, task.folder / "run.alone", task.scale.follow)
        config = replace(config, passes_per_pack=task.passes)
        if world.first:
            task.note(f"{encoding}.go.alone")
        with world.pulse.resting():
            task.wait_for(f"{encoding}.built.alone")
        one = partial(trained, task=task, config=config, name=f"{encoding}.trained.one")
        by_the_first(world, one)
        own = together(world, f"{encoding}.alone")
        trained(own, task, config, f"{encoding}.trained.alone")
        if world.first:
            shutil.rmtree(cache)
            task.note(f"{encoding}.go.beside")
        cache, built = task.folder / f"beside.{encoding}", f"{encoding}.built.beside"
        config = replace(config, cache=str(cache), out=task.folder / BESIDE)
        own = together(world, f"{encoding}.beside")
        stop = BuilderDone(task, built)
        trained(own, task, following(config), f"{encoding}.trained.beside", stop=stop)
        if world.first:
            task.wait_for(built)
            shutil.rmtree(cache)
    return {}


def trained(
    world: World,
    task: Task,
    config: FitConfig,
    name: str,
    *,
    stop: Callable[[int], bool] = loop.never,
) -> None:
    """A run whose log is noted."""
    lines = run(world, task, config, stop=stop)
    if world.first:
        task.note(name, lines=lines)
        if counted := lines[task.leave_out :]:
            told_speed(f"follow {name}", speed(counted))


# --- one rank dies --------------------------------------------------------------------------------


def kill_work(world: World, task: Task) -> dict[str, Any]:
    """Train until somebody ends it."""
    use_device(world)
    pids = world.gather(os.getpid())
    if world.first:
        task.note("pids", pids=pids)
    (cache,) = [task.folder / f"cache.{encoding}" for encoding in task.encodings[:1]]
    config = fit_config(task, cache, task.folder / "run.killed", task.scale.train)
    run(together(world, "kill"), task, replace(config, max_steps=1000, log_every=1))
    return {}
