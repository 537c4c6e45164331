"""Options of a run that change its steps: passes, packs, objectives, schedules, anchors."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import tiny_build
from reference import small
from test_loop import final_state, losses, prepared, tiny_fit
from test_optim import state

from dflash_cache.build import build_cache
from dflash_cache.errors import ConfigError, DFlashError
from dflash_cache.reader import CacheReader
from dflash_fit import loop, prepare
from dflash_fit.attention import DenseSight
from dflash_fit.backends import refuse_attention
from dflash_fit.config import FitConfig
from dflash_fit.drafter import DrafterConfig
from dflash_fit.errors import FitError

CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def final_cache(tiny_target, tiny_data, tmp_path_factory):
    """A cache that keeps what the target's head reads."""
    out = tmp_path_factory.mktemp("final") / "cache"
    build_cache(tiny_build(tiny_target, tiny_data, out, final_hidden=True))
    return out


def lines(run, kind):
    every = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in every if line["kind"] == kind]


@pytest.mark.parametrize(
    "options",
    [
        {"passes_per_pack": 3},
        {"packs_per_step": 2},
        {"passes_per_pack": 2, "packs_per_step": 3},
        {"loss": "kl", "slot_weights": "dpace"},
        {"schedule": "wsd", "cooldown": 0.5, "final_lr": 0.1},
    ],
    ids=["passes", "packs", "both", "objective", "schedule"],
)
def test_a_run_with_such_options_goes_on_exactly_where_it_stopped(final_cache, tmp_path, options):
    whole = tiny_fit(final_cache, tmp_path / "whole", **options)
    broken = tiny_fit(final_cache, tmp_path / "broken", **options)
    loop.fit(whole)
    assert not loop.fit(broken, stop=lambda step: step == 4)["finished"]
    assert loop.fit(broken)["finished"]
    assert losses(broken.out) == losses(whole.out)
    found, wanted = final_state(broken.out), final_state(whole.out)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_passes_multiply_the_steps_and_packs_divide_them(tiny_cache, tmp_path):
    reader = CacheReader(tiny_cache)

    def steps(**options):
        config = tiny_fit(tiny_cache, tmp_path, max_steps=None, **options)
        return prepared(config, reader).steps

    once = steps()
    assert steps(passes_per_pack=3) == 3 * once
    assert steps(packs_per_step=2) == once // 2


def test_two_packs_a_step_count_the_tokens_of_both(tiny_cache, tmp_path):
    one, two = (
        tiny_fit(tiny_cache, tmp_path / str(n), packs_per_step=n, max_steps=4 // n) for n in (1, 2)
    )
    for config in (one, two):
        loop.fit(config)
    tokens = [[line["tokens"] for line in lines(c.out, "train")] for c in (one, two)]
    assert tokens[1] == [sum(tokens[0][:2]), sum(tokens[0][2:])]


def test_a_pack_that_is_trained_twice_is_read_once(tiny_cache, tmp_path, monkeypatch):
    read = []
    real = CacheReader.read_documents

    def counted(self, documents, *rest, **more):
        read.append(tuple(documents))
        return real(self, documents, *rest, **more)

    config = tiny_fit(tiny_cache, tmp_path / "run", passes_per_pack=5, max_steps=10)
    monkeypatch.setattr(loop, "measure", lambda run, state: state)
    monkeypatch.setattr(loop, "tell_before", lambda plan: None)  # which times a reading
    monkeypatch.setattr(CacheReader, "read_documents", counted)
    loop.fit(config)
    assert len(read) == 2
    assert len(set(losses(config.out))) == 10  # each pass draws its own anchors


@pytest.mark.parametrize(
    "options", [{"loss": "kl"}, {"slot_weights": "dpace"}], ids=["kl", "dpace"]
)
def test_a_drafter_learns_by_every_objective(final_cache, tmp_path, options):
    config = tiny_fit(final_cache, tmp_path / "run", max_steps=40, epochs=20, **options)
    loop.fit(config)
    found = [loss for _, loss, _ in losses(config.out)]
    # Not by much: the weights of D-PACE grow as the drafter gets better.
    assert 0 < sum(found[-5:]) < 0.95 * sum(found[:5])


def test_without_final_states_kl_is_refused_before_anything_is_written(tiny_cache, tmp_path):
    config = tiny_fit(tiny_cache, tmp_path / "run", loss="kl")
    with pytest.raises(FitError, match="--final-hidden"):
        loop.fit(config)
    assert not config.out.exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"step": "graph"}, "--step graph: a step on cpu cannot be captured"),
        ({"attention": "flex"}, "--attention flex: only inside a compiled step"),
        ({"attention": "block"}, "--attention block: our kernels want a GPU, not cpu"),
        ({"anchors": 4099, "anchor_microbatch": None}, "--anchors 4099: its largest part of up to"),
    ],
)
def test_what_a_cpu_cannot_do_is_refused_before_anything_is_written(
    tiny_cache, tmp_path, options, told
):
    config = tiny_fit(tiny_cache, tmp_path / "run", **options)
    with pytest.raises(ConfigError, match=told):
        loop.fit(config)
    assert not config.out.exists()


def asked_of_a_gpu(attention, compiled, **shape):
    drafter = DrafterConfig(**small(**shape))
    refuse_attention(attention, CUDA, drafter, dtype=torch.bfloat16, compiled=compiled)


@pytest.mark.parametrize(
    ("attention", "compiled", "shape", "told"),
    [
        ("auto", True, {"head_dim": 8}, "heads of 16, 32, 64, 128, 256 channels, this"),
        ("block", True, {"head_dim": 80}, "choose --attention flex or another --head-dim"),
        ("auto", True, {"head_dim": 64, "block_size": 64}, "choose --attention flex or a smaller"),
        ("flex", False, {"head_dim": 64}, "--attention flex: only inside a compiled step"),
    ],
)
def test_what_attention_on_a_gpu_cannot_do_is_refused(attention, compiled, shape, told):
    with pytest.raises(DFlashError, match=told):
        asked_of_a_gpu(attention, compiled, **shape)


@pytest.mark.parametrize(
    ("attention", "compiled", "head_dim"),
    [("auto", False, 16), ("block", True, 128), ("flex", True, 80), ("dense", False, 8)],
)
def test_what_attention_on_a_gpu_can_do_is_not_refused(attention, compiled, head_dim):
    asked_of_a_gpu(attention, compiled, head_dim=head_dim)


def test_flex_attention_is_not_taken_out_of_the_compiler_for_measuring(tmp_path):
    options = {"attention": "flex", "anchors": 4096, "anchor_microbatch": None}
    pieces, group = prepare.for_measuring(tiny_fit(tmp_path, tmp_path / "run", **options), CUDA)
    assert pieces.sight == DenseSight.of
    assert group == 256  # a mask of all pairs is not for the 2048 of a GPU


def test_more_packs_a_step_than_there_are_is_refused_before_anything_is_written(
    tiny_cache, tmp_path
):
    config = tiny_fit(tiny_cache, tmp_path / "run", packs_per_step=1000)
    with pytest.raises(FitError, match="--packs-per-step 1000: all epochs together have only"):
        loop.fit(config)
    assert not config.out.exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"loss": "mse"}, "--loss mse: want ce or kl"),
        ({"slot_weights": "x"}, "--slot-weights x: want decay or dpace"),
        ({"schedule": "step"}, "--schedule step: want cosine or linear or wsd"),
        ({"attention": "sdpa"}, "--attention sdpa: want auto or block or flex or dense"),
        ({"final_lr": 1.5}, "--final-lr 1.5: want a share"),
        ({"passes_per_pack": 0}, "--passes-per-pack 0: want 1 or more"),
        ({"anchors": 16, "anchor_microbatch": 6}, "--anchors 16: want a multiple"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(tmp_path, options, told):
    with pytest.raises(ConfigError, match=told):
        tiny_fit(tmp_path, tmp_path / "run", **options)


def test_micro_batches_are_parts_of_the_anchors():
    def size(anchors, device):
        return FitConfig(cache="c", out="o", anchors=anchors).microbatch(device)

    assert [size(n, "cuda") for n in (512, 2048, 6144, 5000)] == [512, 2048, 2048, 1250]
    assert size(2 * 2039, "cuda") == 2039  # too uneven for a CPU
    assert [size(n, "cpu") for n in (16, 2048)] == [16, 256]


# --- anchors by measure -------------------------------------------------------------------------


def test_auto_takes_a_number_that_it_measured_tells_it_and_keeps_it(tiny_cache, tmp_path, capsys):
    config = tiny_fit(tiny_cache, tmp_path / "run", anchors="auto", anchor_microbatch=4)
    loop.fit(config, stop=lambda step: step == 3)
    told = capsys.readouterr().err
    stored = json.loads((config.out / "config.json").read_text())["anchors"]
    assert stored % 4 == 0
    assert f"--anchors auto: {stored};" in told
    assert loop.fit(config)["finished"]  # goes on with the same number, and does not measure
    assert "--anchors auto" not in capsys.readouterr().err
    assert len(losses(config.out)) == 10
    loop.fit(replace(config, anchors=stored))


def test_a_slow_reader_gets_more_anchors(tiny_cache, tmp_path, monkeypatch, capsys):
    from dflash_fit import density

    chosen = {}
    for name, seconds in (("fast", 1e-9), ("slow", 1e9)):
        monkeypatch.setattr(density, "time_reading", lambda *_, s=seconds: (s, 90))
        config = tiny_fit(tiny_cache, tmp_path / name, anchors="auto", anchor_microbatch=8)
        run = prepared(config, CacheReader(tiny_cache))
        chosen[name] = run.config.anchors
        assert run.source.shape.anchors == run.config.anchors
        assert run.trainer.config.shape.anchors == run.config.anchors
    assert chosen == {"fast": 8, "slow": 88}  # never more than a pack has candidates
    fast, slow = capsys.readouterr().err.split("--anchors auto: ")[1:]
    assert "no more than 90 candidates to hide it" in slow
    assert "candidates" not in fast


def test_measuring_leaves_no_trace(tiny_cache, tmp_path):
    config = tiny_fit(tiny_cache, tmp_path / "auto", anchors="auto", anchor_microbatch=4)
    reader = CacheReader(tiny_cache)
    run = prepared(config, reader)
    plain = prepared(run.config, reader)
    for name, tensor in state(run.optimizer).items():
        assert torch.equal(tensor, state(plain.optimizer)[name]), name
    assert bool(run.optimizer.armed)
