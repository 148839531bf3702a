"""Draw the figures of analysis.md from the tables in this folder, as PNG.

    python results/figures.py               # all of them
    python results/figures.py training      # one

README.md says what the tables and their columns are.
"""

import argparse
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from PIL import Image  # matplotlib brings it

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))

import claims

from grpo.metrics import wilson_interval

STYLE = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 9,
    "figure.titlesize": 10,
    "font.size": 9,
    "grid.color": "0.9",
    "legend.frameon": False,
    "legend.handlelength": 1.5,
    "lines.markersize": 4,
    "savefig.dpi": 150,
}
# A method has one colour in all figures; those after RANDOM are of variants of GRPO.
GRPO, HEAVY_PENALTY, SFT = "#0072B2", "#56B4E9", "#D55E00"
FORMAT, RANDOM, GREEN, WINE, GREY = "#E69F00", "#CC79A7", "#009E73", "#882255", "0.45"
ACCURACY = "accuracy on validation (%)"
TITLES = {
    "accuracy": ACCURACY,
    "careful_share": "hard steps: careful (%)",
    "distinct_2_batch": "distinct word pairs (%)",
    "grad_norm": "gradient norm",
    "response_length": "length (tokens)",
    "entropy": "entropy (nats per token)",
    "kl_per_token": "KL (nats per token)",
    "reward": "reward (nats per token)",
}


def table(name, *shares):
    """A table of this folder, in which these columns are in per cent."""
    rows = pd.read_csv(FOLDER / name, low_memory=False)
    rows[[*shares]] *= 100
    return rows


curves = table("curves.csv.gz", "accuracy", "distinct_2_batch")
curves["careful_share"] = 100 * curves["careful"] / (curves["careful"] + curves["direct"])
curves["ei_step"] = curves["ei_step"].fillna(0)  # the round of expert iteration; 0: before it
test = table("test.csv", "accuracy")
real = table("real.csv", "accuracy")
qwen = table("qwen.csv", "accuracy", "accuracy_low", "accuracy_high", "accuracy_flexible")
choices = table("choices.csv")
measures = table("measures.csv")


class Arm(NamedTuple):
    """A line of a figure; without a rate it is at the learning rate that suits the arm best."""

    label: str
    arm: str
    color: str
    linestyle: str = "-"
    study: str = "choices"
    rate: float | None = None


# --- What the figures share -----------------------------------------------------------------------


def new_figure(message, num_panels, num_columns=2, height=2.1):
    """A figure and its panels, of this height each; so narrow that a phone shows legible type."""
    num_rows = -(-num_panels // num_columns)
    figure = Figure((4.5, 0.7 + height * num_rows), layout="constrained")
    figure.suptitle(textwrap.fill(message, 54), x=0.01, ha="left", weight="bold")
    axes = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    for empty in axes[num_panels:]:
        empty.remove()
    return figure, axes[:num_panels]


def by_seed(study, arm, column, split="train", rate=None, index="step"):
    """A column of curves.csv.gz: a row for each step, a column for each seed."""
    rows = curves.query("study == @study and arm == @arm and split == @split")
    if study == "choices":
        rows = rows.query("seed <= 6")  # the four seeds that every arm has
    is_wanted = rows["best"] == 1 if rate is None else rows["rate"] == rate
    return rows[is_wanted].pivot_table(column, index=index, columns="seed")


def accuracies_on_test(study, arm):
    """Of each seed, at the learning rate that suits the arm best."""
    rows = test.query("study == @study and arm == @arm and best == 1 and temperature == 0")
    return rows["accuracy"]


def smooth(seeds):
    """A centred running median over about a fifteenth of the iterations."""
    width = 2 * (len(seeds) // 30) + 1
    return seeds.rolling(width, center=True, min_periods=1).median()


def draw(ax, seeds, color, linestyle="-", **style):
    """The mean over seeds, and a band from the lowest to the highest."""
    low, high, mean = [seeds.agg(name, axis="columns") for name in ("min", "max", "mean")]
    ax.fill_between(mean.index, low, high, color=color, alpha=0.15, linewidth=0)
    ax.plot(mean, color=color, linestyle=linestyle, **style)


def describe(ax, title, lowest=None, highest=None, x="iteration"):
    ax.set_title(title, loc="left")
    ax.set_xlabel(x)
    ax.set_ylim(lowest, highest)


def panel(ax, arms, column, lowest=0, highest=None, **style):
    """A line for each arm; an evaluated column as it is, and one of training smoothed."""
    is_evaluated = column in ("accuracy", "careful_share")
    split = "validation" if is_evaluated else "train"
    for arm in arms:
        seeds = by_seed(arm.study, arm.arm, column, split, arm.rate)
        if not is_evaluated:
            seeds = smooth(seeds)
        draw(ax, seeds, arm.color, arm.linestyle, label=arm.label, **style)
    describe(ax, TITLES[column], lowest, highest)


def legend_below(figure, ax, ncols, **options):
    handles = ax.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=ncols, **options)


# --- The figures ----------------------------------------------------------------------------------


def draw_training():
    message = "GRPO finds the careful steps; a reward for the format alone doesn't"
    figure, axes = new_figure(message, 6)
    accuracy, careful, reward, entropy, kl, length = axes
    arms = [
        Arm("GRPO", "grpo", GRPO, study="dynamics"),
        Arm("format only", "format", FORMAT, study="dynamics"),
        Arm("random reward", "random", RANDOM, study="dynamics"),
    ]
    for arm, maximum, height in zip(arms, (4, 2, 1), (76, 52, 6), strict=True):
        percent = 100 / maximum
        draw(reward, percent * smooth(by_seed("dynamics", arm.arm, "reward")), arm.color)
        evaluated = percent * by_seed("dynamics", arm.arm, "reward", "validation")
        reward.plot(evaluated.mean(axis="columns"), "o", color=arm.color, markerfacecolor="white")
        accuracy.text(100, height, arm.label, color=arm.color, ha="right")
    describe(reward, "reward (% of its maximum)", 0, 102)
    panel(accuracy, arms, "accuracy", highest=102)
    panel(careful, arms, "careful_share", highest=102)
    panel(entropy, arms, "entropy")
    panel(kl, arms, "kl_per_token")
    panel(length, arms, "response_length")
    return figure


def draw_scaling():
    message = "1m and 3m learn the task; 0.6m learns half of it, 0.1m and 0.3m little"
    figure, (by_iteration, by_size) = new_figure(message, 2, height=2.4)
    for name, study, arm, before, color, height in (
        ("3m", "scaling", "3m", "3m_before", "#00304d", 96),
        ("1m", "dynamics", "grpo", "before", GRPO, 83),
        ("0.6m", "scaling", "0.6m", "0.6m_before", "#3d97cc", 52),
        ("0.3m", "scaling", "0.3m", "0.3m_before", "#7ab8dc", 22),
        ("0.1m", "scaling", "0.1m", "0.1m_before", "#b5d8ec", 4),
    ):
        panel(by_iteration, [Arm(name, arm, color, study=study)], "accuracy", marker="o")
        by_iteration.text(101, height, name, ha="right")
        accuracies = accuracies_on_test(study, arm)
        parameters = test["parameters"][accuracies.index]
        by_size.plot(parameters, accuracies, "o", color=color)
        start = accuracies_on_test(study, before)
        by_size.plot(parameters.iloc[:1], start, "o", color=color, markerfacecolor="white")
    by_size.set_xscale("log")
    by_size.text(1.7e6, 84, "after", ha="center")
    by_size.text(1.7e6, 30, "before", ha="center")
    describe(by_iteration, ACCURACY, -2, 102)
    describe(by_size, "accuracy on test (%)", -2, 102, x="parameters")
    return figure


def draw_sft():
    message = "10 careful solutions match 47 iterations, 1,000 direct ones fewer than 5"
    figure, (by_solutions, by_iteration, by_update, filtered) = new_figure(message, 4, 1, 2.6)
    draw_solutions(by_solutions)
    draw_worth(by_iteration)
    draw_by_update(by_update)
    draw_filtered(filtered)
    return figure


def draw_solutions(ax):
    """Accuracy on test by the number of solutions, beside GRPO's."""
    title = "SFT by number of solutions: accuracy on test (%)"
    describe(ax, title, 15, 102, x="worked solutions")
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    for study, arm in (("dynamics", "grpo"), ("rates", "base")):
        seeds = accuracies_on_test(study, arm)
        ax.axhspan(seeds.min(), seeds.max(), color=GRPO, alpha=0.2, linewidth=0)
    ax.axhline(accuracies_on_test("dynamics", "before").item(), color=GREY, linestyle=":")
    for kind, marker, linestyle in (("careful", "o", "-"), ("direct", "s", "--")):
        runs = test.query("study == 'sft' and best == 1 and arm.str.startswith(@kind)")
        ax.plot(runs["examples"], runs["accuracy"], marker, color=SFT, markerfacecolor="none")
        # The largest set has five times the updates, so no line leads to it.
        means = runs.query("examples < 10_000").groupby("examples")["accuracy"].mean()
        ax.plot(means, linestyle, color=SFT, label=f"SFT on {kind} solutions")
    ax.text(8_500, 52, "10,000 direct, five times the updates", color=SFT, ha="right")
    ax.text(17_000, 95, "GRPO, the demo", color=GRPO, ha="right")
    ax.text(17_000, 84, "GRPO, the standard run", color=GRPO, ha="right")
    ax.text(17_000, 27, "before training", color=GREY, ha="right")
    ax.legend(loc=(0.1, 0.55))


def draw_worth(ax):
    """The baseline of GRPO by iteration, and at which of them it has the accuracy of SFT."""
    title = "GRPO by iteration, and where SFT ends: the same on validation"
    describe(ax, title, 15, 102, x="iteration of GRPO")
    ax.set_xlim(0, 60)
    draw(ax, by_seed("exchange", "grpo", "accuracy", "validation"), GRPO, linewidth=2)
    ax.text(32, 51, "GRPO, the standard run", color=GRPO)
    for arm, name, linestyle in (
        ("direct10", "", "--"),
        ("direct100", "", "--"),
        ("direct1000", "10 to 1,000 direct", "--"),
        ("direct10000", "10,000 direct", "--"),
        ("careful10", "10 careful", "-"),
        ("careful100", "100 careful", "-"),
        ("careful1000", "1,000 careful", "-"),
    ):
        ends, worth = measures.query(f"study == 'sft' and run == {arm!r}").itertuples()
        accuracy = 100 * ends.value
        ax.axhline(accuracy, color=SFT, linestyle=linestyle, linewidth=0.8)
        if 5 < worth.low < 60:  # between the first and the last evaluation
            ax.hlines(accuracy, worth.low, min(worth.high, 60), SFT, linewidth=3)
            ax.plot(worth.value, accuracy, "o", color=SFT, markersize=6)
            if worth.high < 60:
                name += f": {worth.value:.0f} ({worth.low:.0f} to {worth.high:.0f})"
        ax.text(61, accuracy, name, color=SFT, va="center")


def draw_by_update(ax):
    """SFT by update, of seed 0, which was evaluated in every third one."""
    for kind, linestyle in (("careful", "-"), ("direct", "--")):
        for count, color in (
            (10, "#fdae6b"),
            (128, "#f16913"),
            (256, "#d94801"),
            (1000, "#7f2704"),
        ):
            seeds = by_seed("sft", f"{kind}{count}", "accuracy", "validation")
            ax.plot(seeds[0].dropna(), linestyle, color=color, label=f"{count:,} {kind}")
    describe(ax, "SFT by update: accuracy on validation (%)", 15, 102, x="update")
    ax.legend(loc=(0.32, 0.32), ncols=2)


def draw_filtered(ax):
    """SFT on samples of a larger model: the right ones, as many wrong or random ones, and all."""
    for arm, color, label in (
        ("right", GREEN, "268 right"),
        ("wrong", WINE, "268 wrong"),
        ("as_many", FORMAT, "268 random"),
        ("all", GREY, "all 2,048"),
    ):
        # A line for seed 0, and dots for the other two, which were evaluated less often.
        seeds = by_seed("filtered", arm, "accuracy", "validation")
        ax.plot(seeds[0].dropna(), color=color, label=label)
        ax.plot(seeds[[1, 2]].dropna(), ".", color=color)
    ax.legend(loc="upper left", ncols=2)
    describe(ax, "SFT on samples of the 3m model: the same on validation", 15, 70, x="update")


def draw_judge():
    message = "The judge's reward rises, and under a light KL penalty the stories become alike"
    figure, (diversity, reward, kl) = new_figure(message, 3)
    arms = [
        Arm("light penalty, beta 0.04", "beta0.04", GRPO, study="judge"),
        Arm("heavy penalty, beta 0.4", "beta0.4", HEAVY_PENALTY, "--", study="judge"),
    ]
    panel(diversity, arms, "distinct_2_batch", highest=102)
    panel(reward, arms, "reward", lowest=None)
    panel(kl, arms, "kl_per_token")
    legend_below(figure, kl, 2)
    return figure


def draw_qwen():
    """GRPO at 1.5B on the interview's task: samples by iteration, and test before and after."""
    message = "Paid or asked for calculations, a 1.5B Qwen solves more; paid for the form, far less"
    solutions, _ = claims.read_sheet("1.5B", "solutions")
    levels = (
        (solutions[128], SFT, "--", "SFT on 128 solutions"),
        (claims.read_asked(), GREY, ":", "untrained, asked for calculations"),
    )
    figure, axes = new_figure(message, 4)
    for ax, title, highest, verdict in (
        (axes[0], "in the format (%)", 102, claims.has_format),
        (axes[1], "calculates (%)", 102, claims.writes_calculation),
        (axes[2], "right by the last number (%)", 65, claims.is_right_by_last_number),
        (axes[3], "right and in the format (%)", 65, claims.is_strict),
    ):
        draw_sheet(ax, "random_reward", verdict, color=RANDOM, label="chance")
        draw_sheet(ax, "format_only", verdict, color=FORMAT, label="the form alone")
        draw_sheet(ax, "sheet", verdict, color=GRPO, label="the sheet's reward")
        draw_sheet(ax, "calculation", verdict, color=WINE, label="calculations in the form")
        draw_sheet(ax, "math", verdict, color=GREEN, label="the answer's reward")
        for answers, color, linestyle, label in levels:
            share = 100 * np.mean([verdict(row) for row in answers.values()])
            ax.axhline(share, color=color, linestyle=linestyle, label=label)
        describe(ax, title, 0, highest)
    legend_below(figure, axes[0], 2)
    return figure


def draw_sheet(ax, reward, verdict, color, label):
    """The share of a run's answers that have it: of its samples, and of test before and after."""
    tests, samples = claims.read_sheet("1.5B", reward)
    steps = pd.Series([row["step"] for row in samples])
    of_samples = 100 * pd.Series(map(verdict, samples)).groupby(steps).mean()
    ax.plot(of_samples, ".:", color=color, linewidth=0.8)
    for step, rows in tests.items():
        count = sum(map(verdict, rows.values()))
        ends = 100 * np.array(wilson_interval(count, len(rows)))
        share = 100 * count / len(rows)
        drawn = dict(color=color, label=label) if step else dict(color=GREY)
        ax.errorbar(step, share, yerr=abs(ends - share)[:, None], fmt="o", **drawn)


def draw_qwen_older():
    message = "Older: solutions teach 0.5B the format; 1.5B, another prompt: strictly right up"
    figure, (trained, by_size) = new_figure(message, 2, 1, 2.6)
    greedy = qwen.query("temperature == 0")
    stages = greedy.query("prompt == 'reasoning_answer' and model == '0.5B'")
    colors = stages["training"].map(lambda text: GRPO if "GRPO" in text else SFT)
    title = "0.5B: SFT by solutions, then GRPO"
    draw_accuracies(trained, stages, stages["label"], colors, title)

    for training, label, color, shift in (
        ("as it is, again", "before", GREY, -0.02),
        ("GRPO with LoRA, 10 iterations", "after", GRPO, 0.02),
    ):
        runs = greedy.query(
            f"dataset == 'gsm8k' and prompt == 'r1_zero' and training == {training!r}"
        )
        size = runs["model"].str.removesuffix("B").astype(float) + shift + 0.04 * runs["seed"]
        bars = dict(yerr=interval(runs), fmt="o", color=color, label=label)
        by_size.errorbar(size, runs["accuracy"], **bars)
    by_size.legend()
    by_size.set_xlim(0.25, 1.75)
    title = "before and after ten iterations with LoRA (%)"
    describe(by_size, title, 0, x="billions of parameters")
    return figure


def draw_accuracies(ax, runs, names, colors, title):
    """A row for each evaluation, the first on top: in the format with its interval, and in any."""
    rows = range(len(runs))
    any_format = dict(color="0.3", markerfacecolor="none")
    ax.plot(runs["accuracy_flexible"], rows, "o", **any_format)
    ax.errorbar(runs["accuracy"], rows, xerr=interval(runs), fmt="none", ecolor=list(colors))
    ax.scatter(runs["accuracy"], rows, 16, list(colors), zorder=3)
    ax.set_yticks(rows, names)
    ax.set_xlim(-0.5)
    ax.grid(visible=False, axis="y")
    describe(ax, title, len(runs) - 0.5, -0.5, x="accuracy (%)")


def interval(runs):
    """How far the 95% interval of each evaluation reaches below and above it."""
    accuracy = runs["accuracy"]
    return [accuracy - runs["accuracy_low"], runs["accuracy_high"] - accuracy]


def draw_smollm2():
    message = "SmolLM2-135M gains little in 60 iterations and more in 240 slower ones"
    figure, (greedy, solutions) = new_figure(message, 2, height=2.4)
    arms = [
        Arm("GRPO at 5e-6", "slow", GRPO, "--", "real"),
        Arm("GRPO at 2e-5", "grpo", GRPO, "-", "real"),
        Arm("format only", "format", FORMAT, "-", "real"),
    ]
    panel(greedy, arms, "accuracy", highest=44)
    greedy.set_title("GRPO: " + ACCURACY, loc="left")
    greedy.legend(loc="upper left")

    # Greedy accuracy by the number of solutions, and where GRPO's longer runs end.
    runs = real.query("study == 'real' and split == 'validation' and n == 300 and step > 0")
    sizes = {"sft32": 32, "sft128": 128, "sft512": 512, "more_sft": 128 + 1_920}
    last = runs.groupby(["arm", "seed"]).last().reset_index()
    trained = last[last["arm"].isin(sizes)]
    num_solutions = trained["arm"].map(sizes)
    solutions.plot(num_solutions, trained["accuracy"], "o", color=SFT, markerfacecolor="none")
    solutions.plot(trained["accuracy"].groupby(num_solutions).mean(), color=SFT)
    longer = last[last["arm"] == "slow"]["accuracy"]
    solutions.axhspan(longer.min(), longer.max(), color=GRPO, alpha=0.2, linewidth=0)
    solutions.text(30, 28, "128, then GRPO\nat 5e-6", color=GRPO)
    solutions.set_xscale("log", base=2)
    solutions.set_xticks(list(sizes.values()), [f"{size:,}" for size in sizes.values()])
    describe(solutions, "SFT: the same (%)", 0, 44, x="worked solutions")
    return figure


def draw_choices():
    """A row for each choice, the best one on top."""
    message = "Of these choices, raw rewards lose by far the most"
    figure, (ax,) = new_figure(message, 1, 1, 4.3)
    ax.set_xlabel("points, iterations 10 to 60")
    rows = choices.query("study == 'choices' and measure == 'averaged over the run'")
    rows = rows.sort_values("mean").reset_index()
    names = rows["choice"] + " minus " + rows["reference"]
    ax.set_yticks(rows.index, names.str.removesuffix(" minus the baseline"))
    is_significant = rows["verdict"] == "significant"
    colors = is_significant.map({True: "0.1", False: "0.5"})
    fills = is_significant.map({True: "0.1", False: "white"})
    ax.hlines(rows.index, rows["low"], rows["high"], colors)
    ax.scatter(rows["mean"], rows.index, 25, fills, edgecolors=colors, zorder=3)
    ax.axvline(0, color="0.4", linewidth=0.8)
    ax.grid(visible=False, axis="y")
    return figure


def draw_expert_iteration():
    """By round: accuracy, and the entropy of the samples, which two settings did not log."""
    message = "Five rounds of expert iteration end below GRPO in each setting's mean"
    figure, (accuracy, entropy) = new_figure(message, 2, height=2.4)
    for label, arm, color, linestyle in (
        ("512 x 8", "questions512_group8_epochs4", "#00304d", "-"),
        ("192 x 4", "questions192_group4_epochs4", GREEN, "-"),
        ("96 x 16", "questions96_group16_epochs4", WINE, "-"),
        ("96 x 8", "questions96_group8_epochs4", FORMAT, "-"),
        ("96 x 8, one epoch", "questions96_group8_epochs1", FORMAT, ":"),
        ("96 x 4", "questions96_group4_epochs4", GREY, "-"),
    ):
        by_round = by_seed("expert_iteration", arm, "accuracy", "validation", index="ei_step")
        accuracy.plot(by_round.mean(axis="columns"), color=color, linestyle=linestyle, label=label)
        by_round = by_seed("expert_iteration", arm, "sample_entropy", index="ei_step")
        entropy.plot(by_round.mean(axis="columns"), color=color, linestyle=linestyle)
    grpo = by_seed("rates", "base", "accuracy", "validation").loc[60]
    accuracy.axhspan(grpo.min(), grpo.max(), color=GRPO, alpha=0.2, linewidth=0)
    accuracy.text(0, grpo.mean(), "GRPO", color=GRPO, va="center")
    describe(accuracy, ACCURACY, 0, 102, x="round")
    describe(entropy, TITLES["entropy"], 0, x="round")
    legend_below(figure, accuracy, 3, title="questions x samples")
    return figure


def draw_grpo_off_policy():
    message = "Two or four updates are ahead early on, and no faster by the clock"
    figure, axes = new_figure(message, 5)
    accuracy, by_second, length, entropy, longer = axes
    sweep = [
        Arm("1 update", "base", FORMAT),
        Arm("2 updates", "updates2", GREEN),
        Arm("4 updates", "updates4", GRPO),
        Arm("16 updates", "updates16", GREY),
    ]
    panel(accuracy, sweep, "accuracy")
    panel(length, sweep, "response_length")
    panel(entropy, sweep, "entropy")
    for arm in sweep:  # by the seconds of the fastest seed, without evaluations
        seeds = by_seed(arm.study, arm.arm, "accuracy", "validation")
        seconds = by_seed(arm.study, arm.arm, "seconds").cumsum()
        fastest = seconds[seconds.iloc[-1].idxmin()]
        seeds.index = [0 if step == 0 else fastest[step] for step in seeds.index]
        draw(by_second, seeds, arm.color)
    describe(by_second, ACCURACY, x="seconds")
    panel(longer, [Arm("", "base_200", FORMAT), Arm("", "updates4_200", GRPO)], "accuracy")
    longer.set_title("the same, 200 iterations", loc="left")
    legend_below(figure, accuracy, 4)
    return figure


# --- CS336's ablations: a panel for each metric, a line for each arm ------------------------------


def draw_ablation(message, metrics, *arms):
    columns = metrics.split()
    figure, axes = new_figure(message, len(columns))
    for ax, column in zip(axes, columns, strict=True):
        panel(ax, arms, column)
    legend_below(figure, axes[0], 2)
    return figure


ABLATIONS = {
    "grpo_learning_rate": (
        "2e-4 is the best of four learning rates, and 1e-3 destroys the model",
        "accuracy grad_norm entropy",
        Arm("1e-4", "base", GREEN, "-", "rates", 1e-4),
        Arm("2e-4", "base", GRPO, "-", "rates", 2e-4),
        Arm("4e-4", "base", WINE, "-", "rates", 4e-4),
        Arm("1e-3 (one seed)", "base", GREY, "--", "rates", 1e-3),
    ),
    "grpo_baselines": (
        "Raw rewards teach the format and little more",
        "accuracy grad_norm response_length",
        Arm("group's mean subtracted (standard)", "base", GRPO),
        Arm("raw rewards", "no_baseline", WINE, "--"),
    ),
    "grpo_normalization": (
        "How losses and advantages are scaled changes gradients, and hardly accuracy",
        "accuracy grad_norm",
        Arm("own length, divided by the std", "base", GRPO),
        Arm("all tokens of the batch", "token_mean", GREEN, ":"),
        Arm("a constant length", "masked_normalize", WINE, "--"),
        Arm("not divided by the std", "no_std", FORMAT, "-."),
    ),
    "grpo_off_policy_clip_ablation": (
        "Without the clip entropy falls sooner; accuracy is undecided",
        "accuracy grad_norm entropy response_length",
        Arm("4 updates, clip", "updates4", GRPO),
        Arm("4 updates, no clip", "updates4_no_clip", HEAVY_PENALTY, "--"),
        Arm("16 updates, clip", "updates16", GREY, "-", "choices", 5e-5),
        Arm("16 updates, no clip", "updates16_no_clip", WINE, "--"),
    ),
    "grpo_prompt_ablation": (
        "Three prompts, and no clear difference in accuracy",
        "accuracy grad_norm entropy response_length",
        Arm("r1_zero", "r1_zero", WINE),
        Arm("question_only", "question_only", GREEN),
        Arm("reasoning_answer", "answer_reward", GRPO, "--"),
    ),
}

FIGURES = ["qwen", "qwen_older", "training", "scaling", "sft", "judge", "smollm2", "choices"]
FIGURES += ["expert_iteration", "grpo_off_policy", *ABLATIONS]


def main():
    parser = argparse.ArgumentParser(description="Draw the figures of analysis.md.")
    parser.add_argument("name", nargs="?", choices=FIGURES, help="one of them alone")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the PNG files go")
    args = parser.parse_args()
    matplotlib.rcParams.update(STYLE)
    for name in [args.name] if args.name else FIGURES:
        path = args.folder / f"{name}.png"
        is_ablation = name in ABLATIONS
        figure = draw_ablation(*ABLATIONS[name]) if is_ablation else globals()[f"draw_{name}"]()
        figure.savefig(path)
        with Image.open(path) as image:
            image.convert("RGB").quantize(128).save(path, optimize=True)  # a third of the size


if __name__ == "__main__":
    main()
