"""Places in a course: the packs of all epochs, one behind the other, however they come to be."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Condition, Event

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_fit.course import Course, CourseEnded, Lanes, Planned, Position, ahead, located
from dflash_fit.packing import Pack, plan_epoch

LENGTHS = [7 + 13 * number % 50 for number in range(30)]
BUDGET = 128
DEADLINE = 10.0


def planned(*, seed: int = 3) -> Planned:
    return Planned(range(len(LENGTHS)), LENGTHS, token_budget=BUDGET, seed=seed)


def naive(epoch: int) -> list[Pack]:
    return plan_epoch(range(len(LENGTHS)), LENGTHS, token_budget=BUDGET, seed=3, epoch=epoch)


class Counted:
    """Epochs of given lengths, again and again; all packs are the same."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def length(self, epoch: int) -> int:
        return self.lengths[epoch % len(self.lengths)]

    def pack(self, epoch: int, index: int, *, stopped: Event | None = None) -> Pack:
        assert index < self.length(epoch)
        return Pack(documents=(0,), starts=(0,))


class Growing:
    """Epoch 0 of another course, pack by pack, until it is complete or ends early."""

    def __init__(self, course: Planned, *, there: int = 0) -> None:
        self.course, self.there = course, there
        self.complete = False
        self.end: CourseEnded | None = None
        self.changed = Condition()
        self.waiting = 0

    def grow(self, packs: int = 1) -> None:
        with self.changed:
            self.there += packs
            assert self.there <= self.course.length(0)
            self.changed.notify_all()

    def finish(self) -> None:
        with self.changed:
            self.there, self.complete = self.course.length(0), True
            self.changed.notify_all()

    def end_early(self, reason: str) -> None:
        with self.changed:
            self.end = CourseEnded(reason)
            self.changed.notify_all()

    def length(self, epoch: int) -> int | None:
        return self.course.length(epoch) if epoch or self.complete else None

    def pack(self, epoch: int, index: int, *, stopped: Event | None = None) -> Pack:
        if epoch == 0:
            self._wait(index, stopped)
        return self.course.pack(epoch, index)

    def _wait(self, index: int, stopped: Event | None) -> None:
        with self.changed:
            self.waiting += 1
            while self.there <= index and not self.complete:
                if self.end is not None:
                    raise self.end
                if stopped is not None and stopped.is_set():
                    raise CourseEnded
                self.changed.wait(0.01)
            self.waiting -= 1


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def places(course: Course, epochs: int) -> list[Position]:
    """The naive list of all packs."""
    return [
        Position(epoch=epoch, index=index)
        for epoch in range(epochs)
        for index in range(course.length(epoch) or 0)
    ]


@given(packs=st.integers(1, 20), world=st.integers(1, 20))
def test_every_lane_belongs_to_one_rank_and_all_ranks_have_as_many_turns(packs, world):
    ranks = [Lanes(packs=packs, rank=rank, world=world) for rank in range(world)]
    (turns,) = {lanes.turns for lanes in ranks}
    mine = [[lanes.mine(turn) for turn in range(turns)] for lanes in ranks]
    assert sorted(lane for each in mine for lane in each if lane is not None) == [*range(packs)]
    assert all(
        lane % world == r for r, each in enumerate(mine) for lane in each if lane is not None
    )
    # Idle only in the last turn, and never all of them.
    assert all(lane is not None for each in mine for lane in each[:-1])
    assert mine[0][-1] is not None


def test_planned_epochs_are_those_of_the_planner():
    course = planned()
    for epoch in (0, 1, 2, 0):
        assert [course.pack(epoch, i) for i in range(course.length(epoch))] == naive(epoch)


def test_threads_that_want_a_plan_at_once_make_it_once(monkeypatch):
    made = []

    def slow(*args, epoch, **options):
        made.append(epoch)
        time.sleep(0.01)
        return plan_epoch(*args, epoch=epoch, **options)

    monkeypatch.setattr("dflash_fit.course.plan_epoch", slow)
    course = planned()
    wanted = [(epoch, index) for epoch in range(2) for index in range(len(naive(epoch)))]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda at: course.pack(*at), wanted))
    assert found == [naive(epoch)[index] for epoch, index in wanted]
    assert sorted(made) == [0, 1]


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    begin=st.integers(0, 20),
    packs=st.integers(0, 20),
)
def test_ahead_is_the_place_so_many_packs_behind_in_the_list_of_all(lengths, begin, packs):
    course = Counted(lengths)
    every = places(course, 50)
    assert ahead(course, every[begin], packs) == every[begin + packs]
    turned = Position(epoch=every[begin].epoch, index=every[begin].index, turn=2)
    assert ahead(course, turned, packs).turn == 2


def test_in_an_epoch_of_unknown_length_the_index_grows_until_it_is_known():
    course = Growing(planned())
    length = course.course.length(0)
    beyond = ahead(course, Position(epoch=0, index=length - 2), 5)
    assert beyond == Position(epoch=0, index=length + 3)
    course.finish()
    assert ahead(course, beyond, 0) == Position(epoch=1, index=3)
    assert ahead(course, beyond, 2) == Position(epoch=1, index=5)


@pytest.mark.parametrize("index", [2, 10_000])
def test_a_place_is_sure_once_its_pack_is_there_or_its_epoch_has_ended(index):
    course = Growing(planned(), there=1)
    length = course.course.length(0)
    index = min(index, length + 1)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(located, course, Position(epoch=0, index=index, turn=1))
        until(lambda: course.waiting == 1)
        course.grow()
        time.sleep(0.03)
        assert not found.done()
        if index < length:
            course.grow()
            assert found.result() == Position(epoch=0, index=index, turn=1)
        else:
            course.finish()
            assert found.result() == Position(epoch=1, index=index - length, turn=1)


def test_a_course_that_ends_early_gives_what_is_there_and_then_its_reason():
    course = Growing(planned(), there=2)
    course.end_early("nobody builds it any more")
    assert located(course, Position(epoch=0, index=1)) == Position(epoch=0, index=1)
    with pytest.raises(CourseEnded) as caught:
        located(course, Position(epoch=0, index=2))
    assert caught.value.reason == "nobody builds it any more"


def test_who_waits_for_a_pack_can_be_told_to_stop():
    course, stopped = Growing(planned()), Event()
    timer = threading.Timer(0.05, stopped.set)
    timer.start()
    with pytest.raises(CourseEnded) as caught:
        located(course, Position(epoch=0, index=0), stopped=stopped)
    timer.join()
    assert caught.value.reason is None
