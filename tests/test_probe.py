"""The probe that every process computes again, the units that are read back, and what a cache
says of proofs that were left out."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from conftest import chat_rows, tiny_build, write_jsonl
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dflash_cache import build, evidence, ledger, probe, readback
from dflash_cache.build import build_cache
from dflash_cache.config import PROOF_NAMES
from dflash_cache.convert import convert_cache
from dflash_cache.describe import describe_cache
from dflash_cache.errors import CacheError, ConfigError, ProofError
from dflash_cache.plan import plan_only
from dflash_cache.reader import CacheReader
from dflash_cache.repair import repair_cache
from dflash_cache.schema import PROBE_FILE
from dflash_cache.target import Target
from dflash_cache.verify import verify_cache
from dflash_cache.weights import load_target
from dflash_cli.main import main


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("data") / "chats.jsonl", chat_rows(8))


@pytest.fixture
def config(tmp_path, tiny_target, data):
    """A build in a folder of its own."""

    def make(**changes):
        return tiny_build(tiny_target, data, tmp_path / "out", **changes)

    return make


@pytest.fixture
def loud(monkeypatch):
    """Another machine: its arithmetic gives other states, in the library too."""

    def begin() -> None:
        right = Target.hidden_states, Target.all_hidden_states

        def hidden_states(self, input_ids, layer_ids):
            return [1.02 * states for states in right[0](self, input_ids, layer_ids)]

        def all_hidden_states(self, input_ids):
            embedded, *states = right[1](self, input_ids)
            return embedded, *(1.02 * own for own in states)

        monkeypatch.setattr(Target, "hidden_states", hidden_states)
        monkeypatch.setattr(Target, "all_hidden_states", all_hidden_states)

    return begin


def stop_before_the_first_unit(monkeypatch, config) -> None:
    """Leave a build of which nothing but what lies beside the units is there."""
    with monkeypatch.context() as patch:
        patch.setattr(build, "extract", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build_cache(config)
    assert (config.out / PROBE_FILE).is_file()


# --- what is kept -------------------------------------------------------------------------------


def test_the_probe_is_what_the_library_says_of_a_lone_sample(config, tiny_target):
    build_cache(config(final_hidden=True))
    kept = load_file(config().out / PROBE_FILE)
    ids = kept.pop("input_ids")
    assert min(32, len(ids)) == 32
    plain = AutoModelForCausalLM.from_pretrained(tiny_target).eval()
    with torch.no_grad():
        said = plain.model(ids.long()[None], output_hidden_states=True).hidden_states
    wanted = {f"hidden/{i}": said[i + 1] for i in (1, 3, 5)} | {"final_hidden": said[-1]}
    assert kept.keys() == wanted.keys()
    for plane, states in wanted.items():
        # The threads of a build may add in another order before it is rounded.
        torch.testing.assert_close(kept[plane].float(), states[0], rtol=2**-7, atol=1e-5)


def test_the_last_layer_is_probed_before_the_final_norm(config, tiny_target):
    build_cache(config(target_layers=(1, 7)))
    kept = load_file(config().out / PROBE_FILE)
    plain = AutoModelForCausalLM.from_pretrained(tiny_target).eval()
    given = []
    plain.model.norm.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    with torch.no_grad():
        plain(kept["input_ids"].long()[None])
    torch.testing.assert_close(kept["hidden/7"].float(), given[0][0], rtol=2**-7, atol=1e-5)


def test_the_probe_is_long_enough_to_tell_and_short_enough_to_keep(config):
    samples = plan_only(config()).samples.samples
    lengths = sorted(sample.length for sample in samples)
    assert len(probe.probe_ids(samples)) == next(n for n in lengths if n >= 32)
    short = [sample for sample in samples if sample.length < 32] or samples[:1]
    assert len(probe.probe_ids(short)) == max(sample.length for sample in short)


def test_a_damaged_probe_is_named_and_can_be_deleted(config, monkeypatch):
    stop_before_the_first_unit(monkeypatch, config())
    path = config().out / PROBE_FILE
    payload = bytearray(path.read_bytes())
    payload[-1] ^= 1
    path.write_bytes(payload)
    with pytest.raises(CacheError, match=r"the probe is damaged\. Delete this file"):
        build_cache(config())
    path.unlink()
    assert build_cache(config()).samples == 8
    assert path.is_file()


# --- what is compared ---------------------------------------------------------------------------


def test_a_resumed_build_with_other_arithmetic_stops_at_the_probe(config, monkeypatch, loud):
    stop_before_the_first_unit(monkeypatch, config())
    loud()
    told = (
        r"target layer \d: the states of the probe sample differ by 0\.0\d+ .*: this process "
        r"\(cpu, float32, torch .*\) computes other states than the one that began the cache"
    )
    with pytest.raises(ProofError, match=told):
        build_cache(config())
    assert list(config().out.glob("commits/*")) == []


def test_a_worker_with_other_arithmetic_does_not_join(config, tiny_target, monkeypatch, loud):
    stop_before_the_first_unit(monkeypatch, config())
    plan = plan_only(config())
    other = load_target(str(tiny_target), dtype="float32", device="cpu")
    other.keep_up_to(max(plan.identity.target_layer_ids))  # as workers do that do not lead
    evidence.meet_probe(other, plan, config())
    loud()
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ProofError, match=r"worker 3 \(cpu"):
        evidence.meet_probe(other, plan, config())
    evidence.meet_probe(other, plan, config(no_proof=("probe",)))


def test_a_worker_that_finds_no_probe_works_in_another_folder(config, tiny_target):
    """It would else prove its own states by its own states."""
    other = load_target(str(tiny_target), dtype="float32", device="cpu")
    with pytest.raises(CacheError, match=r"not there, .* folder that their machines share"):
        evidence.meet_probe(other, plan_only(config()), config())


def test_a_worker_that_takes_wrong_states_is_told_which(config, tiny_target, monkeypatch):
    stop_before_the_first_unit(monkeypatch, config())
    plan, right = plan_only(config()), Target.hidden_states
    other = load_target(str(tiny_target), dtype="float32", device="cpu")
    monkeypatch.setattr(
        Target, "hidden_states", lambda self, ids, layers: right(self, ids, [i - 1 for i in layers])
    )
    with pytest.raises(ProofError, match=r"target layer \d: .* layer off by one, too low"):
        evidence.meet_probe(other, plan, config())


def test_what_a_worker_proves_needs_nothing_above_the_last_target_layer(config, tiny_target):
    plan = plan_only(config())
    cut = load_target(str(tiny_target), dtype="float32", device="cpu")
    cut.keep_up_to(max(plan.identity.target_layer_ids))
    cut.model.lm_head = None
    found = evidence.prove(cut, plan, {}, config(agreement_samples=4), lead=False)
    assert found["proofs"].keys() == {"tolerance", "hooks_vs_hidden_states", "padded_vs_alone"}
    assert found["agreement"] == {}


# --- caches without a probe ---------------------------------------------------------------------


def test_a_cache_without_a_probe_is_whole_read_repaired_and_converted(config, tmp_path):
    """One built with --no-proof probe, or by an older version."""
    manifest = build_cache(config(no_proof=("probe",)))
    root = config().out
    assert PROBE_FILE not in manifest.files
    assert not (root / PROBE_FILE).exists()
    assert verify_cache(root)["ok"]
    lost = root / ledger.read_record(ledger.record_path(root, "u000000")).folder
    shutil.rmtree(lost)
    assert repair_cache(root, device="cpu")["units_repaired"] == 1
    assert verify_cache(root)["ok"]
    assert not (root / PROBE_FILE).exists()
    convert_cache(root, encoding="fp8", out=tmp_path / "fp8", device="cpu")
    assert verify_cache(tmp_path / "fp8")["ok"]
    assert CacheReader(tmp_path / "fp8").hidden(0, [1, 3, 5]).any()


def test_options_of_an_older_version_are_read(config):
    """They know nothing of proofs that can be left out."""
    build_cache(config(no_proof=("probe",)))
    root = config().out
    identity, options = ledger.read_root(root)
    del options["no_proof"]
    (root / "zarr.json").write_bytes(ledger.root_group(identity, options))
    (root / "manifest.json").unlink()
    assert describe_cache(root)["proofs"] == {"skipped": []}
    assert build_cache(config()).proofs["skipped"] == ["agreement"]
    assert (root / PROBE_FILE).is_file()  # a build that goes on leaves one


def test_a_converted_cache_keeps_the_probe(config, tmp_path):
    build_cache(config())
    convert_cache(config().out, encoding="int8", out=tmp_path / "int8", device="cpu")
    there = [(root / PROBE_FILE).read_bytes() for root in (config().out, tmp_path / "int8")]
    assert there[0] == there[1]
    shutil.rmtree(tmp_path / "int8" / "units")
    assert repair_cache(tmp_path / "int8", device="cpu")["ok"]


# --- the units that are read back ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "budget", "wanted"),
    [
        ([30, 20, 10], 90, (2, 20)),  # one batch
        ([30, 29, 1], 60, (1, 1)),  # the shortest is alone in its batch
        ([10, 10], 100, (1, 0)),
    ],
)
def test_the_sample_with_the_most_padding_is_read_back(monkeypatch, lengths, budget, wanted):
    batches = {60: [[0, 1], [2]]}.get(budget, [list(range(len(lengths)))])
    monkeypatch.setattr(readback, "plan_batches", lambda *_, **__: batches)
    assert readback.most_padded(lengths, batch_tokens=budget) == wanted


@pytest.mark.parametrize("encoding", ["bf16", "lossless", "int8", "fp8"])
def test_first_units_of_every_encoding_read_back_as_they_should(config, monkeypatch, encoding):
    errors = {}
    right = readback.Expected.prove

    def noted(self, root, record):
        errors[record.unit] = right(self, root, record).worst

    monkeypatch.setattr(readback.Expected, "prove", noted)
    build_cache(config(encoding=encoding, bucket_edges=(512,), batch_tokens=2048))
    assert list(errors) == ["u000000"]
    assert errors["u000000"] < (0.12 if encoding in ("int8", "fp8") else 0.008)


def test_nothing_is_read_back_where_the_probe_is_left_out(config, monkeypatch):
    monkeypatch.setattr(readback, "expect", lambda *_, **__: pytest.fail("it was asked for"))
    build_cache(config(no_proof=("probe",)))


# --- proofs that are left out -------------------------------------------------------------------


def test_a_proof_that_does_not_exist_is_refused_with_those_that_do(config):
    told = "--no-proof hook: there is no such proof; known are hooks, padding, .*, template"
    with pytest.raises(ConfigError, match=told):
        config(no_proof=("padding", "hook"))


def test_every_proof_has_its_words():
    assert tuple(evidence.UNPROVEN) == PROOF_NAMES


def test_what_is_left_out_is_told_and_kept_and_shown_and_is_no_other_cache(config, capsys):
    plain = build.plan_with_weights(config())[1].identity.fingerprint
    manifest = build_cache(config(no_proof=("norms", "padding")))
    told = capsys.readouterr().err
    for name in ("padding", "norms"):
        assert f"--no-proof {name}: {evidence.UNPROVEN[name]}; the cache will say so" in told
    assert "--no-proof hooks" not in told
    assert manifest.proofs["skipped"] == ["padding", "norms", "agreement"]
    assert "padded_vs_alone" not in manifest.proofs
    assert manifest.fingerprint == plain
    done = CliRunner().invoke(main, ["cache", "info", str(config().out), "--json"])
    assert json.loads(done.stdout)["proofs"]["skipped"] == ["padding", "norms", "agreement"]
    assert "padding" in CliRunner().invoke(main, ["cache", "info", str(config().out)]).output


def test_a_build_that_goes_on_with_other_proofs_remembers_all_that_was_left_out(
    config, monkeypatch
):
    build_cache(config(no_proof=("hooks",)))
    (config().out / "manifest.json").unlink()
    (config().out / "commits" / "u000001.json").unlink()
    assert describe_cache(config().out)["proofs"] == {"skipped": ["hooks"]}
    manifest = build_cache(config(no_proof=("padding",), agreement_samples=0))
    assert manifest.proofs["skipped"] == ["hooks", "padding", "agreement"]
    assert "hooks_vs_hidden_states" in manifest.proofs  # this run did prove it
    assert manifest.options["no_proof"] == ["hooks", "padding"]
    (config().out / "manifest.json").unlink()
    assert describe_cache(config().out)["proofs"] == {"skipped": ["hooks", "padding"]}


def test_all_proofs_left_out_let_a_mistake_through(config, monkeypatch):
    """So it was they that stopped it, and nothing else."""
    right = Target.hidden_states
    monkeypatch.setattr(
        Target, "hidden_states", lambda *args: [0 * states for states in right(*args)]
    )
    with pytest.raises(ProofError):
        build_cache(config())
    manifest = build_cache(config(no_proof=PROOF_NAMES))
    assert manifest.proofs["skipped"] == list(PROOF_NAMES)
    assert not CacheReader(config().out).hidden(0, [1, 3, 5]).any()


def test_names_are_typed_with_commas_or_listed_in_a_file(config, tmp_path, tiny_target, data):
    words = ["cache", "build", "--dry-run", "--target", tiny_target, "--data", data]
    words = [*map(str, words), "--out", str(tmp_path / "out")]
    file = tmp_path / "build.toml"
    file.write_text('no-proof = ["hooks", "nothing"]\n')
    for more in (["--no-proof", "hooks, nothing"], ["--config", str(file)]):
        done = CliRunner().invoke(main, [*words, *more])
        assert done.exit_code == 1
        assert "--no-proof nothing: there is no such proof" in done.output
    assert CliRunner().invoke(main, [*words, "--no-proof", "hooks,,states"]).exit_code == 2


def test_the_probe_says_what_computed_it(config):
    build_cache(config())
    with safe_open(config().out / PROBE_FILE, "pt") as file:
        about = json.loads(file.metadata()["dflash_cache"])
    assert about["made_by"].startswith("cpu, float32, torch ")
