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
  6. The KL is the k3 estimate, as in the paper, with the gradient of KL(reference || policy).
  7. An update in which no completion has a gradient takes no step. With beta 0 that is a batch of
     equal rewards in every group. Otherwise AdamW would move the weights by its momentum alone.
As in the paper's runs there is one update for each rollout batch, so the ratio is 1 and the clip
has nothing to do. --epochs_per_rollout_batch and --train_batch_size ask for several updates (the
paper's mu). GSPO, CISPO, DAPO and other relatives: docs/family.md.

An iteration is one rollout batch with its updates; the logs call it a step.

Shapes: B sequences, G group size, P prompt tokens, C completion tokens, T = P + C, N completions of
a rollout batch, over all processes.
"""

import math
import sys
from dataclasses import dataclass, replace
from functools import partial

from config import GRPOConfig, LossConfig, OptimiserConfig, parse

if __name__ == "__main__":
    parse(GRPOConfig)  # --help and mistakes are answered before the seconds that imports take

import torch
from torch import Tensor

import distributed
import llms
import utils
from evaluator import CreativeWritingEvaluator
from judges.judges import check_spread, spread_within_groups
from losses import LENGTH_NORMALIZATIONS, LOSSES, estimate_kl
from sampling.rollout import Rollout, compute_rollout_logps
from training import completions, token_changes, write_logs
from training.guard import Guard
from training.loop import iterations
from training.records import Record, column, make_records, reward_metrics, rollout_metrics
from training.run import Run, run_to_the_end
from training.schedule import learning_rate_of, split_into_updates
from training.setup import load
from utils import get_per_token_logps, masked_mean, masked_sum, repeat_each, rows_of_groups

# --- The algorithm --------------------------------------------------------------------------------


def train(config: GRPOConfig, run: Run) -> None:
    """Run GRPO on what `setup` made; write logs, transcripts and checkpoints."""
    if config.eval_only:
        write_logs.print_categories(config, completions.evaluate(config, run))
        return
    guard = Guard(config.max_kl, checks_sampler=config.sampler == "vllm")
    for step in iterations(config, run, config.eval_iterations, config.save_iterations):
        # 1 to 3. Sample G completions for each of several prompts, reward them, compute advantages.
        examples = run.train_loader.next_batch(config.rollout_batch_size // config.group_size)
        groups = sample_groups(config, run, examples, distributed.share(examples))
        if config.dynamic_sampling:
            groups = replace_flat_groups(config, run, groups)
        rollout = rollout_for_training(config, groups)

        # 4. If several updates need the same log-probs, compute these before the first update.
        updates = split_into_updates(config)
        if len(updates) > 1:
            rollout = with_shared_logps(config, run, rollout)

        update_metrics = []
        with token_changes.shown(config, run, rollout, groups.trained_records):
            for i, rows in enumerate(updates):  # a single update, unless training is off-policy
                # 5. Compute the loss and its gradient, in micro-batches.
                with run.timer("loss"):
                    loss_metrics = accumulate_gradient(
                        run.model, run.base_model, rollout, rows, config, config.micro_batch_tokens
                    )
                # 6. Update the weights.
                with run.timer("update"):
                    learning_rate = learning_rate_of(config, (step - 1) * len(updates) + i)
                    step_metrics = take_step(
                        run.model, run.optimizer, config, learning_rate, loss_metrics["loss"]
                    )
                    llms.refresh_sampler(run.sampler, run.model)
                update_metrics.append(loss_metrics | step_metrics)

        # 7. Log what was sampled, and what the updates did.
        metrics = average(update_metrics) | groups.metrics
        num_tokens = sum(record["length"] for record in groups.records)
        run.finish_iteration(num_tokens)
        write_logs.save_iteration(config, run, metrics, groups.records)
        guard.check(metrics)


@dataclass(frozen=True)
class Groups:
    """Completions, G consecutive ones for each prompt, with their rewards and advantages."""

    rollout: Rollout  # the completions of this process
    records: list[Record]  # N, and after dynamic sampling more: every completion that was sampled
    trained_records: list[Record]  # N: those of `records` whose completions are trained on
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
        rollout = completions.sample(
            config, run, my_examples, config.group_size, config.temperature
        )

    with run.timer("reward"):  # 2.
        my_repeated_examples = repeat_each(my_examples, config.group_size)
        my_rewards = completions.reward(run.evaluator, my_repeated_examples, rollout.texts)
        records = make_records(run.evaluator, my_repeated_examples, rollout, my_rewards)
        metrics = reward_metrics(run.evaluator, records, my_rewards)
        metrics |= rollout_metrics(records)

    # 3. How much better is a completion than the other completions of its group?
    rewards = column(records, "reward")  # (N,) one weighted sum for each completion
    advantages, group_metrics = compute_group_normalized_rewards(
        rewards, config.group_size, normalize_by_std=config.use_std_normalization
    )
    advantages = advantages.masked_fill(rewards.isnan(), math.nan)
    for record, advantage in zip(records, advantages.tolist(), strict=True):
        record["advantage"] = advantage
    return Groups(rollout, records, records, metrics | group_metrics)


def replace_flat_groups(config: GRPOConfig, run: Run, groups: Groups) -> Groups:
    """DAPO's dynamic sampling (arXiv:2503.14476): replace groups whose rewards are all equal.

    Up to config.dynamic_sampling times, groups of new prompts take their place. All processes draw
    the same prompts, and each samples for its own groups. The metrics stay those of the first
    sampling: after the replacement they would leave out the flat groups.
    """
    G = config.group_size
    rollout = groups.rollout
    records = list(groups.records)
    trained_records = list(groups.trained_records)
    my_groups = distributed.share(range(len(trained_records) // G))
    for _ in range(config.dynamic_sampling):
        is_flat = flat_groups(column(trained_records, "reward"), G)  # (N / G,)
        flat = is_flat.nonzero().flatten().tolist()
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
        records += new.records
        for row, record in zip(rows_of_groups(flat, G), new.records, strict=True):
            trained_records[row] = record
    is_flat = flat_groups(column(trained_records, "reward"), G)
    metrics = {
        "sampled_prompts": len(records) // G,
        "zero_std_fraction_trained": is_flat.float().mean().item(),
    }
    return Groups(rollout, records, trained_records, groups.metrics | metrics)


def rollout_for_training(config: GRPOConfig, groups: Groups) -> Rollout:
    """This process's rollout, with what multiplies each completion and which tokens count.

    No token counts of a completion without a reward. With config.mask_truncated_completions none
    counts of a completion that was cut off either, though the loss is still divided by the number
    of sequences with it.
    """
    rollout = groups.rollout
    # What multiplies the log-probs, (B,); NaN without a reward.
    name = "reward" if config.loss_type == "no_baseline" else "advantage"
    multipliers = column(distributed.share(groups.trained_records), name)
    multipliers = multipliers.to(rollout.completion_mask.device)
    has_reward = ~multipliers.isnan()
    has_tokens = has_reward
    if config.mask_truncated_completions:
        has_tokens = has_tokens & rollout.finished
    return replace(
        rollout,
        advantages=multipliers.nan_to_num(),
        has_reward=has_reward,
        loss_mask=rollout.completion_mask * has_tokens.unsqueeze(1),
    )


def with_shared_logps(config: GRPOConfig, run: Run, rollout: Rollout) -> Rollout:
    """Step 4: the rollout with the log-probs under the policy and, if beta > 0, the reference."""
    compute_logps = partial(
        compute_rollout_logps,
        rollout=rollout,
        group_size=config.group_size,
        temperature=config.temperature,
        micro_batch_tokens=config.micro_batch_tokens,
    )
    with run.timer("logps"):
        return replace(
            rollout,
            old_logps=compute_logps(run.model),
            ref_logps=compute_logps(run.base_model) if config.beta > 0 else None,
        )


# --- Advantages -----------------------------------------------------------------------------------


def compute_group_normalized_rewards(
    rewards: Tensor, group_size: int, advantage_eps: float = 1e-6, normalize_by_std: bool = True
) -> tuple[Tensor, dict[str, float]]:
    """Advantages (r - mean) / (std + eps) within each group of group_size consecutive rewards.

    The standard deviation divides by n - 1. A group whose rewards are all equal, or with fewer than
    two of them, has advantage exactly 0. A missing reward (NaN) counts in no mean and no standard
    deviation, and has advantage 0.

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
    model: torch.nn.Module,
    base_model: torch.nn.Module | None,
    rollout: Rollout,
    rows: list[int],
    config: LossConfig,
    micro_batch_tokens: int,
) -> dict[str, float]:
    """Backward through the loss of one update over the given rows, micro-batch by micro-batch.

    Denominators are those of the whole update, over all micro-batches and processes. Each
    micro-batch gives its share of the loss, the gradient and the metrics, and shares simply add.
    The parameters must have no gradient before.

    Args:
        base_model: the reference; None if beta is 0.
        rollout: of this process, with advantages, has_reward and loss_mask.
        rows: whole groups of the rollout.

    Returns:
        the metrics of the update, its loss among them.
    """
    rows = torch.tensor(rows, dtype=torch.long)
    trained_rows = rows_that_teach(rollout, rows, config)
    num_sequences, num_tokens, num_trained_tokens = distributed.all_sum(
        int(rollout.has_reward[rows].sum()),
        int(rollout.loss_mask[rows].sum()),
        int(rollout.loss_mask[trained_rows].sum()),
    )

    shares = []
    for _, batch, is_counted in rollout.micro_batches(
        trained_rows, config.group_size, micro_batch_tokens, sharded=distributed.is_sharded(model)
    ):
        with utils.autocast(model.device):
            loss, metrics = compute_loss(
                model,
                base_model,
                batch.prompt_completion_ids,
                batch.completion_ids,
                batch.attention_mask,
                batch.loss_mask * is_counted,  # 0 in a pass that only keeps processes in step
                batch.advantages,
                config,
                group_size=config.group_size,
                old_per_token_logps=batch.old_logps,
                ref_per_token_logps=batch.ref_logps,
                sampled_per_token_logps=batch.sampled_logps,
                num_sequences=num_sequences,
                num_tokens=num_tokens,
                num_trained_tokens=num_trained_tokens,
            )
        loss.backward()
        shares.append(metrics | {"loss": loss.item()})

    totals = {"loss": 0.0} | add_up(distributed.gather(shares))
    totals.pop("response_length", None)  # the logs have that of all sampled completions
    return totals


def rows_that_teach(rollout: Rollout, rows: Tensor, config: LossConfig) -> Tensor:
    """The rows that go through the model: all but those of groups without any gradient.

    Whole groups stay together, since they share a prompt. Sequences that are left out still count
    in the denominators of the loss.
    """
    teaches = rollout.loss_mask[rows].any(1)  # (number of rows,)
    if config.beta == 0:  # without a KL term, an advantage of 0 teaches nothing
        teaches &= rollout.advantages[rows] != 0
    group_teaches = teaches.view(-1, config.group_size).any(1)
    return rows[group_teaches.repeat_interleave(config.group_size).cpu()]


def take_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    config: OptimiserConfig,
    learning_rate: float,
    loss: float,
) -> dict[str, float]:
    """Clip the accumulated gradient and apply it, unless the gradient or the loss is not finite.

    Returns:
        metrics: the learning rate, the 2-norm of the gradient before it was clipped, and whether
        the update was skipped.
    """
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    norm = distributed.full_tensor(norm).item()
    is_finite = math.isfinite(norm) and math.isfinite(loss)
    if is_finite:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
    # Gradients become None, not 0. An update in which no row teaches then moves no weight, not even
    # by AdamW's momentum.
    optimizer.zero_grad()
    return {
        "learning_rate": learning_rate,
        "grad_norm": norm,
        "skipped_updates": int(not is_finite),
    }


def add_up(rows: list[dict[str, float]]) -> dict[str, float]:
    """The sum of each number over those rows that have it."""
    totals = {}
    for row in rows:
        for name, value in row.items():
            totals[name] = totals.get(name, 0) + value
    return totals


def average(rows: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each number over those rows that have it."""
    counts = add_up([dict.fromkeys(row, 1) for row in rows])
    return {name: total / counts[name] for name, total in add_up(rows).items()}


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
    num_trained_tokens: int | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The GRPO loss: -(min(ratio * A, clip(ratio) * A) - beta * KL) for each token, averaged.

    By default the average is over the tokens of each sequence, and then over the sequences.
    config.loss_type has the policy terms of other papers in the place of the first one.

    Args:
        base_model: the frozen reference; None if beta is 0.
        prompt_completion_ids, attention_mask: (B, T).
        completion_ids, completion_mask: (B, C), the last C columns.
        advantages: (B,), for "no_baseline" raw rewards.
        group_size: how many consecutive rows share a prompt, which is then computed once.
        old_per_token_logps: (B, C) under the policy before this batch's updates; None: the present
            policy's, detached, so that the ratio is 1.
        ref_per_token_logps: (B, C) under the reference; None: they are computed here.
        sampled_per_token_logps: (B, C) as the sampler gave them, for `sampling_logp_gap` and for
            config.importance_cap.
        num_sequences, num_tokens: of the whole update, by which the loss is divided; tokens are
            those of completion_mask. None: this call is the whole update.
        num_trained_tokens: the update's tokens in rows that go through the model. It divides the
            metrics and never the loss; None: num_tokens.

    Returns:
        (loss, metrics): a scalar with gradient, and floats. Each is this call's share: summed over
        an update's calls, the shares give the update's value. `kl` is averaged as the loss is, and
        absent if beta is 0. `response_length` is a mean over sequences, and the rest are means over
        the unmasked tokens.
    """
    B, C = completion_ids.shape
    assert prompt_completion_ids.shape == attention_mask.shape, attention_mask.shape
    assert completion_mask.shape == (B, C), completion_mask.shape
    assert advantages.shape == (B,), advantages.shape
    mask = completion_mask.bool()
    advantages = advantages.unsqueeze(1)  # (B, 1)
    if num_sequences is None:
        num_sequences = B
    if num_tokens is None:
        num_tokens = int(mask.sum())
    if num_trained_tokens is None:
        num_trained_tokens = num_tokens

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

    # The loss of the policy gradient, and where the clip stops it.
    per_token_loss, clip_masks = LOSSES[config.loss_type](
        advantages, policy_logps, old_logps, mask, config
    )  # (B, C) each
    assert per_token_loss.shape == (B, C), f"{config.loss_type}: {per_token_loss.shape}"
    if config.importance_cap is not None:
        # Truncated importance sampling: https://fengyao.notion.site/off-policy-rl
        importance = (old_logps - sampled_per_token_logps).exp()
        per_token_loss = per_token_loss * importance.clamp(max=config.importance_cap)

    # The penalty for leaving the reference.
    if config.beta > 0:
        if ref_per_token_logps is None:
            with torch.inference_mode():
                ref_per_token_logps = compute_logps(base_model)
        per_token_kl = estimate_kl(policy_logps, ref_per_token_logps)
        per_token_loss = per_token_loss + config.beta * per_token_kl

    # This call's share of the update's mean, over tokens and then sequences or all at once.
    share_of_mean = partial(
        LENGTH_NORMALIZATIONS[config.length_normalization],
        mask=mask,
        constant=config.max_completion_length,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
    )
    loss = share_of_mean(per_token_loss)

    with torch.no_grad():
        per_token = {"entropy": entropy, "ratio_mean": (policy_logps - old_logps).exp()}
        per_token |= clip_masks
        metrics = {"response_length": mask.sum().item() / max(1, num_sequences)}
        if config.beta > 0:
            per_token["kl_per_token"] = per_token_kl
            metrics["kl"] = share_of_mean(per_token_kl).item()
        if sampled_per_token_logps is not None:
            per_token["sampling_logp_gap"] = (old_logps - sampled_per_token_logps).abs()
        metrics |= token_means(per_token, mask, num_trained_tokens)
    return loss, metrics


def token_means(per_token: dict[str, Tensor], mask: Tensor, num_tokens: int) -> dict[str, float]:
    """The sum of each (B, C) over the unmasked tokens, divided by num_tokens."""
    return {
        name: masked_sum(values, mask).div(max(1, num_tokens)).item()
        for name, values in per_token.items()
    }


# --- Setting up -----------------------------------------------------------------------------------


def setup(config: GRPOConfig) -> Run:
    """All that GRPO works with, from the settings.

    Raises ValueError or OSError for a wrong setting, or for a file that is wrong or missing.
    """
    run = load(config, with_reference=config.beta > 0)
    if config.eval_only:
        return run
    run.train_loader.next_batch(0)  # draws nothing, but raises if there is no training split
    run.optimizer = get_optimizer(run.model, config)
    run.num_iterations = config.num_train_iters
    if not config.resume:
        check_judge(config, run)
    return run


def check_judge(config: GRPOConfig, run: Run, num_prompts: int = 8) -> None:
    """Raise ValueError, before the first update, for a judge that cannot tell stories apart.

    The first process samples one group for each of a few prompts.
    """
    if not isinstance(run.evaluator, CreativeWritingEvaluator) or config.min_judge_spread == 0:
        return
    spread = None
    if distributed.is_main():
        examples = run.train_loader.examples[:num_prompts]
        with utils.isolated_seed(config.seed):
            rollout = completions.sample(
                config, run, examples, config.group_size, config.temperature
            )
        repeated_examples = repeat_each(examples, config.group_size)
        rewards = completions.reward(run.evaluator, repeated_examples, rollout.texts)
        scores = rewards.per_function[:, 0].tolist()
        spread = spread_within_groups(scores, config.group_size)
        print(f"the judge's scores have a standard deviation of {spread:.3g} within groups")
    check_spread(distributed.from_main(spread), config.min_judge_spread)


def get_optimizer(model: torch.nn.Module, config: OptimiserConfig) -> torch.optim.Optimizer:
    """AdamW. take_step sets its learning rate."""
    is_cuda = model.device.type == "cuda"
    adamw = llms.OffloadedAdamW if config.offload_optimizer else torch.optim.AdamW
    return adamw(
        model.parameters(),
        lr=0.0,
        betas=(0.9, 0.95),  # the decay of its running means of the gradient and of its square
        weight_decay=config.weight_decay,
        fused=True if is_cuda else None,  # one kernel that reads and writes every number once
    )


def main(argv: list[str] | None = None) -> int:
    return run_to_the_end(parse(GRPOConfig, argv), setup, train)


if __name__ == "__main__":
    sys.exit(main())
