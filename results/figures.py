"""Draw the figures of analysis.md from the tables in this folder, as PNG.

    python results/figures.py               # all of them
    python results/figures.py training      # one

README.md says what the tables and their columns are.
"""

import argparse
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

FOLDER = Path(__file__).resolve().parent
STYLE = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "grid.color": "0.9",
    "legend.frameon": False,
    "lines.markersize": 4,
    "savefig.dpi": 150,
}
# A method has one colour in all figures.
GRPO = "#0072B2"
HEAVY_PENALTY = "#56B4E9"
SFT = "#D55E00"
FORMAT_ONLY = "#E69F00"
RANDOM_REWARD = "#CC79A7"
BEFORE_TRAINING = "0.5"
FAMILIES = {"Qwen2.5-Math-1.5B": GRPO, "OLMo-2-1B": SFT, "another model": "#009E73"}
SMOLLM2 = "#CC79A7"

curves = pd.read_csv(FOLDER / "curves.csv.gz", low_memory=False)
hard_steps = curves["careful"] + curves["direct"]
curves["careful_share"] = curves["careful"] / hard_steps
# All shares are drawn in per cent.
curves[["accuracy", "careful_share", "distinct_2_batch"]] *= 100
test = pd.read_csv(FOLDER / "test.csv")
test["accuracy"] *= 100
choices = pd.read_csv(FOLDER / "choices.csv")
public = pd.read_csv(FOLDER / "public.csv")
measures = pd.read_csv(FOLDER / "measures.csv")


def new_figure(num_rows, num_columns, height):
    figure = Figure((6.5, height), layout="constrained")  # as wide as a phone can show it
    axes = figure.subplots(num_rows, num_columns, squeeze=False)
    return figure, axes.flatten()


def by_seed(study, arm, column, split="train"):
    """A column of curves.csv.gz: a row for each step, a column for each seed."""
    rows = curves.query("study == @study and arm == @arm and split == @split")
    return rows.pivot(index="step", columns="seed", values=column)


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
    low = seeds.min(axis="columns")
    high = seeds.max(axis="columns")
    mean = seeds.mean(axis="columns")
    ax.fill_between(mean.index, low, high, color=color, alpha=0.15, linewidth=0)
    ax.plot(mean, color=color, linestyle=linestyle, **style)


def describe(ax, title, unit, lowest=None, highest=None):
    ax.set_title(title, loc="left")
    ax.set_ylabel(unit)
    ax.set_ylim(lowest, highest)


def draw_training():
    figure, axes = new_figure(3, 2, 7.5)
    accuracy, careful, reward, entropy, kl, length = axes
    draw_reward(axes, "grpo", GRPO, 4)
    draw_reward(axes, "format", FORMAT_ONLY, 2)
    draw_reward(axes, "random", RANDOM_REWARD, 1)
    accuracy.text(100, 80, "GRPO", color=GRPO, ha="right")
    accuracy.text(100, 51, "format only", color=FORMAT_ONLY, ha="right")
    accuracy.text(100, 10, "random reward", color=RANDOM_REWARD, ha="right")
    describe(accuracy, "(a) accuracy on validation", "%", 0, 102)
    describe(careful, "(b) careful steps", "% of the hard steps", 0, 102)
    describe(reward, "(c) reward", "% of its maximum", 0, 102)
    describe(entropy, "(d) entropy of samples", "nats per token", 0)
    describe(kl, "(e) KL divergence of samples", "nats per token", 0)
    describe(length, "(f) length of samples", "tokens", 0)
    kl.set_xlabel("iteration")
    length.set_xlabel("iteration")
    return figure


def draw_reward(axes, arm, color, maximum):
    """All curves of the runs with one reward, which is at most `maximum`."""
    accuracy, careful, reward, *of_samples = axes
    draw(accuracy, by_seed("dynamics", arm, "accuracy", "validation"), color)
    draw(careful, by_seed("dynamics", arm, "careful_share", "validation"), color)
    percent = 100 / maximum
    draw(reward, percent * smooth(by_seed("dynamics", arm, "reward")), color)
    evaluated = percent * by_seed("dynamics", arm, "reward", "validation")
    reward.plot(evaluated.mean(axis="columns"), "o", color=color, markerfacecolor="white")
    columns = ("entropy", "kl_per_token", "response_length")
    for ax, column in zip(of_samples, columns, strict=True):
        draw(ax, smooth(by_seed("dynamics", arm, column)), color)


def draw_scaling():
    figure, axes = new_figure(1, 2, 3.2)
    by_iteration, by_size = axes
    describe(by_iteration, "(a) by iteration", "accuracy on validation (%)", -2, 102)
    describe(by_size, "(b) by size", "accuracy on test (%)", -2, 102)
    by_iteration.set_xlabel("iteration")
    by_size.set_xlabel("parameters")
    by_size.set_xscale("log")
    draw_size(axes, "3m", "#00304d", "scaling", "3m", "3m_before")
    draw_size(axes, "1m", GRPO, "dynamics", "grpo", "before")
    draw_size(axes, "0.3m", "#3d97cc", "scaling", "0.3m", "0.3m_before")
    draw_size(axes, "0.1m", "#7ab8dc", "scaling", "0.1m", "0.1m_before")
    by_iteration.legend()
    by_size.text(1.7e6, 84, "after", ha="center")
    by_size.text(1.7e6, 30, "before", ha="center")
    return figure


def draw_size(axes, name, color, study, arm, arm_before):
    by_iteration, by_size = axes
    seeds = by_seed(study, arm, "accuracy", "validation")
    draw(by_iteration, seeds, color, marker="o", label=name)
    accuracies = accuracies_on_test(study, arm)
    start = accuracies_on_test(study, arm_before)
    parameters = test["parameters"][accuracies.index]
    by_size.plot(parameters, accuracies, "o", color=color)
    by_size.plot(parameters.iloc[:1], start, "o", color=color, markerfacecolor="white")


def draw_sft():
    figure, (by_solutions, by_iteration) = new_figure(2, 1, 7.5)
    draw_solutions(by_solutions)
    draw_worth(by_iteration)
    return figure


def draw_solutions(ax):
    """Accuracy on test by the number of solutions, beside GRPO's."""
    describe(ax, "(a) SFT, by number of solutions", "accuracy on test (%)", 15, 102)
    ax.set_xlabel("worked solutions")
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    for study, arm in (("dynamics", "grpo"), ("rates", "base")):
        seeds = accuracies_on_test(study, arm)
        ax.axhspan(seeds.min(), seeds.max(), color=GRPO, alpha=0.2, linewidth=0)
    start = accuracies_on_test("dynamics", "before").item()
    ax.axhline(start, color=BEFORE_TRAINING, linestyle=":")
    draw_kind(ax, "careful", "o", "-")
    draw_kind(ax, "direct", "s", "--")
    ax.text(8_500, 52, "10,000 direct, five times the updates", color=SFT, ha="right")
    ax.text(17_000, 95, "GRPO, the demo", color=GRPO, ha="right")
    ax.text(17_000, 84, "GRPO, the baseline", color=GRPO, ha="right")
    ax.text(17_000, 26, "before training", color=BEFORE_TRAINING, ha="right")
    ax.legend(loc=(0.1, 0.6))


def draw_kind(ax, kind, marker, linestyle):
    """SFT on careful or on direct solutions: a dot for each seed, and a line through the means."""
    runs = test.query("study == 'sft' and best == 1")
    runs = runs[runs["arm"].str.startswith(kind)]
    ax.plot(runs["examples"], runs["accuracy"], marker, color=SFT, markerfacecolor="none")
    # The largest set has five times the updates, so no line leads to it.
    means = runs.query("examples < 10_000").groupby("examples")["accuracy"].mean()
    ax.plot(means, linestyle, color=SFT, label=f"SFT on {kind} solutions")


def draw_worth(ax):
    """The baseline of GRPO by iteration, and at which of them it has the accuracy of SFT."""
    title = "(b) GRPO, by iteration, and where SFT ends"
    describe(ax, title, "accuracy on validation (%)", 15, 102)
    ax.set_xlabel("iteration of GRPO")
    ax.set_xlim(0, 60)
    draw(ax, by_seed("exchange", "grpo", "accuracy", "validation"), GRPO, linewidth=2)
    ax.text(32, 51, "GRPO, the baseline", color=GRPO)
    draw_end_of_sft(ax, "direct10", "")
    draw_end_of_sft(ax, "direct100", "")
    draw_end_of_sft(ax, "direct1000", "10 to 1,000 direct")
    draw_end_of_sft(ax, "direct10000", "10,000 direct")
    draw_end_of_sft(ax, "careful10", "10 careful")
    draw_end_of_sft(ax, "careful100", "100 careful")
    draw_end_of_sft(ax, "careful1000", "1,000 careful")


def draw_end_of_sft(ax, arm, name):
    ends, worth = measures.query("study == 'sft' and run == @arm").itertuples()
    accuracy = 100 * ends.value
    linestyle = "-" if arm.startswith("careful") else "--"
    ax.axhline(accuracy, color=SFT, linestyle=linestyle, linewidth=0.8)
    if 5 < worth.low < 60:  # between the first and the last evaluation
        ax.hlines(accuracy, worth.low, min(worth.high, 60), SFT, linewidth=3)
        ax.plot(worth.value, accuracy, "o", color=SFT, markersize=6)
        if worth.high < 60:
            name += f": {worth.value:.0f} ({worth.low:.0f} to {worth.high:.0f})"
    ax.text(61, accuracy, name, color=SFT, va="center")


def draw_judge():
    figure, axes = new_figure(3, 1, 7)
    diversity, reward, kl = axes
    for ax, column in zip(axes, ("distinct_2_batch", "reward", "kl_per_token"), strict=True):
        light = smooth(by_seed("judge", "beta0.04", column))
        heavy = smooth(by_seed("judge", "beta0.4", column))
        draw(ax, light, GRPO, label="beta 0.04")
        draw(ax, heavy, HEAVY_PENALTY, "--", label="beta 0.4")
    diversity.legend(loc="lower left")
    describe(diversity, "(a) distinct word pairs in a batch", "%", 0, 102)
    describe(reward, "(b) the judge's reward", "nats per token")
    describe(kl, "(c) KL divergence", "nats per token", 0)
    kl.set_xlabel("iteration")
    return figure


def draw_choices():
    figure = Figure((6.5, 8.5), layout="constrained")
    rates, forest = figure.subplots(2, 1, height_ratios=[1, 2.2])
    draw_rates(rates)
    draw_forest(forest)
    return figure


def draw_rates(ax):
    """Four seeds of the baseline at three learning rates."""
    runs = curves.query("study == 'choices' and arm == 'base' and split == 'validation'")
    runs = runs.query("3 <= seed <= 6 and step > 0")
    over_the_run = runs.pivot_table("accuracy", index="rate", columns="seed")
    last = runs.query("step == 60")
    at_the_end = last.pivot_table("accuracy", index="rate", columns="seed")
    draw(ax, at_the_end, GRPO, "--", marker="o", label="at iteration 60")
    draw(ax, over_the_run, GRPO, marker="s", label="averaged")
    describe(ax, "(a) the baseline by learning rate", "accuracy on validation (%)")
    ax.legend(loc="lower right")
    ax.set_xscale("log")
    ax.set_xticks([1e-4, 2e-4, 4e-4], ["1e-4", "2e-4", "4e-4"])
    ax.set_xticks([], minor=True)
    ax.set_xlabel("learning rate")


def draw_forest(ax):
    """A row for each choice, the best one on top."""
    ax.set_title("(b) each choice at its best rate", loc="left")
    ax.set_xlabel("difference averaged over the run (points)")
    rows = choices.query("study == 'choices' and measure == 'averaged over the run'")
    rows = rows.sort_values("mean").reset_index()
    names = rows["choice"] + " minus " + rows["reference"]
    names = names.str.removesuffix(" minus the baseline")
    ax.set_yticks(rows.index, names)
    is_significant = rows["verdict"] == "significant"
    colors = is_significant.map({True: "0.1", False: "0.5"})
    fills = is_significant.map({True: "0.1", False: "white"})
    ax.hlines(rows.index, rows["low"], rows["high"], colors)
    ax.scatter(rows["mean"], rows.index, 25, fills, edgecolors=colors, zorder=3)
    ax.axvline(0, color="0.4", linewidth=0.8)
    ax.grid(visible=False, axis="y")


def draw_real_model():
    figure, axes = new_figure(4, 1, 9)
    greedy, samples, length, entropy = axes
    draw_smollm2(axes, "slow", GRPO, "--", "GRPO at 5e-6")
    draw_smollm2(axes, "grpo", GRPO, "-", "GRPO at 2e-5")
    draw_smollm2(axes, "format", FORMAT_ONLY, "-", "format only")
    describe(greedy, "(a) greedy answers, on validation", "accuracy (%)", 0, 36)
    describe(samples, "(b) samples in training", "accuracy (%)", 0, 36)
    describe(length, "(c) length of samples", "tokens", 0, 40)
    describe(entropy, "(d) entropy of samples", "nats per token", 0)
    entropy.set_xlabel("iteration")
    greedy.legend(loc="lower right")
    return figure


def draw_smollm2(axes, arm, color, linestyle, name):
    greedy, samples, length, entropy = axes
    accuracies = by_seed("real", arm, "accuracy", "validation")
    draw(greedy, accuracies, color, linestyle, label=name)
    draw(samples, mean_of_last_ten(arm, "accuracy"), color, linestyle)
    draw(length, mean_of_last_ten(arm, "response_length"), color, linestyle)
    if arm != "format":  # too few of its groups have different rewards
        draw(entropy, mean_of_last_ten(arm, "entropy"), color, linestyle)


def mean_of_last_ten(arm, column):
    windows = by_seed("real", arm, column).rolling(10)
    return windows.mean().iloc[9:]


def draw_carries_over():
    """A row for each question with a verdict: a dot for each project, their median, and ours."""
    figure, (ax,) = new_figure(1, 1, 7)
    draw_noise(ax, 50, "0.94")
    draw_noise(ax, 200, "0.87")
    decided = public.query("quality == 'good' and verdict != 'unclear'").dropna(subset="difference")
    questions = decided["question"].unique()
    for row, question in enumerate(questions):
        draw_question(ax, row, question, decided[decided["question"] == question])
    ax.axvline(0, color="0.4", linewidth=0.8)
    ax.set_xscale("symlog", linthresh=10, linscale=0.9)
    ticks = [-80, -20, -5, 0, 5, 20]
    ax.set_xticks(ticks, ticks)
    ax.set_xticks([], minor=True)
    ax.set_xlim(-100, 70)
    ax.set_xlabel("b is better   <   a - b in points of accuracy   >   a is better")
    ax.set_yticks([])
    ax.set_ylim(len(questions) - 0.5, -0.6)
    for family, color in FAMILIES.items():
        ax.plot([], [], "o", color=color, label=f"a project with {family}")
    ax.plot([], [], "o", color="0.4", markerfacecolor="none", label="open: a run collapsed")
    ax.plot([], [], color="black", linewidth=2.5, label="median of the projects")
    ax.plot([], [], "-D", color="0.3", label="our toy world, with its interval")
    ax.plot([], [], "-s", color=SMOLLM2, label="SmolLM2-135M")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def draw_noise(ax, step, color):
    """A band from minus to plus the difference that holds 95% of pairs of equal runs."""
    equal_runs = measures[measures["run"] == f"all equal runs, step {step}"]
    width = equal_runs["value"].item()
    ax.axvspan(-width, width, color=color, linewidth=0, zorder=0)
    ax.text(width, -0.55, f"{width:.0f}", ha="right", va="top", color="0.4")


def draw_question(ax, row, question, projects):
    ours = next(projects.itertuples())
    num_higher = (projects["difference"].round(1) > 0).sum()
    verdict = f"{num_higher} of {len(projects)} higher; carries over: {ours.verdict}"
    ax.text(-97, row - 0.4, question, weight="bold")
    ax.text(-97, row - 0.24, verdict)
    for project in projects.itertuples():
        color = FAMILIES[project.family]
        has_collapsed = project.collapsed_a + project.collapsed_b > 0
        fill = "none" if has_collapsed else color
        ax.plot(project.difference, row, "o", color=color, markerfacecolor=fill, markersize=5)
    median = projects["difference"].median()
    ax.vlines(median, row - 0.14, row + 0.14, "black", linewidth=2.5)
    ax.hlines(row + 0.2, ours.ours_low, ours.ours_high, "0.3")
    ax.plot(ours.ours, row + 0.2, "D", color="0.3")
    ax.hlines(row + 0.32, ours.smollm2_low, ours.smollm2_high, SMOLLM2)
    ax.plot(ours.smollm2, row + 0.32, "s", color=SMOLLM2)
    ax.axhline(row + 0.5, color="0.85", linewidth=0.6)


def main():
    parser = argparse.ArgumentParser(description="Draw the figures of analysis.md.")
    figures = {
        "training": draw_training,
        "scaling": draw_scaling,
        "sft": draw_sft,
        "judge": draw_judge,
        "choices": draw_choices,
        "real_model": draw_real_model,
        "carries_over": draw_carries_over,
    }
    parser.add_argument("name", nargs="?", choices=figures, help="one of them alone")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the PNG files go")
    args = parser.parse_args()
    matplotlib.rcParams.update(STYLE)
    for name in [args.name] if args.name else figures:
        figure = figures[name]()
        figure.savefig(args.folder / f"{name}.png", metadata={"Software": None})


if __name__ == "__main__":
    main()
