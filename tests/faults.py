"""Let the k-th step that makes something durable or visible fail, for every k."""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest

STEPS = ("mkdir", "fsync", "replace", "link", "rename", "pwrite")
CLEANING = ("unlink", "rmdir")


class Faults:
    """Counts the steps of the kinds given, and lets one of them fail.

    `dead`: from that step on nothing works, cleaning up included, as after a power cut.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, *, at: int, dead: bool, steps: Sequence[str] = STEPS
    ) -> None:
        self.at, self.dead, self.seen, self.broken = at, dead, 0, False
        self.counting = threading.Lock()  # shards are written by several threads
        # Flushing takes most of the time and changes nothing that a test can see.
        patch.setattr(os, "fsync", lambda _: None)
        for name in (*STEPS, *CLEANING):
            patch.setattr(os, name, self._wrapped(getattr(os, name), counts=name in steps))

    def _wrapped(self, step: Callable, *, counts: bool) -> Callable:
        def wrapped(*args, **options):
            with self.counting:
                self.seen += counts
                fails = counts and self.seen == self.at
                self.broken = self.broken or fails
                dead = self.broken and self.dead
            if fails or dead:
                raise OSError(errno.EIO, f"step {self.seen} failed")
            return step(*args, **options)

        return wrapped


def every_failure(
    act: Callable[[Path], object],
    parent: Path,
    *,
    dead: bool,
    before: Callable[[Path], object] | None = None,
    steps: Sequence[str] = STEPS,
    stride: int = 1,
) -> Iterator[Path]:
    """Act in a folder of its own with the first, second ... step failing, until none is left.

    `stride` leaves steps out, where many are alike.
    """
    for number in count(1, stride):
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
