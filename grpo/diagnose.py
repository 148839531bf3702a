"""What looks wrong in the logs of a run: ten rules, which docs/tuning.md prints as a table.

A run applies them after each evaluation, and plotter.py --diagnose whenever it is asked. The start
and the end of a run are means over a tenth of its iterations, or over five where a tenth is less.
"""

import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from grpo import jsonl

MIN_ITERATIONS = 20  # A rule that compares the start of a run with its end needs as many.


class NotLogged(Exception):
    """The logs lack what a rule needs, or are too short for it."""


class Log(NamedTuple):
    """The rows of a run's train_log.jsonl and eval_log.jsonl. All methods raise NotLogged."""

    train: list[dict]
    evaluations: list[dict]

    def values(self, key: str, at_least: int = 1) -> list[float]:
        """The numbers under a key of the training log."""
        values = [row[key] for row in self.train if row.get(key) is not None]
        if len(values) < at_least:
            raise NotLogged(key)
        return values

    def window(self, key: str) -> int:
        """How many iterations are the start or the end of the run."""
        return max(5, math.ceil(len(self.values(key)) / 10))

    def start(self, key: str) -> float:
        return fmean(self.values(key)[: self.window(key)])

    def end(self, key: str) -> float:
        return fmean(self.values(key)[-self.window(key) :])

    def gain(self, key: str) -> float:
        return self.end(key) - self.start(key)

    def rises(self, key: str, num_errors: float) -> bool:
        """Whether the end is more than so many standard errors above the start.

        The noise of an iteration is estimated from the jumps between neighbours (von Neumann 1941),
        which a trend hardly enlarges: the variance of a jump is twice that of an iteration.
        """
        jumps = pairwise(self.values(key, MIN_ITERATIONS))
        variance = fmean((value - last) ** 2 for last, value in jumps) / 2
        return self.gain(key) > num_errors * math.sqrt(variance * 2 / self.window(key))

    def accuracies(self) -> list[dict]:
        """The evaluations with an accuracy, at least two."""
        rows = [row for row in self.evaluations if "accuracy" in row]
        if len(rows) < 2:
            raise NotLogged("accuracy")
        return rows


def has_no_gradient(log: Log) -> bool:
    norms = [row["grad_norm"] for row in log.train if "grad_norm" in row]
    num_good = sum(norm is not None and norm >= 1e-7 for norm in norms)  # None: it was not finite
    return num_good < 0.5 * len(norms)


def has_equal_rewards(log: Log) -> bool:
    key = "zero_std_fraction"
    return log.end(key) > 0.8 or max(log.values(key)) > 0.9


def gains_only_format(log: Log) -> bool:
    return log.rises("reward", 2) and log.gain("rewards/correctness") < 0.15 * log.gain("reward")


def gains_no_accuracy(log: Log) -> bool:
    first, *_, last = log.accuracies()
    return log.rises("reward", 4) and last["accuracy"] <= first["accuracy_high"]


def becomes_alike(log: Log) -> bool:
    key = "distinct_2_batch"
    return log.rises("reward", 4) and log.end(key) < 0.7 * log.start(key)


def is_past_its_best(log: Log) -> bool:
    best = max(log.accuracies(), key=lambda row: row["accuracy"])
    return log.accuracies()[-1]["accuracy_high"] < best["accuracy_low"]


def has_high_kl(log: Log) -> bool:
    # One iteration can have hundreds of nats in a healthy run, which the median does not see.
    values = log.values("kl_per_token", MIN_ITERATIONS)
    return median(values[-log.window("kl_per_token") :]) > 0.5


class Rule(NamedTuple):
    name: str
    is_broken: Callable[[Log], bool]  # raises NotLogged
    condition: str  # the same in words, with the keys of the logs in backticks
    advice: str


RULES = (
    Rule(
        "no gradient",
        has_no_gradient,
        "`grad_norm` is below 1e-7 or not finite in over half of the iterations",
        "see whether `reward` is missing, or equal in all groups; if `grad_norm` is not"
        " finite, lower `--learning_rate`",
    ),
    Rule(
        "equal rewards",
        has_equal_rewards,
        "`zero_std_fraction` is above 80% at the end, or above 90% in one iteration",
        "use easier problems if `accuracy` is near 0 and harder ones if it is near 1, otherwise"
        " raise `--group_size` or `--temperature`",
    ),
    Rule(
        "truncation",
        lambda log: log.end("truncated_fraction") > 0.25,
        "`truncated_fraction` is above 25% at the end",
        "raise `--max_completion_length`",
    ),
    Rule(
        "flat reward",
        lambda log: not log.rises("reward", 2),
        "`reward` rises by less than 2 standard errors",
        "try twice and half of `--learning_rate`, or show some solutions first (sft.py)",
    ),
    Rule(
        "only format",
        gains_only_format,
        "`reward` rises by 2 standard errors, and less than 15% of the rise is in"
        " `rewards/correctness`",
        "train longer, then use easier problems or show some solutions first (sft.py)",
    ),
    Rule(
        "no accuracy",
        gains_no_accuracy,
        "`reward` rises by 4 standard errors, and the last `accuracy` is not above the first one's"
        " interval",
        "read the completions with the highest rewards, and fix the reward",
    ),
    Rule(
        "stories alike",
        becomes_alike,
        "`reward` rises by 4 standard errors, and `distinct_2_batch` falls below 70% of its start",
        "read the stories, then fix the reward or raise `--beta`",
    ),
    Rule(
        "past its best",
        is_past_its_best,
        "the interval of the last `accuracy` is below that of the best one",
        "take the best checkpoint, then lower `--learning_rate`",
    ),
    Rule(
        "high KL",
        has_high_kl,
        "the median of `kl_per_token` at the end is above 0.5 nats",
        "lower `--learning_rate` or raise `--beta`",
    ),
    Rule(
        "sampler",
        lambda log: log.end("sampling_logp_gap") > 0.1,
        "`sampling_logp_gap` is above 0.1 nats at the end",
        "set `--sampling_dtype float32` or `--importance_cap 2`",
    ),
)


def findings(output_dir: Path) -> list[str]:
    """A line for each rule that a run breaks. Raises ValueError for a damaged log."""
    log = Log(
        train=jsonl.read_log(output_dir / "train_log.jsonl"),
        evaluations=jsonl.read_log(output_dir / "eval_log.jsonl"),
    )
    lines = []
    for rule in RULES:
        try:
            if rule.is_broken(log):
                keys = re.findall("`(.+?)`", rule.condition)
                numbers = ", ".join(in_words(log, key) for key in keys)
                line = f"{rule.name}: {rule.condition} ({numbers}); {rule.advice}"
                lines.append(line.replace("`", ""))
        except NotLogged:
            continue
    return lines


def in_words(log: Log, key: str) -> str:
    """How a metric of training, or the accuracy of evaluations, goes from start to end."""
    if key == "accuracy":
        accuracies = [row[key] for row in log.accuracies()]
        first, *_, last = accuracies
        return f"{key} {first:.1%} -> {last:.1%}, at best {max(accuracies):.1%}"
    if all(row.get(key) is None for row in log.train):
        return f"{key} never finite"
    return f"{key} {log.start(key):.3g} -> {log.end(key):.3g}"
