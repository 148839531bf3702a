"""Make data/arithmetic: word problems in GSM8K's columns, from a small closed vocabulary.

    python tiny/make_word_problems.py

The same files come out every time.

A family is a row of families.jsonl: a question with blanks, the numbers that each blank may hold,
and the steps that solve it. Its level is its number of steps, 1 to 4. A problem is valid if every
step gives a whole number from 1 to 999.

A step can be written directly (`33 * 4 = 132`) or carefully, in easier pieces
(`33 * 4 = 120 + 12 = 132`).

Within a family, the splits share no operands. A checksum of the family's name and the operands
decides the split, so this holds for any size and seed.

The generator draws with `random.Random(str).random()` alone, which Python promises never to change.
"""

import json
import math
import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pandas

NAMES = ("Ana", "Ben", "Eva", "Leo", "Lily", "Mia", "Sam", "Tom")
THINGS = ("apples", "books", "cakes", "cards", "eggs", "pens", "shells", "toys")
MAX_RESULT = 999
# Each family has a tenth of its operands for test, a tenth for validation, the rest for training.
SIZES = {"train": 10_000, "validation": 2_000, "test": 2_000}
# After this many draws in a row without a new problem, `generate` raises, as if none were left.
MAX_MISSES_IN_A_ROW = 1_000


class Operator(NamedTuple):
    """A step of two operands, `x operator y`."""

    text: str  # how the step is written
    fraction: Callable[[int, int], tuple[int, int]]  # its value as (numerator, denominator)


OPERATORS = {
    "+": Operator("{x} + {y}", lambda x, y: (x + y, 1)),
    "-": Operator("{x} - {y}", lambda x, y: (x - y, 1)),
    "*": Operator("{x} * {y}", lambda x, y: (x * y, 1)),
    "/": Operator("{x} / {y}", lambda x, y: (x, y)),
    "%": Operator("{x}% of {y}", lambda x, y: (x * y, 100)),
    "part": Operator("1/{x} of {y}", lambda x, y: (y, x)),
}


def easier_pieces(x: int, operator: str, y: int) -> list[str]:
    """What a careful solver writes between the step `x operator y` and its result.

    These are expressions of the same value. A step that is easy as it stands has none.
    """
    if operator == "+":
        tens = _tens(x) + _tens(y)
        units = _units(x) + _units(y)
        return [f"{tens} + {units}"] if tens and units else []
    if operator == "-":
        tens = _tens(y)
        units = _units(y)
        return [f"{x} - {tens} - {units}", f"{x - tens} - {units}"] if tens and units else []
    if operator == "*":
        small, large = sorted((x, y))
        tens = _tens(large)
        units = _units(large)
        is_hard = tens > 0 and units > 0 and small > 1
        return [f"{tens * small} + {units * small}"] if is_hard else []
    if operator == "/":
        tens = _tens(x // y)
        units = _units(x // y)
        is_hard = tens > 0 and units > 0 and y > 1
        return [f"{tens * y} / {y} + {units * y} / {y}", f"{tens} + {units}"] if is_hard else []
    if operator == "part":
        return [f"{y} / {x}", *easier_pieces(y, "/", x)]
    return _easier_percentage(x, y)


def _easier_percentage(percent, y):
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


def _tens(number):
    return number // 10 * 10


def _units(number):
    return number % 10


# A line such as "3 * 4 = 12", "33 * 4 = 120 + 12 = 132", "25% of 40 = 10" or "1/4 of 40 = 10".
STEP = re.compile(
    r"^(?:(?P<first>\d{1,12})(?P<operator> [-+*/] |% of )|1/(?P<divisor>\d{1,12}) of )"
    r"(?P<second>\d{1,12})(?P<pieces>(?: = [^=\n]+)*) = (?P<result>\d{1,12})$",
    re.MULTILINE,
)


def checked_steps(text: str) -> list[tuple[str, bool]]:
    """Each step of a completion as (its kind, whether its result is right).

    A step that has easier pieces is "careful" if it is written with them, and "direct" if not. A
    step that has none is "easy".
    """
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


def _never():
    return False


@dataclass(frozen=True)
class Family:
    """Problems that differ in their operands and words alone."""

    name: str
    question: str  # with blanks for the operands' letters, and for names and things
    operands: dict  # letter -> the values that it may take
    # Each step is "x operator y", where x and y are letters, or earlier results r1, r2, ...
    steps: tuple

    @property
    def level(self):
        return len(self.steps)

    def solve(
        self, operands: dict[str, int], is_careful: Callable[[], bool] = _never
    ) -> tuple[list[str], int] | None:
        """The solution as (lines, result); None if a result is not whole or not in 1 to 999.

        Args:
            operands: the value of each letter.
            is_careful: asked once for each step whether it is written in easier pieces.
        """
        values = dict(operands)
        lines = []
        result = None
        for number, step in enumerate(self.steps, start=1):
            x_name, symbol, y_name = step.split()
            x = values[x_name]
            y = values[y_name]
            operator = OPERATORS[symbol]
            numerator, denominator = operator.fraction(x, y)
            result, remainder = divmod(numerator, denominator)
            if remainder or not 1 <= result <= MAX_RESULT:
                return None
            values[f"r{number}"] = result
            sides = [operator.text.format(x=x, y=y)]
            if is_careful():
                sides += easier_pieces(x, symbol, y)
            sides.append(str(result))
            lines.append(" = ".join(sides))
        return lines, result

    def split_of(self, operands: dict[str, int]) -> str:
        values = ",".join(str(operands[letter]) for letter in self.operands)
        checksum = zlib.crc32(f"{self.name}:{values}".encode())
        bucket = checksum % 100 // 10  # the tens digit, 0 to 9
        if bucket == 0:
            return "test"
        if bucket == 1:
            return "validation"
        return "train"


def _parse_values(text):
    """What an operand may be: "2 to 99", "20 to 500 by 5", or a list such as "10 20 25"."""
    if " to " not in text:
        return tuple(int(value) for value in text.split())
    bounds, _, step = text.partition(" by ")
    first, last = bounds.split(" to ")
    return range(int(first), int(last) + 1, int(step or 1))


def _read_family(row):
    operands = {letter: _parse_values(text) for letter, text in row["operands"].items()}
    return Family(row["name"], row["question"], operands, tuple(row["steps"].split(", ")))


FOLDER = Path(__file__).parent
FAMILIES = tuple(
    _read_family(json.loads(line))
    for line in (FOLDER / "families.jsonl").read_text("utf-8").splitlines()
)


def generate(split: str, num_problems: int, seed: int = 0, careful: float = 0.0) -> list[dict]:
    """Distinct problems: dicts of question, answer (one step a line, then "#### N") and level.

    The levels take turns, and a shorter list is the beginning of a longer one. No question appears
    twice. In validation and test, no operands appear twice within a family either. The smallest
    families do not have enough operands for their share of 2,000 problems; other families of the
    same level then give more.

    Args:
        careful: the share of steps that are written in easier pieces. It does not change which
            problems are drawn.

    Raises ValueError if the split does not have this many distinct problems.
    """
    families_by_level = [
        [family for family in FAMILIES if family.level == level] for level in (1, 2, 3, 4)
    ]
    problem_rng = random.Random(f"word problems/{split}/{seed}")
    style_rng = random.Random(f"careful/{split}/{seed}")

    def is_careful():
        return style_rng.random() < careful

    problems = []
    earlier_keys = set()
    misses_in_a_row = 0
    while len(problems) < num_problems:
        families = families_by_level[len(problems) % len(families_by_level)]
        family = _choose(problem_rng, families)
        operands = _draw_operands(problem_rng, family, split)
        question = family.question.format(**operands, **_draw_words(problem_rng))
        key = question if split == "train" else (family.name, *operands.values())
        if key in earlier_keys:
            misses_in_a_row += 1
            if misses_in_a_row == MAX_MISSES_IN_A_ROW:
                raise ValueError(
                    f"only {len(problems)} of {num_problems} distinct {split} problems found"
                )
            continue
        misses_in_a_row = 0
        earlier_keys.add(key)
        lines, result = family.solve(operands, is_careful)
        answer = "\n".join([*lines, f"#### {result}"])
        problems.append({"question": question, "answer": answer, "level": family.level})
    return problems


def _choose(rng, values):
    return values[int(rng.random() * len(values))]


def _draw_operands(rng, family, split):
    """Operands of a valid problem that belong to the split."""
    while True:
        operands = {letter: _choose(rng, values) for letter, values in family.operands.items()}
        if family.split_of(operands) == split and family.solve(operands):
            return operands


def _draw_words(rng):
    """What fills the blanks for two different names and two different things."""
    name = _choose(rng, NAMES)
    things = _choose(rng, THINGS)
    friend = _choose(rng, [candidate for candidate in NAMES if candidate != name])
    other_things = _choose(rng, [candidate for candidate in THINGS if candidate != things])
    return {"name": name, "friend": friend, "things": things, "others": other_things}


def main():
    for split, size in SIZES.items():
        rows = pandas.DataFrame(generate(split, size))
        path = FOLDER.parent / "data" / "arithmetic" / f"{split}.parquet"
        rows.to_parquet(
            path, index=False, compression="brotli", compression_level=11, use_dictionary=False
        )


if __name__ == "__main__":
    main()
