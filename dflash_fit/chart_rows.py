"""What the charts of a report draw: rows of numbers, few enough for a page.

Every row names its run (its place among all, its name, its colour) and where it stands on each of
the axes that curves run along.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dflash_fit.runs import RunRecord, Standing, number

Row = dict[str, Any]

HUES = 6  # runs that have a colour of their own: the best ones
CLOSE = 8  # runs that can be looked at closely
# Of all runs together, and of one: every point that can be pointed at is an element of the page.
POINTS, LEAST_POINTS, MOST_POINTS = 1600, 60, 200
MOST_EVALS = 40  # whose slots are drawn


def rows_of(standings: Sequence[Standing]) -> dict[str, list[Row]]:
    """What the curves draw, by name of the data set; runs are known by their place."""
    runs = [(place, one.name, one.run) for place, one in enumerate(standings) if one.run]
    most = max(LEAST_POINTS, min(MOST_POINTS, POINTS // max(len(runs), 1)))
    found: dict[str, list[Row]] = {"train": [], "eval": [], "slots": [], "history": []}
    for place, name, run in runs:
        own = {"train": thinned(run.train, most=most), "eval": eval_rows(run)}
        own["slots"] = slot_rows(run.evals[-1:])
        if place < CLOSE:
            own["history"] = slot_rows(every_nth(run.evals, most=MOST_EVALS))
        label = {"run": place, "name": name, "hue": hue_of(place), "close": place < CLOSE}
        for data, rows in own.items():
            found[data] += [{**label, **row} for row in rows]
    return found


def hue_of(place: int) -> int:
    """The colour of the run at this place; the last is shared by all behind the best."""
    return min(place, HUES)


# What the curves of training show, by their name in the rows: the field of a line.
FIELDS = {
    "loss": "loss",
    "lr": "lr",
    "norm": "grad_norm",
    "tokens_per_s": "tokens_per_s",
    "anchors_per_s": "anchors_per_s",
    "needed": "gb_per_s_needed",
    "delivered": "gb_per_s_delivered",
    "waiting": "waiting",
    "memory": "memory_gb",
}


def thinned(lines: Sequence[Mapping[str, Any]], *, most: int) -> list[Row]:
    """At most so many rows: each the mean of neighbouring lines, at the last one's place."""
    size = math.ceil(len(lines) / most) if lines else 1
    return [_mean(lines[begin : begin + size]) for begin in range(0, len(lines), size)]


def _mean(lines: Sequence[Mapping[str, Any]]) -> Row:
    row: Row = place_of(lines[-1])
    for name, source in FIELDS.items():
        values = [
            value for line in lines for value in [number(line.get(source))] if value is not None
        ]
        if values:
            row[name] = digits(sum(values) / len(values))
    limits = [line["limit"] for line in lines if isinstance(line.get("limit"), str)]
    if limits:
        row["limit"] = LIMITS.get(max(limits, key=limits.count), "unknown")
    return row


LIMITS = {"step": "the step", "reader": "the reader", "handover": "host or copy"}


def place_of(line: Mapping[str, Any]) -> Row:
    """Where a line stands on each of the axes that curves run along."""
    return {
        "step": line["step"],
        "tokens": line["tokens_seen"],
        "hours": digits(line["hours"]),
    }


def eval_rows(run: RunRecord) -> list[Row]:
    """Acceptance length of every measurement, with its standard error where it has one."""
    best = run.best
    rows = []
    for line in run.evals:
        length, error = line["acceptance_length"], number(line.get("acceptance_error"))
        row = {**place_of(line), "length": digits(length), "best": line is best}
        if (texts := number(line.get("documents"))) is not None:
            row["texts"] = texts
        if error is not None:
            row |= {"error": digits(error), "low": digits(length - error)}
            row |= {"high": digits(length + error)}
        rows.append(row)
    return rows


def slot_rows(lines: Iterable[Mapping[str, Any]]) -> list[Row]:
    """A row per measurement and slot: accepted as far as it, and right by itself."""
    rows = []
    for line in lines:
        accepted, right = numbers(line.get("per_position")), numbers(line.get("slot_accuracy"))
        for k in range(max(len(accepted), len(right))):
            row = {**place_of(line), "slot": k + 1}
            if k < len(accepted):
                row["accepted"] = digits(accepted[k])
            if k < len(right):
                row["right"] = digits(right[k])
            rows.append(row)
    return rows


def every_nth(lines: Sequence[Mapping[str, Any]], *, most: int) -> list[Mapping[str, Any]]:
    """At most so many of the lines, evenly spread; the last one is among them."""
    if len(lines) <= most:
        return list(lines)
    return [lines[round(i * (len(lines) - 1) / (most - 1))] for i in range(most)]


def having(rows: Iterable[Row], field: str) -> list[Row]:
    """Those of the rows that have a field."""
    return [row for row in rows if field in row]


def numbers(value: object) -> list[float]:
    """A list of numbers; empty where it is anything else."""
    if not isinstance(value, list):
        return []
    found = [number(item) for item in value]
    return [item for item in found if item is not None] if None not in found else []


def digits(value: float) -> float:
    """Six digits are more than a chart shows, and half the bytes."""
    return float(f"{value:.6g}")
