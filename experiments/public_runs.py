"""What other people measured on real models: their numbers pooled, as tables and a figure.

experiments/public/README.md says what each table shows. experiments/report.py writes them.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from scipy import stats

import plotter
from experiments import kept_runs, real_model
from experiments.report_choices import CHOICES, choices_over_the_run
from experiments.report_style import rate_text
from logs import markdown

PUBLIC_RUNS = Path(__file__).resolve().parent / "public" / "runs.jsonl"
CHANGE_THAT_MATTERS = 5  # points: two methods whose intervals lie within this are called equal

# Mean and interval of a difference in points, None if it was not measured.
Estimate = tuple[float, float, float] | None


@dataclass(frozen=True)
class Question:
    """A comparison of two settings, whose difference is a - b in points of accuracy.

    Args:
        text: "a - b".
        rows: which comparisons of runs.jsonl answer it, as a query of pandas.
        ours: the two arms of our toy world that answer it, STUDY/ARM each.
        real_model: returns mean and interval with the model of 135 million parameters.
        remark: what the table adds to the verdict on accuracy.
    """

    text: str
    rows: str
    ours: tuple[str, str] | None = None
    real_model: Callable[[], Estimate] = lambda: None
    remark: str = ""

    @property
    def toy(self) -> Estimate:
        """Mean and interval of the same difference in our toy world."""
        return difference_in_toy_world(*self.ours) if self.ours else None


@cache
def difference_in_toy_world(a: str, b: str) -> tuple[float, float, float]:
    """Mean and interval of a - b, two arms of our studies, STUDY/ARM each."""
    study, arm = a.split("/")
    reference_study, reference = b.split("/")
    if study == "choices":
        pairs = [(choice.arm, choice.reference) for choice in CHOICES]
        found = choices_over_the_run()[pairs.index((arm, reference))]
    else:
        found = kept_runs.difference(
            kept_runs.accuracy_by_seed(study, arm),
            kept_runs.accuracy_by_seed(reference_study, reference),
        )
    return found.mean, found.low, found.high


# All eight runs of ours without the clip or without a ratio ended well.
CLIP_REMARK = "; by collapses: no"
QUESTIONS = (
    Question(
        "raw rewards - group mean subtracted",
        "question == 'baseline'",
        ("choices/no_baseline", "choices/base"),
        real_model.raw_rewards_difference,
    ),
    Question(
        "not divided by the std - divided", "question == 'std'", ("choices/no_std", "choices/base")
    ),
    Question(
        "fixed length - own length",
        "question == 'length'",
        ("choices/masked_normalize", "choices/base"),
    ),
    Question(
        "mean over all tokens - own length",
        "question == 'token mean'",
        ("choices/token_mean", "choices/base"),
    ),
    Question("Dr. GRPO - GRPO", "question == 'Dr. GRPO'", ("choices/dr_grpo", "choices/base")),
    Question("MaxRL - GRPO", "question == 'MaxRL'"),
    Question(
        "2 to 4 updates - one, to step 79",
        "question == 'updates' and 2 <= updates <= 4 and step < 80",
        ("choices/updates4", "choices/base"),
    ),
    Question(
        "2 to 4 updates - one, later", "question == 'updates' and 2 <= updates <= 4 and step >= 80"
    ),
    Question("6 to 8 updates - one", "question == 'updates' and 6 <= updates <= 8"),
    Question(
        "12 to 16 updates - one",
        "question == 'updates' and 12 <= updates <= 16",
        ("choices/updates16", "choices/base"),
    ),
    Question("24 to 48 updates - one", "question == 'updates' and updates >= 24"),
    Question("no clip - clip, one update (equal gradients)", "question == 'clip' and updates == 1"),
    Question(
        "no clip - clip, 2 to 6 updates",
        "question == 'clip' and a == 'no clip' and 2 <= updates <= 6",
    ),
    Question(
        "no clip - clip, 32 updates",
        "question == 'clip' and a == 'no clip' and updates == 32",
        ("choices/updates16_no_clip", "choices/updates16"),
        remark=CLIP_REMARK,
    ),
    Question(
        "no ratio - clip, 32 updates",
        "question == 'clip' and a == 'no ratio' and updates == 32",
        ("choices/updates16_reinforce", "choices/updates16"),
        remark=CLIP_REMARK,
    ),
    Question(
        "GSPO - clip, 32 updates",
        "question == 'GSPO'",
        ("choices/updates16_gspo", "choices/updates16"),
    ),
    Question(
        "question_only - r1_zero, before training (Qwen)",
        "question == 'prompt before training' and family == 'Qwen2.5-Math-1.5B'",
    ),
    Question(
        "question_only - r1_zero, trained (Qwen)",
        "question == 'prompt' and family == 'Qwen2.5-Math-1.5B'",
        ("choices/question_only", "choices/r1_zero"),
    ),
    Question(
        "question_only - r1_zero, trained (OLMo)",
        "question == 'prompt' and family == 'OLMo-2-1B'",
        ("choices/question_only", "choices/r1_zero"),
    ),
    Question(
        "expert iteration, large rounds - GRPO",
        "question == 'expert iteration'",
        ("expert_iteration/questions96_group8_epochs4", "rates/base"),
    ),
    Question(
        "GRPO after SFT - GRPO",
        "question == 'SFT start'",
        ("sft_then_grpo/direct1000", "rates/base"),
    ),
    Question(
        "SFT on right solutions - on all",
        "question == 'SFT filter'",
        ("filtered/right", "filtered/all"),
    ),
)


def family_of(model: str) -> str:
    if model.startswith("Qwen2.5-Math-1.5B"):
        return "Qwen2.5-Math-1.5B"
    return "OLMo-2-1B" if model.startswith("OLMo-2-0425-1B") else "another model"


@cache
def read_public_runs() -> pd.DataFrame:
    """A row for each comparison, set of equal runs, learning rate or model before training."""
    runs = pd.read_json(PUBLIC_RUNS, lines=True, precise_float=True)
    runs["family"] = runs["model"].map(family_of)
    return runs


# ---- pooling


def without_collapsed(accuracies: list[float], num_collapsed: int) -> list[float]:
    """The runs of an arm without its collapsed ones, which are always the lowest."""
    return sorted(accuracies)[int(num_collapsed) :]


def differences_by_source(pairs: pd.DataFrame, count_collapsed: bool = True) -> pd.Series:
    """The difference a - b in points for each source, the mean over its pairs.

    Without the collapsed runs, a pair of which one arm has no run left drops out.
    """
    differences = []
    for pair in pairs.itertuples():
        a = without_collapsed(pair.accuracies_a, 0 if count_collapsed else pair.collapsed_a)
        b = without_collapsed(pair.accuracies_b, 0 if count_collapsed else pair.collapsed_b)
        differences.append(100 * (np.mean(a) - np.mean(b)) if a and b else np.nan)
    series = pd.Series(differences, index=pairs["source"], dtype=float).dropna()
    return series.groupby(level=0).mean()


def interval_of_median(values: pd.Series) -> tuple[float, float] | None:
    """The interval between two ordered values that holds the median with at least 95%.

    None with fewer than six values, of which even the whole range does not.
    """
    low, high = stats.quantile_test(values).confidence_interval(0.95)
    return None if np.isnan(low) else (low, high)


def count_runs(pairs: pd.DataFrame, arm: str) -> tuple[int, int]:
    """How many runs of an arm collapsed, and how many there are.

    A run may serve several pairs of a source, and is counted once.
    """
    num_collapsed = num_runs = 0
    for _, pairs_of_source in pairs.groupby("source"):
        collapsed = Counter()
        runs = Counter()
        columns = zip(
            pairs_of_source[f"accuracies_{arm}"], pairs_of_source[f"collapsed_{arm}"], strict=True
        )
        for accuracies, count in columns:
            runs |= Counter(accuracies)
            collapsed |= Counter(sorted(accuracies)[: int(count)])
        num_collapsed += collapsed.total()
        num_runs += runs.total()
    return num_collapsed, num_runs


@dataclass(frozen=True)
class Pool:
    """What the good pairs of a question say together."""

    differences: pd.Series  # by source, in points
    without_collapsed: pd.Series
    with_weak: pd.Series
    interval: tuple[float, float] | None
    collapsed_a: tuple[int, int]  # runs that collapsed, all runs
    collapsed_b: tuple[int, int]
    pairs: pd.DataFrame

    @property
    def median(self) -> float:
        return self.differences.median()


def pool(runs: pd.DataFrame, question: Question) -> Pool:
    pairs = runs.query("kind == 'comparison'").query(question.rows)
    good = pairs.query("quality == 'good'")
    differences = differences_by_source(good)
    return Pool(
        differences=differences,
        without_collapsed=differences_by_source(good, count_collapsed=False),
        with_weak=differences_by_source(pairs),
        interval=interval_of_median(differences),
        collapsed_a=count_runs(good, "a"),
        collapsed_b=count_runs(good, "b"),
        pairs=good,
    )


def carries_over(pooled: Pool, toy: tuple[float, float, float] | None) -> str:
    """Does what the toy world found carry over? README.md of public/ states this rule."""
    if toy is None or pooled.interval is None:
        return "unclear"
    mean, *toy_interval = toy
    low, high = pooled.interval
    is_found = low > 0 or high < 0
    is_found_in_toy = min(toy_interval) > 0 or max(toy_interval) < 0
    if is_found and is_found_in_toy:
        return "yes" if mean * pooled.median > 0 else "no"
    if is_found_in_toy:
        return "unclear" if low <= mean <= high else "no, not of that size"
    if not is_found and max(-low, high) < CHANGE_THAT_MATTERS:
        return "none found in either"
    return "unclear"


# ---- noise: how far apart equal runs lie


def standard_deviation(sets: list[list[float]]) -> float:
    """The standard deviation within sets of equal runs, in points, weighted by what each tells."""
    sets = [runs for runs in sets if runs]
    squares = sum(len(runs) * np.var(runs) for runs in sets)
    return 100 * np.sqrt(squares / sum(len(runs) - 1 for runs in sets))


def seeds_for(difference: float, sd: float) -> int:
    """Seeds of each arm with which Student's test (two-sided, 5 %) finds a difference in 80 %."""
    for n in itertools.count(2):
        quantile = stats.t.ppf(0.975, 2 * n - 2)
        power = stats.nct.sf(quantile, 2 * n - 2, difference / (sd * np.sqrt(2 / n)))
        if power >= 0.8:
            return n


def difference_of_two_runs(sd: float) -> float:
    """What two equal single runs differ by at most in 95% of cases."""
    return stats.norm.ppf(0.975) * np.sqrt(2) * sd


@dataclass(frozen=True)
class Noise:
    num_runs: int
    num_collapsed: int
    num_late: int  # of the others, have less than half of the best one's accuracy
    sd: float  # of the others, in points
    within_two: float  # share of the runs of sets of three or more near the median of the others


def measure_noise(sets: pd.DataFrame) -> Noise:
    others = []
    num_late = 0
    near = []
    for equal in sets.itertuples():
        runs = without_collapsed(equal.accuracies_a, equal.collapsed_a)
        on_time = [accuracy for accuracy in runs if accuracy >= max(runs) / 2]
        others.append(on_time)
        num_late += len(runs) - len(on_time)
        if len(equal.accuracies_a) > 2 and on_time:
            middle = np.median(on_time)
            near += [round(abs(run - middle), 4) <= 0.02 for run in equal.accuracies_a]
    return Noise(
        num_runs=sets["accuracies_a"].map(len).sum(),
        num_collapsed=int(sets["collapsed_a"].sum()),
        num_late=num_late,
        sd=standard_deviation(others),
        within_two=float(np.mean(near)),
    )


def equal_runs(runs: pd.DataFrame, rows: str) -> pd.DataFrame:
    return runs.query("kind == 'equal runs' and quality == 'good'").query(rows)


# ---- tables


def points(value: float) -> str:
    return f"{value:+.1f}"


def interval(values: tuple[float, float] | None) -> str:
    return "-" if values is None else f"{values[0]:+.1f} to {values[1]:+.1f}"


def estimate(values: Estimate, otherwise: str) -> str:
    return otherwise if values is None else "{:+.1f} [{:.1f}, {:.1f}]".format(*values)


def ratio(counts: tuple[int, int]) -> str:
    return f"{counts[0]} of {counts[1]}"


def num_higher(differences: pd.Series) -> int:
    """In how many sources a is higher; less than 0.05 points is a tie."""
    return int((differences.round(1) > 0).sum())


def pooled_table() -> str:
    runs = read_public_runs()
    header = ["question (a - b)", "sources", "a is higher in", "median", "quartiles"]
    header += ["collapsed a; b", "toy world", "model of 135 M", "carries over?"]
    rows = []
    for question in QUESTIONS:
        pooled = pool(runs, question)
        rounded = pooled.differences.round(1)
        num_ties = (rounded == 0).sum()
        quartiles = tuple(pooled.differences.quantile([0.25, 0.75]))
        rows.append(
            [
                question.text,
                str(len(rounded)),
                str(num_higher(rounded)) + (f", {num_ties} tie" if num_ties else ""),
                points(pooled.median),
                interval(quartiles),
                f"{ratio(pooled.collapsed_a)}; {ratio(pooled.collapsed_b)}",
                estimate(question.toy, "not run"),
                estimate(question.real_model(), "not run"),
                carries_over(pooled, question.toy) + question.remark,
            ]
        )
    return markdown.table(header, rows)


def decided_table() -> str:
    """The questions with a verdict, in short."""
    runs = read_public_runs()
    header = ["question (a - b)", "projects", "a is higher in", "median", "here", "carries over?"]
    rows = []
    for question in decided_questions(runs):
        pooled = pool(runs, question)
        counts = [str(len(pooled.differences)), str(num_higher(pooled.differences))]
        cells = [points(pooled.median), estimate(question.toy, "not run")]
        rows.append([question.text, *counts, *cells, carries_over(pooled, question.toy)])
    return markdown.table(header, rows)


def decided_questions(runs: pd.DataFrame) -> list[Question]:
    """Those for which the projects say whether our answer carries over."""
    return [
        question
        for question in QUESTIONS
        if carries_over(pool(runs, question), question.toy) != "unclear"
    ]


def robustness_table() -> str:
    runs = read_public_runs()
    header = ["question (a - b)", "median", "95% interval"]
    header += ["without collapsed runs", "with weak pairs"]
    rows = []
    for question in QUESTIONS:
        pooled = pool(runs, question)
        cells = [question.text, points(pooled.median), interval(pooled.interval)]
        for values in (pooled.without_collapsed, pooled.with_weak):
            cells.append(f"{points(values.median())} ({num_higher(values)} of {len(values)})")
        rows.append(cells)
    return markdown.table(header, rows)


STARTS = {
    "step_class > 0": "all",
    "start_earns == 1": "earns reward",
    "start_earns == 0": "earns next to none",
}


def noise_table() -> str:
    runs = read_public_runs()
    header = ["start", "step", "sources", "runs", "collapsed", "late", "within 2 points", "sd"]
    header += ["two single runs", "seeds for 10", "for 5", "for 2 points"]
    rows = []
    for which, name in STARTS.items():
        for step in (50, 100, 200):
            sets = equal_runs(runs, f"{which} and step_class == {step}")
            noise = measure_noise(sets)
            rows.append(
                [
                    name,
                    f"{step} or last" if step == 200 else str(step),
                    str(sets["source"].nunique()),
                    str(noise.num_runs),
                    str(noise.num_collapsed),
                    str(noise.num_late),
                    f"{noise.within_two:.0%}",
                    f"{noise.sd:.1f}",
                    f"{difference_of_two_runs(noise.sd):.0f}",
                    *(str(seeds_for(difference, noise.sd)) for difference in (10, 5, 2)),
                ]
            )
    return markdown.table(header, rows)


def rates_table() -> str:
    rates = read_public_runs().query("kind == 'rates' and quality == 'good' and tuning == 'full'")
    rates = rates.assign(
        num_runs=rates["accuracies_a"].map(len), mean=100 * rates["accuracies_a"].map(np.mean)
    )
    rates["behind"] = rates.groupby("source")["mean"].transform("max") - rates["mean"]
    families = ("Qwen2.5-Math-1.5B", "OLMo-2-1B")
    header = ["`--learning_rate`"]
    for family in families:
        header += [f"{family}: sources", "collapsed", "points behind the best"]
    rows = []
    for rate, at_rate in rates.groupby("learning_rate"):
        cells = [rate_text(rate)]
        for family in families:
            same = at_rate[at_rate["family"] == family]
            counts = (int(same["collapsed_a"].sum()), same["num_runs"].sum())
            tried = [str(len(same)), ratio(counts), f"{same['behind'].median():.0f}"]
            cells += ["", "", ""] if same.empty else tried
        rows.append(cells)
    return markdown.table(header, rows)


TABLES = {
    "pooled": pooled_table,
    "robustness": robustness_table,
    "noise": noise_table,
    "rates": rates_table,
}


# ---- the figures

FAMILIES = {"Qwen2.5-Math-1.5B": 0, "OLMo-2-1B": 1, "another model": 2}  # the colour of each
TOY = {"color": "0.3", "marker": "D", "label": "our toy world, with its interval"}
REAL_MODEL = {"color": plotter.COLORS[4], "marker": "s", "label": "our model of 135 million"}
VERDICT_IN_FIGURE = {
    "yes": "yes",
    "none found in either": "none",
    "no": "no",
    "no, not of that size": "no",
    "unclear": "?",
}


CAPTION = (
    "Accuracy at the last step that both arms have, averaged over a project's pairs of runs. Grey"
    " bands hold 95% of the differences between two runs with the same settings."
)


def draw_decided_questions() -> tuple[Figure, str]:
    """Only the questions with a verdict, and the caption."""
    runs = read_public_runs()
    return draw_carries_over(runs, decided_questions(runs), height=5), (
        "*With Qwen, raw rewards and large rounds of expert iteration lose too; Dr. GRPO shows no"
        f" gain there, and filtering a smaller one. {CAPTION} Pink: SmolLM2 after 20 iterations,"
        " two seeds.*"
    )


def draw_all_questions() -> tuple[Figure, str]:
    runs = read_public_runs()
    return draw_carries_over(runs, QUESTIONS, height=10), (
        "*With Qwen, raw rewards and large rounds of expert iteration lose too; Dr. GRPO shows no"
        f" gain there, and most other differences are within the noise. {CAPTION} In the rows"
        ' of 32 updates, ours have 16. "None": no difference found, here or there.*'
    )


def draw_carries_over(runs: pd.DataFrame, questions: Sequence[Question], height: float) -> Figure:
    """A row for each question: a dot for each source, their median, and the toy world below."""
    fig = Figure(figsize=(9.5, height), layout="constrained")
    ax = fig.subplots()
    bands = {
        "step 50": (spread_of_two_runs(runs, 50), "0.94"),
        "step 200": (spread_of_two_runs(runs, 200), "0.87"),
    }
    for width, color in bands.values():
        ax.axvspan(-width, width, color=color, linewidth=0, zorder=0)
    ax.axvline(0, color="0.4", linewidth=0.8)
    for row, question in enumerate(questions):
        pooled = pool(runs, question)
        draw_sources(ax, row, pooled)
        draw_interval(ax, row + 0.2, question.toy, TOY)
        draw_interval(ax, row + 0.34, question.real_model(), REAL_MODEL)
        higher = f"{num_higher(pooled.differences)} of {len(pooled.differences)}"
        write_beside(ax, row, higher, VERDICT_IN_FIGURE[carries_over(pooled, question.toy)])
        ax.axhline(row + 0.5, color="0.85", linewidth=0.6)
    write_beside(ax, -0.85, "a is\nhigher in", "carries\nover?")
    format_axes(ax, questions)
    fig.legend(handles=legend_handles(bands), loc="outside lower center", ncols=2)
    return fig


def write_beside(ax, row: float, *cells: str) -> None:
    """Write two cells of text to the right of a row."""
    for cell, x in zip(cells, (1.015, 1.145), strict=True):
        ax.annotate(cell, (x, row), xycoords=("axes fraction", "data"), va="center")


def spread_of_two_runs(runs: pd.DataFrame, step: int) -> float:
    return difference_of_two_runs(measure_noise(equal_runs(runs, f"step_class == {step}")).sd)


def format_axes(ax, questions: Sequence[Question]) -> None:
    """Differences are linear up to 10 points and logarithmic beyond."""
    ax.set_xscale("symlog", linthresh=10, linscale=0.9)
    ticks = [-80, -40, -20, -10, -5, 0, 5, 10, 20, 40]
    ax.set_xticks(ticks, [f"{tick:+d}" if tick else "0" for tick in ticks])
    ax.set_xticks([], minor=True)
    ax.set_xlim(-100, 70)
    ax.set_xlabel(
        "b is better  ←  a - b in points of accuracy, logarithmic beyond 10  →  a is better"
    )
    ax.set_yticks(range(len(questions)), [question.text for question in questions])
    ax.set_ylim(len(questions) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")


def draw_sources(ax, row: int, pooled: Pool) -> None:
    collapsed = pooled.pairs.eval("collapsed_a + collapsed_b > 0").groupby(pooled.pairs["source"])
    has_collapsed = collapsed.any()
    families = pooled.pairs.groupby("source")["family"].first()
    for source, difference in pooled.differences.items():
        family = FAMILIES[families[source]]
        color = plotter.COLORS[family]
        ax.plot(
            difference,
            row - 0.2 + 0.12 * family,
            "o",
            markersize=5,
            color=color,
            markerfacecolor="none" if has_collapsed[source] else color,
            alpha=0.8,
        )
    ax.plot([pooled.median] * 2, [row - 0.36, row + 0.16], color="black", linewidth=2.5)


def draw_interval(ax, height: float, values, style: dict) -> None:
    if values is not None:
        mean, low, high = values
        ax.plot([low, high], [height, height], color=style["color"], linewidth=1.5)
        ax.plot(mean, height, color=style["color"], marker=style["marker"])


def legend_handles(bands: dict) -> list:
    dot = {"marker": "o", "linestyle": ""}
    handles = [
        Line2D([], [], **dot, color=plotter.COLORS[i], label=f"a project with {family}")
        for family, i in FAMILIES.items()
    ]
    open_dot = Line2D([], [], **dot, color="0.4", markerfacecolor="none")
    open_dot.set_label("open: a run of either arm collapsed")
    handles.append(open_dot)
    handles.append(Line2D([], [], color="black", linewidth=2.5, label="median of the projects"))
    handles.append(Line2D([], [], **TOY))
    handles.append(Line2D([], [], **REAL_MODEL))
    for when, (width, color) in bands.items():
        label = f"95% of pairs of runs with the same settings, {when}: {width:.0f} points"
        handles.append(Patch(color=color, label=label))
    return handles
