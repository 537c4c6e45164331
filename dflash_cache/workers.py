"""A worker's processes, and the supervisor that looks after them.

A supervisor is a light process that torch's elastic launcher, torchrun or srun has started.  It
starts the worker as its child (one process for every device of the worker), and when that dies it
gives free on the board what the worker held, and stays: launchers end a whole run when one of the
processes that they started ends badly.
"""

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from dflash_cache.board import Board, OtherWorkerFailed
from dflash_cache.config import BuildConfig
from dflash_cache.devices import Group
from dflash_cache.errors import DFlashError
from dflash_cache.job_file import read_job
from dflash_cache.launcher import settle
from dflash_cache.meeting import STORE_IS_GONE, first_line, open_store
from dflash_cache.member import Member
from dflash_cache.ranks import Meeting

BEAT = 2.0  # seconds between two signs of life of a supervisor
# Seconds that a worker has to end by itself: when another one has failed it commits what it has
# begun, when all is done there is nothing left for it.
GRACE, GRACE_WHEN_DONE = 30.0, 5.0


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where a worker sits: its number, its devices, and where it finds the others."""

    number: int
    world: int
    group: Group
    meeting: Meeting
    job: Path
    config: BuildConfig  # as this machine was told; places may have other names on another one
    threads: int | None = None  # of each of its processes; None: as torch finds best


@dataclass(frozen=True, kw_only=True, eq=False)
class Crew:
    """A build's workers, as a process of one of them sees them."""

    seat: Seat
    board: Board
    index: int  # of this process in its worker; 0 leads the others

    @property
    def device(self) -> str:
        return self.seat.group[self.index]

    @property
    def shared(self) -> bool:
        """Whether the worker's processes run one target together."""
        return len(self.seat.group) > 1

    def member(self, lengths: Sequence[int]) -> Member:
        return Member(self.board, self.seat.number, lengths=lengths)


def connect(meeting: Meeting, *, world: int, hosts: bool = False) -> Board:
    """The board of a build; with `hosts`, this process keeps it for the others."""
    store = open_store(meeting, hosts=hosts)
    return Board(PrefixStore(f"{meeting.prefix}/board", store), world=world)


# --- a supervisor -------------------------------------------------------------------------------


def supervise(seat: Seat, board: Board) -> None:
    """Run the worker of a seat; when it dies, the board knows how, and the others do its units."""
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_run, args=(os.getpid(), seat, index), name=f"worker-{seat.number}")
        for index in range(len(seat.group))
    ]
    try:
        for process in processes:
            process.start()
        how = _end_of(processes, seat, board)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    if how is None and not _is_over(board):
        how = "it ended before its work was done"
    if how is not None:
        board.bury(seat.number, how)


def _is_over(board: Board) -> bool:
    return board.is_finished() or board.failure() is not None


def _end_of(processes: Sequence[BaseProcess], seat: Seat, board: Board) -> str | None:
    """Wait for a worker's end; None where it is a good one, or the build is over anyway."""
    over = None
    while True:
        alive = [process.sentinel for process in processes if process.exitcode is None]
        connection.wait(alive, timeout=BEAT)
        board.beat(seat.number)
        # Those that share a target end because one did: a signal is no consequence of that.
        ends = [(process.exitcode, index) for index, process in enumerate(processes)]
        bad = [(code, index) for code, index in ends if code]
        if bad:
            return _told(*min(bad), seat, board)
        if processes[0].exitcode == 0:
            return None  # those that follow it wait for its next word
        if _is_over(board):
            over = over or time.monotonic()
            if time.monotonic() - over > (GRACE_WHEN_DONE if board.is_finished() else GRACE):
                return None


def _told(code: int, index: int, seat: Seat, board: Board) -> str:
    how = f"signal {-code}" if code < 0 else board.last_words(seat.number) or f"exit code {code}"
    return f"{how} on {seat.group[index]}" if len(seat.group) > 1 else how


def wait_for_end(seat: Seat, board: Board) -> None:
    """Stay while others work: who looks at this process takes its end for its worker's."""
    while not _is_over(board):
        board.beat(seat.number)
        time.sleep(0.2)


# --- a worker -----------------------------------------------------------------------------------


def _run(parent: int, seat: Seat, index: int) -> None:
    """A process of a worker, from its start to its end."""
    settle(parent)
    if seat.threads is not None:
        torch.set_num_threads(seat.threads)
    board = connect(seat.meeting, world=seat.world)
    try:
        if seat.group[index].startswith("cuda"):
            torch.cuda.set_device(seat.group[index])
        if len(seat.group) > 1:
            _meet(seat, index)
        work, arguments = read_job(seat.job)
        work(Crew(seat=seat, board=board, index=index), *arguments)
    except OtherWorkerFailed:
        pass
    except DFlashError as error:
        board.fail(error)
    except STORE_IS_GONE:
        os._exit(1)  # and with it whoever could be told
    except Exception as error:
        # A lost GPU may hang whatever comes at the end of a program: say why, and be gone.
        traceback.print_exc()
        board.say_last_words(seat.number, f"{type(error).__name__}: {first_line(error)}")
        sys.stderr.flush()
        os._exit(1)
    if len(seat.group) > 1:
        _part(index)


def _meet(seat: Seat, index: int) -> None:
    from dflash_cache import lockstep  # not needed by supervisors, which are to be light

    store = PrefixStore(
        f"{seat.meeting.prefix}/group-{seat.number}", open_store(seat.meeting, hosts=False)
    )
    lockstep.meet(store, index=index, size=len(seat.group), device=torch.device(seat.group[index]))


def _part(index: int) -> None:
    """The end of a process of several: nobody is left to take the group apart with."""
    from dflash_cache import lockstep

    if index == 0:
        lockstep.say_over()
    sys.stderr.flush()
    os._exit(0)
