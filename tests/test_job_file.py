"""A job comes to other processes as it was, its arrays from the file and not through the pickle."""

import numpy as np
import pytest
import torch

from dflash_cache import job_file
from dflash_cache.errors import CacheError
from dflash_cache.job_file import read_job
from dflash_cache.samples import Sample


def samples() -> list[Sample]:
    ids = np.arange(30_000, dtype=np.int32)
    mask = ids % 3 == 0
    cuts = [slice(0, 7), slice(7, 20_000), slice(20_000, 20_000), slice(20_000, 30_000)]
    return [
        Sample(sample_id=i, input_ids=ids[cut], loss_mask=mask[cut], group=f"g{i}")
        for i, cut in enumerate(cuts)
    ]


def test_a_job_comes_back_as_it_was(tmp_path):
    with job_file.job_file(tmp_path, (len, samples())) as path:
        assert path.name.startswith(".job.")  # what is swept when the builder is killed
        assert path.name.endswith(".partial")
        work, found = read_job(path)
    assert list(tmp_path.iterdir()) == []
    assert work is len
    for sample, wanted in zip(found, samples(), strict=True):
        assert (sample.sample_id, sample.group) == (wanted.sample_id, wanted.group)
        assert sample.input_ids.dtype == np.int32
        np.testing.assert_array_equal(sample.input_ids, wanted.input_ids)
        np.testing.assert_array_equal(sample.loss_mask, wanted.loss_mask)
        torch.from_numpy(sample.input_ids)  # without a warning


def test_tokens_are_mapped_and_changes_stay_with_who_makes_them(tmp_path):
    path = tmp_path / "job"
    job_file.write_job(path, samples())
    before = path.read_bytes()
    _, found, *_ = read_job(path)
    base = found.input_ids
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    assert not isinstance(base, bytes | bytearray)
    found.input_ids[:] = 0
    assert path.read_bytes() == before


def test_a_folder_that_is_not_shared_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(job_file, "PATIENCE", 0.0)
    with pytest.raises(CacheError, match="must be a folder that all machines share"):
        read_job(tmp_path / "nothing")


def test_the_file_goes_also_when_the_work_fails(tmp_path):
    with pytest.raises(RuntimeError), job_file.job_file(tmp_path, 1):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
