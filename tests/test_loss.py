"""The loss against plain PyTorch, the labels of a block, and how much each slot counts."""

import pytest
import torch
from reference import Document, pack
from torch.nn import functional as F

from dflash_fit.batch import Batch
from dflash_fit.loss import block_targets, decay, frozen_head_loss

CPU = torch.device("cpu")


def slots(*, count=23, hidden=16, vocab=50, dtype=torch.float32):
    """Rows, head, labels and weights of random slots; every fifth does not count."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(count, hidden, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(vocab, hidden, generator=generator).to(dtype)
    labels = torch.randint(vocab, (count,), generator=generator)
    weights = torch.rand(count, generator=generator)
    weights[::5] = 0
    return rows, head, labels, weights


def plain(rows, head, labels, weights):
    """Weighted sum and losses in fp32, by autograd through all logits at once."""
    losses = F.cross_entropy(rows.float() @ head.float().T, labels, reduction="none")
    return (losses * weights).sum(), losses


@pytest.mark.parametrize("chunk", [1, 7, 23, 100])
def test_the_loss_and_its_gradient_equal_plain_cross_entropy(chunk):
    rows, head, labels, weights = slots()
    result = frozen_head_loss(rows, head, labels, weights, chunk=chunk)
    total, losses = plain(rows, head, labels, weights)
    torch.testing.assert_close(result.total, total)
    torch.testing.assert_close(result.losses, losses)
    ours, theirs = torch.autograd.grad(result.total, rows), torch.autograd.grad(total, rows)
    torch.testing.assert_close(ours, theirs)


def test_in_bfloat16_they_equal_it_to_the_rounding_of_logits():
    rows, head, labels, weights = slots(dtype=torch.bfloat16)
    result = frozen_head_loss(rows, head, labels, weights, chunk=7)
    total, losses = plain(rows, head, labels, weights)
    # Logits of up to 16 are rounded to 8 bits: 2 ** -5 each, two of them in a loss.
    torch.testing.assert_close(result.losses, losses, atol=2**-4, rtol=0)
    (ours,), (theirs,) = torch.autograd.grad(result.total, rows), torch.autograd.grad(total, rows)
    torch.testing.assert_close(ours, theirs, atol=0.03 * float(theirs.abs().max()), rtol=0)


def test_a_factor_on_the_loss_is_a_factor_on_the_gradient():
    rows, head, labels, weights = slots()
    result = frozen_head_loss(rows, head, labels, weights, chunk=7)
    total, _ = plain(rows, head, labels, weights)
    ours = torch.autograd.grad(0.25 * result.total, rows)
    torch.testing.assert_close(ours, torch.autograd.grad(0.25 * total, rows))


def test_a_slot_is_right_where_its_label_is_the_likeliest_token():
    rows, head, labels, weights = slots()
    likeliest = (rows @ head.T).argmax(dim=-1)
    labels[::2] = likeliest[::2]
    result = frozen_head_loss(rows, head, labels, weights, chunk=7)
    assert torch.equal(result.correct, likeliest == labels)


def test_slots_of_weight_zero_do_not_count_however_large_their_logits():
    rows, head, labels, weights = slots()
    with torch.no_grad():
        rows[::5] *= 1e30
    result = frozen_head_loss(rows, head, labels, weights, chunk=7)
    (grad,) = torch.autograd.grad(result.total, rows)
    kept = weights > 0
    total, _ = plain(rows[kept], head, labels[kept], weights[kept])
    torch.testing.assert_close(result.total, total)
    assert not grad[::5].any()


def test_nothing_as_large_as_all_logits_is_kept_for_the_backward():
    rows, head, labels, weights = slots()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.numel()), lambda _: None
    ):
        frozen_head_loss(rows, head, labels, weights, chunk=7)
    assert kept
    assert max(kept) <= rows.numel() < len(rows) * len(head)


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
