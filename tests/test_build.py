"""Crashes do not matter, running again does not matter, and nothing starts that cannot end."""

import builtins
import errno
import io
import json
import os
import re
import shutil
from collections import Counter, namedtuple
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from conftest import TEXT, chat_rows, save_tiny_target, tiny_build, write_jsonl
from faults import every_failure
from transformers import LlamaForCausalLM

from dflash_cache import build, extraction, ledger
from dflash_cache.build import build_cache, options_of
from dflash_cache.config import ENCODING_NAMES, BuildConfig
from dflash_cache.describe import describe_cache, describe_plan
from dflash_cache.encodings import relative_l2
from dflash_cache.errors import CacheError, CacheMismatchError, ConfigError, DiskFullError
from dflash_cache.plan import Plan, plan_only, probe_bytes, unit_bytes
from dflash_cache.reader import CacheReader
from dflash_cache.schema import Manifest
from dflash_cache.shard import ShardWriter
from dflash_cache.sweep import leftovers
from dflash_cache.verify import verify_cache
from dflash_cache.weights import load_target
from dflash_cli.main import main

INFO_KEYS = {
    "complete", "samples", "tokens", "supervised_tokens", "bytes", "bytes_per_token", "encoding",
    "target_layer_ids", "hidden_size", "buckets", "units", "target", "fingerprint", "agreement",
}  # fmt: skip
PLAN_KEYS = {
    "samples", "tokens", "bytes_per_token", "bytes", "free_bytes", "fits", "buckets", "skipped",
}  # fmt: skip


@pytest.fixture(scope="module")
def small_target(tmp_path_factory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target") / "small", layers=4)


@pytest.fixture(scope="module")
def small_data(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", chat_rows(6))


@pytest.fixture
def small(small_target, small_data, tmp_path):
    """A build of two units of one layer."""

    def config(out: Path = tmp_path / "out", **changes) -> BuildConfig:
        options = {"target_layers": (1,), "bucket_edges": (100, 200), **changes}
        target, data = options.pop("target", small_target), options.pop("data", small_data)
        return tiny_build(target, data, out, **options)

    return config


@pytest.fixture(autouse=True)
def no_flushing(monkeypatch):
    """Flushing takes most of the time and shows nothing here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def one_load(monkeypatch, small_target):
    """Load the target once for many builds."""
    target = load_target(str(small_target), dtype="float32", device="cpu")
    monkeypatch.setattr(build, "load_weights", lambda *_, **__: deepcopy(target))


def read_all(root: Path) -> list[tuple]:
    """All that a reader gives out, as values that compare."""
    reader = CacheReader(root)
    found = []
    for index, located in enumerate(reader.located):
        ids, mask = reader.tokens(index)
        states = reader.hidden(index, reader.identity.target_layer_ids)
        bits = states.view(torch.int16).numpy().tobytes()
        found.append((located.sample_id, located.group, ids.tobytes(), mask.tobytes(), bits))
    return found


def snapshot(root: Path) -> dict[str, tuple]:
    """Content and time stamps of everything in a folder."""
    return {
        str(path.relative_to(root)): (
            path.stat().st_mtime_ns,
            path.stat().st_ino,
            path.read_bytes() if path.is_file() else None,
        )
        for path in [root, *root.rglob("*")]
    }


# --- crashes ------------------------------------------------------------------------------------


@pytest.fixture
def one_plan(monkeypatch, one_load, small):
    """Tokenise once for many builds of the same data."""
    plan = plan_only(small())
    monkeypatch.setattr(build, "make_plan", lambda *_: plan)


@pytest.mark.parametrize(
    ("steps", "stride", "dead"),
    [
        # A folder and a flush for every array of every unit: they are many, and much alike.
        pytest.param(["mkdir"], 4, False, id="a folder cannot be made"),
        pytest.param(["mkdir"], 4, True, id="power is gone before a folder"),
        pytest.param(["fsync"], 4, False, id="a flush fails"),
        # A power cut in a flush leaves what a power cut in the next step leaves.
        pytest.param(["replace", "link", "rename", "pwrite"], 1, False, id="a write fails"),
        pytest.param(["replace", "link", "rename", "pwrite"], 1, True, id="power is gone"),
    ],
)
def test_whatever_step_fails_the_next_run_ends_with_the_same_bits(
    small, tmp_path, one_plan, steps, stride, dead
):
    build_cache(small(tmp_path / "whole"))
    wanted, plan = read_all(tmp_path / "whole"), (tmp_path / "whole" / "plan.parquet").read_bytes()
    assert len(CacheReader(tmp_path / "whole").records) == 2
    before = Counter()

    for folder in every_failure(
        lambda folder: build_cache(small(folder / "out")),
        tmp_path,
        dead=dead,
        steps=steps,
        stride=stride,
    ):
        out = folder / "out"
        before[len(list(out.glob("commits/u*.json")))] += 1
        build_cache(small(out))
        assert read_all(out) == wanted
        assert (out / "plan.parquet").read_bytes() == plan
        assert verify_cache(out)["ok"]
        assert leftovers(out) == []
        shutil.rmtree(folder)

    # The failures struck before, between and after the units; folders are made only for units.
    assert set(before) == ({0, 1} if steps == ["mkdir"] and dead else {0, 1, 2})
    assert before.total() > 8


def test_no_file_is_ever_written_under_its_own_name_outside_its_attempt(
    small, one_load, monkeypatch
):
    """Half a file can only ever be a leftover, which nobody reads."""
    config = small()
    opened: list[Path] = []
    real, real_descriptor = io.open, os.open

    def recorded(file, mode="r", *args, **options):
        if set(mode) & set("wax+") and str(file).startswith(str(config.out)):
            opened.append(Path(file))
        return real(file, mode, *args, **options)

    def recorded_descriptor(file, flags, *args, **options):
        if flags & (os.O_WRONLY | os.O_RDWR) and str(file).startswith(str(config.out)):
            opened.append(Path(file))
        return real_descriptor(file, flags, *args, **options)

    monkeypatch.setattr(io, "open", recorded)
    monkeypatch.setattr(builtins, "open", recorded)
    monkeypatch.setattr(os, "open", recorded_descriptor)
    build_cache(config)

    attempts = {path for path in opened if config.out / "units" in path.parents}
    assert {"0", "zarr.json"} == {path.name for path in attempts}
    # An attempt is a folder of its own, which no record names before it is whole.
    assert {len(path.relative_to(config.out).parents) > 3 for path in attempts} == {True}
    others = [path.name for path in opened if path not in attempts]
    assert len(others) > 5
    assert {name for name in others if not name.endswith(".partial")} == {".lock"}


@pytest.mark.parametrize("encoding", ENCODING_NAMES)
def test_after_a_failure_only_the_units_that_are_missing_run(
    small, one_load, monkeypatch, encoding
):
    config, real, ran = small(encoding=encoding), extraction.run_unit, []

    def stops_at_the_second(target, samples, *rest):
        ran.append([sample.sample_id for sample in samples])
        if len(ran) == 2:
            raise RuntimeError("out of memory")
        return real(target, samples, *rest)

    monkeypatch.setattr(extraction, "run_unit", stops_at_the_second)
    with pytest.raises(RuntimeError):
        build_cache(config)
    kept = snapshot(config.out / "commits")
    record = ledger.read_record(config.out / "commits" / "u000000.json")
    kept_unit = snapshot(config.out / record.folder)

    build_cache(config)

    assert ran[1] == ran[2]
    assert len(ran) == 3
    after = snapshot(config.out / "commits")
    assert after["u000000.json"] == kept["u000000.json"]
    assert snapshot(config.out / record.folder) == kept_unit
    assert CacheReader(config.out).manifest.proofs["probe"] == 0.0


@pytest.mark.parametrize(("owner", "step"), [(os, "link"), (ShardWriter, "close")])
def test_a_full_disk_is_one_message_and_the_next_run_goes_on(
    small, one_load, monkeypatch, owner, step
):
    config = small()
    with monkeypatch.context() as patch:

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(owner, step, full)
        with pytest.raises(DiskFullError, match=r"the disk is full .*All committed units are kept"):
            build_cache(config)
    build_cache(config)
    assert len(read_all(config.out)) == 6


def test_a_disk_that_fills_up_in_the_middle_counts_the_bytes_that_are_missing(
    small, one_load, monkeypatch
):
    config = small()
    plan = plan_only(config)
    real, written = os.pwrite, 0

    def fills_up(file, payload, offset):
        nonlocal written
        written += len(payload)
        if len(list(config.out.glob("commits/u*.json"))) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, payload, offset)

    free = 5_000
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fills_up)
        patch.setattr(build, "refuse_too_small_a_disk", lambda *_, **__: None)
        patch.setattr("shutil.disk_usage", lambda _: usage(10**9, 10**9 - free, free))
        with pytest.raises(DiskFullError) as told:
            build_cache(config)
    assert written
    (record,) = ledger.committed_units(
        config.out, fingerprint=ledger.read_identity(config.out).fingerprint
    ).values()
    assert record.unit == "u000000"
    needed = left_after_the_first_unit(plan)
    assert f"{needed:,} bytes are still to be written: {needed - free:,} bytes are missing" in str(
        told.value
    )
    kept = snapshot(config.out / "commits")["u000000.json"]
    assert len(list(config.out.glob("units/*/*"))) == 1  # the attempt that failed is gone
    build_cache(config)
    assert snapshot(config.out / "commits")["u000000.json"] == kept
    assert verify_cache(config.out)["ok"]


# --- again --------------------------------------------------------------------------------------


def test_a_sealed_cache_stays_as_it_is_to_the_last_time_stamp(small, one_load):
    config = small()
    first = build_cache(config)
    before = snapshot(config.out)
    assert build_cache(config) == first
    assert snapshot(config.out) == before


def test_what_only_changes_the_speed_joins_the_same_cache(small, one_load):
    config = small()
    manifest = build_cache(config)
    for changes in ({"batch_tokens": 100}, {"max_skipped": 0.5}, {"agreement_samples": 2}):
        assert build_cache(small(config.out, **changes)) == manifest


def test_other_batches_give_the_same_samples_and_nearly_the_same_states(small, tmp_path, one_load):
    one = build_cache(small(tmp_path / "one", batch_tokens=200))
    two = build_cache(small(tmp_path / "two", batch_tokens=2000))
    assert one.fingerprint == two.fingerprint
    for a, b in zip(read_all(tmp_path / "one"), read_all(tmp_path / "two"), strict=True):
        assert a[:4] == b[:4]
        found = [torch.frombuffer(bytearray(x[4]), dtype=torch.bfloat16).float() for x in (a, b)]
        # Two roundings to 8 bits may fall on different sides.
        torch.testing.assert_close(*found, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"target_layers": (0, 1)}, r"target_layer_ids = \[1\], this run has \[0, 1\]"),
        ({"encoding": "fp8"}, "encoding = bf16, this run has fp8"),
        ({"final_hidden": True}, "final_hidden = None, this run has after the final norm"),
        ({"unit_tokens": 401}, "unit_tokens = 400, this run has 401"),
        ({"bucket_edges": (90, 200)}, r"bucket_edges = \[100, 200\], this run has \[90, 200\]"),
        ({"max_samples": 5}, "data_sha256 = "),
        ({"target_dtype": "bfloat16"}, "target.dtype = float32, this run has bfloat16"),
        ({"mask_token_id": 309}, "tokenizer.mask_token_id = 306, this run has 309"),
    ],
)
@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "half-built"])
def test_other_options_do_not_continue_a_cache_and_are_named(small, sealed, changes, field):
    config = small()
    build_cache(config)
    if not sealed:
        (config.out / "manifest.json").unlink()
    before = snapshot(config.out)
    with pytest.raises(CacheMismatchError, match=f"this cache was begun with {field}"):
        build_cache(small(config.out, **changes))
    after = snapshot(config.out)
    if not sealed:  # the lock came and went
        del before["."], after["."]
    assert after == before


def test_another_data_set_does_not_continue_a_cache(small, tmp_path):
    config = small()
    build_cache(config)
    rows = chat_rows(6)
    rows[3]["messages"][-1]["content"] += " far"
    other = write_jsonl(tmp_path / "other.jsonl", rows)
    with pytest.raises(CacheMismatchError, match="begun with data_sha256 ="):
        build_cache(small(config.out, data=other))


def test_another_target_does_not_continue_a_cache(small, small_target, tmp_path):
    config = small()
    build_cache(config)
    other = save_tiny_target(tmp_path / "small", layers=4, seed=1)
    with pytest.raises(CacheMismatchError, match=r"begun with target\.weights_sha256 ="):
        build_cache(small(config.out, target=other))


def test_the_same_target_in_another_place_continues_a_cache(small, small_target, tmp_path):
    config = small()
    manifest = build_cache(config)
    moved = shutil.copytree(small_target, tmp_path / "elsewhere" / "small")
    assert build_cache(small(config.out, target=moved)) == manifest


def follow(told: str) -> None:
    """Run the command that an error message advises."""
    (advised,) = re.findall("`dflash (.*?)`", told)
    result = CliRunner().invoke(main, [*advised.split(), "--device", "cpu", "--json"])
    assert result.exit_code == 0, result.output


def test_the_advice_for_a_damaged_unit_mends_the_cache(small):
    config = small()
    build_cache(config)
    wanted = read_all(config.out)
    (shard, *_) = config.out.glob("units/*/u000000.*/hidden/1/c/0/0")
    shard.write_bytes(b"rubbish")
    with pytest.raises(CacheError) as told:
        read_all(config.out)
    follow(str(told.value))
    assert read_all(config.out) == wanted


def test_the_advice_for_a_missing_record_mends_the_cache(small):
    config = small()
    build_cache(config)
    wanted = read_all(config.out)
    (config.out / "commits" / "u000001.json").unlink()
    with pytest.raises(CacheError) as told:
        read_all(config.out)
    follow(str(told.value))
    assert read_all(config.out) == wanted


def test_the_advice_for_damaged_frozen_weights_mends_the_cache(small):
    config = small()
    build_cache(config)
    wanted = CacheReader(config.out).frozen()[0].clone()  # the file itself is mapped
    (config.out / "frozen.safetensors").write_bytes(b"rubbish")
    with pytest.raises(CacheError) as told:
        CacheReader(config.out).frozen()
    follow(str(told.value))
    assert torch.equal(CacheReader(config.out).frozen()[0], wanted)


def test_a_folder_of_something_else_is_refused_and_untouched(small, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("ten years of work")
    before = snapshot(tmp_path / "thesis")
    with pytest.raises(CacheError, match="nothing was touched"):
        build_cache(small(tmp_path / "thesis"))
    assert snapshot(tmp_path / "thesis") == before


# --- before the first byte ----------------------------------------------------------------------


def with_free(monkeypatch, free: int) -> None:
    usage = namedtuple("usage", "total used free")(10**12, 0, free)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)


def test_a_plan_writes_nothing_and_says_all_that_is_promised(small, tmp_path):
    before = snapshot(tmp_path)
    found = describe_plan(plan_only(small()))
    assert snapshot(tmp_path) == before
    assert set(found) >= PLAN_KEYS
    assert found["samples"] == sum(found["buckets"].values()) == 6
    assert found["bytes_per_token"] == 32 * 2 + 4 + 1
    assert found["fits"] is True


def test_a_disk_that_is_too_small_is_refused_before_the_first_byte(small, monkeypatch):
    config = small()
    needed = plan_only(config).bytes
    with_free(monkeypatch, needed - 1)
    assert plan_only(config).fits is False
    with pytest.raises(DiskFullError, match=r": 1 bytes are missing. Nothing was written"):
        build_cache(config)
    assert not config.out.exists()


def test_a_disk_that_is_just_large_enough_is_taken(small, monkeypatch):
    config = small()
    with_free(monkeypatch, plan_only(config).bytes)
    assert build_cache(config).samples == 6


def left_after_the_first_unit(plan: Plan) -> int:
    """Of the whole, without what lies beside the units, and without the first of them."""
    first = [plan.samples.lengths[member] for member in plan.units[0].members]
    beside = plan.frozen_bytes + probe_bytes(plan.identity, plan.samples.lengths)
    return plan.bytes - beside - unit_bytes(plan.identity, first)


def test_a_resumed_build_needs_only_what_is_left(small, one_load, monkeypatch):
    config = small()
    needed = left_after_the_first_unit(plan_only(config))
    build_cache(config)
    (config.out / "manifest.json").unlink()
    (config.out / "commits" / "u000001.json").unlink()
    with_free(monkeypatch, needed - 1)
    with pytest.raises(DiskFullError):
        build_cache(config)
    with_free(monkeypatch, needed)
    assert build_cache(config).samples == 6


@pytest.fixture(scope="module")
def realistic(small_target, tmp_path_factory) -> BuildConfig:
    """Units of the default size; the tiny ones elsewhere are half metadata."""
    folder = tmp_path_factory.mktemp("realistic")
    length = 440  # 8 less than 7 chunks
    ids = [[(7 * i + row) % 300 + 4 for i in range(length)] for row in range(64)]
    rows = [{"input_ids": row, "loss_mask": [0] * 9 + [1] * (length - 9)} for row in ids]
    data = write_jsonl(folder / "rows.jsonl", rows)
    changes = {"unit_tokens": BuildConfig.unit_tokens, "batch_tokens": 8192}
    return tiny_build(small_target, data, folder / "out", target_layers=(0, 1, 2), **changes)


def test_the_plan_knows_within_2_percent_what_the_sealed_cache_takes(realistic):
    planned = plan_only(realistic).bytes
    manifest = build_cache(realistic)
    files = [path for path in realistic.out.rglob("*") if path.is_file()]
    taken = sum(path.stat().st_size for path in files)
    assert planned == pytest.approx(taken, rel=0.02)
    assert planned == pytest.approx(manifest.bytes, rel=0.02)
    assert planned > 64 * 440 * 3 * 32 * 2


def test_the_plan_counts_a_head_of_its_own(small, tmp_path):
    untied = save_tiny_target(tmp_path / "untied", layers=4, tied=False)
    more = plan_only(small(target=untied)).bytes - plan_only(small()).bytes
    assert more == 310 * 32 * 2


# --- the manifest -------------------------------------------------------------------------------


def test_skipped_rows_are_counted_in_the_manifest(small, tmp_path):
    rows = [*chat_rows(8), {}, {"text": "a"}]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    manifest = build_cache(small(data=data, max_skipped=0.2))
    assert (manifest.rows, manifest.samples) == (10, 8)
    assert sorted(manifest.skipped.values()) == [1, 1]
    assert ledger.read_manifest(tmp_path / "out").skipped == manifest.skipped
    assert [at.sample_id for at in CacheReader(tmp_path / "out").located] == list(range(8))


def test_the_manifest_comes_back_as_it_was(small):
    config = small()
    manifest = build_cache(config)
    payload = (config.out / "manifest.json").read_bytes()
    assert Manifest.from_bytes(payload, where="here") == manifest
    assert {"python", "torch", "transformers", "zarr"} <= set(manifest.software)


@pytest.mark.parametrize("encoding", ENCODING_NAMES)
def test_what_an_encoding_loses_is_measured_unit_by_unit(small, tmp_path, one_load, encoding):
    build_cache(small(tmp_path / "exact"))
    manifest = build_cache(small(tmp_path / "spelt", encoding=encoding))
    exact, spelt = CacheReader(tmp_path / "exact"), CacheReader(tmp_path / "spelt")
    wanted = {"median": 0.0, "p99": 0.0}
    for record in spelt.records.values():
        errors = np.concatenate([
            relative_l2(spelt.hidden(sample, [1])[0], exact.hidden(sample, [1])[0])
            for sample in record.sample_ids
        ])  # fmt: skip
        share = len(errors) / manifest.tokens
        wanted["median"] += share * np.median(errors)
        wanted["p99"] += share * np.quantile(errors, 0.99)
    if encoding in ("bf16", "lossless"):
        assert wanted == {"median": 0, "p99": 0}
        assert manifest.encoding_error == {}
    else:
        assert manifest.encoding_error["hidden/1"] == pytest.approx(wanted, rel=1e-5)
        assert 0 < wanted["median"] < wanted["p99"] < 0.1


def test_rows_of_every_form_end_in_one_cache(small, tmp_path):
    rows = [
        *chat_rows(2),
        {"conversations": [{"from": "human", "value": "the"}, {"from": "gpt", "value": "cat sat"}]},
        {"prompt": "the cat", "response": "sat on a mat"},
        {"text": TEXT},
        {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 0]},
    ]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    build_cache(small(data=data))
    reader = CacheReader(tmp_path / "out")
    assert len(reader.located) == 6
    assert [part.tolist() for part in reader.tokens(5)] == [[5, 6, 7], [False, True, True]]


def test_a_target_that_knows_its_text_has_a_good_agreement_in_the_manifest(small, tmp_path):
    """A target trained on one line says it again: low NLL, greedy right."""
    folder = save_tiny_target(tmp_path / "target", layers=4)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[5, 9, 13, 5, 9, 13, 5, 9, 13, 5, 9, 13]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(40):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    data = write_jsonl(
        tmp_path / "rows.jsonl", [{"input_ids": ids[0].tolist(), "loss_mask": [0, 0, 0] + [1] * 9}]
    )
    found = build_cache(small(target=folder, data=data, agreement_samples=3)).agreement
    with torch.no_grad():
        logits = model.eval()(ids).logits[0, 2:-1]
    wanted = torch.nn.functional.cross_entropy(logits, ids[0, 3:])
    assert found["nll"] == pytest.approx(float(wanted), rel=1e-3)
    assert found["greedy"] == float((logits.argmax(-1) == ids[0, 3:]).float().mean()) > 0.8
    assert (found["tokens"], found["samples"]) == (9, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"target_dtype": "float16"},
        {"bucket_edges": ()},
        {"bucket_edges": (10, 10)},
        {"bucket_edges": (20, 10)},
        {"num_target_layers": 0},
        {"unit_tokens": 0},
        {"batch_tokens": -1},
        {"max_samples": 0},
        {"max_length": 0},
        {"max_skipped": 1.1},
        {"max_skipped": float("nan")},
        {"agreement_samples": -1},
    ],
)
def test_an_option_that_cannot_work_is_refused_by_name(small, changes):
    (name,) = changes
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} .*: want"):
        small(**changes)


# --- what is told -------------------------------------------------------------------------------


def info(out: Path) -> dict:
    result = CliRunner().invoke(main, ["cache", "info", str(out), "--json"])
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    return json.loads(line)


def test_info_of_a_complete_cache_is_one_object_with_all_that_is_promised(tiny_cache):
    found = info(tiny_cache)
    assert set(found) >= INFO_KEYS
    manifest = ledger.read_manifest(tiny_cache)
    assert found["complete"] is True
    for name in ("samples", "tokens", "supervised_tokens", "bytes", "units", "fingerprint"):
        assert found[name] == getattr(manifest, name)
    assert found["buckets"] == manifest.buckets
    assert (found["encoding"], found["target_layer_ids"]) == ("bf16", [1, 3, 5])
    assert (found["hidden_size"], found["bytes_per_token"]) == (32, 3 * 32 * 2 + 5)
    assert found["target"] == "tiny"


def test_info_of_a_half_built_cache_says_how_far_it_is(small):
    config = small()
    build_cache(config)
    (config.out / "manifest.json").unlink()
    (config.out / "commits" / "u000001.json").unlink()
    record = ledger.read_record(config.out / "commits" / "u000000.json")
    found = info(config.out)
    assert set(found) >= INFO_KEYS
    assert found["complete"] is False
    assert (found["units"], found["samples"]) == (1, len(record.sample_ids))
    assert found["samples_planned"] == 6
    assert found["tokens"] == sum(record.lengths)


def test_info_of_a_damaged_seal_is_an_error(small):
    config = small()
    build_cache(config)
    (config.out / "manifest.json").write_text("{")
    with pytest.raises(CacheError, match="not a manifest"):
        describe_cache(config.out)


def test_places_that_a_repair_needs_are_kept_as_seen_from_anywhere(tmp_path, monkeypatch):
    for name in ("target", "rows.jsonl", "prompts.jsonl"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    config = BuildConfig(
        target="target", data="rows.jsonl", exclude="prompts.jsonl", out=tmp_path / "cache"
    )
    kept = options_of(config)
    assert [kept[name] for name in ("target", "data", "exclude")] == [
        str(tmp_path / name) for name in ("target", "rows.jsonl", "prompts.jsonl")
    ]
