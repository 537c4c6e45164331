"""A cache that is still being built: what is committed can be read, and nothing else."""

import errno
import json
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from conftest import tiny_build
from slow_builder import SlowBuilder
from test_lock import another_holder

from dflash_cache import disk, growing, ledger, lock, presence
from dflash_cache.buffers import buffers
from dflash_cache.build import build_cache
from dflash_cache.convert import convert_cache
from dflash_cache.errors import CacheBusyError, CacheError
from dflash_cache.growing import GrowingReader, await_begun, open_cache
from dflash_cache.presence import Presence
from dflash_cache.reader import CacheReader

pytestmark = pytest.mark.filterwarnings("ignore:.* is multi-threaded:DeprecationWarning")


@pytest.fixture
def builder(tiny_cache: Path, tmp_path: Path) -> SlowBuilder:
    return SlowBuilder(tiny_cache, tmp_path / "cache")


@pytest.fixture(scope="module")
def int8_cache(tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("int8") / "cache"
    convert_cache(tiny_cache, encoding="int8", out=out, device="cpu")
    return out


def documents_of(reader, unit: str) -> list[int]:
    return [i for i, located in enumerate(reader.located) if located.unit == unit]


# --- what is there --------------------------------------------------------------------------------


def test_samples_are_known_and_numbered_as_in_the_sealed_cache_before_a_unit_is_there(builder):
    sealed, reader = CacheReader(builder.source), GrowingReader(builder.root)
    assert reader.located == sealed.located
    assert reader.lengths == sealed.lengths
    assert reader.identity == sealed.identity
    assert (reader.records, reader.sealed, sealed.sealed) == ({}, False, True)
    for mine, theirs in zip(reader.frozen(), sealed.frozen(), strict=True):
        assert torch.equal(mine, theirs)


def test_units_come_once_by_the_time_of_their_records_and_then_by_name(builder):
    reader = GrowingReader(builder.root)
    assert reader.refresh() == []
    first, second, third, fourth, fifth, *_ = builder.units
    for unit, at in ((fourth, 9), (second, 7), (third, 7), (first, 8)):
        builder.commit(unit, at=at)
    assert reader.refresh() == [second, third, first, fourth]
    assert reader.refresh() == []
    builder.commit(fifth, at=1)
    assert reader.refresh() == [fifth]
    assert list(reader.records) == [second, third, first, fourth, fifth]


def test_a_sealed_cache_gives_all_units_in_the_same_order_once(builder):
    order = builder.units[::-1]
    for unit in order:
        builder.commit(unit)
    builder.seal()
    reader = CacheReader(builder.root)
    assert reader.refresh() == order
    assert reader.refresh() == []


@pytest.mark.parametrize("encoding", ["bf16", "int8"])
def test_a_committed_unit_reads_as_it_does_from_the_sealed_cache(
    tiny_cache, int8_cache, tmp_path, encoding
):
    builder = SlowBuilder({"bf16": tiny_cache, "int8": int8_cache}[encoding], tmp_path / "cache")
    reader, sealed = GrowingReader(builder.root), CacheReader(builder.source)
    layer_ids = reader.identity.target_layer_ids
    builder.commit(builder.units[2])
    documents = [d for unit in reader.refresh() for d in documents_of(reader, unit)]
    reader.open_units(documents)
    found, wanted = (buffers(reader.identity, len(layer_ids), 1024) for _ in range(2))
    for part in (*found.values(), *wanted.values()):
        part.view(torch.uint8).zero_()
    starts = [128 * i for i in range(len(documents))]
    reader.read_documents(documents, starts, layer_ids, found)
    sealed.read_documents(documents, starts, layer_ids, wanted)
    for name in wanted:
        assert torch.equal(found[name].view(torch.uint8), wanted[name].view(torch.uint8))
    for document in documents:
        for mine, theirs in zip(reader.tokens(document), sealed.tokens(document), strict=True):
            assert (mine == theirs).all()
        assert torch.equal(reader.hidden(document, layer_ids), sealed.hidden(document, layer_ids))
    mine, theirs = reader.channels(layer_ids), sealed.channels(layer_ids)
    assert (mine is None) == (theirs is None) == (encoding == "bf16")
    assert mine is None or torch.equal(mine, theirs)


def test_a_unit_that_is_only_an_attempt_is_never_read(builder):
    reader = GrowingReader(builder.root)
    builder.commit(builder.units[0])
    reader.refresh()
    attempt = next(builder.root.glob(f"units/*/{builder.units[1]}.*"))
    assert (attempt / "input_ids/c/0").is_file()
    document = documents_of(reader, builder.units[1])[0]
    for read in (reader.tokens, lambda d: reader.open_units([d]), lambda d: reader.hidden(d, [1])):
        with pytest.raises(AssertionError, match=f"{builder.units[1]} is not committed"):
            read(document)


def test_after_the_seal_everything_reads_on(builder):
    reader = GrowingReader(builder.root)
    builder.commit(builder.units[0])
    reader.refresh()
    reader.frozen()
    builder.finish()
    assert reader.refresh() == builder.units[1:]
    assert reader.sealed
    assert reader.refresh() == []
    sealed = CacheReader(builder.root)
    for index in range(len(sealed.lengths)):
        assert reader.tokens(index)[0].tolist() == sealed.tokens(index)[0].tolist()


def test_bytes_per_token_are_those_of_the_units_that_are_there(builder):
    reader, sealed = GrowingReader(builder.root), CacheReader(builder.source)
    planes, manifest = len(sealed.identity.planes), sealed.manifest
    assert sealed.state_bytes_per_token == manifest.bytes / manifest.tokens / planes
    # A chunk of 64 rows of 32 bfloat16 and its checksum, rounded up to 4096.
    assert reader.state_bytes_per_token == 8192 / 64
    builder.commit(builder.units[3])
    (unit,) = reader.refresh()
    record = sealed.records[unit]
    assert reader.state_bytes_per_token == record.bytes / sum(record.lengths) / planes


# --- damage is an error, never data ---------------------------------------------------------------


def rewritten(builder: SlowBuilder, unit: str, **changes) -> None:
    record = replace(ledger.read_record(ledger.record_path(builder.root, unit)), **changes)
    disk.write_file(ledger.record_path(builder.root, unit), record.to_bytes())


DAMAGES = {
    "a flipped byte": (
        lambda b, unit: disk.write_file(
            ledger.record_path(b.root, unit),
            ledger.record_path(b.root, unit).read_bytes().replace(b'"bucket": ', b'"bucket": 1', 1),
        ),
        "checksum does not fit",
    ),
    "another cache's": (
        lambda b, unit: rewritten(b, unit, fingerprint="0" * 64),
        "belongs to another cache",
    ),
    "another unit's": (
        lambda b, unit: disk.write_file(
            ledger.record_path(b.root, unit),
            ledger.record_path(b.source, b.units[0]).read_bytes(),
        ),
        "belongs to another cache or unit",
    ),
    "other groups": (
        lambda b, unit: rewritten(b, unit, groups=["f" * 16] * len(documents_of_record(b, unit))),
        r"not what plan\.parquet has planned",
    ),
    "other scales": (
        lambda b, unit: rewritten(b, unit, channels_checksum=7),
        "2 sets of scales",
    ),
}


def documents_of_record(builder: SlowBuilder, unit: str) -> list[int]:
    return ledger.read_record(ledger.record_path(builder.root, unit)).sample_ids


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_record_that_is_not_this_cache_s_is_an_error_and_its_unit_is_not_there(builder, damage):
    act, told = DAMAGES[damage]
    reader, (first, second, *_) = GrowingReader(builder.root), builder.units
    builder.commit(first)
    assert reader.refresh() == [first]
    builder.commit(second)
    act(builder, second)
    for _ in range(2):
        with pytest.raises(CacheError, match=told):
            reader.refresh()
    assert list(reader.records) == [first]


def test_a_record_of_no_unit_is_an_error(builder):
    builder.commit(builder.units[0])
    record = ledger.read_record(ledger.record_path(builder.root, builder.units[0]))
    strange = replace(record, unit="u999999")
    disk.write_file(ledger.record_path(builder.root, "u999999"), strange.to_bytes())
    with pytest.raises(CacheError, match=r"u999999\.json: not what plan\.parquet has planned"):
        GrowingReader(builder.root).refresh()


@pytest.mark.parametrize("name", ["hidden/1/c/0/0", "input_ids/c/0"])
def test_a_damaged_file_of_a_committed_unit_is_an_error(builder, name):
    unit = builder.units[0]
    builder.commit(unit)
    reader = GrowingReader(builder.root)
    reader.refresh()
    path = builder.root / reader.records[unit].folder / name
    payload = bytearray(path.read_bytes())
    payload[5] ^= 1
    path.unlink()  # it is linked to the cache that others use
    path.write_bytes(payload)
    document = next(d for d in documents_of(reader, unit) if reader.located[d].start == 0)
    with pytest.raises(CacheError, match=f"unit {unit}; the cache is damaged"):
        reader.hidden(document, [1]) if "hidden" in name else reader.tokens(document)


def test_frozen_weights_other_than_those_of_the_seal_are_told_at_the_seal(builder):
    reader = GrowingReader(builder.root)
    path = builder.root / "frozen.safetensors"
    whole = bytearray(path.read_bytes())
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    reader.frozen()
    builder.finish()
    with pytest.raises(CacheError, match=r"frozen\.safetensors: read before the seal"):
        reader.refresh()
    assert not reader.sealed
    path.write_bytes(whole)
    sound = GrowingReader(builder.root)
    sound.refresh()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CacheError, match="checksum does not fit its content"):
        sound.frozen()


def test_scales_that_the_units_were_not_spelt_with_are_an_error(int8_cache, tmp_path):
    builder = SlowBuilder(int8_cache, tmp_path / "cache")
    path = builder.root / "channels.safetensors"
    whole = bytearray(path.read_bytes())
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    reader = GrowingReader(builder.root)
    with pytest.raises(AssertionError, match="no unit is committed"):
        reader.channels([1])
    builder.commit(builder.units[0])
    reader.refresh()
    with pytest.raises(CacheError, match=r"channels\.safetensors: its checksum does not fit"):
        reader.channels(reader.identity.target_layer_ids)


def test_a_unit_that_was_written_anew_meanwhile_is_told_at_the_seal(builder):
    reader, unit = GrowingReader(builder.root), builder.units[0]
    builder.commit(unit)
    reader.refresh()
    rewritten(builder, unit, slots=1)
    builder.finish()
    with pytest.raises(CacheError, match=f"{unit}.json: written anew .* run the same command"):
        reader.refresh()


def test_a_seal_without_all_its_records_is_an_error(builder):
    reader = GrowingReader(builder.root)
    for unit in builder.units[1:]:
        builder.commit(unit)
    builder.seal()
    with pytest.raises(CacheError, match=f"{builder.units[0]}.json: the commit record is missing"):
        reader.refresh()


# --- the plan -------------------------------------------------------------------------------------


def test_a_plan_of_an_earlier_version_is_refused_until_the_cache_is_sealed(builder):
    path = builder.root / "plan.parquet"
    pq.write_table(pq.read_table(path).drop_columns("group"), path)
    with pytest.raises(CacheError, match=r"has no group.*run the same `dflash cache build` again"):
        open_cache(builder.root, follow=True)
    builder.finish()
    assert open_cache(builder.root, follow=True).refresh() == builder.units


@pytest.mark.parametrize("damage", ["cut", "rows lost", "a row twice", "a length"])
def test_a_damaged_plan_is_refused(builder, damage):
    path = builder.root / "plan.parquet"
    table = pq.read_table(path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    elif damage == "a length":
        rows = table.to_pydict()
        rows["length"][3] += 1
        pq.write_table(type(table).from_pydict(rows, schema=table.schema), path)
    else:
        rows = list(range(1, len(table))) if damage == "rows lost" else [1, *range(1, len(table))]
        pq.write_table(table.take(rows), path)
    with pytest.raises(CacheError, match="the plan anew") as told:
        GrowingReader(builder.root)
    assert str(path) in str(told.value)


def test_a_build_leaves_all_that_a_reader_needs_before_its_first_unit(
    tiny_target, tiny_data, tmp_path, monkeypatch
):
    out, real, seen = tmp_path / "cache", disk.create_file, []

    def create(path: Path, payload: bytes) -> bool:
        if not seen:
            reader = GrowingReader(out)
            assert reader.refresh() == []
            reader.frozen()
            seen.append(reader)
        made = real(path, payload)
        if len(seen) == 1:
            seen[0].refresh()
            seen.append(seen[0].channels(seen[0].identity.target_layer_ids))
        return made

    monkeypatch.setattr(disk, "create_file", create)
    build_cache(tiny_build(tiny_target, tiny_data, out, encoding="int8"))
    reader, channels = seen
    reader.refresh()
    assert reader.sealed
    sealed = CacheReader(out)
    assert reader.located == sealed.located
    assert torch.equal(channels, sealed.channels(sealed.identity.target_layer_ids))


# --- to open --------------------------------------------------------------------------------------


def test_without_follow_a_growing_cache_is_refused_and_a_url_with_it(builder):
    with pytest.raises(CacheError, match="is not complete"):
        open_cache(builder.root, follow=False)
    assert isinstance(open_cache(builder.root, follow=True), GrowingReader)
    builder.finish()
    for follow in (False, True):
        assert isinstance(open_cache(builder.root, follow=follow), CacheReader)
    with pytest.raises(CacheError, match="not at a URL"):
        open_cache("s3://bucket/cache", follow=True)


def test_a_build_that_nobody_begins_is_waited_for_in_words_and_then_refused(tmp_path, capsys):
    began = time.monotonic()
    with pytest.raises(CacheError, match=r"for 0\.3 seconds nobody .* start `dflash cache build`"):
        await_begun(tmp_path / "cache", patience=0.3, every=0.01)
    assert time.monotonic() - began >= 0.3
    wanted = f"{tmp_path / 'cache'}: waiting for `dflash cache build` to be started\n"
    assert capsys.readouterr().err == wanted
    assert list(tmp_path.iterdir()) == []


def test_a_build_that_has_begun_is_waited_for_as_long_as_somebody_builds(builder, tmp_path, capsys):
    plan = builder.root / "plan.parquet"
    plan.rename(tmp_path / "plan")
    waiter = threading.Thread(
        target=await_begun, args=(builder.root,), kwargs={"patience": 0.2, "every": 0.01}
    )
    with builder.at_work():
        waiter.start()
        waiter.join(0.5)
        assert waiter.is_alive()
        (tmp_path / "plan").rename(plan)
        waiter.join(5)
    assert not waiter.is_alive()
    assert "waiting for `dflash cache build` (process " in capsys.readouterr().err


# --- who builds -----------------------------------------------------------------------------------


def test_a_writer_is_seen_with_its_name_and_none_where_there_is_none(tmp_path):
    assert lock.writer(tmp_path / "nothing") is None
    assert lock.writer(tmp_path) is None
    with another_holder(tmp_path) as process:
        found = lock.writer(tmp_path)
        assert found.held
        assert found.words.startswith(f"`dflash cache build` (process {process.pid} on ")
        process.kill()
        process.join()
    assert (tmp_path / lock.LOCK).is_file()
    assert lock.writer(tmp_path) is None


def test_one_who_only_looks_never_keeps_a_writer_out(tmp_path):
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            lock.writer(tmp_path)

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(300):
            (tmp_path / lock.LOCK).touch()  # of one who was killed: what is there can be looked at
            with lock.held(tmp_path, doing="dflash cache build"):
                pass
    finally:
        over.set()
        for looker in lookers:
            looker.join()


def test_a_lock_that_is_shared_for_ever_is_told_in_the_end(tmp_path, monkeypatch):
    import fcntl

    monkeypatch.setattr(lock, "LOOK_SECONDS", 0.1)
    with open(tmp_path / lock.LOCK, "w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        with (
            pytest.raises(CacheBusyError, match="another process is writing here"),
            lock.held(tmp_path, doing="dflash cache build"),
        ):
            pass


def test_the_absence_of_a_builder_begins_when_it_was_seen_last(builder):
    watcher = Presence(builder.root)
    with builder.at_work():
        time.sleep(0.3)
        assert watcher.absence >= 0.3
        assert watcher.look().startswith("`dflash cache build` (process ")
        assert watcher.absence < 0.3
    assert watcher.look() is None
    time.sleep(0.05)
    assert watcher.absence >= 0.05


def test_a_lock_of_another_machine_counts_as_long_as_files_change(builder, monkeypatch):
    """Its lock is not seen here: perhaps it is gone, perhaps the share does not show it."""
    signed = {"doing": "dflash cache build", "pid": 7, "host": "far", "since": "today"}
    (builder.root / lock.LOCK).write_text(json.dumps(signed))
    attempt = next(builder.root.glob("units/*/*"))
    watcher = Presence(builder.root, silence=0.2)
    assert "on far, today), whose lock is not seen from here" in watcher.look()
    for size in range(4):
        time.sleep(0.1)
        (attempt / "grows").write_bytes(b"x" * size)
        assert watcher.look() is not None
    time.sleep(0.25)
    watcher.look()
    time.sleep(0.25)
    assert watcher.look() is None
    builder.commit(builder.units[0])
    time.sleep(0.25)
    assert watcher.look() is not None


def test_the_traces_of_a_writer_leave_out_what_is_committed(builder):
    everything = {name for name, *_ in presence.traces(builder.root)}
    builder.commit(builder.units[0])
    left = {name for name, *_ in presence.traces(builder.root)}
    folder = ledger.read_record(ledger.record_path(builder.root, builder.units[0])).folder
    gone = {str(path) for path in (builder.root / folder).rglob("*")}
    assert gone
    assert everything - left == gone


def test_a_lock_that_may_not_be_read_is_no_traceback(builder, monkeypatch):
    def refuses(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuses)
    with pytest.raises(CacheError, match=r"\.lock: cannot be read \(Permission denied\)"):
        lock.writer(builder.root)


def test_a_lock_that_goes_on_a_share_while_it_is_looked_at_is_nobody_s(builder, monkeypatch):
    def gone(*_, **__):
        raise OSError(errno.ESTALE, "Stale file handle")

    (builder.root / lock.LOCK).write_text("{}")
    for call in ("open", "pread"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, gone)
            assert lock.writer(builder.root) is None


class Scanned:
    """Entries of a folder as of a moment ago."""

    def __init__(self, entries):
        self.entries = iter(entries)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __iter__(self):
        return self.entries

    def __next__(self):
        return next(self.entries)

    def close(self):
        pass


def test_folders_that_go_while_traces_are_looked_for_are_no_error(builder, monkeypatch):
    real, gone, listed = os.scandir, [], {}

    def scandir(path="."):
        if isinstance(path, int):
            return real(path)
        found = listed[str(path)] = listed.get(str(path)) or list(real(path))
        if not gone and Path(path).parent.parent.name == "units":  # an attempt
            gone.append(next(entry.path for entry in found if entry.is_dir()))
            shutil.rmtree(gone[0])
        return Scanned(found)

    monkeypatch.setattr(os, "scandir", scandir)
    list(presence.traces(builder.root))
    assert gone


def test_a_cache_that_is_deleted_while_its_records_are_read_is_told(builder, monkeypatch):
    real = growing.unit_record

    def read(files, unit, fingerprint):
        record = real(files, unit, fingerprint)
        ledger.record_path(builder.root, unit).unlink()
        return record

    reader = GrowingReader(builder.root)
    builder.commit(builder.units[0])
    monkeypatch.setattr(growing, "unit_record", read)
    with pytest.raises(CacheError, match="taken away while the cache was being read"):
        reader.refresh()
    assert reader.records == {}
