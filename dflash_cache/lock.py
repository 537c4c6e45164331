"""One writer per cache folder: a lock that dies with its process.

`flock` belongs to the kernel, so a lock file that a dead process left behind blocks nobody.
Others may look who holds it: they take it shared, for a moment, which no writer ever does.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_cache.disk import existing_folder, full_disk_is_told
from dflash_cache.errors import CacheBusyError, CacheError

LOCK = ".lock"
LOOK_SECONDS = 2.0  # in which one who only looks at a lock has certainly let go of it
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
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
    end = time.monotonic() + LOOK_SECONDS
    try:
        while not _had(file, fcntl.LOCK_EX):
            # Who can have it shared is beside others who only look.
            if time.monotonic() > end or not _had(file, fcntl.LOCK_SH):
                who = _signer(file)
                raise CacheBusyError(
                    f"{path.parent}: {who} is writing here; wait until it ends, or stop it"
                )
            fcntl.flock(file, fcntl.LOCK_UN)
            time.sleep(0.001)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        path.unlink(missing_ok=True)
        raise CacheError(
            f"{path.parent}: this file system has no locks ({error.strerror}), and two writers "
            "would not see each other; use one that has (mount option `flock`)"
        ) from None


def _had(file: int, how: int) -> bool:
    """Whether a lock could be had at once."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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


# --- seen from outside ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Writer:
    """Who signed the lock of a cache folder, in words.

    Not `held`: it signed on another machine, and its lock is not seen from here.  It has ended
    without letting go, or the share does not show the locks of other machines.
    """

    words: str
    held: bool


def writer(root: Path) -> Writer | None:
    """Who writes in a cache folder, or may do so; None where that is nobody.

    Whoever begins to write meanwhile is not disturbed: a lock that can be had shared is nobody's,
    and is tried again.
    """
    try:
        file = os.open(root / LOCK, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ESTALE:
            return None
        raise CacheError(
            f"{root / LOCK}: cannot be read ({error.strerror}), so nobody can tell whether the "
            "cache is being built; look after the disk or its rights"
        ) from None
    try:
        held = not _had(file, fcntl.LOCK_SH)
        words = _signer(file)
        elsewhere = _signature_of(file).get("host") not in (None, socket.gethostname())
    except OSError as error:
        if error.errno == errno.ESTALE:  # on a share: taken away since it was opened
            return None
        if error.errno not in NO_LOCKS:
            raise
        held, words, elsewhere = False, "another process", True
    finally:
        os.close(file)
    return Writer(words=words, held=held) if held or elsewhere else None


def _signer(file: int) -> str:
    about = _signature_of(file)
    try:
        return f"`{about['doing']}` (process {about['pid']} on {about['host']}, {about['since']})"
    except KeyError:
        return "another process"  # it has the lock and has not signed yet


def _signature_of(file: int) -> dict[str, Any]:
    """What the holder has written of itself; nothing where it has not done so yet."""
    with contextlib.suppress(ValueError):
        found = json.loads(os.pread(file, 4096, 0))
        if isinstance(found, dict):
            return found
    return {}
