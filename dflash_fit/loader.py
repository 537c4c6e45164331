"""Packs from the cache as batches of the one shape.

The position in the data is a value (epoch, index, turn): give it back, and the same updates follow,
on any number of ranks.

Letters: K planes of states, T token slots, b bytes of a token.
"""

from collections.abc import Sequence
from dataclasses import replace
from threading import Event

import numpy as np
import torch

from dflash_cache.reader import Reader
from dflash_fit.anchors import candidates, draw, fixed
from dflash_fit.batch import Batch, BatchShape
from dflash_fit.course import ALONE, Course, Lanes, Planned, Position, ahead, located
from dflash_fit.errors import FitError
from dflash_fit.packing import Pack


def is_held_out(group: str, share: float) -> bool:
    """Whether a conversation never trains: decided by its hash, so all its pieces agree."""
    return int(group, 16) < share * 16.0 ** len(group)


def split_documents(reader: Reader, *, held_out: float) -> tuple[list[int], list[int]]:
    """Documents that train, and documents that are only measured."""
    training: list[int] = []
    measured: list[int] = []
    for index, sample in enumerate(reader.located):
        (measured if is_held_out(sample.group, held_out) else training).append(index)
    if not training or not measured:
        raise FitError(
            f"{reader.root}: --held-out {held_out} leaves {len(training)} samples to train on and "
            f"{len(measured)} to measure; both need at least one"
        )
    return training, measured


def refuse_long_documents(reader: Reader, *, token_budget: int) -> None:
    """A document is never split, so it has to fit a pack."""
    for sample in reader.located:
        if sample.length > token_budget:
            raise FitError(
                f"{reader.root}: sample {sample.sample_id} has {sample.length} tokens, a packed "
                f"batch {token_budget}; raise --token-budget, or rebuild with --max-length "
                f"{token_budget}"
            )


def fill_documents(
    batch: Batch,
    reader: Reader,
    pack: Pack,
    *,
    layer_ids: Sequence[int | str],
    order: tuple[int, int] | None = None,
) -> None:
    """Read the documents of a pack into a host batch; the rest becomes padding, zeros and all.

    `order` is epoch and number of a pack that is trained on.
    """
    reader.open_units(pack.documents)
    lengths = [reader.lengths[document] for document in pack.documents]
    _place(batch, pack.starts, lengths)
    ids_T, mask_T = batch.input_ids.numpy(), batch.loss_mask.numpy()
    ids_T.fill(0)
    mask_T.fill(False)
    for document, start, length in zip(pack.documents, pack.starts, lengths, strict=True):
        ids_T[start : start + length], mask_T[start : start + length] = reader.tokens(document)
    _clear_padding(batch, pack.starts, lengths)
    reader.read_documents(pack.documents, pack.starts, layer_ids, batch.parts, order=order)
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


def clear(batch: Batch) -> None:
    """Make a batch all padding.

    Nobody looks at its states, but 0 * NaN from an earlier pack would still be NaN.
    """
    for part in batch.parts.values():
        part.view(torch.uint8).zero_()  # float8 has no zero of its own
    for tensor in (batch.input_ids, batch.position_ids, batch.document_starts, batch.loss_mask):
        tensor.zero_()
    batch.document_ids.fill_(-1)


class PackSource:
    """The packs of a run as this rank takes part in them, read on demand.

    A round of packs is trained on `passes` times in a row, with other anchors every time;
    `anchors` are drawn each time, or as many as the batch has slots for.  The packs come from
    `course`, or are planned from lengths alone.
    """

    def __init__(
        self,
        reader: Reader,
        documents: Sequence[int],
        *,
        layer_ids: Sequence[int | str],
        shape: BatchShape,
        seed: int,
        passes: int = 1,
        lanes: Lanes = ALONE,
        course: Course | None = None,
        anchors: int | None = None,
    ) -> None:
        self.reader, self.documents, self.layer_ids = reader, documents, layer_ids
        self.shape, self.seed, self.passes, self.anchors = shape, seed, passes, anchors
        self.lanes = lanes
        self.course: Course = course or Planned(
            documents, reader.lengths, token_budget=shape.token_budget, seed=seed
        )

    def steps(self, epochs: int, *, most: int | None = None) -> int | None:
        """Updates in so many epochs, or `most` if there are more; None: not known yet.

        Packs that are too few for one more round are left out.  Only as many epochs are planned
        as it takes to see that `most` is reached.
        """
        packs, known = 0, True
        for epoch in range(epochs):
            length = self.course.length(epoch)
            packs, known = packs + (length or 0), known and length is not None
            steps = packs // self.lanes.packs * self.passes
            if most is not None and steps >= most:
                return most
        return packs // self.lanes.packs * self.passes if known else None

    def after(self, position: Position) -> Position:
        """The next update: the next pass over the round, otherwise the round behind it."""
        if position.turn + 1 < self.passes:
            return replace(position, turn=position.turn + 1)
        return replace(ahead(self.course, position, self.lanes.packs), turn=0)

    def whole(self, position: Position, *, stopped: Event | None = None) -> Position:
        """The position of a round, for sure, once all its packs are there, those of all ranks.

        Waits, and raises `CourseEnded`, as the course does.
        """
        last = ahead(self.course, position, self.lanes.packs - 1)
        located(self.course, last, stopped=stopped)
        return located(self.course, position, stopped=stopped)

    def pack_of(self, position: Position, lane: int) -> Pack:
        """The pack of a lane in the update at a position."""
        at = self._at(position, lane)
        return self.course.pack(at.epoch, at.index)

    def _at(self, position: Position, lane: int) -> Position:
        return located(self.course, ahead(self.course, position, lane))

    def stored_bytes(self, position: Position, lane: int | None = 0) -> int:
        """Bytes on disk of the states of a lane's pack, by the average over the cache."""
        if lane is None:
            return 0
        documents = self.pack_of(position, lane).documents
        tokens = sum(self.reader.lengths[document] for document in documents)
        return round(self.reader.state_bytes_per_token * len(self.layer_ids) * tokens)

    def fill(self, batch: Batch, position: Position, lane: int | None = 0) -> Batch:
        """Read the pack of a lane, and draw its anchors; None: all padding, no anchors."""
        if lane is None:
            clear(batch)
        else:
            at = self._at(position, lane)
            pack, order = self.course.pack(at.epoch, at.index), (at.epoch, at.index)
            fill_documents(batch, self.reader, pack, layer_ids=self.layer_ids, order=order)
        return self.draw(batch, position, lane)

    def draw(self, batch: Batch, position: Position, lane: int | None = 0) -> Batch:
        """Draw the anchors of a pass for a pack that has been read; None: there are none."""
        if lane is None:
            batch.anchor_positions.zero_()
            batch.anchor_valid.zero_()
            return batch
        at = self._at(position, lane)
        words = [self.seed, at.epoch, at.index, position.turn]
        fill_anchors(batch, np.random.default_rng(words), count=self.anchors)
        return batch
