"""How fast the feed delivers packs, beside raw reads of the same files: cold, warm, and with a
thread that keeps the interpreter busy.

A simulated cache, packs of the shape that users have.  The caller does nothing but ask for the
next batch; where there is a GPU, batches are on it when they are counted.  `reader_over_raw` is
the feed from a cold disk over the quicker of two raw O_DIRECT readers of the same files, round by
round.  GB are 10^9 bytes, as the cache stores them.
"""

import os
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from bench_store import make_cold, may_drop_caches
from common import add_out, end_on_sigterm, publish, result, spread, timed
from store_data import BUCKET_EDGES, Data, page_aligned
from store_ways import BLOCK, LONG_BLOCK, hidden_files, read_raw, write_ours

from dflash_cache.buckets import plan_units
from dflash_cache.config import BuildConfig
from dflash_cache.layout import ALIGNMENT, round_up
from dflash_cache.reader import CacheReader
from dflash_fit.batch import Batch, BatchShape
from dflash_fit.course import Position
from dflash_fit.feed import CPU, Feed
from dflash_fit.loader import PackSource
from dflash_fit.roofline import Counts
from dflash_fit.slot import empty_passes

BEGAN = time.monotonic()
START = Position(epoch=0, index=0)
SCRATCH = bytearray(BLOCK)


def main() -> None:
    args = parse_args()
    end_on_sigterm()
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory(prefix="bench_feed.", dir=args.folder) as folder:
        root = make_cache(Path(folder) / "cache", args)
        figures = fill_figures(root, args)
        figures |= rate_figures(root, args, device)
        publish(result("feed", shape_of(args, root, device), figures, folder=root), args.out)


def parse_args() -> Namespace:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_cache_options(parser)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of which medians are taken")
    parser.add_argument("--threads", type=int, default=4, help="threads of the raw readers")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where packs go"
    )
    add_out(parser)
    return parser.parse_args()


def add_cache_options(parser: ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=190_000, help="tokens of all samples")
    parser.add_argument("--layers", type=int, default=5, help="target layers")
    parser.add_argument("--hidden", type=int, default=5120, help="channels of a layer")
    parser.add_argument("--encoding", default="bf16", help="of the cache")
    parser.add_argument("--token-budget", type=int, default=49_152, help="slots of a pack")
    parser.add_argument("--anchors", type=int, default=2048, help="anchors of a pack")
    parser.add_argument(
        "--folder", type=Path, default=Path("/var/tmp"), help="a folder on the disk to measure"
    )


def make_cache(root: Path, args: Namespace) -> Path:
    """A sealed cache of simulated samples."""
    # `write_tokens`: nothing but the cache is written here.
    data = Data(Namespace(**{**vars(args), "write_tokens": 0}))
    say(f"writing {data.bytes / 1e9:.1f} GB (as bf16)")
    plans = plan_units(data.lengths, edges=BUCKET_EDGES, unit_tokens=BuildConfig.unit_tokens)
    write_ours(root, data, plans, args.encoding, states=data.states)
    return root


def open_source(
    root: Path, args: Namespace, *, direct: bool, passes: int = 1, seed: int = 0
) -> PackSource:
    """The packs of a simulated cache."""
    reader = CacheReader(root, direct=direct)
    shape = BatchShape(
        target_layers=args.layers,
        token_budget=args.token_budget,
        hidden_size=args.hidden,
        anchors=args.anchors,
        block_size=16,
        encoding=args.encoding,
    )
    ids = list(range(args.layers))
    documents = range(len(reader.lengths))
    return PackSource(reader, documents, layer_ids=ids, shape=shape, seed=seed, passes=passes)


def shape_of(args: Namespace, root: Path, device: torch.device) -> dict[str, object]:
    source = open_source(root, args, direct=False)
    return {
        "tokens": args.tokens,
        "layers": args.layers,
        "hidden": args.hidden,
        "encoding": args.encoding,
        "samples": len(source.documents),
        "token_budget": args.token_budget,
        "packs": source.steps(1),
        "anchors": args.anchors,
        "rounds": args.rounds,
        "threads": args.threads,
        "on": device.type,
        "cold_by": "drop_caches" if may_drop_caches() else "fadvise",
    }


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:4.0f} s] {text}", file=sys.stderr, flush=True)


def raw_rate(root: Path, *, threads: int, flags: int = os.O_DIRECT) -> float:
    """GB/s at which the files of the states can be read, whole, one after the other.

    The quicker of two block sizes; past the page cache, or with flags 0 from it.
    """
    files = hidden_files(root)
    size = sum(path.stat().st_size for path in files)
    room = size + (len(files) + size // BLOCK) * ALIGNMENT
    memory = np.frombuffer(page_aligned(round_up(room, ALIGNMENT)), np.uint8)
    memory.fill(0)  # touches every page

    def seconds(block: int) -> float:
        if flags:
            make_cold(files)
        with ThreadPoolExecutor(threads) as pool:
            began = time.perf_counter()
            read_raw(files, memory, pool, flags=flags, block=block)
            return time.perf_counter() - began

    return size / 1e9 / min(seconds(BLOCK), seconds(LONG_BLOCK))


def make_warm(files: Sequence[Path]) -> None:
    """All of `files` is in the page cache, as far as it fits."""
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(SCRATCH):
                pass


def run_feed(
    source: PackSource,
    *,
    steps: int,
    device: torch.device,
    each: Callable[[Batch], object] = lambda batch: None,
) -> tuple[Counts, float]:
    """What a feed counts in so many steps, and their seconds; `each` is the step.

    Memory is made before the clock starts; the first pack is read after it.
    """
    with Feed(source, START, steps=steps, device=device) as feed:
        synchronize(device)
        began = time.perf_counter()
        for batch, *_ in feed:
            each(batch)
            feed.release()
        synchronize(device)
        return feed.counts(), time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def spinning(active: bool) -> Iterator[None]:
    """A thread that computes in Python and gives the interpreter away only when it is told to."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(100))

    spinner = threading.Thread(target=spin)
    if active:
        spinner.start()
    try:
        yield
    finally:
        stop.set()
        if active:
            spinner.join()


def fill_figures(root: Path, args: Namespace) -> dict[str, float]:
    """Seconds a pack takes from the page cache: filling it, and what of that is not reading."""
    source = open_source(root, args, direct=False)
    reader, (batch,) = source.reader, empty_passes(source.shape, passes=1, device=CPU)
    positions = [Position(epoch=0, index=index) for index in range(source.steps(1))]
    make_warm(hidden_files(root))
    source.fill(batch, positions[0])  # opens units, touches memory

    def read(position: Position) -> None:
        pack = source.pack_of(position, 0)
        reader.read_documents(pack.documents, pack.starts, source.layer_ids, batch.parts)

    def fill(position: Position) -> None:
        source.fill(batch, position)

    def each(action: Callable[[Position], None]) -> list[float]:
        return [timed(lambda p=position: action(p)).seconds for position in positions]

    figures = spread("fill_seconds_per_pack", each(fill)) | spread(
        "read_seconds_per_pack", each(read)
    )
    with mock.patch.object(reader, "read_documents"):
        figures |= spread("fill_without_reading_seconds_per_pack", each(fill))
    return figures


def rate_figures(root: Path, args: Namespace, device: torch.device) -> dict[str, float]:
    """GB/s of raw readers and of the feed, cold and warm, in rounds that go to and fro."""
    files = hidden_files(root)
    rates: dict[str, list[float]] = {}
    for number in range(args.rounds):
        kinds = [*product(("cold", "warm"), ("raw", "feed", "feed_spinning"))]
        for temperature, kind in kinds if number % 2 == 0 else kinds[::-1]:
            direct = temperature == "cold"
            make_cold(files) if direct else make_warm(files)
            if kind == "raw":
                rate = raw_rate(root, threads=args.threads, flags=os.O_DIRECT * direct)
            else:
                source = open_source(root, args, direct=direct)
                with spinning(kind == "feed_spinning"):
                    counts, seconds = run_feed(source, steps=source.steps(1), device=device)
                rate = counts.delivered / 1e9 / seconds
            say(f"round {number + 1} {kind:14} {temperature} {rate:6.2f} GB/s")
            rates.setdefault(f"{kind}_{temperature}", []).append(rate)
    figures: dict[str, float] = {}
    for name, values in rates.items():
        figures |= spread(f"{name}_gb_s", values)
    return (
        figures
        | over("reader_over_raw", rates["feed_cold"], rates["raw_cold"])
        | over("reader_over_raw_warm", rates["feed_warm"], rates["raw_warm"])
        | over("spinning_over_quiet_cold", rates["feed_spinning_cold"], rates["feed_cold"])
        | over("spinning_over_quiet_warm", rates["feed_spinning_warm"], rates["feed_warm"])
    )


def over(key: str, mine: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """The ratio of each round."""
    return spread(key, [a / b for a, b in zip(mine, theirs, strict=True)])


if __name__ == "__main__":
    main()
