"""Options of stage one, each written once: type, default, help.

The command line makes its options from these fields, so a default lives nowhere else.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_cache.errors import ConfigError

ATTENTION_NAMES = ("auto", "sdpa", "eager", "flash_attention_2")
ENCODING_NAMES = ("bf16", "lossless", "int8", "fp8")
PROOF_NAMES = (
    *("hooks", "padding", "frozen", "final", "states", "norms"),
    *("probe", "agreement", "template"),
)


def option(default: Any, help: str) -> Any:
    """A dataclass field that the command line shows with `help`."""
    return field(default=default, metadata={"help": help})


def required(help: str) -> Any:
    """A field without a default: the user has to say it."""
    return field(metadata={"help": help})


def flag(name: str) -> str:
    """A field as an option is typed; one named like a word of Python ends in an underscore."""
    return "--" + name.rstrip("_").replace("_", "-")


def require_positive(config: object, *names: str) -> None:
    """Refuse options that are given but less than 1."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{flag(name)} {value}: want 1 or more")


def refuse_url(out: Path) -> None:
    """Caches are written to folders; a Path has lost one slash of a URL."""
    if re.match(r"[a-z][a-z0-9+]+:/", str(out)):
        raise ConfigError(
            f"--out {out}: a cache is written in a local or mounted folder, since a store of "
            "objects has no links and no flush; copy the sealed folder there afterwards, and "
            "`dflash fit --cache URL` reads it from there"
        )


THINKING = ("as-is", "on", "off")
TOO_LONG = ("skip", "cut")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """How rows become tokens and loss masks, for whom."""

    target: str = required("Hugging Face folder or name of the frozen target model.")
    data: str = required("JSONL, JSON or Parquet file, data set folder, or Hub data set name.")
    target_revision: str | None = option(
        None, "Branch, tag or commit of a target on the Hub (default: its main branch)."
    )
    split: str = option("train", "Split of a Hub data set or data set folder.")
    max_samples: int | None = option(None, "Use only the first rows of the data.")
    max_length: int | None = option(
        None, "Most tokens of a sample (default: the positions of the target)."
    )
    too_long: str = option(
        "skip", "Longer samples: skip them, or cut them behind the last answer that fits."
    )
    system: str | None = option(None, "System message for chats that bring none.")
    thinking: str = option(
        "as-is", "Thoughts of the assistant: as-is; off: leave them out; on: skip chats without."
    )
    last_turn_only: bool = option(False, "Supervise the last answer of a chat alone.")
    exclude: str | None = option(
        None, "Prompts of an evaluation; rows that nearly repeat one are left out, and counted."
    )
    max_skipped: float = option(0.1, "Stop when a larger share of the rows cannot be used.")

    def __post_init__(self) -> None:
        require_positive(self, "max_samples", "max_length")
        for name, words in (("thinking", THINKING), ("too_long", TOO_LONG)):
            if getattr(self, name) not in words:
                raise ConfigError(f"{flag(name)} {getattr(self, name)}: want {', '.join(words)}")
        if not 0 <= self.max_skipped <= 1:
            raise ConfigError(f"--max-skipped {self.max_skipped}: want a share between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class BuildConfig(DataConfig):
    """What `dflash cache build` runs."""

    # These decide what the cache holds; they are part of its fingerprint.
    out: Path = required("Folder of the cache.")
    target_layers: tuple[int, ...] | None = option(
        None, "Target layers to keep, for example 1,16,31,46,61 (default: spread evenly)."
    )
    num_target_layers: int = option(5, "How many target layers to keep, if not named.")
    mask_token_id: int | None = option(
        None, "Mask token of the drafter (default: an id that the tokenizer never produces)."
    )
    target_dtype: str = option("bfloat16", "Precision of the target: bfloat16 or float32.")
    bucket_edges: tuple[int, ...] = option(
        (770, 1216, 1728, 2432, 3296, 8193), "Exclusive upper bounds of the length buckets."
    )
    encoding: str = option(
        "bf16",
        "How states are kept: bf16, lossless (compressed), int8 or fp8 (lossy, half the bytes).",
    )
    final_hidden: bool = option(
        False, "Keep the state after the final norm too, for losses on the target's distribution."
    )
    unit_tokens: int = option(32768, "Tokens of one unit, which is committed as a whole.")

    # These change only how fast, or whether, it gets there.
    data_workers: int | None = option(None, "Processes that tokenise (default: all cores).")
    batch_tokens: int = option(16384, "Token slots of one padded target batch.")
    devices: str = option(
        "auto",
        "Where targets run, one worker each: numbers of GPUs (0,1,2 or 0-7), all, cuda:1, cpu; "
        "auto takes one GPU if there is one.",
    )
    tensor_parallel: int = option(
        1, "Devices that one copy of the target is spread over, where it does not fit one."
    )
    target_attention: str = option(
        "auto",
        "Attention of the target: auto, sdpa, eager or flash_attention_2; auto takes what is best "
        "of those installed.",
    )
    agreement_samples: int = option(
        8, "Samples on which the target's agreement with the text is measured; 0 skips it."
    )
    no_proof: tuple[str, ...] = option(
        (), f"Proofs to leave out, which the cache remembers: {', '.join(PROOF_NAMES)}."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_dtype not in ("bfloat16", "float32"):
            raise ConfigError(f"--target-dtype {self.target_dtype}: want bfloat16 or float32")
        if self.target_attention not in ATTENTION_NAMES:
            raise ConfigError(
                f"--target-attention {self.target_attention}: want {', '.join(ATTENTION_NAMES)}"
            )
        if self.encoding not in ENCODING_NAMES:
            raise ConfigError(f"--encoding {self.encoding}: want {', '.join(ENCODING_NAMES)}")
        refuse_url(self.out)
        if list(self.bucket_edges) != sorted(set(self.bucket_edges)) or not self.bucket_edges:
            raise ConfigError(f"--bucket-edges {self.bucket_edges}: want increasing numbers")
        require_positive(self, "num_target_layers", "unit_tokens", "batch_tokens")
        require_positive(self, "data_workers", "tensor_parallel")
        if self.agreement_samples < 0:
            raise ConfigError(f"--agreement-samples {self.agreement_samples}: want 0 or more")
        for name in self.no_proof:
            if name not in PROOF_NAMES:
                raise ConfigError(
                    f"--no-proof {name}: there is no such proof; known are {', '.join(PROOF_NAMES)}"
                )


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """What `dflash cache inspect` shows of a cache."""

    cache: str = required("Folder or URL of a complete cache.")
    target: str | None = option(None, "Where the target is now, if it was moved.")
    sample: tuple[int, ...] | None = option(None, "Numbers of samples or rows (default: some).")
    count: int = option(3, "How many to show, if not named.")
    html: Path | None = option(None, "Write a page to look at instead of text in the terminal.")

    def __post_init__(self) -> None:
        require_positive(self, "count")


@dataclass(frozen=True, kw_only=True)
class InspectDataConfig(DataConfig):
    """What `dflash cache inspect --data` shows of rows, before anything is built."""

    sample: tuple[int, ...] | None = option(None, "Numbers of samples or rows (default: some).")
    count: int = option(3, "How many to show, if not named.")
    html: Path | None = option(None, "Write a page to look at instead of text in the terminal.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "count")


@dataclass(frozen=True, kw_only=True)
class AnswersConfig:
    """What `dflash cache answers` runs."""

    data: str = required("Rows whose assistant turns are written anew: chats, or prompts.")
    out: Path = required("JSONL file of the new chats; the same command again goes on in it.")
    server: str = required("Address of an OpenAI-compatible server, as http://localhost:8000/v1.")
    model: str | None = option(None, "Name of the model there (default: the only one it serves).")
    split: str = option("train", "Split of a Hub data set or data set folder.")
    max_samples: int | None = option(None, "Use only the first rows of the data.")
    system: str | None = option(None, "System message for chats that bring none.")
    thinking: str = option("as-is", "Ask the chat template for thoughts: on, off; as-is: its own.")
    temperature: float = option(0.0, "Temperature of the answers; 0 is greedy.")
    top_p: float = option(1.0, "Share of probability that answers are drawn from.")
    max_new_tokens: int = option(1024, "Longest answer; one that is longer is left out.")
    seed: int = option(0, "Seed of the requests; a row's number is added to it.")
    concurrency: int = option(32, "Requests under way at once.")
    timeout: float = option(600.0, "Seconds that an answer may take.")
    retries: int = option(3, "Times that a request is asked again when the server fails.")
    max_failed: float = option(0.1, "Stop when a larger share of the rows failed.")
    keep_looping: bool = option(False, "Keep answers that repeat themselves.")

    def __post_init__(self) -> None:
        require_positive(self, "max_samples", "max_new_tokens", "concurrency")
        if self.thinking not in THINKING:
            raise ConfigError(f"--thinking {self.thinking}: want {', '.join(THINKING)}")
        for name, least in (("temperature", 0.0), ("retries", 0), ("timeout", 0.001)):
            if not getattr(self, name) >= least:
                raise ConfigError(f"{flag(name)} {getattr(self, name)}: want {least} or more")
        for name in ("top_p", "max_failed"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{flag(name)} {getattr(self, name)}: want a share from 0 to 1")
