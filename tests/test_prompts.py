"""Prompt sets against the chat template itself: what is asked, how, and what is refused."""

import pytest
from conftest import CHATML, make_tokenizer, write_jsonl

from dflash_cache.chat import ChatOptions
from dflash_cache.errors import ConfigError, DataError
from dflash_fit.prompts import PromptRow, read_prompt_sets, read_rows, set_names

AS_IS = ChatOptions()
# Qwen3's way: enable_thinking=False writes an empty thought into the prompt.
THINKING = CHATML.replace(
    "<|im_start|>assistant\n' }}{% endif",
    "<|im_start|>assistant\n' }}{% if enable_thinking is defined %}"
    "{{ 'think\n' if enable_thinking else 'nothink\n' }}{% endif %}{% endif",
)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def user(text):
    return {"role": "user", "content": text}


def rendered(tokenizer, messages, **more):
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **more
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def only_row(tmp_path, row):
    [found] = read_rows(str(write_jsonl(tmp_path / "set.jsonl", [row])), limit=None)
    return found


@pytest.mark.parametrize(
    ("row", "opening"),
    [
        ({"prompt": "the cat"}, [user("the cat")]),
        ({"turns": ["the cat"]}, [user("the cat")]),
        ({"messages": [user("the cat")]}, [user("the cat")]),
        ({"messages": [user("a"), {"role": "assistant", "content": "b"}, user("c")]}, [user("a")]),
        ({"conversations": [{"from": "human", "value": "a"}]}, [user("a")]),
        # Tables fill in what a row has not.
        (
            {"prompt": None, "turns": None, "messages": None}
            | {"conversations": [{"from": "human", "value": "a"}]},
            [user("a")],
        ),
        ({"messages": [user("a")], "conversations": None}, [user("a")]),
        (
            {"messages": [{"role": "system", "content": "s"}, user("a"), user("b")]},
            [{"role": "system", "content": "s"}, user("a"), user("b")],
        ),
        # The more telling key wins, as `dflash cache build --exclude` reads the same files.
        ({"prompt": "a", "turns": ["b"], "messages": [user("c")]}, [user("a")]),
        ({"prompt": ["a"], "turns": ["b", "c"], "messages": [user("d")]}, [user("b")]),
    ],
)
def test_a_row_asks_for_its_first_answer(row, opening, tokenizer, tmp_path):
    found = only_row(tmp_path, row)
    assert found.messages() == opening
    assert found.ids(tokenizer, options=AS_IS) == rendered(tokenizer, opening)


def test_turns_are_asked_behind_the_answers_that_were_given(tokenizer, tmp_path):
    row = only_row(tmp_path, {"turns": ["one", "two", "three"]})
    assert row.turns == 3
    chat = [user("one"), {"role": "assistant", "content": "A"}, user("two")]
    assert row.ids(tokenizer, options=AS_IS, answers=["A"]) == rendered(tokenizer, chat)
    chat += [{"role": "assistant", "content": "B"}, user("three")]
    assert row.ids(tokenizer, options=AS_IS, answers=["A", "B"]) == rendered(tokenizer, chat)


@pytest.mark.parametrize(("word", "flag"), [("on", True), ("off", False), ("as-is", None)])
def test_the_thinking_flag_reaches_the_template(word, flag, tmp_path):
    tokenizer = make_tokenizer(template=THINKING)
    row = only_row(tmp_path, {"turns": ["one", "two"]})
    told = {} if flag is None else {"enable_thinking": flag}
    ids = row.ids(tokenizer, options=ChatOptions(thinking=word))
    assert ids == rendered(tokenizer, [user("one")], **told)
    endings = {"on": "think\n", "off": "nothink\n", "as-is": "assistant\n"}
    assert tokenizer.decode(ids).endswith(endings[word])
    chat = [user("one"), {"role": "assistant", "content": "A"}, user("two")]
    later = row.ids(tokenizer, options=ChatOptions(thinking=word), answers=["A"])
    assert later == rendered(tokenizer, chat, **told)


def test_a_system_message_is_put_before_prompts_that_bring_none(tokenizer, tmp_path):
    options = ChatOptions(system="sit")
    row = only_row(tmp_path, {"prompt": "a"})
    system = {"role": "system", "content": "sit"}
    assert row.ids(tokenizer, options=options) == rendered(tokenizer, [system, user("a")])
    own = {"role": "system", "content": "own"}
    row = only_row(tmp_path, {"messages": [own, user("a")]})
    assert row.ids(tokenizer, options=options) == rendered(tokenizer, [own, user("a")])


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ({}, None),
        ({"source": "gsm8k"}, "gsm8k"),
        ({"category": "math"}, "math"),
        ({"source": "gsm8k", "category": "math"}, "gsm8k"),
        ({"source": " ", "category": 3}, None),
    ],
)
def test_a_row_is_also_counted_by_its_source_or_category(row, part, tmp_path):
    assert only_row(tmp_path, {"prompt": "a", **row}).part == part


# --- several files ------------------------------------------------------------------------------


def test_every_file_is_a_set_with_the_first_of_its_rows(tmp_path):
    files = [
        write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": f"{name} {i}"} for i in range(rows)])
        for name, rows in [("one", 3), ("two", 1)]
    ]
    sets = read_prompt_sets(", ".join(map(str, files)), limit=2)
    found = {one.name: [row.opening[0]["content"] for row in one.rows] for one in sets}
    assert found == {"one": ["one 0", "one 1"], "two": ["two 0"]}
    assert [one.turns for one in sets] == [2, 1]
    assert sets[0].rows[1].where == f"{files[0]}, row 2"


def test_sets_are_called_by_their_files_or_by_the_whole_path_where_those_are_equal():
    names = set_names("a/mt_bench.jsonl, gsm8k.jsonl,b/mt_bench.json")
    assert names == {
        "a/mt_bench.jsonl": "a/mt_bench.jsonl",
        "gsm8k.jsonl": "gsm8k",
        "b/mt_bench.json": "b/mt_bench.json",
    }


@pytest.mark.parametrize("sources", ["", "a.jsonl,", "a.jsonl,a.jsonl", ",a.jsonl"])
def test_no_file_and_one_file_twice_are_refused(sources):
    with pytest.raises(ConfigError, match="--prompts"):
        set_names(sources)


# --- what is no prompt --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?"}, "no prompt"),
        ({"prompt": ["a", "b"]}, r"turns \(a list of texts\)"),
        ({"prompt": " "}, "prompt is empty"),
        ({"turns": []}, "turns is no list of texts"),
        ({"turns": "a"}, "turns is no list of texts"),
        ({"turns": ["a", ""]}, "a turn is empty or no text"),
        ({"turns": ["a", {"role": "user"}]}, "a turn is empty or no text"),
        ({"messages": []}, "nothing comes before the first answer"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "nothing comes before"),
        ({"messages": [{"role": "oracle", "content": "?"}]}, "unknown role 'oracle'"),
    ],
)
def test_a_row_that_asks_nothing_is_refused_by_file_and_number(row, message, tmp_path):
    file = write_jsonl(tmp_path / "set.jsonl", [{"prompt": "fine"}, row])
    with pytest.raises(DataError, match=rf"set\.jsonl, row 2: .*{message}"):
        read_rows(str(file), limit=None)


def test_a_file_without_rows_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds no prompts"):
        read_rows(str(write_jsonl(tmp_path / "none.jsonl", [])), limit=None)


def test_what_the_template_refuses_is_told_with_file_and_number(tokenizer):
    row = PromptRow(source="set.jsonl", number=7, opening=({"role": "user", "content": None},))
    with pytest.raises(DataError, match=r"set\.jsonl, row 7: a turn without content"):
        row.ids(tokenizer, options=AS_IS)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a \ud800 b"},
        {"turns": ["a \udc00"]},
        {"messages": [{"role": "system", "content": "\ud800"}, user("a")]},
    ],
)
def test_half_a_surrogate_pair_is_told_with_file_and_number(row, tokenizer, tmp_path):
    found = only_row(tmp_path, row)
    with pytest.raises(DataError, match=r"set\.jsonl, row 1: not text that can be encoded"):
        found.ids(tokenizer, options=AS_IS)


def test_a_prompt_of_no_token_is_told_with_file_and_number(tmp_path):
    silent = make_tokenizer(
        template="{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    row = only_row(tmp_path, {"messages": [{"role": "system", "content": "s"}]})
    with pytest.raises(DataError, match=r"set\.jsonl, row 1: the chat template makes no token"):
        row.ids(silent, options=AS_IS)
