"""Live numbers of a run in TensorBoard, Weights & Biases and trackio: the lines of metrics.jsonl.

RUN/
  tensorboard/         event files
  trackers/NAME.json   the id under which a tracker knows this run, and the last step it was told

Each tracker has a thread of its own: a login, a network or a disk that hangs does not hold up
training.  One that fails says so once and is left out.  A tracker is first told what
metrics.jsonl has and it has not, so it loses nothing by a crash or by joining late.

A resumed run has lost the lines behind its checkpoint and writes them again.  TensorBoard hides
its old points from there on.  The other two cannot take back what they were told: they keep it,
and get only what comes after it.
"""

import contextlib
import importlib.util
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from tqdm import tqdm

from dflash_cache import disk
from dflash_cache.errors import ConfigError, DFlashError
from dflash_fit.runs import METRICS, read_lines

Line = dict[str, Any]
NONE = "none"  # the name that asks for no tracker
PROJECT = "dflash"  # in wandb and trackio, where WANDB_PROJECT or TRACKIO_PROJECT names no other
LOGIN = 60.0  # seconds for somebody to answer wandb's question for a key; there may be nobody
# Seconds that the end of training waits for what is still on its way; fewer after an error.
PATIENCE, HURRY = 30.0, 5.0


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a tracker is opened with."""

    run: Path
    id: str
    options: dict[str, Any]
    told: int  # the last step that the tracker keeps points of, -1 for none


class Tracker(Protocol):
    """Where numbers go.  Any call may take long, or raise whatever it likes."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """The scalars of one line."""

    def flush(self) -> None:
        """Show them: no other line is waiting."""

    def close(self, *, failed: bool) -> None:
        """Send what is left; `failed`: training ended by an error."""


def scalars(line: Line) -> dict[str, float]:
    """The numbers of a line by name, `train/loss`; of lists `train/slot_accuracy/01` and so on.

    Lists begin with 01: those of a run are per slot, and slot 0 is the anchor.  Words and missing
    values are left out.
    """
    rest = {key: value for key, value in line.items() if key not in ("kind", "step")}
    return dict(_numbers(line["kind"], rest))


def _numbers(name: str, value: object) -> Iterator[tuple[str, float]]:
    if isinstance(value, int | float):
        yield name, float(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(f"{name}/{key}", item)
    elif isinstance(value, list | tuple):
        # Two digits: names are sorted as text, and curves of other block sizes have the same.
        for number, item in enumerate(value, start=1):
            yield from _numbers(f"{name}/{number:02d}", item)


class TensorBoard:
    """A new event file.  Readers hide the points of earlier files after the step `told`."""

    def __init__(self, start: Start) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog
        from tensorboardX.summary import text

        folder = start.run / "tensorboard"
        folder.mkdir(exist_ok=True)
        # Not the package's SummaryWriter: once its thread has failed, say at a full disk, its
        # next calls wait for ever.  The suffix: its names repeat within a second, and files are
        # read in the order of their names.
        self.file = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        self._write(start.told + 1, session_log=SessionLog(status=SessionLog.START))
        if start.told < 0:
            options = json.dumps(start.options, indent=2, default=str)
            self._write(0, summary=text("options", f"```json\n{options}\n```"))

    def log(self, step: int, values: dict[str, float]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        found = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step, summary=Summary(value=found))

    def flush(self) -> None:
        self.file.flush()  # and fsync, which is slow

    def close(self, *, failed: bool) -> None:
        self.file.close()

    def _write(self, step: int, **what: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self.file.write_event(Event(wall_time=time.time(), step=step, **what))


class Wandb:
    """A run of Weights & Biases; its files lie in RUN/wandb."""

    def __init__(self, start: Start) -> None:
        import wandb

        wandb.login(timeout=LOGIN)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            dir=str(start.run),
            id=start.id,
            name=start.run.name,
            config=start.options,
            allow_val_change=True,
            resume="allow",
            reinit="create_new",  # trials of a sweep share a process
            settings={"console": "off"},  # what training prints is not wandb's
        )
        if self.run.disabled:
            raise DFlashError("it is disabled: run `wandb login`, or see WANDB_MODE")
        # Its own step only counts on, and drops what comes late: a measurement after a crash.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log({"step": step, **values})

    def flush(self) -> None:
        """It sends them when it likes."""

    def close(self, *, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class Stdout:
    """Standard output for all threads but those of trackers, whose words go to standard error."""

    def __init__(self, stdout: TextIO) -> None:
        self.stdout = stdout

    def __getattr__(self, name: str) -> Any:
        theirs = isinstance(threading.current_thread(), Courier)
        return getattr(sys.stderr if theirs else self.stdout, name)


class Trackio:
    """A run of trackio: on this machine, or where its TRACKIO_* variables say."""

    def __init__(self, start: Start) -> None:
        import trackio

        # It prints what it does where our JSON goes.  Not undone: it may outlast the training.
        if not isinstance(sys.stdout, Stdout):
            sys.stdout = Stdout(sys.stdout)
        self.run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{start.run.name}-{start.id}",  # it resumes by name, and folders share names
            config=start.options,
            resume="allow",
            embed=False,
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def flush(self) -> None:
        """It sends them when it likes."""

    def close(self, *, failed: bool) -> None:
        self.run.finish()


@dataclass(frozen=True, kw_only=True)
class Kind:
    package: str
    open: Callable[[Start], Tracker]
    forgets: bool  # it can hide points after a step


KINDS = {
    "tensorboard": Kind(package="tensorboardX", open=TensorBoard, forgets=True),
    "wandb": Kind(package="wandb", open=Wandb, forgets=False),
    "trackio": Kind(package="trackio", open=Trackio, forgets=False),
}


def require_trackers(names: Sequence[str]) -> tuple[str, ...]:
    """The trackers that are asked for, each once.

    Raises `ConfigError` for a name that is none, and for a package that is missing.
    """
    if tuple(names) == (NONE,):
        return ()
    for name in names:
        if name not in KINDS:
            raise ConfigError(
                f"--trackers {name}: want some of {', '.join(KINDS)}, or {NONE} alone"
            )
        package = KINDS[name].package
        spec = importlib.util.find_spec(package)
        # A folder that happens to be called `wandb` has no origin.
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"--trackers {name}: the package {package} is not installed; `pip install "
                f"{package}`, or leave {name} out (--trackers {NONE}: no tracker)"
            )
    return tuple(dict.fromkeys(names))


def open_trackers(
    names: Sequence[str], *, run: Path, options: dict[str, Any], step: int | None
) -> "Trackers":
    """The trackers of a run folder, at work from here on.

    `step` is that of the checkpoint that the run goes on from, None where there is none:
    metrics.jsonl must have been cut back to it.  Call this on one rank only.
    """
    return Trackers(
        [Courier(name, run, options=options, step=step) for name in require_trackers(names)]
    )


class Trackers:
    """All trackers of a run: a context that no exception of theirs leaves."""

    def __init__(self, couriers: Sequence["Courier"]) -> None:
        self.couriers = couriers
        for courier in couriers:
            courier.start()

    def log(self, line: Line) -> None:
        """A line that metrics.jsonl has just got.  Returns at once."""
        for courier in self.couriers:
            if courier.is_alive():
                courier.lines.put(line)

    def close(self, *, failed: bool = False) -> None:
        """Let them finish, but not for long."""
        deadline = time.monotonic() + (HURRY if failed else PATIENCE)
        for courier in self.couriers:
            courier.failed = failed
            courier.lines.put(None)
        for courier in self.couriers:
            courier.join(max(0.0, deadline - time.monotonic()))
            if courier.is_alive():
                courier.tell("it is still busy with the last numbers")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)


@dataclass(kw_only=True)
class Memory:
    """What a tracker knows of a run."""

    id: str = field(default_factory=lambda: secrets.token_hex(4))
    told: dict[str, int] = field(default_factory=dict)  # the last step of each kind of line

    def back_to(self, step: int | None) -> Self:
        """Without what came after a step; None: without anything."""
        if step is None:
            return replace(self, told={})
        return replace(self, told={kind: min(last, step) for kind, last in self.told.items()})


class Courier(threading.Thread):
    """Brings lines to one tracker, in order and each once."""

    def __init__(
        self, tracker: str, folder: Path, *, options: dict[str, Any], step: int | None
    ) -> None:
        super().__init__(name=f"tracker {tracker}", daemon=True)
        self.tracker, self.kind, self.folder = tracker, KINDS[tracker], folder
        self.options, self.step = options, step
        self.lines: SimpleQueue[Line | None] = SimpleQueue()
        self.failed = self.told = False

    @property
    def path(self) -> Path:
        return self.folder / "trackers" / f"{self.tracker}.json"

    def run(self) -> None:
        try:
            self.work()
        # Of any kind: they come from packages, networks and disks that we do not know.
        except Exception as error:
            said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self.tell(" ".join(said.split())[:300])

    def work(self) -> None:
        memory = self.recall()
        told = max(memory.told.values(), default=-1)
        start = Start(run=self.folder, id=memory.id, options=self.options, told=told)
        tracker = self.kind.open(start)
        try:
            self.bring(tracker, memory)
        except BaseException:
            # What one that forgets did not flush is hidden, and told again; others keep all.
            if not self.kind.forgets:
                with contextlib.suppress(OSError):  # the disk may be what failed
                    self.remember(memory)
            with contextlib.suppress(Exception):
                tracker.close(failed=True)
            raise
        tracker.close(failed=self.failed)

    def bring(self, tracker: Tracker, memory: Memory) -> None:
        for known in read_lines(self.folder / METRICS)[0]:
            pass_on(tracker, memory, known)
        while True:
            if self.lines.empty():
                tracker.flush()
                self.remember(memory)
            line = self.lines.get()
            if line is None:
                break
            pass_on(tracker, memory, line)
        tracker.flush()
        self.remember(memory)

    def recall(self) -> Memory:
        """An id is on disk before a tracker learns of it: a crash does not make two runs of one."""
        memory = Memory(**json.loads(self.path.read_text())) if self.path.is_file() else Memory()
        if self.kind.forgets:
            memory = memory.back_to(self.step)
        self.path.parent.mkdir(exist_ok=True)
        self.remember(memory)
        return memory

    def remember(self, memory: Memory) -> None:
        disk.write_file(self.path, json.dumps(asdict(memory)).encode())

    def tell(self, reason: str) -> None:
        """Say once that this tracker is left out."""
        if self.told:
            return
        self.told = True
        tqdm.write(
            f"--trackers {self.tracker}: {reason}; left out from here on. Training goes on, "
            f"{self.folder / METRICS} has every number, and a resumed run brings {self.tracker} "
            "what it lacks",
            file=sys.stderr,
        )


def pass_on(tracker: Tracker, memory: Memory, line: Line) -> None:
    """Bring a line, unless the tracker has it."""
    kind, step = line["kind"], line["step"]
    if step > memory.told.get(kind, -1):
        tracker.log(step, scalars(line))
        memory.told[kind] = step
