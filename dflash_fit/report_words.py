"""The words and numbers of a report around its charts, ready for the template.

Plain strings, not yet escaped.  A value that nobody wrote down is a dash.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_cache import __version__
from dflash_cache.errors import DFlashError
from dflash_cache.files import is_url
from dflash_cache.ledger import read_manifest
from dflash_fit.chart_rows import HUES, LIMITS, hue_of
from dflash_fit.option_charts import drawn_options, spoken
from dflash_fit.runs import RunRecord, Standing, as_dict, differing_options, number

Pairs = list[tuple[str, str]]
DASH = "\N{EN DASH}"


def words_of(standings: Sequence[Standing]) -> dict[str, Any]:
    """Everything that the template says."""
    best, several = standings[0], len(standings) > 1
    columns = drawn_options(standings)
    return {
        "title": title_of(standings),
        "several": several,
        "best": headline(best),
        "facts": [*drafter_facts(best), *target_facts(best.run), ("State", best.status)],
        "tiles": tiles(best.run) if best.run else [],
        "remarks": remarks(standings),
        "columns": columns,
        "table": [table_row(place, one, columns) for place, one in enumerate(standings)],
        "legend": legend(standings),
        "configuration": configuration(standings, columns),
        "caches": caches(standings),
        "footer": f"Written by dflash {__version__} on {time.strftime('%Y-%m-%d at %H:%M')}.",
    }


def title_of(standings: Sequence[Standing]) -> str:
    return f"{len(standings)} runs" if len(standings) > 1 else standings[0].name


def headline(best: Standing) -> dict[str, str]:
    return {
        "name": best.name,
        "length": amount(best.acceptance, ".2f"),
        "error": amount(best.error, ".2f"),
        "step": thousands(best.best.get("step")),
    }


def drafter_facts(best: Standing) -> Pairs:
    """What was trained, by the newest checkpoint, or by the options where there is none."""
    run, options = best.run, best.options
    shape = run.drafter if run else {}
    layers = shape.get("num_hidden_layers", options.get("num_layers"))
    block = shape.get("block_size", options.get("block_size"))
    told = [
        f"{layers} layers" if layers else "",
        f"block of {block}" if block else "",
        f"{short(run.parameters)} parameters" if run and run.parameters else "",
    ]
    reads = as_dict(shape.get("dflash_config")).get("target_layer_ids")
    found = [("Drafter", ", ".join(word for word in told if word) or DASH)]
    if isinstance(reads, list):
        found.append(("Reads layers", spoken(reads)))
    loss = [options.get(name) for name in ("loss", "slot_weights")]
    if any(loss):
        found.append(("Loss", ", ".join(str(word) for word in loss if word)))
    return found


def target_facts(run: RunRecord | None) -> Pairs:
    """Whose drafter it is, and what it was trained from."""
    if run is None:
        return []
    target, identity = as_dict(run.identity.get("target")), run.identity
    found = [("Target", str(target.get("name", DASH)))]
    held = [
        f"{thousands(identity['samples'])} samples" if "samples" in identity else "",
        f"{short(identity['tokens'])} tokens" if "tokens" in identity else "",
        str(identity.get("encoding", "")),
    ]
    found.append(("Cache", ", ".join(word for word in held if word) or DASH))
    if run.fingerprint:
        found.append(("Fingerprint", run.fingerprint[:16]))
    return found


def tiles(run: RunRecord) -> list[dict[str, str]]:
    """The numbers of a run that one asks for first; those that it has."""
    last = run.last
    train = run.train[-1] if run.train else {}
    words = [
        ("Steps", thousands(last.get("step")), f"of {thousands(run.planned)}"),
        ("Trained on", short(last.get("tokens_seen")), "tokens"),
        ("Time", duration(last.get("hours")), ""),
        ("Loss", amount(number(train.get("loss")), ".3f"), ""),
        ("Speed", short(train.get("tokens_per_s")), "tokens/s"),
        ("Read", size(last.get("gb_read")), ""),
        ("Waiting", amount(number(train.get("waiting")), ".0%"), limit_words(train)),
        ("Memory", size(memory_of(run)), ""),
    ]
    return [{"name": n, "value": v, "unit": u} for n, v, u in words if v not in ("", DASH)]


def limit_words(train: dict[str, Any]) -> str:
    who = LIMITS.get(str(train.get("limit")))
    return f"{who} limits" if who else ""


def memory_of(run: RunRecord) -> float | None:
    """GB of the device: what lines say, or what a capture took."""
    told = [number(line.get("memory_gb")) for line in run.train]
    told += [
        value / 1e9 for line in run.captures for value in [number(line.get("memory"))] if value
    ]
    return max((value for value in told if value is not None), default=None)


def remarks(standings: Sequence[Standing]) -> list[str]:
    found = [f"{one.name}: {note}" for one in standings if one.run for note in one.run.notes]
    for one in standings:
        if one.problem is not None:
            found.append(f"{one.name}: {one.problem}")
        if one.run and not one.run.last:
            found.append(f"{one.name}: nothing logged yet")
    skipped = [
        (one.name, int(count))
        for one in standings
        if one.run and one.run.train
        for count in [number(one.run.train[-1].get("skipped_updates"))]
        if count
    ]
    found += [
        f"{name}: {count} update{'s' * (count > 1)} skipped, since loss or gradient was not finite"
        for name, count in skipped
    ]
    return found


def table_row(place: int, one: Standing, columns: Sequence[str]) -> dict[str, Any]:
    return {
        "hue": hue_of(place),
        "name": one.name,
        "length": amount(one.acceptance, ".3f"),
        "error": amount(one.error, ".3f"),
        "at": thousands(one.best.get("step")),
        "options": values(one, columns),
        "steps": thousands(one.step),
        "tokens": short(one.tokens),
        "hours": duration(one.hours),
        "gb": size(one.gb_read),
        "status": one.status,
        "state": one.status if one.status in ("finished", "failed", "empty") else "",
    }


def legend(standings: Sequence[Standing]) -> list[dict[str, Any]]:
    """The runs that have a colour of their own, and one line for all others."""
    own = [{"hue": place, "name": one.name} for place, one in enumerate(standings[:HUES])]
    others = len(standings) - HUES
    return [*own, {"hue": HUES, "name": f"{others} more"}] if others > 0 else own


def configuration(standings: Sequence[Standing], columns: Sequence[str]) -> dict[str, Any]:
    """Options that differ and are not in the table of runs; those that do not; and folders."""
    differing = differing_options(standings)
    rest = [name for name in differing if name not in columns]
    shared = {name: value for one in reversed(standings) for name, value in one.options.items()}
    return {
        "columns": rest,
        "rows": [
            {"hue": hue_of(place), "name": one.name, "options": values(one, rest)}
            for place, one in enumerate(standings)
        ],
        "shared": [
            (name, spoken(value))
            for name, value in shared.items()
            if name not in differing and name != "out"
        ],
        "folders": [(one.name, str(one.run.folder)) for one in standings if one.run],
    }


def values(one: Standing, names: Sequence[str]) -> list[str]:
    return [spoken(one.options[name]) if name in one.options else DASH for name in names]


def caches(standings: Sequence[Standing]) -> list[dict[str, Any]]:
    """Every cache once, as its seal says where it can still be read."""
    runs = {one.run.fingerprint: one.run for one in standings if one.run and one.run.fingerprint}
    return [cache_words(run) for run in runs.values()]


def cache_words(run: RunRecord) -> dict[str, Any]:
    seal, remark = read_seal(run)
    identity = run.identity
    target = as_dict(identity.get("target"))
    agreement = as_dict(seal.get("agreement"))
    left_out = as_dict(seal.get("proofs")).get("skipped")
    facts = {
        "Fingerprint": run.fingerprint or DASH,
        "Folder": str(run.options.get("cache", DASH)),
        "Target": f"{target.get('name', DASH)}, revision {target.get('revision') or 'unknown'}",
        "Samples": thousands(identity.get("samples")),
        "Tokens": supervised(identity, seal),
        "States": f"layers {spoken(identity.get('target_layer_ids', []))} of "
        f"{spoken(identity.get('hidden_size', DASH))} channels, {identity.get('encoding', DASH)}",
        "Size": size(seal["bytes"] / 1e9) if seal else DASH,
        "Agreement": agreement_words(agreement),
        "Left out": f"proofs {spoken(left_out)}" if left_out else "",
        "Built": str(seal.get("created", "")),
    }
    return {
        "remark": remark,
        "facts": [(name, value) for name, value in facts.items() if value not in ("", DASH)],
        "identity": [(name, spoken(value)) for name, value in flat(identity)],
    }


WRITTEN_DOWN = "what follows is what the run wrote down of it"


def read_seal(run: RunRecord) -> tuple[dict[str, Any], str]:
    """The manifest of the run's cache; nothing, and why, where it is not to be had."""
    where = run.options.get("cache")
    if not isinstance(where, str):
        return {}, ""
    if is_url(where):
        return {}, f"The cache lies behind a URL: {WRITTEN_DOWN}."
    try:
        manifest = read_manifest(Path(where))
    except (DFlashError, OSError):
        return {}, f"The cache is not to be read here, or not complete: {WRITTEN_DOWN}."
    if manifest.fingerprint != run.fingerprint:
        return {}, f"Another cache lies in its folder now: {WRITTEN_DOWN}."
    return manifest.to_dict(), ""


def supervised(identity: dict[str, Any], seal: dict[str, Any]) -> str:
    tokens = thousands(identity.get("tokens"))
    own = number(seal.get("supervised_tokens"))
    return tokens if own is None else f"{tokens}, {own / max(seal['tokens'], 1):.0%} supervised"


def agreement_words(agreement: dict[str, Any]) -> str:
    """What the target thinks of the text."""
    nll, greedy = number(agreement.get("nll")), number(agreement.get("greedy"))
    if nll is None or greedy is None:
        return DASH
    return (
        f"{greedy:.1%} of the supervised tokens are what the target itself would choose; "
        f"{nll:.3f} nats a token"
    )


def flat(value: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """A nested object as names with dots."""
    found: list[tuple[str, Any]] = []
    for name, inner in value.items():
        if isinstance(inner, dict):
            found += flat(inner, f"{before}{name}.")
        else:
            found.append((f"{before}{name}", inner))
    return found


def amount(value: float | None, format: str) -> str:
    return "" if value is None else f"{value:{format}}"


def thousands(value: object) -> str:
    found = number(value)
    return DASH if found is None else f"{found:,.0f}"


def duration(hours: object) -> str:
    found = number(hours)
    if found is None:
        return DASH
    if found < 1:
        return f"{found * 60:.0f} min" if found * 60 >= 1 else f"{found * 3600:.0f} s"
    return f"{found:.1f} h" if found < 100 else f"{found:,.0f} h"


def size(gigabytes: object) -> str:
    found = number(gigabytes)
    return DASH if found is None else scaled(found * 1e9, ("TB", "GB", "MB", "kB", "B"))


def short(value: object) -> str:
    """Three digits and a word for the size: 147 M."""
    found = number(value)
    return DASH if found is None else scaled(found, ("T", "B", "M", "k", ""))


def scaled(value: float, names: Sequence[str]) -> str:
    for size, name in zip((1e12, 1e9, 1e6, 1e3), names, strict=False):
        # What three digits round up to belongs to the next word.
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g} {name}"
    return f"{value:.3g} {names[-1]}".strip()
