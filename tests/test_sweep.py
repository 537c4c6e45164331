"""Sweeps: trials that share one read equal those that train alone, whatever happens meanwhile."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from test_loop import final_state, losses, tiny_fit

from dflash_cache.errors import CacheBusyError, ConfigError
from dflash_cache.launcher import settle
from dflash_cache.lock import held
from dflash_cache.reader import CacheReader
from dflash_cli.main import main
from dflash_cli.sweep_table import sweep_table
from dflash_fit import checkpoint, crew, loop, prospects, sweep, trial
from dflash_fit.errors import FitError, RunFolderError
from dflash_fit.sweep_plan import SweepConfig, plan_sweep
from dflash_fit.trial import Ended
from dflash_fit.world import World

STEPS = 60
COMMON = {
    "num_layers": 1,
    "token_budget": 256,
    "anchors": 16,
    "anchor_microbatch": 8,
    "loss_chunk": 16,
    "max_steps": STEPS,
    "epochs": 40,
    "lr": 5e-3,
    "held_out": 0.2,
    "precision": "fp32",
    "eval_every": 20,
    "checkpoint_every": 5,
    "log_every": 1,
    "devices": "cpu",
}


def sweep_file(folder: Path, trials: str, **changes) -> Path:
    common = {**COMMON, **changes}
    lines = [f"{name} = {json.dumps(value)}" for name, value in common.items()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "sweep.toml"
    path.write_text("\n".join(["[fit]", *lines, trials]) + "\n")
    return path


def plan_of(file: Path, cache: Path, out: Path, **options):
    typed = {"cache": str(cache), "out": out}
    return plan_sweep(SweepConfig(sweep=file, **options), in_file={}, typed=typed)


def table(report) -> list[dict]:
    """What does not depend on the clock, or on what was read again."""
    timed = ("hours", "gb_read", "bytes_read", "bytes_taken")
    return [{k: v for k, v in row.items() if k not in timed} for row in report["trials"]]


def evals(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {x["step"]: x["acceptance_length"] for x in lines if x["kind"] == "eval"}


@pytest.fixture(scope="module")
def four(tiny_cache, tmp_path_factory) -> Path:
    """Two block sizes, each with two subsets of the target layers."""
    layers = CacheReader(tiny_cache).identity.target_layer_ids
    text = f"[grid]\nblock_size = [3, 4]\ntarget_layers = [{layers}, {layers[1:]}]\n"
    return sweep_file(tmp_path_factory.mktemp("four"), text)


@pytest.fixture(scope="module")
def swept(tiny_cache, four, tmp_path_factory):
    """A whole sweep, in processes, and its plan."""
    out = tmp_path_factory.mktemp("swept") / "out"
    plan = plan_of(four, tiny_cache, out, trials_per_device=4)
    return plan, sweep.sweep(plan)


def test_trials_of_a_sweep_equal_the_same_runs_alone_and_read_as_much_as_one(swept, tmp_path):
    plan, report = swept
    assert [row["status"] for row in report["trials"]] == ["done"] * 4
    read_alone = []
    for one in plan.trials:
        readers = []

        def open_counted(config, readers=readers):
            readers.append(CacheReader(config.cache))
            return readers[0]

        config = replace(one.config, out=tmp_path / one.name)
        world = World.alone(torch.device("cpu"))
        assert loop.train_in(world, config, open_reader=open_counted)["finished"]
        read_alone.append(readers[0].bytes_read)
        assert losses(one.config.out) == losses(config.out)
        assert evals(one.config.out) == evals(config.out)
        found, wanted = final_state(one.config.out), final_state(config.out)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert report["bytes_read"] <= 1.1 * max(read_alone)
    assert report["bytes_read"] == sum(row["bytes_read"] for row in report["trials"])
    assert report["ratio"] == pytest.approx(report["bytes_read"] / max(read_alone), rel=0.02)
    assert report["bytes_alone"] == pytest.approx(sum(read_alone), rel=0.02)


def test_the_table_is_ranked_and_says_what_the_runs_measured(swept):
    plan, report = swept
    assert json.loads((plan.out / "sweep.json").read_text()) == {
        **report,
        "seconds": pytest.approx(report["seconds"], abs=5),
    }
    lengths = [row["acceptance_length"] for row in report["trials"]]
    assert lengths == sorted(lengths, reverse=True)
    for row in report["trials"]:
        measured = evals(plan.out / row["run"])
        assert row["acceptance_length"] == max(measured.values())
        assert measured[row["acceptance_step"]] == row["acceptance_length"]
        assert row["steps"] == STEPS
        assert row["hours"] > 0
        assert row["acceptance_error"] > 0
        assert set(row["options"]) == {"block_size", "target_layers"}


def test_a_finished_sweep_starts_no_process(swept, monkeypatch):
    plan, report = swept
    again = sweep.sweep(plan, begin=None)
    assert table(again) == table(report)
    assert again["bytes_read"] == report["bytes_read"]


def command(file: Path, cache: Path, out: Path, *more: object) -> list[str]:
    program = "from dflash_cli.main import main; main()"
    words = ["fit", "--sweep", file, "--cache", cache, "--out", out, *more]
    return [sys.executable, "-c", program, *map(str, words)]


def steps_of(run: Path) -> int:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return sum('"kind": "train"' in line for line in lines)


def started(words, plan, *, steps):
    """A sweep in a process of its own whose trials have all trained so many steps."""
    process = subprocess.Popen(
        words,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not all(steps_of(one.config.out) >= steps for one in plan.trials):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    return process


def children_of(process) -> list[int]:
    text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(word) for word in text.split()]


def is_trial(pid: int) -> bool:
    return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()


def failures(out: Path) -> list[str]:
    rows = json.loads((out / "sweep.json").read_text())["trials"]
    return [row["status"] for row in rows if row["status"].startswith("failed")]


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_killed_sweep_goes_on_to_the_same_table(swept, four, tiny_cache, tmp_path):
    plan = plan_of(four, tiny_cache, tmp_path / "out", trials_per_device=4)
    words = command(four, tiny_cache, plan.out, "--trials-per-device", 4)
    process = started(words, plan, steps=12)
    children = children_of(process)
    os.kill(next(pid for pid in children if is_trial(pid)), signal.SIGKILL)
    deadline = time.monotonic() + 20
    while not (lost := failures(plan.out)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.communicate(timeout=60)
    assert len(children) >= 4
    deadline = time.monotonic() + 20
    while any(map(is_alive, children)):
        assert time.monotonic() < deadline, "a trial outlived its sweep"
        time.sleep(0.02)
    assert [told.partition(";")[0] for told in lost] == ["failed: its process was ended by SIGKILL"]
    saved = [checkpoint.checkpoints(one.config.out)[-1] for one in plan.trials]
    assert 5 <= min(map(checkpoint.step_of, saved)) < STEPS
    report = sweep.sweep(plan)
    whole_plan, whole = swept
    assert table(report) == table(whole)
    for ours, theirs in zip(plan.trials, whole_plan.trials, strict=True):
        assert losses(ours.config.out) == losses(theirs.config.out)


def test_a_sweep_that_is_asked_to_stop_saves_its_trials_and_exits_with_zero(tiny_cache, tmp_path):
    file = sweep_file(tmp_path, "[grid]\nblock_size = [3, 4, 5]", max_steps=5000, epochs=4000)
    plan = plan_of(file, tiny_cache, tmp_path / "out")
    first = replace(plan, trials=plan.trials[:2])
    words = command(file, tiny_cache, plan.out, "--trials-per-device", 2)
    process = started(words, first, steps=3)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    report = json.loads((plan.out / "sweep.json").read_text())
    status = {row["name"]: row["status"] for row in report["trials"]}
    assert status == {
        "block_size=3": "interrupted",
        "block_size=4": "interrupted",
        "block_size=5": "queued",
    }
    for one in first.trials:
        saved = checkpoint.step_of(checkpoint.checkpoints(one.config.out)[-1])
        assert saved == losses(one.config.out)[-1][0]
        assert f"{one.name} " in out
    assert not (plan.out / ".lock").exists()


def quiet_life(parent: int, task, mouth) -> None:
    settle(parent)
    mouth.send((None,))


def test_ctrl_c_at_the_terminal_while_a_trial_starts_is_left_to_the_sweep():
    process = trial.Started(None, life=quiet_life)
    # The terminal sends it to every process of the group; this one still imports.
    os.kill(process.process.pid, signal.SIGINT)
    assert wait([process.sentinel], timeout=60)
    while (ended := process.ended()) is None:
        time.sleep(0.01)
    assert ended == Ended(failed=None, stopped=False)
    # A request that comes while its end is being noted ends nobody else.
    process.ask()
    process.kill()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


# --- with trials in this process ------------------------------------------------------------------


class AloneReads:
    """Stands where `SharedReads` does; trials read by themselves."""

    address = ""
    packs = 0  # bytes of memory

    def __init__(self, cache: str) -> None:
        self.told: list[str] = []
        self.joined: list[str] = []
        self.now: set[str] = set()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        assert not self.now

    def most_bytes(self, trials):
        return self.packs

    def join(self, name, group, planes, rows):
        assert name not in self.now
        self.joined.append(name)
        self.now.add(name)

    def leave(self, name):
        self.now.discard(name)

    def counts(self):
        return {"bytes_read": 0, "bytes_served": 0, "by_trial": {}}


class Crews:
    """Begins trials in this process; each is over only when it was looked at a few times."""

    def __init__(self, looks: int = 2) -> None:
        self.looks = looks
        self.begun: list[tuple[str, int, int | None]] = []
        self.most = 0
        self.now: set[str] = set()

    def __call__(self, task):
        self.begun.append((task.name, task.halt, task.stop_at))
        self.now.add(task.name)
        self.most = max(self.most, len(self.now))
        crew = self

        class Process:
            sentinel = os.open(os.devnull, os.O_RDONLY)
            failed = trial.reason_of(lambda: trial.train(task))
            looks = crew.looks

            def ended(self):
                self.looks -= 1
                if self.looks:
                    return None
                os.close(self.sentinel)
                crew.now.discard(task.name)
                return Ended(failed=self.failed, stopped=False)

            def ask(self): ...

            def kill(self): ...

        return Process()


real_acceptance = loop.offline_acceptance


def acceptance_of_weights(drafter, *rest, **more):
    """Tiny drafters all draft the same; these figures are unlike for unlike weights."""
    total = sum(float(weight.detach().double().abs().sum()) for weight in drafter.parameters())
    return {**real_acceptance(drafter, *rest, **more), "acceptance_length": 1 + total * 1e4 % 1}


@pytest.fixture
def crews(monkeypatch):
    monkeypatch.setattr(sweep, "SharedReads", AloneReads)
    monkeypatch.setattr(loop, "offline_acceptance", acceptance_of_weights)
    monkeypatch.setattr(trial, "reader_of", lambda config, task: CacheReader(config.cache))
    return Crews()


def small(**changes):
    return {"max_steps": 4, "eval_every": 4, **changes}


def test_trials_that_have_no_room_take_turns(tiny_cache, tmp_path, crews):
    file = sweep_file(tmp_path, "[grid]\nlr = [1e-3, 2e-3, 3e-3]", **small())
    report = sweep.sweep(
        plan_of(file, tiny_cache, tmp_path / "out", trials_per_device=1), begin=crews
    )
    assert [name for name, _, _ in crews.begun] == ["lr=0.001", "lr=0.002", "lr=0.003"]
    assert crews.most == 1
    assert {row["status"] for row in report["trials"]} == {"done"}


def test_packs_in_memory_leave_less_room_for_trials(tiny_cache, tmp_path, crews, monkeypatch):
    monkeypatch.setattr(crew, "host_room", lambda: 10**12)
    file = sweep_file(tmp_path, "[grid]\nlr = [1e-3, 2e-3]", **small())
    for packs, most in ((0, 2), (10**12, 1)):
        monkeypatch.setattr(AloneReads, "packs", packs)
        begun = Crews()
        out = tmp_path / f"out-{packs}"
        sweep.sweep(plan_of(file, tiny_cache, out, trials_per_device=2), begin=begun)
        assert begun.most == most


def test_a_trial_that_fails_is_named_and_the_others_train(tiny_cache, tmp_path, crews, monkeypatch):
    text = (
        "[[trials]]\nname = 'good'\n[[trials]]\nname = 'layers'\ntarget_layers = [2]\n"
        "[[trials]]\nname = 'broken'\nlr = 1e-4\n"
    )
    file = sweep_file(tmp_path, text, **small())
    real = loop.train_in

    def breaks(world, config, **more):
        if config.lr == 1e-4:
            raise RuntimeError("a bug\nof ours")
        return real(world, config, **more)

    monkeypatch.setattr(loop, "train_in", breaks)
    plan = plan_of(file, tiny_cache, tmp_path / "out")
    status = {row["name"]: row["status"] for row in sweep.sweep(plan, begin=crews)["trials"]}
    assert status["good"] == "done"
    assert status["layers"].startswith("failed: ")
    assert "not [2]" in status["layers"]
    assert status["broken"] == "failed: RuntimeError: a bug"
    # What has failed is tried again.
    monkeypatch.setattr(loop, "train_in", real)
    again = sweep.sweep(plan, begin=crews)
    assert {row["name"]: row["status"] for row in again["trials"]}["broken"] == "done"
    assert again["failed"] == 1
    assert [name for name, _, _ in crews.begun] == ["good", "broken", "broken"]


def test_halving_trains_on_the_better_half_of_the_trials(tiny_cache, tmp_path, crews):
    lrs = [5e-3, 1e-6, 2e-6, 2e-2, 1e-3]
    options = small(max_steps=24, eval_every=100)
    file = sweep_file(tmp_path, f"[grid]\nlr = {lrs}", **options)
    plan = plan_of(file, tiny_cache, tmp_path / "out", halving=3)
    report = sweep.sweep(plan, begin=crews)
    names = [one.name for one in plan.trials]
    measured = {name: evals(plan.out / name) for name in names}
    alive, wanted = names, {}
    for rung in (6, 12):
        ranked = sorted(alive, key=lambda name: (-measured[name][rung], names.index(name)))
        alive = ranked[: -(-len(alive) // 2)]
        wanted |= {name: f"halved at step {rung}" for name in ranked if name not in alive}
    wanted |= dict.fromkeys(alive, "done")
    assert {row["name"]: row["status"] for row in report["trials"]} == wanted
    assert sorted(halt for _, halt, _ in crews.begun) == [6] * 5 + [12] * 3 + [24] * 2
    assert {row["name"]: row["steps"] for row in report["trials"]} == {
        name: max(steps) for name, steps in measured.items()
    }
    # The survivors are those runs that they would have been without rungs.
    lengths = [row["acceptance_length"] for row in report["trials"]]
    assert lengths == sorted(lengths, reverse=True)
    assert len({measured[name][6] for name in names}) == len(names)
    config = next(one.config for one in plan.trials if one.name == alive[0])
    loop.fit(replace(config, out=tmp_path / "alone"))
    found, alone = final_state(plan.out / alive[0]), final_state(tmp_path / "alone")
    assert all(torch.equal(found[name], alone[name]) for name in alone)
    begun = len(crews.begun)
    assert table(sweep.sweep(plan, begin=crews)) == table(report)
    assert len(crews.begun) == begun


def test_halving_of_trials_with_unlike_steps_is_refused(tiny_cache, tmp_path, crews):
    file = sweep_file(tmp_path, "[grid]\nmax_steps = [8, 16]")
    with pytest.raises(ConfigError, match="max_steps=8 8, max_steps=16 16"):
        sweep.sweep(plan_of(file, tiny_cache, tmp_path / "out", halving=2), begin=crews)


@pytest.mark.parametrize(
    ("text", "told"), [("max_steps = [8, 16]", "unlike numbers"), ("max_steps = [2]", "too few")]
)
def test_a_dry_run_refuses_the_rungs_that_a_sweep_would(tiny_cache, tmp_path, text, told):
    file = sweep_file(tmp_path, f"[grid]\n{text}")
    with pytest.raises(ConfigError, match=told):
        sweep.look(plan_of(file, tiny_cache, tmp_path / "out", halving=4))


def test_runs_that_were_not_measured_at_a_rung_are_not_halved(tiny_cache, tmp_path, crews):
    file = sweep_file(tmp_path, "[grid]\nlr = [1e-3, 2e-3]", **small())
    sweep.sweep(plan_of(file, tiny_cache, tmp_path / "out"), begin=crews)
    report = sweep.sweep(plan_of(file, tiny_cache, tmp_path / "out", halving=2), begin=crews)
    assert all("not measured at step 2" in row["status"] for row in report["trials"])


def test_trials_that_are_added_train_and_those_dropped_stay_in_the_table(
    tiny_cache, tmp_path, crews
):
    file = sweep_file(tmp_path, "[grid]\nlr = [1e-3, 2e-3]", **small())
    before = sweep.sweep(plan_of(file, tiny_cache, tmp_path / "out"), begin=crews)
    sweep_file(tmp_path, "[grid]\nlr = [2e-3, 4e-3]", **small())
    report = sweep.sweep(plan_of(file, tiny_cache, tmp_path / "out"), begin=crews)
    assert [name for name, _, _ in crews.begun] == ["lr=0.001", "lr=0.002", "lr=0.004"]
    gone = next(row for row in before["trials"] if row["name"] == "lr=0.001")
    assert {**gone, "dropped": True} in report["trials"]
    assert len(report["trials"]) == 3


def test_a_trial_with_other_options_than_its_folder_fails_before_it_starts(
    tiny_cache, tmp_path, crews
):
    file = sweep_file(tmp_path, "[grid]\nlr = [1e-3]", **small())
    plan = plan_of(file, tiny_cache, tmp_path / "out")
    sweep.sweep(plan, begin=crews)
    sweep_file(tmp_path, "[grid]\nlr = [1e-3]", **small(clip=2.0))
    report = sweep.sweep(plan_of(file, tiny_cache, tmp_path / "out"), begin=crews)
    assert "begun with clip = 1.0, now it is 2.0" in report["trials"][0]["status"]
    assert len(crews.begun) == 1


def test_trials_that_a_crash_left_a_save_behind_catch_up_without_a_trace(
    tiny_cache, tmp_path, crews
):
    options = small(max_steps=8, checkpoint_every=3)
    file = sweep_file(tmp_path, "[grid]\nlr = [1e-3, 2e-3]", **options)
    plan = plan_of(file, tiny_cache, tmp_path / "out")
    for one, step in zip(plan.trials, (3, 6), strict=True):
        loop.fit(one.config, stop=lambda at, step=step: at == step)
    (plan.out / "sweep.json").write_text("{}")
    report = sweep.sweep(plan, begin=crews)
    assert crews.begun == [("lr=0.001", 8, 6), ("lr=0.001", 8, None), ("lr=0.002", 8, None)]
    alone = tmp_path / "alone"
    loop.fit(replace(plan.trials[0].config, out=alone))
    assert losses(plan.trials[0].config.out) == losses(alone)
    assert evals(plan.trials[0].config.out) == evals(alone)
    assert {row["status"] for row in report["trials"]} == {"done"}


def test_a_trial_begins_where_its_newest_readable_checkpoint_stands(tiny_cache, tmp_path):
    run = tmp_path / "run"
    assert trial.begins(run) == (0, 0)
    loop.fit(tiny_fit(tiny_cache, run, max_steps=4, checkpoint_every=2, eval_every=2))
    folders = checkpoint.checkpoints(run)
    states = [json.loads((folder / "state.json").read_text()) for folder in folders]
    places = [(state["epoch"], state["index"]) for state in states]
    assert trial.begins(run) == places[-1] != places[-2]
    (folders[-1] / "state.json").write_text('{"epoch": 0')
    assert trial.begins(run) == places[-2]


@pytest.mark.parametrize("what", ["run", "thesis"])
def test_a_folder_that_is_something_else_is_left_alone(tiny_cache, tmp_path, crews, what):
    out = tmp_path / "out"
    if what == "run":
        loop.fit(tiny_fit(tiny_cache, out, max_steps=1))
    else:
        out.mkdir()
        (out / "thesis.tex").write_text("mine")
    before = sorted(out.rglob("*"))
    file = sweep_file(tmp_path, "[grid]\nlr = [1e-3]", **small())
    with pytest.raises(RunFolderError, match="nothing was touched"):
        sweep.sweep(plan_of(file, tiny_cache, out), begin=crews)
    assert sorted(out.rglob("*")) == before


def test_a_folder_in_which_a_sweep_was_killed_at_once_is_taken(tiny_cache, tmp_path, crews):
    out = tmp_path / "out"
    out.mkdir()
    for name in (".lock", ".sweep.json.12345678.partial"):
        (out / name).touch()
    file = sweep_file(tmp_path, "[grid]\nlr = [1e-3]", **small())
    assert sweep.sweep(plan_of(file, tiny_cache, out), begin=crews)["failed"] == 0
    assert sorted(path.name for path in out.iterdir()) == ["lr=0.001", "sweep.json"]


def test_two_sweeps_in_one_folder_are_kept_apart(tiny_cache, tmp_path, crews):
    file = sweep_file(tmp_path, "[grid]\nlr = [1e-3]", **small())
    with held(tmp_path / "out", doing="a sweep"), pytest.raises(CacheBusyError, match="a sweep"):
        sweep.sweep(plan_of(file, tiny_cache, tmp_path / "out"), begin=crews)


def test_a_sweep_is_not_one_of_many_ranks(tiny_cache, tmp_path, crews, monkeypatch):
    ranked = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost",
              "MASTER_PORT": "1"}  # fmt: skip
    for name, value in ranked.items():
        monkeypatch.setenv(name, value)
    file = sweep_file(tmp_path, "[grid]\nlr = [1e-3]", **small())
    with pytest.raises(FitError, match="without torchrun or srun"):
        sweep.sweep(plan_of(file, tiny_cache, tmp_path / "out"), begin=crews)


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"block_size": 8, "lr": 1.0, "num_layers": 3, "target_layers": (1,)}, True),
        ({"seed": 1, "data_seed": 0}, True),
        ({"seed": 1}, False),
        ({"token_budget": 512}, False),
        ({"held_out": 0.3}, False),
    ],
)
def test_trials_share_a_group_where_they_see_the_same_packs(tmp_path, changes, same):
    config = tiny_fit(Path("cache"), tmp_path)
    other = replace(config, **changes)
    assert (prospects.group_of(config) == prospects.group_of(other)) == same
    assert (prospects.parted_by([config, other]) == []) == same


def test_trials_that_cannot_share_a_read_are_told_why(tiny_cache, tmp_path, crews, capsys):
    file = sweep_file(tmp_path, "[grid]\nseed = [1, 2]", **small())
    plan = plan_of(file, tiny_cache, tmp_path / "out")
    told = "trials differ in seed, so they see 2 unlike sequences of packs"
    assert sweep.look(plan)["parting"].startswith(told)
    report = sweep.sweep(plan, begin=crews)
    assert told in capsys.readouterr().err
    read = {"bytes_read": 20, "bytes_alone": 20, "ratio": 1.0}
    rows = [{**row, "bytes_taken": 10} for row in report["trials"]]
    words = sweep_table({**report, **read, "trials": rows})
    assert "1.00 times what one trial of each of 2 kinds of packs reads" in words
    sweep_file(tmp_path, "[grid]\nseed = [1, 2]", **small(data_seed=0))
    assert sweep.look(plan_of(file, tiny_cache, tmp_path / "new"))["parting"] is None


# --- the command ----------------------------------------------------------------------------------


def run_cli(*words):
    return CliRunner().invoke(main, ["fit", *map(str, words)])


def test_the_command_prints_a_table_or_one_object_and_fails_where_a_trial_has(
    swept, tiny_cache, tmp_path, monkeypatch
):
    plan, report = swept
    words = ["--sweep", plan.file, "--cache", tiny_cache, "--out", plan.out]
    told = run_cli(*words)
    assert told.exit_code == 0, told.output
    lines = told.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == [row["name"] for row in report["trials"]]
    assert "times what one trial reads" in lines[-1]
    found = json.loads(run_cli(*words, "--json").stdout)
    assert table(found) == table(report)
    monkeypatch.setattr(sweep, "sweep", lambda plan: {**report, "failed": 1})
    assert run_cli(*words).exit_code == 1


def test_a_dry_run_tells_what_trials_take_and_writes_nothing(tiny_cache, four, tmp_path):
    words = ["--sweep", four, "--cache", tiny_cache, "--out", tmp_path / "out", "--dry-run"]
    report = json.loads(run_cli(*words, "--json").stdout)
    assert [row["steps"] for row in report["trials"]] == [STEPS] * 4
    assert report["read_bytes"] == max(row["read_bytes"] for row in report["trials"])
    assert report["read_bytes_alone"] == sum(row["read_bytes"] for row in report["trials"])
    told = run_cli(*words)
    assert told.exit_code == 0, told.output
    assert all(row["name"] in told.stdout for row in report["trials"])
    assert not (tmp_path / "out").exists()


def test_options_of_sweeps_without_one_are_refused(tiny_cache, tmp_path):
    told = run_cli("--cache", tiny_cache, "--out", tmp_path / "o", "--halving", 2)
    assert told.exit_code == 1
    assert "--halving: only with --sweep" in told.output
