"""Word problems in GSM8K's schema, from a small closed vocabulary: the data set `arithmetic`.

A family is a question with blanks, a range for each blank, and the steps that solve it. Its level is its number of
steps, 1 to 4. A problem is valid when every step gives a whole number from 1 to 999.

Train and test share no tuple of operands within a family: a checksum of (family, operands) decides the split, so this
holds for any size and seed. Only `random.Random(str).random()` is used, which Python promises never to change.
"""

import random
import zlib
from dataclasses import dataclass

NAMES = ("Ana", "Ben", "Eva", "Leo", "Lily", "Mia", "Sam", "Tom")
THINGS = ("apples", "books", "cakes", "cards", "eggs", "pens", "shells", "toys")
MAX_RESULT = 999
TEST_PERCENT = 10
MAX_MISSES = 1_000  # draws in a row that gave nothing new before `generate` says that there is no more

# symbol: (how a step is written, its value as numerator and denominator)
OPERATORS = {
    "+": ("{x} + {y}", lambda x, y: (x + y, 1)),
    "-": ("{x} - {y}", lambda x, y: (x - y, 1)),
    "*": ("{x} * {y}", lambda x, y: (x * y, 1)),
    "/": ("{x} / {y}", lambda x, y: (x, y)),
    "%": ("{x}% of {y}", lambda x, y: (x * y, 100)),
    "part": ("1/{x} of {y}", lambda x, y: (y, x)),
}


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

    def solve(self, operands):
        """operands: letter -> int. Returns (lines, result), or None where a result is not whole or not in 1 to 999."""
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
            lines.append(f"{text.format(x=x, y=y)} = {result}")
        return lines, result

    def split_of(self, operands):
        key = f"{self.name}:" + ",".join(str(operands[letter]) for letter in self.operands)
        return "test" if zlib.crc32(key.encode()) % 100 < TEST_PERCENT else "train"


SMALL, NUMBER, PERCENT = range(2, 10), range(2, 100), (10, 20, 25, 30, 40, 50, 60, 75)

FAMILIES = (
    Family(
        "gift",
        "{name} has {a} {things}. {friend} gives {name} {b} more {things}. How many {things} does {name} have now?",
        {"a": NUMBER, "b": NUMBER},
        ("a + b",),
    ),
    Family(
        "give",
        "{name} has {a} {things}. {name} gives {b} {things} to {friend}. How many {things} does {name} have left?",
        {"a": NUMBER, "b": NUMBER},
        ("a - b",),
    ),
    Family(
        "bags",
        "{name} buys {a} bags of {things}. There are {b} {things} in each bag. How many {things} does {name} buy?",
        {"a": SMALL, "b": range(2, 61)},
        ("a * b",),
    ),
    Family(
        "share",
        "{name} shares {a} {things} equally among {b} friends. How many {things} does each friend get?",
        {"a": range(4, 301), "b": SMALL},
        ("a / b",),
    ),
    Family(
        "trade",
        "{name} has {a} {things}. {name} buys {b} more {things} and gives {c} {things} to {friend}. "
        "How many {things} does {name} have left?",
        {"a": NUMBER, "b": NUMBER, "c": NUMBER},
        ("a + b", "r1 - c"),
    ),
    Family(
        "change",
        "{name} buys {a} {things} for {b} dollars each. {name} pays with {c} dollars. "
        "How many dollars does {name} get back?",
        {"a": SMALL, "b": range(2, 31), "c": range(20, 301, 10)},
        ("a * b", "c - r1"),
    ),
    Family(
        "fraction",
        "{name} picks {a} {things}. {name} sells 1/{b} of the {things}. How many {things} does {name} have left?",
        {"a": range(6, 401), "b": SMALL},
        ("b part a", "a - r1"),
    ),
    Family(
        "sale",
        "A box of {things} costs {a} dollars. Today the shop takes {b}% off the price. {name} buys the box. "
        "How many dollars does {name} pay?",
        {"a": range(20, 501, 5), "b": PERCENT},
        ("b % a", "a - r1"),
    ),
    Family(
        "stock",
        "{name} has {a} bags with {b} {things} in each bag and {c} more {things}. "
        "{name} gives {d} {things} to {friend}. How many {things} does {name} have left?",
        {"a": SMALL, "b": range(2, 31), "c": NUMBER, "d": NUMBER},
        ("a * b", "r1 + c", "r2 - d"),
    ),
    Family(
        "boxes",
        "{name} has {a} {things}. {friend} has {b} times as many {things} as {name}. "
        "They put all the {things} equally into {c} boxes. How many {things} are in each box?",
        {"a": NUMBER, "b": range(2, 7), "c": SMALL},
        ("a * b", "a + r1", "r2 / c"),
    ),
    Family(
        "wage",
        "{name} works {a} hours on Monday and {b} hours on Tuesday. {name} gets {c} dollars for each hour "
        "and spends {d} dollars. How many dollars does {name} have left?",
        {"a": SMALL, "b": SMALL, "c": range(5, 21), "d": NUMBER},
        ("a + b", "r1 * c", "r2 - d"),
    ),
    Family(
        "shop",
        "{name} buys {a} {things} for {b} dollars each and {c} {others} for {d} dollars each. "
        "{name} pays with {e} dollars. How many dollars does {name} get back?",
        {"a": SMALL, "b": range(2, 13), "c": SMALL, "d": range(2, 13), "e": range(50, 301, 10)},
        ("a * b", "c * d", "r1 + r2", "e - r3"),
    ),
    Family(
        "harvest",
        "{name} picks {a} {things} each day for {b} days. {name} sells 1/{c} of the {things} "
        "and gives {d} {things} to {friend}. How many {things} does {name} have left?",
        {"a": range(5, 41), "b": SMALL, "c": range(2, 7), "d": range(2, 51)},
        ("a * b", "c part r1", "r1 - r2", "r3 - d"),
    ),
    Family(
        "savings",
        "{name} saves {a} dollars each week for {b} weeks. {friend} gives {name} {c} dollars more. "
        "{name} spends {d}% of the money. How many dollars does {name} have left?",
        {"a": range(5, 41), "b": SMALL, "c": NUMBER, "d": PERCENT},
        ("a * b", "r1 + c", "d % r2", "r2 - r3"),
    ),
)


def generate(split, n, seed=0, levels=(1, 2, 3, 4)):
    """`n` distinct problems: dicts of question, answer (one step a line, then "#### N") and level.

    The levels take turns, so a shorter list is the beginning of a longer one. No question appears twice; in the test
    split no tuple of operands appears twice within a family either. Raises ValueError where `n` cannot be reached.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', not {split!r}")
    by_level = {level: [family for family in FAMILIES if family.level == level] for level in levels}
    if not levels or not all(by_level.values()):
        raise ValueError(f"levels must be among 1 to 4, not {levels}")
    rng = random.Random(f"word problems/{split}/{seed}")
    problems, seen, misses = [], set(), 0
    while len(problems) < n:
        level = levels[len(problems) % len(levels)]
        family = _pick(rng, by_level[level])
        operands, (lines, result) = _draw(rng, family, split)
        question = family.question.format(**operands, **_draw_words(rng))
        key = question if split == "train" else (family.name, *operands.values())
        if key in seen:
            misses += 1
            if misses == MAX_MISSES:
                raise ValueError(f"only {len(problems)} of {n} distinct {split} problems found at levels {levels}")
            continue
        misses = 0
        seen.add(key)
        problems.append({"question": question, "answer": "\n".join([*lines, f"#### {result}"]), "level": level})
    return problems


def _pick(rng, values):
    return values[int(rng.random() * len(values))]


def _draw(rng, family, split):
    """Valid operands of that split, with their solution."""
    while True:
        operands = {letter: _pick(rng, values) for letter, values in family.operands.items()}
        solution = family.solve(operands)
        if solution and family.split_of(operands) == split:
            return operands, solution


def _draw_words(rng):
    name, things = _pick(rng, NAMES), _pick(rng, THINGS)
    friend = _pick(rng, [other for other in NAMES if other != name])
    others = _pick(rng, [other for other in THINGS if other != things])
    return {"name": name, "friend": friend, "things": things, "others": others}
