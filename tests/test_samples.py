"""Rows of every form become samples; rows that cannot are counted by reason, never lost."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import make_tokenizer, write_jsonl
from hypothesis import given
from hypothesis import strategies as st

from dflash_cache.config import BuildConfig
from dflash_cache.errors import DataError
from dflash_cache.samples import Sample, Samples, encode_row, group_of, load_samples

CHAT = [
    {"role": "system", "content": "you run"},
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": "sat on a mat"},
]
SHARE_GPT = [
    {"from": "system", "value": "you run"},
    {"from": "human", "value": "the cat"},
    {"from": "gpt", "value": "sat on a mat"},
]
GOOD = {"text": "the cat sat on a mat"}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def load(tmp_path: Path, tokenizer):
    """Samples of rows, through a file."""

    def load_rows(rows: list[dict], *, positions: int = 512, **options) -> Samples:
        data = write_jsonl(tmp_path / "rows.jsonl", rows)
        config = BuildConfig(target="-", data=str(data), out=tmp_path / "out", **options)
        return load_samples(config, tokenizer, vocab_size=310, max_positions=positions)

    return load_rows


def ready(mask: str, *, first: int = 100, **more) -> dict:
    """A row of ids 100, 101 ... with the loss mask written as 0s and 1s."""
    ids = list(range(first, first + len(mask)))
    return {"input_ids": ids, "loss_mask": [int(bit) for bit in mask], **more}


# --- forms --------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"id": 7}, {"text": None}, {"input_ids": [1, 2]}])
def test_messages_and_share_gpt_turns_give_the_same_tokens(tokenizer, more):
    ids, mask = encode_row({"messages": CHAT, **more}, tokenizer)
    turned_ids, turned_mask = encode_row({"conversations": SHARE_GPT, **more}, tokenizer)
    assert ids.tolist() == turned_ids.tolist()
    assert mask.tolist() == turned_mask.tolist()
    assert tokenizer.decode(ids[mask]) == "sat on a mat<|im_end|>"


def test_prompt_and_response_are_a_chat_of_two_turns(tokenizer):
    ids, mask = encode_row({"prompt": "the cat", "response": "sat"}, tokenizer)
    chat = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    wanted_ids, wanted_mask = encode_row({"messages": chat}, tokenizer)
    assert ids.tolist() == wanted_ids.tolist()
    assert mask.tolist() == wanted_mask.tolist()


def test_every_token_of_a_text_row_is_supervised(tokenizer):
    ids, mask = encode_row(GOOD, tokenizer)
    assert tokenizer.decode(ids) == GOOD["text"]
    assert mask.all()


def test_ready_ids_are_taken_as_they_are(tokenizer):
    ids, mask = encode_row(ready("00110"), tokenizer)
    assert ids.tolist() == [100, 101, 102, 103, 104]
    assert mask.tolist() == [False, False, True, True, False]


@pytest.mark.parametrize("role", ["gpt", "chatgpt", "bing", "bard", "model", "Assistant"])
def test_every_name_of_the_assistant_is_supervised(tokenizer, role):
    turns = [{"from": "human", "value": "the"}, {"from": role, "value": "cat"}]
    ids, mask = encode_row({"conversations": turns}, tokenizer)
    assert tokenizer.decode(ids[mask]) == "cat<|im_end|>"


@pytest.mark.parametrize("role", ["tool", "function", "observation"])
def test_tool_results_are_not_supervised(tokenizer, role):
    turns = [*SHARE_GPT, {"from": role, "value": "two dogs"}, {"from": "gpt", "value": "far"}]
    ids, mask = encode_row({"conversations": turns}, tokenizer)
    assert tokenizer.decode(ids[mask]) == "sat on a mat<|im_end|>far<|im_end|>"


def test_a_chat_row_without_a_chat_template_stops_the_build():
    bare = make_tokenizer()
    bare.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        encode_row({"messages": CHAT}, bare)


def test_rows_without_a_chat_need_no_chat_template():
    bare = make_tokenizer()
    bare.chat_template = None
    assert encode_row(GOOD, bare)[1].all()


def test_a_developer_is_a_system_by_its_newer_name(tokenizer):
    chats = [
        {"messages": [{"role": role, "content": "the dog"}, *CHAT[1:]]}
        for role in ("developer", "system")
    ]
    newer, older = (encode_row(chat, tokenizer) for chat in chats)
    assert newer[0].tolist() == older[0].tolist()


# --- skips --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "no messages, conversations, prompt and response, text, or input_ids"),
        ({"text": 3}, "no messages, conversations, prompt and response, text, or input_ids"),
        ({"prompt": "the cat"}, "no messages, conversations, prompt and response"),
        ({"messages": ["hello"]}, "a turn is not an object"),
        ({"conversations": ["hello"]}, "a turn is not an object"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "unknown role 'wizard'"),
        ({"messages": [{"content": "x"}]}, "unknown role 'None'"),
        ({"messages": CHAT[:2]}, "no assistant text"),
        ({"text": ""}, "no two supervised tokens in a row"),
        ({"text": "a"}, "no two supervised tokens in a row"),
        ({"text": "\ud800 half a pair"}, "not text that can be encoded"),
        (ready("0101010"), "no two supervised tokens in a row"),
        (ready("000"), "no two supervised tokens in a row"),
        (ready(""), "no two supervised tokens in a row"),
        (ready("011", loss_mask=[1, 1]), "input_ids and loss_mask differ in length"),
        (ready("011", input_ids=[[1], [2], [3]]), "input_ids and loss_mask differ in length"),
        (ready("011", input_ids=["a", "b", "c"]), "input_ids or loss_mask are not numbers"),
        (ready("011", input_ids=["1", "2", "3"]), "input_ids or loss_mask are not numbers"),
        (ready("011", input_ids=[1.0, 2.5, 3.0]), "input_ids or loss_mask are not numbers"),
        (ready("011", input_ids=[1, 2, 1 << 40]), "input_ids or loss_mask are not numbers"),
        (ready("011", input_ids=[1, [2], 3]), "input_ids or loss_mask are not numbers"),
        (ready("011", input_ids=5), "input_ids and loss_mask differ in length"),
        (ready("011", loss_mask=[0, 1, float("nan")]), "input_ids or loss_mask are not numbers"),
        (ready("011", input_ids=[float("inf"), 2, 3]), "input_ids or loss_mask are not numbers"),
        (ready("011", input_ids=[float("nan"), 2, 3]), "input_ids or loss_mask are not numbers"),
        (ready("011", loss_mask=["n", "y", "y"]), "input_ids or loss_mask are not numbers"),
        (ready("011", input_ids=[1, 2, 310]), "a token id is outside the target's vocabulary"),
        (ready("011", input_ids=[1, 2, -1]), "a token id is outside the target's vocabulary"),
        ({"text": "the cat " * 200}, "longer than 64 tokens"),
    ],
)
def test_a_row_that_cannot_be_used_is_skipped_and_its_reason_counted(load, row, reason):
    found = load([GOOD, row, GOOD], positions=64, max_skipped=0.5)
    assert [sample.sample_id for sample in found.samples] == [0, 2]
    assert found.rows == 3
    (told,) = found.skipped
    assert told.startswith(reason)
    assert found.skipped[told] == 1


def test_the_tail_after_the_last_supervised_token_is_dropped(load):
    (sample,) = load([ready("0011011000")]).samples
    assert sample.input_ids.tolist() == [100, 101, 102, 103, 104, 105, 106]
    assert sample.loss_mask.tolist() == [False, False, True, True, False, True, True]
    assert (sample.length, sample.supervised) == (7, 4)


def test_a_sample_ends_with_its_last_supervised_token(load, tokenizer):
    (sample,) = load([{"messages": [*CHAT, {"role": "user", "content": "and?"}]}]).samples
    assert tokenizer.decode(sample.input_ids).endswith("sat on a mat<|im_end|>")


def test_length_is_measured_after_the_tail_is_gone(load):
    rows = [ready("011" + "0" * 100), ready("0" * 100 + "11")]
    found = load(rows, max_length=3, max_skipped=0.5)
    assert [sample.sample_id for sample in found.samples] == [0]
    assert found.skipped == {"longer than 3 tokens": 1}


def test_max_length_cannot_exceed_the_positions_of_the_target(load):
    found = load([ready("0" * 8 + "11"), GOOD], positions=9, max_length=400, max_skipped=0.5)
    assert found.skipped == {"longer than 9 tokens": 1}


# --- too long -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "longest", "cut"),
    [
        ("0110110011", 10, "0110110011"),
        ("0110110011", 9, "011011"),
        ("0110110011", 6, "011011"),
        ("0110110011", 5, "011"),
        ("0110110011000", 10, "0110110011"),
        ("01101", 4, "011"),
        ("0010110011", 7, "001011"),
    ],
)
def test_a_cut_row_ends_with_the_last_answer_that_fits(load, mask, longest, cut):
    (sample,) = load([ready(mask)], max_length=longest, too_long="cut").samples
    assert "".join(map(str, sample.loss_mask.astype(int))) == cut
    assert sample.input_ids.tolist() == list(range(100, 100 + len(cut)))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (ready("0001111"), "no answer ends within 6 tokens"),
        ({"text": "the cat " * 20}, "no answer ends within 6 tokens"),
        (ready("0100011111"), "no two supervised tokens in a row"),
    ],
)
def test_a_row_of_which_nothing_fits_is_skipped(load, row, reason):
    found = load([ready("011"), row], max_length=6, too_long="cut", max_skipped=0.5)
    assert found.skipped == {reason: 1}


def test_a_cut_chat_is_the_chat_of_its_first_turns(load):
    turns = [{"role": role, "content": "the cat"} for role in ("user", "assistant")]
    (short,) = load([{"messages": turns * 2}]).samples
    (cut,) = load([{"messages": turns * 9}], max_length=short.length, too_long="cut").samples
    assert cut.input_ids.tolist() == short.input_ids.tolist()
    assert cut.loss_mask.tolist() == short.loss_mask.tolist()


def test_cutting_changes_no_row_that_fits(load):
    rows = [GOOD, {"messages": CHAT}, ready("0110011")]
    assert load(rows, too_long="cut").sha256() == load(rows).sha256()


@pytest.mark.parametrize("too_long", ["skip", "cut"])
def test_a_gigantic_row_is_skipped_before_it_is_tokenised(load, monkeypatch, too_long):
    monkeypatch.setattr("dflash_cache.samples.MOST_CHARACTERS", 10_000)
    monkeypatch.setattr("dflash_cache.samples.encode_text", None)
    huge = "cat " * 100_000
    tail = {"messages": [*CHAT, {"role": "user", "content": huge}]}
    found = load([{"text": huge}, tail], positions=39, too_long=too_long, max_skipped=0.5)
    assert [sample.sample_id for sample in found.samples] == [1]
    assert sum(found.skipped.values()) == 1


# --- options ------------------------------------------------------------------------------------


def test_a_system_message_goes_before_chats_that_bring_none(load, tokenizer):
    own, without = load([{"messages": CHAT}, {"messages": CHAT[1:]}], system="two dogs").samples
    assert tokenizer.decode(own.input_ids).startswith("<|im_start|>system\nyou run<|im_end|>")
    assert tokenizer.decode(without.input_ids).startswith("<|im_start|>system\ntwo dogs<|im_end|>")


def test_the_last_answer_alone_is_supervised_where_that_is_wanted(load, tokenizer):
    turns = [*CHAT, {"role": "user", "content": "why"}, {"role": "assistant", "content": "far"}]
    (sample,) = load([{"messages": turns}], last_turn_only=True).samples
    assert tokenizer.decode(sample.input_ids[sample.loss_mask]) == "far<|im_end|>"


def test_chats_without_thoughts_are_skipped_where_thoughts_are_wanted(load):
    found = load([GOOD, {"messages": CHAT}], thinking="on", max_skipped=0.5)
    assert len(found.samples) == 1
    assert sum(found.skipped.values()) == 1


def think(text: str, thought: str) -> dict:
    return {"role": "assistant", "content": f"<think>{thought}</think>{text}"}


def test_thoughts_are_kept_left_out_or_wanted_as_the_option_says(load, tokenizer):
    thoughtful = {"messages": [*CHAT[:2], think("sat", "one two")]}
    rows = [thoughtful, {"messages": CHAT}]
    for thinking, wanted in {
        "as-is": ["<think>one two</think>sat<|im_end|>", "sat on a mat<|im_end|>"],
        "on": ["<think>one two</think>sat<|im_end|>"],
        "off": ["sat<|im_end|>", "sat on a mat<|im_end|>"],
    }.items():
        found = load(rows, thinking=thinking, max_skipped=0.5)
        assert [tokenizer.decode(s.input_ids[s.loss_mask]) for s in found.samples] == wanted
        told = {"no thoughts in the last answer": 1} if thinking == "on" else {}
        assert found.skipped == told


@given(data=st.data())
def test_a_cut_chat_ends_with_the_end_token_of_an_answer(tmp_path_factory, tokenizer, data):
    some = st.sampled_from(["the cat", "sat\n\non a mat ", "\u65e5\u672c \U0001f642", "far"])
    turns = [
        {"role": role, "content": data.draw(some)}
        for _ in range(data.draw(st.integers(1, 5)))
        for role in ("user", "assistant")
    ]
    whole_ids, whole_mask = encode_row({"messages": turns}, tokenizer)
    longest = data.draw(st.integers(2, len(whole_ids)))
    folder = tmp_path_factory.mktemp("rows")
    rows = write_jsonl(folder / "rows.jsonl", [{"messages": turns}, ready("11")])
    config = BuildConfig(
        target="-",
        data=str(rows),
        out=folder,
        max_skipped=1.0,
        max_length=longest,
        too_long="cut",
    )
    found = load_samples(config, tokenizer, vocab_size=310, max_positions=512)
    ends = np.flatnonzero(whole_mask & (whole_ids == tokenizer.eos_token_id)) + 1
    fitting = ends[ends <= longest]
    cut = [sample for sample in found.samples if sample.sample_id == 0]
    assert [sample.length for sample in cut] == fitting[-1:].tolist()
    for sample in cut:
        assert sample.input_ids.tolist() == whole_ids[: sample.length].tolist()
        assert sample.loss_mask.tolist() == whole_mask[: sample.length].tolist()


def test_a_cache_whose_groups_another_version_named_serves_and_refuses_a_repair(
    tiny_cache, tmp_path, monkeypatch
):
    """Its tokens are as they were; units of two namings in one cache would split its chats."""
    from dflash_cache import samples
    from dflash_cache.errors import CacheMismatchError
    from dflash_cache.reader import CacheReader
    from dflash_cache.repair import repair_cache
    from dflash_cache.verify import inspect_cache

    cache = tmp_path / "cache"
    shutil.copytree(tiny_cache, cache)
    monkeypatch.setattr(samples, "joined_groups", lambda openings, _: ["g" + o for o in openings])
    assert repair_cache(cache, device="cpu") == {"ok": True, "units_repaired": 0, "problems": []}
    CacheReader(cache)
    shutil.rmtree(next((cache / "units").glob("*/*")))
    before = sorted(path for path in cache.rglob("*") if path.is_file())
    with pytest.raises(CacheMismatchError, match="begun with data_sha256 = "):
        repair_cache(cache, device="cpu")
    assert sorted(path for path in cache.rglob("*") if path.is_file()) == before
    assert len(inspect_cache(cache).damaged_units) == 1


def test_rows_of_one_name_are_all_kept(load):
    rows = [{**GOOD, "id": "same"}, {"text": "one two three", "id": "same"}, {**GOOD, "id": "same"}]
    found = load(rows)
    assert [sample.sample_id for sample in found.samples] == [0, 1, 2]
    assert len({sample.group for sample in found.samples}) == 1


@given(
    kinds=st.lists(st.integers(0, 7), min_size=1, max_size=12),
    options=st.fixed_dictionaries(
        {
            "too_long": st.sampled_from(["skip", "cut"]),
            "last_turn_only": st.booleans(),
            "max_length": st.sampled_from([None, 5, 20]),
        }
    ),
)
def test_every_row_is_a_sample_or_a_skip(tmp_path_factory, tokenizer, kinds, options):
    forms = [
        *(GOOD, {"messages": CHAT}, {"conversations": SHARE_GPT}, ready("0110011"), {}),
        *({"messages": [{"role": "user", "content": [1, None]}]}, {"text": "a"}, {"messages": 3}),
    ]
    folder = tmp_path_factory.mktemp("rows")
    data = write_jsonl(folder / "rows.jsonl", [GOOD, *(forms[kind] for kind in kinds)])
    config = BuildConfig(target="-", data=str(data), out=folder, max_skipped=1.0, **options)
    try:
        found = load_samples(config, tokenizer, vocab_size=310, max_positions=512)
    except DataError as told:
        assert "can be used" in str(told)  # noqa: PT017
    else:
        assert found.rows == len(kinds) + 1
        assert found.rows == len(found.samples) + sum(found.skipped.values())


# --- counts -------------------------------------------------------------------------------------


def test_max_samples_takes_the_first_rows(load):
    found = load([GOOD, {}, GOOD, GOOD], max_samples=2, max_skipped=0.5)
    assert (found.rows, len(found.samples), sum(found.skipped.values())) == (2, 1, 1)


def test_exactly_the_allowed_share_may_be_skipped(load):
    assert len(load([{}] + [GOOD] * 9).samples) == 9


def test_above_max_skipped_the_build_stops_and_tells_all_reasons(load):
    rows = [*[GOOD] * 7, {}, {}, ready("0101")]
    told = (
        "3 of 10 rows cannot be used (2 no messages, conversations, prompt and response, text, "
        "or input_ids; 1 no two supervised tokens in a row); more than --max-skipped 0.25 allows"
    )
    with pytest.raises(DataError, match=re.escape(told)):
        load(rows, max_skipped=0.25)


def test_a_message_tells_the_most_frequent_of_many_reasons(load):
    roles = [f"guest {n}" for n in range(30)] + ["guest 7"]
    rows = [{"messages": [{"role": role, "content": "x"}]} for role in roles]
    with pytest.raises(
        DataError, match=r"\(2 unknown role 'guest 7'; .*; 18 for 18 other reasons\)"
    ):
        load(rows)


def test_when_all_rows_are_skipped_no_share_helps(load):
    with pytest.raises(DataError, match=r"none of 2 rows can be used \(2 no two supervised"):
        load([ready("0101"), ready("01")], max_skipped=1.0)


def test_a_file_without_rows_is_refused(load):
    with pytest.raises(DataError, match="holds no rows"):
        load([])


# --- groups -------------------------------------------------------------------------------------


def answered(prompt: str, answer: str) -> list[dict]:
    return [
        {"prompt": prompt, "response": answer},
        {"messages": [
            {"role": "user", "content": prompt}, {"role": "assistant", "content": answer},
        ]},
        {"conversations": [{"from": "human", "value": prompt}, {"from": "gpt", "value": answer}]},
    ]  # fmt: skip


def test_two_answers_to_one_prompt_share_a_group_in_every_form():
    rows = [*answered("the cat", "sat"), *answered("the cat", "ran")]
    assert len({group_of(row) for row in rows}) == 1


def test_later_turns_do_not_change_the_group():
    longer = [*CHAT, {"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]
    assert group_of({"messages": longer}) == group_of({"messages": CHAT})


def test_different_prompts_have_different_groups():
    rows = [*answered("the cat", "sat")[:1], *answered("a cat", "sat")[:1], {"messages": CHAT}]
    assert len({group_of(row) for row in rows}) == len(rows)


def test_ready_rows_are_grouped_by_their_prompt():
    assert group_of(ready("0011")) == group_of(ready("001111"))
    assert group_of(ready("0011")) != group_of(ready("00011"))
    assert group_of(ready("0011")) != group_of(ready("0011", first=50))


def test_rows_without_a_prompt_are_grouped_by_all_they_have():
    assert group_of(ready("11")) != group_of(ready("11", first=50))
    assert group_of({"text": "the cat"}) != group_of({"text": "a cat"})
    told = [{"messages": [{"role": "assistant", "content": text}]} for text in ("the", "a")]
    assert group_of(told[0]) != group_of(told[1])


@pytest.mark.parametrize("more", [{"text": None}, {"input_ids": [1, 2]}, {"loss_mask": None}])
def test_the_group_is_of_the_form_that_was_read(load, more):
    """A key that is there but not used decides nothing, and breaks nothing."""
    rows = [{**row, **more} for row in (*answered("the cat", "sat"), *answered("a mat", "far"))]
    groups = [sample.group for sample in load(rows).samples]
    assert groups == [group_of(row) for row in (*answered("the cat", ""), *answered("a mat", ""))]


# --- the hash -----------------------------------------------------------------------------------


def sample_of(ids: list[int], mask: list[bool], *, sample_id: int = 0, group: str = "g") -> Sample:
    return Sample(
        sample_id=sample_id,
        input_ids=np.asarray(ids, np.int32),
        loss_mask=np.asarray(mask, bool),
        group=group,
    )


def hash_of(*samples: Sample) -> str:
    return Samples(samples=list(samples), rows=len(samples), skipped={}).sha256()


@given(data=st.data(), ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20))
def test_any_token_and_any_mask_bit_change_the_hash(data, ids):
    mask = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    place = data.draw(st.integers(0, len(ids) - 1))
    other_ids, other_mask = list(ids), list(mask)
    other_ids[place] ^= 1 << data.draw(st.integers(0, 30))
    other_mask[place] = not mask[place]
    hashes = {
        hash_of(sample_of(ids, mask)),
        hash_of(sample_of(other_ids, mask)),
        hash_of(sample_of(ids, other_mask)),
    }
    assert len(hashes) == 3


def test_order_number_group_and_cut_change_the_hash():
    one, two = sample_of([1, 2], [True] * 2), sample_of([3, 4], [True] * 2, sample_id=1)
    hashes = {
        hash_of(one, two),
        hash_of(two, one),
        hash_of(one),
        hash_of(replace(one, group="h"), two),
        hash_of(replace(one, sample_id=5), two),
        hash_of(sample_of([1, 2, 3], [True] * 3), sample_of([4], [True], sample_id=1)),
    }
    assert len(hashes) == 6


def test_the_same_samples_have_the_same_hash(load):
    rows = [GOOD, {"messages": CHAT}, ready("0011")]
    assert load(rows).sha256() == load(json.loads(json.dumps(rows))).sha256()


def test_special_ids_are_counted_over_all_samples(load):
    found = load([ready("0011"), ready("011", first=101)])
    assert found.count_of([100, 101, 103, 7]) == {100: 1, 101: 2, 103: 2, 7: 0}
