"""The plotter: what it draws and prints for which logs; and JSON lines, from which it reads."""

import numpy as np
import pandas as pd
import pytest
from log_helpers import eval_row, train_rows, write_answers, write_run
from matplotlib import style

import plotter
from grpo import jsonl


def draw(*paths, by=None):
    """{title of a panel: its axes} of the PDF of these runs."""
    runs = plotter.read_runs(list(paths))
    groups = plotter.group_by(runs, by)[0] if by else {run.name: [run] for run in runs}
    panels = {}
    with style.context(plotter.STYLE):
        for figure in plotter.draw_pages(groups, plotter.find_metrics(runs), "title"):
            figure.draw_without_rendering()
            panels |= {ax.get_title(loc="left"): ax for ax in figure.axes}
    return panels


def printed(capsys, *arguments):
    assert plotter.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_what_a_run_prints_and_writes(tmp_path, capsys):
    """Of 6 questions 3 are fixed and 1 is broken: p = 2 (C(4, 0) + C(4, 1)) / 16 = 10 / 16."""
    evaluations = [eval_row(0, 0.312, 0.5), eval_row(6, 0.9, 0.9), eval_row(12, 0.784, 0.8)]
    run = write_run(tmp_path / "run", train_rows(12, loss=abs), evaluations, eval_split="test")
    write_answers(run, 0, [True, True, False, False, False, False])
    write_answers(run, 6, [True] * 6)
    write_answers(run, 12, [True, False, True, True, True, False])
    lines = printed(capsys, run)
    assert lines == [
        "How many are 2?",
        "",
        "--- step 0",
        "At step 0 it is 2.",
        "",
        "--- step 12",
        "At step 12 it is 2.",
        "",
        "run, step 0 -> 12, strict: 3 fixed, 1 broken of 6 questions, exact McNemar p = 0.62",
        "accuracy (strict)  31.2% -> 78.4%  (n = 500, test, 95% CI [27.2, 35.2] and [74.4, 82.4])",
        "accuracy (flexible)  50.0% -> 80.0%  "
        "(n = 500, test, 95% CI [46.0, 54.0] and [76.0, 84.0])",
        f"report: {run}/report.html",
        f"plots: {run}/training_plots.pdf",
    ]
    (run / "training_plots.pdf").unlink()
    assert printed(capsys, "--log_dir", run) == lines
    assert (run / "training_plots.pdf").read_bytes().startswith(b"%PDF")


def test_every_number_that_changes_has_a_panel(tmp_path):
    """A new metric needs no edit; a constant, up to rounding, and a counter have no panel.

    Clipped shares are no ends of an interval, as those of an evaluation are.
    """
    constant = {"ratio_mean": lambda t: 1 + 1e-8 * t, "beta": 0.5, "zero": 0.0, "note": "text"}
    clipped = {"clip_fraction": lambda t: t / 9, "clip_fraction_low": lambda t: t / 18}
    costly = {"": abs, "a $5^$ name": abs} | {f"metric {i}": abs for i in range(12)}
    rows = train_rows(4, novelty=abs, reward=abs, epoch=abs, **constant, **clipped, **costly)
    panels = draw(write_run(tmp_path / "run", rows, [eval_row(0), eval_row(4, 0.5)]))
    main_metrics = ["eval/accuracy", "reward"]
    assert list(panels) == main_metrics + ["novelty", *clipped, *costly]
    ax = panels["eval/accuracy"]
    assert ax.collections[0].get_datalim(ax.transData).intervaly == pytest.approx((0.26, 0.54))


def test_strict_and_flexible_accuracy_share_a_panel_and_units_are_named(tmp_path):
    evaluations = [eval_row(0, 0.3, 0.5), eval_row(4, 0.5, 0.8)]
    panels = draw(write_run(tmp_path / "run", train_rows(4, kl=abs), evaluations))
    assert list(panels) == ["eval/accuracy", "kl"]
    curves = [line.get_ydata().tolist() for line in panels["eval/accuracy"].lines]
    assert curves == [[0.3, 0.5], [0.5, 0.8]]
    assert panels["kl"].get_ylabel() == "nats per token"


def test_a_run_that_does_not_change_is_told_without_a_curve(tmp_path, capsys):
    run = write_run(tmp_path / "run", evaluations=[eval_row(0)], eval_split="test")
    lines = printed(capsys, run)
    assert lines[0] == "accuracy (strict)  30.0%  (n = 500, test, 95% CI [26.0, 34.0])"
    assert lines[-1].startswith("note: ") and not (run / "training_plots.pdf").exists()


def test_dots_are_values_and_a_missing_one_has_none(tmp_path):
    rows = [{"step": 1, "a": 1}, {"step": 2, "a": None}, {"step": 3}, {"step": 4, "a": 7}]
    dots, line = draw(write_run(tmp_path / "run", rows))["a"].lines
    for curve in (dots, line):
        np.testing.assert_array_equal(curve.get_xydata(), [(1, 1), (4, 7)])


def test_smoothing_is_a_centred_median():
    """A running mean once drew a spike as a plateau as wide as its window."""
    series = pd.Series([float(i) for i in range(30)])
    series[10] = 1000
    smoothed = plotter.smooth(series, "train/kl")  # windows of 3
    assert smoothed[9] == 9  # of 8, 9, 1000
    assert smoothed[10] == 11  # of 9, 1000, 11
    assert smoothed[0] == 0.5
    for metric in ("eval/accuracy", "train/learning_rate"):
        assert plotter.smooth(series, metric) is series


@pytest.mark.parametrize(
    "key, values, is_share",
    [
        ("accuracy", [0.2, 1.0], True),
        ("clipped_words", [31, 36], False),
        ("reward", [0.5, 1.0], False),
    ],
)
def test_only_what_is_at_most_1_is_a_share(tmp_path, key, values, is_share):
    """A count whose name begins like a share's once lay outside of an axis that ended at 103%."""
    rows = [{"step": step, key: value} for step, value in enumerate(values)]
    ax = draw(write_run(tmp_path / "run", rows))[key]
    low, high = ax.get_ylim()
    assert low <= min(values) < max(values) <= high
    assert ("%" in ax.get_yticklabels()[0].get_text()) == is_share
    assert not is_share or high <= 1.03


def test_runs_are_compared_on_the_questions_they_share(tmp_path, capsys):
    """An id with another gold answer is another question; of several samples the first counts."""
    a = write_run(tmp_path / "a", train_rows(3, loss=abs), [eval_row(3)])
    b = write_run(tmp_path / "b", train_rows(3, loss=abs), [eval_row(3)])
    write_answers(a, 0, [False, False, False, False])
    write_answers(a, 3, [True, False, False, False])
    write_answers(b, 3, [True, True, True, True], gold=lambda i: "other" if i == 3 else str(i))
    rows = jsonl.read(b / "eval/step_000003.jsonl")
    jsonl.write(
        b / "eval/step_000003.jsonl", rows + [row | {"correct_strict": False} for row in rows]
    )
    lines = printed(capsys, a, b)
    assert lines[0] == (
        "a (step 3) -> b (step 3), strict: 2 fixed, 0 broken of 3 questions, exact McNemar p = 0.5"
    )
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "a: accuracy (strict)",
        "a: accuracy (flexible)",
        "b: accuracy (strict)",
        "b: accuracy (flexible)",
        f"plots: {tmp_path}/comparison.pdf",
    ]
    assert not (a / "report.html").exists()


@pytest.fixture
def four_runs(tmp_path):
    """Groups of 16, 4, 4 and none; run i has accuracy 10 i + 4 step percent at steps 0, 5, 10."""
    runs = []
    for i, group_size in enumerate((16, 4, 4, None)):
        evaluations = [eval_row(step, 0.1 * i + 0.04 * step) for step in (0, 5, 10)]
        flags = {"group_size": group_size, "seed": i, "output_dir": f"output/{i}"}
        rows = train_rows(10, loss=lambda step, i=i: step + i)
        runs.append(write_run(tmp_path / f"run{i}", rows, evaluations, **flags))
    return runs


def test_runs_that_share_a_flag_are_one_curve_with_a_band(four_runs, capsys):
    lines = printed(capsys, *four_runs, "--by", "group_size")
    assert [" ".join(line.split()) for line in lines[:4]] == [
        "mean min max",
        "group_size 4 (runs: 2, to step 10) 55.0% 50.0% 60.0%",
        "group_size 16 (runs: 1, to step 10) 40.0% 40.0% 40.0%",
        "group_size default (runs: 1, to step 10) 70.0% 70.0% 70.0%",
    ]
    ax = draw(*four_runs, by=["group_size"])["eval/accuracy"]
    handles, labels = ax.get_legend_handles_labels()
    assert len({handle.get_color() for handle in handles}) == 3
    assert labels == [line.partition(")")[0] + ")" for line in lines[1:4]]
    np.testing.assert_allclose(handles[0].get_ydata(), [0.15, 0.35, 0.55])
    band = ax.collections[0].get_datalim(ax.transData)
    assert band.intervaly == pytest.approx((0.1, 0.6))


def test_a_band_ends_with_its_shortest_run_and_says_so(four_runs):
    """Between the steps of an evaluation values are interpolated."""
    write_run(four_runs[2], train_rows(4), [eval_row(0, 0.2), eval_row(4, 0.4)], group_size=4)
    groups, table = plotter.group_by(plotter.read_runs(four_runs), ["group_size"])
    label, *_ = groups
    assert label == "group_size 4 (runs: 2, to step 4 of 10)"
    assert f"{label}  45.0% 40.0% 50.0%" in table
    curve = plotter.make_curve(groups[label], "eval/accuracy")
    assert curve.index.tolist() == [0, 4]
    np.testing.assert_allclose(curve["line"], [(0.1 + 0.2) / 2, (0.1 + 0.16 + 0.4) / 2])
    np.testing.assert_allclose(curve["low"], [0.1, 0.26])
    np.testing.assert_allclose(curve["high"], [0.2, 0.4])


def test_a_mean_of_runs_is_that_of_their_medians(tmp_path):
    """A band of raw values around a line of medians once belonged to no line."""
    spike = write_run(tmp_path / "0", train_rows(40, kl=lambda t: 1000 * (t == 20)), seed=0)
    flat = write_run(tmp_path / "1", train_rows(40, kl=2.0), seed=1)
    curve = plotter.make_curve(plotter.read_runs([spike, flat]), "train/kl")
    assert set(curve["line"]) == {1.0} and set(curve["high"]) == {2.0}


@pytest.mark.parametrize("flag", ["beta", "num_train_iters"])
def test_runs_that_differ_in_another_flag_are_not_averaged(flag, four_runs, capsys):
    write_run(four_runs[1], train_rows(10, loss=abs), group_size=4, **{flag: 60})
    assert plotter.main(["--by", "group_size", "--log_dir", *map(str, four_runs)]) == 2
    error = f"error: --by: the runs with group_size 4 differ in --{flag} too; add it\n"
    assert capsys.readouterr().err == error


def test_a_table_has_the_last_accuracy_and_not_the_best(tmp_path):
    evaluations = [eval_row(0, 0.1), eval_row(5, 0.9), eval_row(10, 0.5)]
    run = write_run(tmp_path / "run", train_rows(10), evaluations, seed=0)
    _, table = plotter.group_by(plotter.read_runs([run]), ["seed"])
    assert "50.0%" in table and "90.0%" not in table


def test_mcnemar_by_hand():
    assert plotter.mcnemar(0, 0) == plotter.mcnemar(1, 0) == plotter.mcnemar(3, 3) == 1
    p_value = 2 * (1 + 12 + 66) / 4096  # twice the chance of at most 2 heads in 12 throws
    assert plotter.mcnemar(10, 2) == pytest.approx(p_value, rel=1e-12)
