"""Whatever fails, and wherever: the old state or the new one, never half of either."""

import contextlib
import errno
import os
from collections import namedtuple
from pathlib import Path

import pytest
from faults import every_failure

from dflash_cache import disk
from dflash_cache.errors import DiskFullError


def leftovers(folder: Path) -> list[str]:
    """Names in the folder that a reader must not take for results."""
    return [path.name for path in folder.iterdir() if path.name.endswith(".partial")]


@pytest.fixture(params=[False, True], ids=["one step fails", "power is gone"])
def dead(request) -> bool:
    return request.param


def test_write_file_leaves_the_old_bytes_or_the_new(tmp_path, dead):
    states = set()
    for folder in every_failure(
        lambda folder: disk.write_file(folder / "file", b"new"),
        tmp_path,
        dead=dead,
        before=lambda folder: (folder / "file").write_bytes(b"old"),
    ):
        states.add((folder / "file").read_bytes())
        assert {path.name for path in folder.iterdir()} == {"file", *leftovers(folder)}
        assert dead or not leftovers(folder)
    assert states == {b"old", b"new"}


def test_write_file_without_failure_leaves_only_the_new_bytes(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    disk.write_file(tmp_path / "file", b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("file", b"new")]


def test_create_file_leaves_nothing_or_the_whole_file(tmp_path, dead):
    states = set()
    for folder in every_failure(
        lambda folder: disk.create_file(folder / "file", b"all of it"),
        tmp_path,
        dead=dead,
    ):
        path = folder / "file"
        states.add(path.read_bytes() if path.exists() else None)
        assert dead or not leftovers(folder)
    assert states == {None, b"all of it"}


def test_create_file_says_that_it_made_the_file(tmp_path):
    assert disk.create_file(tmp_path / "file", b"mine") is True
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("file", b"mine")]


def test_create_file_keeps_the_first_content_and_says_that_it_was_late(tmp_path):
    disk.create_file(tmp_path / "file", b"first")
    assert disk.create_file(tmp_path / "file", b"second") is False
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("file", b"first")]


def fill(path: Path, text: str) -> None:
    with disk.new_folder(path) as folder:
        (folder / "a").write_text(text)
        (folder / "deep").mkdir()
        (folder / "deep" / "b").write_text(text)


def contents(path: Path) -> dict[str, str]:
    files = (file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file.read_text() for file in files}


def whole(text: str) -> dict[str, str]:
    return {"a": text, "deep/b": text}


def test_a_new_folder_is_there_whole_or_not_at_all(tmp_path, dead):
    states = set()
    for parent in every_failure(lambda parent: fill(parent / "folder", "new"), tmp_path, dead=dead):
        states.add((parent / "folder").exists())
        assert contents(parent / "folder") in ({}, whole("new"))
        assert dead or not leftovers(parent)
    assert states == {False, True}


def test_replacing_a_folder_leaves_the_old_one_or_the_new(tmp_path, dead):
    states = []
    for parent in every_failure(
        lambda parent: fill(parent / "folder", "new"),
        tmp_path,
        dead=dead,
        before=lambda parent: fill(parent / "folder", "old"),
    ):
        found = contents(parent / "folder")
        aside = [contents(parent / name) for name in leftovers(parent)]
        states.append(found)
        if found:
            assert found in (whole("old"), whole("new"))
            assert dead or not aside
        else:  # the power went between the two renames: whole, under another name
            assert dead
            assert whole("old") in aside
    assert whole("old") in states
    assert whole("new") in states


def test_a_folder_replaced_without_failure_leaves_nothing_aside(tmp_path):
    fill(tmp_path / "folder", "old")
    fill(tmp_path / "folder", "new")
    assert contents(tmp_path / "folder") == whole("new")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_folder_whose_filling_raises_never_appears(tmp_path):
    with contextlib.suppress(KeyError), disk.new_folder(tmp_path / "folder") as folder:
        (folder / "a").write_text("half")
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_folder_appears_only_when_all_of_it_is_durable(tmp_path, monkeypatch):
    """Every file and folder is flushed before the rename that shows them, the parent after it."""
    done: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: done.append(os.readlink(f"/proc/self/fd/{fd}")))
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda *names: (done.append("shown"), rename(*names)))
    fill(tmp_path / "folder", "new")
    shown = done.index("shown")
    names = {Path(name).name for name in done[:shown]}
    assert {"a", "b", "deep"} < names
    assert any(Path(name).name.endswith(".partial") for name in done[:shown])
    assert done[shown + 1 :] == [str(tmp_path)]


def test_a_full_disk_is_told_with_what_is_free_and_what_is_kept(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(10, 3, 7_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with (
        pytest.raises(DiskFullError, match=r"the disk is full \(0\.007 GB free\)\. Units are kept"),
        disk.full_disk_is_told(tmp_path, "Units are kept."),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_quota_is_a_full_disk(tmp_path):
    with pytest.raises(DiskFullError), disk.full_disk_is_told(tmp_path, ""):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")


def test_other_errors_pass_unchanged(tmp_path):
    with pytest.raises(PermissionError), disk.full_disk_is_told(tmp_path, ""):
        raise PermissionError(errno.EACCES, "Permission denied")
