"""The figures of the studies: what they draw is what the logs say."""

import shutil

import numpy as np
import pytest
from conftest import ROOT
from log_helpers import write_choice
from matplotlib.patches import Rectangle

from experiments import figures, study_logs, table
from experiments.answers import checksum_of_questions, hexadecimal
from logs import jsonl
from logs.statistics import student_quantile
from rl_datasets import ArithmeticLoader


@pytest.fixture
def studies(tmp_path, monkeypatch):
    """An empty folder of studies, with the project's names of sides."""
    monkeypatch.setattr(study_logs, "STUDIES", tmp_path)
    shutil.copy(ROOT / "experiments" / "names.json", tmp_path)
    return tmp_path


def evaluation(answers, **columns):
    """A summary as answers.py writes it, of one answer to each question."""
    row = {"step": 0, "n": len(answers), "samples": 1, "questions": 7, "with_steps": 0}
    row |= {"tokens": 10.0, "strict": hexadecimal(answers), "flexible": hexadecimal(answers)}
    return row | {"easy": [0, 0], "direct": [0, 0], "careful": [0, 0]} | columns


def right(num_right, num_questions=100):
    """Answers of which so many are right, the first ones."""
    return [i < num_right for i in range(num_questions)]


def write_seeds(folder, side, evaluations_of_seeds, file="test.jsonl"):
    """The evaluations of a trained side: a list of rows for each seed."""
    for seed, rows in enumerate(evaluations_of_seeds):
        run = folder / f"{side}_seed{seed}"
        jsonl.write(run / file, rows)
        jsonl.write(run / "train_log.jsonl", [{"step": 1}])


def write_test_accuracies(folder, side, nums_right):
    """A trained side, with the number of right answers of 100 for each seed."""
    write_seeds(folder, side, [[evaluation(right(number))] for number in nums_right])


def points(ax, marker):
    """The points with this marker: (x, y) of each, in the order of drawing."""
    drawn = []
    for line in ax.lines:
        if line.get_marker() == marker:
            drawn += line.get_xydata().tolist()
    return np.array(drawn)


def line_with_label(ax, label):
    (line,) = [line for line in ax.lines if line.get_label() == label]
    return line


def texts_of(ax):
    return [text.get_text() for text in ax.texts]


def is_bold(ax, name):
    return [text.get_weight() == "bold" for text in ax.texts if text.get_text() == name]


# --- Comparisons ----------------------------------------------------------------------------------


def test_a_forest_shows_each_seed_the_mean_and_its_interval(studies):
    """The first study gains 30, 31 and 32 points, the second one -5, 0 and 5."""
    write_test_accuracies(studies, "a/base", [40, 40, 40])
    write_test_accuracies(studies, "a/new", [70, 71, 72])
    write_test_accuracies(studies, "b/new", [35, 40, 45])
    comparisons = "# head\na: Better?\n    a/later a/base\n    a/new a/base\nb: And here?\n"
    (studies / "comparisons.txt").write_text(comparisons + "    b/new a/base\n", "utf-8")

    fig = figures.draw("forest")
    (ax,) = fig.axes
    means = points(ax, "o")
    assert means[:, 0].tolist() == [31, 0]
    assert points(ax, ".")[:, 0].tolist() == [30, 31, 32, -5, 0, 5]
    intervals = [line.get_xdata() for line in ax.lines if len(line.get_xdata()) == 2]
    intervals = [ends for ends in intervals if ends[0] != ends[1]]  # not the line at 0
    # The standard deviations of the seeds are 1 and 5.
    half_width = student_quantile(2) / 3**0.5
    assert intervals[0] == pytest.approx([31 - half_width, 31 + half_width])
    assert intervals[1] == pytest.approx([-5 * half_width, 5 * half_width])
    assert is_bold(ax, "a/new") == [True], "the higher side of a significant difference"
    assert is_bold(ax, "b/new") == [False]
    assert is_bold(ax, "a/base") == [False, False]
    # The question stands above the row that was run, though the one before it was not.
    assert texts_of(ax)[2:] == ["Better?", "a/new", "a/base", "And here?", "b/new", "a/base"]
    assert fig.get_suptitle() == "1 of 2 differences are significant"
    assert means[1, 1] > means[0, 1] and ax.yaxis_inverted(), "the first comparison is on top"

    both_height = fig.get_figheight()
    one = figures.draw("forest", "b")
    assert texts_of(one.axes[0])[2] == "And here?"
    assert one.get_figheight() < both_height


def test_a_forest_of_choices_has_three_verdicts(studies):
    """By their means, new is 20 points better, same as good, and wild between -30 and 30."""
    (studies / "choices").mkdir()
    lines = ["# explained", "class:", "    new base", "    same base", "    wild base"]
    lines += ["other class:", "    new same", "    late base"]
    (studies / "choices" / "comparisons.txt").write_text("\n".join(lines))

    def outcome_of(height, slope_of_seeds):
        def outcome(x, seed):
            return height - 0.02 * (x - 1) ** 2 + slope_of_seeds * (seed - 4.5)

        return outcome

    rates = ["1", "2", "4"]
    write_choice(studies, "base", rates, outcome_of(0.5, 0.001))
    write_choice(studies, "new", rates, outcome_of(0.7, 0.002))
    write_choice(studies, "same", rates, outcome_of(0.5, 0.003))
    write_choice(studies, "wild", rates, outcome_of(0.5, 0.15))
    write_choice(studies, "late", rates[:2], outcome_of(0.5, 0.001))  # a rate is missing
    fig = figures.draw("forest_choices")
    (ax,) = fig.axes
    significant_and_undecided = points(ax, "o")[:, 0]
    assert significant_and_undecided == pytest.approx([20, 0, 20])
    assert points(ax, "s")[:, 0] == pytest.approx([0], abs=1e-9), "equal within 3 points"
    seeds = points(ax, ".")[:, 0]
    assert seeds[:4] == pytest.approx([19.85, 19.95, 20.05, 20.15])
    assert len(seeds) == 4 * 4, "a comparison that is not finished is left out"
    assert texts_of(ax)[2] == "class" and "other class" in texts_of(ax)
    labels = [text.get_text() for text in fig.legends[0].get_texts()]
    verdicts = ["significant", "equal within 3 points", "undecided"]
    assert labels == [*verdicts, "one seed", "within 3 points"]
    bands = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    assert (-3, 6) in [(band.get_x(), band.get_width()) for band in bands]
    title = "Of 4 comparisons 2 are significant. Equal within 3 points: 1"
    assert fig.get_suptitle().replace("\n", " ") == title

    write_choice(studies, "no_std", rates, outcome_of(0.7, 0.002))  # it has a colour
    (ax,) = figures.draw("response", "Of the rate", "base", "no_std").axes
    rates_and_means = [(1, 0.48), (2, 0.5), (4, 0.48)]
    assert points(ax, "o")[:3] == pytest.approx(np.array(rates_and_means))
    assert points(ax, "*") == pytest.approx(np.array([(2, 0.5), (2, 0.7)]))


# --- SFT ------------------------------------------------------------------------------------------


def test_sft_stands_beside_the_range_of_grpo(studies):
    for number, accuracy in ((10, 30), (100, 40), (1000, 50), (10000, 60)):
        write_test_accuracies(studies, f"sft/direct{number}", [accuracy, accuracy + 2])
    for number in (10, 100, 1000):
        write_test_accuracies(studies, f"sft/careful{number}", [70, 80])
    write_test_accuracies(studies, "rates/base", [81, 85, 83])
    jsonl.write(studies / "dynamics/before/answers.jsonl", [evaluation(right(24))])

    (ax,) = figures.draw("sft_by_examples").axes
    assert points(ax, "o")[:, 1] == pytest.approx([0.3, 0.32, 0.4, 0.42, 0.5, 0.52, 0.6, 0.62])
    assert points(ax, "s")[:, 1] == pytest.approx([0.7, 0.8] * 3)
    careful, direct = [line.get_xydata() for line in ax.lines if len(line.get_xdata()) > 2]
    assert careful == pytest.approx(np.array([[10, 0.75], [100, 0.75], [1000, 0.75]]))
    assert direct[:, 1] == pytest.approx([0.31, 0.41, 0.51, 0.61])
    (band,) = ax.patches
    assert (band.get_y(), band.get_height()) == pytest.approx((0.81, 0.04))
    assert line_with_label(ax, "before training").get_ydata() == pytest.approx([0.24, 0.24])


def test_an_arrow_leads_from_sft_to_the_iteration_of_grpo(studies):
    """GRPO has 20, 40 and 60 % after 0, 5 and 10 iterations, and so it has 48 % at 7."""
    curve = [evaluation(right(number), step=step) for step, number in ((0, 20), (5, 40), (10, 60))]
    write_seeds(studies, "exchange/grpo", [curve, curve], file="answers.jsonl")
    accuracies = {"direct10": 30, "direct100": 40, "direct1000": 48, "direct10000": 60}
    accuracies |= {"careful10": 61, "careful100": 70, "careful1000": 80}
    for side, accuracy in accuracies.items():
        rows = [[evaluation(right(accuracy))]]
        write_seeds(studies, f"sft/{side}", rows, file="answers.jsonl")

    fig = figures.draw("exchange")
    (ax,) = fig.axes
    reached = line_with_label(ax, "SFT on 1,000 direct solutions: 7 iterations")
    assert reached.get_xydata() == pytest.approx(np.array([[0, 0.48], [7, 0.48]]))
    arrows = [text for text in ax.texts if text.arrow_patch]
    assert [arrow.xyann for arrow in arrows] == [
        pytest.approx((10, 0.6)),
        pytest.approx((7, 0.48)),
    ]
    bottom = ax.get_ylim()[0]
    assert [arrow.xy for arrow in arrows] == [
        pytest.approx((10, bottom)),
        pytest.approx((7, bottom)),
    ]
    at_once = points(ax, ">")
    assert at_once == pytest.approx(np.array([[0, 0.4], [0, 0.3]]))
    never = [line for line in ax.lines if line.get_linestyle() == "--"]
    assert [line.get_ydata()[0] for line in never] == [0.8, 0.7, 0.61]
    labels = [text.get_text() for text in fig.legends[0].get_texts()]
    assert "SFT on 10 careful solutions: not within 10 iterations" in labels
    assert "SFT on 100 direct solutions: fewer than 5 iterations" in labels
    (band,) = ax.collections
    assert band.get_datalim(ax.transData).y0 == pytest.approx(0.2)


# --- Expert iteration -----------------------------------------------------------------------------


def write_expert_iteration(studies):
    """Two expert iterations of each setting, which seed 0 ends at 60 % and seed 1 at 80 %.

    Iteration 12 of GRPO is at 40 and 60 %, and SFT ends at 50 %.
    """
    updates = [
        {"step": 1, "ei_step": 1, "entropy": 0.4},
        {"step": 2, "ei_step": 1, "entropy": 0.3},
        {"step": 3, "ei_step": 2, "entropy": 0.2},
    ]
    start = evaluation(right(20), careful=[0, 1], direct=[0, 3])
    for side in figures.EXPERT_ITERATION:
        seeds = []
        for end in (60, 80):
            seeds.append([start, start | {"step": 2}, evaluation(right(end), step=3)])
        write_seeds(studies, side, seeds, file="answers.jsonl")
        for run in study_logs.runs_of(side):
            jsonl.write(run / "train_log.jsonl", updates)
    for side, ends in (("exchange/grpo", (40, 60)), ("filtered/right", (50, 50))):
        seeds = [[start, evaluation(right(end), step=12, careful=[0, 1])] for end in ends]
        write_seeds(studies, side, seeds, file="answers.jsonl")
    jsonl.write(studies / "rates/base_seed0/train_log.jsonl", [{"entropy": 0.9}] * 24)
    jsonl.write(studies / "rates/base_seed1/train_log.jsonl", [{"entropy": 0.7}] * 24)


def test_expert_iteration_is_laid_beside_grpo_by_its_samples(studies):
    write_expert_iteration(studies)
    accuracy, careful = figures.draw("expert_iterations").axes
    one_epoch = line_with_label(accuracy, "expert iteration, one epoch").get_xydata()
    assert one_epoch == pytest.approx(np.array([[0, 0.2], [1, 0.2], [2, 0.7]]))
    grpo = line_with_label(accuracy, "GRPO, the 60-iteration baseline").get_xydata()
    assert grpo == pytest.approx(np.array([[0, 0.2], [1, 0.5]]))
    sft = line_with_label(accuracy, "SFT on the right samples, at its end")
    assert sft.get_ydata()[0] == 0.5
    one_epoch = line_with_label(careful, "expert iteration, one epoch").get_ydata()
    assert one_epoch[:2].tolist() == [0.25, 0.25]


def test_entropy_of_samples_is_that_before_training_on_them(studies):
    write_expert_iteration(studies)
    (ax,) = figures.draw("entropy_of_samples").axes
    one_epoch = line_with_label(ax, "expert iteration, one epoch: right samples").get_xydata()
    assert one_epoch == pytest.approx(np.array([[0, 0.4], [1, 0.2]]))
    grpo = line_with_label(ax, "GRPO, the 60-iteration baseline: all samples").get_xydata()
    assert grpo[[0, 12]] == pytest.approx(np.array([[0, 0.8], [1, 0.8]]))


def test_entropy_by_iteration_is_that_of_all_samples_at_the_best_rate(studies):
    """Expert iteration logs it under another name. A spike of one iteration does not show."""
    keys = {"base": "entropy", "updates16": "entropy", "expert_iteration": "sample_entropy"}
    for number, (name, key) in enumerate(keys.items(), 1):
        for rate, accuracy in (("1e-4", 0.3), ("2e-4", 0.5), ("4e-4", 0.3)):
            for seed in range(3, 7):
                run = studies / "choices" / f"{name}_rate{rate}_seed{seed}"
                rows = [{"step": step, key: 2 * number * accuracy} for step in range(1, 61)]
                rows[30][key] = 9.0
                jsonl.write(run / "train_log.jsonl", rows)
                evaluation_of_end = {"step": 60, "accuracy": accuracy, "total_tokens": 100}
                before = evaluation_of_end | {"step": 0, "accuracy": 0.1}
                jsonl.write(run / "eval_log.jsonl", [before, evaluation_of_end])
                jsonl.write(run / "answers.jsonl", [evaluation(right(50))])
    (ax,) = figures.draw("entropy_by_iteration").axes
    labels = (
        "the 60-iteration baseline",
        "16 updates a batch",
        "expert iteration, 60 small rounds",
    )
    for number, label in enumerate(labels, 1):
        iterations, entropies = line_with_label(ax, label).get_xydata().T
        assert iterations.tolist() == list(range(1, 61))
        assert entropies == pytest.approx(number)


# --- What training changes ------------------------------------------------------------------------


def test_accuracy_by_level_is_that_of_the_problems_of_the_level(studies, monkeypatch):
    """After training the two models that learn solve just the problems of 2 and 3 steps."""
    monkeypatch.setitem(ArithmeticLoader.sizes, "test", 24)
    examples = sorted(ArithmeticLoader.read("test"), key=lambda example: example["id"])
    assert {example["level"] for example in examples} == {1, 2, 3, 4}
    checksum = checksum_of_questions(example["id"] for example in examples)
    learnt = evaluation([example["level"] in (2, 3) for example in examples], questions=checksum)
    nothing = evaluation([False for _ in examples], questions=checksum)
    for before in ("scaling/0.1m_before", "scaling/0.3m_before", "dynamics/before"):
        jsonl.write(studies / before / "answers.jsonl", [nothing])
    jsonl.write(studies / "scaling/3m_before/answers.jsonl", [nothing])
    for side in ("scaling/0.1m", "scaling/0.3m"):
        write_seeds(studies, side, [[nothing]])
    for side in ("dynamics/grpo", "scaling/3m"):
        write_seeds(studies, side, [[learnt], [learnt], [nothing]])

    before, after = figures.draw("levels").axes
    assert {line.get_label() for line in after.lines} == {"0.1m", "0.3m", "1m (the demo)", "3m"}
    expected = [[1, 0], [2, 2 / 3], [3, 2 / 3], [4, 0]]
    assert line_with_label(after, "3m").get_xydata() == pytest.approx(np.array(expected))
    assert line_with_label(after, "0.3m").get_ydata().tolist() == [0, 0, 0, 0]
    assert line_with_label(before, "3m").get_ydata().tolist() == [0, 0, 0, 0]

    write_seeds(studies, "scaling/3m", [[nothing | {"questions": 7}]])
    study_logs.read.cache_clear()
    with pytest.raises(ValueError, match="3m_seed0: not evaluated on the test problems"):
        figures.draw("levels")


def test_careful_curves_are_means_over_seeds(studies):
    """At the end 60 and 80 of 100 answers are right, and 1 and 3 of 4 hard steps are careful."""
    start = evaluation(right(20), careful=[0, 0], direct=[0, 4])
    ends = (
        evaluation(right(60), step=10, careful=[1, 1], direct=[0, 3]),
        evaluation(right(80), step=10, careful=[0, 3], direct=[1, 1]),
    )
    for side in ("dynamics/grpo", "dynamics/format", "dynamics/random"):
        write_seeds(studies, side, [[start, end] for end in ends], file="answers.jsonl")
    accuracy, careful = figures.draw("careful_curves").axes
    assert line_with_label(accuracy, "the demo").get_xydata().tolist() == [[0, 0.2], [10, 0.7]]
    assert line_with_label(careful, "random reward").get_xydata().tolist() == [[0, 0], [10, 0.5]]
    band = accuracy.collections[0].get_datalim(accuracy.transData)
    assert (band.y0, band.y1) == pytest.approx((0.2, 0.8))


def test_pass_at_k_is_that_of_the_table(studies):
    """Of 16 samples of two questions 1 and 0 are right before, and 16 and 8 after."""
    before = evaluation([i == 0 for i in range(32)], samples=16, n=32)
    after = evaluation([i < 24 for i in range(32)], samples=16, n=32)
    jsonl.write(studies / "dynamics/pass_before/answers.jsonl", [before])
    write_seeds(studies, "dynamics/grpo", [[after]], file="pass.jsonl")
    (ax,) = figures.draw("pass_at_k").axes
    before_training = line_with_label(ax, "before training")
    assert before_training.get_xdata().tolist() == [1, 2, 4, 8, 16]
    assert before_training.get_ydata() == pytest.approx([1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2])
    chances = line_with_label(ax, "the demo").get_ydata()
    # That both of two samples of the second question are wrong has the chance 8/16 x 7/15.
    assert chances[:2] == pytest.approx([0.75, (1 + 1 - 8 / 16 * 7 / 15) / 2])
    assert chances[4] == 1
    assert "| the demo, seed 0 | 75.0 [" in table.table("pass dynamics/grpo")


# --- Without training -----------------------------------------------------------------------------


def test_categories_are_stacked_to_all_completions(studies):
    row = {"n": 200, "count/format1_answer1": 20, "count/format1_answer0": 60}
    row["count/format0_answer0"] = 120
    for side in figures.ZERO_SHOT:
        jsonl.write(studies / side / "answers.jsonl", [])
        jsonl.write(studies / side / "eval_log.jsonl", [row])
    (ax,) = figures.draw("categories").axes
    bars = [container.patches[0] for container in ax.containers]
    assert [bar.get_x() for bar in bars] == pytest.approx([0, 0.1, 0.4])
    assert [bar.get_width() for bar in bars] == pytest.approx([0.1, 0.3, 0.6])
    assert texts_of(ax)[0] == "10%"


# --- The command ----------------------------------------------------------------------------------


def write_pass_logs(studies):
    row = evaluation([i < 4 for i in range(32)], samples=16, n=32)
    jsonl.write(studies / "dynamics/pass_before/answers.jsonl", [row])
    write_seeds(studies, "dynamics/grpo", [[row], [row]], file="pass.jsonl")


def test_equal_logs_give_equal_bytes(studies, tmp_path):
    write_pass_logs(studies)
    outputs = [tmp_path / "one.png", tmp_path / "two.png"]
    for output in outputs:
        assert figures.main(["pass_at_k", "--output", str(output)]) == 0
    first, second = [output.read_bytes() for output in outputs]
    assert first == second
    assert b"Software" not in first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("fores --output {}/a.png", "fores is none of forest, forest_choices, "),
        ("pass_at_k more --output {}/a.png", "pass_at_k: too many positional arguments"),
        ("pass_at_k --output {}/a.jpg", "its name must end in .pdf or .png"),
        ("pass_at_k --output {}/absent/a.png", "there is no folder"),
        ("careful_curves --output {}/a.png", "dynamics/grpo: no runs in"),
        ("forest other --output {}/a.png", "other is none of the studies compared: a"),
        ("forest --output {}/a.png", "none of the comparisons has been run"),
        ("forest_choices --output {}/a.png", "none of the comparisons has been run"),
        ("response Title --output {}/a.png", "response: missing a required argument"),
        ("response Title nosuch --output {}/a.png", "nosuch: "),
    ],
)
def test_a_mistake_is_one_clear_line(studies, tmp_path, capsys, arguments, message):
    (studies / "comparisons.txt").write_text("# head\na: Better?\n    a/new a/base\n", "utf-8")
    (studies / "choices").mkdir()
    (studies / "choices" / "comparisons.txt").write_text("# head\nclass:\n    new base\n", "utf-8")
    assert figures.main(arguments.format(tmp_path).split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line
    assert not list(tmp_path.glob("*.png"))


def test_a_command_without_output_ends_with_one_line(capsys):
    with pytest.raises(SystemExit) as exit_info:
        figures.main(["forest"])
    assert exit_info.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the following arguments are required: --output")


def test_seeds_evaluated_at_other_iterations_are_not_averaged(studies):
    seeds = [[evaluation(right(1), step=step)] for step in (0, 5)]
    write_seeds(studies, "dynamics/grpo", seeds, file="answers.jsonl")
    with pytest.raises(ValueError, match="its seeds were not evaluated at the same iterations"):
        figures.draw("careful_curves")


def test_the_head_of_the_program_lists_every_figure():
    for name in figures.FIGURES:
        assert f"    python experiments/figures.py {name} " in figures.__doc__
