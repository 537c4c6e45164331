"""Attention of a drafter layer on a GPU: our kernels, with several sizes of tiles, and flex.

Times are medians of replays of a CUDA graph, so that Python's launches are not in them; the way
back is what forward and backward take together, less forward.  Errors are those of bfloat16
against the dense way in float32, a few blocks at a time: norm of the difference over the norm.

T context slots, A blocks of 16 slots; 32 query heads and 8 key heads of 128 channels.
"""

import math
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from common import add_out, publish, result
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from dflash_fit import block_attention
from dflash_fit.attention import Blocks, DenseSight, Sight, Visibility
from dflash_fit.block_attention import BlockSight, Tile

BEGAN = time.monotonic()
SIZE, HEADS, KV_HEADS, D = 16, 32, 8, 128
NAMES = ("out", "query", "context_key", "context_value", "own_key", "own_value")
# What a size that does not fit, or that the compiler cannot do, ends in.
REFUSED = (OutOfResources, PTXASError, CompilationError)


def main() -> None:
    args = parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("Error: no CUDA GPU here; attention is measured on one")
    figures: dict[str, float] = {}
    failed: dict[str, str] = {}
    for number, shape in enumerate(SHAPES[: args.shapes]):
        for window in (None, 2048):
            bench = Bench.of(shape, window)
            figures |= bench.measure("default", lambda bench=bench: bench.ours())
            if not args.no_check:
                figures |= bench.errors()
            if not args.no_flex and not late(args, "flex"):
                figures |= with_flex(bench, failed)
            if number == 0 and window is None:
                figures |= sweep(bench, args, failed)
            elif block_attention.TILES[D] != CHOSEN:
                block_attention.TILES[D] = CHOSEN
                figures |= bench.measure("chosen", lambda bench=bench: bench.ours())
            block_attention.TILES[D] = DEFAULT
    said = {"heads": HEADS, "kv_heads": KV_HEADS, "d": D, "block_size": SIZE}
    said |= {"chosen": str(CHOSEN), "failed": failed}
    publish(result("attention", said, figures), args.out)


def parse_args() -> Namespace:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=150, help="start nothing new after this")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes")
    parser.add_argument("--no-flex", action="store_true", help="leave flex attention out")
    parser.add_argument("--no-check", action="store_true", help="leave the errors out")
    add_out(parser)
    return parser.parse_args()


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:4.0f} s] {text}", file=sys.stderr, flush=True)


def late(args: Namespace, what: str) -> bool:
    if time.monotonic() - BEGAN < args.seconds:
        return False
    say(f"no time left for {what}")
    return True


# --- what is measured ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Shape:
    context: int
    blocks: int
    documents: int

    def place(self, device: str) -> Blocks:
        """Documents of lengths around their mean, each from a multiple of 8; anchors anywhere."""
        generator = torch.Generator().manual_seed(0)
        cuts = torch.arange(self.documents + 1) * (self.context // self.documents)
        shift = torch.rand(self.documents - 1, generator=generator) - 0.5
        cuts[1:-1] += (shift * 0.8 * self.context / self.documents).long()
        cuts = cuts // 8 * 8
        chosen = torch.randperm(self.context - SIZE, generator=generator)[: self.blocks]
        anchors = chosen.sort().values
        starts = cuts[torch.searchsorted(cuts, anchors, right=True) - 1]
        return Blocks(
            anchors=anchors.to(device),
            starts=starts.to(device),
            valid=torch.ones(self.blocks, dtype=torch.bool, device=device),
            context=self.context,
            block_size=SIZE,
        )

    def __str__(self) -> str:
        return f"{self.context}x{self.blocks}x{self.documents}"


SHAPES = [
    Shape(context=49_152, blocks=2048, documents=30),
    Shape(context=4096, blocks=512, documents=1),
    Shape(context=8192, blocks=1024, documents=2),
]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One shape and window, with its tensors."""

    name: str
    blocks: Blocks
    look: Visibility
    inputs: list[Tensor]
    grad: Tensor

    @classmethod
    def of(cls, shape: Shape, window: int | None) -> "Bench":
        torch.manual_seed(0)
        blocks = shape.place("cuda")
        sizes = [(blocks.slots, HEADS)]
        sizes += [(blocks.context, KV_HEADS)] * 2 + [(blocks.slots, KV_HEADS)] * 2
        inputs = [
            torch.randn(*size, D, device="cuda", dtype=torch.bfloat16).transpose(0, 1)
            for size in sizes
        ]
        bench = cls(
            name=f"{shape}.{'full' if window is None else f'window{window}'}",
            blocks=blocks,
            look=Visibility(window=window, causal=False),
            inputs=[tensor.requires_grad_() for tensor in inputs],
            grad=torch.randn_like(inputs[0]),
        )
        say(f"{bench.name}: {bench.flops / 1e12:.3f} TFLOP forward")
        return bench

    @property
    def flops(self) -> float:
        """Of the two products of forward, for the pairs that are visible; backward has 5."""
        slot = torch.arange(SIZE, device="cuda")
        low, anchor = self.blocks.starts[:, None], self.blocks.anchors[:, None]
        if self.look.window is not None:
            low = torch.maximum(low, anchor + slot - (self.look.window - 1))
        pairs = (anchor - low).clamp(min=0).expand(-1, SIZE).sum() + self.blocks.slots * SIZE
        return 4.0 * D * HEADS * float(pairs)

    def ours(self) -> Sight:
        return BlockSight.of(self.blocks, self.look)

    def measure(
        self,
        name: str,
        make: Callable[[], Sight],
        attend: Callable[..., Tensor] | None = None,
        *,
        backward: bool = True,
    ) -> dict[str, float]:
        """Milliseconds of forward and backward; `attend` stands for the sight's if given."""
        attend = attend or make().attend
        query, *others = self.inputs

        def forward() -> Tensor:
            return attend(query, tuple(others[:2]), tuple(others[2:]))

        def both() -> None:
            torch.autograd.grad(forward(), self.inputs, self.grad)

        with torch.no_grad():
            ahead = median_ms(forward)
        figures = {f"{self.name}.forward_ms.{name}": ahead}
        rate = f"{self.flops / ahead / 1e9:4.0f}"
        if backward:
            back = median_ms(both) - ahead
            figures[f"{self.name}.backward_ms.{name}"] = back
            rate += f", {2.5 * self.flops / back / 1e9:4.0f}"
            say(f"{self.name} {name}: {ahead:.3f} ms, back {back:.3f} ms ({rate} TFLOP/s)")
        else:
            say(f"{self.name} {name}: {ahead:.3f} ms ({rate} TFLOP/s)")
        return figures

    def errors(self) -> dict[str, float]:
        """Of our kernels as they are set now."""
        query, *others = self.inputs
        out = self.ours().attend(query, tuple(others[:2]), tuple(others[2:]))
        found = [out.detach(), *torch.autograd.grad(out, self.inputs, self.grad)]
        figures = {}
        for name, ours, exact in zip(NAMES, found, self.exact(), strict=True):
            error = float((ours.float() - exact).norm() / exact.norm())
            figures[f"{self.name}.error.{name}"] = error
            if not error < 2e-2:
                raise SystemExit(f"Error: {self.name}: {name} is wrong by {error:.3g}, want < 0.02")
        say(f"{self.name} errors: {', '.join(f'{error:.4f}' for error in figures.values())}")
        return figures

    def exact(self) -> list[Tensor]:
        """Out and gradients by the dense way in float32, of 32 blocks at a time."""
        inputs = [tensor.detach().float().requires_grad_() for tensor in self.inputs]
        query, key, value, own_key, own_value = inputs
        outs = []
        for first in range(0, len(self.blocks.anchors), 32):
            own = slice(first * SIZE, (first + 32) * SIZE)
            blocks, seen = part(self.blocks, slice(first, first + 32))
            out = DenseSight.of(blocks, self.look).attend(
                query[:, own],
                (key[:, seen], value[:, seen]),
                (own_key[:, own], own_value[:, own]),
            )
            out.backward(self.grad[:, own].float())
            outs.append(out.detach())
        return [torch.cat(outs, dim=1), *(tensor.grad for tensor in inputs)]


def part(blocks: Blocks, which: slice) -> tuple[Blocks, slice]:
    """Some of the blocks, over the context that they may see."""
    anchors, starts = blocks.anchors[which], blocks.starts[which]
    begin, end = int(starts.min()), max(int(anchors.max()), int(starts.min()) + 1)
    return replace(
        blocks,
        anchors=anchors - begin,
        starts=starts - begin,
        valid=blocks.valid[which],
        context=end - begin,
    ), slice(begin, end)


def median_ms(action: Callable[[], object], *, repeats: int = 12) -> float:
    """Of replays of a graph; what is refused is refused before, in the runs that warm it up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            action()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    times = []
    for number in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if number >= 3:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


# --- sizes of tiles -----------------------------------------------------------------------------

DEFAULT = CHOSEN = block_attention.TILES[D]


def tile(rows: int, keys: int, warps: int, stages: int) -> Tile:
    return Tile(rows=rows, keys=keys, warps=warps, stages=stages)


FORWARD = [
    tile(128, 128, 8, 2), tile(128, 64, 8, 3), tile(128, 64, 4, 2), tile(64, 64, 4, 3),
    tile(128, 64, 8, 4), tile(64, 128, 4, 2), tile(64, 64, 4, 2), tile(128, 64, 4, 3),
    tile(128, 64, 8, 2),
]  # fmt: skip
QUERY = [
    tile(128, 64, 8, 2), tile(128, 64, 8, 3), tile(64, 64, 4, 2), tile(64, 64, 4, 3),
    tile(128, 128, 8, 2), tile(128, 32, 8, 3), tile(64, 128, 4, 2),
]  # fmt: skip
CONTEXT = [
    tile(64, 128, 8, 3), tile(64, 128, 8, 2), tile(64, 64, 4, 2), tile(64, 64, 4, 3),
    tile(64, 64, 8, 3), tile(128, 64, 8, 2),
]  # fmt: skip


def candidates() -> Iterator[tuple[str, Tile]]:
    """Part and tile; in turns, so that a short sweep has of all."""
    lists = [("forward", FORWARD), ("query", QUERY), ("context", CONTEXT)]
    for turn in range(max(len(tiles) for _, tiles in lists)):
        for part_name, tiles in lists:
            if turn < len(tiles):
                yield part_name, tiles[turn]


def sweep(bench: Bench, args: Namespace, failed: dict[str, str]) -> dict[str, float]:
    """One part after the other beside the defaults of the others; keeps the best in CHOSEN."""
    global CHOSEN
    figures: dict[str, float] = {}
    best: dict[str, tuple[float, Tile]] = {}
    for part_name, size in candidates():
        if late(args, "more sizes"):
            break
        name = f"{part_name}.{size.rows}x{size.keys}w{size.warps}s{size.stages}"
        block_attention.TILES[D] = replace(DEFAULT, **{part_name: size})
        try:
            found = bench.measure(name, bench.ours, backward=part_name != "forward")
        except REFUSED as error:
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            say(f"{name}: {failed[name]}")
            continue
        figures |= found
        direction = "forward" if part_name == "forward" else "backward"
        taken = found[f"{bench.name}.{direction}_ms.{name}"]
        best[part_name] = min(best.get(part_name, (math.inf, size)), (taken, size), key=first_of)
    CHOSEN = replace(DEFAULT, **{name: size for name, (_, size) in best.items()})
    say(f"chosen: {CHOSEN}")
    return figures


def first_of(pair: tuple[float, Tile]) -> float:
    return pair[0]


def with_flex(bench: Bench, failed: dict[str, str]) -> dict[str, float]:
    try:
        from dflash_fit.tiles import FlexSight
    except ImportError as error:
        say(f"flex is left out: {error}")
        failed["flex"] = str(error)
        return {}
    sight = FlexSight.of(bench.blocks, bench.look)
    attend = torch.compile(sight.attend, dynamic=False)
    try:
        return bench.measure("flex", lambda: sight, attend)
    except (*REFUSED, RuntimeError) as error:
        failed[f"{bench.name}.flex"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        say(f"flex is left out: {failed[f'{bench.name}.flex']}")
        return {}


if __name__ == "__main__":
    main()
