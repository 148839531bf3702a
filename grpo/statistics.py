"""The statistics of the logs: intervals, pass@k, McNemar's test, categories, distinct words."""

import math
import re
from collections import defaultdict

Z95 = 1.959963984540054  # the 97.5% point of the normal distribution

# The logs count completions in these groups: {name: (format, correct_strict) of the completions}.
CATEGORIES = {
    "format1_answer1": (True, True),
    "format1_answer0": (True, False),
    "format0_answer0": (False, False),
}


def wilson_interval(successes: float, n: int) -> tuple[float, float]:
    """Wilson's 95% score interval (low, high) for a proportion, or NaN if n is 0.

    Unlike p +- 1.96 standard errors, it is sensible near 0 and 1 (Wilson 1927, JASA 22:209).
    """
    if n == 0:
        return math.nan, math.nan
    p = successes / n
    denominator = 1 + Z95 * Z95 / n
    centre = (p + Z95 * Z95 / (2 * n)) / denominator
    half_width = Z95 * math.sqrt(p * (1 - p) / n + Z95 * Z95 / (4 * n * n)) / denominator
    return max(0.0, centre - half_width), min(1.0, centre + half_width)


def mcnemar(num_fixed: int, num_broken: int) -> float:
    """The exact two-sided p-value of McNemar's test on the pairs whose verdict changed."""
    from scipy.stats import binomtest  # takes a second to import, and training does not need it

    if num_fixed + num_broken == 0:
        return 1.0
    return float(binomtest(num_fixed, num_fixed + num_broken).pvalue)


def pass_at_k(num_correct: list[int], n: int, k: int) -> float:
    """The chance that k samples, drawn without replacement, hold a correct one.

    It is the mean over problems of the unbiased estimator 1 - C(n - c, k) / C(n, k) of
    arXiv:2107.03374, where c of a problem's n samples are correct.
    """
    chances = (1 - math.comb(n - c, k) / math.comb(n, k) for c in num_correct)
    return sum(chances) / len(num_correct)


def accuracies(name: str, correct: list[bool], samples: int) -> dict[str, float]:
    """The accuracy, its 95% interval and, with several samples of a problem, pass@k.

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
    """The accuracy for each value of a column, such as {"accuracy_level/3": 0.5, ...}.

    Examples without the column are left out, so a data set without it gives {}.
    """
    verdicts = defaultdict(list)
    for example, is_correct in zip(examples, correct, strict=True):
        if example.get(column) is not None:
            verdicts[example[column]].append(is_correct)
    return {
        f"accuracy_{column}/{value}": sum(verdicts[value]) / len(verdicts[value])
        for value in sorted(verdicts, key=lambda value: (isinstance(value, str), value))
    }


def share_of_distinct(texts: list[str], n: int) -> float:
    """The share of distinct ones among all runs of n words of the texts; 0 where there is none.

    Called distinct-n in Li et al. 2016 (arXiv:1510.03055).
    """
    runs = []
    for text in texts:
        words = re.findall(r"\w+(?:['’]\w+)*", text.lower())
        runs += [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return len(set(runs)) / max(1, len(runs))
