"""The captured step: the whole body of a trainer in CUDA graphs, replayed pack after pack.

One pack an update: one graph, from the masks to the rounded weights.  Several packs an update: one
graph for the first (its backward makes the gradients), one for those between, one for the last.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from dflash_fit.batch import Batch
from dflash_fit.drafter import Functions
from dflash_fit.errors import FitError
from dflash_fit.step import Pieces, Trainer

WARM_UPS = 2  # the first run compiles and fills workspaces; the second runs as the capture will


def compiled(pieces: Pieces, *, backend: str = "inductor") -> Pieces:
    """The same pieces, each compiled whole, for one shape.

    Piece by piece and not all at once: layers share what is compiled, so that the first replay
    comes soon, and the head's loop over chunks stays our own.
    """

    def whole(function: Any, *, dynamic: bool = False) -> Any:
        return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)

    parts = {name: whole(function) for name, function in vars(pieces.functions).items()}
    # One kernel for parameters of every length.
    adamw_ = whole(pieces.adamw_, dynamic=True)
    return replace(pieces, functions=Functions(**parts), adamw_=adamw_)


def compilations() -> int:
    """Graphs compiled by this process so far."""
    # Here: it takes a third of a rank's start, and on a CPU nothing is compiled.
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@dataclass(frozen=True, kw_only=True)
class Capture:
    """What capturing took and left."""

    seconds: float
    captures: int
    compiled: int  # functions compiled by then; none may follow
    memory: int  # bytes reserved on the device afterwards


class GraphStep:
    """A trainer on one GPU, replayed.  `capture` once, then call it with every pack.

    Owns the batch that the graphs read; a pack is copied into it, and is its owner's again as
    soon as the work queued on the current stream is done.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.device = trainer.optimizer.lr.device
        if self.device.type != "cuda":
            raise FitError(f"a step on {self.device} cannot be captured; use --step eager")
        self.input = Batch.empty(trainer.config.shape, device=self.device)
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.capture_of: Capture | None = None

    def capture(self, batch: Batch) -> Capture:
        """Warm up on a pack, then capture; weights, moments and counters stay as they were."""
        began = time.perf_counter()
        self._take(batch)
        optimizer, last = self.trainer.optimizer, self.trainer.config.packs - 1
        # All packs between the first and the last do the same: one of them stands for all.
        turns = sorted({0, min(1, last), last})
        optimizer.armed.zero_()
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                for turn in turns:
                    self.trainer.train(self.input, turn)
        torch.cuda.current_stream(self.device).wait_stream(side)
        optimizer.begin()  # the warm-up's gradients would stay beside the graph's own
        pool = torch.cuda.graph_pool_handle()
        for turn in turns:
            graph = torch.cuda.CUDAGraph()
            # Other threads may use CUDA meanwhile: the feed copies the next pack.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self.trainer.train(self.input, turn)
            self.graphs.append(graph)
        optimizer.armed.fill_(True)
        self.trainer.metrics.reset()
        torch.cuda.synchronize(self.device)
        self.capture_of = Capture(
            seconds=time.perf_counter() - began,
            captures=len(self.graphs),
            compiled=compilations(),
            memory=torch.cuda.memory_reserved(self.device),
        )
        return self.capture_of

    def __call__(
        self, batch: Batch, *, lr: float, turn: int = 0, taken: Callable[[], None] | None = None
    ) -> None:
        """Train on a pack, the `turn`-th of its update; returns at once.

        `taken` is called when the copy of the pack is queued, ahead of the replay: what is queued
        behind that may overwrite the pack.
        """
        assert self.graphs, "capture() first"
        self._take(batch)
        if taken is not None:
            taken()
        self.trainer.optimizer.lr.fill_(lr)
        last = self.trainer.config.packs - 1
        self.graphs[-1 if turn == last else min(turn, 1)].replay()

    def counts(self) -> dict[str, int]:
        """For the log: the captures, and functions compiled since; more than 0 is a mistake."""
        captured = self.capture_of
        return {
            "captures": len(self.graphs),
            "recompiles": compilations() - captured.compiled if captured else 0,
        }

    def _take(self, batch: Batch) -> None:
        for name, mine in vars(self.input).items():
            theirs = getattr(batch, name)
            found = (theirs.shape, theirs.dtype, theirs.device)
            wanted = (mine.shape, mine.dtype, mine.device)
            if found != wanted:
                raise FitError(
                    f"batch.{name}: found {describe(*found)}, the captured step wants "
                    f"{describe(*wanted)}; one shape, one capture"
                )
        self.input.copy_(batch)


def describe(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"
