"""The benchmark of many GPUs, rehearsed: all its parts on two CPUs, and its arithmetic."""

import json
import math
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import bench_ranks
import ranks_rates

BENCHMARKS = Path(ranks_rates.__file__).parent

ON_ONE = ["reduce", "train", "extract"]  # parts that one device allows
STEPS = 6
# Two of each kind, which is the least of which one alone is measured, too.
BESIDE = ["--build-devices", "cpu,cpu", "--fit-devices", "cpu,cpu"]
ENDS = ("", "_fp8")
# What is quoted of a part, without the endings of encodings.
REDUCE = [
    *("step_ms_alone", "step_ms_bf16", "step_ms_fp32", "step_ms_sharded"),
    *("reduce_over_alone", "reduce_over_alone_fp32", "reduce_over_alone_sharded"),
    *("reserved_gb_per_gpu", "reserved_gb_per_gpu_sharded"),
    *("state_gb_per_gpu", "state_gb_per_gpu_sharded"),
    *("step_ms_alone_T64_A16", "reduce_over_alone_T64_A16", "reduce_over_alone_fp32_T64_A16"),
    *("allreduce_ms", "allreduce_ms_fp32", "allreduce_gb_s", "allreduce_gb_s_fp32"),
]
TRAIN = [
    *("two_gpu_speedup_train", "two_gpu_speedup_train_unwaited"),
    *(f"train_{what}_{n}" for n in (1, 2) for what in ("tokens_per_s", "anchors_per_s")),
    *(f"train_{what}_{n}" for n in (1, 2) for what in ("waiting", "gb_s_needed", "recompiles")),
]
EXTRACT = [
    *("two_gpu_speedup_extract", "two_gpu_speedup_extract_to_the_end"),
    *("extract_tokens_per_s_1", "extract_tokens_per_s_2"),
    *("extract_gb_s_written_1", "extract_gb_s_written_2"),
]
FOLLOW = [
    *("follow_build_ratio", "follow_fit_ratio", "follow_waiting", "follow_waiting_alone"),
    *("follow_build_alone_tokens_per_s", "follow_fit_alone_tokens_per_s"),
    *("follow_build_tokens_per_s", "follow_fit_tokens_per_s", "follow_fit_anchors_per_s"),
    *("follow_gb_s_written_alone", "follow_gb_s_written", "follow_gb_s_read"),
    *("follow_seconds_at_once", "follow_lines_at_once"),
    *("follow_build_one_tokens_per_s", "follow_fit_one_tokens_per_s", "follow_waiting_one"),
    *("follow_build_alone_over_one", "follow_build_over_one", "follow_build_tokens_per_s_per_gpu"),
    *("follow_fit_alone_over_one", "follow_fit_over_one", "follow_fit_anchors_over_one"),
]
TENSOR = [
    *("tensor_apart_median", "tensor_apart_worst", "tensor_noise_median", "tensor_noise_worst"),
    *("tensor_tokens_per_s_shared", "tensor_tokens_per_s_alone", "tensor_speedup"),
]


def start(*words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, BENCHMARKS / "bench_ranks.py", "--tiny", *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(BENCHMARKS.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What two rehearsals found; beside each other, since each of them mostly waits."""
    folder, out = tmp_path_factory.mktemp("disk"), tmp_path_factory.mktemp("out")
    common = ["--devices", "cpu,cpu", "--steps", STEPS, "--folder", folder]
    halves = {
        "ranks": ["--parts", "reduce,train,kill,tensor"],
        "workers": ["--parts", "extract,follow", "--encodings", "fp8", *BESIDE],
    }
    started = {
        name: start(*common, *words, "--out", out / f"{name}.json")
        for name, words in halves.items()
    }
    told = {name: process.communicate(timeout=300) for name, process in started.items()}
    results = {}
    for name, process in started.items():
        assert process.returncode == 0, told[name][1]
        results[name] = json.loads((out / f"{name}.json").read_text())
        assert told[name][0].endswith(json.dumps(results[name], indent=1) + "\n")
        assert results[name]["shape"]["failed"] == {}
    assert list(folder.iterdir()) == [], "something was left on the disk"
    return results


@pytest.fixture(scope="module")
def figures(found):
    return {**found["ranks"]["figures"], **found["workers"]["figures"]}


def test_every_figure_of_every_part_is_there_and_a_number(figures):
    wanted = [*REDUCE, *TENSOR, "kill_seconds", "kill_named"]
    wanted += [f"{key}{end}" for key in TRAIN for end in ENDS]
    wanted += [f"{key}_fp8" for key in (*EXTRACT, *FOLLOW)]
    assert set(wanted) - figures.keys() == set()
    assert [key for key, value in figures.items() if not math.isfinite(value)] == []


def test_a_shared_state_is_half_of_a_whole_one(figures):
    share = figures["state_gb_per_gpu_sharded"] / figures["state_gb_per_gpu"]
    assert share == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_trains_all_its_steps(figures, ranks, end):
    assert figures[f"train_steps_{ranks}{end}"] == STEPS
    assert figures[f"train_tokens_per_s_{ranks}{end}"] > 0


def test_the_trainer_beside_a_builder_takes_what_it_builds(figures):
    # The held-out sample, and a pack or two: the plan of the steps does not know the windows.
    assert 0.9 < figures["follow_share_taken_fp8"] < 1
    assert figures["follow_lines_at_once_fp8"] >= 1


def test_the_states_of_a_shared_target_differ_by_rounding(figures):
    assert figures["tensor_apart_median"] < 0.02
    assert figures["tensor_apart_worst"] < 0.1


def test_the_end_of_a_killed_rank_is_told_by_its_number(found, figures):
    assert found["ranks"]["shape"]["kill_message"].startswith("rank 1 on ")
    assert figures["kill_named"] == 1
    assert figures["kill_seconds"] < 30


def test_a_part_that_takes_too_long_is_named_and_leaves_nothing_behind(tmp_path):
    disk, out = tmp_path / "disk", tmp_path / "late.json"
    disk.mkdir()
    process = start(
        *("--devices", "cpu", "--parts", "extract", "--limit", 3, "--folder", disk, "--out", out)
    )
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1, errors
    shape = json.loads(out.read_text())["shape"]
    assert shape["failed"] == {"extract": "Overdue: ended after 3 s (--limit)"}
    assert list(disk.iterdir()) == []


def test_a_part_ends_when_the_time_of_all_is_over():
    soon = time.monotonic() + 0.05
    with (
        pytest.raises(bench_ranks.Overdue, match="--limit-all"),
        bench_ranks.at_most(9, within=soon),
    ):
        time.sleep(5)


def parsed(monkeypatch, *words: str) -> Namespace:
    monkeypatch.setattr(sys, "argv", ["bench_ranks.py", "--tiny", "--devices", "cpu", *words])
    return bench_ranks.parse_args()


@pytest.mark.parametrize("more", [[], ["--build-devices", "cpu"], ["--fit-devices", "cpu"]])
def test_parts_that_take_two_devices_are_refused_with_one(monkeypatch, capsys, more):
    with pytest.raises(SystemExit, match="2"):
        parsed(monkeypatch, "--parts", "reduce,follow", *more)
    told = "follow takes two devices or more; give --build-devices and --fit-devices"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        (["--parts", "follow", "--build-devices", "cpu", "--fit-devices", "cpu"], ["follow"]),
        (["--build-devices", "cpu", "--fit-devices", "cpu"], [*ON_ONE, "follow"]),
        (["--build-devices", "cpu"], ON_ONE),
        ([], ON_ONE),
    ],
)
def test_one_device_builds_and_trains_where_it_is_given_for_both(monkeypatch, more, wanted):
    assert parsed(monkeypatch, *more).parts == wanted


# --- arithmetic -----------------------------------------------------------------------------------

PHASE = {
    "tokens": 900,
    "workers": [
        {"began": 10.0, "ended": 16.0, "bytes": 6e9, "series": [[12.0, 200], [12.0, 40], [16, 60]]},
        {"began": 10.0, "ended": 20.0, "bytes": 5e9, "series": [[11.0, 100], [20.0, 500]]},
    ],
}


def test_rates_of_workers_are_over_the_time_in_which_they_had_units():
    assert ranks_rates.rate(PHASE) == pytest.approx(300 / 6 + 600 / 10)
    assert ranks_rates.rate_to_the_end(PHASE) == pytest.approx(900 / 10)
    assert ranks_rates.gb_per_s(PHASE) == pytest.approx(1.0 + 0.5)


@pytest.mark.parametrize(("begin", "end"), [(0, 99), (10.5, 11.5), (11, 12), (13.25, 19), (16, 20)])
def test_tokens_of_an_interval_are_those_of_its_slices(begin, end):
    slices = 20_000
    tokens = 0.0
    for worker in PHASE["workers"]:
        done = {worker["began"]: 0.0}
        for at, more in worker["series"]:
            done[at] = max(done.values()) + more
        times, counts = list(done), list(done.values())
        for number in range(slices):
            middle = begin + (end - begin) * (number + 0.5) / slices
            for before, after in zip(range(len(times)), range(1, len(times)), strict=False):
                if times[before] < middle <= times[after]:
                    slope = (counts[after] - counts[before]) / (times[after] - times[before])
                    tokens += slope * (end - begin) / slices
    assert ranks_rates.tokens_between(PHASE, begin, end) == pytest.approx(tokens, rel=2e-3)


def test_the_speed_of_a_run_is_that_of_all_its_time():
    lines = [
        {"step": 1, "tokens": 100, "tokens_per_s": 50.0, "anchors": 10, "waiting": 0.5,
         "gb_per_s_needed": 1.0},
        {"step": 2, "tokens": 300, "tokens_per_s": 50.0, "anchors": 10, "waiting": 0.1,
         "gb_per_s_needed": 3.0},
    ]  # fmt: skip
    found = ranks_rates.speed(lines)
    assert found["seconds"] == 2 + 6
    assert found["tokens_per_s"] == 50
    assert found["anchors_per_s"] == 20 / 8
    assert found["waiting"] == pytest.approx((2 * 0.5 + 6 * 0.1) / 8)
    assert found["gb_per_s_needed"] == pytest.approx((2 * 1 + 6 * 3) / 8)
    assert found["steps"] == 2


def phase(crowd: int, *, rate: float) -> dict:
    """What builders noted who made so many tokens a second each."""
    own = {"began": 0.0, "ended": 100.0, "bytes": 1e9, "series": [[100.0, 100 * rate]]}
    tokens = crowd * 100 * rate
    return {"workers": [own] * crowd, "tokens": tokens, "bytes": 2 * tokens}


def log(crowd: int, *, rate: float, anchors: float) -> dict:
    """The log of so many trainers, each of that many tokens and anchors a second."""
    lines = [
        {"step": step, "time": 10.0 * step, "tokens": 10 * crowd * rate, "waiting": 0.0,
         "tokens_per_s": crowd * rate, "anchors": 10 * crowd * anchors, "gb_per_s_needed": 1.0}
        for step in range(1, 10)
    ]  # fmt: skip
    first = {**lines[0], "time": 5.0, "tokens_per_s": 1.0}  # left out
    return {"lines": [first, *lines]}


@pytest.mark.parametrize("builders", [1, 5])
@pytest.mark.parametrize("trainers", [1, 3])
def test_what_many_do_is_compared_with_what_one_does_alone(builders, trainers):
    notes = {
        "built.alone": phase(builders, rate=90.0),
        "built.beside": phase(builders, rate=75.0),
        "trained.alone": log(trainers, rate=240.0, anchors=30.0),
        "trained.beside": log(trainers, rate=150.0, anchors=20.0),
    }
    build_one, fit_one, anchors_one = 90.0, 240.0, 30.0  # those alone are one
    if builders > 1:
        build_one, notes["built.one"] = 100.0, phase(1, rate=100.0)
    if trainers > 1:
        fit_one, anchors_one = 300.0, 50.0
        notes["trained.one"] = log(1, rate=300.0, anchors=50.0)
    found = bench_ranks.follow_figures(
        SimpleNamespace(
            encodings=["fp8"], leave_out=1, passes=2, found=lambda name: notes.get(name[4:])
        ),
        Namespace(),
    )
    wanted = {
        "follow_build_over_one": builders * 75.0 / build_one,
        "follow_build_tokens_per_s_per_gpu": 75.0,
        "follow_build_ratio": 75.0 / 90.0,
        "follow_fit_over_one": trainers * 150.0 / fit_one,
        "follow_fit_anchors_over_one": trainers * 20.0 / anchors_one,
        "follow_fit_ratio": 150.0 / 240.0,
    }
    if builders > 1:
        wanted["follow_build_alone_over_one"] = 5 * 90.0 / 100.0
    if trainers > 1:
        wanted["follow_fit_alone_over_one"] = 3 * 240.0 / 300.0
    said = {key: found[f"{key}_fp8"] for key in wanted}
    assert said == pytest.approx(wanted)
    assert ("follow_build_alone_over_one_fp8" in found) == (builders > 1)
    assert ("follow_fit_alone_over_one_fp8" in found) == (trainers > 1)


def test_a_line_that_is_half_written_does_not_count(tmp_path):
    assert ranks_rates.train_lines(tmp_path) == []
    lines = [{"kind": "capture", "step": 0}, {"kind": "train", "step": 1}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"kind": "train", "st')
    assert ranks_rates.train_lines(tmp_path) == lines[1:]
