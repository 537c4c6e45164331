"""Decide which samples are extracted together.  Pure integers: no torch, no zarr, no I/O.

A bucket is a range of lengths; its samples are padded together for the target.  A unit is the
samples of one bucket that are committed together.  The plan is a function of the lengths alone:
it does not depend on devices, batches or what was done before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Token slots that a target computes in the time that a batch costs whatever its size: launches of
# a thousand kernels and matrix products that do not fill the GPU are worth some hundred tokens.
BATCH_SLOTS = 256


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """Samples (by position in the length list) that form one unit."""

    name: str
    bucket: int  # exclusive upper bound of the lengths
    members: tuple[int, ...]


def bucket_edges_of(lengths: Sequence[int], edges: Sequence[int]) -> list[int]:
    """The edges in use: the data's own maximum closes the last bucket if it lies beyond all."""
    longest = max(lengths, default=0)
    return [*edges, longest + 1] if longest >= edges[-1] else list(edges)


def plan_units(lengths: Sequence[int], *, edges: Sequence[int], unit_tokens: int) -> list[UnitPlan]:
    """Every sample in exactly one unit, of one bucket, of about `unit_tokens` tokens.

    Samples are sorted by length within a bucket, longest first, so that a padded batch wastes
    little and comes in the order in which it is stored.  A unit holds at least one sample,
    however long.
    """
    closed = bucket_edges_of(lengths, edges)
    which = np.searchsorted(np.asarray(closed), np.asarray(lengths, dtype=np.int64), side="right")
    units: list[UnitPlan] = []
    for index, edge in enumerate(closed):
        members = np.flatnonzero(which == index)
        members = members[np.argsort(-np.asarray(lengths)[members], kind="stable")]
        for group in cut(
            members.tolist(), np.asarray(lengths)[members].tolist(), limit=unit_tokens
        ):
            units.append(UnitPlan(name=f"u{len(units):06d}", bucket=edge, members=tuple(group)))
    return units


def cut(items: Sequence[int], sizes: Sequence[int], *, limit: int) -> list[list[int]]:
    """Split a sequence into runs whose sizes sum to at most `limit` (a lone item may exceed it)."""
    runs: list[list[int]] = []
    room = 0
    for item, size in zip(items, sizes, strict=True):
        if not runs or size > room:
            runs.append([])
            room = limit
        runs[-1].append(item)
        room -= size
    return runs


def plan_batches(lengths: Sequence[int], *, batch_tokens: int) -> list[list[int]]:
    """Rows of each padded batch, in runs of the rows sorted by length, longest first.

    A batch takes at most `batch_tokens` slots, which is its rows times its longest row, unless it
    is one row.  Of all ways to cut the runs the one with the fewest slots is taken, where a batch
    of its own counts for `BATCH_SLOTS` more: neither rows of unlike length are padded up to the
    longest, nor a unit cut into more batches than that saves.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    widths = np.asarray(lengths, dtype=np.int64)[order]
    total = len(order)
    costs = np.zeros(total + 1, np.int64)  # of the rows from here on
    ends = np.zeros(total, np.int64)  # of the batch that begins here
    for begin in reversed(range(total)):
        width = int(widths[begin])
        most = max(1, batch_tokens // max(1, width))
        rows = np.arange(min(most, total - begin), 0, -1)  # of equal costs the most rows
        found = rows * width + BATCH_SLOTS + costs[begin + rows]
        best = int(found.argmin())
        costs[begin], ends[begin] = found[best], begin + rows[best]
    batches: list[list[int]] = []
    begin = 0
    while begin < total:
        end = int(ends[begin])
        batches.append(order[begin:end])
        begin = end
    return batches


def count_slots(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> int:
    """Token slots of padded batches, padding included."""
    return sum(len(batch) * max(lengths[row] for row in batch) for batch in batches)
