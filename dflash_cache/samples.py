"""Turn rows into samples: tokens, loss mask, and the group that keeps a conversation together.

Rows that cannot be used are skipped by reason and counted, never silently.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from typing import Any

import numpy as np
from tqdm import tqdm

from dflash_cache.chat import SkipRow, TokensAndMask, encode_chat, encode_text
from dflash_cache.config import BuildConfig
from dflash_cache.errors import DataError
from dflash_cache.rows import Row, iter_rows
from dflash_cache.schema import canonical_json

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One tokenised conversation."""

    sample_id: int  # number of its row in the data, from 0
    input_ids: np.ndarray  # int32 [t]
    loss_mask: np.ndarray  # bool [t]
    group: str  # hash of the conversation's opening: equal prompts share it

    @property
    def length(self) -> int:
        return len(self.input_ids)

    @property
    def supervised(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The usable rows in their own order, and why the others are not there."""

    samples: list[Sample]
    rows: int
    skipped: dict[str, int]

    @property
    def lengths(self) -> list[int]:
        return [sample.length for sample in self.samples]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def supervised(self) -> int:
        return sum(sample.supervised for sample in self.samples)

    def sha256(self) -> str:
        """Hash of everything that the target will see and the drafter will learn from."""
        digest = sha256()
        for sample in self.samples:
            digest.update(canonical_json([sample.sample_id, sample.group, sample.length]))
            digest.update(sample.input_ids.astype("<i4").tobytes())
            digest.update(np.packbits(sample.loss_mask).tobytes())
        return digest.hexdigest()

    def count_of(self, token_ids: list[int]) -> dict[int, int]:
        """How often each of the given ids occurs in all samples."""
        counts = dict.fromkeys(token_ids, 0)
        for sample in self.samples:
            for token in token_ids:
                counts[token] += int((sample.input_ids == token).sum())
        return counts


def load_samples(
    config: BuildConfig, tokenizer: Any, *, vocab_size: int, max_positions: int
) -> Samples:
    """Every usable row as a sample; stops when too many rows cannot be used."""
    longest = min(config.max_length or max_positions, max_positions)
    samples: list[Sample] = []
    skipped: Counter[str] = Counter()
    rows = 0
    for sample_id, row in enumerate(_progress(islice(_rows(config), config.max_samples))):
        rows += 1
        try:
            tokens = encode_row(row, tokenizer)
            samples.append(_checked(sample_id, row, tokens, vocab_size=vocab_size, longest=longest))
        except SkipRow as reason:
            skipped[str(reason)] += 1
    _refuse_too_many_skips(config, rows, skipped)
    return Samples(samples=samples, rows=rows, skipped=dict(sorted(skipped.items())))


def _rows(config: BuildConfig) -> Iterator[Row]:
    return iter_rows(config.data, split=config.split)


def _progress(rows: Iterator[Row]) -> Iterator[Row]:
    return iter(tqdm(rows, desc="tokenise", unit="row", disable=None))


def encode_row(row: Row, tokenizer: Any) -> TokensAndMask:
    """Tokens and loss mask of a row of any form that we read."""
    if _is_ready(row):
        return _ready(row)
    if isinstance(row.get("text"), str):
        return encode_text(tokenizer, row["text"])
    if tokenizer.chat_template is None:
        raise DataError(
            f"{tokenizer.name_or_path}: its tokenizer has no chat template, so chat rows cannot "
            "be rendered; give it one (chat_template.jinja), or rows with text or input_ids"
        )
    return encode_chat(tokenizer, messages_of(row), tools=row.get("tools"))


def messages_of(row: Row) -> list[dict[str, Any]]:
    """The row as OpenAI-style messages."""
    if isinstance(row.get("messages"), list):
        turns = row["messages"]
    elif isinstance(row.get("conversations"), list):
        turns = [_share_gpt_turn(turn) for turn in row["conversations"]]
    elif isinstance(row.get("prompt"), str) and isinstance(row.get("response"), str):
        turns = [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["response"]},
        ]
    else:
        raise SkipRow("no messages, conversations, prompt and response, text, or input_ids")
    return [_known_turn(turn) for turn in turns]


def _share_gpt_turn(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise SkipRow("a turn is not an object")
    return {"role": turn.get("from", turn.get("role")), "content": turn.get("value", "")}


def _known_turn(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise SkipRow("a turn is not an object")
    role = ROLES.get(str(turn.get("role")).lower())
    if role is None:
        raise SkipRow(f"unknown role {str(turn.get('role'))[:20]!r}")
    return {**turn, "role": role}


def _is_ready(row: Row) -> bool:
    return row.get("input_ids") is not None and row.get("loss_mask") is not None


def _ready(row: Row) -> TokensAndMask:
    try:
        ids = np.asarray(row["input_ids"], dtype=np.int32)
        mask = np.asarray(row["loss_mask"], dtype=np.float32) != 0
        whole = np.array_equal(ids, np.asarray(row["input_ids"]))
    except (ValueError, TypeError, OverflowError):
        whole = False
    if not whole:
        raise SkipRow("input_ids or loss_mask are not numbers")
    if ids.ndim != 1 or ids.shape != mask.shape:
        raise SkipRow("input_ids and loss_mask differ in length")
    return ids, mask


def _checked(
    sample_id: int, row: Row, tokens: TokensAndMask, *, vocab_size: int, longest: int
) -> Sample:
    ids, mask = tokens
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        raise SkipRow("a token id is outside the target's vocabulary")
    if not (mask[:-1] & mask[1:]).any():
        raise SkipRow("no two supervised tokens in a row")
    end = int(np.flatnonzero(mask)[-1]) + 1  # nobody learns from what comes after
    if end > longest:
        raise SkipRow(f"longer than {longest} tokens")
    return Sample(
        sample_id=sample_id, input_ids=ids[:end], loss_mask=mask[:end], group=group_of(row)
    )


def group_of(row: Row) -> str:
    """Samples that must not be split between training and held-out share a group.

    That is the opening of the conversation up to the first answer: pieces of one row have it in
    common, and so have two answers to one prompt.
    """
    opening: Any
    if _is_ready(row):
        first = next((i for i, wanted in enumerate(row["loss_mask"]) if wanted), 0)
        opening = [int(token) for token in row["input_ids"][: first or None]]
    elif isinstance(row.get("text"), str):
        opening = row["text"]
    else:
        turns = messages_of(row)
        first = next((i for i, turn in enumerate(turns) if turn["role"] == "assistant"), 0)
        opening = [[turn["role"], turn.get("content")] for turn in turns[: first or None]]
    return sha256(canonical_json(opening)).hexdigest()[:16]


def _refuse_too_many_skips(config: BuildConfig, rows: int, skipped: Counter[str]) -> None:
    if not rows:
        raise DataError(f"{config.data}: holds no rows; give --data a file with rows")
    reasons = "; ".join(f"{count} {reason}" for reason, count in skipped.most_common())
    if skipped.total() == rows:
        raise DataError(f"{config.data}: none of {rows} rows can be used ({reasons})")
    if skipped.total() > config.max_skipped * rows:
        raise DataError(
            f"{config.data}: {skipped.total()} of {rows} rows cannot be used ({reasons}); "
            f"more than --max-skipped {config.max_skipped:g} allows. Repair the data, or raise it."
        )
