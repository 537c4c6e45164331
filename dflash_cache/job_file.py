"""What rank 0 has planned, as a file that every worker reads.

The tokens lie behind the pickle as they are, and are mapped rather than read: a large data set is
then in the memory of a machine once, whatever the number of its workers.
"""

import os
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dflash_cache import disk
from dflash_cache.errors import CacheError

PATIENCE = 60.0  # seconds until a new file has to be seen by all machines


@contextmanager
def job_file(folder: Path, job: Any) -> Iterator[Path]:
    """A file with a job in it, as long as the block runs; what a killed build leaves is swept."""
    path = disk.aside(folder / "job")
    try:
        write_job(path, job)
        yield path
    finally:
        path.unlink(missing_ok=True)


def write_job(path: Path, job: Any) -> None:
    buffers: list[pickle.PickleBuffer] = []
    described = pickle.dumps(job, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    head = pickle.dumps((described, [view.nbytes for view in views]))
    with open(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little"))
        file.write(head)
        file.writelines(views)
        file.flush()
        os.fsync(file.fileno())


def read_job(path: Path) -> Any:
    """The job; its arrays are views of the file, which may be unlinked meanwhile."""
    # Copy on write: torch warns of arrays that cannot be written to.
    content = np.memmap(_awaited(path), np.uint8, mode="c").view(np.ndarray)
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    described, sizes = pickle.loads(content[8:start].tobytes())
    buffers = []
    for size in sizes:
        buffers.append(content[start : start + size])
        start += size
    return pickle.loads(described, buffers=buffers)


def _awaited(path: Path) -> Path:
    """A file that another machine has written: network shares show it a little later."""
    end = time.monotonic() + PATIENCE
    while not path.is_file():
        if time.monotonic() > end:
            raise CacheError(
                f"{path}: rank 0 wrote this file, and this machine does not see it; --out must be "
                "a folder that all machines share, under the same name"
            )
        time.sleep(0.2)
    return path
