"""The handout's signatures over the project's parts, against numbers worked by hand."""

import inspect
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, random_model

sys.path.insert(0, str(ROOT / "experiments"))

import cs336

# The parameters of each function, in the handout's order.
SIGNATURES = {
    "tokenize_prompt_and_output": "prompt_strs output_strs tokenizer",
    "compute_entropy": "logits",
    "get_response_log_probs": "model input_ids labels return_token_entropy",
    "masked_normalize": "tensor mask normalize_constant dim",
    "sft_microbatch_train_step": "policy_log_probs response_mask gradient_accumulation_steps normalize_constant",
    "compute_group_normalized_rewards": "reward_fn rollout_responses repeated_ground_truths group_size advantage_eps "
    "normalize_by_std",
    "compute_naive_policy_gradient_loss": "raw_rewards_or_advantages policy_log_probs",
    "compute_grpo_clip_loss": "advantages policy_log_probs old_log_probs cliprange",
    "compute_policy_gradient_loss": "policy_log_probs loss_type raw_rewards advantages old_log_probs cliprange",
    "masked_mean": "tensor mask dim",
    "grpo_microbatch_train_step": "policy_log_probs response_mask gradient_accumulation_steps loss_type raw_rewards "
    "advantages old_log_probs cliprange",
}


def handout_arguments(tokenizer):
    """One value for every parameter of SIGNATURES; rows of 3 tokens."""
    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    log_probs = torch.tensor([[-1.0, -2.0, -3.0], [-2.0, -1.0, -0.5]])
    return dict(
        prompt_strs=["ab", "c"],
        output_strs=["d", "ef"],
        tokenizer=tokenizer,
        logits=torch.eye(4).unsqueeze(0),
        model=random_model(),
        input_ids=ids,
        labels=ids + 1,
        return_token_entropy=True,
        tensor=log_probs,
        mask=torch.tensor([[1, 1, 0], [0, 1, 1]]),
        normalize_constant=7.0,
        dim=1,
        policy_log_probs=log_probs,
        response_mask=torch.tensor([[1, 1, 0], [0, 1, 1]]),
        gradient_accumulation_steps=2,
        reward_fn=lambda response, truth: {"reward": float(response == truth)},
        rollout_responses=list("abcc"),
        repeated_ground_truths=list("aacc"),
        group_size=2,
        advantage_eps=1e-6,
        normalize_by_std=True,
        raw_rewards_or_advantages=torch.tensor([[1.0], [-2.0]]),
        raw_rewards=torch.tensor([[3.0], [0.0]]),
        advantages=torch.tensor([[1.0], [-2.0]]),
        old_log_probs=log_probs + 0.3,
        cliprange=0.2,
        loss_type="grpo_clip",
    )


def test_tokenize_prompt_and_output_by_hand():
    class Words:
        pad_token_id = 0

        def __call__(self, texts, add_special_tokens):
            return {"input_ids": [[int(w) for w in text.split()] for text in texts]}

    batch = cs336.tokenize_prompt_and_output(["5 6", "7"], ["8", "9 10 11"], Words())
    assert batch["input_ids"].tolist() == [[5, 6, 8], [7, 9, 10]]
    assert batch["labels"].tolist() == [[6, 8, 0], [9, 10, 11]]
    assert batch["response_mask"].tolist() == [[False, True, False], [True, True, True]]


@pytest.mark.parametrize("name", SIGNATURES)
def test_by_keyword_and_by_position(name, tokenizer):
    """The course's tests call every function by the handout's keywords: 14 of them once ended in a TypeError."""
    function, names = getattr(cs336, name), SIGNATURES[name].split()
    values = handout_arguments(tokenizer)
    values["policy_log_probs"].requires_grad = name.endswith("train_step")
    by_keyword, by_position = (
        function(**{key: values[key] for key in names}),
        function(*(values[key] for key in names)),
    )
    assert str(by_keyword) == str(by_position)
    assert list(inspect.signature(function).parameters)[: len(names)] == names


def test_handout_defaults():
    """What the handout lets one leave out, and what it then means."""
    tensor, mask = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1, 0], [1, 1]])
    assert cs336.masked_mean(tensor=tensor, mask=mask).item() == pytest.approx(8 / 3)
    assert cs336.masked_normalize(tensor=tensor, mask=mask, normalize_constant=2.0).item() == 4
    loss, _ = cs336.compute_policy_gradient_loss(
        tensor, "no_baseline", raw_rewards=torch.tensor([[2.0], [1.0]])
    )
    assert loss.tolist() == [[-2, -4], [-3, -4]]


def test_response_log_probs_and_entropy_by_hand():
    model = random_model()
    ids = torch.tensor([[3, 4, 5, 6]])
    result = cs336.get_response_log_probs(model, ids[:, :-1], ids[:, 1:], return_token_entropy=True)
    p = model(ids[:, :-1]).logits.double().softmax(-1)[0]
    expected = torch.stack([p[t, ids[0, t + 1]].log() for t in range(3)])
    torch.testing.assert_close(result["log_probs"][0].double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        result["token_entropy"][0].double(), -(p * p.log()).sum(-1), rtol=1e-5, atol=1e-5
    )
    assert result["log_probs"].requires_grad


def test_sft_step_by_hand():
    """Log-probs -1 on two and one response tokens, constant 2, 4 accumulation steps: (2 + 1) / 2 / 2 rows / 4."""
    log_probs = torch.full((2, 3), -1.0, requires_grad=True)
    mask = torch.tensor([[0, 1, 1], [0, 0, 1]])
    loss, _ = cs336.sft_microbatch_train_step(log_probs, mask, 4, 2.0)
    assert loss.item() == pytest.approx(3 / 16)
    assert log_probs.grad.tolist() == [[0, -1 / 16, -1 / 16], [0, 0, -1 / 16]]


def test_group_normalized_rewards_from_a_reward_function():
    rewards = {"a": 1.0, "b": 0.0}
    reward = lambda response, truth: {"reward": rewards[response] if truth == "t" else -1.0}  # noqa: E731
    advantages, raw, metadata = cs336.compute_group_normalized_rewards(
        reward, list("abaa"), list("tttt"), group_size=2, advantage_eps=0.0, normalize_by_std=False
    )
    assert (
        raw.tolist() == [1, 0, 1, 1]
        and advantages.tolist() == [0.5, -0.5, 0, 0]
        and metadata["reward"] == 0.75
    )


@pytest.mark.parametrize("loss_type", ["no_baseline", "reinforce_with_baseline", "grpo_clip"])
def test_grpo_step_by_hand(loss_type):
    """Rows of 1 and 2 response tokens, advantages 1 and -2, rewards 3 and 0, on-policy: gradients of -A log pi."""
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], requires_grad=True)
    mask = torch.tensor([[1, 0], [1, 1]])
    rewards, advantages = torch.tensor([[3.0], [0.0]]), torch.tensor([[1.0], [-2.0]])
    loss, _ = cs336.grpo_microbatch_train_step(
        log_probs, mask, 2, loss_type, rewards, advantages, log_probs.detach().clone(), 0.2
    )
    A = [3.0, 0.0] if loss_type == "no_baseline" else [1.0, -2.0]
    assert log_probs.grad[0].tolist() == pytest.approx([-A[0] / 4, 0])
    assert log_probs.grad[1].tolist() == pytest.approx([-A[1] / 8, -A[1] / 8])
    by_hand = {
        "no_baseline": 3 / 4,
        "reinforce_with_baseline": (1 - 7) / 4,
        "grpo_clip": (-1 + 2) / 4,
    }
    assert loss.item() == pytest.approx(by_hand[loss_type])


def test_reward_functions():
    good = "2 + 2 = 4 </think> <answer>4</answer>"
    assert cs336.r1_zero_reward_fn(good, "4") == {
        "format_reward": 1,
        "answer_reward": 1,
        "reward": 1,
    }
    assert cs336.r1_zero_reward_fn(good, "5") == {
        "format_reward": 1,
        "answer_reward": 0,
        "reward": 0,
    }
    assert cs336.r1_zero_reward_fn("4", "4") == {
        "format_reward": 0,
        "answer_reward": 0,
        "reward": 0,
    }
    assert cs336.question_only_reward_fn("so \\boxed{4}", "4")["reward"] == 1


def test_one_grading_process_for_all_responses_to_a_prompt(monkeypatch):
    """Each call once started a grading process of its own: 1.46 s a response."""
    reward_functions = cs336.r1_zero_reward_fn, cs336.question_only_reward_fn
    first = [reward("\\boxed{4}", "4") for reward in reward_functions]
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("another process"))
    assert [reward("\\boxed{4}", "4") for reward in reward_functions] == first


def test_log_generations():
    entropy, mask = torch.tensor([[1.0, 3.0], [5.0, 9.0]]), torch.tensor([[1, 1], [1, 0]])
    rows, lengths = cs336.log_generations(
        ["p", "q"], ["\\boxed{1}", "x"], ["1", "2"], cs336.question_only_reward_fn, entropy, mask
    )
    assert [row["entropy"] for row in rows] == [2, 5] and [row["reward"] for row in rows] == [1, 0]
    assert lengths == {
        "response_length": 1.5,
        "response_length_correct": 2,
        "response_length_incorrect": 1,
    }
