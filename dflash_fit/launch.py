"""How the ranks of a training job start, and how they end: all together, for one reason.

On one machine torch's elastic launcher starts a process for each device; several machines are
ranks that torchrun or srun has started.
"""

import atexit
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
from torch import distributed
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from dflash_cache.errors import DFlashError, ToldElsewhere
from dflash_cache.launcher import ProcessDied, Stopped, launch, number_here, settle
from dflash_cache.meeting import STORE_IS_GONE, first_line, open_store
from dflash_cache.ranks import Meeting, Rank
from dflash_cache.signals import heard_by
from dflash_fit.circle import KEPT, STORE_GONE, Depart, tell
from dflash_fit.errors import FitError
from dflash_fit.verdict import Verdict
from dflash_fit.world import RANK_TIMEOUT, World, meet, own_client

# Seconds that a rank waits for a better reason when its own error may come of another's end.
CONSEQUENCE = 6.0
# Seconds that rank 0 keeps the store for those who have not heard the end, a good one or another.
LAST_RANKS, LAST_RANKS_OF_FAILURE = 60.0, 10.0
AGENT_SIGNALS = (signal.SIGHUP, signal.SIGQUIT)  # those that end all ranks at once

Config = TypeVar("Config")
Work = Callable[[World, Config], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where a rank sits."""

    rank: int
    size: int
    device: str
    timeout: float

    @property
    def name(self) -> str:
        return _named(self.rank)


def _named(rank: int) -> str:
    return f"rank {rank} on {socket.gethostname()}"


def _unplanned(name: str, error: Exception) -> FitError:
    """What the other ranks are told of what is no `DFlashError`."""
    return FitError(f"{name}: {type(error).__name__}: {first_line(error)}")


# --- one machine ----------------------------------------------------------------------------------


def fit_everywhere(
    work: Work[Config], config: Config, devices: Sequence[str], *, timeout: float = RANK_TIMEOUT
) -> dict[str, Any]:
    """Run `work(world, config)` in a process for each device; returns what rank 0 returned.

    `work` is a function of a module.  A `DFlashError` comes back as itself, whichever rank met it.
    SIGINT and SIGTERM reach the ranks as SIGTERM, and their end is waited for; the second one
    ends all at once.
    """
    meeting = Meeting(host="localhost", port=0, prefix="dflash-fit")
    store = open_store(meeting, hosts=True)
    meeting = replace(meeting, port=store.port)
    job = PrefixStore(meeting.prefix, store)
    seats = [
        Seat(rank=rank, size=len(devices), device=device, timeout=timeout)
        for rank, device in enumerate(devices)
    ]
    threads = max(1, torch.get_num_threads() // len(devices))
    died = None
    with _stop_requests(job, len(devices)) as asked:
        try:
            launch(
                _launched,
                *(meeting, seats, threads, work, config),
                count=len(devices),
                signals=AGENT_SIGNALS,
            )
        except Stopped as stop:
            raise FitError(f"stopped by {stop}; {KEPT}") from None
        except ProcessDied as error:
            died = error
    if job.check(["result"]):  # whatever became of a process after all had done their work
        result: dict[str, Any] = pickle.loads(bytes.fromhex(job.get("result").decode()))
        return result
    raise _reason(job, len(devices), died, asked)


def _reason(job: Store, size: int, died: ProcessDied | None, asked: Sequence[int]) -> DFlashError:
    """Why there is no result: what a rank has said, or how its process ended."""
    reason = Verdict(PrefixStore("verdict", job), rank=0, size=size).read()
    if reason is not None and (died is None or died.number not in reason.lost):
        return reason.error
    if died is None:
        return FitError(f"the ranks ended before their work was done; {KEPT}")
    if asked and died.code == -signal.SIGTERM:
        return _stopped_early(asked[0])
    how = f"exit code {died.code}" if died.code >= 0 else signal.Signals(-died.code).name
    hint = " The system may have been out of memory." if died.code == -signal.SIGKILL else ""
    return FitError(f"{_named(died.number)} is gone ({how}).{hint} {KEPT[0].upper()}{KEPT[1:]}")


def _stopped_early(number: int) -> FitError:
    name = signal.Signals(number).name
    return FitError(f"stopped by {name} before every rank trained; run the same command again")


def _launched(
    parent: int,
    meeting: Meeting,
    seats: Sequence[Seat],
    threads: int,
    work: Work[Config],
    config: Config,
) -> None:
    """A rank on this machine, from its start to its end."""
    settle(parent)
    # Ctrl-C at the terminal is for the parent alone: it asks the ranks, and once.
    os.setpgid(0, 0)
    seat = seats[number_here()]
    torch.set_num_threads(threads)
    job = PrefixStore(meeting.prefix, open_store(meeting, hosts=False))
    job.set(f"pid/{seat.rank}", str(os.getpid()))
    try:
        _take_part(seat, work, config, job, depart=_leave)
    except DFlashError as error:
        _leave(error, True)  # the parent tells it


def _leave(_error: DFlashError, _first: bool) -> NoReturn:
    _leave_badly()


def _leave_badly() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


@contextmanager
def _stop_requests(job: Store, size: int) -> Iterator[list[int]]:
    """SIGINT and SIGTERM are passed on to the ranks; those that came.

    Those that this process ignores it does not hear, as under nohup.
    """
    asked: list[int] = []

    def hear(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        keys = [f"pid/{rank}" for rank in range(size)]
        ranks = [int(job.get(key)) for key in keys if job.check([key])]
        for process in ranks:
            _send(process, signal.SIGTERM if len(asked) == 1 else signal.SIGKILL)
        if len(asked) > 1:
            raise SystemExit(128 + number)
        if len(ranks) < size:
            raise _stopped_early(number)

    with heard_by(hear):
        yield asked


def _send(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


# --- several machines -----------------------------------------------------------------------------


def _job_of(rank: Rank, store: Store) -> Store:
    return PrefixStore(f"{rank.meeting.prefix}/fit", store)


@contextmanager
def joining(rank: Rank) -> Iterator[None]:
    """Around what a rank does before `fit_as_rank`: if it fails, all end for its reason.

    The others would wait for it until their patience ends.
    """
    try:
        yield
    except DFlashError as error:
        told = type(error)(f"{_named(rank.number)}: {error}")
        _end_all(rank, told)
        raise told from None
    except Exception as error:
        _end_all(rank, _unplanned(_named(rank.number), error))
        raise


def _end_all(rank: Rank, error: DFlashError) -> None:
    """End a job that this rank does not join; raises `ToldElsewhere` if another has ended it."""
    # At once: rank 0 may not be there yet, or never come, and then the error itself waits.
    sys.stderr.write(f"{error} (telling the other ranks)\n")
    try:
        store = open_store(rank.meeting, hosts=rank.hosts)
        own = PrefixStore("verdict", _job_of(rank, store))
        verdict = Verdict(own, rank=rank.number, size=rank.world)
        first = verdict.give(error)
    except (DFlashError, *STORE_IS_GONE):
        return  # and nobody who could be told
    # Some may be about to come, and torchrun ends, maybe with the store, when a rank does.
    seconds = LAST_RANKS if rank.hosts else LAST_RANKS_OF_FAILURE
    _Ends(verdict, keeps_store=True).part(seconds=seconds)
    if not first:
        raise ToldElsewhere(str(error)) from None


def fit_as_rank(
    work: Work[Config], config: Config, rank: Rank, device: str, *, timeout: float = RANK_TIMEOUT
) -> dict[str, Any]:
    """Run `work(world, config)` as one of the ranks that torchrun or srun has started.

    All return what rank 0 returned.  A `DFlashError` is raised where it was met, and the other
    ranks raise `ToldElsewhere`; those that cannot be called back from a collective exit with 1.
    """
    seat = Seat(rank=rank.number, size=rank.world, device=device, timeout=timeout)
    store = open_store(rank.meeting, hosts=rank.hosts)
    job = _job_of(rank, store)
    verdict = Verdict(own_client(job, "verdict"), rank=rank.number, size=rank.world)
    ends = _Ends(verdict, keeps_store=rank.hosts)
    try:
        result = _take_part(seat, work, config, job, depart=ends.depart)
    except BaseException:
        ends.part(seconds=LAST_RANKS_OF_FAILURE)
        if distributed.is_initialized():
            # What gloo and NCCL do at the end of a program hangs or aborts it in a broken group.
            atexit.register(_leave_badly)
        raise
    ends.part(seconds=LAST_RANKS)
    return result


@dataclass(frozen=True)
class _Ends:
    """The end of a rank that others have started: the store may end with its process."""

    verdict: Verdict
    keeps_store: bool

    def part(self, *, seconds: float) -> None:
        try:
            self.verdict.heard()
            if self.keeps_store:
                reason = self.verdict.read()
                self.verdict.await_all_heard(seconds=seconds, but=reason.lost if reason else ())
        except STORE_IS_GONE:
            pass  # and with it those who could be waited for

    def depart(self, error: DFlashError, first: bool) -> NoReturn:
        if first:
            tell(error)
        self.part(seconds=LAST_RANKS_OF_FAILURE)
        _leave_badly()


# --- every rank -----------------------------------------------------------------------------------


def _take_part(
    seat: Seat, work: Work[Config], config: Config, job: Store, *, depart: Depart
) -> dict[str, Any]:
    """The work of a rank; what goes wrong in it is the reason for all, if it is the first."""
    verdict = Verdict(PrefixStore("verdict", job), rank=seat.rank, size=seat.size)
    world = None
    try:
        device = torch.device(seat.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        world = meet(
            job,
            rank=seat.rank,
            size=seat.size,
            device=device,
            timeout=seat.timeout,
            depart=depart,
        )
        result = world.share(work(world, config))
        with heard_by(signal.SIG_IGN):  # whoever asks for the end now gets it anyway
            if world.first:
                job.set("result", pickle.dumps(result).hex())
            world.part()
        return result
    except ToldElsewhere:
        raise
    except DFlashError as error:
        _give(verdict, error, world)
        raise
    except Exception as error:
        if (reason := _reason_of_another(seat, verdict, error)) is not None:
            _release(world)  # or wait here for the end, if it is this rank's circle that gave it
            raise reason from None
        told = _unplanned(seat.name, error)
        traceback.print_exc()
        _give(verdict, told, world)
        raise told from None
    except BaseException as error:  # an interrupt, or an end that the program wants
        told = FitError(f"{seat.name} was stopped ({type(error).__name__}); {KEPT}")
        with suppress(ToldElsewhere):
            _give(verdict, told, world)
        raise


def _release(world: World | None) -> None:
    if world is not None and world.circle is not None:
        world.circle.release()


def _give(verdict: Verdict, error: DFlashError, world: World | None) -> None:
    """Say why the job ends; where another has done so before, this rank only ends badly too."""
    _release(world)
    try:
        first = verdict.give(error)
    except STORE_IS_GONE:
        return
    if not first and (reason := verdict.read()) is not None:
        raise ToldElsewhere(str(reason.error)) from None


def _reason_of_another(seat: Seat, verdict: Verdict, error: Exception) -> DFlashError | None:
    """Collectives fail when another rank does; that one's reason may come a moment later."""
    may_follow = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
    try:
        reason = verdict.await_reason(seconds=CONSEQUENCE) if may_follow else verdict.read()
    except STORE_IS_GONE:
        # With the store goes whoever could be told, so everyone tells it.
        return FitError(f"{seat.name}: {STORE_GONE}") if may_follow else None
    return ToldElsewhere(str(reason.error)) if reason else None
