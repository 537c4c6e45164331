"""Which differences count: of a dense target every token's, of one with experts all but a few."""

import pytest
import torch
from families import FAMILIES, load, save_family
from routing import OtherKernels, all_but_tied
from torch import Tensor

from dflash_cache import proofs
from dflash_cache.errors import ProofError
from dflash_cache.tolerance import (
    ROUTED_SHARE,
    ROUTED_WORST,
    TOLERANCE,
    Difference,
    Tolerance,
    largest,
    tolerance_of,
    tolerance_of_stored,
)

LIMIT = TOLERANCE["bfloat16"]
DENSE, ROUTED = Tolerance(limit=LIMIT), Tolerance(limit=LIMIT, routed=True)
LAYERS = [1, 3, 5]


def states(tokens: int) -> Tensor:
    return torch.randn(tokens, 32, generator=torch.Generator().manual_seed(0))


def off(wanted: Tensor, *errors: float) -> Tensor:
    """The same states, the first tokens off by these relative errors."""
    found = wanted.clone()
    for token, error in enumerate(errors):
        found[token] *= 1 + error
    return found


# --- the rule -------------------------------------------------------------------------------------


def test_of_a_dense_target_no_token_may_be_off():
    wanted = states(100)
    assert DENSE.same(off(wanted, LIMIT / 2), wanted)
    assert not DENSE.same(off(wanted, LIMIT * 1.1), wanted)


@pytest.mark.parametrize(("tokens", "spared"), [(100, 10), (32, 4), (7, 1), (1, 1)])
def test_of_a_routed_target_a_small_share_may_be_off(tokens, spared):
    wanted = states(tokens)
    assert spared - 1 < ROUTED_SHARE * tokens <= spared
    assert ROUTED.same(off(wanted, *[0.3] * spared), wanted)
    if tokens > spared:
        assert not ROUTED.same(off(wanted, *[0.3] * (spared + 1)), wanted)


@pytest.mark.parametrize("error", [ROUTED_WORST * 1.1, torch.nan, torch.inf])
def test_none_of_them_may_be_off_as_far_as_another_tokens_state(error):
    wanted = states(100)
    assert ROUTED.same(off(wanted, ROUTED_WORST * 0.9), wanted)
    assert not ROUTED.same(off(wanted, error), wanted)


def test_what_is_measured_is_the_worst_token_and_the_share_beyond():
    wanted = states(50)
    for tolerance, ruling in ((DENSE, 0.4), (ROUTED, 0.1)):
        found = tolerance.difference(off(wanted, 0.4, 0.2, 0.3, 0.1, 0.1, 0.1), wanted)
        assert found.worst == pytest.approx(0.4, rel=1e-4)
        assert found.beyond == pytest.approx(3 / 50)
        assert found.ruling == pytest.approx(ruling, rel=1e-4)
    assert DENSE.told(found) == "0.4 (relative)"
    assert ROUTED.told(found) == "0.4 (relative; 6% of the tokens by more than 0.15)"


def test_of_several_planes_each_number_is_the_largest_and_the_one_that_rules_is_blamed():
    wanted = [states(20)] * 3
    found = [off(wanted[0], *[0.2] * 19), off(wanted[0], 0.6), off(wanted[0], 0.45)]
    measured = ROUTED.differences(found, wanted)
    assert largest(measured).worst == pytest.approx(0.6, rel=1e-4)
    assert largest(measured).beyond == pytest.approx(19 / 20)
    assert ROUTED.furthest(measured) == 1
    assert ROUTED.furthest(measured[::2]) == 0
    assert ROUTED.furthest(measured[2:]) is None
    assert largest([]) == Difference()


# --- whose rule it is -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_has_experts_where_it_routes(tmp_path, family):
    target = load(save_family(tmp_path / family, family))
    assert target.has_experts == ("moe" in family)
    wanted = LIMIT if "moe" in family else TOLERANCE["float32"]
    assert tolerance_of(target) == Tolerance(limit=wanted, routed="moe" in family)
    assert tolerance_of_stored(target, lossy=True) == Tolerance(limit=LIMIT, routed="moe" in family)


def test_a_target_whose_experts_were_cut_away_is_dense(tmp_path):
    target = load(save_family(tmp_path / "moe", "qwen3_moe", mlp_only_layers=[0, 1]))
    assert target.has_experts
    target.keep_up_to(1)
    assert not target.has_experts


# --- a router that is all but tied ----------------------------------------------------------------


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> OtherKernels:
    return all_but_tied(tmp_path_factory.mktemp("tied") / "moe")


@pytest.fixture(scope="module")
def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 310, (length,), generator=generator) for length in (60, 90, 30)]


def test_tokens_that_go_to_other_experts_pass_and_are_counted(tied, rows):
    found = proofs.prove_padding(tied, rows, LAYERS)
    assert LIMIT < found.worst < ROUTED_WORST
    assert 0 < found.beyond < ROUTED_SHARE


def test_without_experts_such_tokens_fail(tied, rows, monkeypatch):
    monkeypatch.setattr(OtherKernels, "has_experts", False)
    with pytest.raises(ProofError, match="padding leaks into them"):
        proofs.prove_padding(tied, rows, LAYERS)


class MoreLeaks(OtherKernels):
    """A fifth of the tokens see a little of the padding."""

    def hidden_states(self, input_ids, layer_ids):
        states = [plane.clone() for plane in super().hidden_states(input_ids, layer_ids)]
        if len(input_ids) > 1:
            states[0][:, ::5] += 0.3 * states[0][:, ::5].roll(1, -1)
        return states


class OneWild(OtherKernels):
    """One token has the state of another."""

    def hidden_states(self, input_ids, layer_ids):
        states = [plane.clone() for plane in super().hidden_states(input_ids, layer_ids)]
        if len(input_ids) > 1:
            states[0][:, 7] = states[0][:, 5]
        return states


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (MoreLeaks, r"20% of the tokens by more than 0\.15\): padding leaks into them .*all but"),
        (
            OneWild,
            r"2% of the tokens by more than 0\.15\): padding leaks into them .*1 of 60 token",
        ),
    ],
)
def test_what_touches_more_tokens_or_changes_one_beyond_that_fails(tied, rows, kind, told):
    with pytest.raises(ProofError, match=f"target layer 1: a row of 60 tokens .*{told}"):
        proofs.prove_padding(kind(**vars(tied)), rows, LAYERS)
