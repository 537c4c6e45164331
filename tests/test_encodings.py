"""Spellings of hidden states: bit for bit where they promise it, within half a step elsewhere."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_cache.encodings import (
    ENCODINGS,
    EXPONENTS,
    HIDDEN,
    SCALES,
    channel_rms,
    decode,
    encode,
    relative_l2,
)
from dflash_cache.errors import ConfigError

few = settings(max_examples=60, deadline=None)
LOSSY = [name for name, encoding in ENCODINGS.items() if encoding.lossy]
# The result is rounded to bfloat16 once: half a unit in its last place, seven bits under the
# first.  The products in float32 before it are off by some 2**-24 each.
BF16 = 2**-8 + 2**-21


def every_pattern() -> torch.Tensor:
    """All 65,536 bfloat16 patterns: NaN payloads, infinities, denormals and -0.0 too."""
    bits = np.arange(2**16, dtype=np.uint16).view(np.int16)
    return torch.from_numpy(bits).view(torch.bfloat16).reshape(2, 4, 128, 64)


def bits(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as unsigned integers, in which NaN equals itself and -0.0 is not 0.0."""
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[tensor.element_size()]
    return tensor.contiguous().view(signed).numpy().view(unsigned)


def random_states(*shape: int, seed: int = 0, outliers: bool = True) -> torch.Tensor:
    """Tokens of unlike size and, as in real models, a channel 300 times the others."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(shape, generator=generator)
    states *= torch.exp(2 * torch.randn((*shape[:-1], 1), generator=generator))
    if outliers:
        states[..., 3] *= 300
    return states.bfloat16()


def channels_of(states: torch.Tensor) -> torch.Tensor:
    return channel_rms(states.flatten(end_dim=-2))


def there_and_back(name: str, states: torch.Tensor, channels=None) -> torch.Tensor:
    return decode(name, encode(name, states, channels), channels)


@st.composite
def tokens(draw):
    """Tokens [t, H] of any finite size that a scale in float32 can describe, zeros among them.

    A token that peaks under 2**-100 is all zeros, or its scale could be at its least.
    """
    values = st.floats(-2.0, 2.0, width=32).map(lambda v: v if abs(v) > 2**-40 else 0.0)
    width, count = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    rows = st.lists(values, min_size=width, max_size=width)
    states = torch.tensor(draw(st.lists(rows, min_size=count, max_size=count)))
    sizes = draw(st.lists(st.integers(-60, 100), min_size=count, max_size=count))
    return (states * torch.tensor([2.0**size for size in sizes])[:, None]).bfloat16()


# --- what every encoding promises -----------------------------------------------------------------


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("shape", [(1, 8), (5, 8), (3, 5, 8), (2, 3, 5, 8), (3, 0, 8)])
def test_parts_have_the_described_dtypes_and_shapes(name, shape):
    states = random_states(*shape)
    parts = encode(name, states, torch.ones(8))
    described = ENCODINGS[name].parts
    assert list(parts) == [part.name for part in described]
    for part in described:
        assert parts[part.name].dtype == part.dtype
        assert parts[part.name].shape == (shape if part.per_channel else shape[:-1])
    back = decode(name, parts, torch.ones(8))
    assert back.dtype == torch.bfloat16
    assert back.shape == shape


def test_only_exponents_are_compressed():
    parts = [part for encoding in ENCODINGS.values() for part in encoding.parts]
    assert {part.name for part in parts if part.compressed} == {EXPONENTS}


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_slice_is_spelt_as_the_slice_of_the_whole(name):
    states = random_states(3, 11, 16)
    channels = channels_of(states)
    whole, own = encode(name, states, channels), encode(name, states[1:, 4:9], channels)
    for part, tensor in own.items():
        np.testing.assert_array_equal(bits(tensor), bits(whole[part][1:, 4:9]))


@pytest.mark.parametrize("name", ENCODINGS)
def test_neighbours_do_not_matter(name):
    states = random_states(6, 16)
    before = encode(name, states.clone(), torch.ones(16))
    states[0], states[2:] = 1e30, -1e-30
    after = encode(name, states, torch.ones(16))
    for part, tensor in after.items():
        np.testing.assert_array_equal(bits(tensor[1]), bits(before[part][1]))


@pytest.mark.parametrize("name", ENCODINGS)
def test_neither_way_changes_what_it_was_given(name):
    states = random_states(4, 16)
    channels = channels_of(states)
    parts = encode(name, states, channels)
    handed = [states, channels, *parts.values()]
    before = [bits(tensor).copy() for tensor in handed]
    encode(name, states, channels)
    decode(name, parts, channels)
    for tensor, kept in zip(handed, before, strict=True):
        np.testing.assert_array_equal(bits(tensor), kept)


@pytest.mark.parametrize("name", ENCODINGS)
def test_tokens_of_zeros_come_back_as_zeros(name):
    states = random_states(3, 16)
    states[1] = 0
    back = there_and_back(name, states, channels_of(states))
    assert not back[1].any()
    assert back[[0, 2]].isfinite().all()


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="'fp4': want one of bf16, fp8, lossless, int8"):
        encode("fp4", random_states(2, 4))
    with pytest.raises(ConfigError, match="'fp4': want one of bf16, fp8, lossless, int8"):
        decode("fp4", {})


# --- bf16 and lossless ----------------------------------------------------------------------------


def test_bf16_passes_the_tensor_itself():
    states = every_pattern()
    parts = encode("bf16", states)
    assert parts[HIDDEN] is states
    assert decode("bf16", parts) is states


def test_lossless_returns_every_bit_of_every_pattern():
    states = every_pattern()
    back = there_and_back("lossless", states)
    np.testing.assert_array_equal(bits(back), bits(states))


def test_the_planes_are_sign_with_mantissa_and_exponent():
    states = every_pattern()
    pattern = bits(states).astype(np.int64)
    parts = encode("lossless", states)
    sign, exponent, mantissa = pattern // 2**15, pattern // 2**7 % 2**8, pattern % 2**7
    np.testing.assert_array_equal(parts[HIDDEN].numpy(), sign * 128 + mantissa)
    np.testing.assert_array_equal(parts[EXPONENTS].numpy(), exponent)


# --- fp8 ------------------------------------------------------------------------------------------


def magnitudes_of_float8() -> list[float]:
    """Every magnitude of e4m3: exponents from -6 on, three bits, and 448 where 480 would be NaN."""
    subnormal = [m * 2.0**-9 for m in range(8)]
    normal = [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)]
    return subnormal + normal[:-1]


def slow_float8(value: float) -> float:
    """Nearest float8; of two equally near the one of even mantissa, which has the even index."""
    table = magnitudes_of_float8()
    index = min(range(len(table)), key=lambda i: (abs(table[i] - abs(value)), i % 2))
    return math.copysign(table[index], value)


def test_fp8_rounds_every_channel_to_the_nearest_float8():
    states = random_states(24, 16)
    parts = encode("fp8", states)
    for token, scale, row in zip(states, parts[SCALES], parts[HIDDEN].float(), strict=True):
        quotients = (token.float() / scale).tolist()
        assert row.tolist() == [slow_float8(quotient) for quotient in quotients]


def test_a_scale_of_fp8_is_the_tokens_peak_over_448():
    states = random_states(24, 16)
    peaks = [max(abs(value) for value in token) for token in states.tolist()]
    scales = encode("fp8", states)[SCALES].tolist()
    assert scales == pytest.approx([peak / 448 for peak in peaks], rel=2**-22)


@few
@given(tokens())
def test_fp8_errs_by_half_a_step_at_most(states):
    parts = encode("fp8", states)
    error = (decode("fp8", parts).double() - states.double()).abs()
    # Three bits of mantissa: 2**-4 of a value; under the least normal number, 2**-6, steps are
    # 2**-9 of a scale.
    half_step = torch.maximum(2**-4 * states.double().abs(), 2**-10 * parts[SCALES][:, None])
    assert (error <= half_step * (1 + 2**-20) + BF16 * states.double().abs() * (1 + 2**-4)).all()


@few
@given(tokens())
def test_the_peak_of_a_token_survives_fp8(states):
    back, peak = there_and_back("fp8", states), states.abs().argmax(dim=-1, keepdim=True)
    assert torch.equal(back.gather(-1, peak), states.gather(-1, peak))


def test_fp8_reads_back_as_the_product_in_float32():
    parts = encode("fp8", random_states(2, 24, 16))
    wanted = (parts[HIDDEN].to(torch.float32) * parts[SCALES][..., None]).to(torch.bfloat16)
    assert torch.equal(decode("fp8", parts), wanted)


def test_fp8_holds_the_largest_and_the_least_states():
    limits = torch.finfo(torch.bfloat16)
    states = torch.tensor([[limits.max, -limits.max], [limits.tiny, -limits.tiny]]).bfloat16()
    back = there_and_back("fp8", states)
    assert torch.equal(back[0], states[0])
    assert (back[1].double() - states[1].double()).abs().max() < limits.tiny * 2**-9


# --- int8 -----------------------------------------------------------------------------------------


def slow_int8(token: list[float], channels: list[float]) -> tuple[list[int], float]:
    """Integers and the scale of one token."""
    whitened = [value / channel for value, channel in zip(token, channels, strict=True)]
    scale = max(map(abs, whitened)) / 127
    return [round(value / scale) for value in whitened], scale


def test_int8_equals_a_slow_loop():
    states = random_states(24, 16)
    channels = channels_of(states)
    parts = encode("int8", states, channels)
    for token, scale, row in zip(states, parts[SCALES], parts[HIDDEN], strict=True):
        integers, wanted = slow_int8(token.tolist(), channels.tolist())
        assert float(scale) == pytest.approx(wanted, rel=2**-21)
        assert row.tolist() == integers


@few
@given(tokens(), st.lists(st.integers(-8, 8), min_size=9, max_size=9))
def test_int8_errs_by_half_a_step_at_most(states, exponents):
    channels = torch.tensor([1.1 * 2.0**e for e in exponents[: states.shape[-1]]])
    parts = encode("int8", states, channels)
    found = decode("int8", parts, channels).double()
    half_step = parts[SCALES].double()[:, None] * channels.double() / 2
    # A value may lie 127 steps out: errors of 2**-22 of it are 2**-14 of a half step.
    assert ((found - states.double()).abs() <= half_step * (1 + 2**-14) + BF16 * found.abs()).all()


@few
@given(tokens())
def test_the_peak_of_a_token_survives_int8(states):
    channels = torch.full(states.shape[-1:], 0.7)
    back = there_and_back("int8", states, channels)
    peak = states.abs().argmax(dim=-1, keepdim=True)
    assert torch.equal(back.gather(-1, peak), states.gather(-1, peak))


def test_static_channels_keep_an_outlier_from_drowning_the_others():
    states = random_states(64, 64, outliers=False)
    plain = relative_l2(there_and_back("int8", states, torch.ones(64)), states).median()
    states[:, 3] *= 300
    rest = torch.arange(64) != 3
    drowned, kept = [
        relative_l2(there_and_back("int8", states, channels)[:, rest], states[:, rest]).median()
        for channels in (torch.ones(64), torch.where(rest, 1.0, 300.0))
    ]
    assert kept < 1.1 * plain
    assert drowned > 20 * plain


def test_each_layer_has_its_own_channels():
    states = random_states(3, 5, 16)
    channels = torch.stack([channels_of(layer) * (k + 1) for k, layer in enumerate(states)])
    together = encode("int8", states, channels[:, None])
    back = decode("int8", together, channels[:, None])
    for k, layer in enumerate(states):
        alone = encode("int8", layer, channels[k])
        assert torch.equal(together[HIDDEN][k], alone[HIDDEN])
        assert torch.equal(together[SCALES][k], alone[SCALES])
        assert torch.equal(back[k], decode("int8", alone, channels[k]))


@pytest.mark.parametrize("name", LOSSY)
def test_states_are_linear_in_their_scales(name):
    states = random_states(8, 16)
    channels = channels_of(states)
    parts = encode(name, states, channels)
    eightfold = {**parts, SCALES: 8 * parts[SCALES]}
    assert torch.equal(decode(name, eightfold, channels), 8 * decode(name, parts, channels))


@pytest.mark.parametrize("name", LOSSY)
def test_a_tokens_size_goes_into_its_scale_alone(name):
    states = random_states(8, 16)
    parts, larger = [encode(name, s, channels_of(states)) for s in (states, 32 * states)]
    np.testing.assert_array_equal(bits(larger[HIDDEN]), bits(parts[HIDDEN]))
    assert torch.equal(larger[SCALES], 32 * parts[SCALES])


# --- channels and errors --------------------------------------------------------------------------


def test_static_channels_are_the_rms_over_tokens_of_length_one():
    states = random_states(50, 16)  # the outlier lifts no other channel: the floor is of the median
    tokens = states.double().numpy()
    units = tokens / np.sqrt((tokens**2).sum(axis=1, keepdims=True))
    assert channel_rms(states).dtype == torch.float32
    np.testing.assert_allclose(channel_rms(states).numpy(), np.sqrt((units**2).mean(0)), rtol=1e-6)


def test_one_loud_token_in_calibration_costs_the_others_nothing():
    states = random_states(200, 64)
    calibration = states.clone()
    calibration[0, 7] = 1e4 * calibration[0].abs().max()  # as attention sinks do
    errors = [
        relative_l2(there_and_back("int8", states, channels_of(tokens)), states)[1:].median()
        for tokens in (states, calibration)
    ]
    assert errors[1] < 1.2 * errors[0]


def test_silent_tokens_in_calibration_change_no_channel_against_another():
    states = random_states(50, 16)
    padded = torch.cat([states, torch.zeros_like(states)])
    torch.testing.assert_close(channel_rms(padded) * math.sqrt(2), channel_rms(states))


def test_a_channel_silent_in_calibration_does_not_silence_the_others_later():
    calibration = random_states(50, 16, outliers=False)
    calibration[:, 5] = 0
    channels = channel_rms(calibration)
    states = channels.new_tensor([[1.0, -1.0]]).T * channels.median()
    states = states.expand(2, 16).bfloat16()
    error = relative_l2(there_and_back("int8", states, channels), states)
    # The late channel lies 16 scales out, so a step is 16 / 127 and an error half of it at most.
    assert (error < 16 / 127 / 2 * 1.5).all()


def test_calibration_on_zeros_gives_channels_of_one():
    assert torch.equal(channel_rms(torch.zeros(4, 8).bfloat16()), torch.ones(8))


def test_relative_l2_equals_a_slow_loop():
    wanted, found = random_states(2, 7, 16), random_states(2, 7, 16, seed=1)
    errors = relative_l2(found, wanted)
    assert errors.dtype == torch.float32
    for k, i in np.ndindex(2, 7):
        f, w = found[k, i].double().numpy(), wanted[k, i].double().numpy()
        assert float(errors[k, i]) == pytest.approx(math.dist(f, w) / math.hypot(*w), rel=1e-5)


def test_relative_l2_of_equal_zeros_is_zero():
    zeros = torch.zeros(3, 4)
    assert torch.equal(relative_l2(zeros, zeros), torch.zeros(3))


# --- the device -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(set(ENCODINGS) - {"bf16"}))  # which does nothing
def test_a_captured_graph_writes_and_reads_the_bytes_of_the_cpu(name):
    states = random_states(3, 40, 64)
    channels = torch.stack([channels_of(layer) for layer in states])[:, None]
    there, own = torch.zeros_like(states, device="cuda"), channels.cuda()
    encode(name, there, own)  # warm: a first call may load kernels, which a capture forbids
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        parts = encode(name, there, own)
        back = decode(name, parts, own)
    there.copy_(states)
    graph.replay()
    wanted = encode(name, states, channels)
    for part, tensor in wanted.items():
        np.testing.assert_array_equal(bits(parts[part].cpu()), bits(tensor))
    np.testing.assert_array_equal(bits(back.cpu()), bits(decode(name, wanted, channels)))
