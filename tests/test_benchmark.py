"""The benchmark's command line at its smallest: competitors do the same work, and one table comes out."""

import math
import sys

import pytest
from conftest import ROOT, random_model, run_script, small_tokenizer
from transformers import AutoModelForCausalLM, Qwen2Config

sys.path.insert(0, str(ROOT / "benchmarks"))

import benchmark
import memory_table


def small_flags(folder):
    """Flags of the command for a model of a few random weights, half of whose ids end a completion."""
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=list(range(1, 2048)),
        architectures=["Qwen2ForCausalLM"],
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    sizes = "--num_prompts 2 --group_size 2 --max_completion_length 5 --iterations 1 --repeats 1 --threads 1"
    return [*sizes.split(), "--model_name", str(folder)]


def read_table(printed):
    """{(benchmark, quantity, unit): median} of what the command prints."""
    about, _, _, _, *rows = printed.splitlines()
    assert "1 threads" in about
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {(name, quantity, unit): float(value) for name, quantity, value, _, unit in cells}


def test_sampling(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert benchmark.main(["sampling", *small_flags(tmp_path)]) == 0
    rows = read_table(capsys.readouterr().out)
    assert all(math.isfinite(value) and value > 0 for value in rows.values())
    ratios = {key[:2] for key in rows if key[2] == "ratio"}
    assert ("sampling", "natural lengths, generate / ours") in ratios
    for name in ("ours", "generate"):
        assert rows["sampling", f"natural lengths, {name}: mean completion", "tokens"] < 5
        assert rows["sampling", f"equal lengths, {name}: mean completion", "tokens"] == 5


@pytest.mark.slow
def test_step(tmp_path):
    run = run_script("benchmarks/benchmark.py", "step", *small_flags(tmp_path))
    assert run.returncode == 0, run.stderr[-2000:]
    rows = read_table(run.stdout)
    assert {key[0] for key in rows} == {"step"}
    assert all(math.isfinite(value) for value in rows.values())
    stages = ("sample", "reward", "loss", "step")
    seconds = {stage: rows["step", f"ours: {stage}", "s"] for stage in stages}
    assert min(seconds.values()) > 0
    assert sum(seconds.values()) < rows["step", "ours: whole step", "s"], "logs take time as well"


def test_memory_table_by_hand(tmp_path, capsys):
    """Two layers of hidden size 32: bytes from the parameter count, and what a layer keeps for one token at most."""
    model = random_model()
    model.config.save_pretrained(tmp_path)
    flags = [
        str(tmp_path),
        "--processes",
        "1",
        "4",
        "--max_concurrent_sequences",
        "10",
        "--gpu_memory",
        "0.003",
    ]
    memory_table.main(flags)
    header, _, *rows = [
        line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()
    ]
    assert [row[1] for row in rows] == ["1", "4"] and {len(row) for row in rows} == {len(header)}
    assert all(row[-1] == "**no**" for row in rows)
    args, P = memory_table.parse_args(flags), model.num_parameters()
    one, four = (memory_table.parts(model.config, n, args, activation=100) for n in (1, 4))
    assert (
        one["master weights"] == 4 * P
        and four["optimiser"] == 2 * P
        and four["sampling copy"] == 2 * P
    )
    assert (
        one["cache"] == 10 * 1024 * 2 * (2 * 2 * 8) * 2 + 4 * 4 * 10 * 48
    )  # K and V, 2 layers, 2 heads of 8
    for memory, kept in (
        (8 * one["cache"], one["cache"]),
        (4 * one["cache"], 0),
    ):  # for CUDA graphs, or too much
        stages = memory_table.stages(one, memory)
        assert stages["loss"] == 22 * P + kept + one["activations"] + one["weights at work"]
    # Per token and layer: counted by hand from the modules, some 34 H + 8 I bytes, and the keys and values.
    kept = memory_table.activation_bytes(model.config, 8, False) / 2
    assert 0.8 * (30 * 32 + 8 * 64) < kept < 1.5 * (34 * 32 + 8 * 64)
    assert memory_table.activation_bytes(model.config, 8, True) < 2 * kept
