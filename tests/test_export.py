"""An export is what an independent strict reader loads: names, shapes, bits, both spellings."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reference import read_export
from safetensors.torch import load_file, save_file
from test_loop import tiny_fit

from dflash_cache.errors import ConfigError
from dflash_cache.reader import CacheReader
from dflash_fit import loop, prepare
from dflash_fit.checkpoint import find_drafter
from dflash_fit.drafter import DFlashDraftModel
from dflash_fit.errors import DrafterError, RunFolderError
from dflash_fit.export import export_drafter, from_config, read_drafter, to_config


@pytest.fixture(scope="module")
def run(tiny_cache, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    loop.fit(tiny_fit(tiny_cache, out, max_steps=4, eval_every=2))
    return out


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("exports") / "drafter"
    export_drafter(find_drafter(run, checkpoint="last"), out)
    return out


def one_block(folder: Path, cache: Path) -> torch.Tensor:
    """Logits of slots 1.. of one block, by our model in fp32."""
    from dflash_fit.decode import DraftSession

    reader = CacheReader(cache)
    frozen = prepare.load_frozen(reader, dtype=torch.float32, device=torch.device("cpu"))
    drafter = read_drafter(folder, dtype=torch.float32, device=torch.device("cpu"))
    session = DraftSession(drafter, frozen)
    session.extend(reader.hidden(0, drafter.config.target_layer_ids)[:, :20])
    return session.logits(int(reader.tokens(0)[0][20]))


def test_an_independent_reader_loads_it_and_computes_the_same(exported, tiny_cache):
    reader = CacheReader(tiny_cache)
    model = read_export(exported)
    embedding, head = (tensor.float() for tensor in reader.frozen())
    states = reader.hidden(0, model.settings["target_layer_ids"])[:, :20]
    rows = model.block(states.float(), int(reader.tokens(0)[0][20]), embedding)
    torch.testing.assert_close(rows[1:] @ head.T, one_block(exported, tiny_cache))


def test_it_has_eleven_tensors_a_layer_and_three_without_prefix(exported):
    tensors = load_file(exported / "model.safetensors")
    assert len(tensors) == 11 * 2 + 3
    assert {"fc.weight", "hidden_norm.weight", "norm.weight"} < set(tensors)
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())


def test_it_holds_the_weights_of_the_checkpoint_rounded_once(run, exported):
    trained = load_file(find_drafter(run, checkpoint="last") / "model.safetensors")
    for name, tensor in load_file(exported / "model.safetensors").items():
        assert torch.equal(tensor, trained[name].bfloat16())


def test_what_servers_read_stands_where_each_of_them_looks(exported, tiny_cache):
    identity = CacheReader(tiny_cache).identity
    config = json.loads((exported / "config.json").read_text())
    assert config["block_size"] == config["dflash_config"]["block_size"] == 4
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert config["dflash_config"]["target_layer_ids"] == identity.target_layer_ids
    assert config["num_target_layers"] == identity.target_spec.num_layers
    assert config["vocab_size"] == identity.target_spec.vocab_size
    assert config["layer_types"] == ["full_attention"] * 2
    assert config["is_causal"] is config["dflash_config"]["causal"] is False
    assert config["sliding_window"] is None


def test_the_mask_token_written_is_the_one_that_was_trained(exported, tiny_cache):
    identity = CacheReader(tiny_cache).identity
    found = json.loads((exported / "config.json").read_text())["dflash_config"]["mask_token_id"]
    assert found == identity.tokenizer_spec.mask_token_id
    assert found < identity.target_spec.vocab_size
    assert found not in identity.tokenizer_spec.eos_token_ids
    reader = CacheReader(tiny_cache)
    assert not any((reader.tokens(i)[0] == found).any() for i in range(len(reader.located)))


def test_transformers_reads_the_configuration_as_qwen3(exported):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(exported)
    assert type(config).__name__ == "Qwen3Config"
    assert config.rope_parameters["rope_theta"] == 10_000
    assert config.head_dim == 8


def windowed(run: Path, **changes):
    config = read_drafter(run / "best", dtype=torch.float32, device=torch.device("cpu")).config
    return replace(config, **{"sliding_window": 8, "is_causal": None, **changes})


@pytest.mark.parametrize(
    ("changes", "causal"),
    [
        ({"layer_types": ("sliding_attention", "full_attention")}, None),
        ({"layer_types": ("sliding_attention",) * 2}, True),
        ({"layer_types": ("sliding_attention",) * 2, "is_causal": False}, False),
        ({"layer_types": ("sliding_attention", "full_attention"), "is_causal": True}, True),
    ],
)
def test_windows_and_causality_survive_the_round_trip(run, changes, causal):
    config = windowed(run, **changes)
    value = json.loads(json.dumps(to_config(config, dtype=torch.bfloat16)))
    assert value.get("is_causal") is causal
    assert (value["use_sliding_window"], value["sliding_window"]) == (True, 8)
    again = from_config(value, where="config.json")
    looks = [[c.look(i) for i in range(2)] for c in (config, again)]
    assert looks[0] == looks[1]


def test_the_nested_block_size_alone_is_enough_to_read(run):
    value = to_config(windowed(run), dtype=torch.bfloat16)
    del value["block_size"], value["rope_theta"], value["layer_types"]
    assert from_config(value, where="here").block_size == 4
    del value["rope_parameters"]
    with pytest.raises(DrafterError, match="rope_theta is missing"):
        from_config(value, where="here")


def test_a_nested_causal_counts_where_the_top_level_says_null(run):
    value = to_config(windowed(run), dtype=torch.bfloat16)
    value["is_causal"], value["dflash_config"]["causal"] = None, True
    assert from_config(value, where="here").is_causal is True


@pytest.mark.parametrize(
    ("place", "key", "setting"),
    [
        ("dflash_config", "use_swa", True),
        ("dflash_config", "shift_label", True),
        ("dflash_config", "output_multiplier", 0.196),
        ("dflash_config", "conv_kernel_size", 2),
        ("top", "final_logit_softcapping", 20.0),
        ("top", "sample_from_anchor", True),
    ],
)
def test_a_relative_with_other_mathematics_is_refused_by_name(run, place, key, setting):
    value = to_config(windowed(run), dtype=torch.bfloat16)
    (value if place == "top" else value[place])[key] = setting
    with pytest.raises(DrafterError, match=f"{key} = "):
        from_config(value, where="here")


def spoil(folder: Path, change) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("norm.weight"), r"missing \['norm.weight'\]"),
        (lambda t: t.update(extra=torch.zeros(1)), r"unexpected \['extra'\]"),
        (lambda t: t.update({"norm.weight": torch.ones(3)}), "wrong shape"),
    ],
)
def test_any_tensor_that_does_not_fit_is_refused(exported, tmp_path, change, message):
    folder = spoil(Path(shutil.copytree(exported, tmp_path / "copy")), change)
    with pytest.raises(DrafterError, match=message):
        read_drafter(folder, dtype=torch.float32, device=torch.device("cpu"))


def test_a_cut_weight_file_is_one_message(exported, tmp_path):
    folder = Path(shutil.copytree(exported, tmp_path / "copy"))
    payload = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(payload[:-10])
    with pytest.raises(DrafterError, match="cannot be read"):
        read_drafter(folder, dtype=torch.float32, device=torch.device("cpu"))


def test_another_architecture_is_refused(exported, tmp_path):
    folder = Path(shutil.copytree(exported, tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3Model"]}))
    with pytest.raises(DrafterError, match="want DFlashDraftModel"):
        read_drafter(folder, dtype=torch.float32, device=torch.device("cpu"))


def test_an_export_that_reads_back_differently_never_appears(run, tmp_path, monkeypatch):
    import dflash_fit.export as export

    real = export.save_file

    def lossy(tensors, path, **more):
        real({name: tensor * 1.5 for name, tensor in tensors.items()}, path, **more)

    monkeypatch.setattr(export, "save_file", lossy)
    with pytest.raises(DrafterError, match="other bits"):
        export_drafter(find_drafter(run), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_never_overwritten(run, exported):
    with pytest.raises(DrafterError, match="is there already"):
        export_drafter(find_drafter(run), exported)


def test_a_checkpoint_is_found_by_name(run):
    assert find_drafter(run, checkpoint="step_4").name == "step_00000004"
    assert find_drafter(run / "best") == run / "best"
    with pytest.raises(RunFolderError, match="no checkpoint 'step_3'"):
        find_drafter(run, checkpoint="step_3")
    with pytest.raises(RunFolderError, match="no such folder"):
        find_drafter(run / "nowhere")


def test_the_counts_of_the_published_27b_drafter_come_out():
    """58 tensors, 1,730,213,120 parameters: the size of the published file in bfloat16."""
    from dflash_fit.drafter import DrafterConfig
    from dflash_fit.export import expected_shapes

    config = DrafterConfig(
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=248320,
        num_target_layers=64,
        target_layer_ids=(1, 16, 31, 46, 61),
        block_size=16,
        mask_token_id=248070,
        rope_theta=1e7,
        rms_norm_eps=1e-6,
        max_position_embeddings=262144,
        layer_types=("sliding_attention",) * 4 + ("full_attention",),
        sliding_window=2048,
    )
    shapes = expected_shapes(config)
    assert len(shapes) == 58
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 1_730_213_120
    assert shapes["fc.weight"] == (5120, 25600)
    assert "is_causal" not in to_config(config, dtype=torch.bfloat16)


def test_a_mixture_of_causal_layers_that_no_key_can_say_is_refused(run):
    config = windowed(run, layer_types=("sliding_attention", "full_attention"))

    class Odd(type(config)):
        def look(self, layer):
            return replace(super().look(layer), causal=layer == 1)

    odd = Odd(**config.__dict__)
    with pytest.raises(ConfigError, match="no key says"):
        to_config(odd, dtype=torch.bfloat16)


def test_a_model_starts_from_the_reference_initialisation(run):
    config = read_drafter(run / "best", dtype=torch.float32, device=torch.device("cpu")).config
    model = DFlashDraftModel(config)
    model.initialize(torch.Generator().manual_seed(3))
    assert abs(float(model.fc.weight.detach().std()) - 0.02) < 0.002
    assert bool((model.norm.weight == 1).all())
