"""Who extracts a build, where it is more than one process, and how they come to be.

On one machine torch's elastic launcher starts a supervisor for each worker; several machines are
ranks that torchrun or srun has started.  Either way one process plans, watches and seals.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from dflash_cache.board import Board
from dflash_cache.config import BuildConfig
from dflash_cache.devices import Group
from dflash_cache.errors import DFlashError, ToldElsewhere
from dflash_cache.job_file import job_file
from dflash_cache.launcher import ProcessDied, Stopped, launch, number_here, settle
from dflash_cache.meeting import STORE_IS_GONE, first_line, open_store
from dflash_cache.progress import Display
from dflash_cache.ranks import Meeting, Rank
from dflash_cache.schema import Manifest
from dflash_cache.watch import Watch, watching
from dflash_cache.workers import Seat, connect, supervise, wait_for_end

LAST_RANKS = 60.0  # seconds that rank 0 keeps the store for those who have not heard the end
ALL_KEPT = "all committed units are kept. Run the same command again"

Crowd = Callable[[Path], None]  # has the job in a file done, and returns when it is over


@dataclass(frozen=True, kw_only=True, eq=False)
class Team:
    """Processes that can be given work."""

    board: Board
    crowd: Crowd

    def perform(
        self, work: Callable[..., Any], *arguments: Any, folder: Path, display: Display
    ) -> Any:
        """Have `work(crew, *arguments)` run in every process, and watch them.

        Returns the evidence that the first worker left on the board.  A `DFlashError` comes back
        as itself, whoever met it.
        """
        if (error := self.board.failure()) is not None:
            raise error
        watch = Watch(self.board, display)
        with job_file(folder, (work, arguments)) as path, watching(watch):
            self.crowd(path)
        if not self.board.is_finished():
            raise self.board.failure() or DFlashError(f"the workers ended early; {ALL_KEPT}")
        return self.board.evidence()


# --- one machine --------------------------------------------------------------------------------


def on_this_machine(groups: Sequence[Group], config: BuildConfig) -> Team:
    """One worker for each group of devices, started by torch's elastic launcher."""
    meeting = Meeting(host="localhost", port=0, prefix="dflash")
    store = open_store(meeting, hosts=True)
    meeting = Meeting(host="localhost", port=store.port, prefix="dflash")
    board = Board(PrefixStore(f"{meeting.prefix}/board", store), world=len(groups))
    processes = sum(map(len, groups))
    seat = partial(
        Seat,
        world=len(groups),
        meeting=meeting,
        config=config,
        threads=max(1, torch.get_num_threads() // processes),
    )

    def crowd(path: Path) -> None:
        _launch([seat(number=i, group=group, job=path) for i, group in enumerate(groups)])

    return Team(board=board, crowd=crowd)


def _launch(seats: list[Seat]) -> None:
    """Start a supervisor for every seat, and wait until all have ended."""
    try:
        launch(_supervise_launched, seats, count=len(seats))
    except Stopped as stop:
        raise DFlashError(f"stopped by {stop}; {ALL_KEPT}") from None
    except ProcessDied as died:
        raise DFlashError(
            f"the supervisor of worker {died.number} died (exit code {died.code}); {ALL_KEPT}"
        ) from None


def _supervise_launched(parent: int, seats: list[Seat]) -> None:
    settle(parent)
    seat = seats[number_here()]
    board = connect(seat.meeting, world=seat.world)
    supervise(seat, board)
    wait_for_end(seat, board)


# --- several machines ---------------------------------------------------------------------------

FindGroup = Callable[[], Group]  # the devices of this rank, or why it has none


def as_first_rank(
    rank: Rank, find_group: FindGroup, config: BuildConfig, build: Callable[[Team], Manifest]
) -> Manifest:
    """Rank 0 alone plans and seals: it builds with a team of all ranks, which hear the end."""
    board = connect(rank.meeting, world=rank.world, hosts=rank.hosts)
    with _lost_store_is_told("the launcher's store is gone"):
        return _as_first_rank(rank, find_group, config, build, board)


def _as_first_rank(
    rank: Rank,
    find_group: FindGroup,
    config: BuildConfig,
    build: Callable[[Team], Manifest],
    board: Board,
) -> Manifest:
    try:
        group = find_group()

        def crowd(path: Path) -> None:
            seat = _seat_of(rank, group, config, path)
            board.set_text("job", path.name)
            supervise(seat, board)
            wait_for_end(seat, board)

        manifest = build(Team(board=board, crowd=crowd))
    except BaseException as error:
        told = error if isinstance(error, DFlashError) else DFlashError(f"rank 0: {error!r}")
        board.end_badly(told)
        raise
    else:
        board.end_well(manifest.to_bytes().decode())
        return manifest
    finally:
        if rank.hosts:
            _wait_for_last_ranks(board)


def _seat_of(rank: Rank, group: Group, config: BuildConfig, job: Path) -> Seat:
    return Seat(
        number=rank.number,
        world=rank.world,
        group=group,
        meeting=rank.meeting,
        job=job,
        config=config,
    )


def _wait_for_last_ranks(board: Board) -> None:
    """The store ends with this process; the others have to hear the end of the build first."""
    until = time.monotonic() + LAST_RANKS
    while time.monotonic() < until:
        if all(board.has_left(number) for number in range(1, board.world)):
            return
        time.sleep(0.05)


def take_part(rank: Rank, find_group: FindGroup, config: BuildConfig) -> Manifest:
    """What every other rank does: one worker, until rank 0 has sealed the cache."""
    board = connect(rank.meeting, world=rank.world)
    with _lost_store_is_told(f"rank {rank.number} on {socket.gethostname()}: rank 0 is gone"):
        try:
            return _take_part(rank, find_group, config, board)
        except DFlashError as error:
            # Told here too: a launcher may end rank 0 for it, before that has looked at the board.
            board.fail(error)
            raise
        except BaseException as error:
            board.bury(rank.number, f"its supervisor ended: {error!r}")
            raise
        finally:
            board.leave(rank.number)


@contextlib.contextmanager
def _lost_store_is_told(what: str) -> Iterator[None]:
    try:
        yield
    except STORE_IS_GONE as error:
        raise DFlashError(f"{what} ({first_line(error)}); {ALL_KEPT}") from None


def _take_part(rank: Rank, find_group: FindGroup, config: BuildConfig, board: Board) -> Manifest:
    group, worked = find_group(), False
    while (sealed := _sealed(board)) is None:
        job = board.text("job")
        if job is not None and not worked:
            supervise(_seat_of(rank, group, config, config.out / job), board)
            worked = True
        board.beat(rank.number)
        time.sleep(0.2)
    return Manifest.from_bytes(sealed.encode(), where="the manifest of rank 0")


def _sealed(board: Board) -> str | None:
    try:
        return board.end()
    except DFlashError as error:
        raise ToldElsewhere(str(error)) from None
