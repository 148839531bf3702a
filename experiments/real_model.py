"""The study of a real model: its kept logs as tables. experiments/report.py writes them.

experiments/real/README.md says what each table shows.
"""

import json
import math
import operator
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments import archive, kept_runs
from experiments.kept_runs import by_seed
from experiments.report_style import (
    COLORS,
    draw_mean_and_range,
    label_end,
    mean_and_range,
    new_figure,
)
from logs import jsonl, markdown

STUDY = Path(__file__).resolve().parent / "real"
STARTS = ("sft32", "sft128", "sft512")
RATES = ("5e-6", "1e-5", "2e-5")


def last_evaluation(run: str) -> dict:
    """The last line of a run's eval_log.jsonl."""
    archive.unpack("real")
    return jsonl.read(STUDY / run / "eval_log.jsonl")[-1]


def answers(run: str, step: int | None = None) -> pd.DataFrame:
    """The answers of an evaluation of a run, by default the last one.

    Columns: id, completion, verdicts, reward and length.
    """
    pattern = "*.jsonl" if step is None else f"step_{step:06d}.jsonl"
    return pd.DataFrame(jsonl.read(max((STUDY / run / "eval").glob(pattern))))


def flat_groups(run: str) -> float:
    """The share of problems whose answers all have the same reward."""
    rewards = answers(run).groupby("id")["reward"]
    return (rewards.max() == rewards.min()).mean()


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def checks_table() -> str:
    """The numbers of checks.py."""
    archive.unpack("real")
    checks = json.loads((STUDY / "checks.json").read_text("utf-8"))
    rows = []
    for name, value in checks.items():
        rows.append([name, f"{value:.5g}" if isinstance(value, float) else str(value)])
    return markdown.table(["check", "value"], rows)


def start_table() -> str:
    """Accuracy after SFT, greedy and sampled, by the number of solutions."""
    header = ["solutions", "seed", "greedy", "greedy, flexible", "in the format"]
    header += ["sampled", "pass@8", "flat groups"]
    rows = []
    for start in STARTS:
        for seed in (0, 1):
            greedy = last_evaluation(f"{start}_seed{seed}_greedy")
            sampled = last_evaluation(f"{start}_seed{seed}_sampled")
            shares = [
                greedy["accuracy"],
                greedy["accuracy_flexible"],
                1 - greedy["count/format0_answer0"] / greedy["n"],
                sampled["accuracy"],
                sampled["pass@8"],
                flat_groups(f"{start}_seed{seed}_sampled"),
            ]
            rows.append([start.removeprefix("sft"), str(seed), *map(percent, shares)])
    return markdown.table(header, rows)


def rates_table() -> str:
    """What twenty iterations of GRPO did at each learning rate."""
    header = ["rate", "accuracy of samples, 1 to 10", "11 to 20", "greedy before", "greedy after"]
    header += ["entropy, first and last five", "flat groups, last ten"]
    archive.unpack("real")
    rows = []
    for rate in RATES:
        run = f"rate{rate}_seed0"
        log = pd.DataFrame(jsonl.read(STUDY / run / "train_log.jsonl"))
        before, after = jsonl.read(STUDY / run / "eval_log.jsonl")
        entropy = log["entropy"]
        rows.append(
            [
                rate,
                percent(log["accuracy"][:10].mean()),
                percent(log["accuracy"][10:].mean()),
                percent(before["accuracy"]),
                percent(after["accuracy"]),
                f"{entropy[:5].mean():.2f}, {entropy[-5:].mean():.2f}",
                percent(log["zero_std_fraction"][10:].mean()),
            ]
        )
    return markdown.table(header, rows)


# --- GRPO -----------------------------------------------------------------------------------------

ARMS = {"grpo": "GRPO", "format": "format only"}
SPAN = 10  # iterations


DRAWN = {  # {arm: (name, colour, line style, how far above its line's end the name stands)}
    "grpo": ("GRPO at 2e-5", COLORS["GRPO"], "-", -9),
    "format": ("format only", COLORS["format only"], "-", 0),
    "slow": ("GRPO at 5e-6", COLORS["GRPO"], "--", 0),
}


def draw_real_model() -> tuple[Figure, str]:
    """Greedy accuracy on validation; accuracy, length and entropy of the samples in training."""
    evaluations = kept_runs.read("real", "eval_log.jsonl")
    training = kept_runs.read("real", "train_log.jsonl")
    titles = ["greedy, on validation", "samples in training", "length of samples"]
    figure, panels = new_figure([*titles, "entropy of samples"], (9, 5.6), num_rows=2)
    greedy, samples, length, entropy = panels
    starts = {}
    ends = {}
    for arm, (name, color, linestyle, above) in DRAWN.items():
        curves = {
            greedy: 100 * by_seed(evaluations, "accuracy", arm),
            samples: 100 * mean_of_last(by_seed(training, "accuracy", arm)),
            length: mean_of_last(by_seed(training, "response_length", arm)),
        }
        if arm != "format":
            curves[entropy] = mean_of_last(by_seed(training, "entropy", arm))
        for ax, curve in curves.items():
            draw_mean_and_range(ax, curve, color, linestyle=linestyle)
            label_end(ax, curve.mean(axis="columns"), name, color, above)
        mean = curves[greedy].mean(axis="columns")
        starts[arm] = f"{mean.iloc[0]:.1f}%"
        ends[arm] = f"{mean.iloc[-1]:.1f}%"
    greedy.set(ylabel="accuracy (%)", ylim=(0, 36))
    samples.set(ylabel="accuracy (%)", ylim=(0, 36))
    length.set(ylabel="length (tokens)", ylim=(0, 40))
    entropy.set(ylabel="entropy (nats per token)", ylim=(0, None))
    for ax in panels:
        ax.set(xlabel="iteration", xlim=(0, 310), xticks=range(0, 241, 60))
    return figure, (
        f"*In 60 iterations greedy accuracy on validation goes from {starts['grpo']} to "
        f"{ends['grpo']} with GRPO and to {ends['format']} with a reward for the format alone; "
        f"in 240 at a lower rate it goes from {starts['slow']} to {ends['slow']}. Lines are means "
        "over seeds (three of GRPO at 2e-5, two of the others), bands their range. (b) to (d) are "
        "running means of ten iterations. (d) leaves out groups with equal rewards; with the "
        "format alone too few remain.*"
    )


def mean_of_last(curves: pd.DataFrame) -> pd.DataFrame:
    """Means of the last SPAN iterations, from the first SPAN on."""
    return curves.rolling(SPAN).mean().iloc[SPAN - 1 :]


MEASURES = {  # {name: (column of train_log.jsonl, factor, decimals)}
    "samples that are right (%)": ("accuracy", 100, 1),
    "flat groups (%)": ("zero_std_fraction", 100, 0),
    "entropy (nats per token)": ("entropy", 1, 2),
    "length (tokens)": ("response_length", 1, 0),
}


def training_table() -> str:
    """What was measured in each ten iterations of training, and greedy accuracy after them."""
    training = kept_runs.read("real", "train_log.jsonl")
    evaluations = kept_runs.read("real", "eval_log.jsonl")
    ends = range(SPAN, int(by_seed(training, "step", "grpo").index.max()) + 1, SPAN)
    header = ["measure", "reward", "before", *(f"{end - SPAN + 1} to {end}" for end in ends)]
    rows = []
    for measure, (column, factor, decimals) in MEASURES.items():
        for arm, name in ARMS.items():
            if (arm, column) == ("format", "entropy"):
                continue  # it is that of groups with different rewards, of which there are few
            curves = factor * by_seed(training, column, arm)
            spans = [curves.loc[end - SPAN + 1 : end].mean() for end in ends]
            rows.append([measure, name, "", *(mean_and_range(span, decimals) for span in spans)])
    for arm, name in ARMS.items():
        greedy = 100 * by_seed(evaluations, "accuracy", arm)
        cells = [mean_and_range(greedy.loc[i]) if i in greedy.index else "" for i in (0, *ends)]
        rows.append(["greedy, on validation (%)", name, *cells])
    return markdown.table(header, rows)


OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
NUMBER = r"-?\d+(?:\.\d+)?"
CALCULATION = re.compile(rf"^({NUMBER}) ([-+*/]) ({NUMBER}) = ({NUMBER})$", re.MULTILINE)


def calculations_in(completion: str) -> list[tuple[str, bool]]:
    """The operator of each calculation on a line of its own, and whether its result is right."""
    calculations = []
    for first, sign, second, result in CALCULATION.findall(completion):
        divides_by_zero = sign == "/" and float(second) == 0
        is_right = not divides_by_zero and math.isclose(
            OPERATORS[sign](float(first), float(second)), float(result), abs_tol=0.01
        )
        calculations.append((sign, is_right))
    return calculations


def calculations_table() -> str:
    """What greedy answers to the validation problems calculate, by reward and iteration."""
    archive.unpack("real")
    iterations = (0, 20, 40, 60)
    rows = []
    for arm, name in ARMS.items():
        shares = [percent(share_without_calculation(arm, i)) for i in iterations]
        rows.append(["answers without a calculation", name, *shares])
    columns = [calculations_at("grpo", iteration) for iteration in iterations]
    for measure in columns[0]:
        rows.append([measure, ARMS["grpo"], *(column[measure] for column in columns)])
    header = ["measure", "reward", *(f"iteration {iteration}" for iteration in iterations)]
    return markdown.table(header, rows)


def answers_at(arm: str, iteration: int) -> pd.DataFrame:
    """The greedy answers of all seeds of an arm."""
    paths = sorted(STUDY.glob(f"{arm}_seed?/eval/step_{iteration:06d}.jsonl"))
    return pd.DataFrame([row for path in paths for row in jsonl.read(path)])


def share_without_calculation(arm: str, iteration: int) -> float:
    return 1 - answers_at(arm, iteration)["completion"].str.contains("=").mean()


def calculations_at(arm: str, iteration: int) -> dict[str, str]:
    """{measure: its cell} of the greedy answers of all seeds of an arm."""
    table = answers_at(arm, iteration)
    calculations = table["completion"].map(calculations_in)
    several = table["correct_strict"][calculations.map(len) > 1]
    share = percent(len(several) / len(table))
    cells = {
        "answers with several": f"{share} ({percent(several.mean())})" if len(several) else share
    }
    results = pd.DataFrame(calculations.sum(), columns=["sign", "is_right"])
    for sign in OPERATORS:
        is_right = results["is_right"][results["sign"] == sign]
        share = percent(len(is_right) / len(results))
        cells[f"`{sign}`: share (right)"] = f"{share} ({percent(is_right.mean())})"
    cells["calculations that are right"] = percent(results["is_right"].mean())
    return cells


TAG = re.compile(r"</?(?:reasoning|answer)>")


def rollouts_table() -> str:
    """The first five samples that the log of the first run has of some iterations."""
    archive.unpack("real")
    columns = []
    for iteration in (1, 20, 40, 60):
        samples = jsonl.read(STUDY / "grpo_seed1" / "rollouts" / f"step_{iteration:06d}.jsonl")
        columns.append([one_line(sample["completion"]) for sample in samples[:5]])
    header = ["before", "iteration 20", "iteration 40", "iteration 60"]
    return markdown.table(header, [list(row) for row in zip(*columns, strict=True)])


def one_line(completion: str) -> str:
    """A completion without tags and line breaks, as code in a table."""
    lines = TAG.sub("", completion).split("\n")
    return "`" + "; ".join(line for line in lines if line) + "`"


# --- On test --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A trained model: its runs, and the run that it began from."""

    name: str
    runs: tuple[str, ...]
    start: str = "sft128_seed0"


def runs_of(arm: str, *seeds: int) -> tuple[str, ...]:
    return tuple(f"{arm}_seed{seed}" for seed in seeds)


PLANNED = (
    Model("GRPO, 60 iterations at 2e-5", runs_of("grpo", 1, 2, 3)),
    Model("the format alone", runs_of("format", 1, 2)),
    Model("SFT, 60 more updates", ("more_sft_seed2",)),
)
# These were evaluated on a GPU, and so was the model that they began from.
ON_A_GPU = (
    Model("GRPO again, on a GPU", runs_of("grpo_gpu", 1, 2, 3), "sft128_seed0_gpu"),
    Model("GRPO, 240 iterations at 5e-6", runs_of("slow", 1, 2), "sft128_seed0_gpu"),
    Model("GRPO from 512 solutions, 240 at 1e-5", runs_of("strong", 1, 2), "sft512_seed0"),
    Model("GRPO on GSM8K", ("gsm8k_seed1",), "sft128_seed0_gsm8k"),
)
NUM_DRAWS = 10_000


def verdicts(run: str, kind: str, step: int | None = None) -> pd.Series:
    """Whether each problem was answered rightly, in per cent, by id; kind: strict or flexible."""
    return 100 * answers(run, step).set_index("id")[f"correct_{kind}"].astype(float)


def gain_interval(gains: np.ndarray) -> tuple[float, float]:
    """95% interval of a mean gain: percentiles of a bootstrap over seeds and problems.

    Args:
        gains: (seeds, problems).
    """
    generator = np.random.default_rng(0)
    num_seeds, num_problems = gains.shape
    # How often each seed and each problem is drawn, (draws, seeds) and (draws, problems).
    seeds = generator.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), NUM_DRAWS)
    problems = generator.multinomial(
        num_problems, np.full(num_problems, 1 / num_problems), NUM_DRAWS
    )
    means = ((seeds @ gains) * problems).sum(axis=1) / gains.size
    low, high = np.percentile(means, [2.5, 97.5])
    return low, high


def gains_table() -> str:
    """Accuracy on test of each model, and its gain over the model that it began from."""
    archive.unpack("real")
    header = ["model, on test", "answers", "start (%)", "end (%)", "gain", "gain, flexible"]
    rows = []
    for model in (*PLANNED, *ON_A_GPU):
        for decoding, suffix in (("greedy", "test"), ("sampled", "test_sampled")):
            before, after, gain = gain_of(model, suffix, "strict")
            _, _, flexible_gain = gain_of(model, suffix, "flexible")
            rows.append([model.name, decoding, before, after, gain, flexible_gain])
    return markdown.table(header, rows)


def short_gains_table() -> str:
    """The same for strict accuracy alone, a row for each model."""
    archive.unpack("real")
    rows = []
    for model in (*PLANNED, *ON_A_GPU):
        row = [model.name, str(len(model.runs))]
        for suffix in ("test", "test_sampled"):
            before, after, gain = gain_of(model, suffix, "strict")
            row += [f"{before} → {after}", gain]
        rows.append(row)
    header = ["model", "seeds", "greedy, test (%)", "gain", "samples, test (%)", "their gain"]
    return markdown.table(header, rows)


def gain_of(model: Model, suffix: str, kind: str) -> tuple[str, str, str]:
    """Accuracy before and after training, and the gain with its interval, as texts."""
    before = verdicts(f"{model.start}_{suffix}", kind)
    after = pd.DataFrame({run: verdicts(f"{run}_{suffix}", kind) for run in model.runs})
    gains = after.sub(before, axis="index").T.to_numpy()  # (seeds, problems)
    low, high = gain_interval(gains)
    gain = f"{gains.mean():+z.1f} [{low:z.1f}, {high:z.1f}]"
    return f"{before.mean():.1f}", mean_and_range(after.mean()), gain


# --- What else was asked --------------------------------------------------------------------------


def pass_at_k_table() -> str:
    """pass@k of 100 validation problems before and after GRPO, strict and flexible."""
    ks = (1, 2, 4, 8, 16, 32)
    models = {"start": ("sft128_seed0",), "GRPO": runs_of("grpo", 1, 2, 3)}
    archive.unpack("real")
    rows = []
    for name, runs in models.items():
        evaluations = pd.DataFrame([last_evaluation(f"{run}_pass_at_k") for run in runs])
        for kind, key in (("strict", "pass@{}"), ("flexible", "pass_flexible@{}")):
            cells = [mean_and_range(100 * evaluations[key.format(k)]) for k in ks]
            rows.append([name, kind, *cells])
    return markdown.table(["model", "answers", *(f"k = {k}" for k in ks)], rows)


LONGER = {"slow": "128 solutions, 5e-6", "strong": "512 solutions, 1e-5"}


def longer_table() -> str:
    """Samples in training and greedy answers to validation problems in the longer runs."""
    training = kept_runs.read("real", "train_log.jsonl")
    evaluations = kept_runs.read("real", "eval_log.jsonl")
    span = 40  # iterations from one evaluation to the next
    ends = range(span, int(by_seed(training, "step", "slow").index.max()) + 1, span)
    rows = []
    for arm, name in LONGER.items():
        greedy = 100 * by_seed(evaluations, "accuracy", arm)
        right = [calculations_at(arm, end)["calculations that are right"] for end in (0, *ends)]
        cells = [mean_and_range(seeds) for _, seeds in greedy.iterrows()]
        rows.append(["greedy, on validation (%)", name, *cells])
        rows.append(["their calculations that are right (%)", name, *right])
        for measure in ("samples that are right (%)", "entropy (nats per token)"):
            column, factor, decimals = MEASURES[measure]
            curves = factor * by_seed(training, column, arm)
            spans = [curves.loc[end - span + 1 : end].mean() for end in ends]
            cells = [mean_and_range(values, decimals) for values in spans]
            rows.append([measure, name, "", *cells])
    header = ["measure", "start and rate", "iteration 0", *(f"to {end}" for end in ends)]
    return markdown.table(header, rows)


def raw_rewards_difference() -> tuple[float, float, float]:
    """Raw rewards minus advantages after 20 iterations, greedy on validation, with the interval."""
    archive.unpack("real")
    differences = []
    for seed in (1, 2):
        raw = verdicts(f"raw_rewards_seed{seed}", "strict", step=20)
        usual = verdicts(f"grpo_gpu_seed{seed}", "strict", step=20)
        differences.append(raw - usual)
    differences = np.stack(differences)  # (seeds, problems)
    return differences.mean(), *gain_interval(differences)


def raw_rewards_table() -> str:
    """Thirty iterations with advantages and with raw rewards."""
    training = kept_runs.read("real", "train_log.jsonl")
    evaluations = kept_runs.read("real", "eval_log.jsonl")
    arms = {"grpo_gpu": "advantages", "raw_rewards": "raw rewards"}
    header = ["the loss weights tokens by", "samples right, 1 to 10", "11 to 20", "21 to 30"]
    header += ["greedy, at 0", "at 20", "without a calculation, at 20"]
    rows = []
    for arm, name in arms.items():
        samples = 100 * by_seed(training, "accuracy", arm)
        greedy = 100 * by_seed(evaluations, "accuracy", arm)
        spans = [samples.loc[end - SPAN + 1 : end].mean() for end in (10, 20, 30)]
        cells = [*spans, greedy.loc[0], greedy.loc[20]]
        has_none = percent(share_without_calculation(arm, 20))
        rows.append([name, *map(mean_and_range, cells), has_none])
    return markdown.table(header, rows)
