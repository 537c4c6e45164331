"""Are the states of this unit right?  Measured on the device, a padded batch at once, without
asking the host; judged on the host before anything is committed.

Users lose weeks to caches that are silently wrong: all zero on hybrid targets, of another layer,
taken before or after a norm.  None of these shows in a training loss.

Letters: R rows of a padded batch, S its width, H hidden size, K planes, n samples of a unit.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_cache.errors import ProofError
from dflash_cache.samples import Sample
from dflash_cache.schema import spoken

SLOTS = 4096  # measured at once: what is compared and widened there takes tens of megabytes

# --- on the device --------------------------------------------------------------------------------

FACTS = ("not_finite", "zero", "constant", "median", "loudest")


def measure(states: Tensor, lengths: Tensor) -> Tensor:
    """What is judged of a plane [R, S, H] of rows of `lengths` [R]: float32 [R, 5], see `FACTS`.

    Whether a number of the row is none, a token is all zeros, and all tokens are one; the median
    of the tokens' norms (the lower one of two), and the greatest.  Slots of padding do not count.
    """
    rows, width = states.shape[:2]
    step = max(1, SLOTS // rows)
    pieces = [_measure_tokens(piece, states[:, :1]) for piece in torch.split(states, step, dim=1)]
    peaks, norms, same = (torch.cat(kind, dim=1) for kind in zip(*pieces, strict=True))
    inside = torch.arange(width, device=states.device) < lengths[:, None]
    ordered = norms.masked_fill(~inside, torch.inf).sort(dim=1).values
    found = (
        (~peaks.isfinite() & inside).any(dim=1),
        ((peaks == 0) & inside).any(dim=1),
        (same | ~inside).all(dim=1) & (lengths > 1),
        ordered.gather(1, (lengths[:, None] - 1) // 2)[:, 0],
        norms.masked_fill(~inside, 0).amax(dim=1),
    )
    return torch.stack([fact.float() for fact in found], dim=1)


def _measure_tokens(states: Tensor, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Greatest number and norm of each token, and whether it is the same as the first of its row.

    The sum of squares may overflow or vanish where no number does, hence the greatest number.
    """
    peaks = torch.linalg.vector_norm(states, ord=torch.inf, dim=-1, dtype=torch.float32)
    norms = torch.linalg.vector_norm(states, dim=-1, dtype=torch.float32)
    return peaks, norms, (states == first).all(dim=-1)


# --- on the host ----------------------------------------------------------------------------------

FAULTS = (
    (
        "NaN or infinity in the states; try --target-dtype float32, or another --target-attention "
        "if it is float32 already"
    ),
    "a token's state is all zeros; the target did not run properly",
    "all tokens have one state; the target did not run properly",
)
WHAT_NOW = (
    "Try another --target-attention, or other versions of torch, transformers and "
    "flash-linear-attention"
)


def refuse_faults(facts: np.ndarray, samples: Sequence[Sample], planes: Sequence[str]) -> None:
    """States that are not finite, zero or constant: facts [K, R, 5] of a batch of samples.

    A text of one token again and again has one state by right: there is nothing else to attend to.
    """
    for row, plane, fault in np.argwhere(facts.transpose(1, 0, 2)[:, :, : len(FAULTS)]).tolist():
        ids = samples[row].input_ids
        if FACTS[fault] == "constant" and (ids == ids[0]).all():
            continue
        raise ProofError(
            f"sample {samples[row].sample_id}, {spoken(planes[plane])}: {FAULTS[fault]}"
            + (f". {WHAT_NOW}" if fault else "")
        )


# How norms were chosen, on SmolLM2-135M (layers 1 8 14 21 27 and the final state; its loudest
# token is 160 times the median one).  The median token of a sample is what to look at: over 120
# chats of 74 to 409 tokens it lies between 0.91 and 1.09 of that of all samples, in every plane;
# code, Chinese, German, digits and base64 between 0.93 and 1.37, short and long samples 3% apart.
# What a fault does: the final state before its norm is 16 times as loud, a layer's state behind a
# norm 3 to 15 times as quiet; layers far apart differ by 2 to 10.  A final state that went through
# its norm twice is 1.14 times as loud, and neighbouring layers differ by 1.05: no norm tells these
# from other text, and `proofs` looks at them.
# One trap: a sample of one word again and again is loud throughout (135 times in the middle
# layers), but no louder than the first token of any sample.
FACTOR = 2.0  # of the usual norm that most samples of a unit keep to
QUIET = 4.0  # times quieter than usual, which no sample is
LOUD = 2.0  # times as loud as the loudest token so far, which no sample's median is
ENOUGH = 3  # samples from which on most of them are judged together
FIRST_UNITS = 8  # from whose norms the usual ones are learnt

Norms = dict[str, dict[str, float]]  # plane -> statistics of a unit's norms, as records keep them


def unit_norms(norms: np.ndarray, planes: Sequence[str]) -> Norms:
    """Of the median and the loudest norm [n, K, 2] of each sample: what a record keeps.

    By plane the median, least and greatest of the samples' medians, and the loudest token.
    Numbers that are none, which only `--no-proof states` lets through, are left out.
    """
    kept: Norms = {}
    for plane, own in zip(planes, norms.transpose(1, 2, 0), strict=True):
        medians, loudest = (values[np.isfinite(values)] for values in own)
        if len(medians) and len(loudest):
            values = {
                "median": np.median(medians),
                "least": medians.min(),
                "greatest": medians.max(),
                "loudest": loudest.max(),
            }
            kept[plane] = {name: float(f"{value:.6g}") for name, value in values.items()}
    return kept


@dataclass(frozen=True, kw_only=True)
class Band:
    """Norms of a plane that are usual in a cache, learnt from some of its units."""

    usual: float
    least: float  # median of a sample
    greatest: float
    units: int  # that it was learnt from

    @property
    def low(self) -> float:
        return self.usual / FACTOR

    @property
    def high(self) -> float:
        return self.usual * FACTOR


def learn_bands(units: Sequence[Norms]) -> dict[str, Band]:
    """The band of each plane that these units know."""
    planes = {plane for unit in units for plane in unit}
    return {plane: _learn([unit[plane] for unit in units if plane in unit]) for plane in planes}


def _learn(units: Sequence[Mapping[str, float]]) -> Band:
    usual = statistics.median(unit["median"] for unit in units)
    loudest = max(unit["loudest"] for unit in units)
    return Band(
        usual=usual,
        least=usual / QUIET,
        greatest=max(usual * QUIET, loudest * LOUD),
        units=len(units),
    )


def refuse_one(
    medians: np.ndarray, samples: Sequence[Sample], planes: Sequence[str], bands: Mapping[str, Band]
) -> None:
    """A sample whose norm lies far from the usual: medians [n, K] of samples."""
    for plane, own in zip(planes, medians.T, strict=True):
        if band := bands.get(plane):
            far = np.flatnonzero(~((own >= band.least) & (own <= band.greatest)))
            if len(far):
                sample, found = samples[far[0]], own[far[0]]
                raise _unlike(sample, plane, found, band, band.least, band.greatest)


def refuse_most(
    medians: np.ndarray, samples: Sequence[Sample], planes: Sequence[str], bands: Mapping[str, Band]
) -> None:
    """Samples most of which lie beside the usual norm, be it not far: medians [n, K]."""
    for plane, own in zip(planes, medians.T, strict=True):
        if band := bands.get(plane):
            out = np.flatnonzero(~((own >= band.low) & (own <= band.high)))
            if 2 * len(out) > len(own):
                sample, found = samples[out[0]], own[out[0]]
                more = f" (and {len(out) - 1} others of {len(own)} samples lie outside too)"
                raise _unlike(sample, plane, found, band, band.low, band.high, more)


def _unlike(
    sample: Sample, plane: str, found: float, band: Band, low: float, high: float, more: str = ""
) -> ProofError:
    return ProofError(
        f"sample {sample.sample_id}, {spoken(plane)}: its median state has norm {found:.4g}{more}; "
        f"usual here is {band.usual:.4g} (median of {band.units} units), and the band is {low:.4g} "
        f"to {high:.4g}. The target no longer computes what it did: states of another layer, a "
        "norm left out or done twice, other versions of a library, or broken memory. If the text "
        "is as it should be and only strange (one word again and again, say), "
        "`--no-proof norms` leaves this check out"
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Judged:
    """A unit each of whose samples is likely, looked at one by one: medians [n, K]."""

    name: str
    norms: Norms
    medians: np.ndarray
    samples: Sequence[Sample]


class UnitChecks:
    """Judges batches as they come, and their unit when its last one has come.

    `earlier` gives the norms of the first units of the cache that have `ENOUGH` samples, by name:
    asked for again while they are few, for other workers commit too.
    """

    def __init__(
        self,
        planes: Sequence[str],
        *,
        leave_out: Sequence[str],
        earlier: Callable[[], Mapping[str, Norms]],
    ) -> None:
        self.planes, self.leave_out, self.earlier = planes, leave_out, earlier
        self.known: dict[str, Norms] = {}
        self.norms: list[np.ndarray] = []  # [R, K, 2] of the batches of this unit
        self.few: list[_Judged] = []  # units that have too few samples to be judged together

    def batch(self, facts: np.ndarray, samples: Sequence[Sample]) -> None:
        """Facts [K, R, 5] of the next samples of the unit."""
        if "states" not in self.leave_out:
            refuse_faults(facts, samples, self.planes)
        self.norms.append(facts[:, :, len(FAULTS) :].transpose(1, 0, 2).copy())

    def unit(self, name: str, samples: Sequence[Sample]) -> None:
        """The unit of these samples is whole: do its norms fit those of the first units?

        The first unit of all is judged by itself, each sample of it by the others.  Units of few
        samples are judged one sample at a time, and together when they have enough; only then is
        anything learnt from them, or a fault would make itself the usual.
        """
        norms, self.norms = np.concatenate(self.norms), []
        if "norms" in self.leave_out:
            return
        own = _Judged(
            name=name,
            norms=unit_norms(norms, self.planes),
            medians=norms[:, :, 0],
            samples=samples,
        )
        bands = self._bands([*self.few, own])
        refuse_one(own.medians, samples, self.planes, bands)
        self.few.append(own)
        if sum(len(unit.samples) for unit in self.few) >= ENOUGH:
            self._judge_together(bands)

    def _bands(self, unproven: Sequence[_Judged]) -> dict[str, Band]:
        """Learnt from the first units; from those that are to be judged where there are no others.

        Of the latter some are committed, by this worker.
        """
        mine = {unit.name: unit.norms for unit in unproven}
        if len(self.known) < FIRST_UNITS:
            others = {name: unit for name, unit in self.earlier().items() if name not in mine}
            self.known = {**others, **self.known}
        return learn_bands(_first(self.known) or list(mine.values()))

    def _judge_together(self, bands: Mapping[str, Band]) -> None:
        units, self.few = self.few, []
        medians = np.concatenate([unit.medians for unit in units])
        together = [sample for unit in units for sample in unit.samples]
        try:
            refuse_most(medians, together, self.planes, bands)
        except ProofError as error:
            raise ProofError(f"{error}{_committed_too(units[:-1])}") from None
        for unit in units:
            if len(self.known) < FIRST_UNITS:
                self.known[unit.name] = unit.norms


def _first(units: Mapping[str, Norms]) -> list[Norms]:
    """Units to learn from; those of old records know nothing."""
    return [unit for unit in units.values() if unit][:FIRST_UNITS]


def _committed_too(units: Sequence[_Judged]) -> str:
    """What to do about units that were committed before they could be judged with others."""
    if not units:
        return ""
    names = ", ".join(unit.name for unit in units)
    return (
        f". Units of few samples were committed before this showed: {names}; delete their files in "
        "the cache's folder commits/, and the next build extracts them again"
    )
