"""Every option of the command line is a field of a config dataclass, default and all."""

from dataclasses import MISSING, fields
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from dflash_cache.config import AnswersConfig, BuildConfig, InspectDataConfig
from dflash_cache.errors import ConfigError
from dflash_cli.main import main
from dflash_cli.options import described, flag, make_config
from dflash_fit.config import (
    CHOICES,
    SPEED_ONLY,
    EvalConfig,
    ExportConfig,
    FitConfig,
    ReportConfig,
)
from dflash_fit.loss import DIVERGENCES, SLOT_WEIGHTS
from dflash_fit.sweep_plan import SweepConfig

COMMANDS = {
    ("cache", "build"): BuildConfig,
    ("cache", "answers"): AnswersConfig,
    ("cache", "inspect"): InspectDataConfig,
    ("fit",): FitConfig,
    ("eval",): EvalConfig,
    ("export",): ExportConfig,
    ("report",): ReportConfig,
}
OF_SWEEPS = {field.name for field in fields(SweepConfig)}  # beside those of each trial
NOT_FIELDS = {"config_file", "as_json", "dry_run", *OF_SWEEPS}


def find(path: tuple[str, ...]) -> click.Command:
    command: click.Command = main
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    return command


@pytest.mark.parametrize(("path", "config"), COMMANDS.items())
def test_every_field_is_an_option_and_every_option_a_field(path, config):
    options = {parameter.name for parameter in find(path).params}
    options -= {"cache"} if path == ("cache", "inspect") else set()  # instead of --data
    assert options - NOT_FIELDS == {field.name for field in fields(config)}


def test_fit_has_the_options_of_sweeps():
    assert {parameter.name for parameter in find(("fit",)).params} >= OF_SWEEPS


@pytest.mark.parametrize(("path", "config"), COMMANDS.items())
def test_the_default_shown_is_the_default_of_the_dataclass(path, config):
    help_text = " ".join(CliRunner().invoke(main, [*path, "--help"]).output.split())
    arguments = {p.name for p in find(path).params if isinstance(p, click.Argument)}
    for field in fields(config):
        if field.name in arguments:
            continue
        assert flag(field.name) in help_text
        if field.default not in (MISSING, None, ()):
            shown = described(field).rsplit("[default: ", 1)[1]
            assert f"[default: {shown}" in help_text
            plain = ",".join(map(str, field.default)) if field.default.__class__ is tuple else None
            assert shown == f"{plain or field.default}]"


@pytest.mark.parametrize("config", COMMANDS.values())
def test_an_option_that_is_not_typed_takes_the_default_of_the_dataclass(config):
    needed = {
        field.name: Path("x") if field.type in (Path, "Path") else "x"
        for field in fields(config)
        if field.default is MISSING
    }
    if config is EvalConfig:
        needed["cache"] = "c"
    typed = {field.name: needed.get(field.name) for field in fields(config)}
    made = make_config(config, {**typed, "config_file": None})
    for field in fields(config):
        if field.name not in needed:
            assert getattr(made, field.name) == field.default


def test_what_is_typed_wins_over_the_file_and_the_file_over_the_default(tmp_path):
    file = tmp_path / "fit.toml"
    file.write_text('lr = 0.5\nnum-layers = 3\ncache = "a"\nout = "b"\ntarget_layers = [1, 2]\n')
    typed = dict.fromkeys((field.name for field in fields(FitConfig)), None)
    made = make_config(FitConfig, {**typed, "config_file": file, "lr": 0.25})
    assert (made.lr, made.num_layers, made.cache) == (0.25, 3, "a")
    assert made.target_layers == (1, 2)
    assert made.seed == FitConfig.seed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rate = 1.0", "unknown option 'learning_rate'"),
        ("lr = [", "not TOML"),
        ('num_layers = "many"', "found 'many', want int"),
        ("target_layers = 'a,b'", "target_layers"),
        ('target_layers = ["a"]', "want whole numbers"),
        ("target_layers = [1.5]", "want whole numbers"),
        ("target_layers = [true]", "want whole numbers"),
        ("target_layers = 1", "found 1, want list or str"),
        ("num_layers = true", "found True, want int"),
        ("num_layers = 1.5", "found 1.5, want int"),
        ("num_layers = [1]", r"found \[1\], want int"),
        ("out = 5", "found 5, want str"),
        ("precision = 16", "found 16, want str"),
        ("anchors = 'many'", "want a whole number, or auto"),
        ("anchors = 1.5", "found 1.5, want int or str"),
        ("anchors = true", "found True, want int or str"),
    ],
)
def test_a_wrong_config_file_is_refused_with_its_name(tmp_path, text, message):
    file = tmp_path / "fit.toml"
    file.write_text(text)
    typed = dict.fromkeys((field.name for field in fields(FitConfig)), None)
    with pytest.raises(ConfigError, match=message) as caught:
        make_config(FitConfig, {**typed, "config_file": file})
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(("text", "wanted"), [("'auto'", "auto"), ("16", 16), ("'16'", 16)])
def test_anchors_are_a_number_or_auto_in_a_file_and_typed(tmp_path, text, wanted):
    file = tmp_path / "fit.toml"
    file.write_text(f"cache = 'a'\nout = 'b'\nanchors = {text}\n")
    typed = dict.fromkeys((field.name for field in fields(FitConfig)), None)
    assert make_config(FitConfig, {**typed, "config_file": file}).anchors == wanted
    option = next(o for o in find(("fit",)).params if o.name == "anchors")
    assert option.type.convert(text.strip("'"), None, None) == wanted


def test_words_that_an_option_may_be_are_those_of_the_code_behind_it():
    assert CHOICES["loss"] == DIVERGENCES
    assert CHOICES["slot_weights"] == SLOT_WEIGHTS
    assert set(CHOICES) <= {field.name for field in fields(FitConfig)}


def test_a_missing_config_file_is_one_message():
    result = CliRunner().invoke(main, ["fit", "--config", "nowhere.toml"])
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: nowhere.toml")


@pytest.mark.parametrize("path", COMMANDS)
def test_a_required_option_that_is_missing_is_a_usage_error(path):
    result = CliRunner().invoke(main, list(path))
    assert result.exit_code == 2
    assert "Missing" in result.stderr or "Give a CACHE" in result.stderr


def test_an_unknown_option_is_a_usage_error():
    assert CliRunner().invoke(main, ["fit", "--learning-rate", "1"]).exit_code == 2


def test_speed_only_options_exist():
    assert set(SPEED_ONLY) <= {field.name for field in fields(FitConfig)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 1}, "--block-size 1"),
        ({"precision": "fp16"}, "--precision fp16"),
        ({"held_out": 0.0}, "--held-out 0.0"),
        ({"warmup": 2.0}, "--warmup 2.0"),
        ({"lr": 0.0}, "--lr 0.0"),
        ({"lr": float("nan")}, "--lr nan"),
        ({"gamma": -1.0}, "--gamma -1.0"),
        ({"lr": float("inf")}, "--lr inf"),
        ({"beta1": -0.1}, "--beta1 -0.1"),
        ({"beta2": 1.0}, "--beta2 1.0"),
        ({"weight_decay": float("nan")}, "--weight-decay nan"),
        ({"seed": -1}, "--seed -1"),
        ({"packs_per_step": 0}, "--packs-per-step 0"),
        ({"cooldown": 1.5}, "--cooldown 1.5"),
        ({"max_steps": -1}, "--max-steps -1"),
        ({"epochs": 0}, "--epochs 0"),
        ({"anchors": 100, "anchor_microbatch": 64}, "--anchors 100"),
    ],
)
def test_a_value_that_cannot_work_names_its_option(options, message):
    with pytest.raises(ConfigError, match=message):
        FitConfig(cache="c", out=Path("o"), **options)


def test_decay_follows_the_block_size_unless_it_is_given():
    def gamma(**options):
        return FitConfig(cache="c", out=Path("o"), **options).decay_gamma

    assert [gamma(block_size=b) for b in (16, 10, 8, 6)] == [7, 5, 4, 3]
    assert gamma(block_size=16, gamma=2.5) == 2.5


def test_eval_wants_exactly_one_way_of_measuring():
    with pytest.raises(ConfigError, match="either --cache"):
        EvalConfig(drafter=Path("d"))
    with pytest.raises(ConfigError, match="either --cache"):
        EvalConfig(drafter=Path("d"), cache="c", target="t", prompts="p")
    with pytest.raises(ConfigError, match="go together"):
        EvalConfig(drafter=Path("d"), target="t")


CACHE, DECODING = {"cache": "c"}, {"target": "t", "prompts": "p"}
IDLE_WITH_A_CACHE = {
    "max_prompts": 3,
    "max_new_tokens": 8,
    "batch_size": 2,
    "temperature": 0.5,
    "seed": 1,
    "thinking": "on",
    "system": "be brief",
}
IDLE_WITH_A_TARGET = {"held_out": 0.5, "max_tokens": 10}


@pytest.mark.parametrize("name", [*IDLE_WITH_A_CACHE, *IDLE_WITH_A_TARGET])
def test_an_option_of_the_other_way_to_evaluate_is_refused(name):
    value = (IDLE_WITH_A_CACHE | IDLE_WITH_A_TARGET)[name]
    here, there = (CACHE, DECODING) if name in IDLE_WITH_A_CACHE else (DECODING, CACHE)
    with pytest.raises(ConfigError, match=f"{flag(name)} .*: changes nothing with --"):
        EvalConfig(drafter=Path("d"), **here, **{name: value})
    EvalConfig(drafter=Path("d"), **there, **{name: value})
