"""Checkpoints in the background: training waits for the copy to host memory, not for the disk."""

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from dflash_cache.buffers import host_tensor
from dflash_fit.checkpoint import RunState, clear_leftovers, clear_old, mark_best, step_folder
from dflash_fit.drafter import DFlashDraftModel
from dflash_fit.folder import CONFIG_FILE, TRAINING_FILE, WEIGHTS_FILE, to_config
from dflash_fit.joint import Content, Entries, JointFolders
from dflash_fit.parts import FlatState, part_name, part_of
from dflash_fit.sound import STATE_FILE, to_json
from dflash_fit.staging import Pair, Staging, copy_plainly
from dflash_fit.world import World

GRACE = 5.0  # seconds that giving up may take


class HostCopies:
    """Owns the host memory that checkpoints are written from, made once."""

    def __init__(self, copy: Callable[[Iterable[Pair]], None]) -> None:
        self.copy = copy
        self.tensors: dict[str, Tensor] = {}

    def take(self, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values as of now, behind all that the device was asked for before."""
        for name, tensor in live.items():
            if name not in self.tensors:
                self.tensors[name] = host_tensor(tuple(tensor.shape), tensor.dtype)
        kept = {name: self.tensors[name] for name in live}
        self.copy((live[name], kept[name]) for name in live)
        return kept


class Saver:
    """Saves checkpoints of a run, one at a time; all ranks make one and save at the same steps.

    What goes wrong on any rank comes out on every rank, at the next `save` or `wait`, or at the
    end of the block.  A block that ends by an exception gives up the save under way.
    """

    def __init__(
        self, run: Path, world: World, *, keep_last: int, keep_every: int | None = None
    ) -> None:
        self.run, self.world = run, world
        self.keep_last, self.keep_every = keep_last, keep_every
        self.folders = JointFolders(world)
        copy = Staging(world.device).copy if world.device.type == "cuda" else copy_plainly
        self.weights, self.part = HostCopies(copy), HostCopies(copy)
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        if self.world.first:
            clear_leftovers(self.run)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.wait()
            return
        with suppress(RuntimeError):  # the store may be what is gone
            self.folders.give_up(error)
        if self.thread is not None:
            self.thread.join(GRACE)

    def save(
        self,
        drafter: DFlashDraftModel,
        optimizer: FlatState,
        state: RunState,
        training: Mapping[str, Any],
        *,
        best: bool,
    ) -> None:
        """Save all as it is now.  Once it returns all may change, with the writing under way."""
        self.wait()
        self.folders.begin()
        content = self._copy(drafter, optimizer, training)
        # A daemon: a disk that hangs must not keep a process that wants to end.
        self.thread = threading.Thread(
            target=self._write, args=(content, state, best), name="saver", daemon=True
        )
        self.thread.start()

    def wait(self) -> None:
        """Until the last save is on disk; raises why it is not."""
        if self.thread is not None:
            with self.world.pulse.resting():  # disks are slow; who is too slow is found out there
                self.thread.join()
            self.thread = None
        error, self.error = self.error, None
        if error is not None:
            raise error

    def _copy(
        self, drafter: DFlashDraftModel, optimizer: FlatState, training: Mapping[str, Any]
    ) -> Content:
        """What this rank writes, on the host."""
        rank, world = self.world.rank, self.world.size
        live, metadata = part_of(optimizer, rank=rank, world=world)
        part = {part_name(rank, world): (self.part.take(live), metadata)}
        if not self.world.first:
            return Content(texts={}, tensors=part)
        weights = self.weights.take(drafter.state_dict())
        dtype = next(iter(weights.values())).dtype
        return Content(
            texts={
                CONFIG_FILE: to_text(to_config(drafter.config, dtype=dtype)),
                TRAINING_FILE: to_text(training),
            },
            tensors={WEIGHTS_FILE: (weights, {"format": "pt"}), **part},
        )

    def _write(self, content: Content, state: RunState, best: bool) -> None:
        path = step_folder(self.run, state.step)
        parts = [part_name(rank, self.world.size) for rank in range(self.world.size)]

        def record(files: Entries) -> tuple[str, bytes]:
            return STATE_FILE, to_json(asdict(state), parts, files)

        def then() -> None:
            if best:
                mark_best(self.run, path)
            clear_old(self.run, keep_last=self.keep_last, keep_every=self.keep_every)

        try:
            if self.world.first:
                self.folders.lead(path, content, record=record, then=then)
            else:
                self.folders.help(path, content)
        except Exception as error:  # whatever it is, the main thread raises it
            self.error = error


def to_text(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(dict(value), indent=2) + "\n").encode()
