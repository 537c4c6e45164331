"""Training sees what serving sees, and nothing else: the leak probe and the cached decode step."""

import pytest
import torch
from reference import make_document, make_frozen, make_weights, pack, small, starts_of

from dflash_fit.batch import Batch
from dflash_fit.drafter import DFlashDraftModel, DrafterConfig
from dflash_fit.drafts import DraftContext, block_logits, draft_blocks
from dflash_fit.step import Frozen, Pieces, run_blocks

SLIDING, FULL = "sliding_attention", "full_attention"
MIXED = {
    "block_size": 5,
    "num_hidden_layers": 3,
    "layer_types": (SLIDING, SLIDING, FULL),
    "sliding_window": 6,
}
KINDS = {
    "full": small(block_size=5),
    "full, causal in the block": small(block_size=5, is_causal=True),
    "sliding": small(block_size=5, layer_types=(SLIDING,), sliding_window=6),
    "sliding then full": small(**MIXED),
    "all of them causal": small(**MIXED, is_causal=True),
    "none of them causal": small(**MIXED, is_causal=False),
    "a window smaller than the block": small(**{**MIXED, "sliding_window": 3}),
}
every_kind = pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS.keys())
LENGTHS = (10, 30, 13)
# The middle document: a context shorter than the windows, blocks that overlap, one at the end.
ANCHORS = [(1, 2), (1, 9), (1, 12), (1, 13), (1, 27)]


class Setup:
    """A drafter with random weights, and three documents whose middle one has the anchors."""

    def __init__(self, settings):
        generator = torch.Generator().manual_seed(7)
        self.drafter = DFlashDraftModel(DrafterConfig(**settings))
        self.drafter.load_state_dict(make_weights(settings, generator))
        self.drafter.requires_grad_(False)
        self.frozen = Frozen(**make_frozen(generator, settings=settings))
        self.documents = [make_document(n, generator=generator, settings=settings) for n in LENGTHS]
        self.fields = pack(self.documents, ANCHORS, token_budget=80, slots=6)

    def logits(self):
        """Training logits [anchors, B - 1, V] of the pack as it stands."""
        batch = Batch(**self.fields)
        context = self.drafter.context(batch.hidden, batch.position_ids)
        rows = run_blocks(self.drafter, self.frozen, batch, context, slice(None), Pieces())
        return rows[: len(ANCHORS)] @ self.frozen.head.T


def served(setup, document, *, piece):
    """A context for every anchor of a document, grown in pieces as decoding grows it."""
    contexts = []
    for number, anchor in ANCHORS:
        assert number == document
        context = DraftContext(setup.drafter, setup.frozen)
        while context.length < anchor:
            end = min(context.length + piece, anchor)
            context.extend(setup.documents[document].states[:, context.length : end])
        contexts.append(context)
    return contexts


def anchor_tokens(setup):
    return torch.stack([setup.documents[number].ids[anchor] for number, anchor in ANCHORS])


@every_kind
@pytest.mark.parametrize("piece", [1, 4, 99], ids=["one by one", "four by four", "whole"])
def test_training_logits_equal_those_of_the_cached_decode_step(settings, piece):
    setup = Setup(settings)
    contexts, tokens = served(setup, 1, piece=piece), anchor_tokens(setup)
    alone = [block_logits([c], t[None]) for c, t in zip(contexts, tokens, strict=True)]
    trained = setup.logits()
    assert trained.shape == (len(ANCHORS), 4, 40)  # every slot but the anchor's
    torch.testing.assert_close(torch.cat(alone), trained, atol=2e-5, rtol=1e-4)


@every_kind
def test_they_equal_those_of_texts_that_are_served_together(settings):
    setup = Setup(settings)
    contexts = served(setup, 1, piece=4)
    found = block_logits(contexts, anchor_tokens(setup))
    torch.testing.assert_close(found, setup.logits(), atol=2e-5, rtol=1e-4)


def test_a_context_that_goes_on_after_a_draft_is_as_good_as_a_fresh_one():
    setup = Setup(KINDS["sliding then full"])
    tokens, states = anchor_tokens(setup), setup.documents[1].states
    context = DraftContext(setup.drafter, setup.frozen)
    found = []
    for (_, anchor), token in zip(ANCHORS, tokens, strict=True):
        context.extend(states[:, context.length : anchor])
        assert context.length == anchor
        found.append(block_logits([context], token[None]))
    torch.testing.assert_close(torch.cat(found), setup.logits(), atol=2e-5, rtol=1e-4)


def test_drafts_are_the_likeliest_tokens_of_the_slots():
    setup = Setup(KINDS["full"])
    drafts = draft_blocks(served(setup, 1, piece=99), anchor_tokens(setup))
    assert torch.equal(drafts, setup.logits().argmax(dim=-1))


def change_states(fields, slots):
    fields["hidden"][:, slots] += 50 * torch.randn(
        fields["hidden"][:, slots].shape, generator=torch.Generator().manual_seed(1)
    )


def change_tokens(fields, slots):
    fields["input_ids"][slots] = (fields["input_ids"][slots] + 1) % 39


def change_all(fields, slots):
    change_states(fields, slots)
    change_tokens(fields, slots)


@every_kind
@pytest.mark.parametrize(
    ("change", "which"),
    [
        (change_states, lambda start, anchor: slice(start + anchor, None)),
        (change_tokens, lambda start, anchor: slice(start + anchor + 1, None)),
        (change_tokens, lambda start, anchor: slice(0, start + anchor)),
        (change_all, lambda start, anchor: slice(0, start)),
        (change_all, lambda start, anchor: slice(start + LENGTHS[1], None)),
    ],
    ids=[
        "states from the anchor on",
        "tokens behind the anchor",
        "tokens before the anchor",
        "the document before",
        "the document behind",
    ],
)
def test_what_serving_does_not_know_changes_no_bit(settings, change, which):
    start = starts_of(Setup(settings).documents)[1]
    for block, (_, anchor) in enumerate(ANCHORS):
        setup = Setup(settings)
        before = setup.logits()[block]
        change(setup.fields, which(start, anchor))
        assert torch.equal(setup.logits()[block], before)


@every_kind
@pytest.mark.parametrize(
    ("change", "behind"), [(change_states, -1), (change_tokens, 0)], ids=["state", "token"]
)
def test_the_last_state_before_the_anchor_and_its_token_change_every_slot(settings, change, behind):
    setup = Setup(settings)
    before = setup.logits()[0]
    at = starts_of(setup.documents)[1] + ANCHORS[0][1] + behind
    change(setup.fields, slice(at, at + 1))
    assert (setup.logits()[0] != before).any(dim=-1).all()


def test_what_other_blocks_of_the_batch_are_changes_no_bit():
    setup = Setup(KINDS["full"])
    before = setup.logits()[1]
    setup.fields["anchor_positions"][0] += 2
    setup.fields["anchor_valid"][2] = False
    assert torch.equal(setup.logits()[1], before)
