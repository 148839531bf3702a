"""The rules about logs: each has a log on either side of its condition; and where they are said."""

import re

import pytest
from conftest import ROOT, run_flags
from log_helpers import eval_row, train_rows, write_run

import main
import plotter
from grpo.diagnose import RULES, findings

# Runs have sixty iterations, so that their start and their end are six each.


def jitter(step, size):
    """Noise whose mean over six iterations is 0."""
    return size if step % 2 else -size


def ramp(start, end):
    """A metric that goes from `start` to `end` in a straight line, but for its two ends."""
    return lambda step: start + (end - start) * min(max((step - 7) / 47, 0), 1)


def once(value, else_value):
    """A metric with another value in one iteration."""
    return lambda step: value if step == 30 else else_value


def step_up(height):
    """A noisy metric that jumps at half of the run: 0.082 is about one standard error."""
    return lambda step: jitter(step, 0.1) + (height if step > 30 else 0)


def not_finite(times):
    """Gradients that are not finite so many times in three iterations: null in a log."""
    return lambda step: None if step % 3 < times else 0.3


HEALTHY = {
    "reward": lambda step: ramp(1, 3)(step) + jitter(step, 0.05),
    "rewards/correctness": ramp(0.5, 1.5),
    "zero_std_fraction": 0.2,
    "truncated_fraction": 0.0,
    "grad_norm": 0.3,
    "kl_per_token": 0.05,
    "sampling_logp_gap": 1e-6,
    "distinct_2_batch": 0.7,
}
NO_GAIN = {"rewards/correctness": 0.5}
ALIKE = {"distinct_2_batch": ramp(0.7, 0.1)}


def broken_rules(path, changes, accuracies=(0.3, 0.5, 0.6, 0.7), num_iterations=60):
    """The names of the rules that a run breaks, whose evaluations have these accuracies."""
    evaluations = [eval_row(20 * i, strict=accuracy) for i, accuracy in enumerate(accuracies)]
    write_run(path, train_rows(num_iterations, **HEALTHY | changes), evaluations)
    return [line.split(": ")[0] for line in findings(path)]


# Rule, what breaks it, what does so hardly.
CASES = [
    ("no gradient", {"grad_norm": lambda t: 0.3 * (t > 31)}, {"grad_norm": lambda t: t % 2}),
    ("no gradient", {"grad_norm": not_finite(2)}, {"grad_norm": not_finite(1)}),
    ("no gradient", {"grad_norm": None}, {}),
    ("equal rewards", {"zero_std_fraction": 0.81}, {"zero_std_fraction": 0.79}),
    ("equal rewards", {"zero_std_fraction": once(0.95, 0.2)}, {"zero_std_fraction": once(0.9, 0)}),
    ("truncation", {"truncated_fraction": 0.26}, {"truncated_fraction": 0.25}),
    ("truncation", {"truncated_fraction": ramp(0, 0.26)}, {"truncated_fraction": ramp(1, 0)}),
    ("flat reward", {"reward": step_up(0.15)}, {"reward": step_up(0.19)}),
    ("flat reward", {"reward": 0.0}, {}),
    ("only format", {"rewards/correctness": ramp(0.5, 0.78)}, {}),
    ("only format", NO_GAIN, {"rewards/correctness": ramp(0.5, 0.82)}),
    ("only format", NO_GAIN, NO_GAIN | {"reward": step_up(0.15)}),
    ("stories alike", {"distinct_2_batch": ramp(0.7, 0.48)}, {"distinct_2_batch": ramp(0.7, 0.5)}),
    ("stories alike", ALIKE, ALIKE | {"reward": step_up(0.25)}),
    ("high KL", {"kl_per_token": 0.51}, {"kl_per_token": 0.5}),
    ("high KL", {"kl_per_token": ramp(0, 1)}, {"kl_per_token": lambda t: 900.0 * (t == 59)}),
    ("sampler", {"sampling_logp_gap": 0.11}, {"sampling_logp_gap": 0.099}),
]


@pytest.mark.parametrize("rule, broken, healthy", CASES)
def test_a_rule_is_broken_beyond_its_limit_and_not_before(tmp_path, rule, broken, healthy):
    assert rule in broken_rules(tmp_path, broken)
    assert rule not in broken_rules(tmp_path, healthy)


@pytest.mark.parametrize(
    "rule, broken, healthy",
    [
        # The first evaluation's interval ends at 34%, and that of the best one begins at 76%.
        ("no accuracy", (0.3, 0.5, 0.33), (0.3, 0.35)),
        ("no accuracy", (0.3, 0.1), (0.3,)),
        ("past its best", (0.3, 0.6, 0.8, 0.71), (0.3, 0.6, 0.8, 0.73)),
    ],
)
def test_a_rule_about_evaluations(tmp_path, rule, broken, healthy):
    assert rule in broken_rules(tmp_path, {}, broken)
    assert rule not in broken_rules(tmp_path, {}, healthy)
    assert "no accuracy" not in broken_rules(tmp_path, {"reward": step_up(0.25)}, broken)


def test_two_ends_need_twenty_iterations_and_a_rule_needs_its_metric(tmp_path):
    """NaN is null in a log."""
    assert broken_rules(tmp_path, {}) == []
    flat = {"reward": 1.0, "kl_per_token": 1.0}
    assert broken_rules(tmp_path, flat, num_iterations=20) == ["flat reward", "high KL"]
    assert broken_rules(tmp_path, flat, num_iterations=19) == []
    late = {"truncated_fraction": lambda step: 0.5 * (step > 18)}  # 0.2 in the last five
    assert "truncation" not in broken_rules(tmp_path, late, num_iterations=20)
    assert broken_rules(tmp_path, dict.fromkeys(HEALTHY), accuracies=()) == ["no gradient"]
    assert findings(tmp_path / "missing") == []


def test_a_finding_says_what_and_where_and_what_to_change(tmp_path, capsys):
    broken_rules(tmp_path / "cut", {"truncated_fraction": ramp(0, 0.5)})
    broken_rules(tmp_path / "late", {}, (0.3, 0.8, 0.31))
    broken_rules(tmp_path / "well", {})
    runs = [str(tmp_path / name) for name in ("cut", "late", "well")]
    assert plotter.main(["--diagnose", "--log_dir", *runs]) == 0
    cut, late, _, well = capsys.readouterr().out.splitlines()
    assert cut == (
        "cut: truncation: truncated_fraction is above 25% at the end (truncated_fraction 0 -> 0.5);"
        " raise --max_completion_length"
    )
    assert "(reward 1 -> 3, accuracy 30.0% -> 31.0%, at best 80.0%); read" in late
    assert well == "well: nothing looks wrong"
    assert not list(tmp_path.rglob("*.pdf"))


def test_the_page_has_the_same_table_and_flags_exist():
    rows = [f"| {rule.name} | {rule.condition} | {rule.advice} |\n" for rule in RULES]
    assert len(rows) <= 11
    assert "| --- | --- | --- |\n" + "".join(rows) in (ROOT / "docs/tuning.md").read_text("utf-8")
    flags = set(re.findall("--([a-z_]+)", "".join(rows)))
    assert flags <= main.GRPOConfig.__dataclass_fields__.keys()


def test_a_run_speaks_after_each_evaluation(model_folder, tmp_path, capsys):
    """A run with reward 0 and gradient 0 in every iteration once ended without a word."""
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def zero(completions, answers, **columns):\n    return [0.0] * len(completions)\n"
    )
    flags = run_flags(model_folder, tmp_path / "run", evaluator=f"{rewards}:zero", beta=0.0)
    assert main.main([*flags, "--num_train_iters", "2", "--eval_iterations", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split(": ")[1] for line in lines if line.startswith("looks wrong: ")]
    assert names == ["no gradient", "equal rewards", "truncation"] * 2
    last = max(i for i, line in enumerate(lines) if line.startswith("evaluation"))
    assert lines[last + 1].startswith("looks wrong: no gradient")
