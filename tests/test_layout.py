"""Where bytes lie in a unit, as integers."""

import struct

import google_crc32c
from hypothesis import given
from hypothesis import strategies as st

from dflash_cache.layout import (
    ALIGNMENT,
    CHECKSUM_BYTES,
    CHUNK_TOKENS,
    RawPlane,
    chunks_of,
    decode_index,
    encode_index,
    first_rows,
    index_bytes,
    padded,
    round_up,
)

rows = st.integers(1, 20_000).map(lambda row_bytes: RawPlane(row_bytes=row_bytes))
entries = st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), max_size=20)


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_rounding_up_gives_the_least_multiple_that_is_not_less(size, multiple):
    found = round_up(size, multiple)
    assert found % multiple == 0
    assert size <= found < size + multiple


@given(st.integers(0, 10**6))
def test_a_sample_takes_the_least_whole_chunks_that_hold_it(tokens):
    assert padded(tokens) == CHUNK_TOKENS * chunks_of(tokens)
    assert 0 <= padded(tokens) - tokens < CHUNK_TOKENS


@given(st.lists(st.integers(1, 10_000), max_size=50))
def test_samples_begin_on_chunks_and_never_overlap(lengths):
    starts = first_rows(lengths)
    assert starts[0] == 0
    assert len(starts) == len(lengths) + 1
    for start, end, length in zip(starts, starts[1:], lengths, strict=False):
        assert start % CHUNK_TOKENS == 0
        assert 0 <= end - start - length < CHUNK_TOKENS


@given(rows)
def test_chunks_begin_on_pages_with_room_for_a_checksum_and_less_than_a_page_lost(plane):
    assert plane.chunk_bytes == CHUNK_TOKENS * plane.row_bytes
    assert plane.stride % ALIGNMENT == 0
    assert CHECKSUM_BYTES <= plane.gap < ALIGNMENT + CHECKSUM_BYTES
    assert plane.chunk_bytes + plane.gap == plane.stride


@given(rows, st.integers(0, 500))
def test_a_file_is_its_chunks_and_an_index_of_their_offsets_and_sizes(plane, chunks):
    table = [(k * plane.stride, plane.chunk_bytes + CHECKSUM_BYTES) for k in range(chunks)]
    index = encode_index(table)
    assert len(index) == index_bytes(chunks)
    assert plane.file_bytes(chunks) == chunks * plane.stride + len(index)


@given(entries)
def test_an_index_comes_back_as_it_was(table):
    assert decode_index(encode_index(table)) == table


def test_an_index_is_spelt_as_zarr_wants_it():
    # Little-endian pairs of uint64, and the CRC-32C of another library behind them.
    table = struct.pack("<QQQQ", 0, 4100, 8192, 4100)
    check = google_crc32c.value(table).to_bytes(4, "little")
    assert encode_index([(0, 4100), (8192, 4100)]) == table + check


@given(entries, st.data())
def test_an_index_with_any_byte_changed_is_none(table, data):
    damaged = bytearray(encode_index(table))
    place = data.draw(st.integers(0, len(damaged) - 1))
    damaged[place] ^= data.draw(st.integers(1, 255))
    assert decode_index(bytes(damaged)) is None


@given(entries, st.integers(1, 40))
def test_an_index_that_ends_too_early_is_none(table, missing):
    payload = encode_index(table)
    if missing <= len(payload):
        assert decode_index(payload[:-missing]) is None
