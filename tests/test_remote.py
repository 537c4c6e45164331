"""A cache behind a URL gives what the same cache in a folder gives, or says why not."""

import json
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from conftest import tiny_build

from dflash_cache.build import build_cache
from dflash_cache.config import BuildConfig
from dflash_cache.convert import convert_cache
from dflash_cache.errors import CacheError, ConfigError
from dflash_cache.reader import CacheReader
from dflash_cache.verify import verify_cache
from dflash_cli.main import main

pytest.importorskip("obstore")
LAYERS = [1, 3, 5, "final_hidden"]


@contextmanager
def served(folder: Path):
    """The URL of a folder, while a server process runs."""
    script = Path(__file__).with_name("range_server.py")
    with subprocess.Popen(
        [sys.executable, str(script), str(folder)], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


@pytest.fixture(scope="module", params=["bf16", "lossless", "int8"])
def folder(request, tmp_path_factory, tiny_target, tiny_data) -> Path:
    out = tmp_path_factory.mktemp("served") / request.param
    build_cache(tiny_build(tiny_target, tiny_data, out, encoding=request.param, final_hidden=True))
    return out


@pytest.fixture(scope="module")
def url(folder):
    with served(folder.parent) as root:
        yield f"{root}/{folder.name}"


def test_a_url_gives_what_the_folder_gives(folder, url):
    here, there = CacheReader(folder), CacheReader(url)
    assert there.located == here.located
    for index in range(len(here.located)):
        for one, other in zip(here.tokens(index), there.tokens(index), strict=True):
            assert one.tolist() == other.tolist()
        wanted = here.hidden(index, LAYERS)
        assert torch.equal(there.hidden(index, LAYERS), wanted)
        assert torch.equal(there.hidden(index, [3], slice(5, 70)), wanted[1:2, 5:70])
    for one, other in zip(here.frozen(), there.frozen(), strict=True):
        assert torch.equal(one, other)


def test_info_and_verify_take_a_url(folder, url):
    runner = CliRunner()
    for command in ("info", "verify"):
        here = json.loads(runner.invoke(main, ["cache", command, str(folder), "--json"]).stdout)
        there = json.loads(runner.invoke(main, ["cache", command, url, "--json"]).stdout)
        here.pop("gb_per_s", None), there.pop("gb_per_s", None)
        assert there == here


def test_a_cache_behind_a_url_can_be_converted(folder, url, tmp_path):
    if folder.name == "int8":
        pytest.skip("has lost bits, and is refused like any other")
    wanted = "lossless" if folder.name == "bf16" else "bf16"
    convert_cache(url, encoding=wanted, out=tmp_path / "out")
    assert verify_cache(tmp_path / "out")["ok"]
    found, source = CacheReader(tmp_path / "out"), CacheReader(folder)
    assert torch.equal(found.hidden(3, LAYERS), source.hidden(3, LAYERS))


@pytest.fixture
def spoilt(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "spoilt")
    with served(tmp_path) as root:
        yield copy, f"{root}/spoilt"


def damage(path: Path, kind: str) -> None:
    payload = bytearray(path.read_bytes())
    payload[10] ^= 1
    path.unlink()
    if kind != "deleted":
        path.write_bytes(payload if kind == "flipped" else payload[: len(payload) // 2])


def read_all(reader: CacheReader) -> None:
    for index in range(len(reader.located)):
        reader.tokens(index)
        reader.hidden(index, LAYERS)


@pytest.mark.parametrize("kind", ["flipped", "truncated", "deleted"])
@pytest.mark.parametrize("name", ["hidden/3/c/0/0", "input_ids/c/0"])
def test_damage_behind_a_url_is_an_error_and_never_data(spoilt, name, kind):
    copy, url = spoilt
    reader = CacheReader(url)
    record = reader.records["u000001"]
    damage(copy / record.folder / name, kind)
    with pytest.raises(CacheError, match="u000001"):
        read_all(reader)
    found = verify_cache(url)
    assert [error["unit"] for error in found["errors"]] == ["u000001"]


def test_a_missing_record_behind_a_url_is_an_error(spoilt):
    copy, url = spoilt
    (copy / "commits" / "u000002.json").unlink()
    with pytest.raises(CacheError, match=r"u000002\.json: the commit record is missing"):
        CacheReader(url)


def test_a_half_built_cache_behind_a_url_is_refused(spoilt):
    copy, url = spoilt
    (copy / "manifest.json").unlink()
    with pytest.raises(CacheError, match="not complete; finish it where it is built"):
        CacheReader(url)


def test_a_url_without_a_cache_is_refused(url):
    with pytest.raises(CacheError, match=r"not a cache folder \(no zarr\.json\)"):
        CacheReader(f"{url}/nothing")


def test_a_server_that_does_not_answer_is_one_message(monkeypatch):
    found = CliRunner().invoke(main, ["cache", "info", "ftp://127.0.0.1/cache"])
    assert (found.exit_code, "Error: ftp://127.0.0.1/cache: cannot be opened" in found.output) == (
        1,
        True,
    )


@pytest.mark.parametrize("out", ["s3://bucket/cache", "http://host/cache"])
def test_building_into_a_store_is_refused_with_what_to_do(out):
    with pytest.raises(ConfigError, match="copy the sealed folder there"):
        BuildConfig(target="t", data="d", out=Path(out))
