"""Run folders: what they were begun with, and their checkpoints: found again, and cleared away.

RUN/
  config.json                 the resolved options
  metrics.jsonl               one line per log interval and per measurement
  checkpoints/step_00000500/  drafter folder (config.json, model.safetensors, training.json)
                              + the optimizer's state, in one part per rank, + state.json
  checkpoints/damaged_step_N  one that turned out not to be whole: nothing here looks at it again
  best -> checkpoints/step_N  the best held-out acceptance length so far

`saver` writes the checkpoints, `sound` says whether one is whole.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from dflash_cache import disk, lock
from dflash_cache.schema import Identity, first_difference
from dflash_fit.config import SPEED_ONLY, FitConfig
from dflash_fit.course import Position
from dflash_fit.errors import RunFolderError
from dflash_fit.parts import FlatState, read_parts
from dflash_fit.sound import STATE_FILE, Flawed, flaw, glance, read_record

# What runs did before these options existed: their config.json does not name them.
BEFORE = {
    "init_from": None,
    "passes_per_pack": 1,
    "packs_per_step": 1,
    "schedule": "cosine",
    "cooldown": 0.2,
    "final_lr": 0.0,
    "loss": "ce",
    "slot_weights": "decay",
    "follow": False,
    "unit_order": None,
    "data_seed": None,
}
# Options of before, by other names now; what they said does not change the result.
GONE = ("device",)

CHECKPOINTS = "checkpoints"
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
DAMAGED = "damaged_"


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Where a run stands, as a value."""

    step: int  # updates done
    epoch: int
    index: int  # next pack of the epoch
    turn: int = 0  # next pass over it; runs from before there were passes do not say
    best_step: int | None
    best_acceptance: float

    @property
    def position(self) -> Position:
        return Position(epoch=self.epoch, index=self.index, turn=self.turn)


START = RunState(step=0, epoch=0, index=0, best_step=None, best_acceptance=0.0)


def as_begun(config: FitConfig) -> FitConfig:
    """The options, with what a run in this folder has settled where they leave it open.

    Refuses a folder that is something else, before anything is built or measured.
    """
    path = config.out / "config.json"
    if path.is_file():
        begun = read_options(path)
        return replace(
            config,
            anchors=begun["anchors"] if config.anchors == "auto" else config.anchors,
            packs_per_step=config.packs_per_step or begun["packs_per_step"],
        )
    if config.out.exists() and not (config.out.is_dir() and is_untouched(config.out)):
        raise no_run_folder(config.out)
    return config


def is_untouched(out: Path) -> bool:
    """Whether a folder holds nothing but what a run leaves that is killed while it makes it."""
    partials = set(partials_of(out, "config.json"))
    return all(path.name == lock.LOCK or path in partials for path in out.iterdir())


def partials_of(run: Path, name: str) -> list[Path]:
    """Files aside that were to become one of that name."""
    return list(run.glob(f".{name}.*.partial"))


def open_run(config: FitConfig, *, identity: Identity) -> None:
    """Make the run folder, or check that it holds this very run."""
    path = config.out / "config.json"
    resolved = resolve(config, identity=identity)
    if path.is_file():
        refuse_other_run(path, resolved)
        return
    config.out.mkdir(parents=True, exist_ok=True)
    disk.write_file(path, json.dumps(resolved, indent=2).encode())
    disk.fsync_path(config.out.absolute().parent)


def no_run_folder(out: Path) -> RunFolderError:
    return RunFolderError(
        f"{out}: not empty and not a run folder; nothing was touched. Give --out a new folder"
    )


def resolve(config: FitConfig, *, identity: Identity) -> dict[str, Any]:
    """All options as JSON, and what the cache holds: a run goes on with the very same."""
    return {
        **as_json({f.name: getattr(config, f.name) for f in fields(config)}),
        "cache_identity": identity.to_dict(),
        "cache_fingerprint": identity.fingerprint,
    }


def as_json(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as JSON spells them: lists for tuples, text for paths."""
    lists = {key: list(v) if isinstance(v, tuple) else v for key, v in options.items()}
    return {key: str(v) if isinstance(v, Path) else v for key, v in lists.items()}


def read_options(path: Path) -> dict[str, Any]:
    """The options that a run was begun with; of an older one as well."""
    try:
        found = json.loads(path.read_text())
    except ValueError:
        raise RunFolderError(f"{path}: broken JSON; give --out a new folder") from None
    # Drafter folders have a config.json, too.
    if not isinstance(found, dict) or "cache_fingerprint" not in found:
        raise no_run_folder(path.parent)
    return {**BEFORE, **{name: value for name, value in found.items() if name not in GONE}}


def refuse_other_run(path: Path, wanted: dict[str, Any]) -> None:
    found = read_options(path)
    trim = [
        {key: value for key, value in options.items() if key not in SPEED_ONLY}
        for options in (found, wanted)
    ]
    difference = first_difference(trim[0], trim[1])
    if difference:
        field, has, wants = difference
        raise RunFolderError(
            f"{path.parent}: this run was begun with {field} = {has}, now it is {wants}; "
            "give another --out, or the options it was begun with"
        )


def step_folder(run: Path, step: int) -> Path:
    return run / CHECKPOINTS / f"step_{step:08d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def steps_saved(run: Path) -> list[Path]:
    """Every checkpoint that was ever finished, whole or not, oldest first."""
    found = (run / CHECKPOINTS).glob("step_*")
    return sorted((path for path in found if re.fullmatch(r"step_\d+", path.name)), key=step_of)


def checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints, oldest first; their sizes are looked at, not every byte."""
    return [path for path in steps_saved(run) if glance(path) is None]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The checkpoint that a run goes on from."""

    path: Path | None  # None: there is none yet
    flawed: dict[Path, str]  # newer ones, and what is wrong with each


def newest_sound(run: Path) -> Choice:
    """The newest checkpoint that is whole, every byte of it read; nothing is changed."""
    flawed: dict[Path, str] = {}
    for path in reversed(steps_saved(run)):
        problem = flaw(path)
        if problem is None:
            return Choice(path=path, flawed=flawed)
        flawed[path] = problem
    if not flawed:
        return Choice(path=None, flawed={})
    told = "; ".join(f"{path.name}: {problem}" for path, problem in flawed.items())
    raise RunFolderError(
        f"{run}: none of its checkpoints is whole ({told}). Put one back from a copy, or delete "
        f"{run / CHECKPOINTS} to begin anew"
    )


def put_away(choice: Choice) -> list[str]:
    """Rename the flawed checkpoints, so that nothing takes or counts them; returns what to tell."""
    assert choice.path is not None or not choice.flawed, choice
    told = []
    for path, problem in choice.flawed.items():
        into = free_name(path.with_name(DAMAGED + path.name))
        os.rename(path, into)
        told.append(
            f"{path} is not whole: {problem}. It is called {into.name} now; the run goes on from "
            f"{choice.path.name if choice.path else 'the start'}"
        )
    if told:
        disk.fsync_path(next(iter(choice.flawed)).parent)
    return told


def free_name(path: Path) -> Path:
    """The path, or with a number behind it where that is taken."""
    number, found = 1, path
    while found.exists():
        number, found = number + 1, path.with_name(f"{path.name}.{number + 1}")
    return found


def restore(checkpoint: Path, optimizer: FlatState) -> RunState:
    """Put masters and moments back, whatever ranks wrote them; the weights follow.

    All ranks call it.
    """
    try:
        record = read_record(checkpoint)
        state = RunState(**record.state)
        read_parts([checkpoint / name for name in record.parts], optimizer)
        return state
    except (OSError, SafetensorError, ValueError, TypeError, KeyError, Flawed) as error:
        raise RunFolderError(
            f"{checkpoint}: cannot be read ({str(error)[:200]}); delete that folder, and the run "
            "goes on from the checkpoint before it"
        ) from None


def mark_best(run: Path, checkpoint: Path) -> None:
    """Point `best` at a checkpoint, in one atomic step."""
    link = run / "best"
    partial = disk.aside(link)
    try:
        os.symlink(checkpoint.relative_to(run), partial)
        os.replace(partial, link)
    except IsADirectoryError:
        raise RunFolderError(
            f"{link}: a folder where a link should be; a copy of the run has followed it. Delete "
            "it, and the run goes on from its last checkpoint"
        ) from None
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        raise RunFolderError(
            f"{run}: this file system has no symbolic links ({error.strerror}), and the best "
            "checkpoint is named by one; give --out a folder on one that has"
        ) from None
    finally:
        partial.unlink(missing_ok=True)
    disk.fsync_path(run)


def best_checkpoint(run: Path) -> Path | None:
    """What `best` points at; None before the first measurement, and where that one is gone."""
    link = run / "best"
    return link.resolve() if link.exists() else None


def clear_old(run: Path, *, keep_last: int, keep_every: int | None = None) -> None:
    """Delete checkpoints but the last ones, those of every so many steps, and the best."""
    best = best_checkpoint(run)
    for path in checkpoints(run)[:-keep_last]:
        kept = keep_every is not None and step_of(path) % keep_every == 0
        if not kept and path.resolve() != best:
            # Aside first: half of one must not look like one.
            doomed = disk.aside(path)
            os.rename(path, doomed)
            shutil.rmtree(doomed)


def clear_leftovers(run: Path) -> None:
    """Delete what a save that was killed has left behind."""
    for path in (run / CHECKPOINTS).glob(".step_*.partial"):
        shutil.rmtree(path)
    for name in ("best", "config.json", "metrics.jsonl"):
        for path in partials_of(run, name):
            path.unlink()


def find_drafter(path: Path, *, checkpoint: str = "best") -> Path:
    """The drafter folder that a user means by a run, a checkpoint or an export."""
    if not path.is_dir():
        raise RunFolderError(f"{path}: no such folder")
    if not is_run(path):
        if checkpoint != "best":
            raise RunFolderError(
                f"{path}: is one drafter and no run, so it has no checkpoint {checkpoint!r}; drop "
                "--checkpoint, or give the run"
            )
        return whole(path) if (path / STATE_FILE).exists() else path
    saved, complete = steps_saved(path), checkpoints(path)
    if not complete:
        told = f"none of its {len(saved)} checkpoints is whole" if saved else "no checkpoint yet"
        raise RunFolderError(f"{path}: this run has {told}")
    if checkpoint == "best":
        best, link = best_checkpoint(path), path / "best"
        if best is None and link.is_symlink():
            raise RunFolderError(
                f"{link}: points to {os.readlink(link)}, which is gone; take another one with "
                f"--checkpoint, or give its folder; there are {[p.name for p in complete]}"
            )
        return whole(best) if best else complete[-1]
    if checkpoint == "last":
        return whole(saved[-1])  # not silently an older one
    named = {p.name: p for p in saved}
    named |= {f"step_{step_of(p)}": p for p in named.values()}
    if checkpoint not in named:
        raise RunFolderError(
            f"{path}: no checkpoint {checkpoint!r}; there are {[p.name for p in complete]}"
        )
    return whole(named[checkpoint])


def whole(checkpoint: Path) -> Path:
    """The checkpoint, unless something of it is missing or cut."""
    problem = glance(checkpoint)
    if problem:
        raise RunFolderError(
            f"{checkpoint}: is not whole ({problem}); take another one with --checkpoint"
        )
    return checkpoint


def is_run(path: Path) -> bool:
    """Whether a folder is a run: one that has not saved anything yet has only its options."""
    if (path / CHECKPOINTS).is_dir():
        return True
    try:
        found = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "cache_fingerprint" in found


def append_metrics(run: Path, line: Mapping[str, Any]) -> None:
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(dict(line)) + "\n")


def forget_metrics_after(run: Path, step: int) -> None:
    """Drop lines that a resumed run will write again, and a line that a crash cut short."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    disk.write_file(path, "".join(f"{line}\n" for line in kept).encode())
