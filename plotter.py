"""Plots of finished or running runs, from their log files alone: a dashboard, then a page per metric.

    python plotter.py --log_dir output/run              writes output/run/training_plots.pdf
    python plotter.py --log_dir output/a output/b       overlays the runs and compares them question by question
    python plotter.py --log_dir output/* --by group_size     last accuracy of every run against a flag, and its table

Reads train_log.jsonl and eval_log.jsonl and, where they exist, args.json (for titles) and eval/step_*.jsonl (for the
paired comparison). Every number in a log gets a page, so a new metric or reward needs no edit here. In the evaluation
log KEY_low and KEY_high are the interval of KEY; keys that share a prefix before "/" are a family (rewards/, time/).
A null is a gap in the curve; where a line lacks a key it was not measured, and the curve goes on.
"""

import argparse
import json
import math
import os
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure  # without pyplot nothing can open a window
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

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
COUNTERS = set("step total_tokens tokens examples elapsed epoch ei_step n".split())  # where and how much, not what
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


@dataclass
class Run:
    name: str  # the end of its path, long enough to differ from the other runs'
    path: Path
    args: dict  # the flags and the number of parameters; {} without args.json
    about: str  # model, data set, parameters, as far as args tells them
    train: list[dict]
    eval: list[dict]


# ---- reading the logs


def read_jsonl(path, required_key):
    """Rows of a log. A torn last line is skipped with a printed note; any other broken line is a ValueError."""
    lines = [(i, line) for i, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{path} is empty: nothing was logged yet")
    rows = []
    for i, line in lines:
        try:
            row = json.loads(line)
        except ValueError as error:
            if i < lines[-1][0]:
                raise ValueError(f"{path}:{i}: broken line ({error})") from None
            print(f"note: {path}:{i}: torn last line skipped (the run was killed or is still writing)")
            break
        if not isinstance(row, dict) or required_key not in row:
            raise ValueError(f'{path}:{i}: not an object with "{required_key}"')
        rows.append(row)
    return rows


def read_args(path):
    """The flags in args.json, and the number of parameters; {} where there is no such file."""
    if not path.exists():
        return {}
    try:
        record = json.loads(path.read_bytes())
        return record["args"] | {"parameters": record.get("parameters")}
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path}: not the args.json of a run ({error!r})") from None


def describe(args):
    """Model, data set and parameters in a few words."""
    parts = [args.get("model_name"), args.get("dataset_name"), args.get("parameters")]
    if isinstance(parts[2], int):
        parts[2] = f"{EngFormatter(places=2)(parts[2])} parameters"
    return ", ".join(str(part) for part in parts if part)


def load_runs(log_dirs):
    paths = [Path(os.path.abspath(log_dir)) for log_dir in log_dirs]
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"{path}: no such directory")
        if paths.count(path) > 1:
            raise ValueError(f"{path}: given twice")
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    runs = []
    for path in paths:
        logs = [path / "train_log.jsonl", path / "eval_log.jsonl"]
        if not any(log.exists() for log in logs):
            raise ValueError(f"{path}: no train_log.jsonl and no eval_log.jsonl in it")
        train, evaluations = (read_jsonl(log, "step") if log.exists() else [] for log in logs)
        if not train and not evaluations:
            raise ValueError(f"{path}: no complete line in its logs yet")
        args = read_args(path / "args.json")
        runs.append(Run("/".join(path.parts[-depth:]), path, args, describe(args), train, evaluations))
    return runs


def number(value):
    """A float; NaN for whatever is not a finite number."""
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else math.nan


def column(rows, key):
    return np.array([number(row.get(key)) for row in rows])


def find_metrics(runs, log):
    """Keys of a log ("train" or "eval") with a finite number in some row of some run, in order of appearance."""
    rows = [row for run in runs for row in getattr(run, log)]
    keys = {key: None for row in rows for key in row if key not in COUNTERS and math.isfinite(number(row[key]))}
    intervals = {key + end for key in keys for end in ("_low", "_high")} if log == "eval" else set()
    return [key for key in keys if key not in intervals]


# ---- statistics


def smooth(values):
    """Centred running mean of the finite values among about a fifteenth of the points; a gap stays a gap."""
    finite, window = np.isfinite(values), np.ones(2 * (len(values) // 30) + 1)
    total, count = (np.convolve(part, window, "same") for part in (np.where(finite, values, 0.0), finite))
    return np.where(finite, total / np.maximum(count, 1), np.nan)


def mcnemar(fixed, broken):
    """Exact two-sided McNemar p-value: min(1, 2 P(X <= min(fixed, broken))) with X ~ Binomial(fixed + broken, 1/2)."""
    n, term, tail = fixed + broken, 1, 1
    for i in range(min(fixed, broken)):  # whole numbers: exact for any n
        term = term * (n - i) // (i + 1)
        tail += term
    return min(1.0, 2 * tail / 2**n)


def compare(label, before, after):
    """Paired comparison of two eval/step_*.jsonl: [(label, kind, questions, fixed, broken, p)] for strict and flexible.

    A question is the same if its id and gold answer are; of several samples of a question the first one counts.
    """

    def answers(path):
        return {(str(row["id"]), str(row.get("gold"))): row for row in reversed(read_jsonl(path, "id"))}

    before, after, results = answers(before), answers(after), []
    for kind in ("strict", "flexible"):
        key = f"correct_{kind}"
        pairs = [(before[question].get(key), after[question].get(key)) for question in before.keys() & after.keys()]
        pairs = [pair for pair in pairs if None not in pair]
        fixed, broken = pairs.count((False, True)), pairs.count((True, False))
        if pairs:
            results.append((label, kind, len(pairs), fixed, broken, mcnemar(fixed, broken)))
    if not results:
        print(f"note: {label}: no question in common, not compared")
    return results


def compare_runs(runs):
    """Each run's last evaluation against its own first, and the last of every further run against that of the first."""
    results, last = [], []
    for run in runs:
        files = {path.stem.removeprefix("step_"): path for path in run.path.glob("eval/step_*.jsonl")}
        files = {int(step): path for step, path in files.items() if step.isdecimal()}
        steps = [row["step"] for row in run.eval if row["step"] in files]  # a file without a row is not finished
        if len(steps) > 1:
            results += compare(f"{run.name}, step {steps[0]} -> {steps[-1]}", files[steps[0]], files[steps[-1]])
        if steps:
            last.append((f"{run.name} (step {steps[-1]})", files[steps[-1]]))
    for name, path in last[1:]:
        results += compare(f"{last[0][0]} -> {name}", last[0][1], path)
    return results


def accuracy_lines(run):
    """From what to what: a line for strict and one for flexible accuracy, out of the first and last evaluation."""
    lines = []
    for kind, key in (("strict", "accuracy"), ("flexible", "accuracy_flexible")):
        rows = [row for row in run.eval if math.isfinite(number(row.get(key)))]
        ends = rows[:1] + rows[1:][-1:]
        change = " -> ".join(f"{100 * row[key]:.1f} %" for row in ends)
        n = " and ".join(dict.fromkeys(str(row.get("n")) for row in ends))
        bounds = zip(*(100 * column(ends, key + end) for end in ("_low", "_high")), strict=True)
        intervals = " and ".join(f"[{low:.1f}, {high:.1f}]" for low, high in bounds)
        if ends:
            lines.append(f"accuracy ({kind})  {change}  (n = {n}, 95 % interval{'s'[: len(ends) - 1]} {intervals})")
    return lines or ["accuracy: not evaluated yet"]


def last_accuracies(runs, flags):
    """{values of the flags: [(strict, low, high, flexible, low, high) of each run]}, in order of the values."""
    keys = [f"accuracy{kind}{end}" for kind in ("", "_flexible") for end in ("", "_low", "_high")]
    groups = {}
    for run in runs:
        lacking = [flag for flag in flags if run.args.get(flag) is None]
        rows = [row for row in run.eval if math.isfinite(number(row.get("accuracy")))]
        if lacking or not rows:
            raise ValueError(f"{run.path}: " + (f"no --{lacking[0]} in its args.json" if lacking else "not evaluated"))
        group = tuple(run.args[flag] for flag in flags)
        groups.setdefault(group, []).append([number(rows[-1].get(key)) for key in keys])
    return dict(sorted(groups.items(), key=lambda item: [(isinstance(v, str), v) for v in item[0]]))


def accuracy_table(groups, flags):
    """Markdown: a row per value, every run's strict accuracy with its interval, and the means over the runs."""
    lines = [f"| {', '.join(flags)} | strict, each run (%) | mean | flexible, mean |", "|---|---|---:|---:|"]
    for group, rows in groups.items():
        each = ", ".join(f"{100 * row[0]:.1f} [{100 * row[1]:.1f}, {100 * row[2]:.1f}]" for row in rows)
        strict, flexible = (100 * np.mean([row[i] for row in rows]) for i in (0, 3))
        lines.append(f"| {', '.join(map(str, group))} | {each} | {strict:.1f} | {flexible:.1f} |")
    return "\n".join(lines)


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


def new_page(runs, title, size=(8.5, 5.5)):
    """A figure that says what was trained: in its title, or in its legend where the runs differ in it."""
    fig = Figure(size, layout="constrained")
    fig.get_layout_engine().set(w_pad=0.08, h_pad=0.06)
    same = len({run.about for run in runs}) == 1
    parts = [runs[0].name] * (len(runs) == 1) + [runs[0].about] * (same and runs[0].about != "")
    fig.suptitle("\n".join(textwrap.fill(line, int(9 * size[0])) for line in (": ".join(parts), title) if line))
    if len(runs) > 1:
        labels = [run.name if same or not run.about else f"{run.name}: {run.about}" for run in runs]
        handles = [Line2D([], [], **look(i)) for i in range(len(runs))]
        fig.legend(handles, labels, ncols=legend_columns(labels, size[0]), loc="outside lower center")
    return fig


def draw_curves(ax, runs, log, keys, axis):
    """A colour per run, or per key of a single run. Training: raw and smoothed. Evaluation: with its interval."""
    x_key, x_label, x_scale = axis
    for i, run in enumerate(runs):
        for j, key in enumerate(keys):
            rows = [row for row in getattr(run, log) if key in row and math.isfinite(number(row.get(x_key)))]
            if not rows:
                continue
            x, y = column(rows, x_key) / x_scale, column(rows, key)
            style, label = look(i if len(runs) > 1 else j), label_of(key) if len(keys) > 1 else None
            finite = np.pad(np.isfinite(y), 1)
            alone = np.flatnonzero(finite[1:-1] & ~finite[:-2] & ~finite[2:])  # no line would show these points
            if log == "eval":
                low, high = column(rows, f"{key}_low"), column(rows, f"{key}_high")
                ax.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
                ax.vlines(x[alone], low[alone], high[alone], color=style["color"], linewidth=1)
                ax.plot(x, y, **style, label=label)
            else:
                bold = y if key == "learning_rate" else smooth(y)  # a schedule has no noise to smooth away
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
    starts = {row["accuracy"] for run in runs for row in run.eval if row["step"] == 0 and "accuracy" in row}
    if len(starts) == 1:
        ax.axhline(*starts, color="0.4", linestyle=":", label="strict, before training")
    if is_scale:
        ax.set_xscale("log")
    ax.set_xticks(places, [", ".join(map(str, group)) for group in groups])
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


def p_text(p):
    return f"p = {p:.2g}" if p > 1e-300 else "p < 1e-300"


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
    add("--x", choices=AXES, default="step", help="the x axis of the curves (default: step)")
    add("--by", nargs="+", metavar="FLAG", help="only the last accuracies, by flags of args.json or by parameters")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    output = args.output or Path(args.log_dir[0], "training_plots.pdf")
    try:
        runs = load_runs(args.log_dir)
        with matplotlib.rc_context(STYLE):
            if args.by:
                groups = last_accuracies(runs, args.by)
                save([draw_last_accuracies(runs, groups, args.by)], output)
                report = [accuracy_table(groups, args.by)]
            else:
                results = compare_runs(runs)
                save(draw_pages(runs, choose_axis(runs, args.x), results), output)
                report = [
                    f"{label}, {kind}: {fixed} fixed, {broken} broken of {n} questions, exact McNemar {p_text(p)}"
                    for label, kind, n, fixed, broken, p in results
                ]
                head = (lambda run: f"{run.name}: ") if len(runs) > 1 else lambda run: ""
                report += [head(run) + line for run in runs for line in accuracy_lines(run)]
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(*report, f"plots: {output}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
