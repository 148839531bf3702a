"""A run's directory and its checkpoints, each of which is written completely or not at all.

A checkpoint is a Hugging Face directory with the trainer's state in it, trainer.pt, which only the
newest one keeps. Of several processes the first one reads and writes, in the format that one
process uses.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from config import RunConfig, may_change, read_args
from grpo import distributed, jsonl, weights

LOGS = ("train_log.jsonl", "eval_log.jsonl")
KEEP = 3  # newest checkpoints; the most accurate one is kept beside them


class RunEnds(Exception):
    """A run ends before its last iteration. The message is a line for the user."""

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code


# --- The directory --------------------------------------------------------------------------------


def lock_directory(config: RunConfig) -> FileLock:
    """Hold the output directory until the lock is released, or the process ends.

    Only the first process locks it. Raises ValueError where it is in use, holds another run, or
    with --resume no run or one of other settings.
    """
    folder = config.output_dir
    lock = FileLock(folder / "lock")
    if not distributed.is_main():
        return lock
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"--output_dir {folder} is in use by another process") from None
    previous = read_args(folder / "args.json")
    has_logs = any((folder / name).exists() for name in (*LOGS, "checkpoints"))
    if config.resume and not previous:
        raise ValueError(f"--resume: there is no run in --output_dir {folder}")
    if not config.resume and (previous or has_logs):
        raise ValueError(f"--output_dir {folder} holds a run: --resume it, or name another")
    if config.resume:
        check_same_settings(config, previous)
    return lock


def check_same_settings(config: RunConfig, previous: dict) -> None:
    """Raise ValueError for a setting that a resumed run may not change."""
    settings = json.loads(jsonl.dumps(asdict(config)))
    for field in fields(config):
        name = field.name
        if name not in may_change(type(config)) and settings[name] != previous.get(name):
            raise ValueError(
                f"--resume continues a run with the flags it has: --{name} was"
                f" {previous.get(name)}, not {settings[name]}"
            )


def write_args(run) -> None:
    """Write args.json: settings, commands, commit, versions, hardware and number of parameters."""
    path = run.config.output_dir / "args.json"
    launcher = ["python"]
    if distributed.world_size() > 1:
        launcher = ["torchrun", f"--nproc_per_node={os.environ.get('LOCAL_WORLD_SIZE')}"]
    command = shlex.join([*launcher, *sys.argv])
    description = {"args": asdict(run.config), "command": command}
    if run.config.resume:
        previous = json.loads(path.read_text("utf-8"))
        description["command"] = previous.get("command")
        description["resumed"] = [*previous.get("resumed", []), command]
    packages = ("torch", "transformers", "numpy")
    description |= {
        "commit": git("rev-parse", "HEAD") or None,
        "dirty": bool(git("status", "--porcelain")),  # whether the code differs from its commit
        "versions": {"python": sys.version.split()[0]} | {name: version(name) for name in packages},
        "hardware": {
            "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "cpu_threads": torch.get_num_threads(),
            "processes": distributed.world_size(),
        },
        "parameters": sum(weight.numel() for weight in run.model.parameters()),
    }
    jsonl.write_json(path, description)


def git(*arguments: str) -> str:
    """What git prints about the project; "" where there is no git, or no repository."""
    if shutil.which("git") is None:
        return ""
    command = ["git", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return result.stdout.strip()


# --- Writing --------------------------------------------------------------------------------------


def save(run) -> None:
    """All: write checkpoints/step_NNNNNN, from which --resume continues at the run's place.

    Everything is written and synced under a temporary name, which is then changed: a checkpoint is
    complete, or it is not there. Then old ones are removed. Raises RunEnds where it cannot be
    written.
    """
    whole_weights, optimizer_state = gather_state(run.model, run.optimizer)
    random_states = distributed.gather([run.place["rng"]])  # of each process
    run.saved_iteration = run.place["iteration"]
    if not distributed.is_main():
        return
    output_dir = run.config.output_dir
    folder = output_dir / "checkpoints"
    temporary = folder / "unfinished"
    shutil.rmtree(temporary, ignore_errors=True)  # a killed run may have left it
    state = {
        "iteration": run.place["iteration"],
        "step": run.step,
        "total_tokens": run.total_tokens,
        "elapsed": time.perf_counter() - run.start,
        "train_loader": run.place["train_loader"],
        "rng": random_states,
        "optimizer": optimizer_state,
        "log_sizes": log_sizes(output_dir),
    }
    try:
        weights.save(run.model, temporary, whole_weights)
        run.tokenizer.save_pretrained(temporary)
        torch.save(state, temporary / "trainer.pt")
        os.sync()  # before it gets its name, everything is on the disk
    # Most often the disk is full, which each library reports by an exception of its own.
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        free = shutil.disk_usage(output_dir).free / 1e9
        needed = checkpoint_bytes(run.model, optimizer_state) / 1e9
        raise RunEnds(
            f"error: no checkpoint could be written to {folder} ({error}): it takes {needed:.2g} GB"
            f" and the disk has {free:.2g} GB left; --resume continues from the last one"
        ) from error
    path = folder / f"step_{run.step:06d}"
    if path.exists():  # an expert iteration has learnt nothing, so the weights are these
        os.replace(temporary / "trainer.pt", path / "trainer.pt")
    else:
        os.replace(temporary, path)
    remove_old(output_dir)


def checkpoint_bytes(model, optimizer_state: dict) -> int:
    """About how many bytes a checkpoint takes: its weights and the optimiser's moments."""
    weights = sum(weight.numel() * weight.itemsize for weight in model.parameters())
    return weights * (3 if optimizer_state else 1)


def log_sizes(output_dir: Path) -> dict[str, int]:
    """The sizes in bytes of the logs that exist."""
    logs = [output_dir / name for name in LOGS]
    return {log.name: log.stat().st_size for log in logs if log.exists()}


def remove_old(output_dir: Path) -> None:
    """Keep the newest checkpoints and the most accurate one, and one trainer's state."""
    paths = finished(output_dir)
    accuracies = {}
    for row in read_evaluations(output_dir):
        if row["step"] in paths and "accuracy" in row:
            accuracies[row["step"]] = row["accuracy"]
    steps = list(paths)
    kept = set(steps[-KEEP:])
    if accuracies:
        kept.add(max(accuracies, key=accuracies.get))
    for step in steps[:-1]:
        (paths[step] / "trainer.pt").unlink(missing_ok=True)
        if step not in kept:
            shutil.rmtree(paths[step], ignore_errors=True)


def read_evaluations(output_dir: Path) -> list[dict]:
    """The rows of eval_log.jsonl."""
    log = output_dir / "eval_log.jsonl"
    return jsonl.read(log) if log.exists() else []


def finished(output_dir: Path) -> dict[int, Path]:
    """{step: path} of all checkpoints, in the order of their steps."""
    paths = output_dir.glob("checkpoints/step_*")
    return dict(sorted((int(path.name.removeprefix("step_")), path) for path in paths))


# --- Resuming -------------------------------------------------------------------------------------


def resume(run) -> None:
    """All: go on from the newest checkpoint, or from the beginning if there is none yet.

    What the logs and transcripts have of later iterations is removed, since it is made again.
    """
    output_dir = run.config.output_dir
    state = None
    saved_weights = {}
    if distributed.is_main():
        paths = finished(output_dir)
        if paths:
            path = paths[max(paths)]
            print(f"continuing from {path}")
            saved_weights = weights.read_weights(path, run.model)
            state = torch.load(path / "trainer.pt", map_location="cpu", weights_only=True)
            rewind(output_dir, state["log_sizes"], state["step"], state["iteration"])
        else:
            print(f"no checkpoint in {output_dir} yet: starting from the beginning")
            rewind(output_dir, {}, -1, -1)
    optimizer_state = {} if state is None else state.pop("optimizer")
    state = distributed.from_main(state)
    if state is None:
        return
    scatter_state(run.model, run.optimizer, saved_weights, optimizer_state)
    weights.refresh_sampler(run.sampler, run.model)
    run.iteration = state["iteration"]
    run.saved_iteration = run.iteration
    run.step = state["step"]
    run.total_tokens = state["total_tokens"]
    run.start -= state["elapsed"]
    run.train_loader.load_state_dict(state["train_loader"])
    # This seed is used if the number of processes has changed. It differs for each checkpoint.
    distributed.resume_rng_state(state["rng"], new_seed=run.config.seed + 7919 * run.step)


def rewind(output_dir: Path, sizes: dict[str, int], step: int, iteration: int) -> None:
    """Cut the logs back to their sizes in bytes, and remove the transcripts of later steps."""
    for name in LOGS:
        if (output_dir / name).exists():
            os.truncate(output_dir / name, sizes.get(name, 0))
    for folder, last in (("eval", step), ("rollouts", iteration)):
        for file in (output_dir / folder).glob("step_*.jsonl"):
            if int(file.stem.removeprefix("step_")) > last:
                file.unlink()


# --- The state of one process, and of several -----------------------------------------------------


def gather_state(model, optimizer) -> tuple[dict | None, dict]:
    """All processes: the complete weights and optimiser state, under the names of the parameters.

    Of several processes the first one gets them, on its CPU. On one process the weights are None,
    because the model has them.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    # Before the first update the optimiser has no state, and asking for it would create one.
    optimizer_state = {}
    if optimizer.state:
        optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
    if not distributed.is_sharded(model):
        return None, optimizer_state
    whole_weights = get_model_state_dict(model, options=options)
    for tied_name in model.all_tied_weights_keys:
        whole_weights.pop(tied_name, None)
    return whole_weights, optimizer_state


def scatter_state(model, optimizer, saved_weights: dict, optimizer_state: dict) -> None:
    """All processes: load weights and optimiser state that the first process has read.

    The other processes pass {} for both, and each gets its shard.
    """
    has_several = distributed.world_size() > 1
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=has_several, strict=False)
    if saved_weights and not weights.has_adapters(model):  # adapters are not tied
        for name, saved_name in model.all_tied_weights_keys.items():
            saved_weights[name] = saved_weights[saved_name]
    set_model_state_dict(model, saved_weights, options=options)
    saved_names = distributed.from_main(list(optimizer_state.get("state", {})))
    if not saved_names:
        return
    set_optimizer_state_dict(model, optimizer, optimizer_state, options=options)
    for name, parameter in model.named_parameters():
        if name not in saved_names:  # it has had no gradient yet, as an expert without tokens
            optimizer.state.pop(parameter, None)
    for group in optimizer.param_groups:
        group["betas"] = tuple(group["betas"])  # it came back as a list
