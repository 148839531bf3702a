"""The loss of two completions, and its gradient, worked by hand with the default settings."""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import main
import utils

LN2 = math.log(2)
# The first completion has two tokens, and something else where it is padded.
POLICY = [[-1.0, -2.0, -9.0], [-0.5, -1.5, -3.0]]
REFERENCE = [[-1.0 + LN2, -2.0, -1.0], [-0.5 - LN2, -1.5 + LN2, -3.0]]
MASK = [[1, 1, 0], [1, 1, 1]]
ADVANTAGES = [1.0, -2.0]


def loss_of(reference, monkeypatch):
    """(loss, metrics, the gradient with respect to the policy's log-probs)."""
    policy = torch.tensor(POLICY, requires_grad=True)
    logps_of = {"policy": policy, "reference": torch.tensor(reference)}

    def get_per_token_logps(model, *args, return_entropy=False, **kwargs):
        logps = logps_of[model]
        return (logps, torch.zeros_like(logps)) if return_entropy else logps

    monkeypatch.setattr(utils, "get_per_token_logps", get_per_token_logps)
    monkeypatch.setattr(main, "get_per_token_logps", get_per_token_logps, raising=False)
    completion_ids = torch.ones(2, 3, dtype=torch.long)
    prompt_completion_ids = torch.ones(2, 5, dtype=torch.long)
    loss, metrics = main.compute_loss(
        "policy",
        "reference",
        prompt_completion_ids,
        completion_ids,
        torch.ones(2, 5, dtype=torch.long),
        torch.tensor(MASK),
        torch.tensor(ADVANTAGES),
    )
    (gradient,) = torch.autograd.grad(loss, policy)
    return loss.item(), metrics, gradient


def test_loss_and_metrics(monkeypatch):
    loss, metrics, _ = loss_of(REFERENCE, monkeypatch)
    assert loss == pytest.approx(0.506402, abs=1e-6)
    assert metrics["kl"] == pytest.approx(0.160047, abs=1e-6)
    assert metrics["response_length"] == 2.5


def test_gradient(monkeypatch):
    """Padding has none. The KL pulls a token up where the reference has it likelier."""
    _, _, gradient = loss_of(REFERENCE, monkeypatch)
    by_hand = torch.tensor([[-0.26, -0.25, 0.0], [0.336667, 0.326667, 0.333333]])
    torch.testing.assert_close(gradient, by_hand, atol=1e-6, rtol=0)


def test_a_policy_that_is_its_reference(monkeypatch):
    loss, metrics, gradient = loss_of(POLICY, monkeypatch)
    assert loss == pytest.approx(0.5, abs=1e-6)
    assert metrics["kl"] == 0
    by_hand = torch.tensor([[-0.25, -0.25, 0.0], [0.333333, 0.333333, 0.333333]])
    torch.testing.assert_close(gradient, by_hand, atol=1e-6, rtol=0)
