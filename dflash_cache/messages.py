"""Chat messages in one form: text for content, thoughts in known places, arguments as objects.

Rows and servers write them in several; chat templates know one or two of these.
"""

import json
import re
from typing import Any

Message = dict[str, Any]

# Where rows keep thoughts beside the content; templates read the first.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
THINK_TAG = re.compile(r"(</?think>)")
CLOSED_THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


class SkipRow(Exception):
    """This row cannot be used; the reason is what gets counted and shown."""


def tidy(messages: list[Message]) -> list[Message]:
    """The messages as templates want them."""
    return [_tidy_message(message) for message in messages]


def with_system(messages: list[Message], system: str | None) -> list[Message]:
    """Put the system message first, unless the chat brings one."""
    if system is None or any(message["role"] == "system" for message in messages):
        return messages
    return [{"role": "system", "content": system}, *messages]


def without_thoughts(messages: list[Message]) -> list[Message]:
    """The messages as an assistant writes them that does not think."""
    return [_without_thought(message) for message in messages]


def says_something(message: Message) -> bool:
    return bool(
        message["content"].strip() or message.get("tool_calls") or _reasoning(message).strip()
    )


def thinks(message: Message) -> bool:
    """Whether thoughts were written down, in the content or beside it."""
    before_the_answer, closed, after = message["content"].rpartition("</think>")
    text = before_the_answer if closed else after
    _, opened, thought = text.partition("<think>")
    if closed and not opened:  # the prompt held the opening tag
        thought = text
    return bool(THINK_TAG.sub("", thought).strip() or _reasoning(message).strip())


def _reasoning(message: Message) -> str:
    return next((message[key] for key in REASONING_KEYS if message.get(key)), "")


def _tidy_message(message: Message) -> Message:
    told = {key: value for key, value in message.items() if value is not None}
    if "content" not in told and told["role"] in ("user", "system"):
        raise SkipRow("a turn without content")
    told["content"] = _joined(told.get("content", ""))
    if any(not isinstance(told.get(key, ""), str) for key in REASONING_KEYS):
        raise SkipRow("content that is not text")
    if reasoning := _reasoning(told):
        told["reasoning_content"] = reasoning
    if told.get("tool_calls"):
        told["tool_calls"] = _with_objects(told["tool_calls"])
    return told


def _joined(content: Any) -> str:
    """Content is a text, or a list of parts; templates that take parts join them with nothing."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    return "".join(_text_of(part) for part in parts)


def _text_of(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise SkipRow("content that is not text")


def _with_objects(calls: Any) -> list[Message]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise SkipRow("tool calls that are not a list of objects")
    return [_with_object(call) for call in calls]


def _with_object(call: Message) -> Message:
    """Arguments as an object: the API spells them as JSON text, and servers parse that first."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_object(call["function"])}
    try:
        arguments = json.loads(call["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call


def _without_thought(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    text = CLOSED_THOUGHT.sub("", message["content"])
    # What is left of tags has lost its partner: the prompt held it, or the answer was cut short.
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    content = text.lstrip("\n") if text != message["content"] else text
    return {k: v for k, v in message.items() if k not in REASONING_KEYS} | {"content": content}
