"""No unit is lost or done twice at once, whoever dies when; no processes, one store in memory."""

import math
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from dflash_cache import member as members
from dflash_cache.board import LEAD, MOST_HOLDERS, Board, OtherWorkerFailed
from dflash_cache.buckets import UnitPlan
from dflash_cache.errors import DFlashError, DiskFullError
from dflash_cache.member import Member
from dflash_cache.progress import Count, Display
from dflash_cache.stalls import AGAIN, MOST, PATIENCE, TIMES
from dflash_cache.watch import GAP, LATE, SILENCE, Watch


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(members, "PAUSE", 0.001)


@pytest.fixture(params=["memory", "network"])
def store(request):
    if request.param == "memory":
        whole = HashStore()
    else:
        whole = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    yield PrefixStore("board", whole)
    del whole  # a server lives as long as its object


@pytest.fixture
def board(store) -> Board:
    return Board(store, world=4)


def units_of(count: int) -> list[UnitPlan]:
    return [UnitPlan(name=f"u{i:06d}", bucket=64, members=(i,)) for i in range(count)]


def member(board: Board, worker: int, count: int = 100) -> Member:
    return Member(board, worker, lengths=[10] * count)


# --- who does what --------------------------------------------------------------------------------


def test_every_unit_is_dealt_to_exactly_one_of_many_threads(board):
    units = units_of(100)

    def work(worker: int) -> list[str]:
        own, mine = member(board, worker), []
        # One that is counted and not yet taken down may go to who is through with the fresh ones.
        for unit in chain(own.fresh(units), own.left(units)):
            mine.append(unit.name)
            own.committed(unit)
        return mine

    with ThreadPoolExecutor(4) as pool:
        dealt = [name for mine in pool.map(work, range(4)) for name in mine]
    assert sorted(dealt) == [unit.name for unit in units]
    assert board.is_finished()
    assert sum(board.count(worker).tokens for worker in range(4)) == 0  # nobody ran a target
    assert board.held(0) == []


def test_units_of_workers_that_die_are_done_by_the_others_once_each(board):
    """Workers 0 and 1 die holding two units each, as one writes and one is computed."""
    units = units_of(40)
    done = Counter[str]()
    lock, begun = threading.Lock(), threading.Barrier(4, timeout=60)

    def die(worker: int) -> None:
        fresh = member(board, worker).fresh(units)
        next(fresh)
        next(fresh)
        begun.wait()
        board.bury(worker, "signal 9")

    def live(worker: int) -> None:
        own = member(board, worker)
        begun.wait()
        for take in (own.fresh, own.left):
            for unit in take(units):
                with lock:
                    done[unit.name] += 1
                own.committed(unit)

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(die if w < 2 else live, w) for w in range(4)]:
            future.result(timeout=60)
    assert done == Counter(unit.name for unit in units)
    assert board.is_finished()
    assert len(board.held(0)) == 2  # for who tells of its end


def test_a_worker_that_dies_between_the_counter_and_its_hold_loses_no_unit(board):
    units = units_of(3)
    assert board.next_fresh() == 0  # and no more is heard of who got it
    own = member(board, 1)
    for unit in own.fresh(units):
        own.committed(unit)
    left = own.left(units)
    assert next(left).name == "u000000"
    own.committed(units[0])
    assert next(left, None) is None


def test_a_unit_is_not_taken_from_a_worker_that_lives(board):
    (unit,) = units_of(1)
    assert next(member(board, 0).fresh([unit])) == unit
    assert not board.take_over(unit.name, 1)
    board.bury(0, "signal 9")
    assert board.take_over(unit.name, 1)
    assert not board.take_over(unit.name, 2)
    assert board.holders(unit.name) == [0, 1]


def test_of_many_heirs_one_gets_the_unit(store):
    board = Board(store, world=17)
    assert board.take("u000000", 0)
    board.bury(0, "signal 9")
    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(lambda worker: board.take_over("u000000", worker), range(1, 17)))
    assert sum(got) == 1


def test_a_unit_that_killed_so_many_workers_ends_the_build_by_its_name(store):
    board = Board(store, world=MOST_HOLDERS + 1)
    (unit,) = units_of(1)
    for worker in range(MOST_HOLDERS):
        own = member(board, worker)
        list(own.fresh([])) if worker else next(own.fresh([unit]))
        if worker:
            assert next(own.left([unit])) == unit
        board.bury(worker, f"signal {worker + 1}")
    with pytest.raises(OtherWorkerFailed):
        next(member(board, MOST_HOLDERS).left([unit]))
    told = str(board.failure())
    assert "unit u000000 was held by 3 workers that died" in told
    assert "worker 0: signal 1; worker 1: signal 2; worker 2: signal 3" in told


def test_a_unit_counts_as_done_for_the_first_who_says_so(board):
    assert [board.done("u000000") for _ in range(3)] == [True, False, False]


def test_a_worker_that_was_given_up_takes_nothing_more(board):
    units, own = units_of(5), member(board, 2)
    fresh = own.fresh(units)
    next(fresh)
    board.bury(2, "no sign of life for 60 s")
    with pytest.raises(OtherWorkerFailed):
        next(fresh)


# --- the first worker -----------------------------------------------------------------------------


def test_one_worker_leads_and_the_others_wait_until_it_is_ready(board):
    assert [member(board, worker).leads() for worker in range(4)] == [True, False, False, False]
    board.set_ready({"proofs": {"hooks": 0.5}})
    assert member(board, 1).wait_until_ready()
    assert board.evidence() == {"proofs": {"hooks": 0.5}}


def test_who_waits_for_a_leader_that_dies_leads_itself(board):
    assert member(board, 2).leads()
    board.bury(2, "signal 9")
    assert not member(board, 0).wait_until_ready()
    assert board.holders(LEAD) == [2, 0]


def test_a_leader_that_dies_after_it_was_ready_is_not_followed(board):
    """What it has left beside the units must not be made anew: units depend on it."""
    assert member(board, 2).leads()
    board.set_ready({})
    board.bury(2, "signal 9")
    assert not member(board, 3).leads()
    assert member(board, 3).wait_until_ready()
    assert board.holders(LEAD) == [2]


def test_who_comes_when_three_leaders_have_died_and_one_was_ready_joins(store):
    board = Board(store, world=MOST_HOLDERS + 2)
    for worker in range(MOST_HOLDERS):
        assert member(board, worker).leads()
        if worker == MOST_HOLDERS - 1:
            board.set_ready({})
        board.bury(worker, "signal 9")
    assert not member(board, MOST_HOLDERS).leads()
    assert board.failure() is None


# --- how it ends ----------------------------------------------------------------------------------


def test_the_first_error_counts_and_comes_back_as_its_class(board):
    board.fail(DiskFullError("no room for u000003"))
    board.fail(DFlashError("and another one"))
    found = board.failure()
    assert type(found) is DiskFullError
    assert str(found) == "no room for u000003"
    with pytest.raises(OtherWorkerFailed):
        board.stop_if_failed()
    with pytest.raises(OtherWorkerFailed):
        next(member(board, 0).fresh(units_of(1)))


def test_when_the_last_worker_dies_the_end_of_each_is_told(board):
    for worker in range(4):
        assert board.failure() is None
        assert board.bury(worker, f"signal {worker}")
        assert not board.bury(worker, "said again, otherwise")
    assert "worker 0: signal 0; worker 1: signal 1; worker 2: signal 2" in str(board.failure())


def test_who_buries_the_last_worker_may_die_before_it_tells(board):
    for worker in range(3):
        board.bury(worker, "signal 9")
    board.store.set("end/3", "signal 9")
    assert board.failure() is None
    assert not board.bury(3, "no sign of life for 60 s")
    assert "every worker died" in str(board.failure())


def test_rank_0_may_fail_after_all_units_are_done(board):
    board.finish()
    assert board.end() is None
    board.end_badly(DiskFullError("no room for the seal"))
    with pytest.raises(DiskFullError, match="no room for the seal"):
        board.end()


# --- progress -------------------------------------------------------------------------------------


def test_what_a_dead_worker_did_not_commit_is_no_progress(board):
    (unit,) = units_of(1)
    own = member(board, 1)
    next(own.fresh([unit]))
    own.update(10)
    own.wrote(500)
    own.committed(unit)
    own.update(7)
    own._tell(now=True)
    assert board.count(1) == Count(tokens=17, bytes=500)
    board.bury(1, "signal 9")
    assert board.count(1) == Count(tokens=10, bytes=500)


class Lines:
    """A stream that is no terminal, and keeps its lines."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return False


@pytest.fixture
def now() -> list[float]:
    return [1000.0]


@pytest.fixture
def watch(board, tmp_path, now) -> Watch:
    def clock() -> float:
        return now[0]

    display = Display(tmp_path, total=100, done=0, stream=Lines(), clock=clock)
    return Watch(board, display, clock=clock)


def test_a_machine_that_falls_silent_is_given_up_and_told(board, watch, now):
    for worker in range(4):
        board.beat(worker)
    board.set_held(3, ["u000005"])
    watch.look()
    for _ in range(3):
        now[0] += SILENCE / 2
        for worker in range(3):
            board.beat(worker)
        watch.look()
    assert [board.end_of(worker) is None for worker in range(4)] == [True, True, True, False]
    assert "worker 3 died (no sign of life for 90 s); its 1 unit goes to the others" in (
        watch.display.stream.text
    )
    assert watch.display.stream.text.count("worker 3 died") == 1


def test_who_has_left_or_is_still_starting_is_not_given_up(board, watch, now):
    board.beat(0)
    board.leave(0)
    watch.look()
    now[0] += 2 * SILENCE
    watch.look()
    assert board.end_of(0) is None
    assert board.end_of(1) is None
    for _ in range(math.ceil(LATE / GAP) + 1):
        now[0] += GAP
        watch.look()
    assert board.end_of(0) is None
    assert board.end_of(1) == f"no sign of life for {LATE + GAP:.0f} s"


def test_who_was_stopped_itself_gives_nobody_up(board, watch, now):
    """As by Ctrl-Z at a terminal, or by Slurm, which stop all processes alike."""
    for worker in range(4):
        board.beat(worker)
    watch.look()
    now[0] += 10 * SILENCE
    watch.look()
    assert [board.end_of(worker) for worker in range(4)] == [None] * 4
    for _ in range(3):
        now[0] += GAP
        watch.look()
    assert board.end_of(0) is not None  # those that have not come back


def test_a_terminal_that_is_gone_does_not_end_the_watch(board, watch, now, monkeypatch):
    def broken(text: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(watch.display.stream, "write", broken)
    for worker in range(4):
        board.beat(worker)
    for _ in range(4):
        board.beat(0)
        watch.look()
        now[0] += GAP
    assert [board.end_of(worker) is None for worker in range(4)] == [True, False, False, False]


# --- who stands still -----------------------------------------------------------------------------

STEP = 25.0  # seconds between two looks of these tests


@pytest.fixture
def after(board, watch, now):
    """Look on for so long, while the supervisors live and the workers named get on."""

    def wait(seconds: float, *, busy=()) -> list[str]:
        before = len(watch.display.stream.text)
        for _ in range(math.ceil(seconds / STEP)):
            now[0] += STEP
            for worker in range(4):
                board.beat(worker)
            for worker in busy:
                board.add(worker, tokens=1)
            watch.look()
        lines = watch.display.stream.text[before:].splitlines()
        return [line for line in lines if line.startswith("worker")]

    return wait


@pytest.fixture
def holder(board, after) -> Member:
    """Worker 3, which holds a unit and has done a batch of it."""
    board.set_ready({})
    own = member(board, 3)
    next(own.fresh(units_of(2)))
    assert after(STEP, busy=[0, 1, 2, 3]) == []
    return own


def test_a_worker_that_gets_nowhere_is_told_now_and_then_until_it_goes_on(holder, board, after):
    others = [0, 1, 2]
    assert after(PATIENCE - STEP, busy=others) == []
    assert after(STEP, busy=others) == [
        "worker 3 has done nothing for 0:05:00; it holds unit u000000 (bucket 0064). If it stays "
        "so, stop the build (Ctrl-C) and run the same command again: committed units are kept"
    ]
    assert after(AGAIN - STEP, busy=others) == []
    (again,) = after(STEP, busy=others)
    assert again.startswith("worker 3 has done nothing for 0:35:00; it holds unit u000000 ")
    assert "more" not in again
    holder.wrote(7)
    holder._tell(now=True)
    assert after(STEP, busy=others) == ["worker 3 goes on again"]
    assert after(PATIENCE - STEP, busy=others) == []
    assert board.end_of(3) is None  # it is not ended for it


def test_who_holds_nothing_stands_still_without_a_word(holder, board, after):
    """There is nothing left to take, and somebody else writes the last unit."""
    assert after(2 * MOST, busy=[3]) == []
    board.bury(3, "signal 9")
    own = member(board, 1)
    next(own.left(units_of(2)))
    assert "died" in after(STEP)[0]
    assert after(PATIENCE - STEP) == []  # from when it took the unit


def test_a_worker_has_longer_for_its_first_batch(board, after):
    board.set_ready({})
    fresh = member(board, 2).fresh(units_of(3))
    assert [unit.name for unit in fresh] == ["u000000", "u000001", "u000002"]
    assert after(MOST, busy=[0, 1]) == []
    (line,) = after(STEP, busy=[0, 1])
    told = "worker 2 has done nothing for 1:00:00; it holds unit u000000 (bucket 0064) and 2 more. "
    assert line.startswith(told)


def test_loading_and_proving_takes_its_time_and_not_for_ever(board, after):
    assert member(board, 1).leads()
    assert after(MOST) == []
    (line,) = after(STEP)
    assert line.startswith("worker 1 has done nothing for 1:00:00; it holds the start of the build")
    board.set_ready({})
    next(member(board, 1).fresh(units_of(1)))
    assert after(STEP, busy=[1]) == ["worker 1 goes on again"]
    assert len(after(PATIENCE)) == 1  # the hour before says nothing of batches


def test_a_slow_worker_has_longer_for_every_batch(holder, after):
    slow = PATIENCE / 2
    assert after(slow - STEP) == []
    assert after(STEP, busy=[3]) == []
    assert after(TIMES * slow - STEP, busy=[0]) == []
    (line,) = after(STEP, busy=[0])
    assert line.startswith("worker 3 has done nothing for 0:07:30; ")


def test_nobody_has_longer_than_an_hour_whatever_once_took_longer(holder, after):
    after(MOST)
    after(STEP, busy=[3])
    assert after(MOST - STEP) == []
    assert len(after(STEP)) == 1


def test_a_build_that_was_stopped_and_goes_on_does_not_stand_still(holder, after, now):
    after(PATIENCE - STEP)
    now[0] += 10 * MOST  # Ctrl-Z, and the watch with it
    assert after(PATIENCE, busy=[0]) == []
    assert len(after(STEP, busy=[0])) == 1


@pytest.mark.parametrize("over", ["it died", "all is done", "it has failed"])
def test_nobody_is_told_to_stand_still_when_it_is_over(holder, board, after, over):
    if over == "it died":
        board.bury(3, "signal 9")
    elif over == "all is done":
        board.finish()
    else:
        board.fail(DFlashError("no room"))
    assert not any("nothing" in line for line in after(MOST + PATIENCE))
