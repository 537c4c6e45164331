"""The number of workers does not matter, and neither does their end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import tiny_build

from dflash_cache import workers
from dflash_cache.build import build_cache
from dflash_cache.errors import DFlashError, ProofError
from dflash_cache.reader import CacheReader
from dflash_cache.verify import verify_cache

OPTIONS = {"unit_tokens": 100, "encoding": "int8", "final_hidden": True}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, tiny_target, tiny_data) -> Path:
    """The cache that one worker builds without being disturbed."""
    out = tmp_path_factory.mktemp("alone") / "cache"
    build_cache(tiny_build(tiny_target, tiny_data, out, **OPTIONS))
    return out


def content(root: Path) -> dict[str, tuple]:
    """What each unit holds: its samples, and size and checksum of every file."""
    return {
        unit: (record.sample_ids, record.files)
        for unit, record in CacheReader(root).records.items()
    }


def start(target: Path, data: Path, out: Path, *, count: int) -> subprocess.Popen:
    """A build in a process group of its own."""
    config = out.with_suffix(".toml")
    config.write_text(
        'target_dtype = "float32"\nnum_target_layers = 3\nbucket_edges = [48, 96, 160]\n'
        "batch_tokens = 512\nagreement_samples = 0\ndevice = 'cpu'\nunit_tokens = 100\n"
        "encoding = 'int8'\nfinal_hidden = true\n"
    )
    words = ["--target", target, "--data", data, "--out", out, "--config", config]
    return subprocess.Popen(
        [sys.executable, "-m", "dflash_cli", "cache", "build", *words, "--workers", str(count)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def children(parent: int) -> list[int]:
    found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in found]


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, *, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.005)


def test_a_killed_build_of_two_workers_is_finished_by_one_to_the_same_bytes(
    alone, tmp_path, tiny_target, tiny_data
):
    out = tmp_path / "out"
    with start(tiny_target, tiny_data, out, count=2) as build:
        wait_for(lambda: len(list(out.glob("commits/u*.json"))) >= 3, seconds=120)
        crew = children(build.pid)
        build.send_signal(signal.SIGKILL)
    assert len(crew) >= 2
    # Nobody must go on writing where the next builder sweeps.
    wait_for(lambda: not any(map(alive, crew)), seconds=10)
    committed = len(list(out.glob("commits/u*.json")))
    assert 3 <= committed < len(content(alone)), "the kill came too late to show anything"
    build_cache(tiny_build(tiny_target, tiny_data, out, **OPTIONS))
    assert content(out) == content(alone)
    assert verify_cache(out)["leftovers"] == 0


def test_a_build_begun_by_one_worker_is_finished_by_two_to_the_same_bytes(
    alone, tmp_path, tiny_target, tiny_data
):
    out = tmp_path / "out"
    with start(tiny_target, tiny_data, out, count=1) as build:
        wait_for(lambda: len(list(out.glob("commits/u*.json"))) >= 3, seconds=120)
        build.send_signal(signal.SIGKILL)
    before = {path: path.stat().st_mtime_ns for path in out.glob("commits/u*.json")}
    assert len(before) < len(content(alone)), "the kill came too late to show anything"
    with start(tiny_target, tiny_data, out, count=2) as build:
        assert build.wait(timeout=300) == 0
    assert content(out) == content(alone)
    assert verify_cache(out)["ok"]
    assert {path: path.stat().st_mtime_ns for path in before} == before


def one_fails(crew: workers.Crew, told: str) -> str:
    if crew.rank == 1:
        raise ProofError(told)
    while True:
        crew.stop_if_failed()
        time.sleep(0.01)


def one_dies(crew: workers.Crew) -> None:
    if crew.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def counts(crew: workers.Crew, units: list[int]) -> list[int]:
    order = crew.after_the_first(lambda: crew.rank)
    assert order == crew.rank
    mine = list(crew.claims(units))
    crew.store.set(f"units of {crew.rank}", ",".join(map(str, mine)))
    other = crew.store.get(f"units of {1 - crew.rank}").decode()
    return sorted(mine + [int(unit) for unit in other.split(",") if unit])


def test_every_unit_is_claimed_by_exactly_one_worker():
    assert workers.launch(counts, list(range(50)), workers=2) == list(range(50))


def test_an_error_of_one_worker_ends_all_and_comes_back_as_itself():
    with pytest.raises(ProofError, match="the states of layer 3 are wrong"):
        workers.launch(one_fails, "the states of layer 3 are wrong", workers=2)


def test_a_worker_that_dies_ends_the_build_with_its_number():
    with pytest.raises(DFlashError, match=r"worker 1 died .*committed units are kept"):
        workers.launch(one_dies, workers=2)
