"""Drawn text has the target's own distribution, whatever is drafted."""

from itertools import product

import pytest
import torch
from tiny_targets import make_drafter, make_target

from dflash_cache.errors import ConfigError
from dflash_fit import decode
from dflash_fit.decode import speculate_batch
from dflash_fit.sampling import COLDEST, Sampler, agreed_drafts, likeliest

V, TEMPERATURE = 5, 1.5
TEXTS, BATCH = 1200, 150
PROMPT = torch.tensor([1, 3, 0])


def test_agreed_drafts_are_the_leading_equal_ones():
    generator = torch.Generator().manual_seed(0)
    draft = torch.randint(2, (60, 4), generator=generator)
    chosen = torch.randint(2, (60, 5), generator=generator)

    def slow(row):
        agreed = 0
        while agreed < 4 and draft[row, agreed] == chosen[row, agreed]:
            agreed += 1
        return agreed

    found = agreed_drafts(draft, chosen).tolist()
    assert found == [slow(row) for row in range(60)]
    assert set(found) == set(range(5))


def test_a_block_without_drafts_agrees_in_none():
    assert agreed_drafts(torch.empty(2, 0), torch.zeros(2, 1)).tolist() == [0, 0]


def test_the_greedy_choice_is_the_first_of_equals():
    assert likeliest(torch.tensor([[[0.0, 2.0, 2.0, 1.0]]])).tolist() == [[1]]


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), 1e-40])
def test_a_temperature_that_is_none_is_refused(temperature):
    with pytest.raises(ConfigError, match="want 1e-06 or more"):
        Sampler(temperature=temperature, generator=torch.Generator())


def test_the_same_seed_draws_the_same_and_cold_draws_are_greedy():
    logits = torch.randn(3, 7, 11, generator=torch.Generator().manual_seed(0))

    def draw(temperature, seed):
        generator = torch.Generator().manual_seed(seed)
        return Sampler(temperature=temperature, generator=generator)(logits)

    assert torch.equal(draw(1.0, 0), draw(1.0, 0))
    assert not torch.equal(draw(1.0, 0), draw(1.0, 1))
    assert torch.equal(draw(1e-3, 0), likeliest(logits))
    assert torch.equal(draw(COLDEST, 0), likeliest(logits))
    logits *= 1e4  # larger than those of any target
    assert torch.equal(draw(COLDEST, 0), likeliest(logits))


# --- the distribution of real decoding ----------------------------------------------------------


@torch.inference_mode()
def exact(target):
    """Probability of every text of three tokens behind the prompt [V * V * V], by forwards."""
    texts = torch.tensor(list(product(range(V), repeat=3)))
    ids = torch.cat([PROMPT.expand(len(texts), -1), texts], dim=1)
    logits = target.model(input_ids=ids, use_cache=False).logits.double()
    shares = torch.softmax(logits[:, len(PROMPT) - 1 : -1] / TEMPERATURE, dim=-1)
    return shares.gather(2, texts[..., None])[..., 0].prod(dim=1)


@torch.inference_mode()
def likely_blocks(target):
    """For every first token the greedy text behind it: drafts that are often accepted [V, 4]."""
    ids = torch.cat([PROMPT.expand(V, -1), torch.arange(V)[:, None]], dim=1)
    for _ in range(4):
        ids = torch.cat([ids, target.model(input_ids=ids).logits[:, -1:].argmax(dim=-1)], dim=1)
    return ids[:, -4:]


def drawn(target, drafter, frozen, *, texts=TEXTS):
    """Many answers of four tokens, and the drafts accepted in every one's first round."""
    generator = torch.Generator().manual_seed(5)
    answers = [
        answer
        for _ in range(texts // BATCH)
        for answer in speculate_batch(
            target,
            drafter,
            frozen,
            [PROMPT] * BATCH,
            max_new_tokens=4,
            stop_ids=(),
            choose=Sampler(temperature=TEMPERATURE, generator=generator),
        )
    ]
    texts = torch.tensor([answer.tokens[:3] for answer in answers])
    cells = (texts * torch.tensor([V * V, V, 1])).sum(dim=1)
    accepted = torch.tensor([answer.chain.accepted[0] for answer in answers])
    return torch.bincount(cells, minlength=V**3).double(), accepted


def excess(counts, shares):
    """Chi-square of counts against shares, in standard deviations above its expectation."""
    wanted = shares * counts.sum()
    rare = wanted < 5  # taken together, as the approximation wants
    found, wanted = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, wanted))
    chi_square = ((found - wanted) ** 2 / wanted).sum()
    degrees = len(wanted) - 1
    assert degrees > 20
    return float((chi_square - degrees) / (2 * degrees) ** 0.5)


@pytest.fixture(scope="module")
def tiny():
    target = make_target("llama", vocabulary=V, layers=2, spread=0.25)
    return target, *make_drafter(target)


def test_exact_shares_are_a_distribution_that_is_not_flat(tiny):
    shares = exact(tiny[0])
    assert float(shares.sum()) == pytest.approx(1)
    assert float(shares.max()) > 10 * float(shares.median())


def test_text_drawn_with_drafts_has_the_target_s_distribution(tiny, monkeypatch):
    blocks = likely_blocks(tiny[0])
    monkeypatch.setattr(decode, "draft_blocks", lambda contexts, anchors: blocks[anchors])
    counts, accepted = drawn(*tiny)
    shares = exact(tiny[0])
    assert excess(counts, shares) < 4
    # Total variation of so many draws is about this large by chance.
    noise = (shares * (1 - shares) / TEXTS).sqrt().sum() * (2 / torch.pi) ** 0.5 / 2
    assert (counts / TEXTS - shares).abs().sum() / 2 < 1.25 * noise
    assert 0.3 < (accepted > 0).double().mean() < 0.9  # both ways out of a block are common


def test_so_has_text_drawn_with_a_random_drafter(tiny):
    counts, _ = drawn(*tiny, texts=600)
    assert excess(counts, exact(tiny[0])) < 4


def test_a_rule_that_accepts_too_much_is_told_apart(tiny, monkeypatch):
    """Otherwise the tests above could not fail."""
    blocks = likely_blocks(tiny[0])
    monkeypatch.setattr(decode, "draft_blocks", lambda contexts, anchors: blocks[anchors])
    everything = lambda draft, chosen: torch.full((len(draft),), draft.shape[1])  # noqa: E731
    monkeypatch.setattr(decode, "agreed_drafts", everything)
    assert excess(drawn(*tiny)[0], exact(tiny[0])) > 10
