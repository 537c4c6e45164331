"""The cache does not matter: what the target gave comes back, bit for bit, or not at all."""

import json
import os
import re
import shutil
from collections.abc import Iterable
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
from dflash_cache.checksums import digest
from dflash_cache.describe import describe_cache
from dflash_cache.encodings import HIDDEN
from dflash_cache.errors import CacheError, CacheMismatchError
from dflash_cache.layout import CHECKSUM_BYTES, CHUNK_TOKENS, decode_index, index_bytes
from dflash_cache.plan import Plan, make_plan
from dflash_cache.reader import CacheReader
from dflash_cache.samples import Sample
from dflash_cache.schema import FORMAT_VERSION, Identity, Manifest, UnitRecord, canonical_json
from dflash_cache.shard import ShardWriter
from dflash_cache.survey import survey_target, with_weights_hash
from dflash_cache.unit_reader import stored_states
from dflash_cache.verify import verify_cache
from dflash_cache.weights import load_target

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


def read_all(root: Path, *, direct: bool | None = None) -> list:
    """Every sample of a cache, in plain numbers."""
    reader = CacheReader(root, direct=direct)
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


def test_the_final_hidden_state_is_what_the_head_reads(tmp_path, tiny_target, tiny_data, plain):
    """Projects disagree on which side of the final norm it stands; a head on it must give the
    target's own logits."""
    out = tmp_path / "out"
    build_cache(tiny_build(tiny_target, tiny_data, out, max_samples=6, final_hidden=True))
    reader = CacheReader(out)
    assert reader.identity.final_hidden == "after the final norm"
    _, head = reader.frozen()
    for index in range(len(reader.located)):
        ids = torch.from_numpy(reader.tokens(index)[0]).long()[None]
        with torch.no_grad():
            wanted = plain(ids)
            states = plain.model(ids).last_hidden_state[0]
        found = reader.hidden(index, ["final_hidden"])[0].float()
        torch.testing.assert_close(found, states, rtol=2**-8, atol=1e-4)
        # Two roundings to 8 bits, of states and head, add up over the channels.
        torch.testing.assert_close(found @ head.float().T, wanted.logits[0], rtol=0.02, atol=0.02)


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
    assert set(manifest.files) == {
        *("zarr.json", "plan.parquet", "frozen.safetensors", "probe.safetensors")
    }
    beside = sum((reader.root / name).stat().st_size for name in manifest.files)
    assert manifest.bytes == in_units + beside


def test_reads_past_the_page_cache_and_through_it_give_the_same(tiny_cache):
    assert read_all(tiny_cache, direct=True) == read_all(tiny_cache, direct=False)


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
    planes = [f"hidden/{layer}" for layer in LAYERS]
    assert set(arrays) == {"input_ids", "loss_mask", *planes, *(f"checksums/{p}" for p in planes)}
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

    def codecs(name: str) -> list[dict]:
        described = json.loads((reader.root / record.folder / name / "zarr.json").read_text())
        return described["codecs"]

    def names(found: list[dict]) -> list[str]:
        return [codec["name"] for codec in found]

    (sharding,) = codecs(f"hidden/{LAYERS[0]}")
    assert sharding["name"] == "sharding_indexed"
    inner = sharding["configuration"]
    assert inner["chunk_shape"] == [CHUNK_TOKENS, 32]
    assert names(inner["codecs"]) == ["bytes", "crc32c"]
    assert names(inner["index_codecs"]) == ["bytes", "crc32c"]
    for name in ("input_ids", "loss_mask", f"checksums/hidden/{LAYERS[0]}"):
        assert names(codecs(name)) == ["bytes", "crc32c"]


def test_the_checksums_of_a_plane_are_those_that_stand_behind_its_chunks(reader):
    for record in reader.records.values():
        folder = reader.root / record.folder
        for layer_id in LAYERS:
            shard = (folder / f"hidden/{layer_id}" / "c/0/0").read_bytes()
            entries = decode_index(shard[-index_bytes(record.tokens_stored // CHUNK_TOKENS) :])
            behind = [shard[at + size - CHECKSUM_BYTES : at + size] for at, size in entries]
            found = zarr.open_array(folder / f"checksums/hidden/{layer_id}", mode="r")[...]
            assert found.tolist() == [int.from_bytes(check, "little") for check in behind]


def test_what_is_behind_a_samples_end_is_zero(reader):
    record = reader.records["u000001"]
    group = zarr.open_group(reader.root / record.folder, mode="r")
    own = np.zeros(record.tokens_stored, dtype=bool)
    for start, length in zip(record.starts, record.lengths, strict=True):
        own[start : start + length] = True
    for name in ("input_ids", "loss_mask", f"hidden/{LAYERS[0]}"):
        assert not group[name][...][~own].any()
        assert group[name][...][own].any()


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
    ledger.begin(root, plan.identity, {})
    return root


def members(plan: Plan) -> list[Sample]:
    return [plan.samples.samples[member] for member in plan.units[0].members]


def encoded(sample: Sample, value: float) -> store.EncodedSample:
    """A number in place of states."""
    states = torch.full((sample.length, 32), value, dtype=torch.bfloat16)
    return store.EncodedSample(parts=[{HIDDEN: states}] * len(LAYERS), errors=[])


def write_states(root: Path, plan: Plan, states: Iterable[store.EncodedSample]) -> UnitRecord:
    return store.write_unit(root, plan.units[0], members(plan), states, identity=plan.identity)


def write_first_unit(root: Path, plan: Plan, *, value: float) -> UnitRecord:
    """The first unit with one number everywhere."""
    return write_states(root, plan, (encoded(sample, value) for sample in members(plan)))


def is_unwritten(root: Path, plan: Plan) -> bool:
    """Nothing is committed, and no attempt is left."""
    committed = ledger.committed_units(root, fingerprint=plan.identity.fingerprint)
    return attempts(root) == [] and committed == {}


def attempts(root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path in root.glob("units/*/*")]


def test_of_two_writers_of_one_unit_the_second_discards_its_own(begun, plan):
    first = write_first_unit(begun, plan, value=1.0)
    second = write_first_unit(begun, plan, value=2.0)
    assert second == first
    assert attempts(begun) == [first.folder]
    for position in range(len(first.lengths)):
        states = stored_states(begun, first, plan.identity, position)
        assert torch.equal(states, torch.ones_like(states))


def test_each_sample_gets_its_own_states(begun, plan):
    states = (encoded(sample, i + 1.0) for i, sample in enumerate(members(plan)))
    record = write_states(begun, plan, states)
    assert len(record.lengths) > 2
    for i, length in enumerate(record.lengths):
        stored = stored_states(begun, record, plan.identity, i)
        assert stored.shape == (len(LAYERS), length, 32)
        assert (stored == i + 1.0).all()


@pytest.mark.parametrize("change", [-1, 1], ids=["too few", "too many"])
def test_states_of_too_few_or_too_many_samples_are_refused(begun, plan, change):
    states = [encoded(sample, 1.0) for sample in [*members(plan), members(plan)[-1]]]
    count = len(members(plan)) + change
    with pytest.raises(ValueError, match="is shorter than" if change < 0 else "is longer than"):
        write_states(begun, plan, states[:count])
    assert is_unwritten(begun, plan)


def test_states_of_another_length_than_their_sample_are_refused(begun, plan):
    states = [encoded(sample, 1.0) for sample in reversed(members(plan))]
    assert states[0].parts[0][HIDDEN].shape[0] != members(plan)[0].length
    with pytest.raises(AssertionError):
        write_states(begun, plan, states)
    assert is_unwritten(begun, plan)


def test_a_unit_whose_states_fail_leaves_no_attempt(begun, plan):
    def failing():
        yield encoded(members(plan)[0], 1.0)
        raise RuntimeError("the target stopped")

    with pytest.raises(RuntimeError, match="the target stopped"):
        write_states(begun, plan, failing())
    assert is_unwritten(begun, plan)


@pytest.mark.parametrize("step", ["write", "close"])
def test_a_unit_whose_writing_fails_leaves_no_attempt(begun, plan, monkeypatch, step):
    real, written = getattr(ShardWriter, step), []

    def fails_at_the_second(*args):
        written.append(args)
        if len(written) == 2:
            raise OSError("input/output error")
        return real(*args)

    monkeypatch.setattr(ShardWriter, step, fails_at_the_second)
    with pytest.raises(OSError, match="input/output error"):
        write_first_unit(begun, plan, value=1.0)
    assert is_unwritten(begun, plan)


def test_a_unit_that_failed_leaves_no_file_open(begun, plan, monkeypatch):
    monkeypatch.setattr(ShardWriter, "write", lambda *_: 1 / 0)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ZeroDivisionError):
        write_first_unit(begun, plan, value=1.0)
    assert os.listdir("/proc/self/fd") == before


def test_chunks_of_zeros_are_stored_like_all_others(tmp_path, plan):
    """A chunk that is not there must mean damage, never zeros."""
    sizes = []
    for value in (0.0, 1.0):
        root = tmp_path / f"{value}"
        ledger.begin(root, plan.identity, {})
        record = write_first_unit(root, plan, value=value)
        sizes.append({name: size for name, (size, _) in record.files.items()})
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
        for path in orphan.rglob("*"):
            if path.is_file():
                path.write_bytes(b"rubbish")
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
        ledger.begin(tmp_path / "file" / "cache", plan.identity, {})


def test_an_empty_folder_and_one_with_only_leftovers_are_new(tmp_path, plan):
    assert not ledger.is_sealed(tmp_path, plan.identity)
    (tmp_path / ".zarr.json.12345678.partial").write_text("{")
    assert not ledger.is_sealed(tmp_path, plan.identity)


def test_a_cache_of_another_format_says_which(spoilt, plan):
    path = spoilt / "zarr.json"
    content = json.loads(path.read_text())
    about = content["attributes"]["dflash_cache"]
    about["identity"]["format_version"] = 99
    del about["xxh3"]
    about["xxh3"] = digest(canonical_json(about))
    path.write_text(json.dumps(content))
    with pytest.raises(CacheError, match=f"cache format 99, this version reads {FORMAT_VERSION}"):
        CacheReader(spoilt)


def test_the_first_format_is_named_although_it_looked_otherwise(spoilt):
    path = spoilt / "zarr.json"
    content = json.loads(path.read_text())
    about = content["attributes"]["dflash_cache"]
    about["identity"]["format_version"] = 1
    del about["xxh3"], about["options"]
    path.write_text(json.dumps(content))
    for opened in (CacheReader, verify_cache, describe_cache):
        with pytest.raises(
            CacheMismatchError, match="cache format 1, this version reads 2; rebuild"
        ):
            opened(spoilt)


def test_a_flipped_format_version_is_damage_and_not_another_format(spoilt):
    path = spoilt / "zarr.json"
    path.write_text(path.read_text().replace('"format_version": 2', '"format_version": 3'))
    with pytest.raises(CacheError, match="does not fit its content; the file is damaged"):
        CacheReader(spoilt)
    assert not verify_cache(spoilt)["ok"]


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


ARRAYS = ("hidden/0/c/0/0", "checksums/hidden/0/c/0", "input_ids/c/0", "loss_mask/c/0")
METADATA = ("zarr.json", "hidden/0/zarr.json", "input_ids/zarr.json")


def first_file(root: Path, name: str) -> Path:
    return root / ledger.read_record(root / "commits" / "u000000.json").folder / name


def advice(root: Path) -> str:
    """What every damage is told with."""
    return f"the cache is damaged. `dflash cache repair {root}` extracts again what is lost"


def reported(root: Path) -> list[dict]:
    """What `dflash cache verify` finds; it must find something."""
    found = verify_cache(root)
    assert found["ok"] is False
    assert found["errors"]
    return found["errors"]


def is_reported(root: Path, name: str) -> None:
    """`dflash cache verify` names this file of the first unit and nothing else."""
    (error,) = reported(root)
    assert error["unit"] == "u000000"
    assert f"{name}: " in error["problem"]


def test_a_whole_cache_is_reported_as_whole(small_cache):
    found = verify_cache(small_cache)
    assert (found["ok"], found["errors"]) == (True, [])
    assert found["units_checked"] == 2
    # Everything but the seal and the records, which carry checksums over themselves.
    assert found["bytes_checked"] == CacheReader(small_cache).manifest.bytes


@pytest.mark.parametrize("name", [*ARRAYS, *METADATA])
def test_a_deleted_file_is_an_error_that_names_it(spoilt, name):
    first_file(spoilt, name).unlink()
    told = rf"{name}: missing, the commit record says \d+; unit u000000; {advice(spoilt)}"
    with pytest.raises(CacheError, match=told):
        read_all(spoilt)
    is_reported(spoilt, name)


@pytest.mark.parametrize("change", [-1, -40, 1])
@pytest.mark.parametrize("name", [*ARRAYS, *METADATA])
def test_a_file_of_another_size_is_an_error_that_names_it(spoilt, name, change):
    path = first_file(spoilt, name)
    path.write_bytes((path.read_bytes() + b"\0")[: max(0, path.stat().st_size + change)])
    told = rf"{name}: \d+ bytes, the commit record says \d+; unit u000000; {advice(spoilt)}"
    with pytest.raises(CacheError, match=told):
        read_all(spoilt)
    is_reported(spoilt, name)


def spoil(path: Path, whole: bytes, place: int) -> None:
    flipped = bytearray(whole)
    flipped[place] ^= 1 << place % 8
    path.write_bytes(flipped)


def some_places(whole: bytes, count: int) -> list[int]:
    """Places all over a file, its ends among them."""
    chosen = np.random.default_rng(0).choice(len(whole), min(len(whole), count), replace=False)
    return sorted({0, 1, *chosen.tolist(), len(whole) - 5, len(whole) - 1})


def holds_data(name: str, whole: bytes, place: int) -> bool:
    """Whether a byte of a file is data: all of it but, in a shard, what is between its chunks."""
    if not name.endswith("c/0/0"):
        return True
    # Behind the chunks stand 16 bytes for each, and a checksum.
    begins, count = [], 0
    while not begins:
        count += 1
        begins = decode_index(whole[-index_bytes(count) :]) or []
    return any(begin <= place < begin + size - CHECKSUM_BYTES for begin, size in begins)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("name", ARRAYS)
def test_a_flipped_bit_in_data_is_an_error_wherever_it_is(spoilt, name, direct):
    wanted = read_all(spoilt)
    path = first_file(spoilt, name)
    whole = path.read_bytes()
    for place in some_places(whole, 60):
        spoil(path, whole, place)
        is_reported(spoilt, name)
        if holds_data(name, whole, place):
            with pytest.raises(CacheError, match=f"u000000.*; {advice(spoilt)}"):
                read_all(spoilt, direct=direct)
        else:
            assert read_all(spoilt, direct=direct) == wanted


@pytest.mark.parametrize("name", METADATA)
def test_a_flipped_bit_in_metadata_is_reported_and_never_other_data(spoilt, name):
    wanted = read_all(spoilt)
    path = first_file(spoilt, name)
    whole = path.read_bytes()
    for place in some_places(whole, 40):
        spoil(path, whole, place)
        is_reported(spoilt, name)
        assert read_all(spoilt) == wanted


@pytest.mark.parametrize("name", ["zarr.json", "manifest.json", "commits/u000000.json"])
def test_a_flipped_bit_in_what_describes_the_cache_is_an_error_wherever_it_is(spoilt, name):
    path = spoilt / name
    whole = path.read_bytes()
    for place in range(len(whole)):
        spoil(path, whole, place)
        with pytest.raises(CacheError, match=re.escape(str(path))):
            CacheReader(spoilt)
    for place in some_places(whole, 10):
        spoil(path, whole, place)
        assert any(str(path) in error["problem"] for error in reported(spoilt))


@pytest.mark.parametrize("name", ["plan.parquet", "frozen.safetensors"])
def test_a_flipped_bit_beside_the_units_is_reported_wherever_it_is(spoilt, name):
    path = spoilt / name
    whole = path.read_bytes()
    for place in some_places(whole, 40):
        spoil(path, whole, place)
        (error,) = reported(spoilt)
        assert error["problem"].startswith(f"{name}: ")


def test_blanks_in_a_record_are_damage_too(spoilt):
    path = spoilt / "commits" / "u000000.json"
    path.write_bytes(path.read_bytes().replace(b", ", b",  ", 1))
    with pytest.raises(CacheError, match="its checksum does not fit its content"):
        CacheReader(spoilt)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "not json"])
def test_a_record_that_is_none_is_an_error(spoilt, text):
    (spoilt / "commits" / "u000000.json").write_text(text)
    with pytest.raises(CacheError, match=r"u000000\.json: not a commit record"):
        CacheReader(spoilt)


def test_a_missing_record_of_a_sealed_cache_is_an_error(spoilt):
    (spoilt / "commits" / "u000001.json").unlink()
    told = rf"u000001\.json: the commit record is missing\. `dflash cache repair {spoilt}`"
    with pytest.raises(CacheError, match=told):
        CacheReader(spoilt)
    (error,) = reported(spoilt)
    assert error["unit"] == "u000001"


def test_a_record_under_another_units_name_is_an_error(spoilt):
    shutil.copy(spoilt / "commits" / "u000000.json", spoilt / "commits" / "u000001.json")
    with pytest.raises(CacheError, match="belongs to another cache or unit"):
        CacheReader(spoilt)
    assert {error["unit"] for error in reported(spoilt)} == {"u000001"}


def test_a_record_beyond_the_last_unit_is_ignored_and_reported(spoilt):
    wanted = read_all(spoilt)
    shutil.copy(spoilt / "commits" / "u000000.json", spoilt / "commits" / "u000007.json")
    assert read_all(spoilt) == wanted
    (error,) = reported(spoilt)
    assert error == {"unit": None, "problem": "commits/u000007.json: no such unit"}


def test_a_sample_in_two_units_is_an_error(spoilt):
    one, two = (
        ledger.read_record(spoilt / "commits" / f"u00000{number}.json") for number in (0, 1)
    )
    ids = [one.sample_ids[0], *two.sample_ids[1:]]
    (spoilt / "commits" / "u000001.json").write_bytes(replace(two, sample_ids=ids).to_bytes())
    with pytest.raises(CacheError, match="commit records are missing or doubled"):
        CacheReader(spoilt)
    (error,) = reported(spoilt)
    assert error["problem"] == f"samples [{ids[0]}] are in more than one unit"


def test_a_record_of_another_cache_is_an_error(spoilt, tiny_cache):
    shutil.copy(tiny_cache / "commits" / "u000000.json", spoilt / "commits" / "u000000.json")
    with pytest.raises(CacheError, match="belongs to another cache or unit"):
        CacheReader(spoilt)


def test_the_seal_of_another_cache_is_an_error(spoilt, tiny_cache):
    shutil.copy(tiny_cache / "manifest.json", spoilt / "manifest.json")
    with pytest.raises(CacheError, match="seals another cache"):
        CacheReader(spoilt)


def test_a_seal_of_another_identity_is_an_error(spoilt):
    manifest = ledger.read_manifest(spoilt)
    identity = {**manifest.identity, "hidden_size": 64}
    (spoilt / "manifest.json").write_bytes(replace(manifest, identity=identity).to_bytes())
    with pytest.raises(CacheError, match="seals another cache"):
        CacheReader(spoilt)
    reported(spoilt)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "{"])
def test_a_seal_that_is_none_is_an_error(spoilt, text):
    (spoilt / "manifest.json").write_text(text)
    with pytest.raises(CacheError, match=r"manifest\.json: not a manifest"):
        CacheReader(spoilt)


@pytest.mark.parametrize("size", [None, 0, 5, 1000])
def test_missing_or_truncated_frozen_weights_are_an_error(spoilt, size):
    path = spoilt / "frozen.safetensors"
    whole = path.read_bytes()
    path.unlink()
    if size is not None:
        path.write_bytes(whole[:size])
    with pytest.raises(CacheError, match=rf"frozen\.safetensors: missing, or .*; {advice(spoilt)}"):
        CacheReader(spoilt).frozen()


def test_a_record_says_which_fields_are_missing_and_which_nobody_knows():
    with pytest.raises(
        CacheError, match=r"here: not a Manifest .*missing \['agreement'.*\['odd'\]"
    ):
        Manifest.from_dict({"odd": 1}, where="here")


def test_a_record_comes_back_from_its_bytes(reader):
    record = reader.records["u000000"]
    assert UnitRecord.from_bytes(record.to_bytes(), where="here") == record
