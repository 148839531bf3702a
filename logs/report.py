"""Writes report.html, a page about one run that opens offline: its curves and its completions.

The page is report.html beside this file. This module collects what it shows. Texts of a run are
stored as JSON without "<", so that a text with "</script>" cannot end the page's script element.
The script inserts them as text, so that nothing of a run is ever markup.
"""

import base64
import io
import itertools
import json
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np
from matplotlib import rc_context

from logs import diagnose, jsonl, read, summary

# The greatest sizes of two parts of the page, in bytes. The curves take less than a million.
MAX_ROLLOUT_BYTES = 11_000_000
MAX_QUESTION_BYTES = 7_000_000

# What a transcript says of each token of some completions, under "tokens": its log-prob when it was
# sampled, how the iteration's updates changed that, and how far it is then from the reference's
# (which a run without a reference lacks). All are in nats.
MEASURES = ("logp", "change", "log_ratio")
PAGE_UNIT = 1e-4  # nats; the page has whole numbers of it, which take fewer bytes
SCALE_SHARE = 0.98  # the share of an iteration's tokens whose values lie within a colour scale


def write(run, panels, comparisons):
    """Write report.html into the directory of the run and return its path.

    Args:
        panels: the curves, a matplotlib figure for each panel.
        comparisons: the lines of summary.compare_runs.

    Raises:
        ValueError: a transcript of the run is damaged.
    """
    rollouts = read.transcripts(run, "rollouts")
    evaluations = read.transcripts(run, "eval")
    # A run without rollouts, such as SFT, shows its evaluations instead.
    answers = rollouts or evaluations
    largest = max(answers.values(), key=os.path.getsize, default=None)
    largest_size = len(encode(step_of_page(largest, 0, 1))) if largest else 0
    steps = choose_steps(answers, largest_size, MAX_ROLLOUT_BYTES)
    # The page holds only the questions whose verdict changed. So the files of the evaluations may
    # be larger than their part of the page. The factor 3 is a guess: if the questions still take
    # too much, changed_questions keeps only the first ones.
    largest_size = max(map(os.path.getsize, evaluations.values()), default=0)
    compared_steps = choose_steps(evaluations, largest_size, 3 * MAX_QUESTION_BYTES)
    args_path = run.path / "args.json"
    logs = diagnose.Logs.of(run)
    diagnosis = diagnose.diagnose(logs)
    data = {  # The script of the page reads these keys.
        "name": run.name,
        "about": run.description,
        "diagnosis": diagnose.headline(logs, diagnosis),
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "lines": comparisons,
        "panels": [image(panel) for panel in panels],
        "record": json.loads(args_path.read_bytes()) if args_path.exists() else {},
        "ends": summary.first_and_last(run.rows["eval"]),
        "sampled": bool(rollouts),  # whether the steps below are iterations, not evaluations
        "all": len(answers),  # how many steps there are, of which the page shows some
        "steps": [step_of_page(answers[step], step, len(steps)) for step in steps],
        "evaluated": len(evaluations),  # how many evaluations there are, of which some are compared
        "compared": compared_steps,
        "changes": changed_questions([evaluations[step] for step in compared_steps]),
    }
    template = Path(__file__).with_suffix(".html").read_text("utf-8")
    page_path = run.path / "report.html"
    jsonl.replace(page_path, template.replace("{DATA}", encode(data)))
    return page_path


def encode(value):
    """Return the value as JSON without "<", so that it cannot end the page's script element."""
    return jsonl.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def image(figure):
    """Return a figure of one panel as the page's alternative text and source of an image."""
    svg = io.BytesIO()
    with rc_context({"svg.hashsalt": "report"}):  # Equal logs give equal bytes.
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    source = "data:image/svg+xml;base64," + base64.b64encode(svg.getvalue()).decode()
    return {"alt": figure.axes[0].get_title(loc="left"), "src": source}


def choose_steps(steps, largest_size, max_bytes):
    """Return evenly spread steps, as many as fit into max_bytes if each takes largest_size bytes.

    The first and the last step are always among them.
    """
    steps = sorted(steps)
    num_fitting = max_bytes // max(1, largest_size)
    num_chosen = min(len(steps), max(2, num_fitting))
    last = len(steps) - 1
    return [steps[i * last // max(1, num_chosen - 1)] for i in range(num_chosen)]


def first_that_fit(problems, max_bytes):
    """Return the first problems, as many as fit into max_bytes of the page."""
    sizes = itertools.accumulate(len(encode(problem)) for problem in problems)
    return [problem for problem, size in zip(problems, sizes, strict=True) if size <= max_bytes]


# ---- completions


def problem_of(rows):
    """Return a prompt with its completions: what they share, and under "rows" what they do not."""
    problem = {key: rows[0].get(key) for key in ("id", "prompt", "gold")}
    completions = []
    for row in rows:
        completion = {key: row[key] for key in row if key not in problem}
        if row.get("tokens"):
            completion["tokens"] = tokens_of_page(row["tokens"])
        completions.append(completion)
    problem["rows"] = completions
    return problem


def step_of_page(path, step, num_steps):
    """Return the prompts of one transcript, with their completions.

    It has the first prompts, as many as fit into MAX_ROLLOUT_BYTES / num_steps. Those whose tokens
    were scored stand before the others, and so do such completions of a prompt. "all" is how many
    prompts the transcript has.
    """
    rows = read.read_log(path, "id")
    groups = [list(group) for _, group in itertools.groupby(rows, lambda row: str(row["id"]))]
    groups.sort(key=lambda group: not any(map(has_tokens, group)))
    problems = [problem_of(sorted(group, key=lambda row: not has_tokens(row))) for group in groups]
    prompts = first_that_fit(problems, MAX_ROLLOUT_BYTES / num_steps)
    return {"step": step, "all": len(groups), "prompts": prompts, "scales": token_scales(rows)}


def has_tokens(row):
    return bool(row.get("tokens"))


def tokens_of_page(tokens):
    """Return the tokens of a completion with their values as whole numbers of PAGE_UNIT."""
    in_page = {"text": tokens["text"]}
    for measure in MEASURES:
        if measure in tokens:
            values = tokens[measure]
            in_page[measure] = [v if v is None else round(v / PAGE_UNIT) for v in values]
    return in_page


def token_scales(rows):
    """Return {measure: the value, in nats, from which on the colour of a token is the strongest}.

    It is the same for all completions of an iteration, so that they can be compared. Few tokens
    have values beyond it, and one of them alone cannot make all others look pale.
    """
    scales = {}
    for measure in MEASURES:
        sizes = []
        for row in filter(has_tokens, rows):
            sizes += [abs(value) for value in row["tokens"].get(measure, []) if value is not None]
        if sizes:
            # Where nearly all values are 0, as those of a model that is sure, the rest is shown.
            scales[measure] = round(float(np.quantile(sizes, SCALE_SHARE)), 4) or max(sizes)
    return scales


# ---- before and after


def changed_questions(paths):
    """Compare the transcripts of evaluations on the questions that all of them share.

    Returns "verdicts", {key: for each evaluation the verdict on each question}, and "questions",
    the questions on which a verdict differs, with their answer in each evaluation.
    """
    evaluations = [read.first_answers(path) for path in paths]
    # first_answers has the last question first. The page has the order of the file.
    order = reversed(evaluations[0]) if evaluations else []
    shared = []  # for each shared question its row in each evaluation
    for question in order:
        if all(question in rows for rows in evaluations):
            shared.append([rows[question] for rows in evaluations])
    keys = [f"correct_{kind}" for kind in summary.ACCURACIES]
    verdicts = {key: [] for key in keys}
    for i in range(len(evaluations)):
        for key in keys:
            verdicts[key].append([rows[i].get(key) for rows in shared])
    changed = [problem_of(rows) for rows in shared if has_changed(rows, keys)]
    return {"verdicts": verdicts, "questions": first_that_fit(changed, MAX_QUESTION_BYTES)}


def has_changed(rows, keys):
    """Return whether the rows of one question disagree on a verdict."""
    first_verdicts = [rows[0].get(key) for key in keys]
    for row in rows:
        if [row.get(key) for key in keys] != first_verdicts:
            return True
    return False
