"""What is on the shelf, for any trials at any speeds: nobody is stuck, nothing goes too soon."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_fit.shelf import Ask, Shelf

FILLERS = 2  # packs that a trial asks for at the same time
IN_HAND = 3  # packs that a trial has room for


@dataclass
class Player:
    """A trial with two threads that fetch packs in order, and room for a few of them."""

    name: str
    begins: int
    ends: int
    fetched: int = 0  # by the threads, to be asked for
    errands: list[int] = field(default_factory=list)
    asks: dict[int, Ask] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.fetched = self.begins

    def trained(self) -> int:
        """The pack that is trained on next."""
        return next(n for n in range(self.begins, self.ends + 1) if n not in self.done)

    def needs(self, number: int) -> bool:
        return self.begins <= number < self.ends and number not in self.done

    @property
    def over(self) -> bool:
        return len(self.done) == self.ends - self.begins


class Game:
    """All that can happen next, in any order, and what must never happen."""

    def __init__(self, players: list[Player], *, slots: int, mortal: bool = False) -> None:
        self.players = {player.name: player for player in players}
        self.shelf = Shelf(slots=slots, patience=1.0, grow=lambda: False)
        self.mortal = mortal
        self.reads: dict[int, int] = {}
        self.alone: dict[int, int] = {}
        self.reading: list[tuple[Ask, object]] = []
        self.seen: dict[int, tuple] = {}  # what every slot holds
        for name in self.players:
            self.shelf.join(name)
        self.unborn = set(self.players)

    def moves(self) -> list[tuple]:
        moves = [("begin", name) for name in self.unborn]
        moves += [("read", at) for at in range(len(self.reading))]
        for name, player in self.players.items():
            if name in self.unborn:
                continue
            if player.over:
                moves.append(("leave", name))
                continue
            room = player.fetched < min(player.trained() + IN_HAND, player.ends)
            if room and len(player.errands) + len(player.asks) < FILLERS:
                moves.append(("fetch", name))
            moves += [("ask", name, number) for number in player.errands]
            moves += [
                ("done", name, number)
                for number, ask in player.asks.items()
                if ask.answered and not self._is_reading(ask)
            ]
        return moves

    def _is_reading(self, ask: Ask) -> bool:
        return any(found is ask for found, _ in self.reading)

    def play(self, kind: str, *what) -> None:
        getattr(self, kind)(*what)
        self.check()

    def begin(self, name: str) -> None:
        self.unborn.discard(name)
        self.shelf.begin(name, (0, self.players[name].begins))

    def fetch(self, name: str) -> None:
        player = self.players[name]
        player.errands.append(player.fetched)
        player.fetched += 1

    def ask(self, name: str, number: int) -> None:
        player = self.players[name]
        player.errands.remove(number)
        ask = self.shelf.ask(name, f"pack {number}", (0, number), now=0.0)
        player.asks[number] = ask

    def read(self, at: int) -> None:
        _, slot = self.reading.pop(at)
        self.shelf.filled(slot, now=0.0)

    def done(self, name: str, number: int) -> None:
        player = self.players[name]
        ask = player.asks.pop(number)
        if ask.alone:
            self.alone[number] = self.alone.get(number, 0) + 1
        else:
            assert (ask.slot.key, ask.slot.order) == (f"pack {number}", (0, number))
            assert ask.slot.ready
        self.shelf.done(ask)
        player.done.add(number)

    def leave(self, name: str) -> None:
        self.shelf.leave(name)
        del self.players[name]
        self.unborn.discard(name)

    def check(self) -> None:
        """Take up new readings; a pack went only when nobody needed it."""
        for player in self.players.values():
            for ask in player.asks.values():
                if ask.reads and not ask.slot.ready and not self._is_reading(ask):
                    self.reading.append((ask, ask.slot))
                    number = ask.order[1]
                    self.reads[number] = self.reads.get(number, 0) + 1
        for slot in self.shelf.training:
            before, now = self.seen.get(slot.number), (slot.order, slot.key)
            if before not in (None, now):
                for player in self.players.values():
                    late = player.name in self.unborn or player.needs(before[0][1])
                    in_hand = player.asks.get(before[0][1])
                    assert not late or (in_hand is not None and in_hand.alone), (before, player)
            self.seen[slot.number] = now
        assert len(self.shelf.training) <= self.shelf.slots

    def to_the_end(self, choose: random.Random, *, speeds: dict[str, float]) -> None:
        """Play until all are over; `speeds` say whose turn it is how often."""
        while self.players or self.reading:
            moves = self.moves()
            assert moves, ("a deadlock", self.players, self.shelf.waiting)
            weights = [speeds.get(move[1], 1.0) if move[0] != "read" else 1.0 for move in moves]
            if self.mortal and self.players and choose.random() < 0.02:
                self.play("leave", choose.choice(sorted(self.players)))
            else:
                self.play(*choose.choices(moves, weights)[0])


speeds = st.lists(st.sampled_from([0.01, 0.2, 1.0, 5.0]), min_size=1, max_size=4)
seeds = st.integers(0, 2**32)


def names(count: int) -> list[str]:
    return [f"t{number}" for number in range(count)]


@given(speeds=speeds, seed=seeds, slots=st.integers(3, 6), packs=st.integers(1, 12))
def test_trials_of_any_speeds_that_begin_together_read_every_pack_once(speeds, seed, slots, packs):
    players = [Player(name, 0, packs) for name in names(len(speeds))]
    game = Game(players, slots=slots)
    game.to_the_end(random.Random(seed), speeds=dict(zip(names(4), speeds, strict=False)))
    read = {n: game.reads.get(n, 0) + game.alone.get(n, 0) for n in range(packs)}
    assert read == dict.fromkeys(range(packs), 1)
    if len(speeds) > 1:
        assert not game.alone


@given(
    speeds=speeds,
    seed=seeds,
    slots=st.integers(0, 6),
    spans=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=4, max_size=4),
    mortal=st.booleans(),
)
def test_trials_that_begin_end_or_die_anywhere_never_stand_still(
    speeds, seed, slots, spans, mortal
):
    players = [
        Player(name, begins, begins + count)
        for name, (begins, count) in zip(names(len(speeds)), spans, strict=False)
    ]
    game = Game(players, slots=slots, mortal=mortal)
    game.to_the_end(random.Random(seed), speeds=dict(zip(names(4), speeds, strict=False)))
    assert not game.shelf.waiting
    assert not any(slot.busy for slot in game.shelf.training)


def shelf_of(*trials: str, slots: int = 3, measuring: int = 0) -> Shelf:
    """All have begun at the first pack; patience is 10."""

    def grow() -> bool:
        return len(shelf.measuring) < measuring

    shelf = Shelf(slots=slots, patience=10.0, grow=grow)
    for trial in trials:
        shelf.join(trial)
    for trial in trials:
        shelf.begin(trial, (0, 0))
    return shelf


def take(shelf: Shelf, trial: str, number: int, *, now: float = 0.0) -> str:
    """Ask, and copy or read if there is an answer; which one it was."""
    ask = shelf.ask(trial, number, (0, number), now=now)
    return finish(shelf, ask, now=now)


def measure(shelf: Shelf, trial: str, key: str) -> str:
    return finish(shelf, shelf.ask(trial, key, None, now=0.0), now=0.0)


def finish(shelf: Shelf, ask: Ask, *, now: float) -> str:
    if not ask.answered:
        return "waits"
    word = "reads" if ask.reads else "alone" if ask.alone else "finds"
    if ask.reads:
        shelf.filled(ask.slot, now=now)
    shelf.done(ask)
    return word


def test_a_slow_trial_is_waited_for_so_long_and_then_told_and_left_behind():
    shelf = shelf_of("quick", "other", "slow")
    assert [take(shelf, "quick", n) for n in range(3)] == ["reads"] * 3
    assert [take(shelf, "other", n) for n in range(2)] == ["finds"] * 2
    ask = shelf.ask("quick", 3, (0, 3), now=5.0)
    assert not ask.placed
    assert shelf.expire(now=14.9) == []
    assert not ask.placed
    assert shelf.expire(now=15.0) == [
        "trial slow is slower than the others by 3 packs; it reads by itself from here"
    ]
    assert finish(shelf, ask, now=15.0) == "reads"
    assert [take(shelf, "other", n) for n in (2, 3)] == ["finds"] * 2
    assert [take(shelf, "quick", n) for n in range(4, 9)] == ["reads"] * 3 + ["waits"] * 2
    # It finds what is there by chance, and holds nobody up.
    assert [take(shelf, "slow", n) for n in (0, 3, 4, 9)] == ["alone", "alone", "finds", "alone"]
    assert [take(shelf, "other", n) for n in range(4, 7)] == ["finds"] * 3


def test_a_trial_that_takes_the_oldest_pack_in_time_is_waited_for_anew():
    shelf = shelf_of("quick", "slow")
    for number in range(3):
        take(shelf, "quick", number)
    for number in range(3, 9):
        now = 9.0 * number
        ask = shelf.ask("quick", number, (0, number), now=now)
        assert shelf.expire(now=now + 9.0) == []
        assert take(shelf, "slow", number - 3) == "finds"
        assert finish(shelf, ask, now=now + 9.0) == "reads"


def test_nobody_is_left_behind_because_of_a_slow_disk():
    shelf = shelf_of("a", "b")
    asks = [shelf.ask("a", n, (0, n), now=0.0) for n in range(4)]
    assert shelf.expire(now=100.0) == []
    for ask in asks[:3]:
        shelf.filled(ask.slot, now=100.0)
        shelf.done(ask)
    assert shelf.expire(now=109.0) == []  # b could not take them earlier
    assert take(shelf, "b", 0) == "finds"
    assert asks[3].reads


def test_who_stands_still_in_the_middle_of_a_copy_keeps_its_slots_and_nothing_else():
    shelf = shelf_of("a", "b", slots=2)
    for number in range(2):
        take(shelf, "a", number)
        shelf.ask("b", number, (0, number), now=0.0)  # never done
    ask = shelf.ask("a", 2, (0, 2), now=0.0)
    assert not ask.placed
    assert shelf.expire(now=10.0) == []
    assert ask.alone


def test_a_trial_that_leaves_is_not_waited_for():
    shelf = shelf_of("a", "b", "c")
    for number in range(3):
        take(shelf, "a", number)
        take(shelf, "b", number)
    ask = shelf.ask("a", 3, (0, 3), now=0.0)
    shelf.leave("c")
    assert ask.reads


def test_a_trial_that_has_not_come_yet_is_waited_for():
    shelf = shelf_of("a", slots=2)
    shelf.join("b")
    assert [take(shelf, "a", n) for n in range(2)] == ["reads", "reads"]
    ask = shelf.ask("a", 2, (0, 2), now=0.0)
    assert not ask.placed
    shelf.begin("b", (0, 1))  # it will not want the first
    assert finish(shelf, ask, now=0.0) == "reads"
    assert [take(shelf, "b", n) for n in (1, 2)] == ["finds", "finds"]


def test_what_nobody_else_will_take_is_read_alone():
    shelf = shelf_of("a")
    shelf.join("b")
    shelf.begin("b", (1, 0))
    assert take(shelf, "a", 0) == "alone"
    assert finish(shelf, shelf.ask("a", "next", (1, 0), now=0.0), now=0.0) == "reads"
    assert finish(shelf, shelf.ask("b", "next", (1, 0), now=0.0), now=0.0) == "finds"


def test_an_error_is_heard_by_all_who_asked_and_the_next_reads_again():
    shelf = shelf_of("a", "b", "c")
    first, second = (shelf.ask(trial, 0, (0, 0), now=0.0) for trial in "ab")
    error = OSError("damaged")
    shelf.failed(first.slot, error)
    assert [first.error, second.error] == [error, error]
    assert first.answered
    assert second.answered
    shelf.leave("a")
    shelf.leave("b")
    shelf.join("d")
    assert take(shelf, "c", 0) == "reads"


def test_who_asked_and_left_is_let_go_while_its_pack_is_still_being_read():
    shelf = shelf_of("a", "b", "c")
    reads, waits = (shelf.ask(trial, 0, (0, 0), now=0.0) for trial in "ab")
    shelf.leave("b")
    shelf.leave("a")
    assert waits.answered
    assert shelf.training[0].busy
    shelf.filled(reads.slot, now=0.0)
    assert take(shelf, "c", 0) == "finds"


def test_measured_packs_stay_until_there_is_no_room_for_others():
    shelf = shelf_of("a", "b", measuring=2)
    assert [measure(shelf, "a", key) for key in "xyxy"] == ["reads", "reads", "finds", "finds"]
    assert [measure(shelf, "b", key) for key in "yx"] == ["finds", "finds"]
    assert measure(shelf, "b", "z") == "reads"  # y was asked for before x
    assert [measure(shelf, "a", key) for key in "xzy"] == ["finds", "finds", "reads"]


def test_measuring_never_waits():
    shelf = shelf_of("a", "b", measuring=1)
    busy = shelf.ask("a", "x", None, now=0.0)
    assert measure(shelf, "b", "y") == "alone"
    same = shelf.ask("b", "x", None, now=0.0)
    assert not same.answered
    shelf.filled(busy.slot, now=0.0)
    assert same.answered


def test_packs_that_are_unlike_cannot_have_one_order():
    shelf = shelf_of("a", "b")
    take(shelf, "a", 0)
    with pytest.raises(AssertionError):
        shelf.ask("b", "another", (0, 0), now=0.0)


def test_what_was_taken_long_ago_is_not_kept_again(monkeypatch):
    monkeypatch.setattr("dflash_fit.shelf.TAKEN_KEPT", 4)
    shelf = shelf_of("a", "b")
    for number in range(10):
        take(shelf, "a", number)
        take(shelf, "b", number)
    a = shelf.trials["a"]
    assert [n for n in range(12) if a.wants((0, n))] == [10, 11]
    assert len(a.taken) == 4
