"""The layout that the tool is made for, rehearsed on CPUs: five devices build, three train beside
them, and then all eight train.

Every process here is one of a command that a user types, and costs seconds of imports.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from conftest import chat_rows, write_jsonl
from test_loop import losses
from test_ranks import assert_same_end

from dflash_cache.ledger import recorded_units
from dflash_cache.reader import CacheReader
from dflash_cli.main import main

BUILDERS, TRAINERS, ALL = 5, 3, 8
SAMPLES = 240
BUILD = [
    *("--target-dtype", "float32", "--num-target-layers", 3, "--agreement-samples", 0),
    *("--max-length", 128, "--too-long", "cut", "--bucket-edges", "48,96", "--batch-tokens", 512),
    *("--unit-tokens", 512, "--data-workers", 1),
]
# Eight packs a step: three ranks have three turns of them, and in the last one a rank is idle.
FIT = [
    *("--num-layers", 1, "--block-size", 4, "--token-budget", 128, "--anchors", 8, "--epochs", 1),
    *("--packs-per-step", ALL, "--log-every", 1, "--trackers", "none"),
]
ENOUGH = 24  # units of the 40: more than a step of packs is planned from them
UNIT_BYTES = 512 * 3 * 32 * 2  # of states


def cpus(count: int) -> str:
    return ",".join(["cpu"] * count)


def dflash(*words: object) -> str:
    """A command in this process; what it prints."""
    found = CliRunner().invoke(main, [str(word) for word in words])
    assert found.exit_code == 0, found.output
    return found.stdout


class Command:
    """One that runs as a user has typed it."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self.log = process, log

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 240
        while not self._holds(condition):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.005)

    @staticmethod
    def _holds(condition: Callable[[], bool]) -> bool:
        try:
            return condition()
        except (FileNotFoundError, ProcessLookupError):
            return False  # a process of it has ended, and its log will say why

    def end_well(self) -> None:
        assert self.process.wait(timeout=240) == 0, self.log.read_text()


@contextmanager
def typed(*words: object, log: Path) -> Iterator[Command]:
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "dflash_cli", *map(str, words)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=file,
        )
    try:
        yield Command(process, log)
    finally:
        process.kill()  # and with it all that it has started
        process.wait()


# --- builders that can be held up -----------------------------------------------------------------


def workers_of(build: Command) -> list[int]:
    """Each worker is the child of a supervisor."""
    return [worker for supervisor in children(build.process.pid) for worker in children(supervisor)]


def children(process: int) -> list[int]:
    """Those that work, without what Python starts beside them."""
    found = map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())
    return [
        child for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def stop_each_in_a_unit(build: Command, cache: Path) -> list[int]:
    """The workers, each stopped once it has had a unit: none has all before the last one comes."""
    build.until(lambda: len(workers_of(build)) == BUILDERS)
    workers = workers_of(build)
    # The others wait for the first one to have proved the target, which is before any commit.
    build.until(lambda: bool(recorded_units(cache)))
    going = set(workers)

    def all_are_stopped() -> bool:
        stopped = {worker for worker in going if bytes_written(worker) >= UNIT_BYTES}
        send(signal.SIGSTOP, stopped)
        going.difference_update(stopped)
        return not going

    build.until(all_are_stopped)
    return workers


def bytes_written(process: int) -> int:
    """Into files; what goes to other processes does not count."""
    lines = Path(f"/proc/{process}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def send(number: signal.Signals, processes: Iterable[int]) -> None:
    for process in processes:
        os.kill(process, number)


# --- five and three -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory, tiny_target) -> SimpleNamespace:
    """Builders and trainers at once; the builders rest until a step has been trained."""
    folder = tmp_path_factory.mktemp("layout")
    cache, run = folder / "cache", folder / "run"
    data = write_jsonl(folder / "chats.jsonl", chat_rows(SAMPLES))
    build_words = ["cache", "build", "--target", tiny_target, "--data", data, *BUILD]
    fit_words = ["fit", "--cache", cache, "--out", run, *FIT]
    fit_words += ["--follow", "--devices", cpus(TRAINERS)]
    with typed(*fit_words, log=folder / "fit.log") as fit, ExitStack() as more:
        dflash(*build_words, "--out", folder / "alone", "--devices", "cpu")
        fit.until(lambda: "to be started" in fit.log.read_text())
        build_words += ["--out", cache, "--devices", cpus(BUILDERS)]
        build = more.enter_context(typed(*build_words, log=folder / "build.log"))
        workers = stop_each_in_a_unit(build, cache)
        send(signal.SIGCONT, workers)
        build.until(lambda: len(recorded_units(cache)) >= ENOUGH)
        send(signal.SIGSTOP, workers)
        fit.until(lambda: (run / "metrics.jsonl").is_file() and bool(losses(run)))
        sealed = (cache / "manifest.json").exists()
        send(signal.SIGCONT, workers)
        build.end_well()
        fit.end_well()
    told = fit.log.read_text().count("waiting for `dflash cache build` to be started")
    return SimpleNamespace(
        folder=folder, cache=cache, run=run, sealed_at_first_step=sealed, told=told
    )


def test_five_builders_beside_three_trainers_leave_the_cache_of_one(rehearsed):
    report = json.loads(dflash("cache", "verify", rehearsed.cache, "--json"))
    assert report["ok"], report
    found, wanted = CacheReader(rehearsed.cache), CacheReader(rehearsed.folder / "alone")
    layers = wanted.manifest.identity["target_layer_ids"]
    assert len(found.located) == len(wanted.located) == SAMPLES
    for sample in range(SAMPLES):
        for mine, alone in zip(found.tokens(sample), wanted.tokens(sample), strict=True):
            assert mine.tolist() == alone.tolist()
        assert torch.equal(found.hidden(sample, layers), wanted.hidden(sample, layers))


def test_three_trainers_begin_before_the_seal_and_take_every_unit_once(rehearsed):
    assert not rehearsed.sealed_at_first_step
    order = json.loads((rehearsed.run / "followed.json").read_text())
    assert sorted(order) == recorded_units(rehearsed.cache)


def test_that_a_builder_is_waited_for_is_told_by_one_of_the_trainers(rehearsed):
    # Once more, should it take half a minute to come.
    assert 1 <= rehearsed.told < TRAINERS


def test_three_trainers_that_followed_end_with_the_weights_of_one_in_their_order(rehearsed):
    alone, order = rehearsed.folder / "ordered", rehearsed.run / "followed.json"
    words = ["fit", "--cache", rehearsed.cache, "--out", alone, *FIT]
    dflash(*words, "--unit-order", order, "--devices", "cpu")
    assert_same_end(rehearsed.run, alone)


def test_eight_trainers_of_the_sealed_cache_end_with_the_weights_of_one(rehearsed):
    eight, alone = rehearsed.folder / "eight", rehearsed.folder / "one"
    words = ["fit", "--cache", rehearsed.cache, *FIT]
    eight_words = [*words, "--out", eight, "--devices", cpus(ALL)]
    with typed(*eight_words, log=rehearsed.folder / "eight.log") as fit:
        dflash(*words, "--out", alone, "--devices", "cpu")
        fit.end_well()
    assert_same_end(eight, alone)
