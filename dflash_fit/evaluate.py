"""`dflash eval`: load a drafter, refuse one that does not fit, and report what it is worth."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dflash_cache.chat import SkipRow, encode_prompt
from dflash_cache.devices import DTYPES, pick_device
from dflash_cache.errors import CacheMismatchError, DataError
from dflash_cache.reader import CacheReader
from dflash_cache.rows import Row, iter_rows
from dflash_cache.samples import messages_of
from dflash_cache.survey import survey_target, with_weights_hash
from dflash_cache.target import Target, load_weights
from dflash_cache.vocabulary import hash_tokenizer
from dflash_fit.acceptance import (
    Chain,
    is_looping,
    leading_true,
    prompt_lookup,
    summarize,
    walk,
)
from dflash_fit.batch import Batch, BatchShape
from dflash_fit.checkpoint import find_drafter
from dflash_fit.config import EvalConfig, FitConfig
from dflash_fit.decode import Decoded, greedy, speculate
from dflash_fit.drafter import DFlashDraftModel
from dflash_fit.errors import DrafterError
from dflash_fit.export import read_drafter, read_training
from dflash_fit.loader import split_documents
from dflash_fit.offline import choose_documents, offline_acceptance, slots_right
from dflash_fit.prepare import load_frozen
from dflash_fit.step import Frozen, Pieces

ANCHOR_GROUP = 64
LOOKUP_NGRAM = 3


def evaluate_drafter(config: EvalConfig) -> dict[str, Any]:
    """Offline from the cache, or by real decoding, as the options say."""
    folder = find_drafter(config.drafter)
    device = pick_device(config.device)
    drafter = read_drafter(folder, dtype=DTYPES[config.dtype], device=device)
    training = read_training(folder)
    if config.cache is not None:
        return evaluate_offline(config, drafter, training, folder, config.cache)
    return evaluate_decoding(config, drafter, training, folder)


def evaluate_offline(
    config: EvalConfig,
    drafter: DFlashDraftModel,
    training: dict[str, Any],
    folder: Path,
    cache: str,
) -> dict[str, Any]:
    """Acceptance on the samples of a cache that never trained."""
    reader = CacheReader(cache)
    identity = reader.identity
    refuse_other_target(training, identity.target, identity.tokenizer["sha256"], where=str(cache))
    refuse_unfit_drafter(drafter, reader.identity.target, where=str(cache))
    absent = set(drafter.config.target_layer_ids) - set(reader.identity.target_layer_ids)
    if absent:
        raise DrafterError(
            f"{folder}: reads target layers {sorted(absent)}, which {cache} does not hold"
        )
    share = config.held_out or training.get("held_out") or FitConfig.held_out
    _, measured = split_documents(reader, held_out=share)
    documents = choose_documents(measured, reader.lengths, max_tokens=config.max_tokens)
    longest = max(reader.lengths[d] for d in documents)
    budget = max(longest, training.get("token_budget", longest))
    device = next(drafter.parameters()).device
    values = offline_acceptance(
        drafter,
        load_frozen(reader, dtype=DTYPES[config.dtype], device=device),
        reader,
        documents,
        shape=_shape(drafter, tokens=budget, encoding=reader.identity.encoding),
        device=device,
        anchor_group=ANCHOR_GROUP,
        pieces=Pieces(),
    )
    return {"kind": "offline", "drafter": str(folder), "cache": str(cache), **values}


def _shape(drafter: DFlashDraftModel, *, tokens: int, encoding: str = "bf16") -> BatchShape:
    return BatchShape(
        target_layers=len(drafter.config.target_layer_ids),
        token_budget=tokens,
        hidden_size=drafter.config.hidden_size,
        anchors=ANCHOR_GROUP,
        block_size=drafter.config.block_size,
        encoding=encoding,
    )


def evaluate_decoding(
    config: EvalConfig, drafter: DFlashDraftModel, training: dict[str, Any], folder: Path
) -> dict[str, Any]:
    """Decode prompts with and without the drafter, and compare tokens, passes and seconds."""
    assert config.target is not None
    assert config.prompts is not None
    survey = survey_target(config.target, dtype=config.dtype)
    refuse_unfit_drafter(drafter, survey.spec.to_dict(), where=config.target)
    prompts = load_prompts(config.prompts, survey.tokenizer, limit=config.max_prompts)
    survey = with_weights_hash(survey)
    tokenizer = hash_tokenizer(survey.tokenizer)
    refuse_other_target(training, survey.spec.to_dict(), tokenizer, where=config.target)
    target = load_weights(survey, device=config.device)
    frozen = Frozen(embedding=target.embedding, head=target.head)
    answers = [
        _answer(config, target, drafter, frozen, prompt)
        for prompt in tqdm(prompts, desc="decode", unit="prompt", disable=None)
    ]
    plain, drafted = [a[0] for a in answers], [a[1] for a in answers]
    offline = [
        offline_chain(target, drafter, frozen, prompt, answer.tokens)
        for prompt, answer in zip(prompts, drafted, strict=True)
    ]
    return {
        "kind": "decoding",
        "drafter": str(folder),
        "target": config.target,
        "dtype": config.dtype,
        **report(drafter, prompts, plain, drafted, offline),
    }


def _answer(
    config: EvalConfig, target: Target, drafter: DFlashDraftModel, frozen: Frozen, prompt: list[int]
) -> tuple[Decoded, Decoded]:
    ids = torch.tensor(prompt, device=target.device)
    stops, longest = target.stop_ids, config.max_new_tokens
    plain = greedy(target, ids, max_new_tokens=longest, stop_ids=stops)
    drafted = speculate(target, drafter, frozen, ids, max_new_tokens=longest, stop_ids=stops)
    return plain, drafted


def report(
    drafter: DFlashDraftModel,
    prompts: Sequence[list[int]],
    plain: Sequence[Decoded],
    drafted: Sequence[Decoded],
    offline: Sequence[Chain],
) -> dict[str, Any]:
    """The figures that design and users ask for; every acceptance length counts alike."""
    block = drafter.config.block_size
    loops = [is_looping(answer.tokens) for answer in drafted]
    lookup = [
        prompt_lookup(p + a.tokens, len(p), ngram=LOOKUP_NGRAM, drafts=block - 1)
        for p, a in zip(prompts, drafted, strict=True)
    ]
    same = [p.tokens == d.tokens for p, d in zip(plain, drafted, strict=True)]

    def straight(chains: Sequence[Chain]) -> float:
        kept = [chain for chain, loop in zip(chains, loops, strict=True) if not loop]
        return float(summarize(kept, block_size=block)["acceptance_length"])

    chains = [answer.chain for answer in drafted]
    return {
        **summarize(chains, block_size=block),
        "acceptance_length_not_looping": straight(chains),
        "offline_acceptance_length": summarize(offline, block_size=block)["acceptance_length"],
        "identical_to_greedy": all(same),
        "answers_differing": same.count(False),
        "speedup": sum(p.seconds for p in plain) / max(sum(d.seconds for d in drafted), 1e-9),
        "prompt_lookup": summarize(lookup, block_size=block)["acceptance_length"],
        "prompt_lookup_not_looping": straight(lookup),
        "looping": sum(loops) / max(len(loops), 1),
        "prompts": len(prompts),
        "block_size": block,
    }


@torch.inference_mode()
def offline_chain(
    target: Target,
    drafter: DFlashDraftModel,
    frozen: Frozen,
    prompt: list[int],
    answer: list[int],
) -> Chain:
    """Acceptance of an answer as the cache would give it: one target forward, all anchors."""
    tokens = prompt + answer
    ids = torch.tensor(tokens, device=target.device)
    batch = Batch.empty(_shape(drafter, tokens=len(tokens)), device=target.device)
    states = target.hidden_states(ids[None], drafter.config.target_layer_ids)
    batch.hidden.copy_(torch.stack([state[0].to(torch.bfloat16) for state in states]))
    batch.input_ids.copy_(ids)
    batch.position_ids.copy_(torch.arange(len(tokens)))
    batch.document_ids.zero_()
    batch.loss_mask[len(prompt) :] = True
    if len(answer) < 2:
        return Chain(accepted=(), committed=())
    anchors = torch.arange(len(prompt), len(tokens) - 1).numpy()
    right, _ = slots_right(drafter, frozen, batch, anchors, group=ANCHOR_GROUP, pieces=Pieces())
    accepted = leading_true(right)
    return walk(lambda a: int(accepted[a - len(prompt)]), [(len(prompt), len(tokens) - 1)])


def load_prompts(source: str, tokenizer: Any, *, limit: int | None) -> list[list[int]]:
    """Prompts as token ids, rendered by the target's template up to the answer."""
    prompts: list[list[int]] = []
    for number, row in enumerate(islice(iter_rows(source, split="train"), limit), start=1):
        try:
            prompts.append(encode_prompt(tokenizer, prompt_of(row)))
        except SkipRow as reason:
            raise DataError(f"{source}, row {number}: {reason}; repair or remove it") from None
    if not prompts:
        raise DataError(f"{source}: holds no prompts")
    return prompts


def prompt_of(row: Row) -> list[dict[str, Any]]:
    """The turns of a row before the first answer."""
    if isinstance(row.get("prompt"), str):
        return [{"role": "user", "content": row["prompt"]}]
    if not isinstance(row.get("messages", row.get("conversations")), list):
        raise SkipRow("no messages, conversations or prompt")
    turns = messages_of(row)
    answers = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    turns = turns[: answers[0]] if answers else turns
    if not turns:
        raise SkipRow("nothing comes before the first answer")
    return turns


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
