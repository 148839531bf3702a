"""What was right in each evaluation of a run, a bit a question, small enough to keep: what every table is made from.

    python experiments/answers.py output/demo experiments/demo/answers.jsonl

A line per evaluation: step, n (completions), samples (of each question, one after the other), strict and flexible (a
bit per completion, in the order of the ids, as hexadecimal digits), questions (a checksum of their ids: only equal ones
can be paired), tokens (mean), and where the problems are `arithmetic`'s how the steps are written: with_steps
(completions), easy, direct, careful ([right, all]).
"""

import sys
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from wrong_steps import WAYS, checked_steps  # noqa: E402

from logs import jsonl  # noqa: E402


def bits(answers):
    return f"{int('1' + ''.join('01'[bool(answer)] for answer in answers), 2):x}"  # the leading 1 keeps the length


def summary(path):
    rows = jsonl.read(path, required=("id", "completion", "correct_strict", "correct_flexible", "length"))
    rows.sort(key=lambda row: row["id"])  # subsets are drawn in another order; samples of a question stay together
    ids = [row["id"] for row in rows]
    result = {
        "step": int(path.stem.removeprefix("step_")), "n": len(rows), "samples": len(ids) // len(set(ids)),
        **{kind: bits(row[f"correct_{kind}"] for row in rows) for kind in ("strict", "flexible")},
        "questions": zlib.crc32("\n".join(ids).encode()),
        "tokens": round(sum(row["length"] for row in rows) / len(rows), 2),
    }  # fmt: skip
    if ids[0].startswith("arithmetic/"):
        steps = [checked_steps(row["completion"]) for row in rows]
        flat = [step for answer in steps for step in answer]
        result["with_steps"] = sum(map(bool, steps))
        result |= {way: [flat.count((way, True)), sum(step[0] == way for step in flat)] for way in WAYS}
    return result


def main(run, target):
    if not (paths := sorted(Path(run).glob("eval/step_*.jsonl"))):
        raise ValueError(f"{run} has no evaluations in eval/")
    jsonl.write(target, [summary(path) for path in paths])


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (ValueError, OSError, TypeError) as error:
        sys.exit(print(f"error: {error}", file=sys.stderr) or 2)
