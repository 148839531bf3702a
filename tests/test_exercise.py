"""`make exercise`: the loss tests are red on the copy, green with the solution, and nothing but one body differs."""

import ast
import inspect
import os
import subprocess
import sys

import pytest
from conftest import ROOT, run_script

import main

sys.path.insert(0, str(ROOT / "experiments"))

import make_exercise


def body_of_compute_loss(source):
    """(lines before, lines of the body, lines after) of main.compute_loss."""
    (function,) = (node for node in ast.parse(source).body if getattr(node, "name", None) == "compute_loss")
    lines = source.splitlines(keepends=True)
    first, last = function.body[0].lineno - 1, function.body[-1].end_lineno
    return lines[:first], lines[first:last], lines[last:]


@pytest.fixture(scope="module")
def exercise(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exercise") / "copy"
    make_exercise.write_exercise(folder)
    return folder


def judge(folder, *options):
    """The loss tests, run in the copy as a student runs them."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_loss.py", *options]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=1200)


def test_only_the_body_differs(exercise):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split("\n")[:-1]
    copied = {str(path.relative_to(exercise)) for path in exercise.rglob("*") if path.is_file()}
    assert copied == set(tracked) and "main.py" in copied
    different = [name for name in tracked if (ROOT / name).read_bytes() != (exercise / name).read_bytes()]
    assert different == ["main.py"]
    before, solution, after = body_of_compute_loss((ROOT / "main.py").read_text())
    blank_before, blanked, blank_after = body_of_compute_loss((exercise / "main.py").read_text())
    assert (before, after) == (blank_before, blank_after)
    (function,) = ast.parse("def f():\n" + "".join(blanked)).body
    assert len(function.body) == 2 and isinstance(function.body[1], ast.Raise), "a docstring and a raise"
    code = {line.strip() for line in solution if "=" in line}
    assert not code & {line.strip() for line in blanked}, "no line of the solution is left"


def test_the_task_names_every_argument():
    missing = [name for name in inspect.signature(main.compute_loss).parameters if name not in make_exercise.TASK]
    assert not missing


@pytest.mark.slow
def test_red_before_and_green_with_the_solution(exercise):
    red = judge(exercise, "--exitfirst")
    assert red.returncode == 1 and "compute_loss is yours to write" in red.stdout, red.stdout[-3000:]
    path = exercise / "main.py"
    before, _, after = body_of_compute_loss(path.read_text())
    _, solution, _ = body_of_compute_loss((ROOT / "main.py").read_text())
    path.write_text("".join(before + solution + after))
    green = judge(exercise)
    assert green.returncode == 0 and "skipped" not in green.stdout.splitlines()[-1], green.stdout[-3000:]


def test_a_solution_is_never_overwritten(tmp_path):
    folder = tmp_path / "exercise"
    folder.mkdir()
    (folder / "main.py").write_text("my solution")
    run = run_script("experiments/make_exercise.py", "--output_dir", folder)
    assert run.returncode == 2 and run.stderr.startswith("error: ") and run.stderr.count("\n") == 1
    assert "already exists" in run.stderr and (folder / "main.py").read_text() == "my solution"
    assert [path.name for path in folder.iterdir()] == ["main.py"]
