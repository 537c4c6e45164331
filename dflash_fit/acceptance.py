"""Acceptance length of a text: what greedy speculative decoding of exactly it would commit.

Pure numpy.  A target pass verifies one block and commits the accepted draft tokens and one token
of the target's own; where the text ends, it commits what is left.  Acceptance length = committed
tokens per target pass.  The first token of an answer comes from reading the prompt and is not
counted.

B block size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The target passes of one text: accepted draft tokens and committed tokens of each."""

    accepted: tuple[int, ...]
    committed: tuple[int, ...]

    @property
    def length(self) -> float:
        """Acceptance length of this text."""
        return sum(self.committed) / len(self.committed)


def supervised_spans(loss_mask: np.ndarray) -> list[tuple[int, int]]:
    """First and last position of every run of at least two supervised tokens."""
    edges = np.diff(np.concatenate([[0], loss_mask.astype(np.int8), [0]]))
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1
    return [(int(s), int(e)) for s, e in zip(starts, ends, strict=True) if e > s]


def walk(accepted_at: Callable[[int], int], spans: Sequence[tuple[int, int]]) -> Chain:
    """Follow a -> a + accepted + 1 through every span; `accepted_at(a)` for the block at a."""
    accepted: list[int] = []
    committed: list[int] = []
    for start, end in spans:
        anchor = start
        while anchor < end:
            taken = min(accepted_at(anchor), end - anchor)
            accepted.append(taken)
            committed.append(min(taken + 1, end - anchor))
            anchor += committed[-1]
    return Chain(accepted=tuple(accepted), committed=tuple(committed))


def leading_true(right: np.ndarray) -> np.ndarray:
    """How many slots in a row are right from the first on: bool [n, B - 1] to int [n]."""
    run: np.ndarray = np.cumprod(right.astype(np.int64), axis=1).sum(axis=1)
    return run


def summarize(chains: Sequence[Chain], *, block_size: int) -> dict[str, Any]:
    """Micro (per target pass) and macro (per text) acceptance length, and acceptance per slot."""
    chains = [chain for chain in chains if chain.committed]
    accepted = np.array([n for chain in chains for n in chain.accepted], dtype=np.int64)
    committed = sum(sum(chain.committed) for chain in chains)
    if not len(accepted):
        return {"acceptance_length": 0.0, "acceptance_length_macro": 0.0, "per_position": [],
                "target_passes": 0, "tokens": 0, "texts": 0}  # fmt: skip
    return {
        "acceptance_length": committed / len(accepted),
        "acceptance_length_macro": float(np.mean([chain.length for chain in chains])),
        "per_position": [float((accepted >= k).mean()) for k in range(1, block_size)],
        "target_passes": len(accepted),
        "tokens": committed,
        "texts": len(chains),
    }


def prompt_lookup(tokens: Sequence[int], start: int, *, ngram: int, drafts: int) -> Chain:
    """The baseline without a model: propose what followed the last equal n-gram.

    `tokens` is prompt and answer, `start` the position of the answer's first token.  The most
    recent earlier occurrence of the last `ngram` tokens proposes up to `drafts` tokens.
    """
    seen: dict[tuple[int, ...], list[int]] = {}
    for end in range(ngram, len(tokens) + 1):
        seen.setdefault(tuple(tokens[end - ngram : end]), []).append(end)

    def accepted_at(anchor: int) -> int:
        known = anchor + 1  # tokens[:known] are committed
        earlier = [e for e in seen.get(tuple(tokens[known - ngram : known]), []) if e < known]
        if known < ngram or not earlier:
            return 0
        source, taken = earlier[-1], 0
        # A proposal may run into itself only as far as it is committed already.
        while (
            taken < drafts
            and source + taken < known
            and known + taken < len(tokens)
            and tokens[source + taken] == tokens[known + taken]
        ):
            taken += 1
        return taken

    return walk(accepted_at, [(start, len(tokens) - 1)])


def is_looping(tokens: Sequence[int], *, ngram: int = 8, distinct: float = 0.7) -> bool:
    """Whether under 70% of an answer's 8-grams are distinct: it repeats itself.

    Repetition is easy to draft, so looping answers inflate every acceptance length.
    """
    grams = [tuple(tokens[i : i + ngram]) for i in range(len(tokens) - ngram + 1)]
    return bool(grams) and len(set(grams)) < distinct * len(grams)
