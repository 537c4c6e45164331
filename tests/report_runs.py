"""Made-up run folders for the report: what a training writes, in numbers of a likely size."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

IDENTITY = {
    "format_version": 2,
    "target": {"name": "Qwen/Qwen3.6-27B", "revision": "8f1c2d", "num_layers": 64},
    "tokenizer": {"sha256": "ab" * 32, "mask_token_id": 248069},
    "data_sha256": "cd" * 32,
    "samples": 48210,
    "tokens": 61_502_118,
    "target_layer_ids": [1, 16, 31, 46, 61],
    "hidden_size": 5120,
    "encoding": "fp8",
    "bucket_edges": [770, 1216, 1728],
}
OPTIONS = {
    "cache": "/data/caches/qwen36-27b",
    "target_layers": None,
    "init_from": None,
    "num_layers": 5,
    "block_size": 16,
    "sliding_window": 2048,
    "token_budget": 49152,
    "anchors": 2048,
    "epochs": 6,
    "packs_per_step": 1,
    "lr": 6e-4,
    "warmup": 0.04,
    "schedule": "cosine",
    "gamma": None,
    "loss": "ce",
    "slot_weights": "decay",
    "seed": 0,
    "eval_every": 500,
    "log_every": 10,
    "keep_last": 2,
}
FINGERPRINT = "3b1f0c" + "9e" * 29


def made_up_run(
    folder: Path, *, steps: int = 3000, planned: int = 3000, seed: int = 0, **changes: Any
) -> Path:
    """A run that stands at a step of those planned, with the options changed like that."""
    rng = np.random.default_rng(seed)
    options = {**OPTIONS, **changes, "out": str(folder), "max_steps": planned}
    block, lr = options["block_size"], options["lr"]
    # Better near 6e-4, with more layers and with dpace; the limit of the acceptance length.
    ceiling = 4.2 - 0.5 * abs(math.log10(lr / 6e-4)) ** 2 + 0.15 * (options["num_layers"] - 5)
    ceiling += 0.2 * (options["slot_weights"] == "dpace") + 0.05 * rng.standard_normal()
    lines = [made_up_eval(0, 1.0, block)]
    for step in range(options["log_every"], steps + 1, options["log_every"]):
        share = 1 - math.exp(-4 * step / planned)
        lines.append(made_up_line(step, planned, share, options, rng))
        if step % options["eval_every"] == 0:
            length = 1 + (ceiling - 1) * share + 0.02 * rng.standard_normal()
            lines.append(made_up_eval(step, length, block))
    folder.mkdir(parents=True)
    config = {**options, "cache_identity": IDENTITY, "cache_fingerprint": FINGERPRINT}
    (folder / "config.json").write_text(json.dumps(config))
    write_lines(folder, lines)
    drafter = folder / "checkpoints" / f"step_{steps:08d}"
    drafter.mkdir(parents=True)
    shape = {"num_hidden_layers": options["num_layers"], "block_size": block,
             "dflash_config": {"target_layer_ids": IDENTITY["target_layer_ids"]}}  # fmt: skip
    (drafter / "config.json").write_text(json.dumps(shape))
    save_file({"weight": np.zeros((1700, 1000), dtype=np.float16)}, drafter / "model.safetensors")
    return folder


def made_up_line(
    step: int, planned: int, share: float, options: dict[str, Any], rng: np.random.Generator
) -> dict[str, Any]:
    warm = options["warmup"] * planned
    rate = min(step / warm, 0.5 + 0.5 * math.cos(math.pi * step / planned))
    noise = rng.standard_normal(4)
    waiting = 0.02 + 0.01 * abs(noise[0]) + (0.3 if 0.3 < step / planned < 0.36 else 0.0)
    speed = 57_000 * (1 - waiting) + 400 * noise[1]
    return {
        "kind": "train",
        "step": step,
        "steps": planned,
        "epoch": step * 6 // (planned + 1),
        "lr": options["lr"] * rate,
        "loss": 6.5 - 3.4 * share + 0.08 * noise[2],
        "grad_norm": 0.4 + 3 * math.exp(-step / 80) + 0.04 * abs(noise[3]),
        "tokens": 48_800 * options["log_every"],
        "anchors": options["anchors"] * options["log_every"],
        "accuracy": 0.5 * share,
        "slot_accuracy": [0.6 * share * 0.93**k for k in range(options["block_size"] - 1)],
        "tokens_per_s": speed,
        "anchors_per_s": speed / 24,
        "gb_per_s_needed": 1.48 + 0.02 * noise[1],
        "gb_per_s_delivered": 1.95 + 0.08 * noise[0] - (0.9 if waiting > 0.2 else 0.0),
        "waiting": waiting,
        "reader_busy": 0.74,
        "limit": "reader" if waiting > 0.2 else "step",
        "memory_gb": 88.2 + 0.1 * share,
        "skipped_updates": 0,
    }


def made_up_eval(step: int, length: float, block: int) -> dict[str, Any]:
    # Accepted drafts add up to the acceptance length less one, slot by slot geometrically.
    ratio = (length - 1) / length
    return {
        "kind": "eval",
        "step": step,
        "acceptance_length": length,
        "acceptance_length_macro": length + 0.03,
        "acceptance_error": 0.012 * length,
        "per_position": [ratio**k for k in range(1, block)],
        "slot_accuracy": [ratio**0.8 * 0.95 ** (k - 1) for k in range(1, block)],
        "target_passes": 60_000,
        "tokens": int(60_000 * length),
        "texts": 180,
        "documents": 180,
        "seconds": 41.0,
    }


def write_lines(folder: Path, lines: list[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def made_up_sweep(folder: Path, count: int) -> Path:
    """A sweep of so many trials over several options; the last one failed and left no run."""
    trials = []
    for number in range(count - 1):
        changes = {
            "lr": [1e-4, 3e-4, 6e-4, 1e-3, 3e-3][number % 5],
            "num_layers": [3, 5, 7][number // 5 % 3],
            "slot_weights": ["decay", "dpace"][number % 2],
            "block_size": [8, 16][number // 2 % 2],
        }
        name = f"trial-{number:02d}"
        made_up_run(folder / name, seed=number, steps=1500 if number % 7 == 6 else 3000, **changes)
        trials.append({"name": name, "options": changes, "run": name, "status": "done",
                       "hours": 1.2, "gb_read": 61.5 / count})  # fmt: skip
    trials.append({"name": "too-large", "options": {"anchors": 65536}, "run": "too-large",
                   "status": "failed: out of memory: 141.2 GB wanted"})  # fmt: skip
    (folder / "sweep.json").write_text(json.dumps({"trials": trials}))
    return folder
