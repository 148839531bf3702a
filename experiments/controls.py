"""Rewards that cannot teach, that err, or that can be hacked: the ones of the studies.

    python main.py --evaluator experiments/controls.py:random_reward --dataset_name arithmetic ...

random_reward         0 or 1 by chance, whatever the completion says
format_only           the rewards of the data set except the one for a right answer
noise_20              the reward for a right answer is flipped with a probability of 20%; also
                      noise_10, noise_30 and noise_40
false_positives_20    only wrong answers are rewarded by mistake; also false_positives_40
false_negatives_20    only right answers go without their reward; also false_negatives_40
answer_anywhere       an answer counts as right if its number stands anywhere in the text
bonus_for_steps       0.2 more for each line with an equals sign
bonus_for_length      1 more for every 100 characters

The logs measure accuracy as for other runs, since verdicts come from the data set's own evaluator.
"""

import random
import re

from evaluator import GSM8kEvaluator

REWARD_OF_RIGHT_ANSWER = 2.0


def rewards_of_data_set(completions: list[str], answers: list[str]) -> list[list[float]]:
    """The five rewards of each completion, that for a right answer first."""
    evaluator = GSM8kEvaluator()
    return [evaluator.reward(*pair)[0] for pair in zip(completions, answers, strict=True)]


def random_reward(completions, **columns):
    """No function of the text alone, because a policy could learn such a function."""
    return [float(random.random() < 0.5) for _ in completions]


def format_only(completions, answers, **columns):
    return [sum(rewards[1:]) for rewards in rewards_of_data_set(completions, answers)]


def erring(false_positives: float, false_negatives: float):
    """The rewards of the data set, of which that for a right answer errs at these rates."""

    def erring_reward(completions, answers, **columns):
        totals = []
        for right_answer, *others in rewards_of_data_set(completions, answers):
            is_right = right_answer > 0
            errs = random.random() < (false_negatives if is_right else false_positives)
            totals.append(REWARD_OF_RIGHT_ANSWER * (is_right != errs) + sum(others))
        return totals

    return erring_reward


noise_10 = erring(0.1, 0.1)
noise_20 = erring(0.2, 0.2)
noise_30 = erring(0.3, 0.3)
noise_40 = erring(0.4, 0.4)
false_positives_20 = erring(0.2, 0.0)
false_positives_40 = erring(0.4, 0.0)
false_negatives_20 = erring(0.0, 0.2)
false_negatives_40 = erring(0.0, 0.4)


def answer_anywhere(completions, answers, **columns):
    totals = format_only(completions, answers)
    for i, completion in enumerate(completions):
        is_there = answers[i] in re.findall(r"\d+", completion)
        totals[i] += REWARD_OF_RIGHT_ANSWER * is_there
    return totals


def bonus_for_steps(completions, answers, **columns):
    totals = []
    rewards_of = rewards_of_data_set(completions, answers)
    for completion, rewards in zip(completions, rewards_of, strict=True):
        num_steps = sum("=" in line for line in completion.splitlines())
        totals.append(sum(rewards) + 0.2 * num_steps)
    return totals


def bonus_for_length(completions, answers, **columns):
    rewards_of = rewards_of_data_set(completions, answers)
    return [sum(rewards) + len(completions[i]) / 100 for i, rewards in enumerate(rewards_of)]
