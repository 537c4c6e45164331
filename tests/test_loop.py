"""A whole run on the tiny cache: it learns, stops, resumes exactly, and refuses what it must."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import chat_rows, tiny_build, write_jsonl
from safetensors.torch import load_file

from dflash_cache.build import build_cache
from dflash_cache.config import ENCODING_NAMES
from dflash_cache.errors import CacheBusyError, ConfigError, DiskFullError
from dflash_cache.reader import CacheReader
from dflash_fit import checkpoint, joint, loop, prepare
from dflash_fit.batch import Batch
from dflash_fit.config import FitConfig
from dflash_fit.course import Position
from dflash_fit.errors import FitError, RunFolderError
from dflash_fit.feed import Feed
from dflash_fit.loader import PackSource, split_documents
from dflash_fit.pulse import State
from dflash_fit.world import World


def tiny_fit(cache: Path, out: Path, **changes) -> FitConfig:
    options = {
        "num_layers": 2,
        "block_size": 4,
        "token_budget": 256,
        "anchors": 16,
        "anchor_microbatch": 8,
        "loss_chunk": 16,
        "max_steps": 10,
        "epochs": 4,
        "lr": 5e-3,
        "held_out": 0.2,
        "precision": "fp32",
        "eval_every": 100,
        "checkpoint_every": 100,
        "log_every": 1,
        "devices": "cpu",
    }
    return FitConfig(cache=str(cache), out=out, **{**options, **changes})


def prepared(config: FitConfig, reader: CacheReader) -> prepare.Run:
    """Everything that a run on the CPU alone needs."""
    return prepare.prepare(prepare.outline(config, reader, World.alone(torch.device("cpu"))))


def losses(run: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(x["step"], x["loss"], x["grad_norm"]) for x in lines if x["kind"] == "train"]


def final_state(run: Path) -> dict[str, torch.Tensor]:
    last = checkpoint.checkpoints(run)[-1]
    return {
        **load_file(last / "optimizer.safetensors"),
        **load_file(last / "model.safetensors"),
    }


@pytest.fixture(scope="module")
def ten_steps(tiny_cache, tmp_path_factory) -> Path:
    """One uninterrupted run of ten steps."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    loop.fit(tiny_fit(tiny_cache, out))
    return out


def test_ten_steps_leave_a_complete_run_folder(ten_steps):
    assert [step for step, _, _ in losses(ten_steps)] == list(range(1, 11))
    assert {p.name for p in checkpoint.checkpoints(ten_steps)} == {"step_00000000", "step_00000010"}
    assert (ten_steps / "best" / "model.safetensors").is_file()
    assert not list(ten_steps.rglob("*.partial"))


def test_the_loss_falls(tiny_cache, tmp_path):
    loop.fit(tiny_fit(tiny_cache, tmp_path / "run", max_steps=40, epochs=20))
    found = [loss for _, loss, _ in losses(tmp_path / "run")]
    assert sum(found[-5:]) < 0.95 * sum(found[:5])


@pytest.mark.parametrize("stop_at", [1, 4, 9])
def test_stopping_does_not_matter(tiny_cache, tmp_path, ten_steps, stop_at):
    """Ten steps = some + resume + the rest, bit for bit: losses, weights, moments."""
    config = tiny_fit(tiny_cache, tmp_path / "run")
    first = loop.fit(config, stop=lambda step: step == stop_at)
    assert (first["step"], first["finished"]) == (stop_at, False)
    second = loop.fit(config)
    assert second["finished"]
    assert losses(tmp_path / "run") == losses(ten_steps)
    whole, parts = final_state(ten_steps), final_state(tmp_path / "run")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_stopping_does_not_matter_in_bf16(tiny_cache, tmp_path):
    config = tiny_fit(tiny_cache, tmp_path / "whole", precision="bf16", max_steps=6)
    loop.fit(config)
    parts = replace(config, out=tmp_path / "parts")
    loop.fit(parts, stop=lambda step: step == 3)
    loop.fit(parts)
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")


def test_a_crash_loses_only_what_came_after_the_last_checkpoint(
    tiny_cache, tmp_path, ten_steps, monkeypatch
):
    config = tiny_fit(tiny_cache, tmp_path / "run", checkpoint_every=3)
    real = loop.log

    def crash(run, state, *rest):
        real(run, state, *rest)
        if state.step == 8:
            raise KeyboardInterrupt

    monkeypatch.setattr(loop, "log", crash)
    with pytest.raises(KeyboardInterrupt):
        loop.fit(config)
    monkeypatch.setattr(loop, "log", real)
    # A crash can cut the last line of the log short, too.
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 9, "lo')
    loop.fit(config)
    assert losses(tmp_path / "run") == losses(ten_steps)


def test_a_checkpoint_that_a_crash_cut_is_not_taken(tiny_cache, tmp_path, monkeypatch):
    config = tiny_fit(tiny_cache, tmp_path / "run", max_steps=4, checkpoint_every=2)
    loop.fit(config, stop=lambda step: step == 2)
    whole = checkpoint.checkpoints(config.out)[-1]
    half = checkpoint.step_folder(config.out, 3)
    shutil.copytree(whole, half)
    (half / "state.json").unlink()
    assert checkpoint.checkpoints(config.out)[-1] == whole
    assert loop.fit(config)["finished"]


def test_a_full_disk_keeps_the_checkpoints_and_the_run_goes_on_later(
    tiny_cache, tmp_path, ten_steps, monkeypatch
):
    config = tiny_fit(tiny_cache, tmp_path / "run", checkpoint_every=4)
    real = joint.write_tensors

    def full(path, *rest, **more):
        if "step_00000008" in str(path):
            raise OSError(28, "No space left on device")
        return real(path, *rest, **more)

    monkeypatch.setattr(joint, "write_tensors", full)
    with pytest.raises(DiskFullError, match="the disk is full"):
        loop.fit(config)
    assert checkpoint.checkpoints(config.out)[-1].name == "step_00000004"
    assert not list(config.out.rglob("*.partial"))
    monkeypatch.setattr(joint, "write_tensors", real)
    loop.fit(config)
    assert losses(config.out) == losses(ten_steps)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_with_zero(tiny_cache, tmp_path, number):
    out = tmp_path / "run"
    words = ["fit", "--cache", tiny_cache, "--out", out, "--num-layers", 1, "--block-size", 4]
    words += ["--token-budget", 256, "--anchors", 16, "--anchor-microbatch", 16]
    words += ["--devices", "cpu"]
    words += ["--epochs", 2000, "--held-out", 0.2, "--log-every", 1]
    program = "from dflash_cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while not ((out / "metrics.jsonl").is_file() and len(losses(out)) > 2):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert checkpoint.checkpoints(out)[-1].name == f"step_{losses(out)[-1][0]:08d}"


def test_best_is_the_step_with_the_longest_acceptance(tiny_cache, tmp_path, monkeypatch):
    lengths = iter([1.0, 1.5, 1.2, 1.4])
    real = loop.offline_acceptance

    def scripted(*args, **kwargs):
        return {**real(*args, **kwargs), "acceptance_length": next(lengths)}

    monkeypatch.setattr(loop, "offline_acceptance", scripted)
    config = tiny_fit(tiny_cache, tmp_path / "run", max_steps=6, eval_every=2, keep_last=1)
    summary = loop.fit(config)
    assert (summary["best_step"], summary["acceptance_length"]) == (2, 1.5)
    assert (config.out / "best").resolve().name == "step_00000002"
    kept = [path.name for path in checkpoint.checkpoints(config.out)]
    assert kept == ["step_00000002", "step_00000006"]


def test_a_finished_run_says_so_and_changes_nothing(ten_steps, tiny_cache):
    before = {p: p.stat().st_mtime_ns for p in ten_steps.rglob("*") if p.name != "metrics.jsonl"}
    text = (ten_steps / "metrics.jsonl").read_text()
    summary = loop.fit(tiny_fit(tiny_cache, ten_steps))
    assert summary["finished"]
    after = {p: p.stat().st_mtime_ns for p in ten_steps.rglob("*") if p.name != "metrics.jsonl"}
    inside = {path for path in before if path.parent.name.startswith("step_")}
    assert {p: before[p] for p in inside} == {p: after[p] for p in inside}
    assert (ten_steps / "metrics.jsonl").read_text() == text


def forget(path, *names):
    values = json.loads(path.read_text())
    assert set(names) <= set(values)
    path.write_text(json.dumps({k: v for k, v in values.items() if k not in names}))


def test_a_run_from_before_there_were_passes_and_objectives_goes_on(
    tiny_cache, tmp_path, ten_steps
):
    config = tiny_fit(tiny_cache, tmp_path / "run")
    loop.fit(config, stop=lambda step: step == 4)
    forget(config.out / "config.json", *checkpoint.BEFORE, "step", "attention")
    forget(checkpoint.checkpoints(config.out)[-1] / "state.json", "turn")
    assert loop.fit(config)["finished"]
    assert losses(config.out) == losses(ten_steps)


def test_a_run_from_before_there_were_passes_is_not_given_any(tiny_cache, tmp_path):
    config = tiny_fit(tiny_cache, tmp_path / "run", max_steps=1)
    loop.fit(config)
    forget(config.out / "config.json", *checkpoint.BEFORE)
    with pytest.raises(RunFolderError, match="begun with passes_per_pack = 1, now it is 2"):
        loop.fit(replace(config, passes_per_pack=2))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"lr": 1.0}, "lr"),
        ({"seed": 3}, "seed"),
        ({"anchors": 8}, "anchors"),
        ({"passes_per_pack": 2}, "passes_per_pack"),
        ({"packs_per_step": 2}, "packs_per_step"),
        ({"slot_weights": "dpace"}, "slot_weights"),
        ({"schedule": "wsd"}, "schedule"),
    ],
)
def test_other_options_are_refused_in_a_run_folder(ten_steps, tiny_cache, change, field):
    with pytest.raises(RunFolderError, match=f"begun with {field} ="):
        loop.fit(tiny_fit(tiny_cache, ten_steps, **change))


def test_options_that_change_only_speed_may_change(tiny_cache, tmp_path):
    config = tiny_fit(tiny_cache, tmp_path / "run", max_steps=2)
    loop.fit(config, stop=lambda step: step == 1)
    others = {"anchor_microbatch": 16, "step": "eager", "attention": "dense", "devices": "cpu"}
    changed = replace(config, loss_chunk=7, log_every=5, keep_last=1, **others)
    assert loop.fit(changed)["finished"]


def test_another_cache_is_refused_in_a_run_folder(ten_steps, tiny_target, tmp_path):
    data = write_jsonl(tmp_path / "other.jsonl", chat_rows(20, seed=5))
    build_cache(tiny_build(tiny_target, data, tmp_path / "other"))
    with pytest.raises(RunFolderError, match=r"begun with cache_identity\.data_sha256 = "):
        loop.fit(tiny_fit(tmp_path / "other", ten_steps))


@pytest.mark.parametrize("anchors", [16, "auto"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("thesis.tex", "mine"),
        ("config.json", '{"architectures": ["DFlashDraftModel"]}'),
        ("config.json", "[1]"),
    ],
)
def test_a_folder_that_is_something_else_is_left_alone_before_any_work(
    tiny_cache, tmp_path, monkeypatch, anchors, name, text
):
    (tmp_path / name).write_text(text)
    monkeypatch.setattr(loop, "prepare", None)  # no drafter is made, no anchors are measured
    with pytest.raises(RunFolderError, match="not a run folder"):
        loop.fit(tiny_fit(tiny_cache, tmp_path, anchors=anchors))
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [(name, text)]


def test_a_document_longer_than_the_budget_is_refused_by_name(tiny_cache, tmp_path):
    longest = max(CacheReader(tiny_cache).located, key=lambda located: located.length)
    with pytest.raises(FitError, match=f"sample {longest.sample_id} has {longest.length} tokens"):
        loop.fit(tiny_fit(tiny_cache, tmp_path / "run", token_budget=longest.length - 1))
    # The next try has other options; a folder would hold it to these.
    assert not (tmp_path / "run").exists()


def test_no_folder_is_made_before_all_ranks_have_prepared_the_run(tiny_cache, tmp_path):
    """One that fails there leaves none behind, as a single process does."""
    reader = CacheReader(tiny_cache)
    run = prepared(tiny_fit(tiny_cache, tmp_path / "run"), reader)
    seen = []
    world = SimpleNamespace(first=True, barrier=lambda: seen.append(run.config.out.exists()))
    stand_in = SimpleNamespace(world=world, config=run.config, reader=reader, outline=run.outline)
    with loop.opened(stand_in):
        assert seen == [False, True]


def test_a_checkpoint_may_take_longer_to_read_than_the_timeout(ten_steps, tiny_cache, monkeypatch):
    world, states, real = World.alone(torch.device("cpu")), [], checkpoint.restore

    def restore(*arguments):
        states.append(world.pulse.state)
        return real(*arguments)

    monkeypatch.setattr(checkpoint, "restore", restore)
    loop.train_in(world, tiny_fit(tiny_cache, ten_steps))
    assert states == [State.RESTING]


def test_a_share_that_leaves_nothing_to_measure_is_refused(tiny_cache, tmp_path):
    with pytest.raises(FitError, match="0 to measure"):
        loop.fit(tiny_fit(tiny_cache, tmp_path / "run", held_out=1e-9))


def test_target_layers_that_the_cache_lacks_are_refused(tiny_cache, tmp_path):
    with pytest.raises(FitError, match=r"not \[2\]"):
        loop.fit(tiny_fit(tiny_cache, tmp_path / "run", target_layers=(2,)))


def test_a_subset_of_the_cached_target_layers_trains(tiny_cache, tmp_path):
    kept = CacheReader(tiny_cache).identity.target_layer_ids[1:]
    loop.fit(tiny_fit(tiny_cache, tmp_path / "run", target_layers=tuple(kept), max_steps=1))
    config = json.loads((tmp_path / "run" / "best" / "config.json").read_text())
    assert config["dflash_config"]["target_layer_ids"] == kept


@pytest.mark.parametrize("wanted", ["the end token", "a token of text", "no row"])
def test_a_mask_token_that_ruins_serving_is_refused(tiny_cache, tmp_path, wanted):
    identity = CacheReader(tiny_cache).identity
    bad = {
        "the end token": identity.tokenizer_spec.eos_token_ids[0],
        "a token of text": 70,
        "no row": identity.target_spec.vocab_size,
    }[wanted]
    with pytest.raises(ConfigError, match=f"--mask-token-id {bad}"):
        loop.fit(tiny_fit(tiny_cache, tmp_path / "run", mask_token_id=bad))


def test_two_runs_in_one_folder_are_kept_apart(tiny_cache, tmp_path):
    config = tiny_fit(tiny_cache, tmp_path / "run")
    told = []

    def meet_another(step):
        if step == 3:
            with pytest.raises(CacheBusyError, match=r"`dflash fit`.* is writing here") as refused:
                loop.fit(config)
            told.append(refused.value)
        return False

    assert loop.fit(config, stop=meet_another)["finished"]
    assert len(told) == 1
    assert not (config.out / ".lock").exists()


def test_a_batch_that_is_not_finite_is_skipped_and_counted(tiny_cache, tmp_path, monkeypatch):
    real = PackSource.fill

    def poisoned(self, batch, position, lane):
        real(self, batch, position, lane)
        if position == Position(epoch=0, index=1, turn=0):
            batch.hidden.fill_(float("nan"))
        return batch

    monkeypatch.setattr(PackSource, "fill", poisoned)
    summary = loop.fit(tiny_fit(tiny_cache, tmp_path / "run", max_steps=4))
    assert summary["skipped_updates"] == 1
    assert all(torch.isfinite(t).all() for t in final_state(tmp_path / "run").values())


def test_a_run_that_learns_nothing_ends_and_its_checkpoints_are_as_good_as_before(
    tiny_cache, tmp_path, monkeypatch
):
    config = tiny_fit(tiny_cache, tmp_path / "run", max_skipped=3, checkpoint_every=2)
    loop.fit(config, stop=lambda step: step == 2)
    before = final_state(config.out)
    real = PackSource.fill

    def poisoned(self, batch, position, lane):
        real(self, batch, position, lane)
        batch.hidden.fill_(float("nan"))
        return batch

    monkeypatch.setattr(PackSource, "fill", poisoned)
    with pytest.raises(FitError, match="in 3 updates in a row, up to step 5"):
        loop.fit(config)
    assert checkpoint.checkpoints(config.out)[-1].name == "step_00000004"
    after = final_state(config.out)
    counted = {"skipped", "skipped_in_a_row"}
    assert all(torch.equal(before[name], after[name]) for name in before.keys() - counted)
    assert (int(after["skipped"]), int(after["skipped_in_a_row"])) == (2, 2)


def test_a_conversation_is_never_split_between_training_and_held_out(tiny_cache):
    reader = CacheReader(tiny_cache)
    training, measured = split_documents(reader, held_out=0.3)
    assert sorted(training + measured) == list(range(len(reader.located)))
    groups = [{reader.located[i].group for i in part} for part in (training, measured)]
    assert not groups[0] & groups[1]
    wider, _ = split_documents(reader, held_out=0.15)
    assert set(training) < set(wider)


def test_the_loader_gives_the_same_batches_from_any_position(tiny_cache):
    reader = CacheReader(tiny_cache)
    run = prepared(tiny_fit(tiny_cache, Path("unused")), reader)

    def tokens(position: Position, steps: int) -> list[tuple[list[int], list[int]]]:
        with Feed(run.source, position, steps=steps, device=run.world.device) as feed:
            return [(b.input_ids.tolist(), b.anchor_positions.tolist()) for b, _, _ in feed]

    whole = tokens(Position(epoch=0, index=0, turn=0), 8)
    packs = run.source.course.length(0)
    assert whole[3:] == tokens(Position(epoch=3 // packs, index=3 % packs, turn=0), 5)


@pytest.mark.parametrize("encoding", ENCODING_NAMES)
def test_a_batch_holds_what_the_cache_holds_and_padding_is_marked(
    tiny_cache, tiny_target, tiny_data, tmp_path, encoding
):
    cache = tiny_cache
    if encoding != CacheReader(tiny_cache).identity.encoding:
        cache = tmp_path / "cache"
        build_cache(tiny_build(tiny_target, tiny_data, cache, encoding=encoding))
    reader = CacheReader(cache)
    assert reader.identity.encoding == encoding
    run = prepared(tiny_fit(cache, Path("unused")), reader)
    batch = Batch.empty(run.source.shape, device=run.world.device)
    layer_ids = run.drafter.config.target_layer_ids
    for number in range(3):
        for part in batch.parts.values():
            part.view(torch.uint8).fill_(0xFF)  # NaN: what an earlier batch may have left
        run.source.fill(batch, Position(epoch=0, index=number, turn=0))
        pack = run.source.course.pack(0, number)
        covered = torch.zeros(len(batch.input_ids), dtype=torch.bool)
        for index, (document, start) in enumerate(zip(pack.documents, pack.starts, strict=True)):
            ids, mask = reader.tokens(document)
            rows = slice(start, start + len(ids))
            covered[rows] = True
            assert batch.input_ids[rows].tolist() == ids.tolist()
            assert batch.loss_mask[rows].tolist() == mask.tolist()
            assert batch.position_ids[rows].tolist() == list(range(len(ids)))
            assert set(batch.document_ids[rows].tolist()) == {index}
            assert set(batch.document_starts[rows].tolist()) == {start}
            assert torch.equal(batch.states()[:, rows], reader.hidden(document, layer_ids))
        assert (batch.document_ids[~covered] == -1).all()
        assert not batch.loss_mask[~covered].any()
        assert (batch.states()[:, ~covered] == 0).all()
