"""Supervised fine-tuning: the baseline of reinforcement learning.

    python generate_gold.py --from_reference --dataset_name arithmetic --output gold.jsonl
    python sft.py --model_name tiny/1m --dataset_name arithmetic --train_file gold.jsonl

It is the same update as GRPO's, with other data and another weight. GRPO trains on completions that
the model has sampled, each weighted by its advantage. Here the completions are given solutions, and
each has the weight 1: the loss of a token is -log p. Nobody sampled them, so there is no ratio, and
there is no reference to stay close to (beta is 0). Only the completion is learnt, the EOS that ends
it included: the prompt's tokens are context.

Shapes: B sequences, P prompt tokens, C completion tokens, T = P + C.
"""

import itertools
import math
import random
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from config import FineTuningConfig, LossConfig, SFTConfig, parse

if __name__ == "__main__":
    parse(SFTConfig)  # --help and mistakes are answered before the seconds that imports take

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import distributed
import llms
from evaluator import RewardEvaluator
from logs import jsonl
from main import accumulate_gradient, get_optimizer, take_step
from rl_datasets import (
    DATASETS,
    Prompt,
    can_be_encoded,
    check_special_tokens,
    render_prompts,
)
from sampling.rollout import Rollout, as_rollout
from training import completions, write_logs
from training.checks import check, check_lengths
from training.loop import iterations
from training.run import Run, run_to_the_end
from training.schedule import learning_rate_factor
from training.setup import load
from training.timer import StageTimer

# (prompt ids, completion ids) of each example
Sequences = list[tuple[list[int], list[int]]]


# What main.compute_loss makes of it.
SFT_LOSS = LossConfig(loss_type="reinforce_with_baseline", beta=0.0, group_size=1)


def fine_tune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: list[dict],
    config: FineTuningConfig,
    *,
    num_updates: int,
    first_update: int = 0,
    loss: LossConfig = SFT_LOSS,
    final_factor: float = 0.0,
    seed: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
) -> Iterator[dict]:
    """Train the model in place on the completions of the examples, an update at each step.

    The examples come in an order that is drawn anew for each epoch from the seed. A batch may span
    two epochs.

    Args:
        examples: dicts with "prompt" (rendered) and "completion" (without EOS), both text.
        num_updates: how many updates there are in all, those before first_update included.
        first_update: how many updates have been made before.
        loss: SFT_LOSS, maybe with another mean over tokens.
        final_factor: where the cosine of the learning rate ends, as a share of its peak.
        seed: by which the examples are shuffled.
        optimizer: an AdamW that continues with its state; None: a new one.

    Yields:
        for each update its metrics (docs/metrics.md), its number from 1 on as `step`, and its
        `tokens`, those of prompts included.

    Raises:
        ValueError: if there are no examples.
    """
    if not examples:
        raise ValueError("there are no examples to train on")
    sequences = encode(tokenizer, examples)
    order = example_order(len(sequences), seed)
    order = itertools.islice(order, first_update * config.train_batch_size, None)
    optimizer = optimizer or get_optimizer(model, config)
    timer = StageTimer(model.device)
    model.train()
    optimizer.zero_grad()  # the caller may have left gradients there
    for update in range(first_update, num_updates):
        batch = [sequences[i] for i in itertools.islice(order, config.train_batch_size)]
        my_rows = distributed.share(range(len(batch)))
        rollout = rollout_of_solutions(batch, tokenizer.pad_token_id, model.device)
        with timer("loss"):
            metrics = accumulate_gradient(
                model, None, rollout, my_rows, loss, config.micro_batch_tokens
            )
        with timer("update"):
            factor = learning_rate_factor(
                update, num_updates, config.warmup_steps, final_factor=final_factor
            )
            learning_rate = config.learning_rate * factor
            step_metrics = take_step(model, optimizer, config, learning_rate, metrics["loss"])
        yield {
            "step": update + 1,
            "loss": metrics["loss"],
            "entropy": metrics["entropy"],
            **step_metrics,
            "examples": (update + 1) * config.train_batch_size,
            "tokens": sum(len(prompt) + len(completion) for prompt, completion in batch),
            **timer.flush(),
        }


def rollout_of_solutions(batch: Sequences, pad_token_id: int, device: torch.device) -> Rollout:
    """The solutions as if they had been sampled and had all got the advantage 1."""
    rollout = as_rollout(batch, pad_token_id, device)
    return replace(
        rollout,
        advantages=torch.ones(len(batch), device=device),
        has_reward=torch.ones(len(batch), dtype=torch.bool, device=device),
        loss_mask=rollout.completion_mask,
    )


def encode(tokenizer: PreTrainedTokenizerBase, examples: list[dict]) -> Sequences:
    """(prompt ids, completion ids) of each example.

    The completion's tokens are those that go on after the prompt's, as in sampling, so that no
    token spans the border. The EOS is appended as an id: as text, what becomes of it would depend
    on the tokenizer.
    """
    prompts = [example["prompt"] for example in examples]
    prompt_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    texts = [example["prompt"] + example["completion"] for example in examples]
    text_ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    sequences = []
    for example, prompt, ids in zip(examples, prompt_ids, text_ids, strict=True):
        if ids[: len(prompt)] == prompt:
            completion = ids[len(prompt) :]
        else:  # a token spans the border
            completion = continuation_ids(tokenizer, example["completion"])
        sequences.append((prompt, completion + [tokenizer.eos_token_id]))
    return sequences


def continuation_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text that goes on after another one.

    Alone, it would get the space that Llama's tokenizer and others put before every text.
    """
    for context in ("\n", "a"):  # a token may span the border after either of them
        context_ids = tokenizer(context, add_special_tokens=False)["input_ids"]
        ids = tokenizer(context + text, add_special_tokens=False)["input_ids"]
        if ids[: len(context_ids)] == context_ids:
            return ids[len(context_ids) :]
    return tokenizer(text, add_special_tokens=False)["input_ids"]


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
            text = row.get(column)
            if not isinstance(text, str) or not can_be_encoded(text):
                raise ValueError(
                    f"{path}, row {number}: needs a text column {column!r}, as generate_gold.py"
                    f" writes it, not {text!r}"
                )
        if not isinstance(row.get("correct", True), bool):
            raise ValueError(f"{path}, row {number}: its column 'correct' must be true or false")
        row["file_and_row"] = f"{path}, row {number}"
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
    config: SFTConfig,
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    evaluator: RewardEvaluator,
) -> list[dict]:
    """The examples to train on: filtered, shuffled by the seed, and cut to config.num_examples.

    Rows that are marked as not correct are left out. With the same seed, --num_examples 100 is a
    subset of --num_examples 200. Prints how many rows each filter leaves out. Raises ValueError
    where too few are left.
    """
    num_rows = len(rows)
    counts = {"read": num_rows}
    rows = [
        row | {"completion": without_eos(row["completion"], tokenizer.eos_token)} for row in rows
    ]
    rows = [row for row in rows if row.get("correct", True)]
    if config.filter_correct:
        evaluator.check_gold(rows)
        rewards = completions.reward(evaluator, rows, [row["completion"] for row in rows])
        is_correct = completions.strict_verdicts(rewards)
        rows = [row for row, row_is_correct in zip(rows, is_correct, strict=True) if row_is_correct]
    counts["incorrect, left out"] = num_rows - len(rows)

    filled_rows = [row for row in rows if row["completion"].strip()]
    counts["empty, left out"] = len(rows) - len(filled_rows)

    check_special_tokens(tokenizer, filled_rows, "completion")
    prompts = render_prompts(prompt, tokenizer, filled_rows)
    examples = [
        row | {"prompt": prompt_text} for row, prompt_text in zip(filled_rows, prompts, strict=True)
    ]
    short_examples = select_short(examples, config, tokenizer)
    counts["too long, left out"] = len(examples) - len(short_examples)

    random.Random(f"subset/{config.seed}").shuffle(short_examples)
    chosen_examples = short_examples[: config.num_examples]
    counts["used"] = len(chosen_examples)
    print("examples: " + ", ".join(f"{count:,} {name}" for name, count in counts.items()))
    if not chosen_examples:
        raise ValueError(f"--train_file {config.train_file}: no example is left to train on")
    if config.num_examples and len(chosen_examples) < config.num_examples:
        raise ValueError(
            f"--num_examples {config.num_examples}: the file has only {len(chosen_examples)} usable"
            " examples"
        )
    return chosen_examples


def without_eos(completion: str, eos_token: str) -> str:
    """The completion up to an EOS at its end, which `encode` appends."""
    return re.sub(rf"({re.escape(eos_token)}\s*)+\Z", "", completion)


def select_short(
    examples: list[dict], config: SFTConfig, tokenizer: PreTrainedTokenizerBase
) -> list[dict]:
    """The examples whose prompt and completion are no longer than the flags allow."""
    if not examples:
        return []
    short_examples = []
    for example, (prompt, completion) in zip(examples, encode(tokenizer, examples), strict=True):
        is_short_prompt = len(prompt) <= config.max_prompt_length
        if is_short_prompt and len(completion) <= config.max_completion_length:
            short_examples.append(example)
    return short_examples


# --- The script -----------------------------------------------------------------------------------


def setup(config: SFTConfig) -> Run:
    """Model, data and examples, from the flags.

    Raises ValueError or OSError for a wrong flag, or for a file that is wrong or missing.
    """
    check(config)
    rows = read_gold(
        config.train_file, config.prompt or DATASETS[config.dataset_name].default_prompt
    )
    run = load(config)
    examples = select_examples(rows, config, run.train_loader.prompt, run.tokenizer, run.evaluator)
    prompts = [example["prompt"] for example in examples]
    prompt_ids = run.tokenizer(prompts, add_special_tokens=False)["input_ids"]
    check_lengths(run.model, max(map(len, prompt_ids)), config.max_completion_length)
    run.train_loader.examples = examples
    run.optimizer = get_optimizer(run.model, config)
    run.num_iterations = config.num_updates
    if run.num_iterations is None:
        num_batches = math.ceil(config.epochs * len(examples) / config.train_batch_size)
        run.num_iterations = max(1, num_batches)
    return run


def train(config: SFTConfig, run: Run) -> None:
    """Fine-tune on the solutions; an iteration is an update."""
    loss = replace(
        SFT_LOSS,
        length_normalization=config.length_normalization,
        max_completion_length=config.max_completion_length,
    )
    updates = fine_tune(
        run.model,
        run.tokenizer,
        run.train_loader.examples,
        replace(config, warmup_steps=min(config.warmup_steps, run.num_iterations)),
        num_updates=run.num_iterations,
        first_update=run.iteration,
        loss=loss,
        seed=config.seed,
        optimizer=run.optimizer,
    )
    numbers = iterations(config, run, config.eval_updates, config.save_updates)
    for _, row in zip(numbers, updates, strict=True):
        run.finish_iteration(row.pop("tokens"))
        row["total_tokens"] = run.total_tokens
        row["elapsed"] = time.perf_counter() - run.start
        write_logs.append(config, "train_log.jsonl", row)
        columns = [f"loss {row['loss']:.4f}", f"gradient norm {row['grad_norm']:.3f}"]
        write_logs.print_step(run, columns, row["time/total"])
        llms.refresh_sampler(run.sampler, run.model)


def main(argv: list[str] | None = None) -> int:
    return run_to_the_end(parse(SFTConfig, argv), setup, train)


if __name__ == "__main__":
    sys.exit(main())
