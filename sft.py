"""Supervised fine-tuning: the baseline of reinforcement learning.

    python generate_gold.py --from_reference --dataset_name arithmetic --output gold.jsonl
    python sft.py --model_name tiny/1m --dataset_name arithmetic --train_file gold.jsonl

It is the same update as GRPO's. There, the model has sampled the completions, and each is weighted
by its advantage. Here they are given solutions of weight 1: the loss of a token is -log p. There is
no ratio, and no reference to stay close to. Only the completion is learnt, the EOS that ends it
included: the prompt's tokens are context.
"""

import itertools
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from config import FineTuningConfig, LossConfig, RunConfig, again, parse, setting


@dataclass(frozen=True)
class SFTConfig(FineTuningConfig):
    """Fine-tune a model on worked solutions, and evaluate it as main.py does."""

    train_file: str | None = setting(
        None, "Solutions, as generate_gold.py writes them (.jsonl).", title="data"
    )
    num_examples: int | None = setting(
        None,
        "Examples, drawn by --seed; a larger number includes those of a smaller one."
        " (default: all)",
    )
    filter_correct: bool = setting(
        False,
        "Grade the solutions, and leave out what is not strictly correct. Rows that say"
        ' "correct": false are left out without it.',
    )
    epochs: float = setting(
        1.0,
        "Passes over the examples; the next pass fills up the last batch.",
        title="iterations",
    )
    num_updates: int | None = setting(None, "Updates, in the place of --epochs.")
    eval_updates: int = setting(
        100, "Evaluate every N updates, before the first and after the last.", may_change=True
    )
    save_updates: int = setting(
        100, "Write a checkpoint every N updates and after the last.", may_change=True
    )
    length_normalization: str = again(LossConfig, "length_normalization")
    output_dir: Path = again(RunConfig, "output_dir", Path("output/sft"))

    def check(self) -> None:
        super().check()
        if self.train_file is None:
            raise ValueError("--train_file is missing: name a file of solutions to train on")


if __name__ == "__main__":
    parse(SFTConfig)  # --help and mistakes are answered before the seconds that imports take

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo import distributed, jsonl
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
        run.sampler.refresh(run.model)
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

    Args:
        num_updates: how many updates there are in all, those before first_update included.
        loss: SFT_LOSS, maybe with another mean over tokens.
        final_factor: where the cosine of the learning rate ends, as a share of its peak.
        seed: by which the solutions are shuffled, anew in each epoch.
        optimizer: an AdamW that continues with its state; None: a new one.

    Yields:
        for each update its metrics and its `tokens`, those of prompts included.
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
        row = {"loss": metrics["loss"], "entropy": metrics["entropy"]}
        row |= take_step(model, optimizer, learning_rate, metrics["loss"])
        row["examples"] = (update + 1) * config.train_batch_size
        row["tokens"] = sum(len(solution.prompt_ids + solution.ids) for solution in batch)
        yield row


def example_order(num_examples: int, seed: int) -> Iterator[int]:
    """Endless row numbers: every epoch is a permutation of its own."""
    for epoch in itertools.count():
        order = list(range(num_examples))
        random.Random(f"sft/{seed}/{epoch}").shuffle(order)
        yield from order


def learning_rate_factor(
    update: int, num_updates: int, warmup_steps: int, final_factor: float = 0.0
) -> float:
    """The factor of the peak learning rate in update 0, 1, 2 ...: it rises in a straight line.

    Then it falls along half a cosine, which would reach final_factor just after the last update.
    """
    warmup_steps = max(1, min(warmup_steps, num_updates))
    if update < warmup_steps:
        return (update + 1) / warmup_steps
    remaining = (num_updates - update) / (num_updates + 1 - warmup_steps)
    cosine = (1 - math.cos(math.pi * remaining)) / 2
    return final_factor + (1 - final_factor) * cosine


# --- What is trained on ---------------------------------------------------------------------------


def choose_solutions(rows: list[dict], config: SFTConfig, run: Run) -> list[Completion]:
    """The solutions that are correct and short, shuffled by the seed, and cut to a number.

    With the same seed, --num_examples 100 is a subset of --num_examples 200. Raises ValueError for
    solutions in another format than --prompt, and where too few are left.
    """
    prompt = run.train_loader.prompt
    solutions = []
    for row in rows:
        prompt_name = row.get("prompt_name", prompt.name)
        if prompt_name != prompt.name:
            raise ValueError(
                f"--train_file {config.train_file} answers --prompt {prompt_name}, and this run has"
                f" --prompt {prompt.name}"
            )
        row = row | {"answer": str(row["answer"])}  # it may be a number
        is_correct = str(row.get("correct", True)).lower() == "true"
        if is_correct and row["question"] not in run.train_loader.held_out:
            text = prompt.render(run.tokenizer, row["question"])
            solutions.append(encode(run.tokenizer, text, row["completion"], row))
    if config.filter_correct:
        run.reward(solutions)
        solutions = [solution for solution in solutions if solution.details["correct_strict"]]
    short = []
    for solution in solutions:
        has_short_prompt = len(solution.prompt_ids) <= config.max_prompt_length
        if has_short_prompt and len(solution.ids) <= config.max_completion_length:
            short.append(solution)
    random.Random(f"subset/{config.seed}").shuffle(short)
    chosen = short[: config.num_examples]
    print(
        f"{config.train_file}: {len(rows):,} rows, {len(solutions):,} of them correct and not held"
        f" out, {len(short):,} of these short enough, {len(chosen):,} used"
    )
    if len(chosen) < (config.num_examples or 1):
        raise ValueError(
            f"--train_file {config.train_file}: only {len(chosen)} usable examples"
            " (--max_completion_length and --max_prompt_length leave out what is longer)"
        )
    return chosen


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, text: str, example: dict) -> Completion:
    """A solution as a completion of advantage 1, with the EOS at its end.

    Its tokens are those that go on after the prompt's, as in sampling: alone, it would get the
    space that Llama's tokenizer puts before a text.
    """
    text = text.removesuffix(tokenizer.eos_token)
    prompt_ids = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
    ids = tokenizer(prompt + text, add_special_tokens=False, verbose=False)["input_ids"]
    if ids[: len(prompt_ids)] == prompt_ids:
        ids = ids[len(prompt_ids) :]
    else:  # a token spans the border
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids.append(tokenizer.eos_token_id)
    return Completion(
        prompt_ids=prompt_ids,
        ids=ids,
        sampled_logps=[0.0] * len(ids),  # nobody sampled it
        finished=True,
        text=text,
        example=example,
        advantage=1.0,
    )


# --- The script -----------------------------------------------------------------------------------


def setup(config: SFTConfig) -> Run:
    """What fine-tuning works with. Raises ValueError or OSError for what the user gave wrong."""
    # A mistake in the file is reported before a model is loaded.
    rows = jsonl.read(config.train_file, required=("question", "completion", "answer"))
    run = Run.load(config)
    run.solutions = choose_solutions(rows, config, run)
    run.optimizer = get_optimizer(run.model)
    num_batches = math.ceil(config.epochs * len(run.solutions) / config.train_batch_size)
    run.num_iterations = config.num_updates or max(1, num_batches)
    return run


def main(argv: list[str] | None = None) -> int:
    return run_to_the_end(parse(SFTConfig, argv), setup, train)


if __name__ == "__main__":
    sys.exit(main())
