"""Host memory for hidden states, spelt as a cache keeps them."""

import math

import torch
from torch import Tensor

from dflash_cache.encodings import ENCODINGS
from dflash_cache.files import aligned_buffer
from dflash_cache.schema import Identity

Buffers = dict[str, Tensor]  # part -> [K, T, H], or [K, T] for what is kept per token


def buffers(identity: Identity, planes: int, rows: int) -> Buffers:
    """Page-aligned buffers for so many planes and rows, spelt as the cache is."""
    width = identity.hidden_size
    return {
        part.name: host_tensor((planes, rows, *[width] * part.per_channel), part.dtype)
        for part in ENCODINGS[identity.encoding].parts
    }


def host_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that begin on a page, where direct reads can put what they read."""
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(aligned_buffer(size)).view(dtype).view(shape)
