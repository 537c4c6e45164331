"""Matrix products in fp8: the projections of the draft layers, and the frozen head.

Both operands are e4m3, and every row that meets another has a scale of its own ("rowwise"), made
from what the row holds right now.  Only what goes into a product is rounded: weights, masters,
activations and what is saved between the passes stay as they were, and a drafter that is not
training computes as it will when it is served.

An experiment and not an option of `dflash fit`: on real states (results/fp8-curves-h200.json) 200
steps with the layers and the head in fp8 end at a loss of 5.12, where bf16 from three runs of other
precision or first weights ends between 4.78 and 5.03.  What it saves at 27B shapes is not measured
yet: `bench_fp8.py --parts step` does.

Letters: R rows and S what a product sums over; K and N inputs and outputs of a projection; Q slots
of a chunk of blocks, H hidden size, V vocabulary, W that padded to a multiple of 16.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

E4M3 = torch.float8_e4m3fn
MOST = 448.0  # the largest number that e4m3 has
MULTIPLE = 16  # every size of the operands of a product on a GPU but the rows of the first
TINY = 2.0**-100  # a row below this counts as this large: scales and their inverses stay normal

# Not k_proj and v_proj: the context goes through them as well, and they are 2% of a step's work.
PROJECTIONS = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Rounded(NamedTuple):
    """A matrix as it goes into a product: data * scale is what it was, to one part in 16."""

    data: Tensor  # e4m3 [R, S], contiguous
    scale: Tensor  # fp32 [R, 1]


def rounded(x_RS: Tensor) -> Rounded:
    """Each row scaled so that its largest number is the largest of e4m3.

    Give a transposed view to sum over what lies in the rows of x.  A row with a NaN or an infinity
    becomes NaN as a whole, in its scale.
    """
    most = x_RS.abs().amax(dim=1, keepdim=True).float().clamp(min=TINY)
    return Rounded((x_RS * (MOST / most)).to(E4M3).contiguous(), most / MOST)


def product(
    a: Rounded, b: Rounded, *, dtype: torch.dtype, fast: bool, out: Tensor | None = None
) -> Tensor:
    """a @ b.T, [rows of a, rows of b].

    `fast` sums within the tensor cores, in about 14 bits; otherwise fp32 takes over every 128.
    """
    # `scaled_mm` of torch.nn.functional is the same and cannot write where it is told to.
    given: dict[str, Any] = {} if out is None else {"out": out}
    return torch._scaled_mm(
        a.data, b.data.T, a.scale, b.scale.T, out_dtype=dtype, use_fast_accum=fast, **given
    )


# --- projections --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Which of the three products of a projection are fp8; the others stay as they were."""

    forward: bool
    input_gradient: bool
    weight_gradient: bool  # sums over rows: both operands are rounded again, the other way round
    fast_gradients: bool = False  # sum gradients as the forward pass sums


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RK: Tensor, weight_NK: Tensor, recipe: Recipe) -> Tensor:
        ctx.save_for_backward(x_RK, weight_NK)
        ctx.recipe = recipe
        if recipe.forward:
            return product(rounded(x_RK), rounded(weight_NK), dtype=x_RK.dtype, fast=True)
        return x_RK @ weight_NK.T

    @staticmethod
    def backward(ctx: Any, slope_RN: Tensor) -> tuple[Tensor, Tensor, None]:
        x_RK, weight_NK = ctx.saved_tensors
        how = {"dtype": slope_RN.dtype, "fast": ctx.recipe.fast_gradients}
        if ctx.recipe.input_gradient:
            of_input = product(rounded(slope_RN), rounded(weight_NK.T), **how)
        else:
            of_input = slope_RN @ weight_NK
        if ctx.recipe.weight_gradient:
            of_weight = product(over_rows(slope_RN), over_rows(x_RK), **how)
        else:
            of_weight = slope_RN.T @ x_RK
        return of_input, of_weight, None


def over_rows(x_RS: Tensor) -> Rounded:
    """Rounded to be summed over its rows; their number, and no other size, may be any."""
    return rounded(F.pad(x_RS.T, (0, -len(x_RS) % MULTIPLE)))


def linear8(x: Tensor, weight_NK: Tensor, recipe: Recipe) -> Tensor:
    """x [..., K] @ weight.T, and on the way back its gradients, by the recipe."""
    y: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), weight_NK, recipe)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], len(weight_NK))


class Linear8(nn.Linear):
    """A projection that follows a recipe while it trains, and is a plain one otherwise."""

    recipe: Recipe

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return linear8(x, self.weight, self.recipe)
        return super().forward(x)


def train_in_fp8(
    layers: nn.Module, recipe: Recipe, *, projections: tuple[str, ...] = PROJECTIONS
) -> None:
    """Let projections below `layers` follow a recipe; names, weights and exports stay the same."""
    for name, module in layers.named_modules():
        if name.rpartition(".")[2] in projections:
            assert isinstance(module, nn.Linear), name
            assert module.bias is None, name
            module.__class__ = Linear8
            module.recipe = recipe


# --- the frozen head ----------------------------------------------------------------------------


class Slope(NamedTuple):
    """weight * (softmax - one-hot), the label's column apart.

    Most of a gradient is the label's row of the head.  Taken as it is, one row for each slot, the
    gradient is off by 0.5% to 2%; taken from the rounded head with all others, by 3% to 4%.
    """

    others: Rounded  # [Q, W], 0 at the label
    label: Tensor  # fp32 [Q]


def slope_of(
    logits_QW: Tensor,
    labels_Q: Tensor,
    weights_Q: Tensor,
    cross_entropy_Q: Tensor,
    correct_Q: Tensor,
    peak_Q: Tensor,
    mass_Q: Tensor,
    *,
    vocab: int,
) -> Slope:
    """One pass over logits whose statistics are known (`head_kernel.Statistics`); compile it.

    No pass looks for the largest probability of a row: it is the peak's, and where the label is
    the peak it is at most what the label leaves.  Rows of weight 0 become 0 whatever they hold.
    """
    missed_Q = -torch.expm1(-cross_entropy_Q)  # 1 - probability of the label
    most_Q = torch.where(correct_Q, missed_Q, 1 / mass_Q).clamp(min=TINY)
    counts_Q = weights_Q != 0
    column = torch.arange(logits_QW.shape[1], device=logits_QW.device)
    kept = counts_Q[:, None] & (column != labels_Q[:, None]) & (column < vocab)
    larger_Q = MOST / (mass_Q * most_Q)
    share = torch.exp(logits_QW.float() - peak_Q[:, None]) * larger_Q[:, None]
    # The clamp: `missed` is a difference, and where it is tiny it may be too small.
    data = torch.where(kept, share.clamp(max=MOST), 0.0).to(E4M3)
    scale_Q = torch.where(counts_Q, weights_Q * most_Q / MOST, 0.0)
    label_Q = torch.where(counts_Q, -weights_Q * missed_Q, 0.0)
    return Slope(Rounded(data, scale_Q[:, None]), label_Q)


@dataclass(frozen=True, kw_only=True)
class Head8:
    """The head [V, H], rounded once for each of its two products."""

    exact: Tensor  # [V, H]
    over_hidden: Rounded  # [W, H], for logits
    over_vocab: Rounded  # [H, W], for gradients of rows

    @classmethod
    @torch.no_grad()
    def of(cls, head: Tensor) -> Self:
        padded = F.pad(head, (0, 0, 0, -len(head) % MULTIPLE))
        return cls(exact=head, over_hidden=rounded(padded), over_vocab=rounded(padded.T))

    @property
    def width(self) -> int:
        """W: what a row of logits takes."""
        return len(self.over_hidden.data)

    def logits(self, rows: Rounded, *, out: Tensor) -> Tensor:
        """Logits of rows [Q, H] in a buffer [Q, W]; beyond V they are 0."""
        return product(rows, self.over_hidden, dtype=out.dtype, fast=True, out=out)

    def gradient(self, slope: Slope, labels_Q: Tensor, *, out: Tensor) -> Tensor:
        """Slope @ head, [Q, H]."""
        # Not fast: a sum over 248,320 in 14 bits loses what each of them adds.
        others = product(slope.others, self.over_vocab, dtype=out.dtype, fast=False)
        label = slope.label.to(out.dtype)[:, None]
        return torch.addcmul(others, self.exact[labels_Q], label, out=out)
