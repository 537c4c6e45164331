"""Plan a cache: samples, target layers, units and bytes.  Loads no weights, writes nothing."""

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_cache.buckets import UnitPlan, bucket_edges_of, plan_units
from dflash_cache.config import BuildConfig
from dflash_cache.disk import existing_folder
from dflash_cache.encodings import ENCODINGS
from dflash_cache.errors import DiskFullError
from dflash_cache.layout import ALIGNMENT, CHUNK_TOKENS, RawPlane, chunks_of, index_bytes, round_up
from dflash_cache.samples import Samples, load_samples
from dflash_cache.schema import (
    FINAL_POSITION,
    FORMAT_VERSION,
    LAYER_CONVENTION,
    PROBE_FILE,
    PROBE_TOKENS,
    Identity,
)
from dflash_cache.survey import Survey, survey_target
from dflash_cache.target import checked_layer_ids, default_layer_ids
from dflash_cache.template import prove_template
from dflash_cache.vocabulary import describe_tokenizer, special_ids

# What zstd leaves of the exponents of hidden states; 0.40 was measured, a plan must not promise
# too little.
EXPONENT_SHARE = 0.45


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that is known before the first byte is written."""

    identity: Identity
    units: list[UnitPlan]
    samples: Samples
    bytes_per_token: int
    bytes: int
    frozen_bytes: int
    free_bytes: int

    def with_weights(self, hashed: Survey) -> "Plan":
        """The same plan for a target whose weights have been hashed."""
        return replace(self, identity=replace(self.identity, target=hashed.spec.to_dict()))

    @property
    def fits(self) -> bool:
        return self.bytes <= self.free_bytes

    @property
    def buckets(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for unit in self.units:
            name = f"{unit.bucket:04d}"
            counts[name] = counts.get(name, 0) + len(unit.members)
        return counts


def plan_only(config: BuildConfig) -> Plan:
    """The plan of a build; writes nothing."""
    return make_plan(config, survey(config))


def survey(config: BuildConfig) -> Survey:
    """The target of a build, without its weights."""
    return survey_target(config.target, dtype=config.target_dtype, revision=config.target_revision)


def make_plan(config: BuildConfig, found: Survey) -> Plan:
    """Tokenise, choose layers and units, count bytes.  Loads no weights, writes nothing."""
    spec = found.spec
    samples = load_samples(
        config,
        found.tokenizer,
        vocab_size=spec.vocab_size,
        max_positions=spec.max_position_embeddings,
    )
    if "template" not in config.no_proof:
        prove_template(found.tokenizer, samples.chats, stop_ids=found.stop_ids)
    layer_ids = (
        checked_layer_ids(config.target_layers, spec.num_layers)
        if config.target_layers is not None
        else default_layer_ids(spec.num_layers, config.num_target_layers)
    )
    tokenizer = describe_tokenizer(
        found.tokenizer,
        embedding_rows=spec.vocab_size,
        stop_ids=found.stop_ids,
        seen=samples.count_of(special_ids(found.tokenizer)),
        mask_token_id=config.mask_token_id,
    )
    edges = bucket_edges_of(samples.lengths, config.bucket_edges)
    identity = Identity(
        format_version=FORMAT_VERSION,
        target=spec.to_dict(),
        tokenizer=tokenizer.to_dict(),
        data_sha256=samples.sha256(),
        samples=len(samples.samples),
        tokens=samples.tokens,
        target_layer_ids=layer_ids,
        layer_convention=LAYER_CONVENTION,
        final_hidden=FINAL_POSITION if config.final_hidden else None,
        hidden_size=spec.hidden_size,
        encoding=config.encoding,
        chunk_tokens=CHUNK_TOKENS,
        alignment=ALIGNMENT,
        bucket_edges=edges,
        unit_tokens=config.unit_tokens,
    )
    units = plan_units(samples.lengths, edges=edges, unit_tokens=config.unit_tokens)
    frozen = spec.vocab_size * spec.hidden_size * 2 * (1 if spec.tied_head else 2)
    return Plan(
        identity=identity,
        units=units,
        samples=samples,
        bytes_per_token=bytes_per_token(identity),
        frozen_bytes=frozen,
        bytes=frozen
        + probe_bytes(identity, samples.lengths)
        + len(identity.planes) * spec.hidden_size * 4 * ENCODINGS[config.encoding].static_scales
        + sum(
            unit_bytes(identity, [samples.lengths[member] for member in unit.members])
            for unit in units
        ),
        free_bytes=shutil.disk_usage(existing_folder(config.out)).free,
    )


def bytes_per_token(identity: Identity) -> int:
    """Bytes of a token's states, id and loss mask, without what alignment adds."""
    states = 0.0
    for part in ENCODINGS[identity.encoding].parts:
        size = part.dtype.itemsize * (identity.hidden_size if part.per_channel else 1)
        states += len(identity.planes) * size * (EXPONENT_SHARE if part.compressed else 1)
    return int(states) + 4 + 1


def probe_bytes(identity: Identity, lengths: Sequence[int]) -> int:
    """Bytes of the probe, an upper estimate."""
    tokens = min(PROBE_TOKENS, max(lengths, default=0))
    return tokens * (len(identity.planes) * identity.hidden_size * 2 + 4) + ALIGNMENT


def unit_bytes(identity: Identity, lengths: Sequence[int]) -> int:
    """Bytes that a unit takes from the disk, in blocks of `ALIGNMENT`.

    An upper estimate for compressed planes.
    """
    chunks = sum(map(chunks_of, lengths))
    files = [4 * chunks * CHUNK_TOKENS, chunks * CHUNK_TOKENS]  # ids and loss mask
    for part in ENCODINGS[identity.encoding].parts:
        plane = RawPlane(row_bytes=identity.hidden_size * part.dtype.itemsize)
        if not part.per_channel:
            size = part.dtype.itemsize * chunks * CHUNK_TOKENS
        elif part.compressed:
            size = int(EXPONENT_SHARE * chunks * plane.chunk_bytes) + index_bytes(chunks)
        else:
            size = plane.file_bytes(chunks)
        files += len(identity.planes) * [size, 4 * chunks]  # itself and its checksums
    # Each array has a zarr.json, and so have the groups and the record.
    return sum(round_up(size, ALIGNMENT) + ALIGNMENT for size in files) + 4 * ALIGNMENT


def still_needed(root: Path, plan: Plan, committed: Iterable[str]) -> int:
    """Bytes that are not written yet, by the names of the units that are."""
    done = set(committed)
    lengths = plan.samples.lengths
    units = sum(
        unit_bytes(plan.identity, [lengths[member] for member in unit.members])
        for unit in plan.units
        if unit.name not in done
    )
    frozen = 0 if (root / "frozen.safetensors").is_file() else plan.frozen_bytes
    probe = 0 if (root / PROBE_FILE).is_file() else probe_bytes(plan.identity, lengths)
    return units + frozen + probe


def refuse_too_small_a_disk(root: Path, needed: int, *, instead: str = "") -> None:
    """Stop before the first byte when what is left to write cannot fit."""
    free = shutil.disk_usage(existing_folder(root)).free
    if needed > free:
        raise DiskFullError(
            f"{root}: {needed / 1e9:.3f} GB are still to be written, {free / 1e9:.3f} GB are free: "
            f"{needed - free:,} bytes are missing. Nothing was written. Free space or give another "
            f"--out{instead}"
        )
