"""Several drafters from one cache: trials in processes of their own, which share what is read.

This process schedules them and reads for them.  It keeps nothing that the trials' run folders do
not say, so the same command goes on wherever the last one stopped.

OUT/sweep.json        the table
OUT/<trial>/          the run folder of a trial, as of `dflash fit` alone
OUT/logs/<trial>.txt  what a trial said
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from dflash_cache import lock, ranks
from dflash_cache.errors import ConfigError, DFlashError
from dflash_cache.reader import CacheReader
from dflash_cache.signals import heard_by
from dflash_fit import checkpoint, loop
from dflash_fit.config import FitConfig
from dflash_fit.crew import Begin, Crew, say
from dflash_fit.errors import FitError, RunFolderError
from dflash_fit.halving import rungs_of
from dflash_fit.places import Place
from dflash_fit.prospects import Prospect, Rates, group_of, parted_by, place_of, prospect
from dflash_fit.runs import SWEEP
from dflash_fit.shared import SharedReads
from dflash_fit.sweep_plan import Plan
from dflash_fit.trackers import require_trackers
from dflash_fit.trial import Started


def sweep(plan: Plan, *, begin: Begin = Started) -> dict[str, Any]:
    """Train all trials of a plan, or go on where they stand; returns what sweep.json says."""
    refuse_ranks()
    for trial in plan.trials:
        require_trackers(trial.config.trackers)
    reader = CacheReader(plan.cache)
    places = places_of(plan)
    refuse_other_folder(plan.out)
    with lock.held(plan.out, doing="a sweep"), SharedReads(plan.cache) as shared:
        for path in checkpoint.partials_of(plan.out, SWEEP):
            path.unlink()
        found, failed = prospects_of(plan, reader, torch.device(places[0].device))
        if told := parting([trial.config for trial in plan.trials if trial.name in found]):
            say(told)
        crew = Crew(plan, found, failed, places, shared, begin)
        with stop_requests(crew), crew.bar:
            crew.work()
    return crew.report()


def refuse_ranks() -> None:
    if ranks.find_rank(os.environ) is not None:
        raise FitError(
            "--sweep: runs as one process, which starts those of its trials itself; start it "
            "without torchrun or srun, and name the GPUs with --devices"
        )


def refuse_other_folder(out: Path) -> None:
    if checkpoint.is_run(out):
        raise RunFolderError(f"{out}: is a run; nothing was touched. Give --out a new folder")
    if not out.exists() or (out / SWEEP).is_file():
        return
    # A sweep that was killed at once leaves these.
    own = {out / lock.LOCK, *checkpoint.partials_of(out, SWEEP)}
    if not out.is_dir() or set(out.iterdir()) - own:
        raise RunFolderError(
            f"{out}: not empty and not the folder of a sweep; nothing was touched. Give --out a "
            "new folder"
        )


def places_of(plan: Plan) -> list[Place]:
    names = dict.fromkeys(loop.devices_of(plan.trials[0].config))
    return [place_of(name, most=plan.trials_per_device) for name in names]


def prospects_of(
    plan: Plan, reader: CacheReader, device: torch.device
) -> tuple[dict[str, Prospect], dict[str, str]]:
    """What each trial is going to be; or why it cannot be, which is no reason for the others."""
    found: dict[str, Prospect] = {}
    failed: dict[str, str] = {}
    for trial in plan.trials:
        try:
            found[trial.name] = prospect(trial.config, reader, device)
        except DFlashError as error:
            failed[trial.name] = str(error)
    rungs_for(plan, found)
    return found, failed


def rungs_for(plan: Plan, found: Mapping[str, Prospect]) -> list[int]:
    """Steps at which trials are compared; none without --halving."""
    if plan.halving is None or not found:
        return []
    refuse_unlike_steps({name: one.steps for name, one in found.items()})
    return rungs_of(next(iter(found.values())).steps, plan.halving)


def parting(configs: Sequence[FitConfig]) -> str | None:
    """What keeps trials from sharing a read; None where all of them do."""
    names = parted_by(configs)
    if not names:
        return None
    groups = len({group_of(config) for config in configs})
    hint = "; with one --data-seed, seeds make no difference" if "seed" in names else ""
    return (
        f"trials differ in {', '.join(names)}, so they see {groups} unlike sequences of packs; "
        f"only those with the same one share a read{hint}"
    )


def refuse_unlike_steps(steps: dict[str, int]) -> None:
    if len(set(steps.values())) > 1:
        told = ", ".join(f"{name} {count:,}" for name, count in steps.items())
        raise ConfigError(
            f"--halving: compares trials at the same step, and these have unlike numbers of them "
            f"({told}); give --max-steps"
        )


@contextmanager
def stop_requests(crew: Crew) -> Iterator[None]:
    """SIGINT and SIGTERM ask the trials to save and end; a second one ends all at once.

    Those that this process ignores it does not hear, as under nohup.
    """

    def hear(number: int, _frame: FrameType | None) -> None:
        if crew.asked:
            crew.kill()
            raise SystemExit(128 + number)
        crew.stop()

    with heard_by(hear):
        try:
            yield
        except BaseException:
            crew.kill()
            raise


# --- before it begins -----------------------------------------------------------------------------


def look(plan: Plan) -> dict[str, Any]:
    """What a sweep would take, each trial as if it were alone; nothing is written."""
    refuse_ranks()
    refuse_other_folder(plan.out)
    reader, places = CacheReader(plan.cache), places_of(plan)
    device = torch.device(places[0].device)
    rates = Rates(device)
    trials: list[dict[str, Any]] = []
    read: dict[str, float] = {}
    able: dict[str, Prospect] = {}
    for trial in plan.trials:
        row = {"name": trial.name, "options": checkpoint.as_json(trial.options)}
        try:
            found = prospect(trial.config, reader, device, rates=rates)
        except DFlashError as error:
            trials.append({**row, "error": str(error)})
            continue
        told, able[trial.name] = found.estimate, found
        read[found.group] = max(read.get(found.group, 0.0), told.read_bytes)
        trials.append({
            **row,
            "steps": found.steps,
            "parameters": told.parameters,
            "memory_bytes": told.memory_bytes,
            "read_bytes": round(told.read_bytes),
            "hours": told.hours,
        })  # fmt: skip
    rungs_for(plan, able)
    return {
        "file": str(plan.file),
        "devices": [place.device for place in places],
        "trials": trials,
        "failed": sum("error" in row for row in trials),
        "read_bytes_alone": sum(row.get("read_bytes", 0) for row in trials),
        "read_bytes": round(sum(read.values())),
        "parting": parting([trial.config for trial in plan.trials if trial.name in able]),
    }
