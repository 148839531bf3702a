"""The experiments' scripts, at tiny scale."""

import os
import re
import shutil
import subprocess
import sys
from itertools import chain, repeat

import matplotlib.image
import numpy as np
import pytest
from conftest import ROOT, run_flags, run_script

import main
import plotter
import utils
from flags import LOSS_TYPES
from logs import jsonl

sys.path.insert(0, str(ROOT / "experiments"))

import answers
import expert_iteration
import table
from answers import checked_steps

PAGES = [ROOT / "analysis.md", ROOT / "README.md", *sorted(ROOT.glob("experiments/**/*.md"))]
COMMANDS = [
    c
    for page in PAGES
    for c in re.findall(r"python plotter\.py (--log_dir .* --output \S+\.png)", page.read_text())
]
FIGURES = [re.search(r"--output (\S+)", command)[1] for command in COMMANDS]


def test_each_figure_of_a_study_has_its_command_and_the_other_way_round():
    shown = {
        str((page.parent / figure).resolve().relative_to(ROOT))
        for page in PAGES
        for figure in re.findall(r"^!\[.+\]\((\S+)\)$", page.read_text(), re.MULTILINE)
    }
    assert shown <= {*FIGURES}
    drawn = {str(path.relative_to(ROOT)) for path in ROOT.glob("experiments/**/*.png")}
    assert drawn | {"docs/demo.png"} == {*FIGURES} and len(FIGURES) == len({*FIGURES})


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=FIGURES)
def test_the_committed_figures_come_from_the_committed_logs(command, tmp_path, monkeypatch):
    """The command that a page prints, globs expanded by a shell; as pictures: fonts can differ."""
    monkeypatch.chdir(ROOT)
    *flags, figure = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True
    ).stdout.split()
    assert flags[-1] == "--output" and plotter.main([*flags, str(tmp_path / "figure.png")]) == 0
    new, committed = (
        matplotlib.image.imread(path)[..., :3] for path in (tmp_path / "figure.png", figure)
    )
    assert new.shape == committed.shape
    assert np.abs(new - committed).mean() < 0.01


@pytest.mark.slow
def test_every_table_on_the_pages_is_what_its_command_prints():
    run = run_script("experiments/table.py", "check")
    assert run.returncode == 0, run.stdout + run.stderr


def write_study(folder, runs):
    """{run: ([right or not on test], accuracy on validation)}, with the files that the tables are made from."""
    for name, (right, accuracy) in runs.items():
        rows = [
            {
                "id": f"arithmetic/test/{i}",
                "prompt": "",
                "completion": "33 * 4 = 120 + 12 = 132",
                "correct_strict": ok,
                "correct_flexible": True,
                "length": 2 * i,
            }
            for i, ok in enumerate(right)
        ]
        ten = [
            rows[0] | {"id": f"arithmetic/validation/{i}", "correct_strict": i < 10 * accuracy}
            for i in range(10)
        ]
        jsonl.write(folder / "output" / name / "eval" / "step_000004.jsonl", ten)
        jsonl.write(
            folder / "output" / name / "test" / "eval" / "step_000000.jsonl", rows[::-1]
        )  # any order
        answers.main(folder / "output" / name, folder / name / "answers.jsonl")
        answers.main(folder / "output" / name / "test", folder / name / "test.jsonl")
        jsonl.write(folder / name / "train_log.jsonl", [{"step": i, "kl": i} for i in range(1, 21)])
        jsonl.write_json(folder / name / "args.json", {"args": {"learning_rate": 1e-4}})


def test_a_study_compares_runs_question_by_question(tmp_path, monkeypatch):
    """By hand: of every 8 questions seed 0 gains 3 and loses 1, seed 1 gains 3, seed 2 gains 2: 25, 37.5, 25 points."""
    monkeypatch.setattr(table, "LOGS", tmp_path)
    base = [1, 1, 1, 1, 0, 0, 0, 0] * 8
    better = (
        [0, 1, 1, 1, 1, 1, 1, 0] * 8,
        [1, 1, 1, 1, 1, 1, 1, 0] * 8,
        [1, 1, 1, 1, 1, 1, 0, 0] * 8,
    )
    write_study(tmp_path / "a", {f"base_rate1e-4_seed{seed}": (base, 0.5) for seed in range(3)})
    write_study(
        tmp_path / "a",
        {"base_rate2e-4_seed0": (better[0], 0.5), "base_rate4e-4_seed0": (better[0], 0.4)},
    )
    write_study(
        tmp_path / "b",
        {f"new_rate2e-4_seed{seed}": (right, 0.9) for seed, right in enumerate(better)},
    )
    write_study(
        tmp_path / "b", {"new_rate1e-4_seed0": (base, 0.8), "new_rate10e-4_seed0": (base, 0.8)}
    )
    assert [run.name[5:9] for run in table.runs_of("a/base")] == ["rate"] * 3
    assert table.rate_of(table.runs_of("a/base")[0]) == "1e-4", "of equals the lowest"
    seeds, mean, low, high = table.difference("b/new", "a/base")
    assert seeds.tolist() == [25, 37.5, 25] and mean == pytest.approx(100 * 7 / 24)
    # Of a question the three answers stay together: its gains are -1, 0, 0, 0, 3, 3, 2, 0, of three at most.
    spread = 100 * np.std([-1, 0, 0, 0, 3, 3, 2, 0]) / 3 / np.sqrt(64)
    assert (high - low) / 2 == pytest.approx(1.96 * spread, rel=0.1) and low < mean < high
    assert table.verdict(seeds, low, high) == "told apart"
    assert table.verdict(np.array([1.1, 6.1, 0.9]), 1.9, 3.4) == "leans", "one seed makes it"
    assert table.verdict(np.array([9.0, 9.0, -1.0]), 1.0, 3.0) == "tie (up to 18.7)", "5.6 x 10 / 3"
    assert table.verdict(np.array([1.0, 1.1, 0.9]), -0.96, 2.96) == "tie (up to 2.8)", (
        "2.8 x 3.92 / 3.92"
    )
    assert table.verdict(np.array([9.0]), 1.0, 3.0) == "one seed"
    (tmp_path / "comparisons.txt").write_text(
        "# head\nb: Is it better?\n    b/new   a/base\n", "utf-8"
    )
    assert "| Is it better? | b/new | a/base | +25.0, +37.5, +25.0 | +29.2 [" in table.table(
        "compare b"
    )
    with pytest.raises(ValueError, match="compare other: there is nothing of that"):
        table.table("compare other")
    assert "| b/new | 80.0 | **90.0** | 80.0 |" in table.table("rates b").replace("10e-4", "3")
    ends = table.table("ends b/new").splitlines()[2].split(" | ")
    assert ends[1] == "2e-4" and ends[3:6] == ["79.2", "100.0, 100.0, 100.0", "63, 63, 63"]
    assert "| a/base | 15.5, 15.5, 15.5 |" in table.table("metrics kl -- a/base")
    with pytest.raises(FileNotFoundError, match="c/new: no runs in"):
        table.table("ends c/new")
    (tmp_path / "comparisons.txt").write_text("# head\nc: Later?\n    c/new   a/base\n", "utf-8")
    assert table.table("compare").endswith("| Later? | c/new | a/base |  |  | not run yet |\n")
    write_study(tmp_path / "c", {"new_seed0": (base, 0.5)})
    assert table.table("compare").endswith("| not run yet |\n"), "one of three seeds is there"


def test_an_exchange_rate_is_where_the_curve_first_is_as_high(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "LOGS", tmp_path)
    write_study(tmp_path / "sft", {"ten_seed0": ([1], 0.5), "all_seed0": ([1], 1.0)})
    # 0, 5, 4 and 9 of the same ten; 0, 3, 5 and 9: on average 0, 4, 4.5 and 9, so 5 at 20 + 10 x 0.5 / 4.5
    for seed, curve in enumerate((("400", "7e0", "7c0", "7fe"), ("400", "780", "7e0", "7fe"))):
        write_study(tmp_path / "rl", {f"grpo_seed{seed}": ([1], 0.5)})
        (last,) = jsonl.read(tmp_path / "rl" / f"grpo_seed{seed}" / "answers.jsonl")
        rows = [
            last | {"step": step, "strict": digits}
            for step, digits in zip((0, 10, 20, 30), curve, strict=True)
        ]
        jsonl.write(tmp_path / "rl" / f"grpo_seed{seed}" / "answers.jsonl", rows)
    monkeypatch.setattr(table, "read", jsonl.read)
    _, _, ten, all_ = table.table("exchange rl/grpo sft/ten sft/all").splitlines()
    assert re.fullmatch(r"\| sft/ten \| 50.0 \| 21 \[\d+, \d+\] \| 10, 20 \|", ten)
    assert re.fullmatch(r"\| sft/all \| 100.0 \| never \[\d+, never\] \| never, never \|", all_)


def test_pages_that_do_not_say_what_the_logs_say_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "LOGS", tmp_path / "experiments")
    monkeypatch.setattr(table, "ROOT", tmp_path)
    write_study(tmp_path / "experiments" / "a", {"base_seed0": ([1, 0], 0.5)})
    (tmp_path / "experiments" / "a" / "run.sh").write_text("run --beta 0.04\n", "utf-8")
    page = "\n    python experiments/table.py curve strict a/base\n\n| old |\n\nAt 0.04 (arXiv:2506.10947) 50.0 %.\n"
    (tmp_path / "analysis.md").write_text(page, "utf-8")
    with pytest.raises(ValueError, match="^analysis.md: a table is not what the logs say"):
        table.check()
    table.check("--write")
    assert "| a/base | 50.0 |\n\nAt" in (tmp_path / "analysis.md").read_text("utf-8")
    table.check()
    (tmp_path / "analysis.md").write_text(
        (tmp_path / "analysis.md").read_text("utf-8") + "But 49.9 %.\n", "utf-8"
    )
    with pytest.raises(ValueError, match="^analysis.md: 49.9 is in no table$"):
        table.check()


def test_steps_of_arithmetic_are_checked():
    text = (
        "3 * 4 = 12\n25% of 40 = 10\n1/4 of 40 = 11\n6 / 0 = 6\nso 3 + 4 = 7\n7 / 2 = 3\n10 - 4 = 6"
    )
    right, direct = (True, True, False, False, False, True), (1, 2)  # those that have easier pieces
    assert checked_steps(text) == [
        ("direct" if i in direct else "easy", ok) for i, ok in enumerate(right)
    ]
    text = "47 + 38 = 70 + 15 = 85\n85 - 38 = 85 - 30 - 8 = 55 - 8 = 46\n"
    text += "25% of 80 = 80 / 4 = 20\n1 + 1 = 2 = \n2 + 2 == 4\n7 + 1 = 8 = 8"
    assert checked_steps(text) == [
        ("careful", True),
        ("careful", False),
        ("careful", True),
        ("easy", True),
    ]
    hostile = f"25% of {'9' * 400} = 5\n{'9' * 5000} / 3 = 5\n1/0 of 5 = 5\n{' = ' * 9999}\n1{' = 1' * 9999}"
    assert checked_steps(hostile) == [("easy", False)]
    assert checked_steps("100000000001 / 1 = 100000000000") == [("easy", False)], "no rounding"


def test_what_a_run_changed_is_said_in_words(tmp_path, capsys):
    """Two questions before and after: one is learnt, with one careful step of two; control characters do not pass."""
    row = {
        "id": "arithmetic/1",
        "prompt": "form\n<|user|>\nHow many?<|end|>",
        "completion": "\x1b\n33 - 11 = 1",
        "length": 5,
    }
    row |= {"correct_flexible": False}
    rows = [row | {"correct_strict": False}, row | {"id": "arithmetic/2", "correct_strict": True}]
    rows.append(row | {"id": "arithmetic/3", "correct_strict": False, "prompt": "Why?"})
    with pytest.raises(ValueError, match="no evaluations in its eval/"):
        answers.main(tmp_path)
    jsonl.write(tmp_path / "eval" / "step_000000.jsonl", rows)
    with pytest.raises(ValueError, match="has not two evaluations"):
        answers.main(tmp_path)
    learnt = {
        "completion": "33 * 4 = 120 + 12 = 132\n132 + 1 = 134",
        "length": 20,
        "correct_strict": True,
    }
    late = [row | learnt, rows[1], rows[2] | {"correct_strict": True}]
    jsonl.write(tmp_path / "eval" / "step_000009.jsonl", late)
    answers.main(tmp_path)
    said = capsys.readouterr().out
    for line in (
        "mean tokens of a completion  5.0 -> 10.0",
        "completions with steps  3 of 3 (100%) -> 3 of 3 (100%)",
        "right steps  0 of 3 (0%) -> 1 of 4 (25%)",
        "careful, of steps that have easier pieces  0 of 3 (0%) -> 1 of 4 (25%)",
        "right, of careful steps  0 of 0 -> 1 of 1 (100%)",
        "right, of direct steps  0 of 3 (0%) -> 0 of 3 (0%)",
    ):
        assert f"\n{line}\n" in said
    assert said.endswith(
        "Of the 2 questions that were wrong and are right, the one with the most careful steps:\n\nHow many?\n"
        "\n--- step_000000\n?\n33 - 11 = 1\n\n--- step_000009\n33 * 4 = 120 + 12 = 132\n132 + 1 = 134\n"
    )


@pytest.mark.slow
def test_a_quick_study_ends_with_its_figure(tmp_path):
    """run_all.sh on a copy, since it writes to output/ beside it; the figures of other studies are left out."""
    copy = tmp_path / "copy"
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "output", "__pycache__")
    )
    environment = dict(os.environ, PYTHON=sys.executable, STUDIES="rates std")
    command = ["bash", "experiments/run_all.sh", "--quick"]
    run = subprocess.run(
        command, cwd=copy, capture_output=True, text=True, timeout=1200, env=environment
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    logs = copy / "output" / "quick"
    assert len(jsonl.read(logs / "std" / "no_std_rate2e-4_seed0" / "train_log.jsonl")) == 2
    assert jsonl.read(logs / "std" / "no_std_rate2e-4_seed0" / "test.jsonl")[0]["n"] == 16
    assert (logs / "std" / "std.png").exists()
    assert "left out, since not all of its runs are there" in run.stdout
    again = subprocess.run(
        command, cwd=copy, capture_output=True, text=True, timeout=1200, env=environment
    )
    assert "== std: no_std" in run.stdout and "== rates: base" in run.stdout, "each run is named"
    assert again.returncode == 0 and not re.search("== (rates|std):", again.stdout), (
        "no run is made twice"
    )


def test_expert_iteration_keeps_only_right_completions_and_logs_entropy(tmp_path):
    flags = "--dataset_name arithmetic --n_ei_steps 2 --num_questions 8 --group_size 4 --learning_rate 1e-4"
    flags += " --train_batch_size 4 --max_completion_length 96 --eval_size 2 --device cpu"
    flags += f" --model_name {ROOT}/tiny/1m --output_dir {tmp_path}/run"
    assert expert_iteration.main(flags.split()) == 0
    train = jsonl.read(tmp_path / "run" / "train_log.jsonl")
    assert {row["ei_step"] for row in train} == {1, 2} and all(row["entropy"] > 0 for row in train)
    for step in (1, 2):
        rows = jsonl.read(tmp_path / "run" / "rollouts" / f"step_{step:06d}.jsonl")
        kept = {row["kept"] for row in train if row["ei_step"] == step}
        assert kept == {sum(row["correct_strict"] for row in rows)} and len(rows) == 32
    assert len(jsonl.read(tmp_path / "run" / "eval_log.jsonl")) == 3


@pytest.mark.slow
def test_every_command_of_the_cs336_page_runs(tmp_path):
    command = ["bash", str(ROOT / "experiments" / "cs336.sh"), str(tmp_path)]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=1800,
        env=dict(os.environ, PYTHON=sys.executable),
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert "all commands of cs336.md ran" in run.stdout


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
def test_a_hundredfold_learning_rate_is_reported_as_diverged(tmp_path):
    """The demo's flags with its learning rate times 100: one clear line, exit code 1, logs kept."""
    run = run_script(
        "main.py",
        "--model_name",
        ROOT / "tiny" / "1m",
        "--dataset_name",
        "arithmetic",
        "--num_train_iters",
        60,
        "--rollout_batch_size",
        128,
        "--max_completion_length",
        96,
        "--learning_rate",
        1e-2,
        "--eval_size",
        8,
        "--device",
        "cpu",
        "--output_dir",
        tmp_path / "run",
    )
    assert run.returncode == 1, run.stdout[-2000:]
    lines = [
        line for line in run.stderr.replace("\r", "\n").splitlines() if line.startswith("error:")
    ]
    assert len(lines) == 1 and "the run has diverged" in lines[0]
    assert jsonl.read(tmp_path / "run" / "train_log.jsonl")
