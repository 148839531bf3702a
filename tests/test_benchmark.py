"""The benchmark's command line at its smallest: competitors do the same work, and one table comes out."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import small_tokenizer
from transformers import Qwen2Config

ROOT = Path(__file__).parent.parent


def table(tmp_path, *benchmarks):
    """{(benchmark, quantity, unit): median} that the command prints for a model of a few random weights."""
    config = Qwen2Config(
        vocab_size=4096, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, eos_token_id=1, architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    sizes = "--num_prompts 2 --group_size 2 --max_completion_length 5 --iterations 1 --repeats 1 --threads 1"
    command = [sys.executable, ROOT / "benchmarks" / "benchmark.py", *benchmarks, *sizes.split()]
    command += ["--config", tmp_path, "--tokenizer", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    about, _, _, _, *rows = done.stdout.splitlines()
    assert "benchmark.py" in about and "1 threads" in about
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert {benchmark for benchmark, *_ in cells} == set(benchmarks)
    return {(benchmark, quantity, unit): float(median) for benchmark, quantity, median, _, unit in cells}


def test_sampling_shared_prompt_and_supervised(tmp_path):
    rows = table(tmp_path, "sampling", "shared_prompt", "supervised")
    assert all(math.isfinite(value) and value > 0 for key, value in rows.items() if key[2] != "relative")
    assert ("sampling", "natural lengths, generate / ours", "ratio") in rows
    assert ("shared_prompt", "plain / shared", "ratio") in rows
    assert ("supervised", "sft.train / bare", "ratio") in rows
    for name in ("ours", "generate"):  # no EOS can end a completion
        assert rows["sampling", f"equal lengths, {name}: mean completion", "tokens"] == 5
    # Float32 rounding of two orders of the same sums.
    assert 0 < rows["shared_prompt", "distance of the gradients", "relative"] < 1e-4


@pytest.mark.slow
def test_step_and_memory(tmp_path):
    rows = table(tmp_path, "step", "memory")
    assert all(math.isfinite(value) for value in rows.values())
    stages = ("sample", "reward", "reference", "forward + backward", "optimiser")
    seconds = {stage: rows["step", f"ours: {stage}", "s"] for stage in stages}
    assert min(seconds.values()) > 0
    assert sum(seconds.values()) < rows["step", "ours: whole step", "s"], "logs take time as well"
    assert rows["memory", "full float32 logits add", "MiB"] > 0
