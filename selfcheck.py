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

import flags
import llms
import main
import utils
from evaluator import CreativeWritingEvaluator
from grading import judge_report
from runs import processes

PROMPTS = 4  # sampled in groups of --group_size


def check_kl_and_ratio(args, run, sampled):
    """A policy equal to its reference has KL 0; a policy equal to its old self has ratio 1."""
    rows, batch = sampled.piece
    reference = run.base_model or run.model
    C = batch.completion_ids.shape[1]
    with torch.no_grad(), utils.autocast(args.device):
        old = utils.get_per_token_logps(
            run.model, batch.prompt_completion_ids, batch.attention_mask, C, temperature=args.temperature
        )
        _, metrics = main.compute_loss(
            run.model,
            reference,
            *loss_inputs(batch, rows),
            beta=1.0,
            temperature=args.temperature,
            old_per_token_logps=old,
        )
    worst = max(abs(metrics["ratio_min"] - 1), abs(metrics["ratio_max"] - 1))
    figure = f"KL {metrics['kl']:.1e}, ratio off 1 by {worst:.1e}"
    advice = "something is random in the model's forward pass (dropout?), or the reference is not the policy's start"
    return abs(metrics["kl"]) < 1e-5 and worst < 1e-3, figure, advice


def check_sampled_logps(args, run, sampled):
    """What was sampled is what is trained: the sampler's log-probs are those that the loss computes."""
    logps = main.compute_logps(args, run.model, sampled.rollout)
    gap = (logps - sampled.rollout.sampled_logps).abs()[sampled.rollout.completion_mask.bool()]
    figure = f"mean gap {gap.mean():.1e} nats, worst {gap.max():.1e}"
    # bfloat16 (a sampling copy, or autocast) has 8 bits of mantissa: it differs by some hundredths of a nat on average.
    limit = 0.05 if run.sampler is not run.model or run.model.device.type == "cuda" else 1e-3
    return gap.mean().item() < limit, figure, "sampling and loss see different models, temperatures or positions"


def check_gradient(args, run, sampled):
    """The gradient does not depend on padding, on micro-batches, or on whether the prompt is shared."""
    rows, batch = sampled.piece

    def gradient(batch, pieces, group_size):
        run.model.zero_grad()
        mask = batch.completion_mask
        advantages = torch.linspace(-1, 1, len(mask), device=mask.device)
        for piece in pieces:
            part = batch.select(piece) if len(pieces) > 1 else batch
            with utils.autocast(args.device):
                loss, _ = main.compute_loss(
                    run.model, None, *loss_inputs(part, piece)[:-1], advantages[piece], beta=0.0, group_size=group_size,
                    temperature=args.temperature, num_sequences=len(mask), num_tokens=int(mask.sum()),
                )  # fmt: skip
            loss.backward()
        flat = torch.cat([p.grad.float().flatten().cpu() for p in run.model.parameters() if p.grad is not None])
        run.model.zero_grad()
        return flat

    everything = list(range(len(batch.texts)))
    whole = gradient(batch, [everything], 1)
    gaps = {
        "padding": gradient(pad(batch, run.tokenizer.pad_token_id), [everything], 1),
        "micro-batches": gradient(batch, [[i] for i in everything], 1),
        "shared prompt": gradient(batch, [everything], len(everything)),
    }
    gaps = {name: ((other - whole).norm() / whole.norm()).item() for name, other in gaps.items()}
    figure = ", ".join(f"{name} {gap:.1e}" for name, gap in gaps.items())
    limit = 1e-4 if args.device == "cpu" else 5e-2  # bfloat16 products round differently in another shape
    return max(gaps.values()) < limit, f"relative change with {figure}", "positions or masks are not respected"


def check_masks(args, run, sampled):
    """The EOS is inside the completion mask, where stopping is learnt; padding is outside of both masks."""
    rollout, P = sampled.rollout, sampled.rollout.prompt_ids.shape[1]
    eos = torch.isin(
        rollout.completion_ids, torch.tensor(llms.eos_token_ids(run.sampler, run.tokenizer)).to(args.device)
    )
    inside = int((eos & rollout.completion_mask.bool()).sum())
    ended_by_eos = int((eos & rollout.completion_mask.bool()).any(1).sum())
    contiguous = (rollout.completion_mask.diff(dim=1) <= 0).all() and (
        rollout.attention_mask[:, :P].diff(dim=1) >= 0
    ).all()
    ok = (
        bool(contiguous)
        and inside == ended_by_eos
        and torch.equal(rollout.attention_mask[:, P:], rollout.completion_mask)
    )
    figure = (
        f"{ended_by_eos} of {len(rollout.texts)} completions end with an EOS, {int((~rollout.finished).sum())} were cut"
    )
    if not rollout.finished.any():
        return False, figure, "no completion ended: raise --max_completion_length, or the model does not know its EOS"
    return ok, figure, "masks must run from the first completion token through the first EOS"


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
    return ok, figure, "the chat template's generation prompt differs from how it opens an assistant's turn"


def check_sampling_fields(args, run, sampled):
    """Every sampling field is explicit: what generation_config says has no effect, and is said."""
    fields = {"top_k": None, "top_p": None, "min_p": None, "repetition_penalty": None, "temperature": None}
    inherited = {name: getattr(run.model.generation_config, name, None) for name in fields}
    ignored = ", ".join(f"{name} {value:g}" for name, value in inherited.items() if value not in (None, 1.0, 0))
    settings = dict(max_new_tokens=1, num_samples=64, temperature=2.0)
    with utils.isolated_seed(0):
        tokens = llms.generate(run.sampler, run.tokenizer, [sampled.examples[0]["prompt"]], **settings).completion_ids
    distinct = len(tokens.unique())
    figure = (
        f"ignored from generation_config: {ignored or 'nothing'}; {distinct} first tokens in 64 draws at temperature 2"
    )
    return distinct > 1, figure, "sampling is not random: a top_k or a penalty is at work"


def check_gold(args, run, sampled):
    """The data set's own answers, written in the required form, get the full reward."""
    examples = [example for example in run.train_loader.examples[:500] if example["answer"]]
    if not examples:
        return True, "the data set has no gold answers", ""
    texts = [run.train_loader.prompt.format_solution(e["solution"], e["answer"]) for e in examples]
    rewards = run.evaluator.compute_rewards([e["question"] for e in examples], texts, [e["answer"] for e in examples])
    right = sum(detail["correct_strict"] for detail in rewards.details)
    reward = run.evaluator.total(rewards).mean()
    figure = f"{right} of {len(examples)} gold solutions are strictly correct, mean reward {reward:.3f}"
    advice = "evaluator, prompt form and data do not fit together: look at --evaluator, --prompt and the answers"
    return right == len(examples), figure, advice


def check_spread(args, run, sampled):
    """Rewards differ within groups: without spread there is no advantage and nothing to learn from."""
    total = run.evaluator.total(sampled.rewards)
    _, metrics = main.compute_group_normalized_rewards(total, args.group_size)
    figure = f"mean reward {metrics['reward']:.3f}, std within groups {metrics['reward_std']:.3f},"
    figure += f" {metrics['zero_std_fraction']:.0%} of groups flat"
    advice = "easier problems, a larger --group_size or --temperature, or supervised fine-tuning first"
    return metrics["zero_std_fraction"] < 0.9, figure, advice


def check_memory(args, run, sampled):
    """One iteration's peak, with the optimiser's states, leaves a tenth of the memory free."""
    rows = list(range(len(sampled.rollout.texts)))
    main.accumulate_gradient(args, run, sampled.rollout, torch.ones(len(rows), device=args.device), rows)
    run.optimizer.zero_grad()
    states = 8 * sum(p.numel() for p in run.model.parameters())  # AdamW's two moments, which do not exist yet
    peak, total = memory(args.device)
    figure = f"peak {(peak + states) / 2**30:.1f} of {total / 2**30:.1f} GiB"
    return peak + states < 0.9 * total, figure, "lower --micro_batch_tokens, or use --gradient_checkpointing"


def memory(device):
    """(peak bytes of this process so far, bytes in all) on the device."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(), torch.cuda.get_device_properties(device).total_memory
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


CHECKS = (
    check_template, check_sampling_fields, check_masks, check_sampled_logps, check_kl_and_ratio, check_gradient,
    check_gold, check_spread, check_memory,
)  # fmt: skip


def loss_inputs(batch, rows):
    """compute_loss's positional arguments after the two models, with advantage 1 in every row."""
    ones = torch.ones(len(rows), device=batch.completion_ids.device)
    return batch.prompt_completion_ids, batch.completion_ids, batch.attention_mask, batch.completion_mask, ones


def pad(batch, pad_token_id):
    """The same rows with three more columns of padding on either side."""

    def widen(tensor, left, right, value=0):
        return torch.nn.functional.pad(tensor, (left, right), value=value)

    return llms.Rollout(
        prompt_ids=widen(batch.prompt_ids, 3, 0, pad_token_id),
        completion_ids=widen(batch.completion_ids, 0, 3, pad_token_id),
        attention_mask=widen(batch.attention_mask, 3, 3),
        completion_mask=widen(batch.completion_mask, 0, 3),
        sampled_logps=widen(batch.sampled_logps, 0, 3),
        finished=batch.finished,
        texts=batch.texts,
    )


class Sampled:
    """A few groups of completions, as training would sample them, and one prompt's rows of it."""

    def __init__(self, args, run):
        self.examples = run.train_loader.next_batch(PROMPTS)
        with utils.isolated_seed(args.seed):
            self.rollout = main.sample(args, run, self.examples, args.group_size, args.temperature)
        repeated = [example for example in self.examples for _ in range(args.group_size)]
        self.rewards = main.reward(run.evaluator, repeated, self.rollout)
        rows = list(range(min(4, args.group_size)))
        self.piece = rows, self.rollout.select(rows)


def run_checks(args, run):
    """Print a line per check; returns the names of those that failed."""
    sampled, failed = Sampled(args, run), []
    for check in CHECKS:
        start = time.perf_counter()
        ok, figure, advice = check(args, run, sampled)
        name = check.__name__.removeprefix("check_").replace("_", " ")
        print(f"{'pass' if ok else 'FAIL'}  {name:16s} {figure} ({time.perf_counter() - start:.1f} s)")
        if not ok:
            print(f"      {check.__doc__} To do: {advice}.")
            failed.append(name)
    return failed


def check_judge(args, lines):
    """The report of main.py's judge on a group of stories for each of so many opening lines: printed, and kept."""
    if lines < 1:
        raise ValueError("--check_judge takes a number of opening lines, at least 1")
    args.eval_only = True  # so that the setup of a training run makes no report of its own
    prepared = main.setup(args)
    if not isinstance(prepared.evaluator, CreativeWritingEvaluator):
        raise ValueError(f"--dataset_name {args.dataset_name} has no judge; use --dataset_name creative")
    judge_report.make(args, prepared, main.sample, lines)
    print(f"kept in {args.output_dir / 'judge_report.json'}")


def run(argv=None):
    parser = flags.ArgumentParser(description="Check a model, data and hardware; any other flag is one of main.py's.")
    parser.add_argument("--check_judge", type=int, metavar="LINES", help="only the report of the judge of stories")
    own, rest = parser.parse_known_args(argv)
    args = flags.parse_args(rest)
    try:
        processes.check_alone()
        if own.check_judge is not None:
            return check_judge(args, own.check_judge)
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
