"""Supervised fine-tuning: the baseline of reinforcement learning.

    python generate_gold.py --from_reference --dataset_name arithmetic --output gold.jsonl
    python sft.py --model_name tiny/1m --dataset_name arithmetic --train_file gold.jsonl

It is the same update as GRPO's, with other data and another weight. GRPO trains on completions that
the model has sampled, each weighted by its advantage. Here the completions are given solutions, and
each has the weight 1: the loss of a token is -log p. Nobody sampled them, so there is no ratio, and
there is no reference to stay close to (beta is 0). Only the completion is learnt, the EOS that ends
it included: the prompt's tokens are context.
"""

import itertools
import math
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import replace

from config import FineTuningConfig, LossConfig, SFTConfig, parse

if __name__ == "__main__":
    parse(SFTConfig)  # --help and mistakes are answered before the seconds that imports take

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import llms
from grpo import distributed, jsonl, weights
from grpo.rollout import Completion
from grpo.run import Run, run_to_the_end
from main import accumulate_gradient, get_optimizer, take_step

# What main.compute_loss makes of it.
SFT_LOSS = LossConfig(loss_type="reinforce_with_baseline", beta=0.0, group_size=1)


def train(config: SFTConfig, run: Run) -> None:
    """Fine-tune on the solutions; an iteration is an update."""
    loss = replace(
        SFT_LOSS,
        length_normalization=config.length_normalization,
        max_completion_length=config.max_completion_length,
    )
    updates = fine_tune(
        run.model,
        run.solutions,
        config,
        num_updates=run.num_iterations,
        first_update=run.iteration,
        loss=loss,
        seed=config.seed,
        optimizer=run.optimizer,
    )
    for _ in run.iterations(config.eval_updates, config.save_updates):
        with run.timer("loss_and_update"):
            row = next(updates)
        weights.refresh_sampler(run.sampler, run.model)
        run.log_update(row, row.pop("tokens"))


def fine_tune(
    model: PreTrainedModel,
    solutions: list[Completion],
    config: FineTuningConfig,
    *,
    num_updates: int,
    first_update: int = 0,
    loss: LossConfig = SFT_LOSS,
    final_factor: float = 0.0,
    seed: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
) -> Iterator[dict]:
    """Train the model in place on completions of advantage 1, an update at each step.

    They come in an order that is drawn anew for each epoch from the seed. A batch may span two
    epochs.

    Args:
        num_updates: how many updates there are in all, those before first_update included.
        first_update: how many updates have been made before.
        loss: SFT_LOSS, maybe with another mean over tokens.
        final_factor: where the cosine of the learning rate ends, as a share of its peak.
        seed: by which the solutions are shuffled.
        optimizer: an AdamW that continues with its state; None: a new one.

    Yields:
        for each update its metrics (docs/metrics.md), and its `tokens`, those of prompts included.
    """
    order = example_order(len(solutions), seed)
    order = itertools.islice(order, first_update * config.train_batch_size, None)
    optimizer = optimizer or get_optimizer(model)
    model.train()
    optimizer.zero_grad()  # the caller may have left gradients there
    for update in range(first_update, num_updates):
        batch = [solutions[i] for i in itertools.islice(order, config.train_batch_size)]
        metrics = accumulate_gradient(
            model, None, distributed.share(batch), loss, config.micro_batch_tokens
        )
        factor = learning_rate_factor(update, num_updates, config.warmup_steps, final_factor)
        learning_rate = config.learning_rate * factor
        step_metrics = take_step(model, optimizer, learning_rate, metrics["loss"])
        yield {
            "loss": metrics["loss"],
            "entropy": metrics["entropy"],
            **step_metrics,
            "examples": (update + 1) * config.train_batch_size,
            "tokens": sum(len(row.prompt_ids) + len(row.ids) for row in batch),
        }


def example_order(num_examples: int, seed: int) -> Iterator[int]:
    """Endless row numbers: every epoch is a permutation of its own."""
    for epoch in itertools.count():
        order = list(range(num_examples))
        random.Random(f"sft/{seed}/{epoch}").shuffle(order)
        yield from order


def learning_rate_factor(
    update: int, num_updates: int, warmup_steps: int, final_factor: float = 0.0
) -> float:
    """The factor in [0, 1] by which the peak learning rate is multiplied in update 0, 1, 2 ...

    It rises in a straight line during the warm-up, and then falls along half a period of a cosine,
    which would reach final_factor just after the last update.
    """
    warmup_steps = max(1, min(warmup_steps, num_updates))
    if update < warmup_steps:
        return (update + 1) / warmup_steps
    remaining = (num_updates - update) / (num_updates + 1 - warmup_steps)
    cosine = (1 - math.cos(math.pi * remaining)) / 2
    return final_factor + (1 - final_factor) * cosine


# --- What is trained on ---------------------------------------------------------------------------


def read_solutions(config: SFTConfig, run: Run) -> list[Completion]:
    """The solutions of --train_file: correct, short, shuffled by the seed, and cut to a number.

    With the same seed, --num_examples 100 is a subset of --num_examples 200. Raises ValueError or
    OSError for a file that cannot be used, and where too few solutions are left.
    """
    prompt = run.train_loader.prompt
    rows = jsonl.read(config.train_file, required=("question", "completion", "answer"))
    for row in rows:
        if row.get("prompt_name", prompt.name) != prompt.name:
            raise ValueError(
                f"--train_file {config.train_file} answers the prompt {row['prompt_name']}, not"
                f" {prompt.name}; use --prompt {row['prompt_name']}"
            )
    num_rows = len(rows)
    eval_ids = {example["id"] for example in run.eval_loader}  # held out of the training split
    rows = [row for row in rows if row.get("id") not in eval_ids]
    rows = [row for row in rows if row.get("correct", True) and row["completion"].strip()]
    prompts = [prompt.render(run.tokenizer, row["question"]) for row in rows]
    solutions = [
        encode(run.tokenizer, text, row["completion"], row)
        for text, row in zip(prompts, rows, strict=True)
    ]
    if config.filter_correct:
        run.reward(solutions)
        solutions = [solution for solution in solutions if solution.details["correct_strict"]]
    short = [
        solution
        for solution in solutions
        if len(solution.prompt_ids) <= config.max_prompt_length
        and len(solution.ids) <= config.max_completion_length
    ]
    random.Random(f"subset/{config.seed}").shuffle(short)
    chosen = short[: config.num_examples]
    print(
        f"{config.train_file}: {num_rows:,} rows, {len(solutions):,} of them correct,"
        f" {len(short):,} of these short enough, {len(chosen):,} used"
    )
    if len(chosen) < (config.num_examples or 1):
        raise ValueError(f"--train_file {config.train_file}: only {len(chosen)} usable examples")
    return chosen


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, text: str, example: dict) -> Completion:
    """A solution as a completion of advantage 1.

    Its tokens are those that go on after the prompt's, as in sampling. The EOS is appended as an
    id: as text, what becomes of it would depend on the tokenizer.
    """
    text = re.sub(rf"({re.escape(tokenizer.eos_token)}\s*)+\Z", "", text)
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ids = tokenizer(prompt + text, add_special_tokens=False)["input_ids"]
    if ids[: len(prompt_ids)] == prompt_ids:
        ids = ids[len(prompt_ids) :]
    else:  # a token spans the border
        ids = continuation_ids(tokenizer, text)
    ids = [*ids, tokenizer.eos_token_id]
    return Completion(
        prompt_ids=prompt_ids,
        ids=ids,
        sampled_logps=[0.0] * len(ids),  # nobody sampled it
        finished=True,
        text=text,
        example=example,
        advantage=1.0,
    )


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


# --- The script -----------------------------------------------------------------------------------


def setup(config: SFTConfig) -> Run:
    """What fine-tuning works with. Raises ValueError or OSError for what the user gave wrong."""
    run = Run.load(config)
    run.solutions = read_solutions(config, run)
    longest_prompt = max(len(solution.prompt_ids) for solution in run.solutions)
    llms.check_positions(run.model, longest_prompt, config.max_completion_length)
    run.optimizer = get_optimizer(run.model)
    num_batches = math.ceil(config.epochs * len(run.solutions) / config.train_batch_size)
    run.num_iterations = config.num_updates or max(1, num_batches)
    return run


def main(argv: list[str] | None = None) -> int:
    return run_to_the_end(parse(SFTConfig, argv), setup, train)


if __name__ == "__main__":
    sys.exit(main())
