"""What public runs say together, by hand, and that their page says it."""

import pandas as pd
import pytest

from experiments import public_runs


def pair(source, a, b, **columns):
    row = {"kind": "comparison", "question": "x", "source": source, "quality": "good"}
    row |= {"model": "OLMo-2-0425-1B", "accuracies_a": a, "accuracies_b": b}
    return row | {"collapsed_a": 0, "collapsed_b": 0} | columns


# Source A: -10 and -20 points. B: +5, or +35 without its collapsed run. C: only a's run collapsed.
PAIRS = pd.DataFrame(
    [
        pair("A", [0.2, 0.4], [0.4]),
        pair("A", [0.4, 0.2], [0.5]),
        pair("B", [0.6, 0.0], [0.25], collapsed_a=1),
        pair("C", [0.0], [0.4], collapsed_a=1),
        pair("D", [0.9], [0.1], quality="weak"),
    ]
)
QUESTION = public_runs.Question("a - b", "question == 'x'")


def test_pairs_of_a_source_are_averaged_first():
    pooled = public_runs.pool(PAIRS, QUESTION)
    assert pooled.differences.to_dict() == pytest.approx({"A": -15, "B": 5, "C": -40})
    assert pooled.median == pytest.approx(-15)
    assert pooled.without_collapsed.to_dict() == pytest.approx({"A": -15, "B": 35})
    assert pooled.with_weak["D"] == pytest.approx(80)


def test_a_run_that_serves_two_pairs_is_counted_once():
    pooled = public_runs.pool(PAIRS, QUESTION)
    assert pooled.collapsed_a == (2, 2 + 2 + 1)
    assert pooled.collapsed_b == (0, 2 + 1 + 1)


def test_the_interval_of_a_median():
    """Of six values all lie on one side of the median in 2 of 64 cases, of five in 2 of 32."""
    assert public_runs.interval_of_median(pd.Series(range(5))) is None
    assert public_runs.interval_of_median(pd.Series([3, 1, 2, 6, 5, 4])) == (1, 6)
    # One value of nine is left out at each end: (1 + 9) / 512 on each side.
    assert public_runs.interval_of_median(pd.Series(range(9))) == (1, 7)


@pytest.mark.parametrize(
    "differences, toy, verdict",
    [
        ([-9, -8, -7, -6, -5, -4], (-5, -9, -1), "yes"),
        ([-9, -8, -7, -6, -5, -4], (5, 1, 9), "no"),
        ([-3, -2, -1, 0, 1, 2], (5, 1, 9), "no, not of that size"),
        ([-3, -2, -1, 0, 1, 8], (5, 1, 9), "unclear"),
        ([-3, -2, -1, 0, 1, 2], (1, -2, 4), "none found in either"),
        ([-3, -2, -1, 0, 1, 8], (1, -2, 4), "unclear"),
        ([-9, -8, -7, -6, -5], (-5, -9, -1), "unclear"),
        ([-9, -8, -7, -6, -5, -4], None, "unclear"),
    ],
)
def test_the_verdict(differences, toy, verdict):
    pairs = [pair(f"{i}", [difference / 100], [0.0]) for i, difference in enumerate(differences)]
    assert public_runs.carries_over(public_runs.pool(pd.DataFrame(pairs), QUESTION), toy) == verdict


def test_noise_by_hand():
    """Each set in points: 40 and 44 beside a late and a collapsed run; 50, 50 and 56."""
    columns = {"kind": "equal runs"}
    sets = [
        pair("A", [0.40, 0.44, 0.10, 0.0], [], collapsed_a=1, **columns),
        pair("B", [0.50, 0.50, 0.56], [], **columns),
    ]
    noise = public_runs.measure_noise(pd.DataFrame(sets))
    assert (noise.num_runs, noise.num_collapsed, noise.num_late) == (7, 1, 1)
    assert noise.sd == pytest.approx(((8 + 24) / 3) ** 0.5)
    assert noise.within_two == pytest.approx(4 / 7)


def test_seeds():
    """Sample sizes of textbooks: a difference of one standard deviation needs 17 of each arm."""
    assert public_runs.seeds_for(1, 1) == 17
    assert public_runs.seeds_for(0.5, 1) == 64
