"""GRPO (Group Relative Policy Optimization, arXiv:2402.03300) for language models, in plain PyTorch.

`train` is the algorithm: 1 sample groups of completions, 2 reward them, 3 turn rewards into advantages, 4 keep the old
and reference log-probs, 5 compute the loss, 6 step, 7 log. `compute_loss` and its parts follow, then evaluation, setup.

Where this departs from the paper, and the flag that restores its way, where there is one:
  1. The reward is computed by rules, or by a judge, not by a trained reward model: --evaluator names a class.
  2. Rewards are for whole completions (outcome supervision); the paper's process supervision is not here.
  3. The reference stays the initial policy; the paper's iterative variant renews it: --model_name with a checkpoint
     of the last run, and a new --output_dir.
  4. The standard deviation of a group is over n - 1, and a group of equal rewards has advantage exactly 0.
  5. On CUDA a bfloat16 copy of the float32 weights samples, refreshed after each update; `sampling_logp_gap` is logged:
     --sampling_dtype float32 samples from the weights themselves, --importance_cap corrects for the gap.
  6. The KL is k3 in the loss, as in the paper: its value is KL(policy || reference), its gradient the reverse KL's.
As in the paper's runs there is one update per rollout batch, so the ratio is 1 and the clip idle; its general form (mu
updates) is --epochs_per_rollout_batch and --train_batch_size. GSPO, CISPO, DAPO and others by name: docs/family.md.

A step of a run, as logged, is one iteration: one rollout batch, with one or several optimiser steps.

Shapes: B sequences, G group size, P prompt tokens, C completion tokens, T = P + C, N rewards of a rollout batch.
"""

import math
import sys
import time
from argparse import Namespace
from collections.abc import Callable

import torch
from torch import Tensor

import distributed
import llms
import utils
from evaluator import RewardEvaluator, Rewards, get_evaluator
from flags import LOSS_TYPES, check, check_lengths, parse_args
from rl_datasets import get_dataloaders
from sampling import generation
from sampling.rollout import Rollout, compute_rollout_logps
from training import write_logs
from training.run import Run, run_to_the_end, save_checkpoint
from training.schedule import learning_rate_factor, split_into_updates
from training.signals import Guard

# --- The algorithm --------------------------------------------------------------------------------


def train(args: Namespace, run: Run) -> None:
    """Run GRPO on what `setup` made, writing logs, transcripts and checkpoints to args.output_dir."""
    llms.refresh_sampler(run.sampler, run.model)  # a resumed policy is not the one that was loaded
    if args.eval_only:
        return write_logs.print_categories(args, evaluate(args, run))
    if is_due(run.step, args.eval_iterations, args) and run.evaluated_step != run.step:
        evaluate(args, run)
    for step in run.progress_bar(args.num_train_iters):
        with run.stages("sample"):  # 1. G completions for each of several prompts
            examples = run.train_loader.next_batch(args.rollout_batch_size // args.group_size)
            mine = distributed.share(examples)  # of several processes each takes some
            rollout = sample(
                args, run, mine, num_samples=args.group_size, temperature=args.temperature
            )

        with run.stages("reward"):  # 2. one weighted reward per completion
            repeated = [example for example in examples for _ in range(args.group_size)]
            rewards = reward(run.evaluator, distributed.share(repeated), rollout)
            completions, rewards = write_logs.gather_completions(
                rollout, rewards
            )  # those of all processes
            total = run.evaluator.total(rewards)  # (N,)

        # 3. advantages: how much better than its own group each completion is
        advantages, metrics = compute_group_normalized_rewards(
            total, args.group_size, args.advantage_eps, args.use_std_normalization
        )
        signal = (
            total if args.loss_type == "no_baseline" else advantages
        )  # (N,) what multiplies the log-probs
        rollout, signal, resampled, counts = replace_flat_groups(args, run, rollout, signal)
        signal = distributed.share(signal).to(args.device)

        with run.stages(
            "logps"
        ):  # 4. log-probs that several updates share are computed once, before the first
            updates = split_into_updates(args)
            old_logps = frozen_logps(args, run.model, rollout) if len(updates) > 1 else None
            ref_logps = (
                frozen_logps(args, run.base_model, rollout)
                if len(updates) > 1 and args.beta
                else None
            )

        taken = []
        for rows in updates:  # a single one when on-policy
            with run.stages("loss"):  # 5. the loss and its gradient, in micro-batches
                loss_metrics = accumulate_gradient(
                    args, run, rollout, signal, rows, old_logps, ref_logps
                )
            run.interrupts.hold()  # once the weights move, an iteration is finished before the run may stop
            with run.stages("step"):  # 6. one optimiser step
                taken.append(loss_metrics | take_step(args, run, loss_metrics["loss"]))

        # 7. what the steps that were taken did
        metrics |= write_logs.merge_metrics(taken, write_logs.mean)
        metrics |= write_logs.rollout_metrics(run.evaluator, rewards, completions)
        records = write_logs.completion_records(
            run.evaluator, repeated, completions, rewards, advantage=advantages
        )
        write_logs.save_iteration(args, run, step, metrics | counts, records + resampled)
        run.interrupts.release()
        if is_due(step, args.eval_iterations, args):
            evaluate(args, run)
        if is_due(step, args.save_iterations, args):
            save_checkpoint(args, run)


def is_due(step: int, every: int, args: Namespace) -> bool:
    """At the start, every so many iterations, and at the end."""
    return step % every == 0 or step == args.num_train_iters


def sample(
    args: Namespace,
    run: Run,
    examples: list[dict],
    num_samples: int,
    temperature: float,
    progress: Callable[[int], None] | None = None,
) -> Rollout:
    """num_samples completions of each example's prompt: a Rollout of len(examples) * num_samples rows."""
    return generation.generate(
        run.sampler,
        run.tokenizer,
        [example["prompt"] for example in examples],
        num_samples=num_samples,
        max_new_tokens=args.max_completion_length,
        temperature=temperature,
        stop_strings=run.train_loader.prompt.stop_strings,
        max_concurrent_sequences=args.max_concurrent_sequences,
        progress=progress,
    )


def reward(evaluator: RewardEvaluator, examples: list[dict], rollout: Rollout) -> Rewards:
    """The evaluator's Rewards for one completion per example."""
    return evaluator.check_rewards(
        [e["question"] for e in examples], rollout.texts, [e["answer"] for e in examples]
    )


def replace_flat_groups(
    args: Namespace, run: Run, rollout: Rollout, signal: Tensor
) -> tuple[Rollout, Tensor, list[dict], dict[str, float]]:
    """DAPO's dynamic sampling (arXiv:2503.14476): groups of new prompts in the place of those whose rewards are equal.

    All processes draw the same prompts in as many rounds, and each samples for its own groups. signal: (N,), of all.
    Returns rollout and signal to train on, the records of what was sampled here, by all processes, and metrics.
    """
    G, column = args.group_size, "reward" if args.loss_type == "no_baseline" else "advantage"
    signal, records, mine = signal.clone(), [], distributed.share(range(len(signal) // G))
    for _ in range(args.dynamic_sampling):
        flat = flat_groups(signal, G).nonzero().flatten().tolist()
        drawn = zip(flat, run.train_loader.next_batch(len(flat)), strict=True)
        own, part = {group: example for group, example in drawn if group in mine}, []
        if own:  # another process may have some where this one has none
            with run.stages("sample"):
                new = sample(
                    args, run, list(own.values()), num_samples=G, temperature=args.temperature
                )
            with run.stages("reward"):
                repeated = [example for example in own.values() for _ in range(G)]
                rewards = reward(run.evaluator, repeated, new)
            total, settings = (
                run.evaluator.total(rewards),
                (args.advantage_eps, args.use_std_normalization),
            )
            advantages, _ = compute_group_normalized_rewards(total, G, *settings)
            part = write_logs.completion_records(
                run.evaluator, repeated, new, rewards, advantage=advantages
            )
            rollout = rollout.replace(
                [(group - mine[0]) * G + i for group in own for i in range(G)], new
            )
        part = distributed.gather(part)  # in the order of `flat`
        signal.view(-1, G)[flat] = signal.new_tensor([record[column] for record in part]).view(
            -1, G
        )
        records += part
    flat = flat_groups(signal, G).float().mean().item()
    metrics = {
        "sampled_prompts": (len(signal) + len(records)) // G,
        "zero_std_fraction_trained": flat,
    }
    return rollout, signal, records, metrics if args.dynamic_sampling else {}


def frozen_logps(args: Namespace, model: torch.nn.Module, rollout: Rollout) -> Tensor:
    """(B, C) a model's log-probs of the completions, without gradient."""
    return compute_rollout_logps(
        model,
        rollout,
        group_size=args.group_size,
        temperature=args.temperature,
        micro_batch_tokens=args.micro_batch_tokens,
    )


def compute_group_normalized_rewards(
    rewards: Tensor, group_size: int, advantage_eps: float = 1e-6, normalize_by_std: bool = True
) -> tuple[Tensor, dict[str, float]]:
    """(r - mean) / (std + eps) within each group of group_size consecutive rewards; not divided unless by std.

    The standard deviation is over n - 1. A group whose rewards are all equal, or with fewer than two, has
    advantage exactly 0. A missing reward (NaN) counts in no mean or std and has advantage NaN.

    Args:
        rewards: (N,) with N a multiple of group_size.

    Returns:
        advantages (N,), and metadata: mean reward, mean std within groups, share of groups of equal rewards.
    """
    groups = rewards.float().view(-1, group_size)  # (groups, G)
    present = ~groups.isnan()
    flat, count = (
        flat_groups(rewards, group_size).unsqueeze(1),
        present.sum(1, keepdim=True),
    )  # (groups, 1)
    mean = utils.masked_mean(groups, present, dim=1).unsqueeze(1)
    centred = torch.where(present, groups - mean, 0.0)
    std = (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    scaled = centred / (std + advantage_eps) if normalize_by_std else centred
    advantages = torch.where(flat, 0.0, scaled).masked_fill(~present, torch.nan)
    metadata = {
        "reward": utils.masked_mean(groups, present).item(),
        "reward_std": torch.where(flat, 0.0, std).mean().item(),
        "zero_std_fraction": flat.float().mean().item(),
    }
    return advantages.view(-1), metadata


def flat_groups(rewards: Tensor, group_size: int) -> Tensor:
    """(groups,) True where the rewards that are present are all equal, or fewer than two."""
    # Tested, not computed: a rounding residue in a std would be amplified by the division.
    groups = rewards.float().view(-1, group_size)
    lowest, highest = groups.nan_to_num(torch.inf).amin(1), groups.nan_to_num(-torch.inf).amax(1)
    return lowest >= highest  # where none is present, inf and -inf


def accumulate_gradient(
    args: Namespace,
    run: Run,
    rollout: Rollout,
    signal: Tensor,
    rows: list[int],
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
) -> dict[str, float]:
    """Backward through the loss of one update over the given rows, micro-batch by micro-batch; returns its metrics.

    Denominators are those of the whole update, over all processes, so that shares of loss, gradient and metrics simply
    add. A group without gradient skips its passes: its tokens are all masked or its rewards missing, or, with beta 0,
    its signal (advantages, or rewards) is all 0. Its sequences still count in the denominators.
    """
    loss_mask = rollout.completion_mask
    if args.mask_truncated_completions:
        loss_mask = loss_mask * rollout.finished.unsqueeze(1)
    present = ~signal[rows].isnan()  # a missing reward leaves the denominators
    num_sequences, num_tokens = distributed.all_sum(
        int(present.sum()), int(loss_mask[rows][present].sum())
    )
    useful = present & loss_mask[rows].any(1) & (args.beta > 0 or signal[rows] != 0)
    rows = torch.tensor(rows)[
        useful.view(-1, args.group_size).any(1).repeat_interleave(args.group_size).cpu()
    ]

    shares, sharded = [], distributed.is_sharded(run.model)
    for part, batch, counts in rollout.micro_batches(
        rows, args.group_size, args.micro_batch_tokens, sharded
    ):
        C = batch.completion_ids.shape[1]
        my_signal = signal[part] if counts else torch.full_like(signal[part], torch.nan)
        with utils.autocast(args.device):
            loss, metrics = compute_loss(
                run.model,
                run.base_model,
                batch.prompt_completion_ids,
                batch.completion_ids,
                batch.attention_mask,
                loss_mask[part, :C],
                my_signal,
                group_size=args.group_size,
                temperature=args.temperature,
                beta=args.beta,
                loss_type=args.loss_type,
                cliprange=args.cliprange,
                cliprange_high=args.cliprange_high,
                length_normalization=args.length_normalization,
                normalization_constant=args.max_completion_length,
                old_per_token_logps=None if old_logps is None else old_logps[part, :C],
                ref_per_token_logps=None if ref_logps is None else ref_logps[part, :C],
                sampled_per_token_logps=batch.sampled_logps,
                importance_cap=args.importance_cap,
                num_sequences=num_sequences,
                num_tokens=num_tokens,
            )
        loss.backward()
        trained_tokens = int(loss_mask[part, :C][~my_signal.isnan()].sum())
        shares.append(metrics | {"loss": loss.item(), "trained_tokens": trained_tokens})
    total = write_logs.merge_metrics(distributed.gather(shares), sum)
    # Skipped tokens have no entropy or ratio: means over tokens are over those that went through the model.
    scale = num_tokens / max(1, total.pop("trained_tokens", 0))
    total = {
        key: value * (1 if key in write_logs.NOT_OVER_TOKENS else scale)
        for key, value in total.items()
    }
    return {"loss": 0.0} | total  # 0.0 where all groups were skipped


def take_step(args: Namespace, run: Run, loss: float) -> dict[str, float]:
    """One step of the optimiser and of the learning rate; returns metrics of the step."""
    metrics = {"learning_rate": run.scheduler.get_last_lr()[0]}
    metrics |= clip_and_step(run.model, run.optimizer, args.max_grad_norm, loss)
    run.scheduler.step()
    llms.refresh_sampler(run.sampler, run.model)
    return metrics


def clip_and_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, max_norm: float, loss: float
) -> dict:
    """Clip the accumulated gradient and apply it, unless it or the loss is not finite; its norm before the clipping."""
    norm = distributed.full_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))
    finite = bool(norm.isfinite()) and math.isfinite(loss)
    if finite:
        optimizer.step()
    optimizer.zero_grad()  # to None: where every row was skipped, the optimiser moves nothing, not even by momentum
    return {"grad_norm": norm.item(), "skipped_updates": int(not finite)}


# --- The loss -------------------------------------------------------------------------------------


def compute_loss(
    model: torch.nn.Module,
    base_model: torch.nn.Module | None,
    prompt_completion_ids: Tensor,
    completion_ids: Tensor,
    attention_mask: Tensor,
    completion_mask: Tensor,
    advantages: Tensor,
    *,
    group_size: int = 1,
    temperature: float = 1.0,
    beta: float = 0.04,
    loss_type: str = "grpo_clip",
    cliprange: float = 0.2,
    cliprange_high: float | None = None,
    length_normalization: str = "masked_mean",
    normalization_constant: float | None = None,
    old_per_token_logps: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    sampled_per_token_logps: Tensor | None = None,
    importance_cap: float | None = None,
    num_sequences: int | None = None,
    num_tokens: int | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The GRPO loss: per token -(ratio * advantage - beta * KL), averaged over tokens and over sequences.

    Args:
        base_model: the frozen reference; None when beta is 0.
        prompt_completion_ids, attention_mask: (B, T); completion_ids, completion_mask: (B, C), the last C columns.
        advantages: (B,), raw rewards for "no_baseline"; a row with NaN (missing reward) contributes nothing.
        group_size: G consecutive rows share their prompt, which is then run once; fewer rows are a part of one group.
        normalization_constant: for "masked_normalize", the maximum completion length; None means C.
        old_per_token_logps, ref_per_token_logps: (B, C); None: the policy's own, and computed here.
        sampled_per_token_logps: (B, C) what the sampler said; for `sampling_logp_gap` and importance_cap.
        num_sequences, num_tokens: denominators of the whole update; None means that this call is the whole update.

    Returns:
        (loss, metrics): a scalar with gradient, and floats: `kl` with the loss's own reduction (absent with beta 0),
        `response_length` per sequence, and means over completion tokens, `kl_per_token` too. Of an update in several
        calls all but _min and _max are shares, which add up.
    """
    B, C = completion_ids.shape
    assert prompt_completion_ids.shape == attention_mask.shape and completion_mask.shape == (B, C)
    assert advantages.shape == (B,), advantages.shape
    present = ~advantages.isnan()  # (B,)
    mask = completion_mask.bool() & present.unsqueeze(1)  # (B, C)
    num_sequences = int(present.sum()) if num_sequences is None else num_sequences
    num_tokens = int(mask.sum()) if num_tokens is None else num_tokens
    advantages = advantages.nan_to_num().unsqueeze(1)  # (B, 1)

    def logps(model, **options):  # (B, C)
        return utils.get_per_token_logps(
            model,
            prompt_completion_ids,
            attention_mask,
            C,
            group_size=group_size,
            temperature=temperature,
            **options,
        )

    policy_logps, entropy = logps(model, return_entropy=True)
    old_logps = policy_logps.detach() if old_per_token_logps is None else old_per_token_logps

    per_token_loss, clipped = compute_policy_gradient_loss(
        policy_logps, loss_type, advantages, advantages, old_logps, cliprange, cliprange_high, mask
    )  # (B, C)
    if (
        importance_cap is not None
    ):  # truncated importance sampling: https://fengyao.notion.site/off-policy-rl
        per_token_loss = per_token_loss * (old_logps - sampled_per_token_logps).exp().clamp(
            max=importance_cap
        )

    if beta:
        if ref_per_token_logps is None:
            with torch.inference_mode():
                ref_per_token_logps = logps(base_model)
        # k3 estimator of KL(policy || reference), never negative; unbiased on-policy: http://joschu.net/blog/kl-approx.html
        # Its gradient, (1 - p_ref / p) grad log p, is on-policy that of KL(reference || policy): samples stand still.
        log_ratio = ref_per_token_logps - policy_logps
        per_token_kl = log_ratio.exp() - log_ratio - 1
        per_token_loss = per_token_loss + beta * per_token_kl

    def reduce(per_token):  # (B, C) -> scalar: this call's share of the update's mean
        constant = normalization_constant or C
        return utils.aggregate_tokens(
            per_token, mask, length_normalization, constant, num_sequences, num_tokens
        )

    def token_mean(per_token):  # metrics: over all tokens of the update
        return (utils.masked_sum(per_token, mask) / max(1, num_tokens)).item()

    with torch.no_grad():
        ratio = (policy_logps - old_logps).exp()
        metrics = {
            "response_length": mask.sum().item() / max(1, num_sequences),
            "entropy": token_mean(entropy),
        }
        metrics |= {"ratio_mean": token_mean(ratio)} | {
            name: token_mean(x.float()) for name, x in clipped.items()
        }
        if mask.any():
            metrics |= {
                "ratio_min": ratio[mask].min().item(),
                "ratio_max": ratio[mask].max().item(),
            }
        if beta:
            metrics |= {"kl": reduce(per_token_kl).item(), "kl_per_token": token_mean(per_token_kl)}
        if sampled_per_token_logps is not None:
            metrics["sampling_logp_gap"] = token_mean((old_logps - sampled_per_token_logps).abs())
    return reduce(per_token_loss), metrics


def compute_naive_policy_gradient_loss(
    raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor
) -> Tensor:
    """REINFORCE, per token: -A log pi. (B, 1), (B, C) -> (B, C)."""
    return -raw_rewards_or_advantages * policy_log_probs


def compute_grpo_clip_loss(
    advantages: Tensor,
    policy_log_probs: Tensor,
    old_log_probs: Tensor,
    cliprange: float,
    cliprange_high: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped objective, per token: -min(ratio A, clip(ratio, 1 - low, 1 + high) A). high None means low.

    Returns:
        (B, C) losses, and masks (B, C) of the tokens whose gradient the clip stopped, at each side.
    """
    high = cliprange if cliprange_high is None else cliprange_high
    ratio = (policy_log_probs - old_log_probs).exp()
    clipped_ratio = ratio.clamp(1 - cliprange, 1 + high)
    clip_low = (ratio < 1 - cliprange) & (advantages < 0)
    clip_high = (ratio > 1 + high) & (advantages > 0)
    metadata = {
        "clip_fraction": clip_low | clip_high,
        "clip_fraction_low": clip_low,
        "clip_fraction_high": clip_high,
    }
    return -torch.min(ratio * advantages, clipped_ratio * advantages), metadata


def compute_policy_gradient_loss(
    policy_log_probs: Tensor,
    loss_type: str,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float = 0.2,
    cliprange_high: float | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token loss (B, C) of one of LOSS_TYPES and its metadata; raw_rewards, advantages (B, 1); mask (B, C)."""
    if loss_type == "grpo_clip":
        return compute_grpo_clip_loss(
            advantages, policy_log_probs, old_log_probs, cliprange, cliprange_high
        )
    if loss_type == "grpo_no_clip":
        return -(policy_log_probs - old_log_probs).exp() * advantages, {}
    if (
        loss_type == "gspo"
    ):  # arXiv:2507.18071: every token has the ratio of its sequence, exp(mean log-ratio)
        count, both = mask.sum(1, keepdim=True).clamp(min=1), (policy_log_probs, old_log_probs)
        policy, old = (
            (utils.masked_sum(x, mask, dim=1).unsqueeze(1) / count).expand_as(x) for x in both
        )
        return compute_grpo_clip_loss(advantages, policy, old, cliprange, cliprange_high)
    if (
        loss_type == "cispo"
    ):  # arXiv:2506.13585: the ratio is only a weight, capped: no token's gradient is stopped
        ratio = (policy_log_probs - old_log_probs).exp().detach()
        cap = 1 + (cliprange if cliprange_high is None else cliprange_high)
        return -ratio.clamp(max=cap) * advantages * policy_log_probs, {"clip_fraction": ratio > cap}
    if loss_type == "reinforce_with_baseline":
        return compute_naive_policy_gradient_loss(advantages, policy_log_probs), {}
    if loss_type == "no_baseline":
        return compute_naive_policy_gradient_loss(raw_rewards, policy_log_probs), {}
    raise ValueError(f"unknown loss_type {loss_type!r}; known: {', '.join(LOSS_TYPES)}")


# --- Evaluation -----------------------------------------------------------------------------------


def evaluate(args: Namespace, run: Run) -> dict[str, float]:
    """Complete and reward every example of the eval_loader, at args.eval_temperature, with its own random numbers.

    Logs, and returns: n, accuracies with intervals and with several samples pass@k, rewards, lengths.
    """
    examples, start = list(run.eval_loader), time.perf_counter()
    k, mine = args.eval_samples, distributed.share(examples)
    with (
        utils.isolated_seed(args.seed),
        write_logs.bar(
            total=len(mine) * k, desc="evaluating", unit="completion", leave=False
        ) as bar,
    ):
        rollout = sample(
            args, run, mine, num_samples=k, temperature=args.eval_temperature, progress=bar.update
        )
    rewards = reward(run.evaluator, [example for example in mine for _ in range(k)], rollout)
    completions, rewards = write_logs.gather_completions(rollout, rewards)
    repeated = [example for example in examples for _ in range(k)]
    metrics = write_logs.evaluation_metrics(run.evaluator, repeated, rewards, completions, k)
    metrics["time/total"] = time.perf_counter() - start
    records = write_logs.completion_records(run.evaluator, repeated, completions, rewards)
    write_logs.save_evaluation(args, run, metrics, records)
    return metrics


# --- Setting up -----------------------------------------------------------------------------------


def load(args: Namespace, *, with_reference: bool = False) -> Run:
    """Model, data and rewards from the flags: what main.py, sft.py and expert iteration have in common.

    Raises ValueError or OSError for what a user got wrong.
    """
    check(args)
    utils.seed_everything(args.seed)
    model, tokenizer = llms.get_llm_tokenizer(
        args.model_name, args.device, gradient_checkpointing=args.gradient_checkpointing
    )
    train_loader, eval_loader = get_dataloaders(
        args.dataset_name,
        tokenizer,
        prompt=args.prompt,
        dataset_path=args.dataset_path,
        max_prompt_length=args.max_prompt_length,
        seed=args.seed,
        eval_split=args.eval_split,
        eval_size=args.eval_size,
    )
    check_lengths(args, model, train_loader, eval_loader)
    for split, loader in (("training", train_loader), (args.eval_split, eval_loader)):
        dropped = (
            f" ({loader.dropped} dropped: longer than {args.max_prompt_length} tokens)"
            if loader.dropped
            else ""
        )
        print(f"{args.dataset_name}: {len(loader):,} {split} problems{dropped}")
    base_model = llms.get_base_model(model) if with_reference else None
    name, reference = args.evaluator or train_loader.default_evaluator, (base_model, tokenizer)
    evaluator = get_evaluator(
        name, prompt=train_loader.prompt.name, flags=args, reference=reference
    )
    evaluator.check_gold(train_loader.examples, eval_loader.examples)
    sampler = llms.get_sampler(model, args.sampling_dtype)
    return Run(
        model=llms.shard(model),
        base_model=base_model,
        sampler=sampler,
        tokenizer=tokenizer,
        evaluator=evaluator,
        train_loader=train_loader,
        eval_loader=eval_loader,
        stages=write_logs.Stages(args.device),
    )


def setup(args: Namespace) -> Run:
    """Everything that GRPO works with, from the flags. Raises ValueError or OSError for what a user got wrong."""
    run = load(args, with_reference=args.beta > 0)
    if not args.eval_only:
        run.train_loader.next_batch(0)  # raises where there is no training split
    betas = args.adam_beta1, args.adam_beta2
    run.optimizer = torch.optim.AdamW(
        run.model.parameters(), lr=args.learning_rate, betas=betas, weight_decay=args.weight_decay
    )
    run.scheduler = torch.optim.lr_scheduler.LambdaLR(
        run.optimizer, lambda n: learning_rate_factor(args, n)
    )
    run.guard, run.saves = Guard(args.max_kl), not args.eval_only
    if not (args.eval_only or args.resume):
        run.evaluator.before_training(args, run, sample)
    return run


def main(argv: list[str] | None = None) -> int:
    return run_to_the_end(parse_args(argv), setup, train)


if __name__ == "__main__":
    sys.exit(main())
