"""Let the k-th step that makes something durable or visible fail, for every k."""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest

STEPS = ("mkdir", "fsync", "replace", "link", "rename")
CLEANING = ("unlink", "rmdir")


class Faults:
    """Counts the steps, and lets one of them fail.

    `dead`: from that step on nothing works, cleaning up included, as after a power cut.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, *, at: int, dead: bool, steps: Sequence[str] = STEPS
    ) -> None:
        self.at, self.dead, self.seen, self.broken = at, dead, 0, False
        # Flushing takes most of the time and changes nothing that a test can see.
        patch.setattr(os, "fsync", lambda _: None)
        for name in steps:
            patch.setattr(os, name, self._counted(name, getattr(os, name)))
        for name in CLEANING:
            patch.setattr(os, name, self._cleaning(getattr(os, name)))

    def _counted(self, name: str, step: Callable) -> Callable:
        def wrapped(*args, **options):
            # zarr's threads race for the folders that they need: how often differs from run to run.
            counts = name != "mkdir" or threading.current_thread() is threading.main_thread()
            self.seen += counts
            if (counts and self.seen == self.at) or (self.broken and self.dead):
                self.broken = True
                raise OSError(errno.EIO, f"step {self.seen} failed")
            return step(*args, **options)

        return wrapped

    def _cleaning(self, step: Callable) -> Callable:
        def wrapped(*args, **options):
            if self.broken and self.dead:
                raise OSError(errno.EIO, "dead")
            return step(*args, **options)

        return wrapped


def every_failure(
    act: Callable[[Path], object],
    parent: Path,
    *,
    dead: bool,
    before: Callable[[Path], object] | None = None,
    steps: Sequence[str] = STEPS,
) -> Iterator[Path]:
    """Act in a folder of its own with the first, second ... step failing, until none is left."""
    for number in count(1):
        folder = parent / f"{number}"
        folder.mkdir()
        if before:
            before(folder)
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, at=number, dead=dead, steps=steps)
            try:
                act(folder)
            except OSError:
                assert faults.broken
        if not faults.broken:
            assert number > 1, "the faults did not reach the code"
            return
        yield folder
