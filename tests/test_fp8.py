"""Products in fp8: what rounding may cost by its own definition, and that nothing else changes."""

import sys
from pathlib import Path

import pytest
import torch
from reference import make_frozen, make_weights
from test_graph import CUDA, SETTINGS, batches, captured, trainer
from torch.nn import functional as F

from dflash_fit import graph
from dflash_fit.attention import DenseSight
from dflash_fit.backends import sight_maker
from dflash_fit.drafter import DFlashDraftModel, DrafterConfig
from dflash_fit.graph import GraphStep, compilations
from dflash_fit.loss import through_torch
from dflash_fit.step import EagerStep, Pieces

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import fp8
from fp8 import E4M3, MOST, Head8, Linear8, Recipe, linear8, rounded, train_in_fp8

# The compiler warns of itself, and hides some of it by filters that pytest's own come before.
pytestmark = pytest.mark.filterwarnings("default")

CPU = torch.device("cpu")
WHOLE = Recipe(forward=True, input_gradient=True, weight_gradient=True)
RECIPES = [
    Recipe(forward=True, input_gradient=False, weight_gradient=False),
    Recipe(forward=True, input_gradient=True, weight_gradient=False),
    Recipe(forward=False, input_gradient=False, weight_gradient=True),
    WHOLE,
]


def normal(generator, *size):
    return torch.randn(size, generator=generator)


def with_outliers(generator, *size):
    """A thousandth of the numbers is a hundred times as large."""
    x = normal(generator, *size)
    x[torch.rand(size, generator=generator) < 1e-3] *= 100
    return x


def graded(generator, *size):
    """Rows, and columns, of sizes that are a million apart."""
    rows, columns = torch.logspace(-3, 3, size[0]), torch.logspace(3, -3, size[1])
    return normal(generator, *size) * rows[:, None] * columns


MAKERS = [normal, with_outliers, graded]


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(3)


# --- rounding -----------------------------------------------------------------------------------


def widened(x):
    return x.data.float() * x.scale


def error_of(x):
    """The most that rounding moves each number: half a unit of its last place.

    Three bits behind the leading one; below 2^-6 the unit stays 2^-9.
    """
    scale = x.abs().amax(dim=1, keepdim=True) / MOST
    exponent = torch.floor(torch.log2((x.abs() / scale).clamp(min=2.0**-6)))
    return 2.0 ** (exponent - 4) * scale * (1 + 1e-5)


@pytest.mark.parametrize("make", MAKERS)
def test_each_number_is_the_nearest_that_e4m3_has_at_its_scale(make, generator):
    x = make(generator, 33, 80)
    found = rounded(x)
    assert found.data.dtype == E4M3
    assert found.data.is_contiguous()
    assert ((widened(found) - x).abs() <= error_of(x)).all()


def test_the_largest_number_of_a_row_is_kept(generator):
    x = with_outliers(generator, 64, 48)
    largest = x.abs().argmax(dim=1, keepdim=True)
    torch.testing.assert_close(
        widened(rounded(x)).gather(1, largest), x.gather(1, largest), rtol=1e-6, atol=0
    )


def test_a_transposed_view_is_rounded_by_its_own_rows(generator):
    x = graded(generator, 24, 40)
    found, wanted = rounded(x.T), rounded(x.T.contiguous())
    assert torch.equal(found.data.view(torch.uint8), wanted.data.view(torch.uint8))
    assert torch.equal(found.scale, wanted.scale)


def test_a_row_of_zeros_stays_zero_and_a_tiny_one_stays_finite(generator):
    x = torch.stack([torch.zeros(16), torch.full((16,), 1e-38), normal(generator, 16)])
    found = widened(rounded(x))
    assert (found[0] == 0).all()
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_none_spoils_its_row_and_no_other(generator, bad):
    x, other = normal(generator, 4, 16), normal(generator, 8, 16)
    x[2, 5] = bad
    found = fp8.product(rounded(x), rounded(other), dtype=torch.float32, fast=False)
    assert (~torch.isfinite(found)).all(dim=1).tolist() == [False, False, True, False]


# --- projections --------------------------------------------------------------------------------


def product_error(a, b):
    """The most by which a @ b.T may be off when both are rounded, element by element."""
    a_error, b_error = error_of(a), error_of(b)
    a, b = a.abs(), b.abs()
    return a_error @ b.T + a @ b_error.T + a_error @ b_error.T + 1e-4 * (a @ b.T)


def gradients_of(function, x, weight, slope):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = function(x, weight)
    y.backward(slope)
    return y.detach(), x.grad, weight.grad


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("make", MAKERS)
def test_a_projection_is_off_by_no_more_than_its_operands_were(make, recipe, generator):
    x, weight, slope = (make(generator, *size) for size in ((90, 64), (48, 64), (90, 48)))
    exact = gradients_of(F.linear, x, weight, slope)
    found = gradients_of(lambda x, w: linear8(x, w, recipe), x, weight, slope)
    rounds = (recipe.forward, recipe.input_gradient, recipe.weight_gradient)
    operands = ((x, weight), (slope, weight.T), (slope.T, x.T))
    for near, wanted, does, pair in zip(found, exact, rounds, operands, strict=True):
        if does:
            assert ((near - wanted).abs() <= product_error(*pair)).all()
            assert not torch.equal(near, wanted)
        else:
            torch.testing.assert_close(near, wanted)


@pytest.mark.parametrize("make", [normal, with_outliers])
def test_a_projection_is_off_by_four_percent_in_all(make, generator):
    """Two operands, each with an error that is evenly spread over a sixteenth: 2 ** .5 * 2.6%."""
    x, weight, slope = (make(generator, *size) for size in ((256, 128), (192, 128), (256, 192)))
    exact = gradients_of(F.linear, x, weight, slope)
    found = gradients_of(lambda x, w: linear8(x, w, WHOLE), x, weight, slope)
    for near, wanted in zip(found, exact, strict=True):
        assert (near - wanted).norm() < 0.045 * wanted.norm()


def test_a_projection_of_blocks_equals_that_of_their_rows(generator):
    x, weight = normal(generator, 6, 5, 32), normal(generator, 16, 32)
    kept = x[:, 1:]
    found = linear8(kept, weight, WHOLE)
    assert found.shape == (6, 4, 16)
    assert torch.equal(found.flatten(0, 1), linear8(kept.flatten(0, 1), weight, WHOLE))


# --- a drafter ----------------------------------------------------------------------------------


def make_drafter():
    drafter = DFlashDraftModel(DrafterConfig(**SETTINGS))
    drafter.load_state_dict(make_weights(SETTINGS, torch.Generator().manual_seed(5)))
    return drafter


def test_names_and_weights_stay_what_they_were():
    plain, drafter = make_drafter(), make_drafter()
    train_in_fp8(drafter.layers, WHOLE)
    wanted, found = plain.state_dict(), drafter.state_dict()
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    changed = {n for n, m in drafter.named_modules() if isinstance(m, Linear8)}
    assert len(changed) == len(drafter.layers) * len(fp8.PROJECTIONS)
    assert not any("k_proj" in n or "v_proj" in n or n == "fc" for n in changed)


def test_a_drafter_that_does_not_train_is_exactly_the_plain_one(generator):
    plain, drafter = make_drafter().eval(), make_drafter()
    train_in_fp8(drafter.layers, WHOLE)
    x = normal(generator, 10, SETTINGS["hidden_size"])
    for layer, other in zip(drafter.layers, plain.layers, strict=True):
        assert not torch.equal(layer.mlp(x), other.mlp(x))
    drafter.eval()
    for layer, other in zip(drafter.layers, plain.layers, strict=True):
        assert torch.equal(layer.mlp(x), other.mlp(x))
        assert torch.equal(layer.self_attn.q_proj(x), other.self_attn.q_proj(x))


def trainer8(pieces, recipe, **options):
    made = trainer(pieces, **options)
    train_in_fp8(made.drafter.layers, recipe)
    return made


def gradients(step):
    return {n: p.grad.clone() for n, p in step.trainer.drafter.named_parameters()}


def assert_near(found, wanted, *, share):
    """Within a share of the norm of all."""
    for name, gradient in found.items():
        assert (gradient - wanted[name]).norm() <= share * wanted[name].norm(), name


@pytest.mark.parametrize("recipe", RECIPES[1::2])
def test_compiled_pieces_compute_the_same_and_layers_share_one_graph(recipe):
    pieces = graph.compiled(Pieces(sight=DenseSight.of), backend="aot_eager")
    plain, fused = (EagerStep(trainer8(p, recipe, device=CPU)) for p in (Pieces(), pieces))
    before = compilations()
    for batch in batches(2, device=CPU):
        plain(batch, lr=0)
        fused(batch, lr=0)
    # A last bit that differs may move a number to the next one that e4m3 has.
    assert_near(gradients(fused), gradients(plain), share=0.01)
    # Five functions of the drafter, one of them twice, and one for all updates.
    assert compilations() - before <= 7


def test_a_step_in_fp8_goes_where_the_exact_one_goes():
    """A tenth off, after four layers of products that are 4% off; noise, not direction."""
    exact, found = (EagerStep(trainer(Pieces(), device=CPU)) for _ in range(2))
    train_in_fp8(found.trainer.drafter.layers, WHOLE)
    batch = batches(1, device=CPU)[0]
    exact(batch, lr=0)
    found(batch, lr=0)
    near, wanted = (torch.cat([g.flatten() for g in gradients(s).values()]) for s in (found, exact))
    assert F.cosine_similarity(near, wanted, dim=0) > 0.98
    loss, exact_loss = (s.trainer.metrics.read()["loss"] for s in (found, exact))
    assert loss == pytest.approx(exact_loss, rel=5e-3)


# --- the head -----------------------------------------------------------------------------------

VOCAB, HIDDEN, SLOTS = 203, 64, 24


def make_chunk(generator, *, sharpness, device=CPU, dtype=torch.float32):
    """Rows that point at some tokens; a third of the labels is among them, a slot counts not."""
    head = make_frozen(generator, settings=SETTINGS)["head"].to(device, dtype)
    pointed = torch.randint(VOCAB, (SLOTS,), generator=generator)
    rows = normal(generator, SLOTS, HIDDEN).to(device, dtype)
    direction = head[pointed.to(device)].float()
    rows = rows + sharpness * (direction / direction.norm(dim=1, keepdim=True) ** 2).to(dtype)
    labels = torch.randint(VOCAB, (SLOTS,), generator=generator)
    labels[::3] = pointed[::3]
    weights = torch.rand(SLOTS, generator=generator)
    weights[5] = 0
    return rows, head, labels.to(device), weights.to(device)


def statistics_of(logits, labels):
    """What `head_kernel.measure` finds."""
    logits = logits.float()
    peak = logits.amax(dim=1)
    mass = torch.exp(logits - peak[:, None]).sum(dim=1)
    cross_entropy = torch.log(mass) + peak - logits.gather(1, labels[:, None])[:, 0]
    return cross_entropy, logits.argmax(dim=1) == labels, peak, mass


def slope8(logits_QW, labels, weights):
    found = statistics_of(logits_QW[:, :VOCAB], labels)
    return fp8.slope_of(logits_QW, labels, weights, *found, vocab=VOCAB)


def exact_slope(logits, labels, weights):
    return through_torch(logits.float().clone(), None, labels, lambda _: weights).slope


def test_logits_are_off_by_no_more_than_their_operands_were(generator):
    rows, head, _, _ = make_chunk(generator, sharpness=5)
    head8 = Head8.of(head)
    assert head8.width == 208
    out = torch.full((SLOTS, head8.width), torch.nan)
    head8.logits(rounded(rows), out=out)
    assert ((out[:, :VOCAB] - rows @ head.T).abs() <= product_error(rows, head)).all()
    assert (out[:, VOCAB:] == 0).all()


@pytest.mark.parametrize("sharpness", [0, 5, 20])
def test_a_slope_keeps_its_label_and_rounds_the_others_at_their_own_scale(generator, sharpness):
    rows, head, labels, weights = make_chunk(generator, sharpness=sharpness)
    logits = F.pad(rows @ head.T, (0, 5))
    wanted = exact_slope(logits[:, :VOCAB], labels, weights)
    others, label = slope8(logits, labels, weights)
    at = labels[:, None]
    torch.testing.assert_close(label, wanted.gather(1, at)[:, 0], rtol=1e-4, atol=1e-6)
    wanted.scatter_(1, at, 0)
    found = widened(others)
    assert (found.gather(1, at) == 0).all()
    assert (found[:, VOCAB:] == 0).all()
    # The scale is that of an upper bound: half a unit of the least numbers is 2^-10 of it.
    error = wanted * 2.0**-4 + 2.0**-10 * others.scale
    assert ((found[:, :VOCAB] - wanted).abs() <= error * (1 + 1e-3)).all()
    assert (widened(others)[5] == 0).all()


def test_a_row_that_does_not_count_is_zero_whatever_it_holds(generator):
    rows, head, labels, weights = make_chunk(generator, sharpness=5)
    rows[5] = torch.nan
    others, label = slope8(F.pad(rows @ head.T, (0, 5)), labels, weights)
    out = torch.empty(SLOTS, HIDDEN)
    Head8.of(head).gradient(fp8.Slope(others, label), labels, out=out)
    assert (out[5] == 0).all()
    assert torch.isfinite(out).all()


def test_a_token_that_is_certain_leaves_no_slope_and_no_nan(generator):
    logits = torch.zeros(4, 208)
    labels = torch.tensor([3, 50, 3, 202])
    logits.scatter_(1, labels[:, None], torch.tensor([[200.0], [88.0], [16.0], [8.0]]))
    others, label = slope8(logits, labels, torch.ones(4))
    wanted = exact_slope(logits[:, :VOCAB], labels, torch.ones(4))
    found = widened(others)[:, :VOCAB].scatter(1, labels[:, None], label[:, None])
    # The bound is a difference of two numbers near 1, so tiny slopes are known to 1e-7 only.
    torch.testing.assert_close(found, wanted, rtol=0.07, atol=2e-7)


@pytest.mark.parametrize("sharpness", [0, 5, 20])
def test_the_gradient_of_a_row_is_off_by_few_percent(generator, sharpness):
    rows, head, labels, weights = make_chunk(generator, sharpness=sharpness)
    logits = F.pad(rows @ head.T, (0, 5))
    out = torch.empty(SLOTS, HIDDEN)
    Head8.of(head).gradient(slope8(logits, labels, weights), labels, out=out)
    wanted = exact_slope(logits[:, :VOCAB], labels, weights) @ head
    # Where the label is certain the slope is a difference of numbers near 1: known to 1e-6 only.
    assert ((out - wanted).norm(dim=1) <= 0.05 * wanted.norm(dim=1) + 1e-6).all()


# --- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
def test_a_product_on_the_gpu_is_that_of_its_rounded_operands(generator, fast):
    a, b = (rounded(normal(generator, rows, 512).to(CUDA)) for rows in (90, 160))
    found = fp8.product(a, b, dtype=torch.bfloat16, fast=fast)
    wanted = widened(a) @ widened(b).T
    # 2^-9 for bf16; in the tensor cores about 14 bits stay of a sum.
    assert (found.float() - wanted).abs().max() <= 2.0**-8 * wanted.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("make", MAKERS)
def test_rounding_compiled_is_rounding(make, generator):
    x = make(generator, 128, 320).to(CUDA, torch.bfloat16)
    compiled = torch.compile(rounded, fullgraph=True, dynamic=False)
    for view in (x, x.T):
        found, wanted = compiled(view), rounded(view)
        torch.testing.assert_close(found.scale, wanted.scale, rtol=1e-6, atol=0)
        # Compiled divisions may differ by a last bit, which moves a number that lay half way.
        differs = (found.data.float() != wanted.data.float()).float().mean()
        assert differs < 1e-3
        assert ((widened(found) - view.float()).abs() <= error_of(view.float()) * 1.001).all()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_captured_step_in_fp8_goes_where_the_one_in_bf16_goes(recipe):
    plain = captured(dtype=torch.bfloat16)
    pieces = graph.compiled(Pieces(sight=sight_maker("block", CUDA)))
    step = GraphStep(trainer8(pieces, recipe, dtype=torch.bfloat16))
    step.capture(batches(1, seed=99)[0])
    for batch in batches(3):
        for one in (plain, step):
            one(batch, lr=0)
    assert step.counts() == {"captures": 1, "recompiles": 0}
    near, wanted = (torch.cat([g.flatten() for g in gradients(s).values()]) for s in (step, plain))
    assert F.cosine_similarity(near.float(), wanted.float(), dim=0) > 0.98


@pytest.mark.gpu
def test_the_head_on_the_gpu_gives_logits_and_their_gradient(generator):
    rows, head, labels, weights = make_chunk(
        generator, sharpness=5, device=CUDA, dtype=torch.bfloat16
    )
    head8 = Head8.of(head)
    logits = torch.empty(SLOTS, head8.width, dtype=torch.bfloat16, device=CUDA)
    head8.logits(rounded(rows), out=logits)
    slope = torch.compile(slope8, fullgraph=True, dynamic=False)(logits, labels, weights)
    out = torch.empty_like(rows)
    head8.gradient(slope, labels, out=out)
    # Logits of e4m3 are off by a few hundredths, of bf16 in the last place as well.
    torch.testing.assert_close(
        logits[:, :VOCAB].float(), rows.float() @ head.float().T, rtol=0.02, atol=0.5
    )
    wanted = exact_slope(logits[:, :VOCAB], labels, weights) @ head.float()
    assert ((out.float() - wanted).norm(dim=1) <= 0.05 * wanted.norm(dim=1) + 1e-3).all()
