r"""Which setting is better? Make the runs of a comparison, and draw and print what they say.

    python experiments/compare.py --arm "beta 0.04" --arm "beta 0" \
        --learning_rate 1e-4 2e-4 4e-4 --seeds 4 --output_dir output/beta -- \
        --model_name tiny/1m --dataset_name arithmetic --num_train_iters 60 --eval_iterations 10

An arm is one of the settings. It is written as

    beta 0                                      one flag and its value
    --loss_type gspo --cliprange 3e-4           several flags
    no_std: --no-use_std_normalization          a name of its own, and flags
    control: experiments/controls.py --evaluator format      another script than main.py
    start: --model_name output/sft_seed{seed}   {seed} becomes the seed of a run

What follows after -- are flags of every arm. An arm that names a flag as well overrides it.
`--learning_rate` in an arm gives this arm learning rates of its own.

Every arm gets every learning rate and every seed. A run is the folder ARM_rateRATE_seedSEED of
--output_dir. Several runs go on side by side. A run that is finished is not made again, and one
that was stopped is resumed, so that the same command can be given again at any time, also with more
arms, learning rates or seeds.

The outcome of a run is measured on the validation problems: see --outcome. The outcome of an arm is
taken at its estimated best rate, which is the top of a parabola through three rates tried. Two arms
are compared within each seed, because runs with the same seed get the same prompts and the same
random numbers, as far as their flags allow it. experiments/paired.py has the statistics. With
--test_size the last checkpoints at the best rate tried are evaluated on test problems too.
"""

import itertools
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import matplotlib  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from training import checkpoints  # noqa: E402

import plotter  # noqa: E402
from config import ArgumentParser, GRPOConfig, parse, read_args  # noqa: E402
from experiments import answers  # noqa: E402
from experiments.paired import SIGNIFICANT, judge, outcome_at_best_rate  # noqa: E402
from logs import jsonl, markdown  # noqa: E402
from logs.read import NO_EFFECT  # noqa: E402

# The summary of a run's evaluations. It is written last, so that a run that has it is finished.
SUMMARY = "answers.jsonl"
# The summary of its evaluation on the test problems.
TEST_SUMMARY = "test.jsonl"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP = threading.Event()  # set by a signal


# --- Arms and runs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One of the settings that are compared."""

    name: str
    script: str
    flags: list[str]  # as on a command line; those of every arm come first
    learning_rates: tuple[str, ...]  # as they were written; (None,): that of the script


@dataclass(frozen=True)
class PlannedRun:
    """One run of an arm."""

    arm: Arm
    learning_rate: str | None
    seed: int

    @property
    def name(self) -> str:
        rate = f"_rate{self.learning_rate}" if self.learning_rate else ""
        return f"{self.arm.name}{rate}_seed{self.seed}"

    @property
    def flags(self) -> list[str]:
        flags = [flag.replace("{seed}", str(self.seed)) for flag in self.arm.flags]
        if self.learning_rate:
            flags += ["--learning_rate", self.learning_rate]
        return [*flags, "--seed", str(self.seed), "--eval_split", "validation"]


def parse_arm(text: str, common_flags: list[str], learning_rates: list[str] | None) -> Arm:
    """The arm that a text such as "no_std: --no-use_std_normalization" describes.

    Args:
        common_flags: the flags of every arm.
        learning_rates: those of every arm that names none; None: the script's own.

    Raises:
        ValueError: the text describes no arm.
    """
    name, colon, setting = text.partition(":")
    if not colon:
        name = ""
        setting = text
    try:
        words = shlex.split(setting)
    except ValueError as error:
        raise ValueError(f"--arm {text!r}: {error}") from None
    script = "main.py"
    if words and words[0].endswith(".py"):
        script = words.pop(0)
    if words and not words[0].startswith("--"):
        words[0] = f"--{words[0]}"
    own_flags = group_flags(words)
    if "--learning_rate" in own_flags:
        learning_rates = own_flags.pop("--learning_rate")
    if not name:  # beta0.04 for "beta 0.04"
        name = "_".join(flag.strip("-") + "-".join(values) for flag, values in own_flags.items())
    name = name.strip()
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(
            f"--arm {text!r}: an arm needs a name of letters, digits, '.', '_' and '-', as in"
            " 'NAME: --flag value'"
        )
    if not (ROOT / script).is_file():
        raise ValueError(f"--arm {text!r}: there is no script {script}")
    flags = {**group_flags(common_flags), **own_flags}
    for flag in ("--output_dir", "--seed", "--resume", "--eval_only", "--eval_split"):
        if flag in flags:
            raise ValueError(f"{flag} is set for each run by this program; leave it out")
    words = []
    for flag, values in flags.items():
        words += [flag, *values]
    return Arm(name, script, words, learning_rates=tuple(learning_rates or (None,)))


def group_flags(words: list[str]) -> dict[str, list[str]]:
    """{"--flag": its values} of a command line. Of a flag that stands there twice the last counts.

    Raises:
        ValueError: the command line does not begin with a flag.
    """
    values_of_flag = {}
    for word in words:
        is_flag = word.startswith("--") and len(word) > 2
        if is_flag:
            flag, has_value, value = word.partition("=")
            values_of_flag.pop(flag, None)
            values = values_of_flag[flag] = [value] if has_value else []
        elif not values_of_flag:
            raise ValueError(f"{word} stands where a flag such as --beta should be")
        else:
            values.append(word)
    return values_of_flag


def plan_runs(args, arms: list[Arm]) -> list[PlannedRun]:
    """Every run of the comparison, seed by seed, so that a mistake in an arm shows early."""
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    runs = []
    for seed in seeds:
        for arm in arms:
            for learning_rate in arm.learning_rates:
                runs.append(PlannedRun(arm, learning_rate, seed))
    return runs


# --- Making the runs ------------------------------------------------------------------------------


class Failed(Exception):
    """Runs have ended with an error. The message is one line."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class Job:
    """A process that is to be started: a run, or the evaluation of one on the test problems."""

    name: str
    script: str
    flags: list[str]
    folder: Path  # its --output_dir
    process: subprocess.Popen | None = None

    @property
    def output(self) -> Path:
        """The file that gets what the process prints."""
        return self.folder.parent / f"{self.folder.name}.log"

    def start(self) -> None:
        """Start the process, which resumes where an earlier one was stopped."""
        script = os.path.relpath(ROOT / self.script)  # args.json shall not tell where this is
        command = [sys.executable, script, *self.flags, "--output_dir", self.folder]
        is_evaluation = "--eval_only" in self.flags
        if (self.folder / "args.json").exists() and not is_evaluation:
            command.append("--resume")
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches this process alone, which then stops the others in order.
                start_new_session=True,
            )

    def last_line(self) -> str:
        """The line that says why the process has failed."""
        lines = self.output.read_text("utf-8", "replace").splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        last_lines = errors or [line for line in lines if line.strip()] or ["it printed nothing"]
        return last_lines[-1].removeprefix("error: ")


def run_side_by_side(jobs: list[Job], num_processes: int, finish, description: str) -> None:
    """Run jobs in this order, up to num_processes at a time.

    A job that fails while it trains, as a run does that has diverged, does not keep the others from
    being run. A job that refuses its flags does.

    Args:
        finish: called with each job that has ended well.

    Raises:
        Failed: jobs have failed.
        KeyboardInterrupt: a signal has come. All jobs have been stopped, and have saved what they
            had.
    """
    waiting = list(jobs)
    active = []
    failures = []
    num_done = 0
    try:
        while waiting or active:
            while waiting and len(active) < num_processes:
                active.append(waiting.pop(0))
                active[-1].start()
            if STOP.wait(timeout=0.2):
                raise KeyboardInterrupt
            for job in [job for job in active if job.process.poll() is not None]:
                active.remove(job)
                num_done += 1
                if job.process.returncode == 0:
                    finish(job)
                    outcome = "is finished"
                else:
                    failures.append(job)
                    outcome = "has failed"
                print(
                    f"{description} {outcome}: {job.name} ({num_done} of {len(jobs)})", flush=True
                )
                if job.process.returncode == 2:
                    raise Failed(f"{job.name}: {job.last_line()}", exit_code=2)
    finally:
        for job in active:
            job.process.terminate()  # It saves and ends.
        for job in active:
            job.process.wait()
    if failures:
        lines = [f"{job.name}: {job.last_line()}" for job in failures]
        raise Failed(
            f"{len(failures)} of {len(jobs)} runs have failed, and the others are finished:"
            f" {'; '.join(lines)}. Leave these settings out, or mend the cause, and give the"
            " command again (--max_kl 1000 after -- lets diverged runs go on)",
            exit_code=1,
        )


def train(args, runs: list[PlannedRun]) -> None:
    """Make the runs that are not finished. Raises Failed, and ValueError as check_flags does."""
    jobs = []
    for run in runs:
        folder = args.output_dir / run.name
        check_flags(run, folder)
        if not (folder / SUMMARY).exists():
            jobs.append(Job(run.name, run.arm.script, run.flags, folder))
    print(f"{len(runs)} runs, of which {len(runs) - len(jobs)} are finished")

    def summarise(job: Job) -> None:
        answers.main(job.folder, job.folder / SUMMARY)

    run_side_by_side(jobs, args.jobs, summarise, "training")


def check_flags(run: PlannedRun, folder: Path) -> None:
    """Raise ValueError if a run that is there, finished or not, was made with other flags."""
    saved = read_args(folder / "args.json")  # {} if there is no run
    if run.arm.script == "main.py":
        wanted = asdict(parse(GRPOConfig, run.flags))
    else:  # of other scripts only the flags are known that the command names
        wanted = {}
        for flag, values in group_flags(run.flags).items():
            name = flag.removeprefix("--")
            wanted[name.removeprefix("no-")] = " ".join(values) or not name.startswith("no-")
    for name, value in wanted.items():
        if name in saved and name not in NO_EFFECT and not is_same(value, saved[name]):
            raise ValueError(
                f"{folder} holds a run with --{name} {saved[name]}, not {value}: name another"
                " --output_dir, or give the arm another name"
            )


def is_same(value: object, saved: object) -> bool:
    """Whether the value of a flag is the one that args.json has."""
    try:
        return float(value) == float(saved)
    except (TypeError, ValueError):
        return str(value).rstrip("/") == str(saved).rstrip("/")


# The flags with which the problems of a run are completed and rewarded.
EVALUATION_FLAGS = (
    "dataset_name",
    "dataset_path",
    "evaluator",
    "prompt",
    "max_prompt_length",
    "max_completion_length",
    "max_concurrent_sequences",
    "sampling_dtype",
    "eval_temperature",
    "eval_samples",
    "device",
    "seed",
)


def test(args, runs: list[PlannedRun]) -> dict[str, float]:
    """{name of a run: the accuracy in % of its last checkpoint on the test problems}.

    Raises Failed, and ValueError if runs have no checkpoint or other problems.
    """
    jobs = []
    for run in runs:
        folder = args.output_dir / run.name
        summary = folder / TEST_SUMMARY
        if not summary.exists() or read_test_summary(summary)["n"] != args.test_size:
            jobs.append(make_test_job(run, folder, args.test_size))

    def summarise(job: Job) -> None:
        answers.main(job.folder, job.folder.parent / TEST_SUMMARY)

    run_side_by_side(jobs, args.jobs, summarise, "on test")
    accuracies = {}
    questions = set()
    for run in runs:
        row = read_test_summary(args.output_dir / run.name / TEST_SUMMARY)
        if row["n"] != args.test_size:
            raise ValueError(f"there are {row['n']} test problems: give --test_size {row['n']}")
        questions.add(row["questions"])
        accuracies[run.name] = 100 * answers.accuracy(row)
    if len(questions) > 1:
        raise ValueError("the runs were evaluated on different test problems")
    return accuracies


def make_test_job(run: PlannedRun, folder: Path, test_size: int) -> Job:
    """The evaluation of the last checkpoint of a run. Raises ValueError if there is none."""
    paths = checkpoints.finished(folder)
    if not paths:
        raise ValueError(
            f"{folder} has no checkpoint to evaluate on test: remove its logs, so that the run is"
            " made again"
        )
    saved = read_args(folder / "args.json")
    # A script that cannot evaluate alone trains a model that main.py can.
    script = run.arm.script if "eval_only" in saved else "main.py"
    flags = []
    for name in EVALUATION_FLAGS:
        if saved.get(name) is not None:
            flags += [f"--{name}", str(saved[name])]
    flags += ["--model_name", str(paths[max(paths)]), "--eval_only", "--eval_split", "test"]
    flags += ["--eval_size", str(test_size)]
    return Job(run.name, script, flags, folder / "test")


# --- What the runs say ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """The outcomes of an arm, in %."""

    arm: Arm
    by_rate: dict[str | None, np.ndarray]  # {learning rate: (seeds,)}
    best_rate: str | None  # of those tried, the one with the best mean; of equal ones the lowest
    estimated_rate: float | None  # where the outcome is best; it can lie between two others
    outcomes: np.ndarray  # (seeds,) at estimated_rate
    on_test: np.ndarray | None  # (seeds,) accuracies on test at best_rate, where there are any


def outcome(folder: Path, kind: str) -> float:
    """The outcome of a run in %: see --outcome. Raises ValueError if it was not evaluated."""
    rows = jsonl.read(folder / "eval_log.jsonl", ("step", "accuracy"))
    accuracies = [100 * row["accuracy"] for row in rows if row["step"] > 0]
    if not accuracies:
        raise ValueError(f"{folder}: no evaluation after the start of training")
    return accuracies[-1] if kind == "last" else float(np.mean(accuracies))


def best_rate(by_rate: dict[str | None, np.ndarray]) -> str | None:
    """The learning rate with the best mean outcome; of equal ones the lowest."""
    rates = sorted(by_rate, key=lambda rate: float(rate or 0))
    return max(rates, key=lambda rate: by_rate[rate].mean())


def read_outcomes(args, runs: list[PlannedRun]) -> dict:
    """{learning rate: (seeds,) outcomes} of the runs of one arm."""
    outcomes = {}
    for run in runs:
        value = outcome(args.output_dir / run.name, args.outcome)
        outcomes.setdefault(run.learning_rate, []).append(value)
    return {rate: np.array(values) for rate, values in outcomes.items()}


def read_test_summary(path: Path) -> dict:
    """What answers.py wrote of an evaluation on test. Raises ValueError for anything else."""
    rows = jsonl.read(path, ("strict", "n", "questions"))
    if len(rows) != 1:
        raise ValueError(f"{path}: {len(rows)} evaluations in it, and not one")
    return rows[0]


def compare(args, arms: list[Arm]) -> list[Result]:
    """Make all runs that are missing, and return the result of each arm."""
    all_runs = plan_runs(args, arms)
    tuning_seeds = range(args.first_seed, args.first_seed + args.tuning_seeds)
    tuning_runs = [run for run in all_runs if run.seed in tuning_seeds]
    train(args, tuning_runs)

    outcomes = {}  # {name of an arm: what read_outcomes returns}
    final_runs = []  # at the best rate of their arm
    for arm in arms:
        by_rate = read_outcomes(args, [run for run in tuning_runs if run.arm == arm])
        outcomes[arm.name] = by_rate
        rate = best_rate(by_rate)
        final_runs += [run for run in all_runs if run.arm == arm and run.learning_rate == rate]
    if args.tuning_seeds < args.seeds:
        train(args, final_runs)
    on_test = test(args, final_runs) if args.test_size else {}

    results = []
    for arm in arms:
        runs = [run for run in final_runs if run.arm == arm]
        by_rate = outcomes[arm.name] | read_outcomes(args, runs)
        tested = np.array([on_test[run.name] for run in runs]) if on_test else None
        results.append(make_result(arm, by_rate, runs[0].learning_rate, tested))
    return results


def make_result(arm: Arm, by_rate: dict, rate: str | None, on_test: np.ndarray | None) -> Result:
    """The result of an arm, whose best rate has the outcomes of all seeds."""
    num_seeds = len(by_rate[rate])
    every_rate_has_all_seeds = all(len(values) == num_seeds for values in by_rate.values())
    if rate is not None and every_rate_has_all_seeds:
        values_by_number = {float(name): values for name, values in by_rate.items()}
        estimated_rate, outcomes = outcome_at_best_rate(values_by_number)
        outcomes = outcomes.clip(0, 100)  # a parabola knows of no ceiling
    else:
        estimated_rate = float(rate) if rate is not None else None
        outcomes = by_rate[rate]
    return Result(arm, by_rate, rate, estimated_rate, outcomes, on_test)


# --- Table and figure -----------------------------------------------------------------------------


def make_tables(args, results: list[Result]) -> str:
    """Tables in Markdown: learning rates, arms, and differences from the first arm."""
    if args.outcome == "last":
        outcome_in_words = "Accuracy on validation after training, in %"
    else:
        outcome_in_words = "Mean accuracy on validation over a run's evaluations, in %"
    sections = []
    rates = sorted({rate for result in results for rate in result.by_rate if rate}, key=float)
    if len(rates) > 1:
        sections.append(
            f"{outcome_in_words}: mean over seeds by learning rate. The rate that is taken is bold."
        )
        sections.append(rate_table(results, rates))
    at_rates = "at the estimated best rate of the arm"
    if args.test_size:
        at_rates += ", and accuracy on test at the best rate tried"
    sections.append(f"{outcome_in_words}, {at_rates}.")
    sections.append(arm_table(results))
    if len(results) > 1:
        first_name = results[0].arm.name
        in_points = "within each seed, in percentage points, with its 95% interval."
        sections.append(f"Difference from {first_name} {in_points}")
        sections.append(difference_table(results, [result.outcomes for result in results]))
        if args.test_size:
            sections.append(f"Difference from {first_name} on test {in_points}")
            sections.append(difference_table(results, [result.on_test for result in results]))
    for first, second in itertools.combinations(results, 2):
        rates = first.by_rate.keys() & second.by_rate.keys()
        are_equal = [np.array_equal(first.by_rate[rate], second.by_rate[rate]) for rate in rates]
        if are_equal and all(are_equal):
            sections.append(
                f"{first.arm.name} and {second.arm.name} have equal outcomes in every run: the"
                " flags in which they differ seem to have no effect here."
            )
    return "\n\n".join(sections)


def rate_table(results: list[Result], rates: list[str]) -> str:
    rows = []
    for result in results:
        cells = [result.arm.name]
        for rate in rates:
            cell = f"{result.by_rate[rate].mean():.1f}" if rate in result.by_rate else ""
            cells.append(f"**{cell}**" if rate == result.best_rate else cell)
        rows.append(cells)
    return markdown.table(["arm", *rates], rows)


def arm_table(results: list[Result]) -> str:
    header = ["arm", "learning rate", "each seed", "mean"]
    if results[0].on_test is not None:
        header += ["on test, each seed", "mean on test"]
    rows = []
    for result in results:
        rate = result.estimated_rate
        cells = [result.arm.name, f"{rate:.2g}" if rate else "default"]
        for values in (result.outcomes, result.on_test):
            if values is not None:
                cells += [", ".join(f"{value:.1f}" for value in values), f"{values.mean():.1f}"]
        rows.append(cells)
    return markdown.table(header, rows)


def difference_table(results: list[Result], values_of_arms: list[np.ndarray]) -> str:
    """A row for each arm but the first.

    Args:
        values_of_arms: for each result the values (seeds,) that are compared.
    """
    first_values, *others_values = values_of_arms
    differences = judge([values - first_values for values in others_values])
    rows = []
    for result, difference in zip(results[1:], differences, strict=True):
        rows.append([result.arm.name, *difference.cells()])
    return markdown.table(["arm", "each seed", "mean [95% CI]", "verdict"], rows)


def draw(args, results: list[Result]) -> Figure:
    """Outcome by learning rate on the left, differences within each seed on the right."""
    has_differences = len(results) > 1
    fig = Figure(figsize=(10 if has_differences else 5, 4), layout="constrained")
    axes = fig.subplots(1, 2 if has_differences else 1, squeeze=False)[0]
    draw_outcomes(axes[0], results)
    axes[0].set_ylabel("accuracy on validation (%)")
    best = max(results, key=lambda result: result.outcomes.mean())
    mean = best.outcomes.mean()
    axes[0].set_title(f"The highest mean is {mean:.0f}%, of {best.arm.name}", loc="left")
    outcome_in_words = (
        "after training" if args.outcome == "last" else "mean over a run's evaluations"
    )
    fig.supxlabel(
        f"dots: each seed, {outcome_in_words}; lines and diamonds: means", color="0.4", fontsize=9
    )
    if has_differences:
        draw_differences(axes[1], results)
    return fig


def draw_outcomes(ax, results: list[Result]) -> None:
    """A dot for each run, and a line through the means over the seeds."""
    for i, result in enumerate(results):
        style = plotter.style_of(i)
        # Arms that share a rate stand beside each other.
        shift = 1.03 ** (i - (len(results) - 1) / 2)
        rates = sorted(result.by_rate, key=lambda rate: float(rate or 1))
        x = [float(rate or 1) * shift for rate in rates]
        for rate, position in zip(rates, x, strict=True):
            values = result.by_rate[rate]
            ax.plot([position] * len(values), values, ".", color=style["color"], alpha=0.5)
        means = [result.by_rate[rate].mean() for rate in rates]
        ax.plot(x, means, **style, label=result.arm.name)
    labels = {float(rate): rate for result in results for rate in result.by_rate if rate}
    if labels:
        ax.set_xscale("log")
        ax.set_xlabel("learning rate")
    ax.set_xticks(list(labels), list(labels.values()))
    ax.set_xticks([], minor=True)
    ax.legend()


def draw_differences(ax, results: list[Result]) -> None:
    """A dot for each seed, and the mean with its interval, for every arm but the first."""
    first, *other_results = results
    differences = judge([result.outcomes - first.outcomes for result in other_results])
    for i, difference in enumerate(differences, 1):
        color = plotter.style_of(i)["color"]
        if math.isfinite(difference.low):
            ax.plot([difference.low, difference.high], [i, i], color=color)
        ax.plot(difference.mean, i, "D", color=color)
        # The seeds stand a little above the interval.
        height = [i - 0.08] * len(difference.by_seed)
        ax.plot(difference.by_seed, height, ".", color=color, alpha=0.5)
    ax.axvline(0, color="0.5", linewidth=0.8)
    ax.set_yticks(range(1, len(results)), [result.arm.name for result in other_results])
    ax.set_ylim(len(results) - 0.5, 0.5)
    ax.set_xlabel("percentage points, with 95% intervals")
    count = sum(SIGNIFICANT in difference.verdict for difference in differences)
    title = f"{count} of {len(differences)} differences from {first.arm.name} are significant"
    ax.set_title(title, loc="left")


# --- The command line -----------------------------------------------------------------------------


def parse_args(argv: list[str] | None = None):
    parser = ArgumentParser(
        description="Make the runs of a comparison of two or more settings, and say which is"
        " better. Flags of every run follow after --.",
        usage='%(prog)s --arm "FLAG VALUE ..." --arm "..." --output_dir DIR [...] -- FLAGS',
    )
    add = parser.add_argument
    add(
        "--arm",
        action="append",
        required=True,
        dest="arms",
        metavar="ARM",
        help="A setting, written as 'beta 0', '--loss_type gspo --cliprange 3e-4' or"
        " 'NAME: [SCRIPT.py] --flag value ...'. {seed} in it becomes the seed of a run. The other"
        " arms are compared with the first one.",
    )
    add(
        "--learning_rate",
        nargs="+",
        metavar="RATE",
        help="Learning rates that every arm gets, unless it names its own. Three that differ by a"
        " factor of 2 show where the best one lies. (default: one, that of the script)",
    )
    add("--seeds", type=int, default=4, help="Number of seeds, at least 2.")
    add("--first_seed", type=int, default=0, help="The first seed; the others follow it.")
    add(
        "--tuning_seeds",
        type=int,
        help="Number of seeds that every learning rate gets. The others are made at an arm's best"
        " rate alone. It saves runs, but the fewer the seeds, the more often a rate is chosen by"
        " chance. (default: --seeds)",
    )
    add(
        "--outcome",
        choices=("mean", "last"),
        default="mean",
        help="What is compared, of the accuracy on validation.\n"
        "mean: the mean over all evaluations after step 0, which counts speed as well as the end,"
        " and differs less by chance.\n"
        "last: the last evaluation.",
    )
    add(
        "--test_size",
        type=int,
        default=0,
        help="Number of test problems on which the last checkpoints at each arm's best rate are"
        " evaluated. With 0 nothing is evaluated on test.",
    )
    add(
        "--jobs",
        type=int,
        help="Runs at a time, on a CPU with one thread each. (default: one for each core, or a"
        " single one if there is a GPU)",
    )
    add(
        "--output_dir", type=Path, required=True, help="Folder for the runs, the table, the figure."
    )
    if argv is None:
        argv = sys.argv[1:]
    own_words = argv
    common_flags = []
    if "--" in argv:
        own_words = argv[: argv.index("--")]
        common_flags = argv[argv.index("--") + 1 :]
    args, other_words = parser.parse_known_args(own_words)
    if other_words:
        parser.error(f"{other_words[0]} is no flag of compare.py; flags of runs come after --")
    args.common_flags = common_flags
    if args.tuning_seeds is None:
        args.tuning_seeds = args.seeds
    if args.jobs is None:
        args.jobs = 1 if torch.cuda.is_available() else os.cpu_count()
    return args


def parse_arms(args) -> list[Arm]:
    """The arms of the command line. Raises ValueError for anything wrong on it."""
    if args.seeds < 2:
        raise ValueError(
            f"--seeds {args.seeds}: without a second seed nobody can tell an effect from chance"
        )
    if not 1 <= args.tuning_seeds <= args.seeds:
        raise ValueError(f"--tuning_seeds {args.tuning_seeds} must be 1 to --seeds {args.seeds}")
    if args.first_seed < 0 or args.test_size < 0:
        raise ValueError("--first_seed and --test_size must not be negative")
    if args.jobs < 1:
        raise ValueError(f"--jobs {args.jobs} must be 1 or more")
    if args.output_dir.exists() and not args.output_dir.is_dir():
        raise ValueError(f"{args.output_dir} is a file; name a directory")
    if "--learning_rate" in group_flags(args.common_flags) and args.learning_rate:
        raise ValueError("--learning_rate stands before -- and after it; leave one of them out")
    arms = [parse_arm(text, args.common_flags, args.learning_rate) for text in args.arms]
    for arm in arms:
        if len(set(arm.learning_rates)) < len(arm.learning_rates):
            raise ValueError(f"arm {arm.name}: a learning rate stands there twice")
    if len(arms) == 1:
        raise ValueError(f"there is one arm, {arms[0].name}: a comparison needs a second --arm")
    for first, second in itertools.combinations(arms, 2):
        if settings_of(first) == settings_of(second):
            raise ValueError(
                f"the arms {first.name} and {second.name} differ in nothing: there is nothing to"
                " compare"
            )
        if first.name == second.name:
            raise ValueError(
                f"two arms have the name {first.name}; name them: --arm 'NAME: --flag ...'"
            )
    return arms


def settings_of(arm: Arm) -> tuple:
    """What makes an arm's runs. Flags of main.py are parsed, since one may name a default."""
    flags = arm.flags
    if arm.script == "main.py":
        flags = asdict(parse(GRPOConfig, arm.flags))
    return arm.script, flags, arm.learning_rates


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves SIGHUP
            signal.signal(number, lambda *_: STOP.set())
    if not torch.cuda.is_available():
        # With one thread, all machines of one kind compute the same numbers.
        os.environ["OMP_NUM_THREADS"] = "1"
    try:
        arms = parse_arms(args)
        results = compare(args, arms)
        tables = make_tables(args, results)
        args.output_dir.mkdir(parents=True, exist_ok=True)
        (args.output_dir / "comparison.md").write_text(tables + "\n", "utf-8")
        with matplotlib.rc_context(plotter.STYLE):
            draw(args, results).savefig(args.output_dir / "comparison.png")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Failed as failed:
        print(f"error: {failed}", file=sys.stderr)
        return failed.exit_code
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    print(f"\n{tables}\n\nwritten to {args.output_dir}: comparison.md and comparison.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
