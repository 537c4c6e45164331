"""Run one function over all rows: here for few rows, by `datasets.map` on all cores for many.

A row goes through as one JSON string, since Arrow columns would give every row the keys of all.
What comes back is one flat array of ids and one of mask, so that a row costs no Python objects;
for many rows they are mapped from the disk.

Many rows are kept: in `dflash` below the cache folder of `datasets` (HF_DATASETS_CACHE), under a
hash of the data's bytes and of everything that turns them into tokens, not of the number of
processes.  The folder is filled aside and renamed, so that two builds at once do no harm, and what
nobody has used for `DAYS_KEPT` days goes when something new comes.
"""

import contextlib
import errno
import itertools
import os
import shutil
import sys
import threading
import time
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from tqdm import tqdm

from dflash_cache.disk import full_disk_is_told, new_folder
from dflash_cache.errors import DataError

FEW_ROWS = 2000  # fewer are done before other processes have started
FEW_CHARACTERS = 8_000_000
BATCH_ROWS = 100
BATCH_CHARACTERS = 1 << 24
LEAST_ROWS_OF_A_WORKER = 500
DAYS_KEPT = 14
NO_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
ENCODED = ("ids", "mask", "reason", "opening", "chat")


class Encoded(NamedTuple):
    """One row, encoded or skipped."""

    ids: bytes  # int32
    mask: bytes  # bool
    reason: str = ""  # why it was skipped; empty for a row that is used
    opening: str = ""
    chat: str = ""


Encode = Callable[[str], Encoded]


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedRows:
    """All rows in their order; those that were skipped have no tokens."""

    ids: np.ndarray  # int32 [all tokens]
    mask: np.ndarray  # bool [all tokens]
    ends: np.ndarray  # int64 [rows], where in the arrays each row ends
    facts: list[tuple[str, str, str]]  # by row: reason, opening, chat


def encode_rows(
    rows: Iterable[str], encode: Encode, *, workers: int | None, identity: Callable[[], str]
) -> EncodedRows:
    """`encode` of every row; `identity` hashes the data and all that `encode` depends on."""
    rows = iter(rows)
    few, characters = [], 0
    for row in rows:
        few.append(row)
        characters += len(row)
        if len(few) > FEW_ROWS or characters > FEW_CHARACTERS:
            return _encode_many(itertools.chain(few, rows), encode, workers, identity)
    return _encode_here(few, encode)


def _encode_here(rows: list[str], encode: Encode) -> EncodedRows:
    ids, mask = BytesIO(), BytesIO()
    with tqdm(rows, desc="tokenise", unit="row", disable=None) as progress:
        ends, facts = _gather(map(encode, progress), ids, mask)
    return EncodedRows(
        ids=np.frombuffer(ids.getbuffer(), np.int32),
        mask=np.frombuffer(mask.getbuffer(), np.bool_),
        ends=ends,
        facts=facts,
    )


def _gather(
    rows: Iterable[Encoded], ids: IO[bytes], mask: IO[bytes]
) -> tuple[np.ndarray, list[tuple[str, str, str]]]:
    """Write the tokens of all rows one behind the other."""
    ends, facts, end = array("q"), [], 0
    for row in rows:
        ids.write(row.ids)
        mask.write(row.mask)
        end += len(row.mask)
        ends.append(end)
        facts.append((sys.intern(row.reason), row.opening, row.chat))
    return np.frombuffer(ends, np.int64) if ends else np.zeros(0, np.int64), facts


# --- many rows ----------------------------------------------------------------------------------


def _encode_many(
    rows: Iterator[str], encode: Encode, workers: int | None, identity: Callable[[], str]
) -> EncodedRows:
    folder = cache_folder() / identity()
    if (kept := _read(folder)) is not None:
        with contextlib.suppress(OSError):  # somebody else's folder, or a disk to read only
            os.utime(folder)  # it was used
        return kept
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _drop_unused(folder.parent)
        with full_disk_is_told(
            folder.parent, "Nothing of the tokens is kept; HF_DATASETS_CACHE names another place."
        ):
            _fill(folder, rows, encode, workers)
    except OSError as error:
        if error.errno not in NO_PLACE:
            raise
        raise DataError(
            f"{folder.parent}: tokens cannot be kept there ({error.strerror}); set "
            "HF_DATASETS_CACHE to a folder that can be written"
        ) from None
    found = _read(folder)
    assert found is not None, folder
    told = f"tokens are kept in {folder} ({(found.ids.nbytes + found.mask.nbytes) / 1e6:.0f} MB)"
    tqdm.write(f"{told}; delete the folder to free them", file=sys.stderr)
    return found


def cache_folder() -> Path:
    """Where tokens are kept."""
    import datasets  # heavy, and not needed for few rows

    return Path(datasets.config.HF_DATASETS_CACHE) / "dflash"


def _drop_unused(parent: Path) -> None:
    oldest = time.time() - DAYS_KEPT * 24 * 3600
    for folder in parent.iterdir():
        # Another build may be doing the same.
        with contextlib.suppress(FileNotFoundError):
            if folder.stat().st_mtime < oldest:
                shutil.rmtree(folder, ignore_errors=True)


def _fill(folder: Path, rows: Iterator[str], encode: Encode, workers: int | None) -> None:
    try:
        with new_folder(folder) as partial_folder:
            work = partial_folder / "work"
            work.mkdir()
            encoded = _map(work, rows, encode, workers)
            with (
                open(partial_folder / "ids.bin", "wb") as ids,
                open(partial_folder / "mask.bin", "wb") as mask,
            ):
                ends, facts = _gather(encoded, ids, mask)
            np.save(partial_folder / "ends.npy", ends)
            _write_facts(partial_folder / "facts.parquet", facts)
            shutil.rmtree(work)
            if _read(folder) is not None:  # another build was quicker, and may be reading it
                raise FileExistsError(errno.EEXIST, "kept already", str(folder))
    except OSError:
        if _read(folder) is None:
            raise


def _write_facts(path: Path, facts: list[tuple[str, str, str]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = zip(*facts, strict=True)
    names = ("reason", "opening", "chat")
    pq.write_table(pa.table(dict(zip(names, map(list, columns), strict=True))), path)


def _read(folder: Path) -> EncodedRows | None:
    """What is kept in a folder; None unless all of it is there."""
    import pyarrow.parquet as pq

    if not folder.is_dir():
        return None
    try:
        ends = np.load(folder / "ends.npy")
        columns = pq.read_table(folder / "facts.parquet").to_pydict()
        tokens = int(ends[-1])
        ids = _mapped(folder / "ids.bin", np.dtype(np.int32), tokens)
        mask = _mapped(folder / "mask.bin", np.dtype(np.bool_), tokens)
    except (
        OSError,
        EOFError,
        ValueError,
        LookupError,
    ):  # half deleted, or the machine lost its power
        return None
    reasons = map(sys.intern, columns["reason"])
    facts = list(zip(reasons, columns["opening"], columns["chat"], strict=True))
    return EncodedRows(ids=ids, mask=mask, ends=ends, facts=facts)


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> np.ndarray:
    if path.stat().st_size != count * dtype.itemsize:
        raise ValueError(f"{path}: not {count} tokens")
    # Writable for torch, which warns of arrays that are not; the file never changes.
    return np.asarray(np.memmap(path, dtype, mode="c")) if count else np.zeros(0, dtype)


def _map(work: Path, rows: Iterator[str], encode: Encode, workers: int | None) -> Iterator[Encoded]:
    """`encode` by `datasets.map`: everything it writes lies in `work`."""
    import datasets

    count = _write_arrow(work / "rows.arrow", rows)
    data = datasets.Dataset.from_file(str(work / "rows.arrow"))
    most = max(1, count // LEAST_ROWS_OF_A_WORKER)
    processes = min(workers or _cores(), most)
    done = work / "done"
    done.touch()
    features = {
        name: datasets.Value("binary" if name in ("ids", "mask") else "string") for name in ENCODED
    }
    with _fork_in_peace(), _progress(done, total=count):
        try:
            found = data.map(
                partial(_encode_batch, encode=encode, done=done),
                batched=True,
                batch_size=BATCH_ROWS,
                writer_batch_size=BATCH_ROWS,
                remove_columns=["row"],
                features=datasets.Features(features),
                num_proc=processes if processes > 1 else None,
                load_from_cache_file=False,
                cache_file_name=str(work / "tokens.arrow"),
                new_fingerprint="tokens",  # not looked for: the folder has the whole identity
            )
        except RuntimeError as error:
            if "subprocesses has abruptly died" not in str(error):
                raise
            raise DataError(
                "a process that tokenises was killed, as a machine does that runs out of memory; "
                f"give --data-workers less than {processes}, or shorten the longest rows"
            ) from None
    for table in found.with_format("arrow").iter(batch_size=BATCH_ROWS):
        columns = (table[name].to_pylist() for name in ENCODED)
        yield from map(Encoded._make, zip(*columns, strict=True))


def _encode_batch(batch: dict[str, list[str]], *, encode: Encode, done: Path) -> dict[str, Any]:
    encoded = [encode(row) for row in batch["row"]]
    # One byte a row: several processes append, and the length is all that counts.
    with open(done, "ab", buffering=0) as file:
        file.write(bytes(len(encoded)))
    return dict(zip(ENCODED, map(list, zip(*encoded, strict=True)), strict=True))


def _write_arrow(path: Path, rows: Iterator[str]) -> int:
    """One column of strings, in batches that are small even where rows are not."""
    import pyarrow as pa

    schema = pa.schema([("row", pa.large_string())])
    count = 0
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for batch in _batches(rows):
            stream.write_batch(pa.record_batch([pa.array(batch, pa.large_string())], schema=schema))
            count += len(batch)
    return count


def _batches(rows: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for row in rows:
        batch.append(row)
        characters += len(row)
        if len(batch) == BATCH_ROWS or characters > BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def _fork_in_peace() -> Iterator[None]:
    """`datasets.map` forks, and nothing of that is for the user to see."""
    import datasets

    environ, before = os.environ, os.environ.get("TOKENIZERS_PARALLELISM")
    shown = not datasets.are_progress_bars_disabled()
    if shown:
        datasets.disable_progress_bars()
    # Without it a forked tokenizer that has used threads warns on stderr.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of forks beside threads; the children only tokenise.
            warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
            yield
    finally:
        os.environ = environ  # `map` leaves a copy in its place  # noqa: B003
        if before is None:
            os.environ.pop("TOKENIZERS_PARALLELISM", None)
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
        if shown:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def _progress(done: Path, *, total: int) -> Iterator[None]:
    """A bar that follows the length of `done`; that of `datasets` is off, as all its output."""
    stop = threading.Event()

    def follow() -> None:
        with tqdm(total=total, desc="tokenise", unit="row", disable=None) as bar:
            while not stop.wait(0.5):
                bar.update(done.stat().st_size - bar.n)
            bar.update(done.stat().st_size - bar.n)

    watcher = threading.Thread(target=follow, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
