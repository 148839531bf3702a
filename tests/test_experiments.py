"""The experiments' scripts, at tiny scale."""

import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat

import matplotlib.image
import numpy as np
import pytest
from conftest import ROOT, run_flags, run_script
from log_helpers import write_choice

import generate_gold
import main
import plotter
import sft
import utils
from experiments import archive, differences, figures, outcomes, study_logs, table
from flags import LOSS_TYPES
from logs import jsonl
from rl_datasets import ArithmeticLoader

sys.path.insert(0, str(ROOT / "experiments"))

import answers
import expert_iteration
from answers import checked_steps

PAGES = [ROOT / "analysis.md", ROOT / "README.md", *sorted(ROOT.glob("experiments/**/*.md"))]
TEXTS = {page: page.read_text("utf-8") for page in PAGES}
COMMANDS = re.findall(
    r"python ((?:plotter\.py --log_dir|experiments/figures\.py) .*--output \S+\.png)",
    "\n".join(TEXTS.values()),
)
DRAWING_PROGRAMS = {"plotter.py": plotter.main, "experiments/figures.py": figures.main}
FIGURES = [command.split()[-1] for command in COMMANDS]


@pytest.fixture(scope="module")
def logs():
    """The logs of all studies, where the commands on the pages read them."""
    archive.unpack_all()


def test_each_figure_of_a_study_has_its_command_and_the_other_way_round():
    shown = set()
    for page, text in TEXTS.items():
        for figure in re.findall(r"^!\[.+\]\((\S+)\)$", text, re.MULTILINE):
            shown.add(str((page.parent / figure).resolve().relative_to(ROOT)))
    screenshots = {"docs/tokens.png"}  # of a report, which is no figure of a study
    assert shown - screenshots <= set(FIGURES)
    committed = {str(path.relative_to(ROOT)) for path in ROOT.glob("experiments/**/*.png")}
    assert committed == set(FIGURES)
    assert len(FIGURES) == len(set(FIGURES)), "a figure has two commands"


def test_a_page_tells_to_unpack_the_logs_before_it_reads_them():
    for page, text in TEXTS.items():
        unpack = text.find("python experiments/archive.py unpack")
        plot = text.find("python plotter.py --log_dir experiments/")
        assert plot == -1 or -1 < unpack < plot, page


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=FIGURES)
def test_the_committed_figures_come_from_the_packed_logs(command, logs, tmp_path, monkeypatch):
    """The command is the one that a page prints, and a shell expands its patterns.

    The figures are compared as pictures, because fonts can differ.
    """
    monkeypatch.chdir(ROOT)
    shell = ["bash", "-c", f"printf '%s\\n' {command}"]
    words = subprocess.run(shell, capture_output=True, text=True).stdout.splitlines()
    program, *arguments, figure = words
    assert arguments[-1] == "--output"
    drawn = tmp_path / "figure.png"
    assert DRAWING_PROGRAMS[program]([*arguments, str(drawn)]) == 0
    drawn_pixels = matplotlib.image.imread(drawn)[..., :3]
    committed_pixels = matplotlib.image.imread(figure)[..., :3]
    assert drawn_pixels.shape == committed_pixels.shape
    assert np.abs(drawn_pixels - committed_pixels).mean() < 0.01


@pytest.mark.slow
def test_every_table_on_the_pages_is_what_its_command_prints():
    run = run_script("experiments/table.py", "check")
    assert run.returncode == 0, run.stdout + run.stderr


def write_study(folder, runs):
    """Write the files from which tables are made.

    runs is {name: (whether each test answer is right, accuracy on ten validation problems)}.
    """
    for name, (test_answers, accuracy) in runs.items():
        test_rows = [answer_row(f"test/{i}", right, 2 * i) for i, right in enumerate(test_answers)]
        validation_rows = [answer_row(f"validation/{i}", i < 10 * accuracy, 0) for i in range(10)]
        output = folder / "output" / name
        jsonl.write(output / "eval" / "step_000004.jsonl", validation_rows)
        # The order in the transcript does not matter.
        jsonl.write(output / "test" / "eval" / "step_000000.jsonl", test_rows[::-1])
        run = folder / name
        answers.main(output, run / "answers.jsonl")
        answers.main(output / "test", run / "test.jsonl")
        jsonl.write(run / "train_log.jsonl", [{"step": i, "kl": i} for i in range(1, 21)])
        jsonl.write_json(run / "args.json", {"args": {"learning_rate": 1e-4}})


def write_names(folder, names):
    folder.mkdir(exist_ok=True)
    jsonl.write_json(folder / "names.json", names)


def answer_row(question, right, length):
    return {
        "id": f"arithmetic/{question}",
        "prompt": "",
        "completion": "33 * 4 = 120 + 12 = 132",
        "correct_strict": right,
        "correct_flexible": True,
        "length": length,
    }


@pytest.fixture
def studies(tmp_path, monkeypatch):
    """A folder of two studies, of which table.py reads: b/new gains on a/base.

    Of every 8 questions seed 0 gains 3 and loses 1, seed 1 gains 3, seed 2 gains 2.
    """
    monkeypatch.setattr(study_logs, "STUDIES", tmp_path)
    write_names(tmp_path, {})
    base = [1, 1, 1, 1, 0, 0, 0, 0] * 8
    new_seeds = [
        [0, 1, 1, 1, 1, 1, 1, 0] * 8,
        [1, 1, 1, 1, 1, 1, 1, 0] * 8,
        [1, 1, 1, 1, 1, 1, 0, 0] * 8,
    ]
    a_runs = {f"base_rate1e-4_seed{seed}": (base, 0.5) for seed in range(3)}
    a_runs["base_rate2e-4_seed0"] = (new_seeds[0], 0.5)
    a_runs["base_rate4e-4_seed0"] = (new_seeds[0], 0.4)
    write_study(tmp_path / "a", a_runs)
    b_runs = {f"new_rate2e-4_seed{seed}": (right, 0.9) for seed, right in enumerate(new_seeds)}
    b_runs["new_rate1e-4_seed0"] = (base, 0.8)
    b_runs["new_rate10e-4_seed0"] = (base, 0.8)
    write_study(tmp_path / "b", b_runs)
    return tmp_path


def test_a_side_has_the_runs_at_its_best_rate(studies):
    runs = study_logs.runs_of("a/base")
    assert [run.name for run in runs] == [f"base_rate1e-4_seed{seed}" for seed in range(3)]
    assert study_logs.learning_rate_of(runs[0]) == "1e-4", "of equal rates it is the lowest"
    with pytest.raises(FileNotFoundError, match="c/new: no runs in"):
        table.table("ends c/new")


def test_two_sides_are_compared_question_by_question(studies):
    """By hand the gains are 25, 37.5 and 25 points."""
    difference = differences.compare_sides("b/new", "a/base")
    assert difference.by_seed.tolist() == [25, 37.5, 25]
    assert difference.mean == pytest.approx(100 * 7 / 24)
    # The three answers to a question stay together: of three they gain -1, 0, 0, 0, 3, 3, 2, 0.
    error = 100 * np.std([-1, 0, 0, 0, 3, 3, 2, 0]) / 3 / np.sqrt(64)
    half_width = (difference.question_high - difference.question_low) / 2
    assert half_width == pytest.approx(1.96 * error, rel=0.1)
    assert difference.question_low < difference.mean < difference.question_high
    # The seeds' standard deviation is 12.5 / sqrt(3); Student's 97.5 % point is 4.303.
    assert difference.half_width == pytest.approx(4.303 * 12.5 / 3, abs=0.01)
    assert difference.verdict == "significant"


@pytest.mark.parametrize(
    ("seeds", "low", "high", "detectable", "verdict"),
    [
        # One seed makes the difference.
        ([1.1, 6.1, 0.9], 1.9, 3.4, 9.5, "not significant (all seeds agree)"),
        # The interval over questions contains 0.
        ([1.0, 1.1, 0.9], -0.96, 2.96, 2.8, "not significant (all seeds agree)"),
        ([9.0, 9.0, -1.0], 1.0, 3.0, 18.7, "not significant"),  # 5.6 x 10 / 3
        ([8.0, 8.0, -2.0, -2.0], 1.0, 5.0, 12.4, "not significant"),  # 4.3 x 10 / 12**0.5
        ([-4.0, -4.1, -3.9], -5.0, -3.0, 1.4, "significant"),  # 2.8 x 2 / 3.92
    ],
)
def test_verdicts(seeds, low, high, detectable, verdict):
    difference = differences.Difference(np.array(seeds), low, high)
    assert difference.verdict == verdict
    assert difference.detectable == pytest.approx(detectable, abs=0.05)


def test_tables_of_a_study(studies):
    comparisons = studies / "comparisons.txt"
    comparisons.write_text("# head\nb: Is it better?\n    b/new   a/base\n", "utf-8")
    row = "| Is it better? | b/new | a/base | +25.0, +37.5, +25.0 | +29.2 ["
    assert row in table.table("compare b")
    assert "| b/new | 80.0 | **90.0** | 80.0 |" in table.table("rates b")
    cells = table.table("ends b/new").splitlines()[2].split(" | ")
    assert cells[1] == "2e-4"
    assert cells[3:6] == ["79.2", "100.0, 100.0, 100.0", "63, 63, 63"]
    assert "| a/base | 15.5, 15.5, 15.5 |" in table.table("metrics kl -- a/base")
    assert "| a/base | 3 -> 18, 3 -> 18, 3 -> 18 |" in table.table("change kl -- a/base")


def test_flags_that_differ_between_seeds_are_all_in_the_table(studies):
    jsonl.write_json(studies / "a/base_rate1e-4_seed2/args.json", {"args": {"num_examples": 10}})
    assert table.rows_of("flags learning_rate num_examples -- a/base")[1] == (
        "a/base",
        "0.0001, None",
        "None, 10",
    )


def test_completions_of_one_prompt_and_the_most_frequent_one(studies):
    for seed, last in enumerate(["same", "other", "a | b"]):
        transcripts = studies / f"a/base_rate1e-4_seed{seed}" / "eval"
        first_rows = [{"id": "p/0", "completion": f"first {seed}"}]
        last_rows = [{"id": f"p/{i}", "completion": text} for i, text in enumerate([last] * 2)]
        jsonl.write(transcripts / "step_000000.jsonl", first_rows)
        jsonl.write(transcripts / "step_000020.jsonl", [*last_rows, {"id": "q", "completion": "x"}])
    side = "a/base_rate1e-4"
    rows = table.rows_of(f"completions p/0 {side}")
    assert rows[1:3] == ((f"{side}, seed 0", "0", "first 0"), (f"{side}, seed 0", "20", "same"))
    assert rows[-1] == (f"{side}, seed 2", "20", "a &#124; b")
    assert table.rows_of(f"texts {side}")[1] == (f"{side}, seed 0", "2", "3", "same")
    with pytest.raises(ValueError, match="step_000000.jsonl: no completion of p/2"):
        table.table(f"completions p/2 {side}")


def test_answers_that_are_wrong_although_each_step_is_right(studies):
    """Of four answers with right steps one is to a problem of one step, and one has no step."""
    answers = [
        (2, "33 * 4 = 132\n132 - 33 = 99", True),
        (3, "33 * 4 = 132\n132 - 32 = 100", False),  # with a number that is not the question's
        (2, "33 * 4 = 131", False),
        (1, "33 * 4 = 132", True),
        (2, "The answer is 7.", True),
    ]
    rows = []
    for level, completion, is_right in answers:
        rows.append({"level": level, "completion": completion, "correct_flexible": is_right})
    jsonl.write(studies / "a/base_rate1e-4_seed1/eval/step_000020.jsonl", rows)
    row = ("a/base_rate1e-4, seed 1, 20", "4", "2", "1")
    assert table.rows_of("planning a/base_rate1e-4_seed1")[1:] == (row,)


def test_steps_are_counted_by_operator(studies):
    """Two careful products, one of them right, a direct one, and an easy sum."""
    texts = ["33 * 4 = 120 + 12 = 132\n33 * 4 = 130", "1 + 1 = 2\n33 * 4 = 120 + 12 = 133"]
    rows = [{"completion": text} for text in texts]
    jsonl.write(studies / "a/base_rate1e-4_seed1/eval/step_000020.jsonl", rows)
    cells = {row[0]: row[1:] for row in table.rows_of("operators a/base_rate1e-4_seed1")[1:]}
    assert cells["a/base_rate1e-4, seed 1, 20, *"] == ("3", "66.7", "1 of 2", "0 of 1")
    assert cells["a/base_rate1e-4, seed 1, 20, +"] == ("0", "", "0 of 0", "0 of 0")


def test_solutions_of_a_teacher_are_counted_by_format_and_answer(studies):
    """The right solution has two steps with easier pieces, and writes one of them carefully."""
    in_format = "<reasoning>\n{}\n</reasoning>\n<answer>\n1\n</answer>"
    steps = "33 * 4 = 120 + 12 = 132\n132 - 33 = 99"
    rows = [
        {"completion": in_format.format(steps), "correct": True},
        {"completion": in_format.format("33 * 4 = 100"), "correct": False},
        {"completion": "The answer is 1.", "correct": False},
        {"completion": "1", "correct": False},
    ]
    jsonl.write(studies / "a" / "teacher.jsonl", rows)
    _, right, wrong, outside = table.rows_of("solutions a/teacher.jsonl")
    assert right[:2] == ("right, in the format", "1")
    assert right[3:] == ("1", "0", "50.0")
    assert wrong[3:] == ("1", "1", "0.0")
    assert outside[1] == "2"
    assert outside[2].startswith("50.0 [")
    assert outside[3:] == ("0", "0", "none")


def test_tables_of_the_levels_of_problems(studies):
    """Of two seeds 9 of 18 and 6 of 8 steps are right, that is 50 and 75 %."""
    steps = ({"easy": [1, 2], "direct": [0, 4], "careful": [8, 12]}, {"careful": [6, 8]})
    for seed, kinds in enumerate(steps):
        run = studies / "a" / f"base_rate1e-4_seed{seed}"
        (evaluation,) = jsonl.read(run / "answers.jsonl")
        row = evaluation | {"easy": [0, 0], "direct": [0, 0]} | kinds
        jsonl.write(run / "answers.jsonl", [row | {"step": 0}, row | {"step": 20}])
        levels = {f"accuracy_level/{level}": level / 10 for level in (1, 2, 3, 4)}
        rows = [{"step": 0, "reward": 1} | levels]
        rows += [{"step": 20, "reward": 2} | levels | {"accuracy_level/3": 0.9}]
        jsonl.write(run / "eval_log.jsonl", rows)
    shutil.rmtree(studies / "a" / "base_rate1e-4_seed2")
    study_logs.read.cache_clear()
    assert "| a/base | 10.0 -> 10.0, 10.0 -> 10.0 |" in table.table("levels a/base")
    assert "| 30.0 -> 90.0, 30.0 -> 90.0 |" in table.table("levels a/base")
    head, _, row = table.table("evaluations reward a/base").splitlines()
    assert head == "| reward, each seed, at | 0 | 20 |"
    assert row == "| a/base | 1, 1 | 2, 2 |"
    *_, last = table.table("expected a/base").splitlines()
    # Both seeds have 5 of the 10 validation questions right. At level 2 we expect the mean of 50 %
    # of 50 % and 75 % of 75 %, and so on.
    assert last == "| a/base, 20 | 62.5 | 62.5 | 40.6 | 27.3 | 18.9 | 37.4 | 50.0 |"


@pytest.mark.parametrize(
    "command, message",
    [
        ("metrics entropy -- a/base", "base_rate1e-4_seed0/train_log.jsonl: no number under entro"),
        ("change kl entropy -- a/base", "no number under entropy; it has step, kl$"),
        ("metrics kl a/base", "keys, then --, then sides"),
        ("curve", "curve: missing a required argument: 'key'"),
        ("curve a/base", "curve a/base: the key is none of strict, flexible"),
        ("evaluations loss a/base", "No such file"),
        ("cases", "missing a required argument"),
        ("cases one two", "too many"),
        ("cases a/base_rate1e-4_seed0/train_log.jsonl", 'line 1: not an object with "category"'),
        ("judge a/base_rate1e-4_seed0/args.json", "args.json: not the report of a judge"),
        ("exchange", "missing a required argument"),
        ("ends", "ends: the table has no rows"),
        ("compare b other", "^other is none of the studies compared: b$"),
        ("rates b absent", "^absent: no runs"),
        ("texts a/base", "base_rate1e-4_seed0: no transcripts"),
        ("ends a/empty", "empty_seed0/test.jsonl: no evaluation in it"),
        ("curve strict a/empty", 'empty_seed0/answers.jsonl, line 1: not an object with "n"'),
        ("exchange a/empty a/base", 'not an object with "n"'),
        ("expert_iterations a/base", 'train_log.jsonl, line 1: not an object with "ei_step"'),
        # The interval over seeds was printed as [+nan, +nan].
        ("difference a/base_rate1e-4_seed0 b/new_rate2e-4_seed0", "have one run each"),
    ],
)
def test_a_mistake_in_a_tables_arguments_is_one_clear_line(studies, command, message):
    (studies / "comparisons.txt").write_text("# head\nb: Better?\n    b/new   a/base\n", "utf-8")
    jsonl.write(studies / "a/empty_seed0/answers.jsonl", [{"step": 0}])
    jsonl.write(studies / "a/empty_seed0/test.jsonl", [])
    jsonl.write(studies / "a/empty_seed0/train_log.jsonl", [])
    with pytest.raises((ValueError, OSError), match=message) as error:
        table.table(command)
    assert "\n" not in str(error.value)


def test_the_best_rate_is_chosen_among_runs_that_have_one(studies):
    with pytest.raises(ValueError, match="no runs to choose from"):
        table.main("best")
    with pytest.raises(ValueError, match="no learning rate in its name"):
        table.main("best", str(studies / "a/base_rate1e-4_seed0"), str(studies / "a"))
    with pytest.raises(ValueError, match="check takes --write or nothing, not --wirte"):
        table.main("check", "--wirte")


def test_rows_without_a_metric_do_not_count(studies):
    """The first iteration can lack a metric that later ones have."""
    for run in studies.glob("a/base_rate1e-4_seed?"):
        rows = [{"step": i} if i < 6 else {"step": i, "kl": i} for i in range(1, 11)]
        jsonl.write(run / "train_log.jsonl", rows)
    study_logs.read.cache_clear()
    assert "| a/base | 8, 8, 8 |" in table.table("metrics kl -- a/base")
    assert "| a/base | none -> 8, none -> 8, none -> 8 |" in table.table("change kl -- a/base")


def test_a_comparison_waits_for_all_seeds(studies):
    (studies / "comparisons.txt").write_text("# head\nc: Later?\n    c/new   a/base\n", "utf-8")
    waiting = "| Later? | c/new | a/base |  |  |  | not run yet |\n"
    assert table.table("compare").endswith(waiting)
    write_study(studies / "c", {"new_seed0": ([1] * 64, 0.5)})
    assert table.table("compare").endswith(waiting), "one of three seeds is there"


def test_choices_are_compared_at_the_best_rate_of_each(tmp_path, monkeypatch):
    """The tops of the parabolas are 50 % at a rate of 2 and 60 % at 4; seeds shift both alike."""
    monkeypatch.setattr(study_logs, "STUDIES", tmp_path)
    write_names(tmp_path, {"choices/base": ["the baseline", "#0072B2"]})
    (tmp_path / "choices").mkdir()
    lines = ["# explained", "some class:", "    other    base", "    late    base"]
    lines += ["another class:", "    dynamic_sampling    base"]
    (tmp_path / "choices" / "comparisons.txt").write_text("\n".join(lines))

    def noise(seed):
        return 0.002 * (seed - 4)

    def base(x, seed):
        return 0.5 - 0.02 * (x - 1) ** 2 + noise(seed)

    def other(x, seed):
        return 0.6 - 0.02 * (x - 2) ** 2 + 2 * noise(seed)

    write_choice(tmp_path, "base", ["1", "2", "4"], base)
    write_choice(tmp_path, "other", ["2", "4", "8"], other)
    write_choice(tmp_path, "late", ["1", "2"], base)  # a rate is missing
    # It samples twice as many tokens. So in seed 4 its accuracy is 40 % at the tokens of base's
    # last evaluation, and 20 % at those of the first: 30 % in the mean, where base has 50 %.
    write_choice(tmp_path, "dynamic_sampling", ["1", "2", "4"], base, tokens_per_step=200)
    rows = [line.strip("| ").split(" | ") for line in table.table("choices").splitlines()[2:]]
    of_other, late, dynamic = rows
    assert late[1:3] == ["choices/late", "the baseline"] and late[5] == "not run yet"
    assert of_other[1:3] == ["choices/other (4e+0)", "the baseline (2e+0)"]
    assert of_other[3] == "+9.8, +10.0, +10.2, +10.4"
    assert of_other[4] == of_other[6]
    assert of_other[5] == "significant"
    assert [float(points) for points in dynamic[3].split(", ")] == pytest.approx(
        [-20] * 4, abs=0.15
    )
    assert dynamic[6] == "+0.0 [-inf, +inf]", "equal runs say nothing of an error"
    assert "| -9.8, -10.0, -10.2, -10.4 | -10.1 [" in table.table("choice base other")
    assert "| +9.8, +10.0, +10.2, +10.4 | +10.1 [" in table.table("choice other base")
    rates_and_means = "1e+0, 2e+0, 4e+0 | 48.1, 50.1, 48.1 | 2e+0 | 50.1"
    response = f"| the baseline | {rates_and_means} | 49.8, 50.0, 50.2, 50.4 |"
    assert response in table.table("response base")
    for command in ("response late", "arms accuracy -- late", "spread accuracy -- nosuch"):
        with pytest.raises(ValueError, match="has no finished first look of an arm"):
            table.table(command)
    for seed in range(3, 7):
        values = [6 + seed / 10] * 5 + [100] * 15 + [1, 1, 2, 3, 3]  # the last have a variance of 1
        rows = [{"number": value, "accuracy": 0.5} for value in values]
        jsonl.write(tmp_path / "choices" / f"base_rate2_seed{seed}" / "train_log.jsonl", rows)
    study_logs.read.cache_clear()
    outcomes.read.cache_clear()
    # Three of ten answers are right, and one of four hard steps is careful.
    of_base, of_other = table.rows_of("arms number accuracy -- base other")[1:]
    assert of_base == ("the baseline", "2e+0", "50.1", "30.0", "25.0", "6.45 -> 2", "0.5 -> 0.5")
    assert of_other[5] == "none -> none"
    with pytest.raises(ValueError, match="no arm has a number under entropie"):
        table.table("arms number entropie -- base other")
    assert "| the baseline | 0.50, 0.50, 0.50, 0.50 |" in table.table("spread number -- base")


def test_a_second_look_at_an_undecided_comparison(tmp_path, monkeypatch):
    """The top of the parabola is at a rate of 2 ** 1.25, and new seeds have the rates 2 and 4."""
    monkeypatch.setattr(study_logs, "STUDIES", tmp_path)
    monkeypatch.setattr(outcomes, "SECOND_SEEDS", range(7, 11))
    write_names(tmp_path, {})
    (tmp_path / "choices").mkdir()
    lines = ["# explained", "class:", "    new    base", "    clear    base"]
    (tmp_path / "choices" / "comparisons.txt").write_text("\n".join(lines))

    def base(x, seed):
        return 0.5 - 0.02 * (x - 1) ** 2 + 0.01 * (seed % 5 - 2)

    def new(x, seed):
        return 0.5 - 0.02 * (x - 1.25) ** 2 + (0.02 if seed > 4 else -0.02)

    write_choice(tmp_path, "base", ["1", "2", "4"], base)
    write_choice(
        tmp_path, "clear", ["1", "2", "4"], lambda x, seed: base(x, seed) - 0.3 - seed / 1e4
    )
    write_choice(tmp_path, "new", ["1", "2", "4"], new)
    undecided, clear = table.rows_of("choices")[1:]
    assert undecided[5] == "undecided"
    assert clear[5] == "significant"

    write_choice(tmp_path, "new", ["2", "4"], new, seeds=range(7, 10))
    assert table.rows_of("choices")[1:] == (undecided, clear), "the new seeds are not finished"
    write_choice(tmp_path, "new", ["2", "4"], new, seeds=[10])
    write_choice(tmp_path, "base", ["2", "4"], base, seeds=range(7, 11))
    second_look, same = table.rows_of("choices")[1:]
    assert second_look[3].split(", ") == [
        *("-3.0", "-4.0", "+4.0", "+3.0"),  # base has seed % 5 - 2 points more
        *("+2.0", "+1.0", "+0.0", "+4.0"),
    ]
    assert same == clear, "a verdict of the first look stays"
    write_choice(tmp_path, "new", ["1"], new, seeds=range(7, 11))
    with pytest.raises(ValueError, match="new: the second look needs two rates around 2.38"):
        table.rows_of("choices")


def test_a_run_is_what_its_name_says(tmp_path, monkeypatch):
    monkeypatch.setattr(study_logs, "STUDIES", tmp_path)
    runs = {"a_rate2e-4_seed1": (2e-4, 1), "b_rate2e-4_seed1": (1e-4, 1), "c_seed2": (1e-4, 3)}
    for name, (rate, seed) in runs.items():
        flags = {"learning_rate": rate, "seed": seed}
        (tmp_path / "study" / name).mkdir(parents=True)
        jsonl.write_json(tmp_path / "study" / name / "args.json", {"args": flags})
    b, c = study_logs.misnamed_runs()
    assert b.endswith("b_rate2e-4_seed1/args.json: learning_rate is 0.0001")
    assert c.endswith("c_seed2/args.json: seed is 3")


def test_sides_have_names(studies):
    write_names(studies, {"b/new": ["the new one", "#0072B2"]})
    study_logs.read_names.cache_clear()
    assert "| the new one | 80.0 |" in table.table("rates b")
    assert study_logs.name_of("b/new_rate1e-4") == "the new one at 1e-4"
    assert study_logs.name_of("b/newer_rate1e-4") == "b/newer_rate1e-4"


def test_an_exchange_rate_is_where_the_curve_first_is_as_high(tmp_path, monkeypatch):
    """Of the same ten questions one seed has 0, 5, 9 and 8 right, and the other 0, 3, 3 and 8.

    Their mean is 0, 4, 6 and 8, so it reaches 5 at iteration 15. It has passed 3 when it is first
    evaluated, so that three examples are worth less than 10 iterations. It never reaches 9, though
    one of the seeds does.
    """
    monkeypatch.setattr(study_logs, "STUDIES", tmp_path)
    monkeypatch.setattr(study_logs, "read", jsonl.read)
    write_names(tmp_path, {})
    accuracies = {"three": 0.3, "ten": 0.5, "most": 0.9, "all": 1.0}
    for side, accuracy in accuracies.items():
        write_study(tmp_path / "sft", {f"{side}_seed0": ([1], accuracy)})
    for side, num_examples in (("three", 3), ("ten", 10), ("most", None), ("all", None)):
        flags = {"num_examples": num_examples}
        jsonl.write_json(tmp_path / "sft" / f"{side}_seed0" / "args.json", {"args": flags})
    # Without --num_examples all examples of the epoch count.
    for side in ("most", "all"):
        jsonl.write(tmp_path / "sft" / f"{side}_seed0" / "train_log.jsonl", [{"examples": 300}])
    curves = [("400", "7e0", "7fe", "7fc"), ("400", "780", "780", "7fc")]
    for seed, curve in enumerate(curves):
        write_study(tmp_path / "rl", {f"grpo_seed{seed}": ([1], 0.5)})
        path = tmp_path / "rl" / f"grpo_seed{seed}" / "answers.jsonl"
        (evaluation,) = jsonl.read(path)
        rows = []
        for step, strict in zip((0, 10, 20, 30), curve, strict=True):
            rows.append(evaluation | {"step": step, "strict": strict})
        jsonl.write(path, rows)
    command = "exchange rl/grpo sft/three sft/ten sft/most sft/all"
    _, _, three, ten, most, all_ = table.table(command).splitlines()
    assert three == "| sft/three | 30.0 | < 10 | < 10, < 10 | < 3.3 |"
    assert ten == "| sft/ten | 50.0 | 15 | < 10, 24 | 1.5 |"
    assert most == "| sft/most | 90.0 | > 30 | 20, > 30 | > 0.067 |"
    assert all_ == "| sft/all | 100.0 | > 30 | > 30, > 30 | > 0.1 |"


def test_an_expected_accuracy_is_the_product_over_the_steps(studies):
    """Half of the answers have steps. Each of these has two hard steps and one easy step.

    Of the hard ones 75 % are right, and of the easy ones 50 %: 0.5 x 0.75^2 x 0.5.
    """
    for run in studies.glob("a/base_rate1e-4_seed?"):
        (evaluation,) = jsonl.read(run / "test.jsonl")
        assert evaluation["n"] == 64
        counts = {"with_steps": 32, "easy": [16, 32], "direct": [12, 24], "careful": [36, 40]}
        jsonl.write(run / "test.jsonl", [evaluation | counts])
    row = "| a/base | 50.0 | 2.00 | 75.0 | 1.00 | 50.0 | 14.1 | 50.0 |"
    assert row in table.table("steps a/base")


def test_tables_of_expert_iteration(studies):
    """Two expert iterations of 2 updates and 1. Steps are those of greedy answers on validation.

    At the start 9 of 10 careful steps are right, and 9 of 30 direct ones, so that half of the right
    ones are careful. After the first expert iteration 3 of 12 right steps are careful.
    """
    steps = (
        {"step": 0, "careful": [9, 10], "direct": [9, 30]},
        {"step": 2, "careful": [3, 4], "direct": [9, 12]},
        {"step": 3, "careful": [0, 0], "direct": [8, 8]},
    )
    updates = [
        {"step": 1, "ei_step": 1, "kept": 7, "entropy": 0.4},
        {"step": 2, "ei_step": 1, "kept": 7, "entropy": 0.3},
        {"step": 3, "ei_step": 2, "kept": 5, "entropy": 0.2},
    ]
    for run in studies.glob("a/base_rate1e-4_seed?"):
        (evaluation,) = jsonl.read(run / "answers.jsonl")
        jsonl.write(run / "answers.jsonl", [evaluation | counts for counts in steps])
        jsonl.write(run / "train_log.jsonl", updates)
    study_logs.read.cache_clear()
    before, first, second = table.rows_of("expert_iterations a/base")[1:]
    assert before == ("a/base, 0", "50.0, 50.0, 50.0", "50.0", "", "", "")
    assert first[3:] == ("7, 7, 7", "2, 2, 2", "0.400 -> 0.300")
    assert second[3:] == ("5, 5, 5", "1, 1, 1", "0.200 -> 0.200")
    before, first, second = table.rows_of("selection a/base_rate1e-4")[1:]
    assert before == ("a/base_rate1e-4, 0", "90.0", "30.0", "25.0", "")
    assert first[3:] == ("25.0", "50.0")
    assert second[1:] == ("none", "100.0", "0.0", "25.0")


def test_pages_that_do_not_say_what_the_logs_say_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(study_logs, "STUDIES", tmp_path / "experiments")
    monkeypatch.setattr(table, "ROOT", tmp_path)
    study = tmp_path / "experiments" / "a"
    write_names(study.parent, {})
    write_study(study, {"base_seed0": ([1, 0], 0.5)})
    page = tmp_path / "analysis.md"
    command = "    python experiments/table.py curve strict a/base"
    source = "<!--curve strict a/base: 4-->"
    prose = f"At `--beta 0.04` (arXiv:2506.10947) 50.0 %{source}.\n"
    page.write_text(f"\n{command}\n\n| old |\n\n{prose}", "utf-8")
    with pytest.raises(ValueError, match="^analysis.md: a table is not what the logs say"):
        table.check()
    table.check("--write")
    assert "| a/base | 50.0 |\n\nAt" in page.read_text("utf-8")
    table.check()
    page.write_text(page.read_text("utf-8") + "But 49.9 %.\n", "utf-8")
    with pytest.raises(ValueError, match="^analysis.md: 49.9 has no source$"):
        table.check()


@pytest.mark.parametrize(
    "name, accuracies, kind",
    [
        ("rates/base_rate2e-4_seed0", (0.25, 0.7), "healthy"),
        ("rates/base_rate2e-4_seed0", (0.25, 0.69), "in between"),
        ("rates/base_rate2e-4_seed0", (0.25, 0.9, 0.8), "failed otherwise"),
        ("rates/base_rate2e-4_seed0", (0.25, 0.28), "failed otherwise"),
        ("sft_then_grpo/careful100_rate1e-4_seed0", (0.88, 0.89), "healthy"),
        ("rates/base_rate1e-3_seed0", (0.25, 0.9), "made to go wrong"),
        ("judge/beta0.04_seed1", (0.25, 0.9), "made to go wrong"),
    ],
)
def test_runs_are_sorted_by_how_they_ended(name, accuracies, kind):
    rows = [{"accuracy": accuracy} for accuracy in accuracies]
    assert study_logs.kind_of_run(name, rows) == kind


def test_runs_that_were_made_after_the_rules_are_counted_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(study_logs, "STUDIES", tmp_path)
    for name, last in (("rates/base", 0.9), ("choices/base", 0.3), ("choices/beta0", 0.95)):
        run = tmp_path / f"{name}_rate2e-4_seed3"
        jsonl.write(run / "train_log.jsonl", [{"step": 1, "zero_std_fraction": 0.0}])
        jsonl.write(run / "eval_log.jsonl", [{"accuracy": 0.2}, {"accuracy": last}])
        jsonl.write_json(run / "args.json", {"args": {}})
    assert [kind for kind, _ in study_logs.grpo_runs()] == ["healthy"]
    assert [kind for kind, _ in study_logs.grpo_runs("choices")] == ["in between", "healthy"]
    with pytest.raises(FileNotFoundError, match="no runs in .*/nonsense"):
        list(study_logs.grpo_runs("nonsense"))


def test_steps_of_arithmetic_are_checked():
    assert checked_steps("3 * 4 = 12\n25% of 40 = 10\n1/4 of 40 = 11\n6 / 0 = 6\n") == [
        ("easy", True),
        ("direct", True),
        ("direct", False),
        ("easy", False),
    ]
    text = "so 3 + 4 = 7\n7 / 2 = 3\n10 - 4 = 6"  # a step is a whole line
    assert checked_steps(text) == [("easy", False), ("easy", True)]
    text = "47 + 38 = 70 + 15 = 85\n85 - 38 = 85 - 30 - 8 = 55 - 8 = 46\n"
    text += "25% of 80 = 80 / 4 = 20\n1 + 1 = 2 = \n2 + 2 == 4\n7 + 1 = 8 = 8"
    assert checked_steps(text) == [
        ("careful", True),
        ("careful", False),
        ("careful", True),
        ("easy", True),
    ]


def test_steps_of_hostile_completions_are_checked():
    """Huge numbers once took for ever, and division by zero raised."""
    lines = [
        f"25% of {'9' * 400} = 5",
        f"{'9' * 5000} / 3 = 5",
        "1/0 of 5 = 5",
        " = " * 9999,
        "1" + " = 1" * 9999,
    ]
    assert checked_steps("\n".join(lines)) == [("easy", False)]
    assert checked_steps("100000000001 / 1 = 100000000000") == [("easy", False)], "no rounding"


def test_what_a_run_changed_is_said_in_words(tmp_path, capsys):
    """Two questions are learnt, one with a careful step; control characters are not printed."""
    answer = {
        "id": "arithmetic/1",
        "prompt": "form\n<|user|>\nHow many?<|end|>",
        "completion": "\x1b\n33 - 11 = 1",
        "length": 5,
        "correct_strict": False,
        "correct_flexible": False,
    }
    first_evaluation = [
        answer,
        answer | {"id": "arithmetic/2", "correct_strict": True},
        answer | {"id": "arithmetic/3", "prompt": "Why?"},
    ]
    learnt = {
        "completion": "33 * 4 = 120 + 12 = 132\n132 + 1 = 134",
        "length": 20,
        "correct_strict": True,
    }
    last_evaluation = [
        answer | learnt,
        first_evaluation[1],
        first_evaluation[2] | {"correct_strict": True},
    ]
    with pytest.raises(ValueError, match="no evaluations in its eval/"):
        answers.main(tmp_path)
    jsonl.write(tmp_path / "eval" / "step_000000.jsonl", first_evaluation)
    with pytest.raises(ValueError, match="has not two evaluations"):
        answers.main(tmp_path)
    jsonl.write(tmp_path / "eval" / "step_000009.jsonl", last_evaluation)
    answers.main(tmp_path)
    printed = capsys.readouterr().out
    for line in (
        "mean tokens of a completion  5.0 -> 10.0",
        "completions with steps  3 of 3 (100%) -> 3 of 3 (100%)",
        "right steps  0 of 3 (0%) -> 1 of 4 (25%)",
        "careful, of the steps that could be  0 of 3 (0%) -> 1 of 4 (25%)",
        "right, of careful steps  0 of 0 -> 1 of 1 (100%)",
        "right, of direct steps  0 of 3 (0%) -> 0 of 3 (0%)",
    ):
        assert f"\n{line}\n" in printed
    assert printed.endswith(
        "Of the 2 questions that were wrong and are right, the one with the most careful steps:\n"
        "\nHow many?\n"
        "\n--- step_000000\n?\n33 - 11 = 1\n"
        "\n--- step_000009\n33 * 4 = 120 + 12 = 132\n132 + 1 = 134\n"
    )


@pytest.fixture
def packed_study(tmp_path, monkeypatch):
    """The folder of a study that was packed, with its runs and its page."""
    monkeypatch.setattr(archive, "STUDIES", tmp_path)
    folder = tmp_path / "a"
    (folder / "base_seed0" / "eval").mkdir(parents=True)
    (folder / "base_seed0" / "args.json").write_bytes(b'{"rate": 1}\r\n')
    (folder / "base_seed0" / "eval" / "step_000001.jsonl").write_bytes(bytes(range(256)))
    (folder / "cases.jsonl").write_text("{}\n", "utf-8")
    (folder / "README.md").write_text("page", "utf-8")
    archive.pack("a")
    return folder


def files_in(folder):
    """{path: content} of the files that are not hidden, without the archive."""
    files = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.startswith(".") and path.name != archive.ARCHIVE:
            files[str(path.relative_to(folder))] = path.read_bytes()
    return files


def remove_runs(folder):
    """Leave what a clone has: the page and the archive."""
    shutil.rmtree(folder / "base_seed0")
    (folder / "cases.jsonl").unlink()
    (folder / archive.STAMP).unlink()


def test_a_study_is_packed_and_unpacked_byte_for_byte(packed_study):
    files = files_in(packed_study)
    assert len(files) == 4
    remove_runs(packed_study)
    (packed_study / "README.md").write_text("a newer page", "utf-8")
    assert archive.main(["unpack"]) == 0
    assert files_in(packed_study) == files | {"README.md": b"a newer page"}


def test_the_same_runs_give_the_same_archive(packed_study):
    packed = (packed_study / archive.ARCHIVE).read_bytes()
    os.utime(packed_study / "base_seed0" / "args.json", (1, 1))
    (packed_study / "base_seed0" / "args.json").chmod(0o600)
    assert archive.main(["pack"]) == 0
    assert (packed_study / archive.ARCHIVE).read_bytes() == packed


def test_a_study_is_unpacked_once(packed_study):
    """A run that was changed later must not be lost, and the archive is not even read again."""
    remove_runs(packed_study)
    archive.unpack("a")
    args = packed_study / "base_seed0" / "args.json"
    args.write_text("changed", "utf-8")
    (packed_study / archive.ARCHIVE).unlink()
    archive.unpack("a")
    assert args.read_text("utf-8") == "changed"


def test_a_newer_archive_replaces_the_runs_of_the_older_one(packed_study):
    """As after a git pull. A run that is not in the archive stays."""
    (packed_study / archive.STAMP).write_text("the checksum of an older archive", "utf-8")
    (packed_study / "base_seed0" / "old.json").write_text("{}", "utf-8")
    (packed_study / "mine_seed0").mkdir()
    archive.unpack("a")
    assert not (packed_study / "base_seed0" / "old.json").exists()
    assert (packed_study / "mine_seed0").exists()


def test_a_damaged_archive_is_refused(packed_study, capsys):
    remove_runs(packed_study)
    files = files_in(packed_study)
    path = packed_study / archive.ARCHIVE
    packed = path.read_bytes()
    path.write_bytes(packed[:-1] + bytes([packed[-1] ^ 1]))
    assert archive.main(["unpack", "a"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert str(path) in error and "checksum" in error
    assert files_in(packed_study) == files
    path.unlink()
    assert archive.main(["unpack", "a"]) == 2
    assert archive.main(["unpack", "unknown"]) == 2


def test_an_unsafe_archive_is_refused(packed_study, capsys):
    """A file of the archive could otherwise be written outside the folder of the study."""
    remove_runs(packed_study)
    files = files_in(packed_study)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as unsafe:
        unsafe.addfile(tarfile.TarInfo("run/args.json"))
        unsafe.addfile(tarfile.TarInfo("../../outside"))
    (packed_study / archive.ARCHIVE).write_bytes(packed.getvalue())
    archive.write_checksum("a", hashlib.sha256(packed.getvalue()).hexdigest())
    assert archive.main(["unpack", "a"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "outside" in error
    assert files_in(packed_study) == files
    assert not (packed_study.parent.parent / "outside").exists()
    assert not (packed_study / archive.TEMPORARY).exists()


def test_several_processes_unpack_at_the_same_time(packed_study, monkeypatch):
    """As two pytest workers do on a fresh clone: one of them unpacks, and the others wait.

    Threads stand for the processes here, because a lock belongs to an open file.
    """
    files = files_in(packed_study)
    opened = []
    open_archive = tarfile.open

    def counting_open(*args, **kwargs):
        opened.append(kwargs)
        return open_archive(*args, **kwargs)

    monkeypatch.setattr(tarfile, "open", counting_open)
    for _ in range(20):
        remove_runs(packed_study)
        opened.clear()
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(archive.unpack, ["a"] * 4))
        assert files_in(packed_study) == files
        assert len(opened) == 1


def test_packing_does_not_lose_runs_that_were_not_unpacked(packed_study, capsys):
    remove_runs(packed_study)
    (packed_study / "new_seed0").mkdir()
    (packed_study / "new_seed0" / "args.json").write_text("{}", "utf-8")
    packed = (packed_study / archive.ARCHIVE).read_bytes()
    assert archive.main(["pack", "a"]) == 2
    assert "unpack a" in capsys.readouterr().err
    assert (packed_study / archive.ARCHIVE).read_bytes() == packed


def test_every_study_has_an_archive_with_its_checksum():
    studies = set()
    for script in ROOT.glob("experiments/*/run.sh"):
        page = (script.parent / "README.md").read_text("utf-8")
        if "The runs have not been made yet." not in page:
            studies.add(script.parent.name)
    checksums = archive.read_checksums()
    # The scripts of three_seeds are in an earlier commit, which its page names.
    assert set(checksums) == studies | {"three_seeds"}
    for study, checksum in checksums.items():
        packed = (ROOT / "experiments" / study / archive.ARCHIVE).read_bytes()
        assert hashlib.sha256(packed).hexdigest() == checksum, study


@pytest.mark.slow
def test_a_quick_study_ends_with_its_figure(tmp_path):
    """run_all.sh on a copy, because it writes to output/ beside it.

    The figures of the other studies are left out.
    """
    copy = tmp_path / "copy"
    left_out = (".venv", ".git", "output", "__pycache__", "*_seed?", ".unpack*")
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*left_out))
    environment = dict(os.environ, PYTHON=sys.executable, STUDIES="rates beta")
    command = ["bash", "experiments/run_all.sh", "--quick"]
    run = subprocess.run(
        command, cwd=copy, capture_output=True, text=True, timeout=1200, env=environment
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    logs = copy / "output" / "quick"
    heavy = logs / "beta" / "beta0.4_rate2e-4_seed1"
    assert len(jsonl.read(heavy / "train_log.jsonl")) == 2
    assert jsonl.read(heavy / "test.jsonl")[0]["n"] == 16
    assert (logs / "beta" / "kl.png").exists()
    assert "training is finished: beta0.4_rate2e-4_seed1" in run.stdout
    assert "left out, since not all of its runs are there" in run.stdout
    again = subprocess.run(
        command, cwd=copy, capture_output=True, text=True, timeout=1200, env=environment
    )
    assert again.returncode == 0
    assert "is finished" not in again.stdout, "no run is made twice"


def test_expert_iteration_keeps_only_right_completions_and_logs_entropy(tmp_path, monkeypatch):
    sampled = []
    sample = expert_iteration.steps.sample

    def sample_and_set_logps(*args, progress=None):
        """The first completion's tokens get -1 nat, all others 0, and padding a wrong value."""
        rollout = sample(*args, progress=progress)
        rollout.sampled_logps[:] = 0.0
        rollout.sampled_logps[0] = -1.0
        rollout.sampled_logps[~rollout.completion_mask.bool()] = 100.0
        if progress is None:  # not of an evaluation
            sampled.append(rollout)
        return rollout

    monkeypatch.setattr(expert_iteration.steps, "sample", sample_and_set_logps)
    flags = "--dataset_name arithmetic --n_ei_steps 3 --num_questions 8 --group_size 4"
    flags += " --learning_rate 1e-4 --train_batch_size 4 --max_completion_length 96"
    flags += " --eval_ei_steps 2 --eval_size 2 --device cpu"
    flags += f" --model_name {ROOT}/tiny/1m --output_dir {tmp_path}/run"
    assert expert_iteration.main(flags.split()) == 0
    train = jsonl.read(tmp_path / "run" / "train_log.jsonl")
    assert {row["ei_step"] for row in train} == {1, 2, 3}
    assert all(row["entropy"] > 0 for row in train)
    for step in (1, 2, 3):
        rows = jsonl.read(tmp_path / "run" / "rollouts" / f"step_{step:06d}.jsonl")
        assert len(rows) == 32
        num_right = sum(row["correct_strict"] for row in rows)
        updates = [row for row in train if row["ei_step"] == step]
        assert {row["kept"] for row in updates} == {num_right}
        assert {row["accuracy"] for row in updates} == {num_right / 32}
        lengths = sampled[step - 1].lengths
        (entropy,) = {row["sample_entropy"] for row in updates}
        assert entropy == pytest.approx(lengths[0].item() / lengths.sum().item())
    last_update = {row["ei_step"]: row["step"] for row in train}
    evaluations = jsonl.read(tmp_path / "run" / "eval_log.jsonl")
    assert [row["step"] for row in evaluations] == [0, last_update[2], last_update[3]]
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == [f"step_{last_update[ei_step]:06d}" for ei_step in (2, 3)]


@pytest.mark.slow
def test_every_command_of_the_cs336_page_runs(tmp_path, monkeypatch, capsys):
    """The script's commands run in this process, because the imports of 18 would take a minute.

    Runs of GRPO are shortened. Of a flag that is given twice the last one counts.
    """
    script = ["bash", str(ROOT / "experiments" / "cs336.sh"), str(tmp_path)]
    environment = dict(os.environ, PYTHON="echo")  # the script runs, and only prints its commands
    run = subprocess.run(script, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all commands of cs336.md ran" in run.stdout
    commands = re.findall(r"^== \w\S*: echo (\S+) (.*)$", run.stdout, re.MULTILINE)
    assert len(commands) == 18
    programs = {
        "main.py": main.main,
        "generate_gold.py": generate_gold.main,
        "sft.py": sft.main,
        "experiments/expert_iteration.py": expert_iteration.main,
        "plotter.py": plotter.main,
    }
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(ArithmeticLoader.sizes, "train", 256)  # as many as the script's sft_256
    for program, flags in commands:
        if program == "main.py":
            flags += " --num_train_iters 1 --max_completion_length 64 --eval_size 4"
        assert programs[program](flags.split()) == 0, (program, flags, capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss_type", "length_normalization"),
    zip(LOSS_TYPES, chain(utils.LENGTH_NORMALIZATIONS, repeat("masked_mean")), strict=False),
)
def test_the_demo_model_trains_with_every_form_of_the_loss(
    loss_type, length_normalization, tmp_path
):
    """Two off-policy epochs on tiny/1m: finite throughout, and clipping has something to clip."""
    flags = dict(
        evaluator="gsm8k",
        rollout_batch_size=16,
        train_batch_size=8,
        group_size=8,
        max_completion_length=72,
    )
    flags |= dict(epochs_per_rollout_batch=2, learning_rate=1e-4, warmup_steps=0)
    flags |= dict(loss_type=loss_type, length_normalization=length_normalization)
    flags |= dict(max_kl=1e9)  # the subject is finiteness: four steps at this rate may wander
    assert main.main(run_flags(ROOT / "tiny" / "1m", tmp_path / "run", **flags)) == 0
    rows = jsonl.read(tmp_path / "run" / "train_log.jsonl")
    assert all(
        row["loss"] is not None and row["grad_norm"] and row["skipped_updates"] == 0 for row in rows
    )
    if loss_type == "grpo_clip":
        assert max(row["clip_fraction"] for row in rows) > 0


@pytest.mark.slow
def test_a_hundredfold_learning_rate_is_reported_as_diverged(tmp_path, capsys):
    """The demo's learning rate times 100: one clear line, exit code 1, logs kept."""
    flags = dict(
        evaluator="gsm8k",
        num_train_iters=60,
        rollout_batch_size=32,
        max_completion_length=64,
        learning_rate=1e-2,
        eval_iterations=100,
        save_iterations=100,
    )
    assert main.main(run_flags(ROOT / "tiny" / "1m", tmp_path / "run", **flags)) == 1
    error_lines = []
    for line in capsys.readouterr().err.replace("\r", "\n").splitlines():
        if line.startswith("error:"):
            error_lines.append(line)
    assert len(error_lines) == 1 and "the run has diverged" in error_lines[0]
    assert jsonl.read(tmp_path / "run" / "train_log.jsonl")
