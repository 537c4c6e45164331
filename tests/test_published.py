"""Published drafters under the names of every project: the same weights, or a reason."""

import copy
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafter_folders import (
    FOR_TINY,
    NAMINGS,
    SLIDING_FOR_TINY,
    as_speculators,
    random_folder,
    read,
    renamed,
    sharded,
    write,
)
from safetensors.torch import load_file
from test_loop import final_state, losses, prepared, tiny_fit

from dflash_cache.reader import CacheReader
from dflash_fit import loop
from dflash_fit.checkpoint import find_drafter
from dflash_fit.config import EvalConfig, ExportConfig
from dflash_fit.drafter import DrafterConfig
from dflash_fit.errors import DrafterError, FitError, RunFolderError
from dflash_fit.evaluate import evaluate_drafter
from dflash_fit.export import export
from dflash_fit.folder import read_drafter, read_training
from dflash_fit.published import load_drafter, read_published

CPU = torch.device("cpu")
# The tiny cache keeps layers 1, 3 and 5.
SETTINGS = FOR_TINY | {"target_layer_ids": (1, 3, 5)}
SLIDING = SLIDING_FOR_TINY | {"target_layer_ids": (1, 3, 5)}


@pytest.fixture(scope="module")
def run(tiny_cache, tmp_path_factory) -> Path:
    """A run in bfloat16, so that an export has the very bits of its checkpoint."""
    out = tmp_path_factory.mktemp("runs") / "run"
    loop.fit(tiny_fit(tiny_cache, out, max_steps=4, precision="bf16"))
    return out


@pytest.fixture(scope="module")
def native(run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("exports") / "drafter"
    export(ExportConfig(run=run, out=out, checkpoint="last", for_="sglang"))
    return out


@pytest.fixture(scope="module")
def frozen(tiny_cache) -> dict[str, torch.Tensor]:
    """The target's embedding and head as speculators would copy them."""
    embedding, head = CacheReader(tiny_cache).frozen()
    return {
        "embed_tokens.weight": embedding.bfloat16().clone(),
        "lm_head.weight": head.bfloat16().clone(),
    }


@pytest.fixture(scope="module")
def folders(native, frozen, tmp_path_factory) -> dict[str, Path]:
    """One drafter under every naming."""
    root = tmp_path_factory.mktemp("namings")
    drafter = read_drafter(native, dtype=torch.float32, device=CPU).config
    return {
        **{name: renamed(native, root / f"{n}", name) for n, name in enumerate(NAMINGS)},
        "sharded": sharded(native, root / "sharded"),
        "speculators": as_speculators(native, root / "speculators", drafter, {}),
        "speculators with copies": as_speculators(native, root / "copies", drafter, frozen),
    }


every_naming = pytest.mark.parametrize(
    "name", [*NAMINGS, "sharded", "speculators", "speculators with copies"]
)


@every_naming
def test_the_weights_and_the_shape_are_those_of_the_drafter(folders, native, name):
    found = read_published(folders[name], num_target_layers=8)
    wanted = read_drafter(native, dtype=torch.bfloat16, device=CPU)
    assert found.config == wanted.config
    assert found.tensors.keys() == wanted.state_dict().keys()
    for tensor, value in wanted.state_dict().items():
        assert torch.equal(found.tensors[tensor], value)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("AngelSlim", "AngelSlim"), ("NeMo Automodel", "NeMo Automodel"), ("speculators",) * 2],
)
def test_it_is_known_whose_folder_it_is(folders, name, layout):
    assert read_published(folders[name], num_target_layers=8).layout == layout


def test_the_one_window_of_model_optimizer_is_one_of_every_layer(tmp_path):
    settings = SLIDING | {"layer_types": ("sliding_attention",) * 2, "is_causal": False}
    source = random_folder(tmp_path / "source", settings)
    config, tensors = read(source)
    nested = config["dflash_config"] | {"use_swa": True, "swa_window_size": 6, "causal": False}
    said = config | {
        "layer_types": ["full_attention"] * 2,
        "use_sliding_window": False,
        "sliding_window": 6,
        "dflash_config": nested,
    }
    del said["is_causal"]
    found = read_published(write(tmp_path / "out", said, tensors))
    assert found.config == DrafterConfig(**settings)


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({"dflash_config.use_swa": True}, {"is_causal": None}),
        ({"dflash_config.swa_window_size": 5}, {"is_causal": None, "sliding_window": 5}),
    ],
)
def test_layer_types_that_know_windows_stay_as_they_are(tmp_path, said, wanted):
    source = random_folder(tmp_path / "source", SLIDING)
    found = read_published(changed(source, tmp_path / "copy", config=said))
    assert found.config == DrafterConfig(**SLIDING | wanted)


def test_a_loaded_drafter_drafts_in_the_asked_precision(folders):
    drafter, found = load_drafter(folders["AngelSlim"], dtype=torch.float32, device=CPU)
    assert drafter.fc.weight.dtype == torch.float32
    assert torch.equal(drafter.fc.weight, found.tensors["fc.weight"].float())


# --- what is refused ----------------------------------------------------------------------------


def changed(folder: Path, out: Path, *, config=None, tensors=None) -> Path:
    """A copy with other keys (dots go into dflash_config, None removes) or other tensors."""
    value, stored = read(folder)
    for key, setting in (config or {}).items():
        place = value["dflash_config"] if "." in key else value
        name = key.rpartition(".")[2]
        if setting is None:
            place.pop(name, None)
        else:
            place[name] = setting
    for name, tensor in (tensors or {}).items():
        if tensor is None:
            stored.pop(name)
        else:
            stored[name] = tensor
    return write(out, value, stored)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["Qwen3DSparkModel"]}, "DSpark, or DeepSpec.*labels are shifted by one"),
        ({"architectures": ["DFlash2DraftModel"]}, "that is DFlash2, with convolutions"),
        ({"architectures": ["DominoDraftModel"]}, "that is Domino"),
        ({"architectures": ["QwenDFlareDraftModel"]}, "that is DFlare"),
        ({"architectures": ["LlamaForCausalLM"]}, "want one of"),
        ({"markov_rank": 0}, "markov_rank = 0; that is DSpark: its labels are shifted"),
        ({"dflash_config.shift_label": True}, "shift_label = True; its labels are shifted"),
        ({"sample_from_anchor": True}, "sample_from_anchor = True; its labels are shifted"),
        ({"dflash_config.projector_type": "domino"}, "projector_type = domino"),
        ({"dflash_config.selector_rank": 256}, "selector_rank = 256; that is DFlash2"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rotary embedding of type 'yarn'"),
        ({"rope_theta": 5e5}, "rope_theta = 10000.0 in one place and 500000.0 in another"),
        ({"block_size": 8}, "block_size = 4 in one place and 8 in another"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor = 0.25"),
        ({"hidden_act": "gelu"}, "hidden_act = gelu"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"dflash_config.target_layer_ids": None}, "target_layer_ids is missing"),
        ({"dflash_config.mask_token_id": None}, "mask_token_id is missing"),
        ({"num_key_value_heads": 3}, "cannot share 3 key and value heads"),
    ],
)
def test_another_kind_is_refused_by_its_configuration(native, tmp_path, config, message):
    with pytest.raises(DrafterError, match=message):
        read_published(changed(native, tmp_path / "copy", config=config))


def places(value, before=()):
    for key, setting in value.items():
        yield (*before, key)
        if isinstance(setting, dict):
            yield from places(setting, (*before, key))


@pytest.mark.parametrize("name", ["z-lab", "speculators"])
def test_a_value_of_any_other_kind_is_one_message_and_no_traceback(folders, tmp_path, name):
    value = read(folders[name])[0]
    refused = 0
    for place in places(value):
        for odd in ("x", 3, -1, 0, 1.5, [], ["x"], [["x"]], [0.5], {}, {"a": 1}, True):
            spoilt = copy.deepcopy(value)
            inner = spoilt
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = odd
            folder = write(tmp_path / "copy", spoilt, {})
            try:
                read_published(folder, num_target_layers=8)
            except DrafterError as error:
                refused += "holds" not in str(error) and "do not fit" not in str(error)
    assert refused > 100, "the configuration itself must be what is refused"


@pytest.mark.parametrize("ids", [[-1, 3, 5], [1, 3, 8], []])
def test_target_layers_that_the_target_does_not_have_are_refused(native, tmp_path, ids):
    folder = changed(native, tmp_path / "copy", config={"dflash_config.target_layer_ids": ids})
    with pytest.raises(DrafterError, match=r"target_layer_ids = .* want some from 0 to 7"):
        read_published(folder)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"norm.weight": None}, r"missing \['norm.weight'\]"),
        ({"extra": torch.zeros(1)}, r"unexpected \['extra'\]"),
        ({"norm.weight": torch.ones(3)}, "wrong shape"),
        ({"norm.weight": torch.full((32,), torch.inf)}, "not finite"),
        ({"norm.weight": torch.ones(32, dtype=torch.int8)}, "quantised"),
        ({"markov_head.w1.weight": torch.zeros(1)}, "DSpark.*labels are shifted"),
        ({"layers.0.attention_conv.base_kernel": torch.zeros(1)}, "that is DFlash2"),
        ({"prefix_gru.weight_ih_l0": torch.zeros(1)}, "that is Domino"),
        ({"layers.0.self_attn.q_proj.bias": torch.zeros(32)}, "with a bias"),
        ({"mask_hidden": torch.zeros(32)}, "a mask token with an embedding of its own"),
        ({"lm_head.weight": torch.zeros(310, 32)}, "as files of DeepSpec do"),
    ],
)
def test_another_kind_is_refused_by_its_tensors(native, tmp_path, tensors, message):
    with pytest.raises(DrafterError, match=message):
        read_published(changed(native, tmp_path / "copy", tensors=tensors))


def test_a_mask_embedding_beside_the_weights_is_refused(native, tmp_path):
    folder = Path(shutil.copytree(native, tmp_path / "copy"))
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(DrafterError, match="a mask token with an embedding of its own"):
        read_published(folder)


def test_a_vocabulary_of_its_own_is_refused(folders, tmp_path):
    folder = folders["speculators with copies"]
    mapping = load_file(folder / "model.safetensors")["d2t"]
    mapping[3] = 1
    copy = changed(folder, tmp_path / "copy", tensors={"d2t": mapping})
    with pytest.raises(DrafterError, match="d2t maps a vocabulary of its own"):
        read_published(copy, num_target_layers=8)


# --- a run that begins with one -----------------------------------------------------------------


def warm(cache: Path, out: Path, folder: Path, **changes):
    options = {"num_layers": None, "block_size": None, "precision": "bf16", "max_steps": 2}
    return tiny_fit(cache, out, init_from=folder, **{**options, **changes})


@pytest.fixture(scope="module")
def continued(tiny_cache, run, tmp_path_factory) -> Path:
    """Two steps from the run's own last checkpoint."""
    out = tmp_path_factory.mktemp("continued") / "run"
    loop.fit(warm(tiny_cache, out, find_drafter(run, checkpoint="last")))
    return out


@every_naming
def test_steps_from_a_published_folder_equal_those_from_the_run_itself(
    tiny_cache, folders, continued, tmp_path, name
):
    loop.fit(warm(tiny_cache, tmp_path / "run", folders[name]))
    assert losses(tmp_path / "run") == losses(continued)
    found, wanted = final_state(tmp_path / "run"), final_state(continued)
    assert all(torch.equal(found[tensor], wanted[tensor]) for tensor in wanted)


def test_the_first_weights_are_the_folders_and_not_random(tiny_cache, native, tmp_path):
    config = warm(tiny_cache, tmp_path / "run", native)
    made = prepared(config, CacheReader(tiny_cache))
    for name, tensor in load_file(native / "model.safetensors").items():
        assert torch.equal(made.drafter.state_dict()[name], tensor)


def test_a_run_goes_on_without_the_folder_that_it_began_with(tiny_cache, native, tmp_path):
    for name in ("whole", "broken"):
        shutil.copytree(native, tmp_path / f"{name} folder")
    whole = warm(tiny_cache, tmp_path / "whole", tmp_path / "whole folder", max_steps=4)
    broken = warm(tiny_cache, tmp_path / "broken", tmp_path / "broken folder", max_steps=4)
    loop.fit(whole)
    assert not loop.fit(broken, stop=lambda step: step == 2)["finished"]
    shutil.rmtree(tmp_path / "broken folder")
    assert loop.fit(broken)["finished"]
    assert losses(broken.out) == losses(whole.out)
    found, wanted = final_state(broken.out), final_state(whole.out)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    record = read_training(find_drafter(broken.out, checkpoint="last"))["init_from"]
    assert (
        record["weights_sha256"]
        == (
            read_training(find_drafter(whole.out, checkpoint="last"))["init_from"]["weights_sha256"]
        )
    )
    assert record["trained"]["step"] == 4


def test_a_run_that_began_with_one_does_not_go_on_without_saying_so(tiny_cache, native, tmp_path):
    config = warm(tiny_cache, tmp_path / "run", native)
    loop.fit(config)
    with pytest.raises(RunFolderError, match="init_from"):
        loop.fit(replace(config, init_from=None, num_layers=2, block_size=4))


def test_what_no_option_says_is_the_folders(tiny_cache, tmp_path):
    folder = random_folder(tmp_path / "folder", SLIDING | {"rope_theta": 5e5, "block_size": 6})
    made = prepared(warm(tiny_cache, tmp_path / "run", folder), CacheReader(tiny_cache))
    assert made.drafter.config == read_published(folder).config
    assert (made.config.block_size, made.config.num_layers) == (6, 2)
    assert made.trainer.config.shape.block_size == 6
    assert made.trainer.config.objective.gamma == 3


def test_options_that_change_no_shape_win_over_the_folder(tiny_cache, tmp_path):
    folder = random_folder(tmp_path / "folder", SETTINGS)
    options = {"block_size": 8, "sliding_window": 9, "mask_token_id": 308}
    config = warm(tiny_cache, tmp_path / "run", folder, **options)
    made = prepared(config, CacheReader(tiny_cache)).drafter.config
    assert (made.block_size, made.sliding_window, made.mask_token_id) == (8, 9, 308)
    assert made.layer_types == ("sliding_attention", "full_attention")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 3}, "--num-layers 3: the weights of .* have 2"),
        ({"head_dim": 16}, "--head-dim 16: the weights of .* have 8"),
        ({"intermediate_size": 32}, "--intermediate-size 32: the weights of .* have 64"),
        ({"target_layers": (1, 3)}, r"--target-layers \(1, 3\): the weights of .* \(1, 3, 5\)"),
    ],
)
def test_options_of_another_shape_than_the_weights_are_refused(
    tiny_cache, tmp_path, options, message
):
    folder = random_folder(tmp_path / "folder", SETTINGS)
    config = warm(tiny_cache, tmp_path / "run", folder, **options)
    with pytest.raises(FitError, match=message):
        loop.fit(config)
    assert not config.out.exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 16}, "its hidden_size is 16, that of the target in .* is 32"),
        ({"vocab_size": 309}, "its vocab_size is 309, that of the target in .* is 310"),
        ({"num_target_layers": 9}, "its num_target_layers is 9, that of the target in .* is 8"),
        (
            {"target_layer_ids": (2, 4)},
            r"reads target layers \[2, 4\], .* holds \[1, 3, 5\]; rebuild .* --target-layers 2,4",
        ),
    ],
)
def test_a_drafter_of_another_target_is_refused(tiny_cache, tmp_path, settings, message):
    folder = random_folder(tmp_path / "folder", SETTINGS | settings)
    with pytest.raises(FitError, match=message):
        loop.fit(warm(tiny_cache, tmp_path / "run", folder))


def test_a_mask_token_that_this_tokenizer_writes_is_refused(tiny_cache, tmp_path):
    folder = random_folder(tmp_path / "folder", SETTINGS | {"mask_token_id": 200})
    with pytest.raises(DrafterError, match=r"its mask token does not fit .* --mask-token-id"):
        loop.fit(warm(tiny_cache, tmp_path / "run", folder))


def test_a_head_that_is_not_the_targets_is_refused(tiny_cache, folders, frozen, tmp_path):
    copies = {"lm_head.weight": frozen["lm_head.weight"] * 2}
    folder = changed(folders["speculators with copies"], tmp_path / "copy", tensors=copies)
    with pytest.raises(DrafterError, match=r"its lm_head.weight is not the target's"):
        loop.fit(warm(tiny_cache, tmp_path / "run", folder))


# --- measured as it is --------------------------------------------------------------------------


def offline(folder: Path, cache: Path) -> dict:
    report = evaluate_drafter(
        EvalConfig(drafter=folder, cache=str(cache), held_out=0.2, device="cpu")
    )
    return {key: value for key, value in report.items() if key != "drafter"}


@pytest.mark.parametrize("name", ["AngelSlim", "speculators with copies"])
def test_a_published_folder_is_measured_as_it_is(tiny_cache, folders, native, name):
    assert offline(folders[name], tiny_cache) == offline(native, tiny_cache)


def test_a_drafter_with_a_head_of_its_own_is_not_measured(tiny_cache, folders, frozen, tmp_path):
    copies = {"lm_head.weight": frozen["lm_head.weight"] * 2}
    folder = changed(folders["speculators with copies"], tmp_path / "copy", tensors=copies)
    with pytest.raises(DrafterError, match=r"its lm_head.weight is not the target's"):
        offline(folder, tiny_cache)


def test_the_card_of_a_continued_drafter_says_what_it_began_with_and_no_path(
    tiny_cache, native, tmp_path
):
    config = warm(tiny_cache, tmp_path / "run", native)
    loop.fit(config)
    export(ExportConfig(run=config.out, out=tmp_path / "out", checkpoint="last"))
    record = read_training(find_drafter(config.out, checkpoint="last"))["init_from"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| begun from | DFlash drafter, weights {record['weights_sha256']} |" in card
    assert "this run never trained on" in card
    assert "whether those had seen these samples is not on record" in card
    # And one that continues the continued one knows it by its hash alone.
    second = warm(tiny_cache, tmp_path / "second", config.out)
    loop.fit(second)
    export(ExportConfig(run=second.out, out=tmp_path / "again", checkpoint="last"))
    for folder in (tmp_path / "out", tmp_path / "again"):
        for name in ("README.md", "training.json"):
            assert str(native) not in (folder / name).read_text()
            assert str(tmp_path) not in (folder / name).read_text()
    assert record["weights_sha256"] in (tmp_path / "again" / "training.json").read_text()
