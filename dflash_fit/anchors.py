"""Choose where draft blocks start.  Pure numpy: no torch, no I/O.

Anchors are data: chosen here, carried in the batch, so that the training step has neither
randomness nor a shape that depends on its input.  Letters: T token slots, A anchors.
"""

import numpy as np

Anchors = tuple[np.ndarray, np.ndarray]


def candidates(loss_mask: np.ndarray, document_ids: np.ndarray) -> np.ndarray:
    """Positions i where i and i + 1 are supervised and of one document, ascending."""
    both = loss_mask[:-1] & loss_mask[1:]
    same = (document_ids[:-1] == document_ids[1:]) & (document_ids[:-1] >= 0)
    return np.flatnonzero(both & same)


def draw(positions: np.ndarray, *, count: int, rng: np.random.Generator) -> Anchors:
    """`count` anchors drawn uniformly without replacement: positions int64 [A], valid bool [A].

    Sorted; where there are fewer candidates, the slots behind them are invalid, at position 0.
    """
    taken = min(count, len(positions))
    chosen = np.sort(rng.choice(positions, size=taken, replace=False)) if taken else positions[:0]
    return fixed(chosen, count=count)


def fixed(chosen: np.ndarray, *, count: int) -> Anchors:
    """The given positions in `count` slots, the rest invalid."""
    assert len(chosen) <= count, (len(chosen), count)
    anchors = np.zeros(count, np.int64)
    valid = np.zeros(count, bool)
    anchors[: len(chosen)] = chosen
    valid[: len(chosen)] = True
    return anchors, valid
