"""No more than is needed is read, nothing is twice in RAM, and weights that do not fit are refused.

What the weights have to be is told by `test_families`: those of plain `from_pretrained`.
"""

import gc
import json
import re
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from conftest import make_tokenizer
from families import LAYERS, add_tensors, load, save_family, some_ids
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, conversion_mapping

from dflash_cache import kernels, weights
from dflash_cache.config import BuildConfig
from dflash_cache.errors import ConfigError, TargetError
from dflash_cache.stored import StoredTensor
from dflash_cache.survey import survey_target
from dflash_cache.weights import build_empty, load_weights

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Path:
    return save_family(tmp_path_factory.mktemp("weights") / "qwen3", "qwen3")


@pytest.fixture
def folder(qwen3, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(qwen3, tmp_path / "target"))


def index_of(folder: Path) -> dict[str, str]:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def in_files(folder: Path, wanted: str) -> dict[str, str]:
    """Which file holds each of the tensors whose names match."""
    return {n: file for n, file in index_of(folder).items() if re.search(wanted, n)}


class Began(Exception):
    """The model would be built now."""


@pytest.mark.parametrize(("device", "current"), [("cuda:1", [torch.device("cuda:1")]), ("cpu", [])])
def test_a_target_on_another_gpu_makes_that_one_current(qwen3, monkeypatch, device, current):
    """Before anything is made: pinned memory and Triton's kernels go by it."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)

    def begins(survey):
        raise Began

    monkeypatch.setattr(weights, "build_empty", begins)
    with pytest.raises(Began):
        load_weights(survey_target(str(qwen3), dtype="float32"), device=device)
    assert chosen == current


# --- memory -------------------------------------------------------------------------------------

MEASURE = """
import gc, json, sys, threading, time
from dflash_cache.survey import survey_target
from dflash_cache.weights import load_weights

def ram():
    "MiB of this process that are not pages of files."
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("RssAnon"))

def watch():
    while not done:
        peak[0] = max(peak[0], ram())
        time.sleep(0.001)

peaks = []
for folder in sys.argv[1:]:
    survey = survey_target(folder, dtype="bfloat16")
    load_weights(survey, device="cpu", up_to=0)  # imports and caches of the first time
    gc.collect()
    peak, done, before = [0.0], [], ram()
    watcher = threading.Thread(target=watch)
    watcher.start()
    target = load_weights(survey, device="cpu")
    done.append(True)
    watcher.join()
    peaks.append(peak[0] - before)
print(json.dumps(peaks))
"""


def save_large(folder: Path, family: str, **more) -> float:
    """A target of zeros and some hundred MiB; returns how many."""
    config = AutoConfig.for_model(
        family,
        vocab_size=4096,
        hidden_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        **more,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    for weight in model.parameters():
        weight.data.zero_()
    model.save_pretrained(folder, max_shard_size="100MB")
    make_tokenizer().save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters()) * 2 / 2**20


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_weights_are_never_twice_in_ram(tmp_path):
    plain = save_large(tmp_path / "plain", "llama", intermediate_size=4096)
    experts = save_large(tmp_path / "experts", "qwen3_moe", **EXPERTS)
    assert min(plain, experts) > 250
    words = [sys.executable, "-c", MEASURE, tmp_path / "plain", tmp_path / "experts"]
    found = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout)
    # What is run as it is stored stays in the pages of the files, which all processes share.
    assert found[0] < 0.1 * plain
    # What has to be put together is the model's own memory, here on the CPU; beside it are the
    # parts of one layer, an eighth.
    assert 0.5 * experts < found[1] < 1.4 * experts


@pytest.mark.gpu
def test_on_a_gpu_nothing_is_left_in_ram_and_a_cut_target_takes_less(tmp_path):
    size = save_large(tmp_path, "qwen3_moe", **EXPERTS) * 2**20
    survey = survey_target(str(tmp_path), dtype="bfloat16")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    target = load_weights(survey, device="cuda")
    assert {weight.device.type for weight in target.model.state_dict().values()} == {"cuda"}
    assert torch.cuda.max_memory_allocated() - before < 1.4 * size
    target.keep_up_to(3)
    assert torch.cuda.memory_allocated() - before < 0.6 * size
    del target
    cut = load_weights(survey, device="cuda", up_to=3)
    assert torch.cuda.memory_allocated() - before < 0.6 * size
    assert cut.hidden_states(some_ids(1, 9), [3])[0].device.type == "cuda"


# --- only what is needed ------------------------------------------------------------------------


def test_files_of_layers_above_the_last_one_needed_may_even_be_lost(folder):
    ids, wanted = some_ids(1, 20), load(folder).hidden_states(some_ids(1, 20), [2])[0]
    needed = set(in_files(folder, r"embed_tokens|layers\.[012]\.").values())
    others = set(index_of(folder).values()) - needed
    assert others
    for file in others:
        (folder / file).unlink()
    assert torch.equal(load(folder, up_to=2).hidden_states(ids, [2])[0], wanted)
    with pytest.raises(TargetError, match="cannot be loaded"):
        load(folder)


def test_a_cut_target_has_no_head_and_no_final_state(qwen3):
    cut, ids = load(qwen3, up_to=2), some_ids(1, 9)
    assert not cut.is_whole
    with pytest.raises(AssertionError, match="head"):
        _ = cut.head
    for take in (cut.final_hidden, cut.logits, lambda ids: cut.hidden_and_final(ids, [1])):
        with pytest.raises(AssertionError, match="was cut"):
            take(ids)
    with pytest.raises(AssertionError):
        cut.hidden_states(ids, [3])


def test_up_to_the_last_layer_is_all_layers_and_nothing_behind_them(qwen3):
    cut = load(qwen3, up_to=LAYERS - 1)
    assert len(cut.layers) == LAYERS
    assert not cut.is_whole
    assert cut.model.get_output_embeddings() is None


@pytest.mark.parametrize("layer_id", [0, 3])
def test_what_lies_above_is_given_back_and_what_is_left_is_as_before(folder, layer_id):
    target, ids = load(folder), some_ids(2, 30)
    assert target.is_whole
    wanted, embedding = target.hidden_states(ids, range(layer_id + 1)), target.embedding.clone()
    kept = set(load(folder, up_to=layer_id).model.state_dict())
    held = {n: weakref.ref(w) for n, w in target.model.named_parameters()}
    target.keep_up_to(layer_id)
    gc.collect()
    assert {name for name, weight in held.items() if weight() is not None} == kept
    assert all(map(torch.equal, target.hidden_states(ids, range(layer_id + 1)), wanted))
    assert torch.equal(target.embedding, embedding)
    assert not target.is_whole
    with pytest.raises(AssertionError, match="head"):
        _ = target.head


def test_a_tied_head_stays_for_it_costs_nothing(tmp_path):
    target = load(save_family(tmp_path, "qwen3", tie_word_embeddings=True))
    target.keep_up_to(1)
    assert target.head.data_ptr() == target.embedding.data_ptr()
    assert not target.is_whole


def test_a_tied_target_is_cut_too(tmp_path):
    folder, ids = save_family(tmp_path, "qwen3", tie_word_embeddings=True), some_ids(1, 20)
    whole, cut = load(folder), load(folder, up_to=2)
    assert torch.equal(cut.hidden_states(ids, [2])[0], whole.hidden_states(ids, [2])[0])
    assert cut.spec == whole.spec


# --- files --------------------------------------------------------------------------------------


def as_one(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, which then holds no weights."""
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: t for file in files for name, t in load_file(file).items()}
    for file in [*files, folder / "model.safetensors.index.json"]:
        file.unlink()
    return tensors


def save_pickled(folder: Path, *, parts: int, mapped: bool) -> None:
    tensors = list(as_one(folder).items())
    if parts == 1:
        path = folder / "pytorch_model.bin"
        torch.save(dict(tensors), path, _use_new_zipfile_serialization=mapped)
        return
    names: dict[str, str] = {}
    for part in range(parts):
        file, own = f"pytorch_model-{part}.bin", dict(tensors[part::parts])
        torch.save(own, folder / file, _use_new_zipfile_serialization=mapped)
        names |= dict.fromkeys(own, file)
    index = {"metadata": {}, "weight_map": names}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(("parts", "mapped"), [(1, True), (1, False), (3, True)])
@pytest.mark.parametrize("up_to", [None, 2])
def test_pickled_weights_are_the_same_weights(qwen3, folder, parts, mapped, up_to):
    save_pickled(folder, parts=parts, mapped=mapped)
    found, wanted = load(folder, up_to=up_to).model, load(qwen3, up_to=up_to).model
    assert found.state_dict().keys() == wanted.state_dict().keys()
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


def test_other_copies_of_the_weights_in_the_folder_are_not_taken(folder):
    """As in folders that keep the form of the training code too."""
    wanted = load(folder).embedding.clone()
    tensors = {name: torch.zeros(2, 2) for name in index_of(folder)}
    save_file(tensors, folder / "consolidated.safetensors")
    assert torch.equal(load(folder).embedding, wanted)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_refused(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(TargetError, match=r"index\.json: want an index with a weight_map"):
        load(folder)


def test_weights_under_names_that_nobody_knows_are_not_looked_for(folder):
    save_file(as_one(folder), folder / "weights.safetensors")
    with pytest.raises(TargetError, match=r"found no model\.safetensors, pytorch_model\.bin or"):
        load(folder)


# --- weights of another model -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        (r"layers\.2\.mlp\.experts\.3\.up_proj", r"layers\.2\.mlp\.experts.* put together"),
        (r"layers\.2\.mlp\.experts\.3\.", "weights have other shapes than config.json says"),
        (r"layers\.2\.mlp\.experts\.", "weights are missing"),
    ],
)
def test_experts_that_are_missing_are_refused(tmp_path, lost, told):
    folder = save_family(tmp_path / "moe", "qwen3_moe")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for name in in_files(folder, lost):
        del index["weight_map"][name]
    path.write_text(json.dumps(index))
    with pytest.raises(TargetError, match=told):
        load(folder)


def test_a_bias_that_the_config_does_not_know_is_refused(folder):
    add_tensors(folder, {"model.layers.1.self_attn.q_proj.bias": torch.ones(32)})
    told = r"config.json knows nothing of weights .*model\.layers\.1\.self_attn\.q_proj\.bias"
    with pytest.raises(TargetError, match=told):
        load(folder)
    with pytest.raises(TargetError, match=told):
        load(folder, up_to=2)


def test_a_config_of_fewer_layers_than_the_weights_is_refused(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["num_hidden_layers"] = LAYERS - 1
    config["layer_types"] = config["layer_types"][:-1]
    path.write_text(json.dumps(config))
    with pytest.raises(TargetError, match=rf"knows nothing of weights .*layers\.{LAYERS - 1}\."):
        load(folder)


def test_frequencies_that_old_versions_stored_are_no_strangers(folder):
    add_tensors(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert load(folder).is_whole


def test_quantised_weights_are_refused_before_the_rows_are_read(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(TargetError, match=r"its weights are quantised \(fp8\)"):
        survey_target(str(folder), dtype="bfloat16")


def test_files_without_weights_are_refused(folder):
    as_one(folder)
    save_file({}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match="weights are missing"):
        load(folder)


@pytest.mark.parametrize("part", ["embed_tokens.weight", "experts.2.up_proj.weight"])
def test_a_target_larger_than_its_gpu_is_told_to_be_shared(tmp_path, monkeypatch, part):
    """The error of a full GPU, wherever it comes while the weights are read."""
    whole = StoredTensor.__getitem__

    def read(self, where):
        if self.name.endswith(part):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return whole(self, where)

    monkeypatch.setattr(StoredTensor, "__getitem__", read)
    told = r"does not fit on cpu \(.*out of memory\. Tried .* --tensor-parallel"
    with pytest.raises(TargetError, match=told):
        load(save_family(tmp_path, "qwen3_moe"))


# --- another transformers -----------------------------------------------------------------------


@pytest.mark.parametrize("up_to", [None, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_where_transformers_changed_it_loads_through_ram_and_says_so(
    tmp_path, monkeypatch, capsys, up_to, tied
):
    folder = save_family(tmp_path, "qwen3_moe", tie_word_embeddings=tied)
    wanted = load(folder, up_to=up_to)
    monkeypatch.delattr(conversion_mapping, "get_model_conversion_mapping")
    capsys.readouterr()
    found = load(folder, up_to=up_to)
    assert "the weights go through RAM, all of them" in capsys.readouterr().err
    assert found.model.state_dict().keys() == wanted.model.state_dict().keys()
    for name, tensor in wanted.model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], tensor), name
    ids = some_ids(1, 20)
    assert torch.equal(found.hidden_states(ids, [2])[0], wanted.hidden_states(ids, [2])[0])


def test_the_transformers_that_is_here_is_one_that_we_know():
    assert weights.transformers_can_stream()


# --- attention ----------------------------------------------------------------------------------


@pytest.fixture
def empty(qwen3):
    return build_empty(survey_target(str(qwen3), dtype="bfloat16"))


@pytest.fixture
def attention_of(empty, monkeypatch):
    """The choice for a family, machine and precision; nothing is installed, only said to be."""
    monkeypatch.setattr(
        empty, "set_attn_implementation", lambda n: setattr(empty.config, "_attn_implementation", n)
    )

    def choose(wanted: str, *, device=GPU, dtype="bfloat16", installed=True) -> str:
        monkeypatch.setattr(kernels, "has_flash_attention", lambda: installed)
        kernels.choose_attention(empty, wanted, device=device, dtype=dtype)
        return empty.config._attn_implementation

    return choose


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        ({}, "flash_attention_2"),
        ({"installed": False}, "sdpa"),
        ({"device": CPU}, "sdpa"),
        ({"dtype": "float32"}, "sdpa"),
    ],
)
def test_auto_takes_flash_attention_where_all_of_it_is_there(attention_of, there, chosen):
    assert attention_of("auto", **there) == chosen


def test_auto_asks_what_the_family_has(attention_of, empty, monkeypatch):
    monkeypatch.setattr(type(empty), "_supports_flash_attn", False)
    assert attention_of("auto") == "sdpa"
    monkeypatch.setattr(type(empty), "_supports_sdpa", False)
    assert attention_of("auto") == "eager"
    with pytest.raises(ConfigError, match="--target-attention sdpa: Qwen3ForCausalLM has only"):
        attention_of("sdpa")


@pytest.mark.parametrize("wanted", ["sdpa", "eager"])
def test_what_is_asked_for_is_taken(qwen3, wanted):
    target = load(qwen3, attention=wanted)
    assert target.attention == wanted
    ids = some_ids(2, 20)
    for found, auto in zip(
        target.hidden_states(ids, range(LAYERS)),
        load(qwen3).hidden_states(ids, range(LAYERS)),
        strict=True,
    ):
        torch.testing.assert_close(found, auto, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ({"device": CPU}, "wants a GPU; use sdpa"),
        ({"dtype": "float32"}, "wants --target-dtype bfloat16; use sdpa"),
        ({"installed": False}, "wants the package flash-attn; use sdpa"),
    ],
)
def test_flash_attention_where_it_cannot_run_is_refused(attention_of, there, told):
    with pytest.raises(ConfigError, match=f"--target-attention flash_attention_2: {told}"):
        attention_of("flash_attention_2", **there)


def test_an_attention_of_no_name_is_refused(tmp_path, attention_of):
    with pytest.raises(ConfigError, match="--target-attention flash: want auto, sdpa, eager"):
        BuildConfig(target="t", data="d", out=tmp_path, target_attention="flash")
    with pytest.raises(ConfigError, match="--target-attention flash: want auto"):
        attention_of("flash")
