"""Host memory that the GPU can fetch from and write to by itself, of exactly the size asked for.

torch's own pinned allocator rounds up to a power of two: 2.5 GB of states would take 4.3.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from dflash_cache.buffers import host_tensor as plain_tensor
from dflash_cache.errors import DFlashError

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of the process


def host_tensor(shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Zeros [shape] that begin on a page; `pinned` registers them with CUDA until they are gone."""
    tensor = plain_tensor(shape, dtype)
    if pinned and tensor.numel():
        register(tensor)
    return tensor


def register(tensor: Tensor) -> None:
    """Pin the memory of a tensor for as long as its storage lives."""
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    failed = int(cuda.cudaHostRegister(address, storage.nbytes(), PORTABLE))
    if failed:
        raise DFlashError(
            f"{storage.nbytes() / 1e9:.2f} GB of memory cannot be pinned (CUDA error {failed}); "
            "free some memory, raise `ulimit -l`, or take less of it: a smaller --token-budget "
            "(training) or --batch-tokens (extraction)"
        )
    weakref.finalize(storage, cuda.cudaHostUnregister, address)
