"""The probe: one sample's states, kept beside the units, that every process must compute again.

The first worker takes them from the library's own report on the lone sample; every worker, and
every build that goes on, compares them with what its extraction gives: hooks, in a padded batch.
So no two machines, versions or settings that compute other states fill one cache, and nothing
between the target and the states can go wrong alike for all.

Letters: t tokens of the probe, H hidden size.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from dflash_cache import disk
from dflash_cache.checksums import digest
from dflash_cache.diagnosis import cause_of
from dflash_cache.errors import CacheError, ProofError
from dflash_cache.extraction import padded_states
from dflash_cache.files import repair_hint
from dflash_cache.proofs import LEFT_PADDED, pad_right, padded_left
from dflash_cache.report import report_of
from dflash_cache.samples import Sample
from dflash_cache.schema import PROBE_FILE, PROBE_TOKENS, Identity, spoken
from dflash_cache.target import Target
from dflash_cache.tolerance import Difference, largest, tolerance_of_stored

LEAST_TOKENS = 32
IDS, ABOUT = "input_ids", "dflash_cache"


@dataclass(frozen=True, kw_only=True, eq=False)
class Probe:
    """States bfloat16 [t, H] of one sample, by plane, and what computed them."""

    input_ids: Tensor  # int32 [t]
    states: dict[str, Tensor]
    made_by: str

    def to_bytes(self) -> bytes:
        tensors = {IDS: self.input_ids, **self.states}
        told = {"made_by": self.made_by, "xxh3": _checksum(tensors)}
        # In one string: safetensors writes several in any order, and a repair in another one.
        payload: bytes = save(tensors, metadata={ABOUT: json.dumps(told)})
        return payload


def probe_ids(samples: Sequence[Sample]) -> Tensor:
    """Ids int32 [t] of the probe: the shortest sample that is long enough, or the longest."""
    long = [sample for sample in samples if sample.length >= LEAST_TOKENS]
    chosen = (
        min(long, key=lambda sample: sample.length)
        if long
        else max(samples, key=lambda sample: sample.length)
    )
    return torch.from_numpy(chosen.input_ids[:PROBE_TOKENS].copy())


def make_probe(target: Target, samples: Sequence[Sample], identity: Identity) -> Probe:
    """The probe of a cache, from the library's own report.

    A layer that the library has no word for cannot be probed; the others are.
    """
    ids = probe_ids(samples)
    report = report_of(target, ids.long())
    found = {plane: report.plane(plane) for plane in identity.planes}
    states = {
        plane: own.to("cpu", torch.bfloat16).contiguous()
        for plane, own in found.items()
        if own is not None
    }
    return Probe(input_ids=ids, states=states, made_by=this_process(target))


def leave_probe(root: Path, probe: Probe) -> None:
    """Write a probe beside the units, unless these have one."""
    if not (root / PROBE_FILE).is_file():
        disk.write_file(root / PROBE_FILE, probe.to_bytes())


def read_probe(root: Path) -> Probe | None:
    """The probe of a cache; None where it has none."""
    path = root / PROBE_FILE
    if not path.is_file():
        return None
    payload = path.read_bytes()
    try:
        tensors: dict[str, Tensor] = load(payload)
        with safe_open(path, "pt") as file:
            told = json.loads((file.metadata() or {}).get(ABOUT, "{}"))
    except (SafetensorError, ValueError):
        tensors, told = {}, {}
    if told.get("xxh3") != _checksum(tensors):
        raise CacheError(
            f"{path}: its checksum does not fit its content; the probe is damaged. Delete this "
            f"file to go on with the build. {repair_hint(str(root))}"
        )
    return Probe(input_ids=tensors.pop(IDS), states=tensors, made_by=told["made_by"])


def check_probe(
    probe: Probe, target: Target, samples: Sequence[Sample], identity: Identity
) -> Difference:
    """What this process extracts is what the probe says; returns the largest difference."""
    if not torch.equal(probe.input_ids, probe_ids(samples)):
        raise CacheError(
            f"{PROBE_FILE}: is of another sample than this build's; the folder was mixed up. "
            "Delete this file if the rest is this cache's"
        )
    planes = [plane for plane in identity.planes if plane in probe.states]
    extracted = dict(zip(identity.planes, extract_probe(target, probe, identity), strict=True))
    found = [extracted[plane] for plane in planes]
    stored = [probe.states[plane] for plane in planes]
    tolerance = tolerance_of_stored(target)
    measured = tolerance.differences(found, stored)
    if (worst := tolerance.furthest(measured)) is not None:
        raise ProofError(
            f"{spoken(planes[worst])}: the states of the probe sample differ by "
            f"{tolerance.told(measured[worst])} from what the library gave: "
            f"{_cause(found[worst], stored[worst], planes[worst], probe, target)}"
        )
    return largest(measured)


def extract_probe(target: Target, probe: Probe, identity: Identity) -> list[Tensor]:
    """The probe's states as a unit's: by hooks, in a padded batch beside a longer row."""
    ids = probe.input_ids.long()
    longer = torch.cat([ids, ids])[: target.spec.max_position_embeddings]
    states = padded_states(target, pad_right([ids, longer]), identity)
    return [plane[0, : len(ids)].cpu() for plane in states]


def _cause(found: Tensor, stored: Tensor, plane: str, probe: Probe, target: Target) -> str:
    """Whether this process computes other states, or only takes wrong ones out of the target."""
    ids, tolerance = probe.input_ids.long(), tolerance_of_stored(target)
    report = report_of(target, ids).cpu()
    filled = report_of(target, padded_left(ids, width=2 * len(ids))).plane(plane)
    if filled is not None and tolerance.same(filled[: len(found)].cpu(), found):
        return LEFT_PADDED
    own = report.plane(plane)
    here = own is not None and tolerance.same(own, stored)
    if here or not bool(torch.isfinite(found).all()):
        return cause_of(found, plane, report, tolerance)
    return (
        f"{_who()} ({this_process(target)}) computes other states than the one that began the "
        f"cache ({probe.made_by}); do not mix them. Use the same software and settings, or build "
        "into a new folder"
    )


def _who() -> str:
    rank = os.environ.get("RANK")
    return "this process" if rank is None else f"worker {rank}"


def this_process(target: Target) -> str:
    """What decides the arithmetic of a process."""
    device = target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return (
        f"{name}, {target.spec.dtype}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )


def _checksum(tensors: dict[str, Tensor]) -> str:
    """Of names and contents, in the order of the names."""
    parts = [
        name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes()
        for name, tensor in sorted(tensors.items())
    ]
    return f"{digest(b''.join(parts)):016x}"
