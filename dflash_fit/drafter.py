"""The DFlash drafter: parameter names and mathematics of z-lab/dflash `model.py` (MIT).

A block of B slots (the anchor token, then mask tokens) attends in every layer to the projected
hidden states of the target before the anchor, and to itself.  Context rows never become queries
and never pass an MLP, so they are projected once per batch (`context`) and the blocks go through
on their own (`forward`): the same two calls train and serve.

Letters: K target layers, T context tokens, A blocks of B slots, H hidden size, d head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_cache.errors import ConfigError
from dflash_fit.attention import KeysValues, Sight, Visibility

FULL, SLIDING = "full_attention", "sliding_attention"

ContextKV = list[KeysValues]  # per layer: key (rotated) and value [kv heads, T, d]


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Shape of a drafter; everything that its checkpoint's config.json says."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int  # layers of the target, not how many are read
    target_layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    is_causal: bool | None = None  # None: sliding layers are causal in the block, full ones not
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"{self.num_attention_heads} query heads cannot share "
                f"{self.num_key_value_heads} key and value heads evenly"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head size {self.head_dim}: want an even one (rotary halves)")
        if len(self.layer_types) != self.num_hidden_layers:
            raise ConfigError(
                f"{len(self.layer_types)} layer types for {self.num_hidden_layers} drafter layers"
            )
        unknown = set(self.layer_types) - {FULL, SLIDING}
        if unknown or (SLIDING in self.layer_types and not self.sliding_window):
            raise ConfigError(
                f"layer types {self.layer_types} with window {self.sliding_window}: want "
                f"{FULL}, or {SLIDING} with a window"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(f"mask token {self.mask_token_id}: no such row in the embedding")

    def look(self, layer: int) -> Visibility:
        sliding = self.layer_types[layer] == SLIDING
        causal = sliding if self.is_causal is None else self.is_causal
        return Visibility(window=self.sliding_window if sliding else None, causal=causal)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class RMSNorm(nn.Module):
    """Qwen3's: plain weight (not 1 + w), mean square in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotary(positions: Tensor, *, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine fp32 [S, d] of plain one-dimensional rotary embedding, half rotation."""
    even = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[:, None] * (1.0 / theta ** (even / head_dim))
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to [heads, S, d]."""
    left, right = x.chunk(2, dim=-1)
    turned = torch.cat([-right, left], dim=-1)
    return (x * cos.to(x.dtype)) + (turned * sin.to(x.dtype))


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        heads, kv, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.head_dim = size
        self.q_proj = nn.Linear(config.hidden_size, heads * size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv * size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv * size, bias=False)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(size, config.rms_norm_eps)
        self.k_norm = RMSNorm(size, config.rms_norm_eps)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, self.head_dim)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [S, H] as rotated keys and values [kv heads, S, d]; context and block alike."""
        key = self.k_norm(self._split(self.k_proj(x))).transpose(0, 1)
        value = self._split(self.v_proj(x)).transpose(0, 1)
        return rotate(key, cos, sin), value

    def forward(
        self, x: Tensor, context: KeysValues, cos: Tensor, sin: Tensor, sight: Sight
    ) -> Tensor:
        """Rows [S, H] to what they gathered [S, heads * d], before the output projection."""
        query = self.q_norm(self._split(self.q_proj(x))).transpose(0, 1)
        own = self.keys_values(x, cos, sin)
        out = sight.attend(rotate(query, cos, sin), context, own)
        return out.transpose(0, 1).reshape(len(x), -1)


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)


def context_rows(drafter: "DFlashDraftModel", hidden: Tensor) -> Tensor:
    """Hidden states [K, T, H] as the rows [T, H] that every layer takes keys and values from."""
    features = hidden.transpose(0, 1).reshape(hidden.shape[1], -1)
    rows: Tensor = drafter.hidden_norm(drafter.fc(features.to(drafter.fc.weight.dtype)))
    return rows


def context_keys_values(layer: Layer, rows: Tensor, cos: Tensor, sin: Tensor) -> KeysValues:
    return layer.self_attn.keys_values(rows, cos, sin)


def gather(
    layer: Layer, x: Tensor, context: KeysValues, cos: Tensor, sin: Tensor, sight: Sight
) -> Tensor:
    """What every row [A * B, H] takes from the rows that it sees."""
    out: Tensor = layer.self_attn(layer.input_layernorm(x), context, cos, sin, sight)
    return out


def finish(layer: Layer, x: Tensor, gathered: Tensor) -> Tensor:
    """What every row makes of it, alone."""
    x = x + layer.self_attn.o_proj(gathered)
    return x + layer.mlp(layer.post_attention_layernorm(x))  # type: ignore[no-any-return]


def finish_last(
    layer: Layer, norm: RMSNorm, x: Tensor, gathered: Tensor, block_size: int
) -> Tensor:
    """Rows [A, B - 1, H] of slots 1 .. B - 1, normed for the head.

    The anchor's own row ends here: behind the last layer's attention nothing reads it.
    """
    kept = [rows.view(-1, block_size, rows.shape[-1])[:, 1:] for rows in (x, gathered)]
    out: Tensor = norm(finish(layer, *kept))
    return out


@dataclass(frozen=True, kw_only=True)
class Functions:
    """What a drafter is made of.  Plain, or compiled: small enough to share between layers."""

    context_rows: Callable[..., Tensor] = context_rows
    context_keys_values: Callable[..., KeysValues] = context_keys_values
    gather: Callable[..., Tensor] = gather
    finish: Callable[..., Tensor] = finish
    finish_last: Callable[..., Tensor] = finish_last


PLAIN = Functions()


class DFlashDraftModel(nn.Module):
    """Trained: `fc`, `hidden_norm`, the layers, `norm`.  Embedding and head are the target's."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        features = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(features, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def initialize(self, generator: torch.Generator) -> None:
        """Normal matrices, unit norms; the generator makes it repeatable."""
        for parameter in self.parameters():
            if parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=self.config.initializer_range, generator=generator)

    def context_parameters(self) -> list[nn.Parameter]:
        """Those that `context` reads: a backward pass that ends with it finishes them last."""
        modules: list[nn.Module] = [self.fc, self.hidden_norm]
        for layer in self.layers:
            assert isinstance(layer, Layer)
            attention = layer.self_attn
            modules += [attention.k_proj, attention.v_proj, attention.k_norm]
        return [parameter for module in modules for parameter in module.parameters()]

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary(positions, head_dim=self.config.head_dim, theta=self.config.rope_theta)

    def context(
        self, hidden: Tensor, position_ids: Tensor, functions: Functions = PLAIN
    ) -> ContextKV:
        """Hidden states [K, T, H] as the keys and values that every layer's blocks look at."""
        rows = functions.context_rows(self, hidden)
        cos, sin = self._rotary(position_ids)
        return [functions.context_keys_values(layer, rows, cos, sin) for layer in self.layers]

    def forward(
        self,
        blocks: Tensor,
        context: ContextKV,
        positions: Tensor,
        sights: Sequence[Sight],
        functions: Functions = PLAIN,
    ) -> Tensor:
        """Embedded block slots [A * B, H] to the rows that the frozen head reads [A, B - 1, H].

        `positions` [A * B] are per document; `sights` holds one per layer.
        """
        f = functions
        cos, sin = self._rotary(positions)
        x = blocks
        for layer, own, sight in zip(self.layers, context, sights, strict=True):
            gathered = f.gather(layer, x, own, cos, sin, sight)
            if gathered.requires_grad:
                # What the first layer reads is not trained.  From here on it passes as if it
                # were, which costs nothing, so that all layers share one compiled `finish`.
                x.requires_grad_()
            if layer is not self.layers[-1]:
                x = f.finish(layer, x, gathered)
        return f.finish_last(self.layers[-1], self.norm, x, gathered, self.config.block_size)


def block_ids(anchor_tokens: Tensor, *, block_size: int, mask_token_id: int) -> Tensor:
    """Inputs of the blocks [A, B]: the clean anchor token, then mask tokens."""
    ids = torch.full(
        (len(anchor_tokens), block_size),
        mask_token_id,
        dtype=anchor_tokens.dtype,
        device=anchor_tokens.device,
    )
    ids[:, 0] = anchor_tokens
    return ids


def block_positions(anchor_positions: Tensor, *, block_size: int) -> Tensor:
    """Positions a .. a + B - 1 of every block [A, B]."""
    return anchor_positions[:, None] + torch.arange(block_size, device=anchor_positions.device)
