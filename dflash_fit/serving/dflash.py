"""A DFlash drafter for transformers: `AutoModel.from_pretrained(FOLDER, trust_remote_code=True)`.

This file stands alone: it needs torch and transformers (5.17 or later) and nothing else.

A drafter reads hidden states of a frozen target and drafts a whole block of tokens in one pass.
`spec_generate` decodes with both: the target reads each block in one pass, and the longest prefix
on which it agrees is kept, with one token of the target's own.  At temperature 0 the text is that
of plain greedy decoding; above, its distribution is the target's.

Letters: C context tokens, B slots of a block, K target layers that are read, H hidden size.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel, Qwen3Config
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

SLIDING = "sliding_attention"


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotary(positions: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """Cosine and sine [batch, 1, S, d] of plain rotary embedding, half rotation, in fp32."""
    theta = config.rope_parameters["rope_theta"]
    even = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[..., None] * (1.0 / theta ** (even / config.head_dim))
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-right, left], dim=-1) * sin.to(x.dtype)


class Attention(nn.Module):
    """Queries are the block's; keys and values are the context's, and the block's behind them."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        heads, shared = config.num_attention_heads, config.num_key_value_heads
        size = config.head_dim
        self.index, self.head_dim, self.group = index, size, heads // shared
        sliding = config.layer_types[index] == SLIDING
        self.window = config.sliding_window if sliding else None
        said = getattr(config, "is_causal", None)
        if said is None:
            said = config.dflash_config.get("causal")
        self.causal = sliding if said is None else said
        self.q_proj = nn.Linear(config.hidden_size, heads * size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, shared * size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, shared * size, bias=False)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(size, config.rms_norm_eps)
        self.k_norm = RMSNorm(size, config.rms_norm_eps)

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim)

    def forward(self, x: Tensor, context: Tensor, cos: Tensor, sin: Tensor, cache: Any) -> Tensor:
        """Block rows [batch, B, H] over new context rows [batch, c, H] and those in the cache."""
        both = torch.cat([context, x], dim=1)
        query = self.q_norm(self.split(self.q_proj(x))).transpose(1, 2)
        key = self.k_norm(self.split(self.k_proj(both))).transpose(1, 2)
        value = self.split(self.v_proj(both)).transpose(1, 2)
        slots = x.shape[1]
        query = rotate(query, cos[..., -slots:, :], sin[..., -slots:, :])
        key = rotate(key, cos, sin)
        if cache is not None:
            key, value = cache.update(key, value, self.index)
        key, value = (t.repeat_interleave(self.group, dim=1) for t in (key, value))
        mask = self.visible(slots, key.shape[2], x.device)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        rows: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return rows

    def visible(self, slots: int, keys: int, device: torch.device) -> Tensor | None:
        """Which of the keys each slot sees [B, C + B]; None is all of them.

        A window moves with the slot and bounds the context alone, not the slot's own block.
        """
        if self.window is None and not self.causal:
            return None
        key = torch.arange(keys, device=device)
        query = torch.arange(keys - slots, keys, device=device)[:, None]
        before = key < keys - slots
        if self.window is not None:
            before = before & (key > query - self.window)
        own = key >= keys - slots
        if self.causal:
            own = own & (key <= query)
        return before | own


class MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return rows


class Layer(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, context: Tensor, cos: Tensor, sin: Tensor, cache: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, cos, sin, cache)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DFlashDraftModel(PreTrainedModel):  # type: ignore[misc]
    """Embedding and head are the target's and not in the checkpoint."""

    config_class = Qwen3Config
    base_model_prefix = ""
    _no_split_modules = ("Layer",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        nested = config.dflash_config
        self.target_layer_ids = list(nested["target_layer_ids"])
        self.block_size = nested["block_size"]
        self.mask_token_id = nested["mask_token_id"]
        features = len(self.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(features, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(
        self,
        position_ids: Tensor,
        noise_embedding: Tensor,
        target_hidden: Tensor,
        past_key_values: Any = None,
        **_unused: Any,
    ) -> Tensor:
        """Rows [batch, B, H] that the target's head reads; row k drafts the token of slot k.

        `noise_embedding` [batch, B, H] is the target's embedding of the anchor and of mask tokens,
        `target_hidden` [batch, c, K * H] the states of the context that is not in the cache yet,
        `position_ids` [batch, c + B] the positions of both.  The cache then holds the block as
        well; crop it before the next call.
        """
        cos, sin = rotary(position_ids, self.config)
        context = self.hidden_norm(self.fc(target_hidden))
        x = noise_embedding
        for layer in self.layers:
            x = layer(x, context, cos, sin, past_key_values)
        out: Tensor = self.norm(x)
        return out

    @torch.inference_mode()
    def spec_generate(
        self,
        target: Any,
        input_ids: Tensor,
        max_new_tokens: int,
        stop_token_ids: Collection[int] | None = None,
        temperature: float = 0.0,
    ) -> Tensor:
        """Prompt and answer [1, n] of a target, decoded with this drafter; stop token included."""
        ids, _ = self.spec_generate_with_lengths(
            target, input_ids, max_new_tokens, stop_token_ids, temperature
        )
        return ids

    @torch.inference_mode()
    def spec_generate_with_lengths(
        self,
        target: Any,
        input_ids: Tensor,
        max_new_tokens: int,
        stop_token_ids: Collection[int] | None = None,
        temperature: float = 0.0,
    ) -> tuple[Tensor, list[int]]:
        """The same, and the tokens that each pass of the target committed."""
        if len(input_ids) != 1:
            raise ValueError(f"a batch of {len(input_ids)} prompts: give one at a time")
        reader = TargetReader(target, self.target_layer_ids)
        drafts = Drafts(self, target)
        stops = set(stop_token_ids or ())
        logits, states = reader.read(input_ids, last_only=True)
        tokens = [int(choose(logits[-1:], temperature))]
        lengths: list[int] = []
        while len(tokens) < max_new_tokens and tokens[-1] not in stops:
            draft = drafts.next(tokens[-1], states)
            logits, states = reader.read(torch.cat([draft.new_tensor([tokens[-1]]), draft])[None])
            chosen = choose(logits, temperature)
            agreed = int((draft == chosen[:-1]).long().cumprod(dim=0).sum())
            # Read and kept: the old anchor and the drafts agreed on.  Committed: those drafts and
            # the target's own token behind them, which is the next anchor.
            reader.forget(len(draft) - agreed)
            states = states[:, : agreed + 1]
            new = until_stop(chosen[: agreed + 1].tolist(), stops)[: max_new_tokens - len(tokens)]
            tokens += new
            lengths.append(len(new))
        answer = input_ids.new_tensor([tokens[:max_new_tokens]])
        return torch.cat([input_ids, answer], dim=1), lengths


def until_stop(tokens: list[int], stops: Collection[int]) -> list[int]:
    """Tokens up to the first that ends the text, that one included."""
    for index, token in enumerate(tokens):
        if token in stops:
            return tokens[: index + 1]
    return tokens


def choose(logits: Tensor, temperature: float) -> Tensor:
    """A token per row of logits [n, V]: the likeliest, or one drawn by its probability.

    Drafts are kept where they equal what the target drew itself, so the text is distributed as if
    the target had drawn all of it.
    """
    if temperature <= 0:
        return logits.argmax(dim=-1)
    return torch.multinomial((logits.float() / temperature).softmax(dim=-1), 1)[:, 0]


class Drafts:
    """The drafter's side of one text: its cache of context, and the blocks behind it."""

    def __init__(self, drafter: DFlashDraftModel, target: Any) -> None:
        self.drafter, self.cache, self.length = drafter, DynamicCache(), 0
        # Plain matrices: what a drafter is trained against.
        self.embedding: Tensor = target.get_input_embeddings().weight
        self.head: Tensor = target.get_output_embeddings().weight

    def next(self, anchor: int, states: Tensor) -> Tensor:
        """Draft tokens [B - 1] behind an anchor, given the states [1, c, K * H] of what is new."""
        drafter = self.drafter
        self.length += states.shape[1]
        ids = torch.full((1, drafter.block_size), drafter.mask_token_id, device=states.device)
        ids[0, 0] = anchor
        positions = torch.arange(
            self.length - states.shape[1], self.length + drafter.block_size, device=states.device
        )
        rows = drafter(
            position_ids=positions[None],
            noise_embedding=F.embedding(ids, self.embedding).to(drafter.dtype),
            target_hidden=states.to(drafter.dtype),
            past_key_values=self.cache,
        )
        self.cache.crop(-drafter.block_size)
        logits = F.linear(rows[0, 1:].to(self.head.dtype), self.head)
        return logits.argmax(dim=-1)


class TargetReader:
    """The target reading one text piece by piece; what it has read last can be taken back.

    Keys and values are cropped.  A recurrent state (Gated DeltaNet and its like) cannot be: it is
    put back as it was before the piece, and the tokens that stay are read again, which costs such
    targets a second pass over them.
    """

    def __init__(self, target: Any, layer_ids: Sequence[int]) -> None:
        self.target, self.layer_ids = target, layer_ids
        self.layers = target.get_decoder().layers
        self.cache: Any = DynamicCache(config=target.config)
        # What has left a sliding window cannot come back, so every attention layer keeps all of
        # its keys and values.  The target masks what is outside its windows all the same.
        self.cache.layers = [
            DynamicLayer() if isinstance(layer, DynamicSlidingWindowLayer) else layer
            for layer in self.cache.layers
        ]
        if any(hasattr(x, "recurrent_states") and hasattr(x, "keys") for x in self.cache.layers):
            raise ValueError(
                f"{type(target).__name__}: has layers that are recurrent and attend as well; "
                "rejected drafts cannot be taken back from those, so use a server for this target"
            )
        self.recurrent = [x for x in self.cache.layers if hasattr(x, "recurrent_states")]
        self.attention = [x for x in self.cache.layers if not hasattr(x, "recurrent_states")]
        named = inspect.signature(target.forward).parameters
        self.cache_name = "cache" if "cache" in named else "past_key_values"
        self.piece = torch.empty(1, 0)
        self.before: list[dict[str, dict[int, Tensor | None]]] = []

    def read(self, ids: Tensor, last_only: bool = False) -> tuple[Tensor, Tensor]:
        """Logits [n, V] (or [1, V]) and states [1, n, K * H] of tokens [1, n]."""
        self.piece = ids
        self.before = [states_of(layer) for layer in self.recurrent]
        return self.forward(ids, last_only)

    def forward(self, ids: Tensor, last_only: bool) -> tuple[Tensor, Tensor]:
        with self.taps() as taken:
            logits = self.target(
                input_ids=ids,
                use_cache=True,
                logits_to_keep=1 if last_only else 0,
                **{self.cache_name: self.cache},
            ).logits[0]
        states = torch.cat([taken[i] for i in self.layer_ids], dim=-1)
        # Drafters learn from states in bfloat16.
        return logits, states.to(torch.bfloat16)

    @contextmanager
    def taps(self) -> Iterator[dict[int, Tensor]]:
        """The outputs of the target layers, caught where they leave the layer."""
        taken: dict[int, Tensor] = {}

        def keep(index: int) -> Callable[..., None]:
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                taken[index] = output[0] if isinstance(output, tuple) else output

            return hook

        with ExitStack() as hooks:
            for index in self.layer_ids:
                hooks.callback(self.layers[index].register_forward_hook(keep(index)).remove)
            yield taken

    def forget(self, count: int) -> None:
        """Take the last tokens of the last piece back."""
        again = self.recurrent and count
        for layer in self.attention:
            layer.crop(-(self.piece.shape[1] if again else count))
        if again:
            for layer, states in zip(self.recurrent, self.before, strict=True):
                for name, value in states.items():
                    setattr(layer, name, value)
            self.forward(self.piece[:, : self.piece.shape[1] - count], last_only=True)


def states_of(layer: Any) -> dict[str, dict[int, Tensor | None]]:
    """Copies of what a recurrent layer keeps; the layer itself is written in place."""
    return {
        name: {k: s if s is None else s.clone() for k, s in getattr(layer, name).items()}
        for name in ("conv_states", "recurrent_states")
    }
