"""The number of workers does not matter, and neither does their end.

Every process here costs seconds of imports: what needs none is tested in `test_board.py`.
"""

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import free_port, tiny_build
from light_work import die_in_its_own_way, end_early, fail_in_one
from torch.distributed import HashStore

from dflash_cache import build, job_file, launcher, ledger, lockstep, store, teams, workers
from dflash_cache.board import LEAD, Board
from dflash_cache.build import build_cache
from dflash_cache.devices import group_of_rank
from dflash_cache.errors import (
    CacheError,
    ConfigError,
    DFlashError,
    DiskFullError,
    ProofError,
    TargetError,
    ToldElsewhere,
)
from dflash_cache.files import file_entry
from dflash_cache.progress import Display
from dflash_cache.ranks import Meeting, Rank, find_rank
from dflash_cache.reader import CacheReader
from dflash_cache.repair import repair_cache
from dflash_cache.target import Target
from dflash_cache.teams import Team
from dflash_cache.verify import verify_cache
from dflash_cache.workers import Crew, Seat

OPTIONS = {"unit_tokens": 100, "encoding": "int8", "final_hidden": True}
HERE = {**os.environ, "OMP_NUM_THREADS": "1"}


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


def is_like(out: Path, alone: Path) -> bool:
    """Whole, equal to the undisturbed cache bit for bit, and nothing beside it."""
    report = verify_cache(out)
    assert report["ok"], report["errors"]
    return content(out) == content(alone) and report["leftovers"] == 0


def command(target: Path, data: Path, out: Path, *words: str) -> list[str]:
    """`dflash cache build` with the options of `alone`."""
    config = out.with_suffix(".toml")
    config.write_text(
        'target_dtype = "float32"\nnum_target_layers = 3\nbucket_edges = [48, 96, 160]\n'
        "batch_tokens = 512\nagreement_samples = 0\ndevices = 'cpu'\nunit_tokens = 100\n"
        "encoding = 'int8'\nfinal_hidden = true\n"
    )
    words = ["--target", target, "--data", data, "--out", out, "--config", config, *words]
    return ["-m", "dflash_cli", "cache", "build", *map(str, words)]


def start(words: list[str], **variables: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *words],
        env={**HERE, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def descendants(parent: int) -> list[int]:
    found = []
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        found += [int(child), *descendants(int(child))]
    return found


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


# --- one machine, by torch's launcher -------------------------------------------------------------


def test_a_killed_build_of_two_workers_is_finished_by_one_to_the_same_bytes(
    alone, tmp_path, tiny_target, tiny_data
):
    out = tmp_path / "out"
    words = command(tiny_target, tiny_data, out, "--devices", "cpu,cpu")
    with start(words) as crowd:
        wait_for(lambda: len(list(out.glob("commits/u*.json"))) >= 3, seconds=200)
        crew = descendants(crowd.pid)
        crowd.send_signal(signal.SIGKILL)
    assert len(crew) >= 4  # two supervisors and their workers
    # Nobody must go on writing where the next builder sweeps.
    wait_for(lambda: not any(map(alive, crew)), seconds=10)
    committed = len(list(out.glob("commits/u*.json")))
    assert 3 <= committed < len(content(alone)), "the kill came too late to show anything"
    build_cache(tiny_build(tiny_target, tiny_data, out, **OPTIONS))
    assert is_like(out, alone)


def killed_in_the_middle_of_a_unit(crew: Crew, job: build.Job) -> None:
    """Worker 1 dies with a unit half written, and worker 0 writes nothing before that."""
    write = store.write_unit

    def write_unit(root, plan, samples, states, **more):
        def half():
            yield next(states)
            os.kill(os.getpid(), signal.SIGKILL)

        if crew.seat.number == 1:
            return write(root, plan, samples, half(), **more)
        wait_for(lambda: crew.board.end_of(1) is not None, seconds=200)
        return write(root, plan, samples, states, **more)

    store.write_unit = write_unit
    build.work(crew, job)


def test_a_worker_killed_in_the_middle_of_a_unit_does_not_end_the_build(
    alone, tmp_path, tiny_target, tiny_data, monkeypatch, capsys
):
    out = tmp_path / "out"
    monkeypatch.setattr(build, "work", killed_in_the_middle_of_a_unit)
    manifest = build_cache(tiny_build(tiny_target, tiny_data, out, **OPTIONS, devices="cpu,cpu"))
    told = capsys.readouterr().err
    assert "worker 1 died (signal 9); its " in told
    assert "to the others" in told
    assert "extracted " in told
    # The attempt that was killed is left to the next sweep.
    assert verify_cache(out)["leftovers"] == 1
    assert content(out) == content(alone)
    assert manifest == ledger.read_manifest(out)


# --- supervisors and their workers ----------------------------------------------------------------


@pytest.fixture
def team(tmp_path):
    """A team whose supervisors are threads of this process; no launcher, no light processes."""

    def make(*groups: tuple[str, ...], config=None) -> Team:
        meeting = Meeting(host="localhost", port=0, prefix="test")
        server = workers.open_store(meeting, hosts=True)
        meeting = replace(meeting, port=server.port)
        board = workers.connect(meeting, world=len(groups))
        # The server lives as long as its object does.
        board.server = server

        def crowd(path: Path) -> None:
            seats = [
                Seat(
                    number=number,
                    world=len(groups),
                    group=group,
                    meeting=meeting,
                    job=path,
                    config=config,
                    threads=1,
                )
                for number, group in enumerate(groups)
            ]
            supervisors = [
                threading.Thread(target=workers.supervise, args=(seat, board)) for seat in seats
            ]
            for supervisor in supervisors:
                supervisor.start()
            for supervisor in supervisors:
                supervisor.join()

        return Team(board=board, crowd=crowd)

    return make


@pytest.fixture
def display(tmp_path) -> Display:
    return Display(tmp_path, total=100, done=0)


def test_a_build_whose_workers_all_died_names_the_end_of_each(team, display, tmp_path, capfd):
    with pytest.raises(DFlashError) as caught:
        team(("cpu",), ("cpu",)).perform(die_in_its_own_way, folder=tmp_path, display=display)
    told = str(caught.value)
    assert "every worker died (worker 0: signal 11; worker 1: RuntimeError: CUDA error: an" in told
    assert "all committed units are kept" in told
    assert "what else CUDA tells" in capfd.readouterr().err  # the traceback stands in the log
    assert list(tmp_path.iterdir()) == []  # the job's file has gone


def test_an_error_of_one_worker_ends_all_and_comes_back_as_itself(team, display, tmp_path):
    with pytest.raises(ProofError, match=r"^the states of layer 3 are wrong$"):
        team(("cpu",), ("cpu",)).perform(
            fail_in_one, "the states of layer 3 are wrong", folder=tmp_path, display=display
        )


def test_a_worker_that_ends_without_its_work_done_counts_as_dead(team, display, tmp_path):
    with pytest.raises(DFlashError, match=r"the only worker died .*ended before its work was done"):
        team(("cpu",)).perform(end_early, folder=tmp_path, display=display)


def killed_before_it_was_ready(crew: Crew, job: build.Job) -> None:
    """Whoever leads first dies when it has left everything beside the units."""
    begin = build.begin

    def begin_and_die(*words):
        codec = begin(*words)
        if len(crew.board.holders(LEAD)) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return codec

    build.begin = begin_and_die
    build.work(crew, job)


def test_a_leader_killed_before_it_was_ready_is_followed_by_another(
    alone, team, tmp_path, tiny_target, tiny_data, monkeypatch
):
    # Without the final state, so that who joins has loaded less than a leader needs.
    config = tiny_build(
        tiny_target, tiny_data, tmp_path / "out", **{**OPTIONS, "final_hidden": False}
    )
    crowd = team(("cpu",), ("cpu",), config=config)
    monkeypatch.setattr(build, "work", killed_before_it_was_ready)
    build._built(config, crowd)
    assert len(crowd.board.holders(LEAD)) == 2
    lengths = CacheReader(alone).records
    assert {u: r.lengths for u, r in CacheReader(config.out).records.items()} == {
        u: r.lengths for u, r in lengths.items()
    }
    assert verify_cache(config.out)["ok"]


def test_two_processes_that_share_a_target_build_the_cache_of_one(
    team, tmp_path, tiny_target, tiny_data, capfd
):
    options = {"target_layers": (1, 4), "unit_tokens": 2000, "final_hidden": False}
    one = tiny_build(tiny_target, tiny_data, tmp_path / "one", **options)
    two = replace(one, out=tmp_path / "two", tensor_parallel=2)
    build_cache(one)
    build._built(two, team(("cpu", "cpu"), config=two))
    wanted, found = CacheReader(one.out), CacheReader(two.out)
    assert len(found.located) == len(wanted.located) == 40
    for index in range(len(wanted.located)):
        torch.testing.assert_close(
            found.hidden(index, [1, 4]).float(),
            wanted.hidden(index, [1, 4]).float(),
            rtol=0.02,
            atol=0.02,
        )
    assert verify_cache(two.out)["ok"]
    assert "tensor_parallel" not in found.manifest.options
    assert "Error" not in capfd.readouterr().err


def test_a_hangup_that_is_ignored_does_not_end_the_workers():
    """As under nohup, where torch's launcher listens for it all the same."""
    # These tests themselves may run in the background of a shell.
    usual = (signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in usual}
    try:
        assert launcher.signals_heard() == ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"]
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert launcher.signals_heard() == ["SIGTERM", "SIGINT", "SIGQUIT"]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_disk_that_is_full_before_the_workers_begin_is_told(
    tmp_path, tiny_target, tiny_data, team, monkeypatch
):
    def full(path, job):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(job_file, "write_job", full)
    config = tiny_build(tiny_target, tiny_data, tmp_path / "out", **OPTIONS)
    with pytest.raises(DiskFullError, match="the disk is full"):
        build._built(config, team(("cpu",), config=config))


# --- the records of other machines ----------------------------------------------------------------


def test_a_record_that_a_share_shows_late_is_waited_for(
    tmp_path, alone, tiny_target, tiny_data, monkeypatch
):
    config = tiny_build(tiny_target, tiny_data, tmp_path / "out", **OPTIONS)
    _, plan = build.plan_with_weights(config)
    cache = shutil.copytree(alone, tmp_path / "cache")
    last = cache / "commits" / f"{plan.units[-1].name}.json"
    last.rename(tmp_path / "hidden")
    show = threading.Timer(0.3, (tmp_path / "hidden").rename, [last])
    show.start()
    assert [r.unit for r in build.all_records(cache, plan)] == [u.name for u in plan.units]
    show.join()
    last.unlink()
    monkeypatch.setattr(build, "PATIENCE", 0.0)
    with pytest.raises(
        CacheError, match=rf"1 of {len(plan.units)} units .* \({plan.units[-1].name} "
    ):
        build.all_records(cache, plan)


# --- what earlier versions left -------------------------------------------------------------------


def test_a_cache_that_remembers_a_number_of_workers_is_mended(
    tmp_path, alone, tiny_target, tiny_data
):
    """Versions with an option --workers wrote it among the options, and knew fewer others."""
    cache = shutil.copytree(alone, tmp_path / "cache")
    identity, options = ledger.read_root(cache)
    manifest = ledger.read_manifest(cache)
    options = {**options, "workers": 4}
    del options["target_attention"], options["no_proof"]
    (cache / "zarr.json").write_bytes(ledger.root_group(identity, options))
    files = {**manifest.files, "zarr.json": file_entry(cache / "zarr.json")}
    ledger.seal(cache, replace(manifest, options=options, files=files))
    assert verify_cache(cache)["ok"]
    (cache / "commits" / "u000001.json").unlink()
    assert repair_cache(cache, device="cpu")["units_repaired"] == 1
    assert is_like(cache, alone)
    assert "workers" not in ledger.read_root(cache)[1]


# --- other machines -------------------------------------------------------------------------------


def test_another_machine_finds_the_target_under_its_own_name_and_looks_whether_it_is_it(
    tmp_path, tiny_target, tiny_data
):
    config = tiny_build(tiny_target, tiny_data, tmp_path / "out")
    found, plan = build.plan_with_weights(config)
    job = build.Job(config=config, options={}, host="another", found=found, plan=plan, committed={})
    copy = shutil.copytree(tiny_target, tmp_path / "copy")
    here = replace(config, target=str(copy), out=tmp_path / "mounted")
    assert job.as_here(here).found.folder == copy
    assert job.as_here(here).config.out == tmp_path / "mounted"
    text = (copy / "config.json").read_text()
    (copy / "config.json").write_text(text.replace('"hidden_act": "silu"', '"hidden_act": "gelu"'))
    with pytest.raises(TargetError, match=r"its config\.json is not that of another"):
        job.as_here(here)
    assert replace(job, host=socket.gethostname()).as_here(here).found.folder == found.folder


def test_every_method_of_a_target_is_told_to_the_processes_that_follow():
    methods = {name for name, method in vars(Target).items() if callable(method) and name[0] != "_"}
    led = {name for name in vars(lockstep.Leader) if name[0] != "_"}
    assert methods
    assert led == methods


# --- ranks ----------------------------------------------------------------------------------------


def test_two_ranks_of_torchrun_build_one_cache(alone, tmp_path, tiny_target, tiny_data):
    out = tmp_path / "out"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    with start([*launcher, *command(tiny_target, tiny_data, out)]) as torchrun:
        told, log = torchrun.communicate(timeout=300)
    assert torchrun.returncode == 0, log
    assert is_like(out, alone)
    assert told.count("fingerprint") == 1  # one rank reports
    assert log.count("extracted ") == 1


def test_two_ranks_of_srun_build_one_cache(alone, tmp_path, tiny_target, tiny_data):
    out, port = tmp_path / "out", free_port()
    ranks = [
        start(
            command(tiny_target, tiny_data, out),
            SLURM_PROCID=number,
            SLURM_NTASKS="2",
            SLURM_LOCALID=number,
            MASTER_ADDR="localhost",
            MASTER_PORT=str(port),
        )
        for number in "10"
    ]
    told = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert is_like(out, alone)
    assert [out.count("fingerprint") for out, _ in told] == [0, 1]
    assert "worker" not in told[0][1] + told[1][1]  # nobody died


def rank_of_two(number: int, port: str) -> Rank:
    found = find_rank(
        {
            "SLURM_PROCID": str(number),
            "SLURM_NTASKS": "2",
            "SLURM_LOCALID": str(number),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
        }
    )
    assert found is not None
    return found


@pytest.fixture
def board_of_two(monkeypatch) -> Board:
    """What `teams` finds where it connects."""
    board = Board(HashStore(), world=2)
    monkeypatch.setattr(teams, "connect", lambda meeting, world: board)
    return board


def test_a_rank_tells_its_own_error_for_rank_0_may_be_ended_before_it_does(board_of_two):
    def no_device():
        raise ConfigError("--devices cpu: there is one too many")

    with pytest.raises(ConfigError, match="one too many"):
        teams.take_part(rank_of_two(1, "1"), no_device, None)
    assert "one too many" in str(board_of_two.failure())
    assert board_of_two.has_left(1)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no process can be made")])
def test_a_rank_that_is_interrupted_leaves_its_units_to_the_others(board_of_two, error):
    def interrupted():
        raise error

    assert board_of_two.take("u000000", 1)
    with pytest.raises(type(error)):
        teams.take_part(rank_of_two(1, "1"), interrupted, None)
    assert board_of_two.take_over("u000000", 0)


def test_every_rank_ends_with_the_error_of_rank_0_and_rank_0_alone_tells_it(tmp_path):
    port = str(free_port())
    config = tiny_build(tmp_path / "no-target", tmp_path / "no-data", tmp_path / "out")
    group = partial(group_of_rank, "cpu", tensor_parallel=1, gpus=0, local_rank=0)
    caught = []

    def other() -> None:
        try:
            teams.take_part(rank_of_two(1, port), group, config)
        except DFlashError as error:
            caught.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    first = rank_of_two(0, port)
    with pytest.raises(DFlashError, match="no-target"):
        teams.as_first_rank(first, group, config, partial(build._built, config))
    thread.join(timeout=60)
    assert [type(error) for error in caught] == [ToldElsewhere]
    assert "no-target" in str(caught[0])
    assert not config.out.exists()
