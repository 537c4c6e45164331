"""What workers do in `bench_ranks`: extract with a random target, build beside a trainer, share a
target.  And the caches of random states that the trainers of other parts read.
"""

import copy
import json
import shutil
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_extract
import numpy as np
import torch
from bench_extract import QWEN_27B, TINY, Sizes, Work, random_target, target_spec
from ranks_data import BESIDE, BROKEN, Task, say
from ranks_rates import gb_per_s, rate, rate_to_the_end, train_lines
from store_data import POOL_ROWS, make_pool
from torch.distributed import PrefixStore

from dflash_cache import launcher, ledger, lock, lockstep, store, teams
from dflash_cache.attempt import encoded_sample
from dflash_cache.board import Board
from dflash_cache.buckets import UnitPlan
from dflash_cache.codec import plain_codec
from dflash_cache.config import BuildConfig
from dflash_cache.devices import Group
from dflash_cache.extraction import Budget, extract
from dflash_cache.files import file_entry
from dflash_cache.member import Member
from dflash_cache.plan import Plan
from dflash_cache.samples import Samples
from dflash_cache.schema import (
    FORMAT_VERSION,
    Identity,
    Manifest,
    TokenizerSpec,
)
from dflash_cache.survey import survey_target
from dflash_cache.target import Target, default_layer_ids
from dflash_cache.weights import load_weights
from dflash_cache.workers import Crew

CONFIG = BuildConfig(target="", data="", out=Path())
bench_extract.say = say  # one clock for all lines
SHORT = replace(TINY, shorter=64)  # a rehearsal is to take seconds


class Told:
    """A display that only passes on what people must know."""

    def start(self) -> None: ...

    def show(self, counts: object) -> None: ...

    def tell(self, line: str) -> None:
        say(line)


def perform(work: Callable[..., None], task: Task, groups: Sequence[Group]) -> None:
    """Have `work(crew, task)` done by a worker for each group, as a build does."""
    teams.on_this_machine(groups, CONFIG).perform(work, task, folder=task.folder, display=Told())


# --- units and caches -----------------------------------------------------------------------------


def sizes_of(task: Task) -> Sizes:
    return SHORT if task.scale.tiny else QWEN_27B


def options(task: Task, *, tokens: int, layers: int | None = None) -> Namespace:
    """As `bench_extract` is told them."""
    return Namespace(
        layers=layers,
        target_layers=task.scale.drafter.target_layers,
        attention="sdpa",
        tokens=tokens,
        encodings=",".join(task.encodings),
    )


def units_of(task: Task, folder: Path, target: Target | None = None) -> Work:
    """Units of all buckets, the same in every process; without a target only to be planned."""
    described: Any = target or SimpleNamespace(
        spec=target_spec(sizes_of(task), layers=sizes_of(task).layers)
    )
    return Work(described, sizes_of(task), options(task, tokens=task.tokens), folder)


def repeated(work: Work, times: int) -> Work:
    """The same units so many times over, each sample under a number of its own.

    Units that are drawn anew would be another mixture, whose rate is another, and have batches of
    more numbers of rows, for which kernels would be tuned while the clock runs.
    """
    size, found = len(work.samples), copy.copy(work)
    found.samples = [
        replace(sample, sample_id=number, group=str(number))
        for number, sample in enumerate(work.samples * times)
    ]
    found.units = [
        replace(
            unit,
            name=ledger.unit_name(turn * len(work.units) + place),
            members=tuple(turn * size + member for member in unit.members),
        )
        for turn in range(times)
        for place, unit in enumerate(work.units)
    ]
    found.lengths, found.tokens = work.lengths * times, work.tokens * times
    return found


def whole_identity(work: Work, encoding: str) -> Identity:
    """With everything that a trainer asks for."""
    rows = work.sizes.vocabulary
    tokenizer = TokenizerSpec(
        sha256="",
        chat_template_sha256=None,
        length=rows - 1,
        eos_token_ids=[0],
        pad_token_id=None,
        unused_special_ids=[],
        mask_token_id=rows - 1,
        mask_token_source="the last row",
    )
    described = {**work.identity(encoding).to_dict(), "tokenizer": tokenizer.to_dict()}
    return Identity.from_dict(described, where="the benchmark")


def begin(root: Path, work: Work, identity: Identity) -> None:
    """Leave what stands beside the units; embedding and head are never read."""
    ledger.begin(root, identity, {})
    store.write_plan(root, work.units, work.samples)
    store.write_frozen(root, torch.zeros(1, 1), torch.zeros(1, 1), tied=True)


def seal(root: Path, identity: Identity) -> None:
    records = ledger.committed_units(root, fingerprint=identity.fingerprint)
    held = ledger.totals(records.values())
    assert held["samples"] == identity.samples, (held, identity.samples)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        fingerprint=identity.fingerprint,
        identity=identity.to_dict(),
        **held,
        buckets={},
        rows=identity.samples,
        skipped={},
        proofs={},
        agreement={},
        encoding_error={},
        files={name: file_entry(root / name) for name in ledger.beside(root, identity)},
        options={},
        software={},
        created="",
    )
    ledger.seal(root, manifest)


def random_cache(task: Task, encoding: str) -> Path:
    """A sealed cache of random states, written once."""
    root = task.folder / f"cache.{encoding}"
    if (root / "manifest.json").is_file():
        return root
    work, began = units_of(task, task.folder), time.perf_counter()
    identity = whole_identity(work, encoding)
    codec = plain_codec(identity)
    pool_KPH = make_pool(
        len(identity.target_layer_ids), identity.hidden_size, np.random.default_rng(0)
    )

    def states(member: int) -> list[torch.Tensor]:
        rows = (member * 613 + torch.arange(work.lengths[member])) % POOL_ROWS
        return list(pool_KPH.index_select(1, rows))

    begin(root, work, identity)
    for unit in work.units:
        samples = [work.samples[member] for member in unit.members]
        spelt = (encoded_sample(states(m), identity.planes, codec) for m in unit.members)
        store.write_unit(root, unit, samples, spelt, identity=identity)
    seal(root, identity)
    size, seconds = ledger.read_manifest(root).bytes / 1e9, time.perf_counter() - began
    say(f"cache {encoding}: {work.tokens:,} tokens, {size:.2f} GB in {seconds:.1f} s")
    return root


# --- extraction -----------------------------------------------------------------------------------


class Noted(Member):
    """A member that keeps when its tokens and bytes were done, and rests once if it has to."""

    def __init__(self, board: Board, worker: int, *, lengths: Sequence[int]) -> None:
        super().__init__(board, worker, lengths=lengths)
        self.series: list[tuple[float, int]] = []
        self.all_tokens = self.all_bytes = 0
        self.rest: Callable[[], None] | None = None
        self.rest_at = 0.0  # tokens

    def update(self, tokens: int) -> None:
        super().update(tokens)
        self.series.append((time.time(), tokens))
        self.all_tokens += tokens
        if self.rest is not None and self.all_tokens >= self.rest_at:
            self.rest, rest = None, self.rest
            rest()

    def wrote(self, count: int) -> None:
        super().wrote(count)
        self.all_bytes += count


class Bench:
    """A worker with its random target, and units for it."""

    def __init__(self, crew: Crew, task: Task) -> None:
        self.crew, self.task = crew, task
        self.number, self.world = crew.seat.number, crew.seat.world
        device = torch.device(crew.device)
        self.target = random_target(sizes_of(task), options(task, tokens=task.tokens), device)
        self.folder = task.folder / f"worker.{self.number}"
        self.barriers = 0
        self.work = units_of(task, self.folder, self.target)
        warm_up(self.work)
        self.meet()

    def meet(self) -> None:
        """Wait until all workers have come here."""
        self.barriers += 1
        key, shared = f"bench/{self.barriers}", self.crew.board.store
        shared.add(key, 1)
        while int(shared.add(key, 0)) < self.world:
            self.crew.board.stop_if_failed()
            dead = [n for n in range(self.world) if self.crew.board.end_of(n) is not None]
            if dead:
                raise RuntimeError(f"worker {dead[0]} died")
            time.sleep(0.05)

    def build(
        self,
        work: Work,
        encoding: str,
        root: Path,
        *,
        crowd: int,
        rest: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """The first `crowd` workers extract all units into a cache, which the first one seals.

        Each tells when it began, when it had committed the last of its own, and how far it was
        when; the first worker has it of all.  Behind two thirds of its share each does `rest`.
        """
        identity = whole_identity(work, encoding)
        board = Board(PrefixStore(f"bench/{root.name}", self.crew.board.store), world=self.world)
        member = Noted(board, self.number, lengths=work.lengths)
        member.rest, member.rest_at = rest, work.tokens / crowd * 2 / 3
        if self.number == 0:
            begin(root, work, identity)
        self.meet()
        began = ended = time.time()
        if self.number < crowd:
            self.extract(work, identity, root, member.fresh(work.units), member)
            ended = time.time()
            for unit in member.left(work.units):
                self.extract(work, identity, root, [unit], member)
        own = {"began": began, "ended": ended, "bytes": member.all_bytes, "series": member.series}
        board.store.set(f"own/{self.number}", json.dumps(own))
        self.meet()
        told = [json.loads(board.store.get(f"own/{number}")) for number in range(crowd)]
        if self.number == 0:
            seal(root, identity)
        self.meet()
        return {"workers": told, "tokens": work.tokens}

    def extract(
        self,
        work: Work,
        identity: Identity,
        root: Path,
        units: Iterator[UnitPlan] | list[UnitPlan],
        member: Member,
    ) -> None:
        config = BuildConfig(
            target="",
            data="",
            out=root,
            encoding=identity.encoding,
            batch_tokens=work.batch_tokens,
            no_proof=("probe",),  # of a worker's first units: not what a long build does
        )
        plan = Plan(
            identity=identity,
            units=work.units,
            samples=Samples(samples=work.samples, rows=len(work.samples), skipped={}),
            bytes_per_token=0,
            bytes=0,
            frozen_bytes=0,
            free_bytes=0,
        )
        budget = Budget(config.batch_tokens)
        codec = plain_codec(identity)
        extract(self.target, plan, units, config, codec, member, budget=budget)

    def finish(self) -> None:
        """All work is done."""
        self.meet()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.number == 0:
            self.crew.board.set_ready({})
            self.crew.board.finish()


def warm_up(work: Work) -> None:
    """A batch of every number of rows, for which kernels of linear attention are tuned, and a
    build of the smallest unit in every encoding.
    """
    shapes = {len(ids): ids for ids in work.batches}
    began = time.perf_counter()
    for ids in shapes.values():
        bench_extract.run_once(work, ids)
    say(f"{len(shapes)} kinds of batches in {time.perf_counter() - began:.1f} s at first")
    smallest = min(work.units, key=lambda unit: sum(work.lengths[m] for m in unit.members))
    for encoding in work.args.encodings.split(","):
        work.build(encoding, "warm", units=[smallest])


def extract_work(crew: Crew, task: Task) -> None:
    """The same units by one worker, the others idle, and by all of them."""
    bench = Bench(crew, task)
    for encoding in task.encodings:
        for crowd in sorted({1, bench.world}):
            root = task.folder / f"extracted.{encoding}.{crowd}"
            phase = bench.build(bench.work, encoding, root, crowd=crowd)
            if bench.number == 0:
                shutil.rmtree(root)
                found = {
                    "tokens_per_s": rate(phase),
                    "to_the_end": rate_to_the_end(phase),
                    "gb_per_s": gb_per_s(phase),
                }
                task.note(f"{encoding}.{crowd}", **found)
                say(f"extract {encoding} by {crowd}: {found['tokens_per_s']:,.0f} tokens/s "
                    f"({found['to_the_end']:,.0f} to the last commit), {found['gb_per_s']:.2f} "
                    "GB/s")  # fmt: skip
            bench.meet()
    bench.finish()


# --- beside a trainer -----------------------------------------------------------------------------


def build_beside(parent: int, task: Task, groups: Sequence[Group]) -> None:
    """A process of its own: builders, which a trainer on other devices waits for and follows."""
    launcher.settle(parent)
    try:
        perform(follow_work, task, groups)
    except Exception as error:
        task.note(BROKEN, why=f"the builder ended: {error}")
        raise


def follow_work(crew: Crew, task: Task) -> None:
    """Caches by one of several builders and by all of them, with the trainers idle; and one that
    trainers follow.  Each when the trainers say so.
    """
    bench = Bench(crew, task)
    builders = bench.world
    followed = max(1, task.followed_tokens // bench.work.tokens)
    for encoding in task.encodings:
        task.wait_for(f"{encoding}.go.alone")
        if builders > 1:
            root = build_followed(bench, encoding, "one", crowd=1)
            if bench.number == 0:
                shutil.rmtree(root)
        build_followed(bench, encoding, "alone", crowd=builders, times=builders)
        task.wait_for(f"{encoding}.go.beside")
        rest = partial(await_trainers, task)
        build_followed(bench, encoding, "beside", crowd=builders, times=followed, rest=rest)
    bench.finish()


def await_trainers(task: Task) -> None:
    """Where a cache is built in a moment, wait until a line of theirs counts."""
    end = time.monotonic() + task.scale.patience
    while len(train_lines(task.folder / BESIDE)) <= task.leave_out and time.monotonic() < end:
        time.sleep(0.02)


def build_followed(
    bench: Bench,
    encoding: str,
    name: str,
    *,
    crowd: int,
    times: int = 1,
    rest: Callable[[], None] | None = None,
) -> Path:
    """Build one of the caches, and note how that went."""
    root, task = bench.task.folder / f"{name}.{encoding}", bench.task
    work = repeated(bench.work, times)
    with _locked(root, bench.number == 0):
        phase = bench.build(work, encoding, root, crowd=crowd, rest=rest)
    if bench.number == 0:
        size = ledger.read_manifest(root).bytes
        task.note(f"{encoding}.built.{name}", bytes=size, **phase)
        say(f"built {encoding} {name}: {rate(phase):,.0f} tokens/s, {gb_per_s(phase):.2f} GB/s")
    return root


@contextmanager
def _locked(root: Path, holds: bool) -> Iterator[None]:
    """As a build holds its folder: followers see that somebody is at work."""
    with lock.held(root, doing="dflash cache build") if holds else nullcontext():
        yield


# --- a target on several devices ------------------------------------------------------------------


def tensor_work(crew: Crew, task: Task) -> None:
    """The states of a target that the processes of this worker share, and those of one alone.

    `noise` is what one alone differs by from itself when rows go through it one by one.
    """
    folder, layers = task.folder / "target", task.scale.tensor_layers

    def load(whole: bool, *, shared: bool = True) -> Target:
        found = survey_target(str(folder), dtype="bfloat16")
        return load_weights(found, device=crew.device, up_to=last, tensor_parallel=shared)

    ids = default_layer_ids(layers, task.scale.drafter.target_layers)
    last = max(ids)
    if crew.index > 0:
        lockstep.follow(load)
        return
    save_target(folder, task, torch.device(crew.device))
    every = units_of(task, task.folder).batches
    batches = [every[0], every[-1]]
    states = run_target("shared", lockstep.lead(load, False), batches, ids, task)
    alone = load(False, shared=False)
    wanted = run_target("alone", alone, batches, ids, task)
    lone = [torch.cat(planes) for planes in zip(
        *(on_host(alone.hidden_states(row[None], ids)) for row in batches[0]), strict=True
    )]  # fmt: skip
    task.note("apart", **apart([*states[0], *states[1]], [*wanted[0], *wanted[1]]))
    task.note("noise", **apart(lone, wanted[0]))
    crew.board.set_ready({})
    crew.board.finish()


def save_target(folder: Path, task: Task, device: torch.device) -> None:
    """A random target as a model folder, embedding and head tied."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM

    asked = options(task, tokens=0, layers=task.scale.tensor_layers)
    config = random_target(sizes_of(task), asked, device).model.config
    config.tie_word_embeddings = True
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = Qwen3_5ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.02)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<end>": 0, "word": 1}, unk_token="word"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)


def run_target(
    name: str, target: Target, batches: list[torch.Tensor], ids: list[int], task: Task
) -> list[list[torch.Tensor]]:
    """States of every batch, [R, S, H] for each of `ids`, on the host; notes the speed."""
    states = [on_host(target.hidden_states(batch, ids)) for batch in batches]
    seconds = []
    for _ in range(task.repeats):
        synchronize(target.device)
        began = time.perf_counter()
        for batch in batches:
            target.hidden_states(batch, ids)
        synchronize(target.device)
        seconds.append(time.perf_counter() - began)
    tokens_per_s = sum(batch.numel() for batch in batches) / statistics.median(seconds)
    task.note(name, tokens_per_s=tokens_per_s)
    say(f"target {name}: {tokens_per_s:,.0f} tokens/s through {max(ids) + 1} layers")
    return states


def on_host(states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [plane.float().cpu() for plane in states]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def apart(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> dict[str, float]:
    """Relative L2 difference of every token's state: the median, and the worst."""
    relative = torch.cat(
        [
            (torch.linalg.vector_norm(a - b, dim=-1) / torch.linalg.vector_norm(b, dim=-1)).ravel()
            for a, b in zip(found, wanted, strict=True)
        ]
    )
    return {"median": float(relative.median()), "worst": float(relative.max())}
