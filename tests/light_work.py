"""What workers do in tests that need no target: a module that is imported in a moment."""

import os
import signal
import time

from dflash_cache.errors import ProofError
from dflash_cache.workers import Crew


def die_in_its_own_way(crew: Crew) -> None:
    """Worker 0 by a signal, the other one by an exception that nobody has planned."""
    if crew.seat.number == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    raise RuntimeError("CUDA error: an illegal memory access\nand what else CUDA tells")


def fail_in_one(crew: Crew, told: str) -> None:
    """Worker 1 finds that something is wrong; worker 0 works on until it hears of it."""
    if crew.seat.number == 1:
        raise ProofError(told)
    while True:
        crew.board.stop_if_failed()
        time.sleep(0.01)


def end_early(crew: Crew) -> None:
    """As a bug of ours would."""
