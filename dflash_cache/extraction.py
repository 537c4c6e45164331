"""Units from samples: the target's states, checked, spelt and committed.

Letters: t tokens of a sample, R rows of a padded batch, S its width, H hidden size.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from dflash_cache import ledger, proofs, store
from dflash_cache.attempt import EncodedSample
from dflash_cache.buckets import UnitPlan, plan_batches
from dflash_cache.checks import ENOUGH, FIRST_UNITS, UnitChecks
from dflash_cache.codec import Codec, calibration_samples, new_codec, stored_codec
from dflash_cache.config import BuildConfig
from dflash_cache.errors import DFlashError
from dflash_cache.landing import Buffers, Landed, Lander
from dflash_cache.pipeline import UnitWriter
from dflash_cache.plan import Plan
from dflash_cache.progress import Progress
from dflash_cache.readback import FirstUnits
from dflash_cache.samples import Sample
from dflash_cache.schema import Identity, UnitRecord
from dflash_cache.survey import first_line
from dflash_cache.target import Target

# Batches in host memory: one is written, one lands, one is spare while a unit is flushed.  At
# 5 layers of 5,120 channels and 16,384 slots a batch is 0.84 GB, and all take 2.5 GB of memory.
HOST_BATCHES = 3

Publish = Callable[[Path, UnitRecord], UnitRecord]


class Budget:
    """Token slots of a padded batch; halved once, for a worker's life, where memory is short."""

    def __init__(self, slots: int) -> None:
        self.slots, self.halved = slots, False

    def fitting(self, run: Callable[[], Landed], *, lengths: Sequence[int]) -> Landed | None:
        """What `run` gives; None where the device was out of memory, and batches are cut anew.

        `lengths` are those of the batch's samples: a lone one cannot be cut.
        """
        try:
            return run()
        except torch.OutOfMemoryError as error:
            told = first_line(error)
        # Not in the handler: its traceback holds all that the batch has in memory.
        self._halve(told, lengths)
        return None

    def _halve(self, told: str, lengths: Sequence[int]) -> None:
        if self.halved and len(lengths) == 1:
            raise DFlashError(
                f"out of memory again, with one sample of {lengths[0]:,} tokens ({told}), which no "
                "smaller batch helps; spread the target over more devices with --tensor-parallel, "
                f"or begin a new cache with --max-length {lengths[0] - 1} or less"
            )
        if self.halved or self.slots < 2:
            raise DFlashError(
                f"out of memory again, with batches of {self.slots:,} token slots ({told}); give "
                f"--batch-tokens {max(1, self.slots // 2)} or less, or spread the target over more "
                "devices with --tensor-parallel"
            )
        before, self.slots, self.halved = self.slots, self.slots // 2, True
        tqdm.write(
            f"out of memory with batches of {before:,} token slots ({told}); from now on they have "
            f"{self.slots:,}. --batch-tokens {self.slots} does so from the start",
            file=sys.stderr,
        )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def extract(
    target: Target,
    plan: Plan,
    units: Iterable[UnitPlan],
    config: BuildConfig,
    codec: Codec,
    progress: Progress,
    *,
    budget: Budget | None = None,
    publish: Publish = store.commit,
) -> None:
    """Extract units and commit them in their order; `publish` says what becomes of a record.

    The target computes the next batches, of the next units too, while a thread writes those
    before.  Another unit is asked for when the target has the last batch of the one before; the
    methods of `progress` are called by the thread.  All is committed when this returns.  The first
    units count only when they read back as the library says (`readback`).
    """
    identity = plan.identity
    publish = first = FirstUnits(
        publish, batch_tokens=config.batch_tokens, leave_out=config.no_proof
    )
    budget = budget or Budget(config.batch_tokens)
    buffers = Buffers(HOST_BATCHES, pinned=target.device.type == "cuda")
    lander = Lander(target.device, identity.planes, codec, buffers)
    checks = UnitChecks(
        identity.planes,
        leave_out=config.no_proof,
        earlier=partial(
            ledger.first_norms,
            config.out,
            identity.fingerprint,
            count=FIRST_UNITS,
            samples=ENOUGH,
        ),
    )

    def write(
        unit: UnitPlan, samples: Sequence[Sample], states: Iterator[EncodedSample]
    ) -> UnitRecord:
        return store.write_unit(
            config.out,
            unit,
            samples,
            states,
            identity=identity,
            channels_checksum=codec.checksum,
            publish=publish,
        )

    with (
        lander,
        UnitWriter(write, checks=checks, progress=progress, buffers=buffers) as writer,
    ):
        for unit in units:
            samples = [plan.samples.samples[member] for member in unit.members]
            first.expect(target, plan, unit, codec)
            writer.begin(unit, samples)
            for batch in run_unit(target, samples, identity, lander, budget):
                writer.add(batch)
            writer.end()


def run_unit(
    target: Target, samples: Sequence[Sample], identity: Identity, lander: Lander, budget: Budget
) -> Iterator[Landed]:
    """Run the target over a unit's padded batches; yields its samples in their order."""
    begin = 0
    while begin < len(samples):
        lengths = [sample.length for sample in samples[begin:]]
        for rows in plan_batches(lengths, batch_tokens=budget.slots):
            batch = samples[begin : begin + len(rows)]
            landed = budget.fitting(
                partial(run_batch, target, batch, identity, lander, slots=budget.slots),
                lengths=[sample.length for sample in batch],
            )
            if landed is None:
                break
            yield landed
            begin += len(batch)


def run_batch(
    target: Target, batch: Sequence[Sample], identity: Identity, lander: Lander, *, slots: int
) -> Landed:
    """One padded batch through the target and on its way to the host."""
    lander.pace()
    ids = proofs.pad_right([torch.from_numpy(sample.input_ids).long() for sample in batch])
    states = padded_states(target, lander.send(ids), identity)
    return lander.land(states, batch, slots=slots)


def padded_states(target: Target, ids: torch.Tensor, identity: Identity) -> list[torch.Tensor]:
    """What the cache keeps of a padded batch [R, S]: bfloat16 [R, S, H], one for every plane."""
    take = target.hidden_and_final if identity.final_hidden else target.hidden_states
    return [states.to(torch.bfloat16) for states in take(ids, identity.target_layer_ids)]


def codec_for(root: Path, target: Target, plan: Plan, committed: dict[str, UnitRecord]) -> Codec:
    """What spells the states of this cache: measured before its first unit, and then kept."""
    for record in committed.values():
        return stored_codec(root, plan.identity, record).to(target.device)
    return measured_codec(root, target, plan)


def measured_codec(root: Path, target: Target, plan: Plan) -> Codec:
    """The codec of a cache that has no units, from some of its samples."""
    samples = (plan.samples.samples[i] for i in calibration_samples(plan.samples.lengths))
    states = (lone_states(target, sample, plan.identity) for sample in samples)
    return new_codec(root, plan.identity, states).to(target.device)


def lone_states(target: Target, sample: Sample, identity: Identity) -> list[torch.Tensor]:
    """What the cache keeps of one sample: bfloat16 [t, H], one for every plane."""
    ids = torch.from_numpy(sample.input_ids).long()[None]
    return [states[0] for states in padded_states(target, ids, identity)]
