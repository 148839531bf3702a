"""The benchmarks' command lines at their smallest: competitors do the same work, tables add up."""

import json
import math
import re
import sys

import pytest
import torch
from conftest import ROOT, random_model, run_script, small_tokenizer
from transformers import AutoModelForCausalLM, Qwen2Config

sys.path.insert(0, str(ROOT / "benchmarks"))

import benchmark
import gpu
import gpu_estimate
import math_grading
import memory_table

from sampling.decoding import Decoder


def small_flags(folder):
    """The command's flags for a model of a few random weights.

    Half of its ids end a completion.
    """
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
    sizes = "--num_prompts 2 --group_size 2 --max_completion_length 5"
    repeats = "--iterations 1 --repeats 1 --threads 1"
    return [*sizes.split(), *repeats.split(), "--model_name", str(folder)]


def read_table(printed):
    """{(benchmark, quantity, unit): median} of what the command prints."""
    about, _, _, _, *rows = printed.splitlines()
    assert "1 threads" in about
    medians = {}
    for row in rows:
        name, quantity, value, _, unit = map(str.strip, row.strip("|").split("|"))
        medians[name, quantity, unit] = float(value)
    return medians


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
    """Two layers of hidden size 32: each number of bytes follows from the count of parameters."""
    model = random_model()
    model.config.save_pretrained(tmp_path)
    flags = [str(tmp_path), "--processes", "1", "4"]
    flags += ["--max_concurrent_sequences", "50", "--rollout_batch_size", "24"]
    flags += ["--gpu_memory", "0.003"]
    memory_table.main(flags)
    lines = capsys.readouterr().out.splitlines()
    header, _, *rows = [line.strip("| ").split(" | ") for line in lines]
    assert [row[1] for row in rows] == ["1", "4"]
    assert {len(row) for row in rows} == {len(header)}
    assert all(row[-1] == "**no**" for row in rows)

    args = memory_table.parse_args(flags)
    P = model.num_parameters()
    one = memory_table.memory_by_purpose(model.config, 1, args, activation=100)
    four = memory_table.memory_by_purpose(model.config, 4, args, activation=100)
    assert one["master weights"] == 4 * P
    assert four["optimiser"] == 2 * P
    assert four["sampling copy"] == 2 * P
    # Keys and values, 2 layers, 2 heads of size 8, in bfloat16; and the logits. Of 24 completions
    # an iteration samples all at one time on one GPU, and six on each of four.
    cache_of_sequence = 1024 * 2 * (2 * 2 * 8) * 2 + 2 * 4 * 48
    assert one["cache"] == 24 * cache_of_sequence
    assert four["cache"] == 6 * cache_of_sequence
    assert one["cache in evaluation"] == four["cache in evaluation"] == 50 * cache_of_sequence
    assert one["logits"] == 4 * 4 * 16384 * 48  # a whole micro-batch: fewer than a chunk may have
    # On a GPU of 8 times its size a cache stays for CUDA graphs.
    at_work = one["activations"] + one["logits"] + one["weights at work"]
    for_iteration = one["cache"]
    for_evaluation = one["cache in evaluation"]
    for gpu_memory, lasting_cache, caches_in_evaluation in (
        (8 * for_evaluation, for_evaluation, for_evaluation),
        (8 * for_iteration, for_iteration, for_iteration + for_evaluation),
        (7 * for_iteration, 0, for_evaluation),
    ):
        stages = memory_table.peaks(one, gpu_memory)
        assert stages["loss"] == 22 * P + lasting_cache + at_work
        assert stages["sample"] == 22 * P + (lasting_cache or for_iteration)
        assert stages["evaluation"] == 22 * P + caches_in_evaluation


def test_the_figure_of_memory_is_the_table(tmp_path, capsys):
    """A bar for each row, as long as its peak, in the parts that the stage of the peak needs."""
    memory = {purpose: 0 for purpose in memory_table.COLORS}
    memory |= {"master weights": 8e9, "cache": 4e9, "cache in evaluation": 4e9}
    memory |= {"activations": 30e9, "step": 33e9}
    small = memory | {"activations": 2e9, "step": 1e9}
    rows = [memory_table.Row("big", 1, memory), memory_table.Row("big", 2, small)]
    # Of 48 GB the cache takes less than an eighth, so that it stays while the step is taken.
    fig = memory_table.draw(rows, gpu_memory=48e9)
    (ax,) = fig.axes
    parts = [
        (bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_width()) for bar in ax.patches
    ]
    assert parts == [
        pytest.approx(part)
        for part in ((0, 0, 8), (0, 8, 4), (0, 12, 33), (1, 0, 8), (1, 8, 4), (1, 12, 2))
    ]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["big, 1 GPU", "big, 2 GPUs"]
    assert [line.get_xdata()[0] for line in ax.lines] == [24, 48, 80]
    assert fig.get_suptitle() == "GPUs of 48 GB that are needed with these flags: big: 2"
    assert memory_table.title_of(rows[:1], 48e9).endswith("big: more than 1")

    random_model().config.save_pretrained(tmp_path / "model")
    figure = tmp_path / "memory.png"
    memory_table.main([str(tmp_path / "model"), "--output", str(figure)])
    assert figure.exists()
    with pytest.raises(SystemExit):
        memory_table.main([str(tmp_path / "model"), "--output", str(tmp_path / "absent/a.png")])
    assert "there is no folder" in capsys.readouterr().err.splitlines()[-1]


def test_activations_by_hand():
    """What a layer keeps for one token, counted from its modules.

    That is some 34 H + 8 I bytes, and the keys and values.
    """
    config = random_model().config
    two_layers = memory_table.activation_bytes(config, 8, False)
    one_layer = two_layers / 2
    assert 0.8 * (30 * 32 + 8 * 64) < one_layer < 1.5 * (34 * 32 + 8 * 64)
    assert memory_table.activation_bytes(config, 8, True) < two_layers


@pytest.mark.slow
def test_math_grading(tmp_path, capsys, monkeypatch):
    """Right answers in another notation are right, and altered ones are wrong."""
    golds = ["12", "1500", r"\frac{3}{4}", "(1,2)", "x^2+1", r"3\sqrt{2}", r"\text{even}", "2k-1"]
    data = tmp_path / "golds.jsonl"
    data.write_text("".join(json.dumps({"answer": gold}) + "\n" for gold in golds))
    monkeypatch.setattr(math_grading, "HOSTILE", ["{" * 1000])
    assert math_grading.main(["--data", str(data)]) == 0
    table, _, listed = capsys.readouterr().out.partition("Wrong answers")
    counts = {}
    for row in table.strip().splitlines()[2:]:
        kind, n, ours, other, *_ = row.strip("|").split("|")
        counts[kind.strip()] = (int(n), ours.strip(), other.strip())
    assert counts["right: gold answers"] == (8, "0 refused", "0 refused")
    assert counts["right: other notations"][1] == "0 refused"
    assert counts["right: other notations"][0] > 10
    for kind in ("other golds", "a digit or sign changed", "near misses", "hostile"):
        assert counts[f"wrong: {kind}"][1] == "0 equal"
    assert "- GRPO-Lite" not in listed
    assert r"`\frac{1}{3}` | `0.333333`" in listed, "math-verify rounds"


def test_math_grading_without_data(capsys, monkeypatch):
    monkeypatch.delenv("GRPO_LITE_DATA", raising=False)
    with pytest.raises(SystemExit) as exit_info:
        math_grading.main([])
    assert exit_info.value.code == 2
    assert "name one by --data" in capsys.readouterr().err


# --- What a GPU does ------------------------------------------------------------------------------


class RecordedDecoder(Decoder):
    """Stands in for a decoder whose steps are captured as CUDA graphs."""

    graphs = {"one": None}


class WrongDecoder(RecordedDecoder):
    """Its steps draw other tokens than they should."""

    def draw(self, model, hidden, temperature):
        super().draw(model, -hidden, temperature)


def test_decode_steps_are_compared_token_by_token():
    model = random_model()
    ordinary, same, wrong = (
        gpu.run_decoder(decoder, model, rows=3, slots=64, num_steps=10)
        for decoder in (Decoder, RecordedDecoder, WrongDecoder)
    )
    assert ordinary.tokens.shape[0] == 3
    assert len(ordinary.tokens.unique()) > 5, "the rows draw with random numbers of their own"
    assert gpu.compare(ordinary, same) == "equal"
    assert "tokens differ" in gpu.compare(ordinary, wrong)
    assert "nothing was captured" in gpu.compare(ordinary, ordinary)


def test_bytes_of_a_decode_step_by_hand():
    """2 layers with 2 heads of size 8, in float32; an embedding that is only looked up is free."""
    model = random_model()
    run = gpu.run_decoder(Decoder, model, rows=3, slots=64, num_steps=10)
    weights = 4 * model.num_parameters()
    if not model.config.tie_word_embeddings:
        weights -= 4 * 48 * 32
    assert run.num_bytes == weights + 3 * 64 * 2 * (2 * 2 * 8) * 4


@pytest.mark.slow
def test_gpu_prints_every_table_on_a_cpu(tmp_path):
    """With random weights from a config, on one process and on two."""
    small_flags(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    run = run_script("benchmarks/gpu.py", "--quick", "--config", tmp_path, "--device", "cpu")
    assert run.returncode == 0, run.stderr[-2000:]
    tables = re.findall(r"(?:^\|.*\n)+", run.stdout, re.MULTILINE)
    decode, one_process, two_processes = (table.splitlines()[2:] for table in tables)
    assert len(decode) == len(gpu.QUICK.rows) * len(gpu.QUICK.slots)
    for table in (one_process, two_processes):
        seconds = {}
        for row in table:
            stage, value, *_ = row.strip("| ").split(" | ")
            seconds[stage] = float(value)
        whole = seconds.pop("whole iteration")
        assert 0 < sum(seconds.values()) < whole + 0.01, "a stage is rounded to a millisecond"


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--device", "cpu"], "no GPU here"),
        (["--quick", "--config", "absent"], "no config.json in absent"),
        (["--quick", "--model_name", "tiny/absent"], "no such directory"),
        (["--quick", "--group_size", "5"], "not a multiple"),
    ],
)
def test_gpu_refuses_in_one_line(flags, message, capsys):
    assert gpu.main(flags) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert error.count("\n") == 0


# --- The estimate of a run's time -----------------------------------------------------------------


def test_kernels_and_bytes_by_hand():
    table = torch.zeros(100, 8)
    numbers = torch.zeros(4, 8)
    with gpu_estimate.KernelCounter() as counter:
        numbers.view(8, 4).t()  # two views
        assert (counter.kernels, counter.num_bytes) == (0, 0)
        numbers + numbers[:1].expand(4, 8)  # reads 128 and 128, writes 128
        assert (counter.kernels, counter.num_bytes) == (1, 3 * 128)
        table.index_select(0, torch.arange(2))  # arange writes 16; reads and writes 64 each
        assert (counter.kernels, counter.num_bytes) == (3, 3 * 128 + 16 + 2 * 64)


def test_a_decode_step_reads_its_weights_keys_and_values():
    model = random_model()
    config = model.config
    sampler = memory_table.model_of(config).to(torch.bfloat16).eval()
    short = gpu_estimate.count_decode_step(sampler, rows=4, used_slots=100)
    longer = gpu_estimate.count_decode_step(sampler, rows=4, used_slots=100 + 128)
    assert short.kernels == longer.kernels
    cache_bytes = 4 * 128 * 2 * (2 * 2 * 8) * 2  # rows, slots, layers, keys and values, bfloat16
    mask_bytes = 4 * 128 * 40  # at most: masks of 1 and 2 bytes, read and written by some kernels
    assert cache_bytes < longer.num_bytes - short.num_bytes < cache_bytes + mask_bytes
    looked_up = 48 * 32
    assert short.num_bytes > 2 * (model.num_parameters() - looked_up)


def test_the_estimate_of_an_update_by_hand(tmp_path, capsys):
    """The loss runs all tokens of all rows, and Python's launches count if they are slower."""
    random_model().config.save_pretrained(tmp_path)
    flags = [str(tmp_path), "--processes", "1", "2", "--max_completion_length", "64"]
    args = gpu_estimate.parse_args(flags)
    plan = gpu_estimate.plan_passes(256, 1, args)
    assert abs(plan.completion_tokens / 256 - 32) < 1
    prompt_tokens = 32 * gpu_estimate.PROMPT_TOKENS
    assert (
        plan.completion_tokens + prompt_tokens
        <= plan.tokens
        < 1.5 * plan.completion_tokens + prompt_tokens
    )
    parts = dict(sampling=1, body=2, output=3, communication=10, update=100, evaluation=1000)
    assert gpu_estimate.Iteration(**parts, launches=4).total == 1 + 5 + 10 + 100
    assert gpu_estimate.Iteration(**parts, launches=7).total == 1 + 7 + 10 + 100
    gpu_estimate.main(flags)
    runs, parts = capsys.readouterr().out.split("\n\n")
    for table in (runs, parts):
        assert [line.split(" | ")[1] for line in table.splitlines()[2:]] == ["1", "2"]
