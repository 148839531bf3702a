"""The tables of the studies, made from their logs: the source of every number in analysis.md.

    python experiments/table.py check [--write]
        check that analysis.md, docs/tuning.md and the studies' README.md say what the logs say, in
        their tables and in their sentences (pages.py); --write puts right what differs
    python experiments/table.py compare rates sft
        for each comparison in comparisons.txt: how far apart its two sides are, and whether the
        difference is significant
    python experiments/table.py difference dynamics/grpo dynamics/format
        the same for any two sides
    python experiments/table.py rates rates sft
        validation accuracy at each learning rate that was tried
    python experiments/table.py ends rates/base sft/careful100
        accuracy on the test problems, length, and how steps are written, after training
    python experiments/table.py curve careful rates/base
        one measure by iteration, on validation: strict, flexible, tokens, careful, ...
    python experiments/table.py evaluations reward rates/base
        one number of eval_log.jsonl by iteration, on validation: reward, elapsed, ...
    python experiments/table.py reach 80 dynamics/grpo
        the iteration at which accuracy on validation first is 80 %
    python experiments/table.py averages noise/no_errors_rate2e-4
        the mean accuracy over all evaluations after iteration 0, on validation, of this side and of
        the others of its study, and how far they are from the first one
    python experiments/table.py levels scaling/0.3m dynamics/grpo
        accuracy on validation by the number of steps of the problem, before and after training
    python experiments/table.py expected scaling/0.3m dynamics/grpo
        the accuracy on validation that the share of right steps leads one to expect, if a problem
        takes as many steps as its level says
    python experiments/table.py metrics entropy kl -- rates/base
        means over the last 10 iterations of train_log.jsonl
    python experiments/table.py change entropy kl -- rates/base
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
    python experiments/table.py operators rare/careful0_before
        for each operator, how many hard steps are careful, and how many of each kind are right
    python experiments/table.py exchange exchange/grpo sft/direct10
        the number of GRPO iterations that reach the accuracy at which SFT ends, in all and for each
        example of SFT
    python experiments/table.py steps sft/direct10 sft/careful10
        the accuracy that the share of right steps leads one to expect, if a problem takes as many
        easy and hard steps as the answers have
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
    python experiments/table.py arms entropy kl -- base no_std
        the accuracy of its arms on validation, and means over the first 5 and over the last 5
        iterations of train_log.jsonl
    python experiments/table.py spread grad_norm -- base no_std
        how much metrics of its arms vary from iteration to iteration
    python experiments/table.py entropy
        how far accuracy goes with entropy in the runs of `choices`
    python experiments/table.py entropy_line choices/base dynamics/format
        how far sides are from the line of entropy.py in their last evaluation
    python experiments/table.py forgotten dynamics/before dynamics/grpo
        how many of the test problems that were right before training are wrong after it
    python experiments/table.py sampled dynamics/grpo
        accuracy of sampled completions beside that of greedy answers, by iteration
    python experiments/table.py diagnose [STUDY]
        the rules of logs/diagnose.py, and in how many GRPO runs of each kind they warn: of the runs
        that the rules were made on, or of one study

A side of a comparison is STUDY/ARM. Its runs are the folders ARM_seed0, ARM_seed1, ... of that
study. If several learning rates were tried, the runs are those at the rate that ends best on
validation. names.json has the names that the sides have on the pages.
Accuracies are strict, in %, and of greedy answers to the 2,000 test problems, unless a table says
something else. The program first unpacks the archives of the studies (experiments/archive.py).
"""

import inspect
import itertools
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from data.word_problems import OPERATORS  # noqa: E402
from experiments import archive, differences, entropy, outcomes, pages, paired, study_logs  # noqa: E402
from experiments.answers import (  # noqa: E402
    checked_steps,
    correct_answers,
    steps_with_operators,
)
from experiments.study_logs import (  # noqa: E402
    DAMAGES,
    KINDS_OF_RUNS,
    LEVELS,
    MEASURES,
    measure,
    name_of,
    named_runs,
    runs_of,
    share,
)
from grading.extraction import strict_format  # noqa: E402
from logs import markdown  # noqa: E402
from logs.diagnose import RULES, WARNING, diagnose  # noqa: E402
from logs.read import has_number, read_args  # noqa: E402
from logs.statistics import CATEGORIES, pass_at_k, wilson_interval  # noqa: E402
from training.signals import Guard  # noqa: E402

# The functions of this file that end in `_table` yield the headings of a table, and then its rows.


# --- Cells ----------------------------------------------------------------------------------------


def percent(value):
    return f"{100 * value:.1f}"


def percent_with_interval(value, n):
    """A share of n answers in %, with Wilson's 95 % interval."""
    low, high = wilson_interval(value * n, n)
    return f"{percent(value)} [{percent(low)}, {percent(high)}]"


def measure_cell(summary, key):
    value = measure(summary, key)
    if np.isnan(value):
        return "none"
    return f"{value:.0f}" if key == "tokens" else percent(value)


def mean_cell(rows, key):
    """The mean of a number over rows of a log; rows without the number do not count."""
    values = [row[key] for row in rows if has_number(row, key)]
    return f"{np.mean(values):.3g}" if values else "none"


def text_cell(text):
    """A completion on one line, in which |, <, > and ` are escaped for markdown.

    A line break becomes an arrow. A slash would look like a division.
    """
    escaped = re.sub(r"[|<>`]", lambda match: f"&#{ord(match[0])};", text.strip())
    return escaped.replace("\n", " ↵ ")


def key_heading(key):
    """The heading "careful, right" for the key careful_right; other keys stay as they are."""
    return key.replace("_", ", ")


# --- Two sides compared ---------------------------------------------------------------------------

DIFFERENCE_HEADINGS = ("each seed (points)", "mean [95 %]", "detectable", "verdict")


def compare_table(*studies):
    yield "question", "one side", "other side", *DIFFERENCE_HEADINGS
    for question, first, second in differences.comparisons_of(studies):
        try:
            cells = differences.compare_sides(first, second).cells()
        except FileNotFoundError:
            cells = ("", "", "", "not run yet")
        yield question, name_of(first), name_of(second), *cells


def difference_table(first, second):
    yield "one side", "other side", *DIFFERENCE_HEADINGS
    yield name_of(first), name_of(second), *differences.compare_sides(first, second).cells()


def choices_table():
    """Outcome A decides. Outcome B stands beside it, at the rate that suits the arm by B."""
    yield (
        "class",
        "one side (rate)",
        "other side (rate)",
        "each seed (points)",
        "mean [97.5 %]",
        "verdict",
        "outcome B [97.5 %]",
    )
    folder = study_logs.STUDIES / "choices"
    judged_choices = outcomes.judged_choices(folder)
    for choice in outcomes.choices_to_compare(folder):
        first = name_of(f"choices/{choice.first}")
        second = name_of(f"choices/{choice.second}")
        if choice not in judged_choices:
            yield choice.class_name, first, second, "", "", "not run yet", ""
            continue
        judged = judged_choices[choice]
        yield (
            choice.class_name,
            f"{first} ({outcomes.rate_text(judged.first_rate)})",
            f"{second} ({outcomes.rate_text(judged.second_rate)})",
            *judged.on_validation.cells(),
            judged.in_training.mean_cell(),
        )


def choice_table(first, second):
    """One of the comparisons of `choices`, or the same with its sides exchanged."""
    yield "one side", "other side", "each seed (points)", "mean [97.5 %]", "verdict", "in training"
    names = (name_of(f"choices/{first}"), name_of(f"choices/{second}"))
    judged_choices = outcomes.judged_choices(study_logs.STUDIES / "choices")
    for choice, judged in judged_choices.items():
        arms = (choice.first, choice.second)
        if arms == (first, second):
            yield *names, *judged.on_validation.cells(), judged.in_training.mean_cell()
        if arms == (second, first):
            on_validation = judged.on_validation.reversed()
            in_training = judged.in_training.reversed()
            yield *names, *on_validation.cells(), in_training.mean_cell()


def response_table(*arms):
    """How outcome A of the arms of `choices` depends on the learning rate.

    The means are over the seeds of the first look. An arm of the second look has more seeds.
    """
    yield (
        "arm",
        "rates",
        "mean of the first four seeds at each",
        "best rate",
        "their mean at the best rate",
        "each seed at the best rate",
    )
    folder = study_logs.STUDIES / "choices"
    for name in arms:
        arm = outcomes.arm_at_its_best_rate(folder, name)
        of_first_seeds = [arm.by_seed[seed] for seed in outcomes.FIRST_SEEDS]
        yield (
            name_of(f"choices/{name}"),
            ", ".join(map(outcomes.rate_text, arm.means)),
            ", ".join(f"{mean:.1f}" for mean in arm.means.values()),
            outcomes.rate_text(arm.rate),
            f"{np.mean(of_first_seeds):.1f}",
            ", ".join(f"{value:.1f}" for value in arm.by_seed.values()),
        )


def arms_table(*keys_and_arms):
    """Arms of `choices`, each at that of its learning rates which is nearest to its best one.

    All are means over the seeds of the first look. A cell is "none -> none" if the arm does not log
    the metric, as without a KL divergence.

    A                outcome A of PROTOCOL.md: the mean accuracy after iteration 0
    at 60, careful   the accuracy and the share of careful steps of the last evaluation

    Raises:
        ValueError: none of the arms logs a metric.
    """
    keys, names = split_at_dashes(keys_and_arms)
    yield "arm", "rate", "A", "at 60", "careful", *keys
    folder = study_logs.STUDIES / "choices"
    logged_keys = set()
    for name in names:
        arm = outcomes.arm_at_its_best_rate(folder, name)
        runs = outcomes.runs_at_nearest_rate(folder, arm)
        summaries = [study_logs.read_summaries(run / "answers.jsonl")[-1] for run in runs]
        logs = [study_logs.read(run / "train_log.jsonl") for run in runs]
        first_rows = list(itertools.chain.from_iterable(rows[:5] for rows in logs))
        last_rows = list(itertools.chain.from_iterable(rows[-5:] for rows in logs))
        cells = [f"{mean_cell(first_rows, key)} -> {mean_cell(last_rows, key)}" for key in keys]
        logged_keys.update(key for key in keys if any(has_number(row, key) for row in last_rows))
        yield (
            name_of(f"choices/{name}"),
            outcomes.rate_text(arm.nearest_rate),
            f"{arm.means[arm.nearest_rate]:.1f}",
            percent(np.mean([measure(summary, "strict") for summary in summaries])),
            percent(np.mean([measure(summary, "careful") for summary in summaries])),
            *cells,
        )
    for key in keys:
        if key not in logged_keys:
            raise ValueError(f"no arm has a number under {key} in train_log.jsonl")


def spread_table(*keys_and_arms):
    """How steady metrics of training are from iteration 21 on, in arms of `choices`.

    It is the standard deviation over the iterations divided by the mean, for each seed of the first
    look, each arm at that of its learning rates which is nearest to its best one.
    """
    keys, names = split_at_dashes(keys_and_arms)
    yield "arm", *keys
    folder = study_logs.STUDIES / "choices"
    for name in names:
        arm = outcomes.arm_at_its_best_rate(folder, name)
        cells = []
        for key in keys:
            spreads = []
            for run in outcomes.runs_at_nearest_rate(folder, arm):
                values = [row[key] for row in study_logs.training_rows(run, key)[20:]]
                spreads.append(np.std(values, ddof=1) / np.mean(values))
            cells.append(", ".join(f"{spread:.2f}" for spread in spreads))
        yield name_of(f"choices/{name}"), *cells


def exchange_table(grpo, *sides):
    """The first iteration at which GRPO is as accurate as a side after its training.

    Both accuracies are on validation. The first iteration is that of the mean over GRPO's seeds. It
    is a bound if GRPO is there at its first evaluation after the start (<), or never (>).
    """
    yield "side", "validation", "GRPO iterations", "by GRPO's seed", "iterations per example"
    evaluated_steps, _ = study_logs.answers_by_step(grpo)
    for side in sides:
        exchange = differences.exchange_for_grpo(side, grpo)
        num_examples = study_logs.num_examples_of_sft(runs_of(side)[0])
        iterations = [exchange.iteration, *exchange.by_seed]
        mean_cell, *seed_cells = (iteration_cell(i, evaluated_steps) for i in iterations)
        yield (
            name_of(side),
            percent(exchange.accuracy),
            mean_cell,
            ", ".join(seed_cells),
            per_example_cell(exchange, evaluated_steps, num_examples),
        )


def iteration_cell(iteration, evaluated_steps):
    """An iteration between the first evaluation after the start and the last one, or a bound."""
    first = evaluated_steps[1]  # after the evaluation at step 0
    last = evaluated_steps[-1]
    if iteration <= first:
        return f"< {first}"
    if iteration > last:
        return f"> {last}"
    return f"{iteration:.0f}"


def per_example_cell(exchange, evaluated_steps, num_examples):
    """The iterations of GRPO divided by the examples of SFT, or a bound.

    If the mean over seeds never gets there, the seed that is there first gives the lower bound.
    """
    first = evaluated_steps[1]
    last = evaluated_steps[-1]
    if exchange.iteration <= first:
        return f"< {first / num_examples:.2g}"
    if exchange.iteration > last:
        earliest = min(*exchange.by_seed, last)
        return f"> {earliest / num_examples:.2g}"
    return f"{exchange.iteration / num_examples:.2g}"


# --- Accuracy, length and steps -------------------------------------------------------------------


def rates_table(*studies):
    """Accuracy on validation of seed 0 at each rate, with the best one in bold."""
    runs_of_side = {}  # {side: {learning rate: run}}
    for study in studies:
        runs_of_side |= study_logs.runs_by_rate(study)
    all_rates = sorted(set().union(*runs_of_side.values()), key=float)
    yield "side", *all_rates
    for side, runs in runs_of_side.items():
        best_rate = study_logs.learning_rate_of(study_logs.best_run(runs.values()))
        cells = {rate: percent(study_logs.final_accuracy(run)) for rate, run in runs.items()}
        cells[best_rate] = f"**{cells[best_rate]}**"
        yield name_of(side), *(cells.get(rate, "") for rate in all_rates)


def ends_table(*sides):
    keys = ("flexible", "tokens", "careful", "careful_right", "direct_right")
    yield "side", "rate", "strict, each seed [95 %]", "mean", *map(key_heading, keys)
    for side in sides:
        runs = runs_of(side)
        rate = study_logs.learning_rate_of(runs[0])
        summaries = [study_logs.summary_on_test(run) for run in runs]
        num_answers = summaries[0]["n"]
        accuracies = [measure(summary, "strict") for summary in summaries]
        strict = ", ".join(percent_with_interval(value, num_answers) for value in accuracies)
        cells = []
        for key in keys:
            cells.append(", ".join(measure_cell(summary, key) for summary in summaries))
        yield name_of(side), rate, strict, percent(np.mean(accuracies)), *cells


def curve_table(key, *sides):
    if key not in MEASURES:
        raise ValueError(f"curve {key}: the key is none of {', '.join(MEASURES)}")
    cells_of_side = {}
    for side in sides:
        cells_of_side[side] = []
        for run in runs_of(side):
            summaries = study_logs.read_summaries(run / "answers.jsonl")
            cells = {summary["step"]: measure_cell(summary, key) for summary in summaries}
            cells_of_side[side].append(cells)
    yield from table_by_iteration(key_heading(key), cells_of_side)


def evaluations_table(key, *sides):
    cells_of_side = {}
    for side in sides:
        cells_of_side[side] = []
        for run in runs_of(side):
            rows = study_logs.read(run / "eval_log.jsonl", ("step", key))
            cells_of_side[side].append({row["step"]: mean_cell([row], key) for row in rows})
    yield from table_by_iteration(key, cells_of_side)


def reach_table(level, *sides):
    """The first iteration at which accuracy on validation has a level, in %.

    Between two evaluations it lies on a straight line. Of a side that is there at its first
    evaluation after iteration 0 or never, the cell is a bound.

    Raises:
        ValueError: the level is no percentage.
    """
    if not re.fullmatch(r"\d{1,2}(\.\d+)?", level):
        raise ValueError(f"reach {level}: not a percentage, such as 80")
    yield "side", f"iteration at {level} %, each seed", "of the mean curve"
    for side in sides:
        steps, answers = study_logs.answers_by_step(side)
        curves = answers.mean(2)  # (S, E)
        cells = []
        for curve in (*curves, curves.mean(0)):
            iteration = differences.iteration_that_reaches(float(level) / 100, steps, curve)
            cells.append(iteration_cell(iteration, steps))
        *seeds, mean = cells
        yield name_of(side), ", ".join(seeds), mean


def averages_table(reference, *sides):
    """Accuracy averaged over the evaluations after iteration 0, beside that of the first side.

    If no other sides are given, they are all others of its study that names.json names. The
    intervals are Student's, with variances pooled over the rows, and the verdicts have a correction
    for the number of rows (paired.py).
    """
    yield (
        "side",
        "averaged, each seed",
        "averaged, mean",
        "last evaluation, mean",
        f"points above {name_of(reference)} [95 %]",
        "verdict",
    )
    if not sides:
        study = reference.split("/")[0]
        sides = [side for side in study_logs.named_sides(study) if side != reference]
    averages = {}  # of a side: of each seed, in %
    ends = {}
    for side in (reference, *sides):
        _, answers = study_logs.answers_by_step(side)
        curves = 100 * answers.mean(2)  # (S, E)
        averages[side] = curves[:, 1:].mean(1)
        ends[side] = curves[:, -1].mean()
    judged = paired.judge([averages[side] - averages[reference] for side in sides])
    cells_of_side = {reference: ("", "")}
    for side, difference in zip(sides, judged, strict=True):
        cells_of_side[side] = (difference.mean_cell(), difference.verdict)
    for side, cells in cells_of_side.items():
        seeds = ", ".join(f"{average:.1f}" for average in averages[side])
        yield name_of(side), seeds, f"{averages[side].mean():.1f}", f"{ends[side]:.1f}", *cells


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


def levels_table(*sides):
    keys = tuple(f"accuracy_level/{level}" for level in LEVELS)
    yield "side", *(f"level {level}" for level in LEVELS)
    for side in sides:
        logs = [study_logs.read(run / "eval_log.jsonl", keys) for run in runs_of(side)]
        cells = []
        for key in keys:
            seeds = [f"{percent(log[0][key])} -> {percent(log[-1][key])}" for log in logs]
            cells.append(", ".join(seeds))
        yield name_of(side), *cells


def pass_table(*sides):
    ks = (1, 2, 4, 8, 16)
    yield "side", *(f"pass@{k}" for k in ks), "pass@16, flexible"
    for side in sides:
        for seed, run in enumerate(runs_of(side)):
            summary = study_logs.summary_on_test(run, "pass.jsonl")
            samples = summary["samples"]
            num_questions = summary["n"] // samples
            num_strict = correct_answers(summary, "strict").sum(1).tolist()  # for each question
            num_flexible = correct_answers(summary, "flexible").sum(1).tolist()
            strict = [pass_at_k(num_strict, samples, k) for k in ks]
            cells = [percent_with_interval(value, num_questions) for value in strict]
            flexible = percent(pass_at_k(num_flexible, samples, 16))
            yield f"{name_of(side)}, seed {seed}", *cells, flexible


def forgotten_table(before, *sides):
    """What training unlearns, among the test problems that the first side answers rightly.

    Raises:
        ValueError: a side was evaluated on other problems.
    """
    yield (
        "side",
        "accuracy after",
        "right before",
        "of these wrong after",
        "wrong after every seed",
        "wrong before",
        "of these right after",
    )
    summary_before = study_logs.summary_on_test(runs_of(before)[0])
    right_before = correct_answers(summary_before)[:, 0] == 1  # (questions,)
    for side in sides:
        right_after = []
        for run in runs_of(side):
            summary = study_logs.summary_on_test(run)
            if summary["questions"] != summary_before["questions"]:
                raise ValueError(f"{run}: not evaluated on the problems of {before}")
            right_after.append(correct_answers(summary)[:, 0] == 1)
        right_after = np.array(right_after)  # (seeds, questions)
        forgotten = right_before & ~right_after
        learnt = ~right_before & right_after
        yield (
            name_of(side),
            percent(right_after.mean()),
            str(right_before.sum()),
            ", ".join(map(str, forgotten.sum(1))),
            str(forgotten.all(0).sum()),
            str((~right_before).sum()),
            ", ".join(map(str, learnt.sum(1))),
        )


def sampled_table(*sides):
    """Strict accuracy of samples and of greedy answers, means over the seeds.

    The samples are those of the 5 iterations up to an evaluation, at temperature 1 and to problems
    of training. The greedy answers are to problems of validation.
    """
    yield "side and iteration", "samples", "greedy answers", "greedy minus samples (points)"
    for side in sides:
        runs = runs_of(side)
        logs = [study_logs.training_rows(run, "accuracy") for run in runs]
        steps, answers = study_logs.answers_by_step(side)
        for step, greedy in zip(steps[1:], answers.mean((0, 2))[1:], strict=True):
            samples = np.mean([study_logs.mean_before(log, "accuracy", step) for log in logs])
            cells = map(percent, (samples, greedy, greedy - samples))
            yield f"{name_of(side)}, {step}", *cells


# --- Entropy --------------------------------------------------------------------------------------


def entropy_table():
    """How far accuracy goes with entropy in the runs of `choices`; entropy.py says which.

    Each row has its own fits: of a line in log2(entropy), of accuracy = b - a exp(entropy), which
    is the paper's curve, and of a line in log2(iteration).
    """
    yield (
        "points",
        "number",
        "points gained for each halving of entropy",
        "R2",
        "R2 of Cui et al.",
        "R2 of the iteration alone",
        "correlation at equal iteration",
    )
    sides = entropy.sides_on_the_line()
    runs = list(itertools.chain.from_iterable(entropy.runs_of(side) for side in sides))
    of_runs = [entropy.points_of_run(run) for run in runs]
    rows = {
        f"{len(sides)} settings at their best rates, means of seeds": entropy.points_of_sides(
            sides
        ),
        f"the {len(runs)} single runs of these": entropy.together(of_runs),
        "the settings at their other rates, means of seeds": entropy.points_of_sides(
            entropy.sides_at_other_rates()
        ),
    }
    for name, points in rows.items():
        correlation = f"{points.correlation_at_equal_iteration():.2f}"
        yield name, str(len(points.accuracies)), *fit_cells([points]), correlation
    yield (
        "each single run by itself, median",
        str(len(of_runs[0].accuracies)),
        *fit_cells(of_runs),
        "",
    )


def fit_cells(sets_of_points):
    """Medians over sets of points: the slope in points, and R2 of three fits."""
    fits = []
    for points in sets_of_points:
        xs = (np.log2(points.entropies), np.exp(points.entropies), np.log2(points.iterations))
        lines = [entropy.fit_line(x, points.accuracies) for x in xs]
        fits.append((-100 * lines[0].slope, *(line.r_squared for line in lines)))
    slope, *r_squared = np.median(fits, 0)
    return f"{slope:.1f}", *(f"{value:.2f}" for value in r_squared)


def entropy_line_table(*sides):
    """The last evaluation of sides beside the line of entropy.py; means over the seeds.

    A side whose entropy lies outside the points that the line was fitted to is not compared.
    """
    yield "side", "iteration", "entropy (nats)", "accuracy", "the line says", "difference (points)"
    fitted = entropy.points_of_sides(entropy.sides_on_the_line())
    line = entropy.line_through_the_arms()
    for side in sides:
        points = entropy.means_over_seeds(entropy.runs_of(side))
        last_entropy = points.entropies[-1]
        accuracy = points.accuracies[-1]
        cells = ["", ""]
        if fitted.entropies.min() <= last_entropy <= fitted.entropies.max():
            on_the_line = line.accuracy_at(np.log2(last_entropy))
            cells = [percent(on_the_line), f"{100 * (accuracy - on_the_line):+.1f}"]
        iteration = str(points.iterations[-1])
        yield name_of(side), iteration, f"{last_entropy:.3f}", percent(accuracy), *cells


# --- How far accuracy follows from the steps ------------------------------------------------------


def expected_table(*sides):
    """The accuracy that there would be if nothing but wrong steps could make an answer wrong.

    A problem of level k is solved in k steps. If each step is right with the chance p,
    independently of the others, all of them are right with the chance p^k. Here p is the share of
    all the steps that is right, and the levels have equal shares of the problems, as they nearly
    have on validation. A step is right if its result is right for the numbers in it, even if the
    problem asks for other numbers.

    All values are means over the seeds, on validation, at each evaluation.

    The table `steps` predicts accuracy in another way. There a problem takes as many steps as the
    answers have on average. Easy and hard steps have a chance each, and an answer without steps
    counts as wrong.
    """
    headings = [f"level {level}, expected" for level in LEVELS]
    yield "side and iteration", "steps, right", *headings, "strict, expected", "strict"
    for side in sides:
        summaries_of_seeds = [
            study_logs.read_summaries(run / "answers.jsonl") for run in runs_of(side)
        ]
        for summaries in zip(*summaries_of_seeds, strict=True):  # of one iteration
            right_steps = [study_logs.share_of_right_steps(summary) for summary in summaries]
            right_steps = np.array(right_steps)  # of each seed
            by_level = [np.mean(right_steps**level) for level in LEVELS]
            accuracy = np.mean([measure(summary, "strict") for summary in summaries])
            values = [np.mean(right_steps), *by_level, np.mean(by_level), accuracy]
            yield f"{name_of(side)}, {summaries[0]['step']}", *map(percent, values)


def steps_table(*sides):
    """How far the accuracy of a side follows from its steps.

    A hard step can be split into easier pieces, and it counts however it is written. All others are
    easy. Expected is the accuracy if the steps of an answer were right independently of each other:

        (answers with steps) * (hard, right)^(hard steps in an answer)
                             * (easy, right)^(easy steps in an answer)

    All values are of the answers to the test problems, after training. The counts of all seeds are
    added up.

    The table `expected` predicts accuracy in another way. There a problem of level k takes k steps,
    however many its answer has. All steps have the same chance, and no answer counts as wrong for
    being without steps.
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
        summaries = [study_logs.summary_on_test(run) for run in runs_of(side)]
        counts = {}  # {kind of step: (the number of right ones, the number of all)}
        for kind in ("easy", "direct", "careful"):
            counts[kind] = np.sum([summary[kind] for summary in summaries], 0)
        num_hard_right, num_hard = counts["direct"] + counts["careful"]
        num_easy_right, num_easy = counts["easy"]
        num_answers = sum(summary["n"] for summary in summaries)
        num_with_steps = sum(summary["with_steps"] for summary in summaries)
        share_with_steps = num_with_steps / num_answers
        hard_per_answer = num_hard / num_with_steps
        easy_per_answer = num_easy / num_with_steps
        hard_right = share(num_hard_right, num_hard)
        easy_right = share(num_easy_right, num_easy)
        expected = share_with_steps * hard_right**hard_per_answer * easy_right**easy_per_answer
        accuracy = np.mean([measure(summary, "strict") for summary in summaries])
        yield (
            name_of(side),
            percent(share_with_steps),
            f"{hard_per_answer:.2f}",
            percent(hard_right),
            f"{easy_per_answer:.2f}",
            percent(easy_right),
            percent(expected),
            percent(accuracy),
        )


def planning_table(*sides):
    """How many answers are right if each of their steps is, to problems of several steps.

    A step is right if its result is right for the numbers in it. So an answer whose steps are all
    right is wrong if the steps are not those that the problem needs, or have wrong numbers.
    """
    yield "side and iteration", "answers", "with all steps right", "of these right"
    for side in sides:
        for name, run in named_runs(side):
            for transcript in study_logs.transcripts_of(run):
                num_answers = 0
                num_with_right_steps = 0
                num_right = 0
                keys = ("level", "completion", "correct_flexible")
                for row in study_logs.read(transcript, keys):
                    if row["level"] == 1:
                        continue
                    num_answers += 1
                    steps = checked_steps(row["completion"])
                    if steps and all(is_right for _, is_right in steps):
                        num_with_right_steps += 1
                        num_right += row["correct_flexible"]
                row_name = f"{name}, {study_logs.iteration_of(transcript)}"
                yield row_name, str(num_answers), str(num_with_right_steps), str(num_right)


def operators_table(*sides):
    """For each operator, how many hard steps are careful, and how many of each kind are right."""
    yield "side, iteration, operator", "hard", "careful", "careful, right", "direct, right"
    for side in sides:
        for name, run in named_runs(side):
            for transcript in study_logs.transcripts_of(run):
                counts = Counter()  # of (operator, kind, whether it is right)
                for row in study_logs.read(transcript, ("completion",)):
                    counts.update(steps_with_operators(row["completion"]))
                row_name = f"{name}, {study_logs.iteration_of(transcript)}"
                for operator in OPERATORS:
                    right = {kind: counts[operator, kind, True] for kind in ("careful", "direct")}
                    wrong = {kind: counts[operator, kind, False] for kind in ("careful", "direct")}
                    careful = right["careful"] + wrong["careful"]
                    direct = right["direct"] + wrong["direct"]
                    hard = careful + direct
                    yield (
                        f"{row_name}, {operator}",
                        str(hard),
                        percent(careful / hard) if hard else "",
                        f"{right['careful']} of {careful}",
                        f"{right['direct']} of {direct}",
                    )


# --- Expert iteration -----------------------------------------------------------------------------


def expert_iterations_table(*sides):
    """The accuracy after each expert iteration, on validation, and what it trained on.

    kept        how many completions were right, so that it trained on them
    entropy     of the policy at the tokens of what was kept, in the first and in the last update,
                mean over seeds; before the first update it is the policy that has sampled them
    """
    yield (
        "side and round",
        "strict, each seed",
        "mean",
        "kept, each seed",
        "updates, each seed",
        "entropy",
    )
    for side in sides:
        runs = runs_of(side)
        summaries_of_seeds = [study_logs.summaries_by_expert_iteration(run) for run in runs]
        for expert_iteration in summaries_of_seeds[0]:
            accuracies = [
                measure(summaries[expert_iteration], "strict") for summaries in summaries_of_seeds
            ]
            strict = ", ".join(map(percent, accuracies))
            logs = [study_logs.updates_of_expert_iteration(run, expert_iteration) for run in runs]
            cells = ["", "", ""]
            if all(logs):  # before training there are no updates
                first_entropy = np.mean([updates[0]["entropy"] for updates in logs])
                last_entropy = np.mean([updates[-1]["entropy"] for updates in logs])
                cells = [
                    ", ".join(str(updates[0]["kept"]) for updates in logs),
                    ", ".join(str(len(updates)) for updates in logs),
                    f"{first_entropy:.3f} -> {last_entropy:.3f}",
                ]
            row_name = f"{name_of(side)}, {expert_iteration}"
            yield row_name, strict, percent(np.mean(accuracies)), *cells


def selection_table(*sides):
    """How far the share of careful steps follows from keeping right answers.

    All are means over the seeds, of greedy answers on validation.

    careful     of the hard steps, the share that is careful
    expected    the same share among the hard steps that were right one evaluation before. So it is
                what a model would write that does just what it is shown.
    """
    yield "side and round", "careful, right", "direct, right", "careful", "expected"
    for side in sides:
        summaries_of_seeds = [
            study_logs.summaries_by_expert_iteration(run) for run in runs_of(side)
        ]
        expected_cell = ""
        for expert_iteration in summaries_of_seeds[0]:
            summaries = [by_iteration[expert_iteration] for by_iteration in summaries_of_seeds]
            cells = []
            for key in ("careful_right", "direct_right", "careful"):
                mean = np.mean([measure(summary, key) for summary in summaries])
                cells.append("none" if np.isnan(mean) else percent(mean))
            yield f"{name_of(side)}, {expert_iteration}", *cells, expected_cell
            expected = [careful_share_of_right_steps(summary) for summary in summaries]
            expected_cell = percent(np.mean(expected))


def careful_share_of_right_steps(summary):
    """Of the hard steps of an evaluation that are right, the share that is careful."""
    num_careful, _ = summary["careful"]
    num_direct, _ = summary["direct"]
    return share(num_careful, num_careful + num_direct)


# --- Training -------------------------------------------------------------------------------------


def metrics_table(*keys_and_sides):
    return table_of_means(keys_and_sides, [slice(-10, None)])


def change_table(*keys_and_sides):
    return table_of_means(keys_and_sides, [slice(0, 5), slice(-5, None)])


def table_of_means(keys_and_sides, windows):
    """The means of metrics over one or more windows of the iterations, for each seed."""
    keys, sides = split_at_dashes(keys_and_sides)
    yield "side", *keys
    for side in sides:
        runs = runs_of(side)
        cells = []
        for key in keys:
            seeds = [means_cell(study_logs.training_rows(run, key), key, windows) for run in runs]
            cells.append(", ".join(seeds))
        yield name_of(side), *cells


def means_cell(rows, key, windows):
    return " -> ".join(mean_cell(rows[window], key) for window in windows)


def split_at_dashes(keys_and_sides):
    """The keys before --, and the sides after it. ValueError: keys, -- or sides are missing."""
    if "--" not in keys_and_sides[1:-1]:  # it stands after a key and before a side
        raise ValueError("the arguments are keys, then --, then sides")
    dashes = keys_and_sides.index("--")
    return keys_and_sides[:dashes], keys_and_sides[dashes + 1 :]


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


# --- Completions ----------------------------------------------------------------------------------


def texts_table(*sides):
    yield "side", "times", "of", "its most frequent text in the last evaluation"
    for side in sides:
        for name, run in named_runs(side):
            last_transcript = study_logs.transcripts_of(run)[-1]
            rows = study_logs.read(last_transcript, ("completion",))
            if not rows:
                raise ValueError(f"{last_transcript}: no completion in it")
            counter = Counter(row["completion"].strip() for row in rows)
            text, count = counter.most_common(1)[0]
            yield name, str(count), str(len(rows)), text_cell(text)


def completions_table(prompt_id, *sides):
    yield "side", "iteration", f"completion of {prompt_id}"
    for side in sides:
        for name, run in named_runs(side):
            for transcript in study_logs.transcripts_of(run):
                rows = study_logs.read(transcript, ("id", "completion"))
                found = [row["completion"] for row in rows if row["id"] == prompt_id]
                if not found:
                    raise ValueError(f"{transcript}: no completion of {prompt_id}")
                yield name, study_logs.iteration_of(transcript), text_cell(found[0])


def solutions_table(name):
    """Solutions by generate_gold.py, by whether they are right and have the required format.

    careful    of their steps that can be split into easier pieces, the share that is written with
               them
    """
    yield "solutions", "number", "share [95 %]", "with steps", "with one step", "careful"
    completions = {"right, in the format": [], "wrong, in the format": [], "not in the format": []}
    rows = study_logs.read(study_logs.STUDIES / name, ("completion", "correct"))
    for row in rows:
        if not strict_format(row["completion"]):
            kind = "not in the format"
        else:
            kind = "right, in the format" if row["correct"] else "wrong, in the format"
        completions[kind].append(row["completion"])
    for kind, completions_of_kind in completions.items():
        number = len(completions_of_kind)
        steps_of_each = [checked_steps(completion) for completion in completions_of_kind]
        numbers_of_steps = [len(steps) for steps in steps_of_each]
        all_steps = itertools.chain.from_iterable(steps_of_each)
        num_steps = Counter(kind_of_step for kind_of_step, _ in all_steps)
        num_hard_steps = num_steps["careful"] + num_steps["direct"]
        yield (
            kind,
            str(number),
            percent_with_interval(number / len(rows), len(rows)),
            str(sum(number_of_steps > 0 for number_of_steps in numbers_of_steps)),
            str(numbers_of_steps.count(1)),
            percent(num_steps["careful"] / num_hard_steps) if num_hard_steps else "none",
        )


def categories_table(*sides):
    yield "side", *(study_logs.CATEGORY_NAMES[category] for category in CATEGORIES)
    for side in sides:
        n, counts = study_logs.category_counts(side)
        cells = [f"{percent_with_interval(count / n, n)} ({count})" for count in counts]
        yield name_of(side), *cells


def cases_table(name):
    yield "category", "question", "completion", "gold"
    keys = ("category", "question", "completion", "gold")
    for row in study_logs.read(study_logs.STUDIES / name, keys):
        category = study_logs.CATEGORY_NAMES[row["category"]]
        yield category, row["question"], text_cell(row["completion"]), row["gold"]


# --- Judges ---------------------------------------------------------------------------------------


def judge_table(*reports):
    """What judges/judge_report.py measured: how a judge scores stories.

    spread         the mean standard deviation of the scores within a group of stories
    with length    the rank correlation between a story's score and its number of words
    """
    yield "report", "stories", "spread", "with length"
    for name in reports:
        report = study_logs.read_judge_report(name)
        spread = f"{report['spread']:.3f}"
        yield name, str(report["stories"]), spread, f"{report['length_correlation']:+.2f}"


def damages_table(*reports):
    """What judges/judge_report.py measured: how a judge scores damaged copies of stories.

    AUC            the chance that a story scores higher than a damaged copy of any story
    with floor     the same, where copies that break the evaluator's rules count as the lowest
    pairs          the share of stories that score higher than their own copy
    """
    yield "report and damage", "AUC [95 %]", "with floor", "pairs"
    for name in reports:
        report = study_logs.read_judge_report(name)
        for damage in DAMAGES:
            interval = f"[{report[f'auc_low/{damage}']:.3f}, {report[f'auc_high/{damage}']:.3f}]"
            yield (
                f"{name}, {damage}",
                f"{report[f'auc/{damage}']:.3f} {interval}",
                f"{report[f'auc_total/{damage}']:.3f}",
                percent(report[f"pairs/{damage}"]),
            )


# --- The rules of the diagnosis -------------------------------------------------------------------


def diagnose_table(study=None):
    """A row for each rule and one for any of them; notes do not count.

    study: count the runs of this study alone, instead of those that the rules were made on.
    """
    num_runs = Counter()
    num_warned = Counter()  # of (rule, kind of run); "in training" is one more kind
    for kind, logs in study_logs.grpo_runs(study):
        num_runs[kind] += 1
        findings = diagnose(logs).findings
        warned = {finding.rule for finding in findings if finding.severity == WARNING}
        rules_by_column = {kind: warned}
        if kind == "healthy":
            rules_by_column["in training"] = rules_that_warn_in_training(logs)
        for column, rules in rules_by_column.items():
            for rule in rules:
                num_warned[rule, column] += 1
            if rules:
                num_warned["any", column] += 1
    headings = [f"{kind} ({num_runs[kind]} runs)" for kind in KINDS_OF_RUNS]
    yield "rule", "condition", "what to change", *headings, "healthy, in training"
    columns = (*KINDS_OF_RUNS, "in training")
    for rule in RULES:
        counts = [str(num_warned[rule.name, column]) for column in columns]
        yield rule.name, rule.condition, rule.advice, *counts
    yield "any of these", "", "", *(str(num_warned["any", column]) for column in columns)


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


# --- The pages ------------------------------------------------------------------------------------


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
        *study_logs.STUDIES.glob("comparisons.md"),
        *study_logs.STUDIES.glob("kept_logs.md"),
        *sorted(study_logs.STUDIES.glob("*/README.md")),
    ]
    problems = pages.check(checked, cache(rows_of), ROOT, "--write" in flags)
    problems += study_logs.misnamed_runs()
    if problems:
        raise ValueError("\n".join(problems))
    print(f"{len(checked)} pages say what the logs say")


TABLES = {
    "compare": compare_table,
    "difference": difference_table,
    "choices": choices_table,
    "choice": choice_table,
    "response": response_table,
    "arms": arms_table,
    "spread": spread_table,
    "rates": rates_table,
    "ends": ends_table,
    "curve": curve_table,
    "evaluations": evaluations_table,
    "reach": reach_table,
    "averages": averages_table,
    "levels": levels_table,
    "expected": expected_table,
    "metrics": metrics_table,
    "change": change_table,
    "flags": flags_table,
    "texts": texts_table,
    "completions": completions_table,
    "planning": planning_table,
    "operators": operators_table,
    "solutions": solutions_table,
    "judge": judge_table,
    "damages": damages_table,
    "categories": categories_table,
    "cases": cases_table,
    "pass": pass_table,
    "exchange": exchange_table,
    "steps": steps_table,
    "entropy": entropy_table,
    "entropy_line": entropy_line_table,
    "forgotten": forgotten_table,
    "sampled": sampled_table,
    "expert_iterations": expert_iterations_table,
    "selection": selection_table,
    "diagnose": diagnose_table,
}


def main(name="", *arguments):
    if name == "best":  # the best learning rate of some runs, for the scripts of the studies
        runs = [Path(argument) for argument in arguments]
        print(study_logs.learning_rate_of(study_logs.best_run(runs)))
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
