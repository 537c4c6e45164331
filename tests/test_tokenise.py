"""Many rows go through other processes and a folder; that changes the time and nothing else."""

import dataclasses
import errno
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import CHATML, chat_rows, make_tokenizer, write_jsonl

from dflash_cache import tokenise
from dflash_cache.chat import ChatOptions
from dflash_cache.config import BuildConfig
from dflash_cache.errors import DataError, DiskFullError
from dflash_cache.samples import RowEncoder, Samples, identity_of, load_samples

BAD = [{}, {"text": "a"}, {"messages": [{"role": "wizard"}]}, {"text": "cat " * 400}]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Forty rows are many here, and tokens are kept below this folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(tokenise, "FEW_ROWS", 20)
    monkeypatch.setattr(tokenise, "LEAST_ROWS_OF_A_WORKER", 10)
    monkeypatch.setattr(tokenise, "BATCH_ROWS", 7)
    return tmp_path / "cache" / "dflash"


@pytest.fixture
def rows() -> list[dict]:
    return [*chat_rows(40), *BAD, {"input_ids": [100, 101, 102], "loss_mask": [0, 1, 1]}]


def configured(folder: Path, rows: list[dict], **options) -> BuildConfig:
    data = write_jsonl(folder / "rows.jsonl", rows)
    return BuildConfig(
        target="-", data=str(data), out=folder / "out", **{"max_skipped": 0.9, **options}
    )


def load(config: BuildConfig, tokenizer=None) -> Samples:
    return load_samples(config, tokenizer or make_tokenizer(), vocab_size=310, max_positions=512)


@pytest.fixture
def here(tmp_path, rows, monkeypatch) -> Samples:
    """The oracle: all rows in this process."""
    with monkeypatch.context() as few:
        few.setattr(tokenise, "FEW_ROWS", 1000)
        return load(configured(tmp_path, rows))


def same(found: Samples, wanted: Samples) -> bool:
    return (found.sha256(), found.rows, found.skipped) == (
        wanted.sha256(),
        wanted.rows,
        wanted.skipped,
    )


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_processes_gives_the_samples_of_one(tmp_path, rows, here, workers, cache):
    assert not cache.exists()
    found = load(configured(tmp_path, rows, data_workers=workers))
    assert same(found, here)
    assert found.rows == len(found.samples) + sum(found.skipped.values()) == len(rows)


def test_the_second_run_reads_what_the_first_one_kept(tmp_path, rows, here, monkeypatch):
    config = configured(tmp_path, rows)
    load(config)
    monkeypatch.setattr(tokenise, "_map", None)  # nobody may tokenise
    assert same(load(config), here)


def test_one_folder_with_nothing_but_tokens_is_kept_and_named(tmp_path, rows, cache, capfd):
    found = load(configured(tmp_path, rows))
    (kept,) = cache.iterdir()
    assert {path.name for path in kept.iterdir()} == {
        *("ids.bin", "mask.bin", "ends.npy", "facts.parquet")
    }
    assert (kept / "ids.bin").stat().st_size == 4 * found.tokens
    out, err = capfd.readouterr()
    assert out == ""
    assert f"tokens are kept in {kept}" in err
    assert err.count("\n") == 1


def test_few_rows_are_kept_nowhere(tmp_path, cache):
    load(configured(tmp_path, chat_rows(20)))
    assert not cache.exists()


def test_a_few_long_rows_are_many(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(tokenise, "FEW_CHARACTERS", 1000)
    load(configured(tmp_path, [{"text": "the cat " * 50}] * 5))
    assert cache.exists()


def test_kept_tokens_may_be_written_to_without_changing_the_file(tmp_path, rows, here):
    config = configured(tmp_path, rows)
    load(config)
    sample = load(config).samples[0]
    torch.from_numpy(sample.input_ids).zero_()  # and torch does not warn
    assert same(load(config), here)


@pytest.mark.parametrize("name", ["ids.bin", "mask.bin", "ends.npy", "facts.parquet"])
@pytest.mark.parametrize("damage", ["cut", "gone", "empty"])
def test_a_damaged_folder_is_made_anew(tmp_path, rows, here, cache, name, damage):
    config = configured(tmp_path, rows)
    load(config)
    (kept,) = cache.iterdir()
    size = (kept / name).stat().st_size
    (kept / name).unlink() if damage == "gone" else os.truncate(
        kept / name, size // 2 if damage == "cut" else 0
    )
    assert same(load(config), here)
    assert (kept / name).stat().st_size == size


def test_two_builds_at_once_leave_one_whole_folder(tmp_path, rows, here, cache):
    config = configured(tmp_path, rows)
    fork = multiprocessing.get_context("fork")
    other = fork.Process(target=load, args=(config,))
    other.start()
    found = load(config)
    other.join()
    assert other.exitcode == 0
    assert same(found, here)
    assert same(load(config), here)
    assert len(list(cache.iterdir())) == 1


def test_what_nobody_used_goes_when_something_new_comes(tmp_path, rows, cache):
    old, recent = cache / "old", cache / "recent"
    for folder, days in ((old, tokenise.DAYS_KEPT + 1), (recent, 1)):
        folder.mkdir(parents=True)
        (folder / "ids.bin").write_bytes(b"")
        used = time.time() - days * 24 * 3600
        os.utime(folder, (used, used))
    load(configured(tmp_path, rows))
    assert not old.exists()
    assert recent.exists()


def test_a_use_counts(tmp_path, rows, cache):
    config = configured(tmp_path, rows)
    load(config)
    (kept,) = cache.iterdir()
    os.utime(kept, (0, 0))
    load(config)
    assert kept.stat().st_mtime > time.time() - 3600


def test_kept_tokens_of_a_folder_that_cannot_be_written_are_read(tmp_path, rows, here, monkeypatch):
    config = configured(tmp_path, rows)
    load(config)

    def read_only(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("utime", "mkdir", "rename", "rmdir", "unlink"):
        monkeypatch.setattr(os, name, read_only)
    assert same(load(config), here)


def test_a_template_that_writes_the_date_keeps_its_tokens_and_their_name(tmp_path, rows):
    dated = make_tokenizer(template="{{ strftime_now('%d %b %Y') }}\n" + CHATML)
    config = configured(tmp_path, rows)
    found = load(config, dated)
    assert "26 Jul 2024" in dated.decode(found.samples[0].input_ids)
    assert same(load(dataclasses.replace(config, max_samples=1000), dated), found)  # anew


# --- what the kept tokens are found by ----------------------------------------------------------


@pytest.fixture
def identity(tmp_path, rows):
    """The hash of a load, with something changed."""

    def hashed(*, tokenizer=None, rows=rows, encoder=None, **options) -> str:
        config = configured(tmp_path, rows, **options)
        known = RowEncoder(
            tokenizer=tokenizer or make_tokenizer(),
            options=ChatOptions(),
            vocab_size=310,
            longest=512,
            too_long="skip",
            prompts=None,
        )
        return identity_of(config, dataclasses.replace(known, **(encoder or {})))

    return hashed


def test_everything_that_decides_the_tokens_is_in_their_name(identity, rows):
    other_template = make_tokenizer(template="{{ messages[0]['content'] }}")
    other_tokens = make_tokenizer()
    other_tokens.add_tokens(["the cat"])
    names = [
        identity(),
        identity(rows=rows[1:]),
        identity(rows=[*rows[1:], rows[0]]),
        identity(max_samples=30),
        identity(tokenizer=other_template),
        identity(tokenizer=other_tokens),
        identity(encoder={"longest": 511}),
        identity(encoder={"too_long": "cut"}),
        identity(encoder={"vocab_size": 311}),
        identity(encoder={"options": ChatOptions(system="be kind")}),
        identity(encoder={"options": ChatOptions(thinking="off")}),
        identity(encoder={"options": ChatOptions(last_turn_only=True)}),
    ]
    assert len(set(names)) == len(names)


def test_the_prompts_to_leave_out_are_in_the_name(identity):
    from dflash_cache.duplicates import index_prompts

    found = {identity(encoder={"prompts": index_prompts([text])}) for text in ("one", "two")}
    assert len({identity(), *found}) == 3


def test_a_use_of_the_tokenizer_and_the_number_of_processes_are_not(identity):
    used = make_tokenizer()
    used("the cat sat on a mat", truncation=True, max_length=3, padding="max_length")
    assert identity() == identity(tokenizer=used) == identity(data_workers=7)


SAME_NAME = """
import sys
from conftest import make_tokenizer
from dflash_cache.chat import ChatOptions
from dflash_cache.config import BuildConfig
from dflash_cache.duplicates import index_prompts
from dflash_cache.samples import RowEncoder, identity_of
encoder = RowEncoder(
    tokenizer=make_tokenizer(), options=ChatOptions(), vocab_size=310, longest=512,
    too_long="skip", prompts=index_prompts(["the cat sat on a mat and saw one", "two", "three"]),
)
print(identity_of(BuildConfig(target="-", data=sys.argv[1], out="-"), encoder))
"""


def test_the_name_is_the_same_in_every_process(tmp_path, rows):
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    names = {
        subprocess.run(
            [sys.executable, "-c", SAME_NAME, str(data)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parent)},
        ).stdout
        for seed in ("1", "2")
    }
    (name,) = names
    assert len(name.strip()) == 32


# --- failures -----------------------------------------------------------------------------------


def nothing_is_left(cache: Path) -> bool:
    return not cache.exists() or list(cache.iterdir()) == []


def test_an_error_in_another_process_is_its_own(tmp_path, rows, cache):
    bare = make_tokenizer()
    bare.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        load(configured(tmp_path, rows, data_workers=2), bare)
    assert nothing_is_left(cache)


def test_a_broken_line_far_down_is_told_with_its_number(tmp_path, rows, cache):
    config = configured(tmp_path, rows)
    with open(config.data, "a", encoding="utf-8") as file:
        file.write("{broken\n")
    with pytest.raises(DataError, match=f"line {len(rows) + 1}: broken JSON"):
        load(config)
    assert nothing_is_left(cache)


def test_a_killed_process_is_one_message(tmp_path, rows, cache, monkeypatch):
    monkeypatch.setattr(RowEncoder, "__call__", lambda *_: os._exit(9))
    with pytest.raises(DataError, match=r"was killed.*give --data-workers less than 2"):
        load(configured(tmp_path, rows, data_workers=2))
    assert nothing_is_left(cache)


def test_a_full_disk_is_one_message(tmp_path, rows, cache, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokenise, "_write_arrow", full)
    with pytest.raises(DiskFullError, match="HF_DATASETS_CACHE names another place"):
        load(configured(tmp_path, rows))
    assert nothing_is_left(cache)


def test_a_place_that_cannot_be_written_is_one_message(tmp_path, rows, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match="tokens cannot be kept there"):
        load(configured(tmp_path, rows))


def test_the_environment_is_as_it_was(tmp_path, rows, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    environ = os.environ
    load(configured(tmp_path, rows, data_workers=2))
    assert os.environ is environ
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


# --- other sources ------------------------------------------------------------------------------


def test_a_data_set_folder_gives_the_samples_of_its_rows(tmp_path, here, rows, monkeypatch):
    import datasets

    chats = chat_rows(40)
    datasets.Dataset.from_list(chats).save_to_disk(tmp_path / "saved")
    config = dataclasses.replace(configured(tmp_path, []), data=str(tmp_path / "saved"))
    found = load(config)
    assert same(found, load(configured(tmp_path, chats)))
    monkeypatch.setattr(tokenise, "_map", None)
    assert same(load(config), found)


def test_absent_keys_stay_absent_on_the_way_through_arrow(tmp_path):
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
        "{% if m.tool_calls is defined %} calls {{ m.tool_calls[0].function.name }}{% endif %}"
        "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = make_tokenizer(template=template)
    calls = [{"type": "function", "function": {"name": "wave", "arguments": {}}}]
    with_calls = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "sat", "tool_calls": calls},
    ]
    rows = [*chat_rows(25), {"messages": with_calls}]
    found = load(configured(tmp_path, rows, data_workers=1), tokenizer)
    texts = [tokenizer.decode(sample.input_ids) for sample in found.samples]
    assert [" calls" in text for text in texts] == [False] * 25 + [True]


def test_a_row_nested_as_deep_as_json_goes_is_a_sample_or_a_reason(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(
        '{"messages": [{"role": "user", "content": ' + "[" * d + "]" * d + "}]}\n"
        for d in range(100, 900, 50)
    ) + '{"text": "the cat sat"}\n')  # fmt: skip
    config = BuildConfig(target="-", data=str(data), out=tmp_path / "out", max_skipped=1.0)
    found = load(config)
    assert 17 == found.rows == len(found.samples) + sum(found.skipped.values())


def test_tokens_are_views_of_two_arrays(tmp_path, rows):
    found = load(configured(tmp_path, rows))
    assert all(sample.input_ids.base is not None for sample in found.samples)
    assert all(sample.input_ids.dtype == np.int32 for sample in found.samples)
    assert all(sample.loss_mask.dtype == np.bool_ for sample in found.samples)
