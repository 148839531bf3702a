"""What a run on several processes needs to say, in a few verbs; on one process each of them changes nothing.

    torchrun --nproc_per_node=4 main.py ...

Every process works on its share of the prompts with random numbers of its own, and holds its shard of the policy, the
gradient, the optimiser's states and the reference (`llms.shard`). A verb marked "all" must be called by all processes.
"""

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

# A process that dies ends the job at once (torchrun sees it); this bounds the wait for one that hangs. It must be
# longer than any honest wait: for the slowest share of an evaluation, a slow judge, or the writing of a checkpoint.
TIMEOUT = timedelta(minutes=30)


def init(device: str, several: bool = True) -> None:
    """Join the processes that torchrun has started, each on its own GPU. The first one alone prints.

    Raises ValueError for several processes of a script that is made for one.
    """
    started, cuda = (
        int(os.environ.get("WORLD_SIZE", 1)),
        str(device).startswith("cuda") and torch.cuda.is_available(),
    )
    if started == 1 or dist.is_initialized():
        return
    if not several:
        raise ValueError("this script runs as one process: start it with python, not with torchrun")
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


def world_size() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Which of the processes this is, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    """Whether this is the process that prints and writes."""
    return rank() == 0


def print_error(text: str) -> None:
    """One line on stderr, of what all processes know."""
    if is_main():
        print(text, file=sys.stderr)


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
    return (
        torch.cat(parts)
        if isinstance(part, torch.Tensor)
        else [item for part in parts for item in part]
    )


def all_sum(*numbers: int) -> list[int]:
    """All: the sum over the processes of each number."""
    return [sum(column) for column in zip(*gather([numbers]), strict=True)]


def from_main(value: Any) -> Any:
    """All: the first process's value, everywhere."""
    return gather([value])[0]


def barrier() -> None:
    """All: wait for each other."""
    gather([])


def equal_passes(pieces: list, idle: Any) -> list[tuple[Any, bool]]:
    """All: (piece, counts) pairs, equally many in every process: the pieces, and then `idle`, which must not count.

    A pass through a sharded model gathers its weights from all processes, so that all must make equally many.
    """
    most = max(gather([len(pieces)]))
    return [(piece, True) for piece in pieces] + [(idle, False)] * (most - len(pieces))


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether a model's weights are split over the processes."""
    return isinstance(model, FSDPModule)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All: the whole of a tensor, sharded or not."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def finish(code: int) -> int:
    """All that end well (0, 130): wait for the first process's last file, and end here; else the exit code is returned.

    At once, since torch's threads are not always joined when Python ends, and then abort a process that is done.
    """
    if world_size() > 1 and code in (0, 130):
        barrier()
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


# --- Random numbers: each process draws its own ---------------------------------------------------


def process_seed(seed: int) -> int:
    """This process's seed: the seed itself on one process."""
    return seed + 1_000_003 * rank()


def process_gpus() -> list[int]:
    """Numbers of the GPUs that this process may use: of several processes each has one."""
    several = world_size() > 1 and torch.cuda.is_available()
    return [torch.cuda.current_device()] if several else list(range(torch.cuda.device_count()))


def get_rng_state() -> dict:
    """Every random state that a run draws from, in types that a checkpoint may hold."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(gpu) for gpu in process_gpus()],
    }


def resume_rng_state(states: list[dict], new_seed: int) -> None:
    """Set this process's random state, one of those saved, or under another number of processes start a new one.

    CUDA states are put back only where there are as many devices as before.
    """
    if len(states) != world_size():
        print(
            f"saved by {len(states)} processes, continued by {world_size()}: random numbers start anew"
        )
        torch.manual_seed(process_seed(new_seed))
        return
    torch.set_rng_state(states[rank()]["torch"])
    cuda_states = states[rank()]["cuda"]
    if len(cuda_states) == len(process_gpus()):
        for gpu, state in zip(process_gpus(), cuda_states, strict=True):
            torch.cuda.set_rng_state(state, gpu)
