"""Rows come out as they were written, or the reader says where they are not."""

import json
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import make_tokenizer, write_jsonl
from hypothesis import given
from hypothesis import strategies as st

from dflash_cache import rows as reader
from dflash_cache.errors import DataError
from dflash_cache.rows import iter_rows, without_none

# Renders a line only where the key is there: what chat templates do with tool calls.
ASKS_FOR_TOOL_CALLS = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}"
    "{% if m.tool_calls is defined %} calls {{ m.tool_calls | length }}{% endif %};{% endfor %}"
)


def read(path: Path | str, *, split: str = "train") -> list[dict]:
    return list(iter_rows(str(path), split=split))


@pytest.fixture
def arrow_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`datasets` keeps its Arrow copies here and not at home."""
    import datasets

    folder = tmp_path / "arrow"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    return folder


def test_jsonl_rows_come_in_order_and_blank_lines_are_passed_over(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}\n\n   \n{"text": "two"}', encoding="utf-8")
    assert read(path) == [{"text": "one"}, {"text": "two"}]


def test_a_line_separator_inside_a_string_does_not_end_its_line(tmp_path):
    text = "one\u2028two\u2029three\x85four\x0cfive"
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read(path) == [{"text": text}]


def test_none_written_in_a_jsonl_file_stays_and_an_absent_key_stays_absent(tmp_path):
    rows = [{"text": None}, {"other": 1}]
    assert read(write_jsonl(tmp_path / "rows.jsonl", rows)) == rows


def test_a_broken_line_is_named_by_its_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": \n', encoding="utf-8")
    with pytest.raises(DataError, match=r"rows\.jsonl, line 3: broken JSON at column"):
        read(path)


def test_rows_before_a_broken_line_are_given_out_first(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\nbroken\n', encoding="utf-8")
    assert next(iter_rows(str(path), split="train")) == {"text": "a"}


@pytest.mark.parametrize("line", ["[1, 2]", '"text"', "3", "null"])
def test_a_line_that_is_no_object_is_named_by_its_number(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"text": "a"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"line 2: found \w+, want a JSON object per row"):
        read(path)


@pytest.mark.parametrize("line", ["[" * 100_000, '{"input_ids": [' + "1" * 5000 + "]}"])
def test_json_that_python_will_not_take_is_broken_too(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(DataError, match="line 1: broken JSON"):
        read(path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_file_that_is_not_utf8_is_refused(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b'{"text": "na\xefve"}\n')
    with pytest.raises(DataError, match=rf"{name}: not UTF-8"):
        read(path)


@pytest.mark.parametrize("name", ["none.jsonl", "none.json", "none.parquet"])
def test_a_missing_file_is_refused(tmp_path, name):
    with pytest.raises(DataError, match=rf"{name}: no such file"):
        read(tmp_path / name)


def test_a_folder_named_like_a_file_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").mkdir()
    with pytest.raises(DataError, match="no such file"):
        read(tmp_path / "rows.jsonl")


def test_a_json_list_gives_its_rows(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('[{"text": "one"}, {"text": "two"}]', encoding="utf-8")
    assert read(path) == [{"text": "one"}, {"text": "two"}]


def test_a_json_file_that_is_no_list_is_refused(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('{"text": "one"}', encoding="utf-8")
    with pytest.raises(DataError, match="found dict, want a JSON list of rows"):
        read(path)


def test_a_json_row_that_is_no_object_is_named_by_its_number(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('[{"text": "one"}, 2]', encoding="utf-8")
    with pytest.raises(DataError, match="row 2: found int, want a JSON object per row"):
        read(path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_a_row(tmp_path, name, end, mark):
    rows = [{"text": "one"}, {"text": "two"}]
    lines = [json.dumps(row) for row in rows]
    text = "[" + f",{end}".join(lines) + "]" if name == "rows.json" else end.join(lines)
    (tmp_path / name).write_bytes((mark + text + end).encode("utf-8"))
    assert read(tmp_path / name) == rows


def test_a_byte_order_mark_on_an_empty_line_is_no_row(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf\n{"text": "one"}\n')
    assert read(tmp_path / "rows.jsonl") == [{"text": "one"}]


def test_the_line_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "na\xefve"}\n')
    with pytest.raises(DataError, match=r"not UTF-8 text in line 2 \(.+\); re-encode it"):
        read(path)


def test_rows_of_all_kinds_may_stand_in_one_file(tmp_path):
    rows = [{"text": "a"}, {"prompt": "a", "response": "b"}, {"messages": [{"content": ["x", 1]}]}]
    assert read(write_jsonl(tmp_path / "rows.jsonl", rows)) == rows


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_words_that_python_writes_for_numbers_are_read(tmp_path, name):
    text = '{"loss_mask": [NaN, Infinity, -Infinity]}'
    (tmp_path / name).write_text(f"[{text}]" if name == "rows.json" else text)
    (row,) = read(tmp_path / name)
    assert str(row["loss_mask"]) == "[nan, inf, -inf]"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_huge_row_takes_a_few_times_its_size(tmp_path, name):
    size = 20_000_000
    text = json.dumps({"text": "x" * size})
    (tmp_path / name).write_text(f"[{text}]" if name == "rows.json" else text)
    tracemalloc.start()
    assert sum(len(row["text"]) for row in iter_rows(str(tmp_path / name), split="train")) == size
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * size


def test_a_json_list_is_never_held_as_a_whole(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"text": "x" * 10_000}] * 3000))
    tracemalloc.start()
    assert sum(1 for _ in iter_rows(str(path), split="train")) == 3000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < path.stat().st_size / 3


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(
    rows=st.lists(st.dictionaries(st.text(), VALUES), max_size=6),
    piece=st.integers(1, 40),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
)
def test_a_json_list_read_in_pieces_is_what_json_reads(rows, piece, indent, ascii_only):
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
    with TemporaryDirectory() as folder, mock.patch.object(reader, "PIECE", piece):
        path = Path(folder) / "rows.json"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        assert read(path) == json.loads(text)


def test_a_json_list_cut_off_anywhere_is_told_with_the_rows_before(tmp_path):
    rows = [{"text": 'a"\u20ac\\', "n": [1.5e3, True, None]}, {"text": "b"}]
    text, path = json.dumps(rows), tmp_path / "rows.json"
    first = len(json.dumps(rows[:1])) - 1
    for size in range(1, len(text)):
        path.write_text(text[:size], encoding="utf-8")
        found = []
        with pytest.raises(DataError, match=r"rows\.json, row \d: broken JSON") as told:
            found.extend(iter_rows(str(path), split="train"))
        row = 1 if size < first else 2 if size < len(text) - 1 else 3
        assert f"row {row}:" in str(told.value), text[:size]


def test_a_json_list_cut_off_in_a_string_says_what_to_do(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('[{"text": "one"},\n{"text": "two"},\n{"text": "thr')
    with pytest.raises(DataError, match=r"row 3: .*2 rows before are whole\. Fetch the file again"):
        read(path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[{"a": 1} {"b": 2}]', r"row 2: broken JSON at character 10 .*Expecting ','"),
        (
            '[{"a": 1}, {"b": oops, "more": "' + "x" * 40 + '"}]',
            "row 2: broken JSON at character 17",
        ),
        ('[{"a": 1}] []', "broken JSON at character 11 of the file .Extra data"),
        ("[" * 100_000, "row 1: broken JSON"),
        ('[{"a": ' + "1" * 5000 + "}]", "row 1: broken JSON"),
        ('{"a": 1}\n{"a": 2}\n', "found dict, want a JSON list of rows; if each line is an object"),
        ("", "found nothing, want a JSON list of rows"),
    ],
)
def test_a_broken_json_list_is_told_with_its_place(tmp_path, text, told):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(DataError, match=told):
        read(path)


def test_an_error_near_the_start_of_a_long_list_is_told_before_the_rest_is_read(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('[{"a": oops},' + json.dumps({"text": "x" * 20_000_000}) + "]")
    tracemalloc.start()
    with pytest.raises(DataError, match="row 1: broken JSON at character 7"):
        read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000_000


def test_none_is_dropped_from_objects_at_every_depth_and_kept_in_lists():
    row = {"a": None, "b": {"c": None, "d": 0}, "e": [None, {"f": None, "g": ""}], "h": False}
    assert without_none(row) == {"b": {"d": 0}, "e": [None, {"g": ""}], "h": False}


def test_parquet_rows_render_the_text_that_the_same_rows_render_from_jsonl(tmp_path, arrow_cache):
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "assistant", "content": "c", "tool_calls": [{"name": "f"}]}]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    # Arrow gives every message the keys of all: without that, the test would show nothing.
    assert "tool_calls" in pq.read_table(tmp_path / "rows.parquet").to_pylist()[0]["messages"][0]
    tokenizer = make_tokenizer(template=ASKS_FOR_TOOL_CALLS)

    def rendered(found: list[dict]) -> list[str]:
        return [tokenizer.apply_chat_template(r["messages"], tokenize=False) for r in found]

    found = read(tmp_path / "rows.parquet")

    assert rendered(found) == rendered(read(write_jsonl(tmp_path / "rows.jsonl", rows)))
    assert found == rows


def test_a_damaged_parquet_file_is_refused(tmp_path, arrow_cache):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match=r"rows\.parquet: cannot be read"):
        read(tmp_path / "rows.parquet")


def test_a_saved_data_set_folder_is_read(tmp_path, arrow_cache):
    import datasets

    rows = [{"text": "one"}, {"text": "two"}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved") == rows


def test_a_saved_folder_of_splits_gives_the_split_asked_for(tmp_path, arrow_cache):
    import datasets

    parts = {name: datasets.Dataset.from_list([{"text": name}]) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved", split="test") == [{"text": "test"}]


def test_a_split_that_is_not_there_is_refused_by_name(tmp_path, arrow_cache):
    import datasets

    part = datasets.Dataset.from_list([{"text": "one"}])
    datasets.DatasetDict({"train": part}).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match="split 'nope'"):
        read(tmp_path / "saved", split="nope")


@pytest.mark.parametrize("name", ["rows.txt", "rows.csv", "nothing", "nobody/nothing", ""])
def test_what_is_neither_file_nor_folder_nor_hub_name_is_refused(tmp_path, arrow_cache, name):
    (tmp_path / "rows.txt").write_text("hello")
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    source = str(tmp_path / name) if name.startswith("rows") else name
    with pytest.raises(DataError, match="cannot be read as a file, a data set folder or a Hub"):
        read(source)


def test_a_library_error_without_words_is_still_one_message(tmp_path, arrow_cache, monkeypatch):
    import datasets

    def silent(*_args, **_options):
        raise NotImplementedError

    monkeypatch.setattr(datasets, "load_dataset", silent)
    with pytest.raises(DataError, match=r"cannot be read.*\(NotImplementedError"):
        read("some/name")
