"""Rewards to compare a reward with: two that cannot teach right answers, and one that errs.

    python main.py --evaluator experiments/controls.py:format_only ...

They are for data sets whose answers are numbers, such as gsm8k and arithmetic.
"""

import torch

from evaluator import GSM8kEvaluator

ERROR_RATE = 0.2  # how often `noisy` errs about an answer
RIGHT_ANSWER = 2.0  # the reward for a right answer

evaluator = GSM8kEvaluator()


def random(completions, answers, **columns):
    """0 or 1 by chance. A function of the text would not do, because a policy could learn it."""
    # From torch's generator, whose state is in checkpoints, so that --resume repeats the run.
    return torch.randint(2, (len(completions),))


def format_only(completions, answers, **columns):
    """The rewards of gsm8k except the one for a right answer."""
    totals = []
    for completion, answer in zip(completions, answers, strict=True):
        (_correctness, *format_rewards), _ = evaluator.reward(completion, answer)
        totals.append(sum(format_rewards))
    return totals


def noisy(completions, answers, **columns):
    """The rewards of gsm8k, but the one for a right answer is flipped by chance."""
    totals = []
    for completion, answer in zip(completions, answers, strict=True):
        (correctness, *format_rewards), _ = evaluator.reward(completion, answer)
        errs = bool(torch.rand(()) < ERROR_RATE)
        if errs:
            correctness = RIGHT_ANSWER - correctness
        totals.append(correctness + sum(format_rewards))
    return totals
