"""How fast a GRPO step is, compared with transformers and TRL doing the same work: one table.

  step      iterations of main.py as it runs, by stage, with rewards, optimiser and logs; compared
            with TRL's GRPOTrainer
  sampling  generation.generate compared with model.generate: once until EOS, and once without EOS,
            so that every completion has the maximum length

Competitors take turns in one run, with the same weights, prompts, dtype, threads and attention.
Each row of the table has the median and the range over the repeats. A ratio is taken within each
repeat: the competitor's time divided by ours.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from transformers import AutoTokenizer, GenerationConfig

import llms
from flags import ArgumentParser
from logs import jsonl
from rl_datasets import get_dataloaders
from sampling import generation
from training.metrics import StageTimer

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    """One row of the table: a quantity and its value in each repeat."""

    quantity: str
    unit: str
    # One value for each repeat.
    values: list[float]


# --- Steps, compared with TRL ---------------------------------------------------------------------


def step(args, folder: Path) -> Iterator[Row]:
    """Iterations of main.py and of TRL.

    Each turn is a new process. The first iteration of a process only warms up.
    """
    our_runs = []
    trl_runs = []
    for repeat in range(args.repeats):
        our_runs.append(run_grpo(args, folder / f"ours{repeat}"))
        if args.trl_python:
            trl_runs.append(run_trl(args, folder / f"trl{repeat}.json"))
    for key in our_runs[0]:
        quantity, unit = key.rsplit(", ", 1)
        yield Row(f"ours: {quantity}", unit, [run[key] for run in our_runs])
    if trl_runs:
        name = f"TRL {trl_runs[0]['version']}"
        our_seconds = [run["whole step, s"] for run in our_runs]
        trl_seconds = [median(run["seconds"]) for run in trl_runs]
        trl_lengths = [median(run["response_length"]) for run in trl_runs]
        yield Row(f"{name}: whole step", "s", trl_seconds)
        yield Row(f"{name}: completion length", "tokens", trl_lengths)
        yield Row(f"{name} / ours", "ratio", ratios(trl_seconds, our_seconds))


def run_grpo(args, output_dir: Path) -> dict[str, float]:
    """Run main.py, and return {"quantity, unit": the median over the timed iterations}."""
    flags = dict(
        model_name=args.model_name,
        dataset_name="arithmetic",
        device=args.device,
        output_dir=output_dir,
        rollout_batch_size=args.num_prompts * args.group_size,
        group_size=args.group_size,
        beta=args.beta,
        eval_size=1,
        max_completion_length=args.max_completion_length,
        micro_batch_tokens=args.micro_batch_tokens,
        num_train_iters=args.iterations + 1,
        eval_iterations=10**6,
        save_iterations=10**6,
    )
    command = [sys.executable, HERE.parent / "main.py"]
    for name, value in flags.items():
        command += [f"--{name}", str(value)]
    subprocess.run(command, check=True, stdout=sys.stderr)

    log = jsonl.read(output_dir / "train_log.jsonl")
    timed = log[1:]  # the first iteration only warms up
    # A whole step lasts from one log line to the next. So it includes what belongs to no stage,
    # such as writing transcripts and computing metrics.
    end_times = [line["elapsed"] for line in log]
    whole_steps = [end - start for start, end in zip(end_times, end_times[1:], strict=False)]
    medians = {}
    for key, value in timed[0].items():
        if isinstance(value, (int, float)):
            medians[key] = median(line[key] for line in timed)
    quantities = {
        "whole step, s": median(whole_steps),
        "sample, s": medians["time/sample"],
        "reward, s": medians["time/reward"],
        "loss, s": medians["time/loss"],
        "step, s": medians["time/step"],  # the update by the optimiser
        "sampling, tokens/s": medians["sampled_tokens"] / medians["time/sample"],
        "completion length, tokens": medians["response_length"],
        "sampling gap, nats": medians["sampling_logp_gap"],
    }
    for key, value in medians.items():
        if key.startswith("memory/"):  # one for each stage, on CUDA alone
            quantities[f"peak memory: {key.removeprefix('memory/')}, GB"] = value
    return quantities


def run_trl(args, output: Path) -> dict:
    """Run the same iterations on the same prompts in TRL, and return what trl_step.py writes."""
    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    loader, _ = get_dataloaders("arithmetic", tokenizer, eval_split="validation")
    batch = loader.next_batch(args.num_prompts * (args.iterations + 1))
    examples = [{"prompt": example["prompt"], "answer": example["answer"]} for example in batch]
    settings = {
        **vars(args),
        "examples": examples,
        "output": str(output),
        "completions_per_batch": args.num_prompts * args.group_size,
    }
    settings_file = output.with_suffix(".settings")
    jsonl.write_json(settings_file, settings)
    command = [args.trl_python, HERE / "trl_step.py", settings_file]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return json.loads(output.read_text("utf-8"))


# --- Sampling, compared with transformers ---------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """One turn of a competitor in `sampling`."""

    seconds: float
    # The number of tokens of each completion.
    lengths: list[int]


def sampling(args, folder: Path) -> Iterator[Row]:
    """The time from prompts to decoded texts. Both samplers run in this process, in turns."""
    policy, tokenizer = llms.get_llm_tokenizer(args.model_name, args.device)
    model = llms.get_sampler(policy).eval()
    loader, _ = get_dataloaders("arithmetic", tokenizer, eval_split="validation")
    prompts = [example["prompt"] for example in loader.next_batch(args.num_prompts)]
    eos_of_setting = {
        "natural lengths": generation.eos_token_ids(model, tokenizer),
        "equal lengths": [model.config.vocab_size],  # an id that is never sampled
    }
    competitors = {"ours": sample_ours, "generate": sample_transformers}
    for setting, eos in eos_of_setting.items():
        # Both samplers ask this function which ids end a completion.
        with patch.object(generation, "eos_token_ids", return_value=eos):
            timings = alternate(competitors, args, model, tokenizer, prompts)
        for name in competitors:
            yield from sampling_rows(f"{setting}, {name}", timings[name])
        our_seconds = [turn.seconds for turn in timings["ours"]]
        their_seconds = [turn.seconds for turn in timings["generate"]]
        yield Row(f"{setting}, generate / ours", "ratio", ratios(their_seconds, our_seconds))


def sampling_rows(label: str, turns: list[Timing]) -> Iterator[Row]:
    """A competitor's time, speed and mean completion length."""
    yield Row(label, "s", [turn.seconds for turn in turns])
    yield Row(label, "tokens/s", [sum(turn.lengths) / turn.seconds for turn in turns])
    mean_lengths = [sum(turn.lengths) / len(turn.lengths) for turn in turns]
    yield Row(f"{label}: mean completion", "tokens", mean_lengths)


def sample_ours(args, model, tokenizer, prompts) -> list[int]:
    """Sample with this project's sampler, and return the number of tokens of each completion."""
    rollout = generation.generate(
        model,
        tokenizer,
        prompts,
        num_samples=args.group_size,
        max_completion_length=args.max_completion_length,
    )
    return rollout.lengths.tolist()


def sample_transformers(args, model, tokenizer, prompts) -> list[int]:
    """Sample with model.generate, and return the number of tokens of each completion.

    It samples from the whole distribution. The fields that could change this are all set, because
    transformers takes an unset field from the model's generation config.
    """
    inputs = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
    inputs = inputs.to(model.device)
    eos = generation.eos_token_ids(model, tokenizer)
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
        eos_token_id=eos,
        use_cache=True,
        max_new_tokens=args.max_completion_length,
        num_return_sequences=args.group_size,
        pad_token_id=tokenizer.pad_token_id,
    )
    ids = model.generate(
        inputs.input_ids, attention_mask=inputs.attention_mask, generation_config=config
    )
    P = inputs.input_ids.shape[1]
    completions = []
    for row in ids[:, P:].tolist():
        # A completion ends with its first EOS, which belongs to it. Padding follows.
        length = next((n for n, token in enumerate(row, 1) if token in eos), len(row))
        completions.append(row[:length])
    tokenizer.batch_decode(completions)  # only for the time it takes, since our sampler decodes too
    return [len(completion) for completion in completions]


def alternate(competitors: dict, args, *inputs) -> dict[str, list[Timing]]:
    """Let the competitors take turns on the same inputs. The first turn of each only warms up.

    Returns:
        For each competitor's name one Timing per repeat.
    """
    timings = {name: [] for name in competitors}
    timer = StageTimer(args.device)
    for repeat in range(args.repeats + 1):
        for name, run in competitors.items():
            torch.manual_seed(repeat)
            with timer("run"):
                lengths = run(args, *inputs)
            seconds = timer.flush()["time/run"]
            if repeat > 0:
                timings[name].append(Timing(seconds, lengths))
    return timings


def ratios(numerators: list[float], denominators: list[float]) -> list[float]:
    """The ratio within each repeat."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


# --- The command line and its table ---------------------------------------------------------------

BENCHMARKS = {"step": step, "sampling": sampling}


def parse_args(argv):
    parser = ArgumentParser(description="GRPO-Lite's speed, compared with transformers and TRL.")
    add = parser.add_argument
    benchmark_help = (
        "step: iterations of main.py, by stage, compared with TRL's GRPOTrainer."
        " sampling: this project's sampler, compared with transformers' model.generate"
    )
    add("benchmarks", nargs="+", choices=BENCHMARKS, help=benchmark_help)
    add("--model_name", default="tiny/1m", help="directory of a model, or its name on the hub")
    add("--device", default="cpu", help="cpu or cuda")
    add("--threads", type=int, default=2, help="CPU threads of every competitor")
    add("--num_prompts", type=int, default=16, help="prompts in a batch")
    add("--group_size", type=int, default=8, help="completions per prompt")
    add("--max_completion_length", type=int, default=64, help="tokens, at most, per completion")
    beta_help = "weight of the KL to the reference model; 0 means that there is no reference"
    add("--beta", type=float, default=0.04, help=beta_help)
    add("--micro_batch_tokens", type=int, default=16384, help="padded tokens per pass of main.py")
    iterations_help = "timed iterations per repeat of `step`, after one that warms up"
    add("--iterations", type=int, default=5, help=iterations_help)
    add("--repeats", type=int, default=5, help="turns of each competitor")
    trl_help = "python of an environment with trl, torch, accelerate and datasets; default: no TRL"
    add("--trl_python", help=trl_help)
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # for the processes that `step` starts
    torch.set_num_threads(args.threads)
    rows = []  # (name of the benchmark, Row)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        for name in args.benchmarks:
            for row in BENCHMARKS[name](args, Path(folder)):
                rows.append((name, row))

    print(f"`python {' '.join(sys.argv)}`: {describe_setting(args)}\n")
    print("| benchmark | quantity | median | min .. max | unit |\n|---|---|---:|---:|---|")
    for name, row in rows:
        value_range = f"{min(row.values):.4g} .. {max(row.values):.4g}"
        middle = f"{median(row.values):.4g}"
        print(f"| {name} | {row.quantity} | {middle} | {value_range} | {row.unit} |")
    return 0


def describe_setting(args) -> str:
    """Commit, date, device, threads and versions, for the line above the table."""
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE
    )
    commit = git.stdout.strip() or "unknown"
    if args.device == "cpu":
        device = f"{os.cpu_count()} {platform.machine()} cores"
    else:
        device = torch.cuda.get_device_name()
    versions = f"torch {version('torch')}, transformers {version('transformers')}"
    return f"commit {commit}, {date.today()}, {device}, {args.threads} threads, {versions}"


if __name__ == "__main__":
    sys.exit(main())
