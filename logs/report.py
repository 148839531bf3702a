"""Shows one run to its reader: report.html, which opens offline, and completions in a terminal.

The page is report.html beside this file. This module collects what it shows. Texts of a run are
stored as JSON without "<", so that a text with "</script>" cannot end the page's script element.
The script inserts them as text, so that nothing of a run is ever markup.
"""

import base64
import io
import itertools
import json
import os
import shutil
import textwrap
from pathlib import Path

from matplotlib import rc_context

from logs import jsonl, read

# The greatest sizes of two parts of the page, in bytes. The dashboard takes less than a million.
MAX_ROLLOUT_BYTES = 11_000_000
MAX_QUESTION_BYTES = 7_000_000
NUM_SHOWN = 3  # how many of the worst and of the best completions a terminal shows
SHOWN_KEYS = ("reward", "advantage", "correct_strict", "length", "finished", "gold")


# ---- report.html


def write(run, dashboard, comparisons):
    """Write report.html into the directory of the run and return its path.

    dashboard: a matplotlib figure, whose panels become separate images. It is changed.
    comparisons: the lines of read.compare_runs.

    Raises:
        ValueError: a transcript of the run is damaged.
    """
    rollouts = read.transcripts(run, "rollouts")
    evaluations = read.transcripts(run, "eval")
    # A run without rollouts, such as SFT, shows its evaluations instead.
    answers = rollouts or evaluations
    steps = choose_steps(answers, MAX_ROLLOUT_BYTES)
    # The page holds only the questions whose verdict changed. So the files of the evaluations may
    # be larger than their part of the page. The factor 3 is a guess: if the questions still take
    # too much, changed_questions keeps only the first ones.
    compared_steps = choose_steps(evaluations, 3 * MAX_QUESTION_BYTES)
    args_path = run.path / "args.json"
    data = {  # The script of the page reads these keys.
        "name": run.name,
        "about": run.description,
        "lines": comparisons,
        "panels": panel_images(dashboard),
        "record": json.loads(args_path.read_bytes()) if args_path.exists() else {},
        "ends": read.first_and_last(run.rows["eval"]),
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


def choose_steps(paths, max_bytes):
    """Return evenly spread steps of {step: path} whose files together take at most max_bytes.

    The first and the last step are always among them.
    """
    steps = sorted(paths)
    largest = max(map(os.path.getsize, paths.values()), default=1)
    num_fitting = max_bytes // max(1, largest)
    num_chosen = min(len(steps), max(2, num_fitting))
    last = len(steps) - 1
    return [steps[i * last // max(1, num_chosen - 1)] for i in range(num_chosen)]


def first_that_fit(problems, max_bytes):
    """Return the first problems, as many as fit into max_bytes of the page."""
    sizes = itertools.accumulate(len(encode(problem)) for problem in problems)
    return [problem for problem, size in zip(problems, sizes, strict=True) if size <= max_bytes]


def problem_of(rows):
    """Return a prompt with its completions: what they share, and under "rows" what they do not."""
    problem = {key: rows[0].get(key) for key in ("id", "prompt", "gold")}
    completions = []
    for row in rows:
        completions.append({key: row[key] for key in row if key not in problem})
    problem["rows"] = completions
    return problem


def step_of_page(path, step, num_steps):
    """Return the prompts of one transcript, with their completions.

    It has the first prompts, as many as fit into MAX_ROLLOUT_BYTES / num_steps.
    "all" is how many prompts the transcript has.
    """
    rows = read.read_log(path, "id")
    groups = itertools.groupby(rows, lambda row: str(row["id"]))
    problems = [problem_of(list(group_rows)) for _, group_rows in groups]
    prompts = first_that_fit(problems, MAX_ROLLOUT_BYTES / num_steps)
    return {"step": step, "all": len(problems), "prompts": prompts}


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
    keys = [f"correct_{kind}" for kind in read.ACCURACIES]
    verdicts = {}
    for key in keys:
        # The page needs a list for each evaluation, even if they share no question.
        verdicts[key] = [[rows[i].get(key) for rows in shared] for i in range(len(evaluations))]
    changed = [problem_of(rows) for rows in shared if has_changed(rows, keys)]
    return {"verdicts": verdicts, "questions": first_that_fit(changed, MAX_QUESTION_BYTES)}


def has_changed(rows, keys):
    """Return whether the rows of one question disagree on a verdict."""
    return any(row.get(key) != rows[0].get(key) for row in rows for key in keys)


def panel_images(figure):
    """Return each panel as an image of its own, so that a narrow screen can stack them.

    The images are in the format of the page: alternative text, source, width and height in pixels.
    """
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # A panel must not move when the others become invisible.
    images = []
    artists = figure.get_children()
    for ax in figure.axes:
        for artist in artists:
            artist.set_visible(artist is ax)
        pixels_to_inches = figure.dpi_scale_trans.inverted()
        box = ax.get_tightbbox().padded(6).transformed(pixels_to_inches)
        images.append(
            {
                "alt": ax.get_title(),
                "src": svg_source(figure, box),
                "width": 96 * box.width,  # CSS has 96 pixels an inch
                "height": 96 * box.height,
            }
        )
    return images


def svg_source(figure, box):
    """Return what is visible inside the box, in inches, as an SVG in a data URL."""
    svg = io.BytesIO()
    with rc_context({"svg.hashsalt": "report"}):  # Equal logs give equal bytes.
        figure.savefig(
            svg, format="svg", bbox_inches=box, transparent=True, metadata={"Date": None}
        )
    return "data:image/svg+xml;base64," + base64.b64encode(svg.getvalue()).decode()


# ---- in a terminal


def show(run, step):
    """Return the worst and the best completions of an iteration as text, wrapped for the terminal.

    step: the iteration; -1 is the last one.

    Raises:
        ValueError: the run has no transcript of it, or a damaged one, or one without rewards.
    """
    paths = read.transcripts(run, "rollouts")
    last_step = max(paths, default=None)
    if step == -1 and paths:
        step = last_step
    if step not in paths:
        raise ValueError(
            f"--show {step}: no such iteration in rollouts/; the last one is {last_step}"
        )
    rows = read.rows_with_number(read.read_log(paths[step], "id"), "reward")
    if not rows:
        raise ValueError(f"--show {step}: no completion of this iteration has a reward")
    rows.sort(key=lambda row: (row["reward"], read.to_float(row.get("advantage"))))
    worst = rows[:NUM_SHOWN]
    best = rows[NUM_SHOWN:][-NUM_SHOWN:]  # the last three, without those already among the worst
    title = (
        f"iteration {step}: the worst and the best of {len(rows)} completions by reward, "
        "the best at the end"
    )
    text = "\n\n".join([title, *map(completion_text, worst + best)])
    width = shutil.get_terminal_size().columns
    return "\n".join(textwrap.fill(line, width) for line in make_visible(text).split("\n"))


def completion_text(row):
    """Return a completion as text: its numbers, the end of its prompt, and what was sampled."""
    facts = ", ".join(f"{key} {row[key]}" for key in SHOWN_KEYS if key in row)
    prompt_end = str(row.get("prompt"))[-240:]
    return f"--- {facts}\n> ... {prompt_end}\n{row.get('completion')}"


def make_visible(text):
    """Escape everything that does not print, so that no completion can steer the terminal."""
    return "".join(
        char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text
    )
