"""Sends the lines of the logs to TensorBoard or Weights & Biases as well (--report_to)."""

import os
from dataclasses import asdict
from functools import cache

from config import RunConfig


def send(config: RunConfig, log: str, row: dict) -> None:
    """Send the numbers in a line of a log ("train" or "eval") to the tracker, if there is one."""
    numbers = {}
    for name, value in row.items():
        if isinstance(value, int | float):
            numbers[f"{log}/{name}"] = value
    if config.report_to == "wandb":
        start_wandb(config).log(numbers, step=row["step"])
    elif config.report_to == "tensorboard":
        writer = start_tensorboard(config)
        for name, value in numbers.items():
            writer.add_scalar(name, value, row["step"])
        writer.flush()


@cache
def start_wandb(config: RunConfig):
    """A run of Weights & Biases; a resumed one continues its own."""
    import wandb

    id_file = config.output_dir / "wandb_run"
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "grpo-lite"),
        name=config.output_dir.name,
        dir=config.output_dir,
        config=asdict(config) | {"output_dir": str(config.output_dir)},
        id=id_file.read_text() if id_file.exists() else None,
        resume="allow",
    )
    id_file.write_text(run.id)
    return run


@cache
def start_tensorboard(config: RunConfig):
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(config.output_dir / "tensorboard")
