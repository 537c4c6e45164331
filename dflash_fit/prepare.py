"""From options and a cache to everything that a run needs.  Refuses here what cannot work.

Letters: K target layers, T token slots, A anchors, B block size.
"""

from dataclasses import dataclass
from typing import Any

import torch

from dflash_cache.devices import pick_device
from dflash_cache.errors import ConfigError
from dflash_cache.reader import CacheReader
from dflash_cache.schema import FINAL_HIDDEN, TokenizerSpec
from dflash_cache.vocabulary import refuse_bad_mask_token
from dflash_fit.attention import DenseSight
from dflash_fit.backends import refuse_attention, sight_maker
from dflash_fit.batch import BatchShape
from dflash_fit.config import BLOCK_SIZE, MICROBATCH, NUM_LAYERS, FitConfig
from dflash_fit.density import auto_anchors
from dflash_fit.drafter import FULL, DFlashDraftModel, DrafterConfig
from dflash_fit.errors import FitError
from dflash_fit.graph import GraphStep, compiled
from dflash_fit.loader import PackSource, refuse_long_documents, split_documents
from dflash_fit.loss import Objective
from dflash_fit.offline import choose_documents
from dflash_fit.optim import AdamWConfig, FlatAdamW
from dflash_fit.schedule import Schedule
from dflash_fit.step import EagerStep, Frozen, Pieces, StepConfig, Trainer
from dflash_fit.warm import Beginning, find_beginning, settled, sliding_layers


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
    trainer: Trainer
    plain: Pieces  # not compiled, so that measuring between replays adds nothing to compile
    group: int  # anchors measured at once
    step: EagerStep | GraphStep
    schedule: Schedule
    device: torch.device
    steps: int
    training: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of, whatever the number of its anchors."""

    reader: CacheReader
    training: list[int]  # documents
    drafter: DFlashDraftModel
    frozen: Frozen
    optimizer: FlatAdamW
    pieces: Pieces
    device: torch.device

    def source(self, config: FitConfig) -> PackSource:
        final = [FINAL_HIDDEN] if config.loss == "kl" else []
        return PackSource(
            self.reader,
            self.training,
            layer_ids=[*self.drafter.config.target_layer_ids, *final],
            shape=shape_for(config, self.drafter.config, self.reader),
            seed=config.seed,
            passes=config.passes_per_pack,
        )

    def trainer(self, config: FitConfig) -> Trainer:
        settings = StepConfig(
            shape=shape_for(config, self.drafter.config, self.reader),
            objective=Objective(
                divergence=config.loss,
                slot_weights=config.slot_weights,
                gamma=config.decay_gamma,
            ),
            anchor_microbatch=config.microbatch(self.device.type),
            loss_chunk=config.loss_chunk,
            packs=config.packs_per_step,
        )
        return Trainer(self.drafter, self.frozen, self.optimizer, settings, self.pieces)


def prepare(config: FitConfig, reader: CacheReader) -> Run:
    """Build drafter, optimizer, data and step; refuse what cannot work before anything runs."""
    device = pick_device(config.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # kernels of our own run on the current one
    captured = captures(config, device)
    beginning = find_beginning(config, reader)
    config = settled(config, beginning)
    drafter_config = beginning.config if beginning else drafter_config_for(config, reader)
    refuse_what_cannot_run(config, reader, drafter_config, device, captured=captured)
    training, held_out = split_documents(reader, held_out=config.held_out)
    drafter = new_drafter(drafter_config, seed=config.seed, device=device)
    if beginning and beginning.tensors is not None:
        drafter.load_state_dict(beginning.tensors, strict=True)
    parts = make_parts(config, reader, drafter, training, device, captured=captured)
    if config.anchors == "auto":
        config = auto_anchors(config, parts.source, parts.trainer, device=device)
    source, trainer = parts.source(config), parts.trainer(config)
    steps = steps_of(config, source)
    plain, group = for_measuring(config, device)
    return Run(
        config=config,
        reader=reader,
        source=source,
        held_out=choose_documents(held_out, reader.lengths, max_tokens=config.eval_tokens),
        drafter=parts.drafter,
        frozen=parts.frozen,
        optimizer=parts.optimizer,
        trainer=trainer,
        plain=plain,
        group=group,
        step=GraphStep(trainer) if captured else EagerStep(trainer),
        schedule=schedule_of(config, steps=steps),
        device=device,
        steps=steps,
        training=training_record(config, reader, beginning),
    )


def dtype_of(config: FitConfig) -> torch.dtype:
    return torch.bfloat16 if config.precision == "bf16" else torch.float32


def captures(config: FitConfig, device: torch.device) -> bool:
    """Whether the step is captured: on a GPU, unless told otherwise."""
    if config.step == "graph" and device.type != "cuda":
        raise ConfigError(f"--step graph: a step on {device} cannot be captured; drop the option")
    return config.step != "eager" and device.type == "cuda"


def refuse_what_cannot_run(
    config: FitConfig,
    reader: CacheReader,
    drafter: DrafterConfig,
    device: torch.device,
    *,
    captured: bool,
) -> None:
    if config.anchors != "auto":
        config.microbatch(device.type)
    refuse_attention(config.attention, device, drafter, dtype=dtype_of(config), compiled=captured)
    refuse_long_documents(reader, token_budget=config.token_budget)
    refuse_missing_teacher(config, reader)


def make_parts(
    config: FitConfig,
    reader: CacheReader,
    drafter: DFlashDraftModel,
    training: list[int],
    device: torch.device,
    *,
    captured: bool,
) -> Parts:
    dtype = dtype_of(config)
    plain = Pieces(sight=sight_maker(config.attention, device))
    return Parts(
        reader=reader,
        training=training,
        drafter=drafter,
        frozen=load_frozen(reader, dtype=dtype, device=device),
        optimizer=FlatAdamW(drafter, adamw_config(config), dtype=dtype),
        pieces=compiled(plain) if captured else plain,
        device=device,
    )


def for_measuring(config: FitConfig, device: torch.device) -> tuple[Pieces, int]:
    """Pieces that are not compiled, and how many anchors go through them at once.

    Outside the compiler flex attention makes the scores of all pairs and heads.  In its place
    comes a dense mask, which only says of all pairs who sees whom, and of fewer blocks.
    """
    group = config.microbatch(device.type)
    if config.attention == "flex":
        return Pieces(sight=DenseSight.of), min(group, MICROBATCH["cpu"])
    return Pieces(sight=sight_maker(config.attention, device)), group


def steps_of(config: FitConfig, source: PackSource) -> int:
    """Updates of the whole run; packs that are too few for one more are left out."""
    packs = source.steps(config.epochs)
    if packs < config.packs_per_step:
        raise FitError(
            f"--packs-per-step {config.packs_per_step}: all epochs together have only {packs} "
            "packed batches; lower it, or raise --epochs"
        )
    steps = packs // config.packs_per_step
    return steps if config.max_steps is None else min(steps, config.max_steps)


def refuse_missing_teacher(config: FitConfig, reader: CacheReader) -> None:
    if config.loss == "kl" and FINAL_HIDDEN not in reader.identity.planes:
        raise FitError(
            f"{config.cache}: keeps no final hidden state, and --loss kl needs the target's "
            "distribution; rebuild it with --final-hidden, or train with --loss ce"
        )


def shape_for(config: FitConfig, drafter: DrafterConfig, reader: CacheReader) -> BatchShape:
    assert isinstance(config.anchors, int), config.anchors
    return BatchShape(
        target_layers=len(drafter.target_layer_ids),
        token_budget=config.token_budget,
        hidden_size=drafter.hidden_size,
        anchors=config.anchors,
        block_size=drafter.block_size,
        encoding=reader.identity.encoding,
        final_hidden=config.loss == "kl",
    )


def schedule_of(config: FitConfig, *, steps: int) -> Schedule:
    return Schedule(
        kind=config.schedule,
        steps=steps,
        peak=config.lr,
        warmup=config.warmup,
        cooldown=config.cooldown,
        floor=config.final_lr,
    )


def new_drafter(config: DrafterConfig, *, seed: int, device: torch.device) -> DFlashDraftModel:
    """A drafter with its first weights, which depend on the seed and not on the device."""
    drafter = DFlashDraftModel(config)
    drafter.initialize(torch.Generator().manual_seed(seed))
    return drafter.to(device)


def adamw_config(config: FitConfig) -> AdamWConfig:
    return AdamWConfig(
        beta1=config.beta1,
        beta2=config.beta2,
        weight_decay=config.weight_decay,
        clip=config.clip,
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
    layers = config.num_layers or NUM_LAYERS
    kinds = sliding_layers(layers) if config.sliding_window else (FULL,) * layers
    return DrafterConfig(
        hidden_size=identity.hidden_size,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=config.num_attention_heads or target.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads or target.num_key_value_heads,
        head_dim=config.head_dim or target.head_dim,
        vocab_size=target.vocab_size,
        num_target_layers=target.num_layers,
        target_layer_ids=layer_ids,
        block_size=config.block_size or BLOCK_SIZE,
        mask_token_id=mask_token_for(config, identity.tokenizer_spec, rows=target.vocab_size),
        rope_theta=target.rope_theta,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        layer_types=kinds,
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


def training_record(
    config: FitConfig, reader: CacheReader, beginning: Beginning | None
) -> dict[str, Any]:
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
        **({"init_from": beginning.record} if beginning else {}),
    }
