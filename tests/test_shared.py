"""One read for several trials: what they get, what is read, and who is waited for."""

import gc
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import chat_rows, save_tiny_target, tiny_build, write_jsonl

from dflash_cache.buffers import Buffers, buffers
from dflash_cache.build import build_cache
from dflash_cache.config import ENCODING_NAMES
from dflash_cache.errors import CacheError
from dflash_cache.launcher import settle
from dflash_cache.reader import CacheReader
from dflash_cache.schema import FINAL_HIDDEN
from dflash_fit import pack_memory
from dflash_fit.errors import FitError
from dflash_fit.loader import split_documents
from dflash_fit.packing import Pack, plan_epoch
from dflash_fit.shared import SharedReads
from dflash_fit.shared_reader import SharedReader, open_shared
from dflash_fit.stock import MOST_SLOTS

ROWS = 384
BEGIN = (0, 0)
RAW = [name for name in ENCODING_NAMES if name != "lossless"]  # all planes have one size


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target") / "small", layers=6)


@pytest.fixture(scope="module", params=ENCODING_NAMES)
def every_cache(request, tmp_path_factory, target) -> Path:
    return build(tmp_path_factory.mktemp("cache"), target, encoding=request.param, rows=24)


@pytest.fixture(scope="module")
def cache(tmp_path_factory, target) -> Path:
    return build(tmp_path_factory.mktemp("cache"), target, encoding="bf16", rows=40)


def build(folder: Path, target: Path, *, encoding: str, rows: int) -> Path:
    data = write_jsonl(folder / "rows.jsonl", chat_rows(rows))
    options = {"encoding": encoding, "final_hidden": True, "target_layers": (0, 2, 4)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        build_cache(tiny_build(target, data, folder / "out", **options))
    return folder / "out"


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    gc.collect()
    before = open_things()
    yield
    gc.collect()
    assert open_things() == before


def open_things() -> tuple[int, int, list[str]]:
    """Packs in the memory of this process, files of them, and threads that serve."""
    maps = Path("/proc/self/maps").read_text().count(pack_memory.NAME)
    files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return (
        maps,
        sum(pack_memory.NAME in file or "socket" in file for file in files),
        [t.name for t in threading.enumerate() if t.name == "shared read"],
    )


class Trial:
    """A trial in a thread of this process, with a host batch of its own."""

    def __init__(self, reads: SharedReads, name: str, planes: Sequence, begins=BEGIN) -> None:
        cache = reads.reader.root
        self.planes, self.alone = planes, CacheReader(cache)
        self.reader = open_shared(cache, reads.address, name, begins)

    def take(self, pack: Pack, order=None, *, planes: Sequence | None = None) -> None:
        """Read a pack, and compare it with what a reader without others gives."""
        planes = self.planes if planes is None else planes
        found, wanted = (filled(self.reader, planes) for _ in range(2))
        self.alone.read_documents(pack.documents, pack.starts, planes, wanted)
        self.reader.read_documents(pack.documents, pack.starts, planes, found, order=order)
        for name, part in wanted.items():
            assert np.array_equal(raw(found[name]), raw(part)), (name, order)


def filled(reader: CacheReader, planes: Sequence) -> Buffers:
    """Buffers that hold something, which must stay where no document goes."""
    into = buffers(reader.identity, len(planes), ROWS)
    for part in into.values():
        part.view(torch.uint8).fill_(0xA5)
    return into


def raw(part: torch.Tensor) -> np.ndarray:
    return part.contiguous().view(torch.uint8).numpy()


def packs_of(cache: Path) -> tuple[list[Pack], list[Pack]]:
    """Those of an epoch, and those that are measured."""
    reader = CacheReader(cache)
    training, measured = split_documents(reader, held_out=0.3)
    return tuple(
        plan_epoch(documents, reader.lengths, token_budget=ROWS, seed=5, epoch=0)
        for documents in (training, measured)
    )


def all_at_once(works: Sequence[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(len(works)) as pool:
        for future in [pool.submit(work) for work in works]:
            future.result()


def begin(reads: SharedReads, *trials: tuple[str, Sequence]) -> list[Trial]:
    """Trials of one group that have all joined and begun."""
    for name, planes in trials:
        reads.join(name, "group", planes, ROWS)
    return [Trial(reads, name, planes) for name, planes in trials]


WANTED = {
    "a": [4, 0],
    "b": [2],
    "c": [0, 2, 4, FINAL_HIDDEN],
    "d": [FINAL_HIDDEN, 2],
}


@pytest.mark.parametrize("direct", [False, True], ids=["cached", "direct"])
def test_trials_get_what_a_reader_of_their_own_gives_bit_for_bit(every_cache, direct):
    """Each in its own order of planes; two packs at a time as a feed does; then measured twice."""
    packs, measured = packs_of(every_cache)

    def live(trial: Trial) -> None:
        orders = [(0, index) for index in range(len(packs))]
        with ThreadPoolExecutor(2) as fillers:
            for part in (slice(at, at + 3) for at in range(0, len(packs), 3)):
                list(fillers.map(trial.take, packs[part], orders[part]))
        plain = [plane for plane in trial.planes if plane != FINAL_HIDDEN]
        for pack in measured * 2:
            trial.take(pack, planes=plain)

    with SharedReads(every_cache, direct=direct) as reads:
        trials = begin(reads, *WANTED.items())
        all_at_once([lambda trial=trial: live(trial) for trial in trials])
        counts = reads.counts()
        for trial in trials:
            assert trial.reader.bytes_read == 0
            trial.reader.close()
    assert reads.told == []
    # Everything once: all planes for training, without the final one for measuring.
    once = CacheReader(every_cache, direct=direct)
    for pack in packs:
        once.read_documents(pack.documents, pack.starts, WANTED["c"], filled(once, WANTED["c"]))
    for pack in measured:
        once.read_documents(pack.documents, pack.starts, [0, 2, 4], filled(once, [0, 2, 4]))
    assert counts["bytes_read"] == once.bytes_read
    by_trial = counts["by_trial"]
    shares = [by_trial[name]["read"] for name in WANTED]
    assert sum(shares) == pytest.approx(once.bytes_read, abs=len(shares))
    assert max(shares) - min(shares) <= 1
    assert counts["bytes_served"] == sum(found["served"] for found in by_trial.values())
    if once.identity.encoding in RAW:
        # Each has compared with a reader of its own; measuring again was served again.
        wanted = [trial.alone.bytes_read for trial in trials]
        assert [by_trial[name]["served"] for name in WANTED] == wanted


def test_a_slow_trial_is_waited_for_and_then_told_and_reads_by_itself(cache):
    packs, _ = packs_of(cache)
    assert len(packs) > MOST_SLOTS + 2
    with SharedReads(cache, patience=0.4) as reads:
        quick, slow = begin(reads, ("quick", [0]), ("slow", [2]))
        began = time.monotonic()
        for index, pack in enumerate(packs):
            quick.take(pack, (0, index))
        assert 0.4 <= time.monotonic() - began < 20
        assert reads.told == [
            f"trial slow is slower than the others by {MOST_SLOTS} packs; it reads by itself "
            "from here"
        ]
        for index, pack in enumerate(packs):
            slow.take(pack, (0, index))
        for trial in (quick, slow):
            trial.reader.close()
    counts = reads.counts()
    by_trial = counts["by_trial"]
    assert 0.4 <= by_trial["quick"]["waited"] < 20
    assert by_trial["slow"]["waited"] == 0.0
    # What happens to be there is taken from there still.
    kept, own = by_trial["slow"]["served"], by_trial["slow"]["own"]
    assert own == slow.reader.bytes_read
    assert kept + own == slow.alone.bytes_read
    assert 0 < own < slow.alone.bytes_read
    assert counts["bytes_read"] == sum(one["read"] + one["own"] for one in by_trial.values())


def test_a_trial_that_is_slow_but_goes_on_sees_nothing_read_twice(cache):
    packs, _ = packs_of(cache)
    with SharedReads(cache, patience=20.0) as reads:
        trials = begin(reads, ("quick", [0]), ("slow", [0]))

        def live(trial: Trial, pause: float) -> None:
            for index, pack in enumerate(packs):
                time.sleep(pause)
                trial.take(pack, (0, index))

        all_at_once([lambda: live(trials[0], 0.0), lambda: live(trials[1], 0.05)])
        counts = reads.counts()
        assert reads.told == []
        assert counts["bytes_read"] == trials[0].alone.bytes_read
        assert counts["by_trial"]["quick"]["waited"] > 0
        for trial in trials:
            trial.reader.close()


@pytest.mark.parametrize("how", ["its reader is closed", "the sweep sees its process end"])
def test_a_trial_that_ends_is_not_waited_for(cache, how):
    packs, _ = packs_of(cache)
    with SharedReads(cache) as reads:
        stays, goes = begin(reads, ("stays", [0]), ("goes", [0]))
        last = len(packs) - 1
        with ThreadPoolExecutor(1) as pool:

            def live() -> None:
                for index, pack in enumerate(packs):
                    stays.take(pack, (0, index))

            future = pool.submit(live)
            until(lambda: reads.counts()["by_trial"].get("stays", {}).get("served", 0) > 0)
            goes.take(packs[0], BEGIN)
            assert not future.done()
            if "closed" in how:
                goes.reader.close()
            else:
                reads.leave("goes")
            future.result(timeout=30)
        stays.take(packs[last], (0, last))
        for trial in (stays, goes):
            trial.reader.close()


def until(found: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not found():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_who_waits_when_the_sweep_ends_hears_it_and_so_does_who_asks_later(cache):
    packs, _ = packs_of(cache)
    told = "^the sweep's reader is gone; run the same command again$"
    with ThreadPoolExecutor(1) as pool:
        with SharedReads(cache) as reads:
            waits, _other = begin(reads, ("waits", [0]), ("other", [0]))
            for index in range(MOST_SLOTS):
                waits.take(packs[index], (0, index))
            late = pool.submit(waits.take, packs[MOST_SLOTS], (0, MOST_SLOTS))
            time.sleep(0.1)
            assert not late.done()
        with pytest.raises(FitError, match=told):
            late.result(timeout=30)
    with pytest.raises(FitError, match=told):
        waits.take(packs[0], BEGIN)
    with pytest.raises(FitError, match=told):
        Trial(reads, "waits", [0])
    waits.reader.close()
    _other.reader.close()


def test_damage_is_the_same_error_for_all_who_asked(cache, tmp_path):
    damaged = shutil.copytree(cache, tmp_path / "damaged")
    packs, _ = packs_of(cache)
    alone = CacheReader(damaged)
    unit = alone.located[packs[0].documents[0]].unit
    states = damaged / alone.records[unit].folder / "hidden/0/c/0/0"
    payload = bytearray(states.read_bytes())
    for at in range(0, len(payload) - 4096, 4096):
        payload[at] ^= 0xFF
    states.write_bytes(payload)

    def error_of(read: Callable[[], object]) -> str:
        with pytest.raises(CacheError) as caught:
            read()
        return str(caught.value)

    wanted = error_of(
        lambda: alone.read_documents(packs[0].documents, packs[0].starts, [0], filled(alone, [0]))
    )
    assert "a checksum does not fit the states read" in wanted
    with SharedReads(damaged) as reads:
        trials = begin(reads, ("a", [0]), ("b", [0, 2]))
        readers = [trial.reader for trial in trials]

        def ask(reader: SharedReader) -> str:
            into = filled(reader, [0])
            order = (0, 0)
            return error_of(
                lambda: reader.read_documents(
                    packs[0].documents, packs[0].starts, [0], into, order=order
                )
            )

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(ask, readers)) == [wanted, wanted]
        # The reader is as good as before.
        index = next(
            i
            for i, p in enumerate(packs)
            if all(alone.located[d].unit != unit for d in p.documents)
        )
        into = filled(readers[0], [0])
        readers[0].read_documents(
            packs[index].documents, packs[index].starts, [0], into, order=(0, index)
        )
        for reader in readers:
            reader.close()


def test_a_bug_of_the_reader_ends_those_who_asked(cache, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("oh")

    packs, _ = packs_of(cache)
    with SharedReads(cache) as reads:
        a, b = begin(reads, ("a", [0]), ("b", [0]))
        monkeypatch.setattr(reads.reader, "read_documents", fail)
        with pytest.raises(FitError, match=r"cannot read a pack: ZeroDivisionError\('oh'\)$"):
            a.take(packs[0], BEGIN)
        a.reader.close()
        b.reader.close()


def test_memory_that_is_too_small_is_told_and_all_read_by_themselves(cache):
    packs, measured = packs_of(cache)
    with SharedReads(cache, budget_bytes=90_000) as reads:
        a, b = begin(reads, ("a", [0]), ("b", [0, 2]))
        for trial in (a, b):
            trial.take(packs[0], BEGIN)
            trial.take(measured[0])
            assert trial.reader.bytes_read == trial.alone.bytes_read
            trial.reader.close()
    counts = reads.counts()
    assert counts["bytes_served"] == 0
    assert counts["bytes_read"] == a.alone.bytes_read + b.alone.bytes_read
    (told,) = reads.told
    size = 2 * ROWS * 32 * 2
    assert told == (
        f"3 packs of {size / 1e9:.3g} GB do not fit the memory for shared reads, 9e-05 GB: trials "
        "a, b read by themselves; a smaller --token-budget needs less"
    )


def test_the_memory_of_packs_stays_within_the_budget(cache):
    packs, measured = packs_of(cache)
    size = ROWS * 32 * 2
    budget = 9 * size  # four for training, four for measuring
    assert len(measured) > 1
    with SharedReads(cache, budget_bytes=budget) as reads:
        a, b = begin(reads, ("a", [0]), ("b", [0]))
        before = Path("/proc/self/maps").read_text().count(pack_memory.NAME)
        for index, pack in enumerate(packs):
            for trial in (a, b):
                trial.take(pack, (0, index))
        for pack in packs:  # any packs, but more than there is memory for
            a.take(pack)
        (stock,) = reads.stocks.every
        assert len(stock.shelf.training) == 4
        assert len(stock.shelf.measuring) == 4
        assert len(stock.memories) * size <= budget
        assert reads.most_bytes([("g", [0], ROWS), ("g", [0], ROWS)]) == budget
        for trial in (a, b):
            trial.reader.close()
    assert Path("/proc/self/maps").read_text().count(pack_memory.NAME) == before


def test_the_memory_that_trials_share_is_foreseen(cache):
    packs, _ = packs_of(cache)
    size = ROWS * 32 * 2
    with SharedReads(cache) as reads:
        trials = begin(reads, ("a", [0]), ("b", [4]))
        foreseen = reads.most_bytes([("group", [0], ROWS), ("group", [4], ROWS)])
        for index, pack in enumerate(packs):
            for trial in trials:
                trial.take(pack, (0, index))
                trial.take(pack)
        (stock,) = reads.stocks.every
        assert stock.training_bytes == MOST_SLOTS * 2 * size
        assert stock.training_bytes <= foreseen <= 2 * stock.training_bytes
        for trial in trials:
            trial.reader.close()


def test_trials_that_come_later_share_among_themselves_and_find_what_was_measured(cache):
    packs, measured = packs_of(cache)
    with SharedReads(cache) as reads:
        first, second = begin(reads, ("first", [0]), ("second", [0]))
        late, later = begin(reads, ("late", [0, 4]), ("later", [0]))
        assert late.reader.planes == (0, 4)
        assert later.reader.planes == (0, 4)
        assert first.reader.planes == (0,)
        for trial in (first, second, late, later):
            trial.take(measured[0])
            trial.take(packs[0], BEGIN)
        assert reads.counts()["bytes_read"] == first.alone.bytes_read + late.alone.bytes_read
        for trial in (first, second, late, later):
            trial.reader.close()
        until(lambda: not reads.members)

        before = reads.counts()["bytes_read"]
        again = begin(reads, ("later", [0, 4]), ("first", [0]))
        for trial in again:
            trial.take(measured[0])
        assert reads.counts()["bytes_read"] == before
        for trial in again:
            trial.reader.close()


def test_a_second_wave_shares_like_the_first(cache):
    packs, _ = packs_of(cache)
    assert len(packs) > 3
    with SharedReads(cache) as reads:
        for wave in (("a", "b"), ("c", "d"), ("a", "c")):
            trials = begin(reads, *((name, [0]) for name in wave))
            for number, pack in enumerate(packs):
                for trial in trials:
                    trial.take(pack, (0, number))
            once = trials[0].alone.bytes_read
            for trial in trials:
                trial.reader.close()
            until(lambda: not reads.members)
        assert reads.counts()["bytes_read"] == 3 * once
        assert not reads.told


def test_trials_begin_while_a_pack_is_still_read_for_those_that_died(cache, monkeypatch):
    packs, _ = packs_of(cache)
    reading, go_on = threading.Event(), threading.Event()
    real = CacheReader.read_documents

    def slowly(reader, *arguments, **more):
        if threading.current_thread().name == "shared read":
            reading.set()
            assert go_on.wait(20)
        real(reader, *arguments, **more)

    with SharedReads(cache) as reads, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(CacheReader, "read_documents", slowly)
        dead, other = begin(reads, ("dead", [0]), ("other", [0]))
        asked = pool.submit(dead.take, packs[0], BEGIN)
        assert reading.wait(20)
        reads.leave("dead")
        reads.leave("other")
        again = begin(reads, ("again", [0]), ("more", [0]))
        go_on.set()
        for trial in again:
            trial.take(packs[0], BEGIN)
        with pytest.raises(FitError):
            asked.result()
        for trial in (dead, other, *again):
            trial.reader.close()


def test_a_trial_that_has_not_joined_is_refused(cache):
    with (
        SharedReads(cache) as reads,
        pytest.raises(FitError, match=r"^the sweep knows no trial stranger$"),
    ):
        Trial(reads, "stranger", [0])


def test_nobody_else_may_talk_to_it(cache):
    with SharedReads(cache) as reads:
        folder = Path(reads.address).parent
        assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()


# --- with real processes --------------------------------------------------------------------------


def trial_process(parent: int, cache: str, address: str, name: str, planes, mouth, stop) -> None:
    """Takes all packs of an epoch and measures; "dies" stops after the first, and stays."""
    settle(parent)
    torch.set_num_threads(1)
    packs, measured = packs_of(Path(cache))
    reader = open_shared(cache, address, name, BEGIN)
    into = filled(reader, planes)
    digests = []
    for order, pack in [((0, i), pack) for i, pack in enumerate(packs)] + [
        (None, p) for p in measured
    ]:
        reader.read_documents(pack.documents, pack.starts, planes, into, order=order)
        digests.append([raw(part).tobytes() for part in into.values()])
        if name == "dies":
            mouth.send("here")
            time.sleep(600)
    mouth.send((digests, reader.bytes_read))


def test_processes_share_a_read_and_one_that_is_killed_is_not_waited_for(cache):
    planes = {"a": [4, 0], "b": [0, 2], "dies": [2]}
    context = get_context("spawn")
    with SharedReads(cache) as reads, ExitStack() as ends:
        for name in planes:
            reads.join(name, "group", planes[name], ROWS)
        ears, processes = {}, {}
        for name in planes:
            ears[name], mouth = context.Pipe(duplex=False)
            processes[name] = context.Process(
                target=trial_process,
                args=(os.getpid(), str(cache), reads.address, name, planes[name], mouth, None),
            )
            processes[name].start()
            ends.callback(processes[name].kill)
            mouth.close()
        assert ears["dies"].recv() == "here"
        assert not ears["a"].poll(0.3)
        os.kill(processes["dies"].pid, signal.SIGKILL)
        found = {name: ears[name].recv() for name in "ab"}
        for name, process in processes.items():
            process.join()
            reads.leave(name)
            process.close()
            ears[name].close()
        ends.pop_all()
        counts = reads.counts()
    packs, measured = packs_of(cache)
    for name in "ab":
        alone = CacheReader(cache)
        into = filled(alone, planes[name])
        digests, own = found[name]
        assert own == 0
        for pack, digest in zip([*packs, *measured], digests, strict=True):
            alone.read_documents(pack.documents, pack.starts, planes[name], into)
            assert [raw(part).tobytes() for part in into.values()] == digest
        assert counts["by_trial"][name]["served"] == alone.bytes_read
    # Three planes, and each pack once.
    assert counts["bytes_read"] == alone.bytes_read * 3 // 2
