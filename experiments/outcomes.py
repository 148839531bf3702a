"""The outcomes of the arms of the study `choices`, and how they differ.

The rules are those of PROTOCOL.md, "The choices", which were written before the runs. The runs of
an arm are ARM_rateRATE_seedSEED in the folder of the study. The seeds of the first look have three
learning rates. An arm of an undecided comparison has a second look, whose seeds have two of them.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from experiments.paired import UNDECIDED, Difference, judge, outcome_at_best_rate
from logs import jsonl

FIRST_SEEDS = range(3, 7)
SECOND_SEEDS = range(7, 9)

# A run and the run of `base` with the same rate and seed, if there is one -> an outcome in %.
Outcome = Callable[[Path, Path | None], float]
read = cache(jsonl.read)


# --- Outcomes of a run ----------------------------------------------------------------------------


def outcome_on_validation(run: Path, run_of_base: Path | None) -> float:
    """Outcome A: the mean strict accuracy of the evaluations after step 0, in %.

    A run with dynamic sampling samples more tokens in an iteration. Its accuracies are interpolated
    at the numbers of tokens that the run of `base` had sampled at its evaluations.

    Raises:
        ValueError: there is no run of `base` to compare the tokens with, or it sampled more.
    """
    rows = evaluations_of(run)
    accuracies = [row["accuracy"] for row in rows]
    if not run.name.startswith("dynamic_sampling"):
        return 100 * float(np.mean(accuracies[1:]))
    if run_of_base is None:
        raise ValueError(f"{run}: no run of base with this rate and this seed")
    tokens = [row["total_tokens"] for row in rows]
    tokens_of_base = [row["total_tokens"] for row in evaluations_of(run_of_base)[1:]]
    if tokens_of_base[-1] > tokens[-1]:
        raise ValueError(f"{run}: fewer tokens than {run_of_base}")
    return 100 * float(np.mean(np.interp(tokens_of_base, tokens, accuracies)))


def outcome_in_training(run: Path, run_of_base: Path | None) -> float:
    """Outcome B: the mean strict accuracy of the sampled completions, in %."""
    return 100 * float(np.mean([row["accuracy"] for row in read(run / "train_log.jsonl")]))


def evaluations_of(run):
    return read(run / "eval_log.jsonl", ("step", "accuracy", "total_tokens"))


# --- Outcomes of an arm ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """What came out of an arm."""

    name: str
    means: dict[float, float]  # of the first seeds at each learning rate, in %
    rate: float  # the learning rate that suits the arm best
    by_seed: dict[int, float]  # the outcome of each seed at this rate, in %

    @property
    def nearest_rate(self) -> float:
        """Of the learning rates with which the arm was run, the one nearest to the best rate."""
        return min(self.means, key=lambda rate: abs(math.log(rate / self.rate)))


def rate_text(learning_rate: float) -> str:
    """A learning rate as it stands on a command line, such as 2e-4, with at most three digits."""
    return np.format_float_scientific(float(f"{learning_rate:.3g}"), trim="-", exp_digits=1)


def runs_of_arm(folder: Path, arm: str) -> dict[tuple[float, int], Path]:
    """{(learning rate, seed): folder of the finished run}"""
    runs = {}
    for path in folder.glob(f"{arm}_rate*_seed*/answers.jsonl"):
        rate, _, seed = path.parent.name.removeprefix(f"{arm}_rate").partition("_seed")
        runs[float(rate), int(seed)] = path.parent
    return runs


def runs_at_nearest_rate(folder: Path, arm: Arm) -> list[Path]:
    """The runs of the first look with the learning rate nearest to the arm's best one, by seed."""
    runs = runs_of_arm(folder, arm.name)
    return [runs[arm.nearest_rate, seed] for seed in FIRST_SEEDS]


def first_look_is_finished(folder: Path, arm: str) -> bool:
    """Whether all seeds of the first look have runs at three rates."""
    num_rates = Counter(seed for _, seed in runs_of_arm(folder, arm))  # of each seed
    return all(num_rates[seed] == 3 for seed in FIRST_SEEDS)


def arm_at_its_best_rate(folder: Path, name: str, outcome: Outcome = outcome_on_validation) -> Arm:
    """The outcomes of an arm whose first look is finished, and of its second look if that is too.

    Raises:
        ValueError: its first look is not finished, or its second look has other runs than the rules
            say.
    """
    if not first_look_is_finished(folder, name):
        raise ValueError(f"{name}: {folder} has no finished first look of an arm with this name")
    runs = runs_of_arm(folder, name)
    runs_of_base = runs_of_arm(folder, "base")
    values = {key: outcome(run, runs_of_base.get(key)) for key, run in runs.items()}
    first_rates = sorted({rate for rate, seed in runs if seed in FIRST_SEEDS})
    first_values = {
        rate: np.array([values[rate, seed] for seed in FIRST_SEEDS]) for rate in first_rates
    }
    best_rate, outcomes = outcome_at_best_rate(first_values)
    means = {rate: float(values_of_rate.mean()) for rate, values_of_rate in first_values.items()}
    # A parabola knows of no ceiling.
    by_seed = dict(zip(FIRST_SEEDS, outcomes.clip(0, 100).tolist(), strict=True))

    second_keys = [key for key in runs if key[1] in SECOND_SEEDS]
    second_rates = sorted({rate for rate, _ in second_keys})
    is_finished = len(second_keys) == len(SECOND_SEEDS) * len(second_rates)
    if second_keys and is_finished:
        # They surround the best rate by outcome A. That by outcome B may lie a little outside; then
        # the straight line goes on.
        if len(second_rates) != 2 or not second_rates[0] / 1.5 < best_rate < second_rates[1] * 1.5:
            raise ValueError(f"{name}: the second look needs two rates around {best_rate:.3g}")
        low, high = second_rates
        weight = math.log(best_rate / low) / math.log(high / low)
        # The curve of the first seeds' means lies this far above the line between the two rates.
        line = (1 - weight) * means[low] + weight * means[high]
        height = float(outcomes.mean()) - line
        for seed in SECOND_SEEDS:
            line = (1 - weight) * values[low, seed] + weight * values[high, seed]
            by_seed[seed] = min(max(line + height, 0.0), 100.0)
    return Arm(name, means, best_rate, by_seed)


# --- Comparisons ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """A comparison of two arms."""

    class_name: str  # of comparisons whose variances are pooled
    first: str
    second: str


@dataclass(frozen=True)
class JudgedChoice:
    """How far apart the two arms of a comparison are."""

    first_rate: float  # the learning rate that suits the first arm best by outcome A
    second_rate: float
    on_validation: Difference  # by outcome A, each arm at its best rate
    in_training: Difference  # by outcome B, each arm at the rate that suits it best by B


def choices_to_compare(folder: Path) -> list[Choice]:
    """The comparisons in comparisons.txt.

    The file starts with a line of explanation. Then it has a line "CLASS:" for each class, and
    below it an indented line "ARM ARM" for each comparison.
    """
    comparisons = []
    class_name = ""
    for line in (folder / "comparisons.txt").read_text("utf-8").splitlines()[1:]:
        if line.startswith(" "):
            first, second = line.split()
            comparisons.append(Choice(class_name, first, second))
        else:
            class_name = line.removesuffix(":")
    return comparisons


def compare_arms(choices: list[Choice], arms: dict[str, Arm]) -> list[Difference]:
    """The differences of the second look, but where the first look decided, those of the first."""
    classes = [choice.class_name for choice in choices]

    def judge_seeds(*seeds):
        differences = []
        for choice in choices:
            first = arms[choice.first].by_seed
            second = arms[choice.second].by_seed
            common_seeds = [seed for seed in seeds if seed in first and seed in second]
            differences.append(np.array([first[seed] - second[seed] for seed in common_seeds]))
        return judge(differences, confidence=0.975, classes=classes)

    first_look = judge_seeds(*FIRST_SEEDS)
    second_look = judge_seeds(*FIRST_SEEDS, *SECOND_SEEDS)
    return [
        second if first.verdict == UNDECIDED else first
        for first, second in zip(first_look, second_look, strict=True)
    ]


def judged_choices(folder: Path) -> dict[Choice, JudgedChoice]:
    """The comparisons in comparisons.txt whose arms have finished their first look, judged.

    Raises:
        ValueError: the second look of an arm has other runs than the rules say, or an outcome
            cannot be compared with that of `base`.
    """
    choices = finished_choices(folder)
    names_of_arms = set()
    for choice in choices:
        names_of_arms |= {choice.first, choice.second}
    on_validation = {}
    in_training = {}
    for arm in names_of_arms:
        on_validation[arm] = arm_at_its_best_rate(folder, arm)
        in_training[arm] = arm_at_its_best_rate(folder, arm, outcome_in_training)
    differences = compare_arms(choices, on_validation)
    differences_in_training = compare_arms(choices, in_training)
    judged = {}
    for i, choice in enumerate(choices):
        judged[choice] = JudgedChoice(
            on_validation[choice.first].rate,
            on_validation[choice.second].rate,
            differences[i],
            differences_in_training[i],
        )
    return judged


def finished_choices(folder: Path) -> list[Choice]:
    """The comparisons whose two arms have all their runs of the first look."""
    finished = []
    for choice in choices_to_compare(folder):
        arms = (choice.first, choice.second)
        if all(first_look_is_finished(folder, arm) for arm in arms):
            finished.append(choice)
    return finished
