"""Acceptance counted against naive loops, token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_fit.acceptance import (
    Chain,
    is_looping,
    leading_true,
    prompt_lookup,
    summarize,
    supervised_spans,
    walk,
)

few = settings(max_examples=80, deadline=None)


@st.composite
def texts(draw):
    """Spans of a text, and how many drafts of a block of B would be accepted at each position."""
    block = draw(st.integers(2, 8))
    spans, at = [], 0
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 20)), max_size=4)):
        spans.append((at + gap, at + gap + length))
        at += gap + length + 1
    accepted = draw(st.lists(st.integers(0, block - 1), min_size=at + 1, max_size=at + 1))
    return block, spans, accepted


def slow_walk(accepted, spans):
    """One token after the other: drafts while they agree, then one of the target's own."""
    passes = []
    for start, end in spans:
        at = start
        while at < end:
            drafts = own = 0
            while drafts < accepted[at] and at + drafts < end:
                drafts += 1
            if at + drafts < end:
                own = 1
            passes.append((drafts, drafts + own))
            at += drafts + own
    return passes


@few
@given(texts())
def test_a_walk_equals_a_slow_one(text):
    _, spans, accepted = text
    chain = walk(accepted.__getitem__, spans)
    assert list(zip(chain.accepted, chain.committed, strict=True)) == slow_walk(accepted, spans)


@few
@given(texts())
def test_committed_tokens_sum_to_the_text_without_the_first_of_each_span(text):
    block, spans, accepted = text
    chain = walk(accepted.__getitem__, spans)
    assert sum(chain.committed) == sum(end - start for start, end in spans)
    assert all(1 <= committed <= block for committed in chain.committed)


def test_nothing_accepted_is_an_acceptance_length_of_one():
    assert walk(lambda _: 0, [(3, 20), (30, 31)]).length == 1.0


def test_everything_accepted_is_an_acceptance_length_of_the_block_size():
    assert walk(lambda _: 7, [(5, 5 + 8 * 4)]).length == 8.0


def test_the_last_pass_commits_only_what_is_left():
    chain = walk(lambda _: 3, [(0, 6)])
    assert (chain.accepted, chain.committed) == ((3, 2), (4, 2))


@few
@given(st.lists(st.booleans(), max_size=40))
def test_spans_are_the_runs_of_at_least_two_supervised_tokens(mask):
    slow, start = [], None
    for position, supervised in enumerate([*mask, False]):
        if supervised and start is None:
            start = position
        if not supervised and start is not None:
            if position - start >= 2:
                slow.append((start, position - 1))
            start = None
    assert supervised_spans(np.array(mask, dtype=bool)) == slow


@few
@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=9))
def test_leading_true_counts_up_to_the_first_mistake(rows):
    slow = [next((i for i, right in enumerate(row) if not right), len(row)) for row in rows]
    assert leading_true(np.array(rows)).tolist() == slow


# --- summary ------------------------------------------------------------------------------------


@few
@given(st.lists(texts().filter(lambda text: text[1]), min_size=1, max_size=4))
def test_a_summary_equals_a_slow_one(several):
    passes = [slow_walk(accepted, spans) for _, spans, accepted in several]
    chains = [walk(accepted.__getitem__, spans) for _, spans, accepted in several]
    flat = [one for text in passes for one in text]
    lengths = [sum(c for _, c in text) / len(text) for text in passes]
    found = summarize(chains, block_size=8)
    assert found == {
        "acceptance_length": pytest.approx(sum(c for _, c in flat) / len(flat)),
        "acceptance_length_macro": pytest.approx(sum(lengths) / len(lengths)),
        "per_position": pytest.approx(
            [sum(drafts >= k for drafts, _ in flat) / len(flat) for k in range(1, 8)]
        ),
        "target_passes": len(flat),
        "tokens": sum(c for _, c in flat),
        "texts": len(several),
    }


def test_texts_without_a_target_pass_are_left_out():
    empty, chain = Chain(accepted=(), committed=()), Chain(accepted=(1,), committed=(2,))
    assert summarize([empty, chain], block_size=3) == summarize([chain], block_size=3)


def test_nothing_at_all_has_an_acceptance_length_of_zero():
    found = summarize([], block_size=3)
    assert (found["acceptance_length"], found["texts"]) == (0.0, 0)


# --- prompt lookup ------------------------------------------------------------------------------


def slow_lookup(tokens, start, *, ngram, drafts):
    """Search backwards for the n-gram at every target pass."""
    passes, at = [], start
    while at < len(tokens) - 1:
        text, proposal = tokens[: at + 1], []
        for begin in range(len(text) - ngram - 1, -1, -1):
            if text[begin : begin + ngram] == text[-ngram:]:
                proposal = text[begin + ngram :][:drafts]
                break
        taken = 0
        for proposed, token in zip(proposal, tokens[at + 1 :], strict=False):
            if proposed != token:
                break
            taken += 1
        new = min(taken + 1, len(tokens) - 1 - at)
        passes.append((taken, new))
        at += new
    return passes


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=2, max_size=40),
    st.integers(0, 10),
    st.integers(1, 4),
    st.integers(1, 7),
)
def test_prompt_lookup_equals_a_slow_search(tokens, start, ngram, drafts):
    start = min(start, len(tokens) - 1)
    chain = prompt_lookup(tokens, start, ngram=ngram, drafts=drafts)
    found = list(zip(chain.accepted, chain.committed, strict=True))
    assert found == slow_lookup(tokens, start, ngram=ngram, drafts=drafts)


def test_prompt_lookup_copies_an_answer_that_stands_in_the_prompt():
    text = list(range(20))
    chain = prompt_lookup([*text, *text], 20 + 2, ngram=3, drafts=7)
    assert chain.accepted[0] == 7


# --- loops --------------------------------------------------------------------------------------


@few
@given(st.lists(st.integers(0, 1), max_size=40), st.integers(1, 6))
def test_looping_is_under_70_percent_distinct_n_grams(tokens, ngram):
    grams = [tokens[i : i + ngram] for i in range(len(tokens) - ngram + 1)]
    distinct = [gram for i, gram in enumerate(grams) if gram not in grams[:i]]
    assert is_looping(tokens, ngram=ngram) == (10 * len(distinct) < 7 * len(grams))


@pytest.mark.parametrize("answer", [[], [1] * 7, list(range(100))])
def test_answers_that_are_empty_short_or_all_new_are_not_looping(answer):
    assert not is_looping(answer)


def test_exactly_70_percent_is_not_looping():
    assert not is_looping([0, 1, 2, 3, 4, 5, 6, 0, 0, 0], ngram=1)


def test_an_answer_that_repeats_a_sentence_is_looping():
    assert is_looping(list(range(10)) * 8)
