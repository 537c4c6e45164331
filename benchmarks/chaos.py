"""Kill a builder at random moments, hundreds of times, and look at what it leaves.

A cache folder is built again and again, each attempt ended by SIGKILL after a random time, until
one comes to its end.  After every kill all committed units must be whole; the finished cache must
hold the bytes of one that nobody disturbed, and nothing else.

One worker is a fork of this process, so that an attempt costs no start, and its writes are slowed
down: most kills then strike between two of them.  Several workers are the command line itself.
"""

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol

import torch
from common import add_out, publish, result

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from conftest import chat_rows, save_tiny_target, tiny_build, write_jsonl

from dflash_cache import build, ledger, sweep
from dflash_cache.config import ENCODING_NAMES, BuildConfig
from dflash_cache.files import open_files
from dflash_cache.lock import LOCK
from dflash_cache.plan import Plan
from dflash_cache.reader import CacheReader
from dflash_cache.schema import FINAL_HIDDEN
from dflash_cache.survey import Survey
from dflash_cache.target import Target
from dflash_cache.verify import file_problem, verify_cache
from dflash_cache.weights import load_weights

PATIENCE = 300  # seconds; a build that takes longer hangs
LATEST = 1.2  # in parts of the time that an attempt needs: some kills come too late
SLOW_FLUSH, SLOW_WRITE = 0.0005, 0.002  # seconds


class Damaged(Exception):
    """A kill has left what must not be."""


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="chaos.", dir=args.folder) as folder:
        root = Path(folder)
        grounds = prepare(root, args.encodings, args.workers)
        struck = chaos(grounds, root / "caches", kills=args.kills, rng=random.Random(args.seed))
        publish(result("chaos", shape_of(args, grounds), figures(struck), folder=root), args.out)


def parse_args() -> Namespace:
    def words(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(word) for word in words(text)]

    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=300, help="at least so many")
    parser.add_argument("--workers", type=numbers, default=[1], help="taken in turn: 1,2")
    parser.add_argument("--encodings", type=words, default=list(ENCODING_NAMES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where caches are made (default: /tmp)")
    add_out(parser)
    return parser.parse_args()


# ---------------------------------------------------------------------------------------------
# What is built, and how long it takes when nobody disturbs
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds of an undisturbed build."""

    first_unit: float  # until it is begun
    whole: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Ground:
    """A cache to be built, prepared once: every attempt starts from here."""

    config: BuildConfig
    survey: Survey
    plan: Plan
    target: Target
    wanted: dict[str, Any]  # the content of the cache that nobody disturbed
    paces: dict[int, Pace] = field(default_factory=dict)  # by workers

    def start(self, out: Path, *, workers: int) -> "Builder":
        config = replace(self.config, out=out, devices=",".join(["cpu"] * workers))
        return Forked(self, config) if workers == 1 else Commanded(config)


def prepare(folder: Path, encodings: Sequence[str], workers: Sequence[int] = (1,)) -> list[Ground]:
    """A build of several small units for each encoding, and the cache that it gives."""
    target = save_tiny_target(folder / "target", layers=4)
    data = write_jsonl(folder / "rows.jsonl", chat_rows(16))
    return [
        prepare_one(
            tiny_build(
                target,
                data,
                folder / encoding / "undisturbed",
                target_layers=(1,),
                final_hidden=True,
                bucket_edges=(100, 200),
                encoding=encoding,
            ),
            workers,
        )
        for encoding in encodings
    ]


def prepare_one(config: BuildConfig, workers: Sequence[int]) -> Ground:
    build.build_cache(config)
    survey, plan = build.plan_with_weights(config)
    target = load_weights(survey, device=config.devices)
    wanted = content(config.out)
    ground = Ground(config=config, survey=survey, plan=plan, target=target, wanted=wanted)
    for number in sorted(set(workers)):
        out = config.out.with_name(f"workers-{number}")
        ground.paces[number] = pace_of(ground.start(out, workers=number), out)
        check_finished(ground, out)
    return ground


def pace_of(builder: "Builder", out: Path) -> Pace:
    began = time.monotonic()
    wait_for_unit(builder, out)
    first = time.monotonic() - began
    finish(builder)
    return Pace(first_unit=first, whole=time.monotonic() - began)


def content(root: Path) -> dict[str, Any]:
    """All that a sealed cache holds, but for the names of attempts, and for how it came to be."""
    found: dict[str, Any] = {
        "identity": ledger.read_identity(root),
        "seal": replace(
            ledger.read_manifest(root), created="", files={}, bytes=0, options={}, proofs={}
        ),
        "samples": samples_of(root),
    }
    for name in ledger.beside(root, ledger.read_identity(root)):
        if name != "zarr.json":  # remembers how many workers began
            found[name] = (root / name).read_bytes()
    for unit, record in CacheReader(root).records.items():
        found[unit] = replace(record, folder="")
        for path in (root / record.folder).rglob("*"):
            if path.is_file():
                found[f"{unit}/{path.relative_to(root / record.folder)}"] = path.read_bytes()
    return found


def samples_of(root: Path) -> list[tuple[int, str, bytes, bytes, bytes]]:
    """Every sample as a reader gives it out: id, group, tokens, mask and states."""
    reader = CacheReader(root)
    planes = [*reader.identity.target_layer_ids, FINAL_HIDDEN]
    found = []
    for index, located in enumerate(reader.located):
        ids, mask = reader.tokens(index)
        states = reader.hidden(index, planes).view(torch.int16).numpy()
        about = (located.sample_id, located.group)
        found.append((*about, ids.tobytes(), mask.tobytes(), states.tobytes()))
    return found


# ---------------------------------------------------------------------------------------------
# Builders that can be killed
# ---------------------------------------------------------------------------------------------


class Builder(Protocol):
    """A build that has been started."""

    def wait(self, seconds: float) -> int | None:
        """Its exit code; None where it still runs after that time."""

    def kill(self) -> None:
        """Send SIGKILL."""

    def told(self) -> str:
        """What it said, if that is known."""


class Forked:
    """A copy of this process, with target and plan at hand and slow writes."""

    def __init__(self, ground: Ground, config: BuildConfig) -> None:
        self.process = multiprocessing.get_context("fork").Process(
            target=build_slowly, args=(ground, config), daemon=True
        )
        with warnings.catch_warnings():
            # No thread of ours is in the middle of anything, and zarr starts its own anew.
            warnings.filterwarnings("ignore", ".* is multi-threaded", DeprecationWarning)
            self.process.start()

    def wait(self, seconds: float) -> int | None:
        self.process.join(seconds)
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()

    def told(self) -> str:
        return "see above"


def build_slowly(ground: Ground, config: BuildConfig) -> None:
    """What the child does; the parent sees nothing of its patches."""
    torch.set_num_threads(1)
    write = os.pwrite

    def slow_write(*args: Any) -> int:
        time.sleep(SLOW_WRITE)
        return write(*args)

    os.pwrite = slow_write
    os.fsync = lambda _: time.sleep(SLOW_FLUSH)
    build.plan_with_weights = lambda _: (ground.survey, ground.plan)
    build.load_weights = lambda *_, **__: ground.target
    build.build_cache(config)


class Commanded:
    """`dflash cache build`, which starts the workers that belong to it."""

    def __init__(self, config: BuildConfig) -> None:
        options, self.log = config.out.with_suffix(".toml"), config.out.with_suffix(".log")
        given = {**asdict(config), "out": str(config.out)}
        # Texts, numbers and lists are written in TOML as they are in JSON.
        lines = [f"{n} = {json.dumps(v)}\n" for n, v in given.items() if v is not None]
        options.write_text("".join(lines), encoding="utf-8")
        with open(self.log, "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dflash_cli", "cache", "build", "--config", str(options)],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    def wait(self, seconds: float) -> int | None:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self.process.kill()

    def told(self) -> str:
        return self.log.read_text(encoding="utf-8")[-2000:]


def wait_for_unit(builder: Builder, out: Path) -> None:
    """Until a unit is begun, or the builder has ended."""
    before, end = set(out.glob("units/*/*")), time.monotonic() + PATIENCE
    while set(out.glob("units/*/*")) <= before and builder.wait(0.002) is None:
        must(time.monotonic() < end, f"{out}: no unit is begun")


def finish(builder: Builder) -> None:
    """Wait until it ends by itself, and well."""
    code = builder.wait(PATIENCE)
    if code is None:
        builder.kill()
        builder.wait(PATIENCE)
    if code != 0:
        how = "hangs" if code is None else f"ends with {code}"
        raise Damaged(f"the build {how}: {builder.told()}")


# ---------------------------------------------------------------------------------------------
# Kills
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What was there when a builder had been killed."""

    committed: int  # units
    leftovers: int  # attempts that no record names, and files written aside
    sealed: bool


@dataclass(kw_only=True)
class Struck:
    """All kills, and the caches that were finished nevertheless."""

    kills: list[Kill] = field(default_factory=list)
    caches: int = 0
    seconds: float = 0.0


def chaos(grounds: Sequence[Ground], parent: Path, *, kills: int, rng: random.Random) -> Struck:
    """Build caches under fire until so many kills have struck; `Damaged` where one did harm."""
    struck, began = Struck(), time.monotonic()
    parent.mkdir(parents=True)
    for ground in cycle(grounds):
        if len(struck.kills) >= kills:
            struck.seconds = time.monotonic() - began
            return struck
        out = parent / f"{struck.caches:04d}"
        struck.kills += build_under_fire(ground, out, rng)
        check_finished(ground, out)
        shutil.rmtree(out)
        struck.caches += 1
    raise AssertionError("cycles do not end")


def build_under_fire(ground: Ground, out: Path, rng: random.Random) -> list[Kill]:
    """Build, and be killed, until a build comes to its end."""
    kills: list[Kill] = []
    records: dict[str, bytes] = {}
    numbers = list(ground.paces)
    for workers in cycle(rng.sample(numbers, len(numbers))):
        if not killed(ground, out, workers, rng):
            break
        records = check_killed(ground, out, records)
        kills.append(
            Kill(
                committed=len(records),
                leftovers=len(sweep.leftovers(out)),
                sealed=(out / "manifest.json").is_file(),
            )
        )
    return kills


def killed(ground: Ground, out: Path, workers: int, rng: random.Random) -> bool:
    """One attempt, killed at a random time; False if it came to its end before."""
    committed = len(list(out.glob("commits/u*.json")))
    left = 1 - committed / (len(ground.plan.units) + 1)  # the seal takes about as long as a unit
    pace = ground.paces[workers]
    builder = ground.start(out, workers=workers)
    seconds = (pace.whole - pace.first_unit) * left
    if workers > 1 and rng.random() < 0.7:  # most of its time it only starts
        wait_for_unit(builder, out)
    else:
        seconds += pace.first_unit
    if builder.wait(rng.uniform(0, LATEST * seconds)) is None:
        builder.kill()
        if builder.wait(PATIENCE) == -signal.SIGKILL:
            return True
    finish(builder)
    return False


# ---------------------------------------------------------------------------------------------
# What must be true
# ---------------------------------------------------------------------------------------------


def must(condition: bool, told: str) -> None:
    if not condition:
        raise Damaged(told)


def check_killed(ground: Ground, out: Path, before: dict[str, bytes]) -> dict[str, bytes]:
    """Whatever is committed is whole, and stays as it was; returns the records."""
    paths = sorted(out.glob("commits/u*.json"))
    records = {path.stem: path.read_bytes() for path in paths}
    must(before.items() <= records.items(), f"{out}: a record was lost or changed")
    files = open_files(out, direct=False)
    fingerprint = ground.plan.identity.fingerprint
    for unit, record in ledger.committed_units(out, fingerprint=fingerprint).items():
        for name, entry in record.files.items():
            problem = file_problem(files, f"{record.folder}/{name}", entry)
            must(problem is None, f"{out}: {unit} is committed, but {name}: {problem}")
    if (out / "manifest.json").is_file():
        must(len(records) == ledger.read_manifest(out).units, f"{out}: sealed, but not complete")
    return records


def check_finished(ground: Ground, out: Path) -> None:
    """The cache is the one that nobody disturbed, and nothing else is left."""
    report = verify_cache(out)
    must(report["ok"], f"{out}: {report['errors']}")
    must(report["leftovers"] == 0, f"{out}: {report['leftovers']} leftovers of killed builds")
    found, wanted = content(out), ground.wanted
    unlike = [name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)]
    must(not unlike, f"{out}: not as in the undisturbed cache: {sorted(unlike)}")
    ids = [sample_id for sample_id, *_ in found["samples"]]
    planned = sorted(sample.sample_id for sample in ground.plan.samples.samples)
    must(ids == planned, f"{out}: holds samples {ids}, planned were {planned}")
    sweep.collect(out)
    live = {out / record.folder for record in CacheReader(out).records.values()}
    must(set(out.glob("units/*/*")) == live, f"{out}: attempts are left that no record names")
    stray = [path for path in out.rglob("*") if path.name == LOCK or path.suffix == ".partial"]
    must(not stray, f"{out}: {stray} are left")


# ---------------------------------------------------------------------------------------------
# What is told
# ---------------------------------------------------------------------------------------------


def shape_of(args: Namespace, grounds: Sequence[Ground]) -> dict[str, Any]:
    return {
        "workers": args.workers,
        "encodings": args.encodings,
        "units": len(grounds[0].plan.units),
        "samples": len(grounds[0].plan.samples.samples),
        "seed": args.seed,
    }


def figures(struck: Struck) -> dict[str, float]:
    """All of them counts: of harm there is none, or there would be no figures."""
    kills = struck.kills
    return {
        "kills": len(kills),
        "caches": struck.caches,
        "kills_before_the_first_unit": sum(kill.committed == 0 for kill in kills),
        "kills_between_units": sum(kill.committed > 0 and not kill.sealed for kill in kills),
        "kills_after_the_seal": sum(kill.sealed for kill in kills),
        "kills_that_left_something": sum(kill.leftovers > 0 for kill in kills),
        "seconds": struck.seconds,
    }


if __name__ == "__main__":
    main()
