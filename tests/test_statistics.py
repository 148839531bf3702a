"""Every statistic of the project, worked by hand and against scipy."""

import math
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from scipy import stats

from logs.statistics import (
    auc,
    correlation,
    mcnemar,
    pass_at_k,
    ranks,
    spread_and_ties,
    wilson_interval,
)


def test_wilson_interval_by_hand():
    """50 of 100: centre 0.5, half-width z sqrt(0.0025 + z^2/40000) / (1 + z^2/100)."""
    assert wilson_interval(50, 100) == pytest.approx((0.4038315, 0.5961685), abs=1e-6)
    assert wilson_interval(0, 10)[0] == 0 and wilson_interval(10, 10)[1] == pytest.approx(1)
    assert all(map(math.isnan, wilson_interval(0, 0)))


@pytest.mark.parametrize("n", [1, 7, 500, 1319])
def test_wilson_interval_agrees_with_scipy(n):
    for successes in {0, 1, n // 3, n - 1, n}:
        expected = stats.binomtest(successes, n).proportion_ci(0.95, method="wilson")
        assert wilson_interval(successes, n) == pytest.approx(
            (expected.low, expected.high), abs=1e-9
        )


def test_pass_at_k_in_closed_form():
    """2 of 4 right: 1 - C(2, k) / C(4, k) = 1/2, 5/6, 1, 1."""
    assert [pass_at_k([2], 4, k) for k in (1, 2, 3, 4)] == pytest.approx([1 / 2, 5 / 6, 1, 1])
    assert pass_at_k([0, 4, 2], 4, 2) == pytest.approx((0 + 1 + 5 / 6) / 3)


@pytest.mark.parametrize(
    "fixed, broken, p",
    [
        (0, 0, 1),
        (1, 0, 1),
        (3, 3, 1),
        (5, 0, 2 / 32),
        (10, 2, 2 * (1 + 12 + 66) / 4096),
        (2, 10, 2 * 79 / 4096),
    ],
)
def test_mcnemar_by_hand(fixed, broken, p):
    assert mcnemar(fixed, broken) == p


def test_mcnemar_equals_scipys_binomial_test():
    """Relative 1e-9; scipy's own binomial tail is good to about 1e-12."""
    pairs = [(a, b) for a in range(12) for b in range(12) if a + b]
    for fixed, broken in [*pairs, (700, 600), (1500, 1411), (40, 700)]:
        expected = stats.binomtest(min(fixed, broken), fixed + broken, 0.5).pvalue
        assert mcnemar(fixed, broken) == pytest.approx(expected, rel=1e-9), (fixed, broken)
    assert mcnemar(4000, 0) == 0.0  # too small for a float


def test_ranks_correlation_and_auc_against_scipy():
    generator = np.random.default_rng(0)
    x = generator.integers(0, 6, 40).tolist()  # many ties
    y = [a + generator.integers(0, 4).item() for a in x]
    assert ranks(x) == stats.rankdata(x).tolist() and ranks([]) == []
    assert correlation(x, y) == pytest.approx(stats.pearsonr(x, y)[0])
    assert correlation(ranks(x), ranks(y)) == pytest.approx(stats.spearmanr(x, y)[0])
    area, low, high = auc(y, x)
    assert (
        area == pytest.approx(stats.mannwhitneyu(y, x).statistic / 1600)
        and 0.5 < low < area < high < 1
    )


@pytest.mark.parametrize("x", [[], [1.0], [0.1, 0.1, 0.1]])
def test_no_correlation_with_a_constant(x):
    """The mean of three 0.1 is not 0.1 in floats."""
    assert math.isnan(correlation(x, [1.0, 2.0, 4.0][: len(x)])) and math.isnan(
        correlation([1.0, 2.0, 4.0][: len(x)], x)
    )


def test_auc_interval_by_hand():
    """At 0.5 of 100 and 100, s^2 = 0.25 (1 + 99 * 2 / 3) / 10^4; at 1 the lower bound solves 1 - t = z s(t)."""
    area, low, high = auc([1.0] * 100, [1.0] * 100)
    half = 1.96 * math.sqrt(0.25 * 67) / 100
    assert area == 0.5 and high - area == pytest.approx(area - low) == pytest.approx(half, rel=0.02)
    area, low, high = auc([2.0] * 20, [1.0] * 20)
    s = math.sqrt(low * (1 - low) * (1 + 19 * ((1 - low) / (2 - low) + low / (1 + low))) / 400)
    assert (
        area == high == 1.0
        and 1 - low == pytest.approx(1.959964 * s, abs=1e-5)
        and 0.8 < low < 0.95
    )
    assert all(map(math.isnan, auc([], [1.0])))


def test_spread_and_ties_by_hand():
    """Groups (1, 3) with std sqrt 2, (2, 2) with 0, (5, NaN) left out: one of two pairs is tied."""
    scores = [1.0, 3.0, 2.0, 2.0, 5.0, math.nan]
    assert spread_and_ties(scores, 2) == (pytest.approx(math.sqrt(2) / 2), 0.5)
    assert all(map(math.isnan, spread_and_ties([1.0, math.nan], 2)))


def test_results_are_plain_floats():
    """They go into JSON."""
    results = [
        *ranks([2, 1]),
        correlation([1, 2], [1, 3]),
        *auc([1.0, 2.0], [1.0]),
        *spread_and_ties([1.0, 2.0], 2),
    ]
    results += [mcnemar(3, 1), pass_at_k([1], 2, 1), *wilson_interval(1, 2)]
    assert {type(result) for result in results} == {float}


def test_what_training_shares_with_plots_imports_neither_torch_nor_matplotlib():
    code = "import sys, logs.statistics, logs.jsonl; print({'torch', 'matplotlib', 'pandas'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout == "set()\n", run.stderr
