"""A second drafter, slow on purpose: the oracle of stage two.  It shares no code with it.

Written from the published drafter: Qwen3's own norm, MLP and rotary embedding, one block of one
document at a time, one softmax per query slot and head, fp32.  Parameter names are those of a
checkpoint.  The documents and packs that the tests feed to both sides are made here as well.

K target layers, n tokens of a document, T token slots, A anchors, B block size, H hidden size.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
    "num_target_layers": 9,
    "target_layer_ids": (1, 6),
    "block_size": 4,
    "mask_token_id": 39,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "layer_types": ("full_attention", "full_attention"),
    "sliding_window": None,
    "is_causal": None,
}


def small(**changes: Any) -> dict[str, Any]:
    """Settings of a drafter of 32 channels; every layer is as the last one named."""
    settings = {**SMALL, **changes}
    kinds = tuple(settings["layer_types"])
    missing = settings["num_hidden_layers"] - len(kinds)
    return {**settings, "layer_types": kinds + kinds[-1:] * missing}


# --- the drafter --------------------------------------------------------------------------------


def sees(
    *, anchor: int, slot: int, block_size: int, window: int | None, causal: bool
) -> tuple[range, range]:
    """Context positions and block slots that a query slot attends to, per document."""
    first = 0 if window is None else max(0, anchor + slot - (window - 1))
    return range(first, anchor), range(slot + 1 if causal else block_size)


class ReferenceAttention(nn.Module):
    def __init__(self, qwen: Any) -> None:
        super().__init__()
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

        self.heads, self.size = qwen.num_attention_heads, qwen.head_dim
        self.shared = qwen.num_attention_heads // qwen.num_key_value_heads
        self.q_proj = nn.Linear(qwen.hidden_size, self.heads * self.size, bias=False)
        wide = qwen.num_key_value_heads * self.size
        self.k_proj = nn.Linear(qwen.hidden_size, wide, bias=False)
        self.v_proj = nn.Linear(qwen.hidden_size, wide, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, qwen.hidden_size, bias=False)
        self.q_norm = Qwen3RMSNorm(self.size, qwen.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.size, qwen.rms_norm_eps)

    def forward(
        self, block: Tensor, context: Tensor, rope: tuple[Tensor, Tensor], look: dict[str, Any]
    ) -> Tensor:
        """Rows [B, H] of a block whose context [a, H] stands before it."""
        anchor, rows = len(context), torch.cat([context, block])
        cos, sin = rope
        query = self.q_norm(self.q_proj(block).unflatten(1, (-1, self.size)))
        key = self.k_norm(self.k_proj(rows).unflatten(1, (-1, self.size)))
        value = self.v_proj(rows).unflatten(1, (-1, self.size))
        query, key = turn(query, cos[anchor:], sin[anchor:]), turn(key, cos, sin)
        out = []
        for slot in range(len(block)):
            before, own = sees(anchor=anchor, slot=slot, block_size=len(block), **look)
            keys = [*before, *(anchor + m for m in own)]
            for head in range(self.heads):
                group = head // self.shared
                scores = key[keys, group] @ query[slot, head] / math.sqrt(self.size)
                out.append(torch.softmax(scores, dim=0) @ value[keys, group])
        return self.o_proj(torch.cat(out).view(len(block), -1))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [S, heads, d] by the library's function."""
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    first = x.transpose(0, 1)[None]
    turned, _ = apply_rotary_pos_emb(first, first, cos[None], sin[None])
    return turned[0].transpose(0, 1)


class ReferenceLayer(nn.Module):
    def __init__(self, qwen: Any) -> None:
        super().__init__()
        from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

        self.self_attn = ReferenceAttention(qwen)
        self.mlp = Qwen3MLP(qwen)
        self.input_layernorm = Qwen3RMSNorm(qwen.hidden_size, qwen.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(qwen.hidden_size, qwen.rms_norm_eps)

    def forward(
        self, x: Tensor, context: Tensor, rope: tuple[Tensor, Tensor], look: dict[str, Any]
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, rope, look)
        return x + self.mlp(self.post_attention_layernorm(x))


class ReferenceDrafter(nn.Module):
    """One block of one document at a time."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

        self.settings = dict(settings)
        shape = (
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"),
        )
        rope = {"rope_theta": settings["rope_theta"], "rope_type": "default"}
        qwen = Qwen3Config(**{name: settings[name] for name in shape}, rope_parameters=rope)
        features = len(settings["target_layer_ids"]) * qwen.hidden_size
        self.fc = nn.Linear(features, qwen.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(qwen.hidden_size, qwen.rms_norm_eps)
        self.layers = nn.ModuleList(ReferenceLayer(qwen) for _ in range(qwen.num_hidden_layers))
        self.norm = Qwen3RMSNorm(qwen.hidden_size, qwen.rms_norm_eps)
        self.rotary = Qwen3RotaryEmbedding(qwen)

    def look(self, layer: int) -> dict[str, Any]:
        """Window and causality of a layer."""
        sliding = self.settings["layer_types"][layer] == "sliding_attention"
        said = self.settings["is_causal"]
        return {
            "window": self.settings["sliding_window"] if sliding else None,
            "causal": sliding if said is None else said,
        }

    def block(self, states: Tensor, anchor_token: int, embedding: Tensor) -> Tensor:
        """Rows [B, H] for the head, of the block behind the states [K, a, H] of its context."""
        size, mask = self.settings["block_size"], self.settings["mask_token_id"]
        features = torch.cat([layer.to(self.fc.weight.dtype) for layer in states], dim=-1)
        context = self.hidden_norm(self.fc(features))
        ids = torch.tensor([anchor_token] + [mask] * (size - 1))
        x = embedding[ids]
        positions = torch.arange(len(context) + size)
        cos, sin = self.rotary(x, positions[None])
        for number, layer in enumerate(self.layers):
            x = layer(x, context, (cos[0], sin[0]), self.look(number))
        return self.norm(x)


# --- documents and packs ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Document:
    ids: Tensor  # int64 [n]
    mask: Tensor  # bool [n]
    states: Tensor  # [K, n, H]

    def block(self, model: ReferenceDrafter, anchor: int, embedding: Tensor) -> Tensor:
        return model.block(self.states[:, :anchor], int(self.ids[anchor]), embedding)


def make_document(
    length: int,
    *,
    generator: torch.Generator,
    settings: Mapping[str, Any] = SMALL,
    prompt: int = 1,
) -> Document:
    """Random tokens, and states that bfloat16 can hold; all but the prompt is supervised."""
    shape = (len(settings["target_layer_ids"]), length, settings["hidden_size"])
    return Document(
        ids=torch.randint(settings["mask_token_id"], (length,), generator=generator),
        mask=torch.arange(length) >= prompt,
        states=torch.randn(shape, generator=generator).bfloat16().float(),
    )


def make_frozen(
    generator: torch.Generator, *, settings: Mapping[str, Any] = SMALL
) -> dict[str, Tensor]:
    """Embedding and head of a random target."""
    shape = settings["vocab_size"], settings["hidden_size"]
    return {
        "embedding": torch.randn(shape, generator=generator),
        "head": torch.randn(shape, generator=generator) / 4,
    }


def make_weights(settings: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """A state dict far from initialisation: nothing is symmetric, no norm is one."""
    names = ReferenceDrafter(settings).state_dict()
    return {
        name: 1 + torch.randn(tensor.shape, generator=generator) / 4
        if tensor.dim() == 1
        else torch.randn(tensor.shape, generator=generator) / math.sqrt(tensor.shape[1])
        for name, tensor in names.items()
    }


def pack(
    documents: Sequence[Document],
    anchors: Sequence[tuple[int, int]],
    *,
    token_budget: int,
    slots: int | None = None,
) -> dict[str, Tensor]:
    """The fields of a batch of documents at 8-slot starts; anchors are (document, position)."""
    layers, _, hidden = documents[0].states.shape
    fields = {
        # Not zeros: whatever lies between the documents must not matter.
        "hidden": torch.full((layers, token_budget, hidden), 3.0, dtype=torch.bfloat16),
        # bfloat16 states have none of these.
        "scales": torch.zeros(layers, 0),
        "exponents": torch.zeros(layers, 0, hidden, dtype=torch.uint8),
        "channels": torch.zeros(layers, 0),
        "input_ids": torch.full((token_budget,), 2),
        "position_ids": torch.zeros(token_budget, dtype=torch.int64),
        "document_ids": torch.full((token_budget,), -1, dtype=torch.int32),
        "document_starts": torch.zeros(token_budget, dtype=torch.int64),
        "loss_mask": torch.zeros(token_budget, dtype=torch.bool),
    }
    starts = starts_of(documents)
    for number, (document, start) in enumerate(zip(documents, starts, strict=True)):
        rows = slice(start, start + len(document.ids))
        fields["hidden"][:, rows] = document.states
        assert torch.equal(fields["hidden"][:, rows].to(document.states.dtype), document.states)
        fields["input_ids"][rows] = document.ids
        fields["position_ids"][rows] = torch.arange(len(document.ids))
        fields["document_ids"][rows] = number
        fields["document_starts"][rows] = start
        fields["loss_mask"][rows] = document.mask
    at = sorted(starts[document] + position for document, position in anchors)
    count = len(at) if slots is None else slots
    padding = [0] * (count - len(at))
    fields["anchor_positions"] = torch.tensor(at + padding, dtype=torch.int64)
    fields["anchor_valid"] = torch.arange(count) < len(at)
    return fields


def starts_of(documents: Sequence[Document]) -> list[int]:
    """The first slot of every document: one behind the other, at multiples of 8."""
    starts, at = [], 0
    for document in documents:
        starts.append(at)
        at += math.ceil(len(document.ids) / 8) * 8
    return starts


# --- the loss -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class ReferenceLoss:
    """Sums over blocks, and what was right and what counted, per slot."""

    total: Tensor  # sum of weight * cross-entropy
    weight: float  # sum of weights
    right: list[int]
    count: list[int]

    @property
    def mean(self) -> Tensor:
        return self.total / self.weight


def reference_loss(
    model: ReferenceDrafter,
    documents: Sequence[Document],
    anchors: Sequence[tuple[int, int]],
    *,
    embedding: Tensor,
    head: Tensor,
    gamma: float,
) -> ReferenceLoss:
    """Cross-entropy of slot k against the token at a + k, weighted exp(-(k - 1) / gamma)."""
    size = model.settings["block_size"]
    total, weight = torch.zeros(()), 0.0
    right, count = [0] * (size - 1), [0] * (size - 1)
    for number, anchor in anchors:
        document = documents[number]
        logits = document.block(model, anchor, embedding) @ head.T
        for k in range(1, size):
            wanted = anchor + k
            if wanted >= len(document.ids) or not document.mask[wanted]:
                continue
            share = math.exp(-(k - 1) / gamma)
            total = total + share * F.cross_entropy(logits[k], document.ids[wanted])
            weight += share
            right[k - 1] += int(logits[k].argmax() == document.ids[wanted])
            count[k - 1] += 1
    return ReferenceLoss(total=total, weight=weight, right=right, count=count)


# --- an exported folder -------------------------------------------------------------------------


def read_export(folder: Path) -> ReferenceDrafter:
    """The drafter of a serving folder, in fp32; anything that a strict server refuses fails."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    settings = read_settings(config)
    tensors = load_file(folder / "model.safetensors")
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert found == tensor_shapes(settings)
    stored = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    assert stored == {config["dtype"]} == {config["torch_dtype"]}
    model = ReferenceDrafter(settings)
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=True)
    return model.eval().requires_grad_(False)


def read_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a drafter as settings; what is said in two places must agree."""
    nested = config["dflash_config"]
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["hidden_act"] == "silu"
    assert config["attention_bias"] is config["tie_word_embeddings"] is False
    assert config["block_size"] == nested["block_size"]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["rope_scaling"] is None
    assert config["rope_parameters"]["rope_type"] == "default"
    assert config["use_sliding_window"] == ("sliding_attention" in config["layer_types"])
    assert config.get("is_causal") == nested.get("causal")
    places = {**config, **nested, "is_causal": config.get("is_causal")}
    settings = {name: places[name] for name in SMALL}
    return {**settings, "layer_types": tuple(settings["layer_types"])}


def tensor_shapes(settings: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of the 11 * L + 3 tensors of a checkpoint."""
    hidden, wide = settings["hidden_size"], settings["intermediate_size"]
    size = settings["head_dim"]
    query, key = (settings[f"num_{name}_heads"] * size for name in ("attention", "key_value"))
    one_layer = {
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (size,),
        "self_attn.k_norm.weight": (size,),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    shapes = {
        f"layers.{i}.{name}": shape
        for i in range(settings["num_hidden_layers"])
        for name, shape in one_layer.items()
    }
    features = len(settings["target_layer_ids"]) * hidden
    return {
        **shapes,
        "fc.weight": (hidden, features),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
