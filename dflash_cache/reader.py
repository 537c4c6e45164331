"""Read a cache: tokens by sample, hidden states by sample, token range and target layer.

Bytes go from the disk into the caller's buffers as they are spelt; `encodings` widens them on the
device.  Whatever is read is checked against the commit record: damage is an error, never data.

Letters: K planes (target layers) asked for, T rows of the buffers, t tokens of a sample, H hidden
size, V rows of the vocabulary.
"""

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor

from dflash_cache.buffers import Buffers, buffers
from dflash_cache.codec import Codec, has_channels, parse_codec
from dflash_cache.disk import aside, fsync_path, write_file
from dflash_cache.encodings import decode
from dflash_cache.errors import CacheError
from dflash_cache.files import Files, file_entry, is_url, open_files
from dflash_cache.layout import CHUNK_TOKENS
from dflash_cache.ledger import in_commit_order, read_manifest, record_name, sealed_units
from dflash_cache.schema import (
    CHANNELS_FILE,
    EMBEDDING,
    HEAD,
    Identity,
    Manifest,
    UnitRecord,
    plane_of,
)
from dflash_cache.unit_reader import (
    Located,
    UnitReader,
    checked,
    damaged_file,
    locate,
    read_plane,
    row_of,
)

READ_THREADS = 4
UNITS_KEPT = 512  # whose tokens and checksums stay in memory
# A cache that is small against the memory is better read through the page cache: the second
# epoch then comes from memory.  A larger one would only push everything else out of it.
SHARE_OF_MEMORY = 0.5
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # containers may have less than the machine


class Reader(ABC):
    """Samples of a cache, by number: 0.. in order of their ids.

    What a sealed cache and one that is still being built have in common.  `records` are those of
    the units that can be read.
    """

    records: dict[str, UnitRecord]
    located: list[Located]
    lengths: list[int]

    def __init__(
        self,
        root: str | Path,
        identity: Identity,
        *,
        size: float,
        direct: bool | None,
        threads: int,
    ) -> None:
        self.root, self.identity = root, identity
        self.direct = outgrows_memory(size) if direct is None else direct
        self.files = open_files(root, direct=self.direct and not is_url(root))
        self.bytes_read = 0  # of states, as stored
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="read")
        self._unit = lru_cache(maxsize=UNITS_KEPT)(self._open_unit)
        self._codec = cache(self._read_codec)

    @property
    @abstractmethod
    def sealed(self) -> bool:
        """Whether the cache is complete, as far as this reader has looked."""

    @property
    @abstractmethod
    def state_bytes_per_token(self) -> float:
        """Bytes on disk of one plane of a token, on average."""

    @abstractmethod
    def refresh(self) -> list[str]:
        """Units that can be read since the last call, in the order of their commits."""

    @abstractmethod
    def _entry(self, name: str) -> list[int]:
        """Size and checksum of a file beside the units."""

    def _place(self, located: Iterable[Located]) -> None:
        """Number the samples."""
        self.located = sorted(located, key=lambda located: located.sample_id)
        self.lengths = [located.length for located in self.located]

    def open_units(self, documents: Sequence[int]) -> None:
        """Fetch what is small of the units of these samples, all at once: they may be far away."""
        units = {self.located[document].unit for document in documents}
        list(self._pool.map(lambda unit: self._unit(unit).open(), sorted(units)))

    def _open_unit(self, unit: str) -> UnitReader:
        reader = UnitReader(self.files, self.records[unit], self.identity)
        reader.check_sizes()
        return reader

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int32 [t] and loss mask bool [t] of a sample."""
        located = self.located[index]
        unit = self._unit(located.unit)
        rows = slice(located.start, located.start + located.length)
        ids = unit.array("input_ids", "<i4")[rows].copy()  # the array itself stays as it is
        return ids, unit.array("loss_mask", "u1")[rows] != 0

    def read_documents(
        self,
        documents: Sequence[int],
        starts: Sequence[int],
        layer_ids: Sequence[int | str],
        into: Buffers,
        *,
        order: tuple[int, int] | None = None,
    ) -> None:
        """Read samples into `into`, each from its row of `starts` on; parallel, and checked.

        `layer_ids` are K target layers, or FINAL_HIDDEN.  The rest of the buffers is left alone.
        `order` is epoch and number of the pack that these samples are in a training; a reader that
        several trainings share goes by it.
        """
        planes = [self._plane(layer_id) for layer_id in layer_ids]
        tasks = [
            (self._unit(located.unit), located, plane, {
                name: part[k, start : start + located.length] for name, part in into.items()
            })
            for located, start in zip((self.located[d] for d in documents), starts, strict=True)
            for k, plane in enumerate(planes)
        ]  # fmt: skip
        # Large ones first, so that the threads end together.
        tasks.sort(key=lambda task: -task[1].length)
        for size in self._pool.map(lambda task: read_plane(*task), tasks):
            self.bytes_read += size

    def _plane(self, layer_id: int | str) -> str:
        plane = plane_of(layer_id) if isinstance(layer_id, int) else layer_id
        if plane not in self.identity.planes:
            raise CacheError(
                f"{self.root}: does not hold {plane}; it holds {', '.join(self.identity.planes)}"
            )
        return plane

    def hidden(
        self, index: int, layer_ids: Sequence[int | str], rows: slice = slice(None)
    ) -> Tensor:
        """States of a sample, bfloat16 [K, t, H]; of a range of its tokens if `rows` says so.

        Reads the chunks that hold the range, and no others.
        """
        located = self.located[index]
        begin, end, step = rows.indices(located.length)
        assert step == 1, rows
        before = begin % CHUNK_TOKENS
        part = replace(
            located, start=located.start + begin - before, length=max(0, end - begin) + before
        )
        into = buffers(self.identity, len(layer_ids), part.length)
        unit = self._unit(located.unit)
        for k, layer_id in enumerate(layer_ids):
            self.bytes_read += read_plane(unit, part, self._plane(layer_id), row_of(into, k))
        channels = self.channels(layer_ids)
        wide = None if channels is None else channels[:, None]
        return decode(self.identity.encoding, into, wide)[:, before:]

    def channels(self, layer_ids: Sequence[int | str]) -> Tensor | None:
        """Static scales float32 [K, H] of the encoding; None where it has none."""
        if not has_channels(self.identity.encoding):
            return None
        codec = self._codec()
        return torch.stack([codec.channels[self._plane(layer_id)] for layer_id in layer_ids])

    def _read_codec(self) -> Codec:
        name = CHANNELS_FILE
        payload = checked(self.files, name, self._entry(name))
        return parse_codec(payload, self.identity, where=f"{self.root}/{name}")

    def frozen(self) -> tuple[Tensor, Tensor]:
        """Token embedding and LM head, bfloat16 [V, H]; one tensor twice where they are tied."""
        name = "frozen.safetensors"
        try:
            tensors = self._tensors(name, self._entry(name))
            embedding = tensors[EMBEDDING]
            head = embedding if self.identity.target_spec.tied_head else tensors[HEAD]
        except (SafetensorError, KeyError) as error:
            raise damaged_file(self.files, name, f"no frozen weights ({error})") from None
        return embedding, head

    def _tensors(self, name: str, entry: list[int]) -> dict[str, Tensor]:
        if is_url(self.root):
            found: dict[str, Tensor] = load(checked(self.files, name, entry))
            return found
        path = Path(self.root) / name
        if not path.is_file() or file_entry(path) != entry:  # summed piece by piece: it is large
            raise damaged_file(
                self.files, name, "missing, or its checksum does not fit its content"
            )
        tensors: dict[str, Tensor] = load_file(path)
        return tensors


class CacheReader(Reader):
    """A sealed cache, opened for reading.  Samples are numbered 0.. in order of their ids.

    `root` is a folder or a URL.  `direct` reads past the page cache; None decides by the sizes of
    cache and memory.
    """

    sealed = True

    def __init__(
        self, root: str | Path, *, direct: bool | None = None, threads: int = READ_THREADS
    ) -> None:
        self.manifest = read_manifest(root)
        identity = Identity.from_dict(self.manifest.identity, where=str(root))
        super().__init__(root, identity, size=self.manifest.bytes, direct=direct, threads=threads)
        self.records = sealed_units(self.files, self.manifest)
        self._place(located for record in self.records.values() for located in locate(record))
        ids = {located.sample_id for located in self.located}
        if len(ids) != len(self.located) or len(ids) != self.manifest.samples:
            raise CacheError(
                f"{self.root}: the records name {len(ids)} samples, the manifest "
                f"{self.manifest.samples}; commit records are missing or doubled"
            )
        refuse_other_scales(self.files, self.manifest, self.records)
        self._fresh = list(self.records)

    @property
    def state_bytes_per_token(self) -> float:
        return self.manifest.bytes / self.manifest.tokens / len(self.identity.planes)

    def refresh(self) -> list[str]:
        """All units, in the order of their commits, at the first call; none later."""
        if is_url(self.root):
            raise CacheError(
                f"{self.root}: at a URL nothing says in which order units were committed; give "
                "the folder of a cache"
            )
        fresh, self._fresh = self._fresh, []
        return in_commit_order(Path(self.root), fresh)

    def _entry(self, name: str) -> list[int]:
        return self.manifest.files[name]

    def copy_file(self, name: str, to: Path) -> None:
        """Copy a file that the seal knows, checked, aside and renamed."""
        entry = self.manifest.files[name]
        if is_url(self.root):
            write_file(to, checked(self.files, name, entry))
            return
        path, partial = Path(self.root) / name, aside(to)
        if not path.is_file():
            raise damaged_file(self.files, name, "missing")
        try:
            shutil.copyfile(path, partial)
            if file_entry(partial) != entry:
                raise damaged_file(self.files, name, "its checksum does not fit its content")
            fsync_path(partial)
            partial.rename(to)
        finally:
            partial.unlink(missing_ok=True)
        fsync_path(to.parent)


def refuse_other_scales(
    files: Files, manifest: Manifest, records: Mapping[str, UnitRecord]
) -> None:
    """All units must be spelt with the scales that the seal knows."""
    if CHANNELS_FILE in manifest.files:
        sealed = manifest.files[CHANNELS_FILE][1]
        for unit, record in records.items():
            if record.channels_checksum != sealed:
                raise damaged_file(
                    files, record_name(unit), "spelt with other scales than the others"
                )


def outgrows_memory(size: float) -> bool:
    """Whether so many bytes are better not read through the page cache."""
    return size > SHARE_OF_MEMORY * memory_here()


def memory_here() -> int:
    """Bytes of memory of this machine, or of the container."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no control group, or one without a limit ("max")
        memory = min(memory, int(CGROUP_LIMIT.read_text()))
    return memory
