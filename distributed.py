"""What a run on several processes needs to say, in a few verbs; on one process each of them changes nothing.

    torchrun --nproc_per_node=4 main.py ...

Every process works on its share of the prompts with random numbers of its own, and holds its shard of the policy, the
gradient, the optimiser's states and the reference (`llms.shard`). A verb marked "all" must be called by all processes.
"""

import os
import sys
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist

# A process that dies ends the job at once (torchrun sees it); this bounds the wait for one that hangs. It must be
# longer than any honest wait: for the slowest share of an evaluation, a slow judge, or the writing of a checkpoint.
TIMEOUT = timedelta(minutes=30)


def init(device):
    """Join the processes that torchrun has started, each on its own GPU. The first one alone prints."""
    processes, cuda = int(os.environ.get("WORLD_SIZE", 1)), str(device).startswith("cuda") and torch.cuda.is_available()
    if processes == 1 or dist.is_initialized():
        return
    if cuda:
        local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if str(device) != "cuda" or local >= gpus:
            raise ValueError(
                f"--device {device}: under torchrun each process takes a GPU of its own: leave --device out, and start"
                f" at most {gpus} processes here (--nproc_per_node)"
            )
        torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT)
    if not is_main():
        sys.stdout = open(os.devnull, "w")


def check_alone():
    """Raise ValueError where torchrun has started several processes of a script that is made for one."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("this script runs as one process: start it with python, not with torchrun")


def world_size():
    """The number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank():
    """Which of the processes this is, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main():
    """Whether this is the process that prints and writes."""
    return rank() == 0


def share(items):
    """This process's consecutive part of a list or tensor that every process has; `gather` puts them together again."""
    return items[len(items) * rank() // world_size() : len(items) * (rank() + 1) // world_size()]


def gather(part):
    """All: the parts of all processes joined in their order, lists or tensors (along the first dimension, to the CPU).

    What is pickled on the way comes from these processes alone, never from a file.
    """
    if world_size() == 1:
        return part
    parts = [None] * world_size()
    dist.all_gather_object(parts, part.cpu() if isinstance(part, torch.Tensor) else part)
    return torch.cat(parts) if isinstance(part, torch.Tensor) else [item for part in parts for item in part]


def all_sum(*numbers):
    """All: the sum over the processes of each number."""
    return [sum(column) for column in zip(*gather([numbers]), strict=True)]


def from_main(value):
    """All: the first process's value, everywhere."""
    return gather([value])[0]


def gather_completions(rollout, rewards):
    """All: what every process sampled, in the order of the prompts: what logs need of the Rollout, and its Rewards."""
    if world_size() == 1:
        return rollout, rewards
    columns = (
        rollout.texts,
        rollout.lengths,
        rollout.finished,
        rewards.per_function,
        rewards.details,
        [rewards.metrics],
    )
    texts, lengths, finished, per_function, details, metrics = map(gather, columns)
    rollout = SimpleNamespace(texts=texts, lengths=lengths, finished=finished)
    return rollout, replace(rewards, per_function=per_function, details=details, metrics=_merge(metrics))


def _merge(shares):
    """Metrics of equal shares of a batch: counts, with a "/" in their names, add up; others are averaged."""
    merged = {}
    for key in dict.fromkeys(key for share in shares for key in share):
        values = [share[key] for share in shares if key in share]
        merged[key] = sum(values) / (1 if "/" in key else len(values))
    return merged


def barrier():
    """All: wait for each other."""
    gather([])


def same_number_of_passes(pieces, idle):
    """All: the pieces, and as many times `idle` as makes every process's list equally long.

    A pass through a sharded model gathers its weights from all processes, so that all must make equally many.
    """
    return pieces + [idle] * (max(gather([len(pieces)])) - len(pieces))


def full(tensor):
    """All: the whole of a sharded tensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def leave():
    """All: wait for the first process's last file, and part."""
    if world_size() > 1:
        barrier()
        dist.destroy_process_group()
