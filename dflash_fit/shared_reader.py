"""The reader of a trial that shares its packs with others; and what it and the sweep say.

    trial:  Want              sweep:  number of a slot | None: read it yourself | an error
    trial:  bytes that it read itself, 0 if none

on one connection for every pack that is asked for at a time.  One more begins with `Hello.begins`
and stays as long as the trial lives: its end says that the trial is over.

Letters: K planes, T rows, b bytes of a token in a plane.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_cache.buffers import Buffers
from dflash_cache.reader import CacheReader
from dflash_fit.errors import FitError
from dflash_fit.pack_memory import look_at
from dflash_fit.shelf import Order
from dflash_fit.stock import Plane


@dataclass(frozen=True, kw_only=True)
class Hello:
    """The first word on every connection."""

    trial: str
    begins: Order | None = None  # the first pack that the trial will take


@dataclass(frozen=True, kw_only=True)
class Want:
    """Samples of a pack, each from its row of `starts` on; an order where it is for training."""

    documents: tuple[int, ...]
    starts: tuple[int, ...]
    planes: tuple[Plane, ...]
    order: Order | None


@dataclass(frozen=True, kw_only=True)
class Show:
    """Asks for the memory of the slot that was named; it comes as an open file."""


def open_shared(
    cache: str | Path,
    address: str,
    trial: str,
    begins: Order,
    *,
    direct: bool | None = None,
) -> "SharedReader":
    """The reader for a trial that has joined a sweep's `SharedReads`.

    `begins` is the order of the first pack that it will train on.
    """
    return SharedReader(cache, address, trial, begins, direct=direct)


class SharedReader(CacheReader):
    """A sealed cache whose states come from memory, where a sweep has them read for several trials.

    `bytes_read` are those that it read itself.
    """

    def __init__(
        self,
        cache: str | Path,
        address: str,
        trial: str,
        begins: Order,
        *,
        direct: bool | None = None,
    ) -> None:
        super().__init__(cache, direct=direct)
        self.address, self.trial = address, trial
        self.idle: list[Connection] = []
        self.memories: dict[int, dict[str, np.ndarray]] = {}  # by slot
        self.life = self._connect(begins)
        self.planes: tuple[Plane, ...]
        self.planes, self.rows = _heard(self.life)

    def close(self) -> None:
        """Say that the trial is over, if the end of its process is not soon enough."""
        self.life.close()
        while self.idle:
            self.idle.pop().close()
        self.memories.clear()

    def read_documents(
        self,
        documents: Sequence[int],
        starts: Sequence[int],
        layer_ids: Sequence[int | str],
        into: Buffers,
        *,
        order: Order | None = None,
    ) -> None:
        """As every reader, but perhaps without a look at the disk."""
        want = Want(
            documents=tuple(documents), starts=tuple(starts), planes=tuple(layer_ids), order=order
        )
        assert set(want.planes) <= set(self.planes), (want.planes, self.planes)
        connection = self.idle.pop() if self.idle else self._connect()
        try:
            own = self._fetch(connection, want, into)
            _say(connection, own)
        except BaseException:
            connection.close()  # nobody knows what was said last
            raise
        self.idle.append(connection)

    def _fetch(self, connection: Connection, want: Want, into: Buffers) -> int:
        """Copy a pack, or read it; the bytes that were read."""
        _say(connection, want)
        number = _heard(connection)
        if number is None:
            return self._read_alone(want, into)
        if number not in self.memories:
            _say(connection, Show())
            with _sweep_is_there():
                file = recv_handle(connection)
            self.memories[number] = look_at(
                file, self.identity, planes=len(self.planes), rows=self.rows
            )
        self._copy(self.memories[number], want, into)
        return 0

    def _read_alone(self, want: Want, into: Buffers) -> int:
        reader = copy(self)  # the same reader, but it counts this pack alone
        reader.bytes_read = 0
        CacheReader.read_documents(reader, want.documents, want.starts, want.planes, into)
        self.bytes_read += reader.bytes_read
        return reader.bytes_read

    def _copy(self, memory: dict[str, np.ndarray], want: Want, into: Buffers) -> None:
        """Copy the rows of the documents; the rest of the buffers is left alone."""
        ends = [
            start + self.lengths[document]
            for document, start in zip(want.documents, want.starts, strict=True)
        ]
        assert max(ends) <= self.rows, (ends, self.rows)

        def copy_plane(name: str, k: int) -> None:
            from_Tb = memory[name][self.planes.index(want.planes[k])]
            to_Tb = into[name][k].view(torch.uint8).numpy().reshape(-1, from_Tb.shape[1])
            for start, end in zip(want.starts, ends, strict=True):
                to_Tb[start:end] = from_Tb[start:end]

        names = [name for name in into for _ in want.planes]
        list(self._pool.map(copy_plane, names, [*range(len(want.planes))] * len(into)))

    def _connect(self, begins: Order | None = None) -> Connection:
        with _sweep_is_there():
            connection = Client(self.address, "AF_UNIX")
        _say(connection, Hello(trial=self.trial, begins=begins))
        return connection


def _say(connection: Connection, word: Any) -> None:
    with _sweep_is_there():
        connection.send(word)


def _heard(connection: Connection) -> Any:
    """What the sweep answers; an error is raised."""
    with _sweep_is_there():
        answer = connection.recv()
    if isinstance(answer, Exception):
        raise answer
    return answer


@contextmanager
def _sweep_is_there() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError):
        raise FitError("the sweep's reader is gone; run the same command again") from None
