"""Make data/arithmetic: word problems in GSM8K's columns, from a small closed vocabulary.

    python tiny/make_word_problems.py

A family is a row of families.jsonl: a question with blanks, the numbers that each blank may hold,
and the steps that solve it. Its level is its number of steps, 1 to 4. Every step must give a whole
number from 1 to 999. It can be written directly (`33 * 4 = 132`) or carefully, in easier pieces
(`33 * 4 = 120 + 12 = 132`).

Within a family, the splits share no operands, whatever their size and seed. The same files come out
every time, because everything is drawn with `random.Random(str).random()`, which Python promises
never to change.
"""

import json
import math
import random
import zlib
from dataclasses import dataclass
from pathlib import Path

import pandas

NAMES = ("Ana", "Ben", "Eva", "Leo", "Lily", "Mia", "Sam", "Tom")
THINGS = ("apples", "books", "cakes", "cards", "eggs", "pens", "shells", "toys")
SIZES = {"train": 10_000, "validation": 2_000, "test": 2_000}
# {symbol: (how a step is written, its value as numerator and denominator)}
OPERATORS = {
    "+": ("{x} + {y}", lambda x, y: (x + y, 1)),
    "-": ("{x} - {y}", lambda x, y: (x - y, 1)),
    "*": ("{x} * {y}", lambda x, y: (x * y, 1)),
    "/": ("{x} / {y}", lambda x, y: (x, y)),
    "%": ("{x}% of {y}", lambda x, y: (x * y, 100)),
    "part": ("1/{x} of {y}", lambda x, y: (y, x)),
}


def easier_pieces(x: int, operator: str, y: int) -> list[str]:
    """Expressions between the step `x operator y` and its result; none if the step is easy."""
    if operator == "part":
        return [f"{y} / {x}", *easier_pieces(y, "/", x)]
    if operator == "%":
        return easier_percentage(x, y)
    if operator == "+":
        tens = tens_of(x) + tens_of(y)
        units = x % 10 + y % 10
        expressions = [f"{tens} + {units}"]
    elif operator == "-":
        tens = tens_of(y)
        units = y % 10
        expressions = [f"{x} - {tens} - {units}", f"{x - tens} - {units}"]
    elif operator == "*":
        small, large = sorted((x, y))
        tens = tens_of(large) * small
        units = large % 10 * small
        expressions = [f"{tens} + {units}"]
    else:
        quotient = x // y
        tens = tens_of(quotient)
        units = quotient % 10
        expressions = [f"{tens * y} / {y} + {units * y} / {y}", f"{tens} + {units}"]
    if tens == 0 or units == 0:
        return []
    if operator in "*/" and 1 in (x, y):
        return []
    return expressions


def easier_percentage(percent, y):
    """75% of 80 is 3 * 20: 75% are 3 quarters, and a quarter of 80 is 20."""
    divisor = math.gcd(percent, 100)
    numerator = percent // divisor
    denominator = 100 // divisor
    if denominator == 5 and y % 10 == 0:  # tenths are easier than fifths
        numerator = 2 * numerator
        denominator = 10
    if numerator == 1:
        return [f"{y} / {denominator}", *easier_pieces(y, "/", denominator)]
    share = y // denominator
    return [f"{numerator} * {share}", *easier_pieces(numerator, "*", share)]


def tens_of(number):
    return number // 10 * 10


@dataclass(frozen=True)
class Family:
    """Problems that differ in their operands and words alone."""

    name: str
    question: str  # with blanks for the operands' letters, and for names and things
    operands: dict  # letter -> the values that it may take
    # Each step is "x operator y", where x and y are letters, or earlier results r1, r2, ...
    steps: tuple

    def solve(self, operands: dict, is_careful=lambda: False) -> tuple[list[str], int] | None:
        """The solution as (lines, result); None if a result is not whole or not in 1 to 999.

        is_careful is asked once for each step whether it is written in easier pieces.
        """
        values = dict(operands)
        lines = []
        result = None
        for number, step in enumerate(self.steps, start=1):
            x_name, symbol, y_name = step.split()
            x = values[x_name]
            y = values[y_name]
            text, fraction = OPERATORS[symbol]
            result, remainder = divmod(*fraction(x, y))
            if remainder or not 1 <= result <= 999:
                return None
            values[f"r{number}"] = result
            sides = [text.format(x=x, y=y)]
            if is_careful():
                sides += easier_pieces(x, symbol, y)
            sides.append(str(result))
            lines.append(" = ".join(sides))
        return lines, result

    def split_of(self, operands: dict) -> str:
        """A tenth of the operands is for test and a tenth for validation, by a checksum."""
        values = ",".join(str(operands[letter]) for letter in self.operands)
        checksum = zlib.crc32(f"{self.name}:{values}".encode())
        bucket = checksum % 100 // 10  # the tens digit, 0 to 9
        if bucket == 0:
            return "test"
        return "validation" if bucket == 1 else "train"


def parse_values(text):
    """What an operand may be: "2 to 99", "20 to 500 by 5", or a list such as "10 20 25"."""
    if " to " not in text:
        return [int(value) for value in text.split()]
    bounds, _, step = text.partition(" by ")
    first, last = bounds.split(" to ")
    return range(int(first), int(last) + 1, int(step or 1))


FOLDER = Path(__file__).parent
FAMILIES = []
for line in (FOLDER / "families.jsonl").read_text("utf-8").splitlines():
    row = json.loads(line)
    row["operands"] = {letter: parse_values(text) for letter, text in row["operands"].items()}
    row["steps"] = tuple(row["steps"].split(", "))
    FAMILIES.append(Family(**row))


def generate(split: str, num_problems: int, seed: int = 0, careful: float = 0.0) -> list[dict]:
    """Distinct problems: dicts of question, answer (one step a line, then "#### N") and level.

    The levels take turns, and a shorter list is the beginning of a longer one. No question appears
    twice. In validation and test, no operands appear twice within a family either.

    Args:
        careful: the share of steps that are written in easier pieces. It does not change which
            problems are drawn.
    """
    problem_rng = random.Random(f"word problems/{split}/{seed}")
    style_rng = random.Random(f"careful/{split}/{seed}")

    def is_careful():
        return style_rng.random() < careful

    problems = []
    earlier_keys = set()
    while len(problems) < num_problems:
        level = 1 + len(problems) % 4
        families = [family for family in FAMILIES if len(family.steps) == level]
        family = choose(problem_rng, families)
        operands = draw_operands(problem_rng, family, split)
        question = family.question.format(**operands, **draw_words(problem_rng))
        key = question if split == "train" else (family.name, *operands.values())
        if key in earlier_keys:
            continue
        earlier_keys.add(key)
        lines, result = family.solve(operands, is_careful)
        answer = "\n".join([*lines, f"#### {result}"])
        problems.append({"question": question, "answer": answer, "level": level})
    return problems


def choose(rng, values):
    return values[int(rng.random() * len(values))]


def draw_operands(rng, family, split):
    """Operands of a valid problem that belong to the split."""
    while True:
        operands = {letter: choose(rng, values) for letter, values in family.operands.items()}
        if family.split_of(operands) == split and family.solve(operands):
            return operands


def draw_words(rng):
    """What fills the blanks for two different names and two different things."""
    names = list(NAMES)
    things = list(THINGS)
    words = {"name": choose(rng, names), "things": choose(rng, things)}
    names.remove(words["name"])
    things.remove(words["things"])
    words["friend"] = choose(rng, names)
    words["others"] = choose(rng, things)
    return words


if __name__ == "__main__":
    for split, size in SIZES.items():
        rows = pandas.DataFrame(generate(split, size))
        path = FOLDER.parent / f"data/arithmetic/{split}.parquet"
        rows.to_parquet(
            path, index=False, compression="brotli", compression_level=11, use_dictionary=False
        )
