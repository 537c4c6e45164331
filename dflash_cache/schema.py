"""THE WALL between the stages: what a cache folder holds, in words and numbers.  No I/O.

    CACHE/
      zarr.json                     root group; its attributes are the identity and its fingerprint
      plan.parquet                  frozen before extraction: which samples form which unit
      units/bucket-0770/<unit>.<attempt>/   one immutable zarr group per unit and attempt
        hidden/<target layer>       uint16 [tokens, H]: the bits of bfloat16
        input_ids  loss_mask        int32, uint8 [tokens]
      commits/<unit>.json           the only source of truth, created exclusively
      frozen.safetensors            token embedding and LM head of the target
      manifest.json                 the seal: from then on the cache is immutable

Target layer i is the output of decoder layer i, which is entry i + 1 of a Hugging Face
`hidden_states` tuple (entry 0 is the embedding).  Every sample starts on a chunk boundary of
`CHUNK_TOKENS` tokens; nothing else is padded.
"""

import json
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from typing import Any, Self

import google_crc32c

from dflash_cache.errors import CacheError

FORMAT_VERSION = 1
CHUNK_TOKENS = 64
LAYER_CONVENTION = "output of decoder layer i = hidden_states[i + 1]"

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"


def canonical_json(value: Any) -> bytes:
    """The one spelling of a value that hashes and comparisons use."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


@dataclass(frozen=True, kw_only=True)
class Record:
    """A dataclass that goes to JSON and comes back, refusing unknown or missing fields."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any], *, where: str) -> Self:
        wanted = {f.name for f in fields(cls)}
        found = set(value) if isinstance(value, dict) else set()
        if found != wanted:
            missing, unknown = sorted(wanted - found), sorted(found - wanted)
            raise CacheError(
                f"{where}: not a {cls.__name__} of format {FORMAT_VERSION} "
                f"(missing {missing}, unknown {unknown}); was it written by another version?"
            )
        return cls(**value)


@dataclass(frozen=True, kw_only=True)
class TargetSpec(Record):
    """What stage two must know of the target, which it never loads."""

    name: str
    model_type: str
    config_sha256: str
    weights_sha256: str
    dtype: str
    num_layers: int
    hidden_size: int
    vocab_size: int  # rows of the embedding, not the tokenizer's length
    tied_head: bool
    intermediate_size: int | None  # None where a target has no dense FFN to copy the size of
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec(Record):
    """Identity of the tokenizer, and the ids that a drafter's mask token must avoid."""

    sha256: str
    chat_template_sha256: str | None
    length: int
    eos_token_ids: list[int]
    pad_token_id: int | None
    unused_special_ids: list[int]  # special tokens that occur nowhere in the cached data
    mask_token_id: int | None
    mask_token_source: str


@dataclass(frozen=True, kw_only=True)
class Identity(Record):
    """All that decides the content of a cache.  Nothing that only changes speed belongs here."""

    format_version: int
    target: dict[str, Any]
    tokenizer: dict[str, Any]
    data_sha256: str
    samples: int
    tokens: int
    target_layer_ids: list[int]
    layer_convention: str
    hidden_size: int
    encoding: str
    chunk_tokens: int
    bucket_edges: list[int]
    unit_tokens: int

    @property
    def fingerprint(self) -> str:
        return sha256(canonical_json(self.to_dict())).hexdigest()

    @property
    def target_spec(self) -> TargetSpec:
        return TargetSpec.from_dict(self.target, where="identity.target")

    @property
    def tokenizer_spec(self) -> TokenizerSpec:
        return TokenizerSpec.from_dict(self.tokenizer, where="identity.tokenizer")


def first_difference(found: Any, wanted: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """The first field, in reading order, in which two JSON-like values differ."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in [*wanted, *(k for k in found if k not in wanted)]:
            name = f"{path}.{key}" if path else str(key)
            if key not in found or key not in wanted:
                return name, found.get(key, "nothing"), wanted.get(key, "nothing")
            if inner := first_difference(found[key], wanted[key], name):
                return inner
        return None
    return None if found == wanted else (path, found, wanted)


@dataclass(frozen=True, kw_only=True)
class UnitRecord(Record):
    """One committed unit.  A reader believes this and nothing else."""

    format_version: int
    fingerprint: str
    unit: str
    bucket: int
    folder: str  # relative to the cache, names the attempt that won
    sample_ids: list[int]
    lengths: list[int]
    supervised: list[int]
    groups: list[str]
    starts: list[int]  # token row at which each sample begins, a multiple of the chunk
    tokens_stored: int
    files: dict[str, int]  # relative path -> size in bytes

    def to_bytes(self) -> bytes:
        """JSON with a checksum over itself, so that a damaged record is not believed."""
        body = self.to_dict()
        return json.dumps({**body, "crc32c": checksum(canonical_json(body))}).encode()

    @classmethod
    def from_bytes(cls, payload: bytes, *, where: str) -> Self:
        try:
            body = json.loads(payload)
            found = body.pop("crc32c")
        except (ValueError, KeyError, AttributeError, TypeError):
            raise CacheError(f"{where}: not a commit record; the cache is damaged") from None
        wanted = checksum(canonical_json(body))
        if found != wanted:
            raise CacheError(
                f"{where}: checksum {found} in the record, {wanted} over its content; "
                "the record is damaged"
            )
        return cls.from_dict(body, where=where)


@dataclass(frozen=True, kw_only=True)
class Manifest(Record):
    """The seal: written last, once."""

    format_version: int
    fingerprint: str
    identity: dict[str, Any]
    samples: int
    tokens: int
    supervised_tokens: int
    bytes: int
    units: int
    buckets: dict[str, int]
    rows: int
    skipped: dict[str, int]
    proofs: dict[str, Any]
    agreement: dict[str, Any]
    software: dict[str, str]
    created: str
    data: str = field(default="")


def checksum(payload: bytes) -> int:
    """CRC-32C, the checksum that zarr's own chunks carry."""
    return int(google_crc32c.value(payload))


def bytes_per_token(*, target_layers: int, hidden_size: int) -> int:
    """States in bfloat16 plus one int32 id and one byte of loss mask."""
    return target_layers * hidden_size * 2 + 4 + 1


def padded(tokens: int) -> int:
    """Tokens that a sample occupies on disk."""
    return -(-tokens // CHUNK_TOKENS) * CHUNK_TOKENS
