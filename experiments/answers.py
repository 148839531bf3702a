"""What the answers of a run's evaluations say: which are right, and how the steps of `arithmetic` are written.

    python experiments/answers.py output/demo                                  # what a run changed, in words
    python experiments/answers.py output/demo experiments/demo/answers.jsonl   # a bit an answer, small enough to keep

A step that has easier pieces is careful (`33 * 4 = 120 + 12 = 132`) or direct (`33 * 4 = 132`); the others are easy. It
is right if its result is. What is kept is a line per evaluation: step, n (answers), samples (of each question), strict
and flexible (a bit per answer, in the order of the ids, in hexadecimal), questions (a checksum of the ids: only equal
ones can be paired), tokens (mean), with_steps (answers), and of easy, direct and careful steps [right, all].
"""

import re
import sys
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.word_problems import OPERATORS, easier_pieces  # noqa: E402
from logs import jsonl  # noqa: E402

NUMBER = r"(\d{1,12})"
STEP = re.compile(
    rf"^(?:{NUMBER}( [-+*/] |% of )|1/{NUMBER} of ){NUMBER}((?: = [^=\n]+)*) = {NUMBER}$",
    re.MULTILINE,
)
WAYS = ("easy", "direct", "careful")


def checked_steps(text):
    """(one of WAYS, is right) of each step: "3 * 4 = 12", "25% of 40 = 40 / 4 = 10", "1/4 of 40 = 10"."""
    steps = []
    for a, sign, parts, b, pieces, result in STEP.findall(text):
        operator, x, y = sign.strip()[:1] or "part", int(a or parts), int(b)
        if operator == "/" and y == 0 or operator == "part" and x == 0:
            steps.append(("easy", False))
            continue
        numerator, denominator = OPERATORS[operator][1](x, y)
        way = "easy" if not easier_pieces(x, operator, y) else "careful" if pieces else "direct"
        steps.append((way, numerator == denominator * int(result)))
    return steps


def bits(answers):
    return f"{int('1' + ''.join('01'[bool(answer)] for answer in answers), 2):x}"  # the leading 1 keeps the length


def read(path):
    """The answers of an evaluation in the order of their ids, each with its checked steps."""
    rows = jsonl.read(
        path,
        required=("id", "prompt", "completion", "correct_strict", "correct_flexible", "length"),
    )
    rows = [row | {"steps": checked_steps(row["completion"])} for row in rows]
    return sorted(
        rows, key=lambda row: row["id"]
    )  # subsets are drawn in another order; samples stay together


def summary(path):
    """The line that is kept of an evaluation."""
    rows = read(path)
    ids, steps = [row["id"] for row in rows], [step for row in rows for step in row["steps"]]
    result = {
        "step": int(path.stem.removeprefix("step_")),
        "n": len(rows),
        "samples": len(ids) // len(set(ids)),
    }
    result |= {
        kind: bits(row[f"correct_{kind}"] for row in rows) for kind in ("strict", "flexible")
    }
    result |= {
        "questions": zlib.crc32("\n".join(ids).encode()),
        "with_steps": sum(bool(row["steps"]) for row in rows),
    }
    result["tokens"] = round(sum(row["length"] for row in rows) / len(rows), 2)
    return result | {
        way: [steps.count((way, True)), sum(step[0] == way for step in steps)] for way in WAYS
    }


def share(part, whole):
    return f"{part:,} of {whole:,}" + (f" ({part / whole:.0%})" if whole else "")


def counts(row):
    """What there is to say of the steps of an evaluation: {what: how many of how many}."""
    easy, direct, careful = (row[way] for way in WAYS)
    return {
        "mean tokens of a completion": f"{row['tokens']:.1f}",
        "completions with steps": share(row["with_steps"], row["n"]),
        "right steps": share(*map(sum, zip(easy, direct, careful, strict=True))),
        "careful, of steps that have easier pieces": share(careful[1], careful[1] + direct[1]),
        **{f"right, of {way} steps": share(*row[way]) for way in reversed(WAYS)},
    }


def what_changed(run, paths):
    """The first and the last evaluation of a run side by side, and one of the questions that it has learnt."""
    if len(paths) < 2:
        raise ValueError(f"{run} has not two evaluations in eval/ to compare")
    before, after = counts(summary(paths[0])), counts(summary(paths[-1]))
    first, last = (
        {row["id"]: row for row in reversed(read(path))} for path in (paths[0], paths[-1])
    )
    yield f"{run}: {paths[0].stem} -> {paths[-1].stem}, {len(last)} problems"
    yield from (f"{what}  {before[what]} -> {after[what]}" for what in before)
    both = [(first[key], row) for key, row in last.items() if key in first]
    if fixed := [(old, new) for old, new in both if new["correct_strict"] > old["correct_strict"]]:
        answers = max(fixed, key=lambda pair: [way for way, _ in pair[1]["steps"]].count("careful"))
        question = ([answers[0]["prompt"]] + re.findall(r"[^\n<>|]+\?", answers[0]["prompt"]))[-1]
        shown = zip((paths[0], paths[-1]), answers, strict=True)
        texts = [question, *(f"--- {path.stem}\n{row['completion']}" for path, row in shown)]
        yield f"\nOf the {len(fixed)} questions that were wrong and are right, the one with the most careful steps:"
        yield from (
            "\n" + re.sub(r"[^\n -~]", "?", text) for text in texts
        )  # nothing steers a terminal


def main(run="", target=None):
    paths = sorted(Path(run).glob("eval/step_*.jsonl"))
    if not run or not paths:
        raise ValueError(f"{run or 'name the directory of a run'}: no evaluations in its eval/")
    if target:
        jsonl.write(target, [summary(path) for path in paths])
    else:
        print(*what_changed(run, paths), sep="\n")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (ValueError, OSError, TypeError) as error:
        sys.exit(print(f"error: {error}", file=sys.stderr) or 2)
