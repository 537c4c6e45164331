"""A drafter at work: real speculative decoding of held-out prompts, one data set per source.

What `dflash eval --target --prompts` reports of each, as one JSON object: acceptance length with
its standard error, prompt lookup, and tokens per second of plain and speculative decoding.
"""

import json
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from common import REPOSITORY, add_out, end_on_sigterm, publish, result

from dflash_fit.config import EvalConfig
from dflash_fit.evaluate import evaluate_drafter

PROMPTS = REPOSITORY / "examples" / "quickstart" / "heldout_prompts.jsonl"
TOLD = (
    *("acceptance_length", "acceptance_length_error", "acceptance_length_macro", "full_blocks"),
    *("acceptance_length_not_looping", "offline_acceptance_length", "prompt_lookup", "looping"),
    *("plain_tokens_per_second", "tokens_per_second", "speedup", "answers", "answer_tokens"),
    *("target_passes", "answers_differing"),
)


def main() -> None:
    args = parse_args()
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="bench_decode.") as folder:
        sets = split_by_source(args, Path(folder))
        found = evaluate_drafter(
            EvalConfig(
                drafter=args.drafter,
                target=str(args.target),
                prompts=",".join(map(str, sets)),
                max_new_tokens=args.max_new_tokens,
                batch_size=args.batch_size,
                dtype=args.dtype,
                device=args.device,
            )
        )
    figures = told("all", found)
    for name, values in found["datasets"].items():
        figures |= told(name, values)
    shape = {
        "target": args.target.name,
        "block_size": found["block_size"],
        "prompts_per_set": args.per_source,
        **{key: found[key] for key in ("dtype", "device", "max_new_tokens", "batch_size")},
    }
    publish(result("decode", shape, figures), args.out)


def parse_args() -> Namespace:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--drafter", type=Path, required=True, help="a run, or a drafter folder")
    parser.add_argument("--target", type=Path, required=True, help="folder of its target")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="JSONL rows with a source")
    parser.add_argument("--sources", default="mtbench,gsm8k,humaneval", help="comma-separated")
    parser.add_argument("--per-source", type=int, default=8, help="prompts of each")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    add_out(parser)
    return parser.parse_args()


def split_by_source(args: Namespace, folder: Path) -> list[Path]:
    """The first prompts of every source, in a file of its own."""
    rows = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    files = []
    for source in args.sources.split(","):
        own = [row for row in rows if row["source"] == source][: args.per_source]
        if not own:
            sys.exit(f"{args.prompts}: no rows of source {source}")
        lines = [json.dumps({k: row[k] for k in ("id", "messages")}) + "\n" for row in own]
        files.append(folder / f"{source}.jsonl")
        files[-1].write_text("".join(lines), encoding="utf-8")
    return files


def told(name: str, values: dict[str, Any]) -> dict[str, float]:
    figures = {f"{name}.{key}": values[key] for key in TOLD if values[key] is not None}
    slots = {f"{name}.slot{k}": share for k, share in enumerate(values["per_position"], start=1)}
    return figures | slots


if __name__ == "__main__":
    main()
