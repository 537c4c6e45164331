"""What we say of our speed is what a benchmark found, and is committed."""

import json
import operator
from pathlib import Path

import pytest

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
at_most, at_least = operator.le, operator.ge

# On one H200, at the shapes of the drafters of Qwen3.6-27B and of a 4B target.
STEP = {
    "ceiling_tflops": (at_least, 700),
    "first_replay_s": (at_most, 60),
    "step_ms_T4096_A512": (at_most, 215),
    "step_ms_4b_T8192_A1024": (at_most, 165),
    "tflops_A2048": (at_least, 560),
    "tflops_A8192": (at_least, 570),
    "memory_gb_A8192": (at_most, 100),
    "captured_over_plain_eager": (at_least, 1.15),
    "captured_over_compiled_27b": (at_least, 0.98),
    "captured_over_compiled_small": (at_least, 1.3),
    "host_ms_per_step": (at_most, 3),
    "loop_over_replay": (at_least, 0.97),
    "reader_over_raw": (at_least, 0.85),
}

# A target of the shapes of Qwen3.6-27B, random weights, batches from all six buckets.
EXTRACT = {
    "ceiling_tflops": (at_least, 700),
    "forward_tokens_per_s": (at_least, 9_050),
    "build_tokens_per_s": (at_least, 9_000),
    "build_over_forward": (at_least, 0.95),
    "build_tokens_per_s_fp8": (at_least, 9_000),
    "build_over_forward_fp8": (at_least, 0.95),
    "padding_share": (at_most, 0.05),
}

# A process group of one on one H200: what the all-reduce in the graph adds to a step.
RANKS = {"reduce_over_alone": (at_most, 1.02), "reduce_over_alone_T4096_A512": (at_most, 1.02)}

# Two H200s: the all-reduce between them, a killed rank, a target that they share.
TWO = {
    "reduce_over_alone": (at_most, 1.02),
    "kill_seconds": (at_most, 30),
    "kill_named": (at_least, 1),
    "tensor_apart_worst": (at_most, 0.03),
}

# A checkpoint of the drafter of Qwen3.6-27B, from one H200.
SAVE = {"save_stall_s": (at_most, 1.0), "save_gb": (at_least, 24)}

# Four trials on one H200 that share one read of SmolLM2's cache, and the same one after another.
SWEEP = {
    "bytes_read_ratio": (at_most, 1.1),
    "wall_over_sequential": (at_most, 0.5),
    "last_loss_apart.max": (at_most, 0.0),
}


def test_the_table_of_decoded_prompts_is_what_was_measured():
    readme = (RESULTS.parents[1] / "README.md").read_text()
    found = figures("decode-cpu.json")
    for name in ("mtbench", "gsm8k", "humaneval", "all"):
        value, error = (found[f"{name}.acceptance_length{end}"] for end in ("", "_error"))
        assert f"| {value:.2f} ± {error:.2f} |" in readme
        assert found[f"{name}.answers_differing"] == found[f"{name}.looping"] == 0


def figures(pattern):
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob(pattern))]
    return {key: value for result in found for key, value in result["figures"].items()}


def assert_holds(bounds, file, key):
    compare, bound = bounds[key]
    assert compare(figures(file)[key], bound)


@pytest.mark.parametrize("key", STEP)
def test_the_step_is_as_fast_as_we_want_it(key):
    assert_holds(STEP, "step-h200.json", key)


@pytest.mark.parametrize("key", EXTRACT)
def test_a_build_is_as_fast_as_the_forward_of_its_target(key):
    assert_holds(EXTRACT, "extract-h200.json", key)


@pytest.mark.parametrize("key", TWO)
def test_two_gpus_add_little_end_together_and_share_a_target(key):
    assert_holds(TWO, "ranks-h200-x2.json", key)


@pytest.mark.parametrize("key", RANKS)
def test_an_all_reduce_in_the_graph_costs_a_world_of_one_nothing(key):
    assert_holds(RANKS, "ranks-h200.json", key)


@pytest.mark.parametrize("key", SAVE)
def test_a_checkpoint_holds_training_up_for_less_than_a_second(key):
    assert_holds(SAVE, "save-h200.json", key)


@pytest.mark.parametrize("key", SWEEP)
def test_a_sweep_reads_the_cache_once_and_ends_where_its_trials_alone_do(key):
    assert_holds(SWEEP, "sweep-h200.json", key)


def test_every_result_says_where_it_comes_from():
    for path in RESULTS.glob("*.json"):
        found = json.loads(path.read_text())
        assert {"benchmark", "device", "torch", "commit", "date", "shape", "figures"} <= set(found)
        assert found["figures"], path
