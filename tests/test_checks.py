"""Every unit's states are measured as by a naive loop, and judged by sample and layer."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import permutations

import numpy as np
import pytest
import torch
from conftest import QUICKSTART
from torch import Tensor
from torch.nn.functional import rms_norm

from dflash_cache import checks
from dflash_cache.checks import (
    ENOUGH,
    FACTS,
    FIRST_UNITS,
    UnitChecks,
    learn_bands,
    measure,
    unit_norms,
)
from dflash_cache.errors import ProofError

PLANES = ["hidden/1", "hidden/5", "final_hidden"]


@dataclass(frozen=True)
class Named:
    sample_id: int
    input_ids: np.ndarray = field(default_factory=lambda: np.arange(9))


def named(count: int) -> list[Named]:
    return [Named(100 + i) for i in range(count)]


def batch(*lengths: int, width: int | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), width or max(lengths), 32)
    return torch.randn(shape, generator=generator).bfloat16(), torch.tensor(lengths)


def naive(states: Tensor, lengths: Tensor) -> list[list[float]]:
    found = []
    for row, length in zip(states, lengths.tolist(), strict=True):
        own = row[:length].float()
        norms = own.norm(dim=-1)
        found.append([
            float(not own.isfinite().all()),
            float((own == 0).all(dim=-1).any()),
            float(length > 1 and bool((own == own[:1]).all())),
            float(norms.median()),
            float(norms.max()),
        ])  # fmt: skip
    return found


# --- measuring ----------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 7, 4096])
@pytest.mark.parametrize("lengths", [(9, 9, 9), (12, 7, 2, 1), (1,), (40,)])
def test_a_batch_is_measured_as_its_rows_one_by_one(monkeypatch, slots, lengths):
    monkeypatch.setattr(checks, "SLOTS", slots)
    states, tensor = batch(*lengths, width=max(lengths) + 3)
    found = measure(states, tensor)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor(naive(states, tensor)), rtol=1e-5, atol=0)


def test_what_stands_in_the_padding_does_not_count():
    states, lengths = batch(9, 4, 6)
    wanted = measure(states, lengths)
    for row, length in enumerate(lengths.tolist()):
        states[row, length:] = torch.tensor([torch.nan, 0, torch.inf, 1e30])[row]
    assert torch.equal(measure(states, lengths), wanted)


FAULTS = {
    "NaN": (lambda row: row[3, 31:].fill_(torch.nan), 0),
    "infinity": (lambda row: row[3, :1].fill_(torch.inf), 0),
    "minus infinity": (lambda row: row[-1, -1:].fill_(-torch.inf), 0),
    "a token of zeros": (lambda row: row[3].fill_(0), 1),
    "one state for all": (lambda row: row.copy_(row[:1].expand_as(row)), 2),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen_in_its_own_row_and_no_other(fault):
    states, lengths = batch(9, 7, 6)
    spoil, which = FAULTS[fault]
    spoil(states[1, :7])
    wanted = np.zeros((3, 3))
    wanted[1, which] = 1
    assert measure(states, lengths)[:, :3].tolist() == wanted.tolist()


def test_numbers_whose_squares_vanish_or_overflow_are_neither_zero_nor_infinite():
    states, lengths = batch(5, 5)
    states[0], states[1] = states[0] * 1e-30, states[1] * 1e30
    assert not measure(states, lengths)[:, :3].any()


# --- judging ------------------------------------------------------------------------------------


def facts(*, fault: str | None = None, row: int = 1, plane: int = 1) -> np.ndarray:
    """Of three planes and rows, one of them spoilt."""
    states = [batch(9, 7, 6, seed=k) for k in range(3)]
    if fault is not None:
        length = int(states[plane][1][row])
        FAULTS[fault][0](states[plane][0][row, :length])
    return torch.stack([measure(*plane) for plane in states]).numpy()


def test_good_states_pass():
    checks.refuse_faults(facts(), named(3), PLANES)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("NaN", "NaN or infinity in the states; try --target-dtype float32"),
        ("minus infinity", "NaN or infinity"),
        ("a token of zeros", "a token's state is all zeros; .* Try another --target-attention"),
        ("one state for all", "all tokens have one state; .* Try another --target-attention"),
    ],
)
def test_a_fault_is_told_with_its_sample_its_layer_and_what_to_do(fault, told):
    with pytest.raises(ProofError, match=f"sample 101, target layer 5: {told}"):
        checks.refuse_faults(facts(fault=fault), named(3), PLANES)


def test_one_token_again_and_again_has_one_state_by_right():
    samples = [Named(100), Named(101, np.full(7, 5)), Named(102)]
    checks.refuse_faults(facts(fault="one state for all"), samples, PLANES)
    with pytest.raises(ProofError, match="sample 101, target layer 5: a token's state is all zer"):
        checks.refuse_faults(facts(fault="a token of zeros"), samples, PLANES)


def test_of_several_faults_the_first_sample_is_told():
    both = facts(fault="NaN", row=2, plane=0)
    both[2, 0, 1] = 1
    with pytest.raises(ProofError, match="sample 100, final hidden state: a token's state is all"):
        checks.refuse_faults(both, named(3), PLANES)


# --- norms --------------------------------------------------------------------------------------


def judge(*, known: int = 1, leave_out: tuple[str, ...] = ()) -> UnitChecks:
    """Knows so many units of samples of norms 9, 10, 11, whose loudest token has 300."""
    rows = np.array([[[norm, 300.0]] for norm in (9.0, 10.0, 11.0)])
    units = {f"u{i:06d}": unit_norms(rows, ["hidden/1"]) for i in range(known)}
    return UnitChecks(["hidden/1"], leave_out=leave_out, earlier=lambda: units)


def give(judge: UnitChecks, *medians: float, loudest: float = 300.0, name: str = "u9") -> None:
    """A unit of samples of such norms, in two batches."""
    rows = np.array([[0, 0, 0, median, loudest] for median in medians])
    assert len(FACTS) == rows.shape[1]
    samples = named(len(medians))
    judge.batch(rows[None, :1], samples[:1])
    if len(samples) > 1:
        judge.batch(rows[None, 1:], samples[1:])
    judge.unit(name, samples)


def test_a_record_keeps_the_spread_of_its_samples():
    rows = np.array([[[9.0, 300.0], [1.0, 2.0]], [[11.0, 200.0], [3.0, 4.0]]])
    assert unit_norms(rows, PLANES[:2]) == {
        "hidden/1": {"median": 10.0, "least": 9.0, "greatest": 11.0, "loudest": 300.0},
        "hidden/5": {"median": 2.0, "least": 1.0, "greatest": 3.0, "loudest": 4.0},
    }


def test_norms_that_are_none_are_left_out_of_the_record():
    rows = np.array([[[np.nan, np.nan]], [[11.0, 200.0]]])
    assert unit_norms(rows, ["hidden/1"])["hidden/1"]["median"] == 11.0
    assert unit_norms(rows[:1], ["hidden/1"]) == {}


@pytest.mark.parametrize(
    "medians",
    [
        pytest.param((10.0, 9.0, 11.0), id="like the first"),
        pytest.param((5.1, 5.1, 19.0, 19.0), id="at the edge of the band"),
        pytest.param((10.0, 10.0, 10.0, 250.0), id="one word again and again"),
        pytest.param((250.0,), id="a unit of one sample of one word"),
        pytest.param((3.0, 10.0, 9.0), id="a quiet sample"),
    ],
)
def test_what_real_text_may_do_passes(medians):
    give(judge(), *medians)


@pytest.mark.parametrize("factor", [0.0, 1 / 100, 1 / 16, 1 / 3, 3, 16, 100, np.inf, np.nan])
def test_a_unit_of_another_scale_fails(factor):
    with pytest.raises(ProofError, match=r"sample 100, target layer 1: .* usual here is 10 "):
        give(judge(), *(factor * norm for norm in (9.0, 10.0, 11.0, 10.0)))


@pytest.mark.parametrize("median", [0.0, 0.1, 2.0, 700.0, 1e20, np.inf, np.nan])
def test_one_sample_that_is_garbage_fails_by_its_name(median):
    told = rf"sample 102, target layer 1: its median state has norm {median:.4g}; .*2.5 to 600"
    with pytest.raises(ProofError, match=told.replace("+", r"\+")):
        give(judge(), 10.0, 9.0, median, 11.0)


def test_the_message_tells_the_band_the_causes_and_the_way_out():
    with pytest.raises(ProofError) as told:
        give(judge(), 33.0, 31.0, 10.0)
    for words in (
        "norm 33 (and 1 others of 3 samples lie outside too)",
        "usual here is 10 (median of 1 units), and the band is 5 to 20",
        "states of another layer, a norm left out or done twice",
        "`--no-proof norms`",
    ):
        assert words in str(told.value)


def test_units_of_one_sample_are_judged_together():
    own = judge()
    give(own, 30.0, name="u1")
    give(own, 10.0, name="u2")
    with pytest.raises(ProofError, match=r"norm 30 \(and 1 others of 3 samples"):
        give(own, 31.0, name="u3")


@pytest.mark.parametrize("sizes", list(permutations((1, 2, 1, 4))), ids=str)
@pytest.mark.parametrize("committed_are_seen", [True, False])
def test_small_units_that_come_first_do_not_make_a_fault_the_usual(sizes, committed_are_seen):
    """Whatever the order of the units, no more pass than there are samples to judge together."""

    def norms(norm: float, size: int) -> checks.Norms:
        return unit_norms(np.array([[[norm, 300.0]]] * size), ["hidden/1"])

    committed, passed = {"u0": norms(10.0, 5)}, []
    own = UnitChecks(["hidden/1"], leave_out=(), earlier=lambda: committed)

    def build() -> None:
        for number, size in enumerate(sizes, start=1):
            give(own, *([30.0] * size), name=f"u{number}")
            passed.append(f"u{number}")
            if committed_are_seen:
                committed[passed[-1]] = norms(30.0, size)

    with pytest.raises(ProofError, match=r"usual here is 10 \(median of 1 units\)") as told:
        build()
    assert sum(sizes[: len(passed)]) < ENOUGH
    words = f"committed before this showed: {', '.join(passed)};"
    assert (words in str(told.value)) == bool(passed)


def test_units_that_passed_together_are_learnt_from():
    own = judge(known=0)
    for number in range(ENOUGH):
        assert own.known == {}
        give(own, 10.0 + number, name=f"u{number}")
    assert list(own.known) == ["u0", "u1", "u2"]


def test_the_first_unit_of_all_is_judged_by_itself():
    give(judge(known=0), 10.0, 500.0, 9.0)
    with pytest.raises(ProofError, match="sample 101, target layer 1"):
        give(judge(known=0), 10.0, 0.2, 9.0)


def test_a_worker_learns_from_its_own_first_unit():
    own = judge(known=0)
    give(own, 1.0, 1.1, 0.9, name="u0")
    with pytest.raises(ProofError, match="usual here is 1 "):
        give(own, 10.0, 11.0, 9.0, name="u1")


def test_others_units_are_asked_for_until_enough_are_known():
    asked = []

    def earlier() -> dict:
        asked.append(len(asked))
        return {}

    own = UnitChecks(["hidden/1"], leave_out=(), earlier=earlier)
    for number in range(FIRST_UNITS + 3):
        give(own, 10.0, 11.0, 9.0, name=f"u{number}")
    assert len(asked) == FIRST_UNITS
    assert len(own.known) == FIRST_UNITS


def test_units_of_older_records_say_nothing_and_spoil_nothing():
    own = UnitChecks(["hidden/1"], leave_out=(), earlier=lambda: {"u0": {}})
    give(own, 10.0, 11.0, 9.0, name="u1")
    with pytest.raises(ProofError, match=r"usual here is 10 \(median of 1 units\)"):
        give(own, 90.0, 91.0, 99.0, name="u2")


def test_checks_that_are_left_out_fail_nothing():
    give(judge(leave_out=("norms",)), 1000.0, 0.0, 1000.0)
    lenient = UnitChecks(PLANES, leave_out=("states",), earlier=dict)
    lenient.batch(facts(fault="a token of zeros"), named(3))
    with pytest.raises(ProofError):
        UnitChecks(PLANES, leave_out=("norms",), earlier=dict).batch(
            facts(fault="a token of zeros"), named(3)
        )


def test_a_plane_that_the_first_units_did_not_have_is_not_judged():
    for refuse in (checks.refuse_one, checks.refuse_most):
        refuse(np.array([[1e9]]), named(1), ["final_hidden"], learn_bands([]))


# --- the real target ----------------------------------------------------------------------------

LAYERS = [1, 8, 14, 21, 27]
STRANGE = {
    "code": "def fold(checksums, size):\n    whole = 0\n    for part in checksums:\n        pass\n"
    * 4,
    "digits": " ".join(str(i * 7919 % 10007) for i in range(80)),
    "other words": "Gestern ging ich in den Wald, um Pilze zu suchen; es regnete. " * 4,
    "one word": "the " * 150,
    "lines": "\n" * 120,
}


@pytest.fixture(scope="module")
def real_states(real_target) -> dict[str, tuple[np.ndarray, list[Tensor]]]:
    """Ids, and states of the kept layers and the final one, [t, H]: of chats and strange texts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # In float32: not every CPU has instructions for bfloat16, in which the states are measured.
    model = AutoModelForCausalLM.from_pretrained(real_target, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(real_target)
    lines = (QUICKSTART / "train.jsonl").read_text(encoding="utf-8").splitlines()[:400:50]
    texts = {
        f"chat {i}": tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)
        for i, line in enumerate(lines)
    }
    found = {}
    for name, text in {**texts, **STRANGE}.items():
        ids = torch.tensor([tokenizer(text).input_ids[:256]])
        with torch.inference_mode():
            output = model.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        kept = [output.hidden_states[layer + 1][0] for layer in LAYERS]
        states = [plane.bfloat16() for plane in (*kept, output.last_hidden_state[0])]
        found[name] = (ids[0].numpy(), states)
    return found


def as_unit(judge: UnitChecks, name: str, samples: list[tuple[np.ndarray, list[Tensor]]]) -> None:
    for ids, states in samples:
        measured = [measure(plane[None], torch.tensor([len(plane)])) for plane in states]
        judge.batch(torch.stack(measured).numpy(), [Named(100, ids)])
    judge.unit(name, named(len(samples)))


@pytest.mark.realmodel
def test_real_text_of_every_kind_passes_and_real_faults_do_not(real_states):
    planes = [*(f"hidden/{layer}" for layer in LAYERS), "final_hidden"]
    chats = [states for name, states in real_states.items() if name.startswith("chat")]
    strange = [real_states[name] for name in STRANGE]

    def learnt() -> UnitChecks:
        own = UnitChecks(planes, leave_out=(), earlier=dict)
        as_unit(own, "u0", chats[:4])
        return own

    for samples in (chats[4:], strange[:3], *([states] for states in strange), chats + strange):
        as_unit(learnt(), "u1", samples)

    def spoilt(plane: int, by: Callable[[list[Tensor]], Tensor]) -> list:
        return [(ids, [*s[:plane], by(s), *s[plane + 1 :]]) for ids, s in chats]

    faults = {
        "the final state un-normed": spoilt(5, lambda s: s[4]),
        "the last layer behind the final norm": spoilt(4, lambda s: s[5]),
        "layer 27 for layer 21": spoilt(3, lambda s: s[4]),
        "layer 1 for layer 14": spoilt(2, lambda s: s[0]),
        "a layer behind a plain norm": spoilt(4, lambda s: rms_norm(s[4], s[4].shape[-1:])),
    }
    for name, samples in faults.items():
        with pytest.raises(ProofError, match="usual here is"):
            as_unit(learnt(), name, samples)
