"""How the target chooses tokens, and how far drafts stand up to them.

The drafter drafts greedily, at every temperature, as the public reference does (z-lab/dflash
`model.py`); the target chooses a token behind every slot, and a draft is accepted when it is the
token that the target has chosen.  So whatever is committed was chosen by the target from its own
distribution, given the text before it: the distribution of the text is the target's, whatever
the drafts are.  A draft is accepted with the probability that the target gives it, and no rule
that keeps the distribution can accept a given draft more often than that.  Drafting by sampling
would need the drafter's probabilities in the verification, and its slots are predicted side by
side: tokens that are drawn for each on its own do not make a text.

R rows, n tokens, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_cache.errors import ConfigError

Choose = Callable[[Tensor], Tensor]  # logits [R, n, V] to tokens [R, n]

COLDEST = 1e-6  # far below, logits / temperature is infinite in fp32 and the shares are NaN


def likeliest(logits: Tensor) -> Tensor:
    """Greedy choice: the token of the largest logit, the first of equal ones."""
    return logits.argmax(dim=-1)


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Draws every token from softmax(logits / temperature), in fp32.

    The generator lives on the target's device and makes the draw repeatable.
    """

    temperature: float
    generator: torch.Generator

    def __post_init__(self) -> None:
        if not self.temperature >= COLDEST:
            raise ConfigError(
                f"temperature {self.temperature}: want {COLDEST} or more to draw tokens; 0 is "
                "greedy decoding, which draws none"
            )

    def __call__(self, logits: Tensor) -> Tensor:
        shares = torch.softmax(logits.float() / self.temperature, dim=-1)
        drawn = torch.multinomial(shares.flatten(0, -2), 1, generator=self.generator)
        return drawn.view(logits.shape[:-1])


def agreed_drafts(draft: Tensor, chosen: Tensor) -> Tensor:
    """How many drafts [R, n] in a row, from the first on, are what the target chose [R, n + 1].

    `chosen[:, i]` is the target's choice behind slot i, so it judges the draft of slot i + 1.
    """
    return (draft == chosen[:, :-1]).long().cumprod(dim=1).sum(dim=1)
