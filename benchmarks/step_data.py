"""Drafters, batches and arithmetic for `bench_step`: random weights and states of real shapes."""

import itertools
from dataclasses import dataclass

import torch

from dflash_cache.encodings import encode
from dflash_fit.batch import Batch, BatchShape
from dflash_fit.drafter import FULL, DFlashDraftModel, DrafterConfig
from dflash_fit.loss import Objective
from dflash_fit.optim import AdamWConfig, FlatAdamW
from dflash_fit.step import Frozen, Pieces, StepConfig, Trainer
from dflash_fit.work import useful_flop

DEVICE = torch.device("cuda")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A drafter's shape, and its target's."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    layers: int = 5
    target_layers: int = 5
    block_size: int = 16

    def config(self) -> DrafterConfig:
        return DrafterConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocabulary,
            num_target_layers=64,
            target_layer_ids=tuple(range(self.target_layers)),
            block_size=self.block_size,
            mask_token_id=self.vocabulary - 1,
            rope_theta=1e7,
            rms_norm_eps=1e-6,
            max_position_embeddings=1 << 18,
            layer_types=(FULL,) * self.layers,
            sliding_window=None,
        )

    def shape(self, *, tokens: int, anchors: int, encoding: str = "bf16") -> BatchShape:
        return BatchShape(
            target_layers=self.target_layers,
            token_budget=tokens,
            hidden_size=self.hidden,
            anchors=anchors,
            block_size=self.block_size,
            encoding=encoding,
        )

    def useful_flop(self, *, tokens: int, anchors: int) -> float:
        """Matrix products of a step; attention is not counted."""
        return useful_flop(self.config(), tokens=tokens, anchors=anchors)


QWEN_27B = Model(
    name="27b",
    hidden=5120,
    intermediate=17408,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=248_320,
)
QWEN_4B = Model(
    name="4b",
    hidden=2560,
    intermediate=9728,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=151_936,
)
SMALL = Model(
    name="small",
    hidden=576,
    intermediate=1536,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocabulary=49_152,
)


def make_frozen(model: Model) -> Frozen:
    """Embedding and head with logits of a sane size."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    embedding, head = (
        torch.empty(model.vocabulary, model.hidden, dtype=torch.bfloat16, device=DEVICE).normal_(
            std=0.02, generator=generator
        )
        for _ in range(2)
    )
    return Frozen(embedding=embedding, head=head)


class Setup:
    """One drafter and its optimizer, for trainers of many shapes."""

    def __init__(self, model: Model) -> None:
        self.model = model
        # On the device: the CPU's generator takes a minute for 1.7 billion numbers.
        with DEVICE:
            self.drafter = DFlashDraftModel(model.config())
        self.drafter.initialize(torch.Generator(DEVICE).manual_seed(0))
        config = AdamWConfig(beta1=0.9, beta2=0.999, weight_decay=0.01, clip=1.0)
        self.optimizer = FlatAdamW(self.drafter, config, dtype=torch.bfloat16)
        self.frozen = make_frozen(model)

    def trainer(
        self, shape: BatchShape, pieces: Pieces, *, microbatch: int = 2048, chunk: int = 256
    ) -> Trainer:
        config = StepConfig(
            shape=shape,
            objective=Objective(divergence="ce", slot_weights="decay", gamma=7.0),
            anchor_microbatch=min(microbatch, shape.anchors),
            loss_chunk=chunk,
        )
        return Trainer(self.drafter, self.frozen, self.optimizer, config, pieces)


def random_batch(shape: BatchShape, *, documents: int, vocabulary: int, seed: int = 0) -> Batch:
    """Documents of equal length but for an eighth, all of it supervised, anchors spread evenly."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    batch = Batch.empty(shape, device=DEVICE)
    for plane in range(shape.planes):
        size = (shape.token_budget, shape.hidden_size)
        rows = torch.randn(size, generator=generator, device=DEVICE, dtype=torch.bfloat16)
        for name, part in encode(shape.encoding, rows).items():
            batch.parts[name][plane].copy_(part)
    batch.input_ids.random_(0, vocabulary, generator=generator)
    length = shape.token_budget / documents
    jitter = [0, *(((i * 37) % 17 - 8) / 64 for i in range(1, documents)), 0]
    bounds = [round((i + jitter[i]) * length) // 8 * 8 for i in range(documents + 1)]
    bounds[-1] = shape.token_budget
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        batch.document_ids[begin:end] = number
        batch.document_starts[begin:end] = begin
        batch.position_ids[begin:end] = torch.arange(end - begin, device=DEVICE)
    batch.loss_mask.fill_(True)
    chosen = torch.randperm(shape.token_budget - 1, generator=generator, device=DEVICE)
    batch.anchor_positions.copy_(chosen[: shape.anchors].sort().values)
    batch.anchor_valid.fill_(True)
    return batch
