"""One folder, written by all ranks: it appears when every part is down, or not at all.

The first rank makes a folder aside and says its name.  All write into it and say what they wrote.
The first rank writes the record, renames the folder and says to all how it ended; that word is the
same for everybody.
"""

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from dflash_cache import disk
from dflash_cache.checksums import digest
from dflash_fit.errors import FitError, RunFolderError
from dflash_fit.notes import Failure, Notes
from dflash_fit.parts import write_tensors
from dflash_fit.world import World

POLL = 0.05  # seconds between looks at notes and folders
SIGHT = 90.0  # seconds until a rank sees what another one wrote: NFS may take 60
SLOWEST = 1800.0  # seconds that a rank may write longer than another one
SETTLING = 2.0  # seconds that others get to close their files in a folder that is given up

Entries = dict[str, list[int]]  # file -> size and XXH3-64
T = TypeVar("T")


class Abandoned(Exception):
    """This folder is given up; the reason is said elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """What this rank writes into a folder."""

    texts: Mapping[str, bytes]
    tensors: Mapping[str, tuple[Mapping[str, Tensor], Mapping[str, str]]]  # on the host; metadata


class JointFolders:
    """Writes folders together with the other ranks, one behind the other, in the background."""

    def __init__(self, world: World) -> None:
        """All ranks make one together."""
        self.world, self.notes = world, Notes(world)
        self.others = range(1, world.size)
        self.number = 0  # of the folder, the same on all ranks
        self.stopping = threading.Event()

    def begin(self) -> None:
        """The next folder is about to be written."""
        self.number += 1

    def lead(
        self,
        path: Path,
        content: Content,
        *,
        record: Callable[[Entries], tuple[str, bytes]],
        then: Callable[[], None],
    ) -> None:
        """The first rank's share.  `record` makes name and content of the last file, from all."""
        try:
            if not path.parent.is_dir():
                path.parent.mkdir(parents=True)
                disk.fsync_path(path.parent.parent)
            with disk.new_folder(path) as folder:
                self._lead(folder, path, content, record)
            then()
        except Exception as error:
            self._end(error)
            raise
        self._say("end", {"failed": None})

    def help(self, path: Path, content: Content) -> None:
        """The share of any other rank; raises what went wrong on any."""
        own: Exception | None = None
        files: Entries = {}
        try:
            files = self._write(self._see_folder(path), content, unless=self._refuse_ended)
        except Exception as error:
            own = error
            if not isinstance(error, Abandoned):  # its reason is there already
                self._say("failed", Failure.of(error, rank=self.world.rank).to_dict())
        self._say(f"part/{self.world.rank}", files)
        failed = self._until(self._ended, SLOWEST, lambda: silent([0], path))["failed"]
        if own is not None and failed and failed["rank"] == self.world.rank:
            raise own
        if failed:
            raise Failure(**failed).error(f"writing {path}")

    def give_up(self, error: BaseException) -> None:
        """Stop what is under way, here and on the other ranks; nothing is written any more."""
        failure = Failure.of(error, rank=self.world.rank).to_dict()
        try:
            # The reason comes first: who stops looks for one.
            self.notes.leave("gone/first" if self.world.first else "gone", failure)
        finally:
            self.stopping.set()

    # --- the first rank -------------------------------------------------------------------------

    def _lead(
        self,
        folder: Path,
        path: Path,
        content: Content,
        record: Callable[[Entries], tuple[str, bytes]],
    ) -> None:
        try:
            self._say("folder", folder.name)
            files = self._write(folder, content, unless=lambda: self._refuse_failed(path))
            files |= self._parts_of_others(path)
            self._see_files(folder, files)
            name, text = record(files)
            disk.write_durably(folder / name, text)
        except Exception as error:
            self._end(error)
            self._let_others_stop()
            raise

    def _parts_of_others(self, path: Path) -> Entries:
        said: dict[int, Entries] = {}

        def look() -> Entries | None:
            for rank in self.others:
                if rank not in said and (files := self._said(f"part/{rank}")) is not None:
                    said[rank] = files
            self._refuse_failed(path)  # behind the parts: who failed says so first
            if len(said) < len(self.others):
                return None
            return {name: entry for files in said.values() for name, entry in files.items()}

        def late() -> Exception:
            return silent([rank for rank in self.others if rank not in said], path)

        return self._until(look, SLOWEST, late)

    def _see_files(self, folder: Path, files: Entries) -> None:
        def absent() -> list[str]:
            return [name for name, (size, _) in files.items() if size_of(folder / name) != size]

        self._until(
            lambda: None if absent() else True,
            SIGHT,
            lambda: unseen(folder, f"{', '.join(absent())}, which other ranks wrote into"),
        )

    def _failed(self) -> dict[str, Any] | None:
        """What went wrong on another rank."""
        failed: dict[str, Any] | None = self._said("failed") or self.notes.find("gone")
        return failed

    def _refuse_failed(self, path: Path) -> None:
        failed = self._failed()
        if failed:
            raise Failure(**failed).error(f"writing {path}")

    def _end(self, error: Exception) -> None:
        """Say to all why there is no folder; the first reason counts."""
        failed = self._failed() or self.notes.find("gone/first")
        self._say("end", {"failed": failed or Failure.of(error, rank=self.world.rank).to_dict()})

    def _let_others_stop(self) -> None:
        deadline = time.monotonic() + SETTLING
        while time.monotonic() < deadline and any(
            self._said(f"part/{rank}") is None for rank in self.others
        ):
            time.sleep(POLL)

    # --- the others -----------------------------------------------------------------------------

    def _see_folder(self, path: Path) -> Path:
        def named() -> str | None:
            self._refuse_ended()
            name: str | None = self._said("folder")
            return name

        folder = path.with_name(self._until(named, SLOWEST, lambda: silent([0], path)))
        self._until(
            lambda: folder.is_dir() or None,
            SIGHT,
            lambda: unseen(folder, "this folder, which rank 0 made in"),
        )
        return folder

    def _ended(self) -> dict[str, Any] | None:
        """How it ended; a first rank that is gone is an end, too."""
        end = self._said("end")
        gone = None if end else self.notes.find("gone/first")
        return {"failed": gone} if gone else end

    def _refuse_ended(self) -> None:
        if self._ended():
            raise Abandoned

    # --- all ------------------------------------------------------------------------------------

    def _write(self, folder: Path, content: Content, *, unless: Callable[[], None]) -> Entries:
        """Write what is ours, flushed; `unless` raises what another rank had to say."""

        def between() -> None:
            if self.stopping.is_set():
                raise Abandoned
            unless()

        files: Entries = {}
        for name, text in content.texts.items():
            disk.write_durably(folder / name, text)
            files[name] = [len(text), digest(text)]
        for name, (tensors, metadata) in content.tensors.items():
            files[name] = write_tensors(folder / name, tensors, metadata=metadata, between=between)
        return files

    def _until(
        self, look: Callable[[], T | None], seconds: float, late: Callable[[], Exception]
    ) -> T:
        """What `look` finds; it is asked again and again until it finds something."""
        deadline = time.monotonic() + seconds
        while (found := look()) is None:
            if self.stopping.wait(POLL):
                raise Abandoned
            if time.monotonic() > deadline:
                raise late()
        return found

    def _say(self, key: str, value: Any) -> None:
        self.notes.leave(f"{self.number}/{key}", value)

    def _said(self, key: str) -> Any:
        return self.notes.find(f"{self.number}/{key}")


def size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def silent(ranks: Sequence[int], path: Path) -> FitError:
    return FitError(
        f"{path}: nothing heard of rank {', '.join(map(str, ranks))} for {SLOWEST:,.0f} s while "
        "all write a checkpoint; look after that machine and its disk"
    )


def unseen(folder: Path, what: str) -> RunFolderError:
    return RunFolderError(
        f"{folder}: {socket.gethostname()} does not see {what} {folder.parent} {SIGHT:.0f} s ago; "
        "all ranks must share the run folder: give --out one that every machine mounts"
    )
