"""Sends the lines of the logs to TensorBoard or Weights & Biases as well (--report_to)."""

import os
from dataclasses import asdict
from functools import cache

from config import RunConfig

_tensorboards = {}  # the SummaryWriter of each run


def send(config: RunConfig, log: str, row: dict) -> None:
    """Send the numbers in a line of a log ("train" or "eval") to the tracker."""
    numbers = {f"{log}/{name}": value for name, value in row.items()}
    if config.report_to == "wandb":
        start_wandb(config).log(numbers, step=row["step"])
    else:
        if config not in _tensorboards:
            from torch.utils.tensorboard import SummaryWriter

            # What a killed run wrote after the checkpoint that it resumes from is hidden.
            _tensorboards[config] = SummaryWriter(
                config.output_dir / "tensorboard", purge_step=row["step"]
            )
        writer = _tensorboards[config]
        for name, value in numbers.items():
            writer.add_scalar(name, value, row["step"])
        writer.flush()


@cache
def start_wandb(config: RunConfig):
    import wandb

    return wandb.init(
        project=os.environ.get("WANDB_PROJECT", "grpo-lite"),
        name=config.output_dir.name,
        dir=config.output_dir,
        config=asdict(config) | {"output_dir": str(config.output_dir)},
        resume="auto",  # a run that was killed
    )
