"""A template of another model is refused by its name, and no real one ever is."""

import json

import pytest
from click.testing import CliRunner
from conftest import CHATML, chat_rows, make_tokenizer, tiny_build, write_jsonl
from test_golden_masks import (  # noqa: F401
    AGENT,
    PLAIN,
    TEMPLATES,
    THOUGHTFUL,
    gemma,
    llama3,
    qwen3,
    qwen36,
    tagged,
    tiny,
)

from dflash_cache.chat import encode_chat
from dflash_cache.errors import ProofError
from dflash_cache.plan import plan_only
from dflash_cache.samples import Sample
from dflash_cache.template import control_strings, prove_template
from dflash_cli.main import main

FAMILIES = ("llama3", "gemma", "qwen36", "tagged", "qwen3")
# What its answers end in decides; Gemma's tokenizer has another token for the end of all text.
STOPS = {"gemma": "<end_of_turn>"}


def samples(tokenizer, *chats: list[dict]) -> list[Sample]:
    encoded = [encode_chat(tokenizer, chat) for chat in chats]
    return [
        Sample(sample_id=number, input_ids=ids, loss_mask=mask, group="g")
        for number, (ids, mask) in enumerate(encoded)
    ]


def stop_ids(tokenizer, family: str) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(STOPS.get(family, tokenizer.eos_token))]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_own_template_is_never_refused(request, family, capsys):
    tokenizer = request.getfixturevalue(family)
    chats = [PLAIN] if family == "gemma" else [PLAIN, THOUGHTFUL, AGENT]
    if family in ("llama3", "tagged"):
        chats = [PLAIN]
    prove_template(tokenizer, samples(tokenizer, *chats), stop_ids=stop_ids(tokenizer, family))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("other", ["llama3", "gemma"])
@pytest.mark.parametrize("family", ["qwen36", "qwen3"])
def test_control_strings_that_the_tokenizer_splits_are_of_another_model(request, family, other):
    tokenizer = request.getfixturevalue(family)
    own = tokenizer.chat_template
    tokenizer.chat_template = (TEMPLATES / f"{other}.jinja").read_text(encoding="utf-8")
    try:
        chats, stops = samples(tokenizer, PLAIN), stop_ids(tokenizer, family)
        told = r"splits into \d+ pieces.*none of the tokenizer's own control tokens \(<\|"
        with pytest.raises(ProofError, match=told):
            prove_template(tokenizer, chats, stop_ids=stops)
    finally:
        tokenizer.chat_template = own


@pytest.mark.parametrize("family", ["llama3", "gemma"])
def test_answers_that_end_in_another_token_of_the_tokenizer_are_told(request, family, capsys):
    """These tokenizers happen to know the strings of ChatML too."""
    tokenizer = request.getfixturevalue(family)
    own, tokenizer.chat_template = tokenizer.chat_template, CHATML
    try:
        chats, stops = samples(tokenizer, PLAIN), stop_ids(tokenizer, family)
        prove_template(tokenizer, chats, stop_ids=stops)
        told = capsys.readouterr().err
        assert "none of 2 supervised answers ends in a stop token" in told
        assert "they end in '<|im_end|>': is the chat template the target's own?" in told
    finally:
        tokenizer.chat_template = own


def plain_tokenizer(template: str):
    """Like those of Llama 2: no control string but the end."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(["one two three"], trainer)
    core.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    return fast


ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ ' ' + m.content + ' ' + eos_token }}{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [ZEPHYR, LLAMA2], ids=["Zephyr", "Llama 2"])
def test_roles_in_plain_text_are_no_mistake_of_a_model_without_control_tokens(template, capsys):
    tokenizer = plain_tokenizer(template)
    prove_template(tokenizer, samples(tokenizer, PLAIN), stop_ids=[tokenizer.eos_token_id])
    assert capsys.readouterr().err == ""


def test_chatml_on_a_tokenizer_without_control_tokens_is_refused_by_its_ends():
    tokenizer = plain_tokenizer(CHATML)
    told = r"they end in '\\n'\. The template writes <\|im_end\|> \(which this tokenizer splits"
    with pytest.raises(ProofError, match=told):
        prove_template(tokenizer, samples(tokenizer, PLAIN), stop_ids=[tokenizer.eos_token_id])


def test_one_foreign_string_among_the_targets_own_is_only_told(capsys):
    tokenizer = make_tokenizer(template=f"{{{{ '<|foreign|>' }}}}{CHATML}")
    prove_template(tokenizer, samples(tokenizer, PLAIN), stop_ids=[tokenizer.eos_token_id])
    assert "writes <|foreign|> (which this tokenizer splits into" in capsys.readouterr().err


def test_strings_of_branches_that_are_not_taken_do_not_count():
    tokenizer = make_tokenizer(template=f"{CHATML}{{% if pictures %}}<|image|>{{% endif %}}")
    assert control_strings(tokenizer) == {"<|im_start|>", "<|im_end|>"}


def test_one_answer_that_ends_is_enough():
    tokenizer = make_tokenizer()
    chats = samples(tokenizer, PLAIN, PLAIN)
    cut = Sample(**{name: getattr(chats[0], name) for name in ("sample_id", "group")},
                 input_ids=chats[0].input_ids[:-2], loss_mask=chats[0].loss_mask[:-2])  # fmt: skip
    prove_template(tokenizer, [cut, chats[1]], stop_ids=[tokenizer.eos_token_id])


# --- in the plan --------------------------------------------------------------------------------


@pytest.fixture
def endless(tmp_path, tiny_target):
    """The tiny target with a template whose answers have no end."""
    import shutil

    folder = shutil.copytree(tiny_target, tmp_path / "endless")
    without = CHATML.replace("+ '<|im_end|>'", "")
    (folder / "chat_template.jinja").write_text(without, encoding="utf-8")
    return folder


READY = {"input_ids": list(range(8, 40)), "loss_mask": [0] * 8 + [1] * 24}
TEXT_ROW = {"text": "the cat sat on a mat and saw one two three four dogs"}


@pytest.mark.parametrize("row", [READY, TEXT_ROW], ids=["ready", "text"])
def test_rows_that_go_through_no_template_are_not_asked(tmp_path, endless, row):
    data = write_jsonl(tmp_path / "rows.jsonl", [row])
    assert plan_only(tiny_build(endless, data, tmp_path / "out")).samples.chats == []


def test_the_plan_refuses_chats_without_an_end_unless_told_not_to(tmp_path, endless):
    data = write_jsonl(tmp_path / "rows.jsonl", [*chat_rows(3), READY])
    with pytest.raises(ProofError, match="drafter would never learn where answers stop"):
        plan_only(tiny_build(endless, data, tmp_path / "out"))
    plan = plan_only(tiny_build(endless, data, tmp_path / "out", no_proof=("template",)))
    assert [sample.sample_id for sample in plan.samples.chats] == [0, 1, 2]


def test_the_dry_run_refuses_too(tmp_path, endless):
    data = write_jsonl(tmp_path / "rows.jsonl", chat_rows(3))
    words = ["cache", "build", "--dry-run", "--json", "--target", endless, "--data", data]
    done = CliRunner().invoke(main, [*map(str, words), "--out", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "supervised answers ends in a stop token" in " ".join(done.output.split())
    done = CliRunner().invoke(
        main,
        [*map(str, words), "--out", str(tmp_path / "out"), "--no-proof", "template"],
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["samples"] == 3
