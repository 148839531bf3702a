"""Rewards that cannot teach: examples of functions of one's own.

    python main.py --evaluator experiments/controls.py:random_reward --dataset_name arithmetic ...

random_reward   0 or 1 by chance, whatever the completion says
format_only     the rewards of the data set except the one for a right answer

The logs measure accuracy as for other runs, since verdicts come from the data set's own evaluator.
"""

import random

from evaluator import GSM8kEvaluator


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
