"""The benchmarks' real command lines at their smallest, and the numbers of their tables by hand."""

import sys

import pytest
from conftest import ROOT, run_script

sys.path.insert(0, str(ROOT / "benchmarks"))

import benchmark
from benchmark import Turn

SMALL = "--model_name tiny/0.1m --device cpu --num_prompts 2 --group_size 2 --threads 1".split()
SMALL += "--max_completion_length 32 --iterations 1 --repeats 2".split()


def table_rows(printed, first_column):
    """{first cell: the other cells} of the Markdown table whose first column has this name."""
    table = printed[printed.index(f"| {first_column} |") :].partition("\n\n")[0]
    rows = {}
    for line in table.splitlines()[2:]:
        name, *cells = line.strip("| ").split(" | ")
        rows[name] = cells
    return rows


def test_ratios_are_taken_within_a_turn():
    """The machine becomes slower from turn to turn, for both competitors."""
    ours = [Turn(1.0, 10.0), Turn(2.0, 20.0), Turn(4.0, 30.0)]
    theirs = [Turn(3.0, 12.0), Turn(8.0, 14.0), Turn(12.0, 16.0)]
    # The ratios are 3, 4 and 3, and that of the medians would be 4. With four completions, our
    # speeds are 40, 40 and 30 tokens a second.
    expected = ["step", "4", "40", "2 s, 20 tokens", "8 s, 14 tokens", "3.00 (3.00 to 4.00)"]
    assert benchmark.comparison_row("step", 4, ours, theirs) == expected
    assert benchmark.comparison_row("step", 4, ours, [])[-2:] == ["-", "-"]


def test_what_is_read_from_a_log_by_hand():
    """The first line warms up. An iteration includes what belongs to no stage."""
    log = [
        {"elapsed": 100.0, "response_length": 90.0, "time/loss": 50.0, "memory/loss": 9.0},
        {"elapsed": 104.0, "response_length": 10.0, "time/loss": 1.0, "memory/loss": 3.0},
        {"elapsed": 109.0, "response_length": 20.0, "time/loss": 2.0, "memory/loss": 5.0},
        {"elapsed": 115.0, "response_length": 30.0, "time/loss": 6.0, "memory/loss": 4.0},
    ]
    assert benchmark.turn_of_log(log) == Turn(5.0, 20.0)
    assert benchmark.stages_of_log(log) == {"loss": (2.0, 5.0)}
    for line in log:
        del line["memory/loss"]  # as on a CPU
    assert benchmark.stages_of_log(log) == {"loss": (2.0, None)}


@pytest.mark.slow
def test_step_and_sampling():
    run = run_script("benchmarks/benchmark.py", "step", "sampling", *SMALL)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "threads: 1, torch 2." in run.stdout.splitlines()[0]
    comparisons = table_rows(run.stdout, "work")
    assert len(comparisons) == 3
    # Both samplers must do the same work, or the ratio means nothing.
    lengths = {}
    for end in ("to the maximum length", "until EOS"):
        cells = comparisons[f"sampling {end}, next to model.generate"]
        lengths[end] = [int(cell.split()[-2]) for cell in cells[2:4]]
    assert lengths["to the maximum length"] == [32, 32]
    assert max(lengths["until EOS"]) < 32
    stages = table_rows(run.stdout, "stage of our step")
    for stage in ("sample", "loss", "update"):
        assert float(stages[stage][1]) > 0


@pytest.mark.parametrize(
    "flags, message",
    [
        (["sampling", "--repeats", "0"], "0 is too small; use 1 or more"),
        (["sampling", "--model_name", "tiny/absent"], "no such directory"),
        pytest.param(
            ["step", "--model_name", "tiny/absent"], "no such directory", marks=pytest.mark.slow
        ),
    ],
)
def test_a_mistake_gives_one_line(flags, message, monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    try:
        exit_code = benchmark.main([*flags, "--threads", "1"])
    except SystemExit as exit_request:
        exit_code = exit_request.code
    assert exit_code == 2
    printed = capfd.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
