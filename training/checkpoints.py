"""Checkpoints: each is written completely or not at all, and checked before it is read.

With several processes the first one reads and writes, in the format that one process uses.
"""

import os
import shutil
import zlib
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import distributed
import llms
from logs import jsonl

LOGS = ("train_log.jsonl", "eval_log.jsonl")
TRANSCRIPTS = ("rollouts", "eval")


# --- Writing and finding --------------------------------------------------------------------------


def write(
    output_dir: Path,
    step: int,
    model,
    tokenizer,
    state: dict,
    *,
    weights: dict | None = None,
    accuracy: float | None = None,
    keep: int = 3,
) -> Path | None:
    """Write checkpoints/step_NNNNNN: a Hugging Face directory with the trainer's state in it.

    Everything is written and synced under a temporary name, which is then changed: a checkpoint is
    complete, or it is not there. Afterwards only the newest `keep` checkpoints remain, and the one
    with the highest accuracy. If the disk is full, a warning is printed and training goes on.

    Args:
        state: what `torch.load(weights_only=True)` can read: tensors, numbers, text, lists, dicts.
        weights: the complete weights of a sharded model (`gather_state`); None: the model's own.
        accuracy: the model's accuracy in evaluation, where it has been evaluated at this step.

    Returns:
        The checkpoint's path, or None if it could not be written.
    """
    folder = Path(output_dir) / "checkpoints"
    path = folder / f"step_{step:06d}"
    temporary = folder / f"step_{step:06d}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        model.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)
        torch.save(state, temporary / "trainer.pt")
        manifest = {
            "step": step,
            "accuracy": accuracy,
            "log_sizes": _log_sizes(output_dir),
            "crc32": {file.name: _crc32(file) for file in sorted(temporary.iterdir())},
        }
        jsonl.write_json(temporary / "manifest.json", manifest)
        for file in temporary.iterdir():
            _sync(file)
        _sync(temporary)
        shutil.rmtree(path, ignore_errors=True)
        os.replace(temporary, path)
        _sync(folder)
    # Most often the disk is full, which each library reports by an exception of its own.
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        print(f"warning: no checkpoint written at step {step} ({error})")
        return None
    _remove_old_checkpoints(output_dir, keep)
    return path


def _log_sizes(output_dir) -> dict[str, int]:
    """The sizes in bytes of the logs that exist."""
    sizes = {}
    for name in LOGS:
        log = Path(output_dir) / name
        if log.exists():
            sizes[name] = log.stat().st_size
    return sizes


def _remove_old_checkpoints(output_dir, keep) -> None:
    """Remove all checkpoints but the newest `keep` and the most accurate one."""
    paths = sorted(finished(output_dir))
    accuracies = {}
    for path in paths:
        accuracy = _read_manifest(path).get("accuracy")
        if accuracy is not None:
            accuracies[path] = accuracy
    most_accurate = max(accuracies, key=accuracies.get, default=None)
    for path in paths[:-keep]:
        if path != most_accurate:
            shutil.rmtree(path, ignore_errors=True)


def finished(output_dir: Path) -> list[Path]:
    """Paths of the checkpoints whose writing was finished, in no particular order."""
    return [path.parent for path in Path(output_dir).glob("checkpoints/step_??????/manifest.json")]


def find(output_dir: Path) -> tuple[Path, dict] | None:
    """The newest intact checkpoint as (path, manifest), or None if there is none.

    A damaged checkpoint is reported, and renamed so that nothing takes it for a checkpoint again.
    """
    for path in sorted(finished(output_dir), reverse=True):
        manifest = _read_manifest(path)
        damaged_files = _find_damaged_files(path, manifest)
        if not damaged_files:
            return path, manifest
        names = ", ".join(damaged_files)
        print(f"warning: checkpoint {path} is damaged ({names}); trying the one before")
        shutil.rmtree(path.with_suffix(".damaged"), ignore_errors=True)
        os.replace(path, path.with_suffix(".damaged"))
    return None


def _read_manifest(path: Path) -> dict:
    """A checkpoint's manifest; {} if it cannot be read."""
    try:
        return jsonl.parse((path / "manifest.json").read_bytes(), path)
    except (OSError, ValueError):
        return {}


def _find_damaged_files(path, manifest) -> list[str]:
    """Names of the files in a checkpoint that are not what was written there."""
    if "crc32" not in manifest:
        return ["manifest.json"]
    return [name for name, crc in manifest["crc32"].items() if _crc32(path / name) != crc]


def _crc32(path) -> int | None:
    """The checksum of a file; None if there is no such file."""
    if not path.exists():
        return None
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(2**24):
            crc = zlib.crc32(block, crc)
    return crc


def _sync(path) -> None:
    """Wait until a file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- Reading --------------------------------------------------------------------------------------


def load(path: Path, model, optimizer) -> dict:
    """All processes: load a checkpoint's weights and optimiser state into model and optimiser.

    The first process reads the files, and each of the others gets its shard from there.

    Returns:
        The rest of the trainer's state.

    Raises:
        ValueError: the checkpoint is that of another model.
    """
    weights = {}
    state = {}
    if distributed.is_main():
        weights = llms.read_weights(path, model)
        state = torch.load(path / "trainer.pt", map_location="cpu", weights_only=True)
    optimizer_state = state.pop("optimizer", {})
    scatter_state(model, optimizer, weights, optimizer_state)
    return distributed.from_main(state)


def rewind(output_dir: Path, log_sizes: dict[str, int], last_steps: dict[str, int]) -> None:
    """Cut the logs back to what they were at a checkpoint, and remove later transcripts.

    What is removed will be made again.

    Args:
        log_sizes: the size in bytes of each log; a log that is not named becomes empty.
        last_steps: for each folder of transcripts the step of the last one that stays; in a folder
            that is not named, none stays.
    """
    if not distributed.is_main():
        return
    for name in LOGS:
        log = Path(output_dir) / name
        if not log.exists():
            continue
        content = log.read_bytes()
        size = log_sizes.get(name, 0)
        if size > len(content):
            print(f"warning: {log} has lost lines since the checkpoint was written")
        end_of_last_line = content[:size].rfind(b"\n") + 1
        os.truncate(log, end_of_last_line)
    for folder in TRANSCRIPTS:
        last_step = last_steps.get(folder, -1)
        for file in Path(output_dir, folder).glob("step_??????.jsonl"):
            if int(file.stem.removeprefix("step_")) > last_step:
                file.unlink()


# --- Several processes: between shards and the format of one process ------------------------------


def gather_state(model, optimizer) -> tuple[dict | None, dict]:
    """All processes: the complete weights and optimiser state of a sharded model.

    Returns:
        (weights, optimiser state) in the format of one process. Of several processes the first one
        gets them, on its CPU. On one process the weights are None, because the model has them.
    """
    state = optimizer.state_dict()
    if distributed.world_size() == 1:
        return None, state
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    # Before the first update the optimiser has no state, and asking for it would create one.
    if state["state"]:
        optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
        state_by_name = optimizer_state.get("state", {})
        state["state"] = {}
        # An optimiser on one process identifies parameters by number, not by name.
        for i, (name, _) in enumerate(model.named_parameters()):
            if name in state_by_name:
                state["state"][i] = state_by_name[name]
    for tied_name in model.all_tied_weights_keys:
        weights.pop(tied_name, None)
    return weights, state


def scatter_state(model, optimizer, weights: dict, state: dict) -> None:
    """All processes: load weights and optimiser state that the first process has read.

    The other processes pass {} for both.
    """
    if distributed.world_size() == 1:
        model.load_state_dict(weights, strict=False)  # a tied weight is not there a second time
        if state:
            optimizer.load_state_dict(state)
        return
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    if weights:
        for name, saved_name in model.all_tied_weights_keys.items():
            weights[name] = weights[saved_name]
    set_model_state_dict(model, weights, options=options)
    has_optimizer_state = bool(state) and bool(state["state"])
    if distributed.from_main(has_optimizer_state):
        if state:
            state = _with_parameter_names(state, model)
        set_optimizer_state_dict(model, optimizer, state, options=options)
        for group in optimizer.param_groups:
            group["betas"] = tuple(group["betas"])  # it came back as a list


def _with_parameter_names(state: dict, model) -> dict:
    """An optimiser's state with the names of parameters instead of their numbers."""
    names = [name for name, _ in model.named_parameters()]
    named_groups = []
    for group in state["param_groups"]:
        named_groups.append(group | {"params": [names[i] for i in group["params"]]})
    return {
        "state": {names[i]: value for i, value in state["state"].items()},
        "param_groups": named_groups,
    }
