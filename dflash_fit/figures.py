"""What answers are worth in numbers: by data set, by part of one, and in all.  No torch.

Every acceptance length is counted alike, that of the drafter, of the offline measurement and of
prompt lookup.  Micro is over target passes, macro the mean over answers.  The standard errors are
those of a ratio of sums over independent prompts; turns of one chat count as one prompt, since
the later ones go on from the earlier.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_fit.acceptance import Chain, is_looping, prompt_lookup, summarize

LOOKUP_NGRAM = 3


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One answer, written by the target alone and with the drafter, and what both took."""

    dataset: str
    part: str | None  # what its data set is also counted by
    row: int  # number of its row in the data set
    prompt: tuple[int, ...]
    plain: tuple[int, ...]  # tokens that the target wrote alone
    tokens: tuple[int, ...]  # tokens of speculative decoding
    chain: Chain  # its target passes
    offline: Chain  # the target passes that a cache would foretell for these tokens
    plain_seconds: float  # reading the prompt included
    seconds: float
    gap: float | None = None  # between the target's two logits where greedy answers part

    @property
    def looping(self) -> bool:
        return is_looping(self.tokens)

    def lookup(self, *, block_size: int) -> Chain:
        """The baseline of the same answer, with as many draft tokens."""
        text = (*self.prompt, *self.tokens)
        return prompt_lookup(text, len(self.prompt), ngram=LOOKUP_NGRAM, drafts=block_size - 1)


@dataclass(frozen=True, kw_only=True)
class Counting:
    """What figures must know beside the answers."""

    block_size: int
    greedy: bool  # both ways should have written the same


def by_dataset(answers: Sequence[Measured], how: Counting) -> dict[str, Any]:
    """Figures of every data set, and of its parts where it has several."""
    found: dict[str, Any] = {}
    for name, own in _split(answers, lambda answer: answer.dataset).items():
        found[name] = figures(own, how)
        parts = _split(own, lambda answer: answer.part or "other")
        if len(parts) > 1:
            found[name]["parts"] = {part: figures(some, how) for part, some in parts.items()}
    return found


def _split(
    answers: Sequence[Measured], key: Callable[[Measured], str]
) -> dict[str, list[Measured]]:
    found: dict[str, list[Measured]] = {}
    for answer in answers:
        found.setdefault(key(answer), []).append(answer)
    return found


def figures(answers: Sequence[Measured], how: Counting) -> dict[str, Any]:
    """Everything that is said of some answers."""
    block_size = how.block_size
    chains = [answer.chain for answer in answers]
    lookup = [answer.lookup(block_size=block_size) for answer in answers]
    loops = [answer.looping for answer in answers]
    differing = sum(answer.plain != answer.tokens for answer in answers)
    plain_speed = per_second((len(a.plain), a.plain_seconds) for a in answers)
    speed = per_second((len(a.tokens), a.seconds) for a in answers)

    def length(chains: Sequence[Chain]) -> float | None:
        return summarize(chains, block_size=block_size)["acceptance_length"] or None

    def straight(chains: Sequence[Chain]) -> float | None:
        return length([chain for chain, loop in zip(chains, loops, strict=True) if not loop])

    counted = summarize(chains, block_size=block_size)
    return {
        **counted,
        **standard_errors(answers),
        # Nothing is measured where every answer is one token: no pass followed the prompt.
        "acceptance_length": counted["acceptance_length"] or None,
        "acceptance_length_macro": counted["acceptance_length_macro"] or None,
        "full_blocks": counted["per_position"][-1] if counted["per_position"] else None,
        "acceptance_length_not_looping": straight(chains),
        "offline_acceptance_length": length([answer.offline for answer in answers]),
        "identical_to_greedy": differing == 0 if how.greedy else None,
        "answers_differing": differing if how.greedy else None,
        "answers_differing_gap": max((a.gap for a in answers if a.gap is not None), default=None),
        "plain_tokens_per_second": plain_speed,
        "tokens_per_second": speed,
        "speedup": speed / plain_speed if plain_speed else 0.0,
        "prompt_lookup": length(lookup),
        "prompt_lookup_not_looping": straight(lookup),
        "looping": sum(loops) / max(len(loops), 1),
        "prompts": len({(answer.dataset, answer.row) for answer in answers}),
        "answers": len(answers),
        "answer_tokens": sum(len(answer.tokens) for answer in answers),
    }


def per_second(counts: Iterable[tuple[int, float]]) -> float:
    """Tokens per second of pairs of both."""
    tokens, seconds = map(sum, zip(*counts, strict=True))
    return float(tokens / max(seconds, 1e-9))


def standard_errors(answers: Sequence[Measured]) -> dict[str, float | None]:
    """Of the acceptance length, micro and macro; None where fewer than two prompts were counted."""
    rows: dict[tuple[str, int], list[Chain]] = {}
    for answer in answers:
        if answer.chain.committed:
            rows.setdefault((answer.dataset, answer.row), []).append(answer.chain)
    tokens = [sum(sum(chain.committed) for chain in chains) for chains in rows.values()]
    passes = [sum(len(chain.committed) for chain in chains) for chains in rows.values()]
    lengths = [sum(chain.length for chain in chains) for chains in rows.values()]
    texts = [len(chains) for chains in rows.values()]
    return {
        "acceptance_length_error": ratio_error(tokens, passes),
        "acceptance_length_macro_error": ratio_error(lengths, texts),
    }


def ratio_error(above: Sequence[float], below: Sequence[float]) -> float | None:
    """Standard error of sum(above) / sum(below) over independent pairs, to first order.

    With all of `below` equal it is that of a mean.  Source: Cochran, Sampling Techniques (1977),
    section 6.4, without the correction for a finite population.
    """
    count = len(above)
    if count < 2:
        return None
    ratio = sum(above) / sum(below)
    squares = sum((a - ratio * b) ** 2 for a, b in zip(above, below, strict=True))
    return math.sqrt(squares * count / (count - 1)) / sum(below)
