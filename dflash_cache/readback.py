"""The first units of a worker, read back before they are committed: what is on the disk is right.

The other proofs end where states leave the target.  This one goes on behind it, through batches,
encoding and files: a sample of the unit, read as training reads it, is what the library gives
for that sample alone.

Letters: t tokens, H hidden size.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dflash_cache import unit_reader
from dflash_cache.buckets import UnitPlan, plan_batches
from dflash_cache.codec import Codec
from dflash_cache.diagnosis import cause_of
from dflash_cache.encodings import ENCODINGS
from dflash_cache.errors import DFlashError, ProofError
from dflash_cache.plan import Plan
from dflash_cache.proofs import LEFT_PADDED, padded_left
from dflash_cache.report import Report, report_of
from dflash_cache.schema import Identity, UnitRecord, spoken
from dflash_cache.target import Target
from dflash_cache.tolerance import Difference, Tolerance, largest, tolerance_of_stored

MOST_UNITS = 4
MOST_TOKENS = 512  # later tokens change nothing for earlier ones

Publish = Callable[[Path, UnitRecord], UnitRecord]


class FirstUnits:
    """Publishes units, the first ones of a worker only when they read back as they should.

    That is one unit, or those up to the first that has padding, `MOST_UNITS` at most.  The target
    runs in `expect`, and publishing only reads: that is done in another thread, where the target
    must not be touched.
    """

    def __init__(self, publish: Publish, *, batch_tokens: int, leave_out: Sequence[str]) -> None:
        self.publish, self.batch_tokens = publish, batch_tokens
        self.left = 0 if "probe" in leave_out else MOST_UNITS
        self.expected: dict[str, Expected] = {}

    def expect(self, target: Target, plan: Plan, unit: UnitPlan, codec: Codec) -> None:
        """Told of every unit before it is extracted; runs the target for the first ones."""
        if not self.left:
            return
        lengths = [plan.samples.lengths[member] for member in unit.members]
        position, padding = most_padded(lengths, batch_tokens=self.batch_tokens)
        self.expected[unit.name] = expect(target, plan, unit, position, codec, padding=padding)
        self.left = 0 if padding else self.left - 1

    def __call__(self, root: Path, record: UnitRecord) -> UnitRecord:
        """Let a record count.  Of a unit that is wrong nothing stays."""
        expected = self.expected.pop(record.unit, None)
        if expected is not None:
            try:
                expected.prove(root, record)
            except DFlashError:
                shutil.rmtree(root / record.folder, ignore_errors=True)
                raise
        return self.publish(root, record)


def most_padded(lengths: Sequence[int], *, batch_tokens: int) -> tuple[int, int]:
    """Which sample of a unit has the most padding beside it, and how much; the shortest of them."""
    found = [
        (max(lengths[i] for i in rows) - lengths[row], -lengths[row], row)
        for rows in plan_batches(lengths, batch_tokens=batch_tokens)
        for row in rows
    ]
    padding, _, position = max(found)
    return position, padding


@dataclass(frozen=True, kw_only=True, eq=False)
class Expected:
    """What one sample of a unit must be when it is read back, on the CPU."""

    identity: Identity
    position: int  # of the sample in the unit
    states: dict[str, Tensor]  # plane -> bfloat16 [t, H], as the encoding gives them back
    report: Report
    padded_left: Report  # on the sample as left padding would begin it
    tolerance: Tolerance

    def prove(self, root: Path, record: UnitRecord) -> Difference:
        """The sample as it lies on the disk is as expected; returns the largest difference."""
        stored = unit_reader.stored_states(root, record, self.identity, self.position)
        by_plane = dict(zip(self.identity.planes, stored, strict=True))
        planes = list(self.states)
        found = [by_plane[plane][: len(self.states[plane])] for plane in planes]
        measured = self.tolerance.differences(found, list(self.states.values()))
        if (worst := self.tolerance.furthest(measured)) is not None:
            cause = self._cause(found[worst], planes[worst])
            raise ProofError(
                f"unit {record.unit}, sample {record.sample_ids[self.position]}, "
                f"{spoken(planes[worst])}: read back from the disk, it differs by "
                f"{self.tolerance.told(measured[worst])} from what the library gives for this "
                f"sample alone: {cause}"
            )
        return largest(measured)

    def _cause(self, found: Tensor, plane: str) -> str:
        filled = self.padded_left.plane(plane)
        if filled is not None and self.tolerance.same(filled, found):
            return LEFT_PADDED
        return cause_of(found, plane, self.report, self.tolerance)


def expect(
    target: Target, plan: Plan, unit: UnitPlan, position: int, codec: Codec, *, padding: int
) -> Expected:
    """What a sample of a unit must be, by the library's own report on it alone."""
    identity, sample = plan.identity, plan.samples.samples[unit.members[position]]
    ids = torch.from_numpy(sample.input_ids[:MOST_TOKENS]).long()
    report = report_of(target, ids)
    found = {plane: report.plane(plane) for plane in identity.planes}
    states = {
        plane: codec.decode(plane, codec.encode(plane, own.to(torch.bfloat16))).cpu()
        for plane, own in found.items()
        if own is not None  # else the library has no word for that layer
    }
    lossy = ENCODINGS[identity.encoding].lossy
    return Expected(
        identity=identity,
        position=position,
        states=states,
        report=report.cpu(),
        padded_left=report_of(target, padded_left(ids, width=len(ids) + padding)[: len(ids)]).cpu(),
        tolerance=tolerance_of_stored(target, lossy=lossy),
    )
