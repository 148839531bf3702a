"""Plots of finished or running runs, from their log files alone: a dashboard, then a page per family of metrics.

    python plotter.py --log_dir output/run              writes training_plots.pdf and report.html into output/run
    python plotter.py --log_dir output/run --show 10    the worst and best completions of iteration 10, here
    python plotter.py --log_dir output/a output/b       overlays the runs and compares them question by question
    python plotter.py --log_dir output/* --by group_size     last accuracy of every run against a flag, and its table
    python plotter.py --log_dir output/* --by group_size --metrics accuracy entropy     these curves, a colour per value

Every number in a log gets a panel: a new metric or reward needs no edit here. A null is a gap in the curve; where a
line lacks a key, the curve goes on. logs/read.py reads the logs, compares the runs and writes the tables.
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
from logs.read import column

# Okabe and Ito's colour-blind-safe palette without its yellow, too pale for paper. Markers tell runs apart in grey.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000")
MARKERS, LINESTYLES = "os^Dv*XP", ("-", "--", ":", "-.")
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
    "text.parse_math": False,
}

# --x: (key in the logs, label, scale), where x = row[key] / scale
AXES = {
    "step": ("step", "step", 1),
    "tokens": ("total_tokens", "tokens, sampled or trained on", 1),
    "time": ("elapsed", "time (min)", 60),
}
# The dashboard: the keys of each panel ("reward/" is a whole family). What no run has logged is left out.
PANELS = (
    "accuracy accuracy_flexible",
    "reward rewards/",
    "distinct_2_batch distinct_2",
    "kl",
    "loss",
    "entropy",
    "response_length response_length_correct response_length_incorrect",
    "grad_norm",
    "learning_rate",
    "zero_std_fraction zero_std_fraction_trained",
    "truncated_fraction",
    "time/total",
)
# The other pages: how the keys of a family begin. A key goes to the first that fits.
FAMILIES = {
    "Rewards": ("reward", "zero_std", "sampled_p"),
    "Levels and subjects": ("accuracy_level/", "accuracy_subject/"),
    "Verdicts and categories": ("accuracy", "pass@", "count/"),
    "Lengths": ("response", "truncated", "sampled_t"),
    "Loss, KL, entropy, ratio": ("loss", "kl", "entropy", "ratio", "clip", "sampling_"),
    "Times and memory": ("time/", "memory/"),
    "Gradient and learning rate": ("grad_norm", "learning_rate", "skipped"),
    "Judge and texts": ("judge/", "distinct", "below_floor"),
    "Others": ("",),
}
UNITS = {  # of a y axis: how the keys begin; any other key is its own
    "share": ("accuracy", "pass@", "truncated", "zero_std", "below_floor", "clip", "skipped"),
    "number": ("count/", "judge/"),
    "tokens": ("response_length", "sampled_t"),
    "seconds": ("time/",),
    "nats": ("kl", "entropy", "sampling_"),
    "reward": ("reward",),
    "distinct / all bigrams": ("distinct",),
    "policy / old policy": ("ratio",),
    "GB": ("memory/",),
}
TITLES = {
    "accuracy": "Accuracy (strict)",
    "accuracy_flexible": "Accuracy (flexible)",
    "kl": "KL to the reference",
    "kl_per_token": "KL per token",
    "grad_norm": "Gradient norm",
    "truncated_fraction": "Truncated completions",
    "zero_std_fraction": "Groups of equal rewards (zero std)",
    "time/total": "Time per iteration",
}
TOGETHER = {
    "accuracy": "Evaluation accuracy",
    "reward": "Reward and its parts",
    "distinct_2_batch": "Distinct bigrams",
}
LABELS = {
    "accuracy": "strict",
    "accuracy_flexible": "flexible",
    "reward": "total",
    "response_length": "all",
    "response_length_correct": "correct",
    "response_length_incorrect": "incorrect",
    "distinct_2": "within a text",
    "distinct_2_batch": "over the batch",
}
MOST = 8  # curves in a panel; more are shared out among several


def choose_axis(runs, name):
    """The AXES of that name. ValueError: a log lacks its key."""
    key = AXES[name][0]
    for run in runs:
        for rows in (run.train, run.eval):
            if rows and not np.isfinite(column(rows, key)).any():
                raise ValueError(f'{run.path}: a log without "{key}", which --x {name} needs')
    return AXES[name]


def title_of(keys, log, runs):
    if len(keys) > 1:
        return read.said(
            TOGETHER.get(keys[0]) or title_of([keys[0].split("/")[0]], "train", runs), runs
        )
    title = read.said(
        TITLES.get(keys[0]) or keys[0].replace("_", " ").replace("/", ": ").capitalize(), runs
    )
    return title[0].upper() + title[1:] + (", evaluation" if log == "eval" else "")


def label_of(key, runs):
    return read.said(LABELS.get(key) or key.split("/", 1)[-1].replace("_", " "), runs)


def look(i):
    return {"color": COLORS[i % 7], "marker": MARKERS[i % 8], "linestyle": LINESTYLES[i // 7 % 4]}


def legend_columns(labels, width):
    """About as many as fit into `width` inches."""
    return max(1, int(17 * width / (max(map(len, labels)) + 7)))


def draw_curves(ax, runs, log, keys, axis, shared):
    """A colour per group of runs, or per key of a single run: every iteration and, bold, the running mean.

    Of several runs in a group the mean, and a band from the least to the greatest. Evaluation: with its interval.
    """
    (x_key, x_label, x_scale), values = axis, []
    for same in read.groups_of(runs).values():
        for i, key in enumerate(keys):
            logs = [
                [row for row in read.with_number(getattr(run, log), x_key) if key in row]
                for run in same
            ]
            if not (logs := list(filter(None, logs))):
                continue
            style = look(same[0].place if shared else i)
            (x, _, _), (y, low, high) = read.pool(logs, x_key, key)
            if len(logs) == 1:
                low, high = (column(logs[0], key + end) for end in ("_low", "_high"))
            values += [*y, *high]
            x /= x_scale
            finite = np.pad(np.isfinite(y), 1)
            alone = np.flatnonzero(
                finite[1:-1] & ~finite[:-2] & ~finite[2:]
            )  # no line would show these points
            ax.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
            ax.vlines(x[alone], low[alone], high[alone], color=style["color"], linewidth=1)
            if log == "train" and len(logs) == 1:
                ax.plot(
                    x, y, **style | {"linestyle": "-"}, markevery=alone, alpha=0.3, linewidth=0.6
                )
            bold = (
                y if log == "eval" or key == "learning_rate" else read.smooth(y)
            )  # what has no noise to smooth away
            marked, label = (
                alone if log == "train" else None,
                label_of(key, runs) if len(keys) > 1 else None,
            )
            ax.plot(x, bold, **style, markevery=marked, label=label)
    values = np.array([value for value in values if np.isfinite(value)])
    if keys[0].startswith(UNITS["share"]):
        top = min(max(ax.get_ylim()[1], 0.05), 1.03)
        ax.set_ylim(max(ax.get_ylim()[0], -0.03 * top), top)
        ax.yaxis.set_major_formatter(PercentFormatter(1))
    elif len(values) and values.min() > 0 and values.max() > 50 * np.median(values):
        ax.set_yscale("log")  # a spike would flatten the rest
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("")
    ax.set_xlabel(x_label)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=x_key == "step", min_n_ticks=1))
    if x_key == "total_tokens":
        ax.xaxis.set_major_formatter(EngFormatter())


def choose_panels(runs, metrics):
    """[(log, keys)] of the dashboard."""
    families, panels = (
        {key.split("/")[0] for key in metrics["train"] if "/" in key}
        - {"rewards", "time", "memory"},
        [],
    )
    for wanted in map(str.split, (*PANELS, *(f"{name}/" for name in sorted(families)))):
        log = "eval" if wanted[0] == "accuracy" else "train"
        keys = [
            key for want in wanted for key in metrics[log] if want in (key, key.split("/")[0] + "/")
        ]
        if len(runs) > 1:  # the colour tells the run, so a panel holds one metric
            panels += [(log, [key]) for key in keys if log == "eval" or key == wanted[0]]
        elif keys:
            panels.append((log, keys))
    return panels or [(log, [key]) for log in metrics for key in metrics[log]][:12]


def draw_page(runs, title, panels, columns, width, height, flags=()):
    """A page of panels (log, keys, axis), that says what was trained: in its title, or where runs differ in its legend.

    A panel of too many curves becomes several that share their y axis.
    """
    groups, first = list(read.groups_of(runs).values()), {}
    parts = [
        (*panel, panel[1][k : k + MOST], sum(groups[g : g + MOST], []))
        for panel in panels
        for k in range(0, len(panel[1]), MOST)
        for g in range(0, len(groups), MOST)
    ]
    rows = math.ceil(len(parts) / columns)
    fig = Figure((width, height * rows + 0.9), layout="constrained")
    fig.get_layout_engine().set(w_pad=0.08, h_pad=0.06)
    about = runs[0].about if len({run.about for run in runs}) == 1 else ""
    caption = "faint: every iteration; bold: running mean; bands: 95 % intervals"
    if len(groups) < len(runs):
        caption = "lines: mean of a group's runs (training: running mean); bands: from their least to their greatest"
    lines = ": ".join(filter(None, [runs[0].name if len(runs) == 1 else "", about])), title, caption
    fig.suptitle("\n".join(textwrap.fill(line, int(11 * width)) for line in lines if line))
    if len(runs) > 1 or flags:
        labels = [
            f"{same[0].label}: {'' if about or flags else same[0].about}".removesuffix(": ")
            for same in groups
        ]
        labels = [textwrap.fill(label, int(13 * width)) for label in labels]
        handles = [Line2D([], [], **look(same[0].place)) for same in groups]
        legend = fig.legend(
            handles, labels, ncols=legend_columns(labels, width), loc="outside lower center"
        )
        legend.set_title(", ".join(flags).replace("_", " ") or None)
    for i, (log, keys, axis, part, same) in enumerate(parts, 1):
        units = [unit for unit, starts in UNITS.items() if keys[0].startswith(starts)] or [
            label_of(keys[0], runs)
        ]
        which = f": {same[0].label} to {same[-1].label}" if len(same) < len(runs) else ""
        title, panel = (
            textwrap.fill(title_of(keys, log, runs) + which, int(12 * width / columns)),
            (*keys, log, axis),
        )
        ax = fig.add_subplot(
            rows, columns, i, title=title, ylabel=units[0], sharey=first.get(panel)
        )
        first.setdefault(panel, ax)
        draw_curves(ax, same, log, part, axis, len(runs) > 1 or flags)
        if labels := ax.get_legend_handles_labels()[1]:
            ncols = legend_columns(labels, 0.85 * width / columns)
            ax.legend(loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=4, ncols=ncols)
    return fig


def draw_metrics(runs, keys, axes, flags):
    """A panel per metric and x axis on one page. ValueError: no such metric."""
    logs = {key: read.log_of(runs, key) for key in keys}
    panels = [(logs[key], [key], axis) for axis in axes for key in keys]
    columns = (
        len(keys) if len(keys) > 1 < len(axes) else 2 if len(panels) == 4 else min(len(panels), 3)
    )
    return draw_page(runs, "", panels, columns, max(3.9 * columns, 6), 2.8, flags)


def draw_last_accuracies(runs, flags):
    """Strict and flexible accuracy at the end of every run, with their intervals, against the flags; means joined."""
    groups = read.last_evaluations(runs)
    about = f": {runs[0].about}" if len({run.about for run in runs}) == 1 else ""
    fig = Figure((6.5, 4), layout="constrained")
    title, x_label = (
        f"{read.said('Accuracy', runs)} at the end of each run{about}",
        ", ".join(flags).replace("_", " "),
    )
    ax = fig.add_subplot(title=title, xlabel=x_label, ylabel="share")
    values = [group[0] for group in groups]
    is_scale = (
        len(flags) == 1 and not any(isinstance(value, str) for value in values) and min(values) > 0
    )
    places = values if is_scale else range(len(groups))
    for i, (kind, key) in enumerate(read.ACCURACIES.items()):
        style, x = look(i), []
        for place, rows in zip(
            places, groups.values(), strict=True
        ):  # side by side, or intervals hide each other
            shift = 0.03 * (np.arange(len(rows)) - (len(rows) - 1) / 2 + (i - 0.5) / 4)
            x += list(place * 10**shift if is_scale else place + 3 * shift)
        mean = {"marker": ""} if is_scale else {"marker": "_", "markersize": 40, "linestyle": ""}
        ax.plot(places, [column(rows, key).mean() for rows in groups.values()], **style | mean)
        y, low, high = (
            column(sum(groups.values(), []), key + end) for end in ("", "_low", "_high")
        )
        ax.vlines(x, low, high, color=style["color"], alpha=0.4, linewidth=1)
        label = f"{read.said(kind, runs)}: each run with its 95 % interval, and the mean"
        ax.plot(x, y, **style | {"linestyle": ""}, label=label)
    starts = {run.group: row for run in runs for row in run.eval if row["step"] == 0}
    if starts:
        starts = column([starts.get(group, {}) for group in groups], "accuracy")
        label = f"{read.said('strict', runs)}, before training"
        ax.plot(places, starts, color="0.4", linestyle=":", marker="x", label=label)
    if is_scale:
        ax.set_xscale("log")
    labels = [textwrap.fill(same[0].label, 30) for same in read.groups_of(runs).values()]
    tilt = (
        {"rotation": 20, "ha": "right"} if sum(map(len, labels)) > 80 else {}
    )  # side by side they would overlap
    ax.set_xticks(places, labels, **tilt)
    ax.set_xticks([], minor=True)
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    fig.legend(loc="outside lower center")
    return fig


def draw_pages(runs, axis):
    """The figures of the PDF: the dashboard, and a page per family of metrics."""
    metrics = {log: read.find_metrics(runs, log) for log in ("eval", "train")}
    if not any(metrics.values()):
        raise ValueError("no number to plot in the logs")
    yield draw_page(
        runs, "", [(*panel, axis) for panel in choose_panels(runs, metrics)], 4, 11.69, 2.4
    )
    left = [(log, [key], axis) for log in ("train", "eval") for key in metrics[log]]
    for family, starts in FAMILIES.items():
        if panels := [panel for panel in left if panel[1][0].startswith(starts)]:
            left = [panel for panel in left if panel not in panels]
            columns = 2 if len(panels) < 5 else 3 if len(panels) < 10 else 4
            yield draw_page(runs, family, panels, columns, 11.69, 7.2 / columns)


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
    parser = argparse.ArgumentParser(
        description="Plot one run or overlay several, from their log files."
    )
    parser.error = lambda message: parser.exit(2, f"error: {message} (--help lists every flag)\n")
    add = parser.add_argument
    add(
        "--log_dir", nargs="+", action="extend", required=True, help="directories with a run's logs"
    )
    add(
        "--output",
        type=Path,
        help="PDF, or PNG of its first page (default: LOG_DIR/training_plots.pdf)",
    )
    add(
        "--x",
        nargs="+",
        choices=AXES,
        default=["step"],
        help="the x axis of the curves, or several (default: step)",
    )
    add(
        "--metrics",
        nargs="+",
        metavar="KEY",
        help="only the curves of these keys of the logs, on one page",
    )
    add(
        "--by",
        nargs="+",
        metavar="FLAG",
        default=[],
        help="group the runs by flags of args.json, by parameters, or "
        "by arm, the directory's name without _seed0: a colour per group; without --metrics the accuracies at the end "
        "and their table",
    )
    add(
        "--show",
        nargs="?",
        type=int,
        const=-1,
        metavar="STEP",
        help="only print the worst and best completions of an iteration (default: the last)",
    )
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    try:
        if args.output and args.output.suffix not in (".pdf", ".png"):
            raise ValueError(f"--output {args.output}: its name must end in .pdf or .png")
        runs = read.load_runs(args.log_dir)
        if args.show is not None:
            print(*(report.show(run, args.show) for run in runs), sep="\n\n")
            return 0
        output = args.output or runs[0].path / "training_plots.pdf"
        runs = read.group_by(runs, args.by)
        with matplotlib.rc_context(STYLE):
            if args.metrics:
                save(
                    [
                        draw_metrics(
                            runs, args.metrics, [choose_axis(runs, x) for x in args.x], args.by
                        )
                    ],
                    output,
                )
                lines = [read.end_table(runs, args.by, args.metrics)]
            elif args.by:
                save([draw_last_accuracies(runs, args.by)], output)
                lines = [read.end_table(runs, args.by, read.ACCURACIES.values())]
            else:
                save(
                    (page for x in args.x for page in draw_pages(runs, choose_axis(runs, x))),
                    output,
                )
                found = read.compare_runs(runs)
                lines = [*found]
                for run in runs:
                    lines += [
                        f"{run.name}: {line}" if len(runs) > 1 else line
                        for line in read.accuracy_lines(run)
                    ]
                if len(runs) == 1 and not args.output:
                    dashboard = next(draw_pages(runs, choose_axis(runs, args.x[0])))
                    lines.append(f"report: {report.write(runs[0], dashboard, found)}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(*lines, f"plots: {output}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
