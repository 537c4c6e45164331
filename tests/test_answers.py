"""`dflash cache answers` against servers in other processes: scripted ones, and the real target."""

import errno
import io
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import QUICKSTART, make_tokenizer, tiny_build, write_jsonl

from dflash_cache import answer_file, answers, server
from dflash_cache.answers import repeats_itself, write_answers
from dflash_cache.build import build_cache
from dflash_cache.config import AnswersConfig
from dflash_cache.errors import CacheBusyError, ConfigError, DataError, DiskFullError
from dflash_cache.reader import CacheReader
from dflash_cache.rows import iter_rows
from dflash_cache.samples import encode_row
from dflash_cache.server import ServerError
from dflash_cli.main import main

HERE = Path(__file__).parent

LOOP = "and then the dog ran to the cat " * 40


class ChatServer:
    """A server process, and what it has seen."""

    def __init__(self, mode: str) -> None:
        words = [sys.executable, str(HERE / "chat_server.py"), mode]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.root = f"http://127.0.0.1:{int(self.process.stdout.readline())}"
        self.address = f"{self.root}/v1"

    def get(self, path: str) -> dict:
        with urllib.request.urlopen(self.root + path, timeout=30) as reply:
            return json.load(reply)

    @property
    def seen(self) -> dict:
        return self.get("/seen")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def scripted():
    chat_server = ChatServer("scripted")
    yield chat_server
    chat_server.end()


@pytest.fixture
def chat(scripted, monkeypatch):
    """A scripted server that has seen nothing yet, and pauses that do not last."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(server, "BACK_OFF", 0.001)
    scripted.get("/forget")
    return scripted


@pytest.fixture
def config(chat, tmp_path):
    """Options for rows, or for one row per script of the server."""

    def make(rows: list, **options) -> AnswersConfig:
        rows = [row if is_row(row) else {"prompt": json.dumps(row)} for row in rows]
        data = write_jsonl(tmp_path / "rows.jsonl", rows)
        given = {"out": tmp_path / "answers.jsonl", "server": chat.address, "max_failed": 1.0}
        return AnswersConfig(data=str(data), **{**given, **options})

    return make


def is_row(row: dict) -> bool:
    return bool({"messages", "conversations", "prompt", "text"} & row.keys())


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def said(path: Path) -> list[list[str]]:
    """The answers of every row."""
    return [
        [turn["content"] for turn in row["messages"] if turn["role"] == "assistant"]
        for row in lines(path)
    ]


def turn(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def script(**told) -> str:
    return json.dumps(told)


def test_chats_of_every_form_are_answered_and_feed_the_build(config):
    rows = [
        {"id": "a", "messages": [turn("user", "one"), turn("assistant", "old")]},
        {"conversations": [{"from": "human", "value": "two"}, {"from": "gpt", "value": "old"}]},
        {"prompt": "three", "response": "old"},
        {"prompt": "four"},
        {"messages": [turn("user", "five")]},
    ]
    options = config(rows)
    summary = write_answers(options)
    assert said(options.out) == [[f"You said {n}"] for n in ("one", "two", "three", "four", "five")]
    first, second = lines(options.out)[:2]
    assert (first["id"], first["row"], first["model"]) == ("a", 0, "target")
    assert (second["id"], second["finish_reasons"], second["temperature"]) == (1, ["stop"], 0.0)
    assert summary["written"] == summary["rows"] == 5
    assert summary["tokens"] == 15
    tokenizer = make_tokenizer()
    for row in iter_rows(str(options.out), split="train"):
        ids, mask = encode_row(row, tokenizer)
        assert tokenizer.decode(ids[mask]) == row["messages"][-1]["content"] + "<|im_end|>"


def test_the_cache_build_takes_what_comes_out(config, tiny_target, tmp_path):
    said_so = "🤖 one\u2028two <|im_end|>\x00" + " ".join(str(n) for n in range(20))
    turns = [turn("user", "a"), turn("assistant", ""), turn("user", script(say=LOOP))]
    options = config([{"say": said_so}, {"messages": turns}, {"text": "none"}])
    assert write_answers(options)["written"] == 2
    assert said(options.out)[0] == [said_so]
    build_cache(tiny_build(tiny_target, options.out, tmp_path / "cache", max_skipped=0.0))
    assert CacheReader(tmp_path / "cache").manifest.samples == 2


def test_each_turn_is_asked_behind_the_new_answers(chat, config):
    old = turn("assistant", "old")
    row = {"messages": [turn("system", "s"), turn("user", "a"), old, turn("user", "b"), old]}
    options = config([row])
    write_answers(options)
    asked = [request["messages"] for request in chat.seen["requests"]]
    assert asked[0] == [turn("system", "s"), turn("user", "a")]
    assert asked[1] == [*asked[0], turn("assistant", "You said a"), turn("user", "b")]
    assert lines(options.out)[0]["messages"] == [*asked[1], turn("assistant", "You said b")]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "plain"}, "no messages, conversations or prompt"),
        ({"messages": []}, "no user turn"),
        ({"messages": [turn("system", "s")]}, "no user turn"),
        ({"messages": [turn("assistant", "hi"), turn("user", "a")]}, "starts with an assistant"),
        ({"messages": [turn("user", "a"), turn("tool", "b"), turn("user", "c")]}, "tool results"),
        ({"messages": [turn("wizard", "a")]}, "unknown role"),
    ],
)
def test_rows_that_ask_nothing_are_skipped_by_reason(chat, config, row, reason):
    options = config([row, {"prompt": "hello"}])
    summary = write_answers(options)
    ((why, count),) = summary["skipped"].items()
    assert reason in why
    assert (count, summary["written"], summary["failed"]) == (1, 1, 0)
    assert sum(chat.seen["asked"].values()) == 1


def test_the_request_says_what_was_typed(chat, config, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    typed = {"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 77, "seed": 5}
    options = config([{"prompt": "a"}], **typed, system="be brief", thinking="off", model="m")
    write_answers(options)
    (request,) = chat.seen["requests"]
    assert request == {
        "model": "m",
        "messages": [turn("system", "be brief"), turn("user", "a")],
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 77,
        "seed": 5,
        "stream": False,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert chat.seen["keys"] == ["Bearer secret"]
    assert lines(options.out)[0]["messages"][0] == turn("system", "be brief")


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_thoughts_are_kept_and_not_sent_back(chat, config, key):
    first = script(say="yes", more={key: "hm, hm"})
    row = {"messages": [turn("user", first), turn("assistant", ""), turn("user", "b")]}
    options = config([row])
    write_answers(options)
    kept = lines(options.out)[0]["messages"][1]
    assert kept == {**turn("assistant", "yes"), "reasoning_content": "hm, hm"}
    assert chat.seen["requests"][1]["messages"][1] == turn("assistant", "yes")


@pytest.mark.parametrize(
    "action", ["500", "503", "429", "hang up", "half", "garbage", "no choices"]
)
def test_a_server_that_fails_is_asked_again(chat, config, action):
    options = config([{"do": [action, action, "ok"], "say": "at last"}], retries=2)
    assert write_answers(options)["failed"] == 0
    assert list(chat.seen["asked"].values()) == [3]
    assert said(options.out) == [["at last"]]


def test_a_server_that_asks_for_a_pause_gets_it(chat, config, monkeypatch):
    monkeypatch.setattr(server, "BACK_OFF", 60.0)  # Retry-After: 0 counts, not this
    started = time.monotonic()
    assert write_answers(config([{"do": ["429", "ok"]}]))["failed"] == 0
    assert time.monotonic() - started < 30


def test_a_connection_that_went_stale_is_no_failure(chat, config):
    rows = [{"do": ["ok, then hang up"], "n": n} for n in range(4)]
    summary = write_answers(config(rows, retries=0, concurrency=1))
    assert (summary["written"], summary["failed"]) == (4, 0)


def test_a_request_that_a_server_worked_on_is_no_stale_connection(chat, config, monkeypatch):
    monkeypatch.setattr(server, "AT_ONCE", 0.2)
    options = config([{"n": 0}, {"do": ["hang up"], "seconds": 0.6}], retries=0, concurrency=1)
    assert write_answers(options)["failed"] == 1
    assert list(chat.seen["asked"].values()) == [1, 1]


def test_a_server_that_closes_every_connection_has_as_long_for_answers(chat, config, monkeypatch):
    monkeypatch.setattr(server, "CONNECT_SECONDS", 0.2)
    rows = [{"do": ["ok, and close"], "n": n, "seconds": 0.5} for n in range(3)]
    assert write_answers(config(rows, retries=0, concurrency=1))["failures"] == {}
    assert chat.seen["connections"] == 3


def test_a_server_closed_as_an_answer_ends_leaves_no_connection_open(chat, monkeypatch):
    made = []
    read = server._read

    def read_and_close(response, seconds):
        body = read(response, seconds)
        made.extend(opened._busy)
        opened.__exit__()  # in another thread, as a rule: the reader has not said that it is done
        return body

    monkeypatch.setattr(server, "_read", read_and_close)
    opened = server.Server(chat.address, timeout=5, retries=0)
    opened.models()
    assert [connection.sock for connection in made] == [None]


def test_a_server_that_streams_is_told_at_once(chat, config):
    rows = [{"do": ["stream"], "n": n} for n in range(20)]
    with pytest.raises(ServerError, match="streams, though asked for whole answers"):
        write_answers(config(rows, concurrency=2))
    assert sum(chat.seen["asked"].values()) < 6


def test_blanks_while_a_server_thinks_do_not_hold_up_the_timeout(config):
    summary = write_answers(config([{"do": ["drip"]}], timeout=0.5))
    assert summary["failures"] == {"no answer in 0.5 s": 1}


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        ([], "no answer"),
        ({"choices": [{"message": "hi"}]}, "no answer"),
        ({"choices": [{"message": {"content": "a"}}], "usage": 3}, "no answer"),
        ({"choices": [{"message": {"content": "a"}}], "usage": {"completion_tokens": "b"}}, "no a"),
        ({"choices": [{"message": {"content": ["a"]}}]}, "no text"),
        ({"choices": [{"message": {"content": "a", "reasoning": {"b": 1}}}]}, "no text"),
        ({"choices": [{"message": {"content": "a", "tool_calls": "b"}}]}, "no list"),
    ],
)
def test_a_reply_of_another_shape_is_a_failure_that_may_pass(reply, told):
    with pytest.raises(server._Unwell, match=told):
        server._read_reply(reply)


def test_the_first_of_several_choices_is_the_answer_and_nobody_needs_to_count():
    choices = [{"message": {"content": content}} for content in ("a", "b")]
    reply = server._read_reply({"choices": choices})
    assert (reply.message["content"], reply.finish_reason, reply.tokens) == ("a", None, 0)


def test_failures_that_differ_in_numbers_and_ids_are_one_reason_without_colours(config):
    rows = [{"do": [f"400 \x1b[31mrequest a{n}-{n}f"]} for n in range(3)]
    summary = write_answers(config(rows, concurrency=1))
    assert summary["failures"] == {"HTTP 400: \\x1b[31mrequest a0-0f": 3}


def test_a_refused_row_fails_at_once_and_is_asked_again_by_the_next_run(chat, config):
    rows = [{"do": [f"400 {n}000 tokens are too many", "ok"], "n": n} for n in (3, 4)]
    options = config([*rows, {"say": "fine"}], concurrency=1)
    summary = write_answers(options)
    assert summary["failures"] == {"HTTP 400: 3000 tokens are too many": 2}
    assert sorted(chat.seen["asked"].values()) == [1, 1, 1]
    assert write_answers(options)["failed"] == 0
    assert sorted(chat.seen["asked"].values()) == [1, 2, 2]
    assert [row["row"] for row in lines(options.out)] == [0, 1, 2]


def test_too_many_failures_stop_and_keep_what_is_done(config):
    rows = [*({"n": n} for n in range(6)), *({"n": n, "do": ["400 no"]} for n in range(6))]
    options = config(rows, max_failed=0.25, concurrency=1)
    with pytest.raises(ServerError, match=r"4 rows failed.*4 HTTP 400: no.* 6 of 12 rows"):
        write_answers(options)
    assert len(lines(options.out)) == 6


def test_a_server_that_goes_away_stops_the_run(config):
    rows = [{"n": n, "do": ["hang up"]} for n in range(40)]
    with pytest.raises(ServerError, match="failed for 9 rows on end"):
        write_answers(config(rows, retries=0, concurrency=2))


@pytest.mark.parametrize("status", ["401", "403", "404"])
def test_what_no_row_can_mend_stops_at_once(chat, config, status):
    options = config([{"n": n, "do": [f"{status} who are you"]} for n in range(9)], concurrency=1)
    with pytest.raises(ServerError, match=f"HTTP {status}: who are you"):
        write_answers(options)
    assert sum(chat.seen["asked"].values()) < 3


def test_an_answer_that_takes_too_long_fails_and_is_not_asked_again(chat, config):
    summary = write_answers(config([{"seconds": 3}, {"say": "quick"}], timeout=0.5))
    assert summary["failures"] == {"no answer in 0.5 s": 1}
    assert summary["written"] == 1
    assert sorted(chat.seen["asked"].values()) == [1, 1]


def test_a_server_that_is_not_there_is_one_error_and_leaves_nothing(config, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        with pytest.raises(ServerError, match=r"Connection refused.*is it running"):
            write_answers(config([{"n": 1}], server=address))
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize(
    "address",
    [
        "localhost:8000",
        "ftp://x/v1",
        "http://",
        "http://h:port",
        "http://[::1/v1",
        "http://h/v1?a=1",
    ],
)
def test_an_address_that_is_none_is_refused(config, address):
    with pytest.raises(ConfigError, match="want an address as http"):
        write_answers(config([{"n": 1}], server=address))


def test_a_name_that_is_no_host_is_one_error(config):
    with pytest.raises(ServerError, match=r"label empty.*is this its address"):
        write_answers(config([{"n": 1}], server="http://a..b/v1"))


@pytest.mark.parametrize(
    "address", ["http://me:secret@h/v1", "http://me:secret@h:x", "me:secret@h"]
)
def test_a_password_in_an_address_is_refused_and_not_repeated(config, address):
    with pytest.raises(ConfigError, match="without user and password") as refused:
        write_answers(config([{"n": 1}], server=address))
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("http://h/a/v1/", ("h", 80, "/a/v1")),
        ("https://h", ("h", 443, "")),
        ("http://[::1]/v1", ("::1", 80, "/v1")),
        ("https://[::1]:8000/v1", ("::1", 8000, "/v1")),
    ],
)
def test_an_address_leads_to_host_port_and_path(address, place):
    opened = server.Server(address, timeout=1, retries=0)
    connection = opened._kind(*opened._place)
    assert (connection.host, connection.port, opened._path) == place


@pytest.mark.parametrize("key", ["sec\nret", "sécret"])
def test_a_key_that_is_none_is_refused_and_not_repeated(config, monkeypatch, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(ConfigError, match="OPENAI_API_KEY") as refused:
        write_answers(config([{"n": 1}]))
    assert "ret" not in str(refused.value)


def test_the_key_is_sent_and_written_nowhere(chat, config, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret\n")
    options = config([{"n": 1}, {"do": ["echo the key"]}], concurrency=1)
    with pytest.raises(ServerError, match=r"not for Bearer \(the key\)"):
        write_answers(options)
    assert set(chat.seen["keys"]) == {"Bearer secret"}
    assert not any(b"secret" in path.read_bytes() for path in options.out.parent.iterdir())


def test_one_of_several_models_has_to_be_named(chat, config):
    two = chat.address.replace("/v1", "/two/v1")
    with pytest.raises(ServerError, match=r"serves 2 models \(one, two\); choose one with --model"):
        write_answers(config([{"n": 1}], server=two))
    options = config([{"n": 1}], server=two, model="two")
    assert write_answers(options)["model"] == "two"


def test_as_many_requests_are_under_way_as_asked_for(chat, config):
    rows = [{"n": n, "wait_for": 7} for n in range(21)]
    write_answers(config(rows, concurrency=7))
    assert chat.seen["most_at_once"] == 7
    assert chat.seen["connections"] == 7  # kept alive, one per thread


def test_the_finished_file_does_not_depend_on_who_came_first(config, tmp_path):
    rows = [{"n": n, "seconds": 0.2 if n % 5 == 0 else 0.0} for n in range(20)]
    found = []
    for concurrency in (1, 8):
        options = config(rows, concurrency=concurrency, out=tmp_path / f"{concurrency}.jsonl")
        write_answers(options)
        found.append(options.out.read_bytes())
    assert found[0] == found[1]
    assert [row["row"] for row in lines(options.out)] == list(range(20))


# --- answers that cannot be learnt from ---


def test_cut_looping_and_empty_answers_are_dropped_and_counted(chat, config):
    rows = [
        {"say": "half of", "more": {"finish": "length"}},
        {"say": LOOP},
        {"say": " "},
        {"say": "untold", "more": {"finish": None, "tokens": 1024}},
        {"say": "filtered", "more": {"finish": "content_filter"}},
        {"say": "good"},
    ]
    options = config(rows)
    summary = write_answers(options)
    assert said(options.out) == [["good"]]
    assert (summary["cut"], summary["looping"], summary["failed"]) == (2, 1, 0)
    assert sum(summary["skipped"].values()) + summary["written"] == summary["rows"]
    dropped = lines(options.out.with_name("answers.jsonl.dropped.jsonl"))
    assert [row["row"] for row in dropped] == [0, 1, 2, 3, 4]
    again = write_answers(options)
    assert {**again, "seconds": 0} == {**summary, "seconds": 0}
    assert sum(chat.seen["asked"].values()) == 6


def test_a_chat_ends_before_its_first_flawed_answer(chat, config):
    turns = [turn("user", "a"), turn("assistant", ""), turn("user", script(say=LOOP))]
    options = config([{"messages": [*turns, turn("assistant", ""), turn("user", "c")]}])
    summary = write_answers(options)
    (row,) = lines(options.out)
    assert row["messages"] == [turn("user", "a"), turn("assistant", "You said a")]
    assert row["shortened"] == answers.LOOPING
    assert (summary["shortened"], summary["looping"], summary["skipped"]) == (1, 1, {})
    assert sum(chat.seen["asked"].values()) == 2  # the third turn is not asked for


def test_looping_answers_are_kept_on_request(config):
    options = config([{"say": LOOP}], keep_looping=True)
    assert write_answers(options)["looping"] == 0
    assert said(options.out) == [[LOOP]]


def test_a_tool_call_ends_a_chat_and_never_stands_in_its_middle(config):
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    calling = script(say=None, more={"finish": "tool_calls", "tool_calls": [call]})
    tools = [{"type": "function", "function": {"name": "f"}}]
    last = {"messages": [turn("user", calling)], "tools": tools}
    middle = {"messages": [turn("user", calling), turn("assistant", ""), turn("user", "b")]}
    options = config([last, middle])
    assert write_answers(options)["skipped"] == {answers.CALLS: 1}
    (row,) = lines(options.out)
    assert (row["messages"][-1]["tool_calls"], row["tools"]) == ([call], tools)


@pytest.mark.parametrize(
    ("text", "loops"),
    [
        ("", False),
        ("yes yes yes", False),
        ("the cat sat on a mat and saw one two three four dogs run far", False),
        (LOOP, True),
        ("aaaa" * 200, True),
        ("1000000000000000000000000000000000000000", True),
        ("| --- " * 30, True),
        ("我喜歡貓" * 20, True),
        ("敏捷的棕色狐狸跳過了懶狗而月亮從山後面慢慢地升起來", False),
        ("ฉันรักแมว" * 20, True),
    ],
)
def test_texts_that_repeat_themselves_are_known(text, loops):
    assert repeats_itself(text) is loops


# --- going on after a stop ---


def client(options: AnswersConfig) -> subprocess.Popen:
    words = ["cache", "answers", "--data", options.data, "--out", options.out]
    words += ["--server", options.server, "--concurrency", options.concurrency]
    words += ["--max-failed", options.max_failed]
    return subprocess.Popen(
        [sys.executable, "-m", "dflash_cli", *map(str, words)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def stopped(options: AnswersConfig, *, by: int, after: int) -> tuple[int, str]:
    """Run the command in a process that gets a signal when so many rows are there."""
    process = client(options)
    try:
        deadline = time.monotonic() + 60
        while not options.out.exists() or options.out.read_bytes().count(b"\n") < after:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.send_signal(by)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    return process.returncode, errors


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_goes_on_and_asks_nothing_twice(chat, config, number):
    rows = [{"n": n, "seconds": 0.1} for n in range(40)]
    options = config(rows, concurrency=3)
    code, errors = stopped(options, by=number, after=9)
    assert (code == 1 and "Aborted!" in errors) if number == signal.SIGINT else code == -number
    assert "Traceback" not in errors
    before = {row["row"] for row in lines(options.out)}
    assert 9 <= len(before) < 40
    summary = write_answers(options)
    assert (summary["written"], summary["failed"]) == (40, 0)
    assert [row["row"] for row in lines(options.out)] == list(range(40))
    twice = {key: n for key, n in chat.seen["asked"].items() if n > 1}
    assert max(twice.values(), default=1) <= 2
    assert len(twice) <= 3  # those that were under way
    assert not any(json.loads(json.loads(key))["n"] in before for key in twice)


def test_ctrl_c_does_not_wait_for_slow_answers(config):
    rows = [{"n": 0}, *({"n": n, "seconds": 30} for n in range(1, 9))]
    options = config(rows, concurrency=4)
    started = time.monotonic()
    code, _ = stopped(options, by=signal.SIGINT, after=1)
    assert code == 1
    assert time.monotonic() - started < 20
    assert len(lines(options.out)) == 1


def test_every_cut_of_the_last_line_is_mended(chat, config):
    options = config([{"n": n, "say": "ü"} for n in range(3)])
    write_answers(options)
    whole = options.out.read_bytes()
    size = len(whole.splitlines(keepends=True)[-1])
    for left in (1, size // 2, size - 1):
        options.out.write_bytes(whole[: len(whole) - size + left])
        assert write_answers(options)["written"] == 3
        assert options.out.read_bytes() == whole
    assert sorted(chat.seen["asked"].values()) == [1, 1, 4]


def test_a_damaged_line_is_told_by_its_number(config):
    options = config([{"n": n} for n in range(3)])
    write_answers(options)
    options.out.write_bytes(b'{"row": "x"}\n' + options.out.read_bytes())
    with pytest.raises(DataError, match=r"answers.jsonl, line 1: not a line that"):
        write_answers(options)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"temperature": 0.7}, "begun with temperature 0.0, this run has temperature 0.7"),
        ({"max_new_tokens": 9}, "max_new_tokens 1024, this run has max_new_tokens 9"),
        ({"system": "s"}, "begun with system None"),
        ({"model": "other"}, "begun with model 'target', this run has model 'other'"),
    ],
)
def test_going_on_with_other_settings_is_refused_by_name(config, changed, told):
    rows = [{"n": 1, "do": ["400 no"]}]
    write_answers(config(rows))
    with pytest.raises(DataError, match=re.escape(told)):
        write_answers(config(rows, **changed))


def test_another_model_is_refused_though_nothing_is_left_to_ask(config):
    write_answers(config([{"n": 1}]))
    with pytest.raises(DataError, match="begun with model 'target', this run has model 'other'"):
        write_answers(config([{"n": 1}], model="other"))


def test_dropped_rows_of_answers_that_were_removed_are_not_believed(config):
    options = config([{"say": LOOP}, {"n": 1}])
    write_answers(options)
    options.out.unlink()
    options.out.with_name("answers.jsonl.settings.json").unlink()
    with pytest.raises(DataError, match=r"dropped\.jsonl: exists and was not begun"):
        write_answers(options)


def test_a_full_disk_keeps_whole_lines_and_the_next_run_goes_on(chat, config, monkeypatch):
    class FullDisk(io.FileIO):
        def write(self, line):
            if self.tell() > 0:
                super().write(line[: len(line) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(line)

    real_open = open
    options = config([{"n": n} for n in range(3)], concurrency=1)
    with monkeypatch.context() as patch:
        patch.setattr(
            answer_file,
            "open",
            lambda path, mode: (FullDisk if mode == "ab" else real_open)(path, mode),
            raising=False,
        )
        with pytest.raises(DiskFullError, match="All finished rows are kept"):
            write_answers(options)
    assert options.out.read_bytes().count(b"\n") == 1
    assert write_answers(options)["written"] == 3
    assert [row["row"] for row in lines(options.out)] == [0, 1, 2]
    assert min(chat.seen["asked"].values()) == 1  # the row that was written


def test_going_on_with_other_rows_is_refused(config):
    write_answers(config([{"n": 1}]))
    with pytest.raises(DataError, match="begun with data_sha256"):
        write_answers(config([{"n": 2}]))


def test_what_may_change_between_two_runs_may(config, tmp_path):
    options = config([{"n": 1, "do": ["400 no", "ok"]}])
    write_answers(options)
    moved = shutil.move(options.data, tmp_path / "moved.jsonl")
    again = AnswersConfig(data=str(moved), out=options.out, server=options.server, concurrency=1)
    assert write_answers(again)["written"] == 1


def test_a_file_of_somebody_else_is_refused(config, tmp_path):
    out = write_jsonl(tmp_path / "mine.jsonl", [{"dear": "data"}])
    with pytest.raises(DataError, match="was not begun by this command"):
        write_answers(config([{"n": 1}], out=out))
    assert lines(out) == [{"dear": "data"}]
    with pytest.raises(ConfigError, match="is the data itself"):
        write_answers(config([{"n": 1}], out=tmp_path / "rows.jsonl"))
    with pytest.raises(ConfigError, match=r"ends in \.jsonl"):
        write_answers(config([{"n": 1}], out=tmp_path / "answers"))


def test_a_complete_file_needs_no_server(chat, config):
    options = config([{"n": 1}, {"text": "x"}])
    summary = write_answers(options)
    nowhere = AnswersConfig(data=options.data, out=options.out, server="http://127.0.0.1:9/v1")
    assert {**write_answers(nowhere), "seconds": 0} == {**summary, "seconds": 0}


def test_two_runs_never_write_one_file(chat, config):
    options = config([{"n": 0}, {"n": 1, "seconds": 20}], concurrency=2)
    process = client(options)
    try:
        deadline = time.monotonic() + 60
        while not options.out.exists() or not options.out.read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(CacheBusyError, match="another `dflash cache answers` is writing"):
            write_answers(options)
    finally:
        process.kill()
        process.communicate()


def test_the_command_prints_one_json_object_and_one_error(chat, config):
    options = config([{"n": 1}])
    words = ["cache", "answers", "--data", options.data, "--out", str(options.out), "--json"]
    done = CliRunner().invoke(main, [*words, "--server", chat.address])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["written"] == 1
    lost = CliRunner().invoke(main, [*words, "--server", chat.root, "--temperature", "1"])
    assert lost.exit_code == 1
    assert lost.stderr.startswith("Error: ")
    assert lost.stderr.count("\n") == 1


# --- the real target ---


@pytest.mark.realmodel
def test_greedy_answers_are_what_the_target_generates_and_agrees_with(real_target, tmp_path):
    import torch

    from dflash_cache.config import BuildConfig
    from dflash_cache.weights import load_target

    prompts = ["What is the capital of France?", "Say hello in French."]
    follow_up = [turn("assistant", ""), turn("user", "Thank you. Write one short sentence more.")]
    rows = [{"messages": [turn("user", prompt), *follow_up]} for prompt in prompts]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    out = tmp_path / "answers.jsonl"
    chat_server = ChatServer(str(real_target))
    try:
        options = AnswersConfig(
            data=str(data), out=out, server=chat_server.address, concurrency=2, max_new_tokens=64
        )
        summary = write_answers(options)
    finally:
        chat_server.end()
    assert summary["written"] == len(prompts), summary["skipped"]
    target = load_target(str(real_target), dtype="float32", device="cpu")
    for row in lines(out):
        for position, message in enumerate(row["messages"]):
            if message["role"] == "assistant":
                prompt = target.tokenizer.apply_chat_template(
                    row["messages"][:position],
                    add_generation_prompt=True,
                    return_dict=True,
                    return_tensors="pt",
                )
                with torch.inference_mode():
                    ids = target.model.generate(**prompt, do_sample=False, max_new_tokens=64)
                answer = ids[0, prompt["input_ids"].shape[1] :]
                assert target.tokenizer.decode(answer) == message["content"] + "<|im_end|>"
    cache = tmp_path / "cache"
    build_cache(
        BuildConfig(target=str(real_target), data=str(out), out=cache, target_dtype="float32",
                    devices="cpu", max_skipped=0.0,
                    no_proof=("hooks", "padding", "frozen", "final", "probe"))
    )  # fmt: skip
    assert CacheReader(cache).manifest.agreement["greedy"] > 0.97


@pytest.mark.realmodel
def test_the_measure_on_text_agrees_with_the_measure_on_tokens(real_target):
    """Real answers, and the same with their last lines or words over and over, as models loop."""
    from transformers import AutoTokenizer

    from dflash_fit.acceptance import is_looping

    tokenizer = AutoTokenizer.from_pretrained(real_target)
    texts = [row["messages"][-1]["content"] for row in lines(QUICKSTART / "train.jsonl")[:400]]
    agreed, looping = 0, 0
    for number, text in enumerate(texts):
        words = text.split(" ")
        ending = " ".join(words[-(3 + number % 23) :])
        for looped in (text, text + f" {ending}" * 2, text + f" {ending}" * 40):
            by_tokens = is_looping(tokenizer(looped)["input_ids"])
            agreed += repeats_itself(looped) == by_tokens
            looping += by_tokens
    assert 0.3 * 1200 < looping < 0.6 * 1200
    assert agreed > 0.97 * 1200
    assert sum(repeats_itself(text) for text in texts) < 0.01 * len(texts)
