"""How the metrics of micro-batches, processes and updates are combined; metrics of completions.

Shapes: N completions of all processes.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import distributed
from evaluator import RewardEvaluator, Rewards
from logs.statistics import accuracies, accuracy_by, format_and_answer_counts
from sampling.rollout import Rollout

# --- How metrics add up ---------------------------------------------------------------------------


class Metric(float):
    """A metric of an update. Its class says how the values of several micro-batches combine."""


class Share(Metric):
    """A share of an update's value: the shares of its micro-batches and processes add up."""

    combine = staticmethod(sum)


class TokenShare(Share):
    """A share of a mean over an update's tokens. It adds up as any Share.

    Groups that are skipped do not run, so their tokens have no entropy or ratio. The mean is taken
    over the tokens that ran: `main.accumulate_gradient` rescales the sum.
    """


class Minimum(Metric):
    """The least value so far."""

    combine = staticmethod(min)


class Maximum(Metric):
    """The greatest value so far."""

    combine = staticmethod(max)


def add_up(shares: list[dict[str, float]]) -> dict[str, float]:
    """The metrics of one update from those of its micro-batches: each adds up as its class says.

    Raises TypeError for a plain number, which does not say how it adds up.
    """
    totals = {}
    for name, values in values_by_name(shares).items():
        kind = type(values[0])
        if not issubclass(kind, Metric):
            raise TypeError(
                f"the metric {name!r} must say how it adds up: wrap it in Share, TokenShare,"
                " Minimum or Maximum of training/metrics.py where it is computed"
            )
        totals[name] = kind(kind.combine(values))
    return totals


def average_updates(updates: list[dict[str, float]]) -> dict[str, float]:
    """The metrics of an iteration: the means over its updates, but for a Minimum or Maximum."""
    averages = {}
    for name, values in values_by_name(updates).items():
        is_extreme = isinstance(values[0], Minimum | Maximum)
        averages[name] = values[0].combine(values) if is_extreme else mean(values)
    return averages


def values_by_name(rows: list[dict[str, float]]) -> dict[str, list[float]]:
    """{name: its values in those rows that have it}, in the order in which the names first come."""
    values = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            values[name].append(value)
    return values


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


# --- What is measured of completions --------------------------------------------------------------


@dataclass(frozen=True)
class Completions:
    """What logs need to know of the completions of all processes."""

    texts: list[str]  # N
    lengths: Tensor  # (N,) tokens
    finished: Tensor  # (N,) False where a completion was cut at the maximum length


def gather_completions(rollout: Rollout, rewards: Rewards) -> tuple[Completions, Rewards]:
    """All processes: what each of them sampled, in the order of the prompts, and its rewards."""
    completions = Completions(
        texts=distributed.gather(rollout.texts),
        lengths=distributed.gather(rollout.lengths).cpu(),
        finished=distributed.gather(rollout.finished).cpu(),
    )
    counts = values_by_name(distributed.gather([rewards.counts]))
    means = values_by_name(distributed.gather([rewards.means]))
    all_rewards = replace(
        rewards,
        per_function=distributed.gather(rewards.per_function),
        details=distributed.gather(rewards.details),
        counts={name: sum(values) for name, values in counts.items()},
        # This is exact where all processes have equally many completions.
        means={name: mean(values) for name, values in means.items()},
    )
    return completions, all_rewards


def rollout_metrics(
    evaluator: RewardEvaluator, rewards: Rewards, completions: Completions
) -> dict[str, float]:
    """Rewards, accuracies, lengths and the share of cut completions of one rollout batch."""
    lengths = completions.lengths.float()
    correct = torch.tensor([detail["correct_strict"] for detail in rewards.details])
    num_correct_flexible = sum(detail["correct_flexible"] for detail in rewards.details)
    return evaluator.get_reward_breakdown(rewards) | {
        "accuracy": correct.float().mean().item(),
        "accuracy_flexible": num_correct_flexible / len(correct),
        "response_length": lengths.mean().item(),
        "response_length_correct": lengths[correct].mean().item(),  # NaN where none is correct
        "response_length_incorrect": lengths[~correct].mean().item(),
        "truncated_fraction": (~completions.finished).float().mean().item(),
    }


def evaluation_metrics(
    evaluator: RewardEvaluator,
    examples: list[dict],
    rewards: Rewards,
    completions: Completions,
    num_samples: int,
) -> dict[str, float]:
    """Accuracies with intervals, categories, accuracies by level or subject, rewards and lengths.

    Args:
        examples: one for each completion; the num_samples completions of a problem are consecutive.
    """
    strict = [detail["correct_strict"] for detail in rewards.details]
    flexible = [detail["correct_flexible"] for detail in rewards.details]
    metrics = {"n": len(examples) // num_samples}
    metrics |= accuracies("accuracy", strict, num_samples)
    metrics |= accuracies("accuracy_flexible", flexible, num_samples)
    metrics |= format_and_answer_counts(rewards.details)
    metrics |= accuracy_by("level", examples, strict)
    metrics |= accuracy_by("subject", examples, strict)
    metrics["reward"] = evaluator.total(rewards).nanmean().item()
    metrics |= evaluator.get_reward_breakdown(rewards)
    metrics["response_length"] = completions.lengths.float().mean().item()
    metrics["truncated_fraction"] = (~completions.finished).float().mean().item()
    return metrics


# --- Time and memory of each stage ----------------------------------------------------------------


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
