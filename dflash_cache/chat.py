"""Turn one conversation into tokens and a loss mask, by the tokenizer's own chat template.

The loss mask is True on tokens that the assistant wrote, end-of-turn token included, and not on
what a server sends before its first token.  A template with generation tags says itself which
they are; for any other `spans` finds them, or says why it cannot.
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_cache.marks import Span
from dflash_cache.messages import (
    Message,
    SkipRow,
    says_something,
    thinks,
    tidy,
    with_system,
    without_thoughts,
)
from dflash_cache.spans import (
    TEMPLATE_ERRORS,
    Template,
    answer_spans,
    context_spans,
    sent_before,
)

__all__ = [
    "ChatOptions",
    "Message",
    "SkipRow",
    "TokensAndMask",
    "encode_chat",
    "encode_prompt",
    "encode_text",
]

GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
BLANK = "\u0120"  # a blank as byte-level tokenizers spell it
ENABLE_THINKING = {"as-is": None, "on": True, "off": False}

TokensAndMask = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How conversations are changed before they are rendered, and what of them is supervised."""

    system: str | None = None  # put before chats that bring no system message
    thinking: str = "as-is"  # as-is, on (chats without thoughts are skipped), off (none rendered)
    last_turn_only: bool = False


AS_IS = ChatOptions()


def encode_chat(
    tokenizer: Any,
    messages: list[Message],
    *,
    tools: list[Any] | None = None,
    options: ChatOptions = AS_IS,
) -> TokensAndMask:
    """Token ids int32 [t] and loss mask bool [t] of a conversation."""
    chat = _prepared(messages, options)
    turns = [i for i, m in enumerate(chat) if m["role"] == "assistant" and says_something(m)]
    if not turns:
        raise SkipRow("no assistant text")
    if options.thinking == "on" and not thinks(chat[turns[-1]]):
        raise SkipRow("no thoughts in the last answer")
    turns = turns[-1:] if options.last_turn_only else turns
    template = _template(tokenizer, options, tools=tools)
    try:
        whole = template.render(chat)
        if options.system and options.system.strip() not in whole and chat[0] != messages[0]:
            raise SkipRow("the chat template leaves out the system message")
        if GENERATION_TAG.search(template.source):
            return _encode_tagged(template, chat, turns, options)
        return _tokenise(tokenizer, whole, answer_spans(template, chat, turns, whole=whole))
    except TEMPLATE_ERRORS as error:
        raise _refusal(template, chat, error) from error


def encode_prompt(
    tokenizer: Any, messages: list[Message], *, options: ChatOptions = AS_IS
) -> list[int]:
    """Token ids of what a server sends for these messages: rendered up to the answer."""
    if tokenizer.chat_template is None:
        raise SkipRow("the tokenizer has no chat template")
    chat = _prepared(messages, options)
    template = _template(tokenizer, options)
    try:
        text = template.render(chat, prompt=True)
    except TEMPLATE_ERRORS as error:
        raise _refusal(template, chat, error) from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode_text(tokenizer: Any, text: str) -> TokensAndMask:
    """Plain text: every token is supervised."""
    try:
        ids = np.asarray(tokenizer(text)["input_ids"], dtype=np.int32)
    except (TypeError, UnicodeError):  # half of a surrogate pair, which JSON can spell
        raise SkipRow("not text that can be encoded") from None
    return ids, np.ones(len(ids), dtype=bool)


def _prepared(messages: list[Message], options: ChatOptions) -> list[Message]:
    chat = tidy(with_system(messages, options.system))
    return without_thoughts(chat) if options.thinking == "off" else chat


def _template(tokenizer: Any, options: ChatOptions, *, tools: list[Any] | None = None) -> Template:
    return Template(tokenizer=tokenizer, tools=tools, thinking=ENABLE_THINKING[options.thinking])


def _refusal(template: Template, chat: list[Message], error: Exception) -> SkipRow:
    """The reason for which a template refused a chat: most that do know no system message."""
    if chat and chat[0]["role"] == "system":
        with suppress(*TEMPLATE_ERRORS):
            template.render(chat[1:])
            return SkipRow("the chat template takes no system message")
    return SkipRow(f"refused by the chat template ({type(error).__name__})")


def _encode_tagged(
    template: Template, chat: list[Message], turns: list[int], options: ChatOptions
) -> TokensAndMask:
    """The mask that generation tags give, less prompts, and with an end token right behind."""
    encoded = template.tokenizer.apply_chat_template(
        chat,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
        **template.options(),
    )
    ids, offsets = _arrays(template.tokenizer, encoded)
    mask = np.asarray(encoded["assistant_masks"], dtype=bool)
    whole = template.render(chat)
    for start, end in context_spans(template, chat, turns, whole=whole):
        mask[slice(*np.searchsorted(offsets[:, 0], (start, end)))] = False
    for turn in turns:
        sent = sent_before(template, chat, turn, whole=whole)
        if sent is None and options.last_turn_only:
            raise SkipRow("the chat template prompts otherwise than it renders")
        start = int(np.searchsorted(offsets[:, 0], sent or 0))
        mask[_run_before(mask, start) : start] = False
        if options.last_turn_only:
            mask[:start] = False
        elif sent and turn == turns[0] and mask[:start].any():
            raise SkipRow("the chat template's generation tags mark the prompt")
    mask[1:] |= mask[:-1] & (ids[1:] == template.tokenizer.eos_token_id)
    if not mask.any():
        raise SkipRow("the chat template's generation tags mark nothing")
    return ids, mask


def _run_before(mask: np.ndarray, stop: int) -> int:
    """Where the run of marked tokens begins that goes on up to `stop`."""
    unmarked = np.flatnonzero(~mask[:stop])
    return int(unmarked[-1]) + 1 if len(unmarked) else 0


def _tokenise(tokenizer: Any, text: str, spans: list[Span]) -> TokensAndMask:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = _arrays(tokenizer, encoded)
    starts, ends = offsets.T
    mask = np.zeros(len(ids), dtype=bool)
    for start, end in spans:
        # A token that straddles the start of a turn is part prompt: nobody generates it.
        mask |= (starts >= start) & (ends <= end) & (ends > starts)
        # End tokens may swallow the white space behind them (rstrip, as Phi-3 has it).
        for last in np.flatnonzero((starts >= start) & (starts < end) & (ends > end)):
            swallows = not text[end : ends[last]].strip()
            mask[last] |= swallows and int(ids[last]) in tokenizer.added_tokens_decoder
    return ids, mask


def _arrays(tokenizer: Any, encoded: Any) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [t], and the start and end [t, 2] of each token in the text."""
    ids = np.asarray(encoded["input_ids"], dtype=np.int32)
    offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    gaps = offsets[1:, 0] - offsets[:-1, 1]
    if not (gaps > 0).any():
        return ids, offsets
    # Byte-level tokenizers with trim_offsets leave the blanks of a token out: give them back.
    tokens = tokenizer.convert_ids_to_tokens(ids.tolist())
    leading = np.array([len(token) - len(token.lstrip(BLANK)) for token in tokens])
    trailing = np.array([len(token) - len(token.rstrip(BLANK)) for token in tokens])
    whole = offsets.copy()
    whole[:, 0] -= np.minimum(leading, np.maximum(0, np.append(offsets[:1, 0], gaps)))
    whole[:, 1] += np.minimum(trailing, np.maximum(0, np.append(gaps, 0)))
    blank = offsets[:, 0] == offsets[:, 1]
    whole[blank, 1] = offsets[blank, 1]
    return ids, whole
