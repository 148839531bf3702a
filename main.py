"""GRPO, Group Relative Policy Optimization (arXiv:2402.03300), for language models.

`train` is the algorithm. Its steps are numbered: 1 sample groups of completions, 2 reward them,
3 turn rewards into advantages, 4 keep the log-probs that several updates share, 5 compute the loss
and its gradient, 6 update the weights, 7 log. `compute_loss` follows, then the setup. losses.py has
the loss of each paper.

Where this departs from the paper, and the flag that restores the paper's way, where there is one:
  1. Rewards are computed by rules or by a judge, not by a trained reward model. --evaluator names
     the class that computes them.
  2. A reward is for a whole completion (outcome supervision). The paper's process supervision,
     which rewards single lines of a solution, is not here.
  3. The reference stays the initial policy. The paper's iterative variant renews it: start again
     with a checkpoint as --model_name and a new --output_dir.
  4. The standard deviation of a group divides by n - 1, and a group of equal rewards has advantage
     exactly 0.
  5. On CUDA, completions are sampled with a bfloat16 copy of the float32 weights, which is
     refreshed after each update. How far its log-probs are from the policy's is logged as
     `sampling_logp_gap`. `--sampling_dtype float32` samples from the weights themselves, and
     --importance_cap corrects for the gap.
  6. The KL is the k3 estimate, as in the paper: its value estimates KL(policy || reference), but
     its gradient is that of KL(reference || policy).
  7. An update in which no completion has a gradient takes no step. With beta 0 that is a batch of
     equal rewards in every group. Otherwise AdamW would move the weights by its momentum alone.
As in the paper's runs there is one update for each rollout batch, so the ratio is 1 and the clip
has nothing to do. --epochs_per_rollout_batch and --train_batch_size ask for several updates (the
paper's mu). GSPO, CISPO, DAPO and other relatives: docs/family.md.

An iteration is one rollout batch with its updates; the logs call it a step.

Shapes: B sequences, G group size, P prompt tokens, C completion tokens, T = P + C, N completions of
a rollout batch, over all processes.
"""

import sys
from dataclasses import dataclass
from functools import partial

from config import GRPOConfig, LossConfig, parse

if __name__ == "__main__":
    parse(GRPOConfig)  # --help and mistakes are answered before the seconds that imports take

import torch
from torch import Tensor

import distributed
import llms
import utils
from losses import LENGTH_NORMALIZATIONS, LOSSES, estimate_kl
from sampling.rollout import Rollout, compute_rollout_logps
from training import steps, token_changes, write_logs
from training.metrics import (
    Maximum,
    Minimum,
    Share,
    TokenShare,
    add_up,
    average_updates,
    gather_completions,
    rollout_metrics,
)
from training.run import Run, run_to_the_end, save_checkpoint
from training.schedule import learning_rate_factor, split_into_updates
from training.signals import Guard
from utils import get_per_token_logps, masked_mean, masked_sum, repeat_each, rows_of_groups

# Decay of AdamW's running means of the gradient and of its square.
ADAM_BETAS = (0.9, 0.95)

# --- The algorithm --------------------------------------------------------------------------------


def train(config: GRPOConfig, run: Run) -> None:
    """Run GRPO on what `setup` made; write logs, transcripts and checkpoints."""
    # After --resume the sampler still holds the weights from before: copy the policy's again.
    llms.refresh_sampler(run.sampler, run.model)
    if config.eval_only:
        write_logs.print_categories(config, steps.evaluate(config, run))
        return
    evaluation_is_due = steps.is_due(run.step, config.eval_iterations, config.num_train_iters)
    if evaluation_is_due and run.evaluated_step != run.step:
        steps.evaluate(config, run)

    for step in run.progress_bar(config.num_train_iters):
        # 1 to 3. Sample G completions for each of several prompts, reward them, compute advantages.
        examples = run.train_loader.next_batch(config.rollout_batch_size // config.group_size)
        groups = sample_groups(config, run, examples, distributed.share(examples))
        if config.dynamic_sampling:
            groups = replace_flat_groups(config, run, groups)
        rollout = groups.rollout
        loss_weights = distributed.share(groups.loss_weights).to(run.model.device)

        # 4. If several updates need the same log-probs, compute these before the first update.
        updates = split_into_updates(config)
        with run.timer("logps"):
            old_logps, ref_logps = compute_shared_logps(config, run, rollout, len(updates))
        with run.timer("tokens"):
            shown_groups = token_changes.before_updates(
                config, run, rollout, groups.trained_records, old_logps
            )

        update_metrics = []
        for rows in updates:  # a single update, unless training is off-policy
            # 5. Compute the loss and its gradient, in micro-batches.
            with run.timer("loss"):
                loss_metrics = accumulate_gradient(
                    config, run, rollout, loss_weights, rows, old_logps, ref_logps
                )
            # 6. Update the weights.
            with run.timer("step"):
                step_metrics = take_step(config, run, loss_metrics["loss"])
            update_metrics.append(loss_metrics | step_metrics)

        # 7. Log what was sampled and what the updates did, in a few groups to each token.
        with run.timer("tokens"):
            token_changes.add_to_records(config, run, rollout, shown_groups, ref_logps)
        # Both dicts have `response_length`; `|` keeps that of groups.metrics, the mean over all
        # sampled completions.
        metrics = average_updates(update_metrics) | groups.metrics
        num_tokens = sum(record["length"] for record in groups.records)
        with run.finish_step(num_tokens):
            write_logs.save_iteration(config, run, metrics, groups.records)
        run.check_health(metrics)
        if steps.is_due(step, config.eval_iterations, config.num_train_iters):
            steps.evaluate(config, run)
        if steps.is_due(step, config.save_iterations, config.num_train_iters):
            save_checkpoint(config, run)


@dataclass(frozen=True)
class Groups:
    """Completions, G consecutive ones for each prompt, with their rewards and advantages."""

    rollout: Rollout  # the completions of this process
    loss_weights: Tensor  # (N,) what multiplies log-probs: advantages; rewards under no_baseline
    records: list[dict]  # N, and after dynamic sampling more: every completion that was sampled
    trained_records: list[dict]  # N: those of `records` whose completions are trained on
    metrics: dict[str, float]  # of all processes


def sample_groups(
    config: GRPOConfig, run: Run, examples: list[dict], my_examples: list[dict]
) -> Groups:
    """Steps 1 to 3: sample G completions for each prompt, reward them, and compute advantages.

    Args:
        examples: the prompts for which all processes sample together.
        my_examples: this process's part of `examples`; the parts of all processes, in the order of
            the processes, make up `examples`.
    """
    with run.timer("sample"):  # 1.
        rollout = steps.sample(config, run, my_examples, config.group_size, config.temperature)

    with run.timer("reward"):  # 2.
        my_repeated_examples = repeat_each(my_examples, config.group_size)
        my_rewards = steps.reward(run.evaluator, my_repeated_examples, rollout.texts)
        completions, rewards = gather_completions(rollout, my_rewards)
        total_rewards = run.evaluator.total(rewards)  # (N,) one weighted sum for each completion

    # 3. How much better is a completion than the other completions of its group?
    advantages, group_metrics = compute_group_normalized_rewards(
        total_rewards, config.group_size, normalize_by_std=config.use_std_normalization
    )
    repeated_examples = repeat_each(examples, config.group_size)
    records = write_logs.completion_records(
        run.evaluator, repeated_examples, completions, rewards, advantages
    )
    return Groups(
        rollout=rollout,
        loss_weights=total_rewards if config.loss_type == "no_baseline" else advantages,
        records=records,
        trained_records=records,
        metrics=group_metrics | rollout_metrics(run.evaluator, rewards, completions),
    )


def replace_flat_groups(config: GRPOConfig, run: Run, groups: Groups) -> Groups:
    """DAPO's dynamic sampling (arXiv:2503.14476): replace groups whose rewards are all equal.

    Up to config.dynamic_sampling times, groups of new prompts take their place. All processes draw
    the same prompts, and each samples for its own groups. The metrics stay those of the first
    sampling: after the replacement they would leave out the flat groups.
    """
    G = config.group_size
    rollout = groups.rollout
    loss_weights = groups.loss_weights.clone()
    records = list(groups.records)
    trained_records = list(groups.records)
    num_groups = len(loss_weights) // G
    my_groups = distributed.share(range(num_groups))
    for _ in range(config.dynamic_sampling):
        # A group's loss weights are all equal exactly if its rewards are all equal.
        flat = flat_groups(loss_weights, G).nonzero().flatten().tolist()
        if not flat:
            break
        examples = run.train_loader.next_batch(len(flat))
        my_flat = [group for group in flat if group in my_groups]
        my_examples = [
            example for group, example in zip(flat, examples, strict=True) if group in my_groups
        ]
        new = sample_groups(config, run, examples, my_examples)
        if my_flat:
            # Row 0 of the rollout is the first row of group my_groups[0].
            my_rows = rows_of_groups([group - my_groups[0] for group in my_flat], G)
            rollout = rollout.replace(my_rows, new.rollout)
        loss_weights.view(-1, G)[flat] = new.loss_weights.view(-1, G)
        records += new.records
        for row, record in zip(rows_of_groups(flat, G), new.records, strict=True):
            trained_records[row] = record
    metrics = {
        "sampled_prompts": len(records) // G,
        "zero_std_fraction_trained": flat_groups(loss_weights, G).float().mean().item(),
    }
    return Groups(rollout, loss_weights, records, trained_records, groups.metrics | metrics)


def compute_shared_logps(
    config: GRPOConfig, run: Run, rollout: Rollout, num_updates: int
) -> tuple[Tensor | None, Tensor | None]:
    """(B, C) log-probs under the policy before its updates, and under the reference.

    Both are None if there is a single update, whose loss computes them itself; those of the
    reference are None if beta is 0.
    """
    if num_updates == 1:
        return None, None
    compute_logps = partial(
        compute_rollout_logps,
        rollout=rollout,
        group_size=config.group_size,
        temperature=config.temperature,
        micro_batch_tokens=config.micro_batch_tokens,
    )
    old_logps = compute_logps(run.model)
    ref_logps = compute_logps(run.base_model) if config.beta > 0 else None
    return old_logps, ref_logps


# --- Advantages -----------------------------------------------------------------------------------


def compute_group_normalized_rewards(
    rewards: Tensor, group_size: int, advantage_eps: float = 1e-6, normalize_by_std: bool = True
) -> tuple[Tensor, dict[str, float]]:
    """Advantages (r - mean) / (std + eps) within each group of group_size consecutive rewards.

    The standard deviation divides by n - 1. A group whose rewards are all equal, or with fewer than
    two of them, has advantage exactly 0. A missing reward (NaN) counts in no mean and no standard
    deviation, and has advantage NaN.

    Args:
        rewards: (N,) with N a multiple of group_size.
        normalize_by_std: False leaves the division out (Dr. GRPO, arXiv:2503.20783).

    Returns:
        advantages (N,), and metrics: the mean reward, the mean of the groups' standard deviations,
        and the share of groups whose rewards are all equal.
    """
    groups = rewards.float().view(-1, group_size)  # (N / G, G)
    has_reward = ~groups.isnan()
    num_rewards = has_reward.sum(1, keepdim=True)  # (N / G, 1)
    is_flat = flat_groups(rewards, group_size).unsqueeze(1)  # (N / G, 1)

    mean = masked_mean(groups, has_reward, dim=1).unsqueeze(1)
    centred = torch.where(has_reward, groups - mean, 0.0)
    variance = centred.square().sum(1, keepdim=True) / (num_rewards - 1).clamp(min=1)
    std = variance.sqrt()
    advantages = centred / (std + advantage_eps) if normalize_by_std else centred
    advantages = torch.where(is_flat, 0.0, advantages)
    advantages = advantages.masked_fill(~has_reward, torch.nan)
    metrics = {
        "reward": masked_mean(groups, has_reward).item(),
        "reward_std": torch.where(is_flat, 0.0, std).mean().item(),
        "zero_std_fraction": is_flat.float().mean().item(),
    }
    return advantages.view(-1), metrics


def flat_groups(rewards: Tensor, group_size: int) -> Tensor:
    """(N / G,) True for a group whose rewards, missing ones aside, are all equal or fewer than two.

    The least reward is compared with the greatest. With equal rewards, rounding can make the
    standard deviation tiny instead of 0, and dividing by it would give large advantages.
    """
    groups = rewards.float().view(-1, group_size)
    lowest = groups.nan_to_num(torch.inf).amin(1)
    highest = groups.nan_to_num(-torch.inf).amax(1)
    # Without any reward the lowest is inf and the highest -inf, hence >= and not ==.
    return lowest >= highest


# --- One update -----------------------------------------------------------------------------------


def accumulate_gradient(
    config: GRPOConfig,
    run: Run,
    rollout: Rollout,
    loss_weights: Tensor,
    rows: list[int],
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
) -> dict[str, float]:
    """Backward through the loss of one update over the given rows, micro-batch by micro-batch.

    Denominators are those of the whole update, over all micro-batches and processes. Each
    micro-batch gives its share of the loss, the gradient and the metrics, and shares simply add.
    The parameters must have no gradient before.

    Args:
        loss_weights: (B,) advantages, or rewards under no_baseline; NaN where a reward is missing.
        rows: whole groups of the rollout.
        old_logps, ref_logps: (B, C), or None where the loss is to compute them.

    Returns:
        the metrics of the update, its loss among them.
    """
    loss_mask = rollout.completion_mask
    if config.mask_truncated_completions:
        loss_mask = loss_mask * rollout.finished.unsqueeze(1)
    has_reward = ~loss_weights[rows].isnan()  # sequences without a reward are not counted
    num_sequences, num_tokens = distributed.all_sum(
        int(has_reward.sum()), int(loss_mask[rows][has_reward].sum())
    )
    trained_rows = select_groups_with_gradient(config, loss_weights, loss_mask, rows)

    shares = []
    micro_batches = rollout.micro_batches(
        trained_rows,
        config.group_size,
        config.micro_batch_tokens,
        sharded=distributed.is_sharded(run.model),
    )
    for batch_rows, batch, is_counted in micro_batches:
        C = batch.completion_ids.shape[1]
        batch_mask = loss_mask[batch_rows, :C]
        batch_weights = loss_weights[batch_rows]
        if not is_counted:
            # This pass only keeps the process in step with the others. It must contribute nothing,
            # so all its rewards are marked as missing (NaN).
            batch_weights = torch.full_like(batch_weights, torch.nan)
        with utils.autocast(run.model.device):
            loss, metrics = compute_loss(
                run.model,
                run.base_model,
                batch.prompt_completion_ids,
                batch.completion_ids,
                batch.attention_mask,
                batch_mask,
                batch_weights,
                config,
                group_size=config.group_size,
                old_per_token_logps=None if old_logps is None else old_logps[batch_rows, :C],
                ref_per_token_logps=None if ref_logps is None else ref_logps[batch_rows, :C],
                sampled_per_token_logps=batch.sampled_logps,
                num_sequences=num_sequences,
                num_tokens=num_tokens,
            )
        loss.backward()
        metrics["loss"] = Share(loss.item())
        metrics["trained_tokens"] = Share(batch_mask[~batch_weights.isnan()].sum().item())
        shares.append(metrics)

    totals = {"loss": 0.0}  # the loss if every group is skipped, so that there is no micro-batch
    totals |= add_up(distributed.gather(shares))
    trained_tokens = totals.pop("trained_tokens", 0)
    # The shares of token means were divided by num_tokens, but only trained_tokens tokens have run.
    for name, value in totals.items():
        if isinstance(value, TokenShare):
            totals[name] = value * (num_tokens / max(1, trained_tokens))
    return totals


def select_groups_with_gradient(
    config: GRPOConfig, loss_weights: Tensor, loss_mask: Tensor, rows: list[int]
) -> Tensor:
    """The rows that must go through the model; those of a group without gradient are left out.

    A group has no gradient if its tokens are all masked or its rewards all missing, or, with beta
    0, if its loss weights are all 0. Its sequences still count in the denominators.
    """
    has_reward = ~loss_weights[rows].isnan()
    has_tokens = loss_mask[rows].any(1)
    has_gradient = has_reward & has_tokens
    if config.beta == 0:  # without a KL term, a weight of 0 teaches nothing
        has_gradient &= loss_weights[rows] != 0
    group_has_gradient = has_gradient.view(-1, config.group_size).any(1)
    return torch.tensor(rows)[group_has_gradient.repeat_interleave(config.group_size).cpu()]


def take_step(config: GRPOConfig, run: Run, loss: float) -> dict[str, float]:
    """One step of the optimiser and of the learning rate; returns metrics of the step."""
    learning_rate = run.scheduler.get_last_lr()[0]
    metrics = steps.clip_and_step(run.model, run.optimizer, config.max_grad_norm, loss)
    run.scheduler.step()
    llms.refresh_sampler(run.sampler, run.model)
    return {"learning_rate": learning_rate} | metrics


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
    old_per_token_logps: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    sampled_per_token_logps: Tensor | None = None,
    num_sequences: int | None = None,
    num_tokens: int | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The GRPO loss: -(ratio * advantage - beta * KL) for each token, averaged.

    By default the average is over the tokens of each sequence, and then over the sequences.

    Args:
        base_model: the frozen reference; None if beta is 0.
        prompt_completion_ids, attention_mask: (B, T).
        completion_ids, completion_mask: (B, C), the last C columns.
        advantages: (B,), for "no_baseline" raw rewards; a row with NaN, whose reward is missing,
            contributes nothing.
        group_size: how many consecutive rows share a prompt, which is then computed once.
        old_per_token_logps: (B, C) under the policy before this batch's updates; None: the present
            policy's, detached, so that the ratio is 1.
        ref_per_token_logps: (B, C) under the reference; None: they are computed here.
        sampled_per_token_logps: (B, C) as the sampler gave them, for `sampling_logp_gap` and for
            config.importance_cap.
        num_sequences, num_tokens: the denominators of the whole update; None: this call is the
            whole update.

    Returns:
        (loss, metrics): a scalar with gradient, and floats. The class of a metric (Share,
        TokenShare, Minimum or Maximum) says how the values of an update's calls are combined. `kl`
        is averaged as the loss is, and absent if beta is 0. `response_length` is a mean over
        sequences, `ratio_min` and `ratio_max` are extremes, and the rest are means over completion
        tokens.
    """
    B, C = completion_ids.shape
    assert prompt_completion_ids.shape == attention_mask.shape, attention_mask.shape
    assert completion_mask.shape == (B, C), completion_mask.shape
    assert advantages.shape == (B,), advantages.shape
    has_reward = ~advantages.isnan()  # (B,)
    mask = completion_mask.bool() & has_reward.unsqueeze(1)  # (B, C)
    advantages = advantages.nan_to_num().unsqueeze(1)  # (B, 1)
    if num_sequences is None:
        num_sequences = int(has_reward.sum())
    if num_tokens is None:
        num_tokens = int(mask.sum())

    compute_logps = partial(
        get_per_token_logps,
        prompt_completion_ids=prompt_completion_ids,
        attention_mask=attention_mask,
        logits_to_keep=C,
        group_size=group_size,
        temperature=config.temperature,
    )
    policy_logps, entropy = compute_logps(model, return_entropy=True)  # (B, C) each
    old_logps = policy_logps.detach() if old_per_token_logps is None else old_per_token_logps

    per_token_loss, clip_metadata = LOSSES[config.loss_type](
        advantages, policy_logps, old_logps, mask, config
    )  # (B, C)
    if config.importance_cap is not None:
        # Truncated importance sampling: https://fengyao.notion.site/off-policy-rl
        importance = (old_logps - sampled_per_token_logps).exp()
        per_token_loss = per_token_loss * importance.clamp(max=config.importance_cap)
    if config.beta > 0:
        if ref_per_token_logps is None:
            with torch.inference_mode():
                ref_per_token_logps = compute_logps(base_model)
        per_token_kl = estimate_kl(policy_logps, ref_per_token_logps)
        per_token_loss = per_token_loss + config.beta * per_token_kl

    # This call's share of the update's average, which config.length_normalization defines.
    share_of_average = partial(
        LENGTH_NORMALIZATIONS[config.length_normalization],
        mask=mask,
        constant=config.max_completion_length,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
    )

    def token_mean(per_token: Tensor) -> TokenShare:
        """This call's share of the mean over the update's tokens."""
        return TokenShare(masked_sum(per_token, mask).div(max(1, num_tokens)).item())

    with torch.no_grad():
        ratio = (policy_logps - old_logps).exp()
        metrics = {
            "response_length": Share(mask.sum().item() / max(1, num_sequences)),
            "entropy": token_mean(entropy),
            "ratio_mean": token_mean(ratio),
        }
        for name, is_clipped in clip_metadata.items():
            metrics[name] = token_mean(is_clipped.float())
        if mask.any():
            metrics["ratio_min"] = Minimum(ratio[mask].min().item())
            metrics["ratio_max"] = Maximum(ratio[mask].max().item())
        if config.beta > 0:
            metrics["kl"] = Share(share_of_average(per_token_kl).item())
            metrics["kl_per_token"] = token_mean(per_token_kl)
        if sampled_per_token_logps is not None:
            metrics["sampling_logp_gap"] = token_mean((old_logps - sampled_per_token_logps).abs())
    return share_of_average(per_token_loss), metrics


# --- Setting up -----------------------------------------------------------------------------------


def setup(config: GRPOConfig) -> Run:
    """All that GRPO works with, from the flags.

    Raises ValueError or OSError for a wrong flag, or for a file that is wrong or missing.
    """
    run = steps.load(config, with_reference=config.beta > 0)
    if not config.eval_only:
        run.train_loader.next_batch(0)  # draws nothing, but raises if there is no training split
    run.optimizer = torch.optim.AdamW(
        run.model.parameters(),
        lr=config.learning_rate,
        betas=ADAM_BETAS,
        weight_decay=config.weight_decay,
        fused=True if run.model.device.type == "cuda" else None,
    )
    run.scheduler = torch.optim.lr_scheduler.LambdaLR(
        run.optimizer, partial(learning_rate_factor, config)
    )
    run.guard = Guard(config.max_kl)
    run.saves = not config.eval_only
    if not config.eval_only and not config.resume:
        # An evaluator may sample, and refuse rewards that nothing can be learnt from.
        run.evaluator.before_training(config, run, steps.sample)
    return run


def main(argv: list[str] | None = None) -> int:
    return run_to_the_end(parse(GRPOConfig, argv), setup, train)


if __name__ == "__main__":
    sys.exit(main())
