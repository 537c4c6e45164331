"""Prompt sets answered both ways, against the library's own generation and a clock of ours."""

from dataclasses import replace

import pytest
import torch
from conftest import save_tiny_target
from test_learning import SelfWritten

from dflash_cache.chat import ChatOptions
from dflash_cache.errors import DataError
from dflash_fit import answering
from dflash_fit.answering import Pair, answer_sets, batches
from dflash_fit.errors import DrafterError
from dflash_fit.prompts import PromptRow, PromptSet

LONGEST = 12


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target whose greedy text does not stand still, and a drafter that is often right."""
    folder = save_tiny_target(tmp_path_factory.mktemp("writer") / "tiny", seed=3, tied=False)
    text = SelfWritten(folder).learn(40)
    return Pair(
        target=text.target,
        drafter=text.drafter,
        frozen=text.frozen,
        chat=ChatOptions(),
        max_new_tokens=LONGEST,
    )


def row(number, *turns, part=None):
    return PromptRow(
        source="set.jsonl",
        number=number,
        opening=({"role": "user", "content": turns[0]},),
        follow_ups=turns[1:],
        part=part,
    )


SETS = [
    PromptSet(name="talk", rows=(row(1, "the cat", "a mat", "one two"), row(2, "dogs run far"))),
    PromptSet(name="ask", rows=tuple(row(n, f"{n} saw three") for n in (1, 2, 3))),
]


def generated(target, messages):
    """Prompt and greedy answer as transformers write them."""
    text = target.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    prompt = target.tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([prompt])
    whole = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=LONGEST, do_sample=False
    )
    return tuple(prompt), tuple(whole[0, len(prompt) :].tolist())


def test_every_turn_is_answered_behind_the_targets_own_answers(pair):
    wanted = []
    for one in SETS:
        for asked in one.rows:
            chat = list(asked.opening)
            for follow_up in (*asked.follow_ups, None):
                prompt, answer = generated(pair.target, chat)
                wanted.append((one.name, asked.number, prompt, answer))
                words = pair.target.tokenizer.decode(answer, skip_special_tokens=True)
                chat.append({"role": "assistant", "content": words})
                chat.append({"role": "user", "content": follow_up})
    found = answer_sets(SETS, pair)
    assert [(a.dataset, a.row, a.prompt, a.plain) for a in found] == wanted
    assert [a.tokens for a in found] == [a.plain for a in found]
    assert len(found) == sum(one.turns for one in SETS)
    assert any(accepted for a in found for accepted in a.chain.accepted)
    assert [a.offline for a in found] == [a.chain for a in found]
    assert {a.gap for a in found} == {None}


@pytest.mark.parametrize("size", [2, 5])
def test_prompts_that_are_decoded_together_have_the_same_answers(pair, size):
    key = lambda a: (a.dataset, a.row, a.prompt)  # noqa: E731
    alone = sorted(answer_sets(SETS, pair), key=key)
    together = sorted(answer_sets(SETS, replace(pair, batch_size=size)), key=key)
    for one, other in zip(alone, together, strict=True):
        assert (key(one), one.plain, one.tokens) == (key(other), other.plain, other.tokens)
        assert one.chain == other.chain


def test_drawn_answers_repeat_by_the_seed_and_differ_from_row_to_row(pair):
    same = PromptSet(name="same", rows=tuple(row(n, "the cat") for n in (1, 2, 3)))
    drawn = replace(pair, temperature=1.0)

    def texts(pair):
        return [(a.plain, a.tokens) for a in answer_sets([same], pair)]

    assert texts(drawn) == texts(drawn)
    assert texts(drawn) != texts(replace(drawn, seed=1))
    assert len(set(texts(drawn))) == 3


def test_a_batch_holds_rows_of_one_part(pair):
    rows = tuple(row(n, "a", part="xy"[n % 2]) for n in range(7))
    found = list(batches(PromptSet(name="set", rows=rows), size=2))
    assert [[r.number for r in batch] for batch in found] == [[0, 2], [4, 6], [1, 3], [5]]


def test_where_greedy_answers_part_the_gap_between_the_two_logits_is_kept(pair, monkeypatch):
    original = answering.with_drafter

    def second_best(pair, prompts, choose):
        """Another second token in every answer: the likeliest but one."""
        found = original(pair, prompts, choose)
        for one, prompt in zip(found, prompts, strict=True):
            logits = pair.target.logits(torch.cat([prompt, torch.tensor(one.tokens[:1])])[None])
            one.tokens[1] = int(logits[0, -1].topk(2).indices[1])
        return found

    monkeypatch.setattr(answering, "with_drafter", second_best)
    for one in answer_sets(SETS[1:], pair):
        assert one.tokens[1] != one.plain[1]
        text = torch.tensor([[*one.prompt, one.plain[0]]])
        best, second = pair.target.logits(text)[0, -1].topk(2).values.tolist()
        # The head reads one token there and all of them here: the last bits differ.
        assert one.gap == pytest.approx(best - second, abs=1e-5)
    drawn = answer_sets(SETS[1:], replace(pair, temperature=1.0))
    assert {one.gap for one in drawn} == {None}


# --- what is timed ------------------------------------------------------------------------------


class Clock:
    """Says how much was decoded, and lets each way take as long as it is told."""

    def __init__(self, monkeypatch, **seconds):
        self.now, self.calls = 0.0, []
        monkeypatch.setattr(answering.time, "perf_counter", lambda: self.now)
        for name, function in [
            ("alone", answering.alone),
            ("with_drafter", answering.with_drafter),
        ]:
            monkeypatch.setattr(answering, name, self.taking(name, function, seconds[name]))

    def taking(self, name, function, seconds):
        def way(pair, prompts, choose):
            self.now += seconds
            self.calls.append((name, len(prompts), pair.max_new_tokens))
            return function(pair, prompts, choose)

        return way


@pytest.mark.parametrize("size", [1, 3])
def test_each_way_is_timed_alone_and_a_batch_shares_its_seconds(pair, size, monkeypatch):
    Clock(monkeypatch, alone=6.0, with_drafter=3.0)
    found = answer_sets(SETS[1:], replace(pair, batch_size=size))
    assert [(a.plain_seconds, a.seconds) for a in found] == [(6.0 / size, 3.0 / size)] * 3


def test_the_ways_take_turns_behind_a_short_answer_that_is_not_counted(pair, monkeypatch):
    monkeypatch.setattr(answering, "WARM_UP_TOKENS", 3)
    clock = Clock(monkeypatch, alone=1.0, with_drafter=1.0)
    rows = tuple(row(n, "the cat") for n in range(5))
    assert len(answer_sets([PromptSet(name="set", rows=rows)], pair)) == 5
    warm_up, counted = clock.calls[:2], clock.calls[2:]
    assert sorted(name for name, *_ in warm_up) == ["alone", "with_drafter"]
    assert {longest for *_, longest in warm_up} == {3}
    assert {longest for *_, longest in counted} == {LONGEST}
    firsts = [name for name, *_ in counted[::2]]
    assert firsts == ["alone", "with_drafter", "with_drafter", "alone", "alone"]
    assert all(
        one != other for one, other in zip(firsts, [c[0] for c in counted[1::2]], strict=True)
    )


# --- what goes wrong ----------------------------------------------------------------------------


def failing_at(monkeypatch, call, error):
    """The drafter's way fails at its n-th call."""
    calls = iter(range(100))
    original = answering.with_drafter

    def way(pair, prompts, choose):
        if next(calls) == call:
            raise error
        return original(pair, prompts, choose)

    monkeypatch.setattr(answering, "with_drafter", way)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (DrafterError("no such layer"), DrafterError, r"^set\.jsonl, row 2: no such layer$"),
        (torch.OutOfMemoryError("of 80 GB\nmore"), DataError, r"row 2: out of memory \(of 80 GB\)"),
    ],
)
def test_a_failure_names_its_prompt(pair, error, kind, message, monkeypatch):
    failing_at(monkeypatch, 2, error)  # the warm-up and the first row are well
    with pytest.raises(kind, match=message):
        answer_sets(SETS[1:], pair)


def test_a_failure_of_a_batch_names_its_prompts(pair, monkeypatch):
    failing_at(monkeypatch, 1, DrafterError("no"))
    with pytest.raises(DrafterError, match=r"^set\.jsonl, rows 1, 2, 3: no$"):
        answer_sets(SETS[1:], replace(pair, batch_size=3))


def test_a_failure_of_the_warm_up_names_its_prompt_once(pair, monkeypatch):
    failing_at(monkeypatch, 0, DrafterError("no"))
    with pytest.raises(DrafterError, match=r"^set\.jsonl, row 1: no$"):
        answer_sets(SETS[1:], replace(pair, batch_size=3))


def test_a_bug_of_ours_keeps_its_traceback_and_names_its_prompt(pair, monkeypatch):
    failing_at(monkeypatch, 3, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError) as caught:
        answer_sets(SETS[1:], pair)
    assert caught.value.__notes__ == ["while answering set.jsonl, row 3"]


def test_a_chat_that_grows_beyond_the_positions_of_the_target_is_refused_by_its_row(pair):
    first = len(row(1, "the cat").ids(pair.target.tokenizer, options=ChatOptions()))
    short = replace(
        pair.target,
        spec=replace(pair.target.spec, max_position_embeddings=first + LONGEST),
    )
    few = replace(pair, target=short)
    assert len(answer_sets([PromptSet(name="set", rows=(row(1, "the cat"),))], few)) == 1
    with pytest.raises(DataError, match=rf"set\.jsonl, row 1: .* has {first + LONGEST} positions"):
        answer_sets([PromptSet(name="set", rows=(row(1, "the cat", "a mat"),))], few)
