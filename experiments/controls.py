"""main.py with a reward that cannot teach the answer: what of a run's rise is due to the reward?

    python experiments/controls.py --evaluator random ...     a coin per completion, blind to what it says
    python experiments/controls.py --evaluator format ...     the data set's rewards without those for the answer

All other flags are main.py's. The accuracies in the logs are measured as ever.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

import main  # noqa: E402
from evaluator import EVALUATORS, GSM8kEvaluator  # noqa: E402


class RandomEvaluator(GSM8kEvaluator):
    """Reward 0 or 1 by a coin tossed anew each time: were it a function of the text, a policy could learn it."""

    reward_names, reward_weights = ("coin",), (1.0,)

    def reward(self, completion, gold):
        _, details = super().reward(completion, gold)
        return [float(torch.rand(()) < 0.5)], details  # torch's coin: checkpoints keep its state


class FormatEvaluator(GSM8kEvaluator):
    """The rewards for numbers, tags and their order; nothing for a right answer."""

    reward_weights = tuple(
        0.0 if name == "correctness" else 1.0 for name in GSM8kEvaluator.reward_names
    )


EVALUATORS |= {"random": RandomEvaluator, "format": FormatEvaluator}

if __name__ == "__main__":
    sys.exit(main.main())
