"""Draws training runs from their log files alone: a dashboard, then a page per family of metrics.

    python plotter.py --log_dir output/run
        writes training_plots.pdf and report.html into output/run
    python plotter.py --log_dir output/run --show 10
        prints the worst and best completions of iteration 10
    python plotter.py --log_dir output/a output/b
        overlays the runs and compares them question by question
    python plotter.py --log_dir output/* --by group_size
        draws the last accuracy of every run against a flag, and prints its table
    python plotter.py --log_dir output/* --by group_size --metrics accuracy entropy
        draws these curves, with a colour per value of the flag
    python plotter.py --log_dir a b --names names.json --title "B learns faster" --metrics accuracy
        draws a figure for a page: methods have the names and colours of the file
    python plotter.py --diagnose output/run
        says what looks wrong in the logs of a run, why that matters, and what to change

Every number in a log gets a panel, so a new metric or reward needs no edit here. A null is a gap in
the curve. Where a line of the log lacks a key, the curve goes on. logs/read.py reads the logs,
compares the runs and writes the tables.
"""

import argparse
import math
import os
import sys
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure  # without pyplot, nothing can open a window
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from logs import diagnose, read, report
from logs.read import column

# The colour-blind-safe palette of Okabe and Ito, without its yellow, which is too pale for paper.
# In a greyscale print the markers tell runs apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000")
SPARE_COLORS = ("#777777", "#8C564B", "#BCBD22")  # where --names gives all of these to others
MARKERS = "os^Dv*XP"
LINESTYLES = ("-", "--", ":", "-.")
STYLE = {
    "font.size": 8,
    "axes.titlesize": 9,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "legend.columnspacing": 1.2,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "lines.markersize": 3.5,
    "pdf.fonttype": 42,
    "savefig.dpi": 110,
    "text.parse_math": False,
}
# The figures of --metrics and --by stand on pages, and are read on a phone too.
FIGURE_STYLE = STYLE | {
    "font.size": 10,
    "figure.titlesize": 12,
    "axes.titlesize": 11,
    "legend.fontsize": 10,
    "lines.markersize": 4.5,
    "savefig.dpi": 150,
}
MAX_CURVES = 8  # in a panel; more are shared out among several panels
PAGE_WIDTH = 11.69  # inches: A4, landscape
MAX_PANELS = 4  # in a figure of --metrics; with more, nobody sees what it says
FIGURE_WIDTH = 6  # inches: of a figure of --metrics with one panel in a row
WIDE_FIGURE_WIDTH = 6.6  # with two: on a phone its 10 points are as large as a caption


@dataclass(frozen=True)
class Axis:
    """An x axis: a row of a log is drawn at row[key] / scale."""

    key: str
    label: str
    scale: int


@dataclass(frozen=True)
class Panel:
    """What one panel of a page shows."""

    log: str  # "train" or "eval"
    keys: tuple[str, ...]  # the metrics of that log
    axis: Axis


@dataclass(frozen=True)
class Layout:
    """How the panels of a page are arranged."""

    columns: int
    width: float  # of the page, in inches
    panel_height: float  # in inches


@dataclass(frozen=True)
class Curve:
    """One metric of one run, or the mean over several runs. All arrays have a value per point.

    The band of several runs is their range. That of a single run is the interval from KEY_low to
    KEY_high in the log of its evaluations, and is NaN elsewhere.
    """

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray  # the lower end of the band
    high: np.ndarray  # its upper end
    is_single_run: bool


# A value that is so many times the median flattens a curve on a linear axis.
SPIKE = 10
AXES = {  # the choices of --x
    "step": Axis("step", "iteration", 1),  # or "update": see choose_axis
    "tokens": Axis("total_tokens", "tokens, sampled or trained on", 1),
    "time": Axis("elapsed", "time (min)", 60),
}
# The panels of the dashboard. "rewards/" stands for every metric that begins so. Metrics that no
# run has logged are left out.
DASHBOARD = (
    ("accuracy", "accuracy_flexible"),
    ("reward", "rewards/"),
    ("distinct_2_batch", "distinct_2"),
    ("kl",),
    ("loss",),
    ("entropy",),
    ("response_length", "response_length_correct", "response_length_incorrect"),
    ("grad_norm",),
    ("learning_rate",),
    ("zero_std_fraction", "zero_std_fraction_trained"),
    ("truncated_fraction",),
    ("time/total",),
)
# The other pages and how the keys on them begin. A key goes to the first page that fits.
FAMILIES = {
    "Rewards": ("reward", "zero_std", "sampled_prompts"),
    "Levels and subjects": ("accuracy_level/", "accuracy_subject/"),
    "Verdicts and categories": ("accuracy", "pass@", "count/"),
    "Lengths": ("response", "truncated", "sampled_tokens"),
    "Loss, KL, entropy, ratio": ("loss", "kl", "entropy", "ratio", "clip", "sampling_"),
    "Times and memory": ("time/", "memory/"),
    "Gradient and learning rate": ("grad_norm", "learning_rate", "skipped"),
    "Judge and texts": ("judge/", "distinct", "below_floor"),
    "Others": ("",),
}
# The labels of y axes and how the keys with that unit begin. Any other key is its own label.
UNITS = {
    "share": ("accuracy", "pass@", "truncated", "zero_std", "below_floor", "clip", "skipped"),
    "number": ("count/", "judge/"),
    "tokens": ("response_length", "sampled_tokens"),
    "seconds": ("time/",),
    "nats": ("kl", "entropy", "sampling_"),
    "reward": ("reward",),
    "distinct / all word pairs": ("distinct",),
    "policy / old policy": ("ratio",),
    "GB": ("memory/",),
}
TITLES = {  # of panels with one metric, where its key does not say it well
    "accuracy": "Accuracy (strict)",
    "accuracy_flexible": "Accuracy (flexible)",
    "kl": "KL to the reference",
    "kl_per_token": "KL per token",
    "grad_norm": "Gradient norm",
    "truncated_fraction": "Truncated completions",
    "zero_std_fraction": "Groups of equal rewards (zero std)",
    "time/total": "Time per iteration",
    "response_length_correct": "Length of right answers",
    "response_length_incorrect": "Length of wrong answers",
    "distinct_2": "Diversity within a text",
    "distinct_2_batch": "Diversity over the batch",
}
JOINT_TITLES = {  # of panels with several metrics, by the first one
    "accuracy": "Evaluation accuracy",
    "reward": "Reward and its parts",
    "distinct_2_batch": "Diversity",
}
LABELS = {  # in the legends of panels with several metrics
    "accuracy": "strict",
    "accuracy_flexible": "flexible",
    "reward": "total",
    "response_length": "all",
    "response_length_correct": "correct",
    "response_length_incorrect": "incorrect",
    "distinct_2": "within a text",
    "distinct_2_batch": "over the batch",
}


# ---- words and looks


def choose_axis(runs, name):
    """Return the x axis of that name. The label of steps says what they count in these runs.

    Raises:
        ValueError: a log lacks its key.
    """
    axis = AXES[name]
    units = sorted({read.unit_of_step(run) for run in runs})
    if name == "step":
        axis = replace(axis, label=" or ".join(units))
    elif name == "tokens" and units == ["iteration"]:
        axis = replace(axis, label="sampled tokens")
    for run in runs:
        for rows in run.rows.values():
            if rows and not np.isfinite(column(rows, axis.key)).any():
                raise ValueError(f'{run.path}: a log without "{axis.key}", which --x {name} needs')
    return axis


def title_of(keys, log, runs):
    """Return the title of a panel with these metrics."""
    if len(keys) > 1:
        title = JOINT_TITLES.get(keys[0]) or heading(keys[0].split("/")[0])
        suffix = ""
    else:
        title = heading(keys[0])
        suffix = ", evaluation" if log == "eval" else ""
    title = read.adapt_to_stories(title, runs)
    first_letter = title[0].upper()  # STORY_WORDS can begin with a small letter.
    return first_letter + title[1:] + suffix


def heading(name):
    """Return the key of a metric, or the part before its "/", in words."""
    return TITLES.get(name) or name.replace("_", " ").replace("/", ": ").capitalize()


def label_of(key, runs):
    """Return the label of a metric in the legend of its panel."""
    label = LABELS.get(key) or key.split("/", 1)[-1].replace("_", " ")
    return read.adapt_to_stories(label, runs)


def unit_of(key, runs):
    """Return the label of the y axis."""
    for unit, prefixes in UNITS.items():
        if key.startswith(prefixes):
            return unit
    return label_of(key, runs)


def common_description(runs):
    """Return what was trained if that is the same in all runs, else ""."""
    is_common = len({run.description for run in runs}) == 1
    return runs[0].description if is_common else ""


def flags_of_labels(runs, flags):
    """Return the flags whose values the labels of the groups show: none if all are names."""
    return [] if all(run.color for run in runs) else flags


def flags_in_words(flags):
    return ", ".join(flags).replace("_", " ")


def curve_style(i):
    return {
        "color": COLORS[i % len(COLORS)],
        "marker": MARKERS[i % len(MARKERS)],
        "linestyle": LINESTYLES[i // len(COLORS) % len(LINESTYLES)],
    }


def styles_of_groups(runs):
    """Return {group: the style of its curves}.

    A group with a display name has the colour of that name. No other group has it too. Groups of
    one colour differ in their lines.
    """
    first_runs = {group: group_runs[0] for group, group_runs in read.groups_of(runs).items()}
    styles = {group: curve_style(run.color_index) for group, run in first_runs.items()}
    named_colors = {run.color for run in first_runs.values() if run.color}
    if not named_colors:
        return styles
    free_colors = [color for color in COLORS + SPARE_COLORS if color not in named_colors]
    colors = {}
    for group, run in first_runs.items():
        usual_color = styles[group]["color"]
        colors[group] = run.color or (usual_color if usual_color in free_colors else None)
    unused_colors = [color for color in free_colors if color not in colors.values()]
    for group, color in colors.items():
        if color is None:
            colors[group] = (unused_colors or free_colors or SPARE_COLORS)[0]
            unused_colors = unused_colors[1:]
    colors_so_far = []
    for i, (group, color) in enumerate(colors.items()):
        styles[group] = {
            "color": color,
            "marker": MARKERS[i % len(MARKERS)],
            "linestyle": LINESTYLES[colors_so_far.count(color) % len(LINESTYLES)],
        }
        colors_so_far.append(color)
    return styles


def wrap(text, width, font_size):
    """Wrap a text to `width` inches, by a rule of thumb. font_size: in points."""
    return "\n".join(even_lines(text, int(108 * width / font_size)))


def even_lines(text, max_characters):
    """The lines of a text: as few as hold it, and about equally long."""
    num_lines = len(textwrap.wrap(text, max_characters))
    width = max_characters
    while width > 1 and len(textwrap.wrap(text, width - 1)) == num_lines:
        width -= 1
    return textwrap.wrap(text, width)


def legend_columns(labels, width):
    """Return how many columns of a legend fit into `width` inches, by a rule of thumb."""
    longest = max(len(line) for label in labels for line in label.split("\n"))
    characters = 128 * width / matplotlib.rcParams["legend.fontsize"]
    return max(1, int(characters / (longest + 7)))


# ---- one panel


def draw_panel(ax, runs, panel, styles):
    """Draw the metrics of a panel.

    Of a training metric, a faint curve shows every iteration and a bold one the running median. Of
    several runs in a group the mean is drawn, with a band from the least to the greatest; along
    tokens or time, at evenly spread points (see read.pool). Of one run, a band shows the interval
    of an evaluation.

    styles: {group: its style}, or {} if a colour stands for a metric.
    """
    values = []
    for group, group_runs in read.groups_of(runs).items():
        for i, key in enumerate(panel.keys):
            logs = logs_with_key(group_runs, panel, key)
            if not logs:
                continue
            curve = make_curve(logs, panel, key)
            values += [*curve.y, *curve.high]
            style = styles.get(group) or curve_style(i)
            label = label_of(key, runs) if len(panel.keys) > 1 else None
            draw_curve(ax, curve, panel.log, key, style, label)
    finite_values = np.array([value for value in values if np.isfinite(value)])
    format_y_axis(ax, panel.keys[0], finite_values)
    format_x_axis(ax, panel.axis)


def logs_with_key(runs, panel, key):
    """Return for each run the rows that have the key and a place on the x axis, if it has any.

    The rows are in the order of the axis.
    """
    logs = []
    for run in runs:
        rows = read.rows_with_number(run.rows[panel.log], panel.axis.key)
        rows = [row for row in rows if key in row]
        if rows:
            logs.append(sorted(rows, key=lambda row: row[panel.axis.key]))
    return logs


def make_curve(logs, panel, key):
    """Return the curve of a metric in the log of one run, or its mean over the logs of several."""
    if len(logs) > 1:
        x, y, low, high = read.pool(logs, panel.axis.key, key)
    else:
        (rows,) = logs
        x = column(rows, panel.axis.key)
        y = column(rows, key)
        low = high = np.full(len(rows), np.nan)
        # In the log of training, keys such as clip_fraction_low are metrics of their own.
        if panel.log == "eval":
            low = column(rows, f"{key}_low")
            high = column(rows, f"{key}_high")
    return Curve(x / panel.axis.scale, y, low, high, len(logs) == 1)


def draw_curve(ax, curve, log, key, style, label):
    """Draw one curve with its band. A point between two gaps gets a marker, as no line shows it."""
    finite = np.pad(np.isfinite(curve.y), 1)
    isolated = np.flatnonzero(finite[1:-1] & ~finite[:-2] & ~finite[2:])
    color = style["color"]
    ax.fill_between(curve.x, curve.low, curve.high, color=color, alpha=0.15, linewidth=0)
    ax.vlines(
        curve.x[isolated], curve.low[isolated], curve.high[isolated], color=color, linewidth=1
    )
    if log == "train" and curve.is_single_run:
        faint = style | {"linestyle": "-", "alpha": 0.3, "linewidth": 0.6}
        ax.plot(curve.x, curve.y, **faint, markevery=isolated)
    has_no_noise = log == "eval" or key == "learning_rate"
    bold = curve.y if has_no_noise else read.smooth(curve.y)
    marked = isolated if log == "train" else None  # None: every point
    ax.plot(curve.x, bold, **style, markevery=marked, label=label)


def format_y_axis(ax, key, values):
    """Show shares in percent up to 100 %, and values with a spike on a logarithmic scale."""
    if key.startswith(UNITS["share"]):
        bottom, top = ax.get_ylim()
        top = min(max(top, 0.05), 1.03)
        ax.set_ylim(max(bottom, -0.03 * top), top)
        has_wide_ticks = top - ax.get_ylim()[0] > 0.1  # that are whole percents
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0 if has_wide_ticks else None))
    elif len(values) and values.min() > 0 and values.max() > SPIKE * np.median(values):
        ax.set_yscale("log")  # The spike would flatten the curve.
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("")


def format_x_axis(ax, axis):
    ax.set_xlabel(axis.label)
    is_step = axis.key == "step"
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=is_step, min_n_ticks=1))
    if axis.key == "total_tokens":
        ax.xaxis.set_major_formatter(EngFormatter())


# ---- one page of panels


def draw_page(runs, family, panels, layout, flags=(), title=None):
    """Draw a page of panels. A panel of too many curves becomes several that share their y axis.

    The title of the page says what was trained, or its legend does where the runs differ.
    family: the words for these metrics, or "".
    flags: those of --by.
    title: that of --title, in place of the usual one.
    """
    groups = list(read.groups_of(runs).values())
    subplots = split_panels(panels, groups)
    num_rows = math.ceil(len(subplots) / layout.columns)
    fig = Figure((layout.width, layout.panel_height * num_rows + 0.9), layout="constrained")
    fig.get_layout_engine().set(w_pad=0.08, h_pad=0.06)
    set_page_title(fig, title_lines(runs, family, groups, title), layout.width)
    color_by_group = len(runs) > 1 or bool(flags) or runs[0].color
    styles = styles_of_groups(runs) if color_by_group else {}
    if color_by_group:
        add_run_legend(fig, runs, styles, layout, flags)
    first_ax = {}  # {panel: the first of the subplots that it is split into}
    for i, (panel, keys, subplot_runs) in enumerate(subplots, 1):
        panel_title = title_of(panel.keys, panel.log, runs)
        if len(subplot_runs) < len(runs):
            panel_title += f": {subplot_runs[0].label} to {subplot_runs[-1].label}"
        panel_width = layout.width / layout.columns
        ax = fig.add_subplot(
            num_rows,
            layout.columns,
            i,
            title=wrap(panel_title, panel_width, matplotlib.rcParams["axes.titlesize"]),
            ylabel=unit_of(panel.keys[0], runs),
            sharey=first_ax.get(panel),
        )
        first_ax.setdefault(panel, ax)
        draw_panel(ax, subplot_runs, Panel(panel.log, keys, panel.axis), styles)
        labels = ax.get_legend_handles_labels()[1]
        if labels:
            ncols = legend_columns(labels, 0.85 * panel_width)
            ax.legend(loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=4, ncols=ncols)
    return fig


def split_panels(panels, groups):
    """Return (panel, keys, runs) for each subplot: at most MAX_CURVES keys and groups of runs."""
    subplots = []
    for panel in panels:
        for first_key in range(0, len(panel.keys), MAX_CURVES):
            keys = panel.keys[first_key : first_key + MAX_CURVES]
            for first_group in range(0, len(groups), MAX_CURVES):
                runs = sum(groups[first_group : first_group + MAX_CURVES], [])
                subplots.append((panel, keys, runs))
    return subplots


def title_lines(runs, family, groups, title):
    """Return the title of a page: what was trained, the family of metrics, and what lines mean.

    With --title it has no explanation of the lines, since such a figure stands above a caption.

    groups: the runs of each curve.
    """
    if title:
        return [title, family]
    names = [runs[0].name if len(runs) == 1 else "", common_description(runs)]
    caption = "faint: every iteration; bold: running median; bands: 95 % intervals"
    sizes = [len(group_runs) for group_runs in groups]
    if max(sizes) > 1:
        caption = (
            "lines: mean of a group's runs (training: running median of it); "
            "bands: from their least to their greatest"
        )
        if min(sizes) == 1:
            caption += " (of a single run: 95 % interval)"
    return [": ".join(name for name in names if name), family, caption]


def set_page_title(fig, lines, width):
    """Write the lines above the panels, wrapped to `width` inches."""
    title = fig.suptitle("")
    wrapped_lines = [wrap(line, width, title.get_fontsize()) for line in lines if line]
    title.set_text("\n".join(wrapped_lines))


def add_run_legend(fig, runs, styles, layout, flags):
    """Say below the page which colour stands for which group of runs."""
    needs_description = not common_description(runs) and not flags
    labels = []
    handles = []
    for group, group_runs in read.groups_of(runs).items():
        first_run = group_runs[0]
        label = first_run.label
        if needs_description and first_run.description and not first_run.color:
            label += f": {first_run.description}"
        labels.append(wrap(label, layout.width, matplotlib.rcParams["legend.fontsize"]))
        handles.append(Line2D([], [], **styles[group]))
    ncols = legend_columns(labels, layout.width)
    legend = fig.legend(handles, labels, ncols=ncols, loc="outside lower center")
    legend.set_title(flags_in_words(flags) or None)


# ---- the PDF without --by and --metrics


def draw_pages(runs, axis, title=None):
    """Yield the figures of the PDF: the dashboard, and a page per family of metrics.

    title: that of --title.

    Raises:
        ValueError: there is no number in the logs.
    """
    metrics = {log: read.find_metrics(runs, log) for log in ("eval", "train")}
    if not any(metrics.values()):
        raise ValueError("no number to plot in the logs")
    panels = dashboard_panels(metrics, axis, is_overlay=len(runs) > 1)
    yield draw_page(runs, "", panels, Layout(4, PAGE_WIDTH, 2.4), title=title)
    panels_left = single_panels(metrics, ("train", "eval"), axis)
    for family, prefixes in FAMILIES.items():
        panels = [panel for panel in panels_left if panel.keys[0].startswith(prefixes)]
        if panels:
            panels_left = [panel for panel in panels_left if panel not in panels]
            columns = 2 if len(panels) < 5 else 3 if len(panels) < 10 else 4
            layout = Layout(columns, PAGE_WIDTH, 7.2 / columns)
            yield draw_page(runs, family, panels, layout, title=title)


def single_panels(metrics, logs, axis):
    """Return a panel for each metric."""
    panels = []
    for log in logs:
        panels += [Panel(log, (key,), axis) for key in metrics[log]]
    return panels


def dashboard_panels(metrics, axis, is_overlay):
    """Return the panels of the dashboard.

    metrics: {log: its metrics}.
    is_overlay: whether colours tell runs apart, so that a panel can hold only one metric.
    """
    prefixes = {key.split("/")[0] + "/" for key in metrics["train"] if "/" in key}
    new_prefixes = sorted(prefixes - {"rewards/", "time/", "memory/"})
    panels = []
    # An evaluator's metrics, such as "judge/missing", get a panel for each prefix.
    evaluator_panels = [(prefix,) for prefix in new_prefixes]
    for names_of_panel in [*DASHBOARD, *evaluator_panels]:
        log = "eval" if names_of_panel[0] == "accuracy" else "train"
        keys = logged_keys(names_of_panel, metrics[log])
        if is_overlay:
            if log == "train":  # Of several training metrics only the first is drawn.
                keys = [key for key in keys if key == names_of_panel[0]]
            panels += [Panel(log, (key,), axis) for key in keys]
        elif keys:
            panels.append(Panel(log, tuple(keys), axis))
    # Logs that have none of these metrics show their first twelve.
    return panels or single_panels(metrics, ("eval", "train"), axis)[:12]


def logged_keys(names, metrics):
    """Return the metrics with these names.

    A name that ends in "/" stands for all metrics that begin so.
    """
    keys = []
    for name in names:
        if name.endswith("/"):
            keys += [key for key in metrics if key.startswith(name)]
        elif name in metrics:
            keys.append(name)
    return keys


# ---- --metrics and --by


def draw_metrics(runs, keys, axes, flags, title):
    """Draw a panel for each metric and x axis on one page.

    Raises:
        ValueError: no log has the metric, or there are more than MAX_PANELS panels.
    """
    logs = {key: read.log_of(runs, key) for key in keys}
    panels = []
    for axis in axes:
        panels += [Panel(logs[key], (key,), axis) for key in keys]
    groups = list(read.groups_of(runs).values())
    num_panels = len(split_panels(panels, groups))
    if num_panels > MAX_PANELS:
        raise ValueError(
            f"--metrics: this figure has {num_panels} panels, and at most {MAX_PANELS} are legible;"
            f" name fewer metrics or x axes, or fewer runs if a panel has over {MAX_CURVES} curves"
        )
    if num_panels == 1:
        layout = Layout(1, FIGURE_WIDTH, 3.2)
    else:
        layout = Layout(2, WIDE_FIGURE_WIDTH, 3)
    return draw_page(runs, "", panels, layout, flags, title)


def draw_last_accuracies(runs, by, flags, title):
    """Draw both accuracies at the end of every run against the flags, with intervals and means.

    If there is one flag in --by, and its values are positive numbers, the x axis is logarithmic. A
    line then joins the means of runs that differ in nothing else. Otherwise the groups stand side
    by side, and each mean is a dash of its own.

    by: the flags of --by.
    flags: those that group the runs, which are these and the flags that split their groups.
    """
    is_along_numbers = read.has_number_axis(runs, by)
    if is_along_numbers:
        place_of_run = {run.path: read.value_of(run.args, by[0]) for run in runs}
        # From here on a group is what one line shows: runs that differ only in the number.
        runs = read.label_by_names(read.group_by(runs, flags[1:]), flags[1:])
        x_flags = by
    else:
        order = list(read.groups_of(runs))
        place_of_run = {run.path: order.index(run.group) for run in runs}
        x_flags = flags_of_labels(runs, flags)
    fig = Figure((FIGURE_WIDTH, 4.4), layout="constrained")
    usual_title = f"{read.adapt_to_stories('Accuracy', runs)} at the end of each run"
    lines = [title] if title else [usual_title, common_description(runs)]
    set_page_title(fig, lines, FIGURE_WIDTH)
    ylabel = read.adapt_to_stories("Accuracy", runs).lower()
    ax = fig.add_subplot(xlabel=flags_in_words(x_flags), ylabel=ylabel)
    styles = styles_of_groups(runs)
    for group, group_runs in read.groups_of(runs).items():
        runs_at = {}  # {x: runs}, in the order of x
        for run in sorted(group_runs, key=lambda run: place_of_run[run.path]):
            runs_at.setdefault(place_of_run[run.path], []).append(run)
        draw_last_accuracies_of_group(ax, runs_at, styles[group], is_along_numbers)
        draw_first_accuracies(ax, runs_at)
    if is_along_numbers:
        ax.set_xscale("log")
        numbers = sorted(set(place_of_run.values()))
        label_positions(ax, numbers, [read.in_words(by[0], x, numbers) for x in numbers])
    else:
        labels = [group_runs[0].label for group_runs in read.groups_of(runs).values()]
        label_positions(ax, range(len(labels)), labels)
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    has_several_lines = is_along_numbers and len(styles) > 1
    legend = add_accuracy_legend(fig, ax, runs, styles if has_several_lines else {})
    if has_several_lines:
        legend.set_title(flags_in_words(flags[1:]))
    return fig


def draw_last_accuracies_of_group(ax, runs_at, style, is_along_numbers):
    """Draw each run with its interval, and the means, of the runs of one colour.

    runs_at: {x: runs}, in the order of x.
    """
    for i, key in enumerate(read.ACCURACIES.values()):
        style = style | accuracy_style(key)
        mean_style = {"marker": ""}
        if not is_along_numbers:
            mean_style = {"marker": "_", "markersize": 40, "linestyle": ""}
        means = []
        for x, runs in runs_at.items():
            rows = sum(read.last_evaluations(runs).values(), [])
            accuracies = column(rows, key)
            means.append(accuracies.mean())
            offset = (i - 0.5) / 4  # strict to the left, flexible to the right
            places = spread_out(x, len(rows), offset, is_along_numbers)
            low = column(rows, f"{key}_low")
            high = column(rows, f"{key}_high")
            ax.vlines(places, low, high, color=style["color"], alpha=0.4, linewidth=1)
            ax.plot(places, accuracies, **(style | {"linestyle": ""}))
        ax.plot(list(runs_at), means, **(style | mean_style))


def accuracy_style(key):
    """Return how the strict or the flexible accuracy looks in every colour."""
    if key == read.ACCURACIES["strict"]:
        return {"linestyle": "-", "fillstyle": "full"}
    return {"linestyle": "--", "fillstyle": "none"}


def add_accuracy_legend(fig, ax, runs, styles):
    """Say below the figure what lines and points mean, and return the legend.

    styles: {group: its style}, for the groups whose label no axis shows.
    """
    handles = []
    labels = []
    for group, group_runs in read.groups_of(runs).items():
        if group in styles:
            handles.append(Line2D([], [], **styles[group]))
            labels.append(group_runs[0].label)
    for kind, key in read.ACCURACIES.items():
        style = {"color": "0.2", "marker": "o"} | accuracy_style(key)
        handles.append(Line2D([], [], **style))
        words = read.adapt_to_stories(kind, runs)
        labels.append(f"{words}: each run with its 95 % interval, and the mean")
    first_handles, first_labels = ax.get_legend_handles_labels()
    handles += first_handles[:1]
    labels += first_labels[:1]
    font_size = matplotlib.rcParams["legend.fontsize"]
    labels = [wrap(label, 0.9 * FIGURE_WIDTH, font_size) for label in labels]
    return fig.legend(handles, labels, loc="outside lower center")


def spread_out(position, num_runs, offset, is_log_scale):
    """Return the x positions of a group's runs, side by side, so that no interval hides another.

    offset: moves all of them, in units of the distance between two runs.
    """
    shifts = 0.03 * (np.arange(num_runs) - (num_runs - 1) / 2 + offset)
    if is_log_scale:
        return list(position * 10**shifts)
    return list(position + 3 * shifts)


def draw_first_accuracies(ax, runs_at):
    """Draw the strict accuracy before training, where a run was evaluated then.

    runs_at: {x: runs}, in the order of x.
    """
    first_rows = {}  # {x: the row of step 0 of a run}
    for x, runs in runs_at.items():
        for run in runs:
            for row in run.rows["eval"]:
                if row["step"] == 0:
                    first_rows[x] = row
    if first_rows:
        rows = [first_rows.get(x, {}) for x in runs_at]
        all_runs = sum(runs_at.values(), [])
        label = f"{read.adapt_to_stories('strict', all_runs)}, before training"
        style = {"color": "0.4", "linestyle": ":", "marker": "x"}
        ax.plot(list(runs_at), column(rows, "accuracy"), **style, label=label)


def label_positions(ax, positions, labels):
    """Write the labels below their positions."""
    labels = [textwrap.fill(label, 40) for label in labels]
    would_overlap = sum(map(len, labels)) > 56
    tilt = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if would_overlap else {}
    ax.set_xticks(list(positions), labels, **tilt)
    ax.set_xticks([], minor=True)


# ---- the command


def save(figures, output, dpi=None):
    """Write the figures as PDF, or the first one as PNG. Equal logs give equal bytes.

    dpi: of a PNG; None: that of the style.

    The file is written under a temporary name, so that an error leaves an existing file alone.

    Raises:
        OSError: the file cannot be written. The message names it, and not the temporary one.
    """
    temporary = output.with_name(f"{output.stem}.{os.getpid()}.tmp{output.suffix}")
    try:
        if output.suffix == ".png":
            next(iter(figures)).savefig(temporary, dpi=dpi, metadata={"Software": None})
        else:
            with PdfPages(temporary, metadata={"CreationDate": None}) as pdf:
                for figure in figures:
                    pdf.savefig(figure)
        os.replace(temporary, output)
    except OSError as error:
        raise OSError(f"{output}: cannot be written ({error.strerror or error})") from error
    finally:
        temporary.unlink(missing_ok=True)


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description="Plot one training run or overlay several, from their log files."
    )
    parser.error = lambda message: parser.exit(2, f"error: {message} (--help lists every flag)\n")
    add = parser.add_argument
    runs = parser.add_mutually_exclusive_group(required=True)
    runs.add_argument(
        "--log_dir",
        nargs="+",
        action="extend",
        metavar="RUN",
        help="directories that hold the logs of a run each",
    )
    runs.add_argument(
        "--diagnose",
        nargs="+",
        action="extend",
        metavar="RUN",
        help="draw nothing, and say of each of these runs what looks wrong in its logs, why that "
        "matters and what to change (docs/tuning.md)",
    )
    add(
        "--output",
        type=Path,
        help="the file to write: a PDF, or a PNG of its first page "
        "(default: training_plots.pdf in the first run's directory)",
    )
    add(
        "--x",
        nargs="+",
        choices=AXES,
        default=["step"],
        help="one or several x axes for the curves. step: the number of the iteration, or of the "
        "update in runs of sft.py and expert_iteration.py (`step` in the logs). tokens: the tokens "
        "that were sampled or trained on. time: minutes since the start (default: step)",
    )
    add(
        "--metrics",
        nargs="+",
        metavar="KEY",
        help="draw only the curves of these keys of the logs, in one figure of at most "
        f"{MAX_PANELS} panels: one for each metric and x axis",
    )
    add(
        "--by",
        nargs="+",
        metavar="FLAG",
        default=[],
        help="group the runs by these flags, with a colour per group. FLAG is a flag in "
        "args.json, or `parameters` (the model's number of parameters), or `arm` (the directory's "
        "name without learning rate and seed). Groups whose runs differ in further flags that "
        "matter are split by these too. Without --metrics, draw the accuracies at the end of the "
        "runs and print their table. Against a flag of numbers, a line then joins only runs that "
        "differ in nothing else",
    )
    add(
        "--names",
        type=Path,
        metavar="FILE",
        help='a JSON file {"STUDY/ARM": [display name, colour]}, with colours such as "#0072B2". '
        "The runs in STUDY/ARM_seedN and STUDY/ARM_rateX_seedN get this name and colour in every "
        "figure. An entry of STUDY/ARM_rateX goes before one of STUDY/ARM. Without --by, the runs "
        "of one name are a group, and where their learning rates differ they are a group for each "
        "rate. Runs without an entry keep their label and stay alone",
    )
    add(
        "--title",
        metavar="TEXT",
        help="the message of the figure, in place of its usual title and of the words that explain "
        "its lines",
    )
    add(
        "--show",
        nargs="?",
        type=int,
        const=-1,
        metavar="STEP",
        help="only print the worst and best completions of this iteration, and in a terminal with "
        "colours what its updates did to each token of some (default: the last one)",
    )
    args = parser.parse_args(argv)
    flags_of_figures = (args.output, args.metrics, args.by, args.names, args.title)
    if args.diagnose and (any(flags_of_figures) or args.show is not None):
        parser.error(
            "--diagnose draws nothing: leave out --output, --metrics, --by, --names, --title and "
            "--show"
        )
    return args


def main(argv=None):
    args = parse_args(argv)
    try:
        if args.output:
            check_output(args.output)
        names = read.load_names(args.names) if args.names else {}
        runs = read.name_runs(read.load_runs(args.diagnose or args.log_dir), names)
        if args.diagnose:
            print("\n".join(diagnosis_of(run) for run in runs))
        elif args.show is not None:
            in_color = report.can_color(sys.stdout)
            print("\n\n".join(report.show(run, args.show, in_color) for run in runs))
        else:
            with matplotlib.rc_context(STYLE):
                print("\n".join(plot(runs, args)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def check_output(output):
    """Raise ValueError, before any log is read, for a file that cannot be written."""
    if output.suffix not in (".pdf", ".png"):
        raise ValueError(f"--output {output}: its name must end in .pdf or .png")
    if not output.parent.is_dir():
        raise ValueError(f"--output {output}: there is no folder {output.parent}; make it first")
    if output.is_dir():
        raise ValueError(f"--output {output}: this is a folder; name a file")


def diagnosis_of(run):
    logs = diagnose.Logs(run.rows["train"], run.rows["eval"], run.args)
    return diagnose.report(run.name, logs)


def plot(runs, args):
    """Write the plots that the flags ask for, and return the lines to print."""
    output = args.output or runs[0].path / "training_plots.pdf"
    flags = []
    if args.by:
        has_lines_along_flag = not args.metrics and read.has_number_axis(runs, args.by)
        flags = read.flags_of_groups(runs, args.by, joined=has_lines_along_flag)
        runs = read.label_by_names(read.group_by(runs, flags), flags)
    elif args.names:
        runs = read.group_by_name(runs)
    label_flags = flags_of_labels(runs, flags)
    if args.metrics:
        axes = [choose_axis(runs, x) for x in args.x]
        with matplotlib.rc_context(FIGURE_STYLE):
            save([draw_metrics(runs, args.metrics, axes, label_flags, args.title)], output)
        lines = [read.end_table(runs, label_flags, args.metrics)]
    elif args.by:
        with matplotlib.rc_context(FIGURE_STYLE):
            save([draw_last_accuracies(runs, args.by, flags, args.title)], output)
        lines = [read.end_table(runs, label_flags, read.ACCURACIES.values())]
    else:
        save(pages_of_axes(runs, args), output)
        lines = compare_and_report(runs, args)
    return [*lines, f"plots: {output}"]


def pages_of_axes(runs, args):
    """Yield all pages for one x axis after the other."""
    for name in args.x:
        yield from draw_pages(runs, choose_axis(runs, name), args.title)


def compare_and_report(runs, args):
    """Return the comparisons and accuracies, and write report.html for one run without --output."""
    comparisons = read.compare_runs(runs)
    lines = list(comparisons)
    for run in runs:
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        lines += [prefix + line for line in read.accuracy_lines(run)]
    if len(runs) == 1 and not args.output:
        dashboard = next(draw_pages(runs, choose_axis(runs, args.x[0])))
        lines.append(f"report: {report.write(runs[0], dashboard, comparisons)}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
