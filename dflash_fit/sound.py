"""What a checkpoint says of itself, and whether it is true.

state.json holds where the run stands, the parts of the optimizer's state, and size and XXH3-64 of
every file beside it; it is written last, with a checksum over itself.  Checkpoints of before have
only the state: of those one can only say that all is there.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dflash_cache.errors import CacheError
from dflash_cache.files import file_entry
from dflash_cache.schema import opened_json, sealed_json
from dflash_fit.folder import CONFIG_FILE, WEIGHTS_FILE
from dflash_fit.parts import part_name

STATE_FILE = "state.json"
OWN = ("optimizer", "files", "xxh3")  # keys that are no part of the run's state
AT_ONCE = 8  # files read


class Flawed(Exception):
    """What is wrong with a checkpoint, in words."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """A checkpoint's state.json."""

    state: dict[str, Any]  # fields of a RunState
    parts: list[str]  # files of the optimizer's state; the first has the scalars
    files: dict[str, list[int]] | None  # size and XXH3-64; None: from before they were kept


def to_json(state: Mapping[str, Any], parts: Sequence[str], files: Mapping[str, Any]) -> bytes:
    """state.json of a checkpoint."""
    return sealed_json({**state, "optimizer": list(parts), "files": dict(files)})


def read_record(folder: Path) -> Record:
    """Raises `Flawed` where there is none that can be believed."""
    try:
        payload = (folder / STATE_FILE).read_bytes()
        body = json.loads(payload)
        if not isinstance(body, dict):
            raise ValueError
        if not any(name in body for name in OWN):
            return Record(state=body, parts=[part_name(0, 1)], files=None)
        body = opened_json(payload, where=str(folder), what="record of a checkpoint")
        parts, files = body.pop("optimizer"), body.pop("files")
    except OSError as error:
        raise Flawed(f"{STATE_FILE} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, RecursionError, CacheError):
        raise Flawed(f"{STATE_FILE} is damaged") from None
    return Record(state=body, parts=parts, files=files)


def glance(folder: Path) -> str | None:
    """What is wrong with a checkpoint, as far as sizes and its small files tell; None: nothing."""
    try:
        record = read_record(folder)
        if record.files is None:
            _refuse_unreadable(folder)
            return None
        _refuse_other_sizes(folder, record.files)
        _refuse_other_contents(folder, {n: e for n, e in record.files.items() if _is_small(n)})
    except Flawed as error:
        return str(error)
    return None


def flaw(folder: Path) -> str | None:
    """What is wrong with a checkpoint, every byte of it read; None: nothing."""
    found = glance(folder)
    if found:
        return found
    try:
        files = read_record(folder).files or {}
        _refuse_other_contents(folder, {n: e for n, e in files.items() if not _is_small(n)})
    except Flawed as error:
        return str(error)
    return None


def _is_small(name: str) -> bool:
    return name.endswith(".json")


def _refuse_unreadable(folder: Path) -> None:
    """Of a checkpoint without sizes: safetensors see from the header that a file was cut."""
    if not (folder / CONFIG_FILE).is_file():
        raise Flawed(f"{CONFIG_FILE} is missing")
    for name in (WEIGHTS_FILE, part_name(0, 1)):
        try:
            with safe_open(folder / name, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise Flawed(f"{name} cannot be read ({str(error)[:100]})") from None


def _refuse_other_sizes(folder: Path, files: Mapping[str, Sequence[int]]) -> None:
    for name, (wanted, _) in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise Flawed(f"{name} cannot be read ({error.strerror})") from None
        if size != wanted:
            raise Flawed(f"{name} has {size:,} of {wanted:,} bytes")


def _refuse_other_contents(folder: Path, files: Mapping[str, list[int]]) -> None:
    def differs(name: str) -> str | None:
        try:
            return None if file_entry(folder / name) == files[name] else name
        except OSError as error:
            raise Flawed(f"{name} cannot be read ({error.strerror})") from None

    with ThreadPoolExecutor(AT_ONCE) as threads:
        damaged = [name for name in threads.map(differs, files) if name]
    if damaged:
        raise Flawed(f"{', '.join(damaged)}: the checksum does not fit")
