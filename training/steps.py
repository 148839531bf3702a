"""Steps that GRPO, supervised fine-tuning and expert iteration share.

`config` are the settings of the script, `run` is its training.run.Run.
"""

import math
import time

import torch
from tqdm import tqdm

import distributed
import llms
import utils
from config import CompletionConfig, FineTuningConfig, GRPOConfig, OutputConfig
from evaluator import RewardEvaluator, Rewards, get_evaluator
from rl_datasets import get_dataloaders
from sampling import generation
from sampling.rollout import Rollout
from training import write_logs
from training.checks import check, check_lengths
from training.memory import flag_to_lower
from training.metrics import StageTimer, evaluation_metrics, gather_completions
from training.run import Run
from utils import repeat_each


def load(config: GRPOConfig | FineTuningConfig, *, with_reference: bool = False) -> Run:
    """Model, data and rewards, from the flags.

    Raises ValueError or OSError for a wrong flag, or for a file that is wrong or missing.
    """
    check(config)
    utils.seed_everything(config.seed)
    model, tokenizer = llms.get_llm_tokenizer(
        config.model_name, config.device, gradient_checkpointing=config.gradient_checkpointing
    )
    train_loader, eval_loader = get_dataloaders(
        config.dataset_name,
        tokenizer,
        prompt=config.prompt,
        dataset_path=config.dataset_path,
        max_prompt_length=config.max_prompt_length,
        seed=config.seed,
        eval_split=config.eval_split,
        eval_size=config.eval_size,
    )
    longest_prompt = max(train_loader.longest_prompt, eval_loader.longest_prompt)
    check_lengths(model, longest_prompt, config.max_completion_length)
    for split, loader in (("training", train_loader), (config.eval_split, eval_loader)):
        dropped = ""
        if loader.dropped:
            dropped = f" ({loader.dropped} dropped: longer than {config.max_prompt_length} tokens)"
        print(f"{config.dataset_name}: {len(loader):,} {split} problems{dropped}")
    base_model = llms.get_base_model(model) if with_reference else None
    evaluator = get_evaluator(
        config.evaluator or train_loader.default_evaluator,
        prompt=train_loader.prompt.name,
        config=config,
        reference=(base_model, tokenizer),  # --judge_type policy judges with it
    )
    evaluator.check_gold(train_loader.examples, eval_loader.examples)
    sampler = llms.get_sampler(model, config.sampling_dtype)
    return Run(
        model=llms.shard(model),
        base_model=base_model,
        sampler=sampler,
        tokenizer=tokenizer,
        evaluator=evaluator,
        train_loader=train_loader,
        eval_loader=eval_loader,
        timer=StageTimer(model.device),
    )


def is_due(step: int, every: int, last_step: int) -> bool:
    """True at step 0, at every multiple of `every`, and at the last step."""
    return step % every == 0 or step == last_step


def sample(
    config: CompletionConfig,
    run: Run,
    examples: list[dict],
    num_samples: int,
    temperature: float,
    progress: tqdm | None = None,
) -> Rollout:
    """num_samples completions of each example's prompt, as consecutive rows of the Rollout.

    Args:
        progress: a bar that counts the completions.
    """
    with flag_to_lower("max_concurrent_sequences", config.max_concurrent_sequences):
        return generation.generate(
            run.sampler,
            run.tokenizer,
            [example["prompt"] for example in examples],
            num_samples=num_samples,
            max_completion_length=config.max_completion_length,
            temperature=temperature,
            stop_strings=run.train_loader.prompt.stop_strings,
            max_concurrent_sequences=config.max_concurrent_sequences,
            progress=None if progress is None else progress.update,
        )


def reward(evaluator: RewardEvaluator, examples: list[dict], completions: list[str]) -> Rewards:
    """The rewards of N completions.

    Args:
        examples: N, one for each completion. A process may have none; it then does not call its
            evaluator.
    """
    if not completions:
        return Rewards(torch.zeros(0, len(evaluator.reward_names)), [])
    return evaluator.compute_checked_rewards(examples, completions)


def evaluate(config: OutputConfig, run: Run) -> dict[str, float]:
    """Complete and reward every problem of run.eval_loader, and log what comes of it.

    Random numbers are drawn from a seed for evaluations, and training's random state is restored.

    Returns:
        n, accuracies with intervals, with several samples pass@k, rewards, lengths
        (docs/metrics.md).
    """
    start = time.perf_counter()
    num_samples = config.eval_samples
    examples = list(run.eval_loader)
    my_examples = distributed.share(examples)
    bar = write_logs.progress_bar(
        total=len(my_examples) * num_samples, desc="evaluating", unit="completion", leave=False
    )
    with utils.isolated_seed(config.seed), bar:
        rollout = sample(
            config, run, my_examples, num_samples, config.eval_temperature, progress=bar
        )
    my_rewards = reward(run.evaluator, repeat_each(my_examples, num_samples), rollout.texts)
    completions, rewards = gather_completions(rollout, my_rewards)
    repeated_examples = repeat_each(examples, num_samples)
    metrics = evaluation_metrics(
        run.evaluator, repeated_examples, rewards, completions, num_samples
    )
    metrics["time/total"] = time.perf_counter() - start
    records = write_logs.completion_records(run.evaluator, repeated_examples, completions, rewards)
    write_logs.save_evaluation(config, run, metrics, records)
    return metrics


def clip_and_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, max_norm: float, loss: float
) -> dict[str, float]:
    """Clip the accumulated gradient and apply it, unless it or the loss is not finite.

    Returns:
        metrics: the 2-norm of the gradient before it was clipped, and whether the update was
        skipped.
    """
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    norm = distributed.full_tensor(norm).item()
    is_finite = math.isfinite(norm) and math.isfinite(loss)
    if is_finite:
        optimizer.step()
    # Gradients become None, not 0. An update in which every row is skipped then moves no weight,
    # not even by AdamW's momentum.
    optimizer.zero_grad()
    return {"grad_norm": norm, "skipped_updates": int(not is_finite)}
