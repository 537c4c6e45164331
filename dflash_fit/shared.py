"""One read for several trials: packs in shared memory, filled once, copied by all who want them.

This is the side of the sweep; `shared_reader` is that of a trial, and says how they talk.
"""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from fractions import Fraction
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.reduction import send_handle
from pathlib import Path
from socket import SHUT_RDWR, socket
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, Self

from dflash_cache.errors import DFlashError
from dflash_cache.reader import CacheReader
from dflash_fit.errors import FitError
from dflash_fit.shared_reader import Hello, Show, Want
from dflash_fit.shelf import Ask, Order
from dflash_fit.stock import Plane, Stock, Stocks, default_budget
from dflash_fit.tally import Tally

# A trial that keeps another waiting for so long is left behind.  Less would part trials that only
# compile their step: that takes one of them up to 45 s, the next hardly any time.
PATIENCE = 120.0  # seconds
LOOK = 0.5  # seconds between looks at how long somebody has waited
LONGEST_FOLDER = 80  # the path of a socket has at most 107 bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class Member:
    """A trial from `join` to `leave`."""

    name: str
    stock: Stock


class SharedReads:
    """Reads packs of a sealed cache for all trials of a sweep that want them.

    `budget_bytes` is for the memory of packs.  `told` are words for people.
    """

    def __init__(
        self,
        cache: str | Path,
        *,
        budget_bytes: int | None = None,
        patience: float = PATIENCE,
        direct: bool | None = None,
    ) -> None:
        self.reader = CacheReader(cache, direct=direct)
        budget = default_budget() if budget_bytes is None else budget_bytes
        self.stocks = Stocks(self.reader.identity, budget=budget, patience=patience)
        self.look = min(LOOK, patience / 4)
        self.told: list[str] = []
        self.members: dict[str, Member] = {}
        self.tally = Tally()
        self.waited: defaultdict[str, float] = defaultdict(float)
        self.changed = threading.Condition()  # guards everything
        self.closing = False
        self.connections: set[Connection] = set()
        self.threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        folder = gettempdir()
        # Only its owner may look into a temporary folder, so whoever connects is the same user.
        self.folder = TemporaryDirectory(
            prefix="dflash-", dir=folder if len(os.fsencode(folder)) < LONGEST_FOLDER else "/tmp"
        )
        self.address = f"{self.folder.name}/reads"
        self.listener = Listener(self.address, "AF_UNIX", backlog=128)
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        """Who still asks hears that the reader is gone; packs that are being read are finished."""
        with self.changed:
            self.closing = True
            for connection in self.connections:
                _hang_up(connection)
            for member in list(self.members.values()):
                self._leave(member)
        with suppress(OSError):
            Client(self.address, "AF_UNIX").close()  # wakes who accepts
        while self.threads:
            self.threads.pop().join()
        self.listener.close()
        self.folder.cleanup()
        self.stocks.close()

    def most_bytes(self, trials: Iterable[tuple[str, Sequence[Plane], int]]) -> int:
        """Memory that packs of trials with these groups, planes and rows may take."""
        return self.stocks.most_bytes(trials)

    def join(self, trial: str, group: str, planes: Sequence[Plane], rows: int) -> None:
        """A trial that will come: from now on packs of its group are kept for it.

        `planes` are target layers and FINAL_HIDDEN, `rows` the tokens of a pack.  It shares with
        those of its group that join before the first of them begins.
        """
        self.leave(trial)
        with self.changed:
            stock = self.stocks.join(trial, group, planes, rows)
            self.members[trial] = Member(name=trial, stock=stock)

    def leave(self, trial: str) -> None:
        """The process of a trial is over."""
        with self.changed:
            if trial in self.members:
                self._leave(self.members[trial])

    def _leave(self, member: Member) -> None:
        if self._knows(member):
            del self.members[member.name]
            self.stocks.leave(member.name, member.stock)
            self.changed.notify_all()

    def _knows(self, member: Member) -> bool:
        return self.members.get(member.name) is member

    def counts(self) -> dict[str, Any]:
        """Bytes so far, as `Tally.counts` says; and `waited`, the seconds that a trial waited for
        slower ones.  Exact once nobody reads any more, and after the end.
        """
        with self.changed:
            return self.tally.counts(waited=self.waited)

    # --- what its threads do ---

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, name="shared read", daemon=True)
        self.threads = [t for t in self.threads if t.is_alive()] + [thread]
        thread.start()

    def _accept(self) -> None:
        while True:
            connection = self.listener.accept()
            with self.changed:
                if self.closing:
                    connection.close()
                    return
                self.connections.add(connection)
                self._start(self._serve, connection)

    def _serve(self, connection: Connection) -> None:
        """The life of a connection."""
        try:
            with suppress(EOFError, OSError):  # the trial is gone, or the sweep ends
                hello = connection.recv()
                member = self._member(hello)
                if member is None:
                    connection.send(FitError(f"the sweep knows no trial {hello.trial}"))
                elif hello.begins is not None:
                    self._follow(connection, member, hello.begins)
                else:
                    while True:
                        self._answer(connection, member, connection.recv())
        finally:
            with self.changed:
                self.connections.discard(connection)
                connection.close()

    def _member(self, hello: Hello) -> Member | None:
        with self.changed:
            return self.members.get(hello.trial)

    def _follow(self, connection: Connection, member: Member, begins: Order) -> None:
        """See a trial begin, and end."""
        stock = member.stock
        try:
            with self.changed:
                if not self._knows(member):
                    raise EOFError
                if not stock.opened:
                    told = self.stocks.open(stock)
                    self.told += [told] if told else []
                stock.shelf.begin(member.name, begins)
                self.changed.notify_all()
            connection.send((stock.planes, stock.rows))
            connection.recv()
        finally:
            with self.changed:
                self._leave(member)

    def _answer(self, connection: Connection, member: Member, want: Want) -> None:
        """See to it that a trial gets a pack."""
        stock, key = member.stock, (want.documents, want.starts)
        with self.changed:
            if not self._knows(member):
                raise EOFError
            ask = stock.shelf.ask(member.name, key, want.order, now=time.monotonic())
            self.changed.notify_all()
        try:
            self._wait(member, ask)
            if ask.reads:
                self._read(stock, ask, want)
            connection.send(self._reply(member, ask, want))
            while isinstance(word := connection.recv(), Show):
                self._show(connection, stock, ask)
            with self.changed:
                self.tally.read_alone(member.name, word)
        finally:
            with self.changed:
                stock.shelf.done(ask)
                self.changed.notify_all()

    def _wait(self, member: Member, ask: Ask) -> None:
        """Until there is an answer; slower trials are waited for only so long."""
        shelf = member.stock.shelf
        with self.changed:
            while not ask.placed:
                began = time.monotonic()
                self.changed.wait(self.look)
                self.waited[member.name] += time.monotonic() - began
                if told := shelf.expire(now=time.monotonic()):
                    self.told += told
                    self.changed.notify_all()
            self.changed.wait_for(lambda: ask.answered)

    def _read(self, stock: Stock, ask: Ask, want: Want) -> None:
        """Read a pack into its slot, for all who want it."""
        slot, planes = ask.slot, stock.planes_read(want.order)
        assert slot is not None
        reader = copy(self.reader)  # the same reader, but it counts this pack alone
        reader.bytes_read = 0
        failed: Exception | None = None
        try:
            with self.changed:
                self.tally.forget(slot)
                buffers = stock.memory(slot).buffers
            into = {name: part[: len(planes)] for name, part in buffers.items()}
            reader.read_documents(want.documents, want.starts, planes, into)
        except DFlashError as error:
            failed = error
        except Exception as error:  # whatever it is, those who wait must not wait for ever
            failed = FitError(f"the sweep's reader cannot read a pack: {error!r}")
        with self.changed:
            if failed is None:
                self.tally.read(slot, reader.bytes_read)
                stock.shelf.filled(slot, now=time.monotonic())
            else:
                stock.shelf.failed(slot, failed)
            self.changed.notify_all()

    def _reply(self, member: Member, ask: Ask, want: Want) -> int | Exception | None:
        with self.changed:
            if not self._knows(member):  # its slot may hold another pack by now
                raise EOFError
            if ask.slot is None or ask.alone:
                return ask.error
            part = Fraction(len(want.planes), len(member.stock.planes_read(want.order)))
            self.tally.serve(ask.slot, member.name, part)
            return ask.slot.number

    def _show(self, connection: Connection, stock: Stock, ask: Ask) -> None:
        """Give a trial the memory of its slot."""
        with self.changed:
            assert ask.slot is not None
            if ask.slot not in stock.memories:  # its stock is gone, so the trial is, too
                raise EOFError
            send_handle(connection, stock.memories[ask.slot].file, 0)


def _hang_up(connection: Connection) -> None:
    """End a conversation; who listens on either side hears the end of it."""
    with suppress(OSError), socket(fileno=os.dup(connection.fileno())) as line:
        line.shutdown(SHUT_RDWR)
