"""CS336 assignment 5: its functions with the handout's names, keywords and order; cs336.md has the table of them."""

import sys
from functools import cache, partial
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import main
from evaluator import MathEvaluator
from main import (
    compute_grpo_clip_loss,
    compute_naive_policy_gradient_loss,
    compute_policy_gradient_loss,
)
from utils import compute_entropy, masked_mean, masked_normalize

_evaluator_of = cache(
    MathEvaluator
)  # one per prompt: each starts a grading process, which takes a second


def tokenize_prompt_and_output(prompt_strs, output_strs, tokenizer):
    """{"input_ids", "labels" (shifted by one), "response_mask" (True where the label is an output token)}, (B, L) each.

    Prompts and outputs are tokenized apart, so that no token spans the border, then joined and right-padded.
    """
    prompts, outputs = (
        tokenizer(list(x), add_special_tokens=False)["input_ids"]
        for x in (prompt_strs, output_strs)
    )
    pairs = list(zip(prompts, outputs, strict=True))
    ids = pad_sequence(
        [torch.tensor(p + o) for p, o in pairs],
        batch_first=True,
        padding_value=tokenizer.pad_token_id,
    )
    mask = pad_sequence([torch.arange(len(p + o)) >= len(p) for p, o in pairs], batch_first=True)
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": mask[:, 1:]}


def get_response_log_probs(model, input_ids, labels, return_token_entropy=False):
    """{"log_probs": (B, L), "token_entropy": (B, L)} of the labels, which are input_ids shifted by one."""
    logits = model(input_ids).logits.float()  # (B, L, V)
    log_probs = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return {"log_probs": log_probs} | (
        {"token_entropy": compute_entropy(logits)} if return_token_entropy else {}
    )


def sft_microbatch_train_step(
    policy_log_probs, response_mask, gradient_accumulation_steps, normalize_constant=1.0
):
    """Backward through -sum of the response's log-probs / constant, mean over the batch, / accumulation steps."""
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
    """(advantages, raw_rewards, metadata), each of the first two (N,); reward_fn as r1_zero_reward_fn."""
    pairs = zip(rollout_responses, repeated_ground_truths, strict=True)
    raw = torch.tensor([reward_fn(response, truth)["reward"] for response, truth in pairs])
    advantages, metadata = main.compute_group_normalized_rewards(
        raw, group_size, advantage_eps, normalize_by_std
    )
    return advantages, raw, metadata


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
    """Backward through the policy-gradient loss: masked mean per row, mean over rows, / accumulation steps."""
    per_token, metadata = compute_policy_gradient_loss(
        policy_log_probs,
        loss_type,
        raw_rewards,
        advantages,
        old_log_probs,
        cliprange,
        mask=response_mask,
    )
    loss = masked_mean(per_token, response_mask, dim=1).mean() / gradient_accumulation_steps
    loss.backward()
    return loss.detach(), metadata


def _reward(prompt, response, ground_truth):
    """{"format_reward", "answer_reward", "reward"} of a response to a question in that form of prompt."""
    evaluator = _evaluator_of(prompt)
    rewards = evaluator.compute_rewards([""], [response], [ground_truth])
    format_reward, answer_reward = rewards.per_function[0].tolist()
    return {
        "format_reward": format_reward,
        "answer_reward": answer_reward,
        "reward": evaluator.total(rewards).item(),
    }


r1_zero_reward_fn, question_only_reward_fn = (
    partial(_reward, "r1_zero"),
    partial(_reward, "question_only"),
)


def log_generations(prompts, responses, ground_truths, reward_fn, token_entropy, response_mask):
    """One dict per response (prompt, response, truth, rewards, mean entropy, length), and lengths by correctness."""
    rows = []
    for i, (prompt, response, truth) in enumerate(
        zip(prompts, responses, ground_truths, strict=True)
    ):
        row = {"prompt": prompt, "response": response, "ground_truth": truth} | reward_fn(
            response, truth
        )
        row["entropy"] = masked_mean(token_entropy[i], response_mask[i]).item()
        rows.append(row | {"length": int(response_mask[i].sum())})
    lengths = torch.tensor([float(row["length"]) for row in rows])
    correct = torch.tensor([row["answer_reward"] > 0 for row in rows])
    return rows, {
        "response_length": lengths.mean().item(),
        "response_length_correct": masked_mean(lengths, correct).item(),
        "response_length_incorrect": masked_mean(lengths, ~correct).item(),
    }
