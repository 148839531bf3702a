"""Out of memory ends a script with one line: the flag that bounds memory, and half of its value."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Errors of other classes that say the same, in lower case.
OUT_OF_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "cublas_status_alloc_failed")


class OutOfMemory(OSError):
    """Memory does not suffice. Like other OSErrors it comes from outside and needs no traceback."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the GPU, or the machine, has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(part in text for part in OUT_OF_MEMORY_TEXTS)


@contextmanager
def flag_to_lower(flag: str, value: int, how: str = "--resume with") -> Iterator[None]:
    """Work whose memory a flag bounds.

    Raises:
        OutOfMemory: where memory does not suffice; it names half of the flag's value.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"out of memory: {how} --{flag} {max(1, value // 2)}") from error
