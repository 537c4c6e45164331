"""Stage two as a paragraph: open the run, train pack by pack, measure, keep the best."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from dflash_cache.disk import full_disk_is_told
from dflash_cache.reader import CacheReader
from dflash_fit import checkpoint
from dflash_fit.batch import Batch
from dflash_fit.checkpoint import START, RunState
from dflash_fit.config import FitConfig
from dflash_fit.loader import Loader
from dflash_fit.offline import offline_acceptance
from dflash_fit.optim import learning_rate
from dflash_fit.prepare import Run, prepare

Stop = Callable[[int], bool]  # asked after every step


def fit(config: FitConfig, *, stop: Stop | None = None) -> dict[str, Any]:
    """Train a drafter, or continue where the run folder stands; returns a summary.

    `stop(step)` ends the run after a step as a signal would: saved, to be continued.
    """
    reader = CacheReader(config.cache)
    run = prepare(config, reader)
    # Only now: a run that could not be prepared leaves no folder behind.
    checkpoint.open_run(config, identity=reader.identity)
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
    config = run.config
    remaining = run.steps - state.step
    loader = Loader(run.source, state.position, steps=remaining, pinned=run.device.type == "cuda")
    device_batch = (
        None if run.device.type == "cpu" else Batch.empty(run.source.shape, device=run.device)
    )
    saved, clock = state.step, _Clock(loader)
    bar = tqdm(total=run.steps, initial=state.step, desc="fit", unit="step", disable=None)
    for batch, position in loader:
        lr = learning_rate(state.step, steps=run.steps, peak=config.lr, warmup=config.warmup)
        run.step(_on_device(batch, device_batch), lr=lr)
        state = replace(state, step=state.step + 1, epoch=position.epoch, index=position.index)
        bar.update()
        last = state.step == run.steps
        if state.step % config.log_every == 0 or last:
            log(run, state, lr, clock, bar)
        if state.step % config.eval_every == 0 or last:
            state, saved = measure(run, state), state.step
            clock.restart()
        elif state.step % config.checkpoint_every == 0:
            save(run, state)
            saved = state.step
        if stop(state.step):
            break
    bar.close()
    if saved != state.step:
        save(run, state)
    return state


def _on_device(batch: Batch, device_batch: Batch | None) -> Batch:
    """The host batch itself on a CPU; otherwise its copy, complete when this returns."""
    if device_batch is None:
        return batch
    device_batch.copy_(batch)
    # The loader fills this host batch again as soon as it gets it back.
    torch.cuda.current_stream(device_batch.hidden.device).synchronize()
    return device_batch


class _Clock:
    """Seconds and waiting since the last log line."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.restart()

    def restart(self) -> None:
        self.began, self.waited = time.perf_counter(), self.loader.waited

    def read(self) -> tuple[float, float]:
        """Seconds, and the share of them spent waiting for the reader."""
        seconds = time.perf_counter() - self.began
        waiting = (self.loader.waited - self.waited) / max(seconds, 1e-9)
        self.restart()
        return seconds, waiting


def log(run: Run, state: RunState, lr: float, clock: _Clock, bar: "tqdm[Any]") -> None:
    """One line into metrics.jsonl, and a short one for people."""
    values = run.step.metrics.read()
    seconds, waiting = clock.read()
    line = {
        "kind": "train",
        "step": state.step,
        "epoch": state.epoch,
        "lr": lr,
        **values,
        "tokens_per_s": values["tokens"] / seconds,
        "anchors_per_s": values["anchors"] / seconds,
        "waiting": waiting,
        "skipped_updates": int(run.optimizer.skipped),
    }
    checkpoint.append_metrics(run.config.out, line)
    bar.set_postfix_str(
        f"loss {values['loss']:.3f} acc {values['accuracy']:.3f} "
        f"{line['tokens_per_s']:.0f} tok/s waiting {waiting:.0%}",
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
        anchor_group=run.step.config.anchor_microbatch,
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
