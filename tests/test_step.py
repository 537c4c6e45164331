"""One training step against plain PyTorch, and all that must not matter to it."""

import math
from dataclasses import replace

import pytest
import torch
from reference import (
    ReferenceDrafter,
    make_document,
    make_frozen,
    make_weights,
    pack,
    reference_loss,
    small,
    starts_of,
)

from dflash_cache.encodings import decode, encode
from dflash_fit import step as step_module
from dflash_fit.batch import Batch, BatchShape
from dflash_fit.drafter import DFlashDraftModel, DrafterConfig
from dflash_fit.loss import HeadResult, Objective
from dflash_fit.metrics import StepMetrics
from dflash_fit.optim import AdamWConfig, FlatAdamW
from dflash_fit.step import EagerStep, Frozen, Pieces, StepConfig, Trainer, accumulate

SETTINGS = small(
    layer_types=("sliding_attention", "full_attention"), sliding_window=7, block_size=5
)
GAMMA = 2.5
# Documents by length and prompt; anchors close together, at the start and at the end of answers.
LENGTHS = ((24, 5), (34, 12), (9, 3))
ANCHORS = [(0, 5), (0, 6), (0, 22), (1, 12), (1, 30), (1, 32), (2, 4)]
CPU = torch.device("cpu")


class Setup:
    """A drafter, a frozen pair and three documents; always the same ones."""

    def __init__(self, dtype=torch.float32):
        generator = torch.Generator().manual_seed(3)
        self.weights = make_weights(SETTINGS, generator)
        self.tensors = make_frozen(generator, settings=SETTINGS)
        self.frozen = Frozen(**{name: t.to(dtype) for name, t in self.tensors.items()})
        self.documents = [
            make_document(n, generator=generator, settings=SETTINGS, prompt=prompt)
            for n, prompt in LENGTHS
        ]
        self.drafter = DFlashDraftModel(DrafterConfig(**SETTINGS))
        self.drafter.load_state_dict(self.weights)

    def reference(self):
        model = ReferenceDrafter(SETTINGS)
        model.load_state_dict(self.weights)
        return model

    def batch(self, *, token_budget=80, slots=8, order=(0, 1, 2)):
        """A pack of some of the documents, with their anchors."""
        anchors = [(order.index(d), a) for d, a in ANCHORS if d in order]
        documents = [self.documents[d] for d in order]
        return Batch(**pack(documents, anchors, token_budget=token_budget, slots=slots))

    def optimizer(self, *, dtype=torch.float32, weight_decay=0.1):
        config = AdamWConfig(beta1=0.9, beta2=0.95, weight_decay=weight_decay, clip=1.0)
        return FlatAdamW(self.drafter, config, dtype=dtype)


def step_config(batch, **changes):
    layers, tokens, hidden = batch.hidden.shape
    anchors, block = len(batch.anchor_positions), SETTINGS["block_size"]
    shape = BatchShape(target_layers=layers, token_budget=tokens, hidden_size=hidden,
                       anchors=anchors, block_size=block)  # fmt: skip
    objective = Objective(divergence="ce", slot_weights="decay", gamma=GAMMA)
    options = {"objective": objective, "anchor_microbatch": anchors, "loss_chunk": 1000, **changes}
    return StepConfig(shape=shape, **options)


def trainer_of(setup, batch, optimizer=None, **changes):
    optimizer = optimizer or setup.optimizer()
    config = step_config(batch, **changes)
    return Trainer(setup.drafter, setup.frozen, optimizer, config, Pieces())


def eager_step(setup, batch, optimizer=None, **changes):
    return EagerStep(trainer_of(setup, batch, optimizer, **changes))


def sums(batch, **changes):
    """Sums of losses, weights and gradients of a batch, as {name: tensor}."""
    setup = Setup()
    total, weight = accumulate(
        setup.drafter,
        setup.frozen,
        batch,
        step_config(batch, **changes),
        StepMetrics.zeros(SETTINGS["block_size"], device=CPU),
        Pieces(),
    )
    grads = {name: p.grad for name, p in setup.drafter.named_parameters()}
    return {"loss": total, **grads}, weight


def weight_of(batch):
    return sums(batch)[1]


def outcome(batch, *, normaliser=None, **changes):
    """Loss and gradients of a batch, as {name: tensor}."""
    found, weight = sums(batch, **changes)
    return {n: value / (weight if normaliser is None else normaliser) for n, value in found.items()}


def assert_same(found, wanted):
    """Equal but for the order of fp32 sums."""
    assert found.keys() == wanted.keys()
    for name in wanted:
        atol = 1e-5 * float(wanted[name].abs().max())
        torch.testing.assert_close(found[name], wanted[name], atol=atol, rtol=1e-4, msg=name)


def summed(outcomes):
    return {name: sum(one[name] for one in outcomes) for name in outcomes[0]}


# --- the oracle ---------------------------------------------------------------------------------


def slow_loss(setup, model, anchors=ANCHORS):
    return reference_loss(model, setup.documents, anchors, gamma=GAMMA, **setup.tensors)


def test_loss_and_gradients_of_a_pack_equal_plain_pytorch():
    setup, model = Setup(), Setup().reference()
    loss = slow_loss(setup, model).mean
    loss.backward()
    wanted = {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters()}}
    assert_same(outcome(setup.batch()), wanted)


def with_final(setup):
    """The documents with one more plane: what the target's head reads."""
    generator = torch.Generator().manual_seed(8)
    planes = [
        torch.randn(d.states[:1].shape, generator=generator).bfloat16().float()
        for d in setup.documents
    ]
    return [
        replace(d, states=torch.cat([d.states, plane]))
        for d, plane in zip(setup.documents, planes, strict=True)
    ]


def final_batch(setup):
    return Batch(**pack(with_final(setup), ANCHORS, token_budget=80, slots=8))


def slow_objective(setup, model, divergence, slot_weights):
    """Loss block by block and slot by slot; the target reads token a + k from state a + k - 1."""
    total, normaliser = torch.zeros(()), 0.0
    finals = [document.states[-1] for document in with_final(setup)]
    head, embedding = setup.tensors["head"], setup.tensors["embedding"]
    for number, anchor in ANCHORS:
        document = setup.documents[number]
        logits = document.block(model, anchor, embedding) @ head.T
        slots = [
            k
            for k in range(1, SETTINGS["block_size"])
            if anchor + k < len(document.ids) and document.mask[anchor + k]
        ]
        said = [logits[k].log_softmax(dim=-1) for k in slots]
        crosses = [-row[document.ids[anchor + k]] for k, row in zip(slots, said, strict=True)]
        losses = crosses
        if divergence == "kl":
            wanted = [(finals[number][anchor + k - 1] @ head.T).log_softmax(dim=-1) for k in slots]
            losses = [(w.exp() * (w - s)).sum() for w, s in zip(wanted, said, strict=True)]
        weights = [math.exp(-(k - 1) / GAMMA) for k in slots]
        if slot_weights == "dpace":
            passed = [0.5 * math.exp(-float(c.detach())) + 0.5 for c in crosses]
            reached = [math.prod(passed[: j + 1]) for j in range(len(passed))]
            weights = [sum(reached[j:]) for j in range(len(reached))]
        total = total + sum(w * loss for w, loss in zip(weights, losses, strict=True))
        normaliser += bool(slots) if slot_weights == "dpace" else sum(weights)
    return total / normaliser


@pytest.mark.parametrize("divergence", ["ce", "kl"])
@pytest.mark.parametrize("slot_weights", ["decay", "dpace"])
def test_every_objective_equals_plain_pytorch_slot_by_slot(divergence, slot_weights):
    setup, model = Setup(), Setup().reference()
    loss = slow_objective(setup, model, divergence, slot_weights)
    loss.backward()
    wanted = {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters()}}
    objective = Objective(divergence=divergence, slot_weights=slot_weights, gamma=GAMMA)
    batch = final_batch(setup)
    assert_same(outcome(batch, objective=objective), wanted)
    assert_same(outcome(batch, objective=objective, anchor_microbatch=2, loss_chunk=1), wanted)


def test_three_steps_equal_three_steps_of_plain_pytorch():
    setup, model = Setup(), Setup().reference()
    eager = eager_step(setup, setup.batch())
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    losses = []
    for _ in range(3):
        eager(setup.batch(), lr=1e-3)
        theirs.zero_grad()
        loss = slow_loss(setup, model).mean
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        theirs.step()
        losses.append(float(loss.detach()))
    assert eager.trainer.metrics.read()["loss"] == pytest.approx(sum(losses) / 3, rel=1e-5)
    for name, parameter in model.named_parameters():
        # Adam divides by the gradient's size: a rounding is a share of a step of 1e-3.
        torch.testing.assert_close(setup.drafter.get_parameter(name), parameter, atol=1e-5, rtol=0)


def test_metrics_equal_slow_counts():
    setup, model = Setup(), Setup().reference()
    wanted = slow_loss(setup, model)
    eager = eager_step(setup, setup.batch())
    eager(setup.batch(), lr=0.0)
    found = eager.trainer.metrics.read()
    shares = [r / max(c, 1) for r, c in zip(wanted.right, wanted.count, strict=True)]
    assert found["slot_accuracy"] == pytest.approx(shares)
    assert found["accuracy"] == pytest.approx(sum(wanted.right) / sum(wanted.count))
    assert (found["anchors"], found["tokens"]) == (len(ANCHORS), sum(n for n, _ in LENGTHS))


def test_slots_that_do_not_count_are_neither_right_nor_wrong():
    metrics = StepMetrics.zeros(4, device=CPU)
    counts = torch.tensor([[True, True, False], [True, False, False]])
    zeros = torch.zeros(2, 3)
    all_right = HeadResult(
        total=zeros.sum(), weight=zeros.sum(), losses=zeros, correct=zeros == 0, gradient=zeros
    )
    metrics.add_slots(all_right, counts)
    found = metrics.read()
    assert (found["accuracy"], found["slot_accuracy"]) == (1.0, [1.0, 1.0, 0.0])


def test_in_bfloat16_the_loss_is_that_of_fp32_to_its_rounding():
    setup = Setup(torch.bfloat16)
    optimizer = setup.optimizer(dtype=torch.bfloat16)
    eager = eager_step(setup, setup.batch(), optimizer)
    eager(setup.batch(), lr=1e-3)
    wanted = float(slow_loss(Setup(), Setup().reference()).mean.detach())
    assert eager.trainer.metrics.read()["loss"] == pytest.approx(wanted, rel=0.02)


# --- what must not matter -----------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_loss_chunk_does_not_matter(chunk):
    batch = Setup().batch()
    assert_same(outcome(batch, loss_chunk=chunk), outcome(batch))


@pytest.mark.parametrize("microbatch", [1, 2, 4])
def test_the_anchor_microbatch_does_not_matter(microbatch):
    batch = Setup().batch()
    assert_same(outcome(batch, anchor_microbatch=microbatch), outcome(batch))


@pytest.mark.parametrize("changes", [{"token_budget": 233}, {"slots": 7}, {"slots": 31}])
def test_padding_does_not_matter(changes):
    assert_same(outcome(Setup().batch(**changes)), outcome(Setup().batch()))


def test_what_stands_in_the_padding_does_not_matter():
    batch = Setup().batch()
    empty = batch.document_ids < 0
    other = replace(batch, hidden=torch.where(empty[:, None], 700.0, batch.hidden))
    assert_same(outcome(other), outcome(batch))


@pytest.mark.parametrize("divergence", ["ce", "kl"])
@pytest.mark.parametrize("encoding", ["fp8", "int8", "lossless"])
def test_a_batch_in_an_encoding_gives_the_loss_of_the_states_that_it_stands_for(
    encoding, divergence
):
    batch = final_batch(Setup())
    objective = Objective(divergence=divergence, slot_weights="decay", gamma=GAMMA)
    layers, _, hidden = batch.hidden.shape
    channels = torch.linspace(0.5, 2, layers * hidden).view(layers, 1, hidden)
    parts = encode(encoding, batch.hidden, channels)
    kept = channels[:, 0] if encoding == "int8" else channels[:, 0, :0]
    found = outcome(replace(batch, **parts, channels=kept), objective=objective)
    plain = replace(batch, hidden=decode(encoding, parts, channels))
    wanted = outcome(plain, objective=objective)
    for name in wanted:
        assert torch.equal(found[name], wanted[name])


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 2, 0)])
def test_the_order_of_documents_in_a_pack_does_not_matter(order):
    assert_same(outcome(Setup().batch(order=order)), outcome(Setup().batch()))


def test_packing_does_not_matter():
    whole = Setup().batch()
    alone = [Setup().batch(order=(d,), token_budget=40, slots=4) for d in range(3)]
    shares = [weight_of(batch) / weight_of(whole) for batch in alone]
    parts = [
        {name: share * value for name, value in outcome(batch).items()}
        for share, batch in zip(shares, alone, strict=True)
    ]
    assert sum(shares) == pytest.approx(1.0)
    assert_same(summed(parts), outcome(whole))


def test_the_number_of_ranks_does_not_matter():
    whole = Setup().batch()
    ranks = [Setup().batch(order=order, token_budget=64) for order in ((0, 2), (1,))]
    total = sum(weight_of(batch) for batch in ranks)
    parts = [outcome(batch, normaliser=total) for batch in ranks]
    assert_same(summed(parts), outcome(whole))


def test_a_rank_without_anchors_adds_nothing_to_the_others():
    batch = Setup().batch()
    idle = replace(batch, anchor_valid=torch.zeros_like(batch.anchor_valid))
    total = weight_of(batch) + weight_of(idle)
    parts = [outcome(one, normaliser=total) for one in (batch, idle)]
    assert_same(summed(parts), outcome(batch))


def test_tokens_of_a_supervised_neighbour_are_not_learnt():
    # The block at (0, 22) reaches into the neighbour, which begins right behind its document.
    setup = Setup()
    setup.documents[1] = replace(setup.documents[1], mask=torch.ones(34, dtype=torch.bool))
    batch = setup.batch()
    changed = replace(batch, input_ids=batch.input_ids.clone())
    changed.input_ids[starts_of(setup.documents)[1] :][:5] += 1
    assert_same(outcome(changed), outcome(batch))


# --- edges --------------------------------------------------------------------------------------


def test_slot_zero_never_reaches_the_head(monkeypatch):
    seen = []

    def record(rows, *args, **kwargs):
        seen.append(rows)
        return original(rows, *args, **kwargs)

    original = step_module.head_loss
    monkeypatch.setattr(step_module, "head_loss", record)
    setup, model = Setup(), Setup().reference()
    outcome(setup.batch(slots=7))
    wanted = [
        setup.documents[d].block(model, a, setup.tensors["embedding"])[1:] for d, a in ANCHORS
    ]
    torch.testing.assert_close(torch.cat(seen), torch.stack(wanted), atol=2e-5, rtol=1e-4)


def test_a_batch_without_anchors_changes_nothing_and_is_finite():
    setup = Setup()
    batch = setup.batch()
    batch.anchor_valid.zero_()
    batch.anchor_positions.zero_()
    optimizer = setup.optimizer(weight_decay=0.0)
    before = optimizer.master.clone()
    eager = eager_step(setup, batch, optimizer)
    eager(batch, lr=1e-3)
    found = eager.trainer.metrics.read()
    assert torch.equal(optimizer.master, before)
    assert not any(parameter.grad.any() for parameter in setup.drafter.parameters())
    assert (found["loss"], found["grad_norm"], found["accuracy"]) == (0.0, 0.0, 0.0)


def test_states_that_are_not_finite_skip_the_step_and_the_next_goes_on():
    setup = Setup()
    optimizer = setup.optimizer()
    eager = eager_step(setup, setup.batch(), optimizer)
    broken = setup.batch()
    broken.hidden[0, 3, 3] = math.nan
    before = optimizer.master.clone()
    eager(broken, lr=1e-3)
    assert torch.equal(optimizer.master, before)
    eager(setup.batch(), lr=1e-3)
    assert (int(optimizer.updates), int(optimizer.skipped)) == (1, 1)
    wanted = float(slow_loss(Setup(), Setup().reference()).mean.detach())
    assert eager.trainer.metrics.read()["loss"] == pytest.approx(wanted, rel=1e-5)
