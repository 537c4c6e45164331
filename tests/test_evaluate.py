"""`dflash fit`, `eval` and `export` as a user runs them, on the tiny target."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from conftest import chat_rows, save_tiny_target, tiny_build, write_jsonl
from test_loop import tiny_fit

from dflash_cache.build import build_cache
from dflash_cache.chat import ChatOptions
from dflash_cache.errors import CacheMismatchError
from dflash_cache.weights import load_target
from dflash_cli.main import main
from dflash_fit import evaluate, loop
from dflash_fit.decode import greedy
from dflash_fit.errors import DrafterError
from dflash_fit.evaluate import refuse_other_target
from dflash_fit.prompts import read_rows

# Gated DeltaNet in two layers of three: states that rejected drafts have to leave again.
RECURRENT = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


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
    assert report["datasets"].keys() == {"prompts"}


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> str:
    """Two files: chats of two turns by category, and single prompts."""
    folder = tmp_path_factory.mktemp("sets")
    talk = [
        {"turns": ["the cat sat", "and one two"], "category": "cats"},
        {"turns": ["dogs run far"], "category": "dogs"},
        {"turns": ["a mat", "over there"], "category": "cats"},
    ]
    ask = [{"prompt": "three dogs"}, {"messages": chat_rows(1, seed=5)[0]["messages"]}]
    files = [write_jsonl(folder / "talk.jsonl", talk), write_jsonl(folder / "ask.jsonl", ask)]
    return ",".join(map(str, files))


def test_several_files_are_reported_one_by_one_and_together(run, tiny_target, sets):
    report = decode(run, tiny_target, sets, "--max-new-tokens", 12)
    talk, ask = report["datasets"]["talk"], report["datasets"]["ask"]
    assert list(report["datasets"]) == ["talk", "ask"]
    assert [(one["prompts"], one["answers"]) for one in (talk, ask, report)] == [
        (3, 5),
        (2, 2),
        (5, 7),
    ]
    cats, dogs = talk["parts"]["cats"], talk["parts"]["dogs"]
    assert talk["parts"].keys() == {"cats", "dogs"}
    assert "parts" not in ask
    for whole, parts in [(report, (talk, ask)), (talk, (cats, dogs))]:
        for key in ("answer_tokens", "target_passes", "tokens", "answers_differing"):
            assert whole[key] == sum(part[key] for part in parts)
        committed = sum(one["acceptance_length"] * one["target_passes"] for one in parts)
        assert whole["acceptance_length"] == pytest.approx(committed / whole["target_passes"])
        seconds = sum(one["answer_tokens"] / one["tokens_per_second"] for one in parts)
        assert whole["tokens_per_second"] == pytest.approx(whole["answer_tokens"] / seconds)
        macro = sum(one["acceptance_length_macro"] * one["texts"] for one in parts)
        assert whole["acceptance_length_macro"] == pytest.approx(macro / whole["texts"])
    assert report["identical_to_greedy"] is True


def test_drawn_answers_are_measured_but_not_compared(run, tiny_target, sets):
    more = ["--temperature", 1.0, "--batch-size", 2, "--max-prompts", 2, "--max-new-tokens", 8]
    report = decode(run, tiny_target, sets, *more)
    assert (report["prompts"], report["answers"]) == (4, 5)
    assert report["identical_to_greedy"] is None
    assert report["answers_differing"] is None
    assert report["acceptance_length"] == pytest.approx(report["offline_acceptance_length"])


def test_every_option_reaches_the_decoding(run, tiny_target, prompts, monkeypatch):
    seen = []

    def stop(sets, pair):
        seen.append(pair)
        raise DrafterError("seen")

    monkeypatch.setattr(evaluate, "answer_sets", stop)
    words = ["eval", "--drafter", run, "--target", tiny_target, "--prompts", prompts]
    words += ["--temperature", 0.5, "--seed", 7, "--batch-size", 3, "--max-new-tokens", 9]
    one_error(dflash(*words, "--thinking", "off", "--system", "sit", "--device", "cpu"))
    [pair] = seen
    assert (pair.temperature, pair.seed, pair.batch_size, pair.max_new_tokens) == (0.5, 7, 3, 9)
    assert pair.chat == ChatOptions(thinking="off", system="sit")


def test_people_get_a_row_for_every_data_set_and_part(run, tiny_target, sets):
    words = ["eval", "--drafter", run, "--target", tiny_target, "--prompts", sets]
    result = dflash(*words, "--max-new-tokens", 8, "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    names = [line.split("  ")[0] for line in result.stdout.splitlines()]
    table = ["talk", "", "", "ask", "all"]  # parts are indented
    head = ["drafter", "target", "answers"]
    assert names[:3] == head
    assert names[4:10] == ["", *table]
    assert names[11:17] == ["tokens per second", *table]
    assert names[18:24] == ["answers that do not loop", *table]
    assert names[25:31] == ["accepted at slot", *table]
    assert "identical to plain greedy decoding   yes" in result.stdout


@pytest.mark.parametrize(("thinking", "told"), [("off", True), ("on", True), ("as-is", False)])
def test_a_template_that_knows_no_thinking_is_told_on_stderr(
    run, tiny_target, prompts, thinking, told
):
    words = ["eval", "--drafter", run, "--target", tiny_target, "--prompts", prompts]
    more = ["--max-prompts", 1, "--max-new-tokens", 2, "--device", "cpu", "--json"]
    result = dflash(*words, *more, "--thinking", thinking)
    assert one_object(result)["thinking"] == thinking
    assert (f"--thinking {thinking}: the chat template knows no" in result.stderr) is told


def test_prompts_beyond_the_positions_of_the_target_are_refused_before_it_is_loaded(
    run, tiny_target, tmp_path, monkeypatch
):
    monkeypatch.setattr(evaluate, "load_weights", None)
    file = write_jsonl(tmp_path / "long.jsonl", [{"prompt": "a"}, {"prompt": "cat " * 400}])
    words = ["eval", "--drafter", run, "--target", tiny_target, "--prompts", file]
    message = one_error(dflash(*words, "--max-new-tokens", 200, "--device", "cpu"))
    assert "long.jsonl, row 2: " in message
    assert "200 of answer, the target has 512 positions" in message


def test_a_published_folder_of_another_project_runs_as_it_is(run, tiny_target, prompts, tmp_path):
    dflash("export", run, "--out", tmp_path / "drafter")
    foreign = tmp_path / "drafter"
    (foreign / "training.json").unlink()
    config = json.loads((foreign / "config.json").read_text())
    config["architectures"] = ["QwenDFlashDraftModel"]
    (foreign / "config.json").write_text(json.dumps(config))
    # In the precision of the export, both: else its rounded weights are another drafter.
    more = ["--max-prompts", 2, "--max-new-tokens", 12, "--dtype", "bfloat16"]
    theirs, ours = (decode(folder, tiny_target, prompts, *more) for folder in (foreign, run))
    for key in ("acceptance_length", "answer_tokens", "per_position", "answers_differing"):
        assert theirs[key] == ours[key]


def test_plain_greedy_equals_the_generation_of_transformers(tiny_target, prompts):
    target = load_target(str(tiny_target), dtype="float32", device="cpu")
    for row in read_rows(str(prompts), limit=None):
        prompt = row.ids(target.tokenizer, options=ChatOptions())
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
        ("qwen3_5_text", RECURRENT),
    ],
)
def test_targets_of_other_families_go_the_whole_way(family, more, tiny_data, prompts, tmp_path):
    """Cache, fit, and decoding: beyond a sliding window and with recurrent layers, too."""
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


def test_no_share_held_out_is_refused_and_not_taken_for_the_trained_one(run, tiny_cache):
    words = ["eval", "--drafter", run, "--cache", tiny_cache, "--device", "cpu"]
    message = one_error(dflash(*words, "--held-out", 0))
    assert "--held-out 0.0 leaves 40 samples to train on and 0 to measure" in message


def test_answers_of_one_token_leave_nothing_to_measure(run, tiny_target, prompts):
    words = ["eval", "--drafter", run, "--target", tiny_target, "--prompts", prompts]
    result = dflash(*words, "--max-new-tokens", 1, "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    assert ["prompts", "5", "5", "5", "-", "-", "-", "-"] in [
        line.split() for line in result.stdout.splitlines()
    ]


def test_an_export_is_measured_like_its_run(run, tiny_target, prompts, tmp_path):
    exported = one_object(dflash("export", run, "--out", tmp_path / "drafter", "--json"))
    assert exported["tensors"] == 25
    report = decode(tmp_path / "drafter", tiny_target, prompts, "--max-prompts", 2)
    assert report["identical_to_greedy"] is True
    assert report["prompts"] == 2


def test_fit_prints_one_object_and_resumes(tiny_cache, tmp_path):
    words = ["fit", "--cache", tiny_cache, "--out", tmp_path / "run", "--num-layers", 1]
    words += ["--block-size", 4, "--token-budget", 256, "--anchors", 8, "--anchor-microbatch", 8]
    words += ["--max-steps", 2, "--held-out", 0.2, "--devices", "cpu", "--json"]
    first = one_object(dflash(*words))
    assert (first["step"], first["finished"]) == (2, True)
    assert one_object(dflash(*words)) == first


def test_a_dry_run_of_fit_says_what_the_run_then_is_and_writes_nothing(tiny_cache, tmp_path):
    words = ["fit", "--cache", tiny_cache, "--out", tmp_path / "run", "--num-layers", 1]
    words += ["--block-size", 4, "--token-budget", 256, "--anchors", 8, "--anchor-microbatch", 8]
    words += ["--epochs", 2, "--held-out", 0.2, "--devices", "cpu", "--packs-per-step", 2]
    said = one_object(dflash(*words, "--dry-run", "--json"))
    assert not (tmp_path / "run").exists()
    assert "memory per process" in dflash(*words, "--dry-run").stdout
    found = one_object(dflash(*words, "--json"))
    assert (said["parameters"], said["steps"]) == (found["parameters"], found["steps"])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    trained = [json.loads(line) for line in lines if '"train"' in line]
    tokens = sum(line["tokens"] for line in trained)
    assert said["tokens"] == pytest.approx(tokens, rel=0.1)
    two = one_object(dflash(*words, "--dry-run", "--json", "--devices", "cpu,cpu"))
    assert (two["ranks"], two["steps"]) == (2, said["steps"])
    assert "--anchors auto" in one_error(dflash(*words, "--dry-run", "--anchors", "auto"))


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


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--temperature", "-1"], "--temperature -1.0: want 0 or more"),
        (["--temperature", "nan"], "--temperature nan: want 0 or more"),
        (["--thinking", "maybe"], "--thinking maybe: want as-is, on, off"),
        (["--batch-size", "0"], "--batch-size 0: want 1 or more"),
        (["--seed", "-1"], "--seed -1: want 0 or more"),
    ],
)
def test_options_of_no_sense_are_one_message(more, message):
    words = ["eval", "--drafter", "run", "--target", "t", "--prompts", "p.jsonl"]
    assert message in one_error(dflash(*words, *more))


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
        ([{"question": "?"}], "row 1: no prompt (a text), turns"),
        ([{"prompt": "ok"}, {"messages": [{"role": "oracle", "content": "?"}]}], "row 2: unknown"),
        ([{"messages": []}], "row 1: nothing comes before the first answer"),
        ([{"messages": [{"role": "user"}]}], "row 1: a turn without content"),
    ],
)
def test_prompts_that_are_none_are_one_message(run, tiny_target, tmp_path, rows, message):
    file = write_jsonl(tmp_path / "prompts.jsonl", rows)
    words = ["eval", "--drafter", run, "--target", tiny_target, "--prompts", file]
    assert message in one_error(dflash(*words, "--device", "cpu"))


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
