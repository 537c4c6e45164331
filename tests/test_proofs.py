"""Every proof fails on the fault that it is there for, and passes where there is none."""

import math
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import chat_rows, tiny_build, write_jsonl
from families import FAMILIES, save_family
from torch import Tensor

from dflash_cache import build, evidence, proofs
from dflash_cache.agreement import measure_agreement
from dflash_cache.errors import ProofError
from dflash_cache.report import report_of
from dflash_cache.samples import Sample
from dflash_cache.target import Target
from dflash_cache.tolerance import TOLERANCE, Difference, Tolerance, tolerance_of_stored
from dflash_cache.weights import load_target

LAYERS = [1, 3, 5]


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(str(tiny_target), dtype="float32", device="cpu")


class ShiftedHooks(Target):
    """Gives the layer below the one asked for: the classic mistake."""

    def hidden_states(self, input_ids, layer_ids):
        return super().hidden_states(input_ids, [layer_id - 1 for layer_id in layer_ids])


class OneShiftedHook(Target):
    """Gives a wrong layer in one place of several."""

    def hidden_states(self, input_ids, layer_ids):
        *most, last = layer_ids
        return super().hidden_states(input_ids, [*most, last - 1])


class LoudHooks(Target):
    """Gives all states a little too large."""

    def hidden_states(self, input_ids, layer_ids):
        return [1.01 * states for states in super().hidden_states(input_ids, layer_ids)]


class LeakyPadding(Target):
    """States depend a little on how wide the batch is."""

    def hidden_states(self, input_ids, layer_ids):
        states = super().hidden_states(input_ids, layer_ids)
        return [s + 0.002 * input_ids.shape[1] for s in states]


class LeftPadding(Target):
    """Reads rows as if the padding stood in front of them."""

    def hidden_states(self, input_ids, layer_ids):
        states = super().hidden_states(input_ids, layer_ids)
        ends = (input_ids != 0).sum(1)
        return [
            torch.stack(
                [row.roll(len(row) - int(end), 0) for row, end in zip(s, ends, strict=True)]
            )
            for s in states
        ]


class LeakyEnds(Target):
    """Only the last token before the padding sees some of it."""

    def hidden_states(self, input_ids, layer_ids):
        states = [s.clone() for s in super().hidden_states(input_ids, layer_ids)]
        for row, end in enumerate((input_ids != 0).sum(1).tolist()):
            if end < input_ids.shape[1]:
                states[-1][row, end - 1] *= 1.01
        return states


class OneNaN(Target):
    """One number of one token is none."""

    def hidden_states(self, input_ids, layer_ids):
        states = [s.clone() for s in super().hidden_states(input_ids, layer_ids)]
        states[0][0, 0, 0] = torch.nan
        return states


class Zeros(Target):
    """A layer that writes nothing, as hybrid targets did."""

    def hidden_states(self, input_ids, layer_ids):
        return [torch.zeros_like(s) for s in super().hidden_states(input_ids, layer_ids)]

    def all_hidden_states(self, input_ids):
        first, *states = super().all_hidden_states(input_ids)
        return first, *(torch.zeros_like(s) for s in states)


class OneZeroState(Target):
    """One token of the last layer is zero, and the library agrees."""

    def hidden_states(self, input_ids, layer_ids):
        states = [s.clone() for s in super().hidden_states(input_ids, layer_ids)]
        states[-1][:, 3] = 0
        return states

    def all_hidden_states(self, input_ids):
        states = [s.clone() for s in super().all_hidden_states(input_ids)]
        states[LAYERS[-1] + 1][:, 3] = 0
        return tuple(states)


class Constant(Target):
    """The same state for every token."""

    def hidden_states(self, input_ids, layer_ids):
        return [torch.ones_like(s) for s in super().hidden_states(input_ids, layer_ids)]

    def all_hidden_states(self, input_ids):
        return tuple(torch.ones_like(s) for s in super().all_hidden_states(input_ids))


def spoil(target: Target, kind: type[Target]) -> Target:
    return kind(**vars(deepcopy(target)))  # a build gives back what it does not need


def rows(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 310, (length,), generator=generator) for length in lengths]


# --- hooks --------------------------------------------------------------------------------------


def test_true_hooks_pass_with_no_error_at_all(target):
    assert proofs.prove_hooks(target, rows(20)[0][None], LAYERS) == 0.0


def test_the_last_layer_is_compared_with_what_the_final_norm_is_given(target):
    assert proofs.prove_hooks(target, rows(20)[0][None], [1, 7]) == 0.0
    with pytest.raises(ProofError, match=r"target layer 7: .* are those of layer 6: layer off by"):
        proofs.prove_hooks(spoil(target, OneShiftedHook), rows(20)[0][None], [1, 7])


def test_a_target_that_was_cut_is_proven_up_to_its_last_layer(tiny_target):
    cut = load_target(str(tiny_target), dtype="float32", device="cpu")
    cut.keep_up_to(LAYERS[-1])
    assert proofs.prove_hooks(cut, rows(20)[0][None], LAYERS) == 0.0
    assert proofs.prove_padding(cut, rows(7, 40, 23), LAYERS).worst < 1e-5
    with pytest.raises(ProofError, match=r"target layer 5: .* are those of layer 4"):
        proofs.prove_hooks(spoil(cut, OneShiftedHook), rows(20)[0][None], LAYERS)


@pytest.mark.parametrize(
    ("kind", "layer_id", "cause"),
    [
        (ShiftedHooks, 1, "the states are those of layer 0: layer off by one, too low"),
        (OneShiftedHook, 5, "the states are those of layer 4: layer off by one, too low"),
        (OneNaN, 1, "NaN or infinity in the state of token 0"),
        (LoudHooks, 1, "the states are 1.01 times what they should be"),
    ],
)
def test_hooks_that_give_other_states_fail_by_layer_and_cause(target, kind, layer_id, cause):
    told = rf"target layer {layer_id}: its hooked output differs from hidden_states\[{layer_id + 1}"
    with pytest.raises(ProofError, match=rf"{told}.*{cause}"):
        proofs.prove_hooks(spoil(target, kind), rows(20)[0][None], LAYERS)


# --- padding ------------------------------------------------------------------------------------


def test_rows_padded_together_pass_with_a_small_error(target):
    assert proofs.prove_padding(target, rows(7, 40, 23), LAYERS).worst < 1e-5


def test_rows_of_one_length_pass(target):
    assert proofs.prove_padding(target, rows(12, 12), LAYERS).worst < 1e-5


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (LeakyPadding, r"padding leaks into them .* 7 of 7 tokens differ, the first is token 0"),
        (LeakyEnds, r"padding leaks into them .* 1 of 7 tokens differ, the first is token 6"),
        (LeftPadding, "left padding: the row's states stand at the right end"),
        (OneNaN, "NaN or infinity in the state of token 0"),
    ],
)
def test_a_padded_row_that_differs_fails_by_its_cause(target, kind, cause):
    with pytest.raises(ProofError, match=f"a row of 7 tokens padded to 40 .*{cause}"):
        proofs.prove_padding(spoil(target, kind), rows(7, 40), LAYERS)


def test_rows_are_padded_on_the_right_with_id_0():
    batch = proofs.pad_right([torch.tensor([5, 6, 7]), torch.tensor([8])])
    assert batch.tolist() == [[5, 6, 7], [8, 0, 0]]


def good_states(tokens: int = 9) -> Tensor:
    return torch.randn(tokens, 32, generator=torch.Generator().manual_seed(0)).bfloat16()


# --- the probe ----------------------------------------------------------------------------------


def test_a_probe_is_compared_as_it_would_be_stored(target):
    stored = [good_states(), good_states(4)]
    exact = [states.float() * 1.0001 for states in stored]  # rounds back to what is stored
    assert proofs.prove_probe(exact, stored, tolerance_of_stored(target)).worst == 0.0


def test_a_probe_that_rounds_the_other_way_passes_and_tells_its_error(target):
    stored = [good_states(), good_states(4)]
    nudged = [states.float() * 1.003 for states in stored]
    found = proofs.prove_probe(nudged, stored, tolerance_of_stored(target))
    assert 1e-3 < found.worst < 2**-7


@pytest.mark.parametrize("factor", [1.5, torch.nan])
def test_a_probe_that_differs_in_one_token_fails(factor):
    stored = [good_states(), good_states(4)]
    other = [states.clone() for states in stored]
    other[0][8] *= factor
    with pytest.raises(ProofError, match="do not mix them"):
        proofs.prove_probe(other, stored, Tolerance(limit=TOLERANCE["bfloat16"]))


# --- agreement ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Guesser:
    """A target that gives the right next token `p`, and one wrong token `q`."""

    p: float
    q: float | None = None  # None: as likely as any other wrong one
    vocab: int = 16
    device: torch.device = torch.device("cpu")

    @property
    def spec(self) -> SimpleNamespace:
        return SimpleNamespace(vocab_size=self.vocab)

    @property
    def head(self) -> Tensor:
        return torch.eye(self.vocab)

    def final_hidden(self, input_ids: Tensor) -> Tensor:
        rest = (1 - self.p) / (self.vocab - 1)
        wrong = rest if self.q is None else self.q
        rest = (1 - self.p - wrong) / (self.vocab - 2)
        labels = torch.roll(input_ids, -1, dims=1)
        odds = torch.full((*input_ids.shape, self.vocab), rest)
        odds.scatter_(2, ((labels + 1) % self.vocab)[..., None], wrong)
        odds.scatter_(2, labels[..., None], self.p)
        return odds.log()


def sample_of(mask: str) -> Sample:
    ids = np.arange(len(mask), dtype=np.int32) * 5 % 16
    bits = np.array([bit == "1" for bit in mask])
    return Sample(sample_id=0, input_ids=ids, loss_mask=bits, group="g")


def test_nll_is_of_the_supervised_tokens_each_from_the_position_before():
    samples = [sample_of("00110111"), sample_of("0011")]
    found = measure_agreement(Guesser(p=0.7), samples)
    assert found["nll"] == pytest.approx(-math.log(0.7), rel=1e-4)
    assert found["greedy"] == 1.0
    assert (found["tokens"], found["samples"]) == (7, 2)


def test_a_supervised_first_token_has_nothing_before_it_and_is_not_counted():
    assert measure_agreement(Guesser(p=0.7), [sample_of("1111")])["tokens"] == 3


def test_more_tokens_than_one_slice_of_logits_count_alike():
    found = measure_agreement(Guesser(p=0.7), [sample_of("0" + "1" * 1300)])
    assert found["nll"] == pytest.approx(-math.log(0.7), rel=1e-4)
    assert found["tokens"] == 1300


def test_text_that_the_target_would_write_is_told_to_nobody(capsys):
    measure_agreement(Guesser(p=0.6, q=0.2), [sample_of("0011")])
    assert capsys.readouterr().err == ""


def test_text_that_is_not_the_targets_own_is_reported(capsys):
    found = measure_agreement(Guesser(p=0.4, q=0.5), [sample_of("0011")])
    assert found["greedy"] == 0.0
    assert "would have chosen only 0% of the supervised tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("p", "cause"),
    [(1 / 16, "the tokenizer"), (0.01, "the tokenizer"), (torch.nan, "its logits are NaN")],
)
def test_an_nll_no_better_than_guessing_fails(p, cause):
    told = rf"no likelier than guessing .*guessing 2\.77\): {cause}"
    with pytest.raises(ProofError, match=told):
        measure_agreement(Guesser(p=p), [sample_of("0011")])


def test_a_random_target_guesses_and_fails(target):
    samples = [sample_of("0" + "1" * 60)]
    with pytest.raises(ProofError, match="no likelier than guessing"):
        measure_agreement(target, samples)


class Forgetful(Guesser):
    """Knows every token but those below 8."""

    def final_hidden(self, input_ids: Tensor) -> Tensor:
        known = super().final_hidden(input_ids)
        labels = torch.roll(input_ids, -1, dims=1)
        return torch.where((labels < 8)[..., None], torch.zeros_like(known), known)


def test_answers_alone_that_are_no_better_than_guessed_mean_another_template():
    ids = np.array([9, 10, 11, 12, 13, 1, 2, 3, 4], dtype=np.int32)
    sample = Sample(sample_id=0, input_ids=ids, loss_mask=ids < 8, group="g")
    told = r"but not the other tokens \(0\.36\), so tokenizer and weights fit: the chat template"
    with pytest.raises(ProofError, match=told):
        measure_agreement(Forgetful(p=0.7), [sample])


def test_no_token_that_is_better_than_guessed_means_another_tokenizer():
    told = r"the tokenizer is that of another model, .* so it finds the other tokens \(2\.77\)"
    with pytest.raises(ProofError, match=told):
        measure_agreement(Guesser(p=1 / 16), [sample_of("00011")])


def test_nothing_to_measure_on_is_no_agreement_and_not_one_of_0():
    assert measure_agreement(Guesser(p=0.7), []) == {}


# --- in the build -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        ShiftedHooks,
        OneShiftedHook,
        LeakyPadding,
        LeakyEnds,
        LeftPadding,
        OneNaN,
        Zeros,
        OneZeroState,
        Constant,
    ],
)
def test_a_build_stops_before_it_commits_a_wrong_state(
    tmp_path, tiny_target, target, monkeypatch, kind
):
    monkeypatch.setattr(build, "load_weights", lambda *_, **__: spoil(target, kind))
    data = write_jsonl(tmp_path / "rows.jsonl", chat_rows(4))
    with pytest.raises(ProofError):
        build.build_cache(tiny_build(tiny_target, data, tmp_path / "out"))
    assert list((tmp_path / "out").glob("commits/*")) == []
    assert list((tmp_path / "out" / "units").glob("*/*")) == []
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_state_that_fails_is_named_by_its_sample_and_layer(
    tmp_path, tiny_target, target, monkeypatch
):
    monkeypatch.setattr(build, "load_weights", lambda *_, **__: spoil(target, Zeros))
    data = write_jsonl(tmp_path / "rows.jsonl", chat_rows(1))
    with pytest.raises(ProofError, match="sample 0, target layer 1: a token's state is all zeros"):
        build.build_cache(tiny_build(tiny_target, data, tmp_path / "out"))


def test_a_build_on_text_that_the_target_only_guesses_stops(tmp_path, tiny_target, tiny_data):
    config = tiny_build(tiny_target, tiny_data, tmp_path / "out", agreement_samples=4)
    with pytest.raises(ProofError, match="no likelier than guessing"):
        build.build_cache(config)
    assert list((tmp_path / "out").glob("commits/*")) == []


def test_a_resumed_build_with_other_arithmetic_stops(tmp_path, tiny_target, target, monkeypatch):
    data = write_jsonl(tmp_path / "rows.jsonl", chat_rows(6))
    config = tiny_build(tiny_target, data, tmp_path / "out")
    build.build_cache(config)
    (config.out / "manifest.json").unlink()
    first, *others = sorted((config.out / "commits").iterdir())
    for other in others:
        other.unlink()

    class Louder(Target):
        def hidden_states(self, input_ids, layer_ids):
            return [1.01 * states for states in super().hidden_states(input_ids, layer_ids)]

        def all_hidden_states(self, input_ids):
            first, *states = super().all_hidden_states(input_ids)
            return first, *(1.01 * state for state in states)

    monkeypatch.setattr(build, "load_weights", lambda *_, **__: spoil(target, Louder))
    with pytest.raises(ProofError, match=r"differ by 0\.0\d+ .* already in the cache"):
        build.build_cache(config)
    assert list(config.out.glob("commits/*")) == [first]


def test_what_the_proofs_measured_is_in_the_manifest(tiny_cache):
    from dflash_cache.ledger import read_manifest

    found = read_manifest(tiny_cache).proofs
    assert found["hooks_vs_hidden_states"] == 0.0
    assert 0 <= found["padded_vs_alone"] < 1e-5
    assert found["tolerance"] == TOLERANCE["float32"]


def test_samples_for_the_proofs_fit_a_batch_and_are_of_unlike_length():
    samples = [replace(sample_of("0" * n + "11"), sample_id=n) for n in (300, 5, 80, 40, 2000)]
    chosen = evidence._rows_for_proofs(samples, limit=600)
    assert [len(row) for row in chosen] == [82, 200, 7]


@pytest.mark.parametrize(
    ("lengths", "limit"),
    [((1100, 3000, 2048, 1500), 16384), ((2048,) * 5, 4096), ((12,) * 4, 16384), ((9,), 64)],
    ids=["all are long", "all are of one length", "short and alike", "one alone"],
)
def test_rows_for_the_proofs_are_padded_whatever_the_lengths_are(lengths, limit):
    """In a batch without padding, padding would be proven by nothing."""
    samples = [replace(sample_of("0" * (n - 2) + "11"), sample_id=n) for n in lengths]
    rows = evidence._rows_for_proofs(samples, limit=limit)
    widths = [len(row) for row in rows]
    assert len(set(widths)) == len(widths) == 3
    assert 3 * max(widths) <= limit


def test_data_of_long_samples_alone_does_not_hide_what_leaks_out_of_padding(target):
    samples = [replace(sample_of("1" * n), sample_id=n) for n in (1500, 1100, 1300)]
    rows = evidence._rows_for_proofs(samples, limit=192)
    with pytest.raises(ProofError, match="padded to 64"):
        proofs.prove_padding(spoil(target, LeakyPadding), rows, LAYERS)


@pytest.mark.parametrize("count", [0, 1, 8, 100, 999, 5000])
def test_samples_for_the_agreement_are_from_all_over_the_data(count):
    samples = [replace(sample_of("11"), sample_id=n) for n in range(1000)]
    plan = SimpleNamespace(samples=SimpleNamespace(samples=samples))
    found = [sample.sample_id for sample in evidence._some(plan, count)]
    assert len(found) == len(set(found)) == min(count, 1000)
    gaps = np.diff([*found, 1000])
    assert not count or gaps.max() <= -(-1000 // min(count, 1000))


def test_a_cache_of_layers_that_the_library_has_no_word_for_differs_from_nothing():
    assert Tolerance(limit=0.1).furthest([]) is None
    assert proofs.prove_probe([], [], Tolerance(limit=0.1)) == Difference()


# --- embedding and head -------------------------------------------------------------------------


class ScaledEmbedding(torch.nn.Module):
    """An embedding that a family multiplies under a name that we do not know."""

    def __init__(self, inner: torch.nn.Embedding) -> None:
        super().__init__()
        self.weight, self.inner = inner.weight, inner

    def forward(self, ids):
        return self.inner(ids) * 1.5


def test_plain_embedding_and_head_are_what_the_model_uses(target):
    assert proofs.prove_frozen(target, torch.arange(8, 40)[None]) < 1e-5


def test_an_embedding_that_is_scaled_under_any_name_fails(tiny_target):
    scaled = load_target(str(tiny_target), dtype="float32", device="cpu")
    scaled.decoder.embed_tokens = ScaledEmbedding(scaled.decoder.embed_tokens)
    with pytest.raises(ProofError, match="embedding rows differ"):
        proofs.prove_frozen(scaled, torch.arange(8, 40)[None])


def test_logits_that_are_capped_under_any_name_fail(tiny_target):
    capped = load_target(str(tiny_target), dtype="float32", device="cpu")
    capped.model.lm_head.register_forward_hook(lambda module, inputs, out: torch.tanh(out))
    with pytest.raises(ProofError, match="head times the final state differ"):
        proofs.prove_frozen(capped, torch.arange(8, 40)[None])


# --- the final state ----------------------------------------------------------------------------


class NotNormed(Target):
    """The state before the final norm."""

    def hidden_and_final(self, input_ids, layer_ids):
        *planes, _ = super().hidden_and_final(input_ids, layer_ids)
        return [*planes, report_of(self, input_ids[0]).unnormed[None]]


class NormedTwice(Target):
    """The final norm, done by us once more."""

    def final_hidden(self, input_ids):
        return self.decoder.norm(super().final_hidden(input_ids))


@pytest.fixture(scope="module")
def with_a_norm(tiny_target) -> Target:
    """Norms of a fresh model are all ones, and twice is then once."""
    loaded = load_target(str(tiny_target), dtype="float32", device="cpu")
    loaded.decoder.norm.weight.copy_(torch.linspace(0.5, 2, 32))
    return loaded


def test_what_the_head_reads_passes(with_a_norm):
    assert proofs.prove_final(with_a_norm, torch.arange(8, 40)[None], LAYERS) < 1e-5


@pytest.mark.parametrize(
    ("kind", "cause"), [(NotNormed, "they are not normed"), (NormedTwice, "they are normed twice")]
)
def test_a_final_state_on_the_wrong_side_of_the_norm_fails_by_its_name(with_a_norm, kind, cause):
    with pytest.raises(ProofError, match=f"is not what the head reads.*: {cause}"):
        proofs.prove_final(spoil(with_a_norm, kind), torch.arange(8, 40)[None], LAYERS)


# --- every family -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_good_target_of_every_family_passes_all_of_it(tmp_path, family):
    """The last layer too, and the final state, whose names differ from family to family."""
    layers, ids = [1, 3, 5], rows(7, 40, 23)
    good = load_target(str(save_family(tmp_path / family, family)), dtype="float32", device="cpu")
    assert proofs.prove_hooks(good, ids[1][None], layers) < 1e-6
    assert proofs.prove_padding(good, ids, layers).worst < 1e-4
    assert proofs.prove_frozen(good, ids[1][None]) < 1e-4
    assert proofs.prove_final(good, ids[1][None], layers) < 1e-4
    report = report_of(good, ids[1])
    assert report.layer(5) is not None
    torch.testing.assert_close(report.normed(report.layer(5)), report.final)
    good.keep_up_to(3)
    assert proofs.prove_hooks(good, ids[1][None], [1, 3]) < 1e-6
    cut = report_of(good, ids[1])
    assert torch.equal(cut.layer(3), report.layer(3))
    assert cut.norm is None
