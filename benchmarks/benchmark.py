"""How fast a GRPO step is, beside transformers and TRL doing the same work: one table.

  step      main.py as it runs, rewards, optimiser and logs included, by stage; beside TRL's GRPOTrainer
  sampling  generation.generate beside model.generate, at natural lengths and with an EOS that nothing can sample

Competitors take turns in one run, with the same weights, prompts, dtype, threads and attention. Each row is the median
and range over the repeats. A ratio is taken within each repeat: how many times more time than ours.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
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
from training import write_logs

HERE = Path(__file__).parent


def step(args, folder):
    """Iterations of main.py and of TRL, in a fresh process per turn whose first iteration only warms up."""
    ours, theirs = [], []
    for repeat in range(args.repeats):
        ours.append(run_grpo(args, folder / f"ours{repeat}"))
        theirs += [run_trl(args, folder / f"trl{repeat}.json")] if args.trl_python else []
    for key in ours[0]:
        name, unit = key.rsplit(", ", 1)
        yield f"ours: {name}", unit, [run[key] for run in ours]
    if theirs:
        trl, seconds = f"TRL {theirs[0]['version']}", [median(run["seconds"]) for run in theirs]
        yield f"{trl}: whole step", "s", seconds
        yield (
            f"{trl}: completion length",
            "tokens",
            [median(run["response_length"]) for run in theirs],
        )
        yield (
            f"{trl} / ours",
            "ratio",
            [b / a["whole step, s"] for a, b in zip(ours, seconds, strict=True)],
        )


def run_grpo(args, output_dir):
    """main.py's own command line."""
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
    given = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    subprocess.run([sys.executable, HERE.parent / "main.py", *given], check=True, stdout=sys.stderr)
    rows = jsonl.read(output_dir / "train_log.jsonl")
    value = {
        key: median(row[key] for row in rows[1:])
        for key in rows[1]
        if isinstance(rows[1][key], (int, float))
    }
    return {
        # From log line to log line, so that what no stage counts (transcripts, metrics) is in it.
        "whole step, s": median(
            b["elapsed"] - a["elapsed"] for a, b in zip(rows, rows[1:], strict=False)
        ),
        "sample, s": value["time/sample"],
        "reward, s": value["time/reward"],
        "loss, s": value["time/loss"],
        "step, s": value["time/step"],
        "sampling, tokens/s": value["sampled_tokens"] / value["time/sample"],
        "completion length, tokens": value["response_length"],
        "sampling gap, nats": value["sampling_logp_gap"],
    } | {f"peak memory: {key[7:]}, GB": value[key] for key in value if key.startswith("memory/")}


def run_trl(args, output):
    """The same iterations on the same prompts by trl_step.py, in the environment that --trl_python belongs to."""
    loader, _ = get_dataloaders(
        "arithmetic", AutoTokenizer.from_pretrained(args.model_name), eval_split="validation"
    )
    batch = loader.next_batch(args.num_prompts * (args.iterations + 1))
    settings = vars(args) | {
        "examples": [{"prompt": e["prompt"], "answer": e["answer"]} for e in batch],
        "output": str(output),
        "sequences": args.num_prompts * args.group_size,
    }
    jsonl.write_json(output.with_suffix(".settings"), settings)
    command = [args.trl_python, HERE / "trl_step.py", output.with_suffix(".settings")]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return json.loads(output.read_text("utf-8"))


def sampling(args, folder):
    """From prompts to texts, in one process."""
    policy, tokenizer = llms.get_llm_tokenizer(args.model_name, args.device)
    model = llms.get_sampler(policy).eval()
    loader, _ = get_dataloaders("arithmetic", tokenizer, eval_split="validation")
    prompts = [example["prompt"] for example in loader.next_batch(args.num_prompts)]
    options = dict(num_samples=args.group_size, max_new_tokens=args.max_completion_length)
    natural = generation.eos_token_ids(model, tokenizer)
    for lengths, eos in (
        ("natural", natural),
        ("equal", [model.config.vocab_size]),
    ):  # an id outside the vocabulary
        with patch.object(generation, "eos_token_ids", return_value=eos):
            runs = alternate(
                args,
                ours=lambda: generation.generate(
                    model, tokenizer, prompts, **options
                ).lengths.tolist(),
                generate=lambda: sample_transformers(args, model, tokenizer, prompts),
            )
        for name, taken in runs.items():
            yield f"{lengths} lengths, {name}", "s", [seconds for seconds, _ in taken]
            yield (
                f"{lengths} lengths, {name}",
                "tokens/s",
                [sum(n) / seconds for seconds, n in taken],
            )
            yield (
                f"{lengths} lengths, {name}: mean completion",
                "tokens",
                [sum(n) / len(n) for _, n in taken],
            )
        turns = zip(runs["generate"], runs["ours"], strict=True)
        yield f"{lengths} lengths, generate / ours", "ratio", [a / b for (a, _), (b, _) in turns]


def sample_transformers(args, model, tokenizer, prompts):
    """model.generate from the whole distribution: every field is set, since an unset one is the model's own."""
    inputs = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt").to(
        model.device
    )
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
    ids = ids[:, inputs.input_ids.shape[1] :].tolist()
    lengths = [next((n for n, token in enumerate(row, 1) if token in eos), len(row)) for row in ids]
    tokenizer.batch_decode([row[:n] for row, n in zip(ids, lengths, strict=True)])
    return lengths


def alternate(args, **competitors):
    """{name: [(seconds, result), one per repeat]}: each once to warm up, then turn by turn."""
    taken, stages = {name: [] for name in competitors}, write_logs.Stages(args.device)
    for repeat in range(args.repeats + 1):
        for name, run in competitors.items():
            torch.manual_seed(repeat)
            with stages("run"):
                result = run()
            taken[name].append((stages.flush()["time/run"], result))
    return {name: results[1:] for name, results in taken.items()}


BENCHMARKS = {run.__name__: run for run in (step, sampling)}


def parse_args(argv):
    parser = ArgumentParser(description="GRPO-Lite's speed, beside transformers and TRL.")
    add = parser.add_argument
    add("benchmarks", nargs="+", choices=BENCHMARKS)
    add("--model_name", default="tiny/1m", help="directory or hub name")
    add("--device", default="cpu", help="cpu or cuda")
    add("--threads", type=int, default=2, help="CPU threads of every competitor")
    add("--num_prompts", type=int, default=16)
    add("--group_size", type=int, default=8, help="completions per prompt")
    add("--max_completion_length", type=int, default=64, help="tokens")
    add(
        "--beta",
        type=float,
        default=0.04,
        help="weight of the KL to the reference; 0: no reference",
    )
    add("--micro_batch_tokens", type=int, default=16384, help="padded tokens per pass of main.py")
    add(
        "--iterations",
        type=int,
        default=5,
        help="timed steps per repeat of `step`, after one to warm up",
    )
    add("--repeats", type=int, default=5, help="turns of each competitor")
    add("--trl_python", help="python of an environment with trl, torch, accelerate and datasets")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # for the other processes
    torch.set_num_threads(args.threads)
    rows = []
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        for name in args.benchmarks:
            rows += [(name, *row) for row in BENCHMARKS[name](args, Path(folder))]

    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE
    )
    device = (
        torch.cuda.get_device_name()
        if args.device != "cpu"
        else f"{os.cpu_count()} {platform.machine()} cores"
    )
    versions = [f"{package} {version(package)}" for package in ("torch", "transformers")]
    about = [
        f"commit {git.stdout.strip() or 'unknown'}",
        date.today(),
        device,
        f"{args.threads} threads",
        *versions,
    ]
    print(f"`python {' '.join(sys.argv)}`: {', '.join(map(str, about))}\n")
    print("| benchmark | quantity | median | min .. max | unit |\n|---|---|---:|---:|---|")
    for name, quantity, unit, values in rows:
        print(
            f"| {name} | {quantity} | {median(values):.4g} | {min(values):.4g} .. {max(values):.4g} | {unit} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
