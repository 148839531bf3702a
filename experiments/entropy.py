"""How accuracy goes together with the entropy of the policy, and lines through the two.

Cui et al. (https://arxiv.org/abs/2505.22617) fit accuracy = b - a exp(entropy) to their runs. The
line here is accuracy = b - a log2(entropy). It was chosen after looking at the points, and fits
several settings together better; `table.py entropy` shows both.

The accuracy is that of greedy answers on validation. The entropy is the mean over the tokens of the
completions of the five iterations before, in nats, as train_log.jsonl has it. So with several
updates it is the mean over the updates, with beta 0 it leaves out groups whose rewards are equal,
and with dynamic sampling it is that after such groups were replaced.

Shapes: S seeds, E evaluations, P points.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments import outcomes, study_logs

# Arms of `choices` that the line is not fitted to. They are other methods: one has no advantage,
# and the other no policy gradient.
NOT_ON_THE_LINE = ("no_baseline", "expert_iteration")


@dataclass(frozen=True)
class Points:
    """Evaluations after iteration 0: (P,) each."""

    iterations: np.ndarray
    entropies: np.ndarray
    accuracies: np.ndarray

    def correlation_at_equal_iteration(self) -> float:
        """The correlation of log(entropy) and accuracy, each minus its mean at that iteration."""
        _, groups = np.unique(self.iterations, return_inverse=True)
        deviations = []
        for values in (np.log(self.entropies), self.accuracies):
            means = np.bincount(groups, values) / np.bincount(groups)
            deviations.append(values - means[groups])
        return float(np.corrcoef(deviations)[0, 1])


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


def points_of_run(run: Path) -> Points:
    """The points of one run.

    Expert iteration logs the entropy at the samples that it keeps as `entropy`, and an estimate of
    that at all of its samples as `sample_entropy`.
    """
    rows = study_logs.read(run / "train_log.jsonl")
    key = "sample_entropy" if "sample_entropy" in rows[0] else "entropy"
    evaluations = study_logs.read(run / "eval_log.jsonl", ("step", "accuracy"))[1:]
    iterations = np.array([evaluation["step"] for evaluation in evaluations])
    entropies = [study_logs.mean_before(rows, key, iteration) for iteration in iterations]
    accuracies = np.array([evaluation["accuracy"] for evaluation in evaluations])
    return Points(iterations, np.array(entropies), accuracies)


def means_over_seeds(runs: list[Path]) -> Points:
    """The points of a side: means over its runs, which were evaluated at the same iterations."""
    of_seeds = [points_of_run(run) for run in runs]
    entropies = np.mean([points.entropies for points in of_seeds], 0)
    accuracies = np.mean([points.accuracies for points in of_seeds], 0)
    return Points(of_seeds[0].iterations, entropies, accuracies)


def together(sets_of_points: list[Points]) -> Points:
    return Points(
        np.concatenate([points.iterations for points in sets_of_points]),
        np.concatenate([points.entropies for points in sets_of_points]),
        np.concatenate([points.accuracies for points in sets_of_points]),
    )


def runs_of(side: str) -> list[Path]:
    """The runs of a side. An arm of `choices` is taken at the rate nearest to its best one.

    Raises:
        FileNotFoundError: there are none.
    """
    study, _, name = side.partition("/")
    if study != "choices" or "_rate" in name:
        return study_logs.runs_of(side)
    folder = study_logs.STUDIES / study
    return outcomes.runs_at_nearest_rate(folder, outcomes.arm_at_its_best_rate(folder, name))


def sides_on_the_line() -> list[str]:
    """The arms of `choices` that the line goes through, in alphabetical order."""
    names = set()
    for choice in outcomes.finished_choices(study_logs.STUDIES / "choices"):
        names |= {choice.first, choice.second}
    return [f"choices/{name}" for name in sorted(names - set(NOT_ON_THE_LINE))]


def sides_at_other_rates() -> list[str]:
    """The same arms at the rates of the first look at which the line is not fitted."""
    folder = study_logs.STUDIES / "choices"
    sides = []
    for side in sides_on_the_line():
        arm = outcomes.arm_at_its_best_rate(folder, side.removeprefix("choices/"))
        for rate in arm.means:
            if rate != arm.nearest_rate:
                sides.append(f"{side}_rate{outcomes.rate_text(rate)}")
    return sides


def points_of_sides(sides: list[str]) -> Points:
    return together([means_over_seeds(runs_of(side)) for side in sides])


def line_through_the_arms() -> Line:
    """The line in log2(entropy) through the points of `sides_on_the_line`."""
    points = points_of_sides(sides_on_the_line())
    return fit_line(np.log2(points.entropies), points.accuracies)
