"""The plan that a build has frozen beside its units: where each sample lies, or will lie."""

from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dflash_cache.errors import CacheError
from dflash_cache.schema import Identity
from dflash_cache.unit_reader import Located, located_in

COLUMNS = ("unit", "sample_id", "length", "supervised", "group")
AGAIN = "run the same `dflash cache build` again, it writes the plan anew"


def read_plan(root: Path, identity: Identity) -> dict[str, list[Located]]:
    """The samples of every unit, in the order in which it stores them.

    Before the seal no checksum covers the file: who reads a unit compares this with its record.
    """
    path = root / "plan.parquet"
    columns = _columns(path)
    rows = zip(*(columns[name] for name in COLUMNS), strict=True)
    plan = {
        unit: located_in(unit, [row[1:] for row in rows])
        for unit, rows in groupby(rows, key=lambda row: row[0])
    }
    samples = [located for unit in plan.values() for located in unit]
    ids, tokens = {s.sample_id for s in samples}, sum(s.length for s in samples)
    if not len(ids) == len(samples) == identity.samples or tokens != identity.tokens:
        raise CacheError(
            f"{path}: plans {len(ids)} samples and {tokens} tokens, zarr.json says "
            f"{identity.samples} and {identity.tokens}; the file is damaged: {AGAIN}"
        )
    return plan


def _columns(path: Path) -> dict[str, list[Any]]:
    try:
        columns: dict[str, list[Any]] = pq.read_table(path).to_pydict()
    except FileNotFoundError:
        raise CacheError(f"{path}: missing; {AGAIN}") from None
    except (pa.ArrowException, OSError) as error:
        raise CacheError(f"{path}: cannot be read ({error}); {AGAIN}") from None
    if missing := set(COLUMNS) - set(columns):
        raise CacheError(
            f"{path}: has no {', '.join(sorted(missing))}, an earlier version wrote it; {AGAIN}. "
            "Or wait until the cache is complete: then the plan is not needed"
        )
    return columns
