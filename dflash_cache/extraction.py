"""Units from samples: the target's states, checked, spelt and committed.

Letters: t tokens of a sample, R rows of a padded batch, S its width, H hidden size.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dflash_cache import proofs, store
from dflash_cache.attempt import EncodedSample, encoded_sample
from dflash_cache.buckets import UnitPlan, plan_batches
from dflash_cache.codec import Codec, calibration_samples, new_codec, stored_codec
from dflash_cache.config import BuildConfig
from dflash_cache.plan import Plan
from dflash_cache.samples import Sample
from dflash_cache.schema import Identity, UnitRecord, spoken
from dflash_cache.target import Target


def extract(
    target: Target,
    plan: Plan,
    units: Iterable[UnitPlan],
    config: BuildConfig,
    codec: Codec,
    progress: Any,
) -> None:
    """Extract and commit units, one after the other."""
    for unit in units:
        extract_unit(target, plan, unit, config, codec, progress, publish=store.commit)


def extract_unit(
    target: Target,
    plan: Plan,
    unit: UnitPlan,
    config: BuildConfig,
    codec: Codec,
    progress: Any,
    *,
    publish: Callable[[Path, UnitRecord], UnitRecord],
) -> UnitRecord:
    """Extract one unit; `publish` says what becomes of its record."""
    samples = [plan.samples.samples[member] for member in unit.members]
    return store.write_unit(
        config.out,
        unit,
        samples,
        run_unit(target, samples, plan.identity, config, codec, progress),
        identity=plan.identity,
        channels_checksum=codec.checksum,
        publish=publish,
    )


def progress_bar(plan: Plan, done: int, *, shown: bool = True) -> "tqdm[Any]":
    return tqdm(
        total=plan.samples.tokens,
        initial=done,
        desc="extract",
        unit="tok",
        unit_scale=True,
        disable=None if shown else True,
    )


def run_unit(
    target: Target,
    samples: Sequence[Sample],
    identity: Identity,
    config: BuildConfig,
    codec: Codec,
    progress: Any,
) -> Iterator[EncodedSample]:
    """Run the target over a unit's padded batches; yields its samples in their order."""
    lengths = [sample.length for sample in samples]
    for batch in plan_batches(lengths, batch_tokens=config.batch_tokens):
        ids = proofs.pad_right([torch.from_numpy(samples[i].input_ids).long() for i in batch])
        states = padded_states(target, ids, identity)
        for row, position in enumerate(batch):
            own = [plane[row, : lengths[position]] for plane in states]
            for plane, name in zip(own, identity.planes, strict=True):
                where = f"sample {samples[position].sample_id}, {spoken(name)}"
                proofs.check_states(plane, where=where)
            yield encoded_sample(own, identity.planes, codec)
            progress.update(lengths[position])


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
