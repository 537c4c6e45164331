"""Checksums against other libraries, and the checksum of a whole against that of its parts."""

import google_crc32c
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from dflash_cache.checksums import Hasher, crc32c, digest, fold


def test_the_known_vector_has_its_known_checksum():
    assert crc32c(b"123456789") == 0xE3069283


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_checksums_are_those_of_another_library(before, behind):
    assert crc32c(before) == google_crc32c.value(before)
    assert crc32c(behind, crc32c(before)) == google_crc32c.value(before + behind)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, "u1")])
def test_a_buffer_of_any_kind_has_the_checksum_of_its_bytes(kind):
    assert crc32c(kind(b"123456789")) == 0xE3069283


@given(size=st.integers(0, 5000), count=st.integers(0, 40), seed=st.integers(0, 2**32 - 1))
def test_folded_checksums_of_equal_parts_are_the_checksum_of_the_whole(size, count, seed):
    whole = np.random.default_rng(seed).bytes(size * count)
    parts = [whole[i * size : (i + 1) * size] for i in range(count)]
    assert fold(map(crc32c, parts), size) == google_crc32c.value(whole)


@given(st.binary(max_size=500))
def test_a_file_is_not_summed_by_the_checksum_that_it_ends_with(payload):
    """The CRC of bytes and their CRC is a constant: it would say nothing of a shard."""
    ended = payload + crc32c(payload).to_bytes(4, "little")
    assert crc32c(ended) == crc32c((0).to_bytes(4, "little"))
    assert digest(ended) == xxhash.xxh3_64(ended).intdigest() != digest(payload)
    whole = Hasher()
    whole.update(ended[:100])
    whole.update(ended[100:])
    assert whole.intdigest() == digest(ended)


def test_the_order_of_parts_counts():
    parts = [crc32c(b"aaaa"), crc32c(b"bbbb")]
    assert fold(parts, 4) != fold(parts[::-1], 4)
