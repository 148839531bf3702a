"""CS336 assignment 5: its functions, with its names and its order of arguments; see cs336.md.

Shapes: B rows, L tokens of prompt and output, V vocabulary, N responses.
"""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import main
from evaluator import MathEvaluator
from losses import LOSSES
from utils import masked_mean, masked_sum


def tokenize_prompt_and_output(prompt_strs, output_strs, tokenizer):
    """{"input_ids", "labels", "response_mask"}, (B, L) each, padded on the right.

    Labels are the ids shifted by one, and the mask is true where the label is an output token.
    Prompts and outputs are tokenized apart, so that no token spans the border.
    """
    prompts = tokenizer(list(prompt_strs), add_special_tokens=False)["input_ids"]
    outputs = tokenizer(list(output_strs), add_special_tokens=False)["input_ids"]
    rows = []
    masks = []
    for prompt, output in zip(prompts, outputs, strict=True):
        rows.append(torch.tensor(prompt + output))
        masks.append(torch.arange(len(prompt + output)) >= len(prompt))
    ids = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    mask = pad_sequence(masks, batch_first=True)
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": mask[:, 1:]}


def get_response_log_probs(model, input_ids, labels, return_token_entropy=False):
    """{"log_probs": (B, L), "token_entropy": (B, L)} of the labels, which are input_ids shifted."""
    logits = model(input_ids).logits.float()  # (B, L, V)
    log_probs = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    result = {"log_probs": log_probs}
    if return_token_entropy:
        result["token_entropy"] = compute_entropy(logits)
    return result


def compute_entropy(logits):
    """Entropy in nats of softmax(logits), (..., V) -> (...): logsumexp(z) - sum_v p_v z_v.

    z are the logits minus their maximum, which changes nothing but avoids an overflow.
    """
    z = logits - logits.amax(-1, keepdim=True)
    return z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1)


def masked_normalize(tensor, mask, normalize_constant, dim=None):
    """Sum where the mask is true, divided by a constant."""
    return masked_sum(tensor, mask, dim) / normalize_constant


def sft_microbatch_train_step(
    policy_log_probs, response_mask, gradient_accumulation_steps, normalize_constant=1.0
):
    """Add the gradient of minus each row's sum / normalize_constant, averaged over rows."""
    per_row = -masked_normalize(policy_log_probs, response_mask, normalize_constant, dim=1)
    loss = per_row.mean() / gradient_accumulation_steps
    loss.backward()
    return loss.detach(), {}


def compute_group_normalized_rewards(
    reward_fn,
    rollout_responses,
    repeated_ground_truths,
    group_size,
    advantage_eps,
    normalize_by_std,
):
    """(advantages (N,), raw_rewards (N,), metadata); reward_fn is one like r1_zero_reward_fn."""
    pairs = zip(rollout_responses, repeated_ground_truths, strict=True)
    raw_rewards = torch.tensor([reward_fn(*pair)["reward"] for pair in pairs])
    advantages = main.compute_group_normalized_rewards(
        raw_rewards, group_size, advantage_eps, normalize_by_std
    )
    return advantages, raw_rewards, {"reward": raw_rewards.mean().item()}


def compute_naive_policy_gradient_loss(raw_rewards_or_advantages, policy_log_probs):
    """REINFORCE's loss of each token. (B, 1), (B, L) -> (B, L)."""
    return -raw_rewards_or_advantages * policy_log_probs


def compute_grpo_clip_loss(advantages, policy_log_probs, old_log_probs, cliprange):
    """(loss of each token (B, L), masks of clipped tokens (B, L)); advantages are (B, 1)."""
    return compute_policy_gradient_loss(
        policy_log_probs, "grpo_clip", None, advantages, old_log_probs, cliprange
    )


def compute_policy_gradient_loss(
    policy_log_probs,
    loss_type,
    raw_rewards=None,
    advantages=None,
    old_log_probs=None,
    cliprange=None,
):
    """(loss of each token (B, L), masks (B, L)); rewards and advantages are (B, 1).

    loss_type: no_baseline, reinforce_with_baseline, grpo_clip or grpo_no_clip.
    """
    weights = raw_rewards if loss_type == "no_baseline" else advantages
    config = SimpleNamespace(cliprange=cliprange, cliprange_high=None)
    # None of these four losses reads the mask.
    return LOSSES[loss_type](weights, policy_log_probs, old_log_probs, None, config)


def grpo_microbatch_train_step(
    policy_log_probs,
    response_mask,
    gradient_accumulation_steps,
    loss_type,
    raw_rewards=None,
    advantages=None,
    old_log_probs=None,
    cliprange=None,
):
    """Add the gradient of the loss, averaged over each row's tokens and then over rows."""
    per_token, metadata = compute_policy_gradient_loss(
        policy_log_probs, loss_type, raw_rewards, advantages, old_log_probs, cliprange
    )
    loss = masked_mean(per_token, response_mask, dim=1).mean() / gradient_accumulation_steps
    loss.backward()
    return loss.detach(), metadata


def _reward(prompt_name, response, ground_truth):
    """{"format_reward", "answer_reward", "reward"} of a response to a prompt of this format."""
    (format_reward, answer_reward), _ = MathEvaluator(prompt_name).reward(response, ground_truth)
    return {"format_reward": format_reward, "answer_reward": answer_reward, "reward": answer_reward}


r1_zero_reward_fn = partial(_reward, "r1_zero")
question_only_reward_fn = partial(_reward, "question_only")


def log_generations(prompts, responses, ground_truths, reward_fn, token_entropy, response_mask):
    """(rows, metrics): one dict for each response, and mean lengths, also by correctness.

    A row has what is given, the rewards, the mean entropy of its tokens and its length.
    """
    rows = []
    for i, response in enumerate(responses):
        row = {"prompt": prompts[i], "response": response, "ground_truth": ground_truths[i]}
        row |= reward_fn(response, ground_truths[i])
        row["entropy"] = masked_mean(token_entropy[i], response_mask[i]).item()
        row["length"] = int(response_mask[i].sum())
        rows.append(row)
    lengths = torch.tensor([float(row["length"]) for row in rows])
    is_correct = torch.tensor([row["answer_reward"] > 0 for row in rows])
    return rows, {
        "response_length": lengths.mean().item(),
        "response_length_correct": masked_mean(lengths, is_correct).item(),
        "response_length_incorrect": masked_mean(lengths, ~is_correct).item(),
    }
