"""What a person can get wrong: one table, and a test for each row.

Each mistake ends with one clear line and exit code 2, and nothing is lost. Each command runs in a
folder of its own that holds a model, data, gold rows and a finished training run.
"""

import ctypes
import json
import os
import runpy
import shutil
import sys
from contextlib import chdir, contextmanager

import pytest
import torch
from conftest import ROOT, random_model, small_tokenizer

import generate_gold
import main
import plotter
import sft

sys.path.insert(0, str(ROOT / "experiments"))
import expert_iteration  # noqa: E402

PROGRAMS = {
    "main": main.main,
    "sft": sft.main,
    "generate_gold": generate_gold.main,
    "plotter": plotter.main,
    "expert_iteration": expert_iteration.main,
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
    "expert_iteration": f"{MODEL} --n_ei_steps 1 --num_questions 2 --group_size 2 --output_dir new",
}
# Lines of files, and files that a mistake may spoil.
ROW = json.dumps({"question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"}) + "\n"
GOLD_ROW = json.dumps({"question": "1 + 1?", "completion": "2", "answer": "2"}) + "\n"
LOG_ROW = '{"step": 1, "loss": 1}\n'
TRAIN = "data/train.jsonl"
GOLD = "gold.jsonl"
LOG = "run/train_log.jsonl"

# A program and its flags, and what the line must name: the flag, its value, what to do.
MISTAKES_IN_FLAGS = """
    main --betta 1 | --betta 1 | --help
    main --beta much | --beta | 'much' | float
    main --beta nan | --beta | at least 0 | nan
    main --learning_rate -1e-4 | --learning_rate | more than 0 | -0.0001
    main --learning_rate inf | --learning_rate | inf
    main --num_train_iters 0 | --num_train_iters | more than 0 | not 0
    main --lora_rank 0 | --lora_rank | more than 0 | not 0
    main --lora_rank 17 | --lora_rank 17 | 16 | k_proj | lower it
    main --seed -1 | --seed | at least 0 | -1
    main --seed 4294967296 | --seed | at most 4294967295
    main --loss_type ppo | --loss_type ppo | grpo_clip
    main --eval_split train | --eval_split | 'train' | validation
    main --rollout_batch_size 24 --train_batch_size 16 | 16 must divide --rollout_batch_size 24
    main --group_size 1 | --group_size 1 | --loss_type no_baseline
    main --device abacus | --device abacus | cpu
    main --eval_samples 4 --eval_temperature 0 | --eval_temperature 0 | --eval_samples
    main --output_dir /proc/run | No such file or directory | /proc/run
    main --dataset_name gsm9k | --dataset_name gsm9k | arithmetic, gsm8k, math
    main --evaluator judge | --evaluator judge | gsm8k, math
    main --prompt poem | --prompt poem | reasoning_answer, r1_zero
    main --prompt r1_zero --evaluator gsm8k | gsm8k | r1_zero | reasoning_answer
    main --max_prompt_length 3 | --max_prompt_length | raise
    main --max_completion_length 2000 | --max_completion_length 2000 | 1,024
    generate_gold --model_name model --max_completion_length 2000 | --max_completion_length | 1,024
    main --max_judge_failures 50 | --max_judge_failures | at most 1 | 50
    sft --num_examples 100 | only 12
    sft --prompt r1_zero --evaluator math | --train_file gold.jsonl | --prompt reasoning_answer
    generate_gold | --from_reference | --model_name | --api_model
    generate_gold --from_reference --model_name m | --from_reference | --model_name | --api_model
    generate_gold --from_reference --base_url http://x | --base_url | --api_model
    generate_gold --api_model m --base_url 127.0.0.1:1/v1 | --base_url | http://127.0.0.1:8000/v1
    generate_gold --api_model m --base_url http://127.0.0.1:port/v1 | --base_url | 127.0.0.1:8000
    generate_gold --api_model m --base_url http://127.0.0.1.example.com/v1 | OPENAI_API_KEY
    generate_gold --from_reference --temperature 1 | --temperature | --model_name
    generate_gold --from_reference --num_attempts 2 | --num_attempts | --api_model
    generate_gold --from_reference --prompt chat | --prompt chat | r1_zero
    generate_gold --from_reference --prompt r1_zero | r1_zero | --evaluator math
    generate_gold --from_reference --timeout nan | --timeout | more than 0 | nan
    plotter run --x price | --x | 'price'
    plotter run --by price | run: | --price | args.json
    plotter run --metrics los | --metrics los | which have | loss
    plotter run --output plots.jpg | plots.jpg | .pdf or .png
    main --dataset_name gsm8k --dataset_path ./absent | --dataset_path absent | not a folder
    main --device mps | --device mps cannot be used
    main --dataset_name creative --evaluator creative --judge_type local | needs --judge_model
    main --rollout_batch_size 100004 --group_size 8 | 100004 | multiples of --group_size 8
"""
MISTAKES_IN_MODELS_AND_DATA = """
    main --model_name ./absent | --model_name ./absent | no such directory
    generate_gold --model_name ./absent | --model_name ./absent | no such directory
    main --model_name data | --model_name data | cannot be loaded
    main --model_name pickled | --model_name pickled | safetensors
    main --model_name without_eos | --model_name without_eos | EOS
    main --model_name other_tokenizer | --model_name other_tokenizer | 47 | 39
    main --dataset_path data | arithmetic | --dataset_path
    main --dataset_name gsm8k | openai/gsm8k | --dataset_path
    sft --train_file absent.jsonl | No such file or directory: 'absent.jsonl'
    sft --train_file data | Is a directory: 'data'
    sft --max_completion_length 1 | --train_file gold.jsonl | only 0
    generate_gold --from_reference --dataset_path absent | --dataset_path absent | not a folder
"""
# The first ones write there, and the others read logs there.
MISTAKES_IN_DIRECTORIES = """
    main --output_dir run | --output_dir run holds a run | --resume
    main --output_dir gold.jsonl | File exists: 'gold.jsonl'
    main --resume | --resume | --output_dir new | no run
    main --resume --output_dir run --learning_rate 0.01 | --learning_rate was 5e-06, not 0.01
    sft --resume --output_dir run | --resume | was
    generate_gold --from_reference --output data | --output | cannot write data | name another
    generate_gold --from_reference --output gold.jsonl/g.jsonl | cannot write gold.jsonl/g.jsonl
    plotter absent | absent | no such directory
    plotter gold.jsonl | gold.jsonl | no such directory
    plotter data | data | train_log.jsonl | eval_log.jsonl
    plotter run run/. | run | given twice
    plotter run --output absent/plots.pdf | absent/plots.pdf | No such file | --output
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


# The command in README, on a machine that reaches no hub.
README_COMMAND = (
    "--model_name Qwen/Qwen2-0.5B-Instruct --num_train_iters 1000 --eval_iterations 100"
)
STORIES = "--dataset_name creative --evaluator creative"
BAD_URL = "--judge_type openai --judge_model m --judge_base_url http://127.0.0.1:99999"
GSM8K = "--dataset_name gsm8k --dataset_path data"
CONFIG = "model/config.json"
TORN_TOKENIZER = {"model/tokenizer.json": "{", "model/tokenizer_config.json": None}
NO_EVALUATION = {"run/eval_log.jsonl": None}
BAD_GOLD = {TRAIN: ROW.replace("#### 2", "#### many")}

# tests/test_datasets.py has more of what can be wrong in a row, a file and a folder.
MISTAKES = [
    *mistakes_in(MISTAKES_IN_FLAGS),
    *mistakes_in(MISTAKES_IN_MODELS_AND_DATA),
    *mistakes_in(MISTAKES_IN_DIRECTORIES),
    mistake("main", f"{STORIES} {BAD_URL}", "--judge_base_url must look like"),
    mistake(
        "main", f"{STORIES} --judge_type local --judge_model data", "--judge_model data: cannot"
    ),
    mistake("main", README_COMMAND, "--model_name Qwen/Qwen2-0.5B-Instruct", "cannot be loaded"),
    # Files that are missing or damaged.
    mistake("main", "", "--model_name model", "cannot be loaded", files={CONFIG: "{"}),
    mistake("main", "", "cannot be loaded", files={CONFIG: '{"model_type": "abacus"}'}),
    mistake("main", "", "cannot be loaded", files={"model/model.safetensors": "torn"}),
    mistake("main", "", "cannot be loaded", files={"model/model.safetensors": None}),
    mistake("main", "", "cannot be loaded", files=TORN_TOKENIZER),
    mistake("main", f"{GSM8K} --evaluator gsm8k", f"{TRAIN}, row 1", "'many'", files=BAD_GOLD),
    mistake("main", GSM8K, "data", "train split", files={TRAIN: None}),
    mistake("main", GSM8K, f"{TRAIN}, line 2", "JSON", files={TRAIN: f"{ROW}{{broken\n"}),
    mistake(
        "main", GSM8K, f"{TRAIN}, row 2", "'answer'", files={TRAIN: f'{ROW}{{"question": "x"}}'}
    ),
    mistake("sft", "", f"{GOLD}, line 2", "JSON", files={GOLD: f"{GOLD_ROW}{{\n"}),
    mistake("sft", "", f"{GOLD}, line 1", "JSON", files={GOLD: b"\xff\xfe"}),
    mistake("sft", "", "line 1", "completion", files={GOLD: '{"question": "q", "answer": "a"}'}),
    mistake("sft", "--filter_correct", f"--train_file {GOLD}", "only 0", files={GOLD: GOLD_ROW}),
    mistake("generate_gold", "--from_reference", "data", "training split", files={TRAIN: None}),
    # Without args.json nobody knows whose logs these are.
    mistake("main", "--output_dir old", "old holds a run", files={"old/train_log.jsonl": ""}),
    mistake("main", "--resume --output_dir run", "run/args.json", files={"run/args.json": "{"}),
    mistake("plotter", "run", "run/args.json", files={"run/args.json": '{"args": 1}'}),
    mistake("plotter", "run", "no complete line", files={LOG: '{"st'} | NO_EVALUATION),
    mistake("plotter", "run", f"{LOG}, line 2", "JSON", files={LOG: f'{LOG_ROW}{{"st\n{LOG_ROW}'}),
    mistake(
        "plotter", "run", f"{LOG}, line 2", "JSON object", files={LOG: f"{LOG_ROW}7\n{LOG_ROW}"}
    ),
    mistake("plotter", "run", f"{LOG}, line 1", '"step"', files={LOG: '{"loss": 1}\n'}),
    mistake("plotter", "run", "no number to plot", files={LOG: '{"step": 1}\n'} | NO_EVALUATION),
    mistake("plotter", "run --x tokens", "total_tokens", "--x tokens", files={LOG: LOG_ROW}),
    mistake("plotter", "run --by seed", "run:", "not evaluated", files=NO_EVALUATION),
]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """A folder in which everything is right. Each test gets a copy of it, and spoils something."""
    folder = tmp_path_factory.mktemp("workshop")
    for name in ("model", "pickled", "without_eos", "other_tokenizer"):
        vocab_size = 40 if name == "other_tokenizer" else 48
        model = random_model(max_position_embeddings=1024, vocab_size=vocab_size)
        tokenizer = small_tokenizer()
        if name == "without_eos":
            tokenizer.eos_token = None
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    # Weights that are pickled could run code when they are loaded.
    torch.save(random_model().state_dict(), folder / "pickled" / "pytorch_model.bin")
    (folder / "pickled" / "model.safetensors").unlink()
    (folder / "data").mkdir()
    for split in ("train", "test"):
        (folder / "data" / f"{split}.jsonl").write_text(ROW)
    with chdir(folder):
        assert exit_code_of("main", f"{COMMANDS['main']} --output_dir run") == 0
    gold_command = "--from_reference --dataset_name arithmetic --num_problems 12 --output"
    assert generate_gold.main([*gold_command.split(), str(folder / "gold.jsonl")]) == 0
    return folder


def content_of(folder):
    """The bytes of every file in a folder, without locks, which keep nobody from starting again."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {file.relative_to(folder): file.read_bytes() for file in files}


def change_file(path, content):
    """Give a file another content, as text or bytes; None removes it."""
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        path.write_text(content)
    elif content is not None:
        path.write_bytes(content)


def exit_code_of(program, command):
    try:
        return PROGRAMS[program](command.split())
    except SystemExit as system_exit:  # as argparse ends
        return system_exit.code


@pytest.mark.parametrize(("program", "flags", "words", "files"), MISTAKES)
def test_a_mistake_is_one_clear_line_and_exit_code_2_and_loses_nothing(
    program, flags, words, files, workshop, tmp_path, monkeypatch, capsys
):
    folder = shutil.copytree(workshop, tmp_path / "copy")
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


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("main.py", "--beta nan"),
        ("sft.py", "--train_file gold.jsonl --epochs 0"),
        ("generate_gold.py", ""),
        ("plotter.py", "--log_dir absent"),
        ("experiments/expert_iteration.py", "--n_ei_steps 0"),
    ],
)
def test_a_script_ends_with_the_exit_code_of_its_main(script, flags, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script, *flags.split()])
    with pytest.raises(SystemExit) as system_exit:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert system_exit.value.code == 2


@contextmanager
def bound_by_permissions():
    """Root may write anywhere. Inside, its effective capabilities (version 3 of them) are off."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None)
    header = (ctypes.c_uint32 * 2)(0x20080522)
    capabilities = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, capabilities) == 0
    effective = capabilities[0]
    capabilities[0] = 0
    assert libc.capset(header, capabilities) == 0
    try:
        yield
    finally:
        capabilities[0] = effective
        assert libc.capset(header, capabilities) == 0


def test_a_read_only_directory_is_one_clear_line_each(workshop, tmp_path, monkeypatch, capsys):
    """New runs, the run that it holds, gold rows and plots cannot be written there."""
    folder = shutil.copytree(workshop, tmp_path / "copy")
    continued_run = f"{COMMANDS['main']} --output_dir run --num_train_iters 3"
    commands = [
        ("main", f"{COMMANDS['main']} --output_dir run/new"),
        ("main", f"{continued_run} --resume"),
        ("sft", f"{COMMANDS['sft']} --output_dir run/new"),
        ("generate_gold", "--from_reference --dataset_path data --output run/gold.jsonl"),
        ("plotter", "--log_dir run"),
    ]
    content_before = content_of(folder)
    folders = [path for path in (folder / "run").rglob("*") if path.is_dir()]
    folders.append(folder / "run")
    for path in folders:
        path.chmod(0o555)
    monkeypatch.chdir(folder)
    with bound_by_permissions():
        exit_codes = [exit_code_of(program, command) for program, command in commands]
    for path in folders:
        path.chmod(0o755)
    assert exit_codes == [2] * len(commands)
    errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert len(errors) == len(commands), errors
    for error in errors:
        assert "Permission denied" in error
    assert content_of(folder) == content_before
