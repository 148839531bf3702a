"""What goes to Weights & Biases and TensorBoard."""

import sys
import types

import pytest
from conftest import run_flags

import config
import main
from grpo import jsonl, tracker


@pytest.fixture
def wandb(monkeypatch):
    """A module in the place of wandb, which records what it is given."""
    module = types.ModuleType("wandb")
    module.lines = []
    module.runs = []

    def init(**settings):
        module.runs.append(settings)
        return types.SimpleNamespace(
            id="abc", log=lambda numbers, step: module.lines.append((step, numbers))
        )

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(config, "find_spec", lambda package: package)
    tracker.start_wandb.cache_clear()
    return module


def test_a_tracker_gets_numbers_as_numbers_and_a_resumed_run_goes_on_in_it(
    wandb, model_folder, tmp_path, monkeypatch
):
    """All settings were once sent as texts, which no axis can have, and WANDB_PROJECT ignored."""
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    folder = tmp_path / "run"
    assert main.main(run_flags(model_folder, folder, report_to="wandb", num_train_iters=2)) == 0
    (first,) = jsonl.read(folder / "train_log.jsonl")[:1]
    assert [step for step, _ in wandb.lines] == [0, 1, 2, 2]
    assert wandb.lines[1][1]["train/reward"] == first["reward"]
    assert wandb.runs[0]["config"]["learning_rate"] == 1e-3
    assert wandb.runs[0]["project"] == "mine"
    tracker.start_wandb.cache_clear()  # as in a new process
    assert main.main(["--resume", "--output_dir", str(folder), "--num_train_iters", "3"]) == 0
    assert [run["id"] for run in wandb.runs] == [None, "abc"]
    assert [step for step, _ in wandb.lines[4:]] == [3, 3]
