"""From a sweep file to trials, who of them starts where, and who goes on: integers and names."""

import itertools
import math
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_cache.errors import ConfigError
from dflash_fit.config import FitConfig
from dflash_fit.halving import rungs_of, standing, steps_in_all
from dflash_fit.places import Needs, Place, Start, place_for, starts
from dflash_fit.sweep_plan import NOT_OF_A_TRIAL, SweepConfig, plan_sweep


def plan_of(tmp_path, text, *, typed=None, in_file=None, **more):
    file = tmp_path / "sweep.toml"
    file.write_text(text)
    typed = {"cache": "c", "out": tmp_path / "out"} if typed is None else typed
    return plan_sweep(SweepConfig(sweep=file, **more), in_file=in_file or {}, typed=typed)


# --- the file -------------------------------------------------------------------------------------


def test_a_grid_is_every_combination_of_its_values(tmp_path):
    plan = plan_of(tmp_path, "[grid]\nlr = [1e-3, 1]\nblock-size = [4, 8]\nseed = [1]\n")
    found = [(t.config.lr, t.config.block_size, t.config.seed) for t in plan.trials]
    assert found == list(itertools.product([1e-3, 1.0], [4, 8], [1]))
    assert [t.name for t in plan.trials][:2] == [
        "block_size=4,lr=0.001,seed=1",
        "block_size=8,lr=0.001,seed=1",
    ]
    assert [t.config.out for t in plan.trials] == [plan.out / t.name for t in plan.trials]
    assert plan.trials[0].options == {"block_size": 4, "lr": 1e-3}  # all have the seed


def test_lists_and_defaults_can_be_values_of_a_grid(tmp_path):
    text = '[grid]\ntarget_layers = [[1, 2], "3"]\nsliding_window = ["default", 64]\n'
    trials = plan_of(tmp_path, text).trials
    assert [(t.config.target_layers, t.config.sliding_window) for t in trials] == [
        *(((1, 2), None), ((1, 2), 64), ((3,), None), ((3,), 64)),
    ]
    assert trials[0].name == "target_layers=1+2,sliding_window=default"


def test_trials_of_a_list_have_names_of_their_own_or_made_ones(tmp_path):
    text = '[[trials]]\nname = "wide"\nintermediate_size = 64\n[[trials]]\n[[trials]]\nlr = 1\n'
    plan = plan_of(tmp_path, text)
    assert [t.name for t in plan.trials] == ["wide", "base", "lr=1.0"]
    assert [t.config.intermediate_size for t in plan.trials] == [64, None, None]


def test_a_name_stays_when_trials_are_added(tmp_path):
    before = plan_of(tmp_path, "[grid]\nlr = [1, 2]\n")
    after = plan_of(tmp_path, "[grid]\nlr = [1, 2, 3]\n")
    assert {t.name: t.config for t in before.trials}.items() <= {
        t.name: t.config for t in after.trials
    }.items()


def test_names_that_no_folder_can_have_are_made_safe_and_stay_apart(tmp_path):
    text = f'[grid]\ninit_from = ["a/b", "a b", "{"x" * 200}", "{"x" * 201}"]\n'
    names = [t.name for t in plan_of(tmp_path, text).trials]
    assert len(set(names)) == 4
    assert all(len(name) <= 100 and not set(name) & set("/ ") for name in names)


def test_what_is_typed_wins_over_the_section_and_the_section_over_the_config_file(tmp_path):
    typed = {"cache": "c", "out": tmp_path / "o", "epochs": 2}
    text = "[fit]\nepochs = 3\nmax_steps = 30\nlr = 3\n[grid]\nlr = [1, 2]\n"
    in_file = {"max_steps": 40, "num_layers": 4}
    for trial in plan_of(tmp_path, text, typed=typed, in_file=in_file).trials:
        config = trial.config
        assert (config.epochs, config.max_steps, config.num_layers) == (2, 30, 4)
        assert config.lr in (1, 2)


def test_cache_and_folder_may_stand_in_the_file(tmp_path):
    text = '[fit]\ncache = "here"\nout = "there"\ndevices = "cpu"\n[grid]\nlr = [1]\n'
    plan = plan_of(tmp_path, text, typed={})
    assert (plan.cache, plan.out, plan.devices) == ("here", Path("there"), "cpu")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "want either \\[grid\\]"),
        ("[grid]\nlr = [1]\n[[trials]]\nlr = 1\n", "want either \\[grid\\]"),
        ("[grid]\n", "empty"),
        ("[grids]\nlr = [1]\n", "unknown section 'grids'"),
        ("lr = 1\n[grid]\nlr = [1]\n", "unknown section 'lr'"),
        ("trials = [1]\n", r"want \[\[trials\]\]"),
        ("trials = 1\n", r"want \[\[trials\]\]"),
        ("grid = 1\n", r"want a table \[grid\]"),
        ("[grid]\nlr = 1\n", r"\[grid\], lr: found 1, want a list"),
        ("[grid]\nlr = []\n", r"\[grid\], lr: found \[\], want a list"),
        ("[grid]\nlr = ['a']\n", r"\[grid\], lr: found 'a', want float or int"),
        ("[grid]\nlearning = [1]\n", r"\[grid\]: unknown option 'learning'"),
        ("[grid]\nblock-size = [4]\nblock_size = [8]\n", "is there twice"),
        ("[grid]\nlr = [1, 1]\n", "are the same trial"),
        ("[grid]\nblock_size = [1]\n", r"trial 1 \(block_size=1\): --block-size 1: want 2"),
        ("[[trials]]\nlearning = 1\n", r"\[\[trials\]\] 1: unknown option 'learning'"),
        ("[[trials]]\nname = 'a/b'\n", "want letters"),
        ("[[trials]]\nname = '..'\n", "want letters"),
        ("[[trials]]\nname = 'logs'\n", "is taken"),
        ("[[trials]]\nname = 'a'\n[[trials]]\nname = 'a'\nlr = 1\n", "two trials are named 'a'"),
        ("[[trials]]\nlr = 1\n[[trials]]\nlr = 1\n", "are the same trial"),
        ("[fit]\nlearning = 1\n[grid]\nlr = [1]\n", r"\[fit\]: unknown option 'learning'"),
        ("[fit]\nfollow = true\n[grid]\nlr = [1]\n", "--follow: a sweep wants a complete cache"),
        ("[grid]\nanchors = ['auto', 8]\n", "--anchors auto measures a device that trials share"),
        ("[grid]\nlr = [", "not TOML"),
    ],
)
def test_a_sweep_file_that_cannot_be_meant_is_refused_by_name(tmp_path, text, told):
    with pytest.raises(ConfigError, match=told):
        plan_of(tmp_path, text)


@pytest.mark.parametrize("name", NOT_OF_A_TRIAL)
@pytest.mark.parametrize("text", ["[grid]\n{} = ['x', 'y']\n", "[[trials]]\n{} = 'x'\n"])
def test_what_trials_cannot_differ_in_is_refused(tmp_path, name, text):
    assert name in {field.name for field in fields(FitConfig)}
    with pytest.raises(ConfigError, match=f"{name} cannot differ between trials"):
        plan_of(tmp_path, text.format(name))


@pytest.mark.parametrize("text", ["[grid]\nlr = [1, 2]\n", "[[trials]]\nlr = 1\n[[trials]]\n"])
def test_an_option_that_trials_differ_in_is_not_typed_as_well(tmp_path, text):
    with pytest.raises(ConfigError, match=r"--lr: .* gives it for each trial"):
        plan_of(tmp_path, text, typed={"cache": "c", "out": tmp_path, "lr": 3.0})


@pytest.mark.parametrize("missing", ["cache", "out"])
def test_a_sweep_without_cache_or_folder_is_refused(tmp_path, missing):
    typed = {"cache": "c", "out": tmp_path}
    del typed[missing]
    with pytest.raises(ConfigError, match=f"--{missing}: missing"):
        plan_of(tmp_path, "[grid]\nlr = [1]\n", typed=typed)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"halving": 2}, "--halving: only with --sweep"),
        ({"trials_per_device": 1}, "--trials-per-device: only with --sweep"),
        ({"sweep": Path("x"), "halving": 1}, "want 2 rungs"),
        ({"sweep": Path("x"), "trials_per_device": 0}, "--trials-per-device 0: want 1"),
    ],
)
def test_options_of_sweeps_are_checked(options, told):
    with pytest.raises(ConfigError, match=told):
        SweepConfig(**options)


# --- halving --------------------------------------------------------------------------------------


@given(steps=st.integers(1, 5000), count=st.integers(2, 8))
def test_rungs_double_and_end_with_the_training(steps, count):
    wanted = [math.ceil(steps / 2 ** (count - 1 - rung)) for rung in range(count)]
    if len(set(wanted)) < count:
        with pytest.raises(ConfigError, match="too few for so many rungs"):
            rungs_of(steps, count)
    else:
        assert rungs_of(steps, count) == wanted


class Model:
    """Successive halving as one would do it by hand, rung by rung, with every trial's future."""

    def __init__(self, rungs, future, breaks):
        self.halved, self.trained, alive = {}, dict.fromkeys(future, 0), list(future)
        for rung in rungs:
            alive = [name for name in alive if breaks.get(name, math.inf) > rung]
            for name in alive:
                self.trained[name] = rung
            if rung == rungs[-1]:
                break
            best = sorted(alive, key=lambda name: (-future[name][rung], list(future).index(name)))
            kept = best[: math.ceil(len(alive) / 2)]
            self.halved |= {name: rung for name in alive if name not in kept}
            alive = [name for name in alive if name in kept]
        self.done = alive


@given(data=st.data(), count=st.integers(1, 9), rung_count=st.integers(2, 4))
def test_halving_in_any_order_with_any_failures_equals_halving_by_hand(data, count, rung_count):
    rungs = rungs_of(40, rung_count)
    names = [f"t{number}" for number in range(count)]
    lengths = st.sampled_from([1.0, 1.5, 2.0])
    future = {name: {rung: data.draw(lengths) for rung in rungs} for name in names}
    # A trial breaks just before a rung.
    breaks = {name: data.draw(st.sampled_from([*rungs, math.inf])) for name in names}
    model = Model(rungs, future, breaks)
    measured = {name: {} for name in names}
    failed = []
    while True:
        found = standing(rungs, names, measured, failed=failed)
        open_goals = {n: goal for n, goal in found.goals.items() if goal not in measured[n]}
        if not open_goals:
            break
        name = data.draw(st.sampled_from(sorted(open_goals)))
        if breaks[name] <= open_goals[name]:
            failed.append(name)
        else:
            measured[name][open_goals[name]] = future[name][open_goals[name]]
    assert found.halved == model.halved
    assert {name: max(steps, default=0) for name, steps in measured.items()} == model.trained
    assert sorted(found.goals) == sorted(model.done)


@given(count=st.integers(1, 20), rung_count=st.integers(2, 5))
def test_the_steps_of_a_halved_sweep_are_those_of_all_that_go_on(count, rung_count):
    rungs = rungs_of(80, rung_count)
    future = {f"t{number}": dict.fromkeys(rungs, float(number)) for number in range(count)}
    model = Model(rungs, future, {})
    assert steps_in_all(rungs, count) == sum(model.trained.values())


# --- places ---------------------------------------------------------------------------------------


def needs(name, *, group="g", step=0, goal=100, leap=10, device=1, host=0):
    return Needs(
        name=name, group=group, step=step, goal=goal, leap=leap, device_bytes=device,
        host_bytes=host,
    )  # fmt: skip


def place(device="a", room=100, most=None):
    return Place(device=device, room=room, most=most)


def started(waiting, running=(), places=None, host_room=1000):
    found = starts(waiting, running, places or [place()], host_room=host_room)
    return [(start.needs.name, start.device, start.stop_at) for start in found]


def test_as_many_start_as_there_is_room_for_on_the_emptiest_device():
    waiting = [needs(name, device=40) for name in "uvwxyz"]
    found = started(waiting, places=[place("a"), place("b", room=90)])
    assert found == [("u", "a", None), ("v", "b", None), ("w", "a", None), ("x", "b", None)]


def test_a_cap_counts_those_at_work():
    running = [Start(needs=needs("r"), device="a")]
    assert started([needs("x"), needs("y")], running, [place("a", most=2)]) == [("x", "a", None)]


def test_a_trial_that_is_too_large_for_a_device_gets_it_for_itself():
    large = needs("large", device=500)
    assert started([large]) == [("large", "a", None)]
    assert started([large], [Start(needs=needs("r"), device="a")]) == []
    assert started([needs("x"), large]) == [("x", "a", None)]


def test_host_memory_counts_over_all_devices():
    waiting = [needs(name, host=600) for name in "xy"]
    assert started(waiting, places=[place("a"), place("b")]) == [("x", "a", None)]


def test_trials_that_see_the_same_packs_start_together_the_foremost_first():
    waiting = [needs("a", group="1"), needs("b", group="2"), needs("c", group="1", step=90)]
    assert [name for name, _, _ in started(waiting, places=[place(most=2)])] == ["c", "a"]


def test_a_trial_that_a_crash_left_a_save_behind_catches_up_first():
    waiting = [needs("a", step=20), needs("b", step=10), needs("c", step=20), needs("d", step=0)]
    assert started(waiting) == [("b", "a", 20), ("d", "a", None)]
    behind = Start(needs=needs("b", step=10), device="a", stop_at=20)
    assert started([waiting[0], waiting[2]], [behind]) == []
    caught_up = needs("b", step=20)
    assert {name for name, _, _ in started([waiting[0], waiting[2], caught_up])} == set("abc")


def test_the_next_of_a_group_wait_for_a_trial_that_is_about_to_be_over():
    waiting = [needs("a"), needs("b", group="other")]
    running = [Start(needs=needs("r"), device="a", ending=True)]
    assert started(waiting, running) == [("b", "a", None)]
    assert len(started(waiting)) == 2


def test_trials_far_apart_do_not_wait_for_each_other():
    assert started([needs("a", step=50), needs("b")]) == [("a", "a", None), ("b", "a", None)]


@given(
    waiting=st.lists(
        st.builds(
            needs, st.uuids().map(str), group=st.sampled_from("gh"), step=st.integers(0, 3),
            leap=st.integers(1, 3), device=st.integers(1, 150), host=st.integers(0, 150),
        ),
        min_size=1, max_size=8,
    ),
    places=st.lists(
        st.builds(place, st.uuids().map(str), st.integers(0, 200), st.none() | st.integers(1, 3)),
        min_size=1, max_size=3,
    ),
)  # fmt: skip
def test_everything_ends_and_no_device_is_overfull(waiting, places):
    """A naive run of the schedule: whatever is at work ends, in the order of its start."""
    steps = {trial.name: trial.step for trial in waiting}
    running = []
    for _ in range(50):
        left = [
            Needs(**{**vars(trial), "step": steps[trial.name]})
            for trial in waiting
            if steps[trial.name] < trial.goal
            and trial.name not in {start.needs.name for start in running}
        ]
        running += starts(left, running, places, host_room=200)
        for spot in places:
            there = [start.needs for start in running if start.device == spot.device]
            assert len(there) <= (spot.most or 99)
            assert len(there) <= 1 or sum(other.device_bytes for other in there) <= spot.room
        if not running:
            break
        first = running.pop(0)
        goal = first.needs.goal if first.stop_at is None else first.stop_at
        assert goal > steps[first.needs.name]
        steps[first.needs.name] = goal
    assert all(steps[trial.name] == trial.goal for trial in waiting)


def test_a_place_is_found_only_where_all_fits():
    assert place_for(needs("x"), [], [place(most=1)], host_room=0) == "a"
    busy = [Start(needs=needs("r", device=99), device="a")]
    assert place_for(needs("x", device=2), busy, [place()], host_room=9) is None
