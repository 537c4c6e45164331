"""The flat AdamW against PyTorch's, its guard, its masters, and the learning rate's schedule."""

import math

import pytest
import torch
from torch import nn

from dflash_fit.drafter import RMSNorm
from dflash_fit.gradients import gradient_of
from dflash_fit.optim import AdamWConfig, FlatAdamW
from dflash_fit.schedule import SCHEDULES, Schedule


def make_config(**changes):
    return AdamWConfig(**{"beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "clip": 1.0, **changes})


def make_module(seed=0):
    """Vectors between matrices, so that order matters."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 5, bias=False), RMSNorm(5, 1e-6), nn.Linear(5, 4, bias=False), RMSNorm(4, 1e-6)
    )


def put_gradient(module, seed, *, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        gradient = scale * torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient.to(parameter.dtype)


def own_gradients(optimizer):
    return [gradient_of(parameter) for parameter in optimizer.parameters]


def take_step(module, optimizer, *, seed=0, lr=1e-2, loss=1.0, scale=1.0, weight=1.0):
    """The gradient's norm of an update; loss and gradient are sums, `weight` times as large."""
    optimizer.lr.fill_(lr)
    optimizer.begin()
    put_gradient(module, seed, scale=scale * weight)
    found, norm = optimizer.update(
        own_gradients(optimizer), torch.tensor(loss * weight), torch.tensor(weight)
    )
    torch.testing.assert_close(found, torch.tensor(loss), equal_nan=True)
    return norm


def pytorch_steps(module, config, *, lrs, scale):
    """The same with PyTorch's clipping and AdamW, norms not decayed."""
    matrices = [p for p in module.parameters() if p.dim() > 1]
    vectors = [p for p in module.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(
        groups, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay
    )
    norms = []
    for seed, lr in enumerate(lrs):
        for group in theirs.param_groups:
            group["lr"] = lr
        put_gradient(module, seed, scale=scale)
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), config.clip))
        theirs.step()
    return norms


@pytest.mark.parametrize("scale", [0.01, 10.0], ids=["not clipped", "clipped"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("weight", [1.0, 37.0])
def test_twenty_updates_equal_those_of_pytorch(weight, weight_decay, scale):
    config, lrs = make_config(weight_decay=weight_decay), [1e-2 / (1 + i) for i in range(20)]
    ours, theirs = make_module(), make_module()
    optimizer = FlatAdamW(ours, config, dtype=torch.float32)
    norms = [
        take_step(ours, optimizer, seed=seed, lr=lr, scale=scale, weight=weight)
        for seed, lr in enumerate(lrs)
    ]
    wanted = pytorch_steps(theirs, config, lrs=lrs, scale=scale)
    # The bias corrections are fp32 here and double there: 1e-5 of an update.
    for name, parameter in ours.named_parameters():
        other = dict(theirs.named_parameters())[name]
        torch.testing.assert_close(parameter, other, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(norms, wanted)


def test_weights_stay_what_they_were_when_the_optimizer_takes_them_over():
    module, other = make_module(), make_module()
    FlatAdamW(module, make_config(), dtype=torch.float32)
    for ours, theirs in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_an_update_begins_without_the_gradients_of_the_last():
    module = make_module()
    optimizer = FlatAdamW(module, make_config(), dtype=torch.float32)
    module(torch.ones(3, 6)).sum().backward()
    optimizer.begin()
    assert [parameter.grad for parameter in module.parameters()] == [None] * 4


def test_an_optimizer_that_is_not_armed_changes_no_bit_and_counts_nothing():
    module = make_module()
    optimizer = FlatAdamW(module, make_config(), dtype=torch.float32)
    take_step(module, optimizer)
    before = snapshot(module, optimizer)
    optimizer.armed.zero_()
    take_step(module, optimizer, seed=1)
    take_step(module, optimizer, seed=1, loss=math.nan)
    assert all(torch.equal(a, b) for a, b in zip(snapshot(module, optimizer), before, strict=True))
    assert int(optimizer.skipped) == 0
    optimizer.armed.fill_(True)
    take_step(module, optimizer, seed=1)
    assert int(optimizer.updates) == 2


def test_a_weight_of_zero_divides_nothing_by_zero():
    module = make_module()
    optimizer = FlatAdamW(module, make_config(weight_decay=0.0), dtype=torch.float32)
    before = optimizer.master.clone()
    optimizer.lr.fill_(1e-2)
    put_gradient(module, 0, scale=0.0)
    loss, norm = optimizer.update(own_gradients(optimizer), torch.tensor(0.0), torch.tensor(0.0))
    assert (float(loss), float(norm)) == (0.0, 0.0)
    assert torch.equal(optimizer.master, before)


def snapshot(module, optimizer):
    tensors = [optimizer.master, optimizer.moment1, optimizer.moment2, optimizer.updates]
    return [t.clone() for t in (*tensors, *module.parameters())]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_changes_no_bit_and_is_counted(bad, dtype, where):
    module = make_module()
    optimizer = FlatAdamW(module, make_config(), dtype=dtype)
    take_step(module, optimizer)
    before = snapshot(module, optimizer)
    optimizer.begin()
    put_gradient(module, 1)
    if where == "gradient":
        module[2].weight.grad[1, 1] = bad
    optimizer.update(
        own_gradients(optimizer), torch.tensor(bad if where == "loss" else 1.0), torch.tensor(1.0)
    )
    after = snapshot(module, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert int(optimizer.skipped) == 1


def test_the_step_after_a_skipped_one_goes_on_as_if_it_had_not_been():
    module, other = make_module(), make_module()
    optimizer, undisturbed = (
        FlatAdamW(m, make_config(), dtype=torch.float32) for m in (module, other)
    )
    for loss in (1.0, math.nan, 1.0):
        take_step(module, optimizer, loss=loss)
    for _ in range(2):
        take_step(other, undisturbed)
    assert torch.equal(optimizer.master, undisturbed.master)
    assert (int(optimizer.updates), int(optimizer.skipped)) == (2, 1)


def test_a_first_gradient_that_is_not_finite_is_survived():
    module = make_module()
    optimizer = FlatAdamW(module, make_config(), dtype=torch.float32)
    before = snapshot(module, optimizer)
    take_step(module, optimizer, scale=math.nan)
    after = snapshot(module, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_updates_below_the_resolution_of_bfloat16_add_up_in_the_masters():
    module = nn.Linear(4, 4, bias=False)
    nn.init.ones_(module.weight)
    config = make_config(weight_decay=0.0)
    optimizer = FlatAdamW(module, config, dtype=torch.bfloat16)
    optimizer.lr.fill_(1e-4)  # bfloat16 knows 1 and 1 - 2 ** -8 = 1 - 0.0039, nothing between
    for _ in range(100):
        module.weight.grad = torch.full_like(module.weight, 1e-3)
        optimizer.update(own_gradients(optimizer), torch.tensor(1.0), torch.tensor(1.0))
    assert optimizer.master.tolist() == pytest.approx([0.99] * 16, abs=1e-4)
    assert torch.equal(optimizer.weights, optimizer.master.bfloat16())
    assert module.weight.data_ptr() == optimizer.weights.data_ptr()


def test_bfloat16_weights_are_masters_rounded_after_every_update():
    module = make_module()
    optimizer = FlatAdamW(module, make_config(), dtype=torch.bfloat16)
    for seed in range(5):
        take_step(module, optimizer, seed=seed)
        assert torch.equal(optimizer.weights, optimizer.master.bfloat16())
    flat = torch.cat([p.flatten() for p in optimizer.parameters])
    assert torch.equal(flat, optimizer.weights)


def test_masters_begin_unrounded():
    module, other = make_module(), make_module()
    optimizer = FlatAdamW(module, make_config(), dtype=torch.bfloat16)
    flat = torch.cat([p.flatten() for p in sorted(other.parameters(), key=lambda p: p.dim() == 1)])
    assert torch.equal(optimizer.master, flat)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_state_goes_on_bit_for_bit(dtype):
    module, other = make_module(), make_module(seed=9)
    optimizer, loaded = (FlatAdamW(m, make_config(), dtype=dtype) for m in (module, other))
    for seed in range(3):
        take_step(module, optimizer, seed=seed)
    take_step(module, optimizer, loss=math.nan)
    take_over(loaded, optimizer)
    assert torch.equal(optimizer.weights, loaded.weights)
    for seed in range(3, 6):
        take_step(module, optimizer, seed=seed)
        take_step(other, loaded, seed=seed)
    pairs = zip(state(optimizer).values(), state(loaded).values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(optimizer.weights, loaded.weights)


def state(optimizer):
    return {**optimizer.flats(), **optimizer.scalars()}


def take_over(optimizer, other):
    for name, tensor in state(optimizer).items():
        tensor.copy_(state(other)[name])
    optimizer.restore()


def test_skipped_updates_in_a_row_are_counted_until_a_good_one():
    module = make_module()
    optimizer = FlatAdamW(module, make_config(), dtype=torch.float32)
    rows = []
    for loss in (math.nan, math.inf, 1.0, math.nan, 1.0, 1.0):
        take_step(module, optimizer, loss=loss)
        rows.append(int(optimizer.skipped_in_a_row))
    assert rows == [1, 2, 0, 1, 0, 0]
    optimizer.armed.zero_()
    take_step(module, optimizer, loss=math.nan)
    assert (int(optimizer.skipped_in_a_row), int(optimizer.skipped)) == (0, 3)


# --- schedule -----------------------------------------------------------------------------------


def rates(steps, warmup, kind="cosine", **more):
    schedule = Schedule(kind=kind, steps=steps, peak=2.0, warmup=warmup, **more)
    return [schedule.rate(step) for step in range(steps)]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_warm_up_rises_in_equal_steps_to_the_peak(kind):
    assert rates(100, 0.04, kind)[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


def test_linear_falls_in_equal_steps():
    assert rates(10, 0.0, "linear") == pytest.approx([2 - i / 5 for i in range(10)])


def test_wsd_stays_at_the_peak_and_falls_in_its_last_share():
    found = rates(100, 0.1, "wsd", cooldown=0.25)
    assert found[9:76] == pytest.approx([2.0] * 67)
    assert found[75:] == pytest.approx([2 - 2 * i / 25 for i in range(25)])


def test_wsd_without_a_cooldown_stays_at_the_peak():
    assert rates(10, 0.2, "wsd", cooldown=0.0, floor=0.5)[1:] == [2.0] * 9


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_floor_as_high_as_the_peak_is_a_constant_rate(kind):
    assert rates(10, 0.1, kind, floor=1.0) == [2.0] * 10


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2])
def test_the_shortest_runs_have_rates(kind, steps):
    assert all(0 < rate <= 2.0 for rate in rates(steps, 0.04, kind))


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_schedule_ends_at_its_floor(kind):
    schedule = Schedule(kind=kind, steps=100, peak=2.0, warmup=0.1, floor=0.1)
    assert [schedule.rate(step) for step in (100, 120)] == pytest.approx([0.2, 0.2])
    assert min(rates(100, 0.1, kind, floor=0.1)[10:]) > 0.2


@pytest.mark.parametrize("warmup", [0.9, 1.0])
def test_a_fall_never_begins_before_the_warm_up_ends(warmup):
    found = rates(10, warmup, "wsd", cooldown=0.5)
    assert found[: int(10 * warmup)] == sorted(found[: int(10 * warmup)])
    assert found[int(10 * warmup) - 1] == 2.0


def test_behind_the_warm_up_the_rate_is_half_a_cosine_to_zero():
    found = rates(100, 0.1)[10:]
    assert found == pytest.approx([1 + math.cos(math.pi * i / 90) for i in range(90)])


def test_the_rate_is_zero_at_the_end_and_stays_there():
    schedule = Schedule(kind="cosine", steps=100, peak=2.0, warmup=0.04)
    assert [schedule.rate(step) for step in (100, 150)] == pytest.approx([0.0, 0.0])


def test_without_a_warm_up_the_first_rate_is_the_peak():
    assert rates(10, 0.0)[0] == 2.0


def test_a_short_run_warms_up_for_at_least_one_step():
    assert rates(5, 0.04)[:2] == [2.0, 2.0]


def test_a_run_may_consist_of_warm_up():
    assert rates(4, 1.0) == pytest.approx([0.5, 1.0, 1.5, 2.0])
