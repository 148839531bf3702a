"""Training, model size, and GRPO against SFT: figures and tables from the kept logs.

They are those of sections 2 to 4 of analysis.md. experiments/report.py writes them.
"""

import math
import re
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import plotter
from config import read_args
from experiments import kept_runs
from experiments.answers import STEP, checked_steps, question_in
from experiments.kept_runs import accuracy_by_seed, at_best_rates, by_seed, read
from experiments.report_style import (
    COLORS,
    draw_mean_and_range,
    label_lines,
    mean_and_range,
    new_figure,
    rate_text,
)
from logs import jsonl, markdown

# --- 2. Training ----------------------------------------------------------------------------------

REWARDS = {  # {arm of `dynamics`: (name, colour, maximum of the reward)}
    "grpo": ("GRPO", COLORS["GRPO"], 4),
    "format": ("format only", COLORS["format only"], 2),
    "random": ("random reward", COLORS["random reward"], 1),
}


def draw_training() -> tuple[Figure, str]:
    training = read("dynamics", "train_log.jsonl")
    evaluations = read("dynamics", "eval_log.jsonl")
    answers = kept_runs.answers("dynamics")
    titles = ["accuracy on validation", "careful steps", "reward", "entropy of samples"]
    titles += ["KL divergence of samples", "length of samples"]
    figure, panels = new_figure(titles, (9, 5.4), num_rows=2)
    accuracy, careful, reward, entropy, kl, length = panels
    for arm, (name, color, maximum) in REWARDS.items():
        curves = {
            accuracy: 100 * by_seed(evaluations, "accuracy", arm),
            careful: by_seed(answers, "careful_share", arm),
            reward: 100 / maximum * by_seed(training, "reward", arm).apply(plotter.smooth),
            entropy: by_seed(training, "entropy", arm).apply(plotter.smooth),
            kl: by_seed(training, "kl", arm).apply(plotter.smooth),
            length: by_seed(training, "response_length", arm).apply(plotter.smooth),
        }
        for ax, curve in curves.items():
            draw_mean_and_range(ax, curve, color, label=name)
        on_validation = 100 / maximum * by_seed(evaluations, "reward", arm).mean(axis="columns")
        reward.plot(on_validation, "o", color=color, markerfacecolor="white")
    accuracy.set(ylabel="accuracy (%)", ylim=(0, 102))
    careful.set(ylabel="share of the hard steps (%)", ylim=(0, 102))
    reward.set(ylabel="reward (% of its maximum)", ylim=(0, 102))
    entropy.set(ylabel="entropy (nats per token)", ylim=(0, None), xlabel="iteration")
    kl.set(ylabel="KL divergence (nats per token)", ylim=(0, None), xlabel="iteration")
    length.set(ylabel="length (tokens)", ylim=(0, None), xlabel="iteration")
    for ax in panels:
        label_lines(ax)
    return figure, (
        "*Rewarding right answers teaches careful steps; rewarding the format alone doesn't, and a "
        "random reward teaches nothing. Lines are means of three seeds, bands their range. Panels "
        "(a), (b) and the circles in (c) are greedy answers to 500 validation problems. The other "
        "curves are from training samples, smoothed by running medians of seven iterations. "
        "The loss isn't drawn: its value is 0.04 times (e).*"
    )


MEASURES_ON_TEST = {
    "accuracy on test (%)": "accuracy",
    "the same in any format (%)": "accuracy_flexible",
    "answers with steps (%)": "with_steps",
    "hard steps that are careful (%)": "careful_share",
    "length (tokens)": "tokens",
}


def demo_on_test() -> tuple[pd.Series, dict[str, pd.DataFrame]]:
    """The model before training, and {arm: its seeds} after it."""
    models = kept_runs.answers("dynamics")
    before = models[models["run"] == "before"].iloc[0]
    after = kept_runs.answers("dynamics", "test.jsonl")
    return before, {arm: after[after["arm"] == arm] for arm in REWARDS}


def training_table() -> str:
    before, after = demo_on_test()
    rows = []
    for measure, column in MEASURES_ON_TEST.items():
        decimals = 0 if column == "tokens" else 1
        cells = [mean_and_range(seeds[column], decimals) for seeds in after.values()]
        rows.append([measure, f"{before[column]:.{decimals}f}", *cells])
    training = read("dynamics", "train_log.jsonl")
    for measure, column in (("entropy", "entropy"), ("KL divergence", "kl")):
        curves = {arm: by_seed(training, column, arm) for arm in REWARDS}
        first = f"{curves['grpo'].head().mean().mean():.2f}"
        last = [mean_and_range(curve.tail().mean(), 2) for curve in curves.values()]
        rows.append([f"{measure} of samples (nats per token)", first, *last])
    names = [name for name, _, _ in REWARDS.values()]
    return markdown.table(["measure", "before", *names], rows)


STEPS = {
    "hard steps that are careful": "careful_share",
    "careful steps that are right": "careful_right",
    "direct steps that are right": "direct_right",
    "easy steps that are right": "easy_right",
}


def mechanism_table() -> str:
    """The shares of right steps, and the accuracy if each step were right by itself."""
    before, after = demo_on_test()
    after = after["grpo"].mean(numeric_only=True)
    more_careful = before.copy()
    more_careful["careful_share"] = after["careful_share"]
    columns = [
        shares[list(STEPS.values())].astype(float) for shares in (before, more_careful, after)
    ]
    rows = []
    for name, column in STEPS.items():
        rows.append([name, *(f"{shares[column]:.1f}%" for shares in columns)])
    num_hard = (after["careful"] + after["direct"]) / after["n"]
    num_easy = after["easy"] / after["n"]
    expected = [expected_accuracy(shares / 100, num_hard, num_easy) for shares in columns]
    name = f"{num_hard:.2f} hard and {num_easy:.2f} easy steps all right, predicted"
    rows.append([name, *(f"{share:.1%}" for share in expected)])
    header = ["share", "before training", "before, but as careful as after", "after training"]
    return markdown.table(header, rows)


def expected_accuracy(shares: pd.Series, num_hard: float, num_easy: float) -> float:
    """The chance that all steps of an answer are right, if they are independent."""
    careful = shares["careful_share"]
    hard_right = careful * shares["careful_right"] + (1 - careful) * shares["direct_right"]
    return hard_right**num_hard * shares["easy_right"] ** num_easy


# --- 3. Scaling -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """A model of this size, trained by the flags of the demo."""

    name: str
    study: str
    arm: str
    before: str  # the run that evaluates it before training
    color: str
    pretraining_seconds: int  # of one core: tiny/README.md

    def num_parameters(self) -> int:
        run = kept_runs.STUDIES / self.study / f"{self.arm}_seed0"
        return read_args(run / "args.json")["parameters"]

    def validation(self) -> pd.DataFrame:
        return 100 * by_seed(read(self.study, "eval_log.jsonl"), "accuracy", self.arm)

    def test_before(self) -> float:
        models = kept_runs.answers(self.study)
        return models.loc[models["run"] == self.before, "accuracy"].item()

    def test_after(self) -> pd.Series:
        runs = kept_runs.answers(self.study, "test.jsonl")
        return runs.loc[runs["arm"] == self.arm, "accuracy"]


# All are GRPO, so all are blue: the larger, the darker.
SIZES = (
    Size("0.1m", "scaling", "0.1m", "0.1m_before", "#7ab8dc", 281),
    Size("0.3m", "scaling", "0.3m", "0.3m_before", "#3d97cc", 806),
    Size("1m", "dynamics", "grpo", "before", COLORS["GRPO"], 1640),
    Size("3m", "scaling", "3m", "3m_before", "#00304d", 3840),
)
SAMPLES_PER_ITERATION = 128  # of the demo


def draw_scaling() -> tuple[Figure, str]:
    titles = ["accuracy by iteration", "accuracy by size"]
    figure, (by_iteration, by_size) = new_figure(titles, (7.5, 3.6))
    for size in SIZES:
        curves = size.validation()
        draw_mean_and_range(by_iteration, curves, size.color, marker="o", label=size.name)
        seeds = size.test_after()
        x = size.num_parameters()
        dot = {"marker": "o", "linestyle": "", "color": size.color}
        by_size.plot(x, size.test_before(), **dot, markerfacecolor="white")
        by_size.plot([x] * len(seeds), seeds, **dot)
    label_lines(by_iteration)
    by_iteration.set(xlabel="iteration", ylabel="accuracy on validation (%)", ylim=(-2, 102))
    by_size.set(ylabel="accuracy on test (%)", ylim=(-2, 102), xscale="log", xlim=(6e4, 4.5e6))
    ticks = {size.num_parameters(): size.name for size in SIZES}
    by_size.set_xticks(list(ticks), [f"{name}\n{x / 1e6:.2f}" for x, name in ticks.items()])
    by_size.set_xticks([], minor=True)
    by_size.set_xlabel("model, and its parameters in millions")
    by_size.text(1.7e6, 86, "after", ha="center", va="center")
    by_size.text(1.7e6, 31, "before", ha="center", va="center")
    return figure, (
        "*1m and 3m learn the task; 0.1m and 0.3m barely do. (a) Accuracy on 500 validation "
        "problems: mean of three seeds, with their range. 1m is the demo. (b) Accuracy on 2,000 "
        "test problems: hollow before training, filled after, one dot per seed.*"
    )


def iteration_that_reaches(level: float, curve: pd.Series) -> float:
    """Where a curve first has a level, between two evaluations on a straight line; inf if never."""
    # np.interp needs values that rise.
    rising = np.maximum.accumulate(curve) + 1e-9 * np.arange(len(curve))
    return float(np.interp(level, rising, curve.index, right=np.inf))


def scaling_table() -> str:
    level = 80  # % of right answers on validation
    header = ["model", "test before", "test after", f"iterations to {level}%", "samples"]
    header += ["core-seconds", "core-seconds of pre-training"]
    rows = []
    for size in SIZES:
        row = [size.name, f"{size.test_before():.1f}", mean_and_range(size.test_after())]
        curves = size.validation()
        iteration = iteration_that_reaches(level, curves.mean(axis="columns"))
        if math.isinf(iteration):
            row += ["not in 100", "", ""]
        else:
            seeds = [iteration_that_reaches(level, curve) for _, curve in curves.items()]
            training = read(size.study, "train_log.jsonl")
            seconds = by_seed(training, "time/total", size.arm).cumsum()
            quickest = seconds.loc[math.ceil(iteration)].min()  # others shared their core
            row += [f"{iteration:.0f} ({min(seeds):.0f} to {max(seeds):.0f})"]
            row += [f"{round(iteration * SAMPLES_PER_ITERATION, -2):,.0f}"]
            row += [f"{round(quickest, -1):.0f}"]
        rows.append([*row, f"{size.pretraining_seconds:,}"])
    return markdown.table(header, rows)


def operands_table() -> str:
    """How many answers take numbers from nowhere, and how many are wrong for that alone."""
    header = ["after training, one seed", "answers", "with an invented number"]
    header += ["with every step right", "of these, wrong", "of the wrong ones, invented"]
    rows = []
    for name, run in (("0.3m", "scaling/0.3m_seed0"), ("1m, the demo", "dynamics/grpo_seed0")):
        answers = jsonl.read(kept_runs.STUDIES / run / "eval" / "step_000100.jsonl")
        answers = [answer for answer in answers if answer["level"] > 1]
        steps_are_right = [answer for answer in answers if all_steps_are_right(answer)]
        wrong = [answer for answer in steps_are_right if not answer["correct_flexible"]]
        counts = [len(answers), sum(map(invents_number, answers)), len(steps_are_right)]
        counts += [len(wrong), sum(map(invents_number, wrong))]
        rows.append([name, *map(str, counts)])
    return markdown.table(header, rows)


def all_steps_are_right(answer: dict) -> bool:
    steps = checked_steps(answer["completion"])
    return bool(steps) and all(is_right for _, is_right in steps)


def invents_number(answer: dict) -> bool:
    """Whether a step takes a number that is neither in the question nor an earlier result."""
    known = set(re.findall(r"\d+", question_in(answer["prompt"])))
    for step in STEP.finditer(answer["completion"]):
        operands = {step["first"] or step["divisor"], step["second"]}
        if not operands <= known:
            return True
        known.add(step["result"])
    return False


# --- 4. GRPO against SFT --------------------------------------------------------------------------

MORE_UPDATES = 10_000  # On so many solutions SFT makes 313 updates; on fewer ones it makes 60.
SIZES_WITH_WORTH = (10, 100, 1_000, 10_000)  # the other sizes only tell how accuracy rises


def runs_on_solutions(log: str = "test.jsonl") -> pd.DataFrame:
    """The last answers of runs that learnt from solutions, with their kind and number."""
    table = kept_runs.last(at_best_rates("sft", log))
    names = table["arm"].str.extract(r"(?P<kind>[a-z]+)(?P<solutions>\d+)")
    table = table.assign(kind=names["kind"], solutions=names["solutions"].astype(int))
    return table.sort_values(["kind", "solutions", "seed"], ascending=[False, True, True])


def runs_with_worth(log: str) -> pd.DataFrame:
    """The same, of the numbers of solutions that are compared with iterations of GRPO."""
    runs = runs_on_solutions(log)
    return runs[runs["solutions"].isin(SIZES_WITH_WORTH)]


def draw_sft() -> tuple[Figure, str]:
    titles = ["SFT, by number of solutions", "GRPO, by iteration, and where SFT ends"]
    figure, (sizes, iterations) = new_figure(titles, (9.5, 4.2))
    draw_sizes(sizes)
    draw_exchange(iterations)
    worth = worth_of_solutions()["careful10"].iterations
    return figure, (
        "*On 100 or more careful solutions SFT ends between GRPO's two settings or level with them,"
        f" on direct ones far below. Ten careful solutions are worth {worth:.0f} iterations. (a) "
        "Dots are three seeds at each set's best learning rate, lines their means, bands GRPO's "
        "seeds. (b) A line is where SFT ends, a dot where the mean of the baseline's seeds first "
        "reaches that; bars, and the numbers in brackets, give the range over seeds.*"
    )


def draw_sizes(ax: Axes) -> None:
    color = COLORS["SFT"]
    for kind, runs in runs_on_solutions().groupby("kind"):
        marker, linestyle = {"careful": ("o", "-"), "direct": ("s", "--")}[kind]
        same_updates = runs[runs["solutions"] < MORE_UPDATES]
        more_updates = runs[runs["solutions"] >= MORE_UPDATES]
        means = same_updates.groupby("solutions")["accuracy"].mean()
        ax.plot(means, linestyle, color=color)
        ax.plot("solutions", "accuracy", marker, color=color, data=same_updates)
        hollow = {"color": color, "markerfacecolor": "none"}
        ax.plot("solutions", "accuracy", marker, **hollow, data=more_updates)
    before, demo = demo_on_test()
    for seeds in (accuracy_by_seed("rates", "base"), demo["grpo"]["accuracy"]):
        ax.axhspan(seeds.min(), seeds.max(), color=COLORS["GRPO"], alpha=0.2, linewidth=0)
    ax.axhline(before["accuracy"], color=COLORS["before training"], linestyle=":")
    for x, y, text, method in (
        (25, 77, "SFT on careful solutions", "SFT"),
        (25, 45, "SFT on direct solutions", "SFT"),
        (8_300, 59.5, "10,000 direct, five times the updates", "SFT"),
        (17_000, 95.5, "GRPO, the demo", "GRPO"),
        (17_000, 85.5, "GRPO, the baseline", "GRPO"),
        (17_000, 27, "before training", "before training"),
    ):
        side = "left" if x < 100 else "right"
        ax.text(x, y, text, color=COLORS[method], ha=side, va="center")
    ax.set(xscale="log", xlim=(7, 18_000), ylim=(0, 100))
    ax.set(xlabel="worked solutions", ylabel="accuracy on test (%)")
    ax.xaxis.set_major_formatter("{x:,.0f}")


@dataclass(frozen=True)
class Worth:
    """After how many iterations GRPO has the accuracy at which SFT ends, on validation."""

    accuracy: float  # of SFT, the mean over its seeds
    iterations: float  # by the mean curve of GRPO
    by_seed: list[float]  # by the curve of each seed of GRPO
    evaluated: list[int]  # the iterations after which GRPO was evaluated

    def cell(self) -> str:
        words = [self.in_words(iterations) for iterations in sorted(self.by_seed)]
        mean = self.in_words(self.iterations)
        return mean if words[0] == words[-1] else f"{mean} ({words[0]} to {words[-1]})"

    def in_words(self, iterations: float) -> str:
        if iterations <= self.evaluated[1]:
            return f"< {self.evaluated[1]}"
        return f"{iterations:.0f}" if math.isfinite(iterations) else f"> {self.evaluated[-1]}"

    def per_solution(self, solutions: int) -> str:
        if self.iterations <= self.evaluated[1]:
            return f"< {self.evaluated[1] / solutions:g}"
        if math.isfinite(self.iterations):
            return f"{self.iterations / solutions:.2g}"
        return f"> {self.evaluated[-1] / solutions:g}"


def grpo_with_more_evaluations() -> pd.DataFrame:
    """The baseline of GRPO on validation, evaluated every five iterations."""
    return by_seed(kept_runs.answers("exchange"), "accuracy", "grpo")


def worth_of_solutions() -> dict[str, Worth]:
    """{arm of SFT: its worth}."""
    curves = grpo_with_more_evaluations()
    worths = {}
    for arm, runs in runs_with_worth("answers.jsonl").groupby("arm", sort=False):
        accuracy = runs["accuracy"].mean()
        seeds = [iteration_that_reaches(accuracy, curve) for _, curve in curves.items()]
        mean = iteration_that_reaches(accuracy, curves.mean(axis="columns"))
        worths[arm] = Worth(accuracy, mean, seeds, curves.index.to_list())
    return worths


def draw_exchange(ax: Axes) -> None:
    curves = grpo_with_more_evaluations()
    last_iteration = curves.index[-1]
    ax.set(xlim=(0, last_iteration), ylim=(0, 100))
    ax.set(xlabel="iteration of GRPO", ylabel="accuracy on validation (%)")
    draw_mean_and_range(ax, curves, COLORS["GRPO"], linewidth=2)
    ax.text(30, 53, "GRPO, the baseline", color=COLORS["GRPO"])
    color = COLORS["SFT"]
    labels = {}
    for arm, worth in worth_of_solutions().items():
        kind, number = re.fullmatch(r"([a-z]+)(\d+)", arm).groups()
        linestyle = "-" if kind == "careful" else "--"
        ax.axhline(worth.accuracy, color=color, linestyle=linestyle, linewidth=0.8)
        first, *_, last = np.minimum(sorted(worth.by_seed), last_iteration)
        if last > curves.index[1]:
            ax.plot([first, last], [worth.accuracy] * 2, color=color, linewidth=3)
        if math.isfinite(worth.iterations):
            ax.plot(worth.iterations, worth.accuracy, "o", color=color, markersize=6)
        labels[f"{int(number):,} {kind}: {worth.cell()}"] = color, worth.accuracy
    plotter.label_ends(ax, labels)


def sft_table() -> str:
    header = ["training", "rate", "accuracy on test (%)", "worth in iterations", "per solution"]
    header.append("minus the baseline")
    baseline = accuracy_by_seed("rates", "base")
    worths = worth_of_solutions()
    rows = []
    for arm, runs in runs_with_worth("test.jsonl").groupby("arm", sort=False):
        first = runs.iloc[0]
        seeds = runs.set_index("seed")["accuracy"]
        row = [f"SFT on {first['solutions']:,} {first['kind']}", rate_text(first["rate"])]
        row += [mean_and_range(seeds), worths[arm].cell()]
        row.append(worths[arm].per_solution(first["solutions"]))
        rows.append([*row, kept_runs.difference(seeds, baseline).mean_cell()])
    _, demo = demo_on_test()
    rows.append(["GRPO, the baseline", "2e-4", mean_and_range(baseline), "60", "", ""])
    rows.append(["GRPO, the demo", "1e-4", mean_and_range(demo["grpo"]["accuracy"]), "", "", ""])
    return markdown.table(header, rows)


def sizes_table() -> str:
    """Accuracy on test after SFT, by the number of solutions and by their kind."""
    runs = runs_on_solutions()
    means = runs.pivot_table(index="kind", columns="solutions", values="accuracy")
    rows = []
    for kind in ("direct", "careful"):
        cells = ["" if np.isnan(accuracy) else f"{accuracy:.1f}" for accuracy in means.loc[kind]]
        rows.append([kind, *cells])
    return markdown.table(["solutions", *(f"{size:,}" for size in means)], rows)


FIGURES = {
    "training": draw_training,
    "scaling": draw_scaling,
    "sft": draw_sft,
}
TABLES = {
    "training": training_table,
    "scaling": scaling_table,
    "sft": sft_table,
    "sizes": sizes_table,
}
