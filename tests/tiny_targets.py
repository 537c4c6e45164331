"""Tiny random targets of several families, and the slowest way to decode with them: the oracle.

No tokenizer and no folder: a model in memory, fp32, whose greedy text is not one token again and
again.
"""

from types import SimpleNamespace

import torch
from reference import make_weights, small

from dflash_cache.survey import find_layers
from dflash_cache.target import Target
from dflash_fit.drafter import DFlashDraftModel, DrafterConfig
from dflash_fit.step import Frozen

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
FAMILIES = {
    "llama": {"family": "llama"},
    "qwen3": {"family": "qwen3"},
    "qwen3 sliding": {
        "family": "qwen3",
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "sliding_window": 6,
        "use_sliding_window": True,
    },
    "qwen3.5 hybrid": {
        "family": "qwen3_5_text",
        "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
        **DELTA_NET,
    },
}


def make_target(name: str, *, vocabulary: int = 48, layers: int = 4, spread: float = 0.3) -> Target:
    """A target of 32 channels; `spread` of its weights makes its choices clear."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=spread,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        model_type=FAMILIES[name]["family"],
        **{key: value for key, value in FAMILIES[name].items() if key != "family"},
    )
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    decoder, found = find_layers(model)
    return Target(
        model=model,
        decoder=decoder,
        layers=found,
        tokenizer=None,
        spec=SimpleNamespace(name=name, num_layers=layers),
        stop_ids=[],
        device=torch.device("cpu"),
    )


def make_drafter(target: Target, **changes) -> tuple[DFlashDraftModel, Frozen]:
    """A drafter with random weights for such a target, and the target's embedding and head."""
    vocabulary = len(target.embedding)
    settings = small(
        vocab_size=vocabulary,
        mask_token_id=vocabulary - 1,
        num_target_layers=len(target.layers),
        target_layer_ids=(0, len(target.layers) - 1),
        block_size=5,
        **changes,
    )
    drafter = DFlashDraftModel(DrafterConfig(**settings))
    drafter.load_state_dict(make_weights(settings, torch.Generator().manual_seed(1)))
    return drafter.requires_grad_(False), Frozen(embedding=target.embedding, head=target.head)


@torch.inference_mode()
def without_cache(target: Target, prompt: torch.Tensor, length: int) -> list[int]:
    """Greedy text, every token from a forward over the whole text before it."""
    ids = prompt
    for _ in range(length):
        logits = target.model(input_ids=ids[None], use_cache=False).logits[0, -1]
        ids = torch.cat([ids, logits.argmax()[None]])
    return ids[len(prompt) :].tolist()
