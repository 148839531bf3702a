"""Rewards that cannot teach what is right: examples of functions of one's own.

    python main.py --evaluator experiments/controls.py:random_reward --dataset_name arithmetic ...

random_reward   0 or 1 by chance, whatever the completion says
format_only     the rewards of the data set except the one for a right answer
calculation     1 for the format with a calculation in the reasoning, right or wrong

The logs measure accuracy as for other runs, since verdicts come from the data set's own evaluator.
"""

import random
import re

from evaluator import GSM8kEvaluator, strict_format

# An operator or = between two numbers. A hyphen counts between spaces only, since 3-4 is a range.
CALCULATION = re.compile(r"\d\W{0,3}(?:[+*/×÷=]| [-−] |\\times|\\div)\W{0,3}\d")


def random_reward(completions, **columns):
    """No function of the text alone, because a policy could learn such a function."""
    return [float(random.random() < 0.5) for _ in completions]


def format_only(completions, answers, **columns):
    evaluator = GSM8kEvaluator()
    totals = []
    for completion, answer in zip(completions, answers, strict=True):
        rewards, _ = evaluator.reward(completion, answer)  # that for a right answer is the first
        totals.append(sum(rewards[1:]))
    return totals


def calculates(completion: str) -> bool:
    """Whether a calculation stands before the reasoning ends, in the format of either prompt."""
    reasoning = re.split("</reasoning>|</think>", completion)[0]
    return CALCULATION.search(reasoning) is not None


def calculation(completions, **columns):
    return [float(strict_format(text) and calculates(text)) for text in completions]
