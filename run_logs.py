"""What the log files of runs say: reading them, and the statistics that plotter.py draws and prints.

Reads train_log.jsonl and eval_log.jsonl and, where they exist, args.json (for titles and flags) and eval/step_*.jsonl
(for paired comparisons). In the evaluation log KEY_low and KEY_high are the interval of KEY.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.ticker import EngFormatter

COUNTERS = set("step total_tokens tokens examples elapsed epoch ei_step n".split())  # where and how much, not what


@dataclass
class Run:
    name: str  # the end of its path, long enough to differ from the other runs'
    path: Path
    args: dict  # the flags and the number of parameters; {} without args.json
    about: str  # model, data set, parameters, as far as args tells them
    train: list[dict]
    eval: list[dict]
    group: tuple  # what its colour and label stand for: its name, or after group_by the values of flags


# ---- reading


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
        name = "/".join(path.parts[-depth:])
        runs.append(Run(name, path, args, describe(args), train, evaluations, (name,)))
    return runs


def group_by(runs, flags):
    """The runs in order of the flags' values, and grouped by them. ValueError where args.json lacks a flag."""
    if not flags:
        return runs
    for run in runs:
        lacking = [flag for flag in flags if flag not in run.args]
        if lacking:
            raise ValueError(f"{run.path}: no --{lacking[0]} in its args.json")
        run.group = tuple("default" if run.args[flag] is None else run.args[flag] for flag in flags)
    return sorted(runs, key=lambda run: [(isinstance(value, str), value) for value in run.group])


def group_label(group):
    """Its values as words, numbers above 10,000 with a unit."""
    return ", ".join(EngFormatter(places=2)(v) if isinstance(v, int) and v > 10_000 else str(v) for v in group)


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


def p_text(p):
    return f"p = {p:.2g}" if p > 1e-300 else "p < 1e-300"


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


def last_accuracies(runs):
    """{group: [(strict, low, high, flexible, low, high) of each run]}. ValueError where a run was not evaluated."""
    keys = [f"accuracy{kind}{end}" for kind in ("", "_flexible") for end in ("", "_low", "_high")]
    groups = {}
    for run in runs:
        rows = [row for row in run.eval if math.isfinite(number(row.get("accuracy")))]
        if not rows:
            raise ValueError(f"{run.path}: not evaluated")
        groups.setdefault(run.group, []).append([number(rows[-1].get(key)) for key in keys])
    return groups


def accuracy_table(groups, flags):
    """Markdown: a row per group, every run's strict accuracy with its interval, and the means over the runs."""
    lines = [f"| {', '.join(flags)} | strict, each run (%) | mean | flexible, mean |", "|---|---|---:|---:|"]
    for group, rows in groups.items():
        each = ", ".join(f"{100 * row[0]:.1f} [{100 * row[1]:.1f}, {100 * row[2]:.1f}]" for row in rows)
        strict, flexible = (100 * np.mean([row[i] for row in rows]) for i in (0, 3))
        lines.append(f"| {group_label(group)} | {each} | {strict:.1f} | {flexible:.1f} |")
    return "\n".join(lines)


def log_of(runs, key):
    """Where a metric is read: accuracies in the evaluations, the rest in training if it is there. Raises ValueError."""
    metrics = {log: find_metrics(runs, log) for log in ("train", "eval")}
    order = ("eval", "train") if key.startswith(("accuracy", "pass")) else ("train", "eval")
    log = next((log for log in order if key in metrics[log]), None)
    if log is None:
        raise ValueError(f"--metrics {key}: not in the logs, which have {', '.join(sum(metrics.values(), []))}")
    return log


def end_table(runs, flags, keys):
    """Markdown: each run's metrics at its end: the last evaluation, or the mean over the last tenth of training."""
    lines = [f"| {', '.join(flags) or 'run'} | {' | '.join(keys)} |", "|---" * (len(keys) + 1) + "|"]
    for group in dict.fromkeys(run.group for run in runs):
        cells = []
        for key in keys:
            log = log_of(runs, key)
            values = [column(getattr(run, log), key) for run in runs if run.group == group]
            values = [v[np.isfinite(v)] for v in values]
            ends = [v[-1:] if log == "eval" else v[-math.ceil(len(v) / 10) :] for v in values]
            cells.append(", ".join(f"{end.mean():.3g}" if len(end) else "none" for end in ends))
        lines.append(f"| {group_label(group)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def first_reach(run, accuracy):
    """(steps, tokens, seconds of training) at the first evaluation with that strict accuracy; None if there is none."""
    for row in run.eval:
        if number(row.get("accuracy")) >= accuracy:
            seconds = column([done for done in run.train if done["step"] <= row["step"]], "time/total")
            return row["step"], number(row.get("total_tokens")), seconds.sum()
    return None


def reach_table(runs, flags, accuracies):
    """Markdown: for each accuracy and group when each run first had it, in steps, thousands of tokens and seconds."""
    lines = [f"| strict accuracy | {', '.join(flags) or 'run'} | steps | thousand tokens | seconds |"]
    lines.append("|---:|---|---|---|---|")
    for accuracy in accuracies:
        for group in dict.fromkeys(run.group for run in runs):
            found = [first_reach(run, accuracy) for run in runs if run.group == group]
            cells = [
                ", ".join("never" if at is None else f"{at[i] / unit:.0f}" for at in found)
                for i, unit in enumerate((1, 1000, 1))
            ]
            lines.append(f"| {100 * accuracy:g} % | {group_label(group)} | {' | '.join(cells)} |")
    return "\n".join(lines)
