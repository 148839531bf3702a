"""The few functions through which scripts work with several processes.

With one process they have no effect.

    torchrun --nproc_per_node=4 main.py ...

Every process works on its share of the prompts with random numbers of its own. It holds its shard
of the policy, the gradient, the optimiser's states and the reference (`llms.shard`). A function
whose docstring begins with "All:" must be called by all processes, or those that do call it wait
for the others.
"""

import os
import random
import sys
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

# A process that dies ends the job at once, since torchrun notices. This bounds the wait for one
# that hangs. It must be longer than any honest wait: for the slowest share of an evaluation, for a
# slow judge, or for the writing of a checkpoint.
TIMEOUT = timedelta(minutes=30)


def init(device: str, allow_several: bool = True) -> None:
    """Join the processes that torchrun has started, each on its own GPU; only the first one prints.

    Raises:
        ValueError: if there are several processes of a script that is made for one, if --device
            names a certain GPU, if there are more processes than GPUs, or if they do not meet.
    """
    world_size_text = os.environ.get("WORLD_SIZE") or "1"
    if not world_size_text.isdecimal():
        raise ValueError(f"WORLD_SIZE is {world_size_text!r}, and not a number; unset it")
    num_processes = int(world_size_text)
    if num_processes == 1 or dist.is_initialized():
        return
    if not allow_several:
        raise ValueError("this script runs as one process: start it with python, not with torchrun")
    is_cuda = str(device).startswith("cuda") and torch.cuda.is_available()
    if is_cuda:
        gpu = int(os.environ.get("LOCAL_RANK") or 0)
        num_gpus = torch.cuda.device_count()
        if str(device) != "cuda" or gpu >= num_gpus:
            raise ValueError(
                f"--device {device}: under torchrun each process takes a GPU of its own: leave"
                f" --device out, and start at most {num_gpus} processes here (--nproc_per_node)"
            )
        torch.cuda.set_device(gpu)
    # The variables may be left over from another job, in which LOCAL_RANK was not always given.
    if (os.environ.get("LOCAL_RANK") or "0") == "0":
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        print(f"waiting at {address} until all {num_processes} processes are there", flush=True)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if is_cuda else "gloo", timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"WORLD_SIZE is {num_processes}, but the processes cannot be joined ({reason}); unset"
            " WORLD_SIZE if it is left over from another job, or start with torchrun"
        ) from error
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
    """This process's consecutive share of a list or range that every process has.

    `gather` puts the shares of all processes together again.
    """
    start = len(items) * rank() // world_size()
    end = len(items) * (rank() + 1) // world_size()
    return items[start:end]


def gather(shard: list) -> list:
    """All: join the lists of all processes in the order of the processes.

    Unpickling is safe here, since the data comes only from the other processes of this run.
    """
    if world_size() == 1:
        return shard
    shards = [None] * world_size()
    dist.all_gather_object(shards, shard)
    items = []
    for process_items in shards:
        items += process_items
    return items


def all_sum(*numbers: int) -> list[int]:
    """All: the sum of each number over the processes."""
    numbers_of_processes = gather([numbers])
    return [sum(column) for column in zip(*numbers_of_processes, strict=True)]


def from_main(value: Any) -> Any:
    """All: the first process's value."""
    return gather([value])[0]


def barrier() -> None:
    """All: wait until every process has come here."""
    gather([])


def equal_passes(batches: list, idle_batch: Any) -> list[tuple[Any, bool]]:
    """All: (batch, whether it counts) pairs, equally many in every process.

    A pass through a sharded model gathers its weights from all processes, so all of them must make
    equally many passes. A process with fewer batches than another adds `idle_batch`, which must not
    count.
    """
    num_passes = max(gather([len(batches)]))
    num_idle = num_passes - len(batches)
    return [(batch, True) for batch in batches] + [(idle_batch, False)] * num_idle


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

    All: if the run has ended well, or was stopped by a signal (a code over 128), processes wait
    until the first has written its last file. One that has failed does not wait for the others,
    which may wait for it in another place; torchrun, or the closed connection, ends them. Processes
    end at once: Python's ordinary end does not always join torch's threads, and can wait for them
    or abort.
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
    # A process uses one GPU, however many the machine has. So a run can go on alike on another one.
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
        states: one from each process that saved the checkpoint. A GPU's state is restored only if
            this process has a GPU, and the one that saved it had just one.
        new_seed: seeds torch instead, if the number of processes has changed.
    """
    if len(states) != world_size():
        print(
            f"saved by {len(states)} processes, continued by {world_size()}: random numbers start"
            " anew"
        )
        torch.manual_seed(process_seed(new_seed))
        return
    set_rng_state(states[rank()])


def set_rng_state(state: dict) -> None:
    """Restore this process's random state; a GPU's only if there was one then and is one now."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    num_saved = len(state["cuda"])
    num_gpus = int(torch.cuda.is_available())
    if num_saved != num_gpus:
        print(
            f"saved with the random states of {num_saved} GPUs, continued with {num_gpus}: random"
            " numbers on a GPU start anew"
        )
    elif num_gpus:
        torch.cuda.set_rng_state(state["cuda"][0])
