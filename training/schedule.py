"""The updates of a run, as its flags plan them: the rows of each, and its learning rate."""

import math
from argparse import Namespace

import torch

import distributed


def split_into_updates(args: Namespace) -> list[list[int]]:
    """The rows of each update over one rollout batch: epochs x batches of train_batch_size, whole groups, shuffled.

    A single update over everything keeps the order. Rows and sizes are this process's share.
    """
    n, size = (
        batch // distributed.world_size()
        for batch in (args.rollout_batch_size, args.train_batch_size)
    )
    if args.epochs_per_rollout_batch == 1 and size == n:
        return [list(range(n))]
    updates = []
    for _ in range(args.epochs_per_rollout_batch):
        groups = torch.randperm(n // args.group_size).tolist()
        rows = [g * args.group_size + i for g in groups for i in range(args.group_size)]
        updates += [rows[i : i + size] for i in range(0, n, size)]
    return updates


def learning_rate_factor(args: Namespace, n: int) -> float:
    """Of --learning_rate, at optimiser step n from 0: linear warm-up, then --lr_schedule, at 0 after the last step."""
    warm_up, updates = max(1, args.warmup_steps), args.rollout_batch_size // args.train_batch_size
    steps = args.num_train_iters * args.epochs_per_rollout_batch * updates
    left = min(1.0, (steps - n) / max(1, steps + 1 - warm_up))  # from 1 at the end of the warm-up
    decay = {"constant": 1.0, "linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}[
        args.lr_schedule
    ]
    return min(1.0, (n + 1) / warm_up) * decay
