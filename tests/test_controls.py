"""The rewards of the studies that err, or that can be hacked."""

import pytest

from evaluator import get_evaluator

RIGHT = "<reasoning>\n40 + 2 = 42\n</reasoning>\n<answer>\n42\n</answer>"
WRONG = RIGHT.replace("42", "43")


def rewards_of(name, completions):
    evaluator = get_evaluator(f"experiments/controls.py:{name}", "gsm8k")
    return evaluator.score([{"question": "", "answer": "42"}] * len(completions), completions)


@pytest.mark.parametrize(
    ("name", "share_of_right", "share_of_wrong"),
    [
        ("noise_10", 0.9, 0.1),
        ("noise_40", 0.6, 0.4),
        ("false_positives_20", 1.0, 0.2),
        ("false_negatives_40", 0.6, 0.0),
    ],
)
def test_how_often_right_and_wrong_answers_are_rewarded(name, share_of_right, share_of_wrong):
    """Without the reward for the answer either completion has 2 for its format."""
    for completion, share in ((RIGHT, share_of_right), (WRONG, share_of_wrong)):
        totals, details = rewards_of(name, [completion] * 2_000)
        assert set(totals) <= {2.0, 4.0}
        assert totals.count(4.0) / 2_000 == pytest.approx(share, abs=0.04)
        assert all(detail["correct_strict"] == (completion == RIGHT) for detail in details)


@pytest.mark.parametrize(
    ("name", "completion", "totals"),
    [
        ("random_reward", WRONG, {0.0, 1.0}),
        ("format_only", RIGHT, {2.0}),
        ("answer_anywhere", RIGHT, {4.0}),
        ("answer_anywhere", WRONG, {2.0}),
        ("answer_anywhere", "41, 42, 43", {2.0}),
        ("answer_anywhere", "421", {0.0}),
        ("bonus_for_steps", RIGHT, {4.2}),
        ("bonus_for_steps", "1 = 1\n" * 50, {10.0}),
        ("bonus_for_length", "x" * 250, {2.5}),
    ],
)
def test_what_a_completion_is_worth(name, completion, totals):
    (total,), _ = rewards_of(name, [completion])
    assert total in [pytest.approx(value) for value in totals]
