"""What `dflash eval` with prompts shows to people: a row per data set, its parts indented."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .output import aligned

Figures = Mapping[str, Any]
Column = tuple[str, Callable[[Figures], str]]


def decoding_tables(report: Figures) -> str:
    """The report of a decoding evaluation as text."""
    rows = list(named_rows(report))
    slots = range(1, report["block_size"])
    tables = [
        table("", LENGTHS, rows),
        table("tokens per second", SPEEDS, rows),
        table("answers that do not loop", STRAIGHT, rows),
        table("accepted at slot", [(str(k), at_slot(k)) for k in slots], rows),
    ]
    return "\n\n".join([heading(report), *tables, verdict(report)])


def named_rows(report: Figures) -> Iterator[tuple[str, Figures]]:
    """Every data set, its parts, and all of them together where there are several."""
    datasets = report["datasets"]
    for name, figures in datasets.items():
        yield name, figures
        for part, own in figures.get("parts", {}).items():
            yield f"  {part}", own
    if len(datasets) > 1:
        yield "all", report


def table(name: str, columns: Sequence[Column], rows: Sequence[tuple[str, Figures]]) -> str:
    head = [name, *(title for title, _ in columns)]
    return aligned([head, *([label, *(say(own) for _, say in columns)] for label, own in rows)])


def heading(report: Figures) -> str:
    how = "greedy" if report["temperature"] == 0 else f"temperature {report['temperature']:g}"
    return aligned(
        [
            ["drafter", f"{report['drafter']}, blocks of {report['block_size']}"],
            ["target", f"{report['target']}, {report['dtype']} on {report['device']}"],
            [
                "answers",
                f"{how}, at most {report['max_new_tokens']} tokens, {report['batch_size']} at a "
                f"time, thinking {report['thinking']}",
            ],
        ],
        right=False,
    )


def verdict(report: Figures) -> str:
    """What has to be true of every lossless decoding, and what the cache foretells of it."""
    return aligned(
        [
            ["identical to plain greedy decoding", identity(report)],
            ["acceptance length, measured offline", number(report["offline_acceptance_length"])],
        ],
        right=False,
    )


def identity(report: Figures) -> str:
    """A gap of a few roundings of the precision is a tie; a wide one is a mistake."""
    if report["identical_to_greedy"] is None:
        return "not to be told of answers that are drawn"
    if report["identical_to_greedy"]:
        return "yes"
    return (
        f"NO, {report['answers_differing']} of {report['answers']} answers differ; where they "
        f"part, the target's two logits are at most {report['answers_differing_gap']:.2g} apart"
    )


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def acceptance(figures: Figures) -> str:
    error = figures["acceptance_length_error"]
    return number(figures["acceptance_length"]) + ("" if error is None else f" ± {error:.3f}")


def at_slot(slot: int) -> Callable[[Figures], str]:
    def say(figures: Figures) -> str:
        rates = figures["per_position"]
        return share(rates[slot - 1]) if rates else "-"

    return say


LENGTHS: Sequence[Column] = (
    ("prompts", lambda own: str(own["prompts"])),
    ("answers", lambda own: str(own["answers"])),
    ("tokens", lambda own: f"{own['answer_tokens']:,}"),
    ("acceptance length", acceptance),
    ("macro", lambda own: number(own["acceptance_length_macro"])),
    ("full blocks", lambda own: share(own["full_blocks"])),
    ("prompt lookup", lambda own: number(own["prompt_lookup"])),
)
SPEEDS: Sequence[Column] = (
    ("plain decoding", lambda own: f"{own['plain_tokens_per_second']:.1f}"),
    ("with drafter", lambda own: f"{own['tokens_per_second']:.1f}"),
    ("speedup", lambda own: f"{own['speedup']:.2f}"),
)
STRAIGHT: Sequence[Column] = (
    ("looping", lambda own: share(own["looping"])),
    ("acceptance length", lambda own: number(own["acceptance_length_not_looping"])),
    ("prompt lookup", lambda own: number(own["prompt_lookup_not_looping"])),
)
