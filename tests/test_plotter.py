"""The plotter: what it draws and prints for which logs, and one clear line for every bad one."""

import math
import subprocess
import sys
import warnings

import matplotlib
import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from log_helpers import eval_row, write_answers, write_run

import plotter
from grpo import jsonl


def train_rows(n, **metrics):
    """n rows of a training log, with these values or functions of the step."""
    rows = []
    for step in range(1, n + 1):
        values = {key: f(step) if callable(f) else f for key, f in metrics.items()}
        rows.append({"step": step, "total_tokens": 5000 * step, "elapsed": 2.0 * step} | values)
    return rows


def draw(*paths, by=None):
    """{title of a panel, without its numbers: its axes} of the PDF of these runs."""
    runs = plotter.read_runs(list(paths))
    groups = plotter.group_by(runs, by) if by else {run.name: [run] for run in runs}
    panels = {}
    with matplotlib.rc_context(plotter.STYLE):
        for figure in plotter.draw_pages(groups, plotter.find_metrics(runs), "title"):
            figure.draw_without_rendering()
            panels |= {ax.get_title(loc="left").split(": ")[0]: ax for ax in figure.axes}
    return panels


def printed(capsys, *arguments):
    assert plotter.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out.splitlines()


# --- One run --------------------------------------------------------------------------------------


def test_what_a_run_prints_and_writes(tmp_path, capsys):
    """Of 6 questions 3 are fixed and 1 is broken: p = 2 (C(4, 0) + C(4, 1)) / 16 = 10 / 16."""
    evaluations = [eval_row(0, 0.312, 0.5), eval_row(6, 0.9, 0.9), eval_row(12, 0.784, 0.8, n=400)]
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
        "accuracy (strict)  31.2% -> 78.4%  "
        "(n = 500 and 400, test, 95% CI [27.2, 35.2] and [74.4, 82.4])",
        "accuracy (flexible)  50.0% -> 80.0%  "
        "(n = 500 and 400, test, 95% CI [46.0, 54.0] and [76.0, 84.0])",
        f"report: {run}/report.html",
        f"plots: {run}/training_plots.pdf",
    ]
    first_pdf = (run / "training_plots.pdf").read_bytes()
    assert b"CreationDate" not in first_pdf
    assert printed(capsys, "--log_dir", run) == lines
    assert (run / "training_plots.pdf").read_bytes() == first_pdf, "equal logs give equal bytes"


def test_every_number_that_changes_has_a_panel(tmp_path):
    """A new metric needs no edit; a constant, up to rounding, and a counter have no panel."""
    constant = {"ratio_mean": lambda t: 1 + 1e-8 * t, "beta": 0.5, "zero": 0.0, "note": "text"}
    rows = train_rows(4, novelty=abs, reward=abs, epoch=abs, **constant)
    for row, share in zip(rows[2:], (0.1, 0.2), strict=True):
        row |= {"": 3 * share, "clip_fraction": share}
        row |= {"clip_fraction_low": share / 4, "clip_fraction_high": share / 2}
    panels = draw(write_run(tmp_path / "run", rows, [eval_row(0), eval_row(4, 0.5)]))
    expected = ["eval/accuracy", "reward", "novelty", ""]
    clip_keys = ["clip_fraction", "clip_fraction_low", "clip_fraction_high"]
    assert list(panels) == expected + clip_keys, "clipped shares are no ends of an interval"
    assert panels["reward"].get_title(loc="left") == "reward: 1 \u2192 4"
    assert panels["eval/accuracy"].get_title(loc="left") == "eval/accuracy: 30.0% \u2192 50.0%"
    ax = panels["eval/accuracy"]
    assert ax.collections[0].get_datalim(ax.transData).intervaly == pytest.approx((0.26, 0.54))
    assert not panels["clip_fraction"].collections[0].get_paths()


def test_a_run_that_does_not_change_is_told_without_a_curve(tmp_path, capsys):
    run = write_run(tmp_path / "run", evaluations=[eval_row(0)])
    lines = printed(capsys, run)
    assert lines[0] == "accuracy (strict)  30.0%  (n = 500, 95% CI [26.0, 34.0])"
    assert lines[-1].startswith("note: ") and not (run / "training_plots.pdf").exists()


def test_null_is_a_gap_and_an_absent_key_is_not(tmp_path):
    """What is no finite number is a gap too."""
    run = write_run(tmp_path / "run")
    lines = [
        '{"step": 1, "a": 1, "b": 1, "c": 1, "d": 1, "absent": 1}',
        '{"step": 2, "a": null, "b": NaN, "c": Infinity, "d": "text"}',
        '{"step": 3, "a": 3, "b": 3, "c": 3, "d": 3, "absent": 3}',
        '{"step": 4, "a": 4, "b": 4, "c": 4, "d": 4}\n',
    ]
    (run / "train_log.jsonl").write_text("\n".join(lines))
    panels = draw(run)
    for title in "abcd":
        dots, line = panels[title].lines
        np.testing.assert_array_equal(line.get_ydata(), [1, math.nan, 3, 4])
        np.testing.assert_array_equal(dots.get_ydata(), [1, math.nan, 3, 4])
    np.testing.assert_array_equal(panels["absent"].lines[1].get_xdata(), [1, 3])


def test_smoothing_is_a_centred_median_of_the_finite_neighbours():
    """A running mean once drew a spike as a plateau as wide as its window."""
    series = pd.Series([float(i) for i in range(30)])
    series[10] = 1000
    series[20] = math.nan
    smoothed = plotter.smooth(series, "train/kl")  # windows of 3
    assert smoothed[9] == 9  # of 8, 9, 1000
    assert smoothed[10] == 11  # of 9, 1000, 11
    assert smoothed[0] == 0.5
    assert smoothed[19] == 18.5
    assert math.isnan(smoothed[20])
    for metric in ("eval/accuracy", "train/learning_rate"):
        assert plotter.smooth(series, metric) is series


@pytest.mark.parametrize(
    "key, values, is_share",
    [
        ("accuracy", [0.2, 1.0], True),
        ("clipped_words", [31, 36], False),
        ("truncated_sentences", [1, 6], False),
        ("accuracy_points", [41.5, 46.5], False),
        ("zero_std_fraction", [0.0, 0.5], True),
    ],
)
def test_only_what_is_at_most_1_is_a_share(tmp_path, key, values, is_share):
    """A count whose name begins like a share's once lay outside of an axis that ended at 103%."""
    rows = [{"step": step, key: value} for step, value in enumerate(values)]
    ax = draw(write_run(tmp_path / "run", rows))[key]
    low, high = ax.get_ylim()
    assert low <= min(values) < max(values) <= high
    assert ax.get_ylabel() == ("share" if is_share else "")
    assert not is_share or high <= 1.03


def test_long_names_and_what_looks_like_tex_fit(tmp_path):
    """A layout that fails says so in a warning."""
    names = {f"rewards/costs_$5^$_{i}_and_a_name_of_many_words": abs for i in range(20)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(draw(write_run(tmp_path / "run", train_rows(3, **names)))) == 20


def test_an_answer_does_nothing_to_the_terminal(tmp_path, capsys):
    run = write_run(tmp_path / "run", train_rows(2, loss=abs))
    write_answers(run, 0, [False])
    write_answers(run, 2, [True])
    path = run / "eval/step_000002.jsonl"
    (row,) = jsonl.read(path)
    jsonl.write(path, [row | {"completion": "a\x1b[2Jb\u202ec\nd\u00e9"}])
    lines = printed(capsys, run)
    assert "a?[2Jb?c" in lines and "d\u00e9" in lines


# --- Several runs ---------------------------------------------------------------------------------


def test_runs_are_compared_on_the_questions_they_share(tmp_path, capsys):
    """An id with another gold answer is another question; an unknown verdict (null) is no pair."""
    a = write_run(tmp_path / "a", train_rows(3, loss=abs), [eval_row(3)])
    b = write_run(tmp_path / "b", train_rows(3, loss=abs), [eval_row(3)])
    write_answers(a, 3, [True, False, False, False, True])
    write_answers(
        b, 3, [True, True, True, None, False], gold=lambda i: "other" if i == 4 else str(i)
    )
    lines = printed(capsys, a, b)
    assert lines[0] == (
        "a (step 3) -> b (step 3), strict: 2 fixed, 0 broken of 3 questions, exact McNemar p = 0.5"
    )
    assert lines[-1] == f"plots: {tmp_path}/comparison.pdf"
    assert not (a / "report.html").exists() and not (a / "training_plots.pdf").exists()
    assert set(draw(a, b)) == {"loss"}


def test_of_several_samples_of_a_question_the_first_is_compared(tmp_path):
    run = write_run(tmp_path / "run")
    write_answers(run, 0, [True, False])
    path = run / "eval/step_000000.jsonl"
    first, second = jsonl.read(path)
    jsonl.write(path, [first, first | {"correct_strict": False}, second])
    (pair, _) = plotter.compare(path, path)
    assert plotter.verdicts(pair) == (True, True)


@pytest.fixture
def four_runs(tmp_path):
    """Groups of 16, 4, 4 and 16; run i has accuracy 10 i + 4 step percent at steps 0, 5 and 10."""
    runs = []
    for i, group_size in enumerate((16, 4, 4, 16)):
        evaluations = [eval_row(step, 0.1 * i + 0.04 * step) for step in (0, 5, 10)]
        flags = {
            "group_size": group_size,
            "seed": i,
            "output_dir": f"output/{i}",
            "device": f"c{i}",
        }
        flags["model_name"] = f"start_seed{i}"
        rows = train_rows(10, loss=lambda step, i=i: step + i)
        runs.append(write_run(tmp_path / f"run{i}", rows, evaluations, **flags))
    return runs


def test_runs_that_share_a_flag_are_one_curve_with_a_band(four_runs, capsys):
    lines = printed(capsys, *four_runs, "--by", "group_size")
    assert [line.split() for line in lines[:4]] == [
        ["mean", "min", "max", "count"],
        ["group_size"],
        ["4", "55.0%", "50.0%", "60.0%", "2"],
        ["16", "55.0%", "40.0%", "70.0%", "2"],
    ]
    assert sorted([10, "default", 9, "a"], key=plotter.sort_key) == [9, 10, "a", "default"]
    ax = draw(*four_runs, by=["group_size"])["eval/accuracy"]
    handles, labels = ax.get_legend_handles_labels()
    assert labels == ["group_size 4 (runs: 2)", "group_size 16 (runs: 2)"]
    np.testing.assert_allclose(handles[1].get_ydata(), [0.15, 0.35, 0.55])
    band = ax.collections[1].get_datalim(ax.transData)
    assert band.intervaly == pytest.approx((0.0, 0.7))


def test_a_band_ends_with_its_shortest_run_and_says_so(four_runs):
    """Between the steps of an evaluation values are interpolated."""
    rows = [eval_row(0, 0.2), eval_row(4, 0.4)]
    jsonl.write(four_runs[2] / "eval_log.jsonl", rows)
    jsonl.write(four_runs[2] / "train_log.jsonl", train_rows(4, loss=abs))
    runs = plotter.read_runs(four_runs)
    (group, others) = plotter.group_by(runs, ["group_size"]).items()
    assert group[0] == "group_size 4 (runs: 2, to step 4 of 10)"
    assert others[0] == "group_size 16 (runs: 2)"
    curve = plotter.make_curve(group[1], "eval/accuracy")
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


def test_runs_that_differ_in_another_flag_are_not_averaged(four_runs, capsys):
    write_run(four_runs[3], train_rows(10, loss=abs), group_size=16, seed=3, beta=0.1)
    assert plotter.main(["--by", "group_size", "--log_dir", *map(str, four_runs)]) == 2
    assert capsys.readouterr().err == (
        "error: --by: the runs with group_size 16 differ in --beta too; add it\n"
    )


# --- What is wrong --------------------------------------------------------------------------------


def test_a_cut_last_line_is_left_out_and_another_is_an_error(tmp_path, capsys):
    run = write_run(tmp_path / "run", train_rows(2, loss=abs))
    with open(run / "train_log.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    (read,) = plotter.read_runs([run])
    assert read.series("train/loss").tolist() == [1, 2]
    with open(run / "train_log.jsonl", "a") as file:
        file.write("\n")
    assert plotter.main([str(run)]) == 2
    assert f"{run}/train_log.jsonl, line 3: not valid JSON" in capsys.readouterr().err
    jsonl.write(run / "train_log.jsonl", [{"loss": 1.0}])
    assert plotter.main([str(run)]) == 2
    assert "line 1: not a JSON object with step" in capsys.readouterr().err


def test_a_json_line_that_is_no_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    for line, words in (("[1]", "not a JSON object"), ('{"a": 1}', "with step"), ("x", "line 1")):
        path.write_text(line)
        with pytest.raises(ValueError, match=words):
            jsonl.read(path, ("step",))


def test_what_json_lacks_is_null_and_a_failed_write_keeps_the_file(tmp_path):
    path = tmp_path / "new folder" / "rows.jsonl"
    jsonl.write(path, [{"a": math.nan, "b": [math.inf, (1.5, math.nan)], "c": {"d": -math.inf}}])
    jsonl.append(path, {"e": tmp_path})
    expected = [{"a": None, "b": [None, [1.5, None]], "c": {"d": None}}, {"e": str(tmp_path)}]
    assert jsonl.read(path) == expected
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(TypeError):
        jsonl.write(path, [{}, {"a": object()}])
    assert jsonl.read(path) == expected


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "name the folder of a run"),
        (["missing"], "there is no folder"),
        (["."], "there is no run to plot"),
        (["run", "--by", "lr"], "no --lr in its args.json"),
        (["run", "--list"], "unrecognized arguments: --list"),
        (["run", "--output", "missing/x.pdf"], "missing/x.pdf"),
    ],
)
def test_a_wrong_call_gets_one_line_and_exit_code_2(
    tmp_path, monkeypatch, capsys, arguments, words
):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", train_rows(2, loss=abs), [eval_row(0), eval_row(2, 0.5)])
    try:
        exit_code = plotter.main(arguments)
    except SystemExit as stop:
        exit_code = stop.code
    assert exit_code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "error: " in error and words in error


@pytest.mark.parametrize(
    "module, unneeded", [("plotter", {"torch", "scipy.stats"}), ("main", {"pandas", "matplotlib"})]
)
def test_plots_need_no_torch_and_training_needs_no_pandas(module, unneeded):
    script = f"import sys, {module}; assert not {unneeded} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=100)
