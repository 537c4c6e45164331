"""Decode with an exported folder where our packages cannot be imported; prints one JSON object.

    python decode_alone.py FOLDER TARGET [FOLDER TARGET ...]

Per pair: the text of plain greedy decoding without any cache; the text with the drafter, and
every block that it drafted with the position of its anchor; and the text with drafts that are
right up to a slot that changes from pass to pass, so that every number of rejected drafts occurs.
"""

import json
import sys

for name in ("dflash_cache", "dflash_fit", "dflash_cli"):
    sys.modules[name] = None  # type: ignore[assignment]

import torch  # noqa: E402
from transformers import AutoModel, AutoModelForCausalLM  # noqa: E402

NEW, STOP = 20, 999
torch.set_num_threads(1)


@torch.inference_mode()
def greedy(target, ids):
    for _ in range(NEW):
        logits = target(input_ids=ids, use_cache=False).logits[0, -1]
        ids = torch.cat([ids, logits.argmax().view(1, 1)], dim=1)
    return ids[0].tolist()


def recorded(real, blocks):
    def next_block(self, anchor, states):
        draft = real(self, anchor, states)
        blocks.append([self.length, draft.tolist()])
        return draft

    return next_block


def scripted(real, text, wrong):
    passes = iter(range(1000))

    def next_block(self, anchor, states):
        draft = real(self, anchor, states)
        known = text[self.length + 1 :][: next(passes) % (len(draft) + 1)]
        return torch.tensor((known + [wrong] * len(draft))[: len(draft)])

    return next_block


def measured(folder, name):
    drafter = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    target = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    drafts = sys.modules[type(drafter).__module__].Drafts
    real = drafts.next
    torch.manual_seed(1)
    ids = torch.randint(target.config.vocab_size - 2, (1, 11))
    text, blocks = greedy(target, ids), []
    drafts.next = recorded(real, blocks)
    drafted, lengths = drafter.spec_generate_with_lengths(target, ids, NEW, [STOP])
    drafts.next = scripted(real, text, wrong=drafter.mask_token_id)
    rejected, kept = drafter.spec_generate_with_lengths(target, ids, NEW)
    drafts.next = real
    stop = text[11 + NEW // 2]
    return {
        "text": text,
        "drafted": drafted[0].tolist(),
        "lengths": lengths,
        "blocks": blocks,
        "rejected": rejected[0].tolist(),
        "kept": kept,
        "stop": stop,
        "stopped": drafter.spec_generate(target, ids, NEW, [stop])[0].tolist(),
        "sampled": drafter.spec_generate(target, ids, 5, temperature=1.0)[0].tolist(),
    }


pairs = zip(sys.argv[1::2], sys.argv[2::2], strict=True)
json.dump([measured(*pair) for pair in pairs], sys.stdout)
