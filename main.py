"""GRPO, Group Relative Policy Optimization (arXiv:2402.03300), for language models.

    python main.py --model_name tiny/1m --dataset_name arithmetic
    torchrun --nproc_per_node 2 main.py

`train` is the algorithm, in seven numbered stages, and `compute_loss` comes below it. An iteration
is one rollout batch with its updates; the logs call it a step. "All:" at the start of a docstring
means that every process must call the function.

Where this departs from the paper, and the flag that restores the paper's way, where there is one:
  1. Rewards come from --evaluator, not from a trained reward model, and are for whole completions:
     there is no process supervision.
  2. The reference stays the initial policy. To renew it, as the paper's iterative variant does,
     start again with a checkpoint as --model_name and a new --output_dir.
  3. The standard deviation of a group divides by n - 1, and a group of equal rewards has advantage
     exactly 0.
  4. On CUDA, a bfloat16 copy of the float32 weights samples, unless --sampling_dtype is float32.
     How far its log-probs are from the policy's is logged as `sampling_logp_gap`.
  5. An update in which no completion has a gradient takes no step. Otherwise AdamW would move the
     weights by its momentum alone.
As in the paper's runs there is one update for each rollout batch, so the ratio is 1 and the clip
does nothing. --epochs_per_rollout_batch and --train_batch_size ask for several (the paper's mu).

Shapes: B sequences, G group size, P prompt tokens, C completion tokens, T = P + C, N completions of
a rollout batch.
"""

import math
import sys
from collections.abc import Iterable
from itertools import chain

from config import GRPOConfig, LossConfig, parse

if __name__ == "__main__":
    parse(GRPOConfig)  # --help and mistakes are answered before the seconds that imports take

import torch
from torch import Tensor

import losses
from grpo import distributed
from grpo.metrics import add_up, average
from grpo.rollout import (
    Completion,
    Group,
    keep_logps,
    make_batch,
    micro_batches,
    passes_in_lockstep,
    split_into_groups,
    split_into_updates,
)
from grpo.run import Run, run_to_the_end
from utils import autocast, get_per_token_logps, masked_mean

MAX_GRAD_NORM = 1.0  # a gradient with a greater norm is scaled down to this norm

# --- The algorithm --------------------------------------------------------------------------------


def train(config: GRPOConfig, run: Run) -> None:
    """Run GRPO. Every process samples, rewards and trains on groups of its own."""
    if config.eval_only:
        run.evaluate()
        return
    num_prompts = config.rollout_batch_size // config.group_size
    for iteration in run.iterations(config.eval_iterations, config.save_iterations):
        # 1. Sample G completions for each prompt of this process's share.
        examples = distributed.share(run.train_loader.next_batch(num_prompts))
        with run.timer("sample"):
            completions = run.sample(examples, config.group_size, config.temperature)

        # 2. Reward each of them: completion.reward, NaN where there is none.
        with run.timer("reward"):
            metrics = run.reward(completions)

        # 3. How much better is a completion than the others of its group?
        rewards = torch.tensor([completion.reward for completion in completions])
        advantages = compute_group_normalized_rewards(
            rewards, config.group_size, normalize_by_std=config.use_std_normalization
        )
        if config.loss_type == "no_baseline":
            advantages = rewards  # nothing is subtracted
        for completion, advantage in zip(completions, advantages.tolist(), strict=True):
            completion.advantage = advantage

        # 4. With several updates the ratio is to the policy before the first, whose log-probs are
        # kept. With a single one it is to the policy itself, and compute_loss has that.
        updates = split_into_updates(config, completions)
        if len(updates) > 1:
            with run.timer("logps"):
                keep_logps(run.model, completions, config, "old_logps")
                if config.beta > 0:
                    keep_logps(run.base_model, completions, config, "ref_logps")

        # In every tenth iteration, record how the updates change each token of one group.
        update_metrics = []
        with run.showing_tokens(completions):
            for i, batch in enumerate(updates):  # a single one, unless training is off-policy
                # 5. Compute the loss and its gradient, in micro-batches.
                with run.timer("loss"):
                    loss_metrics = accumulate_gradient(
                        run.model, run.base_model, batch, config, config.micro_batch_tokens
                    )
                # 6. Update the weights.
                update_number = (iteration - 1) * len(updates) + i
                learning_rate = warm_up(config.learning_rate, config.warmup_steps, update_number)
                with run.timer("update"):
                    step_metrics = take_step(
                        run.model, run.optimizer, learning_rate, loss_metrics["loss"]
                    )
                update_metrics.append(loss_metrics | step_metrics)

            with run.timer("update"):
                run.sampler.refresh(run.model)

        # 7. Log what was sampled, and what the updates did.
        run.log_iteration(average(update_metrics) | metrics, completions)


def compute_group_normalized_rewards(
    rewards: Tensor, group_size: int, advantage_eps: float = 1e-6, normalize_by_std: bool = True
) -> Tensor:
    """Advantages (r - mean) / (std + eps) within each group of group_size consecutive rewards.

    The standard deviation divides by n - 1. A group of equal rewards, or of a single one, has
    advantage exactly 0: rounding can make its standard deviation tiny instead of 0, so rewards are
    compared. A missing reward (NaN) counts in no mean, and has advantage NaN. Without
    normalize_by_std there is no division (Dr. GRPO, arXiv:2503.20783).

    Rewards and advantages are (N,), with N a multiple of group_size.
    """
    groups = rewards.float().view(-1, group_size)  # (N / G, G)
    has_reward = ~groups.isnan()
    num_rewards = has_reward.sum(1, keepdim=True)  # (N / G, 1)
    mean = masked_mean(groups, has_reward, dim=1).unsqueeze(1)
    centred = torch.where(has_reward, groups - mean, 0.0)
    advantages = centred
    if normalize_by_std:
        sum_of_squares = centred.square().sum(1, keepdim=True)
        variance = sum_of_squares / (num_rewards - 1).clamp(min=1)
        advantages = centred / (variance.sqrt() + advantage_eps)
    lowest = groups.nan_to_num(torch.inf).amin(1, keepdim=True)
    highest = groups.nan_to_num(-torch.inf).amax(1, keepdim=True)
    is_flat = lowest >= highest  # without any reward, inf >= -inf
    advantages = torch.where(is_flat, 0.0, advantages)
    return advantages.masked_fill(~has_reward, math.nan).view(-1)


# --- One update -----------------------------------------------------------------------------------


def accumulate_gradient(
    model: torch.nn.Module,
    base_model: torch.nn.Module | None,
    completions: list[Completion],
    config: LossConfig,
    micro_batch_tokens: int,
) -> dict[str, float]:
    """All: backward through the loss of one update, micro-batch by micro-batch.

    The loss of a micro-batch is the mean over it. It is multiplied by the micro-batch's share of
    the whole update, over all processes, so the gradient does not depend on how it is split.

    Returns:
        the metrics of the update, its loss among them.
    """
    # The means are over all completions with a reward, or over the tokens of those that are not
    # masked. Groups without a gradient count in these means, but do not go through the model.
    has_reward = [not math.isnan(completion.advantage) for completion in completions]
    counted = [completion for completion in completions if is_counted(completion, config)]
    groups = groups_that_teach(completions, config)
    num_sequences, num_tokens, num_trained_tokens = distributed.all_sum(
        sum(has_reward), count_tokens(counted), count_tokens(chain(*groups))
    )
    batches = micro_batches(groups, micro_batch_tokens)
    weighted_metrics = []  # of each micro-batch
    for batch_groups, is_real in passes_in_lockstep(batches, completions, model):
        batch = make_batch(batch_groups, model.device)
        with autocast(model):
            loss, metrics = compute_loss(
                model,
                base_model,
                batch.prompt_completion_ids,
                batch.completion_ids,
                batch.attention_mask,
                batch.completion_mask,
                batch.advantages,
                config,
                group_size=batch.group_size,
                old_logps=batch.old_logps,
                ref_logps=batch.ref_logps,
                sampled_logps=batch.sampled_logps,
            )
        batch_tokens = int(batch.completion_mask.sum())
        share = len(batch.advantages) / num_sequences
        if config.length_normalization == "token_mean":
            share = batch_tokens / num_tokens
        (loss * share * is_real).backward()  # a pass for the sake of other processes counts 0
        if is_real:
            # `loss` and `kl` are averaged as the loss is, all others over the trained tokens.
            metrics["loss"] = loss.item()
            weighted = {}
            for name, value in metrics.items():
                is_like_loss = name in ("loss", "kl")
                weight = share if is_like_loss else batch_tokens / num_trained_tokens
                weighted[name] = value * weight
            weighted_metrics.append(weighted)

    distributed.sum_gradients(model)
    totals = {"loss": 0.0} | add_up(distributed.gather(weighted_metrics))
    totals.pop("response_length", None)  # the logs have that of all sampled completions
    return totals


def count_tokens(completions: Iterable[Completion]) -> int:
    return sum(len(completion.ids) for completion in completions)


def is_counted(completion: Completion, config: LossConfig) -> bool:
    """Whether a completion is trained on: not without a reward, nor if it is to be masked."""
    if math.isnan(completion.advantage):
        return False
    return completion.finished or not config.mask_truncated_completions


def groups_that_teach(completions: list[Completion], config: LossConfig) -> list[Group]:
    """The counted completions of the groups that have a gradient."""
    # Without a KL term, an advantage of 0 teaches nothing.
    needs_advantage = config.beta == 0 and config.loss_type in losses.ZERO_WITHOUT_ADVANTAGE
    groups = []
    for group in split_into_groups(completions, config.group_size):
        counted = [completion for completion in group if is_counted(completion, config)]
        if any(completion.advantage != 0 or not needs_advantage for completion in counted):
            groups.append(counted)
    return groups


def take_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    learning_rate: float,
    loss: float,
) -> dict[str, float]:
    """All: clip the accumulated gradient and apply it, unless it or the loss is not finite.

    Returns:
        the learning rate, the gradient's 2-norm before the clip, and whether the step was skipped.
    """
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    norm = distributed.full_tensor(norm).item()
    is_finite = math.isfinite(norm) and math.isfinite(loss)
    if is_finite:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
    # Sets gradients to None. An update without any then moves no weight, not even by momentum.
    optimizer.zero_grad()
    skipped = int(not is_finite)
    return {"learning_rate": learning_rate, "grad_norm": norm, "skipped_updates": skipped}


def warm_up(learning_rate: float, warmup_steps: int, update: int) -> float:
    """The learning rate of update 0, 1, 2 ...: it rises in a straight line, and then stays."""
    return learning_rate * min(1.0, (update + 1) / max(1, warmup_steps))


# --- The loss -------------------------------------------------------------------------------------


def compute_loss(
    model: torch.nn.Module,
    base_model: torch.nn.Module | None,
    prompt_completion_ids: Tensor,
    completion_ids: Tensor,
    attention_mask: Tensor,
    completion_mask: Tensor,
    advantages: Tensor,
    config: LossConfig = LossConfig(),
    *,
    group_size: int = 1,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    sampled_logps: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The GRPO loss: -(min(ratio * A, clip(ratio) * A) - beta * KL) for each token, averaged.

    By default the average is over each sequence's tokens, and then over sequences. losses.py has
    the policy terms and the averages of other papers.

    Args:
        base_model: the frozen reference; None if beta is 0.
        prompt_completion_ids, attention_mask: (B, T).
        completion_ids, completion_mask: (B, C), the last C columns.
        advantages: (B,), for "no_baseline" raw rewards.
        group_size: how many consecutive rows share a prompt, which is then computed once.
        old_logps: (B, C) under the policy before the first update; None: the present policy's.
        ref_logps: (B, C) under the reference; None: they are computed here.
        sampled_logps: (B, C) as the sampler gave them.

    Returns:
        (loss, metrics): a scalar with gradient, and floats, all of them means over this batch: `kl`
        as the loss is averaged, `response_length` over sequences, the rest over unmasked tokens.
    """
    B, C = completion_ids.shape
    assert completion_mask.shape == (B, C), completion_mask.shape
    assert advantages.shape == (B,), advantages.shape
    mask = completion_mask.bool()
    inputs = dict(
        prompt_completion_ids=prompt_completion_ids,
        attention_mask=attention_mask,
        logits_to_keep=C,
        group_size=group_size,
        temperature=config.temperature,
    )
    # (B, C) each; the entropy has no gradient.
    policy_logps, entropy = get_per_token_logps(model, **inputs, return_entropy=True)
    if old_logps is None:
        old_logps = policy_logps.detach()

    # The loss of the policy gradient, and where the clip stops it, (B, C) each.
    per_token_loss, clip_masks = losses.find_loss(config.loss_type)(
        advantages.unsqueeze(1), policy_logps, old_logps, mask, config
    )
    assert per_token_loss.shape == (B, C), f"{config.loss_type}: {per_token_loss.shape}"
    if config.importance_cap is not None:
        # Truncated importance sampling: https://fengyao.notion.site/off-policy-rl
        importance = (old_logps - sampled_logps).exp()
        per_token_loss = per_token_loss * importance.clamp(max=config.importance_cap)

    # The penalty for leaving the reference.
    if config.beta > 0:
        if ref_logps is None:
            with torch.inference_mode():
                ref_logps = get_per_token_logps(base_model, **inputs)
        per_token_kl = losses.estimate_kl(policy_logps, ref_logps)
        per_token_loss = per_token_loss + config.beta * per_token_kl

    # The mean over tokens and then sequences, or over all tokens at once.
    mean = losses.LENGTH_NORMALIZATIONS[config.length_normalization]
    loss = mean(per_token_loss, mask, config)

    with torch.no_grad():
        per_token = {"entropy": entropy, "ratio_mean": (policy_logps - old_logps).exp()}
        per_token |= clip_masks
        metrics = {"response_length": mask.sum().item() / B}  # accumulate_gradient drops it
        if config.beta > 0:
            per_token["kl_per_token"] = per_token_kl
            metrics["kl"] = mean(per_token_kl, mask, config).item()
        if sampled_logps is not None:
            per_token["sampling_logp_gap"] = (old_logps - sampled_logps).abs()
        for name, values in per_token.items():
            metrics[name] = losses.mean_over_all_tokens(values, mask, config).item()
    return loss, metrics


# --- Setting up -----------------------------------------------------------------------------------


def setup(config: GRPOConfig) -> Run:
    """What GRPO works with. Raises ValueError or OSError for what the user gave wrong."""
    losses.try_loss(config)  # what is wrong with it is said before the model is loaded
    run = Run.load(config, with_reference=config.beta > 0)
    if not config.eval_only:
        run.train_loader.next_batch(0)  # raises if there is no training split
        run.optimizer = get_optimizer(run.model)
        run.num_iterations = config.num_train_iters
    return run


def get_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW. take_step sets its learning rate."""
    return torch.optim.AdamW(
        [weight for weight in model.parameters() if weight.requires_grad],
        lr=0.0,
        betas=(0.9, 0.95),  # the decay of its running means of the gradient and of its square
        weight_decay=0.0,
        # One kernel that reads and writes every number once.
        fused=True,
    )


def main(argv: list[str] | None = None) -> int:
    return run_to_the_end(parse(GRPOConfig, argv), setup, train)


if __name__ == "__main__":
    sys.exit(main())
