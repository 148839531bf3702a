"""Out of memory, a script ends with one line that names the flag to lower, and half its value."""

import pytest
import torch
from conftest import as_flags, assert_same_run, run_flags

import generate_gold
import main
from sampling import generation
from training.memory import is_out_of_memory

ERRORS = {
    "torch": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "driver": RuntimeError("CUDA error: out of memory"),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    "CPU": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
}


def fail_from_call(monkeypatch, module, name, first_call, error):
    """Let the calls of a module's function fail, from this one on, counted from 1."""
    original = getattr(module, name)
    calls = []

    def function(*args, **kwargs):
        calls.append(name)
        if len(calls) >= first_call:
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, function)


@pytest.mark.parametrize("error", [*ERRORS.values(), MemoryError()], ids=repr)
def test_a_lack_of_memory_is_recognised(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("out of memory")])
def test_other_errors_are_not_taken_for_a_lack_of_memory(error):
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    ("module", "name", "first_call", "error", "advice"),
    [
        pytest.param(main, "compute_loss", 3, "cuBLAS", "--micro_batch_tokens 8192", id="loss"),
        pytest.param(
            generation,
            "generate",
            4,
            "torch",
            "--max_concurrent_sequences 256",
            id="sampling",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_line_says_how_the_run_goes_on(
    module, name, first_call, error, advice, whole_run, model_folder, tmp_path, monkeypatch, capsys
):
    """And with what it says the run ends as one that was never stopped."""
    with monkeypatch.context() as patch:
        fail_from_call(patch, module, name, first_call, ERRORS[error])
        assert main.main(run_flags(model_folder, tmp_path)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: out of memory: --resume with {advice}; ")
    assert not (tmp_path / "traceback.txt").exists()
    assert main.main(["--resume", "--output_dir", str(tmp_path), *advice.split()]) == 0
    assert_same_run(tmp_path, whole_run)


def test_gold_names_the_number_of_prompts_in_a_batch(model_folder, tmp_path, monkeypatch, capsys):
    fail_from_call(monkeypatch, generation, "generate", 1, ERRORS["driver"])
    flags = as_flags(
        model_name=model_folder,
        dataset_name="arithmetic",
        num_problems=6,
        concurrency=6,
        output=tmp_path / "gold.jsonl",
    )
    assert generate_gold.main(flags) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == "error: out of memory: start again with --concurrency 3"
