"""A trial of a sweep: a run of `dflash fit` on one device, in a process of its own.

What it says goes into its log; how it ended, to the process that started it, which asks it to save
and end by SIGTERM.  It dies with that process.
"""

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from dflash_cache.errors import DFlashError
from dflash_cache.launcher import settle
from dflash_cache.meeting import first_line
from dflash_cache.reader import Reader
from dflash_fit import checkpoint, loop
from dflash_fit.config import FitConfig
from dflash_fit.shared_reader import open_shared
from dflash_fit.sound import Flawed, read_record
from dflash_fit.world import World


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a trial's process is told."""

    name: str
    config: FitConfig
    device: str
    address: str  # of the shared reads
    halt: int  # the step after which it ends, measured
    stop_at: int | None  # one after which it ends before that, only saved
    log: Path


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a trial's process ended."""

    failed: str | None  # why, or None
    stopped: bool  # by a signal, before it could say anything


Life = Callable[[int, Task, Connection], None]


class Started:
    """A trial's process, as the one that started it sees it; `life` is a function of a module."""

    def __init__(self, task: Task, *, life: Life | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self.task = task
        self.ear, mouth = context.Pipe(duplex=False)
        # PR_SET_PDEATHSIG goes by threads: only the main thread may start processes.
        self.process = context.Process(target=life or live, args=(os.getpid(), task, mouth))
        with deaf_to_the_terminal():
            self.process.start()
        mouth.close()

    @property
    def sentinel(self) -> int:
        """Ready once the process is over."""
        return self.process.sentinel

    def ask(self) -> None:
        """To save and end."""
        with suppress(ValueError):  # its end has just been noted
            self.process.terminate()

    def kill(self) -> None:
        with suppress(ValueError):
            self.process.kill()

    def ended(self) -> Ended | None:
        """How it ended; None as long as it has not."""
        if self.process.is_alive():
            return None
        self.process.join()
        told: tuple[str | None] | None = None
        with suppress(EOFError):
            told = self.ear.recv() if self.ear.poll() else None
        self.ear.close()
        code = self.process.exitcode
        self.process.close()
        if told is not None:
            return Ended(failed=told[0], stopped=False)
        return Ended(failed=how_it_died(code or 0), stopped=code == -signal.SIGTERM)


@contextmanager
def deaf_to_the_terminal() -> Iterator[None]:
    """A process that is started in it never hears SIGINT; this one does, a moment later.

    Ctrl-C goes to all processes of the terminal's group, also to one that still imports.
    """
    resource_tracker.ensure_running()  # else `start` does this, and unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def how_it_died(code: int) -> str:
    if code >= 0:
        return f"its process ended with exit code {code}"
    hint = "; the system may have been out of memory" if code == -signal.SIGKILL else ""
    return f"its process was ended by {signal.Signals(-code).name}{hint}"


# --- in the process of the trial ------------------------------------------------------------------


def live(parent: int, task: Task, mouth: Connection) -> None:
    """The life of the process."""
    settle(parent)
    # Ctrl-C at the terminal is for the parent alone: it asks the trials, and once.
    os.setpgid(0, 0)
    speak_into(task.log)
    sys.stderr.write(f"--- {time.strftime('%F %T')}: {task.name} on {task.device}\n")
    failed = reason_of(lambda: train(task))
    mouth.send((failed,))
    mouth.close()


def speak_into(log: Path) -> None:
    """Whatever this process prints, and whatever libraries print in it, goes into the file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
    os.close(file)


def reason_of(work: Callable[[], object]) -> str | None:
    """Do the work; why it failed, in one line, or None."""
    try:
        work()
    except DFlashError as error:
        sys.stderr.write(f"Error: {error}\n")
        return str(error)
    except torch.OutOfMemoryError:
        traceback.print_exc()
        return (
            "the GPU is out of memory; fewer trials at once (--trials-per-device) need less, and "
            "where it had the GPU to itself a smaller --token-budget or --anchor-microbatch"
        )
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def train(task: Task) -> dict[str, Any]:
    """The same as `dflash fit` alone, but for the reader."""
    device = torch.device(task.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # trials share the cores; sums do not depend on how many run
    return loop.train_in(
        World.alone(device),
        task.config,
        stop=lambda step: step == task.stop_at,
        halt=task.halt,
        open_reader=lambda config: reader_of(config, task),
    )


def reader_of(config: FitConfig, task: Task) -> Reader:
    return open_shared(config.cache, task.address, task.name, begins=begins(config.out))


def begins(run: Path) -> tuple[int, int]:
    """Epoch and number of the first pack that a run is going to train on."""
    for path in reversed(checkpoint.checkpoints(run)):
        with suppress(Flawed):  # the run goes on from the one before
            state = read_record(path).state
            return int(state["epoch"]), int(state["index"])
    return 0, 0
