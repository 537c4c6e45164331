"""States come from the layers that were asked for, of a target that we can serve faithfully."""

import json
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_tokenizer, save_tiny_target
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
)

from dflash_cache.devices import pick_device
from dflash_cache.errors import ConfigError, TargetError
from dflash_cache.schema import TokenizerSpec
from dflash_cache.survey import (
    Survey,
    refuse_ropes_of_the_batch,
    refuse_scalings,
    survey_target,
)
from dflash_cache.target import Target, checked_layer_ids, default_layer_ids
from dflash_cache.vocabulary import (
    choose_mask_token,
    describe_tokenizer,
    refuse_bad_mask_token,
    special_ids,
)
from dflash_cache.weights import load_target

LAYERS = 6
SMALL = {
    "vocab_size": 310,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {"llama": {}, "qwen2": {}, "qwen3": {}, "qwen3_moe": MOE}


def config_of(family: str, **changes):
    return AutoConfig.for_model(family, **{**SMALL, **changes})


def save_model(folder: Path, family: str, **changes) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(family, **changes)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def load(folder: Path) -> Target:
    return load_target(str(folder), dtype="float32", device="cpu")


@pytest.fixture(scope="module", params=FAMILIES)
def family_folder(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return save_model(folder, request.param, **FAMILIES[request.param])


@pytest.fixture(scope="module")
def family(family_folder: Path) -> Target:
    return load(family_folder)


@pytest.fixture(scope="module")
def tiny(tiny_target: Path) -> Target:
    return load(tiny_target)


@pytest.fixture
def copy_of_tiny(tiny_target: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_target, tmp_path / "copy")


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(310, shape, generator=torch.Generator().manual_seed(1))


def change_config(folder: Path, **changes) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


# --- states -------------------------------------------------------------------------------------


def test_target_layer_i_is_entry_i_plus_1_of_the_librarys_hidden_states(family, family_folder):
    plain = AutoModelForCausalLM.from_pretrained(family_folder, dtype=torch.float32).eval()
    batch = ids(3, 17)
    with torch.no_grad():
        reported = plain(batch, output_hidden_states=True, use_cache=False).hidden_states
    layer_ids = list(range(LAYERS - 1))

    hooked = family.hidden_states(batch, layer_ids)

    for layer_id, states in zip(layer_ids, hooked, strict=True):
        torch.testing.assert_close(states, reported[layer_id + 1], rtol=0, atol=0)
        assert not torch.equal(states, reported[layer_id])


def test_the_last_layer_stands_before_the_final_norm(family):
    (last,) = family.hidden_states(ids(2, 9), [LAYERS - 1])
    normed = family.decoder.norm(last)
    torch.testing.assert_close(normed, family.final_hidden(ids(2, 9)), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(last, normed, atol=1e-2)


def test_states_come_in_the_order_asked_for(tiny):
    backwards = tiny.hidden_states(ids(1, 9), [5, 1, 3])
    forwards = tiny.hidden_states(ids(1, 9), [1, 3, 5])
    for found, wanted in zip(backwards, [forwards[2], forwards[0], forwards[1]], strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("layer_ids", [[0], [1, 3], [2, 5]])
def test_no_layer_behind_the_last_one_needed_runs_and_neither_does_the_head(tiny, layer_ids):
    ran = []
    modules = {**dict(enumerate(tiny.layers)), "head": tiny.model.get_output_embeddings()}
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
        for name, module in modules.items()
    ]
    tiny.hidden_states(ids(2, 9), layer_ids)
    for hook in hooks:
        hook.remove()
    assert ran == list(range(layer_ids[-1] + 1))


def test_no_hook_stays_behind(tiny):
    tiny.hidden_states(ids(1, 9), [0, 2])
    assert not any(layer._forward_hooks for layer in tiny.layers)


def test_no_hook_stays_behind_a_forward_that_fails(tiny):
    with pytest.raises(IndexError):
        tiny.hidden_states(torch.tensor([[10_000]]), [0, 2])
    assert not any(layer._forward_hooks for layer in tiny.layers)


def test_layers_that_never_ran_are_an_error_and_not_old_states(tiny, monkeypatch):
    tiny.hidden_states(ids(1, 9), [1])
    monkeypatch.setattr(type(tiny.decoder), "forward", lambda *_, **__: None)
    with pytest.raises(TargetError, match=r"target layers \[1\] never ran"):
        tiny.hidden_states(ids(1, 9), [1])


def test_the_target_is_frozen_and_in_evaluation_mode(tiny):
    assert not tiny.model.training
    assert not any(parameter.requires_grad for parameter in tiny.model.parameters())


# --- layer ids ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_layers", "count", "wanted"),
    [
        (16, 5, "1 4 7 10 13"),
        (24, 5, "1 6 11 16 21"),
        (28, 5, "1 7 13 19 25"),
        (32, 5, "1 8 15 22 29"),
        (36, 3, "1 17 33"),
        (36, 5, "1 9 17 25 33"),
        (40, 5, "1 10 19 28 37"),
        (40, 8, "1 6 11 16 22 27 32 37"),
        (48, 5, "1 12 23 34 45"),
        (48, 8, "1 7 14 20 26 32 39 45"),
        (60, 8, "1 9 17 25 33 41 49 57"),
        (64, 1, "32"),
        (64, 5, "1 16 31 46 61"),
        (64, 8, "1 10 18 27 35 44 52 61"),
    ],
)
def test_the_default_layers_are_those_of_published_drafters(num_layers, count, wanted):
    assert default_layer_ids(num_layers, count) == [int(i) for i in wanted.split()]


def test_halves_round_to_the_even_layer_as_the_reference_does():
    assert default_layer_ids(30, 5) == [1, 8, 14, 20, 27]  # 7.5 and 20.5 lie between two
    assert default_layer_ids(10, 5) == [1, 2, 4, 6, 7]


@pytest.mark.parametrize("num_layers", range(1, 40))
def test_default_layers_increase_and_exist_or_are_refused(num_layers):
    for count in range(1, 10):
        with suppress(ConfigError):
            layer_ids = default_layer_ids(num_layers, count)
            assert len(layer_ids) == count
            assert layer_ids == sorted(set(layer_ids))
            assert 0 <= layer_ids[0] <= layer_ids[-1] < num_layers


@pytest.mark.parametrize(("num_layers", "count"), [(2, 3), (3, 2), (4, 2), (8, 6), (5, 9)])
def test_more_layers_than_there_are_to_spread_over_are_refused(num_layers, count):
    with pytest.raises(ConfigError, match="ask for fewer or name --target-layers"):
        default_layer_ids(num_layers, count)


@pytest.mark.parametrize("layer_ids", [(), (3, 1), (1, 1), (-1, 2), (0, 6)])
def test_layers_that_do_not_increase_or_do_not_exist_are_refused(layer_ids):
    with pytest.raises(ConfigError, match="want increasing layer numbers between 0 and 5"):
        checked_layer_ids(layer_ids, 6)


def test_the_users_own_layers_are_taken(tiny):
    assert checked_layer_ids((0, 2, 5), 6) == [0, 2, 5]


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("gemma", {}, "embedding is a GemmaTextScaledWordEmbedding, not a plain one"),
        ("gemma2", {}, "final_logit_softcapping = 30.0"),
        ("gemma2", {"final_logit_softcapping": None}, "Gemma2TextScaledWordEmbedding"),
        ("cohere", {}, "logit_scale = 0.0625"),
        ("granite", {"embedding_multiplier": 12.0}, "embedding_multiplier = 12.0"),
        ("granite", {"logits_scaling": 8.0}, "logits_scaling = 8.0"),
        ("recurrent_gemma", {"num_hidden_layers": 3}, "logits_soft_cap = 30.0"),
        ("phi", {}, "LM head is not a plain matrix without bias"),
    ],
)
def test_what_stands_between_states_and_logits_is_refused_by_name(family, changes, told):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(family, **changes))
    with pytest.raises(TargetError, match=told):
        refuse_scalings(model)


def test_a_scaling_that_scales_nothing_is_not_refused():
    with torch.device("meta"):
        refuse_scalings(AutoModelForCausalLM.from_config(config_of("granite")))


ROPES = {
    "dynamic": {"factor": 2.0},
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0},
    "yarn": {"factor": 2.0},
    "linear": {"factor": 2.0},
    "default": {},
}


@pytest.mark.parametrize("kind", ROPES)
def test_a_rope_that_looks_at_the_whole_batch_is_refused_by_name(kind):
    rope = {"rope_type": kind, "rope_theta": 1e4, **ROPES[kind]}
    rope["original_max_position_embeddings"] = 16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of("llama", rope_parameters=rope))
    if kind in ("dynamic", "longrope"):
        with pytest.raises(TargetError, match=f"rope_type = {kind} rotates by the longest row"):
            refuse_ropes_of_the_batch(model)
    else:
        refuse_ropes_of_the_batch(model)


def test_scalings_are_refused_before_any_weight_is_read(tmp_path):
    save_model(tmp_path, "granite", logits_scaling=8.0)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(TargetError, match="GraniteForCausalLM: logits_scaling"):
        survey_target(str(tmp_path), dtype="float32")


def test_a_family_without_a_list_of_decoder_layers_is_refused(tmp_path):
    save_model(tmp_path, "gpt2", n_embd=32, n_head=4)
    with pytest.raises(TargetError, match="GPT2LMHeadModel: found no list of 6 decoder layers"):
        load(tmp_path)


def surveyed(folder: Path, config) -> Survey:
    """A target of which there is all but the weights."""
    config.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return survey_target(str(folder), dtype="float32")


def test_a_family_without_attention_heads_is_refused(tmp_path):
    config = AutoConfig.for_model("mamba", vocab_size=310, hidden_size=32, num_hidden_layers=2)
    with pytest.raises(TargetError, match="its config has no num_attention_heads"):
        surveyed(tmp_path, config)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_generation_config_that_is_none_is_refused(copy_of_tiny, text):
    (copy_of_tiny / "generation_config.json").write_text(text)
    with pytest.raises(TargetError, match=r"generation_config\.json cannot be read"):
        load(copy_of_tiny)


def test_missing_weights_are_refused_by_name(copy_of_tiny):
    change_config(copy_of_tiny, num_hidden_layers=9)
    with pytest.raises(TargetError, match=r"weights are missing \(\['model\.layers\.8\."):
        load(copy_of_tiny)


def test_weights_of_other_shapes_are_refused_by_name(copy_of_tiny):
    change_config(copy_of_tiny, intermediate_size=48)
    with pytest.raises(TargetError, match=r"weights have other shapes .*mlp\.down_proj"):
        load(copy_of_tiny)


@pytest.mark.parametrize("size", [0, 5, 4000])
def test_truncated_weights_are_refused(copy_of_tiny, size):
    path = copy_of_tiny / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(TargetError, match="cannot be loaded"):
        load(copy_of_tiny)


def test_a_folder_without_weights_is_refused(copy_of_tiny):
    (copy_of_tiny / "model.safetensors").unlink()
    with pytest.raises(TargetError, match="is the folder complete"):
        load(copy_of_tiny)


def test_a_folder_without_config_is_refused(copy_of_tiny):
    (copy_of_tiny / "config.json").unlink()
    with pytest.raises(TargetError, match=r"no config\.json in this folder"):
        load(copy_of_tiny)


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "zebra"}'])
def test_a_config_that_is_none_is_refused(copy_of_tiny, text):
    (copy_of_tiny / "config.json").write_text(text)
    with pytest.raises(TargetError):
        load(copy_of_tiny)


@pytest.mark.parametrize("text", ["{", "{}", "[]"])
def test_a_tokenizer_that_is_none_is_refused(copy_of_tiny, text):
    (copy_of_tiny / "tokenizer.json").write_text(text)
    with pytest.raises(TargetError, match="no tokenizer"):
        load(copy_of_tiny)


@pytest.mark.parametrize("name", ["nobody/nothing", "no such folder", "a/b/c"])
def test_a_name_that_is_nothing_is_refused(name):
    with pytest.raises(TargetError, match="neither a folder here nor a model that the Hub gives"):
        load(Path(name))


# --- device -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpu", "", "meta", "mps", "cuda:x", "CPU", "cpu:"])
def test_what_is_no_device_of_ours_is_refused(name):
    with pytest.raises(ConfigError, match="want auto, cpu, cuda or cuda:N"):
        pick_device(name)


def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="this torch sees no GPU"):
        pick_device("cuda:0")


def test_with_two_gpus_auto_takes_one_and_a_third_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("auto").type == "cuda"
    assert pick_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ConfigError, match="sees 2 GPUs, numbered from 0"):
        pick_device("cuda:2")


# --- identity -----------------------------------------------------------------------------------


def test_the_identity_is_of_the_content_and_not_of_the_folder(tiny, copy_of_tiny):
    copied = load(copy_of_tiny).spec.to_dict()
    assert {**copied, "name": "tiny"} == tiny.spec.to_dict()
    assert copied["name"] == "copy"


def test_who_wrote_the_config_is_no_part_of_the_identity(tiny, copy_of_tiny):
    change_config(copy_of_tiny, transformers_version="0.1", _name_or_path="/somewhere")
    assert load(copy_of_tiny).spec.config_sha256 == tiny.spec.config_sha256


def test_one_other_weight_is_another_identity(tiny, copy_of_tiny):
    model = LlamaForCausalLM.from_pretrained(copy_of_tiny, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[7].mlp.up_proj.weight[0, 0] += 1
    model.save_pretrained(copy_of_tiny)
    found = load(copy_of_tiny).spec
    assert found.weights_sha256 != tiny.spec.weights_sha256
    assert found.config_sha256 == tiny.spec.config_sha256


@pytest.mark.parametrize(
    ("family", "theta"), [("llama", 10_000), ("olmo3", 500_000), ("smollm3", 2_000_000)]
)
def test_the_rope_base_is_the_one_of_full_attention_layers(tmp_path, family, theta):
    survey = surveyed(tmp_path, config_of(family, pad_token_id=0))
    assert survey.spec.rope_theta == theta


def test_another_rope_base_is_another_identity(tiny, copy_of_tiny):
    change_config(copy_of_tiny, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    found = load(copy_of_tiny).spec
    assert found.config_sha256 != tiny.spec.config_sha256
    assert found.rope_theta == 5e5


def test_a_head_that_the_config_calls_tied_and_the_weights_do_not_is_refused(copy_of_tiny):
    path = copy_of_tiny / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"] = 2 * weights["model.embed_tokens.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(TargetError, match="says tie_word_embeddings = True, the weights say"):
        load(copy_of_tiny)


def test_a_tied_head_that_is_stored_twice_is_tied(copy_of_tiny):
    path = copy_of_tiny / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, path, metadata={"format": "pt"})
    assert load(copy_of_tiny).spec.tied_head


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_told_from_one_of_its_own(tmp_path, tied):
    target = load(save_tiny_target(tmp_path, layers=2, tied=tied))
    assert target.spec.tied_head is tied
    assert (target.head.data_ptr() == target.embedding.data_ptr()) is tied


# --- the mask token -----------------------------------------------------------------------------


def spec_of(**changes) -> TokenizerSpec:
    """A tokenizer of ids 0 to 299: 0 pads, 1 ends, 5 and 9 are special and not in the data."""
    return TokenizerSpec(
        **{
            "sha256": "",
            "chat_template_sha256": None,
            "length": 300,
            "eos_token_ids": [1],
            "pad_token_id": 0,
            "unused_special_ids": [5, 9],
            "mask_token_id": None,
            "mask_token_source": "",
            **changes,
        }
    )


def test_the_mask_token_is_the_first_of_four_that_there_is():
    def choose(spec: TokenizerSpec, *, rows: int, **more) -> int | None:
        return choose_mask_token(
            spec, embedding_rows=rows, **{"wanted": None, "own": None, **more}
        )[0]

    assert choose(spec_of(), rows=310, wanted=305, own=7) == 305
    assert choose(spec_of(), rows=310, own=7) == 7
    assert choose(spec_of(), rows=310) == 300
    assert choose(spec_of(), rows=300) == 9
    assert choose(spec_of(unused_special_ids=[]), rows=300) is None


def test_where_the_mask_token_comes_from_is_told():
    sources = {
        choose_mask_token(spec_of(), embedding_rows=rows, wanted=wanted, own=own)[1]
        for rows, wanted, own in [
            (310, 305, None),
            (310, None, 7),
            (310, None, None),
            (300, None, None),
        ]
    }
    assert len(sources) == 4


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (-1, "the embedding has rows 0 to 309"),
        (310, "the embedding has rows 0 to 309"),
        (0, "that is the end or padding token"),
        (1, "that is the end or padding token"),
        (77, r"the tokenizer produces that id; choose one from 300 to 309 or .* \[5, 9\]"),
    ],
)
def test_a_mask_token_that_text_can_produce_is_refused(wanted, told):
    with pytest.raises(ConfigError, match=f"--mask-token-id {wanted}: {told}"):
        refuse_bad_mask_token(spec_of(), wanted, embedding_rows=310)


@pytest.mark.parametrize("wanted", [5, 9, 300, 309])
def test_a_mask_token_that_text_never_produces_is_taken(wanted):
    refuse_bad_mask_token(spec_of(), wanted, embedding_rows=310)


def describe(tokenizer, *, seen: dict[int, int], rows: int = 310, **more) -> TokenizerSpec:
    options = {"stop_ids": [tokenizer.eos_token_id], "mask_token_id": None, **more}
    return describe_tokenizer(tokenizer, embedding_rows=rows, seen=seen, **options)


def test_only_special_tokens_without_a_job_and_outside_the_data_are_unused(tiny):
    tokenizer = tiny.tokenizer
    spare = tokenizer.convert_tokens_to_ids("<spare>")
    assert {spare, tokenizer.pad_token_id, tokenizer.eos_token_id} < set(special_ids(tokenizer))
    assert describe(tokenizer, seen={}).unused_special_ids == [spare]
    assert describe(tokenizer, seen={spare: 1}).unused_special_ids == []
    assert describe(tokenizer, seen={}, stop_ids=[spare]).unused_special_ids == []


@pytest.mark.parametrize(("ends", "told"), [(None, [2]), (7, [2, 7]), ([7, 2], [2, 7])])
def test_end_tokens_of_the_generation_config_count_too(tiny_target, tmp_path, ends, told):
    folder = Path(shutil.copytree(tiny_target, tmp_path / "target"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert survey_target(str(folder), dtype="float32").stop_ids == told
    assert load_target(str(folder), dtype="float32", device="cpu").stop_ids == told


def test_a_survey_equals_what_the_loaded_target_is(tiny_target):
    survey = survey_target(str(tiny_target), dtype="float32")
    loaded = load_target(str(tiny_target), dtype="float32", device="cpu")
    assert survey.spec.weights_sha256 == ""
    assert replace(survey.spec, weights_sha256=loaded.spec.weights_sha256) == loaded.spec
    tied = loaded.head.data_ptr() == loaded.embedding.data_ptr()
    assert (loaded.spec.tied_head, loaded.spec.vocab_size) == (tied, len(loaded.embedding))


def test_a_tokenizer_with_a_mask_token_gives_its_own():
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    spec = describe(tokenizer, seen={}, rows=400)
    assert (
        spec.mask_token_id == tokenizer.mask_token_id == tokenizer.convert_tokens_to_ids("<mask>")
    )


def test_ids_with_holes_end_behind_the_last_one(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["Ġfar"], last = 340, content["model"]["vocab"]["Ġfar"]
    path.write_text(json.dumps(content))
    holey = AutoTokenizer.from_pretrained(tmp_path)
    assert len(holey) < 340
    assert last not in holey.get_vocab().values()
    assert describe(holey, seen={}, rows=400).mask_token_id == 341


def test_another_template_or_vocabulary_is_another_tokenizer(tiny):
    spec = describe(tiny.tokenizer, seen={})
    other = make_tokenizer(template="{{ 'other' }}")
    assert describe(other, seen={}).sha256 == spec.sha256
    assert describe(other, seen={}).chat_template_sha256 != spec.chat_template_sha256
    other.add_tokens(["new"])
    assert describe(other, seen={}).sha256 != spec.sha256


def test_a_tokenizer_of_several_templates_is_described(tiny):
    several = make_tokenizer()
    several.chat_template = {"default": "{{ 'a' }}", "tool_use": "{{ '<spare>' }}"}
    spec = describe(several, seen={})
    assert spec.chat_template_sha256
    assert spec.unused_special_ids == [several.convert_tokens_to_ids("<|im_start|>")]
