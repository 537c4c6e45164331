"""Overlap does not matter: what is written is what a plain loop computes; every end is clean."""

import gc
import json
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from conftest import chat_rows, tiny_build, write_jsonl

from dflash_cache import build, extraction, landing, ledger, store
from dflash_cache.attempt import Attempt, EncodedSample
from dflash_cache.buckets import UnitPlan, count_slots, plan_batches
from dflash_cache.build import build_cache
from dflash_cache.checks import ENOUGH
from dflash_cache.codec import Codec, plain_codec
from dflash_cache.config import BuildConfig
from dflash_cache.errors import DFlashError, ProofError
from dflash_cache.extraction import HOST_BATCHES, Budget, extract
from dflash_cache.landing import Buffers, HostBuffer
from dflash_cache.plan import Plan, plan_only
from dflash_cache.proofs import pad_right
from dflash_cache.reader import CacheReader
from dflash_cache.schema import UnitRecord, sealed_json
from dflash_cache.sweep import leftovers
from dflash_cache.target import Target
from dflash_cache.unit_reader import stored_states
from dflash_cache.verify import verify_cache
from dflash_cache.weights import load_target
from dflash_cli.main import main


@pytest.fixture(autouse=True)
def no_flushing(monkeypatch):
    """Flushing takes most of the time and shows nothing here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(str(tiny_target), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", chat_rows(24))


@pytest.fixture(scope="module")
def planned(tiny_target, data, tmp_path_factory) -> Plan:
    """Eight units or more, of several batches each."""
    out = tmp_path_factory.mktemp("plan") / "out"
    plan = plan_only(tiny_build(tiny_target, data, out, unit_tokens=200))
    assert len(plan.units) >= 8
    return plan


class Told:
    """A progress that remembers what it was told."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.bytes = 0
        self.units: list[str] = []

    def update(self, tokens: int) -> None:
        self.tokens.append(tokens)

    def wrote(self, count: int) -> None:
        self.bytes += count

    def committed(self, unit: UnitPlan) -> None:
        self.units.append(unit.name)


@pytest.fixture
def begun(tmp_path, planned) -> Path:
    ledger.begin(tmp_path / "cache", planned.identity, {})
    return tmp_path / "cache"


def run(
    root: Path,
    target: Target,
    plan: Plan,
    *,
    units: object = None,
    codec: Codec | None = None,
    batch_tokens: int = 128,
    no_proof: tuple[str, ...] = ("probe",),
    **options,
) -> Told:
    told = Told()
    config = BuildConfig(target="", data="", out=root, batch_tokens=batch_tokens, no_proof=no_proof)
    extract(
        target,
        plan,
        plan.units if units is None else units,
        config,
        codec or plain_codec(plan.identity),
        told,
        **options,
    )
    return told


def lengths_of(plan: Plan, unit: UnitPlan) -> list[int]:
    return [plan.samples.lengths[member] for member in unit.members]


def records_of(root: Path, plan: Plan) -> dict[str, UnitRecord]:
    return ledger.committed_units(root, fingerprint=plan.identity.fingerprint)


def assert_clean(root: Path, plan: Plan, *, committed: int) -> None:
    """The first units are committed, nothing is left of any other, and no thread goes on."""
    records = records_of(root, plan)
    assert list(records) == [unit.name for unit in plan.units[:committed]]
    assert leftovers(root) == []
    live = {root / record.folder for record in records.values()}
    assert set(root.glob("units/*/*")) == live
    assert not [thread for thread in threading.enumerate() if "writer" in thread.name]


class Changed(Target):
    """A target whose states go through a function of the forward's number, from 0."""

    def __init__(self, target: Target, change: Callable[[int, list], list]) -> None:
        super().__init__(**vars(target))
        object.__setattr__(self, "change", change)
        object.__setattr__(self, "calls", [])

    def hidden_states(self, input_ids, layer_ids):
        self.calls.append(tuple(input_ids.shape))
        states = [s.clone() for s in super().hidden_states(input_ids, layer_ids)]
        return self.change(len(self.calls) - 1, states)


def forward_of(plan: Plan, unit: int, *, batch_tokens: int = 128) -> int:
    """Number of the first forward of a unit."""
    return sum(
        len(plan_batches(lengths_of(plan, before), batch_tokens=batch_tokens))
        for before in plan.units[:unit]
    )


# --- what is written ----------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["bf16", "lossless", "fp8"])
@pytest.mark.parametrize("batch_tokens", [64, 128, 4096])
def test_what_is_stored_is_what_a_plain_loop_computes(
    begun, target, planned, encoding, batch_tokens, monkeypatch
):
    monkeypatch.setattr(landing, "SPELT_TOKENS", 50)
    plan = replace(planned, identity=replace(planned.identity, encoding=encoding))
    assert_stored_as_by_a_plain_loop(begun, target, plan, batch_tokens=batch_tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("encoding", ["bf16", "lossless", "fp8"])
def test_what_lands_from_a_gpu_is_what_a_plain_loop_computes_there(
    begun, tiny_target, planned, encoding, monkeypatch
):
    """Over streams and pinned buffers that go round many times."""
    monkeypatch.setattr(landing, "SPELT_TOKENS", 50)
    target = load_target(str(tiny_target), dtype="float32", device="cuda")
    plan = replace(planned, identity=replace(planned.identity, encoding=encoding))
    assert_stored_as_by_a_plain_loop(begun, target, plan, batch_tokens=64)


def assert_stored_as_by_a_plain_loop(
    begun: Path, target: Target, plan: Plan, *, batch_tokens: int
) -> None:
    told = run(begun, target, plan, batch_tokens=batch_tokens)
    records = records_of(begun, plan)
    assert list(records) == [unit.name for unit in plan.units] == told.units
    for unit in plan.units:
        samples = [plan.samples.samples[member] for member in unit.members]
        record, slots = records[unit.name], 0
        for rows in plan_batches(lengths_of(plan, unit), batch_tokens=batch_tokens):
            ids = pad_right([torch.from_numpy(samples[row].input_ids).long() for row in rows])
            slots += ids.numel()
            states = target.hidden_states(ids, plan.identity.target_layer_ids)
            for row, position in enumerate(rows):
                own = torch.stack([s[row, : samples[position].length] for s in states])
                codec = plain_codec(plan.identity)
                wanted = codec.decode("", codec.encode("", own.bfloat16())).cpu()
                found = stored_states(begun, record, plan.identity, position)
                assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))
        assert record.slots == slots
    assert sum(told.tokens) == plan.samples.tokens
    assert told.bytes == sum(record.bytes for record in records.values())


def test_records_keep_the_norms_of_their_states(begun, target, planned):
    run(begun, target, planned)
    for record in records_of(begun, planned).values():
        planes = stored_states_of(begun, record, planned)
        for number, plane in enumerate(planned.identity.planes):
            norms = [states[number].float().norm(dim=-1) for states in planes]
            medians = [float(own.median()) for own in norms]
            wanted = {
                "median": float(np.median(medians)),
                "least": min(medians),
                "greatest": max(medians),
                "loudest": max(float(own.max()) for own in norms),
            }
            assert record.norms[plane] == pytest.approx(wanted, rel=1e-5)


def stored_states_of(root: Path, record: UnitRecord, plan: Plan) -> list[torch.Tensor]:
    positions = range(len(record.lengths))
    return [stored_states(root, record, plan.identity, position) for position in positions]


def test_a_record_of_an_older_version_is_read_as_one_that_measured_nothing(begun, target, planned):
    run(begun, target, planned, units=planned.units[:1])
    path = begun / "commits" / "u000000.json"
    older = ledger.read_record(path).to_dict()
    del older["norms"], older["slots"]
    path.write_bytes(sealed_json(older))
    record = records_of(begun, planned)["u000000"]
    assert (record.norms, record.slots) == ({}, 0)
    run(begun, target, planned, units=planned.units[1:])
    records = records_of(begun, planned)
    assert len(records) == len(planned.units)
    assert ledger.padding_share([record]) is None
    assert ledger.padding_share(records.values()) == ledger.padding_share(
        [record for name, record in records.items() if name != "u000000"]
    )


def test_the_share_of_padding_is_in_the_seal_and_in_info(tmp_path, tiny_target, data):
    config = tiny_build(tiny_target, data, tmp_path / "out", batch_tokens=300)
    plan = plan_only(config)
    manifest = build_cache(config)
    slots = sum(
        count_slots(lengths_of(plan, unit), plan_batches(lengths_of(plan, unit), batch_tokens=300))
        for unit in plan.units
    )
    assert manifest.padding_share == pytest.approx(1 - plan.samples.tokens / slots)
    assert 0 < manifest.padding_share < 0.2

    def told() -> dict:
        result = CliRunner().invoke(main, ["cache", "info", str(config.out), "--json"])
        return json.loads(result.stdout)

    assert told()["padding_share"] == manifest.padding_share
    (config.out / "manifest.json").unlink()
    assert told()["padding_share"] == pytest.approx(manifest.padding_share)


# --- overlap ------------------------------------------------------------------------------------


def test_the_next_unit_is_computed_while_one_is_committed(begun, target, planned):
    """A commit waits here for a forward of the unit behind it, which a plain loop never begins."""
    reached = [threading.Event() for _ in planned.units]

    def units() -> Iterator[UnitPlan]:
        for unit, event in zip(planned.units, reached, strict=True):
            event.set()
            yield unit

    def publish(root: Path, record: UnitRecord) -> UnitRecord:
        number = int(record.unit[1:])
        if number + 1 < len(reached):
            assert reached[number + 1].wait(timeout=20)
        return store.commit(root, record)

    told = run(begun, target, planned, units=units(), batch_tokens=4096, publish=publish)
    assert told.units == [unit.name for unit in planned.units]


def test_host_memory_is_that_of_three_batches_however_slow_the_disk_is(
    begun, target, planned, monkeypatch
):
    out, most, real = set(), [], Buffers.take

    def taken(self):
        buffer = real(self)
        out.add(id(buffer))
        most.append(len(out))
        return buffer

    def given_back(self, buffer):
        out.discard(id(buffer))
        self.free.put(buffer)

    slow = Attempt._write_plane

    def slowly(*args):
        time.sleep(0.002)
        slow(*args)

    monkeypatch.setattr(Buffers, "take", taken)
    monkeypatch.setattr(Buffers, "give_back", given_back)
    monkeypatch.setattr(Attempt, "_write_plane", slowly)
    run(begun, target, planned, batch_tokens=64)
    assert max(most) == HOST_BATCHES == 3
    assert not out


def test_memory_is_made_once_for_batches_of_one_budget():
    buffer = HostBuffer(pinned=False)
    tensors = [torch.randn(3, 5), torch.arange(7, dtype=torch.uint8), torch.zeros(0)]
    places = buffer.places(tensors, room=2.0)
    assert [(p.shape, p.dtype) for p in places] == [(t.shape, t.dtype) for t in tensors]
    for place, tensor in zip(places, tensors, strict=True):
        place.copy_(tensor)
    assert all(torch.equal(place, tensor) for place, tensor in zip(places, tensors, strict=True))
    address, size = buffer.memory.data_ptr(), len(buffer.memory)
    buffer.places([torch.zeros(size, dtype=torch.uint8)], room=1.0)
    assert buffer.memory.data_ptr() == address
    buffer.places([torch.zeros(size + 1, dtype=torch.uint8)], room=1.0)
    assert len(buffer.memory) > size


def test_what_a_gpu_may_still_write_to_stays_when_a_batch_is_dropped_unread():
    buffers = Buffers(2, pinned=False)
    taken = buffers.take()
    (place,) = taken.places([torch.zeros(9)], room=1.0)
    memory = weakref.ref(place.untyped_storage())
    del taken, place
    gc.collect()
    assert memory() is not None


def test_a_thread_waits_for_a_batch_on_the_gpu_that_it_comes_from(monkeypatch):
    """The device of a new thread is the first one, whatever the main thread has chosen."""
    on, waited = [torch.device("cuda:0")], []

    @contextmanager
    def current(device):
        on.append(device)
        yield
        on.pop()

    class Arrived:
        device = torch.device("cuda:1")

        def synchronize(self):
            waited.append(on[-1])

    monkeypatch.setattr(torch.cuda, "device", current)
    facts = torch.zeros(1, 1, 5)
    landed = landing.Landed(
        samples=[],
        width=0,
        spelt=EncodedSample(parts=[], errors=[]),
        facts=facts,
        arrived=Arrived(),
        release=lambda: None,
    )
    assert np.array_equal(landed.wait(), facts)
    assert waited == [torch.device("cuda:1")]


# --- failures -----------------------------------------------------------------------------------


def test_a_failure_of_the_writer_is_the_main_threads_own_and_soon(begun, target, planned):
    """The units would never end."""
    asked: list[str] = []

    def units() -> Iterator[UnitPlan]:
        while True:
            for unit in planned.units:
                asked.append(unit.name)
                yield unit

    failure = RuntimeError("the third record cannot be made")

    def publish(root: Path, record: UnitRecord) -> UnitRecord:
        if record.unit == "u000002":
            raise failure
        return store.commit(root, record)

    def failing(root: Path, record: UnitRecord) -> UnitRecord:
        try:
            return publish(root, record)
        except RuntimeError:
            import shutil

            shutil.rmtree(root / record.folder)
            raise

    with pytest.raises(RuntimeError) as told:
        run(begun, target, planned, units=units(), publish=failing)
    assert told.value is failure
    assert len(asked) <= 3 + HOST_BATCHES + 1
    assert_clean(begun, planned, committed=2)


def test_a_disk_that_fails_in_the_last_unit_is_told_too(begun, target, planned, monkeypatch):
    real, last = os.link, planned.units[-1].name

    def fails(source, to, *rest, **options):
        if str(to).endswith(f"{last}.json"):
            raise OSError("input/output error")
        return real(source, to, *rest, **options)

    monkeypatch.setattr(os, "link", fails)
    with pytest.raises(OSError, match="input/output error"):
        run(begun, target, planned)
    assert list(records_of(begun, planned)) == [unit.name for unit in planned.units[:-1]]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_when_the_main_thread_ends_whole_units_are_kept_and_half_ones_are_not(
    begun, target, planned, kind
):
    def stops(number: int, states: list) -> list:
        if number == forward_of(planned, 3) + 1:
            raise kind
        return states

    with pytest.raises(kind):
        run(begun, Changed(target, stops), planned)
    assert_clean(begun, planned, committed=3)
    run(begun, target, planned, units=planned.units[3:])
    assert_clean(begun, planned, committed=len(planned.units))


def interrupted_while_the_writer_hangs(begun, target, planned, monkeypatch, *, times, batch_tokens):
    """Run until the writer hangs on the disk, which it does until so many interrupts have come."""
    hangs, goes_on, real = threading.Event(), threading.Event(), Attempt._write_plane

    def hanging(*args):
        hangs.set()
        assert goes_on.wait(timeout=20)
        real(*args)

    def interrupt() -> None:
        assert hangs.wait(timeout=20)
        for _ in range(times):
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        goes_on.set()

    monkeypatch.setattr(Attempt, "_write_plane", hanging)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(begun, target, planned, batch_tokens=batch_tokens)
    thread.join()


def test_an_interrupt_while_the_disk_is_waited_for_ends_cleanly(
    begun, target, planned, monkeypatch
):
    """The writer hangs, all buffers are full, and the main thread waits for one."""
    interrupted_while_the_writer_hangs(
        begun, target, planned, monkeypatch, times=1, batch_tokens=64
    )
    assert_clean(begun, planned, committed=len(records_of(begun, planned)))
    assert len(records_of(begun, planned)) < len(planned.units)


def test_who_interrupts_twice_waits_for_no_more_units(begun, target, planned, monkeypatch):
    """What is whole already is not written any more either."""
    interrupted_while_the_writer_hangs(
        begun, target, planned, monkeypatch, times=2, batch_tokens=4096
    )
    assert_clean(begun, planned, committed=1)


# --- memory -------------------------------------------------------------------------------------


def out_of_memory(*numbers: int) -> Callable[[int, list], list]:
    def change(number: int, states: list) -> list:
        if number in numbers:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB")
        return states

    return change


def test_out_of_memory_halves_the_batches_once_and_says_so(
    tmp_path, begun, target, planned, capsys
):
    fails = forward_of(planned, 1)
    limited = Changed(target, out_of_memory(fails))
    told = run(begun, limited, planned)
    assert told.units == [unit.name for unit in planned.units]
    assert_clean(begun, planned, committed=len(planned.units))
    assert "out of memory with batches of 128 token slots (" in (err := capsys.readouterr().err)
    assert "CUDA out of memory. Tried to allocate 7.00 GiB" in err
    assert "from now on they have 64." in err
    assert err.count("out of memory with") == 1
    before, after = limited.calls[:fails], limited.calls[fails + 1 :]
    assert any(rows * width > 64 and rows > 1 for rows, width in before)
    assert all(rows * width <= 64 or rows == 1 for rows, width in after)

    ledger.begin(tmp_path / "whole", planned.identity, {})
    run(tmp_path / "whole", target, planned)
    one, other = records_of(begun, planned), records_of(tmp_path / "whole", planned)
    for name in one:
        assert one[name].sample_ids == other[name].sample_ids
        found = stored_states_of(begun, one[name], planned)
        wanted = stored_states_of(tmp_path / "whole", other[name], planned)
        for a, b in zip(found, wanted, strict=True):
            # Two roundings to 8 bits may fall on different sides.
            torch.testing.assert_close(a.float(), b.float(), rtol=2**-7, atol=1e-4)


def test_out_of_memory_in_the_encoding_is_the_same(begun, target, planned, monkeypatch):
    real, calls = extraction.Lander.land, []

    def short(self, *args, **options):
        calls.append(options["slots"])
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        return real(self, *args, **options)

    monkeypatch.setattr(extraction.Lander, "land", short)
    run(begun, target, planned)
    assert calls[:2] == [128, 128]
    assert set(calls[2:]) == {64}
    assert_clean(begun, planned, committed=len(planned.units))


def test_out_of_memory_again_is_an_error_that_names_the_option(begun, target, planned):
    first = forward_of(planned, 2, batch_tokens=512)
    full = Changed(target, out_of_memory(first, first + 1))
    with pytest.raises(
        DFlashError, match=r"out of memory again.* 256 token slots .*give --batch-to"
    ):
        run(begun, full, planned, batch_tokens=512)
    assert full.calls[-1][0] > 1
    assert_clean(begun, planned, committed=2)


def test_a_lone_sample_that_never_fits_is_not_blamed_on_the_batches(begun, target, planned):
    """However small batches are, it is one."""
    longest = max(lengths_of(planned, planned.units[0]))
    full = Changed(target, out_of_memory(0, 1))
    with pytest.raises(DFlashError) as told:
        run(begun, full, planned, batch_tokens=longest // 2)
    assert f"with one sample of {longest} tokens (" in str(told.value)
    assert "--batch-tokens" not in str(told.value)
    assert f"--max-length {longest - 1} or less" in str(told.value)


def test_a_budget_that_was_halved_stays_so_for_the_workers_life(begun, target, planned):
    budget = Budget(128)
    run(begun, Changed(target, out_of_memory(0)), planned, units=planned.units[:2], budget=budget)
    limited = Changed(target, out_of_memory())
    run(begun, limited, planned, units=planned.units[2:], budget=budget)
    assert all(rows * width <= 64 or rows == 1 for rows, width in limited.calls)
    assert_clean(begun, planned, committed=len(planned.units))


# --- checks -------------------------------------------------------------------------------------


def one_nan(states: list) -> list:
    states[-1][0, 2, 5] = torch.nan
    return states


def test_a_fault_in_a_later_unit_commits_those_before_and_names_sample_and_layer(
    begun, target, planned
):
    bad = forward_of(planned, 2)
    sample = planned.samples.samples[planned.units[2].members[0]].sample_id
    spoilt = Changed(target, lambda number, states: one_nan(states) if number == bad else states)
    layer = planned.identity.target_layer_ids[-1]
    with pytest.raises(ProofError, match=f"sample {sample}, target layer {layer}: NaN or infinity"):
        run(begun, spoilt, planned)
    assert_clean(begun, planned, committed=2)


def louder_from(first: int, factor: float) -> Callable[[int, list], list]:
    return lambda number, states: [s * factor for s in states] if number >= first else states


def test_states_that_change_their_scale_within_a_build_stop_it(begun, target, planned):
    spoilt = Changed(target, louder_from(forward_of(planned, 3), 4.5))
    with pytest.raises(ProofError, match=r"sample \d+, target layer 1: .*median of 3 units"):
        run(begun, spoilt, planned)
    assert_clean(begun, planned, committed=3)


def test_another_worker_is_judged_by_the_units_that_are_committed(begun, target, planned):
    run(begun, target, planned, units=planned.units[:3])
    with pytest.raises(ProofError, match=r"no longer computes what it did"):
        run(begun, Changed(target, louder_from(0, 0.2)), planned, units=planned.units[3:])
    assert_clean(begun, planned, committed=3)


def test_norms_are_learnt_from_units_that_could_be_judged_and_from_others_where_there_are_none(
    begun, target, planned
):
    run(begun, target, planned)
    fingerprint = planned.identity.fingerprint
    sizes = {unit.name: len(unit.members) for unit in planned.units}
    for least in sorted({1, *sizes.values(), max(sizes.values()) + 1}):
        large = [name for name in sorted(sizes) if sizes[name] >= least]
        for count in (1, 3):
            found = ledger.first_norms(begun, fingerprint, count=count, samples=least)
            assert list(found) == (large or sorted(sizes))[:count]


def test_a_fault_in_small_units_is_not_learnt_by_the_next_worker_or_the_next_run(
    begun, target, planned
):
    """Whoever comes anew sees units that nobody has judged: they are committed all the same."""
    first, *others = sorted(planned.units, key=lambda unit: -len(unit.members))
    run(begun, target, planned, units=[first])
    assert len(first.members) >= ENOUGH
    small = [replace(unit, members=unit.members[:1]) for unit in others]
    louder = Changed(target, louder_from(0, 3.0))
    for unit in small:
        run(begun, louder, planned, units=[unit])
    with pytest.raises(ProofError, match=r"\(median of 1 units\)"):
        run(begun, louder, planned, units=[replace(others[0], name="u9", members=first.members)])


def test_a_build_that_goes_on_with_other_norms_stops(
    tmp_path, tiny_target, target, data, monkeypatch
):
    config = tiny_build(tiny_target, data, tmp_path / "out", no_proof=("probe",))
    build_cache(config)
    records = CacheReader(config.out).records
    (config.out / "manifest.json").unlink()
    kept, *lost = sorted((config.out / "commits").iterdir())
    for path in lost:
        path.unlink()
    real = extraction.padded_states

    def louder(*args):
        return [states * 3 for states in real(*args)]

    monkeypatch.setattr(extraction, "padded_states", louder)
    with pytest.raises(ProofError, match=r"\d others of \d samples.*median of 1 units") as told:
        build_cache(config)
    # Those of few samples could not be judged at once, and are named.
    spoilt = {path.stem for path in (config.out / "commits").iterdir()} - {kept.stem}
    assert set(re.findall(r"u\d+", str(told.value))) == spoilt
    assert sum(len(records[unit].sample_ids) for unit in spoilt) < ENOUGH
    build_cache(replace(config, no_proof=("probe", "norms")))
    assert {"norms", "probe"} <= set(ledger.read_manifest(config.out).proofs["skipped"])


def test_proofs_that_are_left_out_stop_nothing(begun, target, planned):
    nan = Changed(target, lambda number, states: one_nan(states) if number == 0 else states)
    run(begun, nan, planned, units=planned.units[:2], no_proof=("states", "norms", "probe"))
    loud = Changed(target, louder_from(0, 100.0))
    run(begun, loud, planned, units=planned.units[2:], no_proof=("norms", "probe"))
    assert_clean(begun, planned, committed=len(planned.units))


def test_a_whole_build_is_verified_and_read_as_ever(tmp_path, tiny_target, data):
    config = tiny_build(tiny_target, data, tmp_path / "out", final_hidden=True)
    build.build_cache(config)
    assert verify_cache(config.out)["ok"]
    reader = CacheReader(config.out)
    assert {set(record.norms) == set(reader.identity.planes) for record in reader.records.values()}
