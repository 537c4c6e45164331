"""Stage one as a paragraph: rows to samples, samples to units, units to disk, and the seal."""

import datetime
import importlib.metadata
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dflash_cache import ledger, proofs, reader, store
from dflash_cache.buckets import plan_batches
from dflash_cache.config import BuildConfig
from dflash_cache.devices import pick_device
from dflash_cache.disk import full_disk_is_told
from dflash_cache.plan import Plan, existing_folder, make_plan, refuse_too_small_a_disk
from dflash_cache.samples import Sample
from dflash_cache.schema import FORMAT_VERSION, Manifest, UnitRecord
from dflash_cache.survey import survey_target, with_weights_hash
from dflash_cache.target import Target, load_weights

PACKAGES = ("torch", "transformers", "tokenizers", "zarr", "numcodecs", "safetensors", "numpy")


def build_cache(config: BuildConfig) -> Manifest:
    """Run stage one, or continue it where it stopped; a sealed cache is left as it is."""
    pick_device(config.device)  # a wrong name must not cost the tokenising
    survey = survey_target(config.target, dtype=config.target_dtype)
    plan = make_plan(config, survey)
    survey = with_weights_hash(survey)
    plan = plan.with_weights(survey)
    with full_disk_is_told(existing_folder(config.out), "All committed units are kept."):
        if ledger.is_sealed(config.out, plan.identity):
            return ledger.read_manifest(config.out)
        committed = ledger.committed_units(config.out, fingerprint=plan.identity.fingerprint)
        refuse_too_small_a_disk(config.out, plan, committed)
        target = load_weights(survey, device=config.device)
        ledger.begin(config.out, plan.identity)
        store.write_plan(config.out, plan.units, plan.samples.samples)
        evidence = prove(target, plan, committed, config)
        store.write_frozen(config.out, target.embedding, target.head, tied=target.spec.tied_head)
        records = extract(target, plan, committed, config)
        manifest = make_manifest(config, plan, records, evidence)
        ledger.seal(config.out, manifest)
    return manifest


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
    """The first sample of a committed unit, computed again by this process."""
    by_id = {sample.sample_id: sample for sample in plan.samples.samples}
    ids = torch.from_numpy(by_id[record.sample_ids[0]].input_ids).long()
    layer_ids = plan.identity.target_layer_ids
    found = [states[0].cpu() for states in target.hidden_states(ids[None], layer_ids)]
    unit = reader.UnitReader(record.unit, root / record.folder)
    rows = slice(record.starts[0], record.starts[0] + record.lengths[0])
    stored = [
        torch.from_numpy(unit.read(f"hidden/{layer_id}", rows)).view(torch.bfloat16)
        for layer_id in layer_ids
    ]
    return proofs.prove_probe(found, stored, dtype=target.spec.dtype)


def extract(
    target: Target, plan: Plan, committed: dict[str, UnitRecord], config: BuildConfig
) -> list[UnitRecord]:
    """Extract and commit every unit that is not committed yet."""
    records = dict(committed)
    with tqdm(
        total=plan.samples.tokens,
        initial=ledger.totals(committed.values())["tokens"],
        desc="extract",
        unit="tok",
        unit_scale=True,
        disable=None,
    ) as progress:
        for unit in plan.units:
            if unit.name in records:
                continue
            samples = [plan.samples.samples[member] for member in unit.members]
            states = run_unit(target, samples, plan.identity.target_layer_ids, config, progress)
            records[unit.name] = store.write_unit(
                config.out, unit, samples, states, identity=plan.identity
            )
    return [records[unit.name] for unit in plan.units]


def run_unit(
    target: Target,
    samples: Sequence[Sample],
    layer_ids: Sequence[int],
    config: BuildConfig,
    progress: Any,
) -> Iterator[tuple[int, store.States]]:
    """Run the target over a unit's padded batches; yields (position, K tensors [t, H])."""
    lengths = [sample.length for sample in samples]
    for batch in plan_batches(lengths, batch_tokens=config.batch_tokens):
        ids = proofs.pad_right([torch.from_numpy(samples[i].input_ids).long() for i in batch])
        layers = [states.to(torch.bfloat16) for states in target.hidden_states(ids, layer_ids)]
        for row, position in enumerate(batch):
            own = [states[row, : lengths[position]].cpu() for states in layers]
            for layer_id, states in zip(layer_ids, own, strict=True):
                where = f"sample {samples[position].sample_id}, target layer {layer_id}"
                proofs.check_states(states, where=where)
            yield position, own
            progress.update(lengths[position])


def make_manifest(
    config: BuildConfig, plan: Plan, records: Sequence[UnitRecord], evidence: dict[str, Any]
) -> Manifest:
    """Totals and evidence of a finished build."""
    held = ledger.totals(records)
    held["bytes"] += (config.out / "frozen.safetensors").stat().st_size
    return Manifest(
        format_version=FORMAT_VERSION,
        fingerprint=plan.identity.fingerprint,
        identity=plan.identity.to_dict(),
        **held,
        buckets=plan.buckets,
        rows=plan.samples.rows,
        skipped=plan.samples.skipped,
        proofs=evidence["proofs"],
        agreement=evidence["agreement"],
        software={
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        data=config.data,
    )
