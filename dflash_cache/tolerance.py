"""When states that were computed twice are the same: the rule of all proofs that compare them.

Letters: t tokens of a row, H hidden size.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dflash_cache.target import Target

# Relative L2 error that one token of one layer may have, by the target's dtype, where kernels of
# other shapes did the sums: bfloat16 keeps 8 bits, and the error of tens of layers adds up
# (0.04 seen on 135M parameters).  A leak or another token's state is off by about 1.
TOLERANCE = {"bfloat16": 0.15, "float32": 1e-3}
# A router whose scores are nearly tied sends a token to other experts where other kernels did the
# sums.  Nothing is wrong then, but the error of that token is no rounding any more.  Measured on
# an H200 in bfloat16, 1,024 tokens through two kernels of attention, the worst layer of each:
#                                                      went elsewhere   beyond 0.15   worst token
#   trained a little, 8 of 128 experts, 48 layers           85%             0            0.05
#   8 of 64, 24 layers (by softmax / by sigmoid)            51% / -         0 / 0        0.09 / 0.15
#   2 of 8 / 1 of 16, 16 to 24 layers                       10% / -      0.5% / 0.7%     0.22 / 0.28
#   random weights in the shapes of Qwen3-30B-A3B            -             6.5%          0.87
# (of the last, one token in a thousand is beyond 0.5).  Random weights of fewer experts or a wider
# spread are chaotic: most tokens end up beyond any bound, and no rule tells that from a fault.
# In float32 tokens go elsewhere rarely, but as far, and all that attend to one are off by 0.001 to
# 0.1: the limit has to be that of bfloat16.
# What faults do (SmolLM2-135M, 30 layers): a layer off by one, 95% to 100% of the tokens are beyond
# 0.15; shifted by a token, 97% to 100%, nine in ten of them by more than 0.43 and most by about 1.
# Left padding (of the little trained ones above): 99% to 100%.
# A fault in fewer tokens than these, and less than that far, is not seen.
ROUTED_SHARE = 0.1  # of a row's tokens, rounded up, that may be further off ...
ROUTED_WORST = 0.5  # ... but none of them further than this


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Largest relative L2 distance between rows of the last dimension; infinite where NaN is."""
    return float(_relative_errors(found, wanted).max())


def _relative_errors(found: Tensor, wanted: Tensor) -> Tensor:
    found, wanted = found.float(), wanted.float()
    distance: Tensor = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-6)
    return distance.nan_to_num(nan=torch.inf)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far states are from those wanted: relative L2 errors of tokens."""

    worst: float = 0.0  # of a token
    beyond: float = 0.0  # share of tokens whose error is above the tolerance's limit
    ruling: float = 0.0  # what is held against that limit


def largest(differences: Iterable[Difference]) -> Difference:
    """Of several planes or rows, each number where it is largest."""
    found = [Difference(), *differences]
    return Difference(
        worst=max(difference.worst for difference in found),
        beyond=max(difference.beyond for difference in found),
        ruling=max(difference.ruling for difference in found),
    )


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """What the states of a row may differ by and still be the same.

    Of a dense target no token may be off by more than `limit`; of one with experts (`routed`) a
    small share may, up to `ROUTED_WORST`.
    """

    limit: float
    routed: bool = False

    def difference(self, found: Tensor, wanted: Tensor) -> Difference:
        """Of the states of one row [t, H] from those wanted, rounded as these are."""
        errors = _relative_errors(found.to(wanted.dtype), wanted).sort(descending=True).values
        worst = ruling = float(errors[0])
        if self.routed and worst <= ROUTED_WORST:
            spared = math.ceil(ROUTED_SHARE * len(errors))
            ruling = float(errors[spared]) if spared < len(errors) else 0.0
        beyond = float((errors > self.limit).float().mean())
        return Difference(worst=worst, beyond=beyond, ruling=ruling)

    def differences(self, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[Difference]:
        """The same of several planes of a row."""
        return [self.difference(f, w) for f, w in zip(found, wanted, strict=True)]

    def allows(self, difference: Difference) -> bool:
        return difference.ruling <= self.limit

    def same(self, found: Tensor, wanted: Tensor) -> bool:
        return self.allows(self.difference(found, wanted))

    def furthest(self, differences: Sequence[Difference]) -> int | None:
        """Which one is the largest of those that are too large; None where none is."""
        far = [i for i, difference in enumerate(differences) if not self.allows(difference)]
        return max(far, key=lambda i: differences[i].ruling, default=None)

    def told(self, difference: Difference) -> str:
        """A difference in words."""
        if not self.routed:
            return f"{difference.worst:.3g} (relative)"
        return (
            f"{difference.worst:.3g} (relative; {difference.beyond:.0%} of the tokens by more than "
            f"{self.limit:.3g})"
        )


def tolerance_of(target: Target) -> Tolerance:
    """Of states that a target computed twice, with kernels of other shapes."""
    routed = target.has_experts
    limit = TOLERANCE["bfloat16" if routed else target.spec.dtype]
    return Tolerance(limit=limit, routed=routed)


def tolerance_of_stored(target: Target, *, lossy: bool = False) -> Tolerance:
    """The same where one side was rounded to be stored.

    The least noise may round a number the other way; where the encoding is lossy, it may take a
    loud channel to the next of few codes.
    """
    computed = tolerance_of(target)
    least = TOLERANCE["bfloat16"] if lossy else torch.finfo(torch.bfloat16).eps
    return replace(computed, limit=max(computed.limit, least))
