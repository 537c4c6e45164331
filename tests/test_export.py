"""An export is what an independent strict reader loads: names, shapes, bits, both spellings."""

import ast
import json
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from drafter_folders import random_folder
from reference import read_export, small
from safetensors.torch import load_file, save_file
from test_loop import tiny_fit
from tiny_targets import make_target

from dflash_cache.errors import ConfigError
from dflash_cache.reader import CacheReader
from dflash_cli.main import main
from dflash_fit import export as exporting
from dflash_fit import loop, prepare
from dflash_fit.checkpoint import find_drafter
from dflash_fit.config import ExportConfig
from dflash_fit.drafter import DFlashDraftModel, DrafterConfig
from dflash_fit.errors import DrafterError, RunFolderError
from dflash_fit.export import export
from dflash_fit.folder import expected_shapes, from_config, read_drafter, to_config
from dflash_fit.sound import OWN

ALONE = Path(__file__).parent / "decode_alone.py"


@pytest.fixture(scope="module")
def run(tiny_cache, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    loop.fit(tiny_fit(tiny_cache, out, max_steps=4, eval_every=2))
    return out


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("exports") / "drafter"
    export(ExportConfig(run=run, out=out, checkpoint="last"))
    return out


def one_block(folder: Path, cache: Path) -> torch.Tensor:
    """Logits of slots 1.. of one block, by our model in fp32."""
    from dflash_fit.drafts import DraftContext, block_logits

    reader = CacheReader(cache)
    frozen = prepare.load_frozen(reader, dtype=torch.float32, device=torch.device("cpu"))
    drafter = read_drafter(folder, dtype=torch.float32, device=torch.device("cpu"))
    context = DraftContext(drafter, frozen)
    context.extend(reader.hidden(0, drafter.config.target_layer_ids)[:, :20])
    return block_logits([context], torch.tensor([int(reader.tokens(0)[0][20])]))[0]


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
        ("top", "sample_from_anchor", 1),
        ("top", "final_logit_softcapping", 1),
        ("dflash_config", "selector_rank", 1),
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


def test_an_existing_folder_is_never_overwritten(run, exported):
    with pytest.raises(DrafterError, match="is there already"):
        export(ExportConfig(run=run, out=exported))


@pytest.mark.parametrize("name", ["file/inner", "file", "here", "."])
def test_a_place_that_cannot_be_written_is_one_message(exported, tmp_path, monkeypatch, name):
    (tmp_path / "file").touch()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    out = tmp_path / name if name != "." else Path()
    with pytest.raises(DrafterError, match="give --out a new folder"):
        export(ExportConfig(run=exported, out=out))


def test_a_link_to_an_empty_folder_is_followed(exported, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    export(ExportConfig(run=exported, out=tmp_path / "link"))
    assert (tmp_path / "empty" / "model.safetensors").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "link"]


def test_a_checkpoint_of_what_is_no_run_is_refused(run, exported):
    for folder in (exported, find_drafter(run)):
        with pytest.raises(RunFolderError, match="one drafter and no run"):
            find_drafter(folder, checkpoint="last")


def test_a_run_that_has_saved_nothing_yet_says_so(run, tmp_path):
    shutil.copy(run / "config.json", tmp_path)
    with pytest.raises(RunFolderError, match="no checkpoint yet"):
        find_drafter(tmp_path)


def test_a_checkpoint_is_found_by_name(run):
    assert find_drafter(run, checkpoint="step_4").name == "step_00000004"
    assert find_drafter(run / "best") == run / "best"
    with pytest.raises(RunFolderError, match="no checkpoint 'step_3'"):
        find_drafter(run, checkpoint="step_3")
    with pytest.raises(RunFolderError, match="no such folder"):
        find_drafter(run / "nowhere")


def test_the_counts_of_the_published_27b_drafter_come_out():
    """58 tensors, 1,730,213,120 parameters: the size of the published file in bfloat16."""
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


# --- the check behind the writing ---------------------------------------------------------------


def spoilt_tensors(change):
    """A writer that stores something else than it was given."""
    real = exporting.write_weights

    def write(path, tensors, **more):
        changed = dict(tensors)
        change(changed)
        real(path, changed, **more)

    return write


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"fc.weight": t["fc.weight"] * 1.5}), "fc.weight reads back as other"),
        (lambda t: t.pop("norm.weight"), "shape of norm.weight reads back as None"),
        (lambda t: t.update(extra=torch.zeros(1)), "shape of extra reads back as"),
        (lambda t: t.update({"norm.weight": torch.ones(3)}), "shape of norm.weight reads back as"),
        (lambda t: t.update({"norm.weight": torch.full((32,), torch.inf)}), "are not finite"),
    ],
    ids=["bits", "missing", "unexpected", "shape", "infinite"],
)
def test_wrong_tensors_on_disk_are_found_and_the_folder_never_appears(
    run, tmp_path, monkeypatch, change, message
):
    monkeypatch.setattr(exporting, "write_weights", spoilt_tensors(change))
    with pytest.raises(DrafterError, match=message):
        export(ExportConfig(run=run, out=tmp_path / "out"))
    assert not list(tmp_path.iterdir())


def test_tensors_of_another_dtype_on_disk_are_found(run, tmp_path, monkeypatch):
    real = exporting.write_weights
    monkeypatch.setattr(
        exporting, "write_weights", lambda path, t, dtype: real(path, t, dtype=torch.float32)
    )
    with pytest.raises(DrafterError, match=r"dtype of .* reads back as torch.float32"):
        export(ExportConfig(run=run, out=tmp_path / "out"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["DFlash2DraftModel"]),
        ("hidden_size", 64),
        ("num_hidden_layers", 3),
        ("num_target_layers", 2),
        ("vocab_size", 5),
        ("rms_norm_eps", 1e-3),
        ("block_size", 5),
        ("dflash_config.block_size", 5),
        ("dflash_config.mask_token_id", 1),
        ("dflash_config.target_layer_ids", [2, 4, 6]),
        ("rope_theta", 1e6),
        ("rope_scaling", {"type": "yarn"}),
        ("rope_parameters", {"rope_theta": 1e6, "rope_type": "default"}),
        ("dtype", "float32"),
        ("torch_dtype", "float16"),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("use_sliding_window", True),
        ("sliding_window", 8),
        ("is_causal", True),
        ("auto_map", {"AutoModel": "modeling.Other"}),
        ("attention_bias", True),
        ("tie_word_embeddings", True),
        ("dflash_config.causal", True),
    ],
)
def test_a_wrong_value_in_config_json_is_found_in_every_place(
    run, tmp_path, monkeypatch, key, value
):
    real = exporting.config_file

    def spoilt(*given):
        made = real(*given)
        place = made["dflash_config"] if "." in key else made
        place[key.rpartition(".")[2]] = value
        return made

    monkeypatch.setattr(exporting, "config_file", spoilt)
    with pytest.raises(DrafterError, match="reads back as"):
        export(ExportConfig(run=run, out=tmp_path / "out"))
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_with_values_that_are_not_finite_is_not_exported(exported, tmp_path):
    folder = spoil(
        Path(shutil.copytree(exported, tmp_path / "copy")),
        lambda t: t.update({"norm.weight": torch.full((32,), torch.nan).bfloat16()}),
    )
    with pytest.raises(DrafterError, match=r"norm.weight holds values that are not finite"):
        export(ExportConfig(run=folder, out=tmp_path / "out"))


def forget_entries(checkpoint):
    """As checkpoints were before they had checksums: whoever changed one then was not noticed."""
    path = checkpoint / "state.json"
    state = json.loads(path.read_text())
    kept = {name: value for name, value in state.items() if name not in OWN}
    path.write_text(json.dumps(kept))


def test_a_mask_token_that_ends_text_is_not_served(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run", symlinks=True))
    path = find_drafter(copy, checkpoint="last") / "config.json"
    forget_entries(path.parent)
    config = json.loads(path.read_text())
    config["dflash_config"]["mask_token_id"] = 2  # <|im_end|>
    path.write_text(json.dumps(config))
    with pytest.raises(DrafterError, match=r"its mask token cannot be served .*end or padding"):
        export(ExportConfig(run=copy, out=tmp_path / "out", checkpoint="last"))


# --- for whom -----------------------------------------------------------------------------------


def test_a_folder_for_all_has_code_and_one_for_a_server_has_none(run, exported, tmp_path):
    assert (exported / "dflash.py").is_file()
    assert json.loads((exported / "config.json").read_text())["auto_map"] == {
        "AutoModel": "dflash.DFlashDraftModel"
    }
    for server in ("sglang", "vllm"):
        out = tmp_path / server
        result = CliRunner().invoke(
            main, ["export", str(run), "--out", str(out), "--for", server, "--json"]
        )
        assert json.loads(result.stdout)["for"] == server
        assert {p.name for p in out.iterdir()} == {
            *("config.json", "model.safetensors", "training.json", "README.md")
        }
        assert "auto_map" not in json.loads((out / "config.json").read_text())


def test_for_may_stand_in_a_file_of_options(run, tmp_path):
    file = tmp_path / "export.toml"
    file.write_text(f'out = "{tmp_path / "out"}"\nfor = "vllm"\n')
    result = CliRunner().invoke(main, ["export", str(run), "--config", str(file), "--json"])
    assert json.loads(result.stdout)["for"] == "vllm"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"for_": "tensorrt"}, "--for tensorrt: want all or transformers or sglang or vllm"),
        ({"format": "gguf"}, "--format gguf: want dflash or speculators"),
        ({"format": "speculators", "for_": "sglang"}, "only vLLM reads that format"),
    ],
)
def test_an_export_that_nobody_could_load_is_refused(options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        ExportConfig(run=tmp_path, out=tmp_path / "out", **options)


# --- the code in the folder ---------------------------------------------------------------------


def test_the_code_stands_alone_and_an_installed_package_has_it():
    path = files("dflash_fit.serving") / "dflash.py"
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert "dflash_fit.serving" in project["tool"]["setuptools"]["packages"]
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            modules.add(node.module.split(".")[0])
    assert modules - sys.stdlib_module_names == {"torch", "transformers"}


PAIRS = {
    "llama": ("full_attention",) * 2,
    "qwen3 sliding": ("sliding_attention", "full_attention"),
    "qwen3.5 hybrid": ("sliding_attention", "sliding_attention"),
}


def settings_for(layer_types):
    return small(
        vocab_size=48,
        mask_token_id=47,
        num_target_layers=4,
        target_layer_ids=(0, 2),
        layer_types=layer_types,
        sliding_window=5 if "sliding_attention" in layer_types else None,
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What each target says with a drafter of its own, in a process without our packages."""
    root = tmp_path_factory.mktemp("alone")
    words = []
    for number, (name, layer_types) in enumerate(PAIRS.items()):
        drafter, target = root / f"drafter{number}", root / f"target{number}"
        source = random_folder(root / f"source{number}", settings_for(layer_types))
        export(ExportConfig(run=source, out=drafter, for_="transformers"))
        make_target(name).model.save_pretrained(target)
        words += [str(drafter), str(target)]
    done = subprocess.run(
        [sys.executable, "-P", str(ALONE), *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(root / "modules")},
    )
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout.splitlines()[-1])
    return {name: (root / f"drafter{n}", reports[n]) for n, name in enumerate(PAIRS)}


every_pair = pytest.mark.parametrize("name", PAIRS)


@every_pair
def test_plain_transformers_decodes_the_tokens_of_plain_greedy_decoding(alone, name):
    report = alone[name][1]
    assert report["drafted"] == report["rejected"] == report["text"]
    assert sum(report["lengths"]) == sum(report["kept"]) == 19  # the first is the prompt's


@every_pair
def test_every_number_of_rejected_drafts_is_taken_back(alone, name):
    # 0, 1, 2, 3 right drafts in turn, and the target's own token behind them (with one more where
    # a wrong draft happens to be right).
    kept = alone[name][1]["kept"]
    assert all(
        length >= wanted for length, wanted in zip(kept[:-1], [1, 2, 3, 4] * 5, strict=False)
    )
    assert set(kept) >= {1, 2, 3, 4}


@every_pair
def test_its_drafts_are_those_of_an_independent_drafter(alone, name):
    folder, report = alone[name]
    model, target = read_export(folder), make_target(name)
    text = torch.tensor(report["text"])
    embedding, head = target.embedding.float(), target.head.float()
    states = torch.stack(target.hidden_states(text[None], model.settings["target_layer_ids"]))
    states = states[:, 0].bfloat16().float()
    for at, draft in report["blocks"]:
        rows = model.block(states[:, :at], int(text[at]), embedding)
        assert (rows[1:] @ head.T).argmax(dim=-1).tolist() == draft


@every_pair
def test_it_ends_with_a_stop_token_and_at_the_number_of_new_tokens(alone, name):
    report = alone[name][1]
    answer = report["text"][11:]
    assert report["stopped"] == report["text"][: 11 + answer.index(report["stop"]) + 1]
    assert len(report["text"]) == 31
    assert report["sampled"][:11] == report["text"][:11]
    assert len(report["sampled"]) == 16


def test_a_sampled_token_has_the_probability_that_the_target_gives_it():
    space = {}
    exec(compile(exporting.code(), "dflash.py", "exec"), space)
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    torch.manual_seed(0)
    drawn = space["choose"](logits.expand(20_000, -1), 0.7)
    found = torch.bincount(drawn, minlength=4) / 20_000
    torch.testing.assert_close(found, (logits[0] / 0.7).softmax(dim=-1), atol=0.01, rtol=0)
    assert space["choose"](logits, 0.0).tolist() == [2]


# --- the model card -----------------------------------------------------------------------------


def test_the_card_says_what_was_measured_at_this_step_and_what_it_was_trained_on(
    run, exported, tiny_cache
):
    card = (exported / "README.md").read_text()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "eval"][-1]
    assert f"| acceptance length, micro | {last['acceptance_length']:.3f} |" in card
    assert f"| acceptance length, macro | {last['acceptance_length_macro']:.3f} |" in card
    first = f"| 1 | {last['slot_accuracy'][0]:.3f} | {last['per_position'][0]:.3f} |"
    assert first in card
    identity = CacheReader(tiny_cache).identity
    for known in (identity.fingerprint, identity.data_sha256, identity.target["weights_sha256"]):
        assert known in card
    assert "| steps | 4 |" in card
    assert "| lr | 0.005 |" in card
    assert "--speculative-num-draft-tokens 4" in card
    assert '"num_speculative_tokens": 3' in card
    assert "spec_generate(" in card
    assert f"| torch | {torch.__version__} |" in card
    assert str(run) not in card  # no paths of this machine


def test_the_card_of_a_drafter_of_unknown_origin_invents_nothing(tmp_path):
    source = random_folder(tmp_path / "source", settings_for(PAIRS["qwen3 sliding"]))
    export(ExportConfig(run=source, out=tmp_path / "out", for_="vllm"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Not measured" in card
    assert "| steps | not on record |" in card
    assert "| data, SHA-256 | not on record |" in card
    assert "was not checked that the mask token" in card
    assert "vllm serve TARGET" in card
    assert "VLLM_USE_V2_MODEL_RUNNER=1" in card  # its layers are of both kinds
    assert "sglang" not in card
    assert "spec_generate" not in card
    assert "library_name" not in card  # transformers has no class for it


def test_a_drafter_within_a_run_that_is_no_checkpoint_has_none_of_its_record(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run", symlinks=True))
    source = random_folder(copy / "elsewhere" / "drafter", settings_for(PAIRS["llama"]))
    export(ExportConfig(run=source, out=tmp_path / "out"))
    assert "Options: not on record." in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(("is_causal", "told"), [(None, False), (False, True)])
def test_the_card_says_where_sglang_may_read_another_causality(tmp_path, is_causal, told):
    settings = settings_for(PAIRS["qwen3 sliding"]) | {"is_causal": is_causal}
    export(ExportConfig(run=random_folder(tmp_path / "source", settings), out=tmp_path / "out"))
    assert ("not causal by their kind" in (tmp_path / "out" / "README.md").read_text()) is told


def test_an_export_of_an_export_knows_what_the_first_one_knew(exported, tmp_path):
    export(ExportConfig(run=exported, out=tmp_path / "again"))
    cards = [(f / "README.md").read_text().split("\n# ")[1] for f in (exported, tmp_path / "again")]
    assert cards[0].partition("\n")[2] == cards[1].partition("\n")[2]
    for name in ("config.json", "model.safetensors", "training.json", "dflash.py"):
        assert (tmp_path / "again" / name).read_bytes() == (exported / name).read_bytes()
