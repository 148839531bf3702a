"""The judge, the choices of a trainer, expert iteration and CS336: figures and tables.

They are those of sections 5, 7 and 8 of analysis.md and of its appendix, from the kept logs.
experiments/report.py writes them.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import plotter
from config import read_args
from experiments import archive, kept_runs
from experiments.kept_runs import accuracy_by_seed, at_best_rates, by_seed, read
from experiments.paired import Difference, judge, outcome_at_best_rate
from experiments.report_style import (
    COLORS,
    draw_mean_and_range,
    label_end,
    label_lines,
    mean_and_range,
    new_figure,
    rate_text,
)
from logs import markdown

STUDIES = kept_runs.STUDIES
# Settings of GRPO that are compared within a panel; the first one is the usual one.
SETTINGS = (COLORS["GRPO"], "#000000", "#56B4E9", "#882255", "#999999")


def first_and_last(curves: pd.DataFrame, decimals: int) -> str:
    """A cell such as `0.17 → 0.03`: the first five iterations and the last five, mean of seeds."""
    first = curves.head().mean().mean()
    last = curves.tail().mean().mean()
    return f"{first:.{decimals}f} → {last:.{decimals}f}"


def accuracy_on_validation(study: str) -> pd.Series:
    """The last accuracy of each arm on validation, mean of its seeds."""
    ends = kept_runs.last(at_best_rates(study, "answers.jsonl"))
    return ends.groupby("arm")["accuracy"].mean()


# --- 5. A judge -----------------------------------------------------------------------------------

PENALTIES = {  # {arm of `judge`: (name, how it is drawn)}
    "beta0.04": ("beta 0.04", {"color": COLORS["GRPO"]}),
    "beta0.4": ("beta 0.4", {"color": "#56B4E9", "linestyle": "--"}),
}
JUDGED_SEEDS = range(3)


def draw_judge() -> tuple[Figure, str]:
    log = read("judge", "train_log.jsonl")
    log = log.assign(diversity=100 * log["distinct_2_batch"])
    measures = {
        "diversity": "distinct word pairs in a batch (%)",
        "reward": "reward (nats per token)",
        "kl": "KL divergence (nats per token)",
    }
    titles = ["diversity of the stories", "the judge's reward", "KL divergence"]
    figure, panels = new_figure(titles, (9, 3.2))
    for ax, (measure, label) in zip(panels, measures.items(), strict=True):
        for arm, (name, style) in PENALTIES.items():
            curves = by_seed(log, measure, arm).apply(plotter.smooth)
            draw_mean_and_range(ax, curves, **style, label=name)
        ax.set(xlabel="iteration", ylabel=label)
        if measure == "diversity":
            ax.set_ylim(0, 100)
        label_lines(ax)
    return figure, (
        "*With a light penalty (beta 0.04) the judge's reward rises most, and the stories "
        "converge. Training samples, smoothed by a running median of five iterations: lines are "
        "means of three seeds, bands their range. Texts that break a rule get a low fixed reward.*"
    )


def judge_table() -> str:
    """How well the judges tell stories from damaged copies of them."""
    archive.unpack("judge")
    folder = STUDIES / "judge"
    names = [f"likelihood_seed{seed}.json" for seed in JUDGED_SEEDS]
    reports = [json.loads((folder / name).read_text("utf-8")) for name in names]
    likelihood = pd.DataFrame(reports)
    archive.unpack("real")
    path = STUDIES / "real" / "judge_seed0" / "judge_report.json"
    rating = json.loads(path.read_text("utf-8"))
    rows = []
    for damage, name in {
        "shuffled words": "shuffled words",
        "shuffled sentences": "shuffled sentences",
        "cut": "the second half cut off",
        "repeated": "the first half twice",
    }.items():
        cells = [mean_and_range(likelihood[f"auc/{damage}"], 2)]
        cells.append("{auc:.2f} [{low:.2f}, {high:.2f}]".format(**rating[damage]))
        rows.append([f"AUC, {name}", *cells])
    for name, key in {
        "rank correlation with length": "length_correlation",
        "standard deviation within a group": "spread",
    }.items():
        rows.append([name, mean_and_range(likelihood[key], 2), f"{rating[key]:.2f}"])
    return markdown.table(["intact against damaged", "likelihood judge", "rating judge"], rows)


# --- 7. The choices of a trainer ------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """A setting of the study `choices`, and the one that it is compared with."""

    name: str
    arm: str
    reference: str = "base"

    @property
    def label(self) -> str:
        if self.reference == "base":
            return self.name
        return f"{self.name} minus {REFERENCES[self.reference]}"

    @property
    def class_name(self) -> str:
        return "several updates" if self.arm.startswith("updates") else "one update"


REFERENCES = {
    "base": "the baseline",
    "updates16": "clip, 16 updates",
    "no_std": "mean subtracted",
    "answer_reward": "reasoning_answer",
    "r1_zero": "r1_zero",
}
CHOICES = (
    Choice("raw rewards", "no_baseline"),
    Choice("raw rewards", "no_baseline", "no_std"),
    Choice("no division by the std", "no_std"),
    Choice("mean over all tokens", "token_mean"),
    Choice("sum divided by a constant", "masked_normalize"),
    Choice("Dr. GRPO", "dr_grpo"),
    Choice("beta 0", "beta0"),
    Choice("32 prompts x 2 samples", "group2"),
    Choice("2 prompts x 32 samples", "group32"),
    Choice("DAPO's sampler", "dynamic_sampling"),
    Choice("reward for the answer alone", "answer_reward"),
    Choice("expert iteration, 60 rounds", "expert_iteration"),
    Choice("r1_zero", "r1_zero", "answer_reward"),
    Choice("question_only", "question_only", "answer_reward"),
    Choice("question_only", "question_only", "r1_zero"),
    Choice("2 updates per batch", "updates2"),
    Choice("4 updates per batch", "updates4"),
    Choice("16 updates per batch", "updates16"),
    Choice("no clip", "updates16_no_clip", "updates16"),
    Choice("CISPO", "updates16_cispo", "updates16"),
    Choice("REINFORCE", "updates16_reinforce", "updates16"),
    Choice("clip-higher", "updates16_clip_higher", "updates16"),
    Choice("GSPO", "updates16_gspo", "updates16"),
)
FIRST_SEEDS = [3, 4, 5, 6]  # They have three learning rates; seeds 7 and 8 have two of them.


@cache
def accuracy_over_the_run() -> pd.Series:
    """The mean accuracy after iteration 0 on validation, in %: indexed by arm, rate and seed."""
    evaluations = read("choices", "eval_log.jsonl")
    runs = {}
    for name, run in evaluations.groupby(["arm", "rate", "seed"]):
        runs[name] = run
    outcomes = {}
    for (arm, rate, seed), run in runs.items():
        accuracies = run["accuracy"].iloc[1:]
        if arm == "dynamic_sampling":  # It samples more in an iteration: compare at equal tokens.
            tokens = runs["base", rate, seed]["total_tokens"].iloc[1:]
            accuracies = np.interp(tokens, run["total_tokens"], run["accuracy"])
        outcomes[arm, rate, seed] = 100 * accuracies.mean()
    return pd.Series(outcomes)


@dataclass(frozen=True)
class Arm:
    rates: pd.DataFrame  # the outcome of each seed (rows) at each learning rate (columns)
    best_rate: float  # estimated
    by_seed: pd.Series  # the outcome of each seed there

    @property
    def nearest_rate(self) -> float:
        """Of the rates that were run, the one nearest to the best."""
        return min(self.rates, key=lambda rate: abs(math.log(rate / self.best_rate)))


@cache
def arm_at_estimated_rate(name: str) -> Arm:
    """The accuracy of an arm averaged over the run, at the learning rate that suits it best.

    Seeds 7 and 8 have only the two rates around the best one. Their outcome there is read from the
    straight line between the two, raised as far as the curve of the first seeds lies above theirs.
    """
    rates = accuracy_over_the_run()[name].unstack(level=0)
    first = rates.loc[FIRST_SEEDS]
    best_rate, outcomes = outcome_at_best_rate({rate: first[rate].to_numpy() for rate in first})
    by_seed = pd.Series(outcomes, FIRST_SEEDS)
    later = rates.drop(FIRST_SEEDS).dropna(axis="columns")
    if not later.empty:
        low, high = later.columns
        weight = math.log(best_rate / low) / math.log(high / low)
        line = (1 - weight) * rates[low] + weight * rates[high]
        height = by_seed.mean() - line[FIRST_SEEDS].mean()
        by_seed = pd.concat([by_seed, line[later.index] + height])
    return Arm(rates, best_rate, by_seed)


def judge_choices(outcome: Callable[[str], pd.Series]) -> list[Difference]:
    """All choices by one rule: intervals of 97.5%, and variances pooled over all seeds.

    They are pooled in two classes: comparisons of settings with one update for each batch, and
    those in which a setting has several.

    Args:
        outcome: the outcomes of an arm by seed.
    """
    differences = []
    for choice in CHOICES:
        by_seed = outcome(choice.arm) - outcome(choice.reference)
        differences.append(by_seed.dropna().to_numpy())
    return judge(differences, confidence=0.975, classes=[choice.class_name for choice in CHOICES])


@cache
def choices_over_the_run() -> list[Difference]:
    return judge_choices(lambda arm: arm_at_estimated_rate(arm).by_seed)


def curves_of(arm: str, column: str, log: str = "train_log.jsonl") -> pd.DataFrame:
    """The first seeds of an arm at the rate nearest to its best one: a column for each seed."""
    rate = arm_at_estimated_rate(arm).nearest_rate
    return by_seed(read("choices", log), column, arm, rate)[FIRST_SEEDS]


def accuracy_at_the_end(arm: str) -> pd.Series:
    """The share of right answers on validation at iteration 60, by seed."""
    return curves_of(arm, "accuracy", "eval_log.jsonl").loc[60]


def draw_choices() -> tuple[Figure, str]:
    figure = Figure((9, 5.6), layout="constrained")
    rates, forest = figure.subplots(1, 2, width_ratios=[1, 1.6])
    rates.set_title("(a) the baseline by learning rate", loc="left")
    forest.set_title("(b) each choice at its best rate", loc="left")
    draw_rates(rates)
    draw_forest(forest)
    return figure, (
        "*The group's mean, the group size and the learning rate matter most. (a) Means of four "
        "seeds, with their range. (b) Accuracy averaged over iterations 10 to 60: difference from "
        "the baseline, or from the setting after the minus sign, with 97.5% intervals; filled: "
        "significant after correction.*"
    )


def draw_rates(ax: Axes) -> None:
    over_the_run = arm_at_estimated_rate("base").rates.loc[FIRST_SEEDS]
    log = read("choices", "eval_log.jsonl")
    at_the_end = pd.DataFrame(
        {rate: 100 * by_seed(log, "accuracy", "base", rate).loc[60] for rate in over_the_run}
    ).loc[FIRST_SEEDS]
    color = COLORS["GRPO"]
    draw_mean_and_range(ax, at_the_end.T, color, linestyle="--", marker="o", markerfacecolor="w")
    draw_mean_and_range(ax, over_the_run.T, color, marker="o")
    ax.set(xscale="log", xlabel="learning rate", ylabel="accuracy on validation (%)")
    ax.set_xticks(list(over_the_run), map(rate_text, over_the_run))
    ax.set_xticks([], minor=True)
    for text, x, y, side in (
        ("at iteration 60", 2e-4, at_the_end.max().max(), "center"),
        ("averaged\nover the run", 4e-4, over_the_run.min().max() - 2, "right"),
    ):
        ax.text(x, y, text, color=color, ha=side, va="bottom" if side == "center" else "top")


def draw_forest(ax: Axes) -> None:
    """A row for each choice, the best one on top."""
    rows = sorted(zip(choices_over_the_run(), CHOICES, strict=True), key=lambda row: row[0].mean)
    ax.axvline(0, color="0.4", linewidth=0.8)
    for y, (difference, _) in enumerate(rows):
        color = "0.1" if difference.verdict == "significant" else "0.5"
        fill = color if difference.verdict == "significant" else "white"
        ax.plot([difference.low, difference.high], [y, y], color=color, linewidth=1.5)
        ax.plot(difference.mean, y, "o", color=color, markerfacecolor=fill, markersize=5)
    ax.set_yticks(range(len(rows)), [choice.label for _, choice in rows])
    ax.set_ylim(-0.6, len(rows) - 0.4)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    ax.set_xlabel("difference averaged over the run (points)")


def choices_table() -> str:
    header = ["choice", "compared with", "averaged over the run", "verdict", "at 60", "at 100"]
    at_60 = judge_choices(lambda arm: 100 * accuracy_at_the_end(arm))
    rows = []
    for choice, over_the_run, end in zip(CHOICES, choices_over_the_run(), at_60, strict=True):
        row = [choice.name, REFERENCES[choice.reference], over_the_run.mean_cell()]
        # DAPO's sampler has sampled more by then, at twice the baseline's rate.
        at_end = "" if choice.arm == "dynamic_sampling" else end.mean_cell()
        row += [over_the_run.verdict, at_end, after_100_iterations(choice)]
        rows.append((over_the_run.mean, row))
    rows.sort(key=lambda row: -row[0])
    return markdown.table(header, [row for _, row in rows])


def after_100_iterations(choice: Choice) -> str:
    """The difference on test, where both settings were run for 100 iterations."""
    runs = kept_runs.answers("choices", "test.jsonl")
    ends = runs.pivot(index="seed", columns="arm", values="accuracy")
    arm = f"{choice.arm}_100"
    reference = f"{choice.reference}_100"
    if not {arm, reference} <= set(ends):
        return ""
    return kept_runs.difference(ends[arm], ends[reference]).mean_cell()


BASELINE_RATE = 2e-4


def rates_table() -> str:
    validation = kept_runs.last(kept_runs.answers("rates"))
    test = kept_runs.answers("rates", "test.jsonl")
    training = read("rates", "train_log.jsonl")
    baseline = accuracy_by_seed("rates", "base")
    rows = []
    for rate, seeds in validation.groupby("rate"):
        row = [rate_text(rate), mean_and_range(seeds["accuracy"])]
        on_test = test[test["rate"] == rate].set_index("seed")
        if on_test.empty:  # one seed, which was not tested
            row += ["", "", ""]
        else:
            difference = kept_runs.difference(on_test["accuracy"], baseline).mean_cell()
            row += [mean_and_range(on_test["accuracy"])]
            row += ["" if rate == BASELINE_RATE else difference]
            row += [f"{on_test['careful_share'].mean():.1f}"]
        for measure, decimals in (("entropy", 3), ("kl", 2)):
            curves = by_seed(training, measure, "base", rate)
            row.append(f"{curves.tail().mean().mean():.{decimals}f}")
        rows.append(row)
    header = ["learning rate", "validation at 60 (%)", "test (%)", "difference from 2e-4"]
    header += ["careful share of hard steps (%)", "entropy (nats)", "KL (nats)"]
    return markdown.table(header, rows)


TRAINED = {  # {arm of `lora`: what is trained}
    "full": "all weights",
    "lora1": "rank 1",
    "lora4": "rank 4",
    "lora32": "rank 32",
}
REAL_RUNS = {  # {run of SmolLM2: (what is trained, the learning rate)}
    "real_start": ("nothing yet", ""),
    "real_full_seed1": ("all weights", "2e-5"),
    "real_lora1_seed1": ("rank 1", "4e-4"),
}


def lora_table() -> str:
    """Adapters of several ranks beside full training, on test."""
    rates = at_best_rates("lora", "test.jsonl").groupby("arm")["rate"].first()
    full = accuracy_by_seed("lora", "full")
    rows = []
    for arm, name in TRAINED.items():
        seeds = accuracy_by_seed("lora", arm)
        difference = "" if arm == "full" else kept_runs.difference(seeds, full).mean_cell()
        row = ["tiny/1m", name, rate_text(rates[arm]), mean_and_range(seeds), difference]
        rows.append([*row, ""])
    evaluations = read("lora", "eval_log.jsonl").set_index("run")["accuracy"]
    for run, (name, rate) in REAL_RUNS.items():
        greedy = f"{100 * evaluations[f'{run}_test']:.1f}"
        sampled = f"{100 * evaluations[f'{run}_test_sampled']:.1f}"
        rows.append(["SmolLM2-135M", name, rate, greedy, "", sampled])
    header = ["model", "trained", "rate", "greedy (%)", "minus all weights", "sampled (%)"]
    return markdown.table(header, rows)


# --- 8. Expert iteration and filtered SFT ---------------------------------------------------------

EXPERT_ITERATION = re.compile(r"questions(\d+)_group(\d+)_epochs(\d+)")
BASELINE_SAMPLES = 60 * 8 * 8
NUM_SMALL_ROUNDS = 60


@dataclass(frozen=True)
class Rounds:
    """A setting of expert iteration in large rounds."""

    arm: str
    num_questions: int
    group_size: int
    epochs: int

    @property
    def name(self) -> str:
        epochs = "1 epoch" if self.epochs == 1 else f"{self.epochs} epochs"
        return f"{self.num_questions} x {self.group_size}, {epochs}"

    @property
    def short_name(self) -> str:
        return "1 epoch" if self.epochs == 1 else f"{self.num_questions} x {self.group_size}"

    @property
    def samples(self) -> int:
        """Of one round."""
        return self.num_questions * self.group_size


def settings_of_expert_iteration() -> list[Rounds]:
    """Every setting that has a run."""
    arms = at_best_rates("expert_iteration", "test.jsonl")["arm"].unique()
    settings = [Rounds(arm, *map(int, EXPERT_ITERATION.fullmatch(arm).groups())) for arm in arms]
    return sorted(settings, key=lambda rounds: (rounds.samples, -rounds.group_size, -rounds.epochs))


def expert_iteration_table() -> str:
    header = ["method", "questions x samples", "rounds", "samples", "accuracy on test (%)"]
    header.append("difference from GRPO")
    grpo = accuracy_by_seed("rates", "base")
    num_rounds = read("expert_iteration", "train_log.jsonl").groupby("arm")["ei_step"].max()
    rows = [["GRPO", "8 x 8", "60", f"{BASELINE_SAMPLES:,}", mean_and_range(grpo), ""]]
    for setting in settings_of_expert_iteration():
        seeds = accuracy_by_seed("expert_iteration", setting.arm)
        rounds = num_rounds[setting.arm]
        row = ["expert iteration", setting.name, str(rounds), f"{rounds * setting.samples:,}"]
        row += [mean_and_range(seeds), kept_runs.difference(seeds, grpo).mean_cell()]
        rows.append(row)
    (small_rounds,) = [
        difference.mean_cell()
        for difference, choice in zip(choices_over_the_run(), CHOICES, strict=True)
        if choice.arm == "expert_iteration"
    ]
    row = ["expert iteration", "8 x 8, 1 update", str(NUM_SMALL_ROUNDS), f"{BASELINE_SAMPLES:,}"]
    rows.append([*row, "not tested", f"{small_rounds} over the run, on validation (97.5%)"])
    return markdown.table(header, rows)


@cache
def evaluations_by_round() -> pd.DataFrame:
    """The evaluations of expert iteration on validation, with `ei_step`, the round before them."""
    evaluations = at_best_rates("expert_iteration", "answers.jsonl")
    log = read("expert_iteration", "train_log.jsonl")
    rounds = log[["run", "step", "ei_step"]]
    evaluations = evaluations.merge(rounds, how="left", on=["run", "step"])
    evaluations["ei_step"] = evaluations["ei_step"].fillna(0)
    return evaluations


def draw_expert_iteration() -> tuple[Figure, str]:
    titles = ["accuracy by samples", "entropy of all samples", "entropy of the kept samples"]
    figure, (accuracy, entropy, kept_entropy) = new_figure(titles, (10, 4))
    draw_accuracy_by_samples(accuracy)
    draw_entropy_by_samples(entropy)
    draw_entropy_of_large_rounds(kept_entropy)
    return figure, (
        "*Five rounds of 96 x 8 end below GRPO and sixty small rounds with as many "
        'samples. Green: questions x samples per round, with four epochs in large ones; "1 epoch" '
        "is 96 x 8 with one. Lines are means of three seeds (large rounds; GRPO in (a)) or four, "
        "bands the range of GRPO and of small rounds. (a) 500 validation problems. (b) A running "
        "median of five iterations. (c) Large rounds log only the kept samples. 192 x 4 and 512 x "
        "8 are in the tables but not drawn.*"
    )


def drawn_settings() -> list[tuple[Rounds, object]]:
    """Rounds of 96 questions, each with the style of its lines."""
    settings = [
        setting for setting in settings_of_expert_iteration() if setting.num_questions == 96
    ]
    return list(zip(settings, (":", "--", (0, (1, 3)), "-."), strict=True))


def draw_accuracy_by_samples(ax: Axes) -> None:
    green = COLORS["expert iteration"]
    grpo = by_seed(read("exchange", "eval_log.jsonl"), "accuracy", "grpo")
    small_rounds = curves_of("expert_iteration", "accuracy", "eval_log.jsonl")
    for curves, color, name, above in (
        (grpo, COLORS["GRPO"], "GRPO", 5),
        (small_rounds, green, "8 x 8, sixty rounds", -5),
    ):
        curves = 100 * by_samples(curves)
        draw_mean_and_range(ax, curves, color)
        label_end(ax, curves.mean(axis="columns"), name, color, above)
    large_rounds = evaluations_by_round()
    for setting, linestyle in drawn_settings():
        runs = large_rounds[large_rounds["arm"] == setting.arm]
        mean = by_samples(runs.groupby("ei_step")["accuracy"].mean(), setting.samples)
        ax.plot(mean, color=green, linestyle=linestyle, marker="o")
        above = {"1 epoch": 6, "96 x 4": -12}.get(setting.short_name, -6)
        label_end(ax, mean, setting.short_name, green, above)
    ax.set(xlabel="samples", ylabel="accuracy on validation (%)", ylim=(20, 100), xlim=(0, 9_500))


def draw_entropy_by_samples(ax: Axes) -> None:
    for arm, column, color, name in (
        ("base", "entropy", COLORS["GRPO"], "GRPO"),
        ("updates16", "entropy", SETTINGS[3], "GRPO, 16 updates"),
        ("expert_iteration", "sample_entropy", COLORS["expert iteration"], "8 x 8, sixty rounds"),
    ):
        curves = by_samples(curves_of(arm, column).apply(plotter.smooth))
        draw_mean_and_range(ax, curves, color)
        label_end(ax, curves.mean(axis="columns"), name, color)
    format_entropy(ax)


def draw_entropy_of_large_rounds(ax: Axes) -> None:
    entropies = entropy_of_large_rounds()
    for setting, linestyle in drawn_settings():
        entropy = entropies[setting]
        starts = by_samples(entropy.set_axis(entropy.index - 1), setting.samples)
        style = {"linestyle": linestyle, "marker": "o", "markersize": 3}
        ax.plot(starts, color=COLORS["expert iteration"], **style)
        above = 0 if setting.epochs == 1 else -7
        label_end(ax, starts, setting.short_name, COLORS["expert iteration"], above)
    format_entropy(ax)


def format_entropy(ax: Axes) -> None:
    ax.set(xlabel="samples", ylabel="entropy (nats per token)", yscale="log")
    ax.set(xlim=(0, 9_500), ylim=(0.013, 0.25))
    ticks = [0.02, 0.05, 0.1, 0.2]
    ax.set_yticks(ticks, map(str, ticks))
    ax.set_yticks([], minor=True)


def entropy_of_large_rounds() -> dict[Rounds, pd.Series]:
    """The entropy at the kept samples when a round begins to train, by round, mean of seeds."""
    log = read("expert_iteration", "train_log.jsonl")
    log = log[log["run"].isin(at_best_rates("expert_iteration", "test.jsonl")["run"])]
    entropies = {}
    for setting, _ in drawn_settings():
        runs = log[log["arm"] == setting.arm]
        first_updates = runs.groupby(["run", "ei_step"])["entropy"].first()
        entropies[setting] = first_updates.groupby("ei_step").mean()
    return entropies


def by_samples(curves: pd.DataFrame | pd.Series, samples: int = 8 * 8):
    """The same curves over the number of samples, of which an iteration or round has so many."""
    return curves.set_axis(curves.index * samples)


FILTERED = {  # {arm of `filtered`: the samples of a teacher that SFT learns from}
    "all": "all samples",
    "as_many": "as many, at random",
    "right": "the right ones",
    "wrong": "wrong ones in the format",
}


def filtered_table() -> str:
    runs = at_best_rates("filtered", "test.jsonl")
    on_all = accuracy_by_seed("filtered", "all")
    ends = accuracy_on_validation("filtered")
    rows = []
    for arm, name in FILTERED.items():
        seeds = accuracy_by_seed("filtered", arm)
        run = runs.loc[runs["arm"] == arm, "run"].iloc[0]
        args = read_args(STUDIES / "filtered" / run / "args.json")
        difference = kept_runs.difference(seeds, on_all).mean_cell()
        row = [name, f"{args['num_examples']:,}", f"{ends[arm]:.1f}", mean_and_range(seeds)]
        rows.append([*row, "" if arm == "all" else difference])
    header = ["SFT on a teacher's samples", "examples", "validation (%)", "test (%)"]
    return markdown.table([*header, "difference from all"], rows)


# --- The appendix: CS336 --------------------------------------------------------------------------

PROMPTS = ("r1_zero", "question_only", "reasoning_answer")


def zero_shot_table() -> str:
    """The categories of CS336: one sample for each test problem, before training."""
    categories = ["format1_answer1", "format1_answer0", "format0_answer0"]
    evaluations = read("zero_shot", "eval_log.jsonl").set_index("run")
    rows = []
    for prompt in PROMPTS:
        row = evaluations.loc[f"{prompt}_1m"]
        counts = [int(row[f"count/{category}"]) for category in categories]
        cells = [f"{count:,} ({100 * count / row['n']:.1f}%)" for count in counts]
        rows.append([prompt, *cells, f"{100 * row['accuracy_flexible']:.1f}%"])
    header = ["prompt", "format and answer right", "format right, answer wrong", "no format"]
    return markdown.table([*header, "right in any format"], rows)


def rounds_table() -> str:
    """Five rounds of expert iteration with four epochs, means of three seeds on validation."""
    evaluations = evaluations_by_round()
    rounds = evaluations["ei_step"].unique()
    rows = []
    for questions, group in ((96, 8), (192, 4), (512, 8)):
        arm = evaluations["arm"] == f"questions{questions}_group{group}_epochs4"
        means = evaluations[arm].groupby("ei_step")[["accuracy", "careful_share"]].mean()
        row = [f"{questions} x {group}", *(f"{value:.1f}" for value in means["accuracy"])]
        rows.append([*row, f"{means['careful_share'].iloc[-1]:.1f}"])
    header = ["questions x samples", *(f"after {round_:.0f}" for round_ in sorted(rounds))]
    return markdown.table([*header, "careful at the end"], rows)


SIZES = (10, 100, 128, 256, 512, 1_000)


def draw_sft_curves() -> tuple[Figure, str]:
    titles = ["careful solutions", "direct solutions", "all the direct ones"]
    figure, panels = new_figure([*titles, "a teacher's samples"], (9, 6.4), num_rows=2)
    careful, direct, full, samples = panels
    for number, color in zip(SIZES, colormaps["viridis_r"].resampled(8).colors[2:], strict=False):
        draw_sft_curve(careful, "sft", f"careful{number}", color, label=f"{number:,}")
        # These curves coincide.
        label = "10 to 1,000" if number == SIZES[-1] else None
        draw_sft_curve(direct, "sft", f"direct{number}", color, label=label)
    draw_sft_curve(full, "sft", "direct10000", COLORS["SFT"], label="10,000")
    colors = {"all": "0.5", "as_many": "0.2", "right": COLORS["SFT"], "wrong": "#882255"}
    for arm, name in FILTERED.items():
        draw_sft_curve(samples, "filtered", arm, colors[arm], label=name)
    for ax in panels:
        ax.set(xlabel="updates", ylabel="accuracy on validation (%)", ylim=(0, 100))
        label_lines(ax)
    return figure, (
        "*SFT learns most from careful solutions and from right samples. (a) to (c): labels give "
        "the number of solutions; (a) and (b) share colours. Each set is at its best learning "
        "rate; lines are means of three seeds, bands their range. Greedy answers to 500 validation "
        "problems; on test the right samples end at "
        f"{accuracy_by_seed('filtered', 'right').mean():.1f}%.*"
    )


def draw_sft_curve(ax: Axes, study: str, arm: str, color: str, **style) -> None:
    """The accuracy of the runs of an arm on validation."""
    runs = at_best_rates(study, "answers.jsonl")
    draw_mean_and_range(ax, by_seed(runs, "accuracy", arm), color, **style)


def metrics_table(heading: str, names: dict[str, str]) -> str:
    """Settings of the study `choices`, each at the rate nearest to its best.

    Args:
        names: {arm: its name}.
    """
    decimals = {"entropy": 3, "kl": 2, "grad_norm": 2, "response_length": 0}
    rows = []
    for arm, name in names.items():
        best = arm_at_estimated_rate(arm)
        over_the_run = best.rates.loc[FIRST_SEEDS, best.nearest_rate].mean()
        row = [name, rate_text(best.nearest_rate), f"{over_the_run:.1f}"]
        row.append(f"{100 * accuracy_at_the_end(arm).mean():.1f}")
        row += [
            first_and_last(curves_of(arm, column), digits) for column, digits in decimals.items()
        ]
        rows.append([*row, f"{curves_of(arm, 'time/total').sum().min():.0f}"])
    header = [heading, "rate", "over the run (%)", "at 60 (%)", "entropy", "KL", "gradient norm"]
    return markdown.table([*header, "length", "seconds"], rows)


def losses_table() -> str:
    names = {
        "base": "the baseline",
        "no_baseline": "raw rewards",
        "no_std": "no division by the std",
        "token_mean": "mean over all tokens",
        "masked_normalize": "sum divided by a constant",
        "dr_grpo": "Dr. GRPO",
    }
    return metrics_table("advantage and length", names)


def updates_table() -> str:
    names = {
        "base": "1",
        "updates2": "2",
        "updates4": "4",
        "updates4_no_clip": "4, no clip",
        "updates16": "16",
        "updates16_no_clip": "16, no clip",
        "updates16_cispo": "16, CISPO",
        "updates16_reinforce": "16, REINFORCE",
    }
    return metrics_table("updates per batch", names)


def prompts_table() -> str:
    names = {
        "base": "reasoning_answer, five rewards",
        "answer_reward": "reasoning_answer",
        "r1_zero": "r1_zero",
        "question_only": "question_only",
    }
    return metrics_table("prompt, reward for the answer", names)


def sweep_table() -> str:
    """The broad search over updates and learning rates: seed 0, validation at iteration 60."""
    names = {"epochs1_batch32": "2 (1 x 2)", "epochs2_batch32": "4 (2 x 2)"}
    names["epochs4_batch16"] = "16 (4 x 4)"
    ends = kept_runs.last(read("three_seeds", "eval_log.jsonl"))
    ends = ends[(ends["seed"] == 0) & ends["arm"].isin(names)]
    table = 100 * ends.pivot(index="arm", columns="rate", values="accuracy")
    rows = []
    for arm, name in names.items():
        rows.append([name, *("" if np.isnan(x) else f"{x:.1f}" for x in table.loc[arm])])
    return markdown.table(["updates (epochs x mini-batches)", *map(rate_text, table)], rows)


def grid_table() -> str:
    """Epochs and mini-batches: accuracy averaged over the run, at the estimated best rate."""
    grid = {"1 epoch": ("base", "updates2"), "2 epochs": ("epochs2", "updates4")}
    rows = []
    for name, arms in grid.items():
        seeds = [arm_at_estimated_rate(arm).by_seed[FIRST_SEEDS] for arm in arms]
        rows.append([name, *map(mean_and_range, seeds)])
    return markdown.table(["accuracy (%)", "1 mini-batch", "2 mini-batches"], rows)


def draw_long() -> tuple[Figure, str]:
    """Runs of 200 iterations."""
    figure, (ax,) = new_figure([""], (6, 3.2))
    evaluations = read("choices", "eval_log.jsonl")
    for arm, name, color in (
        ("base_200", "1 update, one seed", SETTINGS[0]),
        ("updates4_200", "4 updates, two seeds", SETTINGS[2]),
    ):
        curves = 100 * by_seed(evaluations, "accuracy", arm)
        draw_mean_and_range(ax, curves, color, label=name)
    ax.set(xlabel="iteration", ylabel="accuracy on validation (%)", ylim=(20, 100))
    label_lines(ax)
    return figure, (
        "*After iteration 60 nothing is gained. Learning rates 2e-4 (one update) and 1e-4 (four); "
        "the band is the range of the two seeds.*"
    )


UPDATES = {"base": "1", "updates2": "2", "updates4": "4", "updates16": "16"}
CLIPS = {
    "updates16": "clip",
    "updates16_no_clip": "no clip",
    "updates16_cispo": "CISPO",
    "updates16_reinforce": "REINFORCE",
}


def draw_curves() -> tuple[Figure, str]:
    titles = ["learning rate", "advantage", "length normalisation", "updates per batch"]
    titles += ["the same by time", "their entropy", "clip, 16 updates", "their entropy", "prompt"]
    figure, panels = new_figure(titles, (9, 9), num_rows=3)
    reward, advantage, length, updates, time, entropy, clip, clip_entropy, prompt = panels
    draw_reward(reward)
    advantages = {"base": "the baseline", "no_std": "no std", "no_baseline": "raw rewards"}
    draw_accuracy(advantage, advantages)
    lengths = {"base": "own length", "token_mean": "all tokens", "masked_normalize": "constant"}
    draw_accuracy(length, lengths)
    several_updates = UPDATES | {"updates4_no_clip": "4, no clip"}
    draw_accuracy(updates, several_updates)
    draw_by_time(time)
    draw_entropy(entropy, several_updates)
    draw_accuracy(clip, CLIPS)
    draw_entropy(clip_entropy, CLIPS)
    prompts = {"answer_reward": "reasoning_answer"}
    prompts |= {"r1_zero": "r1_zero", "question_only": "question_only"}
    draw_accuracy(prompt, prompts)
    return figure, (
        "*Reward and accuracy rise, but fall again at the highest learning rate and stall "
        "with raw rewards. Each uses the tested rate nearest its best. Lines are means of "
        "four seeds (in (a) three, or one at 1e-3); the band is the range of the first setting's "
        "seeds. Greedy answers to 500 validation problems, every ten iterations (in (a) every 20); "
        "entropy is that of the samples, a running median of seven iterations. (e) shows the time "
        "of the fastest seed, without evaluations.*"
    )


def draw_accuracy(ax: Axes, names: dict[str, str]) -> None:
    """The accuracy of arms on validation: {arm: its name}."""
    draw_settings(
        ax,
        {name: 100 * curves_of(arm, "accuracy", "eval_log.jsonl") for arm, name in names.items()},
    )
    ax.set(xlabel="iteration", ylabel="accuracy on validation (%)", ylim=(20, 105))
    label_lines(ax)


def draw_entropy(ax: Axes, names: dict[str, str]) -> None:
    curves = {name: curves_of(arm, "entropy").apply(plotter.smooth) for arm, name in names.items()}
    draw_settings(ax, curves)
    ax.set(xlabel="iteration", ylabel="entropy (nats per token)", ylim=(0, None))
    label_lines(ax)


def draw_by_time(ax: Axes) -> None:
    """Accuracy on validation over the seconds of training, by the number of updates."""
    curves = {}
    for arm, name in UPDATES.items():
        seconds = curves_of(arm, "time/total").cumsum().min(axis="columns")
        seconds.loc[0] = 0
        accuracies = 100 * curves_of(arm, "accuracy", "eval_log.jsonl")
        curves[name] = accuracies.set_axis(seconds[accuracies.index])
    draw_settings(ax, curves)
    ax.set(xlabel="seconds", ylabel="accuracy on validation (%)", ylim=(20, 105))
    for (name, curve), color, above in zip(curves.items(), SETTINGS, (-12, -4, 6, 0), strict=False):
        label_end(ax, curve.mean(axis="columns"), name, color, above)


def draw_reward(ax: Axes) -> None:
    """The reward on validation, by learning rate."""
    evaluations = read("rates", "eval_log.jsonl")
    rates = (BASELINE_RATE, 1e-4, 4e-4, 1e-3)
    curves = {rate_text(rate): by_seed(evaluations, "reward", "base", rate) for rate in rates}
    draw_settings(ax, curves)
    ax.set(xlabel="iteration", ylabel="reward on validation, of 4", ylim=(0, 4))
    label_lines(ax)


def draw_settings(ax: Axes, curves: dict[str, pd.DataFrame]) -> None:
    """Draw the mean of each setting, and the range of the first one, which is the usual one."""
    (usual, usual_curves), *others = curves.items()
    draw_mean_and_range(ax, usual_curves, SETTINGS[0], label=usual)
    for color, (name, seeds) in zip(SETTINGS[1:], others, strict=False):
        ax.plot(seeds.mean(axis="columns"), color=color, label=name)


# --- Beyond the tasks -----------------------------------------------------------------------------

REWARDS = {  # {study: {arm: the reward}}; the first one has the usual reward
    "noise": {
        "no_errors": "the baseline's",
        "noise0.1": "10% flipped",
        "noise0.2": "20% flipped",
        "noise0.4": "40% flipped",
    },
    "hacks": {
        "usual": "the baseline's, run again",
        "answer_anywhere": "answer anywhere in the text",
        "bonus_for_steps": "bonus for steps",
        "bonus_for_length": "bonus for length",
    },
}


def rewards_table() -> str:
    """Rewards that err, and rewards that could be hacked."""
    rows = []
    for study, names in REWARDS.items():
        evaluations = read(study, "eval_log.jsonl")
        after_start = evaluations[evaluations["step"] > 0]
        averages = 100 * after_start.groupby(["arm", "seed"])["accuracy"].mean().unstack("seed")
        usual, *_ = names
        others = averages.drop(usual)
        differences = judge(list((others - averages.loc[usual]).to_numpy()))
        cells = dict(zip(others.index, differences, strict=True))
        for arm, name in names.items():
            row = [name, mean_and_range(averages.loc[arm])]
            row += ["", ""] if arm == usual else [cells[arm].mean_cell(), cells[arm].verdict]
            rows.append(row)
    header = ["reward", "accuracy averaged over the run (%)", "difference", "verdict"]
    return markdown.table(header, rows)


FIGURES = {
    "judge": draw_judge,
    "choices": draw_choices,
    "expert_iteration": draw_expert_iteration,
    "sft_curves": draw_sft_curves,
    "curves": draw_curves,
    "long": draw_long,
}
TABLES = {
    "choices": choices_table,
    "rates": rates_table,
    "expert_iteration": expert_iteration_table,
    "filtered": filtered_table,
    "zero_shot": zero_shot_table,
    "rounds": rounds_table,
    "losses": losses_table,
    "updates": updates_table,
    "prompts": prompts_table,
    "sweep": sweep_table,
    "grid": grid_table,
}
