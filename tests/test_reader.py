"""A reader gives what is asked for and reads no more: by sample, token range and target layer."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import chat_rows, save_tiny_target, tiny_build, write_jsonl

from dflash_cache import reader as reader_module
from dflash_cache import unit_reader
from dflash_cache.buffers import buffers
from dflash_cache.build import build_cache
from dflash_cache.encodings import ENCODINGS
from dflash_cache.errors import CacheError
from dflash_cache.layout import CHUNK_TOKENS, RawPlane, chunks_of
from dflash_cache.reader import CacheReader
from dflash_cache.schema import FINAL_HIDDEN

LAYERS = [0, 2]
PLANES = [*LAYERS, FINAL_HIDDEN]
RANGES = [
    slice(None),
    slice(0, 1),
    slice(63, 65),
    slice(64, 128),
    slice(70, None),
    slice(-5, None),
    slice(20, 20),
    slice(100, 90),
    slice(3, 10_000),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target") / "small", layers=4)


@pytest.fixture(scope="module", params=list(ENCODINGS))
def root(request, tmp_path_factory, target) -> Path:
    """Two units of samples of several chunks each."""
    folder = tmp_path_factory.mktemp("cache")
    data = write_jsonl(folder / "rows.jsonl", chat_rows(8))
    changes = {"target_layers": tuple(LAYERS), "bucket_edges": (300,), "unit_tokens": 500}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        build_cache(
            tiny_build(
                target, data, folder / "out", encoding=request.param, final_hidden=True, **changes
            )
        )
    return folder / "out"


@pytest.fixture(scope="module", params=[False, True], ids=["cached", "direct"])
def reader(request, root) -> CacheReader:
    return CacheReader(root, direct=request.param)


def longest(reader: CacheReader) -> int:
    return max(range(len(reader.located)), key=lambda i: reader.lengths[i])


def bits(states: torch.Tensor) -> np.ndarray:
    return states.contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize("rows", RANGES, ids=str)
def test_a_token_range_is_that_slice_of_the_whole(reader, rows):
    index = longest(reader)
    assert reader.lengths[index] > 2 * CHUNK_TOKENS
    whole = reader.hidden(index, PLANES)
    found = reader.hidden(index, PLANES, rows)
    assert found.dtype == torch.bfloat16
    assert found.shape == whole[:, rows].shape
    assert np.array_equal(bits(found), bits(whole[:, rows]))


def test_a_token_range_reads_the_chunks_that_hold_it_and_no_others(root):
    reader = CacheReader(root)
    encoding = ENCODINGS[reader.identity.encoding]
    index = longest(reader)
    read = []
    for rows in (slice(70, 71), slice(64, 128), slice(63, 65), slice(None)):
        before = reader.bytes_read
        reader.hidden(index, [0], rows)
        read.append(reader.bytes_read - before)
    assert read[1] < read[2] < read[3]
    if not any(part.compressed or not part.per_channel for part in encoding.parts):
        stride = RawPlane(row_bytes=32 * encoding.parts[0].dtype.itemsize).stride
        assert read == [stride * n for n in (1, 1, 2, chunks_of(reader.lengths[index]))]


@pytest.mark.parametrize("first", [0, 64, 7], ids=lambda first: f"from row {first}")
def test_documents_are_read_to_their_rows_and_the_rest_is_left_alone(reader, first):
    """Rows 0 and 64 begin on pages in some encodings, row 7 in none."""
    documents = [3, 0, 5]
    starts, end = [], first
    for document in documents:
        starts.append(end)
        end += reader.lengths[document] + 5
    layer_ids = [FINAL_HIDDEN, 2]
    into = buffers(reader.identity, len(layer_ids), end)
    for part in into.values():
        part.view(torch.uint8).fill_(0xA5)

    reader.read_documents(documents, starts, layer_ids, into)

    own = torch.zeros(end, dtype=torch.bool)
    for document, start in zip(documents, starts, strict=True):
        rows = slice(start, start + reader.lengths[document])
        own[rows] = True
        lone = buffers(reader.identity, len(layer_ids), reader.lengths[document])
        reader.read_documents([document], [0], layer_ids, lone)
        for name, part in into.items():
            assert np.array_equal(bits(part[:, rows]), bits(lone[name]))
    for part in into.values():
        assert (bits(part[:, ~own]) == 0xA5).all()


def test_planes_come_in_the_order_asked_for(reader):
    whole = reader.hidden(0, PLANES)
    assert np.array_equal(bits(reader.hidden(0, [FINAL_HIDDEN, 0])), bits(whole[[2, 0]]))


def test_long_samples_are_read_in_pieces(root, monkeypatch):
    """As if a sample were longer than what is read at once."""
    index = longest(CacheReader(root))
    for direct in (False, True):
        wanted = CacheReader(root, direct=direct).hidden(index, PLANES)
        with monkeypatch.context() as patch:
            patch.setattr(unit_reader, "CACHED_BYTES", 1)
            patch.setattr(unit_reader, "DIRECT_BYTES", 1)
            found = CacheReader(root, direct=direct).hidden(index, PLANES)
        assert np.array_equal(bits(found), bits(wanted))


@pytest.mark.parametrize("plane", [1, "hidden/9", "input_ids"])
def test_a_plane_that_the_cache_does_not_hold_is_refused_with_those_it_holds(root, plane):
    told = r"does not hold \S+; it holds hidden/0, hidden/2, final_hidden"
    with pytest.raises(CacheError, match=f"^{re.escape(str(root))}: {told}$"):
        CacheReader(root).hidden(0, [plane])


def test_what_is_given_out_is_the_callers_own(root):
    reader = CacheReader(root)
    wanted = [part.tolist() for part in reader.tokens(0)]
    for part in reader.tokens(0):
        part[...] = 0
    assert [part.tolist() for part in reader.tokens(0)] == wanted


@pytest.mark.parametrize(
    ("limit", "size", "outgrows"),
    [("1000\n", 501, True), ("1000\n", 500, False), ("max\n", 501, False), (None, 501, False)],
)
def test_a_container_with_less_memory_than_its_machine_counts_its_own(
    tmp_path, monkeypatch, limit, size, outgrows
):
    monkeypatch.setattr(reader_module, "CGROUP_LIMIT", tmp_path / "memory.max")
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    assert reader_module.outgrows_memory(size) is outgrows
    assert reader_module.outgrows_memory(2**60)
