"""Whether any rank has raised a flag, asked once an update without waiting for an answer."""

from collections import deque

import torch
from torch import Tensor, distributed

from dflash_fit.world import PATIENCE, World

LAG = 2  # updates


class Agreement:
    """The same answers in the same calls on all ranks; every rank makes one, and asks as often."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.group = distributed.new_group(backend="gloo", timeout=PATIENCE) if self.many else None
        self.asked: deque[tuple[Tensor, distributed.Work]] = deque()

    @property
    def many(self) -> bool:
        return self.world.size > 1

    def any(self, flag: bool) -> bool:
        """Whether any rank raised its flag, as of two calls ago; alone, at once."""
        if not self.many:
            return flag
        flags = torch.tensor([int(flag)])
        work = distributed.all_reduce(
            flags, op=distributed.ReduceOp.MAX, group=self.group, async_op=True
        )
        assert work is not None
        self.asked.append((flags, work))
        return self._answer() if len(self.asked) > LAG else False

    def drain(self) -> bool:
        """Wait for what was asked and not answered: whether any rank raised its flag meanwhile."""
        answers = [self._answer() for _ in range(len(self.asked))]
        return True in answers

    def _answer(self) -> bool:
        flags, work = self.asked.popleft()
        if not work.is_completed():
            with self.world.pulse.waiting():
                work.wait()
        else:
            work.wait()  # raises what went wrong
        return bool(flags)
