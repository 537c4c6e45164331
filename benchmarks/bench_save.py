"""How long a checkpoint holds training up, and how long until it is on the disk and read again.

The drafter of Qwen3.6-27B and its optimizer's state (24 GB of random numbers on one GPU) are saved
as `dflash fit` does it.  The first save takes the host memory that all write from.  At the end of
the last one the state is overwritten at once, and what comes back from the disk is compared with
what it was.  The disk has to hold two checkpoints.
"""

import os
import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

import step_data
import torch
from common import add_out, end_on_sigterm, publish, result
from step_data import QWEN_27B, Model, Setup

from dflash_fit.checkpoint import RunState, newest_sound, restore
from dflash_fit.optim import FlatAdamW
from dflash_fit.saver import Saver
from dflash_fit.world import World

TINY = Model(
    name="tiny", hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=32, vocabulary=512,
    layers=2, block_size=4,
)  # fmt: skip


def main() -> None:
    args = parse_args()
    end_on_sigterm()
    step_data.DEVICE = torch.device("cpu" if args.tiny else "cuda:0")
    setup = Setup(TINY if args.tiny else QWEN_27B)
    fill(setup.optimizer)
    shape = {"parameters": setup.optimizer.length, "saves": args.saves, "tiny": args.tiny}
    with tempfile.TemporaryDirectory(prefix="bench_save.", dir=args.folder) as name:
        figures: dict[str, float] = {}
        for part in (measure_save, measure_resume):
            figures |= part(Path(name), setup, args)
            publish(result("save", shape, figures, folder=args.folder), args.out)


def parse_args() -> Namespace:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="disk to write to")
    parser.add_argument("--saves", type=int, default=2, help="checkpoints, the first one included")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU")
    add_out(parser)
    return parser.parse_args()


def fill(optimizer: FlatAdamW) -> None:
    """The same random numbers at every call."""
    generator = torch.Generator(step_data.DEVICE).manual_seed(2)
    for flat in optimizer.flats().values():
        flat.normal_(generator=generator)


def measure_save(run: Path, setup: Setup, args: Namespace) -> dict[str, float]:
    stalls, writes = [], []
    with Saver(run, World.alone(step_data.DEVICE), keep_last=1) as saver:
        for step in range(1, args.saves + 1):
            at = RunState(step=step, epoch=0, index=0, best_step=None, best_acceptance=0.0)
            save = partial(saver.save, setup.drafter, setup.optimizer, at, {}, best=False)
            stalls.append(seconds_of(save))
            if step == args.saves:
                for flat in setup.optimizer.flats().values():
                    flat.zero_()
            writes.append(seconds_of(saver.wait))
            say(f"save {step}: held up for {stalls[-1]:.2f} s, written {writes[-1]:.1f} s later")
        kept = {**saver.part.tensors, **saver.weights.tensors}
        size = sum(tensor.nbytes for tensor in kept.values()) / 1e9
        # What it would be without pieces: from the device into the same memory, which is known.
        live, master = setup.optimizer.master, kept["master"]
        plain = master.nbytes / 1e9 / seconds_of(lambda: master.copy_(live))
    later = stalls[1:] or stalls
    return {
        "save_gb": size,
        "save_stall_s": statistics.median(later),
        "save_stall_first_s": stalls[0],
        "save_copy_gb_s": size / statistics.median(later),
        "plain_copy_gb_s": plain,
        "save_write_s": statistics.median(writes),
    }


def measure_resume(run: Path, setup: Setup, args: Namespace) -> dict[str, float]:
    """The newest checkpoint is checked byte by byte, from a disk that is cold, and read."""
    for path in run.rglob("*.safetensors"):
        with open(path, "rb") as file:  # it was flushed when it was written
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    found = []
    check = seconds_of(lambda: found.append(newest_sound(run).path))
    read = seconds_of(lambda: restore(found[0], setup.optimizer))
    back = {name: flat.clone() for name, flat in setup.optimizer.flats().items()}
    fill(setup.optimizer)
    for name, flat in setup.optimizer.flats().items():
        if not torch.equal(flat, back[name]):
            sys.exit(f"{name}: what was read is not what was saved")
    say(f"resume: checked in {check:.1f} s, read in {read:.1f} s, the same to the last bit")
    return {"resume_check_s": check, "resume_read_s": read}


def seconds_of(action: Callable[[], object]) -> float:
    """Of the host, with nothing on its way on the device before and after."""
    synchronize()
    began = time.perf_counter()
    action()
    synchronize()
    return time.perf_counter() - began


def synchronize() -> None:
    if step_data.DEVICE.type == "cuda":
        torch.cuda.synchronize()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
