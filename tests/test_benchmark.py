"""The benchmark's real command line at its smallest, and the numbers of its table by hand."""

import sys

import pytest
from conftest import ROOT, run_script

sys.path.insert(0, str(ROOT / "experiments"))

import benchmark
from benchmark import Turn


def test_ratios_are_taken_within_a_turn():
    """The machine becomes slower from turn to turn, for both competitors."""
    ours = [Turn(1.0, 2.0, 10.0), Turn(2.0, 2.0, 20.0), Turn(4.0, 2.0, 30.0)]
    theirs = [Turn(3.0, 4.0, 12.0), Turn(8.0, 6.0, 14.0), Turn(12.0, 4.0, 16.0)]
    # The ratios of the seconds are 3, 4 and 3, and that of the medians would be 4.
    _, line = benchmark.table_rows("step", {"GRPO-Lite": ours, "TRL": theirs})
    assert line == "| step | TRL | 14 | 8 | 3.00 (3.00 to 4.00) | 4 | 2.00 (2.00 to 3.00) |"


def test_a_turn_is_the_median_of_its_intervals():
    times = [[100.0, 50.0], [104.0, 57.0], [109.0, 65.0], [115.0, 74.0]]
    assert benchmark.median_turn(times, [10.0, 20.0, 60.0]) == Turn(5.0, 8.0, 20.0)


@pytest.mark.slow
def test_step_and_sampling():
    flags = "--model_name tiny/0.1m --num_prompts 4 --group_size 4 --max_completion_length 32"
    flags += " --iterations 1 --repeats 2"
    run = run_script("experiments/benchmark.py", "step", "sampling", *flags.split())
    assert run.returncode == 0, run.stderr[-2000:]
    rows = [line.strip("| ").split(" | ") for line in run.stdout.splitlines()[2:]]
    names = [row[:2] for row in rows]
    assert names == [
        ["step", "GRPO-Lite"],
        ["sampling", "GRPO-Lite"],
        ["sampling", "model.generate"],
    ]
    for row in rows:
        _, _, length, seconds, _, cpu_seconds, _ = row
        assert 1 <= float(length) < 32, "completions end at EOS"
        assert 0 < float(cpu_seconds) < 2 * float(seconds), "one thread"
