"""Attention of draft blocks in kernels of our own (Triton): no table of tiles in any direction.

The context of a block is an interval of slots, and since anchors and documents ascend, the
blocks that see a slot are an interval of blocks.  So every program walks one interval: masked at
both ends, where rows differ, and without a mask in the middle, where all see all.

A blocks of B slots, T context slots, N key heads, G query heads of each, D channels of a head;
S = A * B.  A row is a pair (slot, query head of the group): the S * G rows of a key head lie side
by side in memory of [S, heads, D], and a tile of rows is a few whole blocks of them.  Hence keys
are read once for the group, gradients of keys sum over it by themselves, and the keys of the own
blocks are seen by one tile only.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from dflash_fit.attention import Blocks, KeysValues, Visibility
from dflash_fit.errors import FitError

try:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from triton.tools.tensor_descriptor import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        TensorDescriptor,
    )
except ImportError as error:
    raise FitError(
        "the block kernels need Triton, which is not installed; install it (it comes with torch "
        "for CUDA) or choose another attention"
    ) from error


# --- how large, chosen by what is measured ------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Shape of a program: rows at most, keys of a step (or of the program), warps, stages."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Tiles of the three kernels, and which way back: two kernels, or one with atomic sums."""

    forward: Tile
    query: Tile
    context: Tile
    fused: bool = False


# By head size.  A benchmark replaces entries; a captured graph keeps what it was captured with.
TILES = {
    64: Tiles(
        forward=Tile(rows=64, keys=64, warps=4, stages=3),
        query=Tile(rows=64, keys=64, warps=4, stages=2),
        context=Tile(rows=64, keys=64, warps=4, stages=2),
    ),
    128: Tiles(
        forward=Tile(rows=64, keys=64, warps=4, stages=3),
        query=Tile(rows=64, keys=64, warps=4, stages=2),
        context=Tile(rows=64, keys=64, warps=4, stages=2),
    ),
}
# For tests in float32, where a tile takes twice the memory and is not multiplied by tensor cores.
EXACT = Tile(rows=32, keys=32, warps=4, stages=1)
EXACT_TILES = Tiles(forward=EXACT, query=EXACT, context=EXACT)


def tiles_for(query: Tensor) -> Tiles:
    if query.dtype == torch.float32:
        return EXACT_TILES
    return TILES[64] if query.shape[-1] <= 64 else TILES[128]


# --- kernels ------------------------------------------------------------------------------------

FAR = tl.constexpr(1 << 30)  # beyond every slot
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(first, A, B: tl.constexpr, G: tl.constexpr, BLOCKS: tl.constexpr, SLOTS: tl.constexpr,
          ROWS: tl.constexpr):  # fmt: skip
    """Member of the group, slot of the tile and block of its rows, and which are real.

    A tile is SLOTS of slots for each head of the group, rounded up to powers of two.
    """
    row = tl.arange(0, ROWS)
    member, n = row // SLOTS, row % SLOTS
    block = first + n // B
    real = (n < BLOCKS * B) & (member < G) & (block < A)
    return member, n, block, real


@triton.jit
def _bounds(lower, upper, block, real, slot, WINDOW: tl.constexpr):
    """First and last + 1 of the context that rows see; -1 as the latter: nothing, nowhere."""
    low = tl.load(lower + block, mask=real, other=0)
    up = tl.load(upper + block, mask=real, other=-1)
    if WINDOW > 0:
        low = tl.maximum(low, up + slot - (WINDOW - 1))
    return low, up


@triton.jit
def _walk(low, up, STEP: tl.constexpr):
    """Where the context of a tile of rows begins, and its steps: ahead of the middle, in it, all.

    All rows that see anything see all of the middle.
    """
    sees = up >= 0
    begin = tl.min(tl.where(sees, low, FAR))
    end = tl.max(tl.where(sees, up, 0))
    all_begin = tl.max(tl.where(sees, low, 0))
    all_end = tl.min(tl.where(sees, up, FAR))
    ahead = tl.cdiv(tl.maximum(tl.minimum(all_begin, end) - begin, 0), STEP)
    middle = begin + ahead * STEP
    inner = tl.maximum(all_end - middle, 0) // STEP
    behind = tl.cdiv(tl.maximum(end - middle - inner * STEP, 0), STEP)
    return begin, ahead, inner, ahead + behind


@triton.jit
def _own_mask(n, B: tl.constexpr, OWN: tl.constexpr, CAUSAL: tl.constexpr):
    """Which keys of the tile's own blocks its rows see."""
    key = tl.arange(0, OWN)
    mask = (n // B)[:, None] == (key // B)[None, :]
    if CAUSAL:
        mask = mask & (key[None, :] <= n[:, None])
    return mask


@triton.jit
def _tile(tensor, head, slot, ROWS: tl.constexpr, D: tl.constexpr):
    """A tile of a descriptor of [heads, slots, D], as rows; zeros beyond the last slot."""
    return tensor.load([head, slot, 0]).reshape(ROWS, D)


@triton.jit
def _load(
    pointer, first, head, member, n, real, slot_stride, head_stride,
    B: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Rows by addresses; zeros where they are not real.

    What a loop multiplies again and again comes this way: from a descriptor of three dimensions
    the compiler would keep it in registers, which are scarce, and not in shared memory.
    """
    base = pointer + (first * B).to(tl.int64) * slot_stride + head.to(tl.int64) * G * head_stride
    at = n * slot_stride + member * head_stride
    return tl.load(base + at[:, None] + tl.arange(0, D)[None, :], mask=real[:, None], other=0.0)


@triton.jit
def _softmax_step(
    query, key, value, acc, total, most, mask, scale, MASKED: tl.constexpr, PRECISION: tl.constexpr
):
    """The online softmax, in powers of two, after some more keys."""
    logits = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    if MASKED:
        logits = tl.where(mask, logits, float("-inf"))
    more = tl.maximum(most, tl.max(logits, 1) * scale)
    p = tl.math.exp2(logits * scale - more[:, None])
    fade = tl.math.exp2(most - more)
    total = total * fade + tl.sum(p, 1)
    acc = tl.dot(p.to(value.dtype), value, acc * fade[:, None], input_precision=PRECISION)
    return acc, total, more


@triton.jit
def _forward(
    query, context_key, context_value, own_key, own_value, out, lse, lower, upper, scale, A,
    query_slot, query_head,
    B: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCKS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, OWN: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Out and log2 of the softmax sums of a tile of rows: 0 and inf for invalid blocks."""
    head = tl.program_id(0)
    # Late blocks of a document see most of it: the longest programs start first.
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCKS
    member, n, block, real = _rows(first, A, B, G, BLOCKS, SLOTS, ROWS)
    q = _load(query, first, head, member, n, real, query_slot, query_head, B, G, D)
    low, up = _bounds(lower, upper, block, real, n % B, WINDOW)
    begin, ahead, inner, edges = _walk(low, up, KEYS)

    acc = tl.zeros([ROWS, D], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    # Finite, for rows that see nothing of the first tiles: less than any logit.
    most = tl.full([ROWS], -1e30, tl.float32)
    for step in tl.range(0, edges):
        start = begin + (step + tl.where(step >= ahead, inner, 0)) * KEYS
        k = _tile(context_key, head, start, KEYS, D)
        v = _tile(context_value, head, start, KEYS, D)
        at = start + tl.arange(0, KEYS)
        mask = (at[None, :] >= low[:, None]) & (at[None, :] < up[:, None])
        acc, total, most = _softmax_step(q, k, v, acc, total, most, mask, scale, True, PRECISION)
    for step in tl.range(ahead, ahead + inner):
        k = _tile(context_key, head, begin + step * KEYS, KEYS, D)
        v = _tile(context_value, head, begin + step * KEYS, KEYS, D)
        acc, total, most = _softmax_step(q, k, v, acc, total, most, None, scale, False, PRECISION)
    # The own block comes last: ahead of the loops, its memory would not be free for theirs.
    own_k = _tile(own_key, head, first * B, OWN, D)
    own_v = _tile(own_value, head, first * B, OWN, D)
    own_mask = _own_mask(n, B, OWN, CAUSAL)
    acc, total, most = _softmax_step(
        q, own_k, own_v, acc, total, most, own_mask, scale, True, PRECISION
    )

    sees = up >= 0
    acc = tl.where(sees[:, None], acc / total[:, None], 0.0)
    # An infinite sum makes every probability of an invalid block 0 on the way back.
    norm = tl.where(sees, most + tl.math.log2(total), float("inf"))
    _store(out, acc, first, head * G + member, n, real, tl.num_programs(0) * G, B, D)
    tl.store(lse + _at(first, head * G + member, n, A, B), norm, mask=real)


@triton.jit
def _at(first, head, n, A, B: tl.constexpr):
    """Where numbers of rows lie: [heads, S]."""
    return head.to(tl.int64) * A * B + first * B + n


@triton.jit
def _store(pointer, tile, first, head, n, real, heads, B: tl.constexpr, D: tl.constexpr):
    """Rows into memory of [S, heads, D]."""
    at = ((first * B + n).to(tl.int64) * heads + head) * D
    at = at[:, None] + tl.arange(0, D)[None, :]
    tl.store(pointer + at, tile.to(pointer.dtype.element_ty), mask=real[:, None])


@triton.jit
def _probabilities(
    query, key, norm, mask, scale, MASKED: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    p = tl.math.exp2(tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale - norm)
    if MASKED:
        p = tl.where(mask, p, 0.0)
    return p


@triton.jit
def _query_step(
    q, k, v, go, norm, delta, dq, mask, scale, MASKED: tl.constexpr, PRECISION: tl.constexpr
):
    """The sum of a query's gradient after some more keys."""
    p = _probabilities(q, k, norm[:, None], mask, scale, MASKED, PRECISION)
    dp = tl.dot(go, tl.trans(v), input_precision=PRECISION)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit
def _query_gradient(
    query, context_key, context_value, own_key, own_value, out, grad_out, lse, delta_out,
    grad_query, grad_own_key, grad_own_value, lower, upper, scale, A,
    query_slot, query_head, out_slot, out_head, grad_slot, grad_head,
    B: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCKS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, OWN: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr, CONTEXT: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of rows and of its own keys, and delta = sum(out * its gradient).

    Without CONTEXT, `grad_query` holds only what comes from the own keys.
    """
    head = tl.program_id(0)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCKS
    member, n, block, real = _rows(first, A, B, G, BLOCKS, SLOTS, ROWS)
    q = _load(query, first, head, member, n, real, query_slot, query_head, B, G, D)
    go = _load(grad_out, first, head, member, n, real, grad_slot, grad_head, B, G, D)
    o = _load(out, first, head, member, n, real, out_slot, out_head, B, G, D)
    k = _tile(own_key, head, first * B, OWN, D)
    v = _tile(own_value, head, first * B, OWN, D)
    low, up = _bounds(lower, upper, block, real, n % B, WINDOW)
    at = _at(first, head * G + member, n, A, B)
    # Rows that are not real need no other mask: their probabilities are 0.
    norm = tl.load(lse + at, mask=real, other=float("inf"))
    delta = tl.sum(o.to(tl.float32) * go.to(tl.float32), 1)
    tl.store(delta_out + at, delta, mask=real)

    own_mask = _own_mask(n, B, OWN, CAUSAL)
    p = _probabilities(q, k, norm[:, None], own_mask, scale, True, PRECISION)
    dp = tl.dot(go, tl.trans(v), input_precision=PRECISION)
    ds = (p * (dp - delta[:, None])).to(q.dtype)
    dq = tl.dot(ds, k, input_precision=PRECISION)
    dk = tl.dot(tl.trans(ds), q, input_precision=PRECISION) * (scale / LOG2E)
    dv = tl.dot(tl.trans(p.to(q.dtype)), go, input_precision=PRECISION)
    own = tl.arange(0, OWN)
    own_real = (own < BLOCKS * B) & (first + own // B < A)
    _store(grad_own_key, dk, first, head, own, own_real, tl.num_programs(0), B, D)
    _store(grad_own_value, dv, first, head, own, own_real, tl.num_programs(0), B, D)

    if CONTEXT:
        begin, ahead, inner, edges = _walk(low, up, KEYS)
        for step in tl.range(0, edges):
            start = begin + (step + tl.where(step >= ahead, inner, 0)) * KEYS
            ck = _tile(context_key, head, start, KEYS, D)
            cv = _tile(context_value, head, start, KEYS, D)
            key = start + tl.arange(0, KEYS)
            mask = (key[None, :] >= low[:, None]) & (key[None, :] < up[:, None])
            dq = _query_step(q, ck, cv, go, norm, delta, dq, mask, scale, True, PRECISION)
        for step in tl.range(ahead, ahead + inner):
            ck = _tile(context_key, head, begin + step * KEYS, KEYS, D)
            cv = _tile(context_value, head, begin + step * KEYS, KEYS, D)
            dq = _query_step(q, ck, cv, go, norm, delta, dq, None, scale, False, PRECISION)
    dq = dq * (scale / LOG2E)
    _store(grad_query, dq, first, head * G + member, n, real, tl.num_programs(0) * G, B, D)


@triton.jit
def _context_step(
    k, v, query, grad_out, lse, delta_in, grad_query, lower, upper, dk, dv, first, key, head,
    scale, A,
    B: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
    BLOCKS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """The sums of the keys' gradients after some more blocks, from `first` on.

    Keys are the rows of all products here: what is multiplied second is then in registers.
    """
    q = _tile(query, head * G, first * B, ROWS, D)
    go = _tile(grad_out, head * G, first * B, ROWS, D)
    member, n, block, real = _rows(first, A, B, G, BLOCKS, SLOTS, ROWS)
    at = _at(first, head * G + member, n, A, B)
    if MASKED or BLOCKS * B * G != ROWS:
        norm = tl.load(lse + at, mask=real, other=float("inf"))
        delta = tl.load(delta_in + at, mask=real, other=0.0)
    else:
        norm = tl.load(lse + at)
        delta = tl.load(delta_in + at)
    mask = None
    if MASKED:
        low, up = _bounds(lower, upper, block, real, n % B, WINDOW)
        mask = (key[:, None] >= low[None, :]) & (key[:, None] < up[None, :])
    p = _probabilities(k, q, norm[None, :], mask, scale, MASKED, PRECISION)
    dv = tl.dot(p.to(go.dtype), go, dv, input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(go), input_precision=PRECISION)
    ds = (p * (dp - delta[None, :])).to(q.dtype)
    dk = tl.dot(ds, q, dk, input_precision=PRECISION)
    if FUSED:
        dq = tl.dot(tl.trans(ds), k, input_precision=PRECISION) * (scale / LOG2E)
        # Rows that are not real add zeros to others or lie beyond the last slot.
        grad_query.atomic_add([head * G, first * B, 0], dq.reshape(ROWS // SLOTS, SLOTS, D))
    return dk, dv


@triton.jit
def _context_gradient(
    query, context_key, context_value, grad_out, lse, delta,
    grad_query, grad_context_key, grad_context_value, lower, upper, until, scale, A, T,
    B: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
    BLOCKS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of context keys and values; FUSED adds what the queries get of it."""
    head = tl.program_id(0)
    start = tl.program_id(1) * KEYS
    k = _tile(context_key, head, start, KEYS, D)
    v = _tile(context_value, head, start, KEYS, D)
    # Blocks that see any of the tile, and among them those that see all of it.
    end = tl.minimum(start + KEYS, T) - 1
    first = tl.load(until + start)
    last = tl.load(until + T + end)
    all_first = tl.load(until + end)
    all_last = tl.load(until + 2 * T + start)
    ahead = tl.cdiv(tl.maximum(tl.minimum(all_first, last) - first, 0), BLOCKS)
    middle = first + ahead * BLOCKS
    inner = tl.maximum(tl.minimum(all_last, last) - middle, 0) // BLOCKS
    behind = tl.cdiv(tl.maximum(last - middle - inner * BLOCKS, 0), BLOCKS)

    key = tl.arange(0, KEYS)
    dk = tl.zeros([KEYS, D], tl.float32)
    dv = tl.zeros([KEYS, D], tl.float32)
    for step in tl.range(0, ahead + behind):
        dk, dv = _context_step(
            k, v, query, grad_out, lse, delta, grad_query, lower, upper, dk, dv,
            first + (step + tl.where(step >= ahead, inner, 0)) * BLOCKS, start + key, head,
            scale, A, B, G, D, WINDOW, BLOCKS, SLOTS, ROWS, True, PRECISION, FUSED,
        )  # fmt: skip
    for step in tl.range(ahead, ahead + inner):
        dk, dv = _context_step(
            k, v, query, grad_out, lse, delta, grad_query, lower, upper, dk, dv,
            first + step * BLOCKS, start + key, head,
            scale, A, B, G, D, WINDOW, BLOCKS, SLOTS, ROWS, False, PRECISION, FUSED,
        )  # fmt: skip
    dk = dk * (scale / LOG2E)
    real = start + key < T
    _store(grad_context_key, dk, start, head, key, real, tl.num_programs(0), 1, D)
    _store(grad_context_value, dv, start, head, key, real, tl.num_programs(0), 1, D)


# --- launches -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all kernels are told of the sizes; the rest they find in `lower`, `upper`, `until`."""

    A: int
    B: int
    G: int
    D: int
    T: int
    kv_heads: int
    window: int
    causal: bool
    exact: bool

    @classmethod
    def of(
        cls, query: Tensor, context_key: Tensor, upper: Tensor, window: int | None, causal: bool
    ) -> Self:
        (heads, slots, d), (kv_heads, context, _) = query.shape, context_key.shape
        return cls(
            A=len(upper),
            B=slots // len(upper),
            G=heads // kv_heads,
            D=d,
            T=context,
            kv_heads=kv_heads,
            window=window or 0,
            causal=causal,
            exact=query.dtype == torch.float32,
        )

    @property
    def scale(self) -> float:
        """Of logits in powers of two."""
        return float(self.D**-0.5 * LOG2E.value)

    def blocks(self, tile: Tile) -> int:
        """Whole blocks of a tile; one that is larger than asked for is taken all the same."""
        return max(1, tile.rows // power_of_two(self.G) // self.B)

    def slots(self, tile: Tile) -> int:
        """Slots of a tile for each head of the group; a tensor core takes no less than 16 rows."""
        group = power_of_two(self.G)
        return max(power_of_two(self.blocks(tile) * self.B), 16 // group)

    def fitted(self, tile: Tile) -> Tile:
        """The tile, of fewer keys and stages if one block alone has more rows than it has."""
        excess = power_of_two(self.G) * self.slots(tile) // tile.rows
        if excess <= 1:
            return tile
        return replace(tile, keys=max(32, tile.keys // excess), stages=1 if excess > 2 else 2)

    def row_options(self, tile: Tile) -> dict[str, Any]:
        return {
            "B": self.B,
            "G": self.G,
            "D": self.D,
            "WINDOW": self.window,
            "BLOCKS": self.blocks(tile),
            "SLOTS": self.slots(tile),
            "ROWS": power_of_two(self.G) * self.slots(tile),
            "KEYS": tile.keys,
            "PRECISION": "ieee" if self.exact else "tf32",
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }

    def own_options(self, tile: Tile) -> dict[str, Any]:
        return self.row_options(tile) | {"OWN": max(16, self.slots(tile)), "CAUSAL": self.causal}

    def rows(self, tile: Tile, *tensors: Tensor) -> list[TensorDescriptor]:
        """Tensors of all heads, as the kernels load them: by rows of a group."""
        return [described(t, (power_of_two(self.G), self.slots(tile))) for t in tensors]

    def own(self, tile: Tile, *tensors: Tensor) -> list[TensorDescriptor]:
        return [described(t, (1, max(16, self.slots(tile)))) for t in tensors]

    def keys(self, tile: Tile, *tensors: Tensor) -> list[TensorDescriptor]:
        return [described(t, (1, tile.keys)) for t in tensors]

    def by_rows(self, tile: Tile) -> tuple[int, int]:
        return self.kv_heads, triton.cdiv(self.A, self.blocks(tile))

    def by_keys(self, tile: Tile) -> tuple[int, int]:
        return self.kv_heads, triton.cdiv(self.T, tile.keys)


def power_of_two(size: int) -> int:
    """The least that holds `size`."""
    return 1 << (size - 1).bit_length()


def described(tensor: Tensor, tile: tuple[int, int]) -> TensorDescriptor:
    """[heads, S, D] for the hardware that copies tiles: no addresses in registers, no masks."""
    tensor = dense_rows(tensor)
    return TensorDescriptor(
        tensor, list(tensor.shape), list(tensor.stride()), [*tile, tensor.shape[-1]]
    )


def dense_rows(tensor: Tensor) -> Tensor:
    """The tensor, copied only if it does not lie as that hardware wants it."""
    apart = [stride * tensor.itemsize for stride in tensor.stride()[:2]]
    if tensor.stride(2) == 1 and all(step > 0 and step % 16 == 0 for step in apart):
        return tensor
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def strides(*tensors: Tensor) -> list[int]:
    """Of slots and heads."""
    return [stride for tensor in tensors for stride in (tensor.stride(1), tensor.stride(0))]


def slot_major(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised [heads, S, D] over memory of [S, heads, D]."""
    heads, slots, d = like.shape
    return like.new_empty(slots, heads, d, dtype=dtype).transpose(0, 1)


@torch.library.custom_op("dflash::block_attention", mutates_args=())
def block_attention(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    lower: Tensor,
    upper: Tensor,
    until: Tensor,
    window: int | None,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Attention [heads, S, D] and log2 of its softmax sums by rows; see `BlockSight`."""
    refuse(query)
    plan = Plan.of(query, context_key, upper, window, causal)
    tile = plan.fitted(tiles_for(query).forward)
    query = dense_rows(query)
    out, lse = outputs(query)
    _forward[plan.by_rows(tile)](
        query,
        *plan.keys(tile, context_key, context_value),
        *plan.own(tile, own_key, own_value),
        out, lse, lower, upper, plan.scale, plan.A, *strides(query), **plan.own_options(tile),
    )  # fmt: skip
    return out, lse


def outputs(query: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised attention, and a number for each of its rows."""
    return slot_major(query), query.new_empty(query.shape[:2], dtype=torch.float32)


@block_attention.register_fake
def _(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    lower: Tensor,
    upper: Tensor,
    until: Tensor,
    window: int | None,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    return outputs(query)


@torch.library.custom_op("dflash::block_attention_backward", mutates_args=())
def block_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    out: Tensor,
    lse: Tensor,
    lower: Tensor,
    upper: Tensor,
    until: Tensor,
    window: int | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the five tensors; the first kernel leaves delta to the second."""
    plan = Plan.of(query, context_key, upper, window, causal)
    tiles = tiles_for(query)
    grad_query, grad_own_key, grad_own_value = map(slot_major, (query, own_key, own_value))
    grad_context_key, grad_context_value = map(slot_major, (context_key, context_value))
    # Sums of many atomic additions are kept in float32 and rounded once.
    sums = slot_major(query, torch.float32) if tiles.fused else grad_query
    delta = torch.empty_like(lse)
    query, grad_out = dense_rows(query), dense_rows(grad_out)
    tile = plan.fitted(tiles.query)
    _query_gradient[plan.by_rows(tile)](
        query,
        *plan.keys(tile, context_key, context_value),
        *plan.own(tile, own_key, own_value),
        out, grad_out, lse, delta, sums, grad_own_key, grad_own_value, lower, upper,
        plan.scale, plan.A, *strides(query, out, grad_out),
        **plan.own_options(tile), CONTEXT=not tiles.fused,
    )  # fmt: skip
    tile = plan.fitted(tiles.context)
    _context_gradient[plan.by_keys(tile)](
        *plan.rows(tile, query),
        *plan.keys(tile, context_key, context_value),
        *plan.rows(tile, grad_out),
        lse, delta, *plan.rows(tile, sums), grad_context_key, grad_context_value,
        lower, upper, until, plan.scale, plan.A, plan.T,
        **plan.row_options(tile), FUSED=tiles.fused,
    )  # fmt: skip
    if tiles.fused:
        grad_query.copy_(sums)
    return grad_query, grad_context_key, grad_context_value, grad_own_key, grad_own_value


@block_attention_backward.register_fake
def _(
    grad_out: Tensor,
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    out: Tensor,
    lse: Tensor,
    lower: Tensor,
    upper: Tensor,
    until: Tensor,
    window: int | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    five = (query, context_key, context_value, own_key, own_value)
    query, context_key, context_value, own_key, own_value = map(slot_major, five)
    return query, context_key, context_value, own_key, own_value


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, lower, upper, until, ctx.window, ctx.causal = inputs
    ctx.save_for_backward(*tensors, *output, lower, upper, until)
    ctx.set_materialize_grads(False)


def _back(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    """Nobody differentiates the sums."""
    if grad_out is None:
        return (None,) * 10
    grads = torch.ops.dflash.block_attention_backward(
        grad_out, *ctx.saved_tensors, ctx.window, ctx.causal
    )
    return *grads, *(None,) * 5


block_attention.register_autograd(_back, setup_context=_keep)


# --- the interface ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BlockSight:
    """The intervals of blocks and of context slots; made once for all layers of one look."""

    lower: Tensor  # int32 [A], first context slot of the block (but for the window)
    upper: Tensor  # int32 [A], its anchor; -1 if the block is invalid
    # int32 [3, T]: how many valid blocks have their anchor, the first slot that any of their
    # slots sees, the first slot that all of them see at or before a context slot.
    until: Tensor
    window: int | None
    causal: bool

    @classmethod
    def of(cls, blocks: Blocks, look: Visibility) -> Self:
        anchors, starts, valid = blocks.anchors, blocks.starts, blocks.valid
        any_sees = all_see = starts
        if look.window is not None:
            any_sees = torch.maximum(starts, anchors - (look.window - 1))
            all_see = torch.maximum(starts, anchors + blocks.block_size - look.window)
        marks = torch.stack([anchors, any_sees, all_see]).int()
        marks = torch.where(valid, marks, FAR.value).contiguous()
        slots = torch.arange(blocks.context, dtype=torch.int32, device=anchors.device)
        return cls(
            lower=torch.where(valid, starts, 0).int(),
            upper=torch.where(valid, anchors, -1).int(),
            until=torch.searchsorted(
                marks, slots.expand(3, -1).contiguous(), right=True, out_int32=True
            ),
            window=look.window,
            causal=look.causal,
        )

    def attend(self, query: Tensor, context: KeysValues, own: KeysValues) -> Tensor:
        out: Tensor = torch.ops.dflash.block_attention(
            query, *context, *own, self.lower, self.upper, self.until, self.window, self.causal
        )[0]
        return out


def refuse(query: Tensor) -> None:
    """Say so where the kernels cannot run, before Triton does in other words."""
    if query.device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise FitError(
            f"the block kernels run on a GPU and the tensors are on {query.device.type}; move "
            "them, or choose dense attention"
        )
    if query.shape[-1] & (query.shape[-1] - 1):
        raise FitError(
            f"the block kernels take heads of a power of two, this drafter has "
            f"{query.shape[-1]}; choose flex or dense attention"
        )
