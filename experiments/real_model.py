"""The study of a real model: its kept logs as tables. experiments/report.py writes them.

experiments/real/README.md says what each table shows.
"""

import json
import math
import operator
import re
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments import archive, kept_runs
from experiments.kept_runs import by_seed
from experiments.report_style import (
    COLORS,
    draw_mean_and_range,
    label_lines,
    mean_and_range,
    new_figure,
)
from logs import jsonl, markdown

STUDY = Path(__file__).resolve().parent / "real"
STARTS = ("sft32", "sft128")
RATES = ("5e-6", "2e-5")  # of 1e-5 the last evaluation is missing


def last_evaluation(run: str) -> dict:
    """The last line of a run's eval_log.jsonl."""
    archive.unpack("real")
    return jsonl.read(STUDY / run / "eval_log.jsonl")[-1]


def answers(run: str) -> pd.DataFrame:
    """The answers of a run's last evaluation: id, completion, verdicts, reward and length."""
    return pd.DataFrame(jsonl.read(max((STUDY / run / "eval").glob("*.jsonl"))))


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

ARMS = {"grpo": "GRPO"}
SPAN = 10  # iterations


def draw_real_model() -> tuple[Figure, str]:
    """Greedy accuracy on validation, and accuracy and entropy of the samples in training."""
    evaluations = kept_runs.read("real", "eval_log.jsonl")
    training = kept_runs.read("real", "train_log.jsonl")
    titles = ["greedy, on validation", "samples in training", "entropy of samples"]
    figure, panels = new_figure(titles, (9, 2.9))
    greedy, samples, entropy = panels
    for arm, name in ARMS.items():
        color = COLORS[name]
        curves = {
            greedy: 100 * by_seed(evaluations, "accuracy", arm),
            samples: 100 * by_seed(training, "accuracy", arm).rolling(SPAN).mean().dropna(),
            entropy: by_seed(training, "entropy", arm).rolling(SPAN).mean().dropna(),
        }
        for ax, curve in curves.items():
            draw_mean_and_range(ax, curve, color, label=name)
    greedy.set(ylabel="accuracy (%)", ylim=(0, 25))
    samples.set(ylabel="accuracy (%)", ylim=(0, 25))
    entropy.set(ylabel="entropy (nats per token)", ylim=(0, None))
    for ax in panels:
        ax.set(xlabel="iteration")
        label_lines(ax)
    shares = 100 * by_seed(training, "accuracy", "grpo").mean(axis="columns")
    best_answers = 100 * by_seed(evaluations, "accuracy", "grpo").mean(axis="columns")
    return figure, (
        f"*With GRPO {shares.head(SPAN).mean():.1f}% of the samples are right in the first ten "
        f"iterations, {shares.loc[41:50].mean():.1f}% in 41 to 50 and "
        f"{shares.tail(SPAN).mean():.1f}% in the last ten; greedy accuracy is "
        f"{best_answers.iloc[0]:.1f}% before and {best_answers.iloc[-1]:.1f}% after. Lines are "
        "means over seeds, bands their range. (a) is of 300 validation problems. (b) and (c) are "
        "means of the last ten iterations, with 128 samples each.*"
    )


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
    """What greedy answers to the validation problems calculate, by iteration of GRPO."""
    archive.unpack("real")
    table = {}  # {measure: its cells}
    iterations = (0, 20, 40, 60)
    for iteration in iterations:
        paths = STUDY.glob(f"grpo_seed*/eval/step_{iteration:06d}.jsonl")
        completions = [row["completion"] for path in paths for row in jsonl.read(path)]
        of_answers = [calculations_in(completion) for completion in completions]
        several = np.mean([len(calculations) > 1 for calculations in of_answers])
        table.setdefault("answers with several calculations", []).append(percent(several))
        results = pd.DataFrame(sum(of_answers, []), columns=["sign", "is_right"])
        for sign in OPERATORS:
            is_right = results["is_right"][results["sign"] == sign]
            cell = f"{percent(len(is_right) / len(results))} ({percent(is_right.mean())})"
            table.setdefault(f"`{sign}`: share (right)", []).append(cell)
        table.setdefault("calculations that are right", []).append(
            percent(results["is_right"].mean())
        )
    header = ["measure", *(f"iteration {iteration}" for iteration in iterations)]
    return markdown.table(header, [[measure, *cells] for measure, cells in table.items()])
