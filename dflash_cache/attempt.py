"""The folder of one unit while it is written: states streamed, everything small at once.

Shards are written by `shard`; zarr-python supplies the metadata for other readers.

Letters: t tokens of a sample, H hidden size.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from torch import Tensor
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.storage import MemoryStore

from dflash_cache import disk
from dflash_cache.checks import Norms, unit_norms
from dflash_cache.checksums import crc32c, digest
from dflash_cache.codec import Codec
from dflash_cache.encodings import ENCODINGS, Part
from dflash_cache.layout import CHUNK_TOKENS, first_rows
from dflash_cache.samples import Sample
from dflash_cache.schema import Identity, part_of
from dflash_cache.shard import ZSTD_LEVEL, ShardWriter

WRITE_THREADS = 4  # planes written at once: one is summed while another waits for the disk
# zarr has no bfloat16 and no float8_e4m3fn: their bits go as whole numbers.
STORED: dict[torch.dtype, np.dtype[Any]] = {
    torch.bfloat16: np.dtype("<u2"),
    torch.float8_e4m3fn: np.dtype("u1"),
    torch.uint8: np.dtype("u1"),
    torch.int8: np.dtype("i1"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedSample:
    """States of one sample as they go to disk, one entry per plane of the identity."""

    parts: list[dict[str, Tensor]]  # part -> [t, H], or [t] for what is kept per token
    errors: list[Tensor]  # relative L2 error of every token, float32 [t]; empty where exact
    norms: list[list[float]] = field(default_factory=list)  # median and loudest, where measured
    slots: int = 0  # width of the padded row that it went through the target in, where it did
    release: Callable[[], None] | None = None  # called when nothing looks at the tensors any more

    def tensors(self) -> list[Tensor]:
        return [*(tensor for parts in self.parts for tensor in parts.values()), *self.errors]


def spell(states: Sequence[Tensor], planes: Sequence[str], codec: Codec) -> EncodedSample:
    """A sample spelt where its states lie."""
    parts = [codec.encode(plane, own) for plane, own in zip(planes, states, strict=True)]
    errors = [
        codec.errors(plane, own, spelt)
        for plane, own, spelt in zip(planes, states, parts, strict=True)
    ]
    return EncodedSample(parts=parts, errors=[error for error in errors if error is not None])


def encoded_sample(states: Sequence[Tensor], planes: Sequence[str], codec: Codec) -> EncodedSample:
    """A sample spelt where its states lie, then copied to the host: fewer bytes travel."""
    spelt = spell(states, planes, codec)
    return EncodedSample(
        parts=[{name: part.cpu() for name, part in parts.items()} for parts in spelt.parts],
        errors=[error.cpu() for error in spelt.errors],
    )


class Attempt:
    """The folder of one unit while it is written."""

    def __init__(self, folder: Path, identity: Identity, lengths: list[int]) -> None:
        self.folder, self.identity, self.lengths = folder, identity, lengths
        self.starts = first_rows(lengths)
        self.parts = ENCODINGS[identity.encoding].parts
        self.files: dict[str, list[int]] = {}
        self.arrays: dict[str, dict[str, Any]] = {}  # name -> what zarr has to know of it
        self.shards: dict[str, ShardWriter] = {}
        self.per_token: dict[str, list[np.ndarray]] = {}
        self.errors: dict[str, list[np.ndarray]] = {plane: [] for plane in identity.planes}
        self.norms: list[list[list[float]]] = []  # of each sample, by plane: median and loudest
        self.slots = 0

    @property
    def tokens(self) -> int:
        return self.starts[-1]

    def write_states(self, states: Iterable[EncodedSample]) -> None:
        """All planes, streamed: a sample is written while the next one is computed.

        Nothing of a sample is looked at after its `release` was called.
        """
        for plane in self.identity.planes:
            for part in self.parts:
                self._open(part_of(plane, part.name), part)
        with ThreadPoolExecutor(WRITE_THREADS, thread_name_prefix="writer") as pool:
            writing: list[Future[None]] = []
            for length, sample in zip(self.lengths, states, strict=True):
                _wait(writing)
                writing = [
                    pool.submit(self._write_plane, plane, length, parts)
                    for plane, parts in zip(self.identity.planes, sample.parts, strict=True)
                ]
                self._note(sample)
                if sample.release is not None:
                    _wait(writing)
                    sample.release()
            _wait(writing)
            list(pool.map(ShardWriter.close, self.shards.values()))
        for name, shard in self.shards.items():
            self.files[f"{name}/c/0/0"] = shard.entry
            self._write_array(f"checksums/{name}", np.array(shard.checksums, np.uint32))
        for name, pieces in self.per_token.items():
            self._write_array(name, self._on_rows(pieces))

    def _note(self, sample: EncodedSample) -> None:
        """What was measured of a sample."""
        for plane, errors in zip(self.identity.planes, sample.errors, strict=False):
            self.errors[plane].append(errors.numpy().copy())
        if sample.norms:
            self.norms.append(sample.norms)
        self.slots += sample.slots

    def _open(self, name: str, part: Part) -> None:
        if not part.per_channel:
            self.per_token[name] = []
            return
        width, stored = self.identity.hidden_size, STORED[part.dtype]
        path = self.folder / name / "c" / "0" / "0"
        path.parent.mkdir(parents=True)
        self.shards[name] = ShardWriter(
            path, row_bytes=width * stored.itemsize, compressed=part.compressed
        )
        self.arrays[name] = {
            "shape": (self.tokens, width),
            "shards": (self.tokens, width),
            "chunks": (CHUNK_TOKENS, width),
            "dtype": stored,
            "compressors": [*([ZstdCodec(level=ZSTD_LEVEL)] * part.compressed), Crc32cCodec()],
            "attributes": {"logical_dtype": part.logical_dtype},
            "dimension_names": ["token", "hidden"],
        }

    def _write_plane(self, plane: str, length: int, parts: dict[str, Tensor]) -> None:
        for part in self.parts:
            name, values = part_of(plane, part.name), parts[part.name].contiguous()
            assert len(values) == length, (name, len(values), length)
            if part.per_channel:
                self.shards[name].write(values.view(torch.uint8).numpy())
            else:
                self.per_token[name].append(values.numpy().copy())

    def write_tokens(self, samples: Sequence[Sample]) -> None:
        ids = [sample.input_ids.astype(np.int32) for sample in samples]
        masks = [sample.loss_mask.astype(np.uint8) for sample in samples]
        self._write_array("input_ids", self._on_rows(ids))
        self._write_array("loss_mask", self._on_rows(masks))

    def _on_rows(self, pieces: Sequence[np.ndarray]) -> np.ndarray:
        """Values per token, each sample at its first row, zeros between."""
        values = np.zeros(self.tokens, pieces[0].dtype)
        for start, piece in zip(self.starts, pieces, strict=False):
            values[start : start + len(piece)] = piece
        return values

    def _write_array(self, name: str, values: np.ndarray) -> None:
        """A small array as one chunk: its bytes and their checksum."""
        payload = values.tobytes()
        self._write_file(f"{name}/c/0", payload + struct.pack("<I", crc32c(payload)))
        self.arrays[name] = {
            "shape": values.shape,
            "chunks": values.shape,
            "dtype": values.dtype,
            "compressors": [Crc32cCodec()],
            "attributes": {},
            "dimension_names": ["chunk" if name.startswith("checksums/") else "token"],
        }

    def write_metadata(self) -> None:
        """What zarr libraries want to find; our own reader needs none of it."""
        found: dict[str, Any] = {}
        group = zarr.create_group(MemoryStore(found), zarr_format=3)
        for name, described in self.arrays.items():
            group.create_array(name, fill_value=0, **described)
        for name, payload in found.items():
            self._write_file(name, payload.to_bytes())

    def _write_file(self, name: str, payload: bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.write_durably(path, payload)
        self.files[name] = [len(payload), digest(payload)]

    def encoding_error(self) -> dict[str, dict[str, float]]:
        """Relative L2 error of a token, by plane: median and 99th percentile over the unit."""
        found = {plane: np.concatenate(e) for plane, e in self.errors.items() if e}
        return {
            plane: {
                "median": float(np.median(errors)),
                "p99": float(np.quantile(errors, 0.99)),
            }
            for plane, errors in found.items()
        }

    def unit_norms(self) -> Norms:
        """Norms of the samples' tokens, by plane; empty where they were not measured."""
        return unit_norms(np.array(self.norms), self.identity.planes) if self.norms else {}

    def folders(self) -> list[Path]:
        """Every folder of the attempt, innermost first."""
        inside = [path for path in self.folder.rglob("*") if path.is_dir()]
        return [*sorted(inside, key=lambda path: -len(path.parts)), self.folder]

    def abandon(self) -> None:
        for shard in self.shards.values():
            shard.abandon()


def _wait(writing: Iterable[Future[None]]) -> None:
    for future in writing:
        future.result()
