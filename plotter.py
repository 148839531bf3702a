"""Plots of finished or running runs, from their log files alone: a dashboard, then a page per metric.

    python plotter.py --log_dir output/run              writes training_plots.pdf and report.html into output/run
    python plotter.py --log_dir output/run --show 10    the worst and best completions of iteration 10, here
    python plotter.py --log_dir output/a output/b       overlays the runs and compares them question by question
    python plotter.py --log_dir output/* --by group_size     last accuracy of every run against a flag, and its table
    python plotter.py --log_dir output/* --by group_size --metrics accuracy entropy     these curves, a colour per value

Every number in a log gets a page, so a new metric or reward needs no edit here. Keys that share a prefix before "/" are
a family (rewards/, judge/). A null is a gap in the curve; where a line lacks a key, the curve goes on. logs/read.py
reads the logs, compares the runs and writes the tables.
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

from logs import read, report
from logs.read import column, group_label

# Okabe and Ito's colour-blind-safe palette without its yellow, too pale for paper. Markers tell runs apart in grey.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000")
MARKERS, LINESTYLES = "os^Dv*XP", ("-", "--", ":", "-.")
STYLE = {
    "font.size": 8, "axes.titlesize": 9, "legend.fontsize": 7.5, "legend.frameon": False, "legend.handlelength": 1.8,
    "legend.columnspacing": 1.2, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "axes.axisbelow": True, "grid.color": "0.9", "lines.markersize": 3.5, "pdf.fonttype": 42, "text.parse_math": False,
}  # fmt: skip

# --x: (key in the logs, label, scale), where x = row[key] / scale
AXES = {
    "step": ("step", "step", 1), "tokens": ("total_tokens", "tokens, sampled or trained on", 1),
    "time": ("elapsed", "time (min)", 60),
}  # fmt: skip
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
    ("Groups of equal rewards (zero std)", "train", ("zero_std_fraction", "zero_std_fraction_trained")),
    ("Truncated completions", "train", ("truncated_fraction",)),
    ("Time per iteration (s)", "train", ("time/total",)),
)
TITLES = {keys[0]: title for title, _, keys in PANELS} | {
    "accuracy": "Accuracy (strict)", "accuracy_flexible": "Accuracy (flexible)", "reward": "Reward"}  # fmt: skip
LABELS = {"accuracy": "strict", "accuracy_flexible": "flexible", "reward": "total", "response_length": "all",
          "response_length_correct": "correct", "response_length_incorrect": "incorrect",
          "distinct_2": "within a text", "distinct_2_batch": "over the batch"}  # fmt: skip


def choose_axis(runs, name):
    """The AXES of that name. ValueError: a log lacks its key."""
    key = AXES[name][0]
    for run in runs:
        for rows in (run.train, run.eval):
            if rows and not np.isfinite(column(rows, key)).any():
                raise ValueError(f'{run.path}: a log without "{key}", which --x {name} needs')
    return AXES[name]


def title_of(key, log="train"):
    unit = " (s)" if key.startswith("time/") else " (tokens)" if key.startswith("response_length") else ""
    title = TITLES.get(key) or key.replace("_", " ").replace("/", ": ").capitalize() + unit
    return f"{title}, evaluation" if log == "eval" else title


def label_of(key):
    return LABELS.get(key) or key.split("/", 1)[-1].replace("_", " ")


def look(i):
    return {"color": COLORS[i % 7], "marker": MARKERS[i % 8], "linestyle": LINESTYLES[i // 7 % 4]}


def legend_columns(labels, width):
    """About as many as fit into `width` inches."""
    return max(1, int(17 * width / (max(map(len, labels)) + 7)))


def new_page(runs, title, size=(8.5, 5.5), flags=()):
    """A figure that says what was trained: in its title, or in its legend where the runs differ in it."""
    fig = Figure(size, layout="constrained")
    fig.get_layout_engine().set(w_pad=0.08, h_pad=0.06)
    about = runs[0].about if len({run.about for run in runs}) == 1 else ""
    trained = ": ".join(filter(None, [runs[0].name if len(runs) == 1 else "", about]))
    fig.suptitle("\n".join(textwrap.fill(line, int(9 * size[0])) for line in (trained, title) if line))
    if len(runs) > 1:
        labels = [group_label(group) for group in read.groups_of(runs)]
        if not about and not flags:
            labels = [f"{run.name}: {run.about}".removesuffix(": ") for run in runs]
        handles = [Line2D([], [], **look(i)) for i in range(len(labels))]
        columns, title = legend_columns(labels, size[0]), ", ".join(flags).replace("_", " ") or None
        fig.legend(handles, labels, ncols=columns, loc="outside lower center", title=title)
    return fig


def draw_curves(ax, runs, log, keys, axis):
    """A colour per run, or per key of a single run. Training: raw and smoothed. Evaluation: with its interval."""
    x_key, x_label, x_scale = axis
    groups, crowded = list(read.groups_of(runs)), len(runs) > 3  # bands and raw curves would hide everything
    for run in runs:
        for i, key in enumerate(keys):
            rows = [row for row in read.with_number(getattr(run, log), x_key) if key in row]
            if not rows:
                continue
            x, y = column(rows, x_key) / x_scale, column(rows, key)
            style = look(groups.index(run.group) if len(runs) > 1 else i)
            label = label_of(key) if len(keys) > 1 else None
            finite = np.pad(np.isfinite(y), 1)
            alone = np.flatnonzero(finite[1:-1] & ~finite[:-2] & ~finite[2:])  # no line would show these points
            if log == "eval":
                low, high = column(rows, f"{key}_low"), column(rows, f"{key}_high")
                ax.fill_between(x, low, high, color=style["color"], alpha=0 if crowded else 0.15, linewidth=0)
                ax.vlines(x[alone], low[alone], high[alone], color=style["color"], linewidth=1)
                ax.plot(x, y, **style, label=label)
                continue
            if not crowded:
                ax.plot(x, y, **style | {"linestyle": "-"}, markevery=alone, alpha=0.3, linewidth=0.6)
            bold = y if key == "learning_rate" else read.smooth(y)  # a schedule has no noise to smooth away
            ax.plot(x, bold, **style, markevery=alone, label=label)
    if all(key.startswith(("accuracy", "pass")) or "_fraction" in key for key in keys):  # shares, from 0 to 1
        top = min(max(ax.get_ylim()[1], 0.05), 1.03)
        ax.set_ylim(max(ax.get_ylim()[0], -0.03 * top), top)
        ax.yaxis.set_major_formatter(PercentFormatter(1))
    ax.set_xlabel(x_label)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=x_key == "step", min_n_ticks=1))
    if x_key == "total_tokens":
        ax.xaxis.set_major_formatter(EngFormatter())


def choose_panels(runs, metrics):
    """[(title, log, keys)] of the dashboard."""
    families = {key.split("/")[0] for key in metrics["train"] if "/" in key} - {"rewards", "time"}
    panels = []
    for title, log, wanted in (*PANELS, *((name.capitalize(), "train", (f"{name}/",)) for name in sorted(families))):
        keys = [key for want in wanted for key in metrics[log] if want in (key, key.split("/")[0] + "/")]
        if len(runs) > 1:  # the colour tells the run, so a panel holds one metric
            panels += [(title_of(key, log), log, [key]) for key in keys if log == "eval" or key == wanted[0]]
        elif keys:
            panels.append((title if len(keys) > 1 else title_of(keys[0]), log, keys))
    return panels or [(title_of(key, log), log, [key]) for log in metrics for key in metrics[log]][:12]


def draw_dashboard(runs, metrics, axis):
    panels, size = choose_panels(runs, metrics), (11.69, 8.27)  # A4 landscape, in inches
    fig = new_page(runs, "faint: every iteration; bold: running mean; bands: 95 % intervals", size)
    rows = max(math.ceil(len(panels) / 4), round(0.85 * math.sqrt(len(panels))))
    columns = math.ceil(len(panels) / rows)
    for i, (title, log, keys) in enumerate(panels, 1):
        ax = fig.add_subplot(rows, columns, i, title=textwrap.fill(title, 140 // columns))
        draw_curves(ax, runs, log, keys, axis)
        if labels := ax.get_legend_handles_labels()[1]:
            ncols = legend_columns(labels, 0.85 * size[0] / columns)
            ax.legend(loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=4, ncols=ncols)
    return fig


def draw_metrics(runs, keys, axes, flags):
    """A panel per metric and x axis on one page. ValueError: no such metric."""
    panels = [(key, read.log_of(runs, key), axis) for axis in axes for key in keys]
    columns = len(keys) if len(keys) > 1 < len(axes) else 2 if len(panels) == 4 else min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    about = "a line per run; training metrics are running means" if len(runs) > 1 else ""
    fig = new_page(runs, about, (max(3.9 * columns, 6), 2.8 * rows + 0.7), flags)
    for i, (key, log, axis) in enumerate(panels, 1):
        draw_curves(fig.add_subplot(rows, columns, i, title=title_of(key, log)), runs, log, [key], axis)
    return fig


def draw_last_accuracies(runs, groups, flags):
    """Strict and flexible accuracy at the end of every run, with their intervals, against the flags; means joined."""
    about = f": {runs[0].about}" if len({run.about for run in runs}) == 1 else ""
    fig = Figure((6.5, 4), layout="constrained")
    ax = fig.add_subplot(title=f"Accuracy at the end of each run{about}", xlabel=", ".join(flags).replace("_", " "))
    values = [group[0] for group in groups]
    is_scale = len(flags) == 1 and not any(isinstance(value, str) for value in values) and min(values) > 0
    places = values if is_scale else range(len(groups))
    for i, (kind, key) in enumerate(read.ACCURACIES.items()):
        style, x = look(i), []
        for place, rows in zip(places, groups.values(), strict=True):  # side by side, or intervals hide each other
            shift = 0.03 * (np.arange(len(rows)) - (len(rows) - 1) / 2 + (i - 0.5) / 4)
            x += list(place * 10**shift if is_scale else place + 3 * shift)
        mean = {"marker": ""} if is_scale else {"marker": "_", "markersize": 40, "linestyle": ""}
        ax.plot(places, [column(rows, key).mean() for rows in groups.values()], **style | mean)
        y, low, high = (column(sum(groups.values(), []), key + end) for end in ("", "_low", "_high"))
        ax.vlines(x, low, high, color=style["color"], alpha=0.4, linewidth=1)
        ax.plot(x, y, **style | {"linestyle": ""}, label=f"{kind}: each run with its 95 % interval, and the mean")
    starts = {run.group: row for run in runs for row in run.eval if row["step"] == 0}
    if starts:
        starts = column([starts.get(group, {}) for group in groups], "accuracy")
        ax.plot(places, starts, color="0.4", linestyle=":", marker="x", label="strict, before training")
    if is_scale:
        ax.set_xscale("log")
    labels = [group_label(group) for group in groups]
    tilt = {"rotation": 20, "ha": "right"} if sum(map(len, labels)) > 80 else {}  # side by side they would overlap
    ax.set_xticks(places, labels, **tilt)
    ax.set_xticks([], minor=True)
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    fig.legend(loc="outside lower center")
    return fig


def draw_pages(runs, axis):
    """The figures of the PDF: dashboard, evaluation metrics, training metrics."""
    metrics = {log: read.find_metrics(runs, log) for log in ("eval", "train")}
    if not any(metrics.values()):
        raise ValueError("no number to plot in the logs")
    yield draw_dashboard(runs, metrics, axis)
    for log, name in (("eval", "evaluation"), ("train", "training")):
        for key in metrics[log]:
            fig = new_page(runs, f"{title_of(key)}, {name}")
            draw_curves(fig.add_subplot(), runs, log, [key], axis)
            yield fig


def save(figures, output):
    """Written under a temporary name, so that an error leaves an existing file alone. Equal logs give equal bytes."""
    temporary = output.with_name(f"{output.stem}.{os.getpid()}.tmp{output.suffix}")
    try:
        if output.suffix == ".png":
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
    parser.error = lambda message: parser.exit(2, f"error: {message} (--help lists every flag)\n")
    add = parser.add_argument
    add("--log_dir", nargs="+", action="extend", required=True, help="directories with a run's logs")
    add("--output", type=Path, help="PDF, or PNG of its first page (default: LOG_DIR/training_plots.pdf)")
    add("--x", nargs="+", choices=AXES, default=["step"], help="the x axis of the curves, or several (default: step)")
    add("--metrics", nargs="+", metavar="KEY", help="only the curves of these keys of the logs, on one page")
    add("--by", nargs="+", metavar="FLAG", default=[], help="group the runs by flags of args.json, or by parameters: a "
        "colour per group; without --metrics the accuracies at the end and their table")  # fmt: skip
    add("--show", nargs="?", type=int, const=-1, metavar="STEP", help="only print the worst and best completions of an "
        "iteration (default: the last)")  # fmt: skip
    add("--reach", nargs="+", type=float, metavar="SHARE", help="also print when each run first had this accuracy")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    try:
        if args.output and args.output.suffix not in (".pdf", ".png"):
            raise ValueError(f"--output {args.output}: its name must end in .pdf or .png")
        if any(not 0 < accuracy <= 1 for accuracy in args.reach or []):
            raise ValueError("--reach takes shares above 0 and at most 1, such as 0.5")
        runs = read.load_runs(args.log_dir)
        if args.show is not None:
            print(*(report.show(run, args.show) for run in runs), sep="\n\n")
            return 0
        output = args.output or runs[0].path / "training_plots.pdf"
        runs = read.group_by(runs, args.by)
        with matplotlib.rc_context(STYLE):
            if args.metrics:
                save([draw_metrics(runs, args.metrics, [choose_axis(runs, x) for x in args.x], args.by)], output)
                lines = [read.end_table(runs, args.by, args.metrics)]
            elif args.by:
                groups = read.last_evaluations(runs)
                save([draw_last_accuracies(runs, groups, args.by)], output)
                lines = [read.accuracy_table(groups, args.by)]
            else:
                save((page for x in args.x for page in draw_pages(runs, choose_axis(runs, x))), output)
                found = read.compare_runs(runs)
                lines = [*found]
                for run in runs:
                    lines += [f"{run.name}: {line}" if len(runs) > 1 else line for line in read.accuracy_lines(run)]
                if len(runs) == 1 and not args.output:
                    dashboard = next(draw_pages(runs, choose_axis(runs, args.x[0])))
                    lines.append(f"report: {report.write(runs[0], dashboard, found)}")
        if args.reach:
            lines.append(read.reach_table(runs, args.by, args.reach))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(*lines, f"plots: {output}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
