"""sft.py's command line: which examples it takes, that it can be stopped, and what a person can get wrong."""

import random
import subprocess
import sys

import pytest
from conftest import ROOT, run_script
from test_runs import DRIVER, TINY, assert_same_run, killed_run

import checkpoints
import sft
import utils
from evaluator import get_evaluator
from llms import AutoTokenizer
from rl_datasets import PROMPTS, ArithmeticLoader


@pytest.fixture(scope="module")
def gold_file(tmp_path_factory):
    """60 gold rows of `arithmetic`, of which every tenth has a wrong answer in its completion."""
    prompt, rows = PROMPTS["reasoning_answer"], []
    for i, example in enumerate(ArithmeticLoader.read("train")[:60]):
        answer = "0" if i % 10 == 0 else example["answer"]
        rows.append(
            {name: example[name] for name in ("id", "question", "answer")}
            | {"completion": prompt.format_solution(example["solution"], answer), "prompt_name": prompt.name}
        )
    path = tmp_path_factory.mktemp("gold") / "gold.jsonl"
    utils.write_jsonl(path, rows)
    return path


def sft_flags(gold_file, output_dir, **flags):
    small = dict(model_name=TINY, dataset_name="arithmetic", train_file=gold_file, output_dir=output_dir, device="cpu")
    small |= dict(train_batch_size=8, num_updates=6, eval_updates=3, save_updates=2, eval_size=4)
    small |= dict(max_completion_length=72, learning_rate=1e-3) | flags
    return [
        text for name, value in small.items() for text in ([f"--{name}", str(value)] if value != "" else [f"--{name}"])
    ]


def chosen(gold_file, seed=0, **flags):
    args = sft.parse_args(sft_flags(gold_file, "unused", seed=seed, **flags))
    prompt, tokenizer = PROMPTS["reasoning_answer"], AutoTokenizer.from_pretrained(TINY)
    rows = sft.read_gold(gold_file, prompt.name)
    return [
        e["id"] for e in sft.select_examples(rows, args, prompt, tokenizer, get_evaluator("gsm8k", prompt=prompt.name))
    ]


def test_subsets_are_nested_and_drawn_by_the_seed(gold_file):
    small, large = chosen(gold_file, num_examples=10), chosen(gold_file, num_examples=25)
    assert large[:10] == small and len(set(large)) == 25
    assert set(chosen(gold_file, seed=1, num_examples=10)) != set(small)


def test_filter_correct_leaves_out_wrong_answers_and_says_how_many(gold_file, capsys):
    everything, right = chosen(gold_file), chosen(gold_file, filter_correct="")
    assert len(everything) == 60 and len(right) == 54
    assert "6 incorrect, left out" in capsys.readouterr().out
    wrong = {row["id"] for i, row in enumerate(utils.read_jsonl(gold_file)) if i % 10 == 0}
    assert not wrong & set(right)


def test_empty_and_long_rows_are_counted_and_left_out(gold_file, tmp_path, capsys):
    rows = utils.read_jsonl(gold_file)[:5]
    rows[1]["completion"] = " \n"
    rows[2]["completion"] *= 9
    rows[3]["question"] *= 90
    utils.write_jsonl(tmp_path / "gold.jsonl", rows)
    assert len(chosen(tmp_path / "gold.jsonl")) == 2
    assert "5 read, 1 empty, left out, 2 too long, left out, 2 used" in capsys.readouterr().out


def test_a_run_writes_the_files_of_a_run_and_learns(gold_file, tmp_path):
    assert (
        sft.main(
            sft_flags(
                gold_file, tmp_path / "run", num_updates=20, filter_correct="", log_entropy="", learning_rate=2e-4
            )
        )
        == 0
    )
    train = utils.read_jsonl(tmp_path / "run" / "train_log.jsonl")
    assert [row["step"] for row in train] == list(range(1, 21)) and train[-1]["examples"] == 160
    losses = [row["loss"] for row in train]
    assert sum(losses[-7:]) < sum(losses[:7]) and train[0]["entropy"] > 0
    assert [row["step"] for row in utils.read_jsonl(tmp_path / "run" / "eval_log.jsonl")] == [
        0,
        3,
        6,
        9,
        12,
        15,
        18,
        20,
    ]
    assert checkpoints.find(tmp_path / "run")[1]["step"] == 20


def check_kill_and_resume(gold_file, tmp_path, kills, at_least):
    flags = dict(num_updates=12, eval_updates=1, save_updates=2)
    assert run_script("sft.py", *sft_flags(gold_file, tmp_path / "whole", **flags)).returncode == 0
    folder = tmp_path / "killed"
    count = killed_run(sft_flags(gold_file, folder, **flags), folder, kills, 12, random.Random(1), "sft.py")
    assert count >= at_least
    assert_same_run(folder, tmp_path / "whole", 12)


def test_killed_and_resumed_run_equals_the_whole_one(gold_file, tmp_path):
    check_kill_and_resume(gold_file, tmp_path, kills=2, at_least=1)


@pytest.mark.slow
def test_twenty_kills(gold_file, tmp_path):
    check_kill_and_resume(gold_file, tmp_path, kills=20, at_least=15)


def test_sigterm_stops_after_the_update_and_resumes_exactly(gold_file, tmp_path):
    kill = "os.kill(os.getpid(), signal.SIGTERM)"
    driver = DRIVER.replace("main.main(sys.argv", "sft.main(sys.argv").replace(
        "import conftest, main,", "import conftest, sft,"
    )
    driver = driver.format(root=str(ROOT), target='sft, "accumulate_gradients"', call=3, before=kill, after="pass")
    flags = sft_flags(gold_file, tmp_path / "stopped")
    process = subprocess.run([sys.executable, "-c", driver, *flags], capture_output=True, text=True, timeout=120)
    assert process.returncode == 130, process.stderr
    assert "stopped by SIGTERM after step 3;" in process.stderr
    assert sft.main([*flags, "--resume"]) == 0
    assert sft.main(sft_flags(gold_file, tmp_path / "whole")) == 0
    assert_same_run(tmp_path / "stopped", tmp_path / "whole", 6)
