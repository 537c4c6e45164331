"""The feed: the batches of the naive loop, in order, from threads that end with it."""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from test_course import Growing, until
from test_loader import content, host_batch, plan_of, positions_from, same, tiny_source

from dflash_cache.errors import CacheError
from dflash_cache.reader import CacheReader
from dflash_fit.anchors import candidates, draw
from dflash_fit.batch import BatchShape
from dflash_fit.course import Lanes, Planned, Position
from dflash_fit.feed import SWITCH_SECONDS, Feed, packs_in_memory
from dflash_fit.loader import PackSource, fill_documents
from dflash_fit.slot import empty_passes

START = Position(epoch=0, index=0)
ONE = Lanes(packs=1, rank=0, world=1)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert own_threads() == []


def own_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("fill", "mover"))]


def naive(source: PackSource, position: Position, steps: int) -> list:
    """Content, turn and position behind, batch by batch, with nothing running ahead."""
    return [
        (
            content(source.fill(host_batch(source.shape), position, source.lanes.mine(turn))),
            turn,
            source.after(position),
        )
        for position in positions_from(source, position, steps)
        for turn in range(source.lanes.turns)
    ]


def agree(found: list, wanted: list) -> bool:
    """Nobody looks at the states of a batch that is all padding."""
    pairs = zip(found, wanted, strict=True)
    return all(
        same(a[skip:], b[skip:]) and behind == other
        for (a, *behind), (b, *other) in pairs
        for skip in [len(STATES) * is_idle(b)]
    )


STATES = ("hidden", "scales", "exponents", "channels")  # the first tensors of a batch


def is_idle(tensors: list) -> bool:
    """Of the content of a batch: whether no slot belongs to a document."""
    return bool((tensors[6].view("i4") == -1).all())


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


class FakeSlot:
    """A device whose copies take a random time, and notice when their host batch changes."""

    def __init__(self, source: PackSource, *, seed: int = 0) -> None:
        passes = source.passes if source.lanes.turns == 1 else 1
        self.held = empty_passes(source.shape, passes=passes, device=CPU)
        self.idle = 0.0
        self.caller, self.side = FakeStream(), FakeStream()
        self.random = random.Random(seed)
        self.sent = self.torn = 0

    def freed(self) -> threading.Event:
        return self.caller.mark()

    def send(self, batches, freed) -> threading.Event:
        self.sent += 1
        self.side.queue.put(freed.wait)
        self.side.queue.put(lambda: self._copy(batches))
        return self.side.mark()

    def _copy(self, batches) -> None:
        before = [content(batch) for batch in batches]
        for mine, theirs in zip(self.held[: len(batches)], batches, strict=True):
            for tensor, other in zip(mine.tensors(), theirs.tensors(), strict=True):
                tensor.copy_(other)
                self.dawdle(0.0005)
        self.torn += not all(
            same(content(batch), was) for batch, was in zip(batches, before, strict=True)
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
    slots = []

    def make(source: PackSource, position: Position, steps: int, **options) -> Feed:
        feed = cpu_feed(source, position, steps)
        feed.slot = FakeSlot(source, **options)
        slots.append(feed.slot)
        return feed

    yield make
    for slot in slots:
        slot.close()


def read_on_device(feed: Feed, *, seed: int = 0) -> list:
    """What a step sees that runs some time after it was queued; it looks twice."""
    slot, found, chance, torn = feed.slot, [], random.Random(seed), []

    def look(batch, *where) -> None:
        first = content(batch)
        slot.dawdle(0.003)
        torn.append(not same(first, content(batch)))
        found.append((first, *where))

    for item in feed:
        slot.caller.queue.put(lambda item=item: look(*item))
        if chance.random() < 0.5:
            feed.release()
        slot.caller.queue.put(lambda: slot.dawdle(0.003))  # the replay
    slot.caller.mark().wait()
    assert not any(torn)
    assert not slot.torn
    return found


def read_on_host(feed: Feed) -> list:
    return [(content(batch), *where) for batch, *where in feed]


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
@pytest.mark.parametrize("lanes", [ONE, Lanes(packs=3, rank=1, world=2)])
def test_the_same_batches_follow_from_any_position(tiny_cache, device_feed, kind, lanes):
    source = tiny_source(tiny_cache, passes=3, lanes=lanes)
    whole, turns = naive(source, START, 12), lanes.turns
    for number, position in enumerate(positions_from(source, START, 12)):
        steps = min(4, 12 - number)  # ends within the passes over a round, too
        if kind == "host":
            found = read_on_host(cpu_feed(source, position, steps))
        else:
            found = read_on_device(device_feed(source, position, steps))
        assert agree(found, whole[number * turns : (number + steps) * turns])


def test_a_batch_stays_as_it_is_until_the_next_is_asked_for(tiny_cache):
    for batch, *_ in cpu_feed(tiny_source(tiny_cache), START, 8):
        before = content(batch)
        time.sleep(0.02)
        assert same(content(batch), before)


class SlowSource(PackSource):
    """Fills of unlike length, so that later packs are ready before earlier ones."""

    def fill(self, batch, position, lane=0):
        super().fill(batch, position, lane)
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
    def fill(self, batch, position, lane=0):
        if position.index == 3:
            raise CacheError("damaged")
        return super().fill(batch, position, lane)


@pytest.mark.parametrize("kind", ["host", "device"])
def test_what_a_thread_raises_comes_out_of_the_loop_at_its_pack(tiny_cache, device_feed, kind):
    plain = tiny_source(tiny_cache)
    source = DamagedSource(
        plain.reader, plain.documents, layer_ids=plain.layer_ids, shape=plain.shape, seed=3
    )
    make = cpu_feed if kind == "host" else device_feed
    batches = iter(make(source, START, 8))
    assert [next(batches)[2].index for _ in range(3)] == [1, 2, 3]
    with pytest.raises(CacheError, match=r"^damaged$"):
        next(batches)


class BrokenSlot(FakeSlot):
    def send(self, host, freed):
        raise RuntimeError("no device")


def test_what_the_copy_raises_comes_out_of_the_loop(tiny_cache):
    source = tiny_source(tiny_cache)
    feed = cpu_feed(source, START, 4)
    feed.slot = BrokenSlot(source)
    with pytest.raises(RuntimeError, match="no device"):
        next(iter(feed))
    feed.slot.close()


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
        def fill(self, batch, position, lane=0):
            begun.append(position.index)
            if position.index:
                time.sleep(0.2)
            return super().fill(batch, position, lane)

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
    assert feed.slot.sent == 1
    feed.close()
    assert feed.slot.sent == 1


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
    waited_for = threading.Event()

    class Slow(PackSource):
        def fill(self, batch, position, lane=0):
            waited_for.set()
            time.sleep(1.0)
            return super().fill(batch, position, lane)

    def interrupt() -> None:
        # Not before the feed is made and waits, however long that takes.
        waited_for.wait()
        time.sleep(0.5)
        signal.raise_signal(signal.SIGINT)

    plain = tiny_source(tiny_cache)
    source = Slow(
        plain.reader, plain.documents, layer_ids=plain.layer_ids, shape=plain.shape, seed=3
    )
    before = sys.getswitchinterval()
    for make in (cpu_feed, device_feed):
        waited_for.clear()
        threading.Thread(target=interrupt, daemon=True).start()
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
        for *_, behind in feed:
            got.append(behind.index)
            feed.release()
            if len(got) == 1:
                feed.slot.caller.queue.put(gate.wait)  # the replay of the first

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
        def fill(self, batch, position, lane=0):
            time.sleep(0.03)
            return super().fill(batch, position, lane)

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


def few_packs(reader: CacheReader, *, lanes: Lanes = ONE, **options) -> PackSource:
    """Some three packs an epoch: a round often lies in several epochs."""
    shape = tiny_shape(reader)
    documents, layers = range(8), reader.identity.target_layer_ids[:1]
    return PackSource(
        reader, documents, layer_ids=layers, shape=shape, seed=3, lanes=lanes, **options
    )


def tiny_shape(reader: CacheReader) -> BatchShape:
    return BatchShape(
        target_layers=1,
        token_budget=256,
        hidden_size=reader.identity.hidden_size,
        anchors=6,
        block_size=4,
        encoding=reader.identity.encoding,
    )


def one_after_the_other(source: PackSource, *, epochs: int, packs: int, passes: int) -> list:
    """The oracle: update by update, the packs of all lanes with their anchors."""
    every = [(e, i, p) for e in range(epochs) for i, p in enumerate(plan_of(source, e))]
    updates = []
    for begin in range(0, len(every) - packs + 1, packs):
        for number in range(passes):
            update = []
            for epoch, index, pack in every[begin : begin + packs]:
                batch = host_batch(source.shape)
                fill_documents(batch, source.reader, pack, layer_ids=source.layer_ids)
                positions = candidates(batch.loss_mask.numpy(), batch.document_ids.numpy())
                rng = np.random.default_rng([source.seed, epoch, index, number])
                anchors, valid = draw(positions, count=source.shape.anchors, rng=rng)
                batch.anchor_positions.numpy()[:], batch.anchor_valid.numpy()[:] = anchors, valid
                update.append(content(batch))
            updates.append(update)
    return updates


def by_lane(items: list, lanes: Lanes) -> list[dict[int, list]]:
    """What a rank was given in every update, by lane; what it was given when idle is checked."""
    updates: list[dict[int, list]] = []
    for number, (tensors, turn, _) in enumerate(items):
        assert turn == number % lanes.turns
        if turn == 0:
            updates.append({})
        lane = lanes.mine(turn)
        if lane is None:
            assert is_idle(tensors)
            assert not tensors[8].any()  # the loss mask
            assert not tensors[9].any()  # anchors, and whether they are
            assert not tensors[10].any()
        else:
            updates[-1][lane] = tensors
    return updates


@pytest.fixture(scope="module")
def reader(tiny_cache) -> CacheReader:
    return CacheReader(tiny_cache)


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("packs", [1, 2, 3, 4])
def test_all_ranks_together_train_on_the_same_packs_whatever_their_number(reader, packs, passes):
    plain = few_packs(reader)
    wanted = one_after_the_other(plain, epochs=4, packs=packs, passes=passes)
    for world in range(1, 5):
        ranks = [Lanes(packs=packs, rank=rank, world=world) for rank in range(world)]
        together = [{} for _ in wanted]
        read = 0
        for lanes in ranks:
            source = few_packs(reader, lanes=lanes, passes=passes)
            assert source.steps(4) == len(wanted)
            feed = cpu_feed(source, START, len(wanted))
            items = read_on_host(feed)
            assert len(items) == lanes.turns * len(wanted)
            for update, mine in zip(together, by_lane(items, lanes), strict=True):
                assert not update.keys() & mine.keys()
                update |= mine
            read += feed.counts().read
        for update, packs_wanted in zip(together, wanted, strict=True):
            assert sorted(update) == [*range(packs)]
            assert all(same(update[lane], pack) for lane, pack in enumerate(packs_wanted))
        # From the disk once, whatever the passes.
        trained = len(wanted) // passes * packs
        assert read == sum(stored_in_order(plain, trained))


def stored_in_order(source: PackSource, packs: int) -> list[int]:
    return [source.stored_bytes(position) for position in positions_from(source, START, packs)]


@pytest.mark.parametrize(
    ("packs", "world", "passes"), [(2, 1, 1), (4, 1, 3), (3, 2, 2), (4, 3, 2), (2, 3, 2)]
)
def test_the_device_is_given_the_turns_of_every_rank(reader, device_feed, packs, world, passes):
    for rank in range(world):
        lanes = Lanes(packs=packs, rank=rank, world=world)
        source = few_packs(reader, lanes=lanes, passes=passes)
        steps = source.steps(3)
        found = read_on_device(device_feed(source, START, steps, seed=rank), seed=rank)
        assert agree(found, naive(source, START, steps))


@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_pack_is_read_once_and_its_anchors_are_drawn_for_every_pass(reader, device_feed, kind):
    filled, drawn = [], []

    class Noted(PackSource):
        def fill(self, batch, position, lane=0):
            filled.append((position.epoch, position.index, lane))
            return super().fill(batch, position, lane)

        def draw(self, batch, position, lane=0):
            drawn.append((position.epoch, position.index, position.turn, lane))
            return super().draw(batch, position, lane)

    plain = few_packs(reader)
    source = Noted(
        reader,
        plain.documents,
        layer_ids=plain.layer_ids,
        shape=plain.shape,
        seed=3,
        passes=3,
        lanes=Lanes(packs=3, rank=0, world=1),
    )
    steps = source.steps(3)
    feed = (cpu_feed if kind == "host" else device_feed)(source, START, steps)
    assert len([None for _ in feed]) == 3 * steps
    assert len(filled) == len(set(filled)) == steps
    assert len(drawn) == len(set(drawn)) == 3 * steps


def test_a_pack_is_copied_to_the_device_once_where_it_stays_there(reader, device_feed):
    for packs, copies in ((1, 4), (2, 2 * 4 * 3)):
        lanes = Lanes(packs=packs, rank=0, world=1)
        feed = device_feed(few_packs(reader, lanes=lanes, passes=3), START, 4 * 3)
        read_on_device(feed)
        assert feed.slot.sent == copies


def test_memory_is_for_the_packs_in_use_and_for_what_is_read_meanwhile(reader):
    assert packs_in_memory(turns=1, passes=5) == packs_in_memory(turns=8, passes=1) == 3
    turns, passes = 6, 2
    lanes = Lanes(packs=turns, rank=0, world=1)
    feed = cpu_feed(few_packs(reader, lanes=lanes, passes=passes), START, 8)
    items = iter(feed)
    next(items)
    until(lambda: all(future.done() for future in feed.fills.filling))
    # All that is read in the time of the first pass, if the reader just keeps up.
    assert len(feed.fills.filling) == packs_in_memory(turns=turns, passes=passes) - 1 == 5 + 3
    feed.close()


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("there", [0, 3, 4, 5])
@pytest.mark.parametrize(("packs", "world"), [(1, 1), (3, 1), (4, 3)])
def test_a_course_that_ends_early_ends_all_ranks_behind_the_last_whole_update(
    tiny_cache, device_feed, kind, there, packs, world
):
    passes, wanted = 2, there // packs * 2
    for rank in range(world):
        lanes = Lanes(packs=packs, rank=rank, world=world)
        plain = tiny_source(tiny_cache, lanes=lanes, passes=passes)
        course = Growing(planned(plain), there=there)
        course.end_early("the builder is gone")
        source = tiny_source(tiny_cache, lanes=lanes, passes=passes, course=course)
        if kind == "host":
            feed = cpu_feed(source, START, 100)
            found = read_on_host(feed)
        else:
            feed = device_feed(source, START, 100)
            found = read_on_device(feed)
        assert agree(found, naive(plain, START, wanted))
        assert feed.ended is not None
        assert feed.ended.reason == "the builder is gone"


def planned(source: PackSource) -> Planned:
    assert isinstance(source.course, Planned)
    return source.course


def test_no_update_is_begun_before_the_packs_of_all_ranks_are_there(tiny_cache):
    lanes = Lanes(packs=4, rank=0, world=2)  # its own packs are the first and the third
    plain = tiny_source(tiny_cache, lanes=lanes)
    course = Growing(planned(plain), there=3)
    feed = cpu_feed(tiny_source(tiny_cache, lanes=lanes, course=course), START, 2)
    found = []
    consumer = threading.Thread(target=lambda: found.extend(read_on_host(feed)))
    consumer.start()
    until(lambda: course.waiting > 0)
    time.sleep(0.05)
    assert not found
    assert feed.counts().read == 0
    course.grow()
    until(lambda: feed.counts().read > 0)
    course.grow(4)
    consumer.join()
    assert agree(found, naive(plain, START, 2))
    assert feed.ended is None


def test_a_course_that_grows_gives_what_a_planned_one_gives_into_the_next_epoch(
    tiny_cache, device_feed
):
    lanes = Lanes(packs=3, rank=0, world=1)
    plain = tiny_source(tiny_cache, lanes=lanes)
    course = Growing(planned(plain))
    source = tiny_source(tiny_cache, lanes=lanes, course=course)
    assert source.steps(3) is None
    steps = plain.steps(3)

    def build() -> None:
        for _ in range(len(plan_of(plain, 0))):
            time.sleep(0.005)
            course.grow()
        time.sleep(0.02)
        course.finish()

    builder = threading.Thread(target=build)
    builder.start()
    found = read_on_device(device_feed(source, START, steps))
    builder.join()
    length, wanted = len(plan_of(plain, 0)), naive(plain, START, steps)
    assert source.steps(3) == steps
    for (a, turn, behind), (b, other, position) in zip(found, wanted, strict=True):
        assert turn == other
        assert same(a, b)
        # While the length was unknown, the index just grew.
        assert behind in (position, Position(epoch=0, index=length + position.index))


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("way", ["interrupt", "close"])
def test_threads_that_wait_for_a_course_end_with_the_feed(tiny_cache, device_feed, kind, way):
    course = Growing(planned(tiny_source(tiny_cache)), there=1)
    source = tiny_source(tiny_cache, course=course)
    feed = (cpu_feed if kind == "host" else device_feed)(source, START, 8)
    items = iter(feed)
    next(items)
    until(lambda: course.waiting > 0)
    if way == "close":
        feed.close()
    else:
        # To the process, as a terminal sends it: the main thread wakes up for it.
        timer = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            next(items)
        timer.join()
    assert own_threads() == []
    assert feed.ended is None


@pytest.mark.parametrize("kind", ["host", "device"])
def test_waiting_for_a_course_is_no_reading(tiny_cache, device_feed, kind):
    course = Growing(planned(tiny_source(tiny_cache)))
    source = tiny_source(tiny_cache, course=course)
    timer = threading.Timer(0.5, course.grow, [2])
    timer.start()
    feed = (cpu_feed if kind == "host" else device_feed)(source, START, 2)
    assert len([None for _ in feed]) == 2
    assert feed.counts().read_seconds < 0.4
    assert feed.counts().waited > 0.3


def test_an_error_of_the_course_comes_out_at_its_pack(tiny_cache):
    class Damaged(Growing):
        def pack(self, epoch, index, *, stopped=None):
            if index == 2:
                raise CacheError("a damaged record")
            return super().pack(epoch, index, stopped=stopped)

    course = Damaged(planned(tiny_source(tiny_cache)), there=3)
    batches = iter(cpu_feed(tiny_source(tiny_cache, course=course), START, 4))
    assert [next(batches)[2].index for _ in range(2)] == [1, 2]
    with pytest.raises(CacheError, match="a damaged record"):
        next(batches)


def busy(milliseconds: int = 20) -> None:
    """Keep the current stream of the GPU busy for about so long."""
    torch.cuda._sleep(1_500_000 * milliseconds)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("lanes", [ONE, Lanes(packs=3, rank=1, world=2)])
def test_batches_on_the_gpu_are_those_of_the_naive_loop_while_it_is_busy(tiny_cache, passes, lanes):
    source = tiny_source(tiny_cache, passes=passes, lanes=lanes)
    chance, steps, device = random.Random(0), 30 // lanes.turns, torch.device("cuda")
    taken = [empty_passes(source.shape, passes=1, device=device)[0] for _ in range(30)]
    behinds = []
    feed = Feed(source, START, steps=steps, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for own, (batch, *where) in zip(taken, feed, strict=True):
            if chance.random() < 0.5:
                busy()  # the copy below then runs long after it was queued
            own.copy_(batch)
            behinds.append(where)
            if chance.random() < 0.5:
                feed.release()
            if chance.random() < 0.5:
                busy()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    found = [(content(batch), *where) for batch, where in zip(taken, behinds, strict=True)]
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
            found = content(feed.slot.held[0])
    assert same(found, wanted)
    assert not finished.query()
    feed.close()


@pytest.mark.gpu
def test_the_gpu_is_idle_while_a_pack_is_read_and_not_while_it_computes(tiny_cache):
    class Slow(PackSource):
        def fill(self, batch, position, lane=0):
            time.sleep(0.1)
            return super().fill(batch, position, lane)

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
