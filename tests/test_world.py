"""Ranks meet, tell each other things, and all end for one reason.

Every process here costs seconds of imports: what needs none is tested with plain values, and what
takes its time runs beside the other tests.
"""

import atexit
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import rank_work
import torch
from click.testing import CliRunner
from conftest import free_port
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, PrefixStore, TCPStore

from dflash_cache import launcher
from dflash_cache.errors import ConfigError, DFlashError, DiskFullError, ToldElsewhere
from dflash_cache.ranks import find_rank
from dflash_cli.main import main
from dflash_fit import launch, loop
from dflash_fit import world as world_module
from dflash_fit.agreement import Agreement
from dflash_fit.circle import Clock
from dflash_fit.config import FitConfig
from dflash_fit.errors import DrafterError, FitError, RunFolderError
from dflash_fit.launch import fit_everywhere
from dflash_fit.pulse import Beat, Pulse, State, stuck_rank
from dflash_fit.verdict import Verdict
from dflash_fit.world import World, arrive, meet

HOST = socket.gethostname()
CPU = torch.device("cpu")
TIMEOUT = 3.0


def start(*words: str, **variables: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, rank_work.__file__, *words],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parents[1]),
            **variables,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def by_hand(
    name: str, *, size: int, timeout: float = 60.0, folder: Path | str = ""
) -> list[subprocess.Popen]:
    """Ranks in an environment as torchrun makes it; rank 0 keeps the store.

    In an empty folder they first wait for each other without a timeout.
    """
    words, port = (name, str(timeout), str(folder)), free_port()
    return [
        start("rank", *words, **environment(rank, size=size, port=port)) for rank in range(size)
    ]


def environment(rank: int, *, size: int, port: int) -> dict[str, str]:
    """As torchrun makes it, but that rank 0 keeps the store."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }


def wait_for(condition, *, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)


def ranks_of(folder: Path) -> list[int]:
    """Processes of ranks that train, as they have written down."""
    return [int(text) for path in folder.iterdir() if (text := path.read_text())]


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module", autouse=True)
def stuck(tmp_path_factory):
    """It waits more than it works."""
    folder = tmp_path_factory.mktemp("stuck")
    ranks = by_hand("get_stuck", size=2, timeout=TIMEOUT, folder=folder)
    yield ranks
    for rank in ranks:
        rank.kill()
        rank.communicate()


# --- started by a parent --------------------------------------------------------------------------


def test_ranks_hear_the_same_from_each_other_whatever_their_speed():
    found = fit_everywhere(rank_work.talk, {"kept": "yes"}, ["cpu"] * 3, timeout=60.0)
    assert found["by"] == 0
    assert found["kept"] == "yes"
    assert [told["rank"] for told in found["told"]] == [0, 1, 2]
    assert {told["shared"] for told in found["told"]} == {"from 0"}
    # Rank 1 raised its flag in call 7.
    flags = [step == 9 for step in range(20)]
    assert [told["answers"] for told in found["told"]] == [flags] * 3
    assert [told["left"] for told in found["told"]] == [[False, False, True]] * 3
    assert all(told["group"] for told in found["told"])  # Ctrl-C is for the parent alone


def test_processes_may_be_started_by_any_thread():
    def start_nothing():
        with launcher._signals_kept():
            return signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(start_nothing).result() is signal.getsignal(signal.SIGTERM)


def test_an_error_of_one_rank_ends_the_others_and_comes_back_as_itself(capfd):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RunFolderError, match=r"^run: it is that of another drafter$"):
        fit_everywhere(rank_work.fail, {}, ["cpu"] * 2, timeout=60.0)
    assert capfd.readouterr().err == ""
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_rank_that_was_killed_is_named_and_the_others_end_where_they_hang():
    began = time.monotonic()
    with pytest.raises(FitError, match=rf"^rank 2 on {HOST} is gone \(SIGKILL\)"):
        fit_everywhere(rank_work.be_killed, {}, ["cpu"] * 3, timeout=60.0)
    assert time.monotonic() - began < 60


def test_a_signal_lets_the_ranks_end_well_and_the_second_one_ends_them_at_once(tmp_path):
    folders = {deaf: tmp_path / (deaf or "hears") for deaf in ("", "deaf")}
    for folder in folders.values():
        folder.mkdir()
    well, at_once = [
        start("everywhere", "train", "60", str(folder), deaf) for deaf, folder in folders.items()
    ]
    wait_for(lambda: [len(ranks_of(folder)) for folder in folders.values()] == [2, 1])
    ranks = [rank for folder in folders.values() for rank in ranks_of(folder)]
    well.send_signal(signal.SIGTERM)
    at_once.send_signal(signal.SIGINT)
    told, log = well.communicate(timeout=120)
    assert (well.returncode, log) == (0, "")
    assert "'asked': [[15], [15]]" in told  # once
    assert at_once.poll() is None
    at_once.send_signal(signal.SIGINT)
    assert at_once.communicate(timeout=60) == ("", "")
    assert at_once.returncode == 128 + signal.SIGINT
    wait_for(lambda: not any(map(alive, ranks)), seconds=10)


# --- started by others ----------------------------------------------------------------------------


def test_what_nobody_has_planned_is_told_by_its_rank_alone():
    ranks = by_hand("break_down", size=2)
    logs = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert logs[0] == ""
    assert logs[1].count("Traceback") == 1
    assert logs[1].endswith(f"\nFitError: rank 1 on {HOST}: ValueError: a number that is none\n")


def test_the_ranks_of_other_machines_tell_once_who_is_gone():
    ranks = by_hand("be_killed", size=2)
    logs = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, -signal.SIGKILL]
    told = logs[0]
    assert told.startswith(f"Error: rank 1 on {HOST} is gone; checkpoints are kept")
    assert told.count("\n") == 1


def test_the_end_of_the_rank_that_keeps_the_store_is_told_as_what_it_is():
    ranks = by_hand("lose_the_first", size=2)
    logs = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [-signal.SIGKILL, 1]
    told = f"rror: rank 1 on {HOST}: rank 0 or its launcher is gone; checkpoints are kept"
    assert told in logs[1].strip().splitlines()[-1]
    assert "Traceback" not in logs[1]


def test_a_rank_that_gets_on_no_more_is_named_with_the_timeout(stuck):
    told = [rank.communicate(timeout=120) for rank in stuck]
    assert [rank.returncode for rank in stuck] == [1, 1]
    [log] = [log for _, log in told if log]
    assert log.startswith(f"Error: rank 1 on {HOST} has not got on for ")
    assert "in step 4; the others are in step 5. The timeout is 3 s (--rank-timeout)" in log


# --- before they have met -------------------------------------------------------------------------


def join(errors: dict[int, Exception], *, size: int) -> list[Exception]:
    """How each of so many ranks, threads of this process, ends; some fail before they join."""
    port = free_port()

    def of(number: int) -> Exception:
        rank = find_rank(environment(number, size=size, port=port))
        try:
            with launch.joining(rank):
                if number in errors:
                    raise errors[number]
            launch.fit_as_rank(rank_work.fail, {}, rank, "cpu", timeout=60.0)
        except Exception as error:
            return error
        raise AssertionError(f"rank {number} went on alone")

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(of, range(size)))


@pytest.mark.parametrize("broken", [0, 2])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConfigError("--devices 7: GPU 7 is not there"), "--devices 7: GPU 7 is not there"),
        (ValueError("a number\nand more"), "ValueError: a number"),
    ],
)
def test_a_rank_that_fails_before_it_joins_ends_all_at_once_by_its_name(broken, error, told):
    began = time.monotonic()
    found = join({broken: error}, size=3)
    assert time.monotonic() - began < 30
    assert type(found[broken]) is type(error)
    told = f"rank {broken} on {HOST}: {told}"
    assert str(found[broken]) == (told if isinstance(error, DFlashError) else str(error))
    others = [found[rank] for rank in {0, 1, 2} - {broken}]
    assert [(type(other), str(other)) for other in others] == [(ToldElsewhere, told)] * 2


def test_ranks_that_all_fail_before_they_join_tell_it_once():
    found = join({rank: ConfigError("--trackers wandb: is not there") for rank in range(3)}, size=3)
    kinds = [type(error) for error in found]
    assert sorted(kinds, key=str) == sorted([ConfigError, ToldElsewhere, ToldElsewhere], key=str)


def test_an_error_is_told_also_where_nobody_else_has_come(monkeypatch):
    def nobody(*_, **__):
        raise DFlashError("localhost:1: nobody answers")

    monkeypatch.setattr(launch, "open_store", nobody)
    rank = find_rank(environment(1, size=2, port=1))
    told = rf"^rank 1 on {HOST}: no such device$"
    with pytest.raises(ConfigError, match=told), launch.joining(rank):
        raise ConfigError("no such device")


@pytest.fixture
def verdict_of_two(monkeypatch) -> Verdict:
    """That of a job whose rank 0 has come and gone; this process is rank 1."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for name, value in environment(1, size=2, port=store.port).items():
        monkeypatch.setenv(name, value)
    prefix = f"{find_rank(os.environ).meeting.prefix}/fit/verdict"
    verdict = Verdict(PrefixStore(prefix, store), rank=0, size=2)
    verdict.heard()
    return verdict


@pytest.mark.parametrize("wrong", [{"devices": "97"}, {"trackers": ("diary",)}])
def test_the_devices_and_trackers_of_a_run_are_looked_at_before_a_rank_joins(
    verdict_of_two, tmp_path, wrong
):
    config = FitConfig(cache="cache", out=tmp_path, **{"devices": "cpu", **wrong})
    with pytest.raises(ConfigError, match=rf"^rank 1 on {HOST}: --(devices 97|trackers diary): "):
        loop.fit(config)
    assert verdict_of_two.read().error.args[0].startswith(f"rank 1 on {HOST}: --")


@pytest.mark.parametrize(
    ("words", "told", "code"),
    [
        ("--cache c --out o --anchros 5", "No such option", 2),
        ("--out o", "Missing option '--cache'", 2),
        ("--cache c --out o --lr -1", "--lr -1", 1),
        ("--cache c --out o --config none.toml", "none.toml", 1),
    ],
)
def test_options_that_are_wrong_on_one_machine_end_the_ranks_of_all(
    verdict_of_two, words, told, code
):
    done = CliRunner().invoke(main, ["fit", *words.split()])
    assert done.exit_code == code
    assert told in done.stderr
    assert told in str(verdict_of_two.read().error)


def test_a_launcher_that_says_too_little_hides_no_mistake_of_the_user(monkeypatch):
    """As in a batch script of Slurm that starts one process and knows of eight."""
    for name, value in {"PROCID": "0", "NTASKS": "8", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    done = CliRunner().invoke(main, ["fit", "--cache", "c", "--out", "o", "--anchros", "5"])
    assert done.exit_code == 2
    assert "No such option" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "--dry-run --cache nowhere --out o --anchros 5",
        "--sweep sweep.toml --cache nowhere --out o --anchros 5",
    ],
)
def test_who_only_looks_ends_no_other_rank(verdict_of_two, words):
    CliRunner().invoke(main, ["fit", *words.split()])
    assert verdict_of_two.read() is None


# --- without processes ----------------------------------------------------------------------------


def test_a_process_alone_needs_no_group():
    world = World.alone(CPU)
    assert (world.first, world.distributed, world.store) == (True, False, None)
    assert world.gather(7) == [7]
    assert world.share({"a": 1}) == {"a": 1}
    world.barrier()
    agreement = Agreement(world)
    assert [agreement.any(False), agreement.any(True), agreement.drain()] == [False, True, False]
    world.part()


def test_a_group_of_one_can_be_made_and_taken_apart():
    for _ in range(2):
        world = meet(HashStore(), device=CPU)
        assert world.distributed
        total = torch.ones(3)
        torch.distributed.all_reduce(total)
        assert torch.equal(total, torch.ones(3))
        world.part()
        assert not torch.distributed.is_initialized()


def test_a_group_that_hangs_at_its_end_does_not_hold_the_program_up(monkeypatch, capsys):
    last = []
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: time.sleep(1.0))
    monkeypatch.setattr(atexit, "register", last.append)
    monkeypatch.setattr(world_module, "GOODBYE", 0.05)
    World(rank=0, size=1, device=CPU, host=object()).part()
    assert last == [world_module._leave_well]
    assert "still open after 0.05 s" in capsys.readouterr().err


def test_ranks_that_do_not_come_are_named():
    store = HashStore()
    verdict = Verdict(store, rank=1, size=4)
    store.set("here/3", "another")
    with pytest.raises(FitError, match=r"rank 0, 2 of 4 \(from 0\) did not come within 0.2 s"):
        arrive(store, verdict, rank=1, size=4, timeout=0.2)
    verdict.give(DrafterError("drafter: no config.json"))
    with pytest.raises(ToldElsewhere, match=r"drafter: no config\.json"):
        arrive(store, verdict, rank=1, size=4, timeout=60.0)
    for rank in (0, 2):
        store.set(f"here/{rank}", f"machine-{rank}")
    found = arrive(store, verdict, rank=1, size=4, timeout=0.0)
    assert found == ["machine-0", HOST, "machine-2", "another"]


@pytest.mark.parametrize("kind", [FitError, RunFolderError, DrafterError, DiskFullError])
def test_the_first_reason_counts_and_comes_back_as_itself(kind):
    store = HashStore()
    first, second = (Verdict(store, rank=rank, size=2) for rank in range(2))
    assert second.read() is None
    assert first.give(kind("the same words"), lost=[1])
    assert not second.give(kind("the same words"))
    reason = second.read()
    assert (type(reason.error), str(reason.error)) == (kind, "the same words")
    assert reason.lost == (1,)


def test_an_error_of_a_kind_that_is_not_known_comes_back_as_an_error_for_people():
    class New(DFlashError):
        pass

    verdict = Verdict(HashStore(), rank=0, size=1)
    verdict.give(New("words"))
    assert type(verdict.read().error) is DFlashError


def test_who_keeps_the_store_waits_for_all_who_can_still_hear():
    store = HashStore()
    ranks = [Verdict(store, rank=rank, size=3) for rank in range(3)]
    ranks[1].heard()
    began = time.monotonic()
    ranks[0].await_all_heard(seconds=60.0, but=[2])
    assert time.monotonic() - began < 1
    ranks[0].await_all_heard(seconds=0.2)
    assert time.monotonic() - began > 0.2


# --- who holds the others up ----------------------------------------------------------------------

WORK, WAIT, REST, LEAVE = State


def beats(*told: tuple[State, int, float]) -> list[Beat]:
    return [Beat(state=state, step=step, age=age) for state, step, age in told]


@pytest.mark.parametrize(
    ("told", "blamed"),
    [
        ([(WORK, 5, 9.0), (WORK, 5, 2.0)], None),  # in time
        ([(WORK, 5, 11.0), (WORK, 5, 2.0)], 0),
        ([(WORK, 6, 11.0), (WORK, 5, 10.5)], 1),  # the one behind
        ([(WORK, 6, 11.0), (WORK, 5, 9.9)], 1),  # though it is not late itself, but will be
        ([(WORK, 6, 11.0), (WORK, 5, 0.1)], 0),  # it gets on
        ([(WAIT, 5, 12.0), (WORK, 5, 11.0)], 1),  # the one that is waited for
        ([(WAIT, 5, 12.0), (WAIT, 5, 13.0)], 1),
        ([(REST, 5, 99.0), (REST, 5, 99.0)], None),
        ([(REST, 5, 99.0), (WAIT, 5, 99.0)], None),  # it waits for one that rests
        ([(REST, 5, 99.0), (WORK, 6, 99.0)], None),
        ([(REST, 5, 99.0), (WORK, 4, 11.0)], 1),
        ([(LEAVE, 9, 99.0), (WORK, 9, 11.0)], 1),
        ([(LEAVE, 9, 99.0), (LEAVE, 9, 99.0)], None),
    ],
)
def test_the_rank_furthest_behind_is_blamed(told, blamed):
    assert stuck_rank(beats(*told), timeout=10.0) == blamed


@given(
    st.lists(
        st.tuples(st.sampled_from(State), st.integers(0, 3), st.floats(0, 20)),
        min_size=1,
        max_size=5,
    )
)
def test_nobody_is_blamed_who_rests_leaves_or_gets_on(told):
    found = stuck_rank(beats(*told), timeout=10.0)
    if found is not None:
        state, step, age = told[found]
        assert state in (WORK, WAIT)
        assert age > 5.0
        assert max(age for state, _, age in told if state in (WORK, WAIT)) > 10.0
        late_work = [other for other in told if other[0] is WORK and other[2] > 10.0]
        if late_work and REST not in [other[0] for other in told]:
            assert state is WORK
            assert step <= min(other[1] for other in late_work)
    elif all(state in (WORK, WAIT) for state, _, _ in told):
        assert max(age for _, _, age in told) <= 10.0


def test_a_pulse_says_what_its_rank_is_about():
    pulse = Pulse()
    seen = [(pulse.state, pulse.step)]
    pulse.tick(3)
    with pulse.waiting():
        seen.append((pulse.state, pulse.step))
        with pulse.resting(), pulse.resting():
            seen.append((pulse.state, pulse.step))
        seen.append((pulse.state, pulse.step))
    assert seen == [(WORK, 0), (WAIT, 3), (REST, 3), (WAIT, 3)]
    assert pulse.state is WORK
    assert pulse.ticks == 4  # the end of every wait is progress


def test_time_in_which_the_process_was_stopped_does_not_count(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = Clock()
    ages = []
    for passed, ticks in ((1.0, 1), (1.0, 1), (3600.0, 1), (1.0, 2), (2.0, 2)):
        now[0] += passed
        clock.go_on()
        ages.append(clock.age(ticks))
    assert ages == [0.0, 1.0, 6.0, 0.0, 2.0]
