"""`make interview` leaves the loss to a candidate, and its tests judge it."""

import inspect
import os
import re
import subprocess
import sys

import make_interview
import pytest
from conftest import ROOT, run_script

import losses
from grpo import jsonl

# The loss as a textbook and the task sheet have it.
TEXTBOOK = """\
    inputs = (prompt_completion_ids, attention_mask, completion_ids.shape[1])
    policy = get_per_token_logps(model, *inputs, temperature=config.temperature)
    kl = torch.zeros_like(policy)
    if config.beta > 0:
        with torch.inference_mode():
            reference = get_per_token_logps(base_model, *inputs, temperature=config.temperature)
        kl = torch.exp(reference - policy) - (reference - policy) - 1
    ratio = torch.exp(policy - policy.detach())
    per_token_loss = -(ratio * advantages.unsqueeze(1) - config.beta * kl)
    lengths = completion_mask.sum(1)
    loss = ((per_token_loss * completion_mask).sum(1) / lengths).mean()
    kl = ((kl * completion_mask).sum(1) / lengths).mean()
    return loss, {"kl": kl.item(), "response_length": lengths.float().mean().item()}
"""


def test_a_solution_is_never_overwritten(tmp_path):
    (tmp_path / "main.py").write_text("my solution")
    run = run_script("experiments/make_interview.py", "--output_dir", tmp_path)
    assert run.returncode == 2
    assert run.stderr.startswith("error: ") and run.stderr.count("\n") == 1
    assert (tmp_path / "main.py").read_text() == "my solution"


# The flags of `make demo`, but for fewer evaluations and micro-batches of a handier size.
DEMO = """main.py --model_name tiny/1m --dataset_name arithmetic --rollout_batch_size 128
    --group_size 16 --max_completion_length 160 --learning_rate 1e-4 --micro_batch_tokens 1024
    --eval_size 20"""


@pytest.fixture(scope="module")
def interview(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interview") / "copy"
    run = run_script("experiments/make_interview.py", "--output_dir", folder)
    assert run.returncode == 0, run.stderr
    return folder


def texts_of(folder):
    """{name: text} of what a candidate reads, without the sheet of tasks."""
    suffixes = (".py", ".html", ".toml", ".txt", "")
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix in suffixes]
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def run_in(folder, command):
    """(exit code, output) of Python with this command line in a folder."""
    run = subprocess.run(
        [sys.executable, *command.split()],
        cwd=folder,
        env=dict(os.environ, OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=900,
    )
    return run.returncode, run.stdout + run.stderr


def test_no_file_of_the_interview_holds_a_solution(interview):
    """Neither a loss, all of which have a ratio, nor the solution of a later task."""
    patterns = [r"(logps\)|ratio)\.exp\(", r"\bk3\b", "cliprange", r"(ref|old|policy)_logps [-*]"]
    patterns += ["CreativeWriting", "judge_", "opening.line", "SFT", "GoldConfig"]
    patterns += ["[Ee]xpert.?[Ii]ter"]
    functions = [name for name, value in vars(losses).items() if inspect.isfunction(value)]
    in_losses = set(functions) - {"import_from_file", "masked_sum", "find_loss", "try_loss"}
    assert {"estimate_kl", "clipped_loss", "sum_over_constant", "gspo"} <= in_losses
    # main.py's loop itself knows these two.
    in_losses -= {"grpo_clip", "no_baseline"}
    patterns += [rf"\b(?<!losses\.){name}\b" for name in sorted(in_losses)]
    texts = texts_of(interview)
    originals = [path.read_text() for path in [*ROOT.glob("*.py"), *ROOT.glob("grpo/*.py")]]
    for pattern in patterns:
        assert re.search(pattern, "".join(originals)), pattern
        for name, text in texts.items():
            text = text.replace("creative: opening lines", "")  # in --help
            assert not re.search(pattern, text), (name, pattern)
    assert make_interview.COMPUTE_LOSS in texts["main.py"]


def test_a_file_without_the_marked_line_is_refused():
    marked = f"a\nclass B:\n    c\n\n    {make_interview.MARK}\n    d\n\n    e\n\n\nf\n"
    assert make_interview.without_marked("a.py", marked) == "a\nclass B:\n    c\n\n\n\nf\n"
    with pytest.raises(ValueError, match="a.py has no line"):
        make_interview.without_marked("a.py", marked.replace("copy", "cpoy"))


def test_the_interview_is_whole(interview):
    """What was left out is named nowhere, nor is a file that a candidate does not get."""
    config = ROOT / "pyproject.toml"
    # An import of compute_loss's waits for the candidate.
    options = "--no-cache --ignore I,D,E501,E402 --extend-per-file-ignores main.py:F401"
    code, output = run_in(interview, f"-m ruff check {options} --config {config}")
    assert code == 0, output
    of_the_reader = {"FILE.py", "my_rewards.py", "report.html"}  # a run has a report
    for name, text in texts_of(interview).items():
        for mentioned in re.findall(r"(?<![\w./-])(?:\w+/)*\w+\.(?:py|md|html)\b", text):
            assert (interview / mentioned).exists() or mentioned in of_the_reader, (name, mentioned)
    for program in ("main.py", "plotter.py"):
        code, output = run_in(interview, f"{program} --help")
        assert code == 0, output
    for mistake in (
        "main.py --sampler vllm",
        "plotter.py --diagnose .",
        "main.py --loss_type gspo",
    ):
        code, output = run_in(interview, mistake)
        assert code == 2 and output.startswith("error: ") and output.count("\n") == 1, output


@pytest.mark.slow
def test_a_candidate_writes_the_loss_of_the_sheet_and_the_demo_learns(interview, tmp_path):
    """From the seven arguments alone. The first gradient is that of the original's own loss."""
    code, output = run_in(interview, "-m pytest -q")
    assert code == 1 and "compute_loss is yours to write" in output
    assert re.search(r"4 failed, \d passed", output), "only the tests of the loss are red"

    code, output = run_in(interview, DEMO)
    assert code == 2 and output.count("\n") == 1, "the demo is refused at once"

    main_file = interview / "main.py"
    main_file.write_text(main_file.read_text().replace(make_interview.COMPUTE_LOSS, TEXTBOOK))
    code, output = run_in(interview, "-m pytest -q")
    assert code == 0, output

    logs = []
    for folder, num_iterations in ((interview, 25), (ROOT, 1)):
        flags = f"--num_train_iters {num_iterations} --output_dir {tmp_path / folder.name}"
        code, output = run_in(folder, f"{DEMO} {flags}")
        assert code == 0, output
        logs.append(jsonl.read(tmp_path / folder.name / "train_log.jsonl"))
    candidate, original = logs
    assert candidate[0]["reward"] == original[0]["reward"], "the samples are the same"
    assert candidate[0]["grad_norm"] == pytest.approx(original[0]["grad_norm"], rel=1e-5)
    rewards = [row["reward"] for row in candidate]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.7

    run = tmp_path / interview.name
    code, output = run_in(interview, f"plotter.py --log_dir {run}")
    assert code == 0, output
    assert (run / "training_plots.pdf").exists() and (run / "report.html").exists()
