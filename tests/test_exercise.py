"""`make exercise` copies all but the body of compute_loss, and `make test-exercise` judges it."""

import ast
import inspect
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, run_script

import losses
import main

sys.path.insert(0, str(ROOT / "experiments"))

from make_exercise import BLANK_BODY

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


@pytest.fixture(scope="module")
def exercise(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exercise") / "copy"
    run = run_script("experiments/make_exercise.py", "--output_dir", folder)
    assert run.returncode == 0, run.stderr
    return folder


def judge(folder):
    """(whether `make test-exercise` is green, its lines)."""
    command = ["make", "--silent", "test-exercise"]
    command += [f"EXERCISE={folder}", f"PYTHON={sys.executable}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    return run.returncode == 0, run.stdout.splitlines()


def test_only_the_body_differs(exercise):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    tracked = set(listed.stdout.splitlines())
    copied = {str(path.relative_to(exercise)) for path in exercise.rglob("*") if path.is_file()}
    assert copied == tracked
    for name in tracked - {"main.py"}:
        assert (ROOT / name).read_bytes() == (exercise / name).read_bytes()

    header, body = inspect.getsource(main.compute_loss).split('    """', 1)
    source = (ROOT / "main.py").read_text()
    blanked = source.replace(f'{header}    """{body}', header + BLANK_BODY)
    assert (exercise / "main.py").read_text() == blanked != source
    assert ast.unparse(ast.parse(blanked)).count("raise NotImplementedError") == 1


def test_the_task_names_every_argument():
    task = (ROOT / "experiments" / "exercise.md").read_text()
    arguments = list(inspect.signature(main.compute_loss).parameters)
    solution = inspect.getsource(main.compute_loss) + inspect.getsource(losses.clip_range)
    settings = re.findall(r"\bconfig\.(\w+)", solution)
    assert len(settings) > 7
    for name in arguments + settings:
        assert f"`{name}`" in task, name


@pytest.mark.slow
def test_it_is_judged_up_to_the_first_red_test(exercise):
    """The textbook's formula once met all tests at once: 71 failures, told in 3,000 lines."""
    is_green, lines = judge(exercise)
    assert not is_green and len(lines) < 20
    assert any("compute_loss is yours to write" in line for line in lines)

    main_file = exercise / "main.py"
    main_file.write_text(main_file.read_text().replace(BLANK_BODY, TEXTBOOK))
    is_green, lines = judge(exercise)
    assert not is_green and len(lines) < 40
    assert "FAILED tests/test_loss.py::test_every_loss_type" in "\n".join(lines)

    shutil.copy(ROOT / "main.py", main_file)
    is_green, lines = judge(exercise)
    assert is_green, lines


def test_a_solution_is_never_overwritten(tmp_path):
    (tmp_path / "main.py").write_text("my solution")
    run = run_script("experiments/make_exercise.py", "--output_dir", tmp_path)
    assert run.returncode == 2
    assert run.stderr.startswith("error: ") and run.stderr.count("\n") == 1
    assert (tmp_path / "main.py").read_text() == "my solution"
