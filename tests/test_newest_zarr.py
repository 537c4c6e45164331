"""The newest zarr reads what the oldest supported one described, where a newer Python is at hand.

zarr dropped Python 3.11 with 3.2; the suite on 3.12 or later runs on the newest zarr by itself.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import zarr
from conftest import chat_rows, save_tiny_target, tiny_build, write_jsonl

from dflash_cache.build import build_cache
from dflash_cache.convert import convert_cache

NEWEST = ("zarr==3.4.2", "numcodecs==0.17.1")
READ = """
import hashlib, sys
from pathlib import Path
import zarr
print(zarr.__version__)
for path in sorted(Path(sys.argv[1]).rglob("zarr.json")):
    node = zarr.open(path.parent, mode="r")
    if isinstance(node, zarr.Array):
        name = path.parent.relative_to(sys.argv[1])
        print(name, node.dtype, *node.shape, hashlib.sha256(node[...].tobytes()).hexdigest())
"""


def newer_pythons() -> list[str]:
    """Interpreters of 3.12 or later on the path, or among pyenv's."""
    named = [shutil.which(name) for name in ("python3.13", "python3.12")]
    kept = Path(os.environ.get("PYENV_ROOT", "/nonexistent")).glob("versions/3.1[23].*/bin/python3")
    return [str(path) for path in (*named, *kept) if path and runs(str(path), "-c", "pass")]


def runs(*words: str) -> bool:
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def newest(tmp_path_factory) -> Path:
    """A Python of its own with the newest zarr, and nothing else of ours."""
    if sys.version_info >= (3, 12):
        pytest.skip("this very interpreter has the newest zarr")
    found = newer_pythons()
    if not found:
        pytest.skip("no Python of 3.12 or later is at hand")
    folder = tmp_path_factory.mktemp("newest") / "venv"
    subprocess.run([found[0], "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    done = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", *NEWEST],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"the newest zarr is not to be had: {done.stderr.strip().splitlines()[-1]}")
    return python


@pytest.fixture(scope="module")
def caches(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("caches")
    target = save_tiny_target(folder / "target", layers=4)
    data = write_jsonl(folder / "rows.jsonl", chat_rows(5))
    build_cache(tiny_build(target, data, folder / "bf16", target_layers=(0, 2), final_hidden=True))
    for encoding in ("lossless", "int8", "fp8"):
        convert_cache(folder / "bf16", encoding=encoding, out=folder / encoding)
    shutil.rmtree(folder / "target")
    return folder


def test_the_newest_zarr_reads_the_same_numbers_from_every_array(newest, caches):
    done = subprocess.run(
        [newest, "-c", READ, str(caches)], capture_output=True, text=True, check=True
    )
    version, *found = done.stdout.splitlines()
    assert version.startswith("3.4")
    wanted = []
    for path in sorted(caches.rglob("zarr.json")):
        node = zarr.open(path.parent, mode="r")
        if isinstance(node, zarr.Array):
            told = hashlib.sha256(node[...].tobytes()).hexdigest()
            name = path.parent.relative_to(caches)
            wanted.append(" ".join(map(str, (name, node.dtype, *node.shape, told))))
    assert found == wanted
    assert len(found) > 4 * 8
