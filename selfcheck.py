"""About a minute of checks on your own model, data and hardware, before hours are spent.

    python selfcheck.py --model_name tiny/1m --dataset_name arithmetic
    python selfcheck.py --check_judge 20 --dataset_name creative ...

It takes main.py's flags and trains nothing. Each check prints what it measured and whether it
holds, and if not, what to do. The exit code is 1 if a check fails. --check_judge N makes only
the judge's report, on N opening lines.
"""

import os
import resource
import sys
import tempfile
import time
from dataclasses import dataclass, replace

import torch

import distributed
import llms
import main
import utils
from config import ArgumentParser, GRPOConfig, parse
from evaluator import CreativeWritingEvaluator, Rewards
from judges import judge_report
from logs.diagnose import TRUNCATED
from logs.statistics import expected_flat_share
from sampling import decoding, generation
from sampling.rollout import Rollout, compute_rollout_logps
from training import checkpoints, steps
from training.lock import Lock
from training.memory import OutOfMemory
from training.run import resolve

NUM_PROMPTS = 4  # sampled in groups of --group_size
OTHER_GROUP_SIZES = (4, 8, 16, 32)  # for which the share of flat groups is predicted


@dataclass(frozen=True)
class Sampled:
    """A few groups of completions, as training would sample them."""

    examples: list[dict]  # one for each group
    rollout: Rollout
    rewards: Rewards


@dataclass(frozen=True)
class CheckResult:
    """What a check has found."""

    ok: bool
    figure: str  # what was measured
    advice: str = ""  # what to do if the check fails


def sample_groups(config, run):
    """Sample and reward the groups that the checks look at."""
    examples = run.train_loader.next_batch(NUM_PROMPTS)
    with utils.isolated_seed(config.seed):
        rollout = steps.sample(config, run, examples, config.group_size, config.temperature)
    repeated_examples = utils.repeat_each(examples, config.group_size)
    rewards = steps.reward(run.evaluator, repeated_examples, rollout.texts)
    return Sampled(examples, rollout, rewards)


# --- The checks -----------------------------------------------------------------------------------
# The docstring of a check says what should hold. It is printed if the check fails.


def check_template(config, run, sampled):
    """A chat rendered with its reply starts with the prompt, and the reply follows at once."""
    example = sampled.examples[0]
    prompt = run.train_loader.prompt
    messages = prompt.messages(example["question"])
    if messages is None or not run.tokenizer.chat_template:
        return CheckResult(True, f"prompt format {prompt.name} without a chat template")
    reply = {"role": "assistant", "content": "ANSWER"}
    chat = run.tokenizer.apply_chat_template([*messages, reply], tokenize=False)
    return CheckResult(
        ok=chat.startswith(example["prompt"] + "ANSWER"),
        figure=f"prompt ends in {example['prompt'][-25:]!r}",
        advice="use a tokenizer whose chat template writes the same text before a reply, whether "
        "the reply is in the chat or still to be generated",
    )


def check_masks(config, run, sampled):
    """Completions end by themselves, and the mask includes their EOS and nothing after it."""
    rollout = sampled.rollout
    eos_ids = torch.tensor(generation.eos_token_ids(run.sampler, run.tokenizer)).to(
        run.model.device
    )
    is_eos = torch.isin(rollout.completion_ids, eos_ids)  # (B, C)
    eos_counts = (is_eos & rollout.completion_mask.bool()).sum(1)  # (B,)
    num_completions = len(eos_counts)
    num_with_eos = int((eos_counts > 0).sum())
    num_finished = int(rollout.finished.sum())
    num_cut = num_completions - num_finished
    figure = f"{num_with_eos} of {num_completions} completions end with an EOS, {num_cut} were cut"
    if num_cut > TRUNCATED * num_completions:
        return CheckResult(
            False,
            figure,
            f"more than {TRUNCATED:.0%} were cut: raise --max_completion_length; "
            "if none ends, the model may not know its EOS",
        )
    at_most_one_eos = bool(eos_counts.max() <= 1)
    # A completion that ends at a stop string is finished without an EOS.
    has_stop_strings = bool(run.train_loader.prompt.stop_strings)
    finishes_are_explained = num_with_eos == num_finished or has_stop_strings
    return CheckResult(
        at_most_one_eos and finishes_are_explained,
        figure,
        "masks must run from the first completion token through the first EOS",
    )


def check_sampled_logps(config, run, sampled):
    """The sampler gives every token that it drew the log-prob that the loss gives it."""
    rollout = sampled.rollout
    logps = compute_rollout_logps(
        run.model,
        rollout,
        group_size=config.group_size,
        temperature=config.temperature,
        micro_batch_tokens=config.micro_batch_tokens,
    )
    gaps = (logps - rollout.sampled_logps).abs()[rollout.completion_mask.bool()]
    # bfloat16, in a sampling copy or under autocast, has 8 bits of mantissa: its log-probs differ
    # by some hundredths of a nat on average.
    uses_bfloat16 = run.sampler is not run.model or run.model.device.type == "cuda"
    limit = 0.05 if uses_bfloat16 else 1e-3
    return CheckResult(
        ok=gaps.mean().item() < limit,
        figure=f"mean gap {gaps.mean():.1e} nats, worst {gaps.max():.1e}",
        advice="make sampling and loss see the same model, temperature and positions",
    )


def check_graphs(config, run, sampled):
    """Decode steps in CUDA graphs draw the same tokens as ordinary steps, in less time."""
    decoder = decoding.CAPTURED_DECODERS.get(run.sampler)
    if decoder is None:
        return CheckResult(
            True,
            "nothing is captured in CUDA graphs, for one of three reasons: there is no CUDA, the "
            "weights are float32, or the keys and values would fill the memory",
        )
    prompts = [example["prompt"] for example in sampled.examples]

    def sample_with(use_graphs):
        """The completion ids that are drawn with or without graphs, and the seconds it took."""
        decoder.uses_graphs = use_graphs
        with utils.isolated_seed(0):
            start = time.perf_counter()
            # 150 steps are enough for rows to end and the cache to grow.
            rollout = generation.generate(
                run.sampler,
                run.tokenizer,
                prompts,
                num_samples=config.group_size,
                max_completion_length=150,
            )
            completion_ids = rollout.completion_ids.tolist()
            return completion_ids, time.perf_counter() - start

    can_capture = decoder.uses_graphs  # False after a capture that failed
    sample_with(can_capture)  # untimed: graphs may be captured in this call
    ids_with_graphs, seconds_with_graphs = sample_with(can_capture)
    ids_without_graphs, seconds_without_graphs = sample_with(False)
    decoder.uses_graphs = can_capture
    return CheckResult(
        ok=can_capture and ids_with_graphs == ids_without_graphs,
        figure=f"{len(prompts)} prompts, 150 steps: {seconds_with_graphs:.2f} s, "
        f"without graphs {seconds_without_graphs:.2f} s",
        advice="use --sampling_dtype float32, which samples without graphs: right, but slower",
    )


def check_gold(config, run, sampled):
    """The data set's own answers, written in the required format, are strictly correct."""
    examples = [example for example in run.train_loader.examples[:500] if example["answer"]]
    if not examples:
        return CheckResult(True, "the data set has no gold answers")
    prompt = run.train_loader.prompt
    solutions = [
        prompt.format_solution(example["solution"], example["answer"]) for example in examples
    ]
    rewards = steps.reward(run.evaluator, examples, solutions)
    num_correct = sum(detail["correct_strict"] for detail in rewards.details)
    mean_reward = run.evaluator.total(rewards).mean()
    return CheckResult(
        ok=num_correct == len(examples),
        figure=f"{num_correct} of {len(examples)} gold solutions are strictly correct, "
        f"mean reward {mean_reward:.3f}",
        advice="evaluator, prompt format and data do not fit together: "
        "look at --evaluator, --prompt and the answers",
    )


def check_spread(config, run, sampled):
    """Rewards differ within groups: without spread there is nothing to learn from."""
    total_rewards = run.evaluator.total(sampled.rewards)
    _, metrics = main.compute_group_normalized_rewards(total_rewards, config.group_size)
    flat_fraction = metrics["zero_std_fraction"]
    return CheckResult(
        ok=flat_fraction < 0.9,
        figure=f"mean reward {metrics['reward']:.3f}, "
        f"std within groups {metrics['reward_std']:.3f}, "
        f"in {flat_fraction:.0%} of the groups all rewards are equal"
        f"{predicted_flat_groups(config, sampled)}",
        advice="use easier problems, a larger --group_size or --temperature, "
        "or supervised fine-tuning first",
    )


def predicted_flat_groups(config, sampled):
    """How many groups of other sizes would be all right or all wrong, as the end of a sentence."""
    has_answers = all(example["answer"] for example in sampled.examples)
    if not has_answers:  # what a judge reads is neither right nor wrong
        return ""
    G = config.group_size
    correct = [detail["correct_strict"] for detail in sampled.rewards.details]
    num_correct = [sum(correct[i : i + G]) for i in range(0, len(correct), G)]
    shares = []
    for size in OTHER_GROUP_SIZES:
        shares.append(f"{expected_flat_share(num_correct, G, size):.0%} (G = {size})")
    counts = ", ".join(map(str, num_correct))
    return (
        f"; right answers by group: {counts} of {G}, so that of groups of other sizes about"
        f" {', '.join(shares)} would be all right or all wrong (Jeffreys' prior; so few samples"
        " make it rough, and too low for hopeless problems)"
    )


def check_checkpoint(config, run, sampled):
    """A checkpoint that is written and read again holds the same weights, bit for bit."""
    folder = next(path for path in config.output_dir.absolute().parents if path.is_dir())
    with tempfile.TemporaryDirectory(dir=folder, prefix="selfcheck-") as output_dir:
        path = checkpoints.write(output_dir, 0, run.model, run.tokenizer, state={})
        if path is None:
            return CheckResult(
                False, "it could not be written", f"make room on the disk of {folder}"
            )
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        weights = llms.read_weights(path, run.model)
    changed = [
        name
        for name, weight in run.model.state_dict().items()
        if not torch.equal(weight.cpu(), weights[name])
    ]
    return CheckResult(
        ok=not changed,
        figure=f"{len(weights)} weights, {num_bytes / 2**30:.2f} GiB, {len(changed)} changed",
        advice=f"take another model: --resume would change {', '.join(changed[:3])}",
    )


def check_memory(config, run, sampled):
    """The peak of an iteration, with the optimiser's states, leaves a tenth of the memory free."""
    num_completions = len(sampled.rollout.texts)
    loss_weights = torch.ones(num_completions, device=run.model.device)
    rows = list(range(num_completions))
    main.accumulate_gradient(config, run, sampled.rollout, loss_weights, rows)
    run.optimizer.zero_grad()
    # AdamW's two moments, 4 bytes each, do not exist before the first update.
    num_parameters = sum(parameter.numel() for parameter in run.model.parameters())
    peak_so_far, total = memory(run.model.device)
    peak = peak_so_far + 8 * num_parameters
    return CheckResult(
        ok=peak < 0.9 * total,
        figure=f"peak {peak / 2**30:.1f} of {total / 2**30:.1f} GiB",
        advice="lower --micro_batch_tokens, or use --gradient_checkpointing",
    )


def memory(device):
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
    check_sampled_logps,
    check_graphs,
    check_gold,
    check_spread,
    check_checkpoint,
    check_memory,
)


# --- The command line -----------------------------------------------------------------------------


def run_checks(config, run):
    """Print a line for each check; returns the names of those that failed."""
    sampled = sample_groups(config, run)
    failed = []
    for check in CHECKS:
        start = time.perf_counter()
        result = check(config, run, sampled)
        seconds = time.perf_counter() - start
        name = check.__name__.removeprefix("check_").replace("_", " ")
        print(f"{'pass' if result.ok else 'FAIL'}  {name:16s} {result.figure} ({seconds:.1f} s)")
        if not result.ok:
            print(f"      {check.__doc__} To do: {result.advice}.")
            failed.append(name)
    return failed


def check_judge(config, num_lines):
    """Print and store the judge's report on num_lines opening lines, with a group of stories each.

    Raises:
        ValueError: The data set has no judge, or another run is still using the output directory.
    """
    # The setup of a training run would make a report of its own.
    run = main.setup(replace(config, eval_only=True))
    if not isinstance(run.evaluator, CreativeWritingEvaluator):
        raise ValueError(
            f"--dataset_name {config.dataset_name} has no judge; use --dataset_name creative"
        )
    lock = Lock(config.output_dir)  # protects the report of a run that is still going
    judge_report.make_judge_report(config, run, steps.sample, num_lines)
    lock.release()
    print(f"kept in {config.output_dir / 'judge_report.json'}")


def run_selfcheck(argv=None):
    """The command line; returns its exit code."""
    parser = ArgumentParser(
        description="Check a model, data and hardware; any other flag is one of main.py's."
    )
    parser.add_argument(
        "--check_judge",
        type=int,
        metavar="LINES",
        help="make only the report of the judge of stories, on this number of opening lines",
    )
    own_args, training_argv = parser.parse_known_args(argv)
    config = parse(GRPOConfig, training_argv)
    try:
        config = resolve(config)
        distributed.init(config.device, allow_several=False)
        if own_args.check_judge is not None:
            check_judge(config, own_args.check_judge)
            return 0
        run = main.setup(config)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        failed = run_checks(config, run)
    except OutOfMemory as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    summary = f"{len(CHECKS) - len(failed)} of {len(CHECKS)} checks hold"
    if failed:
        summary += f"; failed: {', '.join(failed)}"
    print(summary)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_selfcheck())
