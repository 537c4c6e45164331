"""Which packs are kept in memory for trials that see the same ones, and until when.

Trials take training packs in the same order, each from where it begins.  One has a pack put on the
shelf, the others find it there; its slot is free once all of them have taken it.  Packs that are
measured come again and again: they stay until a slot is wanted for another.

Pure names and integers: no torch, no I/O, no threads, and the time is an argument.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

Order = tuple[int, int]  # epoch of a training pack, and its number there
FIRST: Order = (0, 0)
# Packs that a trial takes at the same time come in any order, but never are so many of them.
TAKEN_KEPT = 256


@dataclass(eq=False)
class Slot:
    """Memory for one pack."""

    number: int
    order: Order | None = None  # None: of a pack that is measured
    key: Hashable = None
    reading: bool = False
    ready: bool = False
    users: list["Ask"] = field(default_factory=list)  # who wait for it or copy from it
    last_asked: int = 0

    @property
    def busy(self) -> bool:
        return self.reading or bool(self.users)


@dataclass(eq=False)
class Ask:
    """A trial wants a pack.

    Once `answered`: it reads the pack into the slot for all (`reads`), finds it there, reads it for
    itself alone (`alone`), or hears of the error of who read it.
    """

    trial: str
    key: Hashable
    order: Order | None
    since: float
    slot: Slot | None = None
    reads: bool = False
    alone: bool = False
    error: Exception | None = None

    @property
    def placed(self) -> bool:
        """Whether it no longer waits for other trials, but for the disk at most."""
        return self.alone or self.slot is not None or self.error is not None

    @property
    def answered(self) -> bool:
        found = self.slot is not None and self.slot.ready
        return self.reads or self.alone or found or self.error is not None


@dataclass(eq=False)
class Trial:
    """A trial, and what it has taken; while `begins` is unknown it may want anything."""

    name: str
    begins: Order | None = None
    attached: bool = True
    taken: list[Order] = field(default_factory=list)  # ascending; none is wanted before them all

    def wants(self, order: Order | None) -> bool:
        """Whether a training pack is kept for it."""
        if order is None or not self.attached:
            return False
        return (self.begins is None or order >= self.begins) and not self._has(order)

    def _has(self, order: Order) -> bool:
        if len(self.taken) == TAKEN_KEPT and order < self.taken[0]:
            return True
        at = bisect_left(self.taken, order)
        return at < len(self.taken) and self.taken[at] == order

    def take(self, order: Order) -> None:
        if not self._has(order):
            insort(self.taken, order)
            del self.taken[:-TAKEN_KEPT]


class Shelf:
    """The packs in memory.  After every call some asks may be answered that were not before.

    `slots` are for training; for measuring one more is taken whenever `grow()` says that there is
    memory for it.  An ask that has waited for slow trials for `patience` seconds detaches them: no
    pack is kept or read for them any more, they only find what happens to be there.
    """

    def __init__(self, *, slots: int, patience: float, grow: Callable[[], bool]) -> None:
        self.slots, self.patience, self.grow = slots, patience, grow
        self.trials: dict[str, Trial] = {}
        self.training: list[Slot] = []
        self.measuring: list[Slot] = []
        self.waiting: list[Ask] = []  # for room
        self.asked = 0
        self.moved = 0.0  # when a pack was last read

    def join(self, trial: str) -> None:
        """A trial that will come: packs are kept for it already."""
        assert trial not in self.trials, trial
        self.trials[trial] = Trial(name=trial)

    def forget(self) -> None:
        """All trials have left: what is there for training was for them; nobody waits for it.

        What is still being read for one that died stays where it is.
        """
        for slot in self.training:
            assert not slot.users, slot
            if not slot.reading:
                slot.order, slot.key, slot.ready = None, None, False

    def begin(self, trial: str, order: Order) -> None:
        """The trial is here, and this is the first pack that it will take."""
        self.trials[trial].begins = order
        self._settle()

    def leave(self, trial: str) -> None:
        """The trial is over; its asks are let go."""
        self.trials.pop(trial, None)
        for slot in self.training + self.measuring:
            for ask in slot.users:
                ask.alone |= ask.trial == trial and not ask.answered
            slot.users = [ask for ask in slot.users if ask.trial != trial]
        for ask in self.waiting:
            ask.alone |= ask.trial == trial
        self._settle()

    def ask(self, trial: str, key: Hashable, order: Order | None, *, now: float) -> Ask:
        """A trial wants a pack, with an order if it is for training."""
        for slot in self.training:
            # Packs of one order that are unlike would be kept for trials that never take them.
            assert order is None or slot.order != order or slot.key == key, (trial, order)
        ask = Ask(trial=trial, key=key, order=order, since=now)
        self.waiting.append(ask)
        self._settle()
        return ask

    def filled(self, slot: Slot, *, now: float) -> None:
        """The pack of a slot has been read."""
        slot.reading, slot.ready, self.moved = False, True, now
        self._settle()

    def failed(self, slot: Slot, error: Exception) -> None:
        """The pack of a slot cannot be read: everybody who asked for it hears why."""
        for ask in slot.users:
            ask.error, ask.slot, ask.reads = error, None, False
        slot.reading, slot.key, slot.order, slot.users = False, None, None, []
        self._settle()

    def done(self, ask: Ask) -> None:
        """The trial has copied the pack, or read it."""
        if ask.slot is not None and ask in ask.slot.users:
            ask.slot.users.remove(ask)
            self._settle()

    def expire(self, *, now: float) -> list[str]:
        """Detach trials that others have waited for too long; what is to be told about them."""
        told: list[str] = []
        if self.waiting:
            ask = min(self.waiting, key=lambda ask: ask.since)
            if now - max(ask.since, self.moved) >= self.patience:
                told = self._detach_for(ask)
                self._settle()
        return told

    def _detach_for(self, ask: Ask) -> list[str]:
        """Give an ask the slot whose pack has been there for longest, or let it read alone."""
        asker = self.trials[ask.trial]
        held = [s for s in self.training if not s.busy and not asker.wants(s.order)]
        if not held:
            ask.alone = not any(slot.reading for slot in self.training)
            return []
        oldest = min(held, key=lambda slot: slot.order or FIRST)
        slow = [trial for trial in self.trials.values() if trial.wants(oldest.order)]
        told = [
            f"trial {trial.name} is slower than the others by "
            f"{sum(trial.wants(slot.order) for slot in self.training)} packs; it reads by itself "
            "from here"
            for trial in slow
        ]
        for trial in slow:
            trial.attached = False
        return told

    def _settle(self) -> None:
        """Place those who wait, the earliest pack first.

        Where they wait for nobody but each other, the first of them reads alone.
        """
        while self.waiting:
            self.waiting.sort(key=lambda ask: ask.order or FIRST)
            self.waiting = [ask for ask in self.waiting if not self._place(ask)]
            if not self.waiting or not self._stuck():
                return
            self.waiting[0].alone = True

    def _place(self, ask: Ask) -> bool:
        """Answer an ask or give it a slot, if that is possible now."""
        trial = self.trials.get(ask.trial)
        if trial is None or ask.alone:
            ask.alone = True
        elif slot := self._find(ask):
            self._use(slot, ask)
        elif ask.order is not None and not self._shared(trial, ask.order):
            ask.alone = True
        elif slot := self._room(ask):
            slot.order, slot.key, slot.reading, slot.ready = ask.order, ask.key, True, False
            ask.reads = True
            self._use(slot, ask)
        elif ask.order is None:
            ask.alone = True
        else:
            return False
        if trial is not None and ask.order is not None:
            trial.take(ask.order)
        return True

    def _find(self, ask: Ask) -> Slot | None:
        slots = self.measuring if ask.order is None else self.training
        return next((s for s in slots if (s.key, s.order) == (ask.key, ask.order)), None)

    def _use(self, slot: Slot, ask: Ask) -> None:
        self.asked += 1
        slot.last_asked = self.asked
        slot.users.append(ask)
        ask.slot = slot

    def _shared(self, trial: Trial, order: Order) -> bool:
        """Whether another trial will want what this one reads."""
        others = (other for other in self.trials.values() if other is not trial)
        return trial.attached and any(other.wants(order) for other in others)

    def _room(self, ask: Ask) -> Slot | None:
        """A slot whose pack, if it has any, nobody needs any more."""
        if ask.order is None:
            return self._measuring_room()
        if len(self.training) < self.slots:
            return self._new(self.training)
        free = (slot for slot in self.training if not slot.busy and not self._kept(slot))
        return min(free, key=lambda slot: slot.last_asked, default=None)

    def _measuring_room(self) -> Slot | None:
        if self.grow():
            return self._new(self.measuring)
        idle = (slot for slot in self.measuring if not slot.busy)
        return min(idle, key=lambda slot: slot.last_asked, default=None)

    def _new(self, slots: list[Slot]) -> Slot:
        slot = Slot(number=len(self.training) + len(self.measuring))
        slots.append(slot)
        return slot

    def _kept(self, slot: Slot) -> bool:
        return any(trial.wants(slot.order) for trial in self.trials.values())

    def _stuck(self) -> bool:
        """Whether every slot is kept for a trial that waits for an earlier pack.

        It takes that first, so no slot comes free before one of those who wait has been let go.
        """
        first = {ask.trial: ask.order or FIRST for ask in reversed(self.waiting)}  # sorted
        return not any(slot.busy for slot in self.training) and all(
            any(
                first[name] < (slot.order or FIRST) and self.trials[name].wants(slot.order)
                for name in first
            )
            for slot in self.training
        )
