"""About a minute of checks on your own model, data and hardware, before hours are spent: main.py's flags, no training.

    python selfcheck.py --model_name tiny/1m --dataset_name arithmetic
    python selfcheck.py --check_judge 20 --dataset_name creative ...    the judge's report alone, on so many lines

Each check prints its figure, whether it holds, and what to do if not. Exit code 1 if one fails.
"""

import os
import resource
import sys
import time

import torch

import distributed
import flags
import main
import utils
from evaluator import CreativeWritingEvaluator
from judges import judge_report
from sampling import decoding, generation
from training.lock import Lock

PROMPTS = 4  # sampled in groups of --group_size


def check_sampled_logps(args, run, sampled):
    """What was sampled is what is trained: the sampler's log-probs are those that the loss computes."""
    logps = main.frozen_logps(args, run.model, sampled.rollout)
    gap = (logps - sampled.rollout.sampled_logps).abs()[sampled.rollout.completion_mask.bool()]
    figure = f"mean gap {gap.mean():.1e} nats, worst {gap.max():.1e}"
    # bfloat16 (a sampling copy, or autocast) has 8 bits of mantissa: it differs by some hundredths of a nat on average.
    limit = 0.05 if run.sampler is not run.model or run.model.device.type == "cuda" else 1e-3
    return (
        gap.mean().item() < limit,
        figure,
        "sampling and loss see different models, temperatures or positions",
    )


def check_masks(args, run, sampled):
    """The EOS is inside the completion mask, where stopping is learnt, and nothing behind it is."""
    rollout, eos_ids = (
        sampled.rollout,
        torch.tensor(generation.eos_token_ids(run.sampler, run.tokenizer)),
    )
    inside = (
        torch.isin(rollout.completion_ids, eos_ids.to(args.device)) & rollout.completion_mask.bool()
    ).sum(1)
    ended, finished = int((inside > 0).sum()), int(rollout.finished.sum())
    figure = (
        f"{ended} of {len(inside)} completions end with an EOS, {len(inside) - finished} were cut"
    )
    if not finished:
        return (
            False,
            figure,
            "no completion ended: raise --max_completion_length, or the model does not know its EOS",
        )
    ok = inside.max() <= 1 and (ended == finished or run.train_loader.prompt.stop_strings)
    return bool(ok), figure, "masks must run from the first completion token through the first EOS"


def check_template(args, run, sampled):
    """The prompt ends where the completion begins: a full chat starts with exactly the prompt."""
    example, prompt = sampled.examples[0], run.train_loader.prompt
    messages = prompt.messages(example["question"])
    if messages is None or not run.tokenizer.chat_template:
        return True, f"prompt form {prompt.name} without a chat template", ""
    answer = {"role": "assistant", "content": "ANSWER"}
    chat = run.tokenizer.apply_chat_template([*messages, answer], tokenize=False)
    ok = chat.startswith(example["prompt"] + "ANSWER")
    figure = f"prompt ends in {example['prompt'][-25:]!r}"
    return (
        ok,
        figure,
        "the chat template's generation prompt differs from how it opens an assistant's turn",
    )


def check_gold(args, run, sampled):
    """The data set's own answers, written in the required form, get the full reward."""
    examples = [example for example in run.train_loader.examples[:500] if example["answer"]]
    if not examples:
        return True, "the data set has no gold answers", ""
    texts = [run.train_loader.prompt.format_solution(e["solution"], e["answer"]) for e in examples]
    rewards = run.evaluator.compute_rewards(
        [e["question"] for e in examples], texts, [e["answer"] for e in examples]
    )
    right = sum(detail["correct_strict"] for detail in rewards.details)
    reward = run.evaluator.total(rewards).mean()
    figure = (
        f"{right} of {len(examples)} gold solutions are strictly correct, mean reward {reward:.3f}"
    )
    advice = "evaluator, prompt form and data do not fit together: look at --evaluator, --prompt and the answers"
    return right == len(examples), figure, advice


def check_spread(args, run, sampled):
    """Rewards differ within groups: without spread there is no advantage and nothing to learn from."""
    total = run.evaluator.total(sampled.rewards)
    _, metrics = main.compute_group_normalized_rewards(total, args.group_size)
    figure = f"mean reward {metrics['reward']:.3f}, std within groups {metrics['reward_std']:.3f},"
    figure += f" {metrics['zero_std_fraction']:.0%} of groups flat"
    advice = (
        "easier problems, a larger --group_size or --temperature, or supervised fine-tuning first"
    )
    return metrics["zero_std_fraction"] < 0.9, figure, advice


def check_memory(args, run, sampled):
    """One iteration's peak, with the optimiser's states, leaves a tenth of the memory free."""
    rows = list(range(len(sampled.rollout.texts)))
    main.accumulate_gradient(
        args, run, sampled.rollout, torch.ones(len(rows), device=args.device), rows
    )
    run.optimizer.zero_grad()
    states = 8 * sum(
        p.numel() for p in run.model.parameters()
    )  # AdamW's two moments, which do not exist yet
    peak, total = memory(args.device)
    figure = f"peak {(peak + states) / 2**30:.1f} of {total / 2**30:.1f} GiB"
    return (
        peak + states < 0.9 * total,
        figure,
        "lower --micro_batch_tokens, or use --gradient_checkpointing",
    )


def check_graphs(args, run, sampled):
    """Decode steps that are captured in CUDA graphs draw what others draw, and sooner."""
    decoder, drawn, seconds = decoding.CAPTURED_DECODERS.get(run.sampler), [], []
    if decoder is None:
        return (
            True,
            "nothing is captured: no CUDA, float32 weights, or keys and values that would fill the memory",
            "",
        )
    captures, settings = (
        decoder.uses_graphs,
        dict(num_samples=args.group_size, max_new_tokens=150),
    )  # rows leave, room grows
    for decoder.uses_graphs in (captures, captures, False):  # the first time, graphs may be made
        with utils.isolated_seed(0):
            start, prompts = (
                time.perf_counter(),
                [example["prompt"] for example in sampled.examples],
            )
            drawn.append(
                generation.generate(
                    run.sampler, run.tokenizer, prompts, **settings
                ).completion_ids.tolist()
            )
            seconds.append(time.perf_counter() - start)
    decoder.uses_graphs = captures
    figure = (
        f"{len(prompts)} prompts, 150 steps: {seconds[1]:.2f} s, without graphs {seconds[2]:.2f} s"
    )
    return captures and drawn[1] == drawn[2], figure, "without graphs sampling is right, but slow"


def memory(device):
    """(peak bytes of this process so far, bytes in all) on the device."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(), torch.cuda.get_device_properties(
            device
        ).total_memory
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    return peak, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


CHECKS = (
    check_template,
    check_masks,
    check_sampled_logps,
    check_graphs,
    check_gold,
    check_spread,
    check_memory,
)


class Sampled:
    """A few groups of completions, as training would sample them, and their rewards."""

    def __init__(self, args, run):
        self.examples = run.train_loader.next_batch(PROMPTS)
        with utils.isolated_seed(args.seed):
            self.rollout = main.sample(args, run, self.examples, args.group_size, args.temperature)
        repeated = [example for example in self.examples for _ in range(args.group_size)]
        self.rewards = main.reward(run.evaluator, repeated, self.rollout)


def run_checks(args, run):
    """Print a line per check; returns the names of those that failed."""
    sampled, failed = Sampled(args, run), []
    for check in CHECKS:
        start = time.perf_counter()
        ok, figure, advice = check(args, run, sampled)
        name = check.__name__.removeprefix("check_").replace("_", " ")
        print(
            f"{'pass' if ok else 'FAIL'}  {name:16s} {figure} ({time.perf_counter() - start:.1f} s)"
        )
        if not ok:
            print(f"      {check.__doc__} To do: {advice}.")
            failed.append(name)
    return failed


def check_judge(args):
    """The report of main.py's judge on a group of stories for each of so many opening lines: printed, and kept."""
    args.eval_only = True  # so that the setup of a training run makes no report of its own
    prepared = main.setup(args)
    if not isinstance(prepared.evaluator, CreativeWritingEvaluator):
        raise ValueError(
            f"--dataset_name {args.dataset_name} has no judge; use --dataset_name creative"
        )
    lock = Lock(args.output_dir)  # the report of a run that lives is not written over
    judge_report.make_judge_report(args, prepared, main.sample, args.check_judge)
    lock.release()
    print(f"kept in {args.output_dir / 'judge_report.json'}")


def run(argv=None):
    parser = flags.ArgumentParser(
        description="Check a model, data and hardware; any other flag is one of main.py's."
    )
    parser.add_argument(
        "--check_judge", type=int, metavar="LINES", help="only the report of the judge of stories"
    )
    own, rest = parser.parse_known_args(argv)
    args = flags.parse_args(rest)
    args.check_judge = own.check_judge
    try:
        distributed.init(args.device, allow_several=False)
        if args.check_judge is not None:
            return check_judge(args)
        prepared = main.setup(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    failed = run_checks(args, prepared)
    summary = f"{len(CHECKS) - len(failed)} of {len(CHECKS)} checks hold"
    print(f"{summary}; failed: {', '.join(failed)}" if failed else summary)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run())
