"""Answer prompt sets twice, by the target alone and with the drafter, and time both in one run.

The two ways take turns prompt by prompt, and which goes first changes every time, so that a
machine that slows down does so for both.  A short answer that is not counted comes before, and
pays for what happens only once.  Where a chat has several turns, the target's own answer to one
stands in the prompt of the next, for both ways.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dflash_cache.chat import ChatOptions
from dflash_cache.errors import DataError, DFlashError
from dflash_cache.target import Target
from dflash_fit.decode import Decoded, plain_batch, speculate_batch
from dflash_fit.drafter import DFlashDraftModel
from dflash_fit.figures import Measured, per_second
from dflash_fit.offline_text import offline_chain
from dflash_fit.prompts import PromptRow, PromptSet
from dflash_fit.sampling import Choose, Sampler, likeliest
from dflash_fit.step import Frozen
from dflash_fit.ties import answer_gap

WARM_UP_TOKENS = 16
# Not simply in turn: in chats of two turns the first would always go to the same way.
DRAFTER_FIRST = (False, True, True, False)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A target and its drafter, and how they are asked."""

    target: Target
    drafter: DFlashDraftModel
    frozen: Frozen
    chat: ChatOptions
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    batch_size: int = 1


def answer_sets(sets: Sequence[PromptSet], pair: Pair) -> list[Measured]:
    """Every turn of every row of every set, answered both ways."""
    warm_up(sets[0].rows[0], pair)
    answers: list[Measured] = []
    drafter_first = cycle(DRAFTER_FIRST)
    with tqdm(total=sum(one.turns for one in sets), unit="answer", disable=None) as bar:
        for one in sets:
            bar.set_description(one.name)
            for rows in batches(one, size=pair.batch_size):
                for new in answer_rows(rows, pair, drafter_first, dataset=one.name):
                    answers += new
                    bar.set_postfix_str(pace(answers), refresh=False)
                    bar.update(len(new))
    return answers


def warm_up(row: PromptRow, pair: Pair) -> None:
    """Answer a little both ways: libraries load, kernels are chosen, memory is fetched."""
    rows = [replace(row, follow_ups=())] * pair.batch_size
    short = replace(pair, max_new_tokens=min(WARM_UP_TOKENS, pair.max_new_tokens))
    for _ in answer_rows(rows, short, cycle(DRAFTER_FIRST), dataset="warm-up"):
        pass


def batches(prompts: PromptSet, *, size: int) -> Iterator[list[PromptRow]]:
    """Rows that are answered together: of one part, whose seconds are then its own."""
    for part in dict.fromkeys(row.part for row in prompts.rows):
        rows = [row for row in prompts.rows if row.part == part]
        for begin in range(0, len(rows), size):
            yield rows[begin : begin + size]


def pace(answers: Sequence[Measured]) -> str:
    """How fast both ways were so far, as a progress bar says it."""
    plain = per_second((len(a.plain), a.plain_seconds) for a in answers)
    drafted = per_second((len(a.tokens), a.seconds) for a in answers)
    return f"{plain:.1f} tokens/s alone, {drafted:.1f} with the drafter"


def answer_rows(
    rows: Sequence[PromptRow], pair: Pair, drafter_first: Iterator[bool], *, dataset: str
) -> Iterator[list[Measured]]:
    """The answers of a batch of rows, turn by turn."""
    said: list[list[str]] = [[] for _ in rows]
    for turn in range(max(row.turns for row in rows)):
        asking = [number for number, row in enumerate(rows) if turn < row.turns]
        asked = [rows[number] for number in asking]
        prompts = [prompt_ids(rows[number], pair, answers=said[number]) for number in asking]
        with named(asked):
            new = answer_prompts(
                asked, prompts, pair, dataset=dataset, turn=turn, drafter_first=next(drafter_first)
            )
        for number, answer in zip(asking, new, strict=True):
            text = pair.target.tokenizer.decode(answer.plain, skip_special_tokens=True)
            said[number].append(text)
        yield new


def prompt_ids(row: PromptRow, pair: Pair, *, answers: Sequence[str] = ()) -> list[int]:
    """Tokens of the next prompt of a chat; refuses what the target has no positions for."""
    ids = row.ids(pair.target.tokenizer, options=pair.chat, answers=answers)
    refuse_too_long(row, len(ids), pair.max_new_tokens, pair.target.spec.max_position_embeddings)
    return ids


def refuse_too_long(row: PromptRow, length: int, max_new_tokens: int, positions: int) -> None:
    if length + max_new_tokens > positions:
        raise DataError(
            f"{row.where}: {length} tokens of prompt and {max_new_tokens} of answer, the target "
            f"has {positions} positions; lower --max-new-tokens or remove the row"
        )


@contextmanager
def named(rows: Sequence[PromptRow]) -> Iterator[None]:
    """What goes wrong inside tells at which prompt."""
    # The warm-up asks one row several times.
    numbers = list(dict.fromkeys(str(row.number) for row in rows))
    where = f"{rows[0].source}, rows {', '.join(numbers)}" if len(numbers) > 1 else rows[0].where
    try:
        yield
    except DFlashError as error:
        raise type(error)(f"{where}: {error}") from None
    except torch.OutOfMemoryError as error:
        raise DataError(
            f"{where}: out of memory ({str(error).splitlines()[0]}); lower --batch-size or "
            "--max-new-tokens, or remove the row"
        ) from None
    except Exception as error:
        error.add_note(f"while answering {where}")
        raise


def answer_prompts(
    rows: Sequence[PromptRow],
    prompts: Sequence[list[int]],
    pair: Pair,
    *,
    dataset: str,
    turn: int,
    drafter_first: bool,
) -> list[Measured]:
    """Both ways, one after the other."""
    ids = [torch.tensor(prompt, device=pair.target.device) for prompt in prompts]
    choose = partial(chooser, pair, crc32(dataset.encode()), rows[0].number, turn)
    plainly, drafting = partial(alone, pair, ids), partial(with_drafter, pair, ids)
    if drafter_first:
        drafted, seconds = timed(drafting, choose(1))
        plain, plain_seconds = timed(plainly, choose(0))
    else:
        plain, plain_seconds = timed(plainly, choose(0))
        drafted, seconds = timed(drafting, choose(1))
    return [
        Measured(
            dataset=dataset,
            part=row.part,
            row=row.number,
            prompt=tuple(prompt),
            plain=tuple(own.tokens),
            tokens=tuple(answer.tokens),
            chain=answer.chain,
            offline=offline_chain(pair.target, pair.drafter, pair.frozen, prompt, answer.tokens),
            plain_seconds=plain_seconds / len(rows),
            seconds=seconds / len(rows),
            gap=gap_of(pair, prompt, own, answer),
        )
        for row, prompt, own, answer in zip(rows, prompts, plain, drafted, strict=True)
    ]


def gap_of(pair: Pair, prompt: list[int], own: Decoded, answer: Decoded) -> float | None:
    """How near the target's choice was where two greedy answers part: a tie, or a mistake?"""
    if pair.temperature > 0 or own.tokens == answer.tokens:
        return None
    ids = torch.tensor(prompt, device=pair.target.device)
    gap = answer_gap(pair.target, ids, own.tokens, answer.tokens)
    assert gap is not None, (own.tokens, answer.tokens)
    return gap.logits


def timed(way: Callable[[Choose], list[Decoded]], choose: Choose) -> tuple[list[Decoded], float]:
    """Answers and the seconds they took; tokens are on the host by then, so no device lags."""
    began = time.perf_counter()
    answers = way(choose)
    return answers, time.perf_counter() - began


def alone(pair: Pair, prompts: Sequence[Tensor], choose: Choose) -> list[Decoded]:
    """Plain decoding of prompts [n] each."""
    return plain_batch(
        pair.target,
        prompts,
        max_new_tokens=pair.max_new_tokens,
        stop_ids=pair.target.stop_ids,
        choose=choose,
    )


def with_drafter(pair: Pair, prompts: Sequence[Tensor], choose: Choose) -> list[Decoded]:
    """Speculative decoding of prompts [n] each."""
    return speculate_batch(
        pair.target,
        pair.drafter,
        pair.frozen,
        prompts,
        max_new_tokens=pair.max_new_tokens,
        stop_ids=pair.target.stop_ids,
        choose=choose,
    )


def chooser(pair: Pair, *words: int) -> Choose:
    """How the target chooses tokens; draws are repeatable by the seed and the given numbers."""
    if pair.temperature == 0:
        return likeliest
    seed = np.random.SeedSequence([pair.seed, *words]).generate_state(1)
    generator = torch.Generator(pair.target.device).manual_seed(int(seed[0]))
    return Sampler(temperature=pair.temperature, generator=generator)
