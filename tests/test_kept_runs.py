"""Reading the kept logs: names of runs, and summaries of answers as percentages."""

import json

import numpy as np
import pandas as pd
import pytest

from experiments import kept_runs
from experiments.answers import hexadecimal
from experiments.real_model import calculations_in


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A study with a summary of four answers; the first of them is wrong."""
    monkeypatch.setattr(kept_runs, "STUDIES", tmp_path)
    monkeypatch.setattr(kept_runs.archive, "unpack", lambda study: None)
    summary = {"step": 20, "n": 4, "with_steps": 2, "tokens": 50.0}
    summary |= {"strict": hexadecimal([0, 1, 0, 0]), "flexible": hexadecimal([0, 1, 1, 1])}
    summary |= {"easy": [1, 2], "direct": [0, 0], "careful": [3, 4]}
    run = tmp_path / "toy" / "careful10_rate2.5e-5_seed1"
    run.mkdir(parents=True)
    lines = [json.dumps(summary | {"step": step}) for step in (0, 20)]
    (run / "answers.jsonl").write_text("\n".join(lines), "utf-8")
    return "toy"


@pytest.mark.parametrize(
    ("name", "arm", "rate", "seed"),
    [
        ("before", "before", None, None),
        ("grpo_seed0", "grpo", None, "0"),
        ("0.3m_before", "0.3m_before", None, None),
        ("careful10_rate2.5e-5_seed12", "careful10", "2.5e-5", "12"),
        ("questions96_group8_epochs4_rate1e-4_seed2", "questions96_group8_epochs4", "1e-4", "2"),
    ],
)
def test_name_of_a_run_is_split(name, arm, rate, seed):
    """An arm that swallows the rate or the seed would be a mean over the wrong runs."""
    parts = kept_runs.RUN_NAME.fullmatch(name)
    assert (parts["arm"], parts["rate"], parts["seed"]) == (arm, rate, seed)


def test_answers_are_percentages(study):
    """Bits with leading zeros, and kinds of steps that no answer has."""
    answers = kept_runs.answers(study, "answers.jsonl")
    last = kept_runs.last(answers)
    assert answers["step"].to_list() == [0, 20]
    assert last["step"].to_list() == [20]
    row = last.iloc[0]
    assert (row["arm"], row["rate"], row["seed"]) == ("careful10", 2.5e-5, 1)
    assert (row["accuracy"], row["accuracy_flexible"], row["with_steps"]) == (25, 75, 50)
    assert (row["easy_right"], row["direct_right"], row["careful_right"]) == (50, 0, 75)
    assert row["careful_share"] == 100


def test_differences_are_within_seeds():
    """Seeds in another order, and a seed that one side lacks."""
    values = pd.Series({0: 5.0, 1: 7.0, 2: 9.0})
    reference = pd.Series({1: 4.0, 0: 1.0})
    np.testing.assert_allclose(kept_runs.difference(values, reference).by_seed, [4, 3])


def test_calculations_of_an_answer():
    answer = "<reasoning>\n3 - 0 = 3\n4 / 0 = 1\n1.5 * 2 = 3\n2 + 2 = 5\nso 2 + 2 = 4\n</reasoning>"
    assert calculations_in(answer) == [("-", True), ("/", False), ("*", True), ("+", False)]
