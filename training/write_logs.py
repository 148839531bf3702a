"""What a run writes after each step: lines of its logs, transcripts of every completion, lines for the console.

Of several processes the first one alone writes. `args` are the flags of the script, `run` is its training.run.Run.
"""

import time
from collections import defaultdict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

import distributed
from logs import jsonl
from logs.statistics import CATEGORIES, accuracies, accuracy_by, format_and_answer_counts
from training import tracker

# --- Putting numbers together ---------------------------------------------------------------------

# What a metric of an update is, where it is not a mean over its completion tokens.
EXTREMES = {"ratio_min": min, "ratio_max": max}
NOT_OVER_TOKENS = {"loss", "kl", "response_length", *EXTREMES}


def merge_metrics(rows: list[dict], otherwise: Callable) -> dict:
    """One dict of several: of each key the least, the greatest or `otherwise` (sum, mean), over the rows that have it.

    Shares of an update's means add up over its micro-batches; the means of several updates are averaged.
    """
    keys = dict.fromkeys(key for row in rows for key in row)
    return {
        key: EXTREMES.get(key, otherwise)([row[key] for row in rows if key in row]) for key in keys
    }


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


# What logs need of N completions, of all processes: texts, (N,) tokens, and (N,) False where cut at the maximum length.
Completions = namedtuple("Completions", "texts lengths finished")


def gather_completions(rollout, rewards) -> tuple[Completions, Any]:
    """All: what every process sampled, in the order of the prompts, and its Rewards."""
    columns = (
        rollout.texts,
        rollout.lengths,
        rollout.finished,
        rewards.per_function,
        rewards.details,
    )
    texts, lengths, finished, per_function, details = map(distributed.gather, columns)
    counts = merge_metrics(distributed.gather([rewards.counts]), sum)
    means = merge_metrics(distributed.gather([rewards.means]), mean)  # of equal shares
    rewards = replace(
        rewards, per_function=per_function, details=details, counts=counts, means=means
    )
    return Completions(texts, lengths.cpu(), finished.cpu()), rewards


class Stages:
    """Seconds spent per named stage: `with stages("sample"): ...`, then `stages.flush()` -> {"time/sample": 1.2}.

    On CUDA with the GB at each stage's peak in this process: "memory/sample".
    """

    def __init__(self, device: str = "cpu"):
        self.cuda, self.seconds, self.peaks = (
            torch.device(device).type == "cuda",
            defaultdict(float),
            {},
        )

    def _now(self):
        if self.cuda:
            torch.cuda.synchronize()  # kernels run behind Python: wait, or the next stage pays for this one
        return time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = self._now()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        yield
        self.seconds[f"time/{name}"] += self._now() - start
        if self.cuda:
            peak, key = torch.cuda.max_memory_allocated() / 1e9, f"memory/{name}"
            self.peaks[key] = max(peak, self.peaks.get(key, 0.0))

    def flush(self) -> dict[str, float]:
        flushed = {**self.seconds, "time/total": sum(self.seconds.values()), **self.peaks}
        self.seconds.clear()
        self.peaks.clear()
        return flushed


# --- What is logged of a batch of completions -----------------------------------------------------


def rollout_metrics(evaluator, rewards, completions: Completions) -> dict:
    """What a rollout batch looks like: reward parts, accuracies, lengths, share cut at the maximum length."""
    lengths = completions.lengths.float()
    correct = torch.tensor([detail["correct_strict"] for detail in rewards.details])
    return evaluator.get_reward_breakdown(rewards) | {
        "accuracy": correct.float().mean().item(),
        "accuracy_flexible": sum(detail["correct_flexible"] for detail in rewards.details)
        / len(correct),
        "response_length": lengths.mean().item(),
        "response_length_correct": lengths[correct].mean().item(),  # NaN where there is none
        "response_length_incorrect": lengths[~correct].mean().item(),
        "truncated_fraction": (~completions.finished).float().mean().item(),
    }


def evaluation_metrics(
    evaluator, examples: list[dict], rewards, completions: Completions, samples: int
) -> dict:
    """What an evaluation found: n, accuracies with intervals, categories, by level or subject, rewards and lengths.

    examples: one per completion; so many samples of each problem follow each other.
    """
    strict, flexible = (
        [detail[f"correct_{kind}"] for detail in rewards.details] for kind in ("strict", "flexible")
    )
    metrics = {"n": len(examples) // samples} | accuracies("accuracy", strict, samples)
    metrics |= accuracies("accuracy_flexible", flexible, samples) | format_and_answer_counts(
        rewards.details
    )
    metrics |= accuracy_by("level", examples, strict) | accuracy_by("subject", examples, strict)
    metrics |= {
        "reward": evaluator.total(rewards).nanmean().item()
    } | evaluator.get_reward_breakdown(rewards)
    return metrics | {
        "response_length": completions.lengths.float().mean().item(),
        "truncated_fraction": (~completions.finished).float().mean().item(),
    }


def completion_records(
    evaluator, examples: list[dict], completions, rewards, **columns: torch.Tensor
) -> list[dict]:
    """One dict per completion, as rollouts/ and eval/ keep them; columns are (N,) tensors to add."""
    added = {
        "reward": evaluator.total(rewards),
        "length": completions.lengths,
        "finished": completions.finished,
    }
    columns = {name: values.tolist() for name, values in (added | columns).items()}
    parts = rewards.per_function.tolist()
    return [
        {
            "id": example["id"],
            "prompt": example["prompt"],
            "completion": text,
            "gold": example["answer"],
        }
        | {name: example[name] for name in ("level", "subject") if name in example}
        | detail
        | {
            f"rewards/{name}": value
            for name, value in zip(evaluator.reward_names, parts[i], strict=True)
        }
        | {name: values[i] for name, values in columns.items()}
        for i, (example, text, detail) in enumerate(
            zip(examples, completions.texts, rewards.details, strict=True)
        )
    ]


# --- Writing it down ------------------------------------------------------------------------------


def bar(*args, **options) -> tqdm:
    """A tqdm bar, drawn by the first process alone, where stderr is a terminal: a log has whole lines."""
    return tqdm(
        *args, dynamic_ncols=True, disable=None if distributed.is_main() else True, **options
    )


def append(args, log: str, row: dict) -> None:
    """Add a line to one of the run's logs, and to the tracker's where there is one."""
    if distributed.is_main():
        jsonl.append(args.output_dir / log, row)
        if args.report_to:
            tracker.report(args, log.removesuffix("_log.jsonl"), row)


def transcript(args, folder: str, step: int, records: list[dict]) -> None:
    """Write rollouts/step_000010.jsonl or eval/step_000100.jsonl, whole or not at all."""
    if distributed.is_main():
        jsonl.write(args.output_dir / folder / f"step_{step:06d}.jsonl", records)


def save_iteration(args, run, step: int, metrics: dict, records: list[dict]) -> None:
    """A finished iteration: write its transcript and its line of train_log.jsonl, mark it, print a line, warn.

    May raise Diverged.
    """
    sampled = sum(record["length"] for record in records)  # tokens
    run.step, run.total_tokens = step, run.total_tokens + sampled
    seconds = run.stages.flush()
    head = {"step": step, "epoch": run.train_loader.state_dict()["epoch"]}
    tail = {
        "sampled_tokens": sampled,
        "total_tokens": run.total_tokens,
        "elapsed": time.perf_counter() - run.start,
    }
    transcript(args, "rollouts", step, records)
    append(args, "train_log.jsonl", head | metrics | tail | seconds)
    run.mark()
    kl = f"kl {metrics['kl']:.4f} | " if "kl" in metrics else ""
    run.bar.set_postfix(reward=f"{metrics['reward']:.3f}")
    shares = [f"{metrics[key]:6.1%}" for key in ("accuracy", "accuracy_flexible")]
    tqdm.write(
        f"step {step:4d} | reward {metrics['reward']:.3f} | {run.evaluator.verdict_shares_text.format(*shares)} |"
        f" {kl}length {metrics['response_length']:.1f} |"
        f" gradient norm {metrics['grad_norm']:.3f} | {seconds['time/total']:.2f} s"
    )
    if metrics["skipped_updates"]:
        tqdm.write(
            f"warning: an update was skipped, its loss or gradient is not finite; see rollouts/step_{step:06d}.jsonl"
        )
    for warning in run.guard.check(metrics):
        tqdm.write(f"warning: {warning}")


def save_evaluation(args, run, metrics: dict, records: list[dict]) -> None:
    """Append to eval_log.jsonl, write every problem with its completion, print one line."""
    totals = {"total_tokens": run.total_tokens, "elapsed": time.perf_counter() - run.start}
    transcript(args, "eval", run.step, records)
    append(args, "eval_log.jsonl", {"step": run.step} | metrics | totals)
    run.evaluated_step, run.accuracy = run.step, metrics["accuracy"]
    samples = "1 sample" if args.eval_samples == 1 else f"{args.eval_samples} samples"
    how = (
        f"{samples} at temperature {args.eval_temperature:g}" if args.eval_temperature else "greedy"
    )
    keys = "accuracy", "accuracy_flexible"
    shares = [
        f"{metrics[key]:.1%} [{metrics[f'{key}_low']:.1%}, {metrics[f'{key}_high']:.1%}]"
        for key in keys
    ]
    tqdm.write(
        f"evaluation at step {run.step}: {run.evaluator.verdict_shares_text.format(*shares)}"
        f" (n = {metrics['n']}, {args.eval_split}, {how}, {metrics['time/total']:.1f} s)"
    )


def print_categories(args, metrics: dict) -> None:
    """The three categories of format and answer with their counts, how to list ten of each, accuracies by group."""
    path = args.output_dir / "eval" / "step_000000.jsonl"
    for name, (form, answer) in CATEGORIES.items():
        row = jsonl.dumps({"format": form, "correct_strict": answer})[
            1:-1
        ]  # as a line of the transcript has it
        print(
            f"format {form:d}, answer {answer:d}: {metrics[f'count/{name}']}; list ten: grep -m 10 '{row}' {path}"
        )
    for key, value in metrics.items():
        if key.startswith(("accuracy_level/", "accuracy_subject/", "pass")):
            print(f"{key}: {value:.1%}")
