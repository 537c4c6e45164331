"""The benchmark of checkpoints, rehearsed on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[1] / "benchmarks" / "bench_save.py"


def test_saves_are_timed_and_what_was_saved_is_read_back(tmp_path):
    out, disk = tmp_path / "save.json", tmp_path / "disk"
    disk.mkdir()
    words = ["--tiny", "--saves", "3", "--folder", str(disk), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, BENCHMARK, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(BENCHMARK.parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "the same to the last bit" in done.stderr
    found = json.loads(out.read_text())
    assert done.stdout.endswith(json.dumps(found, indent=1) + "\n")
    figures, shape = found["figures"], found["shape"]
    # Masters and two moments in fp32, weights in bf16, and three scalars.
    assert figures["save_gb"] == pytest.approx((14 * shape["parameters"] + 12) / 1e9, rel=1e-4)
    assert figures["save_copy_gb_s"] == pytest.approx(
        figures["save_gb"] / figures["save_stall_s"], rel=1e-3
    )
    assert set(figures) == {
        *("save_gb", "save_stall_s", "save_stall_first_s", "save_copy_gb_s", "plain_copy_gb_s"),
        *("save_write_s", "resume_check_s", "resume_read_s"),
    }
    assert min(figures.values()) > 0
    assert list(disk.iterdir()) == []
