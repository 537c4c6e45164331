"""Put marks in place of the assistant's texts, and find by them where a rendering has the texts."""

import re
from dataclasses import dataclass, field
from itertools import count

from dflash_cache.messages import REASONING_KEYS, THINK_TAG, Message, SkipRow

Span = tuple[int, int]


@dataclass(kw_only=True)
class Marks:
    """Words that stand for texts of the assistant and occur nowhere else."""

    stem: str
    texts: dict[str, str] = field(default_factory=dict)  # mark -> text

    @classmethod
    def foreign_to(cls, text: str) -> "Marks":
        return cls(stem=next(s for n in count() if (s := f"mark{n}of") not in text))

    def put_for(self, text: str) -> str:
        """White space stays: templates trim it or not, and either way tell where."""
        core = text.strip()
        if not core:
            return text
        mark = f"{self.stem}{len(self.texts)}end"
        self.texts[mark] = core
        return text.replace(core, mark, 1)

    def put_in(self, message: Message) -> tuple[Message, list[str]]:
        """The message with a mark for each of its texts and in each tool call; and these marks."""
        before = len(self.texts)
        thoughts = {key: message[key] for key in REASONING_KEYS if message.get(key)}
        mark_of = {text: self.put_for(text) for text in dict.fromkeys(thoughts.values())}
        marked: Message = {key: mark_of[text] for key, text in thoughts.items()}
        pieces = THINK_TAG.split(message["content"])
        marked["content"] = "".join(
            piece if THINK_TAG.fullmatch(piece) else self.put_for(piece) for piece in pieces
        )
        if message.get("tool_calls"):
            marked["tool_calls"] = [self._put_in_call(call) for call in message["tool_calls"]]
        return {**message, **marked}, list(self.texts)[before:]

    def _put_in_call(self, call: Message) -> Message:
        if isinstance(call.get("function"), dict):
            return {**call, "function": self._put_in_call(call["function"])}
        if isinstance(call.get("name"), str):
            return {**call, "name": self.put_for(call["name"])}
        return call

    def places(self, whole: str, marked: str) -> dict[str, Span]:
        """Where each marked text stands in `whole`, which must be `marked` with the texts back."""
        places: dict[str, Span] = {}
        position = 0
        for piece in re.split(f"({self.stem}[0-9]+end)", marked):
            text = self.texts.get(piece, piece)
            if not whole.startswith(text, position):
                raise SkipRow("the chat template rewrites what the assistant wrote")
            if piece in self.texts:
                places.setdefault(piece, (position, position + len(text)))
            position += len(text)
        if position != len(whole):
            raise SkipRow("the chat template rewrites what the assistant wrote")
        return places
