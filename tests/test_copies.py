"""`make exercise` and `make interview` leave the loss to you, and their tests judge it."""

import ast
import inspect
import json
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, run_script

import losses
import main

sys.path.insert(0, str(ROOT / "experiments"))

from make_copy import EXERCISE_BODY, INTERVIEW_BODY

# The loss as a textbook and the task sheet have it: it reads none of the settings.
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
    run = run_script("experiments/make_copy.py", "exercise", "--output_dir", folder)
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
    blanked = source.replace(f'{header}    """{body}', header + EXERCISE_BODY)
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
    main_file.write_text(main_file.read_text().replace(EXERCISE_BODY, TEXTBOOK))
    is_green, lines = judge(exercise)
    assert not is_green and len(lines) < 40
    assert "FAILED tests/test_loss.py::test_every_loss_type" in "\n".join(lines)

    shutil.copy(ROOT / "main.py", main_file)
    is_green, lines = judge(exercise)
    assert is_green, lines


@pytest.mark.parametrize("copy", ["exercise", "interview"])
def test_a_solution_is_never_overwritten(copy, tmp_path):
    (tmp_path / "main.py").write_text("my solution")
    run = run_script("experiments/make_copy.py", copy, "--output_dir", tmp_path)
    assert run.returncode == 2
    assert run.stderr.startswith("error: ") and run.stderr.count("\n") == 1
    assert (tmp_path / "main.py").read_text() == "my solution"


# --- The interview --------------------------------------------------------------------------------

# What a loss, or a solution of another task, would be recognised by.
SOLUTIONS = r"""
    estimate_kl | clipped | clip_range | grpo_clip | cliprange | losses | LENGTH_NORMALIZATIONS
    | \bratio\b(?!_mean) | exp\(\) - | \bk3\b | ref_logps - | old_logps\)\.exp | (logps|kl) \* mask
    | judges? | CreativeWriting | gold\.jsonl | opening.lines
"""
# "of a judge" says why a run may end, `ratio` is a number of the logs.
HARMLESS = r"of a judge|from rules or a judge|so the ratio is 1 and the clip"


@pytest.fixture(scope="module")
def interview(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interview") / "copy"
    run = run_script("experiments/make_copy.py", "interview", "--output_dir", folder)
    assert run.returncode == 0, run.stderr
    return folder


def in_copy(folder, *command):
    command = [sys.executable, *map(str, command)]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    return run.returncode, run.stdout + run.stderr


def test_no_file_of_the_interview_holds_a_solution(interview):
    texts = {
        path: path.read_text() for path in interview.rglob("*") if path.suffix in (".py", ".toml")
    }
    assert len(texts) > 20
    for path, text in texts.items():
        if path.parent.name == "tests":  # its numbers are worked by hand
            continue
        found = re.search(SOLUTIONS, re.sub(HARMLESS, "", text), re.VERBOSE)
        assert not found, f"{path}: {found}"
    assert INTERVIEW_BODY in texts[interview / "main.py"]
    names = {path.name for path in interview.rglob("*")}
    left_out = {"sft.py", "generate_gold.py", "losses.py", "judges.py", "analysis.md", "results"}
    assert not names & (left_out | {"experiments", "tiny_grpo.ipynb", "opening_lines", "docs"})


def test_the_sheet_of_the_interview():
    sheet = (ROOT / "experiments" / "interview.md").read_text()
    assert re.findall(r"^## Task (\d)", sheet, re.MULTILINE) == ["1", "2", "3", "4", "5"]


@pytest.mark.slow
def test_a_candidate_writes_the_loss_of_the_sheet_and_the_demo_learns(interview, tmp_path):
    """The gradient of its first update is that of the original, which shares prompts."""
    code, output = in_copy(interview, "-m", "pytest", "-q")
    assert code == 1 and "compute_loss is yours to write" in output

    main_file = interview / "main.py"
    main_file.write_text(main_file.read_text().replace(INTERVIEW_BODY, TEXTBOOK))
    code, output = in_copy(interview, "-m", "pytest", "-q")
    assert code == 0, output

    command = "main.py --model_name tiny/1m --dataset_name arithmetic --num_train_iters 25"
    command += " --rollout_batch_size 128 --group_size 16 --max_completion_length 160"
    command += " --learning_rate 1e-4 --micro_batch_tokens 1024 --eval_size 20 --output_dir"
    logs = []
    for folder in (interview, ROOT):
        output_dir = tmp_path / folder.name
        num_iterations = ["--num_train_iters", "1"] if folder == ROOT else []
        code, output = in_copy(folder, *command.split(), output_dir, *num_iterations)
        assert code == 0, output
        logs.append([json.loads(line) for line in (output_dir / "train_log.jsonl").open()])
    theirs, original = logs
    assert theirs[0]["reward"] == original[0]["reward"]
    assert theirs[0]["grad_norm"] == pytest.approx(original[0]["grad_norm"], rel=1e-5)
    rewards = [row["reward"] for row in theirs]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.5
