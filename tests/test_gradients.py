"""Gradients over packs and ranks against a plain loop; sharing the state changes no bit."""

import datetime
import functools
import itertools
from pathlib import Path

import pytest
import torch
from test_optim import make_config, make_module
from torch import multiprocessing
from torch.distributed import TCPStore

from dflash_fit.gradients import (
    Gradients,
    OrderedGradients,
    ReducedGradients,
    ScatteredGradients,
)
from dflash_fit.optim import FlatAdamW
from dflash_fit.world import meet

STEPS = 3
PACKS = (1, 2, 3, 5)
KINDS = ("ordered", "ordered and sharded", "reduced", "scattered")
BIG = 1e4  # numbers of very different size: their sum depends on the order


def gradient(shape, *, step, lane, number, dtype):
    generator = torch.Generator().manual_seed(1000 * step + 100 * lane + number)
    scale = torch.randint(0, 2, shape, generator=generator) * BIG + 1
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def losses(step, lane):
    return torch.tensor(1.1 * step + 0.3 * lane + 1), torch.tensor(float(3 + lane))


def put(module, *, step, lane, dtype):
    """The gradient of a pack; without a lane, that of a pack without anchors."""
    for number, parameter in enumerate(module.parameters()):
        parameter.grad = torch.zeros_like(parameter)
        if lane is not None:
            parameter.grad = gradient(
                parameter.shape, step=step, lane=lane, number=number, dtype=dtype
            )


def train(module, optimizer, gradients, *, packs, rank, world, dtype):
    """Some updates as a trainer makes them; matrices are finished before vectors."""
    optimizer.lr.fill_(1e-2)
    norms = []
    for step in range(STEPS):
        for turn in range(gradients.turns):
            lane = turn * world + rank
            lane = lane if lane < packs else None
            optimizer.begin()
            put(module, step=step, lane=lane, dtype=dtype)
            for early in (True, False):
                gradients.take([p for p in module.parameters() if (p.dim() > 1) == early], turn)
            none = (torch.zeros(()), torch.zeros(()))
            gradients.take_loss(*(none if lane is None else losses(step, lane)), turn)
        loss, norm = optimizer.update(*gradients.arrive())
        norms.append((float(loss), float(norm)))
    return norms


def outcome(kind, world, *, packs, dtype):
    """Weights, masters by their range, and the losses and norms of a rank."""
    module = make_wide()
    sharing = world if kind in ("ordered and sharded", "scattered") else None
    optimizer = FlatAdamW(module, make_config(), dtype=dtype, sharing=sharing)
    turns = -(-packs // world.size)
    gradients = {
        "ordered": lambda p: OrderedGradients(p, world, packs=packs),
        "ordered and sharded": lambda p: OrderedGradients(p, world, packs=packs, sharded=True),
        "reduced": lambda p: ReducedGradients(p, turns=turns, wire=torch.float32),
        "scattered": lambda p: ScatteredGradients(p, world, turns=turns, wire=torch.float32),
    }[kind](optimizer.parameters)
    norms = train(
        module, optimizer, gradients, packs=packs, rank=world.rank, world=world.size, dtype=dtype
    )
    before = optimizer.weights.clone()
    optimizer.restore()
    assert torch.equal(before, optimizer.weights)
    return {
        "weights": before,
        "master": optimizer.master,
        "owned": (optimizer.owned.start, optimizer.owned.stop),
        "norms": norms,
    }


def make_wide():
    """Large enough for several cells, so that shards are of real size."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 30, bias=False), make_module(), torch.nn.Linear(30, 7, bias=False)
    )


def rank_work(rank, size, port, folder):
    torch.set_num_threads(1)
    store = TCPStore("localhost", port, timeout=datetime.timedelta(seconds=60))
    world = meet(store, rank=rank, size=size, device=torch.device("cpu"))
    found = {
        (kind, packs, dtype): outcome(kind, world, packs=packs, dtype=dtype)
        for kind, packs, dtype in itertools.product(KINDS, PACKS, (torch.float32, torch.bfloat16))
    }
    torch.save(found, folder / f"{size}-{rank}.pt")
    world.part()


@functools.cache
def _outcomes(folder: Path, size: int):
    store = TCPStore("localhost", 0, is_master=True)
    multiprocessing.spawn(rank_work, (size, store.port, folder), nprocs=size)
    return [torch.load(folder / f"{size}-{rank}.pt") for rank in range(size)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gradients")


@functools.cache
def alone(packs, dtype):
    """One process: every pack by itself, added in fp32 in the order of the lanes."""
    module = make_wide()
    optimizer = FlatAdamW(module, make_config(), dtype=dtype)
    gradients = Gradients(optimizer.parameters, turns=packs)
    norms = train(module, optimizer, gradients, packs=packs, rank=0, world=1, dtype=dtype)
    return {"weights": optimizer.weights, "master": optimizer.master, "norms": norms}


def test_one_process_adds_its_packs_as_a_plain_loop_does():
    module = make_wide()
    gradients = Gradients(list(module.parameters()), turns=3)
    wanted = [torch.zeros(p.numel()) for p in module.parameters()]
    total, weight = torch.zeros(()), torch.zeros(())
    for turn in range(3):
        put(module, step=0, lane=turn, dtype=torch.float32)
        gradients.take(list(module.parameters()), turn)
        gradients.take_loss(*losses(0, turn), turn)
        wanted = [w + p.grad.flatten() for w, p in zip(wanted, module.parameters(), strict=True)]
        total, weight = total + losses(0, turn)[0], weight + losses(0, turn)[1]
    found, *loss = gradients.arrive()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert loss == [total, weight]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packs", PACKS)
def test_ranks_on_cpus_end_with_the_bits_of_one_process_shared_state_or_not(
    folder, size, dtype, packs
):
    wanted = alone(packs, dtype)
    for kind in ("ordered", "ordered and sharded"):
        parts = []
        for found in _outcomes(folder, size):
            one = found[kind, packs, dtype]
            assert torch.equal(one["weights"], wanted["weights"])
            assert one["norms"] == wanted["norms"]
            parts.append(one["master"])
            assert torch.equal(one["master"], wanted["master"][slice(*one["owned"])])
        if kind == "ordered and sharded":
            assert torch.equal(torch.cat(parts), wanted["master"])
            assert min(len(part) for part in parts[:2]) > 0


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["reduced", "scattered"])
@pytest.mark.parametrize("packs", PACKS)
def test_the_way_of_gpus_gives_the_same_up_to_the_order_of_sums(folder, size, kind, packs):
    wanted = alone(packs, torch.float32)
    for found in _outcomes(folder, size):
        one = found[kind, packs, torch.float32]
        torch.testing.assert_close(one["weights"], wanted["weights"], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            torch.tensor(one["norms"]), torch.tensor(wanted["norms"]), rtol=1e-5, atol=0
        )
    every = [found[kind, packs, torch.float32]["weights"] for found in _outcomes(folder, size)]
    assert all(torch.equal(weights, every[0]) for weights in every)
