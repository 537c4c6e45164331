"""Bytes of a cache, from a folder or from a URL.  Knows paths and ranges, nothing of caches.

A folder is read by `preadv`, past the page cache where that is asked for: a data set of many
terabytes never fits there, and direct reads are faster and take a tenth of the CPU.
"""

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dflash_cache.checksums import Hasher
from dflash_cache.errors import CacheError
from dflash_cache.layout import ALIGNMENT, round_up

O_DIRECT = getattr(os, "O_DIRECT", 0)
MOST_BUFFERS = 1024  # that one preadv takes (IOV_MAX)
MOST_BYTES = 1 << 30
HUGE_PAGE = 1 << 21
REMOTE_BYTES = 64 << 20  # asked for at once


def aligned_buffer(size: int) -> np.ndarray:
    """Zeroed page-aligned bytes; freed with the last array that looks at them."""
    # Private: shared anonymous memory is a file to the kernel and gets no huge pages, which save
    # 500 of 512 page faults and half the CPU of a direct read.
    buffer = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and size >= HUGE_PAGE:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(buffer, np.uint8)[:size]


def file_entry(path: Path) -> list[int]:
    """Size and XXH3-64 of a local file, as records and manifest keep them."""
    size, hasher = 0, Hasher()
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            size += len(block)
            hasher.update(block)
    return [size, hasher.intdigest()]


def is_url(root: str | Path) -> bool:
    return "://" in str(root)


def repair_hint(where: str) -> str:
    """What to do about damage, as the end of a message."""
    if is_url(where):
        return "Repair the cache where it was built, and copy it again"
    return f"`dflash cache repair {where}` extracts again what is lost"


class Files(Protocol):
    """Where the files of a cache lie."""

    where: str

    @property
    def alignment(self) -> int:
        """What offsets, lengths and addresses of `fill` are multiples of; 1: anything goes."""

    def size(self, name: str) -> int | None:
        """Bytes of a file, None where there is none."""

    def read(self, name: str) -> bytes:
        """A whole file; FileNotFoundError where there is none."""

    def fill(self, name: str, offset: int, buffers: Sequence[np.ndarray]) -> int:
        """Read from `offset` into buffers, one behind the other; returns the bytes read.

        Fewer than asked for come only at the end of the file.
        """


def open_files(root: str | Path, *, direct: bool) -> Files:
    """Files of a cache folder, or of a URL that obstore knows."""
    return RemoteFiles(str(root)) if is_url(root) else LocalFiles(Path(root), direct=direct)


class LocalFiles:
    """Files of a folder.  `direct` reads past the page cache; `read` never does."""

    def __init__(self, root: Path, *, direct: bool) -> None:
        self.root, self.where = root, str(root)
        self.flags = os.O_RDONLY | (O_DIRECT if direct else 0)

    @property
    def alignment(self) -> int:
        return ALIGNMENT if self.flags & O_DIRECT else 1

    def size(self, name: str) -> int | None:
        try:
            with self._told(name):
                found = os.stat(self.root / name)
        except FileNotFoundError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def read(self, name: str) -> bytes:
        with self._told(name):
            return (self.root / name).read_bytes()

    def fill(self, name: str, offset: int, buffers: Sequence[np.ndarray]) -> int:
        with self._told(name):
            file = self._open(name)
            try:
                return sum(
                    _preadv(file, part, offset + before, self.alignment)
                    for before, part in _in_parts(buffers)
                )
            finally:
                os.close(file)

    @contextlib.contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """A file that is not there is for the caller; what a disk cannot read is one message."""
        try:
            yield
        except NotADirectoryError as error:
            raise FileNotFoundError(error.errno, error.strerror) from None
        except FileNotFoundError:
            raise
        except OSError as error:
            raise CacheError(
                f"{self.where}/{name}: cannot be read ({error.strerror}); look after the disk or "
                f"its rights. {repair_hint(self.where)}"
            ) from None

    def _open(self, name: str) -> int:
        path = f"{self.root}/{name}"
        try:
            return os.open(path, self.flags)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.flags & O_DIRECT:
                raise
        self.flags &= ~O_DIRECT  # this file system has no direct reads
        return os.open(path, self.flags)


def _in_parts(buffers: Sequence[np.ndarray]) -> list[tuple[int, list[np.ndarray]]]:
    """Runs of buffers that one call takes, each with the bytes before it."""
    runs: list[tuple[int, list[np.ndarray]]] = []
    before = size = 0
    for buffer in buffers:
        if not runs or len(runs[-1][1]) == MOST_BUFFERS or size + len(buffer) > MOST_BYTES:
            runs.append((before, []))
            size = 0
        runs[-1][1].append(buffer)
        before, size = before + len(buffer), size + len(buffer)
    return runs


def _preadv(file: int, buffers: list[np.ndarray], offset: int, alignment: int) -> int:
    """One call, and more where it comes back early; stops at the end of the file."""
    done, wanted = 0, sum(map(len, buffers))
    rest = buffers
    while done < wanted:
        got = os.preadv(file, rest, offset + done)  # type: ignore[arg-type]
        done += got
        if got == 0 or done % alignment:  # only the end of a file is not aligned
            break
        if done < wanted:
            rest = _behind(buffers, done)
    return done


def _behind(buffers: Sequence[np.ndarray], done: int) -> list[np.ndarray]:
    """What of the buffers is still to be filled."""
    rest = []
    for buffer in buffers:
        if done < len(buffer):
            rest.append(buffer[done:])
        done = max(0, done - len(buffer))
    return rest


class RemoteFiles:
    """Files below a URL (s3://, gs://, az://, http://, https:// ...), read by ranges.

    Needs the extra `remote`.  Credentials and endpoints come from the environment, as obstore
    documents for each kind of store.
    """

    def __init__(self, url: str) -> None:
        try:
            import obstore
        except ImportError:
            raise CacheError(
                f"{url}: reading from a URL needs obstore; "
                "install it with `pip install 'dflash-toolkit[remote]'`"
            ) from None
        self.where = url.rstrip("/")
        self.obstore: Any = obstore
        options: Any = {"client_options": {"allow_http": True}} if url.startswith("http://") else {}
        try:
            self.store: Any = obstore.store.from_url(self.where, **options)
        except Exception as error:  # obstore has kinds of its own; all mean "no such store"
            raise CacheError(f"{url}: cannot be opened ({_first_line(error)})") from None

    @property
    def alignment(self) -> int:
        return 1

    def size(self, name: str) -> int | None:
        try:
            return int(self._ask(self.obstore.head, name)["size"])
        except FileNotFoundError:
            return None

    def read(self, name: str) -> bytes:
        size = self.size(name)
        if size is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        # Frozen weights are gigabytes: one answer of that size would run into the time limit.
        ranges = [(at, min(REMOTE_BYTES, size - at)) for at in range(0, size, REMOTE_BYTES)]
        return b"".join(
            bytes(self._ask(self.obstore.get_range, name, start=at, length=length))
            for at, length in ranges
        )

    def fill(self, name: str, offset: int, buffers: Sequence[np.ndarray]) -> int:
        wanted = sum(map(len, buffers))
        found = self._ask(self.obstore.get_range, name, start=offset, length=wanted)
        payload, done = np.frombuffer(found, np.uint8), 0
        for buffer in buffers:
            piece = payload[done : done + len(buffer)]
            buffer[: len(piece)] = piece
            done += len(piece)
        return done

    def _ask(self, call: Any, name: str, **options: int) -> Any:
        try:
            return call(self.store, name, **options)
        except FileNotFoundError:
            raise
        except Exception as error:  # of many kinds; all mean that the store cannot be read
            told = _first_line(error)
            raise CacheError(f"{self.where}/{name}: cannot be read ({told})") from None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def aligned_range(offset: int, size: int, alignment: int) -> tuple[int, int]:
    """The smallest aligned range around a range: its offset and size."""
    begin = offset // alignment * alignment
    return begin, round_up(offset + size, alignment) - begin
