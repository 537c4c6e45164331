"""The tables of `dflash eval` for people, word for word."""

from dflash_cli.eval_tables import decoding_tables
from dflash_cli.output import aligned


def figures(**changes):
    told = {
        "acceptance_length": 1.5,
        "acceptance_length_error": 0.04321,
        "acceptance_length_macro": 1.61,
        "per_position": [0.4, 0.1],
        "full_blocks": 0.1,
        "acceptance_length_not_looping": 1.25,
        "offline_acceptance_length": 1.5,
        "identical_to_greedy": True,
        "answers_differing": 0,
        "plain_tokens_per_second": 10.04,
        "tokens_per_second": 12.5,
        "speedup": 1.245,
        "prompt_lookup": 1.2,
        "prompt_lookup_not_looping": 1.1,
        "looping": 0.25,
        "prompts": 4,
        "answers": 8,
        "answer_tokens": 1024,
    }
    return {**told, **changes}


def report(**changes):
    return {
        "drafter": "run/best",
        "target": "small",
        "dtype": "float32",
        "device": "cpu",
        "temperature": 0.0,
        "thinking": "off",
        "max_new_tokens": 128,
        "batch_size": 1,
        "block_size": 3,
        **figures(),
        **changes,
    }


def test_a_report_of_two_sets_reads_so():
    chat = figures(parts={"math": figures(prompts=1), "code": figures()})
    none = figures(
        acceptance_length=None,
        acceptance_length_error=None,
        acceptance_length_macro=None,
        full_blocks=None,
        prompt_lookup=None,
        per_position=[],
        acceptance_length_not_looping=None,
        prompt_lookup_not_looping=None,
    )
    found = decoding_tables(report(datasets={"chat": chat, "odd": none}))
    assert (
        found
        == """\
drafter  run/best, blocks of 3
target   small, float32 on cpu
answers  greedy, at most 128 tokens, 1 at a time, thinking off

        prompts  answers  tokens  acceptance length  macro  full blocks  prompt lookup
chat          4        8   1,024      1.500 ± 0.043  1.610          10%          1.200
  math        1        8   1,024      1.500 ± 0.043  1.610          10%          1.200
  code        4        8   1,024      1.500 ± 0.043  1.610          10%          1.200
odd           4        8   1,024                  -      -            -              -
all           4        8   1,024      1.500 ± 0.043  1.610          10%          1.200

tokens per second  plain decoding  with drafter  speedup
chat                         10.0          12.5     1.25
  math                       10.0          12.5     1.25
  code                       10.0          12.5     1.25
odd                          10.0          12.5     1.25
all                          10.0          12.5     1.25

answers that do not loop  looping  acceptance length  prompt lookup
chat                          25%              1.250          1.100
  math                        25%              1.250          1.100
  code                        25%              1.250          1.100
odd                           25%                  -              -
all                           25%              1.250          1.100

accepted at slot    1    2
chat              40%  10%
  math            40%  10%
  code            40%  10%
odd                 -    -
all               40%  10%

identical to plain greedy decoding   yes
acceptance length, measured offline  1.500"""
    )


def test_one_set_needs_no_row_of_all():
    lines = decoding_tables(report(datasets={"chat": figures()})).splitlines()
    assert not any(line.startswith("all") for line in lines)


def test_answers_that_differ_are_told_loudly_and_drawn_ones_not_compared():
    told = {"identical_to_greedy": False, "answers_differing": 3, "answers_differing_gap": 0.00123}
    text = decoding_tables(report(datasets={}, **told))
    assert "NO, 3 of 8 answers differ; where they part, " in text
    assert "the target's two logits are at most 0.0012 apart" in text
    drawn = report(datasets={}, identical_to_greedy=None, temperature=0.7)
    assert "not to be told of answers that are drawn" in decoding_tables(drawn)
    assert "temperature 0.7" in decoding_tables(drawn)


def test_columns_are_as_wide_as_their_widest_cell():
    assert aligned([["a", "bb"], ["ccc", "d"]]) == "a    bb\nccc   d"
    assert aligned([["a", "bb"], ["ccc", "d"]], right=False) == "a    bb\nccc  d"
