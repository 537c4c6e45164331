"""Rates from what the processes of `bench_ranks` noted: plain numbers.

A phase is a cache that workers built: its tokens and, for each worker, when it began and ended,
the bytes that it wrote, and a series of times and the tokens done since the one before.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

# --- workers --------------------------------------------------------------------------------------


def rate(phase: dict[str, Any]) -> float:
    """Tokens a second of all workers, each over the time in which it had units."""
    return sum(
        sum(tokens for _, tokens in own["series"]) / (own["ended"] - own["began"])
        for own in phase["workers"]
    )


def rate_to_the_end(phase: dict[str, Any]) -> float:
    """Tokens a second until the last worker was done."""
    workers = phase["workers"]
    span = max(own["ended"] for own in workers) - min(own["began"] for own in workers)
    return float(phase["tokens"] / span)


def gb_per_s(phase: dict[str, Any]) -> float:
    """Written by all workers, each over the time in which it had units."""
    return sum(own["bytes"] / 1e9 / (own["ended"] - own["began"]) for own in phase["workers"])


def tokens_between(phase: dict[str, Any], begin: float, end: float) -> float:
    """Tokens done in an interval, as if those between two signs of progress came evenly."""
    return sum(done_by(own, end) - done_by(own, begin) for own in phase["workers"])


def done_by(own: dict[str, Any], moment: float) -> float:
    """Tokens that a worker had done."""
    done, whole = {own["began"]: 0}, 0
    for at, tokens in own["series"]:
        whole += tokens
        done[at] = whole
    return float(np.interp(moment, list(done), list(done.values())))


# --- runs -----------------------------------------------------------------------------------------


def train_lines(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    if not path.is_file():
        return []
    # The last line may be half written.
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
    return [line for line in map(json.loads, whole) if line["kind"] == "train"]


def speed(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the lines of a run, by their time."""
    seconds = [line["tokens"] / line["tokens_per_s"] for line in lines]
    whole = sum(seconds)

    def mean(key: str) -> float:
        values = [line[key] or 0.0 for line in lines]
        return sum(v * s for v, s in zip(values, seconds, strict=True)) / whole

    return {
        "tokens_per_s": sum(line["tokens"] for line in lines) / whole,
        "anchors_per_s": sum(line["anchors"] for line in lines) / whole,
        "waiting": mean("waiting"),
        "gb_per_s_needed": mean("gb_per_s_needed"),
        "lines": len(lines),
        "steps": lines[-1]["step"],
        "seconds": whole,
        "recompiles": lines[-1].get("recompiles", 0),
    }
