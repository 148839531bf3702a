"""`make exercise`: nothing but one body differs in the copy, and its judge goes by stages, red until one is solved."""

import ast
import inspect
import subprocess
import sys

import pytest
from conftest import ROOT, run_script

import main

sys.path.insert(0, str(ROOT / "experiments"))

import make_exercise

# The formula of stage 1 as a textbook has it: no keyword is read.
TEXTBOOK = """\
    C = completion_ids.shape[1]
    policy = utils.get_per_token_logps(model, prompt_completion_ids, attention_mask, C)
    with torch.inference_mode():
        reference = utils.get_per_token_logps(base_model, prompt_completion_ids, attention_mask, C)
    kl = torch.exp(reference - policy) - (reference - policy) - 1
    ratio = torch.exp(policy - policy.detach())
    per_token_loss = -(ratio * advantages.unsqueeze(1) - 0.04 * kl)
    lengths = completion_mask.sum(1)
    loss = ((per_token_loss * completion_mask).sum(1) / lengths).mean()
    kl = ((kl * completion_mask).sum(1) / lengths).mean()
    return loss, {"kl": kl.item(), "response_length": lengths.float().mean().item()}
"""


def body_of_compute_loss(source):
    """(lines before, lines of the body, lines after) of main.compute_loss."""
    (function,) = (
        node for node in ast.parse(source).body if getattr(node, "name", None) == "compute_loss"
    )
    lines = source.splitlines(keepends=True)
    first, last = function.body[0].lineno - 1, function.body[-1].end_lineno
    return lines[:first], lines[first:last], lines[last:]


@pytest.fixture(scope="module")
def exercise(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exercise") / "copy"
    make_exercise.write_exercise(folder)
    return folder


def judge(folder, solution=None):
    """(exit status, lines) of `make test-exercise`, with this as the body of compute_loss in the copy."""
    if solution:
        before, _, after = body_of_compute_loss((folder / "main.py").read_text())
        (folder / "main.py").write_text("".join([*before, *solution, *after]))
    command = [
        "make",
        "--no-print-directory",
        "test-exercise",
        f"EXERCISE={folder}",
        f"PYTHON={sys.executable}",
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    return run.returncode, run.stdout.splitlines()


def test_only_the_body_differs(exercise):
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split("\n")[:-1]
    copied = {str(path.relative_to(exercise)) for path in exercise.rglob("*") if path.is_file()}
    assert copied == set(tracked) and "main.py" in copied
    different = [
        name for name in tracked if (ROOT / name).read_bytes() != (exercise / name).read_bytes()
    ]
    assert different == ["main.py"]
    before, solution, after = body_of_compute_loss((ROOT / "main.py").read_text())
    blank_before, blanked, blank_after = body_of_compute_loss((exercise / "main.py").read_text())
    assert (before, after) == (blank_before, blank_after)
    (function,) = ast.parse("def f():\n" + "".join(blanked)).body
    assert len(function.body) == 2 and isinstance(function.body[1], ast.Raise), (
        "a docstring and a raise"
    )
    code = {line.strip() for line in solution if "=" in line}
    assert not code & {line.strip() for line in blanked}, "no line of the solution is left"


def test_the_task_names_every_argument(exercise):
    task = (exercise / "experiments" / "exercise.md").read_text()
    assert not [
        name for name in inspect.signature(main.compute_loss).parameters if f"`{name}`" not in task
    ]


@pytest.mark.slow
def test_every_loss_test_belongs_to_a_stage(exercise):
    """What needs no solution is green in the copy, and the rest has a stage."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not stage1 and not stage2 and not stage3",
    ]
    run = subprocess.run(
        [*command, "tests/test_loss.py"], cwd=exercise, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stdout[-3000:]


@pytest.mark.slow
def test_stages(exercise):
    """The textbook's formula once met all tests at once: 71 failures, told in 3,000 lines."""
    status, lines = judge(exercise)
    assert status and lines[0] == "Next, stage 1: the bare call" and len(lines) < 20, lines
    assert any("compute_loss is yours to write" in line for line in lines)
    assert lines[-1] == "Stage 1 is red; experiments/exercise.md says what it asks."

    status, lines = judge(exercise, TEXTBOOK)
    assert status and "Stage 1 is green." in lines and lines[-1].startswith("Stage 2 is red"), lines
    assert len(lines) < 25, lines

    _, solution, _ = body_of_compute_loss((ROOT / "main.py").read_text())
    status, lines = judge(exercise, solution)
    assert status == 0 and lines[-1].startswith("All three stages are green"), lines
    assert not any("skipped" in line for line in lines)


def test_a_solution_is_never_overwritten(tmp_path):
    folder = tmp_path / "exercise"
    folder.mkdir()
    (folder / "main.py").write_text("my solution")
    run = run_script("experiments/make_exercise.py", "--output_dir", folder)
    assert run.returncode == 2 and run.stderr.startswith("error: ") and run.stderr.count("\n") == 1
    assert "already exists" in run.stderr and (folder / "main.py").read_text() == "my solution"
    assert [path.name for path in folder.iterdir()] == ["main.py"]
