"""What stands in the logs of the studies: their runs, evaluations, flags, and the names of sides.

A side of a comparison is STUDY/ARM. Its runs are the folders ARM_seed0, ARM_seed1, ... of that
study. If several learning rates were tried, the runs are those at the rate that ends best on
validation. A run has these files:

    args.json         its flags
    train_log.jsonl   a row for each iteration, or for each update of SFT and expert iteration; a
                      model that was only evaluated has none
    eval_log.jsonl    a row for each evaluation: on validation, or on test without training
    answers.jsonl     a summary of each of these evaluations, by answers.py
    test.jsonl        a summary of the evaluation on the test problems after training
    pass.jsonl        the same with several answers to each question
    eval/             the completions of each evaluation; few runs have kept them

A file is read once. archive.py must have unpacked it before.

Shapes: S seeds, E evaluations, Q questions.
"""

import json
import re
from functools import cache
from pathlib import Path

import numpy as np

from experiments import outcomes
from experiments.answers import KINDS, correct_answers
from logs import jsonl
from logs.diagnose import Logs
from logs.read import has_number, read_args
from logs.statistics import CATEGORIES

STUDIES = Path(__file__).resolve().parent
# What `measure` can measure.
MEASURES = ("strict", "flexible", "tokens", "careful", "careful_right", "direct_right")
# The keys that every summary must have; answers.py explains them.
SUMMARY_KEYS = (
    "step",
    "n",
    "samples",
    "questions",
    "strict",
    "flexible",
    "tokens",
    "careful",
    "direct",
)
# The levels of the problems of `arithmetic`: a problem of level 3 is solved in 3 steps.
LEVELS = (1, 2, 3, 4)
# The names of logs.statistics.CATEGORIES on the pages. "no format" is without the required format,
# whether the answer is right or not.
CATEGORY_NAMES = {
    "format1_answer1": "format and answer right",
    "format1_answer0": "format right, answer wrong",
    "format0_answer0": "no format",
}
# What is done to the stories that a judge should score lower.
DAMAGES = ("shuffled words", "shuffled sentences", "cut", "repeated")
read = cache(jsonl.read)


# --- The runs of a side ---------------------------------------------------------------------------


def runs_of(side):
    """The folders of a side, one per seed; of `choices` only those of the first look.

    Every arm of `choices` has a first look, and its seeds are the same in all arms.

    Raises:
        FileNotFoundError: there is none.
    """
    path = STUDIES / side
    if (path / "answers.jsonl").exists():  # a model that was only evaluated, or a single run
        return [path]
    runs = runs_by_seed(path)
    if not runs:
        tried = list(path.parent.glob(f"{path.name}_rate*_seed0"))
        if tried:
            rate = learning_rate_of(best_run(tried))
            runs = runs_by_seed(path.with_name(f"{path.name}_rate{rate}"))
    if path.parent.name == "choices":
        runs = {seed: run for seed, run in runs.items() if seed in outcomes.FIRST_SEEDS}
    if not runs:
        raise FileNotFoundError(f"{side}: no runs in {path.parent}")
    return list(runs.values())


def runs_by_seed(path):
    """{seed: folder} of the folders PATH_seed0, PATH_seed1, ...; {} if there are none."""
    runs = {}
    for folder in path.parent.glob(f"{path.name}_seed*"):
        seed = folder.name.removeprefix(f"{path.name}_seed")
        if seed.isdecimal():
            runs[int(seed)] = folder
    return dict(sorted(runs.items()))


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


def final_accuracy(run):
    """Strict accuracy of the run's last evaluation on validation."""
    return measure(read_summaries(run / "answers.jsonl")[-1], "strict")


def runs_by_rate(study):
    """{side: {learning rate, as text: its run with seed 0}} for the sides of a study.

    Raises:
        FileNotFoundError: no run of seed 0 has a learning rate in its name.
    """
    runs = sorted((STUDIES / study).glob("*_rate*_seed0"))
    if not runs:
        raise FileNotFoundError(f"{study}: no runs *_rate*_seed0 in {STUDIES / study}")
    runs_of_side = {}
    for run in runs:
        arm = run.name.split("_rate")[0]
        side = f"{run.parent.name}/{arm}"
        runs_of_side.setdefault(side, {})[learning_rate_of(run)] = run
    return runs_of_side


def misnamed_runs():
    """A line for each run whose name gives another learning rate or seed than its args.json."""
    problems = []
    for path in sorted(STUDIES.glob("*/*/args.json")):
        name = path.parent.name
        flags = read_args(path)
        for key, pattern in (("learning_rate", r"_rate([^_]+)"), ("seed", r"_seed(\d+)")):
            in_name = re.search(pattern, name)
            if in_name and key in flags and float(in_name[1]) != flags[key]:
                problems.append(f"{path}: {key} is {flags[key]}")
    return problems


# --- Names and colours of sides -------------------------------------------------------------------


@cache
def read_names(path):
    """{STUDY/ARM: [its name on the pages, its colour]}; plotter.py --names reads the same file."""
    return json.loads(path.read_text("utf-8"))


def name_of(side):
    """The name of a side on the pages; without an entry in names.json it is the side itself."""
    names = read_names(STUDIES / "names.json")
    if side in names:
        name, _ = names[side]
        return name
    arm, has_rate, learning_rate = side.partition("_rate")
    if has_rate and arm in names:
        name, _ = names[arm]
        return f"{name} at {learning_rate}"
    return side


def named_sides(study):
    """The sides of a study that names.json names, in its order."""
    names = read_names(STUDIES / "names.json")
    return [side for side in names if side.startswith(f"{study}/")]


def color_of(side):
    """The colour of a side in every figure. ValueError: names.json has none."""
    names = read_names(STUDIES / "names.json")
    if side not in names:
        raise ValueError(f"{side} has no colour in names.json")
    _, color = names[side]
    return color


def named_runs(side):
    """(name, folder) for each run of a side, such as ("the demo, seed 0", ...)."""
    side_without_seed = re.sub(r"_seed\d+$", "", side)
    for run in runs_of(side):
        seed = re.search(r"_seed(\d+)$", run.name)
        yield f"{name_of(side_without_seed)}, seed {seed[1]}" if seed else name_of(side), run


# --- Evaluations ----------------------------------------------------------------------------------


def read_summaries(path):
    """The summaries in a file that answers.py wrote, one for each evaluation.

    Raises:
        ValueError: it has no evaluation, or its rows are no summaries.
    """
    summaries = read(path, SUMMARY_KEYS)
    if not summaries:
        raise ValueError(f"{path}: no evaluation in it")
    return summaries


def summary_on_test(run, file="test.jsonl"):
    """The summary of a run's evaluation on the test problems.

    A model that was not trained was evaluated once, on the test problems, so that its answers.jsonl
    has that evaluation.
    """
    was_trained = (run / "train_log.jsonl").exists()
    return read_summaries(run / (file if was_trained else "answers.jsonl"))[-1]


def answers_by_step(side):
    """The iterations at which a side was evaluated, and its answers: (E,), (S, E, Q).

    An answer is 1 if it is right, in the required format, and else 0.

    Raises:
        ValueError: its seeds were not evaluated at the same iterations.
    """
    steps_of_seeds = []
    answers_of_seeds = []
    for run in runs_of(side):
        summaries = read_summaries(run / "answers.jsonl")
        steps_of_seeds.append([summary["step"] for summary in summaries])
        answers_of_seeds.append([correct_answers(summary)[:, 0] for summary in summaries])
    if any(steps != steps_of_seeds[0] for steps in steps_of_seeds):
        raise ValueError(f"{side}: its seeds were not evaluated at the same iterations")
    return steps_of_seeds[0], np.array(answers_of_seeds)


def measure(summary, key):
    """One number of an evaluation; NaN if it has no step of the kind that the key asks for.

    strict, flexible               the share of answers that are right
    tokens                         the mean length of a completion
    careful                        of the steps that can be split into easier pieces, the share that
                                   is written with them; the others are direct
    careful_right, direct_right    of the careful or the direct steps, the share that is right
    """
    if key in ("strict", "flexible"):
        return correct_answers(summary, key).mean()
    if key == "tokens":
        return summary["tokens"]
    if key == "careful":
        _, num_careful = summary["careful"]
        _, num_direct = summary["direct"]
        return share(num_careful, num_careful + num_direct)
    num_right, num_steps = summary[key.removesuffix("_right")]
    return share(num_right, num_steps)


def share_of_right_steps(summary):
    """Of all the steps in the answers of an evaluation, easy ones too, the share that is right."""
    num_right = sum(summary[kind][0] for kind in KINDS)
    num_steps = sum(summary[kind][1] for kind in KINDS)
    return share(num_right, num_steps)


def share(count, total):
    """count / total; NaN if there is nothing to share."""
    return count / total if total else np.nan


def category_counts(side):
    """The number of completions of the last evaluation, and how many are in each of CATEGORIES.

    Raises:
        ValueError: there was no evaluation, or it did not count the categories.
    """
    path = runs_of(side)[0] / "eval_log.jsonl"
    count_keys = [f"count/{name}" for name in CATEGORIES]
    rows = read(path, ("n", *count_keys))
    if not rows:
        raise ValueError(f"{path}: no evaluation in it")
    return rows[-1]["n"], [rows[-1][key] for key in count_keys]


def transcripts_of(run):
    """The files with the completions of each evaluation, in the order of the evaluations.

    Raises:
        FileNotFoundError: the run has kept none.
    """
    # The numbers in the names are zero-padded, so that the last name has the last step.
    transcripts = sorted(run.glob("eval/step_*.jsonl"))
    if not transcripts:
        raise FileNotFoundError(f"{run}: no transcripts eval/step_*.jsonl in it")
    return transcripts


def iteration_of(transcript):
    """The iteration of an evaluation, as text, from the name of its transcript."""
    return str(int(transcript.stem.removeprefix("step_")))


def read_judge_report(name):
    """What judges/judge_report.py wrote into a file of a study. ValueError: it is no such file."""
    path = STUDIES / name
    report = jsonl.parse(path.read_bytes(), path)
    if not all(f"pairs/{damage}" in report for damage in DAMAGES):
        raise ValueError(f"{path}: not the report of a judge")
    return report


# --- Training -------------------------------------------------------------------------------------


def training_rows(run, key):
    """The rows of a run's train_log.jsonl. ValueError: no row has a number under the key."""
    path = run / "train_log.jsonl"
    rows = read(path)
    keys_of_numbers = {}  # a dict keeps the order of the file, which a set does not
    for row in rows:
        keys_of_numbers |= dict.fromkeys(name for name in row if has_number(row, name))
    if key not in keys_of_numbers:
        keys = ", ".join(keys_of_numbers) or "none"
        raise ValueError(f"{path}: no number under {key}; it has {keys}")
    return rows


def mean_before(rows, key, iteration):
    """The mean over the five iterations up to this one of what the rows have under the key."""
    return np.mean([row[key] for row in rows if iteration - 5 < row["step"] <= iteration])


def num_examples_of_sft(run):
    """The number of examples that a run of SFT learnt from.

    Without --num_examples a run makes one epoch, so that it is the number of those it has seen.
    """
    num_chosen = read_args(run / "args.json")["num_examples"]
    return num_chosen or read(run / "train_log.jsonl")[-1]["examples"]


# --- Expert iteration -----------------------------------------------------------------------------


def summaries_by_expert_iteration(run):
    """{expert iteration: the summary of the evaluation after it}; 0 is before the first one."""
    updates = read(run / "train_log.jsonl", ("step", "ei_step"))
    expert_iteration_of_update = {row["step"]: row["ei_step"] for row in updates}
    summaries = {}
    for summary in read_summaries(run / "answers.jsonl"):
        summaries[expert_iteration_of_update.get(summary["step"], 0)] = summary
    return summaries


def updates_of_expert_iteration(run, expert_iteration):
    """The rows of train_log.jsonl of one expert iteration, one for each update."""
    updates = read(run / "train_log.jsonl", ("step", "ei_step"))
    return [row for row in updates if row["ei_step"] == expert_iteration]


# --- How the runs of GRPO ended -------------------------------------------------------------------

# All kinds, in the order in which the pages show them.
KINDS_OF_RUNS = ("made to go wrong", "failed otherwise", "in between", "healthy")
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
    "choices/",  # this and the next ones were made after the rules; choices is counted apart
    "noise/",
    "hacks/",
    "rare/",
)


def kind_of_run(name, evaluations):
    """How a run ended, by its validation accuracy.

    failed otherwise    it ends 5 points or more below its own best, or less than 5 above its start
                        (unless that is over 80 %)
    healthy             it did not fail, and ends at 70 % or more
    in between          all others: they rise and stay low

    Args:
        name: STUDY/RUN.
        evaluations: the rows of its eval_log.jsonl.
    """
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


def grpo_runs(study=None):
    """Yield (kind of run, its Logs) for every GRPO run that counts, or for those of one study.

    Raises:
        FileNotFoundError: the study has no runs.
    """
    paths = sorted(STUDIES.glob(f"{study or '*'}/**/train_log.jsonl"))
    if not paths:
        raise FileNotFoundError(f"no runs in {STUDIES / (study or '')}")
    for path in paths:
        run = path.parent
        name = run.relative_to(STUDIES).as_posix()
        if study is None and name.startswith(NOT_COUNTED):
            continue
        rows = read(path)
        is_grpo = "zero_std_fraction" in rows[-1]
        if is_grpo:
            evaluations = read(run / "eval_log.jsonl")
            kind = kind_of_run(name, evaluations)
            yield kind, Logs(rows, evaluations, read_args(run / "args.json"))
