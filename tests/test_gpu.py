"""The same results on a GPU as on the CPU, which the other tests check against oracles."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import chat_rows, tiny_build, write_jsonl
from test_loop import losses, tiny_fit
from torch.distributed import HashStore

from dflash_cache.build import build_cache
from dflash_cache.config import ENCODING_NAMES
from dflash_cache.pinned import host_tensor
from dflash_cache.reader import CacheReader
from dflash_fit import loop
from dflash_fit.config import EvalConfig
from dflash_fit.evaluate import evaluate_drafter
from dflash_fit.world import meet

# The compiler warns of itself.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


def gpu_fit(cache, out, **changes):
    """A captured run; the kernels want heads of at least 16 channels."""
    return tiny_fit(cache, out, **{"devices": "cuda", "head_dim": 16, **changes})


def lines(run, kind):
    every = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in every if line["kind"] == kind]


def test_a_run_is_captured_once_compiles_nothing_later_and_says_so(tiny_cache, tmp_path, capsys):
    config = gpu_fit(tiny_cache, tmp_path / "run", eval_every=4, log_every=2)
    loop.fit(config)
    assert "captured the step in" in capsys.readouterr().err
    assert [line["captures"] for line in lines(config.out, "capture")] == [1]
    trained = lines(config.out, "train")
    assert [(line["captures"], line["recompiles"]) for line in trained] == [(1, 0)] * 5
    assert {line["limit"] for line in trained} <= {"step", "reader", "handover"}


@pytest.mark.parametrize(
    "options",
    [
        {"packs_per_step": 2},
        {"passes_per_pack": 3},
        # Measurements between replays leave alone what the graphs refer to.
        {"eval_every": 2},
        {"packs_per_step": 3, "eval_every": 1},
        {"attention": "flex", "eval_every": 5},
        {"attention": "dense"},
    ],
    ids=str,
)
def test_a_run_on_the_gpu_with_such_options_follows_the_cpu(tiny_cache, tmp_path, options):
    loop.fit(gpu_fit(tiny_cache, tmp_path / "cuda", **options))
    loop.fit(
        gpu_fit(tiny_cache, tmp_path / "cpu", **{**options, "devices": "cpu", "attention": "auto"})
    )
    found, wanted = losses(tmp_path / "cuda"), losses(tmp_path / "cpu")
    for (_, loss, _), (_, cpu_loss, _) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(cpu_loss, rel=1e-3)


def test_measured_anchors_on_the_gpu(tiny_cache, tmp_path, capsys):
    config = gpu_fit(tiny_cache, tmp_path / "run", anchors="auto", anchor_microbatch=8)
    assert loop.fit(config)["finished"]
    assert "--anchors auto:" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ENCODING_NAMES)
def test_a_run_on_the_gpu_follows_the_run_on_the_cpu(tiny_target, tiny_data, tmp_path, encoding):
    cache = tmp_path / "cache"
    build_cache(tiny_build(tiny_target, tiny_data, cache, encoding=encoding))
    for device in ("cpu", "cuda"):
        loop.fit(gpu_fit(cache, tmp_path / device, devices=device))
    found, wanted = losses(tmp_path / "cuda"), losses(tmp_path / "cpu")
    assert [step for step, _, _ in found] == [step for step, _, _ in wanted]
    for (_, loss, norm), (_, cpu_loss, cpu_norm) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(cpu_loss, rel=1e-3)
        assert norm == pytest.approx(cpu_norm, rel=1e-2)


def test_pinned_memory_is_known_to_cuda_and_copied_whole():
    tensor = host_tensor((3, 1000), torch.bfloat16, pinned=True)
    assert tensor.is_pinned()
    tensor.copy_(torch.arange(3000).view(3, 1000))
    assert torch.equal(tensor.to("cuda", non_blocking=True).cpu(), tensor)


def test_a_run_in_bf16_goes_on_where_it_stopped(tiny_cache, tmp_path):
    config = gpu_fit(tiny_cache, tmp_path / "run", precision="bf16")
    assert not loop.fit(config, stop=lambda step: step == 4)["finished"]
    assert loop.fit(config)["finished"]
    found = [loss for _, loss, _ in losses(tmp_path / "run")]
    assert len(found) == 10
    assert max(found[5:]) < found[0]


def test_a_cache_built_on_the_gpu_holds_the_states_of_the_cpu(
    tiny_cache, tiny_target, tiny_data, tmp_path
):
    build_cache(tiny_build(tiny_target, tiny_data, tmp_path / "cache", devices="cuda"))
    there, here = CacheReader(tmp_path / "cache"), CacheReader(tiny_cache)
    assert there.identity == here.identity
    layer_ids = here.identity.target_layer_ids
    for index in range(len(here.located)):
        torch.testing.assert_close(
            there.hidden(index, layer_ids), here.hidden(index, layer_ids), rtol=0.02, atol=0.02
        )


def test_decoding_on_the_gpu_is_identical_to_greedy(tiny_cache, tiny_target, tmp_path):
    loop.fit(gpu_fit(tiny_cache, tmp_path / "run", max_steps=30, epochs=20))
    report = evaluate_drafter(
        EvalConfig(
            drafter=tmp_path / "run",
            target=str(tiny_target),
            prompts=str(write_jsonl(tmp_path / "prompts.jsonl", chat_rows(3, seed=4))),
            max_new_tokens=32,
            device="cuda",
        )
    )
    assert report["identical_to_greedy"] is True
    assert report["acceptance_length"] == pytest.approx(report["offline_acceptance_length"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packs_per_step": 3},
        {"reduce": "fp32", "precision": "bf16"},
        # In bf16 the sum of several packs would be rounded on its way.
        {"packs_per_step": 2, "precision": "bf16", "reduce": "fp32"},
        {"shard_optimizer": True},
        {"shard_optimizer": True, "packs_per_step": 2, "precision": "bf16", "reduce": "fp32"},
    ],
    ids=str,
)
def test_a_world_of_one_reduces_inside_the_graph_and_changes_no_bit(tiny_cache, tmp_path, options):
    alone = gpu_fit(tiny_cache, tmp_path / "alone", **options)
    loop.fit(alone)
    store = HashStore()
    world = meet(store, device=torch.device("cuda", 0))
    try:
        config = replace(alone, out=tmp_path / "reduced")
        assert loop.train_in(world, config)["finished"]
    finally:
        world.part()
    assert [line["recompiles"] for line in lines(config.out, "train")] == [0] * 10
    assert losses(config.out) == losses(alone.out)


def follow_a_build(tiny_target, tmp_path, *, builder, trainer):
    """Run folders of a run that followed a build, and of one on the sealed cache in its order."""
    data = write_jsonl(tmp_path / "data.jsonl", chat_rows(300, seed=8))
    cache = tmp_path / "cache"
    config = gpu_fit(
        cache,
        tmp_path / "run",
        follow=True,
        packs_per_step=2,
        max_steps=60,
        epochs=3,
        devices=trainer,
    )
    words = ["cache", "build", "--target", tiny_target, "--data", data, "--out", cache]
    words += ["--num-target-layers", 3, "--bucket-edges", "48,96,160", "--unit-tokens", 400]
    words += ["--batch-tokens", 512, "--agreement-samples", 0, "--devices", builder]
    program = "from dflash_cli.main import main; main()"
    build = subprocess.Popen([sys.executable, "-c", program, *map(str, words)])
    try:
        assert loop.fit(config)["finished"]
        assert build.wait(timeout=120) == 0
    finally:
        build.kill()
        build.wait()
    order = config.out / "followed.json"
    sealed = replace(config, out=tmp_path / "sealed", follow=False, unit_order=order)
    loop.fit(sealed)
    return config.out, sealed.out


def test_a_builder_and_a_trainer_that_follows_it_share_the_gpu(tiny_target, tmp_path):
    run, sealed = follow_a_build(tiny_target, tmp_path, builder="cuda", trainer="cuda")
    assert [loss for _, loss, _ in losses(run)] == pytest.approx(
        [loss for _, loss, _ in losses(sealed)], rel=1e-4
    )
