"""Every interval, test and rank statistic of the project: training, plots and reports import them from here."""

import itertools
import math
from collections import defaultdict

import numpy as np

Z95 = 1.959963984540054  # the normal distribution's 97.5 % point


def wilson_interval(successes: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % score interval for a proportion; unlike p +- 1.96 s it holds near 0 and 1."""
    if n == 0:
        return math.nan, math.nan
    p, denominator = successes / n, 1 + Z95 * Z95 / n
    centre = (p + Z95 * Z95 / (2 * n)) / denominator
    half = Z95 * math.sqrt(p * (1 - p) / n + Z95 * Z95 / (4 * n * n)) / denominator
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at_k(correct: list[int], n: int, k: int) -> float:
    """Mean over problems of the chance that k of its n samples, drawn without repeats, hold a correct one.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) of arXiv:2107.03374; correct: c of each problem.
    """
    return sum(1 - math.comb(n - c, k) / math.comb(n, k) for c in correct) / len(correct)


def accuracies(name: str, correct: list[bool], samples: int) -> dict[str, float]:
    """Share right with its interval over the problems, each so many consecutive samples; for several pass@k as well."""
    counts = [sum(correct[i : i + samples]) for i in range(0, len(correct), samples)]
    n, solved = len(counts), sum(counts) / samples
    low, high = wilson_interval(solved, n)
    pass_at = {k: pass_at_k(counts, samples, k) for k in range(1, samples + 1) if samples > 1}
    passes = {f"{name.replace('accuracy', 'pass')}@{k}": share for k, share in pass_at.items()}
    return {name: solved / n, f"{name}_low": low, f"{name}_high": high} | passes


CATEGORIES = {  # name in eval_log.jsonl: (format, correct_strict) of its rows
    "format1_answer1": (True, True),
    "format1_answer0": (True, False),
    "format0_answer0": (False, False),
}


def format_and_answer_counts(details: list[dict]) -> dict[str, int]:
    """How many completions have the required form and the right answer in it, the form alone, or neither."""
    pairs = [(detail["format"], detail["correct_strict"]) for detail in details]
    return {f"count/{name}": pairs.count(pair) for name, pair in CATEGORIES.items()}


def accuracy_by(column: str, examples: list[dict], correct: list[bool]) -> dict[str, float]:
    """{"accuracy_level/3": share correct, ...} over the values of a column; nothing where the data have none."""
    groups = defaultdict(list)
    for example, right in zip(examples, correct, strict=True):
        if example.get(column) is not None:
            groups[example[column]].append(right)
    return {
        f"accuracy_{column}/{value}": sum(group) / len(group)
        for value, group in sorted(groups.items())
    }


def mcnemar(fixed: int, broken: int) -> float:
    """Exact two-sided McNemar p-value: min(1, 2 P(X <= min(fixed, broken))) with X ~ Binomial(fixed + broken, 1/2)."""
    n = fixed + broken
    tail = sum(math.comb(n, i) for i in range(min(fixed, broken) + 1))  # whole numbers: exact
    return min(1.0, 2 * tail / 2**n)


def ranks(values):
    """1 to N, equal values sharing the mean of theirs."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place].tolist()


def correlation(x, y):
    """Pearson's; NaN where either is constant or has fewer than two values."""
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    return np.corrcoef(x, y)[0, 1].item()


def auc(better, worse):
    """P(a better one scores higher than a worse one), ties counting half: (AUC, low, high).

    The 95 % interval is method 5 of Newcombe (2006, Statistics in Medicine 25:559): the theta with |theta - AUC| =
    z s(theta), s being Hanley and McNeil's with their group sizes replaced by the mean of both. It stays sensible at 1.
    It takes all scores as independent, as those of one opening line are not quite.
    """
    m, n = len(better), len(worse)
    if not m or not n:
        return math.nan, math.nan, math.nan
    area = (np.sign(np.subtract.outer(better, worse)) + 1).mean().item() / 2

    def distance(theta):  # |theta - area| - z s(theta), which rises away from the area
        spread = 1 + ((m + n) / 2 - 1) * ((1 - theta) / (2 - theta) + theta / (1 + theta))
        return abs(theta - area) - Z95 * math.sqrt(theta * (1 - theta) * spread / (m * n))

    def bound(inside, outside):
        for _ in range(60):
            middle = (inside + outside) / 2
            inside, outside = (inside, middle) if distance(middle) > 0 else (middle, outside)
        return inside

    return area, bound(area, 0.0), bound(area, 1.0)


def spread_and_ties(scores, group_size):
    """Mean std (over n - 1) within groups, and the share of equal pairs among the pairs within groups."""
    stds, ties = [], []
    for start in range(0, len(scores), group_size):
        group = [s for s in scores[start : start + group_size] if not math.isnan(s)]
        if len(group) > 1:
            stds.append(np.std(group, ddof=1).item())
            ties += [a == b for a, b in itertools.combinations(group, 2)]
    return (sum(stds) / len(stds), sum(ties) / len(ties)) if stds else (math.nan, math.nan)
