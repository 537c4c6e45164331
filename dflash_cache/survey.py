"""What the target is, found out without loading its weights.

Data and options are checked against this in seconds; a mistake in them must not cost the minutes
that a large target takes to load.
"""

import json
import logging
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from dflash_cache.errors import TargetError
from dflash_cache.schema import TargetSpec, canonical_json

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
# Rotary embeddings that change with the longest row: a token's state would depend on what it is
# padded together with.
ROPES_OF_THE_BATCH = ("dynamic", "longrope")
VOLATILE_CONFIG_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
NOT_HASHED = ""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """A target before its weights are read."""

    folder: Path
    tokenizer: Any
    spec: TargetSpec
    stop_ids: list[int]  # every id that ends an answer: the tokenizer's and the generation's


def survey_target(name: str, *, dtype: str, revision: str | None = None) -> Survey:
    """Find a target and describe it; refuses what we cannot serve faithfully."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = find_target(name, revision=revision)
    tokenizer = load_tokenizer(folder)
    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # transformers raises many kinds; all mean "cannot be loaded"
        raise TargetError(f"{name}: cannot be loaded ({first_line(error)})") from None
    refuse_quantised(name, config)
    find_layers(model)
    spec = describe_target(name, folder, model, dtype=dtype)
    return Survey(
        folder=folder, tokenizer=tokenizer, spec=spec, stop_ids=stop_ids(folder, tokenizer, model)
    )


def with_weights_hash(survey: Survey) -> Survey:
    """The same target with its weights in its identity; reads every byte of them."""
    return replace(survey, spec=replace(survey.spec, weights_sha256=hash_weights(survey.folder)))


def stop_ids(folder: Path, tokenizer: Any, model: Any) -> list[int]:
    """Every id that ends an answer of this target."""
    from transformers import GenerationConfig

    own = model.generation_config
    if (folder / "generation_config.json").is_file():
        try:
            own = GenerationConfig.from_pretrained(folder)
        except (OSError, ValueError, TypeError) as error:
            raise TargetError(
                f"{folder}: generation_config.json cannot be read ({first_line(error)})"
            ) from None
    wanted = [tokenizer.eos_token_id, getattr(own, "eos_token_id", None)]
    flat = [i for item in wanted for i in (item if isinstance(item, list) else [item])]
    return sorted({int(i) for i in flat if i is not None})


def find_target(name: str, *, revision: str | None = None) -> Path:
    """The local folder of a target; a Hub name is downloaded into the Hub's own cache."""
    if Path(name).is_dir():
        if revision is not None:
            raise TargetError(f"{name}: a folder has no revisions; leave out --target-revision")
        if not (Path(name) / "config.json").is_file():
            raise TargetError(f"{name}: no config.json in this folder; is it a model folder?")
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, revision=revision))
    except (OSError, HFValidationError, ValueError) as error:
        raise TargetError(
            f"{name}: neither a folder here nor a model that the Hub gives us ({first_line(error)})"
        ) from None


def load_tokenizer(folder: Path) -> Any:
    """The target's own tokenizer; it has to be a fast one, which knows character offsets."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # transformers raises many kinds; all mean "cannot be loaded"
        raise TargetError(f"{folder}: no tokenizer ({first_line(error)})") from None
    if not tokenizer.is_fast:
        raise TargetError(f"{folder}: want a fast tokenizer (tokenizer.json), found a slow one")
    # Whole conversations are measured, also those that are skipped for their length.
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    return tokenizer


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
    refuse_ropes_of_the_batch(model)
    return decoder, layers


def refuse_quantised(name: str, config: Any) -> None:
    """Quantised weights would be read as if they were plain numbers."""
    for part in (config, config.get_text_config()):
        if found := getattr(part, "quantization_config", None):
            method = found.get("quant_method") if isinstance(found, dict) else found
            raise TargetError(
                f"{name}: its weights are quantised ({method}); take the target in its own "
                "precision, and quantise where you serve it"
            )


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


def refuse_ropes_of_the_batch(model: Any) -> None:
    """Refuse a target whose states depend on the width of the batch."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = [rope, *(own for own in rope.values() if isinstance(own, dict))]
    for kind in kinds:
        if kind.get("rope_type") in ROPES_OF_THE_BATCH:
            raise TargetError(
                f"{type(model).__name__}: rope_type = {kind['rope_type']} rotates by the longest "
                "row of a batch, so a token's states are not its own; this family is not supported"
            )


def describe_target(name: str, folder: Path, model: Any, *, dtype: str) -> TargetSpec:
    """Identity and shapes of a target; its weights are not hashed yet."""
    config = model.config.get_text_config()
    for wanted in ("num_attention_heads", "max_position_embeddings"):
        if getattr(config, wanted, None) is None:
            raise TargetError(
                f"{type(model).__name__}: its config has no {wanted}; this family is not supported"
            )
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # some families have one base per kind of layer
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return TargetSpec(
        name=Path(name).name if Path(name).is_dir() else name,
        # The Hub's cache keeps every snapshot in a folder that bears its commit.
        revision=None if Path(name).is_dir() else folder.name,
        model_type=config.model_type,
        config_sha256=hash_config(folder),
        weights_sha256=NOT_HASHED,
        dtype=dtype,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=embedding.shape[0],
        tied_head=head is embedding,
        intermediate_size=getattr(config, "intermediate_size", None),
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rope_theta=float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10_000),
        rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-6)),
        max_position_embeddings=config.max_position_embeddings,
    )


def hash_config(folder: Path) -> str:
    """SHA-256 of config.json as it lies there, without keys that say nothing of the model.

    Not of the loaded configuration: every version of the library fills in other defaults.
    """
    content = json.loads((folder / "config.json").read_bytes())
    kept = {key: value for key, value in content.items() if key not in VOLATILE_CONFIG_KEYS}
    return sha256(canonical_json(kept)).hexdigest()


def hash_weights(folder: Path) -> str:
    """SHA-256 over the names and all bytes of the weight files."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        raise TargetError(f"{folder}: no *.safetensors and no *.bin file; is the folder complete?")
    digest, total = sha256(), sum(path.stat().st_size for path in files)
    with tqdm(
        total=total, desc="hash weights", unit="B", unit_scale=True, leave=False, disable=None
    ) as progress:
        for path in files:
            digest.update(path.name.encode())
            with open(path, "rb") as file:
                while block := file.read(1 << 24):
                    digest.update(block)
                    progress.update(len(block))
    return digest.hexdigest()


def first_line(error: BaseException) -> str:
    kind, text = type(error).__name__, str(error).strip().splitlines()
    return f"{kind}: {text[0][:300]}" if text else kind
