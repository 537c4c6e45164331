"""Decoding writes the target's own text: rows, rollback, stops and caches do not matter.

The oracle is greedy text without any cache.  Beside a random drafter, which is hardly ever right,
there is one that knows the text and errs where it is told to.
"""

import math
from itertools import count

import pytest
import torch
from tiny_targets import FAMILIES, make_drafter, make_target, without_cache

from dflash_cache.errors import TargetError
from dflash_fit import decode, target_cache
from dflash_fit.acceptance import Chain
from dflash_fit.decode import greedy, plain_batch, speculate, speculate_batch
from dflash_fit.drafts import DraftContext, block_logits
from dflash_fit.target_cache import (
    STATES,
    Rewind,
    TargetCache,
    attention_layers,
    empty_cache,
    recurrent_layers,
)
from dflash_fit.target_session import TargetSession
from dflash_fit.ties import answer_gap, chain_gap

LENGTH, B = 20, 5
PROMPT_LENGTHS = (3, 9, 1, 6)
every_family = pytest.mark.parametrize("name", FAMILIES)
every_cache = pytest.mark.parametrize("cache", ["dynamic", "static"])


class Texts:
    """A target, a drafter, prompts of unlike length, and what greedy decoding makes of them."""

    def __init__(self, name):
        self.target = make_target(name)
        self.drafter, self.frozen = make_drafter(self.target)
        generator = torch.Generator().manual_seed(1)
        self.prompts = [torch.randint(47, (n,), generator=generator) for n in PROMPT_LENGTHS]
        self.answers = [without_cache(self.target, prompt, LENGTH) for prompt in self.prompts]

    def together(self, *, length=LENGTH, stop_ids=(), cache="dynamic"):
        return speculate_batch(
            self.target,
            self.drafter,
            self.frozen,
            self.prompts,
            max_new_tokens=length,
            stop_ids=stop_ids,
            cache=cache,
        )

    def alone(self, row, *, length=LENGTH, stop_ids=(), cache="dynamic"):
        return speculate(
            self.target,
            self.drafter,
            self.frozen,
            self.prompts[row],
            max_new_tokens=length,
            stop_ids=stop_ids,
            cache=cache,
        )


made: dict[str, Texts] = {}


@pytest.fixture
def texts(name):
    if name not in made:
        made[name] = Texts(name)
    return made[name]


def know_the_text(monkeypatch, texts, accepted, rows=None):
    """Drafts are the greedy text, but wrong behind so many slots, round by round and row by row."""
    rows = range(len(texts.prompts)) if rows is None else rows
    made = count()

    class Numbered(DraftContext):
        def __init__(self, drafter, frozen):
            super().__init__(drafter, frozen)
            self.row, self.rounds = rows[next(made)], count()

    def draft(contexts, anchors):
        blocks = []
        for context, anchor in zip(contexts, anchors.tolist(), strict=True):
            at = context.length - len(texts.prompts[context.row])
            answer = texts.answers[context.row]
            assert answer[at] == anchor
            block = [*answer[at + 1 : at + B], *[0] * B][: B - 1]
            right = accepted(context.row, next(context.rounds))
            if right < B - 1:
                block[right] = (block[right] + 1) % 48
            blocks.append(block)
        return torch.tensor(blocks)

    monkeypatch.setattr(decode, "DraftContext", Numbered)
    monkeypatch.setattr(decode, "draft_blocks", draft)


def in_turn(row, number):
    """Every number of accepted drafts, in another order in every row."""
    return (2 * row + 3 * number) % B


def planned(row, plan, length=LENGTH):
    """The accepted drafts of every round until the answer is full."""
    found, left = [], length - 1
    while left:
        right = plan(row, len(found))
        found.append(min(right, left))
        left -= min(right + 1, left)
    return tuple(found)


def passes_of(one):
    """Target passes after reading the prompt."""
    return len(one.chain.committed)


def cut(answer, stop_ids, length=LENGTH):
    """An answer up to its first stop token."""
    for at, token in enumerate(answer[:length]):
        if token in stop_ids:
            return answer[: at + 1]
    return answer[:length]


@every_family
def test_plain_decoding_writes_what_forwards_without_a_cache_write(texts):
    alone = [
        greedy(texts.target, prompt, max_new_tokens=LENGTH, stop_ids=()).tokens
        for prompt in texts.prompts
    ]
    assert alone == texts.answers
    assert min(len(set(answer)) for answer in texts.answers) > 5  # not one word for ever


@every_family
@every_cache
def test_plain_decoding_of_a_batch_writes_the_same(texts, cache):
    stop_ids = {texts.answers[0][4]}
    found = plain_batch(
        texts.target, texts.prompts, max_new_tokens=LENGTH, stop_ids=stop_ids, cache=cache
    )
    assert [one.tokens for one in found] == [cut(answer, stop_ids) for answer in texts.answers]
    assert all(one.chain.accepted == (0,) * (len(one.tokens) - 1) for one in found)


@every_family
@every_cache
def test_a_random_drafter_changes_no_token(texts, cache):
    assert [one.tokens for one in texts.together(cache=cache)] == texts.answers
    alone = [texts.alone(row, cache=cache).tokens for row in range(len(texts.prompts))]
    assert alone == texts.answers


@every_family
@every_cache
def test_whatever_is_accepted_a_batch_writes_greedy_text(texts, cache, monkeypatch):
    know_the_text(monkeypatch, texts, in_turn)
    found = texts.together(cache=cache)
    assert [one.tokens for one in found] == texts.answers
    wanted = [planned(row, in_turn) for row in range(len(texts.prompts))]
    assert [one.chain.accepted for one in found] == wanted
    assert {n for chain in wanted for n in chain} == set(range(B))


@every_family
@every_cache
def test_whatever_is_accepted_a_text_alone_is_decoded_alike(texts, cache, monkeypatch):
    for row, answer in enumerate(texts.answers):
        know_the_text(monkeypatch, texts, in_turn, rows=[row])
        found = texts.alone(row, cache=cache)
        assert found.tokens == answer
        assert found.chain.accepted == planned(row, in_turn)


@every_family
@pytest.mark.parametrize("right", range(B))
def test_always_as_many_are_accepted_as_are_right(texts, right, monkeypatch):
    know_the_text(monkeypatch, texts, lambda row, number: right)
    found = texts.together()
    assert [one.tokens for one in found] == texts.answers
    assert {passes_of(one) for one in found} == {math.ceil((LENGTH - 1) / (right + 1))}


@pytest.mark.parametrize("name", ["llama", "qwen3.5 hybrid"])
@pytest.mark.parametrize("at", range(9))
def test_a_stop_token_ends_an_answer_wherever_it_stands_in_a_block(texts, at, monkeypatch):
    # Right drafts in whole blocks: the stop is the first token, any slot, or the target's own.
    know_the_text(monkeypatch, texts, lambda row, number: B - 1)
    stop_ids = {answer[at] for answer in texts.answers[:2]}
    wanted = [cut(answer, stop_ids) for answer in texts.answers]
    assert [one.tokens for one in texts.together(stop_ids=stop_ids)] == wanted
    know_the_text(monkeypatch, texts, lambda row, number: B - 1, rows=[1])
    assert texts.alone(1, stop_ids=stop_ids).tokens == wanted[1]


@pytest.mark.parametrize("name", ["llama", "qwen3.5 hybrid"])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 6, 7, 11])
def test_an_answer_never_has_more_tokens_than_asked_for(texts, length, monkeypatch):
    know_the_text(monkeypatch, texts, in_turn)
    found = texts.together(length=length)
    assert [one.tokens for one in found] == [answer[:length] for answer in texts.answers]
    wanted = [planned(row, in_turn, length) for row in range(len(texts.prompts))]
    assert [one.chain.accepted for one in found] == wanted
    assert [sum(one.chain.committed) for one in found] == [length - 1] * len(found)


@every_family
def test_all_rows_go_through_the_target_in_one_pass(texts, monkeypatch):
    shapes = []
    hook = texts.target.decoder.register_forward_pre_hook(
        lambda module, given, named: shapes.append(tuple(named["input_ids"].shape)),
        with_kwargs=True,
    )
    know_the_text(monkeypatch, texts, in_turn)
    found = texts.together()
    hook.remove()
    prompts, rounds = shapes[: len(PROMPT_LENGTHS)], shapes[len(PROMPT_LENGTHS) :]
    assert prompts == [(1, n) for n in PROMPT_LENGTHS]
    assert len(rounds) == max(passes_of(one) for one in found)
    # A text that has ended is read no more.
    passes = [passes_of(one) for one in found]
    assert [rows for rows, _ in rounds] == [sum(n > i for n in passes) for i in range(len(rounds))]


@every_family
@every_cache
def test_no_text_stands_beyond_its_last_token(texts, cache, monkeypatch):
    """Beside a text that goes on: a target that learned its positions has none beyond."""
    prompts = [texts.prompts[1], texts.prompts[1].flip(0)]
    answers = [without_cache(texts.target, prompt, LENGTH) for prompt in prompts]
    monkeypatch.setattr(texts, "prompts", prompts)
    monkeypatch.setattr(texts, "answers", answers)
    seen = []
    hook = texts.target.decoder.register_forward_pre_hook(
        lambda module, given, named: seen.append(named.get("position_ids")), with_kwargs=True
    )
    know_the_text(monkeypatch, texts, lambda row, number: (0, in_turn(row, number))[row])
    found = texts.together(cache=cache)
    hook.remove()
    assert [one.tokens for one in found] == answers
    assert max(int(ids.max()) for ids in seen if ids is not None) == len(prompts[0]) + LENGTH - 1


@pytest.mark.parametrize("name", ["llama"])
def test_before_every_draft_each_context_is_all_but_the_pending_anchor(texts, monkeypatch):
    know_the_text(monkeypatch, texts, in_turn)
    seen, draft = [], decode.draft_blocks

    def record(contexts, anchors):
        rows = [context.row for context in contexts]
        seen.extend(zip(rows, [c.length for c in contexts], anchors.tolist(), strict=True))
        return draft(contexts, anchors)

    monkeypatch.setattr(decode, "draft_blocks", record)
    for row, one in enumerate(texts.together()):
        starts = [sum(one.chain.committed[:i]) for i in range(passes_of(one))]
        wanted = [(PROMPT_LENGTHS[row] + start, one.tokens[start]) for start in starts]
        assert [(length, anchor) for r, length, anchor in seen if r == row] == wanted


@pytest.mark.parametrize("name", ["llama"])
def test_tokens_come_to_the_host_as_often_for_many_texts_as_for_one(texts, monkeypatch):
    """Each of them waits until the device has done all that it was given."""
    original, waits = torch.Tensor.tolist, []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: waits.append(self) or original(self))
    passes = max(passes_of(one) for one in texts.together())
    assert len(waits) <= 2 * passes + 1


# --- ties ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama"])
def test_the_gap_of_answers_is_that_of_the_two_tokens_where_they_part(texts):
    prompt, answer = texts.prompts[1], texts.answers[1]
    assert answer_gap(texts.target, prompt, answer, answer) is None
    other = [*answer[:7], (answer[7] + 1) % 48, *answer[8:]]
    sizes = []
    hook = texts.target.model.lm_head.register_forward_hook(
        lambda module, given, output: sizes.append(output.shape[1])
    )
    gap = answer_gap(texts.target, prompt, answer, other)
    hook.remove()
    assert sizes == [1]  # logits of a whole text are gigabytes
    logits = texts.target.logits(torch.cat([prompt, torch.tensor(answer[:7])])[None])[0, -1]
    assert gap.position == 7
    assert gap.logits == pytest.approx(float(logits[answer[7]] - logits[other[7]]), rel=1e-4)
    assert gap.logits > 0.01


@pytest.mark.parametrize("name", ["llama"])
def test_the_gap_of_chains_is_that_of_the_draft_that_only_one_accepted(texts):
    answer = texts.alone(1)
    common = (texts.target, texts.drafter, texts.frozen, texts.prompts[1], answer.tokens)
    assert chain_gap(*common, decoded=answer.chain, offline=answer.chain) is None
    accepted = list(answer.chain.accepted)
    start = sum(answer.chain.committed[:3])
    accepted[3] += 2
    other = Chain(accepted=tuple(accepted), committed=answer.chain.committed)
    gap = chain_gap(*common, decoded=answer.chain, offline=other)
    assert gap.position == start + answer.chain.accepted[3] + 1
    context = DraftContext(texts.drafter, texts.frozen)
    text = torch.cat([texts.prompts[1], torch.tensor(answer.tokens[:start])])
    states = texts.target.hidden_states(text[None], texts.drafter.config.target_layer_ids)
    context.extend(torch.stack([state[0].bfloat16() for state in states]))
    slots = block_logits([context], torch.tensor([answer.tokens[start]]))[0]
    logits = slots[answer.chain.accepted[3]]
    # The draft was rejected, so the best other token is the draft.
    wanted = float(logits.max() - logits[answer.tokens[gap.position]])
    assert gap.logits == pytest.approx(wanted, rel=1e-4)
    assert gap.logits > 0


# --- the cache ----------------------------------------------------------------------------------


def fresh(target, text):
    """The library's own cache after one forward over a text."""
    session = TargetSession(target, (), cache="dynamic")
    session.start([text], room=0)
    return session.cache.cache


def assert_row_is(cache, row, wanted, length):
    """The row of a cache is what the cache of its text alone is; padding aside."""
    width = max(cache.lengths)
    for index, layer in attention_layers(wanted).items():
        for name in ("keys", "values"):
            found = getattr(cache.cache.layers[index], name)[row, :, width - length : width]
            torch.testing.assert_close(found, getattr(layer, name)[0], atol=2e-5, rtol=1e-4)
    for index, layer in recurrent_layers(wanted).items():
        for name in STATES:
            found = getattr(cache.cache.layers[index], name)[0][row]
            wanted_state = getattr(layer, name)[0][0]
            torch.testing.assert_close(found, wanted_state, atol=2e-5, rtol=1e-4)


@every_family
@every_cache
@pytest.mark.parametrize(
    "counts",
    [
        {0: 1, 1: 3, 2: 5, 3: 2},
        {0: 5, 1: 5, 2: 5, 3: 5},
        {0: 2, 1: 2, 2: 2, 3: 2},
        {0: 4, 2: 1, 3: 5},
        {2: 3},
        {1: 5},
    ],
    ids=str,
)
def test_after_taking_back_the_cache_is_that_of_the_tokens_kept(texts, cache, counts):
    generator = torch.Generator().manual_seed(2)
    block = torch.randint(47, (len(texts.prompts), B), generator=generator)
    with torch.inference_mode():
        session = TargetSession(texts.target, (), cache=cache)
        session.start(texts.prompts, room=B)
        session.read(block, rooms=[B] * len(block))
        session.keep(counts, read=B)
        assert session.cache.lengths == [PROMPT_LENGTHS[row] + n for row, n in counts.items()]
        for row, (old, kept) in enumerate(counts.items()):
            text = torch.cat([texts.prompts[old], block[old, :kept]])
            assert_row_is(session.cache, row, fresh(texts.target, text), len(text))


@pytest.mark.parametrize("name", ["qwen3.5 hybrid"])
def test_without_the_rollback_of_states_the_text_is_another(texts, monkeypatch):
    """Otherwise the comparisons above would say nothing of recurrent layers."""
    monkeypatch.setattr(Rewind, "keep", lambda self, counts: None)
    know_the_text(monkeypatch, texts, lambda row, number: 0)
    with pytest.raises(AssertionError):  # of an anchor that is not the text's
        texts.together()


@pytest.mark.parametrize("name", ["llama"])
def test_without_moving_the_rows_the_text_is_another(texts, monkeypatch):
    """Otherwise they would say nothing of rows that take back unlike numbers of tokens."""
    shifts = []

    def stay(layer, rows, columns, *, taken):
        shifts.append(columns[:, 0].tolist())
        original(layer, rows, torch.arange(columns.shape[1]).expand_as(columns), taken=taken)

    original = target_cache.keep_columns
    monkeypatch.setattr(target_cache, "keep_columns", stay)
    know_the_text(monkeypatch, texts, in_turn)
    with pytest.raises(AssertionError):
        texts.together()
    assert shifts


@pytest.mark.parametrize("name", ["qwen3.5 hybrid"])
def test_one_token_is_read_without_copying_a_state(texts):
    with torch.inference_mode():
        session = TargetSession(texts.target, (), cache="dynamic")
        session.start(texts.prompts, room=2)
        rooms = [2] * len(texts.prompts)
        session.read(torch.ones(len(texts.prompts), 1, dtype=torch.int64), rooms=rooms)
        assert session.cache.rewind.before == {}
        session.read(torch.ones(len(texts.prompts), 2, dtype=torch.int64), rooms=rooms)
        assert list(session.cache.rewind.before) == [0, 1, 3]


def test_a_target_whose_cache_cannot_be_rolled_back_is_refused_by_the_kind():
    target = make_target("llama")
    target.model.config.layer_types = ["hybrid"] * 4
    with pytest.raises(TargetError, match=r"llama.*LinearAttentionAndFullAttentionLayer"):
        empty_cache(target, capacity=None)


@pytest.mark.parametrize("name", ["qwen3.5 hybrid"])
def test_a_recurrent_part_that_was_not_seen_is_no_silent_loss(texts):
    with torch.inference_mode():
        cache = TargetCache(texts.target, [fresh(texts.target, texts.prompts[0])], [3], capacity=8)
        with pytest.raises(TargetError, match="recurrent part of target layer 0"), cache.watch(2):
            cache.rewind.keep({0: 1})
