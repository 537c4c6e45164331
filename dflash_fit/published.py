"""Read drafter folders of any project as our own: other names, other keys, the same drafter.

Read: the reference's format (z-lab, SpecForge, Model-Optimizer and our own exports), speculators,
AngelSlim and NeMo Automodel.  Refused with the reason: relatives that compute something else, or
that were trained with shifted labels.  Nothing is guessed: a tensor that is missing, unknown or of
another shape is an error.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_fit.drafter import SLIDING, DFlashDraftModel, DrafterConfig
from dflash_fit.errors import DrafterError
from dflash_fit.folder import (
    ARCHITECTURE,
    CONFIG_FILE,
    SHIFTED,
    UNKNOWN,
    WEIGHTS_FILE,
    from_config,
    read_json,
    read_tensors,
    refuse_other_mathematics,
    refuse_wrong_tensors,
)
from dflash_fit.speculators import MARK, from_speculators

INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
# The same drafter under the name of another project's class.
ARCHITECTURES = {
    ARCHITECTURE: "DFlash",
    "QwenDFlashDraftModel": "AngelSlim",
    "Qwen3DFlashDraftModel": "NeMo Automodel",
    "DFlashSpeculator": "speculators",
}
# Parts of class names that tell relatives, and why they are refused.
RELATIVES = {
    "DSpark": f"that is DSpark, or DeepSpec's DFlash: {SHIFTED}",
    "DeepSpec": SHIFTED,
    "DFlash2": f"that is DFlash2, with convolutions and a selector; {UNKNOWN}",
    "Domino": f"that is Domino, with a recurrent correction of the drafts; {UNKNOWN}",
    "DFlare": f"that is DFlare, with a mixture of target layers for each layer; {UNKNOWN}",
    "LiLiCorr": f"that is LiLiCorr, with a network that ranks drafts anew; {UNKNOWN}",
}
# Parts of tensor names that do the same.
FOREIGN_TENSORS = {
    "markov": RELATIVES["DSpark"],
    "confidence": RELATIVES["DSpark"],
    "prefix_gru": RELATIVES["Domino"],
    "embed_proj": RELATIVES["Domino"],
    "_conv.": RELATIVES["DFlash2"],
    "candidate_selector": RELATIVES["DFlash2"],
    "layer_fusion": RELATIVES["DFlare"],
    "proj_target": RELATIVES["DFlare"],
    "lilicorr": RELATIVES["LiLiCorr"],
    "mask_hidden": f"a mask token with an embedding of its own; {UNKNOWN}",
    "mask_embedding": f"a mask token with an embedding of its own; {UNKNOWN}",
    "sink": f"attention sinks; {UNKNOWN}",
    "_scale": f"quantised weights; {UNKNOWN}",
    ".bias": f"projections with a bias; {UNKNOWN}",
}
# Wrappers that projects save a drafter out of.
PREFIXES = ("model.", "draft_model.", "dflash_module.", "module.")
# What speculators keeps of the target beside the drafter.
EMBEDDING, HEADS = "embed_tokens.weight", ("lm_head.weight", "verifier_lm_head.weight")
NO_PART = ("verifier_norm.weight",)  # only its training reads that
VOCABULARY_MAPS = ("d2t", "t2d")


@dataclass(frozen=True, kw_only=True)
class Published:
    """A drafter folder, read and checked."""

    folder: Path
    layout: str  # whose
    config: DrafterConfig
    tensors: dict[str, Tensor]  # under our names, as stored
    copies: dict[str, Tensor]  # of the target's embedding and head, where the folder has them


def read_published(folder: Path, *, num_target_layers: int | None = None) -> Published:
    """Read a drafter folder of any project.

    `num_target_layers` is what the target has, for formats that do not say it.
    """
    where = str(folder / CONFIG_FILE)
    value = read_json(folder)
    refuse_relatives(value, where=where)
    layout = layout_of(value)
    config = from_config(
        native_config(value, where=where, num_target_layers=num_target_layers), where=where
    )
    tensors = without_prefix(read_weights(folder))
    copies = take_copies(tensors, config, path=folder, layout=layout)
    refuse_foreign_tensors(tensors, path=folder)
    refuse_wrong_tensors(folder, {n: tuple(t.shape) for n, t in tensors.items()}, config)
    refuse_bad_values(tensors, path=folder)
    return Published(folder=folder, layout=layout, config=config, tensors=tensors, copies=copies)


def load_drafter(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    num_target_layers: int | None = None,
) -> tuple[DFlashDraftModel, Published]:
    """A drafter folder of any project as a model that is ready to draft, and what was read."""
    found = read_published(folder, num_target_layers=num_target_layers)
    drafter = DFlashDraftModel(found.config)
    drafter.load_state_dict(found.tensors, strict=True)
    return drafter.to(device, dtype).eval().requires_grad_(False), found


# --- config.json --------------------------------------------------------------------------------


def layout_of(value: Mapping[str, Any]) -> str:
    if MARK in value:
        return "speculators"
    names = [ARCHITECTURES[name] for name in value["architectures"] if name in ARCHITECTURES]
    return names[0]


def refuse_relatives(value: Mapping[str, Any], *, where: str) -> None:
    """Refuse, with the reason, a class of another kind."""
    names = value.get("architectures") or []
    for name in names:
        for part, reason in RELATIVES.items():
            if part.lower() in name.lower():
                raise DrafterError(f"{where}: architectures {names}; {reason}")
    if not set(names) & set(ARCHITECTURES):
        raise DrafterError(f"{where}: architectures {names}, want one of {list(ARCHITECTURES)}")


def native_config(
    value: Mapping[str, Any], *, where: str, num_target_layers: int | None
) -> dict[str, Any]:
    """Any project's config.json in the reference's words."""
    if MARK in value:
        refuse_other_mathematics(value, where=where)
        return from_speculators(value, where=where, num_target_layers=num_target_layers)
    return with_windows({**value, "architectures": [ARCHITECTURE]})


def with_windows(value: dict[str, Any]) -> dict[str, Any]:
    """Model-Optimizer's keys of windows in the reference's words, read as vLLM reads them.

    `use_swa` puts a window on every layer where the layer types know none, and their in-block
    causality then stays that of full layers where nothing says it.
    """
    dflash = dict(value.get("dflash_config") or {})
    use_swa, window = dflash.pop("use_swa", None), dflash.pop("swa_window_size", None)
    said = {**value, "dflash_config": dflash}
    slides = SLIDING in (value.get("layer_types") or ())
    if slides or use_swa:
        said["sliding_window"] = window or value.get("sliding_window")
    if use_swa and not slides:
        said["layer_types"] = [SLIDING] * (value.get("num_hidden_layers") or 0)
        words = (value.get("is_causal"), dflash.get("is_causal"), dflash.get("causal"))
        said["is_causal"] = next((word for word in words if word is not None), False)
    return said


# --- tensors ------------------------------------------------------------------------------------


def weight_files(folder: Path) -> list[Path]:
    """The file of weights, or those that an index names."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return [folder / WEIGHTS_FILE]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [folder / name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DrafterError(f"{index}: names no files; is the folder complete?") from None


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of all files."""
    return {n: t for path in weight_files(folder) for n, t in read_tensors(path).items()}


def weights_sha256(folder: Path) -> str:
    """Hash of the file of weights, or those of several, in order."""
    digests = []
    for path in weight_files(folder):
        with open(path, "rb") as file:
            digests.append(file_digest(file, "sha256").hexdigest())
    return "+".join(digests)


def without_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names without the one wrapper that all of them have."""
    for prefix in PREFIXES:
        if tensors and all(name.startswith(prefix) for name in tensors):
            return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def take_copies(
    tensors: dict[str, Tensor], config: DrafterConfig, *, path: Path, layout: str
) -> dict[str, Tensor]:
    """Take out what belongs to the target: speculators keeps copies of embedding and head.

    Elsewhere such tensors are the mark of DeepSpec.
    """
    found = [name for name in (EMBEDDING, *HEADS) if name in tensors]
    if layout != "speculators":
        if found:
            raise DrafterError(
                f"{path}: holds {found}, as files of DeepSpec do and no other drafter of this "
                f"format: {SHIFTED}"
            )
        return {}
    for name in NO_PART:
        tensors.pop(name, None)
    for name in VOCABULARY_MAPS:
        mapping = tensors.pop(name, None)
        whole = mapping is None or (mapping.all() if name == "t2d" else not mapping.any())
        if not whole or (mapping is not None and len(mapping) != config.vocab_size):
            raise DrafterError(
                f"{path}: {name} maps a vocabulary of its own; a drafter with one is of a kind "
                "that this version does not compute"
            )
    return {name: tensors.pop(name) for name in found}


def refuse_foreign_tensors(tensors: Mapping[str, Tensor], *, path: Path) -> None:
    """What is no part of a plain drafter, with the reason where its name tells it."""
    for name in tensors:
        for part, reason in FOREIGN_TENSORS.items():
            if part in name:
                raise DrafterError(f"{path}: holds {name}; {reason}")
    beside = path / "mask_embedding.pt"
    if beside.is_file():
        raise DrafterError(f"{beside}: {FOREIGN_TENSORS['mask_embedding']}")


def refuse_bad_values(tensors: Mapping[str, Tensor], *, path: Path) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise DrafterError(f"{path}: {name} is {tensor.dtype}; quantised weights; {UNKNOWN}")
        if not bool(tensor.isfinite().all()):
            raise DrafterError(
                f"{path}: {name} holds values that are not finite; take another checkpoint"
            )


def refuse_other_copies(found: Published, embedding: Tensor, head: Tensor) -> None:
    """Copies of the target's matrices must be the target's: a head of its own would be lost."""
    for name, copy in found.copies.items():
        wanted = embedding if name == EMBEDDING else head
        same = copy.shape == wanted.shape and torch.equal(
            copy.to(wanted.device, torch.bfloat16), wanted.to(torch.bfloat16)
        )
        if not same:
            raise DrafterError(
                f"{found.folder}: its {name} is not the target's; a drafter with one of its own is "
                "of a kind that this version does not compute, and another target is another "
                "drafter"
            )
