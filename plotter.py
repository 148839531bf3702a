"""Draws training runs from their logs, and says how they went.

    python plotter.py output/run             # its training_plots.pdf and report.html
    python plotter.py output/a output/b      # both in output/comparison.pdf, answers compared
    python plotter.py output/* --by beta     # the mean of the runs that share a value of this flag
    python plotter.py output/run --diagnose  # what looks wrong in its logs, and what to change

`--log_dir output/run` is the same as `output/run`. Every number in the logs that changes gets a
panel, so a new metric or reward needs no edit here.
"""

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure  # without pyplot, nothing can open a window
from matplotlib.ticker import PercentFormatter

from config import GRPOConfig, may_change, read_args
from grpo import jsonl, report
from grpo.report import step_of

STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.grid": True,
    "grid.color": "0.9",
    "text.parse_math": False,  # The name of a metric may have a dollar.
}
FIRST_METRICS = """eval/accuracy eval/accuracy_flexible eval/reward train/reward train/accuracy
    train/loss train/kl train/entropy train/response_length train/truncated_fraction
    train/zero_std_fraction train/reward_std train/grad_norm""".split()
DASHED = {"eval/accuracy": "eval/accuracy_flexible"}  # drawn in the panel of the first
# These keys of the logs count progress, and are therefore not metrics.
COUNTERS = "step n epoch examples sampled_tokens total_tokens elapsed".split()
# Keys that begin like this are drawn in percent, if their values are at most 1.
SHARES = ("accuracy", "pass", "truncated", "zero_std", "clip", "skipped")
# The units of keys that begin like this.
UNITS = {
    "kl": "nats per token",
    "entropy": "nats per token",
    "sampling_logp_gap": "nats per token",
    "response_length": "tokens",
    "time/": "seconds",
    "memory/": "GB",
}
# Runs that differ in nothing but these settings are repeats of each other.
MAY_DIFFER = may_change(GRPOConfig) - {"num_train_iters"} | {"seed", "parameters"}
MAY_DIFFER |= {"eval_updates", "save_updates", "eval_ei_steps"}  # of other scripts


@dataclass(frozen=True)
class Run:
    """The logs of a run."""

    name: str  # its path, without the folder that holds all runs
    path: Path
    flags: dict  # those of args.json; "default" for one that was not set
    metrics: pd.DataFrame  # by step: the columns "train/loss", "eval/accuracy", ...

    def series(self, metric: str) -> pd.Series:
        """A metric by step, where it has a value; empty if the run lacks it."""
        return self.metrics.get(metric, pd.Series(dtype=float)).dropna()


def read_runs(paths: list[Path]) -> list[Run]:
    """The runs in these folders. Raises ValueError where there is none, or its logs are damaged."""
    paths = [path.absolute() for path in paths]
    common_folder = os.path.commonpath([path.parent for path in paths])
    runs = []
    for path in paths:
        tables = []
        for log in ("train", "eval"):
            rows = jsonl.read_log(path / f"{log}_log.jsonl", ("step",))
            table = pd.DataFrame.from_dict({row["step"]: row for row in rows}, orient="index")
            tables.append(table.apply(pd.to_numeric, errors="coerce").add_prefix(f"{log}/"))
        metrics = pd.concat(tables, axis=1).sort_index()
        if metrics.empty:
            print(f"note: there is no log of a run in {path}")
            continue
        name = os.path.relpath(path, common_folder)
        args = read_args(path / "args.json")
        flags = {flag: "default" if value is None else value for flag, value in args.items()}
        runs.append(Run(name, path, flags, metrics))
    if not runs:
        raise ValueError(f"there is no run to plot in {', '.join(map(str, paths))}")
    return runs


def find_metrics(runs: list[Run]) -> list[str]:
    """The metrics with more than one value, rounding aside: the main ones first."""
    table = pd.concat([run.metrics for run in runs])
    changing = []
    for metric in table:
        log, _, key = metric.partition("/")
        stem, _, end = metric.rpartition("_")
        is_interval_end = log == "eval" and end in ("low", "high") and stem in table
        values = table[metric]
        is_changing = values.max() - values.min() > 1e-6 * values.abs().max()
        if key not in COUNTERS and not is_interval_end and is_changing:
            changing.append(metric)
    for solid, dashed in DASHED.items():
        if solid in changing and dashed in changing:
            changing.remove(dashed)
    places = {metric: place for place, metric in enumerate(FIRST_METRICS)}
    # The main ones first, and those of the machine last.
    return sorted(changing, key=lambda name: ("time/" in name, places.get(name, len(places))))


# --- Curves ---------------------------------------------------------------------------------------

Groups = dict[str, list[Run]]  # {label of a curve: the runs of which it is the mean}


def smooth(series: pd.Series, metric: str) -> pd.Series:
    """A centred running median of a noisy training metric over a fifteenth of its points.

    A mean would turn a spike into a plateau as wide as its window.
    """
    if metric.startswith("eval/") or metric == "train/learning_rate":
        return series
    width = 2 * (len(series) // 30) + 1
    return series.rolling(width, center=True, min_periods=1).median()


def make_curve(runs: list[Run], metric: str) -> pd.DataFrame:
    """The curve of a metric, by step: the columns line, low and high.

    For several runs, the line is their mean and the band goes from the least to the greatest, where
    all of them have values, so that it ends with the shortest run. Between the rows of a log values
    are interpolated. For one run the band is the interval of an evaluation.
    """
    curves = [smooth(run.series(metric), metric) for run in runs]
    table = pd.concat([curve for curve in curves if len(curve)] or curves, axis=1).sort_index()
    table = table.interpolate("index", limit_area="inside").dropna()
    low = table.min(axis=1)
    high = table.max(axis=1)
    if len(runs) == 1 and metric.startswith("eval/"):  # clip_fraction_low is a metric of its own
        low = runs[0].series(f"{metric}_low")
        high = runs[0].series(f"{metric}_high")
    return pd.DataFrame({"line": table.mean(axis=1), "low": low, "high": high})


def draw_panel(ax: Axes, groups: Groups, metric: str) -> None:
    """Draw a metric: for each group a line with its band, and of a single run every value."""
    is_evaluation = metric.startswith("eval/")
    for i, (label, runs) in enumerate(groups.items()):
        color = f"C{i}"
        if len(runs) == 1 and not is_evaluation:
            ax.plot(runs[0].series(metric), ".", color=color, alpha=0.3, markersize=3)
        curve = make_curve(runs, metric)
        marker = "o" if is_evaluation else ""
        ax.plot(curve["line"], color=color, marker=marker, markersize=3, label=label)
        ax.fill_between(curve.index, curve["low"], curve["high"], color=color, alpha=0.15, lw=0)
        if metric in DASHED:
            ax.plot(make_curve(runs, DASHED[metric])["line"], "--", color=color)
    ax.set_title(metric.removeprefix("train/"), loc="left")
    ax.set_xlabel("step")
    key = metric.partition("/")[2]
    ax.set_ylabel("".join(unit for start, unit in UNITS.items() if key.startswith(start)))
    values = pd.concat([run.series(metric) for runs in groups.values() for run in runs])
    if key.startswith(SHARES) and values.max() <= 1:
        _, top = ax.get_ylim()
        ax.set_ylim(top=min(top, 1.03))
        ax.yaxis.set_major_formatter(PercentFormatter(1))


def draw_pages(groups: Groups, metrics: list[str], title: str) -> Iterator[Figure]:
    """The pages of a PDF: nine panels on each. The legend says what the lines and bands are."""
    meaning = "dots: every iteration; line: running median; band: 95% interval over problems"
    if any(len(runs) > 1 for runs in groups.values()):
        meaning = "line: mean of running medians; band: lowest to highest run, and of a single one"
        meaning += " the 95% interval over problems"
    meaning += "; dashed: right in any format"
    for start in range(0, len(metrics), 9):
        figure = Figure((11.69, 8.27), layout="constrained")  # inches: A4, landscape
        for i, metric in enumerate(metrics[start : start + 9], 1):
            draw_panel(figure.add_subplot(3, 3, i), groups, metric)
        figure.suptitle(title)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, ncols=3, loc="outside lower center", title=meaning)
        yield figure


# --- Runs that share the values of flags ----------------------------------------------------------


def group_by(runs: list[Run], flags: list[str]) -> tuple[Groups, str]:
    """The runs that share the values of these flags, and a table of their last accuracies.

    Raises:
        ValueError: a run lacks a flag, or the runs of a group differ in another one. A mean over
            such runs would be that of a run that nobody made.
    """
    table = pd.DataFrame([run.flags for run in runs])
    for flag in flags:
        if flag not in table or table[flag].isna().any():
            raise ValueError(f"--by {flag}: a run has no --{flag} in its args.json")
    groups = {}
    accuracies = {}
    for values, rows in table.groupby(flags):
        label = ", ".join(f"{flag} {value}" for flag, value in zip(flags, values, strict=True))
        for flag in rows.columns.difference(MAY_DIFFER):
            if rows[flag].astype(str).nunique(dropna=False) > 1:
                raise ValueError(f"--by: the runs with {label} differ in --{flag} too; add it")
        group = [runs[i] for i in rows.index]
        ends = [run.metrics.index[-1] for run in group]
        end = f"{min(ends)} of {max(ends)}" if min(ends) < max(ends) else ends[0]
        label = f"{label} (runs: {len(group)}, to step {end})"
        groups[label] = group
        last_accuracies = pd.Series([run.series("eval/accuracy").tail(1).mean() for run in group])
        accuracies[label] = last_accuracies.agg(["mean", "min", "max"])
    return groups, pd.DataFrame(accuracies).T.to_string(float_format="{:.1%}".format)


# --- Before and after -----------------------------------------------------------------------------


Changes = dict[str, list[dict]]  # {"fixed" or "broken": the questions with both answers}


def compare(label: str, path_before: Path, path_after: Path) -> tuple[Changes, list[str]]:
    """The verdicts that differ between two evaluations, and a line with McNemar's test.

    Questions are the same if their ids and gold answers are; the first sample of each counts. The
    columns of the second evaluation end in _after.
    """
    question = ["id", "gold"]
    tables = [pd.DataFrame(jsonl.read(path, question)) for path in (path_before, path_after)]
    before, after = [table.drop_duplicates(question) for table in tables]
    pairs = before.merge(after, on=question, suffixes=("", "_after"))
    if pairs.empty or "correct_strict_after" not in pairs:  # some have no verdicts
        return {"fixed": [], "broken": []}, []
    was_right = pairs["correct_strict"]
    is_right = pairs["correct_strict_after"]
    fixed = pairs[is_right & ~was_right].to_dict("records")
    broken = pairs[was_right & ~is_right].to_dict("records")
    line = (
        f"{label}, strict: {len(fixed)} fixed, {len(broken)} broken of {len(pairs)} questions,"
        f" exact McNemar p = {mcnemar(len(fixed), len(broken)):.2g}"
    )
    return {"fixed": fixed, "broken": broken}, [line]


def mcnemar(num_fixed: int, num_broken: int) -> float:
    """The exact two-sided p-value of McNemar's test on the pairs whose verdict changed."""
    from scipy.stats import binomtest  # takes a second to import

    if num_fixed + num_broken == 0:
        return 1.0
    return float(binomtest(num_fixed, num_fixed + num_broken).pvalue)


def accuracy_lines(run: Run) -> list[str]:
    """Strict and flexible accuracy at the first and the last evaluation, with n and intervals."""
    lines = []
    for kind, metric in (("strict", "eval/accuracy"), ("flexible", "eval/accuracy_flexible")):
        steps = run.series(metric).index
        shares = []
        intervals = []
        for step in sorted({*steps[:1], *steps[-1:]}):
            row = run.metrics.loc[step]
            shares.append(f"{row[metric]:.1%}")
            percent_low = 100 * row[f"{metric}_low"]
            percent_high = 100 * row[f"{metric}_high"]
            intervals.append(f"[{percent_low:.1f}, {percent_high:.1f}]")
            sample = f"n = {row['eval/n']:.0f}, {run.flags.get('eval_split')}"
        if shares:
            confidence = f"95% CI {' and '.join(intervals)}"
            lines.append(f"accuracy ({kind})  {' -> '.join(shares)}  ({sample}, {confidence})")
    return lines


def describe_run(run: Run) -> list[str]:
    """Write report.html, and return what is printed about a single run."""
    example = []
    lines = []
    changes = {}
    evaluations = report.transcripts(run.path, "eval")
    if len(evaluations) > 1:
        first, *_, last = evaluations
        label = f"{run.name}, step {step_of(first)} -> {step_of(last)}"
        changes, lines = compare(label, first, last)
        for row in changes["fixed"][:1]:
            questions = re.findall(r"[^\n<>|]+\?", row["prompt"]) or [row["prompt"]]
            example = [textwrap.shorten(questions[-1], 110, placeholder=" ..."), ""]
            example += [f"--- step {step_of(first)}", row["completion"], ""]
            example += [f"--- step {step_of(last)}", row["completion_after"], ""]
    lines += accuracy_lines(run)
    page = report.write(run.path, lines, changes)
    return [*example, *lines, f"report: {page}"]


def describe_runs(runs: list[Run]) -> list[str]:
    """What is printed about several runs, whose last answers are compared with the first run's."""
    last_evaluations = []  # a label and a path
    for run in runs:
        for path in report.transcripts(run.path, "eval")[-1:]:
            last_evaluations.append((f"{run.name} (step {step_of(path)})", path))
    lines = []
    for label, path in last_evaluations[1:]:
        first_label, first_path = last_evaluations[0]
        lines += compare(f"{first_label} -> {label}", first_path, path)[1]
    for run in runs:
        lines += [f"{run.name}: {line}" for line in accuracy_lines(run)]
    return lines


# --- The command ----------------------------------------------------------------------------------


def plot(runs: list[Run], flags: list[str] | None) -> list[str]:
    """Write the PDF, and return the lines to print. `flags` are those of --by."""
    groups = {run.name: [run] for run in runs}
    title = f"{len(runs)} runs"
    path = runs[0].path.parent / "comparison.pdf"
    if flags:
        groups, table = group_by(runs, flags)
        lines = [table]
    elif len(runs) > 1:
        lines = describe_runs(runs)
    else:
        (run,) = runs
        lines = describe_run(run)
        title = run.name
        path = run.path / "training_plots.pdf"
    metrics = find_metrics(runs)
    if not metrics:
        return [*lines, "note: no number in the logs changes, so nothing is drawn"]
    with style.context(["tableau-colorblind10", STYLE]), PdfPages(path) as pdf:
        for figure in draw_pages(groups, metrics, title):
            pdf.savefig(figure)
    return [*lines, f"plots: {path}"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", type=Path, help="folders of runs")
    parser.add_argument("--log_dir", nargs="+", type=Path, default=[], help="the same")
    parser.add_argument(
        "--by", nargs="+", metavar="FLAG", help="flags of args.json, or `parameters`"
    )
    parser.add_argument("--diagnose", action="store_true", help="say what looks wrong")
    args = parser.parse_args(argv)
    if not args.runs + args.log_dir:
        parser.error("name the folder of a run")
    try:
        if args.diagnose and find_spec("grpo.diagnose") is None:
            raise ValueError("--diagnose: this copy of the project goes without it")
        runs = read_runs(args.runs + args.log_dir)
        if args.diagnose:
            lines = []
            for run in runs:
                findings = report.findings(run.path) or ["nothing looks wrong"]
                lines += [f"{run.name}: {finding}" for finding in findings]
        else:
            lines = plot(runs, args.by)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
