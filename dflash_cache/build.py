"""Stage one as a paragraph: rows to samples, samples to units, units to disk, and the seal."""

import datetime
import importlib.metadata
import platform
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dflash_cache import ledger, proofs, reader, store
from dflash_cache.buckets import UnitPlan, bucket_edges_of, plan_batches, plan_units
from dflash_cache.config import BuildConfig
from dflash_cache.disk import full_disk_is_told
from dflash_cache.errors import DiskFullError
from dflash_cache.samples import Sample, Samples, load_samples
from dflash_cache.schema import (
    CHUNK_TOKENS,
    FORMAT_VERSION,
    LAYER_CONVENTION,
    Identity,
    Manifest,
    UnitRecord,
    bytes_per_token,
    padded,
)
from dflash_cache.survey import Survey, survey_target, with_weights_hash
from dflash_cache.target import (
    Target,
    checked_layer_ids,
    default_layer_ids,
    load_weights,
    pick_device,
)
from dflash_cache.vocabulary import describe_tokenizer, special_ids

PACKAGES = ("torch", "transformers", "tokenizers", "zarr", "numcodecs", "safetensors", "numpy")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that is known before the first byte is written."""

    identity: Identity
    units: list[UnitPlan]
    samples: Samples
    bytes_per_token: int
    bytes: int
    free_bytes: int

    @property
    def fits(self) -> bool:
        return self.bytes <= self.free_bytes

    @property
    def buckets(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for unit in self.units:
            name = f"{unit.bucket:04d}"
            counts[name] = counts.get(name, 0) + len(unit.members)
        return counts


def build_cache(config: BuildConfig) -> Manifest:
    """Run stage one, or continue it where it stopped; a sealed cache is left as it is."""
    pick_device(config.device)
    survey = survey_target(config.target, dtype=config.target_dtype)
    plan = make_plan(config, survey)
    survey = with_weights_hash(survey)
    plan = replace(plan, identity=replace(plan.identity, target=survey.spec.to_dict()))
    with full_disk_is_told(_existing(config.out), "All committed units are kept."):
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


def plan_only(config: BuildConfig) -> Plan:
    """The plan of a build; writes nothing."""
    return make_plan(config, survey_target(config.target, dtype=config.target_dtype))


def make_plan(config: BuildConfig, survey: Survey) -> Plan:
    """Tokenise, choose layers and units, count bytes.  Loads no weights, writes nothing."""
    spec = survey.spec
    samples = load_samples(
        config,
        survey.tokenizer,
        vocab_size=spec.vocab_size,
        max_positions=spec.max_position_embeddings,
    )
    layer_ids = (
        checked_layer_ids(config.target_layers, spec.num_layers)
        if config.target_layers is not None
        else default_layer_ids(spec.num_layers, config.num_target_layers)
    )
    tokenizer = describe_tokenizer(
        survey.tokenizer,
        embedding_rows=spec.vocab_size,
        stop_ids=survey.stop_ids,
        seen=samples.count_of(special_ids(survey.tokenizer)),
        mask_token_id=config.mask_token_id,
    )
    edges = bucket_edges_of(samples.lengths, config.bucket_edges)
    identity = Identity(
        format_version=FORMAT_VERSION,
        target=spec.to_dict(),
        tokenizer=tokenizer.to_dict(),
        data_sha256=samples.sha256(),
        samples=len(samples.samples),
        tokens=samples.tokens,
        target_layer_ids=layer_ids,
        layer_convention=LAYER_CONVENTION,
        hidden_size=spec.hidden_size,
        encoding="bf16",
        chunk_tokens=CHUNK_TOKENS,
        bucket_edges=edges,
        unit_tokens=config.unit_tokens,
    )
    per_token = bytes_per_token(target_layers=len(layer_ids), hidden_size=spec.hidden_size)
    frozen = spec.vocab_size * spec.hidden_size * 2 * (1 if spec.tied_head else 2)
    return Plan(
        identity=identity,
        units=plan_units(samples.lengths, edges=edges, unit_tokens=config.unit_tokens),
        samples=samples,
        bytes_per_token=per_token,
        bytes=per_token * sum(padded(n) for n in samples.lengths) + frozen,
        free_bytes=shutil.disk_usage(_existing(config.out)).free,
    )


def _existing(path: Path) -> Path:
    """The nearest folder above that is there, to ask the disk about."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path


def refuse_too_small_a_disk(out: Path, plan: Plan, committed: dict[str, UnitRecord]) -> None:
    """Stop before the first byte when what is left to write cannot fit."""
    stored = sum(record.tokens_stored for record in committed.values())
    needed = plan.bytes - stored * plan.bytes_per_token
    if needed > plan.free_bytes:
        raise DiskFullError(
            f"{out}: {needed / 1e9:.3f} GB are still to be written ({plan.bytes_per_token} bytes "
            f"a token), {plan.free_bytes / 1e9:.3f} GB are free; nothing was written. Free space, "
            "give another --out, or take fewer samples or target layers"
        )


def prove(
    target: Target, plan: Plan, committed: dict[str, UnitRecord], config: BuildConfig
) -> dict[str, Any]:
    """All checks that need no unit; what they measured goes into the manifest."""
    layer_ids = plan.identity.target_layer_ids
    rows = _rows_for_proofs(plan.samples.samples, limit=config.batch_tokens)
    measured: dict[str, Any] = {
        "hooks_vs_hidden_states": proofs.prove_hooks(target, rows[0][None], layer_ids),
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
    done = sum(sum(record.lengths) for record in committed.values())
    with tqdm(
        total=plan.samples.tokens, initial=done, desc="extract", unit="tok", unit_scale=True,
        disable=None,
    ) as progress:  # fmt: skip
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
    frozen = (config.out / "frozen.safetensors").stat().st_size
    return Manifest(
        format_version=FORMAT_VERSION,
        fingerprint=plan.identity.fingerprint,
        identity=plan.identity.to_dict(),
        samples=sum(len(record.sample_ids) for record in records),
        tokens=sum(sum(record.lengths) for record in records),
        supervised_tokens=sum(sum(record.supervised) for record in records),
        bytes=sum(sum(record.files.values()) for record in records) + frozen,
        units=len(records),
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
