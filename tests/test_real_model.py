"""A slow check with a real pretrained model: two iterations, and the same with a resume between."""

import os
from pathlib import Path

import pytest
import torch
from conftest import as_flags, run_script
from safetensors.torch import load_file

from grpo import jsonl

pytestmark = pytest.mark.slow


@pytest.fixture
def real_model():
    folder = os.environ.get("GRPO_LITE_MODEL")
    if not folder:
        pytest.skip(
            "set GRPO_LITE_MODEL to the folder of a pretrained chat model, such as the one that"
            " `hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir FOLDER` makes"
        )
    return Path(folder)


def test_real_model_trains_and_resumes_exactly(real_model, tmp_path):
    # The model would answer no problem in this format, and equal rewards teach nothing.
    (tmp_path / "reward.py").write_text(
        "def num_letters(completions, answers, **columns):\n"
        "    return [sum(map(str.isalpha, text)) / 100 for text in completions]\n"
    )
    flags = as_flags(
        model_name=real_model,
        dataset_name="arithmetic",
        evaluator=f"{tmp_path / 'reward.py'}:num_letters",
        device="cpu",
        num_train_iters=2,
        rollout_batch_size=8,
        group_size=4,
        max_completion_length=24,
        learning_rate=1e-5,
        eval_size=4,
        save_iterations=1,
        output_dir=tmp_path / "whole",
    )
    whole = run_script("main.py", *flags)
    assert whole.returncode == 0, whole.stderr[-2000:]
    rows = jsonl.read(tmp_path / "whole" / "train_log.jsonl")
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert all(row["sampling_logp_gap"] < 1e-4 and row["grad_norm"] > 0.1 for row in rows)

    halves = tmp_path / "halves"
    first = run_script("main.py", *flags, *as_flags(num_train_iters=1, output_dir=halves))
    assert first.returncode == 0, first.stderr[-2000:]
    second = run_script("main.py", *as_flags(output_dir=halves, resume="", num_train_iters=2))
    assert second.returncode == 0, second.stderr[-2000:]
    weights = "checkpoints/step_000002/model.safetensors"
    expected = load_file(tmp_path / "whole" / weights)
    resumed = load_file(halves / weights)
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
