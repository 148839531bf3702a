"""Out of memory is not the end of a run: what failed begins again with half of it at a time.

--micro_batch_tokens and --max_concurrent_sequences bound how much the loss and the sampler do at a
time. Neither changes what is learnt. So where memory does not suffice, the flag's value is halved,
and the update's gradient, or the sampling, is made again from its beginning. `args` holds the
values in force: they start as the flags, and stay for the rest of the run once they are lower.
"""

import gc
from argparse import Namespace
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from tqdm import tqdm

import distributed
import utils
from sampling import decoding

Result = TypeVar("Result")

# The flags that bound memory and change no result.
FLAGS = ("micro_batch_tokens", "max_concurrent_sequences")
# Allocators that raise an ordinary RuntimeError have these words in its text.
OUT_OF_MEMORY_TEXTS = ("DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


class OutOfMemory(OSError):
    """Memory does not suffice even for the least that can be done at a time.

    Like other OSErrors it comes from outside, so that the run ends with one line and no traceback.
    """


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that the GPU, or the machine, has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(text in str(error) for text in OUT_OF_MEMORY_TEXTS)


def halve_until_it_fits(
    attempt: Callable[[], Result],
    *,
    model: torch.nn.Module,
    settings: Any,
    flag: str,
    divide: Callable[[int], Any],
) -> Result:
    """The result of attempt(), which is made again with a lower setting where memory is too small.

    Each attempt begins as the first one did: with the same random numbers, and without gradients.

    Args:
        attempt: reads settings.<flag>, and does its work in parts of at most that size.
        model: the trained model, which has no gradient yet.
        settings: the flags, or another object. The value that suffices stays in it.
        divide: the parts into which a value of the flag divides the work.

    Raises:
        OutOfMemory: there are no smaller parts; the setting is then as it was. Or there are several
            processes: the others wait in the middle of their own attempts, so that none may begin
            again.
    """
    first_value = getattr(settings, flag)
    rng_state = distributed.get_rng_state()
    while True:
        try:
            return attempt()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # The exception holds the tensors of the failed attempt by its traceback. It ends with the
        # `except` block, so that all that follows must stand after it.
        value = getattr(settings, flag)
        if distributed.world_size() > 1:
            raise OutOfMemory(
                f"process {distributed.rank() + 1} of {distributed.world_size()} is out of memory:"
                f" lower --{flag}, which is {value}"
            )
        free_memory(model)
        lower_value = next_lower(value, divide)
        if lower_value is None:
            setattr(settings, flag, first_value)
            remedies = "a lower --max_completion_length or a smaller model"
            if flag == "micro_batch_tokens":
                remedies = f"--gradient_checkpointing, {remedies}"
            raise OutOfMemory(
                f"out of memory with one completion at a time (--{flag} {value}): use {remedies}"
            )
        tqdm.write(
            f"out of memory with --{flag} {value}: going on with {lower_value}, which takes longer"
            " and changes nothing that is learnt"
        )
        setattr(settings, flag, lower_value)
        distributed.set_rng_state(rng_state)


def free_memory(model: torch.nn.Module) -> None:
    """Give back what a failed attempt has left, and the memory that the sampler keeps."""
    model.zero_grad()
    decoding.CAPTURED_DECODERS.clear()
    gc.collect()  # frames of the failed attempt may refer to each other
    torch.cuda.empty_cache()  # has no effect without CUDA


def next_lower(value: int, divide: Callable[[int], Any]) -> int | None:
    """Half of a value, or a quarter and so on: the first one that makes other parts of the work.

    None if there is none, since every part is as small as it can be.
    """
    parts = divide(value)
    while value > 1:
        value //= 2
        if divide(value) != parts:
            return value
    return None


def with_smaller_micro_batches(function: Callable[..., Result]) -> Callable[..., Result]:
    """function(args, run, rollout, ...), made again in smaller micro-batches out of memory."""

    @wraps(function)
    def function_that_fits(args, run, rollout, *rest, **options):
        def divide(max_tokens: int) -> list[list[int]]:
            prompt_lengths = rollout.prompt_mask.sum(1).tolist()
            completion_lengths = rollout.lengths.tolist()
            return utils.split_into_micro_batches(
                prompt_lengths, completion_lengths, args.group_size, max_tokens
            )

        return halve_until_it_fits(
            partial(function, args, run, rollout, *rest, **options),
            model=run.model,
            settings=args,
            flag="micro_batch_tokens",
            divide=divide,
        )

    return function_that_fits


# --- Logs and checkpoints -------------------------------------------------------------------------


def in_force(args: Namespace) -> dict[str, int]:
    """The present values of the flags that bound memory."""
    return {flag: getattr(args, flag) for flag in FLAGS}


def resume(args: Namespace, saved_flags: dict[str, int], saved_in_force: dict[str, int]) -> None:
    """Go on with the values that were in force when a checkpoint was written.

    A flag that the user has given another value since then has that value.

    Args:
        saved_flags: what the flags were.
        saved_in_force: to what the run had come down.
    """
    for flag, value in saved_in_force.items():
        if getattr(args, flag) == saved_flags[flag]:
            setattr(args, flag, value)
