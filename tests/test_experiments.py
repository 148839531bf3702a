"""The experiments' scripts, at tiny scale."""

import re
import subprocess
from unittest import mock

import expert_iteration
import own_answers
import pytest
from conftest import ROOT

import generate_gold
import main
import plotter
import sft
from grpo import jsonl
from grpo.run import Run


def test_expert_iteration_keeps_only_right_completions_and_logs_entropy(tmp_path, monkeypatch):
    """And trains on the sampled tokens themselves, not on those of the text."""
    sampled = []  # the completions of each round

    def sample_and_set_logps(run, examples, num_samples, temperature, sample=Run.sample):
        """The first completion's tokens get -1 nat, and all others 0."""
        completions = sample(run, examples, num_samples, temperature)
        for i, completion in enumerate(completions):
            completion.sampled_logps = [0.0 if i else -1.0] * len(completion.ids)
        if num_samples > 1:  # not of an evaluation
            sampled.append(completions)
        return completions

    monkeypatch.setattr(Run, "sample", sample_and_set_logps)
    flags = "--dataset_name arithmetic --n_ei_steps 3 --num_questions 8 --group_size 4"
    flags += " --learning_rate 1e-4 --train_batch_size 4 --max_completion_length 96"
    flags += " --eval_ei_steps 2 --eval_size 2 --device cpu"
    flags += f" --model_name {ROOT}/tiny/1m --output_dir {tmp_path}/run"
    with mock.patch.object(sft, "fine_tune", wraps=sft.fine_tune) as fine_tune:
        assert expert_iteration.main(flags.split()) == 0
    trained = [solution for call in fine_tune.call_args_list for solution in call.args[1]]
    assert {id(solution) for solution in trained} <= {id(row) for rows in sampled for row in rows}
    train = jsonl.read(tmp_path / "run" / "train_log.jsonl")
    assert [row["step"] for row in train] == [1, 2, 3]
    assert all(row["entropy"] > 0 for row in train)
    assert all(row["time/loss_and_update"] > 0 for row in train)
    for step in (1, 2, 3):
        rows = jsonl.read(tmp_path / "run" / "rollouts" / f"step_{step:06d}.jsonl")
        assert len(rows) == 32
        num_right = sum(row["correct_strict"] for row in rows)
        assert train[step - 1]["kept"] == num_right
        assert train[step - 1]["updates"] == max(1, num_right // 4)
        assert train[step - 1]["accuracy"] == num_right / 32
        lengths = [len(completion.ids) for completion in sampled[step - 1]]
        entropy = train[step - 1]["sample_entropy"]
        assert entropy == pytest.approx(lengths[0] / sum(lengths))
    evaluations = jsonl.read(tmp_path / "run" / "eval_log.jsonl")
    assert [row["step"] for row in evaluations] == [0, 2, 3]
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == ["step_000002", "step_000003"]


def test_a_models_own_right_answers_become_solutions_in_the_format(tmp_path, capsys):
    problems = [
        {"question": "2 + 3?", "answer": "#### 5"},
        {"question": "1 + 1?", "answer": "#### 2"},
    ]
    jsonl.write(tmp_path / "train.jsonl", problems)
    answers = [
        {"id": "gsm8k/test/0", "completion": " There are 4.", "finished": True},
        {"id": "gsm8k/test/0", "completion": " 2 + 3 = 5 pens.\n", "finished": True},
        {"id": "gsm8k/test/1", "completion": "1 + 1 = 2, so", "finished": False},
        {"id": "gsm8k/test/1", "completion": "I don't know.", "finished": True},
    ]
    jsonl.write(tmp_path / "run" / "eval" / "step_000000.jsonl", answers)
    own, gold = tmp_path / "own.jsonl", tmp_path / "gold.jsonl"
    assert own_answers.main([f"{tmp_path}/run", "--output", str(own)]) == 0
    flags = f"--solutions {own} --dataset_path {tmp_path} --output {gold}"
    assert generate_gold.main(["--dataset_name", "gsm8k", *flags.split()]) == 0
    (row,) = jsonl.read(gold)
    assert row["id"] == "gsm8k/train/0"
    assert row["correct"]
    steps = "<reasoning>\n2 + 3 = 5 pens.\n</reasoning>"
    assert row["completion"] == f"{steps}\n<answer>\n5\n</answer>"

    assert own_answers.main([f"{tmp_path}/missing"]) == 2
    assert capsys.readouterr().err.count("error:") == 1


@pytest.mark.slow
def test_every_command_of_the_cs336_page_runs(tmp_path, monkeypatch, capsys):
    """In this process, with a tiny model, two problems and small sizes after the flags."""
    rows = [{"problem": "1 + 1?", "solution": "It is \\boxed{2}."}] * 2
    for split in ("train", "test"):
        jsonl.write(tmp_path / "data" / f"{split}.jsonl", rows)
    data = f"--dataset_path {tmp_path}/data"
    model = f"{data} --model_name tiny/1m --device cpu --max_completion_length 64 --eval_size 2"
    grpo = f"{model} --num_train_iters 1 --rollout_batch_size 32 --train_batch_size 32"
    programs = {
        "main.py": (main.main, grpo),
        "generate_gold.py": (generate_gold.main, data),
        "sft.py": (sft.main, f"{model} --num_examples 2 --num_updates 1"),
        "experiments/expert_iteration.py": (
            expert_iteration.main,
            f"{model} --n_ei_steps 1 --num_questions 2",
        ),
        "plotter.py": (plotter.main, ""),
    }
    page = (ROOT / "experiments" / "cs336.md").read_text("utf-8").replace("output/", f"{tmp_path}/")
    code = "\n".join(re.findall("^    (.*)$", page, re.MULTILINE))
    # The shell puts its variables into the commands, and only prints them.
    script = ["bash", "-c", f'python() {{ echo "$*"; }}\n{code}']
    printed = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert printed.count("\n") == 13
    monkeypatch.chdir(ROOT)
    for command in printed.splitlines():
        program, _, flags = command.partition(" ")
        run, small_sizes = programs[program]
        exit_code = run(f"{flags} {small_sizes}".split())
        assert exit_code == 0, (command, capsys.readouterr().err)
