"""What a person can get wrong: one table, a test per row. Each is one clear line, exit code 2, and nothing is lost.

Each command runs in a folder of its own that holds a model, data, gold rows and a finished run of both kinds.
"""

import ctypes
import json
import os
import runpy
import shutil
import sys
from contextlib import contextmanager

import pytest
import torch
from conftest import ROOT, random_model, run_flags, small_tokenizer

import generate_gold
import main
import plotter
import selfcheck
import sft

sys.path.insert(0, str(ROOT / "experiments"))
import expert_iteration  # noqa: E402

PROGRAMS = {
    "main": main.main,
    "sft": sft.main,
    "generate_gold": generate_gold.main,
    "plotter": plotter.main,
    "selfcheck": selfcheck.run_selfcheck,
    "expert_iteration": expert_iteration.main,
}
MODEL = "--model_name model --dataset_name arithmetic --device cpu --max_completion_length 6 --eval_size 4"
COMMANDS = {  # what a row's flags are added to; a flag that is given twice counts as last given
    "main": f"{MODEL} --evaluator letters --rollout_batch_size 8 --group_size 4 --num_train_iters 1 --output_dir new",
    "sft": f"{MODEL} --train_file gold.jsonl --max_completion_length 200 --num_updates 1 --output_dir new",
    "generate_gold": "--dataset_path data --output new.jsonl",
    "plotter": "--log_dir",
    "selfcheck": MODEL,
    "expert_iteration": f"{MODEL} --n_ei_steps 1 --num_questions 2 --group_size 2 --output_dir new",
}
GSM8K = "--dataset_name gsm8k --dataset_path data"
ROW = json.dumps({"question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"}) + "\n"
LOG = '{"step": 1, "loss": 1}\n'
GOLD = json.dumps({"question": "1 + 1?", "completion": "2", "answer": "2"}) + "\n"
SHEET = "--model_name Qwen/Qwen2-0.5B-Instruct --num_train_iters 1000 --eval_iterations 100"  # README's, without a hub
URL = "--api_model m --base_url"

MISTAKES = [  # program, its flags, files that are otherwise ({name: content, or None: absent}), what the line says
    # flags
    ("main", "--betta 1", {}, "unrecognized arguments: --betta 1 (--help lists every flag)"),
    ("main", "--beta much", {}, "argument --beta: invalid float value: 'much'"),
    ("main", "--beta nan", {}, "--beta must be at least 0, not nan"),
    ("main", "--learning_rate -1", {}, "--learning_rate must be more than 0, not -1.0"),
    ("main", "--learning_rate inf", {}, "--learning_rate must be more than 0, not inf"),
    ("main", "--adam_beta1 1.5", {}, "--adam_beta1 must be below 1, not 1.5"),
    ("main", "--temperature 0", {}, "--temperature must be more than 0, not 0.0"),
    ("main", "--num_train_iters 0", {}, "--num_train_iters must be more than 0, not 0"),
    ("main", "--eval_size 0", {}, "--eval_size must be more than 0, not 0"),
    ("main", "--eval_samples 0", {}, "--eval_samples must be more than 0, not 0"),
    ("main", "--seed -1", {}, "--seed must be at least 0, not -1"),
    ("main", "--seed 4294967296", {}, "--seed must be below 4294967296, not 4294967296"),
    ("main", "--loss_type ppo", {}, "argument --loss_type: invalid choice: 'ppo'"),
    (
        "main",
        "--loss_type gspo --length_normalization token_mean",
        {},
        "gspo has one ratio per sequence and needs",
    ),
    ("main", "--dynamic_sampling -1", {}, "--dynamic_sampling must be at least 0, not -1"),
    ("main", "--lr_schedule step", {}, "argument --lr_schedule: invalid choice: 'step'"),
    (
        "main",
        "--length_normalization sum",
        {},
        "argument --length_normalization: invalid choice: 'sum'",
    ),
    ("main", "--rollout_batch_size 10", {}, "not a multiple of --group_size 4; 8 or 12 would be"),
    ("main", "--rollout_batch_size 24 --train_batch_size 16", {}, "one of 4, 8, 12, 24"),
    ("main", "--group_size 1", {}, "--group_size 1 has no group to compare with"),
    ("main", "--device abacus", {}, "--device abacus cannot be used here; use cpu"),
    (
        "main",
        "--dataset_name gsm9k",
        {},
        "unknown data set 'gsm9k'; known: arithmetic, gsm8k, math",
    ),
    ("main", "--evaluator judge", {}, "unknown evaluator 'judge'; known: "),
    ("main", "--prompt poem", {}, "unknown prompt 'poem'; known: "),
    ("main", "--prompt r1_zero --evaluator gsm8k", {}, "use --evaluator math"),
    ("main", "--max_prompt_length 3", {}, "raise --max_prompt_length"),
    (
        "main",
        "--max_completion_length 2000",
        {},
        "--max_completion_length 2000: the model has 1,024 positions",
    ),
    ("sft", "--num_examples 100", {}, "--num_examples 100: only 12 usable examples are there"),
    ("sft", "--epochs 0", {}, "--epochs must be more than 0, not 0.0"),
    (
        "sft",
        "--prompt r1_zero --evaluator math",
        {},
        "row 1: its completion is in the form reasoning_answer",
    ),
    ("sft", "--dataset_name gsm9k", {}, "unknown data set 'gsm9k'"),
    ("expert_iteration", "--n_ei_steps 0", {}, "--n_ei_steps must be more than 0, not 0"),
    ("expert_iteration", "--dataset_name gsm9k", {}, "unknown data set 'gsm9k'"),
    ("selfcheck", "--group_size 0", {}, "--group_size must be more than 0, not 0"),
    ("generate_gold", "", {}, "name one source: --from_reference, --model_name or --api_model"),
    ("generate_gold", "--from_reference --model_name m", {}, "name one source"),
    (
        "generate_gold",
        "--from_reference --base_url http://x",
        {},
        "--base_url goes with --api_model",
    ),
    ("generate_gold", f"{URL} 127.0.0.1:1/v1", {}, "must look like http://127.0.0.1:8000/v1"),
    (
        "generate_gold",
        f"{URL} http://127.0.0.1:port/v1",
        {},
        "must look like http://127.0.0.1:8000/v1",
    ),
    (
        "generate_gold",
        f"{URL} http://127.0.0.1.example.com/v1",
        {},
        "set the environment variable OPENAI_API_KEY",
    ),
    (
        "generate_gold",
        "--from_reference --dataset_name gsm9k",
        {},
        "unknown data set 'gsm9k'; known: arithmetic",
    ),
    ("generate_gold", "--from_reference --prompt chat", {}, "unknown prompt 'chat'; known: "),
    (
        "generate_gold",
        "--from_reference --evaluator judge",
        {},
        "unknown evaluator 'judge'; known: ",
    ),
    ("generate_gold", "--from_reference --prompt r1_zero", {}, "use --evaluator math"),
    (
        "generate_gold",
        "--from_reference --num_problems 0",
        {},
        "--num_problems must be more than 0, not 0",
    ),
    (
        "generate_gold",
        "--from_reference --timeout nan",
        {},
        "--timeout must be more than 0, not nan",
    ),
    ("plotter", "run --x price", {}, "argument --x: invalid choice: 'price'"),
    # models
    ("main", "--model_name ./absent", {}, "--model_name ./absent: there is no such directory"),
    ("main", SHEET, {}, "error: --model_name Qwen/Qwen2-0.5B-Instruct: cannot be loaded"),
    ("main", "--model_name data", {}, "--model_name data: cannot be loaded ("),
    ("main", "", {"model/config.json": "{"}, "--model_name model: cannot be loaded"),
    (
        "main",
        "",
        {"model/config.json": '{"model_type": "abacus"}'},
        "--model_name model: cannot be loaded",
    ),
    ("main", "", {"model/model.safetensors": "torn"}, "--model_name model: cannot be loaded"),
    ("main", "", {"model/model.safetensors": None}, "--model_name model: cannot be loaded"),
    (
        "main",
        "",
        {"model/tokenizer.json": "{", "model/tokenizer_config.json": None},
        "model: cannot be loaded",
    ),
    ("main", "--model_name pickled", {}, "--model_name pickled: cannot be loaded"),
    ("main", "--model_name without_eos", {}, "its tokenizer has no EOS token"),
    (
        "main",
        "--model_name other_tokenizer",
        {},
        "its tokenizer knows 48 tokens, the model only 40",
    ),
    ("sft", "--model_name ./absent", {}, "--model_name ./absent: there is no such directory"),
    ("selfcheck", "--model_name ./absent", {}, "--model_name ./absent: there is no such directory"),
    (
        "expert_iteration",
        "--model_name ./absent",
        {},
        "--model_name ./absent: there is no such directory",
    ),
    (
        "generate_gold",
        "--model_name ./absent",
        {},
        "--model_name ./absent: there is no such directory",
    ),
    # data
    (
        "main",
        "--dataset_name gsm8k --dataset_path ./absent",
        {},
        "--dataset_path absent is not a folder",
    ),
    (
        "main",
        "--dataset_path data",
        {},
        "the data set 'arithmetic' is generated; leave --dataset_path out",
    ),
    (
        "main",
        GSM8K,
        {"data/test.jsonl": None},
        "data has no test.jsonl or test.parquet (found: train.jsonl)",
    ),
    (
        "main",
        f"{GSM8K} --eval_split validation",
        {},
        "data has no validation.jsonl or validation.parquet (found: ",
    ),
    (
        "main",
        "--dataset_name gsm8k --eval_split validation",
        {},
        "--eval_split validation: gsm8k has no such split",
    ),
    ("main", "--eval_split train", {}, "argument --eval_split: invalid choice: 'train'"),
    (
        "main",
        GSM8K,
        {"data/train.jsonl": None},
        "data has no train split, only test data: it can only be evaluated",
    ),
    ("main", GSM8K, {"data/train.jsonl": ""}, "data/train.jsonl is empty"),
    (
        "main",
        GSM8K,
        {"data/train.jsonl": f"{ROW}{{broken\n"},
        "data/train.jsonl, line 2: not valid JSON",
    ),
    (
        "main",
        GSM8K,
        {"data/train.jsonl": f"{ROW}7\n"},
        "data/train.jsonl, line 2: not a JSON object",
    ),
    (
        "main",
        GSM8K,
        {"data/train.jsonl": f'{ROW}{{"question": "x"}}\n'},
        "row 2: no column 'answer'",
    ),
    (
        "main",
        GSM8K,
        {"data/train.jsonl": '{"question": 7, "answer": "#### 7"}'},
        "'question' must be text, not 7",
    ),
    (
        "main",
        GSM8K,
        {"data/train.jsonl": '{"question": "q", "answer": "7"}'},
        "no final line '#### <answer>'",
    ),
    ("main", GSM8K, {"data/train.jsonl": b"\xff\xfe"}, "data/train.jsonl, line 1: not valid JSON"),
    (
        "main",
        GSM8K,
        {"data/test.parquet": b"no", "data/test.jsonl": None},
        "test.parquet: cannot be read as parquet",
    ),
    ("main", "--dataset_name gsm8k", {}, "cannot load openai/gsm8k from the hub"),
    ("sft", "--train_file absent.jsonl", {}, "--train_file absent.jsonl: cannot be read"),
    ("sft", "--train_file data", {}, "--train_file data: cannot be read"),
    ("sft", "", {"gold.jsonl": ""}, "--train_file gold.jsonl is empty"),
    ("sft", "", {"gold.jsonl": f"{GOLD}{{\n"}, "gold.jsonl, line 2: not valid JSON"),
    ("sft", "", {"gold.jsonl": b"\xff\xfe"}, "gold.jsonl, line 1: not valid JSON"),
    (
        "sft",
        "",
        {"gold.jsonl": '{"question": "q", "answer": "a"}'},
        "row 1: needs a text column 'completion'",
    ),
    ("sft", "", {"gold.jsonl": GOLD.replace("2", " ")}, "no example is left to train on"),
    (
        "sft",
        "--max_completion_length 1",
        {},
        "--train_file gold.jsonl: no example is left to train on",
    ),
    (
        "sft",
        "--filter_correct",
        {"gold.jsonl": GOLD},
        "--train_file gold.jsonl: no example is left to train on",
    ),
    (
        "generate_gold",
        "--from_reference --dataset_path absent",
        {},
        "--dataset_path absent is not a folder",
    ),
    ("generate_gold", "--from_reference", {"data/train.jsonl": None}, "data has no training split"),
    (
        "generate_gold",
        "--from_reference",
        {"new.jsonl": "My notes"},
        "holds lines that are not rows of generate_gold",
    ),
    # output directories
    (
        "main",
        "--output_dir run",
        {},
        "--output_dir run already holds a run; name another directory, or --resume it",
    ),
    ("main", "--output_dir gold.jsonl", {}, "--output_dir gold.jsonl is a file"),
    ("main", "--output_dir gold.jsonl/run", {}, "Not a directory"),
    ("main", "--resume", {}, "--resume: there is no run in --output_dir new"),
    (
        "main",
        "--resume --output_dir run --learning_rate 0.01",
        {},
        "--learning_rate was 0.001, not 0.01",
    ),
    (
        "main",
        "--resume --output_dir run",
        {"run/args.json": "{"},
        "run/args.json: not the args.json of a run",
    ),
    (
        "sft",
        "--output_dir run",
        {},
        "--output_dir run already holds a run; name another directory, or --resume it",
    ),
    (
        "sft",
        "--resume --output_dir run",
        {},
        "run is a run of another script or version, without --",
    ),
    (
        "expert_iteration",
        "--output_dir run",
        {},
        "--output_dir run already holds a run; name another directory",
    ),
    ("generate_gold", "--from_reference --output data", {}, "--output: cannot write data"),
    (
        "generate_gold",
        "--from_reference --output gold.jsonl/g.jsonl",
        {},
        "cannot write gold.jsonl/g.jsonl",
    ),
    # log directories
    ("plotter", "absent", {}, "absent: no such directory"),
    ("plotter", "gold.jsonl", {}, "gold.jsonl: no such directory"),
    ("plotter", "data", {}, "data: no train_log.jsonl and no eval_log.jsonl in it"),
    (
        "plotter",
        "run",
        {"run/train_log.jsonl": '{"st', "run/eval_log.jsonl": None},
        "no complete line in its logs yet",
    ),
    (
        "plotter",
        "run",
        {"run/train_log.jsonl": f'{LOG}{{"st\n{LOG}'},
        "run/train_log.jsonl, line 2: not valid JSON",
    ),
    (
        "plotter",
        "run",
        {"run/train_log.jsonl": f"{LOG}7\n{LOG}"},
        "train_log.jsonl, line 2: not a JSON object",
    ),
    (
        "plotter",
        "run",
        {"run/train_log.jsonl": '{"loss": 1}\n'},
        'train_log.jsonl, line 1: not an object with "step"',
    ),
    (
        "plotter",
        "run",
        {"run/train_log.jsonl": '{"step": 1}\n', "run/eval_log.jsonl": None},
        "no number to plot",
    ),
    (
        "plotter",
        "run",
        {"run/args.json": '{"args": 1}'},
        "run/args.json: not the args.json of a run",
    ),
    ("plotter", "run run/.", {}, "run: given twice"),
    (
        "plotter",
        "run --x tokens",
        {"run/train_log.jsonl": LOG},
        'a log without "total_tokens", which --x tokens needs',
    ),
    ("plotter", "run --by price", {}, "run: no --price in its args.json"),
    ("plotter", "run --by seed", {"run/eval_log.jsonl": None}, "run: not evaluated"),
    ("plotter", "run --output absent/plots.pdf", {}, "No such file"),
]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """A folder with everything right in it: what each row of the table spoils a copy of."""
    folder = tmp_path_factory.mktemp("workshop")
    for name, vocab_size in (
        ("model", 48),
        ("pickled", 48),
        ("without_eos", 48),
        ("other_tokenizer", 40),
    ):
        tokenizer, model = (
            small_tokenizer(),
            random_model(max_position_embeddings=1024, vocab_size=vocab_size),
        )
        tokenizer.eos_token = None if name == "without_eos" else tokenizer.eos_token
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    torch.save(
        random_model().state_dict(), folder / "pickled" / "pytorch_model.bin"
    )  # such a file could run code
    (folder / "pickled" / "model.safetensors").unlink()
    (folder / "data").mkdir()
    for split in ("train", "test"):
        (folder / "data" / f"{split}.jsonl").write_text(ROW)
    flags = run_flags(folder / "model", folder / "run", num_train_iters=2, rollout_batch_size=8)
    assert main.main(flags) == 0
    gold = "--from_reference --dataset_name arithmetic --num_problems 12 --output"
    assert generate_gold.main([*gold.split(), str(folder / "gold.jsonl")]) == 0
    return folder


def content_of(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize(("program", "flags", "files", "message"), MISTAKES)
def test_a_mistake_is_one_clear_line_and_exit_code_2_and_loses_nothing(
    program, flags, files, message, workshop, tmp_path, monkeypatch, capsys
):
    folder = shutil.copytree(workshop, tmp_path / "copy")
    for name, content in files.items():
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.chdir(folder)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    before = content_of(folder)
    capsys.readouterr()
    try:
        code = PROGRAMS[program]([*COMMANDS[program].split(), *flags.split()])
    except SystemExit as exit:  # argparse
        code = exit.code
    lines = capsys.readouterr().err.strip().splitlines()
    errors = [line for line in lines if "error: " in line]
    assert code == 2, lines
    assert len(errors) == 1 and errors[0] == lines[-1] and message in errors[0], lines
    assert content_of(folder) == before
    assert not (folder / "new").exists(), "nothing is left of a run that never started"


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("main.py", "--beta nan"),
        ("sft.py", "--train_file gold.jsonl --epochs 0"),
        ("generate_gold.py", ""),
        ("plotter.py", "--log_dir absent"),
        ("selfcheck.py", "--group_size 0"),
        ("experiments/expert_iteration.py", "--n_ei_steps 0"),
    ],
)
def test_a_script_ends_with_the_exit_code_of_its_main(script, flags, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script, *flags.split()])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert end.value.code == 2


@contextmanager
def bound_by_permissions():
    """Root may write anywhere: lay down such rights for a while (capabilities, version 3; the effective ones)."""
    if os.geteuid() != 0:
        yield
        return
    libc, header, rights = (
        ctypes.CDLL(None),
        (ctypes.c_uint32 * 2)(0x20080522),
        (ctypes.c_uint32 * 6)(),
    )
    assert libc.capget(header, rights) == 0
    effective, rights[0] = rights[0], 0
    assert libc.capset(header, rights) == 0
    try:
        yield
    finally:
        rights[0] = effective
        assert libc.capset(header, rights) == 0


def test_a_read_only_directory_is_one_clear_line_each(workshop, tmp_path, monkeypatch, capsys):
    """Making a run in it, continuing the run that it holds, and writing gold rows and plots into it."""
    folder = shutil.copytree(workshop, tmp_path / "copy")
    commands = [
        ("main", f"{COMMANDS['main']} --output_dir run/new"),
        ("main", " ".join(run_flags(workshop / "model", "run", num_train_iters=3)) + " --resume"),
        ("sft", f"{COMMANDS['sft']} --output_dir run/new"),
        ("generate_gold", "--from_reference --dataset_path data --output run/gold.jsonl"),
        ("plotter", "--log_dir run"),
    ]
    before = content_of(folder)
    folders = [folder / "run", *(path for path in (folder / "run").rglob("*") if path.is_dir())]
    for path in folders:
        path.chmod(0o555)
    monkeypatch.chdir(folder)
    with bound_by_permissions():
        codes = [PROGRAMS[program](flags.split()) for program, flags in commands]
    for path in folders:
        path.chmod(0o755)
    assert codes == [2] * len(commands)
    errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert len(errors) == len(commands) and all("Permission denied" in line for line in errors), (
        errors
    )
    assert content_of(folder) == before
