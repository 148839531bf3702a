"""The plotter: what is drawn and printed for which logs, and one clear line for every bad one."""

import math
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest
from conftest import ROOT
from matplotlib.figure import Figure

import plotter
from logs import jsonl, read


def train_rows(n, **extra):
    """n iterations with the keys that the dashboard knows."""
    keys = "loss kl entropy grad_norm learning_rate reward rewards/correctness response_length response_length_correct "
    keys += "zero_std_fraction truncated_fraction distinct_2 distinct_2_batch time/sample time/loss"
    values = dict.fromkeys(keys.split(), 0.5) | {"time/total": 3.0} | extra
    return [
        {"step": t, "total_tokens": 5000 * t, "elapsed": 2.0 * t} | values for t in range(1, n + 1)
    ]


def eval_row(step, strict=0.3, flexible=0.4, n=500):
    row = {"step": step, "n": n, "total_tokens": 5000 * step, "elapsed": 2.0 * step}
    for key, share in (("accuracy", strict), ("accuracy_flexible", flexible)):
        row |= {key: share, f"{key}_low": share - 0.04, f"{key}_high": share + 0.04}
    return row


def write_run(path, train=None, evaluations=None, parameters=1_051_776, **flags):
    path.mkdir(parents=True)
    for name, rows in (("train_log", train), ("eval_log", evaluations)):
        if rows is not None:
            jsonl.write(path / f"{name}.jsonl", rows)
    flags = {"model_name": "tiny/1m", "dataset_name": "arithmetic"} | flags
    jsonl.write_json(path / "args.json", {"args": flags, "parameters": parameters})
    return path


def write_answers(run, step, strict, flexible=None, gold=str):
    """eval/step_*.jsonl with a question per entry of `strict`."""
    pairs = enumerate(zip(strict, flexible or strict, strict=True))
    rows = [
        {"id": f"q{i}", "gold": gold(i), "correct_strict": s, "correct_flexible": f}
        for i, (s, f) in pairs
    ]
    jsonl.write(run / f"eval/step_{step:06d}.jsonl", rows)


def plot(*paths, flags=""):
    return plotter.main(["--log_dir", *map(str, paths), *flags.split()])


@pytest.fixture
def drawn(monkeypatch):
    """(paths, flags) -> the figures that would be saved."""
    figures = []
    monkeypatch.setattr(plotter, "save", lambda pages, output: figures.extend(pages))

    def draw(*paths, flags=""):
        figures.clear()
        assert plot(*paths, flags=flags) == 0
        return list(figures)

    return draw


def axes_of(figures, title):
    """The panels with that title."""
    return [ax for fig in figures for ax in fig.axes if ax.get_title() == title]


def texts(legend):
    return [text.get_text() for text in legend.get_texts()]


# ---- one run


def test_what_a_run_prints_and_writes(tmp_path, capsys):
    evaluations = [eval_row(0, 0.312, 0.5), eval_row(6, 0.9, 0.9), eval_row(12, 0.784, 0.8, n=400)]
    run = write_run(tmp_path / "run", [{"step": t, "loss": t} for t in range(12)], evaluations)
    assert plot(run) == 0
    assert capsys.readouterr().out.splitlines() == [
        "accuracy (strict)  31.2 % -> 78.4 %  (n = 500 and 400, 95 % intervals [27.2, 35.2] and [74.4, 82.4])",
        "accuracy (flexible)  50.0 % -> 80.0 %  (n = 500 and 400, 95 % intervals [46.0, 54.0] and [76.0, 84.0])",
        f"report: {run}/report.html",
        f"plots: {run}/training_plots.pdf",
    ]
    before = (run / "training_plots.pdf").read_bytes()
    assert before.startswith(b"%PDF") and plot(run) == 0
    assert (run / "training_plots.pdf").read_bytes() == before, "equal logs give equal bytes"


def test_every_number_is_plotted_and_a_new_metric_needs_no_edit(tmp_path, drawn):
    extra = {
        "rewards/brevity": 1,
        "judge/agreement": 0.5,
        "judge/failures": 2,
        "note": "text",
        "novelty": 3,
    }
    figures = drawn(write_run(tmp_path / "run", train_rows(3, **extra), [eval_row(0)]))
    pages = {
        "Rewards: brevity": "Rewards",
        "Judge: agreement": "Judge and texts",
        "Novelty": "Others",
    }
    for title, page in pages.items():
        (figure,) = (figure for figure in figures[1:] if axes_of([figure], title))
        assert page in figure.get_suptitle().split("\n")
    assert not axes_of(figures, "Note") and not axes_of(figures, "Accuracy low, evaluation")
    (reward,), (judge,) = (
        axes_of(figures[:1], title) for title in ("Reward and its parts", "Judge")
    )
    assert texts(reward.get_legend()) == ["total", "correctness", "brevity"]
    assert texts(judge.get_legend()) == ["agreement", "failures"], (
        "a new family is a panel of the dashboard"
    )
    assert "run: 1m, arithmetic, 1.05 M parameters" in figures[0].get_suptitle()


def test_absent_metrics_and_those_without_any_number_are_not_drawn(tmp_path, drawn):
    rows = [{"step": t, "loss": 1.0, "kl": None} for t in range(3)]
    figures = drawn(write_run(tmp_path / "run", rows))
    assert [ax.get_title() for ax in figures[0].axes] == ["Loss"] and not axes_of(
        figures, "KL to the reference"
    )


@pytest.mark.parametrize("gap", ["null", "NaN", "Infinity", '"text"'])
def test_null_is_a_gap_and_an_absent_key_is_not(tmp_path, drawn, gap):
    run = write_run(tmp_path / "run")
    rows = [
        '{"step": 1, "a": 1, "b": 1}',
        f'{{"step": 2, "a": {gap}}}',
        '{"step": 3, "a": 3, "b": 3}',
        '{"step": 4, "a": 4}\n',
    ]
    (run / "train_log.jsonl").write_text("\n".join(rows))
    figures = drawn(run)
    with_gap, whole = (axes_of(figures[1:], name)[0].lines[-1] for name in "AB")
    np.testing.assert_array_equal(with_gap.get_ydata(), [1, np.nan, 3, 4])
    np.testing.assert_array_equal(whole.get_xdata(), [1, 3])
    assert list(with_gap.get_markevery()) == [0], "the point that no line would show has a marker"


def test_a_single_evaluation_is_visible_with_its_interval(tmp_path, drawn, capsys):
    ax = axes_of(
        drawn(write_run(tmp_path / "run", None, [eval_row(0)])), "Accuracy (strict), evaluation"
    )[0]
    assert ax.lines[0].get_marker() == "o"
    assert ax.collections[-1].get_segments()[0][:, 1] == pytest.approx([0.26, 0.34])
    assert (
        "accuracy (strict)  30.0 %  (n = 500, 95 % interval [26.0, 34.0])\n"
        in capsys.readouterr().out
    )


def test_smoothing_is_a_centred_mean_of_the_finite_neighbours():
    values = np.arange(30.0)  # 30 points: a window of 3
    values[10] = np.nan
    smooth = read.smooth(values)
    assert smooth[5] == 5 and smooth[0] == 0.5 and smooth[29] == 28.5
    assert math.isnan(smooth[10]) and smooth[9] == 8.5 and smooth[11] == 11.5
    np.testing.assert_array_equal(read.smooth(values[:29]), values[:29])  # too short to smooth


@pytest.mark.parametrize(
    "x, last, label",
    [
        ("step", 90, "step"),
        ("tokens", 450_000, "tokens, sampled or trained on"),
        ("time", 3, "time (min)"),
    ],
)
def test_x_axis(tmp_path, drawn, x, last, label):
    ax = axes_of(drawn(write_run(tmp_path / "run", train_rows(90)), flags=f"--x {x}"), "Loss")[0]
    assert (ax.lines[-1].get_xdata()[-1], ax.get_xlabel()) == (last, label)


def test_many_keys_of_a_judged_run_are_ten_pages_at_most(tmp_path, drawn):
    """A ten-iteration run had 53."""
    keys = "reward_std kl_per_token ratio_mean clip_fraction_low skipped_updates below_floor_fraction sampled_tokens "
    keys += "accuracy accuracy_flexible response_length_incorrect accuracy_level/1 accuracy_subject/algebra pass@4 "
    keys += " ".join(f"judge/failed_HTTP_{status} novelty_{status}" for status in range(400, 420))
    run = write_run(
        tmp_path / "run",
        train_rows(3, **dict.fromkeys(keys.split(), 1.0)),
        [eval_row(0) | {"new": 1}],
        dataset_name="creative",
        evaluator=None,
    )
    figures = drawn(run)
    assert 8 < len(figures) <= 10
    titles = [ax.get_title() for figure in figures[1:] for ax in figure.axes]
    assert (
        len(titles) == len(set(titles)) == len(set(keys.split()) | train_rows(1)[0].keys()) - 3 + 3
    )  # 3 counters
    assert all(ax.get_ylabel() for figure in figures for ax in figure.axes)


def test_a_spike_is_not_hidden(tmp_path, drawn):
    rows = [
        {"step": t, "grad_norm": 300.0 if t == 50 else 1.0, "loss": 9.0 if t == 50 else 1.0}
        for t in range(100)
    ]
    figures = drawn(write_run(tmp_path / "run", rows))
    (spike,), (flat,) = (axes_of(figures[:1], title) for title in ("Gradient norm", "Loss"))
    assert (spike.get_yscale(), flat.get_yscale()) == ("log", "linear")
    for ax, top in ((spike, 300), (flat, 9)):
        assert ax.lines[0].get_ydata().max() == top and ax.get_ylim()[1] > top


def test_stories_are_not_called_right_or_wrong(tmp_path, drawn, capsys):
    """Their strict verdict, above the floor and scored, was called accuracy."""
    rows = train_rows(3, accuracy=0.9, accuracy_flexible=0.9, response_length_incorrect=3)
    evaluations, stories = [eval_row(0), eval_row(3)], dict(dataset_name="creative", evaluator=None)
    paths = [write_run(tmp_path / name, rows, evaluations, **stories, seed=name) for name in "ab"]
    for path in paths:
        write_answers(path, 0, [True, False])
        write_answers(path, 3, [True, True])
    figures = drawn(paths[0]) + drawn(*paths) + drawn(*paths, flags="--by seed")
    figures += drawn(*paths, flags="--by seed --metrics accuracy")
    out, words = capsys.readouterr().out, []
    assert (
        "above the floor and scored  30.0 % -> 30.0 %" in out
        and "above the floor  40.0 % -> 40.0 %" in out
    )
    assert (
        "step 0 -> 3, above the floor and scored: 1 fixed" in out
        and "-> b (step 3), above the floor: 0 fixed" in out
    )
    for figure in figures:
        legends = [legend for ax in figure.axes if (legend := ax.get_legend())] + figure.legends
        words += [ax.get_title() for ax in figure.axes] + sum(map(texts, legends), [])
    assert {
        "Above the floor and scored, evaluation",
        "Above the floor",
        "scored",
        "not scored",
    } <= set(words)
    said = (
        "\n".join([*words, re.sub(r"\| seed \| accuracy .*", "", out)])
        .lower()
        .replace("correctness", "")
    )
    assert not re.search("accuracy|strict|flexible|correct", said)


# ---- several runs


def test_many_runs_and_many_parts_become_small_multiples(tmp_path, drawn):
    """21 lines in one panel."""
    paths = [write_run(tmp_path / f"run{i:02}", train_rows(2)) for i in range(21)]
    (figure,) = drawn(*paths, flags="--metrics loss")
    assert [len(ax.lines) for ax in figure.axes] == [16, 16, 10] and len(
        texts(figure.legends[0])
    ) == 21
    assert len({ax.get_ylim() for ax in figure.axes}) == 1
    extra = {f"rewards/part{i}": i for i in range(20)}
    panels = axes_of(
        drawn(write_run(tmp_path / "parts", train_rows(2, **extra)))[:1], "Reward and its parts"
    )
    assert [len(texts(ax.get_legend())) for ax in panels] == [8, 8, 6]


def test_overlaid_runs_are_told_apart(tmp_path, drawn):
    paths = [tmp_path / "a/seed0", tmp_path / "b/seed0", tmp_path / "_c$x$"]
    for i, path in enumerate(paths):
        write_run(
            path, train_rows(40), [eval_row(0), eval_row(40, 0.5)], model_name=f"tiny/{1 + i // 2}m"
        )
    figures = drawn(*paths)
    legend = texts(figures[0].legends[0])
    assert [label.split(":")[0] for label in legend] == ["a/seed0", "b/seed0", "_c$x$"]
    assert legend[2].endswith("2m, arithmetic, 1.05 M parameters")
    bold = axes_of(figures, "Loss")[0].lines[1::2]
    assert (
        len({line.get_color() for line in bold}) == len({line.get_marker() for line in bold}) == 3
    )


def test_a_run_may_lack_what_another_has_and_args_json(tmp_path, drawn):
    a, b = (
        write_run(tmp_path / "a", train_rows(40)),
        write_run(tmp_path / "b", [{"step": 1, "loss": 2}]),
    )
    (b / "args.json").unlink()
    figures = drawn(a, b)
    assert {len(line.get_xdata()) for line in axes_of(figures, "KL to the reference")[0].lines} == {
        40
    }
    assert texts(figures[0].legends[0]) == ["a: 1m, arithmetic, 1.05 M parameters", "b"]


def test_run_is_compared_with_its_own_first_evaluation(tmp_path, capsys):
    """6 questions: strict fixes 3 and breaks 1 (p = 2 * 5 / 16), flexible fixes 1 (p = 1)."""
    run = write_run(tmp_path / "run", None, [eval_row(0), eval_row(5), eval_row(9)])
    write_answers(run, 0, [0, 0, 0, 1, 1, 0], [0, 1, 1, 1, 1, 0])
    write_answers(run, 5, [0] * 6)  # neither first nor last
    write_answers(run, 9, [1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 0])
    write_answers(run, 12, [0] * 6)  # still being written: no row in eval_log yet
    assert plot(run) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "run, step 0 -> 9, strict: 3 fixed, 1 broken of 6 questions, exact McNemar p = 0.62",
        "run, step 0 -> 9, flexible: 1 fixed, 0 broken of 6 questions, exact McNemar p = 1",
    ]


def test_runs_are_compared_on_the_questions_they_share(tmp_path):
    """The same id with another gold answer is another question; an unknown verdict (null) is no pair."""
    a, b, c = (write_run(tmp_path / name, None, [eval_row(0)]) for name in "abc")
    write_answers(a, 0, [False, True, True, False])
    write_answers(
        b, 0, [True, False, None, True, True], gold=lambda i: "other" if i == 3 else str(i)
    )
    write_answers(c, 0, [True] * 4, gold=lambda i: "another data set")
    assert read.compare_runs(read.load_runs([a, b, c])) == [
        "a (step 0) -> b (step 0), strict: 1 fixed, 1 broken of 2 questions, exact McNemar p = 1",
        "a (step 0) -> b (step 0), flexible: 1 fixed, 1 broken of 2 questions, exact McNemar p = 1",
        "note: a (step 0) -> c (step 0): no question in common, not compared",
    ]


def test_of_several_samples_of_a_question_the_first_is_compared(tmp_path):
    run = write_run(tmp_path / "run", None, [eval_row(0), eval_row(1)])
    for step, verdicts in ((0, [False, True, True]), (1, [True, False, False])):
        rows = [
            {"id": 7, "gold": "1", "correct_strict": v, "correct_flexible": v} for v in verdicts
        ]
        jsonl.write(run / f"eval/step_{step:06d}.jsonl", rows)
    assert "strict: 1 fixed, 0 broken of 1 questions" in read.compare_runs(read.load_runs([run]))[0]


@pytest.mark.parametrize("runs, rewards", [(1, 9), (3, 1), (12, 0)])
def test_the_layout_finds_room_for_long_names(tmp_path, runs, rewards):
    """A layout that gave up says so in a warning; what looks like TeX in a name is none."""
    paths = [tmp_path / f"a_$directory_{{with}}_{{a}}$_quite_long_name_{i}" for i in range(runs)]
    extra = {f"rewards/a_reward_with_a_long_name_{i}": i for i in range(rewards)}
    for i, path in enumerate(paths):
        write_run(
            path,
            train_rows(5, **extra),
            [eval_row(0)],
            model_name=f"a-hub-user/a-model-with-a-long-name-{i}",
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plot(*paths, flags=f"--output {tmp_path}/plots.png") == 0
    assert (tmp_path / "plots.png").read_bytes().startswith(b"\x89PNG")


# ---- grouped by flags


@pytest.fixture
def four_runs(tmp_path):
    """Group sizes 16, 4, 4, 16; run i has accuracy 10 i, 10 i + 20 and 10 i + 40 % at steps 0, 5 and 10."""
    for i, group_size in enumerate((16, 4, 4, 16)):
        rows = [eval_row(step, 0.1 * i + 0.04 * step) for step in (0, 5, 10)]
        write_run(
            tmp_path / f"run{i}",
            train_rows(10),
            rows,
            parameters=20_000,
            group_size=group_size,
            loss_type="aaab"[i],
        )
    return [tmp_path / f"run{i}" for i in range(4)]


def notes_and_table(capsys):
    lines = capsys.readouterr().out.splitlines()
    return (
        [line for line in lines if line.startswith("note: ")],
        [line for line in lines if line[:6] != "note: "],
    )


@pytest.mark.parametrize(
    "flags, groups, scale",
    [
        (
            "group_size",
            {
                "4": ("0.5 [0.46, 0.54], 0.6 [0.56, 0.64]", 0.55),
                "16 (loss type: a, b)": ("0.4 [0.36, 0.44], 0.7 [0.66, 0.74]", 0.55),
            },
            "log",
        ),
        (
            "loss_type group_size",
            {
                "a, 4": ("0.5 [0.46, 0.54], 0.6 [0.56, 0.64]", 0.55),
                "a, 16": ("0.4 [0.36, 0.44]", 0.4),
                "b, 16": ("0.7 [0.66, 0.74]", 0.7),
            },
            "linear",
        ),
    ],
)
def test_last_accuracies_by_flags(four_runs, drawn, capsys, flags, groups, scale):
    """Runs that differ in another flag were pooled without a word."""
    (figure,) = drawn(*four_runs, flags=f"--by {flags}")
    _, table = notes_and_table(capsys)
    assert table[0] == f"| {flags.replace(' ', ', ')} | accuracy | accuracy_flexible |"
    flexible = ", ".join(2 * ["0.4 [0.36, 0.44]"])
    rows = [
        f"| {group} | {cells} | {flexible}"[: -18 if mean != 0.55 else None]
        for group, (cells, mean) in groups.items()
    ]
    assert table[2:-1] == [f"{row} |" for row in rows]
    (ax,) = figure.axes
    means = [mean for _, mean in groups.values()]
    assert any(
        len(line.get_ydata()) == len(means) and np.allclose(line.get_ydata(), means)
        for line in ax.lines
    )
    assert [label.get_text() for label in ax.get_xticklabels()] == list(
        groups
    ) and ax.get_xscale() == scale


def test_runs_of_equal_flags_are_one_curve_with_a_band(four_runs, drawn):
    by = "--by group_size parameters --metrics accuracy entropy --x step tokens"
    (figure,) = drawn(*four_runs, flags=by)
    assert [ax.get_title() for ax in figure.axes] == 2 * [
        "Accuracy (strict), evaluation",
        "Entropy",
    ]
    assert [ax.get_ylabel() for ax in figure.axes] == 2 * ["share", "nats"]
    for ax in figure.axes:
        assert [line.get_color() for line in ax.lines] == list(plotter.COLORS[:2])
    np.testing.assert_allclose(
        figure.axes[0].lines[0].get_ydata(), [0.15, 0.35, 0.55]
    )  # runs 1 and 2: the smaller size
    band = figure.axes[0].collections[0].get_paths()[0].vertices
    assert {tuple(point) for point in band.round(6)} >= {(0, 0.1), (0, 0.2), (10, 0.5), (10, 0.6)}
    assert "bands: from their least to their greatest" in figure.get_suptitle().replace("\n", " ")
    assert list(figure.axes[2].lines[0].get_xdata()) == [0, 25_000, 50_000]
    (legend,) = figure.legends
    assert texts(legend) == ["4, 0.02 M", "16, 0.02 M (loss type: a, b)"]
    assert legend.get_title().get_text() == "group size, parameters"


def test_pooled_runs_may_end_early_and_keep_their_gaps():
    logs = [
        [{"step": t, "x": 10 * t, "y": y} for t, y in enumerate(values)]
        for values in ([1, None, 3], [3, None])
    ]
    (x, _, _), (mean, low, high) = read.pool(logs, "x", "y")
    np.testing.assert_array_equal(
        [x, mean, low, high], [[0, 10, 20], [2, np.nan, 3], [1, np.nan, 3], [3, np.nan, 3]]
    )


def test_a_group_keeps_its_colour_over_the_figures_of_a_study(four_runs, drawn):
    """16 was the first colour where it was drawn alone, and the second beside 4."""
    colors = [
        drawn(*paths, flags="--by group_size --metrics entropy")[0].axes[0].lines[-1].get_color()
        for paths in (four_runs, [four_runs[0]], [four_runs[3]])
    ]
    assert colors == 3 * [plotter.COLORS[1]]


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
def test_labels_are_words(tmp_path, drawn, flag, values, labels):
    paths = []
    for i, value in enumerate(values):
        flags = {"parameters": value} if flag == "parameters" else {flag: value}
        paths.append(write_run(tmp_path / f"run{i}", train_rows(3), [eval_row(0)], **flags))
    (figure,) = drawn(*paths, flags=f"--by {flag} --metrics loss")
    assert texts(figure.legends[0]) == labels
    (figure,) = drawn(*paths, flags=f"--by {flag}")
    assert [
        label.get_text().replace("\n", " ") for label in figure.axes[0].get_xticklabels()
    ] == labels


def test_training_metrics_at_the_end_are_means_of_the_last_tenth(tmp_path, drawn, capsys):
    rows = [
        {"step": i, "loss": i, "kl": None if i == 25 else 1.0} for i in range(1, 26)
    ]  # 25 / 10: the last three
    drawn(
        write_run(tmp_path / "run", rows, [eval_row(0), eval_row(25, 0.5)]),
        flags="--metrics loss kl accuracy",
    )
    assert "\n| run | 24 | 1 | 0.5 [0.46, 0.54] |\n" in capsys.readouterr().out


# ---- runs in progress and bad input


def test_torn_last_line_is_skipped_with_a_note(tmp_path, capsys):
    run = write_run(tmp_path / "run", [{"step": t, "loss": t} for t in range(3)])
    with open(run / "train_log.jsonl", "ab") as log:
        log.write(b'{"step": 4, "text": "\xc3')  # cut inside a character
    assert len(read.load_runs([run])[0].train) == 3
    assert plot(run) == 0
    out = capsys.readouterr().out
    assert (
        re.search(f"note: {run}/train_log.jsonl.*4: torn last line skipped", out)
        and "not evaluated yet" in out
    )


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
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not (run / "training_plots.pdf").exists()


def test_an_error_while_drawing_keeps_the_earlier_plots(tmp_path, monkeypatch, capsys):
    """The disk fills up after the first page."""
    run = write_run(tmp_path / "run", [{"step": 1, "loss": 2}])
    (run / "training_plots.pdf").write_text("earlier plots")

    def pages(*_):
        yield Figure()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plotter, "draw_pages", pages)
    assert plot(run) == 2
    assert "No space left" in capsys.readouterr().err
    assert (run / "training_plots.pdf").read_text() == "earlier plots"
    assert len(list(run.iterdir())) == 3  # no temporary file


def test_the_plotter_imports_no_torch_and_nothing_of_training():
    code = "import sys, plotter; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "logs.read" in run.stdout.split(), run.stderr
    assert not {"torch", "transformers", "main", "utils", "llms", "evaluator", "runs"} & set(
        run.stdout.split()
    )
