"""THE WALL between the stages: what a cache folder holds, in words and numbers.  No I/O.

    CACHE/
      zarr.json                     root group; its attributes are the identity and its fingerprint
      plan.parquet                  frozen before extraction: which samples form which unit
      units/bucket-0770/<unit>.<attempt>/   one immutable zarr group per unit and attempt
        hidden/<target layer>       [tokens, H], spelt as the encoding says (`encodings`)
        final_hidden                the same, if asked for
        scales/<plane>              float32 [tokens], in the encodings that scale
        exponents/<plane>           uint8 [tokens, H], in the lossless encoding
        input_ids  loss_mask        int32, uint8 [tokens]
        checksums/<plane>           uint32 [chunks]: CRC-32C of every chunk of a plane
      commits/<unit>.json           the only source of truth, created exclusively
      channels.safetensors          float32 [H] per plane, in the encoding with static scales
      frozen.safetensors            token embedding and LM head of the target
      probe.safetensors             bfloat16 [t, H] per plane: what the library says of one sample
      manifest.json                 the seal: from then on the cache is immutable

Target layer i is the output of decoder layer i, which is entry i + 1 of a Hugging Face
`hidden_states` tuple (entry 0 is the embedding).  `final_hidden` is the state after the target's
final norm, exactly what its LM head reads.  Every sample starts on a chunk boundary of
`CHUNK_TOKENS` tokens; nothing else is padded.

Every byte is covered: the manifest knows the checksums of the files beside it, a commit record
those of the files of its unit, and both are exactly the bytes that this module would write.
"""

import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from hashlib import sha256
from typing import Any, Self

from dflash_cache.checksums import digest
from dflash_cache.encodings import HIDDEN
from dflash_cache.errors import CacheError
from dflash_cache.layout import first_rows

FORMAT_VERSION = 2
CHANNELS_FILE = "channels.safetensors"
PROBE_FILE = "probe.safetensors"
PROBE_TOKENS = 256  # at most
FINAL_HIDDEN = "final_hidden"
FINAL_POSITION = "after the final norm"
LAYER_CONVENTION = "output of decoder layer i = hidden_states[i + 1]"

REPAIR = "`dflash cache repair` on the folder extracts again what is lost"

Payload = bytes  # records have a field of that name

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"


def canonical_json(value: Any) -> bytes:
    """The one spelling of a value that hashes and comparisons use."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


@dataclass(frozen=True, kw_only=True)
class Record:
    """A dataclass that goes to JSON and comes back, refusing unknown or missing fields.

    A field with a default may be missing: it was not written yet when the record was.
    """

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any], *, where: str) -> Self:
        known = {f.name for f in fields(cls)}
        wanted = {f.name for f in fields(cls) if f.default is f.default_factory is MISSING}
        found = set(value) if isinstance(value, dict) else set()
        if not wanted <= found <= known:
            missing, unknown = sorted(wanted - found), sorted(found - known)
            raise CacheError(
                f"{where}: not a {cls.__name__} of format {FORMAT_VERSION} "
                f"(missing {missing}, unknown {unknown}); was it written by another version?"
            )
        return cls(**value)


@dataclass(frozen=True, kw_only=True)
class TargetSpec(Record):
    """What stage two must know of the target, which it never loads."""

    name: str
    revision: str | None  # commit of the Hub; None for a folder
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
    final_hidden: str | None  # where that state stands; None where it is not kept
    hidden_size: int
    encoding: str
    chunk_tokens: int
    alignment: int
    bucket_edges: list[int]
    unit_tokens: int

    @property
    def planes(self) -> list[str]:
        """Paths of the arrays of states, in the order in which they are kept."""
        kept = [plane_of(layer_id) for layer_id in self.target_layer_ids]
        return kept + ([FINAL_HIDDEN] if self.final_hidden else [])

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


def plane_of(layer_id: int) -> str:
    """Path of a target layer's states in a unit."""
    return f"{HIDDEN}/{layer_id}"


def layer_of(plane: str) -> int:
    """The target layer of a plane that holds one's states."""
    return int(plane.removeprefix(f"{HIDDEN}/"))


def spoken(plane: str) -> str:
    """A plane as people call it."""
    return "final hidden state" if plane == FINAL_HIDDEN else f"target layer {layer_of(plane)}"


def part_of(plane: str, part: str) -> str:
    """Path of a part of a plane in a unit: the plane's own for the states themselves."""
    return plane if part == HIDDEN else f"{part}/{plane.rpartition('/')[2]}"


def sealed_json(body: dict[str, Any]) -> bytes:
    """JSON with a checksum over itself."""
    return json.dumps({**body, "xxh3": digest(canonical_json(body))}).encode()


def opened_json(payload: bytes, *, where: str, what: str) -> dict[str, Any]:
    """What `sealed_json` was given, or an error: not one byte may differ, blanks included."""
    try:
        body = json.loads(payload)
        del body["xxh3"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CacheError(f"{where}: not a {what}; it is damaged. {REPAIR}") from None
    if sealed_json(body) != payload:
        raise CacheError(
            f"{where}: its checksum does not fit its content; the {what} is damaged. {REPAIR}"
        )
    return dict(body)


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
    channels_checksum: int | None  # of the static scales that its states were spelt with
    encoding_error: dict[str, dict[str, float]]  # plane -> median and p99; empty where exact
    files: dict[str, list[int]]  # relative path -> size in bytes, XXH3-64
    # plane -> median, least and greatest median norm of a sample, loudest token; empty: unknown
    norms: dict[str, dict[str, float]] = field(default_factory=dict)
    slots: int = 0  # that the target ran for it, padding included; 0: unknown

    @property
    def starts(self) -> list[int]:
        """Token row at which each sample begins."""
        return first_rows(self.lengths)[:-1]

    @property
    def tokens_stored(self) -> int:
        return first_rows(self.lengths)[-1]

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self.files.values())

    def to_bytes(self) -> "Payload":
        return sealed_json(self.to_dict())

    @classmethod
    def from_bytes(cls, payload: "Payload", *, where: str) -> Self:
        return cls.from_dict(opened_json(payload, where=where, what="commit record"), where=where)


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
    proofs: dict[str, Any]  # what each one measured; "skipped" names those that were left out
    agreement: dict[str, Any]
    encoding_error: dict[str, dict[str, float]]  # plane -> median and p99; empty where exact
    files: dict[str, list[int]]  # beside the manifest: name -> size in bytes, XXH3-64
    options: dict[str, Any]  # of the build, so that damaged units can be extracted again
    software: dict[str, str]
    created: str
    padding_share: float | None = None  # of the slots that the target ran; None: unknown

    def to_bytes(self) -> "Payload":
        return sealed_json(self.to_dict())

    @classmethod
    def from_bytes(cls, payload: "Payload", *, where: str) -> Self:
        return cls.from_dict(opened_json(payload, where=where, what="manifest"), where=where)
