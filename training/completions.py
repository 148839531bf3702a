"""What all scripts do with completions: sample them, reward them, judge a model by them.

`config` are the settings of the script, `run` is its training.run.Run.
"""

import time
from collections.abc import Callable

import torch

import distributed
import signals
import utils
from config import CompletionConfig, OutputConfig
from evaluator import RewardEvaluator, Rewards
from sampling import generation, vllm
from sampling.rollout import Rollout
from training import write_logs
from training.memory import flag_to_lower
from training.records import evaluation_metrics, make_records, reward_metrics
from training.run import Run
from utils import repeat_each


def sample(
    config: CompletionConfig,
    run: Run,
    examples: list[dict],
    num_samples: int,
    temperature: float,
    between_tokens: Callable[[], None] | None = None,
) -> Rollout:
    """num_samples completions of each example's prompt, as consecutive rows of the Rollout.

    Args:
        between_tokens: called every few tokens.
    """
    bar = distributed.progress_bar(
        total=len(examples) * num_samples, desc="sampling", unit="completion"
    )

    def progress(num_completions: int) -> None:
        bar.update(num_completions)
        if between_tokens:
            between_tokens()

    sampling = vllm if isinstance(run.sampler, vllm.VLLMSampler) else generation
    with bar, flag_to_lower("max_concurrent_sequences", config.max_concurrent_sequences):
        return sampling.generate(
            run.sampler,
            run.tokenizer,
            [example["prompt"] for example in examples],
            num_samples=num_samples,
            max_completion_length=config.max_completion_length,
            temperature=temperature,
            stop_strings=run.train_loader.prompt.stop_strings,
            max_concurrent_sequences=config.max_concurrent_sequences,
            progress=progress,
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


def strict_verdicts(rewards: Rewards) -> list[bool]:
    """Which completions are strictly correct.

    Raises ValueError for an evaluator that does not say so.
    """
    if not all("correct_strict" in detail for detail in rewards.details):
        raise ValueError(
            "the evaluator gives rewards without verdicts, so no completion can be chosen as"
            " correct; use one that says `correct_strict`"
        )
    return [detail["correct_strict"] for detail in rewards.details]


def evaluate(config: OutputConfig, run: Run) -> dict[str, float]:
    """Complete and reward every problem of run.eval_loader, and log what comes of it.

    Random numbers are drawn from a seed for evaluations, and training's random state is restored.
    A signal can stop it between two tokens.

    Returns:
        n, accuracies with intervals, with several samples pass@k, rewards, lengths
        (docs/metrics.md).
    """
    start = time.perf_counter()
    num_samples = config.eval_samples
    my_examples = distributed.share(list(run.eval_loader))
    with utils.isolated_seed(config.seed):
        rollout = sample(
            config,
            run,
            my_examples,
            num_samples,
            config.eval_temperature,
            between_tokens=signals.stop_if_asked,
        )
    my_repeated_examples = repeat_each(my_examples, num_samples)
    rewards = reward(run.evaluator, my_repeated_examples, rollout.texts)
    records = make_records(run.evaluator, my_repeated_examples, rollout, rewards)
    metrics = evaluation_metrics(records, num_samples)
    metrics |= reward_metrics(run.evaluator, records, rewards)
    metrics["time/total"] = time.perf_counter() - start
    write_logs.save_evaluation(config, run, metrics, records)
    return metrics
