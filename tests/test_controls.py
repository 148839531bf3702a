"""The rewards of the studies that cannot teach."""

import pytest

from evaluator import get_evaluator

RIGHT = "<reasoning>\n40 + 2 = 42\n</reasoning>\n<answer>\n42\n</answer>"
WRONG = RIGHT.replace("42", "43")


@pytest.mark.parametrize(
    ("name", "completion", "shares"),
    [
        ("random_reward", WRONG, {0.0: 0.5, 1.0: 0.5}),
        ("format_only", RIGHT, {2.0: 1.0}),
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
