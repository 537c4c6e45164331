"""Damage of every kind is found and never read as data; `repair` mends it and nothing else.

Contents are compared byte by byte, never by the checksums that records keep: CRC-32C of bytes
with their own CRC-32C behind them is one number, whatever the bytes are.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from conftest import save_tiny_target, tiny_build, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_cache import build, extraction, ledger, lock, repair, store, sweep
from dflash_cache.buffers import buffers
from dflash_cache.build import build_cache
from dflash_cache.checksums import crc32c
from dflash_cache.config import ENCODING_NAMES, BuildConfig
from dflash_cache.encodings import HIDDEN
from dflash_cache.errors import CacheBusyError, CacheError, CacheMismatchError, DataError
from dflash_cache.layout import CHUNK_TOKENS, RawPlane, chunks_of
from dflash_cache.reader import CacheReader
from dflash_cache.repair import repair_cache
from dflash_cache.schema import CHANNELS_FILE, FINAL_HIDDEN, PROBE_FILE, UnitRecord
from dflash_cache.sweep import collect
from dflash_cache.verify import verify_cache
from dflash_cache.weights import load_target

# Units u000001 and u000002 have equally many samples and chunks: their raw files are of one size.
LENGTHS = (150, 140, 150, 140, 90, 64, 30)
UNITS = ("u000000", "u000001", "u000002")
PLANES = (1, FINAL_HIDDEN)


def make_rows() -> list[dict]:
    """Rows of ids, no two alike: what is swapped must differ."""
    rng = np.random.default_rng(0)
    return [
        {
            "input_ids": rng.integers(4, 300, length).tolist(),
            "loss_mask": [*rng.integers(0, 2, length - 1).tolist(), 1],
        }
        for length in LENGTHS
    ]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target") / "small", layers=4)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", make_rows())


@pytest.fixture(scope="module", autouse=True)
def one_load(target):
    """Load the target once for all builds and repairs; flushing shows nothing here."""
    loaded = load_target(str(target), dtype="float32", device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        for module in (build, repair):
            patch.setattr(module, "load_weights", lambda *_, **__: deepcopy(loaded))
        patch.setattr(os, "fsync", lambda _: None)
        yield


def config(target: Path, data: Path, out: Path, encoding: str) -> BuildConfig:
    return tiny_build(
        target,
        data,
        out,
        target_layers=(1,),
        final_hidden=True,
        bucket_edges=(100, 200),
        unit_tokens=300,
        encoding=encoding,
    )


@pytest.fixture(scope="module", params=ENCODING_NAMES)
def sealed(request, tmp_path_factory, target, data) -> Path:
    """A sealed cache of three units; whoever damages it puts everything back."""
    out = tmp_path_factory.mktemp("sealed") / "cache"
    build_cache(config(target, data, out, request.param))
    assert tuple(CacheReader(out).records) == UNITS
    return out


@pytest.fixture(scope="module")
def original(sealed) -> dict:
    return readings(sealed)


@pytest.fixture
def cache(sealed, tmp_path) -> Path:
    """A copy, for tests that leave their damage behind."""
    return shutil.copytree(sealed, tmp_path / "cache")


# --- what a reader gives out, and how it is damaged -----------------------------------------------


def readings(root: Path, *, direct: bool = False) -> dict:
    """Every single thing that a reader gives out, as values that compare; None where it refuses."""
    found: dict = {}
    reader = attempt(found, "reader", lambda: CacheReader(root, direct=direct, threads=2))
    if reader is None:
        return found
    found["reader"] = (reader.manifest.to_dict(), reader.located)
    attempt(found, "frozen", lambda: tuple(map(bits, reader.frozen())))
    for index in range(len(reader.located)):
        attempt(found, ("tokens", index), lambda i=index: tuple(map(bytes, reader.tokens(i))))
        for plane in PLANES:
            attempt(
                found,
                ("states", index, plane),
                lambda i=index, p=plane: bits(reader.hidden(i, [p])),
            )
    attempt(found, "pack", lambda: read_pack(reader))
    return found


def attempt(found: dict, name: object, act: Callable):
    try:
        found[name] = act()
    except CacheError:
        found[name] = None
    return found[name]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def read_pack(reader: CacheReader) -> list[bytes]:
    """All samples at once, as training reads them."""
    starts = np.cumsum([0, *reader.lengths]).tolist()
    into = buffers(reader.identity, len(PLANES), starts[-1])
    reader.read_documents(range(len(reader.lengths)), starts[:-1], PLANES, into)
    return [bits(part) for part in into.values()]


def refused(root: Path, original: dict, *, direct: bool = False) -> set:
    """What cannot be read any more; everything else is as it was."""
    found = readings(root, direct=direct)
    assert {name: value for name, value in found.items() if value is not None}.items() <= (
        original.items()
    ), "damage was read as data"
    return {name for name in original if found.get(name) is None}


def told(root: Path) -> list[str]:
    """The problems that `verify` finds; none is an answer too."""
    report = verify_cache(root)
    assert report["ok"] is (not report["errors"])
    return [error["problem"] for error in report["errors"]]


def files_of(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def files_of_one_unit(root: Path) -> list[str]:
    """Every kind of file: those of one unit, and all that lies beside the units."""
    own = record_of(root, "u000001").folder
    return [name for name in files_of(root) if name.startswith(own) or "units/" not in name]


def record_of(root: Path, unit: str) -> UnitRecord:
    return ledger.read_record(ledger.record_path(root, unit))


def folder_of(root: Path, unit: str) -> Path:
    return root / record_of(root, unit).folder


@contextmanager
def flipped(path: Path, offset: int, change: int) -> Iterator[None]:
    """One byte changed in place, and put back."""
    file = os.open(path, os.O_RDWR)
    try:
        (byte,) = os.pread(file, 1, offset)
        os.pwrite(file, bytes([byte ^ change]), offset)
        try:
            yield
        finally:
            os.pwrite(file, bytes([byte]), offset)
    finally:
        os.close(file)


@contextmanager
def replaced(path: Path, payload: bytes | None) -> Iterator[None]:
    """Other content, or none; the old file comes back."""
    kept = path.with_name(f"{path.name}.kept")
    path.rename(kept)
    try:
        if payload is not None:
            path.write_bytes(payload)
        yield
    finally:
        kept.replace(path)


@contextmanager
def swapped(*pairs: tuple[Path, Path]) -> Iterator[None]:
    for pair in pairs:
        swap(*pair)
    try:
        yield
    finally:
        for pair in pairs:
            swap(*pair)


def swap(one: Path, two: Path) -> None:
    aside = one.with_name(f"{one.name}.aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


def is_metadata(name: str) -> bool:
    return name.startswith("units/") and name.endswith("zarr.json")


def is_data(name: str) -> bool:
    """Whether a file of a unit holds data; zarr's metadata is for other libraries."""
    return "/c/0" in name


# --- verify, and the ordinary read ----------------------------------------------------------------


def test_a_whole_cache_is_whole_and_every_byte_is_read(sealed, original):
    report = verify_cache(sealed)
    assert report["ok"] is True
    assert report["errors"] == []
    assert report["units_checked"] == len(UNITS)
    assert (report["leftovers"], report["leftover_bytes"]) == (0, 0)
    # The seal and the records carry a checksum of their own.
    sizes = {name: (sealed / name).stat().st_size for name in files_of(sealed)}
    own = sum(size for name, size in sizes.items() if name.startswith(("commits/", "manifest")))
    assert report["bytes_checked"] == sum(sizes.values()) - own
    assert None not in original.values()


@settings(max_examples=60)
@given(data=st.data())
def test_any_single_byte_that_changes_is_found_and_never_read_as_data(sealed, original, data):
    name = data.draw(st.sampled_from(files_of(sealed)))
    offset = data.draw(st.integers(0, (sealed / name).stat().st_size - 1))
    with flipped(sealed / name, offset, data.draw(st.integers(1, 255))):
        assert any(name in problem for problem in told(sealed))
        refused(sealed, original, direct=data.draw(st.booleans()))


def test_the_first_the_last_and_other_bytes_of_every_file_are_checked(sealed, original):
    rng = np.random.default_rng(0)
    for name in files_of_one_unit(sealed):
        size = (sealed / name).stat().st_size
        for offset in {0, size - 1, int(rng.integers(size))}:
            with flipped(sealed / name, offset, int(rng.integers(1, 256))):
                assert any(name in problem for problem in told(sealed)), (name, offset)
                refused(sealed, original)


def test_every_byte_of_states_is_covered_by_the_ordinary_read(sealed, original):
    """Not only by `verify`: training never calls that."""
    rng = np.random.default_rng(1)
    for unit in UNITS:
        record = record_of(sealed, unit)
        for name in record.files:
            if name.startswith((HIDDEN, FINAL_HIDDEN)) and is_data(name):
                plane = RawPlane(row_bytes=row_bytes(sealed, name))
                for length, start in zip(record.lengths, record.starts, strict=True):
                    token = start + int(rng.integers(length))
                    chunk, row = divmod(token, CHUNK_TOKENS)
                    offset = chunk * plane.stride + row * plane.row_bytes
                    with flipped(sealed / record.folder / name, offset, 1):
                        assert refused(sealed, original), (name, token)


def row_bytes(root: Path, name: str) -> int:
    """Bytes of a token in a raw plane of 32 channels."""
    return 64 if ledger.read_identity(root).encoding == "bf16" else 32


HARM = {
    "a byte less": lambda payload: payload[:-1],
    "nothing left": lambda _: b"",
    "a zero more": lambda payload: payload + b"\0",
    "a line more": lambda payload: payload + b"\n",
    "only zeros": lambda payload: bytes(len(payload)),
    "gone": lambda _: None,
}


@pytest.mark.parametrize("sealed", ["lossless", "int8"], indirect=True)  # every kind of file
@pytest.mark.parametrize("harm", HARM)
def test_a_file_cut_extended_emptied_or_gone_is_found(sealed, original, harm):
    for name in files_of_one_unit(sealed):
        with replaced(sealed / name, HARM[harm]((sealed / name).read_bytes())):
            assert any(name in problem for problem in told(sealed)), name
            missing = refused(sealed, original)
            # Nobody reads the plan or the probe, and metadata of zarr only by its size.
            if name not in ("plan.parquet", PROBE_FILE) and (
                harm != "only zeros" or not is_metadata(name)
            ):
                assert missing, name


@pytest.mark.parametrize("units", [("u000000", "u000001"), ("u000001", "u000002")])
def test_a_file_of_another_unit_is_found(sealed, original, units):
    one, two = (record_of(sealed, unit) for unit in units)
    tried = 0
    for name in sorted(one.files.keys() & two.files.keys()):
        pair = (sealed / one.folder / name, sealed / two.folder / name)
        if pair[0].read_bytes() == pair[1].read_bytes():
            assert not is_data(name), name
            continue
        with swapped(pair):
            assert told(sealed), name
            missing = refused(sealed, original)
            assert missing or not is_data(name), name
        tried += 1
    assert tried >= 6


@pytest.mark.parametrize("part", ["states", "states and checksums"])
def test_a_plane_of_another_unit_is_found(sealed, original, part):
    one, two = folder_of(sealed, "u000001"), folder_of(sealed, "u000002")
    for plane in planes_of(sealed):
        names = [f"{plane}/c/0/0", *([f"checksums/{plane}/c/0"] if "checksums" in part else [])]
        with swapped(*((one / name, two / name) for name in names)):
            assert told(sealed), plane
            assert refused(sealed, original), plane


@pytest.mark.parametrize("part", ["states", "states and checksums"])
def test_a_plane_of_another_layer_is_found(sealed, original, part):
    """The same unit and the same size: only their content tells two layers apart."""
    folder = folder_of(sealed, "u000001")
    stems = {plane.rpartition("/")[0] for plane in planes_of(sealed)} - {""}
    for stem in stems:
        own = f"{stem}/1"
        other = FINAL_HIDDEN if stem == HIDDEN else f"{stem}/{FINAL_HIDDEN}"
        pairs = [(folder / f"{own}/c/0/0", folder / f"{other}/c/0/0")]
        if "checksums" in part:
            pairs.append(
                (folder / f"checksums/{own}/c/0", folder / f"checksums/{other}/c/0"),
            )
        with swapped(*pairs):
            assert told(sealed), stem
            assert refused(sealed, original), stem


def planes_of(root: Path) -> list[str]:
    """Planes that are shards of chunks: states, exponents."""
    files = record_of(root, "u000001").files
    return [name.removesuffix("/c/0/0") for name in files if name.endswith("/c/0/0")]


@pytest.mark.parametrize("sealed", ["int8", "fp8"], indirect=True)
def test_two_layers_scales_swapped_are_found(sealed, original):
    folder = folder_of(sealed, "u000001")
    with swapped((folder / "scales/1/c/0", folder / f"scales/{FINAL_HIDDEN}/c/0")):
        assert told(sealed)
        assert refused(sealed, original)


@pytest.mark.parametrize("part", ["chunks", "chunks and checksums"])
def test_two_samples_of_one_file_swapped_are_found(sealed, original, part):
    """Each chunk with its own checksum behind it, as zarr reads them."""
    record = record_of(sealed, "u000001")
    assert record.lengths == [150, 150]
    count = chunks_of(150)
    for plane in (f"{HIDDEN}/1", FINAL_HIDDEN):
        path = sealed / record.folder / f"{plane}/c/0/0"
        size = count * RawPlane(row_bytes=row_bytes(sealed, plane)).stride
        whole = path.read_bytes()
        checks = sealed / record.folder / f"checksums/{plane}/c/0"
        numbers = checks.read_bytes()
        other = numbers[4 * count : 8 * count] + numbers[: 4 * count]
        if part == "chunks":
            other = numbers[: 8 * count]
        with (
            replaced(path, whole[size : 2 * size] + whole[:size] + whole[2 * size :]),
            replaced(checks, other + crc32c(other).to_bytes(4, "little")),
        ):
            assert told(sealed), plane
            assert refused(sealed, original), plane


@pytest.mark.parametrize("name", ["input_ids", "loss_mask"])
def test_other_values_with_a_fitting_checksum_are_found(sealed, original, name):
    """A small file that is whole in itself, but not the one that was written."""
    path = folder_of(sealed, "u000001") / name / "c" / "0"
    values = path.read_bytes()[:-4]
    other = values[:1] + bytes([values[1] ^ 1]) + values[2:]
    with replaced(path, other + crc32c(other).to_bytes(4, "little")):
        assert told(sealed)
        assert refused(sealed, original)


def test_folders_of_two_units_swapped_are_found(sealed, original):
    with swapped((folder_of(sealed, "u000001"), folder_of(sealed, "u000002"))):
        assert told(sealed)
        assert refused(sealed, original)


def test_swapped_commit_records_are_found(sealed, original):
    one, two = (ledger.record_path(sealed, unit) for unit in UNITS[1:])
    with swapped((one, two)):
        assert len(told(sealed)) == 2
        assert "reader" in refused(sealed, original)


def test_a_record_too_many_is_found_and_read_by_nobody(sealed, original):
    stray = ledger.record_path(sealed, "u000009")
    shutil.copy(ledger.record_path(sealed, "u000000"), stray)
    try:
        assert told(sealed) == ["commits/u000009.json: no such unit"]
        assert refused(sealed, original) == set()
    finally:
        stray.unlink()


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(CacheError, match="no such folder"):
        verify_cache(tmp_path / "nothing")


# --- repair ---------------------------------------------------------------------------------------


def cut(name: str, root: Path) -> None:
    (root / name).write_bytes((root / name).read_bytes()[:-1])


def lose(name: str, root: Path) -> None:
    (root / name).unlink()


def spoil(name: str, root: Path) -> None:
    payload = bytearray((root / name).read_bytes())
    payload[len(payload) // 2] ^= 1
    (root / name).write_bytes(payload)


def spoil_states(root: Path) -> None:
    spoil(f"{record_of(root, 'u000001').folder}/hidden/1/c/0/0", root)


def spoil_header(root: Path) -> None:
    """The tensors stay as they are: only their file is another."""
    path = root / "frozen.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"pt"', b'"qt"'))


def lose_unit(root: Path) -> None:
    shutil.rmtree(folder_of(root, "u000001"))


def leave_stray(root: Path) -> None:
    path = ledger.record_path(root, "u000000")
    shutil.copy(path, path.with_name("u000009.json"))


def swap_layers(root: Path) -> None:
    folder = folder_of(root, "u000001")
    for name in ("{}/c/0/0", "checksums/{}/c/0"):
        swap(folder / name.format("hidden/1"), folder / name.format(FINAL_HIDDEN))


# What is done to the cache, and the units that have to be extracted again.
DAMAGE: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "states spoilt": (spoil_states, ["u000001"]),
    "layers swapped": (swap_layers, ["u000001"]),
    "unit lost": (lose_unit, ["u000001"]),
    "record lost": (partial(lose, "commits/u000002.json"), ["u000002"]),
    "record spoilt": (partial(spoil, "commits/u000000.json"), ["u000000"]),
    "records of two lost": (
        lambda root: [lose(f"commits/{unit}.json", root) for unit in UNITS[1:]],
        ["u000001", "u000002"],
    ),
    "stray record": (leave_stray, []),
    "plan spoilt": (partial(spoil, "plan.parquet"), []),
    "plan lost": (partial(lose, "plan.parquet"), []),
    "probe spoilt": (partial(spoil, PROBE_FILE), []),
    "probe lost": (partial(lose, PROBE_FILE), []),
    "frozen spoilt": (partial(spoil, "frozen.safetensors"), []),
    "frozen cut": (partial(cut, "frozen.safetensors"), []),
    "frozen header spoilt": (spoil_header, []),
    "frozen lost": (partial(lose, "frozen.safetensors"), []),
    "seal spoilt": (partial(spoil, "manifest.json"), []),
    "seal lost": (partial(lose, "manifest.json"), []),
    "root spoilt": (partial(spoil, "zarr.json"), []),
    "root lost": (partial(lose, "zarr.json"), []),
    "all records lost": (lambda root: shutil.rmtree(root / "commits"), list(UNITS)),
    "all units lost": (lambda root: shutil.rmtree(root / "units"), list(UNITS)),
}


IN_EVERY_ENCODING = ("states spoilt", "layers swapped", "record spoilt", "all units lost")
DAMAGE_OF_SCALES = {
    "scales spoilt": (partial(spoil, CHANNELS_FILE), []),
    "scales lost": (partial(lose, CHANNELS_FILE), []),
}


@pytest.fixture
def extracted(monkeypatch) -> list[list[int]]:
    """Sample ids of every unit that is extracted."""
    ran, real = [], extraction.run_unit

    def counted(target, samples, *rest):
        ran.append([sample.sample_id for sample in samples])
        return real(target, samples, *rest)

    monkeypatch.setattr(extraction, "run_unit", counted)
    return ran


def contents(root: Path) -> dict[str, bytes]:
    """Every file by name, attempts under the name of their unit."""
    found = {}
    for name in files_of(root):
        folders = name.split("/")
        if folders[0] == "units":
            folders[2] = folders[2].split(".")[0]
        found["/".join(folders)] = (root / name).read_bytes()
    return found


def unlike(found: Path, wanted: Path) -> set[str]:
    """Files that are in one cache only, or not the same in both."""
    one, two = contents(found), contents(wanted)
    return {name for name in one.keys() | two.keys() if one.get(name) != two.get(name)}


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_ino)
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize(
    ("sealed", "damage"),
    [
        *(("bf16", damage) for damage in DAMAGE),
        *((e, d) for e in ENCODING_NAMES if e != "bf16" for d in IN_EVERY_ENCODING),
        *(("int8", damage) for damage in DAMAGE_OF_SCALES),
    ],
    indirect=["sealed"],
)
def test_a_repaired_cache_is_the_same_and_only_the_damage_was_touched(
    sealed, original, cache, extracted, damage
):
    act, units = {**DAMAGE, **DAMAGE_OF_SCALES}[damage]
    ids = {unit: record_of(sealed, unit).sample_ids for unit in UNITS}
    kept = {unit: folder_of(cache, unit) for unit in UNITS if unit not in units}
    before = {unit: stamps(folder) for unit, folder in kept.items()}
    act(cache)

    report = repair_cache(cache, device="cpu")

    assert report["ok"] is True
    assert report["units_repaired"] == len(units)
    assert report["problems"]
    assert told(cache) == []
    assert extracted == [ids[unit] for unit in units]
    assert {unit: stamps(folder) for unit, folder in kept.items()} == before
    # The seal says anew when it was made, and a record which attempt won; all else is as it was.
    records = {f"commits/{unit}.json" for unit in units}
    assert unlike(cache, sealed) <= {"manifest.json", *records}
    again = readings(cache)
    assert {**again, "reader": original["reader"][1]} == {
        **original,
        "reader": again["reader"][1],
    }


@pytest.mark.parametrize("sealed", ["bf16"], indirect=True)
def test_a_whole_cache_needs_no_repair_and_is_not_touched(cache, extracted):
    before = stamps(cache)
    report = repair_cache(cache, device="cpu")
    assert report == {"ok": True, "units_repaired": 0, "problems": []}
    assert stamps(cache) == before
    assert extracted == []


def test_a_repair_that_fails_in_the_middle_can_be_run_again(cache, sealed, extracted, monkeypatch):
    for unit in UNITS:
        cut(f"{record_of(cache, unit).folder}/hidden/1/c/0/0", cache)
    real, replaced_units = store.replace, []

    def fails_at_the_second(root, record):
        replaced_units.append(record.unit)
        if len(replaced_units) == 2:
            raise OSError("input/output error")
        return real(root, record)

    with monkeypatch.context() as patch:
        patch.setattr(store, "replace", fails_at_the_second)
        with pytest.raises(OSError, match="input/output error"):
            repair_cache(cache, device="cpu")
    done = stamps(folder_of(cache, "u000000"))
    del extracted[:]

    assert repair_cache(cache, device="cpu")["units_repaired"] == 2

    assert extracted == [record_of(sealed, unit).sample_ids for unit in UNITS[1:]]
    assert stamps(folder_of(cache, "u000000")) == done
    records = {f"commits/{unit}.json" for unit in UNITS}
    assert unlike(cache, sealed) <= {"manifest.json", *records}


@pytest.fixture
def elsewhere(target, data, tmp_path) -> tuple[str, str]:
    """The same target and data in another place."""
    moved = shutil.copytree(target, tmp_path / "moved" / target.name)
    return str(moved), str(shutil.copy(data, tmp_path / "moved" / "rows.jsonl"))


@pytest.mark.parametrize("sealed", ["bf16"], indirect=True)
def test_target_and_data_may_be_somewhere_else(cache, elsewhere, original):
    lose_unit(cache)
    found = repair_cache(cache, target=elsewhere[0], data=elsewhere[1], device="cpu")
    assert found["units_repaired"] == 1
    assert told(cache) == []
    assert refused(cache, {**original, "reader": readings(cache)["reader"]}) == set()


@pytest.mark.parametrize("sealed", ["bf16"], indirect=True)
def test_a_repair_remembers_where_target_and_data_are_now(cache, elsewhere, extracted):
    lose_unit(cache)
    repair_cache(cache, target=elsewhere[0], data=elsewhere[1], device="cpu")
    for options in (ledger.read_root(cache)[1], ledger.read_manifest(cache).options):
        assert (options["target"], options["data"]) == elsewhere


@pytest.mark.parametrize("sealed", ["bf16"], indirect=True)
def test_another_target_is_refused_by_the_name_of_the_field(cache, target, tmp_path):
    other = save_tiny_target(tmp_path / target.name, layers=4, seed=1)
    lose_unit(cache)
    before = stamps(cache)
    with pytest.raises(CacheMismatchError, match=r"begun with target\.weights_sha256 = "):
        repair_cache(cache, target=str(other), device="cpu")
    assert {**stamps(cache), ".": 0} == {**before, ".": 0}


@pytest.mark.parametrize("sealed", ["bf16"], indirect=True)
def test_other_data_is_refused_by_the_name_of_the_field(cache, tmp_path):
    rows = make_rows()
    rows[2]["input_ids"][7] += 1
    lose_unit(cache)
    with pytest.raises(CacheMismatchError, match="begun with data_sha256 = "):
        repair_cache(cache, data=str(write_jsonl(tmp_path / "rows.jsonl", rows)), device="cpu")


@pytest.mark.parametrize("sealed", ["bf16"], indirect=True)
def test_data_that_is_gone_is_named(cache, tmp_path):
    lose_unit(cache)
    with pytest.raises(DataError, match=r"gone\.jsonl"):
        repair_cache(cache, data=str(tmp_path / "gone.jsonl"), device="cpu")


def test_a_place_that_is_no_cache_is_refused_and_stays_as_it_was(tmp_path):
    with pytest.raises(CacheError, match="no such folder"):
        repair_cache(tmp_path / "nothing" / "deep", device="cpu")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "thesis.tex").write_text("ten years of work")
    with pytest.raises(CacheError, match="not empty and not a cache; nothing was touched"):
        repair_cache(tmp_path, device="cpu")
    assert files_of(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("sealed", ["bf16"], indirect=True)
def test_a_cache_that_forgot_how_it_was_built_is_refused(cache):
    for name in ("zarr.json", "manifest.json"):
        cut(name, cache)
    with pytest.raises(CacheError, match=r"zarr\.json and manifest\.json are both damaged"):
        repair_cache(cache, device="cpu")


# --- leftovers ------------------------------------------------------------------------------------


@pytest.fixture
def littered(cache) -> tuple[Path, set[str]]:
    """A cache with what killed builds leave behind, and the names of it."""
    litter = set()
    for unit in UNITS[:2]:
        folder = folder_of(cache, unit)
        shutil.copytree(folder, folder.with_name(f"{unit}.0rphaned"))
        litter.add(str(folder.with_name(f"{unit}.0rphaned").relative_to(cache)))
    for name in (".manifest.json.12345678.partial", "commits/.u000000.json.12345678.partial"):
        (cache / name).write_text("{")
        litter.add(name)
    return cache, litter


@pytest.mark.parametrize("sealed", ["bf16"], indirect=True)
def test_leftovers_are_no_damage_but_are_told(littered, original):
    cache, litter = littered
    report = verify_cache(cache)
    assert report["ok"] is True
    assert report["leftovers"] == len(litter)
    assert report["leftover_bytes"] > 0
    assert refused(cache, original) == set()


@pytest.mark.parametrize("sealed", ["bf16"], indirect=True)
def test_gc_removes_what_no_record_names_and_nothing_else(littered, sealed):
    cache, litter = littered
    size = verify_cache(cache)["leftover_bytes"]
    report = collect(cache)
    assert set(report["removed"]) == litter
    assert (report["bytes"], report["dry_run"]) == (size, False)
    assert files_of(cache) == files_of(sealed)
    assert told(cache) == []
    assert collect(cache)["removed"] == []


@pytest.mark.parametrize("sealed", ["bf16"], indirect=True)
def test_a_dry_run_of_gc_removes_nothing(littered):
    cache, litter = littered
    before = stamps(cache)
    assert set(collect(cache, dry_run=True)["removed"]) == litter
    assert {**stamps(cache), ".": 0} == {**before, ".": 0}


@pytest.mark.parametrize("sealed", ["bf16"], indirect=True)
def test_gc_leaves_every_attempt_of_a_unit_whose_record_is_damaged(littered):
    cache, litter = littered
    spoil("commits/u000000.json", cache)
    doubtful = {name for name in litter if "/u000000." in name and name.startswith("units/")}
    assert len(doubtful) == 1
    live = folder_of_any(cache, "u000000")
    assert set(collect(cache)["removed"]) == litter - doubtful
    assert folder_of_any(cache, "u000000") == live


def folder_of_any(root: Path, unit: str) -> list[Path]:
    return sorted(root.glob(f"units/*/{unit}.*"))


@pytest.mark.parametrize("sealed", ["bf16"], indirect=True)
def test_gc_waits_for_nobody_and_removes_nothing_while_somebody_writes(littered):
    cache, _ = littered
    before = files_of(cache)
    with lock.held(cache, doing="dflash cache build"):
        with pytest.raises(CacheBusyError, match=r"`dflash cache build` \(process"):
            collect(cache)
        with pytest.raises(CacheBusyError, match=r"`dflash cache build` \(process"):
            repair_cache(cache, device="cpu")
    assert files_of(cache) == before


def test_gc_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("ten years of work")
    with pytest.raises(CacheError, match="not a cache folder"):
        collect(tmp_path)
    assert files_of(tmp_path) == ["thesis.tex"]


def test_leftovers_of_a_whole_cache_are_none(sealed):
    assert sweep.leftovers(sealed) == []


# --- the command line -----------------------------------------------------------------------------


def dflash(*words: object) -> tuple[int, str]:
    from dflash_cli.main import main

    result = CliRunner().invoke(main, ["cache", *map(str, words)])
    return result.exit_code, result.stdout if result.exit_code in (0, 1) else result.output


@pytest.mark.parametrize("sealed", ["bf16"], indirect=True)
def test_verify_repair_and_gc_by_the_command_line(littered):
    cache, litter = littered
    code, text = dflash("verify", cache, "--json")
    report = json.loads(text)
    assert code == 0
    assert report.keys() >= {"ok", "units_checked", "bytes_checked", "errors"}
    assert (report["ok"], report["errors"]) == (True, [])

    code, text = dflash("gc", cache, "--dry-run", "--json")
    assert (code, set(json.loads(text)["removed"])) == (0, litter)
    code, text = dflash("gc", cache, "--json")
    assert (code, set(json.loads(text)["removed"])) == (0, litter)

    spoil_states(cache)
    cut("plan.parquet", cache)
    code, text = dflash("verify", cache, "--json")
    report = json.loads(text)
    assert code == 1
    assert (report["ok"], report["units_checked"]) == (False, len(UNITS))
    assert [error.keys() for error in report["errors"]] == [{"unit", "problem"}] * 2
    assert [error["unit"] for error in report["errors"]] == [None, "u000001"]

    code, text = dflash("repair", cache, "--device", "cpu", "--json")
    assert code == 0
    assert json.loads(text)["units_repaired"] == 1
    assert dflash("verify", cache, "--json")[0] == 0


@pytest.mark.parametrize("sealed", ["bf16"], indirect=True)
def test_a_person_is_told_what_is_damaged(cache):
    spoil_states(cache)
    code, text = dflash("verify", cache)
    assert code == 1
    assert "hidden/1/c/0/0: its checksum does not fit its content" in text
