"""Checkpoints: written by any number of ranks behind the back of training, found whole or not."""

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from faults import every_failure
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import small
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed import HashStore, TCPStore

from dflash_cache import lock
from dflash_cache.disk import full_disk_is_told
from dflash_cache.errors import DiskFullError
from dflash_cache.files import file_entry
from dflash_fit import checkpoint, joint, parts, saver, staging
from dflash_fit.checkpoint import RunState
from dflash_fit.drafter import DFlashDraftModel, DrafterConfig
from dflash_fit.errors import FitError, RunFolderError
from dflash_fit.optim import AdamWConfig, FlatAdamW
from dflash_fit.saver import Saver
from dflash_fit.shards import shard
from dflash_fit.world import World

LENGTH = 700  # elements: cells of 64, so that shards differ in size
CPU = torch.device("cpu")
VECTORS, SCALARS = ("master", "moment1", "moment2"), ("updates", "skipped", "skipped_in_a_row")


class Threaded(World):
    """A rank that is a thread of this process."""

    def share(self, value):
        if self.first:
            self.store.set("shared", json.dumps(value))
        return json.loads(self.store.get("shared"))


def together(size: int, work: Callable[[World], object], *, store=None) -> list:
    """What the work returns, or raises, on each of so many ranks."""
    store = store or HashStore()

    def of(rank: int):
        try:
            return work(Threaded(rank=rank, size=size, device=CPU, store=store.clone()))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(of, range(size)))


def refuse_errors(found: list) -> None:
    for value in found:
        if isinstance(value, Exception):
            raise value


class Optimizer:
    """Vectors and scalars of a rank, made of a seed; it holds a shard of them, or all."""

    def __init__(self, seed: int, *, rank: int = 0, world: int = 1, sharded: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.length, self.restored = LENGTH, 0
        self.owned = shard(LENGTH, rank=rank, world=world) if sharded else slice(0, LENGTH)
        whole = {name: torch.randn(LENGTH, generator=generator) for name in VECTORS}
        self.vectors = {name: vector[self.owned].clone() for name, vector in whole.items()}
        self.numbers = {name: torch.tensor(float(seed + i)) for i, name in enumerate(SCALARS)}

    def flats(self):
        return self.vectors

    def scalars(self):
        return self.numbers

    def restore(self):
        self.restored += 1

    def state(self):
        return {**self.vectors, **self.numbers}


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch):
    monkeypatch.setattr(joint, "POLL", 0.002)
    monkeypatch.setattr(joint, "SETTLING", 0.2)


@pytest.fixture(scope="module")
def drafter() -> DFlashDraftModel:
    torch.manual_seed(0)
    return DFlashDraftModel(DrafterConfig(**small())).to(torch.bfloat16)


def at(step: int, **changes) -> RunState:
    return RunState(
        **{"step": step, "epoch": 1, "index": 2, "best_step": None, "best_acceptance": 0.0}
        | changes
    )


def save(
    run: Path,
    drafter,
    *steps: int,
    size: int = 1,
    sharded: bool = False,
    best: bool = False,
    store=None,
    **options,
) -> list:
    """Save these steps on so many ranks; the values of a step are made of its number."""

    def work(world: World) -> None:
        with Saver(run, world, **{"keep_last": 99, **options}) as saver:
            for step in steps:
                optimizer = Optimizer(step, rank=world.rank, world=size, sharded=sharded)
                saver.save(drafter, optimizer, at(step), {"step": step}, best=best)

    return together(size, work, store=store)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


# --- any ranks write, any ranks read ------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("writers", [1, 2, 3])
def test_a_checkpoint_comes_back_bit_for_bit_on_any_number_of_ranks(
    drafter, tmp_path, writers, sharded
):
    refuse_errors(save(tmp_path, drafter, 5, size=writers, sharded=sharded))
    path = checkpoint.step_folder(tmp_path, 5)
    assert len(list(path.glob("optimizer*"))) == writers
    assert equal(load_file(path / "model.safetensors"), drafter.state_dict())
    for readers in (1, 2, 3):
        for apart in (False, True):
            for rank in range(readers):
                found = Optimizer(99, rank=rank, world=readers, sharded=apart)
                wanted = Optimizer(5, rank=rank, world=readers, sharded=apart)
                assert checkpoint.restore(path, found) == at(5)
                assert equal(found.state(), wanted.state())
                assert found.restored == 1


def test_reading_in_many_pieces_is_reading_at_once(drafter, tmp_path, monkeypatch):
    save(tmp_path, drafter, 5, size=2)
    monkeypatch.setattr(parts, "ELEMENTS", 37)
    found = Optimizer(99, rank=1, world=3, sharded=True)
    checkpoint.restore(checkpoint.step_folder(tmp_path, 5), found)
    assert equal(found.state(), Optimizer(5, rank=1, world=3, sharded=True).state())


@pytest.mark.parametrize("block", [5, 1 << 24])
def test_tensors_are_written_as_the_library_writes_them(tmp_path, monkeypatch, block):
    monkeypatch.setattr(parts, "BLOCK", block)
    monkeypatch.setattr(parts, "FLUSH", 3 * block)
    tensors = {
        "b": torch.randn(3, 5).bfloat16(),
        "a": torch.randn(7),
        "scalar": torch.tensor(2.5),
        "nothing": torch.zeros(0),
    }
    entry = parts.write_tensors(
        tmp_path / "ours", tensors, metadata={"format": "pt"}, between=lambda: None
    )
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert entry == file_entry(tmp_path / "ours")


def test_ranks_find_each_other_through_a_store_of_the_network(drafter, tmp_path):
    store = TCPStore("localhost", 0, is_master=True)
    refuse_errors(save(tmp_path, drafter, 4, 5, size=3, store=store))
    found = Optimizer(99)
    checkpoint.restore(checkpoint.step_folder(tmp_path, 5), found)
    assert equal(found.state(), Optimizer(5).state())


def test_the_weights_of_a_drafter_follow_from_its_masters(drafter, tmp_path):
    def trained(seed: int) -> tuple[DFlashDraftModel, FlatAdamW]:
        torch.manual_seed(seed)
        model = DFlashDraftModel(drafter.config)
        options = AdamWConfig(beta1=0.9, beta2=0.95, weight_decay=0.1, clip=1.0)
        return model, FlatAdamW(model, options, dtype=torch.bfloat16)

    (model, optimizer), (other, into) = trained(1), trained(2)
    optimizer.moment1.normal_()
    optimizer.updates.fill_(3)
    with Saver(tmp_path, World.alone(CPU), keep_last=1) as saver:
        saver.save(model, optimizer, at(3), {}, best=False)
    checkpoint.restore(checkpoint.step_folder(tmp_path, 3), into)
    assert equal(model.state_dict(), other.state_dict())
    assert equal(optimizer.flats() | optimizer.scalars(), into.flats() | into.scalars())


def test_parts_of_another_drafter_or_not_all_of_them_are_refused(drafter, tmp_path):
    save(tmp_path, drafter, 5, size=3)
    path = checkpoint.step_folder(tmp_path, 5)
    other = Optimizer(1)
    other.length = LENGTH + 64
    with pytest.raises(RunFolderError, match=r"want all 764 .* delete that folder"):
        checkpoint.restore(path, other)
    files = sorted(path.glob("optimizer*"))
    for some in (files[:2], files[1:], [files[0], files[2]]):
        with pytest.raises(ValueError, match="hold the elements"):
            parts.read_parts(some, Optimizer(1))


def write_as_before(run: Path, drafter, step: int) -> Path:
    """A checkpoint of the version before: whole vectors, and no entries of files."""
    path = checkpoint.step_folder(run, step)
    save(run, drafter, step)
    state = {k: v for k, v in Optimizer(step).state().items() if k != "skipped_in_a_row"}
    save_file(state, path / "optimizer.safetensors")
    said = {name: value for name, value in asdict(at(step)).items() if name != "turn"}
    (path / "state.json").write_text(json.dumps(said, indent=2))
    return path


def test_a_checkpoint_of_the_version_before_is_read(drafter, tmp_path):
    path = write_as_before(tmp_path, drafter, 5)
    assert checkpoint.newest_sound(tmp_path).path == path
    found = Optimizer(99, rank=1, world=2, sharded=True)
    assert checkpoint.restore(path, found) == at(5)
    wanted = Optimizer(5, rank=1, world=2, sharded=True).state()
    assert equal(found.state(), wanted | {"skipped_in_a_row": torch.tensor(0.0)})


@pytest.mark.parametrize("name", ["state.json", "optimizer.safetensors", "model.safetensors"])
def test_a_cut_checkpoint_of_the_version_before_is_not_taken(drafter, tmp_path, name):
    save(tmp_path, drafter, 3)
    path = write_as_before(tmp_path, drafter, 5)
    (path / name).write_bytes((path / name).read_bytes()[:-9])
    choice = checkpoint.newest_sound(tmp_path)
    assert choice.path == checkpoint.step_folder(tmp_path, 3)
    assert name in choice.flawed[path]


# --- which one a run goes on from ---------------------------------------------------------------


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    payload = bytearray(path.read_bytes())
    payload[len(payload) // 2] ^= 1
    path.write_bytes(payload)


def flip_last(path: Path) -> None:
    payload = bytearray(path.read_bytes())
    payload[-1] ^= 1
    path.write_bytes(payload)


@pytest.mark.parametrize("harm", [shorten, flip, flip_last, Path.unlink])
@pytest.mark.parametrize("size", [1, 2])
def test_a_damaged_checkpoint_is_skipped_by_name_and_the_one_before_is_taken(
    drafter, tmp_path, harm, size
):
    save(tmp_path / "run", drafter, 3, 5, size=size)
    files = {p.name for p in checkpoint.step_folder(tmp_path / "run", 5).iterdir()}
    assert len(files) == 4 + size
    for name in files:
        run = Path(shutil.copytree(tmp_path / "run", tmp_path / name))
        damaged = checkpoint.step_folder(run, 5)
        harm(damaged / name)
        choice = checkpoint.newest_sound(run)
        assert choice.path == checkpoint.step_folder(run, 3)
        assert list(choice.flawed) == [damaged]
        assert name in choice.flawed[damaged]
        told = checkpoint.put_away(choice)
        assert len(told) == 1
        assert all(words in told[0] for words in (str(damaged), name, "from step_00000003"))
        assert names(run) == ["damaged_step_00000005", "step_00000003"]
        assert checkpoint.newest_sound(run) == checkpoint.Choice(path=choice.path, flawed={})
        assert checkpoint.find_drafter(run, checkpoint="last") == choice.path


def test_a_later_save_takes_the_place_of_a_damaged_one(drafter, tmp_path):
    save(tmp_path, drafter, 3, 5)
    path = checkpoint.step_folder(tmp_path, 5)
    for number, wanted in enumerate(["damaged_step_00000005", "damaged_step_00000005.2"], 1):
        shorten(path / "model.safetensors")
        checkpoint.put_away(checkpoint.newest_sound(tmp_path))
        refuse_errors(save(tmp_path, drafter, 5))
        assert checkpoint.newest_sound(tmp_path).path == path
        assert wanted in names(tmp_path)
        assert len(names(tmp_path)) == 2 + number
    # One that nobody has put away is replaced.
    shorten(path / "model.safetensors")
    refuse_errors(save(tmp_path, drafter, 5))
    assert checkpoint.newest_sound(tmp_path).path == path


def test_a_run_without_any_sound_checkpoint_says_so_and_touches_nothing(drafter, tmp_path):
    assert checkpoint.newest_sound(tmp_path).path is None
    save(tmp_path, drafter, 3, 5)
    for step in (3, 5):
        flip(checkpoint.step_folder(tmp_path, step) / "model.safetensors")
    with pytest.raises(RunFolderError, match=r"none .* whole \(step_00000005: model.safetensors"):
        checkpoint.newest_sound(tmp_path)
    assert names(tmp_path) == ["step_00000003", "step_00000005"]


def test_eval_and_export_take_only_whole_ones(drafter, tmp_path):
    save(tmp_path, drafter, 3, 5)
    first, last = (checkpoint.step_folder(tmp_path, step) for step in (3, 5))
    checkpoint.mark_best(tmp_path, last)
    shorten(last / "model.safetensors")
    assert checkpoint.find_drafter(tmp_path, checkpoint="step_3") == first
    for path, named in (
        *((tmp_path, name) for name in ("best", "last", "step_5")),
        (last, "best"),
    ):
        with pytest.raises(RunFolderError, match=r"not whole \(model.safetensors has"):
            checkpoint.find_drafter(path, checkpoint=named)
    shorten(first / "config.json")
    with pytest.raises(RunFolderError, match="none of its 2 checkpoints is whole"):
        checkpoint.find_drafter(tmp_path, checkpoint="last")


# --- in the background --------------------------------------------------------------------------


def test_training_goes_on_while_a_checkpoint_is_written(drafter, tmp_path, monkeypatch):
    """What is saved are the values at the call, although the live ones change meanwhile."""
    go_on = threading.Event()
    real = parts.write_tensors
    monkeypatch.setattr(joint, "write_tensors", lambda *a, **k: (go_on.wait(30), real(*a, **k))[1])
    optimizer, weights = Optimizer(1), {n: t.clone() for n, t in drafter.state_dict().items()}
    copy = DFlashDraftModel(drafter.config).to(torch.bfloat16)
    copy.load_state_dict(weights)
    training = {"notes": [1]}
    with Saver(tmp_path, World.alone(CPU), keep_last=2) as saver:
        saver.save(copy, optimizer, at(1), training, best=True)
        assert not checkpoint.step_folder(tmp_path, 1).exists()  # it has returned before
        for tensor in [*optimizer.state().values(), *copy.state_dict().values()]:
            tensor.fill_(7)
        training["notes"].append(2)
        go_on.set()
        saver.wait()
        path = checkpoint.step_folder(tmp_path, 1)
        assert (tmp_path / "best").resolve() == path.resolve()
    found = Optimizer(99)
    checkpoint.restore(path, found)
    assert equal(found.state(), Optimizer(1).state())
    assert equal(load_file(path / "model.safetensors"), weights)
    assert json.loads((path / "training.json").read_text()) == {"notes": [1]}


def test_host_memory_is_taken_once(drafter, tmp_path):
    with Saver(tmp_path, World.alone(CPU), keep_last=9) as saver:
        addresses = set()
        for step in (1, 2, 3):
            saver.save(drafter, Optimizer(step), at(step), {}, best=False)
            copies = saver.part.tensors | saver.weights.tensors
            addresses.add(tuple(tensor.data_ptr() for tensor in copies.values()))
    assert len(addresses) == 1
    for step in (1, 2, 3):
        with safe_open(checkpoint.step_folder(tmp_path, step) / "optimizer.safetensors", "pt") as f:
            assert torch.equal(f.get_tensor("master"), Optimizer(step).vectors["master"])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("piece", [1, 30, 1 << 20])
def test_what_is_copied_in_pieces_is_all_there_and_nothing_else(monkeypatch, piece, threads):
    monkeypatch.setattr(staging, "PIECE", piece)
    monkeypatch.setattr(staging, "THREADS", threads)
    copy = staging.Staging(CPU).copy
    for seed in range(2):  # the second time its buffers are those of the first
        live = [
            torch.randn(90, generator=torch.Generator().manual_seed(seed))[7:50],
            torch.randn(5, 9).bfloat16(),
            torch.nn.Parameter(torch.randn(4, 3)),
            torch.tensor(2.5),
            torch.zeros(0),
        ]
        around = [torch.full((tensor.numel() + 2,), 7.0, dtype=tensor.dtype) for tensor in live]
        kept = [flat[1:-1].view(t.shape) for flat, t in zip(around, live, strict=True)]
        copy(zip(live, kept, strict=True))
        assert all(map(torch.equal, kept, live))
        assert all(flat[0] == flat[-1] == 7 for flat in around)


def test_a_piece_that_cannot_be_copied_is_an_error(monkeypatch):
    monkeypatch.setattr(staging, "PIECE", 8)
    with pytest.raises(RuntimeError):
        staging.Staging(CPU).copy([(torch.randn(9).to("meta"), torch.zeros(9))])


def test_a_checkpoint_that_was_copied_in_pieces_is_the_same_to_the_byte(
    drafter, tmp_path, monkeypatch
):
    save(tmp_path / "plain", drafter, 3, 5, size=2)
    monkeypatch.setattr(staging, "PIECE", 100)
    monkeypatch.setattr(saver, "copy_plainly", staging.Staging(CPU).copy)
    refuse_errors(save(tmp_path / "pieces", drafter, 3, 5, size=2))
    contents = [
        {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*.*")}
        for run in (tmp_path / "plain", tmp_path / "pieces")
    ]
    assert len(contents[0]) == 2 * 6
    assert contents[0] == contents[1]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dead", [False, True])
def test_a_save_that_fails_at_any_step_leaves_the_checkpoint_before(drafter, tmp_path, dead, size):
    def save_best(folder: Path, step: int) -> list:
        return save(folder, drafter, step, size=size, best=True, keep_last=1)

    def before(folder: Path) -> None:
        refuse_errors(save_best(folder, 3))

    def act(folder: Path) -> None:
        found = save_best(folder, 5)
        assert len({type(value) for value in found}) == 1, found  # all ranks hear the same
        refuse_errors(found)

    seen = set()
    for folder in every_failure(act, tmp_path, dead=dead, before=before):
        choice = checkpoint.newest_sound(folder)
        assert not choice.flawed
        # The new one may be there already, and only clearing up have failed.
        seen.add(checkpoint.step_of(choice.path))
        assert checkpoint.find_drafter(folder) in checkpoint.checkpoints(folder)
        refuse_errors(save_best(folder, 5))
        assert names(folder) == ["step_00000005"]
        assert checkpoint.newest_sound(folder).path == checkpoint.step_folder(folder, 5)
        assert (folder / "best").resolve().name == "step_00000005"
    assert seen == {3, 5}


@pytest.mark.parametrize("broken", [0, 1, 2])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left"),
        (ValueError("odd"), "odd"),
    ],
)
def test_a_rank_that_cannot_write_comes_out_on_all_ranks(
    drafter, tmp_path, monkeypatch, broken, error, told
):
    real = parts.write_tensors
    name = parts.part_name(broken, 3)

    def write(path, *rest, **more):
        if path.name == name and "step_00000005" in str(path):
            raise error
        return real(path, *rest, **more)

    monkeypatch.setattr(joint, "write_tensors", write)
    found = save(tmp_path, drafter, 3, 5, 7, size=3)
    assert found[broken] is error
    for rank in {0, 1, 2} - {broken}:
        assert told in str(found[rank])
        assert f"rank {broken} on" in str(found[rank])
        assert isinstance(found[rank], OSError if isinstance(error, OSError) else FitError)
        assert getattr(found[rank], "errno", None) == getattr(error, "errno", None)
    assert names(tmp_path) == ["step_00000003"]


def test_a_full_disk_is_told_as_one(drafter, tmp_path, monkeypatch):
    def write(*rest, **more):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(joint, "write_tensors", write)

    def work(world: World) -> None:
        with full_disk_is_told(tmp_path, "Kept."), Saver(tmp_path, world, keep_last=1) as saver:
            saver.save(drafter, Optimizer(1), at(1), {}, best=False)
            saver.wait()

    assert [type(value) for value in together(2, work)] == [DiskFullError] * 2


@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_that_ends_badly_makes_the_others_give_up(drafter, tmp_path, broken):
    """It has not even begun to save: the others must not wait for it."""

    def work(world: World) -> None:
        with Saver(tmp_path, world, keep_last=1) as saver:
            if world.rank == broken:
                raise FitError("no more pears")
            saver.save(drafter, Optimizer(1), at(1), {}, best=False)

    found = together(3, work)
    for rank in {0, 1, 2} - {broken}:
        assert f"rank {broken} on" in str(found[rank])
        assert "no more pears" in str(found[rank])
    assert not (tmp_path / "checkpoints").exists() or names(tmp_path) == []


def test_an_exception_gives_up_what_is_being_written(drafter, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "BLOCK", 64)
    begun = threading.Event()
    real = parts.write_tensors

    def slow(*rest, between, **more):
        begun.set()
        return real(*rest, between=lambda: (time.sleep(0.02), between()), **more)

    monkeypatch.setattr(joint, "write_tensors", slow)

    def interrupted() -> None:
        with Saver(tmp_path, World.alone(CPU), keep_last=2) as saver:
            saver.save(drafter, Optimizer(1), at(1), {}, best=False)
            assert begun.wait(30)
            raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - began < 2  # whole, it takes longer than that
    assert names(tmp_path) == []


def test_ranks_that_do_not_share_the_run_folder_say_so(drafter, tmp_path, monkeypatch):
    monkeypatch.setattr(joint, "SIGHT", 0.05)

    def work(world: World) -> None:
        run = tmp_path / f"node{world.rank}"
        (run / "checkpoints").mkdir(parents=True)
        with Saver(run, world, keep_last=1) as saver:
            saver.save(drafter, Optimizer(1), at(1), {}, best=False)

    found = together(2, work)
    assert isinstance(found[1], RunFolderError)
    assert all("must share the run folder" in str(error) for error in found)


def test_a_rank_that_never_saves_is_named(drafter, tmp_path, monkeypatch):
    monkeypatch.setattr(joint, "SLOWEST", 0.05)

    def work(world: World) -> None:
        saver = Saver(tmp_path, world, keep_last=1)
        if world.rank != 1:
            saver.save(drafter, Optimizer(1), at(1), {}, best=False)
            saver.wait()

    found = together(3, work)
    assert "nothing heard of rank 1 for" in str(found[0])
    assert isinstance(found[2], FitError)


def test_what_a_killed_save_left_behind_goes_at_the_next_start(drafter, tmp_path):
    save(tmp_path, drafter, 3)
    shutil.copytree(
        checkpoint.step_folder(tmp_path, 3), tmp_path / "checkpoints" / ".step_00000005.ab.partial"
    )
    (tmp_path / ".best.12345678.partial").symlink_to("checkpoints/step_00000003")
    save(tmp_path, drafter, 4)
    assert names(tmp_path) == ["step_00000003", "step_00000004"]
    assert not list(tmp_path.glob(".best*"))


# --- what is kept -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_checkpoint(drafter, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("retention")
    save(run, drafter, 0)
    return checkpoint.step_folder(run, 0)


@settings(max_examples=25)
@given(
    saves=st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=12),
    keep_last=st.integers(1, 4),
    keep_every=st.none() | st.integers(1, 6),
)
def test_the_last_the_best_and_those_of_every_so_many_steps_are_kept(
    tiny_checkpoint, tmp_path_factory, saves, keep_last, keep_every
):
    run = tmp_path_factory.mktemp("run")
    kept: set[int] = set()
    step, best = 0, None
    for further, is_best in saves:
        step += further
        path = checkpoint.step_folder(run, step)
        shutil.copytree(tiny_checkpoint, path)
        if is_best:
            checkpoint.mark_best(run, path)
            best = step
        checkpoint.clear_old(run, keep_last=keep_last, keep_every=keep_every)
        kept = {
            s
            for s in kept | {step}
            if s == best
            or (keep_every and s % keep_every == 0)
            or sum(later > s for later in kept | {step}) < keep_last
        }
        assert names(run) == [f"step_{s:08d}" for s in sorted(kept)]


def test_a_damaged_checkpoint_does_not_count_among_the_last(drafter, tmp_path):
    save(tmp_path, drafter, 1, 2, 3)
    shorten(checkpoint.step_folder(tmp_path, 2) / "model.safetensors")
    save(tmp_path, drafter, 4, keep_last=3)
    assert len(checkpoint.checkpoints(tmp_path)) == 3
    assert checkpoint.step_folder(tmp_path, 1).is_dir()


# --- the run folder -----------------------------------------------------------------------------


def test_a_start_that_was_killed_before_its_options_were_on_disk_is_begun_again(tmp_path):
    out = tmp_path / "run"
    with lock.held(out, doing="dflash fit"):
        assert checkpoint.as_begun(SimpleNamespace(out=out)).out == out
        (out / ".config.json.0123abcd.partial").write_text("{")
        assert checkpoint.as_begun(SimpleNamespace(out=out)).out == out
        checkpoint.clear_leftovers(out)
        assert [path.name for path in out.iterdir()] == [lock.LOCK]
        (out / "letters.txt").write_text("dear")
        with pytest.raises(RunFolderError, match="not empty and not a run folder"):
            checkpoint.as_begun(SimpleNamespace(out=out))


def test_the_names_of_the_folders_above_a_first_checkpoint_are_on_disk(
    drafter, tmp_path, monkeypatch
):
    flushed: list[str] = []
    real = os.fsync

    def fsync(file: int) -> None:
        flushed.append(os.path.realpath(f"/proc/self/fd/{file}"))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    run = tmp_path / "run"
    run.mkdir()
    save(run, drafter, 1)
    assert str(run) in flushed


def test_a_best_checkpoint_that_is_gone_is_an_error_and_no_other_one(drafter, tmp_path):
    save(tmp_path, drafter, 1, 2)
    checkpoint.mark_best(tmp_path, checkpoint.step_folder(tmp_path, 1))
    shutil.rmtree(checkpoint.step_folder(tmp_path, 1))
    with pytest.raises(RunFolderError, match="best: points to checkpoints/step_00000001, which is"):
        checkpoint.find_drafter(tmp_path)
    assert checkpoint.find_drafter(tmp_path, checkpoint="last").name == "step_00000002"


def test_the_reason_of_a_rank_that_gives_up_amid_its_part_is_what_others_hear(
    drafter, tmp_path, monkeypatch
):
    begun, stopped = threading.Event(), threading.Event()
    real = parts.write_tensors

    def write(path, *rest, between, **more):
        if "00002-of" in path.name:
            begun.set()
            assert stopped.wait(30)
            between()
        return real(path, *rest, between=between, **more)

    # Rank 0 looks once rank 1 has said all that it says.
    looks = joint.JointFolders._parts_of_others

    def late(folders, path):
        while folders._said("part/1") is None:
            time.sleep(0.002)
        return looks(folders, path)

    monkeypatch.setattr(joint, "write_tensors", write)
    monkeypatch.setattr(joint.JointFolders, "_parts_of_others", late)

    def work(world: World) -> None:
        with Saver(tmp_path, world, keep_last=2) as saver:
            give_up = saver.folders.give_up

            def then(error: BaseException) -> None:
                give_up(error)
                stopped.set()

            saver.folders.give_up = then
            saver.save(drafter, Optimizer(1), at(1), {}, best=False)
            if world.rank == 1:
                assert begun.wait(30)
                raise FitError("no more pears")

    told = str(together(2, work)[0])
    assert "rank 1 on" in told
    assert "no more pears" in told


def test_a_run_folder_that_cannot_name_its_best_checkpoint_is_one_clear_error(
    drafter, tmp_path, monkeypatch
):
    save(tmp_path, drafter, 1)
    path = checkpoint.step_folder(tmp_path, 1)
    shutil.copytree(path, tmp_path / "best")
    with pytest.raises(RunFolderError, match="best: a folder where a link should be"):
        checkpoint.mark_best(tmp_path, path)
    shutil.rmtree(tmp_path / "best")

    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    with pytest.raises(RunFolderError, match="this file system has no symbolic links"):
        checkpoint.mark_best(tmp_path, path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoints"]
