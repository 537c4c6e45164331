"""The target's tokenizer as an identity, and the mask token that a drafter may use.

The mask token is one row of the frozen embedding (arXiv 2602.06036), and servers read its id from
the drafter's config: it must be an id that text never holds, neither end nor padding.
"""

from hashlib import sha256
from typing import Any

from dflash_cache.errors import ConfigError
from dflash_cache.schema import TokenizerSpec


def hash_tokenizer(tokenizer: Any) -> str:
    """SHA-256 of everything that turns text into ids."""
    return sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def describe_tokenizer(
    tokenizer: Any,
    *,
    embedding_rows: int,
    stop_ids: list[int],
    seen: dict[int, int],
    mask_token_id: int | None,
) -> TokenizerSpec:
    """Identity of the tokenizer, and the mask token that a drafter for it will use.

    `seen` says how often each special id occurs in the data.
    """
    unused = sorted(i for i in special_ids(tokenizer) if not seen.get(i))
    spec = TokenizerSpec(
        sha256=hash_tokenizer(tokenizer),
        chat_template_sha256=_hash_or_none(_template_text(tokenizer)),
        # Where ids end: len(tokenizer) counts tokens, and some number them with holes.
        length=max(tokenizer.get_vocab().values(), default=-1) + 1,
        eos_token_ids=stop_ids,
        pad_token_id=tokenizer.pad_token_id,
        unused_special_ids=[i for i in unused if i not in _spoken_for(tokenizer, stop_ids)],
        mask_token_id=None,
        mask_token_source="",
    )
    chosen, source = choose_mask_token(
        spec,
        embedding_rows=embedding_rows,
        wanted=mask_token_id,
        own=getattr(tokenizer, "mask_token_id", None),
    )
    return TokenizerSpec(**{**spec.to_dict(), "mask_token_id": chosen, "mask_token_source": source})


def choose_mask_token(
    spec: TokenizerSpec, *, embedding_rows: int, wanted: int | None, own: int | None
) -> tuple[int | None, str]:
    """A row of the embedding that text never produces, and where it comes from.

    Order: the user's, the tokenizer's own, the first row behind the tokenizer's last id, a
    special token that the data never uses.  None when there is nothing safe: `fit` then asks.
    """
    if wanted is not None:
        refuse_bad_mask_token(spec, wanted, embedding_rows=embedding_rows)
        return wanted, "--mask-token-id"
    if own is not None:
        return own, "the tokenizer's mask token"
    if spec.length < embedding_rows:
        return spec.length, "first embedding row behind the tokenizer's ids"
    if spec.unused_special_ids:
        return spec.unused_special_ids[-1], "special token that the data never uses"
    return None, "nothing safe found"


def refuse_bad_mask_token(spec: TokenizerSpec, wanted: int, *, embedding_rows: int) -> None:
    """A mask token that text can produce, or that ends text, silently ruins acceptance."""
    where = f"--mask-token-id {wanted}"
    if not 0 <= wanted < embedding_rows:
        raise ConfigError(f"{where}: the embedding has rows 0 to {embedding_rows - 1}")
    if wanted in spec.eos_token_ids or wanted == spec.pad_token_id:
        raise ConfigError(f"{where}: that is the end or padding token; choose an unused id")
    if wanted < spec.length and wanted not in (*spec.unused_special_ids, spec.mask_token_id):
        raise ConfigError(
            f"{where}: the tokenizer produces that id; choose one from {spec.length} to "
            f"{embedding_rows - 1} or an unused special token {spec.unused_special_ids[:8]}"
        )


def special_ids(tokenizer: Any) -> list[int]:
    """Ids of all added special tokens."""
    return [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]


def _spoken_for(tokenizer: Any, stop_ids: list[int]) -> set[int]:
    """Special ids with a job: ends, padding, and whatever the chat template writes."""
    jobs = {tokenizer.bos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id, *stop_ids}
    template = _template_text(tokenizer) or ""
    tokens = tokenizer.added_tokens_decoder.items()
    return {i for i in jobs if i is not None} | {i for i, t in tokens if t.content in template}


def _template_text(tokenizer: Any) -> str | None:
    """The chat template, or all of them where there is one for tools and one for the rest."""
    template = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template


def _hash_or_none(text: str | None) -> str | None:
    return None if text is None else sha256(text.encode()).hexdigest()
