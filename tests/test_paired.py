"""experiments/paired.py: the outcome of an arm, and the verdict on a difference."""

import math

import numpy as np
import pytest
from scipy import special, stats

from experiments.paired import (
    inverse_trigamma,
    judge,
    outcome_at_best_rate,
    pool_variances,
)
from experiments.real_model import gain_interval


def outcomes_on(parabolas, rates):
    """{rate: (S,)} where each seed's outcomes lie on its parabola over log2(rate)."""
    return {rate: np.array([p(math.log2(rate)) for p in parabolas]) for rate in rates}


def test_an_arm_is_read_at_the_top_of_its_parabola():
    """The mean of two seeds is 50 - (x - 1.4)^2, whose top lies between two rates."""
    parabolas = [lambda x: 49 - (x - 1) ** 2, lambda x: 51 - (x - 1.8) ** 2]
    rate, outcomes = outcome_at_best_rate(outcomes_on(parabolas, [1.0, 2.0, 4.0]))
    assert math.log2(rate) == pytest.approx(1.4)
    assert outcomes == pytest.approx([49 - 0.16, 51 - 0.16])


def test_of_more_rates_the_neighbours_of_the_best_count():
    outcomes = outcomes_on([lambda x: 50 - (x - 2.2) ** 2], [1.0, 2.0, 4.0, 8.0])
    outcomes[1.0] = np.array([-1000.0])
    rate, values = outcome_at_best_rate(outcomes)
    assert math.log2(rate) == pytest.approx(2.2)
    assert values == pytest.approx([50.0])


@pytest.mark.parametrize("top, expected", [(-3.0, 1.0), (7.0, 4.0)])
def test_a_top_outside_the_rates_is_not_extrapolated(top, expected):
    outcomes = outcomes_on([lambda x: 50 - (x - top) ** 2], [1.0, 2.0, 4.0])
    rate, values = outcome_at_best_rate(outcomes)
    assert rate == pytest.approx(expected)
    assert values == pytest.approx(outcomes[expected])


def test_without_a_top_the_best_rate_is_taken():
    rate, values = outcome_at_best_rate(outcomes_on([lambda x: x**2], [1.0, 2.0, 4.0]))
    assert (rate, values.tolist()) == (4.0, [4.0])
    rate, _ = outcome_at_best_rate(outcomes_on([lambda x: x], [1.0, 2.0]))
    assert rate == 2.0


def test_a_single_comparison_has_students_interval():
    by_seed = np.array([1.0, 2.0, 6.0])
    (difference,) = judge([by_seed])
    expected = stats.t.interval(0.95, 2, by_seed.mean(), stats.sem(by_seed))
    assert (difference.low, difference.high) == pytest.approx(expected)
    assert difference.p_value == pytest.approx(stats.ttest_1samp(by_seed, 0).pvalue)
    assert difference.verdict == "undecided"


def test_verdicts():
    wide = np.array([-20.0, 30.0, 4.0])
    far = np.array([10.0, 10.5, 11.0])
    near = np.array([-0.1, 0.1, 0.0])
    small = np.array([1.0, 1.01, 1.02])
    verdicts = [judge([by_seed])[0].verdict for by_seed in (wide, far, near, small)]
    expected = ["undecided", "significant", "equal within 3 points"]
    assert verdicts == [*expected, "significant, equal within 3 points"]


def test_a_difference_that_rounds_to_zero_has_no_minus_sign():
    (difference,) = judge([np.array([-1.02, 0.98])])
    assert difference.mean_cell().startswith("+0.0 [")


def test_many_comparisons_correct_a_small_p_value():
    """p = 0.04 alone is significant, and among nine differences of nothing it is not."""
    t = stats.t.ppf(0.98, 4)
    shape = np.array([-2.0, -1.0, 0.0, 1.0, 2.0])
    lucky = shape + t * stats.sem(shape)
    (alone,) = judge([lucky])
    assert alone.p_value == pytest.approx(0.04)
    assert alone.verdict == "significant"
    among_others = judge([lucky, *[shape] * 9])
    assert among_others[0].verdict == "undecided"


def test_variances_that_differ_by_chance_alone_become_one():
    generator = np.random.default_rng(0)
    differences = [generator.normal(0, 2, 5) for _ in range(3000)]
    variances, degrees_of_freedom = pool_variances(differences)
    assert degrees_of_freedom.min() > 100
    assert variances == pytest.approx([4.0] * 3000, rel=0.05)


def test_variances_are_pooled_within_a_class():
    """Three comparisons with small variances, and three with large ones."""
    small = [np.array([0.0, 1.0, 2.0]) + shift for shift in range(3)]
    large = [10 * by_seed for by_seed in small]
    mixed = [small[0], large[0], small[1], large[1], small[2], large[2]]
    by_class = judge(mixed, classes=["s", "l"] * 3)
    widths = [difference.high - difference.low for difference in by_class]
    assert widths[1::2] == pytest.approx([10 * width for width in widths[::2]])
    alone = judge(small)
    assert widths[::2] == pytest.approx([each.high - each.low for each in alone])


def test_the_prior_of_drawn_variances_is_found():
    """Variances drawn from an inverse chi-squared distribution with d0 = 6 and s0^2 = 4."""
    generator = np.random.default_rng(0)
    true_variances = 6 * 4 / generator.chisquare(6, 3000)
    differences = [generator.normal(0, math.sqrt(variance), 5) for variance in true_variances]
    variances, degrees_of_freedom = pool_variances(differences)
    assert degrees_of_freedom == pytest.approx([6 + 4] * 3000, rel=0.15)
    own = np.array([np.var(by_seed, ddof=1) for by_seed in differences])
    assert np.mean((np.log(variances) - np.log(true_variances)) ** 2) < 0.5 * np.mean(
        (np.log(own) - np.log(true_variances)) ** 2
    )


def test_two_comparisons_are_not_pooled():
    variances, degrees_of_freedom = pool_variances([np.array([0.0, 2.0]), np.array([0.0, 4.0])])
    assert variances.tolist() == [2.0, 8.0]
    assert degrees_of_freedom.tolist() == [1, 1]


def test_pooled_degrees_of_freedom_are_at_most_those_of_all():
    """Equal variances once gave the interval of a known variance."""
    _, degrees_of_freedom = pool_variances([np.array([0.0, 2.0]) + shift for shift in range(3)])
    assert degrees_of_freedom.tolist() == [3, 3, 3]


def test_seeds_that_agree_prove_nothing():
    """Two seeds with the same difference were significant, with an interval of no width."""
    (difference,) = judge([np.array([20.0, 20.0])])
    assert (difference.low, difference.high) == (-math.inf, math.inf)
    assert difference.verdict == "undecided"
    # One such comparison does not keep the others from being pooled.
    others = [np.array([0.0, 1.0, 3.0]), np.array([0.0, 2.0, 1.0])]
    variances, degrees_of_freedom = pool_variances([*others, np.array([0.1, 0.1, 0.1])])
    assert (variances > 0).all()
    assert degrees_of_freedom[0] > 2


@pytest.mark.parametrize("x", [0.01, 0.5, 3.0, 1000.0])
def test_the_inverse_of_trigamma(x):
    y = special.polygamma(1, x)
    assert inverse_trigamma(y) == pytest.approx(x, rel=1e-6)


def test_the_interval_of_a_gain_counts_the_spread_of_seeds_and_of_problems():
    """Against the normal approximation: the variances of both means add up."""
    generator = np.random.default_rng(1)
    seeds = np.linspace(0, 40, 20)[:, None]
    problems = generator.choice([-100.0, 100.0], (1, 1000), p=[0.4, 0.6])
    for gains in (problems, seeds + np.zeros((1, 1000)), seeds + problems):
        variance = gains.mean(1).var() / len(gains) + gains.mean(0).var() / 1000
        low, high = gain_interval(gains)
        assert high - low == pytest.approx(2 * 1.96 * variance**0.5, rel=0.05)
        assert (low + high) / 2 == pytest.approx(gains.mean(), abs=0.5)
