"""The few functions through which scripts work with several processes, and their random state.

With one process they have no effect, but for the random state.

    torchrun --nproc_per_node=4 main.py ...

Every process works on its share of the prompts, with random numbers of its own, and holds its shard
of the policy, the gradient, the optimiser's states and the reference (`weights.shard`). A function
whose docstring begins with "All:" must be called by all processes; those that call it wait for the
others.
"""

import os
import random
import sys
from datetime import timedelta
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

# How long a process waits for one that hangs; longer than the slowest share of an evaluation.
# torchrun itself notices a process that has died, and ends the job at once.
TIMEOUT = timedelta(minutes=30)


def init(device: str) -> None:
    """Join the processes that torchrun has started, each on its own GPU; only the first one prints.

    Args:
        device: "cpu"; otherwise a GPU is used, where there is one.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) == 1 or dist.is_initialized():
        return
    backend = "gloo"
    if device != "cpu" and torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=TIMEOUT)
    if not is_main():
        sys.stdout = open(os.devnull, "w")


def world_size() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, counted from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    """Whether this is the first process, which prints and writes."""
    return rank() == 0


# --- Sharing work and putting the results together ------------------------------------------------


def share(items):
    """This process's consecutive share of a list or range that every process has."""
    start = len(items) * rank() // world_size()
    end = len(items) * (rank() + 1) // world_size()
    return items[start:end]


def gather(shard: list) -> list:
    """All: join the lists of all processes, in the order of the processes."""
    if world_size() == 1:
        return shard
    shards = [None] * world_size()
    dist.all_gather_object(shards, shard)
    return list(chain.from_iterable(shards))


def all_sum(*numbers: int) -> list[int]:
    """All: the sum of each number over the processes."""
    return [sum(column) for column in zip(*gather([numbers]), strict=True)]


def from_main(value: Any) -> Any:
    """All: the first process's value."""
    return gather([value])[0]


def barrier() -> None:
    """All: wait until every process has come here."""
    gather([])


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether a model's weights are split over the processes."""
    return isinstance(model, FSDPModule)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All: the full tensor that a sharded tensor is a shard of; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sum_gradients(model: torch.nn.Module) -> None:
    """All: add up the gradients of a model that every process has whole, as one with adapters.

    Without a gradient in any process there is none afterwards.
    """
    if world_size() == 1 or is_sharded(model):
        return
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if not any(gather([weight.grad is not None for weight in trained])):
        return
    for weight in trained:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        dist.all_reduce(weight.grad)


def finish(code: int) -> int:
    """End this process, if it is one of several; else return the code.

    All: a run that has ended well, or was stopped by a signal (a code over 128), waits until the
    first process has written its last file. One that has failed does not wait, since the others may
    wait for it elsewhere; torchrun ends them. Python's ordinary end can wait for torch's threads
    for ever.
    """
    if world_size() > 1:
        ended_well = code == 0 or code > 128
        if ended_well:
            barrier()
            dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


# --- Random numbers: each process draws its own ---------------------------------------------------


def process_seed(seed: int) -> int:
    """A seed of this process's own; on one process it is the given seed."""
    return seed + 1_000_003 * rank()


def get_rng_state() -> dict:
    """Every random state that a run draws from, in types that a checkpoint may hold."""
    name, numbers, *rest = np.random.get_state()
    # Only that of the GPU in use, so that another machine may have more of them, or fewer.
    cuda_states = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),  # a reward function may draw from this one and from NumPy's
        "numpy": (name, numbers.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": cuda_states,
    }


def resume_rng_state(states: list[dict], new_seed: int) -> None:
    """Restore this process's random state from a checkpoint.

    Args:
        states: one from each process that saved the checkpoint.
        new_seed: seeds torch instead, if the number of processes has changed.
    """
    if len(states) == world_size():
        set_rng_state(states[rank()])
        return
    print(f"saved by {len(states)} processes, continued by {world_size()}: new random numbers")
    torch.manual_seed(process_seed(new_seed))


def set_rng_state(state: dict) -> None:
    """Restore this process's random state; a GPU's only if there was one then and is one now."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"][0])
