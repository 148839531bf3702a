"""What plotter.py prints of runs: their accuracies, and how they differ question by question."""

import os
import re
import textwrap
from pathlib import Path

import pandas as pd
from filelock import FileLock, Timeout
from scipy.stats import binomtest

from logs.diagnose import Logs, diagnose
from logs.read import first_answers, load_run, rows_with_number, to_float, transcripts

ACCURACIES = {"strict": "accuracy", "flexible": "accuracy_flexible"}  # {kind: key in the logs}


def first_and_last(rows):
    return [rows[0], rows[-1]] if len(rows) > 1 else rows


def accuracy_lines(run):
    """Return a line for strict and one for flexible accuracy, at the first and last evaluation."""
    lines = []
    for kind, key in ACCURACIES.items():
        rows = rows_with_number(run.rows["eval"], key)
        if rows:
            lines.append(f"accuracy ({kind})  {accuracy_line(run, key, first_and_last(rows))}")
    if not run.rows["eval"]:
        return ["not evaluated yet"]
    return lines


def accuracy_line(run, key, rows):
    """Return an accuracy in these rows of the evaluation log, with n and intervals."""
    change = " -> ".join(f"{row[key]:.1%}" for row in rows)
    intervals = []
    for row in rows:
        low = to_float(row.get(f"{key}_low"))
        high = to_float(row.get(f"{key}_high"))
        intervals.append(f"[{100 * low:.1f}, {100 * high:.1f}]")
    sizes = " and ".join(dict.fromkeys(str(row.get("n")) for row in rows))
    split = f", {run.args['eval_split']}" if "eval_split" in run.args else ""
    return f"{change}  (n = {sizes}{split}, 95% CI {' and '.join(intervals)})"


def compare_runs(runs):
    """Compare the first and the last evaluation of each run, and then the runs with each other.

    The last evaluation of the first run is compared with that of every further run.
    """
    lines = []
    last_evaluations = []  # (name of the run with the step, path of the transcript)
    for run in runs:
        paths = transcripts(run, "eval")
        if len(paths) > 1:
            first, last = first_and_last(list(paths))
            label = f"{run.name}, step {first} -> {last}"
            lines += compare(label, paths[first], paths[last])
        if paths:
            step, path = list(paths.items())[-1]
            last_evaluations.append((f"{run.name} (step {step})", path))
    for name, path in last_evaluations[1:]:
        first_name, first_path = last_evaluations[0]
        lines += compare(f"{first_name} -> {name}", first_path, path)
    return lines


def compare(label, path_before, path_after):
    """Compare two transcripts of evaluations, question by question.

    Returns a line for strict and one for flexible accuracy, or a note if they share no question.
    """
    old_answers = first_answers(path_before)
    new_answers = first_answers(path_after)
    questions = old_answers.keys() & new_answers.keys()
    lines = []
    for kind in ACCURACIES:
        key = f"correct_{kind}"
        pairs = [(old_answers[name].get(key), new_answers[name].get(key)) for name in questions]
        pairs = [pair for pair in pairs if None not in pair]  # null: the verdict is not known
        if pairs:
            num_fixed = pairs.count((False, True))
            num_broken = pairs.count((True, False))
            lines.append(
                f"{label}, {kind}: {num_fixed} fixed, {num_broken} broken of {len(pairs)}"
                f" questions, exact McNemar p = {mcnemar(num_fixed, num_broken):.2g}"
            )
    if not questions:
        return [f"note: {label}: no question in common, not compared"]
    return lines


def fixed_answer(run):
    """Return lines with a question and its answers at the first and at the last evaluation.

    It is the first question of the transcript that only the last evaluation has right. Without one
    there are no lines.
    """
    paths = list(transcripts(run, "eval").items())
    if len(paths) < 2:
        return []
    (first_step, first_path), (last_step, last_path) = first_and_last(paths)
    old_answers = first_answers(first_path)
    for name, new in reversed(first_answers(last_path).items()):
        old = old_answers.get(name)
        if old and new["correct_strict"] and old["correct_strict"] is False:
            questions = re.findall(r"[^\n<>|]+\?", old["prompt"])
            question = questions[-1] if questions else old["prompt"]
            return [
                "",
                printable(textwrap.shorten(question, 110, placeholder=" ...")),
                f"\n--- step {first_step}",
                printable(old["completion"]),
                f"\n--- step {last_step}",
                printable(new["completion"]),
                "",
            ]
    return []


def printable(text):
    """Replace control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def mcnemar(num_fixed, num_broken):
    """Return the exact two-sided p-value of McNemar's test on the pairs that changed."""
    if num_fixed + num_broken == 0:
        return 1.0
    return float(binomtest(num_fixed, num_fixed + num_broken).pvalue)


# ---- the list of runs


def table_of_runs(folder):
    """Return a table with a line for each run in a folder and the folders in it.

    Raises:
        ValueError: there is none, or one has damaged logs.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"{folder}: there is no such directory")
    paths = sorted(path.parent for path in Path(folder).rglob("args.json"))
    if not paths:
        raise ValueError(f"{folder}: no run in this folder")
    lines = {}
    for path in paths:
        name = os.path.relpath(path, folder)
        lines[name] = line_of_run(load_run(path, name))
    return pd.DataFrame.from_dict(lines, orient="index").to_string()


def line_of_run(run):
    """Return {column: text} of the table of runs."""
    train = rows_with_number(run.rows["train"], "step")
    step = train[-1]["step"] if train else 0
    # How long expert iteration and a run of SFT without --num_updates are, args.json does not say.
    num_steps = run.args.get("num_train_iters") or run.args.get("num_updates")
    if run.args.get("eval_only"):
        num_steps = 0
    return {
        "step": f"{step} of {num_steps}" if num_steps else f"{step}",
        "reward": last_number(train, "reward", ".3f"),
        "KL": last_number(train, "kl_per_token", ".4f"),
        "accuracy": last_number(run.rows["eval"], "accuracy", ".1%"),
        "state": state_of(run, step, num_steps),
    }


def last_number(rows, key, form):
    rows = rows_with_number(rows, key)
    return format(rows[-1][key], form) if rows else "-"


def state_of(run, step, num_steps):
    lock_path = run.path / "lock"
    if lock_path.exists() and is_locked(lock_path):
        return "running"
    if any(finding.rule == "divergence" for finding in diagnose(Logs.of(run)).findings):
        return "diverged"
    if num_steps is None:
        return "not running"
    return "finished" if step >= num_steps else "stopped"


def is_locked(path):
    """Whether the process that writes a run holds this lock."""
    try:
        with FileLock(path, timeout=0):
            return False
    except Timeout:
        return True
