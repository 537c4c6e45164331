"""`dflash cache inspect`: what the target sees and the drafter learns, token by token.

Of a sealed cache, or of rows before anything is built.  No weights are read.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from json import dumps
from pathlib import Path
from typing import Any

import numpy as np

from dflash_cache.buckets import bucket_edges_of
from dflash_cache.config import BuildConfig, InspectConfig, InspectDataConfig
from dflash_cache.disk import write_file
from dflash_cache.errors import CacheError, CacheMismatchError, ConfigError, DataError, TargetError
from dflash_cache.inspect_html import page
from dflash_cache.inspection import Inspection, ShownSample, SkippedRow, Token, Totals
from dflash_cache.pieces import pieces_of
from dflash_cache.reader import CacheReader
from dflash_cache.rows import Row, iter_rows
from dflash_cache.samples import RowEncoder, row_encoder, row_text
from dflash_cache.survey import Survey, first_line, load_tokenizer, survey_target
from dflash_cache.vocabulary import hash_tokenizer

# The counts should say something of the data, and a look should take seconds.
LOOK_AT_LEAST = 200
LOOK_AT_MOST = 20_000
SKIPPED_SHOWN = 5
BEGINNING = 400  # characters of a skipped row


# --- rows, before anything is built -------------------------------------------------------------


@dataclass(kw_only=True)
class Found:
    """What a walk over the rows has met; it keeps what is shown and counts the rest."""

    most_samples: int
    most_skipped: int
    lengths: list[int] = field(default_factory=list)  # of all usable rows
    supervised: int = 0
    samples: list[tuple[int, np.ndarray, np.ndarray]] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    skipped_rows: list[SkippedRow] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return len(self.lengths) + self.skipped.total()


def inspect_data(config: InspectDataConfig) -> Inspection:
    """Rows as a build with these options would take them."""
    refuse_bad_page(config.html)
    target = survey_target(
        config.target, dtype=BuildConfig.target_dtype, revision=config.target_revision
    )
    encode = _encoder(config, target)
    found, looked_at = _named(config, encode) if config.sample else _first(config, encode)
    edges = bucket_edges_of(found.lengths, BuildConfig.bucket_edges)
    return with_page(
        Inspection(
            source=config.data,
            target=target.spec.name,
            looked_at=looked_at,
            totals=_totals(found, edges),
            samples=[
                _shown(
                    number, ids, mask, tokenizer=target.tokenizer, bucket=_bucket(len(ids), edges)
                )
                for number, ids, mask in found.samples
            ],
            skipped_rows=found.skipped_rows,
            notes=_would_stop(config, found),
        ),
        config.html,
    )


def _encoder(config: InspectDataConfig, target: Survey) -> RowEncoder:
    """What a build encodes its rows with."""
    return row_encoder(
        config,
        target.tokenizer,
        vocab_size=target.spec.vocab_size,
        max_positions=target.spec.max_position_embeddings,
    )


def _named(config: InspectDataConfig, encode: RowEncoder) -> tuple[Found, str]:
    """The rows that were asked for, and no others."""
    wanted = sorted(set(config.sample or ()))
    found = Found(most_samples=len(wanted), most_skipped=len(wanted))
    at_hand = 0
    for number, row in islice(_rows(config), wanted[-1] + 1 if wanted[0] >= 0 else 0):
        at_hand = number + 1
        if number in wanted:
            _take(found, number, row, encode)
    if found.rows < len(wanted):
        missing = next(n for n in wanted if not 0 <= n < at_hand)
        there = f"rows 0 to {at_hand - 1}" if at_hand else "rows from 0 on"
        raise DataError(f"--sample {missing}: {config.data} has {there}")
    return found, "the rows asked for"


def _first(config: InspectDataConfig, encode: RowEncoder) -> tuple[Found, str]:
    """The first rows: some to show, and more to count."""
    found = Found(most_samples=config.count, most_skipped=SKIPPED_SHOWN)
    for number, row in islice(_rows(config), LOOK_AT_MOST):
        if number >= LOOK_AT_LEAST and len(found.samples) == config.count:
            return found, f"the first {number:,} rows"
        _take(found, number, row, encode)
    if not found.rows:
        raise DataError(f"{config.data}: holds no rows; give --data a file with rows")
    all_of_them = found.rows < LOOK_AT_MOST and config.max_samples is None
    return found, f"{'all' if all_of_them else 'the first'} {found.rows:,} rows"


def _rows(config: InspectDataConfig) -> Iterator[tuple[int, Row]]:
    return enumerate(islice(iter_rows(config.data, split=config.split), config.max_samples))


def _take(found: Found, number: int, row: Row, encode: RowEncoder) -> None:
    """Encode one row; count it, and keep it while there is room for what is shown."""
    encoded = encode(row_text(row))
    if encoded.reason:
        found.skipped[encoded.reason] += 1
        if len(found.skipped_rows) < found.most_skipped:
            found.skipped_rows.append(
                SkippedRow(number=number, reason=encoded.reason, beginning=beginning_of(row))
            )
        return
    ids, mask = np.frombuffer(encoded.ids, np.int32), np.frombuffer(encoded.mask, np.bool_)
    found.lengths.append(len(ids))
    found.supervised += int(mask.sum())
    if len(found.samples) < found.most_samples:
        found.samples.append((number, ids, mask))


def beginning_of(row: Row) -> str:
    """How a row begins, as JSON."""
    try:
        text = dumps(row, ensure_ascii=False, default=str)
    except RecursionError:
        return "brackets within brackets"
    return text if len(text) <= BEGINNING else f"{text[:BEGINNING]}…"


def _totals(found: Found, edges: list[int]) -> Totals:
    buckets = Counter(_bucket(length, edges) for length in found.lengths)
    return Totals(
        rows=found.rows,
        samples=len(found.lengths),
        tokens=sum(found.lengths),
        supervised=found.supervised,
        buckets={f"{bound:04d}": buckets[bound] for bound in sorted(buckets)},
        skipped=dict(found.skipped.most_common()),
    )


def _bucket(length: int, edges: list[int]) -> int:
    return edges[bisect_right(edges, length)]


def _would_stop(config: InspectDataConfig, found: Found) -> list[str]:
    skipped = found.skipped.total()
    if config.sample or skipped <= config.max_skipped * found.rows:
        return []
    return [
        f"{skipped} of {found.rows} rows cannot be used: a build of such data stops, since that is "
        f"more than --max-skipped {config.max_skipped:g} allows"
    ]


# --- a sealed cache -----------------------------------------------------------------------------


def inspect_cache(config: InspectConfig) -> Inspection:
    """Samples as they lie in a cache; their text needs the target's tokenizer."""
    refuse_bad_page(config.html)
    reader = CacheReader(config.cache, direct=False)
    indices = _indices(reader, config)
    tokenizer, notes = _tokenizer_of(reader, target=config.target)
    manifest = reader.manifest
    return with_page(
        Inspection(
            source=config.cache,
            target=reader.identity.target_spec.name,
            looked_at=f"all {manifest.rows:,} rows that it was built from",
            totals=Totals(
                rows=manifest.rows,
                samples=manifest.samples,
                tokens=manifest.tokens,
                supervised=manifest.supervised_tokens,
                buckets=dict(sorted(manifest.buckets.items())),
                skipped=manifest.skipped,
            ),
            samples=[_stored(reader, index, tokenizer) for index in indices],
            skipped_rows=[],
            notes=notes,
        ),
        config.html,
    )


def _indices(reader: CacheReader, config: InspectConfig) -> list[int]:
    """Where the samples asked for lie; some from everywhere in the cache, if none are named."""
    held = len(reader.located)
    if not config.sample:
        count = min(config.count, held)
        return [index * held // count for index in range(count)]
    index_of = {located.sample_id: index for index, located in enumerate(reader.located)}
    for number in config.sample:
        if number not in index_of:
            rows = reader.manifest.rows
            raise CacheError(
                f"--sample {number}: {config.cache} holds {held} of the rows 0 to {rows - 1} of "
                "its data, and not this one; `dflash cache inspect --data` on the data says why a "
                "row was skipped"
            )
    return [index_of[number] for number in sorted(set(config.sample))]


def _stored(reader: CacheReader, index: int, tokenizer: Any) -> ShownSample:
    located = reader.located[index]
    ids, mask = reader.tokens(index)
    return _shown(
        located.sample_id,
        ids,
        mask,
        tokenizer=tokenizer,
        bucket=reader.records[located.unit].bucket,
    )


def _tokenizer_of(reader: CacheReader, *, target: str | None) -> tuple[Any, list[str]]:
    """The tokenizer that the cache was built with, or None and a note that says why.

    A cache knows its tokenizer by its hash, and where its target was.  `target` says where it is
    now; then it has to be that one.
    """
    spec = reader.identity.target_spec
    name = target or str(reader.manifest.options.get("target", spec.name))
    try:
        tokenizer = load_tokenizer(_find_here(name, spec.revision))
        if hash_tokenizer(tokenizer) != reader.identity.tokenizer_spec.sha256:
            raise CacheMismatchError(
                f"{name}: its tokenizer is not the one that {reader.root} was built with"
            )
    except (TargetError, CacheMismatchError) as error:
        if target is not None:
            raise
        return None, [f"ids without text, since the tokenizer is not to be had here: {error}"]
    return tokenizer, []


def _find_here(name: str, revision: str | None) -> Path:
    """Folder of a target that is on this machine already; to look is no reason to download."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, HFValidationError, ValueError) as error:
        raise TargetError(f"{name}: not on this machine ({first_line(error)})") from None


# --- both ---------------------------------------------------------------------------------------


def _shown(
    number: int, ids: np.ndarray, mask: np.ndarray, *, tokenizer: Any, bucket: int
) -> ShownSample:
    plain: list[int] = ids.tolist()
    special = set() if tokenizer is None else set(tokenizer.added_tokens_decoder)
    pieces = [None] * len(plain) if tokenizer is None else pieces_of(plain, tokenizer)
    tokens = [
        Token(position=position, id=id_, piece=piece, supervised=on, special=id_ in special)
        for position, (id_, piece, on) in enumerate(zip(plain, pieces, mask.tolist(), strict=True))
    ]
    return ShownSample(number=number, bucket=bucket, tokens=tokens)


def refuse_bad_page(path: Path | None) -> None:
    """Before the work, not behind it."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"--html {path}: want a file in a folder that exists")


def with_page(found: Inspection, path: Path | None) -> Inspection:
    """The same inspection, written as a page if one is wanted."""
    if path is None:
        return found
    written = replace(found, html=path)
    try:
        write_file(path, page(written).encode())
    except OSError as error:
        raise ConfigError(f"--html {path}: cannot be written ({error.strerror})") from None
    return written
