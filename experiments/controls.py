"""Rewards that cannot teach, or that err: examples of functions of one's own.

    python main.py --evaluator experiments/controls.py:random_reward --dataset_name arithmetic ...

random_reward   0 or 1 by chance, whatever the completion says
format_only     the rewards of the data set except the one for a right answer
noise_20        the reward for a right answer is flipped with a probability of 20%; also noise_10,
                noise_30 and noise_40

The logs measure accuracy as for other runs, since verdicts come from the data set's own evaluator.
"""

import random

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


def noisy(error_rate: float):
    def noisy_reward(completions, answers, **columns):
        totals = []
        for right_answer, *other_rewards in rewards_of_data_set(completions, answers):
            is_rewarded = right_answer > 0
            if random.random() < error_rate:
                is_rewarded = not is_rewarded
            totals.append(REWARD_OF_RIGHT_ANSWER * is_rewarded + sum(other_rewards))
        return totals

    return noisy_reward


noise_10 = noisy(0.1)
noise_20 = noisy(0.2)
noise_30 = noisy(0.3)
noise_40 = noisy(0.4)
