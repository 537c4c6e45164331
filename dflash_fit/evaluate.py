"""`dflash eval`: load a drafter, refuse one that does not fit, and report what it is worth."""

import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dflash_cache.chat import ChatOptions
from dflash_cache.devices import DTYPES, pick_device
from dflash_cache.errors import CacheMismatchError
from dflash_cache.reader import CacheReader
from dflash_cache.survey import Survey, survey_target, with_weights_hash
from dflash_cache.target import Target
from dflash_cache.vocabulary import hash_tokenizer
from dflash_cache.weights import load_weights
from dflash_fit.answering import Pair, answer_sets, refuse_too_long
from dflash_fit.checkpoint import find_drafter
from dflash_fit.config import EvalConfig, FitConfig
from dflash_fit.drafter import DFlashDraftModel
from dflash_fit.errors import DrafterError
from dflash_fit.figures import Counting, by_dataset, figures
from dflash_fit.folder import read_training
from dflash_fit.loader import split_documents
from dflash_fit.offline import choose_documents, offline_acceptance
from dflash_fit.offline_text import ANCHOR_GROUP, batch_shape
from dflash_fit.prepare import load_frozen
from dflash_fit.prompts import PromptSet, read_prompt_sets
from dflash_fit.published import Published, load_drafter, refuse_other_copies
from dflash_fit.step import Frozen, Pieces
from dflash_fit.world import World

# Options that a report repeats, since its figures say little without them.
ASKED = (
    *("target", "dtype", "temperature", "seed", "thinking", "system", "max_new_tokens"),
    *("batch_size",),
)


def evaluate_drafter(config: EvalConfig) -> dict[str, Any]:
    """Offline from the cache, or by real decoding, as the options say."""
    folder = find_drafter(config.drafter)
    if config.cache is not None:
        return evaluate_offline(config, folder, config.cache)
    return evaluate_decoding(config, folder)


def evaluate_offline(config: EvalConfig, folder: Path, cache: str) -> dict[str, Any]:
    """Acceptance on the samples of a cache that never trained."""
    training = read_training(folder)
    reader = CacheReader(cache)
    identity = reader.identity
    device = pick_device(config.device)
    drafter, found = fitting_drafter(folder, identity.target, config, device, where=cache)
    refuse_other_target(training, identity.target, identity.tokenizer["sha256"], where=cache)
    absent = set(drafter.config.target_layer_ids) - set(identity.target_layer_ids)
    if absent:
        raise DrafterError(
            f"{folder}: reads target layers {sorted(absent)}, which {cache} does not hold"
        )
    frozen = load_frozen(reader, dtype=DTYPES[config.dtype], device=device)
    refuse_other_copies(found, frozen.embedding, frozen.head)
    trained = training.get("held_out") or FitConfig.held_out
    share = trained if config.held_out is None else config.held_out
    _, measured = split_documents(reader, held_out=share)
    documents = choose_documents(measured, reader.lengths, max_tokens=config.max_tokens)
    longest = max(reader.lengths[d] for d in documents)
    budget = max(longest, training.get("token_budget", longest))
    values = offline_acceptance(
        drafter,
        frozen,
        reader,
        documents,
        shape=batch_shape(drafter, tokens=budget, encoding=reader.identity.encoding),
        world=World.alone(device),
        anchor_group=ANCHOR_GROUP,
        pieces=Pieces(),
    )
    return {"kind": "offline", "drafter": str(folder), "cache": cache, **values}


def evaluate_decoding(config: EvalConfig, folder: Path) -> dict[str, Any]:
    """Decode prompts with and without the drafter, and compare tokens, passes and seconds."""
    assert config.target is not None
    assert config.prompts is not None
    survey = survey_target(config.target, dtype=config.dtype)
    drafter, found = fitting_drafter(
        folder, survey.spec.to_dict(), config, pick_device(config.device), where=config.target
    )
    chat = ChatOptions(thinking=config.thinking, system=config.system)
    sets = read_prompt_sets(config.prompts, limit=config.max_prompts)
    refuse_unfit_prompts(sets, survey, chat, max_new_tokens=config.max_new_tokens)
    warn_of_idle_thinking(config.thinking, survey.tokenizer)
    target = load_its_target(folder, survey, device=config.device, where=config.target)
    refuse_other_copies(found, target.embedding, target.head)
    pair = Pair(
        target=target,
        drafter=drafter,
        frozen=Frozen(embedding=target.embedding, head=target.head),
        chat=chat,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        seed=config.seed,
        batch_size=config.batch_size,
    )
    answers = answer_sets(sets, pair)
    asked = {"drafter": str(folder), **{name: getattr(config, name) for name in ASKED}}
    how = Counting(block_size=drafter.config.block_size, greedy=config.temperature == 0)
    return {
        "kind": "decoding",
        **asked,
        "device": str(target.device),
        "block_size": how.block_size,
        **figures(answers, how),
        "datasets": by_dataset(answers, how),
    }


def load_its_target(folder: Path, survey: Survey, *, device: str, where: str) -> Target:
    """The target, if it is the one that the drafter was trained for."""
    survey = with_weights_hash(survey)
    training, tokenizer = read_training(folder), hash_tokenizer(survey.tokenizer)
    refuse_other_target(training, survey.spec.to_dict(), tokenizer, where=where)
    return load_weights(survey, device=device)


def fitting_drafter(
    folder: Path, target: dict[str, Any], config: EvalConfig, device: torch.device, *, where: str
) -> tuple[DFlashDraftModel, Published]:
    """The drafter of a folder of any project, if it has the shapes that the target asks for."""
    drafter, found = load_drafter(
        folder,
        dtype=DTYPES[config.dtype],
        device=device,
        num_target_layers=target["num_layers"],
    )
    refuse_unfit_drafter(drafter, target, where=where)
    return drafter, found


def refuse_unfit_prompts(
    sets: list[PromptSet], survey: Survey, chat: ChatOptions, *, max_new_tokens: int
) -> None:
    """What the template or the target cannot take, before its weights are read."""
    for row in (row for one in sets for row in one.rows):
        length = len(row.ids(survey.tokenizer, options=chat))
        refuse_too_long(row, length, max_new_tokens, survey.spec.max_position_embeddings)


def warn_of_idle_thinking(thinking: str, tokenizer: Any) -> None:
    """Tell when the template asks for nothing of the kind."""
    if thinking != "as-is" and "enable_thinking" not in str(tokenizer.get_chat_template()):
        tqdm.write(
            f"--thinking {thinking}: the chat template knows no enable_thinking, so it changes "
            "nothing in the prompts",
            file=sys.stderr,
        )


def refuse_other_target(
    training: dict[str, Any], target: dict[str, Any], tokenizer_sha256: str, *, where: str
) -> None:
    """A drafter serves the target that it was trained for, to the last weight and token."""
    pairs = {
        "config_sha256": (target["config_sha256"], training.get("target_config_sha256")),
        "weights_sha256": (target["weights_sha256"], training.get("target_weights_sha256")),
        "tokenizer_sha256": (tokenizer_sha256, training.get("tokenizer_sha256")),
    }
    for field, (found, wanted) in pairs.items():
        if wanted is not None and wanted != found:
            raise CacheMismatchError(
                f"{where}: target {target['name']} has {field} {found[:12]}..., the "
                f"drafter was trained for {training.get('target')} with {wanted[:12]}...; "
                "give the target that it was trained for"
            )


def refuse_unfit_drafter(drafter: DFlashDraftModel, target: dict[str, Any], *, where: str) -> None:
    """Shapes that have to agree, for drafters that say nothing of their training."""
    config = drafter.config
    pairs = {
        "hidden_size": (config.hidden_size, target["hidden_size"]),
        "vocab_size": (config.vocab_size, target["vocab_size"]),
        "num_layers": (config.num_target_layers, target["num_layers"]),
    }
    for field, (found, wanted) in pairs.items():
        if found != wanted:
            raise DrafterError(f"{where}: {field} is {wanted}, the drafter wants {found}")
