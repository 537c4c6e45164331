"""Trials that share one read of a cache, against the same trials one after another.

Both ways are what a user would start: a process for each trial, with its start, its compiling and
its measuring.  The sweep goes first; what it compiled is found on the disk by the others, which is
to their good.  `bytes_read_ratio` is what the sweep read from the cache over what the largest
trial read alone; `wall_over_sequential` the time from the start of the sweep to its end over that
of all trials one after another.  The cache is read past the page cache unless `--cached` is given.
"""

import json
import multiprocessing
import os
import tempfile
import time
from argparse import ArgumentParser, Namespace
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from common import add_out, end_on_sigterm, publish, result

from dflash_cache import reader
from dflash_cache.launcher import settle
from dflash_cache.reader import CacheReader
from dflash_fit import loop, sweep, trial
from dflash_fit.config import FitConfig
from dflash_fit.runs import read_lines
from dflash_fit.sweep_plan import SweepConfig, plan_sweep
from dflash_fit.sweep_record import read_story
from dflash_fit.world import World

NEVER = 10**9
FULL = {
    "num_layers": 3, "token_budget": 16_384, "anchors": 1024, "eval_tokens": 50_000,
    "log_every": 10,
}  # fmt: skip
TINY = {
    "num_layers": 1, "token_budget": 256, "anchors": 16, "anchor_microbatch": 8, "loss_chunk": 16,
    "held_out": 0.2, "precision": "fp32", "log_every": 1,
}  # fmt: skip


def main() -> None:
    args = parse_args()
    end_on_sigterm()
    os.environ.setdefault("TQDM_DISABLE", "1")
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="bench_sweep.", dir=args.folder) as name:
        folder = Path(name)
        file = write_sweep(folder / "sweep.toml", args)
        for part in (sweep_part, sequential_part):
            figures |= part(args, file, folder, figures)
            publish(result("sweep", shape_of(args, file), figures, folder=args.cache), args.out)


def parse_args() -> Namespace:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300, help="updates of each trial")
    parser.add_argument("--trials", type=int, default=4, help="up to 16")
    parser.add_argument("--devices", default=None, help="as of `dflash fit` (default: auto)")
    parser.add_argument("--folder", type=Path, default=None, help="where runs are written")
    parser.add_argument("--cached", action="store_true", help="read through the page cache")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU")
    add_out(parser)
    return parser.parse_args()


def write_sweep(path: Path, args: Namespace) -> Path:
    """Trials over block size, subset of the target layers and learning rate."""
    layers = CacheReader(args.cache).identity.target_layer_ids
    subsets = [layers, layers[::2]]
    blocks = (3, 4) if args.tiny else (16, 8)
    axes = list(product((6e-4, 3e-4, 1e-3, 2e-3), blocks, subsets))[: args.trials]
    common = {
        **(TINY if args.tiny else FULL),
        "epochs": NEVER // 1000,
        "max_steps": args.steps,
        "eval_every": NEVER,
        "checkpoint_every": NEVER,
        "trackers": [],
        "devices": args.devices or ("cpu" if args.tiny else "auto"),
    }
    lines = ["[fit]", *(f"{key} = {json.dumps(value)}" for key, value in common.items())]
    for rate, block, subset in axes:
        lines += [
            "[[trials]]",
            f"lr = {rate}",
            f"block_size = {block}",
            f"target_layers = {subset}",
        ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def plan_of(file: Path, args: Namespace, out: Path) -> Any:
    config = SweepConfig(sweep=file, trials_per_device=args.trials)
    return plan_sweep(config, in_file={}, typed={"cache": str(args.cache), "out": out})


def shape_of(args: Namespace, file: Path) -> dict[str, Any]:
    manifest = CacheReader(args.cache).manifest
    return {
        "steps": args.steps,
        "cache_gb": manifest.bytes / 1e9,
        "cache_tokens": manifest.tokens,
        "page_cache": args.cached,
        "trials": [one.options for one in plan_of(file, args, Path("out")).trials],
        **(TINY if args.tiny else FULL),
    }


# --- the sweep ------------------------------------------------------------------------------------


def sweep_part(
    args: Namespace, file: Path, folder: Path, _before: dict[str, float]
) -> dict[str, float]:
    plan = plan_of(file, args, folder / "sweep")
    life = trial.live if args.cached else live_directly
    began = time.perf_counter()
    with mock.patch.object(reader, "outgrows_memory", return_value=not args.cached):
        report = sweep.sweep(plan, begin=partial(trial.Started, life=life))
    wall = time.perf_counter() - began
    bad = [row["status"] for row in report["trials"] if row["status"] != "done"]
    if bad:
        raise SystemExit(f"a trial of the sweep did not end well: {bad}")
    return {
        "sweep_wall_s": wall,
        "sweep_bytes_read": report["bytes_read"],
        "sweep_bytes_alone": report["bytes_alone"],
        "sweep_train_s": max(row["hours"] for row in report["trials"]) * 3600,
    }


def live_directly(parent: int, task: trial.Task, mouth: Connection) -> None:
    """A trial that reads past the page cache what it reads itself."""
    with mock.patch.object(reader, "outgrows_memory", return_value=True):
        trial.live(parent, task, mouth)


# --- one after another ----------------------------------------------------------------------------


def sequential_part(
    args: Namespace, file: Path, folder: Path, before: dict[str, float]
) -> dict[str, float]:
    plan = plan_of(file, args, folder / "alone")
    walls, sizes, train, apart = [], [], [], [0.0]
    for one in plan.trials:
        began = time.perf_counter()
        sizes.append(in_a_process(one.config, folder / f"{one.name}.txt", direct=not args.cached))
        walls.append(time.perf_counter() - began)
        train.append(read_story(one.config.out).hours * 3600)
        shared = folder / "sweep" / one.name
        apart.append(abs(last_loss(shared) - last_loss(one.config.out)))
    return {
        "sequential_wall_s": sum(walls),
        "sequential_wall_s.max": max(walls),
        "sequential_bytes_read": sum(sizes),
        "one_trial_bytes_read": max(sizes),
        "sequential_train_s": sum(train),
        "bytes_read_ratio": before["sweep_bytes_read"] / max(sizes),
        "wall_over_sequential": before["sweep_wall_s"] / sum(walls),
        "train_over_sequential": before["sweep_train_s"] / sum(train),
        "last_loss_apart.max": max(apart),
    }


def in_a_process(config: FitConfig, log: Path, *, direct: bool) -> int:
    """Train; bytes of states that were read."""
    context = multiprocessing.get_context("spawn")
    ear, mouth = context.Pipe(duplex=False)
    process = context.Process(target=alone, args=(os.getpid(), config, log, direct, mouth))
    process.start()
    mouth.close()
    try:
        size: int = ear.recv()
    except EOFError:
        process.join()
        raise SystemExit(f"a run ended badly: {log.read_text(encoding='utf-8')[-2000:]}") from None
    process.join()
    return size


def alone(parent: int, config: FitConfig, log: Path, direct: bool, mouth: Connection) -> None:
    settle(parent)
    trial.speak_into(log)
    (name,) = loop.devices_of(config)
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    opened = CacheReader(config.cache, direct=direct or None)
    loop.train_in(World.alone(device), config, open_reader=lambda _: opened)
    mouth.send(opened.bytes_read)


def last_loss(run: Path) -> float:
    lines, _ = read_lines(run / "metrics.jsonl")
    return float(next(line["loss"] for line in reversed(lines) if line["kind"] == "train"))


if __name__ == "__main__":
    main()
