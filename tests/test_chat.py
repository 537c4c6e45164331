"""The loss mask marks what the assistant wrote: that text, all of it, and nothing else."""

import numpy as np
import pytest
from conftest import CHATML, chat_rows, make_tokenizer
from transformers import PreTrainedTokenizerFast

from dflash_cache.chat import SkipRow, encode_chat, encode_text

TAGGED = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Like templates of thinking models: only the last answer keeps its thoughts.
FORGETS_THOUGHTS = CHATML.replace(
    "message['content'] +",
    "(message['content'] if loop.last else message['content'].split('</think>')[-1]) +",
)
THINKS_AND_CALLS = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message.reasoning_content %}"
    "{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}"
    "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ '<call>' + call['name'] }}{% endfor %}"
    "{{ '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def say(role: str, content: str | None, **more) -> dict:
    return {"role": role, "content": content, **more}


LONG_CHAT = [
    say("system", "you run far"),
    say("user", "the cat sat"),
    say("assistant", "on a mat"),
    say("tool", "one two"),
    say("user", "and saw\nthree"),
    say("assistant", "four\n\n dogs run"),
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def spans(mask: np.ndarray) -> list[slice]:
    """Runs of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [slice(start, end) for start, end in edges.reshape(-1, 2)]


def supervised_texts(tokenizer, ids: np.ndarray, mask: np.ndarray) -> list[str]:
    return [tokenizer.decode(ids[span]) for span in spans(mask)]


def served_prompt(tokenizer, messages: list[dict], **more) -> list[int]:
    """What a server feeds the target before the answer to `messages`."""
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **more
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_answer_and_its_end_token_are_supervised_and_the_newline_behind_is_not(tokenizer):
    ids, mask = encode_chat(tokenizer, [say("user", "the cat"), say("assistant", "sat on")])
    assert supervised_texts(tokenizer, ids, mask) == ["sat on<|im_end|>"]
    assert tokenizer.decode(ids[~mask]) == (
        "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n\n"
    )


def test_every_answer_of_a_long_chat_is_supervised_and_no_other_text(tokenizer):
    ids, mask = encode_chat(tokenizer, LONG_CHAT)
    assert supervised_texts(tokenizer, ids, mask) == [
        "on a mat<|im_end|>",
        "four\n\n dogs run<|im_end|>",
    ]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(LONG_CHAT, tokenize=False)


def test_white_space_that_the_assistant_wrote_is_supervised(tokenizer):
    chat = [say("user", "the"), say("assistant", "  cat \n")]
    ids, mask = encode_chat(tokenizer, chat)
    assert supervised_texts(tokenizer, ids, mask) == ["  cat \n<|im_end|>"]


def test_without_an_end_token_the_whole_rendered_turn_is_supervised():
    plain = make_tokenizer(
        template="{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    ids, mask = encode_chat(plain, [say("user", "the"), say("assistant", "cat")])
    assert supervised_texts(plain, ids, mask) == [" cat\n"]


def test_thoughts_and_tool_calls_are_supervised():
    tokenizer = make_tokenizer(template=THINKS_AND_CALLS)
    chat = [
        say("user", "the cat"),
        say("assistant", None, reasoning_content="sat on", tool_calls=[{"name": "run"}]),
        say("tool", "far"),
        say("assistant", "a mat"),
    ]
    ids, mask = encode_chat(tokenizer, chat)
    assert supervised_texts(tokenizer, ids, mask) == [
        "<think>sat on</think><call>run<|im_end|>",
        "a mat<|im_end|>",
    ]


def test_an_answer_of_nothing_but_a_call_is_an_answer():
    tokenizer = make_tokenizer(template=THINKS_AND_CALLS)
    chat = [say("user", "the cat"), say("assistant", None, tool_calls=[{"name": "run"}])]
    ids, mask = encode_chat(tokenizer, chat)
    assert supervised_texts(tokenizer, ids, mask) == ["<call>run<|im_end|>"]


def test_generation_tags_give_the_mask_that_prefix_rendering_gives(tokenizer):
    tagged = make_tokenizer(template=TAGGED)
    for chat in [LONG_CHAT, *(row["messages"] for row in chat_rows(20))]:
        ids, mask = encode_chat(tagged, chat)
        wanted_ids, wanted_mask = encode_chat(tokenizer, chat)
        assert ids.tolist() == wanted_ids.tolist()
        assert mask.tolist() == wanted_mask.tolist()


def test_generation_tags_that_mark_nothing_are_a_reason_to_skip():
    idle = make_tokenizer(
        template=CHATML + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    )
    with pytest.raises(SkipRow, match="generation tags mark nothing"):
        encode_chat(idle, LONG_CHAT)


@pytest.mark.parametrize("template", [CHATML, TAGGED, THINKS_AND_CALLS])
def test_before_every_answer_stand_exactly_the_tokens_that_a_server_sends(template):
    tokenizer = make_tokenizer(template=template)
    for chat in [LONG_CHAT, *(row["messages"] for row in chat_rows(20))]:
        ids, mask = encode_chat(tokenizer, chat)
        turns = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
        for turn, span in zip(turns, spans(mask), strict=True):
            assert ids[: span.start].tolist() == served_prompt(tokenizer, chat[:turn])


def test_tools_are_rendered_into_the_prompt_and_not_supervised():
    tokenizer = make_tokenizer(
        template="{% if tools %}{{ 'tools ' + tools[0]['name'] + '\n' }}{% endif %}" + CHATML
    )
    tools = [{"name": "far"}]
    chat = [say("user", "the"), say("assistant", "cat")]
    ids, mask = encode_chat(tokenizer, chat, tools=tools)
    assert tokenizer.decode(ids).startswith("tools far\n<|im_start|>user")
    assert supervised_texts(tokenizer, ids, mask) == ["cat<|im_end|>"]
    assert ids[: spans(mask)[0].start].tolist() == served_prompt(tokenizer, chat[:1], tools=tools)


def test_a_token_that_is_half_prompt_is_not_supervised():
    tokenizer = make_tokenizer(
        template="{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    ids, mask = encode_chat(tokenizer, [say("user", "saw"), say("assistant", "cat sat on")])
    # The blank belongs to the prompt, and " cat" is one token.
    assert " cat" in [tokenizer.decode([token]) for token in ids]
    assert supervised_texts(tokenizer, ids, mask) == [" sat on<|im_end|>"]


def test_a_template_that_forgets_earlier_thoughts_is_skipped_where_it_does():
    tokenizer = make_tokenizer(template=FORGETS_THOUGHTS)
    thoughtful = say("assistant", "a cat</think>a mat")
    chat = [say("user", "the"), thoughtful, say("user", "dogs"), say("assistant", "run")]
    with pytest.raises(SkipRow, match="rewrites earlier turns"):
        encode_chat(tokenizer, chat)


def test_a_template_that_forgets_earlier_thoughts_serves_a_chat_of_one_answer():
    tokenizer = make_tokenizer(template=FORGETS_THOUGHTS)
    ids, mask = encode_chat(tokenizer, [say("user", "the"), say("assistant", "a</think>mat")])
    assert supervised_texts(tokenizer, ids, mask) == ["a</think>mat<|im_end|>"]


def test_a_template_that_prompts_otherwise_than_it_renders_is_skipped():
    # Some add "<think>" to the generation prompt and not to the finished turn.
    tokenizer = make_tokenizer(template=CHATML.replace("assistant\n", "assistant\n<think>"))
    with pytest.raises(SkipRow, match="rewrites earlier turns"):
        encode_chat(tokenizer, [say("user", "the"), say("assistant", "cat")])


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('user must begin') }}",
        "{{ messages[0].nothing.at_all }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ 1 / 0 }}",
        "{% if %}",
    ],
)
def test_a_template_that_raises_is_a_reason_to_skip(template):
    with pytest.raises(SkipRow, match="refused by the chat template"):
        encode_chat(make_tokenizer(template=template), LONG_CHAT)


@pytest.mark.parametrize(
    "chat",
    [
        [],
        [say("user", "the cat")],
        [say("user", "the cat"), say("assistant", " \n")],
        [say("user", "the cat"), say("assistant", None)],
    ],
)
def test_a_chat_without_assistant_text_is_skipped(tokenizer, chat):
    with pytest.raises(SkipRow, match="no assistant text"):
        encode_chat(tokenizer, chat)


def test_a_chat_that_starts_with_the_assistant_is_skipped_and_says_so(tokenizer):
    with pytest.raises(SkipRow, match="starts with an assistant turn"):
        encode_chat(tokenizer, [say("assistant", "the"), *LONG_CHAT])


def test_content_that_the_template_cannot_join_is_a_reason_to_skip(tokenizer):
    chat = [say("user", [{"type": "text", "text": "the"}]), say("assistant", "cat")]
    with pytest.raises(SkipRow, match="refused by the chat template"):
        encode_chat(tokenizer, chat)


def test_of_several_templates_the_one_is_used_that_a_server_would_pick(tokenizer):
    several = make_tokenizer()
    several.chat_template = {"default": TAGGED, "tool_use": "with tools\n" + CHATML}
    ids, mask = encode_chat(several, LONG_CHAT)
    assert [ids.tolist(), mask.tolist()] == [x.tolist() for x in encode_chat(tokenizer, LONG_CHAT)]
    ids, mask = encode_chat(several, LONG_CHAT, tools=[{"name": "far"}])
    assert several.decode(ids).startswith("with tools\n<|im_start|>system")


def test_every_token_of_plain_text_is_supervised(tokenizer):
    ids, mask = encode_text(tokenizer, "the cat sat on a mat")
    assert tokenizer.decode(ids) == "the cat sat on a mat"
    assert mask.all()


def test_text_that_no_tokenizer_takes_is_a_reason_to_skip(tokenizer):
    with pytest.raises(SkipRow, match="not text that can be encoded"):
        encode_text(tokenizer, "half a pair \ud800")


def test_ids_are_int32_and_the_mask_is_bool(tokenizer):
    for ids, mask in (encode_chat(tokenizer, LONG_CHAT), encode_text(tokenizer, "the cat")):
        assert (ids.dtype, mask.dtype) == (np.int32, np.bool_)
        assert ids.shape == mask.shape
