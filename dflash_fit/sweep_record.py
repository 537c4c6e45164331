"""What is written down of a sweep: sweep.json, from the trials' run folders.

A row of it is a trial; the best come first.  Trials that the sweep file does not name any more keep
the row that they had, marked `dropped`.
"""

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_cache import disk
from dflash_fit import checkpoint
from dflash_fit.runs import METRICS, SWEEP, add_up, read_lines

Row = dict[str, Any]
PATIENCE = 50  # times as long as reading a log took, it is not read again


@dataclass(frozen=True, kw_only=True)
class Story:
    """What a run folder tells of a trial."""

    saved: int = 0  # step of its newest checkpoint
    step: int = 0  # of its last line
    measured: dict[int, float] = field(default_factory=dict)  # step -> acceptance length
    errors: dict[int, float | None] = field(default_factory=dict)  # step -> its standard error
    hours: float = 0.0

    @property
    def best(self) -> int | None:
        """The first step with the greatest acceptance length."""
        return max(self.measured, key=lambda step: self.measured[step], default=None)


def read_story(run: Path, *, live: bool = False) -> Story:
    """Of a run that nobody trains, without what it will do again; of a `live` one, all of it."""
    whole = checkpoint.checkpoints(run)
    saved = checkpoint.step_of(whole[-1]) if whole else 0
    lines, _ = read_lines(run / METRICS)
    if not live:
        lines = [line for line in lines if whole and line["step"] <= saved]
    add_up(lines)
    evals = [line for line in lines if line["kind"] == "eval"]
    return Story(
        saved=saved,
        step=max((line["step"] for line in lines), default=saved),
        measured={line["step"]: line["acceptance_length"] for line in evals},
        errors={line["step"]: line.get("acceptance_error") for line in evals},
        hours=lines[-1]["hours"] if lines else 0.0,
    )


class LiveStories:
    """Stories of trials at work, read now and then."""

    def __init__(self) -> None:
        self.kept: dict[Path, tuple[float, Story]] = {}  # when to read it again

    def read(self, run: Path) -> Story:
        due, story = self.kept.get(run, (0.0, Story()))
        began = time.monotonic()
        if began >= due:
            story = read_story(run, live=True)
            took = time.monotonic() - began
            self.kept[run] = (began + PATIENCE * took, story)
        return story

    def forget(self, run: Path) -> None:
        self.kept.pop(run, None)


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Of states, as they are stored."""

    read: int = 0  # from the cache, for a trial: its share of what several took
    taken: int = 0  # what it would have read alone

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(read=self.read + other.read, taken=self.taken + other.taken)


def row_of(
    name: str,
    options: Mapping[str, Any],
    *,
    run: str,
    group: str | None,
    status: str,
    story: Story,
    size: Bytes,
) -> Row:
    best = story.best
    return {
        "name": name,
        "options": checkpoint.as_json(options),
        "run": run,
        "status": status,
        "acceptance_length": None if best is None else story.measured[best],
        "acceptance_error": None if best is None else story.errors[best],
        "acceptance_step": best,
        "steps": story.step,
        "hours": story.hours,
        "gb_read": size.read / 1e9,
        "bytes_read": size.read,
        "bytes_taken": size.taken,
        "group": group,
    }


def ranked(rows: Iterable[Row]) -> list[Row]:
    """The longest acceptance first; what was not measured last; equal ones as they come."""
    return sorted(rows, key=lambda row: -unless_none(row["acceptance_length"]))


def unless_none(value: float | None) -> float:
    return -math.inf if value is None else value


def totals(rows: Sequence[Row]) -> dict[str, Any]:
    """Bytes of all trials, and `ratio`: those read from the cache over those that one trial reads.

    Of every group of trials that see the same packs, the one trial is that which took most.
    """
    largest: dict[str | None, int] = {}
    for row in rows:
        largest[row["group"]] = max(largest.get(row["group"], 0), row["bytes_taken"])
    read, one = sum(row["bytes_read"] for row in rows), sum(largest.values())
    return {
        "bytes_read": read,
        "bytes_alone": sum(row["bytes_taken"] for row in rows),
        "ratio": read / one if one else None,
    }


# --- the file -------------------------------------------------------------------------------------


def read_rows(out: Path) -> dict[str, Row]:
    """Rows of an earlier sweep in this folder by name, as far as they can be read."""
    try:
        rows = json.loads((out / SWEEP).read_text(encoding="utf-8"))["trials"]
        return {row["name"]: row for row in rows if isinstance(row, dict)}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def bytes_before(row: Row | None) -> Bytes:
    try:
        return Bytes(read=int((row or {})["bytes_read"]), taken=int((row or {})["bytes_taken"]))
    except (KeyError, TypeError, ValueError):
        return Bytes()


def dropped(before: Mapping[str, Row], names: Iterable[str]) -> list[Row]:
    """Rows of trials that are no longer named."""
    known = set(names)
    keys = row_of("", {}, run="", group=None, status="", story=Story(), size=Bytes()).keys()
    return [
        {**dict.fromkeys(keys), **row, "dropped": True}
        for name, row in before.items()
        if name not in known
    ]


def write(out: Path, report: Mapping[str, Any]) -> None:
    disk.write_file(out / SWEEP, (json.dumps(dict(report), indent=1) + "\n").encode())
