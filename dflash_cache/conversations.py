"""What a row says: its turns, its opening, and which rows are pieces of one conversation.

Rows come as pieces of longer chats (ShareGPT: ids abc_0, abc_13 ...) and as several answers to one
prompt.  Neither may stand on both sides of a split, so each row has two keys, and rows that share
a key, directly or through others, are one group.
"""

import re
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from dflash_cache.chat import SkipRow
from dflash_cache.rows import Row
from dflash_cache.schema import canonical_json

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
# Everything that we read of a row.
KEYS = (
    *("messages", "conversations", "prompt", "response", "text", "input_ids", "loss_mask"),
    *("tools", "id", "conversation_id"),
)
PIECE_OF_A_CHAT = re.compile(r"(.+)_\d+", re.DOTALL)
# ids like train_17 number the rows of a file and name no chat.  The longest chat of ShareGPT has
# 89 pieces, 0.5% of its rows.
MOST_PIECES, MOST_SHARE = 50, 0.05
# Pieces of 135 chats of ShareGPT open with "continue", of 50 with "hi": joined, they are one group
# of 8% of the rows, and a split goes wrong by as much.  With this limit the largest has 1%.
MOST_CHATS = 12


def is_ready(row: Row) -> bool:
    """Whether the row brings its tokens."""
    return row.get("input_ids") is not None and row.get("loss_mask") is not None


def is_chat(row: Row) -> bool:
    """Whether the row goes through a chat template."""
    return not is_ready(row) and not isinstance(row.get("text"), str)


def messages_of(row: Row) -> list[dict[str, Any]]:
    """The row as OpenAI-style messages."""
    if isinstance(row.get("messages"), list):
        turns = row["messages"]
    elif isinstance(row.get("conversations"), list):
        turns = [_share_gpt_turn(turn) for turn in row["conversations"]]
    elif isinstance(row.get("prompt"), str) and isinstance(row.get("response"), str):
        turns = [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["response"]},
        ]
    else:
        raise SkipRow("no messages, conversations, prompt and response, text, or input_ids")
    return [_known_turn(turn) for turn in turns]


def _share_gpt_turn(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise SkipRow("a turn is not an object")
    return {"role": turn.get("from", turn.get("role")), "content": turn.get("value", "")}


def _known_turn(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise SkipRow("a turn is not an object")
    role = ROLES.get(str(turn.get("role")).lower())
    if role is None:
        raise SkipRow(f"unknown role {str(turn.get('role'))[:20]!r}")
    return {**turn, "role": role}


def text_of(content: Any) -> str:
    """The text of a message's content: a string, or parts of which some are text."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "\n".join(text for text in texts if isinstance(text, str))


def before_first_answer(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The opening of a conversation; all of it where no answer follows anything."""
    first = next((i for i, turn in enumerate(turns) if turn["role"] == "assistant"), 0)
    return turns[: first or None]


def ids_before_first_answer(row: Row) -> list[int]:
    """The prompt of a row that brings its tokens; all of them where nothing comes before."""
    first = next((i for i, wanted in enumerate(row["loss_mask"]) if wanted), 0)
    return [int(token) for token in row["input_ids"][: first or None]]


# --- groups -------------------------------------------------------------------------------------


def group_of(row: Row) -> str:
    """Rows with one opening share it: the conversation up to the first answer."""
    opening: Any
    if is_ready(row):
        opening = ids_before_first_answer(row)
    elif isinstance(row.get("text"), str):
        opening = row["text"]
    else:
        turns = before_first_answer(messages_of(row))
        opening = [[turn["role"], turn.get("content")] for turn in turns]
    return _hash(opening)


def chat_of(row: Row) -> str | None:
    """Pieces of one conversation share it, by their ids; None where the row has none."""
    for key in ("conversation_id", "id"):
        name = row.get(key)
        if isinstance(name, int) and not isinstance(name, bool) and key == "conversation_id":
            name = str(name)
        if isinstance(name, str) and name:
            found = PIECE_OF_A_CHAT.fullmatch(name)
            return _hash({"conversation": found[1] if found else name})
    return None


def _hash(value: Any) -> str:
    return sha256(canonical_json(value)).hexdigest()[:16]


def joined_groups(openings: Sequence[str], chats: Sequence[str | None]) -> list[str]:
    """The group of every row, from its two keys; the order of the rows does not matter.

    An opening of more than `MOST_CHATS` chats of several pieces joins none of those.  A group of
    several keys gets a hash of them and not the least of them: a split by the size of the hash
    would hold out more of the large groups.
    """
    chats = _of_several_pieces(chats)
    common = _commonplaces(openings, chats)
    firsts = [
        chat if chat and opening in common else opening
        for opening, chat in zip(openings, chats, strict=True)
    ]
    union = _Union()
    for first, chat in zip(firsts, chats, strict=True):
        union.join(first, chat or first)
    members: dict[str, list[str]] = {}
    for key in union.parent:
        members.setdefault(union.root(key), []).append(key)
    names = {
        root: keys[0] if len(keys) == 1 else _hash(sorted(keys)) for root, keys in members.items()
    }
    return [names[union.root(first)] for first in firsts]


def _of_several_pieces(chats: Sequence[str | None]) -> list[str | None]:
    """The chats that relate rows: neither those of one row nor the numberings of whole files."""
    counts = Counter(chat for chat in chats if chat)
    most = max(MOST_PIECES, MOST_SHARE * len(chats))
    return [chat if chat and 1 < counts[chat] <= most else None for chat in chats]


def _commonplaces(openings: Sequence[str], chats: Sequence[str | None]) -> set[str]:
    pairs = {(opening, chat) for opening, chat in zip(openings, chats, strict=True) if chat}
    counts = Counter(opening for opening, _ in pairs)
    return {opening for opening, count in counts.items() if count > MOST_CHATS}


class _Union:
    """Keys that are known to belong together."""

    def __init__(self) -> None:
        self.parent: dict[str, str] = {}

    def root(self, key: str) -> str:
        above = self.parent.setdefault(key, key)
        while above != key:
            # Halve the way for the next one who asks.
            self.parent[key] = key = self.parent[above]
            above = self.parent[key]
        return key

    def join(self, one: str, other: str) -> None:
        low, high = sorted((self.root(one), self.root(other)))
        self.parent[high] = low
