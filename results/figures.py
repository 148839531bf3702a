"""Draw the figures of analysis.md from the tables in this folder, as PNG.

    python results/figures.py               # all of them
    python results/figures.py training      # one

README.md says what the tables and their columns are.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import NamedTuple

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from PIL import Image  # matplotlib brings it

FOLDER = Path(__file__).resolve().parent
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
# A method has one colour in all figures.
GRPO = "#0072B2"
HEAVY_PENALTY = "#56B4E9"
SFT = "#D55E00"
FORMAT_ONLY = "#E69F00"
RANDOM_REWARD = "#CC79A7"
# Variants of GRPO in the figures of the ablations.
GREEN = "#009E73"
WINE = "#882255"
GREY = "0.45"
ACCURACY = "accuracy on validation (%)"
TITLES = {
    "accuracy": ACCURACY,
    "grad_norm": "gradient norm",
    "response_length": "length (tokens)",
    "entropy": "entropy (nats per token)",
}

curves = pd.read_csv(FOLDER / "curves.csv.gz", low_memory=False)
hard_steps = curves["careful"] + curves["direct"]
curves["careful_share"] = curves["careful"] / hard_steps
# All shares are drawn in per cent.
curves[["accuracy", "careful_share", "distinct_2_batch"]] *= 100
test = pd.read_csv(FOLDER / "test.csv")
test["accuracy"] *= 100
real = pd.read_csv(FOLDER / "real.csv")
real["accuracy"] *= 100
qwen = pd.read_csv(FOLDER / "qwen.csv")
qwen[["accuracy", "accuracy_low", "accuracy_high"]] *= 100
qwen_grpo = pd.read_csv(FOLDER / "qwen_grpo.csv", index_col=["run", "step"])
choices = pd.read_csv(FOLDER / "choices.csv")
measures = pd.read_csv(FOLDER / "measures.csv")


class Arm(NamedTuple):
    """A line of a figure; without a rate it is at the learning rate that suits the arm best."""

    label: str
    arm: str
    color: str
    linestyle: str = "-"
    study: str = "choices"
    rate: float | None = None


# The figures of CS336's ablations: message, arms, and a panel for each column of curves.csv.gz.
ABLATIONS = {
    "grpo_learning_rate": (
        "2e-4 is the best of four learning rates, and 1e-3 destroys the model",
        [
            Arm("1e-4", "base", GREEN, "-", "rates", 1e-4),
            Arm("2e-4", "base", GRPO, "-", "rates", 2e-4),
            Arm("4e-4", "base", WINE, "-", "rates", 4e-4),
            Arm("1e-3 (one seed)", "base", GREY, "--", "rates", 1e-3),
        ],
        ["accuracy", "grad_norm", "entropy"],
    ),
    "grpo_baselines": (
        "Raw rewards teach the format and little more",
        [
            Arm("group's mean subtracted (standard)", "base", GRPO),
            Arm("raw rewards", "no_baseline", WINE, "--"),
        ],
        ["accuracy", "grad_norm", "response_length"],
    ),
    "grpo_length_normalization": (
        "Dividing by a constant makes gradients smaller; accuracy is about the same",
        [
            Arm("own length (standard)", "base", GRPO),
            Arm("all tokens of the batch", "token_mean", GREEN, ":"),
            Arm("a constant", "masked_normalize", WINE, "--"),
        ],
        ["accuracy", "grad_norm", "response_length"],
    ),
    "grpo_group_standard_deviation": (
        "Without the division early gradients are larger, and accuracy is about the same",
        [
            Arm("divided by the std (standard)", "base", GRPO),
            Arm("not divided", "no_std", WINE, "--"),
        ],
        ["accuracy", "grad_norm", "response_length"],
    ),
    "grpo_off_policy_clip_ablation": (
        "Without the clip gradients are larger, and accuracy ends about the same",
        [
            Arm("4 updates, clip", "updates4", GRPO),
            Arm("4 updates, no clip", "updates4_no_clip", GREEN, "--"),
            Arm("16 updates, clip", "updates16", GREY),
            Arm("16 updates, no clip", "updates16_no_clip", WINE, "--"),
        ],
        ["accuracy", "grad_norm", "entropy", "response_length"],
    ),
    "grpo_prompt_ablation": (
        "Three prompts, and no clear difference in accuracy",
        [
            Arm("r1_zero", "r1_zero", WINE),
            Arm("question_only", "question_only", GREEN),
            Arm("reasoning_answer", "answer_reward", GRPO, "--"),
        ],
        ["accuracy", "grad_norm", "entropy", "response_length"],
    ),
}


def new_figure(message, num_rows, num_columns, height):
    figure = Figure((6.5, height), layout="constrained")  # as wide as a phone can show it
    figure.suptitle(message, x=0.01, ha="left", weight="bold")
    axes = figure.subplots(num_rows, num_columns, squeeze=False)
    return figure, axes.flatten()


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
    low = seeds.min(axis="columns")
    high = seeds.max(axis="columns")
    mean = seeds.mean(axis="columns")
    ax.fill_between(mean.index, low, high, color=color, alpha=0.15, linewidth=0)
    ax.plot(mean, color=color, linestyle=linestyle, **style)


def describe(ax, title, lowest=None, highest=None, x="iteration"):
    ax.set_title(title, loc="left")
    ax.set_xlabel(x)
    ax.set_ylim(lowest, highest)


def draw_training():
    message = "GRPO finds the careful steps; a reward for the format alone doesn't"
    figure, axes = new_figure(message, 2, 3, 4.6)
    accuracy, careful, reward, entropy, kl, length = axes
    draw_reward(axes, "grpo", GRPO, 4)
    draw_reward(axes, "format", FORMAT_ONLY, 2)
    draw_reward(axes, "random", RANDOM_REWARD, 1)
    accuracy.text(100, 76, "GRPO", color=GRPO, ha="right")
    accuracy.text(100, 52, "format only", color=FORMAT_ONLY, ha="right")
    accuracy.text(100, 6, "random reward", color=RANDOM_REWARD, ha="right")
    describe(accuracy, ACCURACY, 0, 102)
    describe(careful, "hard steps: careful (%)", 0, 102)
    describe(reward, "reward (% of its maximum)", 0, 102)
    describe(entropy, TITLES["entropy"], 0)
    describe(kl, "KL (nats per token)", 0)
    describe(length, TITLES["response_length"], 0)
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
    message = "1m and 3m learn the task; 0.6m learns half of it, 0.1m and 0.3m little"
    figure, axes = new_figure(message, 1, 2, 2.9)
    by_iteration, by_size = axes
    describe(by_iteration, ACCURACY, -2, 102)
    describe(by_size, "accuracy on test (%)", -2, 102, x="parameters")
    by_size.set_xscale("log")
    draw_size(axes, "#00304d", "scaling", "3m", "3m_before")
    draw_size(axes, GRPO, "dynamics", "grpo", "before")
    draw_size(axes, "#3d97cc", "scaling", "0.6m", "0.6m_before")
    draw_size(axes, "#7ab8dc", "scaling", "0.3m", "0.3m_before")
    draw_size(axes, "#b5d8ec", "scaling", "0.1m", "0.1m_before")
    for name, height in (("3m", 96), ("1m", 83), ("0.6m", 52), ("0.3m", 22), ("0.1m", 4)):
        by_iteration.text(101, height, name, ha="right")
    by_size.text(1.7e6, 84, "after", ha="center")
    by_size.text(1.7e6, 30, "before", ha="center")
    return figure


def draw_size(axes, color, study, arm, arm_before):
    by_iteration, by_size = axes
    seeds = by_seed(study, arm, "accuracy", "validation")
    draw(by_iteration, seeds, color, marker="o")
    accuracies = accuracies_on_test(study, arm)
    start = accuracies_on_test(study, arm_before)
    parameters = test["parameters"][accuracies.index]
    by_size.plot(parameters, accuracies, "o", color=color)
    by_size.plot(parameters.iloc[:1], start, "o", color=color, markerfacecolor="white")


def draw_sft():
    message = "10 careful solutions match 47 iterations, 1,000 direct ones fewer than 5"
    figure, (by_solutions, by_iteration) = new_figure(message, 2, 1, 6)
    draw_solutions(by_solutions)
    draw_worth(by_iteration)
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
    start = accuracies_on_test("dynamics", "before").item()
    ax.axhline(start, color=GREY, linestyle=":")
    draw_kind(ax, "careful", "o", "-")
    draw_kind(ax, "direct", "s", "--")
    ax.text(8_500, 52, "10,000 direct, five times the updates", color=SFT, ha="right")
    ax.text(17_000, 95, "GRPO, the demo", color=GRPO, ha="right")
    ax.text(17_000, 84, "GRPO, the standard run", color=GRPO, ha="right")
    ax.text(17_000, 27, "before training", color=GREY, ha="right")
    ax.legend(loc=(0.1, 0.55))


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
    title = "GRPO by iteration, and where SFT ends: accuracy on validation (%)"
    describe(ax, title, 15, 102, x="iteration of GRPO")
    ax.set_xlim(0, 60)
    draw(ax, by_seed("exchange", "grpo", "accuracy", "validation"), GRPO, linewidth=2)
    ax.text(32, 51, "GRPO, the standard run", color=GRPO)
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
    message = "The judge's reward rises, and under a light KL penalty the stories become alike"
    figure, axes = new_figure(message, 1, 3, 2.6)
    diversity, reward, kl = axes
    for ax, column in zip(axes, ("distinct_2_batch", "reward", "kl_per_token"), strict=True):
        light = smooth(by_seed("judge", "beta0.04", column))
        heavy = smooth(by_seed("judge", "beta0.4", column))
        draw(ax, light, GRPO, label="light penalty, beta 0.04")
        draw(ax, heavy, HEAVY_PENALTY, "--", label="heavy penalty, beta 0.4")
    describe(diversity, "distinct word pairs (%)", 0, 102)
    describe(reward, "reward (nats per token)")
    describe(kl, "KL (nats per token)", 0)
    figure.legend(*kl.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


# The greedy rows of qwen.csv with reasoning_answer, in their order.
STAGES = ["as it is", "32", "128", "491", "128 of GSM8K's", "491 of GSM8K's", "128 again"]
STAGES += ["30 of GRPO", "40 of GRPO", "128, third run", "15 with KL term"]


def draw_qwen():
    message = "Real Qwens: GRPO helps 1.5B; 0.5B has learnt more from solutions"
    figure, axes = new_figure(message, 3, 2, 7)
    zero_shot, trained, samples, entropy, lora, by_size = axes
    greedy = qwen.query("temperature == 0")
    before = greedy.query("training == 'as it is'")
    names = before["prompt"].where(before["dataset"] == "gsm8k", "MATH, " + before["prompt"])
    names = names.where(before["model"] == "0.5B", before["model"] + ", " + names)
    draw_accuracies(zero_shot, before, names, GREY)
    describe(zero_shot, "zero-shot", x="accuracy (%)")
    zero_shot.legend(loc="upper right")
    stages = greedy.query("prompt == 'reasoning_answer'")
    draw_accuracies(trained, stages, STAGES, SFT)
    describe(trained, "SFT by solutions, then GRPO", x="accuracy (%)")

    for run, label, color in (
        ("after_sft", "3e-6, no KL term", GRPO),
        ("after_sft_kl", "1e-6, KL term", GREEN),
    ):
        rows = qwen_grpo.loc[run]
        for ax, values in ((samples, 100 * rows["accuracy"]), (entropy, rows["entropy"])):
            ax.plot(values, "o", color=color, markersize=3, alpha=0.4)
            ax.plot(values.rolling(10).mean(), color=color, label=label)
    entropy.legend(loc="lower left")
    describe(samples, "GRPO after SFT: right samples (%)", 0)
    describe(entropy, TITLES["entropy"], 0)

    for run, label, line, color in (
        ("lora_1.5b", "1.5B", "o-", GRPO),
        ("lora_1.5b_seed1", "1.5B again", "o--", GRPO),
        ("lora_0.5b", "0.5B", "o-", GREEN),
    ):
        right = 100 * qwen_grpo.loc[run, "accuracy"]
        lora.plot(right, line, color=color, markersize=3, label=label)
    lora.legend()
    describe(lora, "LoRA, no SFT: right samples (%)", 0)
    draw_sizes(by_size, greedy.query("dataset == 'gsm8k' and prompt == 'r1_zero'"))
    return figure


def draw_sizes(ax, runs):
    """Greedy accuracy of both models before and after GRPO with LoRA."""
    for training, label, color, shift in (
        ("as it is, again", "before", GREY, -0.02),
        ("GRPO with LoRA, 10 iterations", "after", GRPO, 0.02),
    ):
        rows = runs[runs["training"] == training]
        size = rows["model"].str.removesuffix("B").astype(float) + shift + 0.04 * rows["seed"]
        ax.errorbar(size, rows["accuracy"], yerr=interval(rows), fmt="o", color=color, label=label)
    ax.legend()
    ax.set_xlim(0.25, 1.75)
    describe(ax, "the same, greedy, on test (%)", 0, x="billions of parameters")


def draw_accuracies(ax, runs, names, color):
    """A row for each evaluation, the first on top: in the format with its interval, and in any."""
    rows = range(len(runs))
    in_any_format = 100 * runs["accuracy_flexible"]
    ax.plot(in_any_format, rows, "o", color="0.3", markerfacecolor="none", label="in any format")
    ax.errorbar(runs["accuracy"], rows, xerr=interval(runs), fmt="o", color=color)
    ax.set_yticks(rows, names)
    ax.set_ylim(len(runs) - 0.5, -0.5)
    ax.set_xlim(-0.5)
    ax.grid(visible=False, axis="y")


def interval(runs):
    """How far the 95% interval of each evaluation reaches below and above it."""
    accuracy = runs["accuracy"]
    return [accuracy - runs["accuracy_low"], runs["accuracy_high"] - accuracy]


def draw_smollm2():
    message = "SmolLM2-135M gains little in 60 iterations and more in 240 slower ones"
    figure, axes = new_figure(message, 2, 2, 4.8)
    greedy, solutions, samples, entropy = axes
    for arm in (
        Arm("GRPO at 5e-6", "slow", GRPO, "--"),
        Arm("GRPO at 2e-5", "grpo", GRPO),
        Arm("format only", "format", FORMAT_ONLY),
    ):
        seeds = by_seed("real", arm.arm, "accuracy", "validation")
        draw(greedy, seeds, arm.color, arm.linestyle, label=arm.label)
        draw(samples, mean_of_last_ten(arm.arm, "accuracy"), arm.color, arm.linestyle)
        if arm.arm != "format":  # too few of its groups have different rewards
            draw(entropy, mean_of_last_ten(arm.arm, "entropy"), arm.color, arm.linestyle)
    draw_solutions_of_smollm2(solutions)
    describe(greedy, "GRPO: " + ACCURACY, 0, 44)
    describe(solutions, "SFT: " + ACCURACY, 0, 44, x="worked solutions")
    describe(samples, "accuracy of training samples (%)", 0, 44)
    describe(entropy, TITLES["entropy"], 0)
    greedy.legend(loc="upper left")
    return figure


def mean_of_last_ten(arm, column):
    windows = by_seed("real", arm, column).rolling(10)
    return windows.mean().iloc[9:]


def draw_solutions_of_smollm2(ax):
    """Greedy accuracy by the number of solutions, and where GRPO's longer runs end."""
    runs = real.query("study == 'real' and split == 'validation' and n == 300 and step > 0")
    sizes = {"sft32": 32, "sft128": 128, "sft512": 512, "more_sft": 128 + 1_920}
    last = runs.groupby(["arm", "seed"]).last().reset_index()
    trained = last[last["arm"].isin(sizes)]
    num_solutions = trained["arm"].map(sizes)
    ax.plot(num_solutions, trained["accuracy"], "o", color=SFT, markerfacecolor="none")
    ax.plot(trained["accuracy"].groupby(num_solutions).mean(), color=SFT)
    longer = last[last["arm"] == "slow"]["accuracy"]
    ax.axhspan(longer.min(), longer.max(), color=GRPO, alpha=0.2, linewidth=0)
    ax.text(30, 28, "128, then GRPO\nat 5e-6", color=GRPO)
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(sizes.values()), [f"{size:,}" for size in sizes.values()])


def draw_choices():
    """A row for each choice, the best one on top."""
    message = "Of these choices, raw rewards lose by far the most"
    figure, (ax,) = new_figure(message, 1, 1, 5)
    ax.set_xlabel("accuracy averaged over iterations 10 to 60 (points)")
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
    return figure


def draw_expert_iteration():
    message = "Every round helps, but five rounds stay below GRPO"
    figure, (accuracy, entropy) = new_figure(message, 1, 2, 3.6)
    study = "expert_iteration"
    for arm in (
        Arm("96 x 4", "questions96_group4_epochs4", HEAVY_PENALTY),
        Arm("96 x 8", "questions96_group8_epochs4", SFT),
        Arm("96 x 8, one epoch", "questions96_group8_epochs1", SFT, ":"),
        Arm("96 x 16", "questions96_group16_epochs4", WINE),
        Arm("192 x 4", "questions192_group4_epochs4", GREEN),
        Arm("512 x 8", "questions512_group8_epochs4", "black"),
    ):
        by_round = by_seed(study, arm.arm, "accuracy", "validation", index="ei_step")
        draw(accuracy, by_round, arm.color, arm.linestyle, marker="o", label=arm.label)
        kept = by_seed(study, arm.arm, "entropy", index="ei_step")
        draw(entropy, kept, arm.color, arm.linestyle, marker="o")
        of_all = by_seed(study, arm.arm, "sample_entropy", index="ei_step")
        if not of_all.empty:  # older runs didn't log it
            draw(entropy, of_all, arm.color, "--", marker="s")
    grpo = by_seed("rates", "base", "accuracy", "validation").loc[60]
    accuracy.axhspan(grpo.min(), grpo.max(), color=GRPO, alpha=0.2, linewidth=0)
    accuracy.text(1, 85, "GRPO, 3,840 samples", color=GRPO)
    describe(accuracy, ACCURACY, x="round")
    describe(entropy, TITLES["entropy"], 0, x="round")
    entropy.text(1.3, 0.16, "all samples")
    entropy.text(1.5, 0.006, "samples kept")
    figure.legend(*accuracy.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def draw_sft_experiment():
    message = "What the solutions show counts more than how many there are"
    figure, axes = new_figure(message, 1, 3, 3.2)
    careful, direct, filtered = axes
    shades = matplotlib.colormaps["viridis_r"]
    sizes = (10, 128, 256, 512, 1_000)
    for number, size in enumerate(sizes):
        color = shades((number + 1) / len(sizes))
        draw_set(careful, "sft", f"careful{size}", color, f"{size:,}")
        draw_set(direct, "sft", f"direct{size}", color, f"{size:,}")
    draw_set(direct, "sft", "direct10000", SFT, "10,000")
    draw_set(filtered, "filtered", "right", GREEN, "268 right")
    draw_set(filtered, "filtered", "wrong", WINE, "268 wrong")
    draw_set(filtered, "filtered", "as_many", FORMAT_ONLY, "268 random")
    draw_set(filtered, "filtered", "all", GREY, "all 2,048")
    describe(careful, "careful solutions", 15, 95, x="update")
    describe(direct, "direct solutions", 15, 95, x="update")
    describe(filtered, "samples of the 3m model", 15, 95, x="update")
    careful.set_ylabel(ACCURACY)
    filtered.legend(loc="upper left")
    handles, labels = direct.get_legend_handles_labels()
    title = "number of solutions"
    figure.legend(handles, labels, loc="outside lower center", ncols=6, title=title)
    return figure


def draw_set(ax, study, arm, color, label):
    """A line for seed 0, and dots for the other two, which were evaluated less often."""
    seeds = by_seed(study, arm, "accuracy", "validation")
    ax.plot(seeds[0].dropna(), color=color, label=label)
    ax.plot(seeds[[1, 2]].dropna(), ".", color=color)


def draw_ablation(message, arms, columns):
    """A panel for each column of curves.csv.gz, with a line for each arm."""
    num_rows = 1 if len(columns) == 3 else 2
    figure, axes = new_figure(message, num_rows, len(columns) // num_rows, 0.6 + 2 * num_rows)
    for ax, column in zip(axes, columns, strict=True):
        for arm in arms:
            draw_arm(ax, arm, column)
        describe(ax, TITLES[column], 0)
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=len(arms))
    return figure


def draw_arm(ax, arm, column):
    if column == "accuracy":
        seeds = by_seed(arm.study, arm.arm, column, "validation", arm.rate)
    else:
        seeds = smooth(by_seed(arm.study, arm.arm, column, "train", arm.rate))
    draw(ax, seeds, arm.color, arm.linestyle, label=arm.label)


def draw_grpo_off_policy_sweep():
    message = "Two or four updates learn faster per iteration, but not per second"
    figure, axes = new_figure(message, 2, 3, 5)
    broad, by_iteration, by_second, grad_norm, entropy, length = axes
    sweep = curves.query("study == 'three_seeds' and seed == 0 and step == 60")
    sweep = sweep.query("split == 'validation'").pivot(index="arm", columns="rate")["accuracy"]
    broad.plot(sweep.loc["epochs1_batch32"].dropna(), color=GREEN, marker="o")
    broad.plot(sweep.loc["epochs2_batch32"].dropna(), color=WINE, marker="o")
    broad.plot(sweep.loc["epochs4_batch16"].dropna(), color=GREY, marker="o")
    for arm in (
        Arm("1 update", "base", GRPO),
        Arm("2 updates", "updates2", GREEN),
        Arm("4 updates", "updates4", WINE),
        Arm("16 updates", "updates16", GREY),
    ):
        draw_arm(by_iteration, arm, "accuracy")
        draw_by_second(by_second, arm)
        draw_arm(grad_norm, arm, "grad_norm")
        draw_arm(entropy, arm, "entropy")
        draw_arm(length, arm, "response_length")
    draw_arm(entropy, Arm("expert iteration", "expert_iteration", SFT, "--"), "sample_entropy")
    draw_arm(by_iteration, Arm("", "base_200", GRPO, ":"), "accuracy")
    draw_arm(by_iteration, Arm("", "updates4_200", WINE, ":"), "accuracy")
    broad.set_xscale("log")
    describe(broad, "accuracy at 60, broad sweep (%)", x="learning rate")
    describe(by_iteration, ACCURACY)
    describe(by_second, ACCURACY, x="seconds")
    describe(grad_norm, TITLES["grad_norm"], 0)
    describe(entropy, TITLES["entropy"], 0)
    describe(length, TITLES["response_length"])
    figure.legend(*entropy.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def draw_by_second(ax, arm):
    """Accuracy by the seconds of the fastest seed, without evaluations."""
    accuracy = by_seed(arm.study, arm.arm, "accuracy", "validation")
    seconds = by_seed(arm.study, arm.arm, "seconds").cumsum()
    fastest = seconds[seconds.loc[60].idxmin()]
    accuracy.index = [0 if step == 0 else fastest[step] for step in accuracy.index]
    draw(ax, accuracy, arm.color, arm.linestyle)


def main():
    parser = argparse.ArgumentParser(description="Draw the figures of analysis.md.")
    figures = {
        "qwen": draw_qwen,
        "training": draw_training,
        "scaling": draw_scaling,
        "sft": draw_sft,
        "judge": draw_judge,
        "smollm2": draw_smollm2,
        "choices": draw_choices,
        "expert_iteration": draw_expert_iteration,
        "sft_experiment": draw_sft_experiment,
        "grpo_off_policy_sweep": draw_grpo_off_policy_sweep,
    }
    for name, ablation in ABLATIONS.items():
        figures[name] = partial(draw_ablation, *ablation)
    parser.add_argument("name", nargs="?", choices=figures, help="one of them alone")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the PNG files go")
    args = parser.parse_args()
    matplotlib.rcParams.update(STYLE)
    for name in [args.name] if args.name else figures:
        path = args.folder / f"{name}.png"
        figures[name]().savefig(path)
        with Image.open(path) as image:
            image.convert("RGB").quantize(128).save(path, optimize=True)  # a third of the size


if __name__ == "__main__":
    main()
