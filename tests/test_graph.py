"""The captured step against the eager one: same body, same numbers, no host in between."""

import math
from dataclasses import replace

import pytest
import torch
from reference import make_document, make_frozen, make_weights, pack, small
from safetensors.torch import load_file
from test_optim import state, take_over

from dflash_fit import staging
from dflash_fit.attention import DenseSight
from dflash_fit.backends import sight_maker
from dflash_fit.batch import Batch, BatchShape
from dflash_fit.checkpoint import RunState, step_folder
from dflash_fit.drafter import DFlashDraftModel, DrafterConfig
from dflash_fit.errors import FitError
from dflash_fit.graph import GraphStep, compilations, compiled
from dflash_fit.loss import Objective
from dflash_fit.optim import AdamWConfig, FlatAdamW
from dflash_fit.saver import Saver
from dflash_fit.step import EagerStep, Frozen, Pieces, StepConfig, Trainer
from dflash_fit.world import World

# The compiler warns of itself, and hides some of it by filters that pytest's own come before.
pytestmark = pytest.mark.filterwarnings("default")

SETTINGS = small(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    head_dim=32,
    vocab_size=203,
    mask_token_id=202,
    block_size=5,
    layer_types=("sliding_attention",) * 3 + ("full_attention",),
    sliding_window=19,
)
TOKENS, ANCHORS = 256, 24
SHAPE = BatchShape(
    target_layers=2, token_budget=TOKENS, hidden_size=64, anchors=ANCHORS, block_size=5
)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CE = Objective(divergence="ce", slot_weights="decay", gamma=2.5)


def batches(count, *, seed=0, device=CUDA, final_hidden=False):
    """Packs of mixed documents and numbers of anchors, all of one shape."""
    generator = torch.Generator().manual_seed(seed)
    layers = (1, 6, 8) if final_hidden else (1, 6)
    made = []
    for _ in range(count):
        documents, room = [], TOKENS
        while room > 24:
            length = int(torch.randint(9, min(room - 8, 100), (1,), generator=generator))
            settings = {**SETTINGS, "target_layer_ids": layers}
            documents.append(
                make_document(length, generator=generator, settings=settings, prompt=3)
            )
            room -= -(-length // 8) * 8
        every = [(d, a) for d, doc in enumerate(documents) for a in range(3, len(doc.ids) - 1)]
        number = int(torch.randint(1, ANCHORS + 1, (1,), generator=generator))
        picks = torch.randperm(len(every), generator=generator)[:number].tolist()
        fields = pack(documents, [every[i] for i in picks], token_budget=TOKENS, slots=ANCHORS)
        made.append(Batch(**{name: tensor.to(device) for name, tensor in fields.items()}))
    return made


def trainer(pieces, *, device=CUDA, dtype=torch.float32, final_hidden=False, **changes):
    """The same drafter every time."""
    generator = torch.Generator().manual_seed(5)
    drafter = DFlashDraftModel(DrafterConfig(**SETTINGS))
    drafter.load_state_dict(make_weights(SETTINGS, generator))
    drafter.to(device)
    frozen = make_frozen(generator, settings=SETTINGS)
    config = StepConfig(
        **{
            "shape": replace(SHAPE, final_hidden=final_hidden),
            "objective": CE,
            "anchor_microbatch": 8,
            "loss_chunk": 5,
            **changes,
        }
    )
    adamw = AdamWConfig(beta1=0.9, beta2=0.95, weight_decay=0.1, clip=1.0)
    return Trainer(
        drafter,
        Frozen(**{name: tensor.to(device, dtype) for name, tensor in frozen.items()}),
        FlatAdamW(drafter, adamw, dtype=dtype),
        config,
        pieces,
    )


def fast():
    return compiled(Pieces(sight=sight_maker("block", CUDA)))


def captured(**options):
    step = GraphStep(trainer(fast(), **options))
    step.capture(batches(1, seed=99, final_hidden=options.get("final_hidden", False))[0])
    return step


def gradients(step):
    """Those of the last update, summed over its packs."""
    trained = step.trainer
    names = {id(p): name for name, p in trained.drafter.named_parameters()}
    summed, _, _ = trained.gradients.arrive()
    return {
        names[id(p)]: gradient.view(p.shape).clone()
        for p, gradient in zip(trained.optimizer.parameters, summed, strict=True)
    }


def assert_near(found, wanted, *, share):
    """Within a share of the largest number."""
    assert float((found - wanted).abs().max()) <= share * float(wanted.abs().max())


# --- on a CPU -----------------------------------------------------------------------------------


def test_compiled_pieces_compute_the_same_and_are_shared_by_the_layers():
    torch._dynamo.reset()  # what another test has compiled is not compiled here again
    pieces = compiled(Pieces(sight=DenseSight.of), backend="aot_eager")
    plain, fused = (EagerStep(trainer(p, device=CPU)) for p in (Pieces(), pieces))
    before = compilations()
    for batch in batches(3, device=CPU):
        plain(batch, lr=1e-3)
        fused(batch, lr=1e-3)
        wanted = gradients(plain)
        for name, found in gradients(fused).items():
            assert_near(found, wanted[name], share=1e-4)
    # Five functions of the drafter, one of them twice (nothing below the first layer is trained),
    # and one for updates of every length and kind.
    assert compilations() - before == 7
    settled = compilations()
    for batch in batches(4, seed=1, device=CPU):
        fused(batch, lr=1e-3)
    assert compilations() == settled


def test_several_packs_of_an_update_equal_one_that_holds_them_all():
    whole = EagerStep(trainer(Pieces(), device=CPU))
    two = EagerStep(trainer(Pieces(), device=CPU, packs=2))
    first, second = batches(2, device=CPU)
    joined = join(first, second)
    whole.trainer.config = replace(
        whole.trainer.config,
        shape=replace(SHAPE, token_budget=2 * TOKENS, anchors=2 * ANCHORS),
    )
    whole(joined, lr=1e-2)
    two(first, lr=1e-2, turn=0)
    assert int(two.trainer.optimizer.updates) == 0
    two(second, lr=1e-2, turn=1)
    assert int(two.trainer.optimizer.updates) == 1
    for name, found in gradients(two).items():
        assert_near(found, gradients(whole)[name], share=1e-5)
    found, wanted = two.trainer.metrics.read(), whole.trainer.metrics.read()
    assert found.pop("slot_accuracy") == pytest.approx(wanted.pop("slot_accuracy"))
    assert found == pytest.approx(wanted, rel=1e-5)


def join(first, second):
    """Two packs as one, the anchors that are not valid behind the others."""
    fields = {}
    for name in vars(first):
        a, b = getattr(first, name), getattr(second, name)
        if name in ("document_starts", "anchor_positions"):
            b = b + TOKENS
        if name == "document_ids":
            b = torch.where(b >= 0, b + 100, -1)
        axis = 1 if a.dim() > 1 and name != "channels" else 0
        fields[name] = torch.cat([a, b], dim=axis) if name != "channels" else a
    order = (~fields["anchor_valid"]).to(torch.int8).argsort(stable=True)
    fields["anchor_valid"] = fields["anchor_valid"][order]
    fields["anchor_positions"] = fields["anchor_positions"][order] * fields["anchor_valid"]
    return Batch(**fields)


def test_a_step_on_a_cpu_is_not_captured():
    with pytest.raises(FitError, match="cannot be captured"):
        GraphStep(trainer(Pieces(), device=CPU))


# --- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["block", "flex"])
def test_twenty_replays_equal_twenty_eager_steps(attention):
    pieces = compiled(Pieces(sight=sight_maker(attention, CUDA)))
    step, eager = GraphStep(trainer(pieces)), EagerStep(trainer(Pieces()))
    step.capture(batches(1, seed=99)[0])
    for batch in batches(20):
        step(batch, lr=1e-3)
        eager(batch, lr=1e-3)
        wanted = gradients(eager)
        for name, found in gradients(step).items():
            assert_near(found, wanted[name], share=2e-3)
        found, other = step.trainer.metrics.read(), eager.trainer.metrics.read()
        assert found["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert found["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
        assert (found["tokens"], found["anchors"]) == (other["tokens"], other["anchors"])


@pytest.mark.gpu
def test_twenty_replays_in_bf16_equal_eager_steps_to_its_rounding():
    step = captured(dtype=torch.bfloat16)
    eager = EagerStep(trainer(Pieces()))  # fp32, dense mask, plain PyTorch loss
    for batch in batches(20):
        # The same weights each time: it is the rounding of one step that is bounded.
        take_over(eager.trainer.optimizer, step.trainer.optimizer)
        step(batch, lr=1e-3)
        eager(batch, lr=1e-3)
        wanted = gradients(eager)
        for name, found in gradients(step).items():
            distance = (found.float() - wanted[name]).norm() / wanted[name].norm()
            assert float(distance) < 0.05, name
        found, other = step.trainer.metrics.read(), eager.trainer.metrics.read()
        assert found["loss"] == pytest.approx(other["loss"], rel=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("divergence", "slot_weights"), [("ce", "dpace"), ("kl", "decay"), ("kl", "dpace")]
)
def test_every_objective_is_captured(divergence, slot_weights):
    objective = Objective(divergence=divergence, slot_weights=slot_weights, gamma=2.5)
    final_hidden = divergence == "kl"
    options = {"objective": objective, "final_hidden": final_hidden}
    step, eager = captured(**options), EagerStep(trainer(Pieces(), **options))
    for batch in batches(4, final_hidden=final_hidden):
        step(batch, lr=1e-3)
        eager(batch, lr=1e-3)
    wanted = gradients(eager)
    for name, found in gradients(step).items():
        assert_near(found, wanted[name], share=2e-3)
    assert step.trainer.metrics.read()["loss"] == pytest.approx(
        eager.trainer.metrics.read()["loss"], rel=1e-4
    )


@pytest.mark.gpu
@pytest.mark.parametrize("packs", [2, 3, 5])
def test_several_packs_an_update_are_captured(packs):
    step, eager = captured(packs=packs), EagerStep(trainer(Pieces(), packs=packs))
    assert len(step.graphs) == min(packs, 3)
    for number, batch in enumerate(batches(3 * packs)):
        step(batch, lr=1e-3, turn=number % packs)
        eager(batch, lr=1e-3, turn=number % packs)
    assert int(step.trainer.optimizer.updates) == 3
    wanted = gradients(eager)
    for name, found in gradients(step).items():
        assert_near(found, wanted[name], share=2e-3)


@pytest.mark.gpu
def test_capturing_changes_nothing():
    step, other = GraphStep(trainer(fast())), EagerStep(trainer(Pieces()))
    for each in (step, other):
        each.trainer.optimizer.moment1.fill_(0.3)
        each.trainer.optimizer.moment2.fill_(0.7)
    step.capture(batches(1)[0])
    for name, tensor in state(step.trainer.optimizer).items():
        assert torch.equal(tensor, state(other.trainer.optimizer)[name]), name
    assert torch.equal(step.trainer.optimizer.weights, other.trainer.optimizer.weights)
    assert step.trainer.metrics.read()["tokens"] == 0


@pytest.mark.gpu
def test_steps_ask_nothing_of_the_host_keep_their_memory_and_compile_once():
    step = captured()
    made = batches(30)
    step(made[0], lr=1e-3)
    torch.cuda.synchronize()
    memory = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number, batch in enumerate(made):
            step(batch, lr=1e-3 / (1 + number))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (torch.cuda.memory_reserved(), torch.cuda.memory_allocated()) == memory
    assert step.counts() == {"captures": 1, "recompiles": 0}
    assert math.isfinite(step.trainer.metrics.read()["loss"])


@pytest.mark.gpu
def test_a_checkpoint_holds_the_state_of_its_moment_though_training_goes_on(tmp_path, monkeypatch):
    """Through pinned buffers that each tensor fills many times, beside replays not waited for."""
    monkeypatch.setattr(staging, "PIECE", 5000)
    step = captured(dtype=torch.bfloat16)
    drafter, optimizer = step.trainer.drafter, step.trainer.optimizer
    made = batches(6)
    with Saver(tmp_path, World.alone(CUDA), keep_last=9) as saver:
        wanted = []
        for number in (1, 2):  # the second time into the host memory of the first
            for batch in made:
                step(batch, lr=1e-3)
            # Clones on the device: the host has waited for nothing when it saves.
            now = {**optimizer.flats(), **optimizer.scalars(), **drafter.state_dict()}
            wanted.append({name: tensor.clone() for name, tensor in now.items()})
            at = RunState(step=number, epoch=0, index=0, best_step=None, best_acceptance=0.0)
            saver.save(drafter, optimizer, at, {}, best=False)
            for batch in made:
                step(batch, lr=1e-3)
    assert not torch.equal(wanted[0]["master"], wanted[1]["master"])
    for number in (1, 2):
        folder = step_folder(tmp_path, number)
        files = (folder / "optimizer.safetensors", folder / "model.safetensors")
        found = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert found.keys() == wanted[number - 1].keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, wanted[number - 1][name].cpu()), name


@pytest.mark.gpu
def test_the_eager_step_asks_nothing_of_the_host_either():
    eager = EagerStep(trainer(Pieces(sight=sight_maker("block", CUDA))))
    made = batches(3)
    eager(made[0], lr=1e-3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in made:
            eager(batch, lr=1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_replay_with_states_that_are_not_finite_changes_no_weight_and_is_counted():
    step = captured()
    broken, fine = batches(2)
    broken.hidden[0, :3, 3] = math.nan
    before = step.trainer.optimizer.master.clone()
    step(broken, lr=1e-3)
    assert torch.equal(step.trainer.optimizer.master, before)
    step(fine, lr=1e-3)
    assert not torch.equal(step.trainer.optimizer.master, before)
    optimizer = step.trainer.optimizer
    assert (int(optimizer.updates), int(optimizer.skipped)) == (1, 1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda b: {"loss_mask": b.loss_mask[:-1]}, r"batch.loss_mask: found bool \[255\]"),
        (lambda b: {"hidden": b.hidden.float()}, r"batch.hidden: found float32"),
        (
            lambda b: {"input_ids": b.input_ids.cpu()},
            r"batch.input_ids: found int64 \[256\] on cpu",
        ),
        (lambda b: {"anchor_valid": b.anchor_valid[:8]}, r"batch.anchor_valid: found bool \[8\]"),
    ],
    ids=["shape", "dtype", "device", "anchors"],
)
def test_a_batch_of_another_kind_is_refused_by_the_field(change, told):
    step = captured()
    batch = batches(1)[0]
    with pytest.raises(FitError, match=told):
        step(replace(batch, **change(batch)), lr=1e-3)
