"""One run for its reader: report.html, which opens offline, and the completions of an iteration in a terminal.

The page is report.html beside this file; what it shows is collected here. What a run wrote travels as JSON that cannot
end the element it stands in, and the page's script puts it in place as text: nothing of it is ever markup.
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

ROLLOUTS, QUESTIONS = (
    11_000_000,
    7_000_000,
)  # bytes of the page at most; the dashboard takes less than a million


def write(run, dashboard, lines):
    """Write report.html into the run's directory. dashboard: a figure, which is taken apart; lines: what was found."""
    sampled, evaluated = read.transcripts(run, "rollouts"), read.transcripts(run, "eval")
    shown = (
        sampled or evaluated
    )  # a run that does not sample to learn has the answers of its evaluations
    steps, compared = (
        choose(shown, ROLLOUTS),
        choose(evaluated, 3 * QUESTIONS),
    )  # of these only what changed is kept
    record = run.path / "args.json"
    data = {
        "name": run.name,
        "about": run.about,
        "lines": lines,
        "panels": panels_of(dashboard),
        "record": json.loads(record.read_bytes()) if record.exists() else {},
        "ends": [*run.eval[:1], *run.eval[1:][-1:]],
        "sampled": bool(sampled),
        "all": len(shown),
        "steps": [iteration(shown[step], step, steps) for step in steps],
        "evaluated": len(evaluated),
        "compared": compared,
        "changes": changes([evaluated[step] for step in compared]),
    }
    page = Path(__file__).with_suffix(".html").read_text("utf-8").replace("{DATA}", encode(data))
    jsonl.replace(run.path / "report.html", page)
    return run.path / "report.html"


def encode(value):
    return jsonl.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def choose(files, room):
    """Steps whose transcripts take at most so many bytes: evenly spread, the first and the last always."""
    steps, largest = sorted(files), max(map(os.path.getsize, files.values()), default=1)
    k = min(len(steps), max(2, room // max(1, largest)))
    return [steps[i * (len(steps) - 1) // max(1, k - 1)] for i in range(k)]


def fit(problems, room):
    """The first of them, as many as that many bytes hold."""
    sizes = itertools.accumulate(len(encode(problem)) for problem in problems)
    return [problem for problem, size in zip(problems, sizes, strict=True) if size <= room]


def problem_of(rows):
    """A prompt with its completions."""
    problem = {key: rows[0].get(key) for key in ("id", "prompt", "gold")}
    return problem | {
        "rows": [{key: row[key] for key in row if key not in problem} for row in rows]
    }


def iteration(path, step, steps):
    rows = read.read_log(path, "id")
    prompts = [
        problem_of(list(same)) for _, same in itertools.groupby(rows, lambda row: str(row["id"]))
    ]
    return {"step": step, "all": len(prompts), "prompts": fit(prompts, ROLLOUTS / len(steps))}


def changes(paths):
    """Each question's verdict in each evaluation, and the questions on which verdicts differ, with their answers."""
    answers = [read.first_answers(path) for path in paths]
    order = reversed(answers[0]) if answers else []  # that of the file
    shared = [
        [rows[question] for rows in answers]
        for question in order
        if all(question in rows for rows in answers)
    ]
    keys = [f"correct_{kind}" for kind in read.ACCURACIES]
    verdicts = {
        key: [[row.get(key) for row in rows] for rows in zip(*shared, strict=True)] for key in keys
    }
    moved = [
        rows for rows in shared if any(len({row.get(key) for row in rows}) > 1 for key in keys)
    ]
    return {"verdicts": verdicts, "questions": fit([problem_of(rows) for rows in moved], QUESTIONS)}


def panels_of(figure):
    """Each panel as an image of its own, so that a narrow screen can put them below each other."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # what stays visible must not move
    panels, parts = [], figure.get_children()
    for ax in figure.axes:
        for part in parts:
            part.set_visible(part is ax)
        box, svg = (
            ax.get_tightbbox().padded(6).transformed(figure.dpi_scale_trans.inverted()),
            io.BytesIO(),
        )
        with rc_context({"svg.hashsalt": "report"}):  # equal logs give equal bytes
            figure.savefig(
                svg, format="svg", bbox_inches=box, transparent=True, metadata={"Date": None}
            )
        source = "data:image/svg+xml;base64," + base64.b64encode(svg.getvalue()).decode()
        panels.append(
            {
                "alt": ax.get_title(),
                "src": source,
                "width": 96 * box.width,
                "height": 96 * box.height,
            }
        )
    return panels


def show(run, step):
    """The worst and the best completions of an iteration (-1: of the last) as text, wrapped for the terminal."""
    files, width = read.transcripts(run, "rollouts"), shutil.get_terminal_size().columns
    step = max(files, default=-1) if step == -1 else step
    if step not in files:
        raise ValueError(
            f"--show {step}: no such iteration in rollouts/; the last one is {max(files, default=None)}"
        )
    rows = read.with_number(read.read_log(files[step], "id"), "reward")
    rows.sort(key=lambda row: (row["reward"], read.number(row.get("advantage"))))
    text = f"iteration {step}: the worst and the best of {len(rows)} completions by reward, the best at the end"
    for row in rows[:3] + rows[3:][-3:]:
        said = "reward", "advantage", "correct_strict", "length", "finished", "gold"
        text += f"\n\n--- {', '.join(f'{key} {row[key]}' for key in said if key in row)}"
        text += f"\n> ... {str(row.get('prompt'))[-240:]}\n{row.get('completion')}"
    visible = "".join(
        c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text
    )  # nothing steers a terminal
    return "\n".join(textwrap.fill(line, width) for line in visible.split("\n"))
