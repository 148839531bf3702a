"""The plotter: what it draws and prints for which logs, and one clear line for every bad one."""

import math
import re
import warnings

import matplotlib
import numpy as np
import pandas as pd
import pytest
from filelock import FileLock
from log_helpers import eval_row, plot, write_answers, write_run
from matplotlib.figure import Figure

import plotter
from logs import jsonl, read, summary

TRAIN_KEYS = """
    loss kl entropy grad_norm learning_rate reward rewards/correctness response_length
    response_length_correct zero_std_fraction truncated_fraction distinct_2 distinct_2_batch
    time/sample time/loss
""".split()


def train_rows(n, **extra):
    """Return n rows of the training log, with the keys that the dashboard knows."""
    values = dict.fromkeys(TRAIN_KEYS, 0.5) | {"time/total": 3.0} | extra
    rows = []
    for step in range(1, n + 1):
        rows.append({"step": step, "total_tokens": 5000 * step, "elapsed": 2.0 * step} | values)
    return rows


@pytest.fixture
def draw(monkeypatch):
    """A function that runs the plotter like `plot` and returns the figures that it would save.

    It leaves out report.html, which tests/test_report.py reads: its panels take most of the time.
    """
    figures = []
    monkeypatch.setattr(plotter, "save", lambda pages, output: figures.extend(pages))
    monkeypatch.setattr(plotter, "draw_single_panels", lambda run, axis: [])

    def draw(*paths, flags=""):
        figures.clear()
        assert plot(*paths, flags=flags) == 0
        return list(figures)

    return draw


def axes_of(figures, title):
    """Return the panels with that title, which for one run is followed by numbers."""
    all_axes = sum((figure.axes for figure in figures), [])
    return [ax for ax in all_axes if title_of(ax).split(": ")[0] == title]


def title_of(ax):
    return " ".join(ax.get_title(loc="left").split())


def titles_of(figure):
    return [title_of(ax) for ax in figure.axes]


def bold_line(ax, i=0):
    """Return the curve of group or metric i, without the faint ones of every iteration."""
    return [line for line in ax.lines if line.get_alpha() is None][i]


def labels_of(ax):
    """Return {label: its colour} of the labels at the ends of curves, from the lowest on."""
    return {text.get_text(): text.get_color() for text in ax.texts}


def texts(legend):
    return [text.get_text() for text in legend.get_texts()]


# ---- one run


def test_what_a_run_prints_and_writes(tmp_path, capsys):
    evaluations = [eval_row(0, 0.312, 0.5), eval_row(6, 0.9, 0.9), eval_row(12, 0.784, 0.8, n=400)]
    run = write_run(tmp_path / "run", [{"step": t, "loss": t} for t in range(12)], evaluations)
    assert plot(run) == 0
    assert capsys.readouterr().out.splitlines() == [
        "accuracy (strict)  31.2% -> 78.4%  "
        "(n = 500 and 400, 95% CI [27.2, 35.2] and [74.4, 82.4])",
        "accuracy (flexible)  50.0% -> 80.0%  "
        "(n = 500 and 400, 95% CI [46.0, 54.0] and [76.0, 84.0])",
        f"report: {run}/report.html",
        f"plots: {run}/training_plots.pdf",
    ]
    first_pdf = (run / "training_plots.pdf").read_bytes()
    assert first_pdf.startswith(b"%PDF")
    assert plot(run) == 0
    assert (run / "training_plots.pdf").read_bytes() == first_pdf, "equal logs give equal bytes"


def test_every_number_is_plotted_and_a_new_metric_needs_no_edit(tmp_path, draw):
    extra = {"rewards/brevity": 1, "judge/failures": 2, "note": "text", "novelty": 3}
    figures = draw(write_run(tmp_path / "run", train_rows(3, **extra), [eval_row(0)]))
    assert titles_of(figures[0]) == [
        "Accuracy: 30%",
        "Reward: 0.500 → 0.500",
        "KL to the reference: 0.500 → 0.500",
        "Loss: 0.500 → 0.500",
    ]
    (reward_panel,) = axes_of(figures[:1], "Reward")
    assert set(labels_of(reward_panel)) == {"total", "correctness", "brevity"}
    assert len(axes_of(figures, "Judge")) == len(axes_of(figures, "Novelty")) == 1
    assert not axes_of(figures, "Note")
    assert not axes_of(figures, "Accuracy low, evaluation")
    # Two parts of the reward, one length and flexible accuracy share a panel with another metric.
    num_metrics = len([*TRAIN_KEYS, "time/total", "brevity", "failures", "novelty"]) + 2
    assert sum(len(figure.axes) for figure in figures) == num_metrics - 4
    for figure in figures:
        assert figure.get_suptitle().split() == "run: Accuracy 30%".split()
        assert all(ax.get_ylabel() for ax in figure.axes)
        assert "1m, arithmetic, 1.05M parameters" in figure.legends[0].get_title().get_text()


def test_absent_metrics_and_those_without_any_number_are_not_drawn(tmp_path, draw):
    rows = [{"step": t, "loss": 1.0, "kl": None} for t in range(3)]
    figures = draw(write_run(tmp_path / "run", rows))
    assert titles_of(figures[0]) == ["Loss: 1.00 → 1.00"]
    assert len(figures) == 1


def test_null_is_a_gap_and_an_absent_key_is_not(tmp_path, draw):
    """What is no finite number is a gap too."""
    run = write_run(tmp_path / "run")
    lines = [
        '{"step": 1, "a": 1, "b": 1, "c": 1, "d": 1, "absent": 1}',
        '{"step": 2, "a": null, "b": NaN, "c": Infinity, "d": "text"}',
        '{"step": 3, "a": 3, "b": 3, "c": 3, "d": 3, "absent": 3}',
        '{"step": 4, "a": 4, "b": 4, "c": 4, "d": 4}\n',
    ]
    (run / "train_log.jsonl").write_text("\n".join(lines))
    figures = draw(run)
    for title in "ABCD":
        line = bold_line(axes_of(figures, title)[0])
        np.testing.assert_array_equal(line.get_ydata(), [1, np.nan, 3, 4])
        assert list(line.get_markevery()) == [0], "the point that no line would show has a marker"
    line = bold_line(axes_of(figures, "Absent")[0])
    np.testing.assert_array_equal(line.get_xdata(), [1, 3])


def test_a_single_evaluation_is_visible(tmp_path, draw, capsys):
    figures = draw(write_run(tmp_path / "run", None, [eval_row(0)]))
    ax = axes_of(figures, "Accuracy")[0]
    assert ax.lines[0].get_marker() == "o"
    assert all(tick.is_integer() for tick in ax.get_xticks()), "no iteration -0.05"
    line = "accuracy (strict)  30.0%  (n = 500, 95% CI [26.0, 34.0])\n"
    assert line in capsys.readouterr().out


def test_shares_of_clipped_tokens_are_no_interval(tmp_path, draw):
    """clip_fraction_low and clip_fraction_high were once drawn as a band, as if of 95 %."""
    extra = {"clip_fraction": 0.3, "clip_fraction_low": 0.1, "clip_fraction_high": 0.2}
    figures = draw(write_run(tmp_path / "run", [{"step": step} | extra for step in range(3)]))
    for title in ("Clip fraction", "Clip fraction low", "Clip fraction high"):
        (ax,) = axes_of(figures, title)
        for band in ax.collections:
            assert all(len(path.vertices) == 0 for path in band.get_paths()), title


def test_smoothing_is_a_centred_median_of_the_finite_neighbours():
    """A running mean once drew a spike as a plateau as wide as its window."""
    values = np.arange(30.0)  # 30 points: a window of 3
    values[10] = np.nan
    values[20] = 900
    smooth = plotter.smooth(pd.Series(values)).to_numpy()
    assert smooth[5] == 5
    assert (smooth[0], smooth[29]) == (0.5, 28.5)
    assert math.isnan(smooth[10])
    assert (smooth[9], smooth[11]) == (8.5, 11.5)
    assert list(smooth[18:23]) == [18, 19, 21, 22, 22], "medians of (19, 900, 21) and the like"
    short = pd.Series(values[:29])
    np.testing.assert_array_equal(plotter.smooth(short), short, "too short to smooth")


@pytest.mark.parametrize(
    "x, last_x, label",
    [
        ("step", 90, "iteration"),
        ("tokens", 450_000, "tokens so far"),
        ("time", 3, "time (min)"),
    ],
)
def test_x_axis(tmp_path, draw, x, last_x, label):
    (figure,) = draw(write_run(tmp_path / "run", train_rows(90)), flags=f"--x {x} --metrics loss")
    (ax,) = figure.axes
    assert bold_line(ax).get_xdata()[-1] == last_x
    assert ax.get_xlabel() == label


def test_the_axis_says_what_the_steps_of_these_runs_count(tmp_path, draw):
    """All were once called steps, and a figure of GRPO and SFT had no word for the difference."""
    rows = [{"step": t, "loss": 1.0} for t in range(3)]
    grpo = write_run(tmp_path / "grpo", rows, num_train_iters=3)
    just_begun = write_run(tmp_path / "sft", None, [eval_row(0)], train_file="gold.jsonl")
    expert_iteration = write_run(tmp_path / "ei", rows, n_ei_steps=5)
    without_args = write_run(tmp_path / "old_sft", [row | {"examples": 32} for row in rows])
    (without_args / "args.json").unlink()
    for path in (just_begun, expert_iteration, without_args):
        assert draw(path)[0].axes[0].get_xlabel() == "update"
    assert draw(just_begun, grpo)[0].axes[0].get_xlabel() == "iteration or update"
    assert draw(grpo)[0].axes[0].get_xlabel() == "iteration"


def test_a_spike_is_not_hidden(tmp_path, draw):
    """A KL begins near 0, which would take most of a logarithmic axis."""
    rows = [{"step": t, "grad_norm": 1.0, "loss": 1.0, "kl": 1.0} for t in range(100)]
    rows[0]["kl"] = 0.001
    rows[50] |= {"grad_norm": 12.0, "loss": 9.0, "kl": 12.0}
    figures = draw(write_run(tmp_path / "run", rows))
    scales = {"Gradient norm": "log", "Loss": "linear", "KL to the reference": "linear"}
    for title, scale in scales.items():
        (ax,) = axes_of(figures[:1], title)
        top = 9 if title == "Loss" else 12
        assert ax.get_yscale() == scale
        assert max(line.get_ydata().max() for line in ax.lines) == top
        assert ax.get_ylim()[1] > top


# ---- several runs


def test_up_to_four_runs_are_labelled_where_they_end(tmp_path, draw):
    paths = [tmp_path / name for name in ("low", "high", "_c$x$", "d", "e")]
    for i, path in enumerate(paths):
        rows = [{"step": step, "loss": float(i % 3)} for step in range(1, 41)]
        write_run(path, rows, [eval_row(0), eval_row(40, 0.2 * i)])
    figures = draw(*paths[:4])
    (ax,) = axes_of(figures, "Loss")
    colors = dict(zip(("low", "high", "_c$x$", "d"), plotter.COLORS, strict=False))
    assert labels_of(ax) == colors
    heights = {text.get_text(): text.get_position()[1] for text in ax.texts}
    assert heights["low"] < heights["d"] < heights["high"] < heights["_c$x$"] <= 1
    assert heights["d"] - heights["low"] > 0.02, "both end at the same height"
    for i, label in enumerate(colors):
        assert bold_line(ax, i).get_color() == colors[label]
    assert len({bold_line(ax, i).get_marker() for i in range(4)}) == 4
    assert figures[0].get_suptitle() == (
        "Accuracy at the end: 60% (d), 40% (_c$x$), 20% (high), 0% (low)"
    )
    figures = draw(*paths)
    assert not labels_of(axes_of(figures, "Loss")[0])
    assert texts(figures[0].legends[0]) == ["low", "high", "_c$x$", "d", "e"]
    assert figures[0].get_suptitle() == "Accuracy at the end: from 0% (low) to 80% (e)"


def test_a_run_may_lack_args_json_and_what_another_run_has(tmp_path, draw):
    rows = [{"step": step, "loss": 1.0, "kl": 1.0} for step in range(1, 41)]
    full_run = write_run(tmp_path / "a", rows)
    bare_run = write_run(tmp_path / "b", [{"step": 1, "loss": 2}])
    (bare_run / "args.json").unlink()
    figures = draw(full_run, bare_run)
    kl_lines = axes_of(figures, "KL to the reference")[0].lines
    assert {len(line.get_xdata()) for line in kl_lines} == {40}
    assert labels_of(axes_of(figures, "KL to the reference")[0]) == {"a": plotter.COLORS[0]}
    assert set(labels_of(axes_of(figures, "Loss")[0])) == {"a", "b"}


def test_run_is_compared_with_its_own_first_evaluation(tmp_path, capsys):
    """Of 6 questions, strict fixes 3 and breaks 1 (p = 2 * 5 / 16), flexible fixes 1 (p = 1)."""
    run = write_run(tmp_path / "run", None, [eval_row(0), eval_row(5), eval_row(9)])
    write_answers(run, 0, [0, 0, 0, 1, 1, 0], [0, 1, 1, 1, 1, 0])
    write_answers(run, 5, [0] * 6)  # It is neither the first nor the last.
    write_answers(run, 9, [1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 0])
    write_answers(run, 12, [0] * 6)  # It is still being written: eval_log has no row of it yet.
    assert plot(run) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "run, step 0 -> 9, strict: 3 fixed, 1 broken of 6 questions, exact McNemar p = 0.62",
        "run, step 0 -> 9, flexible: 1 fixed, 0 broken of 6 questions, exact McNemar p = 1",
    ]


def test_an_answer_before_and_after_is_shown(tmp_path, capsys):
    """It is the first question that the run has fixed. A control character stays out."""
    run = write_run(tmp_path / "run", None, [eval_row(0), eval_row(9)])
    long_question = "How many " + "green " * 30 + "apples?"
    row = {"gold": "5", "prompt": f"<|user|>\nSolve it!\n{long_question}<|end|>"}
    for step, verdicts in ((0, [True, False, False]), (9, [True, True, True])):
        rows = []
        for i, verdict in enumerate(verdicts):
            answer = {"id": f"q{i}", "completion": f"\x1bstep {step}\nanswer {i}"}
            rows.append(row | answer | {"correct_strict": verdict, "correct_flexible": None})
        jsonl.write(run / f"eval/step_{step:06d}.jsonl", rows)
    assert plot(run) == 0
    question, *answers = capsys.readouterr().out.split("\n\n")[1:4]
    assert question.startswith("How many green") and question.endswith("green ...")
    assert len(question) <= 110
    assert answers == ["--- step 0\n?step 0\nanswer 1", "--- step 9\n?step 9\nanswer 1"]


def test_runs_are_compared_on_the_questions_they_share(tmp_path):
    """An id with another gold answer is another question; an unknown verdict (null) is no pair."""
    a, b, c = (write_run(tmp_path / name, None, [eval_row(0)]) for name in "abc")
    write_answers(a, 0, [False, True, True, False])
    answers_of_b = [True, False, None, True, True]
    write_answers(b, 0, answers_of_b, gold=lambda i: "another" if i == 3 else str(i))
    write_answers(c, 0, [True] * 4, gold=lambda i: "another data set")
    assert summary.compare_runs(read.load_runs([a, b, c])) == [
        "a (step 0) -> b (step 0), strict: 1 fixed, 1 broken of 2 questions, exact McNemar p = 1",
        "a (step 0) -> b (step 0), flexible: 1 fixed, 1 broken of 2 questions, exact McNemar p = 1",
        "note: a (step 0) -> c (step 0): no question in common, not compared",
    ]


def test_of_several_samples_of_a_question_the_first_is_compared(tmp_path):
    run = write_run(tmp_path / "run", None, [eval_row(0), eval_row(1)])
    for step, verdicts in ((0, [False, True, True]), (1, [True, False, False])):
        rows = []
        for verdict in verdicts:
            rows.append({"id": 7, "correct_strict": verdict, "correct_flexible": verdict})
        jsonl.write(run / f"eval/step_{step:06d}.jsonl", rows)
    lines = summary.compare_runs(read.load_runs([run]))
    assert "strict: 1 fixed, 0 broken of 1 questions" in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("num_runs, num_rewards", [(1, 9), (3, 1), (12, 0)])
def test_the_layout_finds_room_for_long_names(tmp_path, num_runs, num_rewards):
    """A layout that fails says so in a warning. What looks like TeX in a name is no TeX."""
    extra = {f"rewards/a_reward_with_a_long_name_{i}": i for i in range(num_rewards)}
    paths = []
    for i in range(num_runs):
        path = tmp_path / f"a_$directory_{{with}}_{{a}}$_quite_long_name_{i}"
        model_name = f"a-hub-user/a-model-with-a-long-name-{i}"
        write_run(path, train_rows(5, **extra), [eval_row(0)], model_name=model_name)
        paths.append(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plot(*paths, flags=f"--output {tmp_path}/plots.png") == 0
    assert (tmp_path / "plots.png").read_bytes().startswith(b"\x89PNG")


def test_only_all_plots_of_one_run_are_its_training_plots(tmp_path, monkeypatch):
    """Those of several runs, or of some metrics, once overwrote the first run's."""
    outputs = []
    monkeypatch.setattr(plotter, "save", lambda pages, output: outputs.append(output))
    paths = [write_run(tmp_path / name, [{"step": 1, "loss": 2}]) for name in "ab"]
    assert plot(*paths) == 0
    assert plot(*paths, flags="--metrics loss") == 0
    assert plot(paths[0], flags="--metrics loss") == 0
    comparison = tmp_path / "comparison.pdf"
    assert outputs == [comparison, comparison, tmp_path / "a/metrics.pdf"]


def test_rounding_is_no_curve_and_percents_are_true(tmp_path, draw):
    """A ratio of 1 once had a curve of 1e-8, ticks at 7.5% said 8%, and a loss began at -0.000."""
    rows = train_rows(9)
    for i, row in enumerate(rows):
        row |= {"ratio_mean": 1 + 1e-8 * (i % 3), "zero_std_fraction": 0.125 * (i % 2)}
    rows[0]["loss"] = -1e-9
    run = write_run(tmp_path / "run", rows)
    (figure,) = draw(run, flags="--metrics ratio_mean zero_std_fraction loss")
    ratio_panel, groups_panel, loss_panel = figure.axes
    assert ratio_panel.get_ylim() == pytest.approx((0.9, 1.1))
    assert all(round(100 * tick, 6).is_integer() for tick in groups_panel.get_yticks())
    assert title_of(loss_panel) == "Loss: 0.000 → 0.500"


# ---- the list of runs


def test_the_list_has_a_line_for_each_run(tmp_path, capsys):
    rows = train_rows(3, kl_per_token=5.0, skipped_updates=0.0)
    write_run(tmp_path / "new", num_train_iters=9)
    write_run(tmp_path / "done", train_rows(9), [eval_row(9, 0.25)], num_train_iters=9)
    write_run(tmp_path / "deep/bad", rows, num_train_iters=9)
    write_run(tmp_path / "odd", [{"step": 2}, {"step": None}], num_train_iters=9)
    with FileLock(tmp_path / "new/lock"):
        assert plotter.main(["--list", str(tmp_path)]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["step", "reward", "KL", "accuracy", "state"],
        ["deep/bad", "3", "of", "9", "0.500", "5.0000", "-", "diverged"],
        ["done", "9", "of", "9", "0.500", "-", "25.0%", "finished"],
        ["new", "0", "of", "9", "-", "-", "-", "running"],
        ["odd", "2", "of", "9", "-", "-", "-", "stopped"],
    ]
    assert not (tmp_path / "done/lock").exists()
    assert plotter.main(["--list", str(tmp_path / "done/absent")]) == 2
    assert "there is no such directory" in capsys.readouterr().err


# ---- chosen metrics and groups of runs


def test_chosen_metrics_are_one_figure(tmp_path, draw):
    """Both logs have a reward, and only the name of the log tells which is meant."""
    evaluations = [eval_row(0) | {"reward": 1.0}, eval_row(9) | {"reward": 2.0}]
    run = write_run(tmp_path / "run", train_rows(9), evaluations)
    (figure,) = draw(run, flags="--metrics accuracy reward eval/reward")
    assert titles_of(figure) == [
        "Accuracy: 30% → 30%",
        "Reward: 0.500 → 0.500",
        "Reward, evaluation: 1.00 → 2.00",
    ]
    labels = [ax.get_ylabel() for ax in figure.axes]
    assert labels == ["Accuracy (%)", "Reward", "Reward, evaluation"]


@pytest.fixture
def four_runs(tmp_path):
    """Runs with group sizes 16, 4, 4, 16. Run i has accuracy 10 i + 4 step % at steps 0, 5, 10."""
    paths = []
    for i, (group_size, loss_type) in enumerate([(16, "a"), (4, "a"), (4, "a"), (16, "b")]):
        evaluations = [eval_row(step, 0.1 * i + 0.04 * step) for step in (0, 5, 10)]
        flags = {"group_size": group_size, "loss_type": loss_type, "seed": i}
        path = tmp_path / f"run{i}"
        paths.append(write_run(path, train_rows(10), evaluations, parameters=20_000, **flags))
    return paths


def test_runs_that_differ_in_another_flag_are_not_averaged(four_runs, draw, capsys):
    """The two runs with groups of 16 have different losses."""
    for flags in ("--by group_size", "--by group_size --metrics loss"):
        assert plot(*four_runs, flags=flags) == 2
        error = capsys.readouterr().err
        assert "the runs with group size 16 differ in loss_type too" in error
        assert error.count("\n") == 1
    assert draw(*four_runs[:3], flags="--by group_size")


def test_repeats_are_averaged_whatever_their_paths_and_memory(tmp_path, draw, capsys):
    """Each seed starts from a model of its own seed. Of other flags only the speed differs."""
    paths = []
    for seed in range(3):
        flags = {"model_name": f"out/start_seed{seed}/", "micro_batch_tokens": 2**seed}
        flags |= {"seed": seed, "beta": 0.04}
        path = tmp_path / f"run_seed{seed}"
        paths.append(write_run(path, None, [eval_row(0, seed / 10)], **flags))
    draw(*paths, flags="--by beta")
    assert capsys.readouterr().out.splitlines()[2].split() == [
        "0.04",
        "10.0%",
        "0.0%",
        "20.0%",
        "3",
    ]


def test_runs_of_equal_flags_are_one_curve_with_a_band(four_runs, draw):
    """Each training metric is 0.5 in all of them. The band is of what is drawn: of the medians."""
    (figure,) = draw(*four_runs, flags="--by group_size loss_type --metrics accuracy entropy")
    accuracy_panel, entropy_panel = figure.axes
    (legend,) = figure.legends
    assert texts(legend) == [
        "group size 4, loss type a",
        "group size 16, loss type a",
        "group size 16, loss type b",
    ]
    assert [line.get_color() for line in legend.get_lines()] == list(plotter.COLORS[:3])
    line = bold_line(accuracy_panel)  # the mean of runs 1 and 2
    np.testing.assert_allclose(line.get_ydata(), [0.15, 0.35, 0.55])
    band = accuracy_panel.collections[0].get_paths()[0].vertices
    corners = {tuple(point) for point in band.round(6)}
    assert corners >= {(0, 0.1), (0, 0.2), (10, 0.5), (10, 0.6)}
    assert "from the lowest run to the highest" in legend.get_title().get_text()
    np.testing.assert_allclose(bold_line(entropy_panel).get_ydata(), 0.5)


def test_a_mean_of_runs_is_smoothed_before_it_is_taken(tmp_path, draw):
    """A band of raw values around a line of medians once belonged to no line."""
    paths = []
    for seed in (0, 1):
        rows = train_rows(30, loss=float(seed))
        rows[15]["loss"] = 100.0
        paths.append(write_run(tmp_path / f"run{seed}", rows, seed=seed))
    (figure,) = draw(*paths, flags="--by model_name --metrics loss")
    (ax,) = figure.axes
    np.testing.assert_allclose(bold_line(ax).get_ydata(), 0.5)
    band = ax.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (0, 1)


def test_runs_may_be_evaluated_at_different_steps_and_end_early(tmp_path):
    """The mean once went to and fro between the runs, of which each step had another one."""
    often = [{"step": step, "y": step} for step in (0, 10, 20, 30, 40)]
    seldom = [{"step": step, "y": step + 2} for step in (0, 15, 30)]
    paths = [write_run(tmp_path / "often", often), write_run(tmp_path / "seldom", seldom)]
    curve = plotter.make_curve(read.load_runs(paths), "train/y", "step")
    steps = np.array([0, 10, 15, 20, 30])
    np.testing.assert_array_equal(curve.index, steps)
    np.testing.assert_allclose(curve["line"], steps + 1)
    np.testing.assert_allclose(curve["low"], steps)
    np.testing.assert_allclose(curve["high"], steps + 2)


def test_a_mean_that_ends_with_a_shorter_run_says_so(tmp_path, draw, capsys):
    """The last 6 of the 9 steps of seed 0 were once left out without a word."""
    paths = []
    for seed, num_steps in enumerate((9, 3, 9)):
        rows = [{"step": step, "loss": 1.0} for step in range(1, num_steps + 1)]
        paths.append(write_run(tmp_path / f"seed{seed}", rows, seed=seed))
    draw(*paths, flags="--by model_name --metrics loss")
    note = "note: model name tiny/1m: the mean ends at step 3 with seed1\n"
    assert note in capsys.readouterr().out
    draw(paths[0], paths[2], flags="--by model_name --metrics loss")
    assert "note" not in capsys.readouterr().out


def test_runs_that_share_no_tokens_are_not_averaged_over_them(tmp_path, draw, capsys):
    for seed in (0, 1):
        rows = [{"step": 1, "total_tokens": seed, "loss": 1.0}]
        write_run(tmp_path / f"run_seed{seed}", rows, seed=seed)
    paths = [tmp_path / "run_seed0", tmp_path / "run_seed1"]
    assert plot(*paths, flags="--by model_name --metrics loss --x tokens") == 2
    error = capsys.readouterr().err
    assert "total_tokens" in error and "--x step" in error and error.count("\n") == 1
    assert draw(*paths, flags="--by model_name --metrics loss")


@pytest.mark.parametrize(
    "flags, lines, ticks",
    [
        (
            "group_size loss_type",
            {"loss type a": [(4, 0.55), (16, 0.4)], "loss type b": [(16, 0.7)]},
            ["4", "16"],
        ),
        (
            "loss_type group_size",
            {"group size 4": [(0, 0.55)], "group size 16": [(0, 0.4), (1, 0.7)]},
            ["a", "b"],
        ),
    ],
)
def test_last_accuracies_against_a_flag(four_runs, draw, capsys, flags, lines, ticks):
    """Numbers are places on a logarithmic axis, and there is a line for each value of the other."""
    (figure,) = draw(*four_runs, flags=f"--by {flags}")
    (ax,) = figure.axes
    means = [line for line in ax.lines if line.get_alpha() is None]
    colors = labels_of(ax)
    assert colors.keys() == lines.keys()
    for line, (label, points) in zip(means, lines.items(), strict=True):
        assert line.get_color() == colors[label]
        np.testing.assert_allclose(line.get_xydata(), points)
    assert ax.get_xscale() == ("log" if ticks == ["4", "16"] else "linear")
    assert [label.get_text() for label in ax.get_xticklabels()] == ticks
    assert re.fullmatch("Accuracy is highest with .*16.*: 70%", figure.get_suptitle())
    rows = capsys.readouterr().out.splitlines()[2:5]
    assert sorted(row.split()[-4:] for row in rows) == [
        ["40.0%", "40.0%", "40.0%", "1"],
        ["55.0%", "50.0%", "60.0%", "2"],
        ["70.0%", "70.0%", "70.0%", "1"],
    ]


def test_an_interval_that_ends_by_rounding_beyond_its_accuracy_is_drawn(tmp_path, draw):
    row = eval_row(5, 0.0) | {"accuracy_low": 1e-18}
    (figure,) = draw(write_run(tmp_path / "run", None, [row]), flags="--by model_name")
    assert figure.axes[0].get_ylabel() == "Accuracy at the end (%)"


def test_a_line_through_other_differences_is_noted(tmp_path, draw, capsys):
    """10 direct and 100 careful solutions once were the ends of one line, without a word."""
    paths = []
    for kind, num_examples in (("direct", 10), ("careful", 100)):
        flags = {"num_examples": num_examples, "train_file": f"gold_{kind}.jsonl"}
        paths.append(write_run(tmp_path / kind, None, [eval_row(5)], **flags))
    draw(*paths, flags="--by num_examples")
    assert "note: the runs differ in train_file too\n" in capsys.readouterr().out


# ---- runs in progress and bad input


def test_torn_last_line_is_skipped_with_a_note(tmp_path, capsys):
    run = write_run(tmp_path / "run", [{"step": t, "loss": t} for t in range(3)])
    with open(run / "train_log.jsonl", "ab") as log:
        log.write(b'{"step": 4, "text": "\xc3')  # cut inside a character
    assert len(read.load_runs([run])[0].rows["train"]) == 3
    assert plot(run) == 0
    out = capsys.readouterr().out
    assert re.search(f"note: {run}/train_log.jsonl.*4: torn last line skipped", out)
    assert "not evaluated yet" in out


def test_a_tilde_stands_for_the_home_directory(tmp_path, monkeypatch, capsys):
    """A shell leaves it as it is in --log_dir=~/run."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write_run(tmp_path / "run", [{"step": 1, "loss": 2}])
    assert plotter.main(["--log_dir=~/run", "--output=~/plots.pdf"]) == 0
    assert (tmp_path / "plots.pdf").exists()
    for flag in ("--diagnose", "--list"):
        folder = "~/run" if flag == "--diagnose" else "~"
        assert plotter.main([f"{flag}={folder}"]) == 0
    assert "error" not in capsys.readouterr().err


def test_plots_need_no_latex(tmp_path, monkeypatch):
    """A user's matplotlibrc may ask for it."""
    monkeypatch.setitem(matplotlib.rcParams, "text.usetex", True)
    monkeypatch.setenv("PATH", "")
    run = write_run(tmp_path / "run", [{"step": 1, "loss": 2}])
    assert plot(run) == 0


def test_odd_values_in_args_json_and_steps_stop_nothing(tmp_path):
    """They once ended in a traceback. A row whose step is no number is left out."""
    evaluations = [{"step": [1], "accuracy": 0.5}, eval_row(2, 0.25), eval_row(3, 0.75)]
    flags = {"model_name": 5, "dataset_name": ["x"], "beta": {"a": None}}
    rows = [{"step": 1, "loss": 2}]
    run = write_run(tmp_path / "run", rows, evaluations, parameters="many", **flags)
    write_answers(run, 2, [[1], "yes"])
    write_answers(run, 3, [[2], True])
    assert plot(run) == 0
    assert plot(run, flags="--by beta model_name parameters --metrics loss") == 0


def test_an_error_while_drawing_keeps_the_earlier_plots(tmp_path, monkeypatch, capsys):
    """The disk fills up after the first page."""
    run = write_run(tmp_path / "run", [{"step": 1, "loss": 2}])
    (run / "training_plots.pdf").write_text("earlier plots")

    def draw_pages(*_):
        yield Figure()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plotter, "draw_pages", draw_pages)
    assert plot(run) == 2
    error = capsys.readouterr().err
    assert "training_plots.pdf: " in error and "No space left" in error
    assert (run / "training_plots.pdf").read_text() == "earlier plots"
    files = {path.name for path in run.iterdir()}
    assert files == {"args.json", "train_log.jsonl", "training_plots.pdf"}, "no temporary file"
