"""How often a right answer stands on a wrong step: the steps of `arithmetic` are arithmetic that can be checked.

    python experiments/wrong_steps.py output/demo/eval/step_*.jsonl

A line per file: completions with steps, wrong steps among all steps, and right answers (strict) with a wrong step.
"""

import operator
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from logs import jsonl  # noqa: E402

STEP = re.compile(r"^(\d+)(?: ([-+*/]) |(% of) |/(\d+) of )(\d+) = (\d+)$", re.MULTILINE)
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def checked_steps(text):
    """Whether each step holds: "3 * 4 = 12", "25% of 40 = 10", "1/4 of 40 = 10"."""
    holds = []
    for a, sign, percent, parts, b, result in STEP.findall(text):
        a, b = int(a), int(b)
        try:
            true = a * b / 100 if percent else a * b / int(parts) if parts else OPERATORS[sign](a, b)
        except ZeroDivisionError:
            true = None
        holds.append(true == int(result))
    return holds


def main(paths):
    if not paths:
        raise ValueError("name the transcripts to read: eval/step_*.jsonl of a run")
    for path in paths:
        rows = jsonl.read(path, required=("completion", "correct_strict"))
        steps = [checked_steps(row["completion"]) for row in rows]
        right = [checks for row, checks in zip(rows, steps, strict=True) if row["correct_strict"] and checks]
        total = sum(map(len, steps))
        print(
            f"{path}: {sum(map(bool, steps))} of {len(rows)} completions with steps, "
            f"{total - sum(map(sum, steps))} of {total} steps wrong, "
            f"{sum(not all(checks) for checks in right)} of {len(right)} right answers with a wrong step"
        )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
