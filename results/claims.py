"""What the report says of Qwen's answers, counted anew from the answers that are kept.

    python results/claims.py               # a line for each claim: its name, its numbers, n
    python results/claims.py sheet_strict  # one

A comparison is paired by problem: before and after, how many gained and lost, the difference in
points with its 95% interval, and the exact p-value of McNemar's test.
"""

import argparse
import gzip
import json
import re
import sys
from functools import cache
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]

from controls import calculates

from evaluator import GSM8kEvaluator, MathEvaluator, last_number, strict_format, to_number
from plotter import mcnemar

BEFORE = "1.5B as it is, r1_zero"
AFTER = "1.5B after GRPO with LoRA for 10 iterations, r1_zero"
UNTRAINED = "as it is"
SFT = "after SFT on 128 solutions"
OWN = "after SFT on 27 of its own answers"
RUNS = {
    "sheet": ("1.5B", "sheet"),
    "form": ("1.5B", "format_only"),
    "answer": ("1.5B", "math"),
    "calculation": ("1.5B", "calculation"),
    "random": ("1.5B", "random_reward"),
    "small_sheet": ("0.5B", "sheet"),  # after SFT on 128 solutions
    "small_answer": ("0.5B", "math"),
}


@cache
def read_rows(name: str) -> list[dict]:
    data = (ROOT / "results" / name).read_bytes()
    if name.endswith(".gz"):
        data = gzip.decompress(data)
    return [json.loads(line) for line in data.decode("utf-8").splitlines()]


def read_answers() -> dict[str, dict[str, dict]]:
    """{model: {id of a GSM8K problem: answer}} of the older study."""
    answers = {}
    for row in read_rows("qwen_answers.jsonl"):
        if row["id"].startswith("gsm8k"):
            answers.setdefault(row["model"], {})[row["id"]] = row
    return answers


def read_sheet(size: str, reward: str) -> tuple[dict[int, dict[str, dict]], list[dict]]:
    """({iteration: {id: answer to a test problem}}, samples) of a run on the interview's task."""
    tests = {}
    rows = [row for row in read_rows("sheet_answers.jsonl.gz") if row["size"] == size]
    rows = [row for row in rows if row["reward"] in (reward, None)]  # None: before training
    for row in rows:
        if row["split"] == "test":
            tests.setdefault(row["step"], {})[row["id"]] = row
    return tests, [row for row in rows if row["split"] == "train"]


def read_asked() -> dict[str, dict]:
    """{id: answer to a test problem} of the untrained model that is asked to calculate."""
    rows = read_rows("sheet_answers.jsonl.gz")
    return {row["id"]: row for row in rows if row["split"] == "asked"}


def is_strict(row: dict) -> bool:
    return row["correct_strict"]


def is_right_by_math(row: dict) -> bool:
    """Right for the run that is paid for the answer alone: with a unit or as a sum's end, too."""
    _, verdict = MathEvaluator("reasoning_answer").reward(row["completion"], row["gold"])
    return verdict["correct_strict"]


def is_right_by_last_number(row: dict) -> bool:
    return to_number(last_number(row["completion"]) or "") == to_number(row["gold"])


def writes_calculation(row: dict) -> bool:
    return calculates(row["completion"])


def has_two_equations(row: dict) -> bool:
    return re.split("</reasoning>|</think>", row["completion"])[0].count("=") >= 2


def has_format(row: dict) -> bool:
    return strict_format(row["completion"])


def sheet_rewards(row: dict) -> list[float]:
    """The one for a right answer is the first."""
    rewards, _ = GSM8kEvaluator().reward(row["completion"], row["gold"])
    return rewards


def has_latex(row: dict) -> bool:
    return "\\" in row["completion"]


def is_cut_at_320(row: dict) -> bool:
    return row["length"] > 320


def is_right_by_last_number_of_320(row: dict) -> bool:
    """As it would be had sampling ended at 320 tokens."""
    return is_right_by_last_number(row | {"completion": row.get("first_320", row["completion"])})


VERDICTS = {
    "strict": is_strict,
    "last_number": is_right_by_last_number,
    "last_number_of_320": is_right_by_last_number_of_320,
    "format": has_format,
    "calculates": writes_calculation,
    "two_equations": has_two_equations,
    "latex": has_latex,
}


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
    """Right answers by the last number, where the model began or stopped to calculate."""
    ids = before.keys() & after.keys()
    calculated = {i for i in ids if writes_calculation(before[i])}
    calculates_now = {i for i in ids if writes_calculation(after[i])}
    began = calculates_now - calculated
    stopped = calculated - calculates_now
    groups = {
        "began to calculate": began,
        "not begun": ids - began,
        "stopped calculating": stopped,
        "not stopped": ids - stopped,
    }
    return right_by_group(groups, before, after)


def by_equals(before: dict, after: dict) -> str:
    """Right answers by the last number, by whether the answer before training had a `=`."""
    ids = before.keys() & after.keys()
    without = {i for i in ids if "=" not in before[i]["completion"]}
    groups = {"no = before": without, "= before": ids - without}
    return right_by_group(groups, before, after)


def right_by_group(groups: dict[str, set[str]], before: dict, after: dict) -> str:
    parts = []
    for name, ids in groups.items():
        counts = [sum(is_right_by_last_number(rows[i]) for i in ids) for rows in (before, after)]
        parts.append(f"{name}: {counts[0]} -> {counts[1]} right of {len(ids)}")
    return "; ".join(parts)


def right_by_calculation(answers: dict) -> str:
    """Right answers by the last number, of those that calculate and of the others."""
    calculating = [row for row in answers.values() if writes_calculation(row)]
    others = [row for row in answers.values() if not writes_calculation(row)]
    counts = [sum(map(is_right_by_last_number, rows)) for rows in (calculating, others)]
    return (
        f"calculates: {counts[0]} right of {len(calculating)};"
        f" does not: {counts[1]} right of {len(others)}"
    )


def what_is_rewarded(samples: list[dict], first: int, last: int) -> str:
    """Right answers by the last number, and mean advantages, of the samples of these iterations."""
    samples = [row for row in samples if first <= row["step"] <= last]
    table = pd.DataFrame(
        {
            "form": ["in the format" if has_format(row) else "out of it" for row in samples],
            "work": ["calculates" if writes_calculation(row) else "does not" for row in samples],
            "verdict": ["right" if is_right_by_last_number(row) else "wrong" for row in samples],
            "advantage": [row["advantage"] for row in samples],
        }
    )
    parts = [
        f"{form}, {work}: {len(rows)}, {(rows['verdict'] == 'right').sum()} right"
        for (form, work), rows in table.groupby(["form", "work"])
    ]
    for column in ("work", "verdict"):
        for name, mean in table.groupby(column)["advantage"].mean().items():
            parts.append(f"{name}: mean advantage {mean:+.2f}")
    return "; ".join(parts)


def what_would_pay(samples: list[dict]) -> str:
    """Mean advantages of these samples, had they been paid for something else."""
    prices = {
        "sheet": lambda row: sum(sheet_rewards(row)),
        "its form alone": lambda row: sum(sheet_rewards(row)[1:]),
        "a right answer in the format": is_strict,
        "a calculation in the format": lambda row: has_format(row) and writes_calculation(row),
    }
    parts = []
    for name, price in prices.items():
        table = pd.DataFrame(
            {
                "group": [(row["reward"], row["step"], row["id"]) for row in samples],
                "calculates": [writes_calculation(row) for row in samples],
                "reward": [float(price(row)) for row in samples],
            }
        )
        groups = table.groupby("group")["reward"]
        deviations = table["reward"] - groups.transform("mean")
        table["advantage"] = deviations / (groups.transform("std") + 1e-6)
        mean = table.groupby("calculates")["advantage"].mean()
        parts.append(
            f"{name}: calculates {mean[True]:+.2f}, does not {mean[False]:+.2f},"
            f" a gradient in {(groups.std() > 0).sum()} of {groups.ngroups} groups"
        )
    return "; ".join(parts)


def claims() -> dict[str, str]:
    """{name: what is counted}, such as "sheet_strict": strictly right before and after the run."""
    older = read_answers()
    runs = {name: read_sheet(*run) for name, run in RUNS.items()}
    samples = {name: rows for name, (_, rows) in runs.items()}
    pairs = {name: (tests[0], tests[10]) for name, (tests, _) in runs.items()}
    untrained, trained = pairs["answer"]
    by_solutions, _ = read_sheet("1.5B", "solutions")
    solutions = by_solutions[128]
    asked = read_asked()

    lines = {}
    for run, (before, after) in pairs.items():
        lines[f"{run}_cut_at_320"] = compare(before, after, is_cut_at_320)
        lines[f"{run}_where_no_equals_was"] = by_equals(before, after)
        lines[f"{run}_right_by_calculation"] = right_by_calculation(after)
        lines[f"{run}_rewarded_early"] = what_is_rewarded(samples[run], 1, 4)
        lines[f"{run}_rewarded_late"] = what_is_rewarded(samples[run], 5, 10)
        lines[f"{run}_rewarded_last"] = what_is_rewarded(samples[run], 8, 10)
    lines["answer_or_calculation_math"] = compare(
        pairs["calculation"][1], trained, is_right_by_math
    )
    lines["untrained_right_by_calculation"] = right_by_calculation(untrained)
    lines["asked_cut_at_320"] = compare(untrained, asked, is_cut_at_320)
    first_samples = [row for row in samples["sheet"] + samples["form"] if row["step"] <= 2]
    lines["both_rewarded_first"] = what_is_rewarded(first_samples, 1, 2)
    lines["both_would_be_rewarded_first"] = what_would_pay(first_samples)

    pairs |= {
        "primary": (pairs["form"][1], pairs["sheet"][1]),
        "asked": (untrained, asked),
        "calculation_or_asked": (asked, pairs["calculation"][1]),
        "answer_or_sheet": (pairs["sheet"][1], trained),
        "calculation_or_random": (pairs["random"][1], pairs["calculation"][1]),
        "answer_or_calculation": (pairs["calculation"][1], trained),
        "small_answer_or_sheet": (pairs["small_sheet"][1], pairs["small_answer"][1]),
        "solutions": (untrained, solutions),
        "few_solutions": (untrained, by_solutions[32]),
        "few_solutions_or_answer": (trained, by_solutions[32]),
        "more_solutions": (by_solutions[32], solutions),
        "solutions_or_answer": (trained, solutions),
        "solutions_or_calculation": (pairs["calculation"][1], solutions),
        "older": (older[BEFORE], older[AFTER]),
        "sft": (older[UNTRAINED], older[SFT]),
        "own": (older[UNTRAINED], older[OWN]),
        "own_or_written": (older[SFT], older[OWN]),
    }
    for pair, (before, after) in pairs.items():
        for name, verdict in VERDICTS.items():
            lines[f"{pair}_{name}"] = compare(before, after, verdict)
        lines[f"{pair}_where_it_calculates"] = by_calculation(before, after)
    return lines


def main():
    parser = argparse.ArgumentParser(description="Count what the report says of Qwen's answers.")
    parser.add_argument("name", nargs="?", help="one claim alone")
    name = parser.parse_args().name
    try:
        lines = claims()
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"error: the answers lack what a claim needs ({error!r})")
    if name and name not in lines:
        parser.error(f"no claim {name}: without a name, all are printed")
    for key in [name] if name else lines:
        print(f"{key}: {lines[key]}")


if __name__ == "__main__":
    main()
