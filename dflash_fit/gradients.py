"""From the gradients of packs to that of an update: their sum over packs, and over ranks.

A loss is not divided before its update, so packs and ranks only add up.  Alone, one pack an
update, the backward pass's own buffers are the sum; otherwise there is one flat fp32 buffer.

N elements of all parameters, W ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, distributed, nn

from dflash_fit.shards import pieces, shard, shard_size
from dflash_fit.world import World, scatter_sums


class Gradients:
    """Of one process that trains alone."""

    def __init__(self, parameters: Sequence[nn.Parameter], *, turns: int, summed: bool = False):
        """`turns` packs an update; `summed` says that even one goes through the fp32 buffer."""
        self.parameters, self.turns = list(parameters), turns
        self.place = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self.sizes = [parameter.numel() for parameter in self.parameters]
        device = self.parameters[0].device
        self.flat = self.sums = None
        if summed or turns > 1:
            self.flat = torch.zeros(sum(self.sizes), device=device)
            self.sums = torch.split(self.flat, self.sizes)
        self.loss = torch.zeros(2, device=device)  # sum of the losses, and of their weights

    def take(self, parameters: Sequence[nn.Parameter], turn: int) -> None:
        """The backward pass of a pack has come to the end of these parameters."""
        if self.sums is not None:
            for parameter in parameters:
                fold_(self.sums[self.place[id(parameter)]], gradient_of(parameter), turn)

    def take_loss(self, total: Tensor, weight: Tensor, turn: int) -> None:
        """The loss of a pack, and what to divide it by."""
        fold_(self.loss, torch.stack([total, weight]), turn)

    def arrive(self) -> tuple[list[Tensor], Tensor, Tensor]:
        """Gradients [n], one for each parameter, sum of the losses, and of their weights."""
        return self._whole(), self.loss[0], self.loss[1]

    def _whole(self) -> list[Tensor]:
        if self.sums is None:
            return [gradient_of(parameter) for parameter in self.parameters]
        return list(self.sums)


class OrderedGradients(Gradients):
    """Over ranks on CPUs: added pack after pack in the order of the global batch.

    So the sum is the same, bit for bit, whatever the number of ranks.  Every pack travels by
    itself, which is slow and exact.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], world: World, *, packs: int, sharded: bool = False
    ):
        """`packs` of an update on all ranks together."""
        super().__init__(parameters, turns=-(-packs // world.size), summed=True)
        self.world, self.packs = world, packs
        assert self.flat is not None
        self.own = shard(len(self.flat), rank=world.rank, world=world.size) if sharded else None

    def take(self, parameters: Sequence[nn.Parameter], turn: int) -> None:
        """Nothing yet: a pack travels when its loss is there."""

    def take_loss(self, total: Tensor, weight: Tensor, turn: int) -> None:
        mine = torch.cat([gradient_of(parameter) for parameter in self.parameters]).float()
        own_loss = torch.stack([total, weight])
        assert self.flat is not None
        first = turn * self.world.size
        for lane in range(first, min(first + self.world.size, self.packs)):
            rank = lane - first
            for into, value in ((self.flat, mine), (self.loss, own_loss)):
                sent = value if rank == self.world.rank else torch.empty_like(into)
                with self.world.pulse.waiting():
                    distributed.broadcast(sent, src=rank)
                fold_(into, sent, lane)

    def _whole(self) -> list[Tensor]:
        assert self.flat is not None
        if self.own is None:
            return super()._whole()
        return [self.flat[piece.at] for piece in pieces(self.sizes, self.own)]


class ReducedGradients(Gradients):
    """Over ranks on GPUs: NCCL adds them up, inside the captured step.

    Those that the last pack's blocks have finished set out while the backward pass goes on through
    the context.  What travels has the precision of the weights, or is fp32.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, turns: int, wire: torch.dtype):
        super().__init__(parameters, turns=turns, summed=wire != parameters[0].dtype)
        self.wire = wire
        self.under_way: list[distributed.Work] = []
        self.small: list[tuple[Tensor, list[Tensor]]] = []  # vectors travel together

    def take(self, parameters: Sequence[nn.Parameter], turn: int) -> None:
        super().take(parameters, turn)
        if turn == self.turns - 1:
            for matrix in parameters:
                if matrix.dim() > 1:
                    self._send(self._payload(matrix))
            vectors = [self._payload(vector) for vector in parameters if vector.dim() == 1]
            if vectors:
                together = torch.cat(vectors)
                self._send(together)
                self.small.append((together, vectors))

    def _payload(self, parameter: nn.Parameter) -> Tensor:
        """What travels of a parameter, flat; its sum over packs, where there are several."""
        own = gradient_of(parameter)
        if self.sums is None:
            return own
        summed = self.sums[self.place[id(parameter)]]
        return summed if self.wire == summed.dtype else own.copy_(summed)

    def _send(self, tensor: Tensor) -> None:
        work = distributed.all_reduce(tensor, async_op=True)
        assert work is not None
        self.under_way.append(work)

    def arrive(self) -> tuple[list[Tensor], Tensor, Tensor]:
        loss = self.loss.clone()  # the sum itself goes on counting this rank's
        self._send(loss)
        for work in self.under_way:
            work.wait()  # of the stream, not of the host
        for together, vectors in self.small:
            sizes = [len(vector) for vector in vectors]
            torch._foreach_copy_(vectors, list(torch.split(together, sizes)))
        self.under_way, self.small = [], []
        return self._whole(), loss[0], loss[1]

    def _whole(self) -> list[Tensor]:
        if self.sums is None or self.wire == torch.float32:
            return super()._whole()
        return [gradient_of(parameter) for parameter in self.parameters]


class ScatteredGradients(Gradients):
    """Over ranks on GPUs that share the optimizer's state: each gets the sum of its shard."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], world: World, *, turns: int, wire: torch.dtype
    ):
        super().__init__(parameters, turns=turns, summed=False)
        size = shard_size(sum(self.sizes), world=world.size)
        device = self.parameters[0].device
        self.own = shard(sum(self.sizes), rank=world.rank, world=world.size)
        self.outgoing = torch.zeros(size * world.size, dtype=wire, device=device)
        self.incoming = torch.zeros(size, dtype=wire, device=device)
        self.outgoing_views = torch.split(self.outgoing[: sum(self.sizes)], self.sizes)

    def take(self, parameters: Sequence[nn.Parameter], turn: int) -> None:
        super().take(parameters, turn)
        if turn == self.turns - 1:
            for parameter in parameters:
                place = self.place[id(parameter)]
                summed = gradient_of(parameter) if self.sums is None else self.sums[place]
                self.outgoing_views[place].copy_(summed)

    def arrive(self) -> tuple[list[Tensor], Tensor, Tensor]:
        loss = self.loss.clone()
        distributed.all_reduce(loss)
        scatter_sums(self.incoming, self.outgoing)
        return self._whole(), loss[0], loss[1]

    def _whole(self) -> list[Tensor]:
        begin = self.own.start
        return [
            self.incoming[piece.at.start - begin : piece.at.stop - begin]
            for piece in pieces(self.sizes, self.own)
        ]


def gradients_of(
    parameters: Sequence[nn.Parameter],
    world: World,
    *,
    packs: int,
    wire: torch.dtype,
    sharded: bool,
) -> Gradients:
    """What adds up `packs` an update over the ranks of this world."""
    turns = -(-packs // world.size)
    if not world.distributed:
        return Gradients(parameters, turns=turns)
    if world.device.type == "cpu":
        return OrderedGradients(parameters, world, packs=packs, sharded=sharded)
    if sharded:
        return ScatteredGradients(parameters, world, turns=turns, wire=wire)
    return ReducedGradients(parameters, turns=turns, wire=wire)


def fold_(into: Tensor, value: Tensor, number: int) -> None:
    """Add the `number`-th value of a sum, in the precision of the sum."""
    if number == 0:
        into.copy_(value)
    else:
        into.add_(value)


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """The gradient, flat; every parameter of a drafter has one."""
    assert parameter.grad is not None, parameter.shape
    # detach: the compiler would make one function for views of matrices and one of vectors.
    return parameter.grad.view(-1).detach()
