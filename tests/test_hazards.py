"""What a disk, a crash or a user does to a cache at a bad moment, and what must not come of it."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from conftest import chat_rows, save_tiny_target, tiny_build, write_jsonl

from dflash_cache import codec, extraction, ledger, plan, repair, store, sweep
from dflash_cache.build import build_cache
from dflash_cache.convert import convert_cache
from dflash_cache.errors import CacheError, ConfigError, DiskFullError
from dflash_cache.plan import plan_only, still_needed
from dflash_cache.reader import CacheReader
from dflash_cache.repair import repair_cache
from dflash_cache.shard import ShardWriter
from dflash_cache.verify import verify_cache
from dflash_cli.main import main

OPTIONS = {"target_layers": (0, 2), "bucket_edges": (60, 120), "unit_tokens": 150}


@pytest.fixture(autouse=True)
def no_flushing(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target") / "tiny", layers=4)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", chat_rows(8))


@pytest.fixture(scope="module")
def sealed(tmp_path_factory, target, data) -> Path:
    out = tmp_path_factory.mktemp("sealed") / "cache"
    build_cache(tiny_build(target, data, out, encoding="int8", **OPTIONS))
    return out


@pytest.fixture
def cache(sealed, tmp_path) -> Path:
    return shutil.copytree(sealed, tmp_path / "cache")


def states(root: Path) -> list[torch.Tensor]:
    reader = CacheReader(root)
    return [reader.hidden(index, [0, 2]) for index in range(len(reader.located))]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


# --- static scales that are lost ----------------------------------------------------------------


def test_a_repair_that_was_cut_off_between_two_scales_never_mixes_them(cache, monkeypatch):
    """Scales measured again on another machine differ in the last bit: all units go by them."""
    (cache / "channels.safetensors").unlink()
    real = codec.channel_rms
    monkeypatch.setattr(codec, "channel_rms", lambda states: real(states) * 1.01)
    kept, count = store.replace, 0

    def cut_off(*args, **options):
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        return kept(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(store, "replace", cut_off)
        with pytest.raises(KeyboardInterrupt):
            repair_cache(cache, device="cpu")
    with pytest.raises(CacheError, match=r"spelt with other scales|its checksum does not fit"):
        states(cache)
    found = repair_cache(cache, device="cpu")
    reader = CacheReader(cache)
    assert found["units_repaired"] == len(reader.records)
    assert len({record.channels_checksum for record in reader.records.values()}) == 1
    assert verify_cache(cache)["ok"]
    # Half a step of the code, and the rounding of bfloat16; other scales would be 1% off alone.
    for index in range(len(reader.located)):
        assert error_of(reader, index, cache.parent / "exact") < 0.02


def error_of(reader: CacheReader, index: int, exact: Path) -> float:
    """Relative error of a sample against the same cache in bfloat16, which is built once."""
    options = reader.manifest.options
    build_cache(tiny_build(Path(options["target"]), Path(options["data"]), exact, **OPTIONS))
    wanted = CacheReader(exact).hidden(index, [0, 2]).float()
    return float((reader.hidden(index, [0, 2]).float() - wanted).norm() / wanted.norm())


def test_a_unit_that_was_spelt_with_other_scales_is_refused(cache, sealed):
    """Whole in itself, of this very cache by its fingerprint, and still not to be read."""
    record = ledger.read_record(cache / "commits" / "u000000.json")
    other = {**record.to_dict(), "channels_checksum": 1}
    path = cache / "commits" / "u000000.json"
    path.write_bytes(type(record).from_dict(other, where="here").to_bytes())
    with pytest.raises(CacheError, match=r"u000000\.json: spelt with other scales"):
        CacheReader(cache)
    (error,) = verify_cache(cache)["errors"]
    assert error["unit"] == "u000000"
    assert repair_cache(cache, device="cpu")["units_repaired"] == 1
    assert same(states(cache), states(sealed))


# --- what is swept away -------------------------------------------------------------------------


def test_a_folder_of_records_that_cannot_be_read_is_not_an_empty_one(cache, monkeypatch):
    real = os.listdir

    def stale(path="."):
        if str(path).endswith("commits"):
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(path)

    before = sorted(cache.glob("units/*/*"))
    monkeypatch.setattr(os, "listdir", stale)
    for act in (sweep.collect, sweep.remove_leftovers, verify_cache):
        with pytest.raises(CacheError, match=r"commits: cannot be read \(Stale file handle\)"):
            act(cache)
    assert sorted(cache.glob("units/*/*")) == before


def test_what_a_sealed_cache_must_have_is_not_swept_away_when_its_record_is_lost(cache):
    """Records are small and may come back from a copy; the states would not."""
    record = cache / "commits" / "u000001.json"
    payload = record.read_bytes()
    record.unlink()
    assert sweep.collect(cache)["removed"] == []
    record.write_bytes(payload)
    assert verify_cache(cache)["ok"]


# --- disks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
def test_a_bad_sector_is_one_message_and_can_be_repaired(cache, sealed, monkeypatch, direct):
    reader = CacheReader(cache, direct=direct)
    record = reader.records["u000001"]
    bad = (cache / record.folder / "hidden/2/c/0/0").resolve()
    real = os.preadv

    def fails(file, buffers, offset):
        if os.readlink(f"/proc/self/fd/{file}") == str(bad):
            raise OSError(errno.EIO, "Input/output error")
        return real(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", fails)
    index = next(i for i, at in enumerate(reader.located) if at.unit == "u000001")
    with pytest.raises(CacheError, match=r"hidden/2/c/0/0: cannot be read \(Input/output error\)"):
        reader.hidden(index, [2])
    (error,) = verify_cache(cache)["errors"]
    assert error["unit"] == "u000001"
    assert repair_cache(cache, device="cpu")["units_repaired"] == 1
    assert same(states(cache), states(sealed))


def test_a_folder_that_is_read_only_is_one_message(cache, target, data, tmp_path, monkeypatch):
    real = os.open

    def read_only(path, flags, *mode):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", read_only)
    for act in (
        lambda: build_cache(tiny_build(target, data, tmp_path / "new", **OPTIONS)),
        lambda: sweep.collect(cache),
        lambda: repair_cache(cache, device="cpu"),
    ):
        with pytest.raises(CacheError, match=r"cannot be written \(Read-only file system\)"):
            act()


def test_a_file_system_without_hard_links_is_refused_before_anything_is_extracted(
    target, data, tmp_path, monkeypatch
):
    def no_links(*_, **__):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(extraction, "run_unit", lambda *_: pytest.fail("extracted"))
    with pytest.raises(CacheError, match="no hard links"):
        build_cache(tiny_build(target, data, tmp_path / "out", **OPTIONS))


def test_a_link_that_is_reported_twice_does_not_lose_the_unit(target, data, tmp_path, monkeypatch):
    """A network share may do it, lose the answer, try again, and say that it is there already."""
    real = os.link

    def twice(source, to, *args, **options):
        real(source, to, *args, **options)
        if str(to).endswith("u000001.json"):
            raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", twice)
    build_cache(tiny_build(target, data, tmp_path / "out", **OPTIONS))
    assert verify_cache(tmp_path / "out")["ok"]


def test_what_is_committed_is_not_asked_room_for_again(target, data, tmp_path, monkeypatch):
    config = tiny_build(target, data, tmp_path / "out", encoding="lossless", **OPTIONS)
    build_cache(config)
    (config.out / "manifest.json").unlink()
    (config.out / "commits" / "u000000.json").unlink()
    found = plan_only(config)
    needed = still_needed(config.out, found, ledger.recorded_units(config.out))
    lengths = [found.samples.lengths[i] for i in found.units[0].members]
    assert needed == plan.unit_bytes(found.identity, lengths)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    build_cache(config)
    assert verify_cache(config.out)["ok"]


# --- advice, and what users type ----------------------------------------------------------------


def test_the_advice_for_a_cache_that_forgot_everything_works(cache, sealed, target, data):
    for name in ("zarr.json", "manifest.json"):
        (cache / name).write_bytes(b"{")
    with pytest.raises(CacheError, match="Delete both and run the same `dflash cache build` again"):
        repair_cache(cache, device="cpu")
    kept = {path: path.stat().st_mtime_ns for path in cache.glob("commits/*")}
    for name in ("zarr.json", "manifest.json"):
        (cache / name).unlink()
    build_cache(tiny_build(target, data, cache, encoding="int8", **OPTIONS))
    assert {path: path.stat().st_mtime_ns for path in cache.glob("commits/*")} == kept
    assert same(states(cache), states(sealed))


def test_a_target_that_was_moved_under_another_name_repairs_what_it_built(
    cache, sealed, target, tmp_path
):
    moved = shutil.copytree(target, tmp_path / "elsewhere" / "under-another-name")
    (cache / "commits" / "u000000.json").unlink()
    assert repair_cache(cache, target=str(moved), device="cpu")["units_repaired"] == 1
    assert CacheReader(cache).identity == CacheReader(sealed).identity
    assert same(states(cache), states(sealed))


def test_a_wrong_device_does_not_cost_the_reading_of_a_damaged_cache(cache, monkeypatch):
    monkeypatch.setattr(repair, "inspect_cache", lambda *_, **__: pytest.fail("read it all"))
    with pytest.raises(ConfigError, match="--device gpu"):
        repair_cache(cache, device="gpu")


def test_converting_into_a_url_is_refused(cache):
    words = ["cache", "convert", str(cache), "--encoding", "fp8", "--out", "s3://bucket/new"]
    found = CliRunner().invoke(main, words)
    assert found.exit_code == 1
    assert "a cache is written in a local or mounted folder" in found.output
    assert not Path("s3:").exists()


@pytest.mark.parametrize("encoding", ["bf16", "lossless", "int8", "fp8"])
def test_an_empty_range_of_tokens_is_empty(target, data, tmp_path, encoding):
    build_cache(tiny_build(target, data, tmp_path / "out", encoding=encoding, **OPTIONS))
    found = CacheReader(tmp_path / "out").hidden(0, [0, 2], slice(0, 0))
    assert found.shape == (2, 0, 32)


def test_a_cache_with_options_that_this_version_does_not_know_is_one_message(cache, monkeypatch):
    real = repair.inspect_cache

    def with_another_option(root, **only):
        found = real(root, **only)
        found.options = {**found.options, "flux": 3}
        return found

    (cache / "commits" / "u000000.json").unlink()
    monkeypatch.setattr(repair, "inspect_cache", with_another_option)
    with pytest.raises(CacheError, match=r"other options than this version has .*flux"):
        repair_cache(cache, device="cpu")


def test_convert_counts_the_bytes_that_are_missing_too(target, data, tmp_path, monkeypatch):
    build_cache(tiny_build(target, data, tmp_path / "exact", **OPTIONS))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ShardWriter, "close", full)
    usage = shutil.disk_usage(tmp_path)
    real, asked = shutil.disk_usage, []

    def shrinks(path):
        asked.append(path)
        return usage if len(asked) == 1 else real(path)._replace(free=10)

    monkeypatch.setattr(shutil, "disk_usage", shrinks)
    with pytest.raises(DiskFullError, match="bytes are missing"):
        convert_cache(tmp_path / "exact", encoding="fp8", out=tmp_path / "out", device="cpu")
