"""The loss mask marks what the assistant wrote: that text, all of it, and nothing else."""

import numpy as np
import pytest
from conftest import CHATML, TEXT, chat_rows, make_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.processors import ByteLevel, TemplateProcessing
from transformers import PreTrainedTokenizerFast

from dflash_cache.chat import ChatOptions, SkipRow, encode_chat, encode_prompt, encode_text

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


def byte_level(*, trimmed: bool, template: str = CHATML) -> PreTrainedTokenizerFast:
    """As GPT-NeoX, OLMo and RoBERTa have it, `trimmed` leaves the blanks out of the offsets."""
    tokenizer = make_tokenizer(template=template)
    tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=trimmed)
    return tokenizer


BLANKS = st.text(alphabet=" \n\tae\u00e9\u65e5\U0001f642\u2028", min_size=1, max_size=12)
ENDS_AT_BLANKS = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.mark.parametrize("template", [CHATML, TAGGED, ENDS_AT_BLANKS])
@given(answers=st.lists(BLANKS.filter(str.strip), min_size=1, max_size=3))
def test_offsets_without_their_blanks_make_no_other_mask(template, answers):
    chat = [turn for text in answers for turn in (say("user", "the"), say("assistant", text))]
    ids, mask = encode_chat(byte_level(trimmed=True, template=template), chat)
    wanted = encode_chat(byte_level(trimmed=False, template=template), chat)
    assert [ids.tolist(), mask.tolist()] == [x.tolist() for x in wanted]


def sentence_pieces(normalizer, pre_tokenizer=None) -> PreTrainedTokenizerFast:
    """As Llama 2, Mistral and Gemma have it: blanks are marked, unknown characters are bytes."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if normalizer:
        core.normalizer = normalizer
    if pre_tokenizer:
        core.pre_tokenizer = pre_tokenizer
    specials = ["<unk>", "<|im_start|>", "<|im_end|>", *bytes_]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=specials, show_progress=False)
    core.train_from_iterator([TEXT] * 4, trainer)
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHATML
    return tokenizer


MARKS_BLANKS = normalizers.Replace(" ", "\u2581")


@pytest.mark.parametrize(
    "kind",
    [
        (normalizers.Sequence([normalizers.Prepend("\u2581"), MARKS_BLANKS]),),
        (None, pre_tokenizers.Metaspace(prepend_scheme="first")),
        (None, pre_tokenizers.Metaspace(prepend_scheme="always")),
        (normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), MARKS_BLANKS]),),
    ],
    ids=["prepended", "first", "always", "normalised"],
)
def test_tokenizers_that_mark_blanks_or_normalise_lose_no_token(kind):
    tokenizer = sentence_pieces(*kind)
    answers = ["  the\n\n cat  \u65e5\U0001f642 ", "\ufb01 \u0130 \u338f e\u0301 run", "\u65e5"]
    chat = [
        turn for text in answers for turn in (say("user", "\ufb01 \u65e5"), say("assistant", text))
    ]
    ids, mask = encode_chat(tokenizer, chat)
    normalize = tokenizer.backend_tokenizer.normalizer
    found = [text.removesuffix("<|im_end|>") for text in supervised_texts(tokenizer, ids, mask)]
    if normalize is not None and "Lowercase" in str(normalize):
        answers = [normalize.normalize_str(text).replace("\u2581", " ") for text in answers]
    assert found == answers
    assert (ids[mask] == tokenizer.eos_token_id).sum() == 3


@pytest.mark.parametrize("special", [True, False])  # some fine-tuned models add a plain token
@pytest.mark.parametrize("swallows", [{}, {"lstrip": True}, {"rstrip": True}])
def test_an_end_token_that_swallows_white_space_is_supervised(swallows, special):
    tokenizer = make_tokenizer(template=CHATML.replace("<|im_end|>", "<|end|>"))
    tokenizer.add_tokens([AddedToken("<|end|>", special=special, normalized=False, **swallows)])
    chat = [*LONG_CHAT[1:3], say("user", "and"), say("assistant", "saw three")]
    ids, mask = encode_chat(tokenizer, chat)
    assert supervised_texts(tokenizer, ids, mask) == ["on a mat<|end|>", "saw three<|end|>"]


def test_a_token_that_goes_on_with_the_white_space_of_the_template_is_not_supervised():
    # No end token: the newline is the template's, and "mat\n" is one token.
    template = (
        "{% for m in messages %}{{ m.role + ':' + m.content }}"
        "{{ '\n' if not loop.last }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\nassistant:' }}{% endif %}"
    )
    core = Tokenizer(models.WordLevel({"[UNK]": 0, "cat\n": 1, "mat": 2, " ": 3}, "[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"cat\n|mat| |[^ ]"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]")
    tokenizer.chat_template = template
    chat = [say("user", "q"), say("assistant", "mat cat"), say("user", "q")]
    chat += [say("assistant", "mat mat")]
    ids, mask = encode_chat(tokenizer, chat)
    assert 1 in ids
    assert ids[mask].tolist() == [2, 3, 2, 3, 2]


@pytest.mark.parametrize("template", [CHATML, TAGGED])
@pytest.mark.parametrize(
    "opening", ["", "\n", " \n\n", "  {% if true %}{% endif %}", "\n  {{- '' }}"]
)
def test_a_template_that_writes_the_time_gives_the_same_tokens_at_any_time(template, opening):
    clock = "{{ strftime_now('%d %b %Y %H:%M:%S.%f %-d %A %j 9%%') if strftime_now is defined }}"
    dated = make_tokenizer(template=opening + clock + template)
    ids, mask = encode_chat(dated, LONG_CHAT)
    assert len(spans(mask)) == 2
    asked = encode_prompt(dated, LONG_CHAT[:2])
    assert asked == ids[: spans(mask)[0].start].tolist()
    told = "{{ '26 Jul 2024 00:00:00.000000 26 Friday 208 9%' }}"
    wanted = encode_chat(make_tokenizer(template=opening + told + template), LONG_CHAT)
    assert [ids.tolist(), mask.tolist()] == [x.tolist() for x in wanted]


@pytest.mark.parametrize("template", [CHATML, TAGGED])
def test_the_first_token_stands_once_though_template_and_tokenizer_add_it(template):
    tokenizer = make_tokenizer(template="{{ bos_token }}" + template)
    tokenizer.bos_token = "<spare>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<spare> $A", special_tokens=[("<spare>", tokenizer.bos_token_id)]
    )
    assert tokenizer("the")["input_ids"][0] == tokenizer.bos_token_id
    ids, mask = encode_chat(tokenizer, LONG_CHAT)
    assert ids[0] == tokenizer.bos_token_id
    assert (ids == tokenizer.bos_token_id).sum() == 1
    assert encode_prompt(tokenizer, LONG_CHAT[:2]) == ids[: spans(mask)[0].start].tolist()


@pytest.mark.parametrize("place", [0, 2, 4])
def test_the_end_token_of_an_empty_answer_is_not_supervised(place):
    chat = [say("user", "the"), say("assistant", "cat"), say("user", "and"), say("assistant", "on")]
    chat[place:place] = [say("user", "why"), say("assistant", " ")]
    opens = TAGGED.replace("{% generation %}", "{% generation %}{{ '<think></think>' }}")
    for template in (CHATML, TAGGED, opens.replace("assistant\n'", "assistant\n<think></think>'")):
        tokenizer = make_tokenizer(template=template)
        ids, mask = encode_chat(tokenizer, chat)
        assert supervised_texts(tokenizer, ids, mask) == ["cat<|im_end|>", "on<|im_end|>"]
        ids, mask = encode_chat(tokenizer, chat, options=ChatOptions(last_turn_only=True))
        assert supervised_texts(tokenizer, ids, mask) == ["on<|im_end|>"]


def test_generation_tags_around_an_answer_without_its_thought_are_context():
    kept = "(message.content if loop.last else message.content.split('</think>')[-1])"
    forgets = TAGGED.replace("generation %}{{ message['content']", "generation %}{{ " + kept)
    assert forgets != TAGGED
    tokenizer = make_tokenizer(template=forgets)
    thoughtful = say("assistant", "a cat</think>a mat")
    chat = [say("user", "the"), thoughtful, say("user", "dogs"), say("assistant", "run")]
    ids, mask = encode_chat(tokenizer, chat)
    assert supervised_texts(tokenizer, ids, mask) == ["run<|im_end|>"]
    ids, mask = encode_chat(tokenizer, chat[:2])
    assert supervised_texts(tokenizer, ids, mask) == ["a cat</think>a mat<|im_end|>"]


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


def test_an_answer_whose_thought_the_template_forgets_is_context():
    tokenizer = make_tokenizer(template=FORGETS_THOUGHTS)
    thoughtful = say("assistant", "a cat</think>a mat")
    chat = [say("user", "the"), thoughtful, say("user", "dogs"), say("assistant", "run")]
    ids, mask = encode_chat(tokenizer, chat)
    assert supervised_texts(tokenizer, ids, mask) == ["run<|im_end|>"]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(chat, tokenize=False)


def test_a_template_that_always_forgets_thoughts_is_a_reason_to_skip():
    forgets = FORGETS_THOUGHTS.replace("loop.last", "false")
    chat = [say("user", "the"), say("assistant", "a cat</think>a mat")]
    with pytest.raises(SkipRow, match="leaves out what the assistant wrote"):
        encode_chat(make_tokenizer(template=forgets), chat)


def test_an_answer_before_which_a_server_sends_something_else_is_context():
    # As some do: the system message goes into the newest question.
    tokenizer = make_tokenizer(
        template="{% set rules = messages[0].content %}{% for m in messages[1:] %}"
        "{% set newest = m.role == 'user' and m is sameas (messages | selectattr('role', "
        "'equalto', 'user') | list | last) %}"
        "{{ '<|im_start|>' + m.role + '\n' + (rules + ' ' if newest else '') + m.content }}"
        "{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    chat = [message for message in LONG_CHAT if message["role"] != "tool"]
    ids, mask = encode_chat(tokenizer, chat)
    assert tokenizer.decode(ids).count("you run far") == 1
    assert supervised_texts(tokenizer, ids, mask) == ["four\n\n dogs run<|im_end|>"]


def test_a_template_that_forgets_earlier_thoughts_serves_a_chat_of_one_answer():
    tokenizer = make_tokenizer(template=FORGETS_THOUGHTS)
    ids, mask = encode_chat(tokenizer, [say("user", "the"), say("assistant", "a</think>mat")])
    assert supervised_texts(tokenizer, ids, mask) == ["a</think>mat<|im_end|>"]


def test_a_template_that_prompts_otherwise_than_it_renders_is_skipped():
    # Some add "<think>" to the generation prompt and not to the finished turn.
    tokenizer = make_tokenizer(template=CHATML.replace("assistant\n", "assistant\n<think>"))
    with pytest.raises(SkipRow, match="prompts otherwise than it renders"):
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


def test_a_greeting_is_supervised_from_its_first_word(tokenizer):
    ids, mask = encode_chat(tokenizer, [say("assistant", "the far"), *LONG_CHAT[1:3]])
    assert supervised_texts(tokenizer, ids, mask) == ["the far<|im_end|>", "on a mat<|im_end|>"]


def test_texts_that_the_template_or_the_user_also_writes_are_not_mistaken(tokenizer):
    words = ["m", "assistant", "<|im_end|>", "mark0of0end", "a", "im_end"]
    chat = [say(role, word) for word in words for role in ("user", "assistant")]
    ids, mask = encode_chat(tokenizer, chat)
    assert [run.removesuffix("<|im_end|>") for run in supervised_texts(tokenizer, ids, mask)] == [
        word if word != "<|im_end|>" else "<|im_end|>" for word in words
    ]


@pytest.mark.parametrize("spoils", ["upper", "replace('a', 'b')", "truncate(2, true, '', 0)"])
def test_a_template_that_rewrites_answers_is_a_reason_to_skip(spoils):
    content = "message['content'] +"
    tokenizer = make_tokenizer(
        template=CHATML.replace(content, f"(message['content'] | {spoils}) +")
    )
    with pytest.raises(SkipRow, match="rewrites what the assistant wrote"):
        encode_chat(tokenizer, [say("user", "the"), say("assistant", "cat sat on a mat")])


def test_a_template_that_says_an_answer_twice_is_a_reason_to_skip():
    content = "message['content'] +"
    tokenizer = make_tokenizer(template=CHATML.replace(content, content * 2))
    with pytest.raises(SkipRow, match="closes earlier turns otherwise"):
        encode_chat(tokenizer, [say("user", "the"), say("assistant", "cat")])


def test_a_template_that_adds_to_some_answers_is_a_reason_to_skip():
    tokenizer = make_tokenizer(template=CHATML + "{{ 'far' if 'mat' in messages[-1].content }}")
    with pytest.raises(SkipRow, match="rewrites what the assistant wrote"):
        encode_chat(tokenizer, [say("user", "the"), say("assistant", "a mat")])


def test_an_answer_that_is_not_closed_as_the_newest_is_context():
    closes = "('<|im_end|>' if loop.last or message.role != 'assistant' else '<spare>')"
    tokenizer = make_tokenizer(template=CHATML.replace("'<|im_end|>'", closes))
    chat = [message for message in LONG_CHAT if message["role"] != "tool"]
    ids, mask = encode_chat(tokenizer, chat)
    assert supervised_texts(tokenizer, ids, mask) == ["four\n\n dogs run<|im_end|>"]


def test_what_the_template_adds_behind_the_end_token_is_not_supervised():
    tokenizer = make_tokenizer(template=CHATML.replace("'<|im_end|>'", "'<|im_end|> <spare>'"))
    ids, mask = encode_chat(tokenizer, LONG_CHAT)
    assert supervised_texts(tokenizer, ids, mask) == [
        "on a mat<|im_end|>",
        "four\n\n dogs run<|im_end|>",
    ]


def test_a_call_that_holds_an_end_token_is_supervised_to_its_own_end():
    tokenizer = make_tokenizer(
        template=THINKS_AND_CALLS.replace("call['name']", "call.name + call.arguments.far")
    )
    call = {"name": "run", "arguments": {"far": "<|im_end|> over"}}
    ids, mask = encode_chat(tokenizer, [say("user", "a"), say("assistant", "", tool_calls=[call])])
    assert supervised_texts(tokenizer, ids, mask) == ["<call>run<|im_end|> over<|im_end|>"]


def test_an_answer_that_a_server_cannot_ask_for_is_context():
    refuses = (
        "{% if add_generation_prompt and messages[-1].role == 'tool' %}"
        "{{ raise_exception('ask first') }}{% endif %}" + CHATML
    )
    tokenizer = make_tokenizer(template=refuses)
    chat = [*LONG_CHAT[:4], say("assistant", "run")]
    ids, mask = encode_chat(tokenizer, chat)
    assert supervised_texts(tokenizer, ids, mask) == ["on a mat<|im_end|>"]


def test_a_thought_behind_a_prompt_that_forbids_it_is_a_reason_to_skip():
    forbids = CHATML.replace("assistant\n", "assistant\n<think>\n\n</think>\n\n")
    chat = [say("user", "the"), say("assistant", "<think>a</think>cat")]
    with pytest.raises(SkipRow, match="prompts otherwise than it renders"):
        encode_chat(make_tokenizer(template=forbids), chat)


def test_parts_of_text_are_joined(tokenizer):
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]
    ids, mask = encode_chat(tokenizer, [say("user", parts), say("assistant", parts)])
    wanted = encode_chat(tokenizer, [say("user", "the cat"), say("assistant", "the cat")])
    assert [ids.tolist(), mask.tolist()] == [x.tolist() for x in wanted]


@pytest.mark.parametrize(
    "content",
    [[{"type": "image_url", "image_url": "x"}], [{"type": "text", "text": None}], ["a"], 3, {}],
)
def test_parts_that_are_not_text_are_a_reason_to_skip(tokenizer, content):
    for chat in (
        [say("user", content), say("assistant", "cat")],
        [say("user", "the"), say("assistant", content)],
        [say("user", "the"), say("assistant", "cat", reasoning_content=content)],
    ):
        with pytest.raises(SkipRow, match="content that is not text"):
            encode_chat(tokenizer, chat)


def test_arguments_reach_the_template_as_an_object_however_they_are_spelt():
    tokenizer = make_tokenizer(
        template=THINKS_AND_CALLS.replace("call['name']", "call.name + call.arguments.far")
    )
    for arguments in ({"far": "over"}, '{"far": "over"}'):
        call = {"name": "run", "arguments": arguments}
        chat = [say("user", "the cat"), say("assistant", None, tool_calls=[call])]
        ids, mask = encode_chat(tokenizer, chat)
        assert supervised_texts(tokenizer, ids, mask) == ["<call>runover<|im_end|>"]


def test_calls_of_another_form_are_a_reason_to_skip(tokenizer):
    for calls in ("run", ["run"]):
        with pytest.raises(SkipRow, match="tool calls that are not a list of objects"):
            encode_chat(tokenizer, [say("user", "the"), say("assistant", "a", tool_calls=calls)])


def test_of_the_last_turn_alone_only_the_last_is_supervised(tokenizer):
    options = ChatOptions(last_turn_only=True)
    for spells in (tokenizer, make_tokenizer(template=TAGGED)):
        ids, mask = encode_chat(spells, LONG_CHAT, options=options)
        assert supervised_texts(spells, ids, mask) == ["four\n\n dogs run<|im_end|>"]
        assert ids.tolist() == encode_chat(spells, LONG_CHAT)[0].tolist()


def test_a_system_message_is_added_only_where_there_is_none(tokenizer):
    options = ChatOptions(system="dogs run")
    ids, _ = encode_chat(tokenizer, LONG_CHAT[1:3], options=options)
    assert tokenizer.decode(ids).startswith("<|im_start|>system\ndogs run<|im_end|>\n")
    ids, _ = encode_chat(tokenizer, LONG_CHAT, options=options)
    assert ids.tolist() == encode_chat(tokenizer, LONG_CHAT)[0].tolist()


def test_a_template_that_ignores_system_messages_is_a_reason_to_skip():
    ignores = CHATML.replace("in messages", "in messages if message.role != 'system'")
    tokenizer = make_tokenizer(template=ignores)
    with pytest.raises(SkipRow, match="leaves out the system message"):
        encode_chat(tokenizer, LONG_CHAT[1:3], options=ChatOptions(system="dogs run"))


@pytest.mark.parametrize(
    "content",
    ["<think>a cat</think>\n\nsat", "a cat\n</think>\n\nsat", "sat<think>a cat", "sat"],
)
@pytest.mark.parametrize("more", [{}, {"reasoning_content": "one"}, {"thinking": "one"}])
def test_without_thinking_no_thought_is_left(tokenizer, content, more):
    chat = [say("user", "the <think>"), say("assistant", content, **more)]
    ids, mask = encode_chat(tokenizer, chat, options=ChatOptions(thinking="off"))
    assert supervised_texts(tokenizer, ids, mask) == ["sat<|im_end|>"]
    assert "the <think><|im_end|>" in tokenizer.decode(ids)


def test_an_answer_of_nothing_but_thoughts_is_none_without_thinking(tokenizer):
    chat = [say("user", "the"), say("assistant", "<think>a cat")]
    with pytest.raises(SkipRow, match="no assistant text"):
        encode_chat(tokenizer, chat, options=ChatOptions(thinking="off"))


def test_a_prompt_is_rendered_with_the_options_of_the_chats():
    tokenizer = make_tokenizer(
        template=CHATML + "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    )
    asked = [say("user", "the")]
    for thinking, said in (("as-is", ""), ("on", "True"), ("off", "False")):
        options = ChatOptions(system="far", thinking=thinking)
        ids = encode_prompt(tokenizer, asked, options=options)
        assert tokenizer.decode(ids) == (
            "<|im_start|>system\nfar<|im_end|>\n<|im_start|>user\nthe<|im_end|>\n"
            f"<|im_start|>assistant\n{said}"
        )


def test_generation_tags_around_the_question_are_a_reason_to_skip():
    around_all = TAGGED.replace("message['role'] == 'assistant'", "true")
    with pytest.raises(SkipRow, match="generation tags mark the prompt"):
        encode_chat(make_tokenizer(template=around_all), LONG_CHAT)


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
