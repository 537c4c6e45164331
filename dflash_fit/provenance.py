"""What is known of a drafter folder: how it was trained, on what, and what was measured.

A checkpoint stands in a run, whose options and measurements are read as well.  What nobody wrote
down stays unknown.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_cache.errors import CacheError
from dflash_cache.schema import Identity, TokenizerSpec
from dflash_fit.checkpoint import CHECKPOINTS
from dflash_fit.folder import CONFIG_FILE, read_training

PLACES = ("cache", "out", "init_from", "device")


@dataclass(frozen=True, kw_only=True)
class Provenance:
    source: Path
    training: dict[str, Any]  # the drafter's own record; empty for a drafter that is not from here
    options: dict[str, Any]  # of the run; empty outside of one
    identity: Identity | None  # of the cache
    measured: dict[str, Any]  # on held-out samples at this step; empty where nothing was

    @property
    def target(self) -> str | None:
        return self.training.get("target")

    @property
    def step(self) -> int | None:
        return self.training.get("step")

    @property
    def tokenizer(self) -> TokenizerSpec | None:
        return self.identity.tokenizer_spec if self.identity else None


def provenance_of(folder: Path) -> Provenance:
    """Gather what a drafter folder and the run around it say.

    An export keeps what was known when it was made, under `exported`.
    """
    folder = folder.resolve()
    training = read_training(folder)
    kept = training.get("exported", {})
    options, measured = kept.get("options", {}), kept.get("measured", {})
    if folder.parent.name == CHECKPOINTS:
        run = folder.parent.parent
        options = without_places(run_options(run))
        measured = measured_at(run, training.get("step"))
    return Provenance(
        source=folder,
        training={
            **without_folders(training),
            "exported": {"options": options, "measured": measured},
        },
        options={k: v for k, v in options.items() if not k.startswith("cache_")},
        identity=identity_in(options),
        measured=measured,
    )


def run_options(run: Path) -> dict[str, Any]:
    """The options that a run was begun with; empty where the folder is no run."""
    value = json_of(run / CONFIG_FILE)
    return value if "cache_fingerprint" in value else {}


def without_places(options: dict[str, Any]) -> dict[str, Any]:
    """Options without the paths of this machine, which an export should not publish."""
    return {name: value for name, value in options.items() if name not in PLACES}


def without_folders(training: dict[str, Any]) -> dict[str, Any]:
    """A drafter's record; what it began with, and that one with, keeps its hashes and no path."""
    beginning = training.get("init_from")
    if not beginning:
        return training
    kept = {name: value for name, value in beginning.items() if name != "folder"}
    if "trained" in kept:
        kept["trained"] = without_folders(kept["trained"])
    return {**training, "init_from": kept}


def identity_in(options: dict[str, Any]) -> Identity | None:
    try:
        return Identity.from_dict(options["cache_identity"], where="run")
    except (KeyError, CacheError):
        return None  # older than that field, or than this version of it


def measured_at(run: Path, step: int | None) -> dict[str, Any]:
    """The run's measurement on held-out samples at a step."""
    path = run / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    found: dict[str, Any] = {}
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue  # a line that a crash cut short
        if value.get("kind") == "eval" and value.get("step") == step is not None:
            found = value
    return found


def json_of(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
