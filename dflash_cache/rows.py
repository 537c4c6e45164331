"""Read rows from JSONL, JSON, Parquet, a data set folder or the Hub.  Words in, dicts out.

JSON is read here and not by `datasets`, for two reasons: a broken row is reported with its number,
and absent keys stay absent (Arrow fills them with None, and chat templates that ask `tool_calls
is defined` then render another text).  No file is held in memory: only the row that is being read.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from dflash_cache.errors import DataError

Row = dict[str, Any]

BOM = b"\xef\xbb\xbf"
PIECE = 1 << 20  # characters of a JSON list that are read at once
# An error this near to the end of what was read may be a word that goes on: -Infinity, \u20ac.
WORD = 16


def iter_rows(source: str, *, split: str) -> Iterator[Row]:
    """Rows of a data source in their own order."""
    path = Path(source)
    if path.suffix == ".jsonl":
        return _iter_jsonl(path)
    if path.suffix == ".json":
        return _iter_json(path)
    return _iter_dataset(source, split=split)


@contextmanager
def _open(path: Path, **how: Any) -> Iterator[IO[Any]]:
    if not path.is_file():
        raise DataError(f"{path}: no such file; give --data a file that exists")
    with open(path, **how) as file:
        yield file


def _object(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{where}: found {type(value).__name__}, want a JSON object per row")
    return value


# --- one object per line ------------------------------------------------------------------------


def _iter_jsonl(path: Path) -> Iterator[Row]:
    # Bytes end at \n alone: chats may hold U+2028, which splitlines() would cut at.
    with _open(path, mode="rb") as lines:
        for number, line in enumerate(lines, start=1):
            content = line.removeprefix(BOM) if number == 1 else line
            if not content.isspace() and content:
                yield _object(_parse(content, path, number), f"{path}, line {number}")


def _parse(line: bytes, path: Path, number: int) -> Any:
    where = f"{path}, line {number}"
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error, f" in line {number}") from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: broken JSON at column {error.colno} ({error.msg}); "
            "repair or remove that line"
        ) from None
    except (ValueError, RecursionError) as error:  # digits or depth beyond what Python takes
        raise DataError(f"{where}: broken JSON ({error}); repair or remove that line") from None


def _not_utf8(path: Path, error: UnicodeDecodeError, where: str) -> DataError:
    return DataError(f"{path}: not UTF-8 text{where} ({error.reason}); re-encode it")


# --- a list of objects --------------------------------------------------------------------------


def _iter_json(path: Path) -> Iterator[Row]:
    with _open(path, encoding="utf-8-sig", newline="") as file:
        text = _ListText(path, file)
        try:
            for number, row in enumerate(text.items(), start=1):
                yield _object(row, f"{path}, row {number}")
        except UnicodeDecodeError as error:
            raise _not_utf8(path, error, f" behind row {text.rows}") from None


class _ListText:
    """The text of a JSON list, of which as much is in memory as the row in hand needs."""

    def __init__(self, path: Path, file: IO[str]) -> None:
        self.path, self.file = path, file
        self.buffer, self.at = "", 0
        self.before = 0  # characters of the file that lie before the buffer
        self.rows = 0
        self.decoder = json.JSONDecoder()

    def items(self) -> Iterator[Any]:
        """Values of the list, one after the other."""
        if (first := self._peek()) != "[":
            self._refuse_no_list(first)
        self.at += 1
        if self._peek() == "]":
            self.at += 1
        else:
            while True:
                yield self._value()
                self.rows += 1
                if not (mark := self._peek()):
                    raise self._ends()
                if mark not in ",]":
                    raise self._broken("Expecting ',' delimiter", self.before + self.at)
                self.at += 1
                if mark == "]":
                    break
        if self._peek():
            raise self._broken("Extra data behind the list", self.before + self.at)

    def _peek(self) -> str:
        """The next character that is no white space; empty at the end of the file."""
        while True:
            rest = len(self.buffer)
            while self.at < rest and self.buffer[self.at] in " \t\r\n":
                self.at += 1
            if self.at < rest:
                return self.buffer[self.at]
            if not self._read_on():
                return ""

    def _read_on(self) -> bool:
        """Drop what is done and read at least as much again as is left; False at the end.

        Doubling keeps the time for one huge row linear, though each try starts at its beginning.
        """
        left = self.buffer[self.at :]
        piece = self.file.read(max(PIECE, len(left)))
        self.before += self.at
        self.buffer, self.at = left + piece, 0
        return bool(piece)

    def _value(self) -> Any:
        self._peek()
        while True:
            try:
                value, self.at = self.decoder.raw_decode(self.buffer, self.at)
                return value
            except json.JSONDecodeError as error:
                # The end of what was read looks like an error too; only then does reading on help.
                open_string = error.msg.startswith("Unterminated string")
                cut_off = open_string or error.pos >= len(self.buffer.rstrip())
                place = self.before + error.pos
                if not (open_string or error.pos >= len(self.buffer) - WORD):
                    raise self._broken(error.msg, place) from None
                if not self._read_on():
                    raise (self._ends() if cut_off else self._broken(error.msg, place)) from None
            except (ValueError, RecursionError) as error:  # beyond what Python takes
                raise self._broken(str(error), self.before + self.at) from None

    def _broken(self, message: str, place: int) -> DataError:
        return DataError(
            f"{self.path}, row {self.rows + 1}: broken JSON at character {place} of the file "
            f"({message}); repair or remove that row"
        )

    def _ends(self) -> DataError:
        return DataError(
            f"{self.path}, row {self.rows + 1}: broken JSON, the file ends inside the list; "
            f"{self.rows} rows before are whole. Fetch the file again, or keep the whole rows "
            "and close the list with ]"
        )

    def _refuse_no_list(self, first: str) -> None:
        kinds = {"{": "dict", '"': "str", "t": "bool", "f": "bool", "n": "NoneType", "": "nothing"}
        hint = "; if each line is an object, name the file .jsonl" if first == "{" else ""
        raise DataError(
            f"{self.path}: found {kinds.get(first, 'no list')}, want a JSON list of rows{hint}"
        )


# --- everything else ----------------------------------------------------------------------------


def _iter_dataset(source: str, *, split: str) -> Iterator[Row]:
    for number, row in enumerate(load_dataset(source, split=split), start=1):
        yield without_none(_object(row, f"{source}, row {number}"))


def load_dataset(source: str, *, split: str) -> Iterable[Any]:
    """A Parquet file, data set folder or Hub data set, mapped from the disk."""
    import datasets  # heavy; not needed for JSON files

    path = Path(source)
    try:
        if path.suffix == ".parquet":
            if not path.is_file():
                raise DataError(f"{path}: no such file; give --data a file that exists")
            loaded = datasets.load_dataset("parquet", data_files=source, split="train")
        elif (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(source)
            loaded = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            loaded = datasets.load_dataset(source, split=split)
    except DataError:
        raise
    except Exception as error:  # datasets raises many kinds; all mean "cannot be read"
        told = (str(error).splitlines() or ["no reason given"])[0][:200]
        raise DataError(
            f"{source}: cannot be read as a file, a data set folder or a Hub data set with "
            f"split {split!r} ({type(error).__name__}: {told})"
        ) from None
    found: Iterable[Any] = loaded
    return found


def without_none(value: Any) -> Any:
    """Drop keys whose value is None, at every depth: Arrow put them there."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_none(item) for item in value]
    return value
