"""What the library itself says of one row: the oracle that hooked states are held against.

Nothing here goes through our hooks on the layers: states come from the library's own
`hidden_states`, and the one that this tuple does not hold, the last layer's own output, is what
the final norm is given.

Letters: t tokens of the row, H hidden size.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash_cache.schema import FINAL_HIDDEN, layer_of
from dflash_cache.target import NoFinalNorm, Target


@dataclass(frozen=True, kw_only=True, eq=False)
class Report:
    """States [t, H] of one row, run alone and unpadded."""

    entries: list[Tensor]  # entry 0 the embedding, entry i + 1 target layer i
    unnormed: Tensor | None  # what the final norm is given; None where no norm was found
    final: Tensor  # what it makes of that
    norm: nn.Module | None

    def layer(self, layer_id: int) -> Tensor | None:
        """The output of a target layer; None where the library has no word for it."""
        return self.entries[layer_id + 1] if layer_id < self.last_layer else self.unnormed

    @property
    def last_layer(self) -> int:
        return len(self.entries) - 2

    def plane(self, plane: str) -> Tensor | None:
        """What the cache should keep under this name."""
        return self.final if plane == FINAL_HIDDEN else self.layer(layer_of(plane))

    @torch.inference_mode()
    def normed(self, states: Tensor) -> Tensor | None:
        """States after the final norm, where there is one."""
        if self.norm is None:
            return None
        weight = next(self.norm.parameters(), states)
        found: Tensor = self.norm(states.to(weight.device, weight.dtype))
        return found.to(states.device, states.dtype)

    def cpu(self) -> "Report":
        """The same with its states on the CPU, for one who compares elsewhere."""
        return Report(
            entries=[entry.cpu() for entry in self.entries],
            unnormed=None if self.unnormed is None else self.unnormed.cpu(),
            final=self.final.cpu(),
            norm=self.norm,
        )


def report_of(target: Target, input_ids: Tensor) -> Report:
    """The library's report on one row of ids [t]."""
    with _Children(target.decoder) as children:
        entries = [entry[0] for entry in target.all_hidden_states(input_ids[None])]
    for norm, given, made in reversed(children.calls):
        if given.shape[1:] == made.shape[1:] == entries[-1].shape:
            there = None if isinstance(norm, NoFinalNorm) else norm
            return Report(entries=entries, unnormed=given[0], final=made[0], norm=there)
    return Report(entries=entries, unnormed=None, final=entries[-1], norm=None)


class _Children:
    """Notes what goes through the decoder's own children; the last one is the final norm.

    Families call it by many names, and all run it behind the layers, which are children of a list.
    """

    def __init__(self, decoder: Any) -> None:
        self.decoder, self.hooks = decoder, ExitStack()
        self.calls: list[tuple[nn.Module, Tensor, Tensor]] = []

    def __enter__(self) -> "_Children":
        for child in self.decoder.children():
            hook = child.register_forward_hook(self._note)
            self.hooks.callback(hook.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self.hooks.close()

    def _note(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor):
            self.calls.append((module, inputs[0], output))
