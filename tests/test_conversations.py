"""Rows of one conversation are one group, whatever order they come in."""

import numpy as np
import pytest
from conftest import make_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from dflash_cache.conversations import chat_of, group_of, joined_groups, text_of
from dflash_fit.loader import is_held_out

NUMBER = st.integers(0, 9).map(str)
KEYS = st.lists(st.tuples(NUMBER.map("opening {}".format), st.none() | NUMBER), max_size=25)


def groups_of(keys: list[tuple[str, str | None]]) -> list[str]:
    return joined_groups([opening for opening, _ in keys], [chat for _, chat in keys])


def by_naive_loop(keys: list[tuple[str, str | None]]) -> list[set[int]]:
    """Sets of rows, merged until nothing changes."""
    sets = [{row} for row in range(len(keys))]
    for one, (opening, chat) in enumerate(keys):
        for other, (opening_2, chat_2) in enumerate(keys):
            if opening == opening_2 or (chat is not None and chat == chat_2):
                a = next(s for s in sets if one in s)
                b = next(s for s in sets if other in s)
                if a is not b:
                    a |= b
                    sets.remove(b)
    return sets


@given(KEYS)
def test_groups_are_what_both_relations_connect(keys):
    groups = groups_of(keys)
    found = {frozenset(np.flatnonzero(np.asarray(groups) == g).tolist()) for g in set(groups)}
    assert found == {frozenset(rows) for rows in by_naive_loop(keys)}


@given(KEYS, st.randoms(use_true_random=False))
def test_the_order_of_the_rows_does_not_change_their_groups(keys, random):
    order = list(range(len(keys)))
    random.shuffle(order)
    assert groups_of([keys[i] for i in order]) == [groups_of(keys)[i] for i in order]


def test_a_row_without_relations_keeps_the_hash_of_its_opening():
    row = {"text": "the cat"}
    assert joined_groups([group_of(row)], [chat_of(row)]) == [group_of(row)]


def test_large_groups_are_held_out_as_often_as_small_ones():
    rows = [{"text": f"{chat} {piece}", "id": f"{chat}_{piece}"}
            for chat in range(3000) for piece in range(8)]  # fmt: skip
    groups = joined_groups([group_of(row) for row in rows], [chat_of(row) for row in rows])
    assert len(set(groups)) == 3000
    held = sum(is_held_out(group, 0.1) for group in set(groups))
    assert 240 < held < 360  # 300 +- 3.7 standard deviations


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"id": "abc_0"}, {"id": "abc_13"}, True),
        ({"id": "a_b_0"}, {"id": "a_b_13"}, True),
        ({"id": "abc_0"}, {"id": "abc"}, True),
        ({"id": "abc"}, {"id": "abc"}, True),
        ({"conversation_id": "abc_0"}, {"id": "abc_1"}, True),
        ({"conversation_id": 7, "id": "x"}, {"conversation_id": 7, "id": "y"}, True),
        ({"conversation_id": "p", "id": "x"}, {"conversation_id": "q", "id": "x"}, False),
        ({"id": "abc_0"}, {"id": "abd_0"}, False),
        ({"id": "a_b_0"}, {"id": "a_c_0"}, False),
    ],
)
def test_pieces_are_known_by_their_ids(one, other, same):
    assert (chat_of(one) == chat_of(other)) is same


@pytest.mark.parametrize("row", [{}, {"id": 3}, {"id": ""}, {"id": None}, {"id": ["abc_0"]}])
def test_what_is_no_name_of_a_chat_relates_nothing(row):
    assert chat_of(row) is None


def test_ids_that_number_the_rows_of_a_file_are_no_chat():
    rows = [{"text": str(number), "id": f"train_{number}"} for number in range(200)]
    groups = joined_groups([group_of(row) for row in rows], [chat_of(row) for row in rows])
    assert len(set(groups)) == 200


def test_many_answers_to_one_prompt_share_a_group_though_each_has_its_own_id():
    rows = [{"text": "the cat", "id": f"answer-{number}"} for number in range(40)]
    groups = joined_groups([group_of(row) for row in rows], [chat_of(row) for row in rows])
    assert set(groups) == {group_of(rows[0])}


def test_an_opening_that_many_chats_share_joins_none_of_them():
    rows = [{"text": "continue", "id": f"chat{number}_7"} for number in range(30)]
    rows += [{"text": str(number), "id": f"chat{number}_0"} for number in range(30)]
    rows += [{"text": "continue"}] * 2
    groups = joined_groups([group_of(row) for row in rows], [chat_of(row) for row in rows])
    assert groups[:30] == groups[30:60]
    assert groups[60] == groups[61]
    assert len(set(groups)) == 31


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        ([{"type": "text", "text": "a"}, {"type": "image"}, "b", 3], "a\nb"),
        ([{"type": "text", "text": None}], ""),
        (None, ""),
        ({"text": "a"}, ""),
        (3, ""),
    ],
)
def test_the_text_of_a_content_is_that_of_its_text_parts(content, text):
    assert text_of(content) == text


def test_a_split_of_real_rows_never_parts_a_chat(tmp_path):
    from conftest import write_jsonl

    from dflash_cache.config import BuildConfig
    from dflash_cache.samples import load_samples

    rows = [
        {"id": "abc_0", "prompt": "the cat", "response": "sat on a mat"},
        {"id": "abc_7", "prompt": "one two", "response": "three four"},
        {"id": "xyz_0", "prompt": "one two", "response": "dogs run"},
        {"id": "other_0", "prompt": "far", "response": "over there"},
    ]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    config = BuildConfig(target="-", data=str(data), out=tmp_path / "out")
    found = load_samples(config, make_tokenizer(), vocab_size=310, max_positions=512)
    groups = [sample.group for sample in found.samples]
    assert groups[0] == groups[1] == groups[2] != groups[3]
    assert all(len(group) == 16 and int(group, 16) >= 0 for group in groups)
