"""The handout's signatures over the project's parts, against numbers worked by hand."""

import cs336
import pytest
import torch
from conftest import random_model


def test_entropy_by_hand_and_stable():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1000.0, 0.0, 0.0, 0.0], [1e4, 1e4, -1e4, -1e4]])
    expected = torch.tensor([4.0, 1.0, 2.0]).log()
    torch.testing.assert_close(cs336.compute_entropy(logits), expected)


def test_tokenize_prompt_and_output_by_hand():
    class Words:
        pad_token_id = 0

        def __call__(self, texts, add_special_tokens):
            return {"input_ids": [[int(w) for w in text.split()] for text in texts]}

    batch = cs336.tokenize_prompt_and_output(["5 6", "7"], ["8", "9 10 11"], Words())
    assert batch["input_ids"].tolist() == [[5, 6, 8], [7, 9, 10]]
    assert batch["labels"].tolist() == [[6, 8, 0], [9, 10, 11]]
    assert batch["response_mask"].tolist() == [[False, True, False], [True, True, True]]


def test_handout_defaults():
    """What the handout lets one leave out, and what it then means."""
    tensor = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    mask = torch.tensor([[1, 0], [1, 1]])
    assert cs336.masked_mean(tensor=tensor, mask=mask).item() == pytest.approx(8 / 3)
    assert cs336.masked_normalize(tensor=tensor, mask=mask, normalize_constant=2.0).item() == 4
    rewards = torch.tensor([[2.0], [1.0]])
    loss, _ = cs336.compute_policy_gradient_loss(tensor, "no_baseline", raw_rewards=rewards)
    assert loss.tolist() == [[-2, -4], [-3, -4]]
    assert torch.equal(cs336.compute_naive_policy_gradient_loss(rewards, tensor), loss)


def test_response_log_probs_and_entropy_by_hand():
    model = random_model()
    ids = torch.tensor([[3, 4, 5, 6]])
    result = cs336.get_response_log_probs(model, ids[:, :-1], ids[:, 1:], return_token_entropy=True)
    log_probs = model(ids[:, :-1]).logits.double().log_softmax(-1)[0]  # (3, V)
    expected = torch.stack([log_probs[t, ids[0, t + 1]] for t in range(3)])
    torch.testing.assert_close(result["log_probs"][0].double(), expected, rtol=1e-5, atol=1e-5)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    torch.testing.assert_close(result["token_entropy"][0].double(), entropy, rtol=1e-5, atol=1e-5)
    assert result["log_probs"].requires_grad


def test_sft_step_by_hand():
    """Log-probs -1, two rows of two and one response tokens, constant 2, 4 accumulation steps.

    The loss is (2 + 1) / 2 / 2 rows / 4 steps.
    """
    log_probs = torch.full((2, 3), -1.0, requires_grad=True)
    mask = torch.tensor([[0, 1, 1], [0, 0, 1]])
    loss, _ = cs336.sft_microbatch_train_step(log_probs, mask, 4, 2.0)
    assert loss.item() == pytest.approx(3 / 16) and not loss.requires_grad
    assert log_probs.grad.tolist() == [[0, -1 / 16, -1 / 16], [0, 0, -1 / 16]]


def test_group_normalized_rewards_from_a_reward_function():
    def reward_fn(response, ground_truth):
        assert ground_truth == "truth"
        return {"reward": 1.0 if response == "a" else 0.0}

    advantages, raw_rewards, metadata = cs336.compute_group_normalized_rewards(
        reward_fn,
        list("abaa"),
        ["truth"] * 4,
        group_size=2,
        advantage_eps=0.0,
        normalize_by_std=False,
    )
    assert raw_rewards.tolist() == [1, 0, 1, 1]
    assert advantages.tolist() == [0.5, -0.5, 0, 0]
    assert metadata["reward"] == 0.75


@pytest.mark.parametrize(
    ("loss_type", "weights", "expected_loss"),
    [
        ("no_baseline", [3.0, 0.0], 3 / 4),
        ("reinforce_with_baseline", [1.0, -2.0], (1 - 7) / 4),
        ("grpo_clip", [1.0, -2.0], (-1 + 2) / 4),
    ],
)
def test_grpo_step_by_hand(loss_type, weights, expected_loss):
    """Two on-policy rows, of one and two response tokens, in 2 accumulation steps.

    weights: each row's reward or advantage.
    """
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], requires_grad=True)
    loss, _ = cs336.grpo_microbatch_train_step(
        log_probs,
        torch.tensor([[1, 0], [1, 1]]),
        2,
        loss_type,
        raw_rewards=torch.tensor([[3.0], [0.0]]),
        advantages=torch.tensor([[1.0], [-2.0]]),
        old_log_probs=log_probs.detach().clone(),
        cliprange=0.2,
    )
    assert log_probs.grad[0].tolist() == pytest.approx([-weights[0] / 4, 0])
    assert log_probs.grad[1].tolist() == pytest.approx([-weights[1] / 8, -weights[1] / 8])
    assert loss.item() == pytest.approx(expected_loss) and not loss.requires_grad


def test_clipped_loss_by_hand():
    """Ratios 2 and 0.5, of which the clip at 0.2 stops one for each sign of the advantage."""
    old_log_probs = torch.zeros(2, 2)
    log_probs = torch.tensor([2.0, 0.5]).log().expand(2, 2)
    advantages = torch.tensor([[1.0], [-2.0]])
    loss, _ = cs336.compute_grpo_clip_loss(advantages, log_probs, old_log_probs, 0.2)
    torch.testing.assert_close(loss, torch.tensor([[-1.2, -0.5], [4.0, 1.6]]))


def test_r1_zero_reward():
    rewards = cs336.r1_zero_reward_fn("2 + 2 = 4 </think> <answer>4</answer>", "5")
    assert rewards == {"format_reward": 1, "answer_reward": 0, "reward": 0}


def test_log_generations():
    entropies = torch.tensor([[1.0, 3.0], [5.0, 9.0]])
    mask = torch.tensor([[1, 1], [1, 0]])
    reward_fn = cs336.question_only_reward_fn
    rows, lengths = cs336.log_generations(
        ["p", "q"], ["\\boxed{1}", "\\boxed{1}"], ["1", "2"], reward_fn, entropies, mask
    )
    assert [row["entropy"] for row in rows] == [2, 5]
    assert [row["reward"] for row in rows] == [1, 0]
    assert lengths == {
        "response_length": 1.5,
        "response_length_correct": 2,
        "response_length_incorrect": 1,
    }
