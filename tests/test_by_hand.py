"""Numbers worked by hand: advantages, masked means, and the loss of two completions.

They need nothing but main.py and utils.py.

Shapes: B = 2 sequences, P = 2 prompt tokens, C = 3 completion tokens, T = P + C.
"""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import main
import utils
from config import LossConfig


def test_group_normalization_by_hand():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0, 4.0, 6.0, 8.0])
    first_std = (1 / 3) ** 0.5  # mean 1/2, unbiased variance 1/3
    second_std = (20 / 3) ** 0.5  # mean 5, unbiased variance 20/3
    centred = [0.5, -0.5, -0.5, 0.5, -3, -1, 1, 3]
    expected = [x / first_std for x in centred[:4]] + [x / second_std for x in centred[4:]]
    advantages = main.compute_group_normalized_rewards(rewards, 4, 0.0, True)
    assert advantages.tolist() == pytest.approx(expected, rel=1e-6)
    not_divided = main.compute_group_normalized_rewards(rewards, 4, 0.0, False)
    assert not_divided.tolist() == centred
    with_eps = main.compute_group_normalized_rewards(rewards[:4], 4, 1.0, True)
    assert with_eps[0].item() == pytest.approx(0.5 / (first_std + 1))
    by_default = main.compute_group_normalized_rewards(1e-6 * rewards[:4], 4)
    assert by_default[0].item() == pytest.approx(0.5 / (first_std + 1))


def test_equal_rewards_have_advantage_exactly_zero():
    """The mean of six float32 rewards of 2.35 is rounded; with eps 1e-6 that gave -0.189."""
    assert main.compute_group_normalized_rewards(torch.full((6,), 2.35), 6).tolist() == [0.0] * 6


def test_missing_rewards_leave_the_mean_and_std():
    nan = math.nan
    rewards = torch.tensor([1.0, nan, 3.0, nan, nan, nan, 5.0, nan, nan, nan, nan, nan])
    advantages = main.compute_group_normalized_rewards(rewards, 4, 0.0, True)
    root = 0.5**0.5  # rewards 1 and 3: mean 2, unbiased std sqrt 2
    assert advantages[[0, 2, 6]].tolist() == pytest.approx([-root, root, 0.0])
    assert torch.equal(advantages.isnan(), rewards.isnan())


def test_masked_reductions_by_hand():
    values = torch.tensor([[1.0, 2.0, math.nan], [4.0, 5.0, 6.0]])
    mask = torch.tensor([[True, True, False], [False, False, False]])
    assert utils.masked_mean(values, mask).item() == 1.5
    assert utils.masked_mean(values, mask, dim=1).tolist()[0] == 1.5
    assert utils.masked_mean(values, mask, dim=1)[1].isnan()


# --- The loss, with the default settings ----------------------------------------------------------

LN2 = math.log(2)
# The log-probs (B, C). The first completion has two tokens, and padding that must not count.
POLICY = [[-1.0, -2.0, -9.0], [-0.5, -1.5, -3.0]]
REFERENCE = [[-1.0 + LN2, -2.0, -1.0], [-0.5 - LN2, -1.5 + LN2, -3.0]]
COMPLETION_MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
ADVANTAGES = torch.tensor([1.0, -2.0])
PROMPT_COMPLETION_IDS = torch.arange(10).view(2, 5)
ATTENTION_MASK = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]])


def loss_of(reference, monkeypatch, beta=0.04, temperature=1.0):
    """(loss, metrics, the gradient with respect to the policy's log-probs)."""
    policy = torch.tensor(POLICY, requires_grad=True)
    expected_temperature = temperature

    def get_per_token_logps(
        model,
        prompt_completion_ids,
        attention_mask,
        logits_to_keep,
        temperature=1.0,
        return_entropy=False,
        group_size=1,
        **_,
    ):
        assert temperature == expected_temperature
        assert group_size == 1, "pass on what compute_loss is given"
        assert model is not None, "beta is 0: there is no reference"
        assert torch.equal(prompt_completion_ids, PROMPT_COMPLETION_IDS)
        assert torch.equal(attention_mask, ATTENTION_MASK)
        assert logits_to_keep == 3
        if model == "reference":
            assert not torch.is_grad_enabled(), "the reference needs no gradient"
        logps = policy if model == "policy" else torch.tensor(reference)
        return (logps, torch.zeros_like(logps)) if return_entropy else logps

    monkeypatch.setattr(utils, "get_per_token_logps", get_per_token_logps)
    monkeypatch.setattr(main, "get_per_token_logps", get_per_token_logps, raising=False)
    loss, metrics = main.compute_loss(
        "policy",
        "reference" if beta else None,
        PROMPT_COMPLETION_IDS,
        PROMPT_COMPLETION_IDS[:, -3:],
        ATTENTION_MASK,
        COMPLETION_MASK,
        ADVANTAGES,
        LossConfig(beta=beta, temperature=temperature),
    )
    (gradient,) = torch.autograd.grad(loss, policy)
    return loss.item(), metrics, gradient


def test_loss_and_metrics(monkeypatch):
    loss, metrics, _ = loss_of(REFERENCE, monkeypatch)
    assert loss == pytest.approx(0.506402, abs=1e-6)
    assert metrics["kl"] == pytest.approx(0.160047, abs=1e-6)
    assert metrics["response_length"] == 2.5
    assert all(type(value) is float for value in metrics.values()), "logs take floats"


def test_gradient_of_the_loss(monkeypatch):
    """Padding has none. The KL pulls a token up where the reference finds it likelier."""
    _, _, gradient = loss_of(REFERENCE, monkeypatch)
    by_hand = torch.tensor([[-0.26, -0.25, 0.0], [0.336667, 0.326667, 0.333333]])
    torch.testing.assert_close(gradient, by_hand, atol=1e-6, rtol=0)


def test_loss_of_a_policy_that_is_its_reference(monkeypatch):
    loss, metrics, gradient = loss_of(POLICY, monkeypatch)
    assert loss == pytest.approx(0.5, abs=1e-6)
    assert metrics["kl"] == 0
    by_hand = torch.tensor([[-0.25, -0.25, 0.0], [0.333333, 0.333333, 0.333333]])
    torch.testing.assert_close(gradient, by_hand, atol=1e-6, rtol=0)


def test_beta_and_temperature_are_those_of_the_settings(monkeypatch):
    """The means are 0.160047 for the KL and 0.5 for minus the ratio times the advantage."""
    loss, metrics, _ = loss_of(REFERENCE, monkeypatch, beta=0.5, temperature=0.7)
    assert loss == pytest.approx(0.5 + 0.5 * 0.160047, abs=1e-6)
    loss, metrics, _ = loss_of(REFERENCE, monkeypatch, beta=0.0)
    assert loss == pytest.approx(0.5, abs=1e-6)
    assert "kl" not in metrics or metrics["kl"] == 0
