"""Slow checks on real GSM8K and the real Qwen2 tokenizer and sizes, through the command line."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, as_flags, run_script
from transformers import AutoConfig, AutoModelForCausalLM

from grpo import jsonl

pytestmark = pytest.mark.slow

# A script that runs its arguments as a command, and prints the peak of that command's memory.
PRINT_PEAK = """
import resource, subprocess, sys
exit_code = subprocess.run(sys.argv[1:]).returncode
print("PEAK", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(exit_code)
"""


def test_tiny_model_trains_and_evaluates_on_real_gsm8k(data_folder, tmp_path):
    flags = as_flags(
        model_name=ROOT / "tiny" / "1m",
        dataset_name="gsm8k",
        dataset_path=data_folder / "data" / "gsm8k",
        device="cpu",
        max_prompt_length=800,
        max_completion_length=96,
        rollout_batch_size=32,
        num_train_iters=3,
        eval_size=100,
        output_dir=tmp_path / "run",
    )
    run = run_script("main.py", *flags)
    assert run.returncode == 0, run.stderr[-2000:]
    assert len(jsonl.read(tmp_path / "run" / "train_log.jsonl")) == 3
    assert [row["n"] for row in jsonl.read(tmp_path / "run" / "eval_log.jsonl")] == [100, 100]
    assert "7,473 training problems" in run.stdout


def test_qwen2_half_billion_iteration_fits_into_16_gib(data_folder, tmp_path):
    """Random weights of the real size, the real tokenizer and real GSM8K.

    An iteration is one prompt with 2 completions of up to 8 tokens. Nearly all of the memory is for
    weights, gradients and the optimiser, and does not depend on these numbers.
    """
    qwen = data_folder / "models" / "qwen2"
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(qwen / "configs" / "Qwen2-0.5B-Instruct")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
        tmp_path / "model"
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(qwen / name, tmp_path / "model" / name)
    flags = as_flags(
        model_name=tmp_path / "model",
        dataset_path=data_folder / "data" / "gsm8k",
        device="cpu",
        rollout_batch_size=2,
        group_size=2,
        max_completion_length=8,
        num_train_iters=1,
        eval_size=1,
        output_dir=tmp_path / "run",
    )
    command = [sys.executable, "-c", PRINT_PEAK, sys.executable, ROOT / "main.py", *flags]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert run.returncode == 0, run.stderr[-2000:]
    peak_kib = int(run.stdout.rsplit("PEAK", 1)[1])
    (row,) = jsonl.read(tmp_path / "run" / "train_log.jsonl")
    assert row["kl"] == pytest.approx(0, abs=1e-5) and row["sampling_logp_gap"] < 1e-3
    assert 5 < peak_kib / 2**20 < 16, f"the peak is {peak_kib / 2**20:.1f} GiB"
    assert json.loads((tmp_path / "run" / "args.json").read_text())["parameters"] == 494_032_768
