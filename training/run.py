"""The record of a run, and its life: starting, going on after a stop at any moment, and ending with one clear line.

`args` are the flags of main.py, sft.py or experiments/expert_iteration.py.
"""

import json
import math
import os
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import distributed
from logs import jsonl
from logs.read import read_args
from training import checkpoints, write_logs
from training.lock import Lock
from training.signals import Diverged, Guard, Interrupted, Interrupts


@dataclass
class Run:
    """What a script trains with, made by its `setup`, and how far it has come."""

    model: torch.nn.Module  # the policy, sharded where there are several processes
    tokenizer: Any
    train_loader: Any
    eval_loader: Any
    evaluator: Any
    sampler: torch.nn.Module  # the weights that sample: the policy itself, or a copy of it
    base_model: torch.nn.Module | None = None  # the frozen reference, where there is one
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None  # None: the script sets the learning rate itself
    examples: list[dict] = field(default_factory=list)  # what supervised fine-tuning trains on
    saves: bool = True  # whether checkpoints are kept
    saved_step: int | None = None  # of the newest checkpoint
    stages: write_logs.Stages = field(default_factory=write_logs.Stages)
    guard: Guard = field(default_factory=Guard)
    interrupts: Interrupts = field(default_factory=Interrupts)
    bar: Any = None
    step: int = 0  # finished iterations, or updates
    ei_step: int = 0  # finished expert iterations
    total_tokens: int = 0
    evaluated_step: int | None = None  # the step of the last evaluation, and its strict accuracy
    accuracy: float | None = None
    start: float = field(
        default_factory=time.perf_counter
    )  # earlier by what the run took before it was resumed
    boundary: dict = field(default_factory=dict)  # see mark
    moved: bool = False  # whether an optimiser step was begun since then

    def mark(self) -> None:
        """A step is finished: keep the state that sampling changes, so that the next one can be begun again."""
        self.boundary = {
            "rng": distributed.get_rng_state(),
            "train_loader": self.train_loader.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "total_tokens": self.total_tokens,
            "ei_step": self.ei_step,
        }
        self.moved = False

    def progress_bar(self, steps: int):
        """The steps still to be taken, of so many in all."""
        left = range(self.step + 1, steps + 1)
        self.bar = write_logs.bar(left, initial=self.step, total=steps, desc="GRPO", unit="step")
        return self.bar


# The flags that a resumed run may have otherwise than before: none of them changes what is learnt, though on another
# device other samples are drawn.
MAY_CHANGE = (
    "num_train_iters",
    "eval_iterations",
    "save_iterations",
    "eval_updates",
    "save_updates",
    "keep_checkpoints",
    "n_ei_steps",
    "max_kl",
    "output_dir",
    "resume",
    "device",
    "micro_batch_tokens",
    "max_concurrent_sequences",
    "judge_base_url",
    "judge_concurrency",
    "judge_timeout",
    "judge_max_retries",
    "max_judge_failures",
    "min_judge_spread",
    "report_to",
)


def claim(args) -> Lock | None:
    """Lock the output directory, and see that it holds no other run (with --resume: this one). Raises ValueError."""
    folder, is_evaluation = args.output_dir, vars(args).get("eval_only", False)
    if folder == Path("."):
        raise ValueError("--output_dir is empty, or the current directory: name one for the run")
    if not distributed.is_main():  # it alone reads and writes there
        return None
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output_dir {folder} is a file; name a directory")
    if args.resume and not (folder / "args.json").exists():
        raise ValueError(f"--resume: there is no run in --output_dir {folder}")
    lock = Lock(folder)
    try:
        before = read_args(folder / "args.json")
        written = *checkpoints.LOGS, *checkpoints.TRANSCRIPTS, "checkpoints"
        left = [name for name in written if (folder / name).exists()]
        if left and not before:
            raise ValueError(
                f"--output_dir {folder} holds {', '.join(left)} without the args.json of their run; move them away, or"
                " name another directory"
            )
        if before and not args.resume and not before.get("eval_only"):
            advice = "" if is_evaluation else ", or --resume it"
            raise ValueError(
                f"--output_dir {folder} already holds a run; name another directory{advice}"
            )
        if args.resume and (is_evaluation or before.get("eval_only")):
            raise ValueError(
                "--resume continues training, and --eval_only does not train: leave one of them out"
            )
        if args.resume:
            decays = (
                before.get("lr_schedule", "constant") != "constant"
            )  # to 0 at the end, which must then stay
            fixed = {
                k: v
                for k, v in vars(args).items()
                if k not in MAY_CHANGE or decays and k == "num_train_iters"
            }
            now = json.loads(jsonl.dumps(fixed))
            if unknown := sorted(now.keys() - before.keys()):
                raise ValueError(
                    f"--resume: {folder} is a run of another script or version, without --{unknown[0]}"
                )
            if changed := [name for name in now if now[name] != before[name]]:
                was = ", ".join(f"--{name} was {before[name]}, not {now[name]}" for name in changed)
                raise ValueError(f"--resume continues a run with its own flags: {was}")
    except BaseException:
        lock.release()
        raise
    return lock


def run_to_the_end(args, setup: Callable, train: Callable, several: bool = True) -> int:
    """The life of a script: claim its directory, set up, start or resume, train, and leave with the right exit code.

    several: whether the script may run as several processes. Whatever ends it is said in one line. 0: done. 1: it
    failed while training. 2: what the user gave it is wrong. 130: a signal stopped it.
    """
    lock, interrupts = None, Interrupts()
    interrupts.install()
    interrupts.loading = True
    try:
        distributed.init(args.device, several)
        vars(args).update(
            distributed.from_main(vars(args))
        )  # on several nodes it alone has the directory of a run
        lock = claim(args)
        run = setup(args)
        run.interrupts = interrupts
        distributed.barrier()  # no process trains before all are ready
        start(args, run)
        interrupts.loading = False
        code = train_to_the_end(args, run, train)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as interrupt:
        distributed.print_error(f"stopped by {interrupt} while loading")
        return 130
    finally:
        interrupts.uninstall()
        if lock:
            lock.release()
    return distributed.finish(code)


def train_to_the_end(args, run: Run, train: Callable) -> int:
    """Train, and whatever ends that, keep what can be kept."""
    folder = args.output_dir
    try:
        train(args, run)
    except Interrupted as interrupt:
        run.interrupts.ignore()
        lost = run.saves and not save_checkpoint(args, run)
        advice = (
            "; this step could not be saved"
            if lost
            else "; --resume continues"
            if run.saves
            else ""
        )
        distributed.print_error(f"stopped by {interrupt} after step {run.step}{advice}")
        return 130
    except Diverged as diverged:
        distributed.print_error(f"error: {diverged}; logs and earlier checkpoints are in {folder}")
        return 1
    except Exception as error:
        print(f"error: {rescue(args, run, error)}", file=sys.stderr)
        return 1
    if run.saves and run.saved_step != run.step:
        distributed.print_error(
            f"error: the last checkpoint could not be written to {folder}; --resume makes it again"
        )
        return 1
    kept = "logs and checkpoints" if run.saves else "logs"
    print(f"done: {kept} are in {folder}; plot them: python plotter.py --log_dir {folder}")
    return 0


def rescue(args, run: Run, error: Exception) -> str:
    """Keep what can be kept of a run that an exception ends, and say in one line what happened and where things are.

    The state of the last finished step is saved where the weights are still those; with several processes it is not,
    since the others may be anywhere.
    """
    text, where = " ".join(str(error).split())[:500], args.output_dir / "traceback.txt"
    if not isinstance(
        error, OSError
    ):  # a full disk, or what the run depends on, has failed: not the program
        text = f"{type(error).__name__}: {text}; the traceback is in {where}"
        with suppress(OSError):
            where.write_text(traceback.format_exc(), "utf-8")
    if not run.saves:
        return text
    if not run.moved and distributed.world_size() == 1 and save_checkpoint(args, run):
        return f"{text}; stopped after step {run.step}, which is saved: --resume continues"
    newest = max(checkpoints.finished(args.output_dir), default=None)
    found = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint yet"
    return f"{text}; {found}, and --resume continues from there"


def start(args, run: Run) -> None:
    """With --resume go back to the newest checkpoint; write args.json."""
    run.mark()
    if args.resume:
        resume(args, run)
    else:
        checkpoints.rewind(args.output_dir, {}, {})  # of an earlier --eval_only
    if distributed.is_main():
        jsonl.write_json(args.output_dir / "args.json", run_description(args, run.model))
    if run.optimizer:
        run.optimizer.register_step_pre_hook(lambda *_: setattr(run, "moved", True))


def run_description(args, model) -> dict:
    """What args.json holds: every flag, the command, the commit, versions, hardware, parameter count."""
    commit = None
    with suppress(OSError):  # no git here
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
        )
        commit = git.stdout.strip() or None
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    here = os.environ.get("LOCAL_WORLD_SIZE")  # torchrun's
    launcher = (
        ["torchrun", f"--nproc_per_node={here}"] if distributed.world_size() > 1 else ["python"]
    )
    return {
        "args": vars(args),
        "command": shlex.join([*launcher, *sys.argv]),
        "commit": commit,
        "versions": {"python": sys.version.split()[0]}
        | {p: version(p) for p in ("torch", "transformers", "numpy")},
        "hardware": {
            "cuda": cuda,
            "cpu_threads": torch.get_num_threads(),
            "processes": distributed.world_size(),
        },
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def save_checkpoint(args, run: Run) -> bool:
    """Write the state after run.step, from which --resume continues as if the run had never stopped; whether it is."""
    run.interrupts.hold()
    weights, optimizer = checkpoints.gather_state(run.model, run.optimizer)
    state = run.boundary | {"optimizer": optimizer, "elapsed": time.perf_counter() - run.start}
    state["rng"] = distributed.gather([run.boundary["rng"]])  # of each process
    accuracy, written = run.accuracy if run.evaluated_step == run.step else None, None
    if distributed.is_main():
        written = checkpoints.write(
            args.output_dir,
            run.step,
            run.model,
            run.tokenizer,
            state,
            weights=weights,
            accuracy=accuracy,
            keep=args.keep_checkpoints,
        )
    if written or not distributed.is_main():
        run.saved_step = run.step
    run.interrupts.release()
    return run.saved_step == run.step


def resume(args, run: Run) -> None:
    """Continue from the newest intact checkpoint in args.output_dir; from the beginning if there is none yet."""
    found = distributed.from_main(
        checkpoints.find(args.output_dir) if distributed.is_main() else None
    )
    log = args.output_dir / "train_log.jsonl"
    steps = log.read_bytes().count(b"\n") if distributed.is_main() and log.exists() else 0
    if found is None and steps > vars(args).get(
        "save_iterations", vars(args).get("save_updates", math.inf)
    ):
        raise ValueError(
            f"{log} has {steps} steps, but no intact checkpoint is left: name another --output_dir"
        )
    if found is None:
        print(f"no checkpoint in {args.output_dir} yet: starting from the beginning")
        checkpoints.rewind(args.output_dir, {}, {})  # the evaluation at step 0 goes as well
        return
    path, manifest = found
    state = checkpoints.load(path, run.model, run.optimizer)
    if missing := run.boundary.keys() - state.keys():
        raise ValueError(
            f"{path} lacks {sorted(missing)}: another version wrote it; it still loads as --model_name"
        )
    if run.scheduler:
        run.scheduler.load_state_dict(state["scheduler"])
    run.train_loader.load_state_dict(state["train_loader"])
    distributed.resume_rng_state(state["rng"], args.seed + 7919 * manifest["step"])
    run.step = run.saved_step = manifest["step"]
    run.ei_step, run.total_tokens = state["ei_step"], state["total_tokens"]
    last = {
        "eval": run.step,
        "rollouts": run.ei_step or run.step,
    }  # expert iteration's rollouts count its own steps
    checkpoints.rewind(args.output_dir, manifest["log_sizes"], last)
    run.start -= state["elapsed"]
    run.mark()
    log = args.output_dir / "eval_log.jsonl"
    rows = jsonl.read(log, ("step", "accuracy")) if distributed.is_main() and log.exists() else []
    for row in distributed.from_main(rows[-1:]):
        run.evaluated_step, run.accuracy = row["step"], row["accuracy"]
    print(f"continuing after step {run.step} from {path}")
