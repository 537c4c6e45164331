"""A builder may be killed at any moment: what it committed stays, what it left is nobody's.

How it is killed and what must be true then is in `benchmarks/chaos.py`, which does the same for
hundreds of kills, and with several workers.
"""

import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import chaos

from dflash_cache import ledger

KILLS = 30


@pytest.fixture(scope="module")
def grounds(tmp_path_factory) -> list[chaos.Ground]:
    """Encodings with a file beside the units, and with compressed planes."""
    return chaos.prepare(tmp_path_factory.mktemp("grounds"), ["int8", "lossless"])


def test_a_build_that_is_killed_again_and_again_gives_the_undisturbed_cache(grounds, tmp_path):
    struck = chaos.chaos(grounds, tmp_path / "caches", kills=KILLS, rng=random.Random(0))
    assert len(struck.kills) >= KILLS
    assert struck.caches >= 2
    # Nine in ten kills strike between the first unit and the seal, most of them within a unit.
    told = chaos.figures(struck)
    assert told["kills_between_units"] >= 5
    assert told["kills_that_left_something"] >= 5


# --- the judge is awake ---------------------------------------------------------------------------


@pytest.fixture
def ground(grounds) -> chaos.Ground:
    return grounds[0]


@pytest.fixture
def cache(ground, tmp_path) -> Path:
    return shutil.copytree(ground.config.out, tmp_path / "cache")


def a_file(cache: Path) -> Path:
    record = ledger.read_record(cache / "commits" / "u000001.json")
    return cache / record.folder / "loss_mask" / "c" / "0"


def lose_file(cache: Path) -> None:
    a_file(cache).unlink()


def cut_file(cache: Path) -> None:
    a_file(cache).write_bytes(a_file(cache).read_bytes()[:-1])


def spoil_file(cache: Path) -> None:
    payload = a_file(cache).read_bytes()
    a_file(cache).write_bytes(bytes([payload[0] ^ 1]) + payload[1:])


def lose_record(cache: Path) -> None:
    (cache / "commits" / "u000001.json").unlink()


@pytest.mark.parametrize("harm", [lose_file, cut_file, spoil_file, lose_record])
def test_harm_to_what_is_committed_is_seen_after_a_kill(ground, cache, harm: Callable):
    records = chaos.check_killed(ground, cache, {})
    assert len(records) == len(ground.plan.units) > 3
    harm(cache)
    with pytest.raises(chaos.Damaged):
        chaos.check_killed(ground, cache, records)


def leave_attempt(cache: Path) -> None:
    folder = a_file(cache).parents[2]
    shutil.copytree(folder, folder.with_name("u000001.0rphaned"))


def leave_partial(cache: Path) -> None:
    (cache / ".manifest.json.12345678.partial").touch()


def leave_partial_of_nobody(cache: Path) -> None:
    (cache / "units" / ".u000001.12345678.partial").touch()


def spell_otherwise(cache: Path) -> None:
    """Whole in itself, but not the cache that was planned."""
    path = cache / "commits" / "u000001.json"
    record = ledger.read_record(path)
    other = {**record.to_dict(), "groups": ["another", *record.groups[1:]]}
    path.write_bytes(type(record).from_dict(other, where="here").to_bytes())


@pytest.mark.parametrize(
    "harm",
    [spoil_file, leave_attempt, leave_partial, leave_partial_of_nobody, spell_otherwise],
)
def test_what_does_not_belong_to_a_finished_cache_is_seen(ground, cache, harm: Callable):
    chaos.check_finished(ground, cache)
    harm(cache)
    with pytest.raises(chaos.Damaged):
        chaos.check_finished(ground, cache)
