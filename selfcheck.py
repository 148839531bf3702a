"""A minute of checks on your own model, data and hardware, before hours are spent.

    python selfcheck.py --model_name tiny/1m --dataset_name arithmetic

It takes main.py's flags and trains nothing. Each check prints what it measured and whether it
holds, and if not, what to do. The exit code is 1 if a check fails.
"""

import os
import resource
import sys
from typing import NamedTuple

from config import GRPOConfig, parse

if __name__ == "__main__":
    parse(GRPOConfig)  # --help and mistakes are answered before the seconds that imports take

import torch

import distributed
import llms
import main
import utils
from logs.diagnose import TRUNCATED
from rl_datasets import fixed_date_template
from sampling import decoding, generation
from sampling.rollout import compute_rollout_logps
from training import completions
from training.memory import OutOfMemory
from training.records import column
from training.run import Run, resolve

NUM_PROMPTS = 4  # sampled in groups of --group_size


class CheckResult(NamedTuple):
    """What a check has found."""

    ok: bool
    figure: str  # what was measured


def sample_groups(config: GRPOConfig, run: Run) -> main.Groups:
    """The first few groups of completions, sampled and rewarded as in training."""
    run.train_loader.load_state_dict({"epoch": 0, "position": 0})
    examples = run.train_loader.next_batch(NUM_PROMPTS)
    with utils.isolated_seed(config.seed):
        return main.sample_groups(config, run, examples, examples)


# --- The checks -----------------------------------------------------------------------------------
# The docstring of a check says what should hold, and what to do. It is printed if the check fails.


def check_template(config: GRPOConfig, run: Run, groups: main.Groups) -> CheckResult:
    """A chat rendered with its reply starts with the prompt, and goes on with reply and EOS.

    Use a tokenizer whose chat template writes the same text before a reply, whether the reply is in
    the chat or still to be generated, and a single token after it.
    """
    example = run.train_loader.examples[0]
    prompt = run.train_loader.prompt
    messages = prompt.messages(example["question"])
    if messages is None or not run.tokenizer.chat_template:
        return CheckResult(True, f"prompt format {prompt.name} without a chat template")
    reply = {"role": "assistant", "content": "ANSWER"}
    template = fixed_date_template(run.tokenizer)
    chat = run.tokenizer.apply_chat_template(
        [*messages, reply], chat_template=template, tokenize=False
    )
    end = llms.end_of_turn(run.tokenizer)
    return CheckResult(
        ok=chat.startswith(example["prompt"] + "ANSWER") and end in ("", run.tokenizer.eos_token),
        figure=f"prompt ends in {example['prompt'][-25:]!r}, reply in {end!r}",
    )


def check_masks(config: GRPOConfig, run: Run, groups: main.Groups) -> CheckResult:
    """A completion's mask runs from its first token through its first EOS."""
    rollout = groups.rollout
    eos_ids = generation.eos_token_ids(run.sampler, run.tokenizer)
    is_eos = torch.isin(rollout.completion_ids, torch.tensor(eos_ids, device=run.model.device))
    num_eos = (is_eos & rollout.completion_mask.bool()).sum(1)  # (B,)
    num_with_eos = int((num_eos > 0).sum())
    # A completion that ends at a stop string is finished without an EOS.
    has_stop_strings = bool(run.train_loader.prompt.stop_strings)
    finishes_are_explained = num_with_eos == int(rollout.finished.sum()) or has_stop_strings
    return CheckResult(
        ok=bool(num_eos.max() <= 1) and finishes_are_explained,
        figure=f"{num_with_eos} of {len(num_eos)} completions end with an EOS",
    )


def check_truncation(config: GRPOConfig, run: Run, groups: main.Groups) -> CheckResult:
    """Completions end by themselves.

    Raise --max_completion_length. If none ends, the model may not know its EOS.
    """
    share = groups.metrics["truncated_fraction"]
    return CheckResult(share <= TRUNCATED, f"{share:.0%} of the completions were cut")


def check_sampled_logps(config: GRPOConfig, run: Run, groups: main.Groups) -> CheckResult:
    """The sampler gives every token that it drew the log-prob that the loss gives it.

    Make sampling and loss see the same model, temperature and positions.
    """
    rollout = groups.rollout
    logps = compute_rollout_logps(
        run.model,
        rollout,
        group_size=config.group_size,
        temperature=config.temperature,
        micro_batch_tokens=config.micro_batch_tokens,
    )
    gaps = (logps - rollout.sampled_logps).abs()[rollout.completion_mask.bool()]
    # bfloat16, in a sampling copy or under autocast, has 8 bits of mantissa: its log-probs differ
    # by some hundredths of a nat on average (0.03 in a real model of 135 million parameters).
    uses_bfloat16 = run.sampler.dtype == torch.bfloat16 or run.model.device.type == "cuda"
    limit = 0.1 if uses_bfloat16 else 1e-3
    return CheckResult(
        ok=gaps.mean().item() < limit,
        figure=f"mean gap {gaps.mean():.1e} nats, worst {gaps.max():.1e}",
    )


def check_graphs(config: GRPOConfig, run: Run, groups: main.Groups) -> CheckResult:
    """Decode steps in CUDA graphs draw the same tokens as ordinary steps.

    Use --sampling_dtype float32, which samples without graphs: right, but slower.
    """
    decoder = decoding.CAPTURED_DECODERS.get(run.sampler)
    if decoder is None:
        return CheckResult(True, "nothing is captured in CUDA graphs here")
    can_capture = decoder.uses_graphs  # False after a capture that failed
    with_graphs = sample_groups(config, run).rollout.completion_ids
    decoder.uses_graphs = False
    without_graphs = sample_groups(config, run).rollout.completion_ids
    decoder.uses_graphs = can_capture
    return CheckResult(
        ok=can_capture and torch.equal(with_graphs, without_graphs),
        figure=f"{len(with_graphs)} completions were drawn with and without them",
    )


def check_gold(config: GRPOConfig, run: Run, groups: main.Groups) -> CheckResult:
    """The data set's own answers, written in the required format, are strictly correct.

    Look at --evaluator, --prompt and the answers, which do not fit together.
    """
    examples = [example for example in run.train_loader.examples[:500] if example["answer"]]
    if not examples:
        return CheckResult(True, "the data set has no gold answers")
    prompt = run.train_loader.prompt
    solutions = [
        prompt.format_solution(example["solution"], example["answer"]) for example in examples
    ]
    rewards = completions.reward(run.evaluator, examples, solutions)
    mean_reward = f"mean reward {run.evaluator.total(rewards).mean():.3f}"
    if not all("correct_strict" in detail for detail in rewards.details):
        return CheckResult(True, f"rewards without verdicts; {mean_reward}")
    num_correct = sum(detail["correct_strict"] for detail in rewards.details)
    return CheckResult(
        ok=num_correct == len(examples),
        figure=f"{num_correct} of {len(examples)} gold solutions are strictly correct, "
        f"{mean_reward}",
    )


def check_spread(config: GRPOConfig, run: Run, groups: main.Groups) -> CheckResult:
    """Rewards differ within groups: without spread there is nothing to learn from.

    Use easier problems, a larger --group_size or --temperature, or supervised fine-tuning first.
    Where rewards are missing, look at --evaluator.
    """
    flat_fraction = groups.metrics["zero_std_fraction"]
    figure = (
        f"mean reward {groups.metrics['reward']:.3f}, in {flat_fraction:.0%} of the groups all"
        " rewards are equal"
    )
    is_missing = column(groups.records, "reward").isnan()
    if is_missing.any():
        figure = f"{is_missing.sum()} of {len(is_missing)} rewards are missing (NaN), {figure}"
    return CheckResult(ok=flat_fraction < 0.9, figure=figure)


def check_memory(config: GRPOConfig, run: Run, groups: main.Groups) -> CheckResult:
    """The peak of an iteration, with the optimiser's states, leaves a tenth of the memory free.

    Lower --micro_batch_tokens, or use --gradient_checkpointing.
    """
    rollout = main.rollout_for_training(config, groups)
    rows = list(range(len(rollout.texts)))
    main.accumulate_gradient(
        run.model, run.base_model, rollout, rows, config, config.micro_batch_tokens
    )
    run.model.zero_grad()
    # AdamW's two moments, 4 bytes each, do not exist before the first update.
    num_trained = sum(weight.numel() for weight in run.model.parameters() if weight.requires_grad)
    peak_so_far, total = memory(run.model.device)
    peak = peak_so_far + 8 * num_trained
    return CheckResult(
        ok=peak < 0.9 * total, figure=f"peak {peak / 2**30:.1f} of {total / 2**30:.1f} GiB"
    )


def memory(device: torch.device) -> tuple[int, int]:
    """(peak of this process so far, all memory) of the device, in bytes."""
    if torch.device(device).type == "cuda":
        peak = torch.cuda.max_memory_allocated()
        return peak, torch.cuda.get_device_properties(device).total_memory
    bytes_per_unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * bytes_per_unit
    return peak, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


CHECKS = (
    check_template,
    check_masks,
    check_truncation,
    check_sampled_logps,
    check_graphs,
    check_gold,
    check_spread,
    check_memory,
)


# --- The command line -----------------------------------------------------------------------------


def run_checks(config: GRPOConfig, run: Run) -> list[str]:
    """Print a line for each check; returns the names of those that failed."""
    groups = sample_groups(config, run)
    failed = []
    for check in CHECKS:
        result = check(config, run, groups)
        name = check.__name__.removeprefix("check_").replace("_", " ")
        print(f"{'pass' if result.ok else 'FAIL'}  {name:16s} {result.figure}")
        if not result.ok:
            print(f"      {' '.join(check.__doc__.split())}")
            failed.append(name)
    return failed


def run_selfcheck(argv: list[str] | None = None) -> int:
    """The command line; returns its exit code."""
    config = resolve(parse(GRPOConfig, argv))
    try:
        distributed.init(config.device, allow_several=False)
        run = main.setup(config)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        failed = run_checks(config, run)
    except OutOfMemory as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(CHECKS) - len(failed)} of {len(CHECKS)} checks hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_selfcheck())
