"""The plotter: what it draws and prints for which logs, and one clear line for every bad one."""

import math
import re
import struct
import subprocess
import sys
import warnings

import numpy as np
import pytest
from conftest import ROOT
from log_helpers import eval_row, plot, write_answers, write_run
from matplotlib.figure import Figure
from matplotlib.text import Text

import plotter
from logs import jsonl, read

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
    """A function that runs the plotter like `plot` and returns the figures that it would save."""
    figures = []
    monkeypatch.setattr(plotter, "save", lambda pages, output: figures.extend(pages))

    def draw(*paths, flags=""):
        figures.clear()
        assert plot(*paths, flags=flags) == 0
        return list(figures)

    return draw


def axes_of(figures, title):
    """Return the panels with that title."""
    all_axes = sum((figure.axes for figure in figures), [])
    return [ax for ax in all_axes if ax.get_title() == title]


def titles_of(figure):
    return [ax.get_title() for ax in figure.axes]


def texts(legend):
    return [text.get_text() for text in legend.get_texts()]


# ---- one run


def test_what_a_run_prints_and_writes(tmp_path, capsys):
    evaluations = [eval_row(0, 0.312, 0.5), eval_row(6, 0.9, 0.9), eval_row(12, 0.784, 0.8, n=400)]
    run = write_run(tmp_path / "run", [{"step": t, "loss": t} for t in range(12)], evaluations)
    assert plot(run) == 0
    assert capsys.readouterr().out.splitlines() == [
        "accuracy (strict)  31.2 % -> 78.4 %  "
        "(n = 500 and 400, 95 % intervals [27.2, 35.2] and [74.4, 82.4])",
        "accuracy (flexible)  50.0 % -> 80.0 %  "
        "(n = 500 and 400, 95 % intervals [46.0, 54.0] and [76.0, 84.0])",
        f"report: {run}/report.html",
        f"plots: {run}/training_plots.pdf",
    ]
    first_pdf = (run / "training_plots.pdf").read_bytes()
    assert first_pdf.startswith(b"%PDF")
    assert plot(run) == 0
    assert (run / "training_plots.pdf").read_bytes() == first_pdf, "equal logs give equal bytes"


def test_every_number_is_plotted_and_a_new_metric_needs_no_edit(tmp_path, draw):
    extra = {
        "rewards/brevity": 1,
        "judge/agreement": 0.5,
        "judge/failures": 2,
        "note": "text",
        "novelty": 3,
    }
    figures = draw(write_run(tmp_path / "run", train_rows(3, **extra), [eval_row(0)]))
    page_of_title = {
        "Rewards: brevity": "Rewards",
        "Judge: agreement": "Judge and texts",
        "Novelty": "Others",
    }
    for title, page in page_of_title.items():
        (figure,) = (figure for figure in figures[1:] if title in titles_of(figure))
        assert page in figure.get_suptitle().split("\n")
    assert not axes_of(figures, "Note")
    assert not axes_of(figures, "Accuracy low, evaluation")
    (reward_panel,) = axes_of(figures[:1], "Reward and its parts")
    (judge_panel,) = axes_of(figures[:1], "Judge")
    assert texts(reward_panel.get_legend()) == ["total", "correctness", "brevity"]
    assert texts(judge_panel.get_legend()) == ["agreement", "failures"], (
        "a new family is a panel of the dashboard"
    )
    assert "run: 1m, arithmetic, 1.05 M parameters" in figures[0].get_suptitle()


def test_absent_metrics_and_those_without_any_number_are_not_drawn(tmp_path, draw):
    rows = [{"step": t, "loss": 1.0, "kl": None} for t in range(3)]
    figures = draw(write_run(tmp_path / "run", rows))
    assert titles_of(figures[0]) == ["Loss"]
    assert not axes_of(figures, "KL to the reference")


@pytest.mark.parametrize("gap", ["null", "NaN", "Infinity", '"text"'])
def test_null_is_a_gap_and_an_absent_key_is_not(tmp_path, draw, gap):
    run = write_run(tmp_path / "run")
    lines = [
        '{"step": 1, "a": 1, "b": 1}',
        f'{{"step": 2, "a": {gap}}}',
        '{"step": 3, "a": 3, "b": 3}',
        '{"step": 4, "a": 4}\n',
    ]
    (run / "train_log.jsonl").write_text("\n".join(lines))
    figures = draw(run)
    line_a = axes_of(figures[1:], "A")[0].lines[-1]
    line_b = axes_of(figures[1:], "B")[0].lines[-1]
    np.testing.assert_array_equal(line_a.get_ydata(), [1, np.nan, 3, 4])
    np.testing.assert_array_equal(line_b.get_xdata(), [1, 3])
    assert list(line_a.get_markevery()) == [0], "the point that no line would show has a marker"


def test_a_single_evaluation_is_visible_with_its_interval(tmp_path, draw, capsys):
    figures = draw(write_run(tmp_path / "run", None, [eval_row(0)]))
    ax = axes_of(figures, "Accuracy (strict), evaluation")[0]
    assert ax.lines[0].get_marker() == "o"
    assert ax.collections[-1].get_segments()[0][:, 1] == pytest.approx([0.26, 0.34])
    line = "accuracy (strict)  30.0 %  (n = 500, 95 % interval [26.0, 34.0])\n"
    assert line in capsys.readouterr().out


def test_shares_of_clipped_tokens_are_no_interval(tmp_path, draw):
    """clip_fraction_low and clip_fraction_high were once drawn as a band, as if of 95 %."""
    extra = {"clip_fraction": 0.3, "clip_fraction_low": 0.1, "clip_fraction_high": 0.2}
    figures = draw(write_run(tmp_path / "run", train_rows(3, **extra)))
    for title in ("Clip fraction", "Clip fraction low", "Clip fraction high"):
        (ax,) = axes_of(figures[1:], title)
        for band in ax.collections:
            assert all(len(path.vertices) == 0 for path in band.get_paths()), title


def test_smoothing_is_a_centred_median_of_the_finite_neighbours():
    """A running mean once drew a spike as a plateau as wide as its window."""
    values = np.arange(30.0)  # 30 points: a window of 3
    values[10] = np.nan
    values[20] = 900
    smooth = read.smooth(values)
    assert smooth[5] == 5
    assert (smooth[0], smooth[29]) == (0.5, 28.5)
    assert math.isnan(smooth[10])
    assert (smooth[9], smooth[11]) == (8.5, 11.5)
    assert list(smooth[18:23]) == [18, 19, 21, 22, 22], "medians of (19, 900, 21) and the like"
    np.testing.assert_array_equal(read.smooth(values[:29]), values[:29], "too short to smooth")


@pytest.mark.parametrize(
    "x, last_x, label",
    [
        ("step", 90, "iteration"),
        ("tokens", 450_000, "sampled tokens"),
        ("time", 3, "time (min)"),
    ],
)
def test_x_axis(tmp_path, draw, x, last_x, label):
    figures = draw(write_run(tmp_path / "run", train_rows(90)), flags=f"--x {x}")
    ax = axes_of(figures, "Loss")[0]
    assert ax.lines[-1].get_xdata()[-1] == last_x
    assert ax.get_xlabel() == label


@pytest.mark.slow
def test_the_axis_says_what_the_steps_of_these_runs_count(tmp_path, draw):
    """All were once called steps, and a figure of GRPO and SFT had no word for the difference."""
    grpo = write_run(tmp_path / "grpo", train_rows(3), num_train_iters=3)
    just_begun = write_run(tmp_path / "sft", None, [eval_row(0)], train_file="gold.jsonl")
    expert_iteration = write_run(tmp_path / "ei", train_rows(3), n_ei_steps=5)
    without_args = write_run(tmp_path / "old_sft", train_rows(3, examples=32))
    (without_args / "args.json").unlink()
    for path in (just_begun, expert_iteration, without_args):
        assert draw(path)[0].axes[0].get_xlabel() == "update"
        assert draw(path, grpo)[0].axes[0].get_xlabel() == "iteration or update"
    assert draw(grpo)[0].axes[0].get_xlabel() == "iteration"


@pytest.mark.slow
def test_many_keys_of_a_judged_run_are_ten_pages_at_most(tmp_path, draw):
    """A run of ten iterations once had 53 pages."""
    keys = """
        reward_std kl_per_token ratio_mean clip_fraction_low skipped_updates below_floor_fraction
        sampled_tokens accuracy accuracy_flexible response_length_incorrect accuracy_level/1
        accuracy_subject/algebra pass@4
    """.split()
    for status in range(400, 420):
        keys += [f"judge/failed_HTTP_{status}", f"novelty_{status}"]
    rows = train_rows(3, **dict.fromkeys(keys, 1.0))
    evaluations = [eval_row(0) | {"new": 1}]
    story_flags = {"dataset_name": "creative", "evaluator": None}
    figures = draw(write_run(tmp_path / "run", rows, evaluations, **story_flags))
    assert 8 < len(figures) <= 10
    train_metrics = rows[0].keys() - {"step", "total_tokens", "elapsed"}
    num_eval_metrics = 3  # strict, flexible and the new one
    titles = sum(map(titles_of, figures[1:]), [])
    assert len(titles) == len(set(titles)) == len(train_metrics) + num_eval_metrics
    for figure in figures:
        assert all(ax.get_ylabel() for ax in figure.axes)


def test_a_spike_is_not_hidden(tmp_path, draw):
    rows = [{"step": t, "grad_norm": 1.0, "loss": 1.0} for t in range(100)]
    rows[50] |= {"grad_norm": 12.0, "loss": 9.0}
    figures = draw(write_run(tmp_path / "run", rows))
    for title, top, scale in (("Gradient norm", 12, "log"), ("Loss", 9, "linear")):
        (ax,) = axes_of(figures[:1], title)
        assert ax.get_yscale() == scale
        assert ax.lines[0].get_ydata().max() == top
        assert ax.get_ylim()[1] > top


@pytest.mark.slow
def test_stories_are_not_called_right_or_wrong(tmp_path, draw, capsys):
    """The strict verdict on a story, above the floor and scored, was once called accuracy."""
    rows = train_rows(3, accuracy=0.9, accuracy_flexible=0.9, response_length_incorrect=3)
    story_flags = {"dataset_name": "creative", "evaluator": None}
    paths = []
    for name in "ab":
        evaluations = [eval_row(0), eval_row(3)]
        path = write_run(tmp_path / name, rows, evaluations, **story_flags, seed=name)
        write_answers(path, 0, [True, False])
        write_answers(path, 3, [True, True])
        paths.append(path)
    figures = draw(paths[0]) + draw(*paths) + draw(*paths, flags="--by seed")
    figures += draw(*paths, flags="--by seed --metrics accuracy")
    out = capsys.readouterr().out
    assert "above the floor and scored  30.0 % -> 30.0 %" in out
    assert "above the floor  40.0 % -> 40.0 %" in out
    assert "step 0 -> 3, above the floor and scored: 1 fixed" in out
    assert "-> b (step 3), above the floor: 0 fixed" in out
    words = []
    for figure in figures:
        words += titles_of(figure)
        for legend in [*figure.legends, *(ax.get_legend() for ax in figure.axes)]:
            words += texts(legend) if legend else []
    story_words = {"Above the floor and scored, evaluation", "Above the floor", "scored"}
    assert story_words | {"not scored"} <= set(words)
    without_keys = re.sub(r"\| seed \| accuracy .*", "", out)  # the header of the table
    all_words = "\n".join([*words, without_keys]).lower().replace("correctness", "")
    assert not re.search("accuracy|strict|flexible|correct", all_words)


# ---- several runs


@pytest.mark.slow
def test_many_runs_and_many_parts_become_small_multiples(tmp_path, draw):
    """21 lines once stood in one panel."""
    paths = [write_run(tmp_path / f"run{i:02}", train_rows(2)) for i in range(21)]
    (figure,) = draw(*paths, flags="--metrics loss")
    assert [len(ax.lines) for ax in figure.axes] == [16, 16, 10], "a faint and a bold one per run"
    assert len(texts(figure.legends[0])) == 21
    assert len({ax.get_ylim() for ax in figure.axes}) == 1
    extra = {f"rewards/part{i}": i for i in range(20)}
    figures = draw(write_run(tmp_path / "parts", train_rows(2, **extra)))
    panels = axes_of(figures[:1], "Reward and its parts")
    assert [len(texts(ax.get_legend())) for ax in panels] == [8, 8, 6]


def test_overlaid_runs_are_told_apart(tmp_path, draw):
    paths = [tmp_path / "a/seed0", tmp_path / "b/seed0", tmp_path / "_c$x$"]
    for path, model_name in zip(paths, ("tiny/1m", "tiny/1m", "tiny/2m"), strict=True):
        evaluations = [eval_row(0), eval_row(40, 0.5)]
        write_run(path, train_rows(40), evaluations, model_name=model_name)
    figures = draw(*paths)
    labels = texts(figures[0].legends[0])
    assert [label.split(":")[0] for label in labels] == ["a/seed0", "b/seed0", "_c$x$"]
    assert labels[2].endswith("2m, arithmetic, 1.05 M parameters")
    bold_lines = axes_of(figures, "Loss")[0].lines[1::2]
    assert len({line.get_color() for line in bold_lines}) == 3
    assert len({line.get_marker() for line in bold_lines}) == 3


def test_a_run_may_lack_args_json_and_what_another_run_has(tmp_path, draw):
    full_run = write_run(tmp_path / "a", train_rows(40))
    bare_run = write_run(tmp_path / "b", [{"step": 1, "loss": 2}])
    (bare_run / "args.json").unlink()
    figures = draw(full_run, bare_run)
    kl_lines = axes_of(figures, "KL to the reference")[0].lines
    assert {len(line.get_xdata()) for line in kl_lines} == {40}
    assert texts(figures[0].legends[0]) == ["a: 1m, arithmetic, 1.05 M parameters", "b"]


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


def test_runs_are_compared_on_the_questions_they_share(tmp_path):
    """An id with another gold answer is another question; an unknown verdict (null) is no pair."""
    a, b, c = (write_run(tmp_path / name, None, [eval_row(0)]) for name in "abc")
    write_answers(a, 0, [False, True, True, False])
    answers_of_b = [True, False, None, True, True]
    write_answers(b, 0, answers_of_b, gold=lambda i: "another" if i == 3 else str(i))
    write_answers(c, 0, [True] * 4, gold=lambda i: "another data set")
    assert read.compare_runs(read.load_runs([a, b, c])) == [
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
    lines = read.compare_runs(read.load_runs([run]))
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


# ---- grouped by flags


@pytest.fixture
def four_runs(tmp_path):
    """Runs with group sizes 16, 4, 4, 16. Run i has accuracy 10 i + 4 step % at steps 0, 5, 10."""
    paths = []
    for i, (group_size, loss_type) in enumerate([(16, "a"), (4, "a"), (4, "a"), (16, "b")]):
        evaluations = [eval_row(step, 0.1 * i + 0.04 * step) for step in (0, 5, 10)]
        flags = {"group_size": group_size, "loss_type": loss_type}
        path = tmp_path / f"run{i}"
        paths.append(write_run(path, train_rows(10), evaluations, parameters=20_000, **flags))
    return paths


FLEXIBLE = "0.4 [0.36, 0.44]"  # of every evaluation


def means_of(ax):
    """Return the strict means of each group or line, as [(x, y), ...], in the order of drawing."""
    means = []
    for line in ax.lines:
        is_mean = line.get_marker() in ("", "_") and line.get_fillstyle() == "full"
        if is_mean:
            points = zip(line.get_xdata(), np.round(line.get_ydata(), 6), strict=True)
            means.append([(float(x), float(y)) for x, y in points])
    return means


@pytest.mark.parametrize(
    "flags, rows, means, scale",
    [
        (
            "group_size",
            [
                f"| 4, a | 0.5 [0.46, 0.54], 0.6 [0.56, 0.64] | {FLEXIBLE}, {FLEXIBLE} |",
                f"| 16, a | 0.4 [0.36, 0.44] | {FLEXIBLE} |",
                f"| 16, b | 0.7 [0.66, 0.74] | {FLEXIBLE} |",
            ],
            [[(4, 0.55), (16, 0.4)], [(16, 0.7)]],
            "log",
        ),
        (
            "loss_type group_size",
            [
                f"| a, 4 | 0.5 [0.46, 0.54], 0.6 [0.56, 0.64] | {FLEXIBLE}, {FLEXIBLE} |",
                f"| a, 16 | 0.4 [0.36, 0.44] | {FLEXIBLE} |",
                f"| b, 16 | 0.7 [0.66, 0.74] | {FLEXIBLE} |",
            ],
            [[(0, 0.55)], [(1, 0.4)], [(2, 0.7)]],
            "linear",
        ),
    ],
)
def test_last_accuracies_by_flags(four_runs, draw, capsys, flags, rows, means, scale):
    """Without a word, --by group_size must not pool the runs of size 16: their losses differ."""
    (figure,) = draw(*four_runs, flags=f"--by {flags}")
    header, _, *table_rows, _ = capsys.readouterr().out.splitlines()
    all_flags = flags if "loss_type" in flags else f"{flags} loss_type"
    assert header == f"| {all_flags.replace(' ', ', ')} | accuracy | accuracy_flexible |"
    assert table_rows == rows
    (ax,) = figure.axes
    assert means_of(ax) == means
    assert ax.get_xscale() == scale
    tick_labels = [label.get_text() for label in ax.get_xticklabels()]
    (legend,) = figure.legends
    if scale == "log":
        assert tick_labels == ["4", "16"]
        assert texts(legend)[:2] == ["a", "b"]
        assert legend.get_title().get_text() == "loss type"
    else:
        assert tick_labels == [row.split(" | ")[0].removeprefix("| ") for row in rows]


def test_last_accuracies_along_numbers(four_runs, draw):
    """Where only one flag differs, its values are places on a logarithmic axis."""
    (figure,) = draw(*four_runs[:3], flags="--by group_size")
    (ax,) = figure.axes
    assert ax.get_xscale() == "log"
    assert list(ax.get_xticks()) == [4, 16]
    assert means_of(ax) == [[(4, 0.55), (16, 0.4)]]
    assert texts(figure.legends[0])[0].startswith("strict"), "a single line needs no label"


def test_no_line_leads_from_one_kind_of_run_to_another(tmp_path, draw, capsys):
    """10 direct and 100 careful solutions once were the ends of one line, labelled 10 and 100.

    No two runs had equal numbers of examples, so that nothing asked in what else they differed.
    """
    paths = []
    for kind, num_examples, accuracy in (("direct", 10, 0.4), ("careful", 100, 0.9)):
        flags = {"num_examples": num_examples, "train_file": f"gold_{kind}.jsonl"}
        for seed in (0, 1):
            path = tmp_path / f"{kind}_seed{seed}"
            evaluations = [eval_row(0), eval_row(5, accuracy)]
            paths.append(write_run(path, None, evaluations, seed=seed, **flags))
    (figure,) = draw(*paths, flags="--by num_examples")
    (ax,) = figure.axes
    assert sorted(means_of(ax)) == [[(10, 0.4)], [(100, 0.9)]]
    assert set(texts(figure.legends[0])) >= {"gold_direct.jsonl", "gold_careful.jsonl"}
    assert "\n| 10, gold_direct.jsonl | " in capsys.readouterr().out


def test_models_of_several_sizes_are_one_line(tmp_path, draw):
    """Their names differ because their sizes do."""
    paths = []
    for name, parameters, accuracy in (("small", 1000, 0.2), ("large", 5000, 0.8)):
        evaluations = [eval_row(5, accuracy)]
        flags = {"model_name": name, "parameters": parameters}
        paths.append(write_run(tmp_path / name, None, evaluations, **flags))
    (figure,) = draw(*paths, flags="--by parameters")
    assert means_of(figure.axes[0]) == [[(1000, 0.2), (5000, 0.8)]]


def test_repeats_are_pooled_whatever_their_paths_and_memory(tmp_path, draw, capsys):
    """Each seed starts from a model of its own seed. Of other flags only the speed differs."""
    paths = []
    for seed in range(3):
        flags = {"model_name": f"out/start_seed{seed}/", "micro_batch_tokens": 2**seed}
        flags |= {"seed": seed, "beta": 0.04}
        path = tmp_path / f"run_seed{seed}"
        paths.append(write_run(path, None, [eval_row(0, seed / 10)], **flags))
    for flag, label in (("beta", "0.04"), ("model_name", "start_seed")):
        draw(*paths, flags=f"--by {flag}")
        assert f"\n| {label} | 0 [-0.04, 0.04], 0.1 [" in capsys.readouterr().out


def test_runs_that_differ_in_everything_are_not_grouped(tmp_path, capsys):
    """Labels of twenty flags cannot be read. The line names the flags, of which one may be old."""
    flags = ("alpha", "beta", "gamma", "delta", "epsilon")
    for name in "ab":
        flags_of_run = dict.fromkeys(flags, name) if name == "b" else {}
        write_run(tmp_path / name, None, [eval_row(0)], price=1, **flags_of_run)
    output = tmp_path / "plots.png"
    assert plot(tmp_path / "a", tmp_path / "b", flags=f"--by price --output {output}") == 2
    error = capsys.readouterr().err
    assert "--by price: " in error and "alpha, beta, delta, epsilon, gamma" in error
    assert error.count("\n") == 1
    assert not output.exists()


def test_runs_of_equal_flags_are_one_curve_with_a_band(four_runs, draw):
    flags = "--by group_size parameters --metrics accuracy entropy --x step tokens"
    (figure,) = draw(*four_runs, flags=flags)
    assert titles_of(figure) == 2 * ["Accuracy (strict), evaluation", "Entropy"]
    assert [ax.get_ylabel() for ax in figure.axes] == 2 * ["share", "nats"]
    for ax in figure.axes:
        colors = list(dict.fromkeys(line.get_color() for line in ax.lines))
        assert colors == list(plotter.COLORS[:3])
    accuracy_panel = figure.axes[0]
    mean_of_size_4 = accuracy_panel.lines[0]  # of runs 1 and 2
    np.testing.assert_allclose(mean_of_size_4.get_ydata(), [0.15, 0.35, 0.55])
    band = accuracy_panel.collections[0].get_paths()[0].vertices
    corners = {tuple(point) for point in band.round(6)}
    assert corners >= {(0, 0.1), (0, 0.2), (10, 0.5), (10, 0.6)}
    title = figure.get_suptitle().replace("\n", " ")
    assert "bands: from their least to their greatest (of a single run: 95 % interval)" in title
    assert list(figure.axes[2].lines[0].get_xdata()) == [0, 25_000, 50_000]
    (legend,) = figure.legends
    assert texts(legend) == ["4, 0.02 M, a", "16, 0.02 M, a", "16, 0.02 M, b"]
    assert legend.get_title().get_text() == "group size, parameters, loss type"


def test_pooled_runs_may_end_early_and_keep_their_gaps():
    long_log = [{"step": 0, "y": 1}, {"step": 1, "y": None}, {"step": 2, "y": 3}]
    short_log = [{"step": 0, "y": 3}, {"step": 1, "y": None}]
    steps, mean, low, high = read.pool([long_log, short_log], "step", "y")
    np.testing.assert_array_equal(steps, [0, 1, 2])
    np.testing.assert_array_equal(mean, [2, np.nan, 3])
    np.testing.assert_array_equal(low, [1, np.nan, 3])
    np.testing.assert_array_equal(high, [3, np.nan, 3])


def test_pooled_runs_may_be_evaluated_at_different_steps():
    """The mean once went to and fro between the runs, of which each step had another one."""
    often = [{"step": step, "y": step} for step in (0, 10, 20, 30)]
    seldom = [{"step": step, "y": step + 2} for step in (0, 15, 30)]
    steps, mean, low, high = read.pool([often, seldom], "step", "y")
    np.testing.assert_array_equal(steps, [0, 10, 15, 20, 30])
    np.testing.assert_allclose(mean, steps + 1)
    np.testing.assert_allclose(high - low, 2)


def test_pooled_runs_over_tokens_are_one_line_that_goes_forward(tmp_path, draw):
    """Where one run ended, x once fell back: it was the mean of the tokens of those that go on.

    y is a tenth of the tokens in both runs. They share the range from 200 to 600.
    """
    paths = []
    for seed, tokens_of_a_step in enumerate((100, 200)):
        rows = []
        for step in range(1, 7 if tokens_of_a_step == 100 else 10):
            tokens = step * tokens_of_a_step
            rows.append({"step": step, "total_tokens": tokens, "y": tokens / 10})
        paths.append(write_run(tmp_path / f"run_seed{seed}", rows, seed=seed))
    (figure,) = draw(*paths, flags="--by arm --metrics y --x tokens")
    (line,) = figure.axes[0].lines
    x = line.get_xdata()
    assert (x[0], x[-1], len(x)) == (200, 600, 9)
    assert (np.diff(x) > 0).all()
    np.testing.assert_allclose(line.get_ydata(), x / 10)


def test_runs_that_share_no_tokens_are_not_averaged_over_them(tmp_path, capsys):
    for seed in (0, 1):
        rows = [{"step": 1, "total_tokens": seed, "loss": 1.0}]
        write_run(tmp_path / f"run_seed{seed}", rows)
    paths = [tmp_path / "run_seed0", tmp_path / "run_seed1"]
    assert plot(*paths, flags="--by arm --metrics loss --x tokens") == 2
    error = capsys.readouterr().err
    assert "total_tokens" in error and "--x step" in error and error.count("\n") == 1
    assert plot(*paths, flags="--by arm --metrics loss") == 0


def test_a_group_keeps_its_colour_over_the_figures_of_a_study(four_runs, draw):
    """16 once had the first colour where it was drawn alone, and the second beside 4."""
    for paths in (four_runs, [four_runs[0]], [four_runs[3]]):
        (figure,) = draw(*paths, flags="--by group_size loss_type --metrics entropy")
        place = 1 if paths == [four_runs[0]] else 2
        assert figure.axes[0].lines[-1].get_color() == plotter.COLORS[place]


@pytest.mark.parametrize(
    "flag, values, labels",
    [
        (
            "use_std_normalization",
            [False, True],
            ["without std normalization", "with std normalization"],
        ),
        ("cliprange_high", [0.28, None], ["0.28", "default"]),
        ("num_examples", [10_000, None], ["10000", "all"]),
        ("parameters", [91_920, 7_615_616_512], ["0.09 M", "7.62 B"]),
        ("model_name", ["out/sft_50/", "out/sft_9"], ["sft_50", "sft_9"]),
        ("model_name", ["out/a/checkpoints/step_9", "out/b/checkpoints/step_9"], ["a", "b"]),
    ],
)
def test_labels_are_words(tmp_path, draw, flag, values, labels):
    paths = []
    for i, value in enumerate(values):
        path = tmp_path / f"run{i}"
        paths.append(write_run(path, train_rows(3), [eval_row(0)], **{flag: value}))
    (figure,) = draw(*paths, flags=f"--by {flag} --metrics loss")
    assert texts(figure.legends[0]) == labels
    (figure,) = draw(*paths, flags=f"--by {flag}")
    tick_labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert [label.replace("\n", " ") for label in tick_labels] == labels


def test_training_metrics_at_the_end_are_means_of_the_last_tenth(tmp_path, draw, capsys):
    """A tenth of 25 iterations are the last three."""
    rows = [{"step": i, "loss": i, "kl": 1.0} for i in range(1, 26)]
    rows[-1]["kl"] = None
    run = write_run(tmp_path / "run", rows, [eval_row(0), eval_row(25, 0.5)])
    draw(run, flags="--metrics loss kl accuracy")
    assert "\n| run | 24 | 1 | 0.5 [0.46, 0.54] |\n" in capsys.readouterr().out


# ---- figures for pages


@pytest.fixture
def studies(tmp_path):
    """A function that writes runs into folders STUDY/RUN, and a file of three names."""
    entries = {
        "rates/base": ["the baseline", "#0072b2"],
        "rates/base_rate1e-3": ["a rate that is too high", "#999999"],
        "sft/direct10": ["SFT on 10 solutions", "#CC79A7"],
    }
    jsonl.write_json(tmp_path / "names.json", entries)

    def write(*folders, **flags):
        paths = []
        for folder in folders:
            rate = re.search(r"_rate([^_]+)", folder)
            flags_of_run = flags | ({"learning_rate": float(rate[1])} if rate else {})
            flags_of_run["seed"] = int(folder[-1])
            path = tmp_path / folder
            paths.append(write_run(path, train_rows(5), [eval_row(0)], **flags_of_run))
        return paths

    return write


def colors_of(figure):
    """Return {label: colour} as the legend has them."""
    (legend,) = figure.legends
    handles = [line.get_color() for line in legend.get_lines()]
    return dict(zip(texts(legend), handles, strict=True))


def test_a_method_has_its_name_and_colour_in_every_figure(studies, tmp_path, draw, capsys):
    base = studies("rates/base_rate2e-4_seed0", "rates/base_rate2e-4_seed1")
    too_high = studies("rates/base_rate1e-3_seed0")
    sft = studies("sft/direct10_rate1e-5_seed0", "sft/direct10_rate1e-5_seed1")
    flags = f"--names {tmp_path}/names.json --metrics accuracy loss"
    baseline = {"the baseline": "#0072B2"}
    names_of_both = baseline | {"SFT on 10 solutions": "#CC79A7"}
    (figure,) = draw(*base, *sft, flags=flags)
    assert colors_of(figure) == names_of_both
    accuracy_panel, loss_panel = figure.axes
    assert len(accuracy_panel.lines) == len(loss_panel.lines) == 2, "a mean over seeds for each"
    assert [line.get_color() for line in loss_panel.lines] == ["#0072B2", "#CC79A7"]
    table = capsys.readouterr().out
    assert "\n| the baseline | 0.3 [0.26, 0.34], 0.3 [0.26, 0.34] | " in table
    (figure,) = draw(*sft, *base, *too_high, flags=flags)
    assert colors_of(figure) == names_of_both | {"a rate that is too high": "#999999"}
    (figure,) = draw(base[1], flags=flags)
    assert colors_of(figure) == baseline
    (figure,) = draw(*base, *sft, flags=flags + " --by learning_rate")
    assert colors_of(figure) == names_of_both
    (figure,) = draw(*base, *sft, flags=f"--names {tmp_path}/names.json --by arm")
    assert {label.get_text() for label in figure.axes[0].get_xticklabels()} == set(names_of_both)
    dots = {line.get_color() for line in figure.axes[0].lines}
    assert dots - {"0.4"} == set(names_of_both.values())


@pytest.mark.parametrize("has_args", [True, False])
def test_two_rates_of_a_method_are_told_apart(studies, tmp_path, draw, has_args):
    paths = studies(
        "rates/base_rate2e-4_seed0",
        "rates/base_rate2e-4_seed1",
        "rates/base_rate4e-4_seed0",
        "sft/direct10_rate1e-5_seed0",
    )
    if not has_args:
        for path in paths:
            (path / "args.json").unlink()
    (figure,) = draw(*paths, flags=f"--names {tmp_path}/names.json --metrics accuracy")
    assert colors_of(figure) == {
        "the baseline at 2e-4": "#0072B2",
        "the baseline at 4e-4": "#0072B2",
        "SFT on 10 solutions": "#CC79A7",
    }
    assert len({line.get_linestyle() for line in figure.axes[0].lines[:2]}) == 2


def test_a_run_without_a_name_has_no_colour_of_a_name(studies, tmp_path, draw):
    """The usual colours of the first five are those of COLORS, and the fifth belongs to a name."""
    folders = [f"other/run{i}_seed0" for i in range(5)]
    paths = studies(*folders)
    usual = {folder.removeprefix("other/"): plotter.COLORS[i] for i, folder in enumerate(folders)}
    (figure,) = draw(*paths, flags=f"--names {tmp_path}/names.json --metrics loss")
    assert colors_of(figure) == usual, "no name is drawn"
    (sft,) = studies("sft/direct10_seed0")
    (figure,) = draw(*paths, sft, flags=f"--names {tmp_path}/names.json --metrics loss")
    colors = colors_of(figure)
    assert colors.pop("SFT on 10 solutions") == "#CC79A7" == plotter.COLORS[4]
    moved_color = colors.pop("other/run4_seed0")
    for folder, color in colors.items():
        assert color == usual[folder.removeprefix("other/")]
    assert moved_color not in {"#CC79A7", *colors.values()}


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "cannot be read"),
        ("{", "not valid JSON"),
        ("[]", "not an object"),
        ('{"a/b": "name"}', "'a/b' needs [display name, colour]"),
        ('{"a/b": ["name", 3]}', "'a/b' needs [display name, colour]"),
        ('{"a/b": ["name", "#12345"]}', "'a/b' has the colour '#12345'"),
        ('{"a/b": ["name", "bleu"]}', "'a/b' has the colour 'bleu'"),
    ],
)
def test_a_wrong_file_of_names_is_one_line(tmp_path, capsys, text, message):
    run = write_run(tmp_path / "run", train_rows(1))
    names = tmp_path / "names.json"
    if text is not None:
        names.write_text(text)
    assert plot(run, flags=f"--names {names} --metrics loss") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --names {names}: ")
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("flags", ["--metrics loss accuracy", "--by group_size", ""])
def test_a_title_is_the_message_of_a_figure(four_runs, draw, flags):
    message = "Larger groups end a little lower than small ones, " * 4 + "all runs agree."
    (figure, *_) = draw(*four_runs, flags=f"{flags} --title '{message}'")
    title = figure.get_suptitle()
    assert title.split() == message.split(), "nothing else stands there"
    assert "\n" in title
    figure.draw_without_rendering()
    (drawn_title,) = (text for text in figure.texts if text.get_text() == title)
    box = drawn_title.get_window_extent()
    assert 0 <= box.x0 and box.x1 <= figure.bbox.width


@pytest.mark.parametrize(
    "flags, num_columns",
    [
        ("--metrics loss", 1),
        ("--metrics loss kl reward", 2),
        ("--metrics loss kl --x step tokens", 2),
        ("--metrics accuracy --x step tokens time --by group_size", 2),
        ("--by loss_type group_size", 1),
    ],
)
def test_a_figure_of_a_page_can_be_read_on_a_phone(four_runs, tmp_path, flags, num_columns):
    """Texts once had 7 points, and panels stood in rows of three."""
    drawn = []
    save = plotter.save

    def keep(figures, output):
        drawn.extend(figures)
        save(drawn, output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plotter, "save", keep)
        assert plot(*four_runs, flags=f"{flags} --output {tmp_path}/figure.png") == 0
    (figure,) = drawn
    assert len({ax.get_position().x0.round(2) for ax in figure.axes}) == num_columns
    words = [text for text in figure.findobj(Text) if text.get_text().strip()]
    assert len(words) > 10
    assert min(text.get_fontsize() for text in words) >= 10
    width, height = struct.unpack(">II", (tmp_path / "figure.png").read_bytes()[16:24])
    np.testing.assert_allclose([width, height], 150 * figure.get_size_inches(), atol=1)


def test_more_than_four_panels_are_refused(four_runs, tmp_path, capsys):
    output = tmp_path / "figure.png"
    flags = f"--metrics loss kl reward entropy grad_norm --output {output}"
    assert plot(four_runs[0], flags=flags) == 2
    error = capsys.readouterr().err
    assert "5 panels" in error and "at most 4" in error and error.count("\n") == 1
    assert not output.exists()


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


@pytest.mark.parametrize(
    "log, flags, message",
    [
        ("", "", "no complete line in its logs yet"),
        ('{"step": 1}\n{"st\n{"step": 3}\n', "", "train_log.jsonl, line 2: not valid JSON"),
        ('{"loss": 1}\n', "", 'train_log.jsonl, line 1: not an object with "step"'),
        (
            '{"step": 1, "loss": 2}\n',
            "--x tokens",
            'a log without "total_tokens", which --x tokens needs',
        ),
        ('{"step": 1, "loss": 2}\n', "--by price", "no --price in its args.json"),
        (
            '{"step": 1, "loss": 2, "kl": 1}\n',
            "--metrics los",
            "--metrics los: not in the logs, which have kl, loss",
        ),
    ],
)
def test_what_a_user_got_wrong_is_one_line(tmp_path, capsys, log, flags, message):
    run = write_run(tmp_path / "run")
    (run / "train_log.jsonl").write_text(log)
    assert plot(run, flags=flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not (run / "training_plots.pdf").exists()


def test_odd_values_in_args_json_and_steps_stop_nothing(tmp_path, capsys):
    """They once ended in a traceback. A row whose step is no number is left out."""
    evaluations = [{"step": [1], "accuracy": 0.5}, eval_row(2, 0.25), eval_row(3, 0.75)]
    flags = {"model_name": 5, "dataset_name": ["x"], "beta": {"a": None}}
    rows = [{"step": 1, "loss": 2}]
    run = write_run(tmp_path / "run", rows, evaluations, parameters="many", **flags)
    write_answers(run, 2, [[1], "yes"])
    write_answers(run, 3, [[2], True])
    assert plot(run) == 0
    assert plot(run, flags="--by beta model_name parameters --metrics loss") == 0
    assert "\n| {'a': None}, 5, many | 2 |\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "output, message",
    [
        ("absent/plots.pdf", "there is no folder"),
        ("folder.png", "this is a folder"),
        ("plots.jpg", "must end in .pdf or .png"),
        ("file/plots.pdf", "there is no folder"),
    ],
)
def test_an_output_that_cannot_be_written_is_named(tmp_path, capsys, output, message):
    """The message once named a temporary file."""
    run = write_run(tmp_path / "run", [{"step": 1, "loss": 2}])
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("")
    assert plot(run, flags=f"--output {tmp_path}/{output}") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --output {tmp_path}/{output}: ")
    assert message in error and error.count("\n") == 1


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


def test_the_plotter_imports_no_torch_and_nothing_of_training():
    code = "import sys, plotter; print(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    modules = set(process.stdout.split())
    assert "logs.read" in modules, process.stderr
    assert not modules & {
        "torch",
        "transformers",
        "main",
        "utils",
        "llms",
        "evaluator",
        "training",
        "distributed",
    }
