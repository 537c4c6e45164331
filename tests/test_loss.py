"""The loss against plain PyTorch, the labels of a block, and how much each slot counts."""

from dataclasses import dataclass, replace

import pytest
import torch
from reference import Document, pack
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dflash_fit.batch import Batch
from dflash_fit.loss import Objective, block_targets, decay, dpace, head_loss

CPU = torch.device("cpu")
DECAY = Objective(divergence="ce", slot_weights="decay", gamma=3.0)
DPACE = replace(DECAY, slot_weights="dpace", alpha=0.3)
KL = replace(DECAY, divergence="kl")
KL_DPACE = replace(DPACE, divergence="kl")
OBJECTIVES = [
    pytest.param(objective, id=f"{objective.divergence}-{objective.slot_weights}")
    for objective in (DECAY, DPACE, KL, KL_DPACE)
]


@dataclass(frozen=True)
class Slots:
    """What goes into the loss, of random blocks; about a third of the slots does not count."""

    rows: torch.Tensor
    head: torch.Tensor
    labels: torch.Tensor
    counts: torch.Tensor
    teacher: torch.Tensor


def make_slots(*, blocks=7, slots=4, hidden=16, vocab=50, dtype=torch.float32, device=CPU):
    generator = torch.Generator().manual_seed(0)
    # The teacher is like the drafter, so that they agree now and then.
    rows = torch.randn(blocks, slots, hidden, generator=generator)
    teacher = rows + torch.randn(rows.shape, generator=generator)
    head = torch.randn(vocab, hidden, generator=generator)
    counts = torch.rand(blocks, slots, generator=generator) < 2 / 3
    counts[1], counts[2] = False, torch.arange(slots) != 1
    return Slots(
        rows=rows.to(device, dtype),
        head=head.to(device, dtype),
        labels=torch.randint(vocab, (blocks, slots), generator=generator).to(device),
        counts=counts.to(device),
        teacher=teacher.to(device, dtype),
    )


def run(given, objective, *, chunk=3, loss=head_loss):
    teacher = given.teacher if objective.divergence == "kl" else None
    return loss(
        given.rows,
        given.head,
        given.labels,
        given.counts,
        objective,
        chunk=chunk,
        teacher=teacher,
    )


def slow_dpace(cross_entropy, counts, alpha):
    """The formula, slot by slot."""
    weights = torch.zeros(counts.shape, dtype=torch.float64)
    for block, of_block in enumerate(counts.tolist()):
        products, product = [], 1.0
        for slot, here in enumerate(of_block):
            passed = float(torch.exp(-cross_entropy[block, slot].double()))
            product *= (1 - alpha) * passed + alpha if here else 1.0
            products.append(product)
        for slot, here in enumerate(of_block):
            if here:
                behind = zip(products[slot:], of_block[slot:], strict=True)
                weights[block, slot] = sum(product for product, counts in behind if counts)
    return weights.float().to(counts.device)


def slow_weights(cross_entropy, counts, objective):
    if objective.slot_weights == "dpace":
        return slow_dpace(cross_entropy, counts, objective.alpha)
    return counts * torch.exp(-torch.arange(counts.shape[1]) / objective.gamma).to(counts.device)


def plain(given, objective):
    """Losses, total and gradient in fp32, by autograd through all logits at once."""
    rows = given.rows.float().requires_grad_()
    log_q = (rows @ given.head.float().T).log_softmax(dim=-1)
    cross_entropy = F.nll_loss(
        log_q.flatten(0, 1), given.labels.flatten(), reduction="none"
    ).view_as(given.counts)
    losses = cross_entropy
    if objective.divergence == "kl":
        log_p = (given.teacher.float() @ given.head.float().T).log_softmax(dim=-1)
        losses = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=-1)
    weights = slow_weights(cross_entropy.detach(), given.counts, objective)
    losses = torch.where(given.counts, losses, 0.0)
    total = (losses * weights).sum()
    (gradient,) = torch.autograd.grad(total, rows)
    return losses.detach(), total.detach(), gradient


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_the_loss_and_its_gradient_equal_plain_pytorch(objective, chunk):
    given = make_slots()
    result = run(given, objective, chunk=chunk)
    losses, total, gradient = plain(given, objective)
    torch.testing.assert_close(result.losses, losses)
    torch.testing.assert_close(result.total, total)
    torch.testing.assert_close(result.gradient, gradient)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_in_bfloat16_they_equal_it_to_the_rounding_of_logits(objective):
    given = make_slots(dtype=torch.bfloat16)
    result = run(given, objective)
    losses, total, gradient = plain(given, objective)
    # Logits of up to 16 are rounded to 8 bits: 2 ** -5 each, of which a loss has two or four.
    atol = 2**-4 if objective.divergence == "ce" else 2**-3
    torch.testing.assert_close(result.losses, losses, atol=atol, rtol=0)
    torch.testing.assert_close(result.total, total, rtol=0.02, atol=0)
    assert result.gradient.dtype == torch.bfloat16
    atol = 0.03 * float(gradient.abs().max())
    torch.testing.assert_close(result.gradient.float(), gradient, atol=atol, rtol=0)


@pytest.mark.parametrize("objective", [DECAY, KL_DPACE])
def test_a_slot_is_right_where_its_label_is_the_likeliest_token(objective):
    given = make_slots()
    likeliest = (given.rows @ given.head.T).argmax(dim=-1)
    given.labels[::2] = likeliest[::2]
    result = run(given, objective)
    assert torch.equal(result.correct, likeliest == given.labels)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_slots_that_do_not_count_add_nothing_whatever_their_rows_hold(objective, garbage):
    given = make_slots()
    wanted = run(given, objective)
    given.rows[~given.counts] = garbage
    given.teacher[~given.counts] = garbage
    result = run(given, objective)
    for name in ("total", "weight", "losses", "gradient"):
        assert torch.equal(getattr(result, name), getattr(wanted, name)), name
    assert not result.losses[~given.counts].any()
    assert not result.gradient[~given.counts].any()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_blocks_of_which_nothing_counts_give_zero(objective):
    given = make_slots()
    given.counts[:] = False
    result = run(given, objective)
    for name in ("total", "weight", "losses", "gradient"):
        assert not getattr(result, name).any(), name


def test_a_teacher_that_agrees_leaves_no_loss_and_no_gradient():
    given = make_slots()
    result = run(replace(given, teacher=given.rows), KL)
    torch.testing.assert_close(result.losses, torch.zeros_like(result.losses), atol=1e-6, rtol=0)
    assert not result.gradient.any()


def test_a_teacher_is_given_where_it_is_needed_and_only_there():
    given = make_slots()
    arguments = (given.rows, given.head, given.labels, given.counts)
    with pytest.raises(ValueError, match="'kl' without a teacher"):
        head_loss(*arguments, KL, chunk=3)
    with pytest.raises(ValueError, match="'ce' with a teacher"):
        head_loss(*arguments, DECAY, chunk=3, teacher=given.teacher)


def test_the_gradient_goes_on_into_the_rows():
    given = make_slots()
    inputs = F.pad(given.rows, (0, 0, 1, 0)).requires_grad_()
    rows = (2 * inputs)[:, 1:]  # as slot 0 is left out: not contiguous
    result = run(replace(given, rows=rows.detach()), DECAY)
    torch.autograd.backward(rows, result.gradient)
    *_, gradient = plain(replace(given, rows=rows.detach()), DECAY)
    torch.testing.assert_close(inputs.grad[:, 1:], 2 * gradient)


class LargestStorage(TorchDispatchMode):
    """The largest storage behind what any operation returned, in elements of fp32."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // 4)
        return found


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_there_is_never_more_than_a_chunk_of_logits(objective):
    given = make_slots(vocab=64, hidden=4)
    with LargestStorage() as largest:
        result = run(given, objective, chunk=2)
    assert largest.elements == 2 * 4 * 64
    kept = max(value.untyped_storage().nbytes() // 4 for value in vars(result).values())
    assert kept == given.rows.numel() < largest.elements


# --- weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dpace_is_its_formula(alpha):
    generator = torch.Generator().manual_seed(0)
    cross_entropy = 3 * torch.rand(40, 6, generator=generator)
    counts = torch.rand(40, 6, generator=generator) < 0.6
    found = dpace(cross_entropy, counts, alpha=alpha)
    torch.testing.assert_close(found, slow_dpace(cross_entropy, counts, alpha))


def test_dpace_by_hand():
    # q = 1/2, 1/4, 1 (does not count), 1/8 with alpha = 0: C = 1/2, 1/8, 1/8, 1/64.
    cross_entropy = -torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]]))
    counts = torch.tensor([[True, True, False, True]])
    wanted = torch.tensor([[41 / 64, 9 / 64, 0, 1 / 64]])
    torch.testing.assert_close(dpace(cross_entropy, counts, alpha=0.0), wanted)


def test_decay_is_divided_by_the_sum_of_its_weights():
    given = make_slots()
    wanted = (given.counts * decay(5, DECAY.gamma, device=CPU)).sum()
    torch.testing.assert_close(run(given, DECAY).weight, wanted)
    torch.testing.assert_close(run(given, KL).weight, wanted)


def test_dpace_is_divided_by_the_number_of_blocks_that_count():
    given = make_slots()
    blocks = torch.tensor(6.0)  # of seven; of one no slot counts
    torch.testing.assert_close(run(given, DPACE).weight, blocks)
    torch.testing.assert_close(run(given, KL_DPACE).weight, blocks)


# --- decay --------------------------------------------------------------------------------------

# Computed by hand from exp(-(k - 1) / gamma), k = 1 .. B - 1.
GAMMA_7 = [1, 0.8669, 0.7515, 0.6514, 0.5647, 0.4895, 0.4244, 0.3679, 0.3189, 0.2765, 0.2397,
           0.2077, 0.1801, 0.1561, 0.1353]  # fmt: skip
GAMMA_4 = [1, 0.7788, 0.6065, 0.4724, 0.3679, 0.2865, 0.2231]


@pytest.mark.parametrize(("block", "gamma", "values"), [(16, 7, GAMMA_7), (8, 4, GAMMA_4)])
def test_later_slots_count_less(block, gamma, values):
    assert decay(block, gamma, device=CPU).tolist() == pytest.approx(values, abs=5e-5)


@pytest.mark.parametrize(
    ("block", "gamma", "total"), [(16, 7, 6.6306), (10, 5, 4.6048), (8, 4, 3.7352)]
)
def test_the_weights_of_a_whole_block_sum_to(block, gamma, total):
    assert float(decay(block, gamma, device=CPU).sum()) == pytest.approx(total, abs=5e-5)


# --- labels -------------------------------------------------------------------------------------


def numbered(first, mask):
    """A document whose tokens are first, first + 1, ..."""
    count = len(mask)
    return Document(
        ids=torch.arange(first, first + count),
        mask=torch.tensor(mask, dtype=torch.bool),
        states=torch.zeros(1, count, 2),
    )


def targets(documents, anchors, *, token_budget=24, slots=None, block_size=4):
    batch = Batch(**pack(documents, anchors, token_budget=token_budget, slots=slots))
    return block_targets(batch, block_size=block_size)


def test_slot_k_is_labelled_with_the_token_at_the_anchor_plus_k():
    labels, counts = targets([numbered(100, [0, 0, 1, 1, 1, 1, 1, 1])], [(0, 2), (0, 4)])
    assert labels.tolist() == [[103, 104, 105], [105, 106, 107]]
    assert counts.all()


def test_unsupervised_slots_do_not_count_and_those_behind_them_do():
    _, counts = targets([numbered(100, [0, 1, 1, 0, 1, 1, 0, 0])], [(0, 1)])
    assert counts.tolist() == [[True, False, True]]


def test_labels_never_come_from_a_supervised_neighbour():
    documents = [numbered(100, [1] * 8), numbered(200, [1] * 8)]
    _, counts = targets(documents, [(0, 6), (1, 0)])
    assert counts.tolist() == [[True, False, False], [True, True, True]]


def test_labels_end_with_the_last_slot_of_the_pack():
    _, counts = targets([numbered(100, [1] * 8)], [(0, 6)], token_budget=8)
    assert counts.tolist() == [[True, False, False]]


def test_slots_of_invalid_blocks_do_not_count():
    _, counts = targets([numbered(100, [1] * 8)], [(0, 3)], slots=3)
    assert counts.tolist() == [[True] * 3, [False] * 3, [False] * 3]
