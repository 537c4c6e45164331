"""Training by several processes: the same curve whatever their number, and one end for all."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from slow_builder import SlowBuilder
from test_loop import losses, tiny_fit

from dflash_cache import ledger
from dflash_cache.errors import CacheError
from dflash_fit import checkpoint, follow, loop
from dflash_fit.parts import read_parts

STEPS = 9


def ranks_fit(cache, out, **changes):
    """Three packs a step: on two ranks one is idle in every second turn, on four always."""
    options = {"packs_per_step": 3, "max_steps": STEPS, "epochs": 9, "devices": "cpu,cpu"}
    return tiny_fit(cache, out, **{**options, **changes})


class Flats:
    """The whole state of a checkpoint, whoever wrote it."""

    def __init__(self, path):
        names = [name for name in os.listdir(path) if name.startswith("optimizer")]
        parts = sorted(path / name for name in names)
        self.length = sum(len(load_file(part)["master"]) for part in parts)
        self.owned = slice(0, self.length)
        self.values = {n: torch.zeros(self.length) for n in ("master", "moment1", "moment2")}
        self.numbers = {n: torch.zeros(()) for n in ("updates", "skipped", "skipped_in_a_row")}
        read_parts(parts, self)

    def flats(self):
        return self.values

    def scalars(self):
        return self.numbers

    def restore(self):
        pass


def state(out):
    last = checkpoint.checkpoints(out)[-1]
    found = Flats(last)
    return {**found.values, **found.numbers, **load_file(last / "model.safetensors")}


def assert_same_end(out, other):
    assert losses(out) == losses(other)
    found, wanted = state(out), state(other)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.fixture(scope="module")
def alone(tiny_cache, tmp_path_factory):
    """One process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    loop.fit(ranks_fit(tiny_cache, out, devices="cpu"))
    return out


def stop_at_3(step):
    return step == 3


def stop_at_6(step):
    return step == 6


def test_two_ranks_then_one_then_three_give_the_curve_of_one(tiny_cache, tmp_path, alone):
    """Stopped in the middle of an epoch; the state shared by some and held by each of others."""
    config = ranks_fit(tiny_cache, tmp_path / "run", shard_optimizer=True)
    # Ranks agree on the end of a run two steps after one of them has asked for it.
    first = loop.fit(config, stop=stop_at_3)
    assert (first["step"], first["finished"], first["ranks"]) == (5, False, 2)
    one = replace(config, devices="cpu", shard_optimizer=False)
    assert loop.fit(one, stop=stop_at_6)["step"] == 6
    last = loop.fit(replace(config, devices="cpu,cpu,cpu", shard_optimizer=False))
    assert (last["step"], last["finished"], last["ranks"]) == (STEPS, True, 3)
    assert_same_end(config.out, alone)


PROGRAM = "from dflash_cli.main import main; main()"


def start(cache, out, *more):
    """`dflash fit` as a user types it, for as long as it is left alone."""
    words = ["fit", "--cache", cache, "--out", out, "--num-layers", 1, "--block-size", 4]
    words += ["--token-budget", 256, "--anchors", 16, "--anchor-microbatch", 16]
    words += ["--epochs", 2000, "--held-out", 0.2, "--log-every", 1]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, [*words, *more])],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


def end(process):
    process.kill()
    process.communicate()


def await_steps(process, out, count=3):
    end = time.monotonic() + 120
    while not ((out / "metrics.jsonl").is_file() and len(losses(out)) >= count):
        assert time.monotonic() < end
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)


def ranks_of(process):
    """Process numbers of the ranks: the children that train, and not what Python starts beside."""
    listed = subprocess.run(
        ["ps", "-ww", "-o", "pid=", "-o", "args=", "--ppid", str(process.pid)],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.split(maxsplit=1) for line in listed.stdout.splitlines()]
    return [int(pid) for pid, words in lines if "spawn_main" in words]


def test_a_rank_that_is_killed_ends_the_others_and_the_run_goes_on_from_its_checkpoint(
    tiny_cache, tmp_path
):
    out = tmp_path / "run"
    more = ["--devices", "cpu,cpu", "--checkpoint-every", 2, "--rank-timeout", 30]
    process = start(tiny_cache, out, *more)
    try:
        await_steps(process, out)
        first, second = ranks_of(process)
        began = time.monotonic()
        os.kill(second, signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
        assert time.monotonic() - began < 30
    finally:
        end(process)
    assert process.returncode == 1
    message = errors.strip().splitlines()[-1]
    assert re.match(r"Error: rank [01] on .* is gone \(SIGKILL\)", message), errors
    assert "Traceback" not in errors
    assert not [pid for pid in (first, second) if os.path.exists(f"/proc/{pid}")]
    saved = checkpoint.newest_sound(out).path
    assert saved is not None
    assert int(saved.name[5:]) % 2 == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_all_ranks_save_and_exits_with_zero(tiny_cache, tmp_path, number):
    out = tmp_path / "run"
    process = start(tiny_cache, out, "--devices", "cpu,cpu")
    try:
        await_steps(process, out)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        end(process)
    assert process.returncode == 0, errors
    assert checkpoint.checkpoints(out)[-1].name == f"step_{losses(out)[-1][0]:08d}"


SECOND_INTERRUPT = """
import os, signal
from types import SimpleNamespace
from dflash_fit.loop import stop_signals

with stop_signals(SimpleNamespace(course=None)) as asked:
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
        print(asked(), flush=True)
"""


def test_the_second_interrupt_leaves_at_once():
    """Not the second SIGTERM: launchers send it more than once."""
    words = [sys.executable, "-c", SECOND_INTERRUPT]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (found.stdout, found.stderr) == ("True\nTrue\n", "")
    assert found.returncode == 128 + signal.SIGINT


def test_a_signal_that_the_process_ignores_does_not_stop_the_run():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with loop.stop_signals(SimpleNamespace(course=None)) as asked:
            os.kill(os.getpid(), signal.SIGINT)
            assert not asked()
            os.kill(os.getpid(), signal.SIGTERM)
            assert asked()
    finally:
        signal.signal(signal.SIGINT, before)


# --- a cache that is still being built ------------------------------------------------------------


@contextmanager
def slowly_built(cache, root, *, seal=True):
    """Unit by unit in an order of its own, in a thread; the builder goes away at the end."""
    builder = SlowBuilder(cache, root)
    over = threading.Event()

    def build():
        with builder.at_work():
            units = sorted(builder.units, key=lambda unit: unit[::-1])
            for unit in units if seal else units[: len(units) // 2]:
                over.wait(0.15)
                builder.commit(unit)
            if seal:
                builder.finish()

    thread = threading.Thread(target=build)
    thread.start()
    try:
        yield builder
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_following_a_slow_builder_ends_with_the_weights_of_the_sealed_cache_in_that_order(
    tiny_cache, tmp_path, devices
):
    root = tmp_path / "cache"
    wanted = {"packs_per_step": 2, "max_steps": 12, "epochs": 9, "eval_every": 4}
    config = tiny_fit(root, tmp_path / "run", follow=True, devices=devices, **wanted)
    with slowly_built(tiny_cache, root):
        summary = loop.fit(config)
    assert summary["finished"]
    order = config.out / "followed.json"
    assert sorted(json.loads(order.read_text())) == sorted(ledger.recorded_units(tiny_cache))
    sealed = tiny_fit(tiny_cache, tmp_path / "sealed", unit_order=order, devices="cpu", **wanted)
    loop.fit(sealed)
    assert_same_end(config.out, sealed.out)
    assert summary["best_step"] is not None


def test_a_builder_that_is_gone_is_told_and_the_run_goes_on_when_the_cache_is_whole(
    tiny_cache, tmp_path, monkeypatch
):
    monkeypatch.setattr(follow, "NOBODY_GOES_ON", 0.5)
    root = tmp_path / "cache"
    config = tiny_fit(root, tmp_path / "run", follow=True, max_steps=12, epochs=9)
    with (
        slowly_built(tiny_cache, root, seal=False) as builder,
        pytest.raises(CacheError, match="nobody builds it any more"),
    ):
        loop.fit(config)
    begun = checkpoint.newest_sound(config.out).path
    assert begun is not None
    builder.finish()
    assert loop.fit(config)["finished"]
