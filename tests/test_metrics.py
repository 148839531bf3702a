"""The numbers of the logs: of an update, whose micro-batches add up, and of its completions."""

import math

import pytest
import torch
from conftest import completions_of, ragged_batch

import losses
import main
from config import LossConfig
from grpo.metrics import iteration_metrics


def metrics_of_update(model, advantages, monkeypatch):
    """Metrics of an update of three groups of 4 completions, with one micro-batch for a group.

    Its losses of tokens are their positions in their completions, and its clip mask is true on
    the first token of each. Completions have (1, 6, 4, 2), (7, 5, 3, 1) and (6, 4, 2, 7) tokens:
    13, 16 and 19 in a group, 48 in all.
    """

    def loss(advantages, policy_logps, old_logps, mask, config):
        positions = torch.arange(mask.shape[1]).expand(mask.shape)
        return policy_logps * 0 + positions, {"is_first": positions == 0}

    monkeypatch.setitem(losses.LOSSES, "grpo_clip", loss)
    config = LossConfig(group_size=4, beta=0.0)
    completions = completions_of(ragged_batch() | {"advantages": advantages})
    lengths = [len(completion.ids) for completion in completions]
    assert lengths == [1, 6, 4, 2, 7, 5, 3, 1, 6, 4, 2, 7]
    return main.accumulate_gradient(model, None, completions, config, micro_batch_tokens=40)


def test_metrics_add_up_over_micro_batches(model, monkeypatch):
    metrics = metrics_of_update(model, torch.linspace(1, 2, 12), monkeypatch)
    assert metrics["is_first"] == pytest.approx(12 / 48)
    # The mean position in a completion of n tokens is (n - 1) / 2.
    assert metrics["loss"] == pytest.approx((48 - 12) / 2 / 12)


def test_a_skipped_group_counts_in_the_loss_and_not_in_means_over_tokens(model, monkeypatch):
    """The group of 16 tokens has advantage 0 throughout, and beta is 0: it makes no pass."""
    advantages = torch.linspace(1, 2, 12)
    advantages[4:8] = 0
    metrics = metrics_of_update(model, advantages, monkeypatch)
    assert metrics["is_first"] == pytest.approx(8 / (13 + 19))
    assert metrics["loss"] == pytest.approx((13 + 19 - 8) / 2 / 12)


def group_metrics(rewards, group_size):
    """iteration_metrics of completions with these rewards."""
    records = [{"reward": reward, "length": 1, "finished": True} for reward in rewards]
    return iteration_metrics(records, group_size)


def test_spread_of_rewards_by_hand():
    metrics = group_metrics([1.0, 0.0, 0.0, 1.0, 2.0, 4.0, 6.0, 8.0], 4)
    assert metrics["reward"] == pytest.approx(22 / 8)
    assert metrics["zero_std_fraction"] == 0
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


def test_distinct_word_pairs_of_a_batch_of_stories_by_hand():
    """Three stories with 2 pairs of words each, and none across stories: 3 of the 6 differ."""
    texts = ("A red fox", "a red fox.", "A red hen")
    rewarded = {"reward": 1.0, "length": 1, "finished": True, "rewards/distinct_2": 1.0}
    records = [rewarded | {"completion": text} for text in texts]
    assert iteration_metrics(records, 3)["distinct_2_batch"] == 3 / 6
