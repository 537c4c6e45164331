"""Say what a build would do and what a cache holds, as plain values for a report."""

from pathlib import Path
from typing import Any

from dflash_cache import ledger
from dflash_cache.plan import Plan
from dflash_cache.schema import bytes_per_token


def describe_plan(plan: Plan) -> dict[str, Any]:
    """What `dflash cache build --dry-run` prints."""
    return {
        "samples": len(plan.samples.samples),
        "rows": plan.samples.rows,
        "tokens": plan.samples.tokens,
        "supervised_tokens": plan.samples.supervised,
        "bytes_per_token": plan.bytes_per_token,
        "bytes": plan.bytes,
        "free_bytes": plan.free_bytes,
        "fits": plan.fits,
        "buckets": plan.buckets,
        "units": len(plan.units),
        "target_layer_ids": plan.identity.target_layer_ids,
        "mask_token_id": plan.identity.tokenizer["mask_token_id"],
        "mask_token_source": plan.identity.tokenizer["mask_token_source"],
        "skipped": plan.samples.skipped,
    }


def describe_cache(root: Path) -> dict[str, Any]:
    """What `dflash cache info` prints, for a complete cache or a half-built one."""
    identity = ledger.read_identity(root)
    complete = (root / "manifest.json").is_file()
    committed = ledger.committed_units(root, fingerprint=identity.fingerprint)
    held = ledger.totals(committed.values())
    seal = ledger.read_manifest(root).to_dict() if complete else {}
    return {
        "complete": complete,
        "samples": held["samples"],
        "samples_planned": identity.samples,
        "tokens": held["tokens"],
        "supervised_tokens": held["supervised_tokens"],
        "bytes": seal.get("bytes", held["bytes"]),
        "bytes_per_token": bytes_per_token(
            target_layers=len(identity.target_layer_ids), hidden_size=identity.hidden_size
        ),
        "encoding": identity.encoding,
        "target_layer_ids": identity.target_layer_ids,
        "hidden_size": identity.hidden_size,
        "buckets": seal.get("buckets", {}),
        "units": held["units"],
        "target": identity.target["name"],
        "mask_token_id": identity.tokenizer["mask_token_id"],
        "fingerprint": identity.fingerprint,
        "agreement": seal.get("agreement", {}),
        "proofs": seal.get("proofs", {}),
        "skipped": seal.get("skipped", {}),
    }
