"""Let the target itself write the assistant turns of chats, through an OpenAI-compatible server.

A drafter learns to guess the target's own words, and few data sets hold them.  Turns are asked
for in order, each behind the answers that the target gave before; user turns stay as they are.

A chat ends before its first answer that cannot be learnt from.  One that was cut at the token
limit is such an answer: the chat template would close it with an end token that the target never
wrote.  One that repeats itself is another: loops are easy to draft, and teach nothing.
"""

import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dflash_cache import answer_file
from dflash_cache.answer_file import AnswerFile, Record
from dflash_cache.chat import SkipRow
from dflash_cache.config import AnswersConfig
from dflash_cache.errors import ConfigError, DataError
from dflash_cache.rows import Row, iter_rows
from dflash_cache.samples import messages_of
from dflash_cache.schema import canonical_json
from dflash_cache.server import NoAnswer, Reply, Server, ServerError

Message = dict[str, Any]

LOOPING = "an answer repeats itself"
CUT = "an answer was cut at --max-new-tokens"
EMPTY = "an answer is empty"
CALLS = "an answer calls a tool in mid-chat, and nobody has the result"
FILTERED = "an answer was filtered by the server"

DECIDING = (
    *("split", "max_samples", "system", "thinking", "temperature", "top_p", "max_new_tokens"),
    *("seed", "keep_looping"),
)

# About what a tokenizer makes of text: words, digits and signs one by one.  Scripts that put no
# spaces between words go letter by letter, and long words are cut: "aaaa..." is a loop too.
UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
PIECE = re.compile(rf"[{UNSPACED}]|[^\W\d_{UNSPACED}]{{1,12}}|\d|[^\w\s]|_|\n")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a row: `record` to write, or a reason to drop it, or why it failed."""

    row: int
    record: Record | None = None
    dropped: str | None = None
    failed: str | None = None
    lost: bool = False  # failed since the server does not work
    tokens: int = 0  # that the server wrote for it


class Failures:
    """Why rows failed, and whether the server still works at all."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.lost_in_a_row = 0
        self._examples: dict[str, str] = {}

    def note(self, outcome: Outcome) -> None:
        self.lost_in_a_row = self.lost_in_a_row + 1 if outcome.lost else 0
        if outcome.failed is not None:
            # "4113 tokens are too many" and "4205 tokens are too many" are one reason, as are
            # "request a7-f1 failed" and "request 9c-f2 failed".
            kind = re.sub(r"(?<!HTTP )\b[\w-]*\d[\w-]*", "#", outcome.failed)
            self.reasons[self._examples.setdefault(kind, outcome.failed)] += 1


def write_answers(config: AnswersConfig) -> dict[str, Any]:
    """Ask for every row that has no answer yet, and say what came of all."""
    refuse_bad_out(config)
    settings = settings_of(config)
    begun = time.monotonic()
    with Server(config.server, timeout=config.timeout, retries=config.retries) as server:
        if not answer_file.is_complete(config.out, settings["rows"]):
            settings |= choose_model(server, config.model)
        elif config.model is not None:
            settings["model"] = config.model
        with answer_file.opened(config.out, settings) as file:
            settings = answer_file.read_settings(answer_file.beside(config.out, ".settings.json"))
            failed = ask_for_the_rest(config, settings, server, file)
            file.sort()
    return {
        "rows": settings["rows"],
        "written": file.written,
        "shortened": file.shortened,
        "skipped": dict(sorted(file.reasons.items())),
        "failed": failed.total(),
        "failures": dict(sorted(failed.items())),
        "looping": file.ended[LOOPING],
        "cut": file.ended[CUT],
        "tokens": file.tokens,
        "seconds": round(time.monotonic() - begun, 3),
        "model": settings["model"],
        "out": str(config.out),
    }


def refuse_bad_out(config: AnswersConfig) -> None:
    if config.out.suffix != ".jsonl":
        raise ConfigError(
            f"--out {config.out}: want a name that ends in .jsonl, by which `dflash cache build` "
            "knows what it reads"
        )
    if Path(config.data).exists() and config.out.resolve() == Path(config.data).resolve():
        raise ConfigError(f"--out {config.out}: is the data itself; give another name")


def settings_of(config: AnswersConfig) -> dict[str, Any]:
    """What decides the answers, but for the model, which the server knows."""
    digest, rows = hashlib.sha256(), 0
    for row in islice(iter_rows(config.data, split=config.split), config.max_samples):
        digest.update(canonical_json(row) + b"\n")
        rows += 1
    if not rows:
        raise DataError(f"{config.data}: holds no rows; give --data a file with rows")
    decided = {name: getattr(config, name) for name in DECIDING}
    return {"data": config.data, "data_sha256": digest.hexdigest(), "rows": rows, **decided}


def choose_model(server: Server, name: str | None) -> dict[str, Any]:
    """The model to ask, and what the server says it was loaded from."""
    roots = {model["id"]: model["root"] for model in server.models()}
    if name is None and len(roots) != 1:
        raise ServerError(
            f"--server {server.address}: serves {len(roots)} models ({', '.join(roots)}); choose "
            "one with --model"
        )
    # Some servers load by any name and list only what they loaded before: a name is taken as it is.
    name = name or next(iter(roots))
    return {"model": name, "model_root": roots.get(name)}


def ask_for_the_rest(
    config: AnswersConfig, settings: dict[str, Any], server: Server, file: AnswerFile
) -> Counter[str]:
    """Settle the rows that are left; returns the reasons of those that failed."""
    failures, tokens = Failures(), 0

    def answer(number: int, row: Row) -> Outcome:
        return answer_row(number, row, config, settings, server)

    rows = enumerate(islice(iter_rows(config.data, split=config.split), config.max_samples))
    left = ((number, row) for number, row in rows if number not in file)
    begun = time.monotonic()
    with tqdm(
        total=settings["rows"], initial=file.settled, desc="answer", unit="row", disable=None
    ) as bar:
        for outcome in outcomes(answer, left, concurrency=config.concurrency):
            settle(outcome, file, failures)
            tokens += outcome.tokens
            bar.update()
            bar.set_postfix_str(
                f"{tokens / (time.monotonic() - begun):,.0f} tokens/s, "
                f"{failures.reasons.total()} failed, "
                f"{file.ended[LOOPING]} looping, {file.ended[CUT]} cut"
            )
            refuse_many_failures(config, settings["rows"], failures, file)
    return failures.reasons


def outcomes(
    answer: Callable[[int, Row], Outcome], rows: Iterator[tuple[int, Row]], *, concurrency: int
) -> Iterator[Outcome]:
    """Outcomes as they come, of no more rows at once than asked for."""
    pool = ThreadPoolExecutor(concurrency, thread_name_prefix="answer")
    try:
        under_way: set[Future[Outcome]] = set()
        while True:
            room = concurrency - len(under_way)
            under_way |= {pool.submit(answer, *one) for one in islice(rows, room)}
            if not under_way:
                return
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    finally:
        # No waiting: whoever stops here closes the server next, and that ends the threads.
        pool.shutdown(wait=False, cancel_futures=True)


def settle(outcome: Outcome, file: AnswerFile, failures: Failures) -> None:
    if outcome.record is not None:
        file.write(outcome.record)
    elif outcome.dropped is not None:
        file.drop(outcome.row, outcome.dropped)
    failures.note(outcome)


def refuse_many_failures(
    config: AnswersConfig, rows: int, failures: Failures, file: AnswerFile
) -> None:
    count, in_a_row = failures.reasons.total(), failures.lost_in_a_row
    if count > config.max_failed * rows:
        why = f"{count} rows failed, more than --max-failed {config.max_failed:g} allows"
    elif in_a_row > max(8, config.concurrency):
        why = f"the server failed for {in_a_row} rows on end"
    else:
        return
    reasons = "; ".join(f"{count} {reason}" for reason, count in failures.reasons.most_common(5))
    raise ServerError(
        f"--server {config.server}: {why} ({reasons}). {file.settled} of {rows} rows are done and "
        "kept, and the same command again goes on."
    )


def answer_row(
    number: int, row: Row, config: AnswersConfig, settings: dict[str, Any], server: Server
) -> Outcome:
    """All answers of one chat, one after the other."""
    spent = 0

    def ask(messages: list[Message]) -> Reply:
        nonlocal spent
        reply = server.answer(request_for(messages, number, row, config, settings["model"]))
        spent += reply.tokens
        return reply

    try:
        messages, reasons, flaw = answer_turns(turns_of(row, system=config.system), ask, config)
    except SkipRow as reason:
        return Outcome(row=number, dropped=str(reason))
    except NoAnswer as trouble:
        return Outcome(row=number, failed=str(trouble), lost=trouble.lost, tokens=spent)
    if not reasons:
        return Outcome(row=number, dropped=flaw, tokens=spent)
    record = {
        "id": row.get("id", number),
        "row": number,
        "messages": messages,
        **({"tools": row["tools"]} if row.get("tools") else {}),
        "model": settings["model"],
        "temperature": config.temperature,
        "finish_reasons": reasons,
        "completion_tokens": spent,
        **({"shortened": flaw} if flaw else {}),
    }
    return Outcome(row=number, record=record, tokens=spent)


def turns_of(row: Row, *, system: str | None) -> list[Message]:
    """The turns of a chat, in which every assistant turn is empty and follows a user's."""
    turns: list[Message] = []
    asked = False  # since the last answer
    for turn in _given_turns(row):
        role = turn["role"]
        if role == "tool" or turn.get("tool_calls"):
            raise SkipRow("tool results, which belong to the old answers")
        if role != "assistant":
            turns.append({"role": role, "content": turn.get("content")})
            asked = asked or role == "user"
        elif asked:
            turns.append({"role": role})
            asked = False
        elif not any(turn["role"] == "assistant" for turn in turns):
            raise SkipRow("starts with an assistant turn, which no prompt can ask for")
    if asked:
        turns.append({"role": "assistant"})
    while turns and turns[-1]["role"] != "assistant":
        turns.pop()
    if not turns:
        raise SkipRow("no user turn")
    if system is not None and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": system})
    return turns


def _given_turns(row: Row) -> list[Message]:
    if isinstance(row.get("messages"), list) or isinstance(row.get("conversations"), list):
        return messages_of(row)
    if isinstance(row.get("prompt"), str):
        return [{"role": "user", "content": row["prompt"]}]
    raise SkipRow("no messages, conversations or prompt, so nothing to answer")


def answer_turns(
    turns: list[Message], ask: Callable[[list[Message]], Reply], config: AnswersConfig
) -> tuple[list[Message], list[str | None], str | None]:
    """The chat with new answers up to its first flaw, how they ended, and the flaw."""
    messages: list[Message] = []
    reasons: list[str | None] = []
    whole = 0  # messages up to the last good answer
    for position, turn in enumerate(turns):
        if turn["role"] != "assistant":
            messages.append(turn)
            continue
        reply = ask([_as_sent(message) for message in messages])
        flaw = flaw_of(reply, config, last=position == len(turns) - 1)
        if flaw:
            return messages[:whole], reasons, flaw
        messages.append(reply.message)
        reasons.append(reply.finish_reason)
        whole = len(messages)
    return messages, reasons, None


def _as_sent(message: Message) -> Message:
    """Earlier thoughts are not sent back: no chat client does."""
    return {"role": message["role"], "content": message["content"]}


def flaw_of(reply: Reply, config: AnswersConfig, *, last: bool) -> str | None:
    """Why an answer cannot be learnt from, if so."""
    content, calls = reply.message["content"], reply.message.get("tool_calls")
    if reply.finish_reason == "length" or (
        reply.finish_reason is None and reply.tokens >= config.max_new_tokens
    ):
        return CUT
    if reply.finish_reason == "content_filter":
        return FILTERED
    if calls and not last:
        return CALLS
    if not content.strip() and not calls:
        return EMPTY
    if not config.keep_looping and repeats_itself(
        reply.message.get("reasoning_content", "") + content
    ):
        return LOOPING
    return None


def repeats_itself(text: str, *, ngram: int = 8, distinct: float = 0.7) -> bool:
    """Whether under 70% of the 8-grams of a text are distinct, as `is_looping` asks of tokens."""
    pieces = PIECE.findall(text)
    grams = [tuple(pieces[i : i + ngram]) for i in range(len(pieces) - ngram + 1)]
    return len(set(grams)) < distinct * len(grams)


def request_for(
    messages: list[Message], number: int, row: Row, config: AnswersConfig, model: str
) -> dict[str, Any]:
    """The body of a request.  Every row has its own seed, or equal prompts had equal answers."""
    request: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "max_tokens": config.max_new_tokens,
        "seed": config.seed + number,
        "stream": False,
    }
    if row.get("tools"):
        request["tools"] = row["tools"]
    if config.thinking != "as-is":
        request["chat_template_kwargs"] = {"enable_thinking": config.thinking == "on"}
    return request
