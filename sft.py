"""Supervised fine-tuning: the baseline that reinforcement learning has to beat, and what trained the models in tiny/.

    python generate_gold.py --from_reference --dataset_name arithmetic --output gold.jsonl
    python sft.py --model_name tiny/1m --dataset_name arithmetic --train_file gold.jsonl --num_examples 250

Only the completion is learnt: the prompt's tokens are context, and the EOS that ends the completion is trained with it.

Shapes: B sequences, P prompt tokens, C completion tokens, T = P + C.
"""

import argparse
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterator

import torch

import distributed
import flags
import llms
import main as grpo
import utils
from logs import jsonl
from rl_datasets import DATASETS
from sampling.rollout import as_rollout
from training import write_logs
from training.run import Run, run_to_the_end, save_checkpoint

Sequences = list[tuple[list[int], list[int]]]  # (prompt ids, completion ids) of each example


def fine_tune(
    model,
    tokenizer,
    examples: list[dict],
    *,
    num_updates: int,
    train_batch_size: int = 64,
    micro_batch_tokens: int = 8192,
    learning_rate: float = 1e-5,
    final_learning_rate: float = 0.0,
    warmup_steps: int = 10,
    max_grad_norm: float = 1.0,
    length_normalization: str = "masked_mean",
    normalization_constant: float | None = None,
    log_entropy: bool = False,
    seed: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
    start: int = 0,
    tokens: int = 0,
    start_time: float | None = None,
    after_update: Callable[[dict], None] | None = None,
) -> list[dict]:
    """Train the model in place on the completions of the examples, with AdamW; settings are the flags of their names.

    Args:
        examples: dicts with "prompt" (rendered) and "completion" (without EOS), both text. They are visited in an order
            drawn anew each epoch from the seed; a batch may span two epochs.
        learning_rate, final_learning_rate, warmup_steps: linear warm-up to the first, then a cosine to the second.
        optimizer, start, tokens, start_time: to continue after `start` updates: AdamW with its state, the tokens seen,
            and the time (perf_counter) from which `elapsed` counts.
        after_update: called with the row of the log after each update: the place to write, evaluate and save.

    Returns:
        The rows of the log, one per update: keys of docs/metrics.md, and the examples so far.
    """
    if not examples:
        raise ValueError("there are no examples to train on")
    sequences = encode(tokenizer, examples)
    order = itertools.islice(example_order(len(sequences), seed), start * train_batch_size, None)
    optimizer = optimizer or get_optimizer(model)
    stages, start_time, log = write_logs.Stages(model.device), start_time or time.perf_counter(), []
    model.train()
    optimizer.zero_grad()  # whatever the caller has left there
    steps = range(start + 1, num_updates + 1)
    progress = write_logs.bar(steps, initial=start, total=num_updates, desc="SFT", unit="update")
    for step in progress:
        batch = [sequences[i] for i in itertools.islice(order, train_batch_size)]
        with stages("loss"):
            metrics = accumulate_sft_gradient(
                model,
                batch,
                tokenizer.pad_token_id,
                micro_batch_tokens=micro_batch_tokens,
                log_entropy=log_entropy,
                length_normalization=length_normalization,
                normalization_constant=normalization_constant,
            )
        with stages("step"):
            rate = learning_rate_at(
                step, num_updates, warmup_steps, learning_rate, final_learning_rate
            )
            for group in optimizer.param_groups:
                group["lr"] = rate
            metrics |= grpo.clip_and_step(model, optimizer, max_grad_norm, metrics["loss"])
        tokens += sum(len(prompt) + len(completion) for prompt, completion in batch)
        row = {"step": step, **metrics, "learning_rate": rate, "examples": step * train_batch_size}
        row |= {
            "total_tokens": tokens,
            **stages.flush(),
            "elapsed": time.perf_counter() - start_time,
        }
        log.append(row)
        progress.set_postfix(loss=f"{metrics['loss']:.3f}")
        if after_update:
            after_update(row)
    return log


def get_optimizer(model, weight_decay: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=weight_decay
    )


def accumulate_sft_gradient(
    model,
    batch: Sequences,
    pad_token_id: int,
    *,
    micro_batch_tokens: int,
    length_normalization: str = "masked_mean",
    normalization_constant: float | None = None,
    log_entropy: bool = False,
) -> dict[str, float]:
    """Add the gradient of one update's loss (CS336 A5, section 4.2) to the parameters, micro-batch by micro-batch.

    Args:
        batch: from encode: the whole update, of which each process takes some.

    Returns:
        {"loss": of the whole update, "entropy": mean over its completion tokens, if asked for}
    """
    rollout, mine = (
        as_rollout(batch, pad_token_id, model.device),
        distributed.share(range(len(batch))),
    )
    num_tokens = int(rollout.lengths.sum())
    metrics = {"loss": 0.0} | ({"entropy": 0.0} if log_entropy else {})
    for _, piece, counts in rollout.micro_batches(
        mine, 1, micro_batch_tokens, distributed.is_sharded(model)
    ):
        ids, C = piece.prompt_completion_ids, piece.completion_ids.shape[1]
        with utils.autocast(model.device):
            logps = utils.get_per_token_logps(
                model, ids, piece.attention_mask, C, return_entropy=log_entropy
            )
        logps, entropies = logps if log_entropy else (logps, None)
        completion_mask = (
            piece.completion_mask if counts else torch.zeros_like(piece.completion_mask)
        )
        # Negative log-likelihood: a share of the whole update's mean, so that shares simply add whatever the split.
        loss = utils.aggregate_tokens(
            -logps,
            completion_mask,
            length_normalization,
            normalization_constant,
            len(batch),
            num_tokens,
        )
        loss.backward()
        metrics["loss"] += loss.item()
        if log_entropy:
            metrics["entropy"] += (utils.masked_sum(entropies, completion_mask) / num_tokens).item()
    return write_logs.merge_metrics(distributed.gather([metrics]), sum)


def learning_rate_at(
    step: int, num_updates: int, warmup_steps: int, peak: float, final: float
) -> float:
    """The rate of update `step` (1 to num_updates): linear to the peak at warmup_steps, then a cosine towards final."""
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = (step - warmup_steps) / (
        num_updates - warmup_steps + 1
    )  # below 1: no update is spent at rate final
    return final + (peak - final) * (1 + math.cos(math.pi * progress)) / 2


def encode(tokenizer, examples: list[dict]) -> Sequences:
    """(prompt ids, completion ids) of each example, tokenized apart, as in sampling, so that no token spans the border.

    The EOS is appended as an id: as text it would depend on how the tokenizer reads it.
    """
    prompts = tokenizer([example["prompt"] for example in examples], add_special_tokens=False)[
        "input_ids"
    ]
    completions = tokenizer(
        [example["completion"] for example in examples], add_special_tokens=False
    )["input_ids"]
    return [(p, c + [tokenizer.eos_token_id]) for p, c in zip(prompts, completions, strict=True)]


def example_order(n: int, seed: int) -> Iterator[int]:
    """Endless row numbers: every epoch is its own permutation of range(n)."""
    for epoch in itertools.count():
        order = list(range(n))
        random.Random(f"sft/{seed}/{epoch}").shuffle(order)
        yield from order


def read_gold(path: str, prompt_name: str) -> list[dict]:
    """Rows of generate_gold.py's file: question, completion, answer. Raises ValueError, with the line of a bad one."""
    try:
        rows = jsonl.read(path)
    except OSError as error:
        raise ValueError(f"--train_file {path}: cannot be read ({error})") from error
    for number, row in enumerate(rows, 1):
        for column in ("question", "completion", "answer"):
            if not isinstance(row.get(column), str):
                raise ValueError(
                    f"{path}, row {number}: needs a text column {column!r}, as generate_gold.py writes it"
                )
        form = row.get("prompt_name", prompt_name)
        if form != prompt_name:
            raise ValueError(
                f"{path}, row {number}: its completion is in the form {form}, not {prompt_name}: --prompt"
            )
    if not rows:
        raise ValueError(f"--train_file {path} is empty")
    return rows


def select_examples(rows: list[dict], args, prompt, tokenizer, evaluator) -> list[dict]:
    """The examples to train on: filtered, shuffled by the seed, cut to num_examples (so that subsets are nested)."""
    counts = {"read": len(rows)}
    if args.filter_correct:
        columns = ([row[key] for row in rows] for key in ("question", "completion", "answer"))
        verdicts = evaluator.compute_rewards(*columns).details
        rows = [
            row for row, verdict in zip(rows, verdicts, strict=True) if verdict["correct_strict"]
        ]
        counts["incorrect, left out"] = counts["read"] - len(rows)
    filled = [row for row in rows if row["completion"].strip()]
    counts["empty, left out"] = len(rows) - len(filled)
    examples = [row | {"prompt": prompt.render(tokenizer, row["question"])} for row in filled]
    lengths = [(len(p), len(c)) for p, c in encode(tokenizer, examples)] if examples else []
    limits = args.max_prompt_length, args.max_completion_length
    fitting = [
        e for e, (p, c) in zip(examples, lengths, strict=True) if p <= limits[0] and c <= limits[1]
    ]
    counts["too long, left out"] = len(examples) - len(fitting)
    random.Random(f"subset/{args.seed}").shuffle(fitting)
    chosen = fitting[: args.num_examples]
    counts["used"] = len(chosen)
    print("examples: " + ", ".join(f"{count:,} {name}" for name, count in counts.items()))
    if not chosen:
        raise ValueError(f"--train_file {args.train_file}: no example is left to train on")
    if args.num_examples and len(chosen) < args.num_examples:
        raise ValueError(
            f"--num_examples {args.num_examples}: only {len(chosen)} usable examples are there"
        )
    return chosen


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = flags.ArgumentParser(
        description="Fine-tune a model on worked solutions, and evaluate it as main.py does."
    )
    add = flags.add_model_and_data(parser)
    add(
        "--train_file", help="the .jsonl that generate_gold.py writes: question, completion, answer"
    )
    add(
        "--num_examples",
        type=int,
        help="so many, drawn by the seed; smaller sets are inside larger (default: all)",
    )
    add(
        "--filter_correct",
        action="store_true",
        help="leave out examples that the evaluator finds not right (strict)",
    )
    flags.add_sampling(parser)
    add = flags.add_optimisation(parser)
    add("--epochs", type=float, default=1.0, help="passes over the examples")
    add("--num_updates", type=int, help="optimiser steps, instead of --epochs")
    add("--train_batch_size", type=int, default=32, help="examples per optimiser step")
    add("--learning_rate", type=float, default=1e-5, help="peak, followed by a cosine to 0")
    flags.add_length_normalization(add)
    add(
        "--log_entropy",
        action="store_true",
        help="log the entropy at the completions' tokens: a little slower",
    )
    flags.add_evaluation_and_output(parser, "output/sft", "updates")
    flags.add_runtime(parser)
    args = flags.parse(parser, argv)
    if args.train_file is None:
        parser.error("the following arguments are required: --train_file")
    return args


def setup(args: argparse.Namespace) -> Run:
    """Model, data and examples, from the flags. Raises ValueError or OSError for what a user got wrong."""
    flags.check(args)
    rows = read_gold(args.train_file, args.prompt or DATASETS[args.dataset_name].default_prompt)
    run = grpo.load(args)
    run.examples = select_examples(
        rows, args, run.train_loader.prompt, run.tokenizer, run.evaluator
    )
    run.optimizer = get_optimizer(run.model, args.weight_decay)
    return run


def train(args: argparse.Namespace, run: Run) -> None:
    """Fine-tune on run.examples with evaluations and checkpoints, from run.step on."""
    num_updates = args.num_updates or max(
        1, math.ceil(args.epochs * len(run.examples) / args.train_batch_size)
    )

    def finish(row):
        """After each update: count, evaluate and save when due, and stop here if a signal has asked for it."""
        run.step, run.total_tokens = row["step"], row["total_tokens"]
        write_logs.append(args, "train_log.jsonl", row)
        run.mark()
        llms.refresh_sampler(run.sampler, run.model)
        run.interrupts.release()
        last = run.step == num_updates
        if last or run.step % args.eval_updates == 0:
            grpo.evaluate(args, run)
        if last or run.step % args.save_updates == 0:
            save_checkpoint(args, run)
        run.interrupts.hold()  # an update is short: a signal waits for its end

    llms.refresh_sampler(run.sampler, run.model)  # a resumed policy is not the one that was loaded
    if run.evaluated_step != run.step and (
        run.step % args.eval_updates == 0 or run.step == num_updates
    ):
        grpo.evaluate(args, run)
    run.interrupts.hold()
    fine_tune(
        run.model,
        run.tokenizer,
        run.examples,
        num_updates=num_updates,
        train_batch_size=args.train_batch_size,
        micro_batch_tokens=args.micro_batch_tokens,
        learning_rate=args.learning_rate,
        warmup_steps=min(args.warmup_steps, num_updates),
        max_grad_norm=args.max_grad_norm,
        length_normalization=args.length_normalization,
        normalization_constant=args.max_completion_length,
        log_entropy=args.log_entropy,
        seed=args.seed,
        optimizer=run.optimizer,
        start=run.step,
        tokens=run.total_tokens,
        start_time=run.start,
        after_update=finish,
    )


def main(argv: list[str] | None = None) -> int:
    return run_to_the_end(parse_args(argv), setup, train)


if __name__ == "__main__":
    sys.exit(main())
