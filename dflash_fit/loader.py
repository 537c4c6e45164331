"""Packs from the cache as batches of the one shape.

The position in the data is a value (epoch, index, turn): give it back, and the same batches follow.

Letters: K planes of states, T token slots, b bytes of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from dflash_cache.reader import CacheReader
from dflash_fit.anchors import candidates, draw, fixed
from dflash_fit.batch import Batch, BatchShape
from dflash_fit.errors import FitError
from dflash_fit.packing import Pack, plan_epoch


@dataclass(frozen=True, kw_only=True)
class Position:
    """What is trained on next; `turn` counts the passes over a pack that is read once."""

    epoch: int
    index: int
    turn: int = 0


def is_held_out(group: str, share: float) -> bool:
    """Whether a conversation never trains: decided by its hash, so all its pieces agree."""
    return int(group, 16) < share * 16.0 ** len(group)


def split_documents(reader: CacheReader, *, held_out: float) -> tuple[list[int], list[int]]:
    """Documents that train, and documents that are only measured."""
    training: list[int] = []
    measured: list[int] = []
    for index, located in enumerate(reader.located):
        (measured if is_held_out(located.group, held_out) else training).append(index)
    if not training or not measured:
        raise FitError(
            f"{reader.root}: --held-out {held_out} leaves {len(training)} samples to train on and "
            f"{len(measured)} to measure; both need at least one"
        )
    return training, measured


def refuse_long_documents(reader: CacheReader, *, token_budget: int) -> None:
    """A document is never split, so it has to fit a pack."""
    for located in reader.located:
        if located.length > token_budget:
            raise FitError(
                f"{reader.root}: sample {located.sample_id} has {located.length} tokens, a packed "
                f"batch {token_budget}; raise --token-budget, or rebuild with --max-length "
                f"{token_budget}"
            )


def fill_documents(
    batch: Batch, reader: CacheReader, pack: Pack, *, layer_ids: Sequence[int | str]
) -> None:
    """Read the documents of a pack into a host batch; the rest becomes padding, zeros and all."""
    reader.open_units(pack.documents)
    lengths = [reader.lengths[document] for document in pack.documents]
    _place(batch, pack.starts, lengths)
    ids_T, mask_T = batch.input_ids.numpy(), batch.loss_mask.numpy()
    ids_T.fill(0)
    mask_T.fill(False)
    for document, start, length in zip(pack.documents, pack.starts, lengths, strict=True):
        ids_T[start : start + length], mask_T[start : start + length] = reader.tokens(document)
    _clear_padding(batch, pack.starts, lengths)
    reader.read_documents(pack.documents, pack.starts, layer_ids, batch.parts)
    channels = reader.channels(layer_ids)
    if channels is not None:
        batch.channels.copy_(channels)


def _place(batch: Batch, starts: Sequence[int], lengths: Sequence[int]) -> None:
    """Say of every slot which document it belongs to, and where in it."""
    budget = len(batch.input_ids)
    # Documents and the gaps behind them take turns; in a gap the number is -1, the start 0.
    ends = [*starts[1:], budget]
    gaps = [end - start - length for start, length, end in zip(starts, lengths, ends, strict=True)]
    runs = np.stack([lengths, gaps], axis=1).ravel()
    numbers = np.stack([np.arange(len(starts)), np.full(len(starts), -1)], axis=1).ravel()
    begins = np.stack([starts, np.zeros_like(starts)], axis=1).ravel()
    document_ids, document_starts = np.repeat(numbers, runs), np.repeat(begins, runs)
    batch.document_ids.numpy()[:] = document_ids
    batch.document_starts.numpy()[:] = document_starts
    batch.position_ids.numpy()[:] = (np.arange(budget) - document_starts) * (document_ids >= 0)


def _clear_padding(batch: Batch, starts: Sequence[int], lengths: Sequence[int]) -> None:
    """Nobody looks at padding, but 0 * NaN from an earlier batch would still be NaN."""
    ends = [*starts[1:], len(batch.input_ids)]
    for part in batch.parts.values():
        # Bytes of every token: float8 has no zero of its own.
        raw_KTb = part.view(torch.uint8).numpy().reshape(*part.shape[:2], -1)
        for start, length, end in zip(starts, lengths, ends, strict=True):
            raw_KTb[:, start + length : end] = 0


def fill_anchors(batch: Batch, rng: np.random.Generator, *, count: int | None = None) -> None:
    """Draw the anchors of a host batch; as many as it has slots for, or only `count`."""
    slots = len(batch.anchor_positions)
    positions = candidates(batch.loss_mask.numpy(), batch.document_ids.numpy())
    anchors, valid = draw(positions, count=slots if count is None else count, rng=rng)
    anchors, valid = fixed(anchors[valid], count=slots)
    batch.anchor_positions.numpy()[:] = anchors
    batch.anchor_valid.numpy()[:] = valid


class PackSource:
    """The training packs of every epoch, planned from lengths alone, read on demand.

    A pack is trained on `passes` times in a row, with other anchors every time; `anchors` are
    drawn each time, or as many as the batch has slots for.
    """

    def __init__(
        self,
        reader: CacheReader,
        documents: Sequence[int],
        *,
        layer_ids: Sequence[int | str],
        shape: BatchShape,
        seed: int,
        passes: int = 1,
        anchors: int | None = None,
    ) -> None:
        self.reader, self.documents, self.layer_ids = reader, documents, layer_ids
        self.shape, self.seed, self.passes, self.anchors = shape, seed, passes, anchors
        self.plan = lru_cache(maxsize=2)(self._plan)

    def _plan(self, epoch: int) -> list[Pack]:
        return plan_epoch(
            self.documents,
            self.reader.lengths,
            token_budget=self.shape.token_budget,
            seed=self.seed,
            epoch=epoch,
        )

    def steps(self, epochs: int) -> int:
        """Batches in so many epochs: packs, times the passes over each."""
        return self.passes * sum(len(self._plan(epoch)) for epoch in range(epochs))

    def after(self, position: Position) -> Position:
        """The position that follows: the next turn, otherwise the next pack, otherwise epoch."""
        if position.turn + 1 < self.passes:
            return replace(position, turn=position.turn + 1)
        if position.index + 1 < len(self.plan(position.epoch)):
            return Position(epoch=position.epoch, index=position.index + 1)
        return Position(epoch=position.epoch + 1, index=0)

    def pack(self, position: Position) -> Pack:
        return self.plan(position.epoch)[position.index]

    def stored_bytes(self, position: Position) -> int:
        """Bytes on disk of the states of a pack, by the average over the cache."""
        manifest, planes = self.reader.manifest, self.reader.identity.planes
        tokens = sum(self.reader.lengths[document] for document in self.pack(position).documents)
        share = len(self.layer_ids) / len(planes)
        return round(manifest.bytes / manifest.tokens * share * tokens)

    def fill(self, batch: Batch, position: Position) -> Batch:
        """Read the pack at a position, and draw the anchors of its turn."""
        fill_documents(batch, self.reader, self.pack(position), layer_ids=self.layer_ids)
        return self.draw(batch, position)

    def draw(self, batch: Batch, position: Position) -> Batch:
        """Draw the anchors of a turn for a pack that has been read."""
        words = [self.seed, position.epoch, position.index, position.turn]
        fill_anchors(batch, np.random.default_rng(words), count=self.anchors)
        return batch
