"""The word problems: right by recomputation from their text, and split so that no test operands are trained on."""

import hashlib
import json
import re
from collections import Counter
from fractions import Fraction

import pytest

from data.word_problems import FAMILIES, NAMES, THINGS, Family, generate


@pytest.fixture(scope="module")
def train():
    return generate("train", 10_000)


@pytest.fixture(scope="module")
def test_set():
    return generate("test", 500)


def numbers(text):
    return [int(number) for number in re.findall(r"\d+", text)]


def template(question):
    """The question without its names, things and numbers, found without the generator's help."""
    return re.sub(r"\d+", "0", re.sub("|".join(NAMES + THINGS), "_", question))


def operand_tuples(problems):
    return [(template(problem["question"]), *numbers(problem["question"])) for problem in problems]


def evaluate(expression):
    """A step's left side by exact arithmetic, from its text: an oracle apart from the generator's own operators."""
    if match := re.fullmatch(r"(\d+)% of (\d+)", expression):
        return Fraction(int(match[1]), 100) * int(match[2])
    if match := re.fullmatch(r"1/(\d+) of (\d+)", expression):
        return Fraction(1, int(match[1])) * int(match[2])
    left, operator, right = re.fullmatch(r"(\d+) ([-+*/]) (\d+)", expression).groups()
    x, y = Fraction(left), Fraction(right)
    return {"+": x + y, "-": x - y, "*": x * y, "/": x / y}[operator]


# The answer in closed form, from reading the story alone.
STORIES = {
    "gift": lambda a, b: a + b,
    "give": lambda a, b: a - b,
    "bags": lambda a, b: a * b,
    "share": lambda a, b: Fraction(a, b),
    "trade": lambda a, b, c: a + b - c,
    "change": lambda a, b, c: c - a * b,
    "fraction": lambda a, b: a * Fraction(b - 1, b),
    "sale": lambda a, b: a * Fraction(100 - b, 100),
    "stock": lambda a, b, c, d: a * b + c - d,
    "boxes": lambda a, b, c: Fraction(a * (1 + b), c),
    "wage": lambda a, b, c, d: (a + b) * c - d,
    "shop": lambda a, b, c, d, e: e - a * b - c * d,
    "harvest": lambda a, b, c, d: a * b * Fraction(c - 1, c) - d,
    "savings": lambda a, b, c, d: (a * b + c) * Fraction(100 - d, 100),
}


def test_every_step_of_every_solution_is_true(train, test_set):
    for problem in train + test_set:
        *steps, last = problem["answer"].split("\n")
        known = set(numbers(problem["question"]))
        assert len(steps) == problem["level"], problem
        for step in steps:
            expression, value = step.split(" = ")
            assert evaluate(expression) == int(value), problem
            operands = numbers(expression.removeprefix("1/"))
            assert known.issuperset(operands), f"a number from nowhere: {problem}"
            assert value == str(int(value)) and 1 <= int(value) <= 999, problem
            known.add(int(value))
        assert last == f"#### {value}", problem
        # A number that no step uses would make the question ask for something else than the solution gives.
        assert not Counter(numbers(problem["question"])) - Counter(numbers("\n".join(steps))), problem


def test_the_answer_is_what_the_story_asks_for(test_set):
    words = {"name": "Ana", "friend": "Ben", "things": "eggs", "others": "pens"}
    stories = {template(family.question.format(**words, **dict.fromkeys("abcde", 0))): family for family in FAMILIES}
    for problem in test_set:
        story = STORIES[stories[template(problem["question"])].name]
        answer = story(*numbers(problem["question"].replace("1/", "")))
        assert problem["answer"].endswith(f"\n#### {answer}"), problem


def test_steps_worked_by_hand():
    """40 * 6 = 240, of which a third is 80, leaves 160, of which 25% is 40."""
    family = Family("t", "", {}, ("a * b", "c part r1", "r1 - r2", "d % r3"))
    lines, result = family.solve({"a": 40, "b": 6, "c": 3, "d": 25})
    assert lines == ["40 * 6 = 240", "1/3 of 240 = 80", "240 - 80 = 160", "25% of 160 = 40"]
    assert result == 40
    assert Family("t", "", {}, ("a / b", "r1 + a")).solve({"a": 84, "b": 4}) == (["84 / 4 = 21", "21 + 84 = 105"], 105)


@pytest.mark.parametrize(
    ("steps", "a", "b"),
    [("a / b", 7, 2), ("a - b", 3, 3), ("a - b", 3, 5), ("a + b", 999, 1), ("a % b", 25, 30), ("a part b", 3, 10)]
    + [("a - b, r1 + a", 3, 5)],  # an earlier result out of range
)
def test_results_that_are_not_whole_or_out_of_range_are_refused(steps, a, b):
    assert Family("t", "", {}, tuple(steps.split(", "))).solve({"a": a, "b": b}) is None


def test_train_and_test_share_no_operands_within_a_template(train, test_set):
    tested = set(operand_tuples(test_set + generate("test", 500, seed=1)))
    assert tested.isdisjoint(operand_tuples(train))
    assert tested.isdisjoint(operand_tuples(generate("train", 2_000, seed=1)))
    gift, operands = FAMILIES[0], [{"a": a, "b": b} for a in range(2, 100) for b in range(2, 100)]
    share = sum(gift.split_of(pair) == "test" for pair in operands) / len(operands)
    assert share == pytest.approx(0.1, abs=0.01), "about a tenth of the operands are for the test"


def test_problems_are_distinct_short_and_of_a_small_vocabulary(train, test_set):
    questions = {problem["question"] for problem in train}
    assert len(questions) == len(train) and len(set(operand_tuples(test_set))) == 500
    assert len({word for question in questions for word in re.findall(r"[A-Za-z]+", question)}) <= 100
    assert max(len(question.split()) for question in questions) <= 45


def test_the_test_set_never_changes(test_set):
    """A changed test set makes every earlier accuracy incomparable, so it may only change on purpose."""
    digest = hashlib.sha256(json.dumps(test_set).encode()).hexdigest()
    assert digest[:16] == "9c5bd30eee847934"


def test_levels_take_turns_and_every_template_is_tested(test_set):
    assert [problem["level"] for problem in test_set[:8]] == [1, 2, 3, 4, 1, 2, 3, 4]
    counts = Counter(template(problem["question"]) for problem in test_set)
    assert len(counts) == len(FAMILIES)
    assert min(counts.values()) >= 20


def test_same_seed_same_problems_and_a_shorter_list_is_the_beginning_of_a_longer_one(train):
    assert generate("train", 300) == train[:300]
    assert generate("train", 300, seed=1) != train[:300]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("validation", 1), "split must be 'train' or 'test'"),
        (("test", 10_000), r"only \d\d\d\d of 10000 distinct test problems"),
    ],
)
def test_what_cannot_be_generated_is_a_value_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(*arguments)
