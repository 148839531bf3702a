"""Supervised fine-tuning: the baseline of reinforcement learning.

    python generate_gold.py --from_reference --dataset_name arithmetic --output gold.jsonl
    python sft.py --model_name tiny/1m --dataset_name arithmetic --train_file gold.jsonl

Only the completion is learnt: the prompt's tokens are context. The EOS that ends the completion is
trained with it.

Shapes: B sequences, P prompt tokens, C completion tokens, T = P + C.
"""

import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from config import FineTuningConfig, SFTConfig, parse

if __name__ == "__main__":
    parse(SFTConfig)  # --help and mistakes are answered before the seconds that imports take

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import distributed
import llms
import utils
from evaluator import RewardEvaluator
from logs import jsonl
from losses import LENGTH_NORMALIZATIONS
from rl_datasets import DATASETS, Prompt
from sampling.rollout import as_rollout
from training import steps, write_logs
from training.checks import check
from training.metrics import Share, StageTimer, TokenShare, add_up
from training.run import Run, run_to_the_end, save_checkpoint

# (prompt ids, completion ids) of each example
Sequences = list[tuple[list[int], list[int]]]


def fine_tune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: list[dict],
    config: FineTuningConfig,
    *,
    num_updates: int,
    seed: int = 0,
    length_normalization: str = "masked_mean",
    max_completion_length: int | None = None,
    log_entropy: bool = False,
    final_learning_rate: float = 0.0,
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
        num_updates: how many updates there are in all, those before start_step included.
        seed: by which the examples are shuffled.
        length_normalization: how tokens are averaged (losses.LENGTH_NORMALIZATIONS).
        max_completion_length: what masked_normalize divides by.
        log_entropy: whether the entropy at the completions' tokens is logged.
        final_learning_rate: where the cosine ends.
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
    order = example_order(len(sequences), seed)
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
        range(start_step + 1, num_updates + 1),
        initial=start_step,
        total=num_updates,
        desc="SFT",
        unit="update",
    )
    for step in bar:
        batch = [sequences[i] for i in itertools.islice(order, config.train_batch_size)]
        with timer("loss"):
            metrics = accumulate_sft_gradient(
                model,
                batch,
                tokenizer.pad_token_id,
                config.micro_batch_tokens,
                length_normalization=length_normalization,
                max_completion_length=max_completion_length,
                log_entropy=log_entropy,
            )
        with timer("step"):
            learning_rate = learning_rate_at(step, config, num_updates, final_learning_rate)
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


def accumulate_sft_gradient(
    model: PreTrainedModel,
    batch: Sequences,
    pad_token_id: int,
    micro_batch_tokens: int,
    *,
    length_normalization: str,
    max_completion_length: int | None,
    log_entropy: bool,
) -> dict[str, float]:
    """Add the gradient of one update's loss to the parameters, micro-batch by micro-batch.

    The loss is the negative log-likelihood of the completions (CS336 A5, section 4.2).

    Args:
        batch: the whole update, of which each process takes its share.

    Returns:
        `loss` of the whole update, and `entropy`, the mean over its completion tokens, if
        log_entropy asks for it.
    """
    rollout = as_rollout(batch, pad_token_id, model.device)
    num_tokens = int(rollout.lengths.sum())
    my_rows = distributed.share(range(len(batch)))
    micro_batches = rollout.micro_batches(
        my_rows, 1, micro_batch_tokens, sharded=distributed.is_sharded(model)
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
                return_entropy=log_entropy,
            )
        logps, entropies = output if log_entropy else (output, None)
        loss = LENGTH_NORMALIZATIONS[length_normalization](
            -logps,
            completion_mask,
            max_completion_length,
            num_sequences=len(batch),
            num_tokens=num_tokens,
        )
        loss.backward()
        metrics = {"loss": Share(loss.item())}
        if log_entropy:
            entropy = utils.masked_sum(entropies, completion_mask) / num_tokens
            metrics["entropy"] = TokenShare(entropy.item())
        shares.append(metrics)
    my_metrics = add_up(shares)
    return add_up(distributed.gather([my_metrics]))


def learning_rate_at(
    step: int, config: FineTuningConfig, num_updates: int, final_learning_rate: float = 0.0
) -> float:
    """The learning rate of update `step` (1 to num_updates).

    It rises linearly to its peak at warmup_steps, then falls as a cosine towards its final value.
    """
    peak = config.learning_rate
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    # The progress stays below 1, so that no update is spent at the final rate, which may be 0.
    progress = (step - config.warmup_steps) / (num_updates - config.warmup_steps + 1)
    height = peak - final_learning_rate
    return final_learning_rate + height * (1 + math.cos(math.pi * progress)) / 2


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
    config: SFTConfig,
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    evaluator: RewardEvaluator,
) -> list[dict]:
    """The examples to train on: filtered, shuffled by the seed, and cut to config.num_examples.

    With the same seed, --num_examples 100 is a subset of --num_examples 200. Prints how many
    rows each filter leaves out. Raises ValueError where too few are left.
    """
    counts = {"read": len(rows)}
    if config.filter_correct:
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
    run = steps.load(config)
    run.examples = select_examples(
        rows, config, run.train_loader.prompt, run.tokenizer, run.evaluator
    )
    run.optimizer = get_optimizer(run.model, config.weight_decay)
    return run


def train(config: SFTConfig, run: Run) -> None:
    """Fine-tune on run.examples with evaluations and checkpoints, from run.step on."""
    num_updates = config.num_updates
    if num_updates is None:
        num_updates = max(1, math.ceil(config.epochs * len(run.examples) / config.train_batch_size))

    def after_update(row: dict, num_tokens: int) -> None:
        """Write the log, then evaluate and save where that is due."""
        with run.finish_step(num_tokens):
            write_logs.append(config, "train_log.jsonl", row)
        llms.refresh_sampler(run.sampler, run.model)
        if steps.is_due(run.step, config.eval_updates, num_updates):
            steps.evaluate(config, run)
        if steps.is_due(run.step, config.save_updates, num_updates):
            save_checkpoint(config, run)

    # After --resume the sampler still holds the weights from before: copy the policy's again.
    llms.refresh_sampler(run.sampler, run.model)
    evaluation_is_due = steps.is_due(run.step, config.eval_updates, num_updates)
    if evaluation_is_due and run.evaluated_step != run.step:
        steps.evaluate(config, run)
    fine_tune(
        run.model,
        run.tokenizer,
        run.examples,
        replace(config, warmup_steps=min(config.warmup_steps, num_updates)),
        num_updates=num_updates,
        seed=config.seed,
        length_normalization=config.length_normalization,
        max_completion_length=config.max_completion_length,
        log_entropy=config.log_entropy,
        optimizer=run.optimizer,
        start_step=run.step,
        start_tokens=run.total_tokens,
        start_time=run.start,
        after_update=after_update,
    )


def main(argv: list[str] | None = None) -> int:
    return run_to_the_end(parse(SFTConfig, argv), setup, train)


if __name__ == "__main__":
    sys.exit(main())
