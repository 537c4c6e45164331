"""Who trains: this process among the ranks, and what they tell each other on the host.

Objects go over gloo, never over NCCL, which belongs to the captured step alone.
"""

import atexit
import datetime
import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import PrefixStore, ProcessGroup, Store  # type: ignore[attr-defined]

from dflash_cache.errors import ToldElsewhere
from dflash_fit.circle import Circle, Depart, tell_and_leave
from dflash_fit.errors import FitError
from dflash_fit.pulse import Pulse
from dflash_fit.verdict import Verdict

RANK_TIMEOUT = 600.0  # seconds
# Of every collective: who is late, stuck or gone is found out by the circle, which can tell why.
PATIENCE = datetime.timedelta(days=30)
GOODBYE = 20.0  # seconds that the connections may take to close
LOOK = 0.1  # seconds between looks for who has come
LOCAL = ("localhost", "127.0.0.1", "::1")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """This process among those that train together; its methods are for the main thread.

    `store` is for whatever is not a collective.  Threads that may wait in it take a `clone()` each:
    one object serves one call at a time.
    """

    rank: int
    size: int
    device: torch.device
    store: Store | None = None  # None where this process is alone
    pulse: Pulse = field(default_factory=Pulse)
    host: ProcessGroup | None = None  # gloo
    circle: Circle | None = None

    @classmethod
    def alone(cls, device: torch.device) -> "World":
        """One process without a group."""
        return cls(rank=0, size=1, device=device)

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def distributed(self) -> bool:
        """Whether there is a group, be it of one."""
        return self.host is not None

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order; every rank must call it."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with self.pulse.waiting():
            distributed.all_gather_object(found, value, group=self.host)
        return found

    def share(self, value: T) -> T:
        """The value of rank 0; every rank must call it."""
        if self.size == 1:
            return value
        told = [value if self.first else None]
        with self.pulse.waiting():
            distributed.broadcast_object_list(told, 0, self.host, torch.device("cpu"))
        return told[0]  # type: ignore[return-value]

    def barrier(self) -> None:
        """Wait until all ranks have come here."""
        self.gather(None)

    def part(self) -> None:
        """The work of this rank is done: wait for that of the others, and take the group apart."""
        if self.circle is not None:
            self.circle.leave()
        if self.distributed:
            _take_apart()


def meet(
    store: Store,
    *,
    rank: int = 0,
    size: int = 1,
    device: torch.device,
    timeout: float = RANK_TIMEOUT,
    depart: Depart = tell_and_leave,
) -> World:
    """Make the `torch.distributed` world of `size` ranks that share a store.

    Gloo for the host, NCCL for GPUs.  From here to `part` the ranks look after each other: when
    one is gone, or has not got on for `timeout` seconds, `depart` ends the processes of all.
    """
    verdict = Verdict(own_client(store, "verdict"), rank=rank, size=size)
    hosts = arrive(store, verdict, rank=rank, size=size, timeout=timeout)
    if sys.platform == "linux" and set(hosts) == {hosts[0]}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all on this machine
    pulse, circle = Pulse(), None
    with _no_longer_than(timeout, verdict, depart):
        distributed.init_process_group(
            backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=own_client(store, "group"),
            rank=rank,
            world_size=size,
            timeout=PATIENCE,
        )
        host = distributed.new_group(backend="gloo", timeout=PATIENCE)
        own = distributed.new_group(backend="gloo", timeout=PATIENCE)
    assert isinstance(host, ProcessGroup)
    assert isinstance(own, ProcessGroup)
    if size > 1:
        circle = Circle(
            pulse,
            rank=rank,
            hosts=hosts,
            group=own,
            store=own_client(store, "circle"),
            verdict=Verdict(own_client(store, "verdict"), rank=rank, size=size),
            timeout=timeout,
            depart=depart,
        )
        circle.start()
    return World(
        rank=rank, size=size, device=device, store=store, pulse=pulse, host=host, circle=circle
    )


def _take_apart() -> None:
    """The end of all groups; where it hangs, that of the program does not wait for it."""
    gc.collect()  # NCCL waits for the end of every graph that it is captured in
    thread = threading.Thread(target=distributed.destroy_process_group, daemon=True)
    thread.start()
    thread.join(GOODBYE)
    if thread.is_alive():
        sys.stderr.write(f"the connections of the ranks are still open after {GOODBYE:g} s\n")
        atexit.register(_leave_well)


def _leave_well() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def own_client(store: Store, prefix: str) -> Store:
    """A store object of its own; two threads that share one wait for each other."""
    return PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]


def arrive(store: Store, verdict: Verdict, *, rank: int, size: int, timeout: float) -> list[str]:
    """Wait for all ranks to come; the machines that they are on."""
    here = [f"here/{number}" for number in range(size)]
    store.set(here[rank], socket.gethostname())
    until = time.monotonic() + timeout
    while not store.check(here):
        if (reason := verdict.read()) is not None:
            raise ToldElsewhere(str(reason.error))
        if time.monotonic() > until:
            missing = [str(number) for number, key in enumerate(here) if not store.check([key])]
            raise FitError(
                f"rank {', '.join(missing)} of {size} (from 0) did not come within {timeout:g} s "
                "(--rank-timeout); start all of them, with the same MASTER_ADDR and MASTER_PORT"
            )
        time.sleep(LOOK)
    return [store.get(key).decode() for key in here]


@contextmanager
def _no_longer_than(seconds: float, verdict: Verdict, depart: Depart) -> Iterator[None]:
    """Who dies while connections are made cannot be noticed by them."""

    def give_up() -> None:
        error = FitError(f"the ranks could not connect within {seconds:g} s (--rank-timeout)")
        depart(error, verdict.give(error))

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def gather_into(whole: Tensor, own: Tensor) -> None:
    """Fill `whole` with every rank's tensor, one behind the other, on the device."""
    # From torch 2.13 on by another name; the older one warns there.
    function = getattr(distributed, "all_gather_single", None)
    (function or distributed.all_gather_into_tensor)(whole, own)


def scatter_sums(own: Tensor, whole: Tensor) -> None:
    """The sum over ranks of this rank's part of `whole`, on the device."""
    function = getattr(distributed, "reduce_scatter_single", None)
    (function or distributed.reduce_scatter_tensor)(own, whole)
