"""How hidden states are spelt as bytes, and back.  Pure tensor functions: no I/O, no host sync.

Each runs where its tensor lies: spelt on the GPU before the copy to the host, read back on the
GPU after it, inside a captured CUDA graph.  A token is spelt alone, so a slice of the parts is
the spelling of the slice.

Letters: t tokens, H hidden size; any dimensions may lead, here the K target layers.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dflash_cache.errors import ConfigError

HIDDEN, SCALES, EXPONENTS = "hidden", "scales", "exponents"

FP8_MAX: Final = 448.0  # of float8_e4m3fn
INT8_MAX: Final = 127.0  # -128 stays unused: the code is symmetric
# Lets a token of zeros be divided by its scale; no token that a model makes is this quiet.
SMALLEST_SCALE: Final = torch.finfo(torch.float32).tiny
# Least static scale of a channel, in parts of the median one.  A channel that is silent in
# calibration and speaks later would otherwise set its token's scale, and silence the others.
CHANNEL_FLOOR: Final = 1 / 16
SIGN_AND_MANTISSA: Final = -0x7F81  # 0x807F as an int16


@dataclass(frozen=True, kw_only=True)
class Part:
    """One array of an encoding: [..., t, H] if it is per channel, else [..., t]."""

    name: str
    dtype: torch.dtype
    per_channel: bool
    compressed: bool
    logical_dtype: str  # for other readers: what the bytes mean, where their dtype cannot say it


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """A spelling; `lossy` when reading it back does not give every bit."""

    name: str
    lossy: bool
    static_scales: bool = False  # one scale per channel, the same for all tokens of a cache
    parts: tuple[Part, ...]


def _hidden(dtype: torch.dtype, logical_dtype: str) -> Part:
    return Part(
        name=HIDDEN, dtype=dtype, per_channel=True, compressed=False, logical_dtype=logical_dtype
    )


_SCALES = Part(
    name=SCALES, dtype=torch.float32, per_channel=False, compressed=False, logical_dtype="float32"
)
# Signs and mantissas are noise to a compressor; the exponents are where the redundancy is.
_EXPONENTS = Part(
    name=EXPONENTS,
    dtype=torch.uint8,
    per_channel=True,
    compressed=True,
    logical_dtype="bfloat16: exponent",
)

ENCODINGS: Final[dict[str, Encoding]] = {
    encoding.name: encoding
    for encoding in (
        Encoding(name="bf16", lossy=False, parts=(_hidden(torch.bfloat16, "bfloat16"),)),
        Encoding(
            name="fp8",
            lossy=True,
            parts=(_hidden(torch.float8_e4m3fn, "float8_e4m3fn"), _SCALES),
        ),
        Encoding(
            name="lossless",
            lossy=False,
            parts=(_hidden(torch.uint8, "bfloat16: sign and mantissa"), _EXPONENTS),
        ),
        Encoding(
            name="int8",
            lossy=True,
            static_scales=True,
            parts=(_hidden(torch.int8, "int8"), _SCALES),
        ),
    )
}


def encode(name: str, states: Tensor, channels: Tensor | None = None) -> dict[str, Tensor]:
    """Parts by name of bfloat16 states [..., t, H]; `channels` is the static scale of int8.

    bf16 and lossless keep every bit pattern; fp8 and int8 want finite states.  bf16 passes the
    tensor itself, no copy.
    """
    assert states.dtype == torch.bfloat16, states.dtype
    match name:
        case "bf16":
            return {HIDDEN: states}
        case "fp8":
            return _encode_fp8(states)
        case "lossless":
            return _encode_planes(states)
        case "int8":
            assert channels is not None, "int8 has a static scale per channel"
            return _encode_int8(states, channels)
    raise ConfigError(f"encoding {name!r}: want one of {', '.join(ENCODINGS)}")


def decode(name: str, parts: dict[str, Tensor], channels: Tensor | None = None) -> Tensor:
    """States bfloat16 [..., t, H] from their parts, with the `channels` that encoded them."""
    match name:
        case "bf16":
            return parts[HIDDEN]
        case "fp8":
            return _decode_fp8(parts[HIDDEN], parts[SCALES])
        case "lossless":
            return _decode_planes(parts[HIDDEN], parts[EXPONENTS])
        case "int8":
            assert channels is not None, "int8 has a static scale per channel"
            return _decode_int8(parts[HIDDEN], parts[SCALES], channels)
    raise ConfigError(f"encoding {name!r}: want one of {', '.join(ENCODINGS)}")


def channel_rms(states: Tensor) -> Tensor:
    """Static scale float32 [H] of states [t, H]: rms of a channel over tokens of length 1; never 0.

    Tokens get one length first.  Some targets make the first token 1000 times as loud in a few
    channels, and a plain rms would scale these for it, too coarsely for everybody else: median
    error 0.062 instead of 0.0075 in the middle layers of SmolLM2-135M (fp8: 0.022).
    """
    lengths = torch.linalg.vector_norm(states, dim=-1, keepdim=True, dtype=torch.float32)
    rms = (states / lengths.clamp_min_(SMALLEST_SCALE)).square_().mean(dim=0).sqrt()
    floored = torch.maximum(rms, CHANNEL_FLOOR * rms.median())
    return torch.where(floored > 0, floored, 1.0)


def relative_l2(found: Tensor, wanted: Tensor) -> Tensor:
    """||found - wanted|| / ||wanted|| of each token, float32 [...]; 0 where both are zeros."""
    wanted = wanted.float()
    distance: Tensor = torch.linalg.vector_norm(found.float() - wanted, dim=-1)
    length = torch.linalg.vector_norm(wanted, dim=-1).clamp_min_(SMALLEST_SCALE)
    return distance.div_(length)


# --- fp8: a float8 per channel, a scale per token -------------------------------------------------


def _encode_fp8(states: Tensor) -> dict[str, Tensor]:
    scales = _token_scales(states, FP8_MAX)
    return {HIDDEN: (states / scales[..., None]).to(torch.float8_e4m3fn), SCALES: scales}


def _decode_fp8(hidden: Tensor, scales: Tensor) -> Tensor:
    # Every float8 is a bfloat16, and the in-place product of bfloat16 and float32 is a float32
    # product rounded once: the result is the only tensor made here, at no bit's cost.
    return hidden.to(torch.bfloat16).mul_(scales[..., None])


# --- int8: an integer per channel, a scale per token times one per channel ------------------------


def _encode_int8(states: Tensor, channels: Tensor) -> dict[str, Tensor]:
    whitened = states / channels  # float32, as the channels are
    scales = _token_scales(whitened, INT8_MAX)
    return {HIDDEN: whitened.div_(scales[..., None]).round_().to(torch.int8), SCALES: scales}


def _decode_int8(hidden: Tensor, scales: Tensor, channels: Tensor) -> Tensor:
    states = torch.empty(hidden.shape, dtype=torch.bfloat16, device=hidden.device)
    if hidden.dim() < 3:
        return states.copy_((hidden * scales[..., None]).mul_(channels))
    # Plane by plane: in float32 all of them would take four times the memory of a batch.
    channels = channels.expand(*hidden.shape[:-2], 1, hidden.shape[-1])
    planes = zip(states, hidden, scales, channels, strict=True)
    for plane, own, token_scales, channel_scales in planes:
        plane.copy_(_decode_int8(own, token_scales, channel_scales))
    return states


def _token_scales(values: Tensor, largest: float) -> Tensor:
    """Scale float32 [..., t] under which no value [..., t, H] of its token exceeds `largest`."""
    # The infinity norm is amax of abs without a copy of the tensor.
    peaks: Tensor = torch.linalg.vector_norm(values, ord=torch.inf, dim=-1, dtype=torch.float32)
    # A product, because CUDA turns a quotient by a number into one, and the CPU does not: both
    # shall write the same bytes.  It may be an ulp small; `largest` and an ulp still rounds to it.
    return peaks.mul_(1 / largest).clamp_min_(SMALLEST_SCALE)


# --- lossless: two planes of bytes ----------------------------------------------------------------


def _encode_planes(states: Tensor) -> dict[str, Tensor]:
    # int16, because uint16 has few operators; its shift drags the sign along, hence the masks.
    bits = states.view(torch.int16)
    sign, exponents = (bits >> 8).bitwise_and_(0x80), (bits >> 7).bitwise_and_(0xFF)
    hidden = (bits & 0x7F).bitwise_or_(sign)
    return {HIDDEN: hidden.to(torch.uint8), EXPONENTS: exponents.to(torch.uint8)}


def _decode_planes(hidden: Tensor, exponents: Tensor) -> Tensor:
    # Read as int8, the sign bit spreads over the high byte, and the mask leaves it where it goes.
    bits = hidden.view(torch.int8).to(torch.int16).bitwise_and_(SIGN_AND_MANTISSA)
    bits.bitwise_or_(exponents.to(torch.int16).bitwise_left_shift_(7))
    return bits.view(torch.bfloat16)
