"""Packs as batches: what a slot holds, and a position that is a value."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import tiny_build

from dflash_cache.build import build_cache
from dflash_cache.config import ENCODING_NAMES
from dflash_cache.pinned import host_tensor
from dflash_cache.reader import CacheReader
from dflash_fit.anchors import candidates, draw
from dflash_fit.batch import Batch, BatchShape
from dflash_fit.course import Lanes, Position
from dflash_fit.loader import PackSource, fill_documents
from dflash_fit.packing import Pack, plan_epoch

ANCHORS = 12


def tiny_source(cache, *, layers=2, token_budget=256, **options) -> PackSource:
    """The samples of a tiny cache, some three to a pack."""
    reader = CacheReader(cache)
    layer_ids = reader.identity.target_layer_ids[:layers]
    shape = BatchShape(
        target_layers=layers,
        token_budget=token_budget,
        hidden_size=reader.identity.hidden_size,
        anchors=ANCHORS,
        block_size=4,
        encoding=reader.identity.encoding,
    )
    documents = range(len(reader.lengths))
    return PackSource(reader, documents, layer_ids=layer_ids, shape=shape, seed=3, **options)


def plan_of(source: PackSource, epoch: int) -> list[Pack]:
    """The oracle of what a source trains on."""
    return plan_epoch(
        source.documents,
        source.reader.lengths,
        token_budget=source.shape.token_budget,
        seed=source.seed,
        epoch=epoch,
    )


def host_batch(shape: BatchShape) -> Batch:
    return Batch.empty(shape, device=torch.device("cpu"))


def content(batch: Batch) -> list[np.ndarray]:
    """A copy of everything in a batch, byte by byte: float8 has no equality."""
    return [t.cpu().contiguous().view(torch.uint8).clone().numpy() for t in batch.tensors()]


def same(mine: list[np.ndarray], theirs: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))


class HostCalls:
    """Stands for CUDA; memory has to be there for as long as it is registered."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address, size, flags):
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address):
        assert ctypes.string_at(address, 1) == b"\0"  # a segmentation fault if it is gone
        del self.registered[address]


def test_pinned_memory_is_registered_until_its_last_view_is_gone(monkeypatch):
    calls = HostCalls()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    tensor = host_tensor((5, 3000), torch.float32, pinned=True)
    assert list(calls.registered) == [tensor.data_ptr()]
    assert calls.registered[tensor.data_ptr()] >= 4 * 5 * 3000
    view = tensor[2:]
    del tensor
    assert calls.registered
    del view
    assert not calls.registered


def positions_from(source: PackSource, position: Position, steps: int) -> list[Position]:
    found = []
    for _ in range(steps):
        found.append(position)
        position = source.after(position)
    return found


@pytest.mark.parametrize("encoding", ENCODING_NAMES)
def test_a_used_batch_is_filled_as_document_by_document(
    tiny_cache, tiny_target, tiny_data, tmp_path, encoding
):
    cache = tiny_cache
    if encoding != CacheReader(tiny_cache).identity.encoding:
        cache = tmp_path / "cache"
        build_cache(tiny_build(tiny_target, tiny_data, cache, encoding=encoding))
    source = tiny_source(cache)
    batch = host_batch(source.shape)
    for pack in plan_of(source, 0):
        for tensor in batch.tensors():
            tensor.view(torch.uint8).fill_(1 if tensor.dtype == torch.bool else 0xFF)
        fill_documents(batch, source.reader, pack, layer_ids=source.layer_ids)
        wanted = document_by_document(source, pack)
        anchors = ("anchor_positions", "anchor_valid")  # are drawn later
        found = replace(batch, **{name: getattr(wanted, name) for name in anchors})
        assert same(content(found), content(wanted))


def document_by_document(source: PackSource, pack) -> Batch:
    """The naive loop: an empty batch, every document into its slots."""
    reader, batch = source.reader, host_batch(source.shape)
    for number, (document, start) in enumerate(zip(pack.documents, pack.starts, strict=True)):
        ids, mask = reader.tokens(document)
        rows = slice(start, start + len(ids))
        batch.input_ids[rows] = torch.from_numpy(ids)
        batch.loss_mask[rows] = torch.from_numpy(mask)
        batch.position_ids[rows] = torch.arange(len(ids))
        batch.document_ids[rows] = number
        batch.document_starts[rows] = start
        reader.read_documents([document], [start], source.layer_ids, batch.parts)
    channels = reader.channels(source.layer_ids)
    if channels is not None:
        batch.channels.copy_(channels)
    return batch


def test_a_pack_of_one_document_as_long_as_the_batch_has_no_padding(tiny_cache):
    longest = max(CacheReader(tiny_cache).lengths)
    source = tiny_source(tiny_cache, token_budget=longest)
    packs = enumerate(plan_of(source, 0))
    index = next(i for i, p in packs if source.reader.lengths[p.documents[0]] == longest)
    batch = source.fill(host_batch(source.shape), Position(epoch=0, index=index))
    assert batch.position_ids.tolist() == list(range(longest))
    assert set(batch.document_ids.tolist()) == {0}


def test_a_position_steps_through_turns_then_packs_then_epochs(tiny_cache):
    source = tiny_source(tiny_cache, passes=3)
    packs = len(plan_of(source, 0))
    found = positions_from(source, Position(epoch=0, index=0), 3 * packs + 1)
    wanted = [(0, index, turn) for index in range(packs) for turn in range(3)] + [(1, 0, 0)]
    assert [(p.epoch, p.index, p.turn) for p in found] == wanted


def lanes_of(packs: int) -> Lanes:
    return Lanes(packs=packs, rank=0, world=1)


@pytest.mark.parametrize("packs", [1, 2, 5])
@pytest.mark.parametrize("passes", [1, 3])
def test_updates_count_every_pass_over_every_whole_round(tiny_cache, packs, passes):
    source = tiny_source(tiny_cache, passes=passes, lanes=lanes_of(packs))
    for epochs in range(4):
        every = [pack for epoch in range(epochs) for pack in plan_of(source, epoch)]
        rounds = [every[i : i + packs] for i in range(0, len(every), packs)]
        wanted = passes * sum(len(each) == packs for each in rounds)
        assert source.steps(epochs) == wanted
        assert source.steps(epochs, most=wanted + 1) == wanted
        assert source.steps(epochs, most=7) == min(7, wanted)


def test_no_more_epochs_are_planned_than_the_updates_take(tiny_cache, monkeypatch):
    planned = []

    def counted(*args, epoch, **options):
        planned.append(epoch)
        return plan_epoch(*args, epoch=epoch, **options)

    monkeypatch.setattr("dflash_fit.course.plan_epoch", counted)
    source = tiny_source(tiny_cache)
    packs = len(plan_of(source, 0))
    assert source.steps(1000, most=packs + 1) == packs + 1
    assert planned == [0, 1]
    assert source.steps(1000, most=packs) == packs
    # The first pack of an epoch is there whatever its length.
    assert source.after(Position(epoch=1, index=len(plan_of(source, 1)) - 1)).epoch == 2
    assert planned == [0, 1]


def test_the_anchors_of_a_turn_depend_on_seed_epoch_pack_and_turn(tiny_cache):
    source = tiny_source(tiny_cache, passes=2)
    position = Position(epoch=1, index=2, turn=1)
    batch = source.fill(host_batch(source.shape), position)
    positions = candidates(batch.loss_mask.numpy(), batch.document_ids.numpy())
    anchors, _ = draw(positions, count=ANCHORS, rng=np.random.default_rng([3, 1, 2, 1]))
    assert batch.anchor_positions.tolist() == anchors.tolist()
    source.draw(batch, replace(position, turn=0))
    assert batch.anchor_positions.tolist() != anchors.tolist()
    source.draw(batch, position)
    assert batch.anchor_positions.tolist() == anchors.tolist()


def test_another_turn_changes_nothing_but_the_anchors(tiny_cache):
    source = tiny_source(tiny_cache, passes=2)
    first, second = (
        source.fill(host_batch(source.shape), Position(epoch=0, index=0, turn=turn))
        for turn in range(2)
    )
    assert not torch.equal(first.anchor_positions, second.anchor_positions)
    assert same(content(replace(second, anchor_positions=first.anchor_positions)), content(first))


def test_fewer_anchors_than_slots_are_drawn_if_asked_for(tiny_cache):
    batch = host_batch(tiny_source(tiny_cache).shape)
    tiny_source(tiny_cache, anchors=5).fill(batch, Position(epoch=0, index=0))
    assert batch.anchor_valid.tolist() == [True] * 5 + [False] * (ANCHORS - 5)
    assert not batch.anchor_positions[5:].any()


def test_the_stored_bytes_of_an_epoch_are_its_share_of_the_cache(tiny_cache):
    source = tiny_source(tiny_cache)
    manifest, planes = source.reader.manifest, source.reader.identity.planes
    found = sum(
        source.stored_bytes(Position(epoch=0, index=index))
        for index in range(len(plan_of(source, 0)))
    )
    assert found == pytest.approx(manifest.bytes * 2 / len(planes), rel=1e-3)


def test_the_packs_of_a_round_lie_behind_each_other_across_epochs(tiny_cache):
    source = tiny_source(tiny_cache, lanes=lanes_of(4))
    every = [(e, i) for e in range(3) for i in range(len(plan_of(source, e)))]
    last = len(plan_of(source, 0)) - 2
    position = Position(epoch=0, index=last)
    for lane in range(4):
        epoch, index = every[last + lane]
        assert source.pack_of(position, lane) == plan_of(source, epoch)[index]
        batch = source.fill(host_batch(source.shape), position, lane)
        alone = tiny_source(tiny_cache).fill(
            host_batch(source.shape), Position(epoch=epoch, index=index)
        )
        assert same(content(batch), content(alone))
    epoch, index = every[last + 4]
    assert source.after(position) == Position(epoch=epoch, index=index)


def test_an_idle_batch_is_padding_with_no_anchors_whatever_was_there(tiny_cache):
    source = tiny_source(tiny_cache)
    used = source.fill(host_batch(source.shape), Position(epoch=0, index=0))
    used.hidden.fill_(float("nan"))
    for batch in (used, host_batch(source.shape)):
        found = source.fill(batch, Position(epoch=0, index=1), None)
        assert same(content(found), content(host_batch(source.shape)))
        assert found.states().isfinite().all()
        assert not len(candidates(found.loss_mask.numpy(), found.document_ids.numpy()))
    assert source.stored_bytes(Position(epoch=0, index=0), None) == 0
