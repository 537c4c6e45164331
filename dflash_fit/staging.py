"""From a GPU into memory that is not pinned, nearly as fast as into memory that is.

A plain copy goes through the driver's small buffer and one core.  Pinning all of the memory costs
seconds, and keeps it from everybody else for as long as the run.  Here threads take piece after
piece: each fetches one into a pinned buffer of its own and moves it on, while others fetch.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from dflash_cache.pinned import host_tensor

PIECE = 1 << 25  # bytes of a buffer
THREADS = 8  # a core moves some GB a second, the bus 50

Pair = tuple[Tensor, Tensor]  # what is copied, and where to; of one dtype and shape


def copy_plainly(pairs: Iterable[Pair]) -> None:
    """Copy the values of tensors on the host."""
    for live, kept in pairs:
        kept.copy_(live.detach())


class Staging:
    """Owns the pinned buffers, which go with it; on a CPU they are plain ones."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.stream: torch.cuda.Stream | None = None
        if on_gpu:
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.free: SimpleQueue[Tensor] = SimpleQueue()
        for _ in range(THREADS):
            self.free.put(host_tensor((PIECE,), torch.uint8, pinned=on_gpu))

    def copy(self, pairs: Iterable[Pair]) -> None:
        """Copy the values as of now, behind all that the device was asked for before.

        Once it returns all is there, and what was copied may change.
        """
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with ThreadPoolExecutor(THREADS, thread_name_prefix="staging") as threads:
            list(threads.map(self._carry, [p for pair in pairs for p in pieces(*pair)]))

    def _carry(self, piece: Pair) -> None:
        live, kept = piece
        buffer = self.free.get()
        try:
            self._fetch(live, buffer[: len(live)])
            # Not by torch, which would start threads for each of ours.
            np.copyto(kept.numpy(), buffer[: len(live)].numpy())
        finally:
            self.free.put(buffer)

    def _fetch(self, live: Tensor, room: Tensor) -> None:
        if self.stream is None:
            room.copy_(live)
            return
        # A new thread's device is the first one, which may be another rank's: even to wait there
        # would make a context, half a GB.
        with torch.cuda.device(self.stream.device), torch.cuda.stream(self.stream):
            room.copy_(live, non_blocking=True)
            # Blocking: who waits for it sleeps, and takes no core from those who move.
            fetched = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            fetched.record(self.stream)
            fetched.synchronize()


def pieces(live: Tensor, kept: Tensor) -> Iterable[Pair]:
    """The bytes of both, in runs that a buffer holds; both are contiguous."""
    octets = (tensor.detach().view(-1).view(torch.uint8) for tensor in (live, kept))
    return zip(*(torch.split(flat, PIECE) for flat in octets), strict=True)
