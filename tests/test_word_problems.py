"""The word problems: right by recomputation from their text, and split without shared operands."""

import hashlib
import json
import re
from collections import Counter
from fractions import Fraction

import pytest

from data.word_problems import (
    FAMILIES,
    NAMES,
    SPLITS,
    THINGS,
    Family,
    checked_steps,
    easier_pieces,
    generate,
)


@pytest.fixture(scope="module")
def train():
    return generate("train", 10_000)


@pytest.fixture(scope="module")
def validation():
    return generate("validation", 2_000)


@pytest.fixture(scope="module")
def test_set():
    return generate("test", 2_000)


def numbers(text):
    return [int(number) for number in re.findall(r"\d+", text)]


def template(question):
    """The question without its names, things and numbers, by its text and not by the generator."""
    without_words = re.sub("|".join(NAMES + THINGS), "_", question)
    return re.sub(r"\d+", "0", without_words)


def operand_tuples(problems):
    return [(template(problem["question"]), *numbers(problem["question"])) for problem in problems]


def steps_of(problems):
    """The lines of all answers, with their last lines, `#### N`."""
    return [line for problem in problems for line in problem["answer"].split("\n")]


def evaluate(expression):
    """One side of a step by exact arithmetic: an oracle apart from the generator's operators."""
    if match := re.fullmatch(r"(\d+)% of (\d+)", expression):
        return Fraction(int(match[1]), 100) * int(match[2])
    if match := re.fullmatch(r"1/(\d+) of (\d+)", expression):
        return Fraction(1, int(match[1])) * int(match[2])
    if match := re.fullmatch(r"(.+) ([-+]) (\d+|\d+ / \d+)", expression):
        x = evaluate(match[1])
        y = evaluate(match[3])
        return x + y if match[2] == "+" else x - y
    if match := re.fullmatch(r"(\d+) ([*/]) (\d+)", expression):
        x = Fraction(match[1])
        y = Fraction(match[3])
        return x * y if match[2] == "*" else x / y
    return Fraction(re.fullmatch(r"\d+", expression)[0])


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
        *steps, last_line = problem["answer"].split("\n")
        assert len(steps) == problem["level"], problem
        available = set(numbers(problem["question"]))
        for step in steps:
            expression, value = step.split(" = ")
            assert evaluate(expression) == int(value), problem
            operands = numbers(expression.removeprefix("1/"))
            assert available.issuperset(operands), f"a number from nowhere: {problem}"
            assert value == str(int(value)) and 1 <= int(value) <= 999, problem
            available.add(int(value))
        assert last_line == f"#### {value}", problem


def test_no_number_of_a_question_is_left_unused(train, test_set):
    """Otherwise the question would ask for something else than the solution gives."""
    for problem in train + test_set:
        steps = problem["answer"].rpartition("\n")[0]
        unused = Counter(numbers(problem["question"])) - Counter(numbers(steps))
        assert not unused, problem


@pytest.mark.parametrize("split", ["train", "validation", "test_set"])
def test_every_careful_step_is_true_from_piece_to_piece(split, request):
    """What stands on either side of a = is equal, the problems are the same, no number is large."""
    direct_problems = request.getfixturevalue(split)
    size = len(direct_problems)
    careful_problems = generate(split.removesuffix("_set"), size, careful=1.0)
    for careful, direct in zip(careful_problems, direct_problems, strict=True):
        assert careful["question"] == direct["question"]
    num_careful = 0
    num_easy = 0
    for careful_step, direct_step in zip(
        steps_of(careful_problems), steps_of(direct_problems), strict=True
    ):
        if careful_step.startswith("####"):
            assert careful_step == direct_step
            continue
        sides = careful_step.split(" = ")
        assert [sides[0], sides[-1]] == direct_step.split(" = ")
        values = {evaluate(side) for side in sides}
        assert len(values) == 1, careful_step
        assert all(0 < number <= 999 for number in numbers(careful_step)), careful_step
        if len(sides) > 2:
            num_careful += 1
        else:
            num_easy += 1
    assert num_careful > size and num_easy > size // 10, "steps that are easy have no pieces"


@pytest.mark.parametrize(
    ("step", "pieces"),
    [
        ((47, "+", 38), ["70 + 15"]),
        ((47, "+", 30), ["70 + 7"]),
        ((85, "-", 38), ["85 - 30 - 8", "55 - 8"]),
        ((33, "*", 4), ["120 + 12"]),
        ((4, "*", 33), ["120 + 12"]),
        ((155, "/", 5), ["150 / 5 + 5 / 5", "30 + 1"]),
        ((4, "part", 84), ["84 / 4", "80 / 4 + 4 / 4", "20 + 1"]),
        ((25, "%", 80), ["80 / 4"]),
        ((50, "%", 12), ["12 / 2"]),
        ((30, "%", 80), ["3 * 8"]),
        ((40, "%", 480), ["4 * 48", "160 + 32"]),
        ((75, "%", 80), ["3 * 20"]),
        ((60, "%", 85), ["3 * 17", "30 + 21"]),
    ],
)
def test_pieces_worked_by_hand(step, pieces):
    assert easier_pieces(*step) == pieces


@pytest.mark.parametrize(
    "step",
    [
        (7, "+", 8),
        (40, "+", 30),
        (85, "-", 8),
        (85, "-", 30),
        (7, "*", 8),
        (4, "*", 30),
        (1, "*", 35),
        (42, "/", 6),
        (120, "/", 4),
        (35, "/", 1),
    ],
)
def test_a_step_that_is_easy_has_no_pieces(step):
    assert easier_pieces(*step) == []


def test_as_many_steps_are_careful_as_asked_for():
    """Some 77 % of 5,000 steps can be careful: 4 standard errors of a share of them are 0.03."""
    all_careful = steps_of(generate("train", 2_000, careful=1.0))
    some_careful = steps_of(generate("train", 2_000, careful=0.3))
    can_be_careful = [i for i, step in enumerate(all_careful) if step.count("=") > 1]
    assert len(can_be_careful) / 5_000 == pytest.approx(0.77, abs=0.03)
    num_careful = sum(some_careful[i] == all_careful[i] for i in can_be_careful)
    assert num_careful / len(can_be_careful) == pytest.approx(0.3, abs=0.03)


def test_the_answer_is_what_the_story_asks_for(test_set):
    words = {"name": "Ana", "friend": "Ben", "things": "eggs", "others": "pens"}
    operands = dict.fromkeys("abcde", 0)
    names = {}  # template -> the family's name
    for family in FAMILIES:
        names[template(family.question.format(**words, **operands))] = family.name
    for problem in test_set:
        story = STORIES[names[template(problem["question"])]]
        answer = story(*numbers(problem["question"].replace("1/", "")))
        assert problem["answer"].endswith(f"\n#### {answer}"), problem


def test_steps_worked_by_hand():
    """40 * 6 = 240, of which a third is 80, leaves 160, of which 25 % is 40."""
    family = Family("t", "", {}, ("a * b", "c part r1", "r1 - r2", "d % r3"))
    lines, result = family.solve({"a": 40, "b": 6, "c": 3, "d": 25})
    assert lines == ["40 * 6 = 240", "1/3 of 240 = 80", "240 - 80 = 160", "25% of 160 = 40"]
    assert result == 40
    family = Family("t", "", {}, ("a / b", "r1 + a"))
    lines, result = family.solve({"a": 84, "b": 4})
    assert lines == ["84 / 4 = 21", "21 + 84 = 105"]
    assert result == 105


@pytest.mark.parametrize(
    ("steps", "a", "b"),
    [
        ("a / b", 7, 2),
        ("a - b", 3, 3),
        ("a - b", 3, 5),
        ("a + b", 999, 1),
        ("a % b", 25, 30),
        ("a part b", 3, 10),
        ("a - b, r1 + a", 3, 5),  # an earlier result is out of range
    ],
)
def test_results_that_are_not_whole_or_out_of_range_are_refused(steps, a, b):
    family = Family("t", "", {}, tuple(steps.split(", ")))
    assert family.solve({"a": a, "b": b}) is None


def test_no_two_splits_share_operands_within_a_template(train, validation, test_set):
    """For any size and seed."""
    in_test = set(operand_tuples(test_set + generate("test", 500, seed=1)))
    in_validation = set(operand_tuples(validation + generate("validation", 500, seed=1)))
    in_train = set(operand_tuples(train + generate("train", 2_000, seed=1)))
    assert in_test.isdisjoint(in_train)
    assert in_test.isdisjoint(in_validation)
    assert in_validation.isdisjoint(in_train)


def test_a_tenth_of_the_operands_are_for_test_and_a_tenth_for_validation():
    all_operands = [{"a": a, "b": b} for a in range(2, 100) for b in range(2, 100)]
    counts = Counter(FAMILIES[0].split_of(operands) for operands in all_operands)
    shares = [counts[split] / len(all_operands) for split in SPLITS]
    assert shares == pytest.approx([0.1, 0.1, 0.8], abs=0.01)


def test_problems_are_distinct_short_and_of_a_small_vocabulary(train, test_set):
    questions = {problem["question"] for problem in train}
    assert len(questions) == len(train)
    assert len(set(operand_tuples(test_set))) == 2_000
    vocabulary = set()
    for question in questions:
        vocabulary.update(re.findall(r"[A-Za-z]+", question))
    assert len(vocabulary) <= 100
    assert max(len(question.split()) for question in questions) <= 45


def checksum(problems):
    return hashlib.sha256(json.dumps(problems).encode()).hexdigest()[:16]


def test_the_test_set_never_changes(validation, test_set):
    """A changed test set makes earlier accuracies incomparable: it may change on purpose alone."""
    assert checksum(test_set[:500]) == "9c5bd30eee847934", "the test set was once these 500"
    assert checksum(test_set) == "f1b76ffc156c03ce"
    assert checksum(validation) == "260e706f3ff4b099"


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
        (("dev", 1), "split must be one of test, validation, train, not 'dev'"),
        pytest.param(
            ("test", 10_000),
            r"only \d\d\d\d of 10000 distinct test problems",
            marks=pytest.mark.slow,  # it tries many times
        ),
    ],
)
def test_what_cannot_be_generated_is_a_value_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(*arguments)


def test_steps_of_arithmetic_are_checked():
    assert checked_steps("3 * 4 = 12\n25% of 40 = 10\n1/4 of 40 = 11\n6 / 0 = 6\n") == [
        ("easy", True),
        ("direct", True),
        ("direct", False),
        ("easy", False),
    ]
    text = "so 3 + 4 = 7\n7 / 2 = 3\n10 - 4 = 6"  # a step is a whole line
    assert checked_steps(text) == [("easy", False), ("easy", True)]
    text = "47 + 38 = 70 + 15 = 85\n85 - 38 = 85 - 30 - 8 = 55 - 8 = 46\n"
    text += "25% of 80 = 80 / 4 = 20\n1 + 1 = 2 = \n2 + 2 == 4\n7 + 1 = 8 = 8"
    assert checked_steps(text) == [
        ("careful", True),
        ("careful", False),
        ("careful", True),
        ("easy", True),
    ]


def test_steps_of_hostile_completions_are_checked():
    """Huge numbers once took for ever, and division by zero raised."""
    lines = [
        f"25% of {'9' * 400} = 5",
        f"{'9' * 5000} / 3 = 5",
        "1/0 of 5 = 5",
        " = " * 9999,
        "1" + " = 1" * 9999,
    ]
    assert checked_steps("\n".join(lines)) == [("easy", False)]
    assert checked_steps("100000000001 / 1 = 100000000000") == [("easy", False)], "no rounding"
