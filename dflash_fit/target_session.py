"""The target reading several texts piece by piece, all of them in one pass.

K target layers, R texts, n tokens of a pass, H hidden size, V vocabulary.
"""

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from dflash_cache.target import LayerTaps, Target
from dflash_fit.target_cache import TargetCache, empty_cache

CacheKind = Literal["dynamic", "static"]


class TargetSession:
    """The target with its cache over R texts, and the states that a drafter reads."""

    def __init__(self, target: Target, layer_ids: Collection[int], *, cache: CacheKind) -> None:
        self.target, self.layer_ids, self.kind = target, list(layer_ids), cache
        self.cache_name = cache_name(target.model)

    def start(self, prompts: Sequence[Tensor], *, room: int) -> tuple[Tensor, list[Tensor]]:
        """Read the prompts; logits [R, 1, V] behind them, and states [K, length, H] of each.

        Prompts are read one by one, so that no padding enters a recurrent state.  Behind the
        longest there is room for so many more tokens.
        """
        logits, states, caches = [], [], []
        for prompt in prompts:
            caches.append(empty_cache(self.target, capacity=None))
            said, hidden = self._forward(prompt[None], caches[-1], logits_to_keep=1)
            logits.append(said)
            states.append(hidden[:, 0])
        lengths = [len(prompt) for prompt in prompts]
        capacity = max(lengths) + room if self.kind == "static" else None
        self.cache = TargetCache(self.target, caches, lengths, capacity=capacity)
        return torch.cat(logits), states

    def read(self, ids: Tensor, *, rooms: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Read tokens [R, n]; logits [R, n, V], and states [K, R, n, H].

        Behind its first token of these, a row has room for so many more in its text.
        """
        where = self.cache.place(ids.shape[1], rooms)
        with self.cache.watch(ids.shape[1]):
            return self._forward(ids, self.cache.cache, logits_to_keep=0, **where)

    def keep(self, counts: Mapping[int, int], *, read: int) -> None:
        """Of the last pass keep so many tokens in these rows; other rows are finished."""
        self.cache.keep(counts, read=read)

    def _forward(self, ids: Tensor, cache: Any, **more: Any) -> tuple[Tensor, Tensor]:
        with LayerTaps(self.target.layers, self.layer_ids, stop=False) as taps:
            output = self.target.model(
                input_ids=ids, use_cache=True, **{self.cache_name: cache}, **more
            )
            states = taps.take()
        # The cache on disk holds bfloat16, so this is what the drafter has learnt from.
        rounded = [state.to(torch.bfloat16) for state in states]
        return output.logits, torch.stack(rounded) if rounded else ids.new_empty(0, *ids.shape)


def cache_name(model: Any) -> str:
    """How this version of transformers wants its cache called; the older name is on its way out."""
    named = inspect.signature(model.forward).parameters
    return "cache" if "cache" in named else "past_key_values"
