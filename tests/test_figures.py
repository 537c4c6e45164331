"""Figures of answers against naive sums over their raw chains."""

import math
from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_fit.acceptance import Chain, is_looping
from dflash_fit.figures import Counting, Measured, by_dataset, figures, ratio_error

few = settings(max_examples=60, deadline=None)
B = 4
GREEDY = Counting(block_size=B, greedy=True)


@st.composite
def answers(draw):
    """An answer of raw passes; some loop, and some were written otherwise by the target alone."""
    passes = [(n, n + 1) for n in draw(st.lists(st.integers(0, B - 1), min_size=0, max_size=12))]
    total = sum(committed for _, committed in passes)
    tokens = [7] * (total + 1) if draw(st.booleans()) else list(range(total + 1))
    chain = Chain(accepted=tuple(a for a, _ in passes), committed=tuple(c for _, c in passes))
    return Measured(
        dataset=draw(st.sampled_from(["one", "two"])),
        part=draw(st.sampled_from([None, "x", "y"])),
        row=draw(st.integers(1, 4)),
        prompt=(1, 2, 3),
        plain=tuple(tokens if draw(st.booleans()) else [*tokens, 9]),
        tokens=tuple(tokens),
        chain=chain,
        offline=draw(st.sampled_from([chain, Chain(accepted=(2,), committed=(3,))])),
        plain_seconds=draw(st.floats(0.1, 5)),
        seconds=draw(st.floats(0.1, 5)),
    )


many = st.lists(answers(), min_size=1, max_size=10)


def micro(some, chain="chain"):
    """Committed tokens per target pass."""
    passes = [c for answer in some for c in getattr(answer, chain).committed]
    return pytest.approx(sum(passes) / len(passes)) if passes else None


@few
@given(many)
def test_figures_equal_naive_ones(some):
    found = figures(some, GREEDY)
    pairs = [zip(one.chain.accepted, one.chain.committed, strict=True) for one in some]
    passes = [pair for text in pairs for pair in text]
    read = [one for one in some if one.chain.committed]
    assert found["acceptance_length"] == micro(some)
    assert found["offline_acceptance_length"] == micro(some, "offline")
    if passes:
        macro = mean(sum(one.chain.committed) / len(one.chain.committed) for one in read)
        full = sum(accepted == B - 1 for accepted, _ in passes) / len(passes)
        assert found["acceptance_length_macro"] == pytest.approx(macro)
        assert found["full_blocks"] == pytest.approx(full)
        assert found["per_position"] == pytest.approx(
            [sum(a >= k for a, _ in passes) / len(passes) for k in range(1, B)]
        )
    assert found["target_passes"] == len(passes)
    assert found["answers"] == len(some)
    assert found["answer_tokens"] == sum(len(one.tokens) for one in some)
    assert found["prompts"] == len({(one.dataset, one.row) for one in some})
    differing = [one for one in some if one.plain != one.tokens]
    assert found["answers_differing"] == len(differing)
    assert found["identical_to_greedy"] is (not differing)


@few
@given(many)
def test_speeds_are_all_tokens_over_all_seconds(some):
    found = figures(some, GREEDY)
    plain = sum(len(one.plain) for one in some) / sum(one.plain_seconds for one in some)
    drafted = sum(len(one.tokens) for one in some) / sum(one.seconds for one in some)
    assert found["plain_tokens_per_second"] == pytest.approx(plain)
    assert found["tokens_per_second"] == pytest.approx(drafted)
    assert found["speedup"] == pytest.approx(drafted / plain)


@few
@given(many)
def test_looping_answers_are_counted_and_left_out(some):
    found = figures(some, GREEDY)
    straight = [one for one in some if not is_looping(one.tokens)]
    assert found["looping"] == pytest.approx(1 - len(straight) / len(some))
    assert found["acceptance_length_not_looping"] == micro(straight)
    wanted = figures(straight, GREEDY)["prompt_lookup"] if straight else None
    assert found["prompt_lookup_not_looping"] == wanted


def test_where_all_answers_loop_nothing_is_said_of_the_others():
    found = figures([measured([3] * 8, tokens=[7] * 33)], GREEDY)
    assert found["looping"] == 1.0
    assert found["acceptance_length_not_looping"] is None
    assert found["prompt_lookup_not_looping"] is None


def test_of_answers_of_one_token_nothing_is_said():
    """No pass followed the prompt, and there is no acceptance length below 1."""
    found = figures([measured([]), measured([], row=2)], GREEDY)
    none = ("acceptance_length", "acceptance_length_macro", "acceptance_length_not_looping")
    none += ("offline_acceptance_length", "prompt_lookup", "full_blocks", "acceptance_length_error")
    assert {found[name] for name in none} == {None}
    assert found["answer_tokens"] == 2


def test_drawn_answers_are_not_compared():
    found = figures([measured([0, 1])], Counting(block_size=B, greedy=False))
    assert found["identical_to_greedy"] is None
    assert found["answers_differing"] is None


def measured(accepted, *, tokens=None, dataset="one", part=None, row=1):
    chain = Chain(accepted=tuple(accepted), committed=tuple(n + 1 for n in accepted))
    text = tuple(tokens or range(1 + sum(chain.committed)))
    return Measured(
        dataset=dataset,
        part=part,
        row=row,
        prompt=(1, 2, 3),
        plain=text,
        tokens=text,
        chain=chain,
        offline=chain,
        plain_seconds=1.0,
        seconds=1.0,
    )


def test_of_answers_that_differ_the_widest_gap_is_told():
    some = [replace(measured([1]), gap=gap) for gap in (None, 0.5, 0.25)]
    assert figures(some, GREEDY)["answers_differing_gap"] == 0.5
    assert figures(some[:1], GREEDY)["answers_differing_gap"] is None


def test_micro_weighs_target_passes_and_macro_weighs_answers():
    some = [measured([3]), measured([0, 0, 0, 0], row=2)]
    found = figures(some, GREEDY)
    assert found["acceptance_length"] == pytest.approx((4 + 4) / (1 + 4))
    assert found["acceptance_length_macro"] == pytest.approx((4 + 1) / 2)


def test_prompt_lookup_proposes_as_many_tokens_as_the_drafter():
    """After 1 2 3 the prompt goes on with 4 ... 9, and so does the answer: B - 1 at a time."""
    text = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    answer = measured([0] * 8, tokens=text)
    again = replace(answer, prompt=text)
    assert again.lookup(block_size=B).accepted[2:] == (3, 2)
    assert again.lookup(block_size=B).accepted[:2] == (0, 0)


# --- standard errors ----------------------------------------------------------------------------


@few
@given(st.lists(st.floats(0, 10), min_size=2, max_size=20))
def test_the_error_of_a_ratio_over_equal_parts_is_that_of_the_mean(values):
    average = mean(values)
    squares = sum((value - average) ** 2 for value in values)
    wanted = math.sqrt(squares / (len(values) - 1) / len(values))
    assert ratio_error(values, [1] * len(values)) == pytest.approx(wanted, abs=1e-9)


def test_the_error_of_a_ratio_is_how_much_it_varies_from_sample_to_sample():
    """10,000 samples of 40 texts from a population of texts of unlike length."""
    import numpy as np

    rng = np.random.default_rng(0)
    passes = rng.integers(5, 60, size=(10_000, 40))
    tokens = passes * rng.normal(2.0, 0.4, size=passes.shape)
    spread = (tokens.sum(axis=1) / passes.sum(axis=1)).std()
    some = zip(tokens[:500], passes[:500], strict=True)
    told = mean(ratio_error(list(t), list(p)) for t, p in some)
    assert told == pytest.approx(spread, rel=0.05)


@few
@given(many)
def test_standard_errors_are_over_prompts_whose_turns_belong_together(some):
    found = figures(some, GREEDY)
    rows = {}
    for one in some:
        if one.chain.committed:
            rows.setdefault((one.dataset, one.row), []).append(one)
    tokens = [sum(sum(o.chain.committed) for o in own) for own in rows.values()]
    passes = [sum(len(o.chain.committed) for o in own) for own in rows.values()]
    if len(rows) < 2:
        assert found["acceptance_length_error"] is None
        assert found["acceptance_length_macro_error"] is None
        return
    rate = sum(tokens) / sum(passes)
    squares = sum((t - rate * p) ** 2 for t, p in zip(tokens, passes, strict=True))
    wanted = math.sqrt(len(rows) / (len(rows) - 1) * squares) / sum(passes)
    assert found["acceptance_length_error"] == pytest.approx(wanted)


def test_the_same_row_number_in_two_sets_is_two_prompts():
    some = [measured([1, 2], dataset="one"), measured([0, 3, 1], dataset="two")]
    assert figures(some, GREEDY)["acceptance_length_error"] is not None
    turns = [measured([1, 2]), measured([0, 3, 1])]
    assert figures(turns, GREEDY)["acceptance_length_error"] is None


# --- data sets and parts ------------------------------------------------------------------------


@few
@given(many)
def test_every_data_set_and_every_part_has_the_figures_of_its_own_answers(some):
    found = by_dataset(some, GREEDY)
    assert list(found) == list(dict.fromkeys(one.dataset for one in some))
    for name, values in found.items():
        own = [one for one in some if one.dataset == name]
        parts = values.pop("parts", {})
        assert values == figures(own, GREEDY)
        kinds = {one.part or "other" for one in own}
        assert set(parts) == (kinds if len(kinds) > 1 else set())
        for part, told in parts.items():
            mine = [one for one in own if (one.part or "other") == part]
            assert told == figures(mine, GREEDY)
