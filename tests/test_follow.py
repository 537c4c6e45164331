"""The course over a growing cache: the same packs whatever the timing, and an end with a reason."""

import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
from conftest import tiny_build
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_builder import SlowBuilder
from torch.distributed import HashStore, TCPStore

from dflash_cache import disk, ledger
from dflash_cache.build import build_cache
from dflash_cache.errors import CacheError
from dflash_cache.growing import open_cache
from dflash_fit import follow
from dflash_fit.course import CourseEnded, Position, ahead, located
from dflash_fit.errors import FitError
from dflash_fit.follow import Followed
from dflash_fit.lookout import ORDER_FILE, Lookout, read_order, write_order
from dflash_fit.news import Entry, News
from dflash_fit.packing import Pack, plan_epoch
from dflash_fit.windows import Windows

BUDGET, SEED, WINDOW = 256, 5, 2
SOON = 10.0  # seconds, of which a test needs milliseconds
QUICK = {"token_budget": BUDGET, "seed": SEED, "window": WINDOW, "every": 0.002}


@dataclass(frozen=True)
class At:
    """What a course asks of a sample."""

    unit: str


@dataclass
class Arrivals:
    """A reader that finds what a script says, look by look; the last look finds the seal."""

    samples: Sequence[str]  # the unit of each
    lengths: list[int]
    looks: list[list[str]]
    seals: bool = True
    root: str = "nowhere"
    sealed: bool = False
    records: dict[str, None] = field(default_factory=dict)

    @property
    def located(self) -> list[At]:
        return [At(unit) for unit in self.samples]

    def refresh(self) -> list[str]:
        if not self.looks:
            self.sealed = self.seals
            return []
        found = self.looks.pop(0)
        self.records.update(dict.fromkeys(found))
        return found


def naive_packs(reader, documents: Sequence[int], order: Sequence[str]) -> Windows:
    """The first epoch, planned in one go when all is known."""
    windows = Windows(reader.lengths, token_budget=BUDGET, seed=SEED, packs=WINDOW)
    for unit in order:
        windows.add([d for d in documents if reader.located[d].unit == unit])
    windows.finish()
    return windows


def packs_of(course: Followed, *, epoch: int = 0) -> list[Pack]:
    """All packs, each waited for; until the epoch or the course ends."""
    packs: list[Pack] = []
    try:
        while True:
            packs.append(course.pack(epoch, len(packs)))
    except (IndexError, CourseEnded):
        return packs


def reason_of(course: Followed, epoch: int = 0, index: int = 10**6):
    with pytest.raises(CourseEnded) as told:
        course.pack(epoch, index)
    return told.value.reason


def taken(course: Followed) -> list[str]:
    """The units of its packs, the last of which are planned by now."""
    with course.changed:
        return list(course.taken)


def wait_until(condition) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


# --- which packs ----------------------------------------------------------------------------------


@st.composite
def growth(draw):
    """Samples in units, the order of commits, and how many units each look finds."""
    units = [f"u{n:06d}" for n in range(draw(st.integers(1, 8)))]
    samples = draw(st.lists(st.sampled_from(units), min_size=1, max_size=40))
    units = sorted(set(samples))
    lengths = draw(st.lists(st.integers(1, BUDGET), min_size=len(samples), max_size=len(samples)))
    order = draw(st.permutations(units))
    training = draw(st.sets(st.sampled_from(range(len(samples))), min_size=1))
    cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=6)))
    looks = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    return samples, lengths, order, sorted(training), looks


@settings(max_examples=40)
@given(growth())
def test_the_packs_depend_on_the_order_and_never_on_when_units_came(case):
    samples, lengths, order, training, looks = case
    reader = Arrivals(samples, lengths, [list(look) for look in looks])
    wanted = naive_packs(reader, training, order)
    with Followed(reader, training, **QUICK) as course:
        assert packs_of(course) == wanted.packs
        assert course.length(0) == len(wanted.packs)
        assert course.taken == order
        documents = [d for pack in wanted.packs for d in pack.documents]
        assert sorted(documents) == training


@settings(max_examples=20)
@given(growth(), st.data())
def test_a_given_order_comes_first_and_the_rest_in_the_order_of_the_commits(case, data):
    samples, lengths, order, training, looks = case
    given_order = data.draw(st.permutations(order))[: data.draw(st.integers(0, len(order)))]
    reader = Arrivals(samples, lengths, [list(look) for look in looks])
    with Followed(reader, training, order=given_order, **QUICK) as course:
        found = packs_of(course)
        left = [unit for unit in order if unit not in given_order]
        assert course.taken == [*given_order, *left]
        assert found == naive_packs(reader, training, course.taken).packs


def test_epochs_behind_the_first_are_planned_over_all_documents(tiny_cache):
    reader = open_cache(tiny_cache, follow=True)
    documents = range(3, len(reader.lengths))
    with Followed(reader, documents, **QUICK) as course:
        wanted = plan_epoch(documents, reader.lengths, token_budget=BUDGET, seed=SEED, epoch=1)
        assert packs_of(course, epoch=1) == wanted
        assert course.length(1) == len(wanted)
        length = course.length(0)
        assert course.planned.length(0) == pytest.approx(length, abs=2)
        place = ahead(course, Position(epoch=0, index=0), length + 2)
        assert (place.epoch, place.index) == (1, 2)
        with pytest.raises(IndexError):
            course.pack(0, length)


def test_a_place_behind_an_end_that_nobody_knew_is_found_once_it_is_known(builder):
    reader = open_cache(builder.root, follow=True)
    with builder.at_work(), Followed(reader, range(len(reader.lengths)), **QUICK) as course:
        place = ahead(course, Position(epoch=0, index=0), 50)
        assert (place.epoch, place.index) == (0, 50)
        threading.Timer(0.05, builder.finish).start()
        found = located(course, place)
        whole = course.length(0) + course.length(1)
        assert (found.epoch, found.index) == (
            (1, 50 - course.length(0)) if whole > 50 else (2, 50 - whole)
        )


@pytest.fixture
def builder(tiny_cache: Path, tmp_path: Path) -> SlowBuilder:
    return SlowBuilder(tiny_cache, tmp_path / "cache")


def test_a_slow_build_gives_the_packs_of_its_sealed_cache_in_the_recorded_order(builder, tmp_path):
    order = builder.units[1::2] + builder.units[::2]
    reader, packs = open_cache(builder.root, follow=True), []
    documents = range(len(reader.lengths))
    with builder.at_work(), Followed(reader, documents, **QUICK) as course:
        course.keep_order(tmp_path / ORDER_FILE)
        for count, unit in enumerate(order, 1):
            builder.commit(unit)
            wait_until(lambda wanted=count: len(taken(course)) == wanted)
            while len(packs) < len(course.windows.packs):
                packs.append(course.pack(0, len(packs)))
                for document in packs[-1].documents:
                    reader.tokens(document)  # each is there
        assert course.length(0) is None
        builder.seal()
        packs += [course.pack(0, i) for i in range(len(packs), len(packs_of(course)))]
    assert read_order(tmp_path / ORDER_FILE, reader) == order
    assert packs == naive_packs(reader, documents, order).packs
    # By the times of the records, and by the order in the file where these are lost.
    for cache, recorded in ((builder.root, []), (builder.source, order)):
        sealed = open_cache(cache, follow=True)
        with Followed(sealed, documents, order=recorded, **QUICK) as course:
            assert packs_of(course) == packs


def test_a_resumed_run_takes_up_its_order_although_the_records_are_in_another(builder, tmp_path):
    first, second, third, *_ = builder.units
    for unit in (third, first):
        builder.commit(unit)
    reader = open_cache(builder.root, follow=True)
    documents = range(len(reader.lengths))
    with builder.at_work(), Followed(reader, documents, **QUICK) as course:
        course.keep_order(tmp_path / ORDER_FILE)
        wait_until(lambda: taken(course) == [third, first])
        course.stop()
        before = packs_of(course)
    builder.commit(second, at=1)  # older than those that were trained on
    builder.finish()
    again = open_cache(builder.root, follow=True)
    order = read_order(tmp_path / ORDER_FILE, again)
    with Followed(again, documents, order=order, **QUICK) as course:
        assert packs_of(course)[: len(before)] == before
        assert course.taken[:3] == [third, first, second]


def test_a_real_build_is_followed_from_before_its_folder_is_there_to_its_seal(
    tiny_cache, tiny_target, tiny_data, tmp_path, monkeypatch
):
    real = disk.create_file

    def create(path: Path, payload: bytes) -> bool:
        time.sleep(0.02)
        return real(path, payload)

    monkeypatch.setattr(disk, "create_file", create)
    out = tmp_path / "cache"
    build = threading.Timer(
        0.1, build_cache, args=(tiny_build(tiny_target, tiny_data, out, no_proof=("probe",)),)
    )
    build.start()
    reader = open_cache(out, follow=True)
    with Followed(reader, range(len(reader.lengths)), **QUICK) as course:
        documents = [document for pack in packs_of(course) for document in pack.documents]
        found = [(document, reader.tokens(document)[0].tolist()) for document in documents]
    build.join()
    sealed = open_cache(tiny_cache, follow=False)
    assert sorted(found) == [(i, sealed.tokens(i)[0].tolist()) for i in range(len(sealed.lengths))]


# --- the order on disk ----------------------------------------------------------------------------


def test_the_order_is_on_disk_before_a_pack_of_its_units_is_handed_out(builder, tmp_path):
    path = tmp_path / ORDER_FILE
    reader = open_cache(builder.root, follow=True)
    with builder.at_work(), Followed(reader, range(len(reader.lengths)), **QUICK) as course:
        course.keep_order(path)
        assert json.loads(path.read_text()) == []
        threading.Thread(target=builder.finish).start()
        for index in range(len(naive_packs(reader, range(40), builder.units).packs)):
            units = {reader.located[d].unit for d in course.pack(0, index).documents}
            assert units <= set(json.loads(path.read_text()))


def test_no_pack_is_handed_out_where_its_order_cannot_be_written(builder, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    reader = open_cache(builder.root, follow=True)
    with builder.at_work(), Followed(reader, range(len(reader.lengths)), **QUICK) as course:
        course.keep_order(tmp_path / ORDER_FILE)
        monkeypatch.setattr(follow, "write_order", full)
        builder.finish()
        with pytest.raises(OSError, match="No space left"):
            course.pack(0, 0)
        assert course.windows.packs == []


def test_an_order_that_is_not_done_yet_is_not_forgotten(builder, tmp_path):
    path, order = tmp_path / ORDER_FILE, builder.units[::-1]
    write_order(path, order)
    builder.commit(order[0])
    reader = open_cache(builder.root, follow=True)
    with (
        builder.at_work(),
        Followed(reader, range(len(reader.lengths)), order=order, **QUICK) as course,
    ):
        course.keep_order(path)
        builder.commit(order[2])
        wait_until(lambda: taken(course) == order[:1] and len(reader.records) == 2)
        assert json.loads(path.read_text()) == order
        builder.commit(order[1])
        wait_until(lambda: taken(course) == order[:3])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "cannot be read"),
        ("{}", "not a list of units"),
        ("[1]", "not a list of units"),
        ('["u999999"]', "no unit u999999"),
        ('["u000001", "u000001"]', "u000001, or it is named twice"),
        (None, "cannot be read"),
    ],
)
def test_an_order_that_is_none_of_this_cache_is_refused(tiny_cache, tmp_path, text, told):
    path = tmp_path / ORDER_FILE
    if text is not None:
        path.write_text(text)
    with pytest.raises(FitError, match=told) as error:
        read_order(path, open_cache(tiny_cache, follow=False))
    assert str(error.value).startswith(f"{path}: ")


# --- the end --------------------------------------------------------------------------------------


def test_a_builder_that_is_gone_is_told_and_what_is_planned_is_still_handed_out(builder):
    for unit in builder.units[:4]:
        builder.commit(unit)
    reader = open_cache(builder.root, follow=True)
    with Followed(reader, range(len(reader.lengths)), patience=0.05, **QUICK) as course:
        reason = reason_of(course)
        assert isinstance(reason, CacheError)
        assert str(reason) == (
            f"{builder.root}: 4 of {len(builder.units)} units are committed and nobody builds it "
            "any more; run `dflash cache build` again, then the same fit command goes on from here"
        )
        windows = Windows(reader.lengths, token_budget=BUDGET, seed=SEED, packs=WINDOW)
        for unit in builder.units[:4]:
            windows.add([i for i, at in enumerate(reader.located) if at.unit == unit])
        assert windows.packs
        assert packs_of(course) == windows.packs
        assert reason_of(course, epoch=1) is reason
        assert course.length(0) is None


def test_a_builder_that_is_there_is_waited_for_and_so_is_one_that_comes_back(builder):
    reader = open_cache(builder.root, follow=True)
    with Followed(reader, range(len(reader.lengths)), patience=1.0, **QUICK) as course:
        with builder.at_work():
            time.sleep(1.2)
        time.sleep(0.1)
        with builder.at_work():
            assert course.ended is None
            builder.finish()
        assert packs_of(course) == naive_packs(reader, range(40), builder.units).packs


def test_units_without_a_seal_are_not_the_end(builder):
    reader = open_cache(builder.root, follow=True)
    for unit in builder.units:
        builder.commit(unit)
    with Followed(reader, range(len(reader.lengths)), patience=0.05, **QUICK) as course:
        told = str(reason_of(course))
        assert f"{len(builder.units)} of {len(builder.units)} units are committed and" in told


def test_damage_ends_the_course_with_its_error_and_never_gives_its_unit(builder):
    first, second, *_ = builder.units
    builder.commit(first)
    reader = open_cache(builder.root, follow=True)
    with builder.at_work(), Followed(reader, range(len(reader.lengths)), **QUICK) as course:
        wait_until(lambda: taken(course) == [first])
        payload = ledger.record_path(builder.source, second).read_bytes()
        (builder.root / "commits" / f"{second}.json").write_bytes(payload[:-2] + b" }")
        reason = reason_of(course)
        assert isinstance(reason, CacheError)
        assert f"{second}.json: " in str(reason)
        assert course.taken == [first]


def test_a_stop_ends_the_course_behind_what_is_planned_and_names_no_reason(builder):
    for unit in builder.units[:4]:
        builder.commit(unit)
    reader = open_cache(builder.root, follow=True)
    with builder.at_work(), Followed(reader, range(len(reader.lengths)), **QUICK) as course:
        wait_until(lambda: len(taken(course)) == 4)
        planned = list(course.windows.packs)
        threading.Timer(0.05, course.stop).start()
        assert reason_of(course, index=len(planned)) is None
        assert packs_of(course) == planned


def test_a_stop_behind_the_end_changes_nothing(tiny_cache):
    reader = open_cache(tiny_cache, follow=True)
    with Followed(reader, range(len(reader.lengths)), **QUICK) as course:
        packs = packs_of(course)
        course.stop()
        assert packs_of(course) == packs
        assert course.pack(3, 0)


@pytest.mark.parametrize("how", ["stopped", "close"])
def test_one_who_waits_is_woken_when_the_run_ends_otherwise(builder, how):
    reader, stopped = open_cache(builder.root, follow=True), threading.Event()
    with builder.at_work(), Followed(reader, range(len(reader.lengths)), **QUICK) as course:
        act = stopped.set if how == "stopped" else course.close
        threading.Timer(0.05, act).start()
        began = time.monotonic()
        with pytest.raises(CourseEnded):
            course.pack(0, 0, stopped=stopped)
        assert 0.04 < time.monotonic() - began < SOON
    assert not any(thread.name == "follow" for thread in threading.enumerate())


# --- what may be measured -------------------------------------------------------------------------


def test_held_out_documents_are_measured_once_the_packs_before_came_from_their_windows(builder):
    held_out = list(range(0, 40, 3))
    documents = [d for d in range(40) if d not in held_out]
    reader = open_cache(builder.root, follow=True)
    windows = Windows(reader.lengths, token_budget=BUDGET, seed=SEED, packs=WINDOW)
    wanted, there = [], set()
    for unit in builder.units:
        there |= {d for d in held_out if reader.located[d].unit == unit}
        windows.add([d for d in documents if reader.located[d].unit == unit])
        wanted += [sorted(there)] * (len(windows.packs) - len(wanted))
    windows.finish()
    wanted += [held_out] * (len(windows.packs) - len(wanted))
    assert len({len(found) for found in wanted}) >= 3, "the test shows nothing"
    builder.finish()  # all are there, and still only these are measured
    with Followed(reader, documents, **QUICK) as course:
        found = [
            course.measurable(Position(epoch=0, index=index), held_out)
            for index in range(len(wanted) + 1)
        ]
        assert found == [[], *wanted]
        for place in ((1, 0), (1, 1), (2, 0), (0, len(wanted) + 1)):
            position = Position(epoch=place[0], index=place[1])
            assert course.measurable(position, held_out) == held_out


# --- people ---------------------------------------------------------------------------------------


def test_a_wait_is_told_once_in_a_while_and_when_it_is_over(builder, capsys):
    reader = open_cache(builder.root, follow=True)
    with builder.at_work(), Followed(reader, range(len(reader.lengths)), **QUICK) as course:
        waiter = threading.Thread(target=packs_of, args=(course,))
        waiter.start()
        wait_until(lambda: course.in_told_wait)
        builder.finish()
        waiter.join()
    lines = capsys.readouterr().err.splitlines()
    total = len(builder.units)
    assert len(lines) == 2
    wanted = f"waiting for the builder, all packs are taken: 0 of {total} units are committed"
    assert lines[0] == wanted
    assert lines[1] == f"going on: {total} of {total} units are committed"


def test_the_seconds_of_a_wait_are_counted_once_however_many_wait(builder):
    reader = open_cache(builder.root, follow=True)
    with builder.at_work(), Followed(reader, range(len(reader.lengths)), **QUICK) as course:
        waiters = [threading.Thread(target=course.pack, args=(0, index)) for index in range(3)]
        began = time.monotonic()
        for waiter in waiters:
            waiter.start()
        wait_until(lambda: course.waiting == 3)
        time.sleep(0.3)
        assert 0.3 <= course.waited_seconds <= time.monotonic() - began
        builder.finish()
        for waiter in waiters:
            waiter.join()
        counted = course.waited_seconds
        assert 0.3 <= counted <= time.monotonic() - began
        course.pack(0, 0)
        assert course.waited_seconds == pytest.approx(counted, abs=0.01)


# --- several ranks --------------------------------------------------------------------------------


def ranks(root: Path, store, count: int = 3, **options) -> list[Followed]:
    """One course for each rank, with readers of their own."""
    readers = [open_cache(root, follow=True) for _ in range(count)]
    return [
        Followed(
            reader,
            range(len(reader.lengths)),
            store=store,
            first=rank == 0,
            **{**QUICK, **options},
        )
        for rank, reader in enumerate(readers)
    ]


@pytest.mark.parametrize("kind", ["hash", "tcp"])
def test_all_ranks_have_the_same_packs_of_the_same_units(builder, kind):
    store = (
        HashStore()
        if kind == "hash"
        else TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=SOON))
    )
    courses = ranks(builder.root, store)
    with builder.at_work():
        for course in courses:
            course.start()
        for unit in builder.units[::-1]:
            builder.commit(unit)
            time.sleep(0.01)
        builder.seal()
        found = [packs_of(course) for course in courses]
    for course in courses:
        course.close()
    assert found[0] == found[1] == found[2]
    reader = courses[0].reader
    assert found[0] == naive_packs(reader, range(40), builder.units[::-1]).packs
    assert [course.length(0) for course in courses] == [len(found[0])] * 3


@pytest.mark.parametrize("rank", [0, 2])
def test_a_stop_on_any_rank_ends_all_at_the_same_pack(builder, rank):
    for unit in builder.units[:5]:
        builder.commit(unit)
    courses = ranks(builder.root, HashStore())
    with builder.at_work():
        for course in courses:
            course.start()
        courses[0].pack(0, 0)
        courses[rank].stop()
        found = [packs_of(course) for course in courses]
        reasons = [reason_of(course) for course in courses]
    for course in courses:
        course.close()
    assert found[0]
    assert found[0] == found[1] == found[2]
    assert reasons == [None] * 3


def test_all_ranks_hear_why_the_course_ends(builder):
    builder.commit(builder.units[0])
    courses = ranks(builder.root, HashStore(), patience=0.05)
    for course in courses:
        course.start()
    told = {str(reason_of(course)) for course in courses}
    for course in courses:
        course.close()
    assert len(told) == 1
    assert "nobody builds it any more" in told.pop()


@pytest.mark.parametrize("hears", ["a unit", "the seal"])
def test_a_rank_that_does_not_see_what_rank_0_sees_says_so(builder, monkeypatch, hears):
    monkeypatch.setattr(follow, "SHARED_PATIENCE", 0.05)
    store, unit = HashStore(), builder.units[0]
    if hears == "the seal":
        for name in builder.units:
            builder.commit(name)
    (course,) = ranks(builder.root, store, 1)
    course.first = False
    News(store).tell(Entry(units=(unit,), complete=hears == "the seal"))
    with course, pytest.raises(FitError, match="must lie in a folder that all share") as told:
        course.pack(0, 0)
    what = f"unit {unit} is committed" if hears == "a unit" else "the cache is sealed"
    assert f"rank 0 sees that {what}" in str(told.value)


def test_news_come_to_each_rank_once_and_in_order():
    store = HashStore()
    mine, theirs = News(store), News(store)
    entries = [Entry(units=("a", "b")), Entry(units=("c",), complete=True), Entry(ended=True)]
    assert theirs.hear() is None
    for entry in entries:
        mine.tell(entry)
    assert [theirs.hear() for _ in range(4)] == [*entries, None]
    alone = News(None)
    alone.tell(entries[0])
    alone.ask_to_stop()
    assert (alone.hear(), alone.asked_to_stop()) == (None, False)


def test_a_lookout_tells_the_units_of_an_order_only_when_all_before_them_are_there():
    reader = Arrivals(list("abcd"), [1] * 4, [["d"], ["b"], [], ["a"], ["c"]])
    lookout = Lookout(reader, ["b", "a", "d"])
    lookout.begin()
    found = [lookout.look() for _ in range(6)]
    assert found == [
        None,
        Entry(units=("b",)),
        None,
        Entry(units=("a", "d")),
        Entry(units=("c",)),
        Entry(units=(), complete=True),
    ]
    assert lookout.order == list("badc")


def test_at_no_moment_does_the_order_lack_a_unit_that_it_had():
    """Another thread writes it into the run folder at any moment."""
    lookout = Lookout(Arrivals(list("abcd"), [1] * 4, [["b", "a"], ["d"], ["c"]]), ["b", "a", "d"])
    lookout.begin()
    seen: list[list[str]] = []

    def note(frame, event, arg):
        seen.append(list(lookout.order))
        return note if frame.f_code.co_filename.endswith("lookout.py") else None

    before = sys.gettrace()
    sys.settrace(note)
    try:
        for _ in range(4):
            lookout.look()
    finally:
        sys.settrace(before)
    assert len(seen) > 20
    assert [order for order in seen if order != list("badc")[: max(3, len(order))]] == []
    assert lookout.order == list("badc")
