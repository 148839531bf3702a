"""Every interval, test and rank statistic of the project, for training, plots and reports alike."""

import itertools
import math
from collections import defaultdict
from statistics import NormalDist

import numpy as np

Z95 = 1.959963984540054  # the 97.5 % point of the normal distribution

# The logs count completions in these groups: {name: (format, correct_strict) of the completions}.
CATEGORIES = {
    "format1_answer1": (True, True),
    "format1_answer0": (True, False),
    "format0_answer0": (False, False),
}


def wilson_interval(successes: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % score interval (low, high) for a proportion, or NaN if n is 0.

    Unlike p +- 1.96 standard errors, it is sensible near 0 and 1 (Wilson 1927, JASA 22:209).
    """
    if n == 0:
        return math.nan, math.nan
    p = successes / n
    denominator = 1 + Z95 * Z95 / n
    centre = (p + Z95 * Z95 / (2 * n)) / denominator
    half_width = Z95 * math.sqrt(p * (1 - p) / n + Z95 * Z95 / (4 * n * n)) / denominator
    return max(0.0, centre - half_width), min(1.0, centre + half_width)


def pass_at_k(num_correct: list[int], n: int, k: int) -> float:
    """Return the chance that k samples, drawn without replacement, hold a correct one.

    It is the mean over problems of the unbiased estimator 1 - C(n - c, k) / C(n, k) of
    arXiv:2107.03374, where c of a problem's n samples are correct.
    """
    chances = (1 - math.comb(n - c, k) / math.comb(n, k) for c in num_correct)
    return sum(chances) / len(num_correct)


def expected_flat_share(num_correct: list[int], n: int, group_size: int) -> float:
    """Return the share of groups of group_size that would be all right or all wrong.

    Of a problem with the chance p of a right answer it is p^G + (1 - p)^G. Here c of a problem's n
    samples are right, and the mean is taken over p ~ Beta(c + 1/2, n - c + 1/2), which is what is
    known of p after these samples (Jeffreys' prior). With c / n in place of p, a problem with
    no right sample would never have one. The prior leaves it a small chance, which makes the
    share too low where many problems are hopeless or trivial and n is small.
    """
    shares = []
    for c in num_correct:
        all_right = all_wrong = 1.0
        for i in range(group_size):  # E[p^G] = (a / (a + b)) ((a + 1) / (a + b + 1)) ...
            all_right *= (c + 0.5 + i) / (n + 1 + i)
            all_wrong *= (n - c + 0.5 + i) / (n + 1 + i)
        shares.append(all_right + all_wrong)
    return sum(shares) / len(shares)


def accuracies(name: str, correct: list[bool], samples: int) -> dict[str, float]:
    """Return the accuracy, its 95 % interval and, with several samples of a problem, pass@k.

    correct: the verdicts; `samples` consecutive ones belong to the same problem.
    The interval counts problems rather than samples, which are not independent.
    """
    num_correct = [sum(correct[i : i + samples]) for i in range(0, len(correct), samples)]
    num_problems = len(num_correct)
    expected_solved = sum(num_correct) / samples  # of the problems, with one sample of each
    low, high = wilson_interval(expected_solved, num_problems)
    metrics = {name: expected_solved / num_problems, f"{name}_low": low, f"{name}_high": high}
    if samples > 1:
        pass_name = name.replace("accuracy", "pass")
        for k in range(1, samples + 1):
            metrics[f"{pass_name}@{k}"] = pass_at_k(num_correct, samples, k)
    return metrics


def format_and_answer_counts(details: list[dict]) -> dict[str, int]:
    """Count the completions with the format and a correct answer, the format alone, or neither."""
    pairs = [(detail["format"], detail["correct_strict"]) for detail in details]
    return {f"count/{name}": pairs.count(pair) for name, pair in CATEGORIES.items()}


def accuracy_by(column: str, examples: list[dict], correct: list[bool]) -> dict[str, float]:
    """Return the accuracy for each value of a column, such as {"accuracy_level/3": 0.5, ...}.

    Examples without the column are left out, so a data set without it gives {}.
    """
    verdicts = defaultdict(list)
    for example, is_correct in zip(examples, correct, strict=True):
        if example.get(column) is not None:
            verdicts[example[column]].append(is_correct)
    return {
        f"accuracy_{column}/{value}": sum(verdicts[value]) / len(verdicts[value])
        for value in sorted(verdicts)
    }


def mcnemar(num_fixed: int, num_broken: int) -> float:
    """Return the exact two-sided p-value of McNemar's test on the pairs that changed.

    It is min(1, 2 P(X <= min(num_fixed, num_broken))), where X ~ Binomial(n, 1/2) and n is
    num_fixed + num_broken.
    """
    n = num_fixed + num_broken
    tail = sum(math.comb(n, i) for i in range(min(num_fixed, num_broken) + 1))  # an exact integer
    return min(1.0, 2 * tail / 2**n)


def student_quantile(degrees_of_freedom: float, confidence: float = 0.95) -> float:
    """Return the t with P(|T| < t) = confidence for Student's distribution, or a normal one (inf).

    With t = sqrt(n) tan(angle), the density of the angle is proportional to cos(angle)^(n - 1),
    where n is the number of degrees of freedom.
    """
    if degrees_of_freedom > 1e6:
        return NormalDist().inv_cdf((1 + confidence) / 2)
    angles, integral = _student_integral(degrees_of_freedom)
    angle = np.interp(confidence * integral[-1], integral, angles)
    return math.sqrt(degrees_of_freedom) * math.tan(angle)


def student_tail(degrees_of_freedom: float, t: float) -> float:
    """Return P(|T| > t) for Student's distribution, or a normal one (inf)."""
    if degrees_of_freedom > 1e6:
        return math.erfc(t / math.sqrt(2))
    angles, integral = _student_integral(degrees_of_freedom)
    angle = math.atan(t / math.sqrt(degrees_of_freedom))
    return float(1 - np.interp(angle, angles, integral) / integral[-1])


def _student_integral(degrees_of_freedom: float):
    """Return angles from 0 to 90 degrees, and the integral of the angle's density from 0."""
    angles = np.linspace(0, math.pi / 2, 100_001)
    density = np.cos(angles) ** (degrees_of_freedom - 1)
    integral = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return angles, integral


def ranks(values):
    """Return the rank of each value, from 1 to N; equal values share the mean of their ranks."""
    _, index_of_value, counts = np.unique(values, return_inverse=True, return_counts=True)
    mean_ranks = np.cumsum(counts) - (counts - 1) / 2  # of each distinct value
    return mean_ranks[index_of_value].tolist()


def correlation(x, y):
    """Return Pearson's correlation; NaN if x or y is constant or has fewer than two values."""
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    return np.corrcoef(x, y)[0, 1].item()


def auc(better, worse):
    """Return (AUC, low, high): P(a better item scores higher than a worse one), ties counting half.

    better, worse: the scores of the two groups. All three results are NaN if a group is empty.

    The 95 % interval is method 5 of Newcombe (2006, Statistics in Medicine 25:559). Its ends are
    the theta with |theta - AUC| = z s(theta). There s is Hanley and McNeil's standard error, with
    the sizes of both groups replaced by their mean. The interval stays sensible if the AUC is 1. It
    assumes that all scores are independent. Stories that continue the same opening line (one
    prompt) are not quite independent.
    """
    num_better = len(better)
    num_worse = len(worse)
    if num_better == 0 or num_worse == 0:
        return math.nan, math.nan, math.nan
    # A pair counts 1 if the better item scores higher, 1/2 if the scores are equal, else 0.
    area = (np.sign(np.subtract.outer(better, worse)) + 1).mean().item() / 2

    def excess(theta):
        """|theta - area| - z s(theta), which is negative inside the interval."""
        # The variance is (theta (1 - theta) + (mean_size - 1) (Q1 + Q2 - 2 theta^2)) over the
        # product of the sizes, where Q1 = theta / (2 - theta) and Q2 = 2 theta^2 / (1 + theta).
        # Here theta (1 - theta) is factored out of the sum. The other factor is called spread.
        mean_size = (num_better + num_worse) / 2
        spread = 1 + (mean_size - 1) * ((1 - theta) / (2 - theta) + theta / (1 + theta))
        variance = theta * (1 - theta) * spread / (num_better * num_worse)
        return abs(theta - area) - Z95 * math.sqrt(variance)

    def interval_end(inside, outside):
        """Bisect between a theta inside the interval and one at or beyond its end."""
        for _ in range(60):
            middle = (inside + outside) / 2
            if excess(middle) > 0:
                outside = middle
            else:
                inside = middle
        return inside

    return area, interval_end(area, 0.0), interval_end(area, 1.0)


def spread_and_ties(scores, group_size):
    """Return the mean standard deviation (over n - 1) within groups, and the share of tied pairs.

    scores: `group_size` consecutive ones are a group. NaN scores are left out, and so are groups
    with fewer than two scores that are not NaN. Both results are NaN if no group remains.
    """
    stds = []
    ties = []
    for start in range(0, len(scores), group_size):
        group = [score for score in scores[start : start + group_size] if not math.isnan(score)]
        if len(group) > 1:
            stds.append(np.std(group, ddof=1).item())
            ties += [first == second for first, second in itertools.combinations(group, 2)]
    if not stds:
        return math.nan, math.nan
    return sum(stds) / len(stds), sum(ties) / len(ties)
