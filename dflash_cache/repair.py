"""Extract again what a cache has lost, and only that."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dflash_cache import build, ledger, lock, progress, store, sweep
from dflash_cache.codec import Codec
from dflash_cache.config import BuildConfig
from dflash_cache.devices import pick_device
from dflash_cache.disk import full_disk_is_told, write_file
from dflash_cache.errors import CacheError
from dflash_cache.evidence import leave_probe, prove
from dflash_cache.extraction import codec_for, extract, measured_codec
from dflash_cache.files import file_entry
from dflash_cache.plan import Plan, still_needed
from dflash_cache.progress import Alone
from dflash_cache.schema import PROBE_FILE, Identity, Manifest, UnitRecord
from dflash_cache.target import Target
from dflash_cache.verify import Findings, inspect_cache
from dflash_cache.weights import load_weights

# Options that earlier versions wrote into their caches; they never said what a cache holds.
RETIRED = ("workers",)


def repair_cache(
    root: Path, *, target: str | None = None, data: str | None = None, device: str = "auto"
) -> dict[str, Any]:
    """Make a damaged cache whole: damaged units are extracted again, all others stay untouched.

    Target and data are found where the build found them, or where the arguments say; they must be
    the same to the last byte.
    """
    if not root.is_dir():
        raise CacheError(f"{root}: no such folder")
    if not any((root / name).is_file() for name in ("zarr.json", "manifest.json")):
        ledger.refuse_other_folder(root)
        raise CacheError(f"{root}: not a cache (neither zarr.json nor manifest.json)")
    pick_device(device)  # a wrong name must not cost the reading of all bytes
    with lock.held(root, doing="dflash cache repair"):
        found = inspect_cache(root)
        if not found.problems:
            return {"ok": True, "units_repaired": 0, "problems": []}
        again = _mend(_config(root, found, target=target, data=data, device=device), found)
        left = inspect_cache(root, only=again)  # all others were whole a moment ago
    if left.problems:
        raise CacheError(f"{root}: still damaged after the repair ({left.problems[0].problem})")
    return {
        "ok": True,
        "units_repaired": len(again),
        "problems": [vars(problem) for problem in found.problems],
    }


def _config(
    root: Path, found: Findings, *, target: str | None, data: str | None, device: str
) -> BuildConfig:
    """The options of the build, as the cache itself remembers them."""
    if found.options is None or found.identity is None:
        raise CacheError(
            f"{root}: zarr.json and manifest.json are both damaged, so nothing says how this cache "
            "was built. Delete both and run the same `dflash cache build` again: units that are "
            "whole are kept"
        )
    options: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in found.options.items()
        if name not in RETIRED
    }
    # The Hub's main branch may have moved on since.
    options["target_revision"] = found.identity.target["revision"]
    if target is not None:
        options["target"] = target
    if data is not None:
        options["data"] = data
    if Path(options["target"]).is_dir():
        options["target_revision"] = None
    try:
        return BuildConfig(**options, out=root, devices=device)
    except TypeError as error:
        raise CacheError(
            f"{root}: was built with other options than this version has ({error}); repair it "
            "with the version that built it"
        ) from None


def _mend(config: BuildConfig, found: Findings) -> set[str]:
    """Put back what is damaged, each by one step that leaves the old or the new.

    Returns the units that were extracted again.
    """
    root = config.out
    assert found.identity is not None
    survey, plan = build.plan_with_weights(config)
    plan = _under_its_name(plan, found.identity)
    ledger.refuse_other_identity(root, found.identity, plan.identity)
    target = load_weights(survey, device=config.devices, attention=config.target_attention)
    needed = partial(_still_needed, root, plan, found)
    with full_disk_is_told(root, "The units that are whole are kept.", needed=needed):
        for folder in ("units", "commits"):
            (root / folder).mkdir(exist_ok=True)
        whole = {u: r for u, r in found.records.items() if u not in found.damaged_units}
        codec = _codec(root, plan, target, whole)
        probed = _has_probe(config, found)
        if not _is_as_sealed(root, PROBE_FILE, found):
            (root / PROBE_FILE).unlink(missing_ok=True)
        evidence = prove(target, plan, whole, config, lead=True)  # and that it fits what is kept
        write_file(root / "zarr.json", ledger.root_group(plan.identity, build.options_of(config)))
        store.write_plan(root, plan.units, plan.samples.samples)
        if not _is_as_sealed(root, "frozen.safetensors", found):
            (root / "frozen.safetensors").unlink(missing_ok=True)
        store.write_frozen(root, target.embedding, target.head, tied=target.spec.tied_head)
        if probed:
            leave_probe(target, plan, config)
        records = _all_units(config, plan, target, codec, whole)
        manifest = build.make_manifest(config, plan, list(records.values()), evidence)
        if found.manifest is not None:
            manifest = _as_before(found.manifest, manifest)
        ledger.seal(root, manifest)
    _forget_strays(root, plan)
    sweep.remove_leftovers(root)
    return set(records) - set(whole)


def _under_its_name(plan: Plan, found: Identity) -> Plan:
    """The plan with the name and revision that the target had: a folder may have been moved.

    Whether it is the same target is for the hashes to say.
    """
    known = {name: found.target[name] for name in ("name", "revision")}
    identity = replace(plan.identity, target={**plan.identity.target, **known})
    return replace(plan, identity=identity)


def _still_needed(root: Path, plan: Plan, found: Findings) -> int:
    return still_needed(root, plan, set(found.records) - found.damaged_units)


def _is_as_sealed(root: Path, name: str, found: Findings) -> bool:
    return (
        found.manifest is not None
        and (root / name).is_file()
        and (file_entry(root / name) == found.manifest.files.get(name))
    )


def _has_probe(config: BuildConfig, found: Findings) -> bool:
    """Whether this cache was sealed with a probe; without a seal, whether it would be."""
    if found.manifest is not None:
        return PROBE_FILE in found.manifest.files
    return "probe" not in config.no_proof


def _all_units(
    config: BuildConfig, plan: Plan, target: Target, codec: Codec, whole: dict[str, UnitRecord]
) -> dict[str, UnitRecord]:
    """The records of all units: those that are whole, and new ones for the others."""
    records = dict(whole)

    def publish(root: Path, record: UnitRecord) -> UnitRecord:
        records[record.unit] = store.replace(root, record)
        return record

    lost = [unit for unit in plan.units if unit.name not in whole]
    done = ledger.totals(whole.values())["tokens"]
    with progress.shown(config.out, total=plan.samples.tokens, done=done) as display:
        extract(target, plan, lost, config, codec, Alone(display), publish=publish)
    return {unit.name: records[unit.name] for unit in plan.units}


def _codec(root: Path, plan: Plan, target: Target, whole: dict[str, UnitRecord]) -> Codec:
    """What the whole units were spelt with.

    Static scales that are lost are measured again.  Units that were spelt with others, down to
    the last bit, are worth nothing then: they are taken out of `whole`.
    """
    try:
        codec = codec_for(root, target, plan, whole)
    except CacheError:
        codec = measured_codec(root, target, plan)
    for unit, record in list(whole.items()):
        if record.channels_checksum != codec.checksum:
            del whole[unit]
    return codec


def _as_before(old: Manifest, new: Manifest) -> Manifest:
    """The old seal, with what a repair may change: what was written, and from where."""
    return replace(
        old,
        bytes=new.bytes,
        files=new.files,
        encoding_error=new.encoding_error,
        options=new.options,
    )


def _forget_strays(root: Path, plan: Plan) -> None:
    """Remove records of units that this cache does not have."""
    for unit in set(ledger.recorded_units(root)) - {unit.name for unit in plan.units}:
        ledger.record_path(root, unit).unlink()
