"""From options and a cache to everything that a run needs.  Refuses here what cannot work.

Letters: K target layers, T token slots, A anchors, B block size.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from dflash_cache.errors import ConfigError
from dflash_cache.reader import Reader
from dflash_cache.schema import FINAL_HIDDEN, TokenizerSpec
from dflash_cache.vocabulary import refuse_bad_mask_token
from dflash_fit.attention import DenseSight
from dflash_fit.backends import refuse_attention, sight_maker
from dflash_fit.batch import BatchShape
from dflash_fit.config import BLOCK_SIZE, MICROBATCH, NUM_LAYERS, FitConfig
from dflash_fit.course import Course, Lanes, Planned
from dflash_fit.density import auto_anchors
from dflash_fit.drafter import FULL, DFlashDraftModel, DrafterConfig
from dflash_fit.errors import FitError
from dflash_fit.follow import Followed
from dflash_fit.gradients import Gradients, gradients_of
from dflash_fit.graph import GraphStep, compiled
from dflash_fit.loader import PackSource, refuse_long_documents, split_documents
from dflash_fit.lookout import ORDER_FILE, read_order
from dflash_fit.loss import Objective
from dflash_fit.offline import choose_documents
from dflash_fit.optim import AdamWConfig, FlatAdamW
from dflash_fit.schedule import Schedule
from dflash_fit.step import EagerStep, Frozen, Pieces, StepConfig, Trainer
from dflash_fit.warm import Beginning, find_beginning, settled, sliding_layers
from dflash_fit.world import World, own_client


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What a run will be, before anything of it takes memory or time."""

    config: FitConfig
    world: World
    reader: Reader
    drafter: DrafterConfig
    beginning: Beginning | None
    plan: Planned  # of the whole cache
    course: Course  # the plan, unless the first epoch takes units as they come
    training: list[int]  # documents
    held_out: list[int]  # documents that are measured
    captured: bool

    @property
    def packs(self) -> int:
        """Of an update, over all ranks."""
        assert self.config.packs_per_step is not None
        return self.config.packs_per_step

    @property
    def lanes(self) -> Lanes:
        return Lanes(packs=self.packs, rank=self.world.rank, world=self.world.size)

    def source(self, config: FitConfig, *, course: Course | None = None) -> PackSource:
        """The packs of this rank, with the anchors of `config`."""
        final = [FINAL_HIDDEN] if config.loss == "kl" else []
        return PackSource(
            self.reader,
            self.training,
            layer_ids=[*self.drafter.target_layer_ids, *final],
            shape=shape_for(config, self.drafter, self.reader),
            seed=config.seed,
            passes=config.passes_per_pack,
            lanes=self.lanes,
            course=course or self.course,
        )

    @cached_property
    def steps(self) -> int:
        """Updates of the whole run; packs that are too few for one more are left out.

        Of the plan for a whole cache also where the first epoch takes units as they come: its
        packs may be a few more or less, and the learning rate needs a number at the start.
        """
        config = self.config
        source = self.source(replace(config, anchors=1), course=self.plan)
        steps = source.steps(config.epochs, most=config.max_steps)
        assert steps is not None
        if steps == 0 and config.max_steps != 0:
            packs = sum(self.plan.length(epoch) for epoch in range(config.epochs))
            raise FitError(
                f"--packs-per-step {self.packs}: all epochs together have only {packs} packed "
                "batches; lower it (the default is one for each GPU), or raise --epochs"
            )
        return steps


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that lives as long as the training does."""

    outline: Outline
    config: FitConfig
    source: PackSource
    drafter: DFlashDraftModel
    frozen: Frozen
    optimizer: FlatAdamW
    trainer: Trainer
    plain: Pieces  # not compiled, so that measuring between replays adds nothing to compile
    group: int  # anchors measured at once
    step: EagerStep | GraphStep
    schedule: Schedule
    steps: int
    training: dict[str, Any]

    @property
    def world(self) -> World:
        return self.outline.world

    @property
    def reader(self) -> Reader:
        return self.outline.reader

    @property
    def held_out(self) -> list[int]:
        return self.outline.held_out


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of, whatever the number of its anchors."""

    outline: Outline
    drafter: DFlashDraftModel
    frozen: Frozen
    optimizer: FlatAdamW
    pieces: Pieces

    def trainer(self, config: FitConfig) -> Trainer:
        """One that trains on the packs of this rank."""
        world = self.outline.world
        packs = self.outline.lanes.turns
        gradients = gradients_of(
            self.optimizer.parameters,
            world,
            packs=self.outline.packs,
            wire=PRECISIONS[precision_of_wire(config)],
            sharded=config.shard_optimizer,
        )
        return self._trainer(config, packs, gradients)

    def lone_trainer(self, config: FitConfig) -> Trainer:
        """One that takes no other rank along, to be timed."""
        return self._trainer(config, 1, None)

    def _trainer(self, config: FitConfig, packs: int, gradients: Gradients | None) -> Trainer:
        outline = self.outline
        settings = StepConfig(
            shape=shape_for(config, outline.drafter, outline.reader),
            objective=Objective(
                divergence=config.loss,
                slot_weights=config.slot_weights,
                gamma=config.decay_gamma,
            ),
            anchor_microbatch=config.microbatch(outline.world.device.type),
            loss_chunk=config.loss_chunk,
            packs=packs,
        )
        return Trainer(self.drafter, self.frozen, self.optimizer, settings, self.pieces, gradients)


def outline(config: FitConfig, reader: Reader, world: World) -> Outline:
    """What a run will be; refuses what cannot work before anything is made."""
    captured = captures(config, world.device)
    beginning = find_beginning(config, reader)
    config = settled(config, beginning)
    if config.packs_per_step is None:
        config = replace(config, packs_per_step=world.size)
    drafter = beginning.config if beginning else drafter_config_for(config, reader)
    refuse_what_cannot_run(config, reader, drafter, world, captured=captured)
    training, held_out = split_documents(reader, held_out=config.held_out)
    plan = Planned(
        training, reader.lengths, token_budget=config.token_budget, seed=config.seed_of_packs
    )
    followed = config.follow or config.unit_order is not None
    return Outline(
        config=config,
        world=world,
        reader=reader,
        drafter=drafter,
        beginning=beginning,
        plan=plan,
        course=followed_course(config, reader, training, world) if followed else plan,
        training=training,
        held_out=choose_documents(held_out, reader.lengths, max_tokens=config.eval_tokens),
        captured=captured,
    )


def prepare(outline: Outline) -> Run:
    """Build drafter, optimizer, data and step."""
    config, world = outline.config, outline.world
    steps = outline.steps
    parts = make_parts(outline)
    if config.anchors == "auto":
        config = world.share(measured_anchors(parts))  # every rank would measure something else
        outline = replace(outline, config=config)
        parts = replace(parts, outline=outline)
    trainer = parts.trainer(config)
    plain, group = for_measuring(config, world.device)
    return Run(
        outline=outline,
        config=config,
        source=outline.source(config),
        drafter=parts.drafter,
        frozen=parts.frozen,
        optimizer=parts.optimizer,
        trainer=trainer,
        plain=plain,
        group=group,
        step=GraphStep(trainer) if outline.captured else EagerStep(trainer),
        schedule=schedule_of(config, steps=steps),
        steps=steps,
        training=training_record(config, outline.reader, outline.beginning),
    )


def measured_anchors(parts: Parts) -> FitConfig:
    """The options with a number for the anchors, on rank 0."""
    outline = parts.outline
    if not outline.world.first:
        return outline.config
    with outline.world.pulse.resting():
        return auto_anchors(
            outline.config, outline.source, parts.lone_trainer, device=outline.world.device
        )


def followed_course(
    config: FitConfig, reader: Reader, training: list[int], world: World
) -> Followed:
    """Packs of the first epoch unit by unit."""
    known = config.out / ORDER_FILE
    order = known if known.is_file() else config.unit_order
    return Followed(
        reader,
        training,
        token_budget=config.token_budget,
        seed=config.seed_of_packs,
        order=read_order(order, reader) if order and world.first else (),
        store=own_client(world.store, "follow") if world.store and world.size > 1 else None,
        first=world.first,
    )


def precision_of_wire(config: FitConfig) -> str:
    """In which gradients travel between GPUs."""
    return config.precision if config.reduce == "auto" else config.reduce


PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}


def dtype_of(config: FitConfig) -> torch.dtype:
    return PRECISIONS[config.precision]


def captures(config: FitConfig, device: torch.device) -> bool:
    """Whether the step is captured: on a GPU, unless told otherwise."""
    if config.step == "graph" and device.type != "cuda":
        raise ConfigError(f"--step graph: a step on {device} cannot be captured; drop the option")
    return config.step != "eager" and device.type == "cuda"


def refuse_what_cannot_run(
    config: FitConfig,
    reader: Reader,
    drafter: DrafterConfig,
    world: World,
    *,
    captured: bool,
) -> None:
    device = world.device
    if config.anchors != "auto":
        config.microbatch(device.type)
    refuse_attention(config.attention, device, drafter, dtype=dtype_of(config), compiled=captured)
    refuse_long_documents(reader, token_budget=config.token_budget)
    refuse_missing_teacher(config, reader)


def make_parts(outline: Outline) -> Parts:
    config, world, beginning = outline.config, outline.world, outline.beginning
    dtype = dtype_of(config)
    drafter = new_drafter(outline.drafter, seed=config.seed, device=world.device)
    if beginning and beginning.tensors is not None:
        drafter.load_state_dict(beginning.tensors, strict=True)
    plain = Pieces(sight=sight_maker(config.attention, world.device))
    return Parts(
        outline=outline,
        drafter=drafter,
        frozen=load_frozen(outline.reader, dtype=dtype, device=world.device),
        optimizer=FlatAdamW(
            drafter,
            adamw_config(config),
            dtype=dtype,
            sharing=world if config.shard_optimizer and world.distributed else None,
        ),
        pieces=compiled(plain) if outline.captured else plain,
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


def refuse_missing_teacher(config: FitConfig, reader: Reader) -> None:
    if config.loss == "kl" and FINAL_HIDDEN not in reader.identity.planes:
        raise FitError(
            f"{config.cache}: keeps no final hidden state, and --loss kl needs the target's "
            "distribution; rebuild it with --final-hidden, or train with --loss ce"
        )


def shape_for(config: FitConfig, drafter: DrafterConfig, reader: Reader) -> BatchShape:
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


def drafter_config_for(config: FitConfig, reader: Reader) -> DrafterConfig:
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


def load_frozen(reader: Reader, *, dtype: torch.dtype, device: torch.device) -> Frozen:
    """Embedding and head on the device; a tied pair stays one tensor."""
    embedding, head = reader.frozen()
    tied = head is embedding
    embedding = embedding.to(device, dtype)
    return Frozen(embedding=embedding, head=embedding if tied else head.to(device, dtype))


def training_record(
    config: FitConfig, reader: Reader, beginning: Beginning | None
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
