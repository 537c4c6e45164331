"""What `dflash fit --sweep` shows to people: a row per trial, the best first."""

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_fit.sweep_plan import spelt

from .output import aligned

Row = Mapping[str, Any]


def sweep_table(report: Mapping[str, Any]) -> str:
    """The ranking, and what the trials read."""
    rows: Sequence[Row] = report["trials"]
    head = ["trial", "acceptance length", "at step", "steps", "hours", "GB read", "status"]
    lines = [head, *map(cells, rows)]
    options = [in_words(row["options"]) for row in rows]
    if any(words != row["name"] for words, row in zip(options, rows, strict=True)):
        lines = [[*line, words] for line, words in zip(lines, ["options", *options], strict=True)]
    return "\n\n".join([aligned(lines), reading(report)])


def cells(row: Row) -> list[str]:
    return [
        row["name"],
        acceptance(row),
        count(row["acceptance_step"]),
        count(row["steps"]),
        number(row["hours"], ".2f"),
        number(row["gb_read"], ".2f"),
        short(row["status"]) + (" (not in the file)" if row.get("dropped") else ""),
    ]


def in_words(options: Mapping[str, Any]) -> str:
    """As the name of a trial that was given none."""
    return ",".join(f"{name}={spelt(value)}" for name, value in (options or {}).items())


def acceptance(row: Row) -> str:
    length, error = row["acceptance_length"], row["acceptance_error"]
    return number(length, ".3f") + ("" if error is None else f" ± {error:.3f}")


def reading(report: Mapping[str, Any]) -> str:
    read, alone, ratio = report["bytes_read"], report["bytes_alone"], report["ratio"]
    if not read or ratio is None:
        return "read from the cache  nothing"
    rows = [row for row in report["trials"] if row["bytes_taken"] and not row.get("dropped")]
    groups = len({row["group"] for row in rows})
    several = f" of each of {groups} kinds of packs" if groups > 1 else ""
    return (
        f"read from the cache  {gigabytes(read)}: {ratio:.2f} times what one trial{several} reads; "
        f"each by itself they would have read {gigabytes(alone)}, {alone / read:.1f} times as much"
    )


def foresight(report: Mapping[str, Any]) -> str:
    """What `--dry-run` tells."""
    head = ["trial", "steps", "parameters", "memory", "read", "hours alone"]
    rows = [
        [row["name"], *["-"] * 4, short(f"refused: {row['error']}")]
        if "error" in row
        else [
            row["name"],
            count(row["steps"]),
            f"{row['parameters'] / 1e6:.1f} million",
            gigabytes(row["memory_bytes"]),
            gigabytes(row["read_bytes"]),
            number(row["hours"], ".2f"),
        ]
        for row in report["trials"]
    ]
    read, alone = report["read_bytes"], report["read_bytes_alone"]
    told = (
        f"on {', '.join(report['devices'])}; {gigabytes(read)} to read where all trials train side "
        f"by side, {gigabytes(alone)} each by itself"
    )
    return "\n\n".join([aligned([head, *rows]), *filter(None, [told, report["parting"]])])


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


def count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def short(text: str, most: int = 72) -> str:
    """The whole of it stands in sweep.json."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
