"""Is the chat template this target's?  Asked of the tokens alone, before any weights are read.

A template of another model fails in one of two ways: the tokenizer takes its control strings for
plain text and splits them, or the answers end in something that does not end an answer of this
target.  Models whose own template writes roles as plain text (Zephyr, Llama 2) do neither: such
tokenizers have no control strings of that kind themselves.
"""

import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from dflash_cache.errors import ProofError
from dflash_cache.samples import Sample
from dflash_cache.spans import TEMPLATE_ERRORS, Template
from dflash_cache.vocabulary import special_ids

# Only what nobody would write as text: [INST] is plain text to Llama 2, and <s> has many lives.
# DeepSeek's bars are full-width ones.
CONTROL = re.compile(
    r"<\|[^\s<>|]{1,48}\|>|<\uff5c[^\s<>\uff5c]{1,48}\uff5c>|<(?:start|end)_of_turn>"
)
TURNS = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
HINT = "Take tokenizer and chat_template from the target's own folder, or pass --no-proof template"


def prove_template(tokenizer: Any, chats: Sequence[Sample], *, stop_ids: Sequence[int]) -> None:
    """Chat rows went through the template of this target, as far as their tokens can tell.

    `chats` are samples that came through it; nothing is asked where there are none.
    """
    if not chats:
        return
    controls = control_strings(tokenizer)
    split = sorted(control for control in controls if not _is_token(tokenizer, control))
    own = {
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if CONTROL.fullmatch(token.content)
    }
    if split and own and not own & controls:
        raise ProofError(
            f"the chat template writes {_listed(tokenizer, split)}, and none of the tokenizer's "
            f"own control tokens ({', '.join(sorted(own)[:4])} ...): it is the template of another "
            f"model. {HINT}"
        )
    _refuse_endless_answers(tokenizer, chats, stop_ids=stop_ids, split=split)
    if split and own:
        tqdm.write(
            f"the chat template writes {_listed(tokenizer, split)}; is it the target's own?",
            file=sys.stderr,
        )


def control_strings(tokenizer: Any) -> set[str]:
    """What the template writes around a question and its answer; nothing where it refuses them."""
    try:
        text = Template(tokenizer=tokenizer).render(TURNS)
    except TEMPLATE_ERRORS:
        return set()
    return set(CONTROL.findall(text))


def _is_token(tokenizer: Any, text: str) -> bool:
    return text in tokenizer.get_vocab() or len(_pieces(tokenizer, text)) == 1


def _pieces(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _listed(tokenizer: Any, split: Sequence[str]) -> str:
    told = [
        f"{text} (which this tokenizer splits into {len(_pieces(tokenizer, text))} pieces)"
        for text in split[:3]
    ]
    return ", ".join(told)


def _refuse_endless_answers(
    tokenizer: Any, chats: Sequence[Sample], *, stop_ids: Sequence[int], split: Sequence[str]
) -> None:
    """At least one answer has to end in an id by which the target ends answers.

    Where all end in another special token of its tokenizer, that is only told: some targets do not
    say all that they stop at (the first Gemma), and base models do not stop at what chats end in.
    """
    ends = Counter(int(token) for sample in chats for token in last_of_answers(sample))
    if not ends or any(ends[token] for token in stop_ids):
        return
    stops = ", ".join(repr(tokenizer.decode([token])) for token in stop_ids)
    commonest = ends.most_common(1)[0][0]
    told = (
        f"none of {ends.total()} supervised answers ends in a stop token of the target ({stops}); "
        f"they end in {tokenizer.decode([commonest])!r}"
    )
    if commonest in special_ids(tokenizer):
        tqdm.write(f"{told}: is the chat template the target's own?", file=sys.stderr)
        return
    template = f" The template writes {_listed(tokenizer, split)}." if split else ""
    raise ProofError(
        f"{told}.{template} The chat template is that of another model, and a drafter would never "
        f"learn where answers stop. {HINT}"
    )


def last_of_answers(sample: Sample) -> np.ndarray:
    """The last id of each run of supervised tokens."""
    mask = sample.loss_mask
    last: np.ndarray = sample.input_ids[mask & ~np.append(mask[1:], False)]
    return last
