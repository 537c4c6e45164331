"""Products in fp8 against bf16: alone, in the captured step, and on the loss of a real drafter.

products: the shapes of the 27B drafter, random data, held for a while; TFLOP/s of the product
          alone (rowwise and tensorwise scales, fast and exact sums) and with rounding its operands.
step:     the captured step at T 49,152 and A 2,048, by recipe; how far its gradient is from bf16's.
curves:   drafters of one cache, with the same packs, anchors and first weights, by recipe; bf16
          with other first weights shows how much chance does.  This part runs on a CPU as well.

M rows, K what a projection sums over, N its outputs; Q slots of a chunk, V vocabulary.
"""

import json
import statistics
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fp8
import torch
from bench_step import profile, say, seconds_of
from common import add_out, publish, result, spread
from fp8 import Head8, Recipe, Rounded, over_rows, product, rounded, train_in_fp8
from step_data import DEVICE, QWEN_27B, Setup, random_batch
from torch import Tensor
from torch.nn import functional as F

from dflash_fit import loop, prepare
from dflash_fit import step as training_step
from dflash_fit.backends import sight_maker
from dflash_fit.config import FitConfig
from dflash_fit.graph import GraphStep, compiled
from dflash_fit.loss import HeadResult, Objective, normaliser, slot_weights
from dflash_fit.step import Pieces

PARTS = ("products", "step", "curves")
FORWARD = Recipe(forward=True, input_gradient=False, weight_gradient=False)
LAYERS = Recipe(forward=True, input_gradient=True, weight_gradient=False)
LAYERS_FAST = Recipe(forward=True, input_gradient=True, weight_gradient=False, fast_gradients=True)
ALL = Recipe(forward=True, input_gradient=True, weight_gradient=True)
EVERY_PROJECTION = (*fp8.PROJECTIONS, "k_proj", "v_proj")


@dataclass(frozen=True, kw_only=True)
class Way:
    """What is fp8 in a step, and what a run of it starts from."""

    recipe: Recipe | None = None
    projections: tuple[str, ...] = fp8.PROJECTIONS
    head: bool = False
    precision: str = "bf16"
    captured: bool = True
    weights_seed: int = 0


STEP_WAYS = {
    "bf16": Way(),
    "layers": Way(recipe=LAYERS),
    "layers_head": Way(recipe=LAYERS, head=True),
    "all": Way(recipe=ALL, head=True),
    "layers_fast_gradients": Way(recipe=LAYERS_FAST),
    "layers_and_keys_values": Way(recipe=LAYERS, projections=EVERY_PROJECTION),
    "head": Way(head=True),
    "forward": Way(recipe=FORWARD),
}
CURVE_WAYS = {
    "bf16": Way(),
    "fp32": Way(precision="fp32", captured=False),
    "bf16_other_weights": Way(weights_seed=1),
    "bf16_third_weights": Way(weights_seed=2),
    "layers": Way(recipe=LAYERS),
    "layers_head": Way(recipe=LAYERS, head=True),
    "all": Way(recipe=ALL, head=True),
    "layers_and_keys_values": Way(recipe=LAYERS, projections=EVERY_PROJECTION),
}


def main() -> None:
    args = parse_args()
    # Every recipe is another specialisation of the same few functions.
    torch._dynamo.config.recompile_limit = 64
    figures: dict[str, float] = {}
    for part in args.parts.split(","):
        say(f"--- {part}")
        figures |= MEASURE[part](args)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    shape = {name: value for name, value in vars(args).items() if name not in ("out", "cache")}
    publish(result("fp8", shape, figures), args.out)


def parse_args() -> Namespace:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    parser.add_argument("--ways", default="", help="of step and curves, comma-separated (all)")
    parser.add_argument("--repeats", type=int, default=7, help="steps timed")
    parser.add_argument("--profile", action="store_true", help="kernels of each step, on stderr")
    curves = parser.add_argument_group("curves")
    curves.add_argument("--cache", type=Path, help="a real cache, as the quickstart builds it")
    curves.add_argument("--device", default="auto")
    curves.add_argument("--steps", type=int, default=300)
    curves.add_argument("--layers", type=int, default=5)
    curves.add_argument("--block-size", type=int, default=8)
    curves.add_argument("--tokens", type=int, default=4096)
    curves.add_argument("--anchors", type=int, default=512)
    curves.add_argument("--lr", type=float, default=1e-3)
    curves.add_argument("--held-out", type=float, default=0.1)
    curves.add_argument("--eval-tokens", type=int, default=20_000)
    add_out(parser)
    args = parser.parse_args()
    if "curves" in args.parts and args.cache is None:
        parser.error("curves needs --cache; see examples/quickstart/run.py for how to build one")
    return args


def chosen(ways: dict[str, Way], args: Namespace) -> dict[str, Way]:
    names = args.ways.split(",") if args.ways else list(ways)
    return {name: ways[name] for name in names if name in ways}


def attempt(name: str, action: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Nothing where torch says that it cannot; what it said goes to stderr."""
    try:
        return action()
    except RuntimeError as error:
        say(f"{name}: {str(error).strip()[:300]}")
        return {}


# --- products -----------------------------------------------------------------------------------

ROWS, CHUNK_SLOTS = 2048 * 16, 256 * 15
PROJECTION_SHAPES = [(5120, 4096), (5120, 1024), (4096, 5120), (5120, 17408), (17408, 5120)]


def measure_products(args: Namespace) -> dict[str, float]:
    figures: dict[str, float] = {}
    for inputs, outputs in PROJECTION_SHAPES:
        name = f"{ROWS}x{inputs}x{outputs}"
        x, weight, slope = (
            normal(*s) for s in ((ROWS, inputs), (outputs, inputs), (ROWS, outputs))
        )
        pairs = {
            "forward": (x, weight.T, for_forward, x, weight),
            "input_gradient": (slope, weight, for_input_gradient, slope, weight),
            "weight_gradient": (slope.T, x, for_weight_gradient, slope, x),
        }
        for what, pair in pairs.items():
            key = f"{name}.{what}"
            figures |= attempt(key, partial(measure_pair, key, *pair))
        del x, weight, slope, pairs
    figures |= measure_head()
    return figures


def normal(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.bfloat16, device=DEVICE)


def held(action: Callable[[], object], *, seconds: float = 0.25) -> float:
    """Median seconds of a call in the second half of a while of them."""
    once = min(seconds_of(action, 3))
    repeats = max(6, int(seconds / once))
    return statistics.median(seconds_of(action, repeats)[repeats // 2 :])


def for_forward(x: Tensor, weight: Tensor) -> tuple[Rounded, Rounded]:
    return rounded(x), rounded(weight)


def for_input_gradient(slope: Tensor, weight: Tensor) -> tuple[Rounded, Rounded]:
    return rounded(slope), rounded(weight.T)


def for_weight_gradient(slope: Tensor, x: Tensor) -> tuple[Rounded, Rounded]:
    return over_rows(slope), over_rows(x)


def measure_pair(
    key: str, a: Tensor, b: Tensor, rounding: Callable[..., tuple[Rounded, Rounded]], *pair: Tensor
) -> dict[str, float]:
    """a @ b in bf16 and fp8; `rounding` makes its operands of the pair."""
    flop = 2 * a.shape[0] * a.shape[1] * b.shape[1] / 1e12
    fast = torch.compile(rounding, fullgraph=True, dynamic=False)
    seconds = {"bf16": held(lambda: a @ b), "rounding": held(lambda: fast(*pair))}
    return told(key, seconds | fp8_seconds(*fast(*pair)), flop)


def fp8_seconds(a: Rounded, b: Rounded) -> dict[str, float]:
    one = torch.ones((), device=DEVICE)
    bf16 = torch.bfloat16

    def tensorwise(fast: bool) -> Tensor:
        return torch._scaled_mm(a.data, b.data.T, one, one, out_dtype=bf16, use_fast_accum=fast)

    return {
        "rowwise_fast": held(lambda: product(a, b, dtype=bf16, fast=True)),
        "rowwise_exact": held(lambda: product(a, b, dtype=bf16, fast=False)),
        "tensorwise_fast": held(lambda: tensorwise(True)),
        "tensorwise_exact": held(lambda: tensorwise(False)),
    }


def told(key: str, seconds: dict[str, float], flop: float) -> dict[str, float]:
    """TFLOP/s of each product, and how many times faster fp8 is, rounding included."""
    rounding = seconds.pop("rounding")
    figures = {f"{key}.{name}_tflops": flop / value for name, value in seconds.items()}
    figures[f"{key}.rounding_ms"] = rounding * 1e3
    for sums in ("fast", "exact"):
        whole = seconds[f"rowwise_{sums}"] + rounding
        figures[f"{key}.times_faster_{sums}"] = seconds["bf16"] / whole
    rates = ", ".join(f"{name} {flop / value:.0f}" for name, value in seconds.items())
    say(
        f"{key}: TFLOP/s {rates}; rounding {rounding * 1e3:.2f} ms; with it "
        f"{figures[f'{key}.times_faster_fast']:.2f} (fast), "
        f"{figures[f'{key}.times_faster_exact']:.2f} (exact) times faster"
    )
    return figures


def measure_head() -> dict[str, float]:
    """Both products of a chunk, and the rounding of slopes beside the pass that it replaces."""
    head = normal(QWEN_27B.vocabulary, QWEN_27B.hidden) * 0.02
    head8 = Head8.of(head)
    rows = normal(CHUNK_SLOTS, QWEN_27B.hidden)
    labels = torch.randint(len(head), (CHUNK_SLOTS,), device=DEVICE)
    weights = torch.rand(CHUNK_SLOTS, device=DEVICE)
    logits = rows @ head.T
    flop = 2 * CHUNK_SLOTS * head.numel() / 1e12
    figures: dict[str, float] = {}

    def logits_seconds() -> dict[str, float]:
        rounding = torch.compile(rounded, fullgraph=True, dynamic=False)
        seconds = {"bf16": held(lambda: torch.mm(rows, head.T, out=logits))}
        seconds |= {"rounding": held(lambda: rounding(rows))}
        return told("head.logits", seconds | fp8_seconds(rounding(rows), head8.over_hidden), flop)

    def gradient_seconds() -> dict[str, float]:
        found = statistics_of(logits, labels)
        slope = partial(SLOPE_OF, logits, labels, weights, *found, vocab=len(head))
        seconds = {"bf16": held(lambda: logits @ head), "rounding": held(slope)}
        others = slope().others
        seconds |= fp8_seconds(others, head8.over_vocab)
        figures = told("head.gradient", seconds, flop)
        out = torch.empty_like(rows)
        with_label = held(lambda: head8.gradient(slope(), labels, out=out))
        return {**figures, "head.gradient.whole_ms": with_label * 1e3, **replaced()}

    def replaced() -> dict[str, float]:
        from dflash_fit import head_kernel

        stats = head_kernel.measure(logits, None, labels)
        taken = held(lambda: head_kernel.write_slope(logits, None, labels, weights, stats))
        say(f"head: the pass that writes slopes in bf16 {taken * 1e3:.2f} ms")
        return {"head.write_slope_bf16_ms": taken * 1e3}

    figures |= attempt("head.logits", logits_seconds)
    figures |= attempt("head.gradient", gradient_seconds)
    return figures


# --- the head's loop in fp8 ---------------------------------------------------------------------

SLOPE_OF = torch.compile(fp8.slope_of, fullgraph=True, dynamic=False)
ROUNDED = torch.compile(rounded, fullgraph=True, dynamic=False)


def statistics_of(logits_QV: Tensor, labels_Q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cross-entropy, whether the label is the argmax, peak and mass of each row."""
    if logits_QV.is_cuda:
        from dflash_fit import head_kernel

        found = head_kernel.measure(logits_QV, None, labels_Q)
        return found.cross_entropy, found.correct, found.peak, found.mass
    logits = logits_QV.float()
    peak = logits.amax(dim=1)
    mass = torch.exp(logits - peak[:, None]).sum(dim=1)
    at_label = logits.gather(1, labels_Q[:, None])[:, 0]
    correct = logits.argmax(dim=1) == labels_Q
    return torch.log(mass) + peak - at_label, correct, peak, mass


@torch.no_grad()
def head_loss8(
    head8: Head8,
    rows: Tensor,
    head: Tensor,
    labels: Tensor,
    counts: Tensor,
    objective: Objective,
    *,
    chunk: int,
    teacher: Tensor | None = None,
) -> HeadResult:
    """`loss.head_loss` for "ce", with both products in fp8."""
    assert teacher is None
    slope_of, round_rows = (SLOPE_OF, ROUNDED) if rows.is_cuda else (fp8.slope_of, rounded)
    slots = labels.shape[1]
    losses, weights = (torch.empty_like(labels, dtype=torch.float32) for _ in range(2))
    correct = torch.empty_like(labels, dtype=torch.bool)
    gradient = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    data, scale = round_rows(rows.reshape(-1, rows.shape[2]))
    buffer = rows.new_empty(min(chunk, len(rows)) * slots, head8.width)
    for begin in range(0, len(rows), chunk):
        part = slice(begin, begin + chunk)
        of_part = slice(begin * slots, (begin + chunk) * slots)
        labels_Q = labels[part].flatten()
        asked = Rounded(data[of_part], scale[of_part])
        logits_QW = head8.logits(asked, out=buffer[: len(labels_Q)])
        found = statistics_of(logits_QW[:, : len(head)], labels_Q)
        weights_Q = slot_weights(objective, counts[part], found[0])
        slope = slope_of(logits_QW, labels_Q, weights_Q, *found, vocab=len(head))
        head8.gradient(slope, labels_Q, out=gradient[part].view(-1, rows.shape[2]))
        losses[part] = found[0].view(counts[part].shape)
        weights[part] = weights_Q.view(counts[part].shape)
        correct[part] = found[1].view(counts[part].shape)
    losses = torch.where(counts, losses, 0.0)
    return HeadResult(
        total=(losses * weights).sum(),
        weight=normaliser(objective, counts),
        losses=losses,
        correct=correct,
        gradient=gradient,
    )


@contextmanager
def with_head8() -> Iterator[None]:
    """Steps take their head in fp8; it is rounded when it is first seen."""
    heads: dict[int, Head8] = {}

    def head_loss(rows: Tensor, head: Tensor, *rest: Any, **options: Any) -> HeadResult:
        if head.data_ptr() not in heads:
            heads[head.data_ptr()] = Head8.of(head)
        return head_loss8(heads[head.data_ptr()], rows, head, *rest, **options)

    with patch.object(training_step, "head_loss", head_loss):
        yield


# --- the step -----------------------------------------------------------------------------------


def measure_step(args: Namespace) -> dict[str, float]:
    setup = Setup(QWEN_27B)
    shape = QWEN_27B.shape(tokens=49_152, anchors=2048)
    batch = random_batch(shape, documents=30, vocabulary=QWEN_27B.vocabulary)
    pieces = compiled(Pieces(sight=sight_maker("auto", DEVICE)))
    figures: dict[str, float] = {}
    exact: list[Tensor] = []

    def one(name: str, way: Way) -> dict[str, float]:
        torch.cuda.reset_peak_memory_stats()
        step = GraphStep(setup.trainer(shape, pieces))
        capture = step.capture(batch)
        # No learning: every way sees the same weights.
        seconds = seconds_of(lambda: step(batch, lr=0), 1 + args.repeats)[1:]
        found = spread(f"step_ms.{name}", [s * 1e3 for s in seconds])
        gradients = [p.grad.clone() for p in setup.optimizer.parameters]
        if name == "bf16":
            exact.extend(gradients)
        if exact:
            found[f"gradient_error.{name}"] = difference(gradients, exact)
        found[f"memory_gb.{name}"] = torch.cuda.max_memory_reserved() / 1e9
        say(
            f"{name}: {found[f'step_ms.{name}']:.1f} ms, captured in {capture.seconds:.1f} s, "
            + ", ".join(f"{k.partition('.')[0]} {v:.4g}" for k, v in list(found.items())[3:])
        )
        if args.profile:
            profile(step, batch)
        return found

    for name, way in chosen(STEP_WAYS, args).items():
        use(setup.drafter, way)
        with with_head8() if way.head else nullcontext():
            figures |= attempt(name, partial(one, name, way))
        setup.optimizer.begin()
        torch.cuda.empty_cache()
    bf16 = figures.get("step_ms.bf16")
    if bf16:
        figures |= {
            f"times_faster.{name}": bf16 / figures[f"step_ms.{name}"]
            for name in STEP_WAYS
            if f"step_ms.{name}" in figures
        }
    return figures


def use(drafter: torch.nn.Module, way: Way) -> None:
    """Projections as the way wants them; those of the last way become plain again."""
    for module in drafter.modules():
        if isinstance(module, fp8.Linear8):
            module.__class__ = torch.nn.Linear
    if way.recipe is not None:
        train_in_fp8(drafter.layers, way.recipe, projections=way.projections)


def difference(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Norm of the difference of all gradients, in parts of the norm of what was wanted."""
    norms = [torch.linalg.vector_norm(w.float()) for w in wanted]
    gaps = [
        torch.linalg.vector_norm(f.float() - w.float()) for f, w in zip(found, wanted, strict=True)
    ]
    return float(torch.stack(gaps).norm() / torch.stack(norms).norm())


# --- loss curves --------------------------------------------------------------------------------

LAST = 50  # steps whose mean loss counts
SMOOTH = 20  # steps of the running mean


@dataclass(frozen=True, kw_only=True)
class Curve:
    losses: Tensor  # per step
    # Of held-out samples in the end, offline, and not in fp8 whatever it was trained in.
    acceptance: float
    accuracy: float  # of all slots
    skipped: int
    seconds: float  # of a step in the end, reading and logging included

    @property
    def last(self) -> float:
        return float(self.losses[-LAST:].mean())

    @property
    def smooth(self) -> Tensor:
        size = min(SMOOTH, len(self.losses))
        return F.avg_pool1d(self.losses[None, None], size, stride=1)[0, 0]


def measure_curves(args: Namespace) -> dict[str, float]:
    curves: dict[str, Curve] = {}
    figures: dict[str, float] = {}
    for name, way in chosen(CURVE_WAYS, args).items():
        curves[name] = curve = train(way, args)
        figures |= {
            f"loss_last_{LAST}.{name}": curve.last,
            f"acceptance_length.{name}": curve.acceptance,
            f"slot_accuracy.{name}": curve.accuracy,
            f"skipped_updates.{name}": curve.skipped,
        }
        against = curves.get("bf16", curve)
        apart = (curve.smooth - against.smooth) / against.smooth
        figures[f"smoothed_apart_at_most.{name}"] = float(apart.abs().max())
        figures[f"last_apart.{name}"] = curve.last / against.last - 1
        say(
            f"{name}: loss of the last {LAST} steps {curve.last:.4f} "
            f"({figures[f'last_apart.{name}']:+.3%} of bf16), smoothed curve at most "
            f"{figures[f'smoothed_apart_at_most.{name}']:.3%} from bf16's, held-out acceptance "
            f"{curve.acceptance:.3f}, accuracy {curve.accuracy:.4f}, {curve.skipped} updates "
            f"skipped, {curve.seconds * 1e3:.1f} ms a step"
        )
        every = max(1, len(curve.smooth) // 8)
        say(f"  every {every} steps: " + " ".join(f"{x:.3f}" for x in curve.smooth[::every]))
    return figures


def train(way: Way, args: Namespace) -> Curve:
    """A run of the product, but for how it multiplies."""
    make = prepare.new_drafter

    def new_drafter(*rest: Any, seed: int, **options: Any) -> Any:
        drafter = make(*rest, seed=seed + 1000 * way.weights_seed, **options)
        use(drafter, way)
        return drafter

    with tempfile.TemporaryDirectory() as folder:
        config = fit_config(way, args, out=Path(folder) / "run")
        with (
            patch.object(prepare, "new_drafter", new_drafter),
            with_head8() if way.head else nullcontext(),
        ):
            summary = loop.fit(config)
        if not summary["finished"]:
            raise SystemExit("stopped by a signal, which a run takes as a wish to be saved")
        lines = (config.out / "metrics.jsonl").read_text().splitlines()
    read = [json.loads(line) for line in lines]
    trained = [line for line in read if line["kind"] == "train"]
    end = [line for line in read if line["kind"] == "eval"][-1]
    return Curve(
        losses=torch.tensor([line["loss"] for line in trained]),
        acceptance=end["acceptance_length"],
        accuracy=statistics.mean(end["slot_accuracy"]),
        skipped=summary["skipped_updates"],
        seconds=statistics.median(x["tokens"] / x["tokens_per_s"] for x in trained[-LAST:]),
    )


def fit_config(way: Way, args: Namespace, *, out: Path) -> FitConfig:
    """The quickstart's options where nothing else is said; every step is logged."""
    step = "graph" if way.captured and torch.cuda.is_available() else "eager"
    said = {
        "cache": str(args.cache),
        "out": out,
        "num_layers": args.layers,
        "block_size": args.block_size,
        "token_budget": args.tokens,
        "anchors": args.anchors,
        "anchor_microbatch": args.anchors,
        "loss_chunk": min(args.anchors, 256),
        "epochs": 1000,
        "max_steps": args.steps,
        "lr": args.lr,
        "beta2": 0.95,
        "held_out": args.held_out,
        "eval_every": args.steps,
        "eval_tokens": args.eval_tokens,
        "checkpoint_every": args.steps,
        "log_every": 1,
        "precision": way.precision,
        "step": step,
        "devices": args.device,
    }
    assert set(said) <= {field.name for field in fields(FitConfig)}
    return FitConfig(**said)


MEASURE: dict[str, Callable[[Namespace], dict[str, float]]] = {
    "products": measure_products,
    "step": measure_step,
    "curves": measure_curves,
}

if __name__ == "__main__":
    main()
