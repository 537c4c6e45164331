"""Write aside, make durable, then publish in one step.  Knows nothing of caches.

A crash at any point leaves the old state or the new one, never half of either.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

from dflash_cache.errors import CacheError, DiskFullError


def aside(path: Path) -> Path:
    """A fresh sibling name that nobody else will ever use."""
    return path.with_name(f".{path.name}.{uuid4().hex[:8]}.partial")


def fsync_path(path: Path) -> None:
    """Flush one file or one directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Flush every file below `folder`, then the directories bottom-up."""
    for directory, _, files in os.walk(folder, topdown=False):
        for name in files:
            fsync_path(Path(directory, name))
        fsync_path(Path(directory))


def write_durably(path: Path, payload: bytes) -> None:
    """Fill a file and flush it, under a name that nobody else knows."""
    with open(path, "wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


def write_file(path: Path, payload: bytes) -> None:
    """Replace `path` by `payload`: all of it or nothing."""
    partial = aside(path)
    try:
        write_durably(partial, payload)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    fsync_path(path.parent)


def create_file(path: Path, payload: bytes) -> bool:
    """Publish `payload` as `path` unless it exists; False when somebody else was first.

    `link` is the exclusive step: unlike rename it never replaces a file.
    """
    partial = aside(path)
    try:
        write_durably(partial, payload)
        try:
            os.link(partial, path)
        except FileExistsError:
            return False
    finally:
        partial.unlink(missing_ok=True)
    fsync_path(path.parent)
    return True


def refuse_no_links(folder: Path) -> None:
    """Refuse a file system that cannot publish exclusively (exFAT and some network shares)."""
    probe = aside(folder / "link")
    try:
        write_durably(probe, b"")
        os.link(probe, probe.with_suffix(".link.partial"))
        probe.with_suffix(".link.partial").unlink()
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        raise CacheError(
            f"{folder}: this file system has no hard links ({error.strerror}), by which units are "
            "committed; give --out a folder on one that has"
        ) from None
    finally:
        probe.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Fill the yielded folder; it becomes `path` when the block ends well, and is gone otherwise.

    An older folder of that name is replaced, in two renames: a crash just between them leaves it
    whole under its name aside.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = aside(path)
    partial.mkdir()
    try:
        yield partial
        fsync_tree(partial)
        if path.exists():
            retired = aside(path)
            os.rename(path, retired)
            try:
                os.rename(partial, path)
            except BaseException:
                os.rename(retired, path)
                raise
            shutil.rmtree(retired)
        else:
            os.rename(partial, path)
        fsync_path(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def existing_folder(path: Path) -> Path:
    """The nearest folder above that is there, to ask the disk about."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path


@contextlib.contextmanager
def full_disk_is_told(
    where: Path, kept: str, *, needed: Callable[[], int] | None = None
) -> Iterator[None]:
    """Turn "no space left" into a message that says how much is free, what is kept and missing.

    `needed` counts the bytes that are still to be written, if that is known.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(where).free
        missing = max(0, needed() - free) if needed else 0
        wanted = (
            f"{free + missing:,} bytes are still to be written: {missing:,} bytes are missing. "
            if missing
            else ""
        )
        raise DiskFullError(
            f"{where}: the disk is full ({free / 1e9:.3f} GB free). {wanted}{kept} "
            "Free some space and run the same command again."
        ) from error
