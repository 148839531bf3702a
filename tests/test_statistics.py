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
    expected_flat_share,
    mcnemar,
    pass_at_k,
    ranks,
    spread_and_ties,
    student_quantile,
    student_tail,
    wilson_interval,
)


def test_expected_flat_share_by_hand_and_by_draws():
    """One of two right: p ~ Beta(1.5, 1.5), whose E[p^2] is (1.5 / 3) (2.5 / 4) = 0.3125."""
    assert expected_flat_share([1], 2, 2) == pytest.approx(0.625)
    assert expected_flat_share([0, 3, 8], 8, 1) == pytest.approx(1), "a group of one is flat"
    # (0.5 / 9) (1.5 / 10) + (8.5 / 9) (9.5 / 10) for none of eight right, and the same for all
    assert expected_flat_share([0, 8], 8, 2) == pytest.approx(0.905556, abs=1e-6)
    p = np.random.default_rng(0).beta(3.5, 5.5, 200_000)
    assert expected_flat_share([3], 8, 6) == pytest.approx((p**6 + (1 - p) ** 6).mean(), abs=1e-3)


def test_wilson_interval_by_hand():
    """50 of 100: centre 0.5, half-width z sqrt(0.0025 + z^2/40000) / (1 + z^2/100)."""
    assert wilson_interval(50, 100) == pytest.approx((0.4038315, 0.5961685), abs=1e-6)
    assert wilson_interval(0, 10)[0] == 0
    assert wilson_interval(10, 10)[1] == pytest.approx(1)
    assert all(map(math.isnan, wilson_interval(0, 0)))


@pytest.mark.parametrize("n", [1, 7, 500, 1319])
def test_wilson_interval_agrees_with_scipy(n):
    for successes in {0, 1, n // 3, n - 1, n}:
        expected = stats.binomtest(successes, n).proportion_ci(0.95, method="wilson")
        assert wilson_interval(successes, n) == pytest.approx(
            (expected.low, expected.high), abs=1e-9
        )


def test_pass_at_k_in_closed_form():
    """2 of 4 are correct: 1 - C(2, k) / C(4, k) = 1/2, 5/6, 1, 1."""
    assert [pass_at_k([2], 4, k) for k in (1, 2, 3, 4)] == pytest.approx([1 / 2, 5 / 6, 1, 1])
    assert pass_at_k([0, 4, 2], 4, 2) == pytest.approx((0 + 1 + 5 / 6) / 3)


@pytest.mark.parametrize(
    "num_fixed, num_broken, p_value",
    [
        (0, 0, 1),
        (1, 0, 1),
        (3, 3, 1),
        (5, 0, 2 / 32),
        (10, 2, 2 * (1 + 12 + 66) / 4096),
        (2, 10, 2 * 79 / 4096),
    ],
)
def test_mcnemar_by_hand(num_fixed, num_broken, p_value):
    assert mcnemar(num_fixed, num_broken) == p_value


def test_mcnemar_equals_scipys_binomial_test():
    """The tolerance is relative: scipy's own binomial tail is good to about 1e-12."""
    pairs = [(700, 600), (1500, 1411), (40, 700)]
    for num_fixed in range(12):
        pairs += [(num_fixed, num_broken) for num_broken in range(12) if num_fixed + num_broken]
    for num_fixed, num_broken in pairs:
        n = num_fixed + num_broken
        expected = stats.binomtest(min(num_fixed, num_broken), n, 0.5).pvalue
        p_value = mcnemar(num_fixed, num_broken)
        assert p_value == pytest.approx(expected, rel=1e-9), (num_fixed, num_broken)
    assert mcnemar(4000, 0) == 0.0, "too small for a float"


def test_ranks_correlation_and_auc_against_scipy():
    generator = np.random.default_rng(0)
    x = generator.integers(0, 6, 40).tolist()  # of 6 values, so there are many ties
    y = [value + generator.integers(0, 4).item() for value in x]
    assert ranks(x) == stats.rankdata(x).tolist()
    assert ranks([]) == []
    assert correlation(x, y) == pytest.approx(stats.pearsonr(x, y)[0])
    assert correlation(ranks(x), ranks(y)) == pytest.approx(stats.spearmanr(x, y)[0])
    area, low, high = auc(y, x)
    num_pairs = len(x) * len(y)
    assert area == pytest.approx(stats.mannwhitneyu(y, x).statistic / num_pairs)
    assert 0.5 < low < area < high < 1


@pytest.mark.parametrize("constant", [[], [1.0], [0.1, 0.1, 0.1]])
def test_no_correlation_with_a_constant(constant):
    """The mean of three 0.1 is not 0.1 in floats, so a test of the variance would miss it."""
    rising = [1.0, 2.0, 4.0][: len(constant)]
    assert math.isnan(correlation(constant, rising))
    assert math.isnan(correlation(rising, constant))


def test_auc_interval_by_hand():
    """The interval at an AUC of 0.5 and of 1.

    At 0.5, with 100 scores in each group, s^2 = 0.25 (1 + 99 * 2 / 3) / 10^4. At 1 the lower end t
    solves 1 - t = z s(t).
    """
    area, low, high = auc([1.0] * 100, [1.0] * 100)
    half_width = 1.96 * math.sqrt(0.25 * 67) / 100
    assert area == 0.5
    assert high - area == pytest.approx(area - low) == pytest.approx(half_width, rel=0.02)

    area, low, high = auc([2.0] * 20, [1.0] * 20)
    spread = 1 + 19 * ((1 - low) / (2 - low) + low / (1 + low))
    standard_error = math.sqrt(low * (1 - low) * spread / 400)
    assert area == high == 1.0
    assert 1 - low == pytest.approx(1.959964 * standard_error, abs=1e-5)
    assert 0.8 < low < 0.95
    assert all(map(math.isnan, auc([], [1.0])))


def test_spread_and_ties_by_hand():
    """(1, 3) has std sqrt 2, (2, 2) has 0, (5, NaN) is left out: one of two pairs is tied."""
    scores = [1.0, 3.0, 2.0, 2.0, 5.0, math.nan]
    assert spread_and_ties(scores, 2) == (pytest.approx(math.sqrt(2) / 2), 0.5)
    assert all(map(math.isnan, spread_and_ties([1.0, math.nan], 2)))


def test_results_are_plain_floats():
    """They go into JSON, which knows no numpy types."""
    results = [
        *ranks([2, 1]),
        correlation([1, 2], [1, 3]),
        *auc([1.0, 2.0], [1.0]),
        *spread_and_ties([1.0, 2.0], 2),
        mcnemar(3, 1),
        pass_at_k([1], 2, 1),
        *wilson_interval(1, 2),
    ]
    assert {type(result) for result in results} == {float}


def test_what_training_shares_with_plots_imports_neither_torch_nor_matplotlib():
    code = "import sys, logs.statistics, logs.jsonl; print(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    modules = set(process.stdout.split())
    assert "logs.statistics" in modules, process.stderr
    assert not modules & {"torch", "matplotlib", "pandas"}


@pytest.mark.parametrize("freedom", [1, 2, 4.5, 30, math.inf])
def test_students_distribution_agrees_with_scipy(freedom):
    assert student_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-6)
    assert student_quantile(freedom, 0.5) == pytest.approx(stats.t.ppf(0.75, freedom), rel=1e-6)
    for t in (0.0, 1.5, 40.0):
        expected = 2 * stats.t.sf(t, freedom)
        assert student_tail(freedom, t) == pytest.approx(expected, rel=1e-4, abs=1e-12)
