"""Supervised fine-tuning: the baseline of reinforcement learning.

    python generate_gold.py --from_reference --dataset_name arithmetic --output gold.jsonl
    python sft.py --model_name tiny/1m --dataset_name arithmetic --train_file gold.jsonl

Only the completion is learnt: the prompt's tokens are context. The EOS that ends the completion is
trained with it.

Shapes: B sequences, P prompt tokens, C completion tokens, T = P + C.
"""

import argparse
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import distributed
import flags
import llms
import utils
from evaluator import RewardEvaluator
from logs import jsonl
from rl_datasets import DATASETS, Prompt
from sampling.rollout import as_rollout
from training import memory, steps, write_logs
from training.metrics import Share, StageTimer, TokenShare, add_up
from training.run import Run, run_to_the_end, save_checkpoint

# (prompt ids, completion ids) of each example
Sequences = list[tuple[list[int], list[int]]]


@dataclass
class SFTConfig:
    """The settings of fine_tune: the flags of sft.py that have the same names, and a few more.

    fine_tune lowers micro_batch_tokens where memory does not suffice.
    """

    num_updates: int  # optimiser steps
    train_batch_size: int = 64  # examples of an update
    micro_batch_tokens: int = 8192  # tokens of a pass, padding included; it changes memory only
    learning_rate: float = 1e-5  # the peak, at the end of the warm-up; a cosine follows
    final_learning_rate: float = 0.0  # where the cosine ends
    warmup_steps: int = 10  # updates in which the learning rate rises to its peak
    max_grad_norm: float = 1.0  # gradients are scaled down to this norm
    length_normalization: str = "masked_mean"  # how tokens are averaged: utils.aggregate_tokens
    max_completion_length: int | None = None  # what masked_normalize divides by
    log_entropy: bool = False  # whether the entropy at the completions' tokens is logged
    seed: int = 0  # by which the examples are shuffled


def fine_tune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: list[dict],
    config: SFTConfig,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    start_step: int = 0,
    start_tokens: int = 0,
    start_time: float | None = None,
    after_update: Callable[[dict, int], None] | None = None,
) -> list[dict]:
    """Train the model in place on the completions of the examples, with AdamW.

    The examples come in an order that is drawn anew for each epoch from the seed. A batch may span
    two epochs.

    Args:
        examples: dicts with "prompt" (rendered) and "completion" (without EOS), both text.
        optimizer: an AdamW that continues with its state; None: a new one.
        start_step, start_tokens: how many updates have been made and how many tokens trained
        before.
        start_time: when the run began (time.perf_counter), for `elapsed`; None: now.
        after_update: called after each update with the row of the log and the number of tokens of
            the update. It can write, evaluate and save.

    Returns:
        The rows of the log, one for each update, with keys of docs/metrics.md.

    Raises:
        ValueError: if there are no examples.
    """
    if not examples:
        raise ValueError("there are no examples to train on")
    sequences = encode(tokenizer, examples)
    order = example_order(len(sequences), config.seed)
    num_seen = start_step * config.train_batch_size
    order = itertools.islice(order, num_seen, None)
    optimizer = optimizer or get_optimizer(model)
    timer = StageTimer(model.device)
    start_time = start_time or time.perf_counter()
    total_tokens = start_tokens
    log = []
    model.train()
    optimizer.zero_grad()  # the caller may have left gradients there
    bar = write_logs.progress_bar(
        range(start_step + 1, config.num_updates + 1),
        initial=start_step,
        total=config.num_updates,
        desc="SFT",
        unit="update",
    )
    for step in bar:
        batch = [sequences[i] for i in itertools.islice(order, config.train_batch_size)]
        with timer("loss"):
            metrics = gradient_that_fits(model, batch, tokenizer.pad_token_id, config)
        with timer("step"):
            learning_rate = learning_rate_at(step, config)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            metrics |= steps.clip_and_step(model, optimizer, config.max_grad_norm, metrics["loss"])
        num_tokens = sum(len(prompt) + len(completion) for prompt, completion in batch)
        total_tokens += num_tokens
        row = {"step": step} | metrics
        row["learning_rate"] = learning_rate
        row["examples"] = step * config.train_batch_size
        row["total_tokens"] = total_tokens
        row |= timer.flush()
        row["elapsed"] = time.perf_counter() - start_time
        log.append(row)
        bar.set_postfix(loss=f"{metrics['loss']:.3f}")
        if after_update:
            after_update(row, num_tokens)
    return log


def get_optimizer(model: PreTrainedModel, weight_decay: float = 0.0) -> torch.optim.Optimizer:
    """AdamW, whose learning rate fine_tune sets before each update."""
    is_cuda = model.device.type == "cuda"
    return torch.optim.AdamW(
        model.parameters(),
        lr=0.0,
        betas=(0.9, 0.95),
        weight_decay=weight_decay,
        fused=True if is_cuda else None,  # one kernel that reads and writes every number once
    )


def gradient_that_fits(
    model: PreTrainedModel, batch: Sequences, pad_token_id: int, config: SFTConfig
) -> dict[str, float]:
    """accumulate_sft_gradient, made again in smaller micro-batches out of memory."""
    prompt_lengths = [len(prompt) for prompt, _ in batch]
    completion_lengths = [len(completion) for _, completion in batch]
    return memory.halve_until_it_fits(
        partial(accumulate_sft_gradient, model, batch, pad_token_id, config),
        model=model,
        settings=config,
        flag="micro_batch_tokens",
        divide=partial(utils.split_into_micro_batches, prompt_lengths, completion_lengths, 1),
    )


def accumulate_sft_gradient(
    model: PreTrainedModel, batch: Sequences, pad_token_id: int, config: SFTConfig
) -> dict[str, float]:
    """Add the gradient of one update's loss to the parameters, micro-batch by micro-batch.

    The loss is the negative log-likelihood of the completions (CS336 A5, section 4.2).

    Args:
        batch: the whole update, of which each process takes its share.

    Returns:
        `loss` of the whole update, and `entropy`, the mean over its completion tokens, if
        config.log_entropy asks for it.
    """
    rollout = as_rollout(batch, pad_token_id, model.device)
    num_tokens = int(rollout.lengths.sum())
    my_rows = distributed.share(range(len(batch)))
    micro_batches = rollout.micro_batches(
        my_rows, 1, config.micro_batch_tokens, sharded=distributed.is_sharded(model)
    )
    shares = []
    for _, micro_batch, is_counted in micro_batches:
        completion_mask = micro_batch.completion_mask
        if not is_counted:  # this pass only keeps the process in step with the others
            completion_mask = torch.zeros_like(completion_mask)
        with utils.autocast(model.device):
            output = utils.get_per_token_logps(
                model,
                micro_batch.prompt_completion_ids,
                micro_batch.attention_mask,
                micro_batch.completion_ids.shape[1],
                return_entropy=config.log_entropy,
            )
        logps, entropies = output if config.log_entropy else (output, None)
        loss = utils.aggregate_tokens(
            -logps,
            completion_mask,
            config.length_normalization,
            config.max_completion_length,
            num_sequences=len(batch),
            num_tokens=num_tokens,
        )
        loss.backward()
        metrics = {"loss": Share(loss.item())}
        if config.log_entropy:
            entropy = utils.masked_sum(entropies, completion_mask) / num_tokens
            metrics["entropy"] = TokenShare(entropy.item())
        shares.append(metrics)
    my_metrics = add_up(shares)
    return add_up(distributed.gather([my_metrics]))


def learning_rate_at(step: int, config: SFTConfig) -> float:
    """The learning rate of update `step` (1 to num_updates).

    It rises linearly to its peak at warmup_steps, then falls as a cosine towards its final value.
    """
    peak = config.learning_rate
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    # The progress stays below 1, so that no update is spent at the final rate, which may be 0.
    progress = (step - config.warmup_steps) / (config.num_updates - config.warmup_steps + 1)
    final = config.final_learning_rate
    return final + (peak - final) * (1 + math.cos(math.pi * progress)) / 2


def encode(tokenizer: PreTrainedTokenizerBase, examples: list[dict]) -> Sequences:
    """(prompt ids, completion ids) of each example.

    They are tokenized apart, as in sampling, so that no token spans the border. The EOS is appended
    as an id: as text, what becomes of it would depend on the tokenizer.
    """
    prompts = [example["prompt"] for example in examples]
    completions = [example["completion"] for example in examples]
    prompt_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    completion_ids = tokenizer(completions, add_special_tokens=False)["input_ids"]
    return [
        (prompt, completion + [tokenizer.eos_token_id])
        for prompt, completion in zip(prompt_ids, completion_ids, strict=True)
    ]


def example_order(num_examples: int, seed: int) -> Iterator[int]:
    """Endless row numbers: every epoch is a permutation of its own."""
    for epoch in itertools.count():
        order = list(range(num_examples))
        random.Random(f"sft/{seed}/{epoch}").shuffle(order)
        yield from order


# --- What is trained on ---------------------------------------------------------------------------


def read_gold(path: str, prompt_name: str) -> list[dict]:
    """The rows of generate_gold.py's file. Raises ValueError, which names the row that is wrong."""
    try:
        rows = jsonl.read(path)
    except OSError as error:
        raise ValueError(f"--train_file {path}: cannot be read ({error})") from error
    for number, row in enumerate(rows, 1):
        for column in ("question", "completion", "answer"):
            if not isinstance(row.get(column), str):
                raise ValueError(
                    f"{path}, row {number}: needs a text column {column!r}, as generate_gold.py"
                    " writes it"
                )
        row_prompt_name = row.get("prompt_name", prompt_name)
        if row_prompt_name != prompt_name:
            raise ValueError(
                f"{path}, row {number}: its completion answers the prompt {row_prompt_name}, not"
                f" {prompt_name}; use --prompt {row_prompt_name}, or another file"
            )
    if not rows:
        raise ValueError(f"--train_file {path} is empty")
    return rows


def select_examples(
    rows: list[dict],
    args: argparse.Namespace,
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    evaluator: RewardEvaluator,
) -> list[dict]:
    """The examples to train on: filtered, shuffled by the seed, and cut to args.num_examples.

    With the same seed, --num_examples 100 is a subset of --num_examples 200. Prints how many
    rows each filter leaves out. Raises ValueError where too few are left.
    """
    counts = {"read": len(rows)}
    if args.filter_correct:
        num_rows = len(rows)
        rewards = steps.reward(evaluator, rows, [row["completion"] for row in rows])
        rows = [
            row
            for row, detail in zip(rows, rewards.details, strict=True)
            if detail["correct_strict"]
        ]
        counts["incorrect, left out"] = num_rows - len(rows)

    filled_rows = [row for row in rows if row["completion"].strip()]
    counts["empty, left out"] = len(rows) - len(filled_rows)

    examples = [row | {"prompt": prompt.render(tokenizer, row["question"])} for row in filled_rows]
    short_examples = select_short(examples, args, tokenizer)
    counts["too long, left out"] = len(examples) - len(short_examples)

    random.Random(f"subset/{args.seed}").shuffle(short_examples)
    chosen_examples = short_examples[: args.num_examples]
    counts["used"] = len(chosen_examples)
    print("examples: " + ", ".join(f"{count:,} {name}" for name, count in counts.items()))
    if not chosen_examples:
        raise ValueError(f"--train_file {args.train_file}: no example is left to train on")
    if args.num_examples and len(chosen_examples) < args.num_examples:
        raise ValueError(
            f"--num_examples {args.num_examples}: the file has only {len(chosen_examples)} usable"
            " examples"
        )
    return chosen_examples


def select_short(
    examples: list[dict], args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase
) -> list[dict]:
    """The examples whose prompt and completion are no longer than the flags allow."""
    if not examples:
        return []
    short_examples = []
    for example, (prompt, completion) in zip(examples, encode(tokenizer, examples), strict=True):
        is_short_prompt = len(prompt) <= args.max_prompt_length
        if is_short_prompt and len(completion) <= args.max_completion_length:
            short_examples.append(example)
    return short_examples


# --- The script -----------------------------------------------------------------------------------


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = flags.ArgumentParser(
        description="Fine-tune a model on worked solutions, and evaluate it as main.py does."
    )
    add = flags.add_model_and_data(parser)
    add(
        "--train_file",
        help="the .jsonl that generate_gold.py writes, with question, completion and answer",
    )
    add(
        "--num_examples",
        type=int,
        help="how many examples are trained on, drawn by the seed; a smaller set is inside a larger"
        " one (default: all)",
    )
    add(
        "--filter_correct",
        action="store_true",
        help="leave out examples that the evaluator does not find strictly correct",
    )
    flags.add_sampling(parser)
    add = flags.add_optimisation(parser)
    add("--epochs", type=float, default=1.0, help="passes over the examples")
    add("--num_updates", type=int, help="optimiser steps, instead of --epochs")
    add("--train_batch_size", type=int, default=32, help="examples per optimiser step")
    add(
        "--learning_rate",
        type=float,
        default=1e-5,
        help="its peak, at the end of the warm-up; it then falls to 0 as a cosine",
    )
    flags.add_length_normalization(add)
    add(
        "--log_entropy",
        action="store_true",
        help="log the entropy at the completions' tokens, in nats",
    )
    flags.add_evaluation_and_output(parser, "output/sft", "updates")
    flags.add_runtime(parser)
    args = flags.parse(parser, argv)
    if args.train_file is None:
        parser.error("the following arguments are required: --train_file")
    return args


def setup(args: argparse.Namespace) -> Run:
    """Model, data and examples, from the flags.

    Raises ValueError or OSError for a wrong flag, or for a file that is wrong or missing.
    """
    flags.check(args)
    rows = read_gold(args.train_file, args.prompt or DATASETS[args.dataset_name].default_prompt)
    run = steps.load(args)
    run.examples = select_examples(
        rows, args, run.train_loader.prompt, run.tokenizer, run.evaluator
    )
    run.optimizer = get_optimizer(run.model, args.weight_decay)
    return run


def train(args: argparse.Namespace, run: Run) -> None:
    """Fine-tune on run.examples with evaluations and checkpoints, from run.step on."""
    num_updates = args.num_updates
    if num_updates is None:
        num_updates = max(1, math.ceil(args.epochs * len(run.examples) / args.train_batch_size))

    def after_update(row: dict, num_tokens: int) -> None:
        """Write the log, then evaluate and save where that is due."""
        args.micro_batch_tokens = config.micro_batch_tokens  # memory may have been too small
        row |= memory.in_force(args)
        with run.finish_step(num_tokens):
            write_logs.append(args, "train_log.jsonl", row)
        llms.refresh_sampler(run.sampler, run.model)
        if steps.is_due(run.step, args.eval_updates, num_updates):
            steps.evaluate(args, run)
        if steps.is_due(run.step, args.save_updates, num_updates):
            save_checkpoint(args, run)

    # After --resume the sampler still holds the weights from before: copy the policy's again.
    llms.refresh_sampler(run.sampler, run.model)
    evaluation_is_due = steps.is_due(run.step, args.eval_updates, num_updates)
    if evaluation_is_due and run.evaluated_step != run.step:
        steps.evaluate(args, run)
    config = SFTConfig(
        num_updates=num_updates,
        train_batch_size=args.train_batch_size,
        micro_batch_tokens=args.micro_batch_tokens,
        learning_rate=args.learning_rate,
        warmup_steps=min(args.warmup_steps, num_updates),
        max_grad_norm=args.max_grad_norm,
        length_normalization=args.length_normalization,
        max_completion_length=args.max_completion_length,
        log_entropy=args.log_entropy,
        seed=args.seed,
    )
    fine_tune(
        run.model,
        run.tokenizer,
        run.examples,
        config,
        optimizer=run.optimizer,
        start_step=run.step,
        start_tokens=run.total_tokens,
        start_time=run.start,
        after_update=after_update,
    )


def main(argv: list[str] | None = None) -> int:
    return run_to_the_end(parse_args(argv), setup, train)


if __name__ == "__main__":
    sys.exit(main())
