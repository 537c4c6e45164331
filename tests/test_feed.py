"""The feed: the batches of the naive loop, in order, from threads that end with it."""

import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue

import pytest
import torch
from test_loader import content, host_batch, positions_from, same, tiny_source

from dflash_cache.errors import CacheError
from dflash_fit.feed import SWITCH_SECONDS, Feed, empty_turns
from dflash_fit.loader import PackSource, Position

START = Position(epoch=0, index=0)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert own_threads() == []


def own_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("fill", "mover"))]


def naive(source: PackSource, position: Position, steps: int) -> list:
    """Content and position behind, batch by batch, with nothing running ahead."""
    return [
        (content(source.fill(host_batch(source.shape), position)), source.after(position))
        for position in positions_from(source, position, steps)
    ]


def agree(found: list, wanted: list) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(same(a, b) and p == q for (a, p), (b, q) in pairs)


def cpu_feed(source: PackSource, position: Position, steps: int) -> Feed:
    return Feed(source, position, steps=steps, device=CPU)


class FakeStream:
    """Does what is queued in order, some time later, as the stream of a device does."""

    def __init__(self) -> None:
        self.queue: SimpleQueue = SimpleQueue()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (work := self.queue.get()) is not None:
            work()

    def mark(self) -> threading.Event:
        event = threading.Event()
        self.queue.put(event.set)
        return event

    def close(self) -> None:
        self.queue.put(None)
        self.thread.join()


class FakeLane:
    """A device whose copies take a random time, and notice when their host batch changes."""

    def __init__(self, source: PackSource, *, seed: int = 0) -> None:
        self.slot = empty_turns(source.shape, passes=source.passes, device=CPU)
        self.idle = 0.0
        self.caller, self.side = FakeStream(), FakeStream()
        self.random = random.Random(seed)
        self.sent = self.torn = 0

    def freed(self) -> threading.Event:
        return self.caller.mark()

    def send(self, host, freed) -> threading.Event:
        self.sent += 1
        self.side.queue.put(freed.wait)
        self.side.queue.put(lambda: self._copy(host))
        return self.side.mark()

    def _copy(self, host) -> None:
        before = [content(turn) for turn in host]
        for mine, theirs in zip(self.slot, host, strict=True):
            for tensor, other in zip(mine.tensors(), theirs.tensors(), strict=True):
                tensor.copy_(other)
                self.dawdle(0.0005)
        self.torn += not all(
            same(content(turn), was) for turn, was in zip(self.slot, before, strict=True)
        )

    def settle(self, sent) -> None:
        sent.wait()

    def ask(self) -> None:
        pass

    def receive(self, sent) -> None:
        self.caller.queue.put(sent.wait)

    def dawdle(self, most: float) -> None:
        if self.random.random() < 0.5:
            time.sleep(self.random.random() * most)

    def close(self) -> None:
        self.caller.close()
        self.side.close()


@pytest.fixture
def device_feed():
    """A feed with a fake device behind it."""
    lanes = []

    def make(source: PackSource, position: Position, steps: int, **options) -> Feed:
        feed = cpu_feed(source, position, steps)
        feed.lane = FakeLane(source, **options)
        lanes.append(feed.lane)
        return feed

    yield make
    for lane in lanes:
        lane.close()


def read_on_device(feed: Feed, *, seed: int = 0) -> list:
    """What a step sees that runs some time after it was queued; it looks twice."""
    lane, found, chance, torn = feed.lane, [], random.Random(seed), []

    def look(batch, behind) -> None:
        first = content(batch)
        lane.dawdle(0.003)
        torn.append(not same(first, content(batch)))
        found.append((first, behind))

    for batch, behind in feed:
        lane.caller.queue.put(lambda batch=batch, behind=behind: look(batch, behind))
        if chance.random() < 0.5:
            feed.release()
        lane.caller.queue.put(lambda: lane.dawdle(0.003))  # the replay
    lane.caller.mark().wait()
    assert not any(torn)
    assert not lane.torn
    return found


def read_on_host(feed: Feed) -> list:
    return [(content(batch), behind) for batch, behind in feed]


@pytest.mark.parametrize("passes", [1, 3])
def test_the_batches_are_those_of_the_naive_loop(tiny_cache, passes):
    source = tiny_source(tiny_cache, passes=passes)
    steps = source.steps(2)
    assert agree(read_on_host(cpu_feed(source, START, steps)), naive(source, START, steps))


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_no_slot_is_overwritten_while_it_is_read_and_no_host_batch_while_it_is_copied(
    tiny_cache, device_feed, passes, seed
):
    source = tiny_source(tiny_cache, passes=passes)
    steps = source.steps(2)
    found = read_on_device(device_feed(source, START, steps, seed=seed), seed=seed)
    assert agree(found, naive(source, START, steps))


@pytest.mark.parametrize("kind", ["host", "device"])
def test_the_same_batches_follow_from_any_position(tiny_cache, device_feed, kind):
    source = tiny_source(tiny_cache, passes=3)
    whole = naive(source, START, 12)
    for number, position in enumerate(positions_from(source, START, 12)):
        steps = min(4, 12 - number)  # ends within the turns of a pack, too
        if kind == "host":
            found = read_on_host(cpu_feed(source, position, steps))
        else:
            found = read_on_device(device_feed(source, position, steps))
        assert agree(found, whole[number : number + steps])


def test_a_batch_stays_as_it_is_until_the_next_is_asked_for(tiny_cache):
    for batch, _ in cpu_feed(tiny_source(tiny_cache), START, 8):
        before = content(batch)
        time.sleep(0.02)
        assert same(content(batch), before)


class SlowSource(PackSource):
    """Fills of unlike length, so that later packs are ready before earlier ones."""

    def fill(self, batch, position):
        super().fill(batch, position)
        time.sleep(0.003 * ((position.index * 7) % 3))
        return batch


@contextmanager
def spinning() -> Iterator[None]:
    """A thread that gives the interpreter away only when it is told to."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(100))

    spinner = threading.Thread(target=spin)
    spinner.start()
    try:
        yield
    finally:
        stop.set()
        spinner.join()


def test_many_small_packs_come_in_order_while_all_threads_are_busy(tiny_cache, device_feed):
    wide = tiny_source(tiny_cache)
    longest = max(wide.reader.lengths)
    source = SlowSource(
        wide.reader,
        wide.documents,
        layer_ids=wide.layer_ids,
        shape=replace(wide.shape, token_budget=longest),
        seed=1,
    )
    steps = source.steps(1)
    with spinning():
        found = read_on_device(device_feed(source, START, steps))
    assert steps > 20
    assert agree(found, naive(source, START, steps))


class DamagedSource(PackSource):
    def fill(self, batch, position):
        if position.index == 3:
            raise CacheError("damaged")
        return super().fill(batch, position)


@pytest.mark.parametrize("kind", ["host", "device"])
def test_what_a_thread_raises_comes_out_of_the_loop_at_its_pack(tiny_cache, device_feed, kind):
    plain = tiny_source(tiny_cache)
    source = DamagedSource(
        plain.reader, plain.documents, layer_ids=plain.layer_ids, shape=plain.shape, seed=3
    )
    make = cpu_feed if kind == "host" else device_feed
    batches = iter(make(source, START, 8))
    assert [next(batches)[1].index for _ in range(3)] == [1, 2, 3]
    with pytest.raises(CacheError, match=r"^damaged$"):
        next(batches)


class BrokenLane(FakeLane):
    def send(self, host, freed):
        raise RuntimeError("no device")


def test_what_the_copy_raises_comes_out_of_the_loop(tiny_cache):
    source = tiny_source(tiny_cache)
    feed = cpu_feed(source, START, 4)
    feed.lane = BrokenLane(source)
    with pytest.raises(RuntimeError, match="no device"):
        next(iter(feed))
    feed.lane.close()


def divide_by_zero(feed: Feed) -> None:
    for _ in feed:
        1 / 0  # noqa: B018


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("way", ["break", "error", "close", "with", "never begun"])
def test_the_threads_end_however_the_loop_is_left(tiny_cache, device_feed, kind, way):
    feed = (cpu_feed if kind == "host" else device_feed)(tiny_source(tiny_cache), START, 8)
    if way == "break":
        for _ in feed:
            break
    elif way == "error":
        with pytest.raises(ZeroDivisionError):
            divide_by_zero(feed)
    elif way == "close":
        batches = iter(feed)
        next(batches)
        next(batches)
        feed.close()
    elif way == "with":
        with feed:
            batches = iter(feed)
            next(batches)
    else:
        feed.close()
    assert own_threads() == []


@pytest.mark.parametrize("kind", ["host", "device"])
def test_leaving_waits_for_no_pack_that_was_not_begun(tiny_cache, device_feed, kind):
    begun = []

    class Slow(PackSource):
        def fill(self, batch, position):
            begun.append(position.index)
            if position.index:
                time.sleep(0.2)
            return super().fill(batch, position)

    plain = tiny_source(tiny_cache)
    source = Slow(
        plain.reader, plain.documents, layer_ids=plain.layer_ids, shape=plain.shape, seed=3
    )
    for _ in (cpu_feed if kind == "host" else device_feed)(source, START, 8):
        time.sleep(0.05)  # the pack behind is still being read
        break
    assert sorted(begun) == [0, 1, 2]


def test_nothing_is_copied_into_a_slot_that_was_not_given_back(tiny_cache, device_feed):
    feed = device_feed(tiny_source(tiny_cache), START, 8)
    batches = iter(feed)
    next(batches)
    time.sleep(0.1)
    assert feed.lane.sent == 1
    feed.close()
    assert feed.lane.sent == 1


def test_a_busy_caller_lets_the_readers_in_and_is_left_as_it_was(tiny_cache):
    before = sys.getswitchinterval()
    for _ in cpu_feed(tiny_source(tiny_cache), START, 8):
        assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
        break
    assert sys.getswitchinterval() == before


def test_feeds_that_overlap_leave_the_interpreter_as_it_was(tiny_cache):
    before = sys.getswitchinterval()
    one, other = (iter(cpu_feed(tiny_source(tiny_cache), START, 4)) for _ in range(2))
    next(one), next(other)
    one.close()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    other.close()
    assert sys.getswitchinterval() == before


@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_feed_is_iterated_once(tiny_cache, device_feed, kind):
    feed = (cpu_feed if kind == "host" else device_feed)(tiny_source(tiny_cache), START, 2)
    assert len(list(feed)) == 2
    with pytest.raises(AssertionError, match="iterated once"):
        list(feed)


def test_an_interrupt_while_waiting_for_a_pack_ends_the_threads(tiny_cache, device_feed):
    class Slow(PackSource):
        def fill(self, batch, position):
            time.sleep(0.3)
            return super().fill(batch, position)

    plain = tiny_source(tiny_cache)
    source = Slow(
        plain.reader, plain.documents, layer_ids=plain.layer_ids, shape=plain.shape, seed=3
    )
    before = sys.getswitchinterval()
    for make in (cpu_feed, device_feed):
        timer = threading.Timer(0.1, signal.raise_signal, [signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            next(iter(make(source, START, 8)))
        assert own_threads() == []
        assert sys.getswitchinterval() == before


def test_no_steps_are_no_batches(tiny_cache, device_feed):
    source = tiny_source(tiny_cache)
    assert list(cpu_feed(source, START, 0)) == []
    assert list(device_feed(source, START, 0)) == []


def test_the_caller_is_at_most_two_packs_ahead_of_the_device(tiny_cache, device_feed):
    feed, gate, got = device_feed(tiny_source(tiny_cache), START, 8), threading.Event(), []

    def consume() -> None:
        for _, behind in feed:
            got.append(behind.index)
            feed.release()
            if len(got) == 1:
                feed.lane.caller.queue.put(gate.wait)  # the replay of the first

    consumer = threading.Thread(target=consume)
    consumer.start()
    deadline = time.monotonic() + 10
    while len(got) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    ahead = len(got) - 1
    gate.set()
    consumer.join()
    assert ahead == 2
    assert len(got) == 8


def test_a_second_in_which_two_packs_are_read_counts_once(tiny_cache):
    fills = cpu_feed(tiny_source(tiny_cache), START, 1).fills
    began = time.perf_counter()
    with fills._counted(1):
        time.sleep(0.03)
        with fills._counted(2):
            time.sleep(0.03)
    assert fills.bytes == 3
    assert 0.06 <= fills.seconds <= time.perf_counter() - began


@pytest.mark.parametrize("passes", [1, 2])
def test_bytes_and_seconds_are_counted(tiny_cache, passes):
    class Slow(PackSource):
        def fill(self, batch, position):
            time.sleep(0.03)
            return super().fill(batch, position)

    plain = tiny_source(tiny_cache)
    source = Slow(
        plain.reader,
        plain.documents,
        layer_ids=plain.layer_ids,
        shape=plain.shape,
        seed=3,
        passes=passes,
    )
    began = time.perf_counter()
    feed = cpu_feed(source, START, 6 * passes)
    assert len(read_on_host(feed)) == 6 * passes
    seconds, counts = time.perf_counter() - began, feed.counts()
    stored = [source.stored_bytes(Position(epoch=0, index=index)) for index in range(6)]
    assert counts.read == sum(stored)
    assert counts.delivered == sum(size // passes * passes for size in stored)
    # Two at once: three times 30 ms, and no second counted twice.
    assert 0.09 <= counts.read_seconds <= seconds
    assert 0.06 <= counts.waited <= seconds
    assert counts.idle == counts.waited


def test_a_reader_that_is_ahead_is_not_waited_for(tiny_cache):
    feed = cpu_feed(tiny_source(tiny_cache), START, 6)
    batches = iter(feed)
    next(batches)
    before = feed.counts()
    for _ in batches:
        time.sleep(0.05)
    assert (feed.counts() - before).waited < 0.15


def busy(milliseconds: int = 20) -> None:
    """Keep the current stream of the GPU busy for about so long."""
    torch.cuda._sleep(1_500_000 * milliseconds)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("passes", [1, 3])
def test_batches_on_the_gpu_are_those_of_the_naive_loop_while_it_is_busy(tiny_cache, passes):
    source = tiny_source(tiny_cache, passes=passes)
    chance, steps, device = random.Random(0), 30, torch.device("cuda")
    taken = [empty_turns(source.shape, passes=1, device=device)[0] for _ in range(steps)]
    behinds = []
    feed = Feed(source, START, steps=steps, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for own, (batch, behind) in zip(taken, feed, strict=True):
            if chance.random() < 0.5:
                busy()  # the copy below then runs long after it was queued
            own.copy_(batch)
            behinds.append(behind)
            if chance.random() < 0.5:
                feed.release()
            if chance.random() < 0.5:
                busy()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    found = [(content(batch), behind) for batch, behind in zip(taken, behinds, strict=True)]
    assert agree(found, naive(source, START, steps))


@pytest.mark.gpu
def test_a_released_slot_is_filled_beside_the_work_behind_it(tiny_cache):
    source = tiny_source(tiny_cache)
    feed = Feed(source, START, steps=6, device=torch.device("cuda"))
    batches = iter(feed)
    next(batches)
    torch.cuda.synchronize()
    feed.release()
    busy(1500)  # the replay
    finished = torch.cuda.Event()
    finished.record()
    wanted = naive(source, START, 2)[1][0]
    side = torch.cuda.Stream()
    deadline, found = time.monotonic() + 0.5, None
    while time.monotonic() < deadline and (found is None or not same(found, wanted)):
        with torch.cuda.stream(side):
            found = content(feed.lane.slot[0])
    assert same(found, wanted)
    assert not finished.query()
    feed.close()


@pytest.mark.gpu
def test_the_gpu_is_idle_while_a_pack_is_read_and_not_while_it_computes(tiny_cache):
    class Slow(PackSource):
        def fill(self, batch, position):
            time.sleep(0.1)
            return super().fill(batch, position)

    def idle(kind, milliseconds: int) -> float:
        plain = tiny_source(tiny_cache)
        source = kind(
            plain.reader, plain.documents, layer_ids=plain.layer_ids, shape=plain.shape, seed=3
        )
        feed = Feed(source, START, steps=8, device=torch.device("cuda"))
        before = None
        for _ in feed:
            torch.cuda.synchronize()
            before = before or feed.counts()
            feed.release()
            busy(milliseconds)
            torch.cuda.synchronize()
        return (feed.counts() - before).idle

    assert idle(Slow, 1) > 0.15
    assert idle(PackSource, 50) < 0.05
