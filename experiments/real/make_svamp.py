"""Write the problems of the study as main.py reads them, from the repository of SVAMP.

    git clone https://github.com/arkilpatel/SVAMP
    python experiments/real/make_svamp.py SVAMP output/svamp

Test problems are the 1,000 of SVAMP (Patel et al. 2021, MIT licence). Training and validation
problems are those of MAWPS and ASDiv-A that its authors train on, once each; every ninth is for
validation. A solution has one line for each operation of the problem's equation.
"""

import argparse
import csv
import json
import operator
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from logs import jsonl  # noqa: E402

OPERATIONS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}


def number(value: float) -> str:
    return f"{value:.4f}".rstrip("0").rstrip(".")


def solution(equation: list[str], values: dict[str, float]) -> str:
    """The lines of a solution, from an equation in prefix notation such as - number0 number1."""
    lines = []
    stack = []
    for word in reversed(equation):
        if word in OPERATIONS:
            first = stack.pop()
            second = stack.pop()
            result = OPERATIONS[word](first, second)
            lines.append(f"{number(first)} {word} {number(second)} = {number(result)}")
            stack.append(result)
        else:
            stack.append(values[word] if word in values else float(word))
    (answer,) = stack
    return "\n".join([*lines, f"#### {number(answer)}"])


def training_problem(row: dict[str, str]) -> dict[str, str]:
    """A row of train.csv, whose question has number0, number1 and so on in place of its numbers."""
    values = {f"number{i}": float(value) for i, value in enumerate(row["Numbers"].split())}
    question = re.sub(r"number\d+", lambda match: number(values[match[0]]), row["Question"])
    question = re.sub(r" (?=[.,?!%']|n't)", "", question).replace("$ ", "$")
    question = question[0].upper() + question[1:]
    return {"question": question, "answer": solution(row["Equation"].split(), values)}


def test_problem(row: dict) -> dict[str, str]:
    """A problem of SVAMP.json, whose equation is in brackets, as in ( 3.0 + ( 2.0 * 4.0 ) )."""
    body = row["Body"].strip()
    if body[-1] not in ".?!":
        body += "."
    answer = solution(prefix(row["Equation"].split()), {})
    question = f"{body} {row['Question'].strip()}".replace("$ ", "$")
    return {"question": question, "answer": answer}


def prefix(words: list[str]) -> list[str]:
    """An equation in brackets, in prefix notation."""
    stack = []
    for word in words:
        if word == ")":
            second = stack.pop()
            sign = stack.pop()
            first = stack.pop()
            stack.append([*sign, *first, *second])
        elif word != "(":
            stack.append([word])
    (equation,) = stack
    return equation


def main(repository: Path, output: Path) -> None:
    with open(repository / "data/mawps-asdiv-a_svamp/train.csv", encoding="utf-8") as file:
        rows = [training_problem(row) for row in csv.DictReader(file)]
    problems = list({row["question"].lower(): row for row in rows}.values())
    tests = json.loads((repository / "SVAMP.json").read_text("utf-8"))
    output.mkdir(parents=True, exist_ok=True)
    jsonl.write(output / "validation.jsonl", problems[::9])
    jsonl.write(output / "train.jsonl", [row for i, row in enumerate(problems) if i % 9])
    jsonl.write(output / "test.jsonl", [test_problem(row) for row in tests])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("repository", type=Path, help="the clone of SVAMP's repository")
    parser.add_argument("output", type=Path, help="the folder that is written")
    args = parser.parse_args()
    try:
        main(args.repository, args.output)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
