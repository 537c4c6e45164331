"""The files of `dflash cache answers`, and how it goes on after a stop.  No network, no chats.

    answers.jsonl                 one line per row that has answers, in row order when all are there
    answers.jsonl.dropped.jsonl   row and reason of rows that are not to be asked again
    answers.jsonl.settings.json   what decides the answers; also the lock of the writing process

A row is in one of the two JSONL files or has yet to be asked.  A line is appended whole, after its
row is finished; what a killed process left of a torn last line is cut off.
"""

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from dflash_cache.disk import create_file, existing_folder, fsync_path, full_disk_is_told
from dflash_cache.errors import CacheBusyError, DataError
from dflash_cache.lock import writable

Record = dict[str, Any]
Settings = dict[str, Any]
INFORMATION = ("data",)  # the file may have moved; its content is in data_sha256


class RowFile:
    """JSON lines, each with the number of its row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.places: dict[int, int] = {}  # row -> where its line starts
        self.size = 0  # of its whole lines
        self._file: BinaryIO | None = None

    def scan(self) -> Iterator[Record]:
        """The whole lines that are there, noting where each is."""
        if not self.path.exists():
            return
        with open(self.path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.endswith(b"\n"):
                    record = self._parse(line, number)
                    self._note(record, len(line))
                    yield record

    def _parse(self, line: bytes, number: int) -> Record:
        try:
            record = json.loads(line)
            if type(record["row"]) is int:
                return dict(record)
        except (ValueError, LookupError, TypeError):
            pass
        raise DataError(
            f"{self.path}, line {number}: not a line that `dflash cache answers` wrote; remove "
            "that line, and its row is asked again"
        )

    def _note(self, record: Record, size: int) -> None:
        self.places[record["row"]] = self.size
        self.size += size

    def append(self, record: Record) -> None:
        if self._file is None:
            self._file = open(self.path, "ab")  # noqa: SIM115 (closed by close)
        line = json.dumps(record).encode() + b"\n"
        self._file.write(line)
        self._file.flush()  # to the kernel, which a killed process does not take along
        self._note(record, len(line))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def mend(self) -> None:
        """Cut off a torn last line."""
        if self.path.exists() and self.path.stat().st_size > self.size:
            os.truncate(self.path, self.size)

    def sort(self) -> None:
        """Put the lines in row order: aside, then rename."""
        if not self.places or list(self.places) == sorted(self.places):
            return
        aside = self.path.with_name(f".{self.path.name}.partial")  # ours alone: we hold the lock
        with open(self.path, "rb") as lines, open(aside, "wb") as file:
            for row in sorted(self.places):
                lines.seek(self.places[row])
                file.write(lines.readline())
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, self.path)
        fsync_path(self.path.parent)


class AnswerFile:
    """Answered and dropped rows of one run or several, and their counts."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._written = RowFile(out)
        self._dropped = RowFile(beside(out, ".dropped.jsonl"))
        self.reasons: Counter[str] = Counter()  # why rows were dropped
        self.ended: Counter[str] = Counter()  # why rows were dropped or shortened
        self.tokens = 0
        for record in self._written.scan():
            self._count_written(record)
        for record in self._dropped.scan():
            self._count_dropped(record)

    @property
    def written(self) -> int:
        return len(self._written.places)

    @property
    def shortened(self) -> int:
        return self.ended.total() - self.reasons.total()

    @property
    def settled(self) -> int:
        """Rows that are not to be asked again."""
        return self.written + len(self._dropped.places)

    def __contains__(self, row: int) -> bool:
        return row in self._written.places or row in self._dropped.places

    def write(self, record: Record) -> None:
        self._written.append(record)
        self._count_written(record)

    def drop(self, row: int, reason: str) -> None:
        record = {"row": row, "reason": reason}
        self._dropped.append(record)
        self._count_dropped(record)

    def close(self) -> None:
        self._written.close()
        self._dropped.close()

    def mend(self) -> None:
        self._written.mend()
        self._dropped.mend()

    def sort(self) -> None:
        self.close()
        self._written.sort()
        self._dropped.sort()

    def _count_written(self, record: Record) -> None:
        self.tokens += record["completion_tokens"]
        if record.get("shortened"):
            self.ended[record["shortened"]] += 1

    def _count_dropped(self, record: Record) -> None:
        self.reasons[record["reason"]] += 1
        self.ended[record["reason"]] += 1


@contextmanager
def opened(out: Path, settings: Settings) -> Iterator[AnswerFile]:
    """Begin or go on, as the only process that does."""
    path = beside(out, ".settings.json")
    with full_disk_is_told(existing_folder(out.parent), "All finished rows are kept."):
        with writable(out.parent):
            _begin(path, out, settings)
        with _locked(path):
            refuse_other_settings(path, settings)
            file = AnswerFile(out)
            file.mend()
            try:
                yield file
            finally:
                file.close()


def _begin(path: Path, out: Path, settings: Settings) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        refuse_foreign(out)
        create_file(path, (json.dumps(settings, indent=2) + "\n").encode())


def is_complete(out: Path, rows: int) -> bool:
    """Whether every row is settled, so that nobody has to be asked."""
    return beside(out, ".settings.json").exists() and AnswerFile(out).settled == rows


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CacheBusyError(
                f"{path}: another `dflash cache answers` is writing here; wait until it ends, or "
                "stop it"
            ) from None
        yield


def refuse_foreign(out: Path) -> None:
    """Files without the settings of this command are somebody's, or of answers long removed."""
    for path in (out, beside(out, ".dropped.jsonl")):
        if path.exists():
            raise DataError(
                f"{path}: exists and was not begun by this command, which leaves "
                f"{beside(out, '.settings.json').name} beside it; remove it, or give --out a new "
                "name"
            )


def refuse_other_settings(path: Path, wanted: Settings) -> None:
    """Refuse to mix answers of two kinds in one file, by the first field that differs."""
    found = read_settings(path)
    for name, value in wanted.items():
        if name not in INFORMATION and found.get(name) != value:
            raise DataError(
                f"{path}: begun with {name} {found.get(name)!r}, this run has {name} {value!r}; "
                "give the same options and rows, or another --out"
            )


def read_settings(path: Path) -> Settings:
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise DataError(f"{path}: not the settings of `dflash cache answers`; give another --out")
    return found


def beside(out: Path, ending: str) -> Path:
    return out.with_name(out.name + ending)
