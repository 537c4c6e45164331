"""Say what a build would do and what a cache holds, as plain values for a report."""

from pathlib import Path
from typing import Any

from dflash_cache import ledger
from dflash_cache.files import is_url
from dflash_cache.plan import Plan, bytes_per_token


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
        "encoding": plan.identity.encoding,
        "target_layer_ids": plan.identity.target_layer_ids,
        "mask_token_id": plan.identity.tokenizer["mask_token_id"],
        "mask_token_source": plan.identity.tokenizer["mask_token_source"],
        "skipped": plan.samples.skipped,
    }


def describe_cache(root: str | Path) -> dict[str, Any]:
    """What `dflash cache info` prints, for a complete cache or a half-built one."""
    identity, options = ledger.read_root(root)
    complete = is_url(root) or (Path(root) / "manifest.json").is_file()
    if complete:
        seal = ledger.read_manifest(root).to_dict()  # which knows the totals: one file to read
    else:
        records = ledger.committed_units(Path(root), fingerprint=identity.fingerprint).values()
        seal = {
            **ledger.totals(records),
            "encoding_error": ledger.encoding_error(records),
            "padding_share": ledger.padding_share(records),
        }
    return {
        "complete": complete,
        "samples": seal["samples"],
        "samples_planned": identity.samples,
        "tokens": seal["tokens"],
        "supervised_tokens": seal["supervised_tokens"],
        "bytes": seal["bytes"],
        "bytes_per_token": bytes_per_token(identity),
        "encoding": identity.encoding,
        "encoding_error": seal["encoding_error"],
        "padding_share": seal["padding_share"],
        "target_layer_ids": identity.target_layer_ids,
        "final_hidden": identity.final_hidden,
        "hidden_size": identity.hidden_size,
        "buckets": seal.get("buckets", {}),
        "units": seal["units"],
        "target": identity.target["name"],
        "target_revision": identity.target["revision"],
        "mask_token_id": identity.tokenizer["mask_token_id"],
        "fingerprint": identity.fingerprint,
        "agreement": seal.get("agreement", {}),
        "proofs": seal.get("proofs", {"skipped": options.get("no_proof", [])}),
        "skipped": seal.get("skipped", {}),
        "software": seal.get("software", {}),
    }
