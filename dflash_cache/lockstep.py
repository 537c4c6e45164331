"""A target that several processes run together, each its share: one leads, the others follow.

The leader tells the others of every forward before it runs it, and they run the same one.  Who
has the leader's `Target` need not know: proofs, codec and extraction are as with one process.
"""

import datetime
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import Store  # type: ignore[attr-defined]

from dflash_cache.target import Target

# Followers wait while the leader writes, or waits for other workers: that is no fault of theirs,
# and it is their supervisor who notices when the leader is gone.
PATIENCE = datetime.timedelta(days=30)
LOAD, OVER = "load", "over"
Result = TypeVar("Result")


class BrokenGroup(Exception):
    """A forward that some processes ran and others did not; only an end is left."""


def meet(store: Store, *, index: int, size: int, device: torch.device) -> None:
    """Make the `torch.distributed` world of one worker's processes."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # they are all on this machine
    distributed.init_process_group(
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=index,
        world_size=size,
        timeout=PATIENCE,
    )


def say(name: str, *arguments: Any) -> None:
    """What the others are to do now, on the CPU's side of the world."""
    distributed.broadcast_object_list([name, arguments], src=0, device=torch.device("cpu"))


def say_over() -> None:
    """The others may go; some may be gone already."""
    with suppress(RuntimeError):
        say(OVER)


def hear() -> tuple[str, tuple[Any, ...]]:
    order: list[Any] = [None, None]
    distributed.broadcast_object_list(order, src=0, device=torch.device("cpu"))
    return order[0], order[1]


Load = Callable[[bool], Target]  # the whole target, or up to the last layer needed


def lead(load: Load, whole: bool) -> "Leader":
    """Load the target in all processes; this one's follows no one."""
    say(LOAD, whole)
    target = load(whole)
    return Leader(**{field.name: getattr(target, field.name) for field in fields(target)})


def follow(load: Load) -> None:
    """Do what the leader does, until it says that it is over, or is gone."""
    target: Target | None = None
    while True:
        try:
            name, arguments = hear()
        except RuntimeError:
            return  # the leader is gone, and it is the supervisor who tells how
        if name == OVER:
            return
        if name == LOAD:
            target = None  # gone before the next one comes
            target = load(*arguments)
        else:
            getattr(target, name)(*arguments)


@dataclass(frozen=True, kw_only=True)
class Leader(Target):
    """The target of the process that leads."""

    def hidden_states(self, input_ids: Tensor, layer_ids: Sequence[int]) -> list[Tensor]:
        return self._together(Target.hidden_states, input_ids, list(layer_ids))

    def hidden_and_final(self, input_ids: Tensor, layer_ids: Sequence[int]) -> list[Tensor]:
        return self._together(Target.hidden_and_final, input_ids, list(layer_ids))

    def all_hidden_states(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        return self._together(Target.all_hidden_states, input_ids)

    def logits(self, input_ids: Tensor) -> Tensor:
        return self._together(Target.logits, input_ids)

    def final_hidden(self, input_ids: Tensor) -> Tensor:
        return self._together(Target.final_hidden, input_ids)

    def keep_up_to(self, layer_id: int) -> None:
        self._together(Target.keep_up_to, layer_id)

    def _together(self, method: Callable[..., Result], *arguments: Any) -> Result:
        say(method.__name__, *(a.cpu() if isinstance(a, Tensor) else a for a in arguments))
        try:
            return method(self, *arguments)
        except torch.OutOfMemoryError as error:
            # The others may be in the middle of what this process has left.
            raise BrokenGroup(
                f"out of memory while {distributed.get_world_size()} processes ran the target "
                f"together; give --batch-tokens less ({error})"
            ) from error
