"""What goes to Weights & Biases."""

import sys
import types

from conftest import run_flags

import config
import main
from grpo import jsonl


def test_a_tracker_gets_numbers_as_numbers(model_folder, tmp_path, monkeypatch):
    """All settings were once sent as texts, which no axis can have, and WANDB_PROJECT ignored."""
    wandb = types.ModuleType("wandb")
    lines = []
    runs = []

    def init(**settings):
        runs.append(settings)
        return types.SimpleNamespace(log=lambda numbers, step: lines.append((step, numbers)))

    wandb.init = init
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(config, "find_spec", lambda package: package)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    folder = tmp_path / "run"
    assert main.main(run_flags(model_folder, folder, report_to="wandb", num_train_iters=2)) == 0
    assert [step for step, _ in lines] == [0, 1, 2, 2]
    first, _ = jsonl.read(folder / "train_log.jsonl")
    assert lines[1][1] == {f"train/{name}": value for name, value in first.items()}
    assert lines[3][1]["eval/step"] == 2
    (settings,) = runs
    assert settings["config"]["learning_rate"] == 1e-3
    assert settings["project"] == "mine" and settings["name"] == "run"


def test_tensorboard_hides_what_was_written_after_the_checkpoint(
    model_folder, tmp_path, monkeypatch
):
    """A resumed run once drew both curves."""
    tensorboard = types.ModuleType("torch.utils.tensorboard")
    starts = []

    class SummaryWriter(types.SimpleNamespace):
        def __init__(self, folder, purge_step):
            starts.append(purge_step)

        def add_scalar(self, name, value, step):
            pass

        def flush(self):
            pass

    tensorboard.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setattr(config, "find_spec", lambda package: package)
    folder = tmp_path / "run"
    flags = dict(report_to="tensorboard", eval_iterations=100)
    assert main.main(run_flags(model_folder, folder, num_train_iters=2, **flags)) == 0
    assert main.main(["--resume", "--output_dir", str(folder), "--num_train_iters", "4"]) == 0
    assert starts == [0, 3]
