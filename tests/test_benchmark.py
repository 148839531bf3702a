"""The benchmark's command line at its smallest: competitors do the same work, and one table comes out."""

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import random_model, small_tokenizer
from transformers import Qwen2Config

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import memory_table  # noqa: E402
import time_table  # noqa: E402


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


def test_memory_table_by_hand(tmp_path, capsys):
    """Two layers of hidden size 32: bytes from the parameter count, and what a layer keeps for one token at most."""
    model = random_model()
    model.config.save_pretrained(tmp_path)
    flags = [str(tmp_path), "--processes", "1", "4", "--max_concurrent_sequences", "10", "--gpu_memory", "0.003"]
    memory_table.main(flags)
    header, _, *rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[1] for row in rows] == ["1", "4"] and {len(row) for row in rows} == {len(header)}
    assert all(row[-1] == "**no**" for row in rows)
    args, P = memory_table.parse_args(flags), model.num_parameters()
    one, four = (memory_table.parts(model.config, n, args, activation=100) for n in (1, 4))
    assert one["master weights"] == 4 * P and four["optimiser"] == 2 * P and four["sampling copy"] == 2 * P
    assert one["cache"] == 10 * 1024 * 2 * (2 * 2 * 8) * 2 + 4 * 4 * 10 * 48  # K and V, 2 layers, 2 heads of 8
    assert memory_table.peak(one) == 22 * P + one["activations"] + one["weights at work"]
    # Per token and layer: counted by hand from the modules, some 34 H + 8 I bytes, and the keys and values.
    kept = memory_table.activation_bytes(model.config, 8, False) / 2
    assert 0.8 * (30 * 32 + 8 * 64) < kept < 1.5 * (34 * 32 + 8 * 64)
    assert memory_table.activation_bytes(model.config, 8, True) < 2 * kept


def test_time_table_by_hand():
    """A model of 2 layers with 4e5 parameters each, 2e5 outside: launches of one second, then FLOPs and bytes alone."""
    config = SimpleNamespace(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=2**20)
    shape = SimpleNamespace(P=1e6, layer=4e5, outside=2e5, output=1e5, token=2**20)
    flags = "config --rollout_batch_size 16 --group_size 4 --prompt_length 5 --completion_length 4"
    flags += " --max_completion_length 10 --max_concurrent_sequences 8 --micro_batch_tokens 100"
    slow = SimpleNamespace(launch=1, mfu=1, bandwidth=1, cache=None, logits=0, adam=28, hidden=True, longest=True)
    fast = SimpleNamespace(**(vars(slow) | {"launch": 0, "hidden": False}))

    def seconds(at, more="", processes=1):
        return time_table.stages(config, shape, processes, time_table.parse_args((flags + more).split()), at)

    launched = seconds(slow)
    assert launched["sampling"] == pytest.approx(40)  # 2 turns of 10 tokens through 2 layers
    assert launched["layers"] == 80  # 2 passes of (prompt + 4 buckets), reference + forward + backward as 2, 2 layers
    assert launched["output"] == 20  # 160 tokens, 8 a chunk of 2**23 logits
    assert seconds(slow, " --gradient_checkpointing")["layers"] == 20  # nothing shared: 1 run of 5 units
    assert seconds(slow, " --micro_batch_tokens 30")["layers"] == 320  # groups cut in two, each part a pass: 8
    assert seconds(slow, " --beta 0")["layers"] == 60
    split = seconds(slow, processes=2)
    assert split["sampling"] == pytest.approx(20) and split["layers"] == 16  # one turn; 1 pass of prompt + completions
    assert split["exchange"] == 0  # behind the layers

    bound = seconds(fast)
    weights, logits = 2 * 9e5, 8 * 48 * 2**20
    assert bound["sampling"] == pytest.approx(20 * (weights + logits + 8 * (5 + 5) * 2**20 * 5) / 3.35e12, rel=1e-4)
    assert bound["layers"] == pytest.approx(2 * 8e5 * (160 + 4 * 5) * 4 / 989e12)
    assert bound["step"] == pytest.approx((28e6 + 6e6) / 3.35e12)
    assert seconds(fast, processes=2)["step"] == pytest.approx((14e6 + 6e6) / 3.35e12)
    gathered = 2 * 8e5 * (3 * 2 + 4) + 2e5 * 4 * 4  # twice through the layers: 3 gathers in 2 bytes, a sum in 4
    assert seconds(fast, processes=2)["exchange"] == pytest.approx((gathered + 2e6) / 2 / 450e9)
    mean = SimpleNamespace(
        **(vars(fast) | {"longest": False})
    )  # 4 of 10 tokens: fewer rows in each step, not fewer steps
    assert seconds(mean)["sampling"] == pytest.approx(
        20 * (weights + 0.4 * (logits + 8 * 10 * 2**20 * 5)) / 3.35e12, rel=1e-4
    )
