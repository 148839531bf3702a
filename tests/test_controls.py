"""The rewards of the studies that cannot teach."""

import pytest
from controls import calculates

from evaluator import get_evaluator

RIGHT = "<reasoning>\n40 + 2 = 42\n</reasoning>\n<answer>\n42\n</answer>"
WRONG = RIGHT.replace("42", "43")


@pytest.mark.parametrize(
    ("name", "completion", "shares"),
    [
        ("random_reward", WRONG, {0.0: 0.5, 1.0: 0.5}),
        ("format_only", RIGHT, {2.0: 1.0}),
        ("calculation", WRONG, {1.0: 1.0}),
        ("calculation", WRONG.replace("40 + 2 = 43", "It is 43."), {0.0: 1.0}),
        ("calculation", "40 + 2 = 42", {0.0: 1.0}),
    ],
)
def test_how_often_a_completion_gets_each_reward(name, completion, shares):
    evaluator = get_evaluator(f"experiments/controls.py:{name}", "gsm8k")
    examples = [{"question": "", "answer": "42"}] * 2_000
    totals, details = evaluator.score(examples, [completion] * 2_000)
    assert set(totals) == shares.keys()
    for total, share in shares.items():
        assert totals.count(total) / 2_000 == pytest.approx(share, abs=0.04)
    assert all(detail["correct_strict"] == (completion == RIGHT) for detail in details)


@pytest.mark.parametrize("text", ["9 * 18 is", "so $900 / 20", r"3 \times 4", "x = 7 - 2", "5+(3)"])
def test_a_calculation_is_an_operator_between_two_numbers(text):
    assert calculates(f"<reasoning>{text}</reasoning>")
    assert not calculates(f"<reasoning>It is 3-4 of 2 days.</reasoning> {text}")
