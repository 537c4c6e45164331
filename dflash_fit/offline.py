"""Offline acceptance: how long the drafter's drafts would be accepted on texts in the cache.

Every supervised position is an anchor once; the chain of anchors is then walked per document.
On text that the target wrote greedily this is exactly what speculative decoding commits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from dflash_cache.reader import Reader
from dflash_fit.acceptance import Chain, leading_true, summarize, supervised_spans, walk
from dflash_fit.anchors import candidates, fixed
from dflash_fit.batch import Batch, BatchShape
from dflash_fit.drafter import DFlashDraftModel
from dflash_fit.figures import ratio_error
from dflash_fit.loader import fill_documents
from dflash_fit.loss import block_targets
from dflash_fit.packing import Pack, plan_epoch
from dflash_fit.step import Frozen, Pieces, project, run_blocks
from dflash_fit.world import World

HEAD_ROWS = 4096  # rows that go through the head at once


@torch.no_grad()
def slots_right(
    drafter: DFlashDraftModel,
    frozen: Frozen,
    batch: Batch,
    anchors: np.ndarray,
    *,
    group: int,
    pieces: Pieces,
) -> tuple[np.ndarray, np.ndarray]:
    """Per anchor and slot: was the argmax right, and did the slot count?  Both bool [n, B - 1].

    `batch` is on the drafter's device; anchors go through in groups of one size.
    """
    context = project(drafter, batch, pieces)
    none = torch.zeros(0, drafter.config.block_size - 1, dtype=torch.bool)
    right, counted = [none], [none]
    for begin in range(0, len(anchors), group):
        positions, valid = fixed(anchors[begin : begin + group], count=group)
        part = replace(
            batch,
            anchor_positions=torch.from_numpy(positions).to(batch.input_ids.device),
            anchor_valid=torch.from_numpy(valid).to(batch.input_ids.device),
        )
        rows = run_blocks(drafter, frozen, part, context, slice(None), pieces)
        labels, counts = block_targets(part, block_size=drafter.config.block_size)
        same = _argmax(rows.flatten(0, 1), frozen.head).view_as(labels) == labels
        right.append((same & counts)[torch.from_numpy(valid)].cpu())
        counted.append(counts[torch.from_numpy(valid)].cpu())
    return torch.cat(right).numpy(), torch.cat(counted).numpy()


def _argmax(rows: Tensor, head: Tensor) -> Tensor:
    return torch.cat([F.linear(part, head).argmax(dim=-1) for part in torch.split(rows, HEAD_ROWS)])


def choose_documents(
    documents: Sequence[int], lengths: Sequence[int], *, max_tokens: int
) -> list[int]:
    """The first documents, in order of the cache, that have at most so many tokens together."""
    chosen: list[int] = []
    tokens = 0
    for document in documents:
        tokens += lengths[document]
        if chosen and tokens > max_tokens:
            break
        chosen.append(document)
    return chosen


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a pack of documents was like."""

    number: int
    right: np.ndarray  # [B - 1] anchors whose slot was right
    count: np.ndarray  # [B - 1] anchors whose slot counted
    chains: list[Chain]


def offline_acceptance(
    drafter: DFlashDraftModel,
    frozen: Frozen,
    reader: Reader,
    documents: Sequence[int],
    *,
    shape: BatchShape,
    world: World,
    anchor_group: int,
    pieces: Pieces,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Acceptance length of documents of a cache, and accuracy per slot over all positions.

    The ranks of a world share the packs, and all get the same figures; all must call this.
    `progress` is called after every pack.
    """
    shape = replace(shape, final_hidden=False)  # what is right needs no teacher
    packs = plan_epoch(documents, reader.lengths, token_budget=shape.token_budget, seed=0, epoch=0)
    host = Batch.empty(shape, device=torch.device("cpu"))
    batch = host if world.device.type == "cpu" else Batch.empty(shape, device=world.device)
    mine: list[Measured] = []
    numbers = range(world.rank, len(packs), world.size)
    quiet = None if world.first else True
    for number in tqdm(numbers, desc="measure", unit="pack", leave=False, disable=quiet):
        pack = packs[number]
        fill_documents(host, reader, pack, layer_ids=drafter.config.target_layer_ids)
        if batch is not host:
            batch.copy_(host)
        anchors = candidates(host.loss_mask.numpy(), host.document_ids.numpy())
        same, counted = slots_right(
            drafter, frozen, batch, anchors, group=anchor_group, pieces=pieces
        )
        chains = list(document_chains(host, pack, anchors, leading_true(same)))
        found = Measured(
            number=number, right=same.sum(axis=0), count=counted.sum(axis=0), chains=chains
        )
        mine.append(found)
        progress()
    everybody = [found for theirs in world.gather(mine) for found in theirs]
    every = sorted(everybody, key=lambda found: found.number)
    chains = [chain for found in every for chain in found.chains]
    right = np.sum([found.right for found in every], axis=0)
    count = np.sum([found.count for found in every], axis=0)
    return {
        **summarize(chains, block_size=shape.block_size),
        "acceptance_error": standard_error(chains),
        "slot_accuracy": (right / np.maximum(count, 1)).tolist(),
        "documents": len(chains),
    }


def standard_error(chains: Sequence[Chain]) -> float | None:
    """Of the acceptance length, over texts; None for fewer than two."""
    passed = [chain for chain in chains if chain.committed]
    return ratio_error([sum(c.committed) for c in passed], [len(c.committed) for c in passed])


def document_chains(
    batch: Batch, pack: Pack, anchors: np.ndarray, accepted: np.ndarray
) -> Iterator[Chain]:
    """One chain per document of a pack; `accepted[i]` belongs to the block at `anchors[i]`."""
    at = dict(zip(anchors.tolist(), accepted.tolist(), strict=True))
    ids, mask = batch.document_ids.numpy(), batch.loss_mask.numpy()
    for number in range(len(pack.documents)):
        yield walk(at.__getitem__, supervised_spans(mask & (ids == number)))
