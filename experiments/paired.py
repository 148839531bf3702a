"""Which of two arms is better, from runs with the same seeds at several learning rates.

An arm's outcome is taken at the learning rate that suits it best. Two arms are compared within each
seed. The variance of the differences over the seeds is pooled over several comparisons, since a few
seeds alone tell little of a variance.

Shapes: S seeds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from logs.statistics import student_quantile, student_tail

SIGNIFICANT = "significant"
UNDECIDED = "undecided"


# --- The outcome of an arm ------------------------------------------------------------------------


def outcome_at_best_rate(outcomes: dict[float, np.ndarray]) -> tuple[float, np.ndarray]:
    """The learning rate that suits an arm best, and the outcome of each seed at this rate.

    It is the top of the parabola through the means of three neighbouring rates, over the logarithm
    of the rate. A top outside these rates is moved to the nearest of them. The outcome of a seed is
    read from the parabola through the seed's own three values. With fewer rates, or where the
    parabola has no top, the best of the rates is taken.

    Args:
        outcomes: {learning rate: (S,) outcomes, in the same order of seeds}.

    Returns:
        the learning rate, and outcomes (S,).
    """
    rates = sorted(outcomes)
    means = [outcomes[rate].mean() for rate in rates]
    best = int(np.argmax(means))  # of equal ones the lowest
    if len(rates) < 3:
        return rates[best], outcomes[rates[best]]
    middle = min(max(best, 1), len(rates) - 2)
    neighbours = rates[middle - 1 : middle + 2]
    positions = np.log(neighbours)
    values = np.stack([outcomes[rate] for rate in neighbours])  # (3, S)
    curvature, slope, _ = np.polyfit(positions, values.mean(1), 2)
    if curvature >= 0:
        return rates[best], outcomes[rates[best]]
    top = np.clip(-slope / (2 * curvature), positions[0], positions[2])
    return float(np.exp(top)), lagrange_weights(positions, top) @ values


def lagrange_weights(positions: np.ndarray, x: float) -> np.ndarray:
    """Weights w with p(x) = sum of w_i p(positions_i) for every polynomial p through the points."""
    weights = np.ones(len(positions))
    for i, position in enumerate(positions):
        for j, other in enumerate(positions):
            if j != i:
                weights[i] *= (x - other) / (position - other)
    return weights


# --- Differences ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """How far apart two arms are."""

    by_seed: np.ndarray  # (S,)
    mean: float
    low: float  # the interval of the mean
    high: float
    p_value: float  # two-sided, of the hypothesis that the mean is 0
    verdict: str


def judge(
    differences: Sequence[np.ndarray],
    confidence: float = 0.95,
    margin: float = 3.0,
    classes: Sequence[str] | None = None,
) -> list[Difference]:
    """The interval and the verdict of each of several comparisons.

    The intervals are Student's, with variances pooled within a class (see pool_variances). A
    difference is significant if its interval does not contain 0, and if it is also significant
    after Benjamini and Hochberg's correction for all these comparisons (1995, Journal of the Royal
    Statistical Society B 57:289). It is equal within `margin` if its interval lies between -margin
    and margin.

    Args:
        differences: for each comparison the difference within each seed (S,), at least two seeds.
        classes: of each comparison; None: they are all of one class.
    """
    if classes is None:
        classes = [""] * len(differences)
    variances = np.zeros(len(differences))
    prior_freedom = np.zeros(len(differences))
    for name in set(classes):
        members = [i for i, class_of_i in enumerate(classes) if class_of_i == name]
        pooled, freedom = pool_variances([differences[i] for i in members])
        variances[members] = pooled
        prior_freedom[members] = freedom
    p_values = []
    intervals = []
    for i, by_seed in enumerate(differences):
        freedom = prior_freedom[i] + len(by_seed) - 1
        error = math.sqrt(variances[i] / len(by_seed))
        mean = float(by_seed.mean())
        half_width = error * student_quantile(freedom, confidence)
        intervals.append((mean, mean - half_width, mean + half_width))
        # Without any variance, a difference of 0 is no evidence, and any other is complete.
        distance = abs(mean) / error if error > 0 else (math.inf if mean else 0.0)
        p_values.append(student_tail(freedom, distance))
    is_rejected = benjamini_hochberg(p_values)

    judged = []
    for i, (mean, low, high) in enumerate(intervals):
        words = []
        if (low > 0 or high < 0) and is_rejected[i]:
            words.append(SIGNIFICANT)
        if -margin < low and high < margin:
            words.append(f"equal within {margin:g} points")
        verdict = ", ".join(words) or UNDECIDED
        judged.append(Difference(differences[i], mean, low, high, p_values[i], verdict))
    return judged


def pool_variances(differences: Sequence[np.ndarray]) -> tuple[list[float], float]:
    """Empirical Bayes estimates of the variances of several comparisons.

    The variance of a comparison is thought of as drawn from a scaled inverse chi-squared
    distribution. Its scale s0^2 and its degrees of freedom d0 are estimated from all variances. The
    estimate (d0 s0^2 + d s^2) / (d0 + d), with d = S - 1, lies between a comparison's own variance
    and the common one (Smyth 2004, Statistical Applications in Genetics and Molecular Biology
    3:3, section 6.2).

    Returns:
        a variance for each comparison, and d0. It is 0 for fewer than three comparisons, which
        keep their own variances, and infinite if the variances differ no more than by chance.
    """
    variances = np.array([np.var(by_seed, ddof=1) for by_seed in differences])
    freedom = np.array([len(by_seed) - 1 for by_seed in differences], dtype=float)
    if len(differences) < 3 or (variances <= 0).any():
        return variances.tolist(), 0.0
    half = torch.tensor(freedom / 2)
    e = np.log(variances) - torch.special.digamma(half).numpy() + np.log(freedom / 2)
    trigammas = torch.special.polygamma(1, half).numpy()
    excess = np.var(e, ddof=1) - trigammas.mean()  # of the spread over that by chance
    if excess <= 0:
        return [float(np.exp(e.mean()))] * len(differences), math.inf
    prior_freedom = 2 * inverse_trigamma(excess)
    digamma = torch.special.digamma(torch.tensor(prior_freedom / 2, dtype=torch.float64)).item()
    prior = np.exp(e.mean() + digamma - np.log(prior_freedom / 2))
    pooled = (prior_freedom * prior + freedom * variances) / (prior_freedom + freedom)
    return pooled.tolist(), prior_freedom


def inverse_trigamma(y: float) -> float:
    """The x > 0 with trigamma(x) = y, by bisection of its logarithm; trigamma falls."""
    low, high = math.log(1e-8), math.log(1e8)
    for _ in range(100):
        middle = (low + high) / 2
        x = torch.tensor(math.exp(middle), dtype=torch.float64)
        if torch.special.polygamma(1, x).item() > y:
            low = middle
        else:
            high = middle
    return math.exp(low)


def benjamini_hochberg(p_values: Sequence[float], rate: float = 0.05) -> list[bool]:
    """Which hypotheses are rejected so that at most `rate` of the rejections are expected false."""
    order = np.argsort(p_values)
    thresholds = rate * np.arange(1, len(order) + 1) / len(order)
    passing = np.flatnonzero(np.asarray(p_values)[order] <= thresholds)
    num_rejected = passing[-1] + 1 if len(passing) else 0
    rejected = set(order[:num_rejected].tolist())
    return [i in rejected for i in range(len(order))]
