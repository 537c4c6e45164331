"""Two GPUs build and train as one does; and one trains what the other builds.

On CPUs `test_ranks`, `test_workers` and `test_layouts` ask for the same, to the last bit.
"""

from dataclasses import replace

import pytest
import torch
from conftest import tiny_build
from test_gpu import follow_a_build, gpu_fit, lines
from test_loop import losses
from test_ranks import stop_at_3, stop_at_6

from dflash_cache.build import build_cache
from dflash_cache.devices import gpus_here
from dflash_cache.reader import CacheReader
from dflash_fit import loop

# The compiler warns of itself.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(gpus_here() < 2, reason="needs two CUDA GPUs"),
]


@pytest.fixture(autouse=True)
def same_device():
    """A run in this process makes its GPU the current one, which later tests do not expect."""
    before = torch.cuda.current_device()
    yield
    torch.cuda.set_device(before)


FIRST, SECOND, BOTH = "cuda:0", "cuda:1", "cuda:0,cuda:1"


def assert_same_curve(run, other):
    """Sums over GPUs are taken in another order, and their atomic parts in none."""
    assert [loss for _, loss, _ in losses(run)] == pytest.approx(
        [loss for _, loss, _ in losses(other)], rel=1e-3
    )


@pytest.mark.parametrize(
    "options",
    [{"devices": BOTH}, {"devices": BOTH, "tensor_parallel": 2}, {"devices": SECOND}],
    ids=str,
)
def test_a_cache_holds_the_same_states_whichever_gpus_build_it(
    tiny_target, tiny_data, tmp_path, options
):
    places = {"one": {"devices": FIRST}, "other": options}
    for name, more in places.items():
        build_cache(tiny_build(tiny_target, tiny_data, tmp_path / name, **more))
    one, other = (CacheReader(tmp_path / name) for name in places)
    assert one.identity == other.identity
    layer_ids = one.identity.target_layer_ids
    for index in range(len(one.located)):
        torch.testing.assert_close(
            other.hidden(index, layer_ids), one.hidden(index, layer_ids), rtol=0.02, atol=0.02
        )


@pytest.mark.parametrize(
    "options",
    [{}, {"packs_per_step": 3}, {"shard_optimizer": True}, {"devices": SECOND}],
    ids=str,
)
def test_a_run_has_the_same_curve_whichever_gpus_train(tiny_cache, tmp_path, options):
    common = {"packs_per_step": 2, "reduce": "fp32", **options}
    one = gpu_fit(tiny_cache, tmp_path / "one", **{**common, "devices": FIRST})
    other = gpu_fit(tiny_cache, tmp_path / "other", **{"devices": BOTH, **common})
    loop.fit(replace(one, shard_optimizer=False))
    assert loop.fit(other)["finished"]
    assert_same_curve(other.out, one.out)
    # One graph on each, which nothing behind its capture compiled anew.
    assert {line["recompiles"] for line in lines(other.out, "train")} == {0}


def test_a_run_that_two_gpus_began_goes_on_with_one_and_with_two_again(tiny_cache, tmp_path):
    config = gpu_fit(
        tiny_cache, tmp_path / "run", devices=BOTH, packs_per_step=2, reduce="fp32", max_steps=9
    )
    alone = replace(config, out=tmp_path / "alone", devices=FIRST)
    loop.fit(alone)
    for places, stop in ((BOTH, stop_at_3), (SECOND, stop_at_6), (BOTH, loop.never)):
        found = loop.fit(replace(config, devices=places), stop=stop)
    assert found["finished"]
    assert_same_curve(config.out, alone.out)


def test_one_gpu_trains_while_the_other_builds(tiny_target, tmp_path):
    runs = follow_a_build(tiny_target, tmp_path, builder=FIRST, trainer=SECOND)
    assert_same_curve(*runs)
