"""The tables of the studies, made from their logs: the source of every number in analysis.md.

    python experiments/table.py check [--write]
        check that analysis.md, docs/tuning.md and the studies' README.md say what the logs say, in
        their tables and in their sentences (pages.py); --write puts right what differs
    python experiments/table.py compare std length
        for each comparison in comparisons.txt: how far apart its two sides are, and whether the
        difference is significant
    python experiments/table.py difference dynamics/grpo dynamics/format
        the same for any two sides
    python experiments/table.py rates std length
        validation accuracy at each learning rate that was tried
    python experiments/table.py ends rates/base std/no_std
        accuracy on the test problems, length, and how steps are written, after training
    python experiments/table.py curve careful rates/base
        one measure by iteration, on validation: strict, flexible, tokens, careful, ...
    python experiments/table.py evaluations reward rates/base
        one number of eval_log.jsonl by iteration, on validation: reward, elapsed, ...
    python experiments/table.py levels scaling/0.3m dynamics/grpo
        accuracy on validation by the number of steps of the problem, before and after training
    python experiments/table.py expected scaling/0.3m dynamics/grpo
        the accuracy on validation that the share of right steps leads one to expect
    python experiments/table.py metrics entropy kl -- std/no_std
        means over the last 10 iterations of train_log.jsonl
    python experiments/table.py change entropy kl -- std/no_std
        means over the first 5 and over the last 5 iterations of train_log.jsonl
    python experiments/table.py flags num_examples -- filtered/right
        flags of the runs
    python experiments/table.py pass dynamics/pass_before dynamics/grpo
        pass@k
    python experiments/table.py categories zero_shot/r1_zero_1m
        how many completions have the required format and the right answer
    python experiments/table.py cases zero_shot/cases.jsonl
        completions to read
    python experiments/table.py solutions filtered/teacher.jsonl
        how many of a teacher's solutions are right and in the required format, and have steps
    python experiments/table.py judge judge/rating.json
    python experiments/table.py damages judge/rating.json
        a judge's report: on stories, and on damaged copies of them
    python experiments/table.py texts judge/beta0.4
        the most frequent completion of the last evaluation
    python experiments/table.py completions creative/test/4 judge/beta0.4
        the completions of one prompt at each evaluation
    python experiments/table.py planning scaling/0.3m_seed0
        how many answers are wrong although each of their steps is right
    python experiments/table.py exchange exchange/grpo sft/direct10
        the number of GRPO iterations that reach the accuracy at which SFT ends, in all and for each
        example of SFT
    python experiments/table.py steps sft/direct10 sft/careful10
        the accuracy that follows from the steps that are right, if these are independent
    python experiments/table.py expert_iterations expert_iteration/questions96_group8_epochs4
        accuracy on validation after each expert iteration, what was kept, and its entropy
    python experiments/table.py selection expert_iteration/questions96_group8_epochs4
        the share of careful steps after each expert iteration, and the one that selection of right
        steps leads one to expect
    python experiments/table.py choices
        the comparisons of choices/comparisons.txt, by the rules of PROTOCOL.md, "The choices"
    python experiments/table.py choice no_std base
        one of them
    python experiments/table.py response base no_std
        how the outcome of its arms depends on the learning rate
    python experiments/table.py diagnose
        the rules of logs/diagnose.py, and in how many GRPO runs of each kind they warn

A side of a comparison is STUDY/ARM. Its runs are the folders ARM_seed0, ARM_seed1, ... of that
study. If several learning rates were tried, the runs are those at the rate that ends best on
validation. names.json has the names that the sides have on the pages.
Accuracies are strict, in %, and of greedy answers to the 2,000 test problems, unless a table says
something else. The program first unpacks the archives of the studies (experiments/archive.py).
"""

import inspect
import itertools
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from experiments import archive, outcomes, pages  # noqa: E402
from experiments.answers import KINDS, checked_steps, correct_answers  # noqa: E402
from experiments.paired import SIGNIFICANT  # noqa: E402
from grading.extraction import strict_format  # noqa: E402
from logs import jsonl, markdown  # noqa: E402
from logs.diagnose import RULES, WARNING, Logs, diagnose  # noqa: E402
from logs.read import has_number, read_args  # noqa: E402
from logs.statistics import CATEGORIES, pass_at_k, student_quantile, wilson_interval  # noqa: E402
from training.signals import Guard  # noqa: E402

STUDIES = ROOT / "experiments"
# What `measure` can measure, and the keys of a summary by answers.py.
MEASURES = ("strict", "flexible", "tokens", "careful", "careful_right", "direct_right")
SUMMARY_KEYS = ("step", "n", "samples", "questions", *MEASURES[:4], "direct")
# The levels of the problems of `arithmetic`: a problem of level 3 is solved in 3 steps.
LEVELS = (1, 2, 3, 4)
# What is done to the stories that a judge should score lower.
DAMAGES = ("shuffled words", "shuffled sentences", "cut", "repeated")
# Runs that are known to go wrong whatever their accuracy says, by the beginning of their names.
MADE_TO_GO_WRONG = (
    "dynamics/random",  # a coin for a reward
    "dynamics/format",  # no reward for right answers
    "judge/beta0.04",  # all stories become one, which reading them shows
    "rates/base_rate1e-3",  # a learning rate far too high
)
# Runs whose truth is not known, or which are counted already.
NOT_COUNTED = (
    "judge/beta0.4",  # nobody knows whether these stories are better
    "exchange/grpo",  # the runs rates/base_rate2e-4, evaluated more often
    "choices/",  # made after the rules
)
read = cache(jsonl.read)


# --- What stands in the logs ----------------------------------------------------------------------


def evaluations_of(path):
    """The rows of a file that answers.py wrote. ValueError: it has none, or other ones."""
    rows = read(path, SUMMARY_KEYS)
    if not rows:
        raise ValueError(f"{path}: no evaluation in it")
    return rows


def measure(row, key):
    """One number of an evaluation; NaN if it has no step of the kind that the key asks for.

    strict, flexible               the share of answers that are right
    tokens                         the mean length of a completion
    careful                        of the steps that can be split into easier pieces, the share that
                                   is written with them; the others are direct
    careful_right, direct_right    of the careful or the direct steps, the share that is right
    """
    if key in ("strict", "flexible"):
        return correct_answers(row, key).mean()
    if key == "tokens":
        return row["tokens"]
    if key == "careful":
        _, num_careful = row["careful"]
        _, num_direct = row["direct"]
        return share(num_careful, num_careful + num_direct)
    num_right, num_steps = row[key.removesuffix("_right")]
    return share(num_right, num_steps)


def share_of_right_steps(row):
    """Of all the steps in the answers of an evaluation, easy ones too, the share that is right."""
    num_right = sum(row[kind][0] for kind in KINDS)
    num_steps = sum(row[kind][1] for kind in KINDS)
    return share(num_right, num_steps)


def share(count, total):
    return count / total if total else np.nan


def final_accuracy(run):
    """Strict accuracy of the run's last evaluation on validation."""
    return measure(evaluations_of(run / "answers.jsonl")[-1], "strict")


def learning_rate_of(run):
    """The learning rate in the name of a run, as text; "" where only one was tried."""
    match = re.search(r"_rate([^_]+)_", run.name)
    return match[1] if match else ""


def best_run(runs):
    """Of runs at several learning rates, the one that ends best on validation.

    Of runs that end equally well, it is the one with the lowest rate.

    Raises:
        ValueError: there are no runs, or the name of one does not tell its rate.
    """
    if not runs:
        raise ValueError("no runs to choose from")
    for run in runs:
        if not learning_rate_of(run):
            raise ValueError(f"{run}: no learning rate in its name, such as base_rate1e-4_seed0")
    by_rate = sorted(runs, key=lambda run: float(learning_rate_of(run)))
    return max(by_rate, key=final_accuracy)


def runs_of(side):
    """The folders of a side, one per seed. FileNotFoundError: there is none."""
    path = STUDIES / side
    if (path / "answers.jsonl").exists():  # a model that was only evaluated
        return [path]
    runs = sorted(path.parent.glob(f"{path.name}_seed?"))
    if not runs:
        tried = list(path.parent.glob(f"{path.name}_rate*_seed0"))
        if tried:
            rate = learning_rate_of(best_run(tried))
            runs = sorted(path.parent.glob(f"{path.name}_rate{rate}_seed?"))
    if not runs:
        raise FileNotFoundError(f"{side}: no runs in {path.parent}")
    return runs


def evaluation_on_test(run, file="test.jsonl"):
    """The evaluation of a run on the test problems.

    A model that was not trained was evaluated once, on the test problems, so that its answers.jsonl
    has that evaluation.
    """
    was_trained = (run / "train_log.jsonl").exists()
    return evaluations_of(run / (file if was_trained else "answers.jsonl"))[-1]


# --- Two sides compared ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """How much more one side gets right than the other, in percentage points."""

    by_seed: np.ndarray  # (seeds,)
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
        2.8 standard errors for that, and Student's with 2 degrees of freedom needs 5.6.
        """
        error_of_questions = (self.question_high - self.question_low) / 3.92  # 2 x 1.96 errors
        return max(5.6 * self.error_of_seeds, 2.8 * error_of_questions)

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
        seeds = ", ".join(f"{points:+.1f}" for points in self.by_seed)
        interval = f"[{self.mean - self.half_width:+.1f}, {self.mean + self.half_width:+.1f}]"
        return seeds, f"{self.mean:+.1f} {interval}", f"{self.detectable:.1f}", self.verdict


def compare_sides(first, second):
    """The Difference of two sides on the test problems.

    Raises:
        FileNotFoundError: a side has no runs, or not all the seeds of the other side.
        ValueError: the sides answered different questions.
    """
    first_runs = runs_of(first)
    second_runs = runs_of(second)
    num_seeds = max(len(first_runs), len(second_runs))
    for runs in (first_runs, second_runs):
        has_seeds = "_seed" in runs[0].name  # not so for a model that was not trained
        if has_seeds and len(runs) < num_seeds:
            raise FileNotFoundError("one side has fewer seeds than the other")
    first_rows = [evaluation_on_test(run) for run in first_runs]
    second_rows = [evaluation_on_test(run) for run in second_runs]
    if len({row["questions"] for row in first_rows + second_rows}) > 1:
        raise ValueError("the two sides did not answer the same questions")

    gains = answers_by_seed(first_rows, num_seeds) - answers_by_seed(second_rows, num_seeds)
    gains_by_question = gains.sum(0)
    num_questions = len(gains_by_question)
    # The bootstrap draws as many questions as there are, with replacement. Only their gains matter,
    # and these have few different values. So it draws how many questions have each value.
    values, counts = np.unique(gains_by_question, return_counts=True)
    generator = np.random.default_rng(0)
    drawn_counts = generator.multinomial(num_questions, counts / num_questions, 10_000)
    points_per_answer = 100 / num_questions / num_seeds
    low, high = np.percentile(drawn_counts @ values, [2.5, 97.5]) * points_per_answer
    return Difference(100 * gains.mean(1), low, high)


def answers_by_seed(rows, num_seeds):
    """1 for each right answer, else 0: (seeds, questions).

    A model that was not trained has one row, which is repeated for every seed.
    """
    answers = [correct_answers(row)[:, 0] for row in rows]
    return np.stack(answers * (num_seeds // len(answers)))


def comparisons_of(studies):
    """Yield (question, one side, other side) for each comparison of these studies; () means all.

    If a question has several comparisons, only the first one has it, and the others have "".

    comparisons.txt starts with a line of explanation. Then it has a line "STUDY: QUESTION" for each
    question, and below it an indented line "SIDE SIDE" for each comparison.

    Raises:
        ValueError: a study has no comparison.
    """
    lines = (STUDIES / "comparisons.txt").read_text().splitlines()[1:]
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


# --- Names ---------------------------------------------------------------------------------------


@cache
def display_names(path):
    """{STUDY/ARM: its name on the pages}; plotter.py --names reads the same file."""
    names = json.loads(path.read_text("utf-8"))
    return {side: name for side, (name, _) in names.items()}


def name_of(side):
    """The name of a side on the pages; without an entry in names.json it is the side itself."""
    names = display_names(STUDIES / "names.json")
    if side in names:
        return names[side]
    arm, rate, learning_rate = side.partition("_rate")
    if rate and arm in names:
        return f"{names[arm]} at {learning_rate}"
    return side


def named_runs(side):
    """(name, folder) for each run of a side, such as ("the demo, seed 0", ...)."""
    side_without_seed = re.sub(r"_seed\d+$", "", side)
    for run in runs_of(side):
        seed = re.search(r"_seed(\d+)$", run.name)
        yield f"{name_of(side_without_seed)}, seed {seed[1]}" if seed else name_of(side), run


# --- Cells ----------------------------------------------------------------------------------------


def percent(value):
    return f"{100 * value:.1f}"


def percent_with_interval(value, n):
    """A share of n answers in %, with Wilson's 95 % interval."""
    low, high = wilson_interval(value * n, n)
    return f"{percent(value)} [{percent(low)}, {percent(high)}]"


def measure_cell(row, key):
    value = measure(row, key)
    if np.isnan(value):
        return "none"
    return f"{value:.0f}" if key == "tokens" else percent(value)


def mean_cell(rows, key):
    """The mean of a metric over rows of train_log.jsonl; rows without a number do not count."""
    values = [row[key] for row in rows if has_number(row, key)]
    return f"{np.mean(values):.3g}" if values else "none"


def iteration_cell(iteration):
    return f"{iteration:.0f}" if iteration < np.inf else "never"


def text_cell(text):
    """A completion on one line, in which |, <, > and ` are escaped for markdown."""
    escaped = re.sub(r"[|<>`]", lambda match: f"&#{ord(match[0])};", text.strip())
    return escaped.replace("\n", " / ")


def key_heading(key):
    """The heading "careful, right" for the key careful_right; other keys stay as they are."""
    return key.replace("_", ", ")


# --- The tables: each yields its headings first and then its rows ---------------------------------


DIFFERENCE_HEADINGS = ("each seed (points)", "mean [95 %]", "detectable", "verdict")


def compare(*studies):
    yield "question", "one side", "other side", *DIFFERENCE_HEADINGS
    for question, first, second in comparisons_of(studies):
        try:
            cells = compare_sides(first, second).cells()
        except FileNotFoundError:
            cells = ("", "", "", "not run yet")
        yield question, name_of(first), name_of(second), *cells


def difference(first, second):
    yield "one side", "other side", *DIFFERENCE_HEADINGS
    yield name_of(first), name_of(second), *compare_sides(first, second).cells()


def choices():
    """Outcome A decides. Outcome B stands beside it, at the rate that suits the arm by B."""
    yield (
        "class",
        "one side (rate)",
        "other side (rate)",
        "each seed (points)",
        "mean [97.5 %]",
        "verdict",
        "mean in training [97.5 %]",
    )
    for choice in outcomes.choices_to_compare(STUDIES / "choices"):
        names = [name_of(f"choices/{arm}") for arm in (choice.first, choice.second)]
        if choice in finished_choices():
            rates, difference, in_training = judged_choices()[choice]
            sides = [f"{name} ({rate:.2g})" for name, rate in zip(names, rates, strict=True)]
            yield choice.class_name, *sides, *difference.cells(), in_training.mean_cell()
        else:
            yield choice.class_name, *names, "", "", "not run yet", ""


def choice(first, second):
    """One of the comparisons of `choices`, or the same with its sides exchanged."""
    yield "one side", "other side", "each seed (points)", "mean [97.5 %]", "verdict", "in training"
    names = [name_of(f"choices/{arm}") for arm in (first, second)]
    for choice, (_, difference, in_training) in judged_choices().items():
        if (choice.first, choice.second) == (first, second):
            yield *names, *difference.cells(), in_training.mean_cell()
        if (choice.first, choice.second) == (second, first):
            yield *names, *difference.reversed().cells(), in_training.reversed().mean_cell()


def finished_choices():
    """The comparisons whose arms have all their runs of the first look."""
    folder = STUDIES / "choices"
    finished = []
    for choice in outcomes.choices_to_compare(folder):
        arms = (choice.first, choice.second)
        if all(outcomes.num_finished_seeds(folder, arm) == 5 for arm in arms):
            finished.append(choice)
    return finished


def judged_choices():
    """{comparison: the rates of its two arms, their difference by outcome A and by outcome B}"""
    choices = finished_choices()
    arms = {}
    arms_in_training = {}
    for arm in {arm for choice in choices for arm in (choice.first, choice.second)}:
        folder = STUDIES / "choices"
        arms[arm] = outcomes.arm_at_its_best_rate(folder, arm, outcomes.outcome_on_validation)
        arms_in_training[arm] = outcomes.arm_at_its_best_rate(
            folder, arm, outcomes.outcome_in_training
        )
    differences = outcomes.compare_arms(choices, arms)
    differences_in_training = outcomes.compare_arms(choices, arms_in_training)
    judged = {}
    for i, choice in enumerate(choices):
        rates = (arms[choice.first].rate, arms[choice.second].rate)
        judged[choice] = (rates, differences[i], differences_in_training[i])
    return judged


def response(*arms):
    """How outcome A of the arms of `choices` depends on the learning rate."""
    yield "arm", "rates", "mean of the seeds at each", "best rate", "mean there", "each seed there"
    folder = STUDIES / "choices"
    for name in arms:
        if outcomes.num_finished_seeds(folder, name) < 5:
            continue
        arm = outcomes.arm_at_its_best_rate(folder, name, outcomes.outcome_on_validation)
        by_seed = list(arm.by_seed.values())
        yield (
            name_of(f"choices/{name}"),
            ", ".join(f"{rate:.3g}" for rate in arm.means),
            ", ".join(f"{mean:.1f}" for mean in arm.means.values()),
            f"{arm.rate:.2g}",
            f"{np.mean(by_seed):.1f}",
            ", ".join(f"{value:.1f}" for value in by_seed),
        )


def rates(*studies):
    runs_by_side = {}  # {side: {learning rate: run}}
    for study in studies:
        runs_of_study = sorted((STUDIES / study).glob("*_rate*_seed0"))
        if not runs_of_study:
            raise FileNotFoundError(f"{study}: no runs *_rate*_seed0 in {STUDIES / study}")
        for run in runs_of_study:
            arm = run.name.split("_rate")[0]
            runs = runs_by_side.setdefault(f"{run.parent.name}/{arm}", {})
            runs[learning_rate_of(run)] = run
    all_rates = sorted(set().union(*runs_by_side.values()), key=float)
    yield "side", *all_rates
    for side, runs in runs_by_side.items():
        best_rate = learning_rate_of(best_run(runs.values()))
        cells = {rate: percent(final_accuracy(run)) for rate, run in runs.items()}
        cells[best_rate] = f"**{cells[best_rate]}**"
        yield name_of(side), *(cells.get(rate, "") for rate in all_rates)


def ends(*sides):
    keys = ("flexible", "tokens", "careful", "careful_right", "direct_right")
    yield "side", "rate", "strict, each seed [95 %]", "mean", *map(key_heading, keys)
    for side in sides:
        runs = runs_of(side)
        rows = [evaluation_on_test(run) for run in runs]
        accuracies = [measure(row, "strict") for row in rows]
        strict = ", ".join(percent_with_interval(value, rows[0]["n"]) for value in accuracies)
        cells = []
        for key in keys:
            cells.append(", ".join(measure_cell(row, key) for row in rows))
        yield name_of(side), learning_rate_of(runs[0]), strict, percent(np.mean(accuracies)), *cells


def curve(key, *sides):
    if key not in MEASURES:
        raise ValueError(f"curve {key}: the key is none of {', '.join(MEASURES)}")
    cells_of_side = {}
    for side in sides:
        cells_of_side[side] = []
        for run in runs_of(side):
            rows = evaluations_of(run / "answers.jsonl")
            cells_of_side[side].append({row["step"]: measure_cell(row, key) for row in rows})
    yield from table_by_iteration(key_heading(key), cells_of_side)


def evaluations(key, *sides):
    cells_of_side = {}
    for side in sides:
        cells_of_side[side] = []
        for run in runs_of(side):
            rows = read(run / "eval_log.jsonl", ("step", key))
            cells_of_side[side].append({row["step"]: mean_cell([row], key) for row in rows})
    yield from table_by_iteration(key, cells_of_side)


def table_by_iteration(heading, cells_of_side):
    """A row for each side, from {side: one {iteration: cell} for each seed}."""
    all_cells = itertools.chain.from_iterable(cells_of_side.values())
    iterations = sorted(set().union(*all_cells))
    yield f"{heading}, each seed, at", *map(str, iterations)
    for side, cells_of_seeds in cells_of_side.items():
        cells = []
        for iteration in iterations:
            seeds = [by_iteration.get(iteration) for by_iteration in cells_of_seeds]
            cells.append(", ".join(cell for cell in seeds if cell is not None))
        yield name_of(side), *cells


def levels(*sides):
    keys = [f"accuracy_level/{level}" for level in LEVELS]
    yield "side", *(f"level {level}" for level in LEVELS)
    for side in sides:
        logs = [read(run / "eval_log.jsonl", tuple(keys)) for run in runs_of(side)]
        cells = []
        for key in keys:
            ends = [f"{percent(log[0][key])} -> {percent(log[-1][key])}" for log in logs]
            cells.append(", ".join(ends))
        yield name_of(side), *cells


def expected(*sides):
    """The accuracy that there would be if nothing but wrong steps could make an answer wrong.

    A problem of level k is solved in k steps. If each step is right with the chance p,
    independently of the others, all of them are right with the chance p^k. Here p is the share of
    all the steps that is right, and the levels have equal shares of the problems, as they nearly
    have on validation. A step is right if its result is right for the numbers in it, even if the
    problem asks for other numbers.

    All values are means over the seeds, on validation.
    """
    headings = [f"level {level}, expected" for level in LEVELS]
    yield "side and iteration", "steps, right", *headings, "strict, expected", "strict"
    for side in sides:
        seeds = [evaluations_of(run / "answers.jsonl") for run in runs_of(side)]
        for rows in zip(*seeds, strict=True):  # the rows of one iteration
            right_steps = np.array([share_of_right_steps(row) for row in rows])
            by_level = [np.mean(right_steps**level) for level in LEVELS]
            accuracy = np.mean([measure(row, "strict") for row in rows])
            values = [np.mean(right_steps), *by_level, np.mean(by_level), accuracy]
            yield f"{name_of(side)}, {rows[0]['step']}", *map(percent, values)


def metrics(*keys_and_sides):
    return metric_table(keys_and_sides, [slice(-10, None)])


def change(*keys_and_sides):
    return metric_table(keys_and_sides, [slice(0, 5), slice(-5, None)])


def metric_table(keys_and_sides, windows):
    """The means of metrics over one or more windows of the iterations, for each seed."""
    keys, sides = split_at_dashes(keys_and_sides)
    yield "side", *keys
    for side in sides:
        runs = runs_of(side)
        cells = []
        for key in keys:
            logs = [log_with(key, run) for run in runs]
            cells.append(", ".join(window_means(log, key, windows) for log in logs))
        yield name_of(side), *cells


def split_at_dashes(keys_and_sides):
    """The keys before --, and the sides after it."""
    if "--" not in keys_and_sides[1:-1]:  # it stands after a key and before a side
        raise ValueError("the arguments are keys, then --, then sides")
    dashes = keys_and_sides.index("--")
    return keys_and_sides[:dashes], keys_and_sides[dashes + 1 :]


def log_with(key, run):
    """The rows of a run's train_log.jsonl. ValueError: no row has a number under the key."""
    path = run / "train_log.jsonl"
    rows = read(path)
    if not any(has_number(row, key) for row in rows):
        numbers = dict.fromkeys(name for row in rows for name in row if has_number(row, name))
        raise ValueError(f"{path}: no number under {key}; it has {', '.join(numbers) or 'none'}")
    return rows


def window_means(log, key, windows):
    return " -> ".join(mean_cell(log[window], key) for window in windows)


def flags_table(*keys_and_sides):
    """The values of flags; where all seeds have the same value, it stands once."""
    keys, sides = split_at_dashes(keys_and_sides)
    yield "side", *keys
    for side in sides:
        flags_of_seeds = [read_args(run / "args.json") for run in runs_of(side)]
        cells = []
        for key in keys:
            values = dict.fromkeys(str(flags_of_seed.get(key)) for flags_of_seed in flags_of_seeds)
            cells.append(", ".join(values))
        yield name_of(side), *cells


def texts(*sides):
    yield "side", "times", "of", "its most frequent text in the last evaluation"
    for side in sides:
        for name, run in named_runs(side):
            last_transcript = transcripts_of(run)[-1]
            rows = read(last_transcript, ("completion",))
            if not rows:
                raise ValueError(f"{last_transcript}: no completion in it")
            counter = Counter(row["completion"].strip() for row in rows)
            text, count = counter.most_common(1)[0]
            yield name, str(count), str(len(rows)), text_cell(text)


def completions(prompt_id, *sides):
    yield "side", "iteration", f"completion of {prompt_id}"
    for side in sides:
        for name, run in named_runs(side):
            for transcript in transcripts_of(run):
                rows = read(transcript, ("id", "completion"))
                found = [row["completion"] for row in rows if row["id"] == prompt_id]
                if not found:
                    raise ValueError(f"{transcript}: no completion of {prompt_id}")
                yield name, iteration_of(transcript), text_cell(found[0])


def planning(*sides):
    """How many answers are right if each of their steps is, to problems of several steps.

    A step is right if its result is right for the numbers in it. So an answer whose steps are all
    right is wrong if the steps are not those that the problem needs, or have wrong numbers.
    """
    yield "side and iteration", "answers with all steps right", "of these right"
    for side in sides:
        for name, run in named_runs(side):
            for transcript in transcripts_of(run):
                num_answers = 0
                num_right = 0
                for row in read(transcript, ("level", "completion", "correct_flexible")):
                    steps = checked_steps(row["completion"])
                    if row["level"] > 1 and steps and all(is_right for _, is_right in steps):
                        num_answers += 1
                        num_right += row["correct_flexible"]
                row_name = f"{name}, {iteration_of(transcript)}"
                yield row_name, str(num_answers), str(num_right)


def iteration_of(transcript):
    return str(int(transcript.stem.removeprefix("step_")))


def transcripts_of(run):
    """The files with the completions of each evaluation, in the order of the evaluations."""
    # The numbers in the names are zero-padded, so that the last name has the last step.
    transcripts = sorted(run.glob("eval/step_*.jsonl"))
    if not transcripts:
        raise FileNotFoundError(f"{run}: no transcripts eval/step_*.jsonl in it")
    return transcripts


def solutions(name):
    """Solutions by generate_gold.py, by whether they are right and have the required format.

    careful    of their steps that can be split into easier pieces, the share that is written with
               them
    """
    yield "solutions", "number", "share [95 %]", "with steps", "with one step", "careful"
    rows_of_kind = {"right, in the format": [], "wrong, in the format": [], "not in the format": []}
    rows = read(STUDIES / name, ("completion", "correct"))
    for row in rows:
        if not strict_format(row["completion"]):
            kind = "not in the format"
        else:
            kind = "right, in the format" if row["correct"] else "wrong, in the format"
        rows_of_kind[kind].append(row)
    for kind, rows_of_this_kind in rows_of_kind.items():
        number = len(rows_of_this_kind)
        steps_of_rows = [checked_steps(row["completion"]) for row in rows_of_this_kind]
        numbers_of_steps = [len(steps) for steps in steps_of_rows]
        num_steps = Counter(kind_of_step for steps in steps_of_rows for kind_of_step, _ in steps)
        num_hard_steps = num_steps["careful"] + num_steps["direct"]
        yield (
            kind,
            str(number),
            percent_with_interval(number / len(rows), len(rows)),
            str(sum(number_of_steps > 0 for number_of_steps in numbers_of_steps)),
            str(numbers_of_steps.count(1)),
            percent(num_steps["careful"] / num_hard_steps) if num_hard_steps else "none",
        )


def format_and_answer(category):
    """["1", "0"] for format1_answer0: the required format, but no right answer."""
    return re.findall(r"\d", category)


def categories(*sides):
    headings = []
    for category in CATEGORIES:
        has_format, is_right = format_and_answer(category)
        headings.append(f"format {has_format}, answer {is_right}")
    yield "side", *headings
    for side in sides:
        n, counts = category_counts(side)
        cells = [f"{percent_with_interval(count / n, n)} ({count})" for count in counts]
        yield name_of(side), *cells


def category_counts(side):
    """The number of completions of the last evaluation, and how many are in each of CATEGORIES."""
    path = runs_of(side)[0] / "eval_log.jsonl"
    count_keys = [f"count/{name}" for name in CATEGORIES]
    rows = read(path, ("n", *count_keys))
    if not rows:
        raise ValueError(f"{path}: no evaluation in it")
    return rows[-1]["n"], [rows[-1][key] for key in count_keys]


def cases(name):
    yield "format, answer", "question", "completion", "gold"
    for row in read(STUDIES / name, ("category", "question", "completion", "gold")):
        category = ", ".join(format_and_answer(row["category"]))
        yield category, row["question"], text_cell(row["completion"]), row["gold"]


def judge(*reports):
    """What judges/judge_report.py measured: how a judge scores stories.

    spread         the mean standard deviation of the scores within a group of stories
    with length    the rank correlation between a story's score and its number of words
    """
    yield "report", "stories", "spread", "with length"
    for name in reports:
        report = read_judge_report(name)
        spread = f"{report['spread']:.3f}"
        yield name, str(report["stories"]), spread, f"{report['length_correlation']:+.2f}"


def damages(*reports):
    """What judges/judge_report.py measured: how a judge scores damaged copies of stories.

    AUC            the chance that a story scores higher than a damaged copy of any story
    with floor     the same, where copies that break the evaluator's rules count as the lowest
    pairs          the share of stories that score higher than their own copy
    """
    yield "report and damage", "AUC [95 %]", "with floor", "pairs"
    for name in reports:
        report = read_judge_report(name)
        for damage in DAMAGES:
            interval = f"[{report[f'auc_low/{damage}']:.3f}, {report[f'auc_high/{damage}']:.3f}]"
            yield (
                f"{name}, {damage}",
                f"{report[f'auc/{damage}']:.3f} {interval}",
                f"{report[f'auc_total/{damage}']:.3f}",
                percent(report[f"pairs/{damage}"]),
            )


def read_judge_report(name):
    path = STUDIES / name
    report = jsonl.parse(path.read_bytes(), path)
    if not all(f"pairs/{damage}" in report for damage in DAMAGES):
        raise ValueError(f"{path}: not the report of a judge")
    return report


def pass_(*sides):
    ks = (1, 2, 4, 8, 16)
    yield "side", *(f"pass@{k}" for k in ks), "pass@16, flexible"
    for side in sides:
        for seed, run in enumerate(runs_of(side)):
            row = evaluation_on_test(run, "pass.jsonl")
            samples = row["samples"]
            num_questions = row["n"] // samples
            num_strict = correct_answers(row, "strict").sum(1).tolist()  # for each question
            num_flexible = correct_answers(row, "flexible").sum(1).tolist()
            strict = [pass_at_k(num_strict, samples, k) for k in ks]
            cells = [percent_with_interval(value, num_questions) for value in strict]
            flexible = percent(pass_at_k(num_flexible, samples, 16))
            yield f"{name_of(side)}, seed {seed}", *cells, flexible


def exchange(grpo, *sides):
    """The first iteration at which GRPO is as accurate as a side after its training.

    Both accuracies are on validation, and GRPO's is averaged over seeds. The interval is a
    bootstrap that draws questions. Shapes: S seeds, E evaluations, Q questions, D draws; the first
    draw is the sample itself.

    The iterations per example are an upper bound (<) if GRPO is there at its first evaluation after
    the start, and a lower bound (>) if it never gets there.
    """
    yield (
        "side",
        "validation",
        "GRPO iterations to it [95 %, questions]",
        "by GRPO's seed",
        "iterations per example",
    )
    steps, answers = answers_by_step(grpo)  # (E,), (S, E, Q)
    num_questions = answers.shape[2]
    uniform = np.full(num_questions, 1 / num_questions)
    drawn_counts = np.random.default_rng(0).multinomial(num_questions, uniform, 2_000)
    weights = np.concatenate([np.ones((1, num_questions)), drawn_counts]) / num_questions  # (D, Q)
    mean_curves = rising(weights @ answers.mean(0).T)  # (D, E)
    seed_curves = rising(answers.mean(2))  # (S, E)
    for side in sides:
        side_ends = last_answers(side, grpo)  # (seeds of the side, Q)
        levels = weights @ side_ends.mean(0)  # (D,)
        crossings = [
            iteration_that_reaches(level, steps, mean_curve)
            for level, mean_curve in zip(levels, mean_curves, strict=True)
        ]
        # "nearest" takes one of the draws. Other methods interpolate, which fails next to infinity.
        low, high = np.quantile(crossings, [0.025, 0.975], method="nearest")
        interval = f"[{iteration_cell(low)}, {iteration_cell(high)}]"
        by_seed = [
            iteration_that_reaches(side_ends.mean(), steps, seed_curve)
            for seed_curve in seed_curves
        ]
        yield (
            name_of(side),
            percent(side_ends.mean()),
            f"{iteration_cell(crossings[0])} {interval}",
            ", ".join(map(iteration_cell, by_seed)),
            per_example_cell(crossings[0], steps, num_examples(runs_of(side)[0])),
        )


def answers_by_step(side):
    """The iterations at which a side was evaluated, and its answers: (E,), (S, E, Q).

    Raises:
        ValueError: its seeds were not evaluated at the same iterations.
    """
    evaluations = [evaluations_of(run / "answers.jsonl") for run in runs_of(side)]
    steps_by_seed = [[row["step"] for row in rows] for rows in evaluations]
    if any(steps != steps_by_seed[0] for steps in steps_by_seed):
        raise ValueError(f"{side}: its seeds were not evaluated at the same iterations")
    answers = []
    for rows in evaluations:
        answers.append([correct_answers(row)[:, 0] for row in rows])
    return steps_by_seed[0], np.array(answers)


def last_answers(side, grpo):
    """The answers of a side in its last evaluation: (seeds of the side, Q).

    Raises:
        ValueError: these are not the questions that the side `grpo` answered.
    """
    questions = evaluations_of(runs_of(grpo)[0] / "answers.jsonl")[0]["questions"]
    last_rows = [evaluations_of(run / "answers.jsonl")[-1] for run in runs_of(side)]
    if any(row["questions"] != questions for row in last_rows):
        raise ValueError(f"{grpo} and {side} did not answer the same questions")
    return np.array([correct_answers(row)[:, 0] for row in last_rows])


def iteration_that_reaches(level, steps, rising_curve):
    """Where a curve reaches a level, between two evaluations on a straight line; inf: never."""
    return np.interp(level, rising_curve, steps, right=np.inf)


def num_examples(run):
    """The number of examples that a run of SFT learnt from.

    Without --num_examples a run makes one epoch, so that it is the number of those it has seen.
    """
    chosen = read_args(run / "args.json")["num_examples"]
    return chosen or read(run / "train_log.jsonl")[-1]["examples"]


def per_example_cell(iterations, evaluated_steps, num_examples):
    """GRPO's iterations divided by the examples, or the bound that the evaluations give."""
    first = evaluated_steps[1]  # after the evaluation at step 0
    last = evaluated_steps[-1]
    if iterations <= first:
        return f"< {first / num_examples:.2g}"
    if iterations > last:
        return f"> {last / num_examples:.2g}"
    return f"{iterations / num_examples:.2g}"


def rising(curves):
    """The running maximum of each curve: (curves, E). Both reach a level at the same point.

    np.interp needs values that rise, so 1e-9 is added from each evaluation to the next.
    """
    return np.maximum.accumulate(curves, 1) + 1e-9 * np.arange(curves.shape[1])


def steps(*sides):
    """How far the accuracy of a side follows from its steps.

    A hard step can be split into easier pieces, and it counts however it is written. All others are
    easy. Expected is the accuracy if the steps of an answer were right independently of each other.
    The counts of all seeds are added up.
    """
    yield (
        "side",
        "answers with steps",
        "hard steps in an answer",
        "hard, right",
        "easy steps in an answer",
        "easy, right",
        "expected",
        "strict",
    )
    for side in sides:
        rows = [evaluation_on_test(run) for run in runs_of(side)]
        counts = {}  # {kind of step: (the number of right ones, the number of all)}
        for kind in ("easy", "direct", "careful"):
            counts[kind] = np.sum([row[kind] for row in rows], 0)
        num_right, num_hard = counts["direct"] + counts["careful"]
        num_easy_right, num_easy = counts["easy"]
        with_steps = sum(row["with_steps"] for row in rows)
        hard_per_answer = num_hard / with_steps
        easy_per_answer = num_easy / with_steps
        hard_right = share(num_right, num_hard)
        easy_right = share(num_easy_right, num_easy)
        share_with_steps = with_steps / sum(row["n"] for row in rows)
        expected = share_with_steps * hard_right**hard_per_answer * easy_right**easy_per_answer
        yield (
            name_of(side),
            percent(share_with_steps),
            f"{hard_per_answer:.2f}",
            percent(hard_right),
            f"{easy_per_answer:.2f}",
            percent(easy_right),
            percent(expected),
            percent(np.mean([measure(row, "strict") for row in rows])),
        )


def evaluations_by_expert_iteration(run):
    """{expert iteration: the evaluation after it}; 0 is before the first one."""
    updates = read(run / "train_log.jsonl", ("step", "ei_step"))
    expert_iteration_of_update = {row["step"]: row["ei_step"] for row in updates}
    evaluations = {}
    for row in evaluations_of(run / "answers.jsonl"):
        evaluations[expert_iteration_of_update.get(row["step"], 0)] = row
    return evaluations


def updates_of_expert_iteration(run, expert_iteration):
    updates = read(run / "train_log.jsonl", ("step", "ei_step"))
    return [row for row in updates if row["ei_step"] == expert_iteration]


def expert_iterations(*sides):
    """The accuracy after each expert iteration, on validation, and what it trained on.

    kept        how many completions were right, so that it trained on them
    entropy     of the policy at the tokens of what was kept, in the first and in the last update,
                mean over seeds; before the first update it is the policy that has sampled them
    """
    yield (
        "side and expert iteration",
        "strict, each seed",
        "mean",
        "kept, each seed",
        "updates, each seed",
        "entropy",
    )
    for side in sides:
        runs = runs_of(side)
        evaluations_of_seeds = [evaluations_by_expert_iteration(run) for run in runs]
        for expert_iteration in evaluations_of_seeds[0]:
            accuracies = [
                measure(evaluations[expert_iteration], "strict")
                for evaluations in evaluations_of_seeds
            ]
            logs = [updates_of_expert_iteration(run, expert_iteration) for run in runs]
            cells = ["", "", ""]
            if all(logs):  # before training there are no updates
                first_entropy = np.mean([log[0]["entropy"] for log in logs])
                last_entropy = np.mean([log[-1]["entropy"] for log in logs])
                cells = [
                    ", ".join(str(log[0]["kept"]) for log in logs),
                    ", ".join(str(len(log)) for log in logs),
                    f"{first_entropy:.3f} -> {last_entropy:.3f}",
                ]
            strict = ", ".join(map(percent, accuracies))
            row_name = f"{name_of(side)}, {expert_iteration}"
            yield row_name, strict, percent(np.mean(accuracies)), *cells


def selection(*sides):
    """How far the share of careful steps follows from keeping right answers.

    All are means over the seeds, of greedy answers on validation.

    careful     of the hard steps, the share that is careful
    expected    the same share among the hard steps that were right one evaluation before. So it is
                what a model would write that does just what it is shown.
    """
    yield "side and expert iteration", "careful, right", "direct, right", "careful", "expected"
    for side in sides:
        evaluations_of_seeds = [evaluations_by_expert_iteration(run) for run in runs_of(side)]
        expected_cell = ""
        for expert_iteration in evaluations_of_seeds[0]:
            rows = [evaluations[expert_iteration] for evaluations in evaluations_of_seeds]
            cells = []
            for key in ("careful_right", "direct_right", "careful"):
                mean = np.mean([measure(row, key) for row in rows])
                cells.append("none" if np.isnan(mean) else percent(mean))
            yield f"{name_of(side)}, {expert_iteration}", *cells, expected_cell
            expected_cell = percent(np.mean([careful_share_of_right_steps(row) for row in rows]))


def careful_share_of_right_steps(row):
    num_careful = row["careful"][0]
    num_direct = row["direct"][0]
    return share(num_careful, num_careful + num_direct)


# How a GRPO run ended, in the order of the columns of `diagnose_table`.
KINDS_OF_RUNS = ("made to go wrong", "failed otherwise", "in between", "healthy")


def kind_of_run(name, evaluations):
    """How a run ended, by its validation accuracy; None for a run that does not count.

    failed otherwise    it ends 5 points or more below its own best, or less than 5 above its start
                        (unless that is over 80 %)
    healthy             it did not fail, and ends at 70 % or more
    in between          all others: they rise and stay low
    """
    if name.startswith(NOT_COUNTED):
        return None
    if name.startswith(MADE_TO_GO_WRONG):
        return "made to go wrong"
    accuracies = [row["accuracy"] for row in evaluations]
    first = accuracies[0]
    last = accuracies[-1]
    has_fallen = last <= max(accuracies) - 0.05
    has_not_risen = first < 0.8 and last < first + 0.05
    if has_fallen or has_not_risen:
        return "failed otherwise"
    return "healthy" if last >= 0.7 else "in between"


def grpo_runs():
    """Yield (kind of run, its Logs) for every GRPO run that counts."""
    for path in sorted(STUDIES.glob("*/**/train_log.jsonl")):
        run = path.parent
        rows = read(path)
        is_grpo = "zero_std_fraction" in rows[-1]
        if is_grpo:
            evaluations = read(run / "eval_log.jsonl")
            kind = kind_of_run(run.relative_to(STUDIES).as_posix(), evaluations)
            if kind:
                yield kind, Logs(rows, evaluations, read_args(run / "args.json"))


def rules_that_warn_in_training(logs):
    """The names of the rules that would have warned during a run."""
    guard = Guard(max_kl=np.inf)
    guard.set_flags(logs.flags)
    for step, metrics_of_step in enumerate(logs.train, 1):
        guard.logs.evaluations = [row for row in logs.evaluations if row["step"] < step]
        guard.check(metrics_of_step)
    guard.logs.evaluations = logs.evaluations
    guard.new_warnings()
    return guard.rules_that_warned


def diagnose_table():
    """A row for each rule and one for any of them; notes do not count."""
    num_runs = Counter()
    num_warned = Counter()  # of (rule, kind of run); "in training" is one more kind
    for kind, logs in grpo_runs():
        num_runs[kind] += 1
        findings = diagnose(logs).findings
        warned = {finding.rule for finding in findings if finding.severity == WARNING}
        warned_by_kind = {kind: warned}
        if kind == "healthy":
            warned_by_kind["in training"] = rules_that_warn_in_training(logs)
        for column, names in warned_by_kind.items():
            for name in {*names, "any"} if names else ():
                num_warned[name, column] += 1
    headings = [f"{kind} ({num_runs[kind]} runs)" for kind in KINDS_OF_RUNS]
    yield "rule", "condition", "what to change", *headings, "healthy, in training"
    columns = (*KINDS_OF_RUNS, "in training")
    for rule in RULES:
        counts = [str(num_warned[rule.name, column]) for column in columns]
        yield rule.name, rule.condition, rule.advice, *counts
    yield "any of these", "", "", *(str(num_warned["any", column]) for column in columns)


# --- The pages ------------------------------------------------------------------------------------

# Their sentences do not name the sources of their numbers yet.
STUDIES_WITHOUT_SOURCES = (
    "baseline",
    "beta",
    "family",
    "groups",
    "length",
    "off_policy",
    "prompts",
    "std",
)


def rows_of(command):
    """The headings and the rows of the table that "NAME ARGUMENTS" prints.

    Raises:
        ValueError: the table takes other arguments, or has no rows.
    """
    name, *arguments = command.split()
    if name not in TABLES:
        raise ValueError(f"{command}: {name} is none of {', '.join(TABLES)}")
    try:
        inspect.signature(TABLES[name]).bind(*arguments)
    except TypeError as error:
        raise ValueError(f"{command}: {error}") from None
    head, *rows = TABLES[name](*arguments)
    if not rows:
        raise ValueError(f"{command}: the table has no rows")
    return head, *rows


def table(command):
    """The markdown that "NAME ARGUMENTS" prints. Raises ValueError, as `rows_of` does."""
    head, *rows = rows_of(command)
    return markdown.table(head, rows) + "\n"


def check(*flags):
    """Check that the pages say what the logs say, and that runs are what their names say.

    With --write, the tables and the numbers of today are written into the pages.

    Raises:
        ValueError: something is not as the logs say. The message has a line for each problem.
    """
    checked = [
        ROOT / "analysis.md",
        *ROOT.glob("README.md"),
        *ROOT.glob("docs/tuning.md"),
        *STUDIES.glob("comparisons.md"),
        *sorted(STUDIES.glob("*/README.md")),
    ]
    old_pages = [STUDIES / name / "README.md" for name in STUDIES_WITHOUT_SOURCES]
    problems = pages.check(checked, cache(rows_of), ROOT, "--write" in flags, old_pages)
    problems += misnamed_runs()
    if problems:
        raise ValueError("\n".join(problems))
    print(f"{len(checked)} pages say what the logs say")


def misnamed_runs():
    """The runs whose names give another learning rate or seed than their args.json."""
    problems = []
    for path in sorted(STUDIES.glob("*/*/args.json")):
        name = path.parent.name
        flags = read_args(path)
        for key, pattern in (("learning_rate", r"_rate([^_]+)"), ("seed", r"_seed(\d+)")):
            said = re.search(pattern, name)
            if said and key in flags and float(said[1]) != flags[key]:
                problems.append(f"{path}: {key} is {flags[key]}")
    return problems


TABLES = {
    "compare": compare,
    "difference": difference,
    "choices": choices,
    "choice": choice,
    "response": response,
    "rates": rates,
    "ends": ends,
    "curve": curve,
    "evaluations": evaluations,
    "levels": levels,
    "expected": expected,
    "metrics": metrics,
    "change": change,
    "flags": flags_table,
    "texts": texts,
    "completions": completions,
    "planning": planning,
    "solutions": solutions,
    "judge": judge,
    "damages": damages,
    "categories": categories,
    "cases": cases,
    "pass": pass_,
    "exchange": exchange,
    "steps": steps,
    "expert_iterations": expert_iterations,
    "selection": selection,
    "diagnose": diagnose_table,
}


def main(name="", *arguments):
    if name == "best":  # the best learning rate of some runs, for the scripts of the studies
        runs = [Path(argument) for argument in arguments]
        print(learning_rate_of(best_run(runs)))
    elif name == "check":
        if arguments not in ((), ("--write",)):
            raise ValueError(f"check takes --write or nothing, not {' '.join(arguments)}")
        check(*arguments)
    elif name in TABLES:
        print(table(" ".join([name, *arguments])), end="")
    else:
        raise ValueError(
            f"{name or 'nothing'} is none of check [--write], best, {', '.join(TABLES)}"
        )


if __name__ == "__main__":
    try:
        archive.unpack_all()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        main(*sys.argv[1:])
    except (ValueError, OSError, LookupError) as error:
        print(f"error: {error} (the head of table.py shows what it takes)", file=sys.stderr)
        sys.exit(2)
