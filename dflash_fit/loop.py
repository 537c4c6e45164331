"""Stage two as a paragraph: open the run, train pack by pack, measure, keep the best."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from tqdm import tqdm

from dflash_cache.disk import full_disk_is_told
from dflash_cache.reader import CacheReader
from dflash_fit import checkpoint
from dflash_fit.checkpoint import START, RunState
from dflash_fit.config import FitConfig
from dflash_fit.feed import Feed
from dflash_fit.graph import Capture, GraphStep
from dflash_fit.offline import offline_acceptance
from dflash_fit.prepare import Run, prepare
from dflash_fit.roofline import Gauge

Stop = Callable[[int], bool]  # asked after every step


def fit(config: FitConfig, *, stop: Stop | None = None) -> dict[str, Any]:
    """Train a drafter, or continue where the run folder stands; returns a summary.

    `stop(step)` ends the run after a step as a signal would: saved, to be continued.
    """
    reader = CacheReader(config.cache)
    run = prepare(checkpoint.as_begun(config), reader)
    # Only now: a run that could not be prepared leaves no folder behind.
    checkpoint.open_run(run.config, identity=reader.identity)
    with full_disk_is_told(config.out, "Earlier checkpoints are kept."), stop_signals() as asked:
        state = resume(run)
        if state.step == 0 and state.best_step is None:
            state = measure(run, state)
        state = train(run, state, lambda step: asked() or (stop is not None and stop(step)))
    return {
        "run": str(config.out),
        "step": state.step,
        "steps": run.steps,
        "finished": state.step >= run.steps,
        "best_step": state.best_step,
        "acceptance_length": state.best_acceptance,
        "skipped_updates": int(run.optimizer.skipped),
        "parameters": len(run.optimizer.master),
        "training_samples": len(run.source.documents),
        "held_out_samples": len(run.held_out),
    }


def resume(run: Run) -> RunState:
    """The state of the newest checkpoint, put back; the start where there is none."""
    found = checkpoint.checkpoints(run.config.out)
    if not found:
        return START
    out = run.config.out
    state = checkpoint.load_checkpoint(found[-1], run.optimizer)
    checkpoint.forget_metrics_after(out, state.step)
    if state.best_step is not None and checkpoint.step_folder(out, state.best_step).is_dir():
        # A crash between checkpoint and link leaves the link behind.
        checkpoint.mark_best(out, checkpoint.step_folder(out, state.best_step))
    return state


def train(run: Run, state: RunState, stop: Stop) -> RunState:
    """Train from a state to the end, or until `stop` says so; what it returns is saved."""
    config, packs = run.config, run.config.packs_per_step
    saved = state.step
    bar = tqdm(total=run.steps, initial=state.step, desc="fit", unit="step", disable=None)
    steps = (run.steps - state.step) * packs
    with Feed(run.source, state.position, steps=steps, device=run.device) as feed, bar:
        gauge = Gauge(feed)
        for number, (batch, position) in enumerate(feed):
            if isinstance(run.step, GraphStep) and not run.step.graphs:
                tell_capture(run, state, run.step.capture(batch))
                gauge.restart()
            turn, lr = number % packs, run.schedule.rate(state.step)
            run.step(batch, lr=lr, turn=turn, taken=feed.release)
            if turn < packs - 1:
                continue
            state = replace(state, step=state.step + 1, **asdict(position))
            bar.update()
            last = state.step == run.steps
            if state.step % config.log_every == 0 or last:
                log(run, state, lr, gauge, bar)
            if state.step % config.eval_every == 0 or last:
                state, saved = measure(run, state), state.step
                gauge.restart()
            elif state.step % config.checkpoint_every == 0:
                save(run, state)
                saved = state.step
                gauge.restart()
            if stop(state.step):
                break
        if saved != state.step:
            save(run, state)
    return state


def tell_capture(run: Run, state: RunState, capture: Capture) -> None:
    """How long the first replay took to come, on record and for people."""
    line = {"kind": "capture", "step": state.step, **asdict(capture)}
    checkpoint.append_metrics(run.config.out, line)
    tqdm.write(
        f"captured the step in {capture.seconds:.1f} s: {capture.captures} CUDA graph(s), "
        f"{capture.compiled} functions compiled, {capture.memory / 1e9:.1f} GB",
        file=sys.stderr,
    )


def log(run: Run, state: RunState, lr: float, gauge: Gauge, bar: "tqdm[Any]") -> None:
    """One line into metrics.jsonl, and a short one for people."""
    values = run.trainer.metrics.read()  # waits for the device: the seconds are the work's
    reading = gauge.read()
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
        "skipped_updates": int(run.optimizer.skipped),
    }
    checkpoint.append_metrics(run.config.out, line)
    bar.set_postfix_str(
        f"loss {values['loss']:.3f} acc {values['accuracy']:.3f} "
        f"{line['tokens_per_s']:.0f} tok/s; {reading.words}",
        refresh=False,
    )


def measure(run: Run, state: RunState) -> RunState:
    """Offline acceptance on the held-out samples, a checkpoint, and `best` if it is."""
    began = time.perf_counter()
    run.drafter.eval()
    values = offline_acceptance(
        run.drafter,
        run.frozen,
        run.reader,
        run.held_out,
        shape=run.source.shape,
        device=run.device,
        anchor_group=run.group,
        pieces=run.plain,
    )
    run.drafter.train()
    length = values["acceptance_length"]
    line = {"kind": "eval", "step": state.step, **values, "seconds": time.perf_counter() - began}
    checkpoint.append_metrics(run.config.out, line)
    tqdm.write(
        f"step {state.step}: held-out acceptance length {length:.3f} "
        f"({values['documents']} samples)",
        file=sys.stderr,
    )
    if state.best_step is None or length > state.best_acceptance:
        state = replace(state, best_step=state.step, best_acceptance=length)
    save(run, state)
    return state


def save(run: Run, state: RunState) -> None:
    """Write a checkpoint, point `best` at it if it is the best, clear old ones away."""
    out = run.config.out
    record = {**run.training, "step": state.step}
    path = checkpoint.save_checkpoint(out, run.drafter, run.optimizer, state, record)
    if state.best_step == state.step:
        checkpoint.mark_best(out, path)
    checkpoint.clear_old(out, keep_last=run.config.keep_last)


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """SIGINT and SIGTERM ask the run to save and end after the current step."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = {
        number: signal.signal(number, lambda got, _frame: caught.append(got))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield lambda: bool(caught)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
