"""Are these hidden states right?  Each check fails the build with its reason.

Users lose weeks to caches that are silently wrong: shifted by a layer, taken after the final
norm, all zero on hybrid targets, wrong for padded rows.  None of these shows in a training loss.

Letters: R rows of a padded batch, S its width, t tokens of a row, H hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from dflash_cache.diagnosis import UNKNOWN, cause_of
from dflash_cache.errors import ProofError
from dflash_cache.report import report_of
from dflash_cache.schema import FINAL_HIDDEN, plane_of
from dflash_cache.target import Target
from dflash_cache.tolerance import (
    TOLERANCE,
    Difference,
    Tolerance,
    largest,
    relative_error,
    tolerance_of,
)

# Hooks and the library's own report come from equal forwards; neighbouring layers differ by more.
HOOK_TOLERANCE = {"bfloat16": 0.02, "float32": 1e-4}
LEFT_PADDED = "left padding: the states are those of a row with the filler in front of it"


def prove_hooks(target: Target, input_ids: Tensor, layer_ids: Sequence[int]) -> float:
    """Target layer i, taken by hook from one row [1, t], is entry i + 1 of `hidden_states`.

    The last layer's own output is what the library gives to its final norm.
    """
    hooked = target.hidden_states(input_ids, layer_ids)
    report = report_of(target, input_ids[0])
    limit, worst = HOOK_TOLERANCE[target.spec.dtype], 0.0
    for layer_id, states in zip(layer_ids, hooked, strict=True):
        wanted = report.layer(layer_id)
        if wanted is None:
            continue  # a last layer and no norm behind it that we know
        worst = max(worst, relative_error(states[0], wanted))
        if worst > limit:
            cause = cause_of(states[0], plane_of(layer_id), report, Tolerance(limit=limit))
            raise ProofError(
                f"target layer {layer_id}: its hooked output differs from hidden_states"
                f"[{layer_id + 1}] by {worst:.3g} (relative): {cause}"
            )
    return worst


def prove_frozen(target: Target, input_ids: Tensor) -> float:
    """Embedding and head as plain matrices are all that stands between ids, states and logits.

    Families scale, cap or add positions here under many names; a drafter on the plain matrices
    would then learn and serve another model's words.
    """
    ids = input_ids.to(target.device)
    entered = relative_error(target.all_hidden_states(ids)[0], target.embedding[ids])
    read, logits = head_input(target, ids)
    left = relative_error(linear(read, target.head), logits)
    for worst, what in ((entered, "embedding rows"), (left, "head times the final state")):
        if not worst <= TOLERANCE[target.spec.dtype]:
            raise ProofError(
                f"{target.spec.name}: its {what} differ by {worst:.3g} (relative) from what the "
                "model computes; it scales or adds something that drafters cannot repeat"
            )
    return max(entered, left)


def prove_final(target: Target, input_ids: Tensor, layer_ids: Sequence[int]) -> float:
    """The final hidden state of a row [1, t] is what the head reads: head @ it = logits."""
    ids = input_ids.to(target.device)
    read, logits = head_input(target, ids)
    limit, worst = TOLERANCE[target.spec.dtype], 0.0
    for found in (target.hidden_and_final(ids, layer_ids)[-1], target.final_hidden(ids)):
        error = max(relative_error(linear(found, target.head), logits), relative_error(found, read))
        worst = max(worst, error)
        if worst > limit:
            report = report_of(target, input_ids[0])
            cause = cause_of(found[0], FINAL_HIDDEN, report, Tolerance(limit=limit))
            raise ProofError(
                f"{target.spec.name}: the final hidden state is not what the head reads, the "
                f"logits that it gives differ by {worst:.3g} (relative): {cause}"
            )
    return worst


def head_input(target: Target, input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """What the head is given in the whole model [R, S, H], and the model's logits [R, S, V]."""
    given: list[Tensor] = []

    def note(module: Any, inputs: Any) -> None:
        given.append(inputs[0])

    hook = target.model.get_output_embeddings().register_forward_pre_hook(note)
    try:
        logits = target.logits(input_ids)
    finally:
        hook.remove()
    return given[-1], logits


def prove_padding(target: Target, rows: Sequence[Tensor], layer_ids: Sequence[int]) -> Difference:
    """A row in a padded batch has the states that it has alone."""
    batch = pad_right(rows)
    refuse_left_padding(batch, rows)
    together = target.hidden_states(batch, layer_ids)
    tolerance, found = tolerance_of(target), []
    for index, row in enumerate(rows):
        for layer_id, states, alone in zip(
            layer_ids, together, target.hidden_states(row[None], layer_ids), strict=True
        ):
            difference = tolerance.difference(states[index, : len(row)], alone[0])
            found.append(difference)
            if not tolerance.allows(difference):
                cause = _cause_in_batch(target, states[index], alone[0], row, plane_of(layer_id))
                raise ProofError(
                    f"target layer {layer_id}: a row of {len(row)} tokens padded to "
                    f"{batch.shape[1]} differs from the same row alone by "
                    f"{tolerance.told(difference)}: {cause}"
                )
    return largest(found)


def pad_right(rows: Sequence[Tensor]) -> Tensor:
    """Rows of ids as one batch [R, S]; the filler is id 0, which nobody to its left can see."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=0)


def padded_left(row: Tensor, *, width: int) -> Tensor:
    """What left padding would make of a row [t]: [width], to recognise its states by."""
    return torch.cat([row.new_zeros(max(0, width - len(row))), row])


def refuse_left_padding(batch: Tensor, rows: Sequence[Tensor]) -> None:
    """Each row [t] has to stand at the left end of its row of the batch [R, S]."""
    for padded, row in zip(batch, rows, strict=True):
        if not torch.equal(padded[: len(row)], row):
            left = torch.equal(padded[len(padded) - len(row) :], row)
            cause = (
                "left padding: its ids stand at the right end" if left else "other ids are there"
            )
            raise ProofError(
                f"a row of {len(row)} tokens is not at the start of its padded row: {cause}; "
                "states are taken from the left end, where the filler is"
            )


def _cause_in_batch(target: Target, padded: Tensor, alone: Tensor, row: Tensor, plane: str) -> str:
    """Why a padded row's states [S, H] differ from those of the row alone [t, H]."""
    tolerance, tokens = tolerance_of(target), len(row)
    if tolerance.same(padded[len(padded) - tokens :], alone):
        return "left padding: the row's states stand at the right end of the padded row"
    filled = report_of(target, padded_left(row, width=len(padded))).plane(plane)
    if filled is not None and tolerance.same(padded, filled):
        return LEFT_PADDED
    cause = cause_of(padded[:tokens], plane, report_of(target, row), tolerance)
    return f"padding leaks into them ({cause})" if cause.startswith(UNKNOWN) else cause


def prove_probe(
    found: Sequence[Tensor], stored: Sequence[Tensor], tolerance: Tolerance
) -> Difference:
    """A resumed build reproduces what the first one committed: same arithmetic, same weights."""
    difference = largest(tolerance.differences(found, stored))
    if not tolerance.allows(difference):
        raise ProofError(
            f"this process computes states that differ by {tolerance.told(difference)} from those "
            "already in the cache; do not mix them. Build into a new folder"
        )
    return difference
