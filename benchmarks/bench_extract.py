"""Extraction on one GPU: the whole build beside the bare hooked forward of the same batches.

The target has the shapes of Qwen3.6-27B's text part and random weights; samples come from units
of all six default buckets, cut from a data set of realistic lengths.  Forward and build take
turns, so that both meet the same clocks; a build is timed from its first batch to its last commit.
"""

import shutil
import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Timing, add_out, end_on_sigterm, publish, result, spread, timed
from store_data import BUCKET_EDGES

from dflash_cache import ledger
from dflash_cache.buckets import UnitPlan, count_slots, plan_batches, plan_units
from dflash_cache.codec import plain_codec
from dflash_cache.config import BuildConfig
from dflash_cache.extraction import extract
from dflash_cache.layout import ALIGNMENT, CHUNK_TOKENS
from dflash_cache.plan import Plan
from dflash_cache.proofs import pad_right
from dflash_cache.samples import Sample, Samples
from dflash_cache.schema import FORMAT_VERSION, LAYER_CONVENTION, Identity, TargetSpec, UnitRecord
from dflash_cache.target import Target, default_layer_ids

BEGAN = time.perf_counter()
ENCODINGS = {"bf16": "", "fp8": "_fp8"}  # name -> ending of its figures
CORPUS = 20_000  # samples of the data set that units are cut from
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Shapes of a target and of its batches."""

    name: str
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    key_heads: int
    value_heads: int
    linear_dim: int
    rotary_sections: tuple[int, int, int]
    vocabulary: int
    shorter: int  # lengths, edges and budgets are divided by it


QWEN_27B = Sizes(
    name="Qwen3.6-27B text", hidden=5120, layers=64, intermediate=17_408, heads=24, kv_heads=4,
    head_dim=256, key_heads=16, value_heads=48, linear_dim=128, rotary_sections=(11, 11, 10),
    vocabulary=248_320, shorter=1,
)  # fmt: skip
TINY = Sizes(
    name="tiny", hidden=64, layers=8, intermediate=128, heads=4, kv_heads=2,
    head_dim=32, key_heads=2, value_heads=4, linear_dim=16, rotary_sections=(2, 1, 1),
    vocabulary=512, shorter=16,
)  # fmt: skip


def main() -> None:
    args = parse_args()
    end_on_sigterm()
    sizes = TINY if args.tiny else QWEN_27B
    device = torch.device(args.device)
    figures: dict[str, float] = {}
    if device.type == "cuda":
        figures |= measure_ceiling(args)
    target = random_target(sizes, args, device)
    with tempfile.TemporaryDirectory(prefix="bench_extract.", dir=args.folder) as folder:
        work = Work(target, sizes, args, Path(folder))
        figures |= work.padding()
        shape = {**shape_of(sizes, args, work), "device": device.type}

        def tell() -> None:
            publish(result("extract", shape, figures, folder=Path(folder)), args.out)

        warm_up(work)
        forwards = [work.forward()]
        for number in range(args.rounds):
            for encoding in args.encodings.split(","):
                found = work.build(encoding, str(number))
                forwards.append(work.forward())
                work.note(encoding, found, around=forwards[-2:])
                figures |= work.figures(forwards)
                tell()  # after every part: what was measured stays, should a later one fail


def parse_args() -> Namespace:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=400_000, help="tokens of a round, about")
    parser.add_argument("--rounds", type=int, default=1, help="of a build in every encoding")
    parser.add_argument("--encodings", default=",".join(ENCODINGS), help="comma-separated")
    parser.add_argument("--layers", type=int, help="layers of the target (default: its own)")
    parser.add_argument("--target-layers", type=int, default=5, help="how many are kept")
    parser.add_argument("--attention", default="sdpa", help="as transformers names it")
    parser.add_argument("--tiny", action="store_true", help="a tiny target and short samples")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="disk to write on")
    add_out(parser)
    return parser.parse_args()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f} s] {text}", file=sys.stderr, flush=True)


def measure_ceiling(args: Namespace) -> dict[str, float]:
    import bench_step

    return bench_step.measure_ceiling(args)


# --- the target -----------------------------------------------------------------------------------


def target_spec(sizes: Sizes, *, layers: int) -> TargetSpec:
    """What a cache says of the random target."""
    return TargetSpec(
        name=sizes.name,
        revision=None,
        model_type="qwen3_5_text",
        config_sha256="",
        weights_sha256="",
        dtype="bfloat16",
        num_layers=layers,
        hidden_size=sizes.hidden,
        vocab_size=sizes.vocabulary,
        tied_head=False,
        intermediate_size=sizes.intermediate,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        rope_theta=1e7,
        rms_norm_eps=1e-6,
        max_position_embeddings=262_144,
    )


def random_target(sizes: Sizes, args: Namespace, device: torch.device) -> Target:
    """Decoder layers up to the last one kept, made on the device; no head."""
    from transformers import Qwen3_5TextConfig, Qwen3_5TextModel

    layers = args.layers or sizes.layers
    config = Qwen3_5TextConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=max(default_layer_ids(layers, args.target_layers)) + 1,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        linear_num_key_heads=sizes.key_heads,
        linear_num_value_heads=sizes.value_heads,
        linear_key_head_dim=sizes.linear_dim,
        linear_value_head_dim=sizes.linear_dim,
        linear_conv_kernel_dim=4,
        max_position_embeddings=262_144,
        rms_norm_eps=1e-6,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": list(sizes.rotary_sections),
            "mrope_interleaved": True,
        },
    )
    config._attn_implementation = args.attention
    torch.manual_seed(SEED)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = Qwen3_5TextModel(config)
    finally:
        torch.set_default_dtype(before)
    for weight in model.parameters():
        if weight.dim() > 1:  # norms, gates and decays are as the library begins them
            torch.nn.init.normal_(weight, std=0.02)
    model.eval().requires_grad_(False)
    weights = sum(weight.numel() for weight in model.layers.parameters())
    say(f"{sizes.name}: {len(model.layers)} layers, {weights / 1e9:.2f} B weights in them")
    return Target(
        model=model,
        decoder=model,
        layers=model.layers,
        tokenizer=None,
        spec=target_spec(sizes, layers=layers),
        stop_ids=[],
        device=device,
    )


# --- the units ------------------------------------------------------------------------------------


def corpus_lengths(sizes: Sizes) -> list[int]:
    """Lengths of a data set of conversations: log-normal, a median of 900 tokens, 6% over 3,300."""
    rng = np.random.default_rng(SEED)
    lengths = np.exp(rng.normal(np.log(900), 0.85, CORPUS)).clip(200, 8000) / sizes.shorter
    return [int(length) for length in lengths]


def chosen_units(plans: list[UnitPlan], lengths: list[int], tokens: int) -> list[UnitPlan]:
    """Units from the middle of every bucket in turn, until there are so many tokens."""
    buckets: dict[int, list[UnitPlan]] = {}
    for plan in plans:
        buckets.setdefault(plan.bucket, []).append(plan)
    queues = [iter(own[len(own) // 2 :]) for own in buckets.values()]
    chosen: list[UnitPlan] = []
    while queues:
        for queue in list(queues):
            plan = next(queue, None)
            if plan is None:
                queues.remove(queue)
                continue
            chosen.append(plan)
            done = sum(lengths[member] for plan in chosen for member in plan.members)
            if done >= tokens and len(chosen) >= len(buckets):
                return sorted(chosen, key=lambda plan: plan.name)
    return sorted(chosen, key=lambda plan: plan.name)


class Work:
    """The units, and the two ways over them."""

    def __init__(self, target: Target, sizes: Sizes, args: Namespace, folder: Path) -> None:
        self.target, self.sizes, self.args, self.folder = target, sizes, args, folder
        self.edges = [max(2, edge // sizes.shorter) for edge in BUCKET_EDGES]
        self.unit_tokens = BuildConfig.unit_tokens // sizes.shorter
        self.batch_tokens = BuildConfig.batch_tokens // sizes.shorter
        self.layer_ids = default_layer_ids(args.layers or sizes.layers, args.target_layers)
        self.corpus = corpus_lengths(sizes)
        self.plans = plan_units(self.corpus, edges=self.edges, unit_tokens=self.unit_tokens)
        chosen = chosen_units(self.plans, self.corpus, args.tokens)
        rng = np.random.default_rng(SEED)
        self.samples: list[Sample] = []
        self.units: list[UnitPlan] = []
        for number, plan in enumerate(chosen):
            members = range(len(self.samples), len(self.samples) + len(plan.members))
            name = ledger.unit_name(number)
            self.units.append(UnitPlan(name=name, bucket=plan.bucket, members=tuple(members)))
            self.samples += [
                random_sample(number, self.corpus[member], sizes, rng)
                for number, member in zip(members, plan.members, strict=True)
            ]
        self.lengths = [sample.length for sample in self.samples]
        self.tokens = sum(self.lengths)
        self.batches = [batch for unit in self.units for batch in self.batches_of(unit)]
        self.built: dict[str, list[dict[str, float]]] = {}

    def batches_of(self, unit: UnitPlan) -> list[torch.Tensor]:
        """The padded ids of a unit's batches, as the build makes them."""
        own = [self.samples[member] for member in unit.members]
        lengths = [sample.length for sample in own]
        return [
            pad_right([torch.from_numpy(own[row].input_ids).long() for row in rows])
            for rows in plan_batches(lengths, batch_tokens=self.batch_tokens)
        ]

    def padding(self) -> dict[str, float]:
        """Shares of slots that are padding: in these units, and in those of the whole data set."""
        whole = 0
        for plan in self.plans:
            lengths = [self.corpus[member] for member in plan.members]
            whole += count_slots(lengths, plan_batches(lengths, batch_tokens=self.batch_tokens))
        slots = sum(batch.numel() for batch in self.batches)
        say(f"{self.tokens:,} tokens in {len(self.units)} units, {len(self.batches)} batches of "
            f"{min(b.numel() for b in self.batches):,} to "
            f"{max(b.numel() for b in self.batches):,} slots")  # fmt: skip
        return {
            "padding_share": 1 - self.tokens / slots,
            "padding_share_of_all_units": 1 - sum(self.corpus) / whole,
        }

    def forward(self) -> float:
        """Tokens per second of the hooked forward alone, its states dropped."""

        def run() -> None:
            for ids in self.batches:
                self.target.hidden_states(ids, self.layer_ids)
            self.synchronize()

        self.synchronize()
        rate = self.tokens / timed(run).seconds
        say(f"forward   {rate:9,.0f} tokens/s")
        return rate

    def build(self, encoding: str, name: str, *, units: list[UnitPlan] | None = None) -> "Built":
        """Extract the units to a folder that is removed again.

        A worker reads its first units back once; here that is done in the warm-up.
        """
        root = self.folder / f"{encoding}.{name}"
        identity = self.identity(encoding)
        plan = Plan(
            identity=identity,
            units=self.units,
            samples=Samples(samples=self.samples, rows=len(self.samples), skipped={}),
            bytes_per_token=0,
            bytes=0,
            frozen_bytes=0,
            free_bytes=0,
        )
        config = BuildConfig(
            target="",
            data="",
            out=root,
            encoding=encoding,
            batch_tokens=self.batch_tokens,
            no_proof=() if units else ("probe",),
        )
        ledger.begin(root, identity, {})
        self.synchronize()
        waits = Waits(units or self.units)
        taken = timed(
            lambda: extract(self.target, plan, waits, config, plain_codec(identity), Quiet())
        )
        records = ledger.committed_units(root, fingerprint=identity.fingerprint)
        assert len(records) == len(units or self.units), len(records)
        found = Built(timing=taken, records=list(records.values()))
        shutil.rmtree(root)
        rate = found.tokens / taken.seconds
        say(f"build {encoding:4}{rate:9,.0f} tokens/s, {found.gb_per_s:.2f} GB/s, "
            f"{taken.cpu_seconds / taken.seconds:.2f} cores, {waits.last:.2f} s after the last "
            "batch")  # fmt: skip
        return found

    def note(self, encoding: str, found: "Built", *, around: list[float]) -> None:
        """Keep a build's figures, beside the forwards before and after it."""
        rate, end = found.tokens / found.timing.seconds, ENCODINGS[encoding]
        for key, value in {
            f"build_tokens_per_s{end}": rate,
            f"build_over_forward{end}": rate / statistics.mean(around),
            f"gb_per_s_written{end}": found.gb_per_s,
            f"build_cores{end}": found.timing.cpu_seconds / found.timing.seconds,
        }.items():
            self.built.setdefault(key, []).append(value)

    def figures(self, forwards: list[float]) -> dict[str, float]:
        flop = 2 * sum(weight.numel() for weight in self.target.layers.parameters()) / 1e12
        found = spread("forward_tokens_per_s", forwards)
        found["forward_tflops"] = statistics.median(forwards) * flop
        for key, values in self.built.items():
            found |= spread(key, values) if len(values) > 1 else {key: values[0]}
        return found

    def identity(self, encoding: str) -> Identity:
        return Identity(
            format_version=FORMAT_VERSION,
            target=self.target.spec.to_dict(),
            tokenizer={},
            data_sha256="",
            samples=len(self.samples),
            tokens=self.tokens,
            target_layer_ids=self.layer_ids,
            layer_convention=LAYER_CONVENTION,
            final_hidden=None,
            hidden_size=self.sizes.hidden,
            encoding=encoding,
            chunk_tokens=CHUNK_TOKENS,
            alignment=ALIGNMENT,
            bucket_edges=self.edges,
            unit_tokens=self.unit_tokens,
        )

    def synchronize(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)


def random_sample(number: int, length: int, sizes: Sizes, rng: np.random.Generator) -> Sample:
    ids = rng.integers(0, sizes.vocabulary, length, dtype=np.int32)
    return Sample(
        sample_id=number, input_ids=ids, loss_mask=np.ones(length, np.bool_), group=str(number)
    )


@dataclass(frozen=True, kw_only=True)
class Built:
    """What a build took, and what it left."""

    timing: Timing
    records: list[UnitRecord]

    @property
    def tokens(self) -> int:
        return sum(sum(record.lengths) for record in self.records)

    @property
    def gb_per_s(self) -> float:
        return sum(record.bytes for record in self.records) / 1e9 / self.timing.seconds


class Quiet:
    """A progress that nobody looks at."""

    def update(self, tokens: int) -> None: ...

    def wrote(self, count: int) -> None: ...

    def committed(self, unit: UnitPlan) -> None: ...


class Waits:
    """Units, and how long it took from when the last one was handed on to the end."""

    def __init__(self, units: list[UnitPlan]) -> None:
        self.units, self.ended = units, 0.0

    def __iter__(self) -> Iterator[UnitPlan]:
        yield from self.units
        self.ended = time.perf_counter()

    @property
    def last(self) -> float:
        return time.perf_counter() - self.ended


def warm_up(work: Work) -> None:
    """Every batch once, and a build of the smallest unit in every encoding.

    Kernels of linear attention are tuned for every number of rows that they meet.
    """
    for unit in work.units:
        batches = work.batches_of(unit)
        seconds = timed(lambda own=batches: [run_once(work, ids) for ids in own]).seconds  # type: ignore[misc]
        say(f"bucket {unit.bucket}: {len(batches)} batches in {seconds:.1f} s at first")
    smallest = min(work.units, key=lambda unit: sum(work.lengths[m] for m in unit.members))
    for encoding in work.args.encodings.split(","):
        work.build(encoding, "warm", units=[smallest])


def run_once(work: Work, ids: torch.Tensor) -> None:
    work.target.hidden_states(ids, work.layer_ids)
    work.synchronize()


def shape_of(sizes: Sizes, args: Namespace, work: Work) -> dict[str, Any]:
    return {
        "target": sizes.name,
        "layers_run": len(work.target.layers),
        "target_layers": work.layer_ids,
        "hidden": sizes.hidden,
        "tokens": work.tokens,
        "samples": len(work.samples),
        "units": len(work.units),
        "batches": len(work.batches),
        "batch_tokens": work.batch_tokens,
        "unit_tokens": work.unit_tokens,
        "rounds": args.rounds,
        "attention": args.attention,
        "flash_linear_attention": installed("flash-linear-attention"),
        "causal_conv1d": installed("causal-conv1d"),
        "transformers": version("transformers"),
    }


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "no"


if __name__ == "__main__":
    main()
