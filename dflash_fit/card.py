"""The model card of an export: README.md, from what is on record and nothing else.

A figure that nobody measured is said to be missing.
"""

import json
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dflash_cache import __version__
from dflash_fit.config import SPEED_ONLY
from dflash_fit.drafter import SLIDING, DrafterConfig
from dflash_fit.provenance import Provenance

NOT_KNOWN = "not on record"
LIBRARIES = ("torch", "transformers", "safetensors")
# Another run may have had these samples.
BEGUN = (
    " It began with weights that were trained before; whether those had seen these samples is not "
    "on record."
)
# Options that decide nothing about the drafter.
UNTOLD = (*SPEED_ONLY, "init_from", "keep_last", "eval_every", "eval_tokens")


def model_card(
    drafter: DrafterConfig, known: Provenance, *, serves: Sequence[str], name: str
) -> str:
    """README.md of a serving folder."""
    parts = [
        head(known, serves),
        f"# {name}\n\nA [DFlash](https://arxiv.org/abs/2602.06036) drafter: it drafts blocks of "
        f"{drafter.block_size - 1} tokens for `{target(known)}`, which verifies them. It serves "
        "that target and no other; embedding and LM head are the target's and not in this folder.",
        section("Acceptance", acceptance(known)),
        section("Serving", "\n\n".join(SERVING[server](drafter, known) for server in serves)),
        section("Drafter", table(shape_rows(drafter))),
        section("Target and data", table(data_rows(known))),
        section("Training", training(known)),
        section("Limits", limits(drafter, known)),
        section("Software", table(software_rows())),
    ]
    return "\n\n".join(parts) + "\n"


def head(known: Provenance, serves: Sequence[str]) -> str:
    """What the Hub reads."""
    lines = ["library_name: transformers"] if "transformers" in serves else []
    lines += ["tags:", "- dflash", "- speculative-decoding"]
    if known.identity and known.identity.target["revision"]:
        lines.append(f"base_model: {known.target}")  # a name of the Hub, not a folder
    return "\n".join(["---", *lines, "---"])


def target(known: Provenance) -> str:
    return known.target or "TARGET"


def section(title: str, text: str) -> str:
    return f"## {title}\n\n{text}"


def table(rows: Sequence[tuple[str, Any]]) -> str:
    lines = [f"| {name} | {said(value)} |" for name, value in rows]
    return "\n".join(["| | |", "|---|---|", *lines])


def said(value: Any) -> str:
    if value is None or value == "":
        return NOT_KNOWN
    if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000:
        return f"{value:,}"
    return str(value)


# --- what was measured --------------------------------------------------------------------------


def acceptance(known: Provenance) -> str:
    """Offline acceptance at this step, and what it is."""
    found = known.measured
    if not found:
        return (
            "Not measured, as far as this folder knows. `dflash eval` measures it, offline or by "
            "decoding."
        )
    rows = [
        ("acceptance length, micro", f"{found['acceptance_length']:.3f}"),
        ("acceptance length, macro", f"{found['acceptance_length_macro']:.3f}"),
        ("held-out samples", found.get("documents")),
        ("target passes", found.get("target_passes")),
    ]
    share = known.training.get("held_out")
    return "\n\n".join(
        [
            "Tokens committed per pass of the target (accepted drafts plus one), on samples that "
            f"this run never trained on ({percent(share)} of the conversations), measured offline: "
            "drafts are compared with the text as it stands. Micro is over passes, macro the mean "
            "over texts." + (BEGUN if known.training.get("init_from") else ""),
            table(rows),
            slot_table(found),
        ]
    )


def percent(share: float | None) -> str:
    return NOT_KNOWN if share is None else f"{100 * share:g}%"


def slot_table(found: dict[str, Any]) -> str:
    """Per slot: how often the draft alone is right, and how often a pass accepts that far."""
    right, reached = found.get("slot_accuracy") or [], found.get("per_position") or []
    if not right:
        return "Per slot: " + NOT_KNOWN + "."
    lines = ["| slot | draft right | accepted that far |", "|---:|---:|---:|"]
    for slot, share in enumerate(right, start=1):
        far = f"{reached[slot - 1]:.3f}" if slot <= len(reached) else NOT_KNOWN
        lines.append(f"| {slot} | {share:.3f} | {far} |")
    return "\n".join(lines)


# --- how to serve -------------------------------------------------------------------------------


def sglang(drafter: DrafterConfig, known: Provenance) -> str:
    """SGLang took causality from the kind of a layer, whatever the keys say."""
    looks = [drafter.look(i) for i in range(drafter.num_hidden_layers)]
    odd = any(look.causal != (look.window is not None) for look in looks)
    warning = (
        "\n\nIn the block, this drafter's layers are not causal by their kind. Versions of SGLang "
        "that do not read `is_causal` serve sliding layers as causal and full ones as not, and "
        "little is accepted: measure it there."
    )
    return f"""**SGLang**

```
python -m sglang.launch_server --model-path {target(known)} \\
    --speculative-algorithm DFLASH --speculative-draft-model-path FOLDER \\
    --speculative-num-draft-tokens {drafter.block_size}
```""" + (warning if odd else "")


def vllm(drafter: DrafterConfig, known: Provenance) -> str:
    """One token fewer than the block: the anchor is not drafted."""
    settings = {
        "method": "dflash",
        "model": "FOLDER",
        "num_speculative_tokens": drafter.block_size - 1,
    }
    # Layers of both kinds need several groups of caches, which only that runner has.
    mixed = len(set(drafter.layer_types)) > 1
    runner = "VLLM_USE_V2_MODEL_RUNNER=1 " if mixed else ""
    return f"""**vLLM**

```
{runner}vllm serve {target(known)} \\
    --speculative-config '{json.dumps(settings)}'
```"""


def transformers(drafter: DrafterConfig, known: Provenance) -> str:
    return f"""**transformers** (5.17 or later; one text at a time)

```python
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

drafter = AutoModel.from_pretrained("FOLDER", trust_remote_code=True, dtype="auto").eval()
target = AutoModelForCausalLM.from_pretrained("{target(known)}", dtype="auto").eval()
tokenizer = AutoTokenizer.from_pretrained("{target(known)}")
chat = [{{"role": "user", "content": "..."}}]
ids = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
)["input_ids"]
out = drafter.spec_generate(
    target=target, input_ids=ids, max_new_tokens=256,
    stop_token_ids=[tokenizer.eos_token_id], temperature=0.0,
)
print(tokenizer.decode(out[0, ids.shape[1]:]))
```"""


SERVING = {"sglang": sglang, "vllm": vllm, "transformers": transformers}


# --- what it is and where it comes from ---------------------------------------------------------


def shape_rows(drafter: DrafterConfig) -> list[tuple[str, Any]]:
    heads = f"{drafter.num_attention_heads} / {drafter.num_key_value_heads} / {drafter.head_dim}"
    windows = sum(kind == SLIDING for kind in drafter.layer_types)
    causal = [drafter.look(i).causal for i in range(drafter.num_hidden_layers)]
    return [
        ("layers", drafter.num_hidden_layers),
        ("hidden / FFN", f"{drafter.hidden_size} / {drafter.intermediate_size}"),
        ("heads / key and value heads / size", heads),
        ("block size, the anchor included", drafter.block_size),
        ("target layers read", ", ".join(map(str, drafter.target_layer_ids))),
        ("mask token", drafter.mask_token_id),
        ("sliding layers", f"{windows} (window {drafter.sliding_window})" if windows else "none"),
        ("causal in the block", f"{sum(causal)} of {len(causal)} layers"),
        ("rope base", drafter.rope_theta),
    ]


def data_rows(known: Provenance) -> list[tuple[str, Any]]:
    training, identity = known.training, known.identity
    return [
        ("target", known.target),
        ("revision", identity.target["revision"] if identity else None),
        ("target weights, SHA-256", training.get("target_weights_sha256")),
        ("tokenizer, SHA-256", training.get("tokenizer_sha256")),
        ("chat template, SHA-256", training.get("chat_template_sha256")),
        ("data, SHA-256", training.get("data_sha256")),
        ("samples / tokens", f"{identity.samples:,} / {identity.tokens:,}" if identity else None),
        ("states stored as", identity.encoding if identity else None),
        ("cache fingerprint", training.get("cache_fingerprint")),
    ]


def training(known: Provenance) -> str:
    """Steps, what it began with, and the options."""
    rows: list[tuple[str, Any]] = [("steps", known.step)]
    beginning = known.training.get("init_from")
    if beginning:
        words = f"{beginning.get('format')} drafter, weights {beginning.get('weights_sha256')}"
        rows.append(("begun from", words))
    options = {k: v for k, v in known.options.items() if v is not None and k not in UNTOLD}
    rows += sorted(options.items())
    return table(rows) if options else table(rows) + f"\n\nOptions: {NOT_KNOWN}."


def limits(drafter: DrafterConfig, known: Provenance) -> str:
    lines = [
        "The figures above are offline, on text of the same kind as the training data. On other "
        "prompts, with another chat template, or with thinking switched the other way, acceptance "
        "is another: measure it on yours.",
        "Neither speed nor acceptance in a server was measured for this card. Measure acceptance "
        "with prefix caching off first.",
        "Drafts are greedy. At temperature 0 the text is the target's up to numerical ties; above, "
        "fewer drafts are accepted.",
    ]
    if known.tokenizer is None:
        lines.append(
            "The target's tokenizer is not on record, so it was not checked that the mask token "
            "is one that text never holds."
        )
    if not known.measured:
        lines.pop(0)
    return "\n".join(f"- {line}" for line in lines)


def software_rows() -> list[tuple[str, Any]]:
    """What this folder was written with."""
    return [
        ("dflash-toolkit", __version__),
        ("Python", platform.python_version()),
        *((name, version_of(name)) for name in LIBRARIES),
    ]


def version_of(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
