"""Every supported family, saved as users have it: its states, rows, weights, and what is left out.

The oracle is the library: its own class, loaded by plain `from_pretrained`, and its own report of
hidden states.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import FAMILIES, LAYERS, TEXT, WITH_VISION, load, save_family, some_ids
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from dflash_cache.kernels import warn_of_slow_layers, why_no_fla
from dflash_cache.stored import StoredTensor
from dflash_cache.survey import survey_target
from dflash_cache.target import Target
from dflash_cache.weights import LAYER, build_empty, load_weights


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory) -> Path:
    return save_family(tmp_path_factory.mktemp("families") / request.param, request.param)


@pytest.fixture(scope="module")
def target(folder) -> Target:
    return load(folder)


@pytest.fixture(scope="module")
def library(folder):
    """What transformers makes of the folder by itself."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def test_hooks_give_what_the_library_reports_of_every_layer(target, library):
    ids, layer_ids = some_ids(2, 70), range(LAYERS)
    hooked = target.hidden_states(ids, layer_ids)
    reported = library(ids, output_hidden_states=True).hidden_states
    for layer_id in layer_ids[:-1]:
        torch.testing.assert_close(hooked[layer_id], reported[layer_id + 1], rtol=0, atol=1e-5)
    # The last entry stands after the final norm; the hook before it.
    last = library.get_decoder().norm(hooked[-1])
    torch.testing.assert_close(last, reported[LAYERS], rtol=0, atol=1e-5)
    torch.testing.assert_close(target.final_hidden(ids), last, rtol=0, atol=1e-5)


def test_a_row_of_a_padded_batch_has_the_states_that_it_has_alone(target):
    rows = [some_ids(1, width, seed=width)[0] for width in (5, 66, 131, 67)]
    together = target.hidden_states(pad_sequence(rows, batch_first=True), range(LAYERS))
    for index, row in enumerate(rows):
        alone = target.hidden_states(row[None], range(LAYERS))
        for found, wanted in zip(together, alone, strict=True):
            torch.testing.assert_close(found[index, : len(row)], wanted[0], rtol=0, atol=2e-5)


def test_no_state_is_zero_or_that_of_its_neighbour(target):
    for states in target.hidden_states(some_ids(2, 70), range(LAYERS)):
        assert states.isfinite().all()
        assert (states.norm(dim=-1) > 0).all()
        assert ((states[:, 1:] - states[:, :-1]).norm(dim=-1) > 1e-3).all()


def test_weights_and_buffers_are_those_of_the_library(target, library):
    assert type(target.model) is type(library)
    for kind in ("named_parameters", "named_buffers"):
        found, wanted = dict(getattr(target.model, kind)()), dict(getattr(library, kind)())
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            assert tensor.dtype == wanted[name].dtype, name
            assert torch.equal(tensor, wanted[name]), name
    assert torch.equal(target.head, library.get_output_embeddings().weight)
    assert torch.equal(target.embedding, library.get_input_embeddings().weight)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_weight_has_the_dtype_that_the_library_gives_it(folder, dtype):
    found = load_weights(survey_target(str(folder), dtype=dtype), device="cpu").model
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    assert {n: t.dtype for n, t in found.state_dict().items()} == {
        n: t.dtype for n, t in wanted.state_dict().items()
    }
    buffers = dict(wanted.named_buffers())
    assert all(torch.equal(t, buffers[n]) for n, t in found.named_buffers())


@pytest.mark.parametrize("layer_id", [0, 3, LAYERS - 1])
def test_a_target_loaded_up_to_a_layer_has_the_states_of_the_whole(folder, target, layer_id):
    cut, ids = load(folder, up_to=layer_id), some_ids(2, 70)
    layer_ids = range(layer_id + 1)
    assert len(cut.layers) == layer_id + 1
    whole = target.hidden_states(ids, layer_ids)
    assert all(map(torch.equal, cut.hidden_states(ids, layer_ids), whole))
    assert torch.equal(cut.embedding, target.embedding)
    # The library's own report ends with the last layer that is left, and no norm hides it.
    reported = cut.all_hidden_states(ids)
    assert len(reported) == layer_id + 2
    assert all(map(torch.equal, reported[1:], whole))


def test_only_what_a_target_needs_is_read(folder, monkeypatch):
    read: set[str] = set()
    whole = StoredTensor.__getitem__

    def noted(self, where):
        read.add(self.name)
        return whole(self, where)

    monkeypatch.setattr(StoredTensor, "__getitem__", noted)
    load(folder, up_to=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    wanted = {
        name
        for name in index
        if "embed_tokens" in name
        or (".layers." in name and not name.startswith("mtp") and int(LAYER.search(name)[1]) <= 2)
    }
    assert read == wanted
    read.clear()
    load(folder)
    assert read == {n for n in index if not n.startswith(("mtp", "model.visual"))}


@pytest.mark.parametrize("family", WITH_VISION)
def test_the_text_is_taken_out_of_the_class_that_sees(tmp_path, family):
    folder = save_family(tmp_path / family, family)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"][0].endswith("ForConditionalGeneration")
    stored = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert any(name.startswith("model.visual.") for name in stored)
    target = load(folder)
    assert not any("visual" in name for name, _ in target.model.named_modules())
    assert target.spec.num_layers == LAYERS
    assert target.spec.hidden_size == TEXT["hidden_size"]


@pytest.mark.parametrize("family", WITH_VISION)
@torch.no_grad()
def test_the_text_alone_has_the_states_of_the_class_that_sees(tmp_path, family):
    folder, ids = save_family(tmp_path / family, family), some_ids(2, 70)
    seeing = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    reported = seeing(ids, output_hidden_states=True).hidden_states
    hooked = load(folder).hidden_states(ids, range(LAYERS - 1))
    for layer_id, states in enumerate(hooked):
        torch.testing.assert_close(states, reported[layer_id + 1], rtol=0, atol=1e-5)


@pytest.fixture
def empty_hybrid(tmp_path, capsys):
    model = build_empty(survey_target(str(save_family(tmp_path, "qwen3_5")), dtype="bfloat16"))
    capsys.readouterr()
    return model


def test_a_hybrid_target_without_its_kernels_is_told_to_be_slow(empty_hybrid, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    warn_of_slow_layers(empty_hybrid, "hybrid", device=torch.device("cuda"))
    told = capsys.readouterr().err
    assert told.startswith("hybrid: its layers of linear attention run about 1.4 times slower")
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(("device", "rank"), [("cpu", "0"), ("cuda", "1")])
def test_it_is_told_on_a_gpu_alone_and_by_one_of_many_workers(
    empty_hybrid, capsys, monkeypatch, device, rank
):
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setenv("RANK", rank)
    warn_of_slow_layers(empty_hybrid, "hybrid", device=torch.device(device))
    assert capsys.readouterr().err == ""


def test_a_target_without_linear_attention_has_nothing_to_miss(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    model = build_empty(survey_target(str(save_family(tmp_path, "qwen3")), dtype="bfloat16"))
    capsys.readouterr()
    warn_of_slow_layers(model, "dense", device=torch.device("cuda"))
    assert capsys.readouterr().err == ""


PLAIN_TORCH = """
import sys
sys.modules["fla"] = sys.modules["causal_conv1d"] = None
import torch
from families import LAYERS, load
folder, rows = sys.argv[1:3]
states = [load(folder).hidden_states(row[None], range(LAYERS)) for row in torch.load(rows)]
torch.save(states, rows)
"""


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # what fla says when it is imported is its own
@pytest.mark.parametrize("family", WITH_VISION)
def test_the_kernels_of_linear_attention_give_the_states_of_plain_torch(tmp_path, family):
    if why := why_no_fla():
        pytest.skip(f"needs flash-linear-attention: {why}")
    folder = save_family(
        tmp_path / family, family, linear_key_head_dim=32, linear_value_head_dim=32
    )
    rows = [some_ids(1, width, seed=width)[0] for width in (5, 66, 131, 67)]
    on_gpu = load_weights(survey_target(str(folder), dtype="float32"), device="cuda")
    together = on_gpu.hidden_states(pad_sequence(rows, batch_first=True), range(LAYERS))
    torch.save(rows, tmp_path / "rows.pt")
    # transformers chooses when it is imported; another process is needed to see it choose otherwise
    subprocess.run(
        [sys.executable, "-c", PLAIN_TORCH, folder, tmp_path / "rows.pt"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        check=True,
    )
    for index, alone in enumerate(torch.load(tmp_path / "rows.pt")):
        for found, wanted in zip(together, alone, strict=True):
            error = found[index, : len(rows[index])].cpu() - wanted[0]
            # The kernels multiply with the 10 bits of TF32; another token's state is off by 1.
            assert error.norm() / wanted.norm() < 1e-2
