"""What differs between runs against what came of it: scatters, and parallel coordinates.

Only options that may change what is learnt, and only of runs that were measured.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_fit.chart_parts import HUE, NAME, Chart, Spec, hint, y
from dflash_fit.chart_rows import Row, digits, having, hue_of
from dflash_fit.runs import Standing, differing_options, number

MOST_OPTIONS = 12
LOG_RATIO = 20  # an option whose values span as much is drawn on a logarithmic axis
# Options that change speed or only when something is written, never what is learnt.
IDLE = (
    *("anchor_microbatch", "loss_chunk", "checkpoint_every", "keep_last", "keep_every"),
    *("log_every", "device", "devices", "step", "attention", "reduce", "shard_optimizer"),
    *("rank_timeout", "max_skipped", "eval_every"),
)


def option_charts(rows: Mapping[str, Sequence[Row]]) -> list[Chart]:
    """What differs between runs against what came out of it."""
    options = rows["options"]
    names = list(dict.fromkeys(row["option"] for row in options))
    found = [
        scatter(f"option-{place}", name, [row for row in options if row["option"] == name])
        for place, name in enumerate(names)
    ]
    if rows["paths"]:
        found.insert(0, parallel(rows["paths"]))
    return found


def scatter(key: str, name: str, rows: Sequence[Row]) -> Chart:
    """One option of all runs against acceptance length."""
    sizes = [row["value"] for row in rows]
    numeric = None not in sizes
    log = numeric and logarithmic(sizes)
    x: Spec = {"field": "label", "type": "ordinal", "axis": {"labelAngle": 0, "labelLimit": 110}}
    if numeric:
        x = {"field": "value", "type": "quantitative", "axis": {"tickCount": 4, "format": "~r"}}
        x["scale"] = {"type": "log", "padding": 12} if log else {"zero": False, "padding": 12}
    x["title"] = None
    x["axis"] |= {"grid": False, "labelOverlap": "greedy"}
    up = y("length", format=".2f")
    tooltip = [
        NAME,
        {"field": "label", "type": "nominal", "title": name},
        hint("length", "acceptance length", ".3f"),
        hint("error", "standard error", ".3f"),
    ]
    rule = {
        "transform": [{"filter": "isValid(datum.low)"}],
        "mark": {"type": "rule", "opacity": 0.5},
        "encoding": {"y": y("low", format=".2f"), "y2": {"field": "high"}},
    }
    point = {"mark": {"type": "point", "filled": True, "size": 60, "opacity": 0.9},
             "encoding": {"tooltip": tooltip}}  # fmt: skip
    return Chart(
        key=key,
        group="options",
        title=name,
        note="logarithmic" if log else "",
        data="options",
        spec={
            "transform": [{"filter": {"field": "option", "equal": name}}],
            "encoding": {"x": x, "y": up, "color": HUE},
            "layer": [rule, point] if having(rows, "low") else [point],
        },
        height=150,
    )


def parallel(paths: Sequence[Row]) -> Chart:
    """Parallel coordinates, lying: every option is a line to the right, every run goes down."""
    names = list(dict.fromkeys(row["option"] for row in paths))
    along = {
        "field": "at",
        "type": "quantitative",
        "axis": None,
        "scale": {"domain": [-0.03, 1.03], "nice": False},
    }
    down = {
        "field": "option",
        "type": "ordinal",
        "sort": names,
        "title": None,
        "axis": {"grid": True, "domain": False, "ticks": False, "labelLimit": 140},
        "scale": {"type": "point", "padding": 0.5},
    }
    paint = {"field": "length", "type": "quantitative", "legend": None, "scale": {"range": "ramp"}}
    tooltip = [NAME, {"field": "option", "type": "nominal"},
               {"field": "label", "type": "nominal", "title": "value"},
               hint("length", "acceptance length", ".3f")]  # fmt: skip
    return Chart(
        key="paths",
        group="options",
        title="All options together",
        note="every line is a run, the stronger its colour the longer its acceptance; each option "
        "runs from its least value on the left to its greatest",
        data="paths",
        spec={
            "encoding": {"x": along, "y": down},
            "layer": [
                {
                    "mark": {"type": "line", "strokeWidth": 1.6, "opacity": 0.75},
                    "encoding": {
                        "detail": {"field": "run"},
                        "order": {"field": "axis_number"},
                        "color": paint,
                    },
                },
                {
                    "mark": {"type": "point", "filled": True, "size": 40, "opacity": 1},
                    "encoding": {"color": paint, "tooltip": tooltip},
                },
                # Twice: below the words their outline, since lines run through them.
                *(
                    {
                        "data": {"name": "ticks"},
                        "mark": {"type": "text", "dy": 15, "fontSize": 11, **style},
                        "encoding": {"text": {"field": "label"}},
                    }
                    for style in ({"style": "halo"}, {})
                ),
            ],
        },
        height=58 * len(names) + 20,
        wide=True,
    )  # fmt: skip


def drawn_options(standings: Sequence[Standing]) -> list[str]:
    """Options that differ between measured runs and may change what is learnt."""
    measured = [one for one in standings if one.acceptance is not None]
    return [name for name in differing_options(measured) if name not in IDLE][:MOST_OPTIONS]


def option_rows(standings: Sequence[Standing]) -> list[Row]:
    """A row per measured run and differing option."""
    rows = []
    for name in drawn_options(standings):
        for place, one in enumerate(standings):
            if one.acceptance is None or name not in one.options:
                continue
            value = one.options[name]
            row: Row = {"run": place, "name": one.name, "hue": hue_of(place)}
            row |= {"option": name, "value": number(value), "label": spoken(value)}
            row["length"] = digits(one.acceptance)
            if one.error is not None:
                row |= {"error": digits(one.error)}
                row |= {"low": digits(one.acceptance - one.error)}
                row |= {"high": digits(one.acceptance + one.error)}
            rows.append(row)
    return rows


def path_rows(standings: Sequence[Standing]) -> list[Row]:
    """Parallel coordinates: a row per measured run and axis, `at` from 0 to 1 along it.

    Empty where scatters say it all: fewer than two options, or than three runs.
    """
    names = drawn_options(standings)
    measured = [(place, one) for place, one in enumerate(standings) if one.acceptance is not None]
    if len(names) < 2 or len(measured) < 3:
        return []
    rows: list[Row] = []
    for axis, name in enumerate([*names, ACCEPTANCE]):
        values = {
            place: one.acceptance if name == ACCEPTANCE else one.options[name]
            for place, one in measured
            if name == ACCEPTANCE or name in one.options
        }
        at = positions(list(values.values()))
        for (place, value), where in zip(values.items(), at, strict=True):
            one = standings[place]
            label = f"{value:.3f}" if name == ACCEPTANCE else spoken(value)
            row: Row = {"run": place, "name": one.name, "hue": hue_of(place), "axis_number": axis}
            row |= {"option": name, "label": label, "at": round(where, 4)}
            rows.append({**row, "length": digits(one.acceptance or 0.0)})
    return rows


ACCEPTANCE = "acceptance length"


def positions(values: Sequence[Any]) -> list[float]:
    """Places from 0 to 1: by size where all are numbers, else evenly in alphabetical order."""
    sizes = [size for value in values for size in [number(value)] if size is not None]
    if len(sizes) == len(values):
        if logarithmic(sizes):
            sizes = [math.log(size) for size in sizes]
        least, most = min(sizes), max(sizes)
        return [(size - least) / ((most - least) or 1.0) for size in sizes]
    words = sorted({spoken(value) for value in values})
    return [words.index(spoken(value)) / max(len(words) - 1, 1) for value in values]


def logarithmic(sizes: Sequence[float]) -> bool:
    return min(sizes) > 0 and max(sizes) / min(sizes) >= LOG_RATIO


def tick_rows(paths: Sequence[Row]) -> list[Row]:
    """Values to write at the axes of parallel coordinates, those too close to others left out."""
    rows: list[Row] = []
    for option in dict.fromkeys(row["option"] for row in paths):
        own = sorted({(row["at"], row["label"]) for row in paths if row["option"] == option})
        # The ends first: what lies between gives way.
        ends = [own[0], own[-1]] if len(own) > 1 else own
        kept: list[tuple[float, str]] = []
        for at, label in [*ends, *own[1:-1]]:
            if all(abs(at - other) >= 0.13 for other, _ in kept):
                kept.append((at, label))
        axis = next(row["axis_number"] for row in paths if row["option"] == option)
        rows += [
            {"option": option, "axis_number": axis, "at": at, "label": label}
            for at, label in sorted(kept)
        ]
    return rows


def spoken(value: Any) -> str:
    """An option's value as people read it."""
    if value is None:
        return "default"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return " ".join(spoken(item) for item in value)
    return value if isinstance(value, str) else json.dumps(value)
