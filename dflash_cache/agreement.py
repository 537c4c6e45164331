"""Does the target know this text?  How likely it finds the supervised tokens of some samples.

A tokenizer of another model, a wrong chat template and wrong weights all leave states that look
healthy; what the target then thinks of the text does not.

Letters: t tokens of a sample, V rows of the vocabulary.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy, linear
from tqdm import tqdm

from dflash_cache.errors import ProofError
from dflash_cache.samples import Sample
from dflash_cache.target import Target

# Share of ln V from which on an NLL is no better than guessing.
GUESSING = 0.8
# A greedy agreement under this says that the text is not the target's own.
LOW_AGREEMENT = 0.5
SLICE = 512  # tokens whose logits are held at once


@dataclass(frozen=True, kw_only=True)
class Score:
    """What the target thinks of some tokens, summed."""

    nll: float
    agreed: int
    tokens: int

    @property
    def mean(self) -> float:
        return self.nll / max(self.tokens, 1)

    @property
    def greedy(self) -> float:
        return self.agreed / max(self.tokens, 1)


def measure_agreement(target: Target, samples: Sequence[Sample]) -> dict[str, Any]:
    """Mean NLL (nats) and greedy agreement of the target on the supervised tokens.

    An NLL near that of guessing fails, with the likely cause.  Empty when there is nothing to
    measure on.
    """
    if not samples:
        return {}
    found = score(target, samples, supervised)
    guessing = math.log(target.spec.vocab_size)
    if not found.mean < GUESSING * guessing:
        raise ProofError(
            f"the target finds the supervised tokens no likelier than guessing ({found.mean:.2f} "
            f"nats, guessing {guessing:.2f}): {_cause(target, samples, found, guessing)}"
        )
    if found.greedy < LOW_AGREEMENT:
        tqdm.write(
            f"the target itself would have chosen only {found.greedy:.0%} of the supervised "
            "tokens: this text is not its own, and a drafter learns most from answers that the "
            "target wrote",
            file=sys.stderr,
        )
    return {
        "nll": found.mean,
        "greedy": found.greedy,
        "tokens": found.tokens,
        "samples": len(samples),
    }


def _cause(target: Target, samples: Sequence[Sample], found: Score, guessing: float) -> str:
    """Whether all of the text is strange to the target, or only the answers."""
    if not math.isfinite(found.mean):
        return "its logits are NaN or infinite; try --target-dtype float32"
    others = score(target, samples, lambda mask: ~supervised(mask))
    if not others.tokens or not others.mean < GUESSING * guessing:
        told = f", and so it finds the other tokens ({others.mean:.2f})" if others.tokens else ""
        return (
            f"the tokenizer is that of another model, or the weights are wrong{told}; take both "
            "from one folder"
        )
    return (
        f"but not the other tokens ({others.mean:.2f}), so tokenizer and weights fit: the chat "
        "template is that of another model, or the loss mask marks other text than answers"
    )


def supervised(mask: np.ndarray) -> np.ndarray:
    return mask


@torch.inference_mode()
def score(
    target: Target, samples: Sequence[Sample], pick: Callable[[np.ndarray], np.ndarray]
) -> Score:
    """What the target thinks of the tokens that `pick` takes by their loss mask bool [t].

    A first token has nothing before it and is not counted.
    """
    nll, agreed, tokens = 0.0, 0, 0
    for sample in samples:
        ids = torch.from_numpy(sample.input_ids).long().to(target.device)
        where = torch.from_numpy(pick(sample.loss_mask)).nonzero()[:, 0]
        where = where[where > 0].to(target.device)
        hidden = target.final_hidden(ids[None])[0, where - 1]
        for states, labels in zip(
            torch.split(hidden, SLICE), torch.split(ids[where], SLICE), strict=True
        ):
            logits = linear(states, target.head).float()
            nll += float(cross_entropy(logits, labels, reduction="sum"))
            agreed += int((logits.argmax(-1) == labels).sum())
            tokens += len(labels)
    return Score(nll=nll, agreed=agreed, tokens=tokens)
