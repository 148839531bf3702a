"""How the steps of `arithmetic` are written, and whether they hold: they are arithmetic that can be checked.

    python experiments/wrong_steps.py output/demo/eval/step_*.jsonl    # a line per file
    python experiments/wrong_steps.py output/demo                      # what a run changed, with one question's answers

A step is direct (`33 * 4 = 132`) or careful, in easier pieces (`33 * 4 = 120 + 12 = 132`); it is right if its end is.
"""

import operator
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from logs import jsonl  # noqa: E402

STEP = re.compile(r"^(\d+)(?: ([-+*/]) |(% of) |/(\d+) of )(\d+)((?: = [^=\n]+)*) = (\d+)$", re.MULTILINE)
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def checked_steps(text):
    """(careful or direct, is right) of each step: "3 * 4 = 12", "25% of 40 = 40 / 4 = 10", "1/4 of 40 = 10"."""
    steps = []
    for a, sign, percent, parts, b, pieces, result in STEP.findall(text):
        a, b = int(a), int(b)
        try:
            true = a * b / 100 if percent else a * b / int(parts) if parts else OPERATORS[sign](a, b)
        except ZeroDivisionError:
            true = None
        steps.append(("careful" if pieces else "direct", true == int(result)))
    return steps


def read(path):
    """The rows of an evaluation, with their steps."""
    rows = jsonl.read(path, required=("id", "completion", "correct_strict"))
    return [row | {"steps": checked_steps(row["completion"])} for row in rows]


def share(part, whole):
    return f"{part:,} of {whole:,}" + (f" ({part / whole:.0%})" if whole else "")


def counts(rows):
    """What there is to say of the steps of an evaluation: {what: how many of how many}."""
    steps = [step for row in rows for step in row["steps"]]
    count = {(way, right): steps.count((way, right)) for way in ("direct", "careful") for right in (True, False)}
    right = [row["steps"] for row in rows if row["correct_strict"] and row["steps"]]
    return {
        "completions with steps": share(sum(bool(row["steps"]) for row in rows), len(rows)),
        "careful steps": share(count["careful", True] + count["careful", False], len(steps)),
        "right among direct steps": share(count["direct", True], count["direct", True] + count["direct", False]),
        "right among careful steps": share(count["careful", True], count["careful", True] + count["careful", False]),
        "right answers with a wrong step": share(sum(not all(ok for _, ok in steps) for steps in right), len(right)),
    }


def what_changed(run):
    """The first and the last evaluation of a run side by side, and one of the questions that are right since."""
    paths = sorted(run.glob("eval/step_*.jsonl"))
    if len(paths) < 2:
        raise ValueError(f"{run} has not two evaluations in eval/ to compare")
    first, last = read(paths[0]), read(paths[-1])
    mean = [sum(row.get("length", 0) for row in rows) / len(rows) for rows in (first, last)]
    before, after = counts(first), counts(last)
    yield f"{run}: {paths[0].stem} -> {paths[-1].stem}, {len(last)} problems"
    yield f"mean tokens of a completion  {mean[0]:.1f} -> {mean[1]:.1f}"
    yield from (f"{what}  {before[what]} -> {after[what]}" for what in before)
    old = {row["id"]: row for row in first}
    fixed = [row for row in last if row["correct_strict"] and not old.get(row["id"], row)["correct_strict"]]
    if fixed:
        row = max(fixed, key=lambda row: len(row["steps"]))
        question = re.findall(r"[^\n<>|]+\?", row["prompt"])[-1]
        yield f"\nOne of {len(fixed)} questions that were wrong and are right:\n\n{question}"
        for path, answer in ((paths[0], old[row["id"]]), (paths[-1], row)):
            visible = re.sub(r"[^\n -~]", "?", answer["completion"])  # nothing steers a terminal
            yield f"\n--- {path.stem}\n{visible}"


def main(paths):
    if not paths:
        raise ValueError("name the transcripts to read, eval/step_*.jsonl of a run, or the run itself")
    for path in map(Path, paths):
        if path.is_dir():
            print(*what_changed(path), sep="\n")
        else:
            print(f"{path}: {', '.join(f'{what} {said}' for what, said in counts(read(path)).items())}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
