"""Real speculative decoding with the target in transformers, and plain decoding as its oracle.

One round: the drafter drafts a block behind the anchor of every text in one pass, the target
reads the blocks in one pass and chooses a token behind every slot, and each text commits its
longest prefix of drafts that are what the target chose, with one token of the target's own behind
it, which is the next anchor.  Texts advance independently; one that has ended leaves the batch.

K target layers, R texts that go on, B block size.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_cache.target import Target
from dflash_fit.acceptance import Chain
from dflash_fit.drafter import DFlashDraftModel
from dflash_fit.drafts import DraftContext, draft_blocks
from dflash_fit.sampling import Choose, agreed_drafts, likeliest
from dflash_fit.step import Frozen
from dflash_fit.target_session import CacheKind, TargetSession


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """An answer, and its target passes after reading the prompt."""

    tokens: list[int]  # the answer, stop token included
    chain: Chain  # accepted drafts and committed tokens of every pass


class Answer:
    """An answer while it is written."""

    def __init__(self, first: int, *, max_new_tokens: int, stop_ids: Collection[int]) -> None:
        self.tokens, self.accepted, self.committed = [first], list[int](), list[int]()
        self.room, self.stop_ids = max_new_tokens - 1, stop_ids

    @property
    def ended(self) -> bool:
        return self.room == 0 or self.tokens[-1] in self.stop_ids

    def commit(self, new: Sequence[int]) -> None:
        """Add the accepted drafts and the target's own token behind them, up to the end."""
        kept = list(new[: self.room])
        stops = [index for index, token in enumerate(kept) if token in self.stop_ids]
        del kept[stops[0] + 1 if stops else len(kept) :]
        self.tokens += kept
        self.accepted.append(min(len(new) - 1, len(kept)))
        self.committed.append(len(kept))
        self.room -= len(kept)

    def result(self) -> Decoded:
        chain = Chain(accepted=tuple(self.accepted), committed=tuple(self.committed))
        return Decoded(tokens=self.tokens, chain=chain)


@torch.inference_mode()
def speculate_batch(
    target: Target,
    drafter: DFlashDraftModel,
    frozen: Frozen,
    prompts: Sequence[Tensor],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    choose: Choose = likeliest,
    cache: CacheKind = "dynamic",
) -> list[Decoded]:
    """Speculative decoding of several prompts at once; greedy, or as `choose` draws.

    Greedy answers equal those of plain decoding, but for ties in the target's logits; drawn ones
    have the target's own distribution (see `sampling`).
    """
    session = TargetSession(target, drafter.config.target_layer_ids, cache=cache)
    logits, states = session.start(prompts, room=max_new_tokens + drafter.config.block_size)
    contexts = [DraftContext(drafter, frozen) for _ in prompts]
    for context, hidden in zip(contexts, states, strict=True):
        context.extend(hidden)
    first = choose(logits)[:, 0].tolist()
    answers, going = begin_answers(session, first, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
    while going:
        anchors = torch.tensor([answers[text].tokens[-1] for text in going], device=target.device)
        rooms = [answers[text].room for text in going]
        draft = draft_blocks([contexts[text] for text in going], anchors)[:, : max(rooms)]
        block = torch.cat([anchors[:, None], draft], dim=1)
        logits, hidden = session.read(block, rooms=rooms)
        chosen = choose(logits)
        # Kept: the anchor and the agreed drafts.  Committed: the agreed drafts and the next anchor.
        kept = (agreed_drafts(draft, chosen) + 1).tolist()
        # To the host in one go: row by row it would wait for the work of every context.
        new = chosen.tolist()
        for row, (text, count) in enumerate(zip(going, kept, strict=True)):
            contexts[text].extend(hidden[:, row, :count])
            answers[text].commit(new[row][:count])
        going = leave_ended(session, answers, going, kept, read=block.shape[1])
    return [answer.result() for answer in answers]


@torch.inference_mode()
def plain_batch(
    target: Target,
    prompts: Sequence[Tensor],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    choose: Choose = likeliest,
    cache: CacheKind = "dynamic",
) -> list[Decoded]:
    """Plain decoding of several prompts at once, one token of each per target pass."""
    session = TargetSession(target, (), cache=cache)
    logits, _ = session.start(prompts, room=max_new_tokens)
    first = choose(logits)[:, 0].tolist()
    answers, going = begin_answers(session, first, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
    while going:
        anchors = torch.tensor([answers[text].tokens[-1] for text in going], device=target.device)
        logits, _ = session.read(anchors[:, None], rooms=[answers[text].room for text in going])
        for text, token in zip(going, choose(logits)[:, 0].tolist(), strict=True):
            answers[text].commit([token])
        going = leave_ended(session, answers, going, [1] * len(going), read=1)
    return [answer.result() for answer in answers]


def begin_answers(
    session: TargetSession,
    first: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
) -> tuple[list[Answer], list[int]]:
    """An answer from each first token, and the numbers of those that go on."""
    answers = [Answer(t, max_new_tokens=max_new_tokens, stop_ids=stop_ids) for t in first]
    everyone = range(len(answers))
    return answers, leave_ended(session, answers, everyone, [0] * len(answers), read=0)


def leave_ended(
    session: TargetSession,
    answers: Sequence[Answer],
    going: Sequence[int],
    kept: Sequence[int],
    *,
    read: int,
) -> list[int]:
    """The texts that go on; the session keeps what they kept of the last pass, and only them."""
    rows = [row for row, text in enumerate(going) if not answers[text].ended]
    session.keep({row: kept[row] for row in rows}, read=read)
    return [going[row] for row in rows]


def speculate(
    target: Target,
    drafter: DFlashDraftModel,
    frozen: Frozen,
    prompt: Tensor,
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    choose: Choose = likeliest,
    cache: CacheKind = "dynamic",
) -> Decoded:
    """Speculative decoding of one prompt [n]: a batch of one, without any padding."""
    [answer] = speculate_batch(
        target,
        drafter,
        frozen,
        [prompt],
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        choose=choose,
        cache=cache,
    )
    return answer


def greedy(
    target: Target, prompt: Tensor, *, max_new_tokens: int, stop_ids: Collection[int]
) -> Decoded:
    """Plain greedy decoding of one prompt [n]."""
    [answer] = plain_batch(target, [prompt], max_new_tokens=max_new_tokens, stop_ids=stop_ids)
    return answer
