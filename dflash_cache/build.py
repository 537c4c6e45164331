"""Stage one as a paragraph: rows to samples, samples to units, units to disk, and the seal."""

import datetime
import importlib.metadata
import os
import platform
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dflash_cache import ledger, lock, lockstep, progress, ranks, store, sweep, teams
from dflash_cache.buckets import UnitPlan
from dflash_cache.codec import Codec, left_codec
from dflash_cache.config import BuildConfig
from dflash_cache.devices import Group, gpus_here, group_of_rank, slow_bfloat16, worker_groups
from dflash_cache.disk import full_disk_is_told
from dflash_cache.errors import CacheError, TargetError
from dflash_cache.evidence import leave_probe, meet_probe, prove, remembered_skips, tell_skipped
from dflash_cache.extraction import Budget, codec_for, extract
from dflash_cache.files import file_entry
from dflash_cache.job_file import PATIENCE
from dflash_cache.member import Member
from dflash_cache.plan import Plan, make_plan, refuse_too_small_a_disk, still_needed, survey
from dflash_cache.progress import Alone, Display
from dflash_cache.schema import FORMAT_VERSION, Manifest, UnitRecord
from dflash_cache.survey import Survey, find_target, hash_config, with_weights_hash
from dflash_cache.target import Target
from dflash_cache.teams import Team
from dflash_cache.weights import load_weights
from dflash_cache.workers import Crew

# Options that say where a cache is made: another machine has its own.
LOCAL = ("out", "devices", "tensor_parallel")
PACKAGES = ("torch", "transformers", "tokenizers", "zarr", "numcodecs", "safetensors", "numpy")


def build_cache(config: BuildConfig) -> Manifest:
    """Run stage one, or continue it where it stopped; a sealed cache is left as it is.

    Several processes that torchrun or srun started build one cache together, and all return when
    it is sealed.
    """
    rank = ranks.find_rank(os.environ)
    if rank is None:
        return _built(config, _team(config))  # a wrong device does not cost the tokenising
    group = partial(
        group_of_rank,
        config.devices,
        tensor_parallel=config.tensor_parallel,
        gpus=gpus_here(),
        local_rank=rank.local,
        own_gpus=rank.own_gpus,
    )
    if rank.first:
        return teams.as_first_rank(rank, group, config, partial(_built, config))
    return teams.take_part(rank, group, config)


def _team(config: BuildConfig) -> Team | None:
    """Those who extract; None where this process does so alone."""
    groups = groups_of(config)
    return teams.on_this_machine(groups, config) if len(groups) * len(groups[0]) > 1 else None


def groups_of(config: BuildConfig) -> list[Group]:
    return worker_groups(config.devices, tensor_parallel=config.tensor_parallel, gpus=gpus_here())


def _built(config: BuildConfig, team: Team | None) -> Manifest:
    ledger.refuse_other_folder(config.out)
    if (config.out / "manifest.json").is_file():
        _, plan = plan_with_weights(config)
        ledger.refuse_other_identity(config.out, ledger.read_identity(config.out), plan.identity)
        return ledger.read_manifest(config.out)
    with lock.held(config.out, doing="dflash cache build"):
        return _build(config, team)


def plan_with_weights(config: BuildConfig) -> tuple[Survey, Plan]:
    """The target and the plan of a build, with the weights in its identity."""
    found = survey(config)
    plan = make_plan(config, found)
    hashed = with_weights_hash(found)
    return hashed, plan.with_weights(hashed)


def _build(config: BuildConfig, team: Team | None) -> Manifest:
    """The stage, by the holder of the lock."""
    tell_skipped(config)
    tell_slow_target(config)
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
    job = Job(
        config=config,
        options=options_of(config),
        host=socket.gethostname(),
        found=found,
        plan=plan,
        committed=committed,
    )
    done = ledger.totals(committed.values())["tokens"]
    skipped, total = plan.samples.skipped, plan.samples.tokens
    with _full_disk(job):
        with progress.shown(config.out, total=total, done=done, skipped=skipped) as display:
            if team is None:
                evidence = work_alone(job, display)
            else:
                evidence = team.perform(work, job, folder=config.out, display=display)
        manifest = make_manifest(config, plan, all_records(config.out, plan), evidence)
        ledger.seal(config.out, manifest)
    return manifest


def tell_slow_target(config: BuildConfig) -> None:
    """A target in bfloat16 on a CPU that is slow in it could be done in float32."""
    on_cpu = config.devices.startswith("cpu") or not gpus_here()
    if config.target_dtype == "bfloat16" and on_cpu:
        slow = slow_bfloat16(instead="--target-dtype float32")
        if slow is not None:
            tqdm.write(f"Warning: {slow}", file=sys.stderr)


def all_records(root: Path, plan: Plan) -> list[UnitRecord]:
    """The records of a build whose units are all done, in the order of the plan."""
    names = [unit.name for unit in plan.units]
    end = time.monotonic() + PATIENCE
    while missing := set(names) - set(ledger.recorded_units(root)):
        if time.monotonic() > end:
            raise CacheError(
                f"{root}: {len(missing)} of {len(names)} units were committed and are not seen "
                f"here ({min(missing)} ...); --out must be a folder that all machines share. Run "
                "the same command again"
            )
        time.sleep(0.2)  # committed by another machine: network shares show it a little later
    records = ledger.committed_units(root, fingerprint=plan.identity.fingerprint)
    return [records[name] for name in names]


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """What every worker of a build is told.

    `committed` is what there was at the start, and the same for all: the queue counts the rest.
    """

    config: BuildConfig
    options: dict[str, Any]  # as the cache remembers them
    host: str  # where this was planned
    found: Survey
    plan: Plan
    committed: dict[str, UnitRecord]

    @property
    def pending(self) -> list[UnitPlan]:
        """What is still to be done, all buckets mixed, as workers take it.

        Who follows the build meets samples of all lengths from the start, the time that is left
        is told from all of them, and batches that are too large fail soon.
        """
        order = np.random.default_rng(0).permutation(len(self.plan.units))
        mixed = (self.plan.units[number] for number in order)
        return [unit for unit in mixed if unit.name not in self.committed]

    @property
    def last_layer(self) -> int:
        return max(self.plan.identity.target_layer_ids)

    def as_here(self, here: BuildConfig) -> "Job":
        """The same job, with cache and target under the names that they have on this machine."""
        config = replace(self.config, out=here.out, target=here.target)
        if socket.gethostname() == self.host:
            return replace(self, config=config)
        folder = find_target(here.target, revision=self.found.spec.revision)
        if hash_config(folder) != self.found.spec.config_sha256:
            raise TargetError(
                f"{folder} on {socket.gethostname()}: its config.json is not that of {self.host}; "
                "all machines need the same target"
            )
        return replace(self, config=config, found=replace(self.found, folder=folder))


def work_alone(job: Job, display: Display) -> dict[str, Any]:
    """Load, prove, extract, in this process; returns what it proved."""
    config, plan = job.config, job.plan
    ((device,),) = groups_of(config)
    target = load(job, device, True)
    evidence = prove(target, plan, job.committed, config, lead=True)
    codec = begin(job, target)
    extract(target, plan, job.pending, config, codec, Alone(display))
    return evidence


def work(crew: Crew, job: Job) -> None:
    """The same as one of several workers: the first one proves for all, units go to who is free."""
    _quiet_transformers()
    job = job.as_here(crew.seat.config)
    config, plan = job.config, job.plan
    load_here: lockstep.Load = partial(load, job, crew.device, shared=crew.shared)
    if crew.index > 0:
        lockstep.follow(load_here)
        return
    if crew.shared:
        load_here = partial(lockstep.lead, load_here)
    member = crew.member(plan.samples.lengths)
    with _full_disk(job):
        target, codec = _take_up(member, job, load_here)
        budget = Budget(config.batch_tokens)
        extract(target, plan, member.fresh(job.pending), config, codec, member, budget=budget)
        for unit in member.left(job.pending):
            extract(target, plan, [unit], config, codec, member, budget=budget)


def _take_up(member: Member, job: Job, load_here: lockstep.Load) -> tuple[Target, Codec]:
    """Lead, or join who leads; and lead when that one has died before it was ready."""
    whole = member.leads()
    while True:
        target = load_here(whole)
        evidence = prove(target, job.plan, job.committed, job.config, lead=whole)
        if whole:
            codec = begin(job, target)
            member.board.set_ready(evidence)
            return target, codec
        if member.wait_until_ready():
            return target, join(job, target)
        del target
        whole = True


def _quiet_transformers() -> None:
    """A worker is another process than the one that the command line has quieted."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def load(job: Job, device: str, whole: bool, *, shared: bool = False) -> Target:
    """The target: whole for who proves it and saves its head, else up to the last layer needed."""
    whole = whole or job.config.final_hidden
    return load_weights(
        job.found,
        device=device,
        up_to=None if whole else job.last_layer,
        attention=job.config.target_attention,
        tensor_parallel=shared,
    )


def begin(job: Job, target: Target) -> Codec:
    """Leave everything beside the units; nothing is written before the target has proved itself.

    What the target has above the last layer needed is given back.
    """
    root, plan = job.config.out, job.plan
    ledger.begin(root, plan.identity, job.options)
    store.write_plan(root, plan.units, plan.samples.samples)
    store.write_frozen(root, target.embedding, target.head, tied=target.spec.tied_head)
    leave_probe(target, plan, job.config)
    if not job.config.final_hidden:
        target.keep_up_to(job.last_layer)
    return codec_for(root, target, plan, job.committed)


def join(job: Job, target: Target) -> Codec:
    """Take up what the first worker has left, and compute as it does."""
    meet_probe(target, job.plan, job.config)
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
        if name not in LOCAL
    }
    for name in ("target", "data", "exclude"):
        if plain[name] is not None and Path(plain[name]).exists():
            plain[name] = str(Path(plain[name]).resolve())
    return {**plain, "no_proof": remembered_skips(config)}


def make_manifest(
    config: BuildConfig, plan: Plan, records: Sequence[UnitRecord], evidence: dict[str, Any]
) -> Manifest:
    """Totals and evidence of a finished build."""
    beside = {
        name: file_entry(config.out / name) for name in ledger.beside(config.out, plan.identity)
    }
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
        padding_share=ledger.padding_share(records),
        files=beside,
        options=options_of(config),
        software={
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
