"""What the log files of runs say: their rows, and the comparisons and tables that plotter.py draws and prints.

Reads train_log.jsonl and eval_log.jsonl and, where they exist, args.json (for titles and flags) and eval/step_*.jsonl
(for paired comparisons). In the evaluation log KEY_low and KEY_high are the interval of KEY.
"""

import json
import math
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from logs import jsonl
from logs.statistics import mcnemar

COUNTERS = set(
    "step total_tokens tokens examples elapsed epoch ei_step n".split()
)  # where and how much, not what
ACCURACIES = {"strict": "accuracy", "flexible": "accuracy_flexible"}
# What stands for these words where runs wrote stories: no answer is right there.
STORIES = {
    "strict": "above the floor and scored",
    "flexible": "above the floor",
    "Accuracy": "Stories scored",
    "Evaluation accuracy": "Stories",
    "correct": "scored",
    "incorrect": "not scored",
    "Response length correct": "Response length, scored",
    "Response length incorrect": "Response length, not scored",
}


@dataclass
class Run:
    name: str  # its path, without the folders that all runs lie in
    path: Path
    args: dict  # the flags and the number of parameters, as far as args.json has them, and arm
    about: str  # model, data set, parameters, as far as args tells them
    train: list[dict]
    eval: list[dict]
    group: tuple  # what its colour and label stand for: its name, or after group_by the values of flags
    label: str  # that group in words
    place: int  # that group's among all of a study, for its colour


def read_log(path, key="step"):
    """The rows of a log, each with `key`. A torn last line is skipped with a printed note. Raises ValueError."""
    return jsonl.read(path, (key,), torn=lambda message: print(f"note: {message}"))


def read_args(path):
    """The flags in args.json, and the number of parameters; {} where there is no such file. Raises ValueError."""
    if not path.exists():
        return {}
    try:
        record = json.loads(path.read_bytes())
        return record["args"] | {"parameters": record.get("parameters")}
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path}: not the args.json of a run ({error!r})") from None


def load_runs(log_dirs):
    paths = [Path(os.path.abspath(log_dir)) for log_dir in log_dirs]
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"{path}: no such directory")
        if paths.count(path) > 1:
            raise ValueError(f"{path}: given twice")
    runs, common = [], os.path.commonpath([path.parent for path in paths])
    for path in paths:
        logs = [path / "train_log.jsonl", path / "eval_log.jsonl"]
        if not any(log.exists() for log in logs):
            if path == paths[-1] and not runs:
                raise ValueError(f"{path}: no train_log.jsonl and no eval_log.jsonl in it")
            print(f"note: {path}: holds no run, left out")
            continue
        train, evaluations = (read_log(log) if log.exists() else [] for log in logs)
        if not train and not evaluations:
            raise ValueError(f"{path}: no complete line in its logs yet")
        args = read_args(path / "args.json") | {
            "arm": re.sub(r"(_rate[^_]+)?_seed\d+$", "", path.name)
        }
        size = (
            f"{in_words('parameters', args['parameters'])} parameters"
            if args.get("parameters")
            else None
        )
        model = os.path.basename(args.get("model_name") or "")
        about = ", ".join(filter(None, (model, args.get("dataset_name"), size)))
        name = os.path.relpath(path, common)
        runs.append(Run(name, path, args, about, train, evaluations, (name,), name, len(runs)))
    return runs


MAY_DIFFER = set(  # of runs that are pooled: it is meant to, or changes nothing that is learnt
    "seed arm output_dir resume device parameters keep_checkpoints eval_iterations save_iterations report_to"
    " judge_timeout micro_batch_tokens max_concurrent_sequences judge_concurrency".split()
)


def values_of(args, flags):
    values = [
        {"num_examples": "all"}.get(flag, "default") if args[flag] is None else args[flag]
        for flag in flags
    ]
    return tuple(v if isinstance(v, int | float | str) else str(v) for v in values)


def in_words(flag, value, values=()):
    """A flag's value as a legend has it; of a path the last part that none of the other values has."""
    if isinstance(value, bool):
        return f"with{'' if value else 'out'} {flag.removeprefix('use_').replace('_', ' ')}"
    if flag == "parameters" and not isinstance(value, str):
        return f"{value / 1e6:.2f} M" if value < 1e9 else f"{value / 1e9:.2f} B"
    path, *others = (
        str(v).rstrip("/").split("/")[::-1] for v in (value, *(v for v in values if v != value))
    )
    return next(
        (
            part
            for i, part in enumerate(path)
            if all(other[i : i + 1] != [part] for other in others)
        ),
        path[0],
    )


def group_by(runs, flags):
    """The runs in order of the flags' values, and grouped by them. ValueError where args.json lacks a flag.

    A group's place is that among all runs of these folders: it keeps its colour whichever are drawn. Where its runs
    differ in other flags, its label says so.
    """
    if not flags:
        return runs
    for run in runs:
        if lacking := [flag for flag in flags if flag not in run.args]:
            raise ValueError(f"{run.path}: no --{lacking[0]} in its args.json")
        run.group = values_of(run.args, flags)
    study = {run.group for run in runs}
    for path in {path for run in runs for path in run.path.parent.glob("*/args.json")}:
        with suppress(ValueError, LookupError, OSError):  # not a run, or without these flags
            study.add(values_of(read_args(path), flags))
    order = sorted(study, key=lambda group: [(isinstance(value, str), value) for value in group])
    for group, pooled in groups_of(runs).items():
        columns = zip(flags, group, zip(*order, strict=True), strict=True)
        label = ", ".join(in_words(flag, value, set(column)) for flag, value, column in columns)
        others = sorted(set().union(*(run.args for run in pooled)) - MAY_DIFFER - set(flags))
        seen = {
            flag: {values_of({flag: None} | run.args, [flag])[0]: run for run in pooled}
            for flag in others
        }
        said = {
            flag: ", ".join(in_words(flag, v, vs) for v in vs)
            for flag, vs in seen.items()
            if len(vs) > 1
        }
        differs = "; ".join(f"{flag.replace('_', ' ')}: {words}" for flag, words in said.items())
        for run in pooled:
            run.label, run.place = f"{label} ({differs})".removesuffix(" ()"), order.index(group)
    return sorted(runs, key=lambda run: run.place)


def groups_of(runs):
    """{group: its runs}"""
    return {
        group: [run for run in runs if run.group == group]
        for group in dict.fromkeys(run.group for run in runs)
    }


def said(words, runs):
    """Those words, or what STORIES has for them."""
    stories = all(
        "creative" == (run.args.get("evaluator") or run.args.get("dataset_name")) for run in runs
    )
    return STORIES.get(words[words.find("(") + 1 :].rstrip(")"), words) if stories else words


def number(value):
    """A float; NaN for whatever is not a finite number."""
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else math.nan


def column(rows, key):
    return np.array([number(row.get(key)) for row in rows])


def with_number(rows, key):
    return [row for row in rows if math.isfinite(number(row.get(key)))]


def find_metrics(runs, log):
    """Keys of a log ("train" or "eval") with a finite number in some row of some run, in order of appearance."""
    rows = [row for run in runs for row in getattr(run, log)]
    keys = {
        key: None
        for row in rows
        for key in row
        if key not in COUNTERS and math.isfinite(number(row[key]))
    }
    intervals = {key + end for key in keys for end in ("_low", "_high")} if log == "eval" else set()
    return [key for key in keys if key not in intervals]


def log_of(runs, key):
    """Where a metric is read: accuracies in the evaluations, the rest in training if it is there. Raises ValueError."""
    metrics = {log: find_metrics(runs, log) for log in ("train", "eval")}
    for log in ("eval", "train") if key.startswith(("accuracy", "pass")) else ("train", "eval"):
        if key in metrics[log]:
            return log
    raise ValueError(
        f"--metrics {key}: not in the logs, which have {', '.join(sorted({*sum(metrics.values(), [])}))}"
    )


def smooth(values):
    """Centred running mean of the finite values among about a fifteenth of the points; a gap stays a gap."""
    finite, window = np.isfinite(values), np.ones(2 * (len(values) // 30) + 1)
    total, count = (
        np.convolve(part, window, "same") for part in (np.where(finite, values, 0.0), finite)
    )
    return np.where(finite, total / np.maximum(count, 1), np.nan)


def pool(logs, *keys):
    """Of several runs' rows, step by step over those that have the step: mean, least and greatest of each key."""
    logs = [{row["step"]: row for row in rows} for rows in logs]
    for key in keys:
        table = [
            column([rows.get(step, {}) for step in sorted(set().union(*logs))], key)
            for rows in logs
        ]
        table = np.ma.masked_invalid(table)
        yield [of(axis=0).filled(np.nan) for of in (table.mean, table.min, table.max)]


def transcripts(run, folder):
    """{step: file} of rollouts/ or eval/; the file of an evaluation without a row is not finished."""
    files = {
        int(path.stem[5:]): path
        for path in run.path.glob(f"{folder}/step_*.jsonl")
        if path.stem[5:].isdecimal()
    }
    done = (
        files if folder == "rollouts" else [row["step"] for row in run.eval if row["step"] in files]
    )
    return {step: files[step] for step in done}


def first_answers(path):
    """{question: row} of an eval/step_*.jsonl, its last question first.

    A question is the same if its id and gold answer are; of several samples of a question the first one counts.
    """
    return {(str(row["id"]), str(row.get("gold"))): row for row in reversed(read_log(path, "id"))}


def compare(label, before, after, runs):
    """Paired comparison of two eval/step_*.jsonl of these runs: a line each for strict and flexible accuracy."""
    before, after, lines = first_answers(before), first_answers(after), []
    for kind in ACCURACIES:
        key = f"correct_{kind}"
        pairs = [
            (before[question].get(key), after[question].get(key))
            for question in before.keys() & after.keys()
        ]
        pairs = [pair for pair in pairs if None not in pair]
        fixed, broken = pairs.count((False, True)), pairs.count((True, False))
        if pairs:
            what, p = (
                f"{fixed} fixed, {broken} broken of {len(pairs)} questions",
                mcnemar(fixed, broken),
            )
            lines.append(
                f"{label}, {said(kind, runs)}: {what}, exact McNemar p {f'= {p:.2g}' if p else '< 1e-300'}"
            )
    return lines or [f"note: {label}: no question in common, not compared"]


def compare_runs(runs):
    """Each run's last evaluation against its own first, and the last of every further run against that of the first."""
    lines, last = [], []
    for run in runs:
        files = transcripts(run, "eval")
        steps = list(files)
        if len(steps) > 1:
            lines += compare(
                f"{run.name}, step {steps[0]} -> {steps[-1]}",
                files[steps[0]],
                files[steps[-1]],
                [run],
            )
        if steps:
            last.append((f"{run.name} (step {steps[-1]})", files[steps[-1]], run))
    for name, path, run in last[1:]:
        lines += compare(f"{last[0][0]} -> {name}", last[0][1], path, [last[0][2], run])
    return lines


def percent(row, key):
    """Its value and its interval"""
    value, low, high = (100 * number(row.get(key + end)) for end in ("", "_low", "_high"))
    return f"{value:.1f}", f"[{low:.1f}, {high:.1f}]"


def accuracy_lines(run):
    """From what to what: a line for strict and one for flexible accuracy, out of the first and last evaluation."""
    lines = []
    for kind, key in ACCURACIES.items():
        if rows := with_number(run.eval, key):
            ends = [rows[0], rows[-1]] if len(rows) > 1 else rows
            values, intervals = zip(*(percent(row, key) for row in ends), strict=True)
            n = " and ".join(dict.fromkeys(str(row.get("n")) for row in ends))
            n += f", {run.args['eval_split']}" if "eval_split" in run.args else ""
            word = "interval" if len(ends) == 1 else "intervals"
            change = " -> ".join(f"{value} %" for value in values)
            what = said(f"accuracy ({kind})", [run])
            lines.append(f"{what}  {change}  (n = {n}, 95 % {word} {' and '.join(intervals)})")
    return lines or ["not evaluated yet"]


def last_evaluations(runs):
    """{group: the last row with an accuracy of each of its runs}. ValueError where a run was not evaluated."""
    for run in runs:
        if not with_number(run.eval, "accuracy"):
            raise ValueError(f"{run.path}: not evaluated")
    return {
        group: [with_number(run.eval, "accuracy")[-1] for run in same]
        for group, same in groups_of(runs).items()
    }


def end_table(runs, flags, keys):
    """Markdown: each run's metrics at its end: the last evaluation, or the mean over the last tenth of training."""
    lines = [
        f"| {', '.join(flags) or 'run'} | {' | '.join(keys)} |",
        "|---" * (len(keys) + 1) + "|",
    ]
    logs = {key: log_of(runs, key) for key in keys}

    def end(run, key):
        rows = with_number(getattr(run, logs[key]), key)
        if not rows:
            return "none"
        if logs[key] == "train":
            return f"{column(rows[-math.ceil(len(rows) / 10) :], key).mean():.3g}"
        value, low, high = (number(rows[-1].get(key + which)) for which in ("", "_low", "_high"))
        return f"{value:.3g} [{low:.3g}, {high:.3g}]" if math.isfinite(low) else f"{value:.3g}"

    for same in groups_of(runs).values():
        cells = [", ".join(end(run, key) for run in same) for key in keys]
        lines.append(f"| {same[0].label} | {' | '.join(cells)} |")
    return "\n".join(lines)
