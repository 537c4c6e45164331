"""What is shown is what the cache holds and the target sees: ids, positions, mask, reasons."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import make_tokenizer, save_tiny_target, tiny_build, write_jsonl
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_cache import inspect
from dflash_cache.build import build_cache
from dflash_cache.config import BuildConfig, InspectConfig, InspectDataConfig
from dflash_cache.errors import (
    CacheError,
    CacheMismatchError,
    ConfigError,
    DataError,
    TargetError,
)
from dflash_cache.inspect import beginning_of, inspect_cache, inspect_data
from dflash_cache.pieces import pieces_of, visible
from dflash_cache.reader import CacheReader
from dflash_cache.samples import encode_row
from dflash_cli.main import main

BYTE_LEVEL = make_tokenizer()
CHINESE = "你好 🤖 👩‍👩‍👧 ü"
EVIL = "</span><script>alert('&\"')</script>\x1b[31m\u202e"
ANSI = re.compile(r"\x1b\[[\d;]*m")


def chat(user: str, answer: str) -> dict:
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


ROWS = [
    chat("the cat", "sat on a mat"),
    {"messages": [{"role": "user", "content": "nobody answers <b>this</b>"}]},
    chat(CHINESE, f"so {CHINESE}\n\n\tfar "),
    {"text": EVIL},
    {"input_ids": [5, 305, 6, 7, 9], "loss_mask": [0, 0, 1, 1, 0]},
    {"nothing": 1},
    {"input_ids": [5, 6, 7], "loss_mask": [1, 0, 1]},
]
USABLE = [0, 2, 3, 4]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", ROWS)


@pytest.fixture
def look(tiny_target, rows):
    """Inspect rows with the tiny target."""

    def look_at(data: Path = rows, **options):
        return inspect_data(
            InspectDataConfig(**{"target": str(tiny_target), "data": str(data), **options})
        )

    return look_at


@pytest.fixture(scope="module")
def cache(tiny_target, rows, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("cache") / "cache"
    build_cache(tiny_build(tiny_target, rows, out, max_skipped=1.0))
    return out


def tokens_of(sample) -> tuple[list[int], list[bool]]:
    assert [token.position for token in sample.tokens] == list(range(sample.length))
    return [t.id for t in sample.tokens], [t.supervised for t in sample.tokens]


def joined(pieces: list[str | None]) -> str:
    return "".join(piece or "" for piece in pieces)


# --- pieces -------------------------------------------------------------------------------------


def sentence_piece() -> PreTrainedTokenizerFast:
    """Like Llama's: blanks are letters, unknown characters are bytes, a first blank is dropped."""
    words = ["▁", "▁the", "▁cat", "t", "h", "e", "c", "a", "\n"]
    vocab = {piece: i for i, piece in enumerate(["<unk>", *words])}
    vocab |= {f"<0x{byte:02X}>": len(words) + 1 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {"byte level": BYTE_LEVEL, "sentence piece": sentence_piece()}


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd▁"), max_size=30))
def test_pieces_joined_are_the_text_and_no_character_is_broken(kind, text):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = pieces_of(ids, tokenizer)
    assert len(pieces) == len(ids)
    assert joined(pieces) == tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
    assert not any("\ufffd" in (piece or "") for piece in pieces)


@given(st.lists(st.integers(0, 330), max_size=40))
def test_ids_that_are_no_text_still_have_one_piece_each(ids):
    pieces = pieces_of(ids, BYTE_LEVEL)
    assert len(pieces) == len(ids)
    known = BYTE_LEVEL.backend_tokenizer.id_to_token
    assert [piece is None for piece in pieces] == [known(i) is None for i in ids]


def test_a_character_of_several_tokens_stands_at_the_first_of_them():
    ids = BYTE_LEVEL("a🤖b")["input_ids"]
    assert pieces_of(ids, BYTE_LEVEL) == ["a", "🤖", "", "", "", "b"]


@given(st.text())
def test_what_is_shown_can_do_nothing_to_a_terminal_or_a_page(text):
    shown = visible(text).replace("\n", "")
    assert all(char.isprintable() or char in "\u200c\u200d\u3000" for char in shown)
    shown.encode()  # no halves of surrogate pairs


def test_white_space_is_visible_and_still_white():
    assert visible("a \n\tb c \r\n") == "a·⏎\n⇥   b c \\r⏎\n"


# --- rows ---------------------------------------------------------------------------------------


def test_rows_are_shown_with_the_tokens_and_mask_that_they_are_encoded_to(look):
    found = look(count=9)
    assert [sample.number for sample in found.samples] == USABLE
    for sample in found.samples:
        ids, mask = encode_row(ROWS[sample.number], BYTE_LEVEL)
        end = int(mask.nonzero()[0][-1]) + 1
        assert tokens_of(sample) == (ids[:end].tolist(), mask[:end].tolist())


def test_rows_are_shown_as_the_cache_of_them_holds_them(look, cache):
    stored = inspect_cache(InspectConfig(cache=str(cache), count=9))
    assert [s.tokens for s in stored.samples] == [s.tokens for s in look(count=9).samples]


def test_skipped_rows_are_shown_with_reason_and_beginning_and_counted(look):
    found = look(count=9)
    assert [row.number for row in found.skipped_rows] == [1, 5, 6]
    assert sum(found.totals.skipped.values()) == 3
    assert set(found.totals.skipped) == {row.reason for row in found.skipped_rows}
    text = ANSI.sub("", found.text())
    assert "row 1: skipped, no assistant text" in text
    assert "nobody answers <b>this</b>" in text


def test_only_named_rows_are_shown_and_counted(look):
    found = look(sample=(5, 2, 2))
    assert [one.number for one in found.shown] == [2, 5]
    assert (found.totals.rows, found.totals.samples) == (2, 1)
    assert found.looked_at == "the rows asked for"


def test_no_more_of_a_large_data_set_is_read_than_is_said(look, tmp_path, monkeypatch):
    monkeypatch.setattr(inspect, "LOOK_AT_LEAST", 10)
    good = json.dumps(chat("the", "cat sat")) + "\n"
    data = tmp_path / "rows.jsonl"
    data.write_text(good * 20 + "this line is broken\n")
    found = look(data, count=2)
    assert (found.looked_at, found.totals.samples) == ("the first 10 rows", 10)
    assert [sample.number for sample in found.samples] == [0, 1]
    assert look(data, count=15).looked_at == "the first 15 rows"


def test_all_rows_are_called_all_unless_an_option_took_the_first(look):
    assert look().looked_at == "all 7 rows"
    assert look(max_samples=4).looked_at == "the first 4 rows"


def test_a_look_at_useless_rows_ends(look, tmp_path, monkeypatch):
    monkeypatch.setattr(inspect, "LOOK_AT_MOST", 30)
    found = look(write_jsonl(tmp_path / "rows.jsonl", [{}] * 40))
    assert (found.totals.rows, found.totals.samples) == (30, 0)
    assert len(found.skipped_rows) == inspect.SKIPPED_SHOWN
    assert "supervised  0 (none)" in found.text()


def test_skips_that_stop_a_build_are_told(look):
    assert look(max_skipped=0.5).notes == []
    (note,) = look(max_skipped=0.2).notes
    assert "3 of 7 rows cannot be used" in note


def test_buckets_are_those_of_a_build(look, tmp_path):
    lengths = [100, 769, 770, 9000]
    rows = [{"input_ids": [5] * n, "loss_mask": [1] * n} for n in lengths]
    target = save_tiny_target(tmp_path / "long", layers=1)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 10000}))
    found = look(write_jsonl(tmp_path / "rows.jsonl", rows), count=4, target=str(target))
    first, second = BuildConfig.bucket_edges[:2]
    assert [sample.bucket for sample in found.samples] == [first, first, second, 9001]
    assert found.totals.buckets == {"0770": 2, "1216": 1, "9001": 1}


def test_options_of_the_build_count(look):
    assert look(sample=(0,), max_length=5).skipped_rows[0].reason.startswith("longer than 5")
    (sample,) = look(sample=(0,), system="run far").samples
    assert "run far" in joined([token.piece for token in sample.tokens])


def test_rows_that_a_build_leaves_out_for_an_evaluation_are_named_as_such(look, tmp_path):
    prompt = "one two three four dogs run far over there today and saw the cat on a mat"
    data = write_jsonl(tmp_path / "rows.jsonl", [chat(prompt, "sat on"), chat("the", "cat sat")])
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": prompt}])
    found = look(data, exclude=str(prompts))
    assert [sample.number for sample in found.samples] == [1]
    assert "--exclude" in found.skipped_rows[0].reason


def test_the_beginning_of_a_row_has_an_end_and_no_depth():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert beginning_of({"messages": deep}) == "brackets within brackets"
    assert len(beginning_of({"text": "far " * 10_000})) == inspect.BEGINNING + 1


@pytest.mark.parametrize("number", [7, -1])
def test_a_row_that_is_not_there_is_named(look, number):
    with pytest.raises(DataError, match=rf"--sample {number}: .* rows (0 to 6|from 0 on)"):
        look(sample=(0, number))


def test_a_target_without_a_tokenizer_is_one_message(look, tiny_target, tmp_path):
    (tmp_path / "config.json").write_bytes((tiny_target / "config.json").read_bytes())
    with pytest.raises(TargetError, match="no tokenizer"):
        look(target=str(tmp_path))


# --- a cache ------------------------------------------------------------------------------------


def test_a_cache_is_shown_as_it_is_read(cache):
    reader = CacheReader(cache)
    found = inspect_cache(InspectConfig(cache=str(cache), count=9))
    assert [sample.number for sample in found.samples] == USABLE
    for index, sample in enumerate(found.samples):
        assert tokens_of(sample) == tuple(part.tolist() for part in reader.tokens(index))
        assert sample.bucket == reader.records[reader.located[index].unit].bucket


def test_totals_are_those_of_the_seal(cache):
    found = inspect_cache(InspectConfig(cache=str(cache)))
    manifest = CacheReader(cache).manifest
    assert found.totals.skipped == manifest.skipped
    assert found.totals.tokens == manifest.tokens
    assert (found.totals.rows, found.totals.samples) == (7, 4)


def test_samples_come_from_all_over_the_cache(tiny_cache):
    found = inspect_cache(InspectConfig(cache=str(tiny_cache), count=4))
    assert [sample.number for sample in found.samples] == [0, 10, 20, 30]


def test_a_row_that_was_skipped_is_no_sample_of_the_cache(cache):
    with pytest.raises(CacheError, match=r"--sample 1: .* holds 4 of the rows 0 to 6"):
        inspect_cache(InspectConfig(cache=str(cache), sample=(0, 1)))


def test_a_cache_that_is_not_complete_is_refused(tiny_target, rows, tmp_path):
    build_cache(tiny_build(tiny_target, rows, tmp_path / "out", max_skipped=1.0))
    (tmp_path / "out" / "manifest.json").unlink()
    with pytest.raises(CacheError, match="not complete"):
        inspect_cache(InspectConfig(cache=str(tmp_path / "out")))


@pytest.fixture
def moved(rows, tmp_path) -> tuple[Path, Path]:
    """A cache, and its target in a place that the cache does not know."""
    target = save_tiny_target(tmp_path / "target", layers=4)
    build_cache(tiny_build(target, rows, tmp_path / "out", max_skipped=1.0, target_layers=(1,)))
    return tmp_path / "out", target.rename(tmp_path / "elsewhere")


def test_a_cache_without_its_tokenizer_shows_ids_and_says_why(moved):
    cache, _ = moved
    found = inspect_cache(InspectConfig(cache=str(cache), sample=(0,)))
    assert "ids without text" in found.notes[0]
    assert {token.piece for token in found.samples[0].tokens} == {None}
    assert f"⟨{found.samples[0].tokens[0].id}⟩" in found.text()
    assert found.to_dict()["samples"][0]["text_supervised"] == []


def test_another_tokenizer_in_the_same_place_is_not_believed(moved):
    cache, target = moved
    text = (target / "tokenizer.json").read_text().replace("<spare>", "<other>")
    (target / "tokenizer.json").write_text(text)
    target.rename(target.with_name("target"))
    (note,) = inspect_cache(InspectConfig(cache=str(cache))).notes
    assert "not the one that" in note


def test_a_target_that_is_named_has_to_be_the_one(moved, tiny_target, tmp_path):
    cache, target = moved
    reader = CacheReader(cache)
    tokenizer, notes = inspect._tokenizer_of(reader, target=str(target))
    assert (tokenizer.eos_token, notes) == ("<|im_end|>", [])
    text = (target / "tokenizer.json").read_text().replace("<spare>", "<other>")
    (target / "tokenizer.json").write_text(text)
    with pytest.raises(CacheMismatchError, match="not the one that"):
        inspect._tokenizer_of(reader, target=str(target))
    with pytest.raises(TargetError, match="nowhere: not on this machine"):
        inspect._tokenizer_of(reader, target=str(tmp_path / "nowhere"))


# --- what people see ----------------------------------------------------------------------------


def test_the_terminal_shows_the_text_with_a_bar_at_what_is_supervised(look):
    lines = ANSI.sub("", look(sample=(0,)).text()).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("sample 0: "))
    assert [line[8:] for line in lines[start + 1 : start + 5]] == [
        "  <|im_start|>user⏎",
        "  the cat<|im_end|>⏎",
        "  <|im_start|>assistant⏎",
        "┃ sat on a mat<|im_end|>",
    ]


def test_ids_in_the_terminal_are_all_ids_at_their_positions(look):
    (sample,) = look(sample=(2,)).samples
    lines = ANSI.sub("", look(sample=(2,)).text()).splitlines()
    shown: list[int] = []
    for line in lines[lines.index("ids") + 1 :]:
        assert int(line[:7]) == len(shown)
        ids = [int(word) for word in line[10:].split()]
        assert {t.supervised for t in sample.tokens[len(shown) :][: len(ids)]} == {line[8] == "┃"}
        shown += ids
    assert shown == tokens_of(sample)[0]


def test_characters_of_several_tokens_are_whole_in_the_terminal(look):
    assert look(sample=(2,)).text().count(CHINESE) == 2


def test_long_text_is_cut_into_lines_that_say_where_they_start(look, tmp_path):
    data = write_jsonl(tmp_path / "rows.jsonl", [{"text": "🤖 the cat sat " * 20}])
    found = look(data)
    lines = ANSI.sub("", found.text()).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("sample 0: "))
    text = lines[first + 1 : lines.index("ids")]
    assert len(text) > 1
    assert "".join(line[10:] for line in text) == "🤖 the cat sat " * 20
    for line in text:
        token = found.samples[0].tokens[int(line[:7])]
        assert line[10:].startswith(token.piece)


def test_data_cannot_write_to_the_terminal(look):
    plain = ANSI.sub("", look(sample=(3,)).text())
    assert "\\x1b[31m\\u202e" in plain
    assert "\x1b" not in plain


def test_no_color_means_no_colours(look, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in look().text()


class Page(HTMLParser):
    """A page taken apart; refuses tags that do not close in order, and all that is fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.section = ""
        self.tokens: dict[str, list[dict[str, str]]] = {}
        self.texts: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        assert tag not in ("script", "link", "img", "iframe", "object")
        assert not values.keys() & {"src", "onclick"}
        assert values.get("href", "#").startswith("#")
        if tag == "section":
            self.section = values["id"]
            self.tokens[self.section] = []
        if tag == "span" and "data-i" in values:
            self.tokens[self.section].append(values)
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.section and self.open[-1:] == ["span"]:
            self.texts[self.section] = self.texts.get(self.section, "") + data


def written(look, tmp_path, **options) -> tuple[str, Page]:
    found = look(html=tmp_path / "page.html", **options)
    assert found.html == tmp_path / "page.html"
    text = found.html.read_text(encoding="utf-8")
    return text, Page(text)


def test_the_page_has_every_token_once_with_position_id_and_mask(look, tmp_path):
    _, page = written(look, tmp_path, count=9)
    for sample in look(count=9).samples:
        spans = page.tokens[f"sample-{sample.number}"]
        assert [int(span["data-i"]) for span in spans] == tokens_of(sample)[0]
        assert ["s" in span["class"].split() for span in spans] == tokens_of(sample)[1]
        for position, span in enumerate(spans):
            assert span["title"].startswith(f"position {position}, id {span['data-i']}, ")


def test_the_page_shows_chats_and_obeys_nothing_in_them(look, tmp_path):
    text, page = written(look, tmp_path, count=9)
    assert page.texts["sample-3"] == visible(EVIL)
    assert "<script" not in text
    assert page.texts["sample-2"].count(CHINESE) == 2
    assert "nobody answers &lt;b&gt;this&lt;/b&gt;" in text


def test_the_page_needs_nothing_else(look, tmp_path):
    text, _ = written(look, tmp_path)
    for outside in ("http:", "https:", "@import", "url(", "src="):
        assert outside not in text


def test_every_name_in_the_contents_leads_to_a_section(look, tmp_path):
    text, page = written(look, tmp_path, count=9)
    targets = set(re.findall(r'href="#([^"]+)"', text)) - {"top"}
    assert targets == page.tokens.keys()
    assert "row-1" in targets


def test_a_page_in_no_folder_is_refused_before_the_work(tmp_path):
    with pytest.raises(ConfigError, match="--html"):
        inspect_cache(InspectConfig(cache="none", html=tmp_path / "none" / "page.html"))


def test_a_page_that_cannot_be_written_is_one_message(look, tmp_path, monkeypatch):
    def refuse(path, payload):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(inspect, "write_file", refuse)
    with pytest.raises(ConfigError, match=r"page.html: cannot be written \(Permission denied\)"):
        look(html=tmp_path / "page.html")


# --- the command --------------------------------------------------------------------------------


def run(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["cache", "inspect", *map(str, words)])
    assert result.exit_code == code, result.output
    return result.output


def test_the_command_shows_a_cache_and_rows_alike(cache, rows, tiny_target):
    stored = json.loads(run(cache, "--count", "9", "--json"))
    fresh = json.loads(run("--data", rows, "--target", tiny_target, "--count", "9", "--json"))
    for one, other in zip(stored["samples"], fresh["samples"], strict=True):
        assert {**one, "bucket": 0} == {**other, "bucket": 0}
    assert stored["skipped"] == fresh["skipped"]
    assert (stored["rows"], fresh["rows"]) == (7, 7)


def test_json_says_tokens_text_and_skips(rows, tiny_target):
    found = json.loads(run("--data", rows, "--target", tiny_target, "--sample", "0,1", "--json"))
    (sample,) = found["samples"]
    assert sample["sample"] == 0
    assert sample["length"] == len(sample["tokens"])
    assert sample["supervised"] == sum(token["supervised"] for token in sample["tokens"])
    assert sample["text_supervised"] == ["sat on a mat<|im_end|>"]
    assert {"position", "id", "piece", "supervised"} <= set(sample["tokens"][0])
    assert found["skipped"] == {"no assistant text": 1}
    assert found["skipped_rows"][0]["row"] == 1
    assert found["html"] is None


def test_the_command_strips_colours_where_there_is_no_terminal(cache):
    assert "\x1b" not in run(cache)


def test_the_command_says_where_the_page_is(cache, tmp_path):
    page = tmp_path / "page.html"
    assert str(page) in run(cache, "--html", page)
    assert json.loads(run(cache, "--html", page, "--json"))["html"] == str(page)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Give a CACHE, or rows by --data and --target"),
        (["--data", "x"], "Missing option '--target'"),
        (["CACHE", "--data", "x"], "--data: not with a cache"),
        (["CACHE", "--thinking", "on"], "--thinking: not with a cache"),
    ],
)
def test_words_that_do_not_go_together_are_a_usage_error(words, message):
    assert message in run(*words, code=2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["/nowhere"], "not a cache folder"),
        (["/nowhere", "--count", "0"], "--count 0"),
        (["--data", "/nowhere.jsonl", "--target", "TARGET"], "no such file"),
        (["--data", "x.jsonl", "--target", "/"], "no config.json"),
    ],
)
def test_a_mistake_is_one_message(words, message, tiny_target):
    output = run(*[str(tiny_target) if word == "TARGET" else word for word in words], code=1)
    assert output.startswith("Error: ")
    assert message in output
