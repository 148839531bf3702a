"""How long an iteration of main.py takes, beside TRL's GRPOTrainer doing the same work.

    python experiments/benchmark.py --trl_python ~/trl/bin/python

--trl_python is the Python of an environment with trl, torch, accelerate and datasets; without it
TRL is left out. TRL runs twice: as it is, and where the C library keeps freed memory as main.py has
it do.

The competitors take turns, with the same weights, prompts, reward, precision and kind of attention.
The speed of a machine drifts, so each ratio is taken within a turn. Seconds of CPU are summed over
the threads of a process, and drift less than the clock where other work shares the cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pandas
from transformers import AutoTokenizer

from rl_datasets import get_dataloaders

ROOT = Path(__file__).resolve().parent.parent
# glibc reads these.
MEMORY_KEPT = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(2**31 - 1))
BETA = 0.04  # the weight of the KL: with it both sides compute a reference


def step_of_ours(args) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        flags = dict(
            model_name=args.model_name,
            dataset_name="arithmetic",
            evaluator=f"{ROOT}/experiments/trl_step.py:gold_in_text",
            output_dir=folder,
            rollout_batch_size=args.num_prompts * args.group_size,
            group_size=args.group_size,
            max_completion_length=args.max_completion_length,
            micro_batch_tokens=4096,
            beta=BETA,
            train_dtype=args.train_dtype,
            num_train_iters=args.iterations + 2,
            eval_size=1,
            eval_iterations=10**6,
            save_iterations=10**6,
        )
        command = [sys.executable, ROOT / "main.py"]
        for name, value in flags.items():
            command += [f"--{name}", str(value)]
        return median_step(args, command)


def step_of_trl(args, **environment) -> dict:
    """On the training examples that main.py draws with seed 0."""
    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    loader, _ = get_dataloaders("arithmetic", tokenizer, eval_split="validation")
    rows = loader.next_batch(args.num_prompts * (args.iterations + 2))
    settings = dict(
        model_name=args.model_name,
        examples=[{"prompt": row["prompt"], "answer": row["answer"]} for row in rows],
        config=dict(
            max_steps=args.iterations + 2,
            per_device_train_batch_size=args.num_prompts * args.group_size,
            num_generations=args.group_size,
            max_completion_length=args.max_completion_length,
            beta=BETA,
            bf16=args.train_dtype == "bfloat16",
        ),
    )
    command = [args.trl_python, ROOT / "experiments" / "trl_step.py"]
    return median_step(args, command, json.dumps(settings), **environment)


def median_step(args, command: list, standard_input: str = "", **environment) -> dict:
    """Run a command whose reward notes each of its calls."""
    with tempfile.NamedTemporaryFile() as file:
        subprocess.run(
            command,
            input=standard_input,
            text=True,
            stdout=sys.stderr,
            env=os.environ | {"BENCHMARK_CALLS": file.name} | environment,
            check=True,
        )
        calls = pandas.read_json(file.name, lines=True)
    return median_of_intervals(calls, args.num_prompts * args.group_size)


def median_of_intervals(calls, num_completions: int) -> dict:
    """The median from one call to the next, without evaluations; the first two calls warm up."""
    calls = calls[calls["num_completions"] == num_completions]
    intervals = calls[["seconds", "cpu_seconds"]].diff().iloc[2:]
    return intervals.median().to_dict() | {"length": calls["length"].iloc[2:].median()}


def table_rows(turns: dict[str, list[dict]]) -> list[str]:
    """A line of Markdown for each competitor: medians, and ratios to ours with their range."""
    ours = pandas.DataFrame(turns["GRPO-Lite"])
    lines = []
    for name, turns_of_one in turns.items():
        theirs = pandas.DataFrame(turns_of_one)
        ratios = theirs / ours
        cells = [name, f"{theirs['length'].median():.0f}"]
        for column in ("seconds", "cpu_seconds"):
            ratio = ratios[column]
            cells.append(f"{theirs[column].median():.3g}")
            cells.append(f"{ratio.median():.2f} ({ratio.min():.2f} to {ratio.max():.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_name", default="tiny/1m")
    parser.add_argument("--num_prompts", type=int, default=16)
    parser.add_argument("--group_size", type=int, default=8)
    parser.add_argument("--max_completion_length", type=int, default=64)
    parser.add_argument("--train_dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--iterations", type=int, default=5, help="timed ones in a turn")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each competitor")
    parser.add_argument("--trl_python")
    args = parser.parse_args()
    turns = defaultdict(list)  # {name of a competitor: what its turns took}
    for _ in range(args.repeats):
        turns["GRPO-Lite"].append(step_of_ours(args))
        if args.trl_python:
            turns["TRL"].append(step_of_trl(args))
            turns["TRL, memory kept"].append(step_of_trl(args, **MEMORY_KEPT))
    print("| by | tokens | seconds | beside ours | seconds of CPU | beside ours |")
    print("|---|---|---|---|---|---|")
    print(*table_rows(turns), sep="\n")


if __name__ == "__main__":
    main()
