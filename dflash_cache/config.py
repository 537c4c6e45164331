"""Options of stage one, each written once: type, default, help.

The command line makes its options from these fields, so a default lives nowhere else.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_cache.errors import ConfigError

ENCODING_NAMES = ("bf16", "lossless", "int8", "fp8")


def option(default: Any, help: str) -> Any:
    """A dataclass field that the command line shows with `help`."""
    return field(default=default, metadata={"help": help})


def required(help: str) -> Any:
    """A field without a default: the user has to say it."""
    return field(metadata={"help": help})


def flag(name: str) -> str:
    """A field as an option is typed."""
    return "--" + name.replace("_", "-")


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


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """What `dflash cache build` runs."""

    # These decide what the cache holds; they are part of its fingerprint.
    target: str = required("Hugging Face folder or name of the frozen target model.")
    data: str = required("JSONL, JSON or Parquet file, data set folder, or Hub data set name.")
    out: Path = required("Folder of the cache.")
    target_revision: str | None = option(
        None, "Branch, tag or commit of a target on the Hub (default: its main branch)."
    )
    split: str = option("train", "Split of a Hub data set or data set folder.")
    max_samples: int | None = option(None, "Use only the first rows of the data.")
    max_length: int | None = option(
        None, "Skip samples with more tokens (default: the positions of the target)."
    )
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
    batch_tokens: int = option(16384, "Token slots of one padded target batch.")
    workers: int = option(
        1, "Processes that extract at once, each with its own target; GPUs are dealt out to them."
    )
    device: str = option("auto", "cpu, cuda, cuda:1 ...; auto takes a GPU if there is one.")
    max_skipped: float = option(0.1, "Stop when a larger share of the rows cannot be used.")
    agreement_samples: int = option(
        8, "Samples on which the target's agreement with the text is measured; 0 skips it."
    )

    def __post_init__(self) -> None:
        if self.target_dtype not in ("bfloat16", "float32"):
            raise ConfigError(f"--target-dtype {self.target_dtype}: want bfloat16 or float32")
        if self.encoding not in ENCODING_NAMES:
            raise ConfigError(f"--encoding {self.encoding}: want {', '.join(ENCODING_NAMES)}")
        refuse_url(self.out)
        if list(self.bucket_edges) != sorted(set(self.bucket_edges)) or not self.bucket_edges:
            raise ConfigError(f"--bucket-edges {self.bucket_edges}: want increasing numbers")
        require_positive(self, "num_target_layers", "unit_tokens", "batch_tokens", "workers")
        require_positive(self, "max_samples", "max_length")
        if self.agreement_samples < 0:
            raise ConfigError(f"--agreement-samples {self.agreement_samples}: want 0 or more")
        if not 0 <= self.max_skipped <= 1:
            raise ConfigError(f"--max-skipped {self.max_skipped}: want a share between 0 and 1")
