"""The rewards of the studies that err, or that can be hacked."""

import pytest
import torch

import experiments.controls  # noqa: F401 (it adds its evaluators)
from evaluator import get_evaluator

RIGHT = "<reasoning>\n40 + 2 = 42\n</reasoning>\n<answer>\n42\n</answer>"
WRONG = RIGHT.replace("42", "43")


def rewards_of(name, completions, gold="42"):
    evaluator = get_evaluator(name, prompt="reasoning_answer")
    rewards = evaluator.compute_rewards(
        [""] * len(completions), completions, [gold] * len(completions)
    )
    return evaluator.total(rewards), rewards.details


@pytest.mark.parametrize(
    ("name", "share_of_right", "share_of_wrong"),
    [
        ("noise0.1", 0.9, 0.1),
        ("noise0.4", 0.6, 0.4),
        ("false_positives0.2", 1.0, 0.2),
        ("false_negatives0.4", 0.6, 0.0),
    ],
)
def test_how_often_right_and_wrong_answers_are_rewarded(name, share_of_right, share_of_wrong):
    """Without the reward for the answer either completion has 2 for its format."""
    torch.manual_seed(0)
    for completion, share in ((RIGHT, share_of_right), (WRONG, share_of_wrong)):
        totals, details = rewards_of(name, [completion] * 2_000)
        assert set(totals.tolist()) <= {2.0, 4.0}
        assert (totals == 4.0).float().mean().item() == pytest.approx(share, abs=0.04)
        assert all(detail["correct_strict"] == (completion == RIGHT) for detail in details)


@pytest.mark.parametrize(
    ("name", "completion", "total"),
    [
        ("random", WRONG, {0.0, 1.0}),
        ("format", RIGHT, {2.0}),
        ("answer_anywhere", RIGHT, {4.0}),
        ("answer_anywhere", WRONG, {2.0}),
        ("answer_anywhere", "41, 42, 43", {2.0}),
        ("answer_anywhere", "421", {0.0}),
        ("bonus_for_steps", RIGHT, {4.2}),
        ("bonus_for_steps", "1 = 1\n" * 50, {10.0}),
        ("bonus_for_length", "x" * 250, {2.5}),
    ],
)
def test_what_a_completion_is_worth(name, completion, total):
    totals, _ = rewards_of(name, [completion])
    assert totals.item() in [pytest.approx(value) for value in total]
