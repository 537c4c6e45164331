"""An encoding together with what is measured once for a cache: the static scales of its channels.

The scales of int8 are measured on a few samples before the first unit, and then never change:
every unit of a cache is spelt alike.

Letters: t tokens, H hidden size, K planes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from dflash_cache import disk
from dflash_cache.checksums import digest
from dflash_cache.encodings import ENCODINGS, channel_rms, decode, encode, relative_l2
from dflash_cache.errors import CacheError
from dflash_cache.files import repair_hint
from dflash_cache.schema import CHANNELS_FILE, Identity, UnitRecord

# 64 tokens of a 135M target were nearly enough; more cost a second of the target's time.
CALIBRATION_TOKENS = 8192


@dataclass(frozen=True, kw_only=True, eq=False)
class Codec:
    """Spells the states of one cache.  `channels`: plane -> float32 [H]; empty where not needed."""

    encoding: str
    channels: dict[str, Tensor]
    checksum: int | None  # XXH3-64 of the file of scales; None where there is none

    def encode(self, plane: str, states: Tensor) -> dict[str, Tensor]:
        return encode(self.encoding, states, self.channels.get(plane))

    def decode(self, plane: str, parts: dict[str, Tensor]) -> Tensor:
        return decode(self.encoding, parts, self.channels.get(plane))

    def errors(self, plane: str, states: Tensor, parts: dict[str, Tensor]) -> Tensor | None:
        """Relative L2 error of every token; None where nothing is lost."""
        if not ENCODINGS[self.encoding].lossy:
            return None
        return relative_l2(self.decode(plane, parts), states)

    def to(self, device: torch.device) -> "Codec":
        moved = {plane: channels.to(device) for plane, channels in self.channels.items()}
        return replace(self, channels=moved)


def plain_codec(identity: Identity) -> Codec:
    """The codec of an encoding without static scales."""
    return Codec(encoding=identity.encoding, channels={}, checksum=None)


def has_channels(encoding: str) -> bool:
    return ENCODINGS[encoding].static_scales


def new_codec(root: Path, identity: Identity, samples: Iterable[Sequence[Tensor]]) -> Codec:
    """The codec of a cache without units yet, its scales left beside them.

    `samples` gives states [t, H] per plane, and is read only where scales are to be measured.
    """
    if not has_channels(identity.encoding):
        return plain_codec(identity)
    planes = [torch.cat(states) for states in zip(*samples, strict=True)]
    channels = {
        name: channel_rms(states).cpu()
        for name, states in zip(identity.planes, planes, strict=True)
    }
    payload: bytes = save(channels)
    disk.write_file(root / CHANNELS_FILE, payload)
    return Codec(encoding=identity.encoding, channels=channels, checksum=digest(payload))


def stored_codec(root: Path, identity: Identity, record: UnitRecord) -> Codec:
    """The codec that a committed unit was spelt with."""
    if not has_channels(identity.encoding):
        return plain_codec(identity)
    path = root / CHANNELS_FILE
    payload = path.read_bytes() if path.is_file() else b""
    if digest(payload) != record.channels_checksum:
        raise CacheError(
            f"{path}: missing, or not what unit {record.unit} was written with; the cache is "
            f"damaged. {repair_hint(str(root))}"
        )
    return parse_codec(payload, identity, where=str(path))


def calibration_samples(lengths: Sequence[int]) -> list[int]:
    """Which samples are measured: spread evenly, at most `CALIBRATION_TOKENS` but at least one."""
    mean = max(1, sum(lengths) // max(1, len(lengths)))
    count = max(1, min(len(lengths), CALIBRATION_TOKENS // mean))
    chosen = [i * len(lengths) // count for i in range(count)]
    tokens = 0
    kept: list[int] = []
    for index in chosen:
        tokens += lengths[index]
        if kept and tokens > CALIBRATION_TOKENS:
            break
        kept.append(index)
    return kept


def left_codec(root: Path, identity: Identity) -> Codec:
    """The codec that another worker of this build has just left."""
    if not has_channels(identity.encoding):
        return plain_codec(identity)
    path = root / CHANNELS_FILE
    return parse_codec(path.read_bytes(), identity, where=str(path))


def parse_codec(payload: bytes, identity: Identity, *, where: str) -> Codec:
    """The codec of a cache, from the bytes of its file of scales."""
    try:
        found: dict[str, Tensor] = load(payload)
    except SafetensorError as error:
        raise CacheError(f"{where}: no scales of channels ({error}); it is damaged") from None
    if set(found) != set(identity.planes):
        raise CacheError(f"{where}: scales of {sorted(found)}, want {sorted(identity.planes)}")
    return Codec(encoding=identity.encoding, channels=found, checksum=digest(payload))
