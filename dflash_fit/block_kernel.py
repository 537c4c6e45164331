"""Triton kernels of block attention: forward, gradients of rows, gradients of context keys.

The context of a block is an interval of slots, and since anchors and documents ascend, the
blocks that see a slot are an interval of blocks.  So every program walks one interval: masked at
both ends, where rows differ, and without a mask in the middle, where all see all.

A blocks of B slots, T context slots, N key heads, G query heads of each, D channels of a head;
S = A * B.  A row is a pair (slot, query head of the group): the S * G rows of a key head lie side
by side in memory of [S, heads, D], and a tile of rows is a few whole blocks of them.  Hence keys
are read once for the group, gradients of keys sum over it by themselves, and the keys of the own
blocks are seen by one tile only.  `block_attention` launches them, with sizes that it chooses.

What nobody sees may be of any size but has to be finite: 0 * NaN is NaN in the products of a tile,
as it is in the dense way.  (NaN in any state of a pack makes the gradient of `fc` NaN anyway.)
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dflash_fit.errors import FitError

try:
    import triton as triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from triton.tools.tensor_descriptor import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        TensorDescriptor as TensorDescriptor,
    )
except ImportError as error:
    raise FitError(
        "the block kernels need Triton, which is not installed; install it (it comes with torch "
        "for CUDA) or choose another attention"
    ) from error

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
def forward(
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
def query_gradient(
    query, context_key, context_value, own_key, own_value, out, grad_out, lse, delta_out,
    grad_query, grad_own_key, grad_own_value, lower, upper, scale, A,
    query_slot, query_head, out_slot, out_head, grad_slot, grad_head,
    B: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCKS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, OWN: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of rows and of its own keys, and delta = sum(out * its gradient)."""
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
    k, v, query, grad_out, lse, delta_in, lower, upper, dk, dv, first, key, head, scale, A,
    B: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
    BLOCKS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
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
    return dk, dv


@triton.jit
def context_gradient(
    query, context_key, context_value, grad_out, lse, delta,
    grad_context_key, grad_context_value, lower, upper, until, scale, A, T,
    B: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
    BLOCKS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of context keys and values."""
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
            k, v, query, grad_out, lse, delta, lower, upper, dk, dv,
            first + (step + tl.where(step >= ahead, inner, 0)) * BLOCKS, start + key, head,
            scale, A, B, G, D, WINDOW, BLOCKS, SLOTS, ROWS, True, PRECISION,
        )  # fmt: skip
    for step in tl.range(ahead, ahead + inner):
        dk, dv = _context_step(
            k, v, query, grad_out, lse, delta, lower, upper, dk, dv,
            first + step * BLOCKS, start + key, head,
            scale, A, B, G, D, WINDOW, BLOCKS, SLOTS, ROWS, False, PRECISION,
        )  # fmt: skip
    dk = dk * (scale / LOG2E)
    real = start + key < T
    _store(grad_context_key, dk, start, head, key, real, tl.num_programs(0), 1, D)
    _store(grad_context_value, dv, start, head, key, real, tl.num_programs(0), 1, D)
