"""Read a cache that is still being built.

All its samples are known from the plan; which of them can be read, the commit records say, and
nothing else does.
"""

import sys
import time
from pathlib import Path

from tqdm import tqdm

from dflash_cache.encodings import ENCODINGS
from dflash_cache.errors import CacheError
from dflash_cache.files import file_entry, is_url
from dflash_cache.layout import CHUNK_TOKENS, RawPlane
from dflash_cache.ledger import (
    in_commit_order,
    read_identity,
    read_manifest,
    record_name,
    recorded_units,
    sealed_units,
    totals,
    unit_record,
)
from dflash_cache.planned import read_plan
from dflash_cache.presence import Presence
from dflash_cache.reader import READ_THREADS, CacheReader, Reader, refuse_other_scales
from dflash_cache.schema import CHANNELS_FILE, Identity, Manifest, UnitRecord
from dflash_cache.unit_reader import UnitReader, damaged_file, locate

FIRST = ("zarr.json", "plan.parquet", "frozen.safetensors")  # there before the first unit
NOBODY_BEGINS = 60.0  # seconds in which a build should have been started
NOBODY_GOES_ON = 10.0  # seconds in which one that has ended may be started again
SAY_EVERY = 30.0
LOOK_EVERY = 0.5


class GrowingReader(Reader):
    """The committed units of a cache that need not be sealed yet; `refresh` looks for more.

    Samples have the numbers that they have in the sealed cache.  To read one whose unit is not
    committed is a mistake of the caller's.
    """

    def __init__(
        self, root: str | Path, *, direct: bool | None = None, threads: int = READ_THREADS
    ) -> None:
        identity = read_identity(root)
        self._bytes_per_token = plane_bytes(identity)
        size = self._bytes_per_token * len(identity.planes) * identity.tokens
        super().__init__(root, identity, size=size, direct=direct, threads=threads)
        self.folder = Path(root)
        self.plan = read_plan(self.folder, identity)
        self._place(located for unit in self.plan.values() for located in unit)
        self.records: dict[str, UnitRecord] = {}
        self.manifest: Manifest | None = None
        self._believed: dict[str, list[int]] = {}  # files read before the seal knew them

    @property
    def sealed(self) -> bool:
        return self.manifest is not None

    @property
    def state_bytes_per_token(self) -> float:
        """Of what is committed; before the first unit what the encoding takes uncompressed."""
        return self._bytes_per_token

    def refresh(self) -> list[str]:
        """Units committed since the last call, in the order of their commits.

        One thread looks while others read.  After an error nothing has been taken up.
        """
        # Looked for before the records: behind the seal all of them are there.
        manifest = self.manifest or self._find_seal()
        fresh = [unit for unit in recorded_units(self.folder) if unit not in self.records]
        if not fresh and manifest is self.manifest:
            return []
        found = {unit: self._checked_record(unit) for unit in fresh}
        ordered = in_commit_order(self.folder, fresh)
        records = {**self.records, **{unit: found[unit] for unit in ordered}}
        self._refuse_mixed_scales(records)
        if manifest is not None and self.manifest is None:
            self._check_seal(manifest, records)
        held = totals(records.values())
        self._bytes_per_token = held["bytes"] / held["tokens"] / len(self.identity.planes)
        self.records, self.manifest = records, manifest
        return ordered

    def _find_seal(self) -> Manifest | None:
        return read_manifest(self.root) if is_sealed(self.folder) else None

    def _checked_record(self, unit: str) -> UnitRecord:
        record = unit_record(self.files, unit, self.identity.fingerprint)
        if self.plan.get(unit) != locate(record):
            raise damaged_file(
                self.files, record_name(unit), "not what plan.parquet has planned for this unit"
            )
        return record

    def _refuse_mixed_scales(self, records: dict[str, UnitRecord]) -> None:
        checksums = {record.channels_checksum for record in records.values()}
        if len(checksums) > 1:
            raise damaged_file(
                self.files, "commits", f"its units are spelt with {len(checksums)} sets of scales"
            )

    def _check_seal(self, manifest: Manifest, records: dict[str, UnitRecord]) -> None:
        """What was read before must be what the seal knows."""
        if manifest.fingerprint != self.identity.fingerprint or manifest.units != len(self.plan):
            raise CacheError(
                f"{self.root}: another cache than before was sealed here; start a run of its own"
            )
        for name, entry in self._believed.items():
            if manifest.files.get(name) != entry:
                raise damaged_file(self.files, name, "read before the seal, which knows another")
        sealed = sealed_units(self.files, manifest)
        refuse_other_scales(self.files, manifest, sealed)
        for unit, record in sealed.items():
            if records.get(unit) != record:
                raise CacheError(
                    f"{self.files.where}/{record_name(unit)}: written anew while its unit was in "
                    "use; run the same command again, it goes on with what is there now"
                )

    def _open_unit(self, unit: str) -> UnitReader:
        assert unit in self.records, f"{unit} is not committed"
        return super()._open_unit(unit)

    def _entry(self, name: str) -> list[int]:
        """What the seal says; before it what the units say of scales, otherwise what is there."""
        if self.manifest is not None:
            return self.manifest.files[name]
        if name == CHANNELS_FILE:
            return self._entry_of_scales()
        try:
            return self._believed.setdefault(name, file_entry(self.folder / name))
        except FileNotFoundError:
            raise damaged_file(self.files, name, "missing") from None

    def _entry_of_scales(self) -> list[int]:
        """Scales are measured anew as long as there is no unit."""
        assert self.records, "no unit is committed, so there are no scales yet"
        checksum = next(iter(self.records.values())).channels_checksum
        assert checksum is not None, self.identity.encoding
        return [self.files.size(CHANNELS_FILE) or 0, checksum]


def plane_bytes(identity: Identity) -> float:
    """Bytes of one plane of a token, nothing compressed and without what its last chunk lacks."""
    size = 0.0
    for part in ENCODINGS[identity.encoding].parts:
        row = part.dtype.itemsize * (identity.hidden_size if part.per_channel else 1)
        size += RawPlane(row_bytes=row).stride / CHUNK_TOKENS if part.per_channel else row
    return size


def is_sealed(root: Path) -> bool:
    return (root / "manifest.json").is_file()


def open_cache(root: str | Path, *, follow: bool) -> Reader:
    """A cache to train on: a sealed one, or with `follow` also one that is still being built.

    A build that has not planned its units yet is waited for, and so is one that is about to be
    started; a wait is told on stderr.
    """
    if not follow:
        return CacheReader(root)
    if is_url(root):
        raise CacheError(
            f"{root}: a cache is followed in the folder where it is built, not at a URL; drop "
            "--follow, or give the folder"
        )
    await_begun(Path(root))
    return CacheReader(root) if is_sealed(Path(root)) else GrowingReader(root)


def await_begun(
    root: Path,
    *,
    patience: float = NOBODY_BEGINS,
    every: float = LOOK_EVERY,
) -> None:
    """Wait until a build has left all that is needed before its first unit.

    As long as somebody builds, however long that takes; `patience` seconds for somebody to begin.
    """
    presence, told = Presence(root), None
    while not (is_sealed(root) or all((root / name).is_file() for name in FIRST)):
        who, now = presence.look(), time.monotonic()
        if who is None and presence.absence > patience:
            raise CacheError(
                f"{root}: nothing to follow: no cache is begun here, and for {patience:g} seconds "
                "nobody has been building one; start `dflash cache build`, then this again"
            )
        if told is None or now - told >= SAY_EVERY:
            begins = f"{who} to plan its units" if who else "`dflash cache build` to be started"
            tqdm.write(f"{root}: waiting for {begins}", file=sys.stderr)
            told = now
        time.sleep(every)
