"""The plotter: exact statistics, what is drawn for which log, and one clear line for every bad log."""

import ast
import json
import math
import re
import sys
import warnings
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

import plotter
import run_logs

REWARDS = ("correctness", "number_format", "strict_format", "soft_format", "tag_count")


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def losses(n):
    return [{"step": t, "loss": t, "kl": 0.1} for t in range(1, n + 1)]


def train_rows(n, seed=0, **extra):
    """n noisy iterations with nearly every key of a training log."""
    noise = np.random.default_rng(seed).normal
    keys = ["loss", "kl", "entropy", "grad_norm", "learning_rate", "reward", "response_length",
            "response_length_correct", "response_length_incorrect", "truncated_fraction", "zero_std_fraction",
            "clip_fraction", "clip_fraction_low",
            *(f"rewards/{name}" for name in REWARDS),
            *(f"time/{name}" for name in ("sample", "reward", "logps", "loss", "step", "total"))]  # fmt: skip
    return [
        {"step": t, "epoch": 0, "total_tokens": 5000 * t, "elapsed": 2.0 * t}
        | {key: abs(noise()) for key in keys}
        | extra
        for t in range(1, n + 1)
    ]


def eval_row(step, strict=0.3, flexible=0.4, n=500):
    row = {"step": step, "n": n, "total_tokens": 5000 * step, "elapsed": 2.0 * step}
    for key, share in (("accuracy", strict), ("accuracy_flexible", flexible)):
        row |= {key: share, f"{key}_low": share - 0.04, f"{key}_high": share + 0.04}
    return row


def write_run(path, train=None, evaluations=None, model="tiny/1m"):
    path.mkdir(parents=True, exist_ok=True)
    if train is not None:
        write_jsonl(path / "train_log.jsonl", train)
    if evaluations is not None:
        write_jsonl(path / "eval_log.jsonl", evaluations)
    record = {"args": {"model_name": model, "dataset_name": "arithmetic"}, "parameters": 1_051_776}
    (path / "args.json").write_text(json.dumps(record))
    return path


def write_answers(run, step, strict, flexible=None, gold=str):
    """eval/step_*.jsonl with a question per entry of `strict`."""
    pairs = enumerate(zip(strict, flexible or strict, strict=True))
    rows = [{"id": f"q{i}", "gold": gold(i), "correct_strict": s, "correct_flexible": f} for i, (s, f) in pairs]
    write_jsonl(run / f"eval/step_{step:06d}.jsonl", rows)


def figures(*paths, x="step", first=None):
    with rc_context(plotter.STYLE):
        runs = run_logs.load_runs(paths)
        return list(islice(plotter.draw_pages(runs, plotter.choose_axis(runs, x), run_logs.compare_runs(runs)), first))


def page(pages, title):
    found = [fig for fig in pages if fig.get_suptitle().split("\n")[-1] == title]
    assert len(found) == 1, [fig.get_suptitle() for fig in pages]
    return found[0]


def panel(fig, title):
    return next(ax for ax in fig.axes if ax.get_title() == title)


def count_pages(pdf):
    return len(re.findall(rb"/Type /Page\b(?!s)", pdf.read_bytes()))


# ---- statistics


@pytest.mark.parametrize(
    "fixed, broken, p",
    [(0, 0, 1), (1, 0, 1), (3, 3, 1), (5, 0, 2 / 32), (10, 2, 2 * (1 + 12 + 66) / 4096), (2, 10, 2 * 79 / 4096)],
)
def test_mcnemar_by_hand(fixed, broken, p):
    assert run_logs.mcnemar(fixed, broken) == p


def test_mcnemar_equals_scipy_binomial_test():
    """Relative 1e-9; scipy's own binomial tail is good to about 1e-12."""
    stats = pytest.importorskip("scipy.stats")
    pairs = [(a, b) for a in range(12) for b in range(12) if a + b] + [
        (700, 600),
        (5000, 4811),
        (40, 700),
        (9000, 9000),
    ]
    for fixed, broken in pairs:
        expected = stats.binomtest(min(fixed, broken), fixed + broken, 0.5).pvalue
        assert run_logs.mcnemar(fixed, broken) == pytest.approx(expected, rel=1e-9), (fixed, broken)


def test_mcnemar_too_small_for_a_float_is_zero_and_printed_as_a_bound():
    assert run_logs.mcnemar(4000, 0) == 0.0
    assert run_logs.p_text(0.0) == "p < 1e-300"


def test_smoothing_is_a_centred_mean_of_the_finite_neighbours():
    values = np.arange(30.0)  # 30 points: a window of 3
    values[10] = np.nan
    smooth = run_logs.smooth(values)
    assert smooth[5] == 5 and smooth[0] == 0.5 and smooth[29] == 28.5
    assert math.isnan(smooth[10]) and smooth[9] == 8.5 and smooth[11] == 11.5
    np.testing.assert_array_equal(run_logs.smooth(values[:29]), values[:29])  # too short to smooth
    np.testing.assert_allclose(run_logs.smooth(np.full(150, 7.0)), 7.0)


# ---- paired comparison


def test_run_is_compared_with_its_own_first_evaluation(tmp_path, capsys):
    """6 questions: strict fixes 3 and breaks 1 (p = 2 * 5 / 16), flexible fixes 1 (p = 1)."""
    run = write_run(tmp_path / "run", None, [eval_row(0), eval_row(5), eval_row(9)])
    write_answers(run, 0, [0, 0, 0, 1, 1, 0], [0, 1, 1, 1, 1, 0])
    write_answers(run, 5, [0] * 6)  # neither first nor last
    write_answers(run, 9, [1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 0])
    write_answers(run, 12, [0] * 6)  # still being written: no row in eval_log yet
    assert run_logs.compare_runs(run_logs.load_runs([run])) == [
        ("run, step 0 -> 9", "strict", 6, 3, 1, 0.625),
        ("run, step 0 -> 9", "flexible", 6, 1, 0, 1.0),
    ]
    assert plotter.main(["--log_dir", str(run)]) == 0
    assert (
        "run, step 0 -> 9, strict: 3 fixed, 1 broken of 6 questions, exact McNemar p = 0.62\n"
        in capsys.readouterr().out
    )


def test_runs_are_compared_on_the_questions_they_share(tmp_path, capsys):
    """The same id with another gold answer is another question; an unknown verdict (null) is no pair."""
    a, b, c = (write_run(tmp_path / name, None, [eval_row(0)]) for name in "abc")
    write_answers(a, 0, [False, True, True, False])
    write_answers(b, 0, [True, False, None, True, True], gold=lambda i: "other" if i == 3 else str(i))
    write_answers(c, 0, [True] * 4, gold=lambda i: "another data set")
    results = run_logs.compare_runs(run_logs.load_runs([a, b, c]))
    assert results == [("a (step 0) -> b (step 0)", kind, 2, 1, 1, 1.0) for kind in ("strict", "flexible")]
    assert "a (step 0) -> c (step 0): no question in common" in capsys.readouterr().out


def test_of_several_samples_of_a_question_the_first_is_compared(tmp_path):
    run = write_run(tmp_path / "run", None, [eval_row(0), eval_row(1)])
    for step, verdicts in ((0, [False, True, True]), (1, [True, False, False])):
        rows = [{"id": 7, "gold": "1", "correct_strict": v, "correct_flexible": v} for v in verdicts]
        write_jsonl(run / f"eval/step_{step:06d}.jsonl", rows)
    assert run_logs.compare_runs(run_logs.load_runs([run]))[0][2:5] == (1, 1, 0)


# ---- what is drawn


def test_screen_and_pages_of_a_run(tmp_path, capsys):
    evaluations = [eval_row(0, 0.312, 0.5), eval_row(6, 0.9, 0.9), eval_row(12, 0.784, 0.8, n=400)]
    run = write_run(tmp_path / "run", losses(12), evaluations)
    assert plotter.main(["--log_dir", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "accuracy (strict)  31.2 % -> 78.4 %  (n = 500 and 400, 95 % intervals [27.2, 35.2] and [74.4, 82.4])",
        "accuracy (flexible)  50.0 % -> 80.0 %  (n = 500 and 400, 95 % intervals [46.0, 54.0] and [76.0, 84.0])",
        f"plots: {run}/training_plots.pdf",
    ]
    assert count_pages(run / "training_plots.pdf") == 1 + 2 + 2  # dashboard, evaluation, training
    before = (run / "training_plots.pdf").read_bytes()
    assert plotter.main(["--log_dir", str(run)]) == 0
    assert (run / "training_plots.pdf").read_bytes() == before


def test_new_metrics_and_rewards_are_discovered(tmp_path):
    extra = {"rewards/brevity": 1, "judge/agreement": 0.5, "judge/failures": 2, "note": "text", "novelty": 3}
    pages = figures(write_run(tmp_path / "run", train_rows(3, **extra), [eval_row(0)]))
    for title in ("Rewards: brevity", "Judge: agreement", "Novelty", "Clip fraction low"):
        ax = page(pages, f"{title}, training").axes[0]
    assert isinstance(ax.yaxis.get_major_formatter(), PercentFormatter)  # the last one, a share
    assert not any(fig.get_suptitle().endswith(("Note, training", "low, evaluation")) for fig in pages)
    labels = [text.get_text() for text in panel(pages[0], "Reward and its parts").get_legend().get_texts()]
    assert labels == ["total", *(name.replace("_", " ") for name in REWARDS), "brevity"]
    assert len(panel(pages[0], "Judge").get_legend().get_texts()) == 2  # a new family is a panel
    assert "tiny/1m, arithmetic, 1.05 M parameters" in pages[0].get_suptitle()


def test_absent_metrics_have_no_panel(tmp_path):
    rows = [
        {key: value for key, value in row.items() if key in ("step", "loss")} | {"kl": None} for row in train_rows(3)
    ]
    assert [ax.get_title() for ax in figures(write_run(tmp_path / "run", rows))[0].axes] == ["Loss"]


def test_null_is_a_gap_and_an_absent_key_is_not(tmp_path):
    rows = [{"step": 1, "a": 1, "b": 1}, {"step": 2, "a": None}, {"step": 3, "a": 3, "b": 3}, {"step": 4, "a": 4}]
    pages = figures(write_run(tmp_path / "run", rows))
    gap, whole = (page(pages, f"{name}, training").axes[0].lines[-1] for name in "AB")
    np.testing.assert_array_equal(gap.get_ydata(), [1, np.nan, 3, 4])
    assert list(gap.get_markevery()) == [0]  # the point that no line would show
    np.testing.assert_array_equal(whole.get_xdata(), [1, 3])
    assert len(whole.get_markevery()) == 0


def test_single_points_are_visible(tmp_path):
    pages = figures(write_run(tmp_path / "run", losses(1), [eval_row(0)]))
    line = page(pages, "Loss, training").axes[0].lines[-1]
    assert list(line.get_markevery()) == [0] and line.get_marker() == "o"
    accuracy = page(pages, "Accuracy (strict), evaluation").axes[0]
    assert accuracy.lines[0].get_marker() == "o"
    low, high = accuracy.collections[-1].get_segments()[0][:, 1]  # a bar where a band has no width
    assert (low, high) == pytest.approx((0.26, 0.34))


def test_stages_stack_to_their_mean_sum(tmp_path):
    rows = [{"step": t, "time/sample": t, "time/loss": 2 * t, "time/total": 99} for t in (1, 3)]
    bars = panel(figures(write_run(tmp_path / "run", rows))[0], "Time per iteration (s)").patches
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [(0, 2), (2, 4)]


def test_overlaid_runs_are_told_apart(tmp_path):
    paths = [tmp_path / "a/seed0", tmp_path / "b/seed0", tmp_path / "_c$x$"]
    for i, path in enumerate(paths):
        write_run(path, losses(40), [eval_row(0), eval_row(40, 0.5)], model=f"tiny/{1 + i // 2}m")
    pages = figures(*paths)
    legend = [text.get_text() for text in pages[0].legends[0].get_texts()]
    assert [label.split(":")[0] for label in legend] == ["a/seed0", "b/seed0", f"{tmp_path.name}/_c$x$"]
    assert legend[2].endswith("tiny/2m, arithmetic, 1.05 M parameters")
    bold = page(pages, "Loss, training").axes[0].lines[1::2]
    assert len({line.get_color() for line in bold}) == len({line.get_marker() for line in bold}) == 3


def test_a_run_may_lack_what_another_has(tmp_path):
    a = write_run(tmp_path / "a", losses(40), [eval_row(0)])
    b = write_run(tmp_path / "b", [{"step": 1, "loss": 2}])
    raw, bold = page(figures(a, b), "KL to the reference (nats), training").axes[0].lines
    assert len(raw.get_xdata()) == len(bold.get_xdata()) == 40


@pytest.mark.parametrize(
    "x, last, label",
    [("step", 90, "step"), ("tokens", 450_000, "tokens, sampled or trained on"), ("time", 3, "time (min)")],
)
def test_x_axis(tmp_path, x, last, label):
    rows = [row | {"total_tokens": 5000 * row["step"], "elapsed": 2.0 * row["step"]} for row in losses(90)]
    ax = page(figures(write_run(tmp_path, rows), x=x), "Loss, training").axes[0]
    assert (ax.lines[-1].get_xdata()[-1], ax.get_xlabel()) == (last, label)


@pytest.mark.parametrize("case", ["three runs", "one point", "missing metrics", "many rewards"])
def test_nothing_overlaps_or_is_clipped_or_empty(tmp_path, case):
    """Every panel with its labels and legend lies inside the page and clear of the others."""
    iterations = 1 if case == "one point" else 150
    extra = {f"rewards/a_reward_with_a_long_name_{i}": i for i in range(5 * (case == "many rewards"))}
    paths = [tmp_path / f"a_directory_with_quite_a_long_name_{i}" for i in range(3 if case == "three runs" else 1)]
    for i, path in enumerate(paths):
        rows = train_rows(iterations, seed=i, **extra)
        if case == "missing metrics":
            rows = [{key: row[key] for key in row if "time" not in key and key not in ("kl", "loss")} for row in rows]
        write_run(path, rows, [eval_row(0), eval_row(iterations, 0.6)], model="a-hub-user/a-model-with-a-long-name")
        for step in (0, iterations):
            write_answers(path, step, [bool(step)] * 20)
    for fig in figures(*paths, first=3):
        canvas = FigureCanvasAgg(fig)
        with rc_context(plotter.STYLE), warnings.catch_warnings():
            warnings.simplefilter("error")  # a layout that gave up only warns
            canvas.draw()
        renderer = canvas.get_renderer()
        parts = [*fig.axes, *fig.legends, fig._suptitle] if fig._suptitle else fig.axes
        boxes = [part.get_tightbbox(renderer) for part in parts]
        for i, box in enumerate(boxes):
            assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= fig.bbox.x1 and box.y1 <= fig.bbox.y1, parts[i]
            for other in boxes[:i]:
                common = min(box.x1, other.x1) - max(box.x0, other.x0), min(box.y1, other.y1) - max(box.y0, other.y0)
                assert min(common) < 1, (parts[i], common)  # pixels
        for ax in fig.axes:
            assert ax.lines or ax.patches
            for text in ax.texts:
                assert text.get_window_extent(renderer).x0 > ax.yaxis.get_tightbbox(renderer).x1
            if ax.get_legend():
                assert ax.get_legend().get_window_extent(renderer).y1 < ax.xaxis.get_tightbbox(renderer).y0


@pytest.mark.parametrize(("flags", "values"), [("group_size", [(4,), (16,)]), ("loss_type group_size", [("a", 4)])])
def test_last_accuracies_by_flags(tmp_path, capsys, flags, values):
    """Two runs at 4 that end at 50 and 60 % strict, one at 16 (of another loss) that ends at 70 %."""
    for i, (group_size, strict) in enumerate(((16, 0.7), (4, 0.5), (4, 0.6))):
        run = write_run(tmp_path / f"run{i}", None, [eval_row(0), eval_row(5, strict, 0.8)])
        args = {"group_size": group_size, "loss_type": "b" if group_size == 16 else "a", "model_name": "m"}
        (run / "args.json").write_text(json.dumps({"args": args, "parameters": 7}))
    paths = [str(tmp_path / f"run{i}") for i in range(3)]
    output = tmp_path / "figure.png"
    assert plotter.main(["--log_dir", *paths, "--output", str(output), "--by", *flags.split()]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[2].startswith(
        f"| {', '.join(map(str, values[0]))} | 50.0 [46.0, 54.0], 60.0 [56.0, 64.0] | 55.0 | 80.0 |"
    )
    assert table[3].endswith("| 70.0 [66.0, 74.0] | 70.0 | 80.0 |") and len(table) == 5
    assert output.read_bytes().startswith(b"\x89PNG") and len(list(tmp_path.iterdir())) == 4
    runs = run_logs.group_by(run_logs.load_runs(paths), flags.split())
    groups = run_logs.last_accuracies(runs)
    ax = plotter.draw_last_accuracies(runs, groups, flags.split()).axes[0]
    means = [line.get_ydata() for line in ax.lines if len(line.get_xdata()) == 2]
    np.testing.assert_allclose(means, [[0.55, 0.7], [0.8, 0.8], [0.3, 0.3]])  # strict, flexible, before training
    assert ax.get_xscale() == ("log" if flags == "group_size" else "linear")


@pytest.fixture
def four_runs(tmp_path):
    """Group sizes 16, 4, 4, 16; run i has accuracy 10 i, 10 i + 20 and 10 i + 40 % at steps 0, 5 and 10."""
    for i, group_size in enumerate((16, 4, 4, 16)):
        rows = [eval_row(step, 0.1 * i + 0.04 * step) for step in (0, 5, 10)]
        run = write_run(tmp_path / f"run{i}", [row | {"time/total": 3.0} for row in train_rows(10)], rows)
        (run / "args.json").write_text(json.dumps({"args": {"group_size": group_size}, "parameters": 20_000}))
    return [str(tmp_path / f"run{i}") for i in range(4)]


def test_curves_of_equal_flags_have_one_colour(four_runs):
    runs = run_logs.group_by(run_logs.load_runs(four_runs), ["group_size", "parameters"])
    assert [run.name for run in runs] == ["run1", "run2", "run0", "run3"]
    axes = [plotter.choose_axis(runs, x) for x in ("step", "tokens")]
    fig = plotter.draw_metrics(runs, ["accuracy", "entropy", "kl"], axes, ["group_size", "parameters"])
    assert [ax.get_title() for ax in fig.axes] == 2 * ["Accuracy (strict), evaluation", "Entropy (nats per token)",
                                                       "KL to the reference (nats)"]  # fmt: skip
    for ax in fig.axes:
        assert [line.get_color() for line in ax.lines] == [plotter.COLORS[i] for i in (0, 0, 1, 1)]
    np.testing.assert_allclose(fig.axes[0].lines[1].get_ydata(), [0.2, 0.4, 0.6])
    assert list(fig.axes[3].lines[0].get_xdata()) == [0, 25_000, 50_000]
    legend = fig.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["4, 20.00 k", "16, 20.00 k"]
    assert legend.get_title().get_text() == "group size, parameters"


def test_when_an_accuracy_was_first_reached(four_runs, capsys):
    output = Path(four_runs[0]).parent / "curves.png"
    flags = ["--by", "group_size", "--metrics", "accuracy", "--reach", "0.35", "0.6", "--output", str(output)]
    assert plotter.main(["--log_dir", *four_runs, *flags]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[:4] == ["| group_size | accuracy |", "|---|---|", "| 4 | 0.5, 0.6 |", "| 16 | 0.4, 0.7 |"]
    assert table[6:10] == [
        "| 35 % | 4 | 10, 5 | 50, 25 | 30, 15 |",
        "| 35 % | 16 | 10, 5 | 50, 25 | 30, 15 |",
        "| 60 % | 4 | never, 10 | never, 50 | never, 30 |",
        "| 60 % | 16 | never, 10 | never, 50 | never, 30 |",
    ]
    assert output.exists()


def test_an_accuracy_in_percent_is_refused(four_runs, capsys):
    assert plotter.main(["--log_dir", *four_runs, "--reach", "50"]) == 2
    assert capsys.readouterr().err == "error: --reach takes shares above 0 and at most 1, such as 0.5\n"


def test_training_metrics_at_the_end_are_means_of_the_last_tenth(tmp_path):
    rows = [{"step": i, "loss": i, "kl": None if i == 25 else 1.0} for i in range(1, 26)]  # 25 / 10: the last three
    runs = run_logs.load_runs([write_run(tmp_path / "run", rows, [eval_row(0), eval_row(25, 0.5)])])
    assert run_logs.end_table(runs, [], ["loss", "kl", "accuracy"]).endswith("\n| run | 24 | 1 | 0.5 |")


def test_unknown_metric_is_one_line_that_names_those_of_the_logs(four_runs, capsys):
    assert plotter.main(["--log_dir", *four_runs, "--metrics", "acuracy"]) == 2
    assert re.fullmatch(
        "error: --metrics acuracy: not in the logs, which have loss, .*, accuracy, .*", capsys.readouterr().err[:-1]
    )


# ---- runs in progress and bad input


def test_torn_last_line_is_skipped_with_a_note(tmp_path, capsys):
    run = write_run(tmp_path / "run", losses(3))
    with open(run / "train_log.jsonl", "ab") as log:
        log.write(b'{"step": 4, "text": "\xc3')  # cut inside a character
    assert len(run_logs.load_runs([run])[0].train) == 3
    assert plotter.main(["--log_dir", str(run)]) == 0
    out = capsys.readouterr().out
    assert f"{run}/train_log.jsonl:4: torn last line skipped" in out and "not evaluated yet" in out


def test_evaluation_before_the_first_iteration(tmp_path, capsys):
    assert plotter.main(["--log_dir", str(write_run(tmp_path / "run", None, [eval_row(0)]))]) == 0
    assert "accuracy (strict)  30.0 %  (n = 500, 95 % interval [26.0, 34.0])\n" in capsys.readouterr().out


def test_an_error_while_drawing_keeps_the_earlier_plots(tmp_path, monkeypatch, capsys):
    """The disk fills up after the first page."""
    run = write_run(tmp_path / "run", losses(2))
    (run / "training_plots.pdf").write_text("earlier plots")

    def pages(*_):
        yield Figure()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plotter, "draw_pages", pages)
    assert plotter.main(["--log_dir", str(run)]) == 2
    assert "No space left" in capsys.readouterr().err
    assert (run / "training_plots.pdf").read_text() == "earlier plots"
    assert len(list(run.iterdir())) == 3  # no temporary file


def test_imports_no_other_room_and_no_torch():
    names = set()
    for module in (plotter, run_logs):
        tree = ast.parse(Path(module.__file__).read_text())
        names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) == {"matplotlib", "numpy", "run_logs"}
