"""Supervised fine-tuning: the baseline that reinforcement learning has to beat, and what trained the models in tiny/.

    python generate_gold.py --from_reference --dataset_name arithmetic --output gold.jsonl
    python sft.py --model_name tiny/1m --dataset_name arithmetic --train_file gold.jsonl --num_examples 250

Only the completion is learnt: the prompt's tokens are context, and the EOS that ends the completion is trained with it.

Shapes: B sequences, P prompt tokens, C completion tokens, T = P + C.
"""

import itertools
import json
import math
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

import distributed
import flags
import llms
import main as grpo
import runs
from evaluator import get_evaluator
from rl_datasets import DATASETS, PROMPTS, get_dataloaders
from utils import (
    LENGTH_NORMALIZATIONS,
    ArgumentParser,
    Stages,
    aggregate_tokens,
    append_jsonl,
    autocast,
    get_per_token_logps,
    masked_sum,
    seed_everything,
    split_into_micro_batches,
    sum_metrics,
)


def train(
    model, tokenizer, examples, *,
    num_updates, train_batch_size=64, micro_batch_tokens=8192,
    learning_rate=1e-5, final_learning_rate=0.0, warmup_steps=10, weight_decay=0.0, max_grad_norm=1.0,
    length_normalization="masked_mean", normalization_constant=None, log_entropy=False, seed=0,
    optimizer=None, start=0, tokens=0, start_time=None, output_dir=None, after_update=None,
):  # fmt: skip
    """Train the model in place on the completions of the examples, with AdamW.

    Args:
        examples: dicts with "prompt" (rendered) and "completion" (without EOS), both text. They are visited in an order
            drawn anew each epoch from the seed; a batch may span two epochs.
        num_updates: optimizer steps, of train_batch_size examples each.
        micro_batch_tokens: padded tokens in one pass, a memory knob: it never changes the gradient.
        learning_rate, final_learning_rate, warmup_steps: linear warm-up to the first, then a cosine to the second.
        length_normalization, normalization_constant: see compute_sft_loss.
        log_entropy: also log the mean entropy (nats) of the model at the completions' tokens.
        optimizer, start, tokens, start_time: to continue after `start` updates: AdamW with its state, the tokens seen,
            and the time (perf_counter) from which `elapsed` counts.
        output_dir: where train_log.jsonl is appended to; None writes no file.
        after_update: called with the row of the log after each update: the place to evaluate and to save.

    Returns:
        The rows of the log, one per update: step, loss, entropy, grad_norm (before clipping), learning_rate,
        examples and tokens (both so far; prompts count too; tokens also as total_tokens), time/loss, time/step,
        time/total and elapsed (seconds).
    """
    _check(examples, length_normalization, normalization_constant)
    sequences = encode(tokenizer, examples)
    order = itertools.islice(example_order(len(sequences), seed), start * train_batch_size, None)
    optimizer = optimizer or get_optimizer(model, weight_decay)
    stages, start_time, log = Stages(model.device), start_time or time.perf_counter(), []
    if output_dir:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
    model.train()
    optimizer.zero_grad()  # whatever the caller has left there
    steps = range(start + 1, num_updates + 1)
    progress = runs.bar(steps, initial=start, total=num_updates, desc="SFT", unit="update")
    for step in progress:
        batch = [sequences[i] for i in itertools.islice(order, train_batch_size)]
        with stages("loss"):
            metrics = accumulate_gradients(
                model,
                batch,
                tokenizer.pad_token_id,
                micro_batch_tokens=micro_batch_tokens,
                length_normalization=length_normalization,
                normalization_constant=normalization_constant,
                log_entropy=log_entropy,
            )
        with stages("step"):
            rate = learning_rate_at(step, num_updates, warmup_steps, learning_rate, final_learning_rate)
            for group in optimizer.param_groups:
                group["lr"] = rate
            grad_norm = distributed.full(torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm))
            optimizer.step()
            optimizer.zero_grad()
        tokens += sum(len(prompt) + len(completion) for prompt, completion in batch)
        row = {"step": step, **metrics, "grad_norm": grad_norm.item(), "learning_rate": rate}
        row |= {"examples": step * train_batch_size, "tokens": tokens, "total_tokens": tokens}  # the axis of any run
        row |= {**stages.flush(), "elapsed": time.perf_counter() - start_time}
        log.append(row)
        if output_dir:
            append_jsonl(Path(output_dir) / "train_log.jsonl", row)
        progress.set_postfix(loss=f"{metrics['loss']:.3f}")
        if after_update:
            after_update(row)
    return log


def get_optimizer(model, weight_decay=0.0):
    return torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=weight_decay)


def accumulate_gradients(
    model,
    batch,
    pad_token_id,
    *,
    micro_batch_tokens,
    length_normalization="masked_mean",
    normalization_constant=None,
    log_entropy=False,
):
    """Add the gradient of one update's loss to the parameters, micro-batch by micro-batch.

    Args:
        batch: list of (prompt ids, completion ids), as from encode: the whole update, of which each process takes some.

    Returns:
        {"loss": of the whole update, "entropy": mean over its completion tokens, if asked for}
    """
    num_tokens = sum(len(completion) for _, completion in batch)
    mine = distributed.share(batch)
    lengths = [len(prompt) for prompt, _ in mine], [len(completion) for _, completion in mine]
    metrics = {"loss": 0.0} | ({"entropy": 0.0} if log_entropy else {})
    pieces = [rows for rows, _ in split_into_micro_batches(*lengths, group_size=1, max_tokens=micro_batch_tokens)]
    for rows in distributed.same_number_of_passes(pieces, None):
        ids, attention_mask, C = collate([mine[i] for i in rows] if rows else batch[:1], pad_token_id, model.device)
        with autocast(model.device):
            logps = get_per_token_logps(model, ids, attention_mask, C, return_entropy=log_entropy)
        logps, entropies = logps if log_entropy else (logps, None)
        completion_mask = attention_mask[:, -C:] * bool(rows)  # an idle pass counts nothing
        # Shares of the whole update's mean, so that they simply add whatever the split.
        loss = compute_sft_loss(
            logps,
            completion_mask,
            length_normalization=length_normalization,
            normalization_constant=normalization_constant,
            num_sequences=len(batch),
            num_tokens=num_tokens,
        )
        loss.backward()
        metrics["loss"] += loss.item()
        if log_entropy:
            metrics["entropy"] += (masked_sum(entropies, completion_mask) / num_tokens).item()
    return sum_metrics(distributed.gather([metrics]))


def compute_sft_loss(
    per_token_logps,
    completion_mask,
    *,
    length_normalization="masked_mean",
    normalization_constant=None,
    num_sequences=None,
    num_tokens=None,
):
    """Negative log-likelihood of the completions (CS336 A5, section 4.2): these sequences' share of the update's loss.

    Args:
        per_token_logps, completion_mask: (B, C).
        length_normalization, normalization_constant: see utils.aggregate_tokens.
        num_sequences, num_tokens: those of the whole update; None means that this call is the whole update.
    """
    assert per_token_logps.shape == completion_mask.shape, (per_token_logps.shape, completion_mask.shape)
    num_sequences = len(completion_mask) if num_sequences is None else num_sequences
    num_tokens = int(completion_mask.sum()) if num_tokens is None else num_tokens
    return aggregate_tokens(
        -per_token_logps, completion_mask, length_normalization, normalization_constant, num_sequences, num_tokens
    )


def learning_rate_at(step, num_updates, warmup_steps, peak, final):
    """The rate of update `step` (1 to num_updates): linear to the peak at warmup_steps, then a cosine towards final."""
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = (step - warmup_steps) / (num_updates - warmup_steps + 1)  # below 1: no update is spent at rate final
    return final + (peak - final) * (1 + math.cos(math.pi * progress)) / 2


def encode(tokenizer, examples):
    """List of (prompt ids, completion ids), tokenized apart, as in sampling, so that no token spans the border.

    The EOS is appended as an id: as text it would depend on how the tokenizer reads it.
    """
    prompts = tokenizer([example["prompt"] for example in examples], add_special_tokens=False)["input_ids"]
    completions = tokenizer([example["completion"] for example in examples], add_special_tokens=False)["input_ids"]
    return [(p, c + [tokenizer.eos_token_id]) for p, c in zip(prompts, completions, strict=True)]


def collate(sequences, pad_token_id, device="cpu"):
    """Prompts left-padded and completions right-padded: prompt_completion_ids (B, T), attention_mask (B, T) and C."""
    P, C = (max(len(part) for part in parts) for parts in zip(*sequences, strict=True))
    ids = torch.full((len(sequences), P + C), pad_token_id)
    attention_mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(sequences):
        columns = slice(P - len(prompt), P + len(completion))
        ids[row, columns] = torch.tensor(prompt + completion)
        attention_mask[row, columns] = 1
    return ids.to(device), attention_mask.to(device), C


def example_order(n, seed):
    """Endless row numbers: every epoch is its own permutation of range(n)."""
    for epoch in itertools.count():
        order = list(range(n))
        random.Random(f"sft/{seed}/{epoch}").shuffle(order)
        yield from order


def _check(examples, length_normalization, normalization_constant):
    if not examples:
        raise ValueError("there are no examples to train on")
    if length_normalization not in LENGTH_NORMALIZATIONS:
        known = ", ".join(LENGTH_NORMALIZATIONS)
        raise ValueError(f"length_normalization must be one of {known}, not {length_normalization!r}")
    if length_normalization == "masked_normalize" and not normalization_constant:
        raise ValueError("length_normalization masked_normalize needs normalization_constant, a number of tokens")


# ---------------------------------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------------------------------


def read_gold(path, prompt_name):
    """Rows of generate_gold.py's file: question, completion, answer. Raises ValueError, with the line of a bad one."""
    rows = []
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--train_file {path}: cannot be read ({error})") from error
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: not valid JSON ({error})") from error
        for column in ("question", "completion", "answer"):
            if not isinstance(row, dict) or not isinstance(row.get(column), str):
                raise ValueError(f"{where}: needs a text column {column!r}, as generate_gold.py writes it")
        if row.get("prompt_name", prompt_name) != prompt_name:
            raise ValueError(
                f"{where}: its completion is in the form {row['prompt_name']}, not {prompt_name}: see --prompt"
            )
        rows.append(row)
    if not rows:
        raise ValueError(f"--train_file {path} is empty")
    return rows


def select_examples(rows, args, prompt, tokenizer, evaluator):
    """The examples to train on: filtered, shuffled by the seed, cut to num_examples (so that subsets are nested)."""
    counts = {"read": len(rows)}
    if args.filter_correct:
        verdicts = evaluator.compute_rewards(
            [row["question"] for row in rows], [row["completion"] for row in rows], [row["answer"] for row in rows]
        ).details
        rows = [row for row, verdict in zip(rows, verdicts, strict=True) if verdict["correct_strict"]]
        counts["incorrect, left out"] = counts["read"] - len(rows)
    filled = [row for row in rows if row["completion"].strip()]
    counts["empty, left out"] = len(rows) - len(filled)
    examples = [row | {"prompt": prompt.render(tokenizer, row["question"])} for row in filled]
    lengths = [(len(p), len(c)) for p, c in encode(tokenizer, examples)] if examples else []
    limits = args.max_prompt_length, args.max_completion_length
    fitting = [e for e, (p, c) in zip(examples, lengths, strict=True) if p <= limits[0] and c <= limits[1]]
    counts["too long, left out"] = len(examples) - len(fitting)
    random.Random(f"subset/{args.seed}").shuffle(fitting)
    chosen = fitting[: args.num_examples]
    counts["used"] = len(chosen)
    print("examples: " + ", ".join(f"{count:,} {name}" for name, count in counts.items()))
    if not chosen:
        raise ValueError(f"--train_file {args.train_file}: no example is left to train on")
    if args.num_examples and len(chosen) < args.num_examples:
        raise ValueError(f"--num_examples {args.num_examples}: only {len(chosen)} usable examples are there")
    return chosen


def parse_args(argv=None):
    parser = ArgumentParser(
        description="Fine-tune a language model on worked solutions, and evaluate it as main.py does."
    )
    add = parser.add_argument_group("model and data").add_argument
    add("--model_name", default="Qwen/Qwen2-0.5B-Instruct", help="hub name or directory with safetensors weights")
    add(
        "--gradient_checkpointing", action="store_true", help="recompute activations: less memory, about a third slower"
    )
    add("--train_file", required=True, help="the .jsonl that generate_gold.py writes: question, completion, answer")
    add(
        "--num_examples",
        type=int,
        help="train on so many, drawn by the seed; smaller sets are inside larger (default: all)",
    )
    add(
        "--filter_correct", action="store_true", help="leave out examples that the evaluator finds not strictly correct"
    )
    add("--dataset_name", default="gsm8k", help=f"for evaluation, one of: {', '.join(DATASETS)}")
    add("--dataset_path", help="folder with train and test as .jsonl or .parquet, instead of the hub")
    add("--evaluator", help="default: the data set's own")
    add("--prompt", help=f"form of prompt and answer: one of {', '.join(PROMPTS)} (default: the data set's own)")
    add("--max_prompt_length", type=int, default=512, help="tokens; examples with a longer prompt are left out")
    add(
        "--max_completion_length", type=int, default=512, help="tokens; of examples, and of completions when evaluating"
    )
    add = parser.add_argument_group("optimisation").add_argument
    add("--epochs", type=float, default=1.0, help="passes over the examples")
    add("--num_updates", type=int, help="optimiser steps, instead of --epochs")
    add("--train_batch_size", type=int, default=32, help="examples per optimiser step")
    add("--micro_batch_tokens", type=int, default=16384, help="padded tokens per pass: memory only, not the gradient")
    add("--learning_rate", type=float, default=1e-5, help="peak, followed by a cosine to 0")
    add("--warmup_steps", type=int, default=10, help="optimiser steps of linear warm-up")
    add("--weight_decay", type=float, default=0.0, help="of AdamW")
    add("--max_grad_norm", type=float, default=1.0, help="gradients are scaled down to this norm")
    add(
        "--length_normalization",
        default="masked_mean",
        choices=LENGTH_NORMALIZATIONS,
        help="per-token loss: mean over each sequence, sum / max_completion_length, mean over all tokens",
    )
    add("--log_entropy", action="store_true", help="log the entropy at the completions' tokens: a little slower")
    add = parser.add_argument_group("evaluation and output").add_argument
    add("--eval_updates", type=int, default=100, help="evaluate every so many updates, and first and last")
    add("--eval_size", type=int, help="test problems, a fixed random subset (default: all)")
    add("--eval_temperature", type=float, default=0.0, help="0 is greedy")
    add("--eval_samples", type=int, default=1, help="completions per test problem; several give pass@k")
    add("--save_updates", type=int, default=100, help="checkpoint every so many updates, and last")
    add("--keep_checkpoints", type=int, default=3, help="the newest so many are kept, and the most accurate one")
    add("--resume", action="store_true", help="continue the run in output_dir; give the run's own flags again")
    add("--output_dir", type=Path, default=Path("output/sft"), help="logs, transcripts, checkpoints; must hold no run")
    add = parser.add_argument_group("runtime").add_argument
    add("--max_concurrent_sequences", type=int, default=512, help="sampled at a time when evaluating")
    add("--sampling_dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="auto: bfloat16 on CUDA")
    add("--seed", type=int, default=0, help="of the examples and their order")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1 ...")
    args = parser.parse_args(argv)
    args.eval_only = False
    return args


def setup(args):
    """Model, data and examples, from the flags. Raises ValueError or OSError for what a user got wrong."""
    distributed.init(args.device)
    flags.check_numbers(args)
    flags.check_names(args)
    runs.check_output_dir(args)
    seed_everything(args.seed)
    model, tokenizer = llms.get_llm_tokenizer(
        args.model_name, args.device, gradient_checkpointing=args.gradient_checkpointing
    )
    shared = {
        name: getattr(args, name) for name in ("prompt", "dataset_path", "max_prompt_length", "seed", "eval_size")
    }
    train_loader, test_loader = get_dataloaders(args.dataset_name, tokenizer, **shared)
    flags.check_lengths(args, model, train_loader, test_loader)
    prompt = train_loader.prompt
    evaluator = get_evaluator(args.evaluator or train_loader.default_evaluator, prompt=prompt.name)
    examples = select_examples(read_gold(args.train_file, prompt.name), args, prompt, tokenizer, evaluator)
    sampler = llms.get_sampler(model, args.sampling_dtype)
    run = SimpleNamespace(
        model=llms.shard(model),
        sampler=sampler,
        tokenizer=tokenizer,
        train_loader=train_loader,
        test_loader=test_loader,
        evaluator=evaluator,
        examples=examples,
        optimizer=get_optimizer(model, args.weight_decay),
        interrupts=runs.Interrupts(),
        step=0,
        evaluated_step=None,
        accuracy=None,
        total_tokens=0,
        boundary={"total_tokens": 0},
        num_updates=args.num_updates or max(1, math.ceil(args.epochs * len(examples) / args.train_batch_size)),
        start=time.perf_counter(),
    )
    return run


def fine_tune(args, run):
    """Train on run.examples with evaluations and checkpoints, from run.step on."""

    def finish(row):
        """After each update: count, evaluate and save when due, and stop here if a signal has asked for it."""
        run.step, run.total_tokens = row["step"], row["tokens"]
        run.boundary = {"total_tokens": run.total_tokens}
        llms.refresh_sampler(run.sampler, run.model)
        run.interrupts.release()
        last = run.step == run.num_updates
        if last or run.step % args.eval_updates == 0:
            runs.save_evaluation(args, run, *grpo.evaluate(args, run))
        if last or run.step % args.save_updates == 0:
            runs.save_checkpoint(args, run)
        run.interrupts.hold()  # an update is short: a signal waits for its end

    if run.evaluated_step != run.step and (run.step % args.eval_updates == 0 or run.step == run.num_updates):
        runs.save_evaluation(args, run, *grpo.evaluate(args, run))
    run.interrupts.hold()
    train(
        run.model,
        run.tokenizer,
        run.examples,
        num_updates=run.num_updates,
        train_batch_size=args.train_batch_size,
        micro_batch_tokens=args.micro_batch_tokens,
        learning_rate=args.learning_rate,
        warmup_steps=min(args.warmup_steps, run.num_updates),
        max_grad_norm=args.max_grad_norm,
        length_normalization=args.length_normalization,
        normalization_constant=args.max_completion_length,
        log_entropy=args.log_entropy,
        seed=args.seed,
        optimizer=run.optimizer,
        start=run.step,
        tokens=run.total_tokens,
        start_time=run.start,
        output_dir=args.output_dir,
        after_update=finish,
    )


def main(argv=None):
    args = parse_args(argv)
    return runs.run_to_the_end(args, setup, fine_tune)


if __name__ == "__main__":
    sys.exit(main())
