"""Draws training runs from their logs, and says how they went.

    python plotter.py output/run
        writes training_plots.pdf, the run's curves, and report.html, its completions, into it
    python plotter.py output/a output/b
        draws both runs in output/comparison.pdf, and compares their answers question by question
    python plotter.py output/* --by learning_rate
        draws the mean of the runs that share a value of this flag, and prints how they end
    python plotter.py output/run --diagnose
        says what looks wrong in the logs and what to change, also during the run; draws nothing

`--log_dir output/run` is the same as `output/run`. Every number in the logs that changes gets a
panel, so a new metric or reward needs no edit here. docs/tuning.md explains the metrics.
"""

import argparse
import math
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure  # without pyplot, nothing can open a window
from matplotlib.ticker import MaxNLocator, PercentFormatter

from config import ExpertIterationConfig, GRPOConfig, SFTConfig, may_change, read_args
from grpo import diagnose, jsonl, report
from grpo.statistics import mcnemar

STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "0.9",
    "legend.frameon": False,
    "text.parse_math": False,  # The name of a metric may have a dollar.
    "text.usetex": False,
}
# The colour-blind-safe palette of Okabe and Ito, without its yellow, which is too pale for paper.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000")
PAGE_SIZE = (11.69, 8.27)  # inches: A4, landscape
FIRST_PAGE = (2, 3)  # rows and columns of panels
OTHER_PAGES = (3, 3)
FIRST_METRICS = ("eval/accuracy", "train/reward", "train/kl")
FIRST_METRICS += ("train/entropy", "train/response_length", "train/zero_std_fraction")
# These keys of the logs count progress, and are therefore not metrics.
COUNTERS = {"step", "n", "epoch", "ei_step", "examples", "tokens", "total_tokens", "elapsed"}
UNITS = {  # {unit: how the keys with that unit begin}; a share is one only if it is at most 1
    "share": ("accuracy", "pass@", "truncated", "zero_std", "below_floor", "clip", "skipped"),
    "tokens": ("response_length", "sampled_tokens"),
    "nats": ("kl", "entropy", "sample_entropy", "sampling_"),
    "s": ("time/",),
    "GB": ("memory/",),
}
# Runs that differ in nothing but these settings are repeats of each other.
MAY_DIFFER = may_change(GRPOConfig) | may_change(SFTConfig) | may_change(ExpertIterationConfig)
MAY_DIFFER = MAY_DIFFER - {"num_train_iters", "n_ei_steps"} | {"seed", "parameters"}


@dataclass(frozen=True)
class Run:
    """The logs of a run."""

    name: str  # its path, without the folder that holds all runs
    path: Path
    flags: dict  # those of args.json, as far as they are known
    rows: dict[str, list[dict]]  # "train" and "eval": the lines of these logs

    def series(self, metric: str) -> pd.Series:
        """A metric such as "train/loss" by step. A null is NaN; a line without the key is none."""
        log, _, key = metric.partition("/")
        values = {}
        for row in self.rows[log]:
            if key in row:
                values[row["step"]] = row[key] if diagnose.has_number(row, key) else math.nan
        return pd.Series(values, dtype=float).sort_index()


def read_runs(paths: list[Path]) -> list[Run]:
    """The runs in these folders. Raises ValueError where there is none, or its logs are damaged."""
    paths = list(dict.fromkeys(path.expanduser().absolute() for path in paths))
    common_folder = os.path.commonpath([path.parent for path in paths])
    runs = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"there is no folder {path}")
        rows = {}
        for log in ("train", "eval"):
            file = path / f"{log}_log.jsonl"
            rows[log] = jsonl.read(file, ("step",)) if file.exists() else []
        if any(rows.values()):
            name = os.path.relpath(path, common_folder)
            runs.append(Run(name, path, read_args(path / "args.json"), rows))
        else:
            print(f"note: no log of a run in {path}")
    if not runs:
        folders = ", ".join(map(str, paths))
        raise ValueError(f"there is no run to plot in {folders}")
    return runs


def find_metrics(runs: list[Run]) -> list[str]:
    """The metrics with more than one value, rounding aside: the main ones first."""
    metrics = dict.fromkeys(FIRST_METRICS)
    for log in ("train", "eval"):
        keys = dict.fromkeys(chain.from_iterable(row for run in runs for row in run.rows[log]))
        for key in keys:
            stem, _, end = key.rpartition("_")
            is_interval_end = log == "eval" and end in ("low", "high") and stem in keys
            if key not in COUNTERS and not is_interval_end:
                metrics[f"{log}/{key}"] = None
    changing = []
    for metric in metrics:
        values = all_values(runs, metric)
        if values.max() - values.min() > 1e-6 * values.abs().max():
            changing.append(metric)
    return changing


def all_values(runs: list[Run], metric: str) -> pd.Series:
    return pd.concat([run.series(metric) for run in runs])


# --- Curves ---------------------------------------------------------------------------------------

Groups = dict[str, list[Run]]  # {label of a curve: the runs of which it is the mean}


def smooth(series: pd.Series, metric: str) -> pd.Series:
    """A centred running median of a noisy training metric over a fifteenth of its points.

    A mean would turn a spike into a plateau as wide as its window. A gap stays a gap.
    """
    if metric.startswith("eval/") or metric == "train/learning_rate":
        return series
    width = 2 * (len(series) // 30) + 1
    return series.rolling(width, center=True, min_periods=1).median().where(series.notna())


def make_curve(runs: list[Run], metric: str) -> pd.DataFrame:
    """The curve of a metric, by step: the columns line, low and high; empty if no run has it.

    For several runs, the line is their mean and the band goes from the least to the greatest, where
    all of them have values, so that it ends with the shortest run. Between the rows of a log values
    are interpolated. For one run the band is the interval of an evaluation.
    """
    curves = [smooth(run.series(metric), metric) for run in runs]
    curves = [curve for curve in curves if curve.notna().any()]
    if not curves:
        return pd.DataFrame(columns=["line", "low", "high"], dtype=float)
    if len(runs) > 1:
        table = pd.concat(curves, axis=1).sort_index()
        table = table.interpolate("index", limit_area="inside").dropna()
        columns = {"line": table.mean(axis=1), "low": table.min(axis=1), "high": table.max(axis=1)}
        return pd.DataFrame(columns)
    (run,) = runs
    curve = pd.DataFrame({"line": curves[0], "low": math.nan, "high": math.nan})
    if metric.startswith("eval/"):  # In training, clip_fraction_low is a metric of its own.
        curve["low"] = run.series(f"{metric}_low")
        curve["high"] = run.series(f"{metric}_high")
    return curve


def draw_panel(ax: Axes, groups: Groups, metric: str) -> None:
    """Draw a metric: for each group a line with its band, and of a single run every value."""
    title = metric.removeprefix("train/")
    unit = unit_of(metric, all_values(list(chain(*groups.values())), metric))
    for color, (label, runs) in zip(cycle(COLORS), groups.items(), strict=False):
        if len(runs) == 1 and metric.startswith("train/"):
            ax.plot(runs[0].series(metric), ".", color=color, alpha=0.3, markersize=3)
        curve = make_curve(runs, metric)
        marker = "o" if metric.startswith("eval/") else ""
        ax.plot(curve["line"], color=color, marker=marker, markersize=3, label=label)
        ax.fill_between(curve.index, curve["low"], curve["high"], color=color, alpha=0.15, lw=0)
        line = curve["line"].dropna()
        if len(groups) == 1 and len(line):
            form = ".1%" if unit == "share" else ".3g"
            title = f"{title}: {line.iloc[0]:{form}} \u2192 {line.iloc[-1]:{form}}"
    ax.set_title(title, loc="left")
    ax.set(xlabel="step", ylabel=unit)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if unit == "share":
        bottom, top = ax.get_ylim()
        ax.set_ylim(max(bottom, -0.03), min(top, 1.03))
        ax.yaxis.set_major_formatter(PercentFormatter(1))


def unit_of(metric: str, values: pd.Series) -> str:
    """The unit of a metric with these values, or ""."""
    key = metric.partition("/")[2]
    units = [unit for unit, beginnings in UNITS.items() if key.startswith(beginnings)]
    if not units or (units == ["share"] and values.max() > 1):
        return ""
    return units[0]


def draw_pages(groups: Groups, metrics: list[str], title: str) -> Iterator[Figure]:
    """The pages of a PDF: six panels with the main metrics, and nine on each further one.

    The legend says what the lines and bands are.
    """
    meaning = "dots: every iteration; line: running median; band: 95% interval over problems"
    if any(len(runs) > 1 for runs in groups.values()):
        meaning = "line: mean of the runs' running medians; band: lowest to highest run"
    grid = FIRST_PAGE
    while metrics:
        figure = Figure(PAGE_SIZE, layout="constrained")
        for i, metric in enumerate(metrics[: math.prod(grid)], 1):
            draw_panel(figure.add_subplot(*grid, i), groups, metric)
        figure.suptitle(title)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        legend = figure.legend(handles, labels, ncols=3, loc="outside lower center")
        legend.set_title(meaning)
        yield figure
        metrics = metrics[math.prod(grid) :]
        grid = OTHER_PAGES


# --- Runs that share the values of flags ----------------------------------------------------------


def group_by(runs: list[Run], flags: list[str]) -> Groups:
    """{the values of the flags: the runs that share them}; says where a curve of them ends.

    Raises:
        ValueError: a run lacks a flag, or the runs of a group differ in another one. A mean over
            such runs would be that of a run that nobody made.
    """
    groups = {}
    for run in sorted(runs, key=lambda run: [sort_key(value) for value in settings(run, flags)]):
        values = settings(run, flags)
        label = ", ".join(f"{flag} {value}" for flag, value in zip(flags, values, strict=True))
        groups.setdefault(label, []).append(run)
    labelled = {}
    for label, group in groups.items():
        other_flags = set().union(*(run.flags for run in group)) - MAY_DIFFER
        for flag in sorted(other_flags):
            # Seeds are repeats: a path start_seed0 is start_seed1.
            values = {re.sub(r"seed\d+", "seed", str(run.flags.get(flag))) for run in group}
            if len(values) > 1:
                raise ValueError(f"--by: the runs with {label} differ in --{flag} too; add it")
        ends = [max(row["step"] for row in chain(*run.rows.values())) for run in group]
        end = f", to step {min(ends)} of {max(ends)}" if min(ends) < max(ends) else ""
        labelled[f"{label} (runs: {len(group)}{end})"] = group
    return labelled


def settings(run: Run, flags: list[str]) -> list:
    """The values of flags in a run's args.json; "default" for one that was not set."""
    for flag in flags:
        if flag not in run.flags:
            raise ValueError(f"--by {flag}: {run.path} has no --{flag} in its args.json")
    return ["default" if run.flags[flag] is None else run.flags[flag] for flag in flags]


def sort_key(value) -> tuple[bool, float, str]:
    """Numbers come in their order, and then texts."""
    is_number = isinstance(value, int | float)
    return not is_number, value if is_number else 0, str(value)


def table_of_accuracies(runs: list[Run], flags: list[str]) -> str:
    """The last accuracies of the runs that share the values of the flags."""
    rows = []
    for run in runs:
        accuracies = run.series("eval/accuracy").dropna()
        if len(accuracies):
            rows.append([*settings(run, flags), accuracies.iloc[-1]])
    table = pd.DataFrame(rows, columns=[*flags, "accuracy"]).groupby(flags, sort=False)
    accuracies = table["accuracy"].agg(["mean", "min", "max", "count"])
    return accuracies.to_string(float_format="{:.1%}".format)


# --- Before and after -----------------------------------------------------------------------------

Pairs = list[tuple[dict, dict]]  # rows of two evaluations that answer the same question


def accuracy_lines(run: Run) -> list[str]:
    """Strict and flexible accuracy at the first and the last evaluation, with n and intervals."""
    lines = []
    for kind, key in (("strict", "accuracy"), ("flexible", "accuracy_flexible")):
        rows = [row for row in run.rows["eval"] if diagnose.has_number(row, key)]
        if rows:
            ends = [rows[0], rows[-1]] if len(rows) > 1 else rows
            change = " -> ".join(f"{row[key]:.1%}" for row in ends)
            sizes = " and ".join(dict.fromkeys(str(row.get("n")) for row in ends))
            split = f", {run.flags['eval_split']}" if "eval_split" in run.flags else ""
            intervals = " and ".join(
                f"[{100 * row[f'{key}_low']:.1f}, {100 * row[f'{key}_high']:.1f}]" for row in ends
            )
            lines.append(f"accuracy ({kind})  {change}  (n = {sizes}{split}, 95% CI {intervals})")
    return lines


def compare(path_before: Path, path_after: Path) -> Pairs:
    """Both answers to each question that two evaluations share, where they have a verdict."""
    before = first_answers(path_before)
    after = first_answers(path_after)
    pairs = [(row, after[question]) for question, row in before.items() if question in after]
    return [pair for pair in pairs if None not in verdicts(pair)]


def first_answers(path: Path) -> dict[tuple, dict]:
    """{question: its first sample}. An id with another gold answer is another question."""
    answers = {}
    for row in jsonl.read(path, ("id",)):
        answers.setdefault((row["id"], row.get("gold")), row)
    return answers


def changed(pairs: Pairs, is_right: bool) -> Pairs:
    """The answers that have become right, or wrong."""
    was_right = not is_right
    return [pair for pair in pairs if verdicts(pair) == (was_right, is_right)]


def verdicts(rows: tuple[dict, ...]) -> tuple:
    return tuple(row.get("correct_strict") for row in rows)


def comparison_line(label: str, pairs: Pairs) -> str:
    """How many questions were fixed and broken, with McNemar's test."""
    num_fixed = len(changed(pairs, is_right=True))
    num_broken = len(changed(pairs, is_right=False))
    return (
        f"{label}, strict: {num_fixed} fixed, {num_broken} broken of {len(pairs)} questions,"
        f" exact McNemar p = {mcnemar(num_fixed, num_broken):.2g}"
    )


def compare_ends(run: Run) -> tuple[Pairs, list[str]]:
    """The answers of a run's first and last evaluation, and a line about them."""
    evaluations = report.transcripts(run.path, "eval")
    if len(evaluations) < 2:
        return [], []
    first, *_, last = evaluations
    pairs = compare(evaluations[first], evaluations[last])
    lines = [comparison_line(f"{run.name}, step {first} -> {last}", pairs)]
    return pairs, lines if pairs else []


def compare_runs(runs: list[Run]) -> list[str]:
    """Lines that compare the last evaluation of the first run with that of each further run."""
    last_evaluations = {}
    for run in runs:
        for step, path in report.transcripts(run.path, "eval").items():
            last_evaluations[run.name] = (f"{run.name} (step {step})", path)
    lines = []
    for label, path in list(last_evaluations.values())[1:]:
        first_label, first_path = next(iter(last_evaluations.values()))
        pairs = compare(first_path, path)
        if pairs:
            lines.append(comparison_line(f"{first_label} -> {label}", pairs))
    return lines


def example_lines(run: Run, answers: tuple[dict, dict]) -> list[str]:
    """A question with its answers in the first and the last evaluation."""
    prompt = answers[0]["prompt"]
    questions = re.findall(r"[^\n<>|]+\?", prompt)
    texts = [textwrap.shorten(questions[-1] if questions else prompt, 110, placeholder=" ...")]
    first, *_, last = report.transcripts(run.path, "eval")
    for step, answer in zip((first, last), answers, strict=True):
        texts.append(f"--- step {step}\n{answer['completion']}")
    return [printable(f"{text}\n") for text in texts]


def printable(text: str) -> str:
    """The text without control characters, which could do something to the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


# --- The command ----------------------------------------------------------------------------------


def describe_run(run: Run) -> list[str]:
    """Write report.html, and return what is printed about a single run."""
    pairs, lines = compare_ends(run)
    lines += accuracy_lines(run)
    changes = {"fixed": changed(pairs, is_right=True), "broken": changed(pairs, is_right=False)}
    page = report.write(run.path, lines, changes)
    if changes["fixed"]:
        lines = example_lines(run, changes["fixed"][0]) + lines
    return [*lines, f"report: {page}"]


def describe_runs(runs: list[Run]) -> list[str]:
    """What is printed about several runs."""
    lines = []
    for run in runs:
        lines += compare_ends(run)[1]
    lines += compare_runs(runs)
    for run in runs:
        lines += [f"{run.name}: {line}" for line in accuracy_lines(run)]
    return lines


def plot(runs: list[Run], flags: list[str] | None, output: Path | None) -> list[str]:
    """Write the PDF, and return the lines to print.

    Args:
        flags: those of --by.
        output: where the PDF goes, if not to its usual place.
    """
    title = f"{len(runs)} runs"
    path = runs[0].path.parent / "comparison.pdf"
    groups = {run.name: [run] for run in runs}
    if flags:
        groups = group_by(runs, flags)
        lines = [table_of_accuracies(list(chain(*groups.values())), flags)]
    elif len(runs) > 1:
        lines = describe_runs(runs)
    else:
        (run,) = runs
        title = f"{run.name}: {run.flags.get('model_name')} on {run.flags.get('dataset_name')}"
        path = run.path / "training_plots.pdf"
        lines = describe_run(run)
    metrics = find_metrics(runs)
    if not metrics:
        return [*lines, "note: no number in the logs changes, so nothing is drawn"]
    with PdfPages(output or path, metadata={"CreationDate": None}) as pdf:
        for figure in draw_pages(groups, metrics, title):
            pdf.savefig(figure)
    return [*lines, f"plots: {output or path}"]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", type=Path, help="folders of runs")
    parser.add_argument("--log_dir", nargs="+", type=Path, default=[], help="the same")
    parser.add_argument(
        "--by", nargs="+", metavar="FLAG", help="flags of args.json, or `parameters`"
    )
    parser.add_argument("--output", type=Path, metavar="FILE.pdf", help="where to draw")
    parser.add_argument("--diagnose", action="store_true", help="say what looks wrong")
    args = parser.parse_args(argv)
    args.runs += args.log_dir
    if not args.runs:
        parser.error("name the folder of a run")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        runs = read_runs(args.runs)
        if args.diagnose:
            lines = []
            for run in runs:
                findings = diagnose.findings(run.path) or ["nothing looks wrong"]
                lines += [f"{run.name}: {finding}" for finding in findings]
        else:
            with matplotlib.rc_context(STYLE):
                lines = plot(runs, args.by, args.output)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
