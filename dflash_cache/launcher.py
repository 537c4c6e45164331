"""Processes of this machine, started by torch's elastic launcher, and what each does first."""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from tqdm import tqdm

LAUNCHER_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PR_SET_PDEATHSIG = 1


class Stopped(Exception):
    """A signal has ended the processes; its name."""


class ProcessDied(Exception):
    """A process ended badly, and the launcher ended the others."""

    def __init__(self, number: int, code: int) -> None:
        super().__init__(number, code)
        self.number, self.code = number, code  # a code below 0 is a signal


def launch(
    entry: Callable[..., None],
    *arguments: Any,
    count: int,
    signals: Sequence[signal.Signals] = LAUNCHER_SIGNALS,
) -> None:
    """Run `entry(parent, *arguments)` in so many processes, and wait until all have ended.

    The entry is a function of a module; it calls `settle(parent)` first, and `number_here()` is
    its number.  Of the `signals`, those that this process does not ignore end all processes.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The launcher's own log says nothing that we do not say better.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    with TemporaryDirectory(prefix="dflash-launch-") as logs, _signals_kept():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
            start_method="spawn",
            local_addr="localhost",
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            signals_to_handle=",".join(signals_heard(signals)),
        )
        try:
            elastic_launch(config, entry)(os.getpid(), *arguments)
        except SignalException as error:
            raise Stopped(error.sigval.name) from None
        except ChildFailedError as error:
            number, failure = error.get_first_failure()
            raise ProcessDied(number, failure.exitcode) from None


def signals_heard(signals: Sequence[signal.Signals] = LAUNCHER_SIGNALS) -> list[str]:
    """Names of the signals without those that this process ignores, as under nohup."""
    return [s.name for s in signals if signal.getsignal(s) is not signal.SIG_IGN]


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """The launcher sets handlers of its own and leaves them; none where it may not."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in LAUNCHER_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- in a process that was launched ---------------------------------------------------------------


def number_here() -> int:
    """The number of this process among those that were launched with it."""
    return int(os.environ["LOCAL_RANK"])


def settle(parent: int) -> None:
    """What a process does first."""
    _die_with(parent)
    # tqdm's own lock is a semaphore of the system, of which Python complains when it was killed.
    tqdm.set_lock(threading.RLock())


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the one that started it is gone.

    One that outlived the holder of the lock would write into a folder that the next one sweeps.
    """
    # Who is asked to stop at the terminal asks the others; they end without a traceback.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
