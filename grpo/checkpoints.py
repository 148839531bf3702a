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
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import llms
import utils
from config import RunConfig, may_change, read_args
from grpo import distributed, jsonl, weights

KEEP = 3  # newest checkpoints; the most accurate one is kept beside them


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
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output_dir {folder} is a file")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"--output_dir {folder} is in use by another process") from None
    previous = read_args(folder / "args.json")
    if config.resume and not previous:
        raise ValueError(f"--resume: there is no run in --output_dir {folder}")
    if previous and not config.resume:
        raise ValueError(f"--output_dir {folder} holds a run: --resume it, or name another")
    if config.resume:
        settings = asdict(config)
        for name in settings.keys() - may_change(type(config)):
            if settings[name] != previous.get(name):
                raise ValueError(
                    f"--resume continues a run with the flags it has: --{name} was"
                    f" {previous.get(name)}, not {settings[name]}"
                )
    return lock


def write_args(run) -> None:
    """Write args.json: settings, command, commit, versions, hardware and number of parameters."""
    path = run.config.output_dir / "args.json"
    (path.parent / "checkpoints").mkdir(exist_ok=True)
    command = shlex.join(["python", *sys.argv])
    if run.config.resume:
        command = json.loads(path.read_text("utf-8")).get("command")
    # The commit, with -dirty after it if the code differs; nothing without git or a repository.
    git = "git describe --always --dirty --abbrev=40 '--exclude=*'"
    folder = Path(__file__).parent
    commit = subprocess.run(git, shell=True, capture_output=True, text=True, cwd=folder).stdout
    packages = ("torch", "transformers", "numpy")
    description = {
        "args": asdict(run.config),
        "command": command,
        "commit": commit.strip() or None,
        "versions": {"python": sys.version.split()[0]} | {name: version(name) for name in packages},
        "hardware": {
            "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "cpu_threads": torch.get_num_threads(),
            "processes": distributed.world_size(),
        },
        "parameters": sum(weight.numel() for weight in run.model.parameters()),
    }
    jsonl.write_json(path, description)


# --- Writing --------------------------------------------------------------------------------------


def save(run) -> None:
    """All: write checkpoints/step_NNNNNN, from which --resume continues at the run's place.

    Everything is written and synced under a temporary name, which is then changed: a checkpoint is
    complete, or it is not there. Without an iteration since the last one there is nothing to save.
    """
    iteration = run.resume_point["iteration"]
    if iteration == run.saved:
        return
    whole_weights, optimizer_state = gather_state(run.model, run.optimizer)
    random_states = distributed.gather([run.resume_point["rng"]])  # of each process
    run.saved = iteration
    if not distributed.is_main():
        return
    output_dir = run.config.output_dir
    folder = output_dir / "checkpoints"
    temporary = folder / "unfinished"
    shutil.rmtree(temporary, ignore_errors=True)  # a killed run may have left it
    check_space(output_dir, run.model)
    # Adapters are merged into float32 copies of all weights.
    with utils.freed_memory_given_back(run.model.device):
        weights.save(run.model, temporary, whole_weights)
    run.tokenizer.save_pretrained(temporary)
    logs = output_dir.glob("*_log.jsonl")
    state = run.resume_point | {
        "rng": random_states,
        "total_tokens": run.total_tokens,
        "elapsed": time.perf_counter() - run.start,
        "optimizer": optimizer_state,
        "log_sizes": {log.name: log.stat().st_size for log in logs},
    }
    torch.save(state, temporary / "trainer.pt")
    os.sync()  # before it gets its name, everything is on the disk
    os.replace(temporary, folder / f"step_{iteration:06d}")
    remove_old(output_dir)


def check_space(output_dir: Path, model) -> None:
    """Raise RunEnds where the disk has no room for the weights and AdamW's two of each."""
    num_weights = model.num_parameters() + 2 * model.num_parameters(only_trainable=True)
    needed = 4 * num_weights / 1e9
    free = shutil.disk_usage(output_dir).free / 1e9
    if free < needed:
        raise utils.RunEnds(
            f"error: a checkpoint takes {needed:.3g} GB, and the disk of {output_dir} has"
            f" {free:.3g} GB left; --resume continues from the last one"
        )


def remove_old(output_dir: Path) -> None:
    """Keep the newest checkpoints and the most accurate one, and one trainer's state."""
    paths = llms.finished_checkpoints(output_dir)
    steps = sorted(paths)
    kept_steps = steps[-KEEP:]
    evaluations = jsonl.read_log(output_dir / "eval_log.jsonl")
    rows = [row for row in evaluations if row["step"] in paths and "accuracy" in row]
    if rows:
        best = max(rows, key=lambda row: row["accuracy"])
        kept_steps.append(best["step"])
    for step in steps[:-1]:
        (paths[step] / "trainer.pt").unlink(missing_ok=True)
        if step not in kept_steps:
            # Renamed first: a kill would leave one without all of its files.
            deleted = output_dir / "checkpoints" / "unfinished"
            os.replace(paths[step], deleted)
            shutil.rmtree(deleted, ignore_errors=True)


# --- Resuming -------------------------------------------------------------------------------------


def resume(run) -> None:
    """All: go on from the newest checkpoint, or from the beginning if there is none yet.

    What the logs and transcripts have of later iterations goes, since it is made again.
    """
    output_dir = run.config.output_dir
    state = {}
    saved_weights = {}
    optimizer_state = {}
    if distributed.is_main():
        if not (output_dir / "checkpoints").exists():  # its logs would be written anew
            raise ValueError(f"--resume: {output_dir}/checkpoints is gone")
        paths = llms.finished_checkpoints(output_dir)
        path = paths[max(paths)] if paths else None
        if path is not None:
            saved_weights = weights.read_weights(path, run.model)
            state = torch.load(path / "trainer.pt", map_location="cpu", weights_only=True)
            optimizer_state = state.pop("optimizer")
            if state["iteration"] > run.num_iterations:
                raise ValueError(
                    f"--resume: the run is at {state['iteration']} of {run.num_iterations}"
                )
        print(f"continuing from {path or 'the beginning'}")
        for log in output_dir.glob("*_log.jsonl"):
            os.truncate(log, state.get("log_sizes", {}).get(log.name, 0))
        for transcript in output_dir.glob("*/step_*.jsonl"):
            if int(transcript.stem.removeprefix("step_")) > state.get("iteration", 0):
                transcript.unlink()
    state = distributed.from_main(state)
    if not state:
        return
    scatter_state(run.model, run.optimizer, saved_weights, optimizer_state)
    run.sampler.refresh(run.model)
    run.iteration = state["iteration"]
    run.skipped_in_a_row = state["skipped_in_a_row"]
    run.saved = run.iteration
    run.total_tokens = state["total_tokens"]
    run.start -= state["elapsed"]
    run.train_loader.load_state_dict(state["train_loader"])
    # This seed is used if the number of processes has changed. It differs for each checkpoint.
    distributed.resume_rng_state(state["rng"], new_seed=run.config.seed + 7919 * run.iteration)


# --- The state of one process, and of several -----------------------------------------------------


def gather_state(model, optimizer) -> tuple[dict | None, dict]:
    """All: the complete weights and optimiser state, under the names of the parameters.

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
    """All: load weights and optimiser state that the first process has read.

    The other processes pass {} for both, and each gets its shard.
    """
    has_several = distributed.world_size() > 1
    options = StateDictOptions(
        full_state_dict=has_several, broadcast_from_rank0=has_several, strict=False
    )
    names = set_model_state_dict(model, saved_weights, options=options)
    if names.unexpected_keys:  # they would be left out without a word
        raise ValueError(f"--resume: the model has no weight {names.unexpected_keys[0]}")
    if not distributed.from_main(bool(optimizer_state)):
        return
    set_optimizer_state_dict(model, optimizer, optimizer_state, options=options)
    for group in optimizer.param_groups:
        group["betas"] = tuple(group["betas"])  # it came back as a list
