"""What `dflash cache inspect` found: as text for a terminal, as values for JSON.  Reads nothing."""

import os
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from dflash_cache.pieces import visible

COLUMNS = 88  # of text, behind the positions
IDS_PER_LINE = 12

BOLD, DIM, PROMPT, SUPERVISED, SPECIAL = "1", "2", "2", "1;32", ";7"
LEGEND = (
    "┃ and green: supervised;  reversed: special tokens;  ⏎ newline  ⇥ tab  · blank at a line end"
)


@dataclass(frozen=True, kw_only=True)
class Token:
    """One token of a sample."""

    position: int
    id: int
    piece: str | None  # its text; empty where it only continues a character, None if unknown
    supervised: bool
    special: bool

    @property
    def shown(self) -> str:
        return f"⟨{self.id}⟩" if self.piece is None else visible(self.piece)


@dataclass(frozen=True, kw_only=True)
class ShownSample:
    """One sample to look at."""

    number: int  # of its row in the data, from 0
    bucket: int  # exclusive upper bound of the lengths
    tokens: list[Token]

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def supervised(self) -> int:
        return sum(token.supervised for token in self.tokens)

    @property
    def facts(self) -> str:
        return (
            f"{self.length:,} tokens, {self.supervised:,} supervised "
            f"({share(self.supervised, self.length)}), bucket below {self.bucket}"
        )

    def text_supervised(self) -> list[str]:
        """Every run of supervised tokens as text; none where the tokenizer is not known."""
        runs = groupby(self.tokens, key=lambda token: token.supervised)
        texts = ["".join(token.piece or "" for token in run) for wanted, run in runs if wanted]
        return [text for text in texts if text]

    def to_dict(self) -> dict[str, Any]:
        return {
            "sample": self.number,
            "length": self.length,
            "supervised": self.supervised,
            "bucket": self.bucket,
            "tokens": [asdict(token) for token in self.tokens],
            "text_supervised": self.text_supervised(),
        }


@dataclass(frozen=True, kw_only=True)
class SkippedRow:
    """A row that cannot be used."""

    number: int
    reason: str
    beginning: str


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Counts over all that was looked at, which is more than what is shown."""

    rows: int
    samples: int
    tokens: int
    supervised: int
    buckets: dict[str, int]
    skipped: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Samples and skipped rows to look at, and the counts around them."""

    source: str
    target: str
    looked_at: str  # which rows the totals are of
    totals: Totals
    samples: list[ShownSample]
    skipped_rows: list[SkippedRow]
    notes: list[str] = field(default_factory=list)
    html: Path | None = None  # where the page was written

    @property
    def shown(self) -> list[ShownSample | SkippedRow]:
        """Samples and skipped rows in the order of the data."""
        both: list[ShownSample | SkippedRow] = [*self.samples, *self.skipped_rows]
        return sorted(both, key=lambda one: one.number)

    def facts(self) -> dict[str, str]:
        """The counts, as people read them."""
        totals = self.totals
        supervised = f"{totals.supervised:,} ({share(totals.supervised, totals.tokens)})"
        return {
            "target": self.target,
            "looked at": self.looked_at,
            "rows": f"{totals.rows:,}",
            "samples": f"{totals.samples:,}",
            "tokens": f"{totals.tokens:,}",
            "supervised": supervised,
        }

    def to_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "target": self.target,
            "looked_at": self.looked_at,
            "rows": self.totals.rows,
            "totals": {
                "samples": self.totals.samples,
                "tokens": self.totals.tokens,
                "supervised_tokens": self.totals.supervised,
                "buckets": self.totals.buckets,
            },
            "skipped": self.totals.skipped,
            "samples": [sample.to_dict() for sample in self.samples],
            "skipped_rows": [
                {"row": row.number, "reason": row.reason, "beginning": row.beginning}
                for row in self.skipped_rows
            ],
            "notes": self.notes,
            "html": None if self.html is None else str(self.html),
        }

    def text(self) -> str:
        """For a terminal; without colours where NO_COLOR is set (https://no-color.org)."""
        return "\n".join(_lines(self))


def share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"


def bucket_name(bound: int | str) -> str:
    return f"below {int(bound)}"


def _lines(found: Inspection) -> Iterator[str]:
    yield paint(BOLD, visible(found.source))
    facts = {
        **found.facts(),
        "buckets": ", ".join(f"{bucket_name(b)}: {n:,}" for b, n in found.totals.buckets.items()),
        "skipped": f"{sum(found.totals.skipped.values()):,}",
    }
    yield from (f"{name:<10}  {visible(value)}" for name, value in facts.items())
    for reason, count in found.totals.skipped.items():
        yield f"{count:>10,}  {visible(reason)}"
    yield from (f"note: {visible(note)}" for note in found.notes)
    yield paint(DIM, LEGEND)
    for one in found.shown:
        yield ""
        yield from _sample_lines(one) if isinstance(one, ShownSample) else _row_lines(one)


def _row_lines(row: SkippedRow) -> Iterator[str]:
    yield paint(BOLD, f"row {row.number}: skipped, {visible(row.reason)}")
    yield paint(PROMPT, visible(row.beginning))


def _sample_lines(sample: ShownSample) -> Iterator[str]:
    yield paint(BOLD, f"sample {sample.number}: {sample.facts}")
    for supervised, run in groupby(sample.tokens, key=lambda token: token.supervised):
        yield from _run_lines(list(run), supervised=supervised)
    yield paint(DIM, "ids")
    for supervised, run in groupby(sample.tokens, key=lambda token: token.supervised):
        tokens = list(run)
        for start in range(0, len(tokens), IDS_PER_LINE):
            part = tokens[start : start + IDS_PER_LINE]
            ids = " ".join(str(token.id) for token in part)
            code = SUPERVISED if supervised else PROMPT
            yield _line(part[0].position, [(code, ids)], supervised=supervised)


def _run_lines(tokens: list[Token], *, supervised: bool) -> Iterator[str]:
    """Lines as the text has them, cut where they get too long; each says where it starts."""
    line: list[tuple[str, str]] = []
    first: int | None = None
    used = 0
    for token in tokens:
        code = (SUPERVISED if supervised else PROMPT) + (SPECIAL if token.special else "")
        for index, part in enumerate(token.shown.splitlines(keepends=True)):
            bare = part.removesuffix("\n")
            if line and used + _width(bare) > COLUMNS:
                yield _line(first, line, supervised=supervised)
                line, first, used = [], None, 0
            if not line:
                first = token.position if index == 0 else None
            line.append((code, bare))
            used += _width(bare)
            if bare != part:
                yield _line(first, line, supervised=supervised)
                line, first, used = [], None, 0
    if line:
        yield _line(first, line, supervised=supervised)


def _line(position: int | None, parts: Iterable[tuple[str, str]], *, supervised: bool) -> str:
    where = "" if position is None else str(position)
    bar = paint(SUPERVISED, "┃") if supervised else " "
    runs = groupby(parts, key=lambda part: part[0])
    text = "".join(paint(code, "".join(text for _, text in run)) for code, run in runs)
    return f"{paint(DIM, f'{where:>7}')} {bar} {text}"


def _width(text: str) -> int:
    """Columns of a text in a terminal."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(unicodedata.combining(char) > 0 for char in text)


def paint(code: str, text: str) -> str:
    """Text in a colour; whoever prints it where there are none strips that."""
    if os.environ.get("NO_COLOR") or not text:
        return text
    return f"\x1b[{code}m{text}\x1b[0m"
