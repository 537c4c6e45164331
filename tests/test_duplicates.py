"""Rows that nearly repeat a prompt of an evaluation are found; others are left alone."""

import pytest
from conftest import make_tokenizer, write_jsonl
from hypothesis import given
from hypothesis import strategies as st

from dflash_cache.config import BuildConfig
from dflash_cache.duplicates import (
    REASON,
    index_prompts,
    read_prompts,
    repeats_a_prompt,
    runs_of,
    words_of,
)
from dflash_cache.errors import DataError
from dflash_cache.samples import Samples, load_samples

LONG = (
    "Write a function that takes a list of words and returns the longest word that can be spelt "
    "with the letters of another list"
)
SHORT = "Who are you?"


def chat(*turns: str) -> dict:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(turns)]}


def repeats(row: dict, *prompts: str) -> bool:
    return repeats_a_prompt(row, index_prompts(prompts or (LONG, SHORT)), make_tokenizer())


@pytest.mark.parametrize(
    "text",
    [
        LONG,
        LONG.upper() + "!!",
        LONG.replace(" ", "\n  "),
        f"Hello there. {LONG}. Thanks a lot in advance!",
        LONG.replace("longest", "shortest"),
        SHORT,
        "who are YOU",
        "\uff57\uff48\uff4f are you",
    ],
)
def test_a_near_copy_is_found_in_every_form_of_row(text):
    assert repeats(chat(text, "no"))
    assert repeats({"prompt": text, "response": "no"})
    assert repeats({"conversations": [{"from": "human", "value": text}]})
    assert repeats({"text": text})
    assert repeats(chat([{"type": "text", "text": text}], "no"))


def test_a_near_copy_in_a_later_turn_is_found_when_the_prompt_is_long():
    assert repeats(chat("hello", "hi", LONG, "no"))
    assert not repeats(chat("hello", "hi", SHORT, "no"))


def test_a_near_copy_in_ready_tokens_is_found():
    tokenizer = make_tokenizer()
    ids = tokenizer(f"<|im_start|>user\n{LONG}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    row = {"input_ids": [*ids, 5, 6], "loss_mask": [*([0] * len(ids)), 1, 1]}
    assert repeats(row)


@pytest.mark.parametrize(
    "row",
    [
        chat("Write a function that takes a list of words and sorts it", "ok"),
        chat("hello", LONG),  # the assistant said it
        chat("Tell me who are you and who am I", "ok"),
        chat("", "ok"),
        chat("???", "ok"),
    ],
)
def test_other_rows_are_left_alone(row):
    assert not repeats(row)


def test_words_that_most_prompts_share_find_nothing():
    same = "Solve the problem step by step and write the answer in a box at the end."
    prompts = [f"{same} A farmer number {n} has {n + 3} cows and {n} pigs now." for n in range(40)]
    assert repeats(chat(prompts[7], "ok"), *prompts)
    assert not repeats(chat(f"{same} How far is the moon from here?", "ok"), *prompts)


def test_a_prompt_of_common_words_and_one_of_its_own_is_compared_as_a_whole():
    nouns = ["why", "who", "when", "where", "what", "how"]
    prompts = [f"Answer the following question step by step: {noun}?" for noun in nouns]
    assert repeats(chat(prompts[0], "ok"), *prompts)
    assert not repeats(chat("Now another question step by step: why do cats purr?"), *prompts)


def test_a_prompt_without_words_is_compared_by_its_characters():
    assert repeats(chat("? !", "ok"), "?  !")
    assert not repeats(chat("?", "ok"), "! ?")


def test_text_without_spaces_is_compared_by_characters():
    prompt = "請寫一個函數找出最長的單詞並返回它的長度"
    assert repeats(chat(f"你好{prompt}謝謝", "ok"), prompt)
    assert not repeats(chat("請寫一首詩關於秋天的月亮和故鄉的河流", "ok"), prompt)


WORDS = st.lists(st.sampled_from("abcdefgh"), min_size=8, max_size=14, unique=False)


@given(prompts=st.lists(WORDS, min_size=1, max_size=3), asked=WORDS)
def test_found_is_what_the_naive_comparison_finds(prompts, asked):
    wanted = any(
        p == asked or len(runs_of(p) & runs_of(asked)) >= 0.7 * len(runs_of(p)) - 1e-9
        for p in prompts
    )
    found = index_prompts([" ".join(p) for p in prompts])
    assert found.hit(" ".join(asked), [" ".join(asked)]) is wanted


@given(st.text())
def test_words_do_not_change_when_taken_again(text):
    words = words_of(text)
    assert words_of(" ".join(words)) == words


# --- through the reader -------------------------------------------------------------------------


def test_prompts_come_in_the_forms_of_an_evaluation(tmp_path):
    rows = [
        {"prompt": LONG},
        {"turns": ["first of two turns", "second of two turns"]},
        chat("asked in messages", "answered"),
        {"conversations": [{"from": "human", "value": "asked by share gpt"}]},
    ]
    found = read_prompts(str(write_jsonl(tmp_path / "prompts.jsonl", rows)))
    assert found.whole == {
        " ".join(words_of(LONG)),
        "first of two turns",
        "second of two turns",
        "asked in messages",
        "asked by share gpt",
    }


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"prompt": "a"}, {"text": "b"}], "row 2: no messages, conversations, prompt or turns"),
        ([], "holds no prompts; give --exclude a file with prompts"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(tmp_path, rows, told):
    with pytest.raises(DataError, match=told):
        read_prompts(str(write_jsonl(tmp_path / "prompts.jsonl", rows)))


def test_rows_that_repeat_a_prompt_are_skipped_and_counted(tmp_path):
    rows = [chat("the cat", "sat on a mat"), chat(LONG, "one two"), chat("Who are you", "far over")]
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": LONG}, {"prompt": SHORT}])
    config = BuildConfig(
        target="-",
        data=str(write_jsonl(tmp_path / "rows.jsonl", rows)),
        out=tmp_path / "out",
        exclude=str(prompts),
        max_skipped=0.8,
    )
    found: Samples = load_samples(config, make_tokenizer(), vocab_size=310, max_positions=512)
    assert [sample.sample_id for sample in found.samples] == [0]
    assert found.skipped == {REASON: 2}
