"""Read rows from JSONL, JSON, Parquet, a data set folder or the Hub.  Words in, dicts out.

JSONL is read line by line here and not by `datasets`, for two reasons: a broken line is reported
with its number, and absent keys stay absent (Arrow fills them with None, and chat templates that
ask `tool_calls is defined` then render another text).
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_cache.errors import DataError

Row = dict[str, Any]


def iter_rows(source: str, *, split: str) -> Iterator[Row]:
    """Rows of a data source in their own order."""
    path = Path(source)
    if path.suffix == ".jsonl":
        return _iter_jsonl(path)
    if path.suffix == ".json":
        return _iter_json(path)
    return _iter_dataset(source, split=split)


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise DataError(f"{path}: no such file; give --data a file that exists")
    with open(path, encoding="utf-8") as file:
        try:
            yield file
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 text ({error.reason}); re-encode it") from None


def _object(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{where}: found {type(value).__name__}, want a JSON object per row")
    return value


def _iter_jsonl(path: Path) -> Iterator[Row]:
    # Iterate the file, never splitlines(): chats may hold U+2028, which that would cut at.
    with _open(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _object(_parse(line, f"{path}, line {number}"), f"{path}, line {number}")


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: broken JSON at column {error.colno} ({error.msg}); "
            "repair or remove that line"
        ) from None
    except (ValueError, RecursionError) as error:  # digits or depth beyond what Python takes
        raise DataError(f"{where}: broken JSON ({error}); repair or remove that line") from None


def _iter_json(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        value = _parse(file.read(), str(path))
    if not isinstance(value, list):
        raise DataError(f"{path}: found {type(value).__name__}, want a JSON list of rows")
    for number, row in enumerate(value, start=1):
        yield _object(row, f"{path}, row {number}")


def _iter_dataset(source: str, *, split: str) -> Iterator[Row]:
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
    yield from (without_none(row) for row in _iterate(loaded))


def _iterate(loaded: Iterable[Any]) -> Iterator[Row]:
    for row in loaded:
        yield _object(row, "data set row")


def without_none(value: Any) -> Any:
    """Drop keys whose value is None, at every depth: Arrow put them there."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_none(item) for item in value]
    return value
