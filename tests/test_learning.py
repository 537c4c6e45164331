"""Small drafters that have learnt something: the right labels, and what serving makes of them."""

from dataclasses import dataclass

import conftest
import numpy as np
import pytest
import torch
from reference import (
    Document,
    ReferenceDrafter,
    make_frozen,
    make_weights,
    pack,
    small,
    starts_of,
)

from dflash_cache.weights import load_target
from dflash_fit import decode
from dflash_fit.acceptance import leading_true, summarize, walk
from dflash_fit.batch import Batch, BatchShape
from dflash_fit.decode import greedy, speculate
from dflash_fit.drafter import DFlashDraftModel, DrafterConfig
from dflash_fit.loss import Objective
from dflash_fit.offline import document_chains, slots_right
from dflash_fit.offline_text import offline_chain
from dflash_fit.optim import AdamWConfig, FlatAdamW
from dflash_fit.packing import Pack
from dflash_fit.step import EagerStep, Frozen, Pieces, StepConfig, Trainer, run_blocks


class Pupil:
    """A drafter and the step that trains it on packs of one shape."""

    def __init__(self, settings, frozen, *, token_budget, anchors, gamma, lr):
        self.lr = lr
        self.drafter = DFlashDraftModel(DrafterConfig(**settings))
        self.drafter.load_state_dict(make_weights(settings, torch.Generator().manual_seed(1)))
        config = AdamWConfig(beta1=0.9, beta2=0.95, weight_decay=0.0, clip=1.0)
        shape = BatchShape(
            target_layers=len(settings["target_layer_ids"]),
            token_budget=token_budget,
            hidden_size=settings["hidden_size"],
            anchors=anchors,
            block_size=settings["block_size"],
        )
        objective = Objective(divergence="ce", slot_weights="decay", gamma=gamma)
        self.shape = shape
        self.step = EagerStep(
            Trainer(
                self.drafter,
                frozen,
                FlatAdamW(self.drafter, config, dtype=torch.float32),
                StepConfig(
                    shape=shape, objective=objective, anchor_microbatch=anchors, loss_chunk=4096
                ),
                Pieces(),
            )
        )

    def learn(self, documents, anchors):
        budget, slots = self.shape.token_budget, self.shape.anchors
        fields = pack(documents, anchors, token_budget=budget, slots=slots)
        self.step(Batch(**fields), lr=self.lr)


def some(anchors, count, generator):
    chosen = torch.randperm(len(anchors), generator=generator)[:count]
    return [anchors[i] for i in chosen.tolist()]


# --- a toy: copy what the states say ------------------------------------------------------------

BLOCK = 4
TOY = small(block_size=BLOCK, vocab_size=17, mask_token_id=16)


@dataclass(frozen=True, kw_only=True)
class Toy:
    """Random tokens; the state at position p is the token at p + B, and a constant."""

    drafter: DFlashDraftModel
    frozen: Frozen
    generator: torch.Generator

    def document(self, length):
        ids = torch.randint(16, (length + BLOCK,), generator=self.generator)
        told = self.frozen.embedding[ids[BLOCK:]]
        return Document(
            ids=ids[:length],
            mask=torch.ones(length, dtype=torch.bool),
            states=torch.stack([told, torch.ones_like(told)]).bfloat16().float(),
        )


def make_toy(steps):
    generator = torch.Generator().manual_seed(0)
    frozen = Frozen(**make_frozen(generator, settings=TOY))
    trainer = Pupil(TOY, frozen, token_budget=64, anchors=32, gamma=2.0, lr=3e-3)
    toy = Toy(drafter=trainer.drafter, frozen=frozen, generator=generator)
    anchors = [(0, a) for a in range(BLOCK, 63)]
    for _ in range(steps):
        trainer.learn([toy.document(64)], some(anchors, 32, generator))
    toy.drafter.requires_grad_(False)
    return toy


def test_slot_k_learns_the_token_at_the_anchor_plus_k_and_not_one_beside_it():
    toy = make_toy(400)
    documents = [toy.document(64) for _ in range(4)]
    anchors = [(d, a) for d in range(4) for a in range(BLOCK, 64 - BLOCK)]
    batch = Batch(**pack(documents, anchors, token_budget=256))
    context = toy.drafter.context(batch.hidden, batch.position_ids)
    rows = run_blocks(toy.drafter, toy.frozen, batch, context, slice(None), Pieces())
    drafts = (rows @ toy.frozen.head.T).argmax(dim=-1)

    def share(shift):
        wanted = [
            [int(documents[d].ids[a + k + shift]) for k in range(1, BLOCK)] for d, a in anchors
        ]
        return (drafts == torch.tensor(wanted)).float().mean(dim=0)

    assert (share(0) > 0.97).all()
    assert (share(1) < 0.2).all()
    assert (share(-1) < 0.2).all()


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A pack of a half-trained toy, measured as one, and slot by slot of every document alone."""

    batch: Batch
    starts: tuple[int, ...]
    anchors: list[int]
    right: np.ndarray
    counted: np.ndarray
    slow: dict[int, list[bool | None]]  # per anchor and slot; None where nothing counts


@pytest.fixture(scope="module")
def measured():
    toy, model = make_toy(130), ReferenceDrafter(TOY)
    model.load_state_dict(toy.drafter.state_dict())
    documents = [toy.document(n) for n in (13, 40, 24)]
    documents[1].mask[15:20] = False
    batch = Batch(**pack(documents, [], token_budget=90, slots=1))
    slow = {}
    for document, start in zip(documents, starts_of(documents), strict=True):
        for anchor in range(len(document.ids) - 1):
            if document.mask[anchor] and document.mask[anchor + 1]:
                slow[start + anchor] = slow_slots(toy, model, document, anchor)
    anchors = list(slow)
    right, counted = slots_right(
        toy.drafter, toy.frozen, batch, np.array(anchors), group=7, pieces=Pieces()
    )
    return Measured(batch=batch, starts=tuple(starts_of(documents)), anchors=anchors, right=right,
                    counted=counted, slow=slow)  # fmt: skip


def slow_slots(toy, model, document, anchor):
    logits = document.block(model, anchor, toy.frozen.embedding) @ toy.frozen.head.T
    return [
        bool(logits[k].argmax() == document.ids[anchor + k])
        if anchor + k < len(document.ids) and document.mask[anchor + k]
        else None
        for k in range(1, BLOCK)
    ]


def test_slots_are_right_and_counted_as_those_of_a_lone_document(measured):
    slow = list(measured.slow.values())
    assert measured.right.tolist() == [[right is True for right in row] for row in slow]
    assert measured.counted.tolist() == [[right is not None for right in row] for row in slow]


def test_chains_of_packed_documents_equal_slow_walks_through_each(measured):
    def accepted(anchor):
        row = measured.slow[anchor]
        return next((k for k, right in enumerate(row) if not right), BLOCK - 1)

    spans = [[(0, 12)], [(16, 16 + 14), (16 + 20, 16 + 39)], [(56, 56 + 23)]]
    wanted = [walk(accepted, within) for within in spans]
    found = document_chains(
        measured.batch,
        Pack(documents=(0, 1, 2), starts=measured.starts),
        np.array(measured.anchors),
        leading_true(measured.right),
    )
    assert list(found) == wanted
    assert {0, BLOCK - 1} < {n for chain in wanted for n in chain.accepted}


# --- text that the target wrote -----------------------------------------------------------------

B = 8
ANSWER = 40
PROMPTS = (
    "<|im_start|>user\nthe cat sat<|im_end|>\n<|im_start|>assistant\n",
    "one two three",
    "saw a mat today and",
)


class SelfWritten:
    """Greedy answers of a tiny target, and a drafter trained on exactly them."""

    def __init__(self, folder):
        self.target = load_target(str(folder), dtype="float32", device="cpu")
        layer_ids = (1, 3, 5)
        settings = small(
            block_size=B,
            vocab_size=self.target.spec.vocab_size,
            mask_token_id=len(self.target.tokenizer),
            target_layer_ids=layer_ids,
            num_target_layers=self.target.spec.num_layers,
        )
        self.frozen = Frozen(embedding=self.target.embedding, head=self.target.head)
        encode = self.target.tokenizer
        self.prompts = [encode(t, add_special_tokens=False)["input_ids"] for t in PROMPTS]
        self.answers = [self.greedy(prompt).tokens for prompt in self.prompts]
        pairs = list(zip(self.prompts, self.answers, strict=True))
        self.documents = [self.document(p, a, layer_ids) for p, a in pairs]
        self.anchors = [
            (d, len(p) + i) for d, (p, a) in enumerate(pairs) for i in range(len(a) - 1)
        ]
        self.generator = torch.Generator().manual_seed(0)
        self.trainer = Pupil(
            settings, self.frozen, token_budget=192, anchors=48, gamma=4.0, lr=1e-2
        )
        self.drafter = self.trainer.drafter

    def document(self, prompt, answer, layer_ids):
        ids = torch.tensor(prompt + answer)
        states = self.target.hidden_states(ids[None], layer_ids)
        return Document(
            ids=ids,
            mask=torch.arange(len(ids)) >= len(prompt),
            states=torch.stack([state[0].bfloat16() for state in states]),
        )

    def learn(self, steps):
        for _ in range(steps):
            self.trainer.learn(self.documents, some(self.anchors, 48, self.generator))
        return self

    def greedy(self, prompt, *, length=ANSWER, stop_ids=()):
        prompt = torch.tensor(prompt)
        return greedy(self.target, prompt, max_new_tokens=length, stop_ids=stop_ids)

    def speculate(self, prompt, *, length=ANSWER, stop_ids=()):
        return speculate(
            self.target,
            self.drafter,
            self.frozen,
            torch.tensor(prompt),
            max_new_tokens=length,
            stop_ids=stop_ids,
        )

    def offline(self, prompt, answer):
        return offline_chain(self.target, self.drafter, self.frozen, prompt, answer)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    # An untied head: the greedy text of a random tied target is one token again and again.
    folder = tmp_path_factory.mktemp("writer") / "tiny"
    return conftest.save_tiny_target(folder, seed=3, tied=False)


@pytest.fixture(scope="module")
def untrained(target_folder):
    return SelfWritten(target_folder)


@pytest.fixture(scope="module")
def partly(target_folder):
    return SelfWritten(target_folder).learn(60)


@pytest.fixture(scope="module")
def by_heart(target_folder):
    return SelfWritten(target_folder).learn(200)


every_stage = pytest.mark.parametrize("stage", ["untrained", "partly", "by_heart"])


def acceptance_length(text):
    chains = [text.speculate(prompt).chain for prompt in text.prompts]
    return summarize(chains, block_size=B)["acceptance_length"]


def test_an_untrained_drafter_is_hardly_ever_accepted(untrained):
    assert acceptance_length(untrained) < 1.5


def test_a_text_learnt_by_heart_is_served_in_nearly_whole_blocks(by_heart):
    assert acceptance_length(by_heart) > 0.9 * B * (39 / 40)  # the last block of 39 tokens has 7


@every_stage
def test_speculative_decoding_writes_what_greedy_decoding_writes(stage, request):
    text = request.getfixturevalue(stage)
    assert [text.speculate(prompt).tokens for prompt in text.prompts] == text.answers


@pytest.mark.parametrize("length", [1, 2, 9, 17])
def test_it_does_so_for_every_length(by_heart, length):
    for prompt, answer in zip(by_heart.prompts, by_heart.answers, strict=True):
        assert by_heart.speculate(prompt, length=length).tokens == answer[:length]


@every_stage
@pytest.mark.parametrize("at", [0, 1, 12, 25])
def test_it_ends_where_greedy_decoding_ends(stage, at, request):
    text = request.getfixturevalue(stage)
    for prompt, answer in zip(text.prompts, text.answers, strict=True):
        stop_ids = {answer[at]}
        wanted = text.greedy(prompt, stop_ids=stop_ids)
        assert text.speculate(prompt, stop_ids=stop_ids).tokens == wanted.tokens


@every_stage
def test_the_offline_chain_is_that_of_the_real_decoding(stage, request):
    text = request.getfixturevalue(stage)
    real = [text.speculate(prompt) for prompt in text.prompts]
    offline = [text.offline(p, r.tokens) for p, r in zip(text.prompts, real, strict=True)]
    assert offline == [r.chain for r in real]


@pytest.mark.parametrize("length", [2, 4, 12])
def test_it_is_so_too_where_the_answer_ends_within_a_good_block(by_heart, length):
    for prompt in by_heart.prompts:
        real = by_heart.speculate(prompt, length=length)
        assert by_heart.offline(prompt, real.tokens) == real.chain


def test_it_is_so_too_where_a_stop_token_ends_the_answer(partly):
    for prompt, answer in zip(partly.prompts, partly.answers, strict=True):
        real = partly.speculate(prompt, stop_ids={answer[20]})
        assert partly.offline(prompt, real.tokens) == real.chain


def test_a_partly_trained_drafter_is_sometimes_right(partly):
    accepted = {n for p in partly.prompts for n in partly.speculate(p).chain.accepted}
    assert {0, B - 1} < accepted  # otherwise the comparisons above would say little


def test_before_every_draft_the_context_is_all_but_the_pending_anchor(partly, monkeypatch):
    seen = []

    def record(contexts, anchors):
        seen.append((contexts[0].length, int(anchors[0])))
        return original(contexts, anchors)

    original = decode.draft_blocks
    monkeypatch.setattr(decode, "draft_blocks", record)
    prompt = partly.prompts[0]
    answer = partly.speculate(prompt)
    ends = [sum(answer.chain.committed[:i]) for i in range(len(answer.chain.committed))]
    assert seen == [(len(prompt) + end, answer.tokens[end]) for end in ends]


def test_committed_tokens_are_the_answer_without_its_first(partly):
    for prompt in partly.prompts:
        answer = partly.speculate(prompt)
        assert sum(answer.chain.committed) == len(answer.tokens) - 1
