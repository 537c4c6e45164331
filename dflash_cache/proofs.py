"""Are these hidden states right?  Each check fails the build with its reason.

Users lose weeks to caches that are silently wrong: shifted by a layer, taken after the final
norm, all zero on hybrid targets, wrong for padded rows.  None of these shows in a training loss.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from dflash_cache.errors import ProofError
from dflash_cache.samples import Sample
from dflash_cache.target import Target

# Relative L2 error that one token of one layer may have, by the target's dtype, where kernels of
# other shapes did the sums: bfloat16 keeps 8 bits, and the error of tens of layers adds up
# (0.04 seen on 135M parameters).  A leak or another token's state is off by about 1.
TOLERANCE = {"bfloat16": 0.15, "float32": 1e-3}
# Hooks and the library's own report come from equal forwards; neighbouring layers differ by more.
HOOK_TOLERANCE = {"bfloat16": 0.02, "float32": 1e-4}
# A greedy agreement under this says that the text is not the target's own.
LOW_AGREEMENT = 0.5


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Largest relative L2 distance between rows of the last dimension; infinite where NaN is."""
    found, wanted = found.float(), wanted.float()
    distance = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-6)
    return float(distance.nan_to_num(nan=torch.inf).max())


def prove_hooks(target: Target, input_ids: Tensor, layer_ids: Sequence[int]) -> float:
    """Target layer i, taken by hook, is entry i + 1 of the library's own `hidden_states`."""
    hooked = target.hidden_states(input_ids, layer_ids)
    reported = target.all_hidden_states(input_ids)
    worst = 0.0
    for layer_id, states in zip(layer_ids, hooked, strict=True):
        if layer_id == target.spec.num_layers - 1:
            continue  # that entry stands after the final norm; nothing to compare with
        worst = max(worst, relative_error(states, reported[layer_id + 1]))
        if worst > HOOK_TOLERANCE[target.spec.dtype]:
            raise ProofError(
                f"target layer {layer_id}: its hooked output differs from hidden_states"
                f"[{layer_id + 1}] by {worst:.3g} (relative); the states would be of another layer"
            )
    return worst


def prove_frozen(target: Target, input_ids: Tensor) -> float:
    """Embedding and head as plain matrices are all that stands between ids, states and logits.

    Families scale, cap or add positions here under many names; a drafter on the plain matrices
    would then learn and serve another model's words.
    """
    ids = input_ids.to(target.device)
    entered = relative_error(target.all_hidden_states(ids)[0], target.embedding[ids])
    plain = torch.nn.functional.linear(target.final_hidden(ids), target.head)
    left = relative_error(plain, target.logits(ids))
    for worst, what in ((entered, "embedding rows"), (left, "head times the final state")):
        if worst > TOLERANCE[target.spec.dtype]:
            raise ProofError(
                f"{target.spec.name}: its {what} differ by {worst:.3g} (relative) from what the "
                "model computes; it scales or adds something that drafters cannot repeat"
            )
    return max(entered, left)


def prove_padding(target: Target, rows: Sequence[Tensor], layer_ids: Sequence[int]) -> float:
    """A row in a padded batch has the states that it has alone."""
    batch = pad_right(rows)
    together = target.hidden_states(batch, layer_ids)
    worst = 0.0
    for index, row in enumerate(rows):
        for layer_id, states, alone in zip(
            layer_ids, together, target.hidden_states(row[None], layer_ids), strict=True
        ):
            worst = max(worst, relative_error(states[index, : len(row)], alone[0]))
            if worst > TOLERANCE[target.spec.dtype]:
                raise ProofError(
                    f"target layer {layer_id}: a row of {len(row)} tokens padded to "
                    f"{batch.shape[1]} differs from the same row alone by {worst:.3g} (relative); "
                    "padding leaks into the states of this target"
                )
    return worst


def pad_right(rows: Sequence[Tensor]) -> Tensor:
    """Rows of ids as one batch [R, S]; the filler is id 0, which nobody to its left can see."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=0)


def check_states(states: Tensor, *, where: str) -> None:
    """States [t, H] of one sample and layer: finite, not zero, not the same for every token."""
    if not bool(torch.isfinite(states).all()):
        raise ProofError(f"{where}: NaN or infinity in the states; try --target-dtype float32")
    norms = states.float().norm(dim=-1)
    if bool((norms == 0).any()):
        raise ProofError(f"{where}: a token's state is all zeros; the target did not run properly")
    if len(states) > 1 and bool((states == states[:1]).all()):
        raise ProofError(f"{where}: all tokens have one state; the target did not run properly")


def prove_probe(
    found: Sequence[Tensor], stored: Sequence[Tensor], *, dtype: str, lossy: bool = False
) -> float:
    """A resumed build reproduces what the first one stored: same machine state, same weights.

    Where the encoding is lossy, the least noise may take a loud channel to the next of few codes.
    """
    worst = max(relative_error(f.to(s.dtype), s) for f, s in zip(found, stored, strict=True))
    # What is stored was rounded, and the least noise may round a number the other way.
    limit = TOLERANCE["bfloat16"] if lossy else torch.finfo(torch.bfloat16).eps
    if worst > max(TOLERANCE[dtype], limit):
        raise ProofError(
            f"this process computes states that differ by {worst:.3g} (relative) from those "
            "already in the cache; do not mix them. Build into a new folder"
        )
    return worst


@torch.inference_mode()
def measure_agreement(target: Target, samples: Sequence[Sample]) -> dict[str, Any]:
    """How likely the target finds the supervised tokens: mean NLL (nats) and greedy agreement.

    An NLL near that of guessing means a wrong tokenizer, template or weights, and fails.  Empty
    when there is nothing to measure on.
    """
    if not samples:
        return {}
    nll, agree, count = 0.0, 0, 0
    for sample in samples:
        ids = torch.from_numpy(sample.input_ids).long().to(target.device)
        where = torch.from_numpy(sample.loss_mask).nonzero()[:, 0]
        where = where[where > 0].to(target.device)
        hidden = target.final_hidden(ids[None])[0, where - 1]
        for states, labels in zip(
            torch.split(hidden, 512), torch.split(ids[where], 512), strict=True
        ):
            logits = torch.nn.functional.linear(states, target.head).float()
            nll += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
            agree += int((logits.argmax(-1) == labels).sum())
            count += len(labels)
    chance = float(torch.log(torch.tensor(float(target.spec.vocab_size))))
    mean = nll / max(count, 1)
    if not mean < 0.8 * chance:
        raise ProofError(
            f"the target finds the supervised tokens no likelier than guessing ({mean:.2f} nats, "
            f"guessing {chance:.2f}); wrong tokenizer, chat template or weights"
        )
    greedy = agree / max(count, 1)
    if greedy < LOW_AGREEMENT:
        tqdm.write(
            f"the target itself would have chosen only {greedy:.0%} of the supervised tokens: this "
            "text is not its own, and a drafter learns most from answers that the target wrote",
            file=sys.stderr,
        )
    return {"nll": mean, "greedy": greedy, "tokens": count, "samples": len(samples)}
