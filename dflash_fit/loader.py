"""Packs from the cache as batches of the one shape, read ahead by a background thread.

The position in the data is a value (epoch, index): give it back, and the same batches follow.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from dflash_cache.reader import CacheReader
from dflash_fit.anchors import candidates, draw
from dflash_fit.batch import Batch, BatchShape
from dflash_fit.errors import FitError
from dflash_fit.packing import Pack, plan_epoch

AHEAD = 2  # batches read ahead of the one in use


@dataclass(frozen=True, kw_only=True)
class Position:
    """The next pack to train on."""

    epoch: int
    index: int


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
    batch: Batch, reader: CacheReader, pack: Pack, *, layer_ids: Sequence[int]
) -> None:
    """Read the documents of a pack into a host batch; the rest becomes padding, zeros and all."""
    reader.open_units(pack.documents)
    batch.document_ids.fill_(-1)
    batch.loss_mask.fill_(False)
    batch.input_ids.zero_()
    batch.position_ids.zero_()
    batch.document_starts.zero_()
    end = 0
    for number, (document, start) in enumerate(zip(pack.documents, pack.starts, strict=True)):
        ids, mask = reader.tokens(document)
        _clear(batch, end, start)
        end = start + len(ids)
        rows = slice(start, end)
        batch.input_ids[rows] = torch.from_numpy(ids)
        batch.loss_mask[rows] = torch.from_numpy(mask)
        batch.position_ids[rows] = torch.arange(len(ids))
        batch.document_ids[rows] = number
        batch.document_starts[rows] = start
    _clear(batch, end, len(batch.input_ids))
    reader.read_documents(pack.documents, pack.starts, layer_ids, batch.parts)
    channels = reader.channels(layer_ids)
    if channels is not None:
        batch.channels.copy_(channels)


def _clear(batch: Batch, begin: int, end: int) -> None:
    """Nobody looks at padding, but 0 * NaN from an earlier batch would still be NaN."""
    for part in batch.parts.values():
        part[:, begin:end].view(torch.uint8).zero_()  # float8 has no zero of its own


def fill_anchors(batch: Batch, rng: np.random.Generator) -> None:
    """Draw the anchors of a host batch."""
    positions = candidates(batch.loss_mask.numpy(), batch.document_ids.numpy())
    anchors, valid = draw(positions, count=len(batch.anchor_positions), rng=rng)
    batch.anchor_positions.copy_(torch.from_numpy(anchors))
    batch.anchor_valid.copy_(torch.from_numpy(valid))


class PackSource:
    """The training packs of every epoch, planned from lengths alone, read on demand."""

    def __init__(
        self,
        reader: CacheReader,
        documents: Sequence[int],
        *,
        layer_ids: Sequence[int],
        shape: BatchShape,
        seed: int,
    ) -> None:
        self.reader, self.documents, self.layer_ids = reader, documents, layer_ids
        self.shape, self.seed = shape, seed
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
        """Packs in so many epochs."""
        return sum(len(self._plan(epoch)) for epoch in range(epochs))

    def after(self, position: Position) -> Position:
        """The position that follows, in the next epoch where this one ends."""
        if position.index + 1 < len(self.plan(position.epoch)):
            return Position(epoch=position.epoch, index=position.index + 1)
        return Position(epoch=position.epoch + 1, index=0)

    def fill(self, batch: Batch, position: Position) -> Batch:
        """Read the pack at a position, and draw its anchors."""
        pack = self.plan(position.epoch)[position.index]
        fill_documents(batch, self.reader, pack, layer_ids=self.layer_ids)
        fill_anchors(batch, np.random.default_rng([self.seed, position.epoch, position.index]))
        return batch


class Loader:
    """Iterates (batch, position behind it); keeps count of the seconds that it was waited for.

    A yielded host batch belongs to the caller until the next one is asked for.
    """

    def __init__(self, source: PackSource, position: Position, *, steps: int, pinned: bool) -> None:
        self.source, self.position, self.steps = source, position, steps
        self.waited = 0.0
        cpu = torch.device("cpu")
        self.buffers = [
            Batch.empty(source.shape, device=cpu, pinned=pinned) for _ in range(AHEAD + 1)
        ]

    def __iter__(self) -> Iterator[tuple[Batch, Position]]:
        free = deque(self.buffers)
        reading: deque[tuple[Future[Batch], Position]] = deque()
        position, asked = self.position, 0
        with ThreadPoolExecutor(1, thread_name_prefix="reader") as pool:
            for _ in range(self.steps):
                while free and asked < self.steps:
                    behind = self.source.after(position)
                    future = pool.submit(self.source.fill, free.popleft(), position)
                    reading.append((future, behind))
                    position, asked = behind, asked + 1
                future, behind = reading.popleft()
                began = time.perf_counter()
                batch = future.result()
                self.waited += time.perf_counter() - began
                yield batch, behind
                free.append(batch)
