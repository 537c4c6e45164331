"""Real greedy speculative decoding with the target in transformers, and plain greedy as its oracle.

One cycle: the drafter drafts a block after the anchor in one pass, the target reads the whole
block in one pass, and the longest prefix on which both agree is committed with one token of the
target's own, which is the next anchor.  Batch of one.  After every cycle the drafter's context
is one token shorter than the text: everything but the pending anchor.

K target layers, B block size.
"""

import inspect
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_cache.target import LayerTaps, Target
from dflash_fit.acceptance import Chain
from dflash_fit.attention import Blocks, DenseSight
from dflash_fit.drafter import ContextKV, DFlashDraftModel, block_ids, block_positions
from dflash_fit.errors import DrafterError
from dflash_fit.step import Frozen, layer_sights


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """An answer, its target passes after reading the prompt, and the seconds it took."""

    tokens: list[int]  # the answer, stop token included
    chain: Chain
    seconds: float


class TargetSession:
    """The target reading one text piece by piece, with its cache and its hidden states."""

    def __init__(self, target: Target, layer_ids: Collection[int]) -> None:
        from transformers import DynamicCache

        refuse_recurrent(target)
        self.target, self.layer_ids = target, list(layer_ids)
        # Not by the model's config: a cache that keeps only a sliding window cannot take
        # rejected tokens back.  The model masks what is outside its windows all the same.
        self.cache: Any = DynamicCache()
        self.cache_name = cache_name(target.model)
        self.length = 0

    @torch.inference_mode()
    def read(self, ids: Tensor, *, last_only: bool = False) -> tuple[Tensor, Tensor | None]:
        """Read tokens [n]; greedy next tokens [n] (or [1]), and states [K, n, H] if asked for."""
        with LayerTaps(self.target.layers, self.layer_ids, stop=False) as taps:
            logits = self.target.model(
                input_ids=ids[None],
                use_cache=True,
                logits_to_keep=1 if last_only else 0,
                **{self.cache_name: self.cache},
            ).logits[0]
            states = taps.take() if self.layer_ids else []
        self.length += len(ids)
        # The cache holds bfloat16, so this is what the drafter has learnt from.
        rounded = [state[0].to(torch.bfloat16) for state in states]
        return logits.argmax(dim=-1), torch.stack(rounded) if rounded else None

    def forget(self, count: int) -> None:
        """Take the last tokens back."""
        if count:
            # Negative means "remove so many" in every version that we support.
            self.cache.crop(-count)
            self.length -= count


def cache_name(model: Any) -> str:
    """How this version of transformers wants its cache called; the older name is on its way out."""
    named = inspect.signature(model.forward).parameters
    return "cache" if "cache" in named else "past_key_values"


def refuse_recurrent(target: Target) -> None:
    """A recurrent state cannot be cropped; rejected drafts would stay in it."""
    kinds = getattr(target.model.config.get_text_config(), "layer_types", None) or []
    if any("linear" in kind or "mamba" in kind or "recurrent" in kind for kind in kinds):
        raise DrafterError(
            f"{target.spec.name}: has recurrent layers, whose state this decoding cannot roll "
            "back; measure offline with --cache instead"
        )


def greedy(
    target: Target, prompt: Tensor, *, max_new_tokens: int, stop_ids: Collection[int]
) -> Decoded:
    """Plain greedy decoding, one token per target pass."""
    began = time.perf_counter()
    session = TargetSession(target, ())
    following, _ = session.read(prompt, last_only=True)
    tokens = [int(following[-1])]
    while tokens[-1] not in stop_ids and len(tokens) < max_new_tokens:
        following, _ = session.read(torch.tensor(tokens[-1:], device=prompt.device))
        tokens.append(int(following[0]))
    ones = (1,) * (len(tokens) - 1)
    chain = Chain(accepted=(0,) * len(ones), committed=ones)
    return Decoded(tokens=tokens, chain=chain, seconds=time.perf_counter() - began)


class DraftSession:
    """The drafter's side of one text: context keys and values, grown as the target reads."""

    def __init__(self, drafter: DFlashDraftModel, frozen: Frozen) -> None:
        self.drafter, self.frozen = drafter, frozen
        self.context: ContextKV = []
        self.length = 0

    @torch.inference_mode()
    def extend(self, hidden: Tensor) -> None:
        """Append the states [K, n, H] of tokens that are committed and read."""
        device = hidden.device
        positions = torch.arange(self.length, self.length + hidden.shape[1], device=device)
        new = self.drafter.context(hidden, positions)
        if self.context:
            new = [
                (torch.cat([k, more_k], dim=1), torch.cat([v, more_v], dim=1))
                for (k, v), (more_k, more_v) in zip(self.context, new, strict=True)
            ]
        self.context = new
        self.length += hidden.shape[1]

    @torch.inference_mode()
    def logits(self, anchor_token: int) -> Tensor:
        """Logits [B - 1, V] of slots 1 .. B - 1 of the block after the context."""
        config, device = self.drafter.config, self.context[0][0].device
        anchor = torch.tensor([self.length], device=device)
        ids = block_ids(
            torch.tensor([anchor_token], device=device),
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
        )
        block = Blocks(
            anchors=anchor,
            starts=torch.zeros_like(anchor),
            valid=torch.ones_like(anchor, dtype=torch.bool),
            context=self.length,
            block_size=config.block_size,
        )
        sights = layer_sights(self.drafter, block, DenseSight.of)
        positions = block_positions(anchor, block_size=config.block_size).flatten()
        rows = self.drafter(self.frozen.embedding[ids.flatten()], self.context, positions, sights)
        return F.linear(rows[0], self.frozen.head)

    def draft(self, anchor_token: int) -> Tensor:
        """Draft tokens [B - 1] after the anchor."""
        return self.logits(anchor_token).argmax(dim=-1)


def speculate(
    target: Target,
    drafter: DFlashDraftModel,
    frozen: Frozen,
    prompt: Tensor,
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
) -> Decoded:
    """Greedy speculative decoding; its tokens equal those of `greedy`."""
    began = time.perf_counter()
    session = TargetSession(target, drafter.config.target_layer_ids)
    drafts = DraftSession(drafter, frozen)
    following, hidden = session.read(prompt, last_only=True)
    assert hidden is not None
    drafts.extend(hidden)
    tokens = [int(following[-1])]
    accepted: list[int] = []
    committed: list[int] = []
    while tokens[-1] not in stop_ids and len(tokens) < max_new_tokens:
        draft = drafts.draft(tokens[-1])
        block = torch.cat([torch.tensor(tokens[-1:], device=draft.device), draft])
        following, hidden = session.read(block)
        assert hidden is not None
        agreed = int((draft == following[:-1]).long().cumprod(dim=0).sum())
        # Committed: the agreed drafts and the target's own token behind them.  Read and kept:
        # the old anchor and the agreed drafts.
        session.forget(len(block) - agreed - 1)
        drafts.extend(hidden[:, : agreed + 1])
        new = _until_end(following[: agreed + 1].tolist(), max_new_tokens - len(tokens), stop_ids)
        tokens += new
        accepted.append(min(agreed, len(new)))
        committed.append(len(new))
    chain = Chain(accepted=tuple(accepted), committed=tuple(committed))
    return Decoded(tokens=tokens, chain=chain, seconds=time.perf_counter() - began)


def _until_end(tokens: list[int], room: int, stop_ids: Collection[int]) -> list[int]:
    """Cut at the stop token (kept) or at the room that is left."""
    for index, token in enumerate(tokens[:room]):
        if token in stop_ids:
            return tokens[: index + 1]
    return tokens[:room]
