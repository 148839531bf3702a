"""The rewards of experiments/controls.py, as --evaluator finds them."""

import pytest
import torch
from conftest import ROOT

from evaluator import get_evaluator

RIGHT = "<reasoning>\n40 + 2 = 42\n</reasoning>\n<answer>\n42\n</answer>"
WRONG = RIGHT.replace("42", "43")


@pytest.mark.parametrize(
    ("name", "completion", "share_of_reward"),
    [
        ("random", RIGHT, {0.0: 0.5, 1.0: 0.5}),
        ("format_only", RIGHT, {2.0: 1.0}),
        ("format_only", WRONG, {2.0: 1.0}),
        ("format_only", "42", {0.0: 1.0}),
        ("noisy", RIGHT, {4.0: 0.8, 2.0: 0.2}),
        ("noisy", WRONG, {4.0: 0.2, 2.0: 0.8}),
    ],
)
def test_how_often_a_completion_has_which_reward(name, completion, share_of_reward):
    torch.manual_seed(0)
    evaluator = get_evaluator(f"{ROOT}/experiments/controls.py:{name}")
    n = 2_000
    examples = [{"question": "?", "id": str(i)} for i in range(n)]
    rewards = evaluator.compute_rewards([""] * n, [completion] * n, ["42"] * n, examples)
    totals = evaluator.total(rewards)
    assert set(totals.tolist()) == share_of_reward.keys()
    for reward, share in share_of_reward.items():
        assert (totals == reward).float().mean().item() == pytest.approx(share, abs=0.04)
