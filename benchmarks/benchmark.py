"""How long a training step and sampling take, next to TRL and transformers doing the same work.

    python benchmarks/benchmark.py step sampling
    python benchmarks/benchmark.py step sampling --trl_python ~/trl/bin/python
    python benchmarks/benchmark.py step sampling --model_name Qwen/Qwen2-0.5B-Instruct \
        --num_prompts 4 16 32 64 --max_completion_length 512      # on a GPU, at four sizes

  step      iterations of main.py with rewards, optimiser and logs, next to TRL's GRPOTrainer
  sampling  generation.generate next to model.generate, until EOS and with EOS switched off, so that
            every completion has the maximum length. On a GPU also next to itself without CUDA
            graphs

The competitors take turns in one run, with the same weights, prompts, precision, threads and kind
of attention. The speed of a machine drifts, so each ratio is taken within a turn. Two tables in
Markdown are printed: the comparison, and the stages of our step with their memory on a GPU.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers
from transformers import AutoTokenizer, GenerationConfig

import llms
from config import ArgumentParser
from logs import jsonl, markdown
from rl_datasets import get_dataloaders
from sampling import generation
from sampling.decoding import Decoder

HERE = Path(__file__).parent
# Weight of the KL in main.py and in TRL, so that both compute a reference.
BETA = 0.04


@dataclass(frozen=True)
class Turn:
    """What a competitor needed for the work once."""

    seconds: float
    mean_length: float  # tokens of a completion


def comparison_row(
    work: str, num_completions: int, ours: list[Turn], theirs: list[Turn]
) -> list[str]:
    """One row of the first table. `theirs` is empty if there is no competitor."""
    speeds = [num_completions * turn.mean_length / turn.seconds for turn in ours]
    cells = [work, str(num_completions), f"{median(speeds):,.0f}", describe(ours)]
    if not theirs:
        return [*cells, "-", "-"]
    ratios = [b.seconds / a.seconds for a, b in zip(ours, theirs, strict=True)]
    ratio = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return [*cells, describe(theirs), ratio]


def describe(turns: list[Turn]) -> str:
    seconds = median(turn.seconds for turn in turns)
    length = median(turn.mean_length for turn in turns)
    return f"{seconds:.3g} s, {length:.0f} tokens"


def read_examples(tokenizer, num_examples: int) -> list[dict]:
    """The first training examples, as main.py draws them with seed 0."""
    loader, _ = get_dataloaders("arithmetic", tokenizer, eval_split="validation")
    return loader.next_batch(num_examples)


# --- Training steps -------------------------------------------------------------------------------


def compare_steps(args, num_prompts: int) -> tuple[list[list[str]], list[list[str]]]:
    """The rows of the first and of the second table. Each turn is a new process."""
    num_completions = num_prompts * args.group_size
    our_turns = []
    trl_turns = []
    our_stages = []
    competitor = "TRL, which is not installed"
    for _ in range(args.repeats):
        log = run_main(args, num_completions)
        our_turns.append(turn_of_log(log))
        our_stages.append(stages_of_log(log))
        if args.trl_python:
            result = run_trl(args, num_prompts)
            competitor = f"TRL {result['version']}"
            trl_turns.append(Turn(median(result["seconds"]), median(result["mean_lengths"])))
    work = f"step, next to {competitor}"
    comparison = comparison_row(work, num_completions, our_turns, trl_turns)
    stage_rows = []
    for stage in our_stages[0]:
        seconds = median(stages[stage][0] for stages in our_stages)
        peaks = [stages[stage][1] for stages in our_stages]
        peak = "-" if None in peaks else f"{max(peaks):.1f}"
        stage_rows.append([stage, str(num_completions), f"{seconds:.3f}", peak])
    return [comparison], stage_rows


def run_main(args, num_completions: int) -> list[dict]:
    """Run main.py, and return the lines of its train_log.jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        flags = dict(
            model_name=args.model_name,
            dataset_name="arithmetic",
            device=args.device,
            output_dir=folder,
            rollout_batch_size=num_completions,
            group_size=args.group_size,
            max_completion_length=args.max_completion_length,
            micro_batch_tokens=args.micro_batch_tokens,
            beta=BETA,
            num_train_iters=args.iterations + 1,
            eval_size=1,
            eval_iterations=10**6,
            save_iterations=10**6,
        )
        command = [sys.executable, HERE.parent / "main.py"]
        for name, value in flags.items():
            command += [f"--{name}", str(value)]
        run(command, stdout=sys.stderr)
        return jsonl.read(Path(folder) / "train_log.jsonl")


def turn_of_log(log: list[dict]) -> Turn:
    """The median iteration of a train_log.jsonl. The first one only warms up.

    An iteration lasts from one line of the log to the next. This includes what belongs to no stage,
    such as writing transcripts.
    """
    seconds = []
    for i in range(1, len(log)):
        seconds.append(log[i]["elapsed"] - log[i - 1]["elapsed"])
    length = median(line["response_length"] for line in log[1:])
    return Turn(median(seconds), length)


def stages_of_log(log: list[dict]) -> dict[str, tuple[float, float | None]]:
    """{stage: (median seconds, GB at its peak)}; the memory is known on CUDA alone."""
    timed = log[1:]
    stages = {}
    for key in timed[0]:
        kind, _, stage = key.partition("/")
        if kind == "time":
            seconds = median(line[key] for line in timed)
            peaks = [line[f"memory/{stage}"] for line in timed if f"memory/{stage}" in line]
            stages[stage] = (seconds, max(peaks, default=None))
    return stages


def run_trl(args, num_prompts: int) -> dict:
    """Run the same iterations on the same prompts in TRL, and return what trl_step.py prints."""
    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    examples = read_examples(tokenizer, num_prompts * (args.iterations + 1))
    settings = dict(
        model_name=args.model_name,
        device=args.device,
        examples=[{"prompt": row["prompt"], "answer": row["answer"]} for row in examples],
        num_completions=num_prompts * args.group_size,
        group_size=args.group_size,
        max_completion_length=args.max_completion_length,
        beta=BETA,
        iterations=args.iterations,
    )
    command = [args.trl_python, HERE / "trl_step.py"]
    result = run(command, input=json.dumps(settings), stdout=subprocess.PIPE, text=True)
    return json.loads(result.stdout.splitlines()[-1])


def run(command: list, **options) -> subprocess.CompletedProcess:
    """Run a command that prints its own errors.

    Raises:
        SystemExit: it failed, with its exit code.
    """
    result = subprocess.run(command, **options)
    if result.returncode:
        raise SystemExit(result.returncode)
    return result


# --- Sampling -------------------------------------------------------------------------------------


def compare_sampling(args, num_prompts: int) -> list[list[str]]:
    """The rows of the first table: the time from prompts to decoded texts."""
    policy, tokenizer = llms.get_llm_tokenizer(args.model_name, args.device)
    model = llms.get_sampler(policy).eval()
    examples = read_examples(tokenizer, num_prompts)
    prompts = [example["prompt"] for example in examples]
    num_completions = num_prompts * args.group_size
    competitors = {"ours": sample, "model.generate": sample_with_transformers}
    if args.device == "cuda":
        competitors["itself without CUDA graphs"] = sample_without_graphs
    eos_of_lengths = {
        "until EOS": generation.eos_token_ids(model, tokenizer),
        "to the maximum length": [model.config.vocab_size],  # an id that is never sampled
    }
    rows = []
    for lengths, eos in eos_of_lengths.items():
        # Both samplers ask this function which ids end a completion.
        with patch.object(generation, "eos_token_ids", return_value=eos):
            turns = take_turns(competitors, args, model, tokenizer, prompts)
        ours = turns.pop("ours")
        for name, theirs in turns.items():
            work = f"sampling {lengths}, next to {name}"
            rows.append(comparison_row(work, num_completions, ours, theirs))
    return rows


def take_turns(competitors: dict[str, Callable], args, *inputs) -> dict[str, list[Turn]]:
    """{name: its turns on the same inputs}. The first turn of each only warms up."""
    turns = {name: [] for name in competitors}
    for repeat in range(args.repeats + 1):
        for name, sampler in competitors.items():
            torch.manual_seed(repeat)
            start = synchronized_time(args.device)
            lengths = sampler(args, *inputs)
            seconds = synchronized_time(args.device) - start
            if repeat > 0:
                turns[name].append(Turn(seconds, sum(lengths) / len(lengths)))
    return turns


def synchronized_time(device: str) -> float:
    """The time in seconds, once the GPU has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def sample(args, model, tokenizer, prompts: list[str]) -> list[int]:
    """The number of tokens of each completion, from this project's sampler."""
    rollout = generation.generate(
        model,
        tokenizer,
        prompts,
        num_samples=args.group_size,
        max_completion_length=args.max_completion_length,
    )
    return rollout.lengths.tolist()


def sample_without_graphs(args, model, tokenizer, prompts: list[str]) -> list[int]:
    """The same without CUDA graphs: each kernel is launched from Python."""

    def ordinary_decoder(model, max_rows, max_columns):
        return Decoder(model.device, max_rows)

    with patch.object(generation, "decoder_for", ordinary_decoder):
        return sample(args, model, tokenizer, prompts)


def sample_with_transformers(args, model, tokenizer, prompts: list[str]) -> list[int]:
    """The number of tokens of each completion, from model.generate.

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
    prompt_length = inputs.input_ids.shape[1]
    completions = []
    for row in ids[:, prompt_length:].tolist():
        # A completion ends with its first EOS, which belongs to it. Padding follows.
        length = next((n for n, token in enumerate(row, 1) if token in eos), len(row))
        completions.append(row[:length])
    tokenizer.batch_decode(completions)  # only for the time it takes, since our sampler decodes too
    return [len(completion) for completion in completions]


# --- The command line and its tables --------------------------------------------------------------


def positive_int(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is too small; use 1 or more")
    return number


def parse_args(argv=None):
    parser = ArgumentParser(
        description="How long a training step and sampling take, next to TRL and transformers"
        " doing the same work in turns. Prints two Markdown tables: the comparison, and the"
        " stages of a training step. The defaults take some minutes on two CPU cores. On a GPU,"
        " try --model_name Qwen/Qwen2-0.5B-Instruct --num_prompts 4 16 32 64"
        " --max_completion_length 512."
    )
    add = parser.add_argument
    work_help = (
        "step: iterations of main.py, next to TRL's GRPOTrainer.\n"
        "sampling: our sampler, next to transformers' model.generate."
    )
    add("work", nargs="+", choices=["step", "sampling"], help=work_help)
    add("--model_name", default="tiny/1m", help="directory of a model, or its name on the hub")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=["cpu", "cuda"], default=device, help="where everything runs")
    add("--threads", type=positive_int, default=2, help="CPU threads of each competitor")
    prompts_help = "prompts in a batch; several numbers give a row for each"
    add("--num_prompts", type=positive_int, nargs="+", default=[16], help=prompts_help)
    add("--group_size", type=positive_int, default=8, help="completions for each prompt")
    length_help = "tokens at which a completion is cut"
    add("--max_completion_length", type=positive_int, default=64, help=length_help)
    micro_batch_help = "padded tokens in a pass of main.py; fewer take less memory"
    add("--micro_batch_tokens", type=positive_int, default=16384, help=micro_batch_help)
    iterations_help = "timed iterations in a turn of `step`, after one that warms up"
    add("--iterations", type=positive_int, default=5, help=iterations_help)
    add("--repeats", type=positive_int, default=5, help="turns of each competitor")
    trl_help = (
        "Python of an environment with trl, torch, accelerate and datasets."
        " Without it `step` is compared with TRL only if TRL is installed here."
    )
    trl_python = sys.executable if find_spec("trl") else None
    add("--trl_python", default=trl_python, help=trl_help)
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU here")
    return args


def main(argv=None):
    args = parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # for the processes that `step` starts
    torch.set_num_threads(args.threads)
    comparisons = []
    stages = []
    try:
        with redirect_stdout(sys.stderr):
            for num_prompts in args.num_prompts:
                if "step" in args.work:
                    rows, stage_rows = compare_steps(args, num_prompts)
                    comparisons += rows
                    stages += stage_rows
                if "sampling" in args.work:
                    comparisons += compare_sampling(args, num_prompts)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    print(f"`python {' '.join(sys.argv)}`: {describe_setting(args)}\n")
    header = ["work", "completions", "our tokens/s", "GRPO-Lite", "other", "other / GRPO-Lite"]
    print(markdown.table(header, comparisons))
    if stages:
        header = ["stage of our step", "completions", "seconds", "GB at the peak"]
        print(f"\n{markdown.table(header, stages)}")
    return 0


def describe_setting(args) -> str:
    """Commit, date, hardware, threads and versions, for the line above the tables."""
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE
    )
    commit = git.stdout.strip() or "unknown"
    hardware = f"{os.cpu_count()} {platform.machine()} cores"
    if args.device == "cuda":
        hardware = f"{torch.cuda.get_device_name()} and {hardware}"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"commit {commit}, {date.today()}, {hardware}, threads: {args.threads}, {versions}"


if __name__ == "__main__":
    sys.exit(main())
