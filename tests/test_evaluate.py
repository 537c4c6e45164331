"""`dflash fit`, `eval` and `export` as a user runs them, on the tiny target."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from conftest import chat_rows, save_tiny_target, tiny_build, write_jsonl
from test_loop import tiny_fit

from dflash_cache.build import build_cache
from dflash_cache.errors import CacheMismatchError
from dflash_cache.target import load_target
from dflash_cli.main import main
from dflash_fit import loop
from dflash_fit.decode import greedy
from dflash_fit.evaluate import load_prompts, refuse_other_target


@pytest.fixture(scope="module")
def run(tiny_cache, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    loop.fit(tiny_fit(tiny_cache, out, max_steps=60, epochs=30))
    return out


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    rows = [{"messages": row["messages"][:1]} for row in chat_rows(4, seed=9)]
    rows.append({"prompt": "three dogs"})
    return write_jsonl(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", rows)


def dflash(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def one_object(result: Result) -> dict:
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("\n") == 1
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    return value


def one_error(result: Result) -> str:
    """Exit 1 and one message; nothing on stdout, no traceback."""
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert result.stderr.count("Error: ") == 1
    assert "Traceback" not in result.stderr
    return result.stderr


def decode(run: Path, target: Path, prompts: Path, *more: object) -> dict:
    words = ["eval", "--drafter", run, "--target", target, "--prompts", prompts]
    return one_object(dflash(*words, "--max-new-tokens", 40, "--device", "cpu", "--json", *more))


def test_decoding_is_identical_to_greedy_and_agrees_with_offline(run, tiny_target, prompts):
    report = decode(run, tiny_target, prompts)
    assert report["identical_to_greedy"] is True
    assert report["answers_differing"] == 0
    assert report["prompts"] == report["texts"] == 5
    assert report["acceptance_length"] == pytest.approx(report["offline_acceptance_length"])
    assert 1 <= report["acceptance_length"] <= report["block_size"]
    assert report["per_position"] == sorted(report["per_position"], reverse=True)
    accepted = sum(report["per_position"]) * report["target_passes"]
    # The last pass of a text may have no token of the target's own behind its drafts.
    assert report["tokens"] - report["target_passes"] <= accepted + 1e-6
    wanted = {"acceptance_length_macro", "prompt_lookup", "looping", "speedup"}
    assert wanted <= report.keys()


def test_plain_greedy_equals_the_generation_of_transformers(tiny_target, prompts):
    target = load_target(str(tiny_target), dtype="float32", device="cpu")
    for prompt in load_prompts(str(prompts), target.tokenizer, limit=None):
        ids = torch.tensor(prompt)
        ours = greedy(target, ids, max_new_tokens=24, stop_ids=target.stop_ids).tokens
        theirs = target.model.generate(
            ids[None],
            attention_mask=torch.ones_like(ids)[None],
            max_new_tokens=24,
            do_sample=False,
        )
        assert ours == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen2", {}),
        ("qwen3", {"head_dim": 8}),
        ("mistral", {"sliding_window": 8}),
        ("olmo2", {}),
    ],
)
def test_targets_of_other_families_go_the_whole_way(family, more, tiny_data, prompts, tmp_path):
    """Cache, fit, and decoding that rejects drafts beyond a sliding window, too."""
    target = save_tiny_target(tmp_path / family, layers=6, family=family, **more)
    build_cache(tiny_build(target, tiny_data, tmp_path / "cache"))
    loop.fit(tiny_fit(tmp_path / "cache", tmp_path / "run", max_steps=30, epochs=20))
    report = decode(tmp_path / "run", target, prompts)
    assert report["identical_to_greedy"] is True
    assert report["acceptance_length"] == pytest.approx(report["offline_acceptance_length"])


def test_an_untrained_drafter_commits_about_one_token_a_pass(
    tiny_cache, tiny_target, prompts, tmp_path
):
    loop.fit(tiny_fit(tiny_cache, tmp_path / "untrained", max_steps=0))
    report = decode(tmp_path / "untrained", tiny_target, prompts)
    assert report["identical_to_greedy"] is True
    assert 1 <= report["acceptance_length"] < 1.2


def test_offline_eval_repeats_what_training_measured(run, tiny_cache):
    words = ["eval", "--drafter", run, "--cache", tiny_cache, "--dtype", "float32"]
    report = one_object(dflash(*words, "--device", "cpu", "--json"))
    best = json.loads((run / "best" / "state.json").read_text())
    assert report["acceptance_length"] == pytest.approx(best["best_acceptance"])
    assert len(report["slot_accuracy"]) == 3


def test_an_export_is_measured_like_its_run(run, tiny_target, prompts, tmp_path):
    exported = one_object(dflash("export", run, "--out", tmp_path / "drafter", "--json"))
    assert exported["tensors"] == 25
    report = decode(tmp_path / "drafter", tiny_target, prompts, "--max-prompts", 2)
    assert report["identical_to_greedy"] is True
    assert report["prompts"] == 2


def test_fit_prints_one_object_and_resumes(tiny_cache, tmp_path):
    words = ["fit", "--cache", tiny_cache, "--out", tmp_path / "run", "--num-layers", 1]
    words += ["--block-size", 4, "--token-budget", 256, "--anchors", 8, "--anchor-microbatch", 8]
    words += ["--max-steps", 2, "--held-out", 0.2, "--device", "cpu", "--json"]
    first = one_object(dflash(*words))
    assert (first["step"], first["finished"]) == (2, True)
    assert one_object(dflash(*words)) == first


def test_a_report_for_people_is_a_table(tiny_cache):
    result = dflash("cache", "info", tiny_cache)
    assert result.exit_code == 0
    assert any(line.split() == ["samples", "40"] for line in result.stdout.splitlines())


@pytest.mark.parametrize(
    "words",
    [
        ["fit", "--cache", "nowhere", "--out", "run"],
        ["eval", "--drafter", "nowhere", "--cache", "nowhere"],
        ["export", "nowhere", "--out", "out"],
        ["cache", "info", "nowhere"],
    ],
)
def test_a_folder_that_is_not_there_is_one_message(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "nowhere" in one_error(dflash(*words))
    assert not list(tmp_path.iterdir())


def test_a_half_built_cache_is_refused_and_says_how_far_it_is(tiny_cache, tmp_path):
    half = Path(shutil.copytree(tiny_cache, tmp_path / "half"))
    (half / "manifest.json").unlink()
    next((half / "commits").glob("*.json")).unlink()
    message = one_error(dflash("fit", "--cache", half, "--out", tmp_path / "run"))
    assert "not complete" in message
    assert "of 40 samples" in message
    assert not (tmp_path / "run").exists()


def test_another_target_is_refused_by_name(run, prompts, tmp_path):
    other = save_tiny_target(tmp_path / "other", seed=1)
    words = ["eval", "--drafter", run, "--target", other, "--prompts", prompts]
    assert "weights_sha256" in one_error(dflash(*words, "--device", "cpu"))


def test_another_cache_is_refused_when_it_is_of_another_target(run, tiny_data, tmp_path):
    other = save_tiny_target(tmp_path / "other", seed=1)
    build_cache(tiny_build(other, tiny_data, tmp_path / "cache"))
    words = ["eval", "--drafter", run, "--cache", tmp_path / "cache", "--device", "cpu"]
    assert "weights_sha256" in one_error(dflash(*words))


def test_a_drafter_of_other_shapes_is_refused_without_any_record(run, prompts, tmp_path):
    foreign = tmp_path / "foreign"
    dflash("export", run, "--out", foreign)
    (foreign / "training.json").unlink()
    other = save_tiny_target(tmp_path / "other", seed=1, layers=9)
    words = ["eval", "--drafter", foreign, "--target", other, "--prompts", prompts]
    assert "num_layers is 9, the drafter wants 8" in one_error(dflash(*words, "--device", "cpu"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no prompts"),
        ([{"question": "?"}], "row 1: no messages, conversations or prompt"),
        ([{"prompt": "ok"}, {"messages": [{"role": "oracle", "content": "?"}]}], "row 2: unknown"),
        ([{"messages": []}], "row 1: nothing comes before the first answer"),
        ([{"messages": [{"role": "user"}]}], "row 1: a turn without content"),
    ],
)
def test_prompts_that_are_none_are_one_message(run, tiny_target, tmp_path, rows, message):
    file = write_jsonl(tmp_path / "prompts.jsonl", rows)
    words = ["eval", "--drafter", run, "--target", tiny_target, "--prompts", file]
    assert message in one_error(dflash(*words, "--device", "cpu"))


def test_a_recurrent_target_is_refused_for_decoding(tiny_target):
    from dflash_fit.decode import refuse_recurrent
    from dflash_fit.errors import DrafterError

    target = load_target(str(tiny_target), dtype="float32", device="cpu")
    target.model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(DrafterError, match="recurrent"):
        refuse_recurrent(replace(target))


@pytest.mark.parametrize("field", ["config", "weights", "tokenizer"])
def test_a_drafter_that_was_trained_for_another_one_is_refused_by_the_field(field):
    hashes = {name: name[0] * 64 for name in ("config", "weights", "tokenizer")}
    training = {
        "target": "trained-for",
        "target_config_sha256": hashes["config"],
        "target_weights_sha256": hashes["weights"],
        "tokenizer_sha256": hashes["tokenizer"],
    }

    def refuse(found: dict[str, str]) -> None:
        target = {"name": "found", **{f"{k}_sha256": found[k] for k in ("config", "weights")}}
        refuse_other_target(training, target, found["tokenizer"], where="here")

    refuse(hashes)
    with pytest.raises(CacheMismatchError, match=f"here: target found has {field}_sha256 xxx"):
        refuse({**hashes, field: "x" * 64})
