"""Turn one conversation into tokens and a loss mask, by the tokenizer's own chat template.

The loss mask is True on tokens that the assistant wrote, end-of-turn token included.  A template
with generation tags marks them itself.  Any other is rendered turn by turn, and every rendering
must be a true prefix of the whole: then the text before the turn is exactly what a server sends.
"""

import re
from typing import Any

import numpy as np
from jinja2 import TemplateError

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")

# Templates raise for roles or orders that they do not know, each in its own way.
TEMPLATE_ERRORS = (TemplateError, TypeError, LookupError, ValueError, ArithmeticError)

Message = dict[str, Any]
TokensAndMask = tuple[np.ndarray, np.ndarray]


class SkipRow(Exception):
    """This row cannot be used; the reason is what gets counted and shown."""


def encode_chat(
    tokenizer: Any, messages: list[Message], *, tools: list[Any] | None = None
) -> TokensAndMask:
    """Token ids int32 [t] and loss mask bool [t] of a conversation."""
    if not any(m["role"] == "assistant" and _says_something(m) for m in messages):
        raise SkipRow("no assistant text")
    try:
        if GENERATION_TAG.search(tokenizer.get_chat_template(tools=tools)):
            return _encode_tagged(tokenizer, messages, tools)
        return _encode_by_prefixes(tokenizer, messages, tools)
    except TEMPLATE_ERRORS as error:
        raise SkipRow(f"refused by the chat template ({type(error).__name__})") from error


def encode_prompt(tokenizer: Any, messages: list[Message]) -> list[int]:
    """Token ids of what a server sends for these messages: rendered up to the answer."""
    if tokenizer.chat_template is None:
        raise SkipRow("the tokenizer has no chat template")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TEMPLATE_ERRORS as error:
        raise SkipRow(f"refused by the chat template ({type(error).__name__})") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode_text(tokenizer: Any, text: str) -> TokensAndMask:
    """Plain text: every token is supervised."""
    try:
        ids = np.asarray(tokenizer(text)["input_ids"], dtype=np.int32)
    except (TypeError, UnicodeError):  # half of a surrogate pair, which JSON can spell
        raise SkipRow("not text that can be encoded") from None
    return ids, np.ones(len(ids), dtype=bool)


def _says_something(message: Message) -> bool:
    content = message.get("content")
    text = content.strip() if isinstance(content, str) else content
    return bool(text or message.get("tool_calls") or message.get("reasoning_content"))


def _encode_tagged(tokenizer: Any, messages: list[Message], tools: Any) -> TokensAndMask:
    encoded = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids = np.asarray(encoded["input_ids"], dtype=np.int32)
    mask = np.asarray(encoded["assistant_masks"], dtype=bool)
    if not mask.any():
        raise SkipRow("the chat template's generation tags mark nothing")
    return ids, mask


def _encode_by_prefixes(tokenizer: Any, messages: list[Message], tools: Any) -> TokensAndMask:
    if messages[0]["role"] == "assistant":
        raise SkipRow("starts with an assistant turn, which no prompt can ask for")

    def render(part: list[Message], *, prompt: bool = False) -> str:
        text = tokenizer.apply_chat_template(
            part, tools=tools, tokenize=False, add_generation_prompt=prompt
        )
        return str(text)

    whole = render(messages)
    spans: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:index], prompt=True)
        after = render(messages[: index + 1])
        if not (whole.startswith(after) and after.startswith(before)):
            raise SkipRow("the chat template rewrites earlier turns")
        spans.append((len(before), _end_of_turn(tokenizer, after)))
    return _tokenise(tokenizer, whole, spans)


def _end_of_turn(tokenizer: Any, text: str) -> int:
    """Where the assistant stops writing: white space behind its end token is the template's."""
    bare = text.rstrip()
    ends_specially = any(bare.endswith(token) for token in tokenizer.all_special_tokens)
    return len(bare) if ends_specially else len(text)


def _tokenise(tokenizer: Any, text: str, spans: list[tuple[int, int]]) -> TokensAndMask:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = np.asarray(encoded["input_ids"], dtype=np.int32)
    offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    mask = np.zeros(len(ids), dtype=bool)
    for start, end in spans:
        # A token that straddles the start of a turn is part prompt: nobody generates it.
        mask |= (offsets[:, 0] >= start) & (offsets[:, 1] <= end) & (offsets[:, 1] > offsets[:, 0])
    return ids, mask
