"""One writer per cache folder: a lock that dies with its process.

`flock` belongs to the kernel, so a lock file that a dead process left behind blocks nobody.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from dflash_cache.disk import existing_folder, full_disk_is_told
from dflash_cache.errors import CacheBusyError, CacheError

LOCK = ".lock"
UNWRITABLE = (
    *(errno.EEXIST, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENAMETOOLONG, errno.ELOOP),
)


@contextlib.contextmanager
def held(root: Path, *, doing: str) -> Iterator[None]:
    """Hold the lock of a cache folder, which is made if need be; says who holds it otherwise.

    A folder that it made and that is still empty at the end goes again.
    """
    new = not root.exists()
    file = -1
    try:
        with writable(root), full_disk_is_told(existing_folder(root), "Nothing was written."):
            file = _acquire(root / LOCK, doing)
        yield
    finally:
        if file >= 0:
            _release(root / LOCK, file)
        if new:
            with contextlib.suppress(OSError):
                root.rmdir()


def _release(path: Path, file: int) -> None:
    try:
        # The name goes first: who opened it meanwhile sees that it is not the lock any more.
        path.unlink(missing_ok=True)
    finally:
        os.close(file)


@contextlib.contextmanager
def writable(root: Path) -> Iterator[None]:
    """Say in one message that a folder cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        raise CacheError(
            f"{root}: cannot be written ({error.strerror}); give --out a folder that can"
        ) from None


def _acquire(path: Path, doing: str) -> int:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            continue  # who made the folder has just taken it away again
        try:
            _lock(path, file)
            if _is(path, file):
                _sign(path, file, doing)
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _lock(path: Path, file: int) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        told = _told(os.pread(file, 4096, 0))
        raise CacheBusyError(f"{path.parent}: {told}") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        path.unlink(missing_ok=True)
        raise CacheError(
            f"{path.parent}: this file system has no locks ({error.strerror}), and two writers "
            "would not see each other; use one that has (mount option `flock`)"
        ) from None


def _sign(path: Path, file: int, doing: str) -> None:
    try:
        os.ftruncate(file, 0)
        os.pwrite(file, _signature(doing), 0)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _is(path: Path, file: int) -> bool:
    """Whether the name still means the file that was opened."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    own = os.fstat(file)
    return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)


def _signature(doing: str) -> bytes:
    since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    holder = {"doing": doing, "pid": os.getpid(), "host": socket.gethostname(), "since": since}
    return json.dumps(holder).encode()


def _told(holder: bytes) -> str:
    try:
        about = json.loads(holder)
        who = f"`{about['doing']}` (process {about['pid']} on {about['host']}, {about['since']})"
    except (ValueError, KeyError, TypeError):
        who = "another process"  # it has the lock and has not signed yet
    return f"{who} is writing here; wait until it ends, or stop it"
