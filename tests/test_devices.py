"""Which devices an option names, and which of several processes gets which."""

import pytest
import torch

from dflash_cache import devices as devices_module
from dflash_cache.devices import (
    device_names,
    group_of_rank,
    product_seconds,
    slow_bfloat16,
    worker_groups,
)
from dflash_cache.errors import ConfigError
from dflash_cache.ranks import Meeting, find_rank

MASTER = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "abc"}
SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77"}


@pytest.mark.parametrize(
    ("devices", "wanted"),
    [
        ("all", ["cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:4"]),
        ("0,1,2", ["cuda:0", "cuda:1", "cuda:2"]),
        ("0-4", ["cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:4"]),
        ("3, 1-2", ["cuda:3", "cuda:1", "cuda:2"]),
        ("cuda", ["cuda:0"]),
        ("cuda:1", ["cuda:1"]),
        ("cuda:1,2", ["cuda:1", "cuda:2"]),
        ("0,0", ["cuda:0", "cuda:0"]),
        ("cpu", ["cpu"]),
        ("cpu,cpu", ["cpu", "cpu"]),
        ("cpu,0", ["cpu", "cuda:0"]),
    ],
)
def test_devices_come_in_the_order_given(devices, wanted):
    assert device_names(devices, gpus=5) == wanted


@pytest.mark.parametrize("devices", ["", ",", "gpu", "meta", "0,", "1-", "-1", "2-1", "cuda:", "²"])
def test_what_is_no_device_is_refused_with_what_would_be_one(devices):
    with pytest.raises(ConfigError, match=r"--devices .*: want auto, all, cpu or numbers of GPUs"):
        device_names(devices, gpus=5)


@pytest.mark.parametrize(
    ("devices", "gpus", "told"),
    [
        ("all", 0, "this torch sees no GPU; use --devices cpu"),
        ("1", 0, "this torch sees no GPU; use --devices cpu"),
        ("0-5", 5, "GPU 5 is not there; this torch sees 5, numbered from 0"),
    ],
)
def test_a_gpu_that_is_not_there_is_told(devices, gpus, told):
    with pytest.raises(ConfigError, match=f"--devices {devices}: {told}"):
        device_names(devices, gpus=gpus)


@pytest.mark.parametrize(
    ("devices", "size", "gpus", "wanted"),
    [
        ("auto", 1, 8, [("cuda:0",)]),
        ("auto", 1, 0, [("cpu",)]),
        ("auto", 2, 8, [("cuda:0", "cuda:1")]),
        ("auto", 2, 0, [("cpu", "cpu")]),
        ("0-3", 2, 8, [("cuda:0", "cuda:1"), ("cuda:2", "cuda:3")]),
        ("cpu,cpu", 1, 0, [("cpu",), ("cpu",)]),
    ],
)
def test_devices_that_follow_each_other_form_a_worker(devices, size, gpus, wanted):
    assert worker_groups(devices, tensor_parallel=size, gpus=gpus) == wanted


@pytest.mark.parametrize(
    ("devices", "gpus", "told"),
    [
        ("0-2", 8, r"3 devices \(--devices 0-2\) do not make workers of 2"),
        ("0,0", 8, "one worker would have cuda:0, cuda:0 .* want different GPUs"),
        ("cpu,0", 8, "one worker would have cpu, cuda:0 .* want different GPUs"),
        ("auto", 1, "GPU 1 is not there"),
    ],
)
def test_devices_that_cannot_share_a_target_are_refused(devices, gpus, told):
    with pytest.raises(ConfigError, match=told):
        worker_groups(devices, tensor_parallel=2, gpus=gpus)


@pytest.mark.parametrize(
    ("devices", "size", "gpus", "local", "wanted"),
    [
        ("auto", 1, 8, 3, ("cuda:3",)),
        ("auto", 2, 8, 3, ("cuda:6", "cuda:7")),
        ("auto", 1, 0, 3, ("cpu",)),
        ("cpu", 2, 8, 3, ("cpu", "cpu")),
        ("4-7", 1, 8, 1, ("cuda:5",)),
    ],
)
def test_a_rank_takes_the_devices_that_are_its_turn(devices, size, gpus, local, wanted):
    found = group_of_rank(devices, tensor_parallel=size, gpus=gpus, local_rank=local)
    assert found == wanted


def test_a_rank_without_a_device_says_how_many_processes_there_may_be():
    with pytest.raises(ConfigError, match="start 2 processes on this machine"):
        group_of_rank("auto", tensor_parallel=2, gpus=4, local_rank=2)
    with pytest.raises(ConfigError, match="start 2 processes on this machine"):
        group_of_rank("cpu,cpu", tensor_parallel=1, gpus=0, local_rank=2)


def test_a_rank_that_sees_only_its_own_gpus_takes_the_first_of_them():
    found = group_of_rank("auto", tensor_parallel=1, gpus=1, local_rank=3, own_gpus=1)
    assert found == ("cuda:0",)


def test_a_rank_that_sees_the_gpus_of_others_too_takes_its_turn():
    """As with `--gpus-per-task=1 --gpu-bind=none`."""
    found = group_of_rank("auto", tensor_parallel=1, gpus=4, local_rank=3, own_gpus=1)
    assert found == ("cuda:3",)


# --- ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variables",
    [
        {},
        MASTER,
        {**TORCHRUN, **MASTER, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "2", **MASTER},  # some platforms set these for every program
        {**SRUN, "SLURM_NTASKS": "1"},
        {**SRUN, "SLURM_NTASKS": "2(x3)"},
    ],
)
def test_a_process_that_was_started_alone_has_no_rank(variables):
    assert find_rank(variables) is None


def test_torchrun_gives_the_rank_and_keeps_the_store():
    rank = find_rank({**TORCHRUN, **MASTER, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert (rank.number, rank.world, rank.local, rank.first) == (5, 8, 1, False)
    assert (rank.hosts, rank.own_gpus) == (False, 0)
    assert rank.meeting == Meeting(host="node1", port=29500, prefix="dflash/abc/0/0")
    first = find_rank({**TORCHRUN, **MASTER, "RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert first.first
    assert not first.hosts
    without = find_rank({**TORCHRUN, **MASTER, "RANK": "0"})
    assert without.hosts


def test_a_run_that_torchrun_starts_again_finds_nothing_of_the_one_before():
    prefixes = {
        find_rank({**TORCHRUN, **MASTER, "TORCHELASTIC_RESTART_COUNT": n}).meeting.prefix
        for n in "012"
    }
    assert len(prefixes) == 3


def test_srun_gives_the_rank_and_rank_0_keeps_the_store():
    rank = find_rank({**SRUN, **MASTER})
    assert (rank.number, rank.world, rank.local, rank.hosts) == (5, 8, 1, False)
    assert find_rank({**SRUN, **MASTER, "SLURM_PROCID": "0"}).hosts


@pytest.mark.parametrize(
    ("variables", "own"),
    [
        ({}, 0),
        ({"SLURM_GPUS_PER_TASK": "2"}, 2),
        ({"SLURM_GPUS_PER_TASK": "a100:2"}, 2),
        ({"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=2"}, 2),
        ({"SLURM_TRES_PER_TASK": "cpu:4,gres/gpu:a100:2"}, 2),
        ({"SLURM_TRES_PER_TASK": "gres:gpu:1"}, 1),
        # So says `--cpus-per-task 4`, and gives no task a GPU of its own.
        ({"SLURM_TRES_PER_TASK": "cpu=4"}, 0),
    ],
)
def test_srun_tells_how_many_gpus_are_a_tasks_own(variables, own):
    assert find_rank({**SRUN, **MASTER, **variables}).own_gpus == own


def test_torchrun_inside_a_slurm_job_counts():
    rank = find_rank({**SRUN, **TORCHRUN, **MASTER, "SLURM_NTASKS": "2", "SLURM_PROCID": "1"})
    assert (rank.number, rank.world) == (5, 8)


@pytest.mark.parametrize("missing", MASTER)
def test_ranks_that_do_not_know_where_to_meet_are_told_what_to_set(missing):
    variables = {name: value for name, value in {**SRUN, **MASTER}.items() if name != missing}
    with pytest.raises(ConfigError, match="set them to the name of the first node and a free port"):
        find_rank(variables)


# --- CPUs without bfloat16 ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.019, None), (0.021, "2 times"), (0.9, "90 times")]
)
def test_a_cpu_that_is_slow_in_bfloat16_is_told_with_what_to_do(monkeypatch, seconds, told):
    times = {torch.bfloat16: seconds, torch.float32: 0.01}
    monkeypatch.setattr(devices_module, "product_seconds", times.__getitem__)
    found = slow_bfloat16(instead="--precision fp32")
    if told is None:
        assert found is None
    else:
        assert f"takes {told} as long" in found
        assert found.endswith("; --precision fp32 is quicker here")


def test_products_are_timed_once():
    product_seconds.cache_clear()
    first = [product_seconds(dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert min(first) > 0
    assert [product_seconds(dtype) for dtype in (torch.float32, torch.bfloat16)] == first
