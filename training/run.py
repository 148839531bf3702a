"""The object `Run`, and how a run starts, resumes, saves, and ends with one line that says why.

A run that was ended, by whatever, continues with --resume as if it had never stopped. `config` are
the settings of main.py, sft.py or experiments/expert_iteration.py.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import distributed
import llms
import lora
import signals
from config import OutputConfig, may_change, read_args
from evaluator import RewardError, RewardEvaluator
from logs import jsonl
from rl_datasets import DataLoader, can_be_encoded, default_eval_split
from sampling.vllm import VLLMSampler
from training import checkpoints
from training.guard import Diverged
from training.memory import is_out_of_memory
from training.timer import StageTimer


@dataclass
class Run:
    """What a script trains with, and how far it has come."""

    # Made by training.setup.load.
    model: PreTrainedModel  # the policy, sharded where there are several processes
    tokenizer: PreTrainedTokenizerBase
    train_loader: DataLoader  # sft.py puts its solutions in the place of the examples
    eval_loader: DataLoader
    evaluator: RewardEvaluator
    sampler: PreTrainedModel | VLLMSampler  # the policy itself, or a copy of its weights
    base_model: PreTrainedModel | None = None  # the frozen reference, where there is one
    timer: StageTimer = field(default_factory=StageTimer)

    # Set by the script's `setup`.
    optimizer: torch.optim.Optimizer | None = None  # None for --eval_only, which saves nothing
    num_iterations: int = 0  # of the whole run

    # How far it has come: set by `finish_iteration`, and by `resume`.
    iteration: int = 0  # finished iterations: rollout batches, updates of SFT, expert iterations
    step: int = 0  # the same, but for expert iteration finished updates; logs count in steps
    total_tokens: int = 0  # that were sampled, or trained on in supervised fine-tuning
    # What the next iteration starts from beside the weights: random numbers and the train_loader.
    iteration_start: dict = field(default_factory=dict)

    # The output directory (st_ino), which the user might move or replace; set by `start`.
    directory_id: int | None = None
    fingerprints: dict[str, int] = field(default_factory=dict)  # of its data; set by `start`
    saved_step: int | None = None  # of the newest checkpoint; set by `save_checkpoint` and `resume`
    # When the run began (time.perf_counter); `resume` takes off the seconds that it took before.
    start: float = field(default_factory=time.perf_counter)

    def finish_iteration(self, num_tokens: int, num_steps: int = 1) -> None:
        """Count an iteration, after its last update and before it is logged.

        Args:
            num_tokens: how many tokens it has sampled, or trained on in supervised fine-tuning.
        """
        self.iteration += 1
        self.step += num_steps
        self.total_tokens += num_tokens
        self.note_start_of_iteration()

    def note_start_of_iteration(self) -> None:
        """Keep what a checkpoint needs: a run that stops in an iteration makes it again."""
        self.iteration_start = {
            "rng": distributed.get_rng_state(),
            "train_loader": self.train_loader.state_dict(),
        }


# --- From the command line to the exit code -------------------------------------------------------


def run_to_the_end(
    config: OutputConfig,
    setup: Callable[[OutputConfig], Run],
    train: Callable[[OutputConfig, Run], None],
    several_processes: bool = True,
) -> int:
    """The life of a script: lock its directory, set up, start or resume, train, and leave.

    Whatever ends a run is said in one line.

    Args:
        several_processes: whether the script can run as several processes.

    Returns:
        The exit code. 0: the run is done. 1: it failed while training. 2: something that the user
        gave is wrong, a reward function included. 130, 143 and the like: a signal stopped it.
    """
    with signals.output_watched():
        try:
            config = resolve(config)
            # While a process waits for the others, Python would not hear a signal.
            with signals.handled(signal.SIG_DFL):
                distributed.init(config.device, several_processes)
            # With --resume the settings come from args.json, which other nodes may not see. So all
            # processes take those of the first one.
            config = distributed.from_main(config)
            with signals.handled(signals.stop_at_once), locked_directory(config):
                run = setup(config)
                distributed.barrier()  # no process trains before all are ready
                start(config, run)
                with signals.handled(signals.ask_to_stop):
                    exit_code = train_to_the_end(config, run, train)
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except signals.Stopped as stopped:
            distributed.print_error(f"stopped by {stopped} while loading")
            return stopped.exit_code
        return distributed.finish(exit_code)


def train_to_the_end(
    config: OutputConfig, run: Run, train: Callable[[OutputConfig, Run], None]
) -> int:
    """Train until the run is done, or until something ends it. Returns the exit code."""
    folder = config.output_dir
    saves = run.optimizer is not None
    try:
        try:
            train(config, run)
        except signals.Stopped as stopped:
            advice = ""
            if saves:
                save_checkpoint(config, run)
                advice = "; --resume continues"
            distributed.print_error(f"stopped by {stopped} after step {run.step}{advice}")
            return stopped.exit_code
    except Diverged as diverged:
        distributed.print_error(f"error: {diverged}; logs and earlier checkpoints are in {folder}")
        return 1
    except Exception as error:
        message = describe_failure(config, error)
        if saves:
            message += f"; {how_to_continue(config, run)}"
        print(f"error: {message}", file=sys.stderr)
        return 2 if isinstance(error, RewardError) else 1
    results = "logs and checkpoints" if saves else "logs"
    command = shlex.join(["python", "plotter.py", "--log_dir", str(folder)])
    print(f"done: {results} are in {folder}; plot them: {command}")
    return 0


def describe_failure(config: OutputConfig, error: Exception) -> str:
    """What has ended a run, in one line; of a bug the traceback is written to a file."""
    message = " ".join(str(error).split())[:500]
    if distributed.has_lost_another(error):
        return "the connection to another process is lost; that one may have said why it ended"
    if is_out_of_memory(error):
        half_of_micro_batch = max(1, config.micro_batch_tokens // 2)
        return f"out of memory: --resume with --micro_batch_tokens {half_of_micro_batch}"
    # These come from outside, as from a full disk, a dead judge or a user's reward function.
    if isinstance(error, OSError | RewardError):
        return message
    file = config.output_dir / "traceback.txt"
    with suppress(OSError):
        file.write_text(traceback.format_exc(), "utf-8")
    return f"{type(error).__name__}: {message}; the traceback is in {file}"


def how_to_continue(config: OutputConfig, run: Run) -> str:
    folder = config.output_dir
    if distributed.is_main() and not is_in_place(config, run):
        return f"{folder} has been moved or removed; --resume continues the run where it is now"
    paths = checkpoints.finished(folder)
    if not paths:
        return "there is no checkpoint yet, and --resume starts from the beginning"
    return f"the newest checkpoint is {paths[max(paths)]}, and --resume continues from there"


# --- Starting -------------------------------------------------------------------------------------


def resolve(config: OutputConfig) -> OutputConfig:
    """The settings with the defaults that depend on this machine or on the data set filled in."""
    eval_split = config.eval_split or default_eval_split(config.dataset_name, config.dataset_path)
    return replace(config, device=llms.resolve_device(config.device), eval_split=eval_split)


@contextmanager
def locked_directory(config: OutputConfig) -> Iterator[None]:
    """Hold the output directory, which must be free for this run. Raises ValueError.

    Only the first process reads and writes there. A directory that is made here and stays empty is
    removed again.
    """
    if not distributed.is_main():
        yield
        return
    folder = config.output_dir
    check_directory(config)
    is_new = not folder.exists()
    lock = FileLock(folder / "lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"--output_dir {folder} is in use by another process; wait for its end, or name"
            " another directory"
        ) from None
    except OSError as error:
        raise ValueError(
            f"--output_dir {folder}: cannot be made or written ({error.strerror}); name another"
            " directory"
        ) from error
    try:
        check_directory(config)  # another run may have been there until the lock was free
        yield
    finally:
        lock.release()
        if is_new and folder.exists() and [path.name for path in folder.iterdir()] == ["lock"]:
            (folder / "lock").unlink()
            folder.rmdir()


def check_directory(config: OutputConfig) -> None:
    """Raise ValueError where the output directory holds something that a run must not write over.

    It must hold no other run, and with --resume this one.
    """
    folder = config.output_dir
    if folder == Path("."):
        raise ValueError(
            "--output_dir is empty, or the current directory: name a directory for the run"
        )
    if not can_be_encoded(str(folder)):
        raise ValueError(f"--output_dir {str(folder)!r} is not UTF-8: name another directory")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output_dir {folder} is a file; name a directory")
    if (folder / "config.json").exists():
        raise ValueError(f"--output_dir {folder} holds a model; name another directory")
    previous = read_args(folder / "args.json")
    is_evaluation = getattr(config, "eval_only", False)
    if config.resume and not previous:
        raise ValueError(f"--resume: there is no run in --output_dir {folder}")
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
        check_same_settings(config, previous)
    elif not previous.get("eval_only"):  # the directory of an --eval_only may be used again
        advice = "" if is_evaluation else ", or --resume it"
        raise ValueError(
            f"--output_dir {folder} already holds a run; name another directory{advice}"
        )


def fixed_settings(config: OutputConfig) -> dict:
    """The settings that a resumed run may not change, as args.json has them."""
    free_names = may_change(type(config))
    if getattr(config, "lr_schedule", "constant") != "constant":
        free_names.remove("num_train_iters")  # the learning rate falls to 0 at the end of the run
    settings = {name: value for name, value in asdict(config).items() if name not in free_names}
    return json.loads(jsonl.dumps(settings))


def check_same_settings(config: OutputConfig, previous: dict) -> None:
    """Raise ValueError for a setting that a resumed run may not change."""
    settings = fixed_settings(config)
    unknown = sorted(settings.keys() - previous.keys())
    if unknown:
        raise ValueError(
            f"--resume: {config.output_dir} is a run of another script or version, which has no"
            f" --{unknown[0]}"
        )
    changes = [
        f"--{name} was {previous[name]}, not {value}"
        for name, value in settings.items()
        if value != previous[name]
    ]
    if changes:
        raise ValueError(f"--resume continues a run with the flags it has: {', '.join(changes)}")


def take_fingerprints(config: OutputConfig, run: Run) -> dict[str, int]:
    """All: a checksum of each thing outside the run's directory that it goes on to use.

    It is taken before --resume loads a checkpoint, when the policy is still the reference.
    """
    train_examples = run.train_loader.examples
    fingerprints = {
        "the training data": checksum_of_rows(train_examples),
        "the evaluation data": checksum_of_rows(run.eval_loader.examples),
        "the chat template": zlib.crc32(repr(run.tokenizer.chat_template).encode()),
    }
    reward_file, colon, _ = (config.evaluator or "").rpartition(":")
    if colon:
        fingerprints[f"the file {reward_file}"] = zlib.crc32(Path(reward_file).read_bytes())
    if run.base_model is not None or lora.has_adapters(run.model):
        checksum = 0
        for weight in run.model.parameters():
            weight = distributed.full_tensor(weight.detach()).float().cpu().contiguous()
            checksum = zlib.crc32(weight.numpy(), checksum)
        fingerprints[f"the model {config.model_name}"] = checksum
    return fingerprints


def checksum_of_rows(examples: list[dict]) -> int:
    """A checksum of every column but those that hold places and prompts."""
    checksum = 0
    for example in examples:
        columns = {name: example[name] for name in example.keys() - {"file_and_row", "prompt"}}
        # What JSON lacks, such as an image, is left out.
        text = json.dumps(columns, sort_keys=True, skipkeys=True, default=lambda value: None)
        checksum = zlib.crc32(text.encode(), checksum)
    return checksum


def check_same_data(run: Run, previous: dict[str, int]) -> None:
    """Raise ValueError where a run would go on with something else than it began with."""
    changed = [name for name, value in run.fingerprints.items() if value != previous.get(name)]
    if changed:
        raise ValueError(
            f"--resume continues a run with what it began with, and {', '.join(changed)} changed"
            " since; bring it back, or begin a new run"
        )


def start(config: OutputConfig, run: Run) -> None:
    """Go back to the newest checkpoint if --resume asks for it, and write args.json."""
    run.note_start_of_iteration()
    run.fingerprints = take_fingerprints(config, run)
    if config.resume:
        resume(config, run)
    else:
        checkpoints.rewind(config.output_dir, {}, {})  # removes the logs of an earlier --eval_only
    if distributed.is_main():
        run.directory_id = config.output_dir.stat().st_ino
        write_args(config, run.model)


def write_args(config: OutputConfig, model: torch.nn.Module) -> None:
    """Write args.json. It keeps the command that began the run, and those that resumed it."""
    path = config.output_dir / "args.json"
    description = run_description(config, model)
    if config.resume:
        previous = json.loads(path.read_text("utf-8"))
        resumed = [*previous.get("resumed", []), description["command"]]
        description |= {"command": previous.get("command"), "resumed": resumed}
    jsonl.write_json(path, description)


def run_description(config: OutputConfig, model: torch.nn.Module) -> dict:
    """Flags, command, commit, versions, hardware and number of parameters."""
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


# --- Saving and resuming --------------------------------------------------------------------------


def is_in_place(config: OutputConfig, run: Run) -> bool:
    """Whether the output directory is still the one that the first process has locked."""
    folder = config.output_dir
    return folder.exists() and folder.stat().st_ino == run.directory_id


def check_in_place(config: OutputConfig, run: Run) -> None:
    """Raise OSError if the output directory is gone, or another one has taken its place."""
    if distributed.is_main() and not is_in_place(config, run):
        raise OSError(f"{config.output_dir} is not the directory that the run began in")


def save_checkpoint(config: OutputConfig, run: Run) -> None:
    """All: write the state from which --resume continues, unless this step has been saved.

    Within an iteration that is the state of its start, as long as the weights are those of its
    start. Raises OSError where it cannot be written.
    """
    check_in_place(config, run)
    if run.saved_step == run.step:
        return
    weights, optimizer_state = checkpoints.gather_state(run.model, run.optimizer)
    state = {
        "settings": fixed_settings(config),
        "fingerprints": run.fingerprints,
        "iteration": run.iteration,
        "step": run.step,
        "total_tokens": run.total_tokens,
        "train_loader": run.iteration_start["train_loader"],
        "rng": distributed.gather([run.iteration_start["rng"]]),  # of each process
        "elapsed": time.perf_counter() - run.start,
        "optimizer": optimizer_state,
    }
    if distributed.is_main():
        checkpoints.write(
            config.output_dir,
            run.step,
            run.model,
            run.tokenizer,
            state,
            weights=weights,
            keep=config.keep_checkpoints,
        )
    run.saved_step = run.step


def resume(config: OutputConfig, run: Run) -> None:
    """Continue from the newest checkpoint, or from the beginning if there is none yet.

    Raises ValueError for checkpoints that cannot be read, and for one that does not fit the
    settings or the logs.
    """
    path = None
    state = {}
    weights = {}
    if distributed.is_main():
        path, weights, state = checkpoints.read_newest(config.output_dir, run.model)
    path = distributed.from_main(path)
    if path is None:
        print(f"no checkpoint in {config.output_dir} yet: starting from the beginning")
        checkpoints.rewind(config.output_dir, {}, {})  # the evaluation at step 0 is removed as well
        return
    optimizer_state = state.pop("optimizer", {})
    state = distributed.from_main(state)
    if "fingerprints" not in state:
        raise ValueError(
            f"--resume: another version wrote {path}; a new run can start from it with"
            f" --model_name {path}"
        )
    check_same_settings(config, state["settings"])  # args.json may have been edited
    check_same_data(run, state["fingerprints"])
    if state["iteration"] > run.num_iterations:
        raise ValueError(
            f"--resume: the run has made {state['iteration']} iterations already, more than the"
            f" {run.num_iterations} that are asked for"
        )
    last_transcripts = {"eval": state["step"], "rollouts": state["iteration"]}
    checkpoints.rewind(config.output_dir, state["log_sizes"], last_transcripts)

    checkpoints.scatter_state(run.model, run.optimizer, weights, optimizer_state)
    llms.refresh_sampler(run.sampler, run.model)
    run.iteration = state["iteration"]
    run.step = state["step"]
    run.saved_step = state["step"]
    run.total_tokens = state["total_tokens"]
    run.start -= state["elapsed"]
    run.train_loader.load_state_dict(state["train_loader"])
    # This seed is used if the number of processes has changed. It differs for each checkpoint.
    distributed.resume_rng_state(state["rng"], new_seed=config.seed + 7919 * run.step)
    run.note_start_of_iteration()
    print(f"continuing after step {run.step} from {path}")
