"""The object `Run`, and how a run starts, resumes, saves, and ends with one line that says why.

A run can be stopped at any moment and continued with --resume as if it had never stopped. `config`
are the settings of main.py, sft.py or experiments/expert_iteration.py.
"""

import json
import math
import os
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import distributed
import llms
from config import OutputConfig, may_change, read_args
from evaluator import RewardEvaluator
from logs import jsonl
from rl_datasets import DataLoader, default_eval_split
from training import checkpoints, write_logs
from training.lock import Lock
from training.memory import is_out_of_memory
from training.metrics import StageTimer
from training.signals import Diverged, Guard, Interrupted, Interrupts


@dataclass
class Run:
    """What a script trains with, made by its `setup`, and how far it has come."""

    model: PreTrainedModel  # the policy, sharded where there are several processes
    tokenizer: PreTrainedTokenizerBase
    train_loader: DataLoader
    eval_loader: DataLoader
    evaluator: RewardEvaluator
    sampler: PreTrainedModel  # the weights that sample: the policy itself, or a copy of it
    base_model: PreTrainedModel | None = None  # the frozen reference, where there is one
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None  # of the learning rate; None where the script sets the rate itself
    examples: list[dict] = field(default_factory=list)  # what supervised fine-tuning trains on
    saves: bool = True  # whether checkpoints are written; False for --eval_only
    saved_step: int | None = None  # the step of the newest checkpoint
    timer: StageTimer = field(default_factory=StageTimer)
    guard: Guard = field(default_factory=Guard)
    interrupts: Interrupts = field(default_factory=Interrupts)
    bar: tqdm | None = None
    step: int = 0  # finished iterations of GRPO, or finished updates of the other scripts
    ei_step: int = 0  # finished expert iterations
    total_tokens: int = 0
    evaluated_step: int | None = None  # the step of the last evaluation
    accuracy: float | None = None  # the strict accuracy of that evaluation
    # When the run began (time.perf_counter), less the seconds that it took before a resume.
    start: float = field(default_factory=time.perf_counter)
    boundary: dict = field(default_factory=dict)  # what `mark` kept after the last step
    weights_changed: bool = False  # whether an update has begun since then

    def mark(self) -> None:
        """Remember what a checkpoint needs beside weights and optimiser, after a finished step."""
        self.boundary = {
            "rng": distributed.get_rng_state(),
            "train_loader": self.train_loader.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "total_tokens": self.total_tokens,
            "ei_step": self.ei_step,
        }
        self.weights_changed = False

    def begin_update(self) -> None:
        """Called before the weights move: from here on a signal waits for finish_step."""
        self.interrupts.hold()
        self.weights_changed = True

    @contextmanager
    def finish_step(self, num_tokens: int, num_steps: int = 1) -> Iterator[None]:
        """Count a step; the block writes its logs; then a signal that has waited may stop the run.

        Args:
            num_tokens: how many tokens the step has sampled, or trained on in supervised
            fine-tuning.
            num_steps: how many steps are finished at once.
        """
        # The optimiser's hook (see start) has called this before, unless every update was skipped.
        # The logs must not be cut by a signal.
        self.begin_update()
        self.step += num_steps
        self.total_tokens += num_tokens
        yield
        self.mark()
        self.interrupts.release()

    def check_health(self, metrics: dict) -> None:
        """Print what looks wrong in the iterations so far. Raises Diverged for a lost run."""
        print_warnings(self.guard.check(metrics))

    def progress_bar(self, num_steps: int) -> tqdm:
        """The steps that are still to be taken, of num_steps in all."""
        steps = range(self.step + 1, num_steps + 1)
        self.bar = write_logs.progress_bar(
            steps, initial=self.step, total=num_steps, desc="GRPO", unit="step"
        )
        return self.bar


def print_warnings(warnings: list[str]) -> None:
    for warning in warnings:
        tqdm.write(f"warning: {warning}")


# --- Starting -------------------------------------------------------------------------------------


def resolve(config: OutputConfig) -> OutputConfig:
    """The settings with the defaults that depend on this machine or on the data set filled in."""
    eval_split = config.eval_split or default_eval_split(config.dataset_name, config.dataset_path)
    return replace(config, device=llms.resolve_device(config.device), eval_split=eval_split)


def claim(config: OutputConfig) -> Lock | None:
    """Lock the output directory, which must hold no other run; with --resume it must hold this one.

    Only the first process reads and writes there; the others get None. Raises ValueError.
    """
    folder = config.output_dir
    if folder == Path("."):
        raise ValueError(
            "--output_dir is empty, or the current directory: name a directory for the run"
        )
    if not distributed.is_main():
        return None
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output_dir {folder} is a file; name a directory")
    if config.resume and not (folder / "args.json").exists():
        raise ValueError(f"--resume: there is no run in --output_dir {folder}")
    lock = Lock(folder)
    try:
        check_directory(config, read_args(folder / "args.json"))
    except BaseException:
        lock.release()
        raise
    return lock


def check_directory(config: OutputConfig, previous: dict | None) -> None:
    """Raise ValueError where the output directory holds something that a run must not write over.

    Args:
        previous: the flags of the run that the directory holds, None where there is none.
    """
    folder = config.output_dir
    is_evaluation = getattr(config, "eval_only", False)
    if not previous:
        written_by_a_run = (*checkpoints.LOGS, *checkpoints.TRANSCRIPTS, "checkpoints")
        names = [name for name in written_by_a_run if (folder / name).exists()]
        if names:
            raise ValueError(
                f"--output_dir {folder} holds {', '.join(names)} without the args.json of their"
                " run; move them away, or name another directory"
            )
    elif config.resume:
        if is_evaluation or previous.get("eval_only"):
            raise ValueError(
                "--resume continues training, and --eval_only does not train: leave one of them out"
            )
        check_same_flags(config, previous)
    elif not previous.get("eval_only"):  # the directory of an --eval_only may be used again
        advice = "" if is_evaluation else ", or --resume it"
        raise ValueError(
            f"--output_dir {folder} already holds a run; name another directory{advice}"
        )


def check_same_flags(config: OutputConfig, previous: dict) -> None:
    """Raise ValueError for a setting that a resumed run may not change."""
    free_names = may_change(type(config))
    if previous.get("lr_schedule", "constant") != "constant":
        free_names.remove("num_train_iters")  # the learning rate falls to 0 at the end of the run
    flags = {name: value for name, value in asdict(config).items() if name not in free_names}
    flags = json.loads(jsonl.dumps(flags))  # as args.json has them
    unknown = sorted(flags.keys() - previous.keys())
    if unknown:
        raise ValueError(
            f"--resume: {config.output_dir} is a run of another script or version, which has no"
            f" --{unknown[0]}"
        )
    changes = [
        f"--{name} was {previous[name]}, not {value}"
        for name, value in flags.items()
        if value != previous[name]
    ]
    if changes:
        raise ValueError(f"--resume continues a run with the flags it has: {', '.join(changes)}")


def start(config: OutputConfig, run: Run) -> None:
    """Go back to the newest checkpoint if --resume asks for it, and write args.json."""
    run.guard.set_flags(asdict(config))
    run.mark()
    if config.resume:
        resume(config, run)
    else:
        checkpoints.rewind(config.output_dir, {}, {})  # removes the logs of an earlier --eval_only
    if distributed.is_main():
        jsonl.write_json(config.output_dir / "args.json", run_description(config, run.model))
    if run.optimizer:
        # This is called before every optimizer.step().
        run.optimizer.register_step_pre_hook(lambda *_: run.begin_update())


def run_description(config: OutputConfig, model: torch.nn.Module) -> dict:
    """What args.json holds: flags, command, commit, versions, hardware, number of parameters."""
    commit = None
    with suppress(OSError):  # where there is no git
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parent,
        )
        commit = git.stdout.strip() or None
    launcher = ["python"]
    if distributed.world_size() > 1:
        launcher = ["torchrun", f"--nproc_per_node={os.environ.get('LOCAL_WORLD_SIZE')}"]
    versions = {"python": sys.version.split()[0]}
    versions |= {package: version(package) for package in ("torch", "transformers", "numpy")}
    return {
        "args": asdict(config),
        "command": shlex.join([*launcher, *sys.argv]),
        "commit": commit,
        "versions": versions,
        "hardware": {
            "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "cpu_threads": torch.get_num_threads(),
            "processes": distributed.world_size(),
        },
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def resume(config: OutputConfig, run: Run) -> None:
    """Continue from the newest intact checkpoint, or from the beginning if there is none yet.

    Raises ValueError for a run whose checkpoints are all lost or damaged, and for a checkpoint of
    another version.
    """
    newest = distributed.from_main(
        checkpoints.find(config.output_dir) if distributed.is_main() else None
    )
    if newest is None:
        check_no_checkpoint_was_lost(config)
        print(f"no checkpoint in {config.output_dir} yet: starting from the beginning")
        checkpoints.rewind(config.output_dir, {}, {})  # the evaluation at step 0 is removed as well
        return
    path, manifest = newest
    state = checkpoints.load(path, run.model, run.optimizer)
    # `start` has called `mark`, so that run.boundary has every key of a checkpoint's state.
    missing = sorted(run.boundary.keys() - state.keys())
    if missing:
        raise ValueError(
            f"{path} lacks {missing}: another version wrote it; a new run can start from it with"
            f" --model_name {path}"
        )
    if run.scheduler:
        run.scheduler.load_state_dict(state["scheduler"])
    run.train_loader.load_state_dict(state["train_loader"])
    # This seed is used if the number of processes has changed. It differs for each checkpoint.
    new_seed = config.seed + 7919 * manifest["step"]
    distributed.resume_rng_state(state["rng"], new_seed)
    run.step = manifest["step"]
    run.saved_step = run.step
    run.ei_step = state["ei_step"]
    run.total_tokens = state["total_tokens"]
    run.start -= state["elapsed"]
    last_transcripts = {
        "eval": run.step,
        "rollouts": run.ei_step or run.step,  # expert iteration numbers them by ei_step
    }
    checkpoints.rewind(config.output_dir, manifest["log_sizes"], last_transcripts)
    run.mark()
    if distributed.is_main():
        run.guard.logs.train = read_earlier_rows(config.output_dir / "train_log.jsonl")
        run.guard.logs.evaluations = read_earlier_rows(config.output_dir / "eval_log.jsonl")
    last_evaluation = distributed.from_main(read_last_evaluation(config.output_dir))
    if last_evaluation:
        run.evaluated_step = last_evaluation["step"]
        run.accuracy = last_evaluation["accuracy"]
    print(f"continuing after step {run.step} from {path}")


def check_no_checkpoint_was_lost(config: OutputConfig) -> None:
    """Raise ValueError if the log has so many steps that checkpoints must have been lost."""
    log = config.output_dir / "train_log.jsonl"
    if not distributed.is_main() or not log.exists():
        return
    num_steps = log.read_bytes().count(b"\n")
    settings = asdict(config)
    save_every = settings.get("save_iterations", settings.get("save_updates", math.inf))
    if num_steps > save_every:
        raise ValueError(
            f"{log} has {num_steps} steps, but no intact checkpoint is left: name another"
            " --output_dir"
        )


def read_earlier_rows(log: Path) -> list[dict]:
    """The rows of a log for run.guard; none where it is damaged, since a run can do without."""
    with suppress(ValueError, OSError):
        return jsonl.read(log)
    return []


def read_last_evaluation(output_dir: Path) -> dict | None:
    """The last line of eval_log.jsonl, or None; always None on all but the first process."""
    log = output_dir / "eval_log.jsonl"
    if not distributed.is_main() or not log.exists():
        return None
    rows = jsonl.read(log, ("step", "accuracy"))
    return rows[-1] if rows else None


# --- From the start to the last line --------------------------------------------------------------


def run_to_the_end(
    config: OutputConfig,
    setup: Callable[[OutputConfig], Run],
    train: Callable[[OutputConfig, Run], None],
    several_processes: bool = True,
) -> int:
    """The life of a script: claim its directory, set up, start or resume, train, and leave.

    Whatever ends a run is said in one line.

    Args:
        several_processes: whether the script can run as several processes.

    Returns:
        The exit code. 0: the run is done. 1: it failed while training. 2: something that the user
        gave is wrong. 130: a signal stopped it.
    """
    lock = None
    interrupts = Interrupts()
    interrupts.install()
    interrupts.loading = True
    try:
        distributed.init(llms.resolve_device(config.device), several_processes)
        # With --resume the settings come from args.json, which other nodes may not see. So all
        # processes take those of the first one.
        config = distributed.from_main(resolve(config))
        lock = claim(config)
        run = setup(config)
        run.interrupts = interrupts
        distributed.barrier()  # no process trains before all are ready
        start(config, run)
        interrupts.loading = False
        exit_code = train_to_the_end(config, run, train)
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
    return distributed.finish(exit_code)


def train_to_the_end(
    config: OutputConfig, run: Run, train: Callable[[OutputConfig, Run], None]
) -> int:
    """Train; whatever ends that, keep what can be kept. Returns the exit code."""
    folder = config.output_dir
    try:
        train(config, run)
        print_warnings(run.guard.new_warnings())  # the last evaluation is among the rows now
    except Interrupted as interrupt:
        run.interrupts.ignore()
        advice = ""
        if run.saves:
            saved = save_checkpoint(config, run)
            advice = "; --resume continues" if saved else "; this step could not be saved"
        distributed.print_error(f"stopped by {interrupt} after step {run.step}{advice}")
        return 130
    except Diverged as diverged:
        distributed.print_error(f"error: {diverged}; logs and earlier checkpoints are in {folder}")
        return 1
    except Exception as error:
        print(f"error: {rescue(config, run, error)}", file=sys.stderr)
        return 1
    if run.saves and run.saved_step != run.step:
        distributed.print_error(
            f"error: the last checkpoint could not be written to {folder}; --resume writes it"
        )
        return 1
    results = "logs and checkpoints" if run.saves else "logs"
    print(f"done: {results} are in {folder}; plot them: python plotter.py --log_dir {folder}")
    return 0


def rescue(config: OutputConfig, run: Run, error: Exception) -> str:
    """Keep what can be kept of a run that an exception ends, and say in one line what happened.

    The state after the last finished step is saved if the weights are still those of that moment.
    With several processes it is not saved, since the others may be anywhere.
    """
    message = " ".join(str(error).split())[:500]
    # An OSError comes from outside, as from a full disk or a dead judge, and needs no traceback.
    is_bug = not isinstance(error, OSError)
    half_of_micro_batch = max(1, config.micro_batch_tokens // 2)
    if distributed.has_lost_another(error):
        message = "the connection to another process is lost; that one may have said why it ended"
    elif is_out_of_memory(error):
        message = f"out of memory: --resume with --micro_batch_tokens {half_of_micro_batch}"
    elif is_bug:
        file = config.output_dir / "traceback.txt"
        message = f"{type(error).__name__}: {message}; the traceback is in {file}"
        with suppress(OSError):
            file.write_text(traceback.format_exc(), "utf-8")
    if not run.saves:
        return message
    can_save = not run.weights_changed and distributed.world_size() == 1
    if can_save and save_checkpoint(config, run):
        return f"{message}; stopped after step {run.step}, which is saved: --resume continues"
    newest = max(checkpoints.finished(config.output_dir), default=None)
    newest_text = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint yet"
    return f"{message}; {newest_text}, and --resume continues from there"


def save_checkpoint(config: OutputConfig, run: Run) -> bool:
    """Write the state after run.step, from which --resume continues as if the run had not stopped.

    Returns whether it could be written.
    """
    run.interrupts.hold()
    weights, optimizer_state = checkpoints.gather_state(run.model, run.optimizer)
    state = dict(run.boundary)
    state["rng"] = distributed.gather([run.boundary["rng"]])  # of each process
    state["optimizer"] = optimizer_state
    state["elapsed"] = time.perf_counter() - run.start
    written = None
    if distributed.is_main():
        written = checkpoints.write(
            config.output_dir,
            run.step,
            run.model,
            run.tokenizer,
            state,
            weights=weights,
            accuracy=run.accuracy if run.evaluated_step == run.step else None,
            keep=config.keep_checkpoints,
        )
    # Only the first process knows whether the checkpoint was written; the others assume it.
    if written or not distributed.is_main():
        run.saved_step = run.step
    run.interrupts.release()
    return run.saved_step == run.step
