"""Plan a cache: samples, target layers, units and bytes.  Loads no weights, writes nothing."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_cache.buckets import UnitPlan, bucket_edges_of, plan_units
from dflash_cache.config import BuildConfig
from dflash_cache.errors import DiskFullError
from dflash_cache.samples import Samples, load_samples
from dflash_cache.schema import (
    CHUNK_TOKENS,
    FORMAT_VERSION,
    LAYER_CONVENTION,
    Identity,
    UnitRecord,
    bytes_per_token,
    padded,
)
from dflash_cache.survey import Survey, survey_target
from dflash_cache.target import checked_layer_ids, default_layer_ids
from dflash_cache.vocabulary import describe_tokenizer, special_ids


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that is known before the first byte is written."""

    identity: Identity
    units: list[UnitPlan]
    samples: Samples
    bytes_per_token: int
    bytes: int
    free_bytes: int

    def with_weights(self, survey: Survey) -> "Plan":
        """The same plan for a target whose weights have been hashed."""
        return replace(self, identity=replace(self.identity, target=survey.spec.to_dict()))

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
    return make_plan(config, survey_target(config.target, dtype=config.target_dtype))


def make_plan(config: BuildConfig, survey: Survey) -> Plan:
    """Tokenise, choose layers and units, count bytes.  Loads no weights, writes nothing."""
    spec = survey.spec
    samples = load_samples(
        config,
        survey.tokenizer,
        vocab_size=spec.vocab_size,
        max_positions=spec.max_position_embeddings,
    )
    layer_ids = (
        checked_layer_ids(config.target_layers, spec.num_layers)
        if config.target_layers is not None
        else default_layer_ids(spec.num_layers, config.num_target_layers)
    )
    tokenizer = describe_tokenizer(
        survey.tokenizer,
        embedding_rows=spec.vocab_size,
        stop_ids=survey.stop_ids,
        seen=samples.count_of(special_ids(survey.tokenizer)),
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
        hidden_size=spec.hidden_size,
        encoding="bf16",
        chunk_tokens=CHUNK_TOKENS,
        bucket_edges=edges,
        unit_tokens=config.unit_tokens,
    )
    per_token = bytes_per_token(target_layers=len(layer_ids), hidden_size=spec.hidden_size)
    frozen = spec.vocab_size * spec.hidden_size * 2 * (1 if spec.tied_head else 2)
    return Plan(
        identity=identity,
        units=plan_units(samples.lengths, edges=edges, unit_tokens=config.unit_tokens),
        samples=samples,
        bytes_per_token=per_token,
        bytes=per_token * sum(padded(n) for n in samples.lengths) + frozen,
        free_bytes=shutil.disk_usage(existing_folder(config.out)).free,
    )


def existing_folder(path: Path) -> Path:
    """The nearest folder above that is there, to ask the disk about."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path


def refuse_too_small_a_disk(out: Path, plan: Plan, committed: dict[str, UnitRecord]) -> None:
    """Stop before the first byte when what is left to write cannot fit."""
    stored = sum(record.tokens_stored for record in committed.values())
    needed = plan.bytes - stored * plan.bytes_per_token
    if needed > plan.free_bytes:
        raise DiskFullError(
            f"{out}: {needed / 1e9:.3f} GB are still to be written ({plan.bytes_per_token} bytes "
            f"a token), {plan.free_bytes / 1e9:.3f} GB are free; nothing was written. Free space, "
            "give another --out, or take fewer samples or target layers"
        )
