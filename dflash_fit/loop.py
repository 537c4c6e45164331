"""Stage two as a paragraph: open the run, train pack by pack, measure, keep the best."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

import torch
from tqdm import tqdm

from dflash_cache import lock, ranks
from dflash_cache.devices import gpus_here, group_of_rank, worker_groups
from dflash_cache.disk import full_disk_is_told
from dflash_cache.errors import ConfigError, DFlashError
from dflash_cache.growing import open_cache
from dflash_cache.reader import Reader
from dflash_cache.signals import heard_by
from dflash_fit import checkpoint
from dflash_fit.agreement import Agreement
from dflash_fit.checkpoint import START, RunState
from dflash_fit.config import FitConfig
from dflash_fit.errors import FitError
from dflash_fit.estimate import Estimate
from dflash_fit.feed import Feed
from dflash_fit.follow import Followed
from dflash_fit.graph import Capture, GraphStep
from dflash_fit.launch import fit_as_rank, fit_everywhere, joining
from dflash_fit.lookout import ORDER_FILE
from dflash_fit.metrics import means
from dflash_fit.offline import offline_acceptance
from dflash_fit.preflight import preflight, tell_before
from dflash_fit.prepare import Outline, Run, outline, prepare
from dflash_fit.roofline import Gauge, together
from dflash_fit.saver import Saver
from dflash_fit.sound import glance
from dflash_fit.trackers import Trackers, open_trackers, require_trackers
from dflash_fit.world import World

Stop = Callable[[int], bool]  # asked after every step


def never(step: int) -> bool:
    return False


def fit(config: FitConfig, *, stop: Stop = never) -> dict[str, Any]:
    """Train a drafter, or continue where the run folder stands; returns a summary.

    On one device in this process; on several of this machine in a process for each; as one rank of
    many where torchrun or srun has started this process.  `stop(step)` ends the run after a step
    as a signal would: saved, to be continued.  It is a function of a module.
    """
    work, timeout = partial(train_in, stop=stop), config.rank_timeout
    rank = ranks.find_rank(os.environ)
    if rank is not None:
        with joining(rank):
            require_trackers(config.trackers)
            own = device_of_rank(config, rank)
        return fit_as_rank(work, config, rank, own, timeout=timeout)
    require_trackers(config.trackers)
    devices = devices_of(config)
    if len(devices) > 1:
        return fit_everywhere(work, config, devices, timeout=timeout)
    device = torch.device(devices[0])
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels of our own run on the current one
    return work(World.alone(device), config)


def dry_run(config: FitConfig) -> Estimate:
    """What a run with these options takes; nothing is written, and nothing of it is made."""
    if config.anchors == "auto":
        raise ConfigError(
            "--dry-run: --anchors auto is measured when a run begins; give a number to see what "
            "it takes"
        )
    rank = ranks.find_rank(os.environ)
    devices = devices_of(config) if rank is None else [device_of_rank(config, rank)]
    size = len(devices) if rank is None else rank.world
    world = World(rank=0, size=size, device=torch.device(devices[0]))
    reader = open_cache(config.cache, follow=config.follow)
    return preflight(outline(checkpoint.as_begun(config), reader, world))


def devices_of(config: FitConfig) -> list[str]:
    groups = worker_groups(config.devices, tensor_parallel=1, gpus=gpus_here())
    return [device for (device,) in groups]


def device_of_rank(config: FitConfig, rank: ranks.Rank) -> str:
    (device,) = group_of_rank(
        config.devices,
        tensor_parallel=1,
        gpus=gpus_here(),
        local_rank=rank.local,
        own_gpus=rank.own_gpus,
    )
    return device


def reader_of(config: FitConfig) -> Reader:
    return open_cache(config.cache, follow=config.follow)


def train_in(
    world: World,
    config: FitConfig,
    *,
    stop: Stop = never,
    halt: int | None = None,
    open_reader: Callable[[FitConfig], Reader] = reader_of,
) -> dict[str, Any]:
    """The whole run, by one of the ranks that train together.

    `halt` is a step after which it ends for now, measured and saved.
    """
    config = world.share(checkpoint.as_begun(config) if world.first else config)
    with world.pulse.resting():
        reader = opened_cache(world, config, open_reader)
        plan = outline(config, reader, world)
    with followed(plan), stop_signals(plan) as asked:
        with world.pulse.resting():
            # A reader that is shared is not to be timed; who shares it has told what that takes.
            tells = world.first and open_reader is reader_of
            if tells and config.anchors != "auto":
                tell_before(plan)
            run = prepare(plan)
            if tells and config.anchors == "auto":
                tell_before(run.outline)
        # Only now: a run that could not be prepared leaves no folder behind.
        with (
            opened(run),
            full_disk_is_told(config.out, "Earlier checkpoints are kept."),
            Saver(
                config.out, world, keep_last=config.keep_last, keep_every=config.keep_every
            ) as saver,
        ):
            state = resume(run)
            with live_numbers(run, state) as trackers:
                life = Life(
                    run=run,
                    saver=saver,
                    agreement=Agreement(world),
                    trackers=trackers,
                    stop=lambda step: asked() or stop(step),
                    halt=run.steps if halt is None else min(halt, run.steps),
                )
                state = state or measure(life, START)
                state = train(life, state)
                saver.wait()
    return summary(run, state)


def opened_cache(
    world: World, config: FitConfig, open_reader: Callable[[FitConfig], Reader]
) -> Reader:
    """The cache; where a builder has to be waited for, rank 0 does so first, and alone tells it."""
    if config.follow and not world.first:
        world.barrier()
    reader = open_reader(config)
    if config.follow and world.first:
        world.barrier()
    return reader


@dataclass(frozen=True, kw_only=True)
class Life:
    """A run, and what it lives with."""

    run: Run
    saver: Saver
    agreement: Agreement
    trackers: Trackers
    stop: Stop  # this rank's wish
    halt: int  # the step that is the last for now

    def tell(self, line: dict[str, Any]) -> None:
        """Into metrics.jsonl and wherever else numbers go, by rank 0."""
        if self.run.world.first:
            checkpoint.append_metrics(self.run.config.out, line)
            self.trackers.log(line)


def summary(run: Run, state: RunState) -> dict[str, Any]:
    return {
        "run": str(run.config.out),
        "step": state.step,
        "steps": run.steps,
        "finished": state.step >= run.steps,
        "best_step": state.best_step,
        "acceptance_length": state.best_acceptance,
        "skipped_updates": int(run.optimizer.skipped),
        "parameters": run.optimizer.length,
        "ranks": run.world.size,
        "training_samples": len(run.outline.training),
        "held_out_samples": len(run.held_out),
    }


@contextmanager
def opened(run: Run) -> Iterator[None]:
    """Rank 0 makes the run folder, or checks it, and keeps others off; the rest see it then."""
    run.world.barrier()  # all could prepare the run
    with ExitStack() as held:
        if run.world.first:
            held.enter_context(lock.held(run.config.out, doing="dflash fit"))
            checkpoint.open_run(run.config, identity=run.reader.identity)
            if isinstance(run.outline.course, Followed):
                run.outline.course.keep_order(run.config.out / ORDER_FILE)
        run.world.barrier()
        yield


def live_numbers(run: Run, state: RunState | None) -> Trackers:
    """Where rank 0 sends its numbers; what a resumed run measures again is not shown twice."""
    return open_trackers(
        run.config.trackers if run.world.first else (),
        run=run.config.out,
        options=checkpoint.resolve(run.config, identity=run.reader.identity),
        step=None if state is None else state.step,
    )


def resume(run: Run) -> RunState | None:
    """The state of the newest checkpoint that is whole, put back; None where there is none."""
    out, world = run.config.out, run.world
    with world.pulse.resting():  # every byte of it is read, and then by all
        path = world.share(find_checkpoint(run) if world.first else None)
        state = None if path is None else checkpoint.restore(path, run.optimizer)
    if state is None:
        if world.first:
            checkpoint.forget_metrics_after(out, -1)
        return None
    if world.first:
        checkpoint.forget_metrics_after(out, state.step)
        if state.best_step is not None:
            best = checkpoint.step_folder(out, state.best_step)
            if glance(best) is None:
                # A crash between checkpoint and link leaves the link behind.
                checkpoint.mark_best(out, best)
    return state


def find_checkpoint(run: Run) -> Any:
    choice = checkpoint.newest_sound(run.config.out)
    for line in checkpoint.put_away(choice):
        tqdm.write(line, file=sys.stderr)
    return choice.path


def train(life: Life, state: RunState) -> RunState:
    """Train from a state to the end, or until a rank wants to stop; what it returns is saved."""
    run, world = life.run, life.run.world
    config, turns, saved = run.config, run.trainer.config.packs, state.step
    bar = tqdm(
        total=run.steps,
        initial=state.step,
        desc="fit",
        unit="step",
        disable=None if world.first else True,
    )
    steps = max(0, life.halt - state.step)
    with Feed(run.source, state.position, steps=steps, device=world.device) as feed, bar:
        gauge = Gauge(feed)
        for batch, turn, behind in patiently(feed, run):
            world.pulse.tick(state.step)
            if isinstance(run.step, GraphStep) and not run.step.graphs:
                with world.pulse.resting():
                    tell_capture(life, state, run.step.capture(batch))
                gauge.restart()
            lr = run.schedule.rate(state.step)
            run.step(batch, lr=lr, turn=turn, taken=feed.release)
            if turn < turns - 1:
                continue
            state = replace(state, step=state.step + 1, **asdict(behind))
            bar.update()
            last = state.step == life.halt
            if state.step % config.log_every == 0 or last:
                log(life, state, lr, gauge, bar)
            if state.step % config.eval_every == 0 or last:
                state, saved = measure(life, state), state.step
                gauge.restart()
            elif state.step % config.checkpoint_every == 0:
                save(life, state)
                saved = state.step
                gauge.restart()
            if life.agreement.any(life.stop(state.step)):
                break
        life.agreement.drain()
        if saved != state.step:
            save(life, state)
    if feed.ended is not None and isinstance(feed.ended.reason, DFlashError):
        life.saver.wait()
        raise feed.ended.reason
    return state


def patiently(feed: Feed, run: Run) -> Iterable[Any]:
    """The feed; a wait for the builder may take as long as it takes."""
    if not isinstance(run.outline.course, Followed):
        return feed
    return _rested(feed, run.world)


def _rested(feed: Feed, world: World) -> Iterator[Any]:
    items = iter(feed)
    while True:
        with world.pulse.resting():
            item = next(items, None)
        if item is None:
            return
        yield item


def tell_capture(life: Life, state: RunState, capture: Capture) -> None:
    """How long the first replay took to come, on record and for people."""
    life.tell({"kind": "capture", "step": state.step, **asdict(capture)})
    if life.run.world.first:
        tqdm.write(
            f"captured the step in {capture.seconds:.1f} s: {capture.captures} CUDA graph(s), "
            f"{capture.compiled} functions compiled, {capture.memory / 1e9:.1f} GB",
            file=sys.stderr,
        )


def log(life: Life, state: RunState, lr: float, gauge: Gauge, bar: "tqdm[Any]") -> None:
    """One line into metrics.jsonl, and a short one for people; ends what learns nothing."""
    run = life.run
    taken = run.trainer.metrics.take()  # waits for the device: the seconds are the work's
    found = run.world.gather((taken, gauge.read()))
    values, reading = means([sums for sums, _ in found]), together([r for _, r in found])
    line = {
        "kind": "train",
        "step": state.step,
        "epoch": state.epoch,
        "lr": lr,
        **values,
        "tokens_per_s": values["tokens"] / reading.seconds,
        "anchors_per_s": values["anchors"] / reading.seconds,
        **reading.to_dict(),
        **(run.step.counts() if isinstance(run.step, GraphStep) else {}),
        "ranks": run.world.size,
        "steps": run.steps,
        **memory(run.world),
        "skipped_updates": int(run.optimizer.skipped),
    }
    life.tell(line)
    bar.set_postfix_str(
        f"loss {values['loss']:.3f} acc {values['accuracy']:.3f} "
        f"{line['tokens_per_s']:.0f} tok/s; {reading.words}",
        refresh=False,
    )
    refuse_endless_skips(run, state)


def memory(world: World) -> dict[str, float]:
    """Of the device of rank 0, where it has its own."""
    if world.device.type != "cuda":
        return {}
    return {"memory_gb": torch.cuda.max_memory_reserved(world.device) / 1e9}


def refuse_endless_skips(run: Run, state: RunState) -> None:
    """A run whose updates are all skipped only heats the room."""
    row = int(run.optimizer.skipped_in_a_row)
    if row >= run.config.max_skipped:
        raise FitError(
            f"{run.config.out}: loss or gradient was not finite in {row} updates in a row, up to "
            f"step {state.step}; all were skipped (--max-skipped {run.config.max_skipped}) and the "
            "checkpoints are as good as before. Lower --lr, or look at the data of these steps "
            "with `dflash cache verify`"
        )


def measure(life: Life, state: RunState) -> RunState:
    """Offline acceptance on the held-out samples, a checkpoint, and `best` if it is.

    While the cache is still being built, of those samples that the run knows of; they are not
    compared with others, so they do not make a best one.
    """
    run, began = life.run, time.perf_counter()
    documents = measurable(run, state)
    if documents:
        run.drafter.eval()
        values = offline_acceptance(
            run.drafter,
            run.frozen,
            run.reader,
            documents,
            shape=run.source.shape,
            world=run.world,
            anchor_group=run.group,
            pieces=run.plain,
            progress=partial(run.world.pulse.tick, state.step),
        )
        run.drafter.train()
        length, all_of_them = values["acceptance_length"], documents == run.held_out
        seconds = time.perf_counter() - began
        line = {"kind": "eval", "step": state.step, **values, "complete": all_of_them}
        life.tell({**line, "seconds": seconds})
        if run.world.first:
            tqdm.write(
                f"step {state.step}: held-out acceptance length {length:.3f} "
                f"({values['documents']} samples{'' if all_of_them else ' of those built so far'})",
                file=sys.stderr,
            )
        if all_of_them and (state.best_step is None or length > state.best_acceptance):
            state = replace(state, best_step=state.step, best_acceptance=length)
    save(life, state)
    return state


def measurable(run: Run, state: RunState) -> list[int]:
    course = run.outline.course
    if isinstance(course, Followed):
        return course.measurable(state.position, run.held_out)
    return run.held_out


def save(life: Life, state: RunState) -> None:
    """Begin to write a checkpoint; `best` points at it if it is the best."""
    run = life.run
    record = {**run.training, "step": state.step}
    best = state.best_step == state.step
    life.saver.save(run.drafter, run.optimizer, state, record, best=best)


@contextmanager
def followed(plan: Outline) -> Iterator[None]:
    """Look after a cache that is still being built, as long as the block runs."""
    if isinstance(plan.course, Followed):
        with plan.course:
            yield
    else:
        yield


@contextmanager
def stop_signals(plan: Outline) -> Iterator[Callable[[], bool]]:
    """SIGINT and SIGTERM ask the run to save and end after the current step.

    A second SIGINT ends it at once: what is saved is saved.  One that this process ignores it does
    not hear, as in the background of a script.
    """
    caught: list[int] = []

    def hear(number: int, _frame: FrameType | None) -> None:
        if caught and number == signal.SIGINT:
            os._exit(128 + number)
        caught.append(number)
        if isinstance(plan.course, Followed):
            plan.course.stop()

    with heard_by(hear):
        yield lambda: bool(caught)
