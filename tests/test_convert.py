"""A converted cache is the one that a build with that encoding gives, made without the target."""

import errno
import json
import os
import re
import shutil
from collections import namedtuple
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from conftest import save_tiny_target, tiny_build, write_jsonl
from faults import every_failure

from dflash_cache import agreement, build, extraction, ledger, lock, repair, store
from dflash_cache.build import build_cache
from dflash_cache.config import BuildConfig
from dflash_cache.convert import convert_cache
from dflash_cache.describe import describe_cache
from dflash_cache.encodings import HIDDEN
from dflash_cache.errors import CacheError, CacheMismatchError, ConfigError, DiskFullError
from dflash_cache.reader import CacheReader
from dflash_cache.repair import repair_cache
from dflash_cache.schema import CHANNELS_FILE, FINAL_HIDDEN, Manifest, UnitRecord
from dflash_cache.verify import verify_cache
from dflash_cache.weights import load_target
from dflash_cli.main import main

LENGTHS = (150, 140, 150, 140, 90, 64, 30)
TOO_LONG = 190
UNITS = ("u000000", "u000001", "u000002")
PLANES = (1, FINAL_HIDDEN)


def make_rows() -> list[dict]:
    """Rows of ids, no two alike, the last one too long to be used."""
    rng = np.random.default_rng(0)
    return [
        {
            "input_ids": rng.integers(4, 300, length).tolist(),
            "loss_mask": [*rng.integers(0, 2, length - 1).tolist(), 1],
        }
        for length in (*LENGTHS, TOO_LONG)
    ]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target") / "small", layers=4)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", make_rows())


@pytest.fixture(scope="module", autouse=True)
def one_load(target):
    """Load the target once for all builds and repairs; flushing shows nothing here.

    A random target agrees with nothing: what it measured is made up.
    """
    loaded = load_target(str(target), dtype="float32", device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        for module in (build, repair):
            patch.setattr(module, "load_weights", lambda *_, **__: deepcopy(loaded))
        patch.setattr(agreement, "measure_agreement", lambda *_: {"nll": 1.5, "greedy": 0.25})
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="module")
def config(target, data) -> Callable[[Path, str], BuildConfig]:
    """A build of three units in two buckets."""

    def make(out: Path, encoding: str) -> BuildConfig:
        return tiny_build(
            target,
            data,
            out,
            target_layers=(1,),
            final_hidden=True,
            bucket_edges=(100, 200),
            unit_tokens=300,
            max_length=160,
            max_skipped=0.5,
            encoding=encoding,
        )

    return make


@pytest.fixture(scope="module")
def built(tmp_path_factory, config) -> Callable[[str], Path]:
    """The cache that a build with an encoding gives, made once; read only."""
    caches: dict[str, Path] = {}

    def made(encoding: str) -> Path:
        if encoding not in caches:
            caches[encoding] = tmp_path_factory.mktemp(encoding) / "cache"
            build_cache(config(caches[encoding], encoding))
        return caches[encoding]

    return made


def convert(source: Path, encoding: str, out: Path) -> Manifest:
    return convert_cache(source, encoding=encoding, out=out, device="cpu")


# --- what a cache holds ---------------------------------------------------------------------------


def files_of(root: Path) -> dict[str, bytes]:
    """Every file but the seal and the records; attempts go by the name of their unit."""
    found = {}
    for path in root.rglob("*"):
        folders = list(path.relative_to(root).parts)
        if path.is_file() and folders[0] not in ("commits", "manifest.json"):
            if folders[0] == "units":
                folders[2] = folders[2].split(".")[0]
            found["/".join(folders)] = path.read_bytes()
    return found


def unlike(found: Path, wanted: Path) -> set[str]:
    """Files that are in one cache only, or not the same in both."""
    one, two = files_of(found), files_of(wanted)
    return {name for name in one.keys() | two.keys() if one.get(name) != two.get(name)}


def records_of(root: Path) -> list[UnitRecord]:
    """The records, without the names of the attempts that won."""
    paths = sorted((root / "commits").iterdir())
    return [replace(ledger.read_record(path), folder="") for path in paths]


def seal_of(root: Path) -> Manifest:
    """The seal, without the moment in which it was made."""
    return replace(ledger.read_manifest(root), created="")


def states_of(root: Path) -> list[torch.Tensor]:
    """States [K, t, H] of every sample."""
    reader = CacheReader(root)
    return [reader.hidden(index, PLANES) for index in range(len(reader.located))]


def assert_the_same_cache(found: Path, wanted: Path) -> None:
    assert unlike(found, wanted) == set()
    assert records_of(found) == records_of(wanted)
    assert seal_of(found) == seal_of(wanted)
    report = verify_cache(found)
    assert (report["errors"], report["leftovers"]) == ([], 0)


def stamps(root: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(root)): (path.stat().st_mtime_ns, path.stat().st_ino)
        for path in root.rglob("*")
    }


# --- the same as a build --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "encoding"),
    [("bf16", "fp8"), ("bf16", "lossless"), ("lossless", "bf16"), ("lossless", "fp8")],
)
def test_a_converted_cache_is_the_one_that_a_build_gives(built, tmp_path, source, encoding):
    before = stamps(built(source))
    manifest = convert(built(source), encoding, tmp_path / "out")
    assert tuple(CacheReader(tmp_path / "out").records) == UNITS
    assert manifest == ledger.read_manifest(tmp_path / "out")
    assert_the_same_cache(tmp_path / "out", built(encoding))
    assert stamps(built(source)) == before


@pytest.mark.parametrize("source", ["bf16", "lossless"])
def test_int8_is_the_same_up_to_the_scales_that_it_measures(built, tmp_path, source):
    """A build measures them on lone samples, a conversion on those that were batched."""
    out = tmp_path / "out"
    assert convert(built(source), "int8", out).fingerprint == seal_of(built("int8")).fingerprint

    # Everything that the scales decide, and nothing else, may differ.
    spelt = (CHANNELS_FILE, *(f"/{part}/" for part in ("scales", HIDDEN, FINAL_HIDDEN)))
    assert all(any(word in name for word in spelt) for name in unlike(out, built("int8")))
    # Rounding to bfloat16 is the largest difference between a lone sample and a batched one.
    torch.testing.assert_close(
        CacheReader(out).channels(PLANES),
        CacheReader(built("int8")).channels(PLANES),
        rtol=2**-8,
        atol=0,
    )
    assert verify_cache(out)["errors"] == []


def test_int8_is_nowhere_further_off_than_half_a_step(built, tmp_path):
    convert(built("bf16"), "int8", tmp_path / "out")
    channels = CacheReader(tmp_path / "out").channels(PLANES)[:, None]
    for found, wanted in zip(states_of(tmp_path / "out"), states_of(built("bf16")), strict=True):
        peaks = (wanted / channels).abs().amax(dim=-1, keepdim=True)
        half_a_step = peaks / 127 * channels / 2
        rounding = 2**-8 * (wanted.abs() + half_a_step)  # what is read comes as bfloat16
        assert ((found.float() - wanted.float()).abs() <= half_a_step * 1.001 + rounding).all()
        assert not torch.equal(found, wanted)


def test_there_and_back_without_loss_is_the_same_cache(built, tmp_path):
    convert(built("bf16"), "lossless", tmp_path / "there")
    convert(tmp_path / "there", "bf16", tmp_path / "back")
    assert_the_same_cache(tmp_path / "back", built("bf16"))


@pytest.mark.parametrize("encoding", ["fp8", "int8", "lossless"])
def test_samples_and_evidence_are_carried_over(built, tmp_path, encoding):
    source, found = seal_of(built("bf16")), convert(built("bf16"), encoding, tmp_path / "out")
    for name in ("samples", "tokens", "supervised_tokens", "units", "buckets", "rows", "skipped",
                 "proofs", "agreement", "software"):  # fmt: skip
        assert getattr(found, name) == getattr(source, name), name
    assert (source.samples, source.tokens, source.rows) == (len(LENGTHS), sum(LENGTHS), 8)
    assert source.proofs
    assert source.agreement
    assert sum(source.skipped.values()) == 1
    one, two = CacheReader(built("bf16")), CacheReader(tmp_path / "out")
    assert one.located == two.located
    for index in range(len(LENGTHS)):
        for a, b in zip(one.tokens(index), two.tokens(index), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("encoding", ["fp8", "int8"])
def test_the_error_told_is_that_of_the_states_read_back(built, tmp_path, encoding):
    """Median and 99th percentile over the tokens of a unit, then the mean over all tokens."""
    out = tmp_path / "out"
    manifest = convert(built("bf16"), encoding, out)
    exact, spelt = states_of(built("bf16")), states_of(out)
    numbers = {located.sample_id: i for i, located in enumerate(CacheReader(out).located)}
    sums = {"hidden/1": np.zeros(2), FINAL_HIDDEN: np.zeros(2)}
    for record in records_of(out):
        for k, plane in enumerate(("hidden/1", FINAL_HIDDEN)):
            errors = torch.cat(
                [
                    (spelt[i][k].double() - exact[i][k].double()).norm(dim=-1)
                    / exact[i][k].double().norm(dim=-1)
                    for i in (numbers[sample] for sample in record.sample_ids)
                ]
            ).numpy()
            told = np.array([np.median(errors), np.quantile(errors, 0.99)])
            own = record.encoding_error[plane]
            np.testing.assert_allclose([own["median"], own["p99"]], told, rtol=1e-4)
            sums[plane] += sum(record.lengths) * told

    for found in (manifest.encoding_error, describe_cache(out)["encoding_error"]):
        assert found.keys() == sums.keys()
        for plane, values in found.items():
            wanted = sums[plane] / sum(LENGTHS)
            assert wanted.min() > 1e-3
            np.testing.assert_allclose([values["median"], values["p99"]], wanted, rtol=1e-4)


def test_without_loss_there_is_no_error_to_tell(built, tmp_path):
    assert convert(built("bf16"), "lossless", tmp_path / "out").encoding_error == {}
    assert describe_cache(tmp_path / "out")["encoding_error"] == {}


def test_a_build_says_that_a_converted_cache_is_complete(built, tmp_path, config):
    manifest = convert(built("bf16"), "fp8", tmp_path / "out")
    before = stamps(tmp_path / "out")
    assert build_cache(config(tmp_path / "out", "fp8")) == manifest
    assert stamps(tmp_path / "out") == before


def test_a_converted_cache_is_repaired_like_one_that_was_built(built, tmp_path):
    convert(built("bf16"), "fp8", tmp_path / "out")
    record = ledger.read_record(tmp_path / "out" / "commits" / "u000001.json")
    states = tmp_path / "out" / record.folder / "hidden" / "1" / "c" / "0" / "0"
    states.write_bytes(bytes(states.stat().st_size))
    assert repair_cache(tmp_path / "out", device="cpu")["units_repaired"] == 1
    assert_the_same_cache(tmp_path / "out", built("fp8"))


# --- again ----------------------------------------------------------------------------------------


class Stopped(Exception):
    """What ends a conversion in the middle."""


def stop_at_unit(patch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Let the writing of one unit fail; returns the units that were begun, as they come."""
    begun, real = [], store.write_unit

    def stops(root, plan, *rest, **options):
        begun.append(plan.name)
        if len(begun) == number:
            raise Stopped
        return real(root, plan, *rest, **options)

    patch.setattr(store, "write_unit", stops)
    return begun


@pytest.mark.parametrize("encoding", ["fp8", "int8", "lossless"])
def test_an_interrupted_conversion_goes_on_where_it_stopped(built, tmp_path, monkeypatch, encoding):
    convert(built("bf16"), encoding, tmp_path / "whole")
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        assert stop_at_unit(patch, 3) == []
        with pytest.raises(Stopped):
            convert(built("bf16"), encoding, out)
    done = {name: stamp for name, stamp in stamps(out).items() if re.search("u00000[01]", name)}
    assert len(done) > 20
    with pytest.raises(CacheError, match=r"not complete \(5 of 7 samples\)"):
        CacheReader(out)

    begun = stop_at_unit(monkeypatch, -1)
    convert(built("bf16"), encoding, out)

    assert begun == ["u000002"]
    assert stamps(out).items() >= done.items()
    assert_the_same_cache(out, tmp_path / "whole")


def test_a_build_goes_on_where_a_conversion_stopped(built, tmp_path, monkeypatch, config):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_at_unit(patch, 2)
        with pytest.raises(Stopped):
            convert(built("bf16"), "fp8", out)
    begun = stop_at_unit(monkeypatch, -1)
    assert build_cache(config(out, "fp8")).proofs["probe"] == 0.0
    assert sorted(begun) == ["u000001", "u000002"]  # a build has its own order
    assert unlike(out, built("fp8")) == set()
    assert records_of(out) == records_of(built("fp8"))


def test_a_conversion_goes_on_where_a_build_stopped_with_its_scales(
    built, tmp_path, monkeypatch, config
):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(extraction, "calibration_samples", lambda _: [0])  # a conversion takes all
        done = stop_at_unit(patch, 2)
        with pytest.raises(Stopped):
            build_cache(config(out, "int8"))
    scales = (out / CHANNELS_FILE).read_bytes()

    begun = stop_at_unit(monkeypatch, -1)
    convert(built("bf16"), "int8", out)

    assert begun == sorted({"u000000", "u000001", "u000002"} - {done[0]})
    assert (out / CHANNELS_FILE).read_bytes() == scales
    assert scales != (built("int8") / CHANNELS_FILE).read_bytes()
    assert verify_cache(out)["errors"] == []


@pytest.mark.parametrize(
    ("steps", "stride", "dead"),
    [
        pytest.param(["replace", "link", "rename"], 1, False, id="a step fails"),
        pytest.param(["replace", "link", "rename"], 1, True, id="power is gone"),
        # All of them strike within units, which a build writes in the same way.
        pytest.param(["pwrite"], 4, True, id="power is gone in a write"),
    ],
)
def test_whatever_step_fails_the_next_run_ends_with_the_same_bits(
    built, tmp_path, steps, stride, dead
):
    committed = set()
    for folder in every_failure(
        lambda folder: convert(built("bf16"), "fp8", folder / "out"),
        tmp_path,
        dead=dead,
        steps=steps,
        stride=stride,
    ):
        committed.add(len(list((folder / "out").glob("commits/u*.json"))))
        convert(built("bf16"), "fp8", folder / "out")
        assert_the_same_cache(folder / "out", built("fp8"))
        shutil.rmtree(folder)
    # The failures struck before, between and after the units.
    assert committed == set(range(3 if steps == ["pwrite"] else 4))


def test_a_complete_conversion_stays_as_it_is_to_the_last_time_stamp(built, tmp_path):
    manifest = convert(built("bf16"), "fp8", tmp_path / "out")
    before = stamps(tmp_path / "out")
    assert convert(built("bf16"), "fp8", tmp_path / "out") == manifest
    assert stamps(tmp_path / "out") == before


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["fp8", "int8"])
@pytest.mark.parametrize("encoding", ["bf16", "lossless", "int8", "fp8"])
def test_states_that_have_lost_bits_are_refused(built, tmp_path, source, encoding):
    told = "is .* already" if source == encoding else f"its states are {source} and have lost bits"
    with pytest.raises(CacheError, match=told):
        convert(built(source), encoding, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("source", ["bf16", "lossless"])
def test_the_encoding_that_it_has_is_refused(built, tmp_path, source):
    with pytest.raises(CacheError, match=f"is {source} already"):
        convert(built(source), source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_encoding_that_does_not_exist_is_refused(built, tmp_path):
    with pytest.raises(ConfigError, match="--encoding fp4: want bf16, lossless, int8, fp8"):
        convert(built("bf16"), "fp4", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_is_no_complete_cache_is_refused(built, tmp_path):
    with pytest.raises(CacheError, match="not a cache folder"):
        convert(tmp_path / "nothing", "fp8", tmp_path / "out")
    half = shutil.copytree(built("bf16"), tmp_path / "half")
    (half / "manifest.json").unlink()
    with pytest.raises(CacheError, match="not complete"):
        convert(half, "fp8", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_anything_else_is_refused_and_stays_as_it_was(built, tmp_path):
    (tmp_path / "thesis.tex").write_text("ten years of work")
    before = stamps(tmp_path)
    with pytest.raises(CacheError, match="not empty and not a cache; nothing was touched"):
        convert(built("bf16"), "fp8", tmp_path)
    with pytest.raises(CacheError, match="a file stands where the cache folder should be"):
        convert(built("bf16"), "fp8", tmp_path / "thesis.tex")
    assert stamps(tmp_path) == before


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "half-built"])
def test_another_cache_is_refused_by_the_name_of_the_field(built, tmp_path, sealed):
    """The source itself is one, too."""
    other = shutil.copytree(built("bf16"), tmp_path / "other")
    if not sealed:
        (other / "manifest.json").unlink()
    before = stamps(tmp_path)
    for source in (built("bf16"), *([other] if sealed else [])):
        with pytest.raises(
            CacheMismatchError, match="begun with encoding = bf16, this run has fp8"
        ):
            convert(source, "fp8", other)
    assert stamps(tmp_path) == before


@pytest.mark.parametrize(
    "name", ["hidden/1/c/0/0", "loss_mask/c/0", "plan.parquet", "frozen.safetensors"]
)
def test_damage_is_not_carried_over(built, tmp_path, name):
    source = shutil.copytree(built("bf16"), tmp_path / "source")
    record = ledger.read_record(source / "commits" / "u000001.json")
    path = source / record.folder / name if "/c/" in name else source / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-10] + bytes([whole[-10] ^ 1]) + whole[-9:])
    if name.startswith("hidden"):  # the index behind the states is not read
        path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])

    with pytest.raises(CacheError, match=f"{name}.*damaged.*`dflash cache repair {source}`"):
        convert(source, "fp8", tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()

    path.write_bytes(whole)
    convert(source, "fp8", tmp_path / "out")
    assert_the_same_cache(tmp_path / "out", built("fp8"))


@pytest.mark.parametrize("name", ["plan.parquet", "frozen.safetensors"])
def test_a_file_that_the_source_has_lost_is_named(built, tmp_path, name):
    source = shutil.copytree(built("bf16"), tmp_path / "source")
    (source / name).unlink()
    with pytest.raises(CacheError, match=f"{name}: missing.*`dflash cache repair {source}`"):
        convert(source, "fp8", tmp_path / "out")


def test_who_was_there_before_the_lock_was_had_is_seen(built, tmp_path, monkeypatch):
    """Another conversion comes and stops while this one still has to get the lock."""
    out, real = tmp_path / "out", lock.held

    def after_another(root, *, doing):
        monkeypatch.setattr(lock, "held", real)
        with monkeypatch.context() as patch:
            stop_at_unit(patch, 1)
            with pytest.raises(Stopped):
                convert(built("bf16"), "lossless", out)
        return real(root, doing=doing)

    monkeypatch.setattr(lock, "held", after_another)
    with pytest.raises(CacheMismatchError, match="begun with encoding = lossless"):
        convert(built("bf16"), "fp8", out)


# --- the disk -------------------------------------------------------------------------------------

Usage = namedtuple("Usage", "total used free")


def with_room_for(patch: pytest.MonkeyPatch, free: int) -> None:
    patch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 0, free))


def test_a_disk_that_is_too_small_is_refused_before_the_first_byte(built, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with_room_for(monkeypatch, 50_000)
    with pytest.raises(DiskFullError, match=r"are free: .* Nothing was written") as told:
        convert(built("bf16"), "fp8", out)
    assert list(tmp_path.iterdir()) == []

    missing = int(re.search(r"([\d,]+) bytes are missing", str(told.value))[1].replace(",", ""))
    with_room_for(monkeypatch, 50_000 + missing - 1)
    with pytest.raises(DiskFullError, match=": 1 bytes are missing"):
        convert(built("bf16"), "fp8", out)
    with_room_for(monkeypatch, 50_000 + missing)
    convert(built("bf16"), "fp8", out)
    # An estimate above what a disk gives in blocks.
    taken = sum(path.stat().st_blocks * 512 for path in out.rglob("*/*") if path.is_file())
    assert 0.5 * (50_000 + missing) < taken <= 50_000 + missing


def test_a_disk_needs_room_only_for_what_is_missing(built, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_at_unit(patch, 3)
        with pytest.raises(Stopped):
            convert(built("bf16"), "fp8", out)
    before = stamps(out)
    with_room_for(monkeypatch, 0)
    with pytest.raises(DiskFullError) as told:
        convert(built("bf16"), "fp8", out)
    assert {**stamps(out), ".": 0} == {**before, ".": 0}
    missing = int(re.search(r"([\d,]+) bytes are missing", str(told.value))[1].replace(",", ""))
    with_room_for(monkeypatch, missing)
    convert(built("bf16"), "fp8", out)
    with pytest.raises(DiskFullError):
        convert(built("bf16"), "fp8", tmp_path / "from the start")


def test_a_disk_that_gets_full_is_one_message_and_the_next_run_goes_on(
    built, tmp_path, monkeypatch
):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", full)
        with pytest.raises(DiskFullError, match=r"the disk is full .*All committed units are kept"):
            convert(built("bf16"), "fp8", tmp_path / "out")
    convert(built("bf16"), "fp8", tmp_path / "out")
    assert_the_same_cache(tmp_path / "out", built("fp8"))


# --- the command line -----------------------------------------------------------------------------


def dflash(*words: object):
    return CliRunner().invoke(main, ["cache", "convert", *map(str, words), "--device", "cpu"])


def test_the_command_prints_what_info_prints(built, tmp_path):
    found = dflash(built("bf16"), "--encoding", "fp8", "--out", tmp_path / "out", "--json")
    assert found.exit_code == 0
    report = json.loads(found.stdout)
    assert report == describe_cache(tmp_path / "out")
    assert (report["complete"], report["encoding"], report["samples"]) == (True, "fp8", 7)
    assert_the_same_cache(tmp_path / "out", built("fp8"))


def test_the_command_tells_people_the_same(built, tmp_path):
    found = dflash(built("bf16"), "--encoding", "fp8", "--out", tmp_path / "out")
    assert found.exit_code == 0
    assert re.search(r"^complete +yes$", found.stdout, re.MULTILINE)
    assert re.search(r"^encoding +fp8$", found.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("source", "encoding", "told"),
    [
        ("fp8", "bf16", "its states are fp8 and have lost bits"),
        ("bf16", "bf16", "is bf16 already"),
        ("bf16", "fp4", "--encoding fp4: want bf16, lossless, int8, fp8"),
    ],
)
def test_a_mistake_is_one_message(built, tmp_path, source, encoding, told):
    found = dflash(built(source), "--encoding", encoding, "--out", tmp_path / "out", "--json")
    assert (found.exit_code, found.stdout) == (1, "")
    assert found.stderr.startswith("Error: ")
    assert told in found.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_has_to_be_said_is_asked_for(built, tmp_path):
    for words in (["--encoding", "fp8"], ["--out", tmp_path / "out"]):
        assert dflash(built("bf16"), *words).exit_code == 2
    assert list(tmp_path.iterdir()) == []
