"""The study of a real model: its kept logs as tables. experiments/report.py writes them.

experiments/real/README.md says what each table shows.
"""

import json
from pathlib import Path

import pandas as pd

from experiments import archive
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
