"""The benchmark's real command line at its smallest, and the numbers of its table by hand."""

import benchmark
import pandas
import pytest
from conftest import run_script


def turns(seconds, cpu_seconds, lengths):
    frame = pandas.DataFrame({"seconds": seconds, "cpu_seconds": cpu_seconds, "length": lengths})
    return frame.to_dict("records")


def test_ratios_are_taken_within_a_turn():
    """The machine becomes slower from turn to turn, for both competitors."""
    ours = turns([1.0, 2.0, 4.0], [2.0, 2.0, 2.0], [10.0, 20.0, 30.0])
    theirs = turns([3.0, 10.0, 14.0], [4.0, 6.0, 4.0], [12.0, 14.0, 16.0])
    # The ratios of the seconds are 3, 5 and 3.5, and that of the medians would be 5.
    _, line = benchmark.table_rows({"GRPO-Lite": ours, "TRL": theirs})
    assert line == "| TRL | 14 | 10 | 3.50 (3.00 to 5.00) | 4 | 2.00 (2.00 to 3.00) |"


def test_a_turn_is_the_median_of_its_intervals_without_the_first():
    calls = turns([0, 1, 100, 104, 109, 120], [0, 1, 50, 57, 65, 85], [9, 1, 2, 10, 20, 60])
    calls = pandas.DataFrame(calls)
    calls["num_completions"] = [1, 8, 8, 8, 8, 8]  # the first one is of an evaluation
    turn = benchmark.median_of_intervals(calls, num_completions=8)
    assert turn == {"seconds": 5, "cpu_seconds": 8, "length": 20}


@pytest.mark.slow
def test_the_command_line():
    flags = "--model_name tiny/0.3m --num_prompts 4 --group_size 4 --max_completion_length 32"
    flags += " --iterations 1 --repeats 2"
    run = run_script("experiments/benchmark.py", *flags.split())
    assert run.returncode == 0, run.stderr[-2000:]
    rows = [line.strip("| ").split(" | ") for line in run.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == ["GRPO-Lite"]
    for _, length, seconds, _, cpu_seconds, _ in rows:
        assert 4 <= float(length) < 32, "completions end at EOS"
        assert 0 < float(cpu_seconds) < 2 * float(seconds), "one thread"
