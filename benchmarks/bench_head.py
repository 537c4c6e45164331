"""The loss against the frozen head on a GPU: as a whole, its parts, and its kernels in many sizes.

Times are medians over CUDA events, of random data in bfloat16.  The parts are those of one chunk
of 256 blocks: the matmul to the logits, the kernel that measures them, the kernel that turns them
into slopes, the matmul back to the rows.  GB are 10^9 bytes of logits, read and written.

V vocabulary, H hidden size, blocks of 16 slots, of which 15 reach the head; Q slots of a chunk.
"""

import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from common import add_out, publish, result
from torch import Tensor

from dflash_fit import head_kernel
from dflash_fit.head_kernel import Tile
from dflash_fit.loss import (
    HeadResult,
    Objective,
    head_loss,
    head_loss_by,
    logits_buffer,
    logits_of,
    through_torch,
)

BEGAN = time.monotonic()
SLOTS = 15
CHUNKS = (128, 256, 512)  # blocks
PART = 256
TILES = [Tile(*sizes) for sizes in ((2, 4), (2, 8), (4, 4), (4, 8), (4, 16), (8, 4), (8, 8))]
STAGES = (1, 2, 3)
OBJECTIVES = {
    "ce": Objective(divergence="ce", slot_weights="decay", gamma=7),
    "kl": Objective(divergence="kl", slot_weights="dpace", gamma=7),
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    vocab: int
    hidden: int
    blocks: int

    def __str__(self) -> str:
        return f"{self.vocab}x{self.hidden}x{self.blocks}"


SHAPES = [
    Shape(vocab=248_320, hidden=5120, blocks=2048),
    Shape(vocab=151_936, hidden=2560, blocks=1024),
]


def main() -> None:
    args = parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("Error: no CUDA GPU here; the loss is measured on one")
    figures: dict[str, float] = {}
    best: dict[str, str] = {}
    for number, shape in enumerate(SHAPES[: args.shapes]):
        bench = Bench.of(shape, args.rounds)
        for name in OBJECTIVES:
            figures |= bench.whole(name) | bench.parts(name)
            if not args.no_sweep and number == 0:
                swept = bench.sweep(name)
                best |= {f"{name}.{kernel}": first(swept, kernel) for kernel in KERNELS}
                figures |= swept
        figures |= bench.plain()
        del bench
        torch.cuda.empty_cache()
    default = {"measure": f"{head_kernel.MEASURE} x {head_kernel.STAGES} stages"}
    default |= {"write_slope": str(head_kernel.SLOPE)}
    said = {"slots": SLOTS, "part_blocks": PART, "rounds": args.rounds}
    publish(result("head", {**said, "default": default, "best": best}, figures), args.out)


def parse_args() -> Namespace:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes")
    parser.add_argument("--rounds", type=int, default=7, help="runs of which medians are taken")
    parser.add_argument("--no-sweep", action="store_true", help="only the default tiles")
    add_out(parser)
    return parser.parse_args()


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:4.0f} s] {text}", file=sys.stderr, flush=True)


# --- what is measured ---------------------------------------------------------------------------

KERNELS = ("measure", "write_slope")


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One shape with its tensors."""

    shape: Shape
    rounds: int
    rows: Tensor
    teacher: Tensor
    head: Tensor
    labels: Tensor
    counts: Tensor

    @classmethod
    def of(cls, shape: Shape, rounds: int) -> "Bench":
        """Logits of about 3; one slot of eight does not count."""
        torch.manual_seed(0)
        make = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        slots = (shape.blocks, SLOTS)
        return cls(
            shape=shape,
            rounds=rounds,
            rows=make(*slots, shape.hidden),
            teacher=make(*slots, shape.hidden),
            head=make(shape.vocab, shape.hidden).mul_(3 / shape.hidden**0.5),
            labels=torch.randint(shape.vocab, slots, device="cuda"),
            counts=torch.rand(slots, device="cuda") < 7 / 8,
        )

    def loss(
        self, name: str, *, chunk: int, blocks: int | None = None, plainly: bool = False
    ) -> HeadResult:
        part = slice(blocks)
        run = partial(head_loss_by, through_torch) if plainly else head_loss
        return run(
            self.rows[part],
            self.head,
            self.labels[part],
            self.counts[part],
            OBJECTIVES[name],
            chunk=chunk,
            teacher=self.teacher[part] if name == "kl" else None,
        )

    def whole(self, name: str) -> dict[str, float]:
        """`head_loss` of all blocks, and the memory it takes on top of its inputs."""
        figures = {}
        for chunk in CHUNKS:
            key = f"{self.shape}.{name}.chunk{chunk}"
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            figures[f"{key}.ms"] = self.median(partial(self.loss, name, chunk=chunk))
            figures[f"{key}.peak_gb"] = (torch.cuda.max_memory_allocated() - before) / 1e9
            say(f"{key} {figures[f'{key}.ms']:.1f} ms")
        return figures

    def parts(self, name: str) -> dict[str, float]:
        """One chunk, part by part, and the kernels' share of them."""
        chunk = Chunk.of(self, name)
        flop = 2 * chunk.logits.numel() * self.shape.hidden
        key = f"{self.shape}.{name}"
        forward = self.median(chunk.forward)
        backward = self.median(chunk.backward)
        figures = {
            f"{key}.matmul_forward.ms": forward,
            f"{key}.matmul_forward.tflops": flop * chunk.sides / forward / 1e9,
            f"{key}.matmul_backward.ms": backward,
            f"{key}.matmul_backward.tflops": flop / backward / 1e9,
        }
        for kernel in KERNELS:
            figures |= chunk.rate(f"{key}.{kernel}", kernel)
        ours = sum(figures[f"{key}.{kernel}.ms"] for kernel in KERNELS)
        figures[f"{key}.kernels_share"] = ours / (ours + forward + backward)
        return figures

    def sweep(self, name: str) -> dict[str, float]:
        chunk = Chunk.of(self, name)
        figures = {}
        for tile, stages in product(TILES, STAGES):
            with options(MEASURE=tile, STAGES=stages):
                key = f"sweep.{name}.measure.{tile.steps}x{tile.warps}x{stages}"
                figures |= chunk.rate(key, "measure")
        for tile in TILES:
            with options(SLOPE=tile):
                key = f"sweep.{name}.write_slope.{tile.steps}x{tile.warps}"
                figures |= chunk.rate(key, "write_slope")
        return figures

    def plain(self) -> dict[str, float]:
        """The same in plain PyTorch, a quarter of the blocks, and how far from it we are."""
        figures = {}
        for name in OBJECTIVES:
            key, blocks = f"{self.shape}.{name}", self.shape.blocks // 4
            run = partial(self.loss, name, chunk=128, blocks=blocks)
            plain = self.median(partial(run, plainly=True))
            figures[f"{key}.times_faster_than_torch"] = plain / self.median(run)
            ours, theirs = run().gradient.float(), run(plainly=True).gradient.float()
            figures[f"{key}.gradient_error"] = float((ours - theirs).norm() / theirs.norm())
            say(f"{key} torch {plain:.1f} ms for {blocks} blocks")
        return figures

    def median(self, action: Callable[[], object]) -> float:
        """Milliseconds on the device."""
        action()
        times = []
        for _ in range(self.rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            action()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Buffers of one chunk and what fills them; the parts may run in any order, any often."""

    bench: Bench
    logits: Tensor
    teacher: Tensor | None
    labels: Tensor
    weights: Tensor
    gradient: Tensor
    found: head_kernel.Statistics

    @classmethod
    def of(cls, bench: Bench, name: str) -> "Chunk":
        part = slice(PART)
        logits = logits_of(bench.rows, bench.head, logits_buffer(PART * SLOTS, bench.head), part)
        teacher = None
        if name == "kl":
            buffer = logits_buffer(PART * SLOTS, bench.head)
            teacher = logits_of(bench.teacher, bench.head, buffer, part)
        labels = bench.labels[part].flatten()
        return cls(
            bench=bench,
            logits=logits,
            teacher=teacher,
            labels=labels,
            weights=torch.ones(len(labels), device="cuda"),
            gradient=torch.empty_like(bench.rows[part].flatten(0, 1)),
            found=head_kernel.measure(logits, teacher, labels),
        )

    @property
    def sides(self) -> int:
        return 1 if self.teacher is None else 2

    def forward(self) -> None:
        logits_of(self.bench.rows, self.bench.head, self.logits, slice(PART))
        if self.teacher is not None:
            logits_of(self.bench.teacher, self.bench.head, self.teacher, slice(PART))

    def measure(self) -> None:
        head_kernel.measure(self.logits, self.teacher, self.labels)

    def write_slope(self) -> None:
        head_kernel.write_slope(self.logits, self.teacher, self.labels, self.weights, self.found)

    def backward(self) -> None:
        torch.mm(self.logits, self.bench.head, out=self.gradient)

    def rate(self, key: str, kernel: str) -> dict[str, float]:
        milliseconds = self.bench.median(getattr(self, kernel))
        passes = self.sides + (kernel == "write_slope")
        rate = passes * self.logits.numel() * self.logits.element_size() / milliseconds / 1e6
        say(f"{key} {milliseconds:.3f} ms, {rate:.0f} GB/s")
        return {f"{key}.ms": milliseconds, f"{key}.gb_s": rate}


@contextmanager
def options(**changes: object) -> Iterator[None]:
    """Options of the kernels, for a while."""
    before = {name: getattr(head_kernel, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(head_kernel, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(head_kernel, name, value)


def first(figures: dict[str, float], kernel: str) -> str:
    """The sizes that were quickest: steps x warps, and for `measure` x stages."""
    times = {key: ms for key, ms in figures.items() if f".{kernel}." in key and key.endswith(".ms")}
    return min(times, key=times.__getitem__).split(".")[-2]


if __name__ == "__main__":
    main()
