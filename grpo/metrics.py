"""The numbers of the logs, from the records of completions. docs/tuning.md describes each."""

import math
import statistics

from grpo.statistics import (
    accuracies,
    accuracy_by,
    format_and_answer_counts,
    share_of_distinct,
)


def mean(values: list[float]) -> float:
    """The mean of the values that are there; NaN if there is none. A missing value is NaN."""
    present = [value for value in values if not math.isnan(value)]
    return statistics.fmean(present) if present else math.nan


def completion_metrics(records: list[dict]) -> dict[str, float]:
    """Rewards and lengths, averaged over completions."""
    metrics = {}
    for name in records[0]:
        if name.startswith("rewards/"):
            metrics[name] = mean([record[name] for record in records])
    metrics["reward"] = mean([record["reward"] for record in records])
    metrics["response_length"] = mean([record["length"] for record in records])
    metrics["truncated_fraction"] = mean([not record["finished"] for record in records])
    return metrics


def iteration_metrics(records: list[dict], group_size: int) -> dict[str, float]:
    """What is logged of the completions of one rollout batch."""
    metrics = completion_metrics(records)
    if "correct_strict" in records[0]:
        lengths = {True: [], False: []}
        for record in records:
            lengths[record["correct_strict"]].append(record["length"])
        metrics |= {
            "accuracy": mean([record["correct_strict"] for record in records]),
            "accuracy_flexible": mean([record["correct_flexible"] for record in records]),
            "response_length_correct": mean(lengths[True]),
            "response_length_incorrect": mean(lengths[False]),
        }
    if "rewards/distinct_2" in records[0]:
        texts = [record["completion"] for record in records]
        metrics["distinct_2_batch"] = share_of_distinct(texts, 2)
    stds = []
    for start in range(0, len(records), group_size):
        group = records[start : start + group_size]
        stds.append(reward_std([record["reward"] for record in group]))
    metrics["reward_std"] = statistics.fmean(stds)
    metrics["zero_std_fraction"] = statistics.fmean(std == 0 for std in stds)
    return metrics


def reward_std(rewards: list[float]) -> float:
    """The standard deviation of a group's rewards, over n - 1; exactly 0 if they are all equal."""
    present = [reward for reward in rewards if not math.isnan(reward)]
    return statistics.stdev(present) if len(present) > 1 else 0.0


def evaluation_metrics(records: list[dict], num_samples: int) -> dict[str, float]:
    """What is logged of an evaluation: accuracies with intervals, pass@k, categories, lengths.

    Args:
        records: the num_samples completions of a problem are consecutive.
    """
    metrics = {"n": len(records) // num_samples}
    if "correct_strict" in records[0]:
        is_correct_strict = [record["correct_strict"] for record in records]
        is_correct_flexible = [record["correct_flexible"] for record in records]
        metrics |= accuracies("accuracy", is_correct_strict, num_samples)
        metrics |= accuracies("accuracy_flexible", is_correct_flexible, num_samples)
        metrics |= format_and_answer_counts(records)
        metrics |= accuracy_by("level", records, is_correct_strict)
        metrics |= accuracy_by("subject", records, is_correct_strict)
    return metrics | completion_metrics(records)


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
