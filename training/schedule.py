"""The plan of a training run's updates: which rows each one trains on, and its learning rate."""

import math

import torch

import distributed
from config import GRPOConfig


def split_into_updates(config: GRPOConfig) -> list[list[int]]:
    """Plan the updates over one rollout batch: a list of row numbers for each update.

    Every epoch shuffles the groups and cuts them into batches of train_batch_size rows, which are
    whole groups. A single update over the whole batch keeps the order of the rows. Of several
    processes each plans its own rows: train_batch_size / processes for an update.
    """
    num_processes = distributed.world_size()
    num_rows = config.rollout_batch_size // num_processes
    rows_per_update = config.train_batch_size // num_processes
    if config.epochs_per_rollout_batch == 1 and rows_per_update == num_rows:
        return [list(range(num_rows))]
    updates = []
    for _ in range(config.epochs_per_rollout_batch):
        rows = []
        for group in torch.randperm(num_rows // config.group_size).tolist():
            rows += range(group * config.group_size, (group + 1) * config.group_size)
        for start in range(0, num_rows, rows_per_update):
            updates.append(rows[start : start + rows_per_update])
    return updates


def learning_rate_of(config: GRPOConfig, update: int) -> float:
    """The learning rate of main.py's update number 0, 1, 2 ..."""
    updates_per_epoch = config.rollout_batch_size // config.train_batch_size
    updates_per_iteration = config.epochs_per_rollout_batch * updates_per_epoch
    return config.learning_rate * learning_rate_factor(
        update,
        num_updates=config.num_train_iters * updates_per_iteration,
        warmup_steps=config.warmup_steps,
        schedule=config.lr_schedule,
    )


def learning_rate_factor(
    update: int,
    num_updates: int,
    warmup_steps: int,
    schedule: str = "cosine",
    final_factor: float = 0.0,
) -> float:
    """The factor in [0, 1] by which the peak learning rate is multiplied.

    It rises in a straight line during the warm-up, and then follows the schedule. A decaying one
    would reach final_factor just after the last update.

    Args:
        update: its number, from 0 to num_updates - 1.
        schedule: constant, linear or cosine.
    """
    warmup_steps = max(1, warmup_steps)
    if update < warmup_steps:
        return (update + 1) / warmup_steps
    # It falls linearly from 1 at the end of the warm-up, and would be 0 at update num_updates.
    remaining = (num_updates - update) / (num_updates + 1 - warmup_steps)
    if schedule == "constant":
        return 1.0
    if schedule == "cosine":
        remaining = (1 - math.cos(math.pi * remaining)) / 2
    return final_factor + (1 - final_factor) * remaining
