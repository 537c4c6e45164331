"""What a worker proves of its target before it writes a byte; what was measured is kept."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dflash_cache import agreement, ledger, probe, proofs, unit_reader
from dflash_cache.codec import stored_codec
from dflash_cache.config import PROOF_NAMES, BuildConfig
from dflash_cache.encodings import ENCODINGS
from dflash_cache.errors import CacheError
from dflash_cache.extraction import lone_states
from dflash_cache.plan import Plan
from dflash_cache.samples import Sample
from dflash_cache.schema import PROBE_FILE, UnitRecord
from dflash_cache.target import Target
from dflash_cache.tolerance import Difference, tolerance_of, tolerance_of_stored

# Where the manifest keeps what a proof measured, and the proof.
Proof = tuple[str, Callable[[], float | Difference]]

# What a cache does without when a proof is left out, said at the start of a build.
UNPROVEN = {
    "hooks": "nobody looks whether states are those of the layers that were asked for",
    "padding": "nobody looks whether a row in a padded batch has the states that it has alone",
    "frozen": "nobody looks whether embedding and head are plain matrices",
    "final": "nobody looks whether the final hidden state is what the head reads",
    "states": "NaN, zeros and constant states are kept",
    "norms": "states of unlikely sizes are kept",
    "probe": "nobody looks whether all processes compute the same states, nor what is on the disk",
    "agreement": "nobody looks whether the target knows this text",
    "template": "nobody looks whether the chat template is this target's",
}


def prove(
    target: Target,
    plan: Plan,
    committed: dict[str, UnitRecord],
    config: BuildConfig,
    *,
    lead: bool,
) -> dict[str, Any]:
    """All checks that need no unit of this process; what they measured goes into the manifest.

    The lead proves what is the same for all workers, and needs the whole target for it.  The
    others prove what their own process could do wrong, up to the last target layer.
    """
    rows = _rows_for_proofs(plan.samples.samples, limit=config.batch_tokens)
    measured: dict[str, Any] = {"tolerance": tolerance_of(target).limit}
    for name, (key, run) in _proofs_of_states(target, plan, rows, lead=lead).items():
        if name not in config.no_proof:
            measured[key] = run()
    if "probe" not in config.no_proof:
        if committed:
            first = next(iter(committed.values()))
            measured["committed"] = _prove_committed(target, plan, first, config.out)
        if lead:
            measured["probe"] = _prove_probe(target, plan, config.out)
    found: dict[str, Any] = {}
    if lead:
        measured["skipped"] = skipped_proofs(config)
        if "agreement" not in config.no_proof:
            found = agreement.measure_agreement(target, _some(plan, config.agreement_samples))
    return {"proofs": _kept(measured, target), "agreement": found}


def _kept(measured: dict[str, Any], target: Target) -> dict[str, Any]:
    """As the manifest keeps it: the worst token; and of a target with experts, for which that is
    not what decides, the share of tokens beyond the tolerance."""
    compared = {key: found for key, found in measured.items() if isinstance(found, Difference)}
    kept = measured | {key: found.worst for key, found in compared.items()}
    if target.has_experts:
        kept["beyond_tolerance"] = {key: found.beyond for key, found in compared.items()}
    return kept


def _proofs_of_states(
    target: Target, plan: Plan, rows: Sequence[torch.Tensor], *, lead: bool
) -> dict[str, Proof]:
    """By name of the proof: where the manifest keeps what it measured, and the proof."""
    layer_ids, row = plan.identity.target_layer_ids, rows[0][None]
    of_all: dict[str, Proof] = {
        "hooks": (
            "hooks_vs_hidden_states",
            lambda: proofs.prove_hooks(target, row, layer_ids),
        ),
        "padding": ("padded_vs_alone", lambda: proofs.prove_padding(target, rows, layer_ids)),
    }
    of_the_lead: dict[str, Proof] = {
        "frozen": ("frozen_vs_model", lambda: proofs.prove_frozen(target, row[:, :64])),
        "final": ("final_vs_head", lambda: proofs.prove_final(target, row[:, :64], layer_ids)),
    }
    return of_all | (of_the_lead if lead else {})


def _rows_for_proofs(samples: Sequence[Sample], *, limit: int) -> list[torch.Tensor]:
    """Three samples, cut so that they fit a batch together and are of unlike length there.

    Without the latter, data of long samples alone would prove nothing about padding.
    """
    by_length = sorted(samples, key=lambda sample: sample.length)
    chosen = (by_length[len(by_length) // 2], by_length[-1], by_length[0])
    width = max(1, min(1024, limit // len(chosen), by_length[-1].length))
    cuts = [max(1, width * share // 3) for share in (2, 3, 1)]
    return [
        torch.from_numpy(sample.input_ids[:cut]).long()
        for sample, cut in zip(chosen, cuts, strict=True)
    ]


def _some(plan: Plan, count: int) -> list[Sample]:
    """So many samples, from all over the data."""
    samples = plan.samples.samples
    count = min(count, len(samples))
    return [samples[i * len(samples) // count] for i in range(count)]


# --- the probe ----------------------------------------------------------------------------------


def _prove_probe(target: Target, plan: Plan, root: Path) -> Difference:
    """The extraction of this process gives the cache's probe, or the one that it will have."""
    samples, identity = plan.samples.samples, plan.identity
    found = probe.read_probe(root) or probe.make_probe(target, samples, identity)
    return probe.check_probe(found, target, samples, identity)


def leave_probe(target: Target, plan: Plan, config: BuildConfig) -> None:
    """The lead keeps the probe beside the units, before the first of them."""
    if "probe" not in config.no_proof:
        made = probe.make_probe(target, plan.samples.samples, plan.identity)
        probe.leave_probe(config.out, made)


def meet_probe(target: Target, plan: Plan, config: BuildConfig) -> None:
    """Every other worker computes again the probe that the lead has left."""
    if "probe" in config.no_proof:
        return
    if probe.read_probe(config.out) is None:
        raise CacheError(
            f"{config.out / PROBE_FILE}: not there, though the first worker has left it; all "
            "workers need the same --out, on a folder that their machines share"
        )
    _prove_probe(target, plan, config.out)


def _prove_committed(target: Target, plan: Plan, record: UnitRecord, root: Path) -> Difference:
    """The shortest sample of a committed unit, computed again by this process."""
    by_id = {sample.sample_id: sample for sample in plan.samples.samples}
    position = len(record.sample_ids) - 1
    sample, identity = by_id[record.sample_ids[position]], plan.identity
    codec = stored_codec(root, identity, record).to(target.device)
    found = [
        codec.decode(plane, codec.encode(plane, states)).cpu()
        for plane, states in zip(
            identity.planes, lone_states(target, sample, identity), strict=True
        )
    ]
    stored = unit_reader.stored_states(root, record, identity, position)
    tolerance = tolerance_of_stored(target, lossy=ENCODINGS[identity.encoding].lossy)
    return proofs.prove_probe(found, list(stored), tolerance)


# --- what was left out --------------------------------------------------------------------------


def skipped_proofs(config: BuildConfig) -> list[str]:
    """The proofs that this run leaves out, and those that earlier runs of this build left out."""
    left = set(remembered_skips(config))
    if not config.agreement_samples:
        left.add("agreement")
    return [name for name in PROOF_NAMES if name in left]


def remembered_skips(config: BuildConfig) -> list[str]:
    """What --no-proof named in this run or an earlier one of this build."""
    earlier: Sequence[str] = ()
    if (config.out / "zarr.json").is_file():
        with suppress(CacheError):  # damaged, which is for others to say
            earlier = ledger.read_root(config.out)[1].get("no_proof", ())
    return [name for name in PROOF_NAMES if name in {*config.no_proof, *earlier}]


def tell_skipped(config: BuildConfig) -> None:
    """Say what this build goes without."""
    for name in PROOF_NAMES:
        if name in config.no_proof:
            tqdm.write(
                f"--no-proof {name}: {UNPROVEN[name]}; the cache will say so", file=sys.stderr
            )
