"""Every statistic of the project, worked by hand and against scipy."""

import math

import pytest
from scipy import stats

from grpo.statistics import accuracy_by, pass_at_k, wilson_interval
from logs.summary import mcnemar


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


def test_the_values_of_a_column_may_be_numbers_and_text():
    rows = [{"level": "hard"}, {"level": 10}, {"level": None}, {"level": 2}, {"level": 10}]
    accuracies = accuracy_by("level", rows, [True, False, True, True, True])
    expected = [("accuracy_level/2", 1.0), ("accuracy_level/10", 0.5), ("accuracy_level/hard", 1.0)]
    assert list(accuracies.items()) == expected


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
    assert mcnemar(num_fixed, num_broken) == pytest.approx(p_value, rel=1e-12)
