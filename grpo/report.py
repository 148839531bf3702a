"""Writes report.html: the completions of a run, what training fixed and broke, the tokens' colours.

The page is report.html beside this file, a template of jinja2, which escapes whatever a model or a
user wrote. It has no script and opens offline. What is too much for a page is left out, and the
page says so.
"""

import itertools
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader

from grpo import jsonl

MAX_STEPS = 12
MAX_GROUPS = 8  # of completions of one prompt, in each step
MAX_QUESTIONS = 40  # that were fixed, and that were broken
# What a transcript says of each token of some completions, in nats.
MEASURES = {
    "change": "change of the log-probability by this iteration's updates",
    "logp": "log-probability when sampled",
    "log_ratio": "log-probability after the updates, minus the reference's",
}
# What the page shows of a completion in a place of its own; it lists everything else.
PLACED = {"id", "prompt", "completion", "gold", "reward", "advantage", "length", "finished"}
PLACED |= {"correct_strict", "tokens"}


def write(folder: Path, lines: list[str], changes: dict[str, list[dict]]) -> Path:
    """Write report.html into the folder of a run, and return its path.

    Args:
        lines: what its first and last evaluation say.
        changes: under "fixed" and "broken" the questions with both answers (plotter.compare).

    Raises:
        ValueError: a transcript of the run is damaged.
    """
    # A run without rollouts shows its evaluations instead.
    paths = transcripts(folder, "rollouts") or transcripts(folder, "eval")
    args_path = folder / "args.json"
    settings = json.loads(args_path.read_text("utf-8")) if args_path.exists() else {"args": {}}
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number_in_words
    steps = [read_step(path) for path in choose(paths)]
    # One is open: the last that has colours, or else the last.
    for step in sorted(steps, key=lambda step: bool(step["scales"]))[-1:]:
        step["is_open"] = True
    page = environment.get_template("report.html").render(
        name=folder.name,
        lines=lines,
        findings=findings(folder),
        settings=settings,
        steps=steps,
        num_steps=len(paths),
        changes=changes,
        max_questions=MAX_QUESTIONS,
        measures=MEASURES,
        placed=PLACED,
    )
    path = folder / "report.html"
    path.write_text(page, "utf-8")
    return path


def findings(folder: Path) -> list[str]:
    """What looks wrong in the logs of a run. A copy for a candidate does not say."""
    if find_spec("grpo.diagnose") is None:
        return []
    from grpo import diagnose

    return diagnose.findings(folder)


def transcripts(run: Path, folder: str) -> list[Path]:
    """The transcripts in rollouts/ or eval/ of a run, in order."""
    return sorted(run.glob(f"{folder}/step_*.jsonl"), key=step_of)


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def choose(paths: list[Path]) -> list[Path]:
    """At most MAX_STEPS, evenly spread; of a longer run every tenth, with tokens, and the last."""
    if len(paths) > MAX_STEPS:
        tenths = [path for path in paths[:-1] if step_of(path) % 10 == 0]
        paths = [*tenths, paths[-1]]
    positions = np.linspace(0, len(paths) - 1, min(len(paths), MAX_STEPS)).round().astype(int)
    return [paths[i] for i in positions]


def read_step(path: Path) -> dict:
    """The groups of completions of one transcript; those with tokens come first."""
    rows = jsonl.read(path, ("id", "prompt", "completion"))
    scales = token_scales(rows)
    for row in rows:
        if "tokens" in row:
            row["tokens"] = tokens_of_page(row["tokens"], scales)
    groups = [list(group) for _, group in itertools.groupby(rows, lambda row: row["id"])]
    groups.sort(key=lambda group: all("tokens" not in row for row in group))
    return {
        "number": step_of(path),
        "groups": groups[:MAX_GROUPS],
        "num_groups": len(groups),
        "scales": scales,
    }


def token_scales(rows: list[dict]) -> dict[str, float]:
    """{measure: the value, in nats, from which on the colour of a token is the strongest}.

    It is the same for all completions of an iteration, so that they can be compared. 2% of the
    tokens have values beyond it, so that one of them alone cannot make all others look pale.
    """
    scales = {}
    for measure in MEASURES:
        values = []
        for row in rows:
            values += row.get("tokens", {}).get(measure, [])
        values = [value for value in values if value is not None]  # null: it was not finite
        if values:
            scales[measure] = float(np.quantile(np.abs(values), 0.98)) or 1.0
    return scales


def tokens_of_page(tokens: dict[str, list], scales: dict[str, float]) -> list[dict]:
    """Tokens as the page shows them: text, numbers in words, and shades of -1 to 1 as a style."""
    shown_tokens = []
    for i, text in enumerate(tokens["text"]):
        numbers = []
        style = ""
        for measure, scale in scales.items():
            value = tokens[measure][i]
            if value is None:
                continue
            numbers.append(f"{measure} {value:+.4f}")
            style += f"--{measure}:{np.clip(value / scale, -1, 1):.2f};"
        shown_tokens.append({"text": text, "numbers": ", ".join(numbers), "style": style})
    return shown_tokens


def number_in_words(value) -> str:
    if value is None:
        return "missing"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
