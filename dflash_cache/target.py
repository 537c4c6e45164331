"""The frozen target: load it, and take hidden states out of it.

Letters: R rows of a padded batch, S its width, K target layers kept, H hidden size.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dflash_cache.errors import ConfigError, TargetError
from dflash_cache.schema import TargetSpec


class _EnoughLayers(Exception):
    """Raised by the last hook: the layers above are not needed."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A loaded causal LM with its decoder layers found."""

    model: Any
    decoder: Any
    layers: nn.ModuleList
    tokenizer: Any
    spec: TargetSpec
    stop_ids: list[int]  # every id that ends an answer
    device: torch.device

    @property
    def embedding(self) -> Tensor:
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def head(self) -> Tensor:
        head = self.model.get_output_embeddings()
        assert head is not None, "the head of this target was not loaded, or was freed"
        weight: Tensor = head.weight
        return weight

    @property
    def attention(self) -> str:
        """The implementation of attention that the model runs, as transformers names it."""
        name: str = self.model.config._attn_implementation
        return name

    @property
    def has_experts(self) -> bool:
        """Whether a router sends the tokens of some layer that is there to experts.

        Families of transformers keep the experts in a module of this name (Doge does not, and is
        held to what others are); configs tell of them under five names, and some of a target that
        has none.
        """
        return any(name.rpartition(".")[2] == "experts" for name, _ in self.layers.named_modules())

    @property
    def is_whole(self) -> bool:
        """Whether the final norm and all layers are there, so that there is a final state."""
        cut = any(isinstance(part, NoFinalNorm) for part in self.decoder.children())
        return not cut and len(self.layers) == self.spec.num_layers

    def keep_up_to(self, layer_id: int) -> None:
        """Give back the memory of all that lies above a target layer.

        The embedding stays, and with it a head that is tied to it.
        """
        cut_above(self.model, self.decoder, self.layers, layer_id, tied=self.spec.tied_head)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def hidden_states(self, input_ids: Tensor, layer_ids: Sequence[int]) -> list[Tensor]:
        """Outputs [R, S, H] of the given target layers; the forward stops after the last of them.

        Rows are padded on the right, so a causal target never sees the padding and needs no
        attention mask; `proofs` checks exactly that.
        """
        assert max(layer_ids) < len(self.layers), (list(layer_ids), len(self.layers))
        with LayerTaps(self.layers, layer_ids, stop=True) as taps:
            with suppress(_EnoughLayers):
                self.decoder(input_ids=input_ids.to(self.device), use_cache=False)
            return taps.take()

    @torch.inference_mode()
    def hidden_and_final(self, input_ids: Tensor, layer_ids: Sequence[int]) -> list[Tensor]:
        """The same, and behind them what the head reads: the state after the final norm."""
        assert self.is_whole, "this target was cut; it has no final state"
        with LayerTaps(self.layers, layer_ids, stop=False) as taps:
            output = self.decoder(input_ids=input_ids.to(self.device), use_cache=False)
            return [*taps.take(), output.last_hidden_state]

    @torch.inference_mode()
    def all_hidden_states(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        """What the library itself reports: entry 0 the embedding, entry i + 1 target layer i.

        The last entry stands after the target's final norm in most families.  Of a target that
        was cut, entries end with the last layer that is left, before any norm.
        """
        output = self.decoder(
            input_ids=input_ids.to(self.device), use_cache=False, output_hidden_states=True
        )
        states: tuple[Tensor, ...] = output.hidden_states
        return states

    @torch.inference_mode()
    def logits(self, input_ids: Tensor) -> Tensor:
        """What the whole model says [R, S, V], by its own way from states to logits."""
        assert self.is_whole, "this target was cut; it has no logits"
        output = self.model(input_ids=input_ids.to(self.device), use_cache=False)
        logits: Tensor = output.logits
        return logits

    @torch.inference_mode()
    def final_hidden(self, input_ids: Tensor) -> Tensor:
        """States [R, S, H] after the final norm: exactly what the head reads."""
        assert self.is_whole, "this target was cut; it has no final state"
        output = self.decoder(input_ids=input_ids.to(self.device), use_cache=False)
        states: Tensor = output.last_hidden_state
        return states


class NoFinalNorm(nn.Identity):
    """Stands where the final norm of a target was cut away."""


def cut_above(
    model: Any, decoder: Any, layers: nn.ModuleList, layer_id: int, *, tied: bool = False
) -> None:
    """Take from a model what lies above a target layer: layers, final norm, and a head of its own.

    The config still tells of all layers, so that what depends on their number (families that
    share or alternate by it) is as in the whole model.
    """
    assert 0 <= layer_id < len(layers), (layer_id, len(layers))
    del layers[layer_id + 1 :]
    if (name := final_norm_name(decoder, layers)) is not None:
        setattr(decoder, name, NoFinalNorm())
    if not tied and (head := model.get_output_embeddings()) is not None:
        owner, _, name = module_name(model, head).rpartition(".")
        setattr(model.get_submodule(owner), name, None)


def final_norm_name(decoder: Any, layers: nn.ModuleList) -> str | None:
    """The norm that a decoder makes behind its layers: vectors alone, where a norm of its
    embeddings would come before them."""
    children = list(decoder.named_children())
    behind = children[[part is layers for _, part in children].index(True) + 1 :]
    for name, part in behind:
        weights = list(part.parameters())
        if weights and all(weight.ndim == 1 for weight in weights):
            return str(name)
    return None


def module_name(model: nn.Module, wanted: nn.Module) -> str:
    """Where in a model one of its modules is."""
    return str(next(name for name, module in model.named_modules() if module is wanted))


class LayerTaps:
    """Forward hooks on decoder layers, removed when the block ends."""

    def __init__(self, layers: nn.ModuleList, layer_ids: Sequence[int], *, stop: bool) -> None:
        self.layers, self.layer_ids = layers, list(layer_ids)
        self.last = max(self.layer_ids) if stop else None
        self.states: dict[int, Tensor] = {}
        self.hooks = ExitStack()

    def __enter__(self) -> "LayerTaps":
        for layer_id in self.layer_ids:
            hook = self.layers[layer_id].register_forward_hook(partial(self._keep, layer_id))
            self.hooks.callback(hook.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self.hooks.close()

    def _keep(self, layer_id: int, module: nn.Module, inputs: Any, output: Any) -> None:
        self.states[layer_id] = output[0] if isinstance(output, tuple) else output
        if layer_id == self.last:
            raise _EnoughLayers

    def take(self) -> list[Tensor]:
        """The states of the last forward, in the order asked for."""
        missing = [i for i in self.layer_ids if i not in self.states]
        if missing:
            raise TargetError(
                f"target layers {missing} never ran: this model does not call its layers in the "
                "ordinary way, so its states cannot be taken"
            )
        return [self.states.pop(layer_id) for layer_id in self.layer_ids]


def default_layer_ids(num_layers: int, count: int) -> list[int]:
    """The reference's choice: evenly from the second to the third-to-last layer.

    Source: z-lab/dflash, `build_target_layer_ids`; Python's rounding, half to even.
    """
    if count == 1:
        return [num_layers // 2]
    ids = [round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)]
    if ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= num_layers:
        raise ConfigError(
            f"--num-target-layers {count}: a target of {num_layers} layers has no {count} distinct "
            "layers between its second and its third-to-last; ask for fewer or name --target-layers"
        )
    return ids


def checked_layer_ids(layer_ids: Iterable[int], num_layers: int) -> list[int]:
    """The user's own choice, in increasing order and in range."""
    ids = list(layer_ids)
    if ids != sorted(set(ids)) or not ids or ids[0] < 0 or ids[-1] >= num_layers:
        raise ConfigError(
            f"--target-layers {','.join(map(str, ids))}: want increasing layer numbers between 0 "
            f"and {num_layers - 1} (0 is the first decoder layer)"
        )
    return ids
