"""What ranks do in tests of how they start and end: a module that is imported in a moment."""

import os
import signal
import sys
import time
from pathlib import Path

from dflash_cache.errors import DFlashError
from dflash_cache.ranks import find_rank
from dflash_fit.agreement import Agreement
from dflash_fit.errors import RunFolderError
from dflash_fit.launch import fit_as_rank, fit_everywhere
from dflash_fit.world import World


def talk(world: World, config: dict) -> dict:
    """Everything that ranks say to each other, by ranks of unlike speed."""
    asked, answers = Agreement(world), []
    for step in range(20):
        world.pulse.tick(step)
        time.sleep(0.005 * ((world.rank + step) % 3))
        answers.append(asked.any(world.rank == 1 and step == 7))
    late = Agreement(world)
    left = [late.any(world.rank == 2) for _ in range(2)] + [late.drain()]
    world.barrier()
    mine = {
        "rank": world.rank,
        "shared": world.share(f"from {world.rank}"),
        "answers": answers,
        "left": left,
        "group": os.getpgid(0) == os.getpid(),
    }
    return {**config, "told": world.gather(mine), "by": world.rank}


def fail(world: World, config: dict) -> dict:
    """Rank 1 meets an error of stage two; the other one sits in a collective."""
    if world.rank == 1:
        raise RunFolderError("run: it is that of another drafter")
    world.gather(None)
    return {}


def break_down(world: World, config: dict) -> dict:
    """Rank 1 meets what nobody has planned; the other one sleeps and hears nothing."""
    if world.rank == 1:
        raise ValueError("a number that is none\nand more")
    time.sleep(100)
    return {}


def be_killed(world: World, config: dict) -> dict:
    """The last rank is killed; one waits for it, the others hear nothing, not even a signal."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if world.rank == world.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if world.rank == 1:
        time.sleep(100)
    world.gather(None)
    return {}


def lose_the_first(world: World, config: dict) -> dict:
    """Rank 0 is killed, and the store with it; the other one waits for it."""
    if world.first:
        os.kill(os.getpid(), signal.SIGKILL)
    world.gather(None)
    return {}


def get_stuck(world: World, config: dict) -> dict:
    """Rank 1 gets on no more; the other one may rest before it waits."""
    world.pulse.tick(4)
    with world.pulse.resting():
        time.sleep(1.5 * config["timeout"])  # both: no fault of anyone
    world.pulse.tick(5 - world.rank)
    time.sleep(100)
    return {}


def train(world: World, config: dict) -> dict:
    """Steps until it is asked to stop; with `deaf`, it hears and goes on all the same."""
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, _: asked.append(got))
    agreement, step = Agreement(world), 0
    while not agreement.any(bool(asked) and not config["deaf"]):
        world.pulse.tick(step)
        step += 1
        time.sleep(0.01)
        Path(config["folder"], f"{world.rank}-{config['deaf']}").write_text(str(os.getpid()))
    agreement.drain()
    return {"asked": world.gather(asked), "steps": world.gather(step)}


def await_all(folder: Path) -> None:
    """Past the imports of all ranks, which may take one of them seconds longer."""
    (folder / os.environ["RANK"]).write_text("here")
    while len(list(folder.iterdir())) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)


def main(way: str, name: str, timeout: str = "60", folder: str = "", deaf: str = "") -> None:
    """`everywhere` is the parent of ranks; `rank` is one that this environment describes."""
    config = {"folder": folder, "deaf": deaf, "timeout": float(timeout)}
    work = globals()[name]
    try:
        if way == "everywhere":
            found = fit_everywhere(
                work, config, ["cpu"] * (1 if deaf else 2), timeout=float(timeout)
            )
        else:
            rank = find_rank(os.environ)
            assert rank is not None
            if folder:
                await_all(Path(folder))
            found = fit_as_rank(work, config, rank, "cpu", timeout=float(timeout))
    except DFlashError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    sys.stdout.write(f"{found}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
