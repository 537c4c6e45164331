"""Read and write speed of the cache beside raw files, zarr-python, .pt files and safetensors.

Every reader delivers the same simulated samples into the same page-aligned memory with the same
number of threads, cold and warm, in interleaved rounds; every writer leaves the same samples
durable on the disk.  What was delivered is compared with the source before anything is timed.
GB are 10^9 bytes; `gb_s` counts bfloat16 bytes of states, `disk_gb_s` bytes of files.

Letters: K target layers, P rows of the pool, T token rows in memory, t tokens of a sample,
H hidden size.
"""

import ctypes
import mmap
import os
import shutil
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from common import Timing, add_out, publish, result, spread, timed
from store_data import BUCKET_EDGES, Data, Memory
from store_ways import (
    TOLERANCE,
    Way,
    check,
    hidden_files,
    layers_on_chunks,
    prepare,
    read_raw,
    write_ours,
    write_pt,
    write_raw,
    write_safetensors,
    write_zarr,
)

from dflash_cache.buckets import UnitPlan
from dflash_cache.build import build_cache
from dflash_cache.config import ENCODING_NAMES, BuildConfig
from dflash_cache.convert import convert_cache
from dflash_cache.layout import CHUNK_TOKENS

BEGAN = time.monotonic()


def main() -> None:
    args = parse_args()
    data = Data(args)
    refuse_too_small_a_disk(args.folder, data, args.encodings)
    with (
        tempfile.TemporaryDirectory(prefix="bench_store.", dir=args.folder) as folder,
        ThreadPoolExecutor(args.threads) as threads,
    ):
        root = Path(folder)
        figures = measure_writers(root / "written", data, args)
        memory = Memory(data, args.encodings)
        ways = prepare(root, data, memory, args, threads)
        for way in ways:
            check(way, data, memory)
        figures |= measure_readers(ways, data, args.rounds, memory, threads)
        if args.real_target:
            figures |= real_figures(root / "real", args)
        else:
            say("no --real-target: lossless_bytes_ratio is left out")
        publish(result("store", shape_of(args, data), figures, folder=root), args.out)


def parse_args() -> Namespace:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=45_000, help="tokens of all samples")
    parser.add_argument("--layers", type=int, default=5, help="target layers")
    parser.add_argument("--hidden", type=int, default=5120, help="channels of a layer")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of which medians are taken")
    parser.add_argument("--threads", type=int, default=2, help="threads of every reader")
    parser.add_argument("--write-tokens", type=int, default=20_000, help="tokens of a write")
    parser.add_argument("--encodings", default="bf16,fp8,lossless", help="bf16 must be in")
    parser.add_argument(
        "--folder", type=Path, default=Path("/var/tmp"), help="a folder on the disk to measure"
    )
    parser.add_argument("--real-target", type=Path, help="real target for the byte ratios")
    parser.add_argument("--real-data", type=Path, help="rows for the byte ratios")
    parser.add_argument("--max-samples", type=int, default=60, help="rows taken of --real-data")
    add_out(parser)
    args = parser.parse_args()
    args.encodings = args.encodings.split(",")
    if "bf16" not in args.encodings or set(args.encodings) - set(TOLERANCE):
        parser.error(f"--encodings {','.join(args.encodings)}: want bf16 and any of {[*TOLERANCE]}")
    if (args.real_target is None) != (args.real_data is None):
        parser.error("--real-target and --real-data go together")
    return args


def shape_of(args: Namespace, data: "Data") -> dict[str, object]:
    return {
        "tokens": args.tokens,
        "layers": args.layers,
        "hidden": args.hidden,
        "samples": len(data.lengths),
        "longest": max(data.lengths),
        "chunk_tokens": CHUNK_TOKENS,
        "write_tokens": sum(data.lengths[: data.written]),
        "rounds": args.rounds,
        "threads": args.threads,
        "cold_by": "drop_caches" if may_drop_caches() else "fadvise",
    }


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:4.0f} s] {text}", file=sys.stderr, flush=True)


def refuse_too_small_a_disk(folder: Path, data: "Data", encodings: Sequence[str]) -> None:
    needed = 1.05 * data.bytes * (2 + len(encodings))
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise SystemExit(
            f"Error: {folder}: {free / 1e9:.1f} GB are free, up to {needed / 1e9:.1f} GB are "
            "needed; give another --folder or fewer --tokens"
        )


DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def may_drop_caches() -> bool:
    return os.access(DROP_CACHES, os.W_OK)


def make_cold(files: Sequence[Path]) -> None:
    """Nothing of `files` is left in the page cache; a mapping held open would prevent it."""
    os.sync()
    if may_drop_caches():
        DROP_CACHES.write_text("3\n", encoding="ascii")
        return
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def resident_share(files: Sequence[Path]) -> float:
    """Share of the pages of `files` in the page cache (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    resident = pages = 0
    for path in files:
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping,
        ):
            seen = np.zeros(-(-len(mapping) // mmap.PAGESIZE), np.uint8)
            address = np.frombuffer(mapping, np.uint8).ctypes.data
            if libc.mincore(
                ctypes.c_void_p(address),
                ctypes.c_size_t(len(mapping)),
                ctypes.c_void_p(seen.ctypes.data),
            ):
                raise OSError(ctypes.get_errno(), f"mincore on {path}")
            resident += int((seen & 1).sum())
            pages += len(seen)
    return resident / pages


def measure_readers(
    ways: Sequence[Way],
    data: Data,
    rounds: int,
    memory: Memory,
    threads: ThreadPoolExecutor,
) -> dict[str, float]:
    """All ways, cold then warm, in rounds that go to and fro; then the figures of each."""
    timings: dict[tuple[str, str], list[Timing]] = {}
    cold_shares, warm_shares = [], []
    for number in range(rounds):
        for way in ways if number % 2 == 0 else reversed(ways):
            make_cold(way.files)
            cold_shares.append(resident_share(way.files))
            cold = timed(way.cold)
            read_raw(way.files, memory.bytes, threads, flags=0)
            warm_shares.append(resident_share(way.files))
            warm = timed(way.warm)
            timings.setdefault((way.name, "cold"), []).append(cold)
            timings.setdefault((way.name, "warm"), []).append(warm)
            rates = [data.bytes / 1e9 / timing.seconds for timing in (cold, warm)]
            say(f"round {number + 1} {way.name:18} cold {rates[0]:6.2f}  warm {rates[1]:6.2f} GB/s")
    figures = {
        "resident_when_cold.max": max(cold_shares),
        "resident_when_warm.min": min(warm_shares),
    }
    sizes = {way.name: way.disk_bytes for way in ways}
    for way in ways:
        figures |= figures_of(way, data, timings)
        if way.name.startswith("packed_") and way.encoding != "bf16":
            ratio = sizes[way.name] / sizes["packed_bf16"]
            # Compression depends on the states; what is not compressed depends on the shape alone.
            told = "_simulated" if way.encoding == "lossless" else ""
            figures[f"{way.encoding}_bytes_ratio{told}"] = ratio
    return figures | comparisons(timings, data)


def figures_of(
    way: Way, data: Data, timings: dict[tuple[str, str], list[Timing]]
) -> dict[str, float]:
    figures = {f"bytes_per_token.{way.name}": way.disk_bytes / sum(data.lengths)}
    for temperature in ("cold", "warm"):
        runs = timings[way.name, temperature]
        prefix = f"read_{temperature}"
        figures |= spread(
            f"{prefix}_gb_s.{way.name}", [data.bytes / 1e9 / run.seconds for run in runs]
        )
        figures |= spread(
            f"{prefix}_disk_gb_s.{way.name}", [way.disk_bytes / 1e9 / run.seconds for run in runs]
        )
        figures |= spread(
            f"{prefix}_cpu_s_per_gb.{way.name}",
            [run.cpu_seconds / (data.bytes / 1e9) for run in runs],
        )
    return figures


def comparisons(timings: dict[tuple[str, str], list[Timing]], data: Data) -> dict[str, float]:
    """Rates of the packed bf16 read over those of others, round by round.

    Raw and packed read the same files, so their times compare bytes on disk per second as well.
    """

    def over(temperature: str, *others: str) -> list[float]:
        """Against the quickest of the others in the same round."""
        ours = timings["packed_bf16", temperature]
        theirs = zip(*(timings[other, temperature] for other in others), strict=True)
        quickest = [min(run.seconds for run in runs) for runs in theirs]
        return [seconds / run.seconds for run, seconds in zip(ours, quickest, strict=True)]

    ours, theirs = timings["packed_bf16", "cold"], timings["pt_files", "cold"]
    cpu = [a.cpu_seconds / b.cpu_seconds for a, b in zip(ours, theirs, strict=True)]
    per_gb = [run.cpu_seconds / (data.bytes / 1e9) for run in ours]
    return {
        **spread("packed_bf16_over_raw_cold", over("cold", "raw", "raw_long")),
        **spread("packed_bf16_over_raw_warm", over("warm", "raw", "raw_long")),
        **spread("packed_bf16_over_pt_files", over("cold", "pt_files")),
        **spread("packed_bf16_over_zarr_python", over("cold", "zarr_python")),
        **spread("packed_bf16_over_safetensors_files", over("cold", "safetensors_files")),
        **spread("cpu_packed_bf16_over_pt_files", cpu),
        **spread("cpu_s_per_gb", per_gb),
    }


def measure_writers(folder: Path, data: Data, args: Namespace) -> dict[str, float]:
    """Fresh files, durable at the end, in interleaved rounds; each is removed, untimed."""
    members = range(data.written)
    plan = UnitPlan(name="u000000", bucket=BUCKET_EDGES[-1], members=tuple(members))
    samples = [data.states(member) for member in members]  # made before the clock starts
    layers_KTH = layers_on_chunks(samples)
    writers: dict[str, Callable[[], object]] = {
        "packed_bf16": lambda: write_ours(folder, data, [plan], "bf16", states=samples.__getitem__),
        "zarr_python": lambda: write_zarr(folder, layers_KTH),
        "pt_files": lambda: write_pt(folder, iter(samples)),
        "safetensors_files": lambda: write_safetensors(folder, iter(samples)),
        "raw": lambda: write_raw(folder, layers_KTH),
    }
    size = sum(states.nbytes for states in samples) / 1e9
    timings: dict[str, list[Timing]] = {name: [] for name in writers}
    for number in range(args.rounds):
        for name in writers if number % 2 == 0 else reversed(writers):
            os.sync()
            timings[name].append(timed(writers[name]))
            shutil.rmtree(folder)
            rate = size / timings[name][-1].seconds
            say(f"round {number + 1} {name:18} write {rate:6.2f} GB/s")
    figures: dict[str, float] = {}
    for name, runs in timings.items():
        figures |= spread(f"write_gb_s.{name}", [size / run.seconds for run in runs])
        figures |= spread(f"write_cpu_s_per_gb.{name}", [run.cpu_seconds / size for run in runs])
    pairs = list(zip(timings["packed_bf16"], timings["zarr_python"], strict=True))
    return figures | spread("write_over_zarr_python", [b.seconds / a.seconds for a, b in pairs])


def real_figures(folder: Path, args: Namespace) -> dict[str, float]:
    """Real hidden states: bytes in every encoding over those in bfloat16, and what is lost."""
    say("building a real cache")
    manifest = build_cache(
        BuildConfig(
            target=str(args.real_target),
            data=str(args.real_data),
            out=folder / "bf16",
            max_samples=args.max_samples,
        )
    )
    whole = size_of_states(folder / "bf16")
    figures = {"real_tokens": float(manifest.tokens)}
    for encoding in ENCODING_NAMES:
        if encoding == "bf16":
            continue
        found = convert_cache(folder / "bf16", encoding=encoding, out=folder / encoding)
        told = "" if encoding == "lossless" else "_real"
        figures[f"{encoding}_bytes_ratio{told}"] = size_of_states(folder / encoding) / whole
        for name in ("median", "p99"):
            errors = [error[name] for error in found.encoding_error.values()]
            if errors:
                figures[f"{encoding}_relative_error.{name}"] = sum(errors) / len(errors)
    return figures


def size_of_states(root: Path) -> int:
    return sum(path.stat().st_size for path in hidden_files(root))


if __name__ == "__main__":
    main()
