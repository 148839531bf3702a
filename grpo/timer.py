"""How long the stages of an iteration take, and how much memory."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StageTimer:
    """Seconds spent in each named stage: `with timer("sample"): ...`.

    `flush` then returns {"time/sample": 1.2}. On CUDA it also returns "memory/sample", the GB at
    the peak of the stage in this process.
    """

    def __init__(self, device: torch.device):
        self.on_cuda = device.type == "cuda"
        self.seconds = defaultdict(float)
        self.peak_memory = defaultdict(float)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        if self.on_cuda:
            # Python does not wait for kernels. Without this, a stage would pay for the last one.
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        yield
        if self.on_cuda:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() / 1e9
            key = f"memory/{stage}"
            self.peak_memory[key] = max(peak, self.peak_memory[key])
        self.seconds[f"time/{stage}"] += time.perf_counter() - start

    def flush(self) -> dict[str, float]:
        """Seconds and GB since the last flush, by stage."""
        total = sum(self.seconds.values())
        flushed = {**self.seconds, "time/total": total, **self.peak_memory}
        self.seconds.clear()
        self.peak_memory.clear()
        return flushed
