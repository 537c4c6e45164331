"""Write aside, make durable, then publish in one step.  Knows nothing of caches.

A crash at any point leaves the old state or the new one, never half of either.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

from dflash_cache.errors import DiskFullError


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


def _write_durably(path: Path, payload: bytes) -> None:
    with open(path, "wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


def write_file(path: Path, payload: bytes) -> None:
    """Replace `path` by `payload`: all of it or nothing."""
    partial = aside(path)
    try:
        _write_durably(partial, payload)
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
        _write_durably(partial, payload)
        try:
            os.link(partial, path)
        except FileExistsError:
            return False
    finally:
        partial.unlink(missing_ok=True)
    fsync_path(path.parent)
    return True


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


@contextlib.contextmanager
def full_disk_is_told(where: Path, kept: str) -> Iterator[None]:
    """Turn "no space left" into a message that says how much is free and what is kept."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(where).free
        raise DiskFullError(
            f"{where}: the disk is full ({free / 1e9:.3f} GB free). {kept} "
            "Free some space and run the same command again."
        ) from error
