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

from dflash_cache.devices import DTYPES, pick_device
from dflash_cache.errors import ConfigError, TargetError
from dflash_cache.schema import TargetSpec
from dflash_cache.survey import (
    Survey,
    find_layers,
    first_line,
    survey_target,
    with_weights_hash,
)


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
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    @torch.inference_mode()
    def hidden_states(self, input_ids: Tensor, layer_ids: Sequence[int]) -> list[Tensor]:
        """Outputs [R, S, H] of the given target layers; the forward stops after the last of them.

        Rows are padded on the right, so a causal target never sees the padding and needs no
        attention mask; `proofs` checks exactly that.
        """
        with LayerTaps(self.layers, layer_ids, stop=True) as taps:
            with suppress(_EnoughLayers):
                self.decoder(input_ids=input_ids.to(self.device), use_cache=False)
            return taps.take()

    @torch.inference_mode()
    def hidden_and_final(self, input_ids: Tensor, layer_ids: Sequence[int]) -> list[Tensor]:
        """The same, and behind them what the head reads: the state after the final norm."""
        with LayerTaps(self.layers, layer_ids, stop=False) as taps:
            output = self.decoder(input_ids=input_ids.to(self.device), use_cache=False)
            return [*taps.take(), output.last_hidden_state]

    @torch.inference_mode()
    def all_hidden_states(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        """What the library itself reports: entry 0 the embedding, entry i + 1 target layer i.

        The last entry stands after the target's final norm in most families.
        """
        output = self.decoder(
            input_ids=input_ids.to(self.device), use_cache=False, output_hidden_states=True
        )
        states: tuple[Tensor, ...] = output.hidden_states
        return states

    @torch.inference_mode()
    def logits(self, input_ids: Tensor) -> Tensor:
        """What the whole model says [R, S, V], by its own way from states to logits."""
        output = self.model(input_ids=input_ids.to(self.device), use_cache=False)
        logits: Tensor = output.logits
        return logits

    @torch.inference_mode()
    def final_hidden(self, input_ids: Tensor) -> Tensor:
        """States [R, S, H] after the final norm: exactly what the head reads."""
        output = self.decoder(input_ids=input_ids.to(self.device), use_cache=False)
        states: Tensor = output.last_hidden_state
        return states


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


def load_target(name: str, *, dtype: str, device: str) -> Target:
    """Find, describe, hash and load a target."""
    return load_weights(with_weights_hash(survey_target(name, dtype=dtype)), device=device)


def load_weights(survey: Survey, *, device: str) -> Target:
    """Load a surveyed target: frozen, in evaluation mode, with every weight that it should have."""
    from transformers import AutoModelForCausalLM

    on, name = pick_device(device), survey.spec.name
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            survey.folder,
            dtype=DTYPES[survey.spec.dtype],
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # transformers raises many kinds; all mean "cannot be loaded"
        raise TargetError(f"{name}: cannot be loaded ({first_line(error)})") from None
    if info["mismatched_keys"]:
        raise TargetError(
            f"{name}: weights have other shapes than config.json says "
            f"({sorted(map(str, info['mismatched_keys']))[:2]} ...); are both of one model?"
        )
    if info["missing_keys"]:
        raise TargetError(
            f"{name}: weights are missing ({sorted(info['missing_keys'])[:3]} ...); it would run "
            "with random ones. Is the folder complete?"
        )
    model.to(on).eval().requires_grad_(False)
    decoder, layers = find_layers(model)
    target = Target(
        model=model,
        decoder=decoder,
        layers=layers,
        tokenizer=survey.tokenizer,
        spec=survey.spec,
        stop_ids=survey.stop_ids,
        device=on,
    )
    # The library unties a pair whose weights differ, whatever the config says.
    if (target.head.data_ptr() == target.embedding.data_ptr()) != target.spec.tied_head:
        raise TargetError(
            f"{name}: config.json says tie_word_embeddings = {target.spec.tied_head}, the weights "
            "say otherwise; correct config.json, or drafters would learn against a wrong head"
        )
    return target
