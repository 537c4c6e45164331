"""Attention of draft blocks in kernels of our own: no table of tiles in any direction.

What a block sees, and what sees a slot of the context, is an interval; three vectors of numbers
say all of it, and `block_kernel` walks them.  Here is how large its programs are, what it is
told, and the operator that torch differentiates and compiles around.

A blocks of B slots, T context slots, N key heads, G query heads of each, D channels of a head;
S = A * B.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, library

from dflash_fit import block_kernel
from dflash_fit.attention import Blocks, KeysValues, Visibility
from dflash_fit.block_kernel import FAR, LOG2E, TensorDescriptor, triton
from dflash_fit.errors import FitError

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
    """Tiles of the three kernels."""

    forward: Tile
    query: Tile
    context: Tile


# One H200, 2048 blocks of 16 over 49,152 slots, 32 / 8 heads of 128: forward 1.20 ms, backward
# 3.25 ms a layer.  What lost: tiles of 128 rows (1.38 and 4.05 ms); one kernel for the whole way
# back, which adds to the queries' gradients atomically (5.0 to 7.6 ms in five sizes); flex
# attention (2.56 and 9.36 ms).
MEASURED = Tiles(
    forward=Tile(rows=64, keys=64, warps=4, stages=3),
    query=Tile(rows=64, keys=64, warps=4, stages=2),
    context=Tile(rows=64, keys=64, warps=4, stages=2),
)
# Not measured: what leaves room in shared memory and in registers.
WIDE = Tile(rows=64, keys=32, warps=8, stages=2)
# By head size.  A benchmark replaces entries; a captured graph keeps what it was captured with.
TILES = {64: MEASURED, 128: MEASURED, 256: Tiles(forward=WIDE, query=WIDE, context=WIDE)}
# For tests in float32, where a tile takes twice the memory and is not multiplied by tensor cores.
EXACT = Tile(rows=32, keys=32, warps=4, stages=1)
EXACT_TILES = Tiles(forward=EXACT, query=EXACT, context=EXACT)


def tiles_for(query: Tensor) -> Tiles:
    if query.dtype == torch.float32:
        return EXACT_TILES
    return TILES[max(64, query.shape[-1])]


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
        keys, stages = max(32, tile.keys // excess), 1 if excess > 2 else 2
        return replace(tile, keys=min(tile.keys, keys), stages=min(tile.stages, stages))

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
        return self.kv_heads, -(-self.A // self.blocks(tile))

    def by_keys(self, tile: Tile) -> tuple[int, int]:
        return self.kv_heads, -(-self.T // tile.keys)


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
    aligned = all(step % 16 == 0 for step in (*apart, tensor.data_ptr()))
    if tensor.stride(2) == 1 and aligned and min(apart) > 0:
        return tensor
    dense = slot_major(tensor)
    return dense.copy_(tensor)


def strides(*tensors: Tensor) -> list[int]:
    """Of slots and heads."""
    return [stride for tensor in tensors for stride in (tensor.stride(1), tensor.stride(0))]


def slot_major(like: Tensor) -> Tensor:
    """Uninitialised [heads, S, D] over memory of [S, heads, D]."""
    heads, slots, d = like.shape
    return like.new_empty(slots, heads, d).transpose(0, 1)


@library.custom_op("dflash::block_attention", mutates_args=())
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
    plan = Plan.of(query, context_key, upper, window, causal)
    refuse_device(query.device)
    refuse_sizes(plan.D, group=plan.G, block_size=plan.B, itemsize=query.itemsize)
    tile = plan.fitted(tiles_for(query).forward)
    query = dense_rows(query)
    out, lse = outputs(query)
    block_kernel.forward[plan.by_rows(tile)](
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
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return outputs(query)


@library.custom_op("dflash::block_attention_backward", mutates_args=())
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
    delta = torch.empty_like(lse)
    query, grad_out = dense_rows(query), dense_rows(grad_out)
    tile = plan.fitted(tiles.query)
    block_kernel.query_gradient[plan.by_rows(tile)](
        query,
        *plan.keys(tile, context_key, context_value),
        *plan.own(tile, own_key, own_value),
        out, grad_out, lse, delta, grad_query, grad_own_key, grad_own_value, lower, upper,
        plan.scale, plan.A, *strides(query, out, grad_out), **plan.own_options(tile),
    )  # fmt: skip
    tile = plan.fitted(tiles.context)
    block_kernel.context_gradient[plan.by_keys(tile)](
        *plan.rows(tile, query),
        *plan.keys(tile, context_key, context_value),
        *plan.rows(tile, grad_out),
        lse, delta, grad_context_key, grad_context_value, lower, upper, until,
        plan.scale, plan.A, plan.T, **plan.row_options(tile),
    )  # fmt: skip
    return grad_query, grad_context_key, grad_context_value, grad_own_key, grad_own_value


@block_attention_backward.register_fake
def _(grad_out: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    query, context_key, context_value, own_key, own_value = map(slot_major, inputs[:5])
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


# --- what they cannot do, said before Triton says it in other words ------------------------------

HEAD_SIZES = (16, 32, 64, 128, 256)
MOST_SLOTS = 32
# Of a block's queries in a group of heads, which one program holds.  Hopper has 227 KiB of shared
# memory; with twice as much Triton 3.6 fits in and 3.7 asks for 268.
MOST_BYTES = 32 * 1024


def refuse_device(device: torch.device) -> None:
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise FitError(
            f"the block kernels run on a GPU and the tensors are on {device.type}; move them, or "
            "choose --attention dense"
        )


def refuse_sizes(head_size: int, *, group: int, block_size: int, itemsize: int) -> None:
    """`group` query heads share a key head; `itemsize` is the bytes of a number."""
    if head_size not in HEAD_SIZES:
        other = "dense" if head_size < min(HEAD_SIZES) else "flex"
        raise FitError(
            f"the block kernels take heads of {', '.join(map(str, HEAD_SIZES))} channels, this "
            f"drafter has {head_size}; choose --attention {other} or another --head-dim"
        )
    if block_size > MOST_SLOTS:
        raise FitError(
            f"the block kernels take blocks of up to {MOST_SLOTS} slots, this drafter has blocks "
            f"of {block_size}; choose --attention flex or a smaller --block-size"
        )
    size = power_of_two(group) * power_of_two(block_size) * head_size * itemsize
    if size > MOST_BYTES:
        raise FitError(
            f"the block kernels hold a block's queries of all heads that share a key: {block_size} "
            f"slots x {group} heads of {head_size} channels take {size // 1024} KiB, and "
            f"{MOST_BYTES // 1024} fit; choose --attention flex"
        )
