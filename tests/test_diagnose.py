"""The rules of --diagnose: each has a log on either side of its condition; and the command line."""

import pytest
from log_helpers import eval_row, write_run

import plotter
from grpo.run import MAX_SKIPPED
from logs.diagnose import NOTE, RULES, WARNING, Logs, diagnose

NUM_ITERATIONS = 60  # the start and the end are six iterations each


def jitter(i, size):
    """Noise whose mean over six iterations is 0."""
    return size if i % 2 else -size


def ramp(start, end):
    """A metric that goes from `start` to `end` in a straight line, but for its two ends."""
    return lambda i: start + (end - start) * min(max((i - 6) / 47, 0), 1)


def once(value, else_value):
    """A metric with another value in one iteration."""
    return lambda i: value if i == 30 else else_value


def step_up(height):
    """A noisy metric that jumps at half of the run: 0.082 is about one standard error."""
    return lambda i: jitter(i, 0.1) + (height if i >= 30 else 0)


HEALTHY = {
    "reward": lambda i: ramp(1, 3)(i) + jitter(i, 0.05),
    "rewards/correctness": ramp(0.5, 1.5),
    "rewards/strict_format": ramp(0.2, 0.5),
    "response_length": ramp(90, 31),
    "accuracy": 0.5,
    "zero_std_fraction": 0.2,
    "truncated_fraction": 0.0,
    "grad_norm": 0.3,
    "kl_per_token": 0.05,
    "entropy": ramp(0.5, 0.1),
    "clip_fraction": 0.01,
    "sampling_logp_gap": 1e-6,
    "skipped_updates": 0.0,
    "distinct_2_batch": 0.7,
}
FLAT_REWARD = {"reward": step_up(0)}
LOW_ENTROPY = ramp(0.5, 0.04)


def train_rows(columns, num_iterations=NUM_ITERATIONS):
    rows = []
    for i in range(num_iterations):
        row = {"step": i + 1}
        for key, value in columns.items():
            row[key] = value(i) if callable(value) else value
        rows.append(row)
    return rows


def evaluations(accuracies):
    """One every 20 iterations; the intervals are 4 points wide on either side."""
    return [eval_row(20 * i, strict=accuracy) for i, accuracy in enumerate(accuracies)]


def make_logs(changes, accuracies=(0.3, 0.5, 0.6, 0.7), flags=None):
    return Logs(train_rows(HEALTHY | changes), evaluations(accuracies), flags or {})


def severities(logs):
    """{rule: severity} of what is found."""
    return {finding.rule: finding.severity for finding in diagnose(logs).findings}


def test_nothing_is_found_in_a_healthy_run_and_every_rule_has_looked():
    diagnosis = diagnose(make_logs({}))
    assert diagnosis.findings == []
    assert diagnosis.rules == [rule.name for rule in RULES]


def last_three(value, else_value):
    """A metric with another value in the last three iterations."""
    return lambda i: value if i >= NUM_ITERATIONS - 3 else else_value


SHORT = {"response_length": ramp(120, 39), "accuracy": 0.2}

# Rule, severity, what breaks it, what does so hardly.
CASES = [
    (
        "collapse",
        WARNING,
        {"rewards/strict_format": last_three(0.39, 0.49)},
        {"rewards/strict_format": last_three(0.4, 0.49)},
    ),
    (
        "collapse",
        WARNING,
        {"rewards/format": last_three(0.4, 0.51)},
        {"rewards/format": last_three(0.0, 0.5)},
    ),
    ("collapse", WARNING, SHORT, SHORT | {"response_length": ramp(120, 41)}),
    ("collapse", WARNING, SHORT | {"accuracy": 0.49}, SHORT | {"accuracy": 0.5}),
    (
        "no gradient",
        WARNING,
        {"grad_norm": lambda i: 0.3 * (i > 30)},
        {"grad_norm": lambda i: i % 2},
    ),
    ("groups without a signal", WARNING, {"zero_std_fraction": 0.81}, None),
    ("groups without a signal", NOTE, {"zero_std_fraction": 0.8}, {"zero_std_fraction": 0.5}),
    (
        "groups without a signal",
        WARNING,
        {"zero_std_fraction": once(0.95, 0.2)},
        {"zero_std_fraction": once(0.9, 0.2)},
    ),
    (
        "groups without a signal",
        WARNING,
        {"zero_std_fraction_trained": 0.85},
        {"zero_std_fraction_trained": 0.1, "zero_std_fraction": 0.85},
    ),
    ("truncation", WARNING, {"truncated_fraction": 0.26}, {"truncated_fraction": 0.25}),
    ("reward does not rise", WARNING, {"reward": step_up(0.15)}, {"reward": step_up(0.19)}),
    ("reward does not rise", WARNING, {"reward": 0.0}, {}),
    ("reward does not rise", WARNING, {"reward": ramp(3, 1)}, {}),
    ("KL", WARNING, {"kl_per_token": 0.51}, {"kl_per_token": 0.5}),
    ("KL", WARNING, {"kl_per_token": ramp(0, 1)}, {"kl_per_token": lambda i: 900.0 * (i == 58)}),
    ("entropy", WARNING, {"entropy": ramp(0.9, 1.1)}, {"entropy": ramp(0.9, 0.99)}),
    ("entropy", WARNING, {"entropy": ramp(0.9, 1.1)}, {"entropy": ramp(1.1, 1.3)}),
    (
        "entropy",
        WARNING,
        {"entropy": LOW_ENTROPY, "zero_std_fraction": 0.5},
        {"entropy": LOW_ENTROPY, "zero_std_fraction": 0.49},
    ),
    ("entropy", WARNING, {"entropy": once(0.02, 0.5)}, {"entropy": once(0.03, 0.5)}),
    ("clip", WARNING, {"clip_fraction": 0.21}, {"clip_fraction": 0.2}),
    ("sampler", WARNING, {"sampling_logp_gap": 0.11}, {"sampling_logp_gap": 0.1}),
    (
        "sampler",
        WARNING,
        {"sampling_logp_gap": ramp(0.002, 0.011)},
        {"sampling_logp_gap": ramp(0.002, 0.009)},
    ),
    ("sampler", WARNING, {"sampling_logp_gap": 0.11}, {"sampling_logp_gap": ramp(1e-7, 9e-7)}),
    ("skipped updates", WARNING, {"skipped_updates": once(0.5, 0.0)}, {}),
    (
        "reward without diversity",
        WARNING,
        {"distinct_2_batch": ramp(0.7, 0.48)},
        {"distinct_2_batch": ramp(0.7, 0.5)},
    ),
    (
        "reward without diversity",
        WARNING,
        {"distinct_2_batch": ramp(0.7, 0.1)},
        {"distinct_2_batch": ramp(0.7, 0.1), "reward": step_up(0.25)},
    ),
    (
        "only format rises",
        WARNING,
        {"rewards/correctness": ramp(0.5, 0.78)},
        {"rewards/correctness": ramp(0.5, 0.82)},
    ),
]


@pytest.mark.parametrize("rule, severity, broken, kept", CASES)
def test_a_rule_warns_beyond_its_limit_and_not_before(rule, severity, broken, kept):
    assert severities(make_logs(broken)).get(rule) == severity
    if kept is not None:
        assert rule not in severities(make_logs(kept))


@pytest.mark.parametrize(
    "broken, kept", [((0.3, 0.5, 0.33), (0.3, 0.35)), ((0.3, 0.1), (0.3, 0.4))]
)
def test_a_reward_that_rises_without_accuracy(broken, kept):
    """The first evaluation's interval ends at 34 %."""
    rule = "reward without accuracy"
    assert severities(make_logs({}, broken))[rule] == WARNING
    assert rule not in severities(make_logs({}, kept))
    assert rule not in severities(make_logs(FLAT_REWARD, broken))


def test_a_collapse_is_named_early_and_by_its_kind():
    """The shapes of public runs: the format goes in five iterations, the length in thirty."""
    lose_format = {"rewards/format": lambda i: 0.99 if i < 40 else max(0.0, 0.99 - 0.2 * (i - 39))}
    rows = train_rows(HEALTHY | lose_format)
    assert severities(Logs(rows[:41])) == {}
    assert "loses the format" in diagnose(Logs(rows[:42])).findings[0].sentence
    shorten = {"response_length": lambda i: max(16, 400 - 13 * i), "accuracy": 0.2}
    rows = train_rows(HEALTHY | {"rewards/format": 1.0} | shorten)
    assert severities(Logs(rows[:20])) == {}
    (finding,) = diagnose(Logs(rows[:25])).findings
    assert "short and wrong" in finding.sentence


def test_a_short_story_is_no_wrong_answer():
    assert "collapse" not in severities(make_logs(SHORT | {"rewards/judge": 3.0}))


def test_past_its_best_names_the_checkpoint():
    rule = "past its best"
    findings = diagnose(make_logs({}, (0.3, 0.6, 0.8, 0.71))).findings
    assert [finding.rule for finding in findings] == [rule]
    assert "checkpoints/step_000040" in findings[0].sentence
    assert rule not in severities(make_logs({}, (0.3, 0.6, 0.8, 0.73)))


def test_gspo_clips_much():
    logs = make_logs({"clip_fraction": 0.6}, flags={"loss_type": "gspo"})
    assert "clip" not in severities(logs)


@pytest.mark.parametrize(
    "accuracy, words",
    [(0.95, "nearly all answers are right"), (0.05, "nearly all answers are wrong")]
    + [(0.5, "the samples of a group are alike")],
)
def test_flat_groups_are_told_apart(accuracy, words):
    logs = make_logs({"zero_std_fraction": 0.85, "accuracy": accuracy})
    assert words in diagnose(logs).findings[0].sentence


def test_missing_rewards_are_not_equal_rewards():
    """All groups are flat in the last iterations, and no answer is right."""
    rows = train_rows(HEALTHY)
    for row in rows[40:]:
        row |= {"reward": None, "zero_std_fraction": 1.0, "accuracy": 0.0}
    (finding,) = diagnose(Logs(rows)).findings
    assert finding.rule == "missing rewards"
    assert "missing in 20 of 60 iterations" in finding.sentence


@pytest.mark.parametrize(
    "bad",
    [{"kl_per_token": 5.0}, {"kl_per_token": None}, {"skipped_updates": 0.5}],
    ids=["high", "not finite", "skipped"],
)
def test_as_many_bad_iterations_as_end_a_run_are_divergence_before_all_else(bad):
    """It was once told to allow longer completions: it ends too early for the rule of the KL."""
    rows = train_rows(HEALTHY, 6)
    for _ in range(MAX_SKIPPED):
        assert severities(Logs(rows, flags={"max_kl": 4.0})).get("divergence") is None
        rows.append({"step": 7} | HEALTHY | {"truncated_fraction": 1.0} | bad)
    findings = diagnose(Logs(rows, flags={"max_kl": 4.0})).findings
    assert findings[0].rule == "divergence"
    assert "truncation" in [finding.rule for finding in findings]


def test_an_evaluation_without_a_step_or_an_interval_is_left_out():
    logs = make_logs({})
    for key in ("step", "accuracy_high"):
        logs.evaluations.append(eval_row(80, strict=0.1) | {key: None})
    assert diagnose(logs).findings == []


def test_a_high_kl_with_a_flat_reward_is_critical():
    high_kl = {"kl_per_token": 0.8}
    (finding,) = diagnose(make_logs(high_kl)).findings
    assert "critical" not in finding.sentence
    sentences = [
        finding.sentence for finding in diagnose(make_logs(high_kl | FLAT_REWARD)).findings
    ]
    assert any("critical" in sentence for sentence in sentences)


def test_what_a_judge_reads_is_neither_right_nor_wrong():
    """There `accuracy` is the share of texts above the floor of rules, which is high at first."""
    logs = make_logs({"rewards/judge": 0.0, "zero_std_fraction": 0.9}, (0.8, 0.7))
    diagnosis = diagnose(logs)
    assert not {"past its best", "reward without accuracy"} & set(diagnosis.rules)
    assert "answers" not in diagnosis.findings[0].sentence


def test_two_ends_need_twenty_iterations():
    rows = train_rows(HEALTHY | FLAT_REWARD, 20)
    assert severities(Logs(rows)) == {"reward does not rise": WARNING}
    assert severities(Logs(rows[:19])) == {}


def test_a_rule_that_lacks_its_metric_is_left_out():
    """NaN is null in a log. sft.py logs neither rewards nor groups, and may lower its entropy."""
    for rows in ([], [{"step": 1}], train_rows({"entropy": None, "grad_norm": None})):
        assert diagnose(Logs(rows)).rules == []
    sft = Logs(train_rows({"grad_norm": 0.3, "entropy": ramp(2, 0.001), "skipped_updates": 0}))
    assert diagnose(sft).findings == []
    assert diagnose(sft).rules == ["divergence", "no gradient", "skipped updates"]


def test_warnings_come_before_notes():
    logs = make_logs({"zero_std_fraction": 0.6, "truncated_fraction": 0.5})
    assert list(severities(logs).values()) == [WARNING, NOTE]


# ---- the command line


def write(path, changes):
    logs = make_logs(changes)
    return write_run(path, train=logs.train, evaluations=logs.evaluations)


def test_a_healthy_and_a_bad_run_on_the_command_line(tmp_path, capsys):
    healthy = write(tmp_path / "healthy", {})
    bad = write(tmp_path / "bad", {"truncated_fraction": 0.5, "zero_std_fraction": 0.6})
    assert plotter.main(["--diagnose", str(healthy), str(bad)]) == 0
    first, second, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("healthy: nothing looks wrong in 60 iterations and 4 evaluations")
    assert second.startswith("bad: 2 findings in 60 iterations and 4 evaluations")
    assert len(lines) == 6
    assert "50% of the completions are cut" in lines[0]
    assert "--max_completion_length" in lines[2]
    assert lines[3].strip().startswith("note: ")
    assert not list(tmp_path.rglob("*.pdf"))


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "--log_dir --diagnose --list is required"),
        (["--diagnose"], "expected at least one argument"),
        (["--diagnose", "run", "--log_dir", "run"], "not allowed with argument"),
        (["--diagnose", "run", "--metrics", "kl"], "leave out"),
    ],
)
def test_a_wrong_call_gets_one_line(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run", {})
    try:
        exit_code = plotter.main(arguments)
    except SystemExit as stop:
        exit_code = stop.code
    out, err = capsys.readouterr()
    assert exit_code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err
