"""What looks wrong in the logs of a run: rules, which docs/tuning.md prints as a table.

A run applies them after each evaluation, and plotter.py --diagnose whenever it is asked. The start
and the end of a run are means over a tenth of its iterations, or over five where a tenth is less.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from grpo import jsonl

MIN_ITERATIONS = 20  # A rule that compares the start of a run with its end needs as many.


class Log(NamedTuple):
    """A run's train_log.jsonl and eval_log.jsonl. All methods raise KeyError for what they lack."""

    train: pd.DataFrame
    evaluations: pd.DataFrame

    def values(self, key: str, at_least: int = 1) -> pd.Series:
        """A metric of training where it is a number."""
        values = self.train[key].dropna()
        if len(values) < at_least:
            raise KeyError(key)
        return values

    def first(self, key: str) -> pd.Series:
        values = self.values(key)
        return values[: max(5, math.ceil(len(values) / 10))]

    def last(self, key: str, at_least: int = 1) -> pd.Series:
        return self.values(key, at_least)[-len(self.first(key)) :]

    def start(self, key: str) -> float:
        return self.first(key).mean()

    def end(self, key: str) -> float:
        return self.last(key).mean()

    def gain(self, key: str) -> float:
        return self.end(key) - self.start(key)

    def rises(self, key: str, num_errors: float) -> bool:
        """Whether the end is more than so many standard errors above the start.

        The noise of an iteration is estimated from the jumps between neighbours (von Neumann 1941),
        which a trend hardly enlarges: the variance of a jump is twice that of an iteration.
        """
        jumps = self.values(key, MIN_ITERATIONS).diff()
        standard_error = ((jumps**2).mean() / len(self.first(key))) ** 0.5
        return self.gain(key) > num_errors * standard_error

    def accuracy(self, end: str = "") -> pd.Series:
        """The accuracy of each evaluation, or the "_low" or "_high" end of its interval."""
        values = self.evaluations["accuracy" + end].dropna()
        if len(values) < 2:
            raise KeyError("accuracy")
        return values


class Rule(NamedTuple):
    name: str
    is_broken: Callable[[Log], bool]  # raises KeyError if the logs lack what it needs
    condition: str  # the same in words, with the keys of the logs in backticks
    advice: str


RULES = (
    Rule(
        "no gradient",
        lambda log: (~(log.train["grad_norm"] >= 1e-7)).mean() > 0.5,  # null: it was not finite
        "`grad_norm` is below 1e-7 or not finite in over half of the iterations",
        "see whether `reward` is missing, or equal in all groups; if `grad_norm` is not"
        " finite, lower `--learning_rate`",
    ),
    Rule(
        "equal rewards",
        lambda log: (
            log.end("zero_std_fraction") > 0.8 or log.train["zero_std_fraction"].max() > 0.9
        ),
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
        lambda log: (
            log.rises("reward", 2) and log.gain("rewards/correctness") < 0.15 * log.gain("reward")
        ),
        "`reward` rises by 2 standard errors, and less than 15% of the rise is in"
        " `rewards/correctness`",
        "train longer, then use easier problems or show some solutions first (sft.py)",
    ),
    Rule(
        "no accuracy",
        lambda log: (
            log.rises("reward", 4) and log.accuracy().iloc[-1] <= log.accuracy("_high").iloc[0]
        ),
        "`reward` rises by 4 standard errors, and the last `accuracy` is not above the first one's"
        " interval",
        "read the completions with the highest rewards, and fix the reward",
    ),
    Rule(
        "no story",
        lambda log: log.end("rewards/is_story") == 0,
        "`rewards/is_story` is 0 at the end",
        "no text reaches the judge: read the completions",
    ),
    Rule(
        "stories alike",
        lambda log: (
            log.rises("reward", 4)
            and log.end("distinct_2_batch") < 0.7 * log.start("distinct_2_batch")
        ),
        "`reward` rises by 4 standard errors, and `distinct_2_batch` falls below 70% of its start",
        "read the stories, then fix the reward or raise `--beta`",
    ),
    Rule(
        "past its best",
        lambda log: log.accuracy("_high").iloc[-1] < log.accuracy("_low")[log.accuracy().idxmax()],
        "the interval of the last `accuracy` is below that of the best one",
        "take the best checkpoint, then lower `--learning_rate`",
    ),
    Rule(
        "high KL",
        # One iteration can have hundreds of nats in a healthy run, which the median does not see.
        lambda log: log.last("kl_per_token", MIN_ITERATIONS).median() > 0.5,
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
    names = ("train_log.jsonl", "eval_log.jsonl")
    tables = [pd.DataFrame(jsonl.read_log(output_dir / name)) for name in names]
    log = Log(*[table.apply(pd.to_numeric, errors="coerce") for table in tables])
    lines = []
    for rule in RULES:
        try:
            if rule.is_broken(log):
                keys = re.findall("`(.+?)`", rule.condition)
                numbers = ", ".join(in_words(log, key) for key in keys)
                line = f"{rule.name}: {rule.condition} ({numbers}); {rule.advice}"
                lines.append(line.replace("`", ""))
        except KeyError:
            continue
    return lines


def in_words(log: Log, key: str) -> str:
    """How a metric of training, or the accuracy of evaluations, goes from start to end."""
    if key == "accuracy":
        values = log.accuracy()
        return f"{key} {values.iloc[0]:.1%} -> {values.iloc[-1]:.1%}, at best {values.max():.1%}"
    if log.train[key].isna().all():
        return f"{key} never finite"
    return f"{key} {log.start(key):.3g} -> {log.end(key):.3g}"
