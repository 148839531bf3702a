"""Writes report.html: the completions of a run, what training fixed and broke, the tokens' colours.

The page is report.html beside this file, a template of jinja2, which escapes whatever a model or a
user wrote. It has no script and opens offline. What is too much for a page is left out, and the
page says so.
"""

import itertools
import json
import os
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader

from grpo import diagnose, jsonl

MAX_STEPS = 12
MAX_GROUPS = 8  # of completions of one prompt, in each step
MAX_QUESTIONS = 40  # that were fixed, and that were broken
# What a transcript says of each token of some completions (grpo/token_colours.py), in nats.
MEASURES = {
    "change": "change of the log-probability by this iteration's updates",
    "logp": "log-probability when sampled",
    "log_ratio": "log-probability after the updates, minus the reference's",
}
SCALE_SHARE = 0.98  # the share of an iteration's tokens whose values lie within a colour scale
# What the page shows of a completion in a place of its own; it lists everything else.
PLACED = {"id", "prompt", "completion", "gold", "reward", "advantage", "length", "finished"}
PLACED |= {"correct_strict", "correct_flexible", "format", "tokens"}


def write(folder: Path, lines: list[str], changes: dict[str, list[tuple[dict, dict]]]) -> Path:
    """Write report.html into the folder of a run.

    Args:
        lines: what its first and last evaluation say.
        changes: under "fixed" and "broken" the rows of answers before and after training.

    Returns:
        the path of the page.

    Raises:
        ValueError: a transcript of the run is damaged.
    """
    # A run without rollouts, such as SFT, shows its evaluations instead.
    paths = transcripts(folder, "rollouts") or transcripts(folder, "eval")
    steps = [read_step(step, paths[step]) for step in choose_steps(list(paths))]
    prompts = [group[0]["prompt"] for step in steps for group in step["groups"]]
    prompts += [before["prompt"] for before, _ in itertools.chain(*changes.values())]
    start, end = prompt_frame(prompts)
    args_path = folder / "args.json"
    settings = json.loads(args_path.read_text("utf-8")) if args_path.exists() else {"args": {}}
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number_in_words
    environment.filters["without_frame"] = lambda prompt: prompt[
        len(start) : len(prompt) - len(end)
    ]
    page = environment.get_template("report.html").render(
        name=folder.name,
        lines=lines,
        findings=diagnose.findings(folder),
        settings=settings,
        steps=steps,
        num_steps=len(paths),
        changes=changes,
        max_questions=MAX_QUESTIONS,
        measures=MEASURES,
        placed=PLACED,
        frame=(start, end),
    )
    path = folder / "report.html"
    jsonl.replace(path, page)
    return path


def transcripts(run: Path, folder: str) -> dict[int, Path]:
    """{step: path} of the transcripts in rollouts/ or eval/ of a run, in order."""
    paths = run.glob(f"{folder}/step_*.jsonl")
    return dict(sorted((int(path.stem.removeprefix("step_")), path) for path in paths))


def prompt_frame(prompts: list[str]) -> tuple[str, str]:
    """The lines with which all prompts begin and end, which the page shows once."""
    start = os.path.commonprefix(prompts)
    start = start[: start.rfind("\n") + 1]
    reversed_rests = [prompt[len(start) :][::-1] for prompt in prompts]
    end = os.path.commonprefix(reversed_rests)[::-1]
    return start, end[end.find("\n") :] if "\n" in end else ""


def choose_steps(steps: list[int]) -> list[int]:
    """At most MAX_STEPS steps, evenly spread over those that may have tokens, and the last one."""
    if len(steps) <= MAX_STEPS:
        return steps
    with_tokens = [step for step in steps if step % 10 == 0] or steps
    positions = np.linspace(0, len(with_tokens) - 1, MAX_STEPS - 1).round().astype(int)
    return sorted({steps[-1], *(with_tokens[i] for i in positions)})


def read_step(step: int, path: Path) -> dict:
    """The groups of completions of one transcript; those whose tokens were scored come first."""
    rows = jsonl.read(path, ("id", "prompt"))
    groups = [list(group) for _, group in itertools.groupby(rows, lambda row: row["id"])]
    num_groups = len(groups)
    for group in groups:
        group.sort(key=has_no_tokens)
    groups.sort(key=lambda group: has_no_tokens(group[0]))
    groups = groups[:MAX_GROUPS]
    scales = token_scales(rows)
    for row in itertools.chain(*groups):
        if "tokens" in row:
            row["tokens"] = [token_of_page(token, scales) for token in zip_tokens(row["tokens"])]
    return {"number": step, "groups": groups, "num_groups": num_groups, "scales": scales}


def has_no_tokens(row: dict) -> bool:
    return "tokens" not in row


def zip_tokens(tokens: dict[str, list]) -> list[dict]:
    """Lists of texts and of values as one dict for each token."""
    return [dict(zip(tokens, values, strict=True)) for values in zip(*tokens.values(), strict=True)]


def token_scales(rows: list[dict]) -> dict[str, float]:
    """{measure: the value, in nats, from which on the colour of a token is the strongest}.

    It is the same for all completions of an iteration, so that they can be compared. Few tokens
    have values beyond it, so that one of them alone cannot make all others look pale.
    """
    scales = {}
    for measure in MEASURES:
        sizes = []
        for row in rows:
            sizes += [abs(value) for value in row.get("tokens", {}).get(measure, [])]
        if sizes:
            scales[measure] = float(np.quantile(sizes, SCALE_SHARE)) or max(sizes) or 1.0
    return scales


def token_of_page(token: dict, scales: dict[str, float]) -> dict:
    """A token as the page shows it: text, the numbers in words, and a shade of -1 to 1 for each."""
    measures = [measure for measure in MEASURES if measure in token]
    shades = {}
    for measure in measures:
        shades[measure] = round(float(np.clip(token[measure] / scales[measure], -1, 1)), 2)
    return {
        "text": token["text"].replace("\n", "\u21b5\n"),
        "numbers": ", ".join(f"{measure} {token[measure]:+.4f}" for measure in measures),
        "style": "".join(f"--{measure}:{shade:g};" for measure, shade in shades.items() if shade),
    }


def number_in_words(value) -> str:
    if value is None:
        return "missing"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
