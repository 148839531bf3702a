"""Every statistic of the project, worked by hand and against scipy."""

import math

import pytest
from scipy import stats

from grpo.statistics import (
    accuracies,
    accuracy_by,
    format_and_answer_counts,
    mcnemar,
    pass_at_k,
    wilson_interval,
)


def test_wilson_interval_by_hand():
    """50 of 100: centre 0.5, half-width z sqrt(0.0025 + z^2/40000) / (1 + z^2/100)."""
    assert wilson_interval(50, 100) == pytest.approx((0.4038315, 0.5961685), abs=1e-6)
    assert wilson_interval(0, 10)[0] == 0
    assert wilson_interval(10, 10)[1] == pytest.approx(1)
    assert all(map(math.isnan, wilson_interval(0, 0)))


@pytest.mark.parametrize("n", [1, 7, 1319])
def test_wilson_interval_agrees_with_scipy(n):
    for successes in {0, 1, n // 3, n}:
        interval = stats.binomtest(successes, n).proportion_ci(0.95, method="wilson")
        expected = (interval.low, interval.high)
        assert wilson_interval(successes, n) == pytest.approx(expected, abs=1e-9)


def test_pass_at_k_in_closed_form():
    """2 of 4 are correct: 1 - C(2, k) / C(4, k) = 1/2, 5/6, 1, 1."""
    assert [pass_at_k([2], 4, k) for k in (1, 2, 3, 4)] == pytest.approx([1 / 2, 5 / 6, 1, 1])
    assert pass_at_k([0, 4, 2], 4, 2) == pytest.approx((0 + 1 + 5 / 6) / 3)


def test_an_interval_counts_problems_and_not_samples():
    """Two problems with 3 and 0 of 4 right samples are 0.75 of 2."""
    metrics = accuracies("accuracy", [True, True, True, False] + [False] * 4, samples=4)
    low, high = wilson_interval(0.75, 2)
    expected = {"accuracy": 0.375, "accuracy_low": low, "accuracy_high": high}
    expected |= {"pass@1": 0.375, "pass@2": 0.5, "pass@3": 0.5, "pass@4": 0.5}
    assert metrics == pytest.approx(expected)
    assert "pass@1" not in accuracies("accuracy", [True], samples=1)


def test_the_values_of_a_column_may_be_numbers_and_text():
    rows = [{"level": "hard"}, {"level": 10}, {"level": None}, {"level": 2}, {"level": 10}]
    by_level = accuracy_by("level", rows, [True, False, True, True, True])
    expected = [("accuracy_level/2", 1.0), ("accuracy_level/10", 0.5), ("accuracy_level/hard", 1.0)]
    assert list(by_level.items()) == expected


def test_completions_are_counted_by_format_and_answer():
    pairs = [(True, True), (True, False), (True, False), (False, False)]
    details = [{"format": has_format, "correct_strict": right} for has_format, right in pairs]
    counts = {"count/format1_answer1": 1, "count/format1_answer0": 2, "count/format0_answer0": 1}
    assert format_and_answer_counts(details) == counts


@pytest.mark.parametrize(
    "num_fixed, num_broken, p_value",
    [(0, 0, 1), (1, 0, 1), (3, 3, 1), (5, 0, 2 / 32), (2, 10, 2 * (1 + 12 + 66) / 4096)],
)
def test_mcnemar_by_hand(num_fixed, num_broken, p_value):
    assert mcnemar(num_fixed, num_broken) == pytest.approx(p_value, rel=1e-12)
    assert mcnemar(num_broken, num_fixed) == pytest.approx(p_value, rel=1e-12)
