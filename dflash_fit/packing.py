"""Plan which documents share a packed batch.  Pure integers: no torch, no zarr, no I/O.

An epoch's packs depend on lengths, seed and epoch alone.  Documents are never split.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Documents start at multiples of this many slots: rows of hidden states then start where
# direct reads can put them.
ALIGNMENT = 8
# How many shuffled documents are packed together: larger fills better, smaller mixes better.
WINDOW = 4096


@dataclass(frozen=True, kw_only=True)
class Pack:
    """One packed batch: which documents, and the slot at which each starts."""

    documents: tuple[int, ...]
    starts: tuple[int, ...]


def slots(length: int) -> int:
    """Slots that a document takes up, its gap to the next one included."""
    return -(-length // ALIGNMENT) * ALIGNMENT


def plan_epoch(
    documents: Sequence[int],
    lengths: Sequence[int],
    *,
    token_budget: int,
    seed: int,
    epoch: int,
    window: int = WINDOW,
) -> list[Pack]:
    """Every document in exactly one pack; `lengths[d]` is the length of document d.

    Shuffled, packed window by window, shuffled again, so that neither a pack nor the order of
    packs is sorted by length.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(np.asarray(documents, dtype=np.int64)).tolist()
    packs: list[list[int]] = []
    for begin in range(0, len(order), window):
        packs += fit_best(order[begin : begin + window], lengths, token_budget=token_budget)
    return [place(packs[i], lengths, rng) for i in rng.permutation(len(packs))]


def fit_best(
    documents: Sequence[int], lengths: Sequence[int], *, token_budget: int
) -> list[list[int]]:
    """Best fit, long before short: each document into the fullest pack that still takes it.

    Documents of like length stay in the order given.  Sorted to the last token, a window that
    holds all documents would put the same ones together in every epoch.
    """
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free slots, pack), sorted
    for document in sorted(documents, key=lambda d: -_class(lengths[d])):
        size = slots(lengths[document])
        # The last document of a pack needs no gap behind it, hence its bare length here.
        at = bisect_left(room, (lengths[document], -1))
        if at == len(room):
            assert lengths[document] <= token_budget, (lengths[document], token_budget)
            packs.append([document])
            insort(room, (token_budget - size, len(packs) - 1))
        else:
            free, pack = room.pop(at)
            packs[pack].append(document)
            insort(room, (free - size, pack))
    return packs


def _class(length: int) -> int:
    """Two classes of length per factor of two."""
    return (length * length).bit_length()


def place(documents: Sequence[int], lengths: Sequence[int], rng: np.random.Generator) -> Pack:
    """The documents of one pack as `fit_best` gives them, in another order, with their slots."""
    # A document that fitted only without its gap has a length that is no multiple of the
    # alignment; it must stay last, and best fit puts it there.
    last = documents[-1]
    order = [documents[i] for i in rng.permutation(len(documents) - 1)] + [last]
    starts = np.concatenate([[0], np.cumsum([slots(lengths[d]) for d in order[:-1]])])
    return Pack(documents=tuple(order), starts=tuple(int(s) for s in starts))


def fill(packs: Sequence[Pack], lengths: Sequence[int], *, token_budget: int) -> float:
    """Share of the token slots that hold a token."""
    tokens = sum(lengths[d] for pack in packs for d in pack.documents)
    return tokens / (len(packs) * token_budget) if packs else 1.0
