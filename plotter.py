"""Plots of finished or running runs, from their log files alone: a dashboard, then a page per metric.

    python plotter.py --log_dir output/run              writes output/run/training_plots.pdf
    python plotter.py --log_dir output/a output/b       overlays the runs and compares them question by question
    python plotter.py --log_dir output/* --by group_size     last accuracy of every run against a flag, and its table
    python plotter.py --log_dir output/* --by group_size --metrics accuracy entropy     these curves, a colour per value

Every number in a log gets a page, so a new metric or reward needs no edit here. Keys that share a prefix before "/" are
a family (rewards/, time/). A null is a gap in the curve; where a line lacks a key, the curve goes on. run_logs.py reads
the logs and does the statistics.
"""

import argparse
import math
import os
import sys
import textwrap
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure  # without pyplot nothing can open a window
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from run_logs import (
    accuracy_lines,
    accuracy_table,
    column,
    compare_runs,
    end_table,
    find_metrics,
    group_by,
    group_label,
    last_accuracies,
    load_runs,
    log_of,
    number,
    p_text,
    reach_table,
    smooth,
)

# Okabe and Ito's colour-blind-safe palette without its yellow, too pale for paper. Markers tell runs apart in grey.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000")
MARKERS, LINESTYLES = "os^Dv*XP", ("-", "--", ":", "-.")
STYLE = {
    "font.size": 8, "axes.titlesize": 9, "legend.fontsize": 7.5, "legend.frameon": False, "legend.handlelength": 1.8,
    "legend.columnspacing": 1.2, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "axes.axisbelow": True, "grid.color": "0.9", "lines.markersize": 3.5, "pdf.fonttype": 42, "text.parse_math": False,
}  # fmt: skip
WIDTH, HEIGHT = 11.69, 8.27  # of the dashboard: A4 landscape, in inches

AXES = {
    "step": ("step", "step"),
    "tokens": ("total_tokens", "tokens, sampled or trained on"),
    "time": ("elapsed", "time"),
}
# The dashboard: title, log, keys (a key that ends in "/" is a whole family). What no run has logged is left out.
PANELS = (
    ("Evaluation accuracy", "eval", ("accuracy", "accuracy_flexible")),
    ("Reward and its parts", "train", ("reward", "rewards/")),
    ("Response length (tokens)", "train", ("response_length", "response_length_correct", "response_length_incorrect")),
    ("Distinct bigrams", "train", ("distinct_2_batch", "distinct_2")),
    ("KL to the reference (nats)", "train", ("kl",)),
    ("Loss", "train", ("loss",)),
    ("Entropy (nats per token)", "train", ("entropy",)),
    ("Gradient norm", "train", ("grad_norm",)),
    ("Learning rate", "train", ("learning_rate",)),
    ("Groups of equal rewards (zero std)", "train", ("zero_std_fraction",)),
    ("Truncated completions", "train", ("truncated_fraction",)),
    ("Time per iteration (s)", "train", ("time/",)),
)
TITLES = {keys[0]: title for title, _, keys in PANELS} | {
    "accuracy": "Accuracy (strict)", "accuracy_flexible": "Accuracy (flexible)", "reward": "Reward"}  # fmt: skip
LABELS = {"accuracy": "strict", "accuracy_flexible": "flexible", "reward": "total", "response_length": "all",
          "response_length_correct": "correct", "response_length_incorrect": "incorrect",
          "distinct_2": "within a text", "distinct_2_batch": "over the batch"}  # fmt: skip


# ---- drawing


def choose_axis(runs, name):
    """(key, label, scale) of the x axis of all curves: x = row[key] / scale."""
    key, label = AXES[name]
    longest = 0.0
    for run in runs:
        for rows in (run.train, run.eval):
            x = column(rows, key)
            if rows and not np.isfinite(x).any():
                raise ValueError(f'{run.path}: a log without "{key}", which --x {name} needs')
            longest = max(longest, np.nanmax(x, initial=0))
    if name != "time":
        return key, label, 1
    unit, scale = ("h", 3600) if longest > 7200 else ("min", 60) if longest > 120 else ("s", 1)
    return key, f"{label} ({unit})", scale


def title_of(key):
    unit = " (s)" * key.startswith("time/") + " (tokens)" * key.startswith("response_length")
    return TITLES.get(key) or key.replace("_", " ").replace("/", ": ").capitalize() + unit


def label_of(key):
    return LABELS.get(key) or key.split("/", 1)[-1].replace("_", " ")


def look(index):
    return {"color": COLORS[index % 7], "marker": MARKERS[index % 8], "linestyle": LINESTYLES[index // 7 % 4]}


def legend_columns(labels, width):
    """As many as fit into `width` inches."""
    fitting = int(width * 72 / STYLE["legend.fontsize"] / (0.55 * max(map(len, labels)) + 4))
    return max(1, min(fitting, len(labels)))


def looks(runs):
    """{group: its colour, marker and line}"""
    return {group: look(i) for i, group in enumerate(dict.fromkeys(run.group for run in runs))}


def new_page(runs, title, size=(8.5, 5.5), flags=()):
    """A figure that says what was trained: in its title, or in its legend where the runs differ in it."""
    fig = Figure(size, layout="constrained")
    fig.get_layout_engine().set(w_pad=0.08, h_pad=0.06)
    same = len({run.about for run in runs}) == 1
    parts = [runs[0].name] * (len(runs) == 1) + [runs[0].about] * (same and runs[0].about != "")
    fig.suptitle("\n".join(textwrap.fill(line, int(9 * size[0])) for line in (": ".join(parts), title) if line))
    if len(runs) > 1:
        about = {run.group: "" if same or flags or not run.about else f": {run.about}" for run in runs}
        labels = [group_label(group) + about[group] for group in looks(runs)]
        handles = [Line2D([], [], **style) for style in looks(runs).values()]
        columns = legend_columns(labels, size[0])
        name = ", ".join(flag.replace("_", " ") for flag in flags)
        fig.legend(handles, labels, ncols=columns, loc="outside lower center", title=name or None)
    return fig


def draw_curves(ax, runs, log, keys, axis):
    """A colour per run, or per key of a single run. Training: raw and smoothed. Evaluation: with its interval."""
    x_key, x_label, x_scale = axis
    styles, crowded = looks(runs), len(runs) > 3  # bands and raw curves of many runs would hide everything
    for run in runs:
        for j, key in enumerate(keys):
            rows = [row for row in getattr(run, log) if key in row and math.isfinite(number(row.get(x_key)))]
            if not rows:
                continue
            x, y = column(rows, x_key) / x_scale, column(rows, key)
            style, label = styles[run.group] if len(runs) > 1 else look(j), label_of(key) if len(keys) > 1 else None
            finite = np.pad(np.isfinite(y), 1)
            alone = np.flatnonzero(finite[1:-1] & ~finite[:-2] & ~finite[2:])  # no line would show these points
            if log == "eval":
                low, high = column(rows, f"{key}_low"), column(rows, f"{key}_high")
                ax.fill_between(x, low, high, color=style["color"], alpha=0.15 * (not crowded), linewidth=0)
                ax.vlines(x[alone], low[alone], high[alone], color=style["color"], linewidth=1)
                ax.plot(x, y, **style, label=label)
            else:
                bold = y if key == "learning_rate" else smooth(y)  # a schedule has no noise to smooth away
                if not crowded:
                    ax.plot(x, y, **style | {"linestyle": "-"}, markevery=alone, alpha=0.3, linewidth=0.6)
                ax.plot(x, bold, **style, markevery=alone, label=label)
    if all(key.startswith(("accuracy", "pass")) or "_fraction" in key for key in keys):  # shares, from 0 to 1
        top = min(max(ax.get_ylim()[1], 0.05), 1.03)
        ax.set_ylim(max(ax.get_ylim()[0], -0.03 * top), top)
        ax.yaxis.set_major_formatter(PercentFormatter(1))
    ax.set_xlabel(x_label)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=x_key == "step", min_n_ticks=1))
    if x_key == "total_tokens":
        ax.xaxis.set_major_formatter(EngFormatter())


def draw_stages(ax, runs, keys):
    """Seconds per iteration as a bar per run, stacked by stage."""
    runs = [run for run in runs if run.train]
    stages = [key for key in keys if key != "time/total"] or keys
    left = np.zeros(len(runs))
    for key, color in zip(stages, matplotlib.colormaps["cividis"](np.linspace(0, 1, len(stages))), strict=True):
        means = np.array([np.nan_to_num(column(run.train, key)).mean() for run in runs])
        ax.barh(range(len(runs)), means, left=left, color=color, edgecolor="white", label=label_of(key))
        left += means
    names = [run.name if len(run.name) < 15 else f"{run.name[:5]}…{run.name[-8:]}" for run in runs]
    ax.set_yticks(range(len(runs)), names, fontsize=min(7, 90 / len(runs)))
    ax.set_ylim(len(runs) - 0.4, -0.6)
    ax.set_xlabel("mean over the run")


def draw_dashboard(runs, metrics, axis):
    families = {key.split("/")[0] for key in metrics["train"] if "/" in key} - {"rewards", "time"}
    panels = []
    for title, log, wanted in (*PANELS, *((name.capitalize(), "train", (f"{name}/",)) for name in sorted(families))):
        keys = [key for want in wanted for key in metrics[log] if want in (key, key.split("/")[0] + "/")]
        if keys and (len(runs) == 1 or wanted == ("time/",)):
            panels.append((title if len(wanted) == 1 or len(keys) > 1 else title_of(keys[0]), log, keys))
        elif log == "eval":  # the colour tells the run, so a panel holds one metric
            panels += [(f"{title_of(key)}, evaluation", log, [key]) for key in keys]
        elif wanted[0] in keys:
            panels.append((title_of(wanted[0]), log, [wanted[0]]))
    panels = panels or [(title_of(key), log, [key]) for log in metrics for key in metrics[log]][:12]
    fig = new_page(runs, "faint: every iteration; bold: running mean; bands: 95 % intervals", (WIDTH, HEIGHT))
    split = np.array_split(np.arange(len(panels)), max(math.ceil(len(panels) / 4), round(0.85 * len(panels) ** 0.5)))
    rows = [[panels[i] for i in part] for part in split]  # a row's panels share its width: no hole for what is absent

    def columns(keys, row):
        return legend_columns([label_of(key) for key in keys], 0.85 * WIDTH / len(row))

    heights = [2 + 0.16 * max(math.ceil(len(keys) / columns(keys, row)) for *_, keys in row) for row in rows]
    strips = fig.subfigures(len(rows), squeeze=False, height_ratios=heights)[:, 0]  # room for the legend's lines
    for row, strip in zip(rows, strips, strict=True):
        for (title, log, keys), ax in zip(row, strip.subplots(1, len(row), squeeze=False)[0], strict=True):
            ax.set_title(title)
            if keys[0].startswith("time/"):
                draw_stages(ax, runs, keys)
            else:
                draw_curves(ax, runs, log, keys, axis)
            if ax.get_legend_handles_labels()[0]:
                ax.legend(loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=4, ncols=columns(keys, row))
    return fig


def draw_metrics(runs, keys, axes, flags):
    """A panel per metric and x axis on one page. ValueError: no such metric."""
    panels = [(key, log_of(runs, key), axis) for axis in axes for key in keys]
    columns = len(keys) if len(keys) > 1 < len(axes) else 2 if len(panels) == 4 else min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    about = "a line per run; training metrics are running means" if len(runs) > 1 else ""
    fig = new_page(runs, about, (max(3.9 * columns, 6), 2.8 * rows + 0.7), flags)
    for ax, (key, log, axis) in zip(fig.subplots(rows, columns, squeeze=False).flat, panels, strict=False):
        ax.set_title(f"{title_of(key)}, evaluation" if log == "eval" else title_of(key))
        draw_curves(ax, runs, log, [key], axis)
    for ax in fig.axes[len(panels) :]:
        ax.remove()
    return fig


def draw_last_accuracies(runs, groups, flags):
    """Strict and flexible accuracy at the end of every run, with their intervals, against the flags; means joined."""
    about = "" if len({run.about for run in runs}) > 1 else f": {runs[0].about}"
    fig = Figure((6.5, 4), layout="constrained")
    ax = fig.add_subplot(title=f"Accuracy at the end of each run{about}")
    values = [group[0] for group in groups]
    is_scale = len(flags) == 1 and not any(isinstance(value, str) for value in values) and min(values) > 0
    places = values if is_scale else range(len(groups))
    for offset, kind in ((0, "strict"), (3, "flexible")):
        style = look(offset // 3)
        between = {"marker": ""} if is_scale else {"marker": "_", "markersize": 40, "linestyle": ""}
        ax.plot(places, [np.mean([row[offset] for row in rows]) for rows in groups.values()], **style | between)
        for place, rows in zip(places, groups.values(), strict=True):
            for i, row in enumerate(rows):  # the runs side by side, or their intervals would hide each other
                shift = 0.03 * (i - (len(rows) - 1) / 2 + (offset - 1.5) / 12)
                x = place * 10**shift if is_scale else place + 3 * shift
                ax.vlines(x, row[offset + 1], row[offset + 2], color=style["color"], alpha=0.4, linewidth=1)
                label = (
                    f"{kind}: each run with its 95 % interval, and the mean" if place == places[0] and not i else None
                )
                ax.plot(x, row[offset], color=style["color"], marker=style["marker"], linestyle="", label=label)
    starts = {run.group: number(row.get("accuracy")) for run in runs for row in run.eval if row["step"] == 0}
    if starts:
        starts = [starts.get(group, math.nan) for group in groups]
        ax.plot(places, starts, color="0.4", linestyle=":", marker="x", label="strict, before training")
    if is_scale:
        ax.set_xscale("log")
    ax.set_xticks(places, [group_label(group) for group in groups])
    ax.set_xticks([], minor=True)
    ax.set_xlabel(", ".join(flag.replace("_", " ") for flag in flags))
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    fig.legend(loc="outside lower center")
    return fig


def draw_comparisons(results):
    """Per comparison a bar to the left of 0 (questions broken) and one to the right (questions fixed)."""
    fig = Figure((WIDTH, 1.5 + 0.5 * len(results)), layout="constrained")
    ax = fig.add_subplot(title="Paired comparison: questions broken (left) and fixed (right), exact McNemar test")
    for y, (_, _, _, fixed, broken, p) in enumerate(results):
        ax.barh([y, y], [-broken, fixed], color=[COLORS[1], COLORS[0]])
        ax.text(-broken, y, f"{broken} ", ha="right", va="center")
        ax.text(fixed, y, f" {fixed}", va="center")
        ax.annotate(p_text(p), (1.01, y), xycoords=("axes fraction", "data"), va="center")
    names = [f"{textwrap.fill(label, 45)}\n{kind}, n = {n}" for label, kind, n, *_ in results]
    ax.set_yticks(range(len(results)), names)
    ax.axvline(0, color="black", linewidth=0.8)
    ax.grid(axis="y", visible=False)
    broken, fixed = (max(result[i] for result in results) for i in (4, 3))
    room = 0.1 * max(broken + fixed, 10)  # for the numbers beside the bars
    ax.set_xlim(-broken - room, fixed + room)
    ax.set_ylim(len(results) - 0.5, -0.5)
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    ax.xaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    ax.set_xlabel("questions")
    return fig


def draw_pages(runs, axis, results):
    """The figures of the PDF: dashboard, paired comparison, evaluation metrics, training metrics."""
    metrics = {log: find_metrics(runs, log) for log in ("eval", "train")}
    if not any(metrics.values()):
        raise ValueError("no number to plot in the logs")
    yield draw_dashboard(runs, metrics, axis)
    if results:
        yield draw_comparisons(results)
    for log, name in (("eval", "evaluation"), ("train", "training")):
        for key in metrics[log]:
            fig = new_page(runs, f"{title_of(key)}, {name}")
            draw_curves(fig.add_subplot(), runs, log, [key], axis)
            yield fig


def save(figures, output):
    """Written under a temporary name, so that an error leaves an existing file alone. Equal logs give equal bytes."""
    temporary = output.with_name(f"{output.stem}.{os.getpid()}.tmp{output.suffix}")
    try:
        if output.suffix == ".png":  # the first page, for a text
            next(iter(figures)).savefig(temporary, dpi=110, metadata={"Software": None})
        else:
            with PdfPages(temporary, metadata={"CreationDate": None}) as pdf:
                for figure in figures:
                    pdf.savefig(figure)
        os.replace(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description="Plot one run or overlay several, from their log files.")
    add = parser.add_argument
    add("--log_dir", nargs="+", action="extend", required=True, help="directories with a run's logs")
    add(
        "--output", type=Path, help="PDF, or PNG of its first page (default: training_plots.pdf in the first directory)"
    )
    add("--x", nargs="+", choices=AXES, default=["step"], help="the x axis of the curves, or several (default: step)")
    add("--metrics", nargs="+", metavar="KEY", help="only the curves of these keys of the logs, on one page")
    add("--by", nargs="+", metavar="FLAG", default=[], help="group the runs by flags of args.json, or by parameters: a "
        "colour per group; without --metrics the accuracies at the end and their table")  # fmt: skip
    add(
        "--reach",
        nargs="+",
        type=float,
        metavar="ACCURACY",
        help="also print when each run first reached it, such as 0.5",
    )
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    output = args.output or Path(args.log_dir[0], "training_plots.pdf")
    try:
        if any(not 0 < accuracy <= 1 for accuracy in args.reach or []):
            raise ValueError("--reach takes shares above 0 and at most 1, such as 0.5")
        runs = group_by(load_runs(args.log_dir), args.by)
        report = []
        with matplotlib.rc_context(STYLE):
            if args.metrics:
                save([draw_metrics(runs, args.metrics, [choose_axis(runs, x) for x in args.x], args.by)], output)
                report = [end_table(runs, args.by, args.metrics)]
            elif args.by:
                groups = last_accuracies(runs)
                save([draw_last_accuracies(runs, groups, args.by)], output)
                report = [accuracy_table(groups, args.by)]
            else:
                results = compare_runs(runs)
                save((page for x in args.x for page in draw_pages(runs, choose_axis(runs, x), results)), output)
                report = [
                    f"{label}, {kind}: {fixed} fixed, {broken} broken of {n} questions, exact McNemar {p_text(p)}"
                    for label, kind, n, fixed, broken, p in results
                ]
                head = (lambda run: f"{run.name}: ") if len(runs) > 1 else lambda run: ""
                report += [head(run) + line for run in runs for line in accuracy_lines(run)]
        if args.reach:
            report.append(reach_table(runs, args.by, args.reach))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(*report, f"plots: {output}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
