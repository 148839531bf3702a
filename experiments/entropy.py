"""How accuracy goes together with the entropy of the policy, and a line through the two.

Cui et al. (https://arxiv.org/abs/2505.22617) fit accuracy = b - a exp(entropy) to their runs. Here
accuracy = b - a log2(entropy) fits better, and `table.py entropy` shows both. The entropy is the
mean over the tokens of the sampled completions, in nats. The accuracy is that of greedy answers on
validation.

The line goes through the runs of `choices` that are rewarded for right answers by GRPO with a
baseline. The other sides are compared with it, and do not change it.

Shapes: S seeds, E evaluations, P points.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments import outcomes, study_logs

NUM_ITERATIONS = 5  # before an evaluation, over which the entropy is averaged
NOT_ON_THE_LINE = ("no_baseline", "expert_iteration")  # arms of `choices`


@dataclass(frozen=True)
class Line:
    """accuracy = intercept + slope * x, with least squares."""

    intercept: float
    slope: float
    r_squared: float  # the share of the variance of the accuracies that the line explains

    def accuracy_at(self, x):
        return self.intercept + self.slope * x


def fit_line(x: np.ndarray, accuracies: np.ndarray) -> Line:
    """The line with the least squared distance from the accuracies: (P,), (P,)."""
    slope, intercept = np.polyfit(x, accuracies, 1)
    squared_distances = (accuracies - (intercept + slope * x)) ** 2
    squared_deviations = (accuracies - accuracies.mean()) ** 2
    r_squared = 1 - squared_distances.sum() / squared_deviations.sum()
    return Line(float(intercept), float(slope), float(r_squared))


def entropies_and_accuracies(run: Path) -> tuple[np.ndarray, np.ndarray]:
    """Entropy and accuracy at each evaluation of a run after iteration 0: (E,), (E,).

    Expert iteration logs the entropy at the samples that it keeps as `entropy`, and that at all of
    its samples as `sample_entropy`.
    """
    rows = study_logs.read(run / "train_log.jsonl")
    key = "sample_entropy" if "sample_entropy" in rows[0] else "entropy"
    entropies = []
    accuracies = []
    for evaluation in study_logs.read(run / "eval_log.jsonl", ("step", "accuracy"))[1:]:
        last = evaluation["step"]
        window = range(last - NUM_ITERATIONS + 1, last + 1)
        entropies.append(np.mean([row[key] for row in rows if row["step"] in window]))
        accuracies.append(evaluation["accuracy"])
    return np.array(entropies), np.array(accuracies)


def means_over_seeds(runs: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    """The means of entropy and accuracy over the runs of a side: (E,), (E,)."""
    of_runs = np.array([entropies_and_accuracies(run) for run in runs])  # (S, 2, E)
    entropies, accuracies = of_runs.mean(0)
    return entropies, accuracies


def runs_of(side: str) -> list[Path]:
    """The runs of a side. Those of `choices` have the learning rate nearest to the best one."""
    study, _, name = side.partition("/")
    if study != "choices":
        return study_logs.runs_of(side)
    folder = study_logs.STUDIES / study
    return outcomes.runs_at_nearest_rate(folder, outcomes.arm_at_its_best_rate(folder, name))


def sides_on_the_line() -> list[str]:
    """The arms of `choices` that the line goes through, in alphabetical order."""
    names = set()
    for choice in outcomes.finished_choices(study_logs.STUDIES / "choices"):
        names |= {choice.first, choice.second}
    return [f"choices/{name}" for name in sorted(names - set(NOT_ON_THE_LINE))]


def points_of(sides: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Entropy and accuracy of all evaluations of some sides, means over their seeds: (P,), (P,)."""
    entropies, accuracies = zip(*(means_over_seeds(runs_of(side)) for side in sides), strict=True)
    return np.concatenate(entropies), np.concatenate(accuracies)


def line_through_the_arms() -> Line:
    """The line in log2(entropy) through all points of `sides_on_the_line`."""
    entropies, accuracies = points_of(sides_on_the_line())
    return fit_line(np.log2(entropies), accuracies)
