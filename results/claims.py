"""What the report says of Qwen's answers, counted anew from qwen_answers.jsonl.

    python results/claims.py            # a line for each claim: its name, its numbers, n
    python results/claims.py strict     # one

A comparison is paired by problem: before and after, how many gained and lost, the difference in
points with its 95% interval, and the exact p-value of McNemar's test.
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]

from controls import calculates

from evaluator import last_number, to_number
from plotter import mcnemar

BEFORE = "1.5B as it is, r1_zero"
AFTER = "1.5B after GRPO with LoRA for 10 iterations, r1_zero"
UNTRAINED = "as it is"
SFT = "after SFT on 128 solutions"


def read_answers() -> dict[str, dict[str, dict]]:
    """{model: {id of a GSM8K problem: answer}}."""
    answers = {}
    for line in (ROOT / "results/qwen_answers.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        if row["id"].startswith("gsm8k"):
            answers.setdefault(row["model"], {})[row["id"]] = row
    return answers


def is_strict(row: dict) -> bool:
    return row["correct_strict"]


def is_right_by_last_number(row: dict) -> bool:
    return to_number(last_number(row["completion"]) or "") == to_number(row["gold"])


def writes_calculation(row: dict) -> bool:
    return calculates(row["completion"])


def has_two_equations(row: dict) -> bool:
    return re.split("</reasoning>|</think>", row["completion"])[0].count("=") >= 2


def compare(before: dict, after: dict, verdict) -> str:
    """The paired comparison of two models' answers by a verdict."""
    ids = before.keys() & after.keys()
    n = len(ids)
    gained = sum(verdict(after[i]) and not verdict(before[i]) for i in ids)
    lost = sum(verdict(before[i]) and not verdict(after[i]) for i in ids)
    shares = [100 * sum(verdict(rows[i]) for i in ids) / n for rows in (before, after)]
    difference = (gained - lost) / n
    error = 1.96 * (((gained + lost) / n - difference**2) / n) ** 0.5
    low, high = 100 * (difference - error), 100 * (difference + error)
    return (
        f"{shares[0]:.1f}% -> {shares[1]:.1f}%, {gained} gained, {lost} lost,"
        f" {100 * difference:+.1f} [{low:.1f}, {high:.1f}],"
        f" p = {mcnemar(gained, lost):.1g}, n = {n}"
    )


def by_calculation(before: dict, after: dict) -> str:
    """Right answers by the last number, where the model began to calculate and elsewhere."""
    ids = before.keys() & after.keys()
    began = {i for i in ids if writes_calculation(after[i]) and not writes_calculation(before[i])}
    parts = []
    for name, group in (("began to calculate", began), ("all others", ids - began)):
        counts = [sum(is_right_by_last_number(rows[i]) for i in group) for rows in (before, after)]
        parts.append(f"{name}: {counts[0]} -> {counts[1]} right of {len(group)}")
    return "; ".join(parts)


def claims() -> dict[str, str]:
    answers = read_answers()
    lora = answers[BEFORE], answers[AFTER]
    sft = answers[UNTRAINED], answers[SFT]
    return {
        "strict": compare(*lora, is_strict),
        "last_number": compare(*lora, is_right_by_last_number),
        "calculates": compare(*lora, writes_calculation),
        "two_equations": compare(*lora, has_two_equations),
        "where_it_calculates": by_calculation(*lora),
        "sft_strict": compare(*sft, is_strict),
        "sft_last_number": compare(*sft, is_right_by_last_number),
    }


def main():
    parser = argparse.ArgumentParser(description="Count what the report says of Qwen's answers.")
    parser.add_argument("name", nargs="?", help="one claim alone")
    name = parser.parse_args().name
    try:
        lines = claims()
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"error: results/qwen_answers.jsonl lacks what a claim needs ({error!r})")
    if name and name not in lines:
        parser.error(f"no claim {name}: choose from {', '.join(lines)}")
    for key in [name] if name else lines:
        print(f"{key}: {lines[key]}")


if __name__ == "__main__":
    main()
