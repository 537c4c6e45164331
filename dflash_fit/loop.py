"""Stage two as a paragraph: open the run, train pack by pack, measure, keep the best.

Letters: K target layers, T token slots, A anchors, B block size.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

from dflash_cache.disk import full_disk_is_told
from dflash_cache.errors import ConfigError
from dflash_cache.reader import CacheReader
from dflash_cache.schema import TokenizerSpec
from dflash_cache.target import pick_device
from dflash_cache.vocabulary import refuse_bad_mask_token
from dflash_fit import checkpoint
from dflash_fit.batch import Batch, BatchShape
from dflash_fit.checkpoint import START, RunState
from dflash_fit.config import FitConfig
from dflash_fit.drafter import FULL, SLIDING, DFlashDraftModel, DrafterConfig
from dflash_fit.errors import FitError
from dflash_fit.loader import Loader, PackSource, refuse_long_documents, split_documents
from dflash_fit.offline import choose_documents, offline_acceptance
from dflash_fit.optim import AdamWConfig, FlatAdamW, learning_rate
from dflash_fit.step import EagerStep, Frozen, StepConfig

Stop = Callable[[int], bool]  # asked after every step


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that lives as long as the training does."""

    config: FitConfig
    reader: CacheReader
    source: PackSource
    held_out: list[int]
    drafter: DFlashDraftModel
    frozen: Frozen
    optimizer: FlatAdamW
    step: EagerStep
    device: torch.device
    steps: int
    training: dict[str, Any]


def fit(config: FitConfig, *, stop: Stop | None = None) -> dict[str, Any]:
    """Train a drafter, or continue where the run folder stands; returns a summary.

    `stop(step)` ends the run after a step as a signal would: saved, to be continued.
    """
    reader = CacheReader(config.cache)
    checkpoint.open_run(config, fingerprint=reader.identity.fingerprint)
    run = prepare(config, reader)
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


def prepare(config: FitConfig, reader: CacheReader) -> Run:
    """Build drafter, optimizer, data and step; refuse what cannot work before anything runs."""
    device = pick_device(config.device)
    refuse_long_documents(reader, token_budget=config.token_budget)
    training, held_out = split_documents(reader, held_out=config.held_out)
    drafter_config = drafter_config_for(config, reader)
    shape = BatchShape(
        target_layers=len(drafter_config.target_layer_ids),
        token_budget=config.token_budget,
        hidden_size=drafter_config.hidden_size,
        anchors=config.anchors,
        block_size=config.block_size,
    )
    dtype = checkpoint.torch_dtype(config.precision)
    drafter = DFlashDraftModel(drafter_config)
    drafter.initialize(torch.Generator().manual_seed(config.seed))
    drafter.to(device)
    optimizer = FlatAdamW(
        drafter,
        AdamWConfig(
            beta1=config.beta1,
            beta2=config.beta2,
            weight_decay=config.weight_decay,
            clip=config.clip,
        ),
        dtype=dtype,
    )
    source = PackSource(
        reader,
        training,
        layer_ids=drafter_config.target_layer_ids,
        shape=shape,
        seed=config.seed,
    )
    planned = source.steps(config.epochs)
    frozen = load_frozen(reader, dtype=dtype, device=device)
    step_config = StepConfig(
        shape=shape,
        gamma=config.decay_gamma,
        anchor_microbatch=min(config.anchor_microbatch, config.anchors),
        loss_chunk=config.loss_chunk,
    )
    return Run(
        config=config,
        reader=reader,
        source=source,
        held_out=choose_documents(held_out, reader.lengths, max_tokens=config.eval_tokens),
        drafter=drafter,
        frozen=frozen,
        optimizer=optimizer,
        step=EagerStep(drafter, frozen, optimizer, step_config),
        device=device,
        steps=planned if config.max_steps is None else min(planned, config.max_steps),
        training=training_record(config, reader),
    )


def drafter_config_for(config: FitConfig, reader: CacheReader) -> DrafterConfig:
    """The drafter's shape: what the options say, otherwise the target's."""
    identity, target = reader.identity, reader.identity.target_spec
    layer_ids = tuple(config.target_layers or identity.target_layer_ids)
    absent = [i for i in layer_ids if i not in identity.target_layer_ids]
    if absent:
        raise FitError(
            f"{config.cache}: holds target layers {identity.target_layer_ids}, not {absent}; "
            "choose among them or rebuild the cache"
        )
    width = config.intermediate_size or target.intermediate_size
    if width is None:
        raise ConfigError("this target has no dense FFN to take the width of; give one with "
                          "--intermediate-size")  # fmt: skip
    kinds = [SLIDING if config.sliding_window else FULL] * (config.num_layers - 1) + [FULL]
    return DrafterConfig(
        hidden_size=identity.hidden_size,
        intermediate_size=width,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads or target.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads or target.num_key_value_heads,
        head_dim=config.head_dim or target.head_dim,
        vocab_size=target.vocab_size,
        num_target_layers=target.num_layers,
        target_layer_ids=layer_ids,
        block_size=config.block_size,
        mask_token_id=mask_token_for(config, identity.tokenizer_spec, rows=target.vocab_size),
        rope_theta=target.rope_theta,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        layer_types=tuple(kinds),
        sliding_window=config.sliding_window,
    )


def mask_token_for(config: FitConfig, tokenizer: TokenizerSpec, *, rows: int) -> int:
    """The option, checked, or the cache's choice."""
    if config.mask_token_id is not None:
        refuse_bad_mask_token(tokenizer, config.mask_token_id, embedding_rows=rows)
        return config.mask_token_id
    if tokenizer.mask_token_id is None:
        raise ConfigError(
            f"{config.cache}: the tokenizer uses every row of the embedding, so no mask token is "
            "safe by itself; name one with --mask-token-id"
        )
    return tokenizer.mask_token_id


def load_frozen(reader: CacheReader, *, dtype: torch.dtype, device: torch.device) -> Frozen:
    """Embedding and head on the device; a tied pair stays one tensor."""
    embedding, head = reader.frozen()
    tied = head is embedding
    embedding = embedding.to(device, dtype)
    return Frozen(embedding=embedding, head=embedding if tied else head.to(device, dtype))


def training_record(config: FitConfig, reader: CacheReader) -> dict[str, Any]:
    """What a drafter folder says about where it comes from."""
    identity = reader.identity
    return {
        "cache_fingerprint": identity.fingerprint,
        "target": identity.target["name"],
        "target_config_sha256": identity.target["config_sha256"],
        "target_weights_sha256": identity.target["weights_sha256"],
        "tokenizer_sha256": identity.tokenizer["sha256"],
        "chat_template_sha256": identity.tokenizer["chat_template_sha256"],
        "data_sha256": identity.data_sha256,
        "held_out": config.held_out,
        "token_budget": config.token_budget,
        "seed": config.seed,
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
    torch.cuda.current_stream().synchronize()
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
