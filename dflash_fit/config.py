"""Options of stage two, each written once: type, default, help.

The command line makes its options from these fields, so a default lives nowhere else.
"""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from dflash_cache.config import THINKING, flag, option, require_positive, required
from dflash_cache.errors import ConfigError
from dflash_fit.schedule import SCHEDULES

Auto = Literal["auto"]


# The drafter's shape where neither an option nor --init-from says it.
NUM_LAYERS, BLOCK_SIZE = 5, 16
# Decay of the loss over the slots of a block, from the paper (arXiv 2602.06036).
GAMMA_OF_BLOCK_SIZE = {16: 7.0, 10: 5.0, 8: 4.0}


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """What `dflash fit` runs."""

    # These decide the result; a resumed run must have the same.
    cache: str = required("Folder or URL of a complete cache.")
    out: Path = required("Run folder; running the same command again resumes in it.")
    target_layers: tuple[int, ...] | None = option(
        None, "Cached target layers that the drafter reads (default: all)."
    )
    init_from: Path | None = option(
        None,
        "Published drafter folder, or a run, whose weights a new run begins with, and whose shape "
        "where no option says another (default: random weights).",
    )
    num_layers: int | None = option(None, f"Layers of the drafter (default: {NUM_LAYERS}).")
    block_size: int | None = option(
        None, f"Slots of a block, the anchor included (default: {BLOCK_SIZE})."
    )
    intermediate_size: int | None = option(None, "FFN width (default: the target's).")
    num_attention_heads: int | None = option(None, "Query heads (default: the target's).")
    num_key_value_heads: int | None = option(None, "Key and value heads (default: the target's).")
    head_dim: int | None = option(None, "Size of a head (default: the target's).")
    sliding_window: int | None = option(
        None, "Window of all drafter layers but the last, causal in the block (default: none)."
    )
    mask_token_id: int | None = option(None, "Mask token (default: the one the cache chose).")
    token_budget: int = option(49152, "Token slots of a packed batch.")
    anchors: int | Auto = option(
        2048,
        "Blocks trained per packed batch; auto measures how many take as long as reading a batch.",
    )
    epochs: int = option(6, "Passes over the training samples.")
    passes_per_pack: int = option(
        1, "Times that a packed batch is trained once it is read, each with fresh anchors."
    )
    packs_per_step: int | None = option(
        None,
        "Packed batches whose gradients an update adds up, over all GPUs (default: one each). A "
        "run keeps it, so it may go on with another number of GPUs.",
    )
    max_steps: int | None = option(None, "Stop after this many steps (default: after the epochs).")
    lr: float = option(6e-4, "Peak learning rate.")
    warmup: float = option(0.04, "Share of the steps that warm up.")
    schedule: str = option(
        "cosine",
        "How the learning rate falls: cosine or linear, from the warm-up on; wsd, only at the end.",
    )
    cooldown: float = option(
        0.2, "Share of the steps, the last ones, in which --schedule wsd falls."
    )
    final_lr: float = option(0.0, "Learning rate at the end, as a share of the peak.")
    weight_decay: float = option(0.0, "Decoupled weight decay of matrices.")
    beta1: float = option(0.9, "AdamW's first beta.")
    beta2: float = option(0.999, "AdamW's second beta.")
    clip: float = option(1.0, "Largest norm of the gradient.")
    gamma: float | None = option(
        None, "Decay of the loss over slots (default: 7, 5, 4 for blocks of 16, 10, 8)."
    )
    loss: str = option(
        "ce",
        "What a slot should match: ce, the token; kl, the target's distribution over all tokens "
        "(the cache must have been built with --final-hidden).",
    )
    slot_weights: str = option(
        "decay",
        "How much each slot counts: decay, less from slot to slot by --gamma; dpace, by how likely "
        "a draft is accepted as far as that slot.",
    )
    held_out: float = option(0.05, "Share of conversations that never train.")
    precision: str = option("bf16", "Weights and arithmetic: bf16 (with fp32 masters) or fp32.")
    seed: int = option(0, "Seed of initial weights, packs and anchors.")
    data_seed: int | None = option(
        None, "Seed of the packs, where runs with other weights should see the same ones."
    )
    eval_every: int = option(500, "Steps between measurements on the held-out samples.")
    eval_tokens: int = option(200_000, "Held-out tokens measured each time, at most.")
    max_skipped: int = option(
        20,
        "Updates in a row whose loss or gradient is not finite, and which are skipped, before the "
        "run stops.",
    )
    follow: bool = option(
        False,
        "Begin while the cache is still being built: the first epoch takes its units as they are "
        "committed, and waits for them.",
    )
    unit_order: Path | None = option(
        None, "Units that the first epoch takes, in this order: followed.json of another run."
    )

    # These change only speed, memory and what is kept.
    anchor_microbatch: int | None = option(
        None, "Blocks that go through the drafter at once (default: up to 2048 on a GPU, else 256)."
    )
    loss_chunk: int = option(256, "Blocks that go through the LM head at once.")
    step: str = option(
        "auto",
        "graph: compiled, and replayed as a CUDA graph; eager: op by op; auto: graph on a GPU.",
    )
    attention: str = option(
        "auto",
        "block: our GPU kernels; flex: PyTorch's flex attention, compiled; dense: a mask of every "
        "pair; auto: block on a GPU, else dense.",
    )
    checkpoint_every: int = option(500, "Steps between checkpoints.")
    keep_last: int = option(2, "Checkpoints kept, besides the best one and --keep-every.")
    keep_every: int | None = option(
        None, "Also keep the checkpoint of every step that is a multiple of this."
    )
    log_every: int = option(10, "Steps between lines in the log.")
    trackers: tuple[str, ...] = option(
        ("tensorboard",),
        "Where live numbers go besides metrics.jsonl, commas between: tensorboard, wandb, trackio; "
        "or none.",
    )
    devices: str = option(
        "auto",
        "Where to train, data-parallel: numbers of GPUs (0,1,2 or 5-7), all, cuda:1, cpu; auto "
        "takes one GPU if there is one.",
    )
    reduce: str = option(
        "auto",
        "Precision in which GPUs add up their gradients: bf16 or fp32; auto: that of the weights.",
    )
    shard_optimizer: bool = option(
        False, "Share masters and moments among the GPUs: less memory on each, a little slower."
    )
    rank_timeout: float = option(
        600.0, "Seconds without a step of one GPU's process after which the others give up."
    )

    def __post_init__(self) -> None:
        require_positive(
            self,
            *("num_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
            *("head_dim", "sliding_window", "token_budget", "epochs", "eval_every", "log_every"),
            *("eval_tokens", "anchor_microbatch", "loss_chunk", "checkpoint_every", "keep_last"),
            *("passes_per_pack", "packs_per_step", "max_skipped", "keep_every"),
        )
        for name, words in CHOICES.items():
            if getattr(self, name) not in words:
                raise ConfigError(f"{flag(name)} {getattr(self, name)}: want {' or '.join(words)}")
        if self.anchors != "auto":
            require_positive(self, "anchors")
            self.refuse_uneven_parts()
        if self.block_size is not None and self.block_size < 2:
            raise ConfigError(
                f"--block-size {self.block_size}: want 2 or more (slot 0 is the anchor)"
            )
        if not 0 < self.held_out < 1:
            raise ConfigError(f"--held-out {self.held_out}: want a share between 0 and 1")
        for name in ("warmup", "cooldown", "final_lr"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{flag(name)} {getattr(self, name)}: want a share from 0 to 1")
        if self.max_steps is not None and self.max_steps < 0:
            raise ConfigError(f"--max-steps {self.max_steps}: want 0 or more")
        if self.reduce == "bf16" and self.precision == "fp32":
            raise ConfigError(
                "--reduce bf16: would round the gradients of --precision fp32; leave it out"
            )
        if self.follow and self.unit_order is not None:
            raise ConfigError("--follow and --unit-order: each says the order of units; drop one")
        for name in ("lr", "clip", "gamma", "rank_timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{flag(name)} {value}: want a finite number above 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)}: want 0 or more, but below 1")
        for name in ("weight_decay", "seed", "data_seed"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{flag(name)} {value}: want 0 or more")

    def refuse_uneven_parts(self) -> None:
        assert isinstance(self.anchors, int), self.anchors
        size = self.anchor_microbatch
        if size is not None and self.anchors % min(size, self.anchors):
            raise ConfigError(
                f"--anchors {self.anchors}: want a multiple of --anchor-microbatch {size}"
            )

    def microbatch(self, device_type: str) -> int:
        """Blocks that go through the drafter at once: a divisor of the anchors."""
        assert isinstance(self.anchors, int), self.anchors
        if self.anchor_microbatch is not None:
            return min(self.anchor_microbatch, self.anchors)
        most = MICROBATCH[device_type]
        size = largest_divisor(self.anchors, at_most=most)
        if size < min(self.anchors, most) / 4:
            raise ConfigError(
                f"--anchors {self.anchors}: its largest part of up to {most} is {size}, too "
                f"small to be fast; take a multiple of {most}"
            )
        return size

    @property
    def seed_of_packs(self) -> int:
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def decay_gamma(self) -> float:
        """The paper's value for its block sizes, half the block size for others."""
        if self.gamma is not None:
            return self.gamma
        size = self.block_size or BLOCK_SIZE
        return GAMMA_OF_BLOCK_SIZE.get(size, size / 2)


# Words that an option may be.
CHOICES = {
    "precision": ("bf16", "fp32"),
    "schedule": SCHEDULES,
    "loss": ("ce", "kl"),
    "slot_weights": ("decay", "dpace"),
    "step": ("auto", "graph", "eager"),
    "attention": ("auto", "block", "flex", "dense"),
    "reduce": ("auto", "bf16", "fp32"),
}
# Blocks that go through the drafter at once, at most, where nothing is said.
MICROBATCH = {"cuda": 2048, "cpu": 256}

# Fields of FitConfig that a resumed run may change: the result stays the same up to rounding.
SPEED_ONLY = (
    *("cache", "out", "anchor_microbatch", "loss_chunk", "checkpoint_every", "keep_last"),
    *("keep_every", "log_every", "devices", "step", "attention", "reduce", "shard_optimizer"),
    *("rank_timeout", "max_skipped", "trackers"),
)


def largest_divisor(number: int, *, at_most: int) -> int:
    return next(size for size in range(min(number, at_most), 0, -1) if number % size == 0)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What `dflash eval` runs: offline from a cache, or real decoding with the target."""

    drafter: Path = required(
        "Drafter folder: a run, one of its checkpoints, an export, or a published one."
    )
    cache: str | None = option(None, "Measure offline on the held-out samples of this cache.")
    target: str | None = option(None, "Measure by real decoding with this target.")
    prompts: str | None = option(
        None,
        "Prompts to decode, one data set per file, files with commas between them: rows with "
        "prompt, turns (of the user, asked one after the other) or messages.",
    )
    held_out: float | None = option(
        None, "Share of conversations held out (default: what the drafter was trained with)."
    )
    max_tokens: int = option(200_000, "Held-out tokens measured offline, at most.")
    max_prompts: int | None = option(None, "Decode only the first prompts of each file.")
    max_new_tokens: int = option(256, "Longest answer.")
    temperature: float = option(0.0, "Temperature of the answers; 0 is greedy.")
    seed: int = option(0, "Seed of answers that are drawn.")
    batch_size: int = option(1, "Prompts decoded together.")
    thinking: str = option("as-is", "Ask the chat template for thoughts: on, off; as-is: its own.")
    system: str | None = option(None, "System message for prompts that bring none.")
    dtype: str = option("float32", "Precision of target and drafter: float32 or bfloat16.")
    device: str = option("auto", "cpu, cuda, cuda:1 ...; auto takes a GPU if there is one.")

    def __post_init__(self) -> None:
        require_positive(self, "max_tokens", "max_prompts", "max_new_tokens", "batch_size")
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"--dtype {self.dtype}: want float32 or bfloat16")
        if self.thinking not in THINKING:
            raise ConfigError(f"--thinking {self.thinking}: want {', '.join(THINKING)}")
        for name in ("temperature", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{flag(name)} {getattr(self, name)}: want 0 or more")
        if (self.cache is None) == (self.target is None):
            raise ConfigError("give either --cache (offline) or --target with --prompts (decoding)")
        if (self.target is None) != (self.prompts is None):
            raise ConfigError("--target and --prompts go together")
        way, idle = ("--cache", OF_DECODING) if self.target is None else ("--target", OF_OFFLINE)
        for field in fields(self):
            if field.name in idle and getattr(self, field.name) != field.default:
                raise ConfigError(
                    f"{flag(field.name)} {getattr(self, field.name)}: changes nothing with {way}; "
                    "leave it out"
                )


# Options of `dflash eval` that mean something only with --target, and only with --cache.
OF_DECODING = (
    *("max_prompts", "max_new_tokens", "batch_size"),
    *("temperature", "seed", "thinking", "system"),
)
OF_OFFLINE = ("held_out", "max_tokens")


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """What `dflash export` writes."""

    run: Path = required("Run folder, one of its checkpoints, or a published drafter folder.")
    out: Path = required("Folder to write; it must be new or empty.")
    checkpoint: str = option("best", "Which of the run's checkpoints: best, last, or step_N.")
    for_: str = option(
        "all",
        "Who loads it: all, or only transformers, sglang or vllm. The two servers need no code in "
        "the folder, so theirs has no dflash.py and no auto_map.",
    )
    format: str = option(
        "dflash",
        "dflash: config.json and tensors as the reference has them; speculators: those of "
        "vllm-project/speculators, for vLLM.",
    )

    def __post_init__(self) -> None:
        for name, words in EXPORT_CHOICES.items():
            if getattr(self, name) not in words:
                raise ConfigError(f"{flag(name)} {getattr(self, name)}: want {' or '.join(words)}")
        if self.format == "speculators" and self.for_ not in ("all", "vllm"):
            raise ConfigError(
                f"--format speculators --for {self.for_}: only vLLM reads that format; drop --for, "
                "or --format"
            )


EXPORT_CHOICES = {
    "for_": ("all", "transformers", "sglang", "vllm"),
    "format": ("dflash", "speculators"),
}


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """What `dflash report` writes."""

    runs: tuple[Path, ...] = required("Runs, or folders that hold some, such as a sweep's.")
    out: Path = option(Path("report.html"), "The page.")
    png: bool = option(False, "Also write its charts as a picture beside it.")

    def __post_init__(self) -> None:
        if not self.runs:
            raise ConfigError("no run given; name one or more run folders")
        if self.out.is_dir() or not self.out.absolute().parent.is_dir():
            raise ConfigError(f"--out {self.out}: want a file in a folder that exists")
        if self.png and self.beside == self.out:
            raise ConfigError(f"--out {self.out}: that is the picture's name; end it in .html")

    @property
    def beside(self) -> Path:
        """The picture."""
        return self.out.with_suffix(".png")
