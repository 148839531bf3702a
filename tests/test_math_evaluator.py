"""MATH rewards: the format of each prompt, and which answers are equal as mathematics."""

import resource
import sys
from collections import Counter
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

import evaluator
from evaluator import MathEvaluator, are_equal, get_evaluator
from grpo import jsonl
from rl_datasets import PROMPTS

# Each line: whether the answer is right, what are_equal makes of it, who decides it; gold; answer.
PAIRS = Path(__file__).with_name("math_pairs.txt").read_text("utf-8").splitlines()

# Each of these would hang, exhaust the memory or overflow a stack in a computer algebra system.
HOSTILE = [
    "9^{9^{9^{9}}}",
    "9^(9^(9^9+1))",
    "((((9^99)^99)^99)^99)^99",
    "999999999!",
    "(x+1)^{99999}",
    r"(1+\sqrt{2})^{99999999}",
    "+".join(rf"\sqrt[{n}]{{{n}}}" for n in range(2, 30)),
    r"\binom{99999999}{4999999}",
    r"\frac{" * 40 + "1" + "}{2}" * 40,
    r"\sqrt{2+" * 60 + "x" + "}" * 60,
    "(" * 200 + "7" + ")" * 200,
    "9**9**9**9",
    r"\boxed{" * 150_000,
    "9" * 10**6,
    "x\0+1",
    "x+\ud800",
]


def test_pairs_that_our_own_lines_decide(monkeypatch):
    """The others are math-verify's affair. This file as a command counts all of them."""
    monkeypatch.setattr(evaluator, "verify", lambda *_, **__: pytest.fail("math-verify is asked"))
    for line in PAIRS:
        label, gold, answer = line.split(" | ")
        _, verdict, decided_by = label.split()
        if decided_by == "own":
            assert are_equal(gold, answer) == (verdict == "accepted"), line


def test_a_verdict_in_a_thread_is_the_same():
    """math-verify's limits are signals, which only the main thread can have: all was unequal."""
    with ThreadPool(1) as pool:
        assert pool.starmap(are_equal, [(r"\frac12", "0.5"), ("x^2+1", "1+x^2"), ("5", "x=6")]) == [
            True,
            True,
            False,
        ]


@pytest.mark.parametrize(
    ("gold", "answer", "is_right"),
    [
        ("5", "5.", True),
        ("(1, 2)", "(1, 2).", True),
        (r"\frac12", "**0.5**.", True),
        ("5", "**5**", True),
        (r"5 \text{ million}", r"5\text{ million}", True),
        ("10_2", "10_3", False),
        ("5", "6=5", False),
        ("5", "x=5", True),
        ("12", "4(3)", True),
        ("3t", "3", False),
    ],
)
def test_marks_bases_units_and_magnitudes(gold, answer, is_right):
    assert are_equal(gold, answer) == is_right


def test_hostile_input_is_wrong_and_takes_little_memory():
    """Time is bounded by math-verify, which gives up after seconds."""
    memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for answer in HOSTILE:
        assert not are_equal("7", answer)
        assert not are_equal("x+1", answer)
    for gold, answer in ("", ""), ("5", ""), (" ", "$$"), (str(2**53 + 1), str(2**53)):
        assert not are_equal(gold, answer)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before < 500_000  # kB


@pytest.mark.parametrize("prompt_name", ("r1_zero", "question_only", "reasoning_answer"))
def test_every_gold_answer_of_math500_equals_itself(prompt_name, data_folder):
    rows = jsonl.read(data_folder / "data" / "math" / "math500.jsonl")
    math = get_evaluator("math", prompt=prompt_name)
    for i, gold in enumerate(row["answer"] for row in rows):
        template = ("%s", r"\boxed{%s}", r"$\boxed{ %s }$.")[i % 3]
        answer = template.replace("%s", gold)
        completion = PROMPTS[prompt_name].format_solution("So \\boxed{1}.", answer)
        rewards, details = math.reward(completion, gold)
        assert rewards == [1, 1], (gold, answer)
        assert details["correct_strict"] and details["correct_flexible"]


# A completion | its gold answer | format, strict and flexible verdict
FORMATS = {
    "r1_zero": r"""
        a</think> <answer>5</answer> | 5 | 1 1 1
        a</think> <answer>\n\boxed{5}\n</answer> and 6 | 5 | 1 1 1
        a</think> <answer>it is \boxed{4}, no, \boxed{\frac{10}{2}}</answer> | 5 | 1 1 1
        \boxed{4}</think> <answer>5</answer> | 5 | 1 1 1
        a</think> <answer>5</answer> <answer>4</answer> | 5 | 1 0 0
        a</think> <answer>5</answer> <answer>6 | 6 | 1 0 1
        5</think> <answer> </answer> | 5 | 1 0 1
        a</think><answer>5</answer> | 5 | 0 0 1
        a</think> <answer>5 | 5 | 0 0 1
        \boxed{5} | 5 | 0 0 1
        it is 5. | 5 | 0 0 1
        </answer></think> <answer>5 | 5 | 0 0 1
        5 <answer>4</answer> 5 | 5 | 0 0 1
        <answer> 4 pens </answer> | 4 | 0 0 1
        none | 5 | 0 0 0""",
    "question_only": r"""
        \boxed{4} or \boxed{5}. | 5 | 1 1 1
        \boxed{5} or \boxed{4}. | 5 | 1 0 0
        \boxed{\{1,\frac{1}{2}\}} | 1, 0.5 | 1 1 1
        \boxed{5} and \boxed{6 | 5 | 1 1 1
        \boxed{5} | \boxed{5} | 1 1 1
        \boxed{5 | 5 | 0 0 1
        <answer>5</answer> 6 | 5 | 0 0 1
        5 | 5 | 0 0 1""",
    "reasoning_answer": r"""
        <reasoning>a</reasoning>\n<answer>$\frac12$</answer> | 0.5 | 1 1 1
        <reasoning>a</reasoning>\n<answer>5</answer> ok | 5 | 0 0 1
        <reasoning>a</reasoning>\n<answer>6</answer> | So it is \boxed{6}. | 1 1 1
        <reasoning>a</reasoning>\n<answer>6</answer> | 5 | 1 0 0""",
}


@pytest.mark.parametrize("prompt_name", FORMATS)
def test_formats_and_verdicts(prompt_name):
    math = MathEvaluator(prompt=prompt_name)
    for row in FORMATS[prompt_name].strip().splitlines():
        completion, gold, expected = row.strip().split(" | ")
        rewards, details = math.reward(completion.replace(r"\n", "\n"), gold)
        verdicts = [rewards[0], rewards[1], details["correct_flexible"]]
        assert verdicts == [int(verdict) for verdict in expected.split()], row
        assert details["format"] == rewards[0]
        assert details["correct_strict"] == rewards[1]
    # The total reward is that of the answer alone.
    example = {"question": "", "answer": "5"}
    assert math.score([example], [r"</think> <answer>4</answer> \boxed{4}"])[0] == [0]


if __name__ == "__main__":
    counts = Counter()
    for line in PAIRS:
        label, gold, answer = line.split(" | ")
        counts[label.split()[0], "accepted" if are_equal(gold, answer) else "refused"] += 1
    print(dict(counts))
