"""What a run leaves behind, and how it can stop at any moment and go on: logs, checkpoints, signals, guards.

`args` are the flags of main.py, sft.py or experiments/expert_iteration.py; `run` is what its `setup` made.
"""

import json
import math
import signal
import subprocess
import sys
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

import torch
from tqdm import tqdm

import checkpoints
import distributed
import llms
import utils

# ---------------------------------------------------------------------------------------------------------------------
# What a run writes after each step, and how it goes on from there
# ---------------------------------------------------------------------------------------------------------------------


# The flags that a resumed run may have otherwise than before: none of them changes what is learnt.
MAY_CHANGE = (
    "num_train_iters", "eval_iterations", "save_iterations", "eval_updates", "save_updates", "keep_checkpoints",
    "max_kl", "output_dir", "resume", "device", "micro_batch_tokens", "max_concurrent_sequences", "judge_base_url",
    "judge_concurrency", "judge_timeout", "judge_max_retries", "max_judge_failures", "min_judge_spread",
)  # fmt: skip


def check_output_dir(args):
    """Raise ValueError where the output directory already holds a run, or with --resume holds none or another."""
    if not distributed.is_main():  # it alone reads and writes there
        return
    holds_a_run = (args.output_dir / "args.json").exists()
    if holds_a_run and not args.resume:
        raise ValueError(f"--output_dir {args.output_dir} already holds a run; name another directory, or --resume it")
    if args.output_dir.exists() and not args.output_dir.is_dir():
        raise ValueError(f"--output_dir {args.output_dir} is a file; name a directory")
    if args.resume and not holds_a_run:
        raise ValueError(f"--resume: there is no run in --output_dir {args.output_dir}")
    if args.resume:
        try:
            before = dict(json.loads((args.output_dir / "args.json").read_text("utf-8"))["args"])
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{args.output_dir / 'args.json'}: not the args.json of a run ({error!r})") from error
        now = json.loads(json.dumps(vars(args), default=str))
        changed = [name for name in now if name not in MAY_CHANGE and now[name] != before.get(name)]
        if changed:
            was = ", ".join(f"--{name} was {before.get(name)}, not {now[name]}" for name in changed)
            raise ValueError(f"--resume continues a run with its own flags: {was}")


def run_to_the_end(args, setup, train):
    """The life of a script: set up, start or resume, train, and leave with one clear line and the right exit code."""
    try:
        run = setup(args)
        distributed.barrier()  # before this, no process may fail to see that the output directory holds no run
        start(args, run)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    run.interrupts.install()
    folder = args.output_dir
    try:
        train(args, run)
    except Interrupted as interrupt:
        run.interrupts.ignore()
        advice = "it kept no checkpoint"
        if not args.eval_only:
            save_checkpoint(args, run)
            advice = "the same command with --resume continues"
        say(f"stopped by {interrupt} after step {run.step}; {advice}")
        distributed.leave()
        return 130
    except Diverged as diverged:
        say(f"error: {diverged}; logs and earlier checkpoints are in {folder}")
        return 1
    except utils.Halted as halted:
        advice = "" if args.eval_only else f"; stopped after step {run.step}, --resume continues"
        if not args.eval_only and distributed.world_size() == 1:  # of several processes the others may not have halted
            save_checkpoint(args, run)
        print(f"error: {halted}{advice}", file=sys.stderr)
        return 1
    except OSError as error:  # a full disk or a lost folder
        advice = "" if args.eval_only else ", --resume continues it"
        print(f"error: {error}; what was written before is in {folder}{advice}", file=sys.stderr)
        return 1
    finally:
        run.interrupts.uninstall()
    distributed.leave()
    print(f"done: logs and checkpoints are in {folder}; plot them: python plotter.py --log_dir {folder}")
    return 0


def say(text):
    """One line on stderr, of what all processes know."""
    if distributed.is_main():
        print(text, file=sys.stderr)


def start(args, run):
    """Make the output directory and args.json, and with --resume go back to the newest checkpoint."""
    if distributed.world_size() == 1:  # a script that never joined others
        distributed.check_alone()
    if distributed.is_main():
        args.output_dir.mkdir(parents=True, exist_ok=True)
    utils.write_json(args.output_dir / "args.json", run_description(args, run.model))
    if args.resume:
        resume(args, run)


def run_description(args, model):
    """What args.json holds: every flag, the command, the commit, versions, hardware, parameter count."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "args": vars(args),
        "command": " ".join(sys.argv),
        "commit": git.stdout.strip() or None,
        "versions": {"python": sys.version.split()[0]} | {p: version(p) for p in ("torch", "transformers", "numpy")},
        "hardware": {"cuda": cuda, "cpu_threads": torch.get_num_threads(), "processes": distributed.world_size()},
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def progress_bar(args, run):
    """The steps still to be taken."""
    steps, total = range(run.step + 1, args.num_train_iters + 1), args.num_train_iters
    run.bar = bar(steps, initial=run.step, total=total, desc="GRPO", unit="step")
    return run.bar


def bar(*args, **options):
    """A tqdm bar, drawn by the first process alone."""
    return tqdm(*args, dynamic_ncols=True, disable=not distributed.is_main(), **options)


def save_iteration(args, run, step, metrics, examples, rollout, rewards, weights):
    """Append to train_log.jsonl, write the transcript of every completion, print one line, warn; may raise Diverged."""
    run.step, run.total_tokens = step, run.total_tokens + metrics["sampled_tokens"]
    seconds = run.stages.flush()
    head = {"step": step, "epoch": run.train_loader.state_dict()["epoch"]}
    tail = {"total_tokens": run.total_tokens, "elapsed": time.perf_counter() - run.start}
    records = completion_records(run.evaluator, examples, rollout, rewards, advantage=weights)
    utils.write_jsonl(args.output_dir / "rollouts" / f"step_{step:06d}.jsonl", records)
    utils.append_jsonl(args.output_dir / "train_log.jsonl", head | metrics | tail | seconds)
    run.boundary = resumable_state(run)
    kl = f"kl {metrics['kl']:.4f} | " if "kl" in metrics else ""
    run.bar.set_postfix(reward=f"{metrics['reward']:.3f}")
    tqdm.write(
        f"step {step:4d} | reward {metrics['reward']:.3f} | accuracy {metrics['accuracy']:6.1%} strict"
        f" {metrics['accuracy_flexible']:6.1%} flexible | {kl}length {metrics['response_length']:.1f} |"
        f" gradient norm {metrics['grad_norm']:.3f} | {seconds['time/total']:.2f} s"
    )
    if metrics["skipped_updates"]:
        tqdm.write(
            f"warning: an update was skipped, its loss or gradient is not finite; see rollouts/step_{step:06d}.jsonl"
        )
    for warning in run.guard.check(metrics):
        tqdm.write(f"warning: {warning}")


def save_evaluation(args, run, metrics, records):
    """Append to eval_log.jsonl, write every problem with its completion, print one line."""
    totals = {"total_tokens": run.total_tokens, "elapsed": time.perf_counter() - run.start}
    utils.write_jsonl(args.output_dir / "eval" / f"step_{run.step:06d}.jsonl", records)
    utils.append_jsonl(args.output_dir / "eval_log.jsonl", {"step": run.step} | metrics | totals)
    run.evaluated_step, run.accuracy = run.step, metrics["accuracy"]
    tqdm.write(
        f"evaluation at step {run.step}: accuracy {metrics['accuracy']:.1%}"
        f" [{metrics['accuracy_low']:.1%}, {metrics['accuracy_high']:.1%}] strict, {metrics['accuracy_flexible']:.1%}"
        f" [{metrics['accuracy_flexible_low']:.1%}, {metrics['accuracy_flexible_high']:.1%}] flexible"
        f" (n = {metrics['n']}, {metrics['time/total']:.1f} s)"
    )


CATEGORIES = {  # name in eval_log.jsonl: what it means, and the text by which its rows are found in a transcript
    "format1_answer1": ("format 1, answer 1", '"format": true, "correct_strict": true'),
    "format1_answer0": ("format 1, answer 0", '"format": true, "correct_strict": false'),
    "format0_answer0": ("format 0, answer 0", '"format": false, "correct_strict": false'),
}


def print_categories(args, metrics):
    """The three categories of format and answer with their counts, how to list ten of each, accuracies by group."""
    path = args.output_dir / "eval" / "step_000000.jsonl"
    for name, (meaning, text) in CATEGORIES.items():
        print(f"{meaning}: {metrics[f'count/{name}']}; list ten: grep -m 10 '{text}' {path}")
    for key, value in metrics.items():
        if key.startswith(("accuracy_level/", "accuracy_subject/", "pass")):
            print(f"{key}: {value:.1%}")


def save_checkpoint(args, run):
    """Write the state after run.step iterations, from which --resume continues as if the run had never stopped."""
    run.interrupts.hold()
    weights, optimizer = llms.gather_state(run.model, run.optimizer)
    state = run.boundary | {"optimizer": optimizer, "elapsed": time.perf_counter() - run.start}
    if hasattr(run, "scheduler"):
        state["scheduler"] = run.scheduler.state_dict()
    if "rng" in run.boundary:  # the random state of each process
        state["rng"] = distributed.gather([run.boundary["rng"]])
    accuracy = run.accuracy if run.evaluated_step == run.step else None
    if distributed.is_main():
        checkpoints.write(
            args.output_dir, run.step, run.model, run.tokenizer, state,
            weights=weights, accuracy=accuracy, keep=args.keep_checkpoints,
        )  # fmt: skip
    run.interrupts.release()


def resumable_state(run):
    """The state that sampling changes, taken after each iteration: a run can be stopped in the middle of the next."""
    return {
        "rng": utils.get_rng_state(),
        "train_loader": run.train_loader.state_dict(),
        "total_tokens": run.total_tokens,
    }


def resume(args, run):
    """Continue from the newest intact checkpoint in args.output_dir; from the beginning if there is none yet."""
    found = distributed.from_main(checkpoints.find(args.output_dir) if distributed.is_main() else None)
    if found is None:
        print(f"no checkpoint in {args.output_dir} yet: starting from the beginning")
        checkpoints.rewind(args.output_dir, -1, {})  # the evaluation at step 0 goes as well
        return
    path, manifest = found
    state = checkpoints.load(path, run.model, run.optimizer)
    if hasattr(run, "scheduler"):
        run.scheduler.load_state_dict(state["scheduler"])
    if "train_loader" in state:  # supervised fine-tuning uses neither the loader nor random numbers
        run.train_loader.load_state_dict(state["train_loader"])
        state["rng"] = resume_random_numbers(args, state["rng"], manifest["step"])
    llms.refresh_sampler(run.sampler, run.model)
    checkpoints.rewind(args.output_dir, manifest["step"], manifest["log_sizes"])
    run.step, run.total_tokens, run.start = manifest["step"], state["total_tokens"], run.start - state["elapsed"]
    run.boundary = {name: state[name] for name in run.boundary}
    evaluations = distributed.from_main(utils.read_jsonl(args.output_dir / "eval_log.jsonl")[-1:])
    if evaluations:
        run.evaluated_step, run.accuracy = evaluations[0]["step"], evaluations[0]["accuracy"]
    print(f"continuing after step {run.step} from {path}")


def resume_random_numbers(args, states, step):
    """Set this process's random state, one of those saved, or under another number of processes a new one."""
    if len(states) == distributed.world_size():
        utils.set_rng_state(states[distributed.rank()])
    else:
        print(f"saved by {len(states)} processes, continued by {distributed.world_size()}: random numbers start anew")
        utils.seed_everything(args.seed + 7919 * step)
    return utils.get_rng_state()


# ---------------------------------------------------------------------------------------------------------------------
# What is logged of a batch of completions
# ---------------------------------------------------------------------------------------------------------------------


def rollout_metrics(evaluator, rewards, rollout):
    """What a rollout batch looks like: reward parts, accuracies, lengths, share cut at the maximum length."""
    lengths = rollout.lengths.float().cpu()
    correct = torch.tensor([detail["correct_strict"] for detail in rewards.details])
    return evaluator.get_reward_breakdown(rewards) | {
        "accuracy": correct.float().mean().item(),
        "accuracy_flexible": sum(detail["correct_flexible"] for detail in rewards.details) / len(correct),
        "response_length": lengths.mean().item(),
        "response_length_correct": utils.masked_mean(lengths, correct).item(),
        "response_length_incorrect": utils.masked_mean(lengths, ~correct).item(),
        "truncated_fraction": (~rollout.finished).float().mean().item(),
        "sampled_tokens": int(lengths.sum()),
    }


def format_and_answer_counts(details):
    """How many completions have the required form and the right answer in it, the form alone, or neither."""
    pairs = [(detail["format"], detail["correct_strict"]) for detail in details]
    named = {"format1_answer1": (True, True), "format1_answer0": (True, False), "format0_answer0": (False, False)}
    return {f"count/{name}": pairs.count(pair) for name, pair in named.items()}


def accuracy_by(column, examples, correct):
    """{"accuracy_level/3": share correct, ...} over the values of a column; nothing where the data have none."""
    groups = defaultdict(list)
    for example, right in zip(examples, correct, strict=True):
        if example.get(column) is not None:
            groups[example[column]].append(right)
    return {f"accuracy_{column}/{value}": sum(groups[value]) / len(groups[value]) for value in sorted(groups)}


def completion_records(evaluator, examples, rollout, rewards, **columns):
    """One dict per completion, as rollouts/ and eval/ keep them; columns are (N,) tensors to add."""
    total, records = evaluator.total(rewards), []
    for i, (example, detail) in enumerate(zip(examples, rewards.details, strict=True)):
        parts = dict(zip(evaluator.reward_names, rewards.per_function[i].tolist(), strict=True))
        records.append(
            {
                "id": example["id"],
                "prompt": example["prompt"],
                "completion": rollout.texts[i],
                "gold": example["answer"],
            }
            | {name: example[name] for name in ("level", "subject") if name in example}
            | detail
            | {f"rewards/{name}": value for name, value in parts.items()}
            | {"reward": total[i], "length": rollout.lengths[i], "finished": rollout.finished[i]}
            | {name: column[i] for name, column in columns.items()}
        )
    return records


# ---------------------------------------------------------------------------------------------------------------------
# Signals
# ---------------------------------------------------------------------------------------------------------------------


class Interrupted(Exception):
    """A signal asked the run to stop, at a place where it can be continued from."""


class Interrupts:
    """Turns SIGTERM and Ctrl-C into Interrupted: at once, or where `hold` was called, at the next `release`.

    Several processes stop at the same `release`, whichever of them was asked to: the rest would wait for one that left.
    """

    def __init__(self):
        self.requested, self.held = None, False

    def install(self):
        self.before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}

    def uninstall(self):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _handle(self, number, frame):
        self.requested = signal.Signals(number).name
        if not self.held and distributed.world_size() == 1:
            raise Interrupted(self.requested)

    def hold(self):
        self.held = True

    def release(self):
        self.held = False
        requested = next(filter(None, distributed.gather([self.requested])), None)
        if requested:
            raise Interrupted(requested)

    def ignore(self):
        """The run is being saved and left: further signals change nothing."""
        self.requested = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


# ---------------------------------------------------------------------------------------------------------------------
# Guards
# ---------------------------------------------------------------------------------------------------------------------


class Diverged(Exception):
    """Training has left the range in which it could recover; the message says by what measure."""


class Guard:
    """Watches the metrics of each iteration: stops a diverged run, and says once, in words, what looks wrong.

    Diverged: the mean KL above max_kl nats, or an update that is not finite, in `patience` iterations in a row.
    """

    def __init__(self, max_kl=3.0, patience=3):
        self.max_kl, self.patience = max_kl, patience
        self.high_kl = self.non_finite = 0
        self.warned, self.first_entropy = set(), None

    def check(self, metrics):
        """Returns new warnings, as lines of text. Raises Diverged."""
        kl, entropy = metrics.get("kl", 0.0), metrics.get("entropy")
        self.non_finite = self.non_finite + 1 if metrics["skipped_updates"] else 0
        self.high_kl = self.high_kl + 1 if kl > self.max_kl or not math.isfinite(kl) else 0
        advice = "lower --learning_rate or raise --beta, and start again from a checkpoint"
        if self.non_finite >= self.patience:
            raise Diverged(
                f"updates that are not finite in {self.non_finite} iterations in a row: the run has diverged; {advice}"
            )
        if self.high_kl >= self.patience:
            raise Diverged(
                f"mean KL to the reference was above {self.max_kl:g} nats in {self.high_kl} iterations in a row, now"
                f" {kl:.3g}: the run has diverged; {advice}"
            )
        signs = {}
        if entropy is not None:
            self.first_entropy = self.first_entropy or entropy
            if entropy < 0.05 * self.first_entropy:
                signs["entropy"] = (
                    f"entropy fell to {entropy:.4f} nats, under 5 % of its start: the samples of a group hardly differ,"
                    " so they teach little; lower --learning_rate, or raise --beta or --temperature"
                )
        if metrics.get("zero_std_fraction", 0) > 0.9:
            signs["saturation"] = (
                f"in {metrics['zero_std_fraction']:.0%} of the groups all rewards are equal, which teaches nothing: the"
                " reward is saturated or out of reach; use harder or easier problems"
            )
        new = [text for name, text in signs.items() if name not in self.warned]
        self.warned |= signs.keys()
        return new
