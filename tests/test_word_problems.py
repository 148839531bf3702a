"""The word problems: right by recomputation from their text, and split so that no test operands are trained on."""

import hashlib
import json
import re
from collections import Counter
from fractions import Fraction

import pytest

from data.word_problems import FAMILIES, NAMES, SPLITS, THINGS, Family, easier_pieces, generate


@pytest.fixture(scope="module")
def train():
    return generate("train", 10_000)


@pytest.fixture(scope="module")
def test_set():
    return generate("test", 2_000)


def numbers(text):
    return [int(number) for number in re.findall(r"\d+", text)]


def template(question):
    """The question without its names, things and numbers, found without the generator's help."""
    return re.sub(r"\d+", "0", re.sub("|".join(NAMES + THINGS), "_", question))


def operand_tuples(problems):
    return [(template(problem["question"]), *numbers(problem["question"])) for problem in problems]


def evaluate(expression):
    """A side of a step by exact arithmetic, from its text: an oracle apart from the generator's own operators."""
    if match := re.fullmatch(r"(\d+)% of (\d+)", expression):
        return Fraction(int(match[1]), 100) * int(match[2])
    if match := re.fullmatch(r"1/(\d+) of (\d+)", expression):
        return Fraction(1, int(match[1])) * int(match[2])
    if match := re.fullmatch(r"(.+) ([-+]) (\d+|\d+ / \d+)", expression):
        left, right = evaluate(match[1]), evaluate(match[3])
        return left + right if match[2] == "+" else left - right
    if match := re.fullmatch(r"(\d+) ([*/]) (\d+)", expression):
        return Fraction(match[1]) * (
            Fraction(match[3]) if match[2] == "*" else 1 / Fraction(match[3])
        )
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
        assert not Counter(numbers(problem["question"])) - Counter(numbers("\n".join(steps))), (
            problem
        )


def test_every_careful_step_is_true_from_piece_to_piece():
    """The same problems with all steps careful: what stands on either side of a = is equal, no number is above 999."""
    lines = Counter()
    for split, n in (("train", 10_000), ("validation", 2_000), ("test", 2_000)):
        for problem, direct in zip(
            generate(split, n, careful=1.0), generate(split, n), strict=True
        ):
            assert problem["question"] == direct["question"]
            for step, short in zip(
                problem["answer"].split("\n"), direct["answer"].split("\n"), strict=True
            ):
                sides, ends = step.split(" = "), short.split(" = ")
                assert (sides[0], sides[-1]) == (ends[0], ends[-1])
                assert step.startswith("#### ") or len({evaluate(side) for side in sides}) == 1, (
                    step
                )
                assert all(0 < number <= 999 for number in numbers(step)), step
                lines[len(sides) > 2] += not step.startswith("####")
    assert lines[True] > 10_000 and lines[False] > 1_000, "steps that are easy have no pieces"


def test_pieces_worked_by_hand():
    """The pieces that make a step easy; a step that is easy has none."""
    assert easier_pieces(47, "+", 38) == ["70 + 15"] and easier_pieces(47, "+", 30) == ["70 + 7"]
    assert easier_pieces(85, "-", 38) == ["85 - 30 - 8", "55 - 8"]
    assert easier_pieces(33, "*", 4) == easier_pieces(4, "*", 33) == ["120 + 12"]
    assert easier_pieces(155, "/", 5) == ["150 / 5 + 5 / 5", "30 + 1"]
    assert easier_pieces(4, "part", 84) == ["84 / 4", "80 / 4 + 4 / 4", "20 + 1"]
    assert easier_pieces(25, "%", 80) == ["80 / 4"] and easier_pieces(50, "%", 12) == ["12 / 2"]
    assert easier_pieces(30, "%", 80) == ["3 * 8"] and easier_pieces(40, "%", 480) == [
        "4 * 48",
        "160 + 32",
    ]
    assert easier_pieces(75, "%", 80) == ["3 * 20"] and easier_pieces(60, "%", 85) == [
        "3 * 17",
        "30 + 21",
    ]
    easy = [
        (7, "+", 8),
        (40, "+", 30),
        (85, "-", 8),
        (85, "-", 30),
        (7, "*", 8),
        (4, "*", 30),
        (1, "*", 35),
    ]
    for step in [*easy, (42, "/", 6), (120, "/", 4), (35, "/", 1)]:
        assert easier_pieces(*step) == [], step


def test_as_many_steps_are_careful_as_asked_for():
    """Some 77 % of 5,000 steps can be careful, so a share of them is within 4 standard errors of 0.007."""
    steps = [
        step
        for problem in generate("train", 2_000, careful=1.0)
        for step in problem["answer"].split("\n")
    ]
    some = [
        step
        for problem in generate("train", 2_000, careful=0.3)
        for step in problem["answer"].split("\n")
    ]
    careful = [i for i, step in enumerate(steps) if step.count("=") > 1]
    assert len(careful) / 5_000 == pytest.approx(0.77, abs=0.03)
    assert sum(some[i] == steps[i] for i in careful) / len(careful) == pytest.approx(0.3, abs=0.03)


def test_the_answer_is_what_the_story_asks_for(test_set):
    words = {"name": "Ana", "friend": "Ben", "things": "eggs", "others": "pens"}
    stories = {
        template(family.question.format(**words, **dict.fromkeys("abcde", 0))): family
        for family in FAMILIES
    }
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
    assert Family("t", "", {}, ("a / b", "r1 + a")).solve({"a": 84, "b": 4}) == (
        ["84 / 4 = 21", "21 + 84 = 105"],
        105,
    )


@pytest.mark.parametrize(
    ("steps", "a", "b"),
    [
        ("a / b", 7, 2),
        ("a - b", 3, 3),
        ("a - b", 3, 5),
        ("a + b", 999, 1),
        ("a % b", 25, 30),
        ("a part b", 3, 10),
    ]
    + [("a - b, r1 + a", 3, 5)],  # an earlier result out of range
)
def test_results_that_are_not_whole_or_out_of_range_are_refused(steps, a, b):
    assert Family("t", "", {}, tuple(steps.split(", "))).solve({"a": a, "b": b}) is None


def test_no_two_splits_share_operands_within_a_template(train, test_set):
    tested = set(operand_tuples(test_set + generate("test", 500, seed=1)))
    validated = set(
        operand_tuples(generate("validation", 2_000) + generate("validation", 500, seed=1))
    )
    trained = set(operand_tuples(train + generate("train", 2_000, seed=1)))
    assert (
        tested.isdisjoint(trained)
        and tested.isdisjoint(validated)
        and validated.isdisjoint(trained)
    )
    gift, operands = FAMILIES[0], [{"a": a, "b": b} for a in range(2, 100) for b in range(2, 100)]
    shares = Counter(gift.split_of(pair) for pair in operands)
    assert [shares[split] / len(operands) for split in SPLITS] == pytest.approx(
        [0.1, 0.1, 0.8], abs=0.01
    )


def test_problems_are_distinct_short_and_of_a_small_vocabulary(train, test_set):
    questions = {problem["question"] for problem in train}
    assert len(questions) == len(train) and len(set(operand_tuples(test_set))) == 2_000
    assert (
        len({word for question in questions for word in re.findall(r"[A-Za-z]+", question)}) <= 100
    )
    assert max(len(question.split()) for question in questions) <= 45


def test_the_test_set_never_changes(test_set):
    """A changed test set makes every earlier accuracy incomparable, so it may only change on purpose."""
    first = hashlib.sha256(json.dumps(test_set[:500]).encode()).hexdigest()
    assert first[:16] == "9c5bd30eee847934", "these were all when there were only 500"
    assert hashlib.sha256(json.dumps(test_set).encode()).hexdigest()[:16] == "f1b76ffc156c03ce"
    validation = hashlib.sha256(json.dumps(generate("validation", 2_000)).encode()).hexdigest()
    assert validation[:16] == "260e706f3ff4b099"


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
        (("test", 10_000), r"only \d\d\d\d of 10000 distinct test problems"),
    ],
)
def test_what_cannot_be_generated_is_a_value_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(*arguments)
