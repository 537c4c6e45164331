"""The main job from end to end on a CPU: target -> cache -> fit -> eval -> export -> a table.

Every step is a `dflash` command that you can type yourself; they are printed as they run.  Run
again, it continues where it stopped.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dflash_cache.devices import slow_bfloat16

HERE = Path(__file__).parent

CACHE_OPTIONS = ["--max-samples", "900", "--batch-tokens", "2048"]
FIT_OPTIONS = [
    *["--num-layers", "2", "--block-size", "4", "--gamma", "2", "--token-budget", "1024"],
    *["--anchors", "128", "--epochs", "4", "--lr", "1e-3", "--beta2", "0.95", "--held-out", "0.03"],
    *["--eval-every", "250", "--eval-tokens", "4000"],
]
EVAL_OPTIONS = ["--max-new-tokens", "96"]
PROMPTS = 8


def command(*words: str | Path) -> list[str]:
    return [str(word) for word in words]


def run(words: list[str], *, shown: str) -> str:
    """Run a command, progress on the terminal; returns what it printed."""
    print(f"\n$ {shown}", flush=True)
    began = time.monotonic()
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(done.stdout)
        raise SystemExit(done.returncode)
    print(f"  ({time.monotonic() - began:.0f} s)", flush=True)
    return done.stdout


def dflash(*words: str | Path) -> dict[str, Any]:
    """Run a `dflash` command and read its report."""
    typed = command(*words, "--json")
    module = command(sys.executable, "-m", "dflash_cli")
    report: dict[str, Any] = json.loads(
        run([*module, *typed], shown=shlex.join(["dflash", *typed]))
    )
    return report


def fetch_target(target: Path) -> None:
    words = command(HERE / "fetch_target.py", "--out", target)
    print(run([sys.executable, *words], shown=shlex.join(["python", *words])).strip())


def quickstart(work: Path, device: str) -> bool:
    """All steps and the table; False when real decoding was not identical to greedy."""
    target = work / "SmolLM2-135M-Instruct"
    prompts = HERE / "heldout_prompts.jsonl"
    fetch_target(target)
    on, target_dtype, precision, ending = ["--device", device], "bfloat16", "bf16", ""
    in_float32 = "--target-dtype float32 and --precision fp32"
    if device == "cpu" and (slow := slow_bfloat16(instead=in_float32)) is not None:
        print(slow)
        target_dtype, precision, ending = "float32", "fp32", "-float32"
    cache = work / f"cache{ending}"
    data = ["--target", target, "--data", HERE / "train.jsonl", "--out", cache]
    build_options = [*CACHE_OPTIONS, "--target-dtype", target_dtype, "--devices", device]
    dflash("cache", "build", *data, *build_options)
    fit_options = ["--cache", cache, *FIT_OPTIONS, "--precision", precision, "--devices", device]

    def fit(out: Path, *more: str) -> dict[str, Any]:
        return dflash("fit", *fit_options, "--out", out, *more)

    def decode(drafter: Path, limit: int) -> dict[str, Any]:
        with_target = ["--target", target, "--prompts", prompts, "--max-prompts", str(limit)]
        return dflash("eval", "--drafter", drafter, *with_target, *EVAL_OPTIONS, *on)

    untrained_run, trained_run = work / f"untrained{ending}", work / f"run{ending}"
    untrained = fit(untrained_run, "--max-steps", "0")
    untrained_decoded = decode(untrained_run, 2)
    trained = fit(trained_run)
    held_out = ["--cache", cache, "--max-tokens", "4000"]
    offline = dflash("eval", "--drafter", trained_run, *held_out, *on)
    decoded = decode(trained_run, PROMPTS)
    export = work / f"drafter-step-{trained['best_step']}"
    if not export.exists():
        dflash("export", trained_run, "--out", export)
    table = [
        row("untrained drafter", untrained["acceptance_length"], untrained_decoded),
        ("prompt lookup (3-gram)", "-", "-", number(decoded["prompt_lookup"])),
        row("trained drafter", offline["acceptance_length"], decoded),
        ("  answers that do not loop", "-", "-", number(decoded["acceptance_length_not_looping"])),
        ("  prompt lookup on those", "-", "-", number(decoded["prompt_lookup_not_looping"])),
        ("", "", "", ""),
        ("identical to plain greedy", "", "", yes(decoded["identical_to_greedy"])),
        ("answers that loop", "", "", f"{decoded['looping']:.0%}"),
    ]
    show(table)
    print(f"\nexported drafter: {export}")
    return bool(decoded["identical_to_greedy"] and untrained_decoded["identical_to_greedy"])


def show(table: list[tuple[str, str, str, str]]) -> None:
    head = ("acceptance length", "held-out samples", "decoded texts", "real decoding")
    under = ("", "offline", "offline", f"{PROMPTS} held-out prompts")
    print()
    for line in [head, under, *table]:
        print(f"{line[0]:<28} {line[1]:>18} {line[2]:>16} {line[3]:>20}".rstrip())


def row(name: str, held_out: float, decoded: dict[str, Any]) -> tuple[str, str, str, str]:
    same_texts = number(decoded["offline_acceptance_length"])
    return name, number(held_out), same_texts, number(decoded["acceptance_length"])


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def yes(value: bool) -> str:
    return "yes" if value else "NO"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, default=HERE / "work", help="working folder")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args()
    began = time.monotonic()
    identical = quickstart(options.work, options.device)
    print(f"done in {(time.monotonic() - began) / 60:.1f} minutes")
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main())
