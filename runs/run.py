"""The record of a run, and its life: starting, going on after a stop at any moment, and ending with one clear line.

`args` are the flags of main.py, sft.py or experiments/expert_iteration.py.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from logs import jsonl
from runs import checkpoints, processes, write_logs
from runs.signals import Diverged, Guard, Halted, Interrupted, Interrupts


@dataclass
class Run:
    """What a script trains with, made by its `setup`, and how far it has come."""

    model: torch.nn.Module  # the policy, sharded where there are several processes
    tokenizer: Any
    train_loader: Any
    test_loader: Any
    evaluator: Any
    sampler: torch.nn.Module  # the weights that sample: the policy itself, or a copy of it
    base_model: torch.nn.Module | None = None  # the frozen reference, where there is one
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None  # None: the script sets the learning rate itself
    examples: list[dict] = field(default_factory=list)  # what supervised fine-tuning trains on
    saves: bool = True  # whether checkpoints are kept
    stages: write_logs.Stages = field(default_factory=write_logs.Stages)
    guard: Guard = field(default_factory=Guard)
    interrupts: Interrupts = field(default_factory=Interrupts)
    bar: Any = None
    step: int = 0  # finished iterations, or updates
    ei_step: int = 0  # finished expert iterations
    total_tokens: int = 0
    evaluated_step: int | None = None  # the step of the last evaluation, and its strict accuracy
    accuracy: float | None = None
    start: float = field(default_factory=time.perf_counter)  # earlier by what the run took before it was resumed
    boundary: dict = field(default_factory=dict)  # see mark

    def mark(self) -> None:
        """Keep the state that sampling changes: a run stopped in the middle of a step goes on from its beginning."""
        self.boundary = {
            "rng": processes.get_rng_state(),
            "train_loader": self.train_loader.state_dict(),
            "total_tokens": self.total_tokens,
            "ei_step": self.ei_step,
        }

    def progress_bar(self, steps: int, desc: str, unit: str = "step"):
        """The steps still to be taken, of so many in all."""
        self.bar = write_logs.bar(range(self.step + 1, steps + 1), initial=self.step, total=steps, desc=desc, unit=unit)
        return self.bar


# The flags that a resumed run may have otherwise than before: none of them changes what is learnt.
MAY_CHANGE = (
    "num_train_iters", "eval_iterations", "save_iterations", "eval_updates", "save_updates", "keep_checkpoints",
    "n_ei_steps", "max_kl", "output_dir", "resume", "device", "micro_batch_tokens", "max_concurrent_sequences",
    "judge_base_url", "judge_concurrency", "judge_timeout", "judge_max_retries", "max_judge_failures",
    "min_judge_spread",
)  # fmt: skip


def check_output_dir(args) -> None:
    """Raise ValueError where the output directory already holds a run, or with --resume holds none or another."""
    if not processes.is_main():  # it alone reads and writes there
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
        now = json.loads(jsonl.dumps(vars(args)))
        changed = [name for name in now if name not in MAY_CHANGE and now[name] != before.get(name)]
        if changed:
            was = ", ".join(f"--{name} was {before.get(name)}, not {now[name]}" for name in changed)
            raise ValueError(f"--resume continues a run with its own flags: {was}")


def run_to_the_end(args, setup: Callable, train: Callable) -> int:
    """The life of a script: set up, start or resume, train, and leave with one clear line and the right exit code."""
    try:
        run = setup(args)
        processes.barrier()  # before this, no process may fail to see that the output directory holds no run
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
        advice = "the same command with --resume continues" if run.saves else "it kept no checkpoint"
        save_checkpoint(args, run)
        processes.say(f"stopped by {interrupt} after step {run.step}; {advice}")
        processes.leave()
        return 130
    except Diverged as diverged:
        processes.say(f"error: {diverged}; logs and earlier checkpoints are in {folder}")
        return 1
    except Halted as halted:
        advice = f"; stopped after step {run.step}, --resume continues" if run.saves else ""
        if processes.world_size() == 1:  # of several processes the others may not have halted
            save_checkpoint(args, run)
        print(f"error: {halted}{advice}", file=sys.stderr)
        return 1
    except OSError as error:  # a full disk or a lost folder
        advice = ", --resume continues it" if run.saves else ""
        print(f"error: {error}; what was written before is in {folder}{advice}", file=sys.stderr)
        return 1
    finally:
        run.interrupts.uninstall()
    processes.leave()
    print(f"done: logs and checkpoints are in {folder}; plot them: python plotter.py --log_dir {folder}")
    return 0


def start(args, run: Run) -> None:
    """Make the output directory and args.json, and with --resume go back to the newest checkpoint."""
    if processes.world_size() == 1:  # a script that never joined others
        processes.check_alone()
    if processes.is_main():
        args.output_dir.mkdir(parents=True, exist_ok=True)
        jsonl.write_json(args.output_dir / "args.json", run_description(args, run.model))
    run.mark()
    if args.resume:
        resume(args, run)


def run_description(args, model) -> dict:
    """What args.json holds: every flag, the command, the commit, versions, hardware, parameter count."""
    root = Path(__file__).parent.parent
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=root)
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "args": vars(args),
        "command": " ".join(sys.argv),
        "commit": git.stdout.strip() or None,
        "versions": {"python": sys.version.split()[0]} | {p: version(p) for p in ("torch", "transformers", "numpy")},
        "hardware": {"cuda": cuda, "cpu_threads": torch.get_num_threads(), "processes": processes.world_size()},
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def save_checkpoint(args, run: Run) -> None:
    """Write the state after run.step, from which --resume continues as if the run had never stopped."""
    if not run.saves:
        return
    run.interrupts.hold()
    weights, optimizer = checkpoints.gather_state(run.model, run.optimizer)
    state = run.boundary | {"optimizer": optimizer, "elapsed": time.perf_counter() - run.start}
    state["rng"] = processes.gather([run.boundary["rng"]])  # of each process
    if run.scheduler:
        state["scheduler"] = run.scheduler.state_dict()
    accuracy = run.accuracy if run.evaluated_step == run.step else None
    if processes.is_main():
        checkpoints.write(
            args.output_dir, run.step, run.model, run.tokenizer, state,
            weights=weights, accuracy=accuracy, keep=args.keep_checkpoints,
        )  # fmt: skip
    run.interrupts.release()


def resume(args, run: Run) -> None:
    """Continue from the newest intact checkpoint in args.output_dir; from the beginning if there is none yet."""
    found = processes.from_main(checkpoints.find(args.output_dir) if processes.is_main() else None)
    if found is None:
        print(f"no checkpoint in {args.output_dir} yet: starting from the beginning")
        checkpoints.rewind(args.output_dir, -1, {})  # the evaluation at step 0 goes as well
        return
    path, manifest = found
    state = checkpoints.load(path, run.model, run.optimizer)
    if run.scheduler:
        run.scheduler.load_state_dict(state["scheduler"])
    run.train_loader.load_state_dict(state["train_loader"])
    processes.resume_rng_state(state["rng"], args.seed + 7919 * manifest["step"])
    checkpoints.rewind(args.output_dir, manifest["step"], manifest["log_sizes"])
    run.step, run.ei_step, run.total_tokens = manifest["step"], state["ei_step"], state["total_tokens"]
    run.start -= state["elapsed"]
    run.mark()
    log = args.output_dir / "eval_log.jsonl"
    evaluations = processes.from_main(jsonl.read(log)[-1:] if processes.is_main() and log.exists() else [])
    if evaluations:
        run.evaluated_step, run.accuracy = evaluations[0]["step"], evaluations[0]["accuracy"]
    print(f"continuing after step {run.step} from {path}")
