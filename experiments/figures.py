"""The figures of the studies that plotter.py cannot draw, made from their logs.

    python experiments/figures.py forest [STUDY ...] --output FILE.png
        the comparisons of comparisons.txt: how far apart their two sides are
    python experiments/figures.py forest_choices --output FILE.png
        the same for the comparisons of choices/comparisons.txt that are finished
    python experiments/figures.py response TITLE ARM [ARM ...] --output FILE.png
        how outcome A of arms of `choices` depends on the learning rate
    python experiments/figures.py sft_by_examples --output FILE.png
        accuracy after SFT on more and more gold examples, beside GRPO
    python experiments/figures.py exchange --output FILE.png
        the iteration at which GRPO is as accurate as SFT is at its end
    python experiments/figures.py expert_iterations --output FILE.png
        accuracy and the share of careful steps by expert iteration, beside GRPO and SFT
    python experiments/figures.py entropy_of_samples --output FILE.png
        the entropy at what expert iteration keeps, beside that at all samples of GRPO
    python experiments/figures.py entropy_by_iteration --output FILE.png
        the entropy at all samples, for one and sixteen updates on each batch and expert iteration
    python experiments/figures.py levels --output FILE.png
        accuracy on problems of one to four steps, by the size of the model
    python experiments/figures.py careful_curves --output FILE.png
        accuracy and the share of careful steps by iteration, for three rewards
    python experiments/figures.py pass_at_k --output FILE.png
        pass@k before and after training
    python experiments/figures.py rare TITLE --output FILE.png
        accuracy and the share of careful steps by iteration, by how rare these are at first
    python experiments/figures.py entropy --output FILE.png
        accuracy against entropy, with the line of entropy.py
    python experiments/figures.py categories --output FILE.png
        zero-shot completions by format and answer

The numbers are those of the tables of table.py. study_logs.py explains what a side is. names.json
has the names and the colours of sides. The program first unpacks the archives of the studies
(experiments/archive.py). The memory of a GPU is drawn by benchmarks/memory_table.py.

Shapes: S seeds, E evaluations, Q questions.
"""

import argparse
import inspect
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure  # without pyplot, nothing can open a window
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import PercentFormatter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import plotter  # noqa: E402
from experiments import archive, differences, entropy, outcomes, study_logs  # noqa: E402
from experiments.answers import checksum_of_questions, correct_answers  # noqa: E402
from experiments.paired import SIGNIFICANT  # noqa: E402
from experiments.study_logs import LEVELS, color_of, name_of, runs_of  # noqa: E402
from logs.read import smooth
from logs.statistics import CATEGORIES, pass_at_k  # noqa: E402
from rl_datasets import ArithmeticLoader  # noqa: E402

STYLE = plotter.STYLE | {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "figure.titlesize": 12,
    "legend.fontsize": 10,
    "lines.markersize": 5,
}
DPI = 150
WIDTH = 6.5  # of every figure, in inches
TITLE_CHARACTERS = 58  # that fit into a line of a title
GREY = "#777777"


# --- What figures share ---------------------------------------------------------------------------


def new_figure(title, height, num_panels=1):
    """A figure with its message as title, and its panels side by side."""
    fig = Figure((WIDTH, height), layout="constrained")
    fig.suptitle("\n".join(plotter.even_lines(title, TITLE_CHARACTERS)))
    panels = fig.subplots(1, num_panels, squeeze=False)
    return fig, panels[0]


def accuracy_and_careful_steps(title, height):
    """A figure with two panels on validation, and {measure: its panel}."""
    fig, (accuracy, careful) = new_figure(title, height, num_panels=2)
    accuracy.set_title("strict accuracy on validation")
    careful.set_title("share of careful steps")
    for ax in (accuracy, careful):
        show_accuracy(ax.yaxis)
    return fig, {"strict": accuracy, "careful": careful}


def add_legend(fig, handles, num_columns=1):
    fig.legend(handles=handles, loc="outside lower center", ncols=num_columns)


def measures_on_test(side, key="strict"):
    """One measure of each seed on the test problems, after training: (S,)."""
    summaries = [study_logs.summary_on_test(run) for run in runs_of(side)]
    return np.array([study_logs.measure(summary, key) for summary in summaries])


def show_accuracy(axis):
    """Let an axis show shares as percentages, from 0 to 100 %."""
    axis.set_major_formatter(PercentFormatter(1))
    if axis.axis_name == "y":
        axis.axes.set_ylim(-0.02, 1.02)
    else:
        axis.axes.set_xlim(0, 1)


def draw_mean_with_range(ax, x, values, style):
    """Draw the mean over seeds, and a band from the lowest to the highest seed.

    Args:
        values: (S, number of points).
    """
    ax.fill_between(x, values.min(0), values.max(0), color=style["color"], alpha=0.2, linewidth=0)
    ax.plot(x, values.mean(0), **style)


# --- Comparisons ----------------------------------------------------------------------------------

LABEL_INCHES = 1.75  # the columns with the names of the sides, left and right of a forest plot
LABEL_CHARACTERS = 20  # that fit into such a column
QUESTION_CHARACTERS = 70
LINE_INCHES = 0.18  # the height of a line of text


@dataclass(frozen=True)
class ForestRow:
    """A comparison: how much more accurate the first side is than the second, in points."""

    question: str  # the heading above it; "" if it belongs to the row above
    first: str  # names of the sides
    second: str
    by_seed: Sequence[float]
    mean: float
    low: float  # the interval of the mean
    high: float
    verdict: str

    @property
    def is_significant(self):
        return self.verdict.startswith(SIGNIFICANT)

    @property
    def height(self):
        """In inches, without the heading."""
        num_lines = max(len(label_lines(name)) for name in (self.first, self.second))
        return num_lines * LINE_INCHES + 0.14

    @property
    def heading_height(self):
        if not self.question:
            return 0
        return len(heading_lines(self.question)) * LINE_INCHES + 0.22


def label_lines(name):
    return plotter.even_lines(name, LABEL_CHARACTERS)


def heading_lines(question):
    return plotter.even_lines(question, QUESTION_CHARACTERS)


def forest(*studies):
    rows = []
    waiting_question = ""  # of a comparison that has not been run, and that had the heading
    for question, first, second in differences.comparisons_of(studies):
        question = question or waiting_question
        try:
            difference = differences.compare_sides(first, second)
        except FileNotFoundError:  # not run yet
            waiting_question = question
            continue
        waiting_question = ""
        row = ForestRow(
            question,
            name_of(first),
            name_of(second),
            difference.by_seed,
            difference.mean,
            difference.mean - difference.half_width,
            difference.mean + difference.half_width,
            difference.verdict,
        )
        rows.append(row)
    num_significant = sum(row.is_significant for row in rows)
    title = f"{num_significant} of {len(rows)} differences are significant"
    styles = {
        "significant": {"color": "#0072B2", "marker": "o"},
        "not significant": {"color": GREY, "marker": "o", "markerfacecolor": "white"},
    }
    style_names = ["significant" if row.is_significant else "not significant" for row in rows]
    xlabel = "difference in strict accuracy on test (percentage points):\n"
    xlabel += "mean with Student's 95 % interval over seeds"
    return draw_forest(rows, title, xlabel, styles, style_names)


def forest_choices():
    rows = []
    class_above = ""
    judged_choices = outcomes.judged_choices(study_logs.STUDIES / "choices")
    for choice, judged in judged_choices.items():
        difference = judged.on_validation
        row = ForestRow(
            choice.class_name if choice.class_name != class_above else "",
            name_of(f"choices/{choice.first}"),
            name_of(f"choices/{choice.second}"),
            difference.by_seed,
            difference.mean,
            difference.low,
            difference.high,
            difference.verdict,
        )
        rows.append(row)
        class_above = choice.class_name
    num_significant = sum(row.is_significant for row in rows)
    num_equal = sum("equal" in row.verdict for row in rows)
    title = (
        f"Of {len(rows)} comparisons {num_significant} are significant. "
        f"Equal within 3 points: {num_equal}"
    )
    styles = {
        "significant": {"color": "#0072B2", "marker": "o"},
        "significant, equal within 3 points": {"color": "#0072B2", "marker": "s"},
        "equal within 3 points": {"color": "#009E73", "marker": "s"},
        "undecided": {"color": GREY, "marker": "o", "markerfacecolor": "white"},
    }
    style_names = [row.verdict for row in rows]
    xlabel = "difference in accuracy on validation, averaged over iterations 10 to 60\n"
    xlabel += "(percentage points): mean with 97.5 % interval over seeds"
    return draw_forest(rows, title, xlabel, styles, style_names, margin=3)


def response(title, first_name, *names):
    """Outcome A of arms against the learning rate, and the estimated best rate of each."""
    fig, (ax,) = new_figure(title, 4.8)
    all_rates = set()
    for name in (first_name, *names):
        arm = outcomes.arm_at_its_best_rate(study_logs.STUDIES / "choices", name)
        side = f"choices/{name}"
        color = color_of(side)
        rates = sorted(arm.means)
        all_rates.update(rates)
        means = [arm.means[rate] / 100 for rate in rates]
        ax.plot(rates, means, color=color, marker="o", label=name_of(side))
        mean_at_best_rate = np.mean([arm.by_seed[seed] for seed in outcomes.FIRST_SEEDS]) / 100
        ax.plot([arm.rate], [mean_at_best_rate], color=color, marker="*", markersize=12)
    ax.set_xscale("log")
    ticks = sorted(all_rates)
    ax.set_xticks(ticks, [outcomes.rate_text(rate) for rate in ticks])
    ax.set_xticks([], minor=True)
    ax.set_xlabel("learning rate")
    ax.set_ylabel("strict accuracy on validation,\nmean over iterations 10 to 60")
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    star = Line2D([], [], color="black", marker="*", linestyle="", label="estimated best rate")
    add_legend(fig, [*ax.get_legend_handles_labels()[0], star], num_columns=2)
    return fig


def draw_forest(rows, title, xlabel, styles, style_names, margin=0):
    """A row for each comparison, under its question: each seed, the mean, and its interval.

    The first side stands right, where differences are positive, and the second side left. The
    higher one of a significant difference is bold.

    Args:
        styles: {name of a style: keyword arguments of `plot`}.
        style_names: of each row.
        margin: in points; a band shows where the sides are equal for practical purposes.

    Raises:
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("none of the comparisons has been run")
    used_styles = {name: style for name, style in styles.items() if name in style_names}
    handles = [Line2D([], [], **style, label=name) for name, style in used_styles.items()]
    handles.append(Line2D([], [], color="black", marker=".", linestyle="", label="one seed"))
    if margin:
        handles.append(Patch(color="0.9", label=f"within {margin} points"))
    title_lines = plotter.even_lines(title, TITLE_CHARACTERS)
    title_height = 0.25 * len(title_lines)  # inches, as all of these
    num_legend_rows = math.ceil(len(handles) / 2)
    top = title_height + 0.24 * num_legend_rows + 0.75
    bottom = 0.75
    rows_height = sum(row.heading_height + row.height for row in rows)
    height = top + rows_height + bottom

    fig = Figure((WIDTH, height))
    fig.suptitle("\n".join(title_lines), y=1 - 0.12 / height)
    fig.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, 1 - (title_height + 0.1) / height),
        ncols=2,
    )
    axes_width = WIDTH - 2 * LABEL_INCHES
    ax = fig.add_axes(
        (LABEL_INCHES / WIDTH, bottom / height, axes_width / WIDTH, rows_height / height)
    )
    ax.set_ylim(rows_height, 0)  # so that y is in inches from the top
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ax.tick_params(top=True, labeltop=True)
    ax.set_xlabel(xlabel)
    ax.axvline(0, color="black", linewidth=1)
    if margin:
        ax.axvspan(-margin, margin, color="0.9", zorder=0)
    column_y = -0.42
    write_label(ax, "left", column_y, "← this side is higher")
    write_label(ax, "right", column_y, "this side is higher →")

    y = 0
    for row, style_name in zip(rows, style_names, strict=True):
        if row.question:
            heading = "\n".join(heading_lines(row.question))
            write_heading(ax, y + row.heading_height / 2, heading, row.heading_height)
            y += row.heading_height
        draw_forest_row(ax, row, y + row.height / 2, styles[style_name])
        y += row.height
    return fig


def write_heading(ax, y, text, height):
    """Write a question on a strip as wide as the figure."""
    axes_width = WIDTH - 2 * LABEL_INCHES
    margin = LABEL_INCHES / axes_width
    strip = Rectangle(
        (-margin, y - height / 2 + 0.04),
        1 + 2 * margin,
        height - 0.08,
        transform=ax.get_yaxis_transform(),
        clip_on=False,
        color="0.92",
        zorder=3,
    )
    ax.add_patch(strip)
    style = {"transform": ax.get_yaxis_transform(), "ha": "center", "va": "center", "zorder": 4}
    ax.text(0.5, y, text, **style)


def draw_forest_row(ax, row, y, style):
    first_is_higher = row.is_significant and row.mean > 0
    second_is_higher = row.is_significant and row.mean < 0
    write_label(ax, "right", y, row.first, is_bold=first_is_higher)
    write_label(ax, "left", y, row.second, is_bold=second_is_higher)
    color = style["color"]
    if np.isfinite([row.low, row.high]).all():
        ax.plot([row.low, row.high], [y, y], color=color, linewidth=2)
    ax.plot([row.mean], [y], **style, linestyle="", markersize=7)
    ax.plot(row.by_seed, [y + 0.11] * len(row.by_seed), ".", color="black", markersize=4)


def write_label(ax, place, y, name, is_bold=False):
    """Write the name of a side left or right of the panel of a forest plot."""
    gap = 0.06 / (WIDTH - 2 * LABEL_INCHES)
    x = -gap if place == "left" else 1 + gap
    ax.text(
        x,
        y,
        "\n".join(label_lines(name)),
        transform=ax.get_yaxis_transform(),
        ha="right" if place == "left" else "left",
        va="center",
        linespacing=1.05,
        weight="bold" if is_bold else "normal",
    )


# --- SFT ------------------------------------------------------------------------------------------

# {kind of gold solutions: numbers of examples}; sft/direct10 is the side with 10 direct ones.
SFT_EXAMPLES = {"careful": (10, 100, 1000), "direct": (10, 100, 1000, 10000)}
BASELINE = "rates/base"
GRPO_WITH_MORE_EVALUATIONS = "exchange/grpo"


def sft_by_examples():
    title = "With careful solutions SFT ends near GRPO, with direct ones far below it"
    fig, (ax,) = new_figure(title, 4.8)
    handles = []
    for (kind, numbers), marker in zip(SFT_EXAMPLES.items(), "so", strict=True):
        color = color_of(f"sft/{kind}100")
        accuracies = [measures_on_test(f"sft/{kind}{number}") for number in numbers]
        ax.plot(numbers, [values.mean() for values in accuracies], color=color)
        for number, values in zip(numbers, accuracies, strict=True):
            x = plotter.spread_out(number, len(values), offset=0, is_log_scale=True)
            ax.plot(x, values, color=color, marker=marker, linestyle="")
        label = f"SFT on {kind} solutions: mean, and each seed"
        handles.append(Line2D([], [], color=color, marker=marker, label=label))
    baseline = measures_on_test(BASELINE)
    band = ax.axhspan(
        baseline.min(),
        baseline.max(),
        color=color_of(BASELINE),
        alpha=0.25,
        linewidth=0,
        label=f"GRPO, {name_of(BASELINE)}: lowest to highest seed",
    )
    (before,) = measures_on_test("dynamics/before")
    color = color_of("dynamics/before")
    line = ax.axhline(before, color=color, linestyle=":", label=name_of("dynamics/before"))
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set_xlabel("gold examples")
    ax.set_ylabel("strict accuracy on test")
    show_accuracy(ax.yaxis)
    add_legend(fig, [*handles, band, line])
    return fig


def exchange():
    title = "Few careful solutions are worth more iterations of GRPO than many direct ones"
    fig, (ax,) = new_figure(title, 6.2)
    show_accuracy(ax.yaxis)
    steps, answers = study_logs.answers_by_step(GRPO_WITH_MORE_EVALUATIONS)
    curves = answers.mean(2)  # (S, E)
    style = {"color": color_of(GRPO_WITH_MORE_EVALUATIONS), "linewidth": 2.5}
    name = f"GRPO, {name_of(GRPO_WITH_MORE_EVALUATIONS)}: mean and range of seeds"
    draw_mean_with_range(ax, steps, curves, style | {"label": name})
    for kind, numbers in SFT_EXAMPLES.items():
        for number in reversed(numbers):
            side = f"sft/{kind}{number}"
            exchange_of_side = differences.exchange_for_grpo(side, GRPO_WITH_MORE_EVALUATIONS)
            draw_exchange(ax, side, exchange_of_side, steps)
    ax.set_xlim(0, steps[-1])
    ax.set_xlabel("iteration of GRPO")
    ax.set_ylabel("strict accuracy on validation")
    add_legend(fig, ax.get_legend_handles_labels()[0])
    return fig


def draw_exchange(ax, side, exchange_of_side, steps):
    """Draw an arrow from a side's accuracy to GRPO's curve, and down to the iteration.

    If GRPO never gets there, a dashed line goes through the panel. If it is higher at its first
    evaluation already, a triangle stands at the accuracy and no arrow goes down.
    """
    color = color_of(side)
    name = name_of(side)
    level = exchange_of_side.accuracy
    iteration = exchange_of_side.iteration
    if iteration == np.inf:
        label = f"{name}: not within {steps[-1]} iterations"
        ax.plot([0, steps[-1]], [level, level], color=color, linestyle="--", label=label)
    elif iteration <= steps[1]:
        label = f"{name}: fewer than {steps[1]} iterations"
        ax.plot([0], [level], ">", color=color, markersize=8, clip_on=False, zorder=4, label=label)
    else:
        label = f"{name}: {iteration:.0f} iterations"
        ax.plot([0, iteration], [level, level], color=color, linewidth=2, label=label)
        arrow = {"arrowstyle": "-|>", "color": color, "linewidth": 2, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", (iteration, ax.get_ylim()[0]), (iteration, level), arrowprops=arrow)


# --- Expert iteration -----------------------------------------------------------------------------

EXPERT_ITERATION = (
    "expert_iteration/questions96_group8_epochs4",
    "expert_iteration/questions192_group4_epochs4",
    "expert_iteration/questions512_group8_epochs4",
    "expert_iteration/questions96_group8_epochs1",
)
# The markers of these sides. Two of them have nearly the same curve. So one of the two is drawn
# last, with open markers and a broken line.
EXPERT_ITERATION_MARKERS = (
    {"marker": "o"},
    {"marker": "^"},
    {"marker": "D"},
    {"marker": "s", "markersize": 8, "fillstyle": "none", "linestyle": "--"},
)
# So many iterations of GRPO, of 8 prompts x 8, have as many samples as one expert iteration of 96
# questions x 8.
GRPO_ITERATIONS = 12


def expert_iterations():
    title = "Five rounds of expert iteration end below GRPO, even with five times the samples"
    fig, panels = accuracy_and_careful_steps(title, 5.2)
    for key, ax in panels.items():
        for side, markers in zip(EXPERT_ITERATION, EXPERT_ITERATION_MARKERS, strict=True):
            style = {"color": color_of(side), "label": name_of(side)} | markers
            finished, values = measures_by_expert_iteration(side, key)
            draw_mean_with_range(ax, finished, values, style)
        style = {"color": color_of(BASELINE), "label": f"GRPO, {name_of(BASELINE)}"}
        steps, values = measures_by_step(GRPO_WITH_MORE_EVALUATIONS, key)
        draw_mean_with_range(ax, np.array(steps) / GRPO_ITERATIONS, values, style)
        _, values = measures_by_step("filtered/right", key)
        after_sft = values[:, -1].mean()
        sft_label = f"{name_of('filtered/right')}, at its end"
        ax.axhline(after_sft, color="black", linestyle=":", label=sft_label)
        ax.set_xlabel("rounds of expert iteration,\nor dozens of iterations of GRPO")
    add_legend(fig, panels["strict"].get_legend_handles_labels()[0], num_columns=2)
    return fig


def measures_by_expert_iteration(side, key):
    """The numbers of finished expert iterations, and a measure on validation: (E,), (S, E)."""
    summaries_of_seeds = [study_logs.summaries_by_expert_iteration(run) for run in runs_of(side)]
    values = []
    for summaries in summaries_of_seeds:
        values.append([study_logs.measure(summary, key) for summary in summaries.values()])
    return list(summaries_of_seeds[0]), np.array(values)


def entropy_of_samples():
    title = "Expert iteration makes the policy surer of its answers, as GRPO does"
    fig, (ax,) = new_figure(title, 4.8)
    for side, markers in zip(EXPERT_ITERATION, EXPERT_ITERATION_MARKERS, strict=True):
        entropies = np.array([entropies_before_training(run) for run in runs_of(side)])
        finished = range(entropies.shape[1])
        label = f"{name_of(side)}: right samples"
        style = {"color": color_of(side), "label": label} | markers
        draw_mean_with_range(ax, finished, entropies, style)
    logs = [study_logs.read(run / "train_log.jsonl") for run in runs_of(BASELINE)]
    entropies = np.array([[row["entropy"] for row in log] for log in logs])
    finished = np.arange(entropies.shape[1]) / GRPO_ITERATIONS
    label = f"GRPO, {name_of(BASELINE)}: all samples"
    style = {"color": color_of(BASELINE), "label": label}
    draw_mean_with_range(ax, finished, entropies, style)
    ax.set_xlabel("finished rounds, or dozens of iterations of GRPO")
    ax.set_ylabel("entropy (nats)")
    ax.set_ylim(bottom=0)
    add_legend(fig, ax.get_legend_handles_labels()[0])
    return fig


def entropies_before_training(run):
    """The entropy in the first update of each expert iteration.

    It is that of the policy that has sampled, at the tokens of the right samples in the update.
    """
    first_updates = {}
    for row in study_logs.read(run / "train_log.jsonl"):
        first_updates.setdefault(row["ei_step"], row)
    return [row["entropy"] for row in first_updates.values()]


def entropy_by_iteration():
    title = "Expert iteration in small rounds lowers entropy further than GRPO does"
    fig, (ax,) = new_figure(title, 4.4)
    folder = study_logs.STUDIES / "choices"
    keys = {"base": "entropy", "updates16": "entropy", "expert_iteration": "sample_entropy"}
    for name, key in keys.items():
        arm = outcomes.arm_at_its_best_rate(folder, name)
        medians = []
        for run in outcomes.runs_at_nearest_rate(folder, arm):
            rows = study_logs.training_rows(run, key)
            medians.append(smooth(np.array([row[key] for row in rows])))
        side = f"choices/{name}"
        iterations = np.arange(1, len(medians[0]) + 1)
        style = {"color": color_of(side), "label": name_of(side)}
        draw_mean_with_range(ax, iterations, np.array(medians), style)
    ax.set_xlabel("iteration, or round of expert iteration")
    ax.set_ylabel("entropy of all samples (nats)")
    ax.set_yscale("log")
    ticks = (0.02, 0.05, 0.1, 0.2)
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set_yticks([], minor=True)
    add_legend(fig, ax.get_legend_handles_labels()[0])
    return fig


# --- What training changes ------------------------------------------------------------------------

# {the model after training: (the model before, name)}
SIZES = {
    "scaling/0.1m": ("scaling/0.1m_before", "0.1m"),
    "scaling/0.3m": ("scaling/0.3m_before", "0.3m"),
    "dynamics/grpo": ("dynamics/before", "1m (the demo)"),
    "scaling/3m": ("scaling/3m_before", "3m"),
}
REWARDS = ("dynamics/grpo", "dynamics/format", "dynamics/random")
KS = (1, 2, 4, 8, 16)


def levels():
    title = "The larger models learn problems of all lengths, 0.3m only the shortest, 0.1m none"
    fig, panels = new_figure(title, 4.2, num_panels=2)
    for ax, panel_title in zip(panels, ("before training", "after training"), strict=True):
        ax.set_title(panel_title)
        ax.set_xticks(LEVELS)
        ax.set_xlabel("steps of the solution")
        show_accuracy(ax.yaxis)
    panels[0].set_ylabel("strict accuracy on test")
    for (after, (before, name)), marker in zip(SIZES.items(), "v^os", strict=True):
        style = {"color": color_of(after), "marker": marker, "label": name}
        draw_mean_with_range(panels[0], LEVELS, accuracies_by_level(before), style)
        draw_mean_with_range(panels[1], LEVELS, accuracies_by_level(after), style)
    add_legend(fig, panels[1].get_legend_handles_labels()[0], num_columns=4)
    return fig


def accuracies_by_level(side):
    """Strict accuracy on the test problems of each of LEVELS: (S, levels).

    Raises:
        ValueError: a run was evaluated on other problems.
    """
    examples = sorted(ArithmeticLoader.read("test"), key=lambda example: example["id"])
    level_of_question = np.array([example["level"] for example in examples])  # (Q,)
    checksum = checksum_of_questions(example["id"] for example in examples)
    accuracies = []
    for run in runs_of(side):
        summary = study_logs.summary_on_test(run)
        if summary["questions"] != checksum:
            raise ValueError(f"{run}: not evaluated on the test problems")
        is_right = correct_answers(summary)[:, 0]  # (Q,), sorted by id
        accuracies.append([is_right[level_of_question == level].mean() for level in LEVELS])
    return np.array(accuracies)


def careful_curves():
    title = "Careful steps, and with them accuracy, keep rising only with rewards for right answers"
    fig, panels = accuracy_and_careful_steps(title, 4.2)
    for key, ax in panels.items():
        for side, marker in zip(REWARDS, "os^", strict=True):
            steps, values = measures_by_step(side, key)
            style = {"color": color_of(side), "marker": marker, "label": name_of(side)}
            draw_mean_with_range(ax, steps, values, style)
        ax.set_xlabel("iteration")
    add_legend(fig, panels["strict"].get_legend_handles_labels()[0], num_columns=3)
    return fig


def measures_by_step(side, key):
    """The iterations at which a side was evaluated, and a measure on validation: (E,), (S, E)."""
    steps, _ = study_logs.answers_by_step(side)
    values = []
    for run in runs_of(side):
        summaries = study_logs.read_summaries(run / "answers.jsonl")
        values.append([study_logs.measure(summary, key) for summary in summaries])
    return steps, np.array(values)


def pass_at_k_figure():
    title = "In the required format, one sample after GRPO solves more than sixteen before"
    fig, (ax,) = new_figure(title, 4.2)
    for side, marker in (("dynamics/grpo", "o"), ("dynamics/pass_before", "s")):
        style = {"color": color_of(side), "marker": marker, "label": name_of(side)}
        draw_mean_with_range(ax, KS, chances_of_side(side), style)
    ax.set_xscale("log", base=2)
    ax.set_xticks(KS, [str(k) for k in KS])
    ax.set_xlabel("samples of each problem, k")
    ax.set_ylabel("pass@k, strict, on test")
    show_accuracy(ax.yaxis)
    add_legend(fig, ax.get_legend_handles_labels()[0], num_columns=2)
    return fig


def chances_of_side(side):
    """pass@k for each of KS: (S, ks)."""
    chances = []
    for run in runs_of(side):
        summary = study_logs.summary_on_test(run, "pass.jsonl")
        num_correct = correct_answers(summary).sum(1).tolist()  # for each question
        chances.append([pass_at_k(num_correct, summary["samples"], k) for k in KS])
    return np.array(chances)


# The models of `rare` by the share of careful steps in their samples before training, rising.
RARE_MODELS = (
    "drills0",
    "drills0.005",
    "drills0.02",
    "careful0",
    "drills0.12",
    "careful0.12",
    "careful0.3",
)


def rare(title):
    """Strict accuracy and the share of careful steps by iteration, with groups of 8."""
    fig, panels = accuracy_and_careful_steps(title, 5.6)
    for model in RARE_MODELS:
        side = f"rare/{model}_group8_rate2e-4"
        marker = "o" if model.startswith("careful") else "s"
        style = {"color": color_of(side), "marker": marker, "label": name_of(side)}
        for key, ax in panels.items():
            steps, values = measures_by_step(side, key)
            draw_mean_with_range(ax, steps, values, style)
            ax.set_xlabel("iteration")
    add_legend(fig, panels["strict"].get_legend_handles_labels()[0], num_columns=2)
    return fig


# The sides that are shown beside the line of entropy.py, and their marks.
BESIDE_THE_LINE = {
    "dynamics/grpo": "o",
    "choices/expert_iteration": "v",
    "choices/no_baseline": "D",
    "dynamics/format": "s",
    "dynamics/random": "^",
    "scaling/0.3m": "X",
}


def entropy_figure():
    title = "At their best rates, settings of GRPO share a curve of accuracy and entropy"
    fig, (ax,) = new_figure(title, 5.8)
    sides = entropy.sides_on_the_line()
    points = entropy.points_of_sides(sides)
    label = f"{len(sides)} settings of GRPO at their best rates"
    ax.plot(points.entropies, points.accuracies, "o", color="#F0C000", alpha=0.7, label=label)
    others = entropy.points_of_sides(entropy.sides_at_other_rates())
    label = "the same settings at their other learning rates"
    ax.plot(others.entropies, others.accuracies, "x", color="#BBBBBB", zorder=1, label=label)
    line = entropy.line_through_the_arms()
    ends = np.array([points.entropies.min(), points.entropies.max()])
    label = "line through the settings at their best rates"
    ax.plot(ends, line.accuracy_at(np.log2(ends)), color=GREY, label=label)
    for side, marker in BESIDE_THE_LINE.items():
        beside = entropy.means_over_seeds(entropy.runs_of(side))
        style = {"color": color_of(side), "marker": marker, "label": name_of(side)}
        ax.plot(beside.entropies, beside.accuracies, **style)
    ax.set_xscale("log")
    ax.invert_xaxis()  # training goes from the left to the right
    ticks = (0.2, 0.1, 0.05, 0.02)
    ax.set_xticks(ticks, map(str, ticks))
    ax.minorticks_off()
    ax.set_xlabel("entropy of the samples (nats for each token), falling")
    ax.set_ylabel("strict accuracy on validation")
    show_accuracy(ax.yaxis)
    add_legend(fig, ax.get_legend_handles_labels()[0], num_columns=2)
    return fig


# --- Without training -----------------------------------------------------------------------------

ZERO_SHOT = (
    "zero_shot/r1_zero_1m",
    "zero_shot/question_only_1m",
    "zero_shot/reasoning_answer_1m",
    "zero_shot/r1_zero_3m",
    "zero_shot/question_only_3m",
    "zero_shot/reasoning_answer_3m",
)
CATEGORY_COLORS = {
    "format1_answer1": "#0072B2",
    "format1_answer0": "#E69F00",
    "format0_answer0": "#BBBBBB",
}


def categories():
    title = (
        "Before training, most completions lack the required format, "
        "at either size and with any prompt"
    )
    fig, (ax,) = new_figure(title, 4.2)
    names = [name_of(side) for side in ZERO_SHOT]
    shares = []  # for each side
    for side in ZERO_SHOT:
        n, counts = study_logs.category_counts(side)
        shares.append(np.array(counts) / n)
    shares = np.array(shares)  # (sides, categories)
    left = np.zeros(len(ZERO_SHOT))
    for i, category in enumerate(CATEGORIES):
        name = study_logs.CATEGORY_NAMES[category]
        color = CATEGORY_COLORS[category]
        bars = ax.barh(names, shares[:, i], left=left, color=color, label=name)
        text_color = "white" if i == 0 else "black"
        labels = [f"{100 * share:.0f}%" for share in shares[:, i]]
        ax.bar_label(bars, labels, label_type="center", color=text_color)
        left += shares[:, i]
    ax.invert_yaxis()
    ax.grid(False)
    ax.set_xlabel("share of completions")
    show_accuracy(ax.xaxis)
    add_legend(fig, ax.get_legend_handles_labels()[0], num_columns=2)
    return fig


# --- The command ----------------------------------------------------------------------------------

FIGURES = {
    "forest": forest,
    "forest_choices": forest_choices,
    "response": response,
    "sft_by_examples": sft_by_examples,
    "exchange": exchange,
    "expert_iterations": expert_iterations,
    "entropy_of_samples": entropy_of_samples,
    "entropy_by_iteration": entropy_by_iteration,
    "levels": levels,
    "careful_curves": careful_curves,
    "pass_at_k": pass_at_k_figure,
    "rare": rare,
    "entropy": entropy_figure,
    "categories": categories,
}


def draw(name, *arguments):
    """The figure of that name. ValueError: there is none, or it takes other arguments."""
    if name not in FIGURES:
        raise ValueError(f"{name} is none of {', '.join(FIGURES)}")
    try:
        inspect.signature(FIGURES[name]).bind(*arguments)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from None
    with matplotlib.rc_context(STYLE):
        return FIGURES[name](*arguments)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Draw one figure of the studies.")
    parser.error = lambda message: parser.exit(2, f"error: {message} (--help lists every flag)\n")
    add = parser.add_argument
    add("name", help=f"which figure: {', '.join(FIGURES)}")
    add(
        "arguments",
        nargs="*",
        help="of `forest` the studies, of `response` a title and arms, of `rare` a title",
    )
    add("--output", type=Path, required=True, help="the file to write, FILE.png")
    args = parser.parse_args(argv)
    try:
        plotter.check_output(args.output)
        figure = draw(args.name, *args.arguments)
        with matplotlib.rc_context(STYLE):
            plotter.save([figure], args.output, dpi=DPI)
    except (ValueError, OSError, LookupError) as error:
        print(f"error: {error} (the head of figures.py lists the figures)", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    try:
        archive.unpack_all()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(main())
