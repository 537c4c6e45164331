"""Name the mistake behind wrong states: which layer's, which token's, before or after which norm.

Only asked when a proof has failed already, so it may try everything.

Letters: t tokens, H hidden size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_cache.report import Report
from dflash_cache.schema import FINAL_HIDDEN, layer_of
from dflash_cache.tolerance import Tolerance

UNKNOWN = "they are of no layer and of no neighbouring token"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """States that a known mistake would give, and its name."""

    name: str
    states: Tensor  # [t, H]


def cause_of(found: Tensor, plane: str, report: Report, tolerance: Tolerance) -> str:
    """Why states [t, H] of a plane differ from those of the report, in words."""
    if told := _nothing_there(found):
        return told
    right = report.plane(plane)
    candidates = list(_candidates(plane, report))
    if right is not None:
        candidates.insert(0, Candidate(name="", states=right))
    best, told = tolerance.limit, ""
    for candidate in candidates:
        for shift in (0, 1, -1):
            error = _error_when_shifted(found, candidate.states, shift, tolerance)
            if error < best:
                best, told = error, " and ".join(filter(None, (candidate.name, SHIFTS[shift])))
    if told or right is None:
        return told or UNKNOWN
    return _scaled(found, right, tolerance) or _some_tokens(found, right, tolerance)


SHIFTS = {
    0: "",
    1: "the states are shifted by one token: a token has that of the token before it",
    -1: "the states are shifted by one token: a token has that of the token behind it",
}


def _nothing_there(found: Tensor) -> str:
    unreal = ~torch.isfinite(found).all(-1)
    if bool(unreal.any()):
        return f"NaN or infinity in the state of token {_first(unreal)}"
    zero = (found == 0).all(-1)
    if bool(zero.all()):
        return "all states are zeros"
    return f"the state of token {_first(zero)} is all zeros" if bool(zero.any()) else ""


def _candidates(plane: str, report: Report) -> Iterator[Candidate]:
    """What the mistakes that people make would give."""
    if plane == FINAL_HIDDEN:
        if report.unnormed is not None:
            told = "they are not normed: the final norm, applied once, gives what the head reads"
            yield Candidate(name=told, states=report.unnormed)
        if (twice := report.normed(report.final)) is not None:
            yield Candidate(name="they are normed twice", states=twice)
        wanted = report.last_layer + 1
    else:
        wanted = layer_of(plane)
        right = report.layer(wanted)
        normed = None if right is None else report.normed(right)
        if normed is not None:
            told = "the target's final norm was applied to them"
            yield Candidate(name=told, states=normed)
    for layer_id in range(report.last_layer + 1):
        states = report.layer(layer_id)
        if layer_id != wanted and states is not None:
            yield Candidate(name=_other_layer(layer_id, wanted), states=states)
    told = ", layer off by one" if wanted == 0 else ""
    yield Candidate(name=f"the states are the token embeddings{told}", states=report.entries[0])


def _other_layer(found: int, wanted: int) -> str:
    told = f"the states are those of layer {found}"
    if abs(found - wanted) == 1:
        return f"{told}: layer off by one, too {'low' if found < wanted else 'high'}"
    return told


def _error_when_shifted(found: Tensor, states: Tensor, shift: int, tolerance: Tolerance) -> float:
    """Error where token p has the state of token p - shift; the tokens at the ends have none."""
    tokens = len(found)
    if tokens < 2 and shift:
        return torch.inf
    if shift > 0:
        found, states = found[shift:], states[: tokens - shift]
    else:
        found, states = found[: tokens + shift], states[-shift:tokens]
    return tolerance.difference(found, states).ruling


def _scaled(found: Tensor, right: Tensor, tolerance: Tolerance) -> str:
    found, right = found.float(), right.float()
    factor = float((found * right).sum() / (right * right).sum().clamp_min(1e-12))
    same = factor and tolerance.same(found / factor, right)
    return f"the states are {factor:.3g} times what they should be" if same else ""


def _some_tokens(found: Tensor, right: Tensor, tolerance: Tolerance) -> str:
    distance = (found.float() - right.float()).norm(dim=-1)
    wrong = distance > tolerance.limit * right.float().norm(dim=-1)
    count = int(wrong.sum())
    where = f"; {count} of {len(found)} tokens differ, the first is token {_first(wrong)}"
    if tolerance.routed:
        where += ". Routers that are all but tied, as those of random weights are, would do so too"
    return UNKNOWN + (where if count else "")


def _first(where: Tensor) -> int:
    return int(where.nonzero()[0, 0])
