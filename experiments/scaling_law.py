"""Accuracy against the number of parameters: each size's gain, and a line in logit against log10(parameters), tested.

    python experiments/scaling_law.py experiments/scaling/*/

The line is logit(accuracy) = a + b log10(parameters), by maximum likelihood over the right answers of all runs.
Intervals are percentiles of a bootstrap over seeds and, within a seed, over questions (binomial). G compares the line
with one accuracy for each size (likelihood ratio); if the line held, and runs differed by their questions alone, it
would be chi-squared with sizes - 2 degrees of freedom. Where it is far above that, the line is no law.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from logs.read import group_by, load_runs  # noqa: E402


def fit(x, right, n):
    """(a, b) of logit(p) = a + b x for `right` of `n` each, by Newton's method; half an answer of each kind added."""
    y, weights, coefficients = (right + 0.5) / (n + 1), n + 1, np.zeros(2)
    design = np.stack([np.ones_like(x), x - x.mean()], 1)
    for _ in range(50):
        p = 1 / (1 + np.exp(-design @ coefficients))
        hessian = design.T @ (design * (weights * p * (1 - p))[:, None])
        coefficients = coefficients + np.linalg.solve(hessian, design.T @ (weights * (y - p)))
    return coefficients[0] - coefficients[1] * x.mean(), coefficients[1]


def likelihood_ratio(x, right, n):
    """2 (log-likelihood of an accuracy per x - that of the line)"""
    a, b = fit(x, right, n)

    def log_likelihood(p):
        p = np.clip(p, 1e-12, 1 - 1e-12)
        return (right * np.log(p) + (n - right) * np.log(1 - p)).sum()

    own = np.array([right[x == value].sum() / n[x == value].sum() for value in x])
    return 2 * (log_likelihood(own) - log_likelihood(1 / (1 + np.exp(-a - b * x))))


def main(paths, samples=2000):
    if not paths:
        raise ValueError("name the directories of runs that differ in size")
    runs, rng = group_by(load_runs(paths), ["parameters"]), np.random.default_rng(0)
    x = np.array([np.log10(run.group[0]) for run in runs])
    n = np.array([run.eval[-1]["n"] for run in runs])
    right = np.array([run.eval[-1]["accuracy"] * run.eval[-1]["n"] for run in runs]).round()
    for value in np.unique(x):
        (first, *_), last = [run for run in runs if np.log10(run.group[0]) == value], (right / n)[x == value]
        start = first.eval[0]["accuracy"]
        gain = ", ".join(f"{100 * (end - start):+.1f}" for end in last)
        print(f"{first.label}: strict {100 * start:.1f} % at the start, gain of each run {gain} points")
    slopes = []
    for _ in range(samples):
        drawn = np.concatenate([rng.choice(np.flatnonzero(x == v), (x == v).sum()) for v in np.unique(x)])
        slopes.append(fit(x[drawn], rng.binomial(n[drawn], (right / n)[drawn]), n[drawn])[1])
    low, high = np.percentile(slopes, [2.5, 97.5])
    print(f"logit(accuracy) gains {fit(x, right, n)[1]:.2f} [{low:.2f}, {high:.2f}] per factor 10 in parameters")
    print(f"lack of fit: G = {likelihood_ratio(x, right, n):.0f} on {len(np.unique(x)) - 2} degrees of freedom")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(print(f"error: {error}", file=sys.stderr) or 2)
