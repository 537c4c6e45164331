"""config.json of the speculators format (vllm-project/speculators), from and to the reference's.

Tensors have the same names there.  What differs: the drafter's shape is nested, a target layer is
counted as in a `hidden_states` tuple (entry 0 is the embedding, so ids are one higher), and the
block is told as the number of drafted tokens besides.

Causality is one switch, `sliding_window_non_causal`.  To speculators it is about sliding layers and
full ones are never causal; vLLM makes it `dflash_config.causal`, which it takes for all layers
(vllm-project/vllm#56692).  So only drafters whose layers are all alike are written, and both read
the switch as meant.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dflash_fit.drafter import FULL, SLIDING, DrafterConfig
from dflash_fit.errors import DrafterError
from dflash_fit.folder import ARCHITECTURE, DTYPE_NAMES, SHIFTED, to_config

MARK = "speculators_model_type"  # the key that tells this format from others
KIND = "dflash"
# Keys of config.json that are nested in this format.
NESTED = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps"),
    *("hidden_act", "attention_bias", "attention_dropout", "initializer_range"),
    *("max_position_embeddings", "max_window_layers", "layer_types", "use_sliding_window"),
    *("sliding_window", "rope_theta", "rope_parameters"),
)
# Those that older files have at the top.
WINDOW = ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers")


def to_speculators(
    config: DrafterConfig, *, dtype: torch.dtype, target: str | None
) -> dict[str, Any]:
    """config.json in the speculators format; `target` is what its vLLM loads the drafter for."""
    return {
        "architectures": [ARCHITECTURE],
        MARK: KIND,
        "speculators_config": {
            "algorithm": KIND,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}
            ],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "transformer_layer_config": {
            name: value for name, value in to_config(config, dtype=dtype).items() if name in NESTED
        },
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "block_size": config.block_size,
        "draft_vocab_size": config.vocab_size,
        "mask_token_id": config.mask_token_id,
        "num_target_layers": config.num_target_layers,  # ours: the format has no place for it
        "sample_from_anchor": False,
        "sliding_window_non_causal": not is_causal(config),
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": DTYPE_NAMES[dtype],
    }


def is_causal(config: DrafterConfig) -> bool:
    """Whether the layers are causal in the block; refuses what the one switch cannot say."""
    causal = {config.look(i).causal for i in range(config.num_hidden_layers)}
    if len(causal) > 1:
        raise DrafterError(
            "this drafter has layers that are causal in the block and layers that are not; vLLM "
            "takes this format's one switch for all layers, and would accept little without a "
            "word; export it without --format speculators, which vLLM reads right"
        )
    if causal == {True} and FULL in config.layer_types:
        raise DrafterError(
            "this drafter has full layers that are causal in the block, which the speculators "
            "format cannot say; export it without --format speculators"
        )
    return causal == {True}


def from_speculators(
    value: Mapping[str, Any], *, where: str, num_target_layers: int | None
) -> dict[str, Any]:
    """The same drafter as the reference's config.json says it.

    Only files of ours say how many layers the target has; for others it is given.
    """
    refuse_other_kind(value, where=where)
    nested = dict(need(value, "transformer_layer_config", where=where))
    layer_ids = need(value, "aux_hidden_state_layer_ids", where=where)
    if any(i < 1 for i in layer_ids):
        raise DrafterError(
            f"{where}: aux_hidden_state_layer_ids {layer_ids}; 0 is the target's embedding, which "
            "no cache holds as a layer"
        )
    layers = value.get("num_target_layers") or num_target_layers
    if layers is None:
        raise DrafterError(
            f"{where}: this format does not say how many layers the target has; add "
            '"num_target_layers" to it'
        )
    block_size = need(value, "block_size", where=where)
    full = {**nested, **{name: value[name] for name in WINDOW if value.get(name) is not None}}
    return {
        **full,
        **causality(full.get("layer_types") or (), value, where=where),
        "architectures": [ARCHITECTURE],
        "num_target_layers": layers,
        "block_size": block_size,
        "dflash_config": {
            "block_size": block_size,
            "mask_token_id": need(value, "mask_token_id", where=where),
            "target_layer_ids": [i - 1 for i in layer_ids],
        },
    }


def causality(
    layer_types: Sequence[str], value: Mapping[str, Any], *, where: str
) -> dict[str, bool]:
    """`is_causal` as the reference says it: absent where layers differ by their kind."""
    if SLIDING not in layer_types:
        return {"is_causal": False}
    if value.get("sliding_window_non_causal") is None:
        raise DrafterError(
            f"{where}: sliding_window_non_causal is missing, which speculators reads as causal and "
            "vLLM as not; add what the drafter was trained with"
        )
    if value["sliding_window_non_causal"]:
        return {"is_causal": False}
    return {"is_causal": True} if set(layer_types) == {SLIDING} else {}


def need(value: Mapping[str, Any], key: str, *, where: str) -> Any:
    if value.get(key) is None:
        raise DrafterError(f"{where}: {key} is missing; is this a DFlash drafter of speculators?")
    return value[key]


def refuse_other_kind(value: Mapping[str, Any], *, where: str) -> None:
    """Another algorithm, a vocabulary of its own, or labels that are shifted."""
    if value[MARK] != KIND:
        raise DrafterError(f"{where}: {MARK} = {value[MARK]}, want {KIND}")
    nested = need(value, "transformer_layer_config", where=where)
    rows = value.get("draft_vocab_size")
    if rows not in (None, nested.get("vocab_size")):
        raise DrafterError(
            f"{where}: drafts over {rows} tokens of {nested.get('vocab_size')}; a drafter with a "
            "vocabulary of its own is of a kind that this version does not compute"
        )
    width = value.get("target_hidden_size")
    if width not in (None, nested.get("hidden_size")):
        raise DrafterError(
            f"{where}: its target has {width} channels and itself {nested.get('hidden_size')}; "
            "this version wants both alike"
        )
    methods = (value.get("speculators_config") or {}).get("proposal_methods") or []
    for method in methods:
        drafted = method.get("speculative_tokens")
        if drafted is not None and drafted == value.get("block_size"):
            raise DrafterError(f"{where}: speculative_tokens = {drafted} = block_size: {SHIFTED}")
