"""The numbers of the logs, worked by hand and against scipy; of an update, that they add up."""

import math

import pytest
import torch
from conftest import completions_of, ragged_batch
from scipy import stats

import losses
import main
from config import LossConfig
from grpo.metrics import (
    accuracies,
    average,
    evaluation_metrics,
    iteration_metrics,
    wilson_interval,
)


def test_metrics_add_up_over_micro_batches(model, monkeypatch):
    """Three groups of 4 completions, with (1, 6, 4, 2), (7, 5, 3, 1) and (6, 4, 2, 7) tokens.

    The losses of tokens are their positions in their completions, whose mean in n tokens is
    (n - 1) / 2, and the clip mask is true on the first token of each. The second group has
    advantage 0 and no KL, and makes no pass: it counts in the loss, and not in means over tokens.
    """

    def loss(advantages, policy_logps, old_logps, mask, config):
        positions = torch.arange(mask.shape[1]).expand(mask.shape)
        return policy_logps * 0 + positions, {"is_first": positions == 0}

    monkeypatch.setitem(losses.LOSSES, "grpo_clip", loss)
    config = LossConfig(group_size=4, beta=0.0)
    advantages = torch.linspace(1, 2, 12)
    advantages[4:8] = 0
    completions = completions_of(ragged_batch() | {"advantages": advantages})
    metrics = main.accumulate_gradient(model, None, completions, config, micro_batch_tokens=40)
    num_tokens = 13 + 19
    assert metrics["is_first"] == pytest.approx(8 / num_tokens)
    assert metrics["loss"] == pytest.approx((num_tokens - 8) / 2 / 12)


def test_an_average_is_over_the_rows_that_have_the_number():
    assert average([{"a": 1, "b": 4}, {"a": 2}]) == {"a": 1.5, "b": 4}


RECORD = {"reward": 1.0, "length": 1, "finished": True}


def group_metrics(rewards, group_size):
    """iteration_metrics of completions with these rewards."""
    return iteration_metrics([RECORD | {"reward": reward} for reward in rewards], group_size)


def test_spread_of_rewards_by_hand():
    metrics = group_metrics([1.0, 0.0, 0.0, 1.0, 2.0, 4.0, 6.0, 8.0], 4)
    assert metrics["reward"] == pytest.approx(22 / 8)
    assert metrics["zero_std_fraction"] == 0
    assert group_metrics([0.0, 1e-9], 2)["zero_std_fraction"] == 0
    # The unbiased variances are 1/3 and 20/3.
    assert metrics["reward_std"] == pytest.approx(((1 / 3) ** 0.5 + (20 / 3) ** 0.5) / 2)


def test_equal_and_missing_rewards_have_no_spread():
    """Six float32 rewards of 2.35; groups with two rewards, with one and with none."""
    reward = torch.tensor(2.35).item()
    assert group_metrics([reward] * 6, 6)["zero_std_fraction"] == 1
    nan = math.nan
    metrics = group_metrics([1.0, nan, 3.0, nan, nan, nan, 5.0, nan, nan, nan, nan, nan], 4)
    assert metrics["reward"] == pytest.approx(3.0)
    assert metrics["reward_std"] == pytest.approx(2**0.5 / 3)
    assert metrics["zero_std_fraction"] == pytest.approx(2 / 3)
    assert "zero_std_fraction" not in group_metrics([1.0, 0.0], 1), "a single reward has no spread"


def test_distinct_word_pairs_of_a_batch_of_stories_by_hand():
    """Three stories with 2 pairs of words each, and none across stories: 3 of the 6 differ."""
    stories = [RECORD | {"rewards/distinct_2": 1.0} for _ in range(3)]
    for story, text in zip(stories, ("A red fox", "a red fox.", "A red hen"), strict=True):
        story["completion"] = text
    assert iteration_metrics(stories, 3)["distinct_2_batch"] == 3 / 6


def test_what_is_logged_of_verdicts_by_hand():
    records = []
    for i in range(5):
        verdicts = {"format": i < 2, "correct_strict": i == 0, "correct_flexible": i < 2}
        records.append(RECORD | verdicts | {"length": 10 * i, "finished": i < 3})
    metrics = iteration_metrics(records, 5)
    assert (metrics["accuracy"], metrics["accuracy_flexible"]) == (1 / 5, 2 / 5)
    assert metrics["response_length_correct"] == 0
    assert metrics["response_length_incorrect"] == (10 + 20 + 30 + 40) / 4
    metrics = evaluation_metrics(records, 1)
    assert {name: metrics[name] for name in metrics if not name.endswith(("_low", "_high"))} == {
        "n": 5,
        "accuracy": 1 / 5,
        "accuracy_flexible": 2 / 5,
        "count/format1_answer1": 1,
        "count/format1_answer0": 1,
        "count/format0_answer0": 3,
        "reward": 1,
        "response_length": 20,
        "truncated_fraction": 2 / 5,
    }
    assert evaluation_metrics(records, 5)["n"] == 1


def test_wilson_interval_agrees_with_scipy():
    """Which has it for whole numbers only."""
    for successes, n in ((0, 1), (1, 1), (1, 7), (439, 1319), (1319, 1319)):
        interval = stats.binomtest(successes, n).proportion_ci(0.95, method="wilson")
        low, high = wilson_interval(successes, n)
        assert (low, high) == pytest.approx((interval.low, interval.high), abs=1e-9)
        assert 0 <= low < high <= 1


def test_an_interval_counts_problems_and_not_samples():
    """Problems with 3 and 0 of 4 right samples are 0.75 of 2; pass@k is that of pass_at_k."""
    metrics = accuracies("accuracy", [True, True, True, False] + [False] * 4, num_samples=4)
    low, high = wilson_interval(0.75, 2)
    expected = {"accuracy": 0.375, "accuracy_low": low, "accuracy_high": high}
    expected |= {"pass@1": 0.375, "pass@2": 0.5, "pass@3": 0.5, "pass@4": 0.5}
    assert metrics == pytest.approx(expected)
