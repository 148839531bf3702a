"""How far apart two sides are: in accuracy, or in the iterations that one needs to reach the other.

comparisons.txt has the comparisons, and PROTOCOL.md the rules ("When a difference is significant").
The study `choices` has other rules, which are in outcomes.py and paired.py. study_logs.py explains
what a side is.

Shapes: S seeds, E evaluations, Q questions, D draws of a bootstrap.
"""

from dataclasses import dataclass

import numpy as np

from experiments import study_logs
from experiments.answers import correct_answers
from experiments.paired import SIGNIFICANT
from logs.statistics import student_quantile

# {number of seeds: how many standard errors a true difference must have, so that Student's test at
# 5 % finds it in four cases of five}, from the noncentral t distribution. With seven seeds or more
# it is less than 3.5.
ERRORS_FOUND_BY_STUDENT = {2: 15.8, 3: 5.6, 4: 4.3, 5: 3.8, 6: 3.5}

# --- In accuracy ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """How much more one side gets right than the other, in percentage points."""

    by_seed: np.ndarray  # (S,), at least two seeds
    question_low: float  # the 95 % interval of the mean, by a bootstrap that draws questions
    question_high: float

    @property
    def mean(self):
        return self.by_seed.mean()

    @property
    def error_of_seeds(self):
        """The standard error of the mean, by how much the seeds differ."""
        return np.std(self.by_seed, ddof=1) / len(self.by_seed) ** 0.5

    @property
    def half_width(self):
        """Half of Student's 95 % interval of the mean over the seeds."""
        return self.error_of_seeds * student_quantile(len(self.by_seed) - 1, 0.95)

    @property
    def detectable(self):
        """A true difference of this size would have been found in four cases of five.

        It has to be found over questions and over seeds. The normal test at 5 % needs 1.96 + 0.84 =
        2.8 standard errors for that, and Student's test more, the fewer the seeds.
        """
        error_of_questions = (self.question_high - self.question_low) / 3.92  # 2 x 1.96 errors
        errors_of_seeds = ERRORS_FOUND_BY_STUDENT.get(len(self.by_seed), 3.5)
        return max(errors_of_seeds * self.error_of_seeds, 2.8 * error_of_questions)

    @property
    def verdict(self):
        """What PROTOCOL.md says of it.

        significant    the same sign in all seeds, and neither the interval over questions nor that
                       over seeds contains 0
        not significant (all seeds agree)
                       the same sign in all seeds, but one of the intervals contains 0
        not significant
                       all else
        """
        same_sign = min(self.by_seed) > 0 or max(self.by_seed) < 0
        differs_over_questions = self.question_low > 0 or self.question_high < 0
        differs_over_seeds = abs(self.mean) > self.half_width
        if same_sign and differs_over_questions and differs_over_seeds:
            return SIGNIFICANT
        return "not significant (all seeds agree)" if same_sign else "not significant"

    def cells(self):
        """For a table: each seed, the mean with its interval over seeds, and so on."""
        seeds = ", ".join(f"{points:+z.1f}" for points in self.by_seed)
        interval = f"[{self.mean - self.half_width:+z.1f}, {self.mean + self.half_width:+z.1f}]"
        return seeds, f"{self.mean:+z.1f} {interval}", f"{self.detectable:.1f}", self.verdict


def compare_sides(first, second):
    """The Difference of two sides on the test problems.

    Raises:
        FileNotFoundError: a side has no runs, or not all the seeds of the other side, or neither
            side has a second seed.
        ValueError: the sides answered different questions.
    """
    first_runs = study_logs.runs_of(first)
    second_runs = study_logs.runs_of(second)
    num_seeds = max(len(first_runs), len(second_runs))
    for runs in (first_runs, second_runs):
        has_seeds = "_seed" in runs[0].name  # not so for a model that was not trained
        if has_seeds and len(runs) < num_seeds:
            raise FileNotFoundError("one side has fewer seeds than the other")
    if num_seeds == 1:
        raise FileNotFoundError(
            f"{first} and {second} have one run each, but a difference needs two seeds or more"
        )
    first_summaries = [study_logs.summary_on_test(run) for run in first_runs]
    second_summaries = [study_logs.summary_on_test(run) for run in second_runs]
    if len({summary["questions"] for summary in first_summaries + second_summaries}) > 1:
        raise ValueError("the two sides did not answer the same questions")

    first_answers = answers_by_seed(first_summaries, num_seeds)
    second_answers = answers_by_seed(second_summaries, num_seeds)
    gains = first_answers - second_answers  # (S, Q)
    low, high = interval_over_questions(gains)
    return Difference(100 * gains.mean(1), low, high)


def answers_by_seed(summaries, num_seeds):
    """1 for each right answer, else 0: (S, Q).

    A model that was not trained has one summary, which is repeated for every seed.
    """
    answers = [correct_answers(summary)[:, 0] for summary in summaries]
    return np.stack(answers * (num_seeds // len(answers)))


def interval_over_questions(gains):
    """The 95 % interval of the mean gain, in percentage points, by a bootstrap.

    The bootstrap draws as many questions as there are, with replacement, and keeps the answers of
    all seeds to a question together.

    Args:
        gains: (S, Q), 1 where only the first side is right, -1 where only the second is, else 0.

    Returns:
        the low and the high end.
    """
    num_seeds, num_questions = gains.shape
    # Only the gains of the questions that are drawn matter, and gains have few different values. So
    # it is drawn how many questions have each value.
    values, counts = np.unique(gains.sum(0), return_counts=True)
    generator = np.random.default_rng(0)
    drawn_counts = generator.multinomial(num_questions, counts / num_questions, 10_000)
    points_per_answer = 100 / num_questions / num_seeds
    low, high = np.percentile(drawn_counts @ values, [2.5, 97.5]) * points_per_answer
    return low, high


def comparisons_of(studies):
    """Yield (question, one side, other side) for each comparison of these studies; () means all.

    If a question has several comparisons, only the first one has it, and the others have "".

    comparisons.txt starts with a line of explanation. Then it has a line "STUDY: QUESTION" for each
    question, and below it an indented line "SIDE SIDE" for each comparison.

    Raises:
        ValueError: a study has no comparison.
    """
    lines = (study_logs.STUDIES / "comparisons.txt").read_text("utf-8").splitlines()[1:]
    known = dict.fromkeys(line.split(": ")[0] for line in lines if not line.startswith(" "))
    for study in studies:
        if study not in known:
            raise ValueError(f"{study} is none of the studies compared: {', '.join(known)}")
    for line in lines:
        if not line.startswith(" "):
            study, question = line.split(": ")
        elif not studies or study in studies:
            first, second = line.split()
            yield question, first, second
            question = ""


# --- In iterations --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exchange:
    """The iteration at which GRPO is as accurate as a side is after its training.

    Accuracies are on validation. An iteration is inf if GRPO is never as accurate.
    """

    accuracy: float  # of the side, the mean over its seeds
    iteration: float  # at which the mean over GRPO's seeds is as high
    by_seed: list[float]  # the iteration at which each seed of GRPO is as accurate


def exchange_for_grpo(side, grpo):
    """The Exchange of a side for iterations of the side `grpo`.

    Raises:
        ValueError: the two answered different questions, or the seeds of `grpo` were not evaluated
            at the same iterations.
    """
    steps, answers = study_logs.answers_by_step(grpo)  # (E,), (S, E, Q)
    accuracy = last_answers(side, grpo).mean()
    curves = answers.mean(2)  # (S, E)
    iteration = iteration_that_reaches(accuracy, steps, curves.mean(0))
    by_seed = [iteration_that_reaches(accuracy, steps, curve) for curve in curves]
    return Exchange(accuracy, iteration, by_seed)


def last_answers(side, grpo):
    """The answers of a side in its last evaluation: (seeds of the side, Q).

    Raises:
        ValueError: these are not the questions that the side `grpo` answered.
    """
    run_of_grpo = study_logs.runs_of(grpo)[0]
    questions = study_logs.read_summaries(run_of_grpo / "answers.jsonl")[0]["questions"]
    answers = []
    for run in study_logs.runs_of(side):
        summary = study_logs.read_summaries(run / "answers.jsonl")[-1]
        if summary["questions"] != questions:
            raise ValueError(f"{grpo} and {side} did not answer the same questions")
        answers.append(correct_answers(summary)[:, 0])
    return np.array(answers)


def iteration_that_reaches(level, steps, curve):
    """Where a curve (E,) first reaches a level, between two evaluations on a straight line.

    It is inf if the curve never does.
    """
    # The running maximum reaches a level where the curve first does. np.interp needs values that
    # rise, so 1e-9 is added from each evaluation to the next.
    rising_curve = np.maximum.accumulate(curve) + 1e-9 * np.arange(len(curve))
    return np.interp(level, rising_curve, steps, right=np.inf)
