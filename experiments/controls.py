"""main.py with rewards of the studies: rewards that cannot teach, that err, or that can be hacked.

    python experiments/controls.py --evaluator NAME ...

random                    0 or 1 by chance, whatever the completion says
format                    the rewards of the data set except the one for a right answer
noise0.2                  the reward for a right answer is flipped with a probability of 0.2;
                          also 0.1, 0.3 and 0.4
false_positives0.2        only wrong answers are rewarded by mistake; also 0.4
false_negatives0.2        only right answers go without their reward; also 0.4
answer_anywhere           an answer counts as right if its number stands anywhere in the text
bonus_for_steps           0.2 more for each line with an equals sign
bonus_for_length          1 more for every 100 characters

All other flags are those of main.py. The logs measure accuracy in the same way as for other runs.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

import main  # noqa: E402
from evaluator import EVALUATORS, GSM8kEvaluator  # noqa: E402

REWARD_OF_RIGHT_ANSWER = 2.0


class RandomEvaluator(GSM8kEvaluator):
    """A random reward, drawn anew for each completion.

    It must not be a function of the text, because a policy could learn such a function.
    """

    reward_names = ("coin",)

    def reward(self, completion, gold):
        _, details = super().reward(completion, gold)
        # From torch's generator, whose state is in checkpoints, so that --resume repeats the run.
        coin = float(torch.rand(()) < 0.5)
        return [coin], details


class FormatEvaluator(GSM8kEvaluator):
    """The rewards for numbers, tags and their order, and none for a right answer."""

    reward_weights = tuple(
        0.0 if name == "correctness" else 1.0 for name in GSM8kEvaluator.reward_names
    )


class NoisyEvaluator(GSM8kEvaluator):
    """The reward for a right answer errs; the other rewards and the logged verdicts do not."""

    false_positives: float  # the probability that a wrong answer has the reward
    false_negatives: float  # the probability that a right answer does not have it

    def reward(self, completion, gold):
        rewards, details = super().reward(completion, gold)
        is_right = rewards[0] > 0
        error = self.false_negatives if is_right else self.false_positives
        errs = bool(torch.rand(()) < error)
        rewards[0] = REWARD_OF_RIGHT_ANSWER * (is_right != errs)
        return rewards, details


class AnswerAnywhereEvaluator(GSM8kEvaluator):
    """An answer counts as right if its number stands anywhere in the completion."""

    def reward(self, completion, gold):
        rewards, details = super().reward(completion, gold)
        rewards[0] = REWARD_OF_RIGHT_ANSWER * (gold.strip() in re.findall(r"\d+", completion))
        return rewards, details


class BonusForStepsEvaluator(GSM8kEvaluator):
    """The rewards of the data set, and a bonus for each line with an equals sign."""

    reward_names = (*GSM8kEvaluator.reward_names, "steps")

    def reward(self, completion, gold):
        rewards, details = super().reward(completion, gold)
        num_steps = sum("=" in line for line in completion.splitlines())
        return [*rewards, 0.2 * num_steps], details


class BonusForLengthEvaluator(GSM8kEvaluator):
    """The rewards of the data set, and a bonus for every character."""

    reward_names = (*GSM8kEvaluator.reward_names, "length")

    def reward(self, completion, gold):
        rewards, details = super().reward(completion, gold)
        return [*rewards, len(completion) / 100], details


def noisy_evaluator(false_positives, false_negatives):
    """The class of an evaluator that errs with these probabilities."""
    errors = {"false_positives": false_positives, "false_negatives": false_negatives}
    return type("NoisyEvaluator", (NoisyEvaluator,), errors)


EVALUATORS |= {
    "random": RandomEvaluator,
    "format": FormatEvaluator,
    "answer_anywhere": AnswerAnywhereEvaluator,
    "bonus_for_steps": BonusForStepsEvaluator,
    "bonus_for_length": BonusForLengthEvaluator,
}
for error in (0.1, 0.2, 0.3, 0.4):
    EVALUATORS[f"noise{error}"] = noisy_evaluator(error, error)
for error in (0.2, 0.4):
    EVALUATORS[f"false_positives{error}"] = noisy_evaluator(error, 0.0)
    EVALUATORS[f"false_negatives{error}"] = noisy_evaluator(0.0, error)

if __name__ == "__main__":
    sys.exit(main.main())
