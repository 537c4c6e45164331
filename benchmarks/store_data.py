"""Simulated samples, and the memory that every reader of `bench_store` delivers them into.

Letters: K target layers, P rows of the pool, T token rows in memory, t tokens of a sample,
H hidden size.
"""

import mmap
from argparse import Namespace
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dflash_cache.encodings import ENCODINGS
from dflash_cache.layout import ALIGNMENT, CHUNK_TOKENS, padded, round_up

BUCKET_EDGES = (770, 1216, 1728, 2432, 3296, 8193)
BUCKET_SHARES = (0.30, 0.22, 0.18, 0.14, 0.10, 0.06)  # about 1,600 tokens a sample, 82 MB
POOL_ROWS = 4099  # prime, so that samples do not meet the same rows in the same chunks


class Data:
    """Simulated samples, made anew from a pool of rows whenever they are asked for."""

    def __init__(self, args: Namespace) -> None:
        rng = np.random.default_rng(0)
        self.layers, self.hidden = args.layers, args.hidden
        self.lengths = make_lengths(args.tokens, rng)
        self.pool_KPH = make_pool(args.layers, args.hidden, rng)
        self.bytes = args.tokens * args.layers * args.hidden * 2
        # Documents lie in memory in another order than on disk, at 8-token starts as in a pack.
        self.starts = [0] * len(self.lengths)
        self.rows = 0
        for sample in rng.permutation(len(self.lengths)).tolist():
            self.starts[sample] = self.rows
            self.rows += round_up(self.lengths[sample], 8)
        self.rows = round_up(self.rows, CHUNK_TOKENS)
        self.written = written_samples(self.lengths, args.write_tokens)

    def states(self, sample: int) -> Tensor:
        """bfloat16 [K, t, H]."""
        rows = (sample * 613 + torch.arange(self.lengths[sample])) % POOL_ROWS
        return self.pool_KPH.index_select(1, rows)


def make_lengths(tokens: int, rng: np.random.Generator) -> list[int]:
    """One sample of every bucket, then buckets by their share; the last is cut to fit."""
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        first = len(lengths) < len(BUCKET_EDGES)
        bucket = len(lengths) if first else rng.choice(len(BUCKET_EDGES), p=BUCKET_SHARES)
        low = BUCKET_EDGES[bucket - 1] if bucket else 128
        lengths.append(min(left, int(rng.integers(low, BUCKET_EDGES[bucket]))))
    return lengths


def written_samples(lengths: Sequence[int], tokens: int) -> int:
    """How many of the first samples come to about `tokens`; at least one."""
    return max(1, int(np.searchsorted(np.cumsum(lengths), tokens, side="right")))


def make_pool(layers: int, hidden: int, rng: np.random.Generator) -> Tensor:
    """bfloat16 [K, P, H]: Gaussian per channel, log-normal channel scales, a few outliers."""
    pool_KPH = torch.empty(layers, POOL_ROWS, hidden, dtype=torch.bfloat16)
    for k in range(layers):
        scale_H = np.exp(0.5 * rng.standard_normal(hidden)) * (1 + k)
        outliers = rng.choice(hidden, size=min(8, hidden), replace=False)
        scale_H[outliers] *= np.geomspace(10, 300, len(outliers))
        jitter_P1 = np.exp(0.1 * rng.standard_normal((POOL_ROWS, 1)))
        rows_PH = rng.standard_normal((POOL_ROWS, hidden), dtype=np.float32)
        rows_PH *= scale_H.astype(np.float32)
        rows_PH *= jitter_P1.astype(np.float32)
        pool_KPH[k] = torch.from_numpy(rows_PH)
    return pool_KPH


def page_aligned(size: int) -> mmap.mmap:
    """Anonymous memory on huge pages where the system gives them."""
    # Private: a shared anonymous mapping is shmem, for which huge pages are mostly switched off.
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


class Memory:
    """One page-aligned mapping that every reader delivers into, in turn."""

    def __init__(self, data: Data, encodings: Sequence[str]) -> None:
        self.shape = (data.layers, data.rows, data.hidden)
        # Room for whole files too: samples filled up to chunks, pages between chunks and files.
        stored = sum(padded(length) for length in data.lengths)
        pages = 4 * data.layers * (stored // CHUNK_TOKENS)
        size = stored * data.layers * data.hidden * 2 + pages * ALIGNMENT
        self.mapping = page_aligned(size)
        self.bytes = np.frombuffer(self.mapping, np.uint8)
        self.clear()  # touches every page
        self.states = self.view(torch.bfloat16, self.shape, 0)
        self.buffers = {encoding: self._buffers(encoding) for encoding in encodings}

    def clear(self) -> None:
        self.bytes.fill(0)

    def view(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor:
        count = int(np.prod(shape))
        return torch.frombuffer(self.mapping, dtype=dtype, count=count, offset=offset).view(shape)

    def _buffers(self, encoding: str) -> dict[str, Tensor]:
        """What a reader fills: the parts of the encoding, [K, T, H] or [K, T]."""
        buffers, at = {}, 0
        for part in ENCODINGS[encoding].parts:
            shape = self.shape if part.per_channel else self.shape[:2]
            buffers[part.name] = self.view(part.dtype, shape, at)
            at += round_up(buffers[part.name].nbytes, ALIGNMENT)
        return buffers
