"""Shows one run to its reader: report.html, which opens offline, and completions in a terminal.

The page is report.html beside this file. This module collects what it shows. Texts of a run are
stored as JSON without "<", so that a text with "</script>" cannot end the page's script element.
The script inserts them as text, so that nothing of a run is ever markup.
"""

import base64
import io
import itertools
import json
import math
import os
import shutil
import textwrap
from pathlib import Path

import numpy as np
from matplotlib import rc_context

from logs import jsonl, read

# The greatest sizes of two parts of the page, in bytes. The dashboard takes less than a million.
MAX_ROLLOUT_BYTES = 11_000_000
MAX_QUESTION_BYTES = 7_000_000
NUM_SHOWN = 3  # how many of the worst and of the best completions a terminal shows
SHOWN_KEYS = ("reward", "advantage", "correct_strict", "length", "finished", "gold")

# What a transcript says of each token of some completions, under "tokens": its log-prob when it was
# sampled, how the iteration's updates changed that, and how far it is then from the reference's
# (which a run without a reference lacks). All are in nats.
MEASURES = ("logp", "change", "log_ratio")
PAGE_UNIT = 1e-4  # nats; the page has whole numbers of it, which take fewer bytes
SCALE_SHARE = 0.98  # the share of an iteration's tokens whose values lie within a colour scale
# A terminal shows a token in black on one of xterm's 256 colours, which stand here from the weakest
# effect to the strongest. A token without effect is black on pale grey, so that the colours mean
# the same in light and in dark terminals. The contrast is at least 5.9 to 1.
NEUTRAL = 255
MORE_LIKELY = (153, 111, 75, 33)  # blue
LESS_LIKELY = (223, 216, 209, 202)  # orange


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
    largest = max(answers.values(), key=os.path.getsize, default=None)
    largest_size = len(encode(step_of_page(largest, 0, 1))) if largest else 0
    steps = choose_steps(answers, largest_size, MAX_ROLLOUT_BYTES)
    # The page holds only the questions whose verdict changed. So the files of the evaluations may
    # be larger than their part of the page. The factor 3 is a guess: if the questions still take
    # too much, changed_questions keeps only the first ones.
    largest_size = max(map(os.path.getsize, evaluations.values()), default=0)
    compared_steps = choose_steps(evaluations, largest_size, 3 * MAX_QUESTION_BYTES)
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
    rows = read_completions(path)
    groups = groups_of_prompts(rows)
    groups.sort(key=lambda group: not has_tokens(group))
    problems = []
    for group in groups:
        problems.append(problem_of(sorted(group, key=lambda row: not row.get("tokens"))))
    prompts = first_that_fit(problems, MAX_ROLLOUT_BYTES / num_steps)
    scales = token_scales(rows)
    return {"step": step, "all": len(groups), "prompts": prompts, "scales": scales}


def read_completions(path):
    """Return the rows of a transcript.

    Raises:
        ValueError: it is damaged.
    """
    rows = read.read_log(path, "id")
    for row in rows:
        if row.get("tokens") and not are_valid_tokens(row["tokens"]):
            raise ValueError(
                f'{path}: the "tokens" of a completion of {row["id"]!r} are not lists of equal '
                "length, of texts and of numbers; remove this key from the file"
            )
    return rows


def are_valid_tokens(tokens):
    """Return whether these are lists of equal length, of texts and of finite numbers or null."""
    if not isinstance(tokens, dict):
        return False
    texts = tokens.get("text")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return False
    for measure in MEASURES:
        values = tokens.get(measure)
        if measure == "log_ratio" and values is None:
            continue
        if not isinstance(values, list) or len(values) != len(texts):
            return False
        numbers = [value for value in values if value is not None]
        if not all(math.isfinite(read.to_float(number)) for number in numbers):
            return False
    return True


def groups_of_prompts(rows):
    """Return the completions of each prompt as a list of their own."""
    groups = itertools.groupby(rows, lambda row: str(row["id"]))
    return [list(group) for _, group in groups]


def has_tokens(rows):
    return any(row.get("tokens") for row in rows)


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
        for row in rows:
            values = (row.get("tokens") or {}).get(measure, [])
            sizes += [abs(value) for value in values if value is not None]
        if sizes:
            # Where nearly all values are 0, as those of a model that is sure, the rest is shown.
            scales[measure] = round(float(np.quantile(sizes, SCALE_SHARE)), 4) or max(sizes)
    return scales


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


def can_color(stream):
    """Return whether colours can be shown: on a terminal whose user has not turned them off."""
    is_turned_off = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not is_turned_off


def show(run, step, in_color=False):
    """Return the worst and the best completions of an iteration as text, wrapped for the terminal.

    step: the iteration; -1 is the last one.
    in_color: also return those of the first prompt whose tokens were scored after the update, with
        the colours of a terminal.

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
    all_rows = read_completions(paths[step])
    rows = read.rows_with_number(all_rows, "reward")
    if not rows:
        raise ValueError(f"--show {step}: no completion of this iteration has a reward")
    title = (
        f"iteration {step}: the worst and the best of {len(rows)} completions by reward, "
        "the best at the end"
    )
    width = shutil.get_terminal_size().columns
    blocks = [wrap(title, width)]
    for row in worst_and_best(rows):
        text = f"{facts_text(row)}\n{prompt_text(row)}\n{row.get('completion')}"
        blocks.append(wrap(text, width))
    scored_rows = [row for row in rows if row.get("tokens")]
    if in_color and scored_rows:
        scale = token_scales(all_rows).get("change", 0.0)
        blocks += show_tokens(groups_of_prompts(scored_rows)[0], scale, width)
    return "\n\n".join(blocks)


def worst_and_best(rows):
    """Return the rows with the least and those with the greatest rewards, the best at the end."""
    rows = sorted(rows, key=lambda row: (row["reward"], read.to_float(row.get("advantage"))))
    worst = rows[:NUM_SHOWN]
    best = rows[NUM_SHOWN:][-NUM_SHOWN:]  # the last three, without those already among the worst
    return worst + best


def facts_text(row):
    """Return the numbers of a completion."""
    facts = ", ".join(f"{key} {row[key]}" for key in SHOWN_KEYS if key in row)
    return f"--- {facts}"


def prompt_text(row):
    """Return the end of the prompt of a completion."""
    prompt_end = str(row.get("prompt"))[-240:]
    return f"> ... {prompt_end}"


def wrap(text, width):
    """Return a text with its long lines wrapped, and without what could steer the terminal."""
    return "\n".join(textwrap.fill(line, width) for line in make_visible(text).split("\n"))


def show_tokens(rows, scale, width):
    """Return blocks of text: a legend, and the worst and the best completions with their colours.

    rows: completions of one prompt, all with tokens.
    scale: the change of a token's log-prob, in nats, from which on its colour is the strongest.
    """
    title = (
        "what this iteration's updates did to each token: the worst and the best of "
        f"{len(rows)} completions of one prompt, the best at the end"
    )
    colors = [*reversed(LESS_LIKELY), NEUTRAL, *MORE_LIKELY]
    ramp = "".join(paint("  ", color) for color in colors)
    legend = f"change of a token's log-prob: -{scale:.4f} {ramp} +{scale:.4f} nats"
    blocks = [f"{wrap(title, width)}\n{legend}\n{wrap(prompt_text(rows[0]), width)}"]
    for row in worst_and_best(rows):
        completion = paint_tokens(row["tokens"], scale, width)
        blocks.append(f"{wrap(facts_text(row), width)}\n{completion}")
    return blocks


def paint_tokens(tokens, scale, width):
    """Return the text of the tokens with their colours, its long lines wrapped.

    A token that is a part of a character, and one of line breaks alone, gets a mark that can have
    a colour.
    """
    text = ""
    colors = []  # of each character
    for token, change in zip(tokens["text"], tokens["change"], strict=True):
        if token == "":
            token = "·"
        elif "\n" in token and not token.strip():
            token = "↵" + token
        visible = make_visible(token)
        text += visible
        colors += [color_of_change(change, scale)] * len(visible)
    lines = []
    line_start = 0
    for line in text.split("\n"):
        start = line_start
        for part_of_line in textwrap.wrap(line, width) or [""]:
            start = text.index(part_of_line, start)  # Spaces at the ends of lines are left out.
            end = start + len(part_of_line)
            lines.append(paint_runs(part_of_line, colors[start:end]))
            start = end
        line_start += len(line) + 1
    return "\n".join(lines)


def color_of_change(change, scale):
    """Return the number of the colour that a terminal gives to a change of a log-prob."""
    if not change:
        return NEUTRAL
    colors = MORE_LIKELY if change > 0 else LESS_LIKELY
    strength = round(len(colors) * min(1, abs(change) / scale))
    return colors[strength - 1] if strength else NEUTRAL


def paint_runs(text, colors):
    """Paint each character with its color."""
    painted = ""
    for color, run in itertools.groupby(zip(text, colors, strict=True), lambda pair: pair[1]):
        painted += paint("".join(character for character, _ in run), color)
    return painted


def paint(text, color):
    """Return the text in black on one of the 256 colours of a terminal."""
    return f"\x1b[38;5;16;48;5;{color}m{text}\x1b[0m"


def make_visible(text):
    """Escape everything that does not print, so that no completion can steer the terminal."""
    return "".join(
        char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text
    )
