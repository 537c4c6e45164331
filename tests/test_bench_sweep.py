"""The benchmark of sweeps, rehearsed: both ways on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[1] / "benchmarks" / "bench_sweep.py"


def test_both_ways_are_measured_and_train_the_same(tiny_cache, tmp_path):
    out, disk = tmp_path / "sweep.json", tmp_path / "disk"
    disk.mkdir()
    words = ["--tiny", "--cache", tiny_cache, "--steps", 30, "--trials", 2, "--folder", disk]
    done = subprocess.run(
        [sys.executable, BENCHMARK, *map(str, words), "--out", str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(BENCHMARK.parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert done.stdout.endswith(json.dumps(found, indent=1) + "\n")
    figures = found["figures"]
    assert figures["bytes_read_ratio"] <= 1.1
    assert figures["sequential_bytes_read"] == pytest.approx(figures["sweep_bytes_alone"], rel=1e-3)
    assert figures["last_loss_apart.max"] == 0
    assert figures["wall_over_sequential"] > 0
    assert figures["train_over_sequential"] > 0
    assert len(found["shape"]["trials"]) == 2
    assert list(disk.iterdir()) == []
