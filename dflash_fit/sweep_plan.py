"""From a sweep file to trials: their names, their options, their folders.  No torch, no training.

[fit]                        # for all trials; what is typed wins, and what a trial gives
max_steps = 3000
[grid]                       # every combination of these values ...
lr = [3e-4, 6e-4]
target_layers = [[1, 16], [1, 8, 16]]

[[trials]]                   # ... or, in its place, one table for each trial
name = "wide"
intermediate_size = 4096
"""

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from dflash_cache.config import flag, option, require_positive
from dflash_cache.errors import ConfigError
from dflash_cache.option_file import field_of, options_of, read_toml, value_of
from dflash_fit.config import FitConfig

SECTIONS = ("fit", "grid", "trials")
# Of a whole sweep, or of runs on several devices: no option of one trial.
NOT_OF_A_TRIAL = ("cache", "out", "devices", "follow", "reduce", "shard_optimizer", "rank_timeout")
NAME = r"[A-Za-z0-9][A-Za-z0-9._=,+-]*"
LONGEST_NAME = 100  # characters: folders of most file systems may have 255
TAKEN = ("sweep.json", "logs")  # names in the folder of a sweep that are no trial's
DEFAULT = "default"  # a TOML file has no word for an option that is not given


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """What `dflash fit` takes for several runs at once."""

    sweep: Path | None = option(
        None,
        "TOML file of trials: [fit] with options of all of them, and [grid] with lists of values "
        "of options, or [[trials]] with the options of each.  They train side by side, from one "
        "read of the cache.",
    )
    halving: int | None = option(
        None,
        "Rungs of successive halving: the worse half of the trials, by held-out acceptance length, "
        "stops at each but the last (default: all trials train to their end).",
    )
    trials_per_device: int | None = option(
        None, "Trials on a device at once, at most (default: what its memory allows)."
    )

    def __post_init__(self) -> None:
        require_positive(self, "trials_per_device")
        for name in ("halving", "trials_per_device"):
            if self.sweep is None and getattr(self, name) is not None:
                raise ConfigError(f"{flag(name)}: only with --sweep")
        if self.halving is not None and self.halving < 2:
            raise ConfigError(f"--halving {self.halving}: want 2 rungs or more; the last is the "
                              "end of the training")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a sweep, in a folder of its own."""

    name: str
    options: dict[str, Any]  # those that it does not share with all others
    config: FitConfig


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a sweep is to do."""

    file: Path
    out: Path
    cache: str
    devices: str
    trials: tuple[Trial, ...]
    halving: int | None
    trials_per_device: int | None


def plan_sweep(
    config: SweepConfig, *, in_file: Mapping[str, Any], typed: Mapping[str, Any]
) -> Plan:
    """The trials of a sweep file; `in_file` are options of `--config`, `typed` those of the line.

    A typed option wins over [fit], and [fit] over --config; a typed one that trials differ in is
    refused.
    """
    assert config.sweep is not None
    path = config.sweep
    tables = sections(path)
    common = {**in_file, **options_of(FitConfig, tables.get("fit", {}), where=f"{path}, [fit]")}
    common |= typed
    own = own_options(path, tables)
    refuse_typed(path, typed, [options for _, options in own])
    for name in ("cache", "out"):
        if name not in common:
            raise ConfigError(f"{flag(name)}: missing; type it, or write it in [fit] of {path}")
    common["out"] = Path(common["out"])
    trials = named_trials(path, common, own)
    refuse_equal(path, trials)
    for trial in trials:
        refuse_what_no_sweep_can(path, trial)
    return Plan(
        file=path,
        out=common["out"],
        cache=common["cache"],
        devices=common.get("devices", FitConfig.devices),
        trials=trials,
        halving=config.halving,
        trials_per_device=config.trials_per_device,
    )


def sections(path: Path) -> dict[str, Any]:
    """The tables of a sweep file, which are what they should be."""
    tables = read_toml(path)
    for key, value in tables.items():
        if key not in SECTIONS:
            raise ConfigError(f"{path}: unknown section {key!r}; want [fit], and [grid] or "
                              "[[trials]]")  # fmt: skip
        wanted = list if key == "trials" else dict
        if type(value) is not wanted or (wanted is list and not all(map(is_table, value))):
            spelt = "[[trials]], a table for each" if wanted is list else f"a table [{key}]"
            raise ConfigError(f"{path}: found {key} = {value!r}, want {spelt}")
    if ("grid" in tables) == ("trials" in tables):
        raise ConfigError(f"{path}: want either [grid], for every combination of values, or "
                          "[[trials]], for each trial by itself")  # fmt: skip
    return tables


def is_table(value: Any) -> bool:
    return isinstance(value, dict)


# --- options of each ------------------------------------------------------------------------------

Own = tuple[str | None, dict[str, Any]]  # a name, where one is given, and options by field


def own_options(path: Path, tables: Mapping[str, Any]) -> list[Own]:
    """What each trial gives for itself."""
    if "trials" in tables:
        return [
            listed(table, where=f"{path}, [[trials]] {number}")
            for number, table in enumerate(tables["trials"], start=1)
        ]
    return [(None, options) for options in grid(path, tables["grid"])]


def listed(table: Mapping[str, Any], *, where: str) -> Own:
    options = dict(table)
    name = options.pop("name", None)
    if name is not None and (type(name) is not str or not re.fullmatch(NAME, name)):
        raise ConfigError(f"{where}: found name = {name!r}, want letters, digits and ._=,+- only, "
                          "since it names a folder")  # fmt: skip
    if name is not None and (name in TAKEN or len(name) > LONGEST_NAME):
        raise ConfigError(f"{where}: the name {name!r} is taken or too long; choose another")
    found: dict[str, Any] = {}
    for key, value in options.items():
        field = field_of(FitConfig, key, where=where)
        refuse_of_a_trial(field, where=where)
        if field in found:
            raise ConfigError(f"{where}: {key!r} is there twice; drop one")
        found[field] = one_value(field, value, where=f"{where}, {key}")
    return name, in_order(found)


def grid(path: Path, table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every combination of the values, the last option changing first."""
    where = f"{path}, [grid]"
    if not table:
        raise ConfigError(f"{where}: empty; give lists of values, as lr = [3e-4, 6e-4]")
    axes: dict[str, list[Any]] = {}
    for key, values in table.items():
        field = field_of(FitConfig, key, where=where)
        refuse_of_a_trial(field, where=where)
        if field in axes:
            raise ConfigError(f"{where}: {key!r} is there twice; drop one")
        if type(values) is not list or not values:
            raise ConfigError(f"{where}, {key}: found {values!r}, want a list of values")
        axes[field] = [one_value(field, value, where=f"{where}, {key}") for value in values]
    rows = itertools.product(*axes.values())
    return [in_order(dict(zip(axes, row, strict=True))) for row in rows]


def one_value(field: str, value: Any, *, where: str) -> Any:
    if value == DEFAULT:
        return next(f.default for f in fields(FitConfig) if f.name == field)
    return value_of(FitConfig, field, value, where=where)


def in_order(options: Mapping[str, Any]) -> dict[str, Any]:
    """As FitConfig has them, so that a name does not depend on how a file is sorted."""
    return {f.name: options[f.name] for f in fields(FitConfig) if f.name in options}


def refuse_of_a_trial(field: str, *, where: str) -> None:
    if field in NOT_OF_A_TRIAL:
        raise ConfigError(
            f"{where}: {field} cannot differ between trials; give it once, in [fit] or as "
            f"{flag(field)}"
        )


def refuse_typed(path: Path, typed: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> None:
    for name in typed:
        if any(name in options for options in own):
            raise ConfigError(f"{flag(name)}: {path} gives it for each trial; drop one of them")


# --- names ----------------------------------------------------------------------------------------


def named_trials(path: Path, common: Mapping[str, Any], own: Sequence[Own]) -> tuple[Trial, ...]:
    """A name that is not given is made of the options that a trial gives for itself.

    All of them, also those that no trial has otherwise: a name must stay when trials are added,
    for it is the folder in which a trial goes on.
    """
    configs, names = [], []
    for number, (given, options) in enumerate(own, start=1):
        name = given or made_name(options)
        names.append(name)
        try:
            configs.append(FitConfig(**{**common, **options, "out": common["out"] / name}))
        except ConfigError as error:
            raise ConfigError(f"{path}, trial {number} ({name}): {error}") from None
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice and any(name == given for given, _ in own for name in twice):
        raise ConfigError(f"{path}: two trials are named {twice[0]!r}; give each its own name")
    differ = differing(configs)
    return tuple(
        Trial(name=name, options={f: getattr(config, f) for f in differ}, config=config)
        for name, config in zip(names, configs, strict=True)
    )


def made_name(options: Mapping[str, Any]) -> str:
    """`lr=0.0003,num_layers=3`; a long one ends in its hash."""
    name = ",".join(f"{field}={spelt(value)}" for field, value in options.items())
    safe = re.sub(r"[^A-Za-z0-9._=,+-]+", "-", name) or "base"
    if not name or (safe == name and len(safe) <= LONGEST_NAME):
        return safe
    # What was cut or replaced told trials apart.
    return f"{safe[: LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def spelt(value: Any) -> str:
    if value is None:
        return DEFAULT
    return "+".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def differing(configs: Sequence[FitConfig]) -> list[str]:
    """Options that two trials have unlike."""
    return [
        f.name
        for f in fields(FitConfig)
        if f.name != "out" and len({getattr(config, f.name) for config in configs}) > 1
    ]


def refuse_equal(path: Path, trials: Sequence[Trial]) -> None:
    seen: dict[FitConfig, str] = {}
    for trial in trials:
        config = replace(trial.config, out=Path())
        if config in seen:
            raise ConfigError(f"{path}: {seen[config]} and {trial.name} are the same trial; drop "
                              "one of them")  # fmt: skip
        seen[config] = trial.name


def refuse_what_no_sweep_can(path: Path, trial: Trial) -> None:
    if trial.config.follow:
        raise ConfigError("--follow: a sweep wants a complete cache; drop it")
    if trial.config.anchors == "auto":
        raise ConfigError(
            f"{path}: --anchors auto measures a device that trials share; give a number"
        )
