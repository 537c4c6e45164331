"""What the parts of `bench_ranks` share: sizes, the task that processes are told, what they note.

A process that measures writes what it found down at once, as a small file: the first one reads
them, also when a part was ended in the middle.
"""

import json
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from step_data import QWEN_27B, Model

from dflash_cache.disk import aside
from dflash_fit.config import FitConfig

LR = 1e-5
NEVER = 10**9  # steps
WORDS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight"}
STARTED = "BENCH_STARTED"  # in the environment: when the first process began
STOPPED = "stopped by"  # in errors of what a signal has ended
BESIDE = "run.beside"  # the folder of a run that follows a builder
BROKEN = "broken"  # a file that tells who waits for another that it is waited for in vain


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large everything is: shapes of the 27B model, or tiny ones for a rehearsal on a CPU.

    Shapes are (token budget, anchors) of a pack.
    """

    tiny: bool
    drafter: Model
    microbatch: int
    reduce: tuple[tuple[int, int], ...]
    train: tuple[int, int]
    follow: tuple[int, int]
    tensor_layers: int  # of the target that is shared
    log_every: int
    patience: float = 0.0  # seconds that builders wait for those who train beside them


FULL = Scale(
    tiny=False,
    drafter=QWEN_27B,
    microbatch=2048,
    reduce=((49_152, 2048), (4096, 512)),
    train=(49_152, 6144),
    # A window of the first epoch is 16 packs: with 49,152 slots a builder takes 90 s for one.
    follow=(16_384, 2048),
    tensor_layers=12,
    log_every=2,
)
TINY = Scale(
    tiny=True,
    drafter=Model(
        name="tiny", hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=32,
        vocabulary=512, layers=1, block_size=4,
    ),
    microbatch=16,
    reduce=((128, 16), (64, 16)),
    train=(128, 16),
    follow=(128, 16),
    tensor_layers=8,
    log_every=1,
    patience=30.0,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every process of a part is told."""

    part: str
    folder: Path  # on the disk that is measured
    scale: Scale
    encodings: tuple[str, ...]
    repeats: int  # of a step, where single ones are timed
    steps: int  # of a run
    leave_out: int  # lines of its log: the first packs were read before the clock ran
    passes: int  # over a pack, where the cache is followed
    tokens: int  # of the caches that are only read, or that one worker makes in its own time
    followed_tokens: int  # of those that are built while they are followed, at most
    direct: bool  # read past the page cache
    timeout: float  # seconds that ranks wait for one of them

    def note(self, name: str, **found: Any) -> None:
        """Write down what was found."""
        path = self.notes / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = aside(path)
        partial.write_text(json.dumps(found), encoding="utf-8")
        partial.rename(path)

    def found(self, name: str) -> dict[str, Any] | None:
        """What was noted under a name, None where that was not reached."""
        path = self.notes / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    @property
    def notes(self) -> Path:
        return self.folder / "notes" / self.part

    def wait_for(self, name: str) -> dict[str, Any]:
        """What another process will note."""
        while (found := self.found(name)) is None:
            if (broken := self.found(BROKEN)) is not None:
                raise RuntimeError(f"waited for {name}: {broken['why']}")
            time.sleep(0.05)
        return found


def say(text: str) -> None:
    seconds = time.time() - float(os.environ.setdefault(STARTED, str(time.time())))
    print(f"[{seconds:6.1f} s] {text}", file=sys.stderr, flush=True)


def fit_config(task: Task, cache: Path, out: Path, shape: tuple[int, int]) -> FitConfig:
    """Options of a run that trains `task.steps` updates and neither measures nor saves."""
    model, (tokens, anchors) = task.scale.drafter, shape
    return FitConfig(
        cache=str(cache),
        out=out,
        num_layers=model.layers,
        block_size=model.block_size,
        intermediate_size=model.intermediate,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        token_budget=tokens,
        anchors=anchors,
        anchor_microbatch=min(task.scale.microbatch, anchors),
        epochs=NEVER,
        max_steps=task.steps,
        lr=LR,
        eval_every=NEVER,
        checkpoint_every=NEVER,
        log_every=task.scale.log_every,
        rank_timeout=task.timeout,
    )


def following(config: FitConfig) -> FitConfig:
    """The same on a cache that is being built: once through all of it."""
    return replace(config, follow=True, epochs=1, max_steps=None)
