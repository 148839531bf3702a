"""A metric says where it is computed how it adds up over micro-batches and skipped groups.

A list in another file once said which metrics are not means over tokens. A new metric that nobody
added to it was rescaled without a word whenever a group was skipped.
"""

import inspect
from types import SimpleNamespace

import pytest
import torch
from conftest import ragged_batch, rollout_of, run_flags

import main
from config import GRPOConfig, parse
from training.metrics import Maximum, Minimum, Share, TokenShare


def add_new_metrics(monkeypatch):
    """Let compute_loss return one metric of each kind that no other file knows."""
    compute_loss = main.compute_loss
    signature = inspect.signature(compute_loss)

    def with_new_metrics(*args, **kwargs):
        loss, metrics = compute_loss(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs).arguments
        mask = arguments["completion_mask"]  # (B, C)
        positions = torch.arange(mask.shape[1]) * mask  # of each token in its completion
        metrics["share_of_rows"] = Share(len(mask) / arguments["num_sequences"])
        metrics["mean_position"] = TokenShare(positions.sum().item() / arguments["num_tokens"])
        metrics["fewest_tokens"] = Minimum(mask.sum().item())
        metrics["most_tokens"] = Maximum(mask.sum().item())
        return loss, metrics

    monkeypatch.setattr(main, "compute_loss", with_new_metrics)


def metrics_of_update(model, advantages, output_dir):
    """Metrics of an update of three groups of 4 completions, with one micro-batch for a group.

    Completions have (1, 6, 4, 2), (7, 5, 3, 1) and (6, 4, 2, 7) tokens: 13, 16 and 19 in a group,
    48 in all. The positions of a completion's n tokens, from 0, add up to n (n - 1) / 2. Those of
    the groups add up to 22, 34 and 43.
    """
    rollout = rollout_of(ragged_batch(groups=3, group_size=4))
    assert rollout.lengths.view(3, 4).tolist() == [[1, 6, 4, 2], [7, 5, 3, 1], [6, 4, 2, 7]]
    args = parse(GRPOConfig, run_flags("unused", output_dir, beta=0.0, micro_batch_tokens=40))
    run = SimpleNamespace(model=model, base_model=None)
    return main.accumulate_gradient(args, run, rollout, advantages, list(range(12)))


def test_new_metrics_add_up_over_micro_batches(model, tmp_path, monkeypatch):
    add_new_metrics(monkeypatch)
    metrics = metrics_of_update(model, torch.linspace(1, 2, 12), tmp_path)
    assert metrics["share_of_rows"] == pytest.approx(1)
    assert metrics["mean_position"] == pytest.approx((22 + 34 + 43) / 48)
    assert metrics["fewest_tokens"] == 13
    assert metrics["most_tokens"] == 19


def test_a_skipped_group_rescales_only_means_over_tokens(model, tmp_path, monkeypatch):
    """The group of 16 tokens has advantage 0 throughout, and beta is 0: it makes no pass."""
    advantages = torch.linspace(1, 2, 12)
    advantages[4:8] = 0
    add_new_metrics(monkeypatch)
    metrics = metrics_of_update(model, advantages, tmp_path)
    assert metrics["share_of_rows"] == pytest.approx(8 / 12)
    assert metrics["mean_position"] == pytest.approx((22 + 43) / (13 + 19))
    assert metrics["fewest_tokens"] == 13
    assert metrics["most_tokens"] == 19
