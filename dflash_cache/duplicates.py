"""Find rows that nearly repeat a prompt of an evaluation, so that nobody trains on the exam.

Texts are compared as words: letters and digits, lower case, compatibility forms folded; Chinese,
Japanese and Korean count each character as a word.  A row repeats a prompt when

- its opening has the same words, or
- the prompt has at least `LEAST_WORDS` words and the row's user turns hold at least `SHARE` of its
  distinct runs of `RUN` words, wherever they stand.

Runs that many of the prompts have in common ("answer step by step ...") show nothing and do not
count; a prompt that has hardly any other is compared as a whole only.  The time is linear in the
rows.
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from dflash_cache.chat import SkipRow
from dflash_cache.conversations import (
    before_first_answer,
    ids_before_first_answer,
    is_ready,
    messages_of,
    text_of,
)
from dflash_cache.errors import DataError
from dflash_cache.rows import Row, iter_rows
from dflash_cache.schema import canonical_json

REASON = "nearly repeats a prompt of --exclude"
RUN, SHARE, LEAST_WORDS = 5, 0.7, 8
# A run is common when more prompts have it than this number and than this share.
COMMON_COUNT, COMMON_SHARE = 3, 0.02

NO_SPACES = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
WORD = re.compile(rf"[{NO_SPACES}]|[^\W_{NO_SPACES}]+")


def words_of(text: str) -> list[str]:
    """The words of a text; its other characters where it has no word at all."""
    # Folding the case may leave what the compatibility forms fold once more.
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return WORD.findall(folded) or folded.split()


def runs_of(words: list[str]) -> set[str]:
    return {" ".join(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Prompts as what a row is compared with."""

    whole: frozenset[str]  # the words of each
    owners: dict[str, list[int]]  # by run: the prompts that have it
    needed: list[int]  # by prompt: how many of its runs a row may not hold

    def sha256(self) -> str:
        """Hash of all that decides which rows go."""
        return sha256(canonical_json([sorted(self.whole), self.owners, self.needed])).hexdigest()

    def hit(self, opening: str, asked: Iterable[str]) -> bool:
        """Whether a row with this opening and these user turns nearly repeats a prompt."""
        if " ".join(words_of(opening)) in self.whole:
            return True
        runs = set().union(*(runs_of(words_of(text)) for text in asked))
        held = Counter(owner for run in runs for owner in self.owners.get(run, ()))
        return any(count >= self.needed[owner] for owner, count in held.items())


def read_prompts(source: str) -> Prompts:
    """The prompts of a file or data set, as `dflash eval --prompts` takes them."""
    texts: list[str] = []
    for number, row in enumerate(iter_rows(source, split="train"), start=1):
        try:
            texts += _prompt_texts(row)
        except SkipRow as reason:
            raise DataError(f"{source}, row {number}: {reason}; repair or remove it") from None
    if not texts:
        raise DataError(f"{source}: holds no prompts; give --exclude a file with prompts")
    return index_prompts(texts)


def index_prompts(texts: Iterable[str]) -> Prompts:
    """Prompts ready to be compared with; equal ones count once."""
    prompts = dict.fromkeys(" ".join(words_of(text)) for text in texts)
    prompts.pop("", None)
    runs = [runs_of(words) for prompt in prompts if len(words := prompt.split()) >= LEAST_WORDS]
    counts = Counter(run for some in runs for run in some)
    most = max(COMMON_COUNT, COMMON_SHARE * len(runs))
    telling = [_enough({run for run in some if counts[run] <= most}, some) for some in runs]
    owners: dict[str, list[int]] = {}
    for number, some in enumerate(telling):
        for run in sorted(some):
            owners.setdefault(run, []).append(number)
    needed = [max(1, math.ceil(SHARE * len(some) - 1e-9)) for some in telling]
    return Prompts(whole=frozenset(prompts), owners=owners, needed=needed)


def _enough(telling: set[str], some: set[str]) -> set[str]:
    """The telling runs of a prompt; none if they are fewer than the shortest prompt has.

    "... question step by step: why?" has one, and that row asks anything that begins with why.
    """
    return telling if telling == some or len(telling) > LEAST_WORDS - RUN else set()


def _prompt_texts(row: Row) -> list[str]:
    if isinstance(row.get("prompt"), str):
        return [row["prompt"]]
    if isinstance(row.get("turns"), list):
        return [turn for turn in row["turns"] if isinstance(turn, str)]
    if not isinstance(row.get("messages", row.get("conversations")), list):
        raise SkipRow("no messages, conversations, prompt or turns")
    return ["\n".join(user_texts(before_first_answer(messages_of(row))))]


def user_texts(turns: list[dict[str, Any]]) -> list[str]:
    return [text_of(turn.get("content")) for turn in turns if turn["role"] == "user"]


def repeats_a_prompt(row: Row, prompts: Prompts, tokenizer: Any) -> bool:
    """Whether a row of any form nearly repeats one of the prompts."""
    if is_ready(row):
        text = str(tokenizer.decode(ids_before_first_answer(row), skip_special_tokens=True))
        return prompts.hit(text, [text])
    if isinstance(row.get("text"), str):
        return prompts.hit(row["text"], [row["text"]])
    turns = messages_of(row)
    return prompts.hit("\n".join(user_texts(before_first_answer(turns))), user_texts(turns))
