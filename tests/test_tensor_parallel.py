"""Two processes that share the layers of a target compute what one process computes."""

import os
from pathlib import Path

import pytest
import torch
from families import FAMILIES, LAYERS, load, save_family, some_ids
from torch import distributed, multiprocessing

from dflash_cache.errors import ConfigError, TargetError
from dflash_cache.survey import survey_target
from dflash_cache.tensor_parallel import layer_plan, own_device, refuse_what_cannot_be_shared
from dflash_cache.weights import build_empty

WORLD = 2
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def worker(rank: int, root: Path) -> None:
    """Every family, loaded by this one of the processes; leaves what it computed."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{root / 'meeting'}", rank=rank, world_size=WORLD
    )
    left = {family: shared_states(root / family) for family in FAMILIES}
    torch.save(left, root / f"{rank}.pt")
    distributed.destroy_process_group()


def shared_states(folder: Path) -> dict:
    whole, ids = load(folder, tensor_parallel=True), some_ids(2, 70)
    cut = load(folder, tensor_parallel=True, up_to=3)
    return {
        "hidden": whole.hidden_states(ids, range(LAYERS)),
        "final": whole.final_hidden(ids),
        "logits": whole.logits(ids),
        "cut": cut.hidden_states(ids, [1, 3]),
        "head": whole.head.clone(),
        "embedding": cut.embedding.clone(),
        "numbers": sum(
            getattr(weight, "to_local", lambda w=weight: w)().numel()
            for weight in whole.layers.parameters()
        ),
    }


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Folder of the families, and what each process left."""
    root = tmp_path_factory.mktemp("shared")
    for family in FAMILIES:
        save_family(root / family, family)
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers would take the GPUs of the machine
    try:
        multiprocessing.spawn(worker, (root,), nprocs=WORLD)
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
    return root, [torch.load(root / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank", range(WORLD))
def test_every_process_has_the_states_of_one_alone(shared, family, rank):
    root, results = shared
    found, alone, ids = results[rank][family], load(root / family), some_ids(2, 70)
    wanted = alone.hidden_states(ids, range(LAYERS))
    for states, one in zip(found["hidden"], wanted, strict=True):
        torch.testing.assert_close(states, one, rtol=0, atol=2e-5)
    for states, layer_id in zip(found["cut"], [1, 3], strict=True):
        torch.testing.assert_close(states, wanted[layer_id], rtol=0, atol=2e-5)
    torch.testing.assert_close(found["final"], alone.final_hidden(ids), rtol=0, atol=2e-5)
    torch.testing.assert_close(found["logits"], alone.logits(ids), rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_embedding_and_head_are_whole_in_every_process_and_layers_are_not(shared, family):
    root, results = shared
    alone = load(root / family)
    numbers = sum(weight.numel() for weight in alone.layers.parameters())
    for result in results:
        assert torch.equal(result[family]["head"], alone.head)
        assert torch.equal(result[family]["embedding"], alone.embedding)
        assert result[family]["numbers"] < 0.75 * numbers


# --- what cannot be shared ----------------------------------------------------------------------


@pytest.fixture
def empty(tmp_path):
    return build_empty(survey_target(str(save_family(tmp_path, "qwen3_moe")), dtype="float32"))


def test_the_plan_is_that_of_the_layers_and_of_what_is_in_them(empty):
    plan = layer_plan(empty)
    assert plan
    assert plan.items() <= empty.tp_plan.items()
    left_out = empty.tp_plan.keys() - plan.keys()
    assert "lm_head" in left_out
    # No layer of this model is without experts.
    assert "model.layers.*.mlp.gate_proj" in left_out
    assert "model.layers.*.mlp.experts.gate_up_proj" in plan


def test_a_family_without_a_plan_is_refused_by_name(empty):
    with pytest.raises(TargetError, match="Qwen3MoeForCausalLM: transformers has no tensor-para"):
        refuse_what_cannot_be_shared(empty, {}, 2, GPU)


@pytest.mark.parametrize(("size", "heads"), [(3, "4 num_attention"), (4, "2 num_key_value")])
def test_a_head_is_not_cut_through(empty, size, heads):
    told = f"--tensor-parallel {size}: Qwen3MoeForCausalLM has {heads}_heads"
    with pytest.raises(ConfigError, match=told):
        refuse_what_cannot_be_shared(empty, layer_plan(empty), size, GPU)


def test_on_the_cpu_of_a_machine_with_gpus_it_is_refused(empty, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    refuse_what_cannot_be_shared(empty, layer_plan(empty), 2, GPU)
    with pytest.raises(ConfigError, match="hide them with CUDA_VISIBLE_DEVICES="):
        refuse_what_cannot_be_shared(empty, layer_plan(empty), 2, CPU)


def test_a_process_is_bound_to_its_own_gpu_while_it_loads(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "7")
    with own_device(torch.device("cuda:3")):
        assert os.environ["LOCAL_RANK"] == "3"
    assert os.environ["LOCAL_RANK"] == "7"
    monkeypatch.delenv("LOCAL_RANK")
    with own_device(torch.device("cuda:3")):
        assert os.environ["LOCAL_RANK"] == "3"
    assert "LOCAL_RANK" not in os.environ
