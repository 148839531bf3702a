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

import expert_iteration
import scaling_law
import wrong_steps
from wrong_steps import checked_steps

COMMANDS = re.findall(
    r"^    python plotter\.py (.* --output experiments/figures/.*)$", (ROOT / "analysis.md").read_text(), re.MULTILINE
)
FIGURES = [re.search(r"--output (\S+)", command)[1] for command in COMMANDS]
PICTURE = re.search(r"`python plotter\.py (.* --output docs/demo\.png)`", (ROOT / "README.md").read_text())[1]


def test_each_figure_of_the_analysis_has_its_command_and_the_other_way_round():
    shown = re.findall(r"^!\[.+\]\((.*)\)$", (ROOT / "analysis.md").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(FIGURES)
    assert {path.name for path in (ROOT / "experiments" / "figures").iterdir()} == {f.split("/")[-1] for f in FIGURES}


@pytest.mark.slow
@pytest.mark.parametrize("command", [*COMMANDS, PICTURE], ids=[*FIGURES, "docs/demo.png"])
def test_the_committed_figures_come_from_the_committed_logs(command, tmp_path, monkeypatch):
    """The command that analysis.md or README prints, globs expanded by a shell; as pictures: fonts can differ."""
    monkeypatch.chdir(ROOT)
    *flags, figure = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True
    ).stdout.split()
    assert flags[-1] == "--output" and plotter.main([*flags, str(tmp_path / "figure.png")]) == 0
    new, committed = (matplotlib.image.imread(path)[..., :3] for path in (tmp_path / "figure.png", figure))
    assert new.shape == committed.shape
    assert np.abs(new - committed).mean() < 0.01


def test_steps_of_arithmetic_are_checked():
    text = "3 * 4 = 12\n25% of 40 = 10\n1/4 of 40 = 11\n6 / 0 = 6\nso 3 + 4 = 7\n7 / 2 = 3\n10 - 4 = 6"
    right, direct = (True, True, False, False, False, True), (1, 2)  # those that have easier pieces
    assert checked_steps(text) == [("direct" if i in direct else "easy", ok) for i, ok in enumerate(right)]
    text = "47 + 38 = 70 + 15 = 85\n85 - 38 = 85 - 30 - 8 = 55 - 8 = 46\n"
    text += "25% of 80 = 80 / 4 = 20\n1 + 1 = 2 = \n2 + 2 == 4\n7 + 1 = 8 = 8"
    assert checked_steps(text) == [("careful", True), ("careful", False), ("careful", True), ("easy", True)]
    hostile = f"25% of {'9' * 400} = 5\n{'9' * 5000} / 3 = 5\n1/0 of 5 = 5\n{' = ' * 9999}\n1{' = 1' * 9999}"
    assert checked_steps(hostile) == [("easy", False)]
    assert checked_steps("100000000001 / 1 = 100000000000") == [("easy", False)], "no rounding"


def test_what_a_run_changed_is_said_in_words(tmp_path, capsys):
    """Two questions before and after: one is learnt, with one careful step of two; control characters do not pass."""
    row = {"id": 1, "prompt": "form\n<|user|>\nHow many?<|end|>", "completion": "\x1b\n33 - 11 = 1", "length": 5}
    rows = [row | {"correct_strict": False}, row | {"id": 2, "correct_strict": True}]
    rows.append(row | {"id": 3, "correct_strict": False, "prompt": "Why?"})
    with pytest.raises(ValueError, match="has not two evaluations"):
        wrong_steps.main([tmp_path])
    jsonl.write(tmp_path / "eval" / "step_000000.jsonl", rows)
    learnt = {"completion": "33 * 4 = 120 + 12 = 132\n132 + 1 = 134", "length": 20, "correct_strict": True}
    late = [row | learnt, rows[1], rows[2] | {"correct_strict": True}, rows[0]]  # a second sample of the first one
    jsonl.write(tmp_path / "eval" / "step_000009.jsonl", late)
    wrong_steps.main([tmp_path])
    said = capsys.readouterr().out
    for line in (
        "mean tokens of a completion  5.0 -> 10.0",
        "right steps  0 of 3 (0%) -> 1 of 4 (25%)",
        "careful, of steps that have easier pieces  0 of 3 (0%) -> 1 of 4 (25%)",
        "right, of careful steps  0 of 0 -> 1 of 1 (100%)",
        "right, of direct steps  0 of 3 (0%) -> 0 of 3 (0%)",
        "right answers with a wrong step  1 of 1 (100%) -> 3 of 3 (100%)",
    ):
        assert f"\n{line}\n" in said
    assert said.endswith(
        "Of the 2 questions that were wrong and are right, the one with the most careful steps:\n\nHow many?\n"
        "\n--- step_000000\n?\n33 - 11 = 1\n\n--- step_000009\n33 * 4 = 120 + 12 = 132\n132 + 1 = 134\n"
    )


def test_scaling_law_finds_a_line_and_says_where_there_is_none():
    """Accuracies on logit(p) = 1 + 2 x, as whole numbers of a million answers; then one of them doubled."""
    x, n = np.array([-1.0, 0.0, 0.0, 0.5]), np.full(4, 10**6)
    right = (n / (1 + np.exp(-1 - 2 * x))).round()
    np.testing.assert_allclose(scaling_law.fit(x, right, n), [1, 2], atol=1e-4)
    assert scaling_law.likelihood_ratio(x, right, n) < 0.01
    assert scaling_law.likelihood_ratio(x, right * [2, 1, 1, 1], n) > 1e4


@pytest.mark.slow
def test_a_quick_study_ends_with_its_figure(tmp_path):
    """run_all.sh on a copy, since it writes to output/ beside it; the figures of other studies are left out."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "output", "__pycache__"))
    environment = dict(os.environ, PYTHON=sys.executable, STUDIES="controls scaling")
    command = ["bash", "experiments/run_all.sh", "--quick"]
    run = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=1200, env=environment)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    logs = copy / "output" / "quick"
    assert len(jsonl.read(logs / "controls" / "random_seed0" / "train_log.jsonl")) == 4
    assert {"controls.png", "scaling.png"} <= {path.name for path in (logs / "figures").iterdir()}
    assert "left out, since output/quick/sft/ is not there" in run.stdout
    again = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=1200, env=environment)
    assert again.returncode == 0 and "evaluation" not in again.stdout, again.stdout[-3000:]


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
        command, capture_output=True, text=True, timeout=1800, env=dict(os.environ, PYTHON=sys.executable)
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert "all commands of cs336.md ran" in run.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss_type", "length_normalization"),
    zip(LOSS_TYPES, chain(utils.LENGTH_NORMALIZATIONS, repeat("masked_mean")), strict=False),
)
def test_the_demo_model_trains_with_every_form_of_the_loss(loss_type, length_normalization, tmp_path):
    """Two off-policy epochs on tiny/1m: finite throughout, and clipping has something to clip."""
    flags = dict(evaluator="gsm8k", rollout_batch_size=16, train_batch_size=8, group_size=8, max_completion_length=72)
    flags |= dict(epochs_per_rollout_batch=2, learning_rate=1e-4, warmup_steps=0)
    flags |= dict(loss_type=loss_type, length_normalization=length_normalization)
    flags |= dict(max_kl=1e9)  # the subject is finiteness: four steps at this rate may wander
    assert main.main(run_flags(ROOT / "tiny" / "1m", tmp_path / "run", **flags)) == 0
    rows = jsonl.read(tmp_path / "run" / "train_log.jsonl")
    assert all(row["loss"] is not None and row["grad_norm"] and row["skipped_updates"] == 0 for row in rows)
    if loss_type == "grpo_clip":
        assert max(row["clip_fraction"] for row in rows) > 0


@pytest.mark.slow
def test_a_hundredfold_learning_rate_is_reported_as_diverged(tmp_path):
    """The demo's flags with its learning rate times 100: one clear line, exit code 1, logs kept."""
    run = run_script(
        "main.py", "--model_name", ROOT / "tiny" / "1m", "--dataset_name", "arithmetic", "--num_train_iters", 60,
        "--rollout_batch_size", 128, "--max_completion_length", 96, "--learning_rate", 1e-2, "--eval_size", 8,
        "--device", "cpu", "--output_dir", tmp_path / "run",
    )  # fmt: skip
    assert run.returncode == 1, run.stdout[-2000:]
    lines = [line for line in run.stderr.replace("\r", "\n").splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and "the run has diverged" in lines[0]
    assert jsonl.read(tmp_path / "run" / "train_log.jsonl")
