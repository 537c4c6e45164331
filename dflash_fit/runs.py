"""Run folders as plain data, for people to look at: whole ones, running ones, broken ones.

What a run did not write down, because it is older or was cut short, is None or missing here, never
an error; only a folder that is no run at all is one.  Hours and tokens add up what the log lines
say, since they carry no clock: time between a crash and the next start does not count.
"""

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dflash_fit.checkpoint import CHECKPOINTS, is_run
from dflash_fit.errors import RunFolderError
from dflash_fit.provenance import json_of

METRICS, SWEEP = "metrics.jsonl", "sweep.json"
ALIVE = 600.0  # seconds; a run that wrote a line since then is taken for running
FAILED = "failed: "  # before the reason, in sweep.json
# Of config.json: what is no option.
NO_OPTIONS = ("cache_identity", "cache_fingerprint")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a run left behind.  Lines of metrics have `hours` and `tokens_seen` added to them."""

    folder: Path
    options: dict[str, Any]
    identity: dict[str, Any]  # of the cache, as config.json says; empty if it does not
    fingerprint: str | None  # of the cache
    drafter: dict[str, Any]  # config.json of the newest checkpoint
    parameters: int | None
    train: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    captures: list[dict[str, Any]]
    age: float | None  # seconds since the last line; None: there is none
    notes: list[str]  # what could not be read

    @property
    def last(self) -> dict[str, Any]:
        """The last line of training or measuring; empty where there is none."""
        lines = [*self.train[-1:], *self.evals[-1:]]
        return max(lines, key=lambda line: (line["step"], line["hours"]), default={})

    @property
    def best(self) -> dict[str, Any]:
        """The first measurement with the greatest acceptance length; empty where there is none.

        While a cache is still being built, not all held-out samples are there: that counts not.
        """
        whole = [line for line in self.evals if line.get("complete") is not False]
        return max(whole, key=lambda line: line["acceptance_length"], default={})

    @property
    def planned(self) -> int | None:
        """Steps of the whole run, where it says so."""
        told = whole(self.train[-1].get("steps")) if self.train else None
        return told if told is not None else whole(self.options.get("max_steps"))

    @property
    def status(self) -> str:
        """`empty`, `finished`, `running`, `stopped`, or `ended` where the plan is unknown."""
        if not self.last:
            return "empty"
        planned = self.planned
        if planned is not None and self.last["step"] >= planned:
            return "finished"
        if self.age is not None and self.age < ALIVE:
            return "running"
        return "ended" if planned is None else "stopped"


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A row of the table: a run, or a trial of a sweep that may have left no run."""

    name: str
    run: RunRecord | None
    trial: dict[str, Any] = field(default_factory=dict)  # what sweep.json says of it

    @property
    def options(self) -> dict[str, Any]:
        own = self.trial.get("options")
        return {**(own if isinstance(own, dict) else {}), **(self.run.options if self.run else {})}

    @property
    def best(self) -> dict[str, Any]:
        return self.run.best if self.run else {}

    @property
    def acceptance(self) -> float | None:
        return number(self.best.get("acceptance_length", self.trial.get("acceptance_length")))

    @property
    def error(self) -> float | None:
        return number(self.best.get("acceptance_error", self.trial.get("acceptance_error")))

    @property
    def step(self) -> int | None:
        return whole(self.run.last.get("step") if self.run else self.trial.get("steps"))

    @property
    def tokens(self) -> float | None:
        return number(self.run.last.get("tokens_seen")) if self.run else None

    @property
    def hours(self) -> float | None:
        found = number(self.trial.get("hours"))
        return found if found is not None or not self.run else number(self.run.last.get("hours"))

    @property
    def gb_read(self) -> float | None:
        found = number(self.trial.get("gb_read"))
        return found if found is not None or not self.run else number(self.run.last.get("gb_read"))

    @property
    def status(self) -> str:
        """In the words of runs; of a sweep also `halved at step n`, `interrupted`, `queued`."""
        told = word(self.trial.get("status"))
        if told is None:
            return self.run.status if self.run else "no run"
        if told == "done":
            return "finished"
        # A sweep that was killed could not take back that its trials run.
        if told == "running" and self.run and self.run.status == "stopped":
            return "stopped"
        return told.partition(":")[0]

    @property
    def problem(self) -> str | None:
        """Why a trial failed."""
        told = word(self.trial.get("status")) or ""
        return told.removeprefix(FAILED) if told.startswith(FAILED) else None


def find_standings(folders: Sequence[Path], *, now: float | None = None) -> list[Standing]:
    """All runs in the folders that a user names, the best first; those unmeasured last.

    A folder is a run, or holds some: that of a sweep, whose sweep.json then counts, or any other.
    """
    moment = time.time() if now is None else now
    trials: dict[Path, dict[str, Any]] = {}
    for folder in folders:
        for place, trial in _in_folder(folder):
            if trial or place not in trials:
                trials[place] = trial
    names = short_names(list(trials))
    own = {place: word(trial.get("name")) for place, trial in trials.items()}
    for place, name in own.items():
        if name is not None and list(own.values()).count(name) == 1:  # two sweeps may share it
            names[place] = name
    found = [
        Standing(
            name=names[place],
            run=read_run(place, now=moment) if is_run(place) else None,
            trial=trial,
        )
        for place, trial in trials.items()
    ]
    return sorted(found, key=lambda one: -math.inf if one.acceptance is None else one.acceptance,
                  reverse=True)  # fmt: skip


def _in_folder(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Places of runs and what a sweep says of them; a trial that failed may have no folder."""
    if not folder.is_dir():
        raise RunFolderError(f"{folder}: no such folder; give runs of `dflash fit`, or a folder "
                             "with some in it")  # fmt: skip
    folder = folder.resolve()
    if is_run(folder):
        return [(folder, {})]
    found = {place: trial for trial in _trials(folder) for place in [_place(folder, trial)]}
    for place in sorted(path for path in folder.iterdir() if path.is_dir()):
        if is_run(place):
            found.setdefault(place, {})
    if not found:
        raise RunFolderError(
            f"{folder}: neither a run (no config.json of `dflash fit`, no {CHECKPOINTS}/) nor a "
            "folder with runs in it; give the folder that was --out of `dflash fit`"
        )
    return list(found.items())


def _trials(folder: Path) -> list[dict[str, Any]]:
    told = json_of(folder / SWEEP).get("trials")
    return [one for one in told if isinstance(one, dict)] if isinstance(told, list) else []


def _place(folder: Path, trial: Mapping[str, Any]) -> Path:
    """Where a trial's run is: sweeps are moved, so the folder beside sweep.json goes first."""
    told = trial.get("run") or trial.get("name") or ""
    path = Path(told) if isinstance(told, str) else folder
    beside = folder / path.name
    return beside if beside.is_dir() or not path.is_dir() else path.resolve()


def read_run(folder: Path, *, now: float) -> RunRecord:
    """One run folder, whatever state it is in."""
    notes: list[str] = []
    config = json_of(folder / "config.json")
    if not config:
        notes.append("config.json is missing or broken: its options are unknown")
    path = folder / METRICS
    lines, broken = read_lines(path)
    if broken:
        notes.append(f"{METRICS}: {broken} line{'s' * (broken > 1)} could not be read")
    add_up(lines)
    drafters = sorted((folder / CHECKPOINTS).glob("step_*/config.json"))
    return RunRecord(
        folder=folder,
        options={name: value for name, value in config.items() if name not in NO_OPTIONS},
        identity=as_dict(config.get("cache_identity")),
        fingerprint=word(config.get("cache_fingerprint")),
        drafter=json_of(drafters[-1]) if drafters else {},
        parameters=(
            count_parameters(drafters[-1].with_name("model.safetensors")) if drafters else None
        ),
        train=[line for line in lines if line["kind"] == "train"],
        evals=[
            line
            for line in lines
            if line["kind"] == "eval" and number(line.get("acceptance_length")) is not None
        ],
        captures=[line for line in lines if line["kind"] == "capture"],
        age=max(0.0, now - path.stat().st_mtime) if lines else None,
        notes=notes,
    )


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines that say a kind and a step, and how many others there are."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return [], 0
    found, broken = [], 0
    for line in text.split("\n"):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            known = isinstance(value["kind"], str) and whole(value["step"]) is not None
        except (ValueError, KeyError, TypeError, RecursionError):
            known = False
        if known:
            found.append(value)
        else:
            broken += 1
    return found, broken


def add_up(lines: Iterable[dict[str, Any]]) -> None:
    """Give every line what the run had spent by then: `tokens_seen`, `hours`, `gb_read`.

    The seconds of an interval are its tokens over its tokens per second.
    """
    tokens = seconds = gigabytes = 0.0
    reading = False  # whether the run says what it reads
    for line in lines:
        speed, some = number(line.get("tokens_per_s")), number(line.get("tokens"))
        if line["kind"] == "train" and some is not None:
            tokens += some
            interval = some / speed if speed else 0.0
            seconds += interval
            busy, rate = number(line.get("reader_busy")), number(line.get("gb_per_s_delivered"))
            reading |= busy is not None
            gigabytes += (busy or 0.0) * (rate or 0.0) * interval
        elif line["kind"] != "train":
            seconds += number(line.get("seconds")) or 0.0
        line["tokens_seen"], line["hours"] = tokens, seconds / 3600
        line["gb_read"] = gigabytes if reading else None


def count_parameters(path: Path) -> int | None:
    """Of a safetensors file, from its header alone."""
    try:
        with safe_open(path, framework="np") as file:
            shapes = [file.get_slice(key).get_shape() for key in file.keys()]  # noqa: SIM118
            return sum(int(math.prod(shape)) for shape in shapes)
    except (OSError, SafetensorError):
        return None


def short_names(folders: Sequence[Path]) -> dict[Path, str]:
    """The shortest ends of paths that tell them all apart."""
    for parts in range(1, max((len(folder.parts) for folder in folders), default=0) + 1):
        names = {folder: "/".join(folder.parts[-parts:]) for folder in folders}
        if len(set(names.values())) == len(folders):
            return names
    return {folder: str(folder) for folder in folders}


def differing_options(standings: Sequence[Standing]) -> list[str]:
    """Names of options that two runs have unlike; what an older one does not name is no difference.

    Where a run lies is no option, and a cache is what its fingerprint says, wherever it lies.
    """
    options = [one.options for one in standings]
    names = list(dict.fromkeys(name for some in options for name in some))
    return [
        name
        for name in names
        if name not in ("out", "cache")
        and len({json.dumps(some[name], sort_keys=True) for some in options if name in some}) > 1
    ]


def as_dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def number(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def whole(value: object) -> int | None:
    return None if isinstance(value, bool) or not isinstance(value, int) else value


def word(value: object) -> str | None:
    return value if isinstance(value, str) else None
