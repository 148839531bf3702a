"""Out of memory, a run goes on with smaller parts of the same work, and learns the same."""

import gc
import itertools
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    ROOT,
    approx,
    as_flags,
    assert_same_gradient,
    assert_same_log_row,
    assert_same_run,
    closed_port,
    flat_gradient,
    logs_of,
    ragged_batch,
    rollout_of,
    run_flags,
    start,
)

import distributed
import generate_gold
import main
import sft
import utils
from logs import jsonl
from sampling import decoding, generation
from training import checkpoints, memory, steps

sys.path.insert(0, str(ROOT / "experiments"))
import expert_iteration  # noqa: E402

PROGRAMS = {"main": main.main, "sft": sft.main, "expert iteration": expert_iteration.main}


def fail_in_calls(monkeypatch, module, name, calls):
    """Let some calls, counted from 1, of a module's function end out of memory."""
    original = getattr(module, name)
    numbers = itertools.count(1)

    def function(*args, **kwargs):
        if next(numbers) in calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, function)


def stop_in_call(monkeypatch, module, name, call):
    """Let a call, counted from 1, of a module's function end in an error that ends the run."""
    original = getattr(module, name)
    numbers = itertools.count(1)

    def function(*args, **kwargs):
        if next(numbers) == call:
            raise RuntimeError("the end")
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, function)


def fail_above(monkeypatch, module, name, size_of, limit):
    """Let calls of a module's function end out of memory if their size is above a limit."""
    original = getattr(module, name)

    def function(*args, **kwargs):
        if size_of(*args, **kwargs) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, function)


def fail_in_backward(monkeypatch, model, call):
    """Let a backward pass, counted from 1, end out of memory after it has made some gradients."""
    numbers = itertools.count(1)

    def hook(gradient):
        if next(numbers) == call:
            is_done = model.model.norm.weight.grad is not None
            assert is_done, "the pass should have made the last layer's gradient before"
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    handle = model.model.layers[0].input_layernorm.weight.register_hook(hook)
    return handle


# --- The gradient of an update --------------------------------------------------------------------


def update(model, base_model, micro_batch_tokens=80, **settings):
    """(flags, metrics, gradient) of an update; by default in three micro-batches of two groups."""
    flags = run_flags("unused", "unused", micro_batch_tokens=micro_batch_tokens, **settings)
    args = main.parse_args(flags)
    batch = ragged_batch(groups=6)
    run = SimpleNamespace(model=model, base_model=base_model)
    metrics = main.accumulate_gradient(
        args, run, rollout_of(batch), batch["advantages"], list(range(24))
    )
    gradient = flat_gradient(model)
    model.zero_grad()
    return args, metrics, gradient


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_an_update_that_ran_out_of_memory_is_that_of_smaller_micro_batches(
    place, micro_batch, model, base_model, monkeypatch, capsys
):
    """A gradient of the failed attempt that stayed would be counted twice, as would its metrics."""
    _, expected_metrics, expected_gradient = update(model, base_model)
    _, half_metrics, half_gradient = update(model, base_model, micro_batch_tokens=40)
    if place == "backward":
        fail_in_backward(monkeypatch, model, micro_batch)
    else:
        fail_in_calls(monkeypatch, main, "compute_loss", [micro_batch])
    args, metrics, gradient = update(model, base_model)
    assert args.micro_batch_tokens == 40
    assert metrics == half_metrics
    assert torch.equal(gradient, half_gradient)
    assert metrics == approx(expected_metrics)
    assert_same_gradient(gradient, expected_gradient)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert "out of memory with --micro_batch_tokens 80: going on with 40" in lines[0]


def test_micro_batches_shrink_to_a_single_row_and_no_further(
    model, base_model, monkeypatch, capsys
):
    """A group may be split. Where even a row does not fit, the flag stays what it was."""
    _, _, expected = update(model, base_model)

    def num_rows(model, base_model, ids, *args, **kwargs):
        return len(ids)

    with monkeypatch.context() as patch:
        fail_above(patch, main, "compute_loss", num_rows, 1)
        args, _, gradient = update(model, base_model, micro_batch_tokens=16384)
    assert args.micro_batch_tokens <= 13  # a row and a group's prompt are no longer
    assert_same_gradient(gradient, expected)
    # 24 rows of 13 columns are one micro-batch at most: halves that do not split it are left out.
    assert capsys.readouterr().out.startswith("out of memory with --micro_batch_tokens 16384")

    fail_above(monkeypatch, main, "compute_loss", num_rows, 0)
    args = main.parse_args(run_flags("unused", "unused", micro_batch_tokens=500))
    batch = ragged_batch(groups=6)
    run = SimpleNamespace(model=model, base_model=base_model)
    with pytest.raises(memory.OutOfMemory, match="one completion at a time.*--gradient_checkp"):
        main.accumulate_gradient(args, run, rollout_of(batch), batch["advantages"], list(range(24)))
    assert args.micro_batch_tokens == 500


def test_other_errors_are_not_taken_for_a_lack_of_memory(model, base_model, monkeypatch):
    def compute_loss(*args, **kwargs):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(main, "compute_loss", compute_loss)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        update(model, base_model)


def test_what_a_failed_attempt_held_is_freed_before_the_next_one(model):
    """The exception's traceback holds the frames of the attempt, and they hold its tensors.

    The error is one that the CPU's allocator really raises.
    """
    held = []
    is_kept = []
    settings = SimpleNamespace(rows=4)
    decoding.CAPTURED_DECODERS[model] = "a decoder with its memory"

    def attempt():
        is_kept.append([reference() is not None for reference in held])
        tensor = torch.ones(settings.rows, requires_grad=True)
        product = tensor * 2
        held.extend([weakref.ref(tensor), weakref.ref(product)])
        if settings.rows == 4:
            torch.empty(2**50, dtype=torch.uint8)
        return product.sum().item()

    gc.disable()
    try:
        result = memory.halve_until_it_fits(
            attempt, model=model, settings=settings, flag="rows", divide=lambda rows: rows
        )
    finally:
        gc.enable()
    assert result == 4
    assert is_kept == [[], [False, False]]
    assert model not in decoding.CAPTURED_DECODERS


# --- Sampling -------------------------------------------------------------------------------------


def rows_of_turn(turn, *args):
    """How many rows a turn still samples. Turns are made in sampling alone, and not at load."""
    return len(turn.rows)


class Bar:
    """Stands in for a progress bar."""

    n = 0

    def reset(self):
        self.n = 0

    def update(self, num_finished):
        self.n += num_finished


def sample(model, tokenizer, max_concurrent_sequences):
    """(flags, rollout, next random number, bar) of 12 completions."""
    flags = run_flags(
        "unused",
        "unused",
        max_concurrent_sequences=max_concurrent_sequences,
        max_completion_length=30,
    )
    args = main.parse_args(flags)
    run = SimpleNamespace(
        model=model,
        sampler=model,
        tokenizer=tokenizer,
        train_loader=SimpleNamespace(prompt=SimpleNamespace(stop_strings=("</answer>",))),
    )
    examples = [{"prompt": text} for text in ("one and two", "three", "four plus five")]
    bar = Bar()
    torch.manual_seed(3)
    rollout = steps.sample(args, run, examples, 4, 1.0, progress=bar)
    return args, rollout, torch.rand(1), bar


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        pytest.param(generation, "_run_prompts", 1, id="prompts"),
        pytest.param(generation, "_run_prompts", 3, id="prompts of a later turn"),
        pytest.param(decoding.Decoder, "step", 2, id="decode step"),
        pytest.param(decoding.Decoder, "step", 50, id="decode step of a later turn"),
    ],
)
def test_samples_stay_bit_for_bit_the_same(module, name, call, model, tokenizer, monkeypatch):
    """Random numbers that are drawn again would give other samples, now and in all that follows."""
    _, expected, expected_number, _ = sample(model, tokenizer, 4)
    fail_in_calls(monkeypatch, module, name, [call])
    args, rollout, number, bar = sample(model, tokenizer, 4)
    assert args.max_concurrent_sequences == 2
    assert torch.equal(rollout.completion_ids, expected.completion_ids)
    assert torch.equal(rollout.finished, expected.finished)
    assert rollout.texts == expected.texts
    assert torch.allclose(rollout.sampled_logps, expected.sampled_logps, atol=1e-6)
    assert torch.equal(number, expected_number)
    assert bar.n == 12


@pytest.mark.slow
def test_sampling_shrinks_to_a_single_row_and_no_further(model, tokenizer, monkeypatch, capsys):
    _, expected, _, _ = sample(model, tokenizer, 512)

    with monkeypatch.context() as patch:
        fail_above(patch, generation._Turn, "find_ends", rows_of_turn, 1)
        args, rollout, _, _ = sample(model, tokenizer, 512)
    assert args.max_concurrent_sequences == 1
    assert torch.equal(rollout.completion_ids, expected.completion_ids)
    lines = capsys.readouterr().out.splitlines()
    # There are 12 rows, so that 256, 128 ... would change nothing.
    assert "--max_concurrent_sequences 512: going on with 8" in lines[0]
    assert len(lines) == 4

    fail_above(monkeypatch, generation._Turn, "find_ends", rows_of_turn, 0)
    with pytest.raises(memory.OutOfMemory, match="one completion at a time"):
        sample(model, tokenizer, 512)


# --- Whole runs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def command(model_folder, gold_file):
    """command(program, output_dir, **flags): the flags of a small run."""
    common = dict(
        model_name=model_folder,
        dataset_name="arithmetic",
        evaluator="letters",
        eval_size=4,
        learning_rate=1e-3,
        train_batch_size=4,
        device="cpu",
    )
    small = {
        "sft": dict(
            train_file=gold_file,
            num_updates=4,
            eval_updates=2,
            save_updates=2,
            max_completion_length=300,
        ),
        "expert iteration": dict(
            num_questions=4, group_size=4, n_ei_steps=2, epochs=4, max_completion_length=6
        ),
    }

    def flags_of(program, output_dir, **flags):
        if program == "main":
            return run_flags(model_folder, output_dir, **flags)
        return as_flags(output_dir=output_dir, **common | small[program] | flags)

    return flags_of


def last_row(folder):
    return jsonl.read(folder / "train_log.jsonl")[-1]


def newest_weights(folder):
    path, _ = checkpoints.find(folder)
    return (path / "model.safetensors").read_bytes()


def assert_same_work(folder, expected_folder):
    """Two runs have equal samples, and equal logs up to rounding and the flags in question."""
    logs = logs_of(folder)
    expected_logs = logs_of(expected_folder)
    assert logs.keys() == expected_logs.keys()
    train_rows = logs.pop("train_log.jsonl")
    for row, expected in zip(train_rows, expected_logs.pop("train_log.jsonl"), strict=True):
        flags = {flag: expected[flag] for flag in memory.FLAGS}
        assert_same_log_row(row | flags, expected)
    for name, rows in logs.items():
        if name == "eval_log.jsonl" or name.startswith("eval"):
            assert rows == expected_logs[name]
        else:
            for row, expected in zip(rows, expected_logs[name], strict=True):
                assert row["completion"] == expected["completion"]


@pytest.mark.parametrize(
    ("program", "turn", "flags"),
    [
        pytest.param("main", 1, dict(eval_samples=2, eval_temperature=1.0), id="evaluation"),
        pytest.param("main", 2, {}, id="sampling"),
        pytest.param(
            "main",
            3,
            dict(dynamic_sampling=2, evaluator="gsm8k"),
            id="replacement",
            marks=pytest.mark.slow,
        ),
        pytest.param("sft", 2, dict(eval_temperature=1.0), id="sft", marks=pytest.mark.slow),
        pytest.param("expert iteration", 2, {}, id="expert iteration", marks=pytest.mark.slow),
    ],
)
def test_sampling_in_smaller_turns_changes_nothing_in_a_run(
    program, turn, flags, command, tmp_path, monkeypatch, capsys
):
    """Prompts are drawn once, and logs count every completion once.

    Args:
        turn: the one that fails; the first one is that of the evaluation before any update.
    """
    run = PROGRAMS[program]
    assert run(command(program, tmp_path / "undisturbed", **flags)) == 0

    capsys.readouterr()
    fail_in_calls(monkeypatch, generation._Turn, "decode", [turn])
    assert run(command(program, tmp_path / "short of memory", **flags)) == 0
    assert capsys.readouterr().out.count("out of memory with --max_concurrent_sequences 512") == 1
    assert last_row(tmp_path / "short of memory")["max_concurrent_sequences"] <= 8
    assert_same_work(tmp_path / "short of memory", tmp_path / "undisturbed")
    weights = [newest_weights(tmp_path / name) for name in ("short of memory", "undisturbed")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("program", "limit", "flags"),
    [
        pytest.param("main", 300, {}, id="main"),
        pytest.param(
            "main",
            300,
            dict(epochs_per_rollout_batch=2, train_batch_size=4),
            id="off-policy",
            marks=pytest.mark.slow,
        ),
        pytest.param("sft", 1000, {}, id="sft", marks=pytest.mark.slow),
        pytest.param("expert iteration", 300, {}, id="expert iteration", marks=pytest.mark.slow),
    ],
)
def test_a_run_short_of_memory_is_one_with_smaller_micro_batches(
    program, limit, flags, command, tmp_path, monkeypatch, capsys
):
    """The log-probs that several updates share are computed in micro-batches too.

    Args:
        limit: the tokens, prompts counted for each row, that fit into memory.
    """
    run = PROGRAMS[program]

    def num_tokens(model, prompt_completion_ids, *args, **kwargs):
        return prompt_completion_ids.numel()

    short_of_memory = tmp_path / "short of memory"
    smaller = tmp_path / "smaller"
    with monkeypatch.context() as patch:
        fail_above(patch, utils, "get_per_token_logps", num_tokens, limit)
        fail_above(patch, main, "get_per_token_logps", num_tokens, limit)
        assert run(command(program, short_of_memory, **flags)) == 0
    assert "out of memory with --micro_batch_tokens 16384" in capsys.readouterr().out
    value = last_row(short_of_memory)["micro_batch_tokens"]
    assert value < 16384
    assert run(command(program, smaller, **flags, micro_batch_tokens=value)) == 0
    assert run(command(program, tmp_path / "undisturbed", **flags)) == 0

    assert last_row(short_of_memory)["grad_norm"] > 0, "nothing was learnt"
    assert logs_of(short_of_memory) == logs_of(smaller)
    assert newest_weights(short_of_memory) == newest_weights(smaller)
    assert_same_work(short_of_memory, tmp_path / "undisturbed")


@pytest.mark.parametrize("program", ["main", pytest.param("sft", marks=pytest.mark.slow)])
def test_a_resumed_run_goes_on_with_the_lower_values(program, command, tmp_path, monkeypatch):
    """The run has room again when it goes on: it would otherwise begin with the flags anew."""
    run = PROGRAMS[program]
    for folder in ("whole", "resumed"):
        with monkeypatch.context() as patch:
            fail_in_calls(patch, utils, "aggregate_tokens", [1])
            fail_in_calls(patch, generation._Turn, "decode", [2])
            if folder == "resumed":
                stop_in_call(patch, steps, "clip_and_step", 3)
            exit_code = run(command(program, tmp_path / folder))
            assert exit_code == (1 if folder == "resumed" else 0)
    assert run(["--resume", "--output_dir", str(tmp_path / "resumed")]) == 0
    assert last_row(tmp_path / "resumed")["micro_batch_tokens"] < 16384
    assert last_row(tmp_path / "resumed")["max_concurrent_sequences"] < 512
    assert_same_run(tmp_path / "resumed", tmp_path / "whole")


def test_a_flag_that_is_given_anew_wins_over_the_lower_value(command, tmp_path, monkeypatch):
    """As on a larger card."""
    with monkeypatch.context() as patch:
        fail_in_calls(patch, main, "compute_loss", [1])
        fail_in_calls(patch, generation._Turn, "decode", [1])
        assert main.main(command("main", tmp_path / "run", num_train_iters=2)) == 0
    before = last_row(tmp_path / "run")
    assert before["micro_batch_tokens"] < 16384 and before["max_concurrent_sequences"] < 512
    flags = as_flags(
        resume="", output_dir=tmp_path / "run", num_train_iters=4, micro_batch_tokens=8000
    )
    assert main.main(flags) == 0
    after = last_row(tmp_path / "run")
    assert after["micro_batch_tokens"] == 8000
    assert after["max_concurrent_sequences"] == before["max_concurrent_sequences"]


@pytest.mark.parametrize("place", ["loss", "sampling"])
def test_a_single_row_that_does_not_fit_ends_the_run_with_one_line(
    place, command, whole_run, tmp_path, monkeypatch, capsys
):
    """The finished iterations are saved, and the run can go on where there is more memory."""
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        if place == "loss":
            fail_in_calls(patch, main, "compute_loss", range(4, 1000))
        else:
            fail_in_calls(patch, generation._Turn, "decode", range(3, 1000))
        assert main.main(command("main", folder)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: out of memory with one completion at a time")
    assert "a lower --max_completion_length or a smaller model" in line
    assert "which is saved: --resume continues" in line
    assert not (folder / "traceback.txt").exists()
    assert main.main(["--resume", "--output_dir", str(folder)]) == 0
    assert_same_run(folder, whole_run)


def test_gold_is_sampled_in_smaller_turns(model_folder, tmp_path, monkeypatch, capsys):
    flags = dict(
        model_name=model_folder,
        dataset_name="arithmetic",
        evaluator="letters",
        num_problems=12,
        max_completion_length=8,
        concurrency=6,
        device="cpu",
    )
    undisturbed = tmp_path / "undisturbed.jsonl"
    short_of_memory = tmp_path / "short.jsonl"
    assert generate_gold.main(as_flags(output=undisturbed, **flags)) == 0

    capsys.readouterr()
    fail_above(monkeypatch, generation._Turn, "find_ends", rows_of_turn, 2)
    assert generate_gold.main(as_flags(output=short_of_memory, **flags)) == 0
    assert "out of memory with --concurrency 6: going on with 3" in capsys.readouterr().out
    assert jsonl.read(short_of_memory) == jsonl.read(undisturbed)


# --- Several processes ----------------------------------------------------------------------------


def run_short_of_memory_in_one(flags, module_name, name, call):
    """main.py, in which the second process runs out of memory."""
    distributed.init("cpu")
    module = {"main": main, "generation": generation}[module_name]
    if distributed.rank() == 1:
        fail_in_calls(pytest.MonkeyPatch(), module, name, [call])
    return main.main(flags)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module_name", "name", "call"),
    [("main", "compute_loss", 3), ("generation", "_run_prompts", 3)],
    ids=["loss", "sampling"],
)
def test_one_process_out_of_memory_ends_all(module_name, name, call, model_folder, tmp_path):
    """One that began again alone would wait for the others in another place than they for it."""
    flags = run_flags(model_folder, tmp_path / "run", num_train_iters=6)
    job = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(closed_port()))
    arguments = (run_short_of_memory_in_one, flags, module_name, name, call)
    started = [start(*arguments, RANK=str(rank), **job) for rank in range(2)]
    outputs = [output.read() for _, output in started]
    for process, _ in started:
        process.join(60)
        assert process.exitcode == 1, outputs
    assert outputs[1].startswith("error: process 2 of 2 is out of memory: lower --")
    assert len(outputs[1].splitlines()) == 1
    assert outputs[0].count("error:") == 1
    assert "error: the connection to another process is lost" in outputs[0]
    assert not (tmp_path / "run" / "traceback.txt").exists()
