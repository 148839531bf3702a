"""The metrics of an update add up over its micro-batches, and leave skipped groups out."""

import pytest
import torch
from conftest import ragged_batch, run_flags, training_rollout, update_gradient

import main
from config import GRPOConfig, parse


def metrics_of_update(model, advantages, monkeypatch):
    """Metrics of an update of three groups of 4 completions, with one micro-batch for a group.

    Its losses of tokens are their positions in their completions, and its clip mask is true on
    the first token of each. Completions have (1, 6, 4, 2), (7, 5, 3, 1) and (6, 4, 2, 7) tokens:
    13, 16 and 19 in a group, 48 in all.
    """

    def loss(advantages, policy_logps, old_logps, mask, config):
        positions = torch.arange(mask.shape[1]).expand(mask.shape)
        return policy_logps * 0 + positions, {"is_first": positions == 0}

    monkeypatch.setitem(main.LOSSES, "grpo_clip", loss)
    config = parse(GRPOConfig, run_flags("unused", "unused", beta=0.0, micro_batch_tokens=40))
    batch = ragged_batch(groups=3, group_size=4) | {"advantages": advantages}
    rollout = training_rollout(batch, config)
    assert rollout.lengths.view(3, 4).tolist() == [[1, 6, 4, 2], [7, 5, 3, 1], [6, 4, 2, 7]]
    return update_gradient(model, None, rollout, config)


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
