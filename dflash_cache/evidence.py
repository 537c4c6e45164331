"""What a worker proves of its target before it writes a byte; what was measured is kept."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dflash_cache import proofs, unit_reader
from dflash_cache.codec import stored_codec
from dflash_cache.config import BuildConfig
from dflash_cache.encodings import ENCODINGS
from dflash_cache.extraction import lone_states
from dflash_cache.plan import Plan
from dflash_cache.samples import Sample
from dflash_cache.schema import UnitRecord
from dflash_cache.target import Target


def prove(
    target: Target, plan: Plan, committed: dict[str, UnitRecord], config: BuildConfig
) -> dict[str, Any]:
    """All checks that need no unit; what they measured goes into the manifest."""
    layer_ids = plan.identity.target_layer_ids
    rows = _rows_for_proofs(plan.samples.samples, limit=config.batch_tokens)
    measured: dict[str, Any] = {
        "hooks_vs_hidden_states": proofs.prove_hooks(target, rows[0][None], layer_ids),
        "frozen_vs_model": proofs.prove_frozen(target, rows[0][None, :64]),
        "padded_vs_alone": proofs.prove_padding(target, rows, layer_ids),
        "tolerance": proofs.TOLERANCE[target.spec.dtype],
    }
    if committed:
        measured["probe"] = _prove_probe(target, plan, next(iter(committed.values())), config.out)
    some = plan.samples.samples[:: max(1, len(plan.samples.samples) // 64)]
    agreement = proofs.measure_agreement(target, some[: config.agreement_samples])
    return {"proofs": measured, "agreement": agreement}


def _rows_for_proofs(samples: Sequence[Sample], *, limit: int) -> list[torch.Tensor]:
    """Three samples of unlike length, cut so that they fit a batch together."""
    by_length = sorted(samples, key=lambda sample: sample.length)
    some = {s.sample_id: s for s in (by_length[len(by_length) // 2], by_length[-1], by_length[0])}
    width = max(1, min(1024, limit // len(some)))
    return [torch.from_numpy(sample.input_ids[:width]).long() for sample in some.values()]


def _prove_probe(target: Target, plan: Plan, record: UnitRecord, root: Path) -> float:
    """The shortest sample of a committed unit, computed again by this process."""
    by_id = {sample.sample_id: sample for sample in plan.samples.samples}
    position = len(record.sample_ids) - 1
    sample, identity = by_id[record.sample_ids[position]], plan.identity
    codec = stored_codec(root, identity, record).to(target.device)
    found = [
        codec.decode(plane, codec.encode(plane, states)).cpu()
        for plane, states in zip(
            identity.planes, lone_states(target, sample, identity), strict=True
        )
    ]
    stored = unit_reader.stored_states(root, record, identity, position)
    return proofs.prove_probe(
        found,
        list(stored),
        dtype=target.spec.dtype,
        lossy=ENCODINGS[identity.encoding].lossy,
    )
