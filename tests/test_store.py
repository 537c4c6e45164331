"""The cache does not matter: what the target gave comes back, bit for bit, or not at all."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from conftest import chat_rows, save_tiny_target, tiny_build, write_jsonl
from safetensors import safe_open
from transformers import LlamaForCausalLM

from dflash_cache import ledger, store
from dflash_cache.buckets import plan_batches
from dflash_cache.build import build_cache
from dflash_cache.errors import CacheError, CacheMismatchError
from dflash_cache.plan import Plan, make_plan
from dflash_cache.reader import CacheReader, UnitReader
from dflash_cache.samples import Sample
from dflash_cache.schema import CHUNK_TOKENS, Identity, Manifest, UnitRecord
from dflash_cache.survey import survey_target, with_weights_hash
from dflash_cache.target import load_target

LAYERS = [1, 3, 5]  # the default three of eight


@pytest.fixture(autouse=True)
def no_flushing(monkeypatch):
    """Flushing takes time and shows nothing here; one test looks at it by itself."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="module")
def plain(tiny_target: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def target(tiny_target: Path):
    return load_target(str(tiny_target), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def plan(tiny_target, tiny_data) -> Plan:
    """The plan of the tiny cache."""
    survey = with_weights_hash(survey_target(str(tiny_target), dtype="float32"))
    return make_plan(tiny_build(tiny_target, tiny_data, Path("unused")), survey)


@pytest.fixture(scope="module")
def reader(tiny_cache: Path) -> CacheReader:
    return CacheReader(tiny_cache)


@pytest.fixture(scope="module")
def small_target(tmp_path_factory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target") / "small", layers=2)


@pytest.fixture(scope="module")
def small_cache(tmp_path_factory, small_target: Path) -> Path:
    """Two units of one layer; tests copy it and spoil the copy."""
    out = tmp_path_factory.mktemp("cache") / "small"
    data = write_jsonl(out.parent / "rows.jsonl", chat_rows(6))
    build_cache(tiny_build(small_target, data, out, target_layers=(0,), bucket_edges=(100, 200)))
    return out


@pytest.fixture
def spoilt(small_cache: Path, tmp_path: Path) -> Path:
    return shutil.copytree(small_cache, tmp_path / "spoilt")


def bits(states: torch.Tensor) -> torch.Tensor:
    return states.to(torch.bfloat16).view(torch.int16)


def read_all(root: Path) -> list:
    """Every sample of a cache, in plain numbers."""
    reader = CacheReader(root)
    layer_ids = reader.identity.target_layer_ids
    return [
        (
            [part.tolist() for part in reader.tokens(index)],
            bits(reader.hidden(index, layer_ids)).tolist(),
        )
        for index in range(len(reader.located))
    ]


def hidden_states(plain: LlamaForCausalLM, ids: torch.Tensor) -> list[torch.Tensor]:
    """The oracle: transformers' own report, entry i + 1 for target layer i."""
    with torch.no_grad():
        output = plain(ids, output_hidden_states=True, use_cache=False)
    return [output.hidden_states[layer_id + 1] for layer_id in LAYERS]


# --- what comes back ----------------------------------------------------------------------------


def test_states_are_bit_for_bit_those_of_the_padded_batch(reader, plain, plan):
    position = {located.sample_id: i for i, located in enumerate(reader.located)}
    seen = 0
    for unit in plan.units:
        samples = [plan.samples.samples[member] for member in unit.members]
        for batch in plan_batches([s.length for s in samples], batch_tokens=512):
            width = max(samples[row].length for row in batch)
            ids = torch.zeros(len(batch), width, dtype=torch.long)
            for line, row in enumerate(batch):
                ids[line, : samples[row].length] = torch.from_numpy(samples[row].input_ids)
            wanted = hidden_states(plain, ids)
            for line, row in enumerate(batch):
                found = reader.hidden(position[samples[row].sample_id], LAYERS)
                for k, states in enumerate(wanted):
                    assert torch.equal(bits(found[k]), bits(states[line, : samples[row].length]))
                seen += 1
    assert seen == len(reader.located) == 40


def test_states_are_those_of_a_lone_forward_to_the_rounding_of_bfloat16(reader, plain):
    for index in range(len(reader.located)):
        ids, _ = reader.tokens(index)
        wanted = torch.stack(hidden_states(plain, torch.from_numpy(ids).long()[None]))[:, 0]
        found = reader.hidden(index, LAYERS).float()
        # Rounding to 8 bits moves a number by at most 2**-8 of it; the rest is float32 kernels.
        torch.testing.assert_close(found, wanted, rtol=2**-8, atol=1e-4)


def test_tokens_and_loss_masks_are_those_of_the_samples(reader, plan):
    assert [located.sample_id for located in reader.located] == list(range(40))
    for index, sample in enumerate(plan.samples.samples):
        ids, mask = reader.tokens(index)
        assert (ids.dtype, mask.dtype) == (np.int32, np.bool_)
        assert ids.tolist() == sample.input_ids.tolist()
        assert mask.tolist() == sample.loss_mask.tolist()
        located = reader.located[index]
        assert (located.length, located.supervised) == (sample.length, sample.supervised)
        assert located.group == sample.group


def test_layers_are_read_in_the_order_asked_for(reader):
    three = reader.hidden(0, LAYERS)
    assert torch.equal(reader.hidden(0, [5, 1]), three[[2, 0]])


def test_the_sealed_totals_are_those_of_the_samples(reader, plan):
    manifest = reader.manifest
    assert (manifest.samples, manifest.tokens) == (40, plan.samples.tokens)
    assert manifest.supervised_tokens == plan.samples.supervised
    assert manifest.units == len(reader.records) == len(plan.units)
    assert sum(manifest.buckets.values()) == 40
    files = [p for p in reader.root.rglob("*") if p.is_file() and p.parent != reader.root]
    in_units = sum(p.stat().st_size for p in files if p.parent.name != "commits")
    assert manifest.bytes == in_units + (reader.root / "frozen.safetensors").stat().st_size


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_stored_once_and_an_untied_one_beside_the_embedding(tmp_path, tied):
    folder = save_tiny_target(tmp_path / "target", layers=4, tied=tied)
    data = write_jsonl(tmp_path / "rows.jsonl", chat_rows(3))
    build_cache(tiny_build(folder, data, tmp_path / "out", num_target_layers=1))
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)

    embedding, head = CacheReader(tmp_path / "out").frozen()

    assert torch.equal(bits(embedding), bits(model.model.embed_tokens.weight))
    assert torch.equal(bits(head), bits(model.lm_head.weight))
    assert (head is embedding) is tied
    with safe_open(tmp_path / "out" / "frozen.safetensors", "pt") as file:
        assert len(list(file.keys())) == (1 if tied else 2)


# --- what lies on disk --------------------------------------------------------------------------


def test_every_sample_starts_on_a_chunk_boundary_and_overlaps_no_other(reader):
    for record in reader.records.values():
        ends = 0
        for start, length in zip(record.starts, record.lengths, strict=True):
            assert start % CHUNK_TOKENS == 0
            assert ends <= start < ends + CHUNK_TOKENS
            ends = start + length
        assert ends <= record.tokens_stored < ends + CHUNK_TOKENS


def test_zarr_itself_opens_a_unit_and_sees_what_the_reader_sees(reader):
    record = reader.records["u000001"]
    group = zarr.open_group(reader.root / record.folder, mode="r")
    arrays = {n: a for n, a in group.members(max_depth=None) if isinstance(a, zarr.Array)}
    assert set(arrays) == {"input_ids", "loss_mask", *(f"hidden/{layer}" for layer in LAYERS)}
    rows = record.tokens_stored
    for layer_id in LAYERS:
        array = arrays[f"hidden/{layer_id}"]
        assert (array.dtype, array.shape) == (np.uint16, (rows, 32))
        assert (array.chunks, array.shards) == ((CHUNK_TOKENS, 32), (rows, 32))
        assert array.attrs["logical_dtype"] == "bfloat16"
    assert (arrays["input_ids"].dtype, arrays["loss_mask"].dtype) == (np.int32, np.uint8)
    index = next(i for i, at in enumerate(reader.located) if at.unit == "u000001")
    at = reader.located[index]
    own = slice(at.start, at.start + at.length)
    stored = np.stack([arrays[f"hidden/{layer_id}"][own] for layer_id in LAYERS])
    wanted = reader.hidden(index, LAYERS).view(torch.uint16).numpy()
    assert np.array_equal(stored, wanted)
    assert np.array_equal(arrays["input_ids"][own], reader.tokens(index)[0])


def test_every_chunk_carries_a_crc32c_and_nothing_is_compressed(reader):
    record = reader.records["u000001"]
    for name in (f"hidden/{LAYERS[0]}", "input_ids", "loss_mask"):
        described = json.loads((reader.root / record.folder / name / "zarr.json").read_text())
        (sharding,) = described["codecs"]
        assert sharding["name"] == "sharding_indexed"
        inner = sharding["configuration"]
        assert inner["chunk_shape"][0] == CHUNK_TOKENS
        assert [codec["name"] for codec in inner["codecs"]] == ["bytes", "crc32c"]
        assert "crc32c" in [codec["name"] for codec in inner["index_codecs"]]


def test_what_is_behind_a_samples_end_is_zero(reader):
    record = reader.records["u000001"]
    group = zarr.open_group(reader.root / record.folder, mode="r")
    own = np.zeros(record.tokens_stored, dtype=bool)
    for start, length in zip(record.starts, record.lengths, strict=True):
        own[start : start + length] = True
    for name in ("input_ids", "loss_mask", f"hidden/{LAYERS[0]}"):
        assert not group[name][...][~own].any()
        assert group[name][...][own].any()


def test_a_second_library_reads_the_same_numbers(reader):
    tensorstore = pytest.importorskip("tensorstore")
    record = reader.records["u000001"]
    for name in (f"hidden/{LAYERS[0]}", "input_ids", "loss_mask"):
        path = reader.root / record.folder / name
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
        found = tensorstore.open(spec, read=True).result().read().result()
        assert np.array_equal(found, zarr.open_array(path, mode="r")[...])


def test_the_plan_on_disk_names_every_sample_with_its_unit(reader, plan):
    import pyarrow.parquet as pq

    rows = pq.read_table(reader.root / "plan.parquet").to_pylist()
    assert [row["unit"] for row in rows] == [unit.name for unit in plan.units for _ in unit.members]
    by_id = {at.sample_id: at for at in reader.located}
    for row in rows:
        at = by_id[row["sample_id"]]
        assert (row["unit"], row["length"], row["supervised"]) == (
            at.unit,
            at.length,
            at.supervised,
        )


# --- writing ------------------------------------------------------------------------------------


@pytest.fixture
def begun(tmp_path: Path, plan: Plan) -> Path:
    root = tmp_path / "begun"
    ledger.begin(root, plan.identity)
    return root


def members(plan: Plan) -> list[Sample]:
    return [plan.samples.samples[member] for member in plan.units[0].members]


def write_first_unit(root: Path, plan: Plan, *, value: float) -> UnitRecord:
    """The first unit with a number in place of states."""
    states = (
        (i, [torch.full((s.length, 32), value, dtype=torch.bfloat16)] * len(LAYERS))
        for i, s in enumerate(members(plan))
    )
    return store.write_unit(root, plan.units[0], members(plan), states, identity=plan.identity)


def attempts(root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path in root.glob("units/*/*")]


def test_of_two_writers_of_one_unit_the_second_discards_its_own(begun, plan):
    first = write_first_unit(begun, plan, value=1.0)
    second = write_first_unit(begun, plan, value=2.0)
    assert second == first
    assert attempts(begun) == [first.folder]
    unit = UnitReader(first.unit, begun / first.folder)
    rows = slice(0, first.lengths[0])
    states = torch.from_numpy(unit.read("hidden/3", rows)).view(torch.bfloat16)
    assert torch.equal(states, torch.ones_like(states))


def test_states_may_come_in_any_order(begun, plan):
    layers = {i: [torch.full((s.length, 32), i + 1.0, dtype=torch.bfloat16)] * 3
              for i, s in enumerate(members(plan))}  # fmt: skip
    backwards = [(i, layers[i]) for i in reversed(layers)]
    record = store.write_unit(
        begun, plan.units[0], members(plan), backwards, identity=plan.identity
    )
    unit = UnitReader(record.unit, begun / record.folder)
    for i, (start, length) in enumerate(zip(record.starts, record.lengths, strict=True)):
        stored = torch.from_numpy(unit.read("hidden/1", slice(start, start + length)))
        assert torch.equal(stored.view(torch.bfloat16), layers[i][0])


def test_a_unit_whose_states_fail_leaves_no_attempt(begun, plan):
    def failing():
        yield 0, [torch.ones(members(plan)[0].length, 32, dtype=torch.bfloat16)] * 3
        raise RuntimeError("the target stopped")

    with pytest.raises(RuntimeError, match="the target stopped"):
        store.write_unit(begun, plan.units[0], members(plan), failing(), identity=plan.identity)
    assert attempts(begun) == []
    assert ledger.committed_units(begun, fingerprint=plan.identity.fingerprint) == {}


def test_a_unit_whose_writing_fails_leaves_no_attempt(begun, plan, monkeypatch):
    real, written = store._write_array, []

    def fails_at_the_third(*args):
        written.append(args)
        if len(written) == 3:
            raise OSError("input/output error")
        return real(*args)

    monkeypatch.setattr(store, "_write_array", fails_at_the_third)
    with pytest.raises(OSError, match="input/output error"):
        write_first_unit(begun, plan, value=1.0)
    assert attempts(begun) == []


def test_chunks_of_zeros_are_stored_like_all_others(tmp_path, plan):
    """A chunk that is not there must mean damage, never zeros."""
    sizes = []
    for value in (0.0, 1.0):
        root = tmp_path / f"{value}"
        ledger.begin(root, plan.identity)
        sizes.append(write_first_unit(root, plan, value=value).files)
    assert sizes[0] == sizes[1]


def test_a_record_appears_only_when_all_that_it_names_is_durable(begun, plan, monkeypatch):
    """Every file of the attempt and every folder down to it is flushed before the link."""
    flushed: list[Path] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: flushed.append(Path(os.readlink(f"/proc/self/fd/{fd}")))
    )
    link, before = os.link, []
    monkeypatch.setattr(os, "link", lambda *names: (before.extend(flushed), link(*names)))

    record = write_first_unit(begun, plan, value=1.0)

    folder = begun / record.folder
    wanted = {folder / name for name in record.files}
    wanted |= {path for path in folder.rglob("*") if path.is_dir()}
    wanted |= {folder, folder.parent, begun / "units"}
    assert wanted <= set(before)
    assert begun / "commits" in flushed[len(before) :]


def test_attempts_that_no_record_names_do_not_exist(spoilt):
    wanted = read_all(spoilt)
    for folder in list(spoilt.glob("units/*/*")):
        orphan = shutil.copytree(folder, folder.with_name(f"{folder.name.split('.')[0]}.orphan"))
        for shard in orphan.rglob("c/*"):
            if shard.is_file():
                shard.write_bytes(b"rubbish")
    (spoilt / "commits" / ".u000000.json.1234.partial").write_text("{")
    assert read_all(spoilt) == wanted


# --- folders that are not a cache ---------------------------------------------------------------


def listing(root: Path) -> dict[str, bytes | None]:
    return {
        str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in root.rglob("*")
    }


def refused_untouched(folder: Path, identity: Identity, told: str) -> None:
    before = listing(folder)
    with pytest.raises(CacheError, match=told):
        ledger.is_sealed(folder, identity)
    assert listing(folder) == before


def test_a_folder_of_something_else_is_refused_and_untouched(tmp_path, plan):
    (tmp_path / "thesis.tex").write_text("ten years of work")
    refused_untouched(tmp_path, plan.identity, "not empty and not a cache; nothing was touched")


def test_a_zarr_group_of_somebody_else_is_refused_and_untouched(tmp_path, plan):
    zarr.create_group(tmp_path, zarr_format=3)
    refused_untouched(tmp_path, plan.identity, "zarr, but not a cache of ours")


def test_a_file_in_the_place_of_the_folder_is_refused_and_untouched(tmp_path, plan):
    (tmp_path / "file").write_text("a file")
    with pytest.raises(CacheError, match="a file stands where the cache folder should be"):
        ledger.is_sealed(tmp_path / "file", plan.identity)
    assert (tmp_path / "file").read_text() == "a file"


def test_a_place_where_no_folder_can_be_is_refused(tmp_path, plan):
    (tmp_path / "file").write_text("a file")
    with pytest.raises(CacheError, match=r"cannot be written \(Not a directory\); give --out"):
        ledger.begin(tmp_path / "file" / "cache", plan.identity)


def test_an_empty_folder_and_one_with_only_leftovers_are_new(tmp_path, plan):
    assert not ledger.is_sealed(tmp_path, plan.identity)
    (tmp_path / ".zarr.json.12345678.partial").write_text("{")
    assert not ledger.is_sealed(tmp_path, plan.identity)


def test_a_cache_of_another_format_says_which(spoilt, plan):
    path = spoilt / "zarr.json"
    content = json.loads(path.read_text())
    content["attributes"]["dflash_cache"]["identity"]["format_version"] = 99
    path.write_text(json.dumps(content))
    with pytest.raises(CacheError, match="cache format 99, this version reads 1"):
        CacheReader(spoilt)


def test_an_identity_that_was_edited_is_refused(spoilt):
    path = spoilt / "zarr.json"
    path.write_text(path.read_text().replace('"hidden_size": 32', '"hidden_size": 64'))
    with pytest.raises(CacheError, match="fingerprint does not fit its content"):
        CacheReader(spoilt)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"attributes": []}', "\ufffd"])
def test_a_damaged_root_is_refused(spoilt, text):
    (spoilt / "zarr.json").write_text(text)
    with pytest.raises(CacheError, match="zarr, but not a cache of ours"):
        CacheReader(spoilt)


@pytest.mark.parametrize("identity", [None, 3, [], {"samples": 2}])
def test_an_identity_of_another_shape_is_refused(spoilt, identity):
    attributes = {"dflash_cache": {"identity": identity, "fingerprint": ""}}
    (spoilt / "zarr.json").write_text(json.dumps({"attributes": attributes}))
    with pytest.raises(CacheError):
        CacheReader(spoilt)


def test_a_folder_that_is_not_there_is_no_cache(tmp_path):
    with pytest.raises(CacheError, match=r"not a cache folder \(no zarr\.json\)"):
        CacheReader(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("field", "value"), [("tokens", 7), ("target_layer_ids", [1, 2]), ("unit_tokens", 8)]
)
def test_another_identity_is_refused_by_the_name_of_the_field(begun, plan, field, value):
    with pytest.raises(CacheMismatchError, match=rf"begun with {field} = .*, this run has"):
        ledger.is_sealed(begun, replace(plan.identity, **{field: value}))


def test_a_field_deep_inside_is_named_with_its_path(begun, plan):
    other = replace(plan.identity, target={**plan.identity.target, "dtype": "bfloat16"})
    told = r"target\.dtype = float32, this run has bfloat16"
    with pytest.raises(CacheMismatchError, match=told):
        ledger.is_sealed(begun, other)


# --- damage -------------------------------------------------------------------------------------


def test_a_half_built_cache_is_refused_with_its_count(spoilt):
    (spoilt / "manifest.json").unlink()
    record = ledger.read_record(spoilt / "commits" / "u000001.json")
    (spoilt / "commits" / "u000001.json").unlink()
    told = rf"not complete \({6 - len(record.sample_ids)} of 6 samples\); run the same"
    with pytest.raises(CacheError, match=told):
        CacheReader(spoilt)


ARRAYS = ("hidden/0/c/0/0", "input_ids/c/0", "loss_mask/c/0")


def first_file(root: Path, name: str) -> Path:
    return root / ledger.read_record(root / "commits" / "u000000.json").folder / name


@pytest.mark.parametrize("name", [*ARRAYS, "hidden/0/zarr.json"])
def test_a_deleted_file_is_an_error_that_names_it(spoilt, name):
    first_file(spoilt, name).unlink()
    with pytest.raises(CacheError, match=f"{name}: missing, .* unit u000000 is damaged"):
        read_all(spoilt)


@pytest.mark.parametrize("change", [-1, -40, 1])
@pytest.mark.parametrize("name", ARRAYS)
def test_a_file_of_another_size_is_an_error_that_names_it(spoilt, name, change):
    path = first_file(spoilt, name)
    path.write_bytes((path.read_bytes() + b"\0")[: path.stat().st_size + change])
    with pytest.raises(CacheError, match=rf"{name}: \d+ bytes, the commit record says \d+; unit"):
        read_all(spoilt)


@pytest.mark.parametrize("name", ARRAYS)
def test_a_flipped_bit_in_a_shard_is_an_error_wherever_it_is(spoilt, name):
    path = first_file(spoilt, name)
    whole = path.read_bytes()
    places = np.random.default_rng(0).choice(len(whole), min(len(whole), 60), replace=False)
    # The first and last bytes too: the shard's index is at one of its ends.
    for place in [0, 1, *places.tolist(), len(whole) - 5, len(whole) - 1]:
        spoil(path, whole, place)
        with pytest.raises(CacheError, match="u000000 is damaged"):
            read_all(spoilt)


def spoil(path: Path, whole: bytes, place: int) -> None:
    flipped = bytearray(whole)
    flipped[place] ^= 1 << place % 8
    path.write_bytes(flipped)


@pytest.mark.parametrize("name", ["hidden/0/zarr.json", "input_ids/zarr.json", "zarr.json"])
def test_a_flipped_bit_in_metadata_is_an_error_or_harmless_and_never_other_data(spoilt, name):
    wanted = read_all(spoilt)
    path = first_file(spoilt, name)
    whole = path.read_bytes()
    refused = 0
    for place in range(0, len(whole), 3):
        spoil(path, whole, place)
        try:
            found = read_all(spoilt)
        except CacheError:
            refused += 1
        else:
            assert found == wanted
    assert refused or name == "zarr.json"


def test_states_of_another_shape_than_recorded_are_an_error(spoilt):
    path = first_file(spoilt, "hidden/0/zarr.json")
    whole = path.read_text()
    path.write_text(whole.replace("32", "31", 1))
    with pytest.raises(CacheError, match="want uint16"):
        read_all(spoilt)


def test_a_flipped_bit_in_a_record_is_an_error_wherever_it_is(spoilt):
    wanted = CacheReader(spoilt).located
    path = spoilt / "commits" / "u000000.json"
    whole = path.read_bytes()
    refused = 0
    for place in range(len(whole)):
        spoil(path, whole, place)
        try:
            found = CacheReader(spoilt).located
        except CacheError:
            refused += 1
        else:
            assert found == wanted  # the space between two fields
    assert refused > 0.9 * len(whole)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "not json"])
def test_a_record_that_is_none_is_an_error(spoilt, text):
    (spoilt / "commits" / "u000000.json").write_text(text)
    with pytest.raises(CacheError, match=r"u000000\.json: not a commit record"):
        CacheReader(spoilt)


def test_a_missing_record_of_a_sealed_cache_is_an_error(spoilt):
    (spoilt / "commits" / "u000001.json").unlink()
    with pytest.raises(CacheError, match="commit records are missing or doubled"):
        CacheReader(spoilt)


def test_a_record_under_another_units_name_is_an_error(spoilt):
    shutil.copy(spoilt / "commits" / "u000000.json", spoilt / "commits" / "u000007.json")
    with pytest.raises(CacheError, match="belongs to another cache or unit"):
        CacheReader(spoilt)


def test_a_record_of_another_cache_is_an_error(spoilt, tiny_cache):
    shutil.copy(tiny_cache / "commits" / "u000000.json", spoilt / "commits" / "u000000.json")
    with pytest.raises(CacheError, match="belongs to another cache or unit"):
        CacheReader(spoilt)


def test_the_seal_of_another_cache_is_an_error(spoilt, tiny_cache):
    shutil.copy(tiny_cache / "manifest.json", spoilt / "manifest.json")
    with pytest.raises(CacheError, match="seals another cache"):
        CacheReader(spoilt)


def test_a_seal_whose_identity_was_edited_is_an_error(spoilt):
    path = spoilt / "manifest.json"
    path.write_text(path.read_text().replace('"hidden_size": 32', '"hidden_size": 64', 1))
    with pytest.raises(CacheError, match="seals another cache"):
        CacheReader(spoilt)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "{"])
def test_a_seal_that_is_none_is_an_error(spoilt, text):
    (spoilt / "manifest.json").write_text(text)
    with pytest.raises(CacheError, match=r"manifest\.json: not a manifest|not a Manifest"):
        CacheReader(spoilt)


@pytest.mark.parametrize("size", [None, 0, 5, 1000])
def test_missing_or_truncated_frozen_weights_are_an_error(spoilt, size):
    path = spoilt / "frozen.safetensors"
    whole = path.read_bytes()
    path.unlink()
    if size is not None:
        path.write_bytes(whole[:size])
    with pytest.raises(CacheError, match=r"frozen\.safetensors: missing or damaged"):
        CacheReader(spoilt).frozen()


def test_a_record_says_which_fields_are_missing_and_which_nobody_knows():
    with pytest.raises(
        CacheError, match=r"here: not a Manifest .*missing \['agreement'.*\['odd'\]"
    ):
        Manifest.from_dict({"odd": 1}, where="here")


def test_a_record_comes_back_from_its_bytes(reader):
    record = reader.records["u000000"]
    assert UnitRecord.from_bytes(record.to_bytes(), where="here") == record
