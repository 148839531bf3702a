"""What a person can get wrong: one table, and a test for each row.

Each mistake ends with one clear line and exit code 2, and nothing is lost. Each command runs in a
folder of its own that holds a model, data, gold rows and a finished training run.
"""

import json
import shutil
import sys

import pytest
import torch
from conftest import random_model, run_flags, small_tokenizer

import generate_gold
import main
import plotter
import sft
import utils

PROGRAMS = {
    "main": main.main,
    "sft": sft.main,
    "generate_gold": generate_gold.main,
    "plotter": plotter.main,
}

# What a mistake's flags are added to. If a flag stands there twice, the last one counts.
MODEL = (
    "--model_name model --dataset_name arithmetic --device cpu --max_completion_length 6"
    " --eval_size 4"
)
COMMANDS = {
    "main": f"{MODEL} --evaluator letters --rollout_batch_size 8 --group_size 4"
    " --num_train_iters 1 --output_dir new",
    "sft": f"{MODEL} --train_file gold.jsonl --max_completion_length 200 --num_updates 1"
    " --output_dir new",
    "generate_gold": "--dataset_path data --output new.jsonl",
    "plotter": "--log_dir",
}
# Lines of files, and files that a mistake may spoil.
ROW = json.dumps({"question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"}) + "\n"
GOLD_ROW = json.dumps({"question": "1 + 1?", "completion": "2", "answer": "2"}) + "\n"
TRAIN = "data/train.jsonl"
GOLD = "gold.jsonl"

# A program and its flags, and what the line must name.
MISTAKES = """
    main --betta 1 | --betta 1 | --help
    main --beta nan | --beta | at least 0 | nan
    main --num_train_iters 0 | --num_train_iters | more than 0 | not 0
    main --loss_type ppo | --loss_type ppo | grpo_clip
    main --loss_type absent.py:loss | no file absent.py
    main --rollout_batch_size 24 --train_batch_size 16 | --train_batch_size 16 must divide
    main --rollout_batch_size 10 | multiples of --group_size 4
    main --group_size 1 | --group_size 1 | without a baseline
    main --device abacus | --device abacus
    main --eval_samples 4 --eval_temperature 0 | --eval_temperature 0 | --eval_samples
    main --dataset_name gsm9k | gsm9k | arithmetic
    main --dataset_name absent.py:gsm8k | absent.py:gsm8k | built in
    main --evaluator judge | --evaluator judge | gsm8k
    main --evaluator= | --evaluator is empty
    main --prompt poem | poem | r1_zero
    main --max_completion_length 2000 | --max_completion_length 2000 | 1,024
    main --model_name ./absent | --model_name ./absent
    main --model_name pickled | --model_name pickled | safetensors
    main --model_name without_eos | --model_name without_eos | EOS
    main --model_name Qwen/Qwen2-0.5B-Instruct | --model_name Qwen/Qwen2-0.5B-Instruct
    main --dataset_name gsm8k --dataset_path absent | absent
    main --output_dir run | --output_dir run holds a run | --resume
    main --resume | --resume | --output_dir new | no run
    main --output_dir gold.jsonl | --output_dir gold.jsonl is a file
    main --loss_type mine.py:scalar | mine.py:scalar | (B, C), not ()
    main --loss_type mine.py:fails | mine.py:fails | my bug
    main --dataset_name mine.py:rows | rows fails with | my bug
    main --evaluator my.own.py:f | my.own.py:f | rename the file
    main --evaluator mine.py:needs | no column solution, but answer, answers
    main --model_name ./new | --model_name ./new | no such folder
    main --resume --output_dir run | --resume continues a run with the flags it has
    sft --num_examples 100 | only 12
    sft --train_file absent.jsonl | absent.jsonl
    sft --prompt r1_zero --evaluator math | reasoning_answer
    sft --max_completion_length 1 | --train_file gold.jsonl | only 0
    main --evaluator gsm8k --prompt r1_zero | reasoning_answer, not r1_zero
    generate_gold | --from_reference | --api_model
    generate_gold --from_reference --output gold.jsonl | other problems
    generate_gold --from_reference --prompt chat | chat | r1_zero
    plotter absent | absent
    plotter run --by price | price
"""


def mistake(program, flags, *words, files=None):
    """A row of the table.

    files: files that have another content than in the workshop; None: the file is missing.
    """
    return pytest.param(program, flags, words, files or {}, id=f"{program} {flags} {words[0]}")


def mistakes_in(table):
    rows = []
    for line in table.strip().splitlines():
        command, *words = line.strip().split(" | ")
        program, _, flags = command.partition(" ")
        rows.append(mistake(program, flags, *words))
    return rows


# A user's own functions, of which one can be used.
MINE = """
def scalar(advantages, policy_logps, old_logps, mask, config):
    return (policy_logps * advantages).mean(), {}
def fails(advantages, policy_logps, old_logps, mask, config):
    raise KeyError("my bug")
def rows(split):
    raise KeyError("my bug")
def needs(completions, solution):
    return [0.0 for _ in completions]
def fine(completions, **columns):
    return [0.0 for _ in completions]
"""
GSM8K = "--dataset_name gsm8k --dataset_path data"
BAD_GOLD = {TRAIN: ROW.replace("#### 2", "#### many")}
DAMAGED_FILES = [
    mistake("main", "", "cannot be loaded", files={"model/model.safetensors": "torn"}),
    mistake("main", f"{GSM8K} --evaluator gsm8k,mine.py:fine", "'many'", files=BAD_GOLD),
    mistake("main", GSM8K, "train", files={TRAIN: None}),
    mistake("main", GSM8K, "train.jsonl", files={TRAIN: f"{ROW}{{cut"}),
    mistake("main", "--resume --output_dir run", "run/args.json", files={"run/args.json": "{"}),
    mistake("sft", "", f"{GOLD}, line 2", "JSON", files={GOLD: f"{GOLD_ROW}{{\n{GOLD_ROW}"}),
    mistake("sft", "", "completion", files={GOLD: '{"question": "q", "answer": "a"}'}),
    mistake("sft", "--filter_correct", "only 0", files={GOLD: GOLD_ROW}),
]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """A folder in which everything is right. Each test gets a copy of it, and spoils something."""
    folder = tmp_path_factory.mktemp("workshop")
    for name in ("model", "pickled", "without_eos"):
        model = random_model(max_position_embeddings=1024)
        tokenizer = small_tokenizer()
        if name == "without_eos":
            tokenizer.eos_token = None
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    # Weights that are pickled could run code when they are loaded.
    torch.save(random_model().state_dict(), folder / "pickled" / "pytorch_model.bin")
    (folder / "pickled" / "model.safetensors").unlink()
    (folder / "data").mkdir()
    for name in ("mine.py", "my.own.py"):
        (folder / name).write_text(MINE)
    for split in ("train", "test"):
        (folder / "data" / f"{split}.jsonl").write_text(ROW)
    assert main.main(run_flags(folder / "model", folder / "run", num_train_iters=2)) == 0
    gold_command = "--from_reference --dataset_name arithmetic --num_problems 12 --output"
    assert generate_gold.main([*gold_command.split(), str(folder / "gold.jsonl")]) == 0
    return folder


def content_of(folder):
    """The bytes of every file in a folder, but for locks."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {file.relative_to(folder): file.read_bytes() for file in files}


def change_file(path, content):
    """Give a file another content; None removes it."""
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is not None:
        path.write_text(content)


def exit_code_of(program, command):
    try:
        return PROGRAMS[program](command.split())
    except SystemExit as system_exit:  # as argparse ends
        return system_exit.code


@pytest.mark.parametrize(
    ("program", "flags", "words", "files"), mistakes_in(MISTAKES) + DAMAGED_FILES
)
def test_a_mistake_is_one_clear_line_and_exit_code_2_and_loses_nothing(
    program, flags, words, files, workshop, tmp_path, monkeypatch, capsys
):
    folder = shutil.copytree(workshop, tmp_path / "copy")
    monkeypatch.setattr(sys, "path", [*sys.path])  # a file of the user's adds its folder
    sys.modules.pop("mine", None)  # of another copy
    utils.import_from_file.cache_clear()
    for name, content in files.items():
        change_file(folder / name, content)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    content_before = content_of(folder)
    capsys.readouterr()
    exit_code = exit_code_of(program, f"{COMMANDS[program]} {flags}")
    lines = capsys.readouterr().err.strip().splitlines()
    errors = [line for line in lines if "error: " in line]
    assert exit_code == 2, lines
    assert errors == [lines[-1]], lines
    for word in words:
        assert word in errors[0], f"{word!r} is missing in: {errors[0]}"
    assert content_of(folder) == content_before
