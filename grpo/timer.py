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

    def __init__(self, device: str = "cpu"):
        self.on_cuda = torch.device(device).type == "cuda"
        self.seconds = defaultdict(float)
        self.peak_memory = defaultdict(float)

    def _now(self) -> float:
        if self.on_cuda:
            # Python does not wait for kernels. Without this, the next stage would pay for this one.
            torch.cuda.synchronize()
        return time.perf_counter()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = self._now()
        if self.on_cuda:
            torch.cuda.reset_peak_memory_stats()
        yield
        self.seconds[f"time/{stage}"] += self._now() - start
        if self.on_cuda:
            peak = torch.cuda.max_memory_allocated() / 1e9
            key = f"memory/{stage}"
            self.peak_memory[key] = max(peak, self.peak_memory[key])

    def flush(self) -> dict[str, float]:
        """Seconds and GB since the last flush, by stage."""
        total = sum(self.seconds.values())
        flushed = {**self.seconds, "time/total": total, **self.peak_memory}
        self.seconds.clear()
        self.peak_memory.clear()
        return flushed
