"""The target's cache while it decodes several texts, and how rejected tokens leave it again.

Attention layers keep keys and values.  Rows end together at the right; a row that has fewer
tokens than the longest is padded on its left, and the padding is masked.  To take back unlike
numbers of tokens the rows are moved to the right again: one gather per layer and pass, or the
library's own `crop` where all rows take back alike (always so for one text).

Recurrent layers (Gated DeltaNet and its like) keep one state that every token has changed, and
that nothing can crop.  Before a block is read their states are copied; of the block, the inputs
of their mixers are kept.  Where a row rejects drafts, its state is put back and the mixers alone
read the accepted tokens again: no attention, no MLP, no head.  The inputs of accepted tokens do
not depend on rejected ones, so this is exactly the state that those tokens leave.  The price is
a copy of the states per pass, and the mixers' share of a pass over the accepted tokens after a
rejection.

R rows, n tokens of a pass, W width: tokens of the longest row.
"""

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_cache.errors import TargetError
from dflash_cache.target import Target

STATES = ("conv_states", "recurrent_states")  # of a recurrent layer in the library's cache


def empty_cache(target: Target, *, capacity: int | None) -> Any:
    """A cache of the library that can take tokens back.

    Static with room for `capacity` tokens of each row, or dynamic where that is None.
    """
    from transformers import cache_utils as library

    planned = library.DynamicCache(config=target.model.config).layers
    # Never a cache of the sliding window alone: what has left it cannot come back when tokens
    # are taken back.  The model masks what is outside its windows all the same.
    attention = ("DynamicLayer", "DynamicSlidingWindowLayer")
    as_planned = ("LinearAttentionLayer", "DummyLayer")  # the latter shares another layer's keys
    kinds = [type(layer).__name__ for layer in planned]
    unknown = set(kinds).difference(attention, as_planned)
    if unknown:
        raise TargetError(
            f"{target.spec.name}: has layers whose cache ({', '.join(sorted(unknown))}) this "
            "decoding cannot roll back; measure offline with --cache instead"
        )

    def attention_layer() -> Any:
        if capacity is None:
            return library.DynamicLayer()
        return library.StaticLayer(max_cache_len=capacity)

    return library.Cache(
        layers=[
            attention_layer() if kind in attention else layer
            for kind, layer in zip(kinds, planned, strict=True)
        ]
    )


def recurrent_layers(cache: Any) -> dict[int, Any]:
    """By number, the layers that keep a state."""
    return {i: layer for i, layer in enumerate(cache.layers) if hasattr(layer, "recurrent_states")}


def attention_layers(cache: Any) -> dict[int, Any]:
    """By number, the layers that keep keys and values of their own."""
    return {
        i: layer for i, layer in enumerate(cache.layers) if getattr(layer, "keys", None) is not None
    }


def join_caches(caches: Sequence[Any], lengths: Sequence[int], into: Any) -> None:
    """Put caches of one text each side by side into an empty one."""
    width = max(lengths)

    def side_by_side(index: int, name: str) -> Tensor:
        parts = [getattr(cache.layers[index], name) for cache in caches]
        padded = [
            F.pad(part, (0, 0, width - length, 0))
            for part, length in zip(parts, lengths, strict=True)
        ]
        return torch.cat(padded)

    for index in attention_layers(caches[0]):
        into.layers[index].update(side_by_side(index, "keys"), side_by_side(index, "values"))
    for index, first in recurrent_layers(caches[0]).items():
        parts = [cache.layers[index] for cache in caches]
        update = into.layers[index].update_conv_state, into.layers[index].update_recurrent_state
        for name, write in zip(STATES, update, strict=True):
            for key, state in getattr(first, name).items():
                if state is not None:
                    write(torch.cat([getattr(p, name)[key] for p in parts]), state_idx=key)


def keep_columns(layer: Any, rows: Tensor, columns: Tensor, *, taken: int) -> None:
    """Of an attention layer's keys and values keep these rows [R'] and columns [R', W'].

    The width falls by `taken`.
    """
    heads = torch.arange(layer.keys.shape[1], device=rows.device)[:, None]
    kept = [t[rows[:, None, None], heads, columns[:, None]] for t in (layer.keys, layer.values)]
    if not is_static(layer):
        layer.keys, layer.values = kept
        return
    layer.keys, layer.values = layer.keys[rows], layer.values[rows]
    for whole, part in zip((layer.keys, layer.values), kept, strict=True):
        whole[:, :, : columns.shape[1]] = part
    crop(layer, taken)


def is_static(layer: Any) -> bool:
    return hasattr(layer, "max_cache_len")


def crop(layer: Any, taken: int) -> None:
    """Take the last columns of every row off an attention layer."""
    if is_static(layer):
        # In 5.17 the static layer has no `crop`; in later ones this is all that it does.
        layer.cumulative_length.sub_(taken)
    else:
        layer.crop(-taken)  # a negative number means "remove so many" in every version


def with_states(layer: Any, rows: Tensor | EllipsisType) -> Any:
    """A copy of a recurrent layer's cache with the states of some rows, or of all (`...`)."""
    made = copy.copy(layer)
    for name in STATES:
        states = getattr(layer, name)
        setattr(made, name, {k: s if s is None else s[rows].clone() for k, s in states.items()})
    return made


@dataclass(frozen=True, kw_only=True)
class MixerCall:
    """The part of a decoder layer that was given the cache, and what it read [R, n, H]."""

    mixer: nn.Module
    hidden: Tensor
    cache_name: str


class Rewind:
    """The recurrent layers during one pass: their states before it, and their mixers' inputs."""

    def __init__(self, target: Target, cache: Any, layers: Mapping[int, Any]) -> None:
        self.target, self.cache = target, cache
        self.before = {index: with_states(layer, ...) for index, layer in layers.items()}
        self.calls: dict[int, MixerCall] = {}
        self.hooks = ExitStack()

    def __enter__(self) -> "Rewind":
        for index in self.before:
            for part in self.target.layers[index].children():
                record = partial(self._record, index)
                hook = part.register_forward_pre_hook(record, with_kwargs=True)
                self.hooks.callback(hook.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self.hooks.close()

    def _record(self, index: int, mixer: nn.Module, given: Any, named: dict[str, Any]) -> None:
        for name, value in named.items():
            if value is self.cache:
                hidden = named["hidden_states"] if "hidden_states" in named else given[0]
                self.calls[index] = MixerCall(mixer=mixer, hidden=hidden, cache_name=name)

    def keep(self, counts: Mapping[int, int]) -> None:
        """Leave in these rows the state behind their first so many tokens of the pass.

        Rows that keep alike are read together; nothing is padded, since padding would change a
        recurrent state.
        """
        for index in self.before:
            if index not in self.calls:
                raise TargetError(
                    f"{self.target.spec.name}: the recurrent part of target layer {index} is not "
                    "called in the ordinary way, so its state cannot be rolled back; measure "
                    "offline with --cache instead"
                )
            call = self.calls[index]
            for count in set(counts.values()) - {call.hidden.shape[1]}:
                rows = [row for row, kept in counts.items() if kept == count]
                self._read_again(index, call, torch.tensor(rows, device=self.target.device), count)

    def _read_again(self, index: int, call: MixerCall, rows: Tensor, count: int) -> None:
        whole, part = self.cache.layers[index], with_states(self.before[index], rows)
        self.cache.layers[index] = part
        call.mixer(hidden_states=call.hidden[rows, :count], **{call.cache_name: self.cache})
        self.cache.layers[index] = whole
        for name in STATES:
            for key, state in getattr(part, name).items():
                if state is not None:
                    getattr(whole, name)[key][rows] = state


class TargetCache:
    """The library's cache over R texts of unlike length; `lengths` are their tokens in it."""

    def __init__(
        self, target: Target, caches: Sequence[Any], lengths: Sequence[int], *, capacity: int | None
    ) -> None:
        self.target, self.lengths = target, list(lengths)
        self.cache = empty_cache(target, capacity=capacity)
        join_caches(caches, lengths, self.cache)
        self.rewind = Rewind(target, self.cache, {})

    def place(self, count: int, rooms: Sequence[int]) -> dict[str, Tensor]:
        """Where `count` more tokens of every row stand; a mask where a row is padded.

        What a row has behind its room counts for nothing, and stands where its last token does:
        a target that learned its positions has none beyond.
        """
        lengths = torch.tensor(self.lengths, device=self.target.device)[:, None]
        width = max(self.lengths)
        last = torch.tensor(rooms, device=lengths.device)[:, None]
        steps = torch.arange(count, device=lengths.device)
        where = {"position_ids": lengths + torch.minimum(steps, last)}
        if min(self.lengths) < width:
            columns = torch.arange(width + count, device=lengths.device)
            where["attention_mask"] = (columns >= width - lengths).long()
        return where

    def watch(self, count: int) -> Rewind:
        """Around a pass over `count` tokens of every row: remember what may be taken back."""
        # One token is an anchor, which stays: plain decoding pays nothing.
        layers = recurrent_layers(self.cache) if count > 1 else {}
        self.rewind = Rewind(self.target, self.cache, layers)
        self.lengths = [length + count for length in self.lengths]
        return self.rewind

    def keep(self, counts: Mapping[int, int], *, read: int) -> None:
        """Of the last pass over `read` tokens keep so many in these rows, and drop other rows."""
        if any(count != read for count in counts.values()):
            self.rewind.keep(counts)
        if not counts:
            self.lengths = []
            return
        rows = torch.tensor(list(counts), device=self.target.device)
        old = [self.lengths[row] for row in counts]
        new = [length - read + count for length, count in zip(old, counts.values(), strict=True)]
        self._keep_attention(rows, old, new)
        if len(rows) < len(self.lengths):
            for index, layer in recurrent_layers(self.cache).items():
                self.cache.layers[index] = with_states(layer, rows)
        self.lengths = new

    def _keep_attention(self, rows: Tensor, old: Sequence[int], new: Sequence[int]) -> None:
        layers = attention_layers(self.cache).values()
        taken = max(self.lengths) - max(new)
        alike = all(before - after == taken for before, after in zip(old, new, strict=True))
        if alike and len(rows) == len(self.lengths):
            for layer in layers:
                crop(layer, taken)
            return
        # Column j of a row was column j + shift; columns before its text are padding.
        ends = zip(old, new, strict=True)
        shift = [(max(self.lengths) - before) - (max(new) - after) for before, after in ends]
        columns = torch.arange(max(new)) + torch.tensor(shift)[:, None]
        columns = columns.clamp(min=0).to(rows.device)
        for layer in layers:
            keep_columns(layer, rows, columns, taken=taken)
