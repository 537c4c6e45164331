"""Whatever is wrong with what the user gives: one message, exit 1 (2 for usage), no traceback."""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from conftest import chat_rows, save_tiny_target, write_jsonl

GOOD = chat_rows(4)


@pytest.fixture(scope="module")
def command():
    (script,) = entry_points(group="console_scripts", name="dflash")
    return script.load()


@pytest.fixture(scope="module")
def small_target(tmp_path_factory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target") / "small", layers=4)


@pytest.fixture
def dflash(command):
    """Run the command with words."""

    def run(*words: object) -> Result:
        return CliRunner().invoke(command, [str(word) for word in words])

    return run


@pytest.fixture
def build(dflash, small_target, tmp_path):
    """Run a small build; `data` is rows or a path, an option of None is left out."""

    def run(*words: str, data=GOOD, **options) -> Result:
        if isinstance(data, list):
            data = write_jsonl(tmp_path / "rows.jsonl", data)
        options = {
            "target": small_target,
            "data": data,
            "out": tmp_path / "out",
            "target_dtype": "float32",
            "target_layers": "1",
            "agreement_samples": 0,
            "devices": "cpu",
            **options,
        }
        typed = [
            word
            for name, value in options.items()
            if value is not None
            for word in ("--" + name.replace("_", "-"), value)
        ]
        return dflash("cache", "build", *typed, *words)

    return run


def is_one_message(result: Result, *told: str) -> None:
    """Exit 1, nothing on stdout, one line on stderr that says all of `told`."""
    assert result.exit_code == 1, (result.output, result.exception)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    for words in told:
        assert words in result.stderr


def is_usage(result: Result, *told: str) -> None:
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    assert result.stderr.startswith("Usage: ")
    for words in told:
        assert words in result.stderr


# --- the good case, so that the bad ones fail for their own reason ------------------------------


def test_a_good_build_prints_one_object_on_stdout_and_nothing_else(build, tmp_path):
    result = build("--json")
    assert result.exit_code == 0, (result.output, result.exception)
    (line,) = result.stdout.splitlines()
    assert json.loads(line)["samples"] == 4
    (told,) = result.stderr.splitlines()
    assert told.startswith("extracted ")
    assert (tmp_path / "out" / "manifest.json").is_file()


def test_a_dry_run_prints_one_object_and_writes_nothing(build, tmp_path):
    result = build("--dry-run", "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    found = json.loads(result.stdout)
    assert found["samples"] == 4
    assert found["fits"] is True
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl"}


def test_people_get_a_table(build, dflash, tmp_path):
    build()
    result = dflash("cache", "info", tmp_path / "out")
    assert result.exit_code == 0
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert lines["complete"] == "yes"
    assert lines["samples"] == "4"


# --- usage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["target", "data", "out"])
def test_a_missing_option_is_usage_and_named(build, name):
    is_usage(build(**{name: None}), f"Missing option '--{name}'")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"unit_tokens": "many"}, "'many' is not a valid integer"),
        ({"bucket_edges": "10,x"}, "want whole numbers with commas between them"),
        ({"target_layers": "1,"}, "want whole numbers with commas between them"),
        ({"max_skipped": "half"}, "'half' is not a valid float"),
        ({"no_such_option": "1"}, "No such option"),
    ],
)
def test_a_word_that_is_no_value_is_usage_and_named(build, options, told):
    is_usage(build(**options), told)


def test_no_folder_for_info_is_usage(dflash):
    is_usage(dflash("cache", "info"), "Missing argument 'CACHE'")


# --- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"target_dtype": "float16"}, "--target-dtype float16: want bfloat16 or float32"),
        ({"target_revision": "main"}, "a folder has no revisions; leave out --target-revision"),
        ({"encoding": "fp4"}, "--encoding fp4: want bf16, lossless"),
        ({"tensor_parallel": 0}, "--tensor-parallel 0: want 1 or more"),
        ({"bucket_edges": "10,5"}, "--bucket-edges (10, 5): want increasing numbers"),
        ({"batch_tokens": 0}, "--batch-tokens 0: want 1 or more"),
        ({"max_skipped": 2}, "--max-skipped 2.0: want a share between 0 and 1"),
        ({"max_length": -3}, "--max-length -3: want 1 or more"),
        ({"agreement_samples": -1}, "--agreement-samples -1: want 0 or more"),
        ({"target_layers": "3,1"}, "--target-layers 3,1: want increasing layer numbers"),
        ({"target_layers": "1,4"}, "between 0 and 3"),
        ({"target_layers": None, "num_target_layers": 9}, "ask for fewer or name --target-layers"),
        ({"mask_token_id": 5000}, "--mask-token-id 5000: the embedding has rows 0 to 309"),
        ({"mask_token_id": 2}, "--mask-token-id 2: that is the end or padding token"),
        ({"mask_token_id": 50}, "--mask-token-id 50: the tokenizer produces that id"),
        ({"devices": "quantum"}, "--devices quantum: want auto, all, cpu or numbers of GPUs"),
        ({"devices": "cpu,meta"}, "--devices cpu,meta: want auto, all, cpu or numbers of GPUs"),
    ],
)
def test_an_option_that_cannot_work_is_one_message(build, tmp_path, options, told):
    is_one_message(build(**options), told)
    assert not (tmp_path / "out").exists()


def test_a_full_disk_before_the_first_byte_is_one_message(build, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    is_one_message(build(), "Nothing was written", "Free space")
    assert not (tmp_path / "out").exists()


# --- data ---------------------------------------------------------------------------------------


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("d.jsonl", b'{"text": "a"}\n{"text": \n', "line 2: broken JSON"),
        ("d.jsonl", b'{"text": "a"}\n[1]\n', "line 2: found list, want a JSON object per row"),
        ("d.jsonl", b"\xff\xfe", "not UTF-8"),
        ("d.jsonl", b"", "holds no rows"),
        ("d.jsonl", b"\n \n", "holds no rows"),
        ("d.jsonl", b"[" * 100_000, "line 1: broken JSON"),
        ("d.jsonl", b'{"text": "\\ud800"}', "none of 1 rows can be used (1 not text that can be"),
        ("d.jsonl", b'{"a": 1}\n{"a": 2}', "none of 2 rows can be used (2 no messages"),
        ("d.json", b"{}", "want a JSON list of rows"),
        ("d.json", b"\xff", "not UTF-8"),
        ("d.json", b"[", "broken JSON"),
        ("d.txt", b"hello", "cannot be read as a file, a data set folder or a Hub data set"),
    ],
)
def test_a_data_file_that_cannot_be_used_is_one_message(build, tmp_path, name, content, told):
    is_one_message(build(data=written(tmp_path / name, content)), name, told)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["no.jsonl", "no.json", "no.parquet", "no-folder"])
def test_data_that_is_not_there_is_one_message(build, tmp_path, name):
    is_one_message(build(data=tmp_path / name), name)


def test_too_many_rows_that_cannot_be_used_are_one_message_with_the_reasons(build):
    is_one_message(
        build(data=[*GOOD, {}, {"text": "a"}]),
        "2 of 6 rows cannot be used",
        "1 no messages",
        "1 no two supervised tokens in a row",
        "--max-skipped 0.1",
    )


# --- target -------------------------------------------------------------------------------------


@pytest.fixture
def broken_target(small_target, tmp_path) -> Path:
    return shutil.copytree(small_target, tmp_path / "broken")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("config.json", None, "no config.json in this folder"),
        ("config.json", b"{", "no tokenizer"),
        ("config.json", b'{"model_type": "zebra"}', "zebra"),
        ("tokenizer.json", b"{", "no tokenizer"),
        ("tokenizer.json", b"{}", "no tokenizer"),
        ("model.safetensors", None, "is the folder complete"),
        ("model.safetensors", b"rubbish", "cannot be loaded"),
    ],
)
def test_a_target_folder_with_a_broken_file_is_one_message(
    build, tmp_path, broken_target, name, content, told
):
    path = broken_target / name
    path.unlink() if content is None else path.write_bytes(content)
    is_one_message(build(target=broken_target), "broken", told)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", [{"num_hidden_layers": 9}, {"intermediate_size": 48}])
def test_weights_that_do_not_fit_their_config_are_one_message(build, broken_target, change):
    path = broken_target / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    is_one_message(build(target=broken_target), "weights")


@pytest.mark.parametrize("name", ["nobody/nothing", "no such folder"])
def test_a_target_that_is_nowhere_is_one_message(build, name):
    is_one_message(build(target=name), name, "neither a folder here nor a model that the Hub")


def test_a_target_without_a_chat_template_is_one_message(build, broken_target):
    (broken_target / "chat_template.jinja").unlink()
    is_one_message(build(target=broken_target), "no chat template")


def test_text_that_the_target_only_guesses_is_one_message(build):
    is_one_message(build(agreement_samples=2), "no likelier than guessing")


# --- the cache folder ---------------------------------------------------------------------------


def test_out_that_is_something_else_is_one_message(build, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("ten years of work")
    is_one_message(build(out=tmp_path / "thesis"), "not empty and not a cache")


def test_out_that_is_a_file_is_one_message(build, tmp_path):
    (tmp_path / "file").write_text("")
    is_one_message(build(out=tmp_path / "file"), "a file stands where")
    is_one_message(build(out=tmp_path / "file" / "cache"), "cannot be written (Not a directory)")


def test_out_that_was_begun_with_other_options_is_one_message(build):
    assert build().exit_code == 0
    is_one_message(build(target_layers="0,1"), "this cache was begun with target_layer_ids = [1]")


@pytest.mark.parametrize("content", [None, b"{", b"{}", b'{"attributes": {}}'])
def test_info_of_no_cache_is_one_message(dflash, tmp_path, content):
    if content is not None:
        (tmp_path / "zarr.json").write_bytes(content)
    is_one_message(dflash("cache", "info", tmp_path), str(tmp_path))
    is_one_message(dflash("cache", "info", tmp_path / "nothing", "--json"), "not a cache folder")


@pytest.mark.parametrize(
    "words", [["gc"], ["convert", "--encoding", "fp8", "--out", "new"]], ids=["gc", "convert"]
)
def test_other_commands_on_no_cache_are_one_message_and_make_nothing(
    dflash, tmp_path, monkeypatch, words
):
    monkeypatch.chdir(tmp_path)
    is_one_message(dflash("cache", *words, "nothing"), "not a cache folder")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "told"),
    [("manifest.json", "not a manifest"), ("commits/u000000.json", "not a commit record")],
)
def test_info_of_a_damaged_cache_is_one_message(build, dflash, tmp_path, name, told):
    assert build().exit_code == 0
    (tmp_path / "out" / "manifest.json").unlink()  # a sealed cache has its totals there
    (tmp_path / "out" / name).write_text("{")
    is_one_message(dflash("cache", "info", tmp_path / "out"), name, told)
    is_one_message(dflash("cache", "info", tmp_path / "out", "--json"), name, told)


# --- the options file ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"unit_tokens = ", "not TOML"),
        (b"\xff", "cannot be read"),
        (b"colour = 'red'", "unknown option 'colour'"),
        (b"unit-tokens = 'many'", "found 'many', want int"),
        (b"target-dtype = 'float16'", "want bfloat16 or float32"),
    ],
)
def test_an_options_file_that_cannot_work_is_one_message(build, tmp_path, content, told):
    path = written(tmp_path / "options.toml", content)
    is_one_message(build("--config", path, target_dtype=None), told)


def test_an_options_file_that_is_not_there_is_one_message(build, tmp_path):
    is_one_message(build("--config", tmp_path / "no.toml"), "no.toml: cannot be read")


# --- the installed command ----------------------------------------------------------------------


def test_the_installed_command_says_it_on_stderr_and_exits_1(tmp_path):
    command = [sys.executable, "-m", "dflash_cli"]
    result = subprocess.run(
        [*command, "cache", "info", tmp_path / "nothing", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        f"Error: {tmp_path / 'nothing'}: not a cache folder (no zarr.json); "
        "run `dflash cache build`\n"
    )
