"""The kept logs of the studies as tables: one row for each line of a log, with the run's name.

    kept_runs.read("dynamics", "eval_log.jsonl")     # every evaluation of every run of a study
    kept_runs.answers("dynamics", "test.jsonl")      # the same for answers.py's summaries

A run is the folder ARM, ARM_seedSEED or ARM_rateRATE_seedSEED of its study.
"""

import re
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from experiments import archive
from experiments.answers import KINDS, accuracy
from experiments.paired import Difference, judge
from logs import jsonl

STUDIES = Path(__file__).resolve().parent
RUN_NAME = re.compile(r"(?P<arm>.+?)(?:_rate(?P<rate>[\de.-]+))?(?:_seed(?P<seed>\d+))?")


@cache
def read(study: str, log: str) -> pd.DataFrame:
    """The rows of a log of every run of a study.

    Args:
        log: the name of a file in the folder of a run, such as train_log.jsonl.

    Returns:
        the keys of the log as columns, and in front of them `run`, `arm`, `rate` (a float, NaN if
        the name has none) and `seed` (likewise). The index counts the rows.
    """
    archive.unpack(study)
    rows = []
    for path in sorted((STUDIES / study).glob(f"*/{log}")):
        name = path.parent.name
        parts = RUN_NAME.fullmatch(name)
        columns = {"run": name, "arm": parts["arm"]}
        columns["rate"] = float(parts["rate"] or "nan")
        columns["seed"] = float(parts["seed"] or "nan")
        rows += [columns | row for row in jsonl.read(path)]
    assert rows, f"no run of {study} has a {log}"
    return pd.DataFrame(rows)


def answers(study: str, log: str = "answers.jsonl") -> pd.DataFrame:
    """The summaries that answers.py makes of evaluations, of every run of a study.

    Args:
        log: answers.jsonl for the evaluations during training, test.jsonl for that on test.

    Returns:
        the columns of `read`, with accuracy (strict) and accuracy_flexible in per cent; with the
        percentage of answers that have steps as `with_steps`; and for each kind of step (easy,
        direct, careful) their number and how many per cent of them are right, as KIND and
        KIND_right. `careful_share` is how many per cent of the hard steps are careful.
    """
    table = read(study, log).copy()
    for kind, column in (("strict", "accuracy"), ("flexible", "accuracy_flexible")):
        table[column] = [100 * accuracy(row, kind) for _, row in table.iterrows()]
    table["with_steps"] *= 100 / table["n"]
    for kind in KINDS:
        counts = np.stack(table[kind])  # (rows, 2): the right ones, all
        table[kind] = counts[:, 1]
        table[f"{kind}_right"] = 100 * counts[:, 0] / counts[:, 1].clip(min=1)
    table["careful_share"] = 100 * table["careful"] / (table["careful"] + table["direct"]).clip(1)
    return table


def last(table: pd.DataFrame) -> pd.DataFrame:
    """The last row of each run."""
    return table.groupby("run", sort=False).tail(1)


def by_seed(table: pd.DataFrame, column: str, arm: str, rate: float | None = None) -> pd.DataFrame:
    """A column of an arm's log: a row for each step, a column for each seed."""
    runs = table[table["arm"] == arm]
    if rate is not None:
        runs = runs[runs["rate"] == rate]
    return runs.pivot(index="step", columns="seed", values=column)


@cache
def at_best_rates(study: str, log: str) -> pd.DataFrame:
    """The answers of a study at the learning rate at which each arm ends best on validation.

    The rates are compared with seed 0; of equal ones the lowest is taken.
    """
    ends = last(answers(study))
    ends = ends[ends["seed"] == 0].sort_values(["accuracy", "rate"], ascending=[False, True])
    best_rates = ends.groupby("arm")["rate"].first()
    table = answers(study, log)
    return table[table["rate"] == table["arm"].map(best_rates)]


def accuracy_by_seed(study: str, arm: str) -> pd.Series:
    """The accuracy of an arm on test, by seed."""
    runs = at_best_rates(study, "test.jsonl")
    return runs[runs["arm"] == arm].set_index("seed")["accuracy"]


def difference(values: pd.Series, reference: pd.Series) -> Difference:
    """Values minus those of the reference with the same seed: both are indexed by seed."""
    by_seed = (values - reference).dropna().to_numpy()
    return judge([by_seed])[0]
