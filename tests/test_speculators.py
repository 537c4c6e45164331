"""The speculators format and back: not one bit changes, and layers are counted one higher."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from drafter_folders import FOR_TINY, SLIDING_FOR_TINY, random_folder
from safetensors.torch import load_file

from dflash_fit import export as exporting
from dflash_fit.config import ExportConfig
from dflash_fit.drafter import DrafterConfig
from dflash_fit.errors import DrafterError
from dflash_fit.export import export
from dflash_fit.folder import from_config
from dflash_fit.speculators import from_speculators, to_speculators

ALL_SLIDING = SLIDING_FOR_TINY | {"layer_types": ("sliding_attention",) * 2}
FREE = SLIDING_FOR_TINY | {"is_causal": False}
LOOKS = {
    "full": (FOR_TINY, True),
    "sliding, then full, none causal": (FREE, True),
    "all sliding and causal": (ALL_SLIDING, False),
    "all sliding, none causal": (ALL_SLIDING | {"is_causal": False}, True),
}
every_look = pytest.mark.parametrize(("settings", "non_causal"), LOOKS.values(), ids=LOOKS.keys())


@every_look
def test_there_and_back_changes_no_bit(tmp_path, settings, non_causal):
    source = random_folder(tmp_path / "source", settings)
    export(ExportConfig(run=source, out=tmp_path / "first"))
    there = tmp_path / "speculators"
    export(ExportConfig(run=tmp_path / "first", out=there, format="speculators"))
    export(ExportConfig(run=there, out=tmp_path / "back"))
    for name in ("config.json", "model.safetensors", "training.json", "dflash.py"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()
    value = json.loads((there / "config.json").read_text())
    assert value["sliding_window_non_causal"] is non_causal
    # vLLM makes it `dflash_config.causal`, which it takes for every layer.
    config = DrafterConfig(**settings)
    assert {config.look(i).causal for i in range(2)} == {not non_causal}


@pytest.fixture
def written(tmp_path) -> Path:
    source = random_folder(tmp_path / "source", FREE)
    export(ExportConfig(run=source, out=tmp_path / "out", format="speculators"))
    return tmp_path / "out"


def test_it_says_what_vllm_reads(written):
    value = json.loads((written / "config.json").read_text())
    assert value["speculators_model_type"] == "dflash"
    assert value["aux_hidden_state_layer_ids"] == [2, 7]  # layers 1 and 6
    assert value["mask_token_id"] == 307
    plan = value["speculators_config"]
    assert plan["algorithm"] == "dflash"
    assert plan["proposal_methods"][0]["speculative_tokens"] == value["block_size"] - 1 == 3
    assert value["sample_from_anchor"] is False
    nested = value["transformer_layer_config"]
    assert nested["layer_types"] == ["sliding_attention", "full_attention"]
    assert (nested["sliding_window"], nested["use_sliding_window"]) == (6, True)
    assert nested["rope_parameters"]["rope_theta"] == 10_000
    assert value["draft_vocab_size"] == nested["vocab_size"] == 310
    assert not (written / "dflash.py").exists()
    assert "VLLM_USE_V2_MODEL_RUNNER" in (written / "README.md").read_text()


def test_transformers_builds_the_nested_configuration(written):
    from transformers import Qwen3Config

    nested = json.loads((written / "config.json").read_text())["transformer_layer_config"]
    config = Qwen3Config(**nested)
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert config.sliding_window == 6
    assert config.head_dim == 8


def test_its_tensors_have_the_names_of_the_reference(written):
    assert len(load_file(written / "model.safetensors")) == 11 * 2 + 3


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        ("aux_hidden_state_layer_ids", [1, 6]),
        ("mask_token_id", 3),
        ("block_size", 5),
        ("draft_vocab_size", 32),
        ("sliding_window_non_causal", False),
        ("speculators_model_type", "dspark"),
        ("auto_map", {"AutoModel": "dflash.DFlashDraftModel"}),
        ("architectures", ["Qwen3DSparkModel"]),
        ("num_target_layers", 9),
        ("sample_from_anchor", True),
        ("target_hidden_size", 64),
        ("tie_word_embeddings", True),
        ("dtype", "float32"),
        ("transformer_layer_config.attention_bias", True),
        ("speculators_config.algorithm", "eagle3"),
    ],
)
def test_a_wrong_value_on_disk_is_found(tmp_path, monkeypatch, key, setting):
    real = exporting.config_file

    def spoilt(*given):
        made = real(*given)
        place, _, name = key.rpartition(".")
        (made[place] if place else made)[name] = setting
        return made

    monkeypatch.setattr(exporting, "config_file", spoilt)
    source = random_folder(tmp_path / "source", FREE)
    with pytest.raises(DrafterError, match="reads back as"):
        export(ExportConfig(run=source, out=tmp_path / "out", format="speculators"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (SLIDING_FOR_TINY, "one switch for all layers"),
        (SLIDING_FOR_TINY | {"is_causal": True}, "full layers that are causal"),
        (FOR_TINY | {"is_causal": True}, "full layers that are causal"),
    ],
)
def test_causality_that_vllm_would_read_otherwise_is_refused(tmp_path, settings, message):
    source = random_folder(tmp_path / "source", settings)
    with pytest.raises(DrafterError, match=message):
        export(ExportConfig(run=source, out=tmp_path / "out", format="speculators"))
    assert not (tmp_path / "out").exists()


def test_a_file_that_does_not_know_the_layers_of_its_target_needs_them_said(written, tmp_path):
    folder = Path(shutil.copytree(written, tmp_path / "copy"))
    value = json.loads((folder / "config.json").read_text())
    del value["num_target_layers"]
    (folder / "config.json").write_text(json.dumps(value))
    with pytest.raises(DrafterError, match="does not say how many layers the target has"):
        export(ExportConfig(run=folder, out=tmp_path / "native"))


def spoken() -> dict:
    return to_speculators(DrafterConfig(**FREE), dtype=torch.bfloat16, target="t")


def native(value: dict) -> DrafterConfig:
    return from_config(from_speculators(value, where="here", num_target_layers=8), where="here")


def test_windows_at_the_top_of_older_files_count():
    value = spoken()
    nested = value["transformer_layer_config"]
    for name in ("layer_types", "sliding_window", "use_sliding_window"):
        value[name] = nested.pop(name)
    assert native(value) == DrafterConfig(**FREE)


def test_a_switch_that_is_off_leaves_full_layers_free():
    config = native(spoken() | {"sliding_window_non_causal": False})
    assert config == DrafterConfig(**SLIDING_FOR_TINY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aux_hidden_state_layer_ids": [0, 7]}, "0 is the target's embedding"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is missing"),
        ({"aux_hidden_state_layer_ids": []}, "target_layer_ids = "),
        ({"aux_hidden_state_layer_ids": [2, 9]}, "target_layer_ids = .* want some from 0 to 7"),
        ({"sliding_window_non_causal": None}, "sliding_window_non_causal is missing"),
        ({"mask_token_id": None}, "mask_token_id is missing"),
        ({"draft_vocab_size": 32}, "drafts over 32 tokens of 310"),
        ({"target_hidden_size": 64}, "its target has 64 channels"),
        ({"block_size": 3}, "speculative_tokens = 3 = block_size: its labels are shifted"),
        ({"speculators_model_type": "dspark"}, "speculators_model_type = dspark, want dflash"),
    ],
)
def test_what_is_no_plain_drafter_is_refused_with_the_reason(changes, message):
    with pytest.raises(DrafterError, match=message):
        native({**spoken(), **changes})
