"""The table of records: a row for each completion, from which logs and transcripts are made.

Shapes: N completions of all processes.
"""

import statistics
from collections import Counter, defaultdict
from typing import NotRequired, TypedDict

import torch
from torch import Tensor

import distributed
from evaluator import VERDICTS, RewardError, RewardEvaluator, Rewards
from logs.statistics import accuracies, accuracy_by, format_and_answer_counts
from sampling.rollout import Rollout

# Columns of a data set that a record keeps, where its examples have them.
KEPT_COLUMNS = ("level", "subject")


class Record(TypedDict):
    """A completion, as rollouts/ and eval/ keep it.

    Beside these columns it has `rewards/NAME` for each reward, and whatever else the evaluator
    says of the completion (evaluator.Rewards.details). A reward that is missing is NaN.
    """

    id: str  # of the example: data set/split/index
    prompt: str  # as the model got it
    completion: str
    gold: str  # the answer
    level: NotRequired[int | str]
    subject: NotRequired[str]
    parsed: NotRequired[str | None]  # the answer that was read in the completion
    format: NotRequired[bool]  # whether the completion has the prompt's format
    correct_strict: NotRequired[bool]  # whether it has the format and the right answer in it
    correct_flexible: NotRequired[bool]  # whether it has the right answer, wherever that stands
    reward: float  # the weighted sum of its rewards
    length: int  # in tokens, with the one that ends the completion
    finished: bool  # False if it was cut at --max_completion_length
    advantage: NotRequired[float]  # in training; NaN without a reward
    tokens: NotRequired[dict]  # training/token_changes.py describes it


# The names that a run itself gives to columns of its records and to metrics in its logs.
COLUMNS = Record.__annotations__.keys() - {"parsed", *VERDICTS}
METRICS = set(
    "step epoch n elapsed total_tokens sampled_tokens sampled_prompts reward reward_std"
    " zero_std_fraction zero_std_fraction_trained accuracy accuracy_low accuracy_high"
    " accuracy_flexible accuracy_flexible_low accuracy_flexible_high response_length"
    " response_length_correct response_length_incorrect truncated_fraction loss entropy kl"
    " kl_per_token ratio_mean clip_fraction clip_fraction_low clip_fraction_high"
    " sampling_logp_gap learning_rate grad_norm skipped_updates".split()
)


def check_names(evaluator: RewardEvaluator, rewards: Rewards) -> None:
    """Raise RewardError where the evaluator would overwrite something that a run writes itself."""
    names = COLUMNS & set().union(*rewards.details)
    names |= METRICS & (rewards.counts.keys() | rewards.means.keys())
    if names:
        raise RewardError(
            f"{type(evaluator).__name__}: a run itself writes {', '.join(sorted(names))}; choose"
            " other names in details, counts and means"
        )


def make_records(
    evaluator: RewardEvaluator, examples: list[dict], rollout: Rollout, rewards: Rewards
) -> list[Record]:
    """All: the records of the completions that all processes have sampled.

    Args:
        examples: one for each completion of this process.
        rollout, rewards: of this process.
    """
    check_names(evaluator, rewards)
    per_function = rewards.per_function.tolist()
    totals = evaluator.total(rewards).tolist()
    lengths = rollout.lengths.tolist()
    finished = rollout.finished.tolist()
    records = []
    for i, example in enumerate(examples):
        record = {
            "id": example["id"],
            "prompt": example["prompt"],
            "completion": rollout.texts[i],
            "gold": example["answer"],
        }
        record |= {name: example[name] for name in KEPT_COLUMNS if name in example}
        record |= rewards.details[i]
        for name, value in zip(evaluator.reward_names, per_function[i], strict=True):
            record[f"rewards/{name}"] = value
        record |= {"reward": totals[i], "length": lengths[i], "finished": finished[i]}
        records.append(record)
    return distributed.gather(records)


def column(records: list[Record], name: str) -> Tensor:
    """(N,) float32: a column of numbers or truth values."""
    return torch.tensor([record[name] for record in records], dtype=torch.float32)


def have_verdicts(records: list[Record]) -> bool:
    """Whether the evaluator says which completions are correct."""
    return "correct_strict" in records[0]


def reward_metrics(
    evaluator: RewardEvaluator, records: list[Record], rewards: Rewards
) -> dict[str, float]:
    """All: the mean of each reward over the completions that have it, and what rewards count.

    Args:
        rewards: of this process.
    """
    metrics = {}
    for name in evaluator.reward_names:
        metrics[f"rewards/{name}"] = column(records, f"rewards/{name}").nanmean().item()
    counts = Counter()
    for process_counts in distributed.gather([rewards.counts]):
        counts.update(process_counts)
    means = defaultdict(list)
    for process_means in distributed.gather([rewards.means]):
        for name, value in process_means.items():
            means[name].append(value)
    # The mean over processes is exact where all have equally many completions.
    return metrics | counts | {name: statistics.mean(values) for name, values in means.items()}


def rollout_metrics(records: list[Record]) -> dict[str, float]:
    """Accuracies, lengths and the share of cut completions of one rollout batch."""
    lengths = column(records, "length")
    metrics = {}
    if have_verdicts(records):
        is_correct = column(records, "correct_strict").bool()
        num_correct_flexible = sum(record["correct_flexible"] for record in records)
        metrics |= {
            "accuracy": is_correct.float().mean().item(),
            "accuracy_flexible": num_correct_flexible / len(records),
            "response_length_correct": lengths[is_correct].mean().item(),  # NaN if none is correct
            "response_length_incorrect": lengths[~is_correct].mean().item(),
        }
    metrics["response_length"] = lengths.mean().item()
    metrics["truncated_fraction"] = (1 - column(records, "finished")).mean().item()
    return metrics


def evaluation_metrics(records: list[Record], num_samples: int) -> dict[str, float]:
    """Accuracies with intervals, categories, accuracies by level or subject, reward and length.

    Args:
        records: the num_samples completions of a problem are consecutive.
    """
    metrics = {"n": len(records) // num_samples}
    if have_verdicts(records):
        is_correct_strict = [record["correct_strict"] for record in records]
        is_correct_flexible = [record["correct_flexible"] for record in records]
        metrics |= accuracies("accuracy", is_correct_strict, num_samples)
        metrics |= accuracies("accuracy_flexible", is_correct_flexible, num_samples)
        metrics |= format_and_answer_counts(records)
        for name in KEPT_COLUMNS:
            metrics |= accuracy_by(name, records, is_correct_strict)
    metrics["reward"] = column(records, "reward").nanmean().item()
    metrics["response_length"] = column(records, "length").mean().item()
    metrics["truncated_fraction"] = (1 - column(records, "finished")).mean().item()
    return metrics
