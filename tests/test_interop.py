"""Anybody can read the cache: three zarr libraries find what our reader hands out, bit for bit.

zarr-python, tensorstore and zarrs read the files alone; our reader knows where samples lie.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import torch
import zarr
from conftest import chat_rows, save_tiny_target, tiny_build, write_jsonl

from dflash_cache.buffers import buffers
from dflash_cache.build import build_cache
from dflash_cache.encodings import ENCODINGS, Part
from dflash_cache.layout import (
    ALIGNMENT,
    CHECKSUM_BYTES,
    CHUNK_TOKENS,
    RawPlane,
    decode_index,
    index_bytes,
)
from dflash_cache.reader import CacheReader
from dflash_cache.schema import FINAL_HIDDEN, UnitRecord, part_of

LAYERS = (0, 2)
HIDDEN_SIZE = 32
UNIT = "u000000"


def by_zarr_python(path: Path) -> zarr.Array:
    return zarr.open_array(path, mode="r")


def by_tensorstore(path: Path) -> tensorstore.TensorStore:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    return tensorstore.open(spec, read=True).result()


def by_zarrs(path: Path) -> zarr.Array:
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        found = zarr.open_array(path, mode="r")
    # Otherwise zarr-python would be tested against itself.
    assert type(found.async_array.codec_pipeline).__name__ == "ZarrsCodecPipeline"
    return found


LIBRARIES = {"zarr-python": by_zarr_python, "tensorstore": by_tensorstore, "zarrs": by_zarrs}


@dataclass(frozen=True, kw_only=True)
class Cache:
    """A cache in one encoding, opened by us."""

    reader: CacheReader
    record: UnitRecord

    @property
    def folder(self) -> Path:
        return self.reader.root / self.record.folder

    @property
    def parts(self) -> tuple[Part, ...]:
        return ENCODINGS[self.reader.identity.encoding].parts

    def documents(self) -> list[int]:
        """The unit's samples by the reader's number, in the order in which they lie."""
        own = [i for i, located in enumerate(self.reader.located) if located.unit == UNIT]
        return sorted(own, key=lambda i: self.reader.located[i].start)

    def ours(self) -> dict[str, torch.Tensor]:
        """The unit as the reader's raw buffers hold it, every sample where it lies on disk."""
        planes = [*LAYERS, FINAL_HIDDEN]
        into = buffers(self.reader.identity, len(planes), self.record.tokens_stored)
        self.reader.read_documents(self.documents(), self.record.starts, planes, into)
        return into


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target") / "small", layers=4)


@pytest.fixture(scope="module", params=list(ENCODINGS))
def cache(request, tmp_path_factory, target) -> Cache:
    """Samples of several chunks in one unit, two target layers and the state after the norm."""
    folder = tmp_path_factory.mktemp("cache")
    data = write_jsonl(folder / "rows.jsonl", chat_rows(6))
    changes = {"target_layers": LAYERS, "bucket_edges": (300,), "unit_tokens": 2000}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        build_cache(
            tiny_build(
                target, data, folder / "out", encoding=request.param, final_hidden=True, **changes
            )
        )
    reader = CacheReader(folder / "out")
    return Cache(reader=reader, record=reader.records[UNIT])


def bits(values: np.ndarray | torch.Tensor) -> np.ndarray:
    """Numbers as whole numbers of their size, so that NaN equals itself and -0 is not 0."""
    if isinstance(values, torch.Tensor):
        size = values.dtype.itemsize
        values = values.view({1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[size]).numpy()
    return values.view(f"u{values.dtype.itemsize}")


@pytest.mark.parametrize("opened", LIBRARIES.values(), ids=LIBRARIES)
def test_other_libraries_read_the_bits_that_our_reader_hands_out(
    cache: Cache, opened: Callable[[Path], zarr.Array | tensorstore.TensorStore]
):
    ours, rows = cache.ours(), cache.record.tokens_stored
    some = slice(CHUNK_TOKENS - 3, 2 * CHUNK_TOKENS + 5)  # begins and ends within a chunk
    assert rows > some.stop
    for part in cache.parts:
        for k, plane in enumerate(cache.reader.identity.planes):
            found, wanted = opened(cache.folder / part_of(plane, part.name)), bits(ours[part.name])
            assert found.shape == ((rows, HIDDEN_SIZE) if part.per_channel else (rows,))
            assert np.array_equal(bits(np.asarray(found[...])), wanted[k])
            assert np.array_equal(bits(np.asarray(found[some])), wanted[k, some])
            assert wanted[k, some].any()


@pytest.mark.parametrize("opened", LIBRARIES.values(), ids=LIBRARIES)
def test_other_libraries_read_the_tokens_that_our_reader_hands_out(
    cache: Cache, opened: Callable[[Path], zarr.Array | tensorstore.TensorStore]
):
    ids = np.asarray(opened(cache.folder / "input_ids")[...])
    masks = np.asarray(opened(cache.folder / "loss_mask")[...])
    assert len(ids) == len(masks) == cache.record.tokens_stored
    for document in cache.documents():
        at = cache.reader.located[document]
        own = slice(at.start, at.start + at.length)
        wanted_ids, wanted_mask = cache.reader.tokens(document)
        assert np.array_equal(ids[own], wanted_ids)
        assert np.array_equal(masks[own], wanted_mask)


def test_metadata_say_what_the_stored_numbers_mean(cache):
    for part in cache.parts:
        for plane in cache.reader.identity.planes:
            found = by_zarr_python(cache.folder / part_of(plane, part.name))
            assert found.dtype.itemsize == part.dtype.itemsize
            if part.per_channel:
                assert found.attrs["logical_dtype"] == part.logical_dtype
                assert found.metadata.dimension_names == ("token", "hidden")


def test_metadata_are_those_of_zarr_3_without_extensions(cache):
    known = {"sharding_indexed", "bytes", "crc32c", "zstd"}
    for path in cache.folder.rglob("zarr.json"):
        described = json.loads(path.read_text())
        assert described["zarr_format"] == 3
        if described["node_type"] == "array":
            codecs = described["codecs"]
            for codec in [*codecs]:
                codecs += codec.get("configuration", {}).get("codecs", [])
            assert {codec["name"] for codec in codecs} <= known


def test_every_raw_chunk_begins_on_a_page_and_compressed_ones_lie_close(cache):
    chunks = cache.record.tokens_stored // CHUNK_TOKENS
    assert chunks > 5
    for part in (part for part in cache.parts if part.per_channel):
        plane = RawPlane(row_bytes=HIDDEN_SIZE * part.dtype.itemsize)
        for name in cache.reader.identity.planes:
            shard = (cache.folder / part_of(name, part.name) / "c/0/0").read_bytes()
            index = decode_index(shard[-index_bytes(chunks) :])
            offsets, sizes = zip(*index, strict=True)
            if part.compressed:
                assert list(offsets) == [sum(sizes[:k]) for k in range(chunks)]
            else:
                assert all(offset % ALIGNMENT == 0 for offset in offsets)
                assert list(offsets) == [k * plane.stride for k in range(chunks)]
                assert set(sizes) == {plane.chunk_bytes + CHECKSUM_BYTES}
