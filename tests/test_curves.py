"""What tables say of accuracy over a run: with entropy, forgotten, sampled, reached."""

import numpy as np
import pytest

from experiments import entropy, figures, outcomes, study_logs, table
from experiments.answers import hexadecimal
from logs import jsonl


@pytest.fixture
def studies(tmp_path, monkeypatch):
    """A folder of studies in which no side has a name."""
    monkeypatch.setattr(study_logs, "STUDIES", tmp_path)
    jsonl.write_json(tmp_path / "names.json", {"a/base": ["the base", "#0072B2"]})
    return tmp_path


def summary(step, answers):
    row = {"step": step, "n": len(answers), "samples": 1, "questions": 7, "tokens": 10.0}
    row |= {"strict": hexadecimal(answers), "flexible": hexadecimal(answers)}
    return row | {"easy": [0, 0], "direct": [0, 0], "careful": [0, 0]}


def write_run(run, entropies, accuracies, key="entropy"):
    """A run that is evaluated every ten iterations, from iteration 0 on.

    entropies has one for each evaluation but the first. In the five iterations before the
    evaluation the entropy is that on average, and before these it is 9.
    """
    train_rows = []
    for i, value in enumerate(entropies):
        of_iterations = [9] * 5 + [value - 0.01, value, value + 0.01, value, value]
        for j, entropy_of_iteration in enumerate(of_iterations, 10 * i + 1):
            train_rows.append({"step": j, key: entropy_of_iteration, "accuracy": 0.5})
    evaluations = []
    summaries = []
    for i, accuracy in enumerate(accuracies):
        evaluations.append({"step": 10 * i, "accuracy": accuracy, "total_tokens": 100 * i})
        summaries.append(summary(10 * i, [j < 10 * accuracy for j in range(10)]))
    jsonl.write(run / "train_log.jsonl", train_rows)
    jsonl.write(run / "eval_log.jsonl", evaluations)
    jsonl.write(run / "answers.jsonl", summaries)


def write_arm(studies, name, entropies, accuracies):
    for rate in ("1e-4", "2e-4", "4e-4"):
        lower = 0 if rate == "2e-4" else 0.2  # the middle rate is the best
        for seed in outcomes.FIRST_SEEDS:
            run = studies / "choices" / f"{name}_rate{rate}_seed{seed}"
            write_run(run, entropies, [accuracy - lower for accuracy in accuracies])


def test_a_line_explains_all_none_or_a_part_of_the_variance():
    x = np.array([0.0, 1.0, 2.0, 3.0])
    line = entropy.fit_line(x, 0.5 - 0.1 * x)
    assert (line.intercept, line.slope, line.r_squared) == pytest.approx((0.5, -0.1, 1))
    assert line.accuracy_at(4) == pytest.approx(0.1)
    # A fit by hand: the slope is 0, so the line explains nothing.
    assert entropy.fit_line(x, np.array([1.0, 0.0, 0.0, 1.0])).r_squared == pytest.approx(0)
    # The slope is (-1.5 * 0 - 0.5 * 0 + 0.5 * 0 + 1.5 * 1) / 5 = 0.3, which explains
    # 0.3^2 * 5 = 0.45 of a sum of squares of 0.75.
    assert entropy.fit_line(x, np.array([0.0, 0.0, 0.0, 1.0])).r_squared == pytest.approx(0.6)


def test_the_line_goes_through_settings_of_grpo_and_other_sides_stand_beside_it(studies):
    """Accuracy is 0.9 at an entropy of 1/16 and falls by 0.2 with each doubling."""
    (studies / "choices").mkdir()
    lines = ["# head", "a class:", "    other base", "    no_baseline base"]
    (studies / "choices" / "comparisons.txt").write_text("\n".join(lines), "utf-8")
    write_arm(studies, "base", [1 / 4, 1 / 8], [0.2, 0.5, 0.7])
    write_arm(studies, "other", [1 / 8, 1 / 16], [0.2, 0.7, 0.9])
    write_arm(studies, "no_baseline", [1 / 8, 1 / 16], [0.2, 0.3, 0.3])
    assert entropy.sides_on_the_line() == ["choices/base", "choices/other"]
    _, together, *by_itself = table.rows_of("entropy")
    # By hand, the curve in exp(entropy) explains 0.0747 of a sum of squares of 0.08.
    assert together[:5] == (
        "2 settings at their best rates, means of seeds",
        "4",
        "20.0",
        "1.00",
        "0.93",
    )
    # Accuracies are 0.5 and 0.7 at iteration 10, and 0.7 and 0.9 at iteration 20. The iteration
    # explains 0.04 of a sum of squares of 0.08. At equal iteration both stand on the line.
    assert together[5:] == ("0.50", "-1.00")
    single_runs, other_rates, each_run = by_itself
    assert single_runs[1:4] == ("16", "20.0", "1.00")
    assert other_rates[1:4] == ("8", "20.0", "1.00"), "two other rates, 20 points lower throughout"
    assert each_run[1:4] == ("2", "20.0", "1.00") and each_run[-1] == ""
    write_run(studies / "a" / "base_seed0", [1 / 4, 1 / 8], [0.2, 0.5, 0.6], "sample_entropy")
    write_run(studies / "a" / "new_seed0", [1 / 4, 1 / 32], [0.2, 0.5, 0.6])
    # A seed of the second look does not count.
    write_run(studies / "choices" / "other_rate4e-4_seed7", [1 / 2, 1 / 2], [0.2, 0.1, 0.1])
    sides = "a/base choices/other choices/no_baseline choices/other_rate4e-4 a/new"
    rows = table.rows_of(f"entropy_line {sides}")[1:]
    assert rows[0] == ("the base", "20", "0.125", "60.0", "70.0", "-10.0")
    assert rows[1] == ("choices/other", "20", "0.062", "90.0", "90.0", "+0.0")
    assert rows[2][-1] == "-60.0"
    assert rows[3][-1] == "-20.0"
    assert rows[4][-2:] == ("", ""), "no point of the line has so low an entropy"
    with pytest.raises(FileNotFoundError, match="base_rate9e-4: no runs"):
        table.table("entropy_line choices/base_rate9e-4")


def test_the_figure_shows_the_line_and_the_sides_beside_it(studies, monkeypatch):
    (studies / "choices").mkdir()
    lines = "# head\na class:\n    other base\n"
    (studies / "choices" / "comparisons.txt").write_text(lines, "utf-8")
    write_arm(studies, "base", [1 / 4, 1 / 8], [0.2, 0.5, 0.7])
    write_arm(studies, "other", [1 / 8, 1 / 16], [0.2, 0.7, 0.9])
    write_run(studies / "a" / "base_seed0", [1 / 4, 1 / 8], [0.2, 0.5, 0.6])
    monkeypatch.setattr(figures, "BESIDE_THE_LINE", {"a/base": "s"})
    (ax,) = figures.draw("entropy").axes
    dots, others, line, beside = ax.lines
    assert len(others.get_xdata()) == 8
    assert dots.get_xydata() == pytest.approx(
        np.array([[1 / 4, 0.5], [1 / 8, 0.7], [1 / 8, 0.7], [1 / 16, 0.9]])
    )
    for x, y in line.get_xydata():
        assert y == pytest.approx(0.9 - 0.2 * np.log2(16 * x))
    assert beside.get_label() == "the base"
    assert beside.get_xydata() == pytest.approx(np.array([[1 / 4, 0.5], [1 / 8, 0.6]]))


def test_forgotten_problems_were_right_before(studies):
    """Of four problems the first two are right before, and the second and third after."""
    jsonl.write(studies / "a" / "before" / "answers.jsonl", [summary(0, [1, 1, 0, 0])])
    for seed, answers in enumerate(([0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1])):
        run = studies / "a" / f"base_seed{seed}"
        jsonl.write(run / "train_log.jsonl", [{"step": 1}])
        jsonl.write(run / "test.jsonl", [summary(1, answers)])
    _, row = table.rows_of("forgotten a/before a/base")
    # 2 of 4, none and all are right after training.
    assert row == ("the base", "50.0", "2", "1, 2, 0", "0", "2", "1, 0, 2")
    other = [summary(1, [1, 1, 0, 0]) | {"questions": 8}]
    jsonl.write(studies / "a" / "base_seed0" / "test.jsonl", other)
    study_logs.read.cache_clear()
    with pytest.raises(ValueError, match="base_seed0: not evaluated on the problems of a/before"):
        table.table("forgotten a/before a/base")


def test_samples_stand_beside_greedy_answers(studies):
    """Samples count in the five iterations before an evaluation, in all seeds."""
    for seed, shift in enumerate((0, 0.1, 0.2)):
        run = studies / "a" / f"base_seed{seed}"
        write_run(run, [1, 1], [0.2, 0.5, 0.8])
        rows = [{"step": i, "accuracy": i / 100 + shift} for i in range(1, 21)]
        jsonl.write(run / "train_log.jsonl", rows)
    # The means of 6 to 10 and of 16 to 20 are 8 and 18, and the mean of the shifts is 0.1.
    assert table.rows_of("sampled a/base")[1:] == (
        ("the base, 10", "18.0", "50.0", "32.0"),
        ("the base, 20", "28.0", "80.0", "52.0"),
    )


def test_where_a_curve_reaches_a_level(studies):
    """One seed is at 60 % a fifth of the way to its last evaluation, and one never is."""
    write_run(studies / "a" / "base_seed0", [1, 1], [0.2, 0.5, 1.0])
    write_run(studies / "a" / "base_seed1", [1, 1], [0.2, 0.3, 0.4])
    write_run(studies / "a" / "base_seed2", [1, 1], [0.2, 0.7, 0.7])
    # The mean curve has 20, 50 and 70 %.
    row = ("the base", "12, > 20, < 10", "15")
    assert table.rows_of("reach 60 a/base")[1] == row
    with pytest.raises(ValueError, match="reach strict: not a percentage, such as 80"):
        table.table("reach strict a/base")


def test_averages_beside_those_of_the_first_side(studies):
    """Worked by hand. The accuracy at iteration 0 does not count."""
    write_run(studies / "a" / "base_seed0", [1, 1], [0.9, 0.4, 0.6])
    write_run(studies / "a" / "base_seed1", [1, 1], [0.9, 0.5, 0.7])
    write_run(studies / "a" / "worse_seed0", [1, 1], [0.1, 0.2, 0.4])
    write_run(studies / "a" / "worse_seed1", [1, 1], [0.1, 0.3, 0.7])
    rows = table.rows_of("averages a/base a/worse")
    assert rows[1] == ("the base", "50.0, 60.0", "55.0", "65.0", "", "")
    # The seeds differ by -20 and -10, so that the standard error is 5. Student's t is 12.706.
    worse = ("a/worse", "30.0, 50.0", "40.0", "55.0", "-15.0 [-78.5, +48.5]", "undecided")
    assert rows[2] == worse
    # Without other sides, all that have a name in the study stand beside the first one.
    names = {"a/base": ["the base", "#0072B2"], "b/other": ["no", "#000000"]}
    jsonl.write_json(studies / "names.json", names | {"a/worse": ["the worse", "#000000"]})
    study_logs.read_names.cache_clear()
    assert table.rows_of("averages a/base")[2] == ("the worse", *worse[1:])
