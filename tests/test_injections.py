"""Each mistake that makes caches silently wrong, put in where it would sit: the build fails by the
name of the mistake, and nothing is committed.

Some are there from the start, where the proofs before the first byte see them; some come after
those, where only the checks of a unit and its reading back can.
"""

import json
import re
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from conftest import (
    CHATML,
    QUICKSTART,
    TEXT,
    chat_rows,
    make_tokenizer,
    save_tiny_target,
    write_jsonl,
)
from routing import OtherKernels, all_but_tied
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_cache import build, extraction, landing, proofs
from dflash_cache.ledger import read_manifest
from dflash_cache.report import report_of
from dflash_cache.target import Target
from dflash_cache.tolerance import ROUTED_SHARE
from dflash_cli.main import main

Patch = pytest.MonkeyPatch
Bug = Callable[[Patch], None]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """A target as a trained one is, where that decides what a mistake does."""
    folder = save_tiny_target(tmp_path_factory.mktemp("target") / "tiny")
    edit_weights(folder, as_if_trained)
    return folder


def as_if_trained(weights: dict[str, Tensor]) -> None:
    """In a fresh model norms are all ones, and twice is once; and the filler's row is zero."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        if "norm" in name:
            weight.copy_(0.5 + torch.rand(weight.shape, generator=generator))
    weights["model.embed_tokens.weight"][0] = 0.1 * torch.randn(32, generator=generator)


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change a target's weights on the disk."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> tuple[Path, OtherKernels]:
    folder = tmp_path_factory.mktemp("routed") / "tiny"
    return folder, all_but_tied(folder)


@pytest.fixture
def routed(loaded, monkeypatch) -> Path:
    """A target with experts, whose tokens go to others of them in a batch than alone."""
    folder, whole = loaded
    monkeypatch.setattr(
        build, "load_weights", lambda *_, **__: OtherKernels(**vars(deepcopy(whole)))
    )
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("data") / "chats.jsonl", chat_rows(12))


def run_build(target: Path, data: Path, out: Path, *more: str):
    words = ["cache", "build", "--target", target, "--data", data, "--out", out]
    words += ["--target-dtype", "float32", "--num-target-layers", "3", "--devices", "cpu"]
    words += ["--bucket-edges", "48,96,160", "--unit-tokens", "400", "--batch-tokens", "512"]
    return CliRunner().invoke(main, [str(word) for word in [*words, *(more or NOT_ASKED)]])


NOT_ASKED = ("--agreement-samples", "0")  # a random target agrees with no text
# The first unit has rows of unlike length.
ONE_BUCKET = (*NOT_ASKED, "--bucket-edges", "512", "--batch-tokens", "2048")


def refused(target: Path, data: Path, out: Path, *more: str) -> str:
    """The message of a build that has to fail without committing anything."""
    done = run_build(target, data, out, *more)
    assert done.exit_code == 1, done.output
    assert list(out.glob("commits/*")) == []
    assert list(out.glob("units/*/*")) == []
    assert not (out / "manifest.json").exists()
    return " ".join(done.output.partition("Error: ")[2].split())


def test_without_a_mistake_the_build_is_good(tmp_path, target, data):
    done = run_build(target, data, tmp_path / "out", *NOT_ASKED, "--final-hidden")
    assert done.exit_code == 0, done.output
    found = read_manifest(tmp_path / "out").proofs
    measured = {"hooks_vs_hidden_states", "padded_vs_alone", "frozen_vs_model", "final_vs_head"}
    assert {name for name in measured if 0 <= found[name] < 1e-4} == measured
    assert found["skipped"] == ["agreement"]


def test_tokens_that_go_to_other_experts_in_a_batch_are_no_mistake(tmp_path, routed, data):
    done = run_build(routed, data, tmp_path / "out", *ONE_BUCKET)
    assert done.exit_code == 0, done.output
    found = read_manifest(tmp_path / "out").proofs
    assert found["padded_vs_alone"] > found["tolerance"]  # they do go elsewhere
    assert found["beyond_tolerance"].keys() == {"padded_vs_alone", "probe"}
    assert 0 < found["beyond_tolerance"]["padded_vs_alone"] < ROUTED_SHARE


# --- mistakes in taking states out of the target ------------------------------------------------


def taken(change: Callable[..., list[Tensor]]) -> Bug:
    """`change` what `Target.hidden_states` gives: (states, target, ids, layers) -> states."""

    def put_in(patch: Patch) -> None:
        right = Target.hidden_states

        def wrong(self, input_ids, layer_ids):
            return change(right(self, input_ids, layer_ids), self, input_ids, layer_ids)

        patch.setattr(Target, "hidden_states", wrong)

    return put_in


def zeroed(states, *_):
    return [torch.zeros_like(plane) for plane in states]


def shifted(by: int):
    return lambda states, *_: [plane.roll(by, dims=1) for plane in states]


def other_layers(by: int) -> Bug:
    def put_in(patch: Patch) -> None:
        right = Target.hidden_states
        patch.setattr(
            Target,
            "hidden_states",
            lambda self, ids, layers: right(self, ids, [layer + by for layer in layers]),
        )

    return put_in


def normed(states, target, *_):
    return [target.decoder.norm(plane) for plane in states]


def as_if_padded_left(states, target, ids, layers):
    """The states of rows that have their filler in front."""
    ends = (ids != 0).sum(1).tolist()
    moved = [row.roll(len(row) - end) for row, end in zip(ids, ends, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.undo()
        return TRUE_STATES(target, torch.stack(moved), layers)


TRUE_STATES = Target.hidden_states

FROM_THE_START = {
    "zeroed": (taken(zeroed), "target layer 1: .*: all states are zeros"),
    "shifted right": (
        taken(shifted(1)),
        "target layer 1: .*: the states are shifted by one token: a token has that of the token "
        "before it",
    ),
    "shifted left": (
        taken(shifted(-1)),
        "target layer 1: .*: the states are shifted by one token: a token has that of the token "
        "behind it",
    ),
    "layer below": (
        other_layers(-1),
        "target layer 1: .*: the states are those of layer 0: layer off by one, too low",
    ),
    "layer above": (
        other_layers(1),
        "target layer 1: .*: the states are those of layer 2: layer off by one, too high",
    ),
    "normed": (taken(normed), "target layer 1: .*: the target's final norm was applied to them"),
    "left padding": (
        taken(as_if_padded_left),
        "a row of [0-9]+ tokens padded to [0-9]+ .*: left padding: the states are those of a row "
        "with the filler in front of it",
    ),
}


@pytest.mark.parametrize("mistake", FROM_THE_START)
def test_a_mistake_from_the_start_stops_the_build_by_its_name(
    tmp_path, target, data, monkeypatch, mistake
):
    bug, cause = FROM_THE_START[mistake]
    bug(monkeypatch)
    assert_told(cause, refused(target, data, tmp_path / "out"))
    assert not (tmp_path / "out" / "zarr.json").exists()


def assert_told(pattern: str, message: str) -> None:
    assert re.search(pattern, message), message


# --- the final state ----------------------------------------------------------------------------


def final(change: Callable[[Target, Tensor, Tensor], Tensor]) -> Bug:
    """`change` the final state that `Target.hidden_and_final` gives: (target, ids, state)."""

    def put_in(patch: Patch) -> None:
        right = Target.hidden_and_final

        def wrong(self, input_ids, layer_ids):
            *planes, state = right(self, input_ids, layer_ids)
            return [*planes, change(self, input_ids, state)]

        patch.setattr(Target, "hidden_and_final", wrong)

    return put_in


def before_the_norm(target: Target, ids: Tensor, state: Tensor) -> Tensor:
    rows = [report_of(target, row).unnormed for row in ids]
    return torch.stack(rows)


FINAL_MISTAKES = {
    "not normed": (final(before_the_norm), "they are not normed: the final norm, applied once"),
    "normed twice": (final(lambda target, _, state: target.decoder.norm(state)), "normed twice"),
    "shifted": (final(lambda _, __, state: state.roll(1, dims=1)), "shifted by one token"),
}


@pytest.mark.parametrize("mistake", FINAL_MISTAKES)
def test_a_final_state_that_the_head_does_not_read_stops_the_build(
    tmp_path, target, data, monkeypatch, mistake
):
    bug, cause = FINAL_MISTAKES[mistake]
    bug(monkeypatch)
    message = refused(target, data, tmp_path / "out", *NOT_ASKED, "--final-hidden")
    assert_told(f"final hidden state is not what the head reads.*{cause}", message)


@pytest.mark.parametrize("mistake", FINAL_MISTAKES)
def test_a_final_state_that_goes_wrong_later_is_read_back(
    tmp_path, target, data, monkeypatch, mistake
):
    bug, cause = FINAL_MISTAKES[mistake]
    after_the_proofs(monkeypatch, bug)
    message = refused(target, data, tmp_path / "out", *NOT_ASKED, "--final-hidden")
    assert_told(f"unit u[0-9]+, sample [0-9]+, final hidden state: read back .*{cause}", message)


# --- after the proofs ---------------------------------------------------------------------------


def after_the_proofs(patch: Patch, bug: Bug) -> None:
    """Let the mistake begin when all is proven and the first unit is next."""
    right = build.begin

    def begin(*arguments):
        codec = right(*arguments)
        bug(patch)
        return codec

    patch.setattr(build, "begin", begin)


def in_batches(change: Callable[[list[Tensor], Tensor], list[Tensor]]) -> Bug:
    """Between the target and all that comes behind it: (states, ids) -> states."""

    def put_in(patch: Patch) -> None:
        right = extraction.padded_states
        patch.setattr(
            extraction,
            "padded_states",
            lambda target, ids, identity: change(right(target, ids, identity), ids),
        )

    return put_in


def in_the_file(change: Callable[[Tensor], Tensor]) -> Bug:
    """Between the checks of a batch and the disk."""

    def put_in(patch: Patch) -> None:
        right = landing.Landed.encoded

        def wrong(self):
            for sample in right(self):
                parts = [{name: change(t) for name, t in plane.items()} for plane in sample.parts]
                yield replace(sample, parts=parts)

        patch.setattr(landing.Landed, "encoded", wrong)

    return put_in


def left_pad(rows):
    width = max(map(len, rows))
    return torch.stack([torch.cat([row.new_zeros(width - len(row)), row]) for row in rows])


def padding_left(patch: Patch) -> None:
    patch.setattr(proofs, "pad_right", left_pad)


def nan_in_one_row(states: list[Tensor], ids: Tensor) -> list[Tensor]:
    wrong = [plane.clone() for plane in states]
    wrong[1][-1, 3, 7] = torch.nan
    return wrong


READ_BACK = "unit u[0-9]+, sample [0-9]+, target layer [135]: read back from the disk, .*: "
LATER = {
    "zeroed": (in_batches(zeroed), "sample [0-9]+, target layer 1: a token's state is all zeros"),
    "NaN in one row": (
        in_batches(nan_in_one_row),
        "sample [0-9]+, target layer 3: NaN or infinity in the states",
    ),
    "shifted in the batch": (in_batches(shifted(1)), f"{READ_BACK}.*shifted by one token"),
    "shifted in the file": (
        in_the_file(lambda part: part.roll(-1, dims=0)),
        f"{READ_BACK}the states are shifted by one token: a token has that of the token behind it",
    ),
    "zeroed in the file": (in_the_file(torch.zeros_like), f"{READ_BACK}all states are zeros"),
    "layer below": (
        other_layers(-1),
        f"{READ_BACK}the states are those of layer [024]: layer off by one, too low",
    ),
    "layers exchanged": (
        in_batches(lambda states, _: states[::-1]),
        f"{READ_BACK}the states are those of layer [15]",
    ),
    "left padding": (
        padding_left,
        f"{READ_BACK}left padding: the states are those of a row with the filler in front of it",
    ),
}


@pytest.mark.parametrize("mistake", LATER)
def test_a_mistake_that_comes_after_the_proofs_stops_the_first_unit(
    tmp_path, target, data, monkeypatch, mistake
):
    bug, cause = LATER[mistake]
    after_the_proofs(monkeypatch, bug)
    assert_told(cause, refused(target, data, tmp_path / "out", *ONE_BUCKET))


@pytest.mark.parametrize("mistake", LATER)
def test_a_mistake_does_not_hide_behind_tokens_that_go_to_other_experts(
    tmp_path, routed, data, monkeypatch, mistake
):
    bug, cause = LATER[mistake]
    after_the_proofs(monkeypatch, bug)
    assert_told(cause, refused(routed, data, tmp_path / "out", *ONE_BUCKET))


def test_left_padding_does_not_hide_there_from_the_start(tmp_path, routed, data, monkeypatch):
    bug, cause = FROM_THE_START["left padding"]
    bug(monkeypatch)
    assert_told(cause, refused(routed, data, tmp_path / "out"))


def test_left_padding_from_the_start_is_named(tmp_path, target, data, monkeypatch):
    padding_left(monkeypatch)
    assert_told(
        "left padding: its ids stand at the right end", refused(target, data, tmp_path / "o")
    )


# --- mistakes in the folder of the target -------------------------------------------------------


@pytest.fixture
def spoilt(tmp_path, target) -> Path:
    return Path(shutil.copytree(target, tmp_path / "spoilt"))


def test_weights_of_zeros_stop_the_build(tmp_path, spoilt, data):
    edit_weights(spoilt, lambda weights: weights["model.embed_tokens.weight"].zero_())
    assert_told("a token's state is all zeros", refused(spoilt, data, tmp_path / "out"))


def test_one_weight_that_is_none_stops_the_build_by_its_layer(tmp_path, spoilt, data):
    name = "model.layers.2.mlp.down_proj.weight"
    edit_weights(spoilt, lambda weights: weights[name][0].fill_(torch.nan))
    assert_told(
        "target layer 3: .*NaN or infinity in the state of token 0",
        refused(spoilt, data, tmp_path / "out"),
    )


LLAMA3 = (Path(__file__).parent / "templates" / "llama3.jinja").read_text(encoding="utf-8")
TEMPLATES = {
    "another model's": (
        LLAMA3,
        "the chat template writes <|end_header_id|> .which this tokenizer splits into [0-9]+ "
        "pieces.*it is the template of another model",
    ),
    "without an end": (
        CHATML.replace("+ '<|im_end|>'", ""),
        "none of [0-9]+ supervised answers ends in a stop token of the target .'<.im_end.>'",
    ),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_wrong_chat_template_stops_the_build_before_any_weights_are_read(
    tmp_path, spoilt, data, monkeypatch, template
):
    text, cause = TEMPLATES[template]
    (spoilt / "chat_template.jinja").write_text(text, encoding="utf-8")
    monkeypatch.setattr(build, "load_weights", lambda *_, **__: pytest.fail("weights were read"))
    assert_told(cause.replace("|", r"\|"), refused(spoilt, data, tmp_path / "out"))


# --- a tokenizer of another model ---------------------------------------------------------------


@pytest.fixture(scope="module")
def knowing(tmp_path_factory) -> Path:
    """A target that knows one text by heart: its head finds each token's follower."""
    folder = save_tiny_target(tmp_path_factory.mktemp("knowing") / "tiny", tied=False)
    ids = make_tokenizer()(" ".join([TEXT] * 3))["input_ids"]

    def by_heart(weights: dict[str, Tensor]) -> None:
        embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
        for name, weight in weights.items():
            if "o_proj" in name or "down_proj" in name:
                weight.mul_(0.01)
        head.zero_()
        for token, follower in set(pairwise(ids)):
            head[follower] += 2 * embedding[token] / embedding[token].norm()

    edit_weights(folder, by_heart)
    return folder


@pytest.fixture(scope="module")
def recited(tmp_path_factory) -> Path:
    words = f"{TEXT} {TEXT}".split()
    rows = [
        {"prompt": " ".join(words[i : i + 6]), "response": f" {' '.join(words[i + 6 : i + 16])}"}
        for i in range(8)
    ]
    return write_jsonl(tmp_path_factory.mktemp("data") / "recited.jsonl", rows)


def exchange_ids(folder: Path) -> None:
    """The tokenizer of another model of that family: the same words under other numbers."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    added = {token["content"] for token in content["added_tokens"]}
    vocab = content["model"]["vocab"]
    words = [word for word in vocab if word not in added]
    ids = np.random.default_rng(0).permutation([vocab[word] for word in words]).tolist()
    vocab.update(zip(words, ids, strict=True))
    path.write_text(json.dumps(content), encoding="utf-8")


def test_a_target_with_its_own_tokenizer_knows_the_text(tmp_path, knowing, recited):
    done = run_build(knowing, recited, tmp_path / "out", "--agreement-samples", "4")
    assert done.exit_code == 0, done.output
    found = read_manifest(tmp_path / "out").agreement
    assert found["nll"] < 2.5


def test_a_tokenizer_of_another_model_stops_the_build_by_its_name(tmp_path, knowing, recited):
    spoilt = Path(shutil.copytree(knowing, tmp_path / "spoilt"))
    exchange_ids(spoilt)
    message = refused(spoilt, recited, tmp_path / "out", "--agreement-samples", "4")
    assert_told(
        "finds the supervised tokens no likelier than guessing .*: the tokenizer is that of "
        "another model, or the weights are wrong",
        message,
    )


@pytest.mark.realmodel
@pytest.mark.parametrize("own", [True, False])
def test_the_real_target_knows_its_own_tokenizer_and_no_other(tmp_path, real_target, own):
    folder = Path(shutil.copytree(real_target, tmp_path / "real"))
    if not own:
        exchange_ids(folder)
    more = ("--agreement-samples", "4", "--max-samples", "6", "--max-length", "256")
    more += (
        "--too-long",
        "cut",
        "--max-skipped",
        "0.9",
        "--unit-tokens",
        "4096",
        "--bucket-edges",
        "8193",
    )
    out, data = tmp_path / "out", QUICKSTART / "train.jsonl"
    if own:
        done = run_build(folder, data, out, *more)
        assert done.exit_code == 0, done.output
        assert read_manifest(out).agreement["nll"] < 3
    else:
        told = refused(folder, data, out, *more)
        assert_told("the tokenizer is that of another model", told)
