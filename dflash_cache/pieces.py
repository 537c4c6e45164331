"""Text of token ids, token by token, so that people can read it.  Knows tokenizers, no samples."""

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

# One character is up to four tokens, and the last of them may begin the next character.
MOST_TOKENS = 12
BROKEN = "\ufffd"  # what a decoder writes for bytes that are no character
MARKS = {"\n": "⏎\n", "\t": "⇥   "}
# Not printable, but part of emoji, of scripts, and of Chinese text.
KEPT = "\u200d\u200c\u3000"


def pieces_of(ids: Sequence[int], tokenizer: Any) -> list[str | None]:
    """Text of every token; joined, they are the text.

    A character that several tokens spell stands at the first of them, and the others are empty.
    None for ids that the tokenizer does not know.
    """
    backend = tokenizer.backend_tokenizer

    def decode(part: Sequence[int]) -> str:
        return str(backend.decode(part, skip_special_tokens=False))

    pieces: list[str | None] = []
    before: Sequence[int] = []  # some decoders drop a blank where a text starts
    while len(pieces) < len(ids):
        start = len(pieces)
        ahead = ids[start : start + MOST_TOKENS]
        known = list(takewhile(lambda i: backend.id_to_token(i) is not None, ahead))
        if not known:
            pieces.append(None)
            continue
        group, text = _first_group(known, before, decode)
        pieces += [text, *[""] * (len(group) - 1)]
        before = group
    return pieces


def _first_group(
    ids: Sequence[int], before: Sequence[int], decode: Any
) -> tuple[Sequence[int], str]:
    """The fewest tokens that are whole characters, or the first alone where none are."""
    for size in range(1, len(ids) + 1):
        text = _behind(before, ids[:size], decode)
        if not text.endswith(BROKEN):
            return ids[:size], text
    return ids[:1], _behind(before, ids[:1], decode)


def _behind(before: Sequence[int], ids: Sequence[int], decode: Any) -> str:
    known, both = decode(before), decode([*before, *ids])
    if both.startswith(known):
        return str(both[len(known) :])
    return str(decode(ids))


def visible(text: str) -> str:
    """Text with its white space marked and nothing in it that a terminal or page would obey."""
    dotted = re.sub(r" (?= *\n)", "·", text)
    return "".join(MARKS.get(char) or _plain(char) for char in dotted)


def _plain(char: str) -> str:
    return char if char.isprintable() or char in KEPT else ascii(char)[1:-1]
