"""What the answers of a run's evaluations say: which are right, and how their steps are written.

    python experiments/answers.py output/demo
        print what the run changed
    python experiments/answers.py output/demo experiments/demo/answers.jsonl
        write a summary of each evaluation, which is small enough to keep: it has one bit for each
        answer

This is about the data set `arithmetic`. A hard step can be split into easier pieces, such as
`33 * 4` into `120 + 12` (tiny/make_word_problems.py). If it is written with them, it is
careful (`33 * 4 = 120 + 12 = 132`), and without them it is direct (`33 * 4 = 132`). A step that
cannot be split is easy. A step is right if its result is right.

A summary has these keys:

    step                    the training step of the evaluation
    n                       the number of answers
    strict, flexible        a bit per answer, 1 for right, in the order of the ids, in hexadecimal
    questions               a checksum of the ids; evaluations can be compared only if it is equal
    with_steps              the number of answers that have steps
    tokens                  the mean length of an answer
    easy, direct, careful   for each kind of step [the number of right ones, the number of all]
"""

import re
import sys
import zlib
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from logs import jsonl  # noqa: E402
from tiny.make_word_problems import OPERATORS, easier_pieces  # noqa: E402

NUMBER = r"\d{1,12}"
# A line such as "3 * 4 = 12", "33 * 4 = 120 + 12 = 132", "25% of 40 = 10" or "1/4 of 40 = 10".
STEP = re.compile(
    rf"^(?:(?P<first>{NUMBER})(?P<operator> [-+*/] |% of )|1/(?P<divisor>{NUMBER}) of )"
    rf"(?P<second>{NUMBER})(?P<pieces>(?: = [^=\n]+)*) = (?P<result>{NUMBER})$",
    re.MULTILINE,
)
KINDS = ("easy", "direct", "careful")
EVALUATION_KEYS = ("id", "prompt", "completion", "correct_strict", "correct_flexible", "length")


def checked_steps(text):
    """Each step of a completion as (one of KINDS, whether it is right)."""
    steps = []
    for match in STEP.finditer(text):
        if match["divisor"]:  # "1/4 of 40": a part of a number
            operator = "part"
            x = int(match["divisor"])
        else:
            operator = match["operator"].split()[0]  # "% of " becomes "%"
            x = int(match["first"])
        y = int(match["second"])
        divides_by_zero = (operator == "/" and y == 0) or (operator == "part" and x == 0)
        if divides_by_zero:
            # No result is right, and easier_pieces would divide by 0.
            steps.append(("easy", False))
            continue
        numerator, denominator = OPERATORS[operator].fraction(x, y)
        is_right = numerator == denominator * int(match["result"])
        if not easier_pieces(x, operator, y):
            kind = "easy"
        elif match["pieces"]:
            kind = "careful"
        else:
            kind = "direct"
        steps.append((kind, is_right))
    return steps


def hexadecimal(flags):
    """One bit per flag. A 1 stands before the bits, since leading zeros would be lost otherwise."""
    bits = "".join("1" if flag else "0" for flag in flags)
    return f"{int('1' + bits, 2):x}"


def checksum_of_questions(ids):
    """A checksum of the sorted ids of all answers. It tells whether evaluations can be compared."""
    return zlib.crc32("\n".join(ids).encode())


def accuracy(row, kind="strict"):
    """The share of right answers in a summary, from its bits."""
    num_right = int(row[kind], 16).bit_count() - 1  # without the 1 before the bits
    return num_right / row["n"]


def read(path):
    """The answers of an evaluation, each with its checked steps as "steps".

    They are sorted by id, because evaluations on the same questions can have them in other orders.
    Several answers to one question keep their order.
    """
    rows = jsonl.read(path, required=EVALUATION_KEYS)
    for row in rows:
        row["steps"] = checked_steps(row["completion"])
    return sorted(rows, key=lambda row: row["id"])


def summary(path):
    """The summary of an evaluation; the head of this file explains its keys."""
    rows = read(path)
    ids = [row["id"] for row in rows]
    result = {
        "step": int(path.stem.removeprefix("step_")),
        "n": len(rows),
        "strict": hexadecimal(row["correct_strict"] for row in rows),
        "flexible": hexadecimal(row["correct_flexible"] for row in rows),
        "questions": checksum_of_questions(ids),
        "with_steps": sum(bool(row["steps"]) for row in rows),
        "tokens": round(sum(row["length"] for row in rows) / len(rows), 2),
    }
    num_steps = Counter()  # (kind, whether it is right): how many
    for row in rows:
        num_steps.update(row["steps"])
    for kind in KINDS:
        num_right = num_steps[kind, True]
        result[kind] = [num_right, num_right + num_steps[kind, False]]
    return result


def count_of(count, total):
    """A count in words: "3 of 4 (75%)"."""
    percentage = f" ({count / total:.0%})" if total else ""
    return f"{count:,} of {total:,}{percentage}"


def counts(evaluation):
    """What a summary says of the steps, in words: {measure: its value}."""
    num_right = sum(evaluation[kind][0] for kind in KINDS)
    num_steps = sum(evaluation[kind][1] for kind in KINDS)
    num_direct = evaluation["direct"][1]
    num_careful = evaluation["careful"][1]
    return {
        "mean tokens per completion": f"{evaluation['tokens']:.1f}",
        "completions with steps": count_of(evaluation["with_steps"], evaluation["n"]),
        "right steps": count_of(num_right, num_steps),
        "hard steps that are careful": count_of(num_careful, num_careful + num_direct),
        "right, of careful steps": count_of(*evaluation["careful"]),
        "right, of direct steps": count_of(*evaluation["direct"]),
        "right, of easy steps": count_of(*evaluation["easy"]),
    }


def what_changed(run, paths):
    """Yield lines that compare the first and the last evaluation of a run.

    The last lines show a question that the run has learnt to answer, if there is one.
    """
    if len(paths) < 2:
        raise ValueError(f"{run} has not two evaluations in eval/ to compare")
    first_path = paths[0]
    last_path = paths[-1]
    first_answers = first_answer_to_each(first_path)
    last_answers = first_answer_to_each(last_path)
    yield f"{run}: {first_path.stem} -> {last_path.stem}, {len(last_answers)} problems"
    first_counts = counts(summary(first_path))
    last_counts = counts(summary(last_path))
    for measure in first_counts:
        yield f"{measure}  {first_counts[measure]} -> {last_counts[measure]}"

    learnt = []  # (answer before, answer after) to each question that was wrong and is right
    for key, new_answer in last_answers.items():
        old_answer = first_answers.get(key)
        if old_answer and new_answer["correct_strict"] and not old_answer["correct_strict"]:
            learnt.append((old_answer, new_answer))
    if not learnt:
        return
    old_answer, new_answer = max(learnt, key=lambda pair: num_careful_steps(pair[1]))
    yield (
        f"\nOf the {len(learnt)} questions that were wrong and are right, "
        "the one with the most careful steps:"
    )
    yield "\n" + printable(question_in(old_answer["prompt"]))
    yield "\n" + printable(f"--- {first_path.stem}\n{old_answer['completion']}")
    yield "\n" + printable(f"--- {last_path.stem}\n{new_answer['completion']}")


def first_answer_to_each(path):
    """{id: the first answer to that question}, from the last question to the first."""
    # A dict keeps the last of several rows with one id. In reverse order that is the first answer.
    return {row["id"]: row for row in reversed(read(path))}


def num_careful_steps(answer):
    return sum(kind == "careful" for kind, _ in answer["steps"])


def question_in(prompt):
    """The last line that ends in a question mark, or the whole prompt if it has none."""
    questions = re.findall(r"[^\n<>|]+\?", prompt)
    return questions[-1] if questions else prompt


def printable(text):
    """Replace all but printable ASCII, so that no control character gets to the terminal."""
    return re.sub(r"[^\n -~]", "?", text)


def step_of(path):
    return int(path.stem.removeprefix("step_"))


def main(run="", target=None):
    if not run:
        raise ValueError("name the directory of a run")
    paths = sorted(Path(run).glob("eval/step_*.jsonl"), key=step_of)
    if not paths:
        raise ValueError(f"{run}: no evaluations in its eval/")
    if target:
        if Path(target).exists():
            raise ValueError(f"{target} exists already; name another file")
        jsonl.write(target, [summary(path) for path in paths])
    else:
        print(*what_changed(run, paths), sep="\n")


if __name__ == "__main__":
    try:
        if len(sys.argv) > 3:
            raise ValueError("give the directory of one run, and at most one file to write")
        main(*sys.argv[1:])
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
