"""main.py with a reward that cannot teach the right answer.

A run with such a reward is a control. It shows how far accuracy rises without the reward for right
answers.

    python experiments/controls.py --evaluator random ...
        reward 0 or 1 by chance, whatever the completion says
    python experiments/controls.py --evaluator format ...
        the rewards of the data set except the one for a right answer

All other flags are those of main.py. The logs measure accuracy in the same way as for other runs.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

import main  # noqa: E402
from evaluator import EVALUATORS, GSM8kEvaluator  # noqa: E402


class RandomEvaluator(GSM8kEvaluator):
    """A random reward, drawn anew for each completion.

    It must not be a function of the text, because a policy could learn such a function.
    """

    reward_names = ("coin",)
    reward_weights = (1.0,)

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


EVALUATORS |= {"random": RandomEvaluator, "format": FormatEvaluator}

if __name__ == "__main__":
    sys.exit(main.main())
