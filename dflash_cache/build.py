"""Stage one as a paragraph: rows to samples, samples to units, units to disk, and the seal."""

import datetime
import importlib.metadata
import platform
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dflash_cache import ledger, lock, store, sweep, workers
from dflash_cache.buckets import UnitPlan
from dflash_cache.codec import Codec, left_codec
from dflash_cache.config import BuildConfig
from dflash_cache.devices import pick_device
from dflash_cache.disk import full_disk_is_told
from dflash_cache.evidence import prove
from dflash_cache.extraction import codec_for, extract, progress_bar
from dflash_cache.files import file_entry
from dflash_cache.plan import Plan, make_plan, refuse_too_small_a_disk, still_needed, survey
from dflash_cache.schema import FORMAT_VERSION, Manifest, UnitRecord
from dflash_cache.survey import Survey, with_weights_hash
from dflash_cache.target import Target, load_weights
from dflash_cache.workers import Crew

PACKAGES = ("torch", "transformers", "tokenizers", "zarr", "numcodecs", "safetensors", "numpy")


def build_cache(config: BuildConfig) -> Manifest:
    """Run stage one, or continue it where it stopped; a sealed cache is left as it is."""
    pick_device(config.device)  # a wrong name must not cost the tokenising
    ledger.refuse_other_folder(config.out)
    if (config.out / "manifest.json").is_file():
        _, plan = plan_with_weights(config)
        ledger.refuse_other_identity(config.out, ledger.read_identity(config.out), plan.identity)
        return ledger.read_manifest(config.out)
    with lock.held(config.out, doing="dflash cache build"):
        return _build(config)


def plan_with_weights(config: BuildConfig) -> tuple[Survey, Plan]:
    """The target and the plan of a build, with the weights in its identity."""
    found = survey(config)
    plan = make_plan(config, found)
    hashed = with_weights_hash(found)
    return hashed, plan.with_weights(hashed)


def _build(config: BuildConfig) -> Manifest:
    """The stage, by the holder of the lock."""
    found, plan = plan_with_weights(config)
    if ledger.is_sealed(config.out, plan.identity):
        return ledger.read_manifest(config.out)  # somebody else finished it meanwhile
    committed = ledger.committed_units(config.out, fingerprint=plan.identity.fingerprint)
    sweep.remove_leftovers(config.out)
    refuse_too_small_a_disk(
        config.out,
        still_needed(config.out, plan, committed),
        instead=", take fewer samples or target layers, or --encoding lossless, int8 or fp8",
    )
    job = Job(config=config, found=found, plan=plan, committed=committed)
    if config.workers == 1:
        evidence = work(None, job)
    else:
        evidence = workers.launch(work, job, workers=config.workers)
    records = ledger.committed_units(config.out, fingerprint=plan.identity.fingerprint)
    manifest = make_manifest(config, plan, [records[unit.name] for unit in plan.units], evidence)
    with _full_disk(job):
        ledger.seal(config.out, manifest)
    return manifest


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """What every worker of a build is told.

    `committed` is what there was at the start, and the same for all: the queue counts the rest.
    """

    config: BuildConfig
    found: Survey
    plan: Plan
    committed: dict[str, UnitRecord]

    @property
    def pending(self) -> list[UnitPlan]:
        return [unit for unit in self.plan.units if unit.name not in self.committed]


def work(crew: Crew | None, job: Job) -> dict[str, Any]:
    """What one worker does, alone or of a crew: load, prove, extract; returns what it proved."""
    config, plan = job.config, job.plan
    first = crew is None or crew.rank == 0
    target = load_weights(job.found, device=crew.device(config.device) if crew else config.device)
    with _full_disk(job):
        evidence = prove(target, plan, job.committed, config if first else _brief(config))
        prepare = partial(begin if first else join, job, target)
        codec = crew.after_the_first(prepare) if crew else prepare()
        done = ledger.totals(job.committed.values())["tokens"]
        with progress_bar(plan, done, shown=first) as bar:
            units = crew.claims(job.pending) if crew else job.pending
            extract(target, plan, units, config, codec, crew.shared(bar) if crew else bar)
    return evidence


def _brief(config: BuildConfig) -> BuildConfig:
    """The text agrees with every worker's target alike; one of them measures it."""
    return replace(config, agreement_samples=0)


def begin(job: Job, target: Target) -> Codec:
    """Leave everything beside the units; nothing is written before the target has proved itself."""
    root, plan = job.config.out, job.plan
    ledger.begin(root, plan.identity, options_of(job.config))
    store.write_plan(root, plan.units, plan.samples.samples)
    store.write_frozen(root, target.embedding, target.head, tied=target.spec.tied_head)
    return codec_for(root, target, plan, job.committed)


def join(job: Job, target: Target) -> Codec:
    """Take up what the first worker has left."""
    return left_codec(job.config.out, job.plan.identity).to(target.device)


def _full_disk(job: Job) -> AbstractContextManager[None]:
    def needed() -> int:
        root = job.config.out
        return still_needed(root, job.plan, ledger.recorded_units(root))

    return full_disk_is_told(job.config.out, "All committed units are kept.", needed=needed)


def options_of(config: BuildConfig) -> dict[str, Any]:
    """The options as JSON, from which `repair` makes the build again.

    Places that are local become absolute, so that it works from any folder.
    """
    plain: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(config).items()
        if name not in ("out", "device")
    }
    for name in ("target", "data", "exclude"):
        if plain[name] is not None and Path(plain[name]).exists():
            plain[name] = str(Path(plain[name]).resolve())
    return plain


def make_manifest(
    config: BuildConfig, plan: Plan, records: Sequence[UnitRecord], evidence: dict[str, Any]
) -> Manifest:
    """Totals and evidence of a finished build."""
    beside = {name: file_entry(config.out / name) for name in ledger.beside(plan.identity)}
    held = ledger.totals(records)
    held["bytes"] += sum(size for size, _ in beside.values())
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
        encoding_error=ledger.encoding_error(records),
        files=beside,
        options=options_of(config),
        software={
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
