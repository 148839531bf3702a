"""Draws training runs from their log files: curves, a report to read, and a diagnosis.

    python plotter.py --log_dir output/run
        writes training_plots.pdf, the run's curves, and report.html, its completions, into it
    python plotter.py --log_dir output/a output/b
        draws both runs in output/comparison.pdf, and compares their answers question by question
    python plotter.py --log_dir output/a output/b --metrics accuracy reward --output ab.png
        draws these curves alone
    python plotter.py --log_dir output/* --by learning_rate --metrics accuracy
        averages the runs that share a value of this flag
    python plotter.py --log_dir output/sft-* --by num_examples
        draws the accuracy at the end of training against this flag
    python plotter.py --diagnose output/run
        says what looks wrong in the logs of a run, why that matters, and what to change
    python plotter.py --list output
        prints a line for each run in this folder: how far it is, and how good

Every number in a log gets a panel, so a new metric or reward needs no edit here. A null in a log is
a gap in its curve. docs/metrics.md explains the metrics and the plots.
"""

import argparse
import itertools
import math
import os
import sys
import textwrap
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure  # without pyplot, nothing can open a window
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from logs import diagnose, read, report, summary
from logs.read import column, differing_flags, has_number, value_of_flag

# The colour-blind-safe palette of Okabe and Ito, without its yellow, which is too pale for paper.
# In a greyscale print the markers tell runs apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000")
MARKERS = "os^Dv*XP"
LINESTYLES = ("-", "--", ":", "-.")
STYLE = {
    "font.size": 9,
    "figure.titlesize": 13,
    "axes.titlesize": 10,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "lines.markersize": 4,
    "pdf.fonttype": 42,
    "savefig.dpi": 150,
    "text.parse_math": False,
    "text.usetex": False,
}
PAGE_SIZE = (11.69, 8.27)  # inches: A4, landscape
FIRST_PAGE = (2, 2)  # rows and columns of training_plots.pdf
OTHER_PAGES = (3, 4)
MAX_LABELS = 4  # More curves than these have a legend; fewer are labelled where they end.
LETTER_WIDTH = 0.075  # inches, on average, of a label
SPIKE = 10  # A value that is so many times the median flattens a curve on a linear axis.

AXES = {  # the choices of --x: (key in the logs, label, what it is divided by)
    "step": ("step", "iteration", 1),  # or "update": see choose_axis
    "tokens": ("total_tokens", "tokens so far", 1),
    "time": ("elapsed", "time (min)", 60),
}
# A metric is named by its log and its key there, such as "train/loss". These panels come first. A
# name that ends in "/" stands for all metrics that begin with it.
FIRST_PANELS = (
    ("eval/accuracy", "eval/accuracy_flexible"),
    ("train/reward", "train/rewards/"),
    ("train/kl",),
    ("train/loss",),
    ("train/entropy",),
    ("train/response_length", "train/response_length_correct", "train/response_length_incorrect"),
    ("train/grad_norm",),
    ("train/zero_std_fraction",),
    ("train/truncated_fraction",),
    ("train/learning_rate",),
)
TITLES = {  # of metrics whose key does not say well what they are
    "eval/accuracy": "Accuracy",
    "eval/accuracy_flexible": "Flexible accuracy",
    "train/accuracy": "Accuracy of the samples",
    "train/kl": "KL to the reference",
    "train/kl_per_token": "KL per token",
    "train/grad_norm": "Gradient norm",
    "train/response_length": "Completion length",
    "train/zero_std_fraction": "Groups of equal rewards",
    "train/truncated_fraction": "Truncated completions",
    "train/time/total": "Time per iteration",
    "eval/count/format1_answer1": "Right answers in the format",
    "eval/count/format1_answer0": "Wrong answers in the format",
    "eval/count/format0_answer0": "Answers not in the format",
}
LABELS = {  # of metrics that share a panel
    "eval/accuracy": "strict",
    "eval/accuracy_flexible": "flexible",
    "train/reward": "total",
    "train/response_length": "all",
    "train/response_length_correct": "correct",
    "train/response_length_incorrect": "incorrect",
}
# The units of metrics, and how the keys with that unit begin.
UNITS = {
    "%": ("accuracy", "pass@", "truncated", "zero_std", "below_floor", "clip", "skipped"),
    "tokens": ("response_length",),
    "nats": ("kl", "entropy", "sample_entropy", "sampling_"),
    "s": ("time/",),
    "GB": ("memory/",),
}


# ---- the metrics of runs, and their words


def choose_axis(runs, name):
    """Return the x axis of that name. The label of steps says what they count in these runs.

    Raises:
        ValueError: a log lacks its key.
    """
    key, label, scale = AXES[name]
    if name == "step":
        label = " or ".join(sorted({run.unit_of_step for run in runs}))
    for run in runs:
        for rows in run.rows.values():
            if rows and not read.rows_with_number(rows, key):
                raise ValueError(f'{run.path}: a log without "{key}", which --x {name} needs')
    return key, label, scale


def find_metrics(runs, x_key):
    """Return the names of all metrics, in the order in which the logs have them.

    A metric has a finite number in some row of some run. Counters, settings and the ends of other
    metrics' intervals are not metrics.

    Raises:
        ValueError: there is none.
    """
    metrics = []
    for log in ("train", "eval"):
        keys = {}  # a dict serves as an ordered set
        for run in runs:
            for row in read.rows_with_number(run.rows[log], x_key):
                keys |= {key: None for key in row if has_number(row, key)}
        for key in keys:
            stem, _, end = key.rpartition("_")
            # In the log of training, keys such as clip_fraction_low are metrics of their own.
            is_interval_end = log == "eval" and end in ("low", "high") and stem in keys
            if key not in read.NO_METRICS and not is_interval_end:
                metrics.append(f"{log}/{key}")
    if not metrics:
        raise ValueError("no number to plot in the logs")
    return metrics


def full_name(name, metrics):
    """Return the full name of a metric, such as "train/reward" for "reward".

    If both logs have it, accuracies and pass@k are those of evaluations, and others of training.

    Raises:
        ValueError: no log has the metric.
    """
    logs = ["train", "eval"]
    if name.startswith(("accuracy", "pass@")):
        logs.reverse()
    for candidate in (name, *(f"{log}/{name}" for log in logs)):
        if candidate in metrics:
            return candidate
    keys = sorted({metric.partition("/")[2] for metric in metrics})
    raise ValueError(f"--metrics {name}: not in the logs, which have {', '.join(keys)}")


def title_of(metric):
    if metric in TITLES:
        return TITLES[metric]
    log, _, key = metric.partition("/")
    words = key.replace("_", " ").replace("/", ": ")
    title = words[0].upper() + words[1:]
    return f"{title}, evaluation" if log == "eval" else title


def label_of(metric):
    """Return the label of a metric that shares its panel with others."""
    return LABELS.get(metric) or metric.split("/")[-1].replace("_", " ")


def unit_of(metric):
    """Return the unit of a metric, or ""."""
    key = metric.partition("/")[2]
    for unit, prefixes in UNITS.items():
        if key.startswith(prefixes):
            return unit
    return ""


def in_words(values, metric):
    """Return values of a metric in words, with as many digits as the greatest of them needs."""
    greatest = max(abs(value) for value in values)
    if unit_of(metric) == "%":
        decimals = 2 if 0 < greatest < 0.01 else 0
        return [f"{value:.{decimals}%}" for value in values]
    if not 1e-4 < greatest < 1e6:
        return [f"{value:.3g}" for value in values]
    decimals = max(0, 2 - math.floor(math.log10(greatest)))
    return [f"{value:z,.{decimals}f}" for value in values]  # z: without a minus before 0


def arrange_panels(metrics, several_runs):
    """Return the metrics of each panel. Where colours tell runs apart, a panel has one metric."""
    panels = []
    for names in FIRST_PANELS:
        panel = []
        for name in names:
            panel += [metric for metric in metrics if is_named(metric, name)]
        if panel:
            panels.append(tuple(panel[:1] if several_runs else panel))
    metrics_so_far = set().union(*panels)
    return panels + [(metric,) for metric in metrics if metric not in metrics_so_far]


def is_named(metric, name):
    return metric.startswith(name) if name.endswith("/") else metric == name


# ---- curves


def values_of(run, metric, x_key):
    """Return a metric of a run as a series along x. NaN is a gap; rows without the key are none."""
    log, _, key = metric.partition("/")
    rows = [row for row in read.rows_with_number(run.rows[log], x_key) if key in row]
    series = pd.Series(column(rows, key), index=column(rows, x_key), dtype=float).sort_index()
    return series[~series.index.duplicated(keep="last")]


def smooth(series):
    """Return a centred running median over about a fifteenth of the points. A gap stays a gap.

    A mean would turn a spike into a plateau as wide as its window.
    """
    width = 2 * (len(series) // 30) + 1
    return series.rolling(width, center=True, min_periods=1).median().where(series.notna())


def is_noisy(metric):
    """Whether a metric is drawn smoothed: one of training, but for the learning rate."""
    return metric.startswith("train/") and metric != "train/learning_rate"


def make_curve(runs, metric, x_key):
    """Return the curve of a metric, averaged over the runs that have it, or None if none has.

    Returns:
        a table along x with the columns `line`, `low` and `high`. For several runs, `line` is the
        mean, and the band goes from the least to the greatest, where all runs have values. Between
        the rows of a log values are interpolated. For one run, the band is the interval of an
        evaluation, and NaN in training.

    Raises:
        ValueError: the runs share no part of the axis.
    """
    series_of_runs = []
    for run in runs:
        series = values_of(run, metric, x_key)
        if series.notna().any():
            series_of_runs.append(smooth(series) if is_noisy(metric) else series)
    if not series_of_runs:
        return None
    if len(runs) == 1:
        curve = pd.DataFrame({"line": series_of_runs[0], "low": math.nan, "high": math.nan})
        if metric.startswith("eval/"):
            curve["low"] = values_of(runs[0], f"{metric}_low", x_key)
            curve["high"] = values_of(runs[0], f"{metric}_high", x_key)
        return curve
    table = pd.concat(series_of_runs, axis=1).sort_index()
    table = table.interpolate("index", limit_area="inside").dropna()
    if table.empty:
        raise ValueError(
            f"the runs of a group share no range of {x_key}: draw them over steps (--x step)"
        )
    return pd.DataFrame(
        {"line": table.mean(axis=1), "low": table.min(axis=1), "high": table.max(axis=1)}
    )


def first_and_last(runs, metric, x_key):
    """Return where the curve of a metric begins and where it ends, or None if no run has it.

    A curve of a single point has one value.
    """
    curve = make_curve(runs, metric, x_key)
    if curve is None:
        return None
    line = curve["line"].dropna()
    return summary.first_and_last(line.to_list())


def style_of(i):
    """Return the colour, the marker and the line style of curve i."""
    return {
        "color": COLORS[i % len(COLORS)],
        "marker": MARKERS[i % len(MARKERS)],
        "linestyle": LINESTYLES[i // len(COLORS) % len(LINESTYLES)],
    }


# ---- one panel
# `groups` are the curves of a figure: {label: the runs of which a curve is the mean}.


def draw_panel(ax, groups, panel, axis, labels_groups):
    """Draw the metrics of a panel.

    Args:
        panel: the names of its metrics. If there are several, a colour stands for a metric, and
            otherwise for a group.
        axis: one of AXES.
        labels_groups: whether curves of groups have labels where they end.
    """
    x_key, x_label, x_scale = axis
    ends = {}  # {label of a curve: (its colour, its last value)}
    for i, (group, runs) in enumerate(groups.items()):
        for j, metric in enumerate(panel):
            values = first_and_last(runs, metric, x_key)
            if values is not None:
                style = style_of(i + j)
                draw_curve(ax, runs, metric, axis, style)
                label = label_of(metric) if len(panel) > 1 else group
                ends[label] = style["color"], values[-1]
    metric = panel[0]
    title = title_of(metric)
    unit = unit_of(metric)
    width, height = ax.get_position().size * ax.figure.get_size_inches()
    ax.set_ylabel(wrap(f"{title} ({unit})" if unit else title, height))
    if len(groups) == 1:
        title = f"{title}: {change_in_words(runs, metric, x_key)}"
    ax.set_title(wrap(title, width), loc="left")
    format_y_axis(ax, metric)
    ax.set_xlabel(x_label)
    steps = [1, 2, 2.5, 5, 10]
    ax.xaxis.set_major_locator(MaxNLocator(5, steps=steps, integer=x_key == "step", min_n_ticks=1))
    if x_key == "total_tokens":
        ax.xaxis.set_major_formatter(EngFormatter())
    if len(panel) > 1 or labels_groups:
        label_ends(ax, ends)


def draw_curve(ax, runs, metric, axis, style):
    """Draw a curve with its band. Of a single run, a faint curve shows each iteration too.

    A point between two gaps gets a marker, since no line shows it.
    """
    x_key, _, x_scale = axis
    curve = make_curve(runs, metric, x_key)
    x = curve.index / x_scale
    color = style["color"]
    if len(runs) == 1 and is_noisy(metric):
        raw = values_of(runs[0], metric, x_key)
        ax.plot(raw.index / x_scale, raw, color=color, alpha=0.3, linewidth=0.6)
    ax.fill_between(x, curve["low"], curve["high"], color=color, alpha=0.15, linewidth=0)
    is_point = curve["line"].notna()
    is_isolated = is_point & ~is_point.shift(1, fill_value=False)
    is_isolated &= ~is_point.shift(-1, fill_value=False)
    marked = None if metric.startswith("eval/") else list(np.flatnonzero(is_isolated))
    ax.plot(x, curve["line"], **style, markevery=marked)


def label_ends(ax, ends):
    """Write the label of each curve beside its end, with a line to it, so that all can be read."""
    ax.autoscale_view()  # The limits of the axis must be known.
    to_axes = ax.transData + ax.transAxes.inverted()
    heights = {label: to_axes.transform((0, value))[1] for label, (_, value) in ends.items()}
    labels = sorted(heights, key=heights.get)
    height_of_panel = ax.get_position().height * ax.figure.get_figheight()
    gap = 1.25 * matplotlib.rcParams["font.size"] / 72 / height_of_panel
    pushed_up = dict(heights)
    for lower, upper in itertools.pairwise(labels):
        pushed_up[upper] = max(heights[upper], pushed_up[lower] + gap)
    pushed_down = dict(heights)
    for upper, lower in itertools.pairwise(reversed(labels)):
        pushed_down[lower] = min(heights[lower], pushed_down[upper] - gap)
    middles = {label: (pushed_up[label] + pushed_down[label]) / 2 for label in labels}
    excess = max(0, middles[labels[-1]] - 1)
    for label in labels:
        color = ends[label][0]
        ax.annotate(
            label,
            (1, heights[label]),
            (1.05, middles[label] - excess),
            xycoords="axes fraction",
            color=color,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.6, "relpos": (0, 0.5)},
        )


def format_y_axis(ax, metric):
    """Show shares in percent up to 100%, and values with a spike on a logarithmic scale.

    Differences that are only rounding, as of ratios that are 1, are not drawn as a curve.
    """
    values = np.concatenate([line.get_ydata() for line in ax.lines])
    values = values[np.isfinite(values)]
    has_spike = values.max() > SPIKE * np.median(values)
    if unit_of(metric) == "%":
        bottom, top = ax.get_ylim()
        top = min(max(top, 0.05), 1.03)
        ax.set_ylim(max(bottom, -0.03 * top), top)
        show_percent(ax)
    elif np.ptp(values) < 1e-6 * values.max():
        ax.set_ylim(0.9 * values.max(), 1.1 * values.max())
    elif has_spike and values.max() < 1000 * values.min():
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("")


def show_percent(ax):
    """Label the y axis in percent, without decimals if its labels can be whole numbers."""
    bottom, top = ax.get_ylim()
    ax.yaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10]))
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0 if top - bottom > 0.08 else None))


# ---- pages


def draw_page(groups, panels, grid, axis, title, size=PAGE_SIZE):
    """Draw a figure of panels.

    Up to four curves are labelled where they end, if their labels are short. Otherwise there is a
    legend.

    Args:
        panels: the metrics of each.
        grid: (rows, columns).
        axis: one of AXES.
        size: (width, height) in inches.
    """
    fig = Figure(size, layout="constrained")
    fig.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    fig.suptitle(wrap(title, 0.7 * size[0]))  # Its letters are larger than others.
    labels = list(groups)
    labels_groups = fit_beside_curves(labels, size[0] / grid[1])
    for i, panel in enumerate(panels, 1):
        draw_panel(fig.add_subplot(*grid, i), groups, panel, axis, labels_groups)
    has_legend = len(groups) > 1 and not labels_groups
    add_legend(fig, labels if has_legend else [], caption(groups))
    return fig


def wrap(text, width):
    """Wrap a text to `width` inches, by a rule of thumb."""
    return "\n".join(textwrap.wrap(text, int(width / LETTER_WIDTH)))


def fit_beside_curves(labels, panel_width):
    """Whether these labels fit at the ends of curves, by a rule of thumb. panel_width: inches."""
    longest = LETTER_WIDTH * max(map(len, labels))
    return 1 < len(labels) <= MAX_LABELS and longest < 0.3 * panel_width


def add_legend(fig, labels, caption):
    """Write a caption below the panels and, below it, which curve is which."""
    handles = [Line2D([], [], **style_of(i)) for i in range(len(labels))]
    column_width = LETTER_WIDTH * max(map(len, labels), default=0) + 0.6
    num_columns = max(1, int(fig.get_figwidth() / column_width))
    legend = fig.legend(handles, labels, ncols=num_columns, loc="outside lower center")
    legend.set_title(caption)
    legend.get_title().set(multialignment="center", color="0.4")


def message(groups, metric, x_key):
    """Return the title of a figure: what happens to its first metric."""
    title = title_of(metric)
    if len(groups) == 1:
        ((label, runs),) = groups.items()
        return f"{label}: {title} {change_in_words(runs, metric, x_key)}"
    last_values = {}
    for label, runs in groups.items():
        values = first_and_last(runs, metric, x_key)
        if values is not None:
            last_values[label] = values[-1]
    ranked = sorted(last_values, key=last_values.get, reverse=True)
    numbers = in_words([last_values[label] for label in ranked], metric)
    words = [f"{number} ({label})" for label, number in zip(ranked, numbers, strict=True)]
    if len(words) > MAX_LABELS:
        return f"{title} at the end: from {words[-1]} to {words[0]}"
    return f"{title} at the end: {', '.join(words)}"


def change_in_words(runs, metric, x_key):
    words = in_words(first_and_last(runs, metric, x_key), metric)
    return "\u00a0→\u00a0".join(words)  # The spaces do not break.


def caption(groups):
    """Return what was trained, where that is common to all, and what lines and bands mean."""
    runs = sum(groups.values(), [])
    descriptions = {run.description for run in runs}
    common = f"{descriptions.pop()}\n" if len(descriptions) == 1 else ""
    if len(runs) > len(groups):
        return common + "lines: mean of running medians; bands: from the lowest run to the highest"
    return common + "faint: every iteration; bold: running median; bands: 95% intervals"


def draw_pages(groups, axis):
    """Yield the figures of training_plots.pdf: four large panels, and all other metrics."""
    metrics = find_metrics(sum(groups.values(), []), axis[0])
    panels = arrange_panels(metrics, len(groups) > 1)
    title = message(groups, panels[0][0], axis[0])
    grid = FIRST_PAGE
    while panels:
        num_panels = math.prod(grid)
        yield draw_page(groups, panels[:num_panels], grid, axis, title)
        panels = panels[num_panels:]
        grid = OTHER_PAGES


def draw_metrics(groups, names, axis):
    """Draw the curves of some metrics in one figure.

    Raises:
        ValueError: no log has one of them.
    """
    metrics = find_metrics(sum(groups.values(), []), axis[0])
    panels = [(full_name(name, metrics),) for name in names]
    num_columns = min(2, len(panels))
    num_rows = math.ceil(len(panels) / num_columns)
    size = (5.8 * num_columns, 3.6 * num_rows + 0.6)
    title = message(groups, panels[0][0], axis[0])
    return draw_page(groups, panels, (num_rows, num_columns), axis, title, size)


def draw_single_panels(run, axis):
    """Return the first panels of a run, each as a figure of its own."""
    groups = {run.name: [run]}
    figures = []
    for panel in arrange_panels(find_metrics([run], axis[0]), False)[: len(FIRST_PANELS)]:
        figure = Figure((4.2, 2.8), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
        draw_panel(figure.add_subplot(), groups, panel, axis, False)
        figures.append(figure)
    return figures


# ---- --by


def group_by(runs, flags):
    """Return {values of the flags in words: the runs that share them}, numbers in their order.

    Raises:
        ValueError: a run lacks a flag, or the runs of a group differ in other flags than these. A
            mean over such runs would be that of a run that nobody made.
    """
    runs_of_values = {}
    for run in runs:
        values = tuple(value_of_flag(run, flag) for flag in flags)
        runs_of_values.setdefault(values, []).append(run)
    groups = {}
    for values in sorted(runs_of_values, key=numbers_before_words):
        label = setting_in_words(flags, values)
        groups[label] = runs_of_values[values]
        other_flags = differing_flags(groups[label], flags)
        if other_flags:
            raise ValueError(
                f"--by {' '.join(flags)}: the runs with {label} differ in {', '.join(other_flags)}"
                " too; name such flags as well, or leave runs out"
            )
    return groups


def shorter_runs(groups):
    """Return a line for each group of which some runs end before the others."""
    lines = []
    for label, runs in groups.items():
        ends = [np.nanmax(column(run.rows["train"] + run.rows["eval"], "step")) for run in runs]
        names = [run.name for run, end in zip(runs, ends, strict=True) if end == min(ends)]
        if len(names) < len(runs):
            end = f"{min(ends):g}"
            lines.append(f"note: {label}: the mean ends at step {end} with {', '.join(names)}")
    return lines


def numbers_before_words(values):
    """The key by which such values are sorted."""
    return [(isinstance(value, str), value) for value in values]


def setting_in_words(flags, values):
    words = []
    for flag, value in zip(flags, values, strict=True):
        words.append(f"{flag.replace('_', ' ')} {value_in_words(value)}")
    return ", ".join(words)


def value_in_words(value):
    if isinstance(value, str):
        return value
    return f"{value / 1e6:.3g}M" if value >= 1e6 else f"{value:,g}"


def last_accuracies(runs, flags):
    """Return a table of runs: their values of the flags, and their last accuracy with interval.

    Raises:
        ValueError: a run has no accuracy.
    """
    table = []
    for run in runs:
        rows = read.rows_with_number(run.rows["eval"], "accuracy")
        if not rows:
            raise ValueError(f"{run.path}: not evaluated, or without an accuracy (use --metrics)")
        values = {flag: value_of_flag(run, flag) for flag in flags}
        for key in ("accuracy", "accuracy_low", "accuracy_high"):
            values[key] = read.to_float(rows[-1].get(key))
        table.append(values)
    return pd.DataFrame(table)


def draw_last_accuracies(table, flags):
    """Draw the accuracy of each run at the end against the first flag, with its interval.

    A line joins the means of the runs that share the values of the other flags. Positive numbers
    are places on a logarithmic axis, and other values stand side by side.

    Args:
        table: that of last_accuracies, in the order in which values stand side by side.
    """
    flag, *other_flags = flags
    means = table.groupby(flags)["accuracy"].mean()
    best_setting = means.idxmax() if other_flags else [means.idxmax()]
    words = setting_in_words(flags, best_setting)
    fig = Figure((6.5, 4.3), layout="constrained")
    title = f"Accuracy is highest with {words}: {means.max():.0%}"
    fig.suptitle(wrap(title, 0.7 * fig.get_figwidth()))
    ax = fig.add_subplot(xlabel=flag.replace("_", " "), ylabel="Accuracy at the end (%)")
    places, values = pd.factorize(table[flag])
    ticks = range(len(values))
    if pd.api.types.is_numeric_dtype(values) and values.min() > 0:
        places = table[flag]
        ticks = values
        ax.set_xscale("log")
    ax.set_xticks(ticks, map(value_in_words, values))
    ax.set_xticks([], minor=True)
    table = table.assign(place=places)
    ends = {}  # {label of a line: (its colour, its last mean)}
    lines = table.groupby(other_flags) if other_flags else [((), table)]
    for i, (other_values, rows) in enumerate(lines):
        style = style_of(i)
        accuracies = rows["accuracy"]
        errors = [accuracies - rows["accuracy_low"], rows["accuracy_high"] - accuracies]
        errors = np.clip(errors, 0, None)  # rounding makes an interval end beyond 0% or 100%
        ax.errorbar(rows["place"], accuracies, errors, fmt=".", color=style["color"], alpha=0.4)
        means = accuracies.groupby(rows["place"]).mean()
        ax.plot(means.index, means, **style)
        ends[setting_in_words(other_flags, other_values)] = style["color"], means.iloc[-1]
    show_percent(ax)
    labels = list(ends)
    if fit_beside_curves(labels, fig.get_figwidth()):
        label_ends(ax, ends)
        labels = []
    caption = "dots: runs with 95% intervals; lines: their means"
    add_legend(fig, labels if other_flags else [], caption)
    return fig


# ---- the command


def save(figures, output):
    """Write the figures as PDF, or the first one as PNG. Equal logs give equal bytes.

    The file is written under a temporary name, so that an error leaves an existing file alone.

    Raises:
        OSError: the file cannot be written. The message names it, and not the temporary one.
    """
    temporary = output.with_name(f"{output.stem}.{os.getpid()}.tmp{output.suffix}")
    try:
        if output.suffix == ".png":
            next(iter(figures)).savefig(temporary, metadata={"Software": None})
        else:
            with PdfPages(temporary, metadata={"CreationDate": None}) as pdf:
                for figure in figures:
                    pdf.savefig(figure)
        os.replace(temporary, output)
    except OSError as error:
        raise OSError(
            f"{output}: cannot be written ({error.strerror or error}); name another by --output"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        usage="%(prog)s (--log_dir | --diagnose | --list) RUN [RUN ...] [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = lambda message: parser.exit(2, f"error: {message} (--help lists every flag)\n")
    runs = parser.add_mutually_exclusive_group(required=True)
    runs.add_argument(
        "--log_dir",
        type=os.path.expanduser,  # a shell leaves the ~ in --log_dir=~/run as it is
        nargs="+",
        action="extend",
        metavar="RUN",
        help="directories that hold the logs of a run each",
    )
    runs.add_argument(
        "--diagnose",
        type=os.path.expanduser,
        nargs="+",
        action="extend",
        metavar="RUN",
        help="draw nothing, and say of each of these runs what looks wrong in its logs, why that "
        "matters and what to change (docs/tuning.md)",
    )
    runs.add_argument(
        "--list",
        type=os.path.expanduser,
        metavar="FOLDER",
        help="draw nothing, and print a line for each run in this folder: its last step, reward, "
        "KL (nats per token) and accuracy, and whether it is running",
    )
    parser.add_argument(
        "--output",
        type=lambda path: Path(path).expanduser(),
        metavar="FILE",
        help="the file to write: a PDF, or a PNG of its first page (default: training_plots.pdf in "
        "the run's directory; comparison.pdf beside the first of several runs; metrics.pdf in the "
        "run's directory for --metrics and --by)",
    )
    parser.add_argument(
        "--x",
        choices=AXES,
        default="step",
        help="the x axis of curves. step: iterations, or updates in runs of SFT and expert "
        "iteration. tokens: those sampled or trained on so far. time: minutes (default: step)",
    )
    parser.add_argument(
        "--metrics",
        nargs="+",
        metavar="KEY",
        help="draw only the curves of these keys of the logs. If both logs have a key, accuracies "
        "are those of evaluations and others of training; eval/reward is that of evaluations",
    )
    parser.add_argument(
        "--by",
        nargs="+",
        metavar="FLAG",
        help="average the runs that share the values of these flags of args.json (or of "
        "`parameters`, the model's size), which may differ in their seeds. A band goes from the "
        "lowest run to the highest. Without --metrics, draw the accuracy at the end of training "
        "against the first of these flags, with a line for each value of the others",
    )
    args = parser.parse_args(argv)
    if not args.log_dir and (args.output or args.metrics or args.by):
        parser.error("only --log_dir draws: leave out --output, --metrics and --by")
    if args.output and args.output.suffix not in (".pdf", ".png"):
        parser.error(f"--output {args.output}: its name must end in .pdf or .png")
    return args


def default_output(runs, args):
    """Where plots go without --output. Those of one run alone stay what they are."""
    if len(runs) > 1:
        return runs[0].path.parent / "comparison.pdf"
    name = "metrics.pdf" if args.metrics or args.by else "training_plots.pdf"
    return runs[0].path / name


def plot(runs, args):
    """Write the plots that the flags ask for, and return the lines to print."""
    output = args.output or default_output(runs, args)
    axis = choose_axis(runs, args.x)
    groups = group_by(runs, args.by) if args.by else {run.name: [run] for run in runs}
    lines = []
    if args.metrics:
        save([draw_metrics(groups, args.metrics, axis)], output)
        lines += shorter_runs(groups)
    elif args.by:
        table = last_accuracies(sum(groups.values(), []), args.by)
        save([draw_last_accuracies(table, args.by)], output)
        other_flags = differing_flags(runs, args.by)
        if other_flags:
            lines.append(f"note: the runs differ in {', '.join(other_flags)} too")
        accuracies = table.groupby(args.by)["accuracy"].agg(["mean", "min", "max", "count"])
        lines.append(accuracies.to_string(float_format="{:.1%}".format))
    else:
        save(draw_pages(groups, axis), output)
        comparisons = summary.compare_runs(runs)
        lines += comparisons
        if len(runs) == 1:
            lines += summary.fixed_answer(runs[0])
        for run in runs:
            prefix = f"{run.name}: " if len(runs) > 1 else ""
            lines += [prefix + line for line in summary.accuracy_lines(run)]
        if len(runs) == 1 and not args.output:
            panels = draw_single_panels(runs[0], axis)
            lines.append(f"report: {report.write(runs[0], panels, comparisons)}")
    return [*lines, f"plots: {output}"]


def main(argv=None):
    args = parse_args(argv)
    try:
        if args.list:
            lines = [summary.table_of_runs(args.list)]
        elif args.diagnose:
            runs = read.load_runs(args.diagnose)
            lines = [diagnose.as_text(run.name, diagnose.Logs.of(run)) for run in runs]
        else:
            runs = read.load_runs(args.log_dir)
            with matplotlib.rc_context(STYLE):
                lines = plot(runs, args)
        print("\n".join(lines))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
