"""What a training run writes: logs, transcripts of every completion, lines for the console.

Of several processes the first one alone writes. `config` are the settings of the script, `run` is
its training.run.Run.
"""

import shlex
import time

from tqdm import tqdm

import distributed
from config import GRPOConfig, OutputConfig
from logs import jsonl
from logs.statistics import CATEGORIES
from training import tracker
from training.records import Record


def append(config: OutputConfig, log: str, row: dict) -> None:
    """Add a line to one of the run's logs, and send it to the tracker where there is one."""
    if distributed.is_main():
        jsonl.append(config.output_dir / log, row)
        if config.report_to != "none":
            tracker.send(config, log.removesuffix("_log.jsonl"), row)


def write_transcript(config: OutputConfig, folder: str, step: int, records: list[Record]) -> None:
    """Write rollouts/step_000010.jsonl or eval/step_000100.jsonl, whole or not at all.

    Raises OSError if the run's directory is gone: it must not go on in a new one.
    """
    if distributed.is_main():
        transcripts = config.output_dir / folder
        transcripts.mkdir(exist_ok=True)
        jsonl.write(transcripts / f"step_{step:06d}.jsonl", records)


def save_iteration(config: GRPOConfig, run, metrics: dict, records: list[Record]) -> None:
    """Write the transcript and the line of train_log.jsonl of the iteration run.step, and print it.

    Args:
        records: of all completions that were sampled in it, by all processes.
    """
    seconds = run.timer.flush()
    row = {"step": run.step, "epoch": run.train_loader.state_dict()["epoch"]}
    row |= metrics
    row["sampled_tokens"] = sum(record["length"] for record in records)
    row["total_tokens"] = run.total_tokens
    row["elapsed"] = time.perf_counter() - run.start
    row |= seconds
    write_transcript(config, "rollouts", run.step, records)
    append(config, "train_log.jsonl", row)

    columns = [f"reward {metrics['reward']:.3f}"]
    if "accuracy" in metrics:
        columns.append(
            f"accuracy {metrics['accuracy']:6.1%} strict,"
            f" {metrics['accuracy_flexible']:6.1%} flexible"
        )
    if "kl" in metrics:
        columns.append(f"kl {metrics['kl']:.4f}")
    columns += [
        f"length {metrics['response_length']:.1f}",
        f"gradient norm {metrics['grad_norm']:.3f}",
    ]
    print_step(run, columns, seconds["time/total"])
    if metrics["skipped_updates"]:
        tqdm.write(
            "warning: an update was skipped, because its loss or gradient is not finite; see"
            f" rollouts/step_{run.step:06d}.jsonl"
        )


def print_step(run, columns: list[str], seconds: float) -> None:
    """Print a line about a step, with the time that it took and that all others will take."""
    left = tqdm.format_interval(seconds * (run.num_iterations - run.step))
    step = f"step {run.step:4d} of {run.num_iterations}"
    tqdm.write(" | ".join([step, *columns, f"{seconds:.2f} s, {left} left"]))


def save_evaluation(config: OutputConfig, run, metrics: dict, records: list[Record]) -> None:
    """Write the transcript and the line of eval_log.jsonl of an evaluation, and print it."""
    write_transcript(config, "eval", run.step, records)
    row = {"step": run.step} | metrics
    row["total_tokens"] = run.total_tokens
    row["elapsed"] = time.perf_counter() - run.start
    append(config, "eval_log.jsonl", row)

    decoding = "greedy"
    if config.eval_temperature > 0:
        samples = "1 sample" if config.eval_samples == 1 else f"{config.eval_samples} samples"
        decoding = f"{samples} at temperature {config.eval_temperature:g}"
    outcome = f"reward {metrics['reward']:.3f}"
    if "accuracy" in metrics:
        strict = with_interval(metrics, "accuracy")
        flexible = with_interval(metrics, "accuracy_flexible")
        outcome = f"accuracy {strict} strict, {flexible} flexible"
    tqdm.write(
        f"evaluation at step {run.step}: {outcome}"
        f" (n = {metrics['n']}, {config.eval_split}, {decoding}, {metrics['time/total']:.1f} s)"
    )


def with_interval(metrics: dict, key: str) -> str:
    """A share and its 95 % interval, such as "37.0% [28.2%, 46.8%]"."""
    return f"{metrics[key]:.1%} [{metrics[f'{key}_low']:.1%}, {metrics[f'{key}_high']:.1%}]"


def print_categories(config: OutputConfig, metrics: dict) -> None:
    """Print what --eval_only adds: categories, accuracies by level or subject, and pass@k.

    For each category of format and answer it prints how many completions are in it, and a command
    that lists ten.
    """
    if "accuracy" not in metrics:
        return
    transcript = shlex.quote(str(config.output_dir / "eval" / "step_000000.jsonl"))
    for name, (in_format, correct) in CATEGORIES.items():
        # The two fields as they stand in a line of the transcript: JSON without its outer braces.
        pattern = jsonl.dumps({"format": in_format, "correct_strict": correct})[1:-1]
        print(
            f"format {in_format:d}, answer {correct:d}: {metrics[f'count/{name}']};"
            f" list ten: grep -m 10 '{pattern}' {transcript}"
        )
    for key, value in metrics.items():
        if key.startswith(("accuracy_level/", "accuracy_subject/", "pass")):
            print(f"{key}: {value:.1%}")
