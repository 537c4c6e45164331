"""The weights of a folder as they lie there: by name, and not read before they are wanted."""

import json
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor

from dflash_cache.errors import TargetError


class Files:
    """Weight files, opened when the first tensor of each is wanted."""

    def __init__(self) -> None:
        self.handles: dict[Path, Any] = {}
        self.lock = Lock()  # threads of transformers read at once

    def open(self, path: Path) -> Any:
        from safetensors import safe_open

        with self.lock:
            if path not in self.handles:
                self.handles[path] = safe_open(path, framework="pt", device="cpu")
            return self.handles[path]


class StoredTensor:
    """A tensor that is read, whole or in part, when it is indexed: what transformers expects."""

    def __init__(self, files: Files, path: Path, name: str) -> None:
        self.files, self.path, self.name = files, path, name

    def _slice(self) -> Any:
        return self.files.open(self.path).get_slice(self.name)

    def get_shape(self) -> list[int]:
        shape: list[int] = self._slice().get_shape()
        return shape

    def get_dtype(self) -> str:
        dtype: str = self._slice().get_dtype()
        return dtype

    def __getitem__(self, where: Any) -> Tensor:
        """A view of the mapped file, not a copy."""
        tensor: Tensor = self._slice()[where]
        return tensor


def stored_tensors(folder: Path) -> dict[str, StoredTensor | Tensor]:
    """The tensors of a folder by the names that they have there; none is read yet.

    The order in which files are looked for is transformers' own.  A folder may hold the same
    weights a second time under other names, which must not be taken.
    """
    files = Files()
    if (path := folder / "model.safetensors").is_file():
        return {name: StoredTensor(files, path, name) for name in files.open(path).keys()}  # noqa: SIM118
    if (path := folder / "model.safetensors.index.json").is_file():
        return {
            name: StoredTensor(files, folder / file, name)
            for name, file in weight_map(path).items()
        }
    if (path := folder / "pytorch_model.bin").is_file():
        return pickled_tensors(path)
    if (path := folder / "pytorch_model.bin.index.json").is_file():
        parts = sorted(set(weight_map(path).values()))
        return {k: v for part in parts for k, v in pickled_tensors(folder / part).items()}
    raise TargetError(
        f"{folder}: found no model.safetensors, pytorch_model.bin or index of several such files; "
        "is the folder complete?"
    )


def weight_map(path: Path) -> dict[str, str]:
    """Names of tensors and the files that hold them, from an index."""
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        return {str(k): str(v) for k, v in json.loads(path.read_text())["weight_map"].items()}
    raise TargetError(f"{path}: want an index with a weight_map; is the file whole?")


def pickled_tensors(path: Path) -> dict[str, StoredTensor | Tensor]:
    """The tensors of a .bin file: mapped, except in the form that torch wrote before 1.6."""
    tensors: dict[str, StoredTensor | Tensor] = torch.load(
        path, map_location="cpu", weights_only=True, mmap=is_zipfile(path)
    )
    return tensors
