"""Shelves with the memory of their slots: one for every group of trials, within a budget.

The caller's lock guards all of it.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

from dflash_cache.reader import memory_here
from dflash_cache.schema import FINAL_HIDDEN, Identity
from dflash_fit.pack_memory import PackMemory, memory_bytes
from dflash_fit.shelf import Order, Shelf, Slot

Plane = int | str

# A trial has two packs read at once and one more in hand: with three slots none waits for itself.
LEAST_SLOTS = 3
MOST_SLOTS = 6  # more would only let trials drift further apart
SHARE_OF_MEMORY = 0.25  # every trial has host batches of its own


def default_budget() -> int:
    """Bytes of memory that packs may take."""
    return int(SHARE_OF_MEMORY * memory_here())


def union(wanted: Iterable[Sequence[Plane]]) -> tuple[Plane, ...]:
    """All planes that anybody wants; the final hidden state is the last."""
    every = {plane for planes in wanted for plane in planes}
    return tuple(sorted(every, key=lambda plane: (isinstance(plane, str), plane)))


class Stock:
    """A shelf and its memory.

    Trials join until the first of them begins; then it is `opened`, and what its slots hold is
    known.  Once all have left others may join, and find what was measured still there.
    """

    def __init__(self, identity: Identity, *, rows: int) -> None:
        self.identity, self.rows = identity, rows
        self.trials: dict[str, Sequence[Plane]] = {}
        self.planes: tuple[Plane, ...] = ()
        self.opened = False
        self.shelf = Shelf(slots=0, patience=0.0, grow=lambda: False)
        self.memories: dict[Slot, PackMemory] = {}

    @property
    def slot_bytes(self) -> int:
        return memory_bytes(self.identity, planes=len(self.planes), rows=self.rows)

    @property
    def training_bytes(self) -> int:
        return self.shelf.slots * self.slot_bytes

    @property
    def measuring_bytes(self) -> int:
        return len(self.shelf.measuring) * self.slot_bytes

    def planes_read(self, order: Order | None) -> tuple[Plane, ...]:
        """What is read of a pack, the first planes of its memory."""
        # Nothing that is measured needs the final hidden state.
        return tuple(p for p in self.planes if order is not None or p != FINAL_HIDDEN)

    def memory(self, slot: Slot) -> PackMemory:
        """Made when it is needed first."""
        if slot not in self.memories:
            self.memories[slot] = PackMemory(self.identity, planes=len(self.planes), rows=self.rows)
        return self.memories[slot]

    def close(self) -> None:
        """Give all memory back."""
        for memory in self.memories.values():
            memory.close()
        self.memories.clear()
        self.shelf = Shelf(slots=0, patience=0.0, grow=lambda: False)


class Stocks:
    """The stocks of a sweep; those that joined a group too late have one to themselves."""

    def __init__(self, identity: Identity, *, budget: int, patience: float) -> None:
        self.identity, self.budget, self.patience = identity, budget, patience
        self.current: dict[str, Stock] = {}  # by group
        self.every: list[Stock] = []

    def join(self, trial: str, group: str, planes: Sequence[Plane], rows: int) -> Stock:
        """The stock of a trial that will come."""
        stock = self.current.get(group)
        if stock is None or stock.opened or stock.rows != rows:
            stock = self.current[group] = Stock(self.identity, rows=rows)
            self.every.append(stock)
        stock.trials[trial] = planes
        return stock

    def most_bytes(self, trials: Iterable[tuple[str, Sequence[Plane], int]]) -> int:
        """About what packs of trials with these groups, planes and rows take, if all are there."""
        wanted: defaultdict[tuple[str, int], list[Sequence[Plane]]] = defaultdict(list)
        for group, planes, rows in trials:
            wanted[group, rows].append(planes)
        sizes = (
            memory_bytes(self.identity, planes=len(union(planes)), rows=rows)
            for (_, rows), planes in wanted.items()
        )
        return min(self.budget, 2 * MOST_SLOTS * sum(sizes))  # as many are measured, at a guess

    def open(self, stock: Stock) -> str | None:
        """Before the first of its trials begins; says what is to be told."""
        planes = union(stock.trials.values())
        if planes != stock.planes or not stock.shelf.slots:
            stock.close()
            stock.planes = planes
            stock.shelf = Shelf(
                slots=self._slots(stock),
                patience=self.patience,
                grow=partial(self._may_grow, stock),
            )
        else:
            stock.shelf.forget()
        stock.opened = True
        for trial in stock.trials:
            stock.shelf.join(trial)
        if stock.shelf.slots or len(stock.trials) == 1:
            return None
        return (
            f"{LEAST_SLOTS} packs of {stock.slot_bytes / 1e9:.3g} GB do not fit the memory for "
            f"shared reads, {self.budget / 1e9:.3g} GB: trials {', '.join(stock.trials)} read by "
            "themselves; a smaller --token-budget needs less"
        )

    def leave(self, trial: str, stock: Stock) -> None:
        """A trial is over."""
        del stock.trials[trial]
        if stock.opened:
            stock.shelf.leave(trial)
        if not stock.trials:
            stock.opened = False
            if stock not in self.current.values():
                self._drop(stock)

    def close(self) -> None:
        for stock in list(self.every):
            self._drop(stock)
        self.current.clear()

    def _drop(self, stock: Stock) -> None:
        stock.close()
        self.every.remove(stock)

    def _slots(self, stock: Stock) -> int:
        """Slots for training: from half of the budget if it has enough, otherwise the least."""
        size = stock.slot_bytes
        if self._training() + MOST_SLOTS * size > self.budget // 2:
            for other in self.every:
                if not other.trials:
                    other.close()
        slots = min(MOST_SLOTS, (self.budget // 2 - self._training()) // size)
        if slots >= LEAST_SLOTS:
            return slots
        fits = self._training() + self._measuring() + LEAST_SLOTS * size <= self.budget
        return LEAST_SLOTS if fits else 0

    def _may_grow(self, stock: Stock) -> bool:
        """Whether there is memory for one more pack that is measured."""
        measuring = self._measuring() + stock.slot_bytes
        return measuring <= self.budget // 2 and self._training() + measuring <= self.budget

    def _training(self) -> int:
        return sum(stock.training_bytes for stock in self.every)

    def _measuring(self) -> int:
        return sum(stock.measuring_bytes for stock in self.every)
