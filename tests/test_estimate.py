"""What a run is said to take, against what it takes: counted, allocated, or measured on an H200."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import library
from torch.utils.flop_counter import FlopCounterMode

from dflash_fit import estimate as estimates
from dflash_fit import staging
from dflash_fit.attention import DenseSight
from dflash_fit.batch import Batch, BatchShape
from dflash_fit.drafter import FULL, DFlashDraftModel, DrafterConfig
from dflash_fit.estimate import EFFICIENCY, estimate, savings, smaller, speed_of, tell, too_large
from dflash_fit.gradients import Gradients, ReducedGradients, ScatteredGradients
from dflash_fit.graph import compiled
from dflash_fit.loss import Objective
from dflash_fit.memory import (
    batches,
    context,
    copies,
    frozen,
    head_chunk,
    host_of,
    masters_and_moments,
    measuring_at_work,
    memory_of,
    pinned_of,
    reduce_buffers,
    row_bytes,
    sums,
)
from dflash_fit.metrics import StepMetrics
from dflash_fit.offline import slots_right
from dflash_fit.optim import AdamWConfig, FlatAdamW
from dflash_fit.parts import part_of
from dflash_fit.step import Frozen, Pieces, StepConfig, accumulate
from dflash_fit.work import Work, parameters_of, useful_flop, useful_flop_of

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
CPU = torch.device("cpu")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def drafter_config(**changes) -> DrafterConfig:
    values = {
        "hidden_size": 64,
        "intermediate_size": 208,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 500,
        "num_target_layers": 12,
        "target_layer_ids": (1, 4, 7, 10),
        "block_size": 8,
        "mask_token_id": 499,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "layer_types": (FULL,) * changes.get("num_hidden_layers", 3),
        "sliding_window": None,
    }
    return DrafterConfig(**{**values, **changes})


def work_of(drafter: DrafterConfig, *, tokens: int, anchors: int, **changes) -> Work:
    shape = BatchShape(
        target_layers=len(drafter.target_layer_ids),
        token_budget=tokens,
        hidden_size=drafter.hidden_size,
        anchors=anchors,
        block_size=drafter.block_size,
    )
    values = {
        "drafter": drafter,
        "shape": shape,
        "steps": 100,
        "packs_per_step": 1,
        "passes_per_pack": 1,
        "ranks": 1,
        "packs_per_epoch": 10,
        "tokens_per_epoch": 9 * tokens,
        "anchors_per_pack": float(anchors),
        "state_bytes_per_token": 2.0 * drafter.hidden_size,
        "anchor_microbatch": anchors,
        "loss_chunk": 256,
        "precision": "bf16",
        "reduce": "bf16",
        "sharded": False,
        "captured": True,
        "attention": "block",
        "tied": False,
        "device_type": "cuda",
    }
    return Work(**{**values, **changes})


SMALL = work_of(drafter_config(), tokens=256, anchors=16)

# The shapes of benchmarks/step_data.py.
MODELS = {
    "27b": drafter_config(
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=248_320,
        target_layer_ids=(0, 1, 2, 3, 4),
        block_size=16,
    ),
    "4b": drafter_config(
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        target_layer_ids=(0, 1, 2, 3, 4),
        block_size=16,
    ),
}


def figures(name: str) -> dict[str, float]:
    return json.loads((RESULTS / name).read_text())["figures"]


# --- parameters and matrix products ---------------------------------------------------------------


@pytest.mark.parametrize("drafter", [drafter_config(), *MODELS.values()])
def test_parameters_are_those_of_the_drafter(drafter):
    with torch.device("meta"):
        made = DFlashDraftModel(drafter)
    assert parameters_of(drafter) == sum(p.numel() for p in made.parameters())


class NoProducts:
    """Passes gradients to all five tensors as attention does, without a matrix product."""

    def attend(self, query, context, own):
        rest = sum(tensor.mean(dtype=torch.float32) for tensor in (*context, *own))
        return query + rest.to(query.dtype)


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_useful_flop_are_those_of_a_step_and_the_anchors_own_slots(loss):
    drafter = drafter_config()
    work = work_of(drafter, tokens=64, anchors=8, anchor_microbatch=4, loss_chunk=3)
    work = replace(work, shape=replace(work.shape, final_hidden=loss == "kl"))
    step = Step(work, NoProducts, loss=loss)
    with FlopCounterMode(display=False) as counter:
        step.run()
    h = drafter.hidden_size
    q = drafter.num_attention_heads * drafter.head_dim
    finish = q * h + 3 * h * drafter.intermediate_size
    unseen = 3 * 2 * work.shape.anchors * finish  # behind the last layer's attention
    assert counter.get_total_flops() + unseen == useful_flop_of(work)


def test_useful_flop_are_counted_as_in_the_benchmark():
    found = figures("step-h200.json")
    for anchors in (2048, 8192):
        measured = found[f"tflops_A{anchors}"] * 1e12 * found[f"step_ms_A{anchors}"] / 1e3
        counted = useful_flop(MODELS["27b"], tokens=49_152, anchors=anchors)
        assert counted == pytest.approx(measured, rel=1e-3)


# --- memory ---------------------------------------------------------------------------------------


class Step:
    """The body of a step of a piece of work, on the CPU."""

    def __init__(self, work: Work, sight=None, *, loss: str = "ce"):
        self.work, dtype = work, DTYPES[work.precision]
        self.drafter = DFlashDraftModel(work.drafter)
        self.drafter.initialize(torch.Generator().manual_seed(0))
        config = AdamWConfig(beta1=0.9, beta2=0.999, weight_decay=0.0, clip=1.0)
        self.optimizer = FlatAdamW(self.drafter, config, dtype=dtype)
        self.pieces = Pieces(sight=(lambda *_: sight()) if sight else DenseSight.of)
        table = torch.randn(work.drafter.vocab_size, work.drafter.hidden_size).to(dtype)
        self.frozen = Frozen(embedding=table, head=table if work.tied else table.clone())
        self.batch = full_batch(work.shape)
        self.config = StepConfig(
            shape=work.shape,
            objective=Objective(divergence=loss, slot_weights="decay", gamma=4.0),
            anchor_microbatch=work.anchor_microbatch,
            loss_chunk=work.loss_chunk,
        )
        self.metrics = StepMetrics.zeros(work.drafter.block_size, device=CPU)

    def run(self) -> None:
        accumulate(self.drafter, self.frozen, self.batch, self.config, self.metrics, self.pieces)
        self.optimizer.begin()


def full_batch(shape: BatchShape) -> Batch:
    batch = Batch.empty(shape, device=CPU)
    batch.document_ids.fill_(0)
    batch.position_ids.copy_(torch.arange(shape.token_budget))
    batch.anchor_positions.copy_(torch.arange(shape.anchors))
    batch.anchor_valid.fill_(True)
    batch.loss_mask.fill_(True)
    return batch


def most_allocated(action) -> int:
    """Bytes that the action has from torch's CPU allocator at once, at most."""
    action()  # what stays, and what is made once, is not counted
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        action()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def passing(work: Work) -> int:
    memory = memory_of(work)
    parts = ("gradients", "context", "activations", "head or layer at work")
    return sum(memory[part] for part in parts)


def on_cpu(**changes) -> Work:
    values = {"tokens": 512, "anchors": 64, "loss_chunk": 8, "captured": False}
    values |= {"attention": "dense", "device_type": "cpu"}
    return work_of(changes.pop("drafter", drafter_config()), **{**values, **changes})


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("microbatch", [64, 16])
def test_an_eager_step_takes_what_is_said(precision, microbatch):
    work = on_cpu(anchor_microbatch=microbatch, precision=precision)
    most = most_allocated(Step(work).run)
    assert passing(work) == pytest.approx(most, rel=0.1)


@library.custom_op("test_estimate::attend", mutates_args=())
def attend(
    query: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    own_key: torch.Tensor,
    own_value: torch.Tensor,
) -> torch.Tensor:
    """Has the memory of attention in one kernel, and none of its sense."""
    return query.clone()


@attend.register_fake
def _(query, *_):
    return torch.empty_like(query)


@library.custom_op("test_estimate::attend_backward", mutates_args=())
def attend_backward(
    grad: torch.Tensor, tensors: list[torch.Tensor], out: torch.Tensor
) -> list[torch.Tensor]:
    return [torch.zeros_like(tensor) for tensor in tensors]


@attend_backward.register_fake
def _(grad, tensors, out):
    return [torch.empty_like(tensor) for tensor in tensors]


def keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output)


def back(ctx, grad):
    *tensors, out = ctx.saved_tensors
    return tuple(torch.ops.test_estimate.attend_backward(grad, tensors, out))


attend.register_autograd(back, setup_context=keep)


class OneKernel:
    def attend(self, query, context, own):
        return torch.ops.test_estimate.attend(query, *context, *own)


@pytest.mark.filterwarnings("default")  # the compiler warns
def test_compiled_functions_keep_for_their_backward_what_is_said():
    # What they keep is decided as for a GPU: by the same partitioner.
    torch._dynamo.reset()
    drafter = drafter_config(num_hidden_layers=1)
    work = work_of(drafter, tokens=512, anchors=64)
    model = DFlashDraftModel(drafter).bfloat16()
    layer, rows = model.layers[0], work.shape.slots
    functions = compiled(Pieces(), backend="aot_eager_decomp_partition").functions
    states = torch.randn(work.shape.target_layers, 512, drafter.hidden_size).bfloat16()
    kept = Kept(model)
    with kept:
        own = model.context(states, torch.arange(512), functions)
    leaf_gradients = sum(tensor.nbytes for tensor in own[0])
    kept.take(*own[0])
    assert context(work) - leaf_gradients == pytest.approx(kept.bytes, rel=0.01)

    leaves = tuple(tensor.detach().requires_grad_() for tensor in own[0])
    x = torch.randn(rows, drafter.hidden_size).bfloat16().requires_grad_()
    angles = model._rotary(torch.arange(rows))
    kept = Kept(model, *leaves, *angles)
    with kept:
        gathered = functions.gather(layer, x, leaves, *angles, OneKernel())
        functions.finish(layer, x, gathered)
    kept.take(x)
    assert rows * row_bytes(work) == pytest.approx(kept.bytes, rel=0.01)


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """Bytes of the storages that autograd keeps, each once, but for a module's and others."""

    def __init__(self, module, *others):
        super().__init__(self.take_one, lambda tensor: tensor)
        self.seen = {}
        self.known = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *others)}

    def take_one(self, tensor):
        self.take(tensor)
        return tensor

    def take(self, *tensors):
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage.data_ptr() not in self.known:
                self.seen[storage.data_ptr()] = storage

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.seen.values())


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_measuring_takes_what_is_said(precision):
    work = on_cpu(precision=precision)
    step = Step(work)
    most = most_allocated(
        lambda: slots_right(
            step.drafter,
            step.frozen,
            step.batch,
            step.batch.anchor_positions.numpy(),
            group=64,
            pieces=step.pieces,
        )
    )
    # The CPU's attention has buffers of its own besides.
    assert measuring_at_work(work) == pytest.approx(most, rel=0.15)


def test_what_lasts_is_what_is_allocated():
    work = on_cpu(precision="bf16")
    step = Step(work)
    memory, optimizer = memory_of(work), step.optimizer
    assert memory["weights"] == optimizer.weights.nbytes
    states = (optimizer.master, optimizer.moment1, optimizer.moment2)
    assert memory["masters and moments"] == sum(state.nbytes for state in states)
    own = step.frozen.embedding.nbytes
    assert (frozen(work), frozen(replace(work, tied=True))) == (2 * own, own)


@pytest.mark.parametrize("encoding", ["bf16", "fp8", "int8", "lossless"])
def test_batches_are_counted_to_the_byte(encoding):
    shape = replace(SMALL.shape, encoding=encoding, final_hidden=True)
    one = sum(t.untyped_storage().nbytes() for t in Batch.empty(shape, device=CPU).tensors())
    work = replace(SMALL, shape=shape)
    assert batches(work) == 2 * one  # the feed's slot, and the graph's input
    assert batches(replace(work, captured=False)) == one
    # One in use, two ahead; and what checkpoints are copied through.
    assert pinned_of(work) == 3 * one + staging.THREADS * staging.PIECE
    on_cpu = replace(work, device_type="cpu")
    assert pinned_of(on_cpu) == 0
    assert host_of(on_cpu) == 3 * one + copies(work)


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_memory_that_checkpoints_are_written_from_is_counted(ranks):
    work = on_cpu(precision="bf16", ranks=ranks, packs_per_step=ranks)
    step = Step(work)
    part, _ = part_of(step.optimizer, rank=0, world=ranks)
    written = [*part.values(), *step.drafter.state_dict().values()]
    scalars = sum(tensor.nbytes for tensor in step.optimizer.scalars().values())
    assert copies(work) == sum(tensor.nbytes for tensor in written) - scalars


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("reduce", ["bf16", "fp32"])
def test_sums_and_buffers_of_many_ranks_are_those_that_are_made(turns, reduce):
    with torch.device("meta"):
        drafter = DFlashDraftModel(SMALL.drafter).bfloat16()
    parameters, world = list(drafter.parameters()), SimpleNamespace(size=3, rank=1)
    work = replace(SMALL, ranks=3, packs_per_step=3 * turns - 1, reduce=reduce)
    wire = DTYPES[reduce]
    reduced = ReducedGradients(parameters, turns=turns, wire=wire)
    assert sums(work) == size_of(reduced.flat)
    assert reduce_buffers(work) == 0
    scattered = ScatteredGradients(parameters, world, turns=turns, wire=wire)
    sharded = replace(work, sharded=True)
    assert sums(sharded) == size_of(scattered.flat)
    made = scattered.outgoing.nbytes + scattered.incoming.nbytes
    assert reduce_buffers(sharded) == made
    assert masters_and_moments(sharded) == pytest.approx(masters_and_moments(work) / 3, rel=0.01)


def test_one_process_sums_only_where_an_update_has_several_packs():
    parameters = list(DFlashDraftModel(SMALL.drafter).bfloat16().parameters())
    for packs in (1, 2):
        work = replace(SMALL, packs_per_step=packs, reduce="fp32")
        assert sums(work) == size_of(Gradients(parameters, turns=packs).flat)


def size_of(flat: torch.Tensor | None) -> int:
    return 0 if flat is None else flat.nbytes


CASE = re.compile(r"memory_gb(?:_(?P<model>4b))?(?:_T(?P<tokens>\d+))?_A(?P<anchors>\d+)")


def test_a_step_of_an_h200_took_what_is_said():
    found = figures("step-h200.json")
    measured = {key: CASE.fullmatch(key) for key in found if key.startswith("memory_gb")}
    assert measured
    for key, case in measured.items():
        assert case, key
        anchors = int(case["anchors"])
        work = work_of(
            MODELS[case["model"] or "27b"],
            tokens=int(case["tokens"] or 49_152),
            anchors=anchors,
            anchor_microbatch=min(2048, anchors),
        )
        memory = memory_of(work)
        # Nothing is measured on held-out samples there.
        assert sum(memory.values()) - memory["measuring"] == pytest.approx(
            found[key] * 1e9, rel=0.12
        )


def test_a_chunk_of_the_head_took_what_is_said():
    found = {k: v for k, v in figures("head-h200.json").items() if k.endswith(".peak_gb")}
    assert len(found) == 12
    for key, measured in found.items():
        shape, loss, chunk, _ = key.split(".")
        vocabulary, hidden, anchors = map(int, shape.split("x"))
        drafter = next(m for m in MODELS.values() if m.vocab_size == vocabulary)
        work = work_of(
            drafter, tokens=4096, anchors=anchors, loss_chunk=int(chunk.removeprefix("chunk"))
        )
        work = replace(work, shape=replace(work.shape, final_hidden=loss == "kl"))
        gradient = anchors * (drafter.block_size - 1) * hidden * 2
        # 34 MB more are cuBLAS's.
        assert head_chunk(work) + gradient == pytest.approx(measured * 1e9, rel=0.03)


def test_memory_does_not_grow_with_the_number_of_anchors():
    many, more = (
        sum(memory_of(replace(SMALL, shape=replace(SMALL.shape, anchors=n))).values())
        for n in (64, 128)
    )
    assert more == pytest.approx(many, rel=0.01)


# --- time, tokens, bytes --------------------------------------------------------------------------


def test_steps_of_an_h200_took_as_long_as_is_said():
    found = figures("step-h200.json")
    speed = EFFICIENCY * found["ceiling_held_tflops"] * 1e12
    for key, model, tokens, anchors in (
        ("step_ms_T4096_A512", "27b", 4096, 512),
        ("step_ms_A2048", "27b", 49_152, 2048),
        ("step_ms_A8192", "27b", 49_152, 8192),
        ("step_ms_4b_T8192_A1024", "4b", 8192, 1024),
    ):
        work = work_of(MODELS[model], tokens=tokens, anchors=anchors)
        seconds = estimate(work, flops_per_s=speed, read_bytes_per_s=None).compute_seconds
        assert seconds == pytest.approx(found[key] / 1e3, rel=0.12)


def test_totals_are_those_of_a_loop_over_packs():
    work = replace(
        SMALL, steps=12, packs_per_step=3, passes_per_pack=2, ranks=2, anchors_per_pack=10.5
    )
    tokens = anchors = read = 0.0
    for update in range(work.steps):
        for _lane in range(3):
            tokens += work.tokens_per_epoch / work.packs_per_epoch
            anchors += 10.5
            if update % 2 == 0:  # the first of two passes reads
                read += work.tokens_per_pack * work.shape.planes * work.state_bytes_per_token
    found = estimate(work, flops_per_s=1e9, read_bytes_per_s=1e6)
    values = found.to_dict()
    assert (values["tokens"], values["anchors"]) == (round(tokens), round(anchors))
    assert values["read_bytes"] == pytest.approx(read, abs=1)
    assert values["read_bytes_per_epoch"] == pytest.approx(
        work.tokens_per_epoch * work.shape.planes * work.state_bytes_per_token, abs=1
    )
    # Two ranks take two turns for three packs, one of them idle, and reading is everybody's.
    assert found.compute_seconds == pytest.approx(2 * useful_flop_of(work) / 1e9)
    assert found.read_seconds == pytest.approx(read / work.steps / 1e6)


def test_hours_are_those_of_whoever_limits():
    quick, slow = (
        estimate(SMALL, flops_per_s=useful_flop_of(SMALL) / s, read_bytes_per_s=bytes_of(SMALL))
        for s in (0.5, 2.0)
    )
    assert (quick.limit, slow.limit) == ("reader", "step")
    assert quick.hours == pytest.approx(100 * 1.0 / 3600)
    assert slow.hours == pytest.approx(100 * 2.0 / 3600)
    unknown = estimate(SMALL, flops_per_s=None, read_bytes_per_s=1.0)
    assert unknown.hours is unknown.limit is None
    assert "not known" in tell(unknown)


def bytes_of(work: Work) -> float:
    return work.tokens_per_pack * work.shape.planes * work.state_bytes_per_token


def test_the_speed_of_a_device_is_a_share_of_what_its_products_reach(monkeypatch):
    seconds = iter(range(0, 1000, 2))  # the clock goes on by 2 s whenever somebody looks
    monkeypatch.setattr(estimates.time, "perf_counter", lambda: float(next(seconds)))
    products = 2 * 512**3
    assert speed_of(CPU, precision="fp32") == pytest.approx(EFFICIENCY * products / 4)


# --- for people -----------------------------------------------------------------------------------


def test_a_table_says_what_the_run_takes():
    found = estimate(
        work_of(MODELS["27b"], tokens=49_152, anchors=2048, ranks=3, packs_per_step=3),
        flops_per_s=571e12,
        read_bytes_per_s=60e9,
    )
    lines = tell(found).splitlines()
    values = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in lines)
    assert values["parameters"] == "1.730 billion"
    assert values["memory per GPU"] == f"{found.memory_bytes / 1e9:.1f} GB"
    assert values["masters and moments"] == "20.8 GB"
    pinned, kept = found.pinned_bytes / 1e9, (1.73 * 2 + 20.76 / 3)
    assert values["host memory"] == f"{pinned + kept:.1f} GB, {pinned:.1f} GB of it pinned"
    assert values["steps"] == "100 of 3 packed batches each, on 3 ranks"
    assert values["time"] == (
        "about 90 seconds, 0.896 s a step; the step limits; measuring comes on top"
    )
    assert (
        len({line.index(line.split("  ", 1)[1].strip()) for line in lines if line[0] != " "}) == 1
    )
    json.dumps(found.to_dict())


BIG = work_of(
    MODELS["27b"], tokens=49_152, anchors=8192, anchor_microbatch=2048, ranks=4, packs_per_step=4
)


@pytest.mark.parametrize(
    ("work", "options"),
    [
        (BIG, ["--shard-optimizer", "--anchor-microbatch 1024", "--token-budget 24576"]),
        (replace(BIG, packs_per_step=8), ["--packs-per-step 4"]),
        (replace(BIG, reduce="fp32"), ["--reduce bf16"]),
        (replace(BIG, attention="dense"), ["--attention block"]),
    ],
)
def test_a_run_that_does_not_fit_is_told_which_options_help(work, options):
    found = estimate(work, flops_per_s=None, read_bytes_per_s=None)
    assert too_large(found, found.memory_bytes) is None
    text = too_large(found, found.memory_bytes - 10 * 10**9)
    assert "10.0 GB too few" in text
    for option in options:
        assert f"{option} saves" in text
    for option, saved in savings(work).items():
        changed = estimate(smaller(work)[option], flops_per_s=None, read_bytes_per_s=None)
        assert changed.memory_bytes == found.memory_bytes - saved


def test_no_chunk_of_less_than_a_block_is_named():
    options = smaller(replace(SMALL, anchor_microbatch=1))
    assert not [option for option in options if option.startswith("--loss-chunk")]
    assert "--loss-chunk 1" in smaller(replace(SMALL, anchor_microbatch=2))
