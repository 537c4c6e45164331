"""Prompt sets: which questions an evaluation asks, and how a chat goes on from turn to turn.

One set per file.  A row is `prompt` (a text), `turns` (user turns that are asked one after the
other, each behind the target's own answers, as MT-Bench does) or `messages` / `conversations`,
of which the first answer is wanted.  Rows that name their `source` or `category` are also counted
by it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dflash_cache.chat import ChatOptions, SkipRow, encode_prompt
from dflash_cache.conversations import before_first_answer, messages_of
from dflash_cache.errors import ConfigError, DataError
from dflash_cache.messages import Message
from dflash_cache.rows import Row, iter_rows

PART_KEYS = ("source", "category")


@dataclass(frozen=True, kw_only=True)
class PromptRow:
    """One chat that is to be answered, perhaps over several turns."""

    source: str
    number: int  # of its row in the source, from 1
    opening: tuple[Message, ...]  # up to the first answer
    follow_ups: tuple[str, ...] = ()  # user turns behind the first answer
    part: str | None = None  # what its set is also counted by

    @property
    def where(self) -> str:
        return f"{self.source}, row {self.number}"

    @property
    def turns(self) -> int:
        """How many answers it wants."""
        return 1 + len(self.follow_ups)

    def messages(self, answers: Sequence[str] = ()) -> list[Message]:
        """The chat up to the next answer, with the answers that were given so far."""
        assert len(answers) < self.turns, (len(answers), self.turns)
        chat = list(self.opening)
        for answer, asked in zip(answers, self.follow_ups, strict=False):
            chat.append({"role": "assistant", "content": answer})
            chat.append({"role": "user", "content": asked})
        return chat

    def ids(
        self, tokenizer: Any, *, options: ChatOptions, answers: Sequence[str] = ()
    ) -> list[int]:
        """Tokens of what a server sends for the next answer."""
        try:
            ids = encode_prompt(tokenizer, self.messages(answers), options=options)
        except SkipRow as reason:
            raise self._refusal(str(reason)) from None
        except (TypeError, UnicodeError):  # half of a surrogate pair, which JSON can spell
            raise self._refusal("not text that can be encoded") from None
        if not ids:
            raise self._refusal("the chat template makes no token of it")
        return ids

    def _refusal(self, reason: str) -> DataError:
        return DataError(f"{self.where}: {reason}; repair or remove it")


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """The prompts of one file, under the name by which a report calls it."""

    name: str
    rows: tuple[PromptRow, ...]

    @property
    def turns(self) -> int:
        """How many answers all its rows want."""
        return sum(row.turns for row in self.rows)


def read_prompt_sets(sources: str, *, limit: int | None) -> list[PromptSet]:
    """The sets of files with commas between them, the first `limit` rows of each."""
    names = set_names(sources)
    return [
        PromptSet(name=name, rows=tuple(read_rows(source, limit=limit)))
        for source, name in names.items()
    ]


def set_names(sources: str) -> dict[str, str]:
    """Source to name: the file's own without its ending, or the whole path if two share that."""
    every = [source.strip() for source in sources.split(",")]
    if not all(every) or len(set(every)) < len(every):
        raise ConfigError(f"--prompts {sources}: want different files with commas between them")
    stems = [Path(source).stem for source in every]
    return {
        source: source if stems.count(stem) > 1 else stem
        for source, stem in zip(every, stems, strict=True)
    }


def read_rows(source: str, *, limit: int | None) -> list[PromptRow]:
    """The first rows of a source, each of them a prompt."""
    found = []
    for number, row in enumerate(islice(iter_rows(source, split="train"), limit), start=1):
        try:
            found.append(prompt_row(row, source=source, number=number))
        except SkipRow as reason:
            raise DataError(f"{source}, row {number}: {reason}; repair or remove it") from None
    if not found:
        raise DataError(f"{source}: holds no prompts; give --prompts a file with rows")
    return found


def prompt_row(row: Row, *, source: str, number: int) -> PromptRow:
    """What a row asks; SkipRow says why it asks nothing."""
    opening, follow_ups = _asked(row)
    return PromptRow(
        source=source,
        number=number,
        opening=tuple(opening),
        follow_ups=tuple(follow_ups),
        part=next((row[key] for key in PART_KEYS if _is_text(row.get(key))), None),
    )


def _asked(row: Row) -> tuple[list[Message], list[str]]:
    if isinstance(row.get("prompt"), str):
        return [{"role": "user", "content": _text(row["prompt"], "prompt")}], []
    if row.get("turns") is not None:
        first, *others = _user_turns(row["turns"])
        return [{"role": "user", "content": first}], others
    if not any(isinstance(row.get(key), list) for key in ("messages", "conversations")):
        raise SkipRow("no prompt (a text), turns (a list of texts), messages or conversations")
    opening = before_first_answer(messages_of(row))
    if not opening or opening[0]["role"] == "assistant":
        raise SkipRow("nothing comes before the first answer")
    return opening, []


def _user_turns(turns: Any) -> list[str]:
    if not isinstance(turns, list) or not turns:
        raise SkipRow("turns is no list of texts, one per user turn")
    return [_text(turn, "a turn") for turn in turns]


def _text(value: Any, name: str) -> str:
    if not _is_text(value):
        raise SkipRow(f"{name} is empty or no text")
    return str(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
