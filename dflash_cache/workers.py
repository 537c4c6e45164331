"""Units over several processes of one machine, each with its own copy of the target.

The launcher is torch's elastic one, the queue a counter in its `torch.distributed` store: a slow
worker does not hold up the others.  What is done depends on neither; see the commit protocol.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from tqdm import tqdm

from dflash_cache import errors
from dflash_cache.buckets import UnitPlan
from dflash_cache.errors import DFlashError

PR_SET_PDEATHSIG = 1
LAUNCHER_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
READY, CLAIMED, DONE, FAILED = "ready", "claimed", "done", "failed"


@dataclass(frozen=True, kw_only=True, eq=False)
class Crew:
    """The workers of a build, as one of them sees them."""

    rank: int
    store: TCPStore

    def device(self, name: str) -> str:
        """GPUs are dealt out; a device with a number, or the CPU, is shared by all."""
        if name in ("auto", "cuda") and torch.cuda.is_available():
            return f"cuda:{self.rank % torch.cuda.device_count()}"
        return name

    def after_the_first(self, prepare: Callable[[], Any]) -> Any:
        """Every worker prepares, the first one before all others."""
        if self.rank == 0:
            result = prepare()
            self.store.set(READY, "yes")
            return result
        while not self.store.check([READY]):
            self.stop_if_failed()
            time.sleep(0.05)
        return prepare()

    def claims(self, units: Sequence[UnitPlan]) -> Iterator[UnitPlan]:
        """Units that nobody else has; ends when all are taken or another worker has failed."""
        while True:
            self.stop_if_failed()
            number = self.store.add(CLAIMED, 1) - 1
            if number >= len(units):
                return
            yield units[number]

    def shared(self, bar: "tqdm[Any]") -> "SharedBar":
        return SharedBar(bar, self.store, begun=bar.n)

    def stop_if_failed(self) -> None:
        if self.store.check([FAILED]):
            raise OtherWorkerFailed

    def fail(self) -> None:
        self.store.set(FAILED, str(self.rank))


class SharedBar:
    """A progress bar over what all workers do; the first one shows it."""

    def __init__(self, bar: "tqdm[Any]", store: TCPStore, *, begun: float) -> None:
        self.bar, self.store, self.begun = bar, store, begun

    def update(self, count: int) -> None:
        self.bar.update(self.begun + self.store.add(DONE, count) - self.bar.n)


class OtherWorkerFailed(Exception):
    """Another worker has said why the build ends; there is nothing to add."""


def launch(work: Callable[..., Any], *arguments: Any, workers: int) -> Any:
    """Run `work(crew, *arguments)` in so many processes; returns what the first one returned.

    A `DFlashError` comes back as itself, whichever worker met it.
    """
    # Imported here: one worker needs none of it.
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with TemporaryDirectory(prefix="dflash-workers-") as logs, _signals_kept():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id=uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
            start_method="spawn",
            local_addr="localhost",
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        try:
            results = elastic_launch(config, _worker)(os.getpid(), work, arguments)
        except SignalException as error:
            raise DFlashError(
                f"stopped by {error.sigval.name}; all committed units are kept. "
                "Run the same command again"
            ) from None
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise DFlashError(
                f"worker {rank} died (exit code {failure.exitcode}); all committed units are kept. "
                "Run the same command again"
            ) from None
    failed = [value for kind, value in results.values() if kind == "error"]
    if failed:
        name, told = failed[0]
        raise getattr(errors, name)(told)
    return results[0][1]


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """The launcher sets handlers of its own and leaves them."""
    before = {number: signal.getsignal(number) for number in LAUNCHER_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _worker(parent: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[str, Any]:
    _die_with(parent)
    _quiet_transformers()
    torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ["LOCAL_WORLD_SIZE"])))
    crew = Crew(
        rank=int(os.environ["RANK"]),
        store=TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False),
    )
    try:
        return "result", work(crew, *arguments)
    except OtherWorkerFailed:
        return "stopped", None
    except DFlashError as error:
        crew.fail()
        return "error", (type(error).__name__, str(error))


def _quiet_transformers() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the one that holds the lock is gone.

    A worker that outlived it would write into a folder that the next builder sweeps.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
