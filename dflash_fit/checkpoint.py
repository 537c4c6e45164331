"""Run folders: checkpoints written aside and renamed, found again, and cleared away.

RUN/
  config.json                 the resolved options
  metrics.jsonl               one line per log interval and per measurement
  checkpoints/step_00000500/  drafter folder (config.json, model.safetensors, training.json)
                              + optimizer.safetensors + state.json: exact resume
  best -> checkpoints/step_N  the best held-out acceptance length so far
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dflash_cache import disk
from dflash_cache.schema import Identity, first_difference
from dflash_fit.config import SPEED_ONLY, FitConfig
from dflash_fit.drafter import DFlashDraftModel
from dflash_fit.errors import RunFolderError
from dflash_fit.folder import write_drafter
from dflash_fit.loader import Position
from dflash_fit.optim import FlatAdamW

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
}

CHECKPOINTS = "checkpoints"
STATE_FILES = ("state.json", "optimizer.safetensors", "model.safetensors", "config.json")


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
    """The options with the anchors that a run in this folder measured, where they are `auto`.

    Refuses a folder that is something else, before anything is built or measured.
    """
    path = config.out / "config.json"
    if path.is_file():
        begun = read_options(path)
        return replace(config, anchors=begun["anchors"]) if config.anchors == "auto" else config
    if config.out.exists() and (not config.out.is_dir() or any(config.out.iterdir())):
        raise no_run_folder(config.out)
    return config


def open_run(config: FitConfig, *, identity: Identity) -> None:
    """Make the run folder, or check that it holds this very run."""
    path = config.out / "config.json"
    resolved = resolve(config, identity=identity)
    if path.is_file():
        refuse_other_run(path, resolved)
        return
    config.out.mkdir(parents=True, exist_ok=True)
    disk.write_file(path, json.dumps(resolved, indent=2).encode())


def no_run_folder(out: Path) -> RunFolderError:
    return RunFolderError(
        f"{out}: not empty and not a run folder; nothing was touched. Give --out a new folder"
    )


def resolve(config: FitConfig, *, identity: Identity) -> dict[str, Any]:
    """All options as JSON, and what the cache holds: a run goes on with the very same."""
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    plain = {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}
    plain["target_layers"] = list(config.target_layers) if config.target_layers else None
    return {
        **plain,
        "cache_identity": identity.to_dict(),
        "cache_fingerprint": identity.fingerprint,
    }


def read_options(path: Path) -> dict[str, Any]:
    """The options that a run was begun with; of an older one as well."""
    try:
        found = json.loads(path.read_text())
    except ValueError:
        raise RunFolderError(f"{path}: broken JSON; give --out a new folder") from None
    # Drafter folders have a config.json, too.
    if not isinstance(found, dict) or "cache_fingerprint" not in found:
        raise no_run_folder(path.parent)
    return {**BEFORE, **found}


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


def save_checkpoint(
    run: Path,
    drafter: DFlashDraftModel,
    optimizer: FlatAdamW,
    state: RunState,
    training: Mapping[str, Any],
) -> Path:
    """Write everything that resuming and exporting need; it appears whole or not at all."""
    path = step_folder(run, state.step)
    with disk.new_folder(path) as folder:
        tensors = drafter.state_dict()
        dtype = next(iter(tensors.values())).dtype
        write_drafter(folder, drafter.config, tensors, training, dtype=dtype)
        moments = {
            name: tensor.detach().cpu().clone() for name, tensor in optimizer.state().items()
        }
        save_file(moments, folder / "optimizer.safetensors")
        (folder / "state.json").write_text(json.dumps(asdict(state), indent=2))
    return path


def checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = sorted((run / CHECKPOINTS).glob("step_*"))
    return [path for path in found if all((path / name).is_file() for name in STATE_FILES)]


def load_checkpoint(path: Path, optimizer: FlatAdamW) -> RunState:
    """Put masters and moments back; the weights follow from the masters."""
    try:
        optimizer.load_state(load_file(path / "optimizer.safetensors"))
        return RunState(**json.loads((path / "state.json").read_text()))
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        raise RunFolderError(
            f"{path}: cannot be read ({str(error)[:200]}); delete that folder, and the run goes "
            "on from the checkpoint before it"
        ) from None


def mark_best(run: Path, checkpoint: Path) -> None:
    """Point `best` at a checkpoint, in one atomic step."""
    link = run / "best"
    partial = disk.aside(link)
    os.symlink(checkpoint.relative_to(run), partial)
    os.replace(partial, link)
    disk.fsync_path(run)


def best_checkpoint(run: Path) -> Path | None:
    link = run / "best"
    return link.resolve() if link.exists() else None


def clear_old(run: Path, *, keep_last: int) -> None:
    """Delete checkpoints but the last ones and the best."""
    best = best_checkpoint(run)
    for path in checkpoints(run)[:-keep_last]:
        if path.resolve() != best:
            shutil.rmtree(path)


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
        return path
    complete = checkpoints(path)
    if not complete:
        raise RunFolderError(f"{path}: this run has no checkpoint yet")
    if checkpoint == "best":
        return best_checkpoint(path) or complete[-1]
    if checkpoint == "last":
        return complete[-1]
    named = {p.name: p for p in complete} | {f"step_{int(p.name[5:])}": p for p in complete}
    if checkpoint not in named:
        raise RunFolderError(
            f"{path}: no checkpoint {checkpoint!r}; there are {[p.name for p in complete]}"
        )
    return named[checkpoint]


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
