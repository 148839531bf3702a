"""Word problems in GSM8K's schema, from a small closed vocabulary: the data set `arithmetic`.

A family, a row of families.jsonl, is a question with blanks, a range for each blank, and the steps that solve it. Its
level is its number of steps, 1 to 4. A problem is valid when every step gives a whole number from 1 to 999.

A step can be written directly (`33 * 4 = 132`) or carefully, in easier pieces (`33 * 4 = 120 + 12 = 132`).

The splits share no tuple of operands within a family: a checksum of (family, operands) decides the split, so this
holds for any size and seed. Only `random.Random(str).random()` is used, which Python promises never to change.
"""

import math
import random
import zlib
from dataclasses import dataclass
from pathlib import Path

from logs import jsonl

NAMES = ("Ana", "Ben", "Eva", "Leo", "Lily", "Mia", "Sam", "Tom")
THINGS = ("apples", "books", "cakes", "cards", "eggs", "pens", "shells", "toys")
MAX_RESULT = 999
SPLITS = ("test", "validation", "train")  # a tenth of the operands each, and the rest
MAX_MISSES = (
    1_000  # draws in a row that gave nothing new before `generate` says that there is no more
)

# symbol: (how a step is written, its value as numerator and denominator)
OPERATORS = {
    "+": ("{x} + {y}", lambda x, y: (x + y, 1)),
    "-": ("{x} - {y}", lambda x, y: (x - y, 1)),
    "*": ("{x} * {y}", lambda x, y: (x * y, 1)),
    "/": ("{x} / {y}", lambda x, y: (x, y)),
    "%": ("{x}% of {y}", lambda x, y: (x * y, 100)),
    "part": ("1/{x} of {y}", lambda x, y: (y, x)),
}


def easier_pieces(x, operator, y):
    """What a careful solver writes between a step and its result: expressions of the same value; [] for easy steps."""
    if operator == "+":
        tens, units = x // 10 * 10 + y // 10 * 10, x % 10 + y % 10
        return [f"{tens} + {units}"] if tens and units else []
    if operator == "-":
        tens, units = y // 10 * 10, y % 10
        return [f"{x} - {tens} - {units}", f"{x - tens} - {units}"] if tens and units else []
    if operator == "*":
        small, large = sorted((x, y))
        tens, units = large // 10 * 10, large % 10
        return [f"{tens * small} + {units * small}"] if tens and units and small > 1 else []
    if operator == "/":
        tens, units = x // y // 10 * 10, x // y % 10
        return (
            [f"{tens * y} / {y} + {units * y} / {y}", f"{tens} + {units}"]
            if tens and units and y > 1
            else []
        )
    if operator == "part":
        return [f"{y} / {x}", *easier_pieces(y, "/", x)]
    parts, of = x // math.gcd(x, 100), 100 // math.gcd(x, 100)  # 75% is 3 parts of 4
    if of == 5 and y % 10 == 0:
        parts, of = 2 * parts, 10  # tenths are easier than fifths
    if parts == 1:
        return [f"{y} / {of}", *easier_pieces(y, "/", of)]
    return [f"{parts} * {y // of}", *easier_pieces(parts, "*", y // of)]


@dataclass(frozen=True)
class Family:
    """`steps` are "left operator right" over the operands' letters and the earlier results r1, r2, ..."""

    name: str
    question: str
    operands: dict  # letter -> the values that it may take
    steps: tuple

    @property
    def level(self):
        return len(self.steps)

    def solve(self, operands, is_careful=lambda: False):
        """operands: letter -> int; is_careful: asked at each step. Returns (lines, result), or None where a result is
        not whole or not in 1 to 999."""
        values, lines, result = dict(operands), [], None
        for i, step in enumerate(self.steps, start=1):
            left, operator, right = step.split()
            text, compute = OPERATORS[operator]
            x, y = values[left], values[right]
            numerator, denominator = compute(x, y)
            result, remainder = divmod(numerator, denominator)
            if remainder or not 1 <= result <= MAX_RESULT:
                return None
            values[f"r{i}"] = result
            pieces = easier_pieces(x, operator, y) if is_careful() else []
            lines.append(" = ".join([text.format(x=x, y=y), *pieces, str(result)]))
        return lines, result

    def split_of(self, operands):
        key = f"{self.name}:" + ",".join(str(operands[letter]) for letter in self.operands)
        return SPLITS[min(zlib.crc32(key.encode()) % 100 // 10, 2)]


def _values(text):
    """What an operand may be: "2 to 99", "20 to 500 by 5", or a list like "10 20 25"."""
    if " to " not in text:
        return tuple(map(int, text.split()))
    first, last, step = map(
        int, (text if " by " in text else f"{text} by 1").replace(" by ", " to ").split(" to ")
    )
    return range(first, last + 1, step)


FAMILIES = tuple(
    Family(
        row["name"],
        row["question"],
        {letter: _values(text) for letter, text in row["operands"].items()},
        tuple(row["steps"].split(", ")),
    )
    for row in jsonl.read(Path(__file__).with_name("families.jsonl"))
)


def generate(split, n, seed=0, careful=0.0):
    """`n` distinct problems: dicts of question, answer (one step a line, then "#### N") and level.

    careful: the share of steps written in easier pieces; the problems are the same for each. The levels take turns, so
    a shorter list is the beginning of a longer one. No question appears twice, and in validation and test no
    tuple of operands within a family: 2,000 of them take all that the smallest families have, and then more of the
    others. Raises ValueError where `n` cannot be reached.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}")
    by_level = [[family for family in FAMILIES if family.level == level] for level in (1, 2, 3, 4)]
    rng, style = (
        random.Random(f"word problems/{split}/{seed}"),
        random.Random(f"careful/{split}/{seed}"),
    )
    problems, seen, misses = [], set(), 0
    while len(problems) < n:
        family = _pick(rng, by_level[len(problems) % len(by_level)])
        operands = _draw(rng, family, split)
        question = family.question.format(**operands, **_draw_words(rng))
        key = question if split == "train" else (family.name, *operands.values())
        if key in seen:
            misses += 1
            if misses == MAX_MISSES:
                raise ValueError(f"only {len(problems)} of {n} distinct {split} problems found")
            continue
        misses = 0
        seen.add(key)
        lines, result = family.solve(operands, lambda: style.random() < careful)
        problems.append(
            {
                "question": question,
                "answer": "\n".join([*lines, f"#### {result}"]),
                "level": family.level,
            }
        )
    return problems


def _pick(rng, values):
    return values[int(rng.random() * len(values))]


def _draw(rng, family, split):
    """Valid operands of that split."""
    while True:
        operands = {letter: _pick(rng, values) for letter, values in family.operands.items()}
        if family.split_of(operands) == split and family.solve(operands):
            return operands


def _draw_words(rng):
    name, things = _pick(rng, NAMES), _pick(rng, THINGS)
    friend = _pick(rng, [other for other in NAMES if other != name])
    others = _pick(rng, [other for other in THINGS if other != things])
    return {"name": name, "friend": friend, "things": things, "others": others}
