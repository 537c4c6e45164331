"""Turn rows into samples: tokens, loss mask, and the group that keeps a conversation together.

Rows that cannot be used are skipped by reason and counted, never silently.
"""

import importlib.metadata
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from dflash_cache.chat import AS_IS, ChatOptions, SkipRow, TokensAndMask, encode_chat, encode_text
from dflash_cache.config import BuildConfig, DataConfig
from dflash_cache.conversations import (
    KEYS,
    chat_of,
    group_of,
    is_chat,
    is_ready,
    joined_groups,
    text_of,
)
from dflash_cache.conversations import messages_of as messages_of  # evaluation reads rows with it
from dflash_cache.duplicates import REASON, Prompts, read_prompts, repeats_a_prompt
from dflash_cache.errors import DataError
from dflash_cache.rows import Row, iter_rows, load_dataset
from dflash_cache.schema import canonical_json
from dflash_cache.tokenise import Encoded, EncodedRows, encode_rows

# Longer rows are not even tokenised when no vocabulary could bring them below the limit: that
# takes a hundred bytes a character.
MOST_CHARACTERS = 10_000_000
ROWS_NOTED = 1000  # of which we remember whether they were chats
MOST_REASONS = 12  # that one message tells; each unknown role is a reason of its own
LIBRARIES = ("transformers", "tokenizers", "jinja2", "numpy")


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Sample:
    """One tokenised conversation."""

    sample_id: int  # number of its row in the data, from 0
    input_ids: np.ndarray  # int32 [t]
    loss_mask: np.ndarray  # bool [t]
    group: str  # hash that pieces of a conversation and answers to one prompt share

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
    chat_rows: frozenset[int] = frozenset()  # of the first rows, those that are chats

    @property
    def chats(self) -> list[Sample]:
        """Some of the samples that went through the chat template."""
        return [sample for sample in self.samples if sample.sample_id in self.chat_rows]

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
        wanted, counts = np.unique(np.asarray(token_ids, np.int32)), Counter[int]()
        for sample in self.samples:
            counts.update(sample.input_ids[np.isin(sample.input_ids, wanted)].tolist())
        return {token: counts[token] for token in token_ids}


def row_encoder(
    config: DataConfig, tokenizer: Any, *, vocab_size: int, max_positions: int
) -> "RowEncoder":
    """What the options make of a row."""
    return RowEncoder(
        tokenizer=tokenizer,
        options=ChatOptions(
            system=config.system, thinking=config.thinking, last_turn_only=config.last_turn_only
        ),
        vocab_size=vocab_size,
        longest=min(config.max_length or max_positions, max_positions),
        too_long=config.too_long,
        prompts=read_prompts(config.exclude) if config.exclude is not None else None,
    )


def load_samples(
    config: BuildConfig, tokenizer: Any, *, vocab_size: int, max_positions: int
) -> Samples:
    """Every usable row as a sample; stops when too many rows cannot be used."""
    encoder = row_encoder(config, tokenizer, vocab_size=vocab_size, max_positions=max_positions)
    rows = islice(iter_rows(config.data, split=config.split), config.max_samples)
    chat_rows: set[int] = set()
    encoded = encode_rows(
        map(row_text, _noting_chats(rows, chat_rows)),
        encoder,
        workers=config.data_workers,
        identity=lambda: identity_of(config, encoder),
    )
    skipped = Counter(reason for reason, *_ in encoded.facts if reason)
    _refuse_too_many_skips(config, len(encoded.facts), skipped)
    samples = list(_grouped(encoded))
    assert len(samples) + skipped.total() == len(encoded.facts), (len(samples), skipped)
    return Samples(
        samples=samples,
        rows=len(encoded.facts),
        skipped=dict(sorted(skipped.items())),
        chat_rows=frozenset(chat_rows),
    )


def _noting_chats(rows: Iterable[Row], chat_rows: set[int]) -> Iterator[Row]:
    """The same rows; the numbers of chats among the first of them go into `chat_rows`.

    The first rows are read here even where kept tokens make the others needless.
    """
    for number, row in enumerate(rows):
        if number < ROWS_NOTED and is_chat(row):
            chat_rows.add(number)
        yield row


def _grouped(encoded: EncodedRows) -> Iterator[Sample]:
    used = [number for number, (reason, *_) in enumerate(encoded.facts) if not reason]
    groups = joined_groups(
        [encoded.facts[number][1] for number in used],
        [encoded.facts[number][2] or None for number in used],
    )
    for number, group in zip(used, groups, strict=True):
        part = slice(int(encoded.ends[number - 1]) if number else 0, int(encoded.ends[number]))
        yield Sample(
            sample_id=number,
            input_ids=encoded.ids[part],
            loss_mask=encoded.mask[part],
            group=group,
        )


# --- one row ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RowEncoder:
    """Everything that decides what becomes of a row; goes to other processes as it is."""

    tokenizer: Any
    options: ChatOptions
    vocab_size: int
    longest: int
    too_long: str
    prompts: Prompts | None

    def __call__(self, text: str) -> Encoded:
        try:
            return self._encode(json.loads(text))
        except SkipRow as reason:
            return Encoded(ids=b"", mask=b"", reason=str(reason))
        except RecursionError:
            return Encoded(ids=b"", mask=b"", reason="nested too deeply")

    def _encode(self, row: Row) -> Encoded:
        if _characters(row, self.too_long) > max(MOST_CHARACTERS, 256 * self.longest):
            raise SkipRow(_too_long(self.longest, self.too_long))
        sample = checked(
            0,
            row,
            encode_row(row, self.tokenizer, self.options),
            vocab_size=self.vocab_size,
            longest=self.longest,
            too_long=self.too_long,
        )
        if self.prompts is not None and repeats_a_prompt(row, self.prompts, self.tokenizer):
            raise SkipRow(REASON)
        return Encoded(
            ids=sample.input_ids.astype(np.int32).tobytes(),
            mask=sample.loss_mask.astype(np.bool_).tobytes(),
            opening=sample.group,
            chat=chat_of(row) or "",
        )


def row_text(row: Row) -> str:
    """What we read of a row, as one string."""
    try:
        return json.dumps({key: row[key] for key in KEYS if key in row}, default=str)
    except RecursionError:  # parsing allows a little more depth than writing
        return "[" * 100_000


def _characters(row: Row, too_long: str) -> int:
    """Characters up to the last answer, or to the first one where the others may be cut."""
    if is_ready(row):
        return 0
    if isinstance(row.get("text"), str):
        return len(row["text"])
    sizes, answers = 0, [0]
    for turn in messages_of(row):
        sizes += len(text_of(turn.get("content")))
        if turn["role"] == "assistant":
            answers.append(sizes)
    return answers[-1] if too_long == "skip" else answers[:2][-1]


def encode_row(row: Row, tokenizer: Any, options: ChatOptions = AS_IS) -> TokensAndMask:
    """Tokens and loss mask of a row of any form that we read."""
    if is_ready(row):
        return _ready(row)
    if isinstance(row.get("text"), str):
        return encode_text(tokenizer, row["text"])
    if tokenizer.chat_template is None:
        raise DataError(
            f"{tokenizer.name_or_path}: its tokenizer has no chat template, so chat rows cannot "
            "be rendered; give it one (chat_template.jinja), or rows with text or input_ids"
        )
    return encode_chat(tokenizer, messages_of(row), tools=row.get("tools"), options=options)


def _ready(row: Row) -> TokensAndMask:
    try:
        ids = np.asarray(row["input_ids"], dtype=np.int32)
        weights = np.asarray(row["loss_mask"], dtype=np.float32)
        whole = np.array_equal(ids, np.asarray(row["input_ids"])) and not np.isnan(weights).any()
    except (ValueError, TypeError, OverflowError):
        whole = False
    if not whole:
        raise SkipRow("input_ids or loss_mask are not numbers")
    if ids.ndim != 1 or ids.shape != weights.shape:
        raise SkipRow("input_ids and loss_mask differ in length")
    return ids, weights != 0


def checked(
    sample_id: int,
    row: Row,
    tokens: TokensAndMask,
    *,
    vocab_size: int,
    longest: int,
    too_long: str,
) -> Sample:
    """The part of a row that can be learnt from, with the group of its opening."""
    ids, mask = tokens
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        raise SkipRow("a token id is outside the target's vocabulary")
    _refuse_no_pair(mask)
    ends = _ends_of_answers(mask)
    end = int(ends[-1])  # nobody learns from what comes after
    if end > longest:
        fitting = ends[ends <= longest] if too_long == "cut" else ends[:0]
        if not len(fitting):
            raise SkipRow(_too_long(longest, too_long))
        end = int(fitting[-1])
        _refuse_no_pair(mask[:end])
    return Sample(
        sample_id=sample_id, input_ids=ids[:end], loss_mask=mask[:end], group=group_of(row)
    )


def _refuse_no_pair(mask: np.ndarray) -> None:
    if not (mask[:-1] & mask[1:]).any():
        raise SkipRow("no two supervised tokens in a row")


def _ends_of_answers(mask: np.ndarray) -> np.ndarray:
    """Lengths that a row may be cut to: behind each run of supervised tokens."""
    return np.flatnonzero(mask & ~np.append(mask[1:], False)) + 1


def _too_long(longest: int, too_long: str) -> str:
    if too_long == "cut":
        return f"no answer ends within {longest} tokens"
    return f"longer than {longest} tokens"


# --- what the tokens depend on ------------------------------------------------------------------


def identity_of(config: DataConfig, encoder: RowEncoder) -> str:
    """Hash of the data and of everything that turns it into tokens, to find kept tokens by."""
    parts = {
        "data": _data_hash(config.data, split=config.split),
        "max_samples": config.max_samples,
        "tokenizer": _tokenizer_hash(encoder.tokenizer),
        "options": asdict(encoder.options),
        "limits": [encoder.vocab_size, encoder.longest, encoder.too_long],
        "exclude": encoder.prompts.sha256() if encoder.prompts is not None else None,
        # Any change of ours makes the tokens anew: nobody has to remember which file matters.
        "code": [_file_hash(path) for path in sorted(Path(__file__).parent.glob("*.py"))],
        "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES},
    }
    return sha256(canonical_json(parts)).hexdigest()[:32]


def _data_hash(source: str, *, split: str) -> str:
    """Of a file its bytes, which no clock can be wrong about; else what `datasets` says it is."""
    if Path(source).is_file():
        return _file_hash(Path(source))
    return str(getattr(load_dataset(source, split=split), "_fingerprint", ""))


def _file_hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _tokenizer_hash(tokenizer: Any) -> str:
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    for state in ("truncation", "padding"):  # the last call left them
        core.pop(state, None)
    told = [core, type(tokenizer).__name__, tokenizer.chat_template, tokenizer.special_tokens_map]
    return sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()


def _refuse_too_many_skips(config: DataConfig, rows: int, skipped: Counter[str]) -> None:
    if not rows:
        raise DataError(f"{config.data}: holds no rows; give --data a file with rows")
    told = skipped.most_common(MOST_REASONS)
    reasons = "; ".join(f"{count} {reason}" for reason, count in told)
    if more := len(skipped) - len(told):
        reasons += f"; {skipped.total() - sum(count for _, count in told)} for {more} other reasons"
    if skipped.total() == rows:
        raise DataError(f"{config.data}: none of {rows} rows can be used ({reasons})")
    if skipped.total() > config.max_skipped * rows:
        raise DataError(
            f"{config.data}: {skipped.total()} of {rows} rows cannot be used ({reasons}); "
            f"more than --max-skipped {config.max_skipped:g} allows. Repair the data, or raise it."
        )
