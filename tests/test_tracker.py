"""What goes to Weights & Biases and to TensorBoard."""

import sys
from unittest import mock

import pytest
from conftest import run_flags

import config
import main
from grpo import jsonl


@pytest.fixture
def package(monkeypatch):
    """Stands for whatever package a tracker imports."""
    package = mock.Mock()
    for name in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr(config, "find_spec", lambda name: name)
    return package


def test_a_tracker_gets_numbers_as_numbers(package, model_folder, tmp_path, monkeypatch):
    """All settings were once sent as texts, which no axis can have, and WANDB_PROJECT ignored."""
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    folder = tmp_path / "run"
    assert main.main(run_flags(model_folder, folder, report_to="wandb", num_train_iters=2)) == 0
    (start,) = package.init.call_args_list
    assert start.kwargs["config"]["learning_rate"] == 1e-3
    assert start.kwargs["project"] == "mine" and start.kwargs["name"] == "run"
    calls = package.init.return_value.log.call_args_list
    assert [call.kwargs["step"] for call in calls] == [0, 1, 2, 2]
    lines = [call.args[0] for call in calls]
    first, _ = jsonl.read(folder / "train_log.jsonl")
    assert lines[1] == {f"train/{name}": value for name, value in first.items()}
    assert lines[3]["eval/step"] == 2


def test_tensorboard_hides_what_was_written_after_the_checkpoint(package, model_folder, tmp_path):
    """A resumed run once drew both curves."""
    folder = tmp_path / "run"
    flags = dict(report_to="tensorboard", eval_iterations=100)
    assert main.main(run_flags(model_folder, folder, num_train_iters=2, **flags)) == 0
    assert main.main(["--resume", "--output_dir", str(folder), "--num_train_iters", "4"]) == 0
    starts = package.SummaryWriter.call_args_list
    assert [start.kwargs["purge_step"] for start in starts] == [0, 3]
