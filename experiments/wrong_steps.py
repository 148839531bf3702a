"""How the steps of `arithmetic` are written, and whether they hold: they are arithmetic that can be checked.

    python experiments/wrong_steps.py output/demo/eval/step_*.jsonl    # a line per file
    python experiments/wrong_steps.py output/demo                      # what a run changed, with one question's answers

A step that has easier pieces is careful (`33 * 4 = 120 + 12 = 132`) or direct (`33 * 4 = 132`); the others are easy. It
is right if its result is. Of several samples of a question the first one counts.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.word_problems import OPERATORS, easier_pieces  # noqa: E402
from logs import jsonl  # noqa: E402

NUMBER = r"(\d{1,12})"
STEP = re.compile(rf"^(?:{NUMBER}( [-+*/] |% of )|1/{NUMBER} of ){NUMBER}((?: = [^=\n]+)*) = {NUMBER}$", re.MULTILINE)
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


def read(path):
    """{question: its row, with its steps} of an evaluation."""
    rows = jsonl.read(path, required=("id", "prompt", "completion", "correct_strict", "length"))
    return {row["id"]: row | {"steps": checked_steps(row["completion"])} for row in reversed(rows)}


def share(part, whole):
    return f"{part:,} of {whole:,}" + (f" ({part / whole:.0%})" if whole else "")


def counts(rows):
    """What there is to say of the steps of an evaluation: {what: how many of how many}."""
    steps = [step for row in rows for step in row["steps"]]
    right = {way: steps.count((way, True)) for way in WAYS}
    all_ = {way: right[way] + steps.count((way, False)) for way in WAYS}
    answers = [all(ok for _, ok in row["steps"]) for row in rows if row["correct_strict"] and row["steps"]]
    return {
        "completions with steps": share(sum(bool(row["steps"]) for row in rows), len(rows)),
        "right steps": share(sum(right.values()), len(steps)),
        "careful, of steps that have easier pieces": share(all_["careful"], all_["careful"] + all_["direct"]),
        **{f"right, of {way} steps": share(right[way], all_[way]) for way in reversed(WAYS)},
        "right answers with a wrong step": share(answers.count(False), len(answers)),
    }


def what_changed(run):
    """The first and the last evaluation of a run side by side, and one of the questions that it has learnt."""
    paths = sorted(run.glob("eval/step_*.jsonl"))
    if len(paths) < 2:
        raise ValueError(f"{run} has not two evaluations in eval/ to compare")
    first, last = read(paths[0]), read(paths[-1])
    tokens = [sum(row["length"] for row in rows.values()) / len(rows) for rows in (first, last)]
    before, after = counts(first.values()), counts(last.values())
    yield f"{run}: {paths[0].stem} -> {paths[-1].stem}, {len(last)} problems"
    yield f"mean tokens of a completion  {tokens[0]:.1f} -> {tokens[1]:.1f}"
    yield from (f"{what}  {before[what]} -> {after[what]}" for what in before)
    both = [(first[key], row) for key, row in last.items() if key in first]
    if fixed := [(old, new) for old, new in both if new["correct_strict"] > old["correct_strict"]]:
        answers = max(fixed, key=lambda pair: [way for way, _ in pair[1]["steps"]].count("careful"))
        question = ([answers[0]["prompt"]] + re.findall(r"[^\n<>|]+\?", answers[0]["prompt"]))[-1]
        shown = zip((paths[0], paths[-1]), answers, strict=True)
        texts = [question, *(f"--- {path.stem}\n{row['completion']}" for path, row in shown)]
        yield f"\nOf the {len(fixed)} questions that were wrong and are right, the one with the most careful steps:"
        yield from ("\n" + re.sub(r"[^\n -~]", "?", text) for text in texts)  # nothing steers a terminal


def main(paths):
    if not paths:
        raise ValueError("name the transcripts to read, eval/step_*.jsonl of a run, or the run itself")
    for path in map(Path, paths):
        if path.is_dir():
            print(*what_changed(path), sep="\n")
        else:
            print(f"{path}: {', '.join(f'{what} {said}' for what, said in counts(read(path).values()).items())}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
