"""Read a sealed cache: tokens by sample, hidden states by sample and target layer.

Letters: K target layers, t tokens of a sample, H hidden size, V rows of the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from safetensors import SafetensorError, safe_open
from torch import Tensor
from zarr.storage import LocalStore

from dflash_cache.errors import CacheError
from dflash_cache.ledger import committed_units, read_manifest
from dflash_cache.schema import EMBEDDING, HEAD, Identity, UnitRecord


@dataclass(frozen=True, kw_only=True)
class Located:
    """Where one sample lies."""

    sample_id: int
    length: int
    supervised: int
    group: str
    unit: str
    start: int


class CacheReader:
    """A sealed cache, opened for reading.  Samples are numbered 0.. in order of their ids.

    Everything is checked on the way: file sizes against the commit record when a unit is first
    touched, checksums by zarr on every chunk.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self.manifest = read_manifest(self.root)
        self.identity = Identity.from_dict(self.manifest.identity, where=str(self.root))
        self.records = committed_units(self.root, fingerprint=self.identity.fingerprint)
        self.located = sorted(
            (located for record in self.records.values() for located in _locate(record)),
            key=lambda located: located.sample_id,
        )
        self.lengths = [located.length for located in self.located]
        ids = [located.sample_id for located in self.located]
        if len(set(ids)) != len(ids) or len(ids) != self.manifest.samples:
            raise CacheError(
                f"{self.root}: the records name {len(set(ids))} samples, the manifest "
                f"{self.manifest.samples}; commit records are missing or doubled"
            )
        self._unit = lru_cache(maxsize=64)(self._open_unit)

    def _open_unit(self, unit: str) -> "UnitReader":
        record = self.records[unit]
        folder = self.root / record.folder
        for name, size in record.files.items():
            path = folder / name
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                raise CacheError(
                    f"{path}: {'missing' if found is None else f'{found} bytes'}, the commit "
                    f"record says {size}; {_mend(self.root, unit)}"
                )
        return UnitReader(unit, folder)

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int32 [t] and loss mask bool [t] of a sample."""
        located = self.located[index]
        unit = self._unit(located.unit)
        rows = slice(located.start, located.start + located.length)
        return unit.read("input_ids", rows), unit.read("loss_mask", rows).astype(bool)

    def read_hidden(self, index: int, layer_id: int, into: Tensor) -> None:
        """Copy the states of a sample and target layer into `into`, bfloat16 [t, H]."""
        located = self.located[index]
        rows = slice(located.start, located.start + located.length)
        states = self._unit(located.unit).read(f"hidden/{layer_id}", rows)
        if states.dtype != np.uint16 or states.shape != tuple(into.shape):
            raise CacheError(
                f"{self.root}, target layer {layer_id}: found {states.dtype} {states.shape}, want "
                f"uint16 {tuple(into.shape)}; {_mend(self.root, located.unit)}"
            )
        into.view(torch.uint16).numpy()[...] = states

    def hidden(self, index: int, layer_ids: Sequence[int]) -> Tensor:
        """States of a sample, bfloat16 [K, t, H]."""
        shape = (len(layer_ids), self.located[index].length, self.identity.hidden_size)
        states = torch.empty(shape, dtype=torch.bfloat16)
        for k, layer_id in enumerate(layer_ids):
            self.read_hidden(index, layer_id, states[k])
        return states

    def frozen(self) -> tuple[Tensor, Tensor]:
        """Token embedding and LM head, bfloat16 [V, H]; one tensor twice where they are tied."""
        path = self.root / "frozen.safetensors"
        try:
            with safe_open(path, "pt") as file:
                embedding = file.get_tensor(EMBEDDING)
                head = embedding if self.identity.target_spec.tied_head else file.get_tensor(HEAD)
        except (OSError, SafetensorError) as error:
            raise CacheError(
                f"{path}: missing or damaged ({error}). Delete it and "
                f"{self.root / 'manifest.json'} and run `dflash cache build` again"
            ) from None
        return embedding, head


class UnitReader:
    """One committed unit, its zarr arrays opened once."""

    def __init__(self, unit: str, folder: Path) -> None:
        self.unit, self.folder = unit, folder
        self.arrays: dict[str, Any] = {}

    def read(self, name: str, rows: slice) -> np.ndarray:
        """Rows of an array; a checksum or metadata that do not fit are an error of the cache."""
        try:
            if name not in self.arrays:
                store = LocalStore(self.folder, read_only=True)
                self.arrays[name] = zarr.open_array(store, path=name, mode="r")
            values: np.ndarray = self.arrays[name][rows]
        except (ValueError, LookupError, TypeError) as error:
            raise CacheError(
                f"{self.folder / name}, tokens {rows.start} to {rows.stop}: {error}; "
                f"{_mend(self.folder.parents[2], self.unit)}"
            ) from None
        return values


def _mend(root: Path, unit: str) -> str:
    return (
        f"unit {unit} is damaged. Delete {root / 'commits' / f'{unit}.json'} and "
        f"{root / 'manifest.json'} and run `dflash cache build` again: it extracts that unit anew"
    )


def _locate(record: UnitRecord) -> list[Located]:
    columns = zip(
        record.sample_ids,
        record.lengths,
        record.supervised,
        record.groups,
        record.starts,
        strict=True,
    )
    return [
        Located(
            sample_id=sample_id,
            length=length,
            supervised=supervised,
            group=group,
            unit=record.unit,
            start=start,
        )
        for sample_id, length, supervised, group, start in columns
    ]
