"""From the device to the host: a batch's states spelt, measured and copied while the next computes.

Nothing here waits for the device.  On the CPU there is no stream, and the copies are done when
`Lander.land` returns; all else is the same.

Letters: t tokens of a sample, R rows of a padded batch, S its width, T tokens in it without the
padding, H hidden size, K planes.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from dflash_cache.attempt import EncodedSample, spell
from dflash_cache.checks import FAULTS, measure
from dflash_cache.codec import Codec
from dflash_cache.layout import round_up
from dflash_cache.pinned import host_tensor
from dflash_cache.samples import Sample

AHEAD = 2  # batches whose states the device may hold: one is copied, the next one computed
ALIGN = 256  # bytes, at whose multiples tensors begin in host memory
# Tokens spelt at once: a lossy spelling widens them to float32 three times over, 84 MB each at
# 5,120 channels; in fewer the GPU would wait for launches.
SPELT_TOKENS = 4096


class HostBuffer:
    """Host memory for one batch at a time; `pinned` where a GPU writes to it."""

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned
        self.memory = torch.empty(0, dtype=torch.uint8)

    def places(self, tensors: Sequence[Tensor], *, room: float) -> list[Tensor]:
        """A place for each tensor, of its shape and dtype, valid until places are asked for again.

        Memory that is too small is made anew, `room` times as large as needed now.
        """
        sizes = [round_up(tensor.nbytes, ALIGN) for tensor in tensors]
        if sum(sizes) > len(self.memory):
            self.memory = torch.empty(0, dtype=torch.uint8)  # the old goes before the new comes
            size = round_up(int(room * sum(sizes)), ALIGN)
            self.memory = host_tensor((size,), torch.uint8, pinned=self.pinned)
        return [
            self.memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for begin, tensor in zip(accumulate(sizes, initial=0), tensors, strict=False)
        ]


class Buffers:
    """The host memory of an extraction: so many buffers, which go round."""

    def __init__(self, count: int, *, pinned: bool) -> None:
        # Kept here too: who drops a batch unread must not free what a GPU still writes to.
        self.all = [HostBuffer(pinned=pinned) for _ in range(count)]
        self.free: SimpleQueue[HostBuffer | None] = SimpleQueue()
        self.failure: BaseException | None = None
        for buffer in self.all:
            self.free.put(buffer)

    def take(self) -> HostBuffer:
        """A free buffer, as soon as there is one; raises why there will be none any more."""
        self.raise_failure()
        found = self.free.get()
        self.raise_failure()
        assert found is not None
        return found

    def give_back(self, buffer: HostBuffer) -> None:
        self.free.put(buffer)

    def fail(self, why: BaseException) -> None:
        """Nobody gives back any more: tell who waits for a buffer, or asks for one later."""
        self.failure = why
        self.free.put(None)

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure


@dataclass(frozen=True, kw_only=True, eq=False)
class Landed:
    """A batch in host memory, or on its way there."""

    samples: Sequence[Sample]
    width: int  # S
    spelt: EncodedSample  # of all samples, one behind the other: T for t
    facts: Tensor  # [K, R, 5], see `checks.FACTS`
    arrived: torch.cuda.Event | None
    release: Callable[[], None]

    @property
    def tokens(self) -> int:
        return sum(sample.length for sample in self.samples)

    def wait(self) -> np.ndarray:
        """The facts, when all is there."""
        if self.arrived is not None:
            # A new thread's device is the first one, where waiting would make a context: half a
            # GB of a GPU that may be another worker's.
            with torch.cuda.device(self.arrived.device):
                self.arrived.synchronize()
        return self.facts.numpy()

    def encoded(self) -> Iterator[EncodedSample]:
        """The samples of a batch that has arrived; the last one gives the memory back."""
        norms = self.facts[:, :, len(FAULTS) :].transpose(0, 1).tolist()
        ends = list(accumulate(sample.length for sample in self.samples))
        for begin, end, own in zip([0, *ends], ends, norms, strict=False):
            yield EncodedSample(
                parts=[
                    {name: values[begin:end] for name, values in parts.items()}
                    for parts in self.spelt.parts
                ],
                errors=[errors[begin:end] for errors in self.spelt.errors],
                norms=own,
                slots=self.width,
                release=self.release if end == ends[-1] else None,
            )


class Lander:
    """Brings batches to host buffers, and holds the host back where it runs ahead.

    When the block ends, nothing is on its way any more: the buffers may go.
    """

    def __init__(
        self, device: torch.device, planes: Sequence[str], codec: Codec, buffers: Buffers
    ) -> None:
        self.device, self.planes, self.codec, self.buffers = device, planes, codec, buffers
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.under_way: deque[torch.cuda.Event] = deque()

    def __enter__(self) -> "Lander":
        return self

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            self.stream.synchronize()

    def send(self, small: Tensor) -> Tensor:
        """Ids or lengths on the device, without waiting for what it does."""
        if self.stream is None:
            return small
        return small.pin_memory().to(self.device, non_blocking=True)

    def pace(self) -> None:
        """Wait until the device has at most one batch to do and one to copy.

        A host further ahead of it gains nothing, and takes memory for every batch.
        """
        while len(self.under_way) >= AHEAD:
            self.under_way.popleft().synchronize()

    def land(self, states: Sequence[Tensor], samples: Sequence[Sample], *, slots: int) -> Landed:
        """Measure, spell and copy a padded batch, states [R, S, H] of each plane.

        `slots` is what a batch may have: memory that is too small is made anew for so many.  How
        many kernels are launched does not depend on the rows: of short samples there are hundreds.
        """
        lengths = [sample.length for sample in samples]
        on_device = self.send(torch.tensor(lengths))
        facts = torch.stack([measure(plane, on_device) for plane in states])
        spelt = self._spell(self._pack(states, lengths))
        tensors = [facts, *spelt.tensors()]
        buffer = self.buffers.take()
        try:
            places = buffer.places(tensors, room=max(1.0, slots / sum(lengths)))
            arrived = self._copy(places, tensors)
        except BaseException:
            self.buffers.give_back(buffer)
            raise
        facts_here, *others = places
        rest = iter(others)
        return Landed(
            samples=samples,
            width=states[0].shape[1],
            spelt=EncodedSample(
                parts=[{name: next(rest) for name in parts} for parts in spelt.parts],
                errors=[next(rest) for _ in spelt.errors],
            ),
            facts=facts_here,
            arrived=arrived,
            release=partial(self.buffers.give_back, buffer),
        )

    def _pack(self, states: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        """States [T, H] of each plane, without the padding."""
        rows, width = states[0].shape[:2]
        slots = [plane.flatten(0, 1) for plane in states]
        if sum(lengths) == rows * width:
            return slots
        kept = [row * width + np.arange(length) for row, length in enumerate(lengths)]
        index = self.send(torch.from_numpy(np.concatenate(kept)))
        return [plane.index_select(0, index) for plane in slots]

    def _spell(self, packed: Sequence[Tensor]) -> EncodedSample:
        """States [T, H] of each plane as they go to disk, still on the device."""
        pieces = zip(*(torch.split(plane, SPELT_TOKENS) for plane in packed), strict=True)
        spelt = [spell(piece, self.planes, self.codec) for piece in pieces]
        if len(spelt) == 1:
            return spelt[0]
        return EncodedSample(
            parts=[
                {name: _joined([parts[name] for parts in plane]) for name in plane[0]}
                for plane in zip(*(sample.parts for sample in spelt), strict=True)
            ],
            errors=[
                _joined(errors) for errors in zip(*(sample.errors for sample in spelt), strict=True)
            ],
        )

    def _copy(self, places: Sequence[Tensor], tensors: Sequence[Tensor]) -> torch.cuda.Event | None:
        """Each tensor to its place, on a stream of its own behind what the device does now."""
        if self.stream is None:
            for place, tensor in zip(places, tensors, strict=True):
                place.copy_(tensor)
            return None
        # Blocking: who waits for it sleeps, and takes no core from those who sum and write.
        arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for place, tensor in zip(places, tensors, strict=True):
                place.copy_(tensor, non_blocking=True)
                tensor.record_stream(self.stream)  # its memory is not given out before it is copied
            arrived.record(self.stream)
        self.under_way.append(arrived)
        return arrived


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    """One behind the other; as bytes, for not every torch joins float8 on every device."""
    return torch.cat([piece.view(torch.uint8) for piece in pieces]).view(pieces[0].dtype)
