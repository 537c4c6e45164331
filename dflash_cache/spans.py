"""Find the characters that the assistant wrote in a rendered conversation.  Strings, no tokens.

Templates drop earlier thoughts, add empty ones and trim, so one cannot search for the answer, nor
take a shorter rendering for the start of a longer one.  Instead the chat is rendered twice: as it
is, and with marks in place of the assistant's texts.  The first must be the second with the texts
put back; then every text has its one place.  An answer is supervised when three things hold:

- all that the assistant wrote in it, thoughts and tool calls included, is in the rendering.  The
  words behind a dropped thought were never generated without it, so that turn is only context;
- what stands before it is exactly what a server sends to get it, and that is prompt.  Only empty
  thoughts may be missing: templates that do without thinking drop them from earlier turns;
- what stands behind its last word is what closes that turn when it is the newest one.
"""

import datetime
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from dflash_cache.marks import Marks, Span
from dflash_cache.messages import Message, SkipRow, says_something, thinks

# Templates raise for roles or orders that they do not know, each in its own way.
TEMPLATE_ERRORS = (TemplateError, TypeError, LookupError, ValueError, ArithmeticError)

# With enable_thinking=False some templates end the prompt with it, and drop it from earlier turns.
EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\n*")
FORBIDS_THOUGHT = re.compile(EMPTY_THOUGHT.pattern + r"\Z")

# Templates that write the date (Llama 3.2) would give other tokens tomorrow, and a build that goes
# on, or a repair, other data.  They get the date that they name themselves where there is no
# clock.  transformers takes no function of ours, so it is a macro.  Jinja drops the line end
# behind it, and the template then begins as it would alone.
TODAY = datetime.datetime(2024, 7, 26)
DIRECTIVES = [f"%{letter}" for letter in "aAwdbBmyYHIpMSfzZjUWcxXGuVeDFTRk"]
FIXED_CLOCK = (
    "{% macro strftime_now(format) -%}{{- format"
    + "".join(f"|replace({d!r}, {TODAY.strftime(d)!r})" for d in DIRECTIVES)
    + "".join(f"|replace('%-{d}', '{n}')" for d, n in zip("dmHMS", (26, 7, 0, 0, 0), strict=True))
    + "|replace('%%', '%') -}}{%- endmacro %}\n"
)


@dataclass(frozen=True, kw_only=True)
class Template:
    """The chat template of a tokenizer, as it is used for one conversation."""

    tokenizer: Any
    tools: list[Any] | None = None
    thinking: bool | None = None  # enable_thinking; None leaves it to the template

    @property
    def source(self) -> str:
        return str(self.tokenizer.get_chat_template(tools=self.tools))

    def options(self, thinking: bool | None = None) -> dict[str, Any]:
        said = self.thinking if thinking is None else thinking
        told: dict[str, Any] = {"tools": self.tools}
        if said is not None:
            told["enable_thinking"] = said
        if "strftime_now" in (source := self.source):
            told["chat_template"] = FIXED_CLOCK + source
        return told

    def render(
        self, messages: list[Message], *, prompt: bool = False, thinking: bool | None = None
    ) -> str:
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt, **self.options(thinking)
        )
        return str(text)

    def served(self, messages: list[Message], turn: int) -> Iterator[str]:
        """What a server may have sent before this turn, likeliest first; nothing if refused.

        An answer with thoughts was asked for with thinking, one without them without it, if the
        template knows the difference.
        """
        thoughtful = thinks(messages[turn])
        asks: list[bool | None] = [None]
        if "enable_thinking" in self.source:
            asks = [thoughtful, None]
        for thinking in asks:
            try:
                prompt = self.render(messages[:turn], prompt=True, thinking=thinking)
            except TEMPLATE_ERRORS:
                continue
            if not (thoughtful and FORBIDS_THOUGHT.search(prompt)):
                yield prompt


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The assistant's turns of one conversation, and the marks of what it wrote in them."""

    template: Template
    messages: list[Message]
    marked: list[Message]
    own: dict[int, list[str]]  # turn -> its marks
    places: dict[str, Span]  # mark -> where its text stands in the whole rendering
    whole: str
    skeleton: str  # the whole rendering of the marked messages

    def span(self, turn: int) -> Span:
        """Where the whole rendering holds what the assistant generated in this turn."""
        found = [self.places[mark] for mark in self.own[turn] if mark in self.places]
        if len(found) < len(self.own[turn]) or not found:
            raise SkipRow("the chat template leaves out what the assistant wrote")
        (first, _), (_, last) = min(found), max(found)
        return self.start(turn, first), self.end(turn, last)

    def start(self, turn: int, first: int) -> int:
        """Where the prompt of this turn ends; its first word stands at `first`."""
        sent = sent_before(self.template, self.messages, turn, whole=self.whole)
        if sent is not None:
            return sent
        if _greets(self.messages, turn) and not any(self.template.served(self.messages, turn)):
            return first  # no prompt asks for it, but its own words begin here
        raise SkipRow("the chat template prompts otherwise than it renders")

    def end(self, turn: int, last: int) -> int:
        """Where the end token of this turn ends; its last word ends at `last`."""
        if _ends_in_words(self.marked[turn]) and (closing := self.closing_of_words):
            last += len(self.whole[last:]) - len(self.whole[last:].lstrip())
        else:
            closing = self.closing(turn)
        if not self.whole.startswith(closing, last):
            raise SkipRow("the chat template closes earlier turns otherwise than the last")
        return last + len(closing)

    @cached_property
    def closing_of_words(self) -> str:
        """The same behind all turns that end in words, but for white space: rendered once."""
        return self.closing(max(t for t in self.own if _ends_in_words(self.marked[t]))).lstrip()

    def closing(self, turn: int) -> str:
        """What stands behind the last word when the turn is the newest, up to its end token."""
        text = self.skeleton
        if turn < len(self.marked) - 1:
            text = self.template.render(self.marked[: turn + 1])
        rest = text[max(text.index(mark) + len(mark) for mark in self.own[turn]) :]
        return rest[: _end_of_turn(self.template.tokenizer, rest)]


def answer_spans(
    template: Template, messages: list[Message], turns: list[int], *, whole: str
) -> list[Span]:
    """Start and end, in the whole rendering, of each of these turns that can be supervised."""
    marks = Marks.foreign_to(whole)
    marked, own = list(messages), {}
    for turn in turns:
        marked[turn], own[turn] = marks.put_in(messages[turn])
    skeleton = template.render(marked)
    answers = Answers(
        template=template,
        messages=messages,
        marked=marked,
        own=own,
        places=marks.places(whole, skeleton),
        whole=whole,
        skeleton=skeleton,
    )
    spans, reason = [], SkipRow("no assistant text")
    for turn in turns:
        try:
            spans.append(answers.span(turn))
        except SkipRow as why:
            reason = why
        except TEMPLATE_ERRORS:
            reason = SkipRow("the chat template refuses the chat up to the answer")
    if not spans:
        raise reason
    return spans


def context_spans(
    template: Template, messages: list[Message], turns: list[int], *, whole: str
) -> Iterator[Span]:
    """Start and end of turns that nobody learns, whatever generation tags say of them.

    They say nothing, or not all of what the assistant wrote in them is in the rendering.
    """
    marks = Marks.foreign_to(whole)
    marked, own = list(messages), {}
    for turn in turns:
        marked[turn], own[turn] = marks.put_in(messages[turn])
    skeleton = template.render(marked)
    shown = {turn for turn in turns if all(mark in skeleton for mark in own[turn])}
    end = len(whole)
    for turn in reversed(range(len(messages))):
        if messages[turn]["role"] != "assistant":
            continue
        sent = sent_before(template, messages, turn, whole=whole)
        if turn not in shown and (turn in own or not says_something(messages[turn])):
            start = _rendered_before(template, messages, turn, whole=whole)
            if start is None and sent is None:
                raise SkipRow("the chat template leaves out what the assistant wrote")
            yield (sent or 0) if start is None else start, end
        end = end if sent is None else sent


def _rendered_before(
    template: Template, messages: list[Message], turn: int, *, whole: str
) -> int | None:
    """Where a turn begins, its header included; None if that cannot be told."""
    try:
        before = template.render(messages[:turn]) if turn else ""
    except TEMPLATE_ERRORS:
        return None
    return len(before) if whole.startswith(before) else None


def sent_before(
    template: Template, messages: list[Message], turn: int, *, whole: str
) -> int | None:
    """How much of `whole` a server sends to get this turn; None if it would send another text."""
    for prompt in template.served(messages, turn):
        for sent in (prompt, EMPTY_THOUGHT.sub("", prompt)):
            if whole.startswith(sent):
                return len(sent)
    return None


def _greets(messages: list[Message], turn: int) -> bool:
    """Whether the assistant speaks first, and opens with words."""
    before, greeting = messages[:turn], messages[turn]
    alone = all(message["role"] == "system" for message in before)
    return alone and bool(greeting["content"].strip()) and not thinks(greeting)


def _ends_in_words(message: Message) -> bool:
    return bool(message["content"].strip()) and not message.get("tool_calls")


def _end_of_turn(tokenizer: Any, text: str) -> int:
    """Where the assistant stops writing: white space behind its end token is the template's."""
    if tokenizer.eos_token and tokenizer.eos_token in text:
        return text.rindex(tokenizer.eos_token) + len(str(tokenizer.eos_token))
    bare = text.rstrip()
    added = tuple(token.content for token in tokenizer.added_tokens_decoder.values())
    return len(bare) if bare.endswith(added) else len(text)
