"""`make exercise` copies all but the body of compute_loss, and `make test-exercise` judges it."""

import ast
import inspect
import re
import subprocess
import sys

import pytest
from conftest import ROOT, run_script

import losses
import main

sys.path.insert(0, str(ROOT / "experiments"))

import make_exercise

STAGES = [ROOT / "experiments" / f"exercise_stage{stage}.txt" for stage in (1, 2, 3)]
# The formula of stage 1 as a textbook has it: it reads none of the settings.
TEXTBOOK = """\
    C = completion_ids.shape[1]
    policy = get_per_token_logps(model, prompt_completion_ids, attention_mask, C)
    with torch.inference_mode():
        reference = get_per_token_logps(base_model, prompt_completion_ids, attention_mask, C)
    kl = torch.exp(reference - policy) - (reference - policy) - 1
    ratio = torch.exp(policy - policy.detach())
    per_token_loss = -(ratio * advantages.unsqueeze(1) - 0.04 * kl)
    lengths = completion_mask.sum(1)
    loss = ((per_token_loss * completion_mask).sum(1) / lengths).mean()
    kl = ((kl * completion_mask).sum(1) / lengths).mean()
    return loss, {"kl": kl.item(), "response_length": lengths.float().mean().item()}
"""


def split_at_compute_loss(source):
    """(lines before, lines of the body, lines after) of main.compute_loss."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    (function,) = (function for function in functions if function.name == "compute_loss")
    lines = source.splitlines(keepends=True)
    start = function.body[0].lineno - 1
    end = function.body[-1].end_lineno
    return lines[:start], lines[start:end], lines[end:]


@pytest.fixture(scope="module")
def exercise(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exercise") / "copy"
    make_exercise.write_exercise(folder)
    return folder


def judge(folder):
    """(exit status, lines) of `make test-exercise`."""
    command = ["make", "--no-print-directory", "test-exercise"]
    command += [f"EXERCISE={folder}", f"PYTHON={sys.executable}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    return run.returncode, run.stdout.splitlines()


def solve(folder, solution):
    """Write these lines as the body of compute_loss in the copy."""
    lines_before, _, lines_after = split_at_compute_loss((folder / "main.py").read_text())
    (folder / "main.py").write_text("".join([*lines_before, *solution, *lines_after]))


def test_only_the_body_differs(exercise):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    tracked = listed.stdout.splitlines()
    copied = {str(path.relative_to(exercise)) for path in exercise.rglob("*") if path.is_file()}
    assert copied == set(tracked)
    assert "main.py" in copied
    different = []
    for name in tracked:
        if (ROOT / name).read_bytes() != (exercise / name).read_bytes():
            different.append(name)
    assert different == ["main.py"]

    solved = split_at_compute_loss((ROOT / "main.py").read_text())
    blanked = split_at_compute_loss((exercise / "main.py").read_text())
    lines_before, solution, lines_after = solved
    assert (lines_before, lines_after) == (blanked[0], blanked[2])
    (function,) = ast.parse("def f():\n" + "".join(blanked[1])).body
    assert len(function.body) == 2, "a docstring and a raise"
    assert isinstance(function.body[1], ast.Raise)
    code = {line.strip() for line in solution if "=" in line}
    assert not code & {line.strip() for line in blanked[1]}, "no line of the solution is left"


def test_the_task_names_every_argument(exercise):
    task = (exercise / "experiments" / "exercise.md").read_text()
    arguments = list(inspect.signature(main.compute_loss).parameters)
    solution = inspect.getsource(main.compute_loss) + inspect.getsource(losses.clip_range)
    settings = re.findall(r"\bconfig\.(\w+)", solution)
    assert len(settings) > 7
    for name in arguments + settings:
        assert f"`{name}`" in task, name


def test_every_test_that_needs_compute_loss_has_one_stage():
    """A test belongs to a stage if it, or a helper of its file, calls compute_loss in some way."""
    tree = ast.parse((ROOT / "tests" / "test_loss.py").read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    needs_compute_loss = {"compute_loss", "loss_of", "accumulate_gradient"}
    for _ in functions:  # enough rounds for a helper of a helper
        for name, function in functions.items():
            if needs_compute_loss & names_in(function):
                needs_compute_loss.add(name)
    tests = {name for name in needs_compute_loss if name.startswith("test_")}
    staged = "".join(path.read_text() for path in STAGES).splitlines()
    assert sorted(staged) == sorted(f"tests/test_loss.py::{name}" for name in tests)


def names_in(tree):
    """Every name and attribute that a piece of code uses."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
    return names


@pytest.mark.slow
def test_what_has_no_stage_is_green_in_the_copy(exercise):
    command = [sys.executable, "-m", "pytest", "-q", "tests/test_loss.py"]
    for path in STAGES:
        command += [f"--deselect={test}" for test in path.read_text().splitlines()]
    run = subprocess.run(command, cwd=exercise, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-3000:]
    assert " passed" in run.stdout


@pytest.mark.slow
def test_stages(exercise):
    """The textbook's formula once met all tests at once: 71 failures, told in 3,000 lines."""
    status, lines = judge(exercise)
    assert status != 0
    assert lines[0] == "Next, stage 1: the bare call"
    assert len(lines) < 20, lines
    assert any("compute_loss is yours to write" in line for line in lines)
    assert lines[-1] == "Stage 1 is red; experiments/exercise.md says what it asks."

    solve(exercise, TEXTBOOK)
    status, lines = judge(exercise)
    assert status != 0
    assert "Stage 1 is green." in lines
    assert lines[-1].startswith("Stage 2 is red")
    assert len(lines) < 25, lines

    _, solution, _ = split_at_compute_loss((ROOT / "main.py").read_text())
    solve(exercise, solution)
    status, lines = judge(exercise)
    assert status == 0
    assert lines[-1].startswith("All three stages are green"), lines
    assert not any("skipped" in line for line in lines)


def test_no_exercise_is_not_green(tmp_path):
    """It was: "All three stages are green"."""
    status, lines = judge(tmp_path / "absent")
    assert status == 2
    assert lines == []


def test_a_solution_is_never_overwritten(tmp_path):
    folder = tmp_path / "exercise"
    folder.mkdir()
    (folder / "main.py").write_text("my solution")
    run = run_script("experiments/make_exercise.py", "--output_dir", folder)
    assert run.returncode == 2
    assert run.stderr.startswith("error: ")
    assert run.stderr.count("\n") == 1
    assert "already exists" in run.stderr
    assert (folder / "main.py").read_text() == "my solution"
    assert [path.name for path in folder.iterdir()] == ["main.py"]
