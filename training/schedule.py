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


def learning_rate_factor(config: GRPOConfig, update: int) -> float:
    """The factor in [0, 1] by which --learning_rate is multiplied, for update number 0, 1, 2 ...

    The factor rises linearly during the warm-up, and then follows --lr_schedule. A decaying
    schedule would reach 0 just after the last update.
    """
    updates_per_epoch = config.rollout_batch_size // config.train_batch_size
    num_updates = config.num_train_iters * config.epochs_per_rollout_batch * updates_per_epoch
    num_warmup_updates = max(1, config.warmup_steps)
    warmup_factor = min(1.0, (update + 1) / num_warmup_updates)
    # Updates count from 0. `remaining` falls linearly from 1 at update num_warmup_updates - 1; it
    # would be 0 at update num_updates, one past the last.
    remaining = min(1.0, (num_updates - update) / max(1, num_updates + 1 - num_warmup_updates))
    if config.lr_schedule == "linear":
        return warmup_factor * remaining
    if config.lr_schedule == "cosine":
        return warmup_factor * ((1 - math.cos(math.pi * remaining)) / 2)
    return warmup_factor
