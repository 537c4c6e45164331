"""One writer per folder, whoever it is, and a dead one is in nobody's way."""

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from conftest import tiny_build

from dflash_cache import lock
from dflash_cache.build import build_cache
from dflash_cache.convert import convert_cache
from dflash_cache.errors import CacheBusyError, CacheError, DiskFullError
from dflash_cache.repair import repair_cache
from dflash_cache.sweep import collect

# The child holds a lock and does nothing else: what the parent's threads held does not matter.
pytestmark = pytest.mark.filterwarnings("ignore:.* is multi-threaded:DeprecationWarning")

DOING = "dflash cache build"
FORK = multiprocessing.get_context("fork")
PATIENCE = 60


def hold(root: Path, pipe: Connection, doing: str) -> None:
    with lock.held(root, doing=doing):
        pipe.send("held")
        pipe.recv()


@contextmanager
def another_holder(root: Path, doing: str = DOING) -> Iterator[multiprocessing.Process]:
    """A process of its own that holds the lock until the block ends, or until it is killed."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=hold, args=(root, theirs, doing))
    process.start()
    try:
        assert ours.poll(PATIENCE), "the other process did not get the lock"
        assert ours.recv() == "held"
        yield process
        if process.is_alive():
            ours.send("go")
            process.join(PATIENCE)
            assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        ours.close()
        theirs.close()


def stamps(root: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(root)): (path.stat().st_mtime_ns, path.stat().st_ino)
        for path in root.rglob("*")
    }


def take(root: Path) -> None:
    with lock.held(root, doing=DOING):
        pass


def free(root: Path) -> bool:
    """Whether the lock can be had; taking it changes nothing in a folder with content."""
    try:
        take(root)
    except CacheBusyError:
        return False
    return True


# --- two at once ----------------------------------------------------------------------------------


def test_the_second_is_told_who_the_first_one_is(tmp_path):
    with another_holder(tmp_path / "out") as process, pytest.raises(CacheBusyError) as told:
        build_cache(tiny_build(tmp_path / "target", tmp_path / "data", tmp_path / "out"))
    message = str(told.value)
    assert message.startswith(f"{tmp_path / 'out'}: `{DOING}` (process {process.pid} on ")
    assert f" on {socket.gethostname()}, 20" in message
    assert message.endswith("is writing here; wait until it ends, or stop it")


def test_a_holder_that_has_not_signed_yet_is_another_process(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_signature", lambda _: b'{"doing": "dflash cache b')
    with (
        another_holder(tmp_path),
        pytest.raises(CacheBusyError, match=": another process is writing here"),
    ):
        take(tmp_path)


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "half-built"])
@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda root: repair_cache(root, device="cpu"), id="repair"),
        pytest.param(collect, id="gc"),
        pytest.param(lambda root: collect(root, dry_run=True), id="gc of nothing"),
    ],
)
def test_nobody_mends_or_sweeps_where_another_process_writes(
    tiny_cache, tmp_path, write: Callable, sealed
):
    root = shutil.copytree(tiny_cache, tmp_path / "cache")
    if not sealed:
        (root / "manifest.json").unlink()
    with another_holder(root):
        before = stamps(root)
        with pytest.raises(CacheBusyError, match=f"`{DOING}`"):
            write(root)
        assert stamps(root) == before


def test_nobody_builds_or_converts_where_another_process_writes(
    tiny_cache, tiny_target, tiny_data, tmp_path
):
    half = shutil.copytree(tiny_cache, tmp_path / "half")
    (half / "manifest.json").unlink()
    for root in (half, tmp_path / "new"):
        with another_holder(root):
            before = stamps(root)
            with pytest.raises(CacheBusyError, match=f"`{DOING}`"):
                build_cache(tiny_build(tiny_target, tiny_data, root))
            assert stamps(root) == before
    with (
        another_holder(tmp_path / "new", "dflash cache convert"),
        pytest.raises(CacheBusyError, match="`dflash cache convert`"),
    ):
        convert_cache(tiny_cache, encoding="fp8", out=tmp_path / "new", device="cpu")


def count_up(root: Path, times: int) -> None:
    """Read a number and write the next one, slowly enough for others to come between."""
    while times:
        try:
            with lock.held(root, doing="counting"):
                number = int((root / "number").read_text())
                os.sched_yield()
                (root / "number").write_text(str(number + 1))
                times -= 1
        except CacheBusyError:
            os.sched_yield()


def test_many_who_come_and_go_are_never_inside_together(tmp_path):
    (tmp_path / "number").write_text("0")
    crowd = [FORK.Process(target=count_up, args=(tmp_path, 100)) for _ in range(4)]
    for process in crowd:
        process.start()
    for process in crowd:
        process.join(PATIENCE)
    assert [process.exitcode for process in crowd] == [0] * 4
    assert (tmp_path / "number").read_text() == "400"
    assert [path.name for path in tmp_path.iterdir()] == ["number"]


# --- the end of a holder --------------------------------------------------------------------------


def test_a_killed_holder_blocks_nobody_although_its_file_stays(tmp_path):
    with another_holder(tmp_path, "a very long build " * 20) as process:
        assert not free(tmp_path)
        process.kill()
        process.join()
    left = json.loads((tmp_path / lock.LOCK).read_text())
    assert left["pid"] == process.pid

    with lock.held(tmp_path, doing=DOING):
        signed = json.loads((tmp_path / lock.LOCK).read_text())
        assert (signed["pid"], signed["doing"]) == (os.getpid(), DOING)


@pytest.mark.parametrize("fails", [True, False])
def test_a_release_removes_the_file_and_the_folder_only_if_it_is_new_and_empty(tmp_path, fails):
    def act(root: Path, *, make: bool) -> None:
        with lock.held(root, doing=DOING):
            assert (root / lock.LOCK).is_file()
            if make:
                (root / "zarr.json").write_text("{}")
            if fails:
                raise InterruptedError

    (tmp_path / "old").mkdir()
    for name, make in (("new/deep", False), ("old", False), ("full", True)):
        try:
            act(tmp_path / name, make=make)
        except InterruptedError:
            assert fails
    assert set(tmp_path.iterdir()) == {tmp_path / name for name in ("new", "old", "full")}
    assert list((tmp_path / "new").iterdir()) == []
    assert list((tmp_path / "old").iterdir()) == []
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["zarr.json"]


def test_a_lock_is_released_although_its_file_cannot_be_removed(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fails)
        with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
            take(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [lock.LOCK]
    assert free(tmp_path)


@pytest.mark.parametrize("step", ["ftruncate", "pwrite"])
def test_a_disk_too_full_to_sign_is_told_and_leaves_no_lock(tmp_path, monkeypatch, step):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        with pytest.raises(DiskFullError, match=r"the disk is full .*Nothing was written"):
            take(tmp_path / "out")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert free(tmp_path / "out")


def test_the_lock_can_be_had_again_and_again(tmp_path):
    for _ in range(3):
        with lock.held(tmp_path / "new", doing=DOING):
            assert not free(tmp_path / "new")
        with another_holder(tmp_path / "new"):
            assert not free(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("then", ["gone", "another"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_file_that_was_replaced_meanwhile_is_not_the_lock(tmp_path, monkeypatch, then, times):
    """Its holder let go, and perhaps somebody new came, between our opening and our locking."""
    path, real, locked = tmp_path / lock.LOCK, fcntl.flock, []

    def slowly(file: int, how: int) -> None:
        if len(locked) < times:
            path.unlink()
            if then == "another":
                path.touch()
        locked.append(os.fstat(file).st_ino)
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", slowly)
    descriptors = set(os.listdir("/proc/self/fd"))
    with lock.held(tmp_path, doing=DOING):
        assert len(locked) == times + 1
        assert locked[-1] == path.stat().st_ino
        assert json.loads(path.read_text())["pid"] == os.getpid()
        assert not free(tmp_path)
    # Nor is one of the files that were not the lock kept open.
    assert set(os.listdir("/proc/self/fd")) == descriptors


def test_a_file_replaced_by_one_that_is_held_is_told(tmp_path, monkeypatch):
    real, others = fcntl.flock, []

    def slowly(file: int, how: int) -> None:
        if not others:
            (tmp_path / lock.LOCK).unlink()
            others.append(os.open(tmp_path / lock.LOCK, os.O_RDWR | os.O_CREAT))
            os.write(others[0], lock._signature("dflash cache gc"))
            real(others[0], fcntl.LOCK_EX)
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", slowly)
    with pytest.raises(CacheBusyError, match="`dflash cache gc`"):
        take(tmp_path)
    os.close(others[0])
    assert free(tmp_path)


# --- file systems ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_one_clear_error(tmp_path, monkeypatch, number):
    def refuses(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuses)
    descriptors = set(os.listdir("/proc/self/fd"))
    config = tiny_build(tmp_path / "target", tmp_path / "data", tmp_path / "out")
    with pytest.raises(CacheError, match=r"this file system has no locks \(.*two writers") as told:
        build_cache(config)
    assert not isinstance(told.value, CacheBusyError)
    assert os.strerror(number) in str(told.value)
    assert str(tmp_path / "out") in str(told.value)
    assert set(os.listdir("/proc/self/fd")) == descriptors


def test_a_disk_that_fails_is_not_taken_for_one_without_locks(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", fails)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        take(tmp_path)


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("ten years of work")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CacheError, match=r"cannot be written \(.*give --out a folder") as told:
            take(root)
        assert str(told.value).startswith(f"{root}: ")
    assert (tmp_path / "file").read_text() == "ten years of work"
