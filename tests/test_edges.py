"""What once went wrong at the edges of the settings and of an update."""

import pytest
import torch
from conftest import completions_of, ragged_batch, run_flags
from safetensors.torch import load_file

import main
import utils
from config import GRPOConfig, LossConfig, parse, read_args
from grpo import jsonl


def test_an_update_without_a_token_to_learn_from_moves_nothing(model, base_model):
    """Where every completion was cut and masked, AdamW's momentum alone moved the weights."""
    config = LossConfig(group_size=4, mask_truncated_completions=True)
    optimizer = torch.optim.AdamW(model.parameters())
    completions = completions_of(ragged_batch(groups=2))

    def update():
        metrics = main.accumulate_gradient(model, base_model, completions, config, 1024)
        main.take_step(model, optimizer, 1e-2, metrics["loss"])
        return torch.nn.utils.parameters_to_vector(model.parameters())

    first_weights = update()
    second_weights = update()
    assert not torch.equal(first_weights, second_weights)
    for completion in completions:
        completion.finished = False
    assert torch.equal(update(), second_weights)


@pytest.mark.parametrize(
    "eval_flags, expected",
    [("", 0.0), ("--eval_samples 4", 0.7), ("--eval_samples 4 --eval_temperature 0.2", 0.2)],
)
def test_several_samples_are_not_one_greedy_answer_several_times(eval_flags, expected):
    """--eval_samples 4 gave the greedy answer four times."""
    args = parse(GRPOConfig, ["--temperature", "0.7", *eval_flags.split()])
    assert args.eval_temperature == expected


def test_a_processor_without_bfloat16_says_so_in_one_line(
    model_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    flags = run_flags(model_folder, tmp_path / "run", train_dtype="bfloat16")
    assert main.main(flags) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--train_dtype bfloat16" in error


def test_bfloat16_products_leave_weights_and_logs_in_float32(model_folder, tmp_path, monkeypatch):
    """A processor without such products emulates them here."""
    monkeypatch.setattr(utils, "has_bfloat16_products", lambda device: True)
    folder = tmp_path / "run"
    flags = run_flags(model_folder, folder, train_dtype="bfloat16", num_train_iters=1)
    assert main.main(flags) == 0
    assert read_args(folder / "args.json")["micro_batch_tokens"] == 1024, "what a CPU can hold"
    (row,) = jsonl.read_log(folder / "train_log.jsonl")
    assert 1e-6 < row["sampling_logp_gap"] < 0.05, "the copy that samples is bfloat16, too"
    (weights,) = folder.glob("checkpoints/*/model.safetensors")
    assert {weight.dtype for weight in load_file(weights).values()} == {torch.float32}


def test_a_resumed_run_can_leave_out_what_it_had(tmp_path):
    """A switch that was on, or a tracker, could not be taken back."""
    saved = {"args": {"gradient_checkpointing": True, "report_to": "wandb", "beta": 0.1}}
    jsonl.write_json(tmp_path / "args.json", saved)
    resume = ["--resume", "--output_dir", str(tmp_path)]
    config = parse(GRPOConfig, [*resume, "--no-gradient_checkpointing", "--report_to", "none"])
    assert not config.gradient_checkpointing
    assert config.report_to == "none"
    assert config.beta == 0.1
