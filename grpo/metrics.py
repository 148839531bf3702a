"""The numbers of the logs, from the records of completions."""

import math
import re
import statistics

Z95 = 1.959963984540054  # the 97.5% point of the normal distribution


def mean(values: list[float]) -> float:
    """The mean of the values that are there; NaN if there is none. A missing value is NaN."""
    present = [value for value in values if not math.isnan(value)]
    return statistics.fmean(present) if present else math.nan


# --- Logs -----------------------------------------------------------------------------------------


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
        metrics["accuracy"] = mean([record["correct_strict"] for record in records])
        metrics["accuracy_flexible"] = mean([record["correct_flexible"] for record in records])
        metrics["response_length_correct"] = mean(lengths[True])
        metrics["response_length_incorrect"] = mean(lengths[False])
    if "rewards/distinct_2" in records[0]:
        texts = [record["completion"] for record in records]
        metrics["distinct_2_batch"] = share_of_distinct(texts, 2)
    if group_size > 1:
        rewards = [record["reward"] for record in records]
        starts = range(0, len(rewards), group_size)
        stds = [reward_std(rewards[start : start + group_size]) for start in starts]
        metrics["reward_std"] = statistics.fmean(stds)
        metrics["zero_std_fraction"] = statistics.fmean(std == 0 for std in stds)
    return metrics


def reward_std(rewards: list[float]) -> float:
    """The standard deviation of a group's rewards, over n - 1; exactly 0 if they are all equal."""
    present = [reward for reward in rewards if not math.isnan(reward)]
    return statistics.stdev(present) if len(present) > 1 else 0.0


def evaluation_metrics(records: list[dict], num_samples: int) -> dict[str, float]:
    """What is logged of an evaluation: accuracies with intervals, pass@k, counts, lengths.

    Args:
        records: the num_samples completions of a problem are consecutive.
    """
    metrics = {"n": len(records) // num_samples}
    if "correct_strict" in records[0]:
        is_correct_strict = [record["correct_strict"] for record in records]
        is_correct_flexible = [record["correct_flexible"] for record in records]
        metrics |= accuracies("accuracy", is_correct_strict, num_samples)
        metrics |= accuracies("accuracy_flexible", is_correct_flexible, num_samples)
        pairs = [(record["format"], record["correct_strict"]) for record in records]
        metrics["count/format1_answer1"] = pairs.count((True, True))
        metrics["count/format1_answer0"] = pairs.count((True, False))
        metrics["count/format0_answer0"] = pairs.count((False, False))
    return metrics | completion_metrics(records)


def accuracies(name: str, correct: list[bool], num_samples: int) -> dict[str, float]:
    """The accuracy, its 95% interval and, with several samples of a problem, pass@k.

    correct: the verdicts; num_samples consecutive ones belong to the same problem.
    The interval counts problems rather than samples, which are not independent.
    """
    starts = range(0, len(correct), num_samples)
    num_correct = [sum(correct[start : start + num_samples]) for start in starts]
    num_problems = len(num_correct)
    expected_solved = sum(num_correct) / num_samples  # of the problems, with one sample of each
    low, high = wilson_interval(expected_solved, num_problems)
    metrics = {name: expected_solved / num_problems, f"{name}_low": low, f"{name}_high": high}
    if num_samples > 1:
        pass_name = name.replace("accuracy", "pass")
        for k in range(1, num_samples + 1):
            metrics[f"{pass_name}@{k}"] = pass_at_k(num_correct, num_samples, k)
    return metrics


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


# --- Statistics -----------------------------------------------------------------------------------


def wilson_interval(successes: float, n: int) -> tuple[float, float]:
    """Wilson's 95% score interval (low, high) for a proportion (Wilson 1927, JASA 22:209)."""
    p = successes / n
    denominator = 1 + Z95 * Z95 / n
    centre = (p + Z95 * Z95 / (2 * n)) / denominator
    half_width = Z95 * math.sqrt(p * (1 - p) / n + Z95 * Z95 / (4 * n * n)) / denominator
    return max(0.0, centre - half_width), min(1.0, centre + half_width)


def pass_at_k(num_correct: list[int], n: int, k: int) -> float:
    """The chance that k samples, drawn without replacement, hold a correct one.

    It is the mean over problems of the unbiased estimator 1 - C(n - c, k) / C(n, k) of
    arXiv:2107.03374, where c of a problem's n samples are correct.
    """
    chances = [1 - math.comb(n - c, k) / math.comb(n, k) for c in num_correct]
    return sum(chances) / len(chances)


def share_of_distinct(texts: list[str], n: int) -> float:
    """The share of distinct ones among all runs of n words of the texts; 0 where there is none.

    Called distinct-n in Li et al. 2016 (arXiv:1510.03055).
    """
    runs = []
    for text in texts:
        words = re.findall(r"\w+(?:['’]\w+)*", text.lower())
        runs += [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return len(set(runs)) / max(1, len(runs))
