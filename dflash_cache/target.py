"""The frozen target: load it, take hidden states out of it, say what it is.

Letters: R rows of a padded batch, S its width, K target layers kept, H hidden size.
"""

import logging
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash_cache.errors import ConfigError, TargetError
from dflash_cache.schema import TargetSpec, TokenizerSpec, canonical_json

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

# Numbers that some families put between states and logits, or between ids and states.  The
# drafter's frozen embedding and head would have to repeat them; until it does, we refuse.
SCALINGS = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "softcap",
    "logit_scale",
    "logits_scaling",
    "output_multiplier",
    "embedding_multiplier",
    "embedding_scale",
    "lm_head_multiplier",
    "scale_emb",
    "dim_model_base",
)
VOLATILE_CONFIG_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


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


def pick_device(name: str) -> torch.device:
    """`auto` is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = None
    with suppress(RuntimeError):
        device = torch.device(name)
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: want auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: this torch sees no GPU; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"--device {name}: this torch sees {torch.cuda.device_count()} GPUs, numbered from 0"
        )
    return device


def load_tokenizer(folder: Path) -> Any:
    """The target's own tokenizer; it has to be a fast one, which knows character offsets."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # transformers raises many kinds; all mean "cannot be loaded"
        raise TargetError(f"{folder}: no tokenizer ({_first_line(error)})") from None
    if not tokenizer.is_fast:
        raise TargetError(f"{folder}: want a fast tokenizer (tokenizer.json), found a slow one")
    # Whole conversations are measured, also those that are skipped for their length.
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    return tokenizer


def find_target(name: str) -> Path:
    """The local folder of a target; a Hub name is downloaded into the Hub's own cache."""
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise TargetError(f"{name}: no config.json in this folder; is it a model folder?")
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name))
    except (OSError, HFValidationError, ValueError) as error:
        raise TargetError(
            f"{name}: neither a folder here nor a model that the Hub gives us "
            f"({_first_line(error)})"
        ) from None


def load_target(name: str, *, dtype: str, device: str) -> Target:
    """Load the target, frozen, in evaluation mode, and refuse what we cannot serve faithfully."""
    from transformers import AutoModelForCausalLM

    folder, on = find_target(name), pick_device(device)
    tokenizer = load_tokenizer(folder)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[dtype], output_loading_info=True, ignore_mismatched_sizes=True
        )
    except Exception as error:  # transformers raises many kinds; all mean "cannot be loaded"
        raise TargetError(f"{name}: cannot be loaded ({_first_line(error)})") from None
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
    spec = describe_target(name, folder, model, dtype=dtype)
    return Target(
        model=model, decoder=decoder, layers=layers, tokenizer=tokenizer, spec=spec, device=on
    )


def find_layers(model: Any) -> tuple[Any, nn.ModuleList]:
    """The decoder of a causal LM and its list of layers."""
    wanted = model.config.get_text_config().num_hidden_layers
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != wanted:
        raise TargetError(
            f"{type(model).__name__}: found no list of {wanted} decoder layers in "
            f"{type(decoder).__name__}; this family is not supported"
        )
    refuse_scalings(model)
    return decoder, layers


def refuse_scalings(model: Any) -> None:
    """The cache keeps embedding and head as plain matrices; refuse a target that does more."""
    config, family = model.config.get_text_config(), type(model).__name__
    for name in SCALINGS:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise TargetError(
                f"{family}: {name} = {getattr(config, name)} stands between states and logits, "
                "which drafters of this version cannot repeat"
            )
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(embedding) is not nn.Embedding:
        raise TargetError(
            f"{family}: its embedding is a {type(embedding).__name__}, not a plain one"
        )
    if head is None or type(head) is not nn.Linear or head.bias is not None:
        raise TargetError(f"{family}: its LM head is not a plain matrix without bias")


def describe_target(name: str, folder: Path, model: Any, *, dtype: str) -> TargetSpec:
    """Identity and shapes of a loaded target."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    content = {k: v for k, v in model.config.to_dict().items() if k not in VOLATILE_CONFIG_KEYS}
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return TargetSpec(
        name=Path(name).name if Path(name).is_dir() else name,
        model_type=config.model_type,
        config_sha256=sha256(canonical_json(_jsonable(content))).hexdigest(),
        weights_sha256=hash_weights(folder),
        dtype=dtype,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=embedding.shape[0],
        tied_head=head.data_ptr() == embedding.data_ptr(),
        intermediate_size=getattr(config, "intermediate_size", None),
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rope_theta=float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10_000),
        rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-6)),
        max_position_embeddings=config.max_position_embeddings,
    )


def hash_weights(folder: Path) -> str:
    """SHA-256 over the names and all bytes of the weight files."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        raise TargetError(f"{folder}: no *.safetensors and no *.bin file; is the folder complete?")
    digest = sha256()
    for path in files:
        digest.update(path.name.encode())
        with open(path, "rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


def describe_tokenizer(
    tokenizer: Any,
    *,
    embedding_rows: int,
    generation_eos: Any,
    seen: dict[int, int],
    mask_token_id: int | None,
) -> TokenizerSpec:
    """Identity of the tokenizer, and the mask token that a drafter for it will use.

    `seen` says how often each special id occurs in the data.
    """
    eos = _as_list(tokenizer.eos_token_id) + _as_list(generation_eos)
    unused = sorted(i for i in special_ids(tokenizer) if not seen.get(i))
    spec = TokenizerSpec(
        sha256=sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        chat_template_sha256=_hash_or_none(_template_text(tokenizer)),
        # Where ids end: len(tokenizer) counts tokens, and some number them with holes.
        length=max(tokenizer.get_vocab().values(), default=-1) + 1,
        eos_token_ids=sorted(set(eos)),
        pad_token_id=tokenizer.pad_token_id,
        unused_special_ids=[i for i in unused if i not in _spoken_for(tokenizer, eos)],
        mask_token_id=None,
        mask_token_source="",
    )
    chosen, source = choose_mask_token(
        spec,
        embedding_rows=embedding_rows,
        wanted=mask_token_id,
        own=getattr(tokenizer, "mask_token_id", None),
    )
    return TokenizerSpec(**{**spec.to_dict(), "mask_token_id": chosen, "mask_token_source": source})


def choose_mask_token(
    spec: TokenizerSpec, *, embedding_rows: int, wanted: int | None, own: int | None
) -> tuple[int | None, str]:
    """A row of the embedding that text never produces, and where it comes from.

    Order: the user's, the tokenizer's own, the first row behind the tokenizer's last id, a
    special token that the data never uses.  None when there is nothing safe: `fit` then asks.
    """
    if wanted is not None:
        refuse_bad_mask_token(spec, wanted, embedding_rows=embedding_rows)
        return wanted, "--mask-token-id"
    if own is not None:
        return own, "the tokenizer's mask token"
    if spec.length < embedding_rows:
        return spec.length, "first embedding row behind the tokenizer's ids"
    if spec.unused_special_ids:
        return spec.unused_special_ids[-1], "special token that the data never uses"
    return None, "nothing safe found"


def refuse_bad_mask_token(spec: TokenizerSpec, wanted: int, *, embedding_rows: int) -> None:
    """A mask token that text can produce, or that ends text, silently ruins acceptance."""
    where = f"--mask-token-id {wanted}"
    if not 0 <= wanted < embedding_rows:
        raise ConfigError(f"{where}: the embedding has rows 0 to {embedding_rows - 1}")
    if wanted in spec.eos_token_ids or wanted == spec.pad_token_id:
        raise ConfigError(f"{where}: that is the end or padding token; choose an unused id")
    if wanted < spec.length and wanted not in (*spec.unused_special_ids, spec.mask_token_id):
        raise ConfigError(
            f"{where}: the tokenizer produces that id; choose one from {spec.length} to "
            f"{embedding_rows - 1} or an unused special token {spec.unused_special_ids[:8]}"
        )


def special_ids(tokenizer: Any) -> list[int]:
    """Ids of all added special tokens."""
    return [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]


def _spoken_for(tokenizer: Any, eos: list[int]) -> set[int]:
    """Special ids with a job: ends, padding, and whatever the chat template writes."""
    jobs = {tokenizer.bos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id, *eos}
    template = _template_text(tokenizer) or ""
    tokens = tokenizer.added_tokens_decoder.items()
    return {i for i in jobs if i is not None} | {i for i, t in tokens if t.content in template}


def _template_text(tokenizer: Any) -> str | None:
    """The chat template, or all of them where there is one for tools and one for the rest."""
    template = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template


def _as_list(value: Any) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [int(value)]


def _hash_or_none(text: str | None) -> str | None:
    return None if text is None else sha256(text.encode()).hexdigest()


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(v) for v in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def _first_line(error: BaseException) -> str:
    kind, text = type(error).__name__, str(error).strip().splitlines()
    return f"{kind}: {text[0][:300]}" if text else kind
